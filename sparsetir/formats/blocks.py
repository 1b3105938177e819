# SPDX-License-Identifier: Apache-2.0
"""Formats of one piece that store dense blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sparsetir.formats.base import Estimate, FormatRewriteRule
from sparsetir.formats.compressed import SinglePieceFormat
from sparsetir.formats.format import Array, Entries, Packed, check_positive, register
from sparsetir.interop.arrays import begins, changes, index_dtype
from sparsetir.interop.sources import CompressedSource
from sparsetir.utils.memory import check_memory, check_values

BATCH = 1 << 16  # entries whose blocks are found at a time
UNKNOWN = 2.0  # estimated values for each entry, where blocks of that size were not counted


@register("bsr")
@dataclass(frozen=True, repr=False)
class BSR(SinglePieceFormat):
    """Rows of dense blocks, each with a column of the grid; blocks that the shape cuts off stick out, with zeros.

    Parameters
    ----------
    r, c : int
        Rows and columns of a block, constants in the description; `c` is `r` when it is left out.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_dense(np.diag([1.0, 2.0, 3.0]), format="bsr", r=2, c=2)
    >>> t.pieces[0].values.reshape(-1, 2, 2).tolist()
    [[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 0.0]]]
    """

    r: int = 4
    c: int | None = None
    name = "bsr"
    rows_are_compressed = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "c", self.r if self.c is None else self.c)
        check_positive(self.name, r=self.r, c=self.c)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return int(self.r), int(self.c or self.r)

    def rule(self) -> FormatRewriteRule:
        r, c = self.block
        text = self.description(
            arrays=("indptr_o indices_o " if self.rows_are_compressed else "") + "indptr indices",
            sizes="mb nb rows nnzb" if self.rows_are_compressed else "mb nb nnzb",
            axes=f"""{self._rows_of_blocks()}
                     JO = sparse_variable(IO, (nb, nnzb), (indptr, indices))
                     II = dense_fixed({r})
                     JI = dense_fixed({c})""",
            buffer="IO, JO, II, JI",
        )
        return FormatRewriteRule(
            self.name,
            text,
            {0: ["IO", "II"], 1: ["JO", "JI"]},
            inverse=lambda io, jo, ii, ji: (io * r + ii, jo * c + ji),
            forward=lambda i, j: (i // r, j // c, i % r, j % c),
            fills=True,
            partitions_rows=not self.rows_are_compressed,
        )

    def _rows_of_blocks(self) -> str:
        if self.rows_are_compressed:
            return "IO = sparse_variable(None, (mb, rows), (indptr_o, indices_o))"
        return "IO = dense_fixed(mb)"

    def packed(self, entries: Entries) -> Packed:
        return self._piece(_Grid(entries, *self.block))

    def fill(self, entries: Entries, values: Array) -> list[tuple[Packed, Array]]:
        grid = _Grid(entries, *self.block)
        piece = self._piece(grid)
        check_values(piece.count, values.dtype)
        out = np.zeros(piece.count, values.dtype)
        for part, slots in grid.slots():
            out[slots] = values[part]
        return [(piece, out)]

    def _piece(self, grid: _Grid) -> Packed:
        columns, counts = grid.blocks()
        count = self.check_count(len(columns) * grid.r * grid.c)
        arrays, sizes = self._index(grid.shape[0], grid.rows, counts)
        arrays |= self.arrays(indices=columns)
        sizes = {"mb": grid.shape[0], "nb": grid.shape[1], **sizes, "nnzb": len(columns)}
        slots = partial(grid.all_slots, index_dtype(count))
        return Packed(arrays, sizes, count, slots=slots, size=grid.entries.nnz)

    def _index(self, mb: int, rows: Array, row_counts: Array) -> tuple[dict[str, Array], dict[str, int]]:
        """Return the index arrays and sizes for rows of blocks: each of `rows` holds `row_counts` blocks."""
        if self.rows_are_compressed:
            indptr = np.array([0, len(rows)])
            return self.arrays(indptr_o=indptr, indices_o=rows, indptr=begins(row_counts)), {"rows": len(rows)}
        check_memory(8 * mb, f"pointers to {mb} rows of blocks")
        counts = np.zeros(mb, np.int64)
        counts[rows] = row_counts
        return self.arrays(indptr=begins(counts)), {}

    def estimate(self, pattern: Any) -> Estimate:
        r, c = self.block
        block_fill = pattern.blocks.get(self.block)
        return Estimate(UNKNOWN * pattern.nnz if block_fill is None else block_fill.count * r * c, per_index=r * c)

    def borrow(self, source: Any, slots: Callable[[], Array]) -> list[tuple[Packed, Array]] | None:
        is_rows = isinstance(source, CompressedSource) and source.major == 0
        if self.rows_are_compressed or not is_rows or source.block != self.block:
            return None
        (mb, nb), nnzb = source.grid, len(source.indices)
        count = self.check_count(source.values.size)
        arrays = self.arrays(indptr=source.indptr, indices=source.indices)
        piece = Packed(arrays, {"mb": mb, "nb": nb, "nnzb": nnzb}, count, slots=slots, size=count)
        return [(piece, source.values)]


@register("dbsr")
@dataclass(frozen=True, repr=False)
class DBSR(BSR):
    """As bsr, but only those rows of blocks that hold something.

    Parameters
    ----------
    r, c : int
        Rows and columns of a block, constants in the description; `c` is `r` when it is left out.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_coo([[70], [0]], np.ones(1), (1000, 3), format="dbsr", r=2, c=2)
    >>> t.pieces[0].arrays["indices_o"].tolist()
    [35]
    """

    name = "dbsr"
    rows_are_compressed = True


class _Grid:
    """The entries of a matrix seen as blocks; those of one row of blocks follow each other."""

    def __init__(self, entries: Entries, r: int, c: int) -> None:
        self.entries, self.r, self.c = entries, r, c
        (m, n), (occupied, begin) = entries.shape, entries.occupied
        self.shape = -(-m // r), -(-n // c)
        heads = np.flatnonzero(changes([occupied // r]))
        self.rows = occupied[heads] // r
        self._occupied, self._begin, self._heads = occupied, begin, np.append(heads, len(occupied))

    def _batches(self) -> Iterator[Batch]:
        return key_batches(self._begin[self._heads], self.entries.last, self.shape[1], self.c)

    def blocks(self) -> tuple[Array, Array]:
        """Return the columns of the nonempty blocks, and the number of blocks of each of `rows`."""
        return _joined((batch.distinct() for batch in self._batches()), self.entries.last.dtype)

    def slots(self) -> Iterator[tuple[slice, Array]]:
        """Yield the positions of the entries in the blocks' values, a range of entries at a time."""
        total = 0
        for batch in self._batches():
            slots, block_count = batch.numbered()
            slots += total
            total += block_count
            slots *= self.r * self.c
            first, last = self._heads[batch.first], self._heads[batch.last]
            in_block = self._occupied[first:last] % self.r * self.c
            slots += np.repeat(in_block, np.diff(self._begin[first : last + 1]))
            slots += self.entries.last[batch.part] % self.c
            yield batch.part, slots

    def all_slots(self, dtype: Any) -> Array:
        out = np.empty(self.entries.nnz, dtype)
        for part, slots in self.slots():
            out[part] = slots
        return out


def number_blocks(starts: Array, keys: Array, extent: int) -> tuple[Array, Array, Array]:
    """Return the distinct keys of each run in ascending order.

    Parameters
    ----------
    starts : ndarray of int
        Where each run begins in `keys`, and where the last one ends.
    keys : ndarray of int
        In ``[0, extent)``. Runs of a few sorted sequences are sorted fastest.
    extent : int

    Returns
    -------
    distinct : ndarray
        The distinct keys, run after run.
    numbers : ndarray
        Where in `distinct` each of `keys` is.
    run_counts : ndarray
        How many there are in each run.
    """
    numbers, total, batches = np.empty(len(keys), index_dtype(len(keys))), 0, []
    for batch in key_batches(starts, keys, extent):
        inside, count = batch.numbered()
        numbers[batch.part] = inside + total
        total += count
        batches.append(batch.distinct())
    distinct, run_counts = _joined(batches, keys.dtype)
    return distinct, numbers, run_counts


def count_blocks(starts: Array, keys: Array, extent: int) -> Array:
    """Return the number of distinct keys of each run; the arguments are those of `number_blocks`."""
    return _joined((batch.distinct() for batch in key_batches(starts, keys, extent)), keys.dtype)[1]


@dataclass(frozen=True)
class Batch:
    """Runs `first` to `last`, whose keys lie at `part`; `keys` are theirs plus the number of the run times `extent`."""

    first: int
    last: int
    part: slice
    keys: Array
    extent: int

    def distinct(self) -> tuple[Array, Array]:
        """Return the distinct keys of the runs, and the number of distinct keys of each run."""
        ordered = np.sort(self.keys)
        run, keys = np.divmod(ordered[changes([ordered])], max(self.extent, 1))
        return keys, np.bincount(run, minlength=self.last - self.first)

    def numbered(self) -> tuple[Array, int]:
        """Return the index of each key among the distinct keys, and their number."""
        order = np.argsort(self.keys, kind="stable")
        new = changes([self.keys[order]])
        numbers = np.empty(len(order), np.int64)
        numbers[order] = np.cumsum(new) - 1
        return numbers, int(np.count_nonzero(new))


def key_batches(starts: Array, keys: Array, extent: int, width: int = 1) -> Iterator[Batch]:
    """Yield some runs of ``keys // width`` at a time: sorting is fastest in cache."""
    first, starts = 0, starts.astype(np.int64, copy=False)
    while first < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[first] + BATCH, side="right")) - 1
        last = max(last, first + 1)
        part, dtype = slice(int(starts[first]), int(starts[last])), index_dtype((last - first) * extent)
        key = np.repeat(np.arange(last - first, dtype=dtype) * dtype.type(extent), np.diff(starts[first : last + 1]))
        key += (keys[part] // width).astype(dtype, copy=False)
        yield Batch(first, last, part, key, extent)
        first = last


def _joined(batches: Iterable[tuple[Array, Array]], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Concatenate the keys and the counts of all batches."""
    keys, all_counts = [np.zeros(0, dtype)], [np.zeros(0, np.int64)]
    for batch_keys, counts in batches:
        keys.append(batch_keys.astype(dtype, copy=False))
        all_counts.append(counts)
    return np.concatenate(keys), np.concatenate(all_counts)


__all__ = ["BSR", "DBSR", "Batch", "count_blocks", "key_batches", "number_blocks"]
