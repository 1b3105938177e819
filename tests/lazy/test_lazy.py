# SPDX-License-Identifier: Apache-2.0
"""Chains of lazy arrays, compiled together, against numpy."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
import torch
from sparsetir import SparseTensor, compute, fused, lazy, relu, softmax
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.lazy import run

RNG = np.random.default_rng(0)
M = sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=RNG)
X, W, B = (RNG.random(shape, "float32") for shape in ((30, 12), (12, 5), (5,)))
Q, K, V = (RNG.random(shape, "float32") for shape in ((40, 6), (30, 6), (30, 3)))


def attention(mask: Any) -> np.ndarray:
    scores = np.where(mask.toarray() != 0, mask.toarray() * (Q @ K.T), -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(scores - scores.max(1, keepdims=True)))
    return weights / np.maximum(weights.sum(1, keepdims=True), 1e-30)


def close(found: Any, expected: Any) -> None:
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_chains() -> None:
    A, D = lazy(M), M.toarray()
    found = compute(
        relu((A @ X) @ W + B - 9.0),
        A.T @ Q,
        lazy(Q.T) @ A,
        lazy(X.T) @ A.T,
        A @ X[:, 0],
        (A @ X).sum(axis=0),
        (2 * (A @ X).max() - 1).tanh(),
        softmax(lazy(X) / 2),
    )
    close(found[0], np.maximum(D @ X @ W + B - 9, 0))
    close(found[1], D.T @ Q)
    close(found[2], Q.T @ D)
    close(found[3], X.T @ D.T)
    close(found[4], D @ X[:, 0])
    close(found[5], (D @ X).sum(0))
    close(found[6], np.tanh(2 * (D @ X).max() - 1))
    close(found[7], np.exp(X / 2) / np.exp(X / 2).sum(1, keepdims=True))


@pytest.mark.slow
def test_powers() -> None:
    A, D = lazy(M), M.toarray()
    S = A @ X - 3.0
    found = compute(S**2, S**-1, 2.0 ** (A @ X), abs(S) ** 0.5, S**3 / 2, (A**2) @ X, lazy(X) ** lazy(X))
    dense = D @ X - 3
    expected = (dense**2, 1 / dense, 2 ** (D @ X), abs(dense) ** 0.5, dense**3 / 2, D**2 @ X, X**X)
    for each, right in zip(found, expected, strict=True):
        close(each, right)
    close(compute(A**2 * 2).toarray(), D**2 * 2)
    half = lazy(np.full((3, 4), 1.5, "float16"))
    assert compute(half**2).dtype == "float16"
    np.testing.assert_array_equal(compute(half**2), np.full((3, 4), 2.25))
    for wrong in (lambda: A**0, lambda: A**-1, lambda: 2**A, lambda: A**A, lambda: A ** lazy(D)):
        with pytest.raises(ArgumentError, match="power of"):
            wrong()


@pytest.mark.slow
def test_sparse_results() -> None:
    A, D = lazy(M), M.toarray()
    scaled, gathered, total = compute(2 * A, A * (lazy(Q) @ K.T).exp(), A + (-A) * 0.5)
    assert type(scaled) is sp.csr_array
    close(scaled.toarray(), 2 * D)
    close(gathered.toarray(), D * np.exp(Q @ K.T))
    close(total.toarray(), D / 2)
    T = SparseTensor.from_scipy(M.tocsc(), "csc")
    found = compute(relu(-lazy(T)))
    assert type(found) is SparseTensor
    close(found.to_dense(), np.maximum(-D, 0))


@pytest.mark.slow
def test_fused() -> None:
    traced = []

    @fused
    def attend(mask: Any, Q: Any, K: Any, V: Any, *, scale: float = 1.0) -> Any:
        traced.append(scale)
        return softmax(mask * (Q @ K.T) * scale) @ V

    close(attend(M, Q, K, V), attention(M) @ V)
    other = sp.random_array((40, 30), density=0.2, format="csr", dtype="float32", rng=RNG)
    close(attend(other, Q, K, V), attention(other) @ V)
    assert traced == [1.0]
    found = attend(M, *map(torch.from_numpy, (Q, K, V)))
    assert type(found) is torch.Tensor
    close(found.numpy(), attention(M) @ V)
    attend(M, Q, K, V, scale=2.0)
    assert traced == [1.0, 1.0, 2.0]


@pytest.mark.slow
def test_constant_parts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(run, "compute", lambda *nodes: seen.append(nodes) or compute(*nodes))

    @fused
    def layer(A: Any, X: Any) -> Any:
        weight = (lazy(W) @ np.ones((5, 2), "float32")).relu()
        return A @ (X @ weight)

    for _ in range(2):
        close(layer(M, X), M.toarray() @ (X @ np.maximum(W @ np.ones((5, 2)), 0)))
    assert len(seen) == 1


def test_one_module_and_the_cheaper_order() -> None:
    graph = relu((lazy(M) @ np.ones((30, 900), "float32")) @ np.ones((900, 5), "float32") + B)
    leaves = [node for node in run.nodes([graph]) if node.op in ("dense", "sparse")]
    text = run.CompiledGraph([graph], leaves).mod.script()
    text = text.partition("R.dataflow")[2]
    assert text.index("R.matmul") < text.index("R.sparse.spmm") < text.index("R.add") < text.index("R.nn.relu")


def test_graphs_are_compiled_once_and_hold_no_arrays() -> None:
    run._known.clear()
    for _ in range(2):
        compute(lazy(M) @ X)
    (compiled,) = run._known.values()
    assert all(node.value is None for node in run.nodes(compiled.outputs))
    other = sp.random_array((40, 30), density=0.21, format="csr", dtype="float32", rng=RNG)
    close(compute(lazy(other) @ X), other.toarray() @ X)
    assert len(run._known) == 1


@pytest.mark.parametrize("matrix", [sp.csr_array((0, 30), dtype="float32"), sp.csr_array((40, 30), dtype="float32"),
                                    M.tocoo(), M[::-1].tocsc()])  # fmt: skip
def test_other_matrices(matrix: Any) -> None:
    close(compute(relu(lazy(matrix) @ X)), np.maximum(matrix.toarray() @ X, 0))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32", "int16", ">i4"])
def test_indices_of_any_type(dtype: str) -> None:
    """For some, scipy cannot tell whether they are sorted."""
    A = M.copy()
    A.indptr, A.indices = A.indptr.astype(dtype), A.indices.astype(dtype)
    close(compute(lazy(A) @ X + 1.0), M @ X + 1)


def test_dtypes() -> None:
    found = compute(lazy(M) @ X.astype("float64"))
    assert found.dtype == np.float64
    close(found, M.toarray() @ X)


@pytest.mark.slow
def test_tuned(tmp_path: Any) -> None:
    found = compute(relu(lazy(M) @ X), tune=1.0, database=tmp_path / "t.jsonl")
    close(found, np.maximum(M.toarray() @ X, 0))
    assert (tmp_path / "t.jsonl").read_text()
    close(compute(relu(lazy(M) @ X), database=tmp_path / "t.jsonl"), found)


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda A: A + 1, ArgumentError, "add of a sparse and a dense array has a dense result"),
        (lambda A: A.exp(), ArgumentError, "exp of a sparse array is not zero where nothing is stored"),
        (lambda A: compute(A @ A.T), ArgumentError, "has a pattern to compute: call sparsetir.matmul first"),
        (lambda A: A @ np.ones(4, "float32"), ArgumentError, r"the shapes \(40, 30\) and \(4,\) do not fit @"),
        (lambda A: (A @ A.T) * 2, ArgumentError, "has a pattern to compute: call sparsetir.matmul first"),
        (lambda A: A + lazy(M.copy()), ArgumentError, "takes two with the structure of one"),
        (lambda A: A / A, ArgumentError, "divides by the zeros"),
        (lambda A: A.sum(), ArgumentError, "sum of a lazy sparse array"),
        (lambda A: compute(A.T), ArgumentError, "stands in products only"),
        (lambda A: A.T * 2, ArgumentError, "stands in products only"),
        (lambda A: lazy(X).sum(axis=3), ArgumentError, "axis 3 of an array of 2 dimensions"),
        (lambda A: lazy(X).sum(axis=1.5), ArgumentTypeError, "axis: expected an integer, a tuple of them or None"),
        (lambda A: lazy(X).max(axis=(0, -2)), ArgumentError, "axis: expected distinct dimensions"),
        (lambda A: lazy(X)[:2], ArgumentTypeError, "has no elements to select or compare yet"),
        (lambda A: lazy(X) > 0, ArgumentTypeError, "has no elements to select or compare yet"),
        (lambda A: np.sin(lazy(X)), ArgumentTypeError, "numpy.sin: lazy arrays have relu, tanh"),
        (lambda A: np.asarray(A), ArgumentTypeError, "pass it to sparsetir.compute"),
        (lambda A: bool(A), ArgumentTypeError, "no condition can depend on it"),
        (lambda A: lazy(np.ones(3, "int32")), ArgumentTypeError, "lazy arrays are of float16"),
        (lambda A: compute(X), ArgumentTypeError, "compute takes lazy arrays, got ndarray"),
        (lambda A: fused(lambda x: 3)(X), ArgumentTypeError, "a fused function returns lazy arrays, got int"),
        (lambda A: lazy(sparsetir.CooTensor.from_dense(np.ones((2, 2, 2)))), ArgumentError, "got 3 dimensions"),
    ],
)
def test_refusals(action: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        action(lazy(M))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_at_the_edge(dtype: str) -> None:
    """NaN and infinities pass through as in numpy, and 16 bits are summed in 32."""
    inf, nan = float("inf"), float("nan")
    Y = np.array([[1, 2, 3], [-inf, 0, -0.0], [-inf, -inf, -inf], [nan, -1, 1], [1e-3, -1e-4, 1e4]], dtype)
    L, ones = sparsetir.lazy(Y), np.ones((1, 5000), dtype)
    rest = sparsetir.lazy(sp.csr_array(np.eye(5, dtype=dtype)[:, [1, 0, 2, 3, 4]])) @ Y if dtype != "float16" else L
    clipped, limited, top, column, row, small, many, mean, divided = sparsetir.compute(
        sparsetir.relu(L), sparsetir.relu(rest), L.max(), L.max(0), L.max(1), L.tanh(), sparsetir.lazy(ones).sum(),
        sparsetir.lazy(np.full((30, 30), 1000, dtype)).mean(), L / -0.0,
    )  # fmt: skip
    np.testing.assert_array_equal(clipped, np.maximum(Y, 0))
    assert np.isnan(limited).sum() >= np.isnan(Y).sum()
    for found, axis in ((top, None), (column, 0), (row, 1)):
        np.testing.assert_array_equal(found, Y.max(axis=axis))
    rtol = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(small.astype(float), np.tanh(Y.astype(float)), rtol=rtol)
    assert (float(many), float(mean)) == (5000, 1000)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(divided, Y / dtype_of(Y)(-0.0))
        np.testing.assert_array_equal(sparsetir.compute(L / 0.0), Y / dtype_of(Y)(0.0))
    np.testing.assert_array_equal(sparsetir.compute(1 / sparsetir.lazy(np.full(2, 4, dtype))), [0.25, 0.25])


def dtype_of(array: np.ndarray) -> Any:
    return array.dtype.type


@pytest.mark.slow
def test_reductions_of_nothing() -> None:
    nothing = sparsetir.lazy(np.ones((0, 3)))
    assert np.isnan(sparsetir.compute(nothing.mean(0))).all()
    assert sparsetir.compute(nothing.sum(0)).tolist() == [0, 0, 0]
    with pytest.raises(ArgumentError, match="max of an empty tensor is undefined"):
        nothing.max(0)
    with pytest.raises(ArgumentTypeError, match="k of a fused function is part of its kind, got list"):
        sparsetir.fused(lambda A, k=None: A)(np.ones(2), k=[1])


@pytest.mark.slow
@pytest.mark.parametrize("m", [0, 1, 2])
def test_products_without_elements(m: int) -> None:
    """TVM takes a size of zero in a reshape for "as in the argument"."""
    lazies, expected = [], []
    for n, k in itertools.product((0, 1, 2), repeat=2):
        D, S = np.arange(n * m, dtype="float32").reshape(n, m), sp.csr_array(np.full((n, k), 2, "float32"))
        V = np.ones(n, "float32")
        lazies += [lazy(D).T @ lazy(S), lazy(S).T @ lazy(D), (lazy(S).T @ lazy(D)).T, lazy(S).T @ V, lazy(D).T @ V]
        expected += [D.T @ S, S.T @ D, (S.T @ D).T, S.T @ V, D.T @ V]
    for found, want in zip(compute(*lazies), expected, strict=True):
        close(found, want)


def test_calls_from_threads() -> None:
    """A compiled graph that several threads call at once has the registers of one call for each of them."""
    A = sp.random_array((300, 200), density=0.1, format="csr", rng=np.random.default_rng(0))
    X = np.random.default_rng(1).random((200, 8))
    step = fused(lambda S, D: (S @ D) * 2 + 1)
    step(A, X)
    with ThreadPoolExecutor(8) as pool:
        for n, found in enumerate(pool.map(lambda n: step(A * n, X), range(200))):
            np.testing.assert_allclose(found, 2 * n * (A @ X) + 1)


@pytest.mark.parametrize("how", ["compute", "fused"])
@pytest.mark.parametrize("fault", ["index", "short", "indptr"])
def test_damaged_matrices_end_in_own_errors(fault: str, how: str) -> None:
    A = sp.random_array((50, 40), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
    B = np.ones((40, 8), "float32")
    if fault == "index":
        A.indices[3] = 10**8
    elif fault == "short":
        A.data = A.data[:-5]
    else:
        A.indptr[5] = 10**8
    product = sparsetir.fused(lambda A, B: A @ B) if how == "fused" else lambda A, B: sparsetir.compute(lazy(A) @ B)
    with pytest.raises(StructureError):
        product(A, B)


def test_what_is_not_callable_is_not_fused() -> None:
    with pytest.raises(ArgumentTypeError, match="function: expected a function of arrays, got 3"):
        sparsetir.fused(3)


SIGNED: dict[str, Any] = {
    "x + 0": lambda x: x + 0,
    "0 + x": lambda x: 0 + x,
    "x - 0": lambda x: x - 0,
    "x + -0": lambda x: x + -0.0,
    "x - -0": lambda x: x - -0.0,
    "0 - x": lambda x: 0 - x,
    "-0 - x": lambda x: -0.0 - x,
    "1 / (x + 0)": lambda x: 1 / (x + 0),
}


@pytest.mark.parametrize("name", SIGNED)
def test_zeros_keep_the_signs_that_numpy_gives_them(name: str) -> None:
    numbers = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1], "float32")
    with np.errstate(divide="ignore"):
        wanted = SIGNED[name](numbers)
    result = sparsetir.compute(SIGNED[name](sparsetir.lazy(numbers)))
    np.testing.assert_array_equal(result, wanted)
    assert np.signbit(result[wanted == 0]).tolist() == np.signbit(wanted[wanted == 0]).tolist()


def test_divisions_by_a_product_of_nothing() -> None:
    """TVM folds a division by a constant zero that is inlined, and ends the process."""
    nothing = sparsetir.lazy(np.zeros((4, 0), "float32")) @ sparsetir.lazy(np.zeros(0, "float32"))
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(sparsetir.compute(3.0 / nothing), np.full(4, np.inf, "float32"))


def test_products_sampled_by_infinities_are_multiplied_after_they_are_summed() -> None:
    S, X = sp.csr_array(np.array([[0, np.inf], [1.0, 0]])), np.array([[1.0, 2], [3, -2.0]])
    L, D = lazy(S), lazy(X)
    np.testing.assert_array_equal(compute(L * (D @ D.T)).toarray(), [[0, -np.inf], [-1, 0]])
    np.testing.assert_array_equal(compute(L * (D @ D)).toarray(), [[0, -np.inf], [-3, 0]])


@pytest.mark.parametrize(
    ("record", "compute_by_numpy"),
    [
        (lambda A, Y: A @ A.T @ Y, lambda D, Y: D @ D.T @ Y),
        (lambda A, Y: Y.T @ (A @ A.T), lambda D, Y: Y.T @ D @ D.T),
        (lambda A, Y: (A @ (A.T @ A)).T @ Y, lambda D, Y: D.T @ D @ D.T @ Y),
        (lambda A, Y: np.exp(lazy(Y)) + np.abs(lazy(-Y)), lambda D, Y: np.exp(Y) + np.abs(Y)),
        (lambda A, Y: np.add(Y, lazy(Y)) / (1 + lazy(Y)), lambda D, Y: 2 * Y / (1 + Y)),
        (lambda A, Y: lazy(Y).min(axis=0), lambda D, Y: Y.min(axis=0)),
        (lambda A, Y: lazy(Y).mean(axis=(1, 0)), lambda D, Y: Y.mean()),
        (lambda A, Y: (lazy(A.value) + relu(lazy(A.value))) @ Y.T[0, : A.shape[1]], lambda D, Y: None),
    ],
)
def test_chains_and_functions_of_numpy(record: Any, compute_by_numpy: Any) -> None:
    Y = np.random.default_rng(0).random((M.shape[0], 3)).astype(M.dtype)
    dense = M.toarray()
    expected = compute_by_numpy(dense, Y)
    if expected is None:
        expected = (dense + np.maximum(dense, 0)) @ Y.T[0, : M.shape[1]]
    close(compute(record(lazy(M), Y)), expected)
