# SPDX-License-Identifier: Apache-2.0
"""Trial loop of a search: measure candidates until the budget is spent, with a progress line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, TextIO

from sparsetir.schedules import Choices
from sparsetir.tuning.measure import Measurement
from sparsetir.tuning.records import Record
from sparsetir.tuning.space import Candidate

# Progress line of a search on stderr.


WIDTH = 24
INTERVAL = 0.1


class Progress:
    """A bar, the best time so far and the pace.

    Parameters
    ----------
    budget : Budget
        The bar shows how much of the trials is done, or of the seconds where these will be over first.
    shown : bool, optional
        By default only on a terminal and in a notebook.
    flops : int, optional
        Of one call, for GFLOP/s.
    stream : file, optional
        stderr by default.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        shown: bool | None = None,
        flops: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.budget, self.flops = budget, flops
        self.stream = sys.stderr if stream is None else stream
        self.shown = (self.stream.isatty() or in_notebook()) if shown is None else shown
        self.start = self.last = time.perf_counter()
        self.length = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown and self.length:
            self.stream.write("\n")
            self.stream.flush()

    def say(self, text: str) -> None:
        """Show what goes on before and after the trials."""
        if self.shown:
            self._show(f"tuning: {text}")

    def update(self, trials: int, last: Record, *, reused: int = 0) -> None:
        """Show the state after `trials` trials, the last one given, of which `reused` were not measured now."""
        now = time.perf_counter()
        if not self.shown or (now - self.last < INTERVAL and trials < self.budget.trials and trials > reused + 1):
            return
        self.last = now
        self._show(self.text(trials, last, reused, now - self.start))

    def _show(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self.length))
        self.stream.flush()
        self.length = len(text)

    def text(self, trials: int, last: Record, reused: int, elapsed: float) -> str:
        """Format the progress line. The bar is as far as the count behind it."""
        total, seconds = max(self.budget.trials, 1), self.budget.seconds
        done, count = trials / total, f"{trials}/{total}"
        spent = self.budget.elapsed
        if seconds is not None and spent / seconds > done:
            done, count = spent / seconds, f"{min(spent, seconds):.1f}/{seconds:.1f} s  {trials} trials"
        full = round(WIDTH * min(1.0, done))
        parts = [f"tuning [{'#' * full}{'.' * (WIDTH - full)}] {count}"]
        if last.best is not None:
            parts.append(f"best {last.best * 1e3:.4g} ms")
            parts += [f"{self.flops / last.best / 1e9:.1f} GFLOP/s"] if self.flops else []
        if last.predicted is not None and last.seconds is not None:
            parts.append(f"predicted {last.predicted * 1e3:.4g}, measured {last.seconds * 1e3:.4g}")
        return "  ".join([*parts, f"{(trials - reused) / max(elapsed, 1e-9):.1f} trials/s"])


def in_notebook() -> bool:
    """Return whether this is a Jupyter kernel, whose stderr is no terminal and is shown all the same."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules


# Trial loop: trials one after another until a budget is spent.


Measure = Callable[[list[Candidate]], Iterable[tuple[Candidate, Measurement]]]
Cost = Callable[[Record], float]


class Asks(Protocol):
    """Source of the candidates to measure, such as `sparsetir.tuning.search.Search`."""

    seed: int

    def ask(self, count: int = ..., /) -> list[Candidate]:
        """Return the next few, or so many."""

    def predicted(self, candidates: Sequence[Candidate], /) -> Iterable[float | None]:
        """Return seconds that are expected of each, where any are."""

    def tell(self, candidate: Candidate, seconds: float | None, /) -> None:
        """Take what was measured."""


@dataclass
class Budget:
    """Stopping criteria of a search.

    Parameters
    ----------
    trials : int
        Counting those read from a database.
    seconds : float, optional
        From when the budget was made.
    patience : int, optional
        Trials in a row without a better one.
    stop_probability : float, optional
        How unlikely it is in the end that something clearly better was not tried.
    """

    trials: int
    seconds: float | None = None
    patience: int | None = None
    stop_probability: float | None = None

    def __post_init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def is_spent(self, history: list[Record]) -> bool:
        """Return whether no further trial may begin; the first always may."""
        if not history:
            return False
        if len(history) >= self.trials or (self.seconds is not None and self.elapsed >= self.seconds):
            return True
        return self.patience is not None and stale(history) >= self.patience


def stale(history: list[Record]) -> int:
    """Return trials since the best one."""
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
        format_text = None if candidate.format is None else repr(candidate.format)
        times = (found.seconds, found.median, found.spread, found.error)
        facts |= {"place": found.place, "load": found.load}
        elapsed = self.before + self.budget.elapsed
        record = Record(candidate.choices, format_text, fixed, *times, elapsed=elapsed, seed=self.seed, **facts)
        self.history.append(with_best(record, self.history))
        self.on_record(self.history[-1])


def is_untuned(record: Record) -> bool:
    """Return whether it is of the kernel that is built without tuning."""
    return record.choices == Choices() and not record.fixed and record.stored_as is None


def with_best(record: Record, history: list[Record]) -> Record:
    """Return `record` with the best time so far."""
    times = [r.seconds for r in (*history, record) if r.seconds is not None]
    return replace(record, best=min(times, default=None))


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
    """Ask, measure and tell until the budget is spent, the space is exhausted or little better is left.

    See `step`; `chance` tells how likely it is that something clearly better was not tried yet.
    """
    settings: dict[str, Any] = {"fixed": fixed, "conversion": conversion, "cost": cost, "slots": slots}
    stop_probability = log.budget.stop_probability
    while not log.budget.is_spent(log.history) and step(search, measure, log, **settings):
        if stop_probability is not None and chance is not None and chance() < stop_probability:
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
    """Measure a batch, wherever it came from, and tell of each candidate when that is done, as `step` does."""
    predicted = dict(zip(batch, search.predicted(batch), strict=True))
    for candidate, measurement in measure(batch) if batch else ():
        seconds = conversion(candidate.format) if measurement.error is None else 0.0
        log.add(candidate, fixed, measurement, predicted=predicted.get(candidate), conversion=seconds)
        search.tell(candidate, measurement.seconds if cost is None else cost(log.history[-1]))
        yield candidate
