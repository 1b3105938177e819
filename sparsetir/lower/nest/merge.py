# SPDX-License-Identifier: Apache-2.0
"""Where the loops of a union or an intersection of axes run, and where its members then stand.

An intersection walks its first member and looks the others up. A union counts steps: `find_union` says which coordinate
a step has, and where the members have it. All of it is expressions of the loops' variables, exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir
from tvm.ir import Var

from sparsetir import op
from sparsetir.ir import Axis, Entry, cast, const
from sparsetir.lower.nest.access import Conditions, Cursor, Scope, guarded, in_range, lookup
from sparsetir.lower.nest.nest import parent_of


@dataclass(frozen=True, eq=False)
class Merged:
    """The loops of a merge with their extents, the cursor of its variable, and the conditions for a step to count."""

    loops: list[tuple[ir.Expr, Var]]
    cursor: Cursor
    absent: Conditions


@dataclass(frozen=True, eq=False)
class _Member:
    """A fiber that takes part; there are entries only where `given` holds."""

    axis: Axis
    parent_pos: ir.Expr | None
    above: tuple[ir.Expr, ...]
    given: Conditions
    dtype: str

    @property
    def _at(self) -> ir.Expr:
        return const(0, self.axis.idtype) if self.parent_pos is None else self.parent_pos

    @property
    def count(self) -> ir.Expr:
        """The number of entries."""
        own = guarded(self.given, self.axis.extent(self._at, self.above), const(0, self.axis.idtype))
        return cast(own, self.dtype)

    def position(self, slot: ir.Expr) -> ir.Expr:
        return self.axis.position(self._at, cast(slot, self.axis.idtype), self.above)

    def coordinate(self, slot: ir.Expr) -> ir.Expr:
        slot = cast(slot, self.axis.idtype)
        return cast(self.axis.coordinate(self.position(slot), slot, self.above), self.dtype)

    def found(self, coord: ir.Expr, strategy: str) -> tuple[ir.Expr, Conditions]:
        """The position of a coordinate, and the conditions for the fiber to hold it."""
        own = cast(coord, self.axis.idtype)
        return lookup(self.axis, self.parent_pos, self.above, own, self.given, (True, True), strategy)

    def cursor(self, coord: ir.Expr, pos: ir.Expr, given: Conditions, slot: Var) -> Cursor:
        own = cast(coord, self.axis.idtype)
        return Cursor(self.axis, own, pos, self.parent_pos, self.above, slot, tuple(given))


def place_merge(entry: Entry, scope: Scope, strategy: str) -> Merged:
    """Loops and cursors of a merge in `scope`; `strategy` is how coordinates of other members are searched."""
    dtype = entry.domains[0].idtype
    members = [_Member(axis, *parent_of(axis, host, scope), dtype) for axis, host in entry.heads]
    name = "v" + str(entry.vars[0].name)
    if entry.merge == "intersect":
        return _intersection(members, name, dtype, strategy)
    return _union(members, Var(name, ir.PrimType(dtype)))


# ---------------------------------------------------------------------------------------------- intersections


def _intersection(members: Sequence[_Member], name: str, dtype: str, strategy: str) -> Merged:
    first, slot = members[0], Var(name, ir.PrimType(members[0].axis.idtype))
    coord, pos = first.coordinate(slot), first.position(slot)
    absent = in_range(coord, first.axis.length) if first.axis.may_be_absent else []
    loops = [(cast(first.count, first.axis.idtype), slot)]
    cursors = [first.cursor(coord, pos, [], slot)]
    for n, member in enumerate(members[1:], 1):
        if member.axis.unique:
            ascends = strategy == "merge" and first.axis.sorted and member.axis.sorted
            at, conditions = member.found(coord, "walk" if ascends else strategy)
            absent = absent + conditions
            cursors.append(member.cursor(coord, at, [], slot))
            continue
        own = Var(f"{name}_{n}", ir.PrimType(member.axis.idtype))  # each of the entries with the coordinate
        loops.append((cast(member.count, member.axis.idtype), own))
        absent = [*absent, member.coordinate(own).equal(coord)]
        cursors.append(member.cursor(coord, member.position(own), [], own))
    return Merged(loops, Cursor(None, coord, slot=slot, members=tuple(cursors)), absent)


# ---------------------------------------------------------------------------------------------- unions


def _union(members: Sequence[_Member], slot: Var) -> Merged:
    """As many steps as members have entries, of which those without a coordinate do nothing."""
    dtype = str(slot.ty.dtype)
    argument = op.call("arg", [0], dtype)
    fibers = [part for m in members for part in (m.coordinate(argument), m.count, op.union_member(m.axis))]
    *slots, coord = (op.call("find_union", [k, slot, *fibers], dtype) for k in range(len(members) + 1))
    zero = const(0, dtype)
    cursors = [m.cursor(coord, m.position(s), [s >= zero], slot) for m, s in zip(members, slots, strict=True)]
    absent = [coord >= zero]
    if any(m.axis.may_be_absent for m in members):
        absent.append(coord < cast(members[0].axis.length, dtype))
    steps = members[0].count
    for member in members[1:]:
        steps = steps + member.count
    return Merged([(steps, slot)], Cursor(None, coord, slot=slot, members=tuple(cursors)), absent)
