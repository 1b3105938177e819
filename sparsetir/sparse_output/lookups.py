# SPDX-License-Identifier: Apache-2.0
"""Masked products with long operand rows: the coordinates of the mask's row are searched in them.

Iterating over a row of an operand takes time in proportion to its length. If it is much longer than the mask's row,
searching each coordinate of the mask in it is faster. A bitmap with the number of coordinates before each word does
that in constant time. A row has one if it is long and its coordinates ascend without duplicates, which is verified
while the bitmap is built. If bitmaps would take too much memory, bisection is used, provided all rows are so sorted.
Elements are added up in the same order with both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import alloc, cell, collect, get, put, same, seq, substitute
from sparsetir.ir.views import Axis, cast, const
from sparsetir.lower.loops import parallel, serial
from sparsetir.sparse_output.accumulators import LONG, WORD, add, long
from sparsetir.sparse_output.program import Assembly
from sparsetir.sparse_output.rows import Rows, Scatter

LONG_ROW = 64  # entries from which on a row may have a bitmap
LOOK_WORK = 5  # coordinates that are iterated over in the time of a lookup
SEARCH_STEP, SEARCH_WORK = 8, 8  # the same for a step of a bisection, and for its beginning and end


@dataclass(frozen=True)
class Walk:
    """A loop over a row of an operand that enters every coordinate of it.

    Parameters
    ----------
    loop : For
    axis : Axis
        Whose coordinates they are.
    row : Expr
        The position above it.
    key : Expr
        The coordinate of an iteration.
    scatters : list of Scatter
        The statements of an iteration.
    """

    loop: tirx.For
    axis: Axis
    row: ir.Expr
    key: ir.Expr
    scatters: list[Scatter]

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


def walks_of(rows: Rows, assembly: Assembly) -> list[Walk]:
    """Return the masked program's loops over rows of one operand that only enter their coordinates."""
    plain = [a for a in assembly.source.axes.values() if a.kind == "sparse_variable" and a.rule is None]
    axes = {str(a.indices.name): a for a in plain if a.indices is not None}
    loops = [_walk(loop, rows, axes) for loop in collect(rows.body, tirx.For)]
    walks = [w for w in loops if w is not None]
    return [w for w in walks if w.axis is walks[0].axis]


def _walk(loop: tirx.For, rows: Rows, axes: dict[str, Axis]) -> Walk | None:
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
    return Walk(loop, axis, row, key, scatters) if is_whole and all(same(s.key, key) for s in scatters) else None


@dataclass(frozen=True)
class Lookups:
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
    def new(cls) -> Lookups:
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
        walk: Walk,
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


__all__ = ["LONG_ROW", "LOOK_WORK", "Lookups", "Walk", "walks_of"]
