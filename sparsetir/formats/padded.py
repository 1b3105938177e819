# SPDX-License-Identifier: Apache-2.0
"""Padded layouts: SELL-C-sigma, padded rows, row tiles, n:m, and columns of 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, StructureError
from sparsetir.formats.base import Estimate, FormatRewriteRule
from sparsetir.formats.blocks import number_blocks
from sparsetir.formats.compressed import SinglePieceFormat
from sparsetir.formats.format import (
    INT32_END,
    Array,
    CapacityError,
    Entries,
    Format,
    Packed,
    check_positive,
    lengths_of,
    padded,
    register,
    row_chunks,
    row_numbers,
    strided,
)
from sparsetir.interop.arrays import begins, changes, index_dtype, spread
from sparsetir.utils.memory import check_memory

# Layouts of matrices with padding where it pays: SELL-C-sigma, padded rows, row tiles, n of m.


NARROWEST = 8  # rows of the slices that are counted for a pattern


@register("sell")
@dataclass(frozen=True, repr=False)
class SELL(SinglePieceFormat):
    """SELL-C-sigma: C rows side by side, each slice as wide as its longest row.

    Rows are sorted by length within windows of `sigma` rows, so that the rows of a slice are about as long. Slot w of
    all rows of a slice lies in C consecutive values. Padding holds column n; the last slice is filled up with row m.

    Parameters
    ----------
    C : int
        Rows of a slice: a multiple of the vector length.
    sigma : int
        Rows of a window. With 1 the rows keep their order.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When C or sigma is not a positive integer.

    Notes
    -----
    Kreutzer et al., "A unified sparse matrix data format for efficient general sparse matrix-vector multiplication on
    modern processors with wide SIMD units", SIAM J. Sci. Comput. 36(5), 2014.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.padded import SELL
    >>> piece = SELL(C=2, sigma=4).packed(Entries.of_rows((3, 9), np.array([0, 1, 1, 3]), np.array([7, 0, 4])))
    >>> piece.arrays["rows"].tolist(), piece.arrays["indices"].tolist()
    ([2, 0, 1, 3], [0, 7, 4, 9])
    """

    C: int = 8
    sigma: int = 64
    name = "sell"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, C=self.C, sigma=self.sigma)

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="slice_ptr indices",
            table=f"rows slices * {self.C}",
            sizes="m n slices width total",
            axes=f"""
                S = dense_fixed(slices)
                W = dense_variable(S, (width, total), slice_ptr)
                R = sparse_fixed(W, (m, {self.C}), lambda s, w, r: rows[s * {self.C} + r], sorted=False)
                J = singleton(R, n, indices)
            """,
            buffer="S, W, R, J",
        )
        axis_map = {0: ["S", "R"], 1: ["W", "J"]}
        coords = lambda s, w, r, j: (r, j)  # noqa: E731
        return FormatRewriteRule("sell", description, axis_map, inverse=coords, partitions_rows=True, independent=True)

    def packed(self, entries: Entries) -> Packed:
        laid = self.slices(entries)
        indices = padded(laid.count, entries.shape[1], self.index_type, laid.slots, entries.last)
        arrays = self.arrays(slice_ptr=laid.starts, indices=indices, rows=laid.rows)
        return Packed(arrays, laid.sizes, laid.count, slots=laid.slots)

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.sliced, most=pattern.sliced * max(self.C, NARROWEST) // NARROWEST)

    def slices(self, entries: Entries) -> Slices:
        """Return which rows are stored side by side, and the slots of their entries."""
        (m, n), lengths = entries.shape, lengths_of(entries)
        order = longest_first(lengths, self.sigma)
        slices = -(-m // self.C)
        check_memory(8 * slices * self.C, f"numbers of {slices * self.C} rows")
        padded_lengths = np.zeros(slices * self.C, np.int64)
        padded_lengths[:m] = lengths[order]
        widths = padded_lengths.reshape(slices, self.C).max(axis=1)
        starts = begins(widths)
        total = int(starts[-1])
        count = self.check_count(total * self.C, indices=total * self.C)
        begin, place = np.empty(m, np.int64), np.arange(m)
        begin[order] = starts[place // self.C] * self.C + place % self.C
        rows = np.full(slices * self.C, m, self.index_type)
        rows[:m] = order
        sizes = {"m": m, "n": n, "slices": slices, "width": int(widths.max(initial=0)), "total": total}
        return Slices(order, rows, starts, strided(begin, entries.indptr, self.C, count), count, sizes)


@dataclass(frozen=True, eq=False)
class Slices:
    """The places of the rows and the entries of a matrix in slices; `rows` includes the padding of the last slice."""

    order: Array
    rows: Array
    starts: Array
    slots: Array
    count: int
    sizes: dict[str, int]


def longest_first(lengths: Array, window: int) -> Array:
    """Return the order of rows by descending length within windows; rows of one length keep theirs."""
    m = len(lengths)
    window = min(window, max(m, 1))
    windows = -(-m // window)
    keys = np.ones(windows * window, np.int64)  # the padding of the last window comes last
    keys[:m] = -lengths
    order = np.argsort(keys.reshape(windows, window), axis=1, kind="stable")
    order += np.arange(windows)[:, None] * window
    return order.reshape(-1)[:m]


@register("padded_csr")
@dataclass(frozen=True, repr=False)
class PaddedCSR(SinglePieceFormat):
    """Rows in chunks of `t` slots, the last chunk of a row filled up with column n.

    Parameters
    ----------
    t : int
        Slots of a chunk.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When t is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.padded import PaddedCSR
    >>> piece = PaddedCSR(t=2).packed(Entries.of_rows((2, 9), np.array([0, 3, 3]), np.array([0, 4, 7])))
    >>> piece.arrays["indptr"].tolist(), piece.arrays["indices"].tolist()
    ([0, 2, 2], [0, 4, 7, 9])
    """

    t: int = 4
    name = "padded_csr"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, t=self.t)

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="indptr indices",
            sizes="m n most total",
            axes=f"""
                I = dense_fixed(m)
                G = dense_variable(I, (most, total), indptr)
                J = sparse_fixed(G, (n, {self.t}), indices)
            """,
            buffer="I, G, J",
        )
        axis_map = {0: ["I"], 1: ["G", "J"]}
        coords = lambda i, g, j: (i, j)  # noqa: E731
        return FormatRewriteRule("padded_csr", description, axis_map, inverse=coords, partitions_rows=True)

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.nnz + (self.t - 1) * (pattern.rows.count - pattern.rows.empty))

    def packed(self, entries: Entries) -> Packed:
        (m, n), groups = entries.shape, -(-lengths_of(entries) // self.t)
        indptr = begins(groups)
        total = int(indptr[-1])
        count = self.check_count(total * self.t, indices=total * self.t)
        slots = spread(indptr[:-1] * self.t, entries.indptr, index_dtype(count).name)
        arrays = self.arrays(indptr=indptr, indices=padded(count, n, self.index_type, slots, entries.last))
        sizes = {"m": m, "n": n, "most": int(groups.max(initial=0)), "total": total}
        return Packed(arrays, sizes, count, slots=slots)


@register("sr_bcrs")
@dataclass(frozen=True, repr=False)
class SRBCRS(SinglePieceFormat):
    """SR-BCRS: tiles of `t` rows, in each the columns that are not empty as dense t x 1 vectors.

    The vectors of a tile come in groups of `g`, the last one filled up with column n.

    Parameters
    ----------
    t, g : int
        Rows of a tile, vectors of a group.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When t or g is not a positive integer.

    Notes
    -----
    Li et al., "Efficient quantized sparse matrix operations on tensor cores" (Magicube), SC 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.padded import SRBCRS
    >>> piece = SRBCRS(t=2, g=2).packed(Entries.of_rows((2, 9), np.array([0, 2, 4]), np.array([1, 4, 1, 7])))
    >>> piece.arrays["indices"].tolist(), piece.values(np.arange(1, 5)).tolist()
    ([1, 4, 7, 9], [1, 3, 2, 0, 0, 4, 0, 0])
    """

    t: int = 8
    g: int = 8
    name = "sr_bcrs"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, t=self.t, g=self.g)

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="indptr indices",
            sizes="n tiles most total",
            axes=f"""
                RO = dense_fixed(tiles)
                G = dense_variable(RO, (most, total), indptr)
                J = sparse_fixed(G, (n, {self.g}), indices)
                RI = dense_fixed({self.t})
            """,
            buffer="RO, G, J, RI",
        )
        t, axis_map = self.t, {0: ["RO", "RI"], 1: ["G", "J"]}
        coords = lambda ro, g, j, ri: (ro * t + ri, j)  # noqa: E731
        return FormatRewriteRule("sr_bcrs", description, axis_map, inverse=coords, fills=True)

    def estimate(self, pattern: Any) -> Estimate:
        block_fill = pattern.blocks.get((self.t, 1))
        vectors = pattern.nnz if block_fill is None else block_fill.count
        tiles = min(-(-pattern.shape[0] // self.t), vectors)
        return Estimate(self.t * (vectors + (self.g - 1) * tiles), per_index=self.t)

    @property
    def block(self) -> tuple[int, int]:
        return int(self.t), 1

    def packed(self, entries: Entries) -> Packed:
        n, indptr = entries.shape[1], entries.indptr
        tiles = np.append(indptr[: -1 : self.t], indptr[-1])
        columns, vector, tile_counts = number_blocks(tiles, entries.last, n)
        groups = -(-tile_counts // self.g)
        starts = begins(groups)
        total = int(starts[-1])
        count = self.check_count(total * self.g * self.t, indices=total * self.g)
        place = spread(starts[:-1] * self.g, begins(tile_counts), index_dtype(count).name)
        slots = vector if vector.dtype == place.dtype else np.empty(entries.nnz, place.dtype)
        for part, rows in row_numbers(indptr):
            slots[part] = place[vector[part]] * self.t + rows % self.t
        arrays = self.arrays(indptr=starts, indices=padded(total * self.g, n, self.index_type, place, columns))
        sizes = {"n": n, "tiles": len(tile_counts), "most": int(groups.max(initial=0)), "total": total}
        return Packed(arrays, sizes, count, slots=slots)


@register("nm")
@dataclass(frozen=True, repr=False)
class NM(SinglePieceFormat):
    """At most `n` entries in each group of `m` consecutive columns: 2:4 and its kind.

    Padding holds the coordinate m of its group.

    Parameters
    ----------
    n, m : int
        Slots and columns of a group.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When n or m is not a positive integer, or n is greater than m.
    StructureError
        `pack`: when a group holds more entries; the message names its row and number.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.padded import NM
    >>> piece = NM(2, 4).packed(Entries.of_rows((1, 8), np.array([0, 3]), np.array([1, 3, 6])))
    >>> piece.arrays["indices"].tolist()
    [1, 3, 2, 4]
    """

    n: int = 2
    m: int = 4
    name = "nm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, n=self.n, m=self.m)
        if self.n > self.m:
            raise ArgumentError(f"nm keeps n of m columns, got n={self.n} and m={self.m}: pass n up to m")

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="indices",
            sizes="m groups",
            axes=f"""
                I = dense_fixed(m)
                G = sparse_fixed(I, (groups, groups), lambda i, s: s)
                S = sparse_fixed(G, ({self.m}, {self.n}), indices)
            """,
            buffer="I, G, S",
        )
        wide, axis_map = self.m, {0: ["I"], 1: ["G", "S"]}
        coords = lambda i, g, s: (i, g * wide + s)  # noqa: E731
        placed = lambda i, j: (i, j // wide, j % wide)  # noqa: E731
        return FormatRewriteRule("nm", description, axis_map, inverse=coords, forward=placed, partitions_rows=True)

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.shape[0] * -(-pattern.shape[1] // self.m) * self.n)

    def packed(self, entries: Entries) -> Packed:
        rows, columns = entries.shape
        groups = -(-columns // self.m)
        count = rows * groups * self.n
        count = self.check_count(count, indices=count)
        slots = np.empty(entries.nnz, index_dtype(count))
        indices = np.full(count, self.m, self.index_type)
        for begin, end in row_chunks(entries.indptr):
            starts = entries.indptr[begin : end + 1]
            part = slice(starts[0], starts[-1])
            columns_held = entries.last[part]
            group = np.repeat(np.arange(begin, end), np.diff(starts)) * groups + columns_held // self.m
            slot = group * self.n + self._rank(group, groups)
            indices[slot] = columns_held % self.m
            slots[part] = slot
        return Packed({"indices": indices}, {"m": rows, "groups": groups}, count, slots=slots)

    def _rank(self, group: Array, groups: int) -> Array:
        """Return the number of entries of the same group that precede each entry."""
        starts = np.append(np.flatnonzero(changes([group])), len(group))
        sizes = np.diff(starts)
        if (sizes > self.n).any():
            most = int(sizes.argmax())
            row, number = divmod(int(group[starts[most]]), groups)
            columns = f"columns {number * self.m} to {number * self.m + self.m - 1}"
            fault = f"row {row} holds {sizes[most]} entries in group {number}, {columns}"
            remedy = f"prune it or store it as nm({sizes[most]}, {self.m})"
            raise StructureError(f"{fault}, expected at most {self.n}: {remedy}")
        return np.arange(len(group)) - np.repeat(starts[:-1], sizes)


# Layouts with columns of 16 bits: how far each lies behind the first one of its row, or of its slice of rows.
#
# A matrix times a vector reads little else than values and columns: 6 bytes for an entry in place of 8 in float32, 10
# in place of 12 in float64.


OFFSET = "uint16"
FARTHEST = 2**16 - 1  # that an offset reaches; in slices it marks padding


@register("narrow_csr")
@dataclass(frozen=True, repr=False)
class NarrowCSR(SinglePieceFormat):
    """CSR with 16-bit columns: the first column of each row, and how far behind it each entry lies.

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the other index arrays.

    Raises
    ------
    StructureError
        `packed`: when a row reaches over more than 65,536 columns.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.padded import NarrowCSR
    >>> piece = NarrowCSR().packed(Entries.of_rows((2, 10**6), np.array([0, 2, 3]), np.array([70000, 70004, 9])))
    >>> piece.arrays["first"].tolist(), piece.arrays["offsets"].tolist(), piece.arrays["offsets"].dtype.name
    ([70000, 9], [0, 4, 0], 'uint16')
    """

    name = "narrow_csr"

    def rule(self) -> FormatRewriteRule:
        column = f'first[i] + T.Cast("{self.index_type}", offsets[p])'
        description = self.description(
            arrays="indptr",
            table=f"first m\noffsets:{OFFSET} nnz",
            sizes="m n nnz",
            axes=f"""
                I = dense_fixed(m)
                J = sparse_variable(I, (n, nnz), (indptr, lambda i, s, p: {column}), full=True)
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("narrow_csr", description, {0: ["I"], 1: ["J"]}, partitions_rows=True)

    def packed(self, entries: Entries) -> Packed:
        (m, n), nnz = entries.shape, self.check_count(entries.nnz)
        _check_sums(self, n)
        first, last = reach(entries)
        wide = last - first > FARTHEST
        if wide.any():
            row = int(wide.argmax())
            raise _too_wide(self, f"row {row} holds columns {first[row]} to {last[row]}", FARTHEST, "csr")
        arrays = self.arrays(indptr=entries.indptr, first=first)
        arrays["offsets"] = offsets(entries, first)
        return Packed(arrays, {"m": m, "n": n, "nnz": nnz}, nnz)


@register("narrow_sell")
@dataclass(frozen=True, repr=False)
class NarrowSELL(SELL):
    """SELL-C-sigma with 16-bit columns: the first column of each slice, and how far behind it each entry lies.

    The greatest offset marks padding.

    Parameters
    ----------
    C : int
        Rows of a slice: a multiple of the vector length.
    sigma : int
        Rows of a window. With 1 the rows keep their order.
    idtype : {"int32", "int64"}, optional
        Of the other index arrays.

    Raises
    ------
    ArgumentError
        When C or sigma is not a positive integer.
    StructureError
        `packed`: when the rows of a slice reach over more than 65,535 columns together.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.padded import NarrowSELL
    >>> piece = NarrowSELL(C=2, sigma=2).packed(Entries.of_rows((2, 999), np.array([0, 2, 3]), np.array([70, 74, 79])))
    >>> piece.arrays["first"].tolist(), piece.arrays["offsets"].tolist()
    ([70], [0, 9, 4, 65535])
    """

    name = "narrow_sell"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
            arrays="slice_ptr",
            table=f"rows slices * {self.C}\nfirst slices\noffsets:{OFFSET} total * {self.C}",
            sizes="m n slices width total",
            axes=f"""
                S = dense_fixed(slices)
                W = dense_variable(S, (width, total), slice_ptr)
                R = sparse_fixed(W, (m, {self.C}), lambda s, w, r: rows[s * {self.C} + r], sorted=False)
                D = singleton(R, {FARTHEST}, lambda s, w, r, t, p: T.Cast("{self.index_type}", offsets[p]))
                J = singleton(D, n, lambda s, w, r, d, t: first[s] + d, full=True)
            """,
            buffer="S, W, R, D, J",
        )
        axis_map = {0: ["S", "R"], 1: ["W", "D", "J"]}
        coords = lambda s, w, r, d, j: (r, j)  # noqa: E731
        return FormatRewriteRule(
            "narrow_sell", description, axis_map, inverse=coords, partitions_rows=True, independent=True
        )

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.sliced)

    def packed(self, entries: Entries) -> Packed:
        _check_sums(self, entries.shape[1])
        laid, ends = self.slices(entries), reach(entries)
        first, last = self._together(laid, ends)
        wide = last - first >= FARTHEST
        if wide.any():
            at = int(wide.argmax()) * self.C
            rows = laid.order[at : at + self.C]
            low, high = rows[ends[0][rows].argmin()], rows[ends[1][rows].argmax()]
            fault = f"a slice holds column {ends[0][low]} in row {low} and column {ends[1][high]} in row {high}"
            raise _too_wide(self, fault, FARTHEST - 1, "sell")
        base = np.empty(len(laid.order), np.int64)
        base[laid.order] = np.repeat(first, self.C)[: len(base)]
        arrays = self.arrays(slice_ptr=laid.starts, rows=laid.rows, first=first)
        arrays["offsets"] = padded(laid.count, FARTHEST, OFFSET, laid.slots, offsets(entries, base))
        return Packed(arrays, laid.sizes, laid.count, slots=laid.slots)

    def _together(self, laid: Slices, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        """Return the first and the last column of each slice."""
        first, last = (np.full(len(laid.rows), outside, np.int64) for outside in (laid.sizes["n"], -1))
        first[: len(laid.order)], last[: len(laid.order)] = (columns[laid.order] for columns in ends)
        shape = laid.sizes["slices"], self.C
        return first.reshape(shape).min(axis=1), last.reshape(shape).max(axis=1)


def reach(entries: Entries) -> tuple[Array, Array]:
    """Return the first and the last column of each row of a matrix; of a row without entries n and -1."""
    m, n = entries.shape
    check_memory(16 * m, f"the columns at the ends of {m} rows")
    first, last = np.full(m, n, np.int64), np.full(m, -1, np.int64)
    rows, starts = entries.occupied
    first[rows], last[rows] = entries.last[starts[:-1]], entries.last[starts[1:] - 1]
    return first, last


def offsets(entries: Entries, base: Array) -> Array:
    """Return the offset of each entry's column from the `base` of its row."""
    out = np.empty(entries.nnz, OFFSET)
    for begin, end in row_chunks(entries.indptr):
        starts = entries.indptr[begin : end + 1]
        part = slice(int(starts[0]), int(starts[-1]))
        out[part] = entries.last[part] - np.repeat(base[begin:end], np.diff(starts))
    return out


def _check_sums(format: Format, n: int) -> None:
    """Raise unless the index type can represent the sum of any column and any offset."""
    if format.index_type == "int32" and n + FARTHEST >= INT32_END:
        fault = f"{format!r} would add up to {FARTHEST} to {n} columns, more than int32 indices can count"
        raise CapacityError(f"{fault}: leave idtype out or pass idtype='int64'")


def _too_wide(format: Format, fault: str, most: int, alternative: str) -> StructureError:
    return StructureError(
        f"{fault}, but {format!r} reaches {most} columns from the first one: store it as {alternative}"
    )


__all__ = [
    "FARTHEST",
    "NM",
    "SELL",
    "SRBCRS",
    "NarrowCSR",
    "NarrowSELL",
    "PaddedCSR",
    "Slices",
    "longest_first",
    "offsets",
    "reach",
]
