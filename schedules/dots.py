# SPDX-License-Identifier: Apache-2.0
"""Dot kernels: sums along contiguous rows in vectors, several results at once.

before::

    for j, k in T.grid(indptr[i + 1] - indptr[i], feat):
        o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]

after::

    for j in range(indptr[i + 1] - indptr[i]):
        for k in T.serial(feat, annotations={"sparsetir.dot": 16}):
            o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]

Wins wherever the innermost loop sums along rows that are dense and contiguous, and the order of the sum is open.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx
from tvm.runtime import DataType

from sparsetir.lower.insert_prefetch import PREFETCH
from sparsetir.lower.promote_halves import HALVES
from sparsetir.lower.rewriting import collect, mentions
from sparsetir.lower.vectorize_dots import DOT
from sparsetir.schedules.choices import Choices
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.rows import REDUCE

VECTORS = 2  # of each sum: with four sums they hide the latency of the multiply-add units
LEAST_BITS = 32  # of a sum: 16-bit floats are summed in float32


def tile_dot(sch: s_tir.Schedule, block: Any, choices: Choices | None, registers: Registers) -> bool:
    """Annotate the innermost loop of a reduction block; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, how many results ahead gathered rows are fetched, the target's registers.
    rewrite: see the module's before and after.
    """
    node = sch.get(block)
    store = node.body
    if not isinstance(store, tirx.BufferStore) or not node.iter_vars or not isinstance(store.value, tirx.Add):
        return False
    along, loop = node.iter_vars[-1], sch.get_loops(block)[-1]
    dtype = DataType(str(store.buffer.ty.dtype))
    bits = LEAST_BITS if str(dtype) in HALVES else int(dtype.bits)
    if int(along.iter_type) != REDUCE or collect(sch.get(loop).extent, ir.TensorLoad) or bits < LEAST_BITS:
        return False
    loads = [x for x in collect(store.value.b, ir.TensorLoad) if mentions(x, [along.var])]
    if not loads or not all(_is_contiguous(x, along.var) for x in loads):
        return False
    sch.annotate(loop, DOT, VECTORS * registers.bits // bits)
    if choices is not None and choices.prefetch and len(sch.get_loops(block)) > 1:
        sch.annotate(sch.get_loops(block)[-2], PREFETCH, choices.prefetch)
    return True


def _is_contiguous(load: ir.TensorLoad, var: Any) -> bool:
    """Whether only the last subscript moves with `var`, by one."""
    *others, last = load.indices
    return bool(last.same_as(var)) and not mentions(others, [var])


__all__ = ["tile_dot"]
