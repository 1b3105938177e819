# SPDX-License-Identifier: Apache-2.0
"""Split an iteration: initialisation or statements become iterations of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect, mentions, substitute
from sparsetir.ir.rules import stores
from sparsetir.ir.views import INIT, Axis, Entry, SpIter
from sparsetir.lower.analysis.dependence import Footprint, Steps, footprint, meeting_faults
from sparsetir.transform.editing import (
    Edit,
    Editor,
    is_declaration,
    make_iteration,
    new_var,
    notes_of,
    sequence,
    statements,
    visits_stored,
)
from sparsetir.utils.arguments import shown
from sparsetir.utils.dtypes import as_whole

# Give the initialisation of an iteration an iteration of its own.


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
    sp_iter = editor.iteration(iteration)
    init = sp_iter.block.init
    if init is None:
        raise ScheduleError(f"sp_iter {iteration!r} has no initialisation")
    if sp_iter.block.alloc_buffers:
        raise ScheduleError(f"cannot split_init: sp_iter {iteration!r} has scratch memory of its own")
    walk = _Walk(editor, sp_iter)
    entries, renamed = walk.stored_entries() if visits_stored(sp_iter) else walk.entries()
    name = editor.fresh(f"{iteration}_init")
    init_iteration = make_iteration(name, entries, substitute(init, renamed))
    block = sp_iter.block
    notes = {k: v for k, v in notes_of(sp_iter).items() if k != INIT}
    remaining = make_iteration(iteration, sp_iter.entries, block.body, notes=notes)
    editor.swap(sp_iter.node, init_iteration, remaining)
    return editor.finish(name)


@dataclass(frozen=True, eq=False)
class _Walk:
    """Choice of the axes that the initialisation iterates."""

    editor: Editor
    iteration: SpIter

    def entries(self) -> tuple[list[Entry], dict[Var, Any]]:
        """Return the new iteration's entries, and its variables in place of the old ones."""
        kept_axes: set[Axis] = {a for it in self.editor.place(self.iteration.name).outer for a in it.axes}
        out: list[Entry] = []
        renamed: dict[Var, Any] = {}
        for entry in self.iteration.entries:
            if self._keeps(entry, kept_axes):
                new = [Entry(entry.axes, tuple(new_var(v.name, a) for v, a in _pairs(entry)), entry.kinds)]
                kept_axes.update(entry.axes)
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
        """Return the entries and variables if only stored points are initialised: the spatial axes unchanged."""
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

    def _keeps(self, entry: Entry, kept_axes: set[Axis]) -> bool:
        """Return whether the stored positions of an entry are all that its initialisation reaches."""
        if set(entry.kinds) != {"S"} or entry.attached_to is not None:
            return False
        if not mentions(self.iteration.block.init, list(entry.vars)):
            return False
        if entry.axes[0].kind == "dense_fixed" and not entry.is_fused:
            return True
        parent = entry.axes[0].parent
        if parent is not None and parent not in kept_axes:
            return False
        init_stores = stores(self.iteration.block.init)
        return all(self._is_own(s.buffer, s.indices, v, a) for s in init_stores for v, a in _pairs(entry))

    def _is_own(self, view: Var, indices: Sequence[ir.Expr], var: Var, axis: Axis) -> bool:
        """Return whether the store subscripts `axis` of its buffer by `var`, and uses `var` nowhere else."""
        buffer = self.editor.program.buffers.get(view)
        if buffer is None or axis not in buffer.axes:
            return False
        dimension = buffer.axes.index(axis)
        return all(i.same_as(var) if n == dimension else not mentions(i, [var]) for n, i in enumerate(indices))

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


# Give the statements of a body iterations of their own.


def split_iteration(func: tirx.PrimFunc, iteration: str, *, at: int | None = None) -> Edit:
    """Run the statements of a body one after the other, each over all points of the iteration.

    Statements that need each other's results at other points stay together. A value that was given a name is computed
    again where it is used. Every initialisation goes to the first statement that touches what it sets.

    args:
        iteration: name of a sparse iteration with several statements
        at: number of the statement before which to cut; at every possible place if it is left out

    rewrite:
        with T.sp_iter([I, J], "SS", "both") as [i, j]:
            B[i, j] = A[i, j] * 2
            C[i, j] = B[i, j] + 1
        ->
        with T.sp_iter([I, J], "SS", "both_0") as [i, j]:
            B[i, j] = A[i, j] * 2
        with T.sp_iter([I, J], "SS", "both_1") as [i, j]:
            C[i, j] = B[i, j] + 1

    Returns
    -------
    list of str
        The names of the new iterations.

    Raises
    ------
    ScheduleError
        The body has one statement, or the statements cannot be told apart.
    """
    editor = Editor(func)
    sp_iter = editor.iteration(iteration)
    if sp_iter.block.alloc_buffers or any(map(_is_structure, statements(sp_iter.block.body))):
        raise ScheduleError(f"cannot split sp_iter {iteration!r}: it declares buffers or axes of its own")
    body = _Body(editor, sp_iter)
    parts = body.parts(at)
    inits = _placed(editor, sp_iter, parts)
    editor.names.discard(iteration)
    names = [editor.fresh(f"{iteration}_{n}") for n in range(len(parts))]
    iterations = [_part(sp_iter, *p, first=not n) for n, p in enumerate(zip(names, parts, inits, strict=True))]
    editor.swap(sp_iter.node, *iterations)
    return editor.finish(names)


@dataclass(eq=False)
class _Body:
    """The statements of a body, in order; ``actions`` are those that do not give a name to a value."""

    editor: Editor
    iteration: SpIter
    whole: list[tirx.Stmt] = field(init=False)
    cells: dict[Var, bool] = field(init=False)
    actions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.whole = statements(self.iteration.block.body)
        self.cells = {s.buffer: self._is_set_once(s.buffer) for s in self.whole if isinstance(s, tirx.AllocBuffer)}
        self.actions = [n for n, s in enumerate(self.whole) if self._named(s) is None]
        variables = dict(zip(self.iteration.vars, self.iteration.axes, strict=True))
        self.steps = Steps(self.editor.facts, variables)

    def _is_set_once(self, cell: Var) -> bool:
        """Return whether a local variable gets one value, on every path."""
        sets = [s for s in collect(self.iteration.block.body, tirx.BufferStore) if s.buffer.same_as(cell)]
        return len(sets) == 1 and any(sets[0].same_as(s) for s in self.whole)

    def _named(self, stmt: tirx.Stmt) -> Var | None:
        """Return the name that a statement declares or gives its value; None for an action."""
        if isinstance(stmt, tirx.Bind):
            return stmt.var
        is_named = isinstance(stmt, tirx.AllocBuffer) or (
            isinstance(stmt, tirx.BufferStore) and self.cells.get(stmt.buffer, False)
        )
        return stmt.buffer if is_named else None

    def parts(self, at: int | None) -> list[list[tirx.Stmt]]:
        """Return the statements of each new iteration."""
        name, count = self.iteration.name, len(self.actions)
        if count < 2:
            raise ScheduleError(f"sp_iter {name!r} has one statement; there is nothing to split")
        at = as_whole(at)
        if at is not None and (isinstance(at, bool) or not isinstance(at, int) or not 0 < at < count):
            valid_cuts = f"cut before statement 1 to {count - 1}" if count > 2 else "cut before statement 1"
            raise ScheduleError(f"sp_iter {name!r} has {count} statements: {valid_cuts}, not {shown(at)}")
        faults = {cut: self._fault(cut) for cut in (range(1, count) if at is None else [at])}
        cuts = [cut for cut, fault in faults.items() if not fault]
        if not cuts:
            raise ScheduleError(f"cannot split sp_iter {name!r}: {next(iter(faults.values()))}")
        ends = [0, *cuts, count]
        return [self._range(a, b) for a, b in itertools.pairwise(ends)]

    def _fault(self, cut: int) -> str:
        """Return why the statements before and from `cut` on cannot be separated; empty if they can."""
        facts = self.editor.facts
        sides = [self._range(0, cut), self._range(cut, len(self.actions))]
        prints = [footprint(facts, *side) for side in sides]
        for fault in meeting_faults(prints, self.steps, set(self.steps.axes)):
            return fault
        for cell, once in self.cells.items():
            if not once and all(mentions(side, [cell]) for side in sides):
                return f"{cell.name} is set at several places"
        for stmt in self.whole[: self.actions[cut]]:
            again = self._named(stmt) is not None and any(stmt.same_as(s) for s in sides[1])
            if again and {facts.storage(x.source) for x in collect(stmt, ir.TensorLoad)} & prints[0].stored:
                what = self._named(stmt)
                return f"{what.name} is read from what the statements before change, and used behind them"  # type: ignore[union-attr]
        return ""

    def _range(self, start: int, stop: int) -> list[tirx.Stmt]:
        """Return the statements of a range, and the names that they use."""
        numbers = set(self.actions[start:stop])
        for n in reversed(range(len(self.whole))):
            name = self._named(self.whole[n])
            if name is not None and any(mentions(self.whole[k], [name]) for k in numbers if k > n):
                numbers.add(n)
        return [self.whole[n] for n in sorted(numbers)]


def _placed(editor: Editor, iteration: SpIter, parts: Sequence[Sequence[tirx.Stmt]]) -> list[list[tirx.Stmt]]:
    """Assign each initial store to the first part that accesses its target, if no earlier part conflicts."""
    prints = [footprint(editor.facts, *part) for part in parts]
    out: list[list[tirx.Stmt]] = [[] for _ in parts]
    assigned: list[Footprint] = []
    for stmt in statements(iteration.block.init):
        accesses = footprint(editor.facts, stmt)
        first = next((n for n, p in enumerate(prints) if accesses.stored & p.touched), 0)
        must_precede = any(_meet(accesses, p) for p in (*prints[:first], *assigned))
        target = 0 if must_precede or not isinstance(stmt, tirx.BufferStore) else first
        out[target].append(stmt)
        assigned.append(accesses)
    return out


def _meet(a: Footprint, b: Footprint) -> bool:
    return bool(a.stored & b.touched or a.touched & b.stored)


def _part(iteration: SpIter, name: str, body: Sequence[tirx.Stmt], init: Sequence[tirx.Stmt], *, first: bool) -> Any:
    """Build one new iteration; all but the first get fresh variables."""
    entries: list[Entry] = list(iteration.entries)
    renamed: dict[Var, Any] = {}
    if not first:
        entries = [replace(e, vars=tuple(map(new_var, [v.name for v in e.vars], e.axes))) for e in entries]
        renamed = dict(zip(iteration.vars, (v for e in entries for v in e.vars), strict=True))
        locals = [s.var for s in body if isinstance(s, tirx.Bind)]
        locals += [s.buffer for s in body if isinstance(s, tirx.AllocBuffer)]
        renamed |= {v: Var(str(v.name), v.ty) for v in locals}
    renamed_stmts = [_renamed(s, renamed) for s in (*body, *init)]
    inits = renamed_stmts[len(body) :]
    init_stmt = sequence(*inits) if inits else None
    return make_iteration(
        name, entries, sequence(*renamed_stmts[: len(body)]), init=init_stmt, notes=notes_of(iteration)
    )


def _renamed(stmt: tirx.Stmt, renamed: dict[Var, Any]) -> tirx.Stmt:
    inside = substitute(stmt, renamed)
    if isinstance(inside, tirx.Bind) and inside.var in renamed:
        return tirx.Bind(renamed[inside.var], inside.value)
    if isinstance(inside, tirx.AllocBuffer) and inside.buffer in renamed:
        return tirx.AllocBuffer(renamed[inside.buffer], dict(inside.annotations))
    return inside


def _is_structure(stmt: tirx.Stmt) -> bool:
    """Return whether a statement declares an axis or a sparse buffer."""
    return is_declaration(stmt) and not isinstance(stmt, tirx.AllocBuffer)


__all__ = ["split_init"]
