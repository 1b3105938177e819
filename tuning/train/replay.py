# SPDX-License-Identifier: Apache-2.0
"""Searches over recorded trials, without running anything: to compare strategies, the same on every machine.

A case is every record of one key in a database; a search may ask for those candidates and for no others. Record one
with ``tune_sparse(..., strategy="random", max_trials=200, database="space.jsonl")``;
`python -m sparsetir.tuning.train.replay space.jsonl` prints how near to the best of each case the strategies come
after a number of trials.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import SparseTIRError
from sparsetir.formats.format import Format
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.model import Model
from sparsetir.tuning.records import Recording, load
from sparsetir.tuning.search import FASTER, STRATEGIES, Search
from sparsetir.tuning.space import Candidate, Space, Values
from sparsetir.workloads.plot import markdown

BUDGETS, SEEDS = (1, 5, 16, 64), 5

Priors = Callable[[Recording], "Model | None"]


class Recorded(Space):
    """The candidates of a case; a draw that was not recorded becomes the most similar one that was."""

    def __init__(self, case: Recording) -> None:
        self.case = case
        self.listed = list(case.seconds)
        self.width = max(len(c.key) for c in self.listed)
        self.keys = np.array([self._texts(c) for c in self.listed])
        formats = list(dict.fromkeys(c.format for c in self.listed))
        # A search begins with what suits its arguments.
        first = next((c.choices for c in self.listed if c.format is None), None)
        super().__init__(formats, self._open, Config() if isinstance(self.listed[0].choices, Config) else first)

    def _texts(self, candidate: Candidate) -> list[str]:
        """Return the sort key of a candidate; formats may have different numbers of knobs."""
        texts = [str(part) for part in candidate.key]
        return [*texts, *[""] * (self.width - len(texts))]

    def _open(self, format: Format | None) -> Values | None:
        """Return the values that the recorded candidates of a format have."""
        values_of = [c.choices.as_dict() for c in self.listed if c.format == format]
        if not values_of:
            return None
        options = {name: list(dict.fromkeys(chosen[name] for chosen in values_of)) for name in values_of[0]}
        if isinstance(self.base, Config):  # as they are: a split has no order, and a Config holds all of its knobs
            return {name: tuple(values) for name, values in options.items()}
        return {name: tuple(sorted(values)) for name, values in options.items() if len(values) > 1}

    def nearest(self, candidate: Candidate) -> Candidate:
        """Return the recorded candidate that differs in the fewest choices."""
        if candidate in self.case.seconds:
            return candidate
        differ = self.keys != np.array(self._texts(candidate))
        weights = np.array([self.width, *[1] * (self.width - 1)])  # the format before all choices
        return self.listed[int(np.argmin(differ @ weights))]

    def first(self) -> Iterator[Candidate]:
        return iter(dict.fromkeys(self.nearest(c) for c in super().first()))

    def introduced(self) -> Iterator[Candidate]:
        return self.first()

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.listed)

    def __contains__(self, candidate: Candidate) -> bool:
        return candidate in self.case.seconds

    def sample(self, rng: np.random.Generator, formats: Sequence[Format | None] = ()) -> Candidate:
        among = [c for c in self.listed if c.format in formats] if formats else self.listed
        return among[int(rng.integers(len(among)))]

    def outline(self, rng: np.random.Generator, count: int) -> Iterator[Candidate]:
        return iter(self.listed)

    def settle(self, candidate: Candidate) -> Candidate | None:
        return self.nearest(candidate)

    def mutate(
        self, candidate: Candidate, rng: np.random.Generator, formats: Sequence[Format | None] | None = None
    ) -> Candidate:
        return self.nearest(super().mutate(candidate, rng, formats))

    def crossover(self, one: Candidate, other: Candidate, rng: np.random.Generator) -> Candidate:
        return self.nearest(super().crossover(one, other, rng))

    def steps(self, candidate: Candidate) -> list[Candidate]:
        return [c for c in super().steps(candidate) if c in self.case.seconds]


def replayed(case: Recording, strategy: str, seed: int, trials: int, prior: Model | None = None) -> list[float]:
    """Return the share of the best time that a search has reached after each trial."""
    rows = lambda candidates: np.array([case.features[c] for c in candidates])  # noqa: E731
    search = Search(Recorded(case), features=rows, strategy=strategy, seed=seed, prior=prior)
    reached: list[float] = []
    best = float("inf")
    while len(reached) < trials:
        batch = search.ask()[: trials - len(reached)]
        if not batch:
            break
        for candidate in batch:
            seconds = case.seconds[candidate]
            search.tell(candidate, seconds if np.isfinite(seconds) else None)
            best = min(best, seconds)
            reached.append(case.best / best)
    return [*reached, *[reached[-1]] * (trials - len(reached))]


@dataclass(frozen=True)
class Stopped:
    """A search that ended by itself.

    Parameters
    ----------
    trials : int
    reached : float
        The best time of the case over that of the search.
    missed : bool
        Whether something that was not tried is more than `FASTER` times faster.
    """

    trials: int
    reached: float
    missed: bool


def stopped(case: Recording, seed: int, until: float, prior: Model | None = None) -> Stopped:
    """Return a search over recorded trials that ends when it holds better ones to be so unlikely, or has tried all."""
    rows = lambda candidates: np.array([case.features[c] for c in candidates])  # noqa: E731
    search = Search(Recorded(case), features=rows, strategy="guided", seed=seed, prior=prior)
    while len(search.told) < len(case.seconds) and (batch := search.ask()):
        for candidate in batch:
            seconds = case.seconds[candidate]
            search.tell(candidate, seconds if np.isfinite(seconds) else None)
        if search.chance() < until:
            break
    best = min(search.told.values())
    return Stopped(len(search.told), case.best / best, best > FASTER * case.best)


def stops(cases: Sequence[Recording], thresholds: Sequence[float], seeds: int, prior: Priors) -> list[list[str]]:
    """Return the outcome of searches that end by themselves, for some thresholds, as the cells of a table."""
    rows = [["ends when better is as unlikely as", "trials, of all", "missed more than 3 %", "regret", "worst"]]
    for until in thresholds:
        runs = [(case, stopped(case, seed, until, prior(case))) for case in cases for seed in range(seeds)]
        used = np.mean([stop.trials / len(case.seconds) for case, stop in runs])
        missed, regret = np.mean([stop.missed for _, stop in runs]), 1 - np.mean([stop.reached for _, stop in runs])
        worst = min(stop.reached for _, stop in runs)
        rows.append([f"{until:g}", f"{used:.0%}", f"{missed:.1%}", f"{regret:.2%}", f"{worst:.2f}"])
    return rows


def runs_of(
    cases: Sequence[Recording], strategy: str, trials: int, seeds: int, prior: Priors | None = None
) -> np.ndarray:
    """Return `replayed`, a row for each case and seed."""
    both = [(case, prior(case) if prior is not None else None) for case in cases]
    return np.array([replayed(c, strategy, seed, trials, m) for c, m in both for seed in range(seeds)])


def compare(
    cases: Sequence[Recording],
    strategies: Sequence[str],
    budgets: Sequence[int],
    seeds: int,
    prior: Priors | None = None,
) -> dict[str, Any]:
    """Compute for each strategy and budget the geometric mean of the share of the best, and its 5th percentile.

    `prior` gives the model that "guided" begins with, by case.
    """
    curves: dict[str, Any] = {}
    for strategy in strategies:
        runs = runs_of(cases, strategy, max(budgets), seeds, prior)
        reached = np.maximum(runs[:, [n - 1 for n in budgets]], 1e-9)
        means = np.exp(np.log(reached).mean(axis=0))
        curves[strategy] = list(zip(means.tolist(), np.percentile(reached, 5, axis=0).tolist(), strict=True))
    return curves


def table(cases: Sequence[Recording], strategies: Sequence[str], budgets: Sequence[int], seeds: int) -> str:
    """Format `compare` as Markdown."""
    curves = compare(cases, strategies, budgets, seeds)
    rows = [[name, *(f"{mean:.3f} ({low:.2f})" for mean, low in results)] for name, results in curves.items()]
    total = sum(len(case.seconds) for case in cases)
    head = [f"{len(cases)} cases, {total:,} candidates, {seeds} seeds", *(f"{n} trials" for n in budgets)]
    return markdown([head, *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m sparsetir.tuning.train.replay", description=__doc__)
    parser.add_argument("database", type=Path)
    parser.add_argument("--strategies", default="evolution,annealing,portfolio,random", help=", ".join(STRATEGIES))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="trials after which to look")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args(argv)
    try:
        budgets = [int(n) for n in args.budgets.split(",")]
        print(table(load(args.database), args.strategies.split(","), budgets, args.seeds))
    except (SparseTIRError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
