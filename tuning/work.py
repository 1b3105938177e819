# SPDX-License-Identifier: Apache-2.0
"""Work of a program on data: loads, stores, arithmetic, reuse, bytes, times on a machine's rates."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, reduce
from math import log2, prod
from typing import Any

import tvm
import tvm_ffi
from tvm import DataType, tirx
from tvm.ir import Expr, Var

from sparsetir.codegen import cache as disk_cache
from sparsetir.codegen.target import native_target
from sparsetir.ir import sizes as symbolic
from sparsetir.ir.views import Program, SparseBuffer, SpIter, accesses
from sparsetir.utils.files import cache_text
from sparsetir.utils.machine import last_cache, levels, machine_name, private_cache
from sparsetir.utils.packages import __version__
from sparsetir.workloads.ceilings import DRAM, higher, measure_ceilings, register_lanes

# Machine rates of the cost model: amounts become times on them, so that machines are comparable.


SECONDS, ROUNDS = 0.02, 3  # for each of the rates in a round


@dataclass(frozen=True)
class CoreRates:
    """Rates of a core, per second; by default those of a usual server core.

    Parameters
    ----------
    peak : float
        Floating-point operations on float32, in full vectors.
    private, last, memory : float
        Bytes from the core's own caches, the last cache, and the memory.
    """

    peak: float = 100e9
    private: float = 200e9
    last: float = 60e9
    memory: float = 25e9

    def of(self, size: float, caches: tuple[int, int]) -> float:
        """Return bytes a second of what is so large and used again and again, with a private and a last cache."""
        private, last = caches
        return self.private if size <= private else self.last if size <= last else self.memory

    def as_dict(self) -> dict[str, float]:
        """Return plain values for JSON."""
        return {name: float(f"{rate:.4g}") for name, rate in asdict(self).items()}


USUAL = CoreRates()


def measure_rates(target: Any = None) -> CoreRates:
    """Measure what a core of this machine does, of code for a target; None is this machine.

    The highest of some rounds counts, as other work only makes rates lower.
    """
    target = None if target is None else tvm.target.Target(target)
    lanes, caches = register_lanes(target), levels()
    ceilings = [measure_ceilings(1, lanes, caches, seconds=SECONDS, target=target) for _ in range(ROUNDS)]
    best = reduce(higher, ceilings)
    own = next((level.name for level in caches if level.size == private_cache()), None)
    last = next((level.name for level in caches if level.size == last_cache()), None)
    private, shared = (best.bandwidth.get(name or "") for name in (own, last))
    return CoreRates(best.peak, private or USUAL.private, shared or USUAL.last, best.bandwidth[DRAM])


@cache
def measured_rates() -> CoreRates:
    """Return `measure_rates` of this machine; measured once, for all processes that keep compiled kernels."""
    folder = disk_cache.cache_folder()
    about = f"{machine_name()} {native_target()} {__version__}"
    path = None if folder is None else folder / f"rates-{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        if path is not None:
            return CoreRates(**json.loads(path.read_text()))
    rates = measure_rates()
    if path is not None:
        cache_text(path, json.dumps(rates.as_dict()))
    return rates


# Work of a program on data: loads, stores, arithmetic, reuse and bytes, for any operation.
#
# Every access of an iteration is counted as often as the deepest loop that its subscripts depend on runs. It is one of
#
# * a stream: an element of a sparse buffer, in the order in which they are stored,
# * a gather: a dense buffer at a coordinate that was read from an index array,
# * a row: a dense buffer at the coordinates of dense loops only.


STREAM, GATHER, ROW = "stream", "gather", "row"
INDEX = 4  # bytes of a coordinate
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)


@dataclass(frozen=True)
class IterationAccess:
    """One access of an iteration.

    Parameters
    ----------
    kind : str
        ``"stream"``, ``"gather"`` or ``"row"``.
    points : float
        How often it runs.
    elements : float
        Of the buffer.
    itemsize : int
    run : float
        Elements that lie side by side and are used in turn.
    is_store : bool
    """

    kind: str
    points: float
    elements: float
    itemsize: int
    run: float
    is_store: bool

    @property
    def moved(self) -> float:
        """Bytes that are used, counting repetitions."""
        return self.points * self.itemsize

    @property
    def held(self) -> float:
        """Bytes of the buffer."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Work:
    """Work of a program on data of certain sizes.

    Parameters
    ----------
    accesses : tuple of IterationAccess
    flops, points, entries : float
        Operations, steps of the innermost loops, and of the sparse ones.
    indices : float
        Bytes of the index arrays.
    inner : float
        Steps of an innermost loop.
    sums : bool
        Whether the innermost loop sums.
    is_sparse : bool
        Whether results are stored at the entries.
    """

    accesses: tuple[IterationAccess, ...] = ()
    flops: float = 1.0
    points: float = 1.0
    entries: float = 1.0
    indices: float = 0.0
    inner: float = 1.0
    sums: bool = False
    is_sparse: bool = False

    @classmethod
    def of(cls, program: Program, sizes: Mapping[str, int]) -> Work:
        """Return the work of a decoded program.

        Parameters
        ----------
        program : Program
        sizes : mapping of str to int
            The value of every size symbol.
        """
        values = {str(name): int(value) for name, value in sizes.items()}
        parts = [_of_iteration(program, iteration, values) for iteration in program.iterations]
        if not parts:
            return cls()
        main = max(parts, key=lambda part: part.points)
        arrays = {a.indices: a for it in program.iterations for a in it.axes if a.indices is not None}
        indices = INDEX * sum(2.0 * _value(axis.count, values) for axis in arrays.values())
        every = tuple(access for part in parts for access in part.accesses)
        flops, points = sum(part.flops for part in parts), sum(part.points for part in parts)
        return cls(every, flops, points, main.entries, indices, main.inner, main.sums, main.is_sparse)

    def of_kind(self, kind: str) -> list[IterationAccess]:
        """Return the loads of a kind."""
        return [a for a in self.accesses if a.kind == kind and not a.is_store]

    @property
    def gathered(self) -> IterationAccess | None:
        """The gather that moves most."""
        return max(self.of_kind(GATHER), key=lambda a: a.moved, default=None)

    @property
    def results(self) -> list[IterationAccess]:
        """The stores."""
        return [a for a in self.accesses if a.is_store]

    @property
    def width(self) -> int:
        """Elements side by side that each entry uses."""
        return int(self.gathered.run if self.gathered is not None else self.inner)

    @property
    def itemsize(self) -> int:
        """Bytes of a result's element."""
        return max((a.itemsize for a in self.results), default=4)

    def numbers(self, rates: CoreRates, padding: float, caches: tuple[int, int] | None = None) -> dict[str, float]:
        """Return its features for a model, amounts on a logarithmic scale; the argument is stored with some padding.

        Parameters
        ----------
        rates : CoreRates
        padding : float
            Stored values for each entry.
        caches : (int, int), optional
            Bytes of the private and of the last cache; by default those of this machine.
        """
        caches = caches or (private_cache(), last_cache())
        entries = max(self.entries, 1.0)
        loads = [a for a in self.accesses if not a.is_store]
        gathers, rows = self.of_kind(GATHER), self.of_kind(ROW)
        gathered, footprint = sum(a.moved for a in gathers), sum(a.held for a in gathers)
        near, reuse = sum(a.moved for a in rows), self.gathered
        results = sum(a.held for a in self.results)
        features = {
            "work_flops": log2(1 + self.flops / entries),
            "work_loads": log2(1 + sum(a.points for a in loads) / entries),
            "work_stores": log2(1 + sum(a.points for a in self.results) / entries),
            "work_gathers": float(len(gathers)),
            "work_rows": float(len(rows)),
            "work_streams": float(len(self.of_kind(STREAM))),
            "work_gathered": log2(1 + gathered / entries),
            "work_near": log2(1 + near / entries),
            "work_run": log2(1 + self.width),
            "work_inner": log2(1 + self.inner),
            "work_sums": float(self.sums),
            "work_is_sparse": float(self.is_sparse),
            "work_itemsize": float(min((a.itemsize for a in loads), default=4)),
            "work_reuse_gathered": log2(1 + reuse.points / max(reuse.elements, 1.0)) if reuse is not None else 0.0,
            "work_reuse_results": log2(
                1 + sum(a.points for a in self.results) / max(sum(a.elements for a in self.results), 1.0)
            ),
            "work_held_private": log2(1 + footprint / caches[0]),
            "work_held_last": log2(1 + (footprint + results + self.streamed) / caches[1]),
            "work_intensity": log2(1 + self.flops / max(self.streamed + footprint + results, 1.0)),
        }
        return features | self._times(rates, caches, padding, gathered, footprint, results)

    @property
    def streamed(self) -> float:
        """Bytes of the sparse buffers and index arrays."""
        return sum(a.held for a in self.of_kind(STREAM)) + self.indices

    def _times(
        self,
        rates: CoreRates,
        caches: tuple[int, int],
        padding: float,
        gathered: float,
        footprint: float,
        results: float,
    ) -> dict[str, float]:
        """Return seconds that the parts take at least on this machine, of the whole and relative to the longest."""
        times = {
            "compute": padding * self.flops * (self.itemsize / 4) / rates.peak,
            "gather": padding * gathered / rates.of(footprint, caches),
            "stream": (padding * self.streamed + footprint + results)
            / rates.of(self.streamed + footprint + results, caches),
        }
        longest = max(*times.values(), 1e-9)
        shares = {f"time_{name}": log2(max(seconds / longest, 2.0**-10)) for name, seconds in times.items()}
        return {"time_floor": log2(longest), **shares}


def _of_iteration(program: Program, iteration: SpIter, sizes: Mapping[str, int]) -> Work:
    """Return the work of one iteration."""
    steps, place, points, entries = [1.0], {}, 1.0, 1.0
    for n, (var, axis) in enumerate(zip(iteration.vars, iteration.axes, strict=True)):
        above = _value(axis.parent.count, sizes) if axis.parent is not None else 1.0
        points *= _value(axis.count, sizes) / max(above, 1.0)
        steps.append(points)
        place[var] = n
        entries = points if axis.indices is not None else entries
    gathered = {v for v, a in zip(iteration.vars, iteration.axes, strict=True) if a.indices is not None}
    body = iteration.block.body
    accesses = tuple(_accesses(program, body, sizes, steps, place, gathered))
    last = steps[-1] / max(steps[-2], 1.0) if len(steps) > 1 else 1.0
    is_sparse = any(a.is_store and a.kind == STREAM for a in accesses)
    return Work(
        accesses, points * _operations(body), points, entries, 0.0, last, iteration.kinds[-1:] == "R", is_sparse
    )


def _accesses(
    program: Program,
    body: Any,
    sizes: Mapping[str, int],
    steps: list[float],
    place: Mapping[Var, int],
    gathered: set[Var],
) -> Iterator[IterationAccess]:
    seen = set()
    for view, subscripts, is_store in accesses(body):
        buffer = program.buffers.get(view)
        key = (view, str(subscripts), is_store)
        if not isinstance(buffer, SparseBuffer) or key in seen:
            continue
        seen.add(key)
        used = [v for subscript in subscripts for v in _variables(subscript) if v in place]
        deepest = max((place[v] for v in used), default=-1)
        kind = STREAM if not buffer.is_dense else GATHER if gathered.intersection(used) else ROW
        ends_dense = bool(used) and place[used[-1]] == len(place) - 1 and used[-1] not in gathered
        run = steps[deepest + 1] / max(steps[deepest], 1.0) if ends_dense else 1.0
        elements = prod(_value(extent, sizes) for extent in buffer.storage_shape)
        itemsize = max(1, int(DataType(buffer.dtype).bits) // 8)
        yield IterationAccess(kind, steps[deepest + 1], elements, itemsize, max(run, 1.0), is_store)


def _variables(expr: Expr) -> list[Var]:
    variables: list[Var] = []
    tvm_ffi.structural_walk(expr, (Var, variables.append))
    return variables


def _operations(body: Any) -> int:
    """Return arithmetic operations of a step."""
    count = 0

    def on_node(_node: Any) -> None:
        nonlocal count
        count += 1

    tvm_ffi.structural_walk(body, [(kind, on_node) for kind in ARITHMETIC])
    return count


def _value(expr: Expr, sizes: Mapping[str, int]) -> float:
    """Return a size; that of an unknown symbol is 1."""
    values = {name: sizes.get(name, 1) for name in symbolic.symbols(expr)}
    return float(symbolic.evaluator([expr])(values)[0])


__all__ = ["USUAL", "CoreRates", "IterationAccess", "Work", "measure_rates", "measured_rates"]
