# SPDX-License-Identifier: Apache-2.0
"""Initialisation of reductions: its placement in a nest, and its decomposition out of reduction blocks."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import all_same, collect, conjunction, conjuncts, is_element, mentions, seq, substitute
from sparsetir.ir.views import INDEPENDENT, INIT, REDUCE, STORED, Axis, Entry, Program, SpIter, cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.accesses import bindings
from sparsetir.lower.analysis.independence import injective
from sparsetir.lower.iterations.access import Scope
from sparsetir.lower.iterations.nest import spatial_pairs, with_regions
from sparsetir.lower.loops import with_, with_body

# Placement of the initialisation of a sparse iteration.


def may_miss(entry: Entry) -> bool:
    """Return whether a step of the entry's loops may have no coordinate."""
    return bool(entry.merge) or any(a.may_be_absent for a in entry.axes)


class InitPlan:
    """The placement of the initialisation of an iteration.

    ``inside``: in the innermost block, as in TVM's reductions. Otherwise in a separate nest
    below the first ``prefix`` entries; ``prefix`` is None when there is nothing to place. With the annotation
    ``{"init": "stored"}`` only stored points are initialised; the others belong to another iteration.
    """

    def __init__(self, iteration: SpIter, program: Program) -> None:
        self.iteration, self.program = iteration, program
        self.stored_only = str(iteration.block.annotations.get(INIT, "")) == STORED
        self.inside = False
        self.prefix: int | None = None
        init = iteration.block.init
        self.stores = [] if init is None else collect(init, tirx.BufferStore)
        if init is None:
            return
        self.inside = self._can_stay_inside()
        self.prefix = None if self.inside else self._split()

    # ------------------------------------------------------------------ one entry

    def is_own(self, entry: Entry) -> bool:
        """Return whether every store subscripts the entry's axes, in its own buffer, by the entry's variables."""
        stores = self.stores + collect(self.iteration.block.body, tirx.BufferStore)
        if entry.merge:
            return False
        return all(self._own(s, v, a) for s in stores for v, a in zip(entry.vars, entry.axes, strict=True))

    def by_position(self, entry: Entry) -> bool:
        """Return whether the entry's stored positions cover every element that its initial stores can reach."""
        if "R" in entry.kinds or entry.attached_to is not None or (entry.merge and not self.stored_only):
            return False
        if self.stored_only:
            return True
        if not entry.is_fused and entry.axes[0].kind == "dense_fixed":
            return True
        return all(self._own(store, v, a) for store in self.stores for v, a in spatial_pairs(entry))

    def names(self, entry: Entry) -> bool:
        """Return whether the initialisation depends on the entry's point, or is limited to stored points."""
        return any(self.stored_only or self.mentions(var) for var, _ in spatial_pairs(entry))

    def mentions(self, var: Var) -> bool:
        """Return whether the initialisation uses an iteration variable."""
        return bool(mentions(self.iteration.block.init, [var]))

    def below(self, entry: Entry) -> list[Axis]:
        """Return the axes whose stored points are initialised and that descend from a reduced entry's axes."""
        if not self.stored_only or "S" in entry.kinds:
            return []
        pairs = [pair for e in self.iteration.entries for pair in spatial_pairs(e)]
        return [axis for _, axis in pairs if not set(entry.axes).isdisjoint(axis.ancestors)]

    def _repeats(self, entry: Entry, up: Axis) -> bool:
        """Return whether an entry's points are the same below every slot of an axis: the first slot suffices."""
        return self.stored_only and entry.attached_to is None and all(a.repeats_below(up) for a in entry.axes)

    def _own(self, store: tirx.BufferStore, var: Var, axis: Axis) -> bool:
        """Return whether the store subscripts `axis` of its buffer by `var`, and uses `var` nowhere else."""
        buffer = self.program.buffers.get(store.buffer)
        if buffer is None or axis not in buffer.axes:
            return False
        dimension = buffer.axes.index(axis)
        return all(i.same_as(var) if n == dimension else not mentions(i, [var]) for n, i in enumerate(store.indices))

    def _once(self, entry: Entry) -> bool:
        """Return whether different steps of the entry initialise different elements."""
        if entry is self.iteration.entries[0] and INDEPENDENT in self.iteration.block.annotations:
            return True
        return all(injective(list(s.indices), list(entry.vars), self.iteration) for s in self.stores)

    # ------------------------------------------------------------------ the whole list

    def _reads_elsewhere(self) -> bool:
        """Return whether the body reads an initialised buffer at a point other than its own."""
        for load in collect(self.iteration.block.body, ir.TensorLoad):
            same_buffer = [s for s in self.stores if s.buffer.same_as(load.source)]
            if same_buffer and not any(all_same(load.indices, s.indices) for s in same_buffer):
                return True
        return False

    def _split(self) -> int:
        if self._reads_elsewhere():
            return 0
        for n, entry in enumerate(self.iteration.entries):
            if not self.by_position(entry) or may_miss(entry) or not self._once(entry):
                return n
        return len(self.iteration.entries)

    def _can_stay_inside(self) -> bool:
        body, init, entries = self.iteration.block.body, self.iteration.block.init, self.iteration.entries
        if not (isinstance(body, tirx.BufferStore) and isinstance(init, tirx.BufferStore)):
            return False
        if not (body.buffer.same_as(init.buffer) and all_same(body.indices, init.indices)) or self._reads_elsewhere():
            return False
        reductions = [e for e in entries if "R" in e.kinds]
        spatial = [e for e in entries if "R" not in e.kinds]
        if not reductions or any(set(e.kinds) != {"R"} for e in reductions):
            return False
        if not all(self.by_position(e) and self._once(e) for e in spatial):
            return False
        if any(may_miss(e) for e in spatial):
            return False
        return self._stores_surely(body) and self._reduces_in_leaf()

    def _stores_surely(self, store: tirx.BufferStore) -> bool:
        """Return whether the store's element exists at every iterated point."""
        buffer = self.program.buffers.get(store.buffer)
        if buffer is None:
            return True
        scope, direct = Scope(), {}
        reduced = [v for e in self.iteration.entries for v, k in zip(e.vars, e.kinds, strict=True) if k == "R"]
        for entry in self.iteration.entries:
            for var, axis in zip(entry.vars, entry.domains, strict=True):
                scope.ranges[var] = ir.Range(const(0, axis.idtype), cast(axis.length, axis.idtype))
                direct[var] = axis if entry.attached_to is None and not entry.merge else None
        for axis, index in zip(buffer.axes, store.indices, strict=True):
            if isinstance(index, Var) and direct.get(index) is axis:
                continue
            if axis.kind != "dense_fixed":
                return False
            # Where a formula leaves the axis, initialisation and body are guarded by the same bounds.
            if not scope.proves_in_range(index, axis.length) and mentions(index, reduced):
                return False
        return True

    def _reduces_in_leaf(self) -> bool:
        """Return whether every reduction is in the innermost block and no spatial axis descends from a reduced one."""
        group: list[Entry] = []
        for entry in self.iteration.entries:
            group_axes = {a for e in group for a in e.axes}
            hosts = [a for _, host in entry.heads if host is not None for a in (host, *host.ancestors)]
            above = [*(a for axis, _ in entry.heads for a in axis.ancestors), *hosts]
            ragged = bool(hosts or entry.merge) or entry.axes[0].is_ragged
            if ragged and any(a in group_axes for a in above):
                if any("R" in e.kinds for e in group):
                    return False
                group = []
            reduced = {a for e in group if "R" in e.kinds for a in e.axes}
            if "S" in entry.kinds and any(a in reduced and not self._repeats(entry, a) for a in above):
                return False
            group.append(entry)
        return True


# Move initialisations out of reduction blocks, above their outermost reduction loop.
#
# before::
#
#     for j, k in T.grid(indptr[vi + 1] - indptr[vi], feat):
#         with T.sblock("spmm"):
#             vj, vk = T.axis.remap("RS", [j, k])
#             with T.init():
#                 c[vi, vk] = 0
#             c[vi, vk] = c[vi, vk] + ...
#
# after::
#
#     for k in range(feat):
#         with T.sblock("spmm_init"):
#             vk = T.axis.spatial(feat, k)
#             c[vi, vk] = 0
#     for j, k in T.grid(indptr[vi + 1] - indptr[vi], feat):
#         with T.sblock("spmm_update"):
#             ...
#
# TVM's own lowering runs the initialisation in the first reduction step, which an empty row does not have; its
# ``decompose_reduction`` does not support a guard that mixes loops of both kinds, as ``rfactor`` makes.


Pairs = list[tuple[tirx.IterVar, ir.Expr]]


def _refuse_mixed(realize: s_tir.SBlockRealize, reduced: Pairs, spatial: Pairs, loops: list[tirx.For]) -> None:
    """Raise for a loop fused from a reduction and a spatial one: it does not initialise the output of an empty row."""
    for var in (loop.loop_var for loop in loops):
        if any(mentions(v, [var]) for _, v in reduced) and any(mentions(v, [var]) for _, v in spatial):
            where = f"loop {var.name} of block {realize.block.name_hint}"
            message = f"{where} was fused from a reduction and a spatial loop"
            raise ScheduleError(f"{message}: an empty row would not be initialised; fuse loops of one kind")


def _guards(
    realize: s_tir.SBlockRealize, spatial: Pairs, inner: list[tirx.For], copied_loops: list[tirx.For]
) -> list[ir.Expr]:
    """Return the parts of a block's guard that bound its spatial variables by their domains."""
    removed_vars = [loop.loop_var for loop in inner if loop not in copied_loops]
    parts = conjuncts(realize.predicate)
    guards = [part for part in parts if not mentions(part, removed_vars)]
    mixed = [part for part in parts if mentions(part, removed_vars)]
    analyzer = sym.Analyzer()
    for loop in copied_loops:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
    for iv, value in spatial:
        loop_vars = [loop.loop_var for loop in copied_loops if mentions(value, [loop.loop_var])]
        bound = value < iv.dom.min + iv.dom.extent
        if any(mentions(part, loop_vars) for part in mixed) and not analyzer.can_prove(bound):
            guards.append(bound)
    return guards


def _initial_block(realize: s_tir.SBlockRealize, spatial: Pairs, guards: list[ir.Expr]) -> s_tir.SBlockRealize:
    """Return a block of the initialisation alone, over the spatial variables."""
    block = realize.block
    fresh = {iv.var: Var(str(iv.var.name), iv.var.ty) for iv, _ in spatial}
    iter_vars = [tirx.IterVar(substitute(iv.dom, fresh), fresh[iv.var], iv.iter_type) for iv, _ in spatial]
    body, name = substitute(block.init, fresh), f"{block.name_hint}_init"
    alone = with_regions(s_tir.SBlock(iter_vars, [], [], name, body, None, annotations=block.annotations), [])
    condition = conjunction(guards) if guards else tirx.const(True, "bool")
    return s_tir.SBlockRealize([v for _, v in spatial], condition, alone)


def initial_nest(realize: s_tir.SBlockRealize, inner: list[tirx.For]) -> tirx.Stmt:
    """Return the initialisation of a block below copies of those `inner` loops that its spatial variables depend on."""
    spatial = [(iv, v) for iv, v in bindings(realize) if int(iv.iter_type) != REDUCE]
    copied_loops = [loop for loop in inner if any(mentions(v, [loop.loop_var]) for _, v in spatial)]
    nest: tirx.Stmt = _initial_block(realize, spatial, _guards(realize, spatial, inner, copied_loops))
    for loop in reversed(copied_loops):
        var = Var(f"{loop.loop_var.name}_init", loop.loop_var.ty)
        nest = with_(loop, var=var, body=substitute(nest, {loop.loop_var: var}), notes={})
    return nest


def keeps_old(init: tirx.Stmt) -> bool:
    """Return whether an initialisation only keeps the old value: ``c[vi] = c[vi]``."""
    while isinstance(init, tirx.IfThenElse):
        init = init.then_case
    return isinstance(init, tirx.BufferStore) and is_element(init.value, init)


def without_init(realize: s_tir.SBlockRealize, name: str | None = None) -> s_tir.SBlockRealize:
    """Return the block without its initialisation; it reads the regions that it updates."""
    old = realize.block
    written = {region.source for region in old.writes}
    reads = [*old.writes, *(region for region in old.reads if region.source not in written)]
    name, notes = name or f"{old.name_hint}_update", old.annotations
    update = s_tir.SBlock(
        old.iter_vars, reads, old.writes, name, old.body, None, old.alloc_buffers, old.match_buffers, notes
    )
    return s_tir.SBlockRealize(realize.iter_values, realize.predicate, update)


class _Decomposer:
    """Decomposition of a function's reductions; `nests` maps a loop variable to the nests to place before its loop."""

    def __init__(self) -> None:
        self.loops: list[tirx.For] = []
        self.nests: dict[Var, list[tirx.Stmt]] = {}

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        self.loops.append(node)
        out = mutator.default_mutate(node)
        self.loops.pop()
        return seq(*self.nests.pop(node.loop_var, []), out)

    def on_realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        outer, self.loops = self.loops, []
        out = mutator.default_mutate(node)
        self.loops = outer
        if out.block.init is None:
            return out
        if keeps_old(out.block.init):
            return without_init(out, out.block.name_hint)
        reduced = [(iv, v) for iv, v in bindings(out) if int(iv.iter_type) == REDUCE]
        spatial = [(iv, v) for iv, v in bindings(out) if int(iv.iter_type) != REDUCE]
        _refuse_mixed(out, reduced, spatial, outer)
        at = [n for n, loop in enumerate(outer) if any(mentions(v, [loop.loop_var]) for _, v in reduced)]
        if not at:
            return out
        self.nests.setdefault(outer[at[0]].loop_var, []).append(initial_nest(out, outer[at[0] :]))
        return without_init(out)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.DecomposeInit")
def DecomposeInit(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Move the initialisation of every reduction of a function above its reduction loops."""
    walk = _Decomposer()
    callbacks = [(tirx.For, walk.on_for), (s_tir.SBlockRealize, walk.on_realize)]
    body = structural_mutate(func.body, callbacks)
    return with_body(func, body)
