# SPDX-License-Identifier: Apache-2.0
"""Choice between scipy and a compiled kernel, by the times of earlier calls, with bounded regret.

Whatever may be lost to plain scipy is paid from an `Account`: a small share of the seconds that scipy's operations
took, and the seconds that kernels saved. A library is loaded, and a kernel is tried, once the account covers the cost.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from sparsetir.errors import ArgumentError
from sparsetir.scipy.libraries import Libraries, folder
from sparsetir.utils.arguments import as_flag, shown
from sparsetir.utils.caches import ForkLock
from sparsetir.utils.files import cache_text
from sparsetir.utils.machine import CORES

TRIALS = 3  # timed calls of scipy, and of the kernel, before a size class is decided
SHORT_CALL = 2e-4  # seconds of scipy below which a kernel has more trials: its threads and caches must warm up
SHORT_TRIALS = 12
GIVE_UP_RATIO = 1.5  # a kernel that is so much slower in each of its trials loses after half of them
ONE_THREAD_CALL = 2e-3  # seconds, up to which waking threads may take longer than a kernel
SKIPPED_SECONDS = 1e-3  # for which calls go to scipy untimed where nothing is about to change
MOST_SKIPPED = 15  # calls
MIN_GAIN = 1.03  # a kernel must be so much faster to be taken
MIN_RECORDED_GAIN = 1.15  # the same by the times of an earlier program
RETRY_SECONDS, RETRY_CALLS = 0.5, 256  # of scipy after which a kernel is tried again; twice as many each time
RECHECK_CALLS = 256  # a taken kernel is compared with scipy again after so many calls
REGRET_SHARE = 0.02  # of the seconds of scipy's operations: what loading and trials may cost
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
    skipped: int = 0  # calls of scipy that are not timed, after the last one that was
    expected: float = 0.0  # seconds of each of them
    pauses: int = 0  # of a kernel that lost
    is_paused: bool = False
    has_one_thread: bool = False  # of the kernel
    choice: str = ""  # "scipy", "kernel", or empty while calls are timed

    @property
    def wants_scipy(self) -> bool:
        """True until scipy was timed often enough. The trials of a kernel follow one another, as its later calls do."""
        return len(self.scipy_seconds) < TRIALS

    @property
    def trial_cost(self) -> float:
        """Seconds by which the next call of the kernel is expected to exceed one of scipy."""
        best = min(self.scipy_seconds, default=0.0)
        return min(self.kernel_seconds, default=FIRST_TRIAL_RATIO * best) - best

    def add(self, side: str, seconds: float, *, threads: int = 1) -> None:
        """Record a timed call, and decide once there are enough.

        A kernel that loses its short calls with several threads is tried with one.
        """
        times = self.scipy_seconds if side == "scipy" else self.kernel_seconds
        times.append(seconds)
        del times[:-SHORT_TRIALS]
        by_scipy, by_kernel = self.scipy_seconds, self.kernel_seconds  # another thread may reopen the class
        if not by_kernel or not by_scipy:
            return
        best = min(by_scipy)
        trials = SHORT_TRIALS if best < SHORT_CALL else TRIALS
        # A kernel in the cold says little, and neither does the best of many calls.
        late = sorted(by_kernel[len(by_kernel) // 2 :])
        reached = min(by_kernel) if trials == TRIALS else late[len(late) // 2]
        if len(by_kernel) > max(1, trials // 2) and min(by_kernel) > GIVE_UP_RATIO * best:
            self.choice = "scipy"
        elif len(by_scipy) >= TRIALS and len(by_kernel) >= trials:
            self.choice = "kernel" if best > MIN_GAIN * reached else "scipy"
            self.kernel_seconds = [reached]
        if self.choice == "scipy" and threads > 1 and not self.has_one_thread and best < ONE_THREAD_CALL:
            self.choice, self.has_one_thread, self.kernel_seconds = "", True, []

    def adopt(self, scipy_seconds: float, kernel_seconds: float, threads: int) -> None:
        """Decide by the best times of an earlier program, unless they are too close."""
        if scipy_seconds > MIN_RECORDED_GAIN * kernel_seconds:
            self.choice = "kernel"
        elif kernel_seconds > MIN_RECORDED_GAIN * scipy_seconds:
            self.choice = "scipy"
        if self.choice:
            self.scipy_seconds, self.kernel_seconds = [scipy_seconds], [kernel_seconds]
            self.has_one_thread = threads == 1

    def reopen(self) -> None:
        """Compare again, with operands of now."""
        self.scipy_seconds, self.kernel_seconds, self.choice = [], [], ""
        self.has_one_thread = self.is_paused = False

    def pause(self) -> int:
        """Return for how many calls a kernel that lost is not tried again."""
        best = min(self.scipy_seconds, default=RETRY_SECONDS)
        self.skipped = max(RETRY_CALLS, int(RETRY_SECONDS / max(best, 1e-9))) << min(self.pauses, 30)
        self.expected = best
        self.pauses += 1
        self.is_paused = True
        return self.skipped

    @property
    def outcome(self) -> tuple[float, float, int] | None:
        """Best seconds of scipy and of the kernel, and 1 if that had one thread, else 0; None while calls are timed."""
        by_scipy, by_kernel = self.scipy_seconds, self.kernel_seconds  # another thread may reopen the class
        if not self.choice or not by_scipy or not by_kernel:
            return None
        return min(by_scipy), min(by_kernel), int(self.has_one_thread)


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
        self.untimed: dict[tuple[Any, ...], int] = {}  # calls that go to scipy, by size
        self.first_untimed = 0 if wait else 1  # of a size: programs of few calls are left alone
        self.recorded: dict[str, tuple[float, float, int]] | None = None  # outcomes of earlier programs
        self.outcomes: dict[str, tuple[float, float, int]] = {}  # of this one
        self.lock = ForkLock()
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
        skipped, times.skipped = times.skipped, 0
        times.calls += 1 + skipped
        if times.choice == "scipy":
            if not times.is_paused:
                self.untimed[size] = times.pause()
                return by_scipy()
            self._note(key, size, times)
            times.reopen()
        kernel = self.libraries.get(key)
        if kernel is None or (not times.choice and (times.wants_scipy or not self.account.covers(times.trial_cost))):
            return self._run_scipy(key, size, skipped, by_scipy, kernel is not None)
        start = perf_counter()
        kernel.use_threads(1 if times.has_one_thread else self.threads or 0)
        result = by_kernel(kernel)
        if result is None:
            times.choice = "scipy"
            return by_scipy()
        seconds = perf_counter() - start
        self.account.pay(seconds - min(times.scipy_seconds, default=seconds))
        if not times.choice:
            times.add("kernel", seconds, threads=self.threads or CORES)
        elif times.calls % RECHECK_CALLS == 0:
            self._note(key, size, times)
            times.reopen()
        return result

    def _run_scipy(
        self, key: Key, size: tuple[int, ...], skipped: int, by_scipy: Callable[[], Any], has_kernel: bool
    ) -> Any:
        times, start = self.classes[key, size], perf_counter()
        result = by_scipy()
        seconds = perf_counter() - start
        together = seconds + skipped * min(seconds, times.expected)  # one slow call says little about the others
        self.account.earn(together)
        if has_kernel and times.wants_scipy:
            times.add("scipy", seconds)
            return result
        # Nothing changes until the account covers a cost, for which most calls need not be timed.
        times.skipped = min(MOST_SKIPPED, int(SKIPPED_SECONDS / max(seconds, 1e-9)))
        times.expected = seconds
        self.untimed[size] = times.skipped
        if not has_kernel:
            times.scipy_seconds = [*times.scipy_seconds[1 - TRIALS :], seconds]
            self.libraries.want(key, together, self.account)
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

    def _note(self, key: Key, size: tuple[int, ...], times: SizeClass) -> None:
        """Record how a comparison ended."""
        outcome = times.outcome
        if outcome is not None:
            self.outcomes[self._name(key, size)] = outcome

    def save(self) -> None:
        """Keep the decided classes for later programs."""
        for (key, size), times in list(self.classes.items()):
            self._note(key, size, times)
        if all((self.recorded or {}).get(name) == outcome for name, outcome in self.outcomes.items()):
            return
        path = folder() / OUTCOMES
        cache_text(path, json.dumps({**read_outcomes(path), **self.outcomes}))

    def report(self) -> str:
        """Return the table of `accelerate.report`."""
        lines = [f"{'operation':24} {'size':>26} {'calls':>7} {'scipy ms':>10} {'kernel ms':>10}  choice"]
        for (key, bits), times in sorted(self.classes.items(), key=str):
            best = [min(t) * 1e3 if t else float("nan") for t in (times.scipy_seconds, times.kernel_seconds)]
            size = " x ".join(f"2^{b}" for b in bits[:3])
            choice = times.choice or self.libraries.state(key)
            lines.append(f"{' '.join(key):24} {size:>26} {times.calls:7} {best[0]:10.3f} {best[1]:10.3f}  {choice}")
        return "\n".join(lines)


def read_outcomes(path: Path) -> dict[str, tuple[float, float, int]]:
    """Return the outcome of each size class; nothing of a damaged file."""
    try:
        read = json.loads(path.read_text())
        return {str(name): (float(best[0]), float(best[1]), int(best[2])) for name, best in read.items()}
    except (OSError, ValueError, AttributeError, TypeError, LookupError):
        return {}


__all__ = ["Account", "SizeClass", "TimedSelection", "read_outcomes"]
