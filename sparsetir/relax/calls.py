# SPDX-License-Identifier: Apache-2.0
"""The operators as functions, each of which returns a call to emit into a Relax function.

Arguments are Relax expressions; numpy arrays and TVM tensors become constants. In a script the same calls are
``R.sparse.spmm(data, indptr, indices, B)`` and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import ir

from sparsetir.errors import ArgumentError
from sparsetir.relax.epilogues import known
from sparsetir.relax.operators import REDUCTIONS, call
from sparsetir.utils.arguments import shown


def spmm(data: Any, indptr: Any, indices: Any, B: Any) -> ir.Call:
    """Multiply a sparse by a dense matrix: ``C[i, k] = sum_j A[i, j] * B[j, k]``.

    Parameters
    ----------
    data, indptr, indices : Expr
        A, of shape (m, n), as CSR: (nnz,) floats, (m + 1,) and (nnz,) of int32 or int64.
    B : Expr
        (n, feat), or (batch, n, feat) for one product each; of the dtype of `data`.

    Returns
    -------
    Call
        (m, feat) or (batch, m, feat).
    """
    return call("spmm", data, indptr, indices, B)


def spmv(data: Any, indptr: Any, indices: Any, x: Any) -> ir.Call:
    """Multiply a sparse matrix by a vector: ``y[i] = sum_j A[i, j] * x[j]``, with arguments as for `spmm`."""
    return call("spmv", data, indptr, indices, x)


def linear(x: Any, data: Any, indptr: Any, indices: Any) -> ir.Call:
    """Apply a linear layer with a sparse weight: ``y[..., o] = sum_i W[o, i] * x[..., i]``, without a transposition.

    Parameters
    ----------
    x : Expr
        (..., n), up to six dimensions.
    data, indptr, indices : Expr
        W, of shape (m, n), as CSR.

    Returns
    -------
    Call
        (..., m).
    """
    return call("linear", x, data, indptr, indices)


def sddmm(data: Any, indptr: Any, indices: Any, X: Any, Y: Any) -> ir.Call:
    """Multiply dense matrices at the entries of a sparse one: ``O[i, j] = S[i, j] * sum_k X[i, k] * Y[j, k]``.

    Parameters
    ----------
    data, indptr, indices : Expr
        S, of shape (m, n), as CSR.
    X, Y : Expr
        (m, feat) and (n, feat).

    Returns
    -------
    Call
        (nnz,): the values of O, which has the structure of S.
    """
    return call("sddmm", data, indptr, indices, X, Y)


def softmax(data: Any, indptr: Any) -> ir.Call:
    """Compute the softmax over the entries of each row of a CSR matrix: (nnz,) values."""
    return call("softmax", data, indptr)


def segment_reduce(x: Any, indptr: Any, reduce: str = "sum") -> ir.Call:
    """Reduce each segment of rows ``x[indptr[i]:indptr[i + 1]]`` to one row; 0 for an empty segment.

    Parameters
    ----------
    x : Expr
        (nnz,) or (nnz, feat).
    indptr : Expr
        (m + 1,).
    reduce : {"sum", "mean", "max", "min"}

    Returns
    -------
    Call
        (m,) or (m, feat).
    """
    if not isinstance(reduce, str) or reduce not in REDUCTIONS:
        raise ArgumentError(f"reduce is one of {', '.join(REDUCTIONS)}, got {shown(reduce)}")
    return call(f"segment_{reduce}", x, indptr)


def segment_expand(x: Any, indptr: Any, nnz: Any) -> ir.Call:
    """Repeat the value of each row for its entries: ``y[indptr[i]:indptr[i + 1]] = x[i]``.

    Parameters
    ----------
    x : Expr
        (m,) or (m, feat).
    indptr : Expr
        (m + 1,).
    nnz : int or PrimExpr
        ``indptr[m]``, the number of entries.

    Returns
    -------
    Call
        (nnz,) or (nnz, feat).
    """
    return call("segment_expand", x, indptr, nnz)


def transpose(indptr: Any, indices: Any, n: Any) -> ir.Call:
    """Transpose a structure by a counting sort.

    Parameters
    ----------
    indptr, indices : Expr
        (m + 1,) and (nnz,).
    n : int or PrimExpr
        The number of columns.

    Returns
    -------
    Call
        A tuple: (n + 1,) column pointers; (nnz,) the row of each entry; and (nnz,) the position of each entry in the
        given structure, so that ``R.take(data, order)`` are the values.
    """
    return call("transpose", indptr, indices, n)


def gather_outer(X: Any, Y: Any, indptr: Any, left: Any, right: Any) -> ir.Call:
    """Sum outer products of rows by segment: ``W[r] = sum_e outer(X[left[e]], Y[right[e]])``.

    This is the gradient of `gather_matmul_scatter` with respect to its matrices.

    Parameters
    ----------
    X, Y : Expr
        (n, in) and (m, out).
    indptr : Expr
        (kinds + 1,).
    left, right : Expr
        (nnz,), of the dtype of `indptr`: rows of X and of Y.

    Returns
    -------
    Call
        (kinds, in, out).
    """
    return call("gather_outer", X, Y, indptr, left, right)


def gather_matmul_scatter(X: Any, W: Any, indptr: Any, indices: Any, kinds: Any) -> ir.Call:
    """Multiply gathered rows of X by the matrix of their kind, and sum by row: ``Y[i] = sum_j X[j] @ W[kind[i, j]]``.

    Examples are relational graph convolutions (a matrix per relation) and sparse convolutions (a matrix per offset).

    Parameters
    ----------
    X : Expr
        (n, in).
    W : Expr
        (kinds, in, out).
    indptr, indices : Expr
        (m + 1,) and (nnz,): the rows of X that are summed in row i of the result.
    kinds : Expr
        (nnz,), of the dtype of `indices`: the matrix of each entry.

    Returns
    -------
    Call
        (m, out).
    """
    return call("gather_matmul_scatter", X, W, indptr, indices, kinds)


def attention(Q: Any, K: Any, V: Any, indptr: Any, indices: Any, scale: float | None = None) -> ir.Call:
    """Compute attention under a block-sparse mask: ``softmax(scale * Q K^T) V`` over the listed blocks, in one kernel.

    Parameters
    ----------
    Q, K : Expr
        (heads, length, feat).
    V : Expr
        (heads, length, out).
    indptr, indices : Expr
        Block CSR structure: the blocks of columns for each block of rows, of ``length / (len(indptr) - 1)`` positions.
    scale : float, optional
        ``1 / sqrt(feat)`` by default.

    Returns
    -------
    Call
        (heads, length, out).
    """
    if scale is None:
        shape = getattr(Q.ty, "shape", None) if isinstance(Q, ir.Expr) else np.shape(Q)
        if shape is None or len(shape) != 3 or not known([shape[2]]) or int(shape[2]) < 1:
            raise ArgumentError("scale: expected a number where Q has no known number of features, got None. Pass one.")
        scale = int(shape[2]) ** -0.5
    return call("attention", Q, K, V, indptr, indices, scale)


__all__ = [
    "attention",
    "gather_matmul_scatter",
    "gather_outer",
    "linear",
    "sddmm",
    "segment_expand",
    "segment_reduce",
    "softmax",
    "spmm",
    "spmv",
    "transpose",
]
