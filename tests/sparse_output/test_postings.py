# SPDX-License-Identifier: Apache-2.0
"""Exact top-k over an index of postings, against the whole product."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
from each import examples
from sparsetir import Postings
from sparsetir.bench import retrieval
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.sparse_output import postings


def best(Q: Any, D: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents that a term of a query is in, by falling score and rising number."""
    scores = (Q @ D).toarray()
    is_touched = (sp.csr_array((np.ones(Q.nnz), Q.indices, Q.indptr), Q.shape) @ (D != 0).astype(float)).toarray() > 0
    k = min(k, D.shape[1])
    ids, values = np.full((len(scores), k), -1), np.zeros((len(scores), k), scores.dtype)
    for row, touched in enumerate(is_touched):
        documents = np.flatnonzero(touched)
        order = documents[np.lexsort((documents, -scores[row, documents]))][:k]
        ids[row, : len(order)], values[row, : len(order)] = order, scores[row, order]
    return ids, values


def drawn(rng: np.random.Generator, shape: Any, density: float, *, negative: bool, dtype: str) -> sp.csr_array:
    """Small whole numbers, so that sums are exact and many scores are equal."""
    dense = rng.integers(-3 if negative else 1, 4, shape) * (rng.random(shape) < density)
    return sp.csr_array(dense.astype(dtype))


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans(), st.sampled_from(["float32", "float64"]))
def test_small_collections(seed: int, negative: bool, of_queries: bool, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    terms, documents, count = rng.integers(1, 8), rng.integers(0, 60), rng.integers(0, 6)
    density = rng.choice([0.05, 0.3, 1.0])
    D = drawn(rng, (terms, documents), density, negative=negative, dtype=dtype)
    Q = drawn(rng, (count, terms), 0.5, negative=of_queries, dtype=dtype)
    k = int(rng.integers(1, 80))
    ids, scores = Postings(D).search(Q, k)
    expected = best(Q, D, k)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(scores, expected[1])
    assert scores.dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("negative", [False, True])
def test_many_blocks(threads: int, negative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings, "MIN_RANGE_POSTINGS", 1000)
    before = sparsetir.get_num_threads()
    sparsetir.set_num_threads(threads)
    try:
        rng = np.random.default_rng(3)
        D = retrieval.bm25(40_000, 300, 30, rng).T.tocsr()
        D.data = np.round(D.data)
        D.data[: D.indptr[3]] *= -1 if negative else 1
        D.eliminate_zeros()
        Q = retrieval.queries(9, 300, rng)
        index = Postings(D)
        for rows in (Q, Q[:1], Q[3:4], Q[:0]):
            for k in (1, 10, 200):
                ids, scores = index.search(rows, k)
                expected = best(rows, D, k)
                np.testing.assert_array_equal(ids, expected[0])
                np.testing.assert_array_equal(scores, expected[1])
                product = sparsetir.matmul(rows, D, top=k)
                assert (index.top(rows, k) != product).nnz == 0
                assert (sparsetir.matmul(rows, index, top=k) != product).nnz == 0
    finally:
        sparsetir.set_num_threads(before)


def test_blocks_that_cannot_matter_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings, "get_num_threads", lambda: 1)
    documents = 20 * postings.BLOCK
    values = np.ones(documents, "float32")
    values[:5] = 9
    D = sp.csr_array((values, np.arange(documents), [0, documents]), shape=(1, documents))
    index, Q = Postings(D), sp.csr_array(np.ones((1, 1), "float32"))
    assert index.search(Q, 5)[0].tolist() == [[0, 1, 2, 3, 4]]
    index._values[postings.BLOCK :] = 99  # behind the index's back: its maxima still say 1
    assert index.search(Q, 5)[0].tolist() == [[0, 1, 2, 3, 4]]


def test_classes_and_copies() -> None:
    rng = np.random.default_rng(0)
    D = drawn(rng, (5, 30), 0.4, negative=False, dtype="float64")
    Q = drawn(rng, (2, 5), 0.6, negative=False, dtype="float64")
    expected = best(Q, D, 4)[0]
    for make in (sp.csc_array, sp.coo_matrix, sparsetir.SparseTensor.from_any):
        np.testing.assert_array_equal(Postings(make(D)).search(make(Q), 4)[0], expected)
    index = pickle.loads(pickle.dumps(Postings(D)))
    np.testing.assert_array_equal(index.search(Q, 4)[0], expected)
    whole = Postings(D.astype("int8"))
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole.search(Q.astype("int64"), 4)[0], expected)
    twice = sp.csr_array((np.array([1.0, 2.0]), np.array([2, 2]), np.array([0, 2])), shape=(1, 5))
    once = sp.csr_array((np.array([3.0]), np.array([2]), np.array([0, 1])), shape=(1, 5))
    np.testing.assert_array_equal(Postings(D).search(twice, 4)[1], Postings(D).search(once, 4)[1])
    assert repr(index) == f"Postings(5 terms, 30 documents, {D.nnz} postings of float64)"


EYE = sp.csr_array(np.eye(3))
BROKEN = sp.csr_array(np.eye(3))
BROKEN.indices[1] = 7


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: Postings(np.eye(3)), ArgumentTypeError, "D: expected a sparse matrix, got ndarray"),
        (lambda: Postings(EYE * 1j), ArgumentTypeError, "D: expected real numbers, got complex128"),
        (lambda: Postings(EYE * np.inf), ArgumentError, "D: expected finite values"),
        (lambda: Postings(EYE[[0]].reshape(3)), ArgumentError, "D: expected a matrix, got 1 dimensions"),
        (lambda: Postings(BROKEN), StructureError, "7"),
        (lambda: Postings(EYE).search(BROKEN), StructureError, "7"),
        (lambda: Postings(EYE).search(EYE * np.nan), ArgumentError, "Q: expected finite values"),
        (
            lambda: Postings(EYE).search(EYE[:, :2]),
            ArgumentError,
            "Q: expected 3 columns, the terms of",
        ),
        (lambda: Postings(EYE).search(EYE, 0), ArgumentError, "top"),
        (lambda: sparsetir.matmul(EYE, Postings(EYE)), ArgumentError, "top: expected a number of documents"),
        (lambda: sparsetir.matmul(EYE, Postings(EYE), top=1, mask=EYE), ArgumentError, "mask, threshold: "),
    ],
)
def test_refusals(action: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        action()


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    retrieval.main("--documents 300 --terms 40 --length 9 --queries 3 --top 2 --repeat 1".split())
    rows = capsys.readouterr().out.splitlines()[4:]
    assert {"scipy, product alone", "sparsetir.Postings"} <= {row.split("|")[2].strip() for row in rows}
    assert all(float(row.split("|")[3]) > 0 for row in rows)
