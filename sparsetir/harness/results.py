# SPDX-License-Identifier: Apache-2.0
"""Operations whose result has a pattern of its own: their operands, made of one matrix, and what must come out.

===========  =======================================================================================
operation    result
===========  =======================================================================================
spgemm       ``A @ A``, or ``A @ A.T`` where A is not square
add          ``A + A.T``, or A plus A with its columns in another order
multiply     the same two, element by element
masked       the product of spgemm at the coordinates of A, for a square A
topn         the N largest of each row of ``A @ A.T``, A with its absolute values
rap          ``R @ A @ P``, R = P.T, with P of smoothed aggregates, for a square A (algebraic multigrid)
triangles    how many there are in the graph of A, for a square A
===========  =======================================================================================
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.harness.operands import as_float32

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
    """The operands of an operation, made of one matrix.

    Raises
    ------
    ArgumentError
        `op` is not known, or takes a square matrix and `sparse` is none.
    """
    if op not in OPERATIONS:
        raise ArgumentError(f"expected one of the operations {', '.join(OPERATIONS)}; found {op!r}")
    A = as_float32(sparse)
    if op in SQUARE_ONLY and A.shape[0] != A.shape[1]:
        raise ArgumentError(f"{op} takes a square matrix, found {A.shape[0]} x {A.shape[1]}")
    return ResultCase(op, OPERATIONS[op].operands(A), kept if op == "topn" else 0)


# ------------------------------------------------------------------------------------------------ operands


def sorted_csr(matrix: Any) -> Any:
    """CSR with the entries of a row in order."""
    csr = sp.csr_array(matrix)
    csr.sort_indices()
    return csr


def factors(A: Any) -> tuple[Any, ...]:
    """A and A, or A and its transpose."""
    return (A, A) if A.shape[0] == A.shape[1] else transposed_too(A)


def transposed_too(A: Any) -> tuple[Any, ...]:
    """A and its transpose."""
    return A, sorted_csr(A.T)


def similarities(A: Any) -> tuple[Any, ...]:
    """The factors of all similarities of two rows."""
    return transposed_too(abs(A))


def alike(A: Any) -> tuple[Any, ...]:
    """Two matrices of the same shape and as many entries, of other patterns."""
    if A.shape[0] == A.shape[1]:
        return transposed_too(A)
    order = np.random.default_rng(0).permutation(A.shape[1])
    return A, sorted_csr(A[:, order])


def masked_factors(A: Any) -> tuple[Any, ...]:
    """The factors and the mask."""
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
    """The graph without directions and loops, each edge once, with ones."""
    graph = sp.tril(A + A.T, -1, format="csr")
    graph.data = np.ones_like(graph.data)
    return (sorted_csr(graph),) * 3


# ---------------------------------------------------------------------------------------------- operations


def ones(matrix: Any) -> Any:
    """The pattern, in float64."""
    return sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)


def chain(*operands: Any) -> Any:
    """The product of two or three."""
    first, *rest = operands
    for operand in rest:
        first = first @ operand
    return first


def masked_product(A: Any, B: Any, M: Any) -> Any:
    """``A @ B`` where M has entries."""
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


__all__ = ["OPERATIONS", "SQUARE_ONLY", "ResultCase", "make_result_case", "ones", "sorted_csr"]
