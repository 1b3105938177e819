# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors where other libraries expect matrices: operators, conversions, and errors that name a conversion."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as linalg
from scipy.sparse import csgraph

import sparsetir
import torch
from sparsetir import SparseTensor
from sparsetir.errors import ArgumentTypeError
from sparsetir.scipy import accelerate

FORMATS = ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")


def sample(shape: tuple[int, int], seed: int, density: float = 0.4, dtype: str = "float64") -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape).astype(dtype)
    if values.dtype.kind == "c":
        values += 1j * rng.integers(-3, 4, shape)
    return np.where(rng.random(shape) < density, values, 0).astype(dtype)


def dense(value: Any) -> np.ndarray:
    value = value.to_dense() if hasattr(value, "to_dense") else value
    return value.toarray() if sp.issparse(value) else np.asarray(value)


KINDS = [(f"{f}_{kind}", (4, 4)) for f in FORMATS for kind in ("array", "matrix")]


@pytest.mark.parametrize(("kind", "shape"), [*KINDS, ("csr_array", (0, 0)), ("coo_matrix", (1, 1))])
def test_operators_after_a_matrix_of_scipy(kind: str, shape: tuple[int, int]) -> None:
    left, right = sample(shape, 0), sample(shape, 1)
    M, S = getattr(sp, kind)(left), SparseTensor.from_dense(right)
    product = operator.matmul if kind.endswith("matrix") else operator.mul  # what ``*`` means in each
    for found, expected in [
        (M @ S, left @ right),
        (M + S, left + right),
        (M - S, left - right),
        (M * S, product(left, right)),
        (M < S, left < right),
        (M > S, left > right),
        (M != S, left != right),
        (S @ M, right @ left),
        (S - M, right - left),
        (S * M, right * left),
        (S > M, right > left),
    ]:
        assert type(found) is SparseTensor
        np.testing.assert_array_equal(dense(found), expected)
    with pytest.raises(ArgumentTypeError, match="divides by the zeros"):
        M / S
    with pytest.raises(ArgumentTypeError, match=r"to_scipy\(copy=False\)"):
        M.multiply(S)  # which returns no answer to the other operand
    assert dense(S.multiply(M)).tolist() == (left * right).tolist()


@pytest.mark.parametrize("kind", ["csr_array", "csr_matrix", "csc_array", "csc_matrix"])
def test_operators_under_accelerate(kind: str) -> None:
    left, right = sample((4, 4), 0), sample((4, 4), 1)
    M, S = getattr(sp, kind)(left), SparseTensor.from_dense(right)
    product = operator.matmul if kind.endswith("matrix") else operator.mul
    with accelerate(min_entries=1):
        results = M @ S, M * S, M + S, M - S, M < S
        with pytest.raises(ArgumentTypeError, match=r"to_scipy\(copy=False\)"):
            M.multiply(S)
    expected = left @ right, product(left, right), left + right, left - right, left < right
    for found, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(dense(found), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_conversions_by_the_names_of_scipy(name: str) -> None:
    A = sample((5, 3), 2)
    S = SparseTensor.from_dense(A)
    for made in (getattr(S, f"to{name}")(), S.asformat(name)):
        assert made.format == name
        assert isinstance(made, sp.sparray)
        np.testing.assert_array_equal(made.toarray(), A)
    shared, copied = S.tocsr(), S.tocsr(copy=True)
    assert np.shares_memory(shared.data, S.values)
    assert not np.shares_memory(copied.data, S.values)
    assert S.size == A.size


def test_methods_by_the_names_of_scipy() -> None:
    A, B = sample((4, 4), 3, dtype="complex128"), sample((4, 4), 4, dtype="complex128")
    S, R = SparseTensor.from_dense(A), SparseTensor.from_dense(B)
    for found, expected in [
        (S.dot(R), A @ B),
        (S.dot(2), A * 2),
        (S.multiply(R), A * B),
        (S.conj(), A.conj()),
        (S.matvec(B[0]), A @ B[0]),
        (S.rmatvec(B[0]), A.conj().T @ B[0]),
        (S.rmatmat(B), A.conj().T @ B),
    ]:
        np.testing.assert_array_equal(dense(found), expected)
    real, other = SparseTensor.from_dense(A.real.copy()), SparseTensor.from_dense(B.real.copy())
    np.testing.assert_array_equal(dense(real.maximum(other)), np.maximum(A.real, B.real))
    np.testing.assert_array_equal(dense(real.minimum(other)), np.minimum(A.real, B.real))
    np.testing.assert_array_equal(real.rmatvec(B[0].real), A.real.T @ B[0].real)
    assert SparseTensor.from_dense(np.eye(2, dtype=bool)).conj().dtype == bool


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_iterative_solvers_take_a_tensor(dtype: str) -> None:
    n = 12
    A = sample((n, n), 5, dtype=dtype) + 20 * np.eye(n)
    A = A + A.conj().T
    S, b = SparseTensor.from_dense(A), np.arange(1, n + 1).astype(dtype)
    exact = np.linalg.solve(A, b)
    for solved in (
        linalg.cg(S, b, rtol=1e-12)[0],
        linalg.gmres(S, b, rtol=1e-12)[0],
        linalg.lsqr(S, b, atol=1e-12, btol=1e-12)[0],
    ):
        np.testing.assert_allclose(solved, exact, rtol=1e-6)
    largest = linalg.svds(S, 1, return_singular_vectors=False, random_state=0)
    np.testing.assert_allclose(largest, np.linalg.norm(A, 2))


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        sp.csr_array,
        sp.coo_array,
        csgraph.connected_components,
        lambda S: linalg.spsolve(S, np.ones(4)),
        lambda S: np.ones((4, 4)).dot(S),
        lambda S: sp.vstack([sp.csr_array(np.eye(4)), S]),
        torch.tensor,
        torch.as_tensor,
        np.from_dlpack,
    ],
)
def test_libraries_that_take_their_own_classes_get_an_error_that_names_the_conversion(use: Callable[..., Any]) -> None:
    S = SparseTensor.from_dense(sample((4, 4), 6))
    with pytest.raises((TypeError, ValueError)) as raised:
        use(S)
    error: BaseException | None = raised.value
    while error is not None and not isinstance(error, ArgumentTypeError):
        error = error.__cause__
    assert error is not None
    assert "to_dense()" in str(error)
    assert "to_scipy(copy=False)" in str(error) or "to_torch()" in str(error)


def test_networkx_and_pandas_convert_a_tensor() -> None:
    A = abs(sample((4, 4), 7))
    S = SparseTensor.from_dense(A)
    networkx, pandas = pytest.importorskip("networkx"), pytest.importorskip("pandas")
    graph = networkx.from_scipy_sparse_array(S, create_using=networkx.DiGraph)
    np.testing.assert_array_equal(networkx.to_numpy_array(graph), A)
    np.testing.assert_array_equal(pandas.DataFrame.sparse.from_spmatrix(S).to_numpy(), A)


def test_anndata_takes_what_to_scipy_shares() -> None:
    anndata = pytest.importorskip("anndata")
    S = SparseTensor.from_dense(sample((4, 3), 8))
    data = anndata.AnnData(S.to_scipy(copy=False))
    assert np.shares_memory(data.X.data, S.values)
    with pytest.raises(ValueError, match="X needs to be"):
        anndata.AnnData(S)


@pytest.mark.parametrize("complex_one", ["sparse", "dense", "both"])
@pytest.mark.parametrize("of_torch", [True, False])
def test_complex_operands_of_torch(complex_one: str, of_torch: bool) -> None:
    A = sample((4, 3), 9, dtype="float64" if complex_one == "dense" else "complex128")
    B = sample((3, 2), 10, dtype="float64" if complex_one == "sparse" else "complex128")
    S = SparseTensor.from_dense(A)
    sparse, X = S.to_torch() if of_torch else S, torch.from_numpy(B)
    D = torch.from_numpy(sample((4, 3), 11, dtype=B.dtype.name))
    for found, expected in [
        (sparsetir.matmul(sparse, X), A @ B),
        (sparsetir.add(sparse, D), A + D.numpy()),
        (sparsetir.subtract(D, sparse), D.numpy() - A),
        (sparsetir.tensordot(sparse, X, 1), A @ B),
        (sparsetir.tensordot(sparse, D, 2), np.tensordot(A, D.numpy(), 2)),
    ]:
        assert isinstance(found, torch.Tensor)
        assert found.is_complex()
        np.testing.assert_allclose(found.numpy(), expected)
    product = sparsetir.multiply(sparse, D)
    assert isinstance(product, torch.Tensor) == of_torch
    np.testing.assert_allclose(dense(product), A * D.numpy())
    squared = sparsetir.matmul(sparse, sparse.to_dense().T.to_sparse_csr() if of_torch else S.T)
    np.testing.assert_allclose(dense(squared), A @ A.T)


@pytest.mark.parametrize("action", [operator.add, operator.sub, operator.gt, np.maximum, np.minimum])
@pytest.mark.parametrize("first", [True, False])
def test_dense_results_with_a_tensor_of_torch_are_of_torch(action: Any, first: bool) -> None:
    A, B = sample((4, 3), 12), sample((4, 3), 13)
    S, X = SparseTensor.from_dense(A), torch.from_numpy(B)
    found = action(S, X) if first else action(X, S)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), action(A, B) if first else action(B, A))
    X.requires_grad_()
    with pytest.raises(ArgumentTypeError, match="requires grad"):
        action(S, X) if first else action(X, S)


def test_operations_without_gradients_refuse_to_lose_them() -> None:
    A = sample((4, 3), 14)
    wanted = torch.from_numpy(A).to_sparse_csr().requires_grad_()
    plain, X = SparseTensor.from_dense(A), torch.from_numpy(A).requires_grad_()
    for action in (
        lambda: plain + wanted,
        lambda: plain > wanted,
        lambda: plain / X,
        lambda: sparsetir.add(wanted, np.ones(3)),
        lambda: sparsetir.add(plain, X),
        lambda: sparsetir.vstack([plain, wanted]),
        lambda: sparsetir.grouped_matmul(X, [0, 4], torch.ones((1, 3, 2), dtype=torch.float64)),
    ):
        with pytest.raises(ArgumentTypeError, match="requires grad"):
            action()
    with torch.no_grad():
        np.testing.assert_array_equal(dense(sparsetir.add(plain, X)), 2 * A)


@pytest.mark.parametrize("dtypes", [("complex128", "float64"), ("int32", "complex64"), ("complex64", "complex64")])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_tensordot_of_complex_operands(dtypes: tuple[str, str], is_sparse: bool) -> None:
    A, B = sample((3, 4), 15, dtype=dtypes[0]), sample((4, 3), 16, dtype=dtypes[1])
    other = SparseTensor.from_dense(B) if is_sparse else B
    S = SparseTensor.from_dense(A)
    for axes in (1, ([0, 1], [1, 0]), ([1], [0])):
        found, expected = dense(sparsetir.tensordot(S, other, axes)), np.tensordot(A, B, axes)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin", "logsumexp"])
def test_what_needs_an_order_refuses_complex_values(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{name}: expected real numbers, got complex128"):
        getattr(SparseTensor.from_dense(sample((3, 3), 17, dtype="complex128")), name)()
