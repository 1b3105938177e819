# SPDX-License-Identifier: Apache-2.0
"""All of a call of little work in one function: index arrays are looked at, rows counted, shared out and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.assemble.accumulators import LONG, Insertion, Output, add, long
from sparsetir.assemble.chunks import ROW_WORK, Split, array, size
from sparsetir.assemble.rows import entered_by
from sparsetir.assemble.selection import LANES, Selection, ordered
from sparsetir.assemble.small import FEW, MOST_AHEAD, NARROW, Leveled, faults, operands, unread
from sparsetir.ir import cast, const
from sparsetir.lower.nests import parallel, serial
from sparsetir.lower.rewriting import alloc, cell, get, put, renewed, seq

if TYPE_CHECKING:
    from sparsetir.assemble.functions import Functions

AHEAD = max(MOST_AHEAD, LANES)  # entries behind a chunk that are written or read before it is known that there are none


def at_once(functions: Functions, *, is_shared: bool) -> tirx.PrimFunc:
    """The rows one behind the other, with row pointers, by one thread or several, if the index arrays are sound.

    The first row pointer is 1 where they are not, or more is entered than there is room for: nothing is done then.
    Of several chunks each has its rows from ``firsts[chunk]`` to ``ends[chunk]``.
    """
    return _AtOnce(functions, is_shared=is_shared).func()


class _AtOnce:
    """Makes the function of one program."""

    def __init__(self, functions: Functions, *, is_shared: bool) -> None:
        assembly = functions.assembly
        self.functions, self.rows, self.is_shared = functions, functions.rows, is_shared
        self.count = cast(self.rows.count, LONG)
        self.chunks = Var("chunks", ir.PrimType("int32")) if is_shared else const(1, "int32")
        self.ranges = array("ranges", LONG, cast(self.chunks, LONG) + long(1))
        self.firsts, self.ends = (array(name, LONG, self.chunks) for name in ("firsts", "ends"))
        self.capacity, self.indptr = size("capacity"), array("places", assembly.key_dtype, self.count + long(1))
        self.keys = array("keys", assembly.key_dtype, self.capacity)
        results = assembly.results
        self.values = [array(f"{r.name}_values", r.dtype, self.capacity, *r.block) for r in results]
        firsts, blocks = [r.initial for r in results], [r.block for r in results]
        self.out = Output(cell("pos", LONG), cell("count", LONG), self.keys, self.values, firsts, blocks)
        self.top, self.least = size("most"), Var("least", ir.PrimType(ordered(results[0].dtype)))
        self.heap = array("heap", str(self.least.ty.dtype), self.chunks, self.capacity)
        self.before = cell("before", LONG)
        self.work, self.params = self.room()

    def func(self) -> tirx.PrimFunc:
        """The function."""
        every, fault = cell("every", LONG), cell("fault", LONG)
        room = get(every) + cast(self.chunks, LONG) * long(AHEAD) <= self.capacity
        has_room = tirx.And(get(fault).equal(long(0)), room)
        body = seq(
            *alloc(every, fault),
            put(every, long(0)),
            *faults(operands(self.functions.assembly), fault),
            tirx.IfThenElse(get(fault).equal(long(0)), seq(*self.counted(every)), None),
            self.end(long(0), long(1)),
            tirx.IfThenElse(has_room, seq(self.end(long(0), long(0)), *self.written()), None),
        )
        read = [p for p in self.functions.common if str(p.name) not in unread(self.functions.assembly)]
        split = [self.chunks, self.ranges, self.firsts, self.ends] if self.is_shared else []
        extra = [self.top, self.least, self.heap] if self.functions.options.select else []
        arrays = [self.capacity, self.indptr, self.keys, *self.values]
        return tirx.PrimFunc([*read, *split, *arrays, *self.params, *extra], renewed(body))

    def counted(self, every: Var) -> list[tirx.Stmt]:
        """Count what all rows enter; of several chunks, row pointers then say how much work there is before a row."""
        total, row, step, chunk = cell("total", LONG), size("row"), size("step"), Var("chunk", ir.PrimType("int32"))
        count = seq(self.functions.at_row(row, self.entered(total)), add(every, get(total)))
        if not self.is_shared:
            return [*alloc(total), serial(row, self.count, count)]
        first, after = (self.count * (cast(chunk, LONG) + long(n)) // cast(self.chunks, LONG) for n in (0, 1))
        work = cell("work", LONG)
        one = seq(
            tirx.Bind(row, first + step),
            self.functions.at_row(row, self.entered(total)),
            add(work, get(total) + long(ROW_WORK)),
            self.end(row + long(1), get(work)),
        )
        put_work = tirx.BufferStore(self.ends, get(work), [chunk])
        part = seq(*alloc(total, work), put(work, long(0)), serial(step, after - first, one), put_work)
        place = first + step + long(1)
        shift = serial(step, after - first, self.end(place, self.begin(place) + get(every)))
        shifted = seq(
            tirx.IfThenElse(chunk > const(0, "int32"), shift, None), add(every, tirx.BufferLoad(self.ends, [chunk]))
        )
        rows = self.count * long(ROW_WORK)
        return [
            renewed(parallel(chunk, self.chunks, part)),
            renewed(serial(chunk, self.chunks, shifted)),
            put(every, get(every) - rows),
        ]

    def entered(self, total: Var) -> tirx.Stmt:
        """Count what the row enters."""
        return seq(put(total, long(0)), *entered_by(self.rows.body, self.rows, lambda amount, _: [add(total, amount)]))

    def end(self, place: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        """Set a row pointer."""
        return tirx.BufferStore(self.indptr, cast(value, self.functions.assembly.key_dtype), [place])

    def begin(self, place: ir.Expr) -> ir.Expr:
        """A row pointer."""
        return cast(tirx.BufferLoad(self.indptr, [place]), LONG)

    # -------------------------------------------------------------- rows

    def written(self) -> list[tirx.Stmt]:
        """Write all rows."""
        chunk, step, row = Var("chunk", ir.PrimType("int32")), size("step"), size("row")
        if not self.is_shared:
            rows = serial(row, self.count, self.one(chunk, row))
            return [tirx.Bind(chunk, const(0, "int32")), *alloc(self.out.pos, self.out.count), self.at(long(0)), rows]
        first, after = (tirx.BufferLoad(self.ranges, [chunk + n]) for n in (0, 1))
        rows = serial(step, after - first, seq(tirx.Bind(row, first + step), self.one(chunk, row)))
        place = tirx.BufferLoad(self.firsts, [chunk])
        body = [
            *alloc(self.out.pos, self.out.count, self.before),
            self.at(place),
            put(self.before, place - cast(chunk, LONG) * long(AHEAD) + first * long(ROW_WORK)),
            rows,
            tirx.BufferStore(self.ends, get(self.out.pos), [chunk]),
        ]
        return [*self.shared_out(), parallel(chunk, self.chunks, seq(*body)), *self.closed()]

    def at(self, place: ir.Expr) -> tirx.Stmt:
        """Begin to write at a place."""
        return put(self.out.pos, place)

    def one(self, chunk: Var, row: Var) -> tirx.Stmt:
        """Write one row."""
        total, select = cell("total", LONG), []
        if self.functions.options.select:
            select = Selection(self.out, chunk, self.top, self.least, self.heap).stmts()
        pos = self.out.pos
        done = [*select, add(pos, get(self.out.count)), self.end(row + long(1), get(pos))]
        if self.is_shared:  # the row pointer still says how much work there is up to the end of the row
            after = self.begin(row + long(1))
            entered = [put(total, after - get(self.before) - long(ROW_WORK)), put(self.before, after)]
        else:
            entered = [self.functions.at_row(row, self.entered(total))]
        return renewed(seq(*alloc(total), *entered, *self.row(chunk, row, get(total)), *done))

    def row(self, chunk: Var, row: Var, entered: ir.Expr) -> list[tirx.Stmt]:
        """Collect one row."""
        functions, work = self.functions, self.work
        if functions.is_stamped:
            return [functions.under_mask(self.out, work, chunk, row)]
        wide = Leveled(self.out, chunk, work.arrays, work.bits, work.top)
        ways = [functions.collected(x, row, work, chunk) for x in (Leveled.of(wide), wide)]
        whole = tirx.IfThenElse(functions.width <= long(NARROW), *ways)
        if any(r.held_dtype != r.dtype for r in functions.assembly.results):
            return [whole]
        short = functions.collected(Insertion(self.out, FEW, functions.assembly.key_dtype), row, work, chunk)
        return [tirx.IfThenElse(entered <= long(FEW), short, whole)]

    def room(self) -> tuple[Any, list[Var]]:
        """The accumulators, and their parameters."""
        functions, split = self.functions, Split(self.chunks, self.ranges, size("unused"))
        if functions.is_stamped:
            stamps = replace(functions.stamps(split), fetches=False)
            return stamps, stamps.params
        tops = size("tops")
        work = replace(functions.workspace(split, values=True), tops=tops, parts=None, fetches=False)
        work = replace(work, top=array("top", LONG, self.chunks, tops))
        return work, [work.width, work.words, tops, *work.arrays, work.bits, work.top, *work.masks]

    # -------------------------------------------------------------- chunks

    def shared_out(self) -> list[tirx.Stmt]:
        """Chunks of as much work each, found by bisection in the row pointers, which hold how much there is before."""
        step, low, high, middle = size("step"), cell("low", LONG), cell("high", LONG), size("middle")
        after, share = step + long(1), cast(self.chunks, LONG)
        is_before = self.begin(middle + long(1)) < self.begin(self.count) * after // share
        lower = seq(
            tirx.Bind(middle, (get(low) + get(high)) >> long(1)),
            tirx.IfThenElse(is_before, put(low, middle + long(1)), put(high, middle)),
        )
        found = seq(
            *alloc(low, high),
            put(low, tirx.BufferLoad(self.ranges, [step])),
            put(high, self.count),
            tirx.While(get(low) < get(high), lower),
            tirx.BufferStore(self.ranges, get(low), [after]),
            tirx.BufferStore(
                self.firsts, self.begin(get(low)) - get(low) * long(ROW_WORK) + after * long(AHEAD), [after]
            ),
        )
        zero: Callable[[Var], tirx.Stmt] = lambda a: tirx.BufferStore(a, long(0), [const(0)])  # noqa: E731
        last = tirx.BufferStore(self.ranges, self.count, [self.chunks])
        return [zero(self.ranges), zero(self.firsts), serial(step, share - long(1), found), last]

    def closed(self) -> list[tirx.Stmt]:
        """Row pointers as if the chunks stood one behind the other."""
        step, row, filled, shift = size("step"), size("row"), cell("filled", LONG), size("shift")
        first, after = (tirx.BufferLoad(self.ranges, [step + long(n)]) for n in (0, 1))
        source, end = (tirx.BufferLoad(a, [step]) for a in (self.firsts, self.ends))
        place = first + row + long(1)
        one = seq(
            tirx.Bind(shift, source - get(filled)),
            serial(row, after - first, self.end(place, self.begin(place) - shift)),
            put(filled, end - shift),
        )
        return [*alloc(filled), put(filled, long(0)), serial(step, cast(self.chunks, LONG), one)]


__all__ = ["at_once"]
