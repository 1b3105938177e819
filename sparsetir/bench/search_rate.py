# SPDX-License-Identifier: Apache-2.0
"""Speed of searches: trials per second, convergence to the result, and its gain over untuned kernels.

``sparsetir warm; sparsetir bench search_rate --data FOLDER --ops spmm:128,spmv`` searches from an empty
database for every case, then times what was found in turn with the untuned kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.bench.measure import CALLS, SizedOp, our_calls
from sparsetir.bench.search import ROUNDS, add_sources, by_case, in_rounds, reached, sources_of
from sparsetir.build import build
from sparsetir.tuning import tune_sparse
from sparsetir.tuning.api import PRESETS
from sparsetir.tuning.report import TuneResult
from sparsetir.workloads.inputs import Case
from sparsetir.workloads.plot import markdown

NEARLY = 0.95  # of the speed that a search ends with
BINDINGS = 3  # of each kernel: where its copy of the matrix happens to lie in memory makes a difference
MOMENTS = (1.0, 2.0, 4.0)  # seconds after which a search is looked at
HEAD = (
    "case",
    "trials",
    "trials/s",
    "whole s",
    f"s to {NEARLY:.0%}",
    *(f"after {moment:g} s" for moment in MOMENTS),
    "default/tuned",
    f"calls={CALLS}/tuned",
)


@dataclass(frozen=True)
class SearchPace:
    """A search, and how what it found compares.

    Parameters
    ----------
    name : str
    result : TuneResult
    seconds : float
        Of the whole call.
    default, called : float
        Time of the kernels that `sparsetir.build` makes without and with a number of calls, over that of the tuned one.
    """

    name: str
    result: TuneResult
    seconds: float
    default: float
    called: float

    def figures(self) -> list[float]:
        """Return the numbers of a row."""
        shares = [reached(self.result, moment) for moment in MOMENTS]
        return [rate(self.result), self.seconds, until(self.result), *shares, self.default, self.called]

    def cells(self) -> list[str]:
        """For the table."""
        return [self.name, str(self.result.measured), *(f"{value:.2f}" for value in self.figures())]


def rate(result: TuneResult) -> float:
    """Trials in a second, between the first and the last one.

    What begins and ends a search, such as looking at the pattern and the last comparison, is not among it.
    """
    at = [record.elapsed for record in result.history if not record.reused]
    return (len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 and at[-1] > at[0] else float("nan")


def until(result: TuneResult, share: float = NEARLY) -> float:
    """Seconds from the first trial on until a search had a share of the speed that it ends with."""
    timed = [(record.elapsed, record.seconds) for record in result.history if record.seconds is not None]
    final = min(seconds for _, seconds in timed)
    return next(elapsed for elapsed, seconds in timed if share * seconds <= final) - result.history[0].elapsed


def measure(name: str, case: Case, **how: Any) -> SearchPace:
    """Search, and time the result in turn with untuned kernels."""
    began = time.perf_counter()
    result = tune_sparse(case.program, case.inputs, progress=False, **how)
    seconds = time.perf_counter() - began
    kernels = {
        "tuned": result.kernel,
        "default": build(case.program),
        "called": build(case.program, expected_calls=CALLS),
    }
    turns = [in_rounds(our_calls(kernels, case), ROUNDS // BINDINGS) for _ in range(BINDINGS)]
    times = {name: np.concatenate([turn[name] for turn in turns]) for name in kernels}
    over = {name: float(np.median(times[name] / times["tuned"])) for name in kernels}
    return SearchPace(name, result, seconds, over["default"], over["called"])


def table(paces: Sequence[SearchPace]) -> str:
    """Markdown, with medians below, and the worst case of the last columns."""
    figures = np.array([pace.figures() for pace in paces])
    middle = ["median", "", *(f"{value:.2f}" for value in np.nanmedian(figures, axis=0))]
    worst = ["smallest", "", *(f"{value:.2f}" for value in np.nanmin(figures, axis=0))]
    largest = ["largest", "", *(f"{value:.2f}" for value in np.nanmax(figures, axis=0))]
    return markdown([list(HEAD), *(pace.cells() for pace in paces), middle, worst, largest])


def run(sources: Sequence[Any], products: Sequence[SizedOp], **how: Any) -> list[SearchPace]:
    """Every case, one after another; what fails is said and left out."""
    return by_case(sources, products, lambda name, case: measure(name, case, **how))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="sparsetir bench search_rate", description=__doc__)
    add_sources(parser)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="quick", help="of each search; quick")
    parser.add_argument("--trials", type=int, metavar="N", help="of each search instead")
    args = parser.parse_args(argv)
    sources, products = sources_of(parser, args)
    how = {"preset": args.preset} if args.trials is None else {"max_trials": args.trials}
    paces = run(sources, products, **how)
    if not paces:
        parser.error("none of the files and operations belong together")
    print(table(paces))


if __name__ == "__main__":
    main()
