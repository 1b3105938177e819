# SPDX-License-Identifier: Apache-2.0
"""Buffers of one call of a kernel with computed patterns: the row partition, accumulators, lookups, reused arrays."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import tvm
import tvm_ffi

from sparsetir import interop
from sparsetir.runtime.signature import as_bfloat16
from sparsetir.sparse_output.accumulators import DUMPS, WORD
from sparsetir.sparse_output.merges import LONG_ROW
from sparsetir.utils import buffers
from sparsetir.utils.caches import cached_property
from sparsetir.utils.threads import get_num_threads

KEPT_BYTES = 1 << 26  # of accumulators that are kept for the next call
LOOKUP_SHARE = 4  # the part of the work saved by lookups that their bitmaps may cost
MOST_WORDS = 1 << 16  # of bitmaps at once, each beside its count: more do not stay in a cache
PLACE_BYTES = 4  # for each coordinate, where rows stand in the order of a mask
ROW_WORK = 8  # coordinates that take as long as the beginning and end of a row
SERIAL_WORK = 20_000  # products below which a second thread costs more than it saves
STEP_BYTES = 1 << 24  # that are moved at a time
MERGED_ROW_WORK, MERGED_SERIAL_WORK = 2, 30_000  # the same of rows that are merged, whose entries take less time


@dataclass
class ChunkWorkspace:
    """The accumulators of all chunks, empty between calls."""

    arrays: list[np.ndarray]
    bits: np.ndarray
    bytes: np.ndarray | None
    top: np.ndarray | None
    high: np.ndarray | None
    allowed: list[np.ndarray]
    parts: list[np.ndarray] = field(default_factory=list)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the arrays and of the marks of their elements."""
        return tuple(a.shape for a in (*self.arrays, self.bits, *self.allowed, *self.parts))

    @property
    def width(self) -> int:
        """The number of elements for a row."""
        return int(self.arrays[0].shape[1])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.arrays, *self.marks, *self.allowed, *self.parts))

    @property
    def marks(self) -> list[np.ndarray]:
        """The arrays that mark which coordinates are present."""
        return [a for a in (self.bits, self.bytes, self.top, self.high) if a is not None]

    @property
    def masks(self) -> list[Any]:
        """The arguments for the filters of a row."""
        return [self.allowed[0].shape[1], *self.allowed] if self.allowed else []

    @property
    def sizes(self) -> list[int]:
        """The words of a bitmap, and the bytes of the levels above it."""
        return [self.bits.shape[1], *(0 if a is None else a.shape[1] for a in (self.top, self.high))]

    def params_of(self, _call: Call) -> list[Any]:
        """Return the arguments of the numeric function."""
        return self._params

    @cached_property
    def _params(self) -> list[Any]:
        values = [self.width, *self.sizes, *self.arrays, *self.marks, *self.masks, *self.segments()]
        return [tensor(a) for a in values]

    @cached_property
    def values_params(self) -> list[Any]:
        """The arguments of the function that computes values for a known pattern."""
        return [tensor(a) for a in (self.width, *self.arrays, *self.masks)]

    def segments(self, *, values: bool = True) -> list[Any]:
        """Return the buffers for the products of long rows."""
        if not self.parts:
            return []
        places, keys, *products = self.parts
        return [places.shape[1], keys.shape[1], places, keys, *(products if values else ())]


@dataclass
class Stamps:
    """Rows in the order of a mask, one for each chunk: `places` maps each coordinate to the position of its element."""

    arrays: list[np.ndarray]
    seen: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, call: Call, elements: list[tuple[tuple[int, ...], np.dtype[Any]]]) -> Stamps:
        """Allocate for a call, with arrays of some shapes and dtypes; a mask's row has at most `width` entries."""
        shape = (call.chunks, call.width + DUMPS)
        places = buffers.empty((call.chunks, call.width), np.dtype(np.int32))
        np.bitwise_and(np.arange(call.width, dtype=np.int32), DUMPS - 1, out=places[0])
        places[1:] = places[0]
        arrays = [full(*element, value) for element, value in zip(elements, call.initial, strict=True)]
        return cls(arrays, full(shape, np.dtype(np.uint8), 0), places)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of the arrays and of the map to their elements."""
        return (*(a.shape for a in self.arrays), self.places.shape)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.arrays, self.seen, self.places))

    def params_of(self, call: Call) -> list[Any]:
        """Return the arguments of the numeric function."""
        lookup_params = call.lookups.params if call.lookups is not None and call.lookups.is_some else []
        return [*self._params, *lookup_params]

    @cached_property
    def _params(self) -> list[Any]:
        values = [self.seen.shape[1], self.places.shape[1], *self.arrays, self.seen, self.places]
        return [tensor(a) for a in values]


@dataclass
class RowBitmaps:
    """Bitmaps of long rows of an operand, which the function fills; `sparsetir.sparse_output.merges` describes them.

    Parameters
    ----------
    searches : bool
        Whether all rows are sorted, so that bisection may be used.
    least : int
        Minimum number of entries of a row with a bitmap.
    rows : ndarray
        The numbers of those rows.
    words, above : int
        Words of a bitmap, and rows of the operand.
    """

    searches: bool
    least: int
    rows: np.ndarray
    words: int
    above: int

    @classmethod
    def none(cls, *, searches: bool = False) -> RowBitmaps:
        """Return lookups without bitmaps."""
        return cls(searches, int(np.iinfo(np.int64).max), np.empty(0, np.int64), 0, 0)

    @classmethod
    def of(cls, indptr: np.ndarray, indices: np.ndarray, width: int, saved_work: int) -> RowBitmaps:
        """Choose bitmaps, bisection, or neither for an operand, from the work that lookups would save."""
        words, least, share = -(-width // WORD), LONG_ROW, saved_work // LOOKUP_SHARE
        if share > words:
            length = np.diff(indptr)
            longest = int(length.max(initial=0))
            while least <= longest:
                rows = np.flatnonzero(length >= least)
                if len(rows) * words <= MOST_WORDS and 2 * len(rows) * words + int(length[rows].sum()) <= share:
                    return cls(False, least, rows, words, len(length))
                least *= 2
        return cls.none(searches=len(indices) <= share and interop.are_ascending(indices, indptr))

    @property
    def count(self) -> int:
        """The number of bitmaps."""
        return len(self.rows)

    @property
    def is_some(self) -> bool:
        """Whether anything is looked up."""
        return self.searches or self.count > 0

    @property
    def params(self) -> list[Any]:
        """The arguments of the numeric function."""
        marks, numbers = np.empty((self.count, self.words, 2), np.int64), np.empty(self.above, np.int64)
        return [int(self.searches), self.least, self.count, self.words, self.above, self.rows, marks, numbers]


@dataclass
class Call:
    """One call: its sizes, the row partition, and the lookups of a mask's rows, if any."""

    common: list[Any]
    sizes: dict[str, int]
    rows: int
    width: int
    bound: np.ndarray | None
    ranges: np.ndarray
    initial: list[Any]
    pointers: list[np.ndarray] = field(default_factory=list)
    order: np.ndarray | None = None
    lookups: RowBitmaps | None = None
    entered: int = 0  # products of the row that has most, those of the same column, too; where rows are cut
    chunks: int = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = len(self.ranges) - 1

    @property
    def split(self) -> list[Any]:
        """The row partition as arguments of every function but the first."""
        order = [] if self.order is None else [len(self.order), self.order]
        return [*self.common, self.chunks, self.ranges, *order, *([] if self.bound is None else [self.bound])]


Buffers = TypeVar("Buffers", ChunkWorkspace, Stamps)
Kept = TypeVar("Kept")


def popped(spare: list[Kept]) -> Iterator[Kept]:
    """Pop the buffers of earlier calls, the last first; each pop is atomic, so that threads do not share a buffer."""
    while spare:
        try:
            work = spare.pop()
        except IndexError:  # another thread was faster
            return
        yield work


def kept(spare: list[Buffers], *shapes: tuple[int, ...]) -> Buffers | None:
    """Return the buffers of an earlier call that have these shapes, or None."""
    return next((work for work in popped(spare) if work.shapes == shapes), None)


def merged_ranges(pointers: list[np.ndarray], rows: int) -> np.ndarray:
    """Partition merged rows into chunks of equal work, by bisection in the row pointers."""
    total = MERGED_ROW_WORK * rows + sum(int(p[rows]) for p in pointers)
    chunks = max(1, min(get_num_threads(), rows)) if total > MERGED_SERIAL_WORK else 1
    if chunks == 1:
        return np.array((0, rows), np.int64)
    views = [p.data for p in pointers]  # items of a memoryview are Python numbers, faster than numpy's
    work = lambda row: MERGED_ROW_WORK * row + sum(v[row] for v in views)  # noqa: E731
    cuts = [bisect_left(range(rows), total * c // chunks, key=work) for c in range(1, chunks)]
    return np.array([0, *cuts, rows], np.int64)


def merged_places(pointers: list[np.ndarray], ranges: np.ndarray, kind: str) -> tuple[np.ndarray, int]:
    """Return an upper bound of the position where each chunk begins, and the number of entries to allocate.

    A chunk of a union has at most as many entries as all operands together. A chunk of an intersection has at most as
    many as the operand with the fewest, and writes one ahead.
    """
    if len(ranges) == 2:  # one chunk, where a call is short
        counts = [int(p[-1]) for p in pointers]
        return np.zeros(1, np.int64), sum(counts) if kind == "union" else min(counts) + 1
    if kind == "union":
        places = sum((p[ranges] for p in pointers), start=np.zeros(len(ranges), np.int64))
    else:
        fewest = min(pointers, key=lambda p: int(p[-1]))
        places = fewest[ranges] + np.arange(len(ranges), dtype=np.int64)
    return places[:-1], int(places[-1])


def shared_out(cost: np.ndarray) -> np.ndarray:
    """Partition rows into chunks of equal work."""
    work = np.cumsum(cost)
    total = int(work[-1]) if len(work) else 0
    chunks = max(1, min(get_num_threads(), len(work))) if total > SERIAL_WORK else 1
    ranges = np.zeros(chunks + 1, np.int64)
    ranges[1:] = np.searchsorted(work, [total * n // chunks for n in range(1, chunks + 1)])
    ranges[-1] = len(work)
    return ranges


def full(shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> np.ndarray:
    """Allocate an array aligned to a cache line, as vector stores require for speed."""
    if value == 0 and math.copysign(1, value) > 0:
        return buffers.zeros(shape, dtype)
    array = buffers.empty(shape, dtype)
    array[...] = value
    return array


def chunk_parts(indptr: np.ndarray, ranges: np.ndarray, first: np.ndarray) -> list[tuple[int, int, int]]:
    """Return source, target and length of each chunk's entries, and make the row pointers those of contiguous chunks.

    Parameters
    ----------
    indptr : ndarray
        Row pointers whose rows of a chunk are counted from the chunk's begin on.
    ranges, first : ndarray
        The first row of each chunk, and the position of its first entry.
    """
    filled, parts = 0, []
    for source, (begin, end) in zip(first.tolist(), pairwise(ranges.tolist()), strict=True):
        if end > begin:
            count = int(indptr[end]) - source
            parts.append((source, filled, count))
            if source != filled:
                indptr[begin + 1 : end + 1] += filled - source
            filled += count
    return parts


def gather(array: np.ndarray, parts: list[tuple[int, int, int]], into: np.ndarray) -> None:
    """Copy parts of an array, each given by its source, its target and its length."""
    for source, target, count in parts:
        into[target : target + count] = array[source : source + count]


def without_gaps(array: np.ndarray, parts: list[tuple[int, int, int]]) -> np.ndarray:
    """Move the parts of an array together, and return it."""
    for source, target, count in parts:
        if source != target:
            moved(array, source, target, count)
    return array


def closed(array: np.ndarray, parts: list[tuple[int, int, int]]) -> np.ndarray:
    """Move the parts of an array together in its own memory, and release the rest.

    Pages behind the end are released as their elements are moved, so that entries are in memory twice only briefly.
    """
    end = sum(count for _, _, count in parts)
    step = max(1, STEP_BYTES * len(array) // max(array.nbytes, 1))
    for source, target, count in parts:
        for at in range(0, count if source != target else 0, step):
            size = min(step, count - at)
            moved(array, source + at, target + at, size)
            forget(array, max(source + at, end), source + at + size)
    array.resize((end, *array.shape[1:]), refcheck=False)
    return array


def forget(array: np.ndarray, begin: int, end: int) -> None:
    """Release the whole pages of a range of elements that are not read again, on Linux."""
    if end <= begin or array.nbytes <= STEP_BYTES or sys.platform != "linux":
        return
    item, base = array.itemsize * math.prod(array.shape[1:]), array.ctypes.data
    first, last = -(-(base + begin * item) // mmap.PAGESIZE), (base + end * item) // mmap.PAGESIZE
    if last > first:
        where, size = (ctypes.c_size_t(pages * mmap.PAGESIZE) for pages in (first, last - first))
        ctypes.CDLL(None).madvise(where, size, mmap.MADV_DONTNEED)


def moved(array: np.ndarray, source: int, target: int, count: int) -> None:
    """Move elements inside an array with memmove; numpy would copy overlapping ranges."""
    item, base = array.itemsize * math.prod(array.shape[1:]), array.ctypes.data
    ctypes.memmove(base + target * item, base + source * item, count * item)


def passed(value: Any) -> Any:
    """Convert an array to the form that compiled functions take."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size:
        return as_bfloat16(value) if value.dtype.kind == "V" else value  # numpy has no bfloat16
    return tvm.runtime.empty(value.shape, str(value.dtype))


def tensor(value: Any) -> Any:
    """Convert an array to a TVM tensor once, so that calls need not; return a number as it is."""
    argument = passed(value)
    return tvm_ffi.from_dlpack(argument) if isinstance(argument, np.ndarray) else argument


__all__ = [
    "KEPT_BYTES",
    "PLACE_BYTES",
    "ROW_WORK",
    "SERIAL_WORK",
    "Call",
    "ChunkWorkspace",
    "RowBitmaps",
    "Stamps",
    "closed",
    "full",
    "gather",
    "kept",
    "merged_places",
    "merged_ranges",
    "moved",
    "passed",
    "popped",
    "shared_out",
    "tensor",
    "without_gaps",
]
