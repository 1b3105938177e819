# SPDX-License-Identifier: Apache-2.0
"""Layouts with columns of 16 bits: how far each lies behind the first one of its row, or of its slice of rows.

A matrix times a vector reads little else than values and columns: 6 bytes for an entry in place of 8 in float32, 10 in
place of 12 in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.errors import StructureError
from sparsetir.formats.arrays import Array
from sparsetir.formats.description import describe
from sparsetir.formats.estimate import Estimate
from sparsetir.formats.format import INT32_END, CapacityError, Entries, Format, Packed, register
from sparsetir.formats.layouts import Layout
from sparsetir.formats.memory import check_memory
from sparsetir.formats.pieces import padded, row_chunks
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.formats.special import SELL, Slices

OFFSET = "uint16"
FARTHEST = 2**16 - 1  # that an offset reaches; in slices it marks padding


@register("narrow_csr")
@dataclass(frozen=True, repr=False)
class NarrowCSR(Layout):
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
    >>> from sparsetir.formats.narrow import NarrowCSR
    >>> piece = NarrowCSR().packed(Entries.of_rows((2, 10**6), np.array([0, 2, 3]), np.array([70000, 70004, 9])))
    >>> piece.arrays["first"].tolist(), piece.arrays["offsets"].tolist(), piece.arrays["offsets"].dtype.name
    ([70000, 9], [0, 4, 0], 'uint16')
    """

    name = "narrow_csr"

    def rule(self) -> FormatRewriteRule:
        column = f'first[i] + T.Cast("{self.index_type}", offsets[p])'
        description = describe(
            "narrow_csr",
            self.index_type,
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
        When C or sigma is no whole number from 1 on.
    StructureError
        `packed`: when the rows of a slice reach over more than 65,535 columns together.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.narrow import NarrowSELL
    >>> piece = NarrowSELL(C=2, sigma=2).packed(Entries.of_rows((2, 999), np.array([0, 2, 3]), np.array([70, 74, 79])))
    >>> piece.arrays["first"].tolist(), piece.arrays["offsets"].tolist()
    ([70], [0, 9, 4, 65535])
    """

    name = "narrow_sell"

    def rule(self) -> FormatRewriteRule:
        description = describe(
            "narrow_sell",
            self.index_type,
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
            found = f"a slice holds column {ends[0][low]} in row {low} and column {ends[1][high]} in row {high}"
            raise _too_wide(self, found, FARTHEST - 1, "sell")
        base = np.empty(len(laid.order), np.int64)
        base[laid.order] = np.repeat(first, self.C)[: len(base)]
        arrays = self.arrays(slice_ptr=laid.starts, rows=laid.rows, first=first)
        arrays["offsets"] = padded(laid.count, FARTHEST, OFFSET, laid.slots, offsets(entries, base))
        return Packed(arrays, laid.sizes, laid.count, slots=laid.slots)

    def _together(self, laid: Slices, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        """The first and the last column of each slice."""
        first, last = (np.full(len(laid.rows), outside, np.int64) for outside in (laid.sizes["n"], -1))
        first[: len(laid.order)], last[: len(laid.order)] = (columns[laid.order] for columns in ends)
        shape = laid.sizes["slices"], self.C
        return first.reshape(shape).min(axis=1), last.reshape(shape).max(axis=1)


def reach(entries: Entries) -> tuple[Array, Array]:
    """The first and the last column of each row of a matrix; of a row without entries n and -1."""
    m, n = entries.shape
    check_memory(16 * m, f"the columns at the ends of {m} rows")
    first, last = np.full(m, n, np.int64), np.full(m, -1, np.int64)
    rows, starts = entries.occupied
    first[rows], last[rows] = entries.last[starts[:-1]], entries.last[starts[1:] - 1]
    return first, last


def offsets(entries: Entries, base: Array) -> Array:
    """How far each entry lies behind the `base` of its row."""
    out = np.empty(entries.nnz, OFFSET)
    for begin, end in row_chunks(entries.indptr):
        starts = entries.indptr[begin : end + 1]
        part = slice(int(starts[0]), int(starts[-1]))
        out[part] = entries.last[part] - np.repeat(base[begin:end], np.diff(starts))
    return out


def _check_sums(format: Format, n: int) -> None:
    """The first column and any offset must have a sum, though it may be that of a row and another's offset."""
    if format.index_type == "int32" and n + FARTHEST >= INT32_END:
        found = f"{format!r} would add up to {FARTHEST} to {n} columns, more than int32 indices can count"
        raise CapacityError(f"{found}: leave idtype out or pass idtype='int64'")


def _too_wide(format: Format, found: str, most: int, other: str) -> StructureError:
    return StructureError(f"{found}, but {format!r} reaches {most} columns from the first one: store it as {other}")


__all__ = ["FARTHEST", "NarrowCSR", "NarrowSELL", "offsets", "reach"]
