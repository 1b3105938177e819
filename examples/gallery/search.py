# SPDX-License-Identifier: Apache-2.0
"""
Search on your matrix
=====================

``sparsetir.tune_sparse`` searches formats and schedules together by running candidates on the matrix at hand. The
kernel it returns is no slower than the untuned one.
"""

import os

import numpy as np
from matplotlib import pyplot

import sparsetir
from sparsetir.workloads import suite

TRIALS = 24 if float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)) == 1 else 4

# %%
# A matrix and a budget
# ---------------------
# Blocks of unknowns as in finite elements. Any matrix does; real ones are read by ``sparsetir.read("matrix.mtx")``.

A = suite.families()["fem_blocks"]("small")
B = np.random.default_rng(0).random((A.shape[1], 64), dtype="float32")
result = sparsetir.tune_sparse(
    sparsetir.ops.spmm(), {"A": A, "B": B}, max_trials=TRIALS, max_seconds=20, isolate=False, progress=False
)
print(result.report())

# %%
# The kernel
# ----------

C = result.kernel(A=A, B=B)
print(result.best.candidate, np.allclose(C, A @ B, rtol=1e-3, atol=1e-4))

# %%
# The search
# ----------
# A dot for each trial, by format.

trials = [trial for trial in result.history if trial.seconds]
figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
kinds = [str(trial.candidate).partition(" tile")[0] for trial in trials]
for kind in dict.fromkeys(kinds):
    points = [
        (n, trial.seconds * 1e3) for n, (trial, own) in enumerate(zip(trials, kinds, strict=True), 1) if own == kind
    ]
    axes.plot(*zip(*points, strict=True), "o", label=kind)
axes.step(
    range(1, len(trials) + 1),
    np.minimum.accumulate([trial.seconds * 1e3 for trial in trials]),
    where="post",
    color="C7",
    label="best so far",
)
axes.set(xlabel="trial", ylabel="milliseconds a call", yscale="log")
axes.legend(fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")
pyplot.show()
