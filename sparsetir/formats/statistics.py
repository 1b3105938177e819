# SPDX-License-Identifier: Apache-2.0
"""Pattern statistics in linear time: distances, lengths, fill of blocks and slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy.sparse as sp

from sparsetir.formats.blocks import key_batches
from sparsetir.formats.format import Array, Entries
from sparsetir.interop.arrays import CHUNK, begins, changes, index_dtype, sorting_order, take
from sparsetir.utils.caches import cached_property

# How full blocks and slices of a matrix are.


SAMPLED, WINDOWS = 1 << 16, 16  # sampled entries, and the number of windows


def block_sizes(starts: Array, keys: Array, extent: int, width: int = 1) -> Iterator[Array]:
    """Yield the numbers of entries of nonempty blocks, a few rows of blocks at a time.

    Parameters
    ----------
    starts : ndarray of int
        Where each row of blocks begins in `keys`, and where the last one ends.
    keys : ndarray of int
        The entries' columns; a block has `width` of them.
    extent : int
        Blocks of a row.
    width : int
    """
    for batch in key_batches(starts, keys, extent, width):
        ordered = np.sort(batch.keys)
        yield np.diff(np.append(np.flatnonzero(changes([ordered])), len(ordered)))


def block_fill(indptr: Array, indices: Array, r: int, c: int) -> float:
    """Return the fill of nonempty blocks of `r` rows and `c` columns, in a sample of the rows.

    Examples
    --------
    >>> block_fill(np.array([0, 2, 4]), np.array([0, 1, 0, 1]), 2, 2)
    1.0
    """
    rows = len(indptr) - 1
    sampled_rows = max(1, rows * SAMPLED // max(indices.size, 1) // (WINDOWS * r)) * r
    entry_count = blocks = 0
    for start in np.unique(np.linspace(0, max(rows - sampled_rows, 0), WINDOWS).astype(np.int64) // r * r):
        bounds = indptr[start : start + sampled_rows + 1]
        columns = indices[bounds[0] : bounds[-1]]
        entry_count += columns.size
        starts = np.append(bounds[:-1:r], bounds[-1]) - bounds[0]
        blocks += sum(map(len, block_sizes(starts, columns, int(columns.max(initial=0)) // c + 1, c)))
    return entry_count / (blocks * r * c) if blocks else 0.0


SLICE_HEIGHTS = (16, 8)


def slice_fills(indptr: Array, window: int) -> list[float]:
    """Return the fill of slices of rows that are sorted by length within windows, for each of `SLICE_HEIGHTS`.

    Examples
    --------
    >>> slice_fills(np.arange(0, 129, 2), 16), slice_fills(np.array([0, 8, 8, 8, 8, 8, 8, 8, 8]), 16)
    ([1.0, 1.0], [0.0625, 0.125])
    """
    lengths = np.zeros(-(-(len(indptr) - 1) // window) * window, indptr.dtype)
    lengths[: len(indptr) - 1] = np.diff(indptr)
    ordered = np.sort(lengths.reshape(-1, window), axis=1)
    slots = (rows * int(ordered[:, rows - 1 :: rows].sum(dtype=np.int64)) for rows in SLICE_HEIGHTS)
    return [float(indptr[-1]) / max(count, 1) for count in slots]


# Numbers that describe where the entries of a matrix lie, each in time linear in their count.


SPARSE_LINES, FEW_LINES = 4, 1 << 12  # rows or columns for each entry from which on only those in use are counted


@dataclass(frozen=True)
class Degrees:
    """How many entries the rows (or the columns) of a matrix hold.

    Parameters
    ----------
    count, empty : int
        Rows, and those that hold nothing.
    min, max : int
    mean, median, std : float
        Of all rows; the standard deviation is that of a population.
    cv : float
        Coefficient of variation: standard deviation over mean; 0 without entries.
    gini : float
        Gini coefficient: 0 where all rows hold as many, near 1 where one holds all.
    histogram : tuple of int
        How many rows hold nothing, one entry, 2 to 3, 4 to 7, 8 to 15 and so on.

    Examples
    --------
    >>> import numpy as np
    >>> found = Degrees.of(np.array([1, 1, 6]), 4)
    >>> found.empty, found.max, found.mean, found.median, found.histogram
    (1, 6, 2.0, 1.0, (1, 2, 0, 1))
    """

    count: int
    empty: int
    min: int
    max: int
    mean: float
    median: float
    std: float
    cv: float
    gini: float
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, counts: Array, count: int) -> Degrees:
        """Compute the statistics of `count` rows from the nonzero numbers of entries of rows."""
        if not count:
            return cls(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
        table = np.bincount(counts)
        degrees = np.flatnonzero(table)
        times = table[degrees]
        if len(counts) < count:
            degrees, times = np.append(0, degrees), np.append(count - len(counts), times)
        mean = float(degrees @ times) / count
        std = float(np.sqrt(np.square(degrees - mean) @ times / count))
        return cls(
            count,
            count - len(counts),
            int(degrees[0]),
            int(degrees[-1]),
            mean,
            median(degrees, times),
            std,
            std / mean if mean else 0.0,
            gini(degrees, times),
            histogram(degrees, times),
        )


def median(values: Array, times: Array) -> float:
    """Return the median of ascending values with multiplicities."""
    ends = np.cumsum(times)
    middle = [int(ends[-1] - 1) // 2, int(ends[-1]) // 2]
    return float(values[np.searchsorted(ends, middle, side="right")].mean())


def gini(values: Array, times: Array) -> float:
    """Return the Gini coefficient of ascending values with multiplicities; 0 where their sum is."""
    total, count = float(values @ times), float(times.sum())
    if not total:
        return 0.0
    before = np.cumsum(times) - times
    ranks = times * (before + (times + 1) / 2)
    return max(0.0, float(2 * (values @ ranks) / (count * total) - (count + 1) / count))


def histogram(values: Array, times: Array) -> tuple[int, ...]:
    """Count the values 0, 1, 2 to 3, 4 to 7 and so on."""
    powers = np.frexp(values.astype(np.float64))[1]
    return tuple(np.bincount(powers, weights=times).astype(np.int64).tolist())


@dataclass(frozen=True)
class BlockFill:
    """How full the blocks of a grid are that hold something; blocks that the shape cuts off count as whole.

    Parameters
    ----------
    r, c : int
        Rows and columns of a block.
    count : int
        Blocks that hold something.
    fill : float
        Mean fraction of their slots that are entries.
    most : int
        Entries in the fullest one.
    share : float
        Fraction of the entries that lie in blocks at least half full.
    """

    r: int
    c: int
    count: int
    fill: float
    most: int
    share: float


class Lines:
    """A matrix with its rows and columns numbered: all of them, or only those in use where these are few.

    Parameters
    ----------
    entries : Entries
        Of two dimensions.
    """

    def __init__(self, entries: Entries) -> None:
        self.entries, self.shape, self.nnz = entries, entries.shape, entries.nnz
        self.labels: Array | None = None
        if max(self.shape) > SPARSE_LINES * self.nnz + FEW_LINES:
            self.labels = np.unique(np.concatenate([entries.occupied[0], entries.last]))

    @cached_property
    def by_row(self) -> sp.csr_array:
        """The pattern; values are ones."""
        ones, columns = np.ones(self.nnz, np.int8), self.entries.last
        if self.labels is None:
            return sp.csr_array((ones, columns, self.entries.indptr), shape=self.shape)
        (rows, starts), extent = self.entries.occupied, len(self.labels)
        row_counts = np.zeros(extent, np.int64)
        row_counts[np.searchsorted(self.labels, rows)] = np.diff(starts)
        place = np.searchsorted(self.labels, columns)
        return sp.csr_array((ones, place, begins(row_counts)), shape=(extent, extent))

    @cached_property
    def by_column(self) -> sp.csr_array:
        """The transposed pattern."""
        return self.by_row.tocsc().T

    def label(self, lines: Array) -> Array:
        """Return the numbers that rows or columns have in the matrix."""
        return lines if self.labels is None else self.labels[lines]

    # ------------------------------------------------------------------ rows and columns

    @property
    def row_degrees(self) -> Degrees:
        return _degrees(self.by_row, self.shape[0])

    @property
    def column_degrees(self) -> Degrees:
        return _degrees(self.by_column, self.shape[1])

    @cached_property
    def row_spans(self) -> tuple[Array, Array, Array]:
        """The rows that hold something, with their first and their last columns."""
        return self._spans(self.by_row)

    @cached_property
    def column_spans(self) -> tuple[Array, Array, Array]:
        """The columns that hold something, with their first and their last rows."""
        return self._spans(self.by_column)

    def _spans(self, lines: sp.csr_array) -> tuple[Array, Array, Array]:
        nonempty = np.flatnonzero(np.diff(lines.indptr))
        first, last = lines.indices[lines.indptr[nonempty]], lines.indices[lines.indptr[nonempty + 1] - 1]
        nonempty, first, last = (self.label(a).astype(np.int64) for a in (nonempty, first, last))
        return nonempty, first, last

    @property
    def bandwidth(self) -> tuple[int, int]:
        """How far entries lie below and above the main diagonal."""
        rows, first, last = self.row_spans
        return int((rows - first).max(initial=0)), int((last - rows).max(initial=0))

    @property
    def profile(self) -> tuple[int, int]:
        """Count the slots below the diagonal from each row's first entry, and above it from each column's."""
        lower, upper = (total(np.maximum(lines - first, 0)) for lines, first, _ in (self.row_spans, self.column_spans))
        return lower, upper

    @property
    def prefix(self) -> int:
        """Slots up to the last entry of each row."""
        _, _, last = self.row_spans
        return total(last) + len(last)

    def reach(self, window: int) -> int:
        """Return the greatest distance between the first and the last column of a window of rows."""
        rows, first, last = self.row_spans
        if not len(rows):
            return 0
        starts = np.flatnonzero(changes([rows // window]))
        return int((np.maximum.reduceat(last, starts) - np.minimum.reduceat(first, starts)).max())

    def sliced(self, rows: int, window: int) -> int:
        """Count the slots of slices of rows, each as wide as its longest row but at least one; see `SELL`."""
        lengths = np.diff(self.by_row.indptr).astype(np.int64)
        nonempty = np.flatnonzero(lengths)
        windows, lengths = self.label(nonempty) // window, lengths[nonempty]
        order = np.lexsort((-lengths, windows))
        starts = np.flatnonzero(changes([windows[order]]))
        place = np.arange(len(nonempty)) - np.repeat(starts, np.diff(np.append(starts, len(nonempty))))
        widths = lengths[order][place % rows == 0]
        return rows * int(widths.sum() + max(-(-self.shape[0] // rows) - len(widths), 0))

    @property
    def reuse_distance(self) -> float | None:
        """Mean number of rows from an entry to the next one of its column; None where no column has two."""
        columns, first, last = self.column_spans
        again = self.nnz - len(columns)
        return total(last - first) / again if again else None

    @property
    def symmetry(self) -> float | None:
        """Fraction of the entries off the diagonal whose mirror image is one, 1 without any; None if not square."""
        if self.shape[0] != self.shape[1]:
            return None
        diagonal = int(self.by_row.diagonal().sum(dtype=np.int64))
        both = self.by_row.multiply(self.by_column).nnz - diagonal
        return both / (self.nnz - diagonal) if self.nnz > diagonal else 1.0

    def imbalance(self, parts: int) -> float:
        """Return the share of the entries in the largest of `parts` equal ranges of rows, relative to an even share."""
        edges = np.array([k * self.shape[0] // parts for k in range(parts + 1)])
        place = edges if self.labels is None else np.searchsorted(self.labels, edges)
        counts = np.diff(self.by_row.indptr[place].astype(np.int64))
        return float(counts.max()) * parts / self.nnz if self.nnz else 1.0

    # ------------------------------------------------------------------ diagonals

    def diagonals(self, density: float) -> tuple[int, int, float]:
        """Diagonals that hold something, those of them that are full, and the fraction of the entries on the latter.

        Parameters
        ----------
        density : float
            A diagonal is full if so large a part of the slots of the longest one are entries.
        """
        counts = self._diagonal_counts()
        full = counts[counts >= density * min(self.shape)]
        return len(counts), len(full), float(full.sum()) / self.nnz if self.nnz else 0.0

    def _diagonal_counts(self) -> Array:
        """Return entries on each diagonal that is not empty."""
        if self.labels is not None:
            offsets = np.sort(np.concatenate([np.zeros(0, np.int64), *self._offsets()]))
            return np.diff(np.append(np.flatnonzero(changes([offsets])), self.nnz))
        counts = np.zeros(max(sum(self.shape) - 1, 0), index_dtype(self.nnz))
        for offsets in self._offsets():
            np.add.at(counts, offsets + (self.shape[0] - 1), counts.dtype.type(1))
        return counts[counts > 0]

    def _offsets(self) -> Iterator[Array]:
        """Yield column minus row of the entries, some at a time."""
        indptr, indices = self.by_row.indptr, self.by_row.indices
        for begin, end in batches(indptr, CHUNK):
            columns = self.label(indices[indptr[begin] : indptr[end]])
            yield columns - np.repeat(self.label(np.arange(begin, end)), np.diff(indptr[begin : end + 1]))

    # ------------------------------------------------------------------ blocks

    def blocks(self, r: int, c: int) -> BlockFill:
        """Return the blocks of `r` rows and `c` columns."""
        count, most, dense = 0, 0, 0
        columns, extent = self._block_columns(c)
        keys, width = (self.by_row.indices, c) if columns is None else (columns[self.by_row.indices], 1)
        for sizes in block_sizes(self._block_rows(r), keys, extent, width):
            count, most = count + len(sizes), max(most, int(sizes.max(initial=0)))
            dense += int(sizes[2 * sizes >= r * c].sum())
        nnz = max(self.nnz, 1)
        return BlockFill(r, c, count, self.nnz / max(count * r * c, 1), most, dense / nnz)

    def _block_rows(self, r: int) -> Array:
        """Return the begin of the entries of each row of blocks, and the end of the last one."""
        indptr = self.by_row.indptr
        if self.labels is None:
            return np.append(indptr[:-1:r], indptr[-1])
        return np.append(indptr[np.flatnonzero(changes([self.labels // r]))], indptr[-1])

    def _block_columns(self, c: int) -> tuple[Array | None, int]:
        """Return the column of blocks of each column (None: by division), and how many there are."""
        if self.labels is None:
            return None, -(-self.shape[1] // c)
        columns = np.cumsum(changes([self.labels // c])) - 1
        return columns, int(columns.max(initial=-1)) + 1


def total(numbers: Array) -> int:
    """Sum non-negative 64-bit numbers; the sum may exceed 64 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _degrees(lines: sp.csr_array, count: int) -> Degrees:
    lengths = np.diff(lines.indptr)
    return Degrees.of(lengths[lengths > 0], count)


def batches(starts: Array, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of runs that hold about `size` elements together."""
    starts = starts.astype(np.int64, copy=False)
    cuts = np.searchsorted(starts, np.arange(0, int(starts[-1]), size), side="right") - 1
    yield from pairwise([*np.unique(cuts).tolist(), len(starts) - 1])


def fibers(coords: Sequence[Array], shape: Sequence[int]) -> tuple[int, ...]:
    """Count the nonempty fibers of each mode: the distinct coordinates of the entries in the other modes."""
    counts = []
    for mode in range(len(shape)):
        other_modes = [d for d in range(len(shape)) if d != mode]
        counts.append(_distinct([coords[d] for d in other_modes], [shape[d] for d in other_modes], len(coords[mode])))
    return tuple(counts)


def _distinct(coords: Sequence[Array], shape: Sequence[int], nnz: int) -> int:
    if not coords:
        return min(nnz, 1)
    order = sorting_order(coords, shape)
    return int(np.count_nonzero(changes([c if order is None else take(c, order) for c in coords])))


__all__ = ["BlockFill", "Degrees", "Lines", "batches", "block_fill", "block_sizes", "fibers", "slice_fills"]
