# SPDX-License-Identifier: Apache-2.0
"""
Fused attention along the edges of a graph
==========================================

SDDMM, softmax and SpMM in one function over one structure. The scores of the edges live in scratch buffers that share
the graph's axes: no index array is stored twice, and no dense matrix of scores is made.
"""

import os

import numpy as np
import scipy.sparse as sp
from matplotlib import pyplot

import sparsetir
from sparsetir import T
from sparsetir.bench import interleave

NODES = int(3000 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)))
EDGES, FEAT = 10 * NODES, 32

# %%
# The program
# -----------
# Five iterations over the axes ``I`` (targets) and ``J`` (their sources).


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


# %%
# A graph and its result
# ----------------------
# Edges to a few popular nodes and to many others, each of weight one; a tenth of the nodes has none.

rng = np.random.default_rng(0)
sources = rng.integers(0, NODES - NODES // 10, EDGES)
targets = np.minimum(rng.zipf(1.4, EDGES), NODES) - 1
G = sp.coo_array((np.ones(EDGES, np.float32), (sources, targets)), shape=(NODES, NODES)).tocsr()
G.data[:] = 1
Q, K, V = (rng.standard_normal((NODES, FEAT), np.float32) for _ in range(3))
SCALE = FEAT**-0.5


def in_steps() -> np.ndarray:
    """Compute the same with numpy and scipy, one operation after the other."""
    row = np.repeat(np.arange(NODES), np.diff(G.indptr))
    scores = np.einsum("ef,ef->e", Q[row], K[G.indices]) * SCALE
    starts = G.indptr[:-1][np.diff(G.indptr) > 0]
    largest = np.zeros(NODES, np.float32)
    largest[row[starts]] = np.maximum.reduceat(scores, starts)
    weights = sp.csr_array((np.exp(scores - largest[row]), G.indices, G.indptr), shape=G.shape)
    sums = weights.sum(axis=1)
    return np.asarray(weights @ V / np.where(sums > 0, sums, 1)[:, None])


kernel = sparsetir.build(attention)
fused = kernel(G=G, Q=Q, K=K, V=V, scale=SCALE)
print(f"{G.nnz} edges, same as in steps: {np.allclose(fused, in_steps(), rtol=1e-3, atol=1e-5)}")

# %%
# Each iteration becomes loops over the same rows, one after the other:

print(kernel.script(stage=3, outline=True))

# %%
# Time beside other ways
# ----------------------
# The dense way makes a matrix of scores of all pairs of nodes.

mask = G.toarray() > 0


def dense() -> np.ndarray:
    """Compute the same over all pairs of nodes."""
    scores = np.where(mask, Q @ K.T * SCALE, -np.inf)
    weights = np.exp(scores - np.where(mask.any(axis=1), scores.max(axis=1), 0)[:, None])
    sums = weights.sum(axis=1, keepdims=True)
    return np.asarray(weights @ V / np.where(sums > 0, sums, 1))


times = interleave(
    {"dense": dense, "numpy and scipy in steps": in_steps, "fused": lambda: kernel(G=G, Q=Q, K=K, V=V, scale=SCALE)},
    rounds=2,
    rest=0.05,
)
figure, axes = pyplot.subplots(figsize=(7, 2.4), layout="constrained")
bars = axes.barh(list(times), [timing.median * 1e3 for timing in times.values()], color=["C7", "C7", "C0"])
axes.bar_label(bars, fmt="%.2f ms", padding=4)
axes.invert_yaxis()
axes.margins(x=0.2)
axes.set(xlabel="milliseconds (logarithmic)", xscale="log")
pyplot.show()
