# SPDX-License-Identifier: Apache-2.0
"""Iterate the stored positions of a chain of axes as one loop."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir import Axis, Entry, SpIter, label
from sparsetir.rules import fuse_fault
from sparsetir.transform.editing import Edit, Editor, Ref, find_entries, rebuilt


def sparse_fuse(func: tirx.PrimFunc, iteration: str, axes: Sequence[Ref]) -> Edit:
    """Make one loop over all stored positions of a chain of axes: it is as long as the structure, not as its rows.

    The entries are neighbours in the list, each the parent of the next, and the first is a root axis.

    args:
        iteration: name of a sparse iteration
        axes: two or more neighbouring entries

    rewrite:
        with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
        ->
        with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:

    Raises
    ------
    ScheduleError
        The entries are not neighbours, not a chain from a root, attached, or their rows are given by a formula.
    """
    editor = Editor(func)
    found = editor.iteration(iteration)
    entries = find_entries(found, axes)
    first = _first_of_neighbours(found, entries)
    members = tuple(a for e in entries for a in e.axes)
    _check_chain(found, entries, members)
    fused = Entry(members, tuple(v for e in entries for v in e.vars), "".join(e.kinds for e in entries))
    last = first + len(entries)
    editor.swap(found.node, rebuilt(found, [*found.entries[:first], fused, *found.entries[last:]]))
    return editor.finish()


def _first_of_neighbours(iteration: SpIter, entries: Sequence[Entry]) -> int:
    if len(entries) < 2:
        raise ScheduleError(f"sparse_fuse takes two entries or more, found {len(entries)}")
    first = iteration.entries.index(entries[0])
    if list(iteration.entries[first : first + len(entries)]) != list(entries):
        names = ", ".join(label(e) for e in entries)
        listed = ", ".join(label(e) for e in iteration.entries)
        raise ScheduleError(f"{names} are not neighbours in this order; the list is {listed}: use sparse_reorder first")
    return first


def _check_chain(iteration: SpIter, entries: Sequence[Entry], members: Sequence[Axis]) -> None:
    attached = [label(e) for e in entries if e.attached_to is not None]
    if attached:
        raise ScheduleError(f"cannot fuse {attached[0]} in sp_iter {iteration.name!r}: an attached axis has no chain")
    fault = fuse_fault(members)
    if fault:
        raise ScheduleError(f"cannot fuse in sp_iter {iteration.name!r}: {fault}")
    for axis in members[1:]:
        if axis.kind == "dense_implicit":
            message = f"the rows of {axis.name} are given by a formula, which cannot be searched for a position"
            raise ScheduleError(f"cannot fuse in sp_iter {iteration.name!r}: {message}")
