# SPDX-License-Identifier: Apache-2.0
"""How many times faster products should be over a format than over rows, from how full it is."""

from __future__ import annotations

import math

from sparsetir.formats.format import Entries
from sparsetir.formats.row_groups import RowGroups, grouped_share
from sparsetir.machine import last_cache

# How many times faster sums over full r x c blocks are than over rows (AMD Zen 4; `sparsetir
# bench --ops spmv --sweep` prints what the formats make of a matrix).
SUMMED = {(3, 3): 1.5, (4, 4): 2.6, (8, 1): 2.7, (16, 1): 3.2, (8, 8): 3.2}
SUMMED_IN_SLICES = 1.4  # the same for full slices, where rows are short
SUMMED_ON_DIAGONALS = 3.5  # the same for full diagonals of slices
REST = 1.3  # how many times longer an entry takes that is on none of them, as its row is gone over twice


def block_gain(size: int, fill: float) -> float:
    """How many times faster rows together should be: one load serves them all, but zeros are multiplied too.

    A row alone loads a vector for each multiplication, and both take as long.

    Examples
    --------
    >>> block_gain(1, 1.0), block_gain(3, 1.0), block_gain(3, 0.5)
    (1.0, 1.5, 0.75)
    """
    return fill * 2 * size / (size + 1)


def group_gain(entries: Entries, rows: int) -> float:
    """How many times faster rows in groups of so many should be, of which some are as they were."""
    share, fill = grouped_share(entries, rows, RowGroups.padding)
    return 1 / (1 - share + share / block_gain(rows, fill)) if share else 1.0


def sum_gain(size: tuple[int, int], fill: float, nnz: int, index: int, value: int) -> float:
    """How many times faster sums over blocks should be than over rows, for `nnz` entries of `index` and `value` bytes.

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
    """How many times faster sums over diagonals of slices should be than over rows.

    `index` and `value` are bytes of an entry. `share` of the entries lie on diagonals that are `fill` full. For data in
    memory, as for `sum_gain`, at most by as much as there is less to read.

    Examples
    --------
    >>> diagonal_gain(1.0, 0.5, 1000, 4, 4), diagonal_gain(1.0, 1.0, 10**9, 4, 4)
    (1.75, 2.0)
    """
    held = share / fill if fill else 0.0
    gain = 1 / (held / SUMMED_ON_DIAGONALS + REST * (1 - share))
    in_rows, on_diagonals = index + value, held * value + (1 - share) * (index + value)
    return gain if nnz * in_rows <= last_cache() else min(gain, in_rows / on_diagonals)


__all__ = ["SUMMED", "SUMMED_IN_SLICES", "block_gain", "diagonal_gain", "group_gain", "sum_gain"]
