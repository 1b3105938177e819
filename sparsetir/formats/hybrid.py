# SPDX-License-Identifier: Apache-2.0
"""Two-part formats: dense blocks, diagonals, rows or columns, and the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.formats.base import Estimate, FormatRewriteRule
from sparsetir.formats.blocks import number_blocks
from sparsetir.formats.compressed import SinglePieceFormat
from sparsetir.formats.diagonals import DIA, SliceDiagonals, numbered
from sparsetir.formats.format import (
    Array,
    Entries,
    Format,
    Packed,
    check_positive,
    lengths_of,
    make,
    register,
    row_chunks,
    row_numbers,
    subset,
)
from sparsetir.formats.partitioned import Partition, within
from sparsetir.interop.arrays import CHUNK, index_dtype, take
from sparsetir.utils.caches import cached_property
from sparsetir.utils.memory import check_memory

# Formats of two parts: entries that are dense enough for a layout of their own, and the rest.


# Of estimates:
FULL = 0.75  # estimated fill of the blocks that are at least half full
HALF = 0.5  # minimum fill of diagonals of slices
SLICED = 1.3  # values for each entry of a rest in slices
BEYOND = 0.4  # entries of a row beyond the mean length, in standard deviations (of a normal distribution)


@dataclass(frozen=True, repr=False)
class TwoPartFormat(Partition):
    """Two parts, ``main`` and ``rest``. A subclass says `main` and `chosen`.

    `lists_rows` says that the first part only has the rows that it holds something of.
    """

    lists_rows = False
    rest: str | Format = field(default="dcsr", kw_only=True)

    @property
    def parameters(self) -> dict[str, Any]:
        keywords = {f.name for f in fields(self) if f.kw_only}
        return dict(sorted(super().parameters.items(), key=lambda item: item[0] in keywords))

    @property
    def main(self) -> Format:
        """How the first part is stored."""
        raise NotImplementedError

    def chosen(self, entries: Entries) -> Array:
        """Return the mask of the entries that the first part stores."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> Sequence[tuple[str, Format]]:
        return (("main", self.main.resolve(2, self.index_type)), ("rest", self.stored(self.rest)))

    def _renamed(self, part: str, rule: FormatRewriteRule) -> FormatRewriteRule:
        return replace(super()._renamed(part, rule), meets_rows=self._meets_rows(part, rule))

    def _meets_rows(self, part: str, rule: FormatRewriteRule) -> bool:
        return part == "main" and rule.partitions_rows and not self.lists_rows

    def share(self, entries: Entries) -> Iterator[Array]:
        mask = self.chosen(entries)
        yield mask
        yield ~mask


@dataclass(frozen=True, repr=False)
class DensePart(TwoPartFormat):
    """A `TwoPartFormat` whose first part is what is at least `density` full."""

    density: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.density, (int, float, np.number)) and not isinstance(self.density, bool)
        if not is_number or not 0 < self.density <= 1:
            raise ArgumentError(
                f"density of {self.name}: expected a number above 0 and at most 1, got {self.density!r}"
            )


@register("blocks")
@dataclass(frozen=True, repr=False)
class BlocksAndRest(DensePart):
    """Blocks that are at least `density` full as bsr, all other entries in the rest.

    Parameters
    ----------
    r, c : int
        Rows and columns of a block; `c` is `r` when it is left out.
    density : float
        Fraction of the r x c slots, also where the shape cuts a block off.
    rest : Format or str
        How the other entries are stored.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When r or c is not a positive integer, or density is outside (0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.hybrid import BlocksAndRest
    >>> entries = Entries.of_rows((2, 4), np.array([0, 3, 4]), np.array([0, 1, 3, 0]))
    >>> [piece.entries.tolist() for piece in BlocksAndRest(2).pack(entries)]
    [[0, 1, 3], [2]]
    """

    r: int = 4
    c: int | None = None
    density: float = field(default=0.5, kw_only=True)
    name = "blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "c", self.r if self.c is None else self.c)
        check_positive(self.name, r=self.r, c=self.c)

    @property
    def main(self) -> Format:
        return make("bsr", r=self.r, c=self.c)

    def estimate(self, pattern: Any) -> Estimate:
        r, c = self.block
        block_fill, nnz = pattern.blocks.get(self.block), pattern.nnz
        if block_fill is None:
            return Estimate(nnz, most=2 * nnz, pieces=2, per_index=r * c)
        values = nnz * (1 - block_fill.share + block_fill.share / max(block_fill.fill, FULL))
        return Estimate(values, most=2 * nnz, pieces=2, per_index=r * c)

    @property
    def block(self) -> tuple[int, int]:
        return int(self.r), int(self.c or self.r)

    def chosen(self, entries: Entries) -> Array:
        r, c, indptr = int(self.r), int(self.c or self.r), entries.indptr
        mask = np.empty(entries.nnz, np.bool_)
        for begin, end in row_chunks(indptr, r):
            part = slice(indptr[begin], indptr[end])
            starts = np.append(indptr[begin:end:r], indptr[end]) - indptr[begin]
            numbers = number_blocks(starts, entries.last[part] // c, -(-entries.shape[1] // c))[1]
            mask[part] = (np.bincount(numbers) >= self.density * r * c)[numbers]
        return mask


@register("dia_rest")
@dataclass(frozen=True, repr=False)
class DiaRest(DensePart):
    """Diagonals that are at least `density` full as dia, all other entries in the rest.

    Parameters
    ----------
    density : float
        Fraction of the slots of the longest diagonal, min(m, n).
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
    >>> from sparsetir.formats.hybrid import DiaRest
    >>> entries = Entries.of_rows((3, 3), np.array([0, 1, 3, 4]), np.array([1, 0, 2, 2]))
    >>> [piece.entries.tolist() for piece in DiaRest(0.6).pack(entries)]
    [[0, 2], [1, 3]]
    """

    name = "dia_rest"

    @property
    def main(self) -> Format:
        return DIA()

    def estimate(self, pattern: Any) -> Estimate:
        values, nnz = pattern.shape[0] * pattern.full_diagonals, pattern.nnz
        return Estimate(values + (1 - pattern.diagonal_share) * nnz, most=values + nnz, pieces=2)

    def chosen(self, entries: Entries) -> Array:
        check_memory(8 * sum(entries.shape), f"numbers of {sum(entries.shape)} diagonals")
        counts = np.zeros(max(sum(entries.shape) - 1, 0), index_dtype(entries.nnz))
        for _, _, number in numbered(entries):
            np.add.at(counts, number, counts.dtype.type(1))
        full = counts >= self.density * min(entries.shape)
        mask = np.empty(entries.nnz, np.bool_)
        for part, _, number in numbered(entries):
            mask[part] = full[number]
        return mask


@register("hdia")
@dataclass(frozen=True, repr=False)
class HDIA(DensePart):
    """Hacked DIA: slices of `C` rows, of each the diagonals that are at least `density` full, the rest apart.

    A diagonal of a slice is `C` values and the column of the first: its sums are vector operations without a gather. It
    must lie inside the matrix.

    Parameters
    ----------
    C : int
        Rows of a slice: a multiple of the vector length.
    density : float
        Fraction of the C slots of a diagonal, also in the last slice.
    rest : Format or str
        How the other entries are stored.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When C is not a positive integer, or density is outside (0, 1].

    Notes
    -----
    D. Barbieri, V. Cardellini, A. Fanfarillo, S. Filippone, "Sparse matrix-vector multiplication on GPGPUs", ACM Trans.
    Math. Softw. 43(4), 2017, whose hacks (slices) store all of their diagonals.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.hybrid import HDIA
    >>> entries = Entries.of_rows((2, 4), np.array([0, 2, 4]), np.array([0, 1, 2, 3]))
    >>> main, rest = HDIA(2).pack(entries)
    >>> main.arrays["first"].tolist(), main.values(np.array([1, 2, 3, 4])).tolist(), rest.count
    ([0, 1, 2], [1, 0, 2, 3, 0, 4], 0)
    """

    C: int = 16
    density: float = field(default=0.5, kw_only=True)
    rest: str | Format = field(default="sell", kw_only=True)
    name = "hdia"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, C=self.C)

    @property
    def main(self) -> SliceDiagonals:
        return SliceDiagonals(int(self.C), idtype=self.index_type)

    def estimate(self, pattern: Any) -> Estimate:
        share, fill, nnz = pattern.slice_diagonal_share, pattern.slice_diagonal_fill, pattern.nnz
        values = nnz * (share / max(fill, HALF) + (1 - share) * SLICED)
        most = (round(nnz * share / fill) if fill else 0) + pattern.sliced
        return Estimate(values, most=most, pieces=2, per_index=int(self.C))

    def chosen(self, entries: Entries) -> Array:
        return self.main.dense_enough(entries, self.density)[1]

    def pack(self, entries: Entries) -> list[Packed]:
        main, mask = self.main.dense_enough(entries, self.density)
        remaining, index = subset(entries, ~mask)
        rest_pieces = self.parts[1][1].pack(remaining)
        return [main, *(rest_pieces if index is None else (within(piece, index) for piece in rest_pieces))]


@register("ell_rest")
@dataclass(frozen=True, repr=False)
class EllRest(TwoPartFormat):
    """The first `width` entries of each row as ell, all others in the rest.

    Parameters
    ----------
    width : int
        A constant in the description.
    rest : Format or str
        How the other entries are stored.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Raises
    ------
    ArgumentError
        When the width is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsetir.formats.format import Entries
    >>> from sparsetir.formats.hybrid import EllRest
    >>> entries = Entries.of_rows((2, 4), np.array([0, 1, 4]), np.array([3, 0, 1, 3]))
    >>> [piece.entries.tolist() for piece in EllRest(2).pack(entries)]
    [[0, 1, 2], [3]]
    """

    width: int = 4
    name = "ell_rest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, width=self.width)

    @property
    def main(self) -> Format:
        return make("ell", width=self.width)

    def estimate(self, pattern: Any) -> Estimate:
        m, width = pattern.shape[0], self.width
        return Estimate(float(m) * (width + BEYOND * pattern.rows.std), most=m * width + pattern.nnz, pieces=2)

    def chosen(self, entries: Entries) -> Array:
        lengths = lengths_of(entries)
        first = np.minimum(lengths, self.width)
        runs = np.stack([first, lengths - first], axis=1).reshape(-1)
        return np.repeat(np.tile(np.array([True, False]), len(lengths)), runs)


# Formats of two parts: dense rows or dense columns, and the rest.


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
    >>> from sparsetir.formats.hybrid import DenseRows
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
class WholeRows(SinglePieceFormat):
    """Those rows that hold something, each with a value for every column."""

    name = "whole_rows"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
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
    >>> from sparsetir.formats.hybrid import DenseColumns
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
class WholeColumns(SinglePieceFormat):
    """Those columns that hold something, each with a value for every row."""

    name = "whole_columns"

    def rule(self) -> FormatRewriteRule:
        description = self.description(
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
        is_used = np.zeros(n, np.bool_)
        is_used[entries.last] = True
        columns = np.flatnonzero(is_used)
        count = self.check_count(m * len(columns))
        rank, slots = np.cumsum(is_used) - 1, np.empty(entries.nnz, index_dtype(count))
        for part, rows in row_numbers(entries.indptr):
            slots[part] = rows * len(columns) + rank[entries.last[part]]
        return Packed(self.arrays(columns=columns), {"m": m, "n": n, "nc": len(columns)}, count, slots=slots)


__all__ = [
    "HDIA",
    "BlocksAndRest",
    "DenseColumns",
    "DensePart",
    "DenseRows",
    "DiaRest",
    "EllRest",
    "TwoPartFormat",
    "WholeColumns",
    "WholeRows",
]
