# SPDX-License-Identifier: Apache-2.0
"""Remainder (tail) handling: full vector tiles run without a bounds check, the rest in narrower tiles.

before::

    for k_0 in range((feat + 63) // 64):
        for k_1 in T.vectorized(64):
            if k_0 * 64 + k_1 < feat:
                acc[k_1] = ...

after::

    for k_0 in range(feat // 64):
        for k_1 in T.vectorized(64):
            acc[k_1] = ...
    if feat // 32 % 2 == 1:
        for k_1 in T.vectorized(32):
            ...  # from column feat // 64 * 64
    ...          # likewise 16 and 8
    if feat % 8 > 0:
        for k_1 in range(feat % 8):
            ...

A vector loop with a check inside is not vectorised by TVM. The tile must be a power of two.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.nests import SERIAL, UNROLLED, VECTORIZED, each_loop, with_
from sparsetir.lower.rewriting import mentions, renewed, same
from sparsetir.walks import structural_mutate, structural_walk

NARROWEST = 4


def _checks(body: tirx.Stmt, outer: Var) -> list[tirx.IfThenElse]:
    """The bounds checks ``outer * tile + lane < limit`` below `body`."""
    found: list[tirx.IfThenElse] = []

    def on_if(node: tirx.IfThenElse) -> None:
        if isinstance(node.condition, tirx.LT) and mentions(node.condition.a, [outer]) and node.else_case is None:
            found.append(node)

    structural_walk(body, (tirx.IfThenElse, on_if))
    return found


def vector_loops(body: tirx.Stmt) -> list[tirx.For]:
    found: list[tirx.For] = []
    on_for = lambda f: found.append(f) if f.kind == VECTORIZED else None  # noqa: E731
    structural_walk(body, (tirx.For, on_for))
    return found


def _is_check(condition: ir.Expr, loop: tirx.For, lane: tirx.For, limit: ir.Expr) -> bool:
    tile = lane.extent
    expected = loop.loop_var * tile + lane.loop_var
    gap = tvm.sym.Analyzer().simplify(condition.a - expected)
    return isinstance(gap, tirx.IntImm) and int(gap) == 0 and same(condition.b, limit)


def match(loop: tirx.For) -> tuple[int, ir.Expr] | None:
    """(tile, limit) when every vector loop below `loop` is one tile of it, bounds-checked; else None."""
    if loop.kind not in (SERIAL, UNROLLED):
        return None
    checks, lanes = _checks(loop.body, loop.loop_var), vector_loops(loop.body)
    if not checks or not lanes or any(not isinstance(x.extent, tirx.IntImm) for x in lanes):
        return None
    tile, limit = int(lanes[0].extent), checks[0].condition.b
    if tile & (tile - 1) or any(int(x.extent) != tile for x in lanes) or mentions(limit, [loop.loop_var]):
        return None
    for lane in lanes:
        inner = _checks(lane.body, loop.loop_var)
        if len(inner) != 1 or not _is_check(inner[0].condition, loop, lane, limit):
            return None
    return (tile, limit) if len(checks) == len(lanes) else None


class _Tile:
    """Rewrites the body for one tile width starting at column `base`."""

    def __init__(self, loop: tirx.For, tile: int) -> None:
        self.loop, self.tile = loop, tile

    def body(self, base: ir.Expr | None, width: int | ir.Expr) -> tirx.Stmt | None:
        """The body without checks; None if the outer variable is used otherwise than times the tile."""
        outer = self.loop.loop_var

        def on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
            if isinstance(node.condition, tirx.LT) and mentions(node.condition.a, [outer]):
                return mutator.mutate(node.then_case)
            return mutator.default_mutate(node)

        def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
            if node.kind != VECTORIZED:
                return mutator.default_mutate(node)
            exact = isinstance(width, int)
            extent = const(width, str(node.loop_var.ty.dtype)) if exact else width
            kind = VECTORIZED if exact else SERIAL
            return with_(node, extent=extent, kind=kind, body=mutator.mutate(node.body), notes={})

        def on_mul(node: tirx.Mul, mutator: Any) -> ir.Expr:
            if base is not None and node.a.same_as(outer) and isinstance(node.b, tirx.IntImm):
                return base if int(node.b) == self.tile else mutator.default_mutate(node)
            return mutator.default_mutate(node)

        callbacks = [(tirx.IfThenElse, on_if), (tirx.For, on_for), (tirx.Mul, on_mul)]
        out = structural_mutate(self.loop.body, callbacks)
        return None if base is not None and mentions(out, [outer]) else renewed(out)


def peel(loop: tirx.For) -> tirx.Stmt:
    """`loop` as full tiles, narrower tiles and a scalar rest; unchanged where it is no checked tile loop."""
    matched = match(loop)
    if matched is None:
        return loop
    tile, limit = matched
    dtype = str(limit.ty.dtype)
    rewrite = _Tile(loop, tile)
    pieces: list[tirx.Stmt] = []
    width = tile // 2
    while width >= NARROWEST:
        base = tirx.floordiv(limit, const(2 * width, dtype)) * const(2 * width, dtype)
        odd = tirx.floormod(tirx.floordiv(limit, const(width, dtype)), const(2, dtype)).equal(const(1, dtype))
        body = rewrite.body(base, width)
        if body is None:
            return loop
        pieces.append(tirx.IfThenElse(odd, body, None))
        width //= 2
    rest = tirx.floormod(limit, const(min(tile, NARROWEST), dtype))
    body = rewrite.body(limit - rest, rest)
    if body is None:
        return loop
    pieces.append(tirx.IfThenElse(rest > const(0, dtype), body, None))
    full = tirx.floordiv(limit, const(tile, dtype))
    main = with_(loop, extent=full, body=rewrite.body(None, tile))
    return tirx.SeqStmt([main, *pieces])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PeelRemainders")
def PeelRemainders(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Peel every bounds-checked tile loop of a function."""

    return each_loop(func, inner=peel)
