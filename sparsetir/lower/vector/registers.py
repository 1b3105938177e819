# SPDX-License-Identifier: Apache-2.0
"""Register promotion of accumulators, and factoring of loop-invariant operands out of sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.dialect import is_if_then_else
from sparsetir.ir.rewriting import (
    all_same,
    alloc,
    collect,
    conjunction,
    conjuncts,
    disjunction,
    factors,
    is_element,
    is_number,
    mentions,
    product,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.independence import ArrayFacts, are_different
from sparsetir.lower.annotations import DISTINCT, FACTOR, FIBERS, INDPTR, names_in, refused
from sparsetir.lower.loops import (
    PARALLEL,
    SERIAL,
    Update,
    each_lane,
    each_loop,
    join_neighbours,
    most,
    place_of,
    with_,
    with_body,
    without,
)

# Register promotion (scalar replacement): the accumulators of a reduction are kept in registers.
#
# before::
#
#     for jo, ji in T.grid(indptr[io + 1] - indptr[io], 4):
#         for ii in T.unroll(4):
#             for k in T.vectorized(16):
#                 c[io * 4 + ii, k] = c[io * 4 + ii, k] + a[...] * b[..., k]
#
# after::
#
#     for ii in T.unroll(4):
#         for k in T.vectorized(16):
#             acc[ii * 16 + k] = c[io * 4 + ii, k]
#     for jo, ji in T.grid(indptr[io + 1] - indptr[io], 4):
#         for ii in T.unroll(4):
#             for k in T.vectorized(16):
#                 acc[ii * 16 + k] = acc[ii * 16 + k] + a[...] * b[..., k]
#     for ii in T.unroll(4):
#         for k in T.vectorized(16):
#             c[io * 4 + ii, k] = acc[ii * 16 + k]
#
# A *lane* is an inner loop that the element's subscripts depend on; the other loops repeat the element. Different lanes
# must have different elements: rows that share a target, as in ``y[b[i]] = y[b[i]] + ...``, stay in memory. A guard of
# the element that does not depend on the repeating loops guards its first load and last store too. Where the statement
# before the loop initialises exactly these elements, the registers begin with its value.


MOST_LANES = 1024


@dataclass(frozen=True)
class StoreSite:
    """A store below a loop, the loops that its element depends on, and the conditions that hold for all its updates.

    Parameters
    ----------
    store : BufferStore
    lanes : list of For
    guards : list of Expr
        Conditions around the store, and those that loops around it run at all where this depends on the lanes.
    runs : list of Expr
        Conditions that the other loops around it run at all.
    """

    store: tirx.BufferStore
    lanes: list[tirx.For]
    guards: list[ir.Expr]
    runs: list[ir.Expr]

    def at(self, lanes: list[tirx.For], node: Any) -> Any:
        """Substitute the loop variables of other lanes in `node`."""
        return substitute(node, {a.loop_var: b.loop_var for a, b in zip(self.lanes, lanes, strict=True)})


class _Finder:
    """The stores to memory below a loop, with the loops and conditions around each."""

    def __init__(self, loop: tirx.For) -> None:
        self.loops: list[tirx.For] = [loop]
        self.conditions: list[ir.Expr] = []
        self.found: list[tuple[tirx.BufferStore, list[tirx.For], list[ir.Expr]]] = []
        self.local: list[Var] = []

    def stmt(self, node: Any) -> None:
        """Visit one statement."""
        if isinstance(node, tirx.For):
            self.loops.append(node)
            self.stmt(node.body)
            self.loops.pop()
        elif isinstance(node, tirx.SeqStmt):
            for child in node.seq:
                self.stmt(child)
        elif isinstance(node, tirx.IfThenElse):
            self._branch(conjuncts(node.condition), node.then_case)
            if node.else_case is not None:
                self._branch([tirx.Not(node.condition)], node.else_case)
        elif isinstance(node, (tirx.While, tirx.AttrStmt)):
            self.stmt(node.body)
        elif isinstance(node, tirx.BufferStore):
            if str(node.buffer.ty.storage_scope) == "local":
                self.local.append(node.buffer)
            else:
                self.found.append((node, list(self.loops), list(self.conditions)))

    def _branch(self, conditions: list[ir.Expr], body: tirx.Stmt) -> None:
        self.conditions += conditions
        self.stmt(body)
        del self.conditions[len(self.conditions) - len(conditions) :]


def _sites(loop: tirx.For) -> list[StoreSite] | None:
    """Return every store to memory below `loop`; None if one cannot use registers."""
    finder = _Finder(loop)
    finder.stmt(loop.body)
    inner = [f.loop_var for f in collect(loop, tirx.For)]
    bound = [*inner, *(b.var for b in collect(loop, tirx.Bind)), *(a.buffer for a in collect(loop, tirx.AllocBuffer))]
    sites = []
    for store, loops, conditions in finder.found:
        lanes = [f for f in loops if mentions(store.indices, [f.loop_var])]
        moving = [v for v in (*bound, *finder.local) if v not in [f.loop_var for f in lanes]]
        if loop in lanes or mentions(store.indices, [*moving, store.buffer]) or _is_too_wide(lanes, inner):
            return None
        runs = _runs([f for f in loops if f not in lanes and f is not loop], [f.loop_var for f in lanes], moving)
        if runs is None:
            return None
        runs = [c for c in runs if not mentions(c, [*moving, store.buffer])]
        conditions = [c for c in conditions if not mentions(c, [*moving, store.buffer])]
        lane_vars = [f.loop_var for f in lanes]
        guards = [*(c for c in runs if mentions(c, lane_vars)), *conditions]
        sites.append(StoreSite(store, lanes, guards, [c for c in runs if not mentions(c, lane_vars)]))
    return sites


def _runs(loops: list[tirx.For], lanes: list[Var], moving: list[Var]) -> list[ir.Expr] | None:
    """Return the conditions that loops around a store are not empty; None if lanes and other loops decide together."""
    conditions: list[ir.Expr] = []
    for loop in loops:
        if mentions(loop.extent, lanes) and mentions(loop.extent, moving):
            return None
        if not isinstance(loop.extent, tirx.IntImm):
            conditions += [*_conditions(loop.extent), loop.extent > const(0, str(loop.extent.ty.dtype))]
    return conditions


def _conditions(extent: ir.Expr) -> list[ir.Expr]:
    """Return the conditions without which an extent is 0."""
    return conjuncts(extent.args[0]) if is_if_then_else(extent) and is_number(extent.args[2], 0) else []


def _is_too_wide(lanes: list[tirx.For], inner: list[Var]) -> bool:
    sizes = [most(lane.extent) for lane in lanes]
    if None in sizes or any(lane.kind == PARALLEL or mentions(lane.extent, inner) for lane in lanes):
        return True
    return math.prod(size or 1 for size in sizes) > MOST_LANES


def _agree(sites: list[StoreSite], loop: tirx.For) -> bool:
    """Return whether all stores update the same elements, which nothing else below the loop accesses."""
    first = sites[0]
    target = first.store.buffer
    for site in sites:
        if not site.store.buffer.same_as(target) or len(site.lanes) != len(first.lanes):
            return False
        pairs = zip(site.lanes, first.lanes, strict=True)
        if not all(same(a.extent, b.extent) and a.kind == b.kind for a, b in pairs):
            return False
        indices = [site.at(first.lanes, i) for i in site.store.indices]
        guards = [site.at(first.lanes, g) for g in site.guards]
        if not all_same(indices, list(first.store.indices)) or not all_same(guards, first.guards):
            return False
    own = sum(len(_own_loads(s.store)) for s in sites)
    every = sum(load.source.same_as(target) for load in collect(loop, ir.TensorLoad))
    return own == every and all(_own_loads(s.store) for s in sites)


def _own_loads(store: tirx.BufferStore) -> list[ir.TensorLoad]:
    """Return the loads of the element that the store writes."""
    return [load for load in collect(store.value, ir.TensorLoad) if is_element(load, store)]


def _around(lanes: list[tirx.For], body: tirx.Stmt, guards: list[ir.Expr]) -> tirx.Stmt:
    """Nest `body` in the lanes and the guards."""
    return each_lane(lanes, tirx.IfThenElse(conjunction(guards), body, None) if guards else body)


def _initial(stmt: tirx.Stmt, site: StoreSite) -> ir.Expr | None:
    """Return the value that `stmt` sets a site's elements to, in terms of its lanes; None if it does not."""
    lanes: list[tirx.For] = []
    guards: list[ir.Expr] = []
    while isinstance(stmt, (tirx.For, tirx.IfThenElse)):
        if isinstance(stmt, tirx.For):
            lanes.append(stmt)
            stmt = stmt.body
        elif stmt.else_case is None:
            guards += conjuncts(stmt.condition)
            stmt = stmt.then_case
        else:
            return None
    if not isinstance(stmt, tirx.BufferStore) or not stmt.buffer.same_as(site.store.buffer):
        return None
    if len(lanes) != len(site.lanes) or collect(stmt.value, ir.TensorLoad):
        return None
    if not all(same(a.extent, b.extent) and same(a.min, b.min) for a, b in zip(lanes, site.lanes, strict=True)):
        return None
    other = StoreSite(stmt, lanes, guards, [])
    indices = [other.at(site.lanes, i) for i in stmt.indices]
    own_guards = [other.at(site.lanes, g) for g in guards]
    agree = all_same(indices, list(site.store.indices)) and all_same(own_guards, site.guards)
    return other.at(site.lanes, stmt.value) if agree else None


def _are_apart(site: StoreSite, facts: ArrayFacts) -> bool:
    """Return whether the lanes of a store have different elements, so that each can have its own register."""
    ranges = {lane.loop_var: ir.Range.from_min_extent(lane.min, lane.extent) for lane in site.lanes}
    return not ranges or are_different(site.store.indices, ranges, facts)


def keep(loop: tirx.For, facts: ArrayFacts, before: tirx.Stmt | None = None) -> tirx.Stmt | None:
    """Promote the accumulators of `loop` to a local array; None if it does not reduce into few elements.

    If the statement `before` is given, the result replaces both; None unless `before` initialises the elements.
    """
    if loop.kind != SERIAL or any(f.kind == PARALLEL for f in collect(loop.body, tirx.For)):
        return None
    sites = _sites(loop)
    if not sites or not _agree(sites, loop) or not _are_apart(sites[0], facts):
        return None
    if any(collect(site.store.indices, tirx.Ramp) for site in sites):  # vectors of tensor intrinsics
        return None
    first = sites[0]
    start = None if before is None else _initial(before, first)
    if before is not None and start is None:
        return None
    target, lanes = first.store.buffer, first.lanes
    size = math.prod(most(lane.extent) or 1 for lane in lanes)
    acc = tirx.decl_buffer([size], str(target.ty.dtype), name="acc", scope="local", layout=None)

    def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        if not store.buffer.same_as(target):
            return mutator.default_mutate(store)
        site = next(s for s in sites if s.store.same_as(store))
        at = [place_of(site.lanes)]
        on_load = lambda x, m: tirx.BufferLoad(acc, at) if x.source.same_as(target) else m.default_mutate(x)  # noqa: E731
        return tirx.BufferStore(acc, structural_mutate(store.value, [(ir.TensorLoad, on_load)]), at)

    inner = structural_mutate(loop, [(tirx.BufferStore, on_store)])
    at, indices = [place_of(lanes)], list(first.store.indices)
    if start is not None:
        begin = _around(lanes, tirx.BufferStore(acc, start, at), [])
        end = _around(lanes, tirx.BufferStore(target, tirx.BufferLoad(acc, at), indices), first.guards)
        return seq(*alloc(acc), begin, inner, end)
    # Where no update runs the element must not be accessed: it may not exist then.
    guards = [*_any_runs(sites), *first.guards]
    begin = _around(lanes, tirx.BufferStore(acc, tirx.BufferLoad(target, indices), at), guards)
    end = _around(lanes, tirx.BufferStore(target, tirx.BufferLoad(acc, at), indices), guards)
    runs = loop.extent > const(0, str(loop.extent.ty.dtype))
    return tirx.IfThenElse(runs, seq(*alloc(acc), begin, inner, end), None)


def _any_runs(sites: list[StoreSite]) -> list[ir.Expr]:
    """Return the conditions that the loops around some store run at all."""
    if len(sites) == 1:
        return sites[0].runs
    if any(not site.runs for site in sites):
        return []
    return [disjunction([conjunction(site.runs) for site in sites])]


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PromoteRegisters")
def PromoteRegisters(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Promote the accumulators of every reduction loop of a function, at the outermost loop possible."""
    return with_body(func, promote(func.body, facts_of(func)))


def facts_of(func: tirx.PrimFunc) -> ArrayFacts:
    """Return the known properties of a function's index arrays."""
    return ArrayFacts(names_in(func, INDPTR), names_in(func, DISTINCT), names_in(func, FIBERS))


def promote(body: tirx.Stmt, facts: ArrayFacts) -> tirx.Stmt:
    """Promote the accumulators of every reduction loop of a statement, at the outermost loop possible."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        kept = keep(node, facts)
        return mutator.default_mutate(node) if kept is None else kept

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        """Promote accumulators that a statement initialises for the loop after it, and go on inside of the others."""
        join = lambda before, stmt: keep(stmt, facts, before) if isinstance(stmt, tirx.For) else None  # noqa: E731
        return seq(*(mutator.mutate(s) for s in join_neighbours(node.seq, join)))

    return structural_mutate(body, [(tirx.For, on_for), (tirx.SeqStmt, on_seq)])


# Factoring out loop-invariant operands: the other factors are summed first, and the sum is multiplied once.
#
# before::
#
#     for j in range(indptr_j[i + 1] - indptr_j[i]):
#         for k in T.serial(indptr_k[...] - indptr_k[indptr_j[i] + j], annotations={"sparsetir.factor": 1}):
#             for r in T.vectorized(32):
#                 d[i, r] = d[i, r] + t[...] * b[indices_j[indptr_j[i] + j], r] * c[indices_k[...], r]
#
# after::
#
#     for j in range(indptr_j[i + 1] - indptr_j[i]):
#         if indptr_k[...] - indptr_k[indptr_j[i] + j] > 0:
#             fiber = T.alloc_local((32,))
#             for r in T.vectorized(32):
#                 fiber[r] = 0
#             for k in range(indptr_k[...] - indptr_k[indptr_j[i] + j]):
#                 for r in T.vectorized(32):
#                     fiber[r] = fiber[r] + t[...] * c[indices_k[...], r]
#             for r in T.vectorized(32):
#                 d[i, r] = d[i, r] + b[indices_j[indptr_j[i] + j], r] * fiber[r]
#
# The sum of a fiber and that of the row are both in registers then, and ``b`` is read once for a fiber. The annotation
# is for sums that may be reordered; a loop without an invariant factor is unchanged.


@dataclass(frozen=True)
class Sum:
    """``store.buffer[store.indices] += fixed * moving`` below a loop, for every step of the `lanes`."""

    store: tirx.BufferStore
    lanes: list[tirx.For]
    fixed: list[ir.Expr]
    moving: list[ir.Expr]


def match(loop: tirx.For) -> Sum | None:
    """Match the sum over `loop` and its invariant factors; None if it has none."""
    lanes: list[tirx.For] = []
    store = loop.body
    while isinstance(store, tirx.For):
        lanes.append(store)
        store = store.body
    update = Update.of(store)
    if loop.kind != SERIAL or update is None or not update.is_alone:
        return None
    own, sizes = [loop.loop_var], [most(f.extent) for f in lanes]
    if mentions(list(store.indices), own) or any(mentions(f.extent, own) for f in lanes):
        return None
    if None in sizes or math.prod(n or 1 for n in sizes) > MOST_LANES:
        return None
    if not all(mentions(list(store.indices), [f.loop_var]) for f in lanes):
        return None
    parts = factors(update.term)
    moving = [x for x in parts if mentions(x, own)]
    fixed = [x for x in parts if not mentions(x, own)]
    if not moving or not any(collect(x, ir.TensorLoad) for x in fixed):
        return None
    return Sum(store, lanes, fixed, moving)


def _matches(loop: tirx.For) -> list[Sum]:
    """Match the sums below a loop that updates one array, such as the vectors of a row; empty if one does not match."""
    parts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
    sums = [match(with_(loop, body=part)) for part in parts]
    matched = [one for one in sums if one is not None]
    is_one = len(matched) == len(sums) and all(x.store.buffer.same_as(matched[0].store.buffer) for x in matched)
    return matched if is_one else []


def _factored(total: Sum) -> tuple[Var, tirx.Stmt, tirx.Stmt, tirx.Stmt]:
    """Return a local array for the sum of the varying factors, and its initialisation, its update and its use."""
    store, lanes, kind = total.store, total.lanes, str(total.store.buffer.ty.dtype)
    size = math.prod(most(f.extent) or 1 for f in lanes)
    fiber = tirx.decl_buffer([size], kind, name="fiber", scope="local", layout=None)
    at = [place_of(lanes)]
    fiber_sum = tirx.BufferLoad(fiber, at)
    clear = each_lane(lanes, tirx.BufferStore(fiber, const(0, kind), at))
    term = each_lane(lanes, tirx.BufferStore(fiber, fiber_sum + product(total.moving), at))
    value = store.value.a + product([*total.fixed, fiber_sum])
    return fiber, clear, term, each_lane(lanes, tirx.BufferStore(store.buffer, value, store.indices))


def factor(loop: tirx.For) -> tirx.Stmt | None:
    """Sum the varying factors of `loop` alone and multiply once; None if no factor is invariant."""
    sums = _matches(loop)
    if not sums:
        return None
    fibers, clears, terms, uses = zip(*map(_factored, sums), strict=True)
    inner = with_(loop, body=seq(*terms), notes=without(loop, FACTOR))
    # An empty sum is skipped: zero times an infinite factor would be NaN.
    runs = loop.extent > const(0, str(loop.extent.ty.dtype))
    return tirx.IfThenElse(runs, seq(*alloc(*fibers), *clears, inner, *uses), None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.FactorInvariants")
def FactorInvariants(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Factor every annotated sum of a function; refuse annotations of other loops."""
    marked = lambda loop: factor(loop) if FACTOR in loop.annotations else None  # noqa: E731
    why = "none of its factors is the same in every step"
    return each_loop(func, outer=marked, inner=lambda loop: refused(loop, FACTOR, why))


__all__ = ["FactorInvariants", "factor", "facts_of", "match", "promote"]
