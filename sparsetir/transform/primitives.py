# SPDX-License-Identifier: Apache-2.0
"""Schedule primitives on one iteration or two neighbours: annotate, pad, reorder, fuse, to_dense."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect, mentions, same, sequence, substitute
from sparsetir.ir.rules import SEARCHES, IterationScope, fuse_fault, loads, searched_axes, stores
from sparsetir.ir.views import INDEPENDENT, INIT, SEARCH, SPARSE_ITER, Axis, Entry, SpIter, cast, const, label
from sparsetir.ir.visitor import structural_walk
from sparsetir.lower.analysis.dependence import Footprint, Steps, footprint, meeting_faults, order_faults
from sparsetir.lower.iterations.access import Scope
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    below,
    ceil_div,
    check_count,
    dependents,
    divides,
    fiber_vars,
    find_entries,
    guarded,
    guarded_init,
    is_declaration,
    make_iteration,
    notes_of,
    rebuilt,
    refuse_grandparent,
    refuse_repeated,
    rehost,
    rehost_nested,
    single_entry,
    visits_stored,
    without_promise,
)
from sparsetir.transform.legality import Absent, EntryOrder, number_of
from sparsetir.utils.arguments import as_flag, shown

# Annotations of an iteration, the choice of its search among them.


def annotate(func: tirx.PrimFunc, iteration: str, key: str, value: Any) -> Edit:
    """Set an annotation of an iteration; every block that it becomes at stage II carries it.

    args:
        iteration: name of a sparse iteration
        key: of the annotation; "search" is set by `set_search`
        value: a string, a number, or a list or dict of them; None removes the annotation

    rewrite:
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
        ->
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            T.sp_iter_attr({"key": value})

    Raises
    ------
    ScheduleError
        The key belongs to the language, or the value is of another kind.
    """
    if not isinstance(key, str) or not key:
        raise ScheduleError(f"the key of a note must be a string, got {shown(key)}")
    if key in (SPARSE_ITER, INIT):
        raise ScheduleError(f"{shown(key)} is part of what the program means; it cannot be set")
    if key == SEARCH:
        raise ScheduleError("'search' changes how coordinates are found; use set_search")
    _check_value(value)
    return _annotate(func, iteration, key, value)


def _check_value(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ScheduleError(f"the keys of a note must be strings, got {shown(key)}")
            _check_value(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ScheduleError(f"a note is a string, a number, or a list or dict of them, got {type(value).__name__}")


def _annotate(func: tirx.PrimFunc, iteration: str, key: str, value: Any) -> Edit:
    editor = Editor(func)
    sp_iter = editor.iteration(iteration, merged=True)
    notes = {k: v for k, v in notes_of(sp_iter).items() if k != key}
    if value is not None:
        notes[key] = value
    block = sp_iter.block
    buffers = list(block.alloc_buffers)
    annotated = make_iteration(
        sp_iter.name, sp_iter.entries, block.body, init=block.init, notes=notes, allocated=buffers
    )
    editor.swap(sp_iter.node, annotated)
    return editor.finish()


def set_search(func: tirx.PrimFunc, iteration: str, strategy: str) -> Edit:
    """Choose how coordinates are looked up in an iteration; the results stay the same.

    args:
        iteration: name of a sparse iteration
        strategy: "inline", a search where it is needed; "hoist", positions computed once before the loops; "merge", a
            walk along two sorted axes

    rewrite:
        with T.sp_iter([I, JA], "SS", "times") as [i, j]:
            C[i, j] = A[i, j] * B[i, j]
        ->
        with T.sp_iter([I, JA], "SS", "times") as [i, j]:
            T.sp_iter_attr({"search": "merge"})
            C[i, j] = A[i, j] * B[i, j]

    Raises
    ------
    ScheduleError
        There is no such strategy, or "merge" would walk an axis that is not sorted or repeats coordinates.
    VerifyError
        "hoist" would read what the iteration writes.
    """
    if not isinstance(strategy, str) or strategy not in SEARCHES:
        raise ScheduleError(f"the search of an iteration is one of {', '.join(SEARCHES)}, got {shown(strategy)}")
    if strategy == "merge":
        editor = Editor(func)
        _check_merge(editor, editor.iteration(iteration, merged=True))
    return _annotate(func, iteration, SEARCH, None if strategy == "inline" else strategy)


def _check_merge(editor: Editor, iteration: SpIter) -> None:
    place = editor.place(iteration.name, merged=True)
    for axis, access in searched_axes(place, editor.facts):
        fault = "not sorted" if not axis.sorted else "not unique" if not axis.unique else ""
        if fault:
            message = f"cannot merge in sp_iter {iteration.name!r}: axis {axis.name} of {access.name} is {fault}"
            raise ScheduleError(f"{message}; search 'inline' or 'hoist'")


# Round the extent of a dense loop up.


def pad(func: tirx.PrimFunc, iteration: str, axis: Ref, multiple: int) -> Edit:
    """Iterate a dense axis up to the next multiple of a number, without effect beyond its length.

    The loop at stage II then splits by `multiple` without a remainder, so that its tiles are full; only
    the guard uses the length. Buffers keep their shapes and nothing beyond them is read or written. A sum
    over the axis stays a single store, as TVM's tiling and tensor primitives want it.
    An axis that hangs from the padded one is attached to it: beyond the length it has no coordinates.

    args:
        iteration: name of a sparse iteration
        axis: a dense_fixed axis of its list; not fused
        multiple: a positive number

    rewrite:
        with T.sp_iter([I, J, F], "SSR", "sddmm") as [i, j, f]:
            C[i, j] = C[i, j] + X[i, f] * Y[j, f]
        ->
        F_pad = T.dense_fixed((feat + 15) // 16 * 16)
        with T.sp_iter([I, J, F_pad], "SSR", "sddmm") as [i, j, f]:
            C[i, j] = C[i, j] + T.if_then_else(f < feat, X[i, f] * Y[j, f], 0)

    Returns
    -------
    str
        The name of the new axis.

    Raises
    ------
    ScheduleError
        The axis is sparse, ragged or fused, or its length is a multiple already.
    """
    multiple = check_count(multiple, "the multiple to pad to")
    editor = Editor(func)
    place = editor.place(iteration)
    sp_iter = place.iteration
    entry = single_entry(sp_iter, axis, "pad")
    old, var = entry.axes[0], entry.vars[0]
    if old.kind != "dense_fixed":
        raise ScheduleError(f"cannot pad {label(entry)}, which is {old.kind}: only a dense_fixed axis has one length")
    if divides(multiple, old.length):
        raise ScheduleError(f"cannot pad {old.name}: its length {old.length} is a multiple of {multiple} already")
    nested = editor.nested(sp_iter)
    refuse_repeated(old, nested, "pad")
    refuse_grandparent(old, [place, *nested], "pad")
    length = ceil_div(cast(old.length, old.idtype), multiple) * const(multiple, old.idtype)
    new = editor.dense(f"{old.name}_pad", length, after=old)
    entries = [replace(e, axes=(new,)) if e is entry else e for e in rehost(sp_iter.entries, old, new)]
    inside = below(var, old.length)
    init = guarded_init(inside, sp_iter.block.init, [var])
    body = rehost_nested(sp_iter.block.body, old, new, editor.program)
    if not _is_covered(sp_iter, old):
        body = guarded(inside, body, [var])
    editor.swap(sp_iter.node, rebuilt(sp_iter, entries, body, init, promise=True))
    return editor.finish(label(replace(entry, axes=(new,))))


def _is_covered(iteration: SpIter, axis: object) -> bool:
    """Return whether a loop of the same list has no step beyond the length: one over a child of `axis`."""
    return any(e.attached_to is None and e.axes[0].parent is axis for e in iteration.entries)


# Change the order of an iteration's axes.


def sparse_reorder(func: tirx.PrimFunc, iteration: str, order: Sequence[Ref]) -> Edit:
    """Reorder the axes of an iteration; the first is the outermost loop.

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
    sp_iter = place.iteration
    entries = _permutation(sp_iter, order)
    _check_parents(entries, place)
    _check_results(editor, sp_iter, entries)
    editor.swap(sp_iter.node, rebuilt(sp_iter, entries))
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


def _check_parents(entries: Sequence[Entry], place: IterationScope) -> None:
    seen: set[Axis] = {a for it in place.outer for a in it.axes}
    for entry in entries:
        for needed, role in _needs(entry):
            if needed not in seen:
                raise ScheduleError(f"{label(entry)} would come before {role} {needed.name}; list {needed.name} first")
        seen.update(entry.axes)


def _needs(entry: Entry) -> list[tuple[Axis, str]]:
    """Return the axes that must be iterated before an entry."""
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


# Iterate all coordinates of a sparse axis, stored or not.


def to_dense(func: tirx.PrimFunc, iteration: str, axis: Ref, *, guard: bool = False) -> Edit:
    """Iterate every coordinate of a sparse or ragged axis; where nothing is stored, buffers read their default.

    The body must do nothing where nothing is stored. It does if it only stores over the axis itself, or if the default
    value takes every term away: ``C[i, k] + 0 * B[j, k]``, ``max(C[i], lowest number)``. The second takes numbers as
    finite, as sparse arithmetic does everywhere: a stored-nowhere 0 times infinity counts as 0 here and is NaN after
    the change. With `guard` the body runs at stored coordinates only, whatever it does, which costs a second search.
    An axis that hangs from the changed one is attached to it: where nothing is stored it has no coordinates.
    Coordinates come in ascending order after the change, so those of an axis with ``sorted=False`` may not depend on
    theirs.

    args:
        iteration: name of a sparse iteration
        axis: one of its entries that is not dense_fixed; not fused
        guard: whether to test that the coordinate is stored

    rewrite:
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        J_all = T.dense_fixed(n)
        with T.sp_iter([I, J_all, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    rewrite (guard):
        J_stored = T.match_sparse_buffer(indices, (I, J), "int32", default_value=-1)
        with T.sp_iter([I, J_all, K], "SRS", "spmm") as [i, j, k]:
            if J_stored[i, j] >= 0:
                C[i, k] = C[i, k] + A[i, j] * B[j, k]

    Returns
    -------
    str
        The name of the new axis.

    Raises
    ------
    ScheduleError
        The axis is dense already or repeats coordinates, the body does something where nothing is stored or needs the
        order of coordinates that are not sorted, or `guard` is asked for an axis without an index array.
    """
    editor = Editor(func)
    place = editor.place(iteration)
    sp_iter = place.iteration
    entry = single_entry(sp_iter, axis, "densify")
    old = entry.axes[0]
    if old.kind == "dense_fixed":
        raise ScheduleError(f"{old.name} is a dense_fixed axis: all its coordinates are iterated already")
    if not old.unique:
        raise ScheduleError(f"cannot densify {old.name}: it repeats coordinates, and each stored one counts")
    nested = editor.nested(sp_iter)
    refuse_repeated(old, nested, "densify")
    refuse_grandparent(old, [place, *nested], "densify")
    _refuse_order(editor, sp_iter, entry)
    is_guarded = as_flag(guard, "guard")
    body, init = _guarded(editor, place, entry) if is_guarded else _checked(editor, place, entry)
    new = editor.dense(f"{old.name}_all", old.length, after=old)
    rehosted = rehost(sp_iter.entries, old, new)
    entries = [replace(e, axes=(new,), attached_to=None) if e is entry else e for e in rehosted]
    body = rehost_nested(body, old, new, editor.program)
    editor.swap(sp_iter.node, rebuilt(sp_iter, entries, body, init, promise=False))
    return editor.finish(label(replace(entry, axes=(new,), attached_to=None)))


def _refuse_order(editor: Editor, iteration: SpIter, entry: Entry) -> None:
    """Refuse to visit unsorted coordinates in ascending order where their order counts."""
    axis = entry.axes[0]
    if axis.sorted or axis.kind == "singleton":
        return
    order = EntryOrder(editor.facts, iteration, entry.vars)
    if fault := order.fault() or order.init_fault():
        message = f"its coordinates are not sorted, and sp_iter {iteration.name!r} {fault}"
        raise ScheduleError(f"cannot densify {axis.name}: {message}; store it sorted, or densify another axis")


def _walks_init(iteration: SpIter, entry: Entry) -> bool:
    """Return whether the initialisation visits the stored points of the entry, and no others."""
    return iteration.block.init is not None and visits_stored(iteration) and "S" in entry.kinds


def _has_children(iteration: SpIter, entry: Entry) -> bool:
    """Return whether an axis below the entry is iterated in the same list: it has no steps where nothing is stored."""
    return any(e.attached_to is None and e.axes[0].parent is entry.axes[0] for e in iteration.entries)


def _guarded(editor: Editor, place: IterationScope, entry: Entry) -> tuple[tirx.Stmt, tirx.Stmt | None]:
    """Return the body and the initialisation under a test whether the coordinate is stored."""
    iteration = place.iteration
    body, init = iteration.block.body, iteration.block.init
    parts = [not _has_children(iteration, entry), _walks_init(iteration, entry)]
    if not any(parts):
        return body, init
    stored = _is_stored(editor, place, entry)
    body, init = (
        tirx.IfThenElse(stored, x, None) if tested else x for tested, x in zip(parts, (body, init), strict=True)
    )
    return body, init


def _checked(editor: Editor, place: IterationScope, entry: Entry) -> tuple[tirx.Stmt, tirx.Stmt | None]:
    """Return the body and the initialisation as they are, once they are known to do nothing where nothing is stored."""
    iteration, axis = place.iteration, entry.axes[0]
    absent = Absent(editor, place, entry)
    body, init = iteration.block.body, iteration.block.init
    fault = "" if _has_children(iteration, entry) else absent.fault(body) or _hazard(editor, place, body)
    if not fault and _walks_init(iteration, entry):
        fault = absent.fault(init) or _hazard(editor, place, init)
    if fault:
        hint = "; pass guard=True to test it" if axis.indices is not None else ""
        raise ScheduleError(f"cannot densify {axis.name} in sp_iter {iteration.name!r}: {fault}{hint}")
    return body, init


def _hazard(editor: Editor, place: IterationScope, node: tirx.Stmt) -> str:
    """Return what may fail at a newly visited coordinate: a subscript out of range, a division by zero."""
    scope = Scope()
    for inner in (place, *editor.nested(place.iteration)):
        scope.ranges |= {v: ir.Range(const(0, str(a.length.ty.dtype)), a.length) for v, a in inner.variables.items()}
    for loop in collect(node, tirx.For):
        scope.ranges[loop.loop_var] = ir.Range.from_min_extent(loop.min, loop.extent)
    for access in (*stores(node), *loads(node)):
        plain = access.buffer not in editor.program.buffers
        sizes = list(access.buffer.ty.shape)
        if plain and not all(scope.proves_in_range(i, n) for i, n in zip(access.indices, sizes, strict=True)):
            return f"where nothing is stored its body may subscript {access.name} out of its shape"
    for kind in (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod):
        for division in collect(node, kind):
            if "float" not in str(division.ty.dtype) and not number_of(division.b):
                return f"where nothing is stored its body may divide by zero in {division}"
    return ""


# ---------------------------------------------------------------------------------------------- where it is stored


def _is_stored(editor: Editor, place: IterationScope, entry: Entry) -> ir.Expr:
    """Return the test for a stored coordinate: the index array, viewed as a buffer over its axis, is -1 elsewhere."""
    axis = entry.axes[0]
    if axis.indices is None:
        raise ScheduleError(f"axis {axis.name} has no index array to test")
    chain, dtype = (*axis.ancestors, axis), str(axis.indices.ty.dtype)
    stored_view, declared = editor.declared(axis.indices, f"{axis.name}_stored", chain, const(-1, dtype))
    editor.declare_after(axis, *declared)
    variables = fiber_vars(place, axis)
    return tirx.BufferLoad(stored_view, [variables[a] for a in chain]) >= const(0, dtype)


# ----------------------------------------------------------------------- fusion of axes and iterations


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
        raise ScheduleError(f"sparse_fuse takes two entries or more, got {len(entries)}")
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
        """True if no entries remain besides the shared ones."""
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
