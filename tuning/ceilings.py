# SPDX-License-Identifier: Apache-2.0
"""The rates of a machine that a cost model goes by: amounts become times on them, so that machines compare."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import tvm

from sparsetir.compile import disk_cache
from sparsetir.compile.target import native_target
from sparsetir.harness.ceilings import DRAM, higher, measure_ceilings, register_lanes
from sparsetir.machine import last_cache, levels, machine_name, private_cache
from sparsetir.version import __version__

SECONDS, ROUNDS = 0.02, 3  # for each of the rates in a round


@dataclass(frozen=True)
class Rates:
    """What a core does in a second; by default one of a usual server.

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

    def of(self, held: float) -> float:
        """Bytes a second of what is so large and used again and again."""
        return self.private if held <= private_cache() else self.last if held <= last_cache() else self.memory

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {name: float(f"{rate:.4g}") for name, rate in asdict(self).items()}


USUAL = Rates()


def measure_rates(target: Any = None) -> Rates:
    """Measure what a core of this machine does, of code for a target; None is this machine.

    The highest of some rounds counts, as other work only makes rates lower.
    """
    target = None if target is None else tvm.target.Target(target)
    lanes, caches = register_lanes(target), levels()
    found = [measure_ceilings(1, lanes, caches, seconds=SECONDS, target=target) for _ in range(ROUNDS)]
    best = reduce(higher, found)
    own = next((level.name for level in caches if level.size == private_cache()), None)
    last = next((level.name for level in caches if level.size == last_cache()), None)
    private, shared = (best.bandwidth.get(name or "") for name in (own, last))
    return Rates(best.peak, private or USUAL.private, shared or USUAL.last, best.bandwidth[DRAM])


@cache
def measured_rates() -> Rates:
    """`measure_rates` of this machine; measured once, for all processes that keep compiled kernels."""
    folder = disk_cache.cache_folder()
    about = f"{machine_name()} {native_target()} {__version__}"
    path = None if folder is None else folder / f"rates-{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        if path is not None:
            return Rates(**json.loads(path.read_text()))
    found = measure_rates()
    if path is not None:
        with contextlib.suppress(OSError):
            _write(path, json.dumps(found.as_dict()))
    return found


def _write(path: Path, text: str) -> None:
    """All of a file or nothing, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(text)
    own.replace(path)


__all__ = ["USUAL", "Rates", "measure_rates", "measured_rates"]
