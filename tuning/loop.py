# SPDX-License-Identifier: Apache-2.0
"""Trial loop of a search, until the budget is spent, and final selection of a kernel not slower than the baselines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from types import TracebackType
from typing import Any, Protocol, TextIO

import numpy as np
from scipy.special import bdtr

from sparsetir.errors import SparseTIRError
from sparsetir.schedules import Choices
from sparsetir.tuning import measure
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.measure import Measurement, Timed, at_one_pace
from sparsetir.tuning.records import CHOICES, FORMAT, KNOBS, Database, Key, Record, key_of
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


class CandidateSource(Protocol):
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

    def add(self, candidate: Candidate, fixed: dict[str, int], measurement: Measurement, **facts: Any) -> None:
        """Note a measurement."""
        format_text = None if candidate.format is None else repr(candidate.format)
        times = (measurement.seconds, measurement.median, measurement.spread, measurement.error)
        facts |= {"place": measurement.place, "load": measurement.load}
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


@dataclass
class TrialLoop:
    """Candidates are asked for, measured, noted and told, a batch at a time.

    Parameters
    ----------
    search : CandidateSource
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

    search: CandidateSource
    measure: Measure
    log: Log
    fixed: dict[str, int] = field(default_factory=dict)
    conversion: Callable[[Any], float] = lambda _format: 0.0
    cost: Cost | None = None
    slots: int = 0

    def explore(self, chance: Callable[[], float] | None = None) -> None:
        """Go on until the budget is spent, the space is exhausted or little better is left.

        `chance` tells how likely it is that something clearly better was not tried yet.
        """
        log, stop_probability = self.log, self.log.budget.stop_probability
        while not log.budget.is_spent(log.history) and self.step():
            if stop_probability is not None and chance is not None and chance() < stop_probability:
                return

    def step(self) -> bool:
        """Ask for a batch and measure it; return whether there was any."""
        asked = self.search.ask(self.slots) if self.slots else self.search.ask()
        batch = asked[: max(1, self.log.budget.trials - len(self.log.history))]
        for _ in self.measured(batch):
            if self.log.budget.is_spent(self.log.history):
                break
        return bool(batch)

    def measured(self, batch: list[Candidate]) -> Iterator[Candidate]:
        """Measure a batch, wherever it came from, and yield each candidate when that is done."""
        predicted = dict(zip(batch, self.search.predicted(batch), strict=True))
        for candidate, measurement in self.measure(batch) if batch else ():
            seconds = self.conversion(candidate.format) if measurement.error is None else 0.0
            self.log.add(candidate, self.fixed, measurement, predicted=predicted.get(candidate), conversion=seconds)
            self.search.tell(candidate, measurement.seconds if self.cost is None else self.cost(self.log.history[-1]))
            yield candidate


# ------------------------------------------------------------------------------------- final selection


# Final selection: which kernel a search returns, so that it is not slower than the untuned baselines.
#
# The untuned kernel and what ``sparsetir.build(program, expected_calls=1000)`` makes are the *incumbents*. Another
# kernel replaces them only if it is clearly faster than the best of them, and not much slower than any. Where noise
# leaves the default number of rounds undecided, more rounds are timed; where these are undecided, too, the faster
# incumbent stays.


BEHIND = 1.03  # upper limit of the time of the result, relative to an incumbent
DOUBT = 0.05  # probability that the limit is exceeded

Name = Candidate | None
Costs = Mapping[Name, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a contest.

    Parameters
    ----------
    times : mapping
        Seconds of a call of each contestant.
    chosen : Candidate or None
        The one to return; None is the untuned kernel.
    is_sure : bool
        Whether further rounds are unlikely to change it.
    """

    times: dict[Name, float]
    chosen: Name
    is_sure: bool = True


def select_final(
    cases: Mapping[Name, Timed], incumbents: Sequence[Name] = (None,), extra: Mapping[Candidate, float] | None = None
) -> Outcome:
    """Time kernels in turn until it is clear which one to return.

    Parameters
    ----------
    cases : mapping of callable
        See `sparsetir.tuning.measure.turns`.
    incumbents : sequence of Candidate or None
        Those of the cases that the result must not be behind, the one to prefer first.
    extra : mapping of Candidate to float, optional
        Seconds by which a call costs more than it takes.
    """
    names = list(cases)

    def outcome(times: np.ndarray) -> Outcome:
        return judged(dict(zip(names, at_one_pace(times), strict=True)), incumbents, extra)

    return outcome(measure.turns(cases, enough=lambda times: outcome(times).is_sure))


def judged(
    times: Costs, incumbents: Sequence[Name] = (None,), extra: Mapping[Candidate, float] | None = None
) -> Outcome:
    """Return the outcome of turns that were taken, those of one round at the same place in each array.

    Examples
    --------
    >>> from sparsetir.schedules import Choices
    >>> quick, lucky = Candidate(Choices(tile=8)), Candidate(Choices(tile=16))
    >>> times = {None: [1.0, 1.0, 1.0], quick: [0.6, 0.6, 0.6], lucky: [0.2, 1.2, 0.2]}
    >>> judged({name: np.array(each) for name, each in times.items()}).chosen == quick
    True
    """
    more = {} if extra is None else extra
    costs = {
        name: turn_times + (more.get(name, 0.0) if name is not None else 0.0) for name, turn_times in times.items()
    }
    typical = {name: float(np.median(turn_times)) for name, turn_times in costs.items()}
    standing = [name for name in incumbents if np.isfinite(typical.get(name, np.inf))] or [None]
    best = min(standing, key=lambda name: typical[name])
    clear = [name for name in costs if name not in standing and typical[name] <= WORTH * typical[best]]
    clear.sort(key=lambda name: (typical[name], () if name is None else name.key))
    able = [name for name in clear if _is_level(costs, name, standing)]
    winner = able[0] if able else best
    # Undecided if a candidate has a lower median, but is not significantly faster: further rounds may decide.
    is_sure = clear[:1] == able[:1] and _is_level(costs, winner, standing)
    return Outcome({name: float(np.median(turn_times)) for name, turn_times in times.items()}, winner, is_sure)


def _is_level(costs: Costs, name: Name, incumbents: Sequence[Name]) -> bool:
    """Return whether a candidate is not much slower than any of the incumbents, with confidence."""
    return all(at_most(costs[name] / costs[incumbent]) <= BEHIND for incumbent in incumbents if incumbent != name)


def at_most(ratios: np.ndarray) -> float:
    """Return an upper confidence bound of the median of ratios, wrong with probability `DOUBT`, for any distribution.

    Half of the draws lie above the median, and only few of them with a small probability (the sign test). With too few
    draws the bound is the largest one.

    Examples
    --------
    >>> at_most(np.array([1.0, 1.1, 0.9, 1.2, 1.0])), at_most(np.array([1.0, 1.1, 0.9, 1.0, 1.0, 1.0, 9.0, 1.0]))
    (1.2, 1.1)
    """
    ordered = np.sort(ratios)
    likely = bdtr(np.arange(len(ordered)), len(ordered), 0.5)  # probability that at most so many lie above the median
    return float(ordered[len(ordered) - max(int(np.sum(likely <= DOUBT)), 1)])


# The last comparison of a search, from which later processes build its result.


COMPARISON = "comparison"  # the key of lines that are comparisons, not trials
# A tuned kernel takes the untuned one's place if it needs at most this share of its time.
WORTH = 0.98


def winner(times: Mapping[Candidate | None, float]) -> Candidate | None:
    """Return the fastest; None, the untuned kernel, if nothing is clearly faster."""
    tuned = [c for c in times if c is not None]
    best = min(tuned, key=lambda c: (times[c], c.key), default=None)
    return best if best is not None and times[best] <= WORTH * times[None] else None


def rescaled(
    times: Mapping[Candidate | None, float], confirmed: Mapping[Candidate | None, float], best: Candidate
) -> dict[Candidate | None, float]:
    """Return one set of times: those of the confirmation, others relative to the winner or to the untuned kernel.

    Examples
    --------
    >>> first, second = Candidate(Choices(tile=8)), Candidate(Choices(tile=16))
    >>> list(rescaled({None: 4.0, first: 1.0, second: 2.0}, {None: 5.0, first: 2.0}, first).values())
    [5.0, 2.0, 4.0]
    """
    by = best if isfinite(times.get(best, inf)) and isfinite(confirmed[best]) else None
    scale = confirmed[by] / times[by]
    return {**{c: seconds * scale for c, seconds in times.items()}, **confirmed}


@dataclass(frozen=True)
class Comparison:
    """The fastest candidates of a search, timed in turn with the untuned kernel.

    Parameters
    ----------
    untuned : float
        Seconds of the untuned kernel.
    records : tuple of Record
        The candidates with their seconds, interleaved with it.
    chosen : Candidate or None
        Whose kernel the search returned; None is the untuned one.
    amortize_over : float, optional
        How many calls a conversion was shared among.
    argument : str, optional
        The sparse argument that formats are for.
    """

    untuned: float
    records: tuple[Record, ...]
    chosen: Candidate | None
    amortize_over: float | None = None
    argument: str | None = None

    @property
    def best(self) -> Record | None:
        """The record of the kernel that was returned; None for the untuned one."""
        return next((r for r in self.records if self.chosen is not None and r.candidate == self.chosen), None)

    def seconds(self, record: Record) -> float | None:
        """Return the time of a trial's candidate; None if it was not compared again."""
        return next((r.seconds for r in self.records if _alike(r, record)), None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        best = self.best
        return {
            "untuned": self.untuned,
            "candidates": [_line(record) for record in self.records],
            "chosen": None if best is None else self.records.index(best),
            "amortize_over": self.amortize_over,
            "argument": self.argument,
        }

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Comparison | None:
        """Return the comparison in a line of a database; None if another version wrote it."""
        try:
            facts = line[COMPARISON]
            records = tuple(_record(entry) for entry in facts["candidates"])
            winner = None if facts["chosen"] is None else records[_whole(facts["chosen"])].candidate
            share = None if facts["amortize_over"] is None else _positive(facts["amortize_over"])
            argument = None if facts["argument"] is None else _text(facts["argument"])
            return cls(_positive(facts["untuned"]), records, winner, share, argument)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, SparseTIRError):
            return None


def _alike(first: Record, second: Record) -> bool:
    return (first.choices, first.stored_as, first.fixed) == (second.choices, second.stored_as, second.fixed)


def _line(record: Record) -> dict[str, Any]:
    kind = KNOBS if isinstance(record.choices, Config) else CHOICES
    facts = {name: getattr(record, name) for name in ("stored_as", "fixed", "seconds", "conversion")}
    return {kind: record.choices.as_dict(), **facts}


def _record(line: Mapping[str, Any]) -> Record:
    choices = Config.of(dict(line[KNOBS])) if KNOBS in line else Choices(**line[CHOICES])
    if isinstance(choices, Choices):
        for value in choices.as_dict().values():
            _whole(value)
    stored_as = None if line["stored_as"] is None else _text(line["stored_as"])
    fixed = {_text(name): _whole(value) for name, value in line["fixed"].items()}
    conversion = 0.0 if line["conversion"] == 0 else _positive(line["conversion"])
    record = Record(choices, stored_as, fixed, _positive(line["seconds"]), conversion=conversion, reused=True)
    hash(record.candidate)  # raises where a value or the format is none
    return record


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"expected a positive number, got {value!r}")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number, got {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r}")
    return value


def note(records: Database, key: Key, comparison: Comparison) -> None:
    """Add a comparison to a database."""
    records.add({"format": FORMAT, **asdict(key), COMPARISON: comparison.as_dict()})


def compared(records: Database, text: str = "") -> Iterator[tuple[Key, Comparison]]:
    """Yield every comparison in a database with its key, in the order of the file; of the lines that contain `text`."""
    for line in records.lines(text.encode()):
        if line.get("format") != FORMAT or COMPARISON not in line:
            continue
        key, comparison = key_of(line), Comparison.of(line)
        if key is not None and comparison is not None:
            yield key, comparison


def last_of(records: Database, key: Key) -> Comparison | None:
    """Return the final comparison of the last search for exactly these arguments."""
    comparisons = [comparison for recorded_key, comparison in compared(records, key.pattern) if recorded_key == key]
    return comparisons[-1] if comparisons else None


__all__ = [
    "BEHIND",
    "INTERVAL",
    "WIDTH",
    "WORTH",
    "Budget",
    "CandidateSource",
    "Comparison",
    "Cost",
    "Log",
    "Measure",
    "Outcome",
    "Progress",
    "TrialLoop",
    "at_most",
    "compared",
    "in_notebook",
    "is_untuned",
    "judged",
    "last_of",
    "note",
    "rescaled",
    "select_final",
    "stale",
    "winner",
    "with_best",
]
