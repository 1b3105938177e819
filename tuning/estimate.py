# SPDX-License-Identifier: Apache-2.0
"""How a format would store a matrix, from the numbers of its pattern: nothing is converted.

The cost model sees these numbers for every candidate, also where the format was converted meanwhile: what it learnt
from must not differ from what it is asked about.
"""

from __future__ import annotations

from functools import cached_property

from sparsetir.formats.blocks import BSR
from sparsetir.formats.candidates import considered
from sparsetir.formats.dense_lines import DenseColumns, DenseRows
from sparsetir.formats.diagonals import DIA, Band
from sparsetir.formats.format import Format
from sparsetir.formats.partitions import Columns, Rows
from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.formats.row_buckets import WIDTHS, Buckets, Hyb
from sparsetir.formats.row_groups import RowGroups
from sparsetir.formats.special import SELL, SRBCRS
from sparsetir.formats.splits import HDIA, Blocks, DiaRest, EllRest, Split
from sparsetir.tuning.features import Stored

INDEX = 4  # bytes
UNKNOWN = 2.0  # values for each entry, of a format that no rule proposed
BUCKETS = 1.3  # values for each entry, with row lengths rounded up to powers of two
LINES = 1.2  # values for each entry, with dense rows or columns apart
HALF = 0.5  # how full diagonals of slices are, at least
SLICED = 1.3  # values for each entry, of a rest in slices
HALF_FULL = 0.75  # how full blocks are, of those that are at least half full
BEYOND = 0.4  # entries of a row beyond the mean length, in standard deviations (of a normal distribution)


class Estimates:
    """How formats would store a tensor.

    Parameters
    ----------
    pattern : Pattern or None
        Of the tensor, where it is known.
    own : Stored
        How the argument is stored as it came.
    itemsize : int
        Bytes of a value.
    """

    def __init__(self, pattern: Pattern | None, own: Stored, itemsize: int) -> None:
        self.pattern, self.own, self.itemsize = pattern, own, itemsize
        self._made: dict[Format | None, Stored] = {None: own}

    def __call__(self, format: Format | None) -> Stored:
        """The estimate for a format; None is as the argument came."""
        if format not in self._made:
            self._made[format] = self._estimated(format) if format is not None else self.own
        return self._made[format]

    @cached_property
    def _proposed(self) -> dict[Format, float]:
        """Values that the rules expect of each format, for each entry."""
        return {c.format: c.values for c in considered(self.pattern)} if self.pattern is not None else {}

    def _estimated(self, format: Format) -> Stored:
        nnz = self.pattern.nnz if self.pattern is not None else self.own.values
        each = self._proposed.get(format, UNKNOWN if isinstance(format, BSR) else 1.0)
        better = expected(format, self.pattern) if isinstance(self.pattern, MatrixPattern) else None
        values, rows = round(better or each * nnz), side_by_side(format)
        index = INDEX * (indexed(format, values) + (self.pattern.shape[0] // rows if self.pattern is not None else 0))
        return Stored(values, values * self.itemsize + index, pieces(format, self.pattern), rows)


def expected(format: Format, p: MatrixPattern) -> float | None:
    """Values of a format for which the rules know no more than a limit; None of all others."""
    if isinstance(format, (Buckets, Hyb)):
        return BUCKETS * p.nnz
    if isinstance(format, Blocks):
        found = p.blocks.get((format.r, columns_of_a_block(format)))
        return None if found is None else p.nnz * (1 - found.share + found.share / max(found.fill, HALF_FULL))
    if isinstance(format, (DenseRows, DenseColumns)):
        return LINES * p.nnz
    if isinstance(format, EllRest):
        return float(p.shape[0]) * (format.width + BEYOND * p.rows.std)
    if isinstance(format, SELL):
        return float(p.sliced)
    if isinstance(format, HDIA):
        share = p.slice_diagonal_share
        return p.nnz * (share / max(p.slice_diagonal_fill, HALF) + (1 - share) * SLICED)
    if isinstance(format, DiaRest):
        return p.shape[0] * p.full_diagonals + (1 - p.diagonal_share) * p.nnz
    return None


def side_by_side(format: Format) -> int:
    """Rows of a block of the format."""
    if isinstance(format, SRBCRS):
        return int(format.t)
    return int(format.parameters.get("r") or 1)


def columns_of_a_block(format: Format | None) -> int:
    """Columns of a block of the format."""
    if format is None or not isinstance(format.parameters.get("r"), int) or isinstance(format, RowGroups):
        return 1
    return int(format.parameters.get("c") or format.parameters["r"])


def column_parts(format: Format | None) -> int:
    """Ranges of columns that are stored one after the other."""
    return int(format.c) if isinstance(format, (Columns, Hyb)) else 1


def indexed(format: Format, values: int) -> int:
    """How many column numbers are stored with so many values."""
    if isinstance(format, (DIA, Band)):
        return 0
    if isinstance(format, HDIA):
        return values // int(format.C)
    return values // (side_by_side(format) * columns_of_a_block(format))


def pieces(format: Format, pattern: Pattern | None) -> int:
    """Pieces of the format, each with loops of its own."""
    if isinstance(format, (Buckets, Hyb)):
        return column_parts(format) * _widths(pattern)
    if isinstance(format, (Columns, Rows)):
        return int(format.c if isinstance(format, Columns) else format.p)
    return 2 if isinstance(format, Split) else 1


def _widths(pattern: Pattern | None) -> int:
    """Different powers of two that row lengths are rounded up to, at most as many as buckets have."""
    if not isinstance(pattern, MatrixPattern):
        return len(WIDTHS)
    return min(max(sum(map(bool, pattern.rows.histogram[1:])), 1), len(WIDTHS))


__all__ = ["Estimates", "column_parts", "columns_of_a_block", "pieces", "side_by_side"]
