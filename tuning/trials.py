# SPDX-License-Identifier: Apache-2.0
"""Trials one after another until a budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sparsetir.schedules import Choices
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.database import Record
from sparsetir.tuning.measure import Measurement

Measure = Callable[[list[Candidate]], Iterable[tuple[Candidate, Measurement]]]
Cost = Callable[[Record], float]


class Asks(Protocol):
    """What decides which candidates are measured, such as `sparsetir.tuning.search.Search`."""

    seed: int

    def ask(self, count: int = ..., /) -> list[Candidate]:
        """The next few, or so many."""

    def predicted(self, candidates: Sequence[Candidate], /) -> Iterable[float | None]:
        """Seconds that are expected of each, where any are."""

    def tell(self, candidate: Candidate, seconds: float | None, /) -> None:
        """What was measured."""


@dataclass
class Budget:
    """When a search ends.

    Parameters
    ----------
    trials : int
        Counting those read from a database.
    seconds : float, optional
        From when the budget was made.
    patience : int, optional
        Trials in a row without a better one.
    until : float, optional
        How unlikely it is in the end that something clearly better was not tried.
    """

    trials: int
    seconds: float | None = None
    patience: int | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def is_spent(self, history: list[Record]) -> bool:
        """Whether no further trial may begin; the first always may."""
        if not history:
            return False
        if len(history) >= self.trials or (self.seconds is not None and self.elapsed >= self.seconds):
            return True
        return self.patience is not None and stale(history) >= self.patience


def stale(history: list[Record]) -> int:
    """Trials since the best one."""
    times = [float("inf") if record.seconds is None else record.seconds for record in history]
    return len(times) - 1 - times.index(min(times))


@dataclass
class Log:
    """The trials of a search in order.

    Parameters
    ----------
    budget : Budget
    seed : int
        Noted in the records.
    history : list of Record
        Trials read from a database, to begin with.
    on_record : callable
        Called with each new record.
    """

    budget: Budget
    seed: int
    history: list[Record]
    on_record: Callable[[Record], None] = lambda _record: None

    def __post_init__(self) -> None:
        self.before = max((record.elapsed for record in self.history), default=0.0)

    def add(self, candidate: Candidate, fixed: dict[str, int], found: Measurement, **facts: Any) -> None:
        """Note a measurement."""
        named = None if candidate.format is None else repr(candidate.format)
        times = (found.seconds, found.median, found.spread, found.error)
        facts |= {"place": found.place, "load": found.load}
        elapsed = self.before + self.budget.elapsed
        record = Record(candidate.choices, named, fixed, *times, elapsed=elapsed, seed=self.seed, **facts)
        self.history.append(with_best(record, self.history))
        self.on_record(self.history[-1])


def is_untuned(record: Record) -> bool:
    """Whether it is of the kernel that is built without tuning."""
    return record.choices == Choices() and not record.fixed and record.stored_as is None


def with_best(record: Record, history: list[Record]) -> Record:
    """`record` with the best time so far."""
    known = [r.seconds for r in (*history, record) if r.seconds is not None]
    return replace(record, best=min(known, default=None))


def explore(
    search: Asks,
    measure: Measure,
    log: Log,
    *,
    fixed: dict[str, int],
    conversion: Callable[[Any], float] = lambda _format: 0.0,
    cost: Cost | None = None,
    chance: Callable[[], float] | None = None,
    slots: int = 0,
) -> None:
    """Ask, measure and tell until the budget is spent, the space is exhausted or hardly anything better is left.

    See `step`; `chance` tells how likely it is that something clearly better was not tried yet.
    """
    how: dict[str, Any] = {"fixed": fixed, "conversion": conversion, "cost": cost, "slots": slots}
    until = log.budget.until
    while not log.budget.is_spent(log.history) and step(search, measure, log, **how):
        if until is not None and chance is not None and chance() < until:
            return


def step(
    search: Asks,
    measure: Measure,
    log: Log,
    *,
    fixed: dict[str, int],
    conversion: Callable[[Any], float] = lambda _format: 0.0,
    cost: Cost | None = None,
    slots: int = 0,
) -> bool:
    """Ask for a batch, measure and tell; whether there was any.

    Parameters
    ----------
    search : Asks
        It was told the trials that the log begins with.
    measure : callable
        Yields a measurement for each candidate of a list.
    log : Log
    fixed : dict of str to int
        Sizes that are compiled into the candidates.
    conversion : callable
        Seconds that storing the argument in a format took.
    cost : callable, optional
        What is searched for the least of; by default the seconds of a call.
    slots : int
        How many workers there are, if more than the search asks for by itself.
    """
    batch = (search.ask(slots) if slots else search.ask())[: max(1, log.budget.trials - len(log.history))]
    for _ in measured(batch, search, measure, log, fixed=fixed, conversion=conversion, cost=cost):
        if log.budget.is_spent(log.history):
            break
    return bool(batch)


def measured(
    batch: list[Candidate],
    search: Asks,
    measure: Measure,
    log: Log,
    *,
    fixed: dict[str, int],
    conversion: Callable[[Any], float] = lambda _format: 0.0,
    cost: Cost | None = None,
) -> Iterator[Candidate]:
    """Measure a batch, whoever asked for it, and tell; each candidate when that is done. See `step`."""
    predicted = dict(zip(batch, search.predicted(batch), strict=True))
    for candidate, found in measure(batch) if batch else ():
        seconds = conversion(candidate.format) if found.error is None else 0.0
        log.add(candidate, fixed, found, predicted=predicted.get(candidate), conversion=seconds)
        search.tell(candidate, found.seconds if cost is None else cost(log.history[-1]))
        yield candidate
