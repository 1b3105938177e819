# SPDX-License-Identifier: Apache-2.0
"""Split one loop of an iteration into two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir import Entry, cast, const, label
from sparsetir.lower.rewriting import substitute
from sparsetir.rules import Place
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    ceil_div,
    check_count,
    dependents,
    divides,
    new_var,
    rebuilt,
    single_entry,
)
from sparsetir.transform.guard import below, guarded, guarded_init
from sparsetir.transform.split_slots import split_slots


def sparse_split(func: tirx.PrimFunc, iteration: str, axis: Ref, factor: int) -> Edit:
    """Split an axis into groups of `factor` and the places in a group; the storage stays as it is.

    A dense_fixed axis K that nothing hangs from becomes two dense axes. Its coordinate is ``k_o * factor + k_i``; a
    guard leaves out what lies beyond its length, unless `factor` divides it.

    Any other axis J is split by slots: J_o counts the groups of a fiber, J_i the slots of a group, both ragged, and
    for a sparse axis J_c is the coordinate stored there. What lies below J and the buffers over it are seen through
    new axes with the same positions and the same arrays, so nothing is searched and nothing is copied.

    args:
        iteration: name of a sparse iteration
        axis: one of its entries; not fused
        factor: slots of a group, a positive number

    rewrite (dense):
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        K_o = T.dense_fixed((feat + 3) // 4)
        K_i = T.dense_fixed(4)
        with T.sp_iter([I, J, K_o, K_i], "SRSS", "spmm") as [i, j, k_o, k_i]:
            if k_o * 4 + k_i < feat:
                C[i, k_o * 4 + k_i] = C[i, k_o * 4 + k_i] + A[i, j] * B[j, k_o * 4 + k_i]

    rewrite (slots):
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            Y[i] = Y[i] + A[i, j] * X[j]
        ->
        J_o = T.dense_variable(I, ..., extent=lambda i: groups of row i, offset=...)
        J_i = T.dense_variable(J_o, ..., extent=lambda i, j_o: slots of the group, offset=...)
        J_c = T.singleton(J_i, n, indices)
        A_split = T.match_sparse_buffer(a, (I, J_o, J_i, J_c))
        with T.sp_iter([I, J_o, J_i, J_c], "SRRR", "spmv") as [i, j_o, j_i, j]:
            Y[i] = Y[i] + A_split[i, j_o, j_i, j] * X[j]

    Returns
    -------
    list of str
        The names of the new entries.

    Raises
    ------
    ScheduleError
        The axis is fused or a singleton, hangs from a sparse axis (a formula cannot tell the position of its fiber), or
        the iteration initialises something over it that has to be set apart with `split_init`.
    """
    factor = check_count(factor, "the factor of a split")
    editor = Editor(func)
    place = editor.place(iteration)
    entry = single_entry(place.iteration, axis, "split")
    found = entry.axes[0]
    if found.kind == "singleton":
        raise ScheduleError(f"cannot split {found.name}: a singleton axis has one slot below each position")
    if found.kind == "dense_fixed" and not dependents(found, [place, *editor.nested(place.iteration)]):
        return _split_dense(editor, place, entry, factor)
    return split_slots(editor, place, entry, factor)


def _split_dense(editor: Editor, place: Place, entry: Entry, factor: int) -> Edit:
    iteration, axis, var = place.iteration, entry.axes[0], entry.vars[0]
    length, dtype = cast(axis.length, axis.idtype), axis.idtype
    outer = editor.dense(f"{axis.name}_o", ceil_div(length, factor), after=axis)
    inner = editor.dense(f"{axis.name}_i", const(factor, dtype), after=axis)
    new = [replace(entry, axes=(a,), vars=(new_var(f"{var.name}_{s}", a),)) for a, s in ((outer, "o"), (inner, "i"))]
    coord = new[0].vars[0] * const(factor, dtype) + new[1].vars[0]
    moved, block = [e.vars[0] for e in new], iteration.block

    body, init = (None if n is None else substitute(n, {var: coord}) for n in (block.body, block.init))
    if not divides(factor, length):
        inside = below(coord, length)
        body, init = guarded(inside, body, moved), guarded_init(inside, init, moved)
    entries = split_entries(iteration.entries, entry, new)
    editor.swap(iteration.node, rebuilt(iteration, entries, body, init, promise=True))
    return editor.finish([label(e) for e in new])


def split_entries(entries: Sequence[Entry], old: Entry, new: Sequence[Entry]) -> list[Entry]:
    """The list with `new` in the place of `old`."""
    return [e for entry in entries for e in (new if entry is old else [entry])]
