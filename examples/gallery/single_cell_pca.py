# SPDX-License-Identifier: Apache-2.0
"""
Principal components of single cells, out of core
=================================================

A matrix of cells by genes stays on disk; ``sparsetir.open_blocks`` computes its principal components block by block,
within a memory limit.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from matplotlib import pyplot

import sparsetir

CELLS = int(10_000 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)))
GENES, KINDS, BLOCK = 400, 5, 2_000

# %%
# A matrix on disk
# ----------------
# Counts of five kinds of cells, normalised and logarithmised as usual. They are written block by block, so that the
# whole matrix is never in memory. Files of anndata (``.h5ad``, ``.zarr``) are opened in the same way.

rng = np.random.default_rng(0)
kinds = rng.integers(KINDS, size=CELLS)
profiles = rng.lognormal(0, 1.5, (KINDS, GENES))


def blocks() -> Iterator[sp.csr_array]:
    """Yield log-normalised counts of some cells at a time."""
    for begin in range(0, CELLS, BLOCK):
        rates = profiles[kinds[begin : begin + BLOCK]]
        counts = rng.poisson(60 * rates / rates.sum(axis=1, keepdims=True))
        scaled = 1e4 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        yield sp.csr_array(np.log1p(scaled).astype("float32"))


folder = tempfile.TemporaryDirectory()
M = sparsetir.open_blocks(sparsetir.save_blocks(blocks(), Path(folder.name, "cells")), memory="8MiB")
print(f"{M.shape[0]} cells x {M.shape[1]} genes, {M.nnz / M.shape[0] / M.shape[1]:.0%} nonzero")

# %%
# Components within 8 MiB
# -----------------------

print(M.plan(np.ones((GENES, 10), "float32")))
pca = M.pca(10)
scores = pca.transform(M)
folder.cleanup()

# %%
# The cells
# ---------

figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=[1.3, 1])
left.scatter(scores[:, 0], scores[:, 1], s=2, c=kinds, cmap="tab10")
left.set(xlabel="first component", ylabel="second component", title="cells, coloured by their kind")
right.bar(range(1, 11), pca.explained_variance_ratio_, color="C0")
right.set(xlabel="component", ylabel="share of the variance")
pyplot.show()
