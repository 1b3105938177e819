# SPDX-License-Identifier: Apache-2.0
"""Fuse the axes of an iteration, or two neighbouring iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import mentions, same, substitute
from sparsetir.ir.rules import fuse_fault, stores
from sparsetir.ir.views import INDEPENDENT, Axis, Entry, SpIter, label
from sparsetir.ir.visitor import structural_walk
from sparsetir.lower.analysis.dependence import Footprint, Steps, footprint, meeting_faults
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    check_count,
    dependents,
    find_entries,
    is_declaration,
    make_iteration,
    notes_of,
    rebuilt,
    sequence,
    visits_stored,
    without_promise,
)

# Iterate the stored positions of a chain of axes as one loop.


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
    sp_iter = editor.iteration(iteration)
    entries = find_entries(sp_iter, axes)
    first = _first_of_neighbours(sp_iter, entries)
    members = tuple(a for e in entries for a in e.axes)
    _check_chain(sp_iter, entries, members)
    fused = Entry(members, tuple(v for e in entries for v in e.vars), "".join(e.kinds for e in entries))
    last = first + len(entries)
    editor.swap(sp_iter.node, rebuilt(sp_iter, [*sp_iter.entries[:first], fused, *sp_iter.entries[last:]]))
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


# Run two neighbouring iterations together.


def fuse_iterations(
    func: tirx.PrimFunc, first: str, second: str, *, depth: int | None = None, name: str | None = None
) -> Edit:
    """Share the outer axes of two iterations that follow each other, so that a row is finished while it is at hand.

    The lists begin with the same axes and letters. These become the axes of a new iteration; what is left of each list
    becomes an iteration inside, an iteration of which nothing is left gives its body. What one writes and the other
    touches must belong to the same step of the shared axes.

    args:
        first, second: names of sparse iterations, neighbours in this order
        depth: how many entries to share; as many as are legal if it is left out
        name: of the new iteration; by default that of one whose whole list is shared, else "first_second"

    rewrite:
        with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
            with T.init():
                top[i] = T.min_value("float32")
            top[i] = T.max(top[i], A[i, j])
        with T.sp_iter([I, J], "SS", "shift") as [i, j]:
            B[i, j] = A[i, j] - top[i]
        ->
        with T.sp_iter([I], "S", "row_max_shift") as [i]:
            with T.sp_iter([J], "R", "row_max") as [j]:
                with T.init():
                    top[i] = T.min_value("float32")
                top[i] = T.max(top[i], A[i, j])
            with T.sp_iter([J], "S", "shift") as [j]:
                B[i, j] = A[i, j] - top[i]

    Returns
    -------
    str
        The name of the new iteration.

    Raises
    ------
    ScheduleError
        The iterations are no neighbours, their lists do not begin alike, or a step of one needs other steps of the
        other.
    """
    editor = Editor(func)
    left, right = editor.iteration(first), editor.iteration(second)
    between = _between(editor, left, right)
    _refuse_scratch(left, right)
    shared = _shared(editor, left, right, depth)
    depths = [depth] if depth is not None else range(len(shared), 0, -1)
    faults = {n: _fault(editor, left, right, shared[:n]) for n in depths}
    legal = next((n for n, fault in faults.items() if not fault), None)
    if legal is None:
        raise ScheduleError(list(faults.values())[-1])
    fused = _fused(editor, _parts(editor, left, right, shared[:legal]), shared[:legal], name)
    editor.swap(left.node, *between, fused)
    for stmt in (*between, right.node):
        editor.swap(stmt)
    return editor.finish(str(fused.block.name_hint))


def _parts(editor: Editor, left: SpIter, right: SpIter, shared: Sequence[Entry]) -> list[_Part]:
    count = len(shared)
    return [_Part(editor, left, count, {}), _Part(editor, right, count, _renamed(right, shared))]


def _fault(editor: Editor, left: SpIter, right: SpIter, shared: Sequence[Entry]) -> str:
    """Return why these entries cannot be shared; empty if they can."""
    parts = _parts(editor, left, right, shared)
    axes = {v: a for e in shared for v, a in zip(e.vars, e.axes, strict=True)}
    faults = (
        *(f for p in parts for f in p.init_faults(shared)),
        *_order_faults(editor, parts, axes),
        *_note_faults(parts),
    )
    return next(iter(faults), "")


# ---------------------------------------------------------------------------------------------- neighbours


def _between(editor: Editor, left: SpIter, right: SpIter) -> list[tirx.Stmt]:
    """Return the statements between two iterations that may run before both: those independent of the first."""
    subjects = f"sp_iter {left.name!r} and sp_iter {right.name!r}"
    sequences: list[tirx.SeqStmt] = []
    structural_walk(editor.func.body, (tirx.SeqStmt, sequences.append))
    for candidate in sequences:
        at = [[n for n, s in enumerate(candidate.seq) if s.same_as(it.node)] for it in (left, right)]
        if not at[0] or not at[1]:
            continue
        between = list(candidate.seq)[at[0][0] + 1 : at[1][0]]
        if at[0][0] >= at[1][0]:
            raise ScheduleError(f"{subjects} are not in this order; name the one that runs first first")
        blocking = [s for s in between if not is_declaration(s) and _meets(editor, left, s)]
        if blocking:
            what = getattr(getattr(blocking[0], "block", None), "name_hint", None)
            blocker = f"sp_iter {str(what)!r}" if what else "another statement"
            fault = f"{blocker} stands between them and uses what {left.name!r} does"
            raise ScheduleError(f"{subjects} are not neighbours: {fault}")
        return between
    raise ScheduleError(f"{subjects} do not stand in the same block, one after the other")


def _meets(editor: Editor, left: SpIter, stmt: tirx.Stmt) -> bool:
    """Return whether a statement behind an iteration may not run before it."""
    first, second = footprint(editor.facts, left.node), footprint(editor.facts, stmt)
    opaque = bool(first.opaque or second.opaque)
    return opaque or bool(first.stored & second.touched or first.touched & second.stored)


def _refuse_scratch(*iterations: SpIter) -> None:
    for iteration in iterations:
        if iteration.block.alloc_buffers:
            raise ScheduleError(f"sp_iter {iteration.name!r} has scratch memory of its own, which cannot be shared")


def _is_alike(editor: Editor, a: Entry, b: Entry, right: SpIter) -> bool:
    if a.kinds != b.kinds or a.attached_to is not b.attached_to:
        return False
    if a.axes == b.axes:
        return True
    if a.is_fused or b.is_fused or a.axes[0].kind != "dense_fixed" or b.axes[0].kind != "dense_fixed":
        return False
    place = editor.place(right.name)
    hanging = dependents(b.axes[0], [place, *editor.nested(right)])
    return not hanging and a.axes[0].idtype == b.axes[0].idtype and same(a.axes[0].length, b.axes[0].length)


def _shared(editor: Editor, left: SpIter, right: SpIter, depth: int | None) -> list[Entry]:
    """Return the entries with which both lists begin."""
    alike: list[Entry] = []
    for a, b in zip(left.entries, right.entries, strict=False):
        if not _is_alike(editor, a, b, right):
            break
        alike.append(a)
    length = len(alike) if depth is None else check_count(depth, "the depth")
    if not alike or length > len(alike):
        lists = " and ".join(f"[{', '.join(map(label, it.entries))}] {it.kinds!r}" for it in (left, right))
        shown = f"the first {length} entries" if depth is not None else "their first entry"
        raise ScheduleError(f"sp_iter {left.name!r} and {right.name!r} differ in {shown} or its letters: {lists}")
    return alike[:length]


def _renamed(right: SpIter, shared: Sequence[Entry]) -> dict[Var, Any]:
    entries = right.entries[: len(shared)]
    return {w: v for a, b in zip(shared, entries, strict=True) for v, w in zip(a.vars, b.vars, strict=True)}


# ---------------------------------------------------------------------------------------------- parts


@dataclass(eq=False)
class _Part:
    """One of the two iterations, in terms of the shared variables.

    Its initialisation runs inside, once for each shared step, if a list is left; otherwise before all steps.
    """

    editor: Editor
    iteration: SpIter
    count: int
    renamed: dict[Var, Any]
    rest: tuple[Entry, ...] = field(init=False)

    def __post_init__(self) -> None:
        block = self.iteration.block
        self.rest = self.iteration.entries[self.count :]
        self.body = substitute(block.body, self.renamed)
        self.init = None if block.init is None else substitute(block.init, self.renamed)

    @property
    def is_whole(self) -> bool:
        """Whether no entries remain besides the shared ones."""
        return not self.rest

    def nest(self) -> tirx.Stmt:
        """Return what runs at each shared step."""
        if self.is_whole:
            return self.body
        notes = without_promise(notes_of(self.iteration))
        return make_iteration(self.iteration.name, self.rest, self.body, init=self.init, notes=notes)

    def phases(self) -> list[Footprint]:
        """Return what runs at each shared step, in order."""
        facts = self.editor.facts
        inside = [] if self.init is None or self.is_whole else [footprint(facts, self.init)]
        return [*inside, footprint(facts, self.body, walked=[a for e in self.rest for a in e.axes])]

    def before(self) -> Footprint:
        """Return what runs before all steps."""
        return footprint(self.editor.facts, self.init if self.is_whole else None)

    def init_faults(self, shared: Sequence[Entry]) -> Iterator[str]:
        """Yield the reasons why an initialisation inside would run too often, or not at every coordinate."""
        if self.init is None or self.is_whole:
            return
        name = self.iteration.name
        hint = f"use split_init({name!r}) first"
        for entry in shared:
            if "R" in entry.kinds:
                message = f"{label(entry)} is a reduction in sp_iter {name!r}, whose initialisation must not repeat"
                yield f"cannot fuse over {label(entry)}: {message}; {hint}"
            is_all = visits_stored(self.iteration) or (entry.axes[0].kind == "dense_fixed" and not entry.is_fused)
            if not is_all and not all(self._is_own(s.buffer, s.indices, entry) for s in stores(self.init)):
                message = f"sp_iter {name!r} initialises coordinates that {label(entry)} does not store"
                yield f"cannot fuse over {label(entry)}: {message}; {hint}"

    def _is_own(self, view: Var, indices: Sequence[Any], entry: Entry) -> bool:
        """Return whether a store only reaches the stored positions of the entry."""
        buffer = self.editor.program.buffers.get(view)
        if buffer is None or entry.attached_to is not None or any(a not in buffer.axes for a in entry.axes):
            return False
        return all(
            i.same_as(v) if buffer_axis is axis else not mentions(i, [v])
            for v, axis in zip(entry.vars, entry.axes, strict=True)
            for buffer_axis, i in zip(buffer.axes, indices, strict=True)
        )


# ---------------------------------------------------------------------------------------------- order


def _order_faults(editor: Editor, parts: Sequence[_Part], axes: dict[Var, Axis]) -> Iterator[str]:
    """Return what one iteration needs of the other at another step."""
    names = " and ".join(repr(p.iteration.name) for p in parts)
    steps = Steps(editor.facts, axes)
    inside = [phase for part in parts for phase in part.phases()]
    early = [part.before() for part in parts]
    for group in (inside, early):
        for fault in meeting_faults(group, steps, set(axes)):
            yield f"cannot fuse sp_iter {names}: {fault}"
    # The second initialisation now runs before the first body.
    for phase in parts[0].phases():
        clash = (early[1].stored & phase.touched) | (early[1].touched & phase.stored)
        if clash:
            what = min(str(v.name) for v in clash)
            message = f"the initialisation of {parts[1].iteration.name!r} would run before the first one uses {what}"
            yield f"cannot fuse sp_iter {names}: {message}"


def _note_faults(parts: Sequence[_Part]) -> Iterator[str]:
    notes = [without_promise(notes_of(p.iteration)) for p in parts if p.is_whole]
    if len(notes) == 2 and notes[0] != notes[1]:
        names = " and ".join(repr(p.iteration.name) for p in parts)
        yield f"cannot fuse sp_iter {names}: their annotations differ, {notes[0]} and {notes[1]}"


def _fused(editor: Editor, parts: Sequence[_Part], shared: Sequence[Entry], name: str | None) -> Any:
    whole = [p for p in parts if p.is_whole]
    default = whole[0].iteration.name if whole else "_".join(p.iteration.name for p in parts)
    editor.names -= {p.iteration.name for p in whole}
    inits = [p.init for p in whole if p.init is not None]
    init = sequence(*inits) if inits else None
    body = sequence(*(p.nest() for p in parts))
    notes = without_promise(notes_of(whole[0].iteration)) if whole else {}
    # Steps that meet agree on all shared axes, so two promises hold together.
    promises = [notes_of(p.iteration).get(INDEPENDENT) for p in parts]
    notes |= {INDEPENDENT: promises[0]} if None not in promises else {}
    return make_iteration(editor.fresh(name or default), shared, body, init=init, notes=notes)
