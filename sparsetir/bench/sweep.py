# SPDX-License-Identifier: Apache-2.0
"""Sweeps over formats and choices, and over numbers of nonzeros."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx

from sparsetir import ops
from sparsetir.build import build
from sparsetir.codegen.pipeline import scheduled, to_stage_2
from sparsetir.codegen.target import make_target
from sparsetir.errors import ArgumentError, SparseTIRError
from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import dense_rows, ranked_candidates
from sparsetir.formats.pattern import pattern
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.transform.decompose import decompose_format
from sparsetir.utils.memory import CLEAR, STATUS, forget_peak, resident
from sparsetir.workloads import suite
from sparsetir.workloads.inputs import Case, dense_shapes, say
from sparsetir.workloads.plot import markdown
from sparsetir.workloads.timing import burst, interleave

# How time and memory grow with the number of nonzeros.
#
# ``sparsetir bench sweep`` multiplies members of a family that differ in size only, each in a fresh process,
# and prints nanoseconds for each nonzero and the peak of the memory over that of operands, result and format.


SIZES = "1e5,1e6,1e7,1e8"
FAMILIES = "rmat,stencil_2d,stencil_3d"
SECONDS, FEWEST = 1.0, 5


def measure(family: str, nnz: int, feat: int) -> dict[str, float]:
    """Seconds of a product and its memory, for one member of a family."""
    kernel = build(ops.spmm() if feat else ops.spmv())
    A = suite.MATRICES[family](np.random.default_rng(0), nnz)
    dense, out = ("B", "C") if feat else ("x", "y")
    shapes = [(n, feat) if feat else (n,) for n in reversed(A.shape)]
    forget_peak()
    base = resident("VmRSS") - A.data.nbytes - A.indices.nbytes - A.indptr.nbytes
    arrays = {dense: np.ones(shapes[0], np.float32), out: np.zeros(shapes[1], np.float32)}
    bound = kernel.bind(A=A)
    samples: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(samples) < FEWEST or time.perf_counter() < end:
        start = time.perf_counter()
        bound(**arrays)
        samples.append(time.perf_counter() - start)
    operand_bytes = sum(a.nbytes for a in (A.data, A.indices, A.indptr, *arrays.values()))
    return {"nnz": A.nnz, "seconds": float(np.median(samples)), "peak": (resident("VmHWM") - base) / operand_bytes}


def apart(family: str, nnz: int, feat: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "sparsetir.bench.sweep", "--one", family, str(nnz), "--feat", str(feat)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        raise ArgumentError(f"{family} with {nnz:,} nonzeros: {lines[-1] if lines else 'the process was ended'}")
    return dict(json.loads(process.stdout.splitlines()[-1]))


def table(families: Sequence[str], sizes: Sequence[int], feat: int) -> str:
    """Markdown, a row for each member."""
    rows = []
    for family in families:
        first = None
        for nnz in sizes:
            point = apart(family, nnz, feat)
            per_entry = point["seconds"] / max(point["nnz"], 1) * 1e9
            first = first or per_entry
            cells = [
                f"{int(point['nnz']):,}",
                f"{point['seconds'] * 1e3:.3f}",
                f"{per_entry:.3f}",
                f"{per_entry / first:.2f}",
            ]
            rows.append([family, *cells, f"{point['peak']:.2f}"])
            say("  ".join(rows[-1]))
    return markdown([["family", "nonzeros", "ms", "ns a nonzero", "over the smallest", "peak over arrays"], *rows])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="sparsetir bench sweep", description=__doc__)
    parser.add_argument("--families", default=FAMILIES, help=f"of {', '.join(suite.MATRICES)}; {FAMILIES}")
    parser.add_argument("--sizes", default=SIZES, help=f"nonzeros aimed at; {SIZES}")
    parser.add_argument("--feat", type=int, default=32, help="columns of the dense operand, 0 for a vector; 32")
    parser.add_argument("--one", nargs=2, metavar=("FAMILY", "NNZ"), help="measure one in this process, print JSON")
    args = parser.parse_args(argv)
    if not CLEAR.exists():
        parser.error(f"memory is read from {STATUS.parent}, which this system has not")
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.feat)))
        return
    unknown = [f for f in args.families.split(",") if f not in suite.MATRICES]
    if unknown:
        parser.error(f"expected families among {', '.join(suite.MATRICES)}, got {', '.join(unknown)}")
    print(table(args.families.split(","), [int(float(n)) for n in args.sizes.split(",")], args.feat))


if __name__ == "__main__":
    main()


# The best of a coarse sweep: every format that suits the pattern, and a few choices of the sketches for each.
#
# Nothing depends on a matrix but its pattern; a program, format and set of choices is compiled once for all matrices.


BURST = 0.03  # seconds of calls
REFINED = 2  # formats that are tried with several choices
FINALISTS = 4  # options that are measured again, in turn
REST = 0.02  # seconds between turns


@dataclass(frozen=True)
class Option:
    """A format (None: the program as it is) and choices (None: those of an untuned kernel)."""

    format: Format | None
    choices: Choices | None

    def __str__(self) -> str:
        format_text = "csr()" if self.format is None else repr(self.format)
        return f"{format_text}, untuned" if self.choices is None else f"{format_text}, {self.choices}"


def options(case: Case) -> Iterator[Option]:
    """Yield what is tried for a case at first: the program as it is with several choices, and other formats untuned."""
    base = defaults.usual(case.program, Registers.of(make_target(None, case.program)))
    yield Option(None, None)
    yield from different(case.program, [Option(None, choices) for choices in defaults.sweep(base)])
    for format in ranked_candidates(pattern(case.sparse), feat=dense_rows(dense_shapes(case.inputs))):
        yield Option(format, None)


def refined(case: Case, format: Format) -> Iterator[Option]:
    """Yield a format that did well with several choices."""
    parts = decompose_format(case.program, {next(iter(case.inputs)): format})
    base = defaults.usual(parts.func, Registers.of(make_target(None, parts.func)))
    yield from different(parts.func, [Option(format, choices) for choices in defaults.sweep(base, over_format=True)])


def different(func: tirx.PrimFunc, options: Sequence[Option]) -> Iterator[Option]:
    """Those whose loops differ from the untuned ones and from each other's."""
    second, target = to_stage_2(func), make_target(None, func)
    distinct = [scheduled(second, None, target)]
    for option in options:
        loops = scheduled(second, option.choices, target)
        if not any(tvm_ffi.structural_equal(loops, previous) for previous in distinct):
            distinct.append(loops)
            yield option


def best_of(case: Case) -> tuple[Any, Option] | None:
    """Return the fastest kernel and how it came about; None if none can be built."""
    times = measured(case, options(case))
    for format in [o.format for o in ranked(times) if o.format is not None][:REFINED]:
        times |= measured(case, refined(case, format))
    if not times:
        return None
    baseline = [option for option in times if option == Option(None, None)]
    close = list(dict.fromkeys([*ranked(times)[:FINALISTS], *baseline]))
    kernels = {str(option): kernel_of(case, option) for option in close}
    final = interleave({name: call_of(case, kernel) for name, kernel in kernels.items()}, rest=REST)
    best = min(close, key=lambda option: final[str(option)].median)
    return kernels[str(best)], best


def ranked(times: dict[Option, float]) -> list[Option]:
    """Return the options, the fastest first."""
    return sorted(times, key=lambda option: times[option])


def measured(case: Case, options: Iterator[Option]) -> dict[Option, float]:
    """Seconds of the fastest call with each option that can be built."""
    times = {}
    for option in options:
        try:
            times[option] = fastest(call_of(case, kernel_of(case, option)))
        except (SparseTIRError, MemoryError) as error:
            say(f"without {option}: {error}")
    return times


def call_of(case: Case, kernel: Any) -> Callable[[], Any]:
    """Return a call of a kernel with its sparse argument bound."""
    (name, sparse), *remaining = case.inputs.items()
    bound, dense = kernel.bind(**{name: sparse}), dict(remaining)
    return lambda: bound(**dense)


def kernel_of(case: Case, option: Option) -> Any:
    """Return the compiled kernel of an option."""
    program = case.program
    if option.format is not None:
        name = next(iter(case.inputs))
        program = decompose_format(program, {name: option.format})
    return build(program, schedule=option.choices)


def fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest call of a burst."""
    return min(burst(call, BURST))


__all__ = ["Option", "best_of", "options"]
