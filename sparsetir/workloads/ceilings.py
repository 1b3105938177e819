# SPDX-License-Identifier: Apache-2.0
"""What the machine could do at best, measured: the rates below which programs stay.

They are measured with kernels of a few lines that TVM compiles for this machine, with the same thread pool as all
others: the fastest of many calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, reduce
from typing import Any

import numpy as np

from sparsetir.utils.arguments import as_count, as_seconds
from sparsetir.utils.machine import CacheLevel, levels
from sparsetir.utils.threads import get_num_threads
from sparsetir.workloads.inputs import free_memory

DRAM = "DRAM"
FLOAT = 4
# Independent sums cover the latency of an addition; with the two factors they fit into 16 registers.
SUMS = 12
# Registers of 128, 256 and 512 bits; which ones the machine has is found by measuring.
LANES = (4, 8, 16)
SECONDS, CALL = 0.1, 0.001
CALLS, ROUNDS = 3, 3
# Of a level's capacity: well inside it, and well outside the level before.
FILLED, TIMES_LAST, LEAST_DRAM = 0.5, 4, 64 << 20

PEAK = """
@T.prim_func(s_tir=True)
def peak(data: T.handle, sums: T.handle, threads: T.int32, repeats: T.int32):
    T.func_attr({{"tirx.noalias": True}})
    a = T.match_buffer(data, (2 * {lanes},), "float32", align=4)
    out = T.match_buffer(sums, (threads * {sums} * {lanes},), "float32", align=4)
    for t in T.parallel(threads):
        acc = T.alloc_buffer(({sums} * {lanes},), "float32", scope="local")
        for u in T.unroll({sums}):
            for v in T.vectorized({lanes}):
                acc[u * {lanes} + v] = a[v]
        for r in range(repeats):
            for u in T.unroll({sums}):
                for v in T.vectorized({lanes}):
                    acc[u * {lanes} + v] = acc[u * {lanes} + v] * a[v] + a[{lanes} + v]
        for u in T.unroll({sums}):
            for v in T.vectorized({lanes}):
                out[(t * {sums} + u) * {lanes} + v] = acc[u * {lanes} + v]
"""
READ = """
@T.prim_func(s_tir=True)
def read(data: T.handle, sums: T.handle, threads: T.int32, repeats: T.int32, steps: T.int32):
    T.func_attr({{"tirx.noalias": True}})
    a = T.match_buffer(data, (threads * steps * {sums} * {lanes},), "float32", align=4)
    out = T.match_buffer(sums, (threads * {sums} * {lanes},), "float32", align=4)
    for t in T.parallel(threads):
        acc = T.alloc_buffer(({sums} * {lanes},), "float32", scope="local")
        for u in T.unroll({sums}):
            for v in T.vectorized({lanes}):
                acc[u * {lanes} + v] = T.float32(0)
        for r in range(repeats):
            for s in range(steps):
                for u in T.unroll({sums}):
                    for v in T.vectorized({lanes}):
                        acc[u * {lanes} + v] = acc[u * {lanes} + v] + a[((t * steps + s) * {sums} + u) * {lanes} + v]
        for u in T.unroll({sums}):
            for v in T.vectorized({lanes}):
                out[(t * {sums} + u) * {lanes} + v] = acc[u * {lanes} + v]
"""


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a number of threads.

    Parameters
    ----------
    threads : int
    peak : float
        Floating-point operations per second, float32; a fused multiply-add is two.
    bandwidth : dict of str to float
        Bytes read per second, by level: the caches' names and ``"DRAM"``.
    """

    threads: int
    peak: float
    bandwidth: dict[str, float]


@dataclass(frozen=True)
class Roofline:
    """A machine's ceilings.

    Parameters
    ----------
    levels : tuple of CacheLevel
        Its caches, the smallest first.
    ceilings : dict of int to Ceilings
        For one thread and for all.
    """

    levels: tuple[CacheLevel, ...]
    ceilings: dict[int, Ceilings]

    @property
    def most(self) -> Ceilings:
        """Those of all threads."""
        return self.ceilings[max(self.ceilings)]

    @property
    def scaling(self) -> float:
        """The peak of all threads over that of one, for each thread; 1 where every thread has a core to itself."""
        return self.most.peak / (self.most.threads * self.ceilings[min(self.ceilings)].peak)

    def table(self) -> list[list[str]]:
        """Cells, a heading first."""
        sizes = {level.name: f"{level.size >> 10:,} KiB" for level in self.levels}
        heading = ["", "GFLOP/s", *(f"{name} GB/s" for name in self.most.bandwidth)]
        rows = [
            [f"{c.threads} thread{'s' * (c.threads > 1)}", f"{c.peak / 1e9:.1f}"]
            + [f"{rate / 1e9:.1f}" for rate in c.bandwidth.values()]
            for c in self.ceilings.values()
        ]
        return [heading, *rows, ["size", "", *(sizes.get(name, "") for name in self.most.bandwidth)]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ceilings = [asdict(ceiling) for ceiling in self.ceilings.values()]
        return {"levels": [asdict(level) for level in self.levels], "ceilings": ceilings}


@cache
def compiled(source: str, lanes: int, target: Any = None) -> Callable[..., None]:
    """Compile one of the two kernels, for a width of registers and a target; None is this machine."""
    import tvm

    from sparsetir.codegen.target import native_target

    get_num_threads()  # sets up TVM's thread pool before the first parallel loop starts it
    func = tvm.script.from_source(source.format(sums=SUMS, lanes=lanes))
    name = str(func.attrs["global_symbol"])
    module = tvm.compile(tvm.IRModule({name: func}), target=target or native_target(), tir_pipeline="s_tir")
    kernel: Callable[..., None] = module[name]
    return kernel


def best_rate(call: Callable[[int], None], *, seconds: float) -> float:
    """Repetitions per second in the fastest call; a call repeats until it lasts for `CALL`."""
    rate, repeats, calls, end = 0.0, 1, 0, time.perf_counter() + seconds
    while calls < CALLS or time.perf_counter() < end:
        duration = elapsed(call, repeats)
        rate = max(rate, repeats / duration)
        # A call that other work held up must not end the growth: any later one that is short continues it.
        repeats, calls = (2 * repeats, calls) if duration < CALL else (repeats, calls + 1)
    return rate


def elapsed(call: Callable[[int], None], repeats: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call(repeats)
    return time.perf_counter() - start


def measure_peak(threads: int, lanes: int, *, seconds: float = SECONDS, target: Any = None) -> float:
    """Measure the floating-point operations per second of fused multiply-adds on registers."""
    factors = np.full(2 * lanes, 0.5, np.float32)
    sums = np.empty(threads * SUMS * lanes, np.float32)
    kernel = compiled(PEAK, lanes, target)
    return 2 * sums.size * best_rate(lambda repeats: kernel(factors, sums, threads, repeats), seconds=seconds)


def measure_bandwidth(size: int, threads: int, lanes: int, *, seconds: float = SECONDS, target: Any = None) -> float:
    """Measure the bytes per second when each thread reads `size` bytes of its own again and again."""
    steps = max(1, size // (FLOAT * SUMS * lanes))
    data = np.ones(threads * steps * SUMS * lanes, np.float32)
    sums = np.empty(threads * SUMS * lanes, np.float32)
    kernel = compiled(READ, lanes, target)
    return data.nbytes * best_rate(lambda repeats: kernel(data, sums, threads, repeats, steps), seconds=seconds)


def register_lanes(target: Any = None) -> int:
    """Return the number of float32 lanes with which one thread computes fastest."""
    return max(LANES, key=lambda lanes: measure_peak(1, lanes, seconds=SECONDS / 5, target=target))


def share(level: CacheLevel, threads: int) -> int:
    """Bytes of a level that each thread reads: half of what it has for itself."""
    return int(FILLED * level.size / min(threads, level.cores))


def measure_ceilings(
    threads: int, lanes: int, caches: Sequence[CacheLevel], *, seconds: float = SECONDS, target: Any = None
) -> Ceilings:
    """Measure what `threads` threads reach together, of code for a target; None is this machine."""
    settings: dict[str, Any] = {"seconds": seconds, "target": target}
    sizes = {level.name: share(level, threads) for level in caches}
    last = max((level.capacity(threads) for level in caches), default=0)
    sizes[DRAM] = int(min(max(LEAST_DRAM, TIMES_LAST * last), free_memory() / 4)) // threads
    rates = {name: measure_bandwidth(size, threads, lanes, **settings) for name, size in sizes.items()}
    return Ceilings(threads, measure_peak(threads, lanes, **settings), rates)


def higher(first: Ceilings, second: Ceilings) -> Ceilings:
    """Return the higher of each rate."""
    rates = {name: max(rate, second.bandwidth[name]) for name, rate in first.bandwidth.items()}
    return Ceilings(first.threads, max(first.peak, second.peak), rates)


def measure_roofline(*, seconds: float = SECONDS, rounds: int = ROUNDS) -> Roofline:
    """Measure the peak and the bandwidth of every level of the memory, for one thread and for all.

    Parameters
    ----------
    seconds : float
        For each of the rates in each round.
    rounds : int
        How often each is measured; the highest counts, as other work on the machine only makes them lower.

    Returns
    -------
    Roofline
        For as many threads as kernels use, `sparsetir.get_num_threads`.

    Examples
    --------
    >>> found = measure_roofline(seconds=0.01, rounds=1)
    >>> found.most.peak > 0 and "DRAM" in found.most.bandwidth
    True
    """
    seconds, rounds = as_seconds(seconds, "seconds", positive=True), as_count(rounds, "rounds")
    lanes, caches = register_lanes(), levels()
    counts = sorted({1, get_num_threads()})
    measurements = [
        [measure_ceilings(count, lanes, caches, seconds=seconds) for count in counts] for _ in range(rounds)
    ]
    best = [reduce(higher, of) for of in zip(*measurements, strict=True)]
    # All threads reach what one does: the others may rest.
    return Roofline(caches, {of.threads: higher(of, best[0]) for of in best})


__all__ = [
    "DRAM",
    "FLOAT",
    "Ceilings",
    "Roofline",
    "higher",
    "measure_ceilings",
    "measure_roofline",
    "register_lanes",
]
