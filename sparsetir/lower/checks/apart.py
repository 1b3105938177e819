# SPDX-License-Identifier: Apache-2.0
"""Whether the steps of a flat loop are independent, by its subscripts (`independence` has the whole proof).

Two steps are apart in an array if for every access of one and every access of the other some dimension differs. One of
three kinds of subscripts does so in all accesses::

    c[p // n, p % n, ...]        the same ones everywhere, not moved within a step, and different for different steps
    c[p * 4 + lane]              4 elements of a step's own, or any number that is the same for all steps
    a[indptr[row] + j]           places between the row pointers of a row that is the step's own, by one of these kinds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, sym, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.ir import const
from sparsetir.lower.checks.steps import uncast
from sparsetir.lower.rewriting import collect, conjuncts, mentions, same, substitute, without_zeros
from sparsetir.walks import structural_mutate


@dataclass(frozen=True)
class Facts:
    """Arrays of which something is known: row pointers never fall, `distinct` lists hold nothing twice.

    Lists in `fibers`, as name:size, hold nothing twice in each group of so many entries.
    """

    pointers: set[str]
    distinct: set[str]
    fibers: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Site:
    """One access: its subscripts, or None where the whole array is read, and what stands around it in the step."""

    buffer: Var
    indices: list[ir.Expr] | None
    loops: tuple[tirx.For, ...]
    guards: tuple[ir.Expr, ...]


class _Walk:
    """Collects the accesses of a step, and what it writes."""

    def __init__(self) -> None:
        self.found: list[Site] = []
        self.written: dict[Var, None] = {}
        self.inside: set[Var] = set()
        self.moving: list[Var] = []
        self.loops: list[tirx.For] = []
        self.guards: list[ir.Expr] = []

    def visit(self, node: Any) -> None:
        callbacks = [
            (tirx.For, self._for),
            (tirx.IfThenElse, self._if),
            (tirx.BufferStore, self._store),
            (tirx.AllocBuffer, self._alloc),
            (tirx.Bind, self._bind),
            (ir.TensorLoad, self._load),
            (Call, self._call),
        ]
        structural_mutate(node, callbacks)

    def _note(self, buffer: Var, indices: Sequence[ir.Expr] | None) -> None:
        held = None if indices is None else list(indices)
        self.found.append(Site(buffer, held, tuple(self.loops), tuple(self.guards)))

    def _for(self, node: tirx.For, _mutator: Any) -> tirx.For:
        self.visit(node.extent)
        self.moving.append(node.loop_var)
        self.loops.append(node)
        self.visit(node.body)
        self.loops.pop()
        return node

    def _under(self, condition: ir.Expr, node: Any) -> None:
        kept = len(self.guards)
        self.guards += conjuncts(condition)
        self.visit(node)
        del self.guards[kept:]

    def _if(self, node: tirx.IfThenElse, _mutator: Any) -> tirx.IfThenElse:
        self.visit(node.condition)
        self._under(node.condition, node.then_case)
        if node.else_case is not None:
            self.visit(node.else_case)
        return node

    def _call(self, node: Call, mutator: Any) -> Call:
        if op.is_if_then_else(node):
            self.visit(node.args[0])
            self._under(node.args[0], node.args[1])
            self.visit(node.args[2])
            return node
        if op.is_call(node, *op.FIND):
            for load in collect(node, ir.TensorLoad):
                self._note(load.source, None)
        return mutator.default_mutate(node)

    def _store(self, node: tirx.BufferStore, mutator: Any) -> tirx.BufferStore:
        self.written[node.buffer] = None
        self._note(node.buffer, node.indices)
        return mutator.default_mutate(node)

    def _load(self, node: ir.TensorLoad, mutator: Any) -> ir.TensorLoad:
        self._note(node.source, node.indices)
        return mutator.default_mutate(node)

    def _alloc(self, node: tirx.AllocBuffer, _mutator: Any) -> tirx.AllocBuffer:
        self.inside.add(node.buffer)
        return node

    def _bind(self, node: tirx.Bind, mutator: Any) -> tirx.Bind:
        self.moving.append(node.var)
        return mutator.default_mutate(node)


ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)
WIDE = "int64"


class Wide:
    """Writes numbers of any width in one, without conversions; what is no arithmetic gets a variable."""

    def __init__(self) -> None:
        self.known: list[tuple[ir.Expr, Var]] = []

    def of(self, expr: ir.Expr) -> ir.Expr:
        """`expr` in 64 bits."""
        expr = uncast(expr)
        if isinstance(expr, tirx.IntImm):
            return const(int(expr), WIDE)
        if isinstance(expr, ARITHMETIC):
            return type(expr)(self.of(expr.a), self.of(expr.b))
        for node, var in self.known:
            if same(node, expr):
                return var
        self.known.append((expr, Var("atom", ir.PrimType(WIDE))))
        return self.known[-1][1]

    def condition(self, expr: ir.Expr) -> ir.Expr:
        """A comparison of numbers in 64 bits."""
        is_known = isinstance(expr, (tirx.LT, tirx.LE))
        return type(expr)(self.of(expr.a), self.of(expr.b)) if is_known else expr

    def range(self, low: ir.Expr, extent: ir.Expr) -> ir.Range:
        """The values of a loop."""
        return ir.Range.from_min_extent(self.of(low), self.of(sym.Analyzer().simplify(extent)))


def is_one_to_one(indices: Sequence[ir.Expr], ranges: dict[Var, ir.Range]) -> bool:
    """Whether different values of the variables of `ranges` make different subscripts."""
    if all(any(i.same_as(v) for i in indices) for v in ranges):
        return True
    wide = Wide()
    values = {wide.of(v): wide.range(r.min, r.extent) for v, r in ranges.items()}
    plain = [without_zeros(wide.of(i)) for i in indices]
    found = sym.detect_iter_map(plain, values, tirx.const(True, "bool"), "bijective", False)
    return len(found.indices) > 0


def are_different(indices: Sequence[ir.Expr], ranges: dict[Var, ir.Range], facts: Facts) -> bool:
    """Return whether different values of the variables of `ranges` make different subscripts of one element.

    An array that is read on the way may hold a number twice, unless it is a list of `facts.distinct`.
    """
    plain = [_entry(uncast(i), ranges, facts) for i in indices]
    known = [i for i in plain if not any(mentions(x, list(ranges)) for x in collect(i, ir.TensorLoad))]
    return bool(known) and is_one_to_one(known, ranges)


def _entry(index: ir.Expr, ranges: dict[Var, ir.Range], facts: Facts) -> ir.Expr:
    """The place of an entry in a list for the entry, where the steps meet none twice in it."""
    if not isinstance(index, ir.TensorLoad) or len(index.indices) != 1:
        return index
    name, place = str(index.source.name), uncast(index.indices[0])
    sizes = [int(size) for other, _, size in (f.rpartition(":") for f in facts.fibers) if other == name]
    is_listed = name in facts.distinct or any(_is_in_one(place, size, ranges) for size in sizes)
    return place if is_listed else index


def _is_in_one(place: ir.Expr, size: int, ranges: dict[Var, ir.Range]) -> bool:
    """Return whether places lie in one group of a list for all values of the variables of `ranges`."""
    wide, analyzer = Wide(), sym.Analyzer()
    for var, values in ranges.items():
        analyzer.bind(wide.of(var), wide.range(values.min, values.extent))
    group = analyzer.simplify(tirx.floordiv(wide.of(place), const(size, WIDE)))
    return not mentions(group, [wide.of(var) for var in ranges])


class _Steps:
    """The steps of one loop."""

    def __init__(self, loop: tirx.For, facts: Facts) -> None:
        self.loop, self.step, self.facts = loop, loop.loop_var, facts
        self.range = {self.step: ir.Range.from_min_extent(loop.min, loop.extent)}
        self.walk = _Walk()
        self.walk.visit(loop.body)

    def shared(self) -> Var | None:
        """An array of which two steps may use the same element, which one of them writes; None if there is none."""
        return next((buffer for buffer in self.walk.written if self.shares(buffer)), None)

    def shares(self, buffer: Var) -> bool:
        """Whether two steps may use the same element of an array that is written."""
        sites = [s for s in self.walk.found if s.buffer.same_as(buffer)]
        return buffer not in self.walk.inside and not self._are_apart(sites)

    def _are_apart(self, sites: list[Site]) -> bool:
        places = [s.indices for s in sites if s.indices is not None]
        if len(places) < len(sites):
            return False
        columns = [list(column) for column in zip(*places, strict=True)]
        own = [c[0] for c in columns if all(same(i, c[0]) for i in c) and self._is_fixed(c[0])]
        if own and self._are_different(own):
            return True
        return any(self._is_block(sites, c) or self._is_fiber(sites, c) for c in columns)

    # ------------------------------------------------------------------ kinds of subscripts

    def _is_fixed(self, index: ir.Expr) -> bool:
        """Whether a subscript is moved by the step alone."""
        return mentions(index, [self.step]) and self._is_still(index)

    def _is_still(self, index: ir.Expr) -> bool:
        """Whether a number does not change within a step."""
        changing = [*self.walk.moving, *self.walk.written]
        return not mentions(index, changing)

    def _are_different(self, indices: list[ir.Expr]) -> bool:
        """Whether subscripts that do not move within a step differ from step to step."""
        return are_different(indices, self.range, self.facts)

    def _is_block(self, sites: list[Site], column: list[ir.Expr]) -> bool:
        """Whether each step has as many elements of its own, one block after the other."""
        first = uncast(column[0])
        next_step = {self.step: self.step + const(1, str(self.step.ty.dtype))}
        size = sym.Analyzer().simplify(substitute(first, next_step) - first)
        if mentions(size, [self.step]) or not self._is_still(size) or collect(size, ir.TensorLoad):
            return False
        still = {v: const(0, str(v.ty.dtype)) for v in self.walk.moving}
        start = substitute(first, still)
        if not self._is_still(start) or any(mentions(x, [self.step]) for x in collect(start, ir.TensorLoad)):
            return False
        return all(self._lies_within(s, uncast(i) - start, size) for s, i in zip(sites, column, strict=True))

    def _is_fiber(self, sites: list[Site], column: list[ir.Expr]) -> bool:
        """Whether each step has the places between two row pointers, or those of several rows, of its own."""
        found = [self._fiber(s, i) for s, i in zip(sites, column, strict=True)]
        if any(f is None for f in found):
            return False
        arrays, rows = [f[0] for f in found if f], [f[1] for f in found if f]
        if not all(a.same_as(arrays[0]) for a in arrays):
            return False
        if all(same(r, rows[0]) for r in rows) and self._is_fixed(rows[0]):
            return self._are_different([rows[0]])
        return self._is_block(sites, rows) or self._is_fiber(sites, rows)

    def _fiber(self, site: Site, index: ir.Expr) -> tuple[Var, ir.Expr] | None:
        """The row pointers and the row that a place lies in; None where that is not known."""
        index = uncast(index)
        for begin in collect(index, ir.TensorLoad):
            if str(begin.source.name) not in self.facts.pointers or len(begin.indices) != 1:
                continue
            row = begin.indices[0]
            end = tirx.BufferLoad(begin.source, [row + const(1, str(row.ty.dtype))])
            if self._lies_within(site, index - begin, end - begin):
                return begin.source, uncast(row)
        return None

    def _lies_within(self, site: Site, offset: ir.Expr, size: ir.Expr) -> bool:
        """Whether ``0 <= offset < size`` at an access."""
        wide, analyzer = Wide(), sym.Analyzer()
        for loop in site.loops:
            analyzer.bind(wide.of(loop.loop_var), wide.range(loop.min, loop.extent))
        offset = analyzer.simplify(wide.of(offset))
        if not analyzer.can_prove(offset >= const(0, WIDE)):
            return False
        size = wide.of(size)
        known = [wide.condition(g) for g in site.guards if not mentions(g, list(self.walk.written))]
        return any(_says(analyzer, g, offset, size) for g in known) or bool(analyzer.can_prove(offset < size))


def _says(analyzer: Any, guard: ir.Expr, offset: ir.Expr, size: ir.Expr) -> bool:
    """Whether a condition is that `offset` is below `size`."""
    return isinstance(guard, tirx.LT) and bool(analyzer.can_prove_equal(guard.a - guard.b, offset - size))


def shared_array(loop: tirx.For, facts: Facts) -> Var | None:
    """An array of which two steps of a flat loop may use one element that one of them writes; None: there is none."""
    return _Steps(loop, facts).shared()


def is_shared(buffer: Var, loop: tirx.For, facts: Facts) -> bool:
    """Whether two steps of a flat loop may use one element of an array that the loop writes."""
    return _Steps(loop, facts).shares(buffer)


__all__ = ["Facts", "are_different", "is_one_to_one", "is_shared", "shared_array"]
