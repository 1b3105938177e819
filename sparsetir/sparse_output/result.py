# SPDX-License-Identifier: Apache-2.0
"""Results with a computed pattern: selection, row orders, pattern caches, and conversion to operands' classes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import scipy.sparse as sp

from sparsetir import interop
from sparsetir.errors import ArgumentError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.ir.views import Axis, Program
from sparsetir.runtime.signature import LARGEST_INT32, Arguments, numpy_dtype
from sparsetir.utils.arguments import as_index, as_real, shown

# Arguments of a selection: how many entries of a row are kept, and above which value, as the functions take it.


LARGEST_INT64 = 2**63 - 1


def top_of(top: Any) -> int | None:
    """Convert `top`, the number of entries of a row that are kept; None keeps all."""
    number = as_index(top)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ArgumentError(f"top is how many entries of a row are kept, at least 1, got {shown(top)}")
    return None if number is None else min(number, LARGEST_INT64)


def least_of(threshold: Any, dtype: str) -> Any:
    """Return the least value above a number, or the least of all; NaN, which no value reaches, if none is above it."""
    kind = numpy_dtype(dtype)
    threshold = threshold if threshold is None else as_real(threshold, "threshold")
    if kind.kind in "fV":
        least = -np.inf if threshold is None else float(np.nextafter(kind.type(threshold), kind.type(np.inf)))
        return least if threshold != np.inf else np.nan
    low, high = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if threshold is None or threshold < low:
        return low
    if not threshold < high:
        raise ArgumentError(
            f"threshold: expected less than the largest {dtype}, {high}, got {shown(threshold)}. Pass a smaller one."
        )
    least = int(np.floor(threshold)) + 1
    return least if least <= LARGEST_INT64 else least - 2**64  # the functions take the bits of an int64


# Row orders in which a computed pattern is determined: which rows are computed, and in what order.


HASHES = 3  # rows count as similar if their least columns, in the orders of so many hash functions, are equal
SPREAD = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)


def rows_axis(program: Program, row: Axis) -> Axis | None:
    """Return the first compressed axis below the rows, or None."""
    below = (a for a in program.axes.values() if a.parent is row and a.kind == "sparse_variable" and a.rule is None)
    return next((a for a in below if a.indptr is not None and a.indices is not None), None)


class RowOrders:
    """Row orders of a program's calls, with a cache of those of the last patterns.

    Parameters
    ----------
    order : str
        One of `ORDERS`, but for the first.
    axis : Axis or None
        The axis whose patterns decide which rows are similar.
    """

    def __init__(self, order: str, axis: Axis | None) -> None:
        self.order = order
        arrays = () if axis is None else (axis.indptr, axis.indices)
        self.names = [str(a.name) for a in arrays if a is not None]
        self.cache: OfPatterns[np.ndarray] = OfPatterns()

    def of(self, args: Arguments, bound: np.ndarray, columns: int) -> np.ndarray:
        """Return the rows that enter something, in order."""
        if self.order == "nonempty" or not self.names:
            return np.flatnonzero(bound)
        indptr, indices = (args.arrays[name] for name in self.names)
        compute = banded if self.order == "banded" and len(indptr) == columns + 1 else clustered
        order = self.cache.get((columns,), (indptr, indices), lambda: compute(indptr, indices, columns))
        return order if bound.all() else order[bound[order] > 0]


def clustered(indptr: np.ndarray, indices: np.ndarray, columns: int) -> np.ndarray:
    """Return an order that clusters rows with common columns, by the least hashes of their columns.

    Two rows share the least hash with a probability of the Jaccard similarity of their columns (Broder 1997).
    """
    is_nonempty = np.diff(indptr) > 0
    nonempty = np.flatnonzero(is_nonempty)
    if not len(nonempty):
        return np.arange(len(is_nonempty))
    keys = [np.minimum.reduceat(_hashed(indices, n), indptr[nonempty]) for n in range(HASHES)]
    return np.concatenate([nonempty[np.lexsort(keys[::-1])], np.flatnonzero(~is_nonempty)])


def banded(indptr: np.ndarray, indices: np.ndarray, columns: int) -> np.ndarray:
    """Return the order that makes the band around the diagonal narrow (reverse Cuthill-McKee)."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # brings scipy.linalg, which few calls need

    if not len(indices):  # scipy does not take matrices of no rows
        return np.arange(len(indptr) - 1)
    pattern = sp.csr_array((np.ones(len(indices), np.bool_), indices, indptr), shape=(len(indptr) - 1, columns))
    return reverse_cuthill_mckee(sp.csr_matrix(pattern), symmetric_mode=False).astype(np.int64)


def _hashed(indices: np.ndarray, number: int) -> np.ndarray:
    """Return pseudorandom hashes of the columns."""
    mixed = indices.astype(np.uint32) * np.uint32(SPREAD[number])
    return mixed ^ (mixed >> np.uint32(15))


# Cached results of analyses of the last patterns, for later calls with the same patterns.


MOST_KEPT = 4
Value = TypeVar("Value")


@dataclass(frozen=True)
class Known(Generic[Value]):
    """A result for a pattern, with copies of the pattern's arrays, as those may change."""

    about: Hashable
    arrays: tuple[np.ndarray, ...]
    value: Value

    def is_of(self, about: Hashable, arrays: tuple[np.ndarray, ...]) -> bool:
        """Return whether this is the result for a pattern."""
        return self.about == about and all(map(np.array_equal, self.arrays, arrays))


class OfPatterns(Generic[Value]):
    """Cache of the results for the last patterns.

    Arrays are compared element by element, which is faster than a checksum: nearly all different ones differ early.
    """

    def __init__(self) -> None:
        self.entries: list[Known[Value]] = []

    def get(self, about: Hashable, arrays: tuple[np.ndarray, ...], compute: Callable[[], Value]) -> Value:
        """Return the result for a pattern, computed by `compute` if the pattern is new."""
        entry = next((k for k in self.entries if k.is_of(about, arrays)), None)
        if entry is None:
            entry = Known(about, tuple(a.copy() for a in arrays), compute())
            self.entries = [entry, *self.entries[: MOST_KEPT - 1]]  # one step: another thread sees either list
        return entry.value


# Results with a computed pattern, as objects of an operand's class.


BLOCK = 1 << 14  # elements whose coordinates are computed at a time


@dataclass
class ResultPattern:
    """Entries in order: those of row i are ``indptr[i]`` to ``indptr[i + 1]``.

    Parameters
    ----------
    shape : tuple of int
    indptr : ndarray of int64
    keys : ndarray of int
        Coordinates below the row; of several axes one number.
    values : list of ndarray
        One array for each result; of results with dense axes behind the computed ones a row for each coordinate.
    """

    shape: tuple[int, ...]
    indptr: np.ndarray
    keys: np.ndarray
    values: list[np.ndarray]

    def refilled(self, values: list[np.ndarray]) -> ResultPattern:
        """Return this pattern with other values, and a copy of the coordinates."""
        return ResultPattern(self.shape, self.indptr, self.keys.copy(), values)


def as_object(
    pattern: ResultPattern, number: int, model: Any, *, is_last: bool = True, block: tuple[int, ...] = ()
) -> Any:
    """Convert result `number` to the class of `model` if possible; the last result takes the arrays without a copy.

    With a `block` it has dense axes of these lengths behind the computed ones: it becomes a list of its elements, or a
    block matrix if `model` is one.
    """
    if block and sp.issparse(model) and model.format == "bsr" and len(pattern.shape) == len(block) == 2:
        return _blocks(pattern, number, model, block, is_last=is_last)
    if block:
        return _tensor(_spread(pattern, number, block), 0)
    if len(pattern.shape) != 2:
        return _tensor(pattern, number)
    pattern = _by_rows(pattern)
    indptr, indices = _of_one_width(pattern.indptr, pattern.keys)
    if not is_last and indices is pattern.keys:
        indices = indices.copy()
    values = pattern.values[number]
    if interop.is_torch(model):
        return _torch(indptr, indices, values, pattern.shape, model)
    kind = sp.csr_matrix if isinstance(model, sp.spmatrix) else sp.csr_array
    matrix = interop.sorted_rows(kind, indptr, indices, values, pattern.shape)
    if not sp.issparse(model) and interop.is_half(matrix):
        return SparseTensor.from_any(matrix)  # scipy's objects show no floats of 16 bits
    return interop.in_format(matrix, model.format) if sp.issparse(model) and model.format != "csr" else matrix


def _blocks(pattern: ResultPattern, number: int, model: Any, block: tuple[int, ...], *, is_last: bool) -> Any:
    """Convert a result to a block matrix."""
    pattern = _by_rows(pattern)
    indptr, indices = _of_one_width(pattern.indptr, pattern.keys)
    values = pattern.values[number].reshape(-1, *block)
    shape = tuple(n * b for n, b in zip(pattern.shape, block, strict=True))
    kind = sp.bsr_matrix if isinstance(model, sp.spmatrix) else sp.bsr_array
    return kind((values, indices if is_last else indices.copy(), indptr), shape=shape)


def _spread(pattern: ResultPattern, number: int, block: tuple[int, ...]) -> ResultPattern:
    """Convert each element of a block to an entry of its own."""
    count = math.prod(block)
    keys = (pattern.keys.astype(np.int64)[:, None] * count + np.arange(count)).ravel()
    return ResultPattern((*pattern.shape, *block), pattern.indptr * count, keys, [pattern.values[number].reshape(-1)])


def _by_rows(pattern: ResultPattern) -> ResultPattern:
    """Convert a matrix to rows if both of its axes were computed, so that keys hold row and column as one number."""
    m, n = pattern.shape
    if len(pattern.indptr) == m + 1:
        return pattern
    rows, columns = np.divmod(pattern.keys, max(n, 1))
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=m))))
    narrow = np.int32 if max(n, len(rows)) <= LARGEST_INT32 else np.int64
    return ResultPattern(pattern.shape, indptr, columns.astype(narrow), pattern.values)


def _of_one_width(indptr: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert row pointers and coordinates to one dtype: 64 bits if 32 do not count the entries."""
    wide = keys.dtype if len(keys) <= LARGEST_INT32 else np.dtype(np.int64)
    return indptr.astype(wide), keys.astype(wide, copy=False)


def _torch(indptr: np.ndarray, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...], model: Any) -> Any:
    torch = importlib.import_module("torch")
    arrays = (interop.to_torch(a) for a in (indptr, indices, values))
    matrix = torch.sparse_csr_tensor(*arrays, size=shape, check_invariants=False)
    layouts = {torch.sparse_csc: matrix.to_sparse_csc, torch.sparse_coo: matrix.to_sparse_coo}
    convert = layouts.get(model.layout)
    return matrix if convert is None else convert()


def _tensor(pattern: ResultPattern, number: int) -> Any:
    """Convert a result of any other order to a list of entries."""
    has_rows = len(pattern.shape) > 1 and len(pattern.indptr) == pattern.shape[0] + 1
    narrow = np.int32 if max(*pattern.shape, len(pattern.keys)) <= LARGEST_INT32 else np.int64
    coords = np.empty((len(pattern.shape), len(pattern.keys)), narrow)
    if has_rows:
        coords[0] = np.repeat(np.arange(pattern.shape[0], dtype=narrow), np.diff(pattern.indptr))
    write_coordinates(coords, pattern.keys, pattern.shape, int(has_rows))
    return interop.CooTensor(coords, pattern.values[number], pattern.shape)


def write_coordinates(coords: np.ndarray, keys: np.ndarray, shape: Sequence[int], first: int) -> None:
    """Write the coordinates of numbered elements, in all dimensions from the `first` on.

    Blocks of elements bound the memory: quotients and remainders of all would take as much as the coordinates.
    """
    for begin in range(0, len(keys), BLOCK):
        block = slice(begin, begin + BLOCK)
        remaining = keys[block]
        for d in range(len(shape) - 1, first, -1):
            remaining, coords[d, block] = np.divmod(remaining, max(shape[d], 1))
        coords[first, block] = remaining


__all__ = [
    "OfPatterns",
    "ResultPattern",
    "RowOrders",
    "as_object",
    "least_of",
    "rows_axis",
    "top_of",
    "write_coordinates",
]
