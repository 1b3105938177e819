# SPDX-License-Identifier: Apache-2.0
"""Choice of the fastest of several candidates by measurement, for layers of models in torch and in Relax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sparsetir.utils.arguments import as_seconds
from sparsetir.workloads.timing import timed_calls

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


__all__ = ["LEAST_SIZE", "MOST_DENSE", "FastestCandidate", "Timer", "choose", "fastest", "timer_of"]
