# SPDX-License-Identifier: Apache-2.0
"""Traces of calls with `sparsetir.scipy.accelerate` beside plain scipy, in turn, in several processes.

Run ``sparsetir bench scipy_traces``. A trace is a number of calls of an operation on a generated matrix; what
counts is its whole time, with whatever is spent on loading and comparing kernels. A first run compiles the kernels and
leaves the outcomes of its comparisons; entering the context, some tenths of a millisecond, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

ROW_ENTRIES = 16
COLUMNS = 32
MAX_WORK = 3e9  # calls times entries times columns of a trace
PAIR_SECONDS, MAX_PAIRS = 0.5, 50  # of a process


def operations(rows: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return the operations on a drawn matrix: work in units of entries, and the call."""
    import numpy as np
    import scipy.sparse as sp

    rng = np.random.default_rng(0)
    density = min(1.0, ROW_ENTRIES / rows)
    A = sp.random_array((rows, rows), density=density, format="csr", rng=rng)
    x, X = rng.standard_normal(rows), rng.standard_normal((rows, COLUMNS))
    return {
        "A @ x": (1, lambda: A @ x),
        "A @ X": (COLUMNS, lambda: A @ X),
        "A @ A": (10 * ROW_ENTRIES, lambda: A @ A),
        "A + A": (10, lambda: A + A),
    }


def run(operation: str, rows: int, calls: int, pairs: int) -> list[tuple[float, float]]:
    """Run pairs of traces in this process, after a call that pays for what a process does once.

    Returns
    -------
    list of (float, float)
        Seconds of scipy and of an acceleration that begins with the trace; every other pair has them the other way
        round.
    """
    from sparsetir.scipy import accelerate

    _, call = operations(rows)[operation]

    def trace(is_accelerated: bool) -> float:
        with accelerate() if is_accelerated else nullcontext():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - start

    call()
    measured = []
    for pair in range(pairs):
        is_swapped = pair % 2 == 1
        first, second = trace(is_swapped), trace(not is_swapped)
        measured.append((second, first) if is_swapped else (first, second))
    return measured


def compare(operation: str, rows: int, calls: int, repeat: int) -> tuple[float, list[float]]:
    """Return the median seconds of scipy's trace, and the ratios of all pairs of traces, sorted."""
    measured: list[tuple[float, float]] = []
    pairs = 1
    for number in range(repeat):
        command = [sys.executable, "-m", __spec__.name, "--one", operation, str(rows), str(calls), str(pairs)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        pair_seconds = [(float(plain), float(ours)) for plain, ours in map(str.split, done.stdout.splitlines())]
        if number == 0:  # short traces are noisy, and cost little
            pairs = int(min(MAX_PAIRS, max(1.0, PAIR_SECONDS / sum(pair_seconds[0]))))
        measured += pair_seconds
    ratios = sorted(ours / plain for plain, ours in measured)
    return statistics.median(plain for plain, _ in measured), ratios


def lines(sizes: Sequence[int], counts: Sequence[int], repeat: int) -> Iterator[str]:
    """Yield the rows of the table."""
    yield "| operation | rows | calls | scipy ms | accelerated / scipy: least, median, largest |"
    yield "|---|---|---|---|---|"
    for rows in sizes:
        for operation, (work, _) in operations(rows).items():
            for calls in counts:
                if calls > 1 and calls * rows * ROW_ENTRIES * work > MAX_WORK:
                    continue
                seconds, ratios = compare(operation, rows, calls, repeat)
                spread = ", ".join(f"{r:.2f}" for r in (ratios[0], statistics.median(ratios), ratios[-1]))
                yield f"| `{operation}` | {rows} | {calls} | {seconds * 1e3:.3g} | {spread} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or run one trace of it."""
    parser = argparse.ArgumentParser("sparsetir bench scipy_traces", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[300, 3000, 100_000])
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 10, 100, 1000, 10_000])
    parser.add_argument("--repeat", type=int, default=3, help="processes of each trace")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        operation, rows, calls, pairs = options.one
        for plain, ours in run(operation, int(rows), int(calls), int(pairs)):
            print(plain, ours)
        return
    for line in lines(options.rows, options.calls, options.repeat):
        print(line, flush=True)


if __name__ == "__main__":
    main()


__all__ = ["compare", "lines", "run"]
