# SPDX-License-Identifier: Apache-2.0
"""How full blocks and slices of a matrix are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sparsetir.formats.arrays import Array, changes
from sparsetir.formats.blocks import key_batches

SAMPLED, WINDOWS = 1 << 16, 16  # entries that are looked at, and in how many places


def block_sizes(starts: Array, keys: Array, extent: int, width: int = 1) -> Iterator[Array]:
    """How many entries each block holds that holds some: a few rows of blocks at a time.

    Parameters
    ----------
    starts : ndarray of int
        Where each row of blocks begins in `keys`, and where the last one ends.
    keys : ndarray of int
        The entries' columns; a block has `width` of them.
    extent : int
        Blocks of a row.
    width : int
    """
    for batch in key_batches(starts, keys, extent, width):
        ordered = np.sort(batch.keys)
        yield np.diff(np.append(np.flatnonzero(changes([ordered])), len(ordered)))


def block_fill(indptr: Array, indices: Array, r: int, c: int) -> float:
    """How full blocks of `r` rows and `c` columns are, in a sample of the rows.

    Examples
    --------
    >>> block_fill(np.array([0, 2, 4]), np.array([0, 1, 0, 1]), 2, 2)
    1.0
    """
    rows = len(indptr) - 1
    each = max(1, rows * SAMPLED // max(indices.size, 1) // (WINDOWS * r)) * r
    held = blocks = 0
    for start in np.unique(np.linspace(0, max(rows - each, 0), WINDOWS).astype(np.int64) // r * r):
        bounds = indptr[start : start + each + 1]
        columns = indices[bounds[0] : bounds[-1]]
        held += columns.size
        starts = np.append(bounds[:-1:r], bounds[-1]) - bounds[0]
        blocks += sum(map(len, block_sizes(starts, columns, int(columns.max(initial=0)) // c + 1, c)))
    return held / (blocks * r * c) if blocks else 0.0


def slice_fills(indptr: Array, heights: Sequence[int], window: int) -> list[float]:
    """How full slices of so many rows are that are sorted by length within windows, for each height.

    Examples
    --------
    >>> slice_fills(np.arange(0, 129, 2), (16, 8), 16), slice_fills(np.array([0, 8, 8, 8, 8, 8, 8, 8, 8]), (16, 8), 16)
    ([1.0, 1.0], [0.0625, 0.125])
    """
    lengths = np.zeros(-(-(len(indptr) - 1) // window) * window, indptr.dtype)
    lengths[: len(indptr) - 1] = np.diff(indptr)
    ordered = np.sort(lengths.reshape(-1, window), axis=1)
    slots = (rows * int(ordered[:, rows - 1 :: rows].sum(dtype=np.int64)) for rows in heights)
    return [float(indptr[-1]) / max(count, 1) for count in slots]


__all__ = ["block_fill", "block_sizes", "slice_fills"]
