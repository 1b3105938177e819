# SPDX-License-Identifier: Apache-2.0
"""Copy to a cache only where the copy is read: elsewhere there may be nothing to copy.

before::

    for j_0, j_1 in T.grid((indptr[vi + 1] - indptr[vi] + 3) // 4, 4):
        b_local[0] = b[indices[indptr[vi] + j_0 * 4 + j_1]]             # past the end of the row
        if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
            ...  # reads b_local[0]

after::

    for j_0, j_1 in T.grid((indptr[vi + 1] - indptr[vi] + 3) // 4, 4):
        if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
            b_local[0] = b[indices[indptr[vi] + j_0 * 4 + j_1]]
        if j_0 * 4 + j_1 < indptr[vi + 1] - indptr[vi]:
            ...

The stock primitives move a copy without the conditions of its readers: the end of a split row, or a padded slot. A copy
that nobody reads is not made.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import const
from sparsetir.lower.checks.sites import Site, caches, common, places, sites
from sparsetir.lower.checks.steps import Atoms, equal, row_length, uncast
from sparsetir.lower.marks import from_dialect
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect, mentions, same, substitute
from sparsetir.walks import structural_mutate


class _Range:
    """What is known to exist where a copy is: block variables stay within their domains."""

    def __init__(self, copy: Site) -> None:
        self.atoms, self.analyzer = Atoms(), sym.Analyzer()
        self.domains = {iv.var: iv.dom for realize in copy.blocks for iv in realize.block.iter_vars}
        for var, dom in self.domains.items():
            self.analyzer.bind(var, ir.Range.from_min_extent(dom.min, self.atoms.replace(dom.extent)))

    def holds(self, index: ir.Expr, extent: ir.Expr) -> bool:
        """Whether a subscript is within its dimension whatever the data: by its range, or a slot of its fiber."""
        plain, least = self.atoms.replace(index), const(0, str(index.ty.dtype))
        if self.analyzer.can_prove(plain >= least) and self.analyzer.can_prove(plain < self.atoms.replace(extent)):
            return True
        parts = [(index.a, index.b), (index.b, index.a)] if isinstance(index, tirx.Add) else []
        return any(self._slot(uncast(base), uncast(slot), extent) for base, slot in parts)

    def _slot(self, base: ir.Expr, slot: ir.Expr, extent: ir.Expr) -> bool:
        """Whether a row's positions start at `base` and `slot` is one of its slots."""
        length = row_length(base)
        if length is None or slot not in self.domains or not equal(length, self.domains[slot].extent):
            return False
        if isinstance(base, ir.TensorLoad):
            return True
        return base.a in self.domains and equal(self.domains[base.a].extent * base.b, extent)


def _always_in_range(copy: Site, lanes: list[Var]) -> bool:
    """Whether the elements that the copy's own loops walk over exist whatever the data."""
    known, realize = _Range(copy), copy.blocks[-1]
    pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    lanes = [*lanes, *(iv.var for iv, value in pairs if mentions(value, lanes))]
    needed = [x for e in (copy.value, *realize.iter_values) for x in collect(e, ir.TensorLoad)]
    subscripts = [p for x in needed for p in zip(x.indices, x.source.ty.shape, strict=True) if mentions(p[0], lanes)]
    return all(known.holds(index, extent) for index, extent in subscripts)


def _outwards(copy: Site, site: Site) -> list[ir.Expr]:
    """The conditions of an access in the variables that the copy sees too, outermost first."""
    shared = common(copy.path, site.path)
    depth = sum(isinstance(n, s_tir.SBlockRealize) for n in copy.path[:shared])
    return [site.outwards(g.condition, g.depth, depth) for g in site.guards]


def _visible(condition: ir.Expr, copy: Site, reader: Site) -> bool:
    """Whether a condition of the reader has a value where the copy is."""
    ahead = reader.path[common(copy.path, reader.path) :]
    hidden = [n.loop_var for n in ahead if isinstance(n, tirx.For)]
    hidden += [iv.var for n in ahead if isinstance(n, s_tir.SBlockRealize) for iv in n.block.iter_vars]
    return not mentions(condition, hidden)


def _holds(condition: ir.Expr, known: list[ir.Expr]) -> bool:
    return any(same(condition, other) for other in known)


def _decides(conditions: list[ir.Expr], copy: Site, readers: list[Site]) -> bool:
    """Whether a condition compares a coordinate at which the copy stands: an absent one is in no range."""
    analyzer, places = sym.Analyzer(), [p for reader in readers for p in _places(copy, reader)]
    sides = [uncast(s) for c in conditions for s in (getattr(c, "a", None), getattr(c, "b", None)) if s is not None]
    for place in {tvm_ffi.structural_hash(p): p for p in places}.values():
        wanted = set(collect(place, Var))
        # Sides may be so long that simplifying them takes seconds: only where they name what the coordinate does.
        near = [side for side in sides if wanted and wanted.issubset(collect(side, Var))]
        if any(same(place, analyzer.simplify(side)) for side in near):
            return True
    return False


def _places(copy: Site, reader: Site) -> list[ir.Expr]:
    """The subscripts of what is copied, as the reader's conditions would write them."""
    depth = sum(isinstance(n, s_tir.SBlockRealize) for n in copy.path[: common(copy.path, reader.path)])
    first = {n.loop_var: const(0, str(n.loop_var.ty.dtype)) for n in _own_loops(copy, [reader])}
    analyzer = sym.Analyzer()
    found = (uncast(substitute(copy.outwards(i, len(copy.blocks), depth), first)) for i in copy.value.indices)
    return [analyzer.simplify(place) for place in found]


def _own_loops(copy: Site, readers: list[Site]) -> list[tirx.For]:
    """The loops around the copy and none of its readers."""
    shared = max(common(copy.path, reader.path) for reader in readers)
    return [n for n in copy.path[shared:] if isinstance(n, tirx.For)]


def guards_of(copy: Site, readers: list[Site]) -> list[ir.Expr]:
    """The conditions all readers have in common; raises where a copy needs one that it cannot have."""
    readers = places(readers)
    every = [_outwards(copy, reader) for reader in readers]
    guards = [c for c in every[0] if _visible(c, copy, readers[0]) and all(_holds(c, other) for other in every)]
    known, loops = _outwards(copy, copy), _own_loops(copy, readers)
    missing: list[ir.Expr] = []
    for condition in (c for conditions in every for c in conditions):
        if not _holds(condition, [*known, *guards, *missing]):
            missing.append(condition)
    is_bare = _decides(missing, copy, readers)
    if is_bare or (missing and not _always_in_range(copy, [loop.loop_var for loop in loops])):
        message = f"block {copy.block} copies elements that may not exist: they are read only where {missing[-1]}"
        raise ScheduleError(f"{message}; place the copy at a loop inside, or do not cache {copy.value.source.name}")
    is_needed = any(collect(loop.extent, ir.TensorLoad) for loop in loops) or not all(_holds(c, known) for c in guards)
    # All of them in their order, for one may only have a value where those before it hold.
    return guards if is_needed else []


class _Caches:
    """The copies to the caches of a function, and who uses them in the end."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.names = caches(func)
        self.found = sites(func) if self.names else []
        self.loads = collect(func.body, ir.TensorLoad) if self.names else []
        self.stores = Counter(s.blocks[-1] for s in self.found if s.is_store and s.blocks)
        self.unread = self._unread()

    def _unread(self) -> list[Var]:
        """The caches that nothing reads but copies to such caches."""
        found: list[Var] = []
        while True:
            copied = [c.value for cache in found for c in self.copies(cache)]
            live = [x.source for x in self.loads if not any(x.same_as(value) for value in copied)]
            more = [c for c in self.names if not any(c.same_as(x) for x in [*live, *found])]
            if not more:
                return found
            found += more

    def copies(self, cache: Var) -> list[Site]:
        """The stores to a cache that copy an element, and do nothing else in their block."""
        own = [s for s in self.found if s.buffer.same_as(cache) and s.blocks]
        return [s for s in own if isinstance(s.value, ir.TensorLoad) and self.stores[s.blocks[-1]] == 1]

    def readers(self, cache: Var, behind: tuple[Var, ...] = ()) -> list[Site]:
        """The loads of a cache, or of a copy of it; `behind` are the caches of which it is a copy itself."""
        chain = (*behind, cache)
        out: list[Site] = []
        for site in self.found:
            if site.buffer.same_as(cache) and not site.is_store:
                further = [c for c in self.names if any(s.is_beside(site) for s in self.copies(c))]
                fresh = [c for c in further if c not in chain]
                found = [r for c in fresh for r in self.readers(c, chain)]
                own = [] if any(c.same_as(x) for c in further for x in self.unread) else [site]
                out += [*found, *own] if len(fresh) < len(further) else found or own
        return out


def _nest(copy: Site, readers: list[Site]) -> Var | s_tir.SBlockRealize:
    """The variable of the outermost loop that only does the copy, or the copy's block."""
    alone = [n for n in _own_loops(copy, readers) if len(collect(n, s_tir.SBlockRealize)) == 1]
    return alone[0].loop_var if alone else copy.blocks[-1]


def guard_copies(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the copies of a function under the conditions of their readers."""
    every = _Caches(func)
    wanted: dict[Any, list[ir.Expr]] = {}
    for copy in (c for cache in every.unread for c in every.copies(cache)):
        wanted[copy.blocks[-1]] = [const(False, "bool")]
    for cache in every.names:
        readers = every.readers(cache)
        for copy in every.copies(cache) if readers else []:
            wanted[_nest(copy, readers)] = guards_of(copy, readers)

    def under(stmt: tirx.Stmt, conditions: list[ir.Expr]) -> tirx.Stmt:
        for condition in reversed(conditions):
            stmt = tirx.IfThenElse(condition, stmt, None)
        return stmt

    callbacks = [
        (tirx.For, lambda n, m: under(m.default_mutate(n), wanted.get(n.loop_var, []))),
        (s_tir.SBlockRealize, lambda n, m: under(m.default_mutate(n), wanted.get(n, []))),
    ]
    if not any(wanted.values()):
        return func
    return with_body(func, structural_mutate(func.body, callbacks))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardCopies")
def GuardCopies(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """The pass around `guard_copies`."""
    return guard_copies(func) if from_dialect(func) else func
