# SPDX-License-Identifier: Apache-2.0
"""Products in the dtypes of matrix units, and numbers for them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from sparsetir import T

BF16 = np.dtype(ml_dtypes.bfloat16)


def program(a_type: str, b_type: str, c_type: str) -> Any:
    """The product of a sparse and a dense matrix in these dtypes."""

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), a_type)
        B = T.match_sparse_buffer(b, (J_dense, K), b_type)
        C = T.match_sparse_buffer(c, (I, K), c_type)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + T.Cast(c_type, A[i, j]) * T.Cast(c_type, B[j, k])

    return spmm


def drawn(rng: np.random.Generator, shape: Any, dtype: str) -> np.ndarray:
    """Numbers whose sums are exact: eighths, or all of an integer dtype."""
    if dtype == "bfloat16":
        return (rng.integers(-32, 32, shape) / 8).astype(BF16)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)
