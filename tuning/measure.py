# SPDX-License-Identifier: Apache-2.0
"""Timing of kernel calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any

import numpy as np

from sparsetir.tuning.variants import Call
from sparsetir.workloads.timing import timed_calls

Timed = Callable[[float], float]

BURST_SECONDS, PACE_SECONDS = 0.008, 0.006
FEW = 5  # calls of a burst at least
LONG = 5e-3  # seconds; longer calls average over the other work on the machine
ROUNDS, FEWEST_ROUNDS, DUEL_SECONDS = 5, 2, 2.0
DUEL_TURN = 0.02  # seconds of a case in a round
MOST_ROUNDS = 25  # while the comparison is undecided
AGREE = 1.05  # times the shortest turn: two turns this close need no third
BEHIND = 1.15  # times the fastest of a round: a case this slow in each of the first rounds is dropped


@dataclass(frozen=True)
class MeasurementPlace:
    """Where something is measured: the part of a record's key that a worker of another machine says."""

    machine: str
    threads: int
    target: str
    versions: str

    def __str__(self) -> str:
        return f"{self.machine}, {self.threads} threads, {self.target}, {self.versions}"


@dataclass(frozen=True)
class Measurement:
    """Seconds of a candidate, or the reason why there are none.

    Parameters
    ----------
    seconds : float, optional
        Of a typical call, at the usual pace of the machine.
    median, spread : float, optional
        The median as it was measured, and how far the quartiles are apart, relative to it.
    error : str, optional
    usual : float, optional
        Seconds of the untuned kernel right before and after it, in the same process.
    turns : tuple of float
        Seconds of each burst, if the machine was as fast in all of them.
    place : MeasurementPlace, optional
        Where a worker of an executor measured it.
    load : float, optional
        The load average of that machine.
    """

    seconds: float | None = None
    median: float | None = None
    spread: float | None = None
    error: str | None = None
    usual: float | None = None
    turns: tuple[float, ...] = ()
    place: MeasurementPlace | None = None
    load: float | None = None

    def paced(self, usual: float) -> Measurement:
        """Return the measurement scaled to the usual time of the untuned kernel."""
        if self.seconds is None or self.usual is None:
            return self
        seconds = at_pace(self.seconds, self.usual, usual)
        return replace(self, seconds=seconds, turns=(seconds,))

    def wants_a_turn(self, near: float, turn: int) -> bool:
        """Return whether a short burst of other work could decide about a candidate.

        Parameters
        ----------
        near : float
            Seconds below which a candidate is near the best.
        turn : int
            How many it had; a third one is for those whose first ones differ.
        """
        if self.seconds is None or not self.seconds < min(LONG, near):
            return False
        return turn < 2 or (len(self.turns) == turn and max(self.turns) > AGREE * min(self.turns))

    def again(self, seconds: float) -> Measurement:
        """Return the measurement with another burst: the median of all, and at least their difference as spread."""
        if self.seconds is None or seconds == float("inf"):
            return self
        turns = (*(self.turns or (self.seconds,)), seconds)
        differ = max(turns) / min(turns) - 1
        return replace(self, seconds=median(turns), spread=max(self.spread or 0.0, differ), turns=turns)


def at_pace(seconds: float, untuned: float, usual: float) -> float:
    """Return seconds of a call if the untuned kernel, timed interleaved as `untuned`, had taken its usual time.

    A shared machine has slow and fast seconds, and what one process finds in memory may lie worse than what another
    does: both kernels see the same of it.

    Examples
    --------
    >>> at_pace(3.0, 2.0, 1.0), at_pace(3.0, float("inf"), 1.0)
    (1.5, 3.0)
    """
    return seconds * usual / untuned if 0 < untuned < float("inf") else seconds


def burst(call: Call, seconds: float) -> list[float]:
    """Run `timed_calls`, at least `FEW`; two where a scheduler tick may be half of one, one of longer ones."""
    samples = timed_calls(call, seconds, least=FEW, least_long=1)
    if len(samples) == 1 and samples[0] < LONG:
        samples += timed_calls(call, 0.0, least=1, least_long=1)
    return samples


def typical(call: Call, seconds: float) -> float:
    """Return seconds of a call, a quarter of a burst being faster.

    On a shared machine the second core may be away for a moment: half of the calls take milliseconds then, whatever
    they do. Not the fastest call, which may have found in the caches what is rarely there.
    """
    return lower_quartile(burst(call, seconds))


def lower_quartile(samples: Sequence[float]) -> float:
    """Return the lower quartile: a quarter of the samples is smaller."""
    return sorted(samples)[len(samples) // 4]


def summary(samples: list[float]) -> Measurement:
    """Return a typical call, the median, and how far the quartiles are apart."""
    ordered = sorted(samples)
    low, middle, high = lower_quartile(samples), median_low(ordered), ordered[3 * len(ordered) // 4]
    return Measurement(low, middle, (high - low) / middle)


def duel(cases: Mapping[Any, Timed]) -> dict[Any, float]:
    """Time near ties: see `turns`.

    Returns
    -------
    dict of float
        For each case the median of its turns, relative to those of the other cases in the same round.
    """
    return dict(zip(cases, interleaved_medians(turns(cases)).tolist(), strict=True))


def turns(cases: Mapping[Any, Timed], *, enough: Callable[[np.ndarray], bool] | None = None) -> np.ndarray:
    """Return seconds of all cases in turn, several rounds (fewer of slow calls), so that a busy machine favours none.

    Parameters
    ----------
    cases : mapping of callable
        Each takes how long to call, and returns the seconds of a typical call.
    enough : callable, optional
        Whether the turns so far decide; up to `MOST_ROUNDS` are taken until they do. By default there are `ROUNDS`, and
        what is far behind in the first of them has no turn in the others; the case named None always has one.

    Returns
    -------
    ndarray
        A row for each case, a column for each round; NaN is no turn.
    """
    times: dict[Any, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + DUEL_SECONDS
    for turn in range(ROUNDS if enough is None else MOST_ROUNDS):
        so_far = np.array(list(times.values()))
        if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        if enough is not None and turn >= ROUNDS and enough(so_far):
            break
        far = _far_behind(so_far) if enough is None and turn >= FEWEST_ROUNDS else np.zeros(len(times), bool)
        for (name, run), is_far in zip(cases.items(), far, strict=True):
            times[name].append(float("nan") if is_far and name is not None else run(DUEL_TURN))
    return np.array(list(times.values()))


def _far_behind(turns: np.ndarray) -> np.ndarray:
    """Return which cases were `BEHIND` times as slow as the fastest of the round in each of the first ones."""
    first = turns[:, :FEWEST_ROUNDS]
    far: np.ndarray = (first > BEHIND * first.min(axis=0)).all(axis=1)
    return far


def interleaved_medians(turns: np.ndarray) -> np.ndarray:
    """Return typical seconds of each case, a row of turns, of which those of a column were taken one after another.

    NaN is no turn. The pace of a column is that of the cases that have all turns, where there are any: it must not
    change because a slow case left.

    Examples
    --------
    >>> interleaved_medians(np.array([[1.0, 2.0, 2.0], [2.0, 2.0, 4.0]])).tolist()  # not 2 and 2
    [1.4142135623730951, 2.8284271247461903]
    >>> interleaved_medians(np.array([[1.0, 1.0, 2.0], [3.0, 3.0, np.nan]])).tolist()
    [1.0, 3.0]
    """
    return np.nanmedian(at_one_pace(turns), axis=1)


def at_one_pace(turns: np.ndarray) -> np.ndarray:
    """Return the turns as they would be if the machine were as fast in every column as it usually is."""
    is_timed = np.isfinite(turns)
    whole = is_timed.all(axis=1, keepdims=True)
    is_timed = is_timed & whole if whole.any() else is_timed
    logs = np.log(turns, out=np.zeros_like(turns), where=is_timed)
    pace = np.exp(logs.sum(axis=0) / np.maximum(is_timed.sum(axis=0), 1))
    return turns / (pace / np.median(pace))


def reason(error: BaseException) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:300]


__all__ = [
    "Measurement",
    "at_one_pace",
    "at_pace",
    "burst",
    "duel",
    "interleaved_medians",
    "lower_quartile",
    "reason",
    "summary",
    "turns",
    "typical",
]
