# SPDX-License-Identifier: Apache-2.0
"""Change the order of an iteration's axes."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir import Axis, Entry, SpIter, label
from sparsetir.lower.checks.dependence import Steps, footprint, order_faults
from sparsetir.rules import Place
from sparsetir.transform.editing import Edit, Editor, Ref, find_entries, rebuilt


def sparse_reorder(func: tirx.PrimFunc, iteration: str, order: Sequence[Ref]) -> Edit:
    """List the axes of an iteration in another order; the first is the outermost loop.

    A fused entry moves as a whole. A parent stays before its children, a host before what is attached to it. The
    order of a reduction is free, as that of updates ``X[s] = X[s] + term``; other results may not depend on it.

    args:
        iteration: name of a sparse iteration
        order: every entry of its list once

    rewrite:
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        with T.sp_iter([K, I, J], "SSR", "spmm") as [k, i, j]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    Raises
    ------
    ScheduleError
        `order` is not a permutation of the list, puts a child before its parent, or changes a result.
    """
    editor = Editor(func)
    place = editor.place(iteration)
    found = place.iteration
    entries = _permutation(found, order)
    _check_parents(entries, place)
    _check_results(editor, found, entries)
    editor.swap(found.node, rebuilt(found, entries))
    return editor.finish()


def _permutation(iteration: SpIter, order: Sequence[Ref]) -> list[Entry]:
    entries = find_entries(iteration, order)
    listed = ", ".join(label(e) for e in iteration.entries)
    for entry in entries:
        if entries.count(entry) > 1:
            raise ScheduleError(f"{label(entry)} comes twice in the new order; list each of {listed} once")
    missing = [label(e) for e in iteration.entries if e not in entries]
    if missing:
        raise ScheduleError(f"the new order leaves out {', '.join(missing)}; list each of {listed} once")
    return entries


def _check_parents(entries: Sequence[Entry], place: Place) -> None:
    seen: set[Axis] = {a for it in place.outer for a in it.axes}
    for entry in entries:
        for needed, role in _needs(entry):
            if needed not in seen:
                raise ScheduleError(f"{label(entry)} would come before {role} {needed.name}; list {needed.name} first")
        seen.update(entry.axes)


def _needs(entry: Entry) -> list[tuple[Axis, str]]:
    """The axes that must be iterated before an entry."""
    parent = entry.axes[0].parent
    if parent is None:
        return []
    if entry.attached_to is None:
        return [(parent, "its parent")]
    above = [] if parent.parent is None else [(parent.parent, f"the parent of {parent.name},")]
    return [(entry.attached_to, "the axis it is attached to,"), *above]


def _check_results(editor: Editor, iteration: SpIter, entries: Sequence[Entry]) -> None:
    steps = Steps(editor.facts, dict(zip(iteration.vars, iteration.axes, strict=True)))
    for part in (iteration.block.body, iteration.block.init):
        if part is None:
            continue
        for fault in order_faults(footprint(editor.facts, part), iteration.entries, entries, steps):
            raise ScheduleError(f"cannot reorder sp_iter {iteration.name!r}: {fault}")
