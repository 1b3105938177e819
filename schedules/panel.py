# SPDX-License-Identifier: Apache-2.0
"""Panel kernels: row kernels for one panel of columns at a time, with the gathered operand packed.

before::

    for i in range(m):
        for j, k in T.grid(indptr[i + 1] - indptr[i], feat):
            c[k, i] = c[k, i] + a[...] * b[k, indices[...]]

after::

    for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
        for k_0 in T.serial((feat + 63) // 64, annotations={"sparsetir.panel": 64}):
            for j in range(indptr[i + 1] - indptr[i]):
                for k_1 in T.vectorized(64):
                    c_local[k_1] = c_local[k_1] + a[...] * b[k_0 * 64 + k_1, indices[...]]
            for k_1 in T.vectorized(64):
                c[k_0 * 64 + k_1, i] = c_local[k_1]

The pass `sparsetir.lower.rows.panels` moves the panels outside the rows. Wins wherever columns are not the last
dimension of an operand or the result (then it is the default), and by choice where rows of a large operand are gathered
often and a panel of it fits in a cache that the whole operand does not fit in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx

from sparsetir.ir.rewriting import collect
from sparsetir.lower.annotations import PANEL, PARALLEL_MARK
from sparsetir.schedules.choice import Choice, is_power
from sparsetir.schedules.registers import Registers
from sparsetir.schedules.row import spatial_loop, store_of, tile_loop

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices


UNTUNED = 128  # default columns of a panel where one is required
PANELS = (32, 64, 128, 256)

DECLARED = (
    Choice(
        "panel",
        "Columns, a power of two, of a gathered operand that are packed for all rows before the next; 0 packs only "
        "operands whose columns are not their last dimension. Tiles are cut to it.",
        0,
        "0 or a power of two",
        lambda panel: panel == 0 or is_power(panel),
        lambda _threads, feat: (0, *(panel for panel in PANELS if feat is None or panel < feat)),
    ),
)


def tile_panels(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Tile one reduction block and annotate its panels; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, tile, panel, unroll and prefetch, the target's registers.
    rewrite: see the module's before and after.
    """
    store = store_of(sch.get(block).body)
    column_and_loop = None if store is None or not _is_shared_out(sch, block) else _columns(sch, block, store)
    if store is None or column_and_loop is None:
        return False
    dimension, at = column_and_loop
    column = store.indices[dimension]
    requested = choices.panel
    is_moved = dimension < len(store.indices) - 1 or _is_column_major(store, column, sch.get(block))
    if not is_moved and not (requested and _is_gathered(store, column)):
        return False
    if requested and choices.tile > requested:
        choices = choices.changed(tile=requested)  # a panel is no narrower than a tile
    outer = tile_loop(sch, block, at, choices, registers)
    if outer is None:
        return False
    tile = int(sch.get(sch.get_loops(block)[-1]).extent)
    sch.annotate(outer, PANEL, max(requested or UNTUNED, tile))
    return True


def _columns(sch: s_tir.Schedule, block: Any, store: tirx.BufferStore) -> tuple[int, int] | None:
    """Return the last subscript that is a single loop variable of the block, and the position of that loop."""
    candidates = [(d, spatial_loop(sch, block, index)) for d, index in enumerate(store.indices)]
    return next(((d, at) for d, at in reversed(candidates) if at is not None), None)


def _is_shared_out(sch: s_tir.Schedule, block: Any) -> bool:
    """Return whether the block is inside one whose steps may run in parallel."""
    inner, func = sch.get(block), sch.mod[sch.func_working_on]
    around = [b for b in collect(func.body, s_tir.SBlock) if PARALLEL_MARK in b.annotations]
    return any(inner in collect(b.body, s_tir.SBlock) for b in around)


def _others(load: ir.TensorLoad, column: Any) -> list[Any]:
    """Return the subscripts of a load other than the column; empty if the column is not one."""
    subscripts = [i for i in load.indices if not i.same_as(column)]
    return subscripts if len(subscripts) == len(load.indices) - 1 else []


def _is_column_major(store: tirx.BufferStore, column: Any, block: s_tir.SBlock) -> bool:
    """Return whether an operand's last dimension is not the columns and no loop variable subscripts it."""
    loads = [x for x in collect(store.value, ir.TensorLoad) if _others(x, column)]
    return any(not any(x.indices[-1].same_as(iv.var) for iv in block.iter_vars) for x in loads)


def _is_gathered(store: tirx.BufferStore, column: Any) -> bool:
    """Return whether rows of an operand are gathered through an index array."""
    return any(collect(i, ir.TensorLoad) for x in collect(store.value, ir.TensorLoad) for i in _others(x, column))


__all__ = ["tile_panels"]
