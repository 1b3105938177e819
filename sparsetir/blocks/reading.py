# SPDX-License-Identifier: Apache-2.0
"""Row blocks of a matrix on disk: the table of blocks, the reader thread, validation."""

from __future__ import annotations

import queue
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsetir.errors import FileFormatError
from sparsetir.stores import Array, Buffers, Store
from sparsetir.utils.memory import MemoryLimitError, readable

BUFFERS = 3  # blocks in memory: one is read, one waits, one is multiplied
MAX_BLOCK_BYTES = 4 << 20  # of a block, which is still in the last cache when it is multiplied
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


def block_starts(indptr: Array, entry_bytes: int, line_bytes: int, limit: int) -> list[int]:
    """Return the first line of each block, and the number of lines at the end.

    Raises
    ------
    MemoryLimitError
        A single line takes more than `limit` bytes.
    """
    limit, lines, starts = min(limit, MAX_BLOCK_BYTES), len(indptr) - 1, [0]
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
    """Read and validate a block; indices become int32 where they fit."""
    buffers = Buffers() if buffers is None else buffers
    first, last = int(store.indptr[begin]), int(store.indptr[end])
    try:
        indices, data = store.read(first, last, buffers)
    except FileFormatError as error:
        raise FileFormatError(f"{error} This is {_place(store, number, begin, end)}.") from error
    extent = store.lines[1]
    # Read as unsigned, negative indices are the largest: one pass finds both faults.
    if indices.size and indices.view(f"u{indices.itemsize}").max() >= extent:
        worst = int(indices.min()) if indices.min() < 0 else int(indices.max())
        where = _place(store, number, begin, end)
        raise FileFormatError(f"{store.label}: expected indices from 0 to {extent - 1}, got {worst} in {where}.")
    idtype = np.int32 if extent < 1 << 31 else np.int64
    indptr = buffers.array("indptr", end + 1 - begin, idtype)
    np.subtract(store.indptr[begin : end + 1], first, out=indptr, casting="unsafe")
    indices, data = indices.astype(idtype, copy=False), data.astype(dtype, copy=False)
    return Block(number, begin, end, indptr, indices, data, buffers)


def _place(store: Store, number: int, begin: int, end: int) -> str:
    kind = "rows" if store.format == "csr" else "columns"
    return f"block {number}, {kind} {begin} to {end}"


def read_blocks(store: Store, starts: Sequence[int], dtype: Any, numbers: Sequence[int]) -> Iterator[Block]:
    """Yield blocks in order, read ahead by a thread; the arrays of a block end when the next one is asked for."""
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    free: queue.SimpleQueue[Buffers | None] = queue.SimpleQueue()  # None ends the reader
    for _ in range(BUFFERS):
        free.put(Buffers())

    def run() -> None:
        try:
            for number in numbers:
                buffers = free.get()
                if buffers is None:
                    return
                ready.put(read_block(store, number, starts[number], starts[number + 1], np.dtype(dtype), buffers))
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


class Bar:
    """A line on stderr: bytes read, rate, time left."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self.total, self.is_shown, self.read, self.began = total, is_shown, 0, time.monotonic()
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


def iterate(store: Store, starts: Sequence[int], dtype: Any, bar: Bar, numbers: Sequence[int] | None = None) -> Any:
    """Yield the blocks of a pass and count their bytes."""
    numbers = range(len(starts) - 1) if numbers is None else numbers
    with closing(read_blocks(store, starts, dtype, numbers)) as blocks:  # type: ignore[type-var]
        for block in blocks:
            yield block
            bar.add(len(block.indices) * store.entry_bytes)


__all__ = ["BUFFERS", "Bar", "Block", "block_starts", "iterate", "read_block", "read_blocks"]
