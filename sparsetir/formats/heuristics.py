# SPDX-License-Identifier: Apache-2.0
"""Format heuristics: formats that suit a pattern, their order, their expected gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsetir.formats.blocks import BSR, DBSR
from sparsetir.formats.compressed import COO, CSC, CSF, CSR, DCSR, ELL, Ragged
from sparsetir.formats.diagonals import DIA, Band, slice_diagonals
from sparsetir.formats.format import Entries, Format
from sparsetir.formats.hybrid import HDIA, BlocksAndRest, DenseColumns, DenseRows, DiaRest, EllRest
from sparsetir.formats.padded import FARTHEST, NM, SELL, SRBCRS, NarrowCSR, NarrowSELL, PaddedCSR
from sparsetir.formats.partitioned import Buckets, ColumnRanges, Hyb, RowRanges
from sparsetir.formats.pattern import HACK, SLICES, MatrixPattern, Pattern
from sparsetir.formats.row_groups import Reordered, RowGroups, grouped_share
from sparsetir.formats.statistics import SLICE_HEIGHTS, block_fill, slice_fills
from sparsetir.interop.sources import CompressedSource, open_source
from sparsetir.ir.effects import ragged_sums
from sparsetir.ir.views import Program
from sparsetir.utils.machine import last_cache, private_cache
from sparsetir.utils.memory import fits

# How many times faster products should be over a format than over rows, from how full it is.


# How many times faster sums over full r x c blocks are than over rows (AMD Zen 4; `sparsetir
# bench --ops spmv --sweep` prints the times of the formats for a matrix).
SUMMED = {(3, 3): 1.5, (4, 4): 2.6, (8, 1): 2.7, (16, 1): 3.2, (8, 8): 3.2}
SUMMED_IN_SLICES = 1.4  # the same for full slices, where rows are short
SUMMED_ON_DIAGONALS = 3.5  # the same for full diagonals of slices
# Times of an interleaved row, and of its product with a column of a tile, relative to the dot product of an entry
# (Sapphire Rapids and later).
INTERLEAVED, MULTIPLIED, TILE_ROWS = 1.4, 0.7, 16
REST = 1.3  # relative time of an entry on no diagonal: its row is traversed twice


def block_gain(size: int, fill: float) -> float:
    """Return the expected speedup of rows together: one load serves them all, but zeros are multiplied too.

    A row alone loads a vector for each multiplication, and both take as long.

    Examples
    --------
    >>> block_gain(1, 1.0), block_gain(3, 1.0), block_gain(3, 0.5)
    (1.0, 1.5, 0.75)
    """
    return fill * 2 * size / (size + 1)


def group_gain(entries: Entries) -> float:
    """Return the expected speedup of rows in groups of `GROUP`; rows outside of groups count as unchanged."""
    share, fill = grouped_share(entries, GROUP, RowGroups.padding)
    return 1 / (1 - share + share / block_gain(GROUP, fill)) if share else 1.0


def tile_gain(rows: int, fill: float) -> float:
    """Return the expected speedup of products of `rows` rows together on tiles (AMX) over rows on dot products.

    A gathered row of the dense operand is interleaved once for all rows of a block, and multiplied once for each tile.

    Examples
    --------
    >>> round(tile_gain(16, 1.0), 2), round(tile_gain(32, 0.1), 2)
    (7.62, 1.14)
    """
    return fill * rows / (INTERLEAVED + MULTIPLIED * rows / TILE_ROWS)


def sum_gain(size: tuple[int, int], fill: float, nnz: int, index: int, value: int) -> float:
    """Return the speedup of sums over blocks relative to rows, for `nnz` entries of `index` and `value` bytes.

    Where they come from memory, not more than there is less to read.

    Examples
    --------
    >>> sum_gain((4, 4), 0.5, 1000, 4, 4), sum_gain((4, 4), 0.5, 10**9, 4, 4)
    (1.3, 0.9411764705882353)
    """
    gain = SUMMED[size] * fill
    in_rows, in_blocks = index + value, (index / math.prod(size) + value) / max(fill, 1e-9)
    return gain if nnz * in_rows <= last_cache() else min(gain, in_rows / in_blocks)


def diagonal_gain(share: float, fill: float, nnz: int, index: int, value: int) -> float:
    """Return the expected speedup of sums over diagonals of slices relative to rows.

    `index` and `value` are bytes of an entry. `share` of the entries lie on diagonals that are `fill` full. For data in
    memory, as for `sum_gain`, at most by as much as there is less to read.

    Examples
    --------
    >>> diagonal_gain(1.0, 0.5, 1000, 4, 4), diagonal_gain(1.0, 1.0, 10**9, 4, 4)
    (1.75, 2.0)
    """
    slots_per_entry = share / fill if fill else 0.0
    gain = 1 / (slots_per_entry / SUMMED_ON_DIAGONALS + REST * (1 - share))
    in_rows, on_diagonals = index + value, slots_per_entry * value + (1 - share) * (index + value)
    return gain if nnz * in_rows <= last_cache() else min(gain, in_rows / on_diagonals)


# All decisions about formats: which ones suit a matrix, in which order they are tried, and what they gain.
#
# * `candidates`: formats that may suit a pattern. Rules propose them from the pattern's numbers alone; each estimates
#   how many values it would store (`Format.estimate`), and those that store too many are left out.
# * `ranked_candidates`: those that a search tries, the likeliest first.
# * `choose_format`: the one format that a matrix is worth converting to before many products with it. The rules look at
#   a sample of the rows, or at their lengths. Converting has to pay within the calls that were announced
#   (``sparsetir.build(program, expected_calls=1000)``).
#
#   * Dense blocks: `bsr`, whose loops load a row of the dense operand, or a few elements of a vector, once for all rows
#     of a block.
#   * Rows of similar patterns that are no neighbours: `row_groups`, for the same reason.
#   * Short rows that are summed into one number each: `sell`, whose loops sum several rows side by side.
#   * Diagonals of neighbouring rows that are summed so: `hdia`, whose loops do that without a gather.


# ------------------------------------------------------------------ constants

# Of `candidates`.
MOST_VALUES = 2.5  # stored for each entry, padding included; no format above it was faster in `sparsetir bench --sweep`
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

# Of `ranked_candidates`.
# The loops of the program as it is, or in an order that has no row to share out.
LEFT_OUT = (CSR, CSC, COO, CSF, Ragged)
EARLY = (BSR, SELL, RowGroups, ELL, DIA, HDIA)  # have loops that others cannot have
LATE = (Band, DiaRest, ColumnRanges, RowRanges, Hyb)  # are compiled or converted long
NARROW = (NarrowCSR, NarrowSELL)  # read less index data from memory, which matters neither for dense rows nor in caches
VECTORS = (HDIA,)  # have loops for vectors
ENTRY = 8  # bytes of a value and a column

# Of `choose_format`.
SQUARES = (4, 3, 2)  # rows and columns of blocks
LEAST_GAIN = 1.07  # of blocks, see `block_gain`
ENOUGH = 1.25  # of blocks: no other format is considered
GROUP, LEAST_GROUP_GAIN = 4, 1.15  # rows of a group, and what groups must gain
LEAST_FEAT = 8  # elements of a dense row
SHORT, FAR_SHORT = 24.0, 64.0  # entries of a row on average; where half of a core's own cache does not hold a vector
MANY = 1 << 10  # entries of all rows: for fewer, a call takes longer than its loops
NEAR, FAR = 1024, 8192  # rows that are sorted by length for slices
AS_FULL = 0.95  # how full wide slices must be, relative to narrow ones
MUCH_FULLER = 1.1  # how full slices of rows from far away must be, relative to those of near ones
HALF_FULL = 0.5  # slices, so that entries off the diagonals can be stored in some
# Rough seconds for each entry: converting it, and what a call saves for each number that is computed with it where no
# call was timed (AMD Zen 3). `sparsetir bench formats` prints both for a matrix.
CONVERSION, GROUPING, SAVED = 80e-9, 250e-9, 0.02e-9
SLICING, SAVED_IN_SLICES = 25e-9, 0.05e-9
SAVED_IN_BLOCKS, SAVED_ON_DIAGONALS = 0.1e-9, 0.2e-9
SAMPLING, LOOKING = 0.01, 20e-9  # seconds to find a format: from a sample of the entries, and for each of them
COMPOSING = 0.05  # seconds to write a program over another format and to load its code, whatever the matrix
WORTH_LOOKING = 3  # times as long as looking for a format the announced calls must take: few matrices gain much

# Of `most_dense`: densities up to which products with scattered entries and with full 4 x 4 blocks are faster.
SCATTERED, BLOCKED, BLOCK_FILL = 0.2, 0.45, 0.8


# ------------------------------------------------------------------ candidates: rules for matrices with entries


def by_entry(_p: MatrixPattern) -> Iterator[Format]:
    """Yield formats that store the entries alone, without padding."""
    yield from (CSR(), CSC(), DCSR(), COO())


def by_slot(p: MatrixPattern) -> Iterator[Format]:
    """Rows filled up to a width, a multiple, or the longest of their neighbours."""
    yield from (ELL(), EllRest(max(round(p.rows.mean), 1)), PaddedCSR(4), SELL(*SLICES))
    if p.shape[0] > SLICES[1]:
        # Rows are sorted within larger windows: wide slices need less work, narrow ones less padding.
        yield from (SELL(C, sigma) for C, sigma in SORTED)
    yield Ragged()


def by_reach(p: MatrixPattern) -> Iterator[Format]:
    """Columns of 16 bits where those of a row, or of neighbouring rows, lie close enough."""
    if p.reach[0] <= FARTHEST:
        yield NarrowCSR()
    if p.reach[1] < FARTHEST:
        yield NarrowSELL(*SLICES)


def by_length(p: MatrixPattern) -> Iterator[Format]:
    """Rows of about the same length together."""
    yield Buckets()
    if p.shape[1] >= 2 * WIDE:
        yield Hyb(2)


def by_block(p: MatrixPattern) -> Iterator[Format]:
    """Dense blocks, those that are full enough with the rest apart, and blocks that are one column wide."""
    for (r, c), fill in p.blocks.items():
        if c in (1, r):
            yield BSR(r, c)
        if r != c:
            continue
        if p.rows.empty >= EMPTY * p.rows.count:
            yield DBSR(r, c)
        if WORTHWHILE <= fill.share < 1:
            yield BlocksAndRest(r, c)
    yield SRBCRS(8, 8)


def by_group(p: MatrixPattern) -> Iterator[Format]:
    """Yield groups of four neighbours in a row, padded to the fullest one, unless a group is full."""
    most = p.blocks[1, 4].most
    if most < 4:
        yield NM(most, 4)


def by_similarity(p: MatrixPattern) -> Iterator[Format]:
    """Yield groups of rows with similar columns, unless these rows are neighbours: bsr stores their blocks as well."""
    grouped = p.group_share * p.group_fill
    if p.group_share >= SIMILAR and p.blocks[4, 1].fill < APART * grouped:
        yield RowGroups()


def by_order(p: MatrixPattern) -> Iterator[Format]:
    """Rows in another order, if the columns of a row seldom recur in the next rows."""
    if p.reuse_distance is not None and p.reuse_distance * p.rows.mean >= APART_IN_TIME:
        yield Reordered()


def by_diagonal(p: MatrixPattern) -> Iterator[Format]:
    """Every diagonal, a band, or the diagonals that are full, in whole or in slices of rows, with the rest apart."""
    yield from (DIA(), Band(*p.bandwidth))
    if WORTHWHILE <= p.diagonal_share < 1:
        yield DiaRest()
    if p.slice_diagonal_share >= MOSTLY and p.sliced <= 2 * p.nnz:  # the rest is stored in slices
        yield HDIA(HACK[0])


def by_line(p: MatrixPattern) -> Iterator[Format]:
    """Dense rows or columns, with the rest apart."""
    m, n = p.shape
    if 2 * p.rows.max >= n:
        yield DenseRows()
    if 2 * p.columns.max >= m:
        yield DenseColumns()


def by_range(p: MatrixPattern) -> Iterator[Format]:
    """Ranges of columns that stay in cache, and ranges of rows with equally many entries."""
    yield from (ColumnRanges(c) for c in (2, 4) if p.shape[1] >= c * WIDE)
    yield from (RowRanges(parts) for parts in (2, 4) if p.imbalance[parts] >= UNEVEN)


RULES: Sequence[Callable[[MatrixPattern], Iterator[Format]]] = (
    *(by_entry, by_slot, by_reach, by_length, by_block, by_group),
    *(by_similarity, by_order, by_diagonal, by_line, by_range),
)


def of_tensor(p: Pattern) -> Iterator[Format]:
    """Any number of dimensions: a list, and trees with each dimension at the root in turn.

    Below the root the dimensions follow in order, and once more with the shortest first: the fewer coordinates the
    upper levels have, the more entries share a fiber.
    """
    yield COO(p.ndim)
    for root in range(p.ndim):
        other_dims = [d for d in range(p.ndim) if d != root]
        yield CSF((root, *other_dims))
        if sorted(other_dims, key=lambda d: p.shape[d]) != other_dims:
            yield CSF((root, *sorted(other_dims, key=lambda d: p.shape[d])))


def proposed(p: Pattern) -> Iterator[Format]:
    """Yield the formats that the rules propose."""
    if not isinstance(p, MatrixPattern):
        yield from of_tensor(p)
    elif max(p.shape) > HYPERSPARSE * p.nnz + WIDE**2:
        yield from (DCSR(), COO())
    elif not p.nnz:
        yield from by_entry(p)
    else:
        for rule in RULES:
            yield from rule(p)


# ------------------------------------------------------------------ candidates: the list


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


def considered(pattern: Pattern, *, most: float = MOST_VALUES) -> list[Considered]:
    """Return the formats that the rules propose for a pattern, with objections to some of them.

    Parameters
    ----------
    pattern : Pattern
        See `sparsetir.pattern`.
    most : float
        Most values that a format may store for each entry.
    """
    formats = []
    for format in proposed(pattern):
        values_per_entry = format.estimate(pattern).at_most / max(pattern.nnz, 1)
        shown_values = f"{values_per_entry:.3g}" if values_per_entry < 100 else f"{values_per_entry:,.0f}"
        objection = f"it would store up to {shown_values} values for each entry, more than {most:g}"
        formats.append(Considered(format, values_per_entry, objection if values_per_entry > most else None))
    return formats


def candidates(pattern: Pattern, *, most: float = MOST_VALUES) -> list[Format]:
    """Return the formats that may suit a pattern.

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
    return [option.format for option in considered(pattern, most=most) if option.objection is None]


def ranked_candidates(pattern: Pattern, *, most: float = MOST_VALUES, feat: int = 1) -> list[Format]:
    """Return the formats that suit a pattern and have specialised loops, the likeliest first.

    Parameters
    ----------
    pattern : Pattern
    most : float
        Most values that a format may store for each entry.
    feat : int
        Length of the dense rows, 1 for vectors: see `dense_rows`.
    """
    options = [c for c in considered(pattern, most=most) if c.objection is None]
    if not isinstance(pattern, MatrixPattern):
        return [c.format for c in options]
    suitable = [c for c in options if not isinstance(c.format, LEFT_OUT)]
    if feat > 1 or ENTRY * pattern.nnz <= last_cache():
        suitable = [c for c in suitable if not isinstance(c.format, NARROW)]
    if feat > 1:
        suitable = [c for c in suitable if not isinstance(c.format, VECTORS)]
    turn = {id(c): isinstance(c.format, LATE) - isinstance(c.format, EARLY) for c in suitable}
    return [c.format for c in sorted(suitable, key=lambda c: (turn[id(c)], c.values))]


def dense_rows(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the greatest row length of the dense arguments; 1 if all are vectors."""
    return max((shape[-1] for shape in shapes if len(shape) > 1), default=1)


# ------------------------------------------------------------------ conversions


@dataclass(frozen=True)
class Conversion:
    """A format, and from how many calls on it pays.

    Parameters
    ----------
    format : Format or None
        None where only the schedule is another.
    calls : float
    choices : mapping of str to int
        Of the schedule, instead of those that suit the arguments by the rules.
    """

    format: Format | None
    calls: float
    choices: Mapping[str, int] = field(default_factory=dict)


def is_worth_looking(nnz: int, calls: float, seconds: float) -> bool:
    """Return whether so many calls of so many seconds take much longer than looking for a format."""
    return calls > 0 and calls * seconds >= WORTH_LOOKING * (SAMPLING + LOOKING * nnz)


def choose_format(
    program: Program,
    matrix: Any,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    calls: float = math.inf,
    seconds: float | None = None,
) -> Conversion | None:
    """Return the format for the only sparse operand of a program.

    Parameters
    ----------
    program : Program
    matrix : object
        Of two dimensions; inspected if it is compressed by rows.
    shapes : mapping of str to tuple of int
        Of the dense arguments.
    calls : float
        That are to come: what takes more of them to pay is not looked for where looking takes long.
    seconds : float, optional
        That a call takes over the matrix as it is. By default those of one machine are assumed.
    """
    source = open_source(matrix, "the matrix")
    if not isinstance(source, CompressedSource) or source.major or source.block or not source.indices.size:
        return None
    indptr, indices = source.indptr, source.indices
    feat = dense_rows(shapes.values())
    per_entry = None if seconds is None else seconds / indices.size
    if ragged_sums(program):
        entries = Entries.of_rows(matrix.shape, indptr, indices)
        return suited_to_sums(entries, source.values.itemsize, calls, per_entry)
    if feat < LEAST_FEAT:
        return None
    gain, size = max((block_gain(size, block_fill(indptr, indices, size, size)), size) for size in SQUARES)
    in_blocks = Conversion(BSR(size, size), calls_to_pay(CONVERSION, SAVED * feat, gain, indices.size, per_entry))
    if gain >= ENOUGH:
        return in_blocks
    least, entries = max(gain, LEAST_GROUP_GAIN), Entries.of_rows(matrix.shape, indptr, indices)
    if calls_to_pay(GROUPING, SAVED * feat, math.inf, indices.size, per_entry) <= calls:
        grouped = group_gain(entries)
        needed = calls_to_pay(GROUPING, SAVED * feat, grouped, indices.size, per_entry)
        if grouped >= least and needed <= calls:
            return Conversion(RowGroups(GROUP), needed)
    return None if gain < LEAST_GAIN else in_blocks


def calls_to_pay(cost: float, saved: float, gain: float, entries: int, per_entry: float | None) -> float:
    """Return after how many calls a conversion pays.

    Parameters
    ----------
    cost : float
        Seconds to convert an entry.
    saved : float
        Seconds that a call saves for each entry, where no call was timed.
    gain : float
        How many times faster calls become.
    entries : int
        Of the matrix. Where calls were timed, what a conversion costs besides its entries counts, too.
    per_entry : float or None
        Seconds of a call for each entry.

    Examples
    --------
    >>> calls_to_pay(80e-9, 1e-9, 2.0, 10**6, None), round(calls_to_pay(80e-9, 1e-9, 2.0, 10**6, 4e-9))
    (80.0, 90)
    """
    if per_entry is not None:
        saved = per_entry * (1 - 1 / gain)
        cost += COMPOSING / entries
    return cost / saved if saved > 0 else math.inf


def suited_to_sums(entries: Entries, itemsize: int, calls: float, per_entry: float | None = None) -> Conversion | None:
    """Return the format for sums of a row's entries, each of `itemsize` bytes; see `choose_format`."""
    indptr, indices = entries.indptr, entries.last
    sizes = indices.size, indices.itemsize, itemsize
    fills = {size: block_fill(indptr, indices, *size) for size in SUMMED}
    best, shape = max((sum_gain(size, fill, *sizes), size) for size, fill in fills.items())
    gains = [(best, Conversion(BSR(*shape), calls_to_pay(CONVERSION, SAVED_IN_BLOCKS, best, indices.size, per_entry)))]
    if indices.size >= MANY:
        gains += _in_slices(entries, itemsize, calls, per_entry)
    gain, conversion = max(gains, key=lambda pair: pair[0])
    return conversion if gain >= LEAST_GAIN else None


def _in_slices(
    entries: Entries, itemsize: int, calls: float, per_entry: float | None
) -> Iterator[tuple[float, Conversion]]:
    """Yield formats of slices of rows and the expected speedup of sums over them, for many entries."""
    (m, n), indptr, indices = entries.shape, entries.indptr, entries.last
    window, (wide, narrow) = NEAR, slice_fills(indptr, NEAR)
    far = slice_fills(indptr, FAR) if MUCH_FULLER * narrow < 1 else (wide, narrow)
    if far[1] > MUCH_FULLER * narrow:
        window, (wide, narrow) = FAR, far
    most = SUMMED_ON_DIAGONALS
    if narrow >= HALF_FULL and calls_to_pay(CONVERSION, SAVED_ON_DIAGONALS, most, indices.size, per_entry) <= calls:
        share_and_fill = slice_diagonals(entries, *HACK)
        gain = diagonal_gain(*share_and_fill, indices.size, indices.itemsize, itemsize)
        needed = calls_to_pay(CONVERSION, SAVED_ON_DIAGONALS, gain, indices.size, per_entry)
        yield gain, Conversion(HDIA(HACK[0]), needed)
    if indices.size <= (SHORT if 2 * n * itemsize <= private_cache() else FAR_SHORT) * m:
        rows = SLICE_HEIGHTS[0] if wide >= AS_FULL * narrow else SLICE_HEIGHTS[1]
        gain = SUMMED_IN_SLICES * narrow
        needed = calls_to_pay(SLICING, SAVED_IN_SLICES, gain, indices.size, per_entry)
        yield gain, Conversion(SELL(rows, window), needed)


def tile_formats(matrix: CompressedSource) -> dict[Format, float]:
    """Return formats in whose blocks tiles (AMX) multiply, and the expected speedup over rows, the largest first.

    Parameters
    ----------
    matrix : CompressedSource
        Compressed by rows.
    """
    gains: dict[Format, float] = {}
    for rows in (TILE_ROWS, 2 * TILE_ROWS):
        for width in (1, 2 * TILE_ROWS):
            fill = block_fill(matrix.indptr, matrix.indices, rows, width)
            if fill and fits(int(matrix.values.nbytes / fill)):
                gains[BSR(rows, width)] = tile_gain(rows, fill)
    return dict(sorted(gains.items(), key=lambda option: -option[1]))


def most_dense(weight: Any) -> float:
    """Return the density up to which a product with a weight, a csr array, is assumed to be faster than a dense one."""
    is_blocked = block_fill(weight.indptr, weight.indices, 4, 4) >= BLOCK_FILL
    return BLOCKED if is_blocked else SCATTERED


__all__ = [
    "COMPOSING",
    "LOOKING",
    "MOST_VALUES",
    "RULES",
    "SAMPLING",
    "SUMMED",
    "SUMMED_IN_SLICES",
    "WORTH_LOOKING",
    "Considered",
    "Conversion",
    "block_gain",
    "calls_to_pay",
    "candidates",
    "choose_format",
    "considered",
    "dense_rows",
    "diagonal_gain",
    "group_gain",
    "is_worth_looking",
    "most_dense",
    "ranked_candidates",
    "sum_gain",
    "tile_formats",
    "tile_gain",
]
