# SPDX-License-Identifier: Apache-2.0
"""Loop transformations: interchange, unrolling, unswitching, versioning, full tiles of columns and their remainders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import (
    ABSORBING,
    all_same,
    collect,
    conjunction,
    conjuncts,
    is_number,
    loads_of,
    mentions,
    moves_by_one,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.independence import ArrayFacts
from sparsetir.lower.annotations import UNROLL, VECTOR, padded_rows
from sparsetir.lower.loops import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Update,
    each_loop,
    join_neighbours,
    presence,
    serial,
    unrolled,
    with_,
    with_body,
    without,
)
from sparsetir.lower.vector.registers import facts_of, promote

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
    loads = loads_of(body, store.buffer)
    return store if Update.of(store) is not None and len(loads) == 1 else None


def _lane(tiles: tirx.For, store: tirx.BufferStore) -> tirx.For | None:
    """Return the vector loop that covers the tiles of a store's last subscript, each element once, or None."""
    lanes = [f for f in collect(tiles.body, tirx.For) if f.kind == VECTORIZED and isinstance(f.extent, tirx.IntImm)]
    if len(lanes) != 1 or mentions(list(store.indices)[:-1], [tiles.loop_var]):
        return None
    (lane,) = lanes
    gap = sym.Analyzer().simplify(store.indices[-1] - tiles.loop_var * lane.extent - lane.loop_var)
    return lane if is_number(gap, 0) else None


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
        lifted_loop = lift(inner)
        if lifted_loop is None:
            return inner
        lifted.append(lifted_loop.loop_var)
        return lifted_loop

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*join_neighbours((mutator.mutate(s) for s in node.seq), tile_pair))

    def tile_pair(before: tirx.Stmt, stmt: tirx.Stmt) -> tirx.Stmt | None:
        is_lifted = isinstance(stmt, tirx.For) and stmt.loop_var in lifted
        return _tiled(before, stmt) if is_lifted else None

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
# Adding zero has no effect, nor has a maximum with -inf; without the choice, product and sum are one instruction. A
# condition that reads an array is moved only out of loops that run at least once.


KEPT = (SERIAL, UNROLLED, VECTORIZED)


def _guarded(store: tirx.BufferStore) -> tirx.Stmt:
    """Rewrite ``x = x + if_then_else(c, t, 0)`` to ``if c: x = x + t``, with the conditions of all factors.

    Maxima of sums and minima are rewritten alike where -inf stands for 0, minima where inf does.
    """
    update = Update.of(store, tuple(ABSORBING))
    if update is None:
        return store
    conditions, term = presence(update.term, update.op, [store.buffer])
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


# ------------------------------------------------------------------------------------------ remainders


# before::
#
#     for k_0 in T.serial((feat + 63) // 64, annotations={"sparsetir.vector": 16}):
#         for j in range(...):
#             for k_1 in T.vectorized(64):
#                 if k_0 * 64 + k_1 < feat:
#                     acc[k_1] = acc[k_1] + a[...] * b[..., k_0 * 64 + k_1]
#
# after::
#
#     for k_0 in range(feat // 64):
#         for j in range(...):
#             for k_1 in T.vectorized(64):
#                 acc[k_1] = ...
#     if feat % 64 > 0:
#         if feat >= 16:
#             if feat % 64 <= 16:
#                 ...  # one vector, of the columns from feat - 16 on
#             elif feat % 64 <= 32:
#                 for j in range(...):
#                     for k_1 in T.vectorized(16):
#                         acc[k_1] = ...  # from column feat // 64 * 64
#                     for k_1 in T.vectorized(16):
#                         acc[16 + k_1] = ...  # from column feat - 16
#             ...  # likewise three and four vectors
#         elif feat >= 8:
#             ...  # eight columns from 0 on, and eight from feat - 8 on
#         ...  # likewise 4 and 2; then one column
#
# Every remainder iterates the entries of a row once. Its last vector ends at the last column and overlaps the vector
# before it: the shared columns are computed twice, with the same result. That needs no masks, which exist neither on
# every processor nor for every dtype. It is valid where a tile loads all elements of the result before it stores one;
# sums in memory are promoted to registers first. A tile that adds to the result shares no columns with another tile.
# Where that is not possible, a remainder of constant length takes narrower vectors that do not overlap, in the same
# pass, and one of unknown length takes a pass for each narrower tile.
#
# A vector loop with a check inside is not vectorised by TVM. The tile must be a power of two.


NARROWEST = 4  # columns of the narrowest tile that has a pass of its own
DEFAULT_VECTOR = 8  # lanes of a vector where the schedule does not say


def _checks(body: tirx.Stmt, outer: Var) -> list[tirx.IfThenElse]:
    """Return the bounds checks ``outer * tile + lane < limit`` below `body`."""
    branches = [b for b in collect(body, tirx.IfThenElse) if isinstance(b.condition, tirx.LT) and b.else_case is None]
    return [b for b in branches if mentions(b.condition.a, [outer])]


def vector_loops(body: tirx.Stmt) -> list[tirx.For]:
    """Return the vectorized loops of a statement."""
    return [loop for loop in collect(body, tirx.For) if loop.kind == VECTORIZED]


def _is_check(condition: ir.Expr, loop: tirx.For, lane: tirx.For, limit: ir.Expr) -> bool:
    expected = loop.loop_var * lane.extent + lane.loop_var
    return is_number(sym.Analyzer().simplify(condition.a - expected), 0) and same(condition.b, limit)


def match(loop: tirx.For) -> tuple[int, ir.Expr] | None:
    """Return (tile, limit) if every vector loop below `loop` is one bounds-checked tile of it, else None."""
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


@dataclass(frozen=True)
class ColumnPiece:
    """Neighbouring columns of a pass: the first column, the number of columns, and their place in local arrays."""

    first: ir.Expr
    width: int | ir.Expr
    slot: int = 0


class _Tile:
    """Rewriter of the body of a loop over tiles for the columns of some pieces."""

    def __init__(self, loop: tirx.For, tile: int) -> None:
        self.outer, self.tile = loop.loop_var, tile

    def whole(self, body: tirx.Stmt) -> tirx.Stmt:
        """Return the body of a full tile, without checks."""
        return renewed(self._unchecked(body))

    def split(
        self,
        body: tirx.Stmt,
        pieces: Sequence[ColumnPiece],
        longer: Sequence[ColumnPiece] = (),
        padded: Collection[Var] = (),
    ) -> tirx.Stmt | None:
        """Return the body with a loop for each piece in the place of each vector loop, without checks.

        None if the outer variable is used other than multiplied by the tile. Loops that access local arrays and
        `padded` ones alone take the `longer` pieces instead, which go beyond the last column.
        """
        own = {a.buffer for a in collect(body, tirx.AllocBuffer)}

        def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
            if node.kind != VECTORIZED:
                return mutator.default_mutate(node)
            is_longer = bool(longer) and self._is_padded(node, own, padded)
            return seq(*(self._lanes(node, piece) for piece in (longer if is_longer else pieces)))

        out = structural_mutate(self._unchecked(body), [(tirx.For, on_for)])
        return None if mentions(out, [self.outer]) else renewed(out)

    def _is_padded(self, lane: tirx.For, own: set[Var], padded: Collection[Var]) -> bool:
        """Return whether a vector loop stores to local arrays only, and loads lanes of these and of padded columns."""
        if any(s.buffer not in own for s in collect(lane.body, tirx.BufferStore)):
            return False
        column, analyzer = self.outer * lane.extent + lane.loop_var, sym.Analyzer()

        def is_column(load: ir.TensorLoad) -> bool:
            if load.source not in padded or len(load.indices) != 2 or mentions([load.indices[0]], [lane.loop_var]):
                return False
            return is_number(analyzer.simplify(load.indices[1] - column), 0)

        loads = (x for x in collect(lane.body, ir.TensorLoad) if mentions(list(x.indices), [lane.loop_var]))
        return all(load.source in own or is_column(load) for load in loads)

    def _unchecked(self, body: tirx.Stmt) -> tirx.Stmt:
        def on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
            if isinstance(node.condition, tirx.LT) and mentions(node.condition.a, [self.outer]):
                return mutator.mutate(node.then_case)
            return mutator.default_mutate(node)

        return structural_mutate(body, [(tirx.IfThenElse, on_if)])

    def _lanes(self, node: tirx.For, piece: ColumnPiece) -> tirx.Stmt:
        """Return a vector loop restricted to the columns of one piece."""
        dtype = str(node.loop_var.ty.dtype)
        slot, lane = const(piece.slot, dtype), Var(str(node.loop_var.name), node.loop_var.ty)

        def on_mul(x: tirx.Mul, mutator: Any) -> ir.Expr:
            is_start = x.a.same_as(self.outer) and isinstance(x.b, tirx.IntImm) and int(x.b) == self.tile
            return piece.first - slot if is_start else mutator.default_mutate(x)

        body = structural_mutate(node.body, [(tirx.Mul, on_mul)])
        body = renewed(substitute(body, {node.loop_var: lane + slot if piece.slot else lane}))
        is_vector = isinstance(piece.width, int)
        extent = const(piece.width, dtype) if isinstance(piece.width, int) else piece.width
        kind = VECTORIZED if is_vector and piece.width != 1 else SERIAL
        return with_(node, var=lane, extent=extent, kind=kind, body=body, notes={})


# ---------------------------------------------------------------- whether columns may be computed twice


class _Accesses:
    """The order of the loads and stores of a statement: for each array the position and the loops of each access."""

    def __init__(self) -> None:
        self.loads: list[tuple[Var, int, list[tirx.For]]] = []
        self.stores: list[tuple[Var, int, list[tirx.For]]] = []
        self.around: list[tirx.For] = []
        self.position = 0
        self.is_known = True

    def visit(self, stmt: Any) -> None:
        """Visit one statement."""
        if isinstance(stmt, tirx.SeqStmt):
            for child in stmt.seq:
                self.visit(child)
        elif isinstance(stmt, tirx.For):
            self._read([stmt.min, stmt.extent])
            self.around.append(stmt)
            self.visit(stmt.body)
            self.around.pop()
        elif isinstance(stmt, tirx.IfThenElse):
            self._read(stmt.condition)
            self.visit(stmt.then_case)
            if stmt.else_case is not None:
                self.visit(stmt.else_case)
        elif isinstance(stmt, tirx.BufferStore):
            self._read([stmt.value, *stmt.indices])
            self.stores.append((stmt.buffer, self._next(), list(self.around)))
        elif not isinstance(stmt, tirx.AllocBuffer):
            self.is_known = False

    def _read(self, node: Any) -> None:
        position = self._next()
        self.loads += [(x.source, position, list(self.around)) for x in collect(node, ir.TensorLoad)]

    def _next(self) -> int:
        self.position += 1
        return self.position


def may_overlap(body: tirx.Stmt, outer: Var) -> bool:
    """Return whether columns that two vector loops of a tile share get the same result as columns of one.

    Each array from outside must be loaded before it is stored to, and be accessed by columns, which `outer` numbers
    together with the lane; local arrays must have an element for each lane.
    """
    accesses = _Accesses()
    accesses.visit(body)
    own = {a.buffer for a in collect(body, tirx.AllocBuffer)}
    if not accesses.is_known or not all(_is_by_lane(lane, outer, own) for lane in vector_loops(body)):
        return False
    for buffer, stored_at, around_store in accesses.stores:
        for other, loaded_at, around_load in accesses.loads:
            if (other is not buffer and not other.same_as(buffer)) or buffer in own:
                continue
            if loaded_at > stored_at or any(loop in around_load for loop in around_store):
                return False
    return True


def reads_results(body: tirx.Stmt) -> bool:
    """Return whether a tile loads an array from outside that it stores to, so that no other tile may share columns."""
    own = {a.buffer for a in collect(body, tirx.AllocBuffer)}
    results = {s.buffer for s in collect(body, tirx.BufferStore)} - own
    return any(x.source in results for x in collect(body, ir.TensorLoad))


def _is_by_lane(lane: tirx.For, outer: Var, own: set[Var]) -> bool:
    """Return whether a vector loop stores an element for each lane, local arrays at its lane, others at its column."""
    var = lane.loop_var
    stores = collect(lane.body, tirx.BufferStore)
    if not all(mentions(list(s.indices), [var]) for s in stores):
        return False
    accesses = [*stores, *(x for x in collect(lane.body, ir.TensorLoad) if mentions(list(x.indices), [var]))]
    local: list[list[ir.Expr]] = []
    others: list[list[ir.Expr]] = []
    for access in accesses:
        buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
        (local if buffer in own else others).append(list(access.indices))
    if not all(mentions(indices, [outer]) for indices in others):
        return False
    return all(moves_by_one(indices[-1], var) and not mentions(list(indices)[:-1], [var]) for indices in local)


# ---------------------------------------------------------------- remainders


class _Remainder:
    """Emitter of the columns after the last full tile; `is_apart` if it may not share columns with that tile."""

    def __init__(self, tile: int, vector: int, limit: ir.Expr, emit: Callable[[list[ColumnPiece]], tirx.Stmt]) -> None:
        self.tile, self.vector, self.limit, self.emit = tile, min(tile, vector), limit, emit
        self.is_apart = False
        self.dtype = str(limit.ty.dtype)
        self.rest = tirx.floormod(limit, self.number(tile))

    def number(self, value: int) -> ir.Expr:
        return const(value, self.dtype)

    def overlapping(self) -> tirx.Stmt:
        """Emit one pass: whole vectors, of which the last one ends at the last column."""
        if isinstance(self.limit, tirx.IntImm):
            return self.emit(self._constant(int(self.limit)))
        begin, most = self.limit - self.rest, self.tile // self.vector
        stmt: tirx.Stmt = self.emit([ColumnPiece(begin, 1)])
        for width in self._widths_below(self.vector, 2):
            one, two = (self.emit(self._pieces(count, width, begin)) for count in (1, 2))
            either = tirx.IfThenElse(self.rest.equal(self.number(width)), one, two)
            stmt = tirx.IfThenElse(self.rest >= self.number(width), either, stmt)
        several = self.emit(self._pieces(most, self.vector, begin))
        for count in reversed(range(1, most)):
            fits = self.rest <= self.number(count * self.vector)
            several = tirx.IfThenElse(fits, self.emit(self._pieces(count, self.vector, begin)), several)
        room = self.rest if self.is_apart else self.limit
        return tirx.IfThenElse(room >= self.number(self.vector), several, stmt)

    def _widths_below(self, width: int, least: int) -> list[int]:
        """Return the powers of two from `least` to below `width`, ascending."""
        return [1 << n for n in range(least.bit_length() - 1, width.bit_length() - 1)]

    def _pieces(self, count: int, width: int, begin: ir.Expr) -> list[ColumnPiece]:
        """Return `count` vectors from `begin` on, the last one at the end of the row; neighbours are merged."""
        last = ColumnPiece(self.limit - self.number(width), width, (count - 1) * width)
        return [*self._merged(count - 1, width, begin), last]

    def _merged(self, count: int, width: int, begin: ir.Expr) -> list[ColumnPiece]:
        """Return `count` vectors from `begin` on, neighbours merged to pieces whose number is a power of two."""
        pieces, at = [], 0
        while at < count:
            together = 1 << (count - at).bit_length() - 1
            pieces.append(ColumnPiece(begin + self.number(at * width), together * width, at * width))
            at += together
        return pieces

    def _constant(self, limit: int) -> list[ColumnPiece]:
        rest = limit % self.tile
        width = self.vector
        while width > (rest if self.is_apart else limit):
            width //= 2
        if not rest % width:
            return self._whole(limit - rest, rest, width)
        return self._pieces(-(-rest // width), width, self.number(limit - rest))

    def longer(self, length: int) -> list[ColumnPiece]:
        """Return whole vectors that cover a constant remainder where rows have so many elements; none without room.

        They go beyond the last column, and begin where vectors of an aligned row do.
        """
        limit = int(self.limit)
        rest, width = limit % self.tile, self.vector
        while width > 1 and limit - rest + -(-rest // width) * width > length:
            width //= 2
        count = -(-rest // width)
        if rest % width == 0:
            return []
        return self._merged(count, width, self.number(limit - rest))

    def padded(self, length: int, emit: Callable[..., tirx.Stmt]) -> tirx.Stmt | None:
        """Emit one pass with whole vectors where rows of `length` elements are read; each column is stored once."""
        longer = self.longer(length)
        rest = int(self.limit) % self.tile
        return emit(self._whole(int(self.limit) - rest, rest), longer) if longer else None

    def _whole(self, begin: int, rest: int, least: int = 1) -> list[ColumnPiece]:
        """Return vectors that cover a constant remainder exactly, the widest first."""
        pieces, at = [], 0
        for width in reversed([1 << n for n in range(rest.bit_length())]):
            if rest & width and width >= least:
                pieces.append(ColumnPiece(self.number(begin + at), width, at))
                at += width
        return pieces

    def exact(self) -> tirx.Stmt:
        """Emit every column once: in one pass if their number is constant, else in a pass for each narrower tile."""
        if isinstance(self.limit, tirx.IntImm):
            rest = int(self.limit) % self.tile
            return self.emit(self._whole(int(self.limit) - rest, rest))
        stmts = []
        for width in reversed(self._widths_below(self.tile, NARROWEST)):
            base = tirx.floordiv(self.limit, self.number(2 * width)) * self.number(2 * width)
            odd = tirx.floormod(tirx.floordiv(self.limit, self.number(width)), self.number(2)).equal(self.number(1))
            stmts.append(tirx.IfThenElse(odd, self.emit([ColumnPiece(base, width)]), None))
        left = tirx.floormod(self.limit, self.number(min(self.tile, NARROWEST)))
        stmts.append(tirx.IfThenElse(left > self.number(0), self.emit([ColumnPiece(self.limit - left, left)]), None))
        return seq(*stmts)


class _IndexedByTile(Exception):
    """The number of the tile is used other than for its first column."""


def peel(loop: tirx.For, facts: ArrayFacts, padded: Mapping[Var, int] | None = None) -> tirx.Stmt:
    """Split `loop` into full tiles and one pass over the remainder; return other loops unchanged.

    Parameters
    ----------
    loop : For
    facts : ArrayFacts
    padded : mapping of Var to int, optional
        Arrays with gaps between their rows, and the elements from one row to the next.
    """
    vector = int(loop.annotations.get(VECTOR, DEFAULT_VECTOR))
    loop = with_(loop, notes=without(loop, VECTOR))
    matched = match(loop)
    if matched is None:
        return loop
    tile, limit = matched
    rewrite, body = _Tile(loop, tile), loop.body
    is_overlapping = may_overlap(body, loop.loop_var)
    if not is_overlapping:
        promoted = promote(renewed(body), facts)
        is_overlapping = may_overlap(promoted, loop.loop_var)
        body = promoted if is_overlapping else body

    padded = padded or {}

    def emit(pieces: list[ColumnPiece], longer: Sequence[ColumnPiece] = ()) -> tirx.Stmt:
        stmt = rewrite.split(body, pieces, longer, padded)
        if stmt is None:
            raise _IndexedByTile
        return stmt

    remainder = _Remainder(tile, vector, limit, emit)
    remainder.is_apart = reads_results(body)
    try:
        rest = None
        if padded and is_overlapping and isinstance(limit, tirx.IntImm) and int(limit) % tile:
            rest = remainder.padded(min(padded.values()), emit)
        if rest is None:
            rest = remainder.overlapping() if is_overlapping else remainder.exact()
    except _IndexedByTile:
        return loop
    full = tirx.floordiv(limit, const(tile, str(limit.ty.dtype)))
    main = with_(loop, extent=full, body=rewrite.whole(loop.body))
    zero = const(0, str(limit.ty.dtype))
    if isinstance(limit, tirx.IntImm):
        parts = [main] if int(limit) >= tile else []
        return seq(*parts, *([rest] if int(limit) % tile else []))
    return seq(main, tirx.IfThenElse(remainder.rest > zero, rest, None))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PeelRemainders")
def PeelRemainders(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Peel every bounds-checked tile loop of a function."""
    facts, lengths = facts_of(func), padded_rows(func)
    padded = {p: lengths[str(p.name)] for p in func.params if str(p.name) in lengths}
    return each_loop(func, inner=lambda loop: peel(loop, facts, padded))


__all__ = ["InterchangeLoops", "PeelRemainders", "lift", "match", "may_overlap", "vector_loops"]
