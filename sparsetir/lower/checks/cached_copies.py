# SPDX-License-Identifier: Apache-2.0
"""Checks of schedules' caches: refuse reads of unset elements, guard copies and block domains."""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect, conjunction, conjuncts, mentions, same, substitute
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.accesses import (
    AccessSite,
    Atoms,
    Cover,
    bindings,
    caches,
    common,
    equal,
    has_steps,
    loops_of_blocks,
    places,
    row_length,
    sites,
    uncast,
)
from sparsetir.lower.annotations import from_dialect
from sparsetir.lower.loops import with_body

# Refuse a cache with elements that are read before they are stored.
#
# TVM assumes that a block writes its whole write region. ``cache_write`` of a block that only updates a buffer, or
# stores only some of its elements, then copies back uninitialised elements of the cache::
#
#     for j in range(indptr[vi + 1] - indptr[vi]):
#         with T.sblock("accumulate"):
#             c_global[0] = c_global[0] + ...            # read before it is ever set
#     with T.sblock("c_global"):
#         c[vi] = c_global[0]
#
# Four rules: the first access is a store, it is executed for any data, it covers every element, and a copy is not read
# after its original has changed (or the original after the copy has changed).


class _Cache:
    """Accesses to one cache, by their index in execution order."""

    def __init__(self, buffer: Var, accesses: list[AccessSite]) -> None:
        self.buffer, self.found = buffer, accesses
        self.own = [n for n, s in enumerate(accesses) if s.buffer.same_as(buffer)]
        self.readers = [n for n in self.own if not accesses[n].is_store]

    def check(self) -> None:
        """Raise if an element may be read that is unset, or that no longer equals its original."""
        if not self.readers:
            return
        first = self.found[self.own[0]]
        if not first.is_store:
            self._refuse(first, "reads", "before anything is stored to it")
        readers = [self.found[n] for n in self.readers]
        if not all(Cover(self.buffer, first, reader).is_whole for reader in readers):
            self._refuse(first, "stores only some elements of", "as the data say, and the others stay unset")
        for reader in places(readers):
            self._check_reached(first, reader)
        self._check_fresh()
        self._check_kept()

    def _refuse(self, site: AccessSite, does: str, why: str) -> None:
        message = f"block {site.block} {does} the cache {self.buffer.name} {why}"
        raise ScheduleError(f"{message}; cache what a block initialises and writes whole, or leave the buffer uncached")

    def _check_reached(self, first: AccessSite, reader: AccessSite) -> None:
        """Raise unless the first store is executed wherever the reader reads."""
        shared = common(first.path, reader.path)
        inner = [n for n in first.path[shared:] if isinstance(n, tirx.For)]
        for loop, realize in loops_of_blocks(first):
            if not any(loop.same_as(n) for n in inner):
                continue
            # If the subscripts do not depend on a loop, the elements exist even where the loop has no steps.
            outside = next(n for n, block in enumerate(first.blocks) if block.same_as(realize))
            places = [first.outwards(i, len(first.blocks), outside) for i in first.indices]
            follows = any(mentions(place, [loop.loop_var]) for place in places)
            has_a_step = isinstance(loop.extent, tirx.IntImm) and int(loop.extent) > 0
            if not (follows and (_is_copy(first) or has_steps(loop, realize))) and not has_a_step:
                self._refuse(first, "stores to", f"below loop {loop.loop_var.name}, which may run zero times")
        reader_conditions = _outwards(first, reader)
        for guard, condition in zip(first.guards, _outwards(reader, first), strict=True):
            if not guard.is_bound and not _holds(condition, reader_conditions):
                self._refuse(first, "stores to", f"only where {guard.condition}, and the other elements stay unset")

    def _check_fresh(self) -> None:
        """Raise if an element may change between a copy and its use."""
        for n in self.own:
            site = self.found[n]
            if _is_copy(site) and not _is_load_of(site.value, self.buffer):
                self._check_uses(n, site.value.source, self.buffer)
        for n, site in enumerate(self.found):
            back = _is_load_of(site.value, self.buffer) and not site.buffer.same_as(self.buffer)
            if back and n > self.own[0]:
                self._check_returned(n)

    def _check_kept(self) -> None:
        """Raise unless another block reads the last stored elements: without a copy back they are lost."""
        at = next(n for n in reversed(self.own) if self.found[n].is_store)
        last = self.found[at]
        if all(self.found[n].is_beside(last) for n in self.readers if n > at):
            message = f"what block {last.block} stores to the cache {self.buffer.name} is never copied back"
            raise ScheduleError(f"{message}; use cache_write of a block that initialises, or the buffer itself")

    def _check_uses(self, copied: int, original: Var, copy: Var) -> None:
        """Raise if `original` may change while `copy` is still read."""
        for n, site in enumerate(self.found):
            if not site.is_store or not site.buffer.same_as(original) or _is_load_of(site.value, copy):
                continue
            for use in (u for u in self.readers if u > copied):
                if copied < n < use or self._repeats(self.found[copied], site, self.found[use]):
                    message = f"block {site.block} changes {original.name} while block {self.found[use].block}"
                    raise ScheduleError(f"{message} reads the copy {copy.name} of it; use {original.name} itself")

    def _repeats(self, copied: AccessSite, changed: AccessSite, use: AccessSite) -> bool:
        """Return whether a loop repeats the change and the use without the copy."""
        shared = changed.path[: common(changed.path, use.path)]
        again = len(copied.path[: common(copied.path, shared)])
        return any(isinstance(n, tirx.For) for n in shared[again:])

    def _check_returned(self, back: int) -> None:
        """Raise if the original is read between the first store to the cache and the copy back."""
        original = self.found[back].buffer
        for n in range(self.own[0] + 1, back):
            site = self.found[n]
            if not site.is_store and site.buffer.same_as(original):
                message = f"block {site.block} reads {original.name}, of which the cache {self.buffer.name}"
                raise ScheduleError(f"{message} holds the new elements; use {original.name} itself")


def _is_copy(site: AccessSite) -> bool:
    return isinstance(site.value, ir.TensorLoad)


def _is_load_of(value: ir.Expr | None, buffer: Var) -> bool:
    return isinstance(value, ir.TensorLoad) and value.source.same_as(buffer)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckCaches")
def CheckCaches(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check every cache of a scheduled stage-II function."""
    if not from_dialect(func):
        return func
    added = caches(func)
    accesses = sites(func) if added else []
    for buffer in added:
        _Cache(buffer, accesses).check()
    return func


# Copy to a cache only where the copy is read, because elsewhere the original element may not exist.
#
# before::
#
#     for j_0, j_1 in T.grid((indptr[vi + 1] - indptr[vi] + 3) // 4, 4):
#         b_local[0] = b[indices[indptr[vi] + j_0 * 4 + j_1]]             # past the end of the row
#         if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
#             ...  # reads b_local[0]
#
# after::
#
#     for j_0, j_1 in T.grid((indptr[vi + 1] - indptr[vi] + 3) // 4, 4):
#         if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
#             b_local[0] = b[indices[indptr[vi] + j_0 * 4 + j_1]]
#         if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
#             ...
#
# TVM's primitives move a copy without the conditions of its readers: the end of a split row, or a padded slot.
# An unread copy is never executed.


class _Range:
    """Ranges of the variables around a copy: block variables are within their domains."""

    def __init__(self, copy: AccessSite) -> None:
        self.atoms, self.analyzer = Atoms(), sym.Analyzer()
        self.domains = {iv.var: iv.dom for realize in copy.blocks for iv in realize.block.iter_vars}
        for var, dom in self.domains.items():
            self.analyzer.bind(var, ir.Range.from_min_extent(dom.min, self.atoms.replace(dom.extent)))

    def holds(self, index: ir.Expr, extent: ir.Expr) -> bool:
        """Return whether a subscript is within its dimension for any data: by its range, or as a slot of its fiber."""
        plain, least = self.atoms.replace(index), const(0, str(index.ty.dtype))
        if self.analyzer.can_prove(plain >= least) and self.analyzer.can_prove(plain < self.atoms.replace(extent)):
            return True
        parts = [(index.a, index.b), (index.b, index.a)] if isinstance(index, tirx.Add) else []
        return any(self._slot(uncast(base), uncast(slot), extent) for base, slot in parts)

    def _slot(self, base: ir.Expr, slot: ir.Expr, extent: ir.Expr) -> bool:
        """Return whether a row's positions start at `base` and `slot` is one of its slots."""
        length = row_length(base)
        if length is None or slot not in self.domains or not equal(length, self.domains[slot].extent):
            return False
        if isinstance(base, ir.TensorLoad):
            return True
        return base.a in self.domains and equal(self.domains[base.a].extent * base.b, extent)


def _always_in_range(copy: AccessSite, lanes: list[Var]) -> bool:
    """Return whether the elements that the copy's own loops iterate exist for any data."""
    ranges, realize = _Range(copy), copy.blocks[-1]
    lanes = [*lanes, *(iv.var for iv, value in bindings(realize) if mentions(value, lanes))]
    needed = [x for e in (copy.value, *realize.iter_values) for x in collect(e, ir.TensorLoad)]
    subscripts = [p for x in needed for p in zip(x.indices, x.source.ty.shape, strict=True) if mentions(p[0], lanes)]
    return all(ranges.holds(index, extent) for index, extent in subscripts)


def _outwards(copy: AccessSite, site: AccessSite) -> list[ir.Expr]:
    """Return the conditions of an access in the variables that are visible at the copy too, outermost first."""
    shared = common(copy.path, site.path)
    depth = sum(isinstance(n, s_tir.SBlockRealize) for n in copy.path[:shared])
    return [site.outwards(g.condition, g.depth, depth) for g in site.guards]


def _visible(condition: ir.Expr, copy: AccessSite, reader: AccessSite) -> bool:
    """Return whether all variables of a reader's condition are defined at the copy."""
    ahead = reader.path[common(copy.path, reader.path) :]
    hidden = [n.loop_var for n in ahead if isinstance(n, tirx.For)]
    hidden += [iv.var for n in ahead if isinstance(n, s_tir.SBlockRealize) for iv in n.block.iter_vars]
    return not mentions(condition, hidden)


def _holds(condition: ir.Expr, conditions: list[ir.Expr]) -> bool:
    return any(same(condition, candidate) for candidate in conditions)


def _decides(conditions: list[ir.Expr], copy: AccessSite, readers: list[AccessSite]) -> bool:
    """Return whether a condition compares a coordinate that subscripts the copy's source.

    An absent coordinate is in no range, so the copy cannot do without such a condition.
    """
    analyzer, places = sym.Analyzer(), [p for reader in readers for p in _places(copy, reader)]
    sides = [uncast(s) for c in conditions for s in (getattr(c, "a", None), getattr(c, "b", None)) if s is not None]
    for place in {tvm_ffi.structural_hash(p): p for p in places}.values():
        place_vars = set(collect(place, Var))
        # Simplifying a long side may take seconds, so only sides with all variables of the coordinate are simplified.
        near = [side for side in sides if place_vars and place_vars.issubset(collect(side, Var))]
        if any(same(place, analyzer.simplify(side)) for side in near):
            return True
    return False


def _places(copy: AccessSite, reader: AccessSite) -> list[ir.Expr]:
    """Return the subscripts of the copied element in the variables that the reader's conditions use."""
    depth = sum(isinstance(n, s_tir.SBlockRealize) for n in copy.path[: common(copy.path, reader.path)])
    first = {n.loop_var: const(0, str(n.loop_var.ty.dtype)) for n in _own_loops(copy, [reader])}
    analyzer = sym.Analyzer()
    subscripts = (uncast(substitute(copy.outwards(i, len(copy.blocks), depth), first)) for i in copy.value.indices)
    return [analyzer.simplify(place) for place in subscripts]


def _own_loops(copy: AccessSite, readers: list[AccessSite]) -> list[tirx.For]:
    """Return the loops around the copy but not around any reader."""
    shared = max(common(copy.path, reader.path) for reader in readers)
    return [n for n in copy.path[shared:] if isinstance(n, tirx.For)]


def guards_of(copy: AccessSite, readers: list[AccessSite]) -> list[ir.Expr]:
    """Return the conditions that all readers share; raise if the copy needs a condition that is not available there."""
    readers = places(readers)
    reader_conditions = [_outwards(copy, reader) for reader in readers]
    guards = [
        c
        for c in reader_conditions[0]
        if _visible(c, copy, readers[0]) and all(_holds(c, of_reader) for of_reader in reader_conditions)
    ]
    copy_conditions, loops = _outwards(copy, copy), _own_loops(copy, readers)
    missing: list[ir.Expr] = []
    for condition in (c for conditions in reader_conditions for c in conditions):
        if not _holds(condition, [*copy_conditions, *guards, *missing]):
            missing.append(condition)
    is_bare = _decides(missing, copy, readers)
    if is_bare or (missing and not _always_in_range(copy, [loop.loop_var for loop in loops])):
        message = f"block {copy.block} copies elements that may not exist: they are read only where {missing[-1]}"
        raise ScheduleError(f"{message}; place the copy at a loop inside, or do not cache {copy.value.source.name}")
    is_needed = any(collect(loop.extent, ir.TensorLoad) for loop in loops) or not all(
        _holds(c, copy_conditions) for c in guards
    )
    # All conditions in their order: one may only be evaluated where those before it hold.
    return guards if is_needed else []


class _Caches:
    """Copies to the caches of a function, and the loads that finally read them."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.names = caches(func)
        self.found = sites(func) if self.names else []
        self.loads = collect(func.body, ir.TensorLoad) if self.names else []
        self.stores = Counter(s.blocks[-1] for s in self.found if s.is_store and s.blocks)
        self.unread = self._unread()

    def _unread(self) -> list[Var]:
        """Return the caches that are read only by copies to unread caches, if at all."""
        unread: list[Var] = []
        while True:
            copied = [c.value for cache in unread for c in self.copies(cache)]
            live = [x.source for x in self.loads if not any(x.same_as(value) for value in copied)]
            more = [c for c in self.names if not any(c.same_as(x) for x in [*live, *unread])]
            if not more:
                return unread
            unread += more

    def copies(self, cache: Var) -> list[AccessSite]:
        """Return the stores to a cache that copy an element and are the only store of their block."""
        stores = [s for s in self.found if s.buffer.same_as(cache) and s.blocks]
        return [s for s in stores if _is_copy(s) and self.stores[s.blocks[-1]] == 1]

    def readers(self, cache: Var, behind: tuple[Var, ...] = ()) -> list[AccessSite]:
        """Return the loads of a cache or of copies of it; `behind` are the caches that it is itself a copy of."""
        chain = (*behind, cache)
        out: list[AccessSite] = []
        for site in self.found:
            if site.buffer.same_as(cache) and not site.is_store:
                further = [c for c in self.names if any(s.is_beside(site) for s in self.copies(c))]
                unvisited = [c for c in further if c not in chain]
                indirect = [r for c in unvisited for r in self.readers(c, chain)]
                direct = [] if any(c.same_as(x) for c in further for x in self.unread) else [site]
                out += [*indirect, *direct] if len(unvisited) < len(further) else indirect or direct
        return out


def _nest(copy: AccessSite, readers: list[AccessSite]) -> Var | s_tir.SBlockRealize:
    """Return the variable of the outermost loop that contains only the copy, or else the copy's block."""
    alone = [n for n in _own_loops(copy, readers) if len(collect(n, s_tir.SBlockRealize)) == 1]
    return alone[0].loop_var if alone else copy.blocks[-1]


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardCopies")
def GuardCopies(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Guard the copies of a function by the conditions of their readers."""
    if not from_dialect(func):
        return func
    caches = _Caches(func)
    guards: dict[Any, list[ir.Expr]] = {}
    for copy in (c for cache in caches.unread for c in caches.copies(cache)):
        guards[copy.blocks[-1]] = [const(False, "bool")]
    for cache in caches.names:
        readers = caches.readers(cache)
        for copy in caches.copies(cache) if readers else []:
            guards[_nest(copy, readers)] = guards_of(copy, readers)

    def under(stmt: tirx.Stmt, conditions: list[ir.Expr]) -> tirx.Stmt:
        for condition in reversed(conditions):
            stmt = tirx.IfThenElse(condition, stmt, None)
        return stmt

    callbacks = [
        (tirx.For, lambda n, m: under(m.default_mutate(n), guards.get(n.loop_var, []))),
        (s_tir.SBlockRealize, lambda n, m: under(m.default_mutate(n), guards.get(n, []))),
    ]
    if not any(guards.values()):
        return func
    return with_body(func, structural_mutate(func.body, callbacks))


# Guard every block variable to be within its domain.
#
# before::
#
#     for k_0, k_1, j_1 in T.grid((feat + 6) // 7, 7, 4):
#         with T.sblock("spmm"):
#             vk = T.axis.spatial(feat, k_0 * 7 + k_1)
#
# after::
#
#     for k_0, k_1, j_1 in T.grid((feat + 6) // 7, 7, 4):
#         with T.sblock("spmm"):
#             vk = T.axis.spatial(feat, k_0 * 7 + k_1)
#             T.where(k_0 * 7 + k_1 < feat)
#
# ``rfactor`` keeps the guard of an uneven split at the partial sums but drops it where these are added up.
# ``blockize`` of a fused uneven split makes the padded number of steps the domain, which is refused.


# Values with these need no guard: a fused loop has exactly the steps of its parts together, and the primitive that
# makes a value load from an array also guards it.
BEYOND = (tirx.FloorDiv, tirx.FloorMod, ir.TensorLoad)


def missing(realize: s_tir.SBlockRealize, loops: list[tirx.For]) -> list[ir.Expr]:
    """Return the upper bounds of a block's variables that neither its loops nor its predicate imply."""
    split = [
        (iv, v) for iv, v in bindings(realize) if collect(v, tirx.Add) and not any(collect(v, kind) for kind in BEYOND)
    ]
    if not split:
        return []
    atoms, analyzer = Atoms(), sym.Analyzer()
    for loop in loops:
        extent = atoms.replace(loop.extent)
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, extent))
    conditions = [atoms.replace(c) for c in conjuncts(realize.predicate)]
    # Simplified: the extent of a size that is compiled in may be a cast of a number.
    bounds = [value < analyzer.simplify(iv.dom.min + iv.dom.extent) for iv, value in split]
    return [bound for bound in bounds if not _implied(analyzer, atoms.replace(bound), conditions)]


def _implied(analyzer: sym.Analyzer, bound: ir.Expr, conditions: list[ir.Expr]) -> bool:
    """Return whether the ranges of the loops or the known conditions imply a comparison."""
    if any(isinstance(c, tirx.LT) and analyzer.can_prove_equal(c.a - c.b, bound.a - bound.b) for c in conditions):
        return True
    with analyzer.constraint_scope(conjunction([*conditions, tirx.const(True, "bool")])):
        return bool(analyzer.can_prove(bound))


def _is_padded(extent: ir.Expr) -> bool:
    """Return whether an extent is rounded up to whole tiles: ``(n + 3) // 4 * 4``."""
    return any(isinstance(x.a, tirx.FloorDiv) and isinstance(x.b, tirx.IntImm) for x in collect(extent, tirx.Mul))


def check_domains(func: tirx.PrimFunc) -> None:
    """Raise if a block variable with a padded domain may exceed an array dimension that it subscripts."""
    for site in sites(func):
        domains = {iv.var: iv.dom.extent for r in site.blocks for iv in r.block.iter_vars}
        for index, length in zip(site.indices, site.buffer.ty.shape, strict=True):
            extent = domains.get(index) if isinstance(index, Var) else None
            if extent is None or not _is_padded(extent) or any(mentions(g.condition, [index]) for g in site.guards):
                continue
            if not sym.Analyzer().can_prove(cast(extent, "int64") <= cast(length, "int64")):
                message = f"block {site.block} goes to {extent}, past the end of {site.buffer.name} ({length})"
                raise ScheduleError(f"{message}: blockize before an uneven split is fused, or split evenly")


class _BoundAdder:
    """Visitor that adds the missing bounds to the predicate of each block."""

    def __init__(self) -> None:
        self.loops: list[tirx.For] = []

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.For:
        self.loops.append(node)
        out = mutator.default_mutate(node)
        self.loops.pop()
        return out

    def on_realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        outer, self.loops = self.loops, []
        out = mutator.default_mutate(node)
        self.loops = outer
        guards = missing(node, outer)
        if not guards:
            return out
        return s_tir.SBlockRealize(out.iter_values, conjunction([*conjuncts(out.predicate), *guards]), out.block)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardDomains")
def GuardDomains(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Add the missing bounds of block variables in a scheduled stage-II function; refuse padded domains."""
    if not from_dialect(func):
        return func
    check_domains(func)
    walk = _BoundAdder()
    callbacks = [(tirx.For, walk.on_for), (s_tir.SBlockRealize, walk.on_realize)]
    return with_body(func, structural_mutate(func.body, callbacks))
