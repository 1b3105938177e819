# SPDX-License-Identifier: Apache-2.0
"""Co-iterating loops for unions and intersections of sorted axes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import (
    all_same,
    alloc,
    cell,
    collect,
    conjunction,
    conjuncts,
    disjunction,
    folded,
    get,
    is_number,
    mentions,
    moves_by_one,
    opaque,
    put,
    renewed,
    same,
    seq,
    smallest,
    substitute,
)
from sparsetir.ir.views import cast, const, substitute_args
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.lower.loops import SERIAL, allocated_buffers, binary_search, defined_vars, with_body

# The steps of a union of axes as statements that compute the coordinate of a step and its entry in each member.
#
# Sorted members without repeated coordinates are merged, one coordinate a step. Cursors persist between steps and
# advance from their position; an earlier step restarts them, so the result is exact in any order of the steps.
# Other members are iterated one after the other, and each step searches for its coordinate in the others.


class Member(NamedTuple):
    """A member of a union: the coordinate of entry ``arg(0)``, the number of entries, and flags of their properties."""

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
    """Return the members in a call of `find_union`."""
    args = list(call.args[2:])
    return [Member(coord, count, int(kind)) for coord, count, kind in zip(*(args[n::3] for n in range(3)), strict=True)]


@dataclass
class UnionMerge:
    """The merge of the members of a union: the call, the conditions on its path, and the cells of its state.

    For each member, ``passed`` is the number of entries before the step and ``slots`` the entry at the step or -1;
    ``coord`` is the coordinate of the step or -1.
    """

    call: Call
    conditions: list[ir.Expr]
    number: int

    def __post_init__(self) -> None:
        dtype = str(self.call.ty.dtype)
        new_cell = lambda name: cell(f"{name}_{self.number}", dtype)  # noqa: E731
        self.step, self.coord = new_cell("step"), new_cell("coord")
        self.passed = [new_cell(f"passed_{k}") for k in range(len(self.members))]
        self.slots = [new_cell(f"held_{k}") for k in range(len(self.members))]

    @property
    def members(self) -> list[Member]:
        return members_of(self.call)

    @property
    def cells(self) -> list[Var]:
        return [self.step, self.coord, *self.passed, *self.slots]

    def result(self, what: int) -> ir.Expr:
        """Return the slot of member `what`, or the coordinate if `what` is the number of members."""
        return get([*self.slots, self.coord][what])

    def start(self) -> list[tirx.Stmt]:
        """Return statements that reset the cursors to before the first step."""
        dtype = str(self.step.ty.dtype)
        zeros = [put(c, const(0, dtype)) for c in self.passed]
        return [*zeros, *(put(c, const(-1, dtype)) for c in (self.step, *self.slots))]


def emit_walk(walk: UnionMerge) -> tirx.Stmt:
    """Emit the statements that compute the coordinate of a step."""
    is_ordered = all(m.is_sorted and m.is_unique for m in walk.members)
    body = _side_by_side(walk) if is_ordered else seq(*_in_turn(walk))
    return tirx.IfThenElse(conjunction(walk.conditions), body, None) if walk.conditions else body


def _side_by_side(walk: UnionMerge) -> tirx.Stmt:
    """Advance the cursors to the step of the call, from the start if they are past it."""
    dtype, step = str(walk.step.ty.dtype), walk.call.args[1]
    zero, one, absent = const(0, dtype), const(1, dtype), const(-1, dtype)
    cursors = list(zip(walk.passed, walk.slots, walk.members, strict=True))
    heads = [Var(f"head_{k}", ir.PrimType(dtype)) for k in range(len(cursors))]
    coord = Var("coord", ir.PrimType(dtype))
    advances = [put(at, get(at) + tirx.Cast(dtype, get(slot) >= zero)) for at, slot, _ in cursors]
    head_binds, slot_updates = [], []
    for head, (at, slot, member) in zip(heads, cursors, strict=True):
        has_entry = get(at) < member.count
        head_binds.append(
            tirx.Bind(head, tirx.if_then_else(has_entry, member.coordinate(get(at)), tirx.max_value(dtype)))
        )
        slot_updates.append(put(slot, tirx.Select(tirx.And(has_entry, head.equal(coord)), get(at), absent)))
    has_more = disjunction([get(at) < member.count for at, _, member in cursors])
    coord_update = put(walk.coord, tirx.Select(has_more, coord, absent))
    ahead = seq(
        *advances,
        *head_binds,
        tirx.Bind(coord, smallest(heads)),
        *slot_updates,
        coord_update,
        put(walk.step, get(walk.step) + one),
    )
    again = tirx.IfThenElse(step < get(walk.step), seq(*walk.start()), None)
    return seq(again, tirx.While(get(walk.step) < step, ahead))


def _in_turn(walk: UnionMerge) -> list[tirx.Stmt]:
    """Iterate the members one after the other, without coordinates that an earlier member contains.

    The first entry of a coordinate is joined with the first ones of all members; a repeated entry is a step alone.
    """
    dtype, step = str(walk.step.ty.dtype), walk.call.args[1]
    zero, absent = const(0, dtype), const(-1, dtype)
    first, turn, at = cell("first", dtype), cell("turn", dtype), cell("at", dtype)
    out = [*alloc(first, turn, at), put(first, zero), put(turn, absent), put(walk.coord, absent)]
    for k, (member, slot) in enumerate(zip(walk.members, walk.slots, strict=True)):
        local = step - get(first)
        take_turn = seq(put(turn, const(k, dtype)), put(slot, local), put(walk.coord, member.coordinate(local)))
        is_turn = tirx.And(get(first) <= step, local < member.count)
        out += [put(slot, absent), tirx.IfThenElse(is_turn, take_turn, None), put(first, get(first) + member.count)]
    alone = cell("alone", dtype)
    out += [*alloc(alone), put(alone, zero)]
    for k, (member, slot) in enumerate(zip(walk.members, walk.slots, strict=True)):
        if not member.is_unique:
            before = [*_first_of(member, get(walk.coord), at), put(alone, tirx.Cast(dtype, get(at) != get(slot)))]
            out.append(tirx.IfThenElse(get(turn).equal(const(k, dtype)), seq(*before), None))
    drop = cell("drop", dtype)
    out += [*alloc(drop), put(drop, zero)]
    for k, (member, slot) in enumerate(zip(walk.members, walk.slots, strict=True)):
        needs_search = tirx.And(tirx.And(get(turn) >= zero, get(turn) != const(k, dtype)), get(alone).equal(zero))
        passed = tirx.IfThenElse(
            tirx.And(get(at) >= zero, const(k, dtype) < get(turn)), put(drop, const(1, dtype)), None
        )
        look = seq(*_first_of(member, get(walk.coord), at), put(slot, get(at)), passed)
        out.append(tirx.IfThenElse(needs_search, look, None))
    return [*out, tirx.IfThenElse(get(drop) > zero, put(walk.coord, absent), None)]


def _first_of(member: Member, coord: ir.Expr, at: Var) -> list[tirx.Stmt]:
    """Search a member for the first entry with a coordinate and leave it in `at`, -1 if no entry has it."""
    dtype = str(at.ty.dtype)
    zero, one = const(0, dtype), const(1, dtype)
    if member.is_sorted:
        lo, hi = cell("lo", dtype), cell("hi", dtype)
        narrow = binary_search(lambda mid: member.coordinate(mid) < coord, lo, hi)
        hit = tirx.IfThenElse(member.coordinate(get(lo)).equal(coord), put(at, get(lo)), None)
        start = [*alloc(lo, hi), put(at, const(-1, dtype)), put(lo, zero), put(hi, member.count)]
        return [*start, narrow, tirx.IfThenElse(get(lo) < member.count, hit, None)]
    position = cell("here", dtype)
    test_entry = tirx.IfThenElse(member.coordinate(get(position)).equal(coord), put(at, get(position)), None)
    is_searching = tirx.And(get(position) < member.count, get(at) < zero)
    loop = tirx.While(is_searching, seq(test_entry, put(position, get(position) + one)))
    return [*alloc(position), put(at, const(-1, dtype)), put(position, zero), loop]


# Intersection: a loop over a sorted axis that searches another sorted axis becomes one loop that merges both.
#
# before::
#
#     for j in range(ap[i + 1] - ap[i]):
#         if T.sp.find(bi[bp[i]], bp[i + 1] - bp[i], ai[ap[i] + j], 1, "walk") >= 0:
#             y[i] += a[ap[i] + j] * b[bp[i] + T.sp.find(...)]
#
# after::
#
#     while at_0[0] < count_0 and at_1[0] < count_1:
#         head_0 = ai[ap[i] + at_0[0]]
#         head_1 = bi[bp[i] + at_1[0]]
#         if head_0 == head_1:
#             y[i] += a[ap[i] + at_0[0]] * b[bp[i] + at_1[0]]
#         at_0[0] = at_0[0] + T.Cast("int32", head_0 <= head_1)
#         at_1[0] = at_1[0] + T.Cast("int32", head_1 < head_0)
#
# The comparison of the heads is hard to predict, so it is added to the cursors and not branched on. Loops that a
# schedule has changed, and those with several searches, are unchanged: there, a search starts where the last one ended.


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WalkIntersections")
def WalkIntersections(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every loop that intersects two sorted axes, outer ones first."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        call = _walk_intersection(node)
        return mutator.default_mutate(node) if call is None else mutator.mutate(_along_both(node, call))

    return with_body(func, structural_mutate(func.body, [(tirx.For, on_for)]))


def _walk_intersection(node: tirx.For) -> Call | None:
    """Return the search that guards the whole body of a loop; None if the loop is not an intersection."""
    var, body = node.loop_var, node.body
    if node.kind != SERIAL or not same(node.min, const(0, str(var.ty.dtype))):
        return None
    if not isinstance(body, tirx.IfThenElse) or body.else_case is not None:
        return None
    calls = [c for c in collect(node, Call) if dialect.is_call(c, "find") and c.args[4].value == "walk"]
    calls = [c for c in calls if mentions(c, [var])]
    if not calls or not all(same(c, calls[0]) for c in calls):
        return None
    first, count, coord = calls[0].args[:3]
    load = coord.value if isinstance(coord, tirx.Cast) else coord
    if not isinstance(load, ir.TensorLoad) or not moves_by_one(load.indices[0], var) or mentions([first, count], [var]):
        return None
    written = {s.buffer for s in collect(body, tirx.BufferStore)}
    if any(x.source in written for part in (first, count, coord) for x in collect(part, ir.TensorLoad)):
        return None
    inner_calls = [c for part in (first, count, coord) for c in collect(part, Call)]
    if any(dialect.is_call(c, *dialect.FIND) for c in inner_calls):
        return None
    return calls[0] if any(_is_found(c, calls[0]) for c in conjuncts(body.condition)) else None


def _is_found(condition: ir.Expr, call: Call) -> bool:
    """Return whether a condition is ``call >= 0``."""
    if isinstance(condition, tirx.GE):
        left, right = condition.a, condition.b
    elif isinstance(condition, tirx.LE):
        left, right = condition.b, condition.a
    else:
        return False
    return isinstance(left, Call) and same(left, call) and isinstance(right, tirx.IntImm) and int(right) == 0


def _along_both(node: tirx.For, call: Call) -> tirx.Stmt:
    first, count, coord = call.args[:3]
    types = [str(node.loop_var.ty.dtype), str(call.ty.dtype)]
    at = [cell(f"at_{k}", t) for k, t in enumerate(types)]
    places = [Var(f"place_{k}", ir.PrimType(t)) for k, t in enumerate(types)]
    counts = [Var(f"count_{k}", ir.PrimType(t)) for k, t in enumerate(types)]
    heads = [Var(f"head_{k}", ir.PrimType(str(coord.ty.dtype))) for k in range(2)]
    start = [*alloc(*at), *(put(a, const(0, t)) for a, t in zip(at, types, strict=True))]
    start += [tirx.Bind(n, e) for n, e in zip(counts, (node.extent, count), strict=True)]
    loop_coord = substitute(coord, {node.loop_var: places[0]})
    searched_coord = cast(tirx.BufferLoad(first.source, [first.indices[0] + places[1]]), str(coord.ty.dtype))
    binds = [tirx.Bind(p, get(a)) for p, a in zip(places, at, strict=True)]
    binds += [tirx.Bind(h, e) for h, e in zip(heads, (loop_coord, searched_coord), strict=True)]
    moves = (heads[0] <= heads[1], heads[1] < heads[0])
    advances = [put(a, p + tirx.Cast(t, m)) for a, p, m, t in zip(at, places, moves, types, strict=True)]
    step = seq(*binds, _where_equal(node, call, places, heads), *advances)
    in_range = [get(a) < n for a, n in zip(at, counts, strict=True)]
    return renewed(seq(*start, tirx.While(tirx.And(*in_range), step)))


def _where_equal(node: tirx.For, call: Call, places: list[Var], heads: list[Var]) -> tirx.Stmt:
    """Return the body of a step, guarded by equality of both coordinates."""
    on_call = lambda c, m: places[1] if same(c, call) else m.default_mutate(c)  # noqa: E731
    remaining = [c for c in conjuncts(node.body.condition) if not _is_found(c, call)]
    body = node.body.then_case if not remaining else tirx.IfThenElse(conjunction(remaining), node.body.then_case, None)
    merged_body = structural_mutate(body, [(Call, on_call)])
    return tirx.IfThenElse(heads[0].equal(heads[1]), substitute(merged_body, {node.loop_var: places[0]}), None)


# Union: a loop over the steps of a union of two sorted axes becomes three loops: both axes have entries left, only the
# first, only the second.
#
# before::
#
#     for j in range(ap[i + 1] - ap[i] + (bp[i + 1] - bp[i])):
#         if T.sp.find_union(2, j, ...) >= 0:
#             y[i] += T.if_then_else(T.sp.find_union(0, j, ...) >= 0, a[ap[i] + T.sp.find_union(0, j, ...)], 0) + ...
#
# after::
#
#     while at_0[0] < count_0 and at_1[0] < count_1:
#         head_0 = ai[ap[i] + at_0[0]]
#         head_1 = bi[bp[i] + at_1[0]]
#         y[i] += T.Select(head_0 <= head_1, a[ap[i] + at_0[0]], 0) + ...
#         at_0[0] = at_0[0] + T.Cast("int32", head_0 <= head_1)
#         ...
#     while at_0[0] < count_0:
#         y[i] += a[ap[i] + at_0[0]] + 0
#         at_0[0] = at_0[0] + 1
#     while at_1[0] < count_1:
#         ...
#
# The member with the smaller coordinate is hard to predict, so the first loop selects without branches where it may:
# the next entry of a member with entries left can be read whether or not it is used. Loops that a schedule has changed,
# unions of more than two members, and unsorted members keep the searches, which are exact in any order.


ARITHMETIC = (
    tirx.Add,
    tirx.Sub,
    tirx.Mul,
    tirx.Cast,
    tirx.Min,
    tirx.Max,
    tirx.IntImm,
    tirx.FloatImm,
    Var,
    ir.TensorLoad,
)


@dataclass(frozen=True)
class _Step:
    """The state of a merge loop: for each member its position and whether it has the coordinate; the coordinate."""

    places: list[Var]
    here: list[ir.Expr]
    coord: Var
    chosen: list[tirx.Stmt] = field(default_factory=list)
    inside: list[Var] = field(default_factory=list)

    def either(self, condition: ir.Expr, value: ir.Expr, otherwise: ir.Expr) -> ir.Expr:
        """Select one of two values without a branch: LLVM branches on a choice between floats, not on a subscript."""
        dtype = str(value.ty.dtype)
        if not dtype.startswith("float") or mentions([value, otherwise], self.inside):
            return tirx.Select(condition, value, otherwise)
        pair = tirx.decl_buffer((2,), dtype, name="either", scope="local", layout=None)
        stores = [tirx.BufferStore(pair, x, [const(n)]) for n, x in enumerate((otherwise, value))]
        self.chosen.extend([*alloc(pair), *stores])
        return tirx.BufferLoad(pair, [tirx.Cast("int32", condition)])

    def absent(self, value: ir.Expr) -> ir.Expr:
        """Return the value of an element that is not stored, opaque to TVM's constant folding."""
        before, opaque_value = opaque(value)
        self.chosen.extend(before)
        return opaque_value


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WalkUnions")
def WalkUnions(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every loop over the steps of a union, outer ones first."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        call = _walk_union(node)
        return mutator.default_mutate(node) if call is None else mutator.mutate(_phases(node, call))

    return with_body(func, structural_mutate(func.body, [(tirx.For, on_for)]))


def _walk_union(node: tirx.For) -> Call | None:
    """Return a search of the union whose steps the loop iterates; None if it does not iterate all steps of one."""
    if node.kind != SERIAL or not same(node.min, const(0, str(node.loop_var.ty.dtype))):
        return None
    calls = [
        c for c in collect(node.body, Call) if dialect.is_call(c, "find_union") and c.args[1].same_as(node.loop_var)
    ]
    if not calls or not all(all_same(list(c.args[1:]), list(calls[0].args[1:])) for c in calls):
        return None
    members = members_of(calls[0])
    written = {s.buffer for s in collect(node.body, tirx.BufferStore)}
    fibers = [part for m in members for part in (m.own, m.count)]
    is_steady = not any(x.source in written for part in fibers for x in collect(part, ir.TensorLoad))
    is_ordered = len(members) == 2 and all(m.is_sorted and m.is_unique for m in members)
    counts_steps = sym.Analyzer().can_prove_equal(node.extent, members[0].count + members[-1].count)
    only_counts = not mentions(_without_calls(node.body, calls[0]), [node.loop_var])
    return calls[0] if is_ordered and is_steady and counts_steps and only_counts else None


def _without_calls(body: tirx.Stmt, call: Call) -> tirx.Stmt:
    zero = const(0, str(call.ty.dtype))
    on_call = lambda c, m: zero if _asks(c, call) else m.default_mutate(c)  # noqa: E731
    return structural_mutate(body, [(Call, on_call)])


def _asks(call: Call, of: Call) -> bool:
    """Return whether `call` queries the same step of the same union as `of`."""
    return dialect.is_call(call, "find_union") and all_same(list(call.args[1:]), list(of.args[1:]))


def _phases(node: tirx.For, call: Call) -> tirx.Stmt:
    dtype = str(call.ty.dtype)
    members, before = _with_named_searches(members_of(call))
    at = [cell(f"at_{k}", dtype) for k in range(2)]
    counts = _variables("count", dtype)
    start = [*alloc(*at), *(put(a, const(0, dtype)) for a in at)]
    bounds = [tirx.Bind(n, m.count) for n, m in zip(counts, members, strict=True)]
    left = [get(a) < n for a, n in zip(at, counts, strict=True)]
    loops = [tirx.While(tirx.And(*left), _together(node, call, members, at))]
    loops += [tirx.While(left[k], _alone(node, call, members, at, k)) for k in range(2)]
    return seq(*before, *start, *bounds, *loops)


def _with_named_searches(members: list[Member]) -> tuple[list[Member], list[tirx.Stmt]]:
    """Hoist the searches for the members' fibers; return the members and the statements that bind the results."""
    searches: list[tuple[Call, Var]] = []

    def on_call(c: Call, mutator: Any) -> ir.Expr:
        if not dialect.is_call(c, *dialect.FIND):
            return mutator.default_mutate(c)
        result = next((v for k, v in searches if same(k, c)), None)
        if result is None:
            result = Var("found", c.ty)
            searches.append((c, result))
        return result

    hoist = lambda x: structural_mutate(x, [(Call, on_call)])  # noqa: E731
    out = [Member(hoist(m.own), hoist(m.count), m.kind) for m in members]
    return out, [tirx.Bind(v, c) for c, v in searches]


def _together(node: tirx.For, call: Call, members: list[Member], at: list[Var]) -> tirx.Stmt:
    """Return the step of the loop in which both members have entries left."""
    dtype = str(call.ty.dtype)
    places, heads = _variables("place", dtype), _variables("head", dtype)
    coord = Var("coord", ir.PrimType(dtype))
    here = [heads[0] <= heads[1], heads[1] <= heads[0]]
    now = [tirx.Bind(p, get(a)) for p, a in zip(places, at, strict=True)]
    now += [tirx.Bind(h, m.coordinate(p)) for h, m, p in zip(heads, members, places, strict=True)]
    now += [tirx.Bind(coord, tirx.min(*heads))]
    then = [put(a, p + tirx.Cast(dtype, h)) for a, p, h in zip(at, places, here, strict=True)]
    return seq(*now, _body(node, call, members, _Step(places, here, coord)), *then)


def _alone(node: tirx.For, call: Call, members: list[Member], at: list[Var], k: int) -> tirx.Stmt:
    """Return the step of the loop in which only member `k` has entries left."""
    dtype = str(call.ty.dtype)
    place, coord = Var("place", ir.PrimType(dtype)), Var("coord", ir.PrimType(dtype))
    here = [tirx.const(n == k, "bool") for n in range(2)]
    now = [tirx.Bind(place, get(at[k])), tirx.Bind(coord, members[k].coordinate(place))]
    then = put(at[k], place + const(1, dtype))
    return seq(*now, _body(node, call, members, _Step([place, place], here, coord)), then)


def _variables(name: str, dtype: str) -> list[Var]:
    return [Var(f"{name}_{k}", ir.PrimType(dtype)) for k in range(2)]


def _body(node: tirx.For, call: Call, members: list[Member], step: _Step) -> tirx.Stmt:
    """Return the body of the loop with the searches replaced by the state of a step."""
    step.inside.extend([*defined_vars(node.body), *allocated_buffers(node.body)])
    stays_inside = not any(m.may_be_outside for m in members)
    none = const(-1, str(call.ty.dtype))
    hides = any(dialect.is_if_then_else(c) for part in folded(node.body) for c in collect(part, Call))

    def on_call(c: Call, mutator: Any) -> ir.Expr:
        if dialect.is_if_then_else(c):
            k = _asked(c.args[0], call)
            if k in (0, 1):
                if hides and is_number(step.here[k], 0):
                    return step.absent(mutator.mutate(c.args[2]))
                return _chosen(step, k, _at_place(c.args[1], call, k, step.places[k]), c, mutator)
        if not _asks(c, call):
            return mutator.default_mutate(c)
        k = int(c.args[0])
        return step.coord if k == 2 else _select(step.here[k], step.places[k], none)

    def on_comparison(c: ir.Expr, mutator: Any) -> ir.Expr:
        k = _asked(c, call)
        if k is None or (k == 2 and not stays_inside):
            return mutator.default_mutate(c)
        return tirx.const(True, "bool") if k == 2 else step.here[k]

    body = structural_mutate(node.body, [(Call, on_call), (tirx.GE, on_comparison), (tirx.LE, on_comparison)])
    return renewed(seq(*step.chosen, body))


def _asked(test: ir.Expr, call: Call) -> int | None:
    """Return k for the test ``find_union(k, ...) >= 0``; None for other tests."""
    sides = (test.a, test.b) if isinstance(test, tirx.GE) else (test.b, test.a) if isinstance(test, tirx.LE) else ()
    if not sides or not isinstance(sides[0], Call) or not _asks(sides[0], call):
        return None
    return int(sides[0].args[0]) if isinstance(sides[1], tirx.IntImm) and int(sides[1]) == 0 else None


def _chosen(step: _Step, k: int, value: ir.Expr, choice: Call, mutator: Any) -> ir.Expr:
    """Return a choice by whether member `k` has the coordinate; `value` is the result where it does."""
    here, otherwise = step.here[k], choice.args[2]
    if isinstance(here, tirx.IntImm):
        return mutator.mutate(value if int(here) else otherwise)
    place = step.places[k]
    if not (_may_be_read(value, place) and _may_be_read(otherwise, place)):
        return tirx.if_then_else(here, mutator.mutate(value), mutator.mutate(otherwise))
    return step.either(here, value, otherwise)


def _select(condition: ir.Expr, value: ir.Expr, otherwise: ir.Expr) -> ir.Expr:
    if isinstance(condition, tirx.IntImm):
        return value if int(condition) else otherwise
    return tirx.Select(condition, value, otherwise)


def _at_place(value: ir.Expr, call: Call, k: int, place: Var) -> ir.Expr:
    """Replace the slot of member `k` in `value` by `place`."""
    on_call = lambda c, m: place if _asks(c, call) and int(c.args[0]) == k else m.default_mutate(c)  # noqa: E731
    return structural_mutate(value, [(Call, on_call)])


def _may_be_read(value: ir.Expr, place: Var) -> bool:
    """Return whether `value` may be computed also where the member does not have the coordinate."""
    kinds: list[bool] = []
    structural_walk(value, (ir.Expr, lambda x: kinds.append(isinstance(x, ARITHMETIC))))
    loads = [x for x in collect(value, ir.TensorLoad) if mentions(x.indices, [place])]
    return all(kinds) and all(len(x.indices) == 1 and moves_by_one(x.indices[0], place) for x in loads)
