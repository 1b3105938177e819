# SPDX-License-Identifier: Apache-2.0
"""Matrix units: sums in bfloat16 or 8 bits by dot products of two or four terms, or by products of small matrices.

Dot products, before::

    for j, k in T.grid(indptr[i + 1] - indptr[i], feat):
        c[i, k] = c[i, k] + a[indptr[i] + j] * b[indices[indptr[i] + j], k]

after::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.unit": 128}):
        for k in range(feat):
            c[i, k] = c[i, k] + a[indptr[i] + j] * b[indices[indptr[i] + j], k]

The pass `sparsetir.lower.vector.dot_products` interleaves the rows of ``b`` in registers. Wins where the machine has
AVX512-BF16 or AVX512-VNNI and the entries of a sum lie side by side: rows of CSR, and of blocks with an even number of
columns (for 8 bits a multiple of four). Where ``vdpbf16ps`` is slow, ``"sparsetir.unit_widens": 1`` widens the even and
the odd columns of a row to float32 in registers instead.

Sums along rows, before::

    for j, k in T.grid(indptr[i + 1] - indptr[i], feat):
        o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]

after::

    for j in range(indptr[i + 1] - indptr[i]):
        for k in T.serial(feat, annotations={"sparsetir.dot": 16, "sparsetir.unit_along": 1}):
            o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]

`sparsetir.lower.vector.row_products` multiplies both rows as they are. Wins where the machine has these instructions.

Tiles, over blocks of rows, before::

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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx

from sparsetir.intrin.llvm_ir import LANES
from sparsetir.ir.rewriting import factors, mentions, product
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import ALONG, DOT, PANEL, PREFETCH, TILE, UNIT, VECTOR, WIDEN
from sparsetir.lower.loops import Update
from sparsetir.lower.vector import dot_products, row_products, tile_products
from sparsetir.lower.vector.dot_products import as_nest, order_of
from sparsetir.schedules.choice import Choice
from sparsetir.schedules.panel import tile_panels
from sparsetir.schedules.registers import WIDENING, Registers
from sparsetir.schedules.row import REDUCE

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices

WIDE_UNITS = 2  # of the choice `units`
DECLARED = (
    Choice(
        "units",
        "1 uses dot-product instructions where the target has them and they apply, or what is faster there, 2 widens"
        " bfloat16 to float32 in registers, 0 uses vector arithmetic.",
        1,
        "0, 1 or 2",
        lambda units: units in (0, 1, 2),
        (0, 1),
    ),
    Choice(
        "tiles",
        "Tiles of columns that tile instructions sum side by side, where the target has them; 0 uses none.",
        4,
        "0, 2 or 4",
        lambda tiles: tiles in (0, 2, 4),
        (0, 2, 4),
    ),
)


def use_dot_product(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Annotate the outermost reduction loop; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, whether to use units and the columns of a tile, the target's registers and
    units.
    rewrite: see the module's before and after.
    """
    if not choices.units:
        return False
    annotations = {UNIT: choices.tile, **_widening(choices, registers, dot_products.match(as_nest(sch.get(block))))}
    return _annotate(sch, block, choices, registers, dot_products.match_body, annotations)


def _widening(choices: Choices, registers: Registers, nest: dot_products.DotNest | None) -> dict[str, int]:
    """Return the annotation of sums of bfloat16 for which multiply-adds are faster than dot products."""
    widens = choices.units == WIDE_UNITS or WIDENING in registers.units
    return {WIDEN: 1} if widens and nest is not None and nest.kind == "bf16" else {}


def use_packed_product(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Pack panels, as `tile_panels` does, and annotate the sums over them; False where the sketch does not fit.

    args: the schedule, an innermost block, whether to use units, and those of `tile_panels`.
    rewrite: that of `tile_panels`, with ``annotations={"sparsetir.unit": 64}`` at the loop over entries.
    """
    node = sch.get(block)
    *outer, column = [iv.var for iv in node.iter_vars] or [None]
    if not choices.units or choices.carry or not outer:
        return False
    packed = _packed(node, column)
    if packed is None or not dot_products.match_body(packed, registers.units):
        return False
    if not tile_panels(sch, block, choices, registers):
        return False
    panels, entries, lanes = sch.get_loops(block)[-3:]
    if str(sch.get(block).body.buffer.ty.storage_scope) == "local" and PANEL in sch.get(panels).annotations:
        if VECTOR in sch.get(panels).annotations:
            sch.unannotate(panels, VECTOR)  # Columns that do not fill a tile are masked.
        sch.annotate(entries, UNIT, int(sch.get(lanes).extent))
        for name, value in _widening(choices, registers, dot_products.match(as_nest(packed))).items():
            sch.annotate(entries, name, value)
    return True


def _packed(node: s_tir.SBlock, column: Any) -> s_tir.SBlock | None:
    """Return a block whose arrays have the columns as their last dimension; None if no operand has them elsewhere."""
    moved: list[Any] = []

    def turned(buffer: Any, indices: Any) -> tuple[Any, list[Any]]:
        at = [d for d, index in enumerate(indices) if index.same_as(column)]
        if len(at) != 1 or at[0] == len(indices) - 1:
            return buffer, list(indices)
        order = [*(d for d in range(len(indices)) if d != at[0]), at[0]]
        shape = [buffer.ty.shape[d] for d in order]
        moved.append(tirx.decl_buffer(shape, str(buffer.ty.dtype), str(buffer.name), layout=None))
        return moved[-1], [indices[d] for d in order]

    store = node.body
    update = Update.of(store)
    if update is None:
        return None

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        return tirx.BufferLoad(*turned(load.source, load.indices))

    term = structural_mutate(update.term, [(ir.TensorLoad, on_load)])
    if not moved:
        return None
    target, places = turned(store.buffer, store.indices)
    body = tirx.BufferStore(target, tirx.BufferLoad(target, places) + term, places)
    return s_tir.SBlock(node.iter_vars, [], [], node.name_hint, body, node.init)


def use_row_products(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Annotate the innermost loop, a sum along rows; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, whether to use units and how many results ahead gathered rows are fetched,
    the target's units.
    rewrite: see the module's before and after.
    """
    node = sch.get(block)
    update = Update.of(node.body)
    if not choices.units or update is None or not node.iter_vars:
        return False
    along = node.iter_vars[-1]
    moving = [factor for factor in factors(update.term) if mentions(factor, [along.var])]
    if int(along.iter_type) != REDUCE or not moving:
        return False
    rows = row_products.match(product(moving), along.var, update.dtype)
    if rows is None or rows.kind not in registers.units:
        return False
    *outer, loop = sch.get_loops(block)
    sch.annotate(loop, DOT, LANES)
    sch.annotate(loop, ALONG, 1)
    if choices.prefetch and outer:
        sch.annotate(outer[-1], PREFETCH, choices.prefetch)
    return True


def use_tiles(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Annotate the outermost reduction loop; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block, the tiles of columns, the target's registers and units.
    rewrite: see the module's before and after.
    """
    if not choices.tiles:
        return False
    return _annotate(sch, block, choices, registers, tile_products.match_body, {TILE: choices.tiles})


def _annotate(
    sch: s_tir.Schedule,
    block: Any,
    choices: Choices,
    registers: Registers,
    matches: Callable[[Any, frozenset[str]], bool],
    annotations: dict[str, int],
) -> bool:
    """Annotate the outermost reduction loop of a block that matches, its loops in the order of the pass."""
    if choices.carry:  # parts of a row are added up in another array, of another dtype
        return False
    node = sch.get(block)
    kinds = [int(iv.iter_type) for iv in node.iter_vars]
    if REDUCE not in kinds or not matches(node, registers.units):
        return False
    loops, (_, order) = sch.get_loops(block)[-len(kinds) :], order_of(node)
    if order != sorted(order):
        sch.reorder(*(loops[n] for n in order))
    for name, value in annotations.items():
        sch.annotate(loops[order[0]], name, value)
    return True


__all__ = ["use_dot_product", "use_packed_product", "use_row_products", "use_tiles"]
