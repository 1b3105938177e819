# SPDX-License-Identifier: Apache-2.0
"""Dot products: sums over entries in bfloat16 or 8 bits by instructions that multiply two or four terms at once.

before::

    for j, k in T.grid(indptr[i + 1] - indptr[i], feat):
        c[i, k] = c[i, k] + a[indptr[i] + j] * b[indices[indptr[i] + j], k]

after::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.unit": 128}):
        for k in range(feat):
            c[i, k] = c[i, k] + a[indptr[i] + j] * b[indices[indptr[i] + j], k]

The pass `sparsetir.lower.vector.dot_products` interleaves the rows of ``b`` in registers. Wins where the machine has
AVX512-BF16 or AVX512-VNNI and the entries of a sum lie side by side: rows of CSR, and of blocks with an even number of
columns (for 8 bits a multiple of four).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import s_tir

from sparsetir.lower.annotations import UNIT
from sparsetir.lower.vector.dot_products import match_body, order_of
from sparsetir.schedules.choice import Choice
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import REDUCE

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices

DECLARED = (
    Choice(
        "units",
        "1 uses dot-product instructions where the target has them and they apply, 0 vector arithmetic.",
        1,
        "0 or 1",
        lambda units: units in (0, 1),
        (0, 1),
    ),
)


def use_dot_product(
    sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers, *, reorders: bool = True
) -> bool:
    """Annotate the outermost reduction loop; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, whether to use units and the columns of a tile, the target's registers and
    units, whether sums may be taken in another order.
    rewrite: see the module's before and after.
    """
    node = sch.get(block)
    if not choices.units or not reorders:
        return False
    if choices.carry:  # parts of a row are added up in another array, of another dtype
        return False
    kinds = [int(iv.iter_type) for iv in node.iter_vars]
    if REDUCE not in kinds or not match_body(node, registers.units):
        return False
    loops, (_, order) = sch.get_loops(block)[-len(kinds) :], order_of(node)
    if order != sorted(order):
        sch.reorder(*(loops[n] for n in order))
    sch.annotate(loops[order[0]], UNIT, choices.tile)
    return True


__all__ = ["use_dot_product"]
