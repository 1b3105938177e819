# SPDX-License-Identifier: Apache-2.0
"""Programs for expressions as a person would write them, where the package has no ready one: see `expressions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsetir import ops
from sparsetir.build import build
from sparsetir.script.printer import parse

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
    """The product of the first two under the transpose of the third."""
    kernel = build(ops.masked_spgemm())

    def call() -> Any:
        mask = C.T.tocsr()
        found = kernel(A=A, B=B, M=mask.astype(bool))
        return mask.multiply(found).sum()

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

__all__ = ["BY_HAND"]
