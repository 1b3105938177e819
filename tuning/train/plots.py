# SPDX-License-Identifier: Apache-2.0
"""Plots of a cost model: calibration, learning curves, and the search time that it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.tuning.train.evaluate import Ranking, geomean
from sparsetir.workloads.plot import new_figure, save


def axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    """Return a figure and its axes, with labels."""
    figure, drawn = new_figure(6, 4.5)
    drawn.set(title=title, xlabel=x, ylabel=y)
    drawn.grid(alpha=0.3)
    return figure, drawn


def calibration(found: Sequence[Ranking], path: Path) -> Path:
    """Return the gain that was expected of the first candidate of each case, and the one that it had.

    Parameters
    ----------
    found : sequence of Ranking
        By models that were not trained on the cases.
    path : Path
    """
    figure, drawn = axes("gains over the untuned kernel", "expected", "measured")
    for kind in sorted({r.case.kind or r.case.op for r in found}):
        own = [r for r in found if (r.case.kind or r.case.op) == kind]
        drawn.loglog([r.gain for r in own], [r.actual for r in own], ".", label=kind, alpha=0.6)
    ends = [min(r.gain for r in found), max(r.gain for r in found)]
    drawn.loglog(ends, ends, color="black", linewidth=1)
    drawn.legend()
    return save(figure, path)


def learning(curve: Mapping[int, Sequence[Ranking]], path: Path) -> Path:
    """Return how near to the best the first candidates come, by the number of matrices that a model was trained on."""
    figure, drawn = axes("one family left out", "matrices trained on", "share of the best")
    counts = sorted(curve)
    drawn.plot(counts, [geomean([r.top_1 for r in curve[n]]) for n in counts], "o-", label="first candidate")
    drawn.plot(counts, [geomean([r.top_5 for r in curve[n]]) for n in counts], "o-", label="best of five")
    drawn.set_xscale("log")
    drawn.legend()
    return save(figure, path)


def searches(reached: Mapping[str, np.ndarray], path: Path) -> Path:
    """Return how near to the best searches are after each trial, the mean and the 5th percentile.

    Parameters
    ----------
    reached : mapping of str to ndarray, shape (searches, trials)
        By strategy.
    path : Path
    """
    figure, drawn = axes("searches over recorded trials", "trials", "share of the best")
    for name, runs in reached.items():
        trials = np.arange(1, runs.shape[1] + 1)
        (line,) = drawn.plot(trials, np.exp(np.log(np.maximum(runs, 1e-9)).mean(axis=0)), label=name)
        drawn.plot(trials, np.percentile(runs, 5, axis=0), ":", color=line.get_color())
    drawn.legend()
    return save(figure, path)


__all__ = ["calibration", "learning", "searches"]
