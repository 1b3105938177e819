# SPDX-License-Identifier: Apache-2.0
"""Nested sums: factors invariant in the innermost sum are multiplied once for each fiber, not for each entry.

before::

    for i in range(n_i):
        for j in range(indptr_j[i + 1] - indptr_j[i]):
            for k, r in T.grid(indptr_k[...] - indptr_k[indptr_j[i] + j], rank):
                d[i, r] = d[i, r] + t[...] * b[indices_j[indptr_j[i] + j], r] * c[indices_k[...], r]

after::

    for i in T.serial(n_i, annotations={"sparsetir.chunks": 2}):
        for r_0 in range((rank + 63) // 64):
            for j in range(indptr_j[i + 1] - indptr_j[i]):
                for k in range(indptr_k[...] - indptr_k[indptr_j[i] + j]):
                    for r_1 in T.vectorized(64):
                        fiber[r_1] = fiber[r_1] + t[...] * c[indices_k[...], r_0 * 64 + r_1]
                for r_1 in T.vectorized(64):
                    acc[r_1] = acc[r_1] + b[indices_j[indptr_j[i] + j], r_0 * 64 + r_1] * fiber[r_1]
            for r_1 in T.vectorized(64):
                d[i, r_0 * 64 + r_1] = acc[r_1]

The tile is as wide as for a single sum: the fiber's accumulators stay in registers, and are enough to hide the latency
of the multiply-add units. Where both do not fit, the row's accumulators are in the nearest cache and are accessed once
a fiber. A tile of half the width was slower (kinship, rank 64: 84 against 70 us).

The sketch adds an annotation; the passes `FactorInvariants`, `InterchangeLoops` and `PromoteRegisters` rewrite the
flat loops.

Wins where fibers have several entries: one load and one multiplication less for each of them. With one entry in each
fiber both orders cost the same. The sum must be reorderable and values promised to be finite: an infinite factor of an
empty or overflowing sum gives another result.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.ir.rewriting import collect, factors, mentions
from sparsetir.lower.annotations import FACTOR

REDUCE = 2


def fixed_sum(sch: s_tir.Schedule, block: Any) -> Any | None:
    """Return the innermost loop that a block sums over, if its terms have factors invariant in it; else None.

    args: the schedule, an innermost block whose loops are as they were.
    """
    node = sch.get(block)
    store, loops = node.body, sch.get_loops(block)
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    reduced = [n for n, iv in enumerate(node.iter_vars) if int(iv.iter_type) == REDUCE]
    if not reduced or len(loops) < len(node.iter_vars):
        return None
    along = node.iter_vars[reduced[-1]].var
    parts = factors(store.value.b)
    fixed = [x for x in parts if not mentions(x, [along]) and collect(x, ir.TensorLoad)]
    if not fixed or len(fixed) == len(parts):
        return None
    return loops[reduced[-1] - len(node.iter_vars)]


def take_factors(sch: s_tir.Schedule, loop: Any) -> bool:
    """Annotate a sum so that its invariant factors are multiplied once; False if there is no such sum.

    args: the schedule, a loop found by `fixed_sum`, or None.
    rewrite: see the module's before and after.
    """
    if loop is not None:
        sch.annotate(loop, FACTOR, 1)
    return loop is not None


__all__ = ["fixed_sum", "take_factors"]
