# SPDX-License-Identifier: Apache-2.0
"""Expressions of index notation beside ready programs and other libraries."""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import ops
from sparsetir.build import build
from sparsetir.einsum import einsum, einsum_expression
from sparsetir.formats.tensor import SparseTensor
from sparsetir.script.printer import parse
from sparsetir.utils import memory
from sparsetir.utils.arguments import parse_seconds, take_old_options
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads.expressions import CASES, PEERS, ExprCase, agree
from sparsetir.workloads.inputs import reason, say
from sparsetir.workloads.peers import set_threads
from sparsetir.workloads.plot import markdown
from sparsetir.workloads.timing import Timing, interleave

# Programs for expressions as a person would write them, where the package has no ready one: see `expressions`.


Call = Callable[[], Any]

MATRIX = """
@T.prim_func
def program(a: T.handle, indptr: T.handle, indices: T.handle, {handles}
            m: T.int32, n: T.int32, nnz: T.int32{sizes}):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
"""
ROW_SUMS = (
    MATRIX.format(handles="y: T.handle,", sizes="")
    + """
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "sums") as [i, j]:
        with T.init():
            Y[i] = {first}
        Y[i] = {value}
"""
)
COLUMN_SUMS = (
    MATRIX.format(handles="y: T.handle,", sizes="")
    + """
    J_dense = T.dense_fixed(n)
    Y = T.match_sparse_buffer(y, (J_dense,), "float32")
    with T.sp_iter([I, J], "RS", "sums") as [i, j]:
        with T.init():
            Y[j] = T.float32(0)
        Y[j] = Y[j] + A[i, j]
"""
)
TRANSPOSED = (
    MATRIX.format(handles="x: T.handle, y: T.handle,", sizes="")
    + """
    J_dense = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I,), "float32")
    Y = T.match_sparse_buffer(y, (J_dense,), "float32")
    with T.sp_iter([I, J], "RS", "sums") as [i, j]:
        with T.init():
            Y[j] = T.float32(0)
        Y[j] = Y[j] + A[i, j] * X[i]
"""
)
MIN_PLUS = (
    MATRIX.format(handles="x: T.handle, y: T.handle,", sizes="")
    + """
    J_dense = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "least") as [i, j]:
        with T.init():
            Y[i] = T.infinity("float32")
        Y[i] = T.min(Y[i], A[i, j] + X[j])
"""
)
SCALED = (
    MATRIX.format(handles="x: T.handle, c: T.handle,", sizes="")
    + """
    J_dense = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, J], "SS", "scaled") as [i, j]:
        C[i, j] = A[i, j] * X[j]
"""
)
BATCHED = (
    MATRIX.format(handles="x: T.handle, y: T.handle,", sizes=", b: T.int32, feat: T.int32")
    + """
    J_dense = T.dense_fixed(n)
    B = T.dense_fixed(b)
    K = T.dense_fixed(feat)
    X = T.match_sparse_buffer(x, (B, J_dense, K), "float32")
    Y = T.match_sparse_buffer(y, (B, I, K), "float32")
    with T.sp_iter([B, I, J, K], "SSRS", "products") as [l, i, j, k]:
        with T.init():
            Y[l, i, k] = T.float32(0)
        Y[l, i, k] = Y[l, i, k] + A[i, j] * X[l, j, k]
"""
)


def _of(text: str, **arguments: Any) -> Call:
    kernel = build(parse(text))
    return lambda: kernel(**arguments)


def _two_steps(A: Any, B: Any, x: np.ndarray) -> Call:
    kernel = build(ops.spmv())
    return lambda: kernel(A=A, x=kernel(A=B, x=x))


def _two_layers(A: Any, X: np.ndarray, W: np.ndarray) -> Call:
    kernel = build(ops.spmm())
    return lambda: kernel(A=A, B=X @ W)


def _bilinear(x: np.ndarray, A: Any, y: np.ndarray) -> Call:
    kernel = build(ops.spmv())
    return lambda: np.dot(x, kernel(A=A, x=y))


def _transposed_product(A: Any, B: Any) -> Call:
    kernel = build(ops.spgemm())
    return lambda: kernel(A=A, B=B.T.tocsr())


def _triangles(A: Any, B: Any, C: Any) -> Call:
    """Return the product of the first two under the transpose of the third."""
    kernel = build(ops.masked_spgemm())

    def call() -> Any:
        mask = C.T.tocsr()
        product = kernel(A=A, B=B, M=mask.astype(bool))
        return mask.multiply(product).sum()

    return call


def _masked(S: Any, A: Any, B: Any) -> Call:
    kernel = build(ops.masked_spgemm())
    return lambda: S.multiply(kernel(A=A, B=B, M=S.astype(bool)))


BY_HAND: dict[str, Callable[..., Call]] = {
    "transposed spmv": lambda A, x: _of(TRANSPOSED, A=A, X=x),
    "masked product": _masked,
    "transposed product": _transposed_product,
    "columns scaled": lambda A, x: _of(SCALED, A=A, X=x),
    "bilinear form": _bilinear,
    "triangles": _triangles,
    "row sums": lambda A: _of(ROW_SUMS.format(first="T.float32(0)", value="Y[i] + A[i, j]"), A=A),
    "column sums": lambda A: _of(COLUMN_SUMS, A=A),
    "row maxima": lambda A: _of(ROW_SUMS.format(first='-T.infinity("float32")', value="T.max(Y[i], A[i, j])"), A=A),
    "min-plus spmv": lambda A, x: _of(MIN_PLUS, A=A, X=x),
    "two steps": _two_steps,
    "two layers": _two_layers,
    "batched spmm": lambda A, X: _of(BATCHED, A=A, X=X),
}


# Expressions of index notation beside our own ready programs, scipy, torch, pydata/sparse and finch-tensor.
#
# ``sparsetir bench expressions`` prints a Markdown table: for each expression the milliseconds of its first
# call, of later calls, also with sparse operands fixed where others are open, of our ready program or one by hand,
# and of each library that is installed and says it; then how much memory a call takes, relative to operands and
# result. Results that disagree are named below the table. finch-tensor takes seconds for a call and is asked for by
# ``--compare-with finch``.


OWN = ("einsum", "bound", "program")
USUAL = ("scipy", "torch", "sparse")


@dataclass
class ExpressionRow:
    """What was found of one expression.

    Parameters
    ----------
    case : ExprCase
    first : float
        Seconds of the first call, in which its programs are compiled or read from the disk.
    times : dict of str to Timing
        ``einsum``, ``bound`` with fixed sparse operands, ``program`` for a ready one or one by hand, and libraries.
    peak : float, optional
        Operands and what a call adds, relative to operands and result.
    findings : list of str
        Libraries whose results disagree with ours.
    """

    case: ExprCase
    first: float
    times: dict[str, Timing] = field(default_factory=dict)
    peak: float | None = None
    findings: list[str] = field(default_factory=list)

    def cells(self, columns: Sequence[str]) -> list[str]:
        times = [f"{self.times[c].median * 1e3:.3g}" if c in self.times else "" for c in columns]
        return [self.case.name, f"`{self.case.text}`", f"{self.first * 1e3:.0f}", *times,
                "" if self.peak is None else f"{self.peak:.2f}"]  # fmt: skip


# ------------------------------------------------------------------ our programs


def _kernel(program: Any, **arguments: Any) -> Call:
    kernel = build(program)
    return lambda: kernel(**arguments)


PROGRAMS: dict[str, Callable[..., Call]] = {
    "spmv": lambda A, x: _kernel(ops.spmv(), A=A, x=x),
    "spmm": lambda A, X: _kernel(ops.spmm(), A=A, B=X),
    "sddmm": lambda S, X, Y: _kernel(ops.sddmm(), S=S, X=X, Y=Y),
    "product": lambda A, B: _kernel(ops.spgemm(), A=A, B=B),
    "sum": lambda A, B: _kernel(ops.add(), A=A, B=B),
    "hadamard": lambda A, B: _kernel(ops.multiply(), A=A, B=B),
    "mttkrp": lambda T, B, C: _kernel(ops.mttkrp(), T_=T, B=B, C=C),
}


def program_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """Return the ready program of this package, or one that was written by hand, if there is one."""
    make = {**PROGRAMS, **BY_HAND}.get(case.name)
    return None if make is None else make(*operands)


# ------------------------------------------------------------------ measuring


def measure(
    case: ExprCase,
    size: int,
    *,
    compare_with: Sequence[str] = USUAL,
    rounds: int = 3,
    rest: float = 0.1,
    burst: float = 0.05,
) -> ExpressionRow:
    """Time one expression beside whatever else says it.

    Parameters
    ----------
    case : ExprCase
    size : int
        Extent of most letters.
    compare_with : sequence of str
        Names in `PEERS`; those that are not installed are left out.
    rounds, rest, burst
        As for `interleave`.
    """
    operands = case.operands(size)
    start = time.perf_counter()
    expected = einsum(case.text, *operands, **case.options)
    row = ExpressionRow(case, time.perf_counter() - start)
    calls = {"einsum": lambda: einsum(case.text, *operands, **case.options)}
    if "d" in case.kinds:
        calls["bound"] = bound_call(case, operands)
    for name, make in {"program": program_call, **{name: PEERS[name] for name in compare_with}}.items():
        call = checked(name, make, case, operands, expected, row)
        if call is not None:
            calls[name] = call
    row.times = interleave(calls, rounds=rounds, rest=rest, burst_seconds=burst)
    row.peak = peak(calls["einsum"], operands, expected)
    return row


def bound_call(case: ExprCase, operands: list[Any]) -> Call:
    """Return calls with the sparse operands fixed."""
    expression = einsum_expression(case.text, *operands, **case.options)
    bound = expression.bind(*[v if k == "s" else None for k, v in zip(case.kinds, operands, strict=True)])
    open_ = [v for k, v in zip(case.kinds, operands, strict=True) if k == "d"]
    return lambda: bound(*open_)


def checked(
    name: str, make: Callable[..., Call | None], case: ExprCase, operands: list[Any], expected: Any, row: ExpressionRow
) -> Call | None:
    """Return a call of another library if it is installed and can do this; what differs is noted in the row."""
    if name in PEERS and importlib.util.find_spec(name) is None:
        return None
    try:
        call = make(case, operands)
        if call is None:
            return None
        result = call()
    except Exception as error:  # what other libraries raise is theirs to choose
        say(f"{case.name}: without {name}: {reason(error)}")
        return None
    if not same(case, result, expected):
        row.findings.append(f"{case.name}: {name} differs from einsum")
    return call


def same(case: ExprCase, result: Any, expected: Any) -> bool:
    """Return whether two results agree; scipy gives a Kronecker product as a matrix."""
    if len(case.text.partition("->")[2]) == 4 and sp.issparse(result):
        return math.isclose(float(result.sum()), float(np.sum(expected.values)), rel_tol=1e-3)
    return agree(result, expected)


def peak(call: Call, operands: Sequence[Any], expected: Any) -> float | None:
    """Operands and the memory that a call adds, relative to operands and result."""
    operand_bytes = sum(nbytes(value) for value in operands)
    added_bytes = memory.added(call)
    return None if added_bytes is None else (operand_bytes + added_bytes) / (operand_bytes + nbytes(expected))


def nbytes(value: Any) -> int:
    """Bytes of an array or a sparse object."""
    if sp.issparse(value):
        return int(value.data.nbytes + value.indices.nbytes + value.indptr.nbytes)
    if isinstance(value, SparseTensor):
        return int(value.nbytes)
    return int(np.asarray(value).nbytes)


# ------------------------------------------------------------------ the table


def table(rows: Sequence[ExpressionRow]) -> str:
    """Return a Markdown table, with the ratio of each column to ``einsum`` in the last row."""
    names = [name for name in (*OWN, *PEERS) if any(name in row.times for row in rows)]
    heading = ["", "expression", "first", *names, "memory"]
    return markdown(
        [heading, *(row.cells(names) for row in rows), ["geometric mean", "", "", *ratios(rows, names), ""]]
    )


def ratios(rows: Sequence[ExpressionRow], names: Sequence[str]) -> list[str]:
    """Of each column its time relative to that of ``einsum``, over the rows that have both."""
    cells = []
    for name in names:
        logs = [math.log(r.times[name].median / r.times["einsum"].median) for r in rows if name in r.times]
        cells.append(f"{math.exp(sum(logs) / len(logs)):.2f} x" if logs else "")
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="sparsetir bench expressions", description=__doc__)
    parser.add_argument("--size", type=int, default=20_000, metavar="N", help="extent of most letters")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each call")
    parser.add_argument("--rest", type=parse_seconds, default=0.25, metavar="SECONDS", help="sleep before each turn")
    parser.add_argument("--threads", type=int, metavar="N", help="for every library")
    parser.add_argument("--against", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--compare-with", default=",".join(USUAL), metavar="NAMES", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--only", default="", metavar="NAMES", help="names of the first column, with commas")
    args = parser.parse_args(argv)
    take_old_options(args, against="compare_with")
    selected = [case for case in CASES if not args.only or case.name in args.only.split(",")]
    if not selected or min(args.size, args.rounds) < 1:
        parser.error(
            f"--only names some of {', '.join(case.name for case in CASES)}; --size and --rounds are at least 1"
        )
    compare_with = [name for name in args.compare_with.split(",") if name]
    if not set(compare_with) <= set(PEERS):
        parser.error(f"--compare-with names some of {', '.join(PEERS)}, found {args.compare_with}")
    if args.threads is not None:
        set_num_threads(args.threads)
    set_threads(get_num_threads())
    for name in compare_with:
        if importlib.util.find_spec(name) is None:
            say(f"without {name}, which is not installed")
    rows = []
    for case in selected:
        rows.append(measure(case, args.size, compare_with=compare_with, rounds=args.rounds, rest=args.rest))
        say(f"{case.name}: {', '.join(f'{n} {t.median * 1e3:.3g} ms' for n, t in rows[-1].times.items())}")
    print(table(rows))
    findings = [finding for row in rows for finding in row.findings]
    noisy = [row.case.name for row in rows if row.times["einsum"].disturbed]
    if noisy:
        findings.append(f"other work on this machine disturbed {', '.join(noisy)}: repeat on a quiet one")
    print("\n".join(["", *findings]) if findings else "")
    return int(any(row.findings for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())


__all__ = ["BY_HAND", "ExpressionRow", "main", "measure", "table"]
