# SPDX-License-Identifier: Apache-2.0
"""Formats of several pieces: the entries of a matrix are shared out to parts, each stored in a format of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentTypeError
from sparsetir.formats.arrays import Array, index_dtype, take
from sparsetir.formats.description import describe
from sparsetir.formats.estimate import Estimate
from sparsetir.formats.format import Entries, Format, Packed, check_idtype, check_positive, make, register
from sparsetir.formats.layouts import CSR, Layout
from sparsetir.formats.pieces import subset
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True, repr=False)
class Partition(Format):
    """Entries shared out to parts. A subclass says `parts` and `share`.

    The rules of a part are named after both: ``c0_csr`` is the rule csr of part c0. `keeps_rows` says that each row is
    in one part, `sweeps` that each part is gone over as a whole.
    """

    idtype: str | None = field(default=None, kw_only=True)
    keeps_rows = False
    sweeps = False

    def __post_init__(self) -> None:
        check_idtype(self.idtype)

    @property
    def parts(self) -> Sequence[tuple[str, Format]]:
        """The name and the format of each part."""
        raise NotImplementedError

    def share(self, entries: Entries) -> Iterator[Array]:
        """Which entries each part gets, as a mask; every entry belongs to one part."""
        raise NotImplementedError

    @cached_property
    def rules(self) -> Sequence[FormatRewriteRule]:
        return tuple(self._renamed(part, rule) for part, stored in self.parts for rule in stored.rules)

    def _renamed(self, part: str, rule: FormatRewriteRule) -> FormatRewriteRule:
        keeps = rule.partitions_rows and self.keeps_rows
        sweep = part if self.sweeps else rule.sweep
        return replace(rule, name=f"{part}_{rule.name}", partitions_rows=keeps, meets_rows=False, sweep=sweep)

    def pack(self, entries: Entries) -> list[Packed]:
        found: list[Packed] = []
        for (_, stored), mask in zip(self.parts, self.share(entries), strict=True):
            chosen, index = subset(entries, mask)
            found += stored.pack(chosen) if index is None else (within(p, index) for p in stored.pack(chosen))
        return found

    def stored(self, given: str | Format) -> Format:
        """The format that a user gave for a part, by itself or by its name."""
        found = make(given) if isinstance(given, str) else given
        if not isinstance(found, Format):
            raise ArgumentTypeError(f"a part of {self.name} takes a format or the name of one, found {given!r}")
        return found.resolve(2, self.index_type)


def within(piece: Packed, index: Array) -> Packed:
    """A piece of a part as one of the whole, of which the part holds the entries `index`."""
    held = index[: piece.size] if piece.entries is None else take(index, piece.entries)
    return Packed(piece.arrays, piece.sizes, piece.count, held, piece.slots)


@register("columns")
@dataclass(frozen=True, repr=False)
class Columns(Partition):
    """`c` ranges of columns of equal width, so that what a range touches of a dense operand stays in cache.

    Parameters
    ----------
    c : int
        Number of ranges.
    each : Format or str
        How each range is stored; its indices remain those of the whole matrix.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When c is no whole number from 1 on, or no format is called `each`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.partitions import Columns
    >>> pieces = Columns(2).pack(Entries.of_rows((2, 4), np.array([0, 2, 3]), np.array([0, 3, 2])))
    >>> [(p.arrays["indptr"].tolist(), p.arrays["indices"].tolist()) for p in pieces]
    [([0, 1, 1], [0]), ([0, 1, 2], [3, 2])]
    """

    c: int = 2
    each: str | Format = "csr"
    name = "columns"
    sweeps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, c=self.c)

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.c == 1

    @cached_property
    def parts(self) -> Sequence[tuple[str, Format]]:
        each = self.stored(self.each)
        return tuple((f"c{k}", each) for k in range(self.c))

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.nnz, pieces=int(self.c))

    @property
    def column_parts(self) -> int:
        return int(self.c)

    def share(self, entries: Entries) -> Iterator[Array]:
        return column_ranges(entries, self.c)


def column_ranges(entries: Entries, c: int) -> Iterator[Array]:
    """Which entries lie in each of `c` ranges of columns of equal width, as a mask."""
    n = entries.shape[1]
    for begin, end in pairwise(k * n // c for k in range(c + 1)):
        yield (entries.last >= begin) & (entries.last < end)


@register("rows")
@dataclass(frozen=True, repr=False)
class Rows(Partition):
    """`p` ranges of rows with about as many rows and entries together.

    Parameters
    ----------
    p : int
        Number of ranges.
    each : Format or str
        How each range is stored. In CSR a piece has just the rows of its range; any other format has all rows of the
        matrix, and those of other ranges are empty.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When p is no whole number from 1 on, or no format is called `each`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.partitions import Rows
    >>> pieces = Rows(2).pack(Entries.of_rows((3, 4), np.array([0, 4, 5, 6]), np.array([0, 1, 2, 3, 0, 2])))
    >>> [(p.sizes["begin"], p.arrays["indptr"].tolist()) for p in pieces]
    [(0, [0, 4]), (1, [0, 1, 2])]
    """

    p: int = 2
    each: str | Format = "csr"
    name = "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, p=self.p)

    @property
    def keeps_rows(self) -> bool:  # type: ignore[override]
        return self.p == 1 or self._has_own_rows

    @cached_property
    def _has_own_rows(self) -> bool:
        return isinstance(self.stored(self.each), CSR)

    @cached_property
    def parts(self) -> Sequence[tuple[str, Format]]:
        each = RowRange(idtype=self.index_type) if self._has_own_rows else self.stored(self.each)
        return tuple((f"r{k}", each) for k in range(self.p))

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.nnz, pieces=int(self.p))

    def ranges(self, entries: Entries) -> list[tuple[int, int]]:
        """Where each range begins and ends."""
        work = entries.indptr + np.arange(entries.shape[0] + 1)
        edges = np.searchsorted(work, np.arange(self.p) * int(work[-1]) // self.p).tolist()
        return list(pairwise([*edges, entries.shape[0]]))

    def share(self, entries: Entries) -> Iterator[Array]:
        for begin, end in self.ranges(entries):
            mask = np.zeros(entries.nnz, np.bool_)
            mask[entries.indptr[begin] : entries.indptr[end]] = True
            yield mask

    def pack(self, entries: Entries) -> list[Packed]:
        if not self._has_own_rows:
            return super().pack(entries)
        layout = RowRange(idtype=self.index_type)
        return [layout.ranged(entries, begin, end) for begin, end in self.ranges(entries)]

    def fill(self, entries: Entries, values: Array) -> list[tuple[Packed, Array]]:
        if not self._has_own_rows:
            return super().fill(entries, values)
        places = [entries.indptr[[begin, end]].tolist() for begin, end in self.ranges(entries)]
        parts = [values[first:last] for first, last in places]
        return list(zip(self.pack(entries), parts, strict=True))


@dataclass(frozen=True, repr=False)
class RowRange(Layout):
    """Compressed sparse rows of one range of the rows of a matrix."""

    name = "row_range"

    def rule(self) -> FormatRewriteRule:
        description = describe(
            "row_range",
            self.index_type,
            arrays="indptr indices",
            sizes="m n begin mp nnz",
            axes="""
                I = sparse_fixed(None, (m, mp), lambda s: begin + s)
                J = sparse_variable(I, (n, nnz), (indptr, indices))
            """,
            buffer="I, J",
        )
        return FormatRewriteRule("csr", description, {0: ["I"], 1: ["J"]}, partitions_rows=True)

    def packed(self, entries: Entries) -> Packed:
        return self.ranged(entries, 0, entries.shape[0])

    def ranged(self, entries: Entries, begin: int, end: int) -> Packed:
        """The rows from `begin` on and before `end`."""
        (m, n), indptr = entries.shape, entries.indptr[begin : end + 1]
        first, last = int(indptr[0]), int(indptr[-1])
        nnz = self.check_count(last - first)
        arrays = self.arrays(indptr=indptr - indptr[0], indices=entries.last[first:last])
        sizes = {"m": m, "n": n, "begin": begin, "mp": end - begin, "nnz": nnz}
        held = lambda: np.arange(first, last, dtype=index_dtype(entries.nnz))  # noqa: E731
        return Packed(arrays, sizes, nnz, held, size=nnz)


__all__ = ["Columns", "Partition", "RowRange", "Rows", "column_ranges", "subset", "within"]
