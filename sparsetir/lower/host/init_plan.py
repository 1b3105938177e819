# SPDX-License-Identifier: Apache-2.0
"""Where the initialisation of a sparse iteration goes."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import INDEPENDENT, INIT, STORED, Axis, Entry, Program, SpIter, cast, const
from sparsetir.lower.checks.independence import injective
from sparsetir.lower.nest.access import Scope
from sparsetir.lower.nest.nest import spatial_pairs
from sparsetir.lower.rewriting import all_same, collect, mentions


def may_miss(entry: Entry) -> bool:
    """Whether a step of the entry's loops may have no coordinate."""
    return bool(entry.merge) or any(a.may_be_absent for a in entry.axes)


class InitPlan:
    """Where the initialisation of an iteration goes.

    ``inside``: in the innermost block, as TVM's reductions have it. Otherwise in a nest of its own placed
    below the first ``prefix`` entries; ``prefix`` is None when there is nothing to place. With the annotation
    ``{"init": "stored"}`` only points that are stored are initialised, others belong to another iteration.
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
        """Whether every store subscripts the entry's axes, in its own buffer, by the entry's variables."""
        stores = self.stores + collect(self.iteration.block.body, tirx.BufferStore)
        if entry.merge:
            return False
        return all(self._own(s, v, a) for s in stores for v, a in zip(entry.vars, entry.axes, strict=True))

    def by_position(self, entry: Entry) -> bool:
        """Whether walking the entry's stored positions reaches every element its initial stores can reach."""
        if "R" in entry.kinds or entry.attached_to is not None or (entry.merge and not self.stored_only):
            return False
        if self.stored_only:
            return True
        if not entry.is_fused and entry.axes[0].kind == "dense_fixed":
            return True
        return all(self._own(store, v, a) for store in self.stores for v, a in spatial_pairs(entry))

    def names(self, entry: Entry) -> bool:
        """Whether the initialisation differs between the entry's points, or only happens at those that are stored."""
        return any(self.stored_only or self.mentions(var) for var, _ in spatial_pairs(entry))

    def mentions(self, var: Var) -> bool:
        """Whether the initialisation names an iteration variable."""
        return bool(mentions(self.iteration.block.init, [var]))

    def below(self, entry: Entry) -> list[Axis]:
        """The axes whose stored points are initialised and that hang from an entry which is summed over."""
        if not self.stored_only or "S" in entry.kinds:
            return []
        pairs = [pair for e in self.iteration.entries for pair in spatial_pairs(e)]
        return [axis for _, axis in pairs if not set(entry.axes).isdisjoint(axis.ancestors)]

    def _repeats(self, entry: Entry, up: Axis) -> bool:
        """Whether an entry's points are the same below every slot of an axis, of which the first will do."""
        return self.stored_only and entry.attached_to is None and all(a.repeats_below(up) for a in entry.axes)

    def _own(self, store: tirx.BufferStore, var: Var, axis: Axis) -> bool:
        """Whether the store subscripts `axis` of its buffer by `var`, and uses `var` nowhere else."""
        buffer = self.program.buffers.get(store.buffer)
        if buffer is None or axis not in buffer.axes:
            return False
        own = buffer.axes.index(axis)
        return all(i.same_as(var) if n == own else not mentions(i, [var]) for n, i in enumerate(store.indices))

    def _once(self, entry: Entry) -> bool:
        """Whether different steps of the entry initialise different elements."""
        if entry is self.iteration.entries[0] and INDEPENDENT in self.iteration.block.annotations:
            return True
        return all(injective(list(s.indices), list(entry.vars), self.iteration) for s in self.stores)

    # ------------------------------------------------------------------ the whole list

    def _reads_elsewhere(self) -> bool:
        """Whether the body reads an initialised buffer at another point than its own."""
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
        """Whether the store's element exists at every iterated point."""
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
            # Where a formula leaves the axis, initialisation and body stand under the same bounds.
            if not scope.proves_in_range(index, axis.length) and mentions(index, reduced):
                return False
        return True

    def _reduces_in_leaf(self) -> bool:
        """Whether every reduction, and nothing that hangs from one, is in the innermost block."""
        group: list[Entry] = []
        for entry in self.iteration.entries:
            held = {a for e in group for a in e.axes}
            hosts = [a for _, host in entry.heads if host is not None for a in (host, *host.ancestors)]
            above = [*(a for axis, _ in entry.heads for a in axis.ancestors), *hosts]
            ragged = bool(hosts or entry.merge) or entry.axes[0].is_ragged
            if ragged and any(a in held for a in above):
                if any("R" in e.kinds for e in group):
                    return False
                group = []
            reduced = {a for e in group if "R" in e.kinds for a in e.axes}
            if "S" in entry.kinds and any(a in reduced and not self._repeats(entry, a) for a in above):
                return False
            group.append(entry)
        return True
