# SPDX-License-Identifier: Apache-2.0
"""Give the initialisation of an iteration an iteration of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import INIT, Axis, Entry, SpIter
from sparsetir.lower.rewriting import mentions, substitute
from sparsetir.rules import stores
from sparsetir.transform.editing import Edit, Editor, make_iteration, new_var, notes_of, visits_stored


def split_init(func: tirx.PrimFunc, iteration: str) -> Edit:
    """Move ``T.init()`` to an iteration just before, over the spatial axes.

    A sparse axis whose stored positions are all that the initialisation can reach is kept; another one is replaced by
    a dense axis of the same length, because an initialisation happens at every coordinate, stored or not.

    args:
        iteration: name of a sparse iteration with an initialisation

    rewrite:
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
            C[i, k] = 0
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    Returns
    -------
    str
        The name of the new iteration.

    Raises
    ------
    ScheduleError
        There is no initialisation, it covers a single element, it uses scratch memory of the iteration, or it stores
        by search into a structure that repeats coordinates, all of which it must reach.
    """
    editor = Editor(func)
    found = editor.iteration(iteration)
    init = found.block.init
    if init is None:
        raise ScheduleError(f"sp_iter {iteration!r} has no initialisation")
    if found.block.alloc_buffers:
        raise ScheduleError(f"cannot split_init: sp_iter {iteration!r} has scratch memory of its own")
    walk = _Walk(editor, found)
    entries, renamed = walk.stored_entries() if visits_stored(found) else walk.entries()
    name = editor.fresh(f"{iteration}_init")
    made = make_iteration(name, entries, substitute(init, renamed))
    block = found.block
    notes = {k: v for k, v in notes_of(found).items() if k != INIT}
    rest = make_iteration(iteration, found.entries, block.body, notes=notes)
    editor.swap(found.node, made, rest)
    return editor.finish(name)


@dataclass(frozen=True, eq=False)
class _Walk:
    """Which axes the initialisation walks."""

    editor: Editor
    iteration: SpIter

    def entries(self) -> tuple[list[Entry], dict[Var, Any]]:
        """The new iteration's entries, and its variables in place of the old ones."""
        kept: set[Axis] = {a for it in self.editor.place(self.iteration.name).outer for a in it.axes}
        out: list[Entry] = []
        renamed: dict[Var, Any] = {}
        for entry in self.iteration.entries:
            if self._keeps(entry, kept):
                new = [Entry(entry.axes, tuple(new_var(v.name, a) for v, a in _pairs(entry)), entry.kinds)]
                kept.update(entry.axes)
                old = list(entry.vars)
            else:
                pairs = zip(_pairs(entry), entry.kinds, strict=True)
                spatial = [(v, a) for (v, a), k in pairs if k == "S" and mentions(self.iteration.block.init, [v])]
                new = [self._dense_entry(v, a) for v, a in spatial]
                old = [v for v, _ in spatial]
            renamed |= dict(zip(old, (v for e in new for v in e.vars), strict=True))
            out += new
        self._check_spatial(out)
        self._check_duplicates(out)
        return out, renamed

    def stored_entries(self) -> tuple[list[Entry], dict[Var, Any]]:
        """The same where only stored points are initialised: the spatial axes as they are."""
        out: list[Entry] = []
        for entry in self.iteration.entries:
            if set(entry.kinds) == {"S"}:
                out.append(entry)
                continue
            spatial = [(v, a) for (v, a), k in zip(_pairs(entry), entry.kinds, strict=True) if k == "S"]
            out += [Entry((a,), (v,), "S", entry.attached_to) for v, a in spatial]
        self._check_spatial(out)
        renamed = {v: new_var(str(v.name), a) for e in out for v, a in _pairs(e)}
        return [replace(e, vars=tuple(renamed[v] for v in e.vars)) for e in out], renamed

    def _check_spatial(self, entries: Sequence[Entry]) -> None:
        if not entries:
            message = f"sp_iter {self.iteration.name!r} initialises one element: there is no spatial axis to iterate"
            raise ScheduleError(f"cannot split_init: {message}")

    def _dense_entry(self, var: Var, axis: Axis) -> Entry:
        dense = axis
        if axis.kind != "dense_fixed":
            dense = self.editor.dense(f"{axis.name}_dense", axis.length, after=axis)
        return Entry((dense,), (new_var(var.name, dense),), "S")

    def _keeps(self, entry: Entry, kept: set[Axis]) -> bool:
        """Whether the stored positions of an entry are all that its initialisation reaches."""
        if set(entry.kinds) != {"S"} or entry.attached_to is not None:
            return False
        if not mentions(self.iteration.block.init, list(entry.vars)):
            return False
        if entry.axes[0].kind == "dense_fixed" and not entry.is_fused:
            return True
        parent = entry.axes[0].parent
        if parent is not None and parent not in kept:
            return False
        touched = stores(self.iteration.block.init)
        return all(self._is_own(s.buffer, s.indices, v, a) for s in touched for v, a in _pairs(entry))

    def _is_own(self, view: Var, indices: Sequence[ir.Expr], var: Var, axis: Axis) -> bool:
        """Whether the store subscripts `axis` of its buffer by `var`, and uses `var` nowhere else."""
        buffer = self.editor.program.buffers.get(view)
        if buffer is None or axis not in buffer.axes:
            return False
        own = buffer.axes.index(axis)
        return all(i.same_as(var) if n == own else not mentions(i, [var]) for n, i in enumerate(indices))

    def _check_duplicates(self, entries: Sequence[Entry]) -> None:
        """Refuse where a store by search reaches one duplicate of several."""
        walked = {a for e in entries for a in e.axes}
        for access in stores(self.iteration.block.init):
            buffer = self.editor.program.buffers.get(access.buffer)
            repeated = [a for a in buffer.axes if not a.unique and a not in walked] if buffer is not None else []
            if repeated:
                message = f"{access.name} is over axis {repeated[0].name}, which repeats coordinates"
                raise ScheduleError(f"cannot split_init: {message}, and a store by search reaches one of them")


def _pairs(entry: Entry) -> list[tuple[Var, Axis]]:
    return list(zip(entry.vars, entry.axes, strict=True))


__all__ = ["split_init"]
