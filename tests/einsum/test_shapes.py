# SPDX-License-Identifier: Apache-2.0
"""Stacking, reshaping, tensordot, comparisons, broadcasting and complex values of sparse tensors, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
import torch
from each import examples
from sparsetir import CooTensor, SparseTensor
from sparsetir.errors import ArgumentError, ArgumentTypeError

DTYPES = ("float64", "float32", "int8", "int64", "uint8", "bool", "complex64", "complex128")
KINDS = (sp.csr_array, sp.csc_array, sp.coo_array, sp.csr_matrix, SparseTensor.from_dense)


def drawn(rng: np.random.Generator, shape: Any, dtype: str, density: float = 0.4) -> np.ndarray:
    low = 0 if dtype in ("bool", "uint8") else -3
    dense = rng.integers(low, 4, shape) * (rng.random(shape) < density)
    dense = dense.astype(dtype)
    return dense * (1 + 2j) if dense.dtype.kind == "c" else dense


def dense_of(value: Any) -> np.ndarray:
    value = value.to_dense() if isinstance(value, (SparseTensor, torch.Tensor)) else value
    return np.asarray(value.toarray() if sp.issparse(value) else value)


def same(result: Any, expected: Any, rtol: float = 0) -> None:
    result = dense_of(result)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=rtol)


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.sampled_from(KINDS))
def test_stacks(seed: int, first: str, second: str, kind: Any, other: Any) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(0, 5, 3)
    a, b, c = drawn(rng, (m, n), first), drawn(rng, (k, n), second), drawn(rng, (m, k), second)
    stacked = sparsetir.vstack([kind(a), other(b)])
    assert type(stacked) is {sp.csc_array: sp.csr_array, sp.coo_array: sp.csr_array}.get(kind, type(kind(a)))
    same(stacked, np.vstack([a, b]))
    same(sparsetir.hstack([kind(a), other(c), kind(a)]), np.hstack([a, c, a]))


def test_stacks_of_other_classes() -> None:
    dense = np.arange(24.0).reshape(2, 3, 4)
    T = SparseTensor.from_dense(dense)
    same(sparsetir.vstack([T, T]), np.vstack([dense, dense]))
    same(sparsetir.hstack([T, T]), np.hstack([dense, dense]))
    pair = torch.eye(2).to_sparse_csr()
    assert sparsetir.hstack([pair, pair]).layout is torch.sparse_csr
    assert type(sparsetir.vstack([CooTensor(np.array([[0], [1]]), np.ones(1), (1, 2)), pair])) is CooTensor
    wide = sp.coo_array((np.ones(2), ([0, 2**31 - 2], [0, 1])), shape=(2**31 - 1, 2))
    tall = sparsetir.vstack([wide, wide])
    assert tall.shape == (2**32 - 2, 2)
    assert sorted(tall.coords[0].tolist()) == [0, 2**31 - 2, 2**31 - 1, 2**32 - 3]


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.sampled_from(DTYPES))
def test_reshape(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    shapes = [(12,), (3, 4), (2, 6), (1, 12), (2, 3, 2), (12, 1, 1), (-1, 4), (2, -1, 3)]
    first, second = rng.choice(6), rng.choice(8)
    dense = drawn(rng, shapes[first], dtype)
    S = SparseTensor.from_dense(dense)
    same(S.reshape(*shapes[second]), dense.reshape(shapes[second]))
    same(S.reshape(shapes[second]).reshape(dense.shape), dense)
    same(SparseTensor.from_dense(np.zeros((0, 3))).reshape(3, -1), np.zeros((3, 0)))


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(SEEDS, st.sampled_from(["float64", "float32", "int64"]))
def test_tensordot(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    a, b = drawn(rng, (2, 3, 4), dtype), drawn(rng, (3, 4, 2), dtype)
    A, B = SparseTensor.from_dense(a), SparseTensor.from_dense(b)
    for axes in (2, 0, ([1], [0]), ([1, 2], [0, 1]), ([2, 1], [1, 0]), ([0], [2]), (-2, 0)):
        axes = 0 if axes == 0 and rng.random() < 0.5 else axes
        expected = np.tensordot(a, b, axes)
        for left, right in ((A, B), (A, b), (a, B)):
            same(sparsetir.tensordot(left, right, axes), expected, 1e-6)
    total = sparsetir.tensordot(A, A, 3)
    assert np.ndim(total) == 0
    np.testing.assert_allclose(total, np.tensordot(a, a, 3), rtol=1e-5)


COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.sampled_from(DTYPES[:6]), st.sampled_from(DTYPES[:6]))
def test_comparisons(seed: int, first: str, second: str) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(0, 5, rng.choice([1, 2, 3])))
    a, b = drawn(rng, shape, first), drawn(rng, shape, second)
    a = np.where(rng.random(shape) < 0.1, np.nan, a) if a.dtype.kind == "f" else a
    S, R = SparseTensor.from_dense(a), SparseTensor.from_dense(b)
    operators = {"less": "__lt__", "greater": "__gt__", "not_equal": "__ne__"}
    for ufunc in COMPARISONS:
        name = operators.get(ufunc.__name__)
        if name is not None:
            same(getattr(S, name)(R), ufunc(a, b))
    same(S <= b, a <= b)
    same(S == b, a == b)
    same(S >= b[..., :1] if shape and shape[-1] else S >= b, a >= b[..., :1] if shape and shape[-1] else a >= b)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from(KINDS))
def test_stretched_factors(seed: int, first: str, second: str, kind: Any) -> None:
    rng = np.random.default_rng(seed)
    m, n = rng.integers(1, 5, 2)
    a = drawn(rng, (m, n), first)
    A = kind(a)
    for shape in ((1, n), (m, 1), (1, 1)):
        b = drawn(rng, shape, second, 0.6)
        for product in (sparsetir.multiply(A, sp.csr_array(b)), sparsetir.multiply(SparseTensor.from_dense(b), A)):
            same(product, a * b, 1e-6)
    column, row = drawn(rng, (m, 1), first), drawn(rng, (1, n), second)
    same(SparseTensor.from_dense(column) * SparseTensor.from_dense(row), column * row, 1e-6)
    T = drawn(rng, (2, m, n), first)
    same(SparseTensor.from_dense(T) * SparseTensor.from_dense(a), T * a, 1e-6)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(SEEDS, st.sampled_from(DTYPES), st.sampled_from(["complex64", "complex128"]), st.sampled_from(KINDS))
def test_complex_values(seed: int, first: str, second: str, kind: Any) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = rng.integers(1, 6, 3)
    a, b = drawn(rng, (m, n), first), drawn(rng, (n, k), second)
    like = drawn(rng, (m, n), second)
    for left, right, x, y in ((a, b, kind(a), sp.csr_array(b)), (b.T, a.T, kind(b.T.copy()), sp.csr_array(a.T))):
        expected = left @ right
        same(sparsetir.matmul(x, y), expected, 1e-5)
        same(sparsetir.matmul(x, right), expected, 1e-5)
        same(sparsetir.matmul(left, y), expected, 1e-5)
        same(sparsetir.matmul(x, right[:, 0]), expected[:, 0], 1e-5)
    mask = drawn(rng, (m, k), "bool")
    same(sparsetir.matmul(kind(a), sp.csr_array(b), mask=sp.csr_array(mask)), np.where(mask, a @ b, 0), 1e-5)
    A, L = kind(a), kind(like)
    same(sparsetir.add(A, L), a + like, 1e-6)
    same(sparsetir.subtract(L, A), like - a, 1e-6)
    same(sparsetir.multiply(A, L), a * like, 1e-6)
    same(sparsetir.multiply(L, np.ones(n, first)), like * np.ones(n, first), 1e-6)
    S, R = SparseTensor.from_dense(a), SparseTensor.from_dense(like)
    same(S + R, a + like, 1e-6)
    same(R @ R.T, like @ like.T, 1e-5)
    same(R + a, like + a, 1e-6)


@settings(max_examples=examples(30), deadline=None)
@given(SEEDS, st.sampled_from(DTYPES[:5]), st.sampled_from(DTYPES[:5]), st.sampled_from(KINDS))
def test_sums_with_dense_arrays(seed: int, first: str, second: str, kind: Any) -> None:
    rng = np.random.default_rng(seed)
    m, n = rng.integers(0, 5, 2)
    a, b = drawn(rng, (m, n), first), drawn(rng, (m, n), second)
    A = kind(a)
    same(sparsetir.add(A, b), a + b)
    same(sparsetir.add(b, A), a + b)
    same(sparsetir.subtract(A, b), a - b)
    same(sparsetir.subtract(b, A), b - a)
    same(sparsetir.add(A, b, 2, 3), 2 * a + 3 * b)
    if m:
        same(sparsetir.add(A, b[:1]), a + b[:1])


def test_sums_with_tensors_of_torch() -> None:
    A = sp.csr_array(np.eye(2, dtype="float32"))
    result = sparsetir.add(A, torch.ones(2, 2), beta=2)
    assert type(result) is torch.Tensor
    assert result.tolist() == [[3.0, 2.0], [2.0, 3.0]]


@pytest.mark.slow
@pytest.mark.parametrize("make", [sp.csr_array, sp.csc_array, sp.coo_array, sp.csr_matrix])
def test_scipy_leaves_products_to_sparse_tensors(make: Any) -> None:
    dense = np.array([[0, 1.0], [2.0, 0], [0, 3.0]])
    S, A = SparseTensor.from_dense(dense), make(dense)
    product = A.T @ S
    assert type(product) is SparseTensor
    same(product, dense.T @ dense)
    same(A + S, dense + dense)
    same(A - S, dense - dense)
    with pytest.raises(ArgumentTypeError, match=r"or to_scipy\(copy=False\) for a library that takes scipy"):
        np.asarray(S)


def S() -> SparseTensor:
    return SparseTensor.from_dense(np.array([[0, 1.0], [2.0, 0], [0, 3.0]]))


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: sparsetir.vstack(S()), ArgumentTypeError, "operands: expected a list of sparse tensors, got SparseT"),
        (lambda: sparsetir.vstack([]), ArgumentError, "operands: expected at least one sparse tensor"),
        (lambda: sparsetir.vstack([S(), np.eye(2)]), ArgumentTypeError, "operand 1: expected a sparse tensor, got nda"),
        (lambda: sparsetir.vstack([S(), S().T]), ArgumentError, r"operand 1: expected the extents of operand 0, \(3,"),
        (lambda: sparsetir.hstack([S()[0], S()]), ArgumentError, "operand 1: expected the extents of operand 0"),
        (lambda: S().reshape(4), ArgumentError, r"shape: expected 6 elements, got \(4,\)"),
        (lambda: S().reshape(-1, -1), ArgumentError, "shape: expected extents, of which one may be -1"),
        (lambda: S().reshape(2.0, 3), ArgumentError, "shape: expected extents"),
        (lambda: S().reshape(4, -1), ArgumentError, "shape: expected 6 elements"),
        (lambda: sparsetir.tensordot(np.eye(2), np.eye(2)), ArgumentTypeError, "expected a sparse tensor, got two"),
        (lambda: sparsetir.tensordot(S(), S(), 3), ArgumentError, "axes: expected at most 2, got 3"),
        (lambda: sparsetir.tensordot(S(), S(), 1), ArgumentError, "axes: expected pairs of equal extents"),
        (lambda: sparsetir.tensordot(S(), S(), ([0, 0], [0, 1])), ArgumentError, "axes: expected pairs"),
        (lambda: sparsetir.tensordot(S(), S(), ([5], [0])), ArgumentError, "axes: expected dimensions of the shape"),
        (lambda: sparsetir.tensordot(S(), S(), "x"), ArgumentTypeError, "axes: expected a number or a pair, got 'x'"),
        (lambda: S() * S().T, ArgumentError, r"the shapes \(3, 2\) and \(2, 3\) do not fit"),
        (lambda: S() < np.ones(3), ArgumentError, "they do not fit"),
        (lambda: sparsetir.add(S(), np.eye(2), "x"), ArgumentTypeError, "alpha: expected a number, got str"),
        (lambda: sparsetir.matmul(S() * 1j, S().T, top=1), ArgumentTypeError, "top, threshold: expected real values"),
        (lambda: sparsetir.einsum("ij,j", S() * 1j, np.ones(2)), ArgumentTypeError, "operand 0 holds complex128"),
        (lambda: sparsetir.maximum(S() * 1j, S()), ArgumentTypeError, "got complex128"),
    ],
)
def test_refusals(action: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        action()
