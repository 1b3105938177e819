# SPDX-License-Identifier: Apache-2.0
"""Which loops suit a kernel that nobody tuned, from what its arguments are like.

* Rows of a dense operand that are gathered through an index array are prefetched where they are not in the core's
  cache anyway: a few windows of the array, as many entries long as that cache holds rows, tell how often a row comes
  again.
* Where many rows of such an operand are gathered for each result, and each is used many times, a panel of its columns
  is packed first, which a cache holds: after fewer uses if the operand as a whole does not fit into the last one.
* Results that take much of the last cache are written past it.
* Rows are split among threads where one has clearly more than its share of the work: whole, it would keep one thread
  busy while the others wait.
* Rows that are summed into one number each are summed in vectors, unless they fit in one and are as long as their
  neighbours; in longer vectors where they are long and the processor cannot foresee where they end.
* Dense rows that are summed are kept in registers as a whole if they are shorter than what is usually kept, and half
  by half where the rows that they are multiplied with come from the last cache: that was measured to be faster,
  presumably because the hardware fetches the second halves while the first ones of many rows are read.

Each rule looks at no more than a few thousand elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.ir import Program, SparseBuffer, SpIter, accesses
from sparsetir.machine import LINE, last_cache, private_cache

WINDOWS = 16
TIMES_CACHE = 4.0  # operands up to so many times the cache are left to the hardware
NEW = 0.4  # of the rows in a window
PREFETCH = (8, 32)  # entries ahead, at least and at most
AHEAD = 4096  # bytes of rows between
PANEL = 256  # bytes of a row
OFTEN = 32  # entries of a row, and uses of each gathered row, from which on packing pays if rows come from memory
VERY_OFTEN = 128  # if they come from the last cache, and those of a panel from the core's own
SHARE = 0.25  # of the last cache for a result, and for a panel
MEMORY = 0.5  # of the last cache: larger operands are taken to come from memory
TIMES_SHARE = 1.5  # of a thread's share of the work, from which on a row is split
ROWS = 1024  # looked at in a window
UNFORESEEN = 0.3  # of the rows: their length is another than that of the row before
LANES = 4
LONG = 32  # entries of a row on average, from which on twice the lanes pay where lengths are not foreseen
HALF = 4 * LINE  # bytes of a row that is read in two halves
FETCHED_LATE = 2.0  # times the cache: operands up to that are not read in halves
MANY = 16  # entries of a row, from which on its halves are read one after the other
USUAL = 128  # elements of a dense row that are kept in registers
SHORT = 16  # not worth keeping

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Gather:
    """A dense array whose rows are found through an index array, both by the names of parameters."""

    indices: str
    operand: str
    dimension: int


@dataclass(frozen=True)
class Suited:
    """What of a program the rules look at, by the names of parameters.

    Parameters
    ----------
    gathers : sequence of Gather
    pointers : sequence of str
        Where the rows of a loop over dense rows begin.
    sums : sequence of str
        Where the rows begin that an iteration sums into one number each.
    rows : sequence of (str, int)
        Dense arrays that are summed, and along which dimension.
    """

    gathers: Sequence[Gather]
    pointers: Sequence[str]
    sums: Sequence[str]
    rows: Sequence[tuple[str, int]]

    @classmethod
    def of(cls, program: Program) -> Suited:
        """That of a program."""
        return cls(gathers(program), row_pointers(program), ragged_sums(program), dense_sums(program))

    def changes(self, arrays: Arrays, results: Iterable[np.ndarray], threads: int) -> dict[str, int]:
        """The choices that suit these arguments better than the usual ones."""
        panel = suitable_panel(self.gathers, self.pointers, arrays)
        return {
            **({"panel": panel} if panel else {}),
            **({"prefetch": ahead} if (ahead := suitable_prefetch(self.gathers, arrays, panel=panel)) else {}),
            **({"stream": 1} if suits_streaming(results) else {}),
            **({"carry": 1} if suits_carry(self.pointers, arrays, threads) else {}),
            **({"lanes": lanes} if (lanes := suitable_lanes(self.sums, arrays)) else {}),
            **({"tile": tile} if (tile := suitable_tile(self.rows, arrays)) else {}),
            **suitable_halves(self.gathers, self.pointers, self.rows, arrays),
        }


# ------------------------------------------------------------------ prefetching


def gathers(program: Program) -> list[Gather]:
    """Every gather of a program's iterations."""
    found: dict[Gather, None] = {}
    for iteration in program.iterations:
        pairs = zip(iteration.vars, iteration.axes, strict=True)
        listed = {v: str(a.indices.name) for v, a in pairs if a.indices is not None}
        for storage, subscripts in dense_accesses(program, iteration):
            for d, subscript in enumerate(subscripts):
                if subscript in listed:
                    found[Gather(listed[subscript], storage, d)] = None
    return list(found)


def dense_accesses(program: Program, iteration: SpIter) -> Iterator[tuple[str, list[Any]]]:
    """The dense parameters that an iteration reads or writes, with the subscripts."""
    for view, subscripts, _ in accesses(iteration.block):
        buffer = program.buffers.get(view)
        if isinstance(buffer, SparseBuffer) and buffer.is_dense and not buffer.allocated:
            yield str(buffer.storage.name), subscripts


def known(gathers: Sequence[Gather], arrays: Arrays) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """The index array, the operand and the number of its rows, for gathers of something."""
    for gather in gathers:
        indices, operand = arrays.get(gather.indices), arrays.get(gather.operand)
        if indices is not None and operand is not None and operand.size and indices.size:
            yield indices, operand, operand.shape[gather.dimension]


def suitable_prefetch(gathers: Sequence[Gather], arrays: Arrays, *, panel: int = 0) -> int:
    """How many entries ahead to fetch the rows of a gather, or of a panel of it; 0 where the core's own cache has them.

    The shorter the rows, the further: as many bytes are on their way.
    """
    cache = private_cache()
    for indices, operand, rows in known(gathers, arrays):
        row = panel * operand.itemsize or operand.nbytes // rows
        least = cache if panel else TIMES_CACHE * cache
        # Shorter rows are not worth an instruction.
        if row >= LINE and rows * row > least and share_of_new(indices, cache // row) > NEW:
            return min(max(1 << max(AHEAD // row, 1).bit_length() - 1, PREFETCH[0]), PREFETCH[1])
    return 0


def suitable_panel(gathers: Sequence[Gather], pointers: Sequence[str], arrays: Arrays) -> int:
    """Columns of a panel that a cache holds, of an operand whose rows are used so often that packing pays; or 0."""
    length = mean_length(pointers, arrays)
    for indices, operand, rows in known(gathers, arrays):
        uses = min(indices.size / rows, length)
        is_far = operand.nbytes > MEMORY * last_cache()
        pays = uses >= OFTEN if is_far else uses >= VERY_OFTEN and rows * PANEL <= private_cache() <= operand.nbytes
        panel = (PANEL if rows * PANEL <= SHARE * last_cache() else PANEL // 2) // operand.itemsize
        if pays and operand.size // rows >= 2 * panel:
            return panel
    return 0


def mean_length(pointers: Sequence[str], arrays: Arrays) -> float:
    """Entries of a row on average, the least of several arrays; 0 if there is none."""
    lengths = [indptr[-1] / max(len(indptr) - 1, 1) for name in pointers if (indptr := arrays.get(name)) is not None]
    return float(min(lengths, default=0.0))


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


# ------------------------------------------------------------------ streaming


def suits_streaming(results: Iterable[np.ndarray]) -> bool:
    """Whether some result takes much of the last cache, where it competes with the operands and with other programs."""
    return any(result.ndim > 1 and result.nbytes > SHARE * last_cache() for result in results)


# ------------------------------------------------------------------ splitting rows


def row_pointers(program: Program) -> list[str]:
    """Parameters that say where the rows of a loop over dense rows begin."""
    found: dict[str, None] = {}
    for iteration in program.iterations:
        for axis in iteration.axes:
            if axis.indptr is not None and axis.parent is not None and axis.parent.kind == "dense_fixed":
                found[str(axis.indptr.name)] = None
    return list(found)


def suits_carry(pointers: Sequence[str], arrays: Arrays, threads: int) -> bool:
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


# ------------------------------------------------------------------ sums along rows


def ragged_sums(program: Program) -> list[str]:
    """The parameters with the row lengths of every iteration that ends in a sum along a ragged row."""
    found: dict[str, None] = {}
    for iteration in program.iterations:
        last = iteration.axes[-1] if iteration.axes else None
        if last is not None and last.indptr is not None and iteration.kinds[-1] == "R":
            found[str(last.indptr.name)] = None
    return list(found)


def suitable_lanes(sums: Sequence[str], arrays: Arrays) -> int:
    """How many entries of a ragged row to sum side by side.

    0 where rows fit in one vector and are as long as their neighbours: the processor foresees the end of a loop then.
    """
    for name in sums:
        indptr = arrays.get(name)
        if indptr is None or len(indptr) < 2:
            continue
        mean = int(indptr[-1]) / (len(indptr) - 1)
        is_foreseen = share_of_changes(some_lengths(indptr)) <= UNFORESEEN
        if mean >= LONG and not is_foreseen:
            return 2 * LANES
        return LANES if mean > LANES or not is_foreseen else 0
    return 0


def some_lengths(indptr: np.ndarray) -> np.ndarray:
    """The lengths of the rows in a few windows, a window a line.

    Examples
    --------
    >>> some_lengths(np.array([0, 2, 4, 7, 10])).tolist()
    [[2, 2, 3, 3]]
    """
    length = min(ROWS + 1, len(indptr))
    starts = np.linspace(0, len(indptr) - length, WINDOWS if length < len(indptr) else 1).astype(np.int64)
    return np.stack([np.diff(indptr[s : s + length]) for s in starts])


def share_of_changes(lengths: np.ndarray) -> float:
    """The share of rows that are not as long as the row before, of neighbouring rows along the last dimension.

    Examples
    --------
    >>> share_of_changes(np.array([[2, 2, 3, 3]]))
    0.3333333333333333
    """
    changes = np.diff(lengths) != 0
    return float(np.mean(changes)) if changes.size else 0.0


# ------------------------------------------------------------------ sums along dense rows


def dense_sums(program: Program) -> list[tuple[str, int]]:
    """The dense operands of every iteration that ends in a sum along a dense axis, and their dimension of it."""
    found: dict[tuple[str, int], None] = {}
    for iteration in program.iterations:
        last = iteration.axes[-1] if iteration.axes else None
        if last is None or last.indptr is not None or last.indices is not None or iteration.kinds[-1] != "R":
            continue
        for storage, subscripts in dense_accesses(program, iteration):
            for d, subscript in enumerate(subscripts):
                if iteration.vars[-1].same_as(subscript):
                    found[storage, d] = None
    return list(found)


def suitable_tile(rows: Sequence[tuple[str, int]], arrays: Arrays) -> int:
    """How much of dense rows that are summed to keep in registers where that is less than usual; else 0."""
    for name, dimension in rows:
        array = arrays.get(name)
        if array is not None and array.ndim > dimension and SHORT <= array.shape[dimension] < USUAL:
            return 1 << (array.shape[dimension].bit_length() - 1)
    return 0


def suitable_halves(
    gathers: Sequence[Gather], pointers: Sequence[str], rows: Sequence[tuple[str, int]], arrays: Arrays
) -> dict[str, int]:
    """The tile and the distance of fetching for dots with gathered rows of two halves, where reading them so pays.

    Not where they come from memory, whose rows are best read in one go, or from the core's own cache; nor where other
    rows are gathered too, as in attention: it would be their tile as well, and no gain is left of it.
    """
    cache, row = private_cache(), 2 * HALF
    held = ((name, arrays[name], d) for name, d in rows if name in arrays)
    summed = {name for name, array, d in held if array.ndim > d and array.shape[d] * array.itemsize == row}
    if mean_length(pointers, arrays) < MANY or not all(gather.operand in summed for gather in gathers):
        return {}
    for indices, operand, count in known(gathers, arrays):
        is_far = FETCHED_LATE * cache < operand.nbytes <= MEMORY * last_cache()
        if is_far and operand.nbytes == count * row and share_of_new(indices, cache // row) > NEW:
            return {"tile": HALF // operand.itemsize, "prefetch": AHEAD // HALF}
    return {}


__all__ = [
    "PREFETCH",
    "Gather",
    "Suited",
    "dense_sums",
    "gathers",
    "has_longer_row",
    "mean_length",
    "ragged_sums",
    "row_pointers",
    "share_of_changes",
    "share_of_new",
    "some_lengths",
    "suitable_halves",
    "suitable_lanes",
    "suitable_panel",
    "suitable_prefetch",
    "suitable_tile",
    "suits_carry",
    "suits_streaming",
]
