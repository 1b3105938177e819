# SPDX-License-Identifier: Apache-2.0
"""Layouts of matrices by diagonals; diagonal d holds the entries (i, i + d)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, StructureError
from sparsetir.formats.base import Estimate, FormatRewriteRule
from sparsetir.formats.blocks import number_blocks
from sparsetir.formats.compressed import SinglePieceFormat
from sparsetir.formats.format import (
    Array,
    Entries,
    Packed,
    register,
    row_chunks,
    row_numbers,
    subset,
)
from sparsetir.interop.arrays import begins, index_dtype
from sparsetir.utils.arguments import is_integer, shown
from sparsetir.utils.memory import check_memory

SAMPLE = 1 << 18  # entries that are sampled for a pattern's statistics
MIX = 0x9E3779B1  # factor of a hash of 32 bits


@register("dia")
@dataclass(frozen=True, repr=False)
class DIA(SinglePieceFormat):
    """All diagonals that are not empty, each as long as the matrix has rows.

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the index array.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.diagonals import DIA
    >>> piece = DIA().packed(Entries.of_rows((2, 3), np.array([0, 2, 3]), np.array([0, 2, 1])))
    >>> piece.arrays["offsets"].tolist(), piece.values(np.array([1, 2, 3])).tolist()
    ([0, 2], [1, 2, 3, 0])
    """

    name = "dia"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="",
            table="offsets nd",
            sizes="m n nd",
            axes="""
                I = dense_fixed(m)
                D = sparse_fixed(I, (nd, nd), lambda i, s: s)
                J = singleton(D, n, lambda i, d, s: i + offsets[d])
            """,
            buffer="I, D, J",
        )
        axis_map = {0: ["I"], 1: ["D", "J"]}
        coords = lambda i, d, j: (i, j)  # noqa: E731
        return FormatRewriteRule("dia", description, axis_map, inverse=coords, fills=True, partitions_rows=True)

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.shape[0] * pattern.diagonals, per_index=0)

    def packed(self, entries: Entries) -> Packed:
        m, n = entries.shape
        check_memory(8 * (m + n), f"numbers of {m + n} diagonals")
        is_used = np.zeros(max(m + n - 1, 0), np.bool_)
        for _, _, number in numbered(entries):
            is_used[number] = True
        offsets = np.flatnonzero(is_used) - (m - 1)
        count = self.check_count(m * len(offsets))
        rank, slots = np.cumsum(is_used) - 1, np.empty(entries.nnz, index_dtype(count))
        for part, rows, number in numbered(entries):
            slots[part] = rows * len(offsets) + rank[number]
        return Packed(self.arrays(offsets=offsets), {"m": m, "n": n, "nd": len(offsets)}, count, slots=slots)


@register("band")
@dataclass(frozen=True, repr=False)
class Band(SinglePieceFormat):
    """All diagonals from `lower` below the main one to `upper` above it, with no index array.

    Parameters
    ----------
    lower, upper : int
        Numbers of diagonals, constants in the description.
    idtype : {"int32", "int64"}, optional
        Of the axes.

    Raises
    ------
    ArgumentError
        When a number is negative or not an integer.
    StructureError
        `packed`: when an entry lies outside the band.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.diagonals import Band
    >>> piece = Band(1, 0).packed(Entries.of_rows((2, 2), np.array([0, 1, 3]), np.array([0, 0, 1])))
    >>> piece.arrays, piece.values(np.array([1, 2, 3])).tolist()
    ({}, [0, 1, 2, 3])
    """

    lower: int = 1
    upper: int = 1
    name = "band"

    def __post_init__(self) -> None:
        super().__post_init__()
        for side, number in (("lower", self.lower), ("upper", self.upper)):
            if not is_integer(number) or number < 0:
                raise ArgumentError(f"{side} of band: expected a non-negative integer, got {shown(number)}")

    @property
    def width(self) -> int:
        """Slots in a row."""
        return int(self.lower) + 1 + int(self.upper)

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="",
            sizes="m n",
            axes=f"""
                I = dense_fixed(m)
                J = sparse_fixed(I, (n, {self.width}), lambda i, s: i + s - {self.lower})
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("band", description, {0: ["I"], 1: ["J"]}, fills=True, partitions_rows=True)

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.shape[0] * self.width, per_index=0)

    def packed(self, entries: Entries) -> Packed:
        m, n = entries.shape
        count = self.check_count(m * self.width)
        slots = np.empty(entries.nnz, index_dtype(count))
        for part, rows, number in numbered(entries):
            slot = number + (self.lower - (m - 1))
            self._check(rows, slot)
            slots[part] = rows * self.width + slot
        return Packed({}, {"m": m, "n": n}, count, slots=slots)

    def _check(self, rows: Array, slot: Array) -> None:
        outside = (slot < 0) | (slot >= self.width)
        if not outside.any():
            return
        row, offset = (int(a[outside.argmax()]) for a in (rows, slot - self.lower))
        need = f"lower={-offset}" if offset < 0 else f"upper={offset}"
        raise StructureError(f"entry ({row}, {row + offset}) lies outside {self!r}: it needs {need}")


@dataclass(frozen=True, repr=False)
class SliceDiagonals(SinglePieceFormat):
    """Slices of `C` rows, each with the diagonals that one of its rows uses, C values each; all inside the matrix."""

    C: int = 16
    name = "slice_diagonals"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            f"slice_diagonals_of_{self.C}",
            arrays="slice_ptr first",
            sizes="m n slices total",
            axes=f"""
                S = dense_fixed(slices)
                W = sparse_variable(S, (n, total), (slice_ptr, first))
                R = sparse_fixed(W, (m, {self.C}), lambda s, w, r: s * {self.C} + r)
                J = singleton(R, n, lambda s, w, r, t: w + (r - s * {self.C}), full=True)
            """,
            buffer="S, W, R, J",
        )
        axis_map = {0: ["S", "R"], 1: ["W", "J"]}
        coords = lambda s, w, r, j: (r, j)  # noqa: E731
        return FormatRewriteRule(
            "slice_diagonals",
            description,
            axis_map,
            inverse=coords,
            fills=True,
            partitions_rows=True,
            independent=True,
        )

    def packed(self, entries: Entries) -> Packed:
        piece, mask = self.dense_enough(entries, 0.0)
        if not mask.all():
            raise StructureError(f"a diagonal of {self.C} rows reaches out of the matrix: take hdia")
        return piece

    def dense_enough(self, entries: Entries, density: float) -> tuple[Packed, Array]:
        """Return the diagonals inside the matrix that are `density` full, and a mask of the entries on them."""
        (m, n), indptr, size = entries.shape, entries.indptr, int(self.C)
        slice_counts, firsts, total = np.zeros(-(-m // size), np.int64), [np.zeros(0, np.int64)], 0
        mask, slots = np.empty(entries.nnz, np.bool_), [np.zeros(0, index_dtype(entries.nnz * size))]
        for begin, end in row_chunks(indptr, size):
            part = slice(indptr[begin], indptr[end])
            lane = np.repeat(np.arange(end - begin) % size, np.diff(indptr[begin : end + 1]))
            starts = np.append(indptr[begin:end:size], indptr[end]) - indptr[begin]
            # Counted from what the last row of a slice would need for column 0.
            keys, numbers, counts = number_blocks(starts, entries.last[part] - lane + (size - 1), n + size - 1)
            first = keys - (size - 1)
            is_full = (first >= 0) & (first + size <= n)
            is_full &= np.bincount(numbers, minlength=len(keys)) >= density * size
            mask[part] = is_full[numbers]
            number = (np.cumsum(is_full) - 1 + total)[numbers[mask[part]]]
            slots.append((number * size + lane[mask[part]]).astype(slots[0].dtype, copy=False))
            slices = np.repeat(np.arange(len(counts)), counts)[is_full]
            slice_counts[begin // size : begin // size + len(counts)] = np.bincount(slices, minlength=len(counts))
            firsts.append(first[is_full])
            total += len(firsts[-1])
        count = self.check_count(total * size, indices=total)
        arrays = self.arrays(slice_ptr=begins(slice_counts), first=np.concatenate(firsts))
        sizes = {"m": m, "n": n, "slices": len(slice_counts), "total": total}
        index = None if mask.all() else np.flatnonzero(mask)
        return Packed(arrays, sizes, count, index, np.concatenate(slots)), mask


def slice_diagonals(entries: Entries, size: int, density: float) -> tuple[float, float]:
    """Return the fraction of the entries on diagonals of slices that are dense enough, and how full these are.

    See `SliceDiagonals`. Of a large matrix only some of the slices count.
    """
    step = -(-entries.nnz // SAMPLE)
    if step > 1:
        slices = np.arange(-(-entries.shape[0] // size), dtype=np.uint32) * np.uint32(MIX) >> np.uint32(16)
        rows = np.repeat(slices % np.uint32(step) == 0, size)[: entries.shape[0]]
        entries, _ = subset(entries, np.repeat(rows, np.diff(entries.indptr)))
    piece, mask = SliceDiagonals(size).dense_enough(entries, density)
    entry_count = int(np.count_nonzero(mask))
    return entry_count / max(entries.nnz, 1), entry_count / max(piece.count, 1)


def numbered(entries: Entries) -> Iterator[tuple[slice, Array, Array]]:
    """Yield ranges of the entries with their rows and the numbers of their diagonals: column - row + m - 1."""
    for part, rows in row_numbers(entries.indptr):
        yield part, rows, entries.last[part] - rows + (entries.shape[0] - 1)


__all__ = ["DIA", "Band", "SliceDiagonals", "numbered", "slice_diagonals"]
