# SPDX-License-Identifier: Apache-2.0
"""Whether the first store to a cache has set what a later load reads.

What TVM computes of affine subscripts is trusted; where they depend on data it takes the whole buffer to be written::

    c_global[indptr[vi] + vj] = ...        # the positions of one row, or of all rows if vi is every row
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.checks.sites import Site, common
from sparsetir.lower.checks.steps import equal, row_length, uncast
from sparsetir.lower.rewriting import collect, mentions, moves_by_one, substitute


@dataclass(frozen=True, eq=False)
class Cover:
    """The elements of `buffer` that `first` stores, as seen from `reader`."""

    buffer: Var
    first: Site
    reader: Site

    @property
    def is_whole(self) -> bool:
        """Whether `reader` finds every element set, each dimension by variables of its own."""
        if len(self.reader.blocks) == self._depth:
            return self._has_element()
        used: list[Var] = []
        for index, read in zip(self.first.indices, self.reader.indices, strict=True):
            index = self._without_units(uncast(index))
            own = [v for v in self._moving if mentions(index, [v])]
            if any(v in used for v in own) or not self._covers(index, read):
                return False
            used += own
        return True

    def _has_element(self) -> bool:
        """Whether a loop whose number of steps is read next to the store's block finds that element set.

        TVM computes what blocks read; the extents of loops around them are nobody's.
        """
        lanes = {n.loop_var: n for n in self.first.path[self._shared :] if isinstance(n, tirx.For)}
        analyzer = sym.Analyzer()
        for index, read in zip(self.first.indices, self.reader.indices, strict=True):
            place = self.first.outwards(index, len(self.first.blocks), self._depth)
            moved = [loop for var, loop in lanes.items() if mentions(place, [var])]
            if len(moved) > 1:
                return False
            gap = read - place
            steps = [const(0, str(gap.ty.dtype))] * 2
            if moved:
                gap = substitute(gap, {moved[0].loop_var: const(0, str(moved[0].loop_var.ty.dtype))})
                steps = [steps[0], moved[0].extent - const(1, str(moved[0].extent.ty.dtype))]
            gap = analyzer.simplify(gap)
            if not analyzer.can_prove(gap >= steps[0]) or not analyzer.can_prove(gap <= steps[1]):
                return False
            if moved and not moves_by_one(place, moved[0].loop_var):
                return False
        return True

    @cached_property
    def _shared(self) -> int:
        return common(self.first.path, self.reader.path)

    @cached_property
    def _depth(self) -> int:
        """How many blocks are around both accesses."""
        return sum(isinstance(n, s_tir.SBlockRealize) for n in self.first.path[: self._shared])

    @cached_property
    def _inner(self) -> list[tuple[tirx.IterVar, ir.Expr]]:
        """Variables and values of the store's blocks, but for those around the allocation or the reader."""
        below = len(self.first.blocks) - len(self.first.within(self.buffer))
        blocks = self.first.blocks[max(below, self._depth) :]
        return [p for r in blocks for p in zip(r.block.iter_vars, r.iter_values, strict=True)]

    @cached_property
    def _moving(self) -> dict[Var, ir.Range]:
        return {iv.var: iv.dom for iv, _ in self._inner}

    @cached_property
    def _complete(self) -> list[Var]:
        """The variables that take all their values before the reader's turn."""
        held = [n.loop_var for n in self.first.path[: self._shared] if isinstance(n, tirx.For)]
        return [iv.var for iv, value in self._inner if not mentions(value, held)]

    def _without_units(self, index: ir.Expr) -> ir.Expr:
        """The subscript without variables that have one value."""
        units = {v: r.min for v, r in self._moving.items() if isinstance(r.extent, tirx.IntImm) and int(r.extent) == 1}
        return sym.Analyzer().simplify(substitute(index, units)) if mentions(index, list(units)) else index

    def _covers(self, index: ir.Expr, read: ir.Expr) -> bool:
        moving = list(self._moving)
        if not mentions(index, moving) or isinstance(index, Var):
            return True
        parts = _lane_and_base(index, moving)
        if parts is None:
            return False
        lane, base = parts
        if self._goes_on(base, self._moving[lane].extent):
            return not collect(base, ir.TensorLoad) or lane in self._complete
        return not mentions(base, moving) and self._is_same_fiber(base, read)

    def _goes_on(self, base: ir.Expr, extent: ir.Expr) -> bool:
        """Whether each step of `base` goes on where the `extent` elements of the step before end, first to last."""
        base, length = uncast(base), row_length(base)
        if length is None:
            return not collect(base, ir.TensorLoad) and not mentions(base, list(self._moving))
        return equal(length, extent) and self._is_every_row(base)

    def _is_every_row(self, base: ir.Expr) -> bool:
        """Whether the row that starts at `base` takes all its values; those of row pointers go up to their number."""
        if isinstance(base, tirx.Mul):
            return isinstance(base.a, Var)
        row, rows = uncast(base.indices[0]), base.source.ty.shape[0]
        if isinstance(row, Var):
            return row in self._complete and equal(self._moving[row].extent + const(1, str(rows.ty.dtype)), rows)
        parts = _lane_and_base(row, self._complete)
        return parts is not None and self._goes_on(parts[1], self._moving[parts[0]].extent)

    def _is_same_fiber(self, base: ir.Expr, read: ir.Expr) -> bool:
        """Whether the reader looks at elements of the one fiber that starts at `base`."""
        start = self.first.outwards(base, len(self.first.blocks), self._depth)
        place = self.reader.outwards(read, len(self.reader.blocks), self._depth)
        return not collect(sym.Analyzer().simplify(uncast(place) - start), ir.TensorLoad)


def _lane_and_base(index: ir.Expr, moving: list[Var]) -> tuple[Var, ir.Expr] | None:
    """The variable that walks and what it is added to."""
    if not isinstance(index, tirx.Add):
        return None
    for lane, base in ((uncast(index.b), index.a), (uncast(index.a), index.b)):
        if isinstance(lane, Var) and lane in moving and not mentions(base, [lane]):
            return lane, base
    return None
