# SPDX-License-Identifier: Apache-2.0
"""What this package costs besides the loops: calls, compilation, caches, imports.

``sparsetir bench overhead`` prints a table of medians. What happens once in a process is measured in
fresh processes with a cache folder of their own, ``SPARSETIR_CACHE``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import scipy.sparse as sp

from sparsetir import ops
from sparsetir.build import build
from sparsetir.codegen.pipeline import lower
from sparsetir.einsum import einsum
from sparsetir.einsum.products import matmul
from sparsetir.formats.tensor import SparseTensor
from sparsetir.workloads.timing import Timing, interleave

SMALL = (10, 30)
CORA = (2708, 10_556)
MICRO, MILLI = 1e-6, 1e-3
NOISY = 0.3

# Prints seconds as JSON. Each step imports what it is the first to need; `modules` are those of the compiler.
FRESH_PROCESS = """
import json, time
marks = [time.perf_counter()]
mark = lambda: marks.append(time.perf_counter())
import sparsetir
mark()
import tvm
mark()
build, ops = sparsetir.build, sparsetir.ops
mark()
program = ops.spmm()
mark()
build(program)
mark()
build(program)
mark()
names = ["sparsetir", "tvm", "modules", "parse", "build", "again"]
print(json.dumps(dict(zip(names, (b - a for a, b in zip(marks, marks[1:]))))))
"""


@dataclass(frozen=True)
class Line:
    """One line of the table: what was measured, in which unit it is shown, and the goal if there is one (seconds)."""

    name: str
    seconds: float
    unit: float = MILLI
    goal: float | None = None

    def cells(self) -> list[str]:
        """Name, time, goal and whether it is reached."""
        unit = "us" if self.unit == MICRO else "ms"
        duration = f"{self.seconds / self.unit:.1f} {unit}"
        if self.goal is None:
            return [self.name, duration, "", ""]
        return [self.name, duration, f"{self.goal / self.unit:g} {unit}", "yes" if self.seconds <= self.goal else "no"]


def matrix(rows: int, nnz: int) -> sp.csr_array:
    """Return a square float32 matrix with about `nnz` entries at random places."""
    rng = np.random.default_rng(0)
    return sp.random_array((rows, rows), density=nnz / rows**2, format="csr", dtype="float32", rng=rng)


def calls(A: sp.csr_array) -> dict[str, Callable[[], object]]:
    """Return the ways to multiply `A` by one column, from the bare compiled function upwards."""
    kernel = build(ops.spmm())
    B, C = np.ones((A.shape[1], 1), "float32"), np.empty((A.shape[0], 1), "float32")
    # The parameters of the program in its order.
    raw = (A.data, B, C, A.indptr, A.indices, *A.shape, A.nnz, 1)
    bound, function, S = kernel.bind(A=A), kernel.function, SparseTensor.from_any(A)
    return {
        "raw": lambda: function(*raw),
        "bound": lambda: bound(B=B),
        "bound, output given": lambda: bound(B=B, C=C),
        "unbound": lambda: kernel(A=A, B=B),
        "matmul": lambda: matmul(A, B),
        "SparseTensor @ B": lambda: S @ B,
        "einsum": lambda: einsum("ij,jk->ik", A, B),
    }


def call_lines(A: sp.csr_array, *, rounds: int) -> tuple[list[Line], bool]:
    """Time calls on one matrix, each above the raw call, and return whether other work disturbed the times."""
    times = interleave(calls(A), rounds=rounds, burst_seconds=0.03, rest=0.05)
    raw = times["raw"].median
    title = f"{A.shape[0]} rows, {A.nnz} nonzeros, N=1"
    goals = {"bound": 10 * MICRO, "bound, output given": 10 * MICRO, "unbound": 60 * MICRO}
    goals |= dict.fromkeys(("matmul", "SparseTensor @ B", "einsum"), 72 * MICRO)
    above = [Line(f"  {name}, above raw", times[name].median - raw, MICRO, goal) for name, goal in goals.items()]
    return [Line(f"{title}: raw call", raw, MICRO), *above], any(is_noisy(t) for t in times.values())


def is_noisy(timing: Timing) -> bool:
    """Return whether other work disturbed a measurement."""
    return timing.spread > NOISY or timing.discarded > 0


def fresh_process(cache: Path) -> dict[str, float]:
    """Seconds of the first steps of a process whose kernels are kept in `cache`."""
    environment = {**os.environ, "SPARSETIR_CACHE": str(cache)}
    command = [sys.executable, "-c", FRESH_PROCESS]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Step by step."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


def process_lines(*, runs: int) -> list[Line]:
    """Time imports and builds, in processes that begin with an empty cache and with a filled one."""
    cold, warm = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(fresh_process(Path(folder)))
            warm.append(fresh_process(Path(folder)))
    first, later = medians(cold), medians(warm)
    steps = ("sparsetir", "modules", "parse", "build")
    return [
        Line("import sparsetir", first["sparsetir"]),
        Line("import tvm, after sparsetir", first["tvm"]),
        Line("  the compiler's modules, when first used", first["modules"]),
        Line("  SpMM parsed for the first time", first["parse"]),
        Line("  SpMM built, cache empty", first["build"]),
        Line("all of these after tvm: first kernel, cache empty", sum(first[n] for n in steps), goal=150 * MILLI),
        Line("all of these after tvm: first kernel, from the disk cache", sum(later[n] for n in steps)),
        Line("SpMM built from the disk cache", later["build"], goal=5 * MILLI),
        Line("SpMM built again in the process", first["again"]),
    ]


def compiler_lines(*, rounds: int) -> list[Line]:
    """Time parsing and lowering in a process that has done both before."""
    program = ops.spmm()
    cases = {
        "SpMM parsed again": ops.spmm,
        "SpMM lowered to stage II": lambda: lower(program, stage=2),
        "SpMM lowered to stage III": lambda: lower(program, stage=3),
    }
    return [Line(name, t.median) for name, t in interleave(cases, rounds=rounds, rest=0.0).items()]


def text(lines: list[Line]) -> str:
    """Return the table."""
    rows = [["", "median", "goal", "reached"], *(line.cells() for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = [str.ljust, str.rjust, str.rjust, str.ljust]
    aligned = ([f(cell, w) for f, cell, w in zip(pad, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and say so if the machine was busy."""
    parser = argparse.ArgumentParser(prog="sparsetir bench overhead", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="fresh processes with each cache")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each call")
    args = parser.parse_args(argv)
    if min(args.runs, args.rounds) < 1:
        parser.error("--runs and --rounds must be at least 1")
    lines: list[Line] = []
    noisy = False
    for shape in (SMALL, CORA):
        added_lines, disturbed = call_lines(matrix(*shape), rounds=args.rounds)
        lines, noisy = [*lines, *added_lines], noisy or disturbed
    lines += [*compiler_lines(rounds=args.rounds), *process_lines(runs=args.runs)]
    print(text(lines))
    if noisy:
        print("other work on this machine disturbed the calls: repeat on a quiet one before quoting these times")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
