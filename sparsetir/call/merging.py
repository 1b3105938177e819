# SPDX-License-Identifier: Apache-2.0
"""Sums and elementwise products of matrices that are stored as a program reads them, with little around the loops.

The compiled function checks the rows that it merges: nothing is known of an operand before, and nothing is kept of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm

from sparsetir import interop
from sparsetir.call.arguments import LARGEST_INT32, checks_are_on
from sparsetir.call.rows import CompressedRows, is_number
from sparsetir.call.workspace import merged_places, merged_ranges, moved
from sparsetir.ir import Axis
from sparsetir.spare import LEAST_ROOM, Rooms


class MergedRows:
    """Calls of a program that merges the rows of scipy's matrices and has one result.

    Parameters
    ----------
    rows : CompressedRows
        The operands.
    params : sequence of Param
        Of the function, without the result.
    members : sequence of Axis
        What is merged.
    how : {"union", "intersect"}
    result : tuple of dtype
        Of the coordinates and of the values.
    """

    def __init__(
        self, rows: CompressedRows, params: list[Any], members: tuple[Axis, ...], how: str, result: tuple[Any, Any]
    ) -> None:
        place = {p.name: n for n, p in enumerate(params)}
        self.matrices = [(name, m, [place[n] for n in m.names], m.sizes) for name, m in rows.matrices.items()]
        self.numbers = [(name, place[name], p.dtype) for name, p in rows.numbers.items()]
        self.count, self.how, self.key = len(params), how, result[0]
        self.rooms = Rooms(result)
        self.empty = {n: tvm.runtime.empty((0,), p.dtype) for n, p in enumerate(params) if p.is_array}
        names = [str(a.indptr.name) for a in members if a.indptr is not None]
        self.pointers = [place[n] for n in names]
        self.length, self.width = self.matrices[0][3][:2]
        inferred = {size for *_, sizes in self.matrices for size in sizes}
        self.given = len(self.matrices) + len(rows.numbers.keys() - inferred)

    @classmethod
    def of(cls, rows: CompressedRows, params: list[Any], members: tuple[Axis, ...], *rest: Any) -> MergedRows | None:
        """Of a program; None if it has other operands, or axes that several of them share."""
        names = [name for matrix in rows.matrices.values() for name in matrix.names]
        shapes = {matrix.sizes[:2] for matrix in rows.matrices.values()}
        is_plain = sorted(names) == sorted(p.name for p in params if p.is_array) and len(rows.matrices) == len(members)
        return cls(rows, params, members, *rest) if is_plain and len(shapes) == 1 else None

    def __call__(self, arguments: Mapping[str, Any], function: Callable[[str], Callable[..., Any]]) -> Any:
        """The result, by a function of some name; None for arguments that are checked and converted first, or wrong."""
        if not checks_are_on() or len(arguments) != self.given:
            return None
        ready: list[Any] = [None] * self.count
        sizes: dict[str, int] = {}
        shape, model = None, None
        for name, matrix, places, symbols in self.matrices:
            value: Any = arguments.get(name)
            arrays = matrix.arrays(value)
            if arrays is None or (shape is not None and value.shape != shape):
                return None
            shape, count = value.shape, len(arrays[0])
            indptr = arrays[1]
            if len(indptr) != shape[0] + 1 or indptr[0] != 0 or indptr[-1] != count:
                return None
            for at, array in zip(places, arrays, strict=True):
                ready[at] = array if len(array) else self.empty[at]
            sizes[symbols[2]] = count
            model = value if model is None else model
        assert shape is not None
        sizes[self.length], sizes[self.width] = shape
        for name, at, dtype in self.numbers:
            number: Any = sizes.get(name, arguments.get(name))
            if not is_number(number, dtype):
                return None
            ready[at] = number
        return self.merged(ready, shape, model, function)

    def merged(self, ready: list[Any], shape: tuple[int, int], model: Any, function: Any) -> Any:
        """The result for a list of arguments that fit."""
        rows = shape[0]
        pointers = [ready[at] for at in self.pointers]
        ranges = merged_ranges(pointers, rows)
        first, total = merged_places(pointers, ranges, self.how)
        room = self.rooms.take(total)
        total = len(room[0])
        indptr = np.zeros(rows + 1, np.int64)
        if total and rows:
            faults = np.empty(len(first), np.int64)
            run = function("alone" if len(first) == 1 else "numeric")
            run(*ready, len(first), ranges, indptr[1:], total, first, *room, faults)
            if np.count_nonzero(faults):
                return None
        keys, values = self.filled(room, close_gaps(indptr, ranges, first, room))
        if len(keys) > LARGEST_INT32:
            keys = keys.astype(np.int64, copy=False)
        kind = sp.csr_matrix if isinstance(model, sp.spmatrix) else sp.csr_array
        return interop.sorted_rows(kind, indptr.astype(keys.dtype, copy=False), keys, values, shape)

    def filled(self, room: tuple[np.ndarray, ...], count: int) -> tuple[np.ndarray, ...]:
        """The part of a room that is filled; the memory behind it is given back unless it is little."""
        if count * 2 < len(room[0]) or count * self.rooms.item < LEAST_ROOM:
            for array in room:
                array.resize(count, refcheck=False)
            return room
        found = tuple([array[:count] for array in room])
        self.rooms.keep(room)  # once there is a view of it: another thread takes it otherwise
        return found


def close_gaps(indptr: np.ndarray, ranges: np.ndarray, first: np.ndarray, room: tuple[np.ndarray, ...]) -> int:
    """Move the entries of all chunks together, and say how many there are."""
    if len(first) == 1:
        return int(indptr[-1])
    filled = 0
    for source, begin, end in zip(first.tolist(), ranges[:-1].tolist(), ranges[1:].tolist(), strict=True):
        if end == begin:
            continue
        count = int(indptr[end]) - source
        if source != filled:
            indptr[begin + 1 : end + 1] += filled - source
            for array in room:
                moved(array, source, filled, count)
        filled += count
    return filled


__all__ = ["MergedRows"]
