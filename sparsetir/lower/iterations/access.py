# SPDX-License-Identifier: Apache-2.0
"""Resolution of sparse subscripts: from the coordinates of ``A[i, j]`` to positions in storage.

An `AxisCursor` holds the current coordinate and position of one iterated axis. `Resolver` turns a list of subscripts
into storage indices and the conditions under which the coordinate is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.errors import LoweringError
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import collect, conjunction, conjuncts, same, without_zeros
from sparsetir.ir.views import Axis, SparseBuffer, cast, const, load, substitute_args
from sparsetir.ir.visitor import structural_mutate

Conditions = list[ir.Expr]


@dataclass(frozen=True, eq=False)
class AxisCursor:
    """Current coordinate and position of an iterated axis, as expressions of the loops' block variables.

    ``slot`` is the block variable of the loop that advances it. The position exists where all of ``given`` hold.
    A cursor without an axis is a plain coordinate (of an initialisation that iterates the coordinate space),
    or the coordinate shared by ``members``, the cursors of axes that are iterated together.
    """

    axis: Axis | None
    coord: ir.Expr
    pos: ir.Expr | None = None
    parent_pos: ir.Expr | None = None
    above: tuple[ir.Expr, ...] = ()
    slot: Var | None = None
    given: tuple[ir.Expr, ...] = ()
    members: tuple[AxisCursor, ...] = ()

    @property
    def coords(self) -> tuple[ir.Expr, ...]:
        """Coordinates of the ancestors and of the axis itself."""
        return (*self.above, self.coord)


@dataclass
class Scope:
    """Active cursors by axis and by iteration variable, and the ranges of the variables."""

    by_axis: dict[Axis, AxisCursor] = field(default_factory=dict)
    by_var: dict[Var, AxisCursor] = field(default_factory=dict)
    ranges: dict[Var, ir.Range] = field(default_factory=dict)

    def child(self) -> Scope:
        """Return a copy that inner loops may extend."""
        return Scope(dict(self.by_axis), dict(self.by_var), dict(self.ranges))

    def add(self, var: Var, cursor: AxisCursor, length: ir.Expr) -> None:
        """Bind iteration variable `var`, whose coordinate lies in ``[0, length)``."""
        self.by_var[var] = cursor
        self.ranges[var] = ir.Range(const(0, str(length.ty.dtype)), length)
        for member in cursor.members or (cursor,):
            if member.axis is not None:
                self.by_axis[member.axis] = member

    def proves_in_range(self, subscript: ir.Expr, length: ir.Expr) -> bool:
        """Return whether ``0 <= subscript < length`` holds for any data."""
        return all(self.proven(subscript, length))

    def proven(self, subscript: ir.Expr, length: ir.Expr) -> tuple[bool, bool]:
        """Return which of ``0 <= subscript`` and ``subscript < length`` hold for any data."""
        analyzer = sym.Analyzer()
        for var, extent in self.ranges.items():
            analyzer.bind(var, extent)
        length = cast(length, str(subscript.ty.dtype))
        below = analyzer.can_prove(subscript < length) or _is_in_last_block(analyzer, subscript, length)
        return bool(analyzer.can_prove(subscript >= 0)), bool(below)

    def is_never_negative(self, coord: ir.Expr, slot: Var) -> bool:
        """Return whether a coordinate, computed from a slot and those of axes around it, is never negative."""
        analyzer = sym.Analyzer()
        slots = [slot, *(cursor.slot for cursor in self.by_axis.values() if isinstance(cursor.slot, Var))]
        for var in dict.fromkeys(slots):
            dtype = str(var.ty.dtype)
            analyzer.bind(var, ir.Range(const(0, dtype), tirx.max_value(dtype)))
        return bool(analyzer.can_prove(coord >= const(0, str(coord.ty.dtype))))


def _is_in_last_block(analyzer: Any, subscript: ir.Expr, length: ir.Expr) -> bool:
    """Prove ``block * 4 + within < blocks * 4`` by ``block < blocks``; the analyzer does not divide both sides."""
    length = analyzer.simplify(length)
    if not isinstance(length, tirx.Mul) or not isinstance(length.b, tirx.IntImm) or int(length.b) < 1:
        return False
    block = analyzer.simplify(tirx.floordiv(subscript, length.b))
    return bool(analyzer.can_prove(block < length.a))


def guarded(conditions: Conditions, value: ir.Expr, otherwise: ir.Expr) -> ir.Expr:
    """Return an expression that evaluates `value` where the conditions hold, else `otherwise`."""
    return tirx.if_then_else(conjunction(conditions), value, otherwise) if conditions else value


def assuming(conditions: Conditions, node: ir.Expr) -> ir.Expr:
    """Remove from `node` the tests of `conditions`, given that it is evaluated only where they hold."""
    if not conditions:
        return node

    def on_call(call: Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        if not dialect.is_if_then_else(inner):
            return inner
        remaining = [c for c in conjuncts(inner.args[0]) if not any(same(c, condition) for condition in conditions)]
        return guarded(remaining, inner.args[1], inner.args[2])

    return structural_mutate(node, [(Call, on_call)])


def _same_place(a: ir.Expr | None, b: ir.Expr | None) -> bool:
    """Return whether two positions are equal, irrespective of their search strategies."""
    return same(a, b) or (a is not None and b is not None and same(_inlined(a), _inlined(b)))


def _inlined(position: ir.Expr) -> ir.Expr:
    """Return a position with the strategy of every search set to inline."""

    def on_call(call: Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        if not dialect.is_call(inner, "find"):
            return inner
        return dialect.call("find", [*inner.args[:-1], ir.StringImm("inline")], str(inner.ty.dtype))

    return structural_mutate(position, [(Call, on_call)])


NOTHING = (False, False)


def in_range(coord: ir.Expr, length: ir.Expr, proven: tuple[bool, bool] = NOTHING) -> Conditions:
    """Return the comparisons of ``0 <= coord < length`` that are not proven."""
    dtype = str(coord.ty.dtype)
    both = [coord >= const(0, dtype), coord < cast(length, dtype)]
    return [condition for condition, holds in zip(both, proven, strict=True) if not holds]


class Resolver:
    """Resolver of coordinates to positions within one scope.

    With `every`, it resolves to all entries with the same coordinates: `slots` are then the loops over the slots to
    compare, as pairs of a variable and its extent.
    """

    def __init__(self, scope: Scope, strategy: str = "inline", *, every: bool = False) -> None:
        self.scope = scope
        self.strategy = strategy
        self.every = every
        self.slots: list[tuple[Var, ir.Expr]] = []

    def resolve(
        self, buffer: SparseBuffer, subscripts: Sequence[ir.Expr], coords: Sequence[ir.Expr]
    ) -> tuple[list[ir.Expr], Conditions]:
        """Return the storage indices of ``buffer[subscripts]`` and the conditions under which they exist.

        `subscripts` are as the program has them, `coords` the same in terms of loop variables.
        """
        conditions: Conditions = []
        positions = []
        for tree in buffer.trees:
            pos: ir.Expr | None = None
            above: list[ir.Expr] = []
            for n, axis in enumerate(tree):
                where = buffer.axes.index(axis)
                cursor = self._direct(axis, subscripts[where], pos)
                if cursor is not None:
                    pos, coord = cursor.pos, cursor.coord
                    conditions = [*conditions, *(c for c in cursor.given if not any(same(c, x) for x in conditions))]
                elif not axis.unique and (self.every or n + 1 < len(tree)):
                    chain = tree[n:]
                    tuple_coords = [cast(coords[buffer.axes.index(a)], a.idtype) for a in chain]
                    look_up = self._each_tuple if self.every else lookup_tuple
                    lookup_result = look_up(chain, pos, above, tuple_coords, conditions)
                    pos, more = self._unless_own(chain, subscripts[where], pos, lookup_result, above, tuple_coords)
                    conditions = conditions + more
                    break
                else:
                    coord = cast(coords[where], axis.idtype)
                    proven = self.scope.proven(subscripts[where], axis.length)
                    pos, more = self._unless_here(
                        axis, subscripts[where], pos, lookup(axis, pos, above, coord, conditions, proven, self.strategy)
                    )
                    conditions = conditions + more
                above.append(coord)
            positions.append(pos)
        return positions, conditions

    def _each_tuple(
        self,
        chain: Sequence[Axis],
        parent_pos: ir.Expr | None,
        above: Sequence[ir.Expr],
        tuple_coords: Sequence[ir.Expr],
        parent_conditions: Conditions,
    ) -> tuple[ir.Expr, Conditions]:
        """Return the position at a slot of a fiber, and the conditions for the tuple to be stored there."""
        slot = Var("s", ir.PrimType(chain[0].idtype))
        begin, extent, equal = _compared(chain, parent_pos, above, tuple_coords, parent_conditions, slot)
        self.slots.append((slot, extent))
        return begin + slot, equal

    def _direct(self, axis: Axis, subscript: ir.Expr, parent_pos: ir.Expr | None) -> AxisCursor | None:
        """Return the axis's cursor below the same parent position, if any: its position needs no search."""
        return next((c for c in self._own(axis, subscript) if _same_place(c.parent_pos, parent_pos)), None)

    def _own(self, axis: Axis, subscript: ir.Expr) -> list[AxisCursor]:
        """Return the cursors of the axis if the subscript is its iteration variable."""
        cursor = self.scope.by_var.get(subscript) if isinstance(subscript, Var) else None
        return [] if cursor is None else [c for c in cursor.members or (cursor,) if c.axis is axis]

    def _unless_own(
        self,
        chain: Sequence[Axis],
        subscript: ir.Expr,
        parent_pos: ir.Expr | None,
        lookup_result: tuple[ir.Expr, Conditions],
        above: Sequence[ir.Expr],
        tuple_coords: Sequence[ir.Expr],
    ) -> tuple[ir.Expr, Conditions]:
        """Replace the result of a tuple search by the cursor's position where the parent positions are equal.

        The parent positions are that of the search and that of the cursor that iterates the tuple's first axis.
        """
        cursors = [] if self.every or parent_pos is None else self._own(chain[0], subscript)
        cursor = cursors[0] if len(cursors) == 1 and not cursors[0].given else None
        if cursor is None or cursor.parent_pos is None or cursor.pos is None:
            return lookup_result
        cursor_parent: ir.Expr = cursor.parent_pos
        is_same_parent = cursor_parent.equal(cast(parent_pos, str(cursor_parent.ty.dtype)))
        zero, coords, equal = const(0, chain[0].idtype), [*above, tuple_coords[0]], []
        for axis, coord in zip(chain[1:], tuple_coords[1:], strict=True):
            equal.append(axis.coordinate(cast(cursor.pos, axis.idtype), zero, coords).equal(coord))
            coords.append(coord)
        pos, conditions = lookup_result
        is_stored = conjunction(
            [tirx.Or(is_same_parent, conjunction(conditions)), tirx.Or(tirx.Not(is_same_parent), conjunction(equal))]
        )
        return guarded([is_same_parent], cursor.pos, pos), [is_stored]

    def _unless_here(
        self, axis: Axis, subscript: ir.Expr, parent_pos: ir.Expr | None, lookup_result: tuple[ir.Expr, Conditions]
    ) -> tuple[ir.Expr, Conditions]:
        """Replace the result of a search by the cursor's position where the parent positions are equal.

        Of several entries with the same coordinate a search finds the first, whereas an iteration visits each.
        """
        for cursor in [] if axis.unique or parent_pos is None else self._own(axis, subscript):
            if cursor.parent_pos is None:
                continue
            is_same_parent = cursor.parent_pos.equal(cast(parent_pos, str(cursor.parent_pos.ty.dtype)))
            pos, conditions = lookup_result
            is_stored = [tirx.Or(is_same_parent, conjunction(conditions))] if conditions else []
            if cursor.given:
                is_stored = [
                    tirx.Or(
                        conjunction([is_same_parent, *cursor.given]),
                        conjunction([tirx.Not(is_same_parent), *conditions]),
                    )
                ]
            lookup_result = guarded([is_same_parent], cursor.pos, pos), is_stored
        return lookup_result


def lookup(
    axis: Axis,
    parent_pos: ir.Expr | None,
    above: Sequence[ir.Expr],
    coord: ir.Expr,
    parent_conditions: Conditions,
    proven: tuple[bool, bool],
    strategy: str = "inline",
) -> tuple[ir.Expr, Conditions]:
    """Return the position of `coord` in the fiber below `parent_pos`, and the conditions for it to be stored there.

    `parent_conditions` are the conditions under which `parent_pos` exists: no index array is read where they fail. They
    are not among those that are returned.
    """
    if axis.kind == "dense_fixed":
        return coord, in_range(coord, axis.length, proven)
    zero = const(0, axis.idtype)
    parent = const(0, axis.idtype) if parent_pos is None else parent_pos
    if axis.is_computed:
        # Nothing has to be guarded, because no array is read: guards within guards grow exponentially.
        begin, extent = axis.begin(parent, above), axis.extent(parent, above)
        slot = _slot_of_rule(axis, begin, above, coord, extent)
        if not collect(slot, Call):
            return begin + slot, [*in_range(coord, axis.length, proven), *in_range(slot, extent)]
    begin = guarded(parent_conditions, axis.begin(parent, above), zero)
    extent = guarded(parent_conditions, axis.extent(parent, above), zero)
    if axis.is_dense:
        return begin + coord, in_range(coord, extent)
    if axis.rule is not None:
        slot = _slot_of_rule(axis, begin, above, coord, extent)
        bounds = in_range(coord, axis.length, proven)
        return begin + slot, [*bounds, *in_range(slot, extent)]
    first = tirx.BufferLoad(axis.indices, [begin])
    slot = dialect.call("find", [first, extent, coord, int(axis.sorted), ir.StringImm(strategy)], axis.idtype)
    bounds = in_range(coord, axis.length, proven) if axis.may_be_absent else []
    return begin + slot, [*bounds, slot >= zero]


def lookup_tuple(
    chain: Sequence[Axis],
    parent_pos: ir.Expr | None,
    above: Sequence[ir.Expr],
    tuple_coords: Sequence[ir.Expr],
    parent_conditions: Conditions,
) -> tuple[ir.Expr, Conditions]:
    """Return the position of a tuple of coordinates below an axis that may repeat coordinates (COO).

    The first coordinate does not identify the entry, so the search compares the whole tuple, slot by slot.
    """
    first = chain[0]
    slot = dialect.call("arg", [0], first.idtype)
    begin, extent, equal = _compared(chain, parent_pos, above, tuple_coords, parent_conditions, slot)
    test = tirx.Cast(first.idtype, conjunction(equal))
    slot_found = dialect.call("find_rule", [test, extent, const(1, first.idtype)], first.idtype)
    return begin + slot_found, [slot_found >= const(0, first.idtype)]


def _compared(
    chain: Sequence[Axis],
    parent_pos: ir.Expr | None,
    above: Sequence[ir.Expr],
    tuple_coords: Sequence[ir.Expr],
    parent_conditions: Conditions,
    slot: ir.Expr,
) -> tuple[ir.Expr, ir.Expr, Conditions]:
    """Return the begin and extent of a fiber, and the conditions for a tuple of coordinates to be at `slot` of it."""
    first, others = chain[0], chain[1:]
    if any(a.kind != "singleton" for a in others):
        message = f"a search by coordinate below axis {first.name} (unique=False) is only supported for singleton axes"
        raise LoweringError(f"{message}; iterate the buffer's own axes instead")
    zero = const(0, first.idtype)
    parent = zero if parent_pos is None else parent_pos
    begin = guarded(parent_conditions, first.begin(parent, above), zero)
    extent = guarded(parent_conditions, first.extent(parent, above), zero)
    equal: Conditions = []
    coords = list(above)
    for axis, coord in zip(chain, tuple_coords, strict=True):
        stored = axis.coordinate(begin + slot, slot if axis is first else zero, coords)
        equal += [stored.equal(coord), *(in_range(coord, axis.length) if axis.may_be_absent else [])]
        coords.append(coord)
    return begin, extent, equal


def _slot_of_rule(axis: Axis, begin: ir.Expr, above: Sequence[ir.Expr], coord: ir.Expr, extent: ir.Expr) -> ir.Expr:
    """Invert a coordinate formula that moves by one per slot; search the slots of any other formula."""

    def at(slot: ir.Expr) -> ir.Expr:
        return substitute_args(axis.rule, [*above, slot, begin + slot])

    start, slot = at(const(0, axis.idtype)), Var("s", ir.PrimType(axis.idtype))
    value = at(slot)
    for step in (1, -1):
        if sym.Analyzer().can_prove_equal(value, start + step * slot):
            return without_zeros((coord - start) * step if step < 0 else coord - start)
    return dialect.call("find_rule", [at(dialect.call("arg", [0], axis.idtype)), extent, coord], axis.idtype)


def fiber_of(axis: Axis, pos: ir.Expr) -> ir.Expr:
    """Return the parent position whose fiber contains position `pos` of `axis`."""
    if axis.parent is None:
        return const(0, axis.idtype)
    if axis.kind == "singleton":
        return cast(pos, axis.parent.idtype)
    if axis.kind == "sparse_fixed":
        return cast(tirx.floordiv(pos, cast(axis.width, str(pos.ty.dtype))), axis.parent.idtype)
    if axis.indptr is None:
        message = f"T.fuse over {axis.name}, whose rows are given by a formula, is not supported: give it an indptr"
        raise LoweringError(message)
    first = load(axis.indptr, const(0, str(axis.indptr.ty.dtype)))
    count = cast(axis.parent.count, str(axis.indptr.ty.dtype))
    parent_pos = dialect.call(
        "find_fiber", [first, count, cast(pos, str(axis.indptr.ty.dtype))], str(axis.indptr.ty.dtype)
    )
    return cast(parent_pos, axis.parent.idtype)
