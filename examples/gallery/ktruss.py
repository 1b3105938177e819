# SPDX-License-Identifier: Apache-2.0
"""
Sparse times sparse: the k-trusses of a graph
=============================================

In the k-truss of a graph each edge lies in at least k - 2 triangles of it. Triangles at the edges are a product of
the adjacency matrix with itself under its own mask, which ``sparsetir.matmul(A, A, mask=A)`` computes without the
rest of the product.
"""

import os

import numpy as np
import scipy.sparse as sp
from matplotlib import pyplot

import sparsetir
from sparsetir.bench import interleave

NODES = int(3000 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)))

# %%
# A graph with dense groups
# -------------------------

rng = np.random.default_rng(0)
ends = [rng.integers(NODES, size=(2, 6 * NODES))]
for size in rng.integers(8, 40, NODES // 60):  # groups of which most are linked with each other
    members = rng.choice(NODES, size, replace=False)
    ends.append(members[rng.integers(size, size=(2, size * size // 2))])
rows, columns = np.concatenate(ends, axis=1)
linked = sp.coo_array((np.ones(rows.size), (rows, columns)), shape=(NODES, NODES)).tocsr()
graph = sp.csr_array((linked + linked.T) > 0, dtype="float32")
graph.setdiag(0)
graph.eliminate_zeros()
print(f"{NODES} nodes, {graph.nnz // 2} edges")

# %%
# The trusses
# -----------
# Edges in too few triangles go, which takes triangles from others, until nothing changes.


def truss(A: sp.csr_array, k: int) -> sp.csr_array:
    """Return the k-truss of a graph."""
    while A.nnz:
        triangles = sparsetir.matmul(A, A, mask=A)  # stores only edges that lie in a triangle
        keep = triangles >= k - 2
        if keep.nnz == A.nnz:
            break
        A = sp.csr_array(keep, dtype="float32")
    return A


trusses = {}
k, current = 3, graph
while (current := truss(current, k)).nnz:
    trusses[k] = current
    k += 1
for k, edges in trusses.items():
    print(f"k = {k:2}: {edges.nnz // 2:6} edges, {np.count_nonzero(np.diff(edges.indptr)):5} nodes")

# %%
# The mask and the whole product
# ------------------------------
# scipy has no masks: it computes the whole product and then leaves most of it out.

times = interleave(
    {
        "scipy": lambda: (graph @ graph).multiply(graph),
        "sparsetir, whole product": lambda: sparsetir.multiply(sparsetir.matmul(graph, graph), graph),
        "sparsetir, masked": lambda: sparsetir.matmul(graph, graph, mask=graph),
    },
    rounds=2,
    rest=0.05,
)
figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.step(list(trusses), [edges.nnz // 2 for edges in trusses.values()], where="mid", color="C0")
left.set(xlabel="k", ylabel="edges of the k-truss", yscale="log")
bars = right.barh(list(times), [timing.median * 1e3 for timing in times.values()], color=["C7", "C0", "C0"])
right.bar_label(bars, fmt="%.1f", padding=4)
right.invert_yaxis()
right.margins(x=0.15)
right.set(xlabel="milliseconds for the triangles at all edges")
pyplot.show()
