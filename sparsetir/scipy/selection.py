# SPDX-License-Identifier: Apache-2.0
"""Choice between scipy and a compiled kernel, by the times of earlier calls, with bounded regret.

Whatever may be lost to plain scipy is paid from an `Account`: a small share of the seconds that scipy's operations
took, and the seconds that kernels saved. A library is loaded, and a kernel is tried, once the account covers the cost.
"""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from sparsetir.errors import ArgumentError
from sparsetir.scipy.libraries import Libraries, folder
from sparsetir.utils.arguments import as_flag, shown
from sparsetir.utils.files import caching

TRIALS = 3  # timed calls of scipy, and of the kernel, before a size class is decided
GIVE_UP_RATIO = 1.5  # a kernel so much slower than scipy in two calls is not tried again
MIN_GAIN = 1.03  # a kernel must be so much faster to be taken
MIN_RECORDED_GAIN = 1.15  # the same by the times of an earlier program
RECHECK_CALLS = 256  # a taken kernel is compared with scipy again after so many calls
REGRET_SHARE = 0.03  # of the seconds of scipy's operations: what loading and trials may cost
FIRST_TRIAL_RATIO = 3.0  # assumed time of a kernel's first call, over scipy's
OUTCOMES = "outcomes.json"

Key = tuple[str, str, str]


class Account:
    """Seconds that may be lost to plain scipy.

    Parameters
    ----------
    is_unlimited : bool
        Whether every cost is covered.
    """

    def __init__(self, is_unlimited: bool) -> None:
        self.balance = float("inf") if is_unlimited else 0.0

    def earn(self, scipy_seconds: float) -> None:
        """Add the share of an operation that scipy computed."""
        self.balance += REGRET_SHARE * scipy_seconds

    def pay(self, seconds: float) -> None:
        """Subtract seconds that were lost; add them where they are negative."""
        self.balance -= seconds

    def covers(self, seconds: float) -> bool:
        """Return whether so many seconds may be lost."""
        return self.balance >= seconds


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

    @property
    def trial_cost(self) -> float:
        """Seconds by which the next call of the kernel is expected to exceed one of scipy."""
        best = min(self.scipy_seconds, default=0.0)
        expected = min(self.kernel_seconds) if self.kernel_seconds else FIRST_TRIAL_RATIO * best
        return expected - best

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

    def adopt(self, scipy_seconds: float, kernel_seconds: float) -> None:
        """Decide by the best times of an earlier program, unless they are too close."""
        if scipy_seconds > MIN_RECORDED_GAIN * kernel_seconds:
            self.choice = "kernel"
        elif kernel_seconds > MIN_RECORDED_GAIN * scipy_seconds:
            self.choice = "scipy"
        if self.choice:
            self.scipy_seconds, self.kernel_seconds = [scipy_seconds], [kernel_seconds]

    def reopen(self) -> None:
        """Compare again, with operands of now."""
        self.scipy_seconds, self.kernel_seconds, self.choice = [], [], ""


class TimedSelection:
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
                raise ArgumentError(f"{name}: expected an integer of at least {least}, got {shown(value)}")
        wait = as_flag(wait, "wait")
        self.min_entries, self.threads = min_entries, threads
        self.account = Account(is_unlimited=wait)
        self.libraries = Libraries(threads=threads, wait=wait)
        self.classes: dict[tuple[Any, ...], SizeClass] = {}
        self.settled: set[tuple[Any, ...]] = set()  # sizes that scipy computes
        self.recorded: dict[str, tuple[float, float]] | None = None  # best times of earlier programs
        self.lock = threading.Lock()
        if not wait:
            atexit.register(self.save)

    def run(self, key: Key, size: tuple[int, ...], by_scipy: Callable[[], Any], by_kernel: Callable[[Any], Any]) -> Any:
        """Return the result of one side; time both until the class of `size` is decided.

        Parameters
        ----------
        key : tuple of str
            Operation, dtype of values, dtype of indices.
        size : tuple of int
            The class of the operands, in powers of two.
        by_scipy : callable
        by_kernel : callable
            Takes the kernel; returns None where it cannot compute this call.
        """
        times = self.classes.get((key, size))
        if times is None:
            times = self._new_class(key, size)
        times.calls += 1
        if times.choice == "scipy":
            self.settled.add(size)
            return by_scipy()
        kernel = self.libraries.get(key)
        if kernel is None or (not times.choice and (times.wants_scipy or not self.account.covers(times.trial_cost))):
            return self._run_scipy(key, times, by_scipy, kernel is not None)
        start = perf_counter()
        result = by_kernel(kernel)
        if result is None:
            times.choice = "scipy"
            return by_scipy()
        seconds = perf_counter() - start
        if times.scipy_seconds:
            self.account.pay(seconds - min(times.scipy_seconds))
        if not times.choice:
            times.add("kernel", seconds)
        elif times.calls % RECHECK_CALLS == 0:
            times.reopen()
        return result

    def _run_scipy(self, key: Key, times: SizeClass, by_scipy: Callable[[], Any], has_kernel: bool) -> Any:
        start = perf_counter()
        result = by_scipy()
        seconds = perf_counter() - start
        self.account.earn(seconds)
        if has_kernel:
            times.add("scipy", seconds)
        else:
            times.scipy_seconds = [*times.scipy_seconds[1 - TRIALS :], seconds]
            self.libraries.want(key, seconds, self.account)
            if key in self.libraries.loaded:
                self._adopt_recorded()
        return result

    def _new_class(self, key: Key, size: tuple[int, ...]) -> SizeClass:
        with self.lock:
            times = self.classes.setdefault((key, size), SizeClass())
            if self.recorded is not None and (recorded := self.recorded.get(self._name(key, size))):
                times.adopt(*recorded)
        return times

    # ------------------------------------------------------------------------------------------ earlier programs

    def _name(self, key: Key, size: tuple[int, ...]) -> str:
        return " ".join(map(str, (*key, *size, self.threads or 0)))

    def _adopt_recorded(self) -> None:
        """Read the outcomes of earlier programs, once, and decide the classes that they cover."""
        with self.lock:
            if self.recorded is not None:
                return
            self.recorded = read_outcomes(folder() / OUTCOMES)
            for (key, size), times in self.classes.items():
                recorded = self.recorded.get(self._name(key, size))
                if recorded and not times.choice and not times.kernel_seconds:
                    times.adopt(*recorded)

    def save(self) -> None:
        """Keep the decided classes for later programs."""
        decided = {
            self._name(key, size): (min(times.scipy_seconds), min(times.kernel_seconds))
            for (key, size), times in list(self.classes.items())
            if times.choice and times.scipy_seconds and times.kernel_seconds
        }
        if all((self.recorded or {}).get(name) == times for name, times in decided.items()):
            return
        path = folder() / OUTCOMES
        with caching(path) as partial:
            partial.write_text(json.dumps({**read_outcomes(path), **decided}))

    def report(self) -> str:
        """Return the table of `accelerate.report`."""
        lines = [f"{'operation':24} {'size':>26} {'calls':>7} {'scipy ms':>10} {'kernel ms':>10}  choice"]
        for (key, bits), times in sorted(self.classes.items(), key=str):
            best = [min(t) * 1e3 if t else float("nan") for t in (times.scipy_seconds, times.kernel_seconds)]
            size = " x ".join(f"2^{b}" for b in bits[:3])
            choice = times.choice or self.libraries.state(key)
            lines.append(f"{' '.join(key):24} {size:>26} {times.calls:7} {best[0]:10.3f} {best[1]:10.3f}  {choice}")
        return "\n".join(lines)


def read_outcomes(path: Path) -> dict[str, tuple[float, float]]:
    """Return the best seconds of scipy and of the kernel by class; nothing of a damaged file."""
    try:
        read = json.loads(path.read_text())
        return {str(name): (float(times[0]), float(times[1])) for name, times in read.items()}
    except (OSError, ValueError, AttributeError, TypeError, LookupError):
        return {}


__all__ = ["Account", "SizeClass", "TimedSelection", "read_outcomes"]
