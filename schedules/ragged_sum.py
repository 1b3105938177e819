# SPDX-License-Identifier: Apache-2.0
"""Ragged sums: one result for each row of unknown length, its entries in the lanes of vectors.

before::

    for j in range(indptr[i + 1] - indptr[i]):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 4}):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

Wins with four lanes for short rows of varying lengths (on Zen 3 and Sapphire Rapids), where the processor mispredicts
the loop exit. LLVM's own vectors win elsewhere if it may take terms in another order; if it may not, eight lanes win
(on Zen 4) where rows have dozens of entries and varying lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx
from tvm.runtime import DataType

from sparsetir.ir.rewriting import collect
from sparsetir.lower.annotations import SUM
from sparsetir.schedules.choice import Choice, is_power
from sparsetir.schedules.dot import LEAST_BITS
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import REDUCE

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices


DECLARED = (
    Choice(
        "lanes",
        "Nonzeros of a ragged row that are summed side by side, the last of them under a mask; a power of two. 0 "
        "leaves the loop to LLVM.",
        0,
        "0 or a power of two from 2 on",
        lambda lanes: lanes == 0 or (is_power(lanes) and lanes > 1),
        (0, 4, 8),
    ),
)


def tile_sum(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Annotate the innermost loop of a ragged reduction; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, the number of lanes.
    rewrite: see the module's before and after.
    """
    node, lanes = sch.get(block), choices.lanes
    store = node.body
    if not lanes or not isinstance(store, tirx.BufferStore) or not node.iter_vars:
        return False
    loop, bits = sch.get_loops(block)[-1], int(DataType(str(store.buffer.ty.dtype)).bits)
    is_sum = isinstance(store.value, tirx.Add) and int(node.iter_vars[-1].iter_type) == REDUCE
    if not is_sum or bits < LEAST_BITS or not collect(sch.get(loop).extent, ir.TensorLoad):
        return False
    sch.annotate(loop, SUM, lanes)
    return True


__all__ = ["tile_sum"]
