# SPDX-License-Identifier: Apache-2.0
"""Memory of this process, as Linux tells it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """Bytes of this process: ``"VmRSS"`` now, ``"VmHWM"`` at most since `forget_peak`."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Give freed memory back, and reset the peak."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    CLEAR.write_text("5")


def added(call: Callable[[], object]) -> int | None:
    """Bytes that a call adds at its peak, its result among them; None where the system does not tell."""
    try:
        forget_peak()
    except OSError:
        return None
    before = resident("VmRSS")
    result = call()
    peak = resident("VmHWM") - before
    del result
    return peak


__all__ = ["CLEAR", "STATUS", "added", "forget_peak", "resident"]
