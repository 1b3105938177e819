# SPDX-License-Identifier: Apache-2.0
"""
A scipy script made faster
==========================

``sparsetir.scipy.accelerate`` runs the products of scipy's matrices on compiled kernels where these prove faster. The
script itself stays as it is: here, personalised PageRank over steps of one
or two links.
"""

import os

import numpy as np
import scipy.sparse as sp
from matplotlib import pyplot

from sparsetir.bench import interleave
from sparsetir.scipy import accelerate

NODES = int(4_000 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)))

# %%
# The script
# ----------
# A graph whose links are mostly near, and a function that knows only scipy.

rng = np.random.default_rng(0)
sources = rng.integers(NODES, size=15 * NODES)
near = (sources + rng.integers(1, 200, sources.size)) % NODES
targets = np.where(rng.random(sources.size) < 0.8, near, rng.integers(NODES, size=sources.size))
links = sp.csr_array((np.ones(sources.size), (targets, sources)), shape=(NODES, NODES))
links = sp.csr_array(links @ sp.diags_array(1 / np.maximum(links.sum(axis=0), 1)))
starts = np.linspace(0, NODES - 1, 32).astype(int)


def pagerank(links: sp.csr_array, starts: np.ndarray, steps: int = 10) -> np.ndarray:
    """Return the rank of each node as seen from each of some nodes, where a step follows one link or two."""
    links = 0.5 * (links + links @ links)
    restart = np.zeros((links.shape[0], starts.size))
    restart[starts, np.arange(starts.size)] = 1
    ranks = restart
    for _ in range(steps):
        ranks = 0.85 * (links @ ranks) + 0.15 * restart
    return ranks


plain = pagerank(links, starts)

# %%
# The same function, accelerated
# ------------------------------
# ``wait=True`` compiles a kernel when it is first needed. Without it another process compiles, and scipy computes
# until the kernel is there.

with accelerate(wait=True) as acceleration:
    fast = pagerank(links, starts)

print("same ranks:", np.allclose(plain, fast, rtol=1e-9, atol=1e-15))
print(acceleration.report())

# %%
# The times
# ---------


def accelerated() -> np.ndarray:
    """Run the script inside the context."""
    with accelerate(wait=True):
        return pagerank(links, starts)


times = interleave({"scipy": lambda: pagerank(links, starts), "accelerated": accelerated}, rounds=2, rest=0.05)
figure, axes = pyplot.subplots(figsize=(7, 2.2), layout="constrained")
bars = axes.barh(list(times), [timing.median * 1e3 for timing in times.values()], color=["C7", "C0"])
axes.bar_label(bars, fmt="%.0f ms", padding=4)
axes.set(xlabel="milliseconds for the whole script, everything included")
axes.margins(x=0.15)
pyplot.show()
