# SPDX-License-Identifier: Apache-2.0
"""What follows from a candidate's loops without running them: bytes by level of the memory, reuse, vectors, balance.

The last term puts them together into the time below which a kernel cannot come: the roofline of Williams, Waterman
and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures", CACM 2009, with one roof
for each level.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from sparsetir.formats.layouts import CSR
from sparsetir.formats.pattern import MatrixPattern, Pattern
from sparsetir.machine import last_cache, private_cache
from sparsetir.schedules import Choices
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.features import Operands, Stored

PARALLEL = "parallel"
# The numbers that threads change; what they gain is in "parallel".
THREADED = (
    *("chunks", "threads", "per_chunk", "is_serial", "threads_used", "balance", "rows_of_a_piece", "roofline"),
    PARALLEL,
)
VECTOR, REGISTERS = 64, 32  # bytes of a vector, and how many vectors a core holds
ROW, CHUNK = 2e-9, 0.5e-6  # seconds to begin a row of a tile, and a parallel piece


@dataclass(frozen=True)
class Structure:
    """What the terms need to know of a matrix.

    Parameters
    ----------
    nnz, rows : int
    columns : int
        That hold something.
    longest : int
        Entries of the longest row.
    apart : float
        Mean number of rows from an entry to the next one of its column.
    distinct : float
        Columns that 64 neighbouring rows use, for each of their entries.
    """

    nnz: int
    rows: int
    columns: int
    longest: int
    apart: float
    distinct: float

    @classmethod
    def of(cls, pattern: Pattern | None) -> Structure:
        """That of a pattern; of tensors only sizes are known."""
        if pattern is None:
            return cls(1, 1, 1, 1, 1.0, 1.0)
        nnz, rows = max(pattern.nnz, 1), max(pattern.shape[0], 1)
        if not isinstance(pattern, MatrixPattern):
            return cls(nnz, rows, max(pattern.shape[-1], 1), -(-nnz // rows), float(rows), 1.0)
        columns = max(pattern.columns.count - pattern.columns.empty, 1)
        apart = pattern.reuse_distance or float(rows)
        return cls(nnz, rows, columns, max(pattern.rows.max, 1), apart, pattern.panel_columns)


def terms(candidate: Candidate, stored: Stored, operands: Operands, structure: Structure) -> dict[str, float]:
    """The terms by name, amounts on a logarithmic scale; none for choices of another kind than `Choices`."""
    choices = candidate.choices
    if not isinstance(choices, Choices):
        return {}
    format = candidate.format or CSR()
    loops = _Loops(choices, stored, operands, structure, format.column_parts)
    moved = loops.moved()
    found = {**loops.shape(), **loops.reuse(), **_bytes(moved)}
    found |= {"block_columns": float(format.block[1]), "column_parts": float(loops.parts)}
    whole, serial = log2(loops.seconds(moved, loops.threads, choices.chunks)), log2(loops.seconds(moved, 1, 0))
    return found | {"roofline": whole, "serial": serial, PARALLEL: whole - serial}


class _Loops:
    """The loops of the row sketch with their extents."""

    def __init__(self, choices: Choices, stored: Stored, operands: Operands, structure: Structure, parts: int) -> None:
        self.choices, self.stored, self.operands, self.structure, self.parts = (
            choices,
            stored,
            operands,
            structure,
            parts,
        )
        self.width = max(operands.width or operands.feat, 1)
        self.panels = ceil(self.width / choices.panel) if choices.panel else 1
        self.tiles = ceil(self.width / choices.tile)
        self.lanes = VECTOR // max(operands.itemsize, 1)
        self.vectors = ceil(min(choices.tile, self.width) / self.lanes)
        self.threads = max(min(operands.threads, choices.chunks), 1)
        self.per_row = stored.values / structure.rows

    # ------------------------------------------------------------------ loops and vectors

    @property
    def efficiency(self) -> float:
        """The share of the vectors' elements that compute something asked for."""
        if self.width > 1:
            return self.width / (self.tiles * ceil(min(self.choices.tile, self.width) / self.lanes) * self.lanes)
        side = self.choices.lanes or 1
        filled = self.per_row / (max(ceil(self.per_row / side), 1) * side)
        return min(max(filled, 1e-3), 1.0) * min(side, self.lanes) / self.lanes

    def balance(self, threads: int) -> float:
        """How much longer the slowest thread takes than the mean: pieces are whole rows unless rows are split."""
        if self.choices.carry:
            return 1.0
        return max(1.0, threads * self.structure.longest / self.structure.nnz)

    def shape(self) -> dict[str, float]:
        """Extents and annotations of the loops."""
        registers = self.vectors * self.stored.rows
        pieces = max(self.choices.chunks, 1)
        return {
            "vector_efficiency": self.efficiency,
            "registers": registers / REGISTERS,
            "body": log2(registers * self.choices.unroll),
            "threads_used": float(self.threads),
            "balance": log2(self.balance(self.threads)),
            "rows_of_a_piece": log2(1 + self.structure.rows / pieces),
            "fetched_ahead": log2(1 + self.choices.prefetch * self.width * self.operands.itemsize),
            "row_steps": log2(1 + self.per_row / self.choices.unroll),
        }

    # ------------------------------------------------------------------ reuse

    @property
    def strip(self) -> float:
        """Bytes of a gathered row that are used before the next panel."""
        return min(self.choices.panel or self.width, self.width) * self.operands.itemsize

    @property
    def between(self) -> float:
        """Bytes of other rows that are gathered before a row comes again, in order of the rows."""
        all_rows = self.structure.columns * self.strip / self.parts
        s = self.structure
        return max(min(all_rows, s.apart * s.nnz / s.rows * min(s.distinct, 1.0) * self.strip / self.parts), 1.0)

    def reuse(self) -> dict[str, float]:
        """How often each buffer's element is used in each loop, and what lies between two uses."""
        s = self.structure
        return {
            "uses_in_all": log2(1 + s.nnz / s.columns),
            "uses_in_64_rows": 1.0 / max(s.distinct, 1e-3),
            "uses_in_a_block": float(self.stored.rows),
            "uses_of_an_index": log2(self.tiles * self.panels if self.choices.panel else self.tiles),
            "uses_of_a_result": log2(1 + self.per_row),
            "between_private": log2(self.between / private_cache()),
            "between_last": log2(self.between / last_cache()),
        }

    # ------------------------------------------------------------------ bytes

    @property
    def gathered(self) -> float:
        """Bytes of all rows that are gathered."""
        return self.stored.values / self.stored.rows * self.width * self.operands.itemsize

    def moved(self) -> tuple[float, float, float]:
        """Bytes from the core's own caches, from the last cache, and from the memory."""
        o, s = self.operands, self.structure
        first = s.columns * self.width * o.itemsize
        packed = 2.0 * o.gathered if self.choices.panel else 0.0
        lists = self.stored.bytes * float(self.panels)
        # What is written past the caches need not be read before.
        results = o.result * (1.0 if self.choices.stream or o.result < last_cache() else 2.0)
        streamed = lists + packed + results
        away = outside(o.gathered + self.stored.bytes + o.result, last_cache())
        private = self.gathered + self.stored.bytes * float(self.tiles) + results
        last = outside(self.between, private_cache()) * self.gathered + first + streamed
        memory = outside(self.between, last_cache()) * self.gathered + away * (first + streamed)
        return private, last, memory + (o.result if self.choices.stream else 0.0)

    # ------------------------------------------------------------------ time

    def seconds(self, moved: tuple[float, float, float], threads: int, chunks: int) -> float:
        """The longest of what the loops need of each part of the machine, on some threads and in some pieces."""
        private, last, memory = moved
        rates = self.operands.rates
        spilled = max(1.0, self.vectors * self.stored.rows / REGISTERS)
        compute = 2.0 * self.stored.values * self.width / (rates.peak * self.efficiency) * spilled
        rows = self.structure.rows / self.stored.rows * self.tiles * max(self.stored.pieces / self.parts, 1.0) * ROW
        shared = max(compute, private / rates.private, last / rates.last) + rows
        pieces = chunks * self.stored.pieces * self.panels * CHUNK / threads
        return max(shared / threads * self.balance(threads), memory / (rates.memory * threads**0.5)) + pieces + CHUNK


def _bytes(moved: tuple[float, float, float]) -> dict[str, float]:
    """Bytes from each level on a logarithmic scale."""
    names = ("bytes_private", "bytes_last", "bytes_memory")
    return {name: log2(1 + each) for name, each in zip(names, moved, strict=True)}


def outside(held: float, cache: float) -> float:
    """The share of some bytes, used in turn, that a cache of random replacement does not hold."""
    return max(0.0, 1.0 - cache / held) if held > 0 else 0.0


__all__ = ["PARALLEL", "THREADED", "Structure", "outside", "terms"]
