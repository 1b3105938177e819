# SPDX-License-Identifier: Apache-2.0
"""How time and memory grow with the number of nonzeros.

``python -m sparsetir.bench.scale`` multiplies members of a family that differ in size only, each in a fresh process,
and prints nanoseconds for each nonzero and the peak of the memory over that of operands, result and format.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from sparsetir import ops
from sparsetir.build import build
from sparsetir.errors import ArgumentError
from sparsetir.harness import suite
from sparsetir.harness.inputs import say
from sparsetir.harness.memory import CLEAR, STATUS, forget_peak, resident
from sparsetir.harness.tables import markdown

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
    held = sum(a.nbytes for a in (A.data, A.indices, A.indptr, *arrays.values()))
    return {"nnz": A.nnz, "seconds": float(np.median(samples)), "peak": (resident("VmHWM") - base) / held}


def apart(family: str, nnz: int, feat: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "sparsetir.bench.scale", "--one", family, str(nnz), "--feat", str(feat)]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        lines = found.stderr.strip().splitlines()
        raise ArgumentError(f"{family} with {nnz:,} nonzeros: {lines[-1] if lines else 'the process was ended'}")
    return dict(json.loads(found.stdout.splitlines()[-1]))


def table(families: Sequence[str], sizes: Sequence[int], feat: int) -> str:
    """Markdown, a row for each member."""
    rows = []
    for family in families:
        first = None
        for nnz in sizes:
            found = apart(family, nnz, feat)
            each = found["seconds"] / max(found["nnz"], 1) * 1e9
            first = first or each
            cells = [f"{int(found['nnz']):,}", f"{found['seconds'] * 1e3:.3f}", f"{each:.3f}", f"{each / first:.2f}"]
            rows.append([family, *cells, f"{found['peak']:.2f}"])
            say("  ".join(rows[-1]))
    return markdown([["family", "nonzeros", "ms", "ns a nonzero", "over the smallest", "peak over arrays"], *rows])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m sparsetir.bench.scale", description=__doc__)
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
        parser.error(f"expected families among {', '.join(suite.MATRICES)}; found {', '.join(unknown)}")
    print(table(args.families.split(","), [int(float(n)) for n in args.sizes.split(",")], args.feat))


if __name__ == "__main__":
    main()
