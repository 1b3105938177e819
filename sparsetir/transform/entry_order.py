# SPDX-License-Identifier: Apache-2.0
"""Whether the entries of a structure may be visited in another order, as those of its pieces or of a dense axis are.

A decomposed program runs the body of an iteration once for each entry and each point of the other axes, as the
original does. What changes is the order: pieces come one after the other, and each has an order of its own. Points
with the same entry keep theirs. So the results are the same if two points with different entries never need each
other: they touch no common element that one of them stores to, or only update it with one operator whose order is
free (``X[s] = X[s] + term``), or all store the same value there. Sums are assumed to be associative, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tvm import tirx
from tvm.ir import Var

from sparsetir.ir import Axis, SpIter
from sparsetir.lower.checks.dependence import Footprint, Steps, footprint, is_constant_store, is_update
from sparsetir.rules import Facts


class EntryOrder:
    """What the points of an iteration over a structure share; `entry` holds the variables that tell entries apart."""

    def __init__(self, facts: Facts, it: SpIter, entry: Sequence[Var]) -> None:
        # No two entries have the same coordinates: those that do are added up when they are converted.
        axes = {v: replace(a, unique=True) if v in entry else a for v, a in _variables(it)}
        self.facts, self.it, self.entry = facts, it, set(entry)
        self.steps = Steps(facts, axes)
        self.body = self._without_own_scratch(footprint(facts, it.block.body))
        self.init = self._without_own_scratch(footprint(facts, it.block.init))

    def _without_own_scratch(self, found: Footprint) -> Footprint:
        own = set(self.it.block.alloc_buffers)
        return replace(found, touches=[t for t in found.touches if t.storage not in own])

    def fault(self) -> str:
        """Why the body may not visit the entries in another order; empty if it may."""
        return self._fault(self.body)

    def init_fault(self) -> str:
        """The same for the initialisation."""
        return self._fault(self.init)

    def _fault(self, part: Footprint) -> str:
        if part.opaque:
            return f"has effects that are not known, {part.opaque}"
        for storage in part.stored:
            group = part.of(storage)
            if is_update(group) or self.entry <= self.steps.fixed(group) or self._stores_the_same(part, group):
                continue
            name = next(str(t.view.name) for t in group if t.is_store)
            if any(not t.is_store for t in group):
                return f"reads {name}, which it stores to for other entries too: their order would matter"
            return f"stores to one element of {name} for several entries, of which the last one counts"
        return ""

    def _stores_the_same(self, part: Footprint, group: Sequence) -> bool:
        free = set(self.steps.axes) | part.bound
        return is_constant_store(group, self.steps.fixed(group), free, part.stored, self.facts)

    def keeps_apart(self, init: Iterable[tirx.Stmt], row: Var) -> bool:
        """Whether what `init` sets is only touched by points of the same row, so that each row may set its own."""
        whole = footprint(self.facts, *init) + self.body
        stored = footprint(self.facts, *init).stored
        return all(row in self.steps.fixed(whole.of(storage)) for storage in stored)


def _variables(it: SpIter) -> Iterable[tuple[Var, Axis]]:
    return zip(it.vars, it.axes, strict=True)


__all__ = ["EntryOrder"]
