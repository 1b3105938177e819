# SPDX-License-Identifier: Apache-2.0
"""Operators of sparse tensors against numpy, and scipy's solvers over them."""

from __future__ import annotations

import itertools
import operator
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
import torch
from each import examples, on
from sparsetir import SparseTensor, linear_operator
from sparsetir.einsum import linear_operators
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.formats import REGISTRY, heuristics
from sparsetir.runtime import adaptive
from sparsetir.utils.memory import MemoryLimitError

OTHERS = {"band", "nm", "encoded", "tree"}  # hold some matrices only, or need parameters
FORMATS = sorted(REGISTRY.keys() - OTHERS)


@st.composite
def matrices(draw: Any, shape: tuple[int, int] | None = None) -> np.ndarray:
    m, n = shape or draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return np.where(rng.random((m, n)) < draw(st.sampled_from([0, 0.3, 1])), rng.uniform(-1, 1, (m, n)), 0)


def same(found: Any, expected: Any) -> None:
    found = found.to_dense() if isinstance(found, SparseTensor) else found
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(matrices(), st.sampled_from(FORMATS), st.integers(0, 2**32 - 1))
def test_against_numpy(dense: np.ndarray, format: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    S = SparseTensor.from_dense(dense, format)
    other = np.where(rng.random(dense.shape) < 0.4, rng.uniform(-1, 1, dense.shape), 0)
    R = SparseTensor.from_dense(other, "csc")
    m, n = dense.shape
    X = rng.random((n, 3))
    same(S @ X, dense @ X)
    same(S @ X[:, 0], dense @ X[:, 0])
    same(rng.random((2, m)) @ S * 0, np.zeros((2, n)))
    same(S @ R.T, dense @ other.T)
    same(S + R, dense + other)
    same(S - R, dense - other)
    same(S * R, dense * other)
    same(S + other, dense + other)
    same(other - S, other - dense)
    same(S * other, dense * other)
    same(other * S, dense * other)
    same(-S, -dense)
    same(abs(S), abs(dense))
    same(2 * S, 2 * dense)
    same(S / 4, dense / 4)
    same(S**2, dense**2)
    same(abs(S) ** 0.5, abs(dense) ** 0.5)
    same(S.diagonal(), dense.diagonal())
    same(S.trace(), dense.trace())
    for i, j in np.ndindex(dense.shape):
        assert S[i, j - n] == dense[i, j]
    same(S.T, dense.T)
    same(S > 0.2, dense > 0.2)
    same(S != 0, dense != 0)
    same(S[::-1], dense[::-1])
    for axis in (None, 0, 1, -1):
        same(S.sum(axis=axis), dense.sum(axis=axis))
        if dense.size:
            same(S.mean(axis=axis), dense.mean(axis=axis))
            same(S.max(axis=axis), dense.max(axis=axis))
            same(S.min(axis=axis), dense.min(axis=axis))


@pytest.mark.parametrize("format", FORMATS)
def test_sums_in_every_format(format: str) -> None:
    """Formats list coordinates in orders of their own, and leave some out."""
    A = sp.random_array((30, 25), density=0.2, format="csr", rng=np.random.default_rng(0))
    A.data[A.indptr[3] : A.indptr[5]] = 0
    A.eliminate_zeros()
    S, dense, rng = SparseTensor.from_any(A, format), A.toarray(), np.random.default_rng(1)
    x, y = rng.random(25), rng.random(30)
    for letters, *others in (("ij->i",), ("ij->j",), ("ij,j->i", x), ("ij,i->j", y), ("ij,i,j->", y, x)):
        same(sparsetir.einsum(letters, S, *others), np.einsum(letters, dense, *others))
    same(sparsetir.einsum("ij,i->ij", S, y), dense * y[:, None])
    same(S[[4, 9, 2]], dense[[4, 9, 2]])
    same(S @ np.eye(25, 4), dense[:, :4])
    assert abs(sparsetir.matmul(A, S.T) - A @ A.T).max() < 1e-12


def test_rows() -> None:
    dense = np.arange(12.0).reshape(4, 3) % 5
    S = SparseTensor.from_dense(dense, "csc")
    for index in (0, -1, slice(1, 3), slice(None, None, -2), [2, 0, 2], np.array([True, False, True, False]), []):
        same(S[index], dense[np.asarray(index, np.int64) if isinstance(index, list) else index])
    same(np.stack([row.to_dense() for row in S]), dense)
    vector = SparseTensor.from_dense(dense[1])
    assert vector[2] == dense[1, 2]
    cube = SparseTensor.from_dense(dense.reshape(2, 2, 3))
    same(cube[1], dense.reshape(2, 2, 3)[1])
    same(cube.transpose(2, 0, 1), dense.reshape(2, 2, 3).transpose(2, 0, 1))
    same(cube.max(axis=(0, 2)), dense.reshape(2, 2, 3).max(axis=(0, 2)))
    same(cube + cube, 2 * dense.reshape(2, 2, 3))


PARTS = (1, -1, slice(None), slice(1, None), slice(-1, 0, -2), slice(9, 20), [1, 0, 1], np.array([True, False, True]))


@pytest.mark.parametrize("format", ["csc", "coo"])
def test_parts(format: str) -> None:
    """A list keeps its place among the dimensions, also beside indices."""
    dense = np.arange(27.0).reshape(3, 3, 3) % 4
    flat = SparseTensor.from_dense(dense[0], format)
    for i, j in itertools.product(PARTS, PARTS):
        if sum(isinstance(at, (list, np.ndarray)) for at in (i, j)) < 2:
            same(flat[i, j], dense[0][i, :][..., j] if not isinstance(i, int) else dense[0][i][j])
    cube = SparseTensor.from_dense(dense)
    for i, j in itertools.product(PARTS[:6], PARTS):
        same(cube[i, j, 1:], dense[:, :, 1:][i][..., j, :])
        same(cube[j, ..., i], dense[..., i][j])
    same(cube[..., 2], dense[..., 2])
    same(cube[:, 1, [0, 2]], dense[:, 1][:, [0, 2]])


def test_classes_formats_and_dtypes() -> None:
    S = SparseTensor.from_dense(np.eye(4, dtype="int32") * 3, "bsr", r=2, c=2)
    assert (2 * S).format == S.format
    assert S.astype("float32").dtype == np.float32
    assert S.sum().dtype == np.int64
    for short in ("int8", "int16", "uint8", "uint16", "int32", "uint32", "uint64"):
        few, dense = S.astype(short), (np.eye(4) * 3).astype(short)
        assert few.sum().dtype == dense.sum().dtype, short
        assert few.sum() == dense.sum(), short
    assert S.mean() == 0.75
    assert type(S @ torch.ones(4, dtype=torch.int32)) is torch.Tensor
    assert type(S @ sp.eye_array(4, format="csr")) is SparseTensor
    assert (S > 1).dtype == np.bool_
    copied = S.copy()
    copied.pieces[0].values[:] = 0
    assert S.sum() == 12
    again = pickle.loads(pickle.dumps(S))
    same(again @ np.ones(4), 3 * np.ones(4))
    assert S in [S]
    assert hash(S) == hash(S)
    assert SparseTensor.from_dense(np.array([[np.nan, 1.0]])).max() != 1.0


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda S: np.asarray(S), ArgumentTypeError, r"call to_dense\(\) where that is meant"),
        (lambda S: S + 1, ArgumentError, "adding 1 changes every element"),
        (lambda S: S >= 0, ArgumentError, "S >= 0 is true of every element that is not stored"),
        (lambda S: S == 0, ArgumentError, "S == 0 is true of every element"),
        (lambda S: S @ np.ones(4), ArgumentError, r"the shapes \(3, 2\) and \(4,\) do not fit @"),
        (lambda S: S + S.T, ArgumentError, r"the shapes \(3, 2\) and \(2, 3\) do not fit"),
        (lambda S: S[7], ArgumentError, "row 7 of a tensor of 3 rows"),
        (lambda S: S[0, 5:, 1], ArgumentError, "3 indices of a tensor of 2 dimensions"),
        (lambda S: S[:, 2], ArgumentError, "index 2 of dimension 1, which has 2"),
        (lambda S: S[[0], [1]], ArgumentTypeError, "sliced by one list at a time: slice the result again"),
        (lambda S: S[0, 2], ArgumentError, r"element \(0, 2\) of a tensor of shape \(3, 2\)"),
        (lambda S: S == S.copy(), ArgumentError, "S == R is true of every element that is not stored"),
        (lambda S: S < S.T, ArgumentError, r"the shapes \(3, 2\) and \(2, 3\) do not fit"),
        (lambda S: S**0, ArgumentError, r"would not stay zero under \*\* 0"),
        (lambda S: S**S, TypeError, "unsupported operand"),
        (lambda S: S[0].diagonal(), ArgumentError, "the diagonal is that of a matrix, got 1 dimensions"),
        (lambda S: S[[5]], ArgumentError, r"row indices must lie in \[-3, 3\)"),
        (lambda S: S[[True, False]], ArgumentError, "chooses among 3 rows, got 2"),
        (lambda S: S / S, ArgumentTypeError, "divides by the zeros"),
        (lambda S: S.sum(axis=2), ArgumentError, "axis 2 of a tensor of 2 dimensions"),
        (lambda S: S.transpose(0, 0), ArgumentError, "names each of 2 dimensions once"),
        (lambda S: S[:0].max(), ArgumentError, "max of an empty tensor is undefined"),
        (lambda S: S + "x", TypeError, "unsupported operand"),
        (lambda S: S @ 2, TypeError, "unsupported operand"),
        (lambda S: np.exp(S), ArgumentError, r"numpy.exp\(0\) is 1.0"),
        (
            lambda S: np.abs(S, out=np.ones((3, 2))),
            ArgumentTypeError,
            "expected no options for a sparse tensor, got out=",
        ),
        (lambda S: np.add.reduce(S), ArgumentTypeError, "numpy.add.reduce of a sparse tensor is not defined"),
        (lambda S: np.divmod(S, S), ArgumentTypeError, "numpy.divmod has no form"),
        (lambda S: np.flip(S, 0), ArgumentTypeError, "numpy.flip has no form"),
        (lambda S: np.sum(S, dtype="float32"), ArgumentTypeError, "got dtype="),
        (lambda S: np.multiply(S, "x"), ArgumentTypeError, "expected arrays, sparse tensors or numbers"),
        (lambda S: sp.csr_array(np.eye(3)).multiply(S), ArgumentTypeError, r"call to_dense\(\)"),
        (lambda S: linear_operator(S.to_dense()), ArgumentTypeError, "takes a sparse matrix, got ndarray"),
        (lambda S: linear_operator(S[0]), ArgumentError, "takes a matrix, got 1 dimensions"),
    ],
)
def test_refusals(action: Any, error: type[Exception], message: str) -> None:
    S = SparseTensor.from_dense(np.array([[0, 1.0], [2.0, 0], [0, 3.0]]))
    with pytest.raises(error, match=message):
        action(S)


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "bsr", "ell"])
@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "complex64", "float16"])
@pytest.mark.parametrize("shape", [(7, 9), (0, 5), (5, 0), (1, 1)])
def test_selections_and_joins(format: str, dtype: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    D, (m, n) = (9 * rng.random(shape) * (rng.random(shape) < 0.5)).astype(dtype), shape
    T = SparseTensor.from_dense(D, format, **({"r": 1, "c": 1} if format == "bsr" else {}))
    slices = [slice(None), slice(1, 4), slice(None, None, -1), slice(4, 0, -2), slice(10, 20)]
    lists = lambda k: [np.arange(k)[::-1], np.arange(k) % 2 == 0, rng.integers(-k, max(k, 1), 5 if k else 0)]  # noqa: E731
    ends = [0, -1] if n else []
    asked = [*itertools.product(slices, [*slices, *lists(n), *ends]), *itertools.product(lists(m), [*slices, *ends])]
    for rows, columns in asked:
        with on((rows, columns)):
            found, expected = T[rows, columns], D[rows][:, columns]
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(found.to_dense(), expected)
            np.testing.assert_array_equal((found * 1).to_dense(), expected * 1)  # its entries are in order
            if found.ndim == 2:
                np.testing.assert_array_equal((found.convert("coo") * 1).to_dense(), expected * 1)
    for found, expected in (
        (np.stack(T.nonzero()), np.stack(D.nonzero())),
        (T.T.to_dense(), D.T),
        (T.diagonal(), D.diagonal()),
        (sparsetir.vstack([T, T]).to_dense(), np.vstack([D, D])),
        (sparsetir.hstack([T, T]).to_dense(), np.hstack([D, D])),
    ):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    if D.size and dtype != "complex64":
        for name, axis in itertools.product(("max", "min"), (None, 0, 1, -1)):
            found, expected = getattr(T, name)(axis=axis), getattr(D, name)(axis=axis)
            np.testing.assert_array_equal(found, expected)
            assert np.asarray(found).dtype == expected.dtype


@pytest.mark.parametrize("dtype", ["float64", "complex128", "bool"])
def test_results_share_no_values_with_the_tensor(dtype: str) -> None:
    A = sp.csr_array(np.eye(4).astype(dtype))
    S = SparseTensor.from_any(A)
    for made in (S[:], S[:, :], S[...], S[0:3], S[:, 0:3], S.conj(), S.copy(), abs(S), S.T, S[[1, 2]]):
        made.compressed.data[...] = 0
        if made.values.flags.writeable:
            made.values[...] = 0
        np.testing.assert_array_equal(A.toarray(), np.eye(4))


def test_matrices_that_are_not_in_order_stay_as_they_are() -> None:
    A = sp.csr_array((np.arange(1.0, 7), [2, 0, 1, 1, 2, 0], [0, 2, 4, 6]), shape=(3, 3))
    expected, S = A.toarray(), SparseTensor.from_any(A, check=False)
    for use in (lambda: S.max(axis=1), lambda: S[:2], lambda: S[:, [0]], lambda: S.nonzero(), S.diagonal, S.to_dense):
        use()
    assert A.nnz == 6
    np.testing.assert_array_equal(A.toarray(), expected)
    rows, columns = S.nonzero()
    assert (np.diff(rows * 3 + columns) >= 0).all()


NO_OPERANDS = [None, "x", b"x", object(), {}, np.array("x"), np.str_("x"), np.datetime64("2020-01-01")]
METHODS = ["dot", "multiply", "maximum", "minimum", "matvec", "rmatvec", "rmatmat"]
FUNCTIONS = [sparsetir.matmul, sparsetir.multiply, sparsetir.add, sparsetir.subtract, sparsetir.maximum]


@pytest.mark.parametrize("operand", NO_OPERANDS, ids=lambda v: type(v).__name__)
def test_what_is_no_operand_is_refused(operand: Any) -> None:
    S = SparseTensor.from_dense(np.eye(3))
    calls = [partial(getattr(S, name), operand) for name in METHODS]
    calls += [partial(function, *pair) for function in FUNCTIONS for pair in ((S, operand), (operand, S))]
    for call in calls:
        with on(call), pytest.raises((ArgumentTypeError, TypeError), match=r"expected|support|operand|got"):
            assert call() is not NotImplemented


@pytest.mark.parametrize("number", [3, 2.5, 1j, True, np.float32(2), np.array(2.0)], ids=repr)
def test_matmul_takes_no_number(number: Any) -> None:
    for A in (sp.csr_array(np.eye(3)), SparseTensor.from_dense(np.eye(3))):
        for pair in ((A, number), (number, A)):
            with pytest.raises(ArgumentTypeError, match=r"got a number\. Multiply by it with sparsetir.multiply"):
                sparsetir.matmul(*pair)


def test_functions_of_numpy() -> None:
    rng = np.random.default_rng(0)
    D = np.where(rng.random((6, 5)) < 0.5, rng.standard_normal((6, 5)), 0)
    S, B, A = SparseTensor.from_dense(D), rng.random((5, 3)), sp.csr_array(D)
    for function in (np.sum, np.mean, np.max, np.amin, np.var, np.std):
        np.testing.assert_allclose(function(S), function(D))
        np.testing.assert_allclose(function(S, axis=0, keepdims=True), function(D, axis=0, keepdims=True))
    np.testing.assert_array_equal(np.argmax(S, axis=1), np.argmax(D, axis=1))
    np.testing.assert_allclose(np.var(S, axis=0, ddof=1), np.var(D, axis=0, ddof=1))
    for ufunc in (np.abs, np.negative, np.sin, np.square, np.sign, np.expm1, np.isnan, np.tanh):
        mapped = ufunc(S)
        assert type(mapped) is SparseTensor
        np.testing.assert_array_equal(mapped.to_dense(), ufunc(D))
        assert mapped.dtype == ufunc(D).dtype
    for product in (np.dot(S, B), np.matmul(S, B), np.tensordot(S, B, 1), np.einsum("ij,jk->ik", S, B)):
        np.testing.assert_allclose(product, D @ B)
    np.testing.assert_allclose(np.dot(B.T, np.transpose(S)), B.T @ D.T)
    np.testing.assert_allclose(np.dot(2, S).to_dense(), 2 * D)
    for sparse in (A * S, S * A, A.multiply(S.to_scipy()), np.multiply(S, S), np.square(S)):
        np.testing.assert_allclose(sparse.toarray() if sp.issparse(sparse) else sparse.to_dense(), D * D)
    np.testing.assert_array_equal(np.less(0, S).to_dense(), D > 0)
    np.testing.assert_array_equal(np.less(S, 0).to_dense(), D < 0)
    assert (np.shape(S), np.ndim(S), np.size(S), np.count_nonzero(S)) == (D.shape, 2, 30, np.count_nonzero(D))


def test_html() -> None:
    S = SparseTensor.from_dense(np.eye(3))
    html = S._repr_html_()
    assert html.count("<rect x=") == 3
    assert "3 x 3" in html
    large = SparseTensor.from_coo(np.arange(1000)[None].repeat(2, 0), np.ones(1000), (1000, 1000))
    assert large._repr_html_().count("<rect x=") == 64
    assert "<rect x=" not in SparseTensor.from_dense(np.zeros((0, 3)))._repr_html_()
    assert SparseTensor.from_dense(np.ones(4))._repr_html_().count("<rect x=") == 4


# ------------------------------------------------------------------ solvers


@pytest.mark.slow
def test_solvers() -> None:
    n, rng = 60, np.random.default_rng(0)
    A = sp.diags_array([-np.ones(n - 1), 2.1 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1]).tocsr()
    L = linear_operator(A)
    x, info = linalg.cg(L, np.ones(n), rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(A @ x, 1, atol=1e-6)
    largest = linalg.eigsh(A, 3, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(linalg.eigsh(L, 3, return_eigenvectors=False)), np.sort(largest))
    found = linalg.lobpcg(L, rng.random((n, 3)), tol=1e-8, maxiter=400, largest=True)[0]
    np.testing.assert_allclose(found.max(), largest.max(), rtol=1e-6)
    B = sp.random_array((50, 30), density=0.2, rng=rng).tocsr()
    expected = linalg.svds(B, 3, return_singular_vectors=False)
    np.testing.assert_allclose(
        np.sort(linalg.svds(linear_operator(B), 3, return_singular_vectors=False)), np.sort(expected)
    )


def test_products_of_operators() -> None:
    B = sp.random_array((5, 4), density=0.5, rng=np.random.default_rng(0), dtype="float32").tocsc()
    L, X = linear_operator(B), np.arange(8.0).reshape(4, 2)
    assert L.dtype == np.float32
    np.testing.assert_allclose(L @ X, B @ X, rtol=1e-6)
    np.testing.assert_allclose(L.H @ np.ones((5, 3)), B.T @ np.ones((5, 3)), rtol=1e-6)
    np.testing.assert_allclose(L.rmatvec(np.ones(5)), B.T @ np.ones(5), rtol=1e-6)
    np.testing.assert_allclose(L @ (1j * X[:, 0]), 1j * (B @ X[:, 0]), rtol=1e-6)
    assert linear_operator(sp.eye_array(3, dtype="int32", format="coo")).dtype == np.float64
    np.testing.assert_array_equal(linear_operator(sparsetir.SparseTensor.from_dense(np.eye(3), "csc")) @ np.ones(3), 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dia", "bsr", "tensor"])
def test_products_of_operators_are_those_of_scipy(form: str, dtype: str) -> None:
    """Multiply vectors and matrices of every dtype by the matrix, its transpose and its adjoint; compare dtypes too."""
    rng = np.random.default_rng(0)
    A = sp.random_array((7, 5), density=0.4, rng=rng, dtype=dtype).tocsr()
    A.data[...] = rng.standard_normal(A.nnz) + (1j * rng.standard_normal(A.nnz) if A.dtype.kind == "c" else 0)
    L = linear_operator(SparseTensor.from_any(A) if form == "tensor" else A.asformat(form))
    expected = linalg.aslinearoperator(A)
    for other in ("float32", "float64", "complex64", "complex128", "int32", "bool"):
        X, Y = (rng.standard_normal((n, 3)).astype(other) for n in (5, 7))
        X.flags.writeable = False
        pairs = [
            (L @ X, expected @ X),
            (L @ X[::-1, 1], expected @ X[::-1, 1]),
            (L.H @ Y, expected.H @ Y),
            (L.T @ Y[:, 0], expected.T @ Y[:, 0]),
            (L.rmatvec(Y[:, :1]), expected.rmatvec(Y[:, :1])),
            (L @ X[:, :0], expected @ X[:, :0]),
        ]
        for y, z in pairs:
            assert (y.dtype, y.shape) == (z.dtype, z.shape)
            np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "dia", "bsr", "tensor"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool"])
def test_real_matrices_times_complex_arrays(dtype: str, format: str) -> None:
    rng = np.random.default_rng(2)
    dense = np.where(rng.random((6, 5)) < 0.5, rng.integers(1, 60, (6, 5)), 0).astype(dtype)
    A = SparseTensor.from_dense(dense) if format == "tensor" else sp.csr_array(dense).asformat(format)
    for number in (np.complex64, np.complex128):
        x = (rng.random(5) + 1j * rng.random(5)).astype(number)
        X = (rng.random((10, 6)) + 1j * rng.random((10, 6))).astype(number)
        for operand in (x, x[:, None], X[::2], X[::2, ::2], np.asfortranarray(X[:5]), X[:5, :0], X[:5].astype(">c16")):
            expected = dense @ operand
            for actual in (sparsetir.matmul(A, operand), SparseTensor.from_any(A) @ operand):
                assert actual.dtype == np.result_type(expected.dtype, np.complex64).newbyteorder("=")
                assert actual.shape == expected.shape
                np.testing.assert_allclose(actual, expected, rtol=1e-4)
        with pytest.raises(ArgumentError):
            sparsetir.matmul(A, x[:3])
        with pytest.raises(ArgumentTypeError, match="got a number"):
            sparsetir.matmul(A, np.array(number(2)))
        row = SparseTensor.from_any(SparseTensor.from_dense(dense)[1])
        for actual in (row @ x, x @ row):
            assert isinstance(actual, np.complexfloating)
            np.testing.assert_allclose(actual, dense[1] @ x, rtol=1e-4)
    if format != "tensor":
        twice = sp.coo_array((np.full(2, 100, np.int8), ([0, 0], [1, 1])), shape=(2, 2)).tocsr(copy=False)
        np.testing.assert_array_equal(sparsetir.matmul(twice, np.ones(2) * 1j), [np.int8(-56) * 1j, 0])


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "dcsr"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16"])
def test_comparisons_with_numbers_leave_out_what_is_false(dtype: str, format: str) -> None:
    number = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    dense = np.array([[0, 1, 0, 2], [0, 0, 0, 0], [1, 0, 3, 0]]).astype(number)
    S = SparseTensor.from_dense(dense, format)
    for _ in range(2):
        compared = S > 1
        np.testing.assert_array_equal(compared.to_dense(), dense > 1)
        assert (compared.nnz, compared.dtype) == ((dense > 1).sum(), np.bool_)
        np.testing.assert_array_equal((S != 0).to_dense(), dense != 0)
        np.testing.assert_array_equal(S.to_dense(), dense)  # which shares nothing with the result


def test_complex_solves() -> None:
    n, rng = 40, np.random.default_rng(0)
    A = sp.random_array((n, n), density=0.1, rng=rng).tocsr() * (1 + 2j) + (6 - 1j) * sp.eye_array(n)
    b = rng.standard_normal(n) + 1j
    L = linear_operator(A)
    for x in (
        linalg.gmres(L, b, rtol=1e-10)[0],
        linalg.bicg(L, b, rtol=1e-10)[0],
        linalg.lsqr(L, b, atol=1e-12, btol=1e-12)[0],
    ):
        np.testing.assert_allclose(A @ x, b, atol=1e-6)


def test_an_operator_is_made_without_converting() -> None:
    """A short solve pays for no conversion; a matrix of scipy that was changed to another one leaves the operator."""
    A = sp.csr_array(np.eye(4, dtype="float32") * 3)
    L = linear_operator(A)
    np.testing.assert_array_equal(L @ np.ones(4, "float32"), 3)
    assert "tensor" not in vars(L)
    A.indices = A.indices[:2]
    np.testing.assert_array_equal(L @ np.ones(4, "float32"), 3)
    for index in (-1, 4, 2**31 - 1):
        broken = sp.csr_array(np.eye(4))
        broken.indices[2] = index
        with pytest.raises(StructureError):
            linear_operator(broken)


def stencil(n: int, dtype: str) -> sp.csr_array:
    T = sp.diags_array([-np.ones(n - 1), 4 * np.ones(n), -2 * np.ones(n - 1)], offsets=[-1, 0, 1])
    sides = sp.diags_array([-np.ones(n - 1), -3 * np.ones(n - 1)], offsets=[-1, 1])
    return sp.csr_array(sp.kron(sp.eye_array(n), T) + sp.kron(sides, sp.eye_array(n)), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "make", [sp.csr_array, sp.csc_array, sp.coo_array, SparseTensor.from_any], ids=lambda f: f.__name__
)
def test_operators_over_another_format(make: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is right before, while and after two formats are compared, and in a copy by pickle."""
    monkeypatch.setattr(linear_operators, "TRIAL_SECONDS", 0)
    for name in ("COMPOSING", "CONVERSION", "SLICING", "GROUPING", "LOOKING", "SAMPLING"):
        monkeypatch.setattr(heuristics, name, 0.0)
    A, rng = stencil(60, dtype), np.random.default_rng(0)
    L = linear_operator(make(A))
    assert A.nnz >= linear_operators.MIN_ENTRIES
    products = {
        "ij,j->i": (L.matvec, A, rng.random(3600, dtype=dtype)),
        "ij,i->j": (L.rmatvec, A.T, rng.random(3600, dtype=dtype)),
        "ij,jk->ik": (L.matmat, A, rng.random((3600, 3), dtype=dtype)),
        "ij,ik->jk": (L.rmatmat, A.T, rng.random((3600, 3), dtype=dtype)),
    }
    for text, (product, matrix, x) in products.items():
        expected = matrix @ x
        for number in range(linear_operators.TRIAL_CALLS + 5 * adaptive.MOST_SAMPLES):
            np.testing.assert_allclose(product(x), expected, rtol=1e-4, atol=1e-5)
            assert product(x).dtype == dtype
            was = L._products[text, np.dtype(dtype)]
            if number == linear_operators.TRIAL_CALLS // 2:
                assert was.converter is not None  # while it works, products are scipy's
                was.converter.join()
                if text == "ij,j->i":
                    assert len(was.trial.candidates) >= 3
        assert was.trial is None
    copied = pickle.loads(pickle.dumps(L))
    assert "_products" not in copied.__dict__
    np.testing.assert_allclose(copied.T @ products["ij,j->i"][2], A.T @ products["ij,j->i"][2], rtol=1e-4, atol=1e-5)


def test_operators_over_blocks_with_zeros_and_vectors_with_infinities() -> None:
    mask = sp.random_array((60, 60), density=0.1, rng=np.random.default_rng(0))
    A = sp.csr_array(sp.kron(mask, np.ones((4, 4))))
    A.data[::9] = 0
    A.eliminate_zeros()
    L = linear_operator(A, expected_calls=10**9)
    for number in range(3 * adaptive.MOST_SAMPLES):
        x = np.ones(240)
        x[number] = np.inf
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(L @ x, A @ x)


def test_an_operator_converts_as_many_products_are_expected() -> None:
    A, x = stencil(60, "float64"), np.ones(3600)
    once, never = linear_operator(A, expected_calls=10**7), linear_operator(A, expected_calls=0)
    for _ in range(linear_operators.TRIAL_CALLS + 4):
        np.testing.assert_allclose(never @ x, A @ x)
    assert never._products["ij,j->i", np.dtype("float64")].convert is None
    assert never._products["ij,j->i", np.dtype("float64")].trial is None
    np.testing.assert_allclose(once @ x, A @ x)
    assert len(once._products["ij,j->i", np.dtype("float64")].trial.candidates) >= 2
    few = linear_operator(A, expected_calls=3)  # less work than looking for a format
    np.testing.assert_allclose(few @ x, A @ x)
    assert few._products["ij,j->i", np.dtype("float64")].trial is None
    assert few._products["ij,j->i", np.dtype("float64")].convert is not None
    for calls, kind, error in ((-1, ArgumentError, "non-negative"), (1.5, ArgumentTypeError, "expected an integer")):
        with pytest.raises(kind, match=error):
            linear_operator(A, expected_calls=calls)


def test_the_faster_of_two_products_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(linear_operators, "TRIAL_SECONDS", 0)
    monkeypatch.setattr(adaptive.time, "perf_counter", lambda: now[0])

    def lasting(name: str, seconds: list[float]) -> Any:
        left = iter(seconds)

        def run(x: Any) -> str:
            now[0] += next(left, seconds[-1])
            return name

        return run

    for slow, fast, expected in (([3.0], [90.0, 2.0], "second"), ([9.0, 1.0], [9.0, 2.0], "first")):
        product = linear_operators._Product(
            lasting("first", slow), lambda x, n, f=fast: ([lasting("second", f)], True), None, 1
        )
        x = np.zeros(1)
        for _ in range(linear_operators.TRIAL_CALLS + 1):
            product(x)
        product.converter.join()
        for _ in range(2 * (1 + 2 * adaptive.BURST)):
            product(x)
        assert {product(x) for _ in range(3)} == {expected}


def test_formats_are_looked_for_again_until_one_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is for as many products as there were, so that it costs no more than those before it."""
    monkeypatch.setattr(linear_operators, "TRIAL_SECONDS", 0)
    asked: list[int] = []

    def convert(x: Any, calls: int) -> Any:
        asked.append(calls)
        return [lambda x: x + 1] * (len(asked) == 1), len(asked) == 3

    product = linear_operators._Product(lambda x: x + 1, convert, None, 1)
    for _ in range(4000):
        assert product(np.zeros(1)) == 1
        if product.converter is not None:
            product.converter.join()
    assert len(asked) == 3
    assert asked[0] == linear_operators.TRIAL_CALLS + 1
    assert all(linear_operators.AGAIN * first < second for first, second in itertools.pairwise(asked))
    assert product.convert is None
    asked.clear()
    product = linear_operators._Product(lambda x: x + 1, lambda x, calls: (asked.append(calls) or [], False), None, 1)
    for _ in range(9000):
        product(np.zeros(1))
        if product.converter is not None:
            product.converter.join()
    assert len(asked) == linear_operators.LOOKS
    assert product.convert is None


def test_products_go_on_where_a_matrix_cannot_be_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_operators, "TRIAL_SECONDS", 0)

    def convert(x: Any, calls: int) -> Any:
        raise MemoryLimitError("no room for another format")

    product = linear_operators._Product(lambda x: x + 1, convert, None, 1)
    for _ in range(linear_operators.TRIAL_CALLS + 1):
        assert product(np.zeros(1)) == 1
    product.converter.join()
    assert product(np.zeros(1)) == 1
    assert product.trial is None


def test_sums_of_short_integers() -> None:
    for dtype in ("bool", "int8", "uint8", "int16", "uint16", "uint32"):
        dense = np.full((3, 40), np.ones((), dtype) if dtype == "bool" else np.iinfo(dtype).max, dtype)
        for axis in (None, 0, 1):
            found, expected = SparseTensor.from_dense(dense).sum(axis=axis), dense.sum(axis=axis)
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


# ---------------------------------------------------------------------------------------------- dtypes

WIDE = "int64 uint64 float32 float64 longdouble complex64 complex128 clongdouble"
DTYPES = f"bool int8 uint8 int16 uint16 int32 uint32 float16 {WIDE}".split()
F = np.float32
OPERATIONS: dict[str, Any] = {
    "sum": lambda S: S.sum(),
    "sum of columns": lambda S: S.sum(axis=0),
    "mean": lambda S: S.mean(),
    "mean of rows": lambda S: S.mean(axis=1),
    "max": lambda S: S.max(),
    "min of columns": lambda S: S.min(axis=0),
    "diagonal": lambda S: S.diagonal(),
    "negative": lambda S: -S,
    "abs": lambda S: abs(S),
    "@ vector": lambda S: S @ np.ones(3, S.dtype),
    "@ float32": lambda S: S @ np.ones(3, F),
    "float32 @": lambda S: np.ones((2, 2), F) @ S,
    "@ own": lambda S: S @ S.T,
    "* own": lambda S: S * S,
    "+ own": lambda S: S + S,
    "- own": lambda S: S - S,
    "+ dense": lambda S: S + np.ones((2, 3), F),
    "* dense": lambda S: S * np.ones(3, S.dtype),
    "/ dense": lambda S: S / np.ones(3, S.dtype),
    **{f"* {n!r}": lambda S, n=n: S * n for n in (2, 2.5, 1j, True, 300, -1, np.int64(300), F(2), np.True_)},
    **{f"/ {n!r}": lambda S, n=n: S / n for n in (2, 0.5, 300, np.int8(3), True)},
    **{f"** {n!r}": lambda S, n=n: S**n for n in (2, 0.5, 3, F(2), np.int8(2), True, 300, np.True_)},
    **{f"+ {n!r}": lambda S, n=n: S + n for n in (0, 0.0, np.int64(0), False)},
    "0 -": lambda S: 0 - S,
    "300 *": lambda S: 300 * S,
    "numpy's True *": lambda S: np.True_ * S,
    "> 0": lambda S: S > 0,
    "> 300": lambda S: S > 300,
    **{f"to {d}": lambda S, d=d: S.astype(d) for d in ("float64", "complex128", "bool")},
}


def dense_of(dtype: str) -> np.ndarray:
    dense = np.array([[1, 0, 3], [0, 2, 0]]).astype(dtype)
    if dense.dtype.kind == "c":
        return dense * np.array([1 + 2j], dtype)
    if dtype in ("int64", "uint64"):
        dense[0, 2] = 2**53 + 1  # which float64 does not hold
    if dtype == "longdouble":
        dense[0, 2] = 1 + np.finfo(dtype).eps
    return dense


def tried(action: Any) -> Any:
    try:
        with np.errstate(all="ignore"):
            return action()
    except sparsetir.SparseTIRError:
        return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_of_each_dtype_are_those_of_numpy_or_refused(dtype: str) -> None:
    dense = dense_of(dtype)
    S = SparseTensor.from_coo(np.nonzero(dense), dense[np.nonzero(dense)], dense.shape)
    answered = 0
    for name, operation in OPERATIONS.items():
        found = tried(lambda operation=operation: operation(S))
        if found is None:
            continue
        expected = operation(dense)
        found = np.asarray(found.to_dense() if isinstance(found, SparseTensor) else found)
        assert found.dtype == np.asarray(expected).dtype, name
        rtol = {2: 2e-3, 4: 1e-6, 8: 1e-6 if found.dtype.kind == "c" else 1e-14}.get(found.dtype.itemsize, 1e-14)
        rtol = 0 if found.dtype.kind in "iub" else rtol
        np.testing.assert_allclose(found, expected, rtol=rtol, err_msg=name)
        answered += 1
    assert answered > 20


def test_means_of_complex_numbers_keep_infinite_parts() -> None:
    values = np.array([[complex(np.inf, 1), 0], [2j, complex(1, -np.inf)]])
    S = SparseTensor.from_dense(values)
    np.testing.assert_array_equal(S.sum(axis=0), [complex(np.inf, 3), complex(1, -np.inf)])
    np.testing.assert_array_equal(S.mean(axis=1), [complex(np.inf, 0.5), complex(0.5, -np.inf)])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float16"])
def test_linear_operators_lose_no_digits(dtype: str) -> None:
    dense = dense_of(dtype)
    L = tried(lambda: linear_operator(sp.csr_array(dense)))
    assert (L is None) == (dtype in (*WIDE.split()[:2], "longdouble", "clongdouble"))
    if L is None:
        return
    if L.dtype.kind == "c":
        np.testing.assert_array_equal(L @ np.eye(dense.shape[1]), dense)
        return
    for x in (np.array([2**24 + 1] * 3), np.full(3, 0.1), np.full(3, 0.1j), np.ones(3, bool), np.full(3, 0.1, F)):
        rtol = 1e-6 if x.dtype == F or (dtype == "float32" and x.dtype.kind == "c") else 1e-15
        np.testing.assert_allclose(L @ x, dense.astype("float64") @ x, rtol=rtol)
    with pytest.raises(ArgumentTypeError, match="x: expected numbers that float64 holds, got"):
        L @ np.ones(3, "longdouble")


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble"])
def test_torch_has_no_long_doubles(dtype: str) -> None:
    with pytest.raises(ArgumentTypeError, match="torch has no tensors of"):
        SparseTensor.from_dense(dense_of(dtype)).to_torch()


# ---------------------------------------------------------------------------------------------- slices


class Counting(np.ndarray):
    """An array that counts the elements that indexing returns."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Counting.read += np.size(found)
        return np.asarray(found) if isinstance(found, np.ndarray) else found


SLICES = [
    slice(3), slice(-3, None), slice(None, None, -7), slice(5, 2, -1), slice(40, 60, 3), [0, 7, -1, 7], [], 5, -2,
    np.array([3, -4]), (slice(2, 9), slice(3, 20, 2)), (slice(10, None, 9), 4), (3, slice(None, None, -1)), (3, 5),
    (-1, -1), (slice(4, 8), [1, 1, -2]), ([2, 5], slice(1, 9)), (slice(0, 0), slice(None)),
]  # fmt: skip


@pytest.mark.parametrize("format", ["csr", "coo", "dcsr", "csc", "bsr", "ell"])
@pytest.mark.parametrize("index", SLICES, ids=repr)
def test_slices_of_every_format(format: str, index: Any) -> None:
    dense = np.random.default_rng(1).uniform(-1, 1, (80, 30)) * (np.random.default_rng(2).random((80, 30)) < 0.3)
    found = SparseTensor.from_dense(dense, format)[index]
    same(found, dense[index])
    if isinstance(found, SparseTensor):
        same(pickle.loads(pickle.dumps(found)), dense[index])
    mask = np.arange(80) % 3 == 1
    same(SparseTensor.from_dense(dense, format)[mask], dense[mask])


@pytest.mark.parametrize("index", SLICES, ids=repr)
def test_slices_read_only_their_rows(index: Any) -> None:
    """No more of the index and value arrays is read than the rows have, however large the rest is."""
    rng = np.random.default_rng(0)
    A = sp.random_array((80, 30), density=0.3, format="csr", rng=rng)
    S = SparseTensor.from_scipy(A)
    row = index[0] if isinstance(index, tuple) else index
    wanted = A[[row] if isinstance(row, int) else row].nnz
    entries = S.entries
    columns = entries.last.view(Counting)
    vars(S)["values"] = S.values.view(Counting)
    original = type(entries).last
    Counting.read = 0
    try:
        type(entries).last = property(lambda self: columns if self is entries else original.fget(self))
        S[index]
    finally:
        type(entries).last = original
    assert "coords" not in vars(S)  # which would write out the row of each entry
    assert Counting.read <= 2 * wanted


@pytest.mark.parametrize("make", [sp.csr_array, sp.csc_array, sp.coo_array])
def test_text_is_refused_by_every_operation(make: Callable[..., Any]) -> None:
    text, other = make(np.eye(3)), make(np.eye(3))
    text.data = np.array(["a", "b", "c"])
    calls: list[Callable[[], Any]] = [
        lambda: sparsetir.multiply(text, np.nan),
        lambda: sparsetir.multiply(2.0, text),
        lambda: sparsetir.multiply(text, np.ones((3, 3))),
        lambda: sparsetir.einsum("ij->i", text),
    ]
    for function in (sparsetir.matmul, sparsetir.add, sparsetir.multiply, sparsetir.maximum):
        calls += [lambda f=function: f(text, other), lambda f=function: f(other, text)]
    for n, call in enumerate(calls):
        with on(n), pytest.raises(sparsetir.errors.ArgumentTypeError, match=r"numbers|takes values of|expressions are"):
            call()


@pytest.mark.parametrize("combine", [operator.mul, operator.matmul])
def test_linear_operators_are_refused(combine: Any) -> None:
    """They would take a tensor for an array of objects."""
    tensor = sparsetir.SparseTensor.from_any(sp.csr_array(np.eye(3)))
    with pytest.raises(ArgumentTypeError, match="linear_operator"):
        combine(tensor, linalg.aslinearoperator(np.eye(3)))
