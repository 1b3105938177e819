# SPDX-License-Identifier: Apache-2.0
"""Loops over a sorted axis that look its coordinates up in another sorted axis, as one loop along both.

before::

    for j in range(ap[i + 1] - ap[i]):
        if T.sp.find(bi[bp[i]], bp[i + 1] - bp[i], ai[ap[i] + j], 1, "walk") >= 0:
            y[i] += a[ap[i] + j] * b[bp[i] + T.sp.find(...)]

after::

    while at_0[0] < count_0 and at_1[0] < count_1:
        head_0 = ai[ap[i] + at_0[0]]
        head_1 = bi[bp[i] + at_1[0]]
        if head_0 == head_1:
            y[i] += a[ap[i] + at_0[0]] * b[bp[i] + at_1[0]]
        at_0[0] = at_0[0] + T.Cast("int32", head_0 <= head_1)
        at_1[0] = at_1[0] + T.Cast("int32", head_1 < head_0)

Which side is behind is hard to predict, so that it is added and not branched on. Loops that a schedule has changed, and
those with several searches, stay as they are: a search starts where the last one ended.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.ir import cast, const
from sparsetir.lower.nests import SERIAL
from sparsetir.lower.rewriting import (
    alloc,
    cell,
    collect,
    conjunction,
    conjuncts,
    get,
    mentions,
    moves_by_one,
    put,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.walks import structural_mutate


def walk_intersections(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rewrite every loop of that kind, outer ones first."""
    body = structural_mutate(func.body, [(tirx.For, _on_loop)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def _on_loop(node: tirx.For, mutator: Any) -> tirx.Stmt:
    call = _walked(node)
    return mutator.default_mutate(node) if call is None else mutator.mutate(_along_both(node, call))


def _walked(node: tirx.For) -> Call | None:
    """The search whose result decides whether a step does anything; None if the loop is not of that kind."""
    var, body = node.loop_var, node.body
    if node.kind != SERIAL or not same(node.min, const(0, str(var.ty.dtype))):
        return None
    if not isinstance(body, tirx.IfThenElse) or body.else_case is not None:
        return None
    calls = [c for c in collect(node, Call) if op.is_call(c, "find") and c.args[4].value == "walk"]
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
    decides = any(_is_found(c, calls[0]) for c in conjuncts(body.condition))
    return calls[0] if decides and not any(op.is_call(c, *op.FIND) for c in _inner_searches(calls[0])) else None


def _inner_searches(call: Call) -> list[Call]:
    return [c for part in call.args[:3] for c in collect(part, Call)]


def _is_found(condition: ir.Expr, call: Call) -> bool:
    """Whether it is ``call >= 0``."""
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
    own = substitute(coord, {node.loop_var: places[0]})
    other = cast(tirx.BufferLoad(first.source, [first.indices[0] + places[1]]), str(coord.ty.dtype))
    now = [tirx.Bind(p, get(a)) for p, a in zip(places, at, strict=True)]
    now += [tirx.Bind(h, e) for h, e in zip(heads, (own, other), strict=True)]
    moves = (heads[0] <= heads[1], heads[1] < heads[0])
    then = [put(a, p + tirx.Cast(t, m)) for a, p, m, t in zip(at, places, moves, types, strict=True)]
    step = seq(*now, _where_equal(node, call, places, heads), *then)
    left = [get(a) < n for a, n in zip(at, counts, strict=True)]
    return renewed(seq(*start, tirx.While(tirx.And(*left), step)))


def _where_equal(node: tirx.For, call: Call, places: list[Var], heads: list[Var]) -> tirx.Stmt:
    """What a step does where both sides have the same coordinate."""
    on_call = lambda c, m: places[1] if same(c, call) else m.default_mutate(c)  # noqa: E731
    others = [c for c in conjuncts(node.body.condition) if not _is_found(c, call)]
    body = node.body.then_case if not others else tirx.IfThenElse(conjunction(others), node.body.then_case, None)
    found = structural_mutate(body, [(Call, on_call)])
    return tirx.IfThenElse(heads[0].equal(heads[1]), substitute(found, {node.loop_var: places[0]}), None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WalkIntersections")
def WalkIntersections(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """The pass around `walk_intersections`."""
    return walk_intersections(func)
