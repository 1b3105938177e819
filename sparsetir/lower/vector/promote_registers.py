# SPDX-License-Identifier: Apache-2.0
"""Register promotion (scalar replacement): the running values of a reduction are kept in registers.

before::

    for jo, ji in T.grid(indptr[io + 1] - indptr[io], 4):
        for ii in T.unroll(4):
            for k in T.vectorized(16):
                c[io * 4 + ii, k] = c[io * 4 + ii, k] + a[...] * b[..., k]

after::

    for ii in T.unroll(4):
        for k in T.vectorized(16):
            acc[ii * 16 + k] = c[io * 4 + ii, k]
    for jo, ji in T.grid(indptr[io + 1] - indptr[io], 4):
        for ii in T.unroll(4):
            for k in T.vectorized(16):
                acc[ii * 16 + k] = acc[ii * 16 + k] + a[...] * b[..., k]
    for ii in T.unroll(4):
        for k in T.vectorized(16):
            c[io * 4 + ii, k] = acc[ii * 16 + k]

A *lane* is an inner loop that moves the element; all others repeat it. Different lanes must have different elements:
rows that share a target, as those of ``y[b[i]] = y[b[i]] + ...``, stay in memory. What does not depend on the repeating
loops and guards the element guards its first load and last store too. Where the statement before the loop initialises
just these elements, the registers begin with that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.checks.apart import Facts, are_different
from sparsetir.lower.marks import DISTINCT, FIBERS, INDPTR, names_in
from sparsetir.lower.nests import PARALLEL, SERIAL, each_lane, most, place_of, with_body
from sparsetir.lower.rewriting import all_same, alloc, collect, conjunction, conjuncts, mentions, same, seq, substitute
from sparsetir.walks import structural_mutate

MOST_LANES = 1024


@dataclass(frozen=True)
class Site:
    """A store below a loop: the loops that move its element, and the conditions it always stands under."""

    store: tirx.BufferStore
    lanes: list[tirx.For]
    guards: list[ir.Expr]

    def at(self, lanes: list[tirx.For], node: Any) -> Any:
        """`node` in terms of the loop variables of other lanes."""
        return substitute(node, {a.loop_var: b.loop_var for a, b in zip(self.lanes, lanes, strict=True)})


class _Finder:
    """Collects the stores to memory below a loop with the loops and conditions around each."""

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


def _sites(loop: tirx.For) -> list[Site] | None:
    """Every store to memory below `loop`, if all may work on registers; None if one may not."""
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
        guards = [c for c in [*runs, *conditions] if not mentions(c, [*moving, store.buffer])]
        sites.append(Site(store, lanes, guards))
    return sites


def _runs(loops: list[tirx.For], lanes: list[Var], moving: list[Var]) -> list[ir.Expr] | None:
    """Conditions for the loops around a store to have steps, where that differs from lane to lane; None if mixed."""
    found = []
    for loop in loops:
        if mentions(loop.extent, lanes):
            if mentions(loop.extent, moving):
                return None
            found.append(loop.extent > const(0, str(loop.extent.ty.dtype)))
    return found


def _is_too_wide(lanes: list[tirx.For], inner: list[Var]) -> bool:
    sizes = [most(lane.extent) for lane in lanes]
    if None in sizes or any(lane.kind == PARALLEL or mentions(lane.extent, inner) for lane in lanes):
        return True
    return math.prod(size or 1 for size in sizes) > MOST_LANES


def _agree(sites: list[Site], loop: tirx.For) -> bool:
    """Whether all stores update the same elements, which nothing else below the loop touches."""
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
    """Loads of the element that the store writes."""
    loads = collect(store.value, ir.TensorLoad)
    return [x for x in loads if x.source.same_as(store.buffer) and all_same(list(x.indices), list(store.indices))]


def _around(lanes: list[tirx.For], body: tirx.Stmt, guards: list[ir.Expr]) -> tirx.Stmt:
    """`body` for every lane, below the guards."""
    return each_lane(lanes, tirx.IfThenElse(conjunction(guards), body, None) if guards else body)


def _initial(stmt: tirx.Stmt, site: Site) -> ir.Expr | None:
    """What `stmt` sets every element of a site to, in terms of the site's lanes; None where it does something else."""
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
    other = Site(stmt, lanes, guards)
    indices = [other.at(site.lanes, i) for i in stmt.indices]
    held = [other.at(site.lanes, g) for g in guards]
    agree = all_same(indices, list(site.store.indices)) and all_same(held, site.guards)
    return other.at(site.lanes, stmt.value) if agree else None


def _are_apart(site: Site, facts: Facts) -> bool:
    """Return whether the lanes of a store have different elements, so that each can have its own register."""
    ranges = {lane.loop_var: ir.Range.from_min_extent(lane.min, lane.extent) for lane in site.lanes}
    return not ranges or are_different(site.store.indices, ranges, facts)


def keep(loop: tirx.For, facts: Facts, before: tirx.Stmt | None = None) -> tirx.Stmt | None:
    """`loop` with its running values in local cells; None where it is no reduction of a few elements.

    Where the statement `before` it is given, the result stands for both, and is None unless that initialises the cells.
    """
    if loop.kind != SERIAL or any(f.kind == PARALLEL for f in collect(loop.body, tirx.For)):
        return None
    sites = _sites(loop)
    if not sites or not _agree(sites, loop) or not _are_apart(sites[0], facts):
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
    end = _around(lanes, tirx.BufferStore(target, tirx.BufferLoad(acc, at), indices), first.guards)
    if start is not None:
        begin = _around(lanes, tirx.BufferStore(acc, start, at), [])
    else:
        begin = _around(lanes, tirx.BufferStore(acc, tirx.BufferLoad(target, indices), at), first.guards)
    both = seq(*alloc(acc), begin, inner, end)
    # An empty loop must not touch the element: it may lie behind a condition of its own.
    runs = loop.extent > const(0, str(loop.extent.ty.dtype))
    return tirx.IfThenElse(runs, both, None) if start is None else both


def _keep_pairs(stmts: list[tirx.Stmt], facts: Facts) -> list[tirx.Stmt]:
    """The statements of a sequence, an initialisation and the loop behind it as one."""
    out: list[tirx.Stmt] = []
    for stmt in stmts:
        both = keep(stmt, facts, out[-1]) if out and isinstance(stmt, tirx.For) else None
        if both is None:
            out.append(stmt)
        else:
            out[-1] = both
    return out


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PromoteRegisters")
def PromoteRegisters(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every accumulating loop of a function, the outermost that allows it."""
    facts = Facts(names_in(func, INDPTR), names_in(func, DISTINCT), names_in(func, FIBERS))

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        kept = keep(node, facts)
        return mutator.default_mutate(node) if kept is None else kept

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*(mutator.mutate(s) for s in _keep_pairs(list(node.seq), facts)))

    body = structural_mutate(func.body, [(tirx.For, on_for), (tirx.SeqStmt, on_seq)])
    return with_body(func, body)
