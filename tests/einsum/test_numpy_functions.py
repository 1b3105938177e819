# SPDX-License-Identifier: Apache-2.0
"""numpy's functions of sparse tensors give what numpy gives of dense arrays, or an error that says what to call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import SparseTensor
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError

FORMATS = ["csr", "csc", "coo", "dcsr"]
DTYPES = ["bool", "int32", "float16", "float32", "float64"]
UFUNCS = [
    np.maximum, np.minimum, np.fmax, np.fmin, np.hypot, np.copysign, np.logical_and, np.logical_or, np.logical_xor,
    np.remainder, np.floor_divide, np.fmod, np.bitwise_or, np.heaviside,
]  # fmt: skip
AXES = [None, 0, 1, -1, (0, 1)]


def dense(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draw an array with zeros, repeated values and, of floats, a NaN and infinities."""
    rng = np.random.default_rng(seed)
    array = (rng.integers(-3, 4, shape) * (rng.random(shape) < 0.4)).astype(dtype)
    if array.dtype.kind == "f" and array.size > 4:
        array.flat[rng.integers(0, array.size, 3)] = np.nan, np.inf, -np.inf
    return array


def stored(array: np.ndarray, format: str = "csr") -> SparseTensor:
    return SparseTensor.from_dense(array).convert(format) if array.ndim == 2 else SparseTensor.from_dense(array)


def same(result: Any, expected: Any) -> None:
    result = result.to_dense() if isinstance(result, SparseTensor) else np.asarray(result)
    assert result.shape == np.shape(expected)
    assert result.dtype == np.asarray(expected).dtype
    tolerance = 1e-3 if result.dtype == np.float16 else 1e-6
    np.testing.assert_allclose(result, expected, rtol=tolerance)


def agree(function: Any, of_sparse: tuple[Any, ...], of_dense: tuple[Any, ...]) -> bool:
    """Compare a function with numpy's; return whether it was not refused."""
    try:
        result = function(*of_sparse)
    except SparseTIRError:
        return False
    with np.errstate(all="ignore"):
        same(result, function(*of_dense))
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda ufunc: ufunc.__name__)
def test_ufuncs_of_two_arguments(ufunc: np.ufunc, dtype: str) -> None:
    served = []
    with np.errstate(all="ignore"):
        for seed, format in enumerate(FORMATS):
            a, b = dense(seed, (5, 7), dtype), dense(seed + 9, (5, 7), dtype)
            A, B = stored(a, format), stored(b, FORMATS[-1 - seed])
            served.append(agree(ufunc, (A, B), (a, b)))
            served.append(agree(ufunc, (A, b[0]), (a, b[0])))
            served.append(agree(ufunc, (b, A), (b, a)))
            for number in (np.dtype(dtype).type(1), 0):
                served.append(agree(ufunc, (A, number), (a, number)))
    is_defined = dtype != "bool" or ufunc not in (np.copysign, np.fmod, np.floor_divide, np.remainder, np.hypot)
    assert any(served) or not is_defined or (ufunc is np.bitwise_or and "float" in dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_to_truth(dtype: str) -> None:
    for shape in ((4, 6), (1, 1), (3, 0), (0, 3), (2, 3, 4), (5,)):
        array = dense(3, shape, dtype)
        full = np.ones(shape, dtype)
        for values in (array, full):
            tensor = stored(values)
            for axis in (None, 0, -1):
                for keepdims in (False, True):
                    same(tensor.any(axis, keepdims=keepdims), values.any(axis, keepdims=keepdims))
                    same(np.all(tensor, axis=axis, keepdims=keepdims), values.all(axis, keepdims=keepdims))
        for places, expected in zip(stored(array).nonzero(), array.nonzero(), strict=True):
            np.testing.assert_array_equal(places, expected)
    zeros = SparseTensor.from_coo([np.array([0, 1]), np.array([1, 0])], np.array([0, 2], dtype), (2, 2))
    assert [places.tolist() for places in np.nonzero(zeros)] == [[1], [0]]
    same(zeros.any(axis=1), np.array([False, True]))


@pytest.mark.parametrize("dtype", ["int32", "float32", "float64", "complex64"])
def test_norms(dtype: str) -> None:
    array = dense(5, (6, 4), "int32").astype(dtype)
    tensor, row = stored(array), stored(array)[0]
    for ord in (None, "fro", 1, -1, np.inf, -np.inf):
        assert agree(np.linalg.norm, (tensor, ord), (array, ord))
    for ord in (None, 0, 1, 2, 3, np.inf, -np.inf):
        for axis in (0, 1, -1):
            for keepdims in (False, True):
                options: dict[str, Any] = {"axis": axis, "keepdims": keepdims}
                result = np.linalg.norm(tensor, ord, **options)
                np.testing.assert_allclose(result, np.linalg.norm(array, ord, **options), rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(row, ord), np.linalg.norm(array[0], ord), rtol=1e-6)
    for ord in (2, "nuc", -3):
        with pytest.raises(ArgumentError, match="ord: expected"):
            np.linalg.norm(tensor, ord)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_clip_and_round(dtype: str) -> None:
    array = dense(7, (5, 6), dtype)
    tensor = stored(array)
    same(np.clip(tensor, -1, 2), np.clip(array, -1, 2))
    same(np.clip(tensor, 0, None), np.clip(array, 0, None))
    same(np.round(tensor / 3 if "float" in dtype else tensor, 1), np.round(array / 3 if "float" in dtype else array, 1))
    for ends in ((1, 2), (-2, -1), (np.nan, 1)):
        with pytest.raises(ArgumentError, match="interval around 0"):
            np.clip(tensor, *ends)


def test_names_that_users_of_scipy_and_numpy_know() -> None:
    array = dense(1, (3, 4), "float64")
    tensor = stored(array)
    np.testing.assert_array_equal(tensor.toarray(), array)
    np.testing.assert_array_equal(tensor.todense(), array)
    assert len(tensor) == 3
    with pytest.raises(ArgumentError, match="neither true nor false"):
        bool(tensor)
    for index in (3, -4, (0, 4), [0, 3]):
        with pytest.raises(IndexError):
            tensor[index]


class Table:
    """A table of another library, which numpy can read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def test_matmul_takes_lists_tables_and_vectors() -> None:
    array = dense(2, (4, 4), "int32").astype("float32")
    A, B = sparsetir.SparseTensor.from_dense(array).to_scipy(), np.arange(8, dtype="float32").reshape(4, 2)
    for operand in (B.tolist(), Table(B), tuple(map(tuple, B))):
        np.testing.assert_array_equal(sparsetir.matmul(A, operand), array @ B)
    np.testing.assert_array_equal(sparsetir.matmul(Table(B.T), A), B.T @ array)
    np.testing.assert_array_equal(sparsetir.matmul(A, [1, 2, 3, 4]), array @ [1, 2, 3, 4])
    row, column = stored(array[1:2])[0], stored(array[:, 2:3].T)[0]
    assert sparsetir.matmul(row, column) == array[1] @ array[:, 2]
    np.testing.assert_array_equal(sparsetir.matmul(row, stored(array)), array[1] @ array)
    for wrong in ("text", None, [["a"]]):
        with pytest.raises(ArgumentTypeError):
            sparsetir.matmul(A, wrong)


def test_matmul_takes_vectors_of_scipy() -> None:
    import scipy.sparse as sp

    array = dense(4, (5, 5), "int32").astype("float64")
    A, row = sp.csr_array(array), sp.coo_array(array[2])
    for left, right in ((A, row), (row, A), (row, row)):
        expected = left.toarray() @ right.toarray()
        np.testing.assert_array_equal(sparsetir.matmul(left, right), expected)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(2, 3), (3,), (2, 3, 4), (0, 3), (1, 1)])
def test_parts_orders_and_joined_tensors_are_those_of_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    D = np.where(rng.random(shape) < 0.6, rng.standard_normal(shape) * (3 + 1j), 0)
    D = D.astype(dtype) if dtype == "complex64" else D.real.astype(dtype)
    S = SparseTensor.from_dense(D)
    calls = [
        lambda M: np.real(M),
        lambda M: np.imag(M),
        lambda M: M.real,
        lambda M: M.imag,
        lambda M: np.concatenate([M, M]),
        lambda M: np.concatenate((M, M, M), axis=-1),
        *(lambda M, axis=axis: np.concatenate([M, M], axis) for axis in range(len(shape))),
        *(lambda M, order=order: np.reshape(M, shape[::-1], order=order) for order in "CF"),
        lambda M: M.reshape(shape[1:] + shape[:1], order="F"),
        *([lambda M: M.reshape(-1, order="F")] if D.size else []),
    ]
    for call in calls:
        result, expected = call(S), call(D)
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(result.to_dense(), expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda S: np.concatenate([S, S], 2), ArgumentError, "axis: expected one of 2 dimensions, got 2"),
        (lambda S: np.concatenate([S, S], axis=None), ArgumentTypeError, "axis: expected an integer, got None"),
        (lambda S: np.concatenate([S, S.to_dense()]), ArgumentTypeError, "operand 1: expected a sparse tensor"),
        (lambda S: np.concatenate([S, S[:1]], axis=1), ArgumentError, "operand 1: expected the extents of operand 0"),
        (lambda S: S.reshape(4, order="A"), ArgumentError, 'order: expected "C" or "F", got '),
    ],
)
def test_joining_and_reordering_that_is_refused(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(SparseTensor.from_dense(np.eye(2)))


LIKE_NUMPY = {
    "&": lambda t: (t > 0.3) & (t != 0),
    "|": lambda t: (t > 0.9) | (t > 0.1),
    "^": lambda t: (t > 0.9) ^ (t > 0.1),
    "& of an array": lambda t: np.ones((4, 5), bool) & (t > 0),
    "| of an array": lambda t: (t > 0) | np.eye(4, 5, dtype=bool),
    "//": lambda t: t // 0.3,
    "%": lambda t: t % 0.3,
    "None": lambda t: t[None],
    "None inside": lambda t: t[1:3, None, 2],
    "None behind": lambda t: t[..., None],
    "None of an element": lambda t: t[1, 2, None],
    "squeeze": lambda t: np.squeeze(t[:, :1]),
    "expand_dims": lambda t: np.expand_dims(t, (0, 2)),
    "swapaxes": lambda t: np.swapaxes(t, 0, 1),
    "moveaxis": lambda t: np.moveaxis(t[None], [0, 1], [2, 0]),
    "take": lambda t: np.take(t, [4, 0], axis=1),
    "take of all": lambda t: np.take(t, [7, 2]),
    "stack": lambda t: np.stack([t, t], axis=-1),
    "argwhere": np.argwhere,
    "tril": np.tril,
    "triu": lambda t: np.triu(t, 1),
    "kron": lambda t: np.kron(t, t),
    "outer": lambda t: np.outer(t[0], t[1]),
}
REFUSED_LIKE_NUMPY = {
    "numpy.invert.* is True": lambda t: ~(t > 0),
    "extent 1, got 0": lambda t: np.squeeze(t, 0),
    "one of 3 dimensions, got 9": lambda t: np.expand_dims(t, 9),
    "must lie in": lambda t: np.take(t, [99], axis=0),
    "two sparse matrices": lambda t: np.kron(t, np.eye(2)),
    "expected 2 axes": lambda t: np.moveaxis(t, [0, 1], [0]),
    "operand 1: expected a sparse tensor, got ndarray": lambda t: np.stack([t, np.eye(4, 5)]),
}


@pytest.mark.parametrize("name", LIKE_NUMPY)
def test_tensors_do_as_arrays_do(name: str) -> None:
    rng = np.random.default_rng(0)
    D = np.where(rng.random((4, 5)) < 0.5, np.round(rng.standard_normal((4, 5)), 2), 0)
    found, expected = LIKE_NUMPY[name](SparseTensor.from_dense(D)), np.asarray(LIKE_NUMPY[name](D))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found.to_dense() if isinstance(found, SparseTensor) else found, expected)


@pytest.mark.parametrize("message", REFUSED_LIKE_NUMPY)
def test_refusals_of_functions_of_numpy(message: str) -> None:
    with pytest.raises(SparseTIRError, match=message):
        REFUSED_LIKE_NUMPY[message](SparseTensor.from_dense(np.eye(4, 5)))


@pytest.mark.parametrize("function", [np.vstack, np.hstack])
def test_vectors_are_stacked_as_by_numpy(function: Any) -> None:
    u, v, M = np.array([1.0, 0, 2]), np.array([0, 3.0, 0]), np.eye(3)
    mixed = [u, M] if function is np.vstack else [M, M]
    for arrays in ([u, v], [v], mixed):
        tensors = [sparsetir.SparseTensor.from_dense(array) for array in arrays]
        np.testing.assert_array_equal(function(tensors).to_dense(), function(arrays))
    lists = [sp.coo_array(u), sp.coo_array(v)]
    np.testing.assert_array_equal(getattr(sparsetir, function.__name__)(lists).toarray(), function([u, v]))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_indices_select_as_in_numpy(seed: int) -> None:
    """An integer counts as a list where there is one: apart from it, the dimension of both comes first."""
    rng = np.random.default_rng(seed)
    choose = lambda *options: options[int(rng.integers(len(options)))]  # noqa: E731
    for _ in range(60):
        shape = tuple(map(int, rng.integers(1, 5, rng.integers(1, 5))))
        dense = rng.integers(0, 3, shape).astype(float)
        index: list[Any] = []
        for extent in shape[: int(rng.integers(1, len(shape) + 1))]:
            listed = [] if any(type(at) is list for at in index) else [rng.integers(0, extent, 2).tolist()]
            index.append(choose(int(rng.integers(-extent, extent)), slice(None), slice(None, None, -1), *listed))
        for extra in (None, Ellipsis):
            if rng.integers(3) == 0:
                index.insert(int(rng.integers(len(index) + 1)), extra)
        if any(at is Ellipsis for at in index):  # the indices behind it are those of the last dimensions
            index = [
                slice(None) if isinstance(at, (int, list)) and n > index.index(Ellipsis) else at
                for n, at in enumerate(index)
            ]
        selected = sparsetir.SparseTensor.from_dense(dense)[tuple(index)]
        selected = selected.to_dense() if hasattr(selected, "to_dense") else selected
        np.testing.assert_array_equal(selected, dense[tuple(index)], strict=True)
