# SPDX-License-Identifier: Apache-2.0
"""Triangles of a graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import interop, ops
from sparsetir.call.assembled import AssembledKernel
from sparsetir.call.make import assembled_kernel
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor

LARGEST_INT32 = 2**31 - 1
LARGEST_INT16 = 2**15 - 1


def triangles(A: Any) -> int:
    """The number of triangles in a graph: of sets of three vertices with an edge between each two.

    Parameters
    ----------
    A : sparse matrix, shape (n, n)
        Of scipy, torch, or a `SparseTensor`: each stored entry off the diagonal is an edge, whatever its value and
        direction. Entries may repeat, and an edge may be stored in one direction or in both.

    Returns
    -------
    int

    Raises
    ------
    ArgumentTypeError
        `A` is no sparse matrix.
    ArgumentError
        `A` is not square.

    Notes
    -----
    Each edge goes to the vertex with fewer neighbours, so that no row is long. Paths of two edges are counted where a
    third one closes them: the product of the matrix with itself under itself as a mask.

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir
    >>> ring = sp.diags_array([1.0, 1, 1], offsets=[1, 2, 4], shape=(5, 5))
    >>> sparsetir.triangles(ring)
    4
    """
    below = _directed(_graph(A))
    idtype = "int64" if max(below.shape[0], below.nnz) > LARGEST_INT32 else "int32"
    mask = below.astype(np.bool_)
    return int(_kernel(idtype)(A=below, B=below, M=mask).data.sum(dtype=np.int64))


def _graph(A: Any) -> Any:
    """The pattern of a matrix and its transpose together, each coordinate once and the rows sorted."""
    if not (interop.is_sparse(A) or isinstance(A, SparseTensor)) or len(A.shape) != 2:
        how = "pass a scipy matrix or a torch tensor with a sparse layout"
        raise ArgumentTypeError(f"triangles takes a sparse matrix: {how}; found {type(A).__name__}")
    if A.shape[0] != A.shape[1]:
        raise ArgumentError(f"triangles takes the square matrix of a graph, found shape {tuple(A.shape)}")
    rows = sp.csr_array(A if sp.issparse(A) else SparseTensor.from_any(A).to_scipy("csr"))
    ones = sp.csr_array((np.ones(len(rows.indices), np.bool_), rows.indices, rows.indptr), shape=rows.shape)
    transpose = ones.T.tocsr()  # sorted, whatever the order of the rows was
    is_symmetric = np.array_equal(ones.indptr, transpose.indptr) and np.array_equal(ones.indices, transpose.indices)
    if is_symmetric and not _repeats(ones):
        return ones
    both = ones + transpose
    both.sum_duplicates()
    return both


def _repeats(rows: Any) -> bool:
    """Whether a sorted row stores a coordinate twice."""
    same = np.flatnonzero(rows.indices[1:] == rows.indices[:-1]) + 1
    return bool(len(same)) and not bool(np.isin(same, rows.indptr).all())


def _directed(graph: Any) -> Any:
    """Each edge in the row of the vertex with fewer neighbours, of equal ones in that of the later one."""
    count = np.diff(graph.indptr)
    order = np.argsort(-np.minimum(count, LARGEST_INT16).astype(np.int16), kind="stable")  # a radix sort
    rank = np.empty(len(count), np.int32 if len(count) <= LARGEST_INT32 else np.int64)
    rank[order] = np.arange(len(count), dtype=rank.dtype)
    kept = rank[graph.indices] < np.repeat(rank, count)
    before = np.zeros(len(kept) + 1, graph.indptr.dtype)
    np.cumsum(kept, out=before[1:])
    indices = graph.indices[kept]
    return sp.csr_array((np.ones(len(indices), np.int32), indices, before[graph.indptr]), shape=graph.shape)


@cache
def _kernel(idtype: str) -> AssembledKernel:
    return assembled_kernel(ops.masked_spgemm("int32", idtype=idtype))


__all__ = ["triangles"]
