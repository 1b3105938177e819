# SPDX-License-Identifier: Apache-2.0
"""
Retrieval: the best documents for a query
=========================================

``sparsetir.Postings`` keeps a matrix of terms by documents as an inverted index. A search returns the documents with
the highest scores, exactly, and reads only the postings of the query's terms. ``sparsetir bench retrieval``
compares with other libraries.
"""

import os

import numpy as np
from matplotlib import pyplot

import sparsetir
from sparsetir.bench import interleave
from sparsetir.bench.retrieval import bm25, queries

DOCUMENTS = int(20_000 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1)))
TERMS, LENGTH, BEST = 20_000, 60, 10

# %%
# An index
# --------
# BM25 weights of generated documents, whose terms are as unevenly frequent as words are.

rng = np.random.default_rng(0)
weights, asked = bm25(DOCUMENTS, TERMS, LENGTH, rng), queries(20, TERMS, rng)
index = sparsetir.Postings(weights.T)
print(index)

# %%
# A search
# --------

ids, scores = index.search(asked, BEST)
print(f"terms of the first query: {asked.indices[: asked.indptr[1]].tolist()}")
for document, score in zip(ids[0, :3], scores[0, :3], strict=True):
    print(f"document {document}: {score:.3f}")

every = (asked @ weights.T).toarray()
print("exact:", np.allclose(np.sort(every, axis=1)[:, : -BEST - 1 : -1], scores, rtol=1e-5))

# %%
# Time and scores
# ---------------

documents = weights.T.tocsr()
times = interleave(
    {
        "scipy, product alone": lambda: asked @ documents,
        "matmul(top=10)": lambda: sparsetir.matmul(asked, documents, top=BEST),
        "Postings.search": lambda: index.search(asked, BEST),
    },
    rounds=2,
    rest=0.05,
)
figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.plot(range(1, BEST + 1), scores[:8].T, "o-", color="C0", alpha=0.5, markersize=3)
left.set(xlabel="rank", ylabel="score", title="the best ten documents of eight queries")
bars = right.barh(
    list(times), [timing.median / asked.shape[0] * 1e3 for timing in times.values()], color=["C7", "C0", "C0"]
)
right.bar_label(bars, fmt="%.3f", padding=4)
right.invert_yaxis()
right.margins(x=0.2)
right.set(xlabel="milliseconds a query")
pyplot.show()
