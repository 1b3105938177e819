# SPDX-License-Identifier: Apache-2.0
"""The best documents of queries over generated BM25 weights, beside scipy, sparse_dot_topn and bm25s.

Run ``sparsetir bench retrieval``. Documents draw terms from a Zipf distribution. Every way answers the same
queries, in turn; times are the least of several rounds. scipy's are those of the product alone, without a choice of the
best documents. bm25s has an index of its own, whose scores it sums; it is timed if the package is installed.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.einsum.products import matmul
from sparsetir.sparse_output.postings import Postings
from sparsetir.utils.threads import get_num_threads

TERMS_OF_QUERY = 5
K1, B = 1.2, 0.75  # of BM25


def drawn_terms(rng: np.random.Generator, count: int, terms: int, exponent: float) -> np.ndarray:
    """Draw terms, the first ones most often, by a power of their rank."""
    weights = np.arange(1, terms + 1) ** -exponent
    return rng.choice(terms, count, p=weights / weights.sum())


def bm25(documents: int, terms: int, length: int, rng: np.random.Generator) -> sp.csr_array:
    """Generate the BM25 weights of documents with a mean length, of shape (documents, terms)."""
    lengths = rng.poisson(length, documents)
    rows = np.repeat(np.arange(documents), lengths)
    columns = drawn_terms(rng, len(rows), terms, 1.0)
    counts = sp.csr_array((np.ones(len(rows), np.float32), (rows, columns)), shape=(documents, terms))
    counts.sum_duplicates()
    containing = np.bincount(counts.indices, minlength=terms)
    inverse = np.log1p((documents - containing + 0.5) / (containing + 0.5))
    relative = np.repeat(lengths / max(length, 1), np.diff(counts.indptr))
    saturated = counts.data * (K1 + 1) / (counts.data + K1 * (1 - B + B * relative))
    counts.data = (inverse[counts.indices] * saturated).astype(np.float32)
    return counts


def queries(count: int, terms: int, rng: np.random.Generator) -> sp.csr_array:
    """Draw queries of a few terms, of shape (count, terms)."""
    columns = drawn_terms(rng, count * TERMS_OF_QUERY, terms, 0.7)
    indptr = np.arange(0, len(columns) + 1, TERMS_OF_QUERY)
    matrix = sp.csr_array((np.ones(len(columns), np.float32), columns, indptr), shape=(count, terms))
    matrix.sum_duplicates()
    return matrix


def of_bm25s(weights: sp.csr_array) -> Any:
    """Return an index of bm25s with these weights, or None without the package."""
    try:
        package = importlib.import_module("bm25s")
    except ImportError:
        return None
    index = package.BM25(dtype="float32", int_dtype="int32")
    columns = weights.tocsc()
    index.scores = {
        "data": columns.data,
        "indices": columns.indices.astype(np.int32),
        "indptr": columns.indptr.astype(np.int32),
        "num_docs": weights.shape[0],
    }
    index.nonoccurrence_array = None
    index.vocab_dict = {str(term): term for term in range(weights.shape[1])}
    index.unique_token_ids_set = set(range(weights.shape[1]))
    return index


def ways(weights: sp.csr_array, k: int) -> dict[str, Callable[[sp.csr_array], Any]]:
    """Return functions that answer queries, by their names."""
    D = weights.T.tocsr()
    index = Postings(D)
    chosen: dict[str, Callable[[sp.csr_array], Any]] = {
        "scipy, product alone": lambda Q: Q @ D,
        "sparsetir.Postings": lambda Q: index.search(Q, k),
        "sparsetir.matmul(top=)": lambda Q: matmul(Q, D, top=k),
    }
    try:
        topn = importlib.import_module("sparse_dot_topn").sp_matmul_topn
        threads, matrix = get_num_threads(), sp.csr_matrix(D)
        chosen["sparse_dot_topn"] = lambda Q: topn(sp.csr_matrix(Q), matrix, top_n=k, sort=True, n_threads=threads)
    except ImportError:
        pass
    peer = of_bm25s(weights)
    if peer is not None:
        chosen["bm25s"] = lambda Q: [_by_bm25s(peer, row, k) for row in np.split(Q.indices, Q.indptr[1:-1])]
    return chosen


def _by_bm25s(index: Any, terms: np.ndarray, k: int) -> Any:
    scores = index.get_scores_from_ids(terms.tolist())
    best = np.argpartition(scores, -k)[-k:]
    return best[np.argsort(-scores[best])]


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the rows of the table: milliseconds for each query, and times scipy's."""
    rng = np.random.default_rng(0)
    weights = bm25(options.documents, options.terms, options.length, rng)
    chosen, asked = ways(weights, options.top), queries(options.queries, options.terms, rng)
    ones = [asked[n : n + 1] for n in range(asked.shape[0])]
    calls: dict[str, Callable[[Any], Any]] = {
        "one at a time": lambda way: [way(Q) for Q in ones],
        "all at once": lambda way: way(asked),
    }
    yield f"{weights.nnz} weights, {options.queries} queries, the best {options.top} documents\n"
    yield "| queries | way | ms a query | scipy's time / its own |"
    yield "|---|---|---:|---:|"
    for name, call in calls.items():
        seconds = dict.fromkeys(chosen, np.inf)
        for _ in range(options.repeat):
            for way, function in chosen.items():
                start = time.perf_counter()
                call(function)
                seconds[way] = min(seconds[way], time.perf_counter() - start)
        plain = seconds["scipy, product alone"]
        for way, least in seconds.items():
            yield f"| {name} | {way} | {least / len(ones) * 1e3:.3f} | {plain / least:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("sparsetir bench retrieval", description=__doc__)
    parser.add_argument("--documents", type=int, default=500_000)
    parser.add_argument("--terms", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=60, help="terms of a document, on average")
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=7)
    for line in lines(parser.parse_args(arguments)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
