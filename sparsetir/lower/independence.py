# SPDX-License-Identifier: Apache-2.0
"""Whether the steps of an iteration's outermost loop may run at the same time."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import INDEPENDENT, Program, SpIter, accesses, cast, const
from sparsetir.lower.rewriting import all_same, mentions


def is_parallel(iteration: SpIter, program: Program) -> bool:
    """Whether the outermost loop's steps touch different elements.

    They do when every store and every load of a stored buffer subscripts one dimension by each of the
    loop's variables, or when all of them name one element by a formula that tells the variables apart:
    then two steps never meet in an element. The annotation ``independent`` promises it.
    """
    first = iteration.entries[0]
    if set(first.kinds) != {"S"} or not all(a.unique for a in first.axes):
        return False
    if INDEPENDENT in iteration.block.annotations:
        return True
    touched = list(accesses(iteration.block.body))
    if iteration.block.init is not None:
        touched += list(accesses(iteration.block.init))
    local = _allocated_inside(iteration.block)
    stored = {b for b, _, is_store in touched if is_store and b not in local}
    return all(_is_apart([i for b, i, _ in touched if b is buffer], iteration) for buffer in _distinct(stored, touched))


def _distinct(stored: set[Var], touched: list[tuple[Var, list[ir.Expr], bool]]) -> list[Var]:
    """The stored buffers, each as the object that its accesses name."""
    return list({b: b for b, _, _ in touched if b in stored}.values())


def _is_apart(accesses: list[list[ir.Expr]], iteration: SpIter) -> bool:
    """Whether different steps of the outermost loop use different elements of a buffer."""
    variables = list(iteration.entries[0].vars)
    own = [_whole(accesses[0], v) for v in variables]
    if None not in own and all([_whole(i, v) for v in variables] == own for i in accesses):
        return True
    return all(all_same(i, accesses[0]) for i in accesses) and injective(accesses[0], variables, iteration)


def injective(indices: list[ir.Expr], variables: list[Var], iteration: SpIter) -> bool:
    """Whether elements with different values of `variables` are different ones."""
    if all(any(i.same_as(v) for i in indices) for v in variables):
        return True
    axis_of = dict(zip(iteration.vars, iteration.axes, strict=True))
    used = [v for v in iteration.vars if mentions(indices, [v])]
    if any(v not in used for v in variables):
        return False
    ranges = {v: ir.Range(const(0, axis_of[v].idtype), cast(axis_of[v].length, axis_of[v].idtype)) for v in used}
    found = sym.detect_iter_map(indices, ranges, tirx.const(True, "bool"), "bijective", False)
    return len(found.indices) > 0


def _whole(indices: list[ir.Expr], var: Var) -> int | None:
    """Dimension that `var` alone subscripts."""
    return next((n for n, i in enumerate(indices) if i.same_as(var)), None)


def _allocated_inside(block: s_tir.SBlock) -> set[Var]:
    found: set[Var] = set(block.alloc_buffers)
    views: dict[Var, Var] = {}

    def on_decl(node: tirx.DeclBuffer) -> None:
        if node.data.args:
            views[node.buffer] = node.data.args[0]

    callbacks = [
        (s_tir.SBlock, lambda b: found.update(b.alloc_buffers)),
        (tirx.AllocBuffer, lambda a: found.add(a.buffer)),
        (tirx.DeclBuffer, on_decl),
    ]
    tvm_ffi.structural_walk(block.body, callbacks)
    return found | {v for v, s in views.items() if s in found}


