# SPDX-License-Identifier: Apache-2.0
"""Ragged sums: one result for each row of unknown length, its entries in the lanes of vectors.

before::

    for j in range(indptr[i + 1] - indptr[i]):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 4}):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

Wins with four lanes for short rows of varying lengths (on Zen 3 and Sapphire Rapids), where the processor mispredicts
the loop exit; for the shortest of them, with eight or sixteen lanes of staged terms (on Zen 3), for which the loop is
annotated with ``"sparsetir.staged"`` as well (`sparsetir.lower.vector.ragged_sums`). LLVM's own vectors win elsewhere
if it may take terms in another order; if it may not, eight lanes win (on Zen 4) where rows have dozens of entries and
varying lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx
from tvm.runtime import DataType

from sparsetir.ir.rewriting import collect
from sparsetir.lower.annotations import STAGED, SUM
from sparsetir.schedules.choice import Choice, is_power
from sparsetir.schedules.dot import LEAST_BITS
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import REDUCE

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices

STAGED_LANES = 8
MOST_STAGED = 4096
MOST_LANES = 64

DECLARED = (
    Choice(
        "lanes",
        "Nonzeros of a ragged row that are summed side by side, the last of them under a mask; a power of two. 0 "
        "leaves the loop to LLVM.",
        0,
        f"0 or a power of two from 2 to {MOST_LANES}",
        lambda lanes: lanes == 0 or (is_power(lanes) and 1 < lanes <= MOST_LANES),
        (0, 4, 8, 16),
    ),
)

STAGED_DECLARED = (
    Choice(
        "staged",
        "Neighbouring rows whose terms are computed into a buffer before each row is summed in `lanes`, 8 if there are "
        "none; 0 sums each row as it is read.",
        0,
        f"from 0 to {MOST_STAGED}",
        lambda rows: 0 <= rows <= MOST_STAGED,
        (0, 64),
    ),
)


def tile_sum(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Annotate the innermost loop of a ragged reduction; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, the number of lanes and of staged rows.
    rewrite: see the module's before and after.
    """
    node, lanes = sch.get(block), choices.lanes or (STAGED_LANES if choices.staged else 0)
    store = node.body
    if not lanes or not isinstance(store, tirx.BufferStore) or not node.iter_vars:
        return False
    loop, bits = sch.get_loops(block)[-1], int(DataType(str(store.buffer.ty.dtype)).bits)
    is_sum = isinstance(store.value, tirx.Add) and int(node.iter_vars[-1].iter_type) == REDUCE
    if not is_sum or bits < LEAST_BITS or not collect(sch.get(loop).extent, ir.TensorLoad):
        return False
    sch.annotate(loop, SUM, lanes)
    if choices.staged:
        sch.annotate(loop, STAGED, choices.staged)
    return True


__all__ = ["tile_sum"]
