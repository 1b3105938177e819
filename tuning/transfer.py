# SPDX-License-Identifier: Apache-2.0
"""What a model of one setting of a machine is worth on another, with none or a few of the other's records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsetir.tuning.evaluate import Ranking, Trainer, folds, geomean, ranking
from sparsetir.tuning.recordings import Recording

SHARES = (0.0, 0.01, 0.05)  # of the cases of the other setting
WEIGHT = 4  # times that each of these counts
FOLDS = 5  # groups of matrices that are left out in turn
FEWEST = 2  # matrices of a setting
HEADING = ("pairs in order", "top 1", "5th percentile", "of its own model")


def transferred(
    cases: Sequence[Recording], trainer: Trainer, by: str, *, seed: int = 0
) -> dict[object, dict[str, list[Ranking]]]:
    """For each setting, how its cases are ranked by models of the others and of itself.

    The matrices that are ranked are left out of every model, whatever setting they were measured in.

    Parameters
    ----------
    cases : sequence of Recording
    trainer : callable
        Makes a model of cases.
    by : str
        The setting: an attribute of a case, such as ``"threads"``.
    seed : int
        Of the cases that are drawn of a setting.
    """
    found: dict[object, dict[str, list[Ranking]]] = {}
    for setting in dict.fromkeys(getattr(case, by) for case in cases):
        own = [case for case in cases if getattr(case, by) == setting]
        if len({case.matrix for case in own}) < FEWEST or len(own) == len(cases):
            continue
        ranked = found.setdefault(setting, {})
        for others, left_out in folds(own, "matrix", FOLDS):
            names = {case.matrix for case in left_out}
            elsewhere = [case for case in cases if getattr(case, by) != setting and case.matrix not in names]
            if not elsewhere:
                continue
            models = {name: trainer(of) for name, of in _sets(elsewhere, others, np.random.default_rng(seed))}
            for name, model in models.items():
                ranked.setdefault(name, []).extend(ranking(model, case) for case in left_out)
    return {setting: ranked for setting, ranked in found.items() if ranked}


def _sets(
    elsewhere: list[Recording], own: list[Recording], rng: np.random.Generator
) -> list[tuple[str, list[Recording]]]:
    """What models are trained on: the cases of other settings with a share of this one's, and this one's alone."""
    order = rng.permutation(len(own))
    sets = [(f"{share:.0%} of its cases", [*elsewhere, *WEIGHT * few(own, order, share)]) for share in SHARES]
    return [*sets, ("its own model", own)]


def few(own: list[Recording], order: np.ndarray, share: float) -> list[Recording]:
    """The first cases of an order, one at least of any share.

    Examples
    --------
    >>> few(["a", "b", "c"], np.array([2, 0, 1]), 0.05), few(["a"], np.array([0]), 0.0)
    (['c'], [])
    """
    count = int(np.ceil(share * len(own)))
    return [own[n] for n in order[:count]]


def cells(found: dict[object, dict[str, list[Ranking]]], title: str) -> list[list[str]]:
    """A table with a row for each setting and model."""
    rows = [[title, "other settings and", *HEADING]]
    for setting, ranked in found.items():
        native = geomean([r.top_1 for r in ranked["its own model"]])
        for name, ranks in ranked.items():
            first = [r.top_1 for r in ranks]
            numbers = [float(np.mean([r.pairs for r in ranks])), geomean(first), float(np.percentile(first, 5))]
            rows.append([str(setting), name, *(f"{n:.3f}" for n in [*numbers, geomean(first) / native])])
    return rows


__all__ = ["cells", "few", "transferred"]
