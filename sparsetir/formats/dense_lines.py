# SPDX-License-Identifier: Apache-2.0
"""Formats of two parts: dense rows or dense columns, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.formats.arrays import CHUNK, Array, index_dtype, take
from sparsetir.formats.description import describe
from sparsetir.formats.estimate import Estimate
from sparsetir.formats.format import Entries, Format, Packed, register
from sparsetir.formats.layouts import Layout
from sparsetir.formats.memory import check_memory
from sparsetir.formats.pieces import lengths_of, row_numbers
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.formats.splits import DensePart

LINES = 1.2  # estimated values for each entry, with dense rows or columns apart


@register("dense_rows")
@dataclass(frozen=True, repr=False)
class DenseRows(DensePart):
    """Rows that are at least `density` full with a value for each column, all other entries in the rest.

    Parameters
    ----------
    density : float
        Fraction of the columns.
    rest : Format or str
        How the other entries are stored.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When density is outside (0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.dense_lines import DenseRows
    >>> entries = Entries.of_rows((2, 4), np.array([0, 1, 4]), np.array([3, 0, 1, 3]))
    >>> DenseRows().pack(entries)[0].arrays["rows"].tolist()
    [1]
    """

    name = "dense_rows"

    @property
    def main(self) -> Format:
        return WholeRows()

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(LINES * pattern.nnz, most=2 * pattern.nnz, pieces=2)

    def chosen(self, entries: Entries) -> Array:
        lengths = lengths_of(entries)
        return np.repeat(lengths >= self.density * entries.shape[1], lengths)


@dataclass(frozen=True, repr=False)
class WholeRows(Layout):
    """Those rows that hold something, each with a value for every column."""

    name = "whole_rows"

    def rule(self) -> FormatRewriteRule:
        description = describe(
            "whole_rows",
            self.index_type,
            arrays="row_ptr rows",
            sizes="m n mr",
            axes="""
                I = sparse_variable(None, (m, mr), (row_ptr, rows))
                J = sparse_fixed(I, (n, n), lambda i, s: s)
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("rows", description, {0: ["I"], 1: ["J"]}, fills=True)

    def packed(self, entries: Entries) -> Packed:
        (m, n), (rows, starts) = entries.shape, entries.occupied
        count = self.check_count(len(rows) * n)
        slots = np.repeat((np.arange(len(rows)) * n).astype(index_dtype(count)), np.diff(starts))
        slots += entries.last.astype(slots.dtype, copy=False)
        arrays = self.arrays(row_ptr=np.array([0, len(rows)]), rows=rows)
        return Packed(arrays, {"m": m, "n": n, "mr": len(rows)}, count, slots=slots)


@register("dense_columns")
@dataclass(frozen=True, repr=False)
class DenseColumns(DensePart):
    """Columns that are at least `density` full with a value for each row, all other entries in the rest.

    Parameters
    ----------
    density : float
        Fraction of the rows.
    rest : Format or str
        How the other entries are stored.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When density is outside (0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.dense_lines import DenseColumns
    >>> entries = Entries.of_rows((3, 4), np.array([0, 1, 3, 3]), np.array([2, 0, 2]))
    >>> DenseColumns().pack(entries)[0].arrays["columns"].tolist()
    [2]
    """

    name = "dense_columns"

    @property
    def main(self) -> Format:
        return WholeColumns()

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(LINES * pattern.nnz, most=2 * pattern.nnz, pieces=2)

    def chosen(self, entries: Entries) -> Array:
        check_memory(8 * entries.shape[1], f"numbers of {entries.shape[1]} columns")
        counts = np.zeros(entries.shape[1], index_dtype(entries.nnz))
        for begin in range(0, entries.nnz, CHUNK):
            np.add.at(counts, entries.last[begin : begin + CHUNK], counts.dtype.type(1))
        return take(counts >= self.density * entries.shape[0], entries.last)


@dataclass(frozen=True, repr=False)
class WholeColumns(Layout):
    """Those columns that hold something, each with a value for every row."""

    name = "whole_columns"

    def rule(self) -> FormatRewriteRule:
        description = describe(
            "whole_columns",
            self.index_type,
            arrays="",
            table="columns nc",
            sizes="m n nc",
            axes="""
                I = dense_fixed(m)
                J = sparse_fixed(I, (n, nc), lambda i, s: columns[s])
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("columns", description, {0: ["I"], 1: ["J"]}, fills=True, partitions_rows=True)

    def packed(self, entries: Entries) -> Packed:
        m, n = entries.shape
        check_memory(8 * n, f"numbers of {n} columns")
        taken = np.zeros(n, np.bool_)
        taken[entries.last] = True
        columns = np.flatnonzero(taken)
        count = self.check_count(m * len(columns))
        rank, slots = np.cumsum(taken) - 1, np.empty(entries.nnz, index_dtype(count))
        for part, rows in row_numbers(entries.indptr):
            slots[part] = rows * len(columns) + rank[entries.last[part]]
        return Packed(self.arrays(columns=columns), {"m": m, "n": n, "nc": len(columns)}, count, slots=slots)


__all__ = ["DenseColumns", "DenseRows", "WholeColumns", "WholeRows"]
