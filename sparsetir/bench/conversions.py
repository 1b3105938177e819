# SPDX-License-Identifier: Apache-2.0
"""Bound kernels that convert their matrix by themselves, beside the best that could have been done for each trace.

Run ``sparsetir bench conversions``. A trace binds a generated matrix and makes a number of calls. It is run
by a kernel that never converts, by one that converts at the first call whatever that costs, by one that was told the
number of calls, and by one that was told nothing. The clairvoyant picks the less of the first two; the others are shown
relative to that. Code is compiled before, as the disk cache keeps it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sparsetir import ops
from sparsetir.build import build
from sparsetir.utils.threads import get_num_threads
from sparsetir.workloads.suite import families

FOREVER = 10**9  # calls, for which any gain pays
PROGRAMS: dict[str, tuple[Callable[[], Any], str]] = {"spmv": (ops.spmv, "x"), "spmm": (ops.spmm, "B")}


def ways(op: str, calls: int) -> dict[str, Any]:
    """Return kernels for a trace, by what they are told about it."""
    program = PROGRAMS[op][0]
    return {
        "stays": build(program(), deterministic=True),
        "converts": build(program(), expected_calls=FOREVER),
        "told": build(program(), expected_calls=calls),
        "untold": build(program()),
    }


def seconds(kernel: Any, matrix: Any, operand: dict[str, Any], calls: int) -> float:
    """Return the time of binding a matrix and of all calls."""
    start = time.perf_counter()
    bound = kernel.bind(A=matrix)
    for _ in range(calls):
        bound(**operand)
    taken = time.perf_counter() - start
    if bound.adaptive is not None and (converter := bound.adaptive.converter) is not None:
        converter.join()  # not beside the next trace
    return taken


def lines(names: Sequence[str], size: str, traces: Sequence[int], columns: int, repeat: int) -> Iterator[str]:
    """Yield the rows of the table, and the geometric means and the worst of its ratios."""
    yield "| matrix | product | calls | stays ms | converts ms | told / best | untold / best |"
    yield "|---|---|---|---|---|---|---|"
    ratios: dict[str, list[float]] = {"told": [], "untold": []}
    for name in names:
        matrix = families()[name](size)
        for op, (_, argument) in PROGRAMS.items():
            shape = (matrix.shape[1], columns) if op == "spmm" else matrix.shape[1]
            operand = {argument: np.random.default_rng(0).standard_normal(shape, np.float32)}
            for calls in traces:
                kernels = ways(op, calls)
                for kernel in kernels.values():  # compiles
                    seconds(kernel, matrix, operand, 1)
                samples: dict[str, list[float]] = {way: [] for way in kernels}
                for _ in range(repeat):  # in turn
                    for way, kernel in kernels.items():
                        samples[way].append(seconds(kernel, matrix, operand, calls))
                least = {way: min(times) for way, times in samples.items()}
                best = min(least["stays"], least["converts"])
                for way, values in ratios.items():
                    values.append(least[way] / best)
                figures = f"{1e3 * least['stays']:.2f} | {1e3 * least['converts']:.2f}"
                shown = " | ".join(f"{values[-1]:.2f}" for values in ratios.values())
                yield f"| {name} | {op} | {calls} | {figures} | {shown} |"
    for way, values in ratios.items():
        yield f"\n{way}: geometric mean {statistics.geometric_mean(values):.2f}, worst {max(values):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("sparsetir bench conversions", description=__doc__)
    parser.add_argument("--matrices", nargs="+", default=list(families()), help="families of the suite")
    parser.add_argument("--size", default="medium", help="of the generated matrices")
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 3, 10, 100, 1000], help="of the traces")
    parser.add_argument("--columns", type=int, default=32, help="of the dense operand")
    parser.add_argument("--repeat", type=int, default=2, help="runs of which the least time counts")
    options = parser.parse_args(arguments)
    print(f"{get_num_threads()} thread(s), float32\n")
    for line in lines(options.matrices, options.size, options.calls, options.columns, options.repeat):
        print(line, flush=True)


if __name__ == "__main__":
    main()


__all__ = ["lines", "main", "seconds", "ways"]
