# SPDX-License-Identifier: Apache-2.0
"""The best documents for a query: generated BM25 weights, an index of postings, and exact top ten.

``--documents 500000`` takes more documents; ``python -m sparsetir.bench.retrieval`` compares with other libraries.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import sparsetir
from sparsetir.bench.retrieval import bm25, queries

TERMS, LENGTH = 20_000, 60


def main() -> None:
    """Search, and compare with the whole product."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    weights, asked = bm25(options.documents, TERMS, LENGTH, rng), queries(20, TERMS, rng)
    index = sparsetir.Postings(weights.T)
    print(index)
    index.search(asked, 10)  # compiles
    start = time.perf_counter()
    ids, scores = index.search(asked, 10)
    print(f"{(time.perf_counter() - start) / asked.shape[0] * 1e3:.3f} ms a query")
    whole = (asked @ weights.T).toarray()
    assert np.allclose(np.sort(whole, axis=1)[:, :-11:-1], scores, rtol=1e-5)
    print(f"best documents for the terms {asked.indices[: asked.indptr[1]].tolist()}:")
    for document, score in zip(ids[0, :3], scores[0, :3], strict=True):
        print(f"document {document}: {score:.3f}")


if __name__ == "__main__":
    main()
