# SPDX-License-Identifier: Apache-2.0
"""Grouped products: rows in ragged groups, each group with a matrix of its own, as in mixtures of experts."""

from __future__ import annotations

from tvm import tirx
from tvm.script import sparsetir as T

from sparsetir.errors import ArgumentError
from sparsetir.ops.memo import once

RESULTS = ("rows", "transposed", "weights")


@once
def grouped_matmul(dtype: str = "float32", result: str = "rows", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Product of rows in ragged groups with a matrix for each group: ``Y[g, r, k] = sum_d X[g, r, d] * W[g, d, k]``.

    Parameters
    ----------
    dtype : dtype
        Of X, W and Y.
    result : {"rows", "transposed", "weights"}
        ``"rows"``: the product above. ``"transposed"``: ``X[g, r, d] = sum_k Y[g, r, k] * W[g, d, k]``, the gradient of
        the rows. ``"weights"``: ``W[g, d, k] = sum_r X[g, r, d] * Y[g, r, k]``, the gradient of the matrices.
    idtype : {"int32", "int64"}
        Of the offsets.

    Returns
    -------
    PrimFunc
        Buffers X ``(rows, depth)``, W ``(groups, depth, feat)`` and Y ``(rows, feat)``, the array ``offsets`` of
        groups + 1 positions where groups begin, and the size ``longest``, at least the number of rows of each group.

    Raises
    ------
    ArgumentError
        For another `result`.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> kernel = sparsetir.build(sparsetir.ops.grouped_matmul())
    >>> X, W = np.ones((3, 2), "float32"), np.array([[[1], [1]], [[2], [2]]], "float32")
    >>> kernel(X=X, W=W, offsets=np.array([0, 1, 3], "int32"), longest=2).tolist()
    [[2.0], [4.0], [4.0]]
    """
    if result not in RESULTS:
        raise ArgumentError(f"result: expected one of {', '.join(RESULTS)}, got {result!r}. Choose one of these.")
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def rows(
        x: T.handle,
        w: T.handle,
        y: T.handle,
        offsets: T.handle,
        groups: size,
        longest: size,
        total: size,
        depth: size,
        feat: size,
    ):
        G = T.dense_fixed(groups, idtype)
        R = T.dense_variable(G, (longest, total), offsets, idtype)
        D = T.dense_fixed(depth, idtype)
        K = T.dense_fixed(feat, idtype)
        X = T.match_sparse_buffer(x, (G, R, D), dtype)
        W = T.match_sparse_buffer(w, (G, D, K), dtype)
        Y = T.match_sparse_buffer(y, (G, R, K), dtype)
        with T.sp_iter([G, R, D, K], "SSRS", "grouped_matmul") as [g, r, d, k]:
            with T.init():
                Y[g, r, k] = 0
            Y[g, r, k] = Y[g, r, k] + X[g, r, d] * W[g, d, k]

    @T.prim_func
    def transposed(
        x: T.handle,
        w: T.handle,
        y: T.handle,
        offsets: T.handle,
        groups: size,
        longest: size,
        total: size,
        depth: size,
        feat: size,
    ):
        G = T.dense_fixed(groups, idtype)
        R = T.dense_variable(G, (longest, total), offsets, idtype)
        D = T.dense_fixed(depth, idtype)
        K = T.dense_fixed(feat, idtype)
        X = T.match_sparse_buffer(x, (G, R, D), dtype)
        W = T.match_sparse_buffer(w, (G, D, K), dtype)
        Y = T.match_sparse_buffer(y, (G, R, K), dtype)
        with T.sp_iter([G, R, D, K], "SSSR", "grouped_transposed") as [g, r, d, k]:
            with T.init():
                X[g, r, d] = 0
            X[g, r, d] = X[g, r, d] + Y[g, r, k] * W[g, d, k]

    @T.prim_func
    def weights(
        x: T.handle,
        w: T.handle,
        y: T.handle,
        offsets: T.handle,
        groups: size,
        longest: size,
        total: size,
        depth: size,
        feat: size,
    ):
        G = T.dense_fixed(groups, idtype)
        R = T.dense_variable(G, (longest, total), offsets, idtype)
        D = T.dense_fixed(depth, idtype)
        K = T.dense_fixed(feat, idtype)
        X = T.match_sparse_buffer(x, (G, R, D), dtype)
        W = T.match_sparse_buffer(w, (G, D, K), dtype)
        Y = T.match_sparse_buffer(y, (G, R, K), dtype)
        with T.sp_iter([G, R, D, K], "SRSS", "grouped_weights") as [g, r, d, k]:
            with T.init():
                W[g, d, k] = 0
            W[g, d, k] = W[g, d, k] + X[g, r, d] * Y[g, r, k]

    return {"rows": rows, "transposed": transposed, "weights": weights}[result]


__all__ = ["grouped_matmul"]
