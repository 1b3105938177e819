# SPDX-License-Identifier: Apache-2.0
"""Operations with computed patterns: operands, verification, and the libraries that have them, behind one interface.

===================  ======  ===  ========  ======  ====  ===  =========
peer                 spgemm  add  multiply  masked  topn  rap  triangles
===================  ======  ===  ========  ======  ====  ===  =========
``scipy``            yes     yes  yes       yes     yes   yes  yes
``torch``            yes     yes  yes       no      no    yes  no
``mkl``              yes     yes  no        no      no    yes  no
``graphblas``        yes     yes  yes       yes     no    yes  yes
``sparse_dot_topn``  no      no   no        no      yes   no   no
===================  ======  ===  ========  ======  ====  ===  =========

A peer is set up once, outside the time that counts, and gives a call without arguments that makes a new result each
time, in the library's own class: the memory of the one before is freed. Rows of results are sorted, except for torch's
products, which it cannot sort. scipy has neither masks nor the largest of a row: the whole product is computed first,
as a scipy user would write it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.utils.arguments import shown
from sparsetir.utils.packages import MissingPackageError, require
from sparsetir.workloads import mkl, peers
from sparsetir.workloads import mkl as mkl_sparse
from sparsetir.workloads.inputs import as_float32
from sparsetir.workloads.reference import TOLERANCE, WrongResultError, differs

# Operations whose result has a pattern of its own: their operands, made of one matrix, and what must come out.
#
# ===========  =======================================================================================
# operation    result
# ===========  =======================================================================================
# spgemm       ``A @ A``, or ``A @ A.T`` where A is not square
# add          ``A + A.T``, or A plus A with its columns in another order
# multiply     the same two, element by element
# masked       the product of spgemm at the coordinates of A, for a square A
# topn         the N largest of each row of ``A @ A.T``, A with its absolute values
# rap          ``R @ A @ P``, R = P.T, with P of smoothed aggregates, for a square A (algebraic multigrid)
# triangles    how many there are in the graph of A, for a square A
# ===========  =======================================================================================


AGGREGATE = 4  # rows that follow each other and become one
DAMPING = 2 / 3  # of the Jacobi step that smooths aggregates
SQUARE_ONLY = ("masked", "rap", "triangles")


@dataclass(frozen=True)
class ResultCase:
    """An operation on matrices.

    Parameters
    ----------
    op : str
        One of `OPERATIONS`.
    operands : tuple of scipy.sparse.csr_array
        float32, the rows sorted.
    kept : int
        Entries of a row that topn keeps.
    """

    op: str
    operands: tuple[Any, ...]
    kept: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        last = self.operands[2 if self.op == "rap" else 1]
        return int(self.operands[0].shape[0]), int(last.shape[1])

    @property
    def products(self) -> int:
        """Multiplications of two entries that Gustavson's algorithm does; for a sum the entries of its operands."""
        if self.op in ("add", "multiply"):
            return sum(int(operand.nnz) for operand in self.operands)
        if self.op == "rap":
            R, A, P = self.operands
            return products_of(R, A) + products_of(R @ A, P)
        return products_of(*self.operands[:2])


def products_of(A: Any, B: Any) -> int:
    """Of an entry of A and an entry of the row of B that it meets."""
    return int(np.diff(B.indptr).astype(np.int64)[A.indices].sum())


def make_result_case(op: str, sparse: Any, *, kept: int = 10) -> ResultCase:
    """Return the operands of an operation, made of one matrix.

    Raises
    ------
    ArgumentError
        `op` is not known, or takes a square matrix and `sparse` is none.
    """
    if op not in OPERATIONS:
        raise ArgumentError(f"expected one of the operations {', '.join(OPERATIONS)}, got {shown(op)}")
    A = as_float32(sparse)
    if op in SQUARE_ONLY and A.shape[0] != A.shape[1]:
        raise ArgumentError(f"{op} takes a square matrix, got {A.shape[0]} x {A.shape[1]}")
    return ResultCase(op, OPERATIONS[op].operands(A), kept if op == "topn" else 0)


# ------------------------------------------------------------------------------------------------ operands


def sorted_csr(matrix: Any) -> Any:
    """CSR with the entries of a row in order."""
    csr = sp.csr_array(matrix)
    csr.sort_indices()
    return csr


def factors(A: Any) -> tuple[Any, ...]:
    """Return A and A, or A and its transpose."""
    return (A, A) if A.shape[0] == A.shape[1] else transposed_too(A)


def transposed_too(A: Any) -> tuple[Any, ...]:
    """Return A and its transpose."""
    return A, sorted_csr(A.T)


def similarities(A: Any) -> tuple[Any, ...]:
    """Return the factors of all similarities of two rows."""
    return transposed_too(abs(A))


def alike(A: Any) -> tuple[Any, ...]:
    """Two matrices of the same shape and as many entries, of other patterns."""
    if A.shape[0] == A.shape[1]:
        return transposed_too(A)
    order = np.random.default_rng(0).permutation(A.shape[1])
    return A, sorted_csr(A[:, order])


def masked_factors(A: Any) -> tuple[Any, ...]:
    """Return the factors and the mask."""
    return A, A, A


def galerkin(A: Any) -> tuple[Any, ...]:
    """R, A and P: rows that follow each other are one aggregate, and one step of Jacobi smooths the aggregates."""
    n = A.shape[0]
    shape = (n, -(-n // AGGREGATE))
    columns, rows = np.arange(n, dtype=A.indices.dtype) // AGGREGATE, np.arange(n + 1, dtype=A.indptr.dtype)
    tentative = sp.csr_array((np.ones(n, np.float32), columns, rows), shape=shape)
    sums = abs(A).sum(axis=1)
    steps = sp.diags_array(np.divide(DAMPING, sums, out=np.zeros_like(sums), where=sums != 0), dtype=np.float32)
    P = sorted_csr((tentative - steps @ A @ tentative).astype(np.float32))
    return sorted_csr(P.T), A, P


def below_diagonal(A: Any) -> tuple[Any, ...]:
    """Return the graph without directions and loops, each edge once, with ones."""
    graph = sp.tril(A + A.T, -1, format="csr")
    graph.data = np.ones_like(graph.data)
    return (sorted_csr(graph),) * 3


# ---------------------------------------------------------------------------------------------- operations


def ones(matrix: Any) -> Any:
    """Return the pattern, in float64."""
    return sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)


def chain(*operands: Any) -> Any:
    """Return the product of two or three."""
    first, *factors = operands
    for operand in factors:
        first = first @ operand
    return first


def masked_product(A: Any, B: Any, M: Any) -> Any:
    """Return ``A @ B`` where M has entries."""
    return (A @ B).multiply(ones(M))


@dataclass(frozen=True)
class Operation:
    """How operands are made of a matrix, and the result of them by scipy.

    Parameters
    ----------
    operands : callable
        Of a matrix.
    compute : callable
        Of the operands.
    by_rows : tuple of int
        The operands whose rows are those of the result.
    """

    operands: Callable[[Any], tuple[Any, ...]]
    compute: Callable[..., Any]
    by_rows: tuple[int, ...] = (0,)


OPERATIONS: dict[str, Operation] = {
    "spgemm": Operation(factors, chain),
    "add": Operation(alike, operator.add, (0, 1)),
    "multiply": Operation(alike, sp.csr_array.multiply, (0, 1)),
    "masked": Operation(masked_factors, masked_product, (0, 2)),
    "topn": Operation(similarities, chain),
    "rap": Operation(galerkin, chain),
    "triangles": Operation(below_diagonal, masked_product, (0, 2)),
}


# Whether a result with a pattern of its own is right: some rows at a time, by scipy in float64.


PRODUCTS = 1 << 23  # of the rows that are judged at once


@dataclass(frozen=True)
class Expected:
    """Some rows of a result.

    Parameters
    ----------
    pattern : scipy.sparse.csr_array
        Its coordinates, those of entries that cancel too.
    values : numpy.ndarray
        In float64.
    allowed : numpy.ndarray
        How far one of float32 may be from each.
    kept : int
        Entries of a row that are kept, where only some are.
    """

    pattern: Any
    values: np.ndarray
    allowed: np.ndarray
    kept: int

    @classmethod
    def of(cls, case: ResultCase, rows: slice) -> Expected:
        """Return the rows of a case by scipy."""
        operation = OPERATIONS[case.op]
        exact = [operand.astype(np.float64) for operand in case.operands]
        for n in operation.by_rows:
            exact[n] = exact[n][rows]
        # Ones tell the pattern: scipy leaves out what cancels.
        pattern = sorted_csr(operation.compute(*map(ones, exact)))
        values, magnitudes = (at_pattern(operation.compute(*of), pattern) for of in (exact, map(abs, exact)))
        return cls(pattern, values, TOLERANCE * magnitudes, case.kept)


def at_pattern(matrix: Any, pattern: Any) -> np.ndarray:
    """Return the values of a matrix at the coordinates of a pattern that holds all of its own; 0 where it has none."""
    matrix = sorted_csr(matrix)
    if matrix.nnz == pattern.nnz:
        return matrix.data
    values = np.zeros(pattern.nnz, matrix.data.dtype)
    values[np.searchsorted(keys(pattern), keys(matrix))] = matrix.data
    return values


def keys(csr: Any) -> np.ndarray:
    """Return a number for each entry that grows with row and column."""
    rows = np.repeat(np.arange(csr.shape[0], dtype=np.int64), np.diff(csr.indptr))
    return rows * max(1, csr.shape[1]) + csr.indices


def check_result(name: str, result: Any, case: ResultCase) -> None:
    """Compare a result with the reference in float64, some rows at a time.

    Parameters
    ----------
    name : str
        What is said to be wrong.
    result : scipy.sparse.csr_array or a number
    case : ResultCase

    Raises
    ------
    WrongResultError
    """
    parts = (Expected.of(case, rows) for rows in blocks(case))
    problem = wrong_count(result, parts) if case.op == "triangles" else wrong_matrix(result, case, parts)
    if problem:
        raise WrongResultError(f"{name}: our result differs from the reference: {problem}; please report this")


def blocks(case: ResultCase) -> Iterator[slice]:
    """All rows of a result, a limited number of products at a time; at least one block."""
    first, height = case.operands[0], case.operands[0].shape[0]
    row_lengths = np.diff(case.operands[1].indptr).astype(np.int64)
    meet = row_lengths[first.indices] if case.op not in ("add", "multiply") else np.ones(first.nnz, np.int64)
    before = np.concatenate(([0], np.cumsum(meet)))[first.indptr]
    begin = 0
    while begin < height or begin == 0:
        end = max(begin + 1, int(np.searchsorted(before, before[begin] + PRODUCTS, side="right")) - 1)
        yield slice(begin, min(end, height))
        begin = end


def wrong_count(count: Any, parts: Iterable[Expected]) -> str | None:
    """Return what is wrong with a number of triangles, in words."""
    expected = int(sum(part.values.sum() for part in parts))
    return None if int(count) == expected else f"expected {expected} triangles, got {int(count)}"


def wrong_matrix(matrix: Any, case: ResultCase, parts: Iterable[Expected]) -> str | None:
    """Return what is wrong with a matrix, in words."""
    judge = wrong_largest if case.op == "topn" else wrong_rows
    if matrix.shape != case.shape:
        return f"expected {case.shape[0]} x {case.shape[1]}, got {matrix.shape[0]} x {matrix.shape[1]}"
    row = 0
    for part in parts:
        problem = judge(matrix[row : row + part.pattern.shape[0]], part)
        if problem:
            return problem
        row += part.pattern.shape[0]
    return None


def wrong_rows(result: Any, expected: Expected) -> str | None:
    """Return what is wrong with some rows."""
    pattern = expected.pattern
    for part in ("indptr", "indices"):
        have, want = getattr(result, part), getattr(pattern, part)
        if have.shape != want.shape:
            return f"expected {pattern.nnz} entries, got {result.nnz}"
        if not np.array_equal(have, want):
            at = int((have != want).argmax())
            return f"expected {part}[{at}] = {want[at]}, got {have[at]}"
    return first_wrong(result.data, expected.values, expected.allowed)


def first_wrong(values: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> str | None:
    """Return the first value that is not right, in words."""
    wrong = differs(values, expected, allowed)
    if not wrong.any():
        return None
    at = int(wrong.argmax())
    return f"expected {expected[at]:.7g}, got {values[at]:.7g}"


def wrong_largest(result: Any, expected: Expected) -> str | None:
    """As `wrong_rows`; which ones of equal values are kept is not said."""
    pattern, kept = expected.pattern, expected.kept
    lengths = np.minimum(np.diff(pattern.indptr), kept)
    if not np.array_equal(np.diff(result.indptr), lengths):
        return f"expected {lengths.sum()} entries, at most {kept} in a row, got {result.nnz}"
    have, every = keys(result), keys(pattern)
    if np.any(np.diff(have) <= 0) or not np.isin(have, every).all():
        return "expected coordinates that the product stores, in ascending order, got others"
    at = np.searchsorted(every, have)
    # As many as there are, each no smaller than the least of the right ones.
    least = nth_largest(pattern, expected.values, kept)[np.repeat(np.arange(result.shape[0]), lengths)]
    if np.any(result.data < least - expected.allowed[at] - TOLERANCE * np.abs(least)):
        return "expected the largest values of each row, got one that is not among them"
    return first_wrong(result.data, expected.values[at], expected.allowed[at])


def nth_largest(pattern: Any, values: np.ndarray, kept: int) -> np.ndarray:
    """Of each row: its largest value but ``kept - 1``, or its least where it has fewer entries; 0 where it has none."""
    lengths = np.diff(pattern.indptr)
    rows = np.repeat(np.arange(pattern.shape[0]), lengths)
    ordered = np.append(values[np.lexsort((-values, rows))], 0.0)
    return np.where(lengths > 0, ordered[pattern.indptr[:-1] + np.minimum(lengths, kept) - 1], 0.0)


Call = Callable[[], Any]
GRAPHBLAS, TOPN = "graphblas", "sparse_dot_topn"
PACKAGES = {GRAPHBLAS: "python-graphblas", TOPN: "sparse_dot_topn"}
UNSORTED = {"torch": ("spgemm", "rap")}  # peers and the operations whose results they cannot sort


# ---------------------------------------------------------------------------------------------------- scipy


def in_order(make: Call) -> Any:
    """Return what scipy makes, the entries of a row in order."""
    result = make()
    result.sort_indices()
    return result


def scipy_product(*operands: Any) -> Call:
    """Return a product of two or three."""
    first, second, *third = operands
    return partial(in_order, lambda: first @ second @ third[0] if third else first @ second)


def scipy_masked(A: Any, B: Any, M: Any) -> Call:
    """Return the whole product, then what is under the mask."""
    mask = sp.csr_array((np.ones_like(M.data), M.indices, M.indptr), shape=M.shape)
    return partial(in_order, lambda: (A @ B).multiply(mask))


def scipy_largest(A: Any, B: Any, *, kept: int) -> Call:
    """Return the whole product, then its entries by row and value."""
    return lambda: largest_of(A @ B, kept)


def largest_of(C: Any, kept: int) -> Any:
    """Return the `kept` largest entries of each row."""
    lengths = np.diff(C.indptr)
    rows = np.repeat(np.arange(C.shape[0]), lengths)
    order = np.lexsort((-C.data, rows))
    order = order[np.arange(C.nnz) - C.indptr[rows] < kept]
    indptr = np.concatenate(([0], np.cumsum(np.minimum(lengths, kept))))
    return sorted_csr(sp.csr_array((C.data[order], C.indices[order], indptr), shape=C.shape))


def scipy_triangles(L: Any, _right: Any, _mask: Any) -> Call:
    """Paths of two edges that a third one closes."""
    return lambda: (L @ L).multiply(L).sum()


# ---------------------------------------------------------------------------------------------------- torch


def torch_operands(*operands: Any) -> list[Any]:
    """Each as a torch CSR tensor."""
    return [peers.torch_csr(operand) for operand in operands]


def torch_product(*operands: Any) -> Call:
    """Return a product of two or three; torch does not sort it."""
    first, second, *third = torch_operands(*operands)
    return lambda: first @ second @ third[0] if third else first @ second


def torch_add(*operands: Any) -> Call:
    """Return a sum."""
    A, B = torch_operands(*operands)
    return lambda: A + B


def torch_multiply(*operands: Any) -> Call:
    """Return a product, element by element."""
    A, B = torch_operands(*operands)
    return lambda: A * B


def torch_result(tensor: Any) -> Any:
    """As scipy has it."""
    parts = (part.numpy() for part in (tensor.values(), tensor.col_indices(), tensor.crow_indices()))
    return sp.csr_array(tuple(parts), shape=tuple(tensor.shape))


# ------------------------------------------------------------------------------------------------------ MKL


def mkl_product(*operands: Any) -> Call:
    """``mkl_sparse_sp2m``, once or twice, then ``mkl_sparse_order``."""
    first, second, *third = map(mkl.MKLMatrix, operands)
    if not third:
        return lambda: mkl_sparse.product(first, second).ordered()
    return lambda: mkl_sparse.product(mkl_sparse.product(first, second), third[0]).ordered()


def mkl_add(*operands: Any) -> Call:
    """``mkl_sparse_?_add``, whose rows are sorted."""
    A, B = map(mkl.MKLMatrix, operands)
    return lambda: mkl_sparse.total(A, B)


# ------------------------------------------------------------------------------------------------ GraphBLAS


def graphblas() -> Any:
    """Return the module, imported on first use."""
    return require("graphblas", extra="bench", purpose="the graphblas peer")


def graphblas_operands(*operands: Any) -> list[Any]:
    """Each as a matrix of SuiteSparse:GraphBLAS."""
    return [graphblas().io.from_scipy_sparse(operand) for operand in operands]


def finished(expression: Any, **mask: Any) -> Any:
    """Return the result of an expression; without `wait` its rows would be sorted on first access."""
    result = expression.new(**mask)
    result.wait()
    return result


def graphblas_product(*operands: Any) -> Call:
    """Return a product of two or three."""
    first, second, *third = graphblas_operands(*operands)
    if not third:
        return lambda: finished(first.mxm(second))
    return lambda: finished(first.mxm(second).new().mxm(third[0]))


def graphblas_masked(*operands: Any) -> Call:
    """Return a product under the pattern of a mask."""
    A, B, M = graphblas_operands(*operands)
    return lambda: finished(A.mxm(B), mask=M.S)


def graphblas_add(*operands: Any) -> Call:
    """Return a sum over the union of the patterns."""
    A, B = graphblas_operands(*operands)
    plus = graphblas().monoid.plus
    return lambda: finished(A.ewise_add(B, plus))


def graphblas_multiply(*operands: Any) -> Call:
    """Return a product over what the patterns have in common."""
    A, B = graphblas_operands(*operands)
    times = graphblas().binary.times
    return lambda: finished(A.ewise_mult(B, times))


def graphblas_triangles(*operands: Any) -> Call:
    """Pairs of edges under the third one, counted."""
    L = graphblas_operands(operands[0])[0]
    upper = L.T.new()
    pair = graphblas().semiring.plus_pair
    return lambda: L.mxm(upper.T, pair).new(mask=L.S).reduce_scalar().new().value or 0


def graphblas_result(matrix: Any) -> Any:
    """As scipy has it."""
    return sp.csr_array(graphblas().io.to_scipy_sparse(matrix)) if hasattr(matrix, "mxm") else matrix


# ------------------------------------------------------------------------------------------ sparse_dot_topn


def topn_largest(A: Any, B: Any, *, kept: int) -> Call:
    """``sp_matmul_topn`` on as many threads as the others; its rows begin with the largest until they are sorted."""
    multiply = require("sparse_dot_topn", extra="bench", purpose="the sparse_dot_topn peer").sp_matmul_topn
    left, right = sp.csr_matrix(A), sp.csr_matrix(B)
    return lambda: in_order(partial(multiply, left, right, top_n=kept, n_threads=THREADS[0]))


# ------------------------------------------------------------------------------------------------- together


THREADS = [1]  # of libraries that are told at each call
SETUPS: dict[str, dict[str, Callable[..., Call]]] = {
    "spgemm": {"scipy": scipy_product, "torch": torch_product, "mkl": mkl_product, GRAPHBLAS: graphblas_product},
    "add": {
        "scipy": lambda A, B: lambda: A + B,
        "torch": torch_add,
        "mkl": mkl_add,
        GRAPHBLAS: graphblas_add,
    },
    "multiply": {
        "scipy": lambda A, B: lambda: A.multiply(B),
        "torch": torch_multiply,
        GRAPHBLAS: graphblas_multiply,
    },
    "masked": {"scipy": scipy_masked, GRAPHBLAS: graphblas_masked},
    "topn": {"scipy": scipy_largest, TOPN: topn_largest},
    "rap": {"scipy": scipy_product, "torch": torch_product, "mkl": mkl_product, GRAPHBLAS: graphblas_product},
    "triangles": {"scipy": scipy_triangles, GRAPHBLAS: graphblas_triangles},
}
TO_SCIPY: dict[str, Callable[[Any], Any]] = {
    "torch": torch_result,
    "mkl": mkl_sparse.MKLResult.to_csr,
    GRAPHBLAS: graphblas_result,
}


@lru_cache(maxsize=1)
def missing() -> dict[str, str]:
    """Peers that cannot be used here, each with the reason and what to install."""
    reasons = dict(peers.missing())
    for peer, package in PACKAGES.items():
        if find_spec(peer) is None:
            reasons[peer] = f"{package} is not installed; try: pip install 'sparsetir[bench]'"
    return reasons


def available(op: str) -> list[str]:
    """Names of the installed peers that have `op`."""
    return [peer for peer in SETUPS[op] if peer not in missing()]


def set_threads(count: int) -> None:
    """Let every installed peer use `count` threads. scipy's sparse products always use one."""
    THREADS[0] = count
    peers.set_threads(count)
    if GRAPHBLAS not in missing():
        graphblas().ss.config["nthreads"] = count


def setup(peer: str, case: ResultCase) -> Call:
    """Return a call that computes and returns the result of a case, in the peer's own class.

    Raises
    ------
    MissingPackageError
        The peer is not installed.
    """
    if peer in missing():
        raise MissingPackageError(missing()[peer])
    options = {"kept": case.kept} if case.op == "topn" else {}
    return SETUPS[case.op][peer](*case.operands, **options)


def to_scipy(peer: str, result_of_peer: Any) -> Any:
    """Return a result as a CSR array of scipy with sorted rows; a number stays one."""
    result = TO_SCIPY.get(peer, lambda same: same)(result_of_peer)
    return sorted_csr(result) if sp.issparse(result) else result


__all__ = [
    "OPERATIONS",
    "PACKAGES",
    "SQUARE_ONLY",
    "UNSORTED",
    "ResultCase",
    "available",
    "check_result",
    "make_result_case",
    "missing",
    "ones",
    "set_threads",
    "setup",
    "sorted_csr",
    "to_scipy",
]
