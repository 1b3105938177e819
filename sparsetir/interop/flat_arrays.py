# SPDX-License-Identifier: Apache-2.0
"""Large arrays moved and sorted in linear time and with little additional memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.interop.levels import Array, first_disorder

CHUNK = 1 << 18  # elements moved at a time: numpy widens a 32-bit index to 64 bits in a copy


def take(values: Array, index: Array) -> Array:
    """Return ``values[index]`` for flat arrays."""
    out = np.empty(len(index), values.dtype)
    for begin in range(0, len(index), CHUNK):
        part = slice(begin, begin + CHUNK)
        out[part] = values[index[part]]
    return out


def put(out: Array, index: Array | slice, values: Array) -> None:
    """Set ``out[index] = values`` for flat arrays."""
    if isinstance(index, slice):
        out[index] = values
        return
    for begin in range(0, len(index), CHUNK):
        part = slice(begin, begin + CHUNK)
        out[index[part]] = values[part]


def begins(counts: Array) -> Array:
    """Return the begin of each of several runs, and the end of the last one."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def index_array(array: Array, idtype: str) -> Array:
    """Convert `array` to the index type; return the same object if it has that type."""
    return np.require(array, idtype, ["C", "A"])


def spread(begin: Array, starts: Array, dtype: str | np.dtype[Any]) -> Array:
    """Return the positions of runs' elements: element k of run r is ``begin[r] + k - starts[r]``.

    Parameters
    ----------
    begin : ndarray of int
        The number of the first element of each run.
    starts : ndarray of int
        Where the runs begin in the result, and where the last one ends.
    dtype : str or dtype
        Of the result.
    """
    counts = np.diff(starts)
    out = np.repeat((begin - starts[:-1]).astype(dtype), counts)
    for first in range(0, len(out), CHUNK):
        part = out[first : first + CHUNK]
        part += np.arange(first, first + len(part), dtype=dtype)
    return out


def index_dtype(size: int) -> np.dtype[Any]:
    """Return the narrower dtype that numbers `size` things."""
    return np.dtype(np.int32 if size <= np.iinfo(np.int32).max else np.int64)


def counting(size: int) -> Array:
    """Return 0, 1, 2 ... in 32 bits where they suffice."""
    return np.arange(size, dtype=index_dtype(size))


def changes(arrays: Sequence[Array]) -> Array:
    """Return where an element of sorted tuples differs from the one before."""
    first = np.zeros(len(arrays[0]), np.bool_)
    first[:1] = True
    for array in arrays:
        first[1:] |= array[1:] != array[:-1]
    return first


def are_sorted(coords: Sequence[Array], *, strict: bool = False) -> bool:
    """Return whether coordinate tuples are in lexicographic order, without repetition if `strict`."""
    if len(coords) == 1:
        return first_disorder(coords[0], None, strict=strict) is None
    for begin in range(0, len(coords[0]), CHUNK):
        part = [c[begin : begin + CHUNK + 1] for c in coords]
        tied = np.ones(max(len(part[0]) - 1, 0), np.bool_)
        for index in part:
            if np.any(tied & (index[1:] < index[:-1])):
                return False
            tied &= index[1:] == index[:-1]
        if strict and tied.any():
            return False
    return True


def sorting_order(coords: Sequence[Array], extents: Sequence[int]) -> Array | None:
    """Return the stable permutation that sorts coordinate tuples, None if they are sorted.

    Parameters
    ----------
    coords : sequence of ndarray of int
        The first one weighs most.
    extents : sequence of int
        Each coordinate lies in ``[0, extent)``.
    """
    if are_sorted(coords):
        return None
    order = None
    for index, extent in zip(reversed(coords), reversed(extents), strict=True):
        key = index if order is None else take(index, order)
        if first_disorder(key, None, strict=False) is None:
            continue
        step = stable_argsort(key, extent)
        order = step if order is None else take(order, step)
    return order


def stable_argsort(key: Array, extent: int) -> Array:
    """Return the stable permutation that sorts numbers of ``[0, extent)``."""
    if key.size < 1 << 12 or extent > 4 * key.size:
        return np.argsort(key, kind="stable").astype(index_dtype(key.size))
    # one row turned into columns: scipy transposes by counting
    ends = np.array([0, key.size], index_dtype(key.size))
    row = sp.csr_array((counting(key.size), key.astype(ends.dtype, copy=False), ends), shape=(1, extent))
    return np.asarray(row.tocsc().data)


def transpose(indptr: Array, indices: Array, data: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Return a matrix by its columns instead of by its rows, each column sorted, in linear time.

    Returns
    -------
    indptr, indices, data : ndarray
        Entries of one row and column keep their order.
    """
    bits = data if data.dtype.itemsize > 8 else data.view(f"i{data.dtype.itemsize}")  # scipy moves no 16-bit floats
    columns = sp.csr_array((bits, indices, indptr), shape=shape).tocsc()
    return columns.indptr, columns.indices, columns.data.view(data.dtype)


__all__ = [
    "CHUNK",
    "are_sorted",
    "begins",
    "changes",
    "counting",
    "index_array",
    "index_dtype",
    "put",
    "sorting_order",
    "spread",
    "stable_argsort",
    "take",
    "transpose",
]
