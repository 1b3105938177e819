# SPDX-License-Identifier: Apache-2.0
"""The loops over columns below a loop over rows, and whether they may run a panel of columns at a time.

A *column loop* moves one subscript of every result below it: a loop over tiles with vector lanes inside, which a
schedule marks, or a plain loop over all columns, such as an initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import accesses, const
from sparsetir.lower.marks import PANEL
from sparsetir.lower.rewriting import collect, same
from sparsetir.lower.vector.peel_remainders import match, vector_loops


@dataclass(frozen=True, eq=False)
class ColumnLoop:
    """A loop over `width` columns, `tile` of them a step, with those of a step in `lanes` (none: one a step)."""

    loop: tirx.For
    tile: int
    width: ir.Expr
    lanes: tuple[Var, ...]

    @classmethod
    def of(cls, loop: tirx.For) -> ColumnLoop | None:
        """A marked loop over tiles; None where its lanes do not cover the columns one by one."""
        inner = vector_loops(loop.body)
        found = match(loop)
        if found is not None:
            return cls(loop, *found, tuple(f.loop_var for f in inner))
        sizes = {int(f.extent) if isinstance(f.extent, tirx.IntImm) else 0 for f in inner}
        if len(sizes) != 1 or 0 in sizes or not isinstance(loop.extent, tirx.IntImm):
            return None
        (tile,) = sizes
        width = const(int(loop.extent) * tile, str(loop.loop_var.ty.dtype))
        return cls(loop, tile, width, tuple(f.loop_var for f in inner))

    def is_column(self, index: ir.Expr) -> bool:
        """Whether a subscript is the column."""
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
        """Which of the subscripts is the column; None if not just one is."""
        found = [d for d, index in enumerate(indices) if self.is_column(index)]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True, eq=False)
class Columns:
    """The column loops of a loop over rows, all as wide, which write every result at their own columns only."""

    rows: tirx.For
    panel: int
    width: ir.Expr
    loops: list[ColumnLoop]
    results: dict[Var, int] = field(default_factory=dict)  # which dimension holds the columns

    @classmethod
    def of(cls, rows: tirx.For) -> Columns | None:
        """Those of `rows`; None where none is marked or results do not fall apart into columns."""
        marked = [f for f in collect(rows.body, tirx.For) if PANEL in f.annotations]
        tiled = [one for f in marked if (one := ColumnLoop.of(f)) is not None]
        if not tiled or len(tiled) < len(marked) or not all(same(t.width, tiled[0].width) for t in tiled):
            return None
        panel, width = int(marked[0].annotations[PANEL]), tiled[0].width
        loops = [*tiled, *_plain(rows, marked, width)]
        if any(int(f.annotations[PANEL]) != panel for f in marked) or any(panel % t.tile for t in loops):
            return None
        found = cls(rows, panel, width, loops)
        return found if found._falls_apart() else None

    def accesses(self) -> Iterator[tuple[ColumnLoop, Var, list[ir.Expr], bool]]:
        """Every access below a column loop, as `sparsetir.ir.accesses` has it."""
        for column in self.loops:
            for buffer, indices, is_store in accesses(column.loop.body):
                yield column, buffer, indices, is_store

    def _falls_apart(self) -> bool:
        """Whether a column of the results depends on no other: notes the dimension of each result."""
        own = {a.buffer for a in collect(self.rows.body, tirx.AllocBuffer)}
        kept = {a.buffer for c in self.loops for a in collect(c.loop.body, tirx.AllocBuffer)}
        stores = [s for s in collect(self.rows.body, tirx.BufferStore) if s.buffer not in own]
        below = [(c, b, i) for c, b, i, is_store in self.accesses() if is_store and b not in own]
        if len(below) != len(stores):
            return False
        for column, buffer, indices in below:
            dimension = column.dimension(indices)
            if dimension is None or self.results.setdefault(buffer, dimension) != dimension:
                return False
        reads = [(c, b, i) for c, b, i, is_store in self.accesses() if not is_store and b in self.results]
        every = [x for x in collect(self.rows.body, ir.TensorLoad) if x.source in self.results]
        apart = len(reads) == len(every) and all(c.dimension(i) == self.results[b] for c, b, i in reads)
        # What a column loop leaves in an array from outside it could reach the next step.
        return apart and not any(b in own and b not in kept for _, b, _, is_store in self.accesses() if is_store)


def _plain(rows: tirx.For, marked: list[tirx.For], width: ir.Expr) -> list[ColumnLoop]:
    """The loops over all columns, one at a time, that are not inside a marked one."""
    inside = [f for loop in marked for f in collect(loop.body, tirx.For)]
    others = [f for f in collect(rows.body, tirx.For) if f not in inside and f not in marked]
    return [ColumnLoop(f, 1, f.extent, ()) for f in others if same(f.extent, width)]


__all__ = ["ColumnLoop", "Columns"]
