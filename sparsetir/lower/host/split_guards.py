# SPDX-License-Identifier: Apache-2.0
"""Test what a load relies on before the load: LLVM code for ``and`` evaluates both of its sides.

before::

    if u < n and 0 <= indices[u] and indices[u] < m:
        ...

after::

    if u < n:
        if 0 <= indices[u] and indices[u] < m:
            ...

Where `u` is a lane of a vector loop, a whole vector would be read past the end of the array. TVM's schedules append the
bound of a split loop to the conditions that are there, so a bound is moved ahead of the loads it guards. It is the last
pass but those that only check: nothing puts the conditions together again. A choice between values in a choice is
turned around for the same reason: ``T.if_then_else(a, T.if_then_else(b, x, 0), 0)`` is one test of ``a and b`` for TVM.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Call

from sparsetir import op
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect, conjunction, conjuncts, mentions, renewed, same
from sparsetir.walks import structural_mutate


def _loads(condition: ir.Expr) -> list[ir.TensorLoad]:
    """The loads that may leave their array: not those of a fixed element."""
    found = collect(condition, ir.TensorLoad)
    return [x for x in found if not all(isinstance(i, tirx.IntImm) for i in x.indices)]


def levels(condition: ir.Expr) -> list[ir.Expr]:
    """The conditions to test one after the other, each of which may be evaluated once those before it hold."""
    groups: list[list[ir.Expr]] = []
    known: list[ir.TensorLoad] = []
    for part in _bounds_first(conjuncts(condition)):
        fresh = [x for x in _loads(part) if not any(same(x, y) for y in known)]
        if fresh or not groups:
            groups.append([])
        groups[-1].append(part)
        known += fresh
    return [conjunction(group) for group in groups]


def _bounds_first(parts: list[ir.Expr]) -> list[ir.Expr]:
    """The conditions in their order, but the bounds of a variable before loads at positions that it enters."""
    ordered: list[ir.Expr] = []
    for part in parts:
        first = next((k for k, other in enumerate(ordered) if _relies_on(other, part)), len(ordered))
        if any(_relies_on(part, other) for other in ordered[first:]):
            first = len(ordered)
        ordered.insert(first, part)
    return ordered


def _relies_on(part: ir.Expr, other: ir.Expr) -> bool:
    """Whether `part` loads at a position into which a variable enters that `other` compares."""
    loaded = [v for load in _loads(part) for i in load.indices for v in collect(i, ir.Var)]
    bare = tvm_ffi.structural_map(other, (ir.TensorLoad, lambda load: tirx.const(0, str(load.ty.dtype))))
    return bool(loaded) and mentions(bare, loaded)


def _on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
    inner = mutator.default_mutate(node)
    parts = levels(inner.condition)
    if len(parts) < 2:
        return inner
    body, otherwise = inner.then_case, inner.else_case
    for condition in reversed(parts):
        body = tirx.IfThenElse(condition, body, otherwise)
        otherwise = None if otherwise is None else renewed(otherwise)
    return body


def _on_call(node: Call, mutator: Any) -> Call:
    inner = mutator.default_mutate(node)
    if not op.is_if_then_else(inner):
        return inner
    condition, value, otherwise = inner.args
    for part in reversed(levels(condition) or [condition]):
        value = tirx.if_then_else(part, _apart(value, otherwise), otherwise)
    return value


def _apart(value: ir.Expr, otherwise: ir.Expr) -> ir.Expr:
    """An inner choice turned around: TVM makes one of two with the same alternative, and tests both at once."""
    if not op.is_if_then_else(value) or not same(value.args[2], otherwise) or not _loads(value.args[0]):
        return value
    return tirx.if_then_else(tirx.Not(value.args[0]), otherwise, value.args[1])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SplitGuards")
def SplitGuards(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Nest the conditions of a function."""
    body = structural_mutate(func.body, [(tirx.IfThenElse, _on_if), (Call, _on_call)])
    return with_body(func, body)
