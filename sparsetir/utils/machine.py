# SPDX-License-Identifier: Apache-2.0
"""Properties of the machine: processor, cores, caches, and the rates of one core."""

from __future__ import annotations

import json
import math
import os
import platform
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from sparsetir.errors import ArgumentError

# Counted before TVM's thread pool can pin this process to one of them.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

CPUS = Path("/sys/devices/system/cpu")
L2_BYTES, LAST_BYTES = 1 << 20, 32 << 20  # where the system does not tell
LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class CacheLevel:
    """A data cache.

    Parameters
    ----------
    name : str
        ``"L1"``, ``"L2"``, ...
    size : int
        Bytes of one of its kind.
    cores : int
        How many share it.
    """

    name: str
    size: int
    cores: int = 1

    def capacity(self, threads: int) -> int:
        """Bytes that `threads` threads have together."""
        return self.size * -(-threads // self.cores)


@cache
def levels() -> tuple[CacheLevel, ...]:
    """Return the data caches of the first core, where the system tells, the smallest first."""
    caches = []
    for folder in sorted((CPUS / "cpu0" / "cache").glob("index*")):
        level, kind, size, shared = (
            (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        if kind != "Instruction" and size.endswith("K"):
            caches.append(CacheLevel(f"L{level}", int(size[:-1]) << 10, count_cpus(shared)))
    return tuple(sorted(caches, key=lambda level: level.size))


def count_cpus(text: str) -> int:
    """Return how many processors a list such as ``0-3,8`` names."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return max(1, sum(int(last or first) - int(first) + 1 for first, _, last in ends))


@cache
def private_cache() -> int:
    """Bytes of the largest cache that a core has for itself, the second-level one as a rule."""
    private = [level.size for level in levels() if level.cores == 1 and level.name in ("L1", "L2")]
    return max(private, default=L2_BYTES)


@cache
def last_cache() -> int:
    """Bytes of the largest cache, shared or not."""
    return max((level.size for level in levels()), default=LAST_BYTES)


@cache
def machine_name() -> str:
    """Return the processor, its number of cores and the operating system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        about = dict(line.split(":", 1) for line in lines if ":" in line)
        values = {key.strip(): value.strip() for key, value in about.items()}
        numbers = "/".join(values[n] for n in ("cpu family", "model", "stepping") if n in values)
        model = " ".join(part for part in (values.get("model name", model), numbers) if part)
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


# ------------------------------------------------------------------------------------- rates of a core


FORMAT = 1
DATA = Path(__file__).parent / "profiles"
KNEE = 1.25  # times the cost of a plateau from which on a working set is beyond a level
ROW_ENTRIES = 16  # of the rows of the loop by which gathers are measured
GENERIC = "generic"


@dataclass(frozen=True)
class EffectiveLevel:
    """A level of the memory as a core experiences it.

    Parameters
    ----------
    size : int
        Bytes of the largest measured working set that is served at this rate; 0 for the memory.
    rate : float
        Bytes of gathered rows a second.
    """

    size: int
    rate: float


@dataclass(frozen=True)
class MachineProfile:
    """Measured rates of a core of a machine.

    Parameters
    ----------
    name : str
        The machine, or the family of processors.
    origin : str
        ``"measured"``, or how the rates were derived.
    row_bytes, working_sets, prefetch : tuple of int
        The measured rows in bytes, bytes of the gathered operands, and prefetch distances in entries.
    gather : tuple
        Seconds an entry, by row, working set and prefetch distance.
    store, streaming_store : float
        Bytes written a second to an array beyond every cache, with ordinary and with non-temporal stores.
    fma : dict of int to float
        Floating-point operations on float32 a second, by the number of independent accumulators.
    fma_latency : float
        Seconds of a multiply-add that waits for the one before.
    scalar_load, vector_gather : float
        Seconds an entry of a sum over gathered numbers, loaded one by one and by vector gathers.
    wake : float
        Seconds that a parallel loop over all threads takes longer than the same loop on one.
    dots : dict of str to float
        Operations a second of ``"bfloat16"`` and ``"int8"`` dot products, where the processor has them.
    noise : float
        Median relative distance between two measurements of a rate.
    private, last : int
        Bytes of the largest cache that a core has for itself, and of the largest one; 0 for those of this machine.
    read : tuple of float
        Seconds a byte of an array that is read in order, by its size among `working_sets`; empty if not measured.

    Examples
    --------
    >>> from sparsetir.utils.machine import shipped_profile
    >>> zen = shipped_profile("znver4")
    >>> zen.gather_seconds(512, 1 << 24) > zen.gather_seconds(512, 1 << 16)
    True
    """

    name: str
    origin: str
    row_bytes: tuple[int, ...]
    working_sets: tuple[int, ...]
    prefetch: tuple[int, ...]
    gather: tuple[tuple[tuple[float, ...], ...], ...]
    store: float = 10e9
    streaming_store: float = 12e9
    fma: Mapping[int, float] = field(default_factory=lambda: {1: 12e9, 4: 48e9, 12: 100e9})
    fma_latency: float = 1.3e-9
    scalar_load: float = 1e-9
    vector_gather: float = 1e-9
    wake: float = 5e-6
    dots: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    private: int = 0
    last: int = 0
    read: tuple[float, ...] = ()

    @property
    def caches(self) -> tuple[int, int]:
        """Bytes of the largest private cache and of the largest one of all."""
        return self.private or private_cache(), self.last or last_cache()

    def gather_seconds(self, row_bytes: float, working_set: float, prefetch: int = 0) -> float:
        """Return the seconds to gather a row, interpolated between the measured ones.

        Parameters
        ----------
        row_bytes : float
            Bytes of the row. Shorter rows than the measured ones take as long as the shortest.
        working_set : float
            Bytes among which the rows lie.
        prefetch : int
            Distance in entries; the nearest measured one counts.
        """
        column = min(range(len(self.prefetch)), key=lambda n: abs(self.prefetch[n] - prefetch))
        last = len(self.row_bytes) - 1
        right = min(max(bisect_right(self.row_bytes, row_bytes), 1), last) if last else 0
        low = max(right - 1, 0)
        costs = [
            interpolate(self.working_sets, [at[column] for at in curve], working_set)
            for curve in self.gather[low : right + 1]
        ]
        if row_bytes > self.row_bytes[-1]:
            return costs[-1] * row_bytes / self.row_bytes[-1]
        return interpolate(self.row_bytes[low : right + 1], costs, row_bytes)

    def read_seconds(self, nbytes: float, working_set: float) -> float:
        """Return the seconds to read bytes in order, of arrays of `working_set` bytes that are read again and again."""
        if self.read:
            return nbytes * interpolate(self.working_sets, self.read, working_set)
        row = self.row_bytes[-1]
        return nbytes / row * self.gather_seconds(row, working_set)

    @property
    def levels(self) -> tuple[EffectiveLevel, ...]:
        """The levels that the curve of 512-byte rows without prefetch shows, the fastest first; the memory last."""
        costs = [self.gather_seconds(512, size) for size in self.working_sets]
        ends = find_knees(costs)
        return tuple(
            EffectiveLevel(self.working_sets[end] if end < len(costs) - 1 else 0, 512 / costs[end]) for end in ends
        )

    def scaled(self, name: str, origin: str, sizes: Mapping[int, int], speed: float = 1.0) -> MachineProfile:
        """Return the profile of a relative with other cache sizes.

        Parameters
        ----------
        name, origin : str
        sizes : mapping of int to int
            Bytes of this machine's caches to those of the other's.
        speed : float
            The other's rate of arithmetic and cache accesses, relative to this one's.
        """
        ours, theirs = zip(*sorted(sizes.items()), strict=True)
        moved = tuple(_moved(ours, theirs, at) for at in self.working_sets)
        gather = tuple(tuple(tuple(s / speed for s in at) for at in curve) for curve in self.gather)
        fma = {count: rate * speed for count, rate in self.fma.items()}
        private, last = (sizes.get(size, size) for size in (self.private, self.last))
        read = tuple(seconds / speed for seconds in self.read)
        moved_ones = replace(self, working_sets=moved, private=private, last=last, read=read)
        return replace(moved_ones, name=name, origin=origin, gather=gather, fma=fma)

    def report(self) -> str:
        """Return the profile as text: gathered rows by working set, levels, arithmetic and the noise."""
        lines = [
            f"{self.name}: {self.origin}",
            "",
            "GB/s of gathered rows, without prefetch and with the best distance",
        ]
        heads = "".join(f"{size:>9} B" for size in self.row_bytes) + ("   in order" if self.read else "")
        lines.append(f"working set {heads}")
        for number, size in enumerate(self.working_sets):
            rates = [
                [row / seconds / 1e9 for seconds in self.gather[n][number]] for n, row in enumerate(self.row_bytes)
            ]
            cells = "".join(f"{f'{rate[0]:.0f}/{max(rate):.0f}':>11}" for rate in rates)
            in_order = f"{1e-9 / self.read[number]:>11.0f}" if self.read else ""
            lines.append(f"{size >> 10:>8,} KiB{cells}{in_order}")
        levels = ", ".join(
            f"{f'{level.size >> 10:,} KiB' if level.size else 'memory'} {level.rate / 1e9:.0f}" for level in self.levels
        )
        fma = ", ".join(f"{count}: {rate / 1e9:.0f}" for count, rate in self.fma.items())
        dots = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in self.dots.items()) or "none"
        return "\n".join(
            [
                *lines,
                "",
                f"effective levels, GB/s: {levels}",
                f"GFLOP/s by accumulators: {fma}; latency {self.fma_latency * 1e9:.2f} ns",
                f"dot products, Gop/s: {dots}",
                f"stores, GB/s: {self.store / 1e9:.0f}, non-temporal {self.streaming_store / 1e9:.0f}",
                f"gathered number, ns: {self.scalar_load * 1e9:.2f} loads, {self.vector_gather * 1e9:.2f} gathers",
                f"waking a thread: {self.wake * 1e6:.1f} us",
                f"noise: {100 * self.noise:.1f} % between the two fastest rounds (0 where there was one)",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, rates to four digits."""
        return {"format": FORMAT, **_rounded(asdict(self))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MachineProfile:
        """Return the profile that `as_dict` describes.

        Raises
        ------
        ArgumentError
            The values are not those of a profile of this format.
        """
        try:
            return cls._from_dict(dict(values))
        except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise ArgumentError(f"profile: expected a machine profile of format {FORMAT}, got {error}") from error

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> MachineProfile:
        if values.pop("format", None) != FORMAT:
            raise ValueError("another format")
        for name in ("row_bytes", "working_sets", "prefetch"):
            values[name] = tuple(int(value) for value in values[name])
        values["gather"] = tuple(tuple(tuple(map(float, at)) for at in curve) for curve in values["gather"])
        values["read"] = tuple(map(float, values.get("read", ())))
        values["fma"] = {int(count): float(rate) for count, rate in values["fma"].items()}
        values["dots"] = {str(dtype): float(rate) for dtype, rate in values.get("dots", {}).items()}
        rates = {name for name, value in vars(cls).items() if type(value) is float} & values.keys()
        values |= {name: float(values[name]) for name in rates}
        values |= {name: int(values[name]) for name in ("private", "last") if name in values}
        profile = cls(**values)
        positive = [*profile.fma.values(), *profile.dots.values()]
        positive += [values[name] for name in rates - {"wake", "noise"}]
        others = profile.wake, profile.noise, profile.private, profile.last
        if not profile.fma or not all(0 < rate < math.inf for rate in positive):
            raise ValueError("rates that are not positive and finite")
        if not all(0 <= number < math.inf for number in others):
            raise ValueError("numbers that are negative or not finite")
        shape = {(len(curve), len(at)) for curve in profile.gather for at in curve}
        if shape != {(len(profile.working_sets), len(profile.prefetch))} or len(profile.gather) != len(
            profile.row_bytes
        ):
            raise ValueError("a table of gathered rows of another shape")
        if len(profile.read) not in (0, len(profile.working_sets)) or not all(0 < x < math.inf for x in profile.read):
            raise ValueError("times of arrays read in order that are not positive, or not one for each working set")
        if not all(map(_is_rising, (profile.row_bytes, profile.working_sets, profile.prefetch))):
            raise ValueError("measured rows, working sets or distances that are not in order")
        if min(profile.row_bytes[0], profile.working_sets[0]) < 1 or profile.prefetch[0] < 0:
            raise ValueError("sizes that are not positive")
        if not all(0 < cost < math.inf for curve in profile.gather for at in curve for cost in at):
            raise ValueError("times that are not positive and finite")
        return profile


def _is_rising(numbers: tuple[int, ...]) -> bool:
    return bool(numbers) and all(first < second for first, second in pairwise(numbers))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def interpolate(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Return the value at a point between others, linear in the logarithms; the nearest value outside of them."""
    if at <= points[0]:
        return values[0]
    if at >= points[-1]:
        return values[-1]
    right = bisect_right(points, at)
    low, high = points[right - 1], points[right]
    share = (log(at) - log(low)) / (log(high) - log(low))
    return exp((1 - share) * log(values[right - 1]) + share * log(values[right]))


def _moved(cache_sizes: Sequence[int], new_sizes: Sequence[int], size: int) -> int:
    """Return the size that corresponds to `size` on a machine whose caches hold `theirs` instead of `ours` bytes."""
    if cache_sizes[0] < size < cache_sizes[-1]:
        return int(interpolate(cache_sizes, [float(cache_size) for cache_size in new_sizes], size))
    end = 0 if size <= cache_sizes[0] else -1
    return int(size * new_sizes[end] / cache_sizes[end])


def find_knees(costs: Sequence[float]) -> list[int]:
    """Return the index of the last cost of each plateau of a rising curve, noise below a quarter disregarded."""
    ends, base, at = [], costs[0], 1
    while at < len(costs):
        if costs[at] <= KNEE * base:
            base, at = min(base, costs[at]), at + 1
            continue
        ends.append(at - 1)
        while at + 1 < len(costs) and costs[at + 1] > KNEE * costs[at]:
            at += 1
        base, at = costs[at], at + 1
    return [*ends, len(costs) - 1]


# ------------------------------------------------------------------ shipped profiles


@cache
def shipped_families() -> dict[str, dict[str, Any]]:
    """Return what is shipped of families of processors, by LLVM's names."""
    families: dict[str, dict[str, Any]] = json.loads((DATA / "families.json").read_text())
    return families


@cache
def shipped_profile(mcpu: str) -> MachineProfile:
    """Return the profile of a family of processors that the package ships; the generic one for other families.

    Parameters
    ----------
    mcpu : str
        LLVM's name for the processor.
    """
    families = shipped_families()
    family = families.get(mcpu, families[GENERIC])
    base = MachineProfile.from_dict(json.loads((DATA / f"{family['file']}.json").read_text()))
    if "sizes" not in family:
        return base
    sizes = {int(ours): int(theirs) for ours, theirs in family["sizes"].items()}
    speed = family.get("speed", 1.0)
    origin = f"scaled from {base.name} to other cache sizes, at an assumed speed of {speed:g}; not measured"
    return base.scaled(family["name"], origin, sizes, speed)


__all__ = [
    "CORES",
    "LINE",
    "ROW_ENTRIES",
    "CacheLevel",
    "EffectiveLevel",
    "MachineProfile",
    "count_cpus",
    "find_knees",
    "interpolate",
    "last_cache",
    "levels",
    "machine_name",
    "private_cache",
    "shipped_families",
    "shipped_profile",
]
