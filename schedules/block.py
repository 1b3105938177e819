# SPDX-License-Identifier: Apache-2.0
"""Sums over blocks: one result for each row of a block, an accumulator for each of its elements.

before::

    for jo, ii, ji in T.grid(indptr[io + 1] - indptr[io], 4, 4):
        y[io * 4 + ii] = y[io * 4 + ii] + a[jo, ii, ji] * x[indices[indptr[io] + jo] * 4 + ji]

after::

    for jo, ii in T.grid(indptr[io + 1] - indptr[io], 4):
        for ji in T.serial(4, annotations={"sparsetir.block": 1}):
            y[io * 4 + ii] = y[io * 4 + ii] + a[jo, ii, ji] * x[indices[indptr[io] + jo] * 4 + ji]

Wins where entries come in blocks: SpMV over `formats.bsr` reads one index a block and a vector of x for all of its
rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx
from tvm.runtime import DataType

from sparsetir.ir.rewriting import collect, mentions
from sparsetir.lower.annotations import BLOCK
from sparsetir.schedules.dot import LEAST_BITS
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import REDUCE, store_of

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices


LEAST = 2  # elements of a block
OTHERS = 4  # registers not available for accumulators


def tile_block(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Annotate the loops over a block below a ragged sum; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, (no choice), the registers that running sums must fit into.
    rewrite: see the module's before and after.
    """
    node = sch.get(block)
    store = store_of(node.body)
    if store is None or not isinstance(store.value, tirx.Add):
        return False
    block_loops = sch.get_loops(block)[-len(node.iter_vars) :]
    kinds = [int(iv.iter_type) for iv in node.iter_vars]
    ragged = [n for n, loop in enumerate(block_loops) if collect(sch.get(loop).extent, ir.TensorLoad)]
    if not ragged or kinds[ragged[-1]] != REDUCE or ragged[-1] == len(block_loops) - 1:
        return False
    below = range(ragged[-1] + 1, len(block_loops))
    extents = [sch.get(block_loops[n]).extent for n in below]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return False
    rows = [n for n in below if kinds[n] != REDUCE]
    columns = [n for n in below if kinds[n] == REDUCE]
    is_last = mentions([store.indices[-1]], [node.iter_vars[n].var for n in rows])
    bits = int(DataType(str(store.buffer.ty.dtype)).bits)
    count = math.prod(int(extent) for extent in extents)
    is_listed = bool(collect(store.indices, ir.TensorLoad))  # Permuted rows have other loops.
    if bits < LEAST_BITS or count < LEAST or is_listed or (rows and not is_last):
        return False
    width = math.prod(int(extents[n - below[0]]) for n in columns)
    beside = width if width > 1 else count  # elements of a vector: those of a row, or one of each row
    vectors = count // beside * -(-beside * bits // registers.bits)
    if not columns or vectors > registers.count - OTHERS:
        return False
    sch.reorder(*(block_loops[n] for n in [*rows, *columns]))
    sch.annotate(block_loops[columns[-1]], BLOCK, 1)
    return True


__all__ = ["tile_block"]
