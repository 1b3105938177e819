# SPDX-License-Identifier: Apache-2.0
"""Loop interchange: a loop over tiles of a result's row goes outside the sums that the row collects.

before::

    for r in range(rank):
        d[i, r] = 0
    for j in range(indptr_j[i + 1] - indptr_j[i]):
        for r_0 in range((rank + 31) // 32):
            for k in range(indptr_k[...] - indptr_k[indptr_j[i] + j]):
                for r_1 in T.vectorized(32):
                    if r_0 * 32 + r_1 < rank:
                        d[i, r_0 * 32 + r_1] = d[i, r_0 * 32 + r_1] + ...

after::

    for r_0 in range((rank + 31) // 32):
        for r_1 in T.vectorized(32):
            if r_0 * 32 + r_1 < rank:
                d[i, r_0 * 32 + r_1] = 0
        for j in range(indptr_j[i + 1] - indptr_j[i]):
            for k in range(indptr_k[...] - indptr_k[indptr_j[i] + j]):
                for r_1 in T.vectorized(32):
                    if r_0 * 32 + r_1 < rank:
                        d[i, r_0 * 32 + r_1] = d[i, r_0 * 32 + r_1] + ...

A tile can then stay in registers through every loop of a nested sum. Each element takes its terms in the same order as
before: two steps of ``r_0`` have none in common.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.nests import SERIAL, VECTORIZED, Update, with_, with_body
from sparsetir.lower.rewriting import all_same, collect, mentions, renewed, same, seq, substitute
from sparsetir.walks import structural_mutate


def _update(body: tirx.Stmt) -> tirx.BufferStore | None:
    """The one store below `body`, if it adds to its element and reads no other of the array."""
    stores = collect(body, tirx.BufferStore)
    if len(stores) != 1 or collect(body, tirx.While) or collect(body, tirx.AllocBuffer):
        return None
    (store,) = stores
    loads = [x for x in collect(body, ir.TensorLoad) if x.source.same_as(store.buffer)]
    return store if Update.of(store) is not None and len(loads) == 1 else None


def _lane(tiles: tirx.For, store: tirx.BufferStore) -> tirx.For | None:
    """The vector loop with which `tiles` runs over the last subscript of a store, each element once; None if none."""
    lanes = [f for f in collect(tiles.body, tirx.For) if f.kind == VECTORIZED and isinstance(f.extent, tirx.IntImm)]
    if len(lanes) != 1 or mentions(list(store.indices)[:-1], [tiles.loop_var]):
        return None
    (lane,) = lanes
    gap = sym.Analyzer().simplify(store.indices[-1] - tiles.loop_var * lane.extent - lane.loop_var)
    return lane if isinstance(gap, tirx.IntImm) and int(gap) == 0 else None


def _inner(body: tirx.Stmt) -> tirx.For | None:
    """A serial loop that is all of `body`."""
    return body if isinstance(body, tirx.For) and body.kind == SERIAL and not body.annotations else None


def lift(loop: tirx.For) -> tirx.For | None:
    """`loop` below the loop over tiles that is its body; None where it is something else, or moves the result."""
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
    """`tiles` with the loop `before` it, which sets the elements that it adds to, one tile at a time; None if it does
    something else.
    """
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
    return with_(tiles, body=seq(renewed(begin), tiles.body), notes={})


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.InterchangeLoops")
def InterchangeLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Lift every loop over tiles of a function as far as it goes, and initialise the tiles one at a time."""
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


__all__ = ["InterchangeLoops", "lift"]
