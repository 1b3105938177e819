# SPDX-License-Identifier: Apache-2.0
"""Compile candidates and time them on the arguments of one call, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sparsetir.formats.format import Format
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.forms import Forms
from sparsetir.tuning.reference import Reference
from sparsetir.tuning.workload import Call

BURST_SECONDS = 0.015
# Two calls of a candidate this many times slower than the best are enough.
HOPELESS = 3.0
ROUNDS, FEWEST_ROUNDS, DUEL_SECONDS = 5, 2, 2.0


@dataclass(frozen=True)
class Measurement:
    """Seconds of a candidate, or the reason why there are none."""

    seconds: float | None = None
    median: float | None = None
    spread: float | None = None
    error: str | None = None


def burst(call: Call, seconds: float, *, hopeless: float = float("inf")) -> list[float]:
    """Times of consecutive calls for about `seconds`, at least two; no more if both took `hopeless` seconds."""
    samples: list[float] = []
    clock = time.perf_counter
    end = clock() + seconds
    while len(samples) < 2 or clock() < end:
        start = clock()
        call()
        samples.append(clock() - start)
        if len(samples) == 2 and min(samples) >= hopeless:
            break
    return samples


def summary(samples: list[float]) -> Measurement:
    """The fastest call, the median, and how far the quartiles are apart."""
    ordered = sorted(samples)
    middle, count = median(ordered), len(ordered)
    return Measurement(ordered[0], middle, (ordered[3 * count // 4] - ordered[count // 4]) / middle)


def duel(cases: Mapping[Any, Call], *, seconds: float = 0.02) -> dict[Any, float]:
    """Time near ties: all in turn, several rounds (fewer of slow calls), so that a busy machine favours none.

    Returns
    -------
    dict of float
        For each case its fastest call.
    """
    fastest: dict[Any, float] = dict.fromkeys(cases, float("inf"))
    end = time.perf_counter() + DUEL_SECONDS
    for turn in range(ROUNDS):
        if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for name, call in cases.items():
            fastest[name] = min(fastest[name], *burst(call, seconds))
    return fastest


def reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:300]


class Measurer:
    """Measures candidates of a program.

    Parameters
    ----------
    forms : Forms
        Of the program on the arguments of one call.
    reference : Reference
        What a candidate must compute.
    """

    def __init__(self, forms: Forms, reference: Reference) -> None:
        self.forms, self.reference = forms, reference
        self.best = float("inf")

    def __call__(self, batch: list[Candidate]) -> Iterator[tuple[Candidate, Measurement]]:
        """Compile, check and time candidates one after another: LLVM allows no two compilations at a time."""
        for candidate in batch:
            call = self.call(candidate)
            yield candidate, call if isinstance(call, Measurement) else self.measured(call, candidate.format)

    def call(self, candidate: Candidate) -> Call | Measurement:
        """A call of a candidate, or why there is none."""
        # Whatever a candidate does wrong costs that candidate, not the search.
        try:
            return self.forms(candidate.format).call(candidate.choices)
        except Exception as error:
            return Measurement(error=reason(error))

    def measured(self, call: Call, format: Format | None = None) -> Measurement:
        """Check what a candidate computes, then time it."""
        try:
            wrong = self.reference.disagreement(self.forms(format).workload.fresh(call))
            if wrong is not None:
                return Measurement(error=f"wrong result: {wrong}")
            samples = burst(call, BURST_SECONDS, hopeless=HOPELESS * self.best)
        except Exception as error:
            return Measurement(error=reason(error))
        self.best = min(self.best, *samples)
        return summary(samples)
