# SPDX-License-Identifier: Apache-2.0
"""Long rows in segments of columns: products are sorted into segments first, so that accumulators stay in the cache.

The method is that of MAGNUS (ICS 2025): the products of a row are written contiguously, segment by segment, and each
segment is then accumulated separately. Products of one coordinate stay in order, so the result is the same bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import alloc, cell, get, mentions, put, seq
from sparsetir.ir.views import cast
from sparsetir.lower.loops import serial
from sparsetir.sparse_output.accumulators import LONG, add, long
from sparsetir.sparse_output.rows import Rows, Scatter, with_own

SHIFT = 16  # a segment has so many columns, as a power of two: 256 KB of float32 elements
MOST_PARTS = 1 << 21  # products of a row that are sorted into segments
LEAST_PARTS = 256  # products per segment of a row above which segments pay
SUMS = (tirx.Add, tirx.Min, tirx.Max)


@dataclass(frozen=True)
class Update:
    """A statement ``c = c + x * y`` by its parts, which are stored for each product until its segment is accumulated.

    Parameters
    ----------
    kind : type
        Of the sum.
    parts : tuple of Expr
        The factors, not their product: accumulation may use one fused instruction, which rounds once.
    own_first : bool
        Whether the element is the left operand.
    """

    kind: type
    parts: tuple[ir.Expr, ...]
    own_first: bool

    @classmethod
    def of(cls, scatter: Scatter) -> Update | None:
        """Return the parts of a scatter of this form, or None for another statement."""
        element = Var("own", ir.PrimType(scatter.result.dtype))
        value = with_own(scatter, element)
        if not isinstance(value, SUMS) or scatter.result.held_dtype != scatter.result.dtype:
            return None
        own_first = value.a.same_as(element)
        addend = value.b if own_first else value.a
        if not (own_first or value.b.same_as(element)) or mentions(addend, [element]):
            return None
        parts = (addend.a, addend.b) if isinstance(addend, tirx.Mul) else (addend,)
        return cls(type(value), parts, own_first)

    def on(self, element: ir.Expr, parts: Sequence[ir.Expr]) -> ir.Expr:
        """Return the sum of an element and the product of these parts."""
        addend = parts[0] if len(parts) == 1 else tirx.Mul(*parts)
        return self.kind(element, addend) if self.own_first else self.kind(addend, element)


def update_of(rows: Rows) -> Update | None:
    """Return the only update of a program whose rows can be sorted into segments, or None."""
    if len(rows.scatters) != 1 or rows.blocks or rows.scatters[0].inner:
        return None
    return Update.of(rows.scatters[0])


@dataclass(frozen=True)
class Parts:
    """Parameters that hold the products of a row, segment by segment.

    Parameters
    ----------
    count, room : Var
        The number of segments, and the products that fit.
    places : Var
        The position of the products of each segment, for each chunk.
    keys : Var
        The coordinates of the products.
    values : sequence of Var
        The stored parts of each product.
    """

    count: Var
    room: Var
    places: Var
    keys: Var
    values: Sequence[Var]

    @property
    def params(self) -> list[Var]:
        return [self.count, self.room, self.places, self.keys, *self.values]

    def fits(self, bound: ir.Expr) -> ir.Expr:
        """Return the condition that a row with at most `bound` products may be sorted into segments."""
        return tirx.And(bound <= self.room, bound >= self.count * long(LEAST_PARTS))

    def place(self, chunk: Var, segment: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(self.places, [chunk, segment])

    def set_place(self, chunk: Var, segment: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(self.places, value, [chunk, segment])

    def counted(self, chunk: Var, key: Var) -> list[tirx.Stmt]:
        """Count one more product in a segment."""
        segment = cast(key, LONG) >> long(SHIFT)
        return [self.set_place(chunk, segment, self.place(chunk, segment) + long(1))]

    def kept(self, chunk: Var, key: Var, parts: Sequence[ir.Expr]) -> list[tirx.Stmt]:
        """Write a product behind the others of its segment."""
        at, segment = Var("at", ir.PrimType(LONG)), cast(key, LONG) >> long(SHIFT)
        pairs = zip((self.keys, *self.values), (key, *parts), strict=False)
        stores = [tirx.BufferStore(array, value, [chunk, at]) for array, value in pairs]
        return [
            tirx.Bind(at, self.place(chunk, segment)),
            *stores,
            self.set_place(chunk, segment, at + long(1)),
        ]

    def collected(
        self,
        chunk: Var,
        bound: ir.Expr,
        count: tirx.Stmt,
        keep: tirx.Stmt,
        one: Callable[[Var, Var, Var], tirx.Stmt],
        whole: tirx.Stmt,
    ) -> tirx.Stmt:
        """Emit the sort of a row's products, then `one` for each segment, given its number, its begin and its end.

        `whole` handles rows that are short or have more products than fit. The check counts products, since `bound`, an
        upper bound of a row's entries, never exceeds the number of columns, while all products of a coordinate are
        stored.
        """
        step, segment = Var("s", ir.PrimType(LONG)), Var("segment", ir.PrimType(LONG))
        total, size, is_cut = (cell(name, LONG) for name in ("total", "held", "is_cut"))
        none = Var("s", ir.PrimType(LONG))
        clear = serial(none, self.count, self.set_place(chunk, none, long(0)))
        begin = [put(size, self.place(chunk, step)), self.set_place(chunk, step, get(total)), add(total, get(size))]
        starts = serial(step, self.count, seq(*begin))
        first, after = Var("first", ir.PrimType(LONG)), Var("after", ir.PrimType(LONG))
        bound_to = [tirx.Bind(first, get(total)), tirx.Bind(after, self.place(chunk, segment))]
        nonempty = tirx.IfThenElse(after > first, one(segment, first, after), None)
        segments = serial(segment, self.count, seq(*bound_to, nonempty, put(total, after)))
        check = seq(clear, count, starts, put(is_cut, cast(get(total) <= self.room, LONG)))
        return seq(
            *alloc(total, size, is_cut),
            put(total, long(0)),
            put(is_cut, cast(self.fits(bound), LONG)),
            tirx.IfThenElse(get(is_cut) != long(0), check, None),
            tirx.IfThenElse(get(is_cut) != long(0), seq(keep, put(total, long(0)), segments), whole),
        )


__all__ = ["LEAST_PARTS", "MOST_PARTS", "SHIFT", "Parts", "Update", "update_of"]
