# SPDX-License-Identifier: Apache-2.0
"""Factoring out loop-invariant operands: the other factors are summed first, and multiplied once.

before::

    for j in range(indptr_j[i + 1] - indptr_j[i]):
        for k in T.serial(indptr_k[...] - indptr_k[indptr_j[i] + j], annotations={"sparsetir.factor": 1}):
            for r in T.vectorized(32):
                d[i, r] = d[i, r] + t[...] * b[indices_j[indptr_j[i] + j], r] * c[indices_k[...], r]

after::

    for j in range(indptr_j[i + 1] - indptr_j[i]):
        if indptr_k[...] - indptr_k[indptr_j[i] + j] > 0:
            fiber = T.alloc_local((32,))
            for r in T.vectorized(32):
                fiber[r] = 0
            for k in range(indptr_k[...] - indptr_k[indptr_j[i] + j]):
                for r in T.vectorized(32):
                    fiber[r] = fiber[r] + t[...] * c[indices_k[...], r]
            for r in T.vectorized(32):
                d[i, r] = d[i, r] + b[indices_j[indptr_j[i] + j], r] * fiber[r]

The sum of a fiber and that of the row are both in registers then, and ``b`` is read once for a fiber. The note is for
sums that may be reordered; a loop without a fixed factor is left as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.marks import FACTOR, refused
from sparsetir.lower.nests import SERIAL, each_loop, with_, without
from sparsetir.lower.rewriting import all_same, alloc, collect, mentions, seq, substitute

MOST_LANES = 1024


@dataclass(frozen=True)
class Sum:
    """``store.buffer[store.indices] += fixed * moving`` below a loop, for every step of the `lanes`."""

    store: tirx.BufferStore
    lanes: list[tirx.For]
    fixed: list[ir.Expr]
    moving: list[ir.Expr]


def factors(expr: ir.Expr) -> list[ir.Expr]:
    """What a product is made of, in order."""
    return [*factors(expr.a), *factors(expr.b)] if isinstance(expr, tirx.Mul) else [expr]


def product(parts: list[ir.Expr]) -> ir.Expr:
    """The product of `parts`, from the left."""
    return math.prod(parts[1:], start=parts[0])


def _is_update(store: tirx.BufferStore) -> bool:
    """Whether a value, which is not made of the array, is added to what the element holds."""
    value, loads = store.value, [x for x in collect(store, ir.TensorLoad) if x.source.same_as(store.buffer)]
    if not isinstance(value, tirx.Add) or len(loads) != 1 or not value.a.same_as(loads[0]):
        return False
    return all_same(list(loads[0].indices), list(store.indices))


def _most(extent: ir.Expr) -> int | None:
    """A constant that an extent does not exceed."""
    bound = extent.b if isinstance(extent, tirx.FloorMod) else extent
    return int(bound) if isinstance(bound, tirx.IntImm) else None


def match(loop: tirx.For) -> Sum | None:
    """The sum over `loop` and its fixed factors; None where there is nothing to take out."""
    lanes: list[tirx.For] = []
    store = loop.body
    while isinstance(store, tirx.For):
        lanes.append(store)
        store = store.body
    if loop.kind != SERIAL or not isinstance(store, tirx.BufferStore) or not _is_update(store):
        return None
    own, sizes = [loop.loop_var], [_most(f.extent) for f in lanes]
    if mentions(list(store.indices), own) or any(mentions(f.extent, own) for f in lanes):
        return None
    if None in sizes or math.prod(n or 1 for n in sizes) > MOST_LANES:
        return None
    if not all(mentions(list(store.indices), [f.loop_var]) for f in lanes):
        return None
    parts = factors(store.value.b)
    moving = [x for x in parts if mentions(x, own)]
    fixed = [x for x in parts if not mentions(x, own)]
    if not moving or not any(collect(x, ir.TensorLoad) for x in fixed):
        return None
    return Sum(store, lanes, fixed, moving)


def factor(loop: tirx.For) -> tirx.Stmt | None:
    """`loop` with its terms summed on their own; None where no factor is fixed."""
    found = match(loop)
    if found is None:
        return None
    store, lanes, kind = found.store, found.lanes, str(found.store.buffer.ty.dtype)
    size = math.prod(_most(f.extent) or 1 for f in lanes)
    fiber = tirx.decl_buffer([size], kind, name="fiber", scope="local", layout=None)
    at = [_element(lanes)]
    held = tirx.BufferLoad(fiber, at)

    term = _around(lanes, tirx.BufferStore(fiber, held + product(found.moving), at))
    sums = with_(loop, body=term, notes=without(loop, FACTOR))
    clear = _around(lanes, tirx.BufferStore(fiber, const(0, kind), at))
    total = store.value.a + product([*found.fixed, held])
    finish = _around(lanes, tirx.BufferStore(store.buffer, total, store.indices))
    # Nothing times a factor that is not finite is not nothing.
    runs = loop.extent > const(0, str(loop.extent.ty.dtype))
    return tirx.IfThenElse(runs, seq(*alloc(fiber), clear, sums, finish), None)


def _element(lanes: list[tirx.For]) -> ir.Expr:
    """Subscript of a lane's place among those of all lanes."""
    flat: ir.Expr = const(0, str(lanes[0].loop_var.ty.dtype) if lanes else "int32")
    for lane in lanes:
        flat = flat * const(_most(lane.extent) or 1, str(flat.ty.dtype)) + lane.loop_var
    return tvm.sym.Analyzer().simplify(flat)


def _around(lanes: list[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
    """`body` for every lane, with loop variables of its own."""
    fresh = {lane.loop_var: Var(str(lane.loop_var.name), lane.loop_var.ty) for lane in lanes}
    body = substitute(body, fresh)
    for lane in reversed(lanes):
        body = with_(lane, var=fresh[lane.loop_var], body=body, notes={})
    return body


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.FactorInvariants")
def FactorInvariants(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Take every annotated sum of a function apart; a note that fits nothing is dropped."""

    marked = lambda loop: factor(loop) if FACTOR in loop.annotations else None  # noqa: E731
    why = "none of its factors is the same in every step"
    return each_loop(func, outer=marked, inner=lambda loop: refused(loop, FACTOR, why))


__all__ = ["FactorInvariants", "factor", "factors", "match", "product"]
