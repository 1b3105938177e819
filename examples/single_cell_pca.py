# SPDX-License-Identifier: Apache-2.0
"""Principal components of a single-cell matrix on disk, in blocks, with a picture of the cells.

The matrix is synthetic: counts of five kinds of cells, normalised and logarithmised as usual. It is written block by
block, so that it is never in memory as a whole, and its components are computed within a memory limit.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp

import sparsetir

CELLS, GENES, KINDS, BLOCK = 10_000, 400, 5, 2_000

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


with tempfile.TemporaryDirectory() as folder:
    M = sparsetir.open_blocks(sparsetir.save_blocks(blocks(), Path(folder, "cells")), memory="8MiB")
    print(f"{M.shape[0]} cells x {M.shape[1]} genes, {M.nnz / M.shape[0] / M.shape[1]:.0%} nonzero")
    pca = M.pca(10)
    scores = pca.transform(M)

shares = ", ".join(f"{share:.1%}" for share in pca.explained_variance_ratio_[:6])
print(f"shares of the variance, one for each component: {shares}")

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:
    print("no picture: pip install 'sparsetir[plot]' for one")
else:
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    axes.scatter(scores[:, 0], scores[:, 1], s=2, c=kinds, cmap="tab10")
    axes.set(xlabel="first component", ylabel="second component", title="Cells coloured by their kind")
    figure.savefig("single_cell_pca.png", dpi=150)
    print("wrote single_cell_pca.png")
