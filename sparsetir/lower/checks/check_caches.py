# SPDX-License-Identifier: Apache-2.0
"""Refuse a cache that is read where nothing was stored to it.

TVM takes a block to write all of the region it names. ``cache_write`` of a block that only updates a buffer, or stores
only some of its elements, then copies back what the cache happened to hold::

    for j in range(indptr[vi + 1] - indptr[vi]):
        with T.sblock("accumulate"):
            c_global[0] = c_global[0] + ...            # read before it is ever set
    with T.sblock("c_global"):
        c[vi] = c_global[0]

Four rules: the first access stores, it stores whatever the data, to every element, and a copy is not read when its
original has changed (or the other way round).
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.lower.checks.coverage import Cover
from sparsetir.lower.checks.sites import Guard, Site, caches, common, loops_of_blocks, places, sites
from sparsetir.lower.checks.steps import has_steps
from sparsetir.lower.marks import from_dialect
from sparsetir.lower.rewriting import mentions, same


class _Cache:
    """The accesses to one cache, by their place in the order of execution."""

    def __init__(self, buffer: Var, found: list[Site]) -> None:
        self.buffer, self.found = buffer, found
        self.own = [n for n, s in enumerate(found) if s.buffer.same_as(buffer)]
        self.readers = [n for n in self.own if not found[n].is_store]

    def check(self) -> None:
        """Raise if an element may be read that was not stored, or is no longer what it is a copy of."""
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

    def _refuse(self, site: Site, does: str, why: str) -> None:
        message = f"block {site.block} {does} the cache {self.buffer.name} {why}"
        raise ScheduleError(f"{message}; cache what a block initialises and writes whole, or leave the buffer uncached")

    def _check_reached(self, first: Site, reader: Site) -> None:
        """The first store happens wherever the reader reads."""
        shared = common(first.path, reader.path)
        inner = [n for n in first.path[shared:] if isinstance(n, tirx.For)]
        for loop, realize in loops_of_blocks(first):
            if not any(loop.same_as(n) for n in inner):
                continue
            # The elements are there whether a loop that their subscripts do not follow runs or not.
            outside = next(n for n, block in enumerate(first.blocks) if block.same_as(realize))
            places = [first.outwards(i, len(first.blocks), outside) for i in first.indices]
            follows = any(mentions(place, [loop.loop_var]) for place in places)
            if not (follows and (_is_copy(first) or has_steps(loop, realize))) and not _has_a_step(loop):
                self._refuse(first, "stores to", f"below loop {loop.loop_var.name}, which may run zero times")
        depth = sum(isinstance(n, s_tir.SBlockRealize) for n in first.path[:shared])
        known = [reader.outwards(g.condition, g.depth, depth) for g in reader.guards]
        for guard in first.guards:
            if not guard.is_bound and not self._holds(first, guard, depth, known):
                self._refuse(first, "stores to", f"only where {guard.condition}, and the other elements stay unset")

    def _holds(self, first: Site, guard: Guard, depth: int, known: list[ir.Expr]) -> bool:
        condition = first.outwards(guard.condition, guard.depth, depth)
        return any(same(condition, other) for other in known)

    def _check_fresh(self) -> None:
        """No element changes between a copy and its use."""
        for n in self.own:
            site = self.found[n]
            if _is_copy(site) and not _is_load_of(site.value, self.buffer):
                self._check_uses(n, site.value.source, self.buffer)
        for n, site in enumerate(self.found):
            back = _is_load_of(site.value, self.buffer) and not site.buffer.same_as(self.buffer)
            if back and n > self.own[0]:
                self._check_returned(n)

    def _check_kept(self) -> None:
        """What is stored last is read by another block: a cache that is not copied back loses it."""
        at = next(n for n in reversed(self.own) if self.found[n].is_store)
        last = self.found[at]
        if all(self.found[n].is_beside(last) for n in self.readers if n > at):
            message = f"what block {last.block} stores to the cache {self.buffer.name} is never copied back"
            raise ScheduleError(f"{message}; use cache_write of a block that initialises, or the buffer itself")

    def _check_uses(self, copied: int, original: Var, copy: Var) -> None:
        """`original` stays as it is while `copy` is read."""
        for n, site in enumerate(self.found):
            if not site.is_store or not site.buffer.same_as(original) or _is_load_of(site.value, copy):
                continue
            for use in (u for u in self.readers if u > copied):
                if copied < n < use or self._repeats(self.found[copied], site, self.found[use]):
                    message = f"block {site.block} changes {original.name} while block {self.found[use].block}"
                    raise ScheduleError(f"{message} reads the copy {copy.name} of it; use {original.name} itself")

    def _repeats(self, copied: Site, changed: Site, use: Site) -> bool:
        """Whether a loop around the change and the use does not copy again."""
        shared = changed.path[: common(changed.path, use.path)]
        again = len(copied.path[: common(copied.path, shared)])
        return any(isinstance(n, tirx.For) for n in shared[again:])

    def _check_returned(self, back: int) -> None:
        """Nobody reads the original between the first store to the cache and the copy back."""
        original = self.found[back].buffer
        for n in range(self.own[0] + 1, back):
            site = self.found[n]
            if not site.is_store and site.buffer.same_as(original):
                message = f"block {site.block} reads {original.name}, of which the cache {self.buffer.name}"
                raise ScheduleError(f"{message} holds the new elements; use {original.name} itself")


def _has_a_step(loop: tirx.For) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) > 0


def _is_copy(site: Site) -> bool:
    return isinstance(site.value, ir.TensorLoad)


def _is_load_of(value: ir.Expr | None, buffer: Var) -> bool:
    return isinstance(value, ir.TensorLoad) and value.source.same_as(buffer)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckCaches")
def CheckCaches(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check every cache of a scheduled stage-II function."""
    if not from_dialect(func):
        return func
    added = caches(func)
    found = sites(func) if added else []
    for buffer in added:
        _Cache(buffer, found).check()
    return func
