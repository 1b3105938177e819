# SPDX-License-Identifier: Apache-2.0
"""Attention along the edges of a graph: SDDMM, softmax and SpMM in one function, over one structure.

The scores of the edges live in scratch buffers that share the graph's axes; no index array is stored twice and no
dense matrix of scores is made.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

import sparsetir
from sparsetir import T

NODES, EDGES, FEAT = 3000, 30_000, 32


@T.prim_func
def attention(
    g: T.handle,
    q: T.handle,
    k: T.handle,
    v: T.handle,
    o: T.handle,
    indptr: T.handle,
    indices: T.handle,
    n: T.int32,
    nnz: T.int32,
    feat: T.int32,
    scale: T.float32,
) -> None:
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    F = T.dense_fixed(feat)
    G = T.match_sparse_buffer(g, (I, J), "float32")
    Q = T.match_sparse_buffer(q, (I, F), "float32")
    K = T.match_sparse_buffer(k, (J_dense, F), "float32")
    V = T.match_sparse_buffer(v, (J_dense, F), "float32")
    O = T.match_sparse_buffer(o, (I, F), "float32")
    score = T.alloc_sparse_buffer((I, J), "float32")
    top = T.alloc_sparse_buffer((I,), "float32")
    total = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([I, J, F], "SSR", "scores") as [i, j, f]:
        with T.init():
            score[i, j] = 0
        score[i, j] = score[i, j] + Q[i, f] * K[j, f]
    with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
        with T.init():
            top[i] = T.min_value("float32")
        top[i] = T.max(top[i], score[i, j])
    with T.sp_iter([I, J], "SS", "exponent") as [i, j]:
        score[i, j] = G[i, j] * T.exp((score[i, j] - top[i]) * scale)
    with T.sp_iter([I, J], "SR", "row_sum") as [i, j]:
        with T.init():
            total[i] = 0
        total[i] = total[i] + score[i, j]
    with T.sp_iter([I, J, F], "SRS", "mix") as [i, j, f]:
        with T.init():
            O[i, f] = 0
        O[i, f] = O[i, f] + score[i, j] / total[i] * V[j, f]


def graph(rng: np.random.Generator) -> sp.csr_array:
    """Edges to a few popular nodes and to many others, each of weight one; a tenth of the nodes has none."""
    sources = rng.integers(0, NODES - NODES // 10, EDGES)
    targets = np.minimum(rng.zipf(1.4, EDGES), NODES) - 1
    edges = sp.coo_array((np.ones(EDGES, np.float32), (sources, targets)), shape=(NODES, NODES)).tocsr()
    edges.data[:] = 1
    return edges


def by_numpy(G: sp.csr_array, Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> np.ndarray:
    """The same row by row."""
    out = np.zeros_like(Q)
    for i in range(NODES):
        near = G.indices[G.indptr[i] : G.indptr[i + 1]]
        if near.size:
            scores = K[near] @ Q[i] / np.sqrt(FEAT)
            weights = np.exp(scores - scores.max())
            out[i] = weights @ V[near] / weights.sum()
    return out


def main() -> None:
    rng = np.random.default_rng(0)
    G = graph(rng)
    Q, K, V = (rng.standard_normal((NODES, FEAT), np.float32) for _ in range(3))
    kernel = sparsetir.build(attention)
    O = kernel(G=G, Q=Q, K=K, V=V, scale=FEAT**-0.5)
    np.testing.assert_allclose(O, by_numpy(G, Q, K, V), rtol=1e-3, atol=1e-5)

    print(f"{G.nnz} edges, {np.count_nonzero(np.diff(G.indptr) == 0)} nodes without any; the loops of each step:\n")
    shown = ("for ", "with T.sblock")
    print("\n".join(line for line in kernel.script(stage=2).splitlines() if line.lstrip().startswith(shown)))
    print(f"\n{kernel.time(G=G, Q=Q, K=K, V=V, scale=FEAT**-0.5)}")


if __name__ == "__main__":
    main()
