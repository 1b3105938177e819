# SPDX-License-Identifier: Apache-2.0
"""
Your own format
===============

A format is a tree of axes. This one stores groups of two rows that share their columns, which no library has under a
name; products over it are compiled from the same program as those over CSR.
"""

import os

import numpy as np
import scipy.sparse as sp
from matplotlib import pyplot

import sparsetir
from sparsetir import SparseTensor, formats

ROWS = int(4000 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1))) // 2 * 2

# %%
# The axes
# --------
# Groups ``G`` of two rows; the columns ``J`` that occur in a group; the row ``R`` inside of it. The two functions map
# coordinates of the matrix to coordinates of the tree and back.

pairs = sparsetir.parse("""
@T.prim_func
def pairs(a: T.handle, indptr: T.handle, indices: T.handle, groups: T.int32, n: T.int32, nnz: T.int32):
    G = T.dense_fixed(groups)
    J = T.sparse_variable(G, (n, nnz), (indptr, indices))
    R = T.dense_fixed(2)
    A = T.match_sparse_buffer(a, (G, J, R))
""")
row_pairs = formats.tree(
    pairs,
    {0: ["G", "R"], 1: ["J"]},
    forward=lambda i, j: (i // 2, j, i % 2),
    inverse=lambda g, j, r: (g * 2 + r, j),
    fills=True,
)

# %%
# A matrix that suits it
# ----------------------
# Two unknowns at each node of a mesh, as in plane elasticity: rows come in pairs with the same columns.

rng = np.random.default_rng(0)
mesh = sp.random_array((ROWS // 2, ROWS // 2), density=12 / ROWS, format="csr", rng=rng)
A = sp.csr_array(sp.kron(mesh, np.array([[2.0, 1.0], [1.0, 3.0]])), dtype="float32")
B = rng.random((ROWS, 32), dtype="float32")

stored = {
    "csr": SparseTensor.from_scipy(A),
    "row pairs": SparseTensor.from_scipy(A, format=row_pairs),
    "bsr(2, 2)": SparseTensor.from_scipy(A, format=formats.bsr(2, 2)),
    "ell": SparseTensor.from_scipy(A, format=formats.ell()),
}
for name, tensor in stored.items():
    print(f"{name:10} {tensor}")

# %%
# The same program over each of them
# ----------------------------------

spmm = sparsetir.ops.spmm()
kernels = {
    name: sparsetir.build(sparsetir.decompose_format(spmm, {"A": tensor.format})) for name, tensor in stored.items()
}
for name, kernel in kernels.items():
    print(name, np.allclose(kernel(A=stored[name], B=B), A @ B, rtol=1e-4))
print(kernels["row pairs"].script(stage=2))

# %%
# What each stores
# ----------------

figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=[1, 1.6])
left.spy(A[:40, :400].toarray(), markersize=2, aspect="auto", color="C0")
left.set(title="the first 40 rows", xlabel="column", ylabel="row")
kilobytes = [
    sum(array.nbytes for piece in tensor.pieces for array in (piece.values, *piece.arrays.values())) / 1e3
    for tensor in stored.values()
]
bars = right.barh(list(stored), kilobytes, color=["C7", "C0", "C7", "C7"])
right.bar_label(bars, fmt="%.0f", padding=4)
right.invert_yaxis()
right.margins(x=0.15)
right.set(title="memory", xlabel="kilobytes")
pyplot.show()
