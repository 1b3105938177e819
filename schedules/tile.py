# SPDX-License-Identifier: Apache-2.0
"""Tiles: sums over blocks of rows in bfloat16 or 8 bits by instructions that multiply small matrices.

before::

    for j, ii, ji, k in T.grid(indptr[i + 1] - indptr[i], 16, 4, feat):
        c[i * 16 + ii, k] = c[i * 16 + ii, k] + a[indptr[i] + j, ii, ji] * b[indices[indptr[i] + j] * 4 + ji, k]

after::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.tile": 4}):
        for ii, ji, k in T.grid(16, 4, feat):
            c[i * 16 + ii, k] = c[i * 16 + ii, k] + a[indptr[i] + j, ii, ji] * b[indices[indptr[i] + j] * 4 + ji, k]

The pass `sparsetir.lower.vector.tile_products` interleaves the rows of ``b`` in memory and lays out the entries. Wins
where the machine has AMX and eight or more rows share each gathered row: BSR, SR-BCRS and row groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import s_tir

from sparsetir.lower.annotations import TILE
from sparsetir.lower.vector.dot_products import order_of
from sparsetir.lower.vector.tile_products import match_body
from sparsetir.schedules.choice import Choice
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import REDUCE

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices

DECLARED = (
    Choice(
        "tiles",
        "Tiles of columns that tile instructions sum side by side, where the target has them; 0 uses none.",
        4,
        "0, 2 or 4",
        lambda tiles: tiles in (0, 2, 4),
        (0, 2, 4),
    ),
)


def use_tiles(
    sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers, *, reorders: bool = True
) -> bool:
    """Annotate the outermost reduction loop; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, the tiles of columns, the target's registers and units, whether sums may be
    taken in another order.
    rewrite: see the module's before and after.
    """
    node = sch.get(block)
    if not choices.tiles or not reorders or choices.carry:
        return False
    kinds = [int(iv.iter_type) for iv in node.iter_vars]
    if REDUCE not in kinds or not match_body(node, registers.units):
        return False
    loops, (_, order) = sch.get_loops(block)[-len(kinds) :], order_of(node)
    if order != sorted(order):
        sch.reorder(*(loops[n] for n in order))
    sch.annotate(loops[order[0]], TILE, choices.tiles)
    return True


__all__ = ["use_tiles"]
