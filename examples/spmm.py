# SPDX-License-Identifier: Apache-2.0
"""Sparse times dense matrix: the program, the loops made of it, and its time beside scipy's."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

import sparsetir
from sparsetir import T
from sparsetir.bench import interleave

FEAT = 64


@T.prim_func
def spmm(
    a: T.handle,
    b: T.handle,
    c: T.handle,
    indptr: T.handle,
    indices: T.handle,
    m: T.int32,
    n: T.int32,
    nnz: T.int32,
) -> None:
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(FEAT)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_dense, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]


def main() -> None:
    rng = np.random.default_rng(0)
    A = sp.random_array((20_000, 20_000), density=5e-4, format="csr", dtype="float32", rng=rng)
    B = rng.standard_normal((20_000, FEAT), np.float32)

    kernel = sparsetir.build(spmm)
    np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-4, atol=1e-4)
    print(kernel.script(stage=3))

    # In a loop over many B the structure of A is checked once, and the result's memory used again.
    bound, C = kernel.bind(A=A), np.empty((20_000, FEAT), np.float32)
    times = interleave({"sparsetir": lambda: bound(B=B, C=C), "scipy": lambda: A @ B}, rounds=2, rest=0.1)
    for name, timing in times.items():
        print(f"{name:10} {timing.median * 1e3:8.3f} ms  {2 * A.nnz * FEAT / timing.median / 1e9:6.1f} GFLOP/s")


if __name__ == "__main__":
    main()
