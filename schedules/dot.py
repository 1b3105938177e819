# SPDX-License-Identifier: Apache-2.0
"""Dot kernels: vectorized sums, maxima and minima along contiguous rows, several results at once.

before::

    for j, k in T.grid(indptr[i + 1] - indptr[i], feat):
        o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]

after::

    for j in range(indptr[i + 1] - indptr[i]):
        for k in T.serial(feat, annotations={"sparsetir.dot": 32, "sparsetir.held": 128}):
            o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]

The positions of a sparse row are contiguous too: ``total[i] = total[i] + s[indptr[i] + j]``, or the maximum of these.

A register tile of ``x`` is reused for all results of its row.

Wins wherever the innermost loop reduces along contiguous rows and the reduction may be reordered; a maximum always may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx
from tvm.runtime import DataType

from sparsetir.ir.rewriting import collect, is_along, mentions
from sparsetir.lower.annotations import DOT, HELD, PREFETCH
from sparsetir.lower.loops import COMBINERS
from sparsetir.lower.target.half_floats import HALVES
from sparsetir.lower.vector.vectorize import VECTORS
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import REDUCE, tile_of

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices


LEAST_BITS = 32  # minimum bits of a sum: 16-bit floats are summed in float32
LEAST_LANES = 2


def tile_dot(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Annotate the innermost loop of a reduction block; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, the tile and how many results ahead gathered rows are fetched, the target's
    registers.
    rewrite: see the module's before and after.
    """
    node = sch.get(block)
    store = node.body
    if not isinstance(store, tirx.BufferStore) or not node.iter_vars:
        return False
    if not isinstance(store.value, COMBINERS):
        return False
    along, loop = node.iter_vars[-1], sch.get_loops(block)[-1]
    dtype = DataType(str(store.buffer.ty.dtype))
    bits = LEAST_BITS if str(dtype) in HALVES else int(dtype.bits)
    if int(along.iter_type) != REDUCE or bits < LEAST_BITS:
        return False
    loads = [x for x in collect(store.value.b, ir.TensorLoad) if mentions(x, [along.var])]
    if not loads or not all(is_along(x, along.var) for x in loads):
        return False
    extent = sch.get(loop).extent
    is_ragged = bool(collect(extent, ir.TensorLoad))
    # Ragged rows are short and their remainder is scalar, so a sum uses one vector only.
    lanes = tile_of(extent, (1 if is_ragged else VECTORS) * registers.bits // bits)
    if lanes < LEAST_LANES:
        return False
    tile = 0 if is_ragged else held(extent, choices.tile, registers, bits)
    lanes = min(lanes, tile) if tile >= LEAST_LANES else lanes
    sch.annotate(loop, DOT, lanes)
    if tile >= lanes and len(sch.get_loops(block)) > 1:
        sch.annotate(loop, HELD, tile)
    if choices.prefetch and len(sch.get_loops(block)) > 1 and not is_ragged:
        sch.annotate(sch.get_loops(block)[-2], PREFETCH, choices.prefetch)
    return True


def held(extent: Any, tile: int, registers: Registers, bits: int) -> int:
    """Return the number of elements of a row kept in registers, at most `tile` and half of the registers."""
    return tile_of(extent, min(tile, registers.count // 2 * registers.bits // bits))


__all__ = ["tile_dot"]
