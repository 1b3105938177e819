# SPDX-License-Identifier: Apache-2.0
"""Call fast paths: products, sums and elementwise products of operands in compressed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm
import tvm_ffi

from sparsetir import interop
from sparsetir.ir.sizes import Size
from sparsetir.ir.views import Axis, SparseBuffer
from sparsetir.runtime.signature import LARGEST_INT32, Arguments, Signature, checks_are_on, numpy_dtype
from sparsetir.runtime.validation import is_sound
from sparsetir.sparse_output import AccumulatorOptions, AssembledProgram
from sparsetir.sparse_output.accumulators import DUMPS, WORD
from sparsetir.sparse_output.selection import ordered
from sparsetir.sparse_output.small import unread
from sparsetir.sparse_output.workspace import chunk_parts, full, merged_places, merged_ranges, popped, without_gaps
from sparsetir.utils import buffers
from sparsetir.utils.arguments import is_integer
from sparsetir.utils.buffers import LEAST_ROOM, BufferPool
from sparsetir.utils.threads import get_num_threads

# Matrices in the program's storage: bound without the conversions and checks of other arguments.


ROWS = (sp.csr_array, sp.csr_matrix)


@dataclass(frozen=True)
class MatrixParams:
    """A buffer over dense rows with sparse columns, and the requirements of arguments that fill it without conversion.

    Parameters
    ----------
    names : tuple of str
        The parameters of values, row pointers and column indices.
    dtypes : tuple of dtype
        The dtypes of these arrays.
    sizes : tuple of str
        Symbols of the rows, the columns and the number of entries.
    level : Level
        The axis of the columns.
    """

    names: tuple[str, str, str]
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]
    sizes: tuple[str, str, str]
    level: interop.Level

    def arrays(self, value: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return values, row pointers and column indices of a matrix that fills the buffer as it is, or None."""
        if type(value) not in ROWS:
            return None
        arrays: Any = value.data, value.indptr, value.indices
        for array, dtype in zip(arrays, self.dtypes, strict=True):
            if array.dtype != dtype or array.ndim != 1:
                return None
        if not all(type(array) is np.ndarray and array.flags.carray for array in arrays):
            arrays = tuple(map(interop.passable, arrays))
            if any(array is None for array in arrays):
                return None
        shape, count = value.shape, len(arrays[0])
        if len(shape) != 2 or len(arrays[2]) != count or max(*shape, count) > LARGEST_INT32:
            return None
        return arrays

    def take(self, args: Arguments, value: Any) -> bool:
        """Store the arrays of a matrix; return whether types and sizes fit. `is_sound` validates index arrays."""
        arrays = self.arrays(value)
        if arrays is None:
            return False
        (rows, columns), count = value.shape, len(arrays[0])
        for name, size in zip(self.sizes, (rows, columns, count), strict=True):
            if args.sizes.setdefault(name, size) != size:
                return False
        args.arrays.update(zip(self.names, arrays, strict=True))
        return True

    @property
    def need_sorted(self) -> bool:
        """Whether rows must be sorted."""
        return self.level.sorted or self.level.unique

    def is_sound(self, value: Any, listed: np.ndarray | None = None) -> bool:
        """Return whether the index arrays of a matrix have the properties of its axis, in all or in the listed rows."""
        rows, columns = value.shape
        return is_sound(
            self.level,
            value.indptr,
            value.indices,
            parent_count=rows,
            length=columns,
            need_sorted=self.need_sorted,
            listed=listed,
        )

    def implies(self, value: Any, other: MatrixParams, candidate: Any) -> bool:
        """Return whether `other` accepts `candidate` if this buffer accepts `value`: they share the index arrays."""
        is_one = (
            value.indptr is candidate.indptr and value.indices is candidate.indices and value.shape == candidate.shape
        )
        own_level, other_level = self.level, other.level
        return is_one and own_level.sorted >= other_level.sorted and own_level.unique >= other_level.unique


def matrix(signature: Signature, buffer: SparseBuffer) -> MatrixParams | None:
    """Return the buffer as a `MatrixParams` if scipy's compressed rows can fill it as they are, else None."""
    if [axis.kind for axis in buffer.axes] != ["dense_fixed", "sparse_variable"] or buffer.dtype == "bfloat16":
        return None
    rows, columns = buffer.axes
    indptr, indices = (str(n) for n in signature.axes_of_array[columns])
    names = str(buffer.storage.name), indptr, indices
    params = [signature.by_name.get(name) for name in names]
    if columns.parent is not rows or columns.rule is not None or any(p is None or not p.shape for p in params):
        return None
    count = signature.by_name[names[0]].shape
    sizes = [signature.length[rows].name, signature.length[columns].name, count[0].name if count else None]
    if any(size is None for size in sizes) or len(set(sizes)) < 3:
        return None
    dtypes = tuple(numpy_dtype(p.dtype) for p in params if p is not None)
    return MatrixParams(names, dtypes, tuple(map(str, sizes)), signature.levels[buffer.name][1])  # type: ignore[arg-type]


class CompressedRows:
    """Binder of calls whose sparse arguments are scipy's compressed rows, in the types of the program."""

    def __init__(self, signature: Signature) -> None:
        matrices = {name: matrix(signature, buffer) for name, buffer in signature.buffers.items()}
        self.matrices = {name: matrix_parts for name, matrix_parts in matrices.items() if matrix_parts is not None}
        self.arrays = [p.name for p in signature.params if p.is_array and p.name not in signature.internal]
        self.numbers = {p.name: p for p in signature.params if not p.is_array}

    def arrays_of(self, matrices: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """Return the arrays of matrices in the program's storage; None for others.

        The index arrays are not validated: compare them with those of a call that was bound.
        """
        result: dict[str, np.ndarray] = {}
        for name, value in matrices.items():
            matrix = self.matrices.get(name)
            arrays = None if matrix is None else matrix.arrays(value)
            if matrix is None or arrays is None:
                return None
            result.update(zip(matrix.names, arrays, strict=True))
        return result

    def bind(self, arguments: Mapping[str, Any], listing: Mapping[str, str] | None = None) -> Arguments | None:
        """Return the arguments of a call; None if they are of another kind or invalid.

        Of a matrix in `listing`, only the rows are read that the column indices of another matrix name.
        """
        args = Arguments()
        pairs: list[tuple[MatrixParams, Any]] = []
        for name, value in arguments.items():
            matrix, number = self.matrices.get(name), self.numbers.get(name)
            if matrix is not None:
                if not matrix.take(args, value):
                    return None
                pairs.append((matrix, value))
            elif number is None or not is_number(value, number.dtype):
                return None
            elif args.sizes.setdefault(name, value) != value:
                return None
        is_whole = all(n in args.arrays for n in self.arrays) and all(n in args.sizes for n in self.numbers)
        return args if is_whole and (not checks_are_on() or self.are_sound(pairs, listing or {})) else None

    def are_sound(self, matched: list[tuple[MatrixParams, Any]], listing: Mapping[str, str]) -> bool:
        """Return whether matrices have the properties that their buffers declare."""
        if not listing:
            return are_sound(matched)
        later = [self.matrices[name] for name in listing]
        if not are_sound([pair for pair in matched if not any(pair[0] is m for m in later)]):
            return False
        values = {id(matrix): value for matrix, value in matched}
        pairs = [(matrix, values[id(self.matrices[by])]) for matrix, by in zip(later, listing.values(), strict=True)]
        return all(matrix.is_sound(values[id(matrix)], by.indices) for matrix, by in pairs)


def are_sound(pairs: list[tuple[MatrixParams, Any]]) -> bool:
    """Return whether matrices have the properties that their buffers declare; shared arrays are validated once."""
    validated: list[tuple[MatrixParams, Any]] = []
    for matrix, value in sorted(pairs, key=lambda pair: not pair[0].need_sorted):
        if any(previous.implies(earlier, matrix, value) for previous, earlier in validated):
            continue
        if not matrix.is_sound(value):
            return False
        validated.append((matrix, value))
    return True


def is_number(value: Any, dtype: str) -> bool:
    """Return whether a number can be passed as it is."""
    if dtype.startswith("int"):
        return is_integer(value) and abs(value) <= np.iinfo(dtype).max
    return dtype.startswith("float") and (type(value) is float or (type(value) is int and abs(value) < 1 << 63))


# Sums and elementwise products of matrices in the program's storage, with little overhead around the loops.
#
# The compiled function validates the rows that it merges, so no separate validation and no cached state are needed.


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
        self, rows: CompressedRows, params: list[Any], members: tuple[Axis, ...], kind: str, result: tuple[Any, Any]
    ) -> None:
        place = {p.name: n for n, p in enumerate(params)}
        self.matrices = [(name, m, [place[n] for n in m.names], m.sizes) for name, m in rows.matrices.items()]
        self.numbers = [(name, place[name], p.dtype) for name, p in rows.numbers.items()]
        self.count, self.how, self.key = len(params), kind, result[0]
        self.rooms = BufferPool(result)
        self.empty = {n: tvm.runtime.empty((0,), p.dtype) for n, p in enumerate(params) if p.is_array}
        names = [str(a.indptr.name) for a in members if a.indptr is not None]
        self.pointers = [place[n] for n in names]
        self.length, self.width = self.matrices[0][3][:2]
        inferred = {size for *_, sizes in self.matrices for size in sizes}
        self.given = len(self.matrices) + len(rows.numbers.keys() - inferred)

    @classmethod
    def of(cls, rows: CompressedRows, params: list[Any], members: tuple[Axis, ...], *result: Any) -> MergedRows | None:
        """Return the calls of a program; None if it has other operands, or axes that several of them share."""
        names = [name for matrix in rows.matrices.values() for name in matrix.names]
        shapes = {matrix.sizes[:2] for matrix in rows.matrices.values()}
        is_plain = sorted(names) == sorted(p.name for p in params if p.is_array) and len(rows.matrices) == len(members)
        return cls(rows, params, members, *result) if is_plain and len(shapes) == 1 else None

    def __call__(self, arguments: Mapping[str, Any], function: Callable[[str], Callable[..., Any]]) -> Any:
        """Compute the result with a named function; return None for invalid arguments, or ones that need conversion."""
        if not checks_are_on() or len(arguments) != self.given:
            return None
        params: list[Any] = [None] * self.count
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
                params[at] = array if len(array) else self.empty[at]
            sizes[symbols[2]] = count
            model = value if model is None else model
        assert shape is not None
        sizes[self.length], sizes[self.width] = shape
        for name, at, dtype in self.numbers:
            number: Any = sizes.get(name, arguments.get(name))
            if not is_number(number, dtype):
                return None
            params[at] = number
        return self.merged(params, shape, model, function)

    def merged(self, params: list[Any], shape: tuple[int, int], model: Any, function: Any) -> Any:
        """Compute the result for a list of arguments that fit."""
        rows = shape[0]
        pointers = [params[at] for at in self.pointers]
        ranges = merged_ranges(pointers, rows)
        first, total = merged_places(pointers, ranges, self.how)
        room = self.rooms.take(total)
        total = len(room[0])
        indptr = np.zeros(rows + 1, np.int64)
        if total and rows:
            faults = np.empty(len(first), np.int64)
            run = function("alone" if len(first) == 1 else "numeric")
            run(*params, len(first), ranges, indptr[1:], total, first, *room, faults)
            if np.count_nonzero(faults):
                return None
        keys, values = self.filled(room, close_gaps(indptr, ranges, first, room))
        if len(keys) > LARGEST_INT32:
            keys = keys.astype(np.int64, copy=False)
        kind = sp.csr_matrix if isinstance(model, sp.spmatrix) else sp.csr_array
        return interop.sorted_rows(kind, indptr.astype(keys.dtype, copy=False), keys, values, shape)

    def filled(self, room: tuple[np.ndarray, ...], count: int) -> tuple[np.ndarray, ...]:
        """Return the filled part of a buffer; the memory behind it is released unless it is little."""
        if count * 2 < len(room[0]) or count * self.rooms.item < LEAST_ROOM:
            for array in room:
                array.resize(count, refcheck=False)
            return room
        return tuple(self.rooms.lend(room, count))


def close_gaps(indptr: np.ndarray, ranges: np.ndarray, first: np.ndarray, room: tuple[np.ndarray, ...]) -> int:
    """Make the entries of all chunks contiguous; return their number."""
    if len(first) > 1:
        parts = chunk_parts(indptr, ranges, first)
        for array in room:
            without_gaps(array, parts)
    return int(indptr[-1])


# Small products: one compiled function validates the operands and computes the result, with little overhead.
#
# Waking a second thread would cost more than the work itself, and so would allocating arrays for every call.


MOST_ENTERED = 1 << 18  # products, repeated coordinates included, of a small call
MOST_STORED = 1 << 20  # rows and entries of all operands, which one thread validates
SHARED_WORK = 1 << 12  # products above which several threads are faster
ROWS_FOR_ONE = 2  # that take as long as a coordinate
MOST_COLUMNS = 1 << 18
LEAST_COLUMNS = 1 << 12
LINE = 8  # words of a cache line


def limits() -> tuple[int, int]:
    """Return the maximum products of a small call, and the maximum rows and entries of its operands."""
    return MOST_ENTERED, MOST_STORED


def function_for(matrices: Sequence[Any]) -> str:
    """Return the name of the function for a small product, by the mean length of rows; "" for large products."""
    (most, stored), total, rows, products = limits(), 0, 1, 1
    for number, value in enumerate(matrices):
        if type(value) not in ROWS:
            return ""
        count = len(value.indices)
        total, products = total + count, products * count
        if number:
            rows *= len(value.indptr) - 1
    if total > stored or products > most * rows:
        return ""
    is_little = products / max(rows, 1) + (len(matrices[0].indptr) - 1) / ROWS_FOR_ONE <= SHARED_WORK
    return "small" if is_little or get_num_threads() == 1 else "shared"


@dataclass
class OperandParams:
    """A matrix, and the positions of its arrays among the parameters; None for values that are not read.

    Parameters
    ----------
    name : str
    sizes : tuple of str
        Symbols of the rows, the columns and the number of entries.
    places : tuple of int or None
        Of values, row pointers and column indices.
    dtypes : tuple of dtype
        The dtypes of these arrays.
    """

    name: str
    sizes: tuple[str, str, str]
    places: tuple[int | None, ...]
    dtypes: tuple[np.dtype[Any], ...]

    def take(self, value: Any, params: list[Any], sizes: dict[str, int]) -> int:
        """Store the arrays of a matrix; return the number of its rows and entries, or -1 if it does not fit."""
        shape: tuple[int, ...] = value.shape if type(value) in ROWS else ()
        if len(shape) != 2:
            return -1
        rows, columns = shape
        count = len(value.indices)
        arrays, lengths = (value.data, value.indptr, value.indices), (count, rows + 1, count)
        for at, dtype, array, length in zip(self.places, self.dtypes, arrays, lengths, strict=True):
            if at is None:
                continue
            if array.dtype != dtype or array.shape != (length,):
                return -1
            if type(array) is not np.ndarray or not array.flags.carray:
                array = interop.passable(array)
                if array is None:
                    return -1
            params[at] = array
        for name, size in zip(self.sizes, (rows, columns, count), strict=True):
            if sizes.setdefault(name, size) != size:
                return -1
        return int(rows + count)


@dataclass
class RowWorkspace:
    """Accumulators, empty between calls, and buffers for the entries; `passed` are the function's arguments."""

    columns: int
    chunks: int
    keys: np.ndarray
    values: np.ndarray
    passed: list[Any]
    heap: Any
    split: list[np.ndarray]

    def copy_to(self, targets: Sequence[np.ndarray]) -> None:
        """Copy the written coordinates and values to arrays for so many."""
        filled, count = 0, len(targets[0])
        spans = zip(self.split[1].tolist(), self.split[2].tolist(), strict=True) if self.chunks > 1 else [(0, count)]
        for first, end in spans:
            after = min(filled + end - first, count)
            for source, target in zip((self.keys, self.values), targets, strict=True):
                target[filled:after] = source[first : first + after - filled]
            filled = after

    def replace(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Write the next entries to other buffers of the same length."""
        self.keys, self.values = keys, values
        self.passed[:2] = map(tvm_ffi.from_dlpack, (keys, values))


class SmallCalls:
    """Small calls of a program over scipy's matrices with one result.

    Parameters
    ----------
    assembly : AssembledProgram
    options : AccumulatorOptions
    signature : Signature
    operands : list of OperandParams
        With the filters.
    """

    def __init__(
        self,
        assembly: AssembledProgram,
        options: AccumulatorOptions,
        signature: Signature,
        operands: list[OperandParams],
    ) -> None:
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
        self.spare: list[RowWorkspace] = []
        self.rooms = BufferPool((self.key, numpy_dtype(assembly.results[0].dtype)))

    @classmethod
    def of(
        cls, assembly: AssembledProgram, options: AccumulatorOptions, signature: Signature, rows: CompressedRows
    ) -> SmallCalls | None:
        """Return the calls of a program; None if it has other operands, several results, or other accumulators."""
        accumulators, results = options.accumulators, assembly.results
        if assembly.merge is not None or len(results) > 1 or results[0].inner or results[0].dtype == "bfloat16":
            return None
        is_usual = accumulators.kind == "both" and not accumulators.counted and not options.orders(assembly)
        params = _params(assembly, signature)
        place = {p.name: at for at, p in enumerate(params)}
        operands = [
            OperandParams(name, m.sizes, (*map(place.get, m.names),), m.dtypes) for name, m in rows.matrices.items()
        ]
        names = {n for m in rows.matrices.values() for n in m.names}
        inferred = {n for m in rows.matrices.values() for n in m.sizes}
        is_whole = all((p.name in names) if p.is_array else (p.name in inferred) for p in params)
        shape = [Size(a.length).name for a in (*assembly.rows, *assembly.axes)]
        is_matrix = len(shape) == 2 and len(assembly.axes) == 1 and all(name in inferred for name in shape)
        if not (is_usual and not options.whole and is_whole and is_matrix):
            return None
        return cls(assembly, options, signature, operands)

    def __call__(
        self, by: str, arguments: Mapping[str, Any], function: Callable[[str], Callable[..., Any]], *selected: Any
    ) -> Any:
        """Compute the result; return None for arguments that are invalid, too large or need conversion."""
        if not checks_are_on():
            return None
        params: list[Any] = [None] * self.count
        sizes: dict[str, int] = {}
        stored = 0
        for operand in self.operands:
            size = operand.take(arguments.get(operand.name), params, sizes)
            if size < 0:
                return None
            stored += size
        rows, columns = sizes[self.rows], sizes[self.columns]
        most, most_stored = limits()
        if stored > most_stored or columns > MOST_COLUMNS:
            return None
        for at, empty in self.empty.items():
            if not len(params[at]):
                params[at] = empty
        for at, name in self.numbers:
            params[at] = sizes[name]
        room = self.room(columns, most, max(1, min(get_num_threads(), rows)) if by == "shared" else 1)
        indptr, chunks = np.empty(rows + 1, self.key), [room.chunks, *room.split] if by == "shared" else []
        largest = self.chosen(room, *selected) if room.heap is not None else ()
        function(by)(*params, *chunks, len(room.keys), indptr, *room.passed, *largest)
        keys, values = self.result(room, 0 if indptr.item(0) else indptr.item(rows))
        if not self.spare:
            self.spare.append(room)  # of which nothing is read any more: another thread takes it
        if indptr.item(0):
            return None
        model = next(iter(arguments.values()))
        kind = sp.csr_matrix if isinstance(model, sp.spmatrix) else sp.csr_array
        return interop.sorted_rows(kind, indptr, keys, values, (rows, columns))

    def function_for(self, arguments: Mapping[str, Any]) -> str:
        """Return the name of the function for a call; "" if the arguments are others or the product is too large."""
        if len(arguments) != len(self.operands) or not all(name in arguments for name in self.factors):
            return ""
        return function_for([arguments[name] for name in self.factors])

    def result(self, room: RowWorkspace, count: int) -> list[np.ndarray]:
        """Return the coordinates and values that were written, in the buffers themselves if they are mostly filled."""
        entries = len(room.keys)
        if room.chunks == 1 and 2 * count >= entries:
            written = self.rooms.lend((room.keys, room.values), count)
            room.replace(*self.rooms.take(entries))
            return written
        if count * self.rooms.item < LEAST_ROOM:
            copies = [np.empty(count, room.keys.dtype), np.empty(count, room.values.dtype)]
        else:
            copies = self.rooms.lend(self.rooms.take(count), count)
        room.copy_to(copies)
        return copies

    def chosen(self, room: RowWorkspace, top: int | None = None, least: Any = None) -> list[Any]:
        """Return the arguments of a selection of the largest entries."""
        most = len(room.keys)
        return [most if top is None else min(top, most), least, room.heap]

    def room(self, columns: int, entries: int, chunks: int) -> RowWorkspace:
        """Return the buffers of an earlier call if they fit, else new ones."""
        for room in popped(self.spare):
            if columns <= room.columns and (entries, chunks) == (len(room.keys), room.chunks):
                return room
        return self.made(max(LEAST_COLUMNS, 1 << (columns - 1).bit_length()), entries, chunks)

    def made(self, columns: int, entries: int, chunks: int) -> RowWorkspace:
        """Allocate buffers for rows with so many columns, a power of two, for so many entries and chunks."""
        result = self.assembly.results[0]
        keys = buffers.empty((entries,), self.key)
        values = buffers.empty((entries,), numpy_dtype(result.dtype))
        element_dtype, initial = np.dtype(numpy_dtype(result.held_dtype)), result.initial.value
        words = columns // WORD
        tops = max(words // WORD, LINE)  # avoids false sharing of a cache line by two threads
        if self.is_stamped:
            shape = (chunks, columns + DUMPS)
            places = np.empty((chunks, columns), np.int32)
            places[:] = np.bitwise_and(np.arange(columns, dtype=np.int32), DUMPS - 1)
            arrays = [full(shape, element_dtype, initial), full(shape, np.dtype(np.uint8), 0), places]
            work = [shape[1], columns, *map(tvm_ffi.from_dlpack, arrays)]
        else:
            arrays = [full((chunks, columns), element_dtype, initial)]
            arrays += [full((chunks, n), np.dtype(np.int64), 0) for n in (words, tops)]
            masks = [full((chunks, words), np.dtype(np.int64), 0) for _ in self.assembly.filters]
            work = [columns, words, tops, *map(tvm_ffi.from_dlpack, arrays)]
            work += [words, *map(tvm_ffi.from_dlpack, masks)] if masks else []
        heap = None
        if self.options.select:
            heap = tvm_ffi.from_dlpack(np.empty((chunks, entries), numpy_dtype(ordered(result.dtype))))
        split = [np.zeros(chunks + 1, np.int64), *np.zeros((2, chunks), np.int64)]
        return RowWorkspace(
            columns, chunks, keys, values, [*map(tvm_ffi.from_dlpack, (keys, values)), *work], heap, split
        )


def _params(assembly: AssembledProgram, signature: Signature) -> list[Any]:
    """Return the parameters of the program that the function takes."""
    left_out = unread(assembly) | {r.storage for r in assembly.results}
    return [p for p in signature.params if p.name not in left_out]


__all__ = ["ROWS", "CompressedRows", "MergedRows", "SmallCalls", "function_for", "is_number", "limits"]
