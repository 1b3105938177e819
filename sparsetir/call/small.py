# SPDX-License-Identifier: Apache-2.0
"""Products of little work: one compiled function looks at the operands and computes the result, with little around it.

A thread of its own would cost more than it does, and so would arrays that are made for every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm
import tvm_ffi

from sparsetir import alignment, interop
from sparsetir.assemble import Assembly, Options
from sparsetir.assemble.accumulators import DUMPS, WORD
from sparsetir.assemble.selection import ordered
from sparsetir.assemble.small import unread
from sparsetir.call.arguments import checks_are_on, numpy_dtype
from sparsetir.call.rows import ROWS, CompressedRows
from sparsetir.call.signature import Signature
from sparsetir.call.workspace import full, popped
from sparsetir.sizes import Size
from sparsetir.spare import Rooms
from sparsetir.threads import get_num_threads

MOST_ENTERED = 1 << 18  # coordinates, repeated ones included, that are entered at once
MOST_STORED = 1 << 20  # rows and entries of all operands, which one thread looks at
SHARED_WORK = 1 << 12  # coordinates from which on several threads are sooner done
ROWS_FOR_ONE = 2  # that take as long as a coordinate
MOST_COLUMNS = 1 << 18
LEAST_COLUMNS = 1 << 12
LINE = 8  # words of a cache line


def limits() -> tuple[int, int]:
    """How many coordinates a small product enters at most, and how many rows and entries its operands have."""
    return MOST_ENTERED, MOST_STORED


def function_for(matrices: Sequence[Any]) -> str:
    """Which function makes a product of scipy's matrices at once, by the mean length of rows; "" if it is much work."""
    if not all(type(value) in ROWS for value in matrices):
        return ""
    counts, (most, stored) = [len(value.indices) for value in matrices], limits()
    rows, entered = math.prod(value.shape[0] for value in matrices[1:]), math.prod(counts)
    if sum(counts) > stored or entered > most * rows:
        return ""
    is_little = entered / max(rows, 1) + matrices[0].shape[0] / ROWS_FOR_ONE <= SHARED_WORK
    return "small" if is_little or get_num_threads() == 1 else "shared"


@dataclass
class Operand:
    """A matrix, and where its arrays stand among the parameters; values that nobody reads stand nowhere.

    Parameters
    ----------
    name : str
    sizes : tuple of str
        Symbols of the rows, the columns and the number of entries.
    places : tuple of int or None
        Of values, row pointers and column indices.
    dtypes : tuple of dtype
        Theirs.
    """

    name: str
    sizes: tuple[str, str, str]
    places: tuple[int | None, ...]
    dtypes: tuple[np.dtype[Any], ...]

    def take(self, value: Any, ready: list[Any], sizes: dict[str, int]) -> int:
        """Note the arrays of a matrix, and say how many rows and entries it has; -1 if it does not fit."""
        if type(value) not in ROWS or len(value.shape) != 2:
            return -1
        rows, columns = value.shape
        count = len(value.indices)
        arrays, lengths = (value.data, value.indptr, value.indices), (count, rows + 1, count)
        for at, dtype, array, length in zip(self.places, self.dtypes, arrays, lengths, strict=True):
            if at is None:
                continue
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != (length,):
                return -1
            if not array.flags.carray:
                return -1
            ready[at] = array
        for name, size in zip(self.sizes, (rows, columns, count), strict=True):
            if sizes.setdefault(name, size) != size:
                return -1
        return int(rows + count)


@dataclass
class Room:
    """Accumulators, empty between calls, and room for the entries; `passed` is what the function takes of it."""

    columns: int
    chunks: int
    keys: np.ndarray
    values: np.ndarray
    passed: list[Any]
    heap: Any
    split: list[np.ndarray]

    def copy_to(self, made: Sequence[np.ndarray]) -> None:
        """Copy the coordinates and values that were written to arrays for so many."""
        filled, count = 0, len(made[0])
        spans = zip(self.split[1].tolist(), self.split[2].tolist(), strict=True) if self.chunks > 1 else [(0, count)]
        for first, end in spans:
            after = min(filled + end - first, count)
            for source, target in zip((self.keys, self.values), made, strict=True):
                target[filled:after] = source[first : first + after - filled]
            filled = after


class SmallCalls:
    """Calls of a program over scipy's matrices with one result, while they are small.

    Parameters
    ----------
    assembly : Assembly
    options : Options
    signature : Signature
    operands : list of Operand
        Filters are among them.
    """

    def __init__(self, assembly: Assembly, options: Options, signature: Signature, operands: list[Operand]) -> None:
        self.assembly, self.options, self.operands = assembly, options, operands
        params = _params(assembly, signature)
        self.numbers = [(at, p.name) for at, p in enumerate(params) if not p.is_array]
        self.count = len(params)
        filters = {str(b.name) for b in assembly.source.buffers.values() if b.axes[-1] in assembly.filters}
        self.factors = [o.name for o in operands if o.name not in filters]
        self.empty = {at: tvm.runtime.empty((0,), p.dtype) for at, p in enumerate(params) if p.is_array}
        self.rows, self.columns = (str(Size(a.length).name) for a in (assembly.rows[0], assembly.axes[0]))
        self.is_stamped = options.stamps(has_mask=assembly.mask is not None)
        self.key = np.dtype(assembly.key_dtype)
        self.spare: list[Room] = []
        self.rooms = Rooms((self.key, numpy_dtype(assembly.results[0].dtype)))

    @classmethod
    def of(cls, assembly: Assembly, options: Options, signature: Signature, rows: CompressedRows) -> SmallCalls | None:
        """Of a program; None if it has other operands or several results, or collects its rows otherwise."""
        accumulators, results = options.accumulators, assembly.results
        if assembly.merge is not None or len(results) > 1 or results[0].inner or results[0].dtype == "bfloat16":
            return None
        is_usual = accumulators.kind == "both" and not accumulators.counted and not options.orders(assembly)
        params = _params(assembly, signature)
        place = {p.name: at for at, p in enumerate(params)}
        operands = [Operand(name, m.sizes, (*map(place.get, m.names),), m.dtypes) for name, m in rows.matrices.items()]
        names = {n for m in rows.matrices.values() for n in m.names}
        known = {n for m in rows.matrices.values() for n in m.sizes}
        is_whole = all((p.name in names) if p.is_array else (p.name in known) for p in params)
        shape = [Size(a.length).name for a in (*assembly.rows, *assembly.axes)]
        is_matrix = len(shape) == 2 and len(assembly.axes) == 1 and all(name in known for name in shape)
        if not (is_usual and not options.whole and is_whole and is_matrix):
            return None
        return cls(assembly, options, signature, operands)

    def __call__(
        self, by: str, arguments: Mapping[str, Any], function: Callable[[str], Callable[..., Any]], *selected: Any
    ) -> Any:
        """The result by one of the functions; None for arguments that are converted first, or wrong, or too much."""
        if not checks_are_on():
            return None
        ready: list[Any] = [None] * self.count
        sizes: dict[str, int] = {}
        stored = 0
        for operand in self.operands:
            found = operand.take(arguments.get(operand.name), ready, sizes)
            if found < 0:
                return None
            stored += found
        rows, columns = sizes[self.rows], sizes[self.columns]
        most, most_stored = limits()
        if stored > most_stored or columns > MOST_COLUMNS:
            return None
        for at, empty in self.empty.items():
            if not len(ready[at]):
                ready[at] = empty
        for at, name in self.numbers:
            ready[at] = sizes[name]
        room = self.room(columns, most, max(1, min(get_num_threads(), rows)) if by == "shared" else 1)
        indptr, chunks = np.empty(rows + 1, self.key), [room.chunks, *room.split] if by == "shared" else []
        function(by)(*ready, *chunks, len(room.keys), indptr, *room.passed, *self.chosen(room, *selected))
        keys, values = made = self.memory(0 if indptr.item(0) else indptr.item(rows))
        room.copy_to(made)
        if not self.spare:
            self.spare.append(room)  # of which nothing is read any more: another thread takes it
        if indptr.item(0):
            return None
        model = next(iter(arguments.values()))
        kind = sp.csr_matrix if isinstance(model, sp.spmatrix) else sp.csr_array
        return interop.sorted_rows(kind, indptr, keys, values, (rows, columns))

    def function_for(self, arguments: Mapping[str, Any]) -> str:
        """Which function makes the call; "" if these are other arguments, or much work."""
        if len(arguments) != len(self.operands) or not all(name in arguments for name in self.factors):
            return ""
        return function_for([arguments[name] for name in self.factors])

    def memory(self, count: int) -> list[np.ndarray]:
        """Memory for so many coordinates and values of a result."""
        found = self.rooms.take(count)
        made = [array[:count] for array in found]
        self.rooms.keep(found)  # once there is a view of it: another thread takes it otherwise
        return made

    def chosen(self, room: Room, top: int | None = None, least: Any = None) -> list[Any]:
        """What the choice of the largest entries takes."""
        if room.heap is None:
            return []
        most = len(room.keys)
        return [most if top is None else min(top, most), least, room.heap]

    def room(self, columns: int, entries: int, chunks: int) -> Room:
        """That of an earlier call, or a new one."""
        for room in popped(self.spare):
            if columns <= room.columns and (entries, chunks) == (len(room.keys), room.chunks):
                return room
        return self.made(max(LEAST_COLUMNS, 1 << (columns - 1).bit_length()), entries, chunks)

    def made(self, columns: int, entries: int, chunks: int) -> Room:
        """Room for rows with so many columns, a power of two, for so many entries, and for so many chunks."""
        result = self.assembly.results[0]
        keys = alignment.empty((entries,), self.key)
        values = alignment.empty((entries,), numpy_dtype(result.dtype))
        held, initial = np.dtype(numpy_dtype(result.held_dtype)), result.initial.value
        words = columns // WORD
        tops = max(words // WORD, LINE)  # those of two threads in one line of the cache would wait for each other
        if self.is_stamped:
            shape = (chunks, columns + DUMPS)
            places = np.empty((chunks, columns), np.int32)
            places[:] = np.bitwise_and(np.arange(columns, dtype=np.int32), DUMPS - 1)
            arrays = [full(shape, held, initial), full(shape, np.dtype(np.uint8), 0), places]
            work = [shape[1], columns, *map(tvm_ffi.from_dlpack, arrays)]
        else:
            arrays = [full((chunks, columns), held, initial)]
            arrays += [full((chunks, n), np.dtype(np.int64), 0) for n in (words, tops)]
            masks = [full((chunks, words), np.dtype(np.int64), 0) for _ in self.assembly.filters]
            work = [columns, words, tops, *map(tvm_ffi.from_dlpack, arrays)]
            work += [words, *map(tvm_ffi.from_dlpack, masks)] if masks else []
        heap = None
        if self.options.select:
            heap = tvm_ffi.from_dlpack(np.empty((chunks, entries), numpy_dtype(ordered(result.dtype))))
        split = [np.zeros(chunks + 1, np.int64), *np.zeros((2, chunks), np.int64)]
        return Room(columns, chunks, keys, values, [*map(tvm_ffi.from_dlpack, (keys, values)), *work], heap, split)


def _params(assembly: Assembly, signature: Signature) -> list[Any]:
    """The parameters of the program that the function takes."""
    left_out = unread(assembly) | {r.storage for r in assembly.results}
    return [p for p in signature.params if p.name not in left_out]


__all__ = ["SmallCalls", "function_for", "limits"]
