# SPDX-License-Identifier: Apache-2.0
"""Row blocks of a matrix on disk within the memory limit: plan of blocks and panels, reader thread, validation."""

from __future__ import annotations

import queue
import re
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError, FileFormatError
from sparsetir.interop import Level
from sparsetir.io.stores import Array, Buffers, Decoder, Store, is_cached
from sparsetir.runtime.validation import is_sound
from sparsetir.utils.arguments import as_flag, is_integer, shown
from sparsetir.utils.machine import CORES
from sparsetir.utils.memory import MemoryLimitError, readable
from sparsetir.utils.threads import get_num_threads

BUFFERS = 3  # blocks in memory: one is read, one waits, one is multiplied
MAX_BLOCK_BYTES = 32 << 20  # of smaller blocks, starting the threads of a kernel takes as long as reading
CHUNKS_OF_BLOCK = 4  # at least, where memory permits: tasks of dask decode the chunks at both ends of a block again
CACHE_SAMPLES = 64  # of blocks
ENTRIES = Level("entries", "sparse_variable", sorted=False, unique=False)
MAX_BLOCK_ENTRIES = (1 << 31) - 1  # positions in a block are int32


@dataclass(frozen=True)
class Block:
    """Consecutive lines of a store: rows of CSR, columns of CSC."""

    number: int
    begin: int
    end: int
    indptr: Array
    indices: Array
    data: Array
    buffers: Buffers = field(default_factory=Buffers, repr=False)


def block_starts(
    indptr: Array, entry_bytes: int, line_bytes: int, limit: int, most: int = MAX_BLOCK_BYTES
) -> list[int]:
    """Return the first line of each block of at most `limit` and `most` bytes, and the number of lines at the end.

    Raises
    ------
    MemoryLimitError
        A single line takes more than `limit` bytes.
    """
    limit, lines, starts = min(limit, most), len(indptr) - 1, [0]
    while starts[-1] < lines:
        begin = starts[-1]

        def cost(end: int, begin: int = begin) -> int:
            entries = int(indptr[end] - indptr[begin])
            return entries * entry_bytes + (end - begin) * line_bytes if entries <= MAX_BLOCK_ENTRIES else sys.maxsize

        end = bisect_right(range(lines + 1), limit, lo=begin + 1, key=cost) - 1
        if end == begin:
            fault = f"line {begin} alone takes {readable(cost(begin + 1))} and a block may have {readable(limit)}"
            raise MemoryLimitError(f"memory: expected room for a line of the matrix, got less: {fault}. Raise memory=.")
        starts.append(end)
    return starts


def read_block(
    store: Store, number: int, begin: int, end: int, dtype: np.dtype[Any], buffers: Buffers | None = None
) -> Block:
    """Read and validate a block; indices become int32 where they fit.

    Parameters
    ----------
    buffers : Buffers, optional
        For the arrays. None leaves them in the pages of the file, if `is_in_place`.
    """
    first, last = int(store.indptr[begin]), int(store.indptr[end])
    is_mapped = buffers is None and is_in_place(store, [begin, end], dtype, [0])
    buffers = Buffers() if buffers is None else buffers
    try:
        stored, data = store.view(first, last) if is_mapped else store.read(first, last, buffers)
    except FileFormatError as error:
        raise FileFormatError(f"{error} This is {_place(store, number, begin, end)}.") from error
    extent = store.lines[1]
    idtype = _index_dtype(store)
    indptr = buffers.array("indptr", end + 1 - begin, idtype)
    np.subtract(store.indptr[begin : end + 1], first, out=indptr, casting="unsafe")
    indices = stored.astype(idtype, copy=False)
    # Several threads map pages at once. One is as quick without a function that must be compiled first, and a reader
    # thread leaves the cores to the kernel.
    if is_mapped and get_num_threads() > 1:
        is_inside = is_sound(ENTRIES, indptr, indices, parent_count=end - begin, length=extent, need_sorted=False)
    else:
        # Read as unsigned, negative indices are the largest: one pass finds both faults.
        is_inside = not stored.size or stored.view(f"u{stored.itemsize}").max() < extent
    if not is_inside:
        worst = int(stored.min()) if stored.min() < 0 else int(stored.max())
        where = _place(store, number, begin, end)
        raise FileFormatError(f"{store.label}: expected indices from 0 to {extent - 1}, got {worst} in {where}.")
    return Block(number, begin, end, indptr, indices, data.astype(dtype, copy=False), buffers)


def _index_dtype(store: Store) -> np.dtype[Any]:
    return np.dtype(np.int32 if store.lines[1] < 1 << 31 else np.int64)


def _place(store: Store, number: int, begin: int, end: int) -> str:
    return f"block {number}, {_lines(store, begin, end)}"


def _lines(store: Store, begin: int, end: int) -> str:
    return f"{'rows' if store.format == 'csr' else 'columns'} {begin} to {end}"


def is_in_place(store: Store, starts: Sequence[int], dtype: np.dtype[Any], numbers: Sequence[int]) -> bool:
    """Return whether kernels read blocks in the pages of the file.

    They do where nothing is decompressed or converted, most blocks lie in one piece, and the system has the file in
    memory. From a disk, a thread reads faster than page faults do.
    """
    if store.data.dtype != dtype or store.indices.dtype != _index_dtype(store):
        return False
    indptr = store.indptr
    extents = [store.extents(int(indptr[starts[n]]), int(indptr[starts[n + 1]])) for n in numbers]
    ranges = [place for places in extents for place in places if place[2]]
    samples = ranges[:: max(1, len(ranges) // CACHE_SAMPLES)]
    is_whole = 2 * sum(map(bool, extents)) > len(numbers)
    return is_whole and all(is_cached(path, offset + count - 1) for path, offset, count in samples)


def read_blocks(
    store: Store, starts: Sequence[int], dtype: Any, numbers: Sequence[int], *, is_narrow: bool = False
) -> Iterator[Block]:
    """Yield blocks in order; the arrays of a block end when the next one is asked for.

    Parameters
    ----------
    is_narrow : bool
        Whether a block is used in less time than it takes to copy: then it stays where it is, if that is possible.
        Others are read ahead by a thread.
    """
    dtype = np.dtype(dtype)
    if is_narrow and is_in_place(store, starts, dtype, numbers):
        for number in numbers:
            yield read_block(store, number, starts[number], starts[number + 1], dtype)
        return
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    free: queue.SimpleQueue[Buffers | None] = queue.SimpleQueue()  # None ends the reader
    decoder = Decoder(CORES if store.chunk_bytes else 1)
    for _ in range(BUFFERS):
        free.put(Buffers(decoder))

    def run() -> None:
        try:
            for number in numbers:
                buffers = free.get()
                if buffers is None:
                    return
                ready.put(read_block(store, number, starts[number], starts[number + 1], dtype, buffers))
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=run, name="sparsetir-reader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
            free.put(item.buffers)
            del item
    finally:
        free.put(None)
        thread.join()
        decoder.close()


class Bar:
    """A line on stderr: bytes read, rate, time left."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self.total, self.read, self.began = total, 0, time.monotonic()
        self.is_shown = as_flag(is_shown, "progress")
        self.last = 0.0

    def add(self, nbytes: int) -> None:
        """Count bytes, and print at most four times a second."""
        self.read += nbytes
        now = time.monotonic()
        if not self.is_shown or (now - self.last < 0.25 and self.read < self.total):
            return
        self.last = now
        rate = self.read / max(now - self.began, 1e-9)
        left = (self.total - self.read) / max(rate, 1.0)
        text = f"{readable(self.read)} of {readable(self.total)}, {readable(int(rate))}/s, {left:.0f} s left"
        end = "\n" if self.read >= self.total else ""
        print(f"\r{text:<70}", end=end, file=sys.stderr, flush=True)


def iterate(
    store: Store,
    starts: Sequence[int],
    dtype: Any,
    bar: Bar,
    numbers: Sequence[int] | None = None,
    *,
    is_narrow: bool = False,
) -> Any:
    """Yield the blocks of a pass and count their bytes."""
    numbers = range(len(starts) - 1) if numbers is None else numbers
    with closing(read_blocks(store, starts, dtype, numbers, is_narrow=is_narrow)) as blocks:  # type: ignore[type-var]
        for block in blocks:
            yield block
            bar.add(len(block.indices) * store.entry_bytes)


# -------------------------------------------------------------------------------------- plan of blocks


DEFAULT_MEMORY = "2GiB"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
PROBE_BYTES = 8 << 20  # read to estimate the rate of the disk
RESERVE = 3  # of the memory, one part in so many is kept for blocks


@dataclass(frozen=True)
class Plan:
    """Blocks, panels and bytes of a product over blocks.

    Parameters
    ----------
    operation : str
    passes : int
        Times that the matrix is read.
    bytes_read : int
        By all passes together.
    seconds : float
        Estimate of the reading alone, from a probe of a few MiB; computing overlaps with it.
    panel : int
        Columns of the dense operand in one pass.
    starts : list of int
        First line of each block, and the number of lines.
    memory : int
        The limit, in bytes.
    is_copied : bool
        Whether there is memory for a copy of the dense operand, or of a panel of it. One that kernels take as it is
        does without.
    """

    operation: str
    passes: int
    bytes_read: int
    seconds: float
    panel: int
    starts: list[int] = field(repr=False)
    memory: int
    is_copied: bool = True

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    def __str__(self) -> str:
        passes = f"{self.passes} pass{'es' if self.passes != 1 else ''} of {self.panel} columns"
        read = f"{readable(self.bytes_read)} read in about {self.seconds:.1f} s"
        return f"{self.operation}: {passes}, {self.blocks} blocks, {read}, within {readable(self.memory)}"


def parse_memory(memory: Any) -> int:
    """Return bytes from a number or a text such as "2GiB" or "500MB"."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", memory.lower())
        if match is None:
            raise ArgumentError(f"memory: expected a size such as '2GiB', got {shown(memory)}. Give a unit too.")
        power = " kmgt".index(match[2] or " ")
        nbytes = float(match[1]) * (1024**power if match[3] else UNITS[match[2]])
        return _positive(int(min(nbytes, sys.maxsize)))
    if not is_integer(memory):
        raise ArgumentTypeError(f"memory: expected bytes or text, got {type(memory).__name__}. Pass '2GiB'.")
    return _positive(int(memory))


def _positive(nbytes: int) -> int:
    if nbytes <= 0:
        raise ArgumentError(f"memory: expected a positive size, got {nbytes}. Pass '2GiB'.")
    return nbytes


def make_plan(
    store: Store, memory: int, operation: str, dtype: Any, width: int, *, resident_bytes: int, column: int, line: int
) -> Plan:
    """Choose panels and blocks.

    Parameters
    ----------
    resident_bytes : int
        Bytes of results that stay in memory throughout.
    column : int
        Bytes for each column of a panel.
    line : int
        Bytes of dense operands and results for each line of a block and column of a panel.
    """
    resident_bytes += decoder_bytes(store)
    free = memory - store.indptr.nbytes - resident_bytes
    reserve = min(memory // RESERVE, free)
    panel = min(width, max(0, free - reserve) // column) if column else width
    if free <= 0 or (width and not panel):
        what = "row pointers, chunks and results" if store.chunk_bytes else "row pointers and results"
        taken = f"{what} take {readable(store.indptr.nbytes + resident_bytes)}, a column {readable(column)}"
        fault = f"expected room for a product, got {readable(memory)}: {taken}"
        raise MemoryLimitError(f"memory: {fault}. Raise memory= or pass out=.")
    passes = -(-width // panel) if width else 1
    panel = -(-width // passes)
    limit, most = (free - panel * column) // (BUFFERS + 2), max(MAX_BLOCK_BYTES, CHUNKS_OF_BLOCK * store.chunk_bytes)
    starts = block_starts(store.indptr, _entry_bytes(store, np.dtype(dtype)), 16 + line * panel, limit, most)
    nbytes = passes * store.nnz * store.entry_bytes
    return Plan(operation, passes, nbytes, 0.0, panel, starts, memory)


def decoder_bytes(store: Store) -> int:
    """Bytes of the chunks that two blocks share, and of compressed and decompressed chunks, one on each thread."""
    return store.chunk_bytes * (1 + CORES)


def _entry_bytes(store: Store, dtype: np.dtype[Any]) -> int:
    """Bytes of an entry in a buffer: as stored, and converted where the kernel has another dtype."""
    values = 0 if store.data.dtype == dtype else dtype.itemsize
    idtype = _index_dtype(store)
    return store.entry_bytes + values + (0 if store.indices.dtype == idtype else idtype.itemsize)


def with_estimate(plan: Plan, store: Store) -> Plan:
    """Add the seconds of reading, from a probe of the file."""
    count = min(store.nnz, min(PROBE_BYTES, plan.memory // (BUFFERS + 1)) // store.entry_bytes)
    began = time.perf_counter()
    try:
        store.read(0, count)
    except FileFormatError as error:
        end = max(1, int(np.searchsorted(store.indptr, count, side="left")))
        raise FileFormatError(f"{error} These are in {_lines(store, 0, end)}.") from error
    seconds = max(time.perf_counter() - began, 1e-6)
    return replace(plan, seconds=plan.bytes_read * seconds / max(count * store.entry_bytes, 1))


__all__ = [
    "BUFFERS",
    "Bar",
    "Block",
    "Plan",
    "block_starts",
    "iterate",
    "make_plan",
    "parse_memory",
    "read_block",
    "read_blocks",
    "with_estimate",
]
