# SPDX-License-Identifier: Apache-2.0
"""Annotations of an iteration, the choice of its search among them."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir import INIT, SEARCH, SPARSE_ITER, SpIter
from sparsetir.rules import SEARCHES, searched_axes
from sparsetir.transform.editing import Edit, Editor, make_iteration, notes_of


def annotate(func: tirx.PrimFunc, iteration: str, key: str, value: Any) -> Edit:
    """Note something at an iteration; every block that it becomes at stage II carries the note.

    args:
        iteration: name of a sparse iteration
        key: of the note; "search" is set by `set_search`
        value: a string, a number, or a list or dict of them; None takes the note away

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
        raise ScheduleError(f"the key of a note must be a string, found {key!r}")
    if key in (SPARSE_ITER, INIT):
        raise ScheduleError(f"{key!r} is part of what the program means; it cannot be set")
    if key == SEARCH:
        raise ScheduleError("'search' changes how coordinates are found; use set_search")
    _check_value(value)
    return _noted(func, iteration, key, value)


def _check_value(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ScheduleError(f"the keys of a note must be strings, found {key!r}")
            _check_value(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ScheduleError(f"a note is a string, a number, or a list or dict of them, found {type(value).__name__}")


def _noted(func: tirx.PrimFunc, iteration: str, key: str, value: Any) -> Edit:
    editor = Editor(func)
    found = editor.iteration(iteration, merged=True)
    notes = {k: v for k, v in notes_of(found).items() if k != key}
    if value is not None:
        notes[key] = value
    block = found.block
    kept = list(block.alloc_buffers)
    made = make_iteration(found.name, found.entries, block.body, init=block.init, notes=notes, allocated=kept)
    editor.swap(found.node, made)
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
        raise ScheduleError(f"the search of an iteration is one of {', '.join(SEARCHES)}, found {strategy!r}")
    if strategy == "merge":
        editor = Editor(func)
        _check_merge(editor, editor.iteration(iteration, merged=True))
    return _noted(func, iteration, SEARCH, None if strategy == "inline" else strategy)


def _check_merge(editor: Editor, iteration: SpIter) -> None:
    place = editor.place(iteration.name, merged=True)
    for axis, access in searched_axes(place, editor.facts):
        fault = "not sorted" if not axis.sorted else "not unique" if not axis.unique else ""
        if fault:
            message = f"cannot merge in sp_iter {iteration.name!r}: axis {axis.name} of {access.name} is {fault}"
            raise ScheduleError(f"{message}; search 'inline' or 'hoist'")
