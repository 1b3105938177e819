# SPDX-License-Identifier: Apache-2.0
"""Time several calls side by side so that a busy machine favours none of them, and choose the fastest candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.utils.arguments import as_count, as_mapping, as_seconds, as_sequence, shown

MOST_ROUNDS = 1_000_000
LONGEST = 86_400.0  # seconds of all cases together: a day
MIN_CALLS = 3
LONG_CALL = 2e-3  # seconds of a call as long as which it may wait for a core
MAX_REPEATS = 3
# A thread that lost its core comes back after one or more scheduler ticks of 4 ms.
TICK = 3.5e-3
FULL_TICK, OFF_TICK, MOST_TICKS = 4e-3, 0.025, 16
# A larger spread is not quoted.
NOISY = 0.3


@dataclass(frozen=True)
class Timing:
    """Times of one case, in seconds per call.

    Parameters
    ----------
    median, min, max : float
        Over all samples that were kept.
    samples : tuple of float
        Every kept call, in the order in which they ran.
    discarded : int
        Bursts thrown away because the machine was busy.
    """

    median: float
    min: float
    max: float
    samples: tuple[float, ...] = field(repr=False)
    discarded: int = 0

    @classmethod
    def of(cls, samples: list[float], *, discarded: int = 0) -> Timing:
        """Summarise `samples`, of which there must be at least one."""
        samples = [as_seconds(sample, "samples") for sample in as_sequence(samples, "samples", "seconds")]
        if not samples:
            raise ArgumentError("samples: expected one or more, got none. Pass the seconds of a call.")
        return cls(median(samples), min(samples), max(samples), tuple(samples), discarded)

    @property
    def spread(self) -> float:
        """Distance of the lower and the upper quartile, relative to the median; 0 is a quiet machine."""
        ordered = sorted(self.samples)
        lower, upper = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        return (upper - lower) / self.median if self.median else 0.0

    @property
    def waited(self) -> bool:
        """Whether calls waited for a core, so that the median says little of the case itself."""
        return is_disturbed(list(self.samples))

    @property
    def disturbed(self) -> bool:
        """Whether other work on the machine shows in the times: a large spread, or calls that waited for a core."""
        return self.spread > NOISY or self.waited

    def as_dict(self) -> dict[str, float]:
        """For JSON, without the single samples."""
        return {name: getattr(self, name) for name in ("median", "min", "max", "spread", "discarded", "waited")}


def timed_calls(call: Callable[[], object], seconds: float, *, least: int, least_long: int) -> list[float]:
    """Seconds of consecutive calls: for about `seconds`, at least `least` calls, or `least_long` above `LONG_CALL`."""
    samples: list[float] = []
    fastest, clock = float("inf"), time.perf_counter
    end = clock() + seconds
    while clock() < end or len(samples) < (least if fastest < LONG_CALL else least_long):
        start = clock()
        call()
        samples.append(clock() - start)
        fastest = min(fastest, samples[-1])
    return samples


def burst(call: Callable[[], object], seconds: float) -> list[float]:
    """`timed_calls`, at least `MIN_CALLS`, after one call that is not timed."""
    call()
    return timed_calls(call, seconds, least=MIN_CALLS, least_long=MIN_CALLS)


def is_disturbed(samples: list[float]) -> bool:
    """Return whether half of the calls or more waited for a scheduler tick."""
    middle, fastest = median(samples), min(samples)
    return (middle > 2 * fastest and middle - fastest > TICK) or is_quantised(samples)


def is_quantised(samples: list[float]) -> bool:
    """Return whether most calls took a whole number of ticks, as one does that waits for a thread without a core."""
    ticks = [sample / FULL_TICK for sample in samples]
    whole = [1 <= round(n) <= MOST_TICKS and abs(n - round(n)) < OFF_TICK for n in ticks]
    return 2 * sum(whole) > len(whole)


def quiet_burst(call: Callable[[], object], seconds: float) -> tuple[list[float], int]:
    """Return the first undisturbed burst (or the last one allowed), and how many were discarded before it."""
    for discarded in range(MAX_REPEATS):
        samples = burst(call, seconds)
        if not is_disturbed(samples):
            return samples, discarded
    return samples, MAX_REPEATS - 1


def interleave(
    cases: Mapping[str, Callable[[], object]], *, rounds: int = 3, burst_seconds: float = 0.05, rest: float = 0.25
) -> dict[str, Timing]:
    """Time the cases in turn, a burst of calls each, for several rounds.

    Parameters
    ----------
    cases : mapping of str to callable
        What to time; a callable returns when its result is ready.
    rounds : int
        How often each case has its turn.
    burst_seconds : float
        Length of one turn; at least three calls are timed however long they take.
    rest : float
        Seconds of sleep before each turn: OpenMP and TVM workers spin for a while after a call and would
        take cores from the next case.

    Returns
    -------
    dict of str to Timing
        In the order of `cases`.

    Examples
    --------
    >>> times = interleave({"sum": lambda: sum(range(1000))}, rounds=1, burst_seconds=0.001, rest=0.0)
    >>> times["sum"].min <= times["sum"].median <= times["sum"].max
    True
    """
    cases, rounds = as_mapping(cases, "cases", "functions by their names"), as_count(rounds, "rounds", most=MOST_ROUNDS)
    for name, call in cases.items():
        if not callable(call):
            raise ArgumentTypeError(f"cases[{name!r}]: expected a function, got {shown(call)}. Pass one.")
    burst_seconds, rest = as_seconds(burst_seconds, "burst_seconds"), as_seconds(rest, "rest")
    seconds = rounds * len(cases) * (burst_seconds + rest)
    if seconds > LONGEST:
        fault = f"expected to be done in {LONGEST:g} seconds, got {shown(rounds)} rounds that take {seconds:.3g}"
        raise ArgumentError(f"rounds, burst_seconds, rest: {fault}. Pass smaller ones.")
    samples: dict[str, list[float]] = {name: [] for name in cases}
    discarded = dict.fromkeys(cases, 0)
    for _ in range(rounds):
        for name, call in cases.items():
            time.sleep(rest)
            kept, thrown = quiet_burst(call, burst_seconds)
            samples[name] += kept
            discarded[name] += thrown
    return {name: Timing.of(samples[name], discarded=discarded[name]) for name in cases}


ROUNDS = 3
MOST_DENSE = 0.7  # Larger densities are not worth timing.
LEAST_SIZE = 1 << 12  # Elements; smaller weights stay dense.
# A candidate replaces the baseline only if it is faster by this factor, since times vary from run to run.
LEAST_GAIN = 1.05
Timer = Callable[[float], float]


@dataclass(frozen=True)
class FastestCandidate:
    """The fastest candidate.

    Parameters
    ----------
    name : str
    times : mapping of str to float
        Seconds per call of each candidate that was timed.
    refused : mapping of str to str
        Reasons why other candidates were not timed.
    """

    name: str
    times: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)

    def reason(self, baseline: str) -> str:
        """Return the times of the fastest candidate and of the best other one."""
        rivals = {name: time for name, time in self.times.items() if name != self.name}
        if not rivals:
            return "; ".join(f"{name}: {why}" for name, why in self.refused.items()) or "no other candidate"
        rival = baseline if self.name != baseline else min(rivals, key=rivals.__getitem__)
        return f"{self.times[self.name] * 1e6:.0f} us against {self.times[rival] * 1e6:.0f} us ({rival})"


def timer_of(call: Callable[[], object]) -> Timer:
    """Return a function of seconds to spend that returns the least time of a call, which other work disturbs least."""
    return lambda seconds: min(timed_calls(call, seconds, least=5, least_long=3))


def choose(
    timers: Mapping[str, Timer], *, seconds: float = 0.1, refused: Mapping[str, str] | None = None
) -> FastestCandidate:
    """Time candidates in turns and return the fastest.

    Parameters
    ----------
    timers : mapping of str to callable
        From seconds to spend to seconds per call. The first is the baseline, which others must beat by a margin.
    seconds : float
        For each candidate.
    refused : mapping of str to str, optional
        Candidates that gave wrong results or failed, with the reason.
    """
    seconds = as_seconds(seconds, "seconds")
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            samples[name].append(timer(seconds / ROUNDS))
    times = {name: min(values) for name, values in samples.items()}
    return FastestCandidate(fastest(times), times, dict(refused or {}))


def fastest(times: Mapping[str, float]) -> str:
    """Return the name of the least time, or of the first one unless that is beaten by a margin."""
    baseline, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] * LEAST_GAIN < times[baseline] else baseline
