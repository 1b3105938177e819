# SPDX-License-Identifier: Apache-2.0
"""Loop versioning: rows whose block lies inside the matrix run a copy of the loop without bounds checks.

before::

    for io in range(mb):
        for ii in T.unroll(4):
            for k in T.vectorized(16):
                if io * 4 + ii < m:
                    c[io * 4 + ii, k] = ...

after::

    for io in range(mb):
        if io * 4 + 3 < m:
            for ii in T.unroll(4):
                for k in T.vectorized(16):
                    c[io * 4 + ii, k] = ...
        else:
            ...  # as it was, in plain loops: it runs for the last row

Only bounds count that depend on nothing but loops of constant length below the row loop.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.nests import SERIAL, VECTORIZED, each_loop, with_
from sparsetir.lower.rewriting import collect, conjunction, conjuncts, mentions, renewed, same, substitute
from sparsetir.walks import structural_mutate


def _lanes(loop: tirx.For) -> dict[Var, int]:
    """Variables of the loops below `loop` that have a constant number of steps, and that number.

    Not of vector loops: what they exceed is a tile's affair.
    """
    loops = [f for f in collect(loop.body, tirx.For) if f.kind != VECTORIZED]
    return {f.loop_var: int(f.extent) for f in loops if isinstance(f.extent, tirx.IntImm)}


def hull(bound: ir.Expr, lanes: dict[Var, int]) -> ir.Expr | None:
    """`bound` in the lane where it is hardest to meet; None if that is not the same lane everywhere."""
    if not isinstance(bound, (tirx.LT, tirx.LE)):
        return None
    left, right = bound.a, bound.b
    analyzer = sym.Analyzer()
    for lane, extent in lanes.items():
        if not mentions([left, right], [lane]):
            continue
        gap = right - left
        step = analyzer.simplify(substitute(gap, {lane: lane + const(1, str(lane.ty.dtype))}) - gap)
        if not isinstance(step, tirx.IntImm):
            return None
        hardest = const(0 if int(step) >= 0 else extent - 1, str(lane.ty.dtype))
        left, right = (substitute(side, {lane: hardest}) for side in (left, right))
    return analyzer.simplify(type(bound)(left, right))


def _edges(loop: tirx.For) -> list[tuple[ir.Expr, ir.Expr]]:
    """The bounds below `loop` that its variable and constant loops decide, each with its hull."""
    lanes = _lanes(loop)
    inner = [f.loop_var for f in collect(loop.body, tirx.For) if f.loop_var not in lanes]
    inner += [b.var for b in collect(loop.body, tirx.Bind)]
    written = [s.buffer for s in collect(loop.body, tirx.BufferStore)]
    found: list[tuple[ir.Expr, ir.Expr]] = []
    for branch in collect(loop.body, tirx.IfThenElse):
        for bound in conjuncts(branch.condition):
            is_own = mentions(bound, [loop.loop_var]) and mentions(bound, list(lanes))
            if not is_own or mentions(bound, [*inner, *written]) or any(same(bound, b) for b, _ in found):
                continue
            hardest = hull(bound, lanes)
            if hardest is not None:
                found.append((bound, hardest))
    return found


def _without(body: tirx.Stmt, bounds: list[ir.Expr]) -> tirx.Stmt:
    """`body` where `bounds` always hold."""

    def on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
        left = [c for c in conjuncts(node.condition) if not any(same(c, b) for b in bounds)]
        if not left:
            return mutator.mutate(node.then_case)
        other = None if node.else_case is None else mutator.mutate(node.else_case)
        return tirx.IfThenElse(conjunction(left), mutator.mutate(node.then_case), other)

    return structural_mutate(body, [(tirx.IfThenElse, on_if)])


def _plain(body: tirx.Stmt) -> tirx.Stmt:
    """`body` in serial loops, which are less to compile."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        return with_(node, kind=SERIAL, body=mutator.mutate(node.body), notes={})

    return structural_mutate(body, [(tirx.For, on_for)])


def version(loop: tirx.For) -> tirx.For:
    """`loop` with a body of its own for rows whose blocks lie inside; unchanged where it tests no lane."""
    if loop.kind != SERIAL:
        return loop
    edges = _edges(loop)
    if not edges:
        return loop
    inside = _without(loop.body, [bound for bound, _ in edges])
    hulls: list[ir.Expr] = []
    for _, hull in edges:
        hulls += [] if any(same(hull, h) for h in hulls) else [hull]
    body = tirx.IfThenElse(conjunction(hulls), inside, _plain(renewed(loop.body)))
    return with_(loop, body=body)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VersionLoops")
def VersionLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Version every row loop of a function, the innermost ones first."""

    return each_loop(func, inner=version)
