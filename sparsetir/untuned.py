# SPDX-License-Identifier: Apache-2.0
"""Which loops suit a kernel that nobody tuned, from what its operands are like.

Rows of a dense operand that are gathered through an index array are prefetched where they are not in the core's cache
anyway: a few windows of the array, as many entries long as that cache holds rows, tell how often a row comes again.
Results larger than every cache are written past them.

Rows are split among threads where one has clearly more than its share of the work: whole, it would keep one thread busy
while the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from sparsetir.ir import Program, SparseBuffer, accesses
from sparsetir.machine import last_cache, private_cache

WINDOWS = 16
LINE = 64  # bytes; shorter rows are not worth an instruction
TIMES_CACHE = 2.0  # operands up to so many times the cache are left to the hardware
NEW = 0.4  # of the rows in a window
PREFETCH = 8  # entries ahead
TIMES_SHARE = 1.5  # of the work of a thread: longer rows are split


@dataclass(frozen=True)
class Gather:
    """A dense array whose rows are found through an index array, both by the names of parameters."""

    indices: str
    operand: str
    dimension: int


def gathers(program: Program) -> list[Gather]:
    """Every gather of a program's iterations."""
    found: dict[Gather, None] = {}
    for iteration in program.iterations:
        pairs = zip(iteration.vars, iteration.axes, strict=True)
        listed = {v: str(a.indices.name) for v, a in pairs if a.indices is not None}
        for view, subscripts, _ in accesses(iteration.block):
            buffer = program.buffers.get(view)
            if not isinstance(buffer, SparseBuffer) or not buffer.is_dense or buffer.allocated:
                continue
            for d, subscript in enumerate(subscripts):
                if subscript in listed:
                    found[Gather(listed[subscript], str(buffer.storage.name), d)] = None
    return list(found)


def suits_prefetch(gathers: list[Gather], arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether the rows of some gather are rarely in the core's own cache when they are needed."""
    for gather in gathers:
        indices, operand = arrays.get(gather.indices), arrays.get(gather.operand)
        if indices is None or operand is None or not operand.size or not indices.size:
            continue
        row = operand.nbytes // max(operand.shape[gather.dimension], 1)
        cache = private_cache()
        if row >= LINE and operand.nbytes > TIMES_CACHE * cache and share_of_new(indices, cache // row) > NEW:
            return True
    return False


def suits_streaming(results: Iterable[np.ndarray]) -> bool:
    """Whether some result is so large that nothing of it is left in any cache when it is read."""
    return any(result.ndim > 1 and result.nbytes > last_cache() for result in results)


def row_pointers(program: Program) -> list[str]:
    """Parameters that say where the rows of a loop over dense rows begin."""
    found: dict[str, None] = {}
    for iteration in program.iterations:
        for axis in iteration.axes:
            if axis.indptr is not None and axis.parent is not None and axis.parent.kind == "dense_fixed":
                found[str(axis.indptr.name)] = None
    return list(found)


def suits_carry(pointers: list[str], arrays: Mapping[str, np.ndarray], threads: int) -> bool:
    """Whether some row has more work than `TIMES_SHARE` times a thread's share: one step a row and one an entry."""
    if threads < 2:
        return False
    for indptr in (arrays[name] for name in pointers if name in arrays):
        if indptr.size < 2:
            continue
        work = indptr.size - 1 + int(indptr[-1])
        if has_longer_row(indptr, int(TIMES_SHARE * work / threads)):
            return True
    return False


def has_longer_row(indptr: np.ndarray, length: int) -> bool:
    """Whether a row has more than `length` entries: such a row holds one of the entries `length`, twice `length`, ...

    Parameters
    ----------
    indptr : ndarray
    length : int

    Examples
    --------
    >>> indptr = np.array([0, 2, 7, 8])
    >>> has_longer_row(indptr, 4), has_longer_row(indptr, 5)
    (True, False)
    """
    step = max(length, 1)
    rows = np.searchsorted(indptr, np.arange(0, int(indptr[-1]), step), side="right") - 1
    return bool(np.any(indptr[rows + 1] - indptr[rows] > length))


def share_of_new(indices: np.ndarray, window: int) -> float:
    """The mean share of different numbers in a few windows of an index array.

    Parameters
    ----------
    indices : ndarray
    window : int
        Entries.

    Examples
    --------
    >>> share_of_new(np.array([5, 5, 6, 6]), 4)
    0.5
    """
    flat = indices.reshape(-1)
    length = max(1, min(window, len(flat)))
    count = min(WINDOWS, max(1, len(flat) // length))
    starts = np.linspace(0, len(flat) - length, count).astype(np.int64)
    return float(np.mean([len(np.unique(flat[s : s + length])) / length for s in starts]))


__all__ = [
    "PREFETCH",
    "Gather",
    "gathers",
    "has_longer_row",
    "row_pointers",
    "share_of_new",
    "suits_carry",
    "suits_prefetch",
    "suits_streaming",
]
