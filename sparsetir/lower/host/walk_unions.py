# SPDX-License-Identifier: Apache-2.0
"""Loops over the steps of a union of two sorted axes, as three loops: both have entries left, the first, the second.

before::

    for j in range(ap[i + 1] - ap[i] + (bp[i + 1] - bp[i])):
        if T.sp.find_union(2, j, ...) >= 0:
            y[i] += T.if_then_else(T.sp.find_union(0, j, ...) >= 0, a[ap[i] + T.sp.find_union(0, j, ...)], 0) + ...

after::

    while at_0[0] < count_0 and at_1[0] < count_1:
        head_0 = ai[ap[i] + at_0[0]]
        head_1 = bi[bp[i] + at_1[0]]
        y[i] += T.Select(head_0 <= head_1, a[ap[i] + at_0[0]], 0) + ...
        at_0[0] = at_0[0] + T.Cast("int32", head_0 <= head_1)
        ...
    while at_0[0] < count_0:
        y[i] += a[ap[i] + at_0[0]] + 0
        at_0[0] = at_0[0] + 1
    while at_1[0] < count_1:
        ...

Which member has the smaller coordinate is hard to predict, so that the first loop chooses without branches where it
may: of a member with entries left, the next one can be read whether or not it is used. Loops that a schedule has
changed, unions of more members, and members that are not sorted stay with the searches, which are exact in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.ir import const
from sparsetir.lower.host.find_union import Member, members_of
from sparsetir.lower.nests import SERIAL
from sparsetir.lower.rewriting import (
    all_same,
    alloc,
    cell,
    collect,
    folded,
    get,
    mentions,
    moves_by_one,
    opaque,
    put,
    renewed,
    same,
    seq,
)
from sparsetir.walks import structural_mutate, structural_walk

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
    """What one of the loops knows: for each member where it stands and whether it holds the coordinate, and that."""

    places: list[Var]
    here: list[ir.Expr]
    coord: Var
    chosen: list[tirx.Stmt] = field(default_factory=list)
    inside: list[Var] = field(default_factory=list)

    def either(self, here: ir.Expr, value: ir.Expr, other: ir.Expr) -> ir.Expr:
        """One of two values without a branch: LLVM makes one of a choice between floats, not of a subscript."""
        dtype = str(value.ty.dtype)
        if not dtype.startswith("float") or mentions([value, other], self.inside):
            return tirx.Select(here, value, other)
        pair = tirx.decl_buffer((2,), dtype, name="either", scope="local", layout=None)
        stores = [tirx.BufferStore(pair, x, [const(n)]) for n, x in enumerate((other, value))]
        self.chosen.extend([*alloc(pair), *stores])
        return tirx.BufferLoad(pair, [tirx.Cast("int32", here)])

    def absent(self, value: ir.Expr) -> ir.Expr:
        """What stands for an element that is not stored, no constant to TVM."""
        before, held = opaque(value)
        self.chosen.extend(before)
        return held


def walk_unions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rewrite every loop that goes over the steps of a union, outer ones first."""
    body = structural_mutate(func.body, [(tirx.For, _on_loop)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def _on_loop(node: tirx.For, mutator: Any) -> tirx.Stmt:
    call = _walked(node)
    return mutator.default_mutate(node) if call is None else mutator.mutate(_phases(node, call))


def _walked(node: tirx.For) -> Call | None:
    """A search of the union that the loop goes over from its first step to the last; None if it is no such loop."""
    if node.kind != SERIAL or not same(node.min, const(0, str(node.loop_var.ty.dtype))):
        return None
    calls = [c for c in collect(node.body, Call) if op.is_call(c, "find_union") and c.args[1].same_as(node.loop_var)]
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
    """Whether `call` asks something of the same step of the same union."""
    return op.is_call(call, "find_union") and all_same(list(call.args[1:]), list(of.args[1:]))


def _phases(node: tirx.For, call: Call) -> tirx.Stmt:
    dtype = str(call.ty.dtype)
    members, before = _with_named_searches(members_of(call))
    at = [cell(f"at_{k}", dtype) for k in range(2)]
    counts = [Var(f"count_{k}", ir.PrimType(dtype)) for k in range(2)]
    start = [*alloc(*at), *(put(a, const(0, dtype)) for a in at)]
    bounds = [tirx.Bind(n, m.count) for n, m in zip(counts, members, strict=True)]
    left = [get(a) < n for a, n in zip(at, counts, strict=True)]
    loops = [tirx.While(tirx.And(*left), _together(node, call, members, at))]
    loops += [tirx.While(left[k], _alone(node, call, members, at, k)) for k in range(2)]
    return seq(*before, *start, *bounds, *loops)


def _with_named_searches(members: list[Member]) -> tuple[list[Member], list[tirx.Stmt]]:
    """The members with the searches of their fibers done beforehand, once."""
    named: list[tuple[Call, Var]] = []

    def on_call(c: Call, mutator: Any) -> ir.Expr:
        if not op.is_call(c, *op.FIND):
            return mutator.default_mutate(c)
        known = next((v for k, v in named if same(k, c)), None)
        if known is None:
            known = Var("found", c.ty)
            named.append((c, known))
        return known

    without = lambda x: structural_mutate(x, [(Call, on_call)])  # noqa: E731
    out = [Member(without(m.own), without(m.count), m.kind) for m in members]
    return out, [tirx.Bind(v, c) for c, v in named]


def _together(node: tirx.For, call: Call, members: list[Member], at: list[Var]) -> tirx.Stmt:
    """The step where both members have entries left."""
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
    """The step where only member `k` has entries left."""
    dtype = str(call.ty.dtype)
    place, coord = Var("place", ir.PrimType(dtype)), Var("coord", ir.PrimType(dtype))
    here = [tirx.const(n == k, "bool") for n in range(2)]
    now = [tirx.Bind(place, get(at[k])), tirx.Bind(coord, members[k].coordinate(place))]
    then = put(at[k], place + const(1, dtype))
    return seq(*now, _body(node, call, members, _Step([place, place], here, coord)), then)


def _variables(name: str, dtype: str) -> list[Var]:
    return [Var(f"{name}_{k}", ir.PrimType(dtype)) for k in range(2)]


def _body(node: tirx.For, call: Call, members: list[Member], step: _Step) -> tirx.Stmt:
    """The body of the loop at a step."""
    step.inside.extend(_defined(node.body))
    stays_inside = not any(m.may_be_outside for m in members)
    none = const(-1, str(call.ty.dtype))
    hides = any(op.is_if_then_else(c) for part in folded(node.body) for c in collect(part, Call))

    def on_call(c: Call, mutator: Any) -> ir.Expr:
        if op.is_if_then_else(c):
            k = _asked(c.args[0], call)
            if k in (0, 1):
                if hides and _is_absent(step.here[k]):
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


def _is_absent(here: ir.Expr) -> bool:
    return isinstance(here, tirx.IntImm) and not int(here)


def _defined(body: tirx.Stmt) -> list[Var]:
    """The variables and arrays that a body brings into being."""
    own = [b.var for b in collect(body, tirx.Bind)] + [f.loop_var for f in collect(body, tirx.For)]
    return own + [a.buffer for a in collect(body, tirx.AllocBuffer)] + [x.var for x in collect(body, tirx.Let)]


def _asked(test: ir.Expr, call: Call) -> int | None:
    """Of ``find_union(k, ...) >= 0`` the number k."""
    sides = (test.a, test.b) if isinstance(test, tirx.GE) else (test.b, test.a) if isinstance(test, tirx.LE) else ()
    if not sides or not isinstance(sides[0], Call) or not _asks(sides[0], call):
        return None
    return int(sides[0].args[0]) if isinstance(sides[1], tirx.IntImm) and int(sides[1]) == 0 else None


def _chosen(step: _Step, k: int, value: ir.Expr, choice: Call, mutator: Any) -> ir.Expr:
    """A choice by whether member `k` holds the coordinate; `value` is what it then is."""
    here, other = step.here[k], choice.args[2]
    if isinstance(here, tirx.IntImm):
        return mutator.mutate(value if int(here) else other)
    place = step.places[k]
    if not (_may_be_read(value, place) and _may_be_read(other, place)):
        return tirx.if_then_else(here, mutator.mutate(value), mutator.mutate(other))
    return step.either(here, value, other)


def _select(here: ir.Expr, value: ir.Expr, other: ir.Expr) -> ir.Expr:
    if isinstance(here, tirx.IntImm):
        return value if int(here) else other
    return tirx.Select(here, value, other)


def _at_place(value: ir.Expr, call: Call, k: int, place: Var) -> ir.Expr:
    """`value` where member `k` holds the coordinate."""
    on_call = lambda c, m: place if _asks(c, call) and int(c.args[0]) == k else m.default_mutate(c)  # noqa: E731
    return structural_mutate(value, [(Call, on_call)])


def _may_be_read(value: ir.Expr, place: Var) -> bool:
    """Whether `value` may be computed also where the member does not hold the coordinate."""
    kinds: list[bool] = []
    structural_walk(value, (ir.Expr, lambda x: kinds.append(isinstance(x, ARITHMETIC))))
    loads = [x for x in collect(value, ir.TensorLoad) if mentions(x.indices, [place])]
    return all(kinds) and all(len(x.indices) == 1 and moves_by_one(x.indices[0], place) for x in loads)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WalkUnions")
def WalkUnions(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """The pass around `walk_unions`."""
    return walk_unions(func)
