# SPDX-License-Identifier: Apache-2.0
"""Sparse products over dask arrays whose chunks are scipy CSR: `matmul` and `pca` on one machine or a cluster.

>>> import dask.array, numpy as np, scipy.sparse as sp, sparsetir.dask
>>> A = sp.eye_array(4, format="csr", dtype="float32")
>>> dx = dask.array.from_array(np.arange(4), chunks=2).map_blocks(
...     lambda rows: A[rows], new_axis=1, chunks=((2, 2), (4,)), dtype="float32", meta=A[:0])
>>> sparsetir.dask.matmul(dx, np.full((4, 1), 3, "float32")).compute().ravel().tolist()
[3.0, 3.0, 3.0, 3.0]
"""

from __future__ import annotations

from sparsetir.blocks.cluster import matmul, pca

__all__ = ["matmul", "pca"]
