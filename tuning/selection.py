# SPDX-License-Identifier: Apache-2.0
"""Final selection: return a tuned kernel only if it is not slower than the baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
from scipy.special import bdtr

from sparsetir.errors import SparseTIRError
from sparsetir.schedules import Choices
from sparsetir.tuning import measure
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.measure import Timed, at_one_pace
from sparsetir.tuning.records import CHOICES, FORMAT, KEYS, KNOBS, Database, Key, Record
from sparsetir.tuning.space import Candidate

# Final selection: which kernel a search returns, so that it is not slower than the untuned baselines.
#
# The untuned kernel and what ``sparsetir.build(program, expected_calls=1000)`` makes are the *incumbents*. Another
# kernel takes their place only if it is clearly faster, and not much slower than any of them. Where the machine is so
# noisy that the usual number of rounds does not tell, there are more of them; where these do not tell either, the
# incumbent that was faster stays.


BEHIND = 1.03  # times the time of an incumbent: what the result may need at most
DOUBT = 0.05  # how likely it may be that it needs more

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


def contest(
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
    # A contestant that only looks faster, and is not yet sure to be, may still turn out to be.
    is_sure = clear[:1] == able[:1] and _is_level(costs, winner, standing)
    return Outcome({name: float(np.median(turn_times)) for name, turn_times in times.items()}, winner, is_sure)


def _is_level(costs: Costs, name: Name, incumbents: Sequence[Name]) -> bool:
    """Return whether a contestant is certainly not much slower than any of the incumbents."""
    return all(at_most(costs[name] / costs[incumbent]) <= BEHIND for incumbent in incumbents if incumbent != name)


def at_most(ratios: np.ndarray) -> float:
    """Return an upper confidence bound of the median of ratios, wrong with probability `DOUBT`, for any distribution.

    Half of the draws lie above the median: that only few do is unlikely (the sign test). The largest one where there
    are too few.

    Examples
    --------
    >>> at_most(np.array([1.0, 1.1, 0.9, 1.2, 1.0])), at_most(np.array([1.0, 1.1, 0.9, 1.0, 1.0, 1.0, 9.0, 1.0]))
    (1.2, 1.1)
    """
    ordered = np.sort(ratios)
    likely = bdtr(np.arange(len(ordered)), len(ordered), 0.5)  # that no more than so many lie above
    return float(ordered[len(ordered) - max(int(np.sum(likely <= DOUBT)), 1)])


# The last comparison of a search: what its result rests on, and what later processes build again.


COMPARISON = "comparison"  # a line that has it is no trial
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
        raise ValueError(f"expected a positive number, found {value!r}")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number, found {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r}")
    return value


def note(records: Database, key: Key, comparison: Comparison) -> None:
    """Add a comparison to a database."""
    records.add({"format": FORMAT, **asdict(key), COMPARISON: comparison.as_dict()})


def compared(records: Database, text: str = "") -> Iterator[tuple[Key, Comparison]]:
    """Yield every comparison in a database with its key, in the order of the file; of the lines that contain `text`."""
    for line in records.lines(text.encode()):
        if line.get("format") != FORMAT or COMPARISON not in line or not all(name in line for name in KEYS):
            continue
        comparison = Comparison.of(line)
        if comparison is not None:
            yield Key(**{name: line[name] for name in KEYS}), comparison


def last_of(records: Database, key: Key) -> Comparison | None:
    """Return what the last search for just these arguments ended with."""
    comparisons = [comparison for recorded_key, comparison in compared(records, key.pattern) if recorded_key == key]
    return comparisons[-1] if comparisons else None


__all__ = [
    "BEHIND",
    "WORTH",
    "Comparison",
    "Outcome",
    "at_most",
    "compared",
    "contest",
    "judged",
    "last_of",
    "note",
    "rescaled",
    "winner",
]
