# SPDX-License-Identifier: Apache-2.0
"""Expressions of index notation beside ready programs and other libraries."""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import ops
from sparsetir.build import build
from sparsetir.einsum import einsum, einsum_expression
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import CooTensor
from sparsetir.script.printer import parse
from sparsetir.utils import memory
from sparsetir.utils.arguments import parse_seconds, take_old_options
from sparsetir.utils.packages import require
from sparsetir.utils.threads import get_num_threads, set_num_threads
from sparsetir.workloads.inputs import reason, say
from sparsetir.workloads.peers import set_threads, torch_csr
from sparsetir.workloads.plot import markdown
from sparsetir.workloads.timing import Timing, interleave

Call = Callable[[], Any]

# Expressions to measure, their operands, and how other libraries say them.


INF = float("inf")
MOST_DENSE = 1 << 26  # elements of a result that finch-tensor is asked for


@dataclass(frozen=True)
class ExprCase:
    """One expression.

    Parameters
    ----------
    name : str
    text : str
        Its subscripts.
    kinds : str
        Of each operand whether it is sparse ("s") or dense ("d").
    extents : dict of str to int
        Of the letters, relative to the size of a run; those below 100 are as they stand.
    entries : float
        Entries in a row of a sparse operand.
    options : dict
        For `einsum`.
    scipy, torch : callable, optional
        The expression as users of these write it, of operands as these take them.
    others : bool
        Whether libraries that read subscripts say it: sums of products alone.
    """

    name: str
    text: str
    kinds: str
    extents: dict[str, int] = field(default_factory=dict)
    entries: float = 20
    options: dict[str, Any] = field(default_factory=dict)
    scipy: Callable[..., Any] | None = None
    torch: Callable[..., Any] | None = None
    others: bool = True

    @property
    def terms(self) -> list[str]:
        return self.text.partition("->")[0].split(",")

    def operands(self, size: int, seed: int = 0) -> list[Any]:
        """Random operands: `size` stands for an extent of 1000."""
        rng = np.random.default_rng(seed)
        extents = {c: n if n < 100 else max(2, n * size // 1000) for c, n in self.extents.items()}
        shapes = [tuple(extents.get(c, size) for c in term) for term in self.terms]
        return [self._operand(shape, kind, rng) for shape, kind in zip(shapes, self.kinds, strict=True)]

    def _operand(self, shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> Any:
        if kind == "d":
            return rng.random(shape, dtype=np.float32) + np.float32(0.1)
        count = max(1, int(self.entries * shape[0]))
        coords = np.stack([rng.integers(0, n, count) for n in shape])
        values = rng.random(count, dtype=np.float32) + np.float32(0.1)
        if len(shape) == 2:
            matrix = sp.csr_array((values, tuple(coords.astype("int32"))), shape)
            matrix.sum_duplicates()
            return matrix
        return SparseTensor.from_any(CooTensor(coords.astype("int32"), values, shape))


def _minplus(A: Any, x: np.ndarray) -> np.ndarray:
    """Return the least sum in each row of a CSR matrix."""
    sums = A.data + x[A.indices]
    rows = np.flatnonzero(np.diff(A.indptr))
    out = np.full(A.shape[0], np.inf, sums.dtype)
    out[rows] = np.minimum.reduceat(sums, A.indptr[rows])
    return out


def _sampled(S: Any, X: np.ndarray, Y: np.ndarray) -> Any:
    """SDDMM, gathered."""
    rows = np.repeat(np.arange(S.shape[0]), np.diff(S.indptr))
    return sp.csr_array((S.data * np.einsum("pk,pk->p", X[rows], Y[S.indices]), S.indices, S.indptr), S.shape)


def _batched(A: Any, X: np.ndarray) -> np.ndarray:
    return np.stack([A @ x for x in X])


TENSOR = {"i": 1000, "j": 200, "k": 200, "l": 200}
CASES = [
    ExprCase("spmv", "ij,j->i", "sd", scipy=lambda A, x: A @ x, torch=lambda A, x: A @ x),
    ExprCase("transposed spmv", "ij,i->j", "sd", scipy=lambda A, x: A.T @ x),
    ExprCase("spmm", "ij,jk->ik", "sd", {"k": 32}, scipy=lambda A, X: A @ X, torch=lambda A, X: A @ X),
    ExprCase("sddmm", "ij,ik,jk->ij", "sdd", {"k": 32}, scipy=_sampled),
    ExprCase("masked product", "ij,ik,kj->ij", "sss", scipy=lambda S, A, B: S * (A @ B)),
    ExprCase("product", "ik,kj->ij", "ss", scipy=lambda A, B: A @ B, torch=lambda A, B: A @ B),
    ExprCase("transposed product", "ik,jk->ij", "ss", scipy=lambda A, B: A @ B.T),
    ExprCase("sum", "ij,ij->ij", "ss", options={"combine": "add"}, scipy=lambda A, B: A + B, others=False),
    ExprCase("hadamard", "ij,ij->ij", "ss", scipy=lambda A, B: A * B, torch=lambda A, B: A * B),
    ExprCase("columns scaled", "ij,j->ij", "sd", scipy=lambda A, x: A * x[None]),
    ExprCase("bilinear form", "i,ij,j->", "dsd", scipy=lambda x, A, y: x @ (A @ y), torch=lambda x, A, y: x @ (A @ y)),
    ExprCase("triangles", "ij,jk,ki->", "sss", scipy=lambda A, B, C: (A @ B * C.T).sum()),
    ExprCase("row sums", "ij->i", "s", scipy=lambda A: A.sum(axis=1)),
    ExprCase("column sums", "ij->j", "s", scipy=lambda A: A.sum(axis=0)),
    ExprCase("row maxima", "ij->i", "s", options={"reduce": "max", "fill": -INF}, others=False),
    ExprCase("min-plus spmv", "ij,j->i", "sd", options={"reduce": "min", "combine": "add", "fill": INF}, scipy=_minplus,
         others=False),
    ExprCase("two steps", "ij,jk,k->i", "ssd", scipy=lambda A, B, x: A @ (B @ x), torch=lambda A, B, x: A @ (B @ x)),
    ExprCase("two layers", "ij,jk,kl->il", "sdd", {"k": 32, "l": 16}, scipy=lambda A, X, W: A @ (X @ W),
         torch=lambda A, X, W: A @ (X @ W)),
    ExprCase("batched spmm", "ij,bjk->bik", "sd", {"b": 4, "k": 16}, scipy=_batched),
    ExprCase("outer product", "ij,kl->ikjl", "ss", {"i": 40, "j": 40, "k": 40, "l": 40}, entries=4,
         scipy=lambda A, B: sp.kron(A, B)),
    ExprCase("ttv", "ijk,k->ij", "sd", TENSOR),
    ExprCase("ttm", "ijk,kl->ijl", "ss", TENSOR),
    ExprCase("mttkrp", "ijk,jr,kr->ir", "sdd", TENSOR | {"r": 16}),
    ExprCase("tensor sum", "ijk,ijk->ijk", "ss", TENSOR, options={"combine": "add"}, others=False),
    ExprCase("tensor hadamard", "ijk,ijk->ijk", "ss", TENSOR),
    ExprCase("tensor contraction", "ijk,ljk->il", "ss", TENSOR),
    ExprCase("tensor projection", "ijk->ik", "s", TENSOR),
]  # fmt: skip


# ------------------------------------------------------------------ other libraries


def scipy_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """As a user of scipy writes it."""
    how = case.scipy
    return None if how is None else lambda: how(*operands)


def torch_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """As a user of torch writes it, of CSR tensors."""
    how = case.torch
    if how is None:
        return None
    torch = require("torch", extra="bench", purpose="the torch peer")
    tensors = [torch_csr(v) if sp.issparse(v) else torch.from_numpy(v) for v in operands]
    return lambda: how(*tensors)


def sparse_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """``sparse.einsum`` of pydata/sparse; sums by its operators."""
    sparse = require("sparse", extra="bench", purpose="the pydata/sparse peer")
    converted = [_pydata(sparse, value) for value in operands]
    if case.others:
        return lambda: sparse.einsum(case.text, *converted)
    return (lambda: converted[0] + converted[1]) if case.options == {"combine": "add"} else None


def _pydata(sparse: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if sp.issparse(value):
        return sparse.COO.from_scipy_sparse(value)
    return sparse.COO(np.stack(value.coords), value.values, value.shape)


def finch_call(case: ExprCase, operands: list[Any]) -> Call | None:
    """``finch.einsum`` of finch-tensor, compiled by Numba: of matrices with 64-bit indices, results are dense."""
    finch = import_module("finch")
    output = case.text.partition("->")[2]
    sizes = dict(zip("".join(case.terms), [n for v in operands for n in v.shape], strict=True))
    if not case.others or any(len(t) > 2 for t in case.terms) or math.prod(sizes[c] for c in output) > MOST_DENSE:
        return None
    arrays = [finch.asarray(wide(value)) for value in operands]

    def call() -> Any:
        with finch.with_default_scheduler(finch.COMPILE_NUMBA):
            return np.asarray(finch.to_numpy(finch.einsum(case.text, *arrays)))

    return call


def wide(value: Any) -> Any:
    """Return a CSR matrix with 64-bit indices; anything else as it is."""
    if not sp.issparse(value):
        return value
    result = sp.csr_array(value.shape, dtype=value.dtype)
    result.data, result.indices, result.indptr = value.data, value.indices.astype("int64"), value.indptr.astype("int64")
    return result


PEERS: dict[str, Callable[[ExprCase, list[Any]], Call | None]] = {
    "scipy": scipy_call,
    "torch": torch_call,
    "sparse": sparse_call,
    "finch": finch_call,
}


# ------------------------------------------------------------------ comparing results


def entries(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of any result that are not zero, by number; their values."""
    if not getattr(value, "shape", ()):
        value = np.reshape(value.todense() if hasattr(value, "todense") else value, 1)
    if type(value).__module__.startswith("torch"):
        value = sp.csr_array(value.to_dense().numpy()) if value.ndim == 2 else value.to_dense().numpy()
    if sp.issparse(value):
        matrix = sp.csr_array(value) if value.ndim == 2 else value.tocoo()
        matrix.sum_duplicates()
        coords, values, shape = matrix.tocoo().coords, matrix.tocoo().data, value.shape
    elif hasattr(value, "coords"):
        coords, values, shape = value.coords, getattr(value, "values", getattr(value, "data", None)), value.shape
    else:
        array = np.asarray(value.todense() if hasattr(value, "todense") else value)
        coords, values, shape = array.reshape(-1).nonzero(), array.reshape(-1)[array.reshape(-1) != 0], (array.size,)
    keys = np.ravel_multi_index([np.asarray(c, np.int64) for c in coords], shape)
    order = np.argsort(keys, kind="stable")
    kept = np.asarray(values)[order] != 0
    return keys[order][kept], np.asarray(values)[order][kept]


def agree(result: Any, expected: Any) -> bool:
    """Return whether two results hold the same elements, up to the rounding of float32."""
    (a, x), (b, y) = entries(result), entries(expected)
    return len(a) == len(b) and bool((a == b).all()) and np.allclose(x, y, rtol=1e-3, atol=1e-4)


# Programs for expressions as a person would write them, where the package has no ready one: see `expressions`.


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
        parser.error(f"--compare-with names some of {', '.join(PEERS)}, got {args.compare_with}")
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


__all__ = ["BY_HAND", "CASES", "PEERS", "ExprCase", "ExpressionRow", "agree", "entries", "main", "measure", "table"]
