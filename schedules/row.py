# SPDX-License-Identifier: Apache-2.0
"""Row kernels: a register tile of the output row, and the row partition among threads by entries."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from tvm import ir, s_tir, tirx
from tvm.runtime import DataType

from sparsetir.ir.rewriting import all_same, collect, loads_of, mentions
from sparsetir.ir.views import SWEEP
from sparsetir.lower.annotations import CARRY, CHUNKS, PARALLEL_MARK, PREFETCH, STREAM, UNROLL, VECTOR
from sparsetir.lower.target.initialization import keeps_old
from sparsetir.lower.target.scratch import MOST_BYTES
from sparsetir.schedules.choice import Choice, is_power
from sparsetir.schedules.registers import Registers
from sparsetir.utils.threads import get_num_threads

if TYPE_CHECKING:
    from sparsetir.schedules.choices import Choices


# Row kernels: a register tile of the output row accumulates over the entries of the row.
#
# before::
#
#     for i in range(m):
#         for j, k in T.grid(indptr[i + 1] - indptr[i], feat):
#             c[i, k] = c[i, k] + a[...] * b[indices[...], k]
#
# after::
#
#     for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
#         for k_0 in range((feat + 63) // 64):
#             for j in range(indptr[i + 1] - indptr[i]):
#                 for k_1 in T.vectorized(64):
#                     c_local[k_1] = c_local[k_1] + a[...] * b[indices[...], k_0 * 64 + k_1]
#             for k_1 in T.vectorized(64):
#                 c[i, k_0 * 64 + k_1] = c_local[k_1]
#
# Wins wherever an output row is dense and contiguous; the rows are partitioned by entries, not by count.


SPATIAL, REDUCE = 0, 2
MOST_ROWS = 128
HEADS = 8  # maximum registers of rows computed together that share only the loop over entries
PAIR = 2  # minimum registers of a row that is long enough: one broadcast factor then serves two products
TILES = (8, 16, 32, 64, 128)
LONGEST_TILE, MOST_UNROLLED = 1 << 14, 64  # more would make code that takes LLVM minutes
CHUNKS_PER_THREAD = (1, 2, 4, 8, 16, 32)


def tiles(_threads: int, feat: int | None) -> tuple[int, ...]:
    """Return the tiles to try: those no wider than an output row, and the smallest that covers all of it."""
    return tuple(tile for tile in TILES if feat is None or tile < 2 * feat) or TILES[:1]


def default_chunks() -> int:
    """Return the default number of parallel pieces."""
    threads = get_num_threads()
    return threads if threads > 1 else 0


DECLARED = (
    Choice(
        "tile",
        "Elements of a row kept in registers, of the result or of what several sums share; a power of two.",
        64,
        f"a power of two up to {LONGEST_TILE}",
        lambda tile: is_power(tile) and tile <= LONGEST_TILE,
        tiles,
    ),
    Choice(
        "chunks",
        "Parallel pieces with equal numbers of nonzeros; 0 runs on one core. By default one for each thread: TVM gives "
        "every thread the same number of pieces. With one thread 0: a piece alone would still be handed to a pool.",
        default_chunks,
        "0 or more",
        lambda chunks: chunks >= 0,
        lambda threads, _feat: (0, *(threads * pieces for pieces in CHUNKS_PER_THREAD)),
    ),
    Choice(
        "unroll",
        "Nonzeros per step of the innermost ragged loop.",
        1,
        f"from 1 to {MOST_UNROLLED}",
        lambda unroll: 1 <= unroll <= MOST_UNROLLED,
        (1, 2, 4, 8),
    ),
    Choice(
        "prefetch",
        "How many nonzeros ahead gathered rows are fetched; 0 leaves it to the hardware.",
        0,
        "0 or more",
        lambda prefetch: prefetch >= 0,
        (0, 4, 8, 16, 32),
    ),
    Choice(
        "stream",
        "1 writes results past the caches: for those that are larger than the caches anyway.",
        0,
        "0 or 1",
        lambda stream: stream in (0, 1),
        (0, 1),
    ),
)


def spatial_loop(sch: s_tir.Schedule, block: Any, index: Any) -> int | None:
    """Return the position, from the end, of a reduction block's spatial loop whose variable is `index`, or None."""
    node = sch.get(block)
    store = store_of(node.body)
    if store is None or (node.init is None and not _updates(store)):
        return None
    positions = [n for n, iv in enumerate(node.iter_vars) if iv.var.same_as(index) and int(iv.iter_type) == SPATIAL]
    if not positions or not any(int(iv.iter_type) == REDUCE for iv in node.iter_vars):
        return None
    return positions[0] - len(node.iter_vars)


def store_of(body: tirx.Stmt) -> tirx.BufferStore | None:
    """Return the store that a block consists of, possibly guarded; None for other blocks."""
    while isinstance(body, tirx.IfThenElse) and body.else_case is None:
        body = body.then_case
    return body if isinstance(body, tirx.BufferStore) else None


def _width(body: tirx.Stmt) -> int:
    """Return the bits of an element of the result."""
    store = store_of(body)
    return 32 if store is None else int(DataType(str(store.buffer.ty.dtype)).bits)


def _updates(store: tirx.BufferStore) -> bool:
    """Return whether the stored value depends on the element's old value and on no other element of the array."""
    loads = loads_of(store.value, store.buffer)
    return bool(loads) and all(all_same(list(x.indices), list(store.indices)) for x in loads)


def tile_of(extent: Any, requested: int) -> int:
    """Return `requested`, or the largest power of two within a smaller constant extent."""
    if not isinstance(extent, tirx.IntImm):
        return requested
    tile = 1
    while tile * 2 <= min(requested, int(extent)):
        tile *= 2
    return tile


def covering_tile(extent: Any, wanted: int) -> int:
    """Return `wanted`, or the smallest power of two that covers a shorter constant extent."""
    return min(wanted, 1 << (int(extent) - 1).bit_length()) if isinstance(extent, tirx.IntImm) else wanted


def tile_row(sch: s_tir.Schedule, block: Any, choices: Choices, registers: Registers) -> bool:
    """Tile one reduction block; False (and no change) where the sketch does not fit.

    args: the schedule, an innermost block with an initialisation, tile, unroll and prefetch, the target's registers.
    rewrite: see the module's before and after.
    """
    store = store_of(sch.get(block).body)
    at = None if store is None else spatial_loop(sch, block, store.indices[-1])
    return at is not None and tile_loop(sch, block, at, choices, registers) is not None


def tile_loop(sch: s_tir.Schedule, block: Any, at: int, choices: Choices, registers: Registers) -> Any:
    """Tile the loop of a block at a position from the end; return the loop over tiles, or None if it is too short."""
    node = sch.get(block)
    loops = sch.get_loops(block)
    kinds = [int(iv.iter_type) for iv in node.iter_vars]
    block_loops = loops[len(loops) - len(kinds) :]
    vector = block_loops[at]
    if collect(sch.get(vector).extent, ir.TensorLoad):
        return None
    spatial = [lp for lp, k in zip(block_loops, kinds, strict=True) if k == SPATIAL and lp is not vector]
    reduced = [lp for lp, k in zip(block_loops, kinds, strict=True) if k == REDUCE]
    lane = node.iter_vars[at].var
    shared = [lp for lp, iv in zip(block_loops, node.iter_vars, strict=True) if _is_shared(node, lane, iv.var)]
    bits = _width(node.body)
    if any(collect(sch.get(lp).extent, ir.TensorLoad) for lp in reduced):
        narrow = [lp for lp in spatial if _is_narrow(sch.get(lp), sch.get(vector), registers.bits // bits)]
        shared += narrow if not _has_gathered_factor(node, lane) else []
    rows = [lp for lp in spatial if lp in shared and _is_short(sch.get(lp)) and CHUNKS not in sch.get(lp).annotations]
    outer_rows = [lp for lp in spatial if lp not in rows]
    is_long = tile_of(sch.get(vector).extent, choices.tile) * bits >= PAIR * registers.bits
    groups, rows = _grouped(sch, rows, registers.most_rows(PAIR if is_long else 1))
    shared_rows = math.prod(int(sch.get(lp).extent) for lp in rows)
    # Without rows to share registers, the tile is limited by the stack only.
    max_tile = registers.lanes(shared_rows, bits=bits) if rows else MOST_BYTES * 8 // max(bits, 32) // 2
    requested = min(choices.tile, max_tile)
    extent = sch.get(vector).extent
    tile = covering_tile(extent, requested)
    if tile < 2:
        return None
    outer, lanes = sch.split(vector, [None, tile])
    sch.reorder(*outer_rows, *groups, outer, *reduced, *rows, lanes)
    is_fresh = node.init is not None and not keeps_old(node.init)
    # TVM would copy a constant remainder in a vector of that length.
    is_whole = not isinstance(extent, tirx.IntImm) or int(extent) % tile == 0
    if not rows and is_fresh and is_whole and isinstance(node.body, tirx.BufferStore):
        _hold_result(sch, block, outer)
    for loop in rows:
        sch.unroll(loop)
    sch.vectorize(lanes)
    if not isinstance(extent, tirx.IntImm) or int(extent) != tile:  # TVM keeps loops of one step that are annotated
        sch.annotate(outer, VECTOR, registers.bits // max(bits, 32))
    _annotate_steps(sch, reduced[-1], choices)
    return outer


def _hold_result(sch: s_tir.Schedule, block: Any, outer: Any) -> None:
    """Reduce into a local array; where TVM does not allow that, the pass `PromoteRegisters` does it on flat loops."""
    with contextlib.suppress(s_tir.ScheduleError):
        _cache_result(sch.copy(), block, outer)  # Trial on a copy: a failure must not leave a partial change.
        _cache_result(sch, block, outer)


def _cache_result(sch: s_tir.Schedule, block: Any, outer: Any) -> None:
    cached = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(cached, outer)
    sch.vectorize(sch.get_loops(cached)[-1])


def _is_short(loop: tirx.For) -> bool:
    """Return whether a loop over rows has a constant length small enough to keep the rows in registers."""
    return isinstance(loop.extent, tirx.IntImm) and 1 <= int(loop.extent) <= MOST_ROWS


def _is_narrow(loop: tirx.For, vector: tirx.For, lanes: int) -> bool:
    """Return whether the rows of a loop, such as those of a few heads, fit into a few registers together.

    Computed together they share one ragged loop over entries. Where entries are few, most of the time is spent on the
    exits of such loops, which the processor mispredicts.
    """
    if not all(isinstance(nested.extent, tirx.IntImm) for nested in (loop, vector)):
        return False
    return int(loop.extent) * int(vector.extent) <= HEADS * lanes


def _has_gathered_factor(block: s_tir.SBlock, lane: Any) -> bool:
    """Return whether a factor that is the same for all lanes is gathered through an index array.

    Rows computed one after the other have more such loads in flight, since the steps of their loops are shorter.
    """
    entries = [iv.var for iv in block.iter_vars if int(iv.iter_type) == REDUCE]
    factors = [x for x in collect(block.body, ir.TensorLoad) if not mentions(x, [lane])]
    inner = [x for factor in factors for index in factor.indices for x in collect(index, ir.TensorLoad)]
    return any(mentions(x, entries) for x in inner)


def _is_shared(block: s_tir.SBlock, lane: Any, row: Any) -> bool:
    """Return whether rows share an operand along the lanes; computing other rows together gains nothing."""
    loads = [x for x in collect(block.body, ir.TensorLoad) if mentions(x, [lane])]
    return any(not mentions(x, [row]) for x in loads)


def _grouped(sch: s_tir.Schedule, rows: list[Any], room: int) -> tuple[list[Any], list[Any]]:
    """Split row loops into loops over groups and loops over the rows of a group, at most `room` for the registers."""
    groups, group_rows = [], []
    for loop in rows:
        extent = int(sch.get(loop).extent)
        size = max(n for n in range(1, max(min(extent, room), 1) + 1) if extent % n == 0)
        if size < extent:
            group, loop = sch.split(loop, [None, size])
            groups.append(group)
        group_rows.append(loop)
        room //= size
    return groups, group_rows


def _annotate_steps(sch: s_tir.Schedule, loop: Any, choices: Choices) -> None:
    """Annotate the innermost reduction loop with unrolling and prefetching."""
    if choices.unroll > 1:
        sch.annotate(loop, UNROLL, choices.unroll)
    if choices.prefetch > 0:
        sch.annotate(loop, PREFETCH, choices.prefetch)


def share_rows(sch: s_tir.Schedule, func_name: str, choices: Choices) -> None:
    """Run every independent outermost loop in parallel chunks of equal work.

    args: the schedule, a function of its module, the number of chunks.
    rewrite: ``for i in range(m)`` becomes ``for i in T.serial(m, annotations={"sparsetir.chunks": 16})``.
    """
    for name in independent_blocks(sch.mod[func_name]):
        share_block(sch, func_name, name, choices)


def share_block(sch: s_tir.Schedule, func_name: str, name: str, choices: Choices) -> None:
    """Run the outermost loop of one block with independent steps in parallel chunks of equal work, or as it is."""
    if choices.chunks == 0 and not choices.stream:
        return
    block = sch.get_sblock(name, func_name=func_name)
    node = sch.get(block)
    dimension = [str(iv.var.name) for iv in node.iter_vars].index(str(node.annotations[PARALLEL_MARK]))
    loop = sch.get_loops(block)[dimension - len(node.iter_vars)]  # nothing is split yet
    if choices.chunks > 0:
        sch.annotate(loop, CHUNKS, choices.chunks)
        split_rows(sch, loop, choices)
        if SWEEP in node.annotations:
            sch.annotate(loop, SWEEP, node.annotations[SWEEP])
    if choices.stream:
        sch.annotate(loop, STREAM, choices.stream)


def independent_blocks(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the blocks whose steps may run in parallel."""
    return [str(b.name_hint) for b in collect(func.body, s_tir.SBlock) if PARALLEL_MARK in b.annotations]


# Split rows: every chunk has the same number of entries, even if one row has most of them.
#
# before::
#
#     for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
#         y[i] = 0
#         for j in range(indptr[i + 1] - indptr[i]):
#             y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]
#
# after::
#
#     for i in T.serial(m, annotations={"sparsetir.chunks": 16, "sparsetir.carry": 1}):
#         ...  # the same; lowered, each chunk keeps what it has of a row that goes on, and one more loop adds it up
#
# Wins where a row has much more than its share of the entries, such as a hub of a graph or a dense row: with whole
# rows, all other threads wait for the one that computes it. The sum is reordered, so the program must allow that; a row
# that computes more than sums, maxima or minima of its entries' terms stays whole (`sparsetir.lower.rows.partition`).


CARRY_DECLARED = (
    Choice(
        "carry",
        "1 splits rows that reach into several chunks, where sums may be reordered; 0 keeps rows whole.",
        0,
        "0 or 1",
        lambda carry: carry in (0, 1),
    ),
)


def split_rows(sch: s_tir.Schedule, loop: Any, choices: Choices) -> bool:
    """Allow chunks of a parallel loop to begin and end inside a row; False (and no change) where choices disallow it.

    args: the schedule, a loop that `share_rows` annotated, whether rows are split.
    rewrite: see the module's before and after.
    """
    if not choices.carry:
        return False
    sch.annotate(loop, CARRY, choices.carry)
    return True


__all__ = ["split_rows"]
