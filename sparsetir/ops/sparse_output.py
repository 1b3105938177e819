# SPDX-License-Identifier: Apache-2.0
"""Ready programs that compute the pattern of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import sparsetir as T

from sparsetir.errors import ArgumentError
from sparsetir.script.writer import memoize_program
from sparsetir.utils.arguments import shown


@memoize_program
def spgemm(
    dtype: str = "float32", *, idtype: str = "int32", block: tuple[int, int, int] | None = None
) -> tirx.PrimFunc:
    """Sparse times sparse matrix: ``C[i, j] = sum_k A[i, k] * B[k, j]``, in the order of Gustavson.

    Parameters
    ----------
    dtype : dtype
        Of A, B and C.
    idtype : {"int32", "int64"}
        Of the index arrays.
    block : tuple of int, optional
        For matrices of blocks: ``(r, q, s)`` where A holds blocks of shape (r, q), B of (q, s) and C of (r, s).

    Returns
    -------
    PrimFunc
        Buffers A, B and C. A and B may be unsorted and hold entries with the same coordinates; C is sorted.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> sparsetir.build(sparsetir.ops.spgemm())(A=A, B=A).toarray().tolist()
    [[6.0, 0.0], [0.0, 6.0]]
    """
    if block is not None:
        if not (isinstance(block, tuple) and len(block) == 3 and all(isinstance(n, int) and n > 0 for n in block)):
            raise ArgumentError(f"block is a tuple of three positive sizes (r, q, s), got {shown(block)}")
        return _block_spgemm(dtype, idtype, *block)
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def spgemm(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr_a: T.handle,
        indices_a: T.handle,
        indptr_b: T.handle,
        indices_b: T.handle,
        m: size,
        p: size,
        n: size,
        nnz_a: size,
        nnz_b: size,
    ):
        I = T.dense_fixed(m, idtype)
        K = T.sparse_variable(I, (p, nnz_a), (indptr_a, indices_a), idtype, sorted=False, unique=False)
        K_dense = T.dense_fixed(p, idtype)
        J_b = T.sparse_variable(K_dense, (n, nnz_b), (indptr_b, indices_b), idtype, sorted=False, unique=False)
        J = T.sparse_assembled(I, n, idtype)
        A = T.match_sparse_buffer(a, (I, K), dtype)
        B = T.match_sparse_buffer(b, (K_dense, J_b), dtype)
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([I, K, J], "SRS", "spgemm") as [i, k, j]:
            with T.init():
                C[i, j] = 0
            C[i, j] = C[i, j] + A[i, k] * B[k, j]

    return spgemm


def _block_spgemm(dtype: str, idtype: str, r: int, q: int, s: int) -> tirx.PrimFunc:
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def block_spgemm(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr_a: T.handle,
        indices_a: T.handle,
        indptr_b: T.handle,
        indices_b: T.handle,
        m: size,
        p: size,
        n: size,
        nnz_a: size,
        nnz_b: size,
    ):
        I = T.dense_fixed(m, idtype)
        K = T.sparse_variable(I, (p, nnz_a), (indptr_a, indices_a), idtype, sorted=False, unique=False)
        K_dense = T.dense_fixed(p, idtype)
        J_b = T.sparse_variable(K_dense, (n, nnz_b), (indptr_b, indices_b), idtype, sorted=False, unique=False)
        J = T.sparse_assembled(I, n, idtype)
        R = T.dense_fixed(r, idtype)
        Q = T.dense_fixed(q, idtype)
        S = T.dense_fixed(s, idtype)
        A = T.match_sparse_buffer(a, (I, K, R, Q), dtype)
        B = T.match_sparse_buffer(b, (K_dense, J_b, Q, S), dtype)
        C = T.match_sparse_buffer(c, (I, J, R, S), dtype)
        with T.sp_iter([I, K, J, R, Q, S], "SRSSRS", "block_spgemm") as [i, k, j, x, y, z]:
            with T.init():
                C[i, j, x, z] = 0
            C[i, j, x, z] = C[i, j, x, z] + A[i, k, x, y] * B[k, j, y, z]

    return block_spgemm


@memoize_program
def masked_spgemm(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Build a masked product: ``C[i, j] = sum_k A[i, k] * B[k, j]`` where M has an entry (i, j).

    Parameters
    ----------
    dtype : dtype
        Of A, B and C.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers A, B, M and C. The values of M, of dtype bool, are not read. C has no entry where no product falls.
    """
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def masked_spgemm(
        a: T.handle,
        b: T.handle,
        mask: T.handle,
        c: T.handle,
        indptr_a: T.handle,
        indices_a: T.handle,
        indptr_b: T.handle,
        indices_b: T.handle,
        indptr_m: T.handle,
        indices_m: T.handle,
        m: size,
        p: size,
        n: size,
        nnz_a: size,
        nnz_b: size,
        nnz_m: size,
    ):
        I = T.dense_fixed(m, idtype)
        K = T.sparse_variable(I, (p, nnz_a), (indptr_a, indices_a), idtype, sorted=False, unique=False)
        K_dense = T.dense_fixed(p, idtype)
        J_b = T.sparse_variable(K_dense, (n, nnz_b), (indptr_b, indices_b), idtype, sorted=False, unique=False)
        J_m = T.sparse_variable(I, (n, nnz_m), (indptr_m, indices_m), idtype)
        J = T.sparse_assembled(I, n, idtype)
        A = T.match_sparse_buffer(a, (I, K), dtype)
        B = T.match_sparse_buffer(b, (K_dense, J_b), dtype)
        M = T.match_sparse_buffer(mask, (I, J_m), "bool")
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([I, K, T.intersect(T.attach(J_b, K), J_m)], "SRS", "masked_spgemm") as [i, k, j]:
            with T.init():
                C[i, j] = 0
            C[i, j] = C[i, j] + A[i, k] * B[k, j]

    return masked_spgemm


@memoize_program
def rap(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Build the product of three sparse matrices in one pass: ``C[i, j] = sum_kl R[i, k] * A[k, l] * P[l, j]``.

    `sparsetir.rap` multiplies twice instead, which takes fewer steps where rows of ``A @ P`` are used more than once.

    Parameters
    ----------
    dtype : dtype
        Of R, A, P and C.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers R, A, P and C.
    """
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def rap(
        r: T.handle,
        a: T.handle,
        p: T.handle,
        c: T.handle,
        indptr_r: T.handle,
        indices_r: T.handle,
        indptr_a: T.handle,
        indices_a: T.handle,
        indptr_p: T.handle,
        indices_p: T.handle,
        m: size,
        rows: size,
        columns: size,
        n: size,
        nnz_r: size,
        nnz_a: size,
        nnz_p: size,
    ):
        I = T.dense_fixed(m, idtype)
        K = T.sparse_variable(I, (rows, nnz_r), (indptr_r, indices_r), idtype, sorted=False, unique=False)
        K_dense = T.dense_fixed(rows, idtype)
        L = T.sparse_variable(K_dense, (columns, nnz_a), (indptr_a, indices_a), idtype, sorted=False, unique=False)
        L_dense = T.dense_fixed(columns, idtype)
        J_p = T.sparse_variable(L_dense, (n, nnz_p), (indptr_p, indices_p), idtype, sorted=False, unique=False)
        J = T.sparse_assembled(I, n, idtype)
        R = T.match_sparse_buffer(r, (I, K), dtype)
        A = T.match_sparse_buffer(a, (K_dense, L), dtype)
        P = T.match_sparse_buffer(p, (L_dense, J_p), dtype)
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([I, K, T.attach(L, K), J], "SRRS", "rap") as [i, k, l, j]:
            with T.init():
                C[i, j] = 0
            C[i, j] = C[i, j] + R[i, k] * A[k, l] * P[l, j]

    return rap


def _merged(name: str, combine: Callable[[Any, Any], Any], dtype: str, idtype: str) -> tirx.PrimFunc:
    """Build an elementwise program of two matrices with sorted rows, by a merge of the rows."""
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def merged(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr_a: T.handle,
        indices_a: T.handle,
        indptr_b: T.handle,
        indices_b: T.handle,
        m: size,
        n: size,
        nnz_a: size,
        nnz_b: size,
    ):
        I = T.dense_fixed(m, idtype)
        J_a = T.sparse_variable(I, (n, nnz_a), (indptr_a, indices_a), idtype)
        J_b = T.sparse_variable(I, (n, nnz_b), (indptr_b, indices_b), idtype)
        J = T.sparse_assembled(I, n, idtype)
        A = T.match_sparse_buffer(a, (I, J_a), dtype)
        B = T.match_sparse_buffer(b, (I, J_b), dtype)
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([I, J], "SS", "merged") as [i, j]:
            C[i, j] = combine(A[i, j], B[i, j])

    return merged.with_attr("global_symbol", name)


@memoize_program
def add(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Build the sum of two sparse matrices: ``C[i, j] = A[i, j] + B[i, j]``.

    Parameters
    ----------
    dtype : dtype
        Of A, B and C.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers A, B and C; A and B are sorted and hold each coordinate once.
    """
    return _merged("add", lambda a, b: a + b, dtype, idtype)


@memoize_program
def scaled_add(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Build a linear combination of two sparse matrices: ``C[i, j] = alpha * A[i, j] + beta * B[i, j]``.

    Parameters
    ----------
    dtype : dtype
        Of A, B and C.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers A, B and C, and numbers alpha and beta of their dtype.
    """
    size = T.int64 if idtype == "int64" else T.int32
    number = getattr(T, dtype)

    @T.prim_func
    def scaled_add(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr_a: T.handle,
        indices_a: T.handle,
        indptr_b: T.handle,
        indices_b: T.handle,
        alpha: number,
        beta: number,
        m: size,
        n: size,
        nnz_a: size,
        nnz_b: size,
    ):
        I = T.dense_fixed(m, idtype)
        J_a = T.sparse_variable(I, (n, nnz_a), (indptr_a, indices_a), idtype)
        J_b = T.sparse_variable(I, (n, nnz_b), (indptr_b, indices_b), idtype)
        J = T.sparse_assembled(I, n, idtype)
        A = T.match_sparse_buffer(a, (I, J_a), dtype)
        B = T.match_sparse_buffer(b, (I, J_b), dtype)
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([I, J], "SS", "scaled_add") as [i, j]:
            C[i, j] = alpha * A[i, j] + beta * B[i, j]

    return scaled_add


@memoize_program
def multiply(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Build the elementwise product of two sparse matrices: ``C[i, j] = A[i, j] * B[i, j]``.

    Parameters
    ----------
    dtype : dtype
        Of A, B and C.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers A, B and C; A and B are sorted and hold each coordinate once.
    """
    return _merged("multiply", lambda a, b: a * b, dtype, idtype)


@memoize_program
def maximum(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Build the elementwise maximum of two sparse matrices: ``C[i, j] = max(A[i, j], B[i, j])``.

    Parameters
    ----------
    dtype : dtype
        Of A, B and C.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    PrimFunc
        Buffers A, B and C; an element that is not stored counts as zero. NaN is the maximum of itself and anything.
    """
    return _merged("maximum", _larger if "float" in dtype else T.max, dtype, idtype)


def _larger(a: Any, b: Any) -> Any:
    return T.if_then_else(a > b, a, T.if_then_else(a != a, a, b))


__all__ = ["add", "masked_spgemm", "maximum", "multiply", "rap", "scaled_add", "spgemm"]
