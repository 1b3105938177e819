# SPDX-License-Identifier: Apache-2.0
"""Which of several searches to go on with: the one from which most is expected for the whole, a second of search.

The whole is the time of all kernels, each as often as it is called. Ansor shares out the trials of a model's subgraphs
by a gradient of this kind (Zheng et al., OSDI 2020); here a batch counts by the seconds that it takes, and what is left
to gain falls faster than there, as searches that a trained model leads have most of it in the first few trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BATCH = 4  # trials that are expected to be measured at a time
# Share of a kernel's time that a search after t trials may still gain, times t: searches of the shipped model are at
# 0.94, 0.98 and 0.995 of their end after 5, 15 and 60 trials.
LEFT = 0.3
FADING = 0.5  # of what was gained by the last batches, and as much again is expected of the next ones
TRUST = 0.5  # in that a kernel gains as much as a similar one did
FIRST_SECONDS = 0.5  # of a batch, where none was measured
WAKING = 0.5  # seconds until a search whose workers are with another one goes on


@dataclass
class Curve:
    """How a search went.

    Parameters
    ----------
    calls : float
        Of the kernel, in the whole.
    points : list of (int, float)
        Trials and the best time after each batch, the first with the untuned kernel alone.
    batches : list of float
        Seconds of each batch.
    hinted : float, optional
        The time that it would have with the gain of a similar kernel, while what that one found is not tried.
    is_open : bool
        Whether there is anything left to try.
    """

    calls: float = 1.0
    points: list[tuple[int, float]] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    hinted: float | None = None
    is_open: bool = True

    @property
    def best(self) -> float:
        """The shortest time so far."""
        return self.points[-1][1]

    @property
    def pace(self) -> float:
        """Seconds of the next batch, as long as the last ones."""
        last = self.batches[-3:]
        return sum(last) / len(last) if last else FIRST_SECONDS

    def add(self, trials: int, best: float, seconds: float) -> None:
        """Note a batch."""
        self.points.append((trials, best))
        self.batches.append(seconds)
        self.hinted = None

    def gain(self) -> float:
        """Seconds that a call is expected to gain by the next batch."""
        trials, best = self.points[-1]
        ahead = best * LEFT * (1 / max(trials, 1) - 1 / (max(trials, 1) + BATCH))
        behind = FADING * (self.points[-3:][0][1] - best) / 2
        similar = TRUST * (best - self.hinted) if self.hinted is not None else 0.0
        return max(ahead, behind, similar)


Policy = Callable[[Sequence[Curve], Sequence[bool]], "int | None"]


def most_gain(curves: Sequence[Curve], awake: Sequence[bool]) -> int | None:
    """The search from which the whole is expected to gain most a second; None if all have ended.

    Examples
    --------
    >>> often, rarely = Curve(100.0, [(1, 2e-3)]), Curve(1.0, [(1, 2e-3)])
    >>> most_gain([rarely, often], [True, True])
    1
    >>> often.add(41, 1e-3, 10.0), often.add(81, 1e-3, 10.0), often.add(121, 1e-3, 10.0)  # nothing more to be had
    (None, None, None)
    >>> most_gain([rarely, often], [True, True])
    0
    """
    worth = {
        n: curve.calls * curve.gain() / (curve.pace + (0.0 if is_awake else WAKING))
        for n, (curve, is_awake) in enumerate(zip(curves, awake, strict=True))
        if curve.is_open
    }
    return max(worth, key=lambda n: worth[n], default=None)


def equal(curves: Sequence[Curve], awake: Sequence[bool]) -> int | None:
    """The search that had the least time; None if all have ended."""
    spent = {n: sum(curve.batches) for n, curve in enumerate(curves) if curve.is_open}
    return min(spent, key=lambda n: spent[n], default=None)


POLICIES: dict[str, Policy] = {"gain": most_gain, "equal": equal}

__all__ = ["POLICIES", "Curve", "Policy", "equal", "most_gain"]
