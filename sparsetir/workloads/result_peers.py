# SPDX-License-Identifier: Apache-2.0
"""The libraries whose results have a pattern of their own, behind one interface; see `sparsetir.workloads.results`.

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

from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.utils.packages import MissingPackageError, require
from sparsetir.workloads import mkl, peers
from sparsetir.workloads import mkl as mkl_sparse
from sparsetir.workloads.results import ResultCase, sorted_csr

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


__all__ = ["PACKAGES", "UNSORTED", "available", "missing", "set_threads", "setup", "to_scipy"]
