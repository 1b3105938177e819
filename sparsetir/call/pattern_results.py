# SPDX-License-Identifier: Apache-2.0
"""Results with a pattern of their own, as objects of the class that an operand has."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import interop
from sparsetir.call.arguments import LARGEST_INT32
from sparsetir.formats.tensor import SparseTensor

BLOCK = 1 << 14  # elements whose coordinates are computed at a time


@dataclass
class Pattern:
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

    def refilled(self, values: list[np.ndarray]) -> Pattern:
        """The same with other values, and coordinates of its own."""
        return Pattern(self.shape, self.indptr, self.keys.copy(), values)


def as_object(pattern: Pattern, number: int, model: Any, *, is_last: bool = True, block: tuple[int, ...] = ()) -> Any:
    """Result `number`, in the class of `model` where that holds such a result; the last one takes the arrays.

    With a `block` it has dense axes of these lengths behind the computed ones: it is a list of its elements, or, where
    `model` is one, a matrix of blocks.
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
    made = _scipy(indptr, indices, values, pattern.shape, is_matrix=isinstance(model, sp.spmatrix))
    if not sp.issparse(model) and interop.is_half(made):
        return SparseTensor.from_any(made)  # scipy's objects show no floats of 16 bits
    return interop.in_format(made, model.format) if sp.issparse(model) and model.format != "csr" else made


def _blocks(pattern: Pattern, number: int, model: Any, block: tuple[int, ...], *, is_last: bool) -> Any:
    """A matrix of blocks."""
    pattern = _by_rows(pattern)
    indptr, indices = _of_one_width(pattern.indptr, pattern.keys)
    values = pattern.values[number].reshape(-1, *block)
    shape = tuple(n * b for n, b in zip(pattern.shape, block, strict=True))
    kind = sp.bsr_matrix if isinstance(model, sp.spmatrix) else sp.bsr_array
    return kind((values, indices if is_last else indices.copy(), indptr), shape=shape)


def _spread(pattern: Pattern, number: int, block: tuple[int, ...]) -> Pattern:
    """Each element of a block as an entry of its own."""
    count = math.prod(block)
    keys = (pattern.keys.astype(np.int64)[:, None] * count + np.arange(count)).ravel()
    return Pattern((*pattern.shape, *block), pattern.indptr * count, keys, [pattern.values[number].reshape(-1)])


def _by_rows(pattern: Pattern) -> Pattern:
    """A matrix in rows, also where both of its axes were computed: row and column are one number then."""
    m, n = pattern.shape
    if len(pattern.indptr) == m + 1:
        return pattern
    rows, columns = np.divmod(pattern.keys, max(n, 1))
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=m))))
    narrow = np.int32 if max(n, len(rows)) <= LARGEST_INT32 else np.int64
    return Pattern(pattern.shape, indptr, columns.astype(narrow), pattern.values)


def _of_one_width(indptr: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row pointers and coordinates of one dtype: 64 bits where 32 do not count the entries."""
    wide = keys.dtype if len(keys) <= LARGEST_INT32 else np.dtype(np.int64)
    return indptr.astype(wide), keys.astype(wide, copy=False)


def _scipy(
    indptr: np.ndarray, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...], *, is_matrix: bool
) -> Any:
    """A CSR object around the arrays, without the checks that scipy makes of arrays from elsewhere."""
    return interop.sorted_rows(sp.csr_matrix if is_matrix else sp.csr_array, indptr, indices, values, shape)


def _torch(indptr: np.ndarray, indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...], model: Any) -> Any:
    torch = importlib.import_module("torch")
    arrays = (interop.to_torch(a) for a in (indptr, indices, values))
    made = torch.sparse_csr_tensor(*arrays, size=shape, check_invariants=False)
    layouts = {torch.sparse_csc: made.to_sparse_csc, torch.sparse_coo: made.to_sparse_coo}
    convert = layouts.get(model.layout)
    return made if convert is None else convert()


def _tensor(pattern: Pattern, number: int) -> Any:
    """A tensor of another order, as a list of entries."""
    has_rows = len(pattern.shape) > 1 and len(pattern.indptr) == pattern.shape[0] + 1
    narrow = np.int32 if max(*pattern.shape, len(pattern.keys)) <= LARGEST_INT32 else np.int64
    coords = np.empty((len(pattern.shape), len(pattern.keys)), narrow)
    if has_rows:
        coords[0] = np.repeat(np.arange(pattern.shape[0], dtype=narrow), np.diff(pattern.indptr))
    write_coordinates(coords, pattern.keys, pattern.shape, int(has_rows))
    return interop.CooTensor(coords, pattern.values[number], pattern.shape)


def write_coordinates(coords: np.ndarray, keys: np.ndarray, shape: Sequence[int], first: int) -> None:
    """Write the coordinates of numbered elements, in all dimensions from the `first` on.

    A block of elements at a time: quotients and remainders of all would take as much memory as the coordinates.
    """
    for begin in range(0, len(keys), BLOCK):
        block = slice(begin, begin + BLOCK)
        left = keys[block]
        for d in range(len(shape) - 1, first, -1):
            left, coords[d, block] = np.divmod(left, max(shape[d], 1))
        coords[first, block] = left


__all__ = ["Pattern", "as_object", "write_coordinates"]
