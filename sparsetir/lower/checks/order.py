# SPDX-License-Identifier: Apache-2.0
"""The variables of an iteration whose steps must keep their order.

Two steps that store to one element, or of which one reads what the other stores, do not commute::

    A[i] = B[i, j]            # the last j counts: order of j
    A[i] = A[i - 1] + B[i]    # each i reads the result of the one before: order of i
    A[i] = A[i] + B[i, j]     # updates with one operator commute: no order

Stage II notes such variables on their block, and `check_order` holds a schedule to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.ir import Var

from sparsetir.ir import INDEPENDENT, SpIter
from sparsetir.lower.checks.dependence import Footprint, Steps, Touch, footprint, is_constant_store, is_update
from sparsetir.lower.checks.independence import differ
from sparsetir.rules import Facts


def ordered(part: Any, iteration: SpIter, facts: Facts, loops: Sequence[Var] = ()) -> set[Var]:
    """The variables of an iteration, and of the `loops` of the program around it, that need their order in `part`.

    Parameters
    ----------
    part : Stmt
        The iteration's body, or its initialisation.
    """
    steps = Steps(facts, dict(zip(iteration.vars, iteration.axes, strict=True)))
    found = footprint(facts, part, walked=iteration.listed)
    repeating = {e.vars[0] for e in iteration.entries if e.merge and not all(map(differ, e.axes))}
    needed: set[Var] = {*steps.axes, *loops} if found.opaque else set()
    for storage in found.stored:
        group = found.of(storage)
        if not _commutes(group, found, steps):
            needed |= set(steps.axes) - (steps.fixed(group) - repeating)
            needed |= {v for v in loops if not _is_subscript(v, group)}
    promised = iteration.entries[0].vars if INDEPENDENT in iteration.block.annotations else ()
    return needed - set(promised)


def _commutes(group: Sequence[Touch], found: Footprint, steps: Steps) -> bool:
    """Whether steps that meet in an element of one storage leave the same there in any order."""
    if is_update(group):
        return True
    free = set(steps.axes) | found.bound
    return is_constant_store(group, steps.fixed(group), free, found.stored, steps.facts)


def _is_subscript(var: Var, group: Sequence[Touch]) -> bool:
    """Whether a variable alone subscripts the same dimension in all accesses."""
    rows = [t.indices for t in group if t.indices is not None]
    columns = zip(*rows, strict=True) if len(rows) == len(group) else ()
    return all(t.view.same_as(group[0].view) for t in group) and any(all(i.same_as(var) for i in c) for c in columns)
