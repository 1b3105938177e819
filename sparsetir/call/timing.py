# SPDX-License-Identifier: Apache-2.0
"""How long calls take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls."""

    median: float
    best: float
    worst: float
    calls: int

    def __str__(self) -> str:
        spread = f"{self.best * 1e3:.3f} to {self.worst * 1e3:.3f}"
        return f"{self.median * 1e3:.3f} ms (median of {self.calls} calls, {spread})"


def measure(call: Callable[[], Any], *, seconds: float = 0.2) -> Timing:
    """Time `call` for `seconds` after one warm-up call."""
    call()
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    ordered = sorted(samples)
    return Timing(ordered[len(ordered) // 2], ordered[0], ordered[-1], len(ordered))


__all__ = ["Timing", "measure"]
