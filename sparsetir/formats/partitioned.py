# SPDX-License-Identifier: Apache-2.0
"""Partitioned formats: pieces by column ranges or row lengths, each in a format of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.base import Estimate, FormatRewriteRule
from sparsetir.formats.compressed import CSR, SinglePieceFormat
from sparsetir.formats.format import (
    Array,
    Entries,
    Format,
    Packed,
    check_idtype,
    check_positive,
    lengths_of,
    make,
    padded,
    register,
    subset,
)
from sparsetir.interop.arrays import begins, index_dtype, spread, take
from sparsetir.utils.caches import cached_property

# A format with some of its pieces stored in formats of their own.


class Nested(Format):
    """`base`, its pieces named in `inner` packed again.

    Parameters
    ----------
    base : Format
        With everything chosen.
    inner : mapping of str to Format
        What to store pieces of `base` in, by the names of their rules. A piece may only be packed again if its axes
        have the coordinates of the tensor's dimensions.

    Examples
    --------
    >>> from sparsetir import formats
    >>> from sparsetir.formats.partitioned import Nested
    >>> base = formats.columns(2)
    >>> [rule.name for rule in Nested(base, {base.rules[1].name: formats.ell(width=2)}).rules]
    ['c0_csr', 'c1_csr_ell']
    """

    name = "nested"

    def __init__(self, base: Format, inner: Mapping[str, Format]) -> None:
        self.base, self.idtype, self.dimensions = base, base.idtype, base.dimensions
        rules = {rule.name: rule for rule in base.rules}
        for piece in inner:
            if piece not in rules:
                raise ArgumentError(f"{base!r} has no piece {piece!r}; there are {', '.join(rules)}")
            if rules[piece].fills or not has_own_coordinates(rules[piece]):
                raise ArgumentError(f"piece {piece!r} of {base!r} has coordinates of its own: it is stored as it is")
        self.inner = {n: f.resolve(rules[n].order, base.index_type) for n, f in inner.items()}

    @property
    def parameters(self) -> dict[str, Any]:
        return {"base": self.base, "inner": self.inner}

    @cached_property
    def rules(self) -> Sequence[FormatRewriteRule]:
        new_rules: list[FormatRewriteRule] = []
        for rule in self.base.rules:
            below = self.inner[rule.name].rules if rule.name in self.inner else None
            new_rules += (
                [rule] if below is None else [_below(rule, inner, len(self.base.rules) == 1) for inner in below]
            )
        return tuple(new_rules)

    def pack(self, entries: Entries) -> list[Packed]:
        pieces: list[Packed] = []
        for rule, packed in zip(self.base.rules, self.base.pack(entries), strict=True):
            pieces += self._again(entries, packed, rule.name) if rule.name in self.inner else [packed]
        return pieces

    def _again(self, entries: Entries, packed: Packed, name: str) -> list[Packed]:
        """Return the entries of one piece in its own format."""
        index = np.arange(entries.nnz)[: packed.size] if packed.entries is None else np.sort(packed.entries)
        part = Entries(entries.shape, [take(c, index) for c in entries.coords])
        return [_renumbered(inner, index) for inner in self.inner[name].pack(part)]


def has_own_coordinates(rule: FormatRewriteRule) -> bool:
    """Return whether each dimension of the tensor is one axis of the piece, with the same coordinates."""
    probes = list(range(len(rule.buffer.axes)))
    if rule.inverse is None:
        return True
    try:
        coords = list(rule.inverse(*(_Probe(n) for n in probes)))
    except TypeError:
        return False
    return all(isinstance(coord, _Probe) for coord in coords)


class _Probe:
    """A coordinate with which nothing can be computed."""

    def __init__(self, axis: int) -> None:
        self.axis = axis


def _below(outer: FormatRewriteRule, inner: FormatRewriteRule, is_whole: bool) -> FormatRewriteRule:
    """Return the rule of a piece's piece, where the piece has all entries or a part of them.

    A format of a part iterates over rows of other parts too, or leaves out empty ones: it must not initialise them.
    """
    alone = is_whole and outer.partitions_rows and inner.partitions_rows
    name, sweep = f"{outer.name}_{inner.name}", outer.sweep or inner.sweep
    return replace(inner, name=name, partitions_rows=alone, meets_rows=False, sweep=sweep)


def _renumbered(packed: Packed, numbers: Array) -> Packed:
    """Return the entries of a piece's piece, numbered in the whole tensor."""
    entries = numbers if packed.entries is None else take(numbers, packed.entries)
    return Packed(packed.arrays, packed.sizes, packed.count, entries, packed.slots, size=packed.size)


# Formats of several pieces: the entries of a matrix are shared out to parts, each stored in a format of its own.


@dataclass(frozen=True, repr=False)
class Partition(Format):
    """Entries shared out to parts. A subclass says `parts` and `share`.

    The rules of a part are named after both: ``c0_csr`` is the rule csr of part c0. `keeps_rows` says that each row is
    in one part, `sweeps` that each part is traversed as a whole.
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
        """Yield a mask of the entries of each part; every entry belongs to one part."""
        raise NotImplementedError

    @cached_property
    def rules(self) -> Sequence[FormatRewriteRule]:
        return tuple(self._renamed(part, rule) for part, stored in self.parts for rule in stored.rules)

    def _renamed(self, part: str, rule: FormatRewriteRule) -> FormatRewriteRule:
        keeps = rule.partitions_rows and self.keeps_rows
        sweep = part if self.sweeps else rule.sweep
        return replace(rule, name=f"{part}_{rule.name}", partitions_rows=keeps, meets_rows=False, sweep=sweep)

    def pack(self, entries: Entries) -> list[Packed]:
        pieces: list[Packed] = []
        for (_, stored), mask in zip(self.parts, self.share(entries), strict=True):
            part, index = subset(entries, mask)
            pieces += stored.pack(part) if index is None else (within(p, index) for p in stored.pack(part))
        return pieces

    def stored(self, part: str | Format) -> Format:
        """Return the format that a user gave for a part, by itself or by its name."""
        format = make(part) if isinstance(part, str) else part
        if not isinstance(format, Format):
            raise ArgumentTypeError(f"a part of {self.name} takes a format or the name of one, got {part!r}")
        return format.resolve(2, self.index_type)


def within(piece: Packed, index: Array) -> Packed:
    """Return a piece of a part as one of the whole, of which the part holds the entries `index`."""
    numbers = index[: piece.size] if piece.entries is None else take(index, piece.entries)
    return Packed(piece.arrays, piece.sizes, piece.count, numbers, piece.slots)


@register("columns")
@dataclass(frozen=True, repr=False)
class ColumnRanges(Partition):
    """`c` ranges of columns of equal width, so that the part of a dense operand that a range reads stays in cache.

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
        When c is not a positive integer, or no format is called `each`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.partitioned import ColumnRanges
    >>> pieces = ColumnRanges(2).pack(Entries.of_rows((2, 4), np.array([0, 2, 3]), np.array([0, 3, 2])))
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
        part_format = self.stored(self.each)
        return tuple((f"c{k}", part_format) for k in range(self.c))

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.nnz, pieces=int(self.c))

    @property
    def column_parts(self) -> int:
        return int(self.c)

    def share(self, entries: Entries) -> Iterator[Array]:
        return column_ranges(entries, self.c)


def column_ranges(entries: Entries, c: int) -> Iterator[Array]:
    """Yield the mask of the entries in each of `c` ranges of columns of equal width."""
    n = entries.shape[1]
    for begin, end in pairwise(k * n // c for k in range(c + 1)):
        yield (entries.last >= begin) & (entries.last < end)


@register("rows")
@dataclass(frozen=True, repr=False)
class RowRanges(Partition):
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
        When p is not a positive integer, or no format is called `each`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.partitioned import RowRanges
    >>> pieces = RowRanges(2).pack(Entries.of_rows((3, 4), np.array([0, 4, 5, 6]), np.array([0, 1, 2, 3, 0, 2])))
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
        part_format = RowRange(idtype=self.index_type) if self._has_own_rows else self.stored(self.each)
        return tuple((f"r{k}", part_format) for k in range(self.p))

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.nnz, pieces=int(self.p))

    def ranges(self, entries: Entries) -> list[tuple[int, int]]:
        """Return the first row and the end of each range."""
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
class RowRange(SinglePieceFormat):
    """Compressed sparse rows of one range of the rows of a matrix."""

    name = "row_range"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
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
        """Return the rows from `begin` on and before `end`."""
        (m, n), indptr = entries.shape, entries.indptr[begin : end + 1]
        first, last = int(indptr[0]), int(indptr[-1])
        nnz = self.check_count(last - first)
        arrays = self.arrays(indptr=indptr - indptr[0], indices=entries.last[first:last])
        sizes = {"m": m, "n": n, "begin": begin, "mp": end - begin, "nnz": nnz}
        entry_numbers = lambda: np.arange(first, last, dtype=index_dtype(entries.nnz))  # noqa: E731
        return Packed(arrays, sizes, nnz, entry_numbers, size=nnz)


# Rows shared out by their length to pieces of constant width: ELL without the padding to the longest row.


ROUNDED = 1.3  # estimated values for each entry, with row lengths rounded up to powers of two
WIDTHS = (1, 2, 4, 8, 16, 32)


def check_widths(name: str, widths: Sequence[int]) -> tuple[int, ...]:
    """Return `widths` as a tuple; raise `ArgumentError` unless they are ascending positive integers."""
    if not isinstance(widths, Sequence):
        fault = f"widths of {name}: expected a sequence of numbers, got {type(widths).__name__}."
        raise ArgumentTypeError(f"{fault} Pass a tuple.")
    checked = tuple(widths)
    for width in checked:
        check_positive(name, widths=width)
    if not checked or any(a >= b for a, b in pairwise(checked)):
        raise ArgumentError(f"widths of {name}: expected one or more numbers in ascending order, got {checked}")
    return tuple(int(width) for width in checked)


@dataclass(frozen=True, repr=False)
class RowList(SinglePieceFormat):
    """Rows by their numbers, with `width` slots each."""

    width: int = 1
    name = "row_list"

    def rule(self) -> FormatRewriteRule:
        indices = "indices" if self.width else "lambda i, s: s"  # no slot, no array
        description = self.description(
            f"rows_of_{self.width}",
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
        """Return the piece of these rows, given the number of entries of each."""
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
        """Return the arrays, the entries and their slots, of which those of a row begin at `begin`."""
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
        description = self.description(
            f"rows_by_{self.width}",
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
        When the widths are not positive integers in ascending order.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.partitioned import Buckets
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
        """The storage of the rows of each bucket."""
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
        pieces = []
        for number, layout in enumerate(self.layouts):
            rows = np.flatnonzero(bucket == number)
            pieces.append(layout.listed(entries, rows, lengths[rows]))
        return pieces


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
        When c or a width is not a positive integer, or the widths are not in ascending order.

    Notes
    -----
    Ye et al., "SparseTIR: composable abstractions for sparse compilation in deep learning", ASPLOS 2023.

    Examples
    --------
    >>> from sparsetir.formats.partitioned import Hyb
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
        part_format = Buckets(self.widths, self.c == 1, idtype=self.index_type)
        return tuple((f"c{k}", part_format) for k in range(self.c))

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(ROUNDED * pattern.nnz, most=2 * pattern.nnz, pieces=self.c * _widths(pattern))

    @property
    def column_parts(self) -> int:
        return int(self.c)

    def share(self, entries: Entries) -> Iterator[Array]:
        return column_ranges(entries, self.c)


def _widths(pattern: Any) -> int:
    """Count the powers of two that row lengths are rounded up to, at most as many as there are buckets."""
    return min(max(sum(map(bool, pattern.rows.histogram[1:])), 1), len(WIDTHS))


__all__ = [
    "WIDTHS",
    "Buckets",
    "ColumnRanges",
    "Hyb",
    "Nested",
    "Partition",
    "RowList",
    "RowRange",
    "RowRanges",
    "SplitRows",
    "check_widths",
    "column_ranges",
    "has_own_coordinates",
    "subset",
    "within",
]
