# SPDX-License-Identifier: Apache-2.0
"""Layouts of matrices by diagonals; diagonal d holds the entries (i, i + d)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sparsetir.errors import ArgumentError, StructureError
from sparsetir.formats.arrays import Array, index_dtype
from sparsetir.formats.description import describe
from sparsetir.formats.format import Entries, Packed, register
from sparsetir.formats.layouts import Layout
from sparsetir.formats.memory import check_memory
from sparsetir.formats.pieces import row_numbers
from sparsetir.transform.rule import FormatRewriteRule


@register("dia")
@dataclass(frozen=True, repr=False)
class DIA(Layout):
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
        description = describe(
            "dia",
            self.index_type,
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

    def packed(self, entries: Entries) -> Packed:
        m, n = entries.shape
        check_memory(8 * (m + n), f"numbers of {m + n} diagonals")
        taken = np.zeros(max(m + n - 1, 0), np.bool_)
        for _, _, number in numbered(entries):
            taken[number] = True
        offsets = np.flatnonzero(taken) - (m - 1)
        count = self.check_count(m * len(offsets))
        rank, slots = np.cumsum(taken) - 1, np.empty(entries.nnz, index_dtype(count))
        for part, rows, number in numbered(entries):
            slots[part] = rows * len(offsets) + rank[number]
        return Packed(self.arrays(offsets=offsets), {"m": m, "n": n, "nd": len(offsets)}, count, slots=slots)


@register("band")
@dataclass(frozen=True, repr=False)
class Band(Layout):
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
        When a number is negative or no whole number.
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
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 0:
                raise ArgumentError(f"{side} of band must be a whole number from 0 on, found {number!r}")

    @property
    def width(self) -> int:
        """Slots in a row."""
        return int(self.lower) + 1 + int(self.upper)

    def rule(self) -> FormatRewriteRule:
        description = describe(
            "band",
            self.index_type,
            arrays="",
            sizes="m n",
            axes=f"""
                I = dense_fixed(m)
                J = sparse_fixed(I, (n, {self.width}), lambda i, s: i + s - {self.lower})
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("band", description, {0: ["I"], 1: ["J"]}, fills=True, partitions_rows=True)

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


def numbered(entries: Entries) -> Iterator[tuple[slice, Array, Array]]:
    """Ranges of the entries with their rows and the numbers of their diagonals: column - row + m - 1."""
    for part, rows in row_numbers(entries.indptr):
        yield part, rows, entries.last[part] - rows + (entries.shape[0] - 1)


__all__ = ["DIA", "Band", "numbered"]
