# SPDX-License-Identifier: Apache-2.0
"""Schedule primitives on one iteration: annotate, pad, reorder, to_dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import ir, tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect
from sparsetir.ir.rules import SEARCHES, Place, loads, searched_axes, stores
from sparsetir.ir.views import INIT, SEARCH, SPARSE_ITER, Axis, Entry, SpIter, cast, const, label
from sparsetir.lower.analysis.dependence import Steps, footprint, order_faults
from sparsetir.lower.iterations.access import Scope
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    below,
    ceil_div,
    check_count,
    divides,
    fiber_vars,
    find_entries,
    guarded,
    guarded_init,
    make_iteration,
    notes_of,
    rebuilt,
    refuse_grandparent,
    refuse_repeated,
    rehost,
    rehost_nested,
    single_entry,
    visits_stored,
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
        raise ScheduleError(f"the key of a note must be a string, found {shown(key)}")
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
                raise ScheduleError(f"the keys of a note must be strings, found {shown(key)}")
            _check_value(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ScheduleError(f"a note is a string, a number, or a list or dict of them, found {type(value).__name__}")


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
        raise ScheduleError(f"the search of an iteration is one of {', '.join(SEARCHES)}, found {shown(strategy)}")
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


def _check_parents(entries: Sequence[Entry], place: Place) -> None:
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


def _guarded(editor: Editor, place: Place, entry: Entry) -> tuple[tirx.Stmt, tirx.Stmt | None]:
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


def _checked(editor: Editor, place: Place, entry: Entry) -> tuple[tirx.Stmt, tirx.Stmt | None]:
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


def _hazard(editor: Editor, place: Place, node: tirx.Stmt) -> str:
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


def _is_stored(editor: Editor, place: Place, entry: Entry) -> ir.Expr:
    """Return the test for a stored coordinate: the index array, viewed as a buffer over its axis, is -1 elsewhere."""
    axis = entry.axes[0]
    if axis.indices is None:
        raise ScheduleError(f"axis {axis.name} has no index array to test")
    chain, dtype = (*axis.ancestors, axis), str(axis.indices.ty.dtype)
    stored_view, declared = editor.declared(axis.indices, f"{axis.name}_stored", chain, const(-1, dtype))
    editor.declare_after(axis, *declared)
    variables = fiber_vars(place, axis)
    return tirx.BufferLoad(stored_view, [variables[a] for a in chain]) >= const(0, dtype)
