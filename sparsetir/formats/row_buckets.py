# SPDX-License-Identifier: Apache-2.0
"""Rows shared out by their length to pieces of constant width: ELL without the padding to the longest row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.arrays import Array, begins, index_dtype, spread
from sparsetir.formats.description import describe
from sparsetir.formats.estimate import Estimate
from sparsetir.formats.format import Entries, Format, Packed, check_idtype, check_positive, register
from sparsetir.formats.layouts import Layout
from sparsetir.formats.partitions import Partition, column_ranges
from sparsetir.formats.pieces import lengths_of, padded
from sparsetir.formats.rule import FormatRewriteRule

ROUNDED = 1.3  # estimated values for each entry, with row lengths rounded up to powers of two
WIDTHS = (1, 2, 4, 8, 16, 32)


def check_widths(name: str, widths: Sequence[int]) -> tuple[int, ...]:
    """`widths` as a tuple; `ArgumentError` unless they are whole numbers from 1 on in ascending order."""
    if not isinstance(widths, Sequence):
        fault = f"widths of {name}: expected a sequence of numbers, got {type(widths).__name__}."
        raise ArgumentTypeError(f"{fault} Pass a tuple.")
    found = tuple(widths)
    for width in found:
        check_positive(name, widths=width)
    if not found or any(a >= b for a, b in pairwise(found)):
        raise ArgumentError(f"widths of {name} must be one or more numbers in ascending order, found {found}")
    return tuple(int(width) for width in found)


@dataclass(frozen=True, repr=False)
class RowList(Layout):
    """Rows by their numbers, with `width` slots each."""

    width: int = 1
    name = "row_list"

    def rule(self) -> FormatRewriteRule:
        indices = "indices" if self.width else "lambda i, s: s"  # no slot, no array
        description = describe(
            f"rows_of_{self.width}",
            self.index_type,
            arrays="row_ptr rows indices" if self.width else "row_ptr rows",
            sizes="m n mr",
            axes=f"""
                I = sparse_variable(None, (m, mr), (row_ptr, rows))
                J = sparse_fixed(I, (n, {self.width}), {indices})
            """,
            buffer="I, J",
        )
        return FormatRewriteRule(f"w{self.width}", description, {0: ["I"], 1: ["J"]}, partitions_rows=True)

    def listed(self, entries: Entries, rows: Array, lengths: Array) -> Packed:
        """The piece of these rows, given how many entries each has."""
        count = self.check_count(len(rows) * self.width, indices=len(rows) * self.width)
        begin = np.arange(len(rows)) * self.width
        arrays, index, slots = self._laid_out(entries, rows, lengths, begin, count)
        if not self.width:
            del arrays["indices"]
        return Packed(arrays, self._sizes(entries, rows), count, index, slots)

    def _sizes(self, entries: Entries, rows: Array) -> dict[str, int]:
        m, n = entries.shape
        return {"m": m, "n": n, "mr": len(rows)}

    def _laid_out(
        self, entries: Entries, rows: Array, lengths: Array, begin: Array, count: int
    ) -> tuple[dict[str, Array], Array | None, Array]:
        """The arrays, the entries and their slots, of which those of a row begin at `begin`."""
        runs = begins(lengths)
        slots = spread(begin, runs, index_dtype(count).name)
        index = None
        if len(slots) != entries.nnz:
            index = spread(entries.indptr[rows], runs, index_dtype(entries.nnz).name)
        indices = padded(count, entries.shape[1], self.index_type, slots, entries.last, index)
        return self.arrays(row_ptr=np.array([0, len(rows)]), rows=rows, indices=indices), index, slots


@dataclass(frozen=True, repr=False)
class SplitRows(RowList):
    """Rows by their numbers, each with as many slices of `width` slots as it needs."""

    name = "split_rows"

    def rule(self) -> FormatRewriteRule:
        description = describe(
            f"rows_by_{self.width}",
            self.index_type,
            arrays="row_ptr rows split_ptr indices",
            sizes="m n mr most total",
            axes=f"""
                I = sparse_variable(None, (m, mr), (row_ptr, rows))
                S = dense_variable(I, (most, total), split_ptr)
                J = sparse_fixed(S, (n, {self.width}), indices)
            """,
            buffer="I, S, J",
        )
        axis_map = {0: ["I"], 1: ["S", "J"]}
        coords = lambda i, s, j: (i, j)  # noqa: E731
        return FormatRewriteRule(f"w{self.width}", description, axis_map, inverse=coords, partitions_rows=True)

    def listed(self, entries: Entries, rows: Array, lengths: Array) -> Packed:
        slices = -(-lengths // self.width)
        split_ptr = begins(slices)
        total = int(split_ptr[-1])
        count = self.check_count(total * self.width, indices=total * self.width)
        arrays, index, slots = self._laid_out(entries, rows, lengths, split_ptr[:-1] * self.width, count)
        arrays |= self.arrays(split_ptr=split_ptr)
        sizes = self._sizes(entries, rows) | {"most": int(slices.max(initial=0)), "total": total}
        return Packed(arrays, sizes, count, index, slots)


@register("buckets")
@dataclass(frozen=True, repr=False)
class Buckets(Format):
    """Each row in the narrowest ELL piece that it fits in; longer rows in several slices of the widest one.

    A piece has a list of its rows and, below each, `width` slots; those that a row does not need hold column n. A row
    of the widest piece has one slice of slots or more. An additional piece of width 0 lists the empty rows, so that
    every row is in just one piece.

    Parameters
    ----------
    widths : sequence of int
        In ascending order, constants in the descriptions.
    empty : bool
        False leaves the empty rows out.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When the widths are no whole numbers from 1 on or not in ascending order.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.row_buckets import Buckets
    >>> from sparsetir.formats.format import Entries
    >>> entries = Entries.of_rows((4, 9), np.array([0, 1, 1, 3, 6]), np.array([5, 0, 4, 1, 2, 3]))
    >>> [(p.arrays["rows"].tolist(), p.count) for p in Buckets((1, 2)).pack(entries)]
    [([1], 0), ([0], 1), ([2, 3], 6)]
    """

    widths: Sequence[int] = WIDTHS
    empty: bool = True
    idtype: str | None = field(default=None, kw_only=True)
    name = "buckets"

    def __post_init__(self) -> None:
        check_idtype(self.idtype)
        object.__setattr__(self, "widths", check_widths(self.name, self.widths))

    @cached_property
    def layouts(self) -> Sequence[RowList]:
        """How the rows of each bucket are stored."""
        *narrow, widest = self.widths
        lists = [RowList(width, idtype=self.index_type) for width in (0, *narrow)]
        return [*lists[not self.empty :], SplitRows(widest, idtype=self.index_type)]

    @cached_property
    def rules(self) -> Sequence[FormatRewriteRule]:
        return [replace(layout.rules[0], partitions_rows=self.empty) for layout in self.layouts]

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(ROUNDED * pattern.nnz, most=2 * pattern.nnz, pieces=_widths(pattern))

    def pack(self, entries: Entries) -> list[Packed]:
        lengths = lengths_of(entries)
        bucket = np.searchsorted([0, *self.widths[:-1]], lengths) - (not self.empty)
        found = []
        for number, layout in enumerate(self.layouts):
            rows = np.flatnonzero(bucket == number)
            found.append(layout.listed(entries, rows, lengths[rows]))
        return found


@register("hyb")
@dataclass(frozen=True, repr=False)
class Hyb(Partition):
    """hyb(c, k) of SparseTIR: `c` ranges of columns, the rows of each in buckets.

    Parameters
    ----------
    c : int
        Number of ranges of columns, of equal width.
    widths : sequence of int
        Of the buckets, in ascending order: constants in the descriptions.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When c or a width is no whole number from 1 on, or the widths are not in ascending order.

    Notes
    -----
    Ye et al., "SparseTIR: composable abstractions for sparse compilation in deep learning", ASPLOS 2023.

    Examples
    --------
    >>> from sparsetir.formats.row_buckets import Hyb
    >>> [rule.name for rule in Hyb(2, (1, 2)).rules]
    ['c0_w1', 'c0_w2', 'c1_w1', 'c1_w2']
    """

    c: int = 1
    widths: Sequence[int] = WIDTHS
    name = "hyb"
    sweeps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, c=self.c)
        object.__setattr__(self, "widths", check_widths(self.name, self.widths))

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.c == 1

    @cached_property
    def parts(self) -> Sequence[tuple[str, Format]]:
        each = Buckets(self.widths, self.c == 1, idtype=self.index_type)
        return tuple((f"c{k}", each) for k in range(self.c))

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(ROUNDED * pattern.nnz, most=2 * pattern.nnz, pieces=self.c * _widths(pattern))

    @property
    def column_parts(self) -> int:
        return int(self.c)

    def share(self, entries: Entries) -> Iterator[Array]:
        return column_ranges(entries, self.c)


def _widths(pattern: Any) -> int:
    """Different powers of two that row lengths are rounded up to, at most as many as buckets have."""
    return min(max(sum(map(bool, pattern.rows.histogram[1:])), 1), len(WIDTHS))


__all__ = ["WIDTHS", "Buckets", "Hyb", "RowList", "SplitRows", "check_widths"]
