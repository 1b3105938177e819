# SPDX-License-Identifier: Apache-2.0
"""Variance, places of extremes, logsumexp and kept dimensions of sparse tensors, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

import sparsetir
from each import examples
from sparsetir import SparseTensor
from sparsetir.errors import ArgumentError, ArgumentTypeError

DTYPES = ("float64", "float32", "float16", "int8", "int64", "uint8", "bool")
FORMATS = ("csr", "csc", "coo", "bsr", "ell", "dcsr")


@st.composite
def tensors(draw: Any, least: int = 1) -> tuple[np.ndarray, str | None]:
    """A dense array of few different numbers, so that extremes are equal, and a format for it."""
    ndim = draw(st.sampled_from([1, 2, 2, 3]))
    shape = draw(st.lists(st.integers(least, 5), min_size=ndim, max_size=ndim))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low = -3 if np.dtype(dtype).kind in "fi" else 0
    dense = rng.integers(low, 4, shape) * (rng.random(shape) < draw(st.sampled_from([0, 0.4, 1])))
    dense = dense.astype(dtype)
    if dense.dtype.kind == "f" and draw(st.integers(0, 3)) == 0:
        dense[rng.random(shape) < 0.2] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return dense, draw(st.sampled_from(FORMATS)) if ndim == 2 else None


def stored(dense: np.ndarray, format: str | None) -> SparseTensor:
    return SparseTensor.from_dense(dense, format)


def axes_of(data: Any, ndim: int, *, tuples: bool = True) -> Any:
    several = st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True).map(tuple)
    choices = [st.none(), st.integers(-ndim, ndim - 1)]
    return data.draw(st.one_of(*choices, several) if tuples else st.one_of(*choices))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(60), deadline=None)
@given(tensors(), st.data())
def test_places_of_extremes(drawn: Any, data: Any) -> None:
    dense, format = drawn
    axis = axes_of(data, dense.ndim, tuples=False)
    for name in ("argmax", "argmin"):
        for keepdims in (False, True):
            result = getattr(stored(dense, format), name)(axis=axis, keepdims=keepdims)
            expected = getattr(dense, name)(axis=axis, keepdims=keepdims)
            assert np.asarray(result).dtype == np.intp
            np.testing.assert_array_equal(result, expected, err_msg=f"{name} {axis} {dense.tolist()}")


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(40), deadline=None)
@given(tensors(), st.data())
def test_spread(drawn: Any, data: Any) -> None:
    dense, format = drawn
    axis, ddof = axes_of(data, dense.ndim), data.draw(st.sampled_from([0, 1, 0.5]))
    wide = dense.astype("float64") if dense.dtype.kind in "bui" else dense.astype(np.result_type(dense, "float32"))
    dtype = dense.dtype if dense.dtype.kind == "f" else np.dtype("float64")
    rtol = {2: 1e-2, 4: 1e-5}.get(dtype.itemsize, 1e-12)
    S = stored(dense, format)
    for name in ("var", "std"):
        result = getattr(S, name)(axis=axis, ddof=ddof, keepdims=True)
        expected = getattr(wide, name)(axis=axis, ddof=ddof, keepdims=True)
        assert result.dtype == dtype
        np.testing.assert_allclose(result, expected.astype(dtype), rtol=rtol, atol=rtol, err_msg=name)
    result = S.logsumexp(axis=axis)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, logsumexp(wide, axis=axis), rtol=rtol, atol=rtol)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(tensors(), st.data())
def test_kept_dimensions(drawn: Any, data: Any) -> None:
    dense, format = drawn
    dense = np.nan_to_num(dense, posinf=1, neginf=-1)
    axis, S = axes_of(data, dense.ndim), stored(dense, format)
    for name in ("sum", "mean", "max", "min"):
        expected = np.asarray(getattr(dense, name)(axis=axis, keepdims=True))
        result = getattr(S, name)(axis=axis, keepdims=True)
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=1e-2)
        np.testing.assert_array_equal(np.ravel(getattr(S, name)(axis=axis)), np.ravel(result))


def test_no_digits_cancel() -> None:
    dense = np.full((200, 3), 1e8)
    dense[::2] += 1
    dense[:, 2] = 0
    dense[0, 2] = 1e-3
    S = SparseTensor.from_dense(dense)
    np.testing.assert_allclose(S.var(axis=0), dense.var(axis=0), rtol=1e-9)
    np.testing.assert_allclose(S.var(), dense.var(), rtol=1e-9)


def test_complex_spread() -> None:
    dense = np.array([[1 + 2j, 0, 3], [0, -1j, 2]])
    S = SparseTensor.from_dense(dense)
    np.testing.assert_allclose(S.var(axis=1), dense.var(axis=1))
    np.testing.assert_allclose(S.std(), dense.std())


@pytest.mark.filterwarnings("ignore")
def test_reductions_of_nothing() -> None:
    S = SparseTensor.from_dense(np.zeros((0, 3)))
    assert np.isnan(S.var())
    assert S.var(axis=1).shape == S.argmax(axis=1).shape == (0,)
    assert S.logsumexp() == -np.inf
    np.testing.assert_array_equal(S.logsumexp(axis=0), [-np.inf] * 3)


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda S: S[:0].argmax(), ArgumentError, r"argmax of an empty tensor is undefined: the shape is \(0, 2\)"),
        (lambda S: S[:0].argmin(axis=0), ArgumentError, "argmin of an empty tensor is undefined"),
        (lambda S: S.argmax(axis=2), ArgumentError, "axis: expected a dimension of 2, or None, got 2"),
        (lambda S: S.argmax(axis=(0, 1)), ArgumentError, r"axis: expected a dimension of 2, or None, got \(0, 1\)"),
        (lambda S: (S * 1j).argmin(), ArgumentTypeError, "argmin: expected real numbers, got complex128"),
        (lambda S: (S * 1j).logsumexp(), ArgumentTypeError, "logsumexp: expected real numbers"),
        (lambda S: S.var(ddof="1"), ArgumentTypeError, "ddof: expected a number, got str"),
        (lambda S: S.sum(keepdims=2), ArgumentTypeError, "keepdims"),
        (lambda S: S.var(axis=3), ArgumentError, "axis 3 of a tensor of 2 dimensions"),
    ],
)
def test_refusals(action: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        action(SparseTensor.from_dense(np.array([[0, 1.0], [2.0, 0]])))


@pytest.mark.parametrize("shape", [(10**12, 3 * 10**11), (2**62, 1), (2**62, 2), (10**9, 3)])
def test_reductions_of_more_elements_than_64_bits_count(shape: tuple[int, int]) -> None:
    m, n = shape
    values = np.array([1.0, -2.0, 4.0])
    S = SparseTensor.from_coo(np.array([[0, 5, m - 1], [0, n - 1, 0]]), values, shape)
    count = m * n
    mean = 3 / count
    assert S.sum() == 3.0
    np.testing.assert_allclose(S.mean(), mean)
    np.testing.assert_allclose(S.var(), 21 / count - mean**2)
    np.testing.assert_allclose(S.std(ddof=1), np.sqrt(21 / count))
    np.testing.assert_allclose(S.logsumexp(), np.log(float(count)), rtol=1e-6)
    assert (S.max(), S.min(), bool(S.any()), bool(S.all())) == (4.0, -2.0, True, False)


EXTREMES = ["ij,j->i", "ij->i", "ij->j", "ij->", "ij,jk->ik", "k,ij->ik", "ij,i->j", "j,ij,i->i", "ij,k->i"]


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("text", EXTREMES)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extremes_of_products_with_a_sparse_operand(reduce: str, text: str, dtype: str) -> None:
    """All elements take part, with fill=None only entries, none of which is zero here."""
    rng = np.random.default_rng(EXTREMES.index(text))
    inputs, output = text.split("->")
    letters = sorted({*inputs} - {","})
    for density in (0, 0.2, 0.8, 1):
        extents = {c: int(rng.integers(2, 7)) for c in letters}
        arrays = {term: rng.integers(1, 4, [extents[c] for c in term]) for term in inputs.split(",")}
        arrays = {term: (array * rng.choice([-1, 1], array.shape)).astype(dtype) for term, array in arrays.items()}
        arrays["ij"][rng.random(arrays["ij"].shape) > density] = 0
        axes = tuple(n for n, c in enumerate(letters) if c not in output)
        terms = np.einsum(f"{inputs}->{''.join(letters)}", *arrays.values())
        least = np.iinfo(dtype).min if dtype == "int32" else -np.inf
        identity = {"max": least, "min": np.iinfo(dtype).max if dtype == "int32" else np.inf}[reduce]
        extreme = getattr(np, reduce)
        operands = [sp.csr_array(a) if term == "ij" else a for term, a in arrays.items()]
        for fill, expected in ((0, extreme(terms, axes)), (None, extreme(np.where(terms != 0, terms, identity), axes))):
            for _ in range(2):
                computed = sparsetir.einsum(text, *operands, reduce=reduce, fill=fill, result="dense")
                np.testing.assert_array_equal(computed, expected)
            tensors = [SparseTensor.from_any(v, "csc") if sp.issparse(v) else v for v in operands]
            computed = sparsetir.einsum(text, *tensors, reduce=reduce, fill=fill, result="dense")
            np.testing.assert_array_equal(computed, expected)


def test_extremes_meet_zeros_of_other_numbers_exactly() -> None:
    A = sp.csr_array(np.array([[0, 2.0], [0, 0], [1, 1]]))
    for x in ([np.inf, 1], [np.nan, 1]):
        computed = sparsetir.einsum("ij,j->i", A, np.array(x), reduce="max")
        with np.errstate(invalid="ignore"):
            assert np.isnan(computed[:2]).tolist() == np.isnan(A.toarray() * x).any(axis=1)[:2].tolist()
    with pytest.raises(ArgumentError, match="fill: expected a number for 2 sparse operands, got None"):
        sparsetir.einsum("ij,jk->ik", A, sp.csr_array(np.eye(2)), reduce="max", fill=None)
