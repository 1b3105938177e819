# SPDX-License-Identifier: Apache-2.0
"""Training of the shipped cost model, and its evaluation on held-out matrices.

``python -m sparsetir.tuning.train.pretrain points.jsonl --out pretrained.json --evaluate`` takes data sets of
`sparsetir collect` or records of `sparsetir.tuning.train.collect`, prints tables in Markdown and writes the model.
``--teacher old.json@znver4`` adds predictions of an earlier model for a processor without measured points.

A model knows only the machines and numbers of threads of its training data. With a teacher, a sample of the cases is
added a second time for the teacher's machine and two threads, with the times that the teacher predicts: Hinton, Vinyals
and Dean, "Distilling the knowledge in a neural network", 2015.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import SparseTIRError, TuningError
from sparsetir.formats.encoding import parse_format
from sparsetir.schedules import Choices
from sparsetir.tuning import predict
from sparsetir.tuning.features import THREADED, choice_names, matrix_names, pattern_names
from sparsetir.tuning.model import OBJECTIVES, PLACED, SERIAL, AnalyticModel, CostModel, Model, RandomModel
from sparsetir.tuning.records import LEAST, Recording, load
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.train import evaluate
from sparsetir.tuning.train.dataset import encoding_of, is_data_set, lines, of_processor, recordings
from sparsetir.tuning.train.evaluate import (
    Ranking,
    Trainer,
    by_margin,
    by_model,
    by_part,
    held_out,
    plot_calibration,
    plot_learning,
    plot_searches,
    safe_margin,
)
from sparsetir.tuning.train.replay import BUDGETS, compare, runs_of, stops
from sparsetir.utils.machine import MachineProfile, shipped_profile
from sparsetir.workloads.inputs import say
from sparsetir.workloads.plot import markdown

EVERY = 4  # one case in so many is added
THREADS = 2
PIECES = (0, 1, 4, 8)  # for each thread


def taught(lines: Iterable[Mapping[str, Any]], model: CostModel, profile: MachineProfile) -> list[Recording]:
    """Return every few cases of a data set with the times that a model predicts for another machine.

    Parameters
    ----------
    lines : iterable of mapping
        Of the data set.
    model : CostModel
        Trained on points of the other machine.
    profile : MachineProfile
        Of the other machine.
    """
    recordings = [_taught(line, model, profile, n) for n, line in enumerate(islice(lines, 0, None, EVERY))]
    cases = [case for case in recordings if case is not None]
    say(f"{len(cases)} cases as the earlier model expects them on {profile.name}")
    return cases


def _taught(line: Mapping[str, Any], model: CostModel, profile: MachineProfile, number: int) -> Recording | None:
    job = {**line["job"], "threads": THREADS}
    encoding = encoding_of({**line, "job": job, "rates": _rates(profile), "profile": profile})
    rng = np.random.default_rng(number)
    drawn = THREADS * rng.choice(PIECES, len(line["points"]))
    candidates = dict.fromkeys(
        Candidate(Choices(**{**choices, "chunks": int(chunks)}), parse_format(text) if text else None)
        for (text, choices, *_), chunks in zip(line["points"], drawn, strict=True)
    )
    usual = Candidate(Choices(**{**line["usual"], "chunks": THREADS}))
    if len(candidates) < LEAST:
        return None
    rows = encoding.rows(list(candidates))
    plain = encoding.rows([usual], specialised=False)[0]
    seconds = np.exp(-model.predict(np.vstack([rows, plain]))).tolist()
    return Recording(
        f"{line['case']} taught",
        dict(zip(candidates, seconds, strict=False)),
        dict(zip(candidates, rows, strict=True)),
        matrix_names(),
        line["matrix"],
        line["family"],
        f"{job['op'].partition('_')[0]}:{job['feat']}",
        (seconds[-1], plain),
        (),
        job["op"].partition("_")[0],
        job["dtype"],
        THREADS,
        profile.name,
        is_placed=True,
    )


def _rates(profile: MachineProfile) -> dict[str, float]:
    """Return rates for arrays of half the private cache, of a quarter of the last one, and of four times it."""
    private, last = profile.caches
    sizes = {"private": private // 2, "last": last // 4, "memory": 4 * last}
    rates = {name: 2048 / profile.gather_seconds(2048, size) for name, size in sizes.items()}
    return {"peak": max(profile.fma.values()), **rates}


__all__ = ["taught"]


ROUNDS, OBJECTIVE = 160, "regression"
LED = "trees, regression"  # the shipped model
FOLDS = 10  # groups of matrices or families that are left out in turn
OPERATION = "kind"  # attribute of a case: its operation
MACHINE = "mcpu"  # attribute of a case: its machine
SLOWER_ONES = 0.01  # share of the cases of a held-out machine that may become slower
LEFT_OUT = ("matrix", "family", OPERATION, "dtype", "threads")
SETTINGS_OF_MACHINES = ("threads", "mcpu")  # attributes of the transfer tables
TITLES = {"kind": "operation", "threads": "number of threads", "mcpu": "mcpu"}
SHARES, DRAWN = (0.1, 0.3, 1.0), 24  # of the matrices in a learning curve, and trials of a search that is drawn
UNLIKELY = (0.2, 0.05, 0.02)  # probabilities of an improvement at which a search stops
SPREAD = 0.3  # of the logarithms of two measurements of a point
# Few features identify a matrix: trees that see a part of the features memorize less.
SETTINGS: dict[str, Any] = {
    "max_depth": 8,
    "eta": 0.08,
    "min_child_weight": 8,
    "subsample": 0.8,
    "colsample_bytree": 0.5,
    "max_bin": 128,
    "nthread": 1,
}


@dataclass(frozen=True)
class Restricted:
    """A model that sees some of the columns only."""

    model: Model
    columns: np.ndarray

    def predict(self, features: np.ndarray) -> np.ndarray:
        return self.model.predict(features[:, self.columns])


def stacked(cases: Sequence[Recording]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, seconds and case numbers of all trials, those of the untuned kernels too."""
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
    """Return a model of some cases; it does not see the features named in `without`."""
    features, seconds, numbers = stacked(cases)
    names = cases[0].names
    is_serial = all(case.threads == 1 for case in cases)
    if is_serial:
        features[:, [names.index(name) for name in THREADED]] = np.nan
    how = {"cases": numbers, "objective": objective, "rounds": rounds, "seed": seed, "focused": True, **SETTINGS}
    if not without:
        return replace(CostModel.fit(features, seconds, names=names, **how), about={SERIAL: is_serial})
    columns = np.array([n for n, name in enumerate(names) if name not in without])
    return Restricted(CostModel.fit(features[:, columns], seconds, **how), columns)


def train_with(taught: Sequence[Recording], cases: Sequence[Recording], *, rounds: int = ROUNDS, **how: Any) -> Any:
    """Return a model of cases and of those `taught` ones whose matrix, family and operation are among them."""
    matrices, families, kinds = ({getattr(case, by) for case in cases} for by in ("matrix", "family", "kind"))
    covered = [c for c in taught if c.matrix in matrices and c.family in families and c.kind in kinds]
    return train([*cases, *covered], rounds=rounds, **how)


def cautious(rankings: Sequence[Ranking]) -> float:
    """Return the least margin that keeps the share of slower cases small on each machine that was left out."""
    machines = {r.case.mcpu for r in rankings}
    return max(safe_margin([r for r in rankings if r.case.mcpu == m], SLOWER_ONES) for m in machines)


def lessons(text: str | None, path: Path) -> list[Recording]:
    """Return the predictions of the model of ``MODEL@PROCESSOR`` for a data set; an empty list without a text."""
    if text is None:
        return []
    name, _, processor = text.rpartition("@")
    return taught(lines(of_processor(path)[0]), CostModel.load(Path(name)), shipped_profile(processor))


def usable(cases: Sequence[Recording]) -> list[Recording]:
    """Return the cases with one sparse matrix, recorded with the features of this version."""
    names = matrix_names()
    matching = [case for case in cases if case.names == names]
    if not matching:
        raise TuningError("expected records with the features of this version, got none: collect them again")
    families = sorted({case.family for case in matching})
    if len(families) < 2:
        raise TuningError(f"expected matrices of two families or more, to leave one out, got {families[0]} only")
    if len(matching) < len(cases):
        say(f"left out {len(cases) - len(matching)} cases that were recorded with other features")
    return matching


def trainers(rounds: int) -> dict[str, Trainer]:
    """Return the trainers to compare: both objectives, fewer features, and no training.

    Without statistics, what follows for a candidate (padding, bytes, the roofline) still knows the matrix.
    """
    of_the_matrix = frozenset(matrix_names()) - choice_names()
    return {
        LED: partial(train, objective="regression", rounds=rounds),
        "trees, rank": partial(train, objective="rank", rounds=rounds),
        f"{OBJECTIVE}, no statistics of the matrix": partial(train, rounds=rounds, without=pattern_names()),
        f"{OBJECTIVE}, nothing of the matrix": partial(train, rounds=rounds, without=of_the_matrix),
        "analytic": lambda cases: AnalyticModel(cases[0].names),
        "random": lambda _cases: RandomModel(),
    }


def tables(cases: Sequence[Recording], rounds: int, unseen: list[Ranking]) -> Iterator[str]:
    """Yield the evaluation in Markdown; `unseen` has each case as ranked by a model of other families."""
    trials = sum(len(case.seconds) for case in cases)
    matrices, families = ({getattr(case, by) for case in cases} for by in ("matrix", "family"))
    yield f"{trials:,} candidates of {len(cases)} cases: {len(matrices)} matrices of {len(families)} families.\n"
    for by in LEFT_OUT:
        if len({getattr(case, by) for case in cases}) < 2:
            continue
        title = TITLES.get(by, by)
        compared = trainers(rounds) if by == "matrix" else {LED: partial(train, rounds=rounds)}
        ranked = {name: held_out(cases, trainer, by, FOLDS) for name, trainer in compared.items() if by != "family"}
        rankings = ranked or {LED: unseen}
        yield markdown(by_model(rankings, f"one {title} left out")) + "\n"
        yield markdown(by_part(rankings[LED], "op" if by in ("matrix", "family") else by)) + "\n"
        yield markdown(by_margin(rankings[LED])) + "\n"
        if by != "matrix":
            table_of = predict.coverage(rankings[LED], by, familiar=unseen if by == OPERATION else None)
            yield markdown(predict.cells(table_of, f"one {title} left out")) + "\n"
    for by in SETTINGS_OF_MACHINES:
        moved = evaluate.transferred(cases, partial(train, rounds=rounds), by)
        if moved:
            yield markdown(evaluate.cells(moved, f"to another {TITLES.get(by, by)}")) + "\n"


def of_other_families(cases: Sequence[Recording], over: Sequence[Recording], rounds: int) -> dict[str, Any]:
    """Train for each family of `over` a model of the others' `cases`."""
    families = dict.fromkeys(case.family for case in over)
    return {name: train([case for case in cases if case.family != name], rounds=rounds) for name in families}


def plots(cases: Sequence[Recording], over: Sequence[Recording], rounds: int, unseen: list[Ranking], to: Path) -> None:
    """Draw whether gains come true, how the model learns, and what searches over `over` gain by it."""
    say(f"wrote {plot_calibration(unseen, to / 'calibration.png')}")
    matrices, curve = list(dict.fromkeys(case.matrix for case in cases)), {}
    for share in SHARES:
        kept = set(matrices[: max(1, round(share * len(matrices)))])
        trainer = partial(train_on, kept, rounds)
        curve[len(kept)] = held_out(cases, trainer, "family", FOLDS)
    say(f"wrote {plot_learning(curve, to / 'learning.png')}")
    models = of_other_families(cases, over, rounds)
    reached = {"with the model": runs_of(over, "guided", DRAWN, 1, lambda case: models[case.family])}
    reached |= {name: runs_of(over, name, DRAWN, 1) for name in ("evolution", "random")}
    say(f"wrote {plot_searches(reached, to / 'searches.png')}")


def train_on(matrices: set[str], rounds: int, cases: Sequence[Recording]) -> Any:
    """Return a model of the cases of some matrices; of all where none of these is among them."""
    return train([case for case in cases if case.matrix in matrices] or cases, rounds=rounds)


def searches(cases: Sequence[Recording], over: Sequence[Recording], rounds: int, seeds: int) -> str:
    """Return searches over recorded trials, with and without a model of the other families' `cases`, in Markdown."""
    models = of_other_families(cases, over, rounds)
    curves = compare(over, ["guided"], BUDGETS, seeds, lambda case: models[case.family])
    curves |= compare(over, ["evolution", "annealing", "portfolio", "random"], BUDGETS, seeds)
    rows = [[name, *(f"{mean:.3f} ({low:.2f})" for mean, low in results)] for name, results in curves.items()]
    table = markdown([[f"{seeds} seeds, mean (5th percentile)", *(f"{n} trials" for n in BUDGETS)], *rows])
    ended = stops(over, UNLIKELY, seeds, lambda case: models[case.family])
    return f"{table}\n\n{markdown(ended)}"


def read(path: Path, spread: float | None) -> list[Recording]:
    """Return the cases of a data set or of records."""
    if is_data_set(path):
        return recordings(path, spread=SPREAD if spread is None else spread)
    return load(path, spread=float("inf") if spread is None else spread)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate and write."""
    parser = argparse.ArgumentParser(prog="python -m sparsetir.tuning.train.pretrain", description=__doc__)
    space = "data sets of `sparsetir collect`, also FILE@PROCESSOR, or records"
    parser.add_argument("space", type=Path, nargs="+", help=space)
    parser.add_argument("--out", type=Path, help="where the model goes")
    parser.add_argument("--evaluate", action="store_true", help="print how matrices that are left out are ranked")
    parser.add_argument("--searches", type=int, default=0, metavar="SEEDS", help="replay searches with that many seeds")
    parser.add_argument("--over", type=Path, metavar="FILE", help="searches over these trials instead")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw calibration, learning and search curves")
    parser.add_argument("--objective", default=OBJECTIVE, choices=OBJECTIVES)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="trees")
    busy = f"leave out points whose two measurements are farther apart (default: {SPREAD}), or quartiles of trials"
    parser.add_argument("--spread", type=float, metavar="SHARE", help=busy)
    teacher = "also learn what this model, of points that are not at hand, expects of this processor"
    parser.add_argument("--teacher", metavar="MODEL@PROCESSOR", help=teacher)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.over is not None and not args.searches and args.plots is None:
        parser.error("--over names trials for --searches, which takes how many seeds, or --plots")
    try:
        cases = usable([case for path in args.space for case in read(path, args.spread)])
        over = cases if args.over is None else usable(read(args.over, args.spread))
        learnt = lessons(args.teacher, args.space[0])
    except SparseTIRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wants_unseen = args.evaluate or args.out is not None or args.plots is not None
    trainer = partial(train_with, learnt, rounds=args.rounds)
    unseen = held_out(cases, trainer, "family", FOLDS) if wants_unseen else []
    if args.evaluate:
        for text in tables(cases, args.rounds, unseen):
            print(text, flush=True)
    if args.searches:
        print(searches(cases, over, args.rounds, args.searches), flush=True)
    if args.plots is not None:
        plots(cases, over, args.rounds, unseen, args.plots)
    if args.out is not None:
        has_others = len({case.kind for case in cases}) > 1
        elsewhere = held_out(cases, trainer, MACHINE) if len({case.mcpu for case in cases}) > 1 else unseen
        strange = held_out(cases, trainer, OPERATION, FOLDS) if has_others else []
        model: CostModel = trainer(cases, objective=args.objective, seed=args.seed)
        about = {
            "candidates": sum(len(case.seconds) for case in cases),
            "matrices": len({case.matrix for case in cases}),
            "families": sorted({case.family for case in cases}),
            "operations": sorted({case.op for case in cases}),
            "margin": safe_margin(unseen),
            "threads": sorted({case.threads for case in [*cases, *learnt]}),
            PLACED: any(case.is_placed for case in cases),
            "bounds": predict.Bounds.fit(unseen, strange=strange, least=cautious(elsewhere)).as_dict(),
        }
        replace(model, about={**model.about, **about}).save(args.out)
        say(f"wrote {args.out}, {args.out.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
