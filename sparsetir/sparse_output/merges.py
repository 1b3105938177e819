# SPDX-License-Identifier: Apache-2.0
"""Co-iteration of computed patterns: merges of sorted rows, and searches in long rows for the coordinates of a mask.

A block of rows is inspected before it is merged. Its index arrays are validated while they are loaded into the cache,
so that no separate pass is needed. Where all axes store the same coordinates in a block, its entries are computed side
by side in vectors.

Masked products with long operand rows: the coordinates of the mask's row are searched in them.

Iterating over a row of an operand takes time in proportion to its length. If it is much longer than the mask's row,
searching each coordinate of the mask in it is faster. A bitmap with the number of coordinates before each word does
that in constant time. A row has one if it is long and its coordinates ascend without duplicates, which is verified
while the bitmap is built. If bitmaps would take too much memory, bisection is used, provided all rows are so sorted.
Elements are added up in the same order with both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import copysign

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import (
    LONG,
    alloc,
    cell,
    collect,
    conjunction,
    disjunction,
    folded,
    get,
    long,
    mentions,
    opaque,
    product,
    put,
    renewed,
    same,
    seq,
    smallest,
    substitute,
)
from sparsetir.ir.views import Axis, cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.iterations.normalize import as_logic, with_nan
from sparsetir.lower.loops import parallel, serial
from sparsetir.sparse_output.accumulators import WORD, Output, add
from sparsetir.sparse_output.program import AssembledProgram, Merge
from sparsetir.sparse_output.rows import RowLoop, ScatterStore

BITS = {"float32": "int32", "float64": "int64"}
ROWS = 64  # of a block


@dataclass(frozen=True)
class RowCursor:
    """Position in the row of one axis."""

    axis: Axis
    at: Var
    end: Var

    @classmethod
    def of(cls, axis: Axis) -> RowCursor:
        return cls(axis, cell(f"at_{axis.name}", LONG), cell(f"end_{axis.name}", LONG))

    def start(self, row: ir.Expr) -> list[tirx.Stmt]:
        """Emit the move to the first entry of a row."""
        begin = cast(self.axis.begin(cast(row, self.axis.idtype), []), LONG)
        extent = cast(self.axis.extent(cast(row, self.axis.idtype), []), LONG)
        return [put(self.at, begin), put(self.end, begin + extent)]

    @property
    def is_inside(self) -> ir.Expr:
        return get(self.at) < get(self.end)

    @property
    def coordinate(self) -> ir.Expr:
        return cast(self.axis.coordinate(get(self.at), get(self.at), []), LONG)


def row_of(assembly: AssembledProgram, merge: Merge, out: Output, row: ir.Expr, *, branches: bool) -> list[tirx.Stmt]:
    """Emit one row, and leave the position after it in `out`; two axes use branches if those are predictable."""
    cursors = [RowCursor.of(a) for a in merge.members]
    emit = _EntryEmitter(assembly, merge, out, row, cursors)
    stmts = alloc(*(c for x in cursors for c in (x.at, x.end)))
    stmts += [s for c in cursors for s in c.start(row)]
    if merge.how == "intersect":
        return [*stmts, emit.predicted() if branches else emit.intersection()]
    if len(cursors) > 2:
        return [*stmts, emit.union(cursors), emit.rest()]
    if len(cursors) > 1:
        stmts.append(emit.predicted() if branches else emit.union(cursors))
    return [*stmts, *(emit.tail(c) for c in cursors)]


def block_of(
    assembly: AssembledProgram,
    merge: Merge,
    out: Output,
    rows: tuple[ir.Expr, ir.Expr],
    ends: Var,
    limit: ir.Expr,
    fault: Callable[[], tirx.Stmt],
) -> tirx.Stmt:
    """Emit the rows from the first of `rows` up to the second; emit `fault` for rows whose index arrays are invalid.

    A block is also a fault if it might exceed the room before `limit`, as rows behind invalid ones can.
    """
    first, after = rows
    faults = cell("wrong", LONG)

    def each_row(*, branches: bool) -> tirx.Stmt:
        row, step = Var("row", ir.PrimType(LONG)), Var("step", ir.PrimType(LONG))
        done = tirx.BufferStore(ends, get(out.pos), [row])
        written = row_of(assembly, merge, out, row, branches=branches)
        return serial(step, after - first, seq(tirx.Bind(row, first + step), *written, done))

    one_by_one = each_row(branches=False)
    if len(merge.members) == 2:
        one_by_one = _if_alike(merge, first, after, each_row(branches=True), one_by_one)
    checks = [s for axis in merge.members for s in _checked(axis, first, after, faults)]
    merged = _same_or(one_by_one, assembly, merge, out, rows, ends)
    has_room = tirx.And(get(out.pos) >= long(0), get(out.pos) + _most(merge, first, after) <= limit)
    is_sound = get(faults).equal(long(0))  # required before the room is checked
    body = tirx.IfThenElse(is_sound, tirx.IfThenElse(has_room, merged, fault()), fault())
    return seq(*alloc(faults), put(faults, long(0)), *checks, body)


def _most(merge: Merge, first: ir.Expr, after: ir.Expr) -> ir.Expr:
    """Return an upper bound of the entries of some rows, with the one that an intersection writes ahead."""
    place = lambda axis, row: cast(tirx.BufferLoad(axis.indptr, [row]), LONG)  # noqa: E731
    counts = [place(axis, after) - place(axis, first) for axis in merge.members]
    return sum(counts[1:], start=counts[0]) if merge.how == "union" else reduce(tirx.min, counts) + long(1)


def _checked(axis: Axis, first: ir.Expr, after: ir.Expr, faults: Var) -> list[tirx.Stmt]:
    """Count faults of some rows: row pointers that decrease or lie outside, coordinates outside or unsorted."""
    assert axis.indptr is not None
    assert axis.indices is not None
    indptr, indices, kind = axis.indptr, axis.indices, str(axis.indices.ty.dtype)
    count = cast(axis.indices.ty.shape[0], LONG)
    begin, end, low, high = (Var(name, ir.PrimType(LONG)) for name in ("begin", "end", "low", "high"))
    falls, outside, unsorted = cell("falls", LONG), cell("outside", kind), cell("unsorted", LONG)
    at = lambda array, place: tirx.BufferLoad(array, [place])  # noqa: E731
    falling, inside, sorting, start = (Var(name, ir.PrimType(LONG)) for name in ("r", "e", "e", "r"))
    pointer = lambda step: at(indptr, first + step)  # noqa: E731
    key, last = at(indices, begin + inside), cast(axis.length, kind) - const(1, kind)
    here = begin + sorting
    descends = lambda place: cast(at(indices, place) <= at(indices, place - long(1)), LONG)  # noqa: E731
    begins = [tirx.Bind(low, cast(pointer(start), LONG)), tirx.Bind(high, cast(pointer(start + long(1)), LONG))]
    may_descend = tirx.And(low < high, low > begin)
    check = tirx.IfThenElse(may_descend, add(unsorted, long(0) - descends(low)), None)
    nearest = tirx.max(tirx.min(low, end - long(1)), begin + long(1))
    sparse = add(unsorted, long(0) - (cast(may_descend, LONG) & descends(nearest)))  # empty rows are unpredictable
    each_begin = lambda stmt: serial(start, after - first, seq(*begins, stmt))  # noqa: E731
    at_begins = tirx.IfThenElse(end - begin > after - first, each_begin(check), renewed(each_begin(sparse)))
    entries = seq(
        serial(inside, end - begin, put(outside, get(outside) | key | (last - key))),
        serial(sorting, end - begin - long(1), add(unsorted, descends(here + long(1)))),
        tirx.IfThenElse(get(unsorted) != long(0), at_begins, None),
        add(faults, tirx.Select(tirx.Or(get(outside) < const(0, kind), get(unsorted) != long(0)), long(1), long(0))),
    )
    is_inside = conjunction([get(falls).equal(long(0)), begin >= long(0), end <= count])
    return [
        *alloc(falls, outside, unsorted),
        *(put(c, const(0, str(c.ty.dtype))) for c in (falls, outside, unsorted)),
        tirx.Bind(begin, cast(pointer(long(0)), LONG)),
        tirx.Bind(end, cast(at(indptr, after), LONG)),
        serial(falling, after - first, add(falls, cast(pointer(falling + long(1)) < pointer(falling), LONG))),
        tirx.IfThenElse(is_inside, entries, add(faults, 1)),
    ]


def _if_alike(merge: Merge, first: ir.Expr, after: ir.Expr, similar: tirx.Stmt, different: tirx.Stmt) -> tirx.Stmt:
    """Emit `similar` for rows most of which have the length of the row before, else `different`.

    Rows of a mesh or a table are such: they are likely to be merged in the same order, so branches are predictable.
    """
    count, row = cell("alike", LONG), Var("r", ir.PrimType(LONG))
    here = first + row + long(1)

    def lengthens(axis: Axis) -> ir.Expr:
        before, start, end = (tirx.BufferLoad(axis.indptr, [here + long(n)]) for n in (-1, 0, 1))
        return (end - start) - (start - before)

    change = [cast(lengthens(axis), merge.idtype) for axis in merge.members]
    is_alike = cast((change[0] | change[1]).equal(const(0, merge.idtype)), LONG)
    count_alike = serial(row, after - first - long(1), add(count, is_alike))
    are_alike = get(count) * long(4) > (after - first) * long(3)
    return seq(*alloc(count), put(count, long(0)), count_alike, tirx.IfThenElse(are_alike, similar, different))


def _same_or(
    general: tirx.Stmt, assembly: AssembledProgram, merge: Merge, out: Output, rows: tuple[ir.Expr, ir.Expr], ends: Var
) -> tirx.Stmt:
    """Emit rows entry by entry where all axes store the same coordinates; emit `general` elsewhere."""
    first, after = rows
    unknown = Var("row", ir.PrimType(LONG))
    entries = _side_by_side(assembly, merge, out, unknown, first, after)
    if mentions(entries, [unknown]) or len(merge.members) < 2:
        return general
    head, *tail = merge.members
    differs = cell("differs", merge.idtype)
    zero = const(0, merge.idtype)
    pointer = lambda axis, place: cast(tirx.BufferLoad(axis.indptr, [place]), merge.idtype)  # noqa: E731
    begin, count = (
        {a: Var(f"{name}_{a.name}", ir.PrimType(LONG)) for a in merge.members} for name in ("begin", "count")
    )
    bound = [tirx.Bind(begin[a], cast(pointer(a, first), LONG)) for a in merge.members]
    bound += [tirx.Bind(count[a], cast(pointer(a, after), LONG) - begin[a]) for a in merge.members]
    as_long = conjunction([count[a].equal(count[head]) for a in tail])
    compare = [put(differs, zero)]
    for axis in tail:
        row, entry = Var("r", ir.PrimType(LONG)), Var("e", ir.PrimType(LONG))
        ahead = lambda a, place: pointer(a, place) - pointer(a, first)  # noqa: E731
        gap = ahead(head, first + row) ^ ahead(axis, first + row)
        compare.append(serial(row, after - first, put(differs, get(differs) | gap)))
        pair = [cast(tirx.BufferLoad(a.indices, [begin[a] + entry]), merge.idtype) for a in (head, axis)]
        unequal = serial(entry, count[head], put(differs, get(differs) | (pair[0] ^ pair[1])))
        compare.append(tirx.IfThenElse(get(differs).equal(zero), unequal, None))
    row = Var("r", ir.PrimType(LONG))
    end = get(out.pos) + cast(pointer(head, first + row + long(1)), LONG) - begin[head]
    copy = [
        serial(row, after - first, tirx.BufferStore(ends, end, [first + row])),
        entries,
        add(out.pos, count[head]),
    ]
    is_same = tirx.IfThenElse(as_long, seq(*compare), put(differs, const(1, merge.idtype)))
    return seq(*bound, *alloc(differs), is_same, tirx.IfThenElse(get(differs).equal(zero), seq(*copy), general))


def _side_by_side(
    assembly: AssembledProgram, merge: Merge, out: Output, row: Var, first: ir.Expr, after: ir.Expr
) -> tirx.Stmt:
    """Emit the entries of rows in which all axes store the same coordinates."""
    cursors = [RowCursor.of(a) for a in merge.members]
    emit = _EntryEmitter(assembly, merge, out, row, cursors)
    step, key, count = (Var(name, ir.PrimType(LONG)) for name in ("step", "j", "count"))
    pointer = lambda place: cast(tirx.BufferLoad(cursors[0].axis.indptr, [place]), LONG)  # noqa: E731
    here = get(cursors[0].at) + step
    coordinate = cast(cursors[0].axis.coordinate(here, here, []), LONG)
    entry = emit.entry(key, dict.fromkeys(cursors, const(True, "bool")), step=step)
    starts = [put(c.at, cast(tirx.BufferLoad(c.axis.indptr, [first]), LONG)) for c in cursors]
    bound = tirx.Bind(count, pointer(after) - pointer(first))
    return seq(
        *alloc(*(c.at for c in cursors)), *starts, bound, serial(step, count, seq(tirx.Bind(key, coordinate), *entry))
    )


class _EntryEmitter:
    """Emitter of a row's entries at the positions of the cursors."""

    def __init__(
        self, assembly: AssembledProgram, merge: Merge, out: Output, row: ir.Expr, cursors: Sequence[RowCursor]
    ) -> None:
        self.assembly, self.merge, self.out, self.row, self.cursors = assembly, merge, out, row, cursors
        self.masks: dict[RowCursor, ir.Expr] = {}  # of cursors that may be at the coordinate: all bits set if they are

    def union(self, cursors: Sequence[RowCursor]) -> tirx.Stmt:
        """Emit entries while all cursors are inside their rows: the least coordinate, of each axis that stores it."""
        names = [Var(f"j_{c.axis.name}", ir.PrimType(LONG)) for c in cursors]
        least = Var("j", ir.PrimType(LONG))
        stores = [name.equal(least) for name in names]
        stmts: list[tirx.Stmt] = [tirx.Bind(n, c.coordinate) for n, c in zip(names, cursors, strict=True)]
        if len(names) == 2:
            x, y = (cast(name, "uint64") for name in names)
            stores = [x <= y, y <= x]
            gap = Var("gap", ir.PrimType(LONG))
            stmts.append(tirx.Bind(gap, names[0] - names[1]))
            signs = [(gap - long(1)) >> long(63), tirx.bitwise_not(gap >> long(63))]
            self.masks = dict(zip(cursors, signs, strict=True))
        stmts += [tirx.Bind(least, smallest(names)), *self.entry(least, dict(zip(cursors, stores, strict=True)))]
        self.masks = {}
        stmts += [add(self.out.pos, 1)]
        stmts += [put(c.at, get(c.at) + cast(h, LONG)) for c, h in zip(cursors, stores, strict=True)]
        return tirx.While(conjunction([c.is_inside for c in cursors]), seq(*stmts))

    def predicted(self) -> tirx.Stmt:
        """Emit a merge of two cursors with a branch for each of the three cases."""
        first, second = self.cursors
        names = [Var(f"j_{c.axis.name}", ir.PrimType(LONG)) for c in self.cursors]
        is_union = self.merge.how == "union"

        def case(key: Var, *cursors: RowCursor, writes: bool) -> tirx.Stmt:
            stores = dict.fromkeys(cursors, const(True, "bool"))
            entry = [*self.entry(key, stores), add(self.out.pos, 1)] if writes else []
            return seq(*entry, *(add(c.at, 1) for c in cursors))

        single = tirx.IfThenElse(
            names[0] < names[1], case(names[0], first, writes=is_union), case(names[1], second, writes=is_union)
        )
        both = case(names[0], first, second, writes=True)
        steps = [tirx.Bind(n, c.coordinate) for n, c in zip(names, self.cursors, strict=True)]
        cases = tirx.IfThenElse(names[0].equal(names[1]), both, single)
        return tirx.While(conjunction([c.is_inside for c in self.cursors]), seq(*steps, cases))

    def rest(self) -> tirx.Stmt:
        """Emit entries while any cursor is inside its row."""
        past = const(2**62, LONG)
        names = [Var(f"j_{c.axis.name}", ir.PrimType(LONG)) for c in self.cursors]
        least = Var("j", ir.PrimType(LONG))
        stores = [name.equal(least) for name in names]
        coordinates = [tirx.if_then_else(c.is_inside, c.coordinate, past) for c in self.cursors]
        stmts = [tirx.Bind(n, v) for n, v in zip(names, coordinates, strict=True)]
        entry = self.entry(least, dict(zip(self.cursors, stores, strict=True)), guarded=True)
        stmts += [tirx.Bind(least, smallest(names)), *entry, add(self.out.pos, 1)]
        stmts += [put(c.at, get(c.at) + cast(h, LONG)) for c, h in zip(self.cursors, stores, strict=True)]
        return tirx.While(disjunction([c.is_inside for c in self.cursors]), seq(*stmts))

    def tail(self, cursor: RowCursor) -> tirx.Stmt:
        """Emit the entries of one axis after those of all others."""
        step = Var("step", ir.PrimType(LONG))
        key = Var("j", ir.PrimType(LONG))
        here = get(cursor.at) + step
        coordinate = cast(cursor.axis.coordinate(here, here, []), LONG)
        body = [tirx.Bind(key, coordinate), *self.entry(key, {cursor: const(True, "bool")}, step=step)]
        count = get(cursor.end) - get(cursor.at)
        loop = serial(step, count, seq(*body))
        return seq(loop, add(self.out.pos, tirx.max(count, long(0))))

    def intersection(self) -> tirx.Stmt:
        """Emit entries where all cursors are at one coordinate; one is written ahead, and the next one replaces it."""
        names = [Var(f"j_{c.axis.name}", ir.PrimType(LONG)) for c in self.cursors]
        most = Var("j", ir.PrimType(LONG))
        stmts = [tirx.Bind(n, c.coordinate) for n, c in zip(names, self.cursors, strict=True)]
        stmts += [tirx.Bind(most, reduce(tirx.max, names))]
        is_there = product([cast(n.equal(most), LONG) for n in names])
        everywhere = dict.fromkeys(self.cursors, const(True, "bool"))
        stmts += [*self.entry(most, everywhere), add(self.out.pos, is_there)]
        if len(names) == 2:
            x, y = (cast(name, "uint64") for name in names)
            moves = [x <= y, y <= x]
        else:
            moves = [tirx.Or(n < most, is_there > long(0)) for n in names]
        stmts += [put(c.at, get(c.at) + cast(m, LONG)) for c, m in zip(self.cursors, moves, strict=True)]
        return tirx.While(conjunction([c.is_inside for c in self.cursors]), seq(*stmts))

    def entry(
        self, key: Var, has: dict[RowCursor, ir.Expr], *, guarded: bool = False, step: ir.Expr | None = None
    ) -> list[tirx.Stmt]:
        """Emit the entry of a coordinate at which the axes of some cursors store elements."""
        place = [get(self.out.pos) + (long(0) if step is None else step)]
        assert self.out.keys is not None
        stmts: list[tirx.Stmt] = [
            tirx.BufferStore(self.out.keys, cast(key, str(self.out.keys.ty.dtype)), place),
        ]
        for store in self.merge.stores:
            number = next(n for n, r in enumerate(self.assembly.results) if r.name == str(store.buffer.name))
            self.pairs: list[tirx.Stmt] = []
            value = self.value(store.value, key, has, guarded=guarded, step=step)
            stmts += [*self.pairs, tirx.BufferStore(self.out.values[number], value, place)]
        return stmts

    def either(self, cursor: RowCursor, there: ir.Expr, element: ir.Expr, fallback: ir.Expr) -> ir.Expr:
        """Select one of two values by arithmetic or a subscript: LLVM turns a select into a branch."""
        dtype = str(element.ty.dtype)
        if isinstance(there, tirx.IntImm):
            return tirx.Select(there, element, fallback)
        bits = BITS.get(dtype, dtype)
        if cursor in self.masks and bits.startswith(("int", "uint")) and _is_zero(fallback):
            masked = tirx.reinterpret(bits, element) if bits != dtype else element
            masked = masked & cast(self.masks[cursor], bits)
            return tirx.reinterpret(dtype, masked) if bits != dtype else masked
        if not dtype.startswith("float"):
            return tirx.Select(there, element, fallback)
        pair = tirx.decl_buffer((2,), dtype, name="pair", scope="local", layout=None)
        self.pairs += [
            *alloc(pair),
            *(tirx.BufferStore(pair, x, [const(n)]) for n, x in enumerate((fallback, element))),
        ]
        return tirx.BufferLoad(pair, [cast(there, "int32")])

    def opaque(self, value: ir.Expr) -> ir.Expr:
        """Return a number that TVM does not fold as a constant."""
        before, number = opaque(value)
        self.pairs += before
        return number

    def value(
        self, value: ir.Expr, key: Var, stores: dict[RowCursor, ir.Expr], *, guarded: bool, step: ir.Expr | None
    ) -> ir.Expr:
        """Return the stored value in terms of positions."""
        buffers = self.assembly.source.buffers
        of_axis = {c.axis: c for c in self.cursors}
        hides = bool(folded(value))

        def on_load(load: ir.TensorLoad, mutator: object) -> ir.Expr:
            buffer = buffers[load.source]
            if buffer.is_dense:
                indices = [self.row if i.same_as(self.merge.row) else key for i in load.indices]
                pairs = zip(indices, buffer.axes, strict=True)
                return tirx.BufferLoad(buffer.storage, [cast(i, a.idtype) for i, a in pairs])
            cursor = of_axis[buffer.axes[1]]
            is_stored = stores.get(cursor)
            if is_stored is None:
                return self.opaque(buffer.default) if hides else buffer.default
            at = get(cursor.at) + (long(0) if step is None else step)
            element = tirx.BufferLoad(buffer.storage, [at])
            if guarded:
                return tirx.if_then_else(is_stored, element, buffer.default)
            return self.either(cursor, is_stored, element, buffer.default)

        def on_var(var: Var, _kind: int) -> ir.Expr:
            if var.same_as(self.merge.row):
                return cast(self.row, str(var.ty.dtype))
            return cast(key, str(var.ty.dtype)) if var.same_as(self.merge.var) else var

        positional = structural_mutate(with_nan(value), [(ir.TensorLoad, on_load)])
        return as_logic(tvm_ffi.structural_map(positional, with_def_region_kind=(Var, on_var)))


def _is_zero(value: ir.Expr) -> bool:
    """Return whether a number has no bit set."""
    if isinstance(value, tirx.FloatImm):
        return not value.value and copysign(1, value.value) > 0
    return isinstance(value, tirx.IntImm) and not int(value)


# ------------------------------------------------------------------------------- searches in long rows


LONG_ROW = 64  # entries from which on a row may have a bitmap
LOOK_WORK = 5  # coordinates that are iterated over in the time of a lookup
SEARCH_STEP, SEARCH_WORK = 8, 8  # the same for a step of a bisection, and for its beginning and end


@dataclass(frozen=True)
class RowWalk:
    """A loop over a row of an operand that enters every coordinate of it.

    Parameters
    ----------
    loop : For
    axis : Axis
        The axis that stores the coordinates.
    row : Expr
        The parent position of the row.
    key : Expr
        The coordinate that a step of the loop enters.
    scatters : list of ScatterStore
        The statements of a step.
    """

    loop: tirx.For
    axis: Axis
    row: ir.Expr
    key: ir.Expr
    scatters: list[ScatterStore]

    @property
    def extent(self) -> ir.Expr:
        """The number of coordinates of the row."""
        return cast(self.loop.extent, LONG)

    def search_work(self, count: ir.Expr) -> ir.Expr:
        """Return the work of bisection for so many coordinates, in units of iterations over coordinates."""
        steps = long(WORD) - tirx.call_llvm_pure_intrin(LONG, "llvm.ctlz", self.extent, const(False, "bool"))
        return count * (steps * long(SEARCH_STEP) + long(SEARCH_WORK))

    def searched(
        self,
        count: ir.Expr,
        coordinate: Callable[[Var], ir.Expr],
        stmt: Callable[[Var, Var], tirx.Stmt],
    ) -> tirx.Stmt:
        """Emit a search by bisection for a mask's row of `count` coordinates in the sorted row.

        `stmt` is given the entry of the operand's row and that of the mask's.
        """
        dtype = str(self.loop.loop_var.ty.dtype)
        lo, span = cell("lo", dtype), cell("rest", dtype)
        step, key = (Var(n, ir.PrimType(LONG)) for n in ("step", "key"))
        half, entry = (Var(n, self.loop.loop_var.ty) for n in ("half", "entry"))
        key_at = lambda at: cast(substitute(self.key, {self.loop.loop_var: at}), LONG)  # noqa: E731
        narrow = seq(
            tirx.Bind(half, get(span) >> const(1, dtype)),
            put(lo, get(lo) + tirx.Select(key_at(get(lo) + half) <= key, half, const(0, dtype))),
            put(span, get(span) - half),
        )
        search = seq(
            tirx.Bind(key, coordinate(step)),
            put(lo, const(0, dtype)),
            put(span, self.loop.extent),
            tirx.While(get(span) > const(1, dtype), narrow),
            tirx.Bind(entry, get(lo)),
            tirx.IfThenElse(key_at(entry).equal(key), stmt(entry, step), None),
        )
        return seq(*alloc(lo, span), serial(step, count, search))


def walks_of(rows: RowLoop, assembly: AssembledProgram) -> list[RowWalk]:
    """Return the masked program's loops over rows of one operand that only enter their coordinates."""
    plain = [a for a in assembly.source.axes.values() if a.kind == "sparse_variable" and a.rule is None]
    axes = {str(a.indices.name): a for a in plain if a.indices is not None}
    loops = [_walk(loop, rows, axes) for loop in collect(rows.body, tirx.For)]
    walks = [w for w in loops if w is not None]
    return [w for w in walks if w.axis is walks[0].axis]


def _walk(loop: tirx.For, rows: RowLoop, axes: dict[str, Axis]) -> RowWalk | None:
    """Return the walk of a loop over all entries of a row, or None if the loop is not one."""
    stores = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
    scatters = [s for s in map(rows.scatter_of, stores) if s is not None and not s.inner]
    if not scatters or len(scatters) < len(stores) or not isinstance(loop.extent, tirx.Sub):
        return None
    after, begin = loop.extent.a, loop.extent.b
    key = scatters[0].key
    if not all(isinstance(x, ir.TensorLoad) and len(x.indices) == 1 for x in (after, begin, key)):
        return None
    axis = axes.get(str(key.source.name))
    if axis is None or axis.indptr is None or str(begin.source.name) != str(axis.indptr.name):
        return None
    row = begin.indices[0]
    is_next = after.source.same_as(begin.source) and same(after.indices[0], row + 1)
    is_whole = is_next and same(key.indices[0], begin + loop.loop_var) and same(loop.min, const(0, axis.idtype))
    return RowWalk(loop, axis, row, key, scatters) if is_whole and all(same(s.key, key) for s in scatters) else None


@dataclass(frozen=True)
class BitmapParams:
    """Parameters that hold the bitmaps.

    Parameters
    ----------
    searches : Var
        Whether all rows of the operand are sorted, so that bisection may be used.
    least : Var
        Entries from which on a row of the operand has one, if it is sorted.
    count, words, above : Var
        How many there are, words of each, and rows of the operand.
    rows : Var
        Which rows they are of.
    marks : Var
        For each 64 coordinates their bits, and how many are stored before.
    numbers : Var
        Of a row of the operand the number of its bitmap, -1 where it is not sorted. Set for long rows alone.
    """

    searches: Var
    least: Var
    count: Var
    words: Var
    above: Var
    rows: Var
    marks: Var
    numbers: Var

    @classmethod
    def new(cls) -> BitmapParams:
        """Create the parameters of a function."""
        count, words, above = (Var(name, ir.PrimType(LONG)) for name in ("looked_up", "look_words", "look_rows"))
        shapes = {"rows": [count], "marks": [count, words, long(2)], "numbers": [above]}
        buffers = {n: tirx.decl_buffer(shape, LONG, name=f"look_{n}", layout=None) for n, shape in shapes.items()}
        searches, least = (Var(name, ir.PrimType(LONG)) for name in ("searches", "look_least"))
        return cls(searches, least, count, words, above, **buffers)

    @property
    def params(self) -> list[Var]:
        """The parameters in the order of the function's signature."""
        return [self.searches, self.least, self.count, self.words, self.above, self.rows, self.marks, self.numbers]

    def made(self, axis: Axis) -> tirx.Stmt:
        """Emit the construction of the bitmaps."""
        number, row, step, word, clear, key = (
            Var(name, ir.PrimType(LONG)) for name in ("number", "row", "step", "word", "clear", "key")
        )
        last, is_sorted, total = (cell(name, LONG) for name in ("last", "ascends", "total"))
        above = cast(row, axis.idtype)
        begin, extent = cast(axis.begin(above, []), LONG), cast(axis.extent(above, []), LONG)
        bits = lambda at: [number, at, long(0)]  # noqa: E731
        before = lambda at: [number, at, long(1)]  # noqa: E731
        bits_of_word = tirx.BufferLoad(self.marks, bits(key >> long(6)))
        ascends = tirx.if_then_else(key > get(last), get(is_sorted), long(0))
        entry = [
            tirx.Bind(key, cast(axis.coordinate(begin + step, step, []), LONG)),
            put(is_sorted, ascends),
            put(last, key),
            tirx.BufferStore(self.marks, bits_of_word | (long(1) << (key & long(63))), bits(key >> long(6))),
        ]
        count = [
            tirx.BufferStore(self.marks, get(total), before(word)),
            add(total, tirx.popcount(tirx.BufferLoad(self.marks, bits(word)))),
        ]
        bitmap_number = tirx.if_then_else(get(is_sorted) != long(0), number, long(-1))
        build = seq(
            *alloc(last, is_sorted, total),
            tirx.Bind(row, tirx.BufferLoad(self.rows, [number])),
            put(last, long(-1)),
            put(is_sorted, long(1)),
            put(total, long(0)),
            serial(clear, self.words, tirx.BufferStore(self.marks, long(0), bits(clear))),
            serial(step, extent, seq(*entry)),
            serial(word, self.words, seq(*count)),
            tirx.BufferStore(self.numbers, bitmap_number, [row]),
        )
        return tirx.IfThenElse(self.count > long(0), parallel(number, self.count, build), None)

    def over(
        self,
        walk: RowWalk,
        count: ir.Expr,
        coordinate: Callable[[Var], ir.Expr],
        stmt: Callable[[Var, Var, ir.Expr], tirx.Stmt],
        otherwise: tirx.Stmt,
    ) -> tirx.Stmt:
        """Emit a walk; where the row has a bitmap, a search in it for the mask's row of `count` coordinates.

        `stmt` is given the entry of the operand's row, that of the mask's row, and whether they have one coordinate.
        """
        number, extent = cell("number", LONG), walk.extent
        step, key, word, bit, before = (Var(n, ir.PrimType(LONG)) for n in ("step", "key", "word", "bit", "before"))
        entry = Var("entry", walk.loop.loop_var.ty)
        at = [get(number), key >> long(WORD.bit_length() - 1)]
        # A missing coordinate is added up at some entry, in an element of `Stamped` that is never read.
        place = tirx.min(before + tirx.popcount(word & ((long(1) << bit) - long(1))), extent - long(1))
        is_stored = ((word >> bit) & long(1)) != long(0)
        inner = [
            tirx.Bind(key, coordinate(step)),
            tirx.Bind(word, tirx.BufferLoad(self.marks, [*at, long(0)])),
            tirx.Bind(before, tirx.BufferLoad(self.marks, [*at, long(1)])),
            tirx.Bind(bit, key & long(WORD - 1)),
            tirx.Bind(entry, cast(place, str(entry.ty.dtype))),
            stmt(entry, step, is_stored),
        ]
        is_long = tirx.And(extent >= self.least, extent > count * long(LOOK_WORK))
        ask = tirx.IfThenElse(is_long, put(number, tirx.BufferLoad(self.numbers, [cast(walk.row, LONG)])), None)
        search = serial(step, count, seq(*inner))
        return seq(
            *alloc(number), put(number, long(-1)), ask, tirx.IfThenElse(get(number) >= long(0), search, otherwise)
        )


__all__ = ["LONG_ROW", "LOOK_WORK", "ROWS", "BitmapParams", "RowWalk", "block_of", "walks_of"]
