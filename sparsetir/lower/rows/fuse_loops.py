# SPDX-License-Identifier: Apache-2.0
"""Loop fusion: adjacent loops over the same rows run together, `PART` rows at a time.

before::

    for i in T.serial(m, annotations={"sparsetir.chunks": 2}):
        c[i, 0:feat] = 0
    for x in T.serial(mr, annotations={"sparsetir.chunks": 2}):
        c[rows[x], 0:feat] = c[rows[x], 0:feat] + ...

after::

    for chunk in T.parallel(2):
        ...  # begin[0], end[0]: rows with half of the work each; at_0[0], at_1[0]: the loops' first steps there
        for part in range((end[0] - begin[0] + 63) // 64):
            for i in range(...):  # up to row begin[0] + part * 64 + 64
                c[at_0[0] + i, 0:feat] = 0
            for x in range(...):  # while rows[at_1[0] + x] is below that
                c[rows[at_1[0] + x], 0:feat] = c[rows[at_1[0] + x], 0:feat] + ...

Rows of a result stay in cache from loop to loop, threads start once, and loops that add to the same rows never run
concurrently. A loop with another annotation ``"sweep"`` than the loops before it is not fused with them.

Loops can be fused if every step accesses shared arrays only at rows of its own, in ascending order:
step ``x`` has row ``x``, or rows ``x * R`` to ``x * R + R - 1``, or the same of ``rows[x]`` for a sorted list;
or it has the nonzeros of row ``x``, at ``indptr[x] + j``, so that scratch passed between loops stays in cache too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import alloc, cell, collect, get, is_number, mentions, put, same, seq, substitute
from sparsetir.ir.views import SWEEP, accesses, cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import (
    ASCENDING,
    CARRY,
    CHUNKS,
    INDPTR,
    PARALLEL_MARK,
    amount,
    from_dialect,
    names_in,
    refused,
)
from sparsetir.lower.loops import SERIAL, binary_search, defined_vars, parallel, serial, with_body, without
from sparsetir.lower.rows.partition import work_before_step

PART = 64  # Rows whose results stay in the second-level cache up to a thousand columns.
WIDE = "int64"
Touched = dict[Var, list[list[ir.Expr]]]  # The subscripts of all accesses to each array.


@dataclass(frozen=True, eq=False)
class RowSlice:
    """Rows of a step: `size` rows from ``size * step`` on, or from ``size * listed`` for the entry of a sorted list.

    `fibers` are the arrays of row pointers, outermost first, between a row and its positions in a shared array.
    """

    size: int
    listed: ir.TensorLoad | None = None
    fibers: tuple[Var, ...] = ()

    def same_as(self, rows: RowSlice) -> bool:
        """Return whether both are the same rows of the same loop."""
        return self.size == rows.size and same(self.listed, rows.listed)


def _fibers(index: ir.Expr, loop: tirx.For, pointers: set[str]) -> tuple[Var, ...] | None:
    """Return the row pointers between the row of a step and a position of its nonzeros; None for other subscripts."""
    if index.same_as(loop.loop_var):
        return ()
    if not isinstance(index, tirx.Add) or not isinstance(index.b, Var) or not isinstance(index.a, ir.TensorLoad):
        return None
    begin, analyzer = index.a, sym.Analyzer()
    if str(begin.source.name) not in pointers or len(begin.indices) != 1:
        return None
    place = begin.indices[0]
    end = tirx.BufferLoad(begin.source, [place + const(1, str(place.ty.dtype))])
    around = next((f for f in collect(loop.body, tirx.For) if f.loop_var.same_as(index.b)), None)
    if around is None or not analyzer.can_prove_equal(around.min, const(0, str(around.min.ty.dtype))):
        return None
    if not same(analyzer.simplify(around.extent), analyzer.simplify(end - begin)):
        return None
    above = _fibers(place, loop, pointers)
    return None if above is None else (*above, begin.source)


def _rows_of(index: ir.Expr, loop: tirx.For, ascending: set[str], pointers: set[str]) -> RowSlice | None:
    """Return the rows that a subscript denotes; None for an unsupported form."""
    fibers = _fibers(index, loop, pointers)
    if fibers:
        return RowSlice(1, None, fibers)
    loads = [x for x in collect(index, ir.TensorLoad)]
    step, listed = loop.loop_var, None
    if loads:
        listed = loads[0]
        if str(listed.source.name) not in ascending or not _advances(listed.indices[0], loop):
            return None
        step = Var("listed", listed.ty)
        on_load = lambda x, _m: step if same(x, listed) else x  # noqa: E731
        index = structural_mutate(index, [(ir.TensorLoad, on_load)])
        if mentions(index, [loop.loop_var]) or collect(index, ir.TensorLoad):
            return None
    analyzer, one = sym.Analyzer(), const(1, str(step.ty.dtype))
    size = analyzer.simplify(substitute(index, {step: step + one}) - index)
    if not isinstance(size, tirx.IntImm) or int(size) < 1:
        return None
    offset = substitute(index, {step: const(0, str(step.ty.dtype))})
    for lane in collect(loop.body, tirx.For):
        if isinstance(lane.extent, tirx.IntImm) and int(lane.extent) > 0:
            analyzer.bind(lane.loop_var, ir.Range.from_min_extent(lane.min, lane.extent))
    dtype = str(offset.ty.dtype)
    if not analyzer.can_prove(offset >= const(0, dtype)) or not analyzer.can_prove(offset < cast(size, dtype)):
        return None
    return RowSlice(int(size), listed)


def _advances(position: ir.Expr, loop: tirx.For) -> bool:
    """Return whether a position in a list moves by one with every step and is constant within a step."""
    step = loop.loop_var
    moved = substitute(position, {step: step + const(1, str(step.ty.dtype))}) - position
    return is_number(sym.Analyzer().simplify(moved), 1) and not mentions(position, defined_vars(loop.body))


def _accesses(loop: tirx.For) -> tuple[Touched, set[Var]]:
    """Return the subscripts of all accesses to arrays from outside the loop, and the written arrays."""
    inside = {a.buffer for a in collect(loop.body, tirx.AllocBuffer)}
    touched: Touched = {}
    written = set()
    for buffer, indices, is_store in accesses(loop.body):
        if buffer not in inside:
            touched.setdefault(buffer, []).append(indices)
            written |= {buffer} if is_store else set()
    return touched, written


class LoopGroup:
    """Adjacent loops that may iterate the rows together."""

    def __init__(self, ascending: set[str], pointers: set[str]) -> None:
        self.ascending = ascending
        self.pointers = pointers
        self.loops: list[tirx.For] = []
        self.rows: list[RowSlice] = []
        self.touched: list[Touched] = []
        self.written: set[Var] = set()

    def add(self, loop: tirx.For) -> bool:
        """Add a loop to the group; return False, without a change, if its rows are unknown or differ from theirs."""
        touched, written = _accesses(loop)
        loops, maps = [*self.loops, loop], [*self.touched, touched]
        changed = self.written | written
        shared = {b for b in changed if sum(b in m for m in maps) > 1}
        if self.loops and not shared & set(touched):
            return False
        steps = list(zip(loops, maps, strict=True))
        rows = self._rows(steps, shared)
        if self.loops and rows is None:
            return False
        self.loops, self.touched, self.written = loops, maps, changed
        self.rows = rows or []
        return True

    def _rows(self, steps: list[tuple[tirx.For, Touched]], shared: set[Var]) -> list[RowSlice] | None:
        """Return for each loop the rows common to all its accesses to shared arrays; None if they differ."""
        common: list[RowSlice | None] = [None] * len(steps)
        for buffer in shared:
            rows = self._rows_in(buffer, steps)
            if rows is None:
                return None
            for n, (old, new) in enumerate(zip(common, rows, strict=True)):
                if old is not None and new is not None and not new.same_as(old):
                    return None
                common[n] = old or new
        resolved = [rows for rows in common if rows is not None]
        return resolved if len(resolved) == len(common) else None

    def _rows_in(self, buffer: Var, steps: list[tuple[tirx.For, Touched]]) -> list[RowSlice | None] | None:
        """Return each loop's rows in one dimension of `buffer`, or None if no dimension fits.

        The rows of a loop that does not access the array are None.
        """
        for dim in range(len(buffer.ty.shape)):
            rows = [self._rows_at(loop, [i[dim] for i in touched.get(buffer, [])]) for loop, touched in steps]
            used = [r for r in rows if r is not None]
            fits = len(used) == sum(buffer in touched for _, touched in steps)
            if fits and all(r.fibers == used[0].fibers for r in used):
                return rows
        return None

    def _rows_at(self, loop: tirx.For, subscripts: list[ir.Expr]) -> RowSlice | None:
        """Return the rows that all subscripts in a loop denote; None if they differ."""
        common: RowSlice | None = None
        for index in subscripts:
            rows = _rows_of(index, loop, self.ascending, self.pointers)
            if rows is None or (common is not None and not (rows.same_as(common) and rows.fibers == common.fibers)):
                return None
            common = rows
        return common

    # ------------------------------------------------------------------ the loop over all of them

    def fused(self, pointers: set[str]) -> tirx.Stmt:
        """Emit one parallel loop that does the work of all loops."""
        chunks = amount(self.loops[0], CHUNKS)
        unit = math.lcm(*(r.size for r in self.rows))
        chunk = Var("chunk", ir.PrimType("int32"))
        begin, end, high, work = (cell(n, WIDE) for n in ("begin", "end", "high", "work"))
        places = [cell(f"at_{n}", str(f.loop_var.ty.dtype)) for n, f in enumerate(self.loops)]
        stops = [cell(f"stop_{n}", str(f.loop_var.ty.dtype)) for n, f in enumerate(self.loops)]
        weights = [work_before_step(f, pointers) for f in self.loops]
        total: ir.Expr = const(0, WIDE)
        for loop, weight in zip(self.loops, weights, strict=True):
            total = total + weight(loop.extent)

        def bound(place: Var, index: ir.Expr) -> list[tirx.Stmt]:
            """Emit a search for the first group of rows with `index` of `chunks` parts of the work before it."""
            middle = tirx.floordiv(get(place) + get(high), const(2, WIDE))
            steps = [put(work, const(0, WIDE))]
            for n, weight in enumerate(weights):
                steps += [*self._seek(n, places[n], stops[n], middle * const(unit, WIDE))]
                steps.append(put(work, get(work) + weight(get(places[n]))))
            goes_right = get(work) < tirx.floordiv(total * cast(index, WIDE), amount(self.loops[0], CHUNKS, WIDE))
            step = tirx.IfThenElse(goes_right, put(place, middle + const(1, WIDE)), put(high, middle))
            search = tirx.While(get(place) < get(high), seq(*steps, step))
            return [put(place, const(0, WIDE)), put(high, self._units(unit)), search]

        body: list[tirx.Stmt] = [*alloc(begin, end, high, work, *places, *stops)]
        body += [*bound(begin, chunk), *bound(end, chunk + const(1))]
        for n, place in enumerate(places):
            body += self._seek(n, place, stops[n], get(begin) * const(unit, WIDE))
        step = const(max(PART // unit, 1), WIDE)
        part = Var("part", ir.PrimType(WIDE))
        limit = tirx.min(get(begin) + (part + const(1, WIDE)) * step, get(end)) * const(unit, WIDE)
        inner = [s for n in range(len(self.loops)) for s in self._part(n, places[n], stops[n], limit)]
        parts = tirx.floordiv(get(end) - get(begin) + step - const(1, WIDE), step)
        body.append(serial(part, parts, seq(*inner)))
        return parallel(chunk, chunks, seq(*body))

    def _units(self, unit: int) -> ir.Expr:
        """Return the number of groups of `unit` rows that cover the rows of all loops."""
        most: ir.Expr = const(0, WIDE)
        for loop, rows in zip(self.loops, self.rows, strict=True):
            steps = cast(loop.extent, WIDE)
            if rows.listed is not None:
                last = cast(self._entry(rows, loop, loop.extent - const(1, str(loop.extent.ty.dtype))), WIDE)
                steps = tirx.if_then_else(steps > const(0, WIDE), last + const(1, WIDE), const(0, WIDE))
            most = tirx.max(most, steps * const(rows.size, WIDE))
        return tirx.floordiv(most + const(unit - 1, WIDE), const(unit, WIDE))

    @staticmethod
    def _entry(rows: RowSlice, loop: tirx.For, step: ir.Expr) -> ir.Expr:
        """Return the entry of the list at a step."""
        return substitute(rows.listed, {loop.loop_var: cast(step, str(loop.loop_var.ty.dtype))})

    def _seek(self, n: int, place: Var, high: Var, row: ir.Expr) -> list[tirx.Stmt]:
        """Set `place` to the first step of loop `n` whose rows are not below `row`, a multiple of its `size`."""
        loop, rows = self.loops[n], self.rows[n]
        dtype = str(place.ty.dtype)
        if rows.listed is None:
            step = tirx.floordiv(row, const(rows.size, WIDE))
            return [put(place, cast(tirx.min(step, cast(loop.extent, WIDE)), dtype))]
        below = lambda x: cast(self._entry(rows, loop, x), WIDE) * const(rows.size, WIDE) < row  # noqa: E731
        search = binary_search(below, place, high)
        return [put(place, const(0, dtype)), put(high, cast(loop.extent, dtype)), search]

    def _part(self, n: int, place: Var, stop: Var, limit: ir.Expr) -> list[tirx.Stmt]:
        """Emit the steps of loop `n` from `place` up to row `limit`, exclusive, and advance `place`."""
        loop, rows = self.loops[n], self.rows[n]
        dtype = str(place.ty.dtype)
        if rows.listed is None:
            find = self._seek(n, stop, stop, limit)
        else:
            entry = cast(self._entry(rows, loop, get(stop)), WIDE) * const(rows.size, WIDE)
            extent = cast(loop.extent, dtype)
            is_below = tirx.if_then_else(get(stop) < extent, entry < limit, const(0, "bool"))
            find = [put(stop, get(place)), tirx.While(is_below, put(stop, get(stop) + const(1, dtype)))]
        step = Var(str(loop.loop_var.name), loop.loop_var.ty)
        body = substitute(loop.body, {loop.loop_var: get(place) + step})
        whole = refused(loop, CARRY, "its rows are split among threads together with those of its neighbours")
        inner = serial(step, get(stop) - get(place), body, without(whole, CHUNKS, PARALLEL_MARK, SWEEP))
        return [*find, inner, put(place, get(stop))]


def _may_join(stmt: tirx.Stmt) -> bool:
    """Return whether a statement is a row loop with a proof that is split among threads."""
    if not isinstance(stmt, tirx.For) or CHUNKS not in stmt.annotations or PARALLEL_MARK not in stmt.annotations:
        return False
    return stmt.kind == SERIAL and isinstance(stmt.min, tirx.IntImm) and int(stmt.min) == 0


def fuse(stmts: list[tirx.Stmt], ascending: set[str], pointers: set[str]) -> list[tirx.Stmt]:
    """Fuse the longest possible runs of row loops in a sequence of statements."""
    out: list[tirx.Stmt] = []
    run: LoopGroup | None = None

    def close() -> None:
        if run is not None:
            out.append(run.fused(pointers) if len(run.loops) > 1 else run.loops[0])

    for stmt in stmts:
        if run is not None and _may_join(stmt) and _agree(run.loops, stmt) and run.add(stmt):
            continue
        close()
        run = None
        if _may_join(stmt):
            run = LoopGroup(ascending, pointers)
            run.add(stmt)
        else:
            out.append(stmt)
    close()
    return out


def _agree(loops: list[tirx.For], loop: tirx.For) -> bool:
    """Return whether `loop` has the number of chunks of the others, and their sweep or none."""
    sweeps = {str(f.annotations[SWEEP]) for f in (*loops, loop) if SWEEP in f.annotations}
    return len(sweeps) <= 1 and same(amount(loop, CHUNKS), amount(loops[0], CHUNKS))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.FuseLoops")
def FuseLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Fuse adjacent row loops of a function."""
    if not from_dialect(func):
        return func
    ascending, pointers = names_in(func, ASCENDING), names_in(func, INDPTR)

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*fuse([mutator.mutate(s) for s in node.seq], ascending, pointers))

    body = structural_mutate(func.body, [(tirx.SeqStmt, on_seq)])
    return with_body(func, body)


__all__ = ["FuseLoops", "LoopGroup", "fuse"]
