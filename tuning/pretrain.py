# SPDX-License-Identifier: Apache-2.0
"""Train the cost model that comes with the package, and say how well it does on matrices that it never saw.

``python -m sparsetir.tuning.pretrain space.jsonl --out pretrained.json --evaluate`` takes records of
`sparsetir.tuning.collect`, prints tables in Markdown and writes the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import SparseTIRError, TuningError
from sparsetir.harness.inputs import say
from sparsetir.harness.tables import markdown
from sparsetir.tuning.encoding import choice_names, matrix_names, pattern_names
from sparsetir.tuning.evaluate import Trainer, by_margin, by_model, by_op, held_out, safe_margin
from sparsetir.tuning.model import OBJECTIVES, AnalyticModel, CostModel, Model, RandomModel
from sparsetir.tuning.recordings import Recording, load
from sparsetir.tuning.replay import BUDGETS, compare

ROUNDS, OBJECTIVE = 240, "regression"
# Few of many numbers of a pattern tell two matrices apart: a tree that may not see them all learns less by heart.
SETTINGS: dict[str, Any] = {
    "max_depth": 8,
    "eta": 0.08,
    "min_child_weight": 8,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "max_bin": 128,
    "nthread": 2,
}


@dataclass(frozen=True)
class Restricted:
    """A model that sees some of the columns only."""

    model: Model
    columns: np.ndarray

    def predict(self, features: np.ndarray) -> np.ndarray:
        return self.model.predict(features[:, self.columns])


def stacked(cases: Sequence[Recording]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, seconds and case numbers of all trials, those of the untuned kernels too."""
    rows, seconds, numbers = [], [], []
    for number, case in enumerate(cases):
        own, took = case.rows()
        if case.untuned is not None and np.isfinite(case.untuned[0]):
            own, took = np.vstack([own, case.untuned[1]]), np.append(took, case.untuned[0])
        rows.append(own)
        seconds.append(took)
        numbers.append(np.full(len(took), number))
    return np.vstack(rows), np.concatenate(seconds), np.concatenate(numbers)


def train(
    cases: Sequence[Recording],
    *,
    objective: str = OBJECTIVE,
    rounds: int = ROUNDS,
    seed: int = 0,
    without: frozenset[str] = frozenset(),
) -> Any:
    """A model of some cases; it does not see the features named in `without`."""
    features, seconds, numbers = stacked(cases)
    names = cases[0].names
    how = {"cases": numbers, "objective": objective, "rounds": rounds, "seed": seed, "focused": True, **SETTINGS}
    if not without:
        return CostModel.fit(features, seconds, names=names, **how)
    columns = np.array([n for n, name in enumerate(names) if name not in without])
    return Restricted(CostModel.fit(features[:, columns], seconds, **how), columns)


def usable(cases: Sequence[Recording]) -> list[Recording]:
    """The cases with one sparse matrix, recorded with the features of this version."""
    names = matrix_names()
    found = [case for case in cases if case.names == names]
    if not found:
        raise TuningError("expected records with the features of this version; found none: collect them again")
    families = sorted({case.family for case in found})
    if len(families) < 2:
        raise TuningError(f"expected matrices of two families or more, to leave one out; found {families[0]} only")
    if len(found) < len(cases):
        say(f"left out {len(cases) - len(found)} cases that were recorded with other features")
    return found


def trainers(rounds: int) -> dict[str, Trainer]:
    """What is compared: both objectives, less information, and no training.

    Without statistics, what follows for a candidate (padding, bytes, the roofline) still knows the matrix.
    """
    of_the_matrix = frozenset(matrix_names()) - choice_names()
    return {
        "trees, regression": partial(train, objective="regression", rounds=rounds),
        "trees, rank": partial(train, objective="rank", rounds=rounds),
        f"{OBJECTIVE}, no statistics of the matrix": partial(train, rounds=rounds, without=pattern_names()),
        f"{OBJECTIVE}, nothing of the matrix": partial(train, rounds=rounds, without=of_the_matrix),
        "analytic": lambda cases: AnalyticModel(cases[0].names),
        "random": lambda _cases: RandomModel(),
    }


def tables(cases: Sequence[Recording], rounds: int) -> Iterator[str]:
    """The evaluation in Markdown."""
    trials = sum(len(case.seconds) for case in cases)
    matrices, families = ({getattr(case, by) for case in cases} for by in ("matrix", "family"))
    yield f"{trials:,} candidates of {len(cases)} cases: {len(matrices)} matrices of {len(families)} families.\n"
    for by in ("matrix", "family"):
        found = {name: held_out(cases, trainer, by) for name, trainer in trainers(rounds).items()}
        yield markdown(by_model(found, f"one {by} left out")) + "\n"
        chosen = found[f"trees, {OBJECTIVE}"]
        yield markdown(by_op(chosen)) + "\n"
        yield markdown(by_margin(chosen)) + "\n"


def margin(cases: Sequence[Recording], rounds: int) -> float:
    """How much faster than the untuned kernel a candidate must look to be taken unmeasured, families left out."""
    return safe_margin(held_out(cases, partial(train, rounds=rounds), "family"))


def searches(cases: Sequence[Recording], over: Sequence[Recording], rounds: int, seeds: int) -> str:
    """Searches over recorded trials, with and without a model of the other families' `cases`, in Markdown."""
    families = dict.fromkeys(case.family for case in over)
    models = {name: train([case for case in cases if case.family != name], rounds=rounds) for name in families}
    found = compare(over, ["guided"], BUDGETS, seeds, lambda case: models[case.family])
    found |= compare(over, ["evolution", "annealing", "portfolio", "random"], BUDGETS, seeds)
    rows = [[name, *(f"{mean:.3f} ({low:.2f})" for mean, low in results)] for name, results in found.items()]
    return markdown([[f"{seeds} seeds, mean (5th percentile)", *(f"{n} trials" for n in BUDGETS)], *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate and write."""
    parser = argparse.ArgumentParser(prog="python -m sparsetir.tuning.pretrain", description=__doc__)
    parser.add_argument("space", type=Path, nargs="+", help="files of `python -m sparsetir.tuning.collect`")
    parser.add_argument("--out", type=Path, help="where the model goes")
    parser.add_argument("--evaluate", action="store_true", help="print how matrices that are left out are ranked")
    parser.add_argument("--searches", type=int, default=0, metavar="SEEDS", help="replay searches with that many seeds")
    parser.add_argument("--over", type=Path, metavar="FILE", help="searches over these trials instead")
    parser.add_argument("--objective", default=OBJECTIVE, choices=OBJECTIVES)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="trees")
    busy = "leave out trials whose quartiles are farther apart, relative to the median"
    parser.add_argument("--spread", type=float, default=float("inf"), metavar="SHARE", help=busy)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.over is not None and not args.searches:
        parser.error("--over names trials for --searches; say how many seeds")
    try:
        cases = usable([case for path in args.space for case in load(path, spread=args.spread)])
        over = cases if args.over is None else usable(load(args.over, spread=args.spread))
    except SparseTIRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.evaluate:
        for text in tables(cases, args.rounds):
            print(text, flush=True)
    if args.searches:
        print(searches(cases, over, args.rounds, args.searches), flush=True)
    if args.out is not None:
        model: CostModel = train(cases, objective=args.objective, rounds=args.rounds, seed=args.seed)
        about = {
            "candidates": sum(len(case.seconds) for case in cases),
            "matrices": sorted({case.matrix for case in cases}),
            "operations": sorted({case.op for case in cases}),
            "margin": margin(cases, args.rounds),
        }
        replace(model, about=about).save(args.out)
        say(f"wrote {args.out}, {args.out.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
