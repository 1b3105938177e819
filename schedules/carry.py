# SPDX-License-Identifier: Apache-2.0
"""Split rows: every chunk has the same number of entries, though one row has most of them.

before::

    for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
        y[i] = 0
        for j in range(indptr[i + 1] - indptr[i]):
            y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    for i in T.serial(m, annotations={"sparsetir.chunks": 16, "sparsetir.carry": 1}):
        ...  # the same; lowered, each chunk keeps what it has of a row that goes on, and one more loop adds it up

Wins where a row has much more than its share of the entries, a hub of a graph or a dense row: whole rows leave all
other threads waiting for the one that has it. The order of the sum is another, so the program must leave it open; where
a row does more than sums, maxima or minima of its entries' terms it stays whole (`sparsetir.lower.rows.row_parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import s_tir

from sparsetir.lower.marks import CARRY
from sparsetir.schedules.choice import Choice

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices

DECLARED = (
    Choice(
        "carry",
        "1 splits rows that reach into several chunks, where sums may be reordered; 0 keeps rows whole.",
        0,
        "0 or 1",
        lambda carry: carry in (0, 1),
    ),
)


def split_rows(sch: s_tir.Schedule, loop: Any, choices: Choices, *, reorders: bool) -> bool:
    """Allow chunks of a shared loop to begin and end inside a row; False (and no change) where that is not wanted.

    args: the schedule, a loop that `share_rows` annotated, whether rows are split, whether sums may be reordered.
    rewrite: see the module's before and after.
    """
    if not choices.carry or not reorders:
        return False
    sch.annotate(loop, CARRY, choices.carry)
    return True


__all__ = ["split_rows"]
