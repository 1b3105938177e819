# SPDX-License-Identifier: Apache-2.0
"""Helpers of the packers of padded and partitioned layouts: runs of entries and padded fibers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from sparsetir.formats.format import CHUNK, Array, Entries, index_dtype, take


def row_chunks(indptr: Array, step: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that begin at a multiple of `step` and hold about as many entries as are moved at a time.

    Rows behind the last entry may be left out.
    """
    rows, nnz = len(indptr) - 1, int(indptr[-1])
    edges = np.append(indptr[:-1:step], indptr[-1])
    cuts = np.searchsorted(edges, np.arange(0, nnz, CHUNK).astype(edges.dtype))
    for begin, end in pairwise(np.unique(np.append(cuts, len(edges) - 1 if nnz else [])).astype(int)):
        yield int(begin) * step, min(int(end) * step, rows)


def row_numbers(indptr: Array) -> Iterator[tuple[slice, Array]]:
    """Yield chunks of the entries, each with the row of every entry in it."""
    nnz = int(indptr[-1])
    for begin in range(0, nnz, CHUNK):
        end = min(begin + CHUNK, nnz)
        first = int(np.searchsorted(indptr, indptr.dtype.type(begin), side="right")) - 1
        last = int(np.searchsorted(indptr, indptr.dtype.type(end)))
        edges = np.clip(indptr[first : last + 1], begin, end)
        yield slice(begin, end), np.repeat(np.arange(first, last), np.diff(edges))


def choose(mask: Array, indptr: Array) -> tuple[Array, Array]:
    """Return the indices of the entries that `mask` selects, and the row pointers of these entries."""
    index = np.empty(np.count_nonzero(mask), index_dtype(len(mask)))
    starts, done = np.empty_like(indptr), 0
    for first in range(0, len(mask), CHUNK):
        part = mask[first : first + CHUNK]
        selected = np.flatnonzero(part)
        np.add(selected, first, out=index[done : done + len(selected)], casting="same_kind")
        low, high = np.searchsorted(indptr, np.array([first, first + len(part)], indptr.dtype))
        before = np.cumsum(part, dtype=indptr.dtype)
        before += indptr.dtype.type(done) - part
        starts[low:high] = before[indptr[low:high] - first]
        done += len(selected)
    starts[np.searchsorted(indptr, indptr.dtype.type(len(mask))) :] = done
    return index, starts


def subset(entries: Entries, mask: Array) -> tuple[Entries, Array | None]:
    """Return the entries that `mask` selects, and their indices in `entries` (None if it selects all)."""
    if mask.all():
        return entries, None
    index, indptr = choose(mask, entries.indptr)
    return Entries.of_rows(entries.shape, indptr, take(entries.last, index)), index


def strided(begin: Array, starts: Array, step: int, count: int) -> Array:
    """Return the slots of runs: element k of run r is at ``begin[r] + step * (k - starts[r])``, all below `count`."""
    dtype = index_dtype(count)
    # differences may leave the dtype, but wrap around to where they belong
    shift = begin - step * starts[:-1].astype(np.int64)
    out = np.repeat(shift.astype(dtype), np.diff(starts))
    for first in range(0, len(out), CHUNK):
        part = out[first : first + CHUNK]
        part += (step * np.arange(first, first + len(part))).astype(dtype)
    return out


def padded(count: int, absent: int, idtype: str, slots: Array, columns: Array, entries: Array | None = None) -> Array:
    """Return `count` indices that are `absent` except at `slots`, which hold the columns (of these entries)."""
    out = np.full(count, absent, idtype)
    for begin in range(0, len(slots), CHUNK):
        part = slice(begin, begin + CHUNK)
        out[slots[part]] = columns[part] if entries is None else columns[entries[part]]
    return out


def lengths_of(entries: Entries) -> Array:
    """Return the number of entries of each row."""
    return np.diff(entries.indptr).astype(np.int64, copy=False)


__all__ = ["choose", "lengths_of", "padded", "row_chunks", "row_numbers", "strided", "subset"]
