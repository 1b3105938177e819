# SPDX-License-Identifier: Apache-2.0
"""
Sparse chunks of dask
=====================

``sparsetir.dask`` multiplies dask arrays whose chunks are scipy CSR matrices, and computes their principal
components, on any dask scheduler: threads of this process here, workers on several machines elsewhere.
"""

import os

import dask.array
import numpy as np
import scipy.sparse as sp
from matplotlib import pyplot

import sparsetir
import sparsetir.dask

ROWS = 1000 * max(2, int(20 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1))))
COLUMNS, RANK = 300, 6

# %%
# A dask array of sparse chunks
# -----------------------------
# Each chunk is made by the task that needs it: here entries of a matrix of low rank, at random places.

factors = np.random.default_rng(0).standard_normal((RANK, COLUMNS)) * 2.0 ** -np.arange(RANK)[:, None]


def chunk(rows: np.ndarray) -> sp.csr_array:
    """Return one chunk of rows."""
    rng = np.random.default_rng(int(rows[0]))
    seen = sp.random_array((rows.size, COLUMNS), density=0.1, format="csr", dtype="float32", rng=rng)
    row = np.repeat(np.arange(rows.size), np.diff(seen.indptr))
    weights = rng.standard_normal((rows.size, RANK))
    seen.data = np.einsum("er,re->e", weights[row], factors[:, seen.indices]).astype("float32")
    return seen


empty = sp.csr_array((0, COLUMNS), dtype="float32")
numbers = dask.array.arange(ROWS, chunks=1000)
matrix = numbers.map_blocks(chunk, new_axis=1, chunks=(numbers.chunks[0], (COLUMNS,)), dtype="float32", meta=empty)
print(matrix)

# %%
# A product and components
# ------------------------
# ``matmul`` is lazy, as everything of dask; ``pca`` computes.

B = np.random.default_rng(1).random((COLUMNS, 16), dtype="float32")
product = sparsetir.dask.matmul(matrix, B)
print(product.chunks[0][:3], product.dtype)
first = product[:1000].compute()
print("same as scipy:", np.allclose(first, chunk(np.arange(1000)) @ B, rtol=1e-4, atol=1e-4))

pca = sparsetir.dask.pca(matrix, 12)

# %%
# The spectrum
# ------------
# The six factors stand above the noise that the missing entries leave.

figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
axes.stem(range(1, 13), pca.singular_values_, basefmt=" ")
axes.set(
    xlabel="component", ylabel="singular value", yscale="log", title=f"{ROWS:,} rows in {matrix.numblocks[0]} chunks"
)
pyplot.show()
