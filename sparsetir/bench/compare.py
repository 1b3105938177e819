# SPDX-License-Identifier: Apache-2.0
"""SpMM of this package side by side with other libraries, on matrices in files.

``python -m sparsetir.bench.compare FILES`` (or ``--data FOLDER``) prints a table: one row for a matrix and a number
of columns, medians of float32 products into an array that is there already, and ratios to scipy and to the fastest
other library. Peers that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

import sparsetir
from sparsetir.bench.peers import available, missing, set_threads, spmm
from sparsetir.bench.timing import Timing, interleave
from sparsetir.errors import ArgumentError, FileFormatError, SparseTIRError
from sparsetir.files import OPENERS, READERS
from sparsetir.threads import get_num_threads
from sparsetir.tuning.database import machine_name
from sparsetir.tuning.operands import Case, make_case
from sparsetir.tuning.report import aligned

DONE, FINDING, WRONG_USE = 0, 1, 2
OURS = ("untuned", "tuned")
PACKAGES = ("apache-tvm", "numpy", "scipy", "torch", "mkl")
SUMMARIES: dict[str, Callable[[list[float]], float]] = {"geometric mean": geometric_mean, "smallest": min}
NOISY = 0.3
MANY_TRIALS = 10_000
# Operand, our result and what the check holds; each peer has a result of its own, and so has tuning, twice.
OWN_ARRAYS, TUNING_ARRAYS = 4, 2
COLUMNS_CHECKED_AT_ONCE = 32
# Rounding errors, relative to the sum of magnitudes.
TOLERANCE = 1e-5


class WrongResultError(SparseTIRError, ArithmeticError):
    """Our product is not scipy's."""


@dataclass(frozen=True)
class Row:
    """Times of one product.

    Parameters
    ----------
    matrix : str
        Name of the file.
    rows, columns, nnz, feat : int
    times : dict of str to Timing
        Ours (`OURS`) and the peers.
    """

    matrix: str
    rows: int
    columns: int
    nnz: int
    feat: int
    times: dict[str, Timing]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.times if name not in OURS]

    @property
    def spread(self) -> float:
        """The largest of all cases."""
        return max(timing.spread for timing in self.times.values())

    def ratio(self, ours: str, baseline: str) -> float:
        """How many times faster than a peer, or than the fastest one ("best")."""
        names = self.peers if baseline == "best" else [baseline]
        return min(self.times[name].median for name in names) / self.times[ours].median

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the single samples."""
        times = {name: summary(timing) for name, timing in self.times.items()}
        return {**asdict(self), "times": times}


def summary(timing: Timing) -> dict[str, float]:
    """The figures of a measurement, in seconds."""
    names = ("median", "min", "max", "spread", "discarded")
    return {name: getattr(timing, name) for name in names}


@dataclass(frozen=True)
class Plan:
    """How to measure: seconds of tuning (0: none), where tuning keeps its trials, rounds, rest in seconds."""

    tune: float = 0.0
    database: Path | None = None
    rounds: int = 3
    rest: float = 0.25


# ---------------------------------------------------------------------------------------------------- matrices


def find_files(folder: Path) -> list[Path]:
    """Every file below `folder` whose extension `sparsetir.read` knows."""
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {folder}")
    return sorted(path for path in folder.rglob("*") if path.is_file() and extension(path) in READERS)


def extension(path: Path) -> str:
    """The suffix without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def matrices(paths: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Name and contents of every file that holds a matrix with entries; the others are named on stderr."""
    for path in paths:
        try:
            found = sparsetir.read(path)
        except FileFormatError as error:
            say(f"skipped: {error}")
            continue
        if len(found.shape) != 2:
            say(f"skipped: {path} is a tensor of {len(found.shape)} dimensions, expected a matrix")
        elif not found.nnz:
            say(f"skipped: {path} has no nonzeros")
        else:
            yield path.name.partition(".")[0], found


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def free_memory() -> float:
    """Bytes that can be had without swapping; infinite where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    facts = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(facts["MemAvailable"].split()[0]) * 1024


# ---------------------------------------------------------------------------------------------------- measuring


def our_call(kernel: Any, inputs: dict[str, Any]) -> tuple[Callable[[], Any], np.ndarray]:
    """A call as a user makes it in a loop, the matrix bound and the output given; and the output."""
    A, B = inputs["A"], inputs["B"]
    bound, C = kernel.bind(A=A), np.empty((A.shape[0], B.shape[1]), A.dtype)
    return lambda: bound(B=B, C=C), C


def check(name: str, call: Callable[[], Any], C: np.ndarray, case: Case) -> None:
    """Compare our product with scipy's, some columns at a time."""
    C.fill(np.nan)
    call()
    A, B = case.inputs["A"], case.inputs["B"]
    for first in range(0, B.shape[1], COLUMNS_CHECKED_AT_ONCE):
        part = np.s_[:, first : first + COLUMNS_CHECKED_AT_ONCE]
        allowed = TOLERANCE * (abs(A) @ np.abs(B[part]))
        if not np.all(np.abs(C[part] - A @ B[part]) <= allowed):
            raise WrongResultError(f"{name}: our product differs from scipy's; please report this matrix")


def kernels(case: Case, plan: Plan) -> dict[str, Any]:
    """Our kernels: without tuning, and tuned if asked for."""
    found = {"untuned": sparsetir.build(case.program)}
    if plan.tune:
        budget: dict[str, Any] = {"max_trials": MANY_TRIALS, "max_seconds": plan.tune}
        result = sparsetir.tune_sparse(case.program, case.inputs, database=plan.database, progress=False, **budget)
        found["tuned"] = result.kernel
    return found


def measure(name: str, matrix: Any, feat: int, plan: Plan) -> Row | None:
    """One row; None (and a word on stderr) if the operands do not fit into memory."""
    rows, columns = matrix.shape
    arrays = OWN_ARRAYS + len(available("spmm")) + (TUNING_ARRAYS if plan.tune else 0)
    needed = arrays * 4 * feat * max(rows, columns)
    if needed > free_memory():
        say(f"skipped: {name} with N={feat} needs {needed / 1e9:.1f} GB of memory for its operands")
        return None
    case = make_case("spmm", matrix, feat=feat)
    calls = {}
    for kind, kernel in kernels(case, plan).items():
        calls[kind], out = our_call(kernel, case.inputs)
        check(f"{name} with N={feat}, {kind}", calls[kind], out, case)
    calls |= {peer: spmm(peer, case.inputs["A"], case.inputs["B"]) for peer in available("spmm")}
    times = interleave(calls, rounds=plan.rounds, rest=plan.rest)
    return Row(name, rows, columns, case.inputs["A"].nnz, feat, times)


# ---------------------------------------------------------------------------------------------------- tables


def ratios(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Each ratio's title and its value in every row."""
    ours = [name for name in OURS if name in rows[0].times]
    prefix = {name: f"{name} " if len(ours) > 1 else "" for name in ours}
    pairs = [(name, baseline) for name in ours for baseline in ("scipy", "best")]
    return {f"{prefix[o]}vs {b}": [row.ratio(o, b) for row in rows] for o, b in pairs}


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of the table: a heading, the rows, the geometric mean and the smallest of each ratio."""
    names, shown = list(rows[0].times), ratios(rows)
    heading = ["matrix", "nonzeros", "N", *(f"{name} ms" for name in names), *shown, "spread"]
    out = [heading]
    for n, row in enumerate(rows):
        times = [f"{row.times[name].median * 1e3:.4g}" for name in names]
        compared = [f"{values[n]:.2f}" for values in shown.values()]
        out.append([row.matrix, f"{row.nnz:,}", str(row.feat), *times, *compared, f"{row.spread:.0%}"])
    blank = [""] * (2 + len(names))
    for title, of in SUMMARIES.items():
        out.append([title, *blank, *(f"{of(values):.2f}" for values in shown.values()), ""])
    return out


def markdown(cells: list[list[str]]) -> str:
    """The same cells as a Markdown table, numbers to the right."""
    heading, *rest = cells
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heading, rule, *rest])


def circumstances(rows: Sequence[Row], load: float) -> list[str]:
    """What the times hold for, the peers that are missing, and whether the machine was busy."""
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := installed(name)))
    lines = [f"{machine_name()}; {get_num_threads()} threads (scipy uses one); float32; {versions}"]
    lines += [f"without {peer}: {why}" for peer, why in missing().items()]
    return lines + busy(rows, load)


def installed(package: str) -> str | None:
    """The version of a package, None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def busy(rows: Sequence[Row], load: float) -> list[str]:
    """One line if other work disturbed the times, none otherwise."""
    noisy = sum(row.spread > NOISY for row in rows)
    if load <= 0.5 and not noisy:
        return []
    causes = [f"load {load:.1f} before the first measurement"] if load > 0.5 else []
    causes += [f"spread above {NOISY:.0%} in {noisy} of {len(rows)} rows"] if noisy else []
    return [f"the machine was busy ({', '.join(causes)}): repeat on a quiet one before quoting these times"]


# ---------------------------------------------------------------------------------------------------- command


def feats(text: str) -> list[int]:
    """Numbers of columns, separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected positive numbers separated by commas, found {text!r}")
    return [int(part) for part in parts]


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = argparse.ArgumentParser(prog="python -m sparsetir.bench.compare", description=__doc__)
    top.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".mtx, .npz, .smtx, also with .gz or .xz")
    top.add_argument("--data", type=Path, metavar="FOLDER", help="every matrix in it")
    top.add_argument("--feat", type=feats, default=[32, 128, 512], metavar="N,N,...", help="columns of B")
    top.add_argument("--tune", type=float, default=0.0, metavar="S", help="also tune for S seconds before each row")
    top.add_argument(
        "--database", type=Path, default=Path("tuning-compare.jsonl"), metavar="FILE", help="where tuning keeps trials"
    )
    top.add_argument("--threads", type=int, metavar="N", help="for every library; by default all cores")
    top.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each library in a row")
    top.add_argument("--rest", type=float, default=0.25, metavar="S", help="seconds of sleep before each turn")
    top.add_argument("--markdown", type=Path, metavar="OUT", help="write the table as Markdown")
    top.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write files."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    try:
        rows = run(args)
    except WrongResultError as error:
        say(str(error))
        return FINDING
    except (SparseTIRError, OSError) as error:
        say(str(error))
        return WRONG_USE
    report(rows, circumstances(rows, load), args)
    return DONE


def run(args: argparse.Namespace) -> list[Row]:
    """Every row, with a line on stderr for each."""
    if args.threads is not None:
        sparsetir.set_num_threads(args.threads)
    set_threads(get_num_threads())
    paths = [*args.files, *(find_files(args.data) if args.data else [])]
    if not paths:
        raise ArgumentError("expected files with matrices, or --data FOLDER; found none")
    plan = Plan(args.tune, args.database, args.rounds, args.rest)
    rows = []
    for name, matrix in matrices(paths):
        for feat in args.feat:
            row = measure(name, matrix, feat, plan)
            if row is not None:
                rows.append(row)
                say(progress(row))
    if not rows:
        raise ArgumentError("none of the files could be measured")
    return rows


def progress(row: Row) -> str:
    """A row in one line."""
    times = ", ".join(f"{name} {timing.median * 1e3:.4g}" for name, timing in row.times.items())
    return f"{row.matrix} N={row.feat}: {times} ms"


def report(rows: list[Row], notes: list[str], args: argparse.Namespace) -> None:
    """Print the table and write the files asked for."""
    cells = table(rows)
    print("\n".join([*aligned(cells), "", *notes]))
    if args.markdown:
        text = "\n".join([markdown(cells), "", *(f"{note}  " for note in notes)])
        written(args.markdown, text)
    if args.json:
        summaries = {
            name: {title: of(values) for title, of in SUMMARIES.items()} for name, values in ratios(rows).items()
        }
        facts = {"notes": notes, "threads": get_num_threads(), "ratios": summaries}
        written(args.json, json.dumps({**facts, "rows": [row.as_dict() for row in rows]}, indent=1))


def written(path: Path, text: str) -> None:
    """Write a file, and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n")
    say(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
