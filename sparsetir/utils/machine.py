# SPDX-License-Identifier: Apache-2.0
"""Properties of the machine: processor, cores, caches."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Counted before TVM's thread pool can pin this process to one of them.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

CPUS = Path("/sys/devices/system/cpu")
L2_BYTES, LAST_BYTES = 1 << 20, 32 << 20  # where the system does not tell
LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Level:
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
def levels() -> tuple[Level, ...]:
    """Return the data caches of the first core, where the system tells, the smallest first."""
    caches = []
    for folder in sorted((CPUS / "cpu0" / "cache").glob("index*")):
        level, kind, size, shared = (
            (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        if kind != "Instruction" and size.endswith("K"):
            caches.append(Level(f"L{level}", int(size[:-1]) << 10, count_cpus(shared)))
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


__all__ = ["CORES", "LINE", "Level", "count_cpus", "last_cache", "levels", "machine_name", "private_cache"]
