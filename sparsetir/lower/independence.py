# SPDX-License-Identifier: Apache-2.0
"""Whether the steps of an iteration's outermost loop may run at the same time."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.ir import Program, SpIter, accesses


def is_parallel(iteration: SpIter, program: Program) -> bool:
    """Whether the outermost loop's steps touch different elements.

    They do when every store and every load of a stored buffer subscripts one dimension by each of the
    loop's variables: then two steps never meet in an element.
    """
    first = iteration.entries[0]
    if set(first.kinds) != {"S"} or not all(a.unique for a in first.axes):
        return False
    touched = list(accesses(iteration.block.body))
    if iteration.block.init is not None:
        touched += list(accesses(iteration.block.init))
    local = _allocated_inside(iteration.block)
    stored = {b for b, _, is_store in touched if is_store and b not in local}
    where: dict[Var, list[int | None]] = {}
    for buffer, indices, _ in touched:
        if buffer not in stored:
            continue
        own = [_whole(indices, v) for v in first.vars]
        if None in own or where.setdefault(buffer, own) != own:
            return False
    return True


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


