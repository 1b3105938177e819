# SPDX-License-Identifier: Apache-2.0
"""A tensor in compressed sparse fibers times two matrices (MTTKRP), the inner step of a CP decomposition."""

from __future__ import annotations

import numpy as np

import sparsetir
from sparsetir import T

SHAPE, ENTRIES, RANK = (300, 400, 500), 40_000, 16


@T.prim_func
def mttkrp(
    x: T.handle,
    b: T.handle,
    c: T.handle,
    d: T.handle,
    indptr_j: T.handle,
    indices_j: T.handle,
    indptr_k: T.handle,
    indices_k: T.handle,
    n_i: T.int32,
    n_j: T.int32,
    n_k: T.int32,
    fibers: T.int32,
    nnz: T.int32,
) -> None:
    I = T.dense_fixed(n_i)
    J = T.sparse_variable(I, (n_j, fibers), (indptr_j, indices_j))
    K = T.sparse_variable(J, (n_k, nnz), (indptr_k, indices_k))
    J_dense = T.dense_fixed(n_j)
    K_dense = T.dense_fixed(n_k)
    R = T.dense_fixed(RANK)
    X = T.match_sparse_buffer(x, (I, J, K), "float64")
    B = T.match_sparse_buffer(b, (J_dense, R), "float64")
    C = T.match_sparse_buffer(c, (K_dense, R), "float64")
    D = T.match_sparse_buffer(d, (I, R), "float64")
    with T.sp_iter([I, J, K, R], "SRRS", "mttkrp") as [i, j, k, r]:
        with T.init():
            D[i, r] = 0
        D[i, r] = D[i, r] + X[i, j, k] * B[j, r] * C[k, r]


def main() -> None:
    rng = np.random.default_rng(0)
    coords = np.stack([rng.integers(0, extent, ENTRIES) for extent in SHAPE])
    X = sparsetir.CooTensor(coords, rng.standard_normal(ENTRIES), SHAPE)
    B, C = (rng.standard_normal((extent, RANK)) for extent in SHAPE[1:])

    kernel = sparsetir.build(mttkrp)
    D = kernel(X=X, B=B, C=C)  # sorted into fibers on the way in; entries at the same place add up
    expected = np.zeros((SHAPE[0], RANK))
    np.add.at(expected, coords[0], X.values[:, None] * B[coords[1]] * C[coords[2]])
    np.testing.assert_allclose(D, expected, rtol=1e-9, atol=1e-9)

    print(kernel.script(stage=3))
    bound = kernel.bind(X=X)  # the tensor is sorted once
    print(bound.time(B=B, C=C))


if __name__ == "__main__":
    main()
