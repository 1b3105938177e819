# SPDX-License-Identifier: Apache-2.0
"""What each format makes of a matrix: memory, padding, the time to convert and the time of the untuned SpMM.

``sparsetir bench formats FILES`` (or ``--data FOLDER``) prints a table: one row for a matrix and a format
that suits its pattern. A product is timed in turn with the one over csr, so that other work on the machine slows both,
and is compared with scipy's before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsetir.bench.measure import our_call
from sparsetir.bench.report import written
from sparsetir.build import build
from sparsetir.errors import ArgumentError, SparseTIRError
from sparsetir.formats.compressed import CSR
from sparsetir.formats.format import Format
from sparsetir.formats.heuristics import MOST_VALUES, Considered, candidates, considered
from sparsetir.formats.pattern import Pattern, pattern
from sparsetir.formats.tensor import SparseTensor
from sparsetir.transform.decompose import decompose_format
from sparsetir.utils.caches import cached_property
from sparsetir.utils.machine import machine_name
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads.inputs import (
    Case,
    as_float32,
    find_files,
    free_memory,
    from_files,
    loaded,
    make_case,
    reason,
    say,
)
from sparsetir.workloads.plot import aligned, markdown
from sparsetir.workloads.reference import check
from sparsetir.workloads.timing import NOISY, Timing, interleave

DONE, FINDING, WRONG_USE = 0, 1, 2
CONVERSIONS, CONVERTING = 3, 0.5  # a conversion is repeated so often, but not after that many seconds
ROUNDS = 3
SLOW = 8.0  # a call that many times slower than csr's has a single turn
ARRAYS_AT_ONCE = 4  # operands, results of both formats, and what the comparison with scipy needs
HEADING = ("format", "MiB", "padding", "pieces", "convert s")
TIMED = ("ms", "vs csr", "spread")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one format.

    Parameters
    ----------
    format : Format
    nbytes : int
        Of its values (float32) and index arrays.
    padding : float
        Fraction of the stored values that are no entry.
    pieces : int
    seconds : float
        The fastest of a few conversions.
    spmm, csr : Timing or None
        Of the untuned products over this format and, in turn with it, over csr.
    """

    format: Format
    nbytes: int
    padding: float
    pieces: int
    seconds: float
    spmm: Timing | None = None
    csr: Timing | None = None

    @property
    def spread(self) -> float:
        """The larger one of the two times; 0 where there are none."""
        return max((t.spread for t in (self.spmm, self.csr) if t is not None), default=0.0)

    def cells(self) -> list[str]:
        """Return a row of the table without times."""
        size = f"{self.nbytes / 2**20:.3g}"
        return [repr(self.format), size, f"{self.padding:.0%}", str(self.pieces), f"{self.seconds:.3g}"]

    def times(self) -> list[str]:
        """Return the times in the row."""
        if self.spmm is None or self.csr is None:
            return ["-"] * len(TIMED)
        ratio = self.csr.median / self.spmm.median
        return [f"{self.spmm.median * 1e3:.4g}", f"{ratio:.2f}", f"{self.spread:.0%}"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {n: getattr(self, n) for n in ("nbytes", "padding", "pieces", "seconds")}
        times = {n: t.as_dict() for n, t in (("spmm", self.spmm), ("csr", self.csr)) if t is not None}
        return {"format": repr(self.format), **facts, **times}


@dataclass(frozen=True)
class Survey:
    """A matrix or tensor in every format that suits it.

    Parameters
    ----------
    name : str
    pattern : Pattern
    feat : int or None
        Columns of the dense operand; None where nothing was timed.
    stored : list of StoredTensor
        The fastest product first, where any was timed.
    skipped : list of Considered
        Formats that would need too much memory.
    findings : list of str
        Formats that failed or whose product was wrong.
    """

    name: str
    pattern: Pattern
    feat: int | None = None
    stored: list[StoredTensor] = field(default_factory=list)
    skipped: list[Considered] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    @property
    def heading(self) -> list[str]:
        """Of the table."""
        return [*HEADING, *(TIMED if self.feat else ())]

    def table(self) -> list[list[str]]:
        """Its rows."""
        return [[*row.cells(), *(row.times() if self.feat else ())] for row in self.stored]

    def report(self) -> str:
        """Return the pattern, the table, and what is not in it, as text."""
        lines = [str(self.pattern), "", *aligned([self.heading, *self.table()]), ""]
        if self.feat:
            times = f"untuned SpMM with {self.feat} columns, float32, {get_num_threads()} threads, median of a call"
            lines.append(f"ms: {times}; vs csr: times as fast")
        lines += [f"not stored: {c.format!r}: {c.objection}" for c in self.skipped]
        return "\n".join([*lines, *self.findings])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "pattern": self.pattern.as_dict(),
            "feat": self.feat,
            "threads": get_num_threads(),
            "machine": machine_name(),
            "stored": [row.as_dict() for row in self.stored],
            "skipped": [{"format": repr(c.format), "values": c.values, "why": c.objection} for c in self.skipped],
            "findings": self.findings,
        }


# ---------------------------------------------------------------------------------------------------- measuring


def survey(
    name: str,
    tensor: Any,
    *,
    known: Pattern | None = None,
    feat: int | None = None,
    most: float = MOST_VALUES,
    rounds: int = ROUNDS,
) -> Survey:
    """Store a tensor in every format that suits its pattern, and time SpMM.

    Parameters
    ----------
    name : str
        What the tensor is called in messages.
    tensor : scipy.sparse array or CooTensor
        Taken as float32.
    known : Pattern, optional
        ``sparsetir.pattern(tensor)``, where it is at hand.
    feat : int, optional
        Columns of the dense operand of the SpMM that is timed, of which `tensor` must be a matrix.
    most : float
        Formats that store more values than this for each entry are left out.
    rounds : int
        Turns of each product.

    Raises
    ------
    ArgumentError
        When SpMM is asked for and `tensor` is no matrix, or its operands do not fit into memory.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> found = survey("diagonal", sp.eye_array(8, format="csr"))
    >>> [stored.format for stored in found.stored if stored.padding == 0][:3]
    [csr(), csc(), dcsr()]
    """
    case = operands(name, tensor, feat) if feat else None
    sparse = as_float32(tensor) if case is None else case.inputs["A"]
    result = Survey(name, known or pattern(tensor), feat)
    result.skipped.extend(c for c in considered(result.pattern, most=most) if c.objection)
    products = FormatProducts(name, case, rounds) if case is not None else None
    listed = candidates(result.pattern, most=most)
    for n, format in enumerate(listed, 1):
        with status(f"{name}: {n} of {len(listed)}, {format!r}"):
            try:
                result.stored.append(measure(sparse, format, products))
            except Exception as error:  # one format must not end a run over many
                result.findings.append(f"failed: {format!r}: {reason(error)}")
        if result.findings and result.findings[-1].startswith(f"failed: {format!r}:"):
            say(f"{name}: {result.findings[-1]}")
    if feat:
        result.stored.sort(key=lambda row: row.spmm.median / row.csr.median if row.spmm and row.csr else 0.0)
    return result


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show a line on stderr while something runs, where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"\r{text}")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(f"\r{' ' * len(text)}\r")
        sys.stderr.flush()


def measure(sparse: Any, format: Format, products: FormatProducts | None) -> StoredTensor:
    """Return the row of a format in the table."""
    stored = convert(sparse, format)
    if products is None:
        return stored
    spmm, csr = products.time(format)
    return replace(stored, spmm=spmm, csr=csr)


def convert(sparse: Any, format: Format) -> StoredTensor:
    """Store a tensor, a few times where that is quick."""
    best, end = float("inf"), time.perf_counter() + CONVERTING
    for _ in range(CONVERSIONS):
        start = time.perf_counter()
        tensor = SparseTensor.from_any(sparse, format)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return StoredTensor(format, tensor.nbytes, tensor.padding, len(tensor.pieces), best)


def operands(name: str, tensor: Any, feat: int) -> Case:
    """SpMM with a matrix, if the operands fit into memory."""
    if len(tensor.shape) != 2:
        sizes = " x ".join(map(str, tensor.shape))
        raise ArgumentError(f"SpMM takes a matrix, got {sizes} in {name}: formats of tensors are not timed")
    needed, free = ARRAYS_AT_ONCE * 4 * feat * max(tensor.shape), free_memory()
    if needed > free:
        requirement = f"SpMM of {name} with {feat} columns needs {needed / 1e9:.1f} GB of memory"
        raise ArgumentError(f"{requirement}, got {free / 1e9:.1f} GB free: try fewer columns")
    return make_case("spmm", tensor, feat=feat)


class FormatProducts:
    """The untuned SpMM of one matrix, over one format after the other.

    Parameters
    ----------
    name : str
        Of the matrix.
    case : Case
        The program and its arguments.
    rounds : int
        Turns of each product.
    """

    def __init__(self, name: str, case: Case, rounds: int) -> None:
        self.name, self.case, self.rounds = name, case, rounds

    @cached_property
    def csr(self) -> Callable[[], Any]:
        """The product over csr."""
        return self.call(CSR())

    def call(self, format: Format) -> Callable[[], Any]:
        """Return the product over a format, after it was compared with scipy's."""
        kernel = build(decompose_format(self.case.program, {"A": format}))
        call = our_call(kernel, self.case)
        check(f"{self.name} as {format!r}", call, self.case)
        return call

    def time(self, format: Format) -> tuple[Timing, Timing]:
        """Return times of the product over a format, and over csr."""
        call = self.call(format)
        rounds = 1 if seconds(call) > SLOW * seconds(self.csr) else self.rounds
        # No rest between the turns: both run on the same threads.
        times = interleave({"csr": self.csr, "other": call}, rounds=rounds, rest=0.0)
        return times["other"], times["csr"]


def seconds(call: Callable[[], Any]) -> float:
    """Of a single call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------------- command


def columns(text: str) -> int:
    """Return a number of columns."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of columns, 0 to time nothing, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    top = argparse.ArgumentParser(prog="sparsetir bench formats", description=__doc__)
    top.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".mtx, .npz, .smtx, also with .gz or .xz")
    top.add_argument("--data", type=Path, metavar="FOLDER", help="every matrix in it")
    top.add_argument("--feat", type=columns, default=128, metavar="N", help="columns of B; 0: no product is timed")
    top.add_argument("--most", type=float, default=MOST_VALUES, metavar="X", help="most values stored for each entry")
    top.add_argument("--threads", type=int, metavar="N", help="by default all cores")
    top.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="turns of each product")
    top.add_argument("--markdown", type=Path, metavar="OUT", help="write the table as Markdown")
    top.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write files after each matrix."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        surveys = run(args)
    except (SparseTIRError, OSError) as error:
        say(str(error))
        return WRONG_USE
    print("\n".join([*aligned(cells(surveys)), "", *notes(surveys)]))
    return FINDING if any(one.findings for one in surveys) else DONE


def run(args: argparse.Namespace) -> list[Survey]:
    """Every matrix."""
    if args.threads is not None:
        set_num_threads(args.threads)
    paths = [*args.files, *(find_files(args.data) if args.data else [])]
    if not paths:
        raise ArgumentError("expected files with matrices, or --data FOLDER, got none")
    surveys: list[Survey] = []
    for one in surveys_of(paths, args):
        surveys.append(one)
        write(surveys, args)
    if not surveys:
        raise ArgumentError("none of the files could be measured")
    return surveys


def surveys_of(paths: Sequence[Path], args: argparse.Namespace) -> Iterator[Survey]:
    """One matrix after the other; what cannot be measured is named on stderr."""
    for name, matrix in matrices(paths):
        try:
            yield survey(name, matrix, feat=args.feat or None, most=args.most, rounds=args.rounds)
        except ArgumentError as error:
            say(f"skipped: {error}")


def matrices(paths: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Name and contents of every file that holds a matrix with entries; the others are named on stderr."""
    for path in paths:
        for name, matrix in loaded(from_files([path])):
            if len(matrix.shape) != 2:
                say(f"skipped: {path} is a tensor of {len(matrix.shape)} dimensions, expected a matrix")
            elif not matrix.nnz:
                say(f"skipped: {path} has no nonzeros")
            else:
                yield name, matrix


def cells(surveys: Sequence[Survey]) -> list[list[str]]:
    """Cells of the table, a heading first."""
    heading = ["matrix", "nonzeros", *surveys[0].heading]
    return [heading, *([s.name, f"{s.pattern.nnz:,}", *row] for s in surveys for row in s.table())]


def notes(surveys: Sequence[Survey]) -> list[str]:
    """Return what the figures hold for, and what is not in the table."""
    feat = surveys[0].feat
    times = f"ms: untuned SpMM with {feat} columns, median of a call; vs csr: times as fast; " if feat else ""
    lines = [f"{times}float32, {get_num_threads()} threads; {machine_name()}", *busy(surveys)]
    for one in surveys:
        if one.skipped:
            skipped = ", ".join(f"{c.format!r} ({c.values:,.1f})" for c in one.skipped)
            lines.append(f"{one.name}: not stored, with too many values for each entry: {skipped}")
        lines += [f"{one.name}: {finding}" for finding in one.findings]
    return lines


def busy(surveys: Sequence[Survey]) -> list[str]:
    """One line if other work disturbed the times, none otherwise."""
    rows = [row for one in surveys for row in one.stored]
    noisy = sum(row.spread > NOISY for row in rows)
    if not noisy:
        return []
    cause = f"spread above {NOISY:.0%} in {noisy} of {len(rows)} rows"
    return [f"the machine was busy ({cause}): repeat on a quiet one before quoting these times"]


def write(surveys: Sequence[Survey], args: argparse.Namespace) -> None:
    """Write the files asked for, as far as the run has come."""
    if args.markdown:
        text = [markdown(cells(surveys)), "", *(f"{note}  " for note in notes(surveys))]
        written(args.markdown, "\n".join(text))
    if args.json:
        written(args.json, json.dumps([one.as_dict() for one in surveys], indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
