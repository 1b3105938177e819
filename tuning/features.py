# SPDX-License-Identifier: Apache-2.0
"""Features of the cost model: pattern, storage, choices, analytic terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import ceil, log2
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.codegen.calibration import profile_in_use
from sparsetir.formats.base import Estimate
from sparsetir.formats.compressed import CSR
from sparsetir.formats.format import Format
from sparsetir.formats.pattern import MatrixPattern, Pattern, pattern
from sparsetir.ir.views import SparseBuffer
from sparsetir.schedules import Choices
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.work import USUAL, CoreRates, Work
from sparsetir.utils.caches import cached_property
from sparsetir.utils.machine import LINE, MachineProfile, interpolate

# Storage estimates of formats for the cost model: from the numbers of the pattern, without converting.
#
# The cost model gets these numbers for every candidate, even if the format has been converted meanwhile: features in
# training and in prediction must not differ.


INDEX = 4  # bytes


class Estimates:
    """Storage estimates of a tensor's formats.

    Parameters
    ----------
    pattern : Pattern or None
        Of the tensor, where it is known.
    own : ArgumentStorage
        How the argument is stored as it came.
    itemsize : int
        Bytes of a value.
    """

    def __init__(self, pattern: Pattern | None, own: ArgumentStorage, itemsize: int) -> None:
        self.pattern, self.own, self.itemsize = pattern, own, itemsize
        self._made: dict[Format | None, ArgumentStorage] = {None: own}

    def __call__(self, format: Format | None) -> ArgumentStorage:
        """Return the estimate for a format; None is as the argument came."""
        if format not in self._made:
            self._made[format] = self._estimated(format) if format is not None else self.own
        return self._made[format]

    def _estimated(self, format: Format) -> ArgumentStorage:
        estimate = Estimate(self.own.values) if self.pattern is None else format.estimate(self.pattern)
        values, rows = round(estimate.values), format.block[0]
        numbers = values // estimate.per_index if estimate.per_index else 0
        pointers = self.pattern.shape[0] // rows if self.pattern is not None else 0
        return ArgumentStorage(values, values * self.itemsize + INDEX * (numbers + pointers), estimate.pieces, rows)


# Features of a candidate: the pattern, how the format stores it, the choices, and analytic terms.
#
# Every number has a name, so that a model can say which of them it used. Sizes and times enter as logarithms.


NO_WORK = Work()
GRID = 8  # cells of the density image in each direction
BINS = 12  # of the histogram of row lengths
KINDS = (
    *("", "bsr", "dbsr", "blocks", "row_groups", "sr_bcrs", "buckets", "hyb", "columns", "rows", "sell", "ell"),
    *("ell_rest", "padded_csr", "nm", "dense_rows", "dense_columns", "dia", "dia_rest", "band", "csf"),
    *("narrow_csr", "narrow_sell", "reordered", "hdia"),
)
# The choices among the columns of the shipped model, in its order; the columns of all others come last.
CHOICES = ("tile", "chunks", "unroll", "prefetch", "stream", "carry", "panel", "lanes")


@dataclass(frozen=True)
class ArgumentStorage:
    """Storage of the argument in a format.

    Parameters
    ----------
    values : int
        Stored, padding included.
    bytes : int
        Of values and index arrays.
    pieces : int
    rows : int
        Of a block, side by side in a kernel.
    seconds : float
        The conversion took.
    """

    values: int
    bytes: int
    pieces: int = 1
    rows: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Operands:
    """Sizes of a call.

    Parameters
    ----------
    feat : int
        Length of a dense row of the result.
    gathered, result : int
        Bytes of what is gathered and of the results.
    itemsize, threads : int
    width : int
        Length of a gathered row; 0 if it is that of the result.
    work : Work
        What the program does.
    rates : CoreRates
        Of the machine.
    profile : MachineProfile, optional
        Of the machine; by default the one in use on this one.
    """

    feat: int
    gathered: int
    result: int
    itemsize: int
    threads: int
    width: int = 0
    work: Work = NO_WORK
    rates: CoreRates = USUAL
    profile: MachineProfile | None = None

    @property
    def machine(self) -> MachineProfile:
        """The profile of the machine that runs the program."""
        return self.profile or profile_in_use()

    @classmethod
    def of(cls, work: Work, threads: int, rates: CoreRates = USUAL, profile: MachineProfile | None = None) -> Operands:
        """Return those of a program's work."""
        gathered = work.gathered
        feat = max((int(a.run) for a in work.results), default=1)
        gathered_bytes = int(gathered.held) if gathered is not None else 0
        result = int(sum(a.held for a in work.results))
        return cls(feat, gathered_bytes, result, work.itemsize, threads, work.width, work, rates, profile)


def log(value: float) -> float:
    """Return a number on a logarithmic scale, 0 for nothing."""
    return math.log2(1.0 + max(value, 0.0))


def of_pattern(pattern: Pattern | None) -> dict[str, float]:
    """Return numbers of a pattern; of a tensor only its sizes."""
    if pattern is None:
        return {}
    features = {"nnz": log(pattern.nnz), "rows": log(pattern.shape[0]), "columns": log(pattern.shape[-1])}
    features |= {f"fibers_{d}": log(n) for d, n in enumerate(pattern.fibers)}
    return {**features, **_of_matrix(pattern)} if isinstance(pattern, MatrixPattern) else features


def _of_matrix(p: MatrixPattern) -> dict[str, float]:
    nnz, (m, n) = max(p.nnz, 1), p.shape
    features = {"panel_columns": p.panel_columns, "diagonals": log(p.diagonals), "diagonal_share": p.diagonal_share}
    features |= {"slice_diagonal_share": p.slice_diagonal_share}
    features |= {"below": p.bandwidth[0] / max(m, 1), "above": p.bandwidth[1] / max(n, 1), "sliced": p.sliced / nnz}
    features |= {
        "reuse": log(p.reuse_distance or m),
        "symmetry": p.symmetry or 0.0,
        "profile": log(sum(p.profile) / nnz),
    }
    for name, counts in (("row", p.rows), ("column", p.columns)):
        count = max(counts.count, 1)
        features |= {f"{name}_mean": log(counts.mean), f"{name}_max": log(counts.max), f"{name}_cv": counts.cv}
        features |= {
            f"{name}_gini": counts.gini,
            f"{name}_empty": counts.empty / count,
            f"{name}_median": log(counts.median),
        }
    bins = [*p.rows.histogram, *([0] * BINS)][:BINS]
    features |= {f"length_{2**k // 2}": bin_size / max(m, 1) for k, bin_size in enumerate(bins)}
    features |= {f"fill_{r}x{c}": fill.fill for (r, c), fill in p.blocks.items()}
    return features | {f"imbalance_{parts}": log(value) for parts, value in p.imbalance.items()}


def density(indptr: np.ndarray, indices: np.ndarray, columns: int) -> dict[str, float]:
    """Return a coarse image of a matrix: the share of entries in each grid cell, and its unevenness at each level."""
    rows = len(indptr) - 1
    if not rows or not columns or not indices.size:
        return {}
    edges = indptr[np.linspace(0, rows, GRID + 1).astype(np.int64)]
    image = np.array(
        [
            np.bincount(indices[a:b].astype(np.int64) * GRID // columns, minlength=GRID)[:GRID]
            for a, b in pairwise(edges)
        ]
    )
    features, level, size = {}, image / indices.size, GRID
    while size > 1:
        features[f"uneven_{size}"] = float(level.std() * size * size)
        level = level.reshape(size // 2, 2, size // 2, 2).sum(axis=(1, 3))
        size //= 2
    return features | {f"cell_{i}_{j}": float(image[i, j] / indices.size) for i in range(GRID) for j in range(GRID)}


def of_candidate(
    candidate: Candidate, stored: ArgumentStorage, operands: Operands, nnz: int, values: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return numbers of a format and of choices, and what follows from both; `values` has the candidates of knobs."""
    name = candidate.format.name if candidate.format is not None else ""
    kinds = {f"is_{kind or 'own'}": float(name == kind) for kind in KINDS}
    choices = candidate.choices
    facts = {"padding": stored.values / max(nnz, 1), "bytes": log(stored.bytes), "pieces": float(stored.pieces)}
    facts |= {"block_rows": float(stored.rows), "threads": float(operands.threads)}
    facts |= {"feat": log(operands.feat), "width": log(operands.width or operands.feat)}
    if isinstance(choices, Config):
        return {**kinds, **of_knobs(choices, values or {}), **facts}
    choice_features = {name: log(getattr(choices, name)) for name in CHOICES}
    return {**kinds, **choice_features, **facts, **_analytic(choices, stored, operands)}


def of_other_choices(choices: Choices | Config) -> dict[str, float]:
    """Return numbers of choices that the shipped model does not know."""
    if isinstance(choices, Config):
        return {}
    return {f"choice_{name}": log(value) for name, value in choices.as_dict().items() if name not in CHOICES}


def of_work(stored: ArgumentStorage, operands: Operands, nnz: int) -> dict[str, float]:
    """Return numbers of what the program does, with as much padding as the format has."""
    padding = max(stored.values / max(nnz, 1), 1e-3)
    return operands.work.numbers(operands.rates, padding, operands.machine.caches)


def of_knobs(config: Config, values: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers of knobs: a logarithm for each part of a split or number, for others their place in the list."""
    features = {}
    for name, value in config.as_dict().items():
        values_listed = list(values.get(name, (value,)))
        parts = [part for value_listed in values_listed for part in _parts(value_listed)]
        if not all(part is None or isinstance(part, (int, float)) for part in parts):
            features[f"knob {name}"] = float(values_listed.index(value)) if value in values_listed else -1.0
            continue
        for n, part in enumerate(_parts(value)):
            if part is not None:
                column = f"knob {name}[{n}]" if isinstance(value, tuple) else f"knob {name}"
                features[column] = math.copysign(log(abs(part)), part)
    return features


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _analytic(choices: Choices, stored: ArgumentStorage, operands: Operands) -> dict[str, float]:
    """Return bytes that move, and what they mean for the caches."""
    width = operands.width or operands.feat
    row = width * operands.itemsize
    tiles = -(-width // max(choices.tile, 1))
    panels = -(-width // choices.panel) if choices.panel else 1
    window = operands.gathered // max(panels, 1)
    traffic = stored.values / stored.rows * row
    packed = 2 * operands.gathered if choices.panel else 0
    private, last = operands.machine.caches
    return {
        "tiles": log(tiles),
        "tail": width % max(choices.tile, 1) / max(choices.tile, 1),
        "panels": log(panels),
        "window_in_cache": log(window / private),
        "result_in_cache": log(operands.result / last),
        "gathered_bytes": log(traffic),
        "index_bytes": log(stored.bytes * panels),
        "packed_bytes": log(packed),
        "use_of_a_row": log(traffic / max(operands.gathered, 1)),
        "flops": log(2.0 * stored.values * width),
        "per_chunk": log(stored.values / max(choices.chunks, 1)),
        "is_serial": float(choices.chunks == 0),
    }


def main_buffer(buffers: Mapping[Any, SparseBuffer], arrays: Mapping[str, np.ndarray]) -> SparseBuffer | None:
    """Return the sparse parameter with most values."""
    sparse = [b for b in buffers.values() if not b.is_dense and str(b.storage.name) in arrays]
    return max(sparse, key=lambda b: arrays[str(b.storage.name)].size, default=None)


# Analytic terms of a candidate's loops, without running them: bytes by memory level, reuse, vectors, balance.
#
# The last term puts them together into the time below which a kernel cannot come: the roofline of Williams, Waterman
# and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures", CACM 2009, with one
# roof for each level.


PARALLEL = "parallel"
# The numbers that threads change; what they gain is in "parallel".
THREADED = (
    *("chunks", "threads", "per_chunk", "is_serial", "threads_used", "balance", "rows_of_a_piece", "roofline"),
    PARALLEL,
)
VECTOR, REGISTERS = 64, 32  # bytes of a vector, and how many vectors a core holds
ROW, CHUNK = 2e-9, 0.5e-6  # seconds to begin a row of a tile, and a parallel piece


@dataclass(frozen=True)
class MatrixFacts:
    """Facts of a matrix that the analytic terms need.

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
    def of(cls, pattern: Pattern | None) -> MatrixFacts:
        """Return the facts of a pattern that the terms use; of tensors only sizes are known."""
        if pattern is None:
            return cls(1, 1, 1, 1, 1.0, 1.0)
        nnz, rows = max(pattern.nnz, 1), max(pattern.shape[0], 1)
        if not isinstance(pattern, MatrixPattern):
            return cls(nnz, rows, max(pattern.shape[-1], 1), -(-nnz // rows), float(rows), 1.0)
        columns = max(pattern.columns.count - pattern.columns.empty, 1)
        apart = pattern.reuse_distance or float(rows)
        return cls(nnz, rows, columns, max(pattern.rows.max, 1), apart, pattern.panel_columns)


def terms(
    candidate: Candidate, stored: ArgumentStorage, operands: Operands, structure: MatrixFacts
) -> dict[str, float]:
    """Return the terms by name, amounts on a logarithmic scale; none for choices of another kind than `Choices`."""
    choices = candidate.choices
    if not isinstance(choices, Choices):
        return {}
    format = candidate.format or CSR()
    loops = _RowLoops(choices, stored, operands, structure, format.column_parts)
    moved = loops.moved()
    features = {**loops.shape(), **loops.reuse(), **_bytes(moved)}
    features |= {"block_columns": float(format.block[1]), "column_parts": float(loops.parts)}
    whole, serial = log2(loops.seconds(moved, loops.threads, choices.chunks)), log2(loops.seconds(moved, 1, 0))
    return features | {"roofline": whole, "serial": serial, PARALLEL: whole - serial}


class _RowLoops:
    """The loops of the row sketch with their extents."""

    def __init__(
        self, choices: Choices, stored: ArgumentStorage, operands: Operands, structure: MatrixFacts, parts: int
    ) -> None:
        self.choices, self.stored, self.operands, self.structure, self.parts = (
            choices,
            stored,
            operands,
            structure,
            parts,
        )
        self.private, self.last = operands.machine.caches
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
        """Return the slowest thread's time over the mean: pieces are whole rows unless rows are split."""
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
        """Return how often each buffer's element is used in each loop, and what lies between two uses."""
        s = self.structure
        return {
            "uses_in_all": log2(1 + s.nnz / s.columns),
            "uses_in_64_rows": 1.0 / max(s.distinct, 1e-3),
            "uses_in_a_block": float(self.stored.rows),
            "uses_of_an_index": log2(self.tiles * self.panels if self.choices.panel else self.tiles),
            "uses_of_a_result": log2(1 + self.per_row),
            "between_private": log2(self.between / self.private),
            "between_last": log2(self.between / self.last),
        }

    # ------------------------------------------------------------------ bytes

    @property
    def gathered(self) -> float:
        """Bytes of all rows that are gathered."""
        return self.stored.values / self.stored.rows * self.width * self.operands.itemsize

    def moved(self) -> tuple[float, float, float]:
        """Return bytes from the core's own caches, from the last cache, and from the memory."""
        o, s = self.operands, self.structure
        first = s.columns * self.width * o.itemsize
        packed = 2.0 * o.gathered if self.choices.panel else 0.0
        lists = self.stored.bytes * float(self.panels)
        # What is written past the caches need not be read before.
        results = o.result * (1.0 if self.choices.stream or o.result < self.last else 2.0)
        streamed = lists + packed + results
        away = outside(o.gathered + self.stored.bytes + o.result, self.last)
        private = self.gathered + self.stored.bytes * float(self.tiles) + results
        last = outside(self.between, self.private) * self.gathered + first + streamed
        memory = outside(self.between, self.last) * self.gathered + away * (first + streamed)
        return private, last, memory + (o.result if self.choices.stream else 0.0)

    # ------------------------------------------------------------------ time

    def seconds(self, moved: tuple[float, float, float], threads: int, chunks: int) -> float:
        """Return the longest of what the loops need of each part of the machine, on some threads and in some pieces."""
        private, last, memory = moved
        rates = self.operands.rates
        spilled = max(1.0, self.vectors * self.stored.rows / REGISTERS)
        compute = 2.0 * self.stored.values * self.width / (rates.peak * self.efficiency) * spilled
        rows = self.structure.rows / self.stored.rows * self.tiles * max(self.stored.pieces / self.parts, 1.0) * ROW
        shared = max(compute, private / rates.private, last / rates.last) + rows
        pieces = chunks * self.stored.pieces * self.panels * CHUNK / threads
        return max(shared / threads * self.balance(threads), memory / (rates.memory * threads**0.5)) + pieces + CHUNK


def _bytes(moved: tuple[float, float, float]) -> dict[str, float]:
    """Return bytes from each level on a logarithmic scale."""
    names = ("bytes_private", "bytes_last", "bytes_memory")
    return {name: log2(1 + amount) for name, amount in zip(names, moved, strict=True)}


def outside(bytes_used: float, cache: float) -> float:
    """Return the share of some bytes, used in turn, that a cache of random replacement does not hold."""
    return max(0.0, 1.0 - cache / bytes_used) if bytes_used > 0 else 0.0


# The same in units of the machine's profile: seconds that each part of the machine takes, relative to those of the
# program as it is. Such ratios mean the same on every machine, where bytes and lengths of tiles do not.


PLAIN = Choices(tile=128, chunks=0)  # what predicted seconds are compared with
OVERHEAD = 4.0  # dependent multiply-adds that beginning a row of a tile takes as long as
EPSILON = 1e-12  # seconds that are nothing


class OnProfile:
    """The predicted seconds of candidates of one workload on the machine's profile."""

    def __init__(self, operands: Operands, structure: MatrixFacts) -> None:
        self.operands, self.structure, self.machine = operands, structure, operands.machine
        self.counts = sorted(self.machine.fma)
        self.flops = [self.machine.fma[count] for count in self.counts]
        self.gather = cache(self.machine.gather_seconds)
        entries = structure.nnz
        stored = ArgumentStorage(entries, entries * (operands.itemsize + INDEX) + INDEX * structure.rows)
        plain = self.seconds(PLAIN, 1, stored)
        self.whole, self.together = sum(plain.values()), _together(plain)
        self.constant = {"machine_entry": log2(self.whole / entries * 1e9), **_of_profile(self.machine)}

    def numbers(self, candidate: Candidate, stored: ArgumentStorage) -> dict[str, float]:
        """Return the seconds of each part of the machine, relative to those of the program as it is.

        They are predicted for one thread: see `PARALLEL` for what threads gain. There are none for choices of another
        kind than `Choices`.
        """
        if not isinstance(candidate.choices, Choices):
            return {}
        parts = candidate.format.column_parts if candidate.format is not None else 1
        own = self.seconds(candidate.choices, parts, stored)
        features = {f"machine_{name}": log2((seconds + EPSILON) / self.whole) for name, seconds in own.items()}
        return {**features, "machine_whole": log2(_together(own) / self.together), **self.constant}

    def seconds(self, choices: Choices, parts: int, stored: ArgumentStorage) -> dict[str, float]:
        """Return the seconds of each part of the machine; a format may store columns in several parts."""
        operands, machine = self.operands, self.machine
        loops = _RowLoops(choices, stored, operands, self.structure, parts)
        entries = stored.values / stored.rows
        if loops.width == 1:
            far = self.gather(LINE, loops.between) / self.gather(LINE, 0)
            gather = entries * far * (machine.vector_gather if choices.lanes else machine.scalar_load)
        else:
            gather = self.gather(loops.strip, loops.between, choices.prefetch) * entries * loops.panels
        sums = max(loops.vectors * stored.rows * (choices.unroll if loops.width > 1 else 1), 1)
        flops = 2.0 * stored.values * loops.width * max(operands.itemsize, 4) / 4
        store = machine.streaming_store if choices.stream else machine.store
        rows = self.structure.rows / stored.rows * loops.tiles * max(stored.pieces / parts, 1.0)
        working_set = stored.bytes + operands.gathered + operands.result
        return {
            "gather": gather,
            "compute": flops / (interpolate(self.counts, self.flops, sums) * max(loops.efficiency, 1e-3)),
            "stream": stored.bytes * loops.panels / 2048 * self.gather(2048, working_set),
            "store": operands.result * (1.0 if choices.stream else loops.panels) / store,
            "pack": 2.0 * operands.gathered / store if choices.panel else 0.0,
            "rows": OVERHEAD * rows * machine.fma_latency,
        }


def _together(seconds: Mapping[str, float]) -> float:
    """Return the seconds of all parts: arithmetic happens while rows are gathered, the rest does not."""
    return max(seconds["gather"], seconds["compute"]) + sum(seconds[n] for n in ("stream", "store", "pack", "rows"))


def _of_profile(machine: MachineProfile) -> dict[str, float]:
    """Return features of a machine: ratios of its rates."""
    return {
        "machine_far": log2(machine.gather_seconds(512, 16 << 20) / machine.gather_seconds(512, 64 << 10)),
        "machine_vector": log2(machine.vector_gather / machine.scalar_load),
        "machine_sums": log2(max(machine.fma.values()) / machine.fma[min(machine.fma)]),
        "machine_flops": log2(max(machine.fma.values()) * machine.gather_seconds(512, 64 << 10) / 128),
    }


# Encoding: from the candidates of one workload to the feature rows of a cost model.


# 0 where sizes are left open, as in the untuned kernel.
SPECIALISED = "specialised"


@dataclass(frozen=True, eq=False)
class WorkloadEncoding:
    """The features that all candidates of a workload share.

    Parameters
    ----------
    facts : mapping of str to float
        Numbers of the pattern.
    described : Pattern or None
    own : ArgumentStorage
        How the sparse argument is stored as it came.
    operands : Operands
    knobs : callable, optional
        The values of a template's knobs for a format, where one is searched. Columns are added then as candidates have
        knobs that those before had not.
    """

    facts: Mapping[str, float]
    described: Pattern | None
    own: ArgumentStorage
    operands: Operands
    knobs: Callable[[Format | None], Mapping[str, tuple[Any, ...]] | None] | None = None
    _columns: list[str] = field(default_factory=list, init=False, repr=False)
    _work: dict[ArgumentStorage, dict[str, float]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def estimates(self) -> Estimates:
        return Estimates(self.described, self.own, self.operands.itemsize)

    @cached_property
    def structure(self) -> MatrixFacts:
        return MatrixFacts.of(self.described)

    @cached_property
    def _on_profile(self) -> OnProfile:
        return OnProfile(self.operands, self.structure)

    @cached_property
    def _facts(self) -> np.ndarray:
        """The facts in the order of `fact_names`; NaN for unknown ones, such as the row lengths of a tensor."""
        return np.array([self.facts.get(name, np.nan) for name in fact_names()], np.float32)

    def of(self, candidate: Candidate, *, specialised: bool = True) -> dict[str, float]:
        """Return the numbers that depend on the candidate, by name."""
        stored = self.estimates(candidate.format)
        nnz = self.structure.nnz
        values = self.knobs(candidate.format) if self.knobs is not None else None
        features = of_candidate(candidate, stored, self.operands, nnz, values)
        features |= terms(candidate, stored, self.operands, self.structure)
        features |= {SPECIALISED: float(specialised)}
        if stored not in self._work:
            self._work[stored] = of_work(stored, self.operands, nnz)
        features |= self._work[stored] | self._on_profile.numbers(candidate, stored)
        # Last: a model reads as many numbers as it was trained on.
        return features | of_other_choices(candidate.choices)

    def named(self, candidate: Candidate, *, specialised: bool = True) -> dict[str, float]:
        """Return all numbers by name, rounded to what is worth writing down."""
        features = {**self.facts, **self.of(candidate, specialised=specialised)}
        return {name: float(f"{value:.5g}") for name, value in features.items()}

    def rows(self, candidates: Sequence[Candidate], *, specialised: bool = True) -> np.ndarray:
        """Return all numbers, a row for each candidate; not a number where one lacks a knob of another."""
        if self.knobs is not None:
            return self._rows_of_knobs(candidates, specialised)
        numbers = np.array([list(self.of(c, specialised=specialised).values()) for c in candidates], np.float32)
        return np.concatenate([np.broadcast_to(self._facts, (len(numbers), len(self._facts))), numbers], axis=1)

    def _rows_of_knobs(self, candidates: Sequence[Candidate], specialised: bool) -> np.ndarray:
        """Return the rows by name, as candidates of different formats may have different knobs."""
        features_of = [{**self.facts, **self.of(candidate, specialised=specialised)} for candidate in candidates]
        for numbers in features_of:
            self._columns.extend(name for name in numbers if name not in self._columns)
        return np.array([[numbers.get(name, np.nan) for name in self._columns] for numbers in features_of], np.float32)

    @property
    def names(self) -> list[str]:
        """Names of the columns of `rows` that exist so far."""
        return [*fact_names(), *self.of(Candidate())] if self.knobs is None else list(self._columns)


@cache
def fact_names() -> tuple[str, ...]:
    """Return the names of the numbers of a matrix, in order."""
    small = sp.csr_array(np.eye(2, dtype=np.float32))
    return tuple(of_pattern(pattern(small)) | density(small.indptr, small.indices, 2))


@cache
def matrix_names() -> tuple[str, ...]:
    """Return the names of what a model sees, in order."""
    return tuple(WorkloadEncoding({}, None, ArgumentStorage(2, 28), Operands(1, 8, 8, 4, 1)).names)


@cache
def pattern_names() -> frozenset[str]:
    """Return the names of `matrix_names` that say something about the matrix and nothing about the candidate."""
    small = WorkloadEncoding({}, None, ArgumentStorage(1, 1), Operands(1, 1, 1, 1, 1))
    return frozenset(matrix_names()) - frozenset(small.of(Candidate()))


@cache
def choice_names() -> frozenset[str]:
    """Return the names of `matrix_names` that say what was chosen for how many columns, whatever the matrix."""
    kinds = {f"is_{kind or 'own'}" for kind in KINDS}
    choices = {*CHOICES, *of_other_choices(Choices())}
    return frozenset(matrix_names()) & {*kinds, *choices, "feat", "width", "threads", SPECIALISED}


__all__ = [
    "PARALLEL",
    "SPECIALISED",
    "THREADED",
    "ArgumentStorage",
    "Estimates",
    "MatrixFacts",
    "Operands",
    "WorkloadEncoding",
    "choice_names",
    "density",
    "fact_names",
    "main_buffer",
    "matrix_names",
    "of_candidate",
    "of_knobs",
    "of_other_choices",
    "of_pattern",
    "of_work",
    "outside",
    "pattern_names",
    "terms",
]
