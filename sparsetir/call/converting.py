# SPDX-License-Identifier: Apache-2.0
"""Which format a matrix is worth converting to before many products with it.

* Dense blocks: `bsr`, whose loops load a row of the dense operand, or a few elements of a vector, once for all rows of
  a block.
* Rows of similar patterns that are no neighbours: `row_groups`, for the same reason.
* Short rows that are summed into one number each: `sell`, whose loops sum several rows side by side.
* Diagonals of neighbouring rows that are summed so: `hdia`, whose loops do that without a gather.

The rules look at a sample of the rows, or at their lengths. Converting has to pay within the calls that were announced
(``sparsetir.build(program, calls=1000)``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.call.bound import BoundKernel
from sparsetir.call.bound_composed import BoundComposedKernel
from sparsetir.call.finite import Watch, WatchedBound
from sparsetir.call.kernel import Kernel
from sparsetir.call.make import make_kernel
from sparsetir.errors import SparseTIRError
from sparsetir.formats.blocks import BSR
from sparsetir.formats.diagonals import slice_diagonals
from sparsetir.formats.format import Entries, Format
from sparsetir.formats.pattern import HACK
from sparsetir.formats.row_groups import RowGroups, grouped_share
from sparsetir.formats.special import SELL
from sparsetir.formats.splits import HDIA
from sparsetir.interop import is_sparse
from sparsetir.interop.sources import Compressed, open_source
from sparsetir.ir import Program
from sparsetir.machine import last_cache, private_cache
from sparsetir.transform.decompose import decompose_format
from sparsetir.usage import ragged_sums

SAMPLED, WINDOWS = 1 << 16, 16  # entries that are looked at, and in how many places
SQUARES = (4, 3, 2)  # rows and columns of blocks
LEAST_GAIN = 1.07  # of blocks, see `block_gain`
ENOUGH = 1.25  # of blocks: nothing else is looked at
GROUP, LEAST_GROUP_GAIN = 4, 1.15  # rows of a group, and what groups must gain
LEAST_FEAT = 8  # elements of a dense row
SHORT, FAR_SHORT = 24.0, 64.0  # entries of a row on average; where half of a core's own cache does not hold a vector
MANY = 1 << 10  # entries of all rows: for fewer, a call takes longer than its loops
SLICES, NEAR, FAR = (16, 8), 1024, 8192  # rows of a slice, and of those that are sorted by length
AS_FULL = 0.95  # how full wide slices must be, relative to narrow ones
MUCH_FULLER = 1.1  # how full slices of rows from far away must be, relative to those of near ones
HALF_FULL = 0.5  # slices, so that what is on no diagonal can be stored in some
# Rough seconds for each entry on one machine (AMD Zen 3): converting it, and what a call saves for each number that is
# computed with it. `python -m sparsetir.bench.formats` prints both for a matrix.
CONVERSION, GROUPING, SAVED = 80e-9, 250e-9, 0.02e-9
SLICING, SAVED_IN_SLICES = 25e-9, 0.05e-9
SAVED_IN_BLOCKS, SAVED_ON_DIAGONALS = 0.1e-9, 0.2e-9
# How many times faster sums over full blocks of so many rows and columns are than over rows (AMD Zen 4).
SUMMED = {(3, 3): 1.5, (4, 4): 2.6, (8, 1): 2.7, (16, 1): 3.2, (8, 8): 3.2}
SUMMED_IN_SLICES = 1.4  # the same for full slices, where rows are short
SUMMED_ON_DIAGONALS = 3.5  # the same for full diagonals of slices
REST = 1.3  # how many times longer an entry takes that is on none of them, as its row is gone over twice


@dataclass(frozen=True)
class Conversion:
    """A format, and from how many calls on it pays."""

    format: Format
    calls: float


def bound_over_another(
    kernel: Kernel, fixed: Mapping[str, Any], arguments: Mapping[str, Any]
) -> BoundComposedKernel | WatchedBound | None:
    """A bound kernel over the format that suits the fixed matrix; None where its own is best, or it is not alone."""
    matrices = {name: value for name, value in {**fixed, **arguments}.items() if is_sparse(value)}
    if len(matrices) != 1 or set(matrices) - set(fixed):
        return None
    ((name, matrix),) = matrices.items()
    if len(matrix.shape) != 2 or name not in kernel.signature.buffers:
        return None
    shapes = {n: np.shape(v) for n, v in {**fixed, **arguments}.items() if n != name}
    calls = kernel.calls or 0
    found = suited(kernel.signature.program, matrix, shapes, calls=calls)
    if found is None or found.calls > calls:
        return None
    try:
        parts = decompose_format(kernel.func, {name: found.format})
        other: Any = make_kernel(parts, kernel.target)
        bound = other.bind(**fixed) if other.has_plain_results else None
    except SparseTIRError:  # the program cannot be written over it
        return None
    # Without zeros between the entries none is multiplied.
    is_safe = kernel.finite or other.convert(name, matrix).padding == 0
    watch = None if is_safe else Watch.over(parts, kernel.signature)
    if bound is None or watch is None:
        return bound
    return WatchedBound(bound, lambda: BoundKernel(Kernel(kernel.func, kernel.compiled), dict(fixed)), watch)


def suited(
    program: Program, matrix: Any, shapes: Mapping[str, tuple[int, ...]], *, calls: float = math.inf
) -> Conversion | None:
    """The format for the only sparse operand of a program.

    Parameters
    ----------
    program : Program
    matrix : object
        Of two dimensions; looked at where it is compressed by rows.
    shapes : mapping of str to tuple of int
        Of the dense arguments.
    calls : float
        That are to come: what takes more of them to pay is not looked for where looking takes long.
    """
    source = open_source(matrix, "the matrix")
    if not isinstance(source, Compressed) or source.major or source.block or not source.indices.size:
        return None
    indptr, indices = source.indptr, source.indices
    feat = max((shape[-1] for shape in shapes.values() if len(shape) > 1), default=1)
    if ragged_sums(program):
        return suited_to_sums(Entries.of_rows(matrix.shape, indptr, indices), source.values.itemsize, calls)
    if feat < LEAST_FEAT:
        return None
    gain, size = max((block_gain(size, block_fill(indptr, indices, size, size)), size) for size in SQUARES)
    if gain >= ENOUGH:
        return Conversion(BSR(size, size), CONVERSION / (SAVED * feat))
    needed = GROUPING / (SAVED * feat)
    if needed <= calls and group_gain(Entries.of_rows(matrix.shape, indptr, indices)) >= max(gain, LEAST_GROUP_GAIN):
        return Conversion(RowGroups(GROUP), needed)
    return None if gain < LEAST_GAIN else Conversion(BSR(size, size), CONVERSION / (SAVED * feat))


def suited_to_sums(entries: Entries, itemsize: int, calls: float) -> Conversion | None:
    """The format for sums of a row's entries, each of which is a number of so many bytes."""
    indptr, indices = entries.indptr, entries.last
    sizes = indices.size, indices.itemsize, itemsize
    fills = {size: block_fill(indptr, indices, *size) for size in SUMMED}
    best, shape = max((sum_gain(size, fill, *sizes), size) for size, fill in fills.items())
    found = [(best, Conversion(BSR(*shape), CONVERSION / SAVED_IN_BLOCKS))]
    if indices.size >= MANY:
        found += _in_slices(entries, itemsize, calls)
    gain, conversion = max(found, key=lambda each: each[0])
    return conversion if gain >= LEAST_GAIN else None


def _in_slices(entries: Entries, itemsize: int, calls: float) -> Iterator[tuple[float, Conversion]]:
    """Formats of slices of rows and how many times faster sums over them should be, for many entries."""
    (m, n), indptr, indices = entries.shape, entries.indptr, entries.last
    window, (wide, narrow) = NEAR, slice_fills(indptr, NEAR)
    far = slice_fills(indptr, FAR) if MUCH_FULLER * narrow < 1 else (wide, narrow)
    if far[1] > MUCH_FULLER * narrow:
        window, (wide, narrow) = FAR, far
    if narrow >= HALF_FULL and CONVERSION / SAVED_ON_DIAGONALS <= calls:
        found = slice_diagonals(entries, *HACK)
        gain = diagonal_gain(*found, indices.size, indices.itemsize, itemsize)
        yield gain, Conversion(HDIA(HACK[0]), CONVERSION / SAVED_ON_DIAGONALS)
    if indices.size <= (SHORT if 2 * n * itemsize <= private_cache() else FAR_SHORT) * m:
        rows = SLICES[0] if wide >= AS_FULL * narrow else SLICES[1]
        yield SUMMED_IN_SLICES * narrow, Conversion(SELL(rows, window), SLICING / SAVED_IN_SLICES)


def diagonal_gain(share: float, fill: float, nnz: int, index: int, value: int) -> float:
    """How many times faster sums over diagonals of slices should be than over rows, for entries of so many bytes.

    `share` of the entries lie on diagonals that are `fill` full. From memory, as for `sum_gain`, not more than there is
    less to read.

    Examples
    --------
    >>> diagonal_gain(1.0, 0.5, 1000, 4, 4), diagonal_gain(1.0, 1.0, 10**9, 4, 4)
    (1.75, 2.0)
    """
    held = share / fill if fill else 0.0
    gain = 1 / (held / SUMMED_ON_DIAGONALS + REST * (1 - share))
    in_rows, on_diagonals = index + value, held * value + (1 - share) * (index + value)
    return gain if nnz * in_rows <= last_cache() else min(gain, in_rows / on_diagonals)


def block_gain(size: int, fill: float) -> float:
    """How many times faster rows together should be: one load serves them all, but zeros are multiplied too.

    A row alone loads a vector for each multiplication, and both take as long.

    Examples
    --------
    >>> block_gain(1, 1.0), block_gain(3, 1.0), block_gain(3, 0.5)
    (1.0, 1.5, 0.75)
    """
    return fill * 2 * size / (size + 1)


def group_gain(entries: Entries) -> float:
    """How many times faster rows in groups should be, of which some are as they were."""
    share, fill = grouped_share(entries, GROUP, RowGroups.padding)
    return 1 / (1 - share + share / block_gain(GROUP, fill)) if share else 1.0


def sum_gain(size: tuple[int, int], fill: float, nnz: int, index: int, value: int) -> float:
    """How many times faster sums over blocks should be than over rows, for so many entries of so many bytes.

    Where they come from memory, not more than there is less to read.

    Examples
    --------
    >>> sum_gain((4, 4), 0.5, 1000, 4, 4), sum_gain((4, 4), 0.5, 10**9, 4, 4)
    (1.3, 0.9411764705882353)
    """
    gain = SUMMED[size] * fill
    in_rows, in_blocks = index + value, (index / math.prod(size) + value) / max(fill, 1e-9)
    return gain if nnz * in_rows <= last_cache() else min(gain, in_rows / in_blocks)


def slice_fills(indptr: np.ndarray, window: int) -> tuple[float, float]:
    """How full wide and narrow slices of rows are that are sorted by length within windows.

    Examples
    --------
    >>> slice_fills(np.arange(0, 129, 2), 16), slice_fills(np.array([0, 8, 8, 8, 8, 8, 8, 8, 8]), 16)
    ((1.0, 1.0), (0.0625, 0.125))
    """
    lengths = np.zeros(-(-(len(indptr) - 1) // window) * window, indptr.dtype)
    lengths[: len(indptr) - 1] = np.diff(indptr)
    ordered = np.sort(lengths.reshape(-1, window), axis=1)
    slots = (rows * int(ordered[:, rows - 1 :: rows].sum(dtype=np.int64)) for rows in SLICES)
    wide, narrow = (float(indptr[-1]) / max(count, 1) for count in slots)
    return wide, narrow


def block_fill(indptr: np.ndarray, indices: np.ndarray, rows_each: int, columns_each: int) -> float:
    """How full blocks of so many rows and columns are in a sample of the rows.

    Examples
    --------
    >>> block_fill(np.array([0, 2, 4]), np.array([0, 1, 0, 1]), 2, 2)
    1.0
    """
    rows = len(indptr) - 1
    each = max(1, rows * SAMPLED // max(indices.size, 1) // (WINDOWS * rows_each)) * rows_each
    starts = np.unique(np.linspace(0, max(rows - each, 0), WINDOWS).astype(np.int64) // rows_each * rows_each)
    held = blocks = 0
    for start in starts:
        bounds = indptr[start : start + each + 1].astype(np.int64)
        row = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        columns = indices[bounds[0] : bounds[-1]].astype(np.int64)
        held += columns.size
        blocks += np.unique(row // rows_each * (1 << 40) + columns // columns_each).size
    return held / (blocks * rows_each * columns_each) if blocks else 0.0


__all__ = ["Conversion", "block_fill", "block_gain", "bound_over_another", "slice_fills", "suited"]
