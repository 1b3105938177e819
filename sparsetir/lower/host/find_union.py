# SPDX-License-Identifier: Apache-2.0
"""The steps of a union of axes as statements: which coordinate a step has, and where the members have it.

Sorted members without repeated coordinates are walked side by side, one coordinate a step. Cursors outlive the step
and go on from where they are; a step before that starts again, so that they are exact in any order of the steps.
Other members are taken in turn, and what a step has is searched anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tvm import ir, tirx
from tvm.ir import Call, Var

from sparsetir.ir import const, substitute_args
from sparsetir.lower.nests import binary_search
from sparsetir.lower.rewriting import alloc, cell, conjunction, disjunction, get, put, seq, smallest


class Member(NamedTuple):
    """A member of a union: the coordinate of entry ``arg(0)``, the number of entries, and what is known of them."""

    own: ir.Expr
    count: ir.Expr
    kind: int

    @property
    def is_sorted(self) -> bool:
        return bool(self.kind & 1)

    @property
    def is_unique(self) -> bool:
        return bool(self.kind & 2)

    @property
    def may_be_outside(self) -> bool:
        return bool(self.kind & 4)

    def coordinate(self, slot: ir.Expr) -> ir.Expr:
        return substitute_args(self.own, [slot])


def members_of(call: Call) -> list[Member]:
    """The members in a call of `find_union`."""
    args = list(call.args[2:])
    return [Member(own, count, int(kind)) for own, count, kind in zip(*(args[n::3] for n in range(3)), strict=True)]


@dataclass
class Walk:
    """The members of a union side by side: the call, the conditions on its path, and the cells that say where they are.

    ``passed`` is how many entries of a member lie before the step, ``slots`` the entry at it or -1, ``coord`` the
    coordinate or -1.
    """

    call: Call
    conditions: list[ir.Expr]
    number: int

    def __post_init__(self) -> None:
        dtype = str(self.call.ty.dtype)
        named = lambda name: cell(f"{name}_{self.number}", dtype)  # noqa: E731
        self.step, self.coord = named("step"), named("coord")
        self.passed = [named(f"passed_{k}") for k in range(len(self.members))]
        self.slots = [named(f"held_{k}") for k in range(len(self.members))]

    @property
    def members(self) -> list[Member]:
        return members_of(self.call)

    @property
    def cells(self) -> list[Var]:
        return [self.step, self.coord, *self.passed, *self.slots]

    def result(self, what: int) -> ir.Expr:
        """What a call asks for: the slot of a member, or behind those the coordinate."""
        return get([*self.slots, self.coord][what])

    def start(self) -> list[tirx.Stmt]:
        """Stand before the first step."""
        dtype = str(self.step.ty.dtype)
        zeros = [put(c, const(0, dtype)) for c in self.passed]
        return [*zeros, *(put(c, const(-1, dtype)) for c in (self.step, *self.slots))]


def emit_walk(walk: Walk) -> tirx.Stmt:
    """The statements that find the coordinate of a step."""
    is_ordered = all(m.is_sorted and m.is_unique for m in walk.members)
    body = _side_by_side(walk) if is_ordered else seq(*_in_turn(walk))
    return tirx.IfThenElse(conjunction(walk.conditions), body, None) if walk.conditions else body


def _side_by_side(walk: Walk) -> tirx.Stmt:
    """Move the cursors to the step of the call, from the start where they are past it."""
    dtype, step = str(walk.step.ty.dtype), walk.call.args[1]
    zero, one, none = const(0, dtype), const(1, dtype), const(-1, dtype)
    cursors = list(zip(walk.passed, walk.slots, walk.members, strict=True))
    heads = [Var(f"head_{k}", ir.PrimType(dtype)) for k in range(len(cursors))]
    coord = Var("coord", ir.PrimType(dtype))
    moved = [put(at, get(at) + tirx.Cast(dtype, get(slot) >= zero)) for at, slot, _ in cursors]
    found, held = [], []
    for head, (at, slot, member) in zip(heads, cursors, strict=True):
        more = get(at) < member.count
        found.append(tirx.Bind(head, tirx.if_then_else(more, member.coordinate(get(at)), tirx.max_value(dtype))))
        held.append(put(slot, tirx.Select(tirx.And(more, head.equal(coord)), get(at), none)))
    some = disjunction([get(at) < member.count for at, _, member in cursors])
    told = put(walk.coord, tirx.Select(some, coord, none))
    ahead = seq(*moved, *found, tirx.Bind(coord, smallest(heads)), *held, told, put(walk.step, get(walk.step) + one))
    again = tirx.IfThenElse(step < get(walk.step), seq(*walk.start()), None)
    return seq(again, tirx.While(get(walk.step) < step, ahead))


def _in_turn(walk: Walk) -> list[tirx.Stmt]:
    """Take the entries of the first member, of the second, and so on, but for those that an earlier member holds.

    The first entry of a coordinate stands for the first ones of all members; one that is repeated stands alone.
    """
    dtype, step = str(walk.step.ty.dtype), walk.call.args[1]
    zero, none = const(0, dtype), const(-1, dtype)
    first, turn, at = cell("first", dtype), cell("turn", dtype), cell("at", dtype)
    out = [*alloc(first, turn, at), put(first, zero), put(turn, none), put(walk.coord, none)]
    for k, (member, slot) in enumerate(zip(walk.members, walk.slots, strict=True)):
        local = step - get(first)
        mine = seq(put(turn, const(k, dtype)), put(slot, local), put(walk.coord, member.coordinate(local)))
        is_mine = tirx.And(get(first) <= step, local < member.count)
        out += [put(slot, none), tirx.IfThenElse(is_mine, mine, None), put(first, get(first) + member.count)]
    alone = cell("alone", dtype)
    out += [*alloc(alone), put(alone, zero)]
    for k, (member, slot) in enumerate(zip(walk.members, walk.slots, strict=True)):
        if not member.is_unique:
            before = [*_first_of(member, get(walk.coord), at), put(alone, tirx.Cast(dtype, get(at) != get(slot)))]
            out.append(tirx.IfThenElse(get(turn).equal(const(k, dtype)), seq(*before), None))
    drop = cell("drop", dtype)
    out += [*alloc(drop), put(drop, zero)]
    for k, (member, slot) in enumerate(zip(walk.members, walk.slots, strict=True)):
        wanted = tirx.And(tirx.And(get(turn) >= zero, get(turn) != const(k, dtype)), get(alone).equal(zero))
        passed = tirx.IfThenElse(
            tirx.And(get(at) >= zero, const(k, dtype) < get(turn)), put(drop, const(1, dtype)), None
        )
        look = seq(*_first_of(member, get(walk.coord), at), put(slot, get(at)), passed)
        out.append(tirx.IfThenElse(wanted, look, None))
    return [*out, tirx.IfThenElse(get(drop) > zero, put(walk.coord, none), None)]


def _first_of(member: Member, coord: ir.Expr, at: Var) -> list[tirx.Stmt]:
    """Leave the first entry with a coordinate in `at`, -1 if there is none."""
    dtype = str(at.ty.dtype)
    zero, one = const(0, dtype), const(1, dtype)
    if member.is_sorted:
        lo, hi = cell("lo", dtype), cell("hi", dtype)
        narrow = binary_search(lambda mid: member.coordinate(mid) < coord, lo, hi)
        hit = tirx.IfThenElse(member.coordinate(get(lo)).equal(coord), put(at, get(lo)), None)
        start = [*alloc(lo, hi), put(at, const(-1, dtype)), put(lo, zero), put(hi, member.count)]
        return [*start, narrow, tirx.IfThenElse(get(lo) < member.count, hit, None)]
    here = cell("here", dtype)
    found = tirx.IfThenElse(member.coordinate(get(here)).equal(coord), put(at, get(here)), None)
    going = tirx.And(get(here) < member.count, get(at) < zero)
    loop = tirx.While(going, seq(found, put(here, get(here) + one)))
    return [*alloc(here), put(at, const(-1, dtype)), put(here, zero), loop]
