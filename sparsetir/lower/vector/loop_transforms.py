# SPDX-License-Identifier: Apache-2.0
"""Loop transformations: interchange, unrolling, unswitching, versioning."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import all_same, collect, conjunction, conjuncts, mentions, renewed, same, seq, substitute
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import UNROLL, VECTOR
from sparsetir.lower.loops import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Update,
    each_loop,
    serial,
    unrolled,
    with_,
    with_body,
    without,
)

# Loop interchange: move a loop over tiles of a result's row outside the sums of the row.
#
# before::
#
#     for r in range(rank):
#         d[i, r] = 0
#     for j in range(indptr_j[i + 1] - indptr_j[i]):
#         for r_0 in range((rank + 31) // 32):
#             for k in range(indptr_k[...] - indptr_k[indptr_j[i] + j]):
#                 for r_1 in T.vectorized(32):
#                     if r_0 * 32 + r_1 < rank:
#                         d[i, r_0 * 32 + r_1] = d[i, r_0 * 32 + r_1] + ...
#
# after::
#
#     for r_0 in range((rank + 31) // 32):
#         for r_1 in T.vectorized(32):
#             if r_0 * 32 + r_1 < rank:
#                 d[i, r_0 * 32 + r_1] = 0
#         for j in range(indptr_j[i + 1] - indptr_j[i]):
#             for k in range(indptr_k[...] - indptr_k[indptr_j[i] + j]):
#                 for r_1 in T.vectorized(32):
#                     if r_0 * 32 + r_1 < rank:
#                         d[i, r_0 * 32 + r_1] = d[i, r_0 * 32 + r_1] + ...
#
# A tile can then stay in registers through every loop of a nested sum. The order of the terms of each element is
# unchanged, since two steps of ``r_0`` have no element in common.


def _update(body: tirx.Stmt) -> tirx.BufferStore | None:
    """Return the only store below `body` if it adds to its element and reads no other one of the array, else None."""
    stores = collect(body, tirx.BufferStore)
    if len(stores) != 1 or collect(body, tirx.While) or collect(body, tirx.AllocBuffer):
        return None
    (store,) = stores
    loads = [x for x in collect(body, ir.TensorLoad) if x.source.same_as(store.buffer)]
    return store if Update.of(store) is not None and len(loads) == 1 else None


def _lane(tiles: tirx.For, store: tirx.BufferStore) -> tirx.For | None:
    """Return the vector loop that covers the tiles of a store's last subscript, each element once, or None."""
    lanes = [f for f in collect(tiles.body, tirx.For) if f.kind == VECTORIZED and isinstance(f.extent, tirx.IntImm)]
    if len(lanes) != 1 or mentions(list(store.indices)[:-1], [tiles.loop_var]):
        return None
    (lane,) = lanes
    gap = sym.Analyzer().simplify(store.indices[-1] - tiles.loop_var * lane.extent - lane.loop_var)
    return lane if isinstance(gap, tirx.IntImm) and int(gap) == 0 else None


def _inner(body: tirx.Stmt) -> tirx.For | None:
    """Return `body` if it is a serial loop without annotations other than its vectors, else None."""
    return body if isinstance(body, tirx.For) and body.kind == SERIAL and not without(body, VECTOR) else None


def lift(loop: tirx.For) -> tirx.For | None:
    """Interchange `loop` with the loop over tiles that is its body; None where that is not possible."""
    tiles = _inner(loop.body)
    if loop.kind != SERIAL or tiles is None:
        return None
    store = _update(tiles.body)
    if store is None or mentions([tiles.min, tiles.extent, *store.indices], [loop.loop_var]):
        return None
    if mentions(loop.extent, [tiles.loop_var, store.buffer]) or collect(tiles.extent, ir.TensorLoad):
        return None
    if _lane(tiles, store) is None:
        return None
    return with_(tiles, body=with_(loop, body=tiles.body))


def _tiled(before: tirx.Stmt, tiles: tirx.For) -> tirx.For | None:
    """Fuse the loop `before`, which initialises the elements updated in `tiles`, into `tiles`; None if it does not."""
    store = _update(tiles.body)
    lane = None if store is None else _lane(tiles, store)
    if store is None or lane is None or not isinstance(before, tirx.For) or before.kind != SERIAL:
        return None
    first, row = before.body, before.loop_var
    if not isinstance(first, tirx.BufferStore) or not first.buffer.same_as(store.buffer):
        return None
    if collect(first.value, ir.TensorLoad) or mentions(first.value, [row]):
        return None
    limit = const(0, str(row.ty.dtype)) + before.extent
    check = next((c for c in collect(tiles.body, tirx.IfThenElse) if mentions(c.condition, [lane.loop_var])), None)
    if check is None or not isinstance(check.condition, tirx.LT) or not same(check.condition.b, limit):
        return None
    at = tiles.loop_var * lane.extent + lane.loop_var
    if not all_same([substitute(i, {row: store.indices[-1]}) for i in first.indices], list(store.indices)):
        return None
    fresh = Var(str(lane.loop_var.name), lane.loop_var.ty)
    body = tirx.IfThenElse(check.condition, substitute(first, {row: at}), None)
    begin = with_(lane, var=fresh, body=substitute(body, {lane.loop_var: fresh}), notes={})
    return with_(tiles, body=seq(renewed(begin), tiles.body))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.InterchangeLoops")
def InterchangeLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Move every loop over tiles of a function as far out as possible, and initialise the tiles one at a time."""
    lifted: list[Var] = []

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        found = lift(inner)
        if found is None:
            return inner
        lifted.append(found.loop_var)
        return found

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        out: list[tirx.Stmt] = []
        for stmt in (mutator.mutate(s) for s in node.seq):
            is_lifted = bool(out) and isinstance(stmt, tirx.For) and stmt.loop_var in lifted
            both = _tiled(out[-1], stmt) if is_lifted else None
            if both is None:
                out.append(stmt)
            else:
                out[-1] = both
        return seq(*out)

    body = structural_mutate(func.body, [(tirx.For, on_for), (tirx.SeqStmt, on_seq)])
    return with_body(func, body) if lifted else func


# Unroll a loop of unknown length: full groups without a check, then the remainder.
#
# before::
#
#     for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.unroll": 4}):
#         body(j)
#
# after::
#
#     for j_0 in range((indptr[i + 1] - indptr[i]) // 4):
#         for j_1 in T.unroll(4):
#             body(j_0 * 4 + j_1)
#     for j in range((indptr[i + 1] - indptr[i]) % 4):
#         body((indptr[i + 1] - indptr[i]) // 4 * 4 + j)


def unroll(loop: tirx.For) -> tirx.Stmt:
    """Unroll `loop` by the factor of its annotation, with a remainder loop."""
    factor = int(loop.annotations[UNROLL])
    notes = without(loop, UNROLL)
    if factor <= 1:
        return with_(loop, notes=notes)
    var, dtype = loop.loop_var, str(loop.loop_var.ty.dtype)
    step = const(factor, dtype)
    group, lane, rest = (Var(f"{var.name}_{n}", var.ty) for n in range(3))
    groups = tirx.floordiv(loop.extent, step)
    inner = unrolled(lane, factor, substitute(loop.body, {var: group * step + lane}))
    tail = renewed(substitute(loop.body, {var: groups * step + rest}))
    return tirx.SeqStmt([serial(group, groups, inner, notes), serial(rest, tirx.floormod(loop.extent, step), tail)])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.UnrollRagged")
def UnrollRagged(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Unroll every annotated loop of a function."""
    return each_loop(func, inner=lambda loop: unroll(loop) if UNROLL in loop.annotations else None)


# Loop unswitching: a condition is tested once, outside the loops in which it is invariant.
#
# before::
#
#     for ii in T.unroll(2):
#         for k in T.vectorized(16):
#             acc[ii * 16 + k] = acc[ii * 16 + k] + T.if_then_else(indices[p] < n, a[...] * b[indices[p], k], 0)
#
# after::
#
#     if indices[p] < n:
#         for ii in T.unroll(2):
#             for k in T.vectorized(16):
#                 acc[ii * 16 + k] = acc[ii * 16 + k] + a[...] * b[indices[p], k]
#
# Adding zero has no effect; without the choice, product and sum are one instruction. A condition that reads an array
# is moved only out of loops that run at least once.


KEPT = (SERIAL, UNROLLED, VECTORIZED)


def _is_zero(expr: ir.Expr) -> bool:
    return isinstance(expr, (tirx.FloatImm, tirx.IntImm)) and float(expr.value) == 0


def _choice(term: ir.Expr) -> tuple[ir.Expr, ir.Expr] | None:
    """Return (condition, value) of a term that is zero where the condition does not hold; None for other terms."""
    if dialect.is_if_then_else(term) and _is_zero(term.args[2]):
        return term.args[0], term.args[1]
    if isinstance(term, tirx.Mul):
        for one, other, first in ((term.a, term.b, True), (term.b, term.a, False)):
            choice = _choice(one)
            if choice is not None:
                return choice[0], choice[1] * other if first else other * choice[1]
    return None


def _guarded(store: tirx.BufferStore) -> tirx.Stmt:
    """Rewrite ``x = x + if_then_else(c, t, 0)`` to ``if c: x = x + t``, with the conditions of all factors."""
    update = Update.of(store, (tirx.Add, tirx.Sub))
    if update is None:
        return store
    conditions: list[ir.Expr] = []
    term, choice = update.term, _choice(update.term)
    while choice is not None and not mentions(choice[0], [store.buffer]):
        # In order: a condition may be evaluated only where those found before it hold.
        conditions.append(choice[0])
        term = choice[1]
        choice = _choice(term)
    if not conditions:
        return store
    alone = tirx.BufferStore(store.buffer, update.op(update.own, term), store.indices)
    return tirx.IfThenElse(conjunction(conditions), alone, None)


def _lifted(loop: tirx.For) -> tirx.Stmt:
    """Move the guards of the body of `loop` around it where they are invariant in it."""
    body = loop.body
    if loop.kind not in KEPT or not isinstance(body, tirx.IfThenElse) or body.else_case is not None:
        return loop
    fixed = [loop.loop_var, *(s.buffer for s in collect(body.then_case, tirx.BufferStore))]
    runs = isinstance(loop.extent, tirx.IntImm) and int(loop.extent) > 0
    out: list[ir.Expr] = []
    kept: list[ir.Expr] = []
    for condition in conjuncts(body.condition):
        may_leave = not mentions(condition, fixed) and (runs or not collect(condition, ir.TensorLoad))
        # A condition may only be evaluated where those before it hold, so it is not moved ahead of them.
        (out if may_leave and not kept else kept).append(condition)
    if not out:
        return loop
    inner = tirx.IfThenElse(conjunction(kept), body.then_case, None) if kept else body.then_case
    rest = _lifted(with_(loop, body=inner))
    return tirx.IfThenElse(conjunction(out), rest, None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.UnswitchLoops")
def UnswitchLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Guard updates instead of terms, and loops instead of updates, in a function."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        return _lifted(inner) if isinstance(inner, tirx.For) else inner

    callbacks = [(tirx.BufferStore, lambda s, _m: _guarded(s)), (tirx.For, on_for)]
    body = structural_mutate(func.body, callbacks)
    return with_body(func, body)


# Loop versioning: rows whose block lies inside the matrix run a copy of the loop without bounds checks.
#
# before::
#
#     for io in range(mb):
#         for ii in T.unroll(4):
#             for k in T.vectorized(16):
#                 if io * 4 + ii < m:
#                     c[io * 4 + ii, k] = ...
#
# after::
#
#     for io in range(mb):
#         if io * 4 + 3 < m:
#             for ii in T.unroll(4):
#                 for k in T.vectorized(16):
#                     c[io * 4 + ii, k] = ...
#         else:
#             ...  # as it was, in plain loops: it runs for the last row
#
# Only bounds that depend on the row loop and on loops of constant length below it are removed.


def _lanes(loop: tirx.For) -> dict[Var, int]:
    """Map the variables of constant-length loops below `loop` to their trip counts.

    Vector loops are excluded: their bounds are those of tiles, which `peel` handles.
    """
    loops = [f for f in collect(loop.body, tirx.For) if f.kind != VECTORIZED]
    return {f.loop_var: int(f.extent) for f in loops if isinstance(f.extent, tirx.IntImm)}


def hull(bound: ir.Expr, lanes: dict[Var, int]) -> ir.Expr | None:
    """Return `bound` at the lanes where it is strictest; None if these lanes are not the same everywhere."""
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
    """Return the bounds below `loop` on its variable and those of constant-length loops, each with its hull."""
    lanes = _lanes(loop)
    inner = [f.loop_var for f in collect(loop.body, tirx.For) if f.loop_var not in lanes]
    inner += [b.var for b in collect(loop.body, tirx.Bind)]
    written = [s.buffer for s in collect(loop.body, tirx.BufferStore)]
    edges: list[tuple[ir.Expr, ir.Expr]] = []
    for branch in collect(loop.body, tirx.IfThenElse):
        for bound in conjuncts(branch.condition):
            is_own = mentions(bound, [loop.loop_var]) and mentions(bound, list(lanes))
            if not is_own or mentions(bound, [*inner, *written]) or any(same(bound, b) for b, _ in edges):
                continue
            hardest = hull(bound, lanes)
            if hardest is not None:
                edges.append((bound, hardest))
    return edges


def _without(body: tirx.Stmt, bounds: list[ir.Expr]) -> tirx.Stmt:
    """Simplify `body` under the assumption that `bounds` hold."""

    def on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
        left = [c for c in conjuncts(node.condition) if not any(same(c, b) for b in bounds)]
        if not left:
            return mutator.mutate(node.then_case)
        other = None if node.else_case is None else mutator.mutate(node.else_case)
        return tirx.IfThenElse(conjunction(left), mutator.mutate(node.then_case), other)

    return structural_mutate(body, [(tirx.IfThenElse, on_if)])


def _plain(body: tirx.Stmt) -> tirx.Stmt:
    """Turn the loops of `body` into serial ones, which compile faster."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        return with_(node, kind=SERIAL, body=mutator.mutate(node.body), notes={})

    return structural_mutate(body, [(tirx.For, on_for)])


def version(loop: tirx.For) -> tirx.For:
    """Version the body of `loop` for rows whose blocks are in bounds; return it unchanged if it has no such bounds."""
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


__all__ = ["InterchangeLoops", "lift"]
