# SPDX-License-Identifier: Apache-2.0
"""How good a search is: compared with a coarse sweep, schedules alone, one without the shipped model, and other seeds.

``sparsetir bench search --data FOLDER --ops spmm:128 --seconds 60`` tunes every case from an empty database
and then times what was found in turn with the other kernels.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from sparsetir.bench.measure import CALLS, MANY_TRIALS, SizedOp, our_calls, parse_products, suits
from sparsetir.bench.sweep import best_of
from sparsetir.build import build
from sparsetir.errors import SparseTIRError
from sparsetir.tuning import tune_sparse
from sparsetir.tuning.measure import lower_quartile
from sparsetir.tuning.report import TuneResult
from sparsetir.utils.arguments import parse_seconds
from sparsetir.workloads.inputs import (
    Case,
    InputSource,
    find_files,
    from_files,
    from_suite,
    loaded,
    make_case,
    reason,
    say,
)
from sparsetir.workloads.plot import markdown
from sparsetir.workloads.timing import interleave

EARLY = 10.0  # seconds after which a search is looked at
ROUNDS, BURST, REST = 15, 0.02, 0.05  # turns of each kernel, their seconds and those between them
HEAD = (
    "case",
    "untuned ms",
    "sweep ms",
    "tuned ms",
    "sweep/tuned",
    "after 10 s",
    "schedules/tuned",
    "evolution/tuned",
    "seeds",
    "trials/s",
)


@dataclass(frozen=True)
class SearchRow:
    """What searches found for a case.

    Parameters
    ----------
    name : str
    times : mapping of str to ndarray
        Seconds of the kernels in each round: ``"untuned"``, ``"sweep"``, ``"schedules"``, ``"evolution"`` and one for
        each seed.
    results : sequence of TuneResult
        One for each seed.

    Notes
    -----
    A shared machine is at one pace for seconds and at half of it for the next: kernels are compared round by round, and
    the middle one of these ratios counts.
    """

    name: str
    times: Mapping[str, np.ndarray]
    results: Sequence[TuneResult]

    def over_tuned(self, name: str) -> float:
        """Time of a kernel over that of what the first seed found; nan where it is missing."""
        return float(np.median(self.times[name] / self.times["seed 0"])) if name in self.times else float("nan")

    def figures(self) -> list[float]:
        """Return the numbers of a row; nan where a kernel is missing."""
        pace = [result.measured / result.seconds for result in self.results]
        seeds = [self.over_tuned(f"seed {n}") for n in range(len(self.results))]
        early = float(np.mean([reached(result, EARLY) for result in self.results]))
        by_strategy = [self.over_tuned(name) for name in ("schedules", "evolution")]
        return [self.over_tuned("sweep"), early, *by_strategy, max(seeds) / min(seeds), float(np.mean(pace))]

    def cells(self) -> list[str]:
        """For the table."""
        names = ("untuned", "sweep", "seed 0")
        times = [f"{np.median(self.times[n]) * 1e3:.4g}" if n in self.times else "" for n in names]
        return [self.name, *times, *("" if np.isnan(value) else f"{value:.2f}" for value in self.figures())]


def reached(result: TuneResult, seconds: float) -> float:
    """Return the share of the final speed after some seconds of a search; before its first trial the untuned one."""
    final = min(record.seconds for record in result.history if record.seconds is not None)
    times = [r.seconds for r in result.history if r.seconds is not None and r.elapsed <= seconds]
    return final / min(times) if times else 0.0


def measure(name: str, case: Case, *, seconds: float, seeds: int, sweep: bool) -> SearchRow:
    """Search, and time what was found in turn."""
    budget: dict[str, Any] = {"max_trials": MANY_TRIALS, "max_seconds": seconds, "progress": False}
    results = [tune_sparse(case.program, case.inputs, seed=seed, **budget) for seed in range(seeds)]
    alone = tune_sparse(case.program, case.inputs, formats=[], **budget)
    unled = tune_sparse(case.program, case.inputs, strategy="evolution", **budget)
    kernels = {
        "untuned": build(case.program, expected_calls=CALLS),
        "schedules": alone.kernel,
        "evolution": unled.kernel,
    }
    kernels |= {f"seed {n}": result.kernel for n, result in enumerate(results)}
    swept = best_of(case) if sweep else None
    if swept is not None:
        kernels["sweep"] = swept[0]
        say(f"{name}: sweep {swept[1]}; tuned {results[0].best.candidate}")
    return SearchRow(name, in_rounds(our_calls(kernels, case)), results)


def in_rounds(calls: Mapping[str, Callable[[], object]], turns: int = ROUNDS) -> dict[str, np.ndarray]:
    """Seconds of each call in every round, a quarter of a burst being faster.

    Examples
    --------
    >>> times = in_rounds({"nothing": lambda: None})
    >>> times["nothing"].shape == (ROUNDS,)
    True
    """
    rounds = [interleave(calls, rounds=1, burst_seconds=BURST, rest=REST) for _ in range(turns)]
    return {name: np.array([lower_quartile(times[name].samples) for times in rounds]) for name in calls}


def table(rows: Sequence[SearchRow]) -> str:
    """Markdown, with geometric means below."""
    figures = np.array([row.figures() for row in rows])
    present = [column[~np.isnan(column)] for column in figures.T]
    with np.errstate(divide="ignore"):
        means = [float(np.exp(np.mean(np.log(column)))) if column.size else float("nan") for column in present]
    last = ["geometric mean", "", "", "", *("" if np.isnan(value) else f"{value:.3f}" for value in means)]
    return markdown([list(HEAD), *(row.cells() for row in rows), last])


def run(sources: Sequence[InputSource], products: Sequence[SizedOp], **settings: Any) -> list[SearchRow]:
    """Every case, one after another; what fails is said and left out."""
    return by_case(sources, products, lambda name, case: measure(name, case, **settings))


class Shown(Protocol):
    """A row of a table."""

    def cells(self) -> list[str]:
        """Its text."""


R = TypeVar("R", bound=Shown)


def by_case(sources: Sequence[InputSource], products: Sequence[SizedOp], measured: Callable[[str, Case], R]) -> list[R]:
    """Return the row of every case, one after another; what fails is said and left out."""
    rows: list[R] = []
    for name, sparse in loaded(sources):
        for product in (p for p in products if suits(p, sparse)):
            try:
                case = make_case(product.op, sparse, feat=product.feat)
                rows.append(measured(f"{name} {product}", case))
            except (SparseTIRError, MemoryError) as error:
                say(f"without {name} {product}: {reason(error)}")
                continue
            say("  ".join(rows[-1].cells()))
            gc.collect()
    return rows


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options that select what is measured."""
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="every matrix and tensor in it")
    parser.add_argument(
        "--suite", default="", metavar="NAMES", help="generated matrices and tensors; all: every family"
    )
    parser.add_argument("--size", default="medium", choices=("small", "medium", "large"), help="of the suite")
    parser.add_argument("--ops", default="spmm:128", help="operations with their columns; spmm:128")


def sources_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[list[InputSource], list[SizedOp]]:
    """Return what these options say."""
    try:
        paths = [*args.files, *(find_files(args.data) if args.data else [])]
        sources = [*from_files(paths), *(from_suite(args.suite, args.size) if args.suite else [])]
        products = list(parse_products(args.ops))
    except (SparseTIRError, OSError) as error:
        parser.error(str(error))
    if not sources:
        parser.error("expected files, --data FOLDER or --suite NAMES")
    return sources, products


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="sparsetir bench search", description=__doc__)
    add_sources(parser)
    parser.add_argument("--seconds", type=parse_seconds, default=60.0, help="of each search; 60")
    parser.add_argument("--seeds", type=int, default=1, help="searches of each case; 1")
    parser.add_argument("--no-sweep", action="store_true", help="leave the sweep out")
    args = parser.parse_args(argv)
    sources, products = sources_of(parser, args)
    settings = {"seconds": args.seconds, "seeds": args.seeds, "sweep": not args.no_sweep}
    print(table(run(sources, products, **settings)))


if __name__ == "__main__":
    main()
