# SPDX-License-Identifier: Apache-2.0
"""Copy some columns of an array, whichever dimension they are, into scratch that has them last.

The copy of columns ``first`` to ``first + count`` of ``b[k, x]`` is::

    for x_1 in range((n + 15) // 16):
        for y_0 in range(count // 8):
            for x in range(T.min(16, n - x_1 * 16)):
                for y in T.vectorized(8):
                    b_panel[x_1 * 16 + x, y_0 * 8 + y] = b[first + y_0 * 8 + y, x_1 * 16 + x]
        ...  # the last count % 8 columns likewise, one by one

so that each line of the cache is read once. Where the columns are last already there is no loop over ``x``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.nests import SERIAL, VECTORIZED, loop, serial
from sparsetir.lower.rewriting import seq

LANES = 8  # columns at a time
LINE = 16  # elements of a transposed row at a time


def counted(name: str, extent: ir.Expr) -> Var:
    """A loop variable of an extent's type."""
    return Var(name, ir.PrimType(str(extent.ty.dtype)))


@dataclass(frozen=True, eq=False)
class Copy:
    """`count` columns of an array from `first` on, the columns being its dimension `dimension`."""

    source: Var
    target: Var
    dimension: int
    first: ir.Expr
    count: ir.Expr

    def loops(self, notes: Mapping[str, Any]) -> tirx.Stmt:
        """The loops of the copy; `notes` are those of the outermost."""
        shape = list(self.source.ty.shape)
        others = [d for d in range(len(shape)) if d != self.dimension]
        is_transposed = self.dimension < others[-1]
        steps = [shape[d] for d in others]
        if is_transposed:
            dtype = str(steps[-1].ty.dtype)
            steps[-1] = tirx.floordiv(steps[-1] + const(LINE - 1, dtype), const(LINE, dtype))
        named = [counted(f"x_{n}", extent) for n, extent in enumerate(steps)]
        place: list[ir.Expr] = list(named)
        body = self._lines(place, shape[others[-1]]) if is_transposed else self._columns(lambda make: make(place))
        for n in reversed(range(len(steps))):
            body = serial(named[n], steps[n], body, {} if n else notes)
        return body

    def _lines(self, place: list[ir.Expr], extent: ir.Expr) -> tirx.Stmt:
        """The columns of the rows in a line."""
        line = const(LINE, str(extent.ty.dtype))
        start = place[-1] * line

        def around(make: Any) -> tirx.Stmt:
            x = counted("x", extent)
            return serial(x, tirx.min(line, extent - start), make([*place[:-1], start + x]))

        return self._columns(around)

    def _columns(self, around: Any) -> tirx.Stmt:
        """`LANES` columns at a time, then the rest, with the loop that `around` makes inside the one over these."""
        lanes = const(LANES, str(self.count.ty.dtype))

        def block(base: ir.Expr, width: ir.Expr, kind: Any) -> tirx.Stmt:
            def make(at: list[ir.Expr]) -> tirx.Stmt:
                y = counted("y", self.count)
                return loop(kind, y, width, self._move(at, base + y))

            return around(make)

        y_0 = counted("y_0", self.count)
        full = serial(y_0, tirx.floordiv(self.count, lanes), block(y_0 * lanes, lanes, VECTORIZED))
        rest = tirx.floormod(self.count, lanes)
        return seq(full, block(self.count - rest, rest, SERIAL))

    def _move(self, place: list[ir.Expr], column: ir.Expr) -> tirx.Stmt:
        """The copy of one element."""
        source = list(place)
        source.insert(self.dimension, self.first + column)
        return tirx.BufferStore(self.target, tirx.BufferLoad(self.source, source), [*place, column])


__all__ = ["LANES", "LINE", "Copy", "counted"]
