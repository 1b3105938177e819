# SPDX-License-Identifier: Apache-2.0
"""Column loops below a row loop, and register blocking: keep a row that several sums share in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.interop.arrays import HALVES
from sparsetir.ir.rewriting import collect, factors, get, mentions, product, put, renewed, same, seq, substitute
from sparsetir.ir.views import accesses, const
from sparsetir.lower.annotations import HELD, PANEL, PREFETCH, has_annotation, refused
from sparsetir.lower.loops import each_loop, serial, unrolled, vectorized, with_, without
from sparsetir.lower.vector.loop_transforms import match, vector_loops
from sparsetir.lower.vector.memory_hints import ahead, fetch, gathers, line_starts
from sparsetir.lower.vector.vectorize import GROUP, DotSum, around, scaled, totals

# Column loops below a row loop, and the test of whether they may run one panel of columns at a time.
#
# A *column loop* moves one subscript of every result below it: a loop over tiles with vector lanes inside, which a
# schedule annotates, or a plain loop over all columns, such as an initialisation.


@dataclass(frozen=True, eq=False)
class ColumnLoop:
    """Loop over `width` columns with `tile` columns a step; `lanes` are its vector loops (empty: one column a step)."""

    loop: tirx.For
    tile: int
    width: ir.Expr
    lanes: tuple[Var, ...]

    @classmethod
    def of(cls, loop: tirx.For) -> ColumnLoop | None:
        """Match an annotated loop over tiles; return None if its lanes do not cover every column once."""
        inner = vector_loops(loop.body)
        tile_and_width = match(loop)
        if tile_and_width is not None:
            return cls(loop, *tile_and_width, tuple(f.loop_var for f in inner))
        sizes = {int(f.extent) if isinstance(f.extent, tirx.IntImm) else 0 for f in inner}
        if len(sizes) != 1 or 0 in sizes or not isinstance(loop.extent, tirx.IntImm):
            return None
        # A check that `match` does not know may leave some columns out.
        moving = [loop.loop_var, *(f.loop_var for f in inner)]
        if any(mentions(node.condition, moving) for node in collect(loop.body, tirx.IfThenElse)):
            return None
        (tile,) = sizes
        width = const(int(loop.extent) * tile, str(loop.loop_var.ty.dtype))
        return cls(loop, tile, width, tuple(f.loop_var for f in inner))

    def is_column(self, index: ir.Expr) -> bool:
        """Return whether a subscript is the column."""
        analyzer = sym.Analyzer()
        if isinstance(self.loop.extent, tirx.IntImm) and int(self.loop.extent) > 0:
            analyzer.bind(self.loop.loop_var, ir.Range.from_min_extent(self.loop.min, self.loop.extent))
        if not self.lanes:
            return bool(analyzer.simplify(index).same_as(self.loop.loop_var))
        dtype = str(self.loop.loop_var.ty.dtype)
        if str(index.ty.dtype) != dtype:
            return False
        lane = analyzer.simplify(index - self.loop.loop_var * const(self.tile, dtype))
        return any(lane.same_as(v) for v in self.lanes)

    def dimension(self, indices: list[ir.Expr]) -> int | None:
        """Return the dimension whose subscript is the column; None unless exactly one is."""
        dimensions = [d for d, index in enumerate(indices) if self.is_column(index)]
        return dimensions[0] if len(dimensions) == 1 else None


@dataclass(frozen=True, eq=False)
class ColumnLoops:
    """Column loops of equal width below a row loop, which write every result only at their own columns."""

    rows: tirx.For
    panel: int
    width: ir.Expr
    loops: list[ColumnLoop]
    results: dict[Var, int] = field(default_factory=dict)  # The dimension of the columns of each result.

    @classmethod
    def of(cls, rows: tirx.For) -> ColumnLoops | None:
        """Collect the column loops of `rows`; return None if none is annotated or columns depend on each other."""
        marked = [f for f in collect(rows.body, tirx.For) if PANEL in f.annotations]
        tiled = [column for f in marked if (column := ColumnLoop.of(f)) is not None]
        if not tiled or len(tiled) < len(marked) or not all(same(t.width, tiled[0].width) for t in tiled):
            return None
        panel, width = int(marked[0].annotations[PANEL]), tiled[0].width
        loops = [*tiled, *_plain(rows, marked, width)]
        if any(int(f.annotations[PANEL]) != panel for f in marked) or any(panel % t.tile for t in loops):
            return None
        columns = cls(rows, panel, width, loops)
        return columns if columns._falls_apart() else None

    def accesses(self) -> Iterator[tuple[ColumnLoop, Var, list[ir.Expr], bool]]:
        """Yield each column loop with the accesses below it: buffer, subscripts, and whether it is a store."""
        for column in self.loops:
            for buffer, indices, is_store in accesses(column.loop.body):
                yield column, buffer, indices, is_store

    def _falls_apart(self) -> bool:
        """Return whether the columns of the results are independent; set the column dimension of each result."""
        row_arrays = {a.buffer for a in collect(self.rows.body, tirx.AllocBuffer)}
        step_arrays = {a.buffer for c in self.loops for a in collect(c.loop.body, tirx.AllocBuffer)}
        stores = [s for s in collect(self.rows.body, tirx.BufferStore) if s.buffer not in row_arrays]
        below = [(c, b, i) for c, b, i, is_store in self.accesses() if is_store and b not in row_arrays]
        if len(below) != len(stores):
            return False
        for column, buffer, indices in below:
            dimension = column.dimension(indices)
            if dimension is None or self.results.setdefault(buffer, dimension) != dimension:
                return False
        reads = [(c, b, i) for c, b, i, is_store in self.accesses() if not is_store and b in self.results]
        all_reads = [x for x in collect(self.rows.body, ir.TensorLoad) if x.source in self.results]
        is_independent = len(reads) == len(all_reads) and all(c.dimension(i) == self.results[b] for c, b, i in reads)
        # An array of the row that a column loop stores to could carry values to the next step.
        return is_independent and not any(
            b in row_arrays and b not in step_arrays for _, b, _, is_store in self.accesses() if is_store
        )


def _plain(rows: tirx.For, marked: list[tirx.For], width: ir.Expr) -> list[ColumnLoop]:
    """Return the plain loops over all columns that are not inside an annotated loop."""
    inside = [f for loop in marked for f in collect(loop.body, tirx.For)]
    plain = [f for f in collect(rows.body, tirx.For) if f not in inside and f not in marked]
    return [ColumnLoop(f, 1, f.extent, ()) for f in plain if same(f.extent, width)]


# Register blocking: keep a row that several sums share in registers.
#
# before::
#
#     for j in range(indptr[i + 1] - indptr[i]):
#         o[indptr[i] + j] = 0
#         for k in T.serial(feat, annotations={"sparsetir.dot": 32, "sparsetir.held": 128}):
#             o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]
#
# after::
#
#     if indptr[i + 1] - indptr[i] > 0:
#         for part in range(feat // 128):
#             ...  # row[0:128] = x[i, part * 128 : part * 128 + 128]
#             for j_0 in range((indptr[i + 1] - indptr[i]) // 4):
#                 for j_1, k_0 in T.grid(T.unroll(4), T.unroll(4)):
#                     for k_1 in T.vectorized(32):
#                         acc[j_1 * 32 + k_1] = acc[j_1 * 32 + k_1] + row[k_0 * 32 + k_1] * y[indices[...], ...]
#                 ...  # total[0:4] = the sums of acc[0:32], acc[32:64], acc[64:96] and acc[96:128], reduced together
#                 for j_1 in T.unroll(4):
#                     o[...] = T.Select(part == 0, 0, o[...]) + s[indptr[i] + j_0 * 4 + j_1] * total[j_1]
#             for j in range((indptr[i + 1] - indptr[i]) % 4):
#                 ...  # the same for one
#     if feat % 128 > 0 or feat < 128:
#         for j in range(indptr[i + 1] - indptr[i]):
#             ...  # as before, from feat // 128 * 128 on
#
# The gathered rows are read one after the other, which the hardware prefetches better than four at a time, and every
# multiply-add loads one operand instead of two. Sums that are stored in 16-bit floats are not blocked, because they
# would be rounded once for each part. The annotation is only valid for sums that may be reordered.


@dataclass(frozen=True)
class Shared:
    """Loop over sums that share a row: `row` and `gathered` are the factors of the terms.

    The row is the product of the factors that are the same in every step of the loop.
    """

    outer: tirx.For
    dot: DotSum
    row: ir.Expr
    gathered: ir.Expr
    size: int

    @classmethod
    def of(cls, outer: tirx.For) -> Shared | None:
        """Match a loop over annotated sums that share a row; return None for other loops."""
        dot = around(outer)
        size = 0 if dot is None else int(dot.loop.annotations.get(HELD, 0))
        if dot is None or not size or dot.combine is not tirx.Add or size % dot.lanes:
            return None
        if str(dot.store.buffer.ty.dtype) in HALVES:
            return None
        terms = factors(dot.term)
        invariant = [f for f in terms if not mentions(f, [outer.loop_var])]
        varying = [f for f in terms if mentions(f, [outer.loop_var])]
        return cls(outer, dot, product(invariant), product(varying), size) if invariant and varying else None

    def before(self, part: ir.Expr) -> ir.Expr:
        """Return the value that the sum over a part is added to."""
        load = tirx.BufferLoad(self.dot.store.buffer, self.dot.store.indices)
        return tirx.Select(part.equal(const(0, str(part.ty.dtype))), self.dot.start, load)


def _sums(shared: Shared, row: Var, part: Var, base: ir.Expr, group: int) -> tirx.Stmt:
    """Emit the sums over a part of the row for `group` steps from `base` on."""
    dot, var = shared.dot, shared.outer.loop_var
    k, lanes, dtype = dot.loop.loop_var, dot.lanes, str(dot.store.buffer.ty.dtype)
    member, block, lane = (Var(n, k.ty) for n in ("g", "k_0", "k_1"))
    index = str(k.ty.dtype)
    width, size = const(lanes, index), const(shared.size, index)
    acc = tirx.decl_buffer([group * lanes], dtype, name="acc", scope="local", layout=None)
    total = tirx.decl_buffer([group], dtype, name="total", scope="local", layout=None)

    def of(expr: ir.Expr, at: ir.Expr | None = None) -> ir.Expr:
        mapping: dict[Any, Any] = {var: base + member.astype(str(var.ty.dtype))}
        return substitute(expr, mapping if at is None else {**mapping, k: at})

    def each(body: tirx.Stmt) -> tirx.Stmt:
        fresh = Var("g", member.ty)
        return unrolled(fresh, group, renewed(substitute(body, {member: fresh})))

    acc_index = [member * width + lane]
    clear = vectorized(lane, lanes, tirx.BufferStore(acc, const(0, dtype), acc_index))
    shared_element = tirx.BufferLoad(row, [block * width + lane])
    term = shared_element * of(shared.gathered, part * size + block * width + lane)
    add = tirx.BufferStore(acc, tirx.BufferLoad(acc, acc_index) + term, acc_index)
    sums = unrolled(block, shared.size // lanes, vectorized(lane, lanes, renewed(add)))
    again, inside = Var("k_again", k.ty), [of(f) for f in dot.factors]

    def unfactored(result: Var) -> tirx.Stmt:
        """Emit the sum over the part with its factors inside the terms."""
        moving = tirx.BufferLoad(row, [again]) * of(shared.gathered, part * size + again)
        return serial(again, size, put(result, get(result) + product([*inside, moving])))

    checks, value = scaled(inside, total, member, group, unfactored)
    finish = tirx.BufferStore(dot.store.buffer, of(shared.before(part)) + value, [of(i) for i in dot.store.indices])
    prefetches = _fetches(shared, part, of) if has_annotation(shared.outer, PREFETCH) else []
    fetches = [each(seq(*prefetches))] if prefetches else []
    alloc = [tirx.AllocBuffer(acc), tirx.AllocBuffer(total)]
    joined = totals(acc, total, group, lanes)
    return seq(*alloc, *fetches, each(seq(renewed(clear), sums)), joined, *checks, each(finish))


def _fetches(shared: Shared, part: Var, of: Any) -> list[tirx.Stmt]:
    """Emit prefetches of all cache lines of the rows that are gathered at the prefetch distance."""
    k = shared.dot.loop.loop_var
    prefetches = []
    for load in gathers(shared.gathered, shared.outer.loop_var):
        indices = ahead(load, shared.outer)
        for start in line_starts(load, shared.size):
            at = part * const(shared.size, str(k.ty.dtype)) + const(start, str(k.ty.dtype))
            prefetches.append(fetch(load, [of(i, at) for i in indices]))
    return prefetches


def hold(outer: tirx.For) -> tirx.Stmt | None:
    """Emit a loop over annotated sums in parts of the shared row; return None for other loops."""
    shared = Shared.of(outer)
    if shared is None:
        return None
    dot, var = shared.dot, outer.loop_var
    k, extent = dot.loop.loop_var, dot.loop.extent
    index, steps = str(k.ty.dtype), str(var.ty.dtype)
    size, lanes, zero_index = const(shared.size, index), const(dot.lanes, index), const(0, index)
    part, block, lane = Var("part", k.ty), Var("k_0", k.ty), Var("k_1", k.ty)
    row = tirx.decl_buffer([shared.size], str(dot.store.buffer.ty.dtype), name="row", scope="local", layout=None)
    element = block * lanes + lane
    loaded = tirx.BufferStore(row, substitute(shared.row, {k: part * size + element}), [element])
    load = unrolled(block, shared.size // dot.lanes, vectorized(lane, dot.lanes, loaded))
    group_step, single_step = Var(f"{var.name}_0", var.ty), Var(str(var.name), var.ty)
    zero, group = const(0, steps), const(GROUP, steps)
    full = tirx.floordiv(outer.extent, group)
    main = _sums(shared, row, part, group_step * group, GROUP)
    last = _sums(shared, row, part, full * group + single_step, 1)
    groups = serial(group_step, full, main, without(outer, PREFETCH))
    singles = serial(single_step, tirx.floormod(outer.extent, group), renewed(last))
    count = tirx.floordiv(extent, size)
    parts = serial(part, count, seq(tirx.AllocBuffer(row), load, groups, singles))
    remainder = _rest(shared, count, tirx.floormod(extent, size))
    has_remainder = tirx.any(tirx.floormod(extent, size) > zero_index, extent < size)
    return seq(tirx.IfThenElse(outer.extent > zero, parts, None), tirx.IfThenElse(has_remainder, remainder, None))


def _rest(shared: Shared, count: ir.Expr, left: ir.Expr) -> tirx.Stmt:
    """Emit the original loop over the remainder after the last full part."""
    outer, dot = shared.outer, shared.dot
    k, var = dot.loop.loop_var, Var(str(outer.loop_var.name), outer.loop_var.ty)
    done = count * const(shared.size, str(k.ty.dtype))
    begin = tirx.BufferStore(dot.store.buffer, shared.before(count), dot.store.indices)
    body = substitute(dot.loop.body, {k: done + k})
    inner = with_(dot.loop, extent=left, body=body, notes=without(dot.loop, HELD))
    again = renewed(substitute(seq(begin, inner), {outer.loop_var: var}))
    return with_(outer, var=var, body=again)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.BlockRegisters")
def BlockRegisters(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Block the shared row of every loop around annotated sums of a function."""
    why = "no row is shared by the sums of the loop around it"
    return each_loop(func, outer=hold, inner=lambda loop: refused(loop, HELD, why))


__all__ = ["BlockRegisters", "ColumnLoop", "ColumnLoops", "hold"]
