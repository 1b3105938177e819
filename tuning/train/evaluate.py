# SPDX-License-Identifier: Apache-2.0
"""Evaluate cost models on matrices, families and machines that were left out, and plot what the evaluations show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from sparsetir.tuning.model import Model
from sparsetir.tuning.records import LEAST, Recording
from sparsetir.tuning.space import Candidate
from sparsetir.workloads.plot import new_figure, save

# Evaluation of a cost model's ranking of candidates on held-out matrices.


Trainer: TypeAlias = Callable[[Sequence[Recording]], Model]

SLOWER = 1.02  # times the untuned kernel's time from which on a kernel counts as slower
MARGINS = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)


@dataclass(frozen=True)
class Ranking:
    """Ranking of the candidates of one case by a model.

    Parameters
    ----------
    case : Recording
    pairs : float
        Share of the pairs of candidates, their times not equal, that it puts in the right order.
    top_1, top_5 : float
        The best time of the case over that of the model's first candidate, and over the best of its first five.
    certain : float
        As `pairs`, of those that two measurements put in the same order; nan where nothing was measured twice.
    gain : float
        How many times faster than the untuned kernel the model expects its first candidate to be; 1 if not known.
    actual : float
        How many times faster it is.
    chosen : mapping of str to float
        What the model sees of its first candidate, by name.
    """

    case: Recording
    pairs: float
    top_1: float
    top_5: float
    certain: float = float("nan")
    gain: float = 1.0
    actual: float = 1.0
    chosen: Mapping[str, float] = field(default_factory=dict)

    @property
    def wrong_by(self) -> float:
        """How much too high the expected gain was, as a logarithm."""
        return float(np.log(self.gain) - np.log(self.actual))


def pairs_in_order(scores: np.ndarray, seconds: np.ndarray) -> float:
    """Return the share of pairs of unequal times whose faster one has the higher score; equal scores count half.

    Examples
    --------
    >>> pairs_in_order(np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]))
    0.6666666666666666
    """
    return _right(scores, seconds[:, None] < seconds[None, :])


def certain_in_order(scores: Mapping[Candidate, float], passes: Sequence[Mapping[Candidate, float]]) -> float:
    """Return `pairs_in_order` of the pairs that two measurements put in the same order; nan where there are not two.

    Noise cannot be foretold: of the pairs that it decides about any model has half right.
    """
    twice = [c for c in scores if len(passes) > 1 and all(c in timing_pass for timing_pass in passes)]
    if len(twice) < LEAST:
        return float("nan")
    first, second = (np.array([timing_pass[c] for c in twice]) for timing_pass in passes)
    faster = (first[:, None] < first[None, :]) & (second[:, None] < second[None, :])
    return _right(np.array([scores[c] for c in twice]), faster)


def _right(scores: np.ndarray, faster: np.ndarray) -> float:
    """Return the share of pairs, the first faster, that have the higher score there; half of the equal ones."""
    right = scores[:, None] > scores[None, :]
    equal = scores[:, None] == scores[None, :]
    return float(((right + 0.5 * equal) * faster).sum() / max(faster.sum(), 1))


def ranking(model: Model, case: Recording) -> Ranking:
    """Return how a model ranks a case's candidates that ran."""
    rows, seconds = case.rows()
    scores = model.predict(rows)
    order = np.argsort(-scores, kind="stable")
    top = [seconds.min() / seconds[order[:count]].min() for count in (1, 5)]
    gain, actual = 1.0, 1.0
    if case.untuned is not None and np.isfinite(case.untuned[0]):
        untuned_seconds, row = case.untuned
        gain = float(np.exp(scores[order[0]] - model.predict(row[None])[0]))
        actual = float(untuned_seconds / seconds[order[0]])
    certain = certain_in_order(dict(zip(case.ran, scores, strict=True)), case.passes)
    chosen = dict(zip(case.names, rows[order[0]].tolist(), strict=False))
    return Ranking(case, pairs_in_order(scores, seconds), float(top[0]), float(top[1]), certain, gain, actual, chosen)


def repeated(cases: Sequence[Recording]) -> list[Ranking]:
    """Return how a second measurement ranks what was measured first: what noise leaves to be known."""
    shares = []
    for case in cases:
        if not case.passes or len(case.passes[0]) < LEAST:
            continue
        first, second = (np.array(list(timing_pass.values())) for timing_pass in case.passes)
        order = np.argsort(second, kind="stable")
        top = [first.min() / first[order[:count]].min() for count in (1, 5)]
        shares.append(Ranking(case, pairs_in_order(-np.log(second), first), float(top[0]), float(top[1])))
    return shares


def folds(
    cases: Sequence[Recording], by: str, most: int | None = None
) -> Iterator[tuple[list[Recording], list[Recording]]]:
    """Return for each matrix, family or the like (`by`) the cases of all others, and its own; at most `most` groups."""
    names = list(dict.fromkeys(getattr(case, by) for case in cases))
    count = len(names) if most is None else min(most, len(names))
    for n in range(count):
        own = set(names[n::count])
        yield (
            [case for case in cases if getattr(case, by) not in own],
            [case for case in cases if getattr(case, by) in own],
        )


def held_out(cases: Sequence[Recording], trainer: Trainer, by: str, most: int | None = None) -> list[Ranking]:
    """Rank each case by a model that was trained on all matrices, families or the like (`by`) but its own."""
    rankings = []
    for others, own in folds(cases, by, most):
        model = trainer(others)
        rankings += [ranking(model, case) for case in own]
    return rankings


# ------------------------------------------------------------------ tables


def geomean(numbers: Sequence[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(np.maximum(numbers, 1e-9)))))


def summary(rankings_of: Sequence[Ranking]) -> list[str]:
    """Return cells: pairs in order, the share of the best that the first and first five reach, a bad first one."""
    first, five = [r.top_1 for r in rankings_of], [r.top_5 for r in rankings_of]
    certain = [r.certain for r in rankings_of if not np.isnan(r.certain)]
    numbers = [np.mean([r.pairs for r in rankings_of]), np.mean(certain) if certain else np.nan]
    numbers += [geomean(first), np.percentile(first, 5), geomean(five)]
    return ["" if np.isnan(number) else f"{number:.3f}" for number in numbers]


HEADING = ["pairs in order", "certain ones", "top 1", "5th percentile", "top 5"]


def by_model(rankings: dict[str, list[Ranking]], title: str) -> list[list[str]]:
    """Return a row for each model, and one for the untuned kernel."""
    rows = [[title, *HEADING], *([name, *summary(ranked)] for name, ranked in rankings.items())]
    twice = repeated([r.case for r in next(iter(rankings.values()))])
    if twice:
        rows.append(["a second measurement of the first", *summary(twice)])
    some = next(iter(rankings.values()))
    measured_cases = [r.case for r in some if r.case.untuned is not None and np.isfinite(r.case.untuned[0])]
    shares = [min(1.0, case.best / case.untuned[0]) for case in measured_cases if case.untuned is not None]
    if shares:
        rows.append(["the untuned kernel", "", "", f"{geomean(shares):.3f}", f"{np.percentile(shares, 5):.3f}", ""])
    return rows


def by_part(rankings: Sequence[Ranking], by: str) -> list[list[str]]:
    """Return a row for each operation, family or the like."""
    parts = dict.fromkeys(getattr(r.case, by) for r in rankings)
    rows = ([str(part), *summary([r for r in rankings if getattr(r.case, by) == part])] for part in parts)
    return [[{"op": "operation", "kind": "operation"}.get(by, by), *HEADING], *rows]


def by_margin(rankings: Sequence[Ranking]) -> list[list[str]]:
    """Return the effect of taking a model's first candidate unmeasured if its predicted gain exceeds a margin."""
    rows = [["taken if expected to be", "taken", "speedup over untuned", "slower than untuned", "slowest"]]
    for margin in MARGINS:
        actual = [r.actual if r.gain >= margin else 1.0 for r in rankings]
        taken = np.mean([r.gain >= margin for r in rankings])
        slower = np.mean([speedup * SLOWER < 1 for speedup in actual])
        rows.append(
            [
                f"{margin:g} times as fast",
                f"{taken:.0%}",
                f"{geomean(actual):.2f}",
                f"{slower:.1%}",
                f"{min(actual):.2f}",
            ]
        )
    return rows


def safe_margin(rankings: Sequence[Ranking], most: float = 0.05) -> float:
    """Return the least margin that keeps the share of cases slower than the untuned kernel this small."""
    for margin in MARGINS:
        if np.mean([r.gain >= margin and r.actual * SLOWER < 1 for r in rankings]) <= most:
            return margin
    return MARGINS[-1]


# Transfer: the value of a model of one setting of a machine on another, with none or a few of the other's records.


SHARES = (0.0, 0.01, 0.05)  # of the cases of the other setting
WEIGHT = 4  # times that each of these counts
FOLDS = 5  # groups of matrices that are left out in turn
FEWEST = 2  # matrices of a setting
TRANSFER_HEADING = ("pairs in order", "top 1", "5th percentile", "of its own model")


def transferred(cases: Sequence[Recording], trainer: Trainer, by: str) -> dict[object, dict[str, list[Ranking]]]:
    """Compute for each setting how its cases are ranked by models of the others and of itself.

    The matrices that are ranked are left out of every model, whatever setting they were measured in.

    Parameters
    ----------
    cases : sequence of Recording
    trainer : callable
        Makes a model of cases.
    by : str
        The setting: an attribute of a case, such as ``"threads"``.
    """
    by_setting: dict[object, dict[str, list[Ranking]]] = {}
    for setting in dict.fromkeys(getattr(case, by) for case in cases):
        own = [case for case in cases if getattr(case, by) == setting]
        if len({case.matrix for case in own}) < FEWEST or len(own) == len(cases):
            continue
        ranked = by_setting.setdefault(setting, {})
        for others, left_out in folds(own, "matrix", FOLDS):
            names = {case.matrix for case in left_out}
            elsewhere = [case for case in cases if getattr(case, by) != setting and case.matrix not in names]
            if not elsewhere:
                continue
            models = {name: trainer(of) for name, of in _sets(elsewhere, others, np.random.default_rng(0))}
            for name, model in models.items():
                ranked.setdefault(name, []).extend(ranking(model, case) for case in left_out)
    return {setting: ranked for setting, ranked in by_setting.items() if ranked}


def _sets(
    elsewhere: list[Recording], own: list[Recording], rng: np.random.Generator
) -> list[tuple[str, list[Recording]]]:
    """Return training sets: the cases of other settings with a share of this one's, and this one's alone."""
    order = rng.permutation(len(own))
    sets = [(f"{share:.0%} of its cases", [*elsewhere, *WEIGHT * few(own, order, share)]) for share in SHARES]
    return [*sets, ("its own model", own)]


def few(own: list[Recording], order: np.ndarray, share: float) -> list[Recording]:
    """Return the first cases of an order, one at least of any share.

    Examples
    --------
    >>> few(["a", "b", "c"], np.array([2, 0, 1]), 0.05), few(["a"], np.array([0]), 0.0)
    (['c'], [])
    """
    count = int(np.ceil(share * len(own)))
    return [own[n] for n in order[:count]]


def cells(by_setting: dict[object, dict[str, list[Ranking]]], title: str) -> list[list[str]]:
    """Return a table with a row for each setting and model."""
    rows = [[title, "other settings and", *TRANSFER_HEADING]]
    for setting, ranked in by_setting.items():
        native = geomean([r.top_1 for r in ranked["its own model"]])
        for name, ranks in ranked.items():
            first = [r.top_1 for r in ranks]
            numbers = [float(np.mean([r.pairs for r in ranks])), geomean(first), float(np.percentile(first, 5))]
            rows.append([str(setting), name, *(f"{n:.3f}" for n in [*numbers, geomean(first) / native])])
    return rows


# ----------------------------------------------------------------------------------------------- plots


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    """Return a figure and its axes, with labels."""
    figure, drawn = new_figure(6, 4.5)
    drawn.set(title=title, xlabel=x, ylabel=y)
    drawn.grid(alpha=0.3)
    return figure, drawn


def plot_calibration(rankings: Sequence[Ranking], path: Path) -> Path:
    """Return the gain that was expected of the first candidate of each case, and the one that it had.

    Parameters
    ----------
    rankings : sequence of Ranking
        By models that were not trained on the cases.
    path : Path
    """
    figure, drawn = _axes("gains over the untuned kernel", "expected", "measured")
    for kind in sorted({r.case.kind or r.case.op for r in rankings}):
        own = [r for r in rankings if (r.case.kind or r.case.op) == kind]
        drawn.loglog([r.gain for r in own], [r.actual for r in own], ".", label=kind, alpha=0.6)
    ends = [min(r.gain for r in rankings), max(r.gain for r in rankings)]
    drawn.loglog(ends, ends, color="black", linewidth=1)
    drawn.legend()
    return save(figure, path)


def plot_learning(curve: Mapping[int, Sequence[Ranking]], path: Path) -> Path:
    """Return how near to the best the first candidates come, by the number of matrices that a model was trained on."""
    figure, drawn = _axes("one family left out", "matrices trained on", "share of the best")
    counts = sorted(curve)
    drawn.plot(counts, [geomean([r.top_1 for r in curve[n]]) for n in counts], "o-", label="first candidate")
    drawn.plot(counts, [geomean([r.top_5 for r in curve[n]]) for n in counts], "o-", label="best of five")
    drawn.set_xscale("log")
    drawn.legend()
    return save(figure, path)


def plot_searches(reached: Mapping[str, np.ndarray], path: Path) -> Path:
    """Plot how near to the best searches are after each trial, the mean and the 5th percentile.

    Parameters
    ----------
    reached : mapping of str to ndarray, shape (searches, trials)
        By strategy.
    path : Path
    """
    figure, drawn = _axes("searches over recorded trials", "trials", "share of the best")
    for name, runs in reached.items():
        trials = np.arange(1, runs.shape[1] + 1)
        (line,) = drawn.plot(trials, np.exp(np.log(np.maximum(runs, 1e-9)).mean(axis=0)), label=name)
        drawn.plot(trials, np.percentile(runs, 5, axis=0), ":", color=line.get_color())
    drawn.legend()
    return save(figure, path)


__all__ = [
    "Ranking",
    "Trainer",
    "by_margin",
    "by_model",
    "by_part",
    "cells",
    "certain_in_order",
    "few",
    "folds",
    "held_out",
    "pairs_in_order",
    "plot_calibration",
    "plot_learning",
    "plot_searches",
    "repeated",
    "safe_margin",
    "transferred",
]
