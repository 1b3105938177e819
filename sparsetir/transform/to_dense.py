# SPDX-License-Identifier: Apache-2.0
"""Iterate all coordinates of a sparse axis, stored or not."""

from __future__ import annotations

from dataclasses import replace

from tvm import ir, tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir import Entry, SpIter, const, label
from sparsetir.lower.nest.access import Scope
from sparsetir.lower.rewriting import collect
from sparsetir.rules import Place, loads, stores
from sparsetir.transform.absent import Absent, number_of
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    fiber_vars,
    rebuilt,
    refuse_grandparent,
    refuse_repeated,
    rehost,
    rehost_nested,
    single_entry,
    visits_stored,
)
from sparsetir.transform.entry_order import EntryOrder


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
    found = place.iteration
    entry = single_entry(found, axis, "densify")
    old = entry.axes[0]
    if old.kind == "dense_fixed":
        raise ScheduleError(f"{old.name} is a dense_fixed axis: all its coordinates are iterated already")
    if not old.unique:
        raise ScheduleError(f"cannot densify {old.name}: it repeats coordinates, and each stored one counts")
    nested = editor.nested(found)
    refuse_repeated(old, nested, "densify")
    refuse_grandparent(old, [place, *nested], "densify")
    _refuse_order(editor, found, entry)
    body, init = _guarded(editor, place, entry) if guard else _checked(editor, place, entry)
    new = editor.dense(f"{old.name}_all", old.length, after=old)
    moved = rehost(found.entries, old, new)
    entries = [replace(e, axes=(new,), attached_to=None) if e is entry else e for e in moved]
    body = rehost_nested(body, old, new, editor.program)
    editor.swap(found.node, rebuilt(found, entries, body, init, promise=False))
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
    """Whether the initialisation visits the stored points of the entry, and no others."""
    return iteration.block.init is not None and visits_stored(iteration) and "S" in entry.kinds


def _has_children(iteration: SpIter, entry: Entry) -> bool:
    """Whether an axis below the entry is iterated in the same list: it has no steps where nothing is stored."""
    return any(e.attached_to is None and e.axes[0].parent is entry.axes[0] for e in iteration.entries)


def _guarded(editor: Editor, place: Place, entry: Entry) -> tuple[tirx.Stmt, tirx.Stmt | None]:
    """The body and the initialisation under a test whether the coordinate is stored."""
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
    """The body and the initialisation as they are, once they are known to do nothing where nothing is stored."""
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
    """What may fail at a coordinate that the program did not visit: a subscript out of range, a division by zero."""
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
    """Whether the coordinate is stored: the index array, seen as a buffer over its own axis, is -1 elsewhere."""
    axis = entry.axes[0]
    if axis.indices is None:
        raise ScheduleError(f"axis {axis.name} has no index array to test")
    chain, dtype = (*axis.ancestors, axis), str(axis.indices.ty.dtype)
    seen, declared = editor.declared(axis.indices, f"{axis.name}_stored", chain, const(-1, dtype))
    editor.declare_after(axis, *declared)
    at = fiber_vars(place, axis)
    return tirx.BufferLoad(seen, [at[a] for a in chain]) >= const(0, dtype)
