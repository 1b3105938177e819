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

from sparsetir.ir import const
from sparsetir.lower.marks import FACTOR, refused
from sparsetir.lower.nests import SERIAL, Update, each_lane, each_loop, most, place_of, with_, without
from sparsetir.lower.rewriting import alloc, collect, factors, mentions, product, seq

MOST_LANES = 1024


@dataclass(frozen=True)
class Sum:
    """``store.buffer[store.indices] += fixed * moving`` below a loop, for every step of the `lanes`."""

    store: tirx.BufferStore
    lanes: list[tirx.For]
    fixed: list[ir.Expr]
    moving: list[ir.Expr]


def match(loop: tirx.For) -> Sum | None:
    """The sum over `loop` and its fixed factors; None where there is nothing to take out."""
    lanes: list[tirx.For] = []
    store = loop.body
    while isinstance(store, tirx.For):
        lanes.append(store)
        store = store.body
    update = Update.of(store)
    if loop.kind != SERIAL or update is None or not update.is_alone:
        return None
    own, sizes = [loop.loop_var], [most(f.extent) for f in lanes]
    if mentions(list(store.indices), own) or any(mentions(f.extent, own) for f in lanes):
        return None
    if None in sizes or math.prod(n or 1 for n in sizes) > MOST_LANES:
        return None
    if not all(mentions(list(store.indices), [f.loop_var]) for f in lanes):
        return None
    parts = factors(update.term)
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
    size = math.prod(most(f.extent) or 1 for f in lanes)
    fiber = tirx.decl_buffer([size], kind, name="fiber", scope="local", layout=None)
    at = [place_of(lanes)]
    held = tirx.BufferLoad(fiber, at)

    term = each_lane(lanes, tirx.BufferStore(fiber, held + product(found.moving), at))
    sums = with_(loop, body=term, notes=without(loop, FACTOR))
    clear = each_lane(lanes, tirx.BufferStore(fiber, const(0, kind), at))
    total = store.value.a + product([*found.fixed, held])
    finish = each_lane(lanes, tirx.BufferStore(store.buffer, total, store.indices))
    # Nothing times a factor that is not finite is not nothing.
    runs = loop.extent > const(0, str(loop.extent.ty.dtype))
    return tirx.IfThenElse(runs, seq(*alloc(fiber), clear, sums, finish), None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.FactorInvariants")
def FactorInvariants(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Take every annotated sum of a function apart; an annotation that fits nothing is refused."""

    marked = lambda loop: factor(loop) if FACTOR in loop.annotations else None  # noqa: E731
    why = "none of its factors is the same in every step"
    return each_loop(func, outer=marked, inner=lambda loop: refused(loop, FACTOR, why))


__all__ = ["FactorInvariants", "factor", "match"]
