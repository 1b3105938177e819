# SPDX-License-Identifier: Apache-2.0
"""The argument that a tensor was made of: its entries put in order, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.format import (
    Array,
    Entries,
)
from sparsetir.interop.arrays import (
    aligned_contiguous,
    are_sorted,
    begins,
    changes,
    counting,
    index_dtype,
    put,
    sorting_order,
    spread,
    take,
    transpose,
)
from sparsetir.interop.levels import first_disorder
from sparsetir.interop.sources import CompressedSource, Coordinates, Source, check_numbers, open_source
from sparsetir.utils.caches import cached_property


@dataclass(frozen=True, eq=False)
class Origin:
    """A source, opened.

    Parameters
    ----------
    source : Source
        Its `rebuild` makes the object that `restore` returns.
    trusted : bool
        Whether the source is known to be sorted and free of duplicates where it is compressed.
    """

    source: Source
    trusted: bool = False

    @property
    def idtype(self) -> str:
        """Index type of the source's own arrays."""
        arrays = self._index_arrays
        return "int64" if any(a.dtype == np.int64 for a in arrays) else "int32"

    @property
    def _index_arrays(self) -> Sequence[Array]:
        if isinstance(self.source, CompressedSource):
            return (self.source.indptr, self.source.indices)
        return self.source.indices if isinstance(self.source, Coordinates) else ()

    @cached_property
    def is_ordered(self) -> bool:
        """Whether the source keeps each fiber in order, nothing twice (of a list: the whole)."""
        if not isinstance(self.source, CompressedSource):
            return are_sorted(self.source.coords(), strict=True)
        return self.trusted or first_disorder(self.source.indices, self.source.indptr, strict=True) is None

    @cached_property
    def entries(self) -> Entries:
        """The entries in order; those with the same coordinates are one."""
        if not self._keeps_order:
            return self._reordered[0]
        if isinstance(self.source, CompressedSource):
            return Entries.of_rows(self.source.shape, self.source.indptr, self.source.indices)
        return Entries(self.source.shape, self.source.coords())

    @cached_property
    def heads(self) -> Array | None:
        """Which of the source's values stands for each entry; None: all in order."""
        if self._keeps_order:
            return None
        _, order, first = self._reordered
        if first is None:
            return order
        return np.flatnonzero(first) if order is None else order[first]

    def slots(self) -> Array:
        """Return `heads` as an array, also where it is None."""
        return counting(self.entries.nnz) if self.heads is None else self.heads

    def values(self) -> Array:
        """Return the value of each entry: a sum where entries had the same coordinates."""
        return self.in_order(self.source.values)

    def in_order(self, values: Array) -> Array:
        """Convert `values` of a source like this one to a value for each entry."""
        values = values.reshape(-1)
        if self._keeps_order:
            return values
        _, order, first = self._reordered
        if order is not None:
            values = take(values, order)
        if first is None:
            return values
        return np.add.reduceat(values, np.flatnonzero(first)).astype(values.dtype, copy=False)

    def give_back(self, values: Array, *, source: Source | None = None) -> Any:
        """Return an object of the source's class with a value for each entry; duplicates become zeros.

        Another `source` that lists the same entries makes the object of its own class and index arrays.
        """
        if self.heads is not None:
            entry_values, values = values, np.zeros(self.source.values.size, values.dtype)
            put(values, self.heads, entry_values)
        source = self.source if source is None else source
        return source.rebuild(values.reshape(source.values.shape), True)

    @property
    def _keeps_order(self) -> bool:
        """Whether the source lists its entries as `entries` does."""
        if isinstance(self.source, CompressedSource) and (self.source.major != 0 or self.source.block):
            return False
        return self.is_ordered

    @cached_property
    def _reordered(self) -> tuple[Entries, Array | None, Array | None]:
        """The entries in order, the permutation that brings them there, and which are the first of their kind."""
        if not isinstance(self.source, CompressedSource) or not _is_dense_enough(self.source):
            return _reorder_list(self.source)
        if self.source.block:
            return _reorder_blocks(self.source, self.is_ordered)
        return _reorder_fibers(self.source, self.is_ordered)


def _is_dense_enough(source: CompressedSource) -> bool:
    """Return whether counting rows and columns costs no more than counting entries."""
    return max(source.shape) <= 4 * source.values.size + (1 << 12)


def _reorder_fibers(source: CompressedSource, is_ordered: bool) -> tuple[Entries, Array, Array | None]:
    """Sort by transposing in linear time: a CSC matrix once, a CSR matrix with unsorted rows twice."""
    indptr, indices, order = source.indptr, source.indices, counting(len(source.indices))
    extents = (source.shape[source.major], source.shape[1 - source.major])
    for _ in range(2 - source.major):
        indptr, indices, order = transpose(indptr, indices, order, extents)
        extents = (extents[1], extents[0])
    if is_ordered:
        return Entries.of_rows(source.shape, indptr, indices), order, None
    first = changes([indices])
    first[indptr[:-1][np.diff(indptr) > 0]] = True
    if first.all():
        return Entries.of_rows(source.shape, indptr, indices), order, None
    kept_before = np.concatenate([[0], np.cumsum(first)]).astype(indptr.dtype)
    return Entries.of_rows(source.shape, kept_before[indptr], indices[first]), order, first


def _reorder_blocks(source: CompressedSource, is_ordered: bool) -> tuple[Entries, Array | None, Array | None]:
    """Sort the blocks, then split them into rows."""
    numbers = counting(len(source.indices))
    grid = CompressedSource(source.grid, numbers, source.rebuild, source.indptr, source.indices, source.major)
    indptr, indices = source.indptr, source.indices
    if source.major or not is_ordered:
        blocks, numbers, repeats = _reorder_fibers(grid, is_ordered)
        if repeats is not None:
            return _reorder_list(source)
        indptr, indices = blocks.indptr, blocks.last
    r, c = source.block
    dtype = index_dtype(max(source.values.size, source.shape[1]))
    blocks_of_row = np.repeat(np.diff(indptr), r)
    starts = begins(blocks_of_row)
    place = spread(np.repeat(indptr[:-1], r), starts, dtype)
    order = numbers.astype(dtype, copy=False)[place] * dtype.type(r)
    order += np.repeat(np.tile(np.arange(r, dtype=dtype), source.grid[0]), blocks_of_row)
    columns = indices.astype(dtype, copy=False)[place]
    entries = Entries.of_rows(source.shape, starts * c, _widened(columns, c))
    return entries, _widened(order, c), None


def _widened(numbers: Array, width: int) -> Array:
    """Return ``number * width`` and the numbers behind it up to the next multiple, for each number."""
    out = np.repeat(numbers * numbers.dtype.type(width), width)
    for k in range(1, width):  # numpy is slow on rows as short as blocks are wide
        out[k::width] += numbers.dtype.type(k)
    return out


def _reorder_list(source: Source) -> tuple[Entries, Array | None, Array | None]:
    coords: Sequence[Array] = source.coords()
    order = sorting_order(coords, source.shape)
    if order is not None:
        coords = [take(c, order) for c in coords]
    first = changes(coords)
    if first.all():
        return Entries(source.shape, coords), order, None
    return Entries(source.shape, [c[first] for c in coords]), order, first


def open_origin(value: Any, *, check: bool) -> Origin:
    """Open a sparse argument of any class.

    Raises
    ------
    ArgumentTypeError
        When the class is not supported, or coordinates are no integers.
    StructureError
        When its index arrays are broken.
    """
    name = f"the {type(value).__name__}"
    source = open_source(value, name)
    if source.values.dtype.kind not in "biufc":
        check_numbers(source.values, name)
    for index in source.indices if isinstance(source, Coordinates) else ():
        if np.asarray(index).dtype.kind not in "iu":
            raise ArgumentTypeError(f"coordinates of {name}: expected integers, got {np.asarray(index).dtype}")
    if not source.shape:
        raise ArgumentError(f"{name} has no dimension, expected at least one")
    if check:
        source.check(name)
    if isinstance(source, Coordinates):
        dtype = value.offsets.dtype if sp.issparse(value) and value.format == "dia" else None
        source = _with_signed_indices(source, dtype)
    return Origin(replace(source, values=aligned_contiguous(source.values)[0]), trusted=not check)


def open_dense(value: Any) -> Origin:
    """Open a dense array of any order: its entries are its nonzero elements.

    Raises
    ------
    ArgumentError
        When the array has no dimension.
    ArgumentTypeError
        When it is no array.
    """
    array = aligned_contiguous(value)[0]
    if array.ndim == 0:
        raise ArgumentError("the array has no dimension, expected at least one")
    coords = tuple(index.astype(index_dtype(max(array.shape))) for index in array.nonzero())

    def rebuild(values: Array, _: bool) -> Array:
        dense = np.zeros(array.shape, values.dtype)
        dense[coords] = values
        return dense

    return Origin(Coordinates(array.shape, array[coords], rebuild, coords))


def _with_signed_indices(source: Coordinates, dtype: np.dtype[Any] | None) -> Coordinates:
    """Convert coordinates to a dtype; by default int32 or int64, since unsigned differences are never negative."""
    if dtype is None:
        if all(i.dtype.name in ("int32", "int64") for i in source.indices):
            return source
        dtype = index_dtype(max(source.shape))
    return replace(source, indices=tuple(np.asarray(i).astype(dtype) for i in source.indices))


__all__ = ["Origin", "open_dense", "open_origin"]
