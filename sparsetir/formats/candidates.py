# SPDX-License-Identifier: Apache-2.0
"""Which formats suit a pattern: rules that look at its numbers, and at nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sparsetir.formats.blocks import BSR, DBSR
from sparsetir.formats.coordinates import COO, CSF
from sparsetir.formats.dense_lines import DenseColumns, DenseRows
from sparsetir.formats.diagonals import DIA, Band
from sparsetir.formats.format import Format
from sparsetir.formats.layouts import CSC, CSR, DCSR, ELL, Ragged
from sparsetir.formats.narrow import FARTHEST, NarrowCSR, NarrowSELL
from sparsetir.formats.partitions import Columns, Rows
from sparsetir.formats.pattern import HACK, SLICES, MatrixPattern, Pattern
from sparsetir.formats.reordered import Reordered
from sparsetir.formats.row_buckets import Buckets, Hyb
from sparsetir.formats.row_groups import RowGroups
from sparsetir.formats.special import NM, SELL, SRBCRS, PaddedCSR
from sparsetir.formats.splits import HDIA, Blocks, DiaRest, EllRest

Sized: TypeAlias = tuple[Format, int]  # a format, and the most values that it can store for the pattern

MOST_VALUES = 5.0  # stored for each entry, padding included
HYPERSPARSE = 64  # rows or columns for each entry from which on nothing is stored for each of them
WORTHWHILE = 0.1  # fraction of the entries for which a piece of their own pays
MOSTLY = 0.5  # fraction of the entries from which on diagonals of slices are stored
UNEVEN = 1.1  # share of the largest of equal ranges of rows, relative to its due
WIDE = 1024  # columns that a range keeps
APART_IN_TIME = 1024  # entries between two uses of a column, on average, from which on the order of the rows matters
SIMILAR = 0.75  # fraction of the entries from which on rows are grouped
APART = 0.8  # how full neighbours' blocks may be, relative to those of grouped rows
SORTED = ((16, 1024), (8, 8192))  # rows of a slice and of the window in which they are sorted, for more than `SLICES`
EMPTY = 0.25  # fraction of empty rows from which on the others are listed


@dataclass(frozen=True)
class Considered:
    """A format that a rule proposed.

    Parameters
    ----------
    format : Format
    values : float
        How many values it stores for each entry, at most; estimated where the pattern's numbers are those of a sample.
    objection : str or None
        Why it is no candidate.
    """

    format: Format
    values: float
    objection: str | None = None


# ------------------------------------------------------------------ rules for matrices that hold something


def by_entry(p: MatrixPattern) -> Iterator[Sized]:
    """No value but the entries."""
    yield from ((format, p.nnz) for format in (CSR(), CSC(), DCSR(), COO()))


def by_slot(p: MatrixPattern) -> Iterator[Sized]:
    """Rows filled up to a width, a multiple, or the longest of their neighbours."""
    m, held = p.shape[0], p.rows.count - p.rows.empty
    yield ELL(), m * max(p.rows.max, 1)
    width = max(round(p.rows.mean), 1)
    yield EllRest(width), m * width + p.nnz
    yield PaddedCSR(4), p.nnz + 3 * held
    yield SELL(*SLICES), p.sliced
    if m > SLICES[1]:
        # Rows are sorted over longer ways: wide slices need less work, narrow ones less padding.
        yield from ((SELL(C, sigma), p.sliced * C // SLICES[0]) for C, sigma in SORTED)
    yield Ragged(), p.prefix


def by_reach(p: MatrixPattern) -> Iterator[Sized]:
    """Columns of 16 bits where those of a row, or of neighbouring rows, lie close enough."""
    if p.reach[0] <= FARTHEST:
        yield NarrowCSR(), p.nnz
    if p.reach[1] < FARTHEST:
        yield NarrowSELL(*SLICES), p.sliced


def by_length(p: MatrixPattern) -> Iterator[Sized]:
    """Rows of about one length together: slots are at most twice the entries."""
    yield Buckets(), 2 * p.nnz
    if p.shape[1] >= 2 * WIDE:
        yield Hyb(2), 2 * p.nnz


def by_block(p: MatrixPattern) -> Iterator[Sized]:
    """Dense blocks, those that are full enough with the rest apart, and blocks that are one column wide."""
    for (r, c), found in p.blocks.items():
        if c in (1, r):
            yield BSR(r, c), found.count * r * c
        if r != c:
            continue
        if p.rows.empty >= EMPTY * p.rows.count:
            yield DBSR(r, c), found.count * r * c
        if WORTHWHILE <= found.share < 1:
            yield Blocks(r, c), 2 * p.nnz
    vectors, tiles = p.blocks[8, 1].count, -(-p.shape[0] // 8)
    yield SRBCRS(8, 8), 8 * (vectors + 7 * min(tiles, vectors))


def by_group(p: MatrixPattern) -> Iterator[Sized]:
    """At most so many of four neighbours in a row."""
    most = p.blocks[1, 4].most
    if most < 4:
        yield NM(most, 4), p.shape[0] * -(-p.shape[1] // 4) * most


def by_similarity(p: MatrixPattern) -> Iterator[Sized]:
    """Groups of rows that use about the same columns, unless these are neighbours, whose blocks bsr stores as well."""
    grouped = p.group_share * p.group_fill
    if p.group_share >= SIMILAR and p.blocks[4, 1].fill < APART * grouped:
        yield RowGroups(), round(1.5 * p.nnz)


def by_order(p: MatrixPattern) -> Iterator[Sized]:
    """Rows in another order, if what one gathers is rarely what the next ones need."""
    if p.reuse_distance is not None and p.reuse_distance * p.rows.mean >= APART_IN_TIME:
        yield Reordered(), p.nnz


def by_diagonal(p: MatrixPattern) -> Iterator[Sized]:
    """Every diagonal, a band, or the diagonals that are full, in whole or in slices of rows, with the rest apart."""
    m, (lower, upper) = p.shape[0], p.bandwidth
    yield DIA(), m * p.diagonals
    yield Band(lower, upper), m * (lower + 1 + upper)
    if WORTHWHILE <= p.diagonal_share < 1:
        yield DiaRest(), m * p.full_diagonals + p.nnz
    if p.slice_diagonal_share >= MOSTLY and p.sliced <= 2 * p.nnz:  # the rest is stored in slices
        yield HDIA(HACK[0]), round(p.nnz * p.slice_diagonal_share / p.slice_diagonal_fill) + p.sliced


def by_line(p: MatrixPattern) -> Iterator[Sized]:
    """Dense rows or columns, with the rest apart."""
    m, n = p.shape
    if 2 * p.rows.max >= n:
        yield DenseRows(), 2 * p.nnz
    if 2 * p.columns.max >= m:
        yield DenseColumns(), 2 * p.nnz


def by_range(p: MatrixPattern) -> Iterator[Sized]:
    """Ranges of columns that stay in cache, and of rows that hold as many entries."""
    yield from ((Columns(c), p.nnz) for c in (2, 4) if p.shape[1] >= c * WIDE)
    yield from ((Rows(parts), p.nnz) for parts in (2, 4) if p.imbalance[parts] >= UNEVEN)


RULES: Sequence[Callable[[MatrixPattern], Iterator[Sized]]] = (
    by_entry,
    by_slot,
    by_reach,
    by_length,
    by_block,
    by_group,
    by_similarity,
    by_order,
    by_diagonal,
    by_line,
    by_range,
)


# ------------------------------------------------------------------ the list


def of_tensor(p: Pattern) -> Iterator[Sized]:
    """Any number of dimensions: a list, and trees with each dimension at the root in turn.

    Below the root the dimensions follow in order, and once more with the shortest first: the fewer coordinates the
    upper levels have, the more entries share a fiber.
    """
    yield COO(p.ndim), p.nnz
    for root in range(p.ndim):
        rest = [d for d in range(p.ndim) if d != root]
        yield CSF((root, *rest)), p.nnz
        if sorted(rest, key=lambda d: p.shape[d]) != rest:
            yield CSF((root, *sorted(rest, key=lambda d: p.shape[d]))), p.nnz


def proposed(p: Pattern) -> Iterator[Sized]:
    """The formats that the rules propose."""
    if not isinstance(p, MatrixPattern):
        yield from of_tensor(p)
    elif max(p.shape) > HYPERSPARSE * p.nnz + WIDE**2:
        yield from ((format, p.nnz) for format in (DCSR(), COO()))
    elif not p.nnz:
        yield from by_entry(p)
    else:
        for rule in RULES:
            yield from rule(p)


def considered(pattern: Pattern, *, most: float = MOST_VALUES) -> list[Considered]:
    """The formats that the rules propose for a pattern, and what speaks against some of them.

    Parameters
    ----------
    pattern : Pattern
        See `sparsetir.pattern`.
    most : float
        Most values that a format may store for each entry.
    """
    found = []
    for format, values in proposed(pattern):
        each = values / max(pattern.nnz, 1)
        found.append(Considered(format, each, _objection(each, most) if each > most else None))
    return found


def _objection(each: float, most: float) -> str:
    shown = f"{each:.3g}" if each < 100 else f"{each:,.0f}"
    return f"it would store up to {shown} values for each entry, more than {most:g}"


def candidates(pattern: Pattern, *, most: float = MOST_VALUES) -> list[Format]:
    """The formats that may suit a pattern.

    Parameters
    ----------
    pattern : Pattern
        See `sparsetir.pattern`.
    most : float
        Most values that a format may store for each entry.

    Returns
    -------
    list of Format
        The simplest first, none twice.

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir
    >>> tridiagonal = sparsetir.pattern(sp.diags_array([1.0, 2.0, 1.0], offsets=[-1, 0, 1], shape=(99, 99)))
    >>> candidates(tridiagonal)[-3:]
    [dia(), band(lower=1, upper=1), hdia(C=16, rest='sell', density=0.5)]
    """
    return [found.format for found in considered(pattern, most=most) if found.objection is None]


__all__ = ["MOST_VALUES", "RULES", "Considered", "candidates", "considered"]
