# SPDX-License-Identifier: Apache-2.0
"""Choice between scipy and a compiled kernel, by the times of the first calls of each operation and size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from sparsetir.errors import ArgumentError
from sparsetir.scipy.libraries import Libraries

TRIALS = 3  # timed calls of scipy, and of the kernel, before a size class is decided
GIVE_UP_RATIO = 1.5  # a kernel so much slower than scipy in one call is not tried again
MIN_GAIN = 1.03  # a kernel must be so much faster to be taken
RECHECK_CALLS = 256  # a taken kernel is compared with scipy again after so many calls


@dataclass
class SizeClass:
    """Times of one operation for operands of similar size."""

    scipy_seconds: list[float] = field(default_factory=list)
    kernel_seconds: list[float] = field(default_factory=list)
    calls: int = 0
    choice: str = ""  # "scipy", "kernel", or empty while calls are timed

    @property
    def wants_scipy(self) -> bool:
        """Whether the next timed call is scipy's."""
        return len(self.scipy_seconds) <= len(self.kernel_seconds)

    def add(self, side: str, seconds: float) -> None:
        """Record a timed call, and decide once there are enough."""
        times = self.scipy_seconds if side == "scipy" else self.kernel_seconds
        times.append(seconds)
        del times[:-TRIALS]
        by_scipy, by_kernel = self.scipy_seconds, self.kernel_seconds  # another thread may reopen the class
        if not by_kernel or not by_scipy:
            return
        scipy_best, kernel_best = min(by_scipy), min(by_kernel)
        if len(by_kernel) > 1 and kernel_best > GIVE_UP_RATIO * scipy_best:
            self.choice = "scipy"
        elif min(len(by_scipy), len(by_kernel)) >= TRIALS:
            self.choice = "kernel" if scipy_best > MIN_GAIN * kernel_best else "scipy"

    def reopen(self) -> None:
        """Compare again, with operands of now."""
        self.scipy_seconds, self.kernel_seconds, self.choice = [], [], ""


class Selection:
    """Run an operation by scipy or by a kernel, whichever is faster for operands of this size.

    Parameters
    ----------
    threads : int, optional
    min_entries : int
    wait : bool
        As in `sparsetir.scipy.accelerate`.
    """

    def __init__(self, *, threads: int | None, min_entries: int, wait: bool) -> None:
        for name, value, least in (("threads", threads, 1), ("min_entries", min_entries, 0)):
            is_default = name == "threads" and value is None
            if not is_default and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ArgumentError(f"{name}: expected an integer of at least {least}, got {value!r}")
        self.min_entries = min_entries
        self.libraries = Libraries(threads=threads, wait=wait)
        self.classes: dict[tuple[Any, ...], SizeClass] = {}
        self.lock = threading.Lock()

    def run(
        self,
        key: tuple[str, str, str],
        size: tuple[int, ...],
        by_scipy: Callable[[], Any],
        by_kernel: Callable[[Any], Any],
    ) -> Any:
        """Return the result of one side; time both until the class of `size` is decided.

        Parameters
        ----------
        key : tuple of str
            Operation, dtype of values, dtype of indices.
        size : tuple of int
            Whatever the time depends on: entries, rows, columns.
        by_scipy : callable
        by_kernel : callable
            Takes the kernel; returns None where it cannot compute this call.
        """
        name = (key, *(number.bit_length() for number in size))
        times = self.classes.get(name)
        if times is None:
            with self.lock:
                times = self.classes.setdefault(name, SizeClass())
        times.calls += 1
        if times.choice == "scipy":
            return by_scipy()
        kernel = self.libraries.get(key)
        if times.choice == "kernel":
            if times.calls % RECHECK_CALLS == 0:
                times.reopen()
            result = by_kernel(kernel)
            return by_scipy() if result is None else result
        if kernel is None or times.wants_scipy:
            start = perf_counter()
            result = by_scipy()
            seconds = perf_counter() - start
            if kernel is None:
                self.libraries.want(key, seconds)
                times.scipy_seconds = [*times.scipy_seconds[1 - TRIALS :], seconds]
            else:
                times.add("scipy", seconds)
            return result
        start = perf_counter()
        result = by_kernel(kernel)
        if result is None:
            times.choice = "scipy"
            return by_scipy()
        times.add("kernel", perf_counter() - start)
        return result

    def report(self) -> str:
        """Return the table of `accelerate.report`."""
        lines = [f"{'operation':24} {'size':>18} {'calls':>7} {'scipy ms':>10} {'kernel ms':>10}  choice"]
        for (key, *bits), times in sorted(self.classes.items(), key=str):
            best = [min(t) * 1e3 if t else float("nan") for t in (times.scipy_seconds, times.kernel_seconds)]
            size = " x ".join(f"2^{b}" for b in bits)
            choice = times.choice or self.libraries.state(key)
            lines.append(f"{' '.join(key):24} {size:>18} {times.calls:7} {best[0]:10.3f} {best[1]:10.3f}  {choice}")
        return "\n".join(lines)


__all__ = ["Selection", "SizeClass"]
