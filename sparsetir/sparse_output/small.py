# SPDX-License-Identifier: Apache-2.0
"""Fast path for small sparse products: one compiled function validates operands and computes the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import alloc, cell, collect, get, put, renewed, seq
from sparsetir.ir.views import Axis, cast, const, load
from sparsetir.lower.loops import parallel, serial
from sparsetir.sparse_output.accumulators import LONG, WORD, Bits, Insertion, Output, add, long, lowest, taken_out
from sparsetir.sparse_output.program import AssembledProgram
from sparsetir.sparse_output.rows import ROW_WORK, RowPartition, array, entered_by, size
from sparsetir.sparse_output.selection import LANES, TopSelection, ordered

if TYPE_CHECKING:
    from sparsetir.sparse_output.functions import Functions


# A small call in one function: it validates the index arrays, then collects the rows one by one.


AHEAD = range(2), range(2, 6)  # coordinates of a word that are written before it is known whether it has them
MOST_AHEAD = AHEAD[-1].stop
FEW = 4  # entries up to which a row is sorted by insertion
NARROW = WORD * WORD  # coordinates whose words are marked in one more word


@dataclass
class Leveled(Bits):
    """Marks in two levels: a bitmap, and a second one, `top`, of its nonzero words; a cell for narrow rows."""

    def __post_init__(self) -> None:
        self.is_narrow = len(self.top.ty.shape) == 1

    def begin(self) -> list[tirx.Stmt]:
        cells = [*alloc(self.top), put(self.top, long(0))] if self.is_narrow else []
        return [*cells, *super().begin()]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        wide = cast(key, LONG)
        place = [const(0)] if self.is_narrow else [self.chunk, wide >> long(12)]
        bit = long(1) << ((wide >> long(6)) & long(WORD - 1))
        return [self.mark(wide), tirx.BufferStore(self.top, tirx.BufferLoad(self.top, place) | bit, place)]

    def finish(self) -> list[tirx.Stmt]:
        marks = cell("marks", LONG)
        if self.is_narrow:
            return [*alloc(marks), self.words(self.top, marks, long(0)), self.fetched()]
        words, step = cell("words", LONG), Var("s", ir.PrimType(LONG))
        place = [self.chunk, step]
        take = [put(words, tirx.BufferLoad(self.top, place)), tirx.BufferStore(self.top, long(0), place)]
        visit = serial(step, self.top.ty.shape[1], seq(*take, self.words(words, marks, step * long(WORD))))
        return [*alloc(words, marks), visit, self.fetched()]

    def words(self, words: Var, marks: Var, first: ir.Expr) -> tirx.Stmt:
        """Write the coordinates of the bitmap's words whose bits are set in a cell.

        The number of bits in a word is unpredictable: the first ones are written without a branch, maybe to be
        overwritten.
        """
        block, number, at = (Var(name, ir.PrimType(LONG)) for name in ("block", "number", "at"))
        base, first_left = block * long(WORD), cell("left", LONG)
        first_two, next_four = ([s for n in part for s in self.coordinate(at + long(n), base, marks)] for part in AHEAD)
        write_remaining = seq(*self.coordinate(at + get(first_left), base, marks), add(first_left, 1))
        write_word = [
            tirx.Bind(block, first + lowest(get(words))),
            *self.taken(block, marks),
            tirx.Bind(number, tirx.popcount(get(marks))),
            tirx.Bind(at, get(self.out.pos) + get(self.out.count)),
            *first_two,
            tirx.IfThenElse(number > long(len(AHEAD[0])), seq(*next_four), None),
            put(first_left, long(MOST_AHEAD)),
            tirx.While(get(marks) != long(0), write_remaining),
            add(self.out.count, number),
            put(words, get(words) & (get(words) - long(1))),
        ]
        return seq(*alloc(first_left), tirx.While(get(words) != long(0), seq(*write_word)))

    def coordinate(self, place: ir.Expr, base: ir.Expr, marks: Var) -> list[tirx.Stmt]:
        """Write the coordinate of the lowest bit, or an arbitrary number if no bit is set."""
        keys = self.out.keys
        assert keys is not None
        bit = tirx.call_llvm_pure_intrin(LONG, "llvm.cttz", get(marks), const(False, "bool"))
        key = cast(base + bit, str(keys.ty.dtype))
        return [tirx.BufferStore(keys, key, [place]), put(marks, get(marks) & (get(marks) - long(1)))]

    def fetched(self) -> tirx.Stmt:
        """Write the value of each coordinate, and clear the accumulator."""
        assert self.out.keys is not None
        step, key = Var("entry", ir.PrimType(LONG)), Var("key", ir.PrimType(LONG))
        place = get(self.out.pos) + step
        bind = tirx.Bind(key, cast(tirx.BufferLoad(self.out.keys, [place]), LONG))
        return serial(step, get(self.out.count), seq(bind, *taken_out(self.arrays, [self.chunk, key], self.out, place)))

    @classmethod
    def of(cls, wide: Leveled) -> Leveled:
        """Return the marks for narrow rows, whose second level is one cell."""
        return replace(wide, top=cell("top", LONG))


def unread(assembly: AssembledProgram) -> set[str]:
    """Return the parameters with values that are not read, of operands that only filter."""
    read = [x.source for x in collect(assembly.func.body, ir.TensorLoad)]
    filters = [b for b in assembly.source.buffers.values() if b.axes[-1] in assembly.filters]
    return {str(b.storage.name) for b in filters if not any(x.same_as(b.view) for x in read)}


def operands(assembly: AssembledProgram) -> list[Axis]:
    """Return the column axes of all operands."""
    axes = [b.axes[1] for b in assembly.source.buffers.values() if not any(a.is_assembled for a in b.axes)]
    return list(dict.fromkeys(axes))


def faults(axes: Sequence[Axis], fault: Var) -> list[tirx.Stmt]:
    """Emit checks that leave a cell at zero if the arrays of the axes are valid."""
    stmts: list[tirx.Stmt] = [put(fault, long(0))]
    for axis in axes:
        stmts += _of_pointers(axis, fault)
    for axis in axes:
        stmts.append(tirx.IfThenElse(get(fault).equal(long(0)), seq(*_of_indices(axis, fault)), None))
    return stmts


def _of_pointers(axis: Axis, fault: Var) -> list[tirx.Stmt]:
    assert axis.parent is not None
    assert axis.indptr is not None
    rows, step = cast(axis.parent.length, LONG), Var("step", ir.PrimType(LONG))
    falls = cell("falls", axis.idtype)
    pointer = lambda place: cast(load(axis.indptr, place), LONG)  # noqa: E731
    ends = tirx.Or(pointer(long(0)) != long(0), pointer(rows) != cast(axis.count, LONG))
    fall = cast(load(axis.indptr, step + long(1)) < load(axis.indptr, step), axis.idtype)
    return [
        *alloc(falls),
        put(falls, const(0, axis.idtype)),
        serial(step, rows, put(falls, get(falls) | fall)),
        put(fault, get(fault) | cast(ends, LONG) | cast(get(falls), LONG)),
    ]


def _of_indices(axis: Axis, fault: Var) -> list[tirx.Stmt]:
    assert axis.parent is not None
    assert axis.indptr is not None
    assert axis.indices is not None
    step, outside = Var("step", ir.PrimType(LONG)), cell("outside", axis.idtype)
    key, last = load(axis.indices, step), cast(axis.length, axis.idtype) - const(1, axis.idtype)
    stmts = [
        *alloc(outside),
        put(outside, const(0, axis.idtype)),
        serial(step, cast(axis.count, LONG), put(outside, get(outside) | key | (last - key))),
        put(fault, get(fault) | cast(get(outside) < const(0, axis.idtype), LONG)),
    ]
    if axis.sorted or axis.unique:
        row, entry = (Var(name, ir.PrimType(LONG)) for name in ("r", "e"))
        begin, after = (cast(load(axis.indptr, row + long(n)), LONG) for n in (0, 1))
        pair = [load(axis.indices, begin + entry + long(n)) for n in (0, 1)]
        is_descent = cast(pair[0] >= pair[1] if axis.unique else pair[0] > pair[1], LONG)
        inner = serial(entry, after - begin - long(1), put(fault, get(fault) | is_descent))
        stmts.append(serial(row, cast(axis.parent.length, LONG), inner))
    return stmts


# A small call in one function: index arrays are validated, rows counted, partitioned and written.


ROWS_AHEAD = max(MOST_AHEAD, LANES)  # entries behind a chunk that may be written or read speculatively


def at_once(functions: Functions, *, is_shared: bool) -> tirx.PrimFunc:
    """Compute contiguous rows with row pointers, on one thread or several, if the index arrays are valid.

    The first row pointer is set to 1 if the index arrays are invalid or the products exceed the capacity; then nothing
    is computed. With several chunks, each has its rows from ``firsts[chunk]`` to ``ends[chunk]``.
    """
    return _AtOnce(functions, is_shared=is_shared).func()


class _AtOnce:
    """Builder of the function of one program."""

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
        count, fault = cell("every", LONG), cell("fault", LONG)
        room = get(count) + cast(self.chunks, LONG) * long(ROWS_AHEAD) <= self.capacity
        has_room = tirx.And(get(fault).equal(long(0)), room)
        body = seq(
            *alloc(count, fault),
            put(count, long(0)),
            *faults(operands(self.functions.assembly), fault),
            tirx.IfThenElse(get(fault).equal(long(0)), seq(*self.counted(count)), None),
            self.end(long(0), long(1)),
            tirx.IfThenElse(has_room, seq(self.end(long(0), long(0)), *self.written()), None),
        )
        read = [p for p in self.functions.common if str(p.name) not in unread(self.functions.assembly)]
        split = [self.chunks, self.ranges, self.firsts, self.ends] if self.is_shared else []
        extra = [self.top, self.least, self.heap] if self.functions.options.select else []
        arrays = [self.capacity, self.indptr, self.keys, *self.values]
        return tirx.PrimFunc([*read, *split, *arrays, *self.params, *extra], renewed(body))

    def counted(self, products: Var) -> list[tirx.Stmt]:
        """Count the products of all rows; with several chunks, row pointers then hold the work before each row."""
        total, row, step, chunk = cell("total", LONG), size("row"), size("step"), Var("chunk", ir.PrimType("int32"))
        count_row = seq(self.functions.at_row(row, self.entered(total)), add(products, get(total)))
        if not self.is_shared:
            return [*alloc(total), serial(row, self.count, count_row)]
        first, after = (self.count * (cast(chunk, LONG) + long(n)) // cast(self.chunks, LONG) for n in (0, 1))
        work = cell("work", LONG)
        count_in_chunk = seq(
            tirx.Bind(row, first + step),
            self.functions.at_row(row, self.entered(total)),
            add(work, get(total) + long(ROW_WORK)),
            self.end(row + long(1), get(work)),
        )
        put_work = tirx.BufferStore(self.ends, get(work), [chunk])
        part = seq(*alloc(total, work), put(work, long(0)), serial(step, after - first, count_in_chunk), put_work)
        place = first + step + long(1)
        shift = serial(step, after - first, self.end(place, self.begin(place) + get(products)))
        shifted = seq(
            tirx.IfThenElse(chunk > const(0, "int32"), shift, None), add(products, tirx.BufferLoad(self.ends, [chunk]))
        )
        rows = self.count * long(ROW_WORK)
        return [
            renewed(parallel(chunk, self.chunks, part)),
            renewed(serial(chunk, self.chunks, shifted)),
            put(products, get(products) - rows),
        ]

    def entered(self, total: Var) -> tirx.Stmt:
        """Count the products of the row."""
        return seq(put(total, long(0)), *entered_by(self.rows.body, self.rows, lambda amount, _: [add(total, amount)]))

    def end(self, place: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        """Set a row pointer."""
        return tirx.BufferStore(self.indptr, cast(value, self.functions.assembly.key_dtype), [place])

    def begin(self, place: ir.Expr) -> ir.Expr:
        """Return a row pointer."""
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
            put(self.before, place - cast(chunk, LONG) * long(ROWS_AHEAD) + first * long(ROW_WORK)),
            rows,
            tirx.BufferStore(self.ends, get(self.out.pos), [chunk]),
        ]
        return [*self.shared_out(), parallel(chunk, self.chunks, seq(*body)), *self.closed()]

    def at(self, place: ir.Expr) -> tirx.Stmt:
        """Set the position at which the next row is written."""
        return put(self.out.pos, place)

    def one(self, chunk: Var, row: Var) -> tirx.Stmt:
        """Write one row."""
        total, select = cell("total", LONG), []
        if self.functions.options.select:
            select = TopSelection(self.out, chunk, self.top, self.least, self.heap).stmts()
        pos = self.out.pos
        finish = [*select, add(pos, get(self.out.count)), self.end(row + long(1), get(pos))]
        if self.is_shared:  # the row pointer still holds the work up to the end of the row
            after = self.begin(row + long(1))
            count_products = [put(total, after - get(self.before) - long(ROW_WORK)), put(self.before, after)]
        else:
            count_products = [self.functions.at_row(row, self.entered(total))]
        return renewed(seq(*alloc(total), *count_products, *self.row(chunk, row, get(total)), *finish))

    def row(self, chunk: Var, row: Var, products: ir.Expr) -> list[tirx.Stmt]:
        """Collect one row."""
        functions, work = self.functions, self.work
        if functions.is_stamped:
            return [functions.under_mask(self.out, work, chunk, row)]
        wide = Leveled(self.out, chunk, work.arrays, work.bits, work.top)
        variants = [functions.collected(x, row, work, chunk) for x in (Leveled.of(wide), wide)]
        whole = tirx.IfThenElse(functions.width <= long(NARROW), *variants)
        if any(r.held_dtype != r.dtype for r in functions.assembly.results):
            return [whole]
        short = functions.collected(Insertion(self.out, FEW, functions.assembly.key_dtype), row, work, chunk)
        return [tirx.IfThenElse(products <= long(FEW), short, whole)]

    def room(self) -> tuple[Any, list[Var]]:
        """Return the accumulators, and their parameters."""
        functions, split = self.functions, RowPartition(self.chunks, self.ranges, size("unused"))
        if functions.is_stamped:
            stamps = replace(functions.stamps(split), fetches=False)
            return stamps, stamps.params
        tops = size("tops")
        work = replace(functions.workspace(split, values=True), tops=tops, parts=None, fetches=False)
        work = replace(work, top=array("top", LONG, self.chunks, tops))
        return work, [work.width, work.words, tops, *work.arrays, work.bits, work.top, *work.masks]

    # -------------------------------------------------------------- chunks

    def shared_out(self) -> list[tirx.Stmt]:
        """Partition the rows into chunks of equal work, by bisection in the row pointers, the work before each row."""
        step, low, high, middle = size("step"), cell("low", LONG), cell("high", LONG), size("middle")
        after, share = step + long(1), cast(self.chunks, LONG)
        is_before = self.begin(middle + long(1)) < self.begin(self.count) * after // share
        lower = seq(
            tirx.Bind(middle, (get(low) + get(high)) >> long(1)),
            tirx.IfThenElse(is_before, put(low, middle + long(1)), put(high, middle)),
        )
        bisect = seq(
            *alloc(low, high),
            put(low, tirx.BufferLoad(self.ranges, [step])),
            put(high, self.count),
            tirx.While(get(low) < get(high), lower),
            tirx.BufferStore(self.ranges, get(low), [after]),
            tirx.BufferStore(
                self.firsts, self.begin(get(low)) - get(low) * long(ROW_WORK) + after * long(ROWS_AHEAD), [after]
            ),
        )
        zero: Callable[[Var], tirx.Stmt] = lambda a: tirx.BufferStore(a, long(0), [const(0)])  # noqa: E731
        last = tirx.BufferStore(self.ranges, self.count, [self.chunks])
        return [zero(self.ranges), zero(self.firsts), serial(step, share - long(1), bisect), last]

    def closed(self) -> list[tirx.Stmt]:
        """Set the row pointers to those of contiguous chunks."""
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


__all__ = ["FEW", "MOST_AHEAD", "NARROW", "Leveled", "at_once", "faults", "operands", "unread"]
