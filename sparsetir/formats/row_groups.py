# SPDX-License-Identifier: Apache-2.0
"""Row groups that share loads of the other operand, and reordered rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.formats.base import Estimate, FormatRewriteRule
from sparsetir.formats.blocks import count_blocks, number_blocks
from sparsetir.formats.compressed import DCSR, SinglePieceFormat
from sparsetir.formats.format import (
    Array,
    Entries,
    Format,
    Packed,
    check_positive,
    lengths_of,
    register,
    subset,
)
from sparsetir.formats.hybrid import TwoPartFormat
from sparsetir.formats.partitioned import within
from sparsetir.interop.arrays import begins, changes, index_dtype, spread, take
from sparsetir.utils.caches import cached_property
from sparsetir.utils.memory import check_memory

# Rows of similar patterns in groups: a row of the other operand is loaded once for all rows of a group.


SIGNATURES = 3  # orders that rows are sorted into, after their own
SAMPLE = 1 << 18  # entries whose rows are grouped for a pattern's statistics
SALT = 0x9E37  # between the hashes of two seeds
MIX = (0x7FEB352D, 0x846CA68B)  # factors of a hash of 32 bits: every bit of a column moves every other one


@dataclass(frozen=True, repr=False)
class Grouped(SinglePieceFormat):
    """Groups of `r` rows, each with the columns that one of its rows uses, and below each column r values.

    Every group must hold something.
    """

    r: int = 4
    name = "groups"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            f"groups_of_{self.r}",
            arrays="indptr indices",
            table=f"rows groups * {self.r}",
            sizes="m n groups total",
            axes=f"""
                G = dense_fixed(groups)
                J = sparse_variable(G, (n, total), (indptr, indices))
                R = sparse_fixed(J, (m, {self.r}), lambda g, j, r: rows[g * {self.r} + r], sorted=False, full=True)
            """,
            buffer="G, J, R",
        )
        axis_map = {0: ["G", "R"], 1: ["J"]}
        coords = lambda g, j, r: (r, j)  # noqa: E731
        return FormatRewriteRule(
            "groups", description, axis_map, inverse=coords, fills=True, partitions_rows=True, independent=True
        )

    def packed(self, entries: Entries) -> Packed:
        """Group neighbours; rows behind the last whole group must be empty."""
        rows = np.arange(entries.shape[0] // self.r * self.r)
        return self.listed(entries, rows)

    def listed(self, entries: Entries, rows: Array) -> Packed:
        """Return the piece of these rows, group after group."""
        lengths = lengths_of(entries)[rows]
        runs, dtype = begins(lengths), index_dtype(entries.nnz)
        index = spread(entries.indptr[rows], runs, dtype)
        columns, number, group_counts = number_blocks(runs[:: self.r], take(entries.last, index), entries.shape[1])
        count = self.check_count(len(columns) * self.r, indices=len(columns))
        slots = number.astype(index_dtype(count), copy=False) * self.r
        slots += np.repeat(np.arange(len(rows), dtype=slots.dtype) % self.r, lengths)
        arrays = self.arrays(indptr=begins(group_counts), indices=columns, rows=rows)
        sizes = {"m": entries.shape[0], "n": entries.shape[1], "groups": len(group_counts), "total": len(columns)}
        return Packed(arrays, sizes, count, index, slots)


@dataclass(frozen=True, repr=False)
class OtherRows(DCSR):
    """Listed rows, whether they hold something or not."""

    def rule(self) -> FormatRewriteRule:
        return replace(super().rule(), partitions_rows=True)

    def listed(self, entries: Entries, rows: Array) -> Packed:
        """Return the piece of these rows, in ascending order; all others are empty."""
        (m, n), nnz = entries.shape, self.check_count(entries.nnz)
        indptr = np.append(entries.indptr[rows], nnz)
        pointers = np.array([0, len(rows)])
        arrays = self.arrays(indptr_i=pointers, indices_i=rows, indptr_j=indptr, indices_j=entries.last)
        return Packed(arrays, {"m": m, "n": n, "rows": len(rows), "nnz": nnz}, nnz)


@register("row_groups")
@dataclass(frozen=True, repr=False)
class RowGroups(TwoPartFormat):
    """Rows of similar patterns in groups of `r` as dense r x 1 vectors, all other rows in the rest.

    A group stores `r` values for each column that one of its rows uses. Rows are grouped with their neighbours where
    that needs little padding, then with rows that lie anywhere in the matrix (see `groups_of`).

    Parameters
    ----------
    r : int
        Rows of a group, a constant in the description.
    padding : float
        Zeros that a group may store for each of its entries.
    rest : Format or str
        How the other rows are stored.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When r is not a positive integer, or padding is negative.

    Notes
    -----
    The groups by signature are those of A. Broder, "On the resemblance and containment of documents", 1997; the kernel
    is the register tiling of Wilkinson, Cheshmi and Mehri Dehnavi, "Register tiling for unstructured sparsity in neural
    network inference", PLDI 2023, with padding in place of code for each pattern.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.row_groups import RowGroups
    >>> entries = Entries.of_rows((4, 9), np.array([0, 2, 4, 6, 8]), np.array([1, 4, 0, 7, 1, 4, 2, 3]))
    >>> main, rest = RowGroups(2).pack(entries)
    >>> main.arrays["rows"].tolist(), main.arrays["indices"].tolist(), rest.entries.tolist()
    ([0, 2], [1, 4], [2, 3, 6, 7])
    """

    r: int = 4
    padding: float = field(default=0.5, kw_only=True)
    name = "row_groups"
    lists_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, r=self.r)
        is_number = isinstance(self.padding, (int, float, np.number)) and not isinstance(self.padding, bool)
        if not is_number or not self.padding >= 0:
            raise ArgumentError(f"padding of {self.name}: expected a non-negative number, got {self.padding!r}")

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(round((1 + self.padding) * pattern.nnz), pieces=2, per_index=self.r)

    @property
    def block(self) -> tuple[int, int]:
        return int(self.r), 1

    @property
    def main(self) -> Format:
        return Grouped(int(self.r))

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return isinstance(self.parts[1][1], OtherRows)

    @cached_property
    def parts(self) -> Sequence[tuple[str, Format]]:
        main, (name, rest_format) = super().parts
        return (main, (name, OtherRows(idtype=rest_format.idtype) if type(rest_format) is DCSR else rest_format))

    def chosen(self, entries: Entries) -> Array:
        return self._held(entries, groups_of(entries, int(self.r), self.padding))

    def pack(self, entries: Entries) -> list[Packed]:
        groups = groups_of(entries, int(self.r), self.padding)
        (_, main), (_, rest_format) = self.parts
        remaining, index = subset(entries, ~self._held(entries, groups))
        if isinstance(rest_format, OtherRows):
            rest_pieces = [rest_format.listed(remaining, _without(groups, entries.shape[0]))]
        else:
            rest_pieces = rest_format.pack(remaining)
        grouped = Grouped(int(self.r), idtype=main.index_type).listed(entries, groups.reshape(-1))
        return [grouped, *(rest_pieces if index is None else (within(piece, index) for piece in rest_pieces))]

    def _held(self, entries: Entries, groups: Array) -> Array:
        """Return the mask of the entries in the rows of groups."""
        rows = np.zeros(entries.shape[0], np.bool_)
        rows[groups] = True
        return np.repeat(rows, lengths_of(entries))


def _without(groups: Array, m: int) -> Array:
    """Return the rows that are in no group."""
    check_memory(9 * m, f"numbers of {m} rows")
    alone = np.ones(m, np.bool_)
    alone[groups] = False
    return np.flatnonzero(alone)


def groups_of(entries: Entries, r: int, padding: float) -> Array:
    """Return rows of similar patterns, `r` at a time; rows without such company are left out.

    Rows are put in order, cut into runs, and every `r` of a run that need little padding become a group; what is left
    is put in another order. The first one is that of the rows, each `r` of them a run. Then it is by signature: the
    columns are shuffled, and the first one that a row uses is its signature, which two rows share with the probability
    of the Jaccard index of their columns.

    Parameters
    ----------
    entries : Entries
        Of a matrix.
    r : int
    padding : float
        Slots of a group that hold no entry, at most, for each that does.

    Returns
    -------
    ndarray of int
        ``(groups, r)``, ordered by the first row of each; all rows hold something.
    """
    remaining = np.flatnonzero(np.diff(entries.indptr))
    group_arrays = [np.zeros((0, r), remaining.dtype)]
    for orders in range(1 + SIGNATURES):
        if orders == 0:
            offered = remaining[: len(remaining) // r * r].reshape(-1, r)
        else:
            offered = _in_runs(*_by_signature(entries, remaining, orders), r)
        used, entry_counts = _columns(entries, offered)
        fits = used * r <= (1 + padding) * entry_counts
        group_arrays.append(offered[fits])
        is_grouped = np.zeros(entries.shape[0], np.bool_)
        is_grouped[offered[fits]] = True
        remaining = remaining[~is_grouped[remaining]]
    groups = np.concatenate(group_arrays)
    return groups[np.argsort(groups[:, 0], kind="stable")]


def grouped_share(entries: Entries, r: int, padding: float) -> tuple[float, float]:
    """Return the fraction of the entries that `groups_of` gets into groups, and of the groups' slots that these fill.

    Of a large matrix only rows with some signatures count: similar rows have the same one, and stay together.
    """
    rows, step = np.flatnonzero(np.diff(entries.indptr)), -(-entries.nnz // SAMPLE)
    if step > 1:
        keep = np.zeros(entries.shape[0], np.bool_)
        keep[rows] = signatures(entries, rows, 1) % np.uint32(step) == 0
        entries, _ = subset(entries, np.repeat(keep, lengths_of(entries)))
    used, entry_counts = _columns(entries, groups_of(entries, r, padding))
    return float(entry_counts.sum()) / max(entries.nnz, 1), float(entry_counts.sum()) / max(int(used.sum()) * r, 1)


def _by_signature(entries: Entries, rows: Array, seed: int) -> tuple[Array, Array]:
    """Return the rows in the order of their signatures, and these.

    Rows of one signature are ordered by another one, then by a hash of all columns: equal rows are neighbours.
    """
    keys, runs = _hashes(entries, rows, 2 * seed + 1)
    second = np.minimum.reduceat(keys, runs[:-1]) if len(rows) else keys
    every = np.add.reduceat(keys, runs[:-1], dtype=np.uint32) if len(rows) else keys
    first = signatures(entries, rows, 2 * seed)
    inner = (second & np.uint32(0xFFFF0000)) | (every >> np.uint32(16))
    order = np.argsort((first.astype(np.uint64) << np.uint64(32)) | inner, kind="stable")
    return rows[order], first[order]


def _in_runs(rows: Array, keys: Array, r: int) -> Array:
    """Return each `r` rows of one key in turn; omit the last few of a run."""
    heads = np.flatnonzero(changes([keys]))
    counts = np.diff(np.append(heads, len(rows)))
    whole = np.repeat(counts // r * r, counts)
    return rows[np.arange(len(rows)) - np.repeat(heads, counts) < whole].reshape(-1, r)


def signatures(entries: Entries, rows: Array, seed: int) -> Array:
    """Return the least hash of a column of each row; rows must be ascending and hold something."""
    keys, runs = _hashes(entries, rows, seed)
    return np.minimum.reduceat(keys, runs[:-1]) if len(rows) else keys


def _hashes(entries: Entries, rows: Array, seed: int) -> tuple[Array, Array]:
    """Return a hash of the column of each entry of the rows, and the row pointers of these entries."""
    lengths = lengths_of(entries)[rows]
    every = len(rows) == np.count_nonzero(np.diff(entries.indptr))
    runs = begins(lengths)
    index = None if every else spread(entries.indptr[rows], runs, index_dtype(entries.nnz))
    keys = (entries.last if index is None else take(entries.last, index)).astype(np.uint32)
    keys += np.uint32(seed * SALT)
    for factor in MIX:
        keys *= np.uint32(factor)
        keys ^= keys >> np.uint32(15)
    return keys, runs


def _columns(entries: Entries, groups: Array) -> tuple[Array, Array]:
    """Return the number of distinct columns and the number of entries of each group of rows."""
    rows = groups.reshape(-1)
    runs = begins(lengths_of(entries)[rows])
    columns = take(entries.last, spread(entries.indptr[rows], runs, index_dtype(entries.nnz)))
    starts = runs[:: groups.shape[1]]
    return count_blocks(starts, columns, entries.shape[1]), np.diff(starts)


# CSR whose rows are traversed in another order, so that gathered rows stay in cache.


@register("reordered")
@dataclass(frozen=True, repr=False)
class Reordered(SinglePieceFormat):
    """Every row with its number, neighbours using about the same columns, so that gathered values are reused.

    The order is the reverse Cuthill-McKee order of the graph of the matrix, or where it is not square of the graph
    between its rows and its columns. Coordinates stay what they are: results need no permutation.

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Notes
    -----
    Cuthill and McKee, "Reducing the bandwidth of sparse symmetric matrices", 1969; the order is scipy's.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.row_groups import Reordered
    >>> entries = Entries.of_rows((4, 4), np.array([0, 2, 4, 6, 8]), np.array([0, 2, 1, 3, 0, 2, 1, 3]))
    >>> piece, = Reordered().pack(entries)
    >>> rows = piece.arrays["rows"].tolist()
    >>> sorted([sorted(rows[:2]), sorted(rows[2:])])  # rows of the same columns are neighbours
    [[0, 2], [1, 3]]
    """

    name = "reordered"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="row_ptr rows indptr indices",
            sizes="m n nnz",
            axes="""
                I = sparse_variable(None, (m, m), (row_ptr, rows), sorted=False)
                J = sparse_variable(I, (n, nnz), (indptr, indices))
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("reordered", description, {0: ["I"], 1: ["J"]}, partitions_rows=True)

    def packed(self, entries: Entries) -> Packed:
        (m, n), nnz = entries.shape, self.check_count(entries.nnz)
        rows = order_of(entries)
        runs = begins(lengths_of(entries)[rows])
        index = spread(entries.indptr[rows], runs, index_dtype(nnz))
        arrays = self.arrays(row_ptr=np.array([0, m]), rows=rows, indptr=runs, indices=take(entries.last, index))
        return Packed(arrays, {"m": m, "n": n, "nnz": nnz}, nnz, index)


def order_of(entries: Entries) -> Array:
    """Return the rows of a matrix in reverse Cuthill-McKee order."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # brings scipy.linalg, which few calls need

    (m, n), nnz = entries.shape, entries.nnz
    nodes = m if m == n else m + n
    check_memory(20 * nnz + 16 * nodes, f"the graph of {nnz} entries")
    if not nnz:
        return np.arange(m)
    dtype = index_dtype(max(2 * nnz, nodes))
    matrix = sp.csr_array((np.ones(nnz, np.int8), entries.last.astype(dtype), entries.indptr.astype(dtype)), (m, n))
    graph = matrix + matrix.T if m == n else sp.block_array([[None, matrix], [matrix.T, None]])
    order = reverse_cuthill_mckee(sp.csr_matrix(graph), symmetric_mode=True)
    return order[order < m].astype(np.int64)


__all__ = ["Grouped", "Reordered", "RowGroups", "grouped_share", "groups_of", "order_of", "signatures"]
