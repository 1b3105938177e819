# SPDX-License-Identifier: Apache-2.0
"""Panels of columns and blocks of lines, chosen so that everything together stays within the memory limit."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sparsetir.blocks.reading import BUFFERS, block_starts
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.stores import Store
from sparsetir.utils.arguments import shown
from sparsetir.utils.memory import MemoryLimitError, readable

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
    """

    operation: str
    passes: int
    bytes_read: int
    seconds: float
    panel: int
    starts: list[int] = field(repr=False)
    memory: int

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
    if isinstance(memory, bool) or not isinstance(memory, (int, np.integer)):
        raise ArgumentTypeError(f"memory: expected bytes or text, got {type(memory).__name__}. Pass '2GiB'.")
    return _positive(int(memory))


def _positive(nbytes: int) -> int:
    if nbytes <= 0:
        raise ArgumentError(f"memory: expected a positive size, got {nbytes}. Pass '2GiB'.")
    return nbytes


def make_plan(
    store: Store, memory: int, operation: str, dtype: Any, width: int, *, held: int, column: int, line: int
) -> Plan:
    """Choose panels and blocks.

    Parameters
    ----------
    held : int
        Bytes of results that stay in memory throughout.
    column : int
        Bytes for each column of a panel.
    line : int
        Bytes of dense operands and results for each line of a block and column of a panel.
    """
    free = memory - store.indptr.nbytes - held
    reserve = min(memory // RESERVE, free)
    panel = min(width, max(0, free - reserve) // max(column, 1)) if width else 0
    if free <= 0 or (width and not panel):
        taken = f"row pointers and results take {readable(store.indptr.nbytes + held)}, a column {readable(column)}"
        raise MemoryLimitError(f"memory: expected more than {readable(memory)}: {taken}. Raise memory= or pass out=.")
    passes = -(-width // panel) if width else 1
    panel = -(-width // passes)
    starts = block_starts(
        store.indptr, _entry_bytes(store, np.dtype(dtype)), 16 + line * panel, (free - panel * column) // (BUFFERS + 2)
    )
    nbytes = passes * store.nnz * store.entry_bytes
    return Plan(operation, passes, nbytes, 0.0, panel, starts, memory)


def _entry_bytes(store: Store, dtype: np.dtype[Any]) -> int:
    """Bytes of an entry in a buffer: as stored, and converted where the kernel has another dtype."""
    values = 0 if store.data.dtype == dtype else dtype.itemsize
    idtype = np.dtype(np.int32 if store.lines[1] < 1 << 31 else np.int64)
    return store.entry_bytes + values + (0 if store.indices.dtype == idtype else idtype.itemsize)


def with_estimate(plan: Plan, store: Store) -> Plan:
    """Add the seconds of reading, from a probe of the file."""
    count = min(store.nnz, min(PROBE_BYTES, plan.memory // (BUFFERS + 1)) // store.entry_bytes)
    began = time.perf_counter()
    store.read(0, count)
    seconds = max(time.perf_counter() - began, 1e-6)
    return replace(plan, seconds=plan.bytes_read * seconds / max(count * store.entry_bytes, 1))


__all__ = ["Plan", "make_plan", "parse_memory", "with_estimate"]
