# SPDX-License-Identifier: Apache-2.0
"""Triangles of a graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import interop, ops
from sparsetir.build import build
from sparsetir.call.kernel import Kernel
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor

LARGEST_INT32 = 2**31 - 1


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
    Each edge goes to the vertex with fewer neighbours, so that no row is long; rows at the ends of an edge are
    intersected (`sparsetir.ops.triangles`).

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir
    >>> ring = sp.diags_array([1.0, 1, 1], offsets=[1, 2, 4], shape=(5, 5))
    >>> sparsetir.triangles(ring)
    4
    """
    edges = _edges(A)
    n = A.shape[0]
    degree = np.bincount(edges.ravel(), minlength=n)
    rank = np.empty(n, edges.dtype)
    rank[np.argsort(-degree, kind="stable")] = np.arange(n, dtype=edges.dtype)
    first, second = rank[edges]
    low, high = np.minimum(first, second), np.maximum(first, second)  # a reduction over two rows is far slower
    below = sp.csr_array((np.ones(low.size, np.bool_), (high, low)), shape=(n, n))
    below.sum_duplicates()
    idtype = "int64" if max(n, below.nnz) > LARGEST_INT32 else "int32"
    below.indptr, below.indices = below.indptr.astype(idtype), below.indices.astype(idtype)
    return int(_kernel(idtype)(L=below).sum())


def _edges(A: Any) -> np.ndarray:
    """The two ends of each entry off the diagonal."""
    if not (interop.is_sparse(A) or isinstance(A, SparseTensor)) or len(A.shape) != 2:
        how = "pass a scipy matrix or a torch tensor with a sparse layout"
        raise ArgumentTypeError(f"triangles takes a sparse matrix: {how}; found {type(A).__name__}")
    if A.shape[0] != A.shape[1]:
        raise ArgumentError(f"triangles takes the square matrix of a graph, found shape {tuple(A.shape)}")
    entries = (A if sp.issparse(A) else SparseTensor.from_any(A).to_scipy("coo")).tocoo()
    ends = np.stack([entries.row, entries.col])
    return ends[:, ends[0] != ends[1]]


@cache
def _kernel(idtype: str) -> Kernel:
    return build(ops.triangles("bool", idtype=idtype))


__all__ = ["triangles"]
