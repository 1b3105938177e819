# SPDX-License-Identifier: Apache-2.0
"""Ready programs that compute the pattern of their results."""

from __future__ import annotations

from tvm import tirx
from tvm.script import sparsetir as T

from sparsetir.once import once


@once
def spgemm(dtype: str = "float32", *, idtype: str = "int32") -> tirx.PrimFunc:
    """Sparse times sparse matrix: ``C[i, j] = sum_k A[i, k] * B[k, j]``, in the order of Gustavson.

    Parameters
    ----------
    dtype : dtype
        Of A, B and C.
    idtype : {"int32", "int64"}
        Of the index arrays.

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


__all__ = ["spgemm"]
