# SPDX-License-Identifier: Apache-2.0
"""Values of sparse tensors are numbers: text, dates, records and objects are refused where a tensor is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.errors import ArgumentTypeError

NO_NUMBERS = ["U1", "S2", "M8[s]", "m8[s]", "O", [("a", "f4")]]
NUMBERS = ["int8", "uint64", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "longdouble", "complex64", "bool"]
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "from_any": lambda tensor, other: sparsetir.SparseTensor.from_any(other),
    "from_coo": lambda tensor, other: sparsetir.SparseTensor.from_coo(tensor.coords, other.data, tensor.shape),
    "with_values": lambda tensor, other: tensor.with_values(other.data),
    "operand of >": lambda tensor, other: tensor > other,
    "operand of +": lambda tensor, other: tensor + other,
    "operand of @": lambda tensor, other: tensor @ other,
}


def matrix(dtype: Any) -> sp.csr_array:
    """A diagonal matrix with values of a dtype that scipy itself may not make."""
    made = sp.eye_array(3, format="csr", dtype="float32")
    made.data = np.zeros(3, dtype)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_no_numbers_are_refused(way: str) -> None:
    tensor = sparsetir.SparseTensor.from_any(matrix("float32"))
    for dtype in NO_NUMBERS:
        with pytest.raises(ArgumentTypeError):
            WAYS[way](tensor, matrix(dtype))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_of_every_dtype_are_taken(dtype: Any) -> None:
    assert sparsetir.SparseTensor.from_any(matrix(dtype)).dtype == np.dtype(dtype)


@pytest.mark.parametrize("operation", [sparsetir.matmul, sparsetir.add, sparsetir.subtract, sparsetir.multiply])
def test_damaged_operands_beside_complex_ones_are_refused(operation: Callable[..., Any]) -> None:
    damaged, other = matrix("float32"), matrix("complex128")
    damaged.data = damaged.data[:-1]
    others = [damaged, *(np.zeros((3, 3), dtype) for dtype in NO_NUMBERS)]
    for operands in [pair for one in others for pair in ((one, other), (other, one))]:
        with pytest.raises(sparsetir.SparseTIRError):
            operation(*operands)


@pytest.mark.parametrize("name", ["csr", "csc", "coo", "ell"])
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.float8_e4m3fn])
def test_dense_copies_lie_in_rows(name: str, dtype: Any) -> None:
    """As numpy's, also where scipy copies by columns."""
    dense = np.array([[0.0, 1, 0], [2, 0, 3]])
    tensor = sparsetir.SparseTensor.from_dense(dense, name)
    dense = dense.astype(dtype)
    found = tensor.with_values(tensor.values.astype(dtype)).to_dense()
    np.testing.assert_array_equal(found, dense)
    assert (found.dtype, found.flags.c_contiguous) == (dense.dtype, True)


@pytest.mark.parametrize("name", ["csr", "csc", "coo"])
def test_transposed_tensors_share_no_memory(name: str) -> None:
    dense = np.array([[0.0, 1, 0], [2, 0, 3]])
    tensor = sparsetir.SparseTensor.from_dense(dense, name)
    flipped = sparsetir.einsum("ij->ji", tensor)
    np.testing.assert_array_equal(flipped.to_dense(), dense.T)
    flipped.values[:] = 7
    np.testing.assert_array_equal(tensor.to_dense(), dense)


@pytest.mark.parametrize("name", ["csr", "csc"])
def test_a_transposed_matrix_shares_index_arrays(name: str) -> None:
    rng = np.random.default_rng(0)
    dense = np.where(rng.random((6, 5)) < 0.4, rng.integers(1, 9, (6, 5)), 0).astype(np.float64)
    tensor = sparsetir.SparseTensor.from_dense(dense, name)
    flipped = tensor.T
    assert flipped.format.name == {"csr": "csc", "csc": "csr"}[name]
    assert np.shares_memory(flipped.compressed.indices, tensor.compressed.indices)
    assert flipped.T.format == tensor.format
    x, B = rng.random(6), rng.random((6, 3))
    for operation in (
        lambda S: S @ x,
        lambda S: S @ B,
        lambda S: B.T @ S.T,
        lambda S: (S + S).to_dense(),
        lambda S: (S * S).to_dense(),
        lambda S: (S @ S.T).to_dense(),
        lambda S: S.sum(axis=0),
        lambda S: S.max(axis=1),
        lambda S: S[1:3].to_dense(),
        lambda S: S[:, [2, 0]].to_dense(),
        lambda S: (S > 3).to_dense(),
        lambda S: (-S).to_dense(),
        lambda S: (S * x).to_dense(),
        lambda S: sparsetir.SparseTensor.from_any(S.to_coo()).to_dense(),
        lambda S: S.reshape(3, 10).to_dense(),
        lambda S: S.to_dense(),
    ):
        copied = sparsetir.SparseTensor.from_dense(dense.T)
        np.testing.assert_allclose(operation(flipped), operation(copied))


@pytest.mark.parametrize("name", ["csr", "csc", "coo", "dcsr", "ell", "bsr", "dia"])
def test_values_written_in_place_are_seen_or_refused(name: str) -> None:
    dense = np.array([[0.0, 1, 0, 4], [2, 0, 3, 0], [5, 0, 0, 0], [0, 0, 0, 6]])
    tensor = sparsetir.SparseTensor.from_dense(dense, name)
    values = tensor.values
    if values.flags.writeable:
        values[:] *= 2
        np.testing.assert_array_equal(tensor @ np.eye(4), 2 * dense)
        np.testing.assert_array_equal((tensor + tensor).to_dense(), 4 * dense)
        np.testing.assert_array_equal(tensor.to_dense(), 2 * dense)
    else:
        with pytest.raises(ValueError, match="read-only"):
            values[:] = 2
        doubled = tensor.with_values(values * 2)
        np.testing.assert_array_equal(doubled @ np.eye(4), 2 * dense)
        np.testing.assert_array_equal(tensor @ np.eye(4), dense)


@pytest.mark.parametrize("name", ["csr", "csc", "coo"])
def test_dense_copies_add_up_what_repeats(name: str) -> None:
    """The tensor has duplicates, and was trusted to have none."""
    make = {"csr": sp.csr_array, "csc": sp.csc_array, "coo": None}[name]
    matrix = (
        sp.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(2, 2))
        if make is None
        else make(([1.0, 2.0], [1, 1], [0, 2, 2]), shape=(2, 2))
    )
    tensor = sparsetir.SparseTensor.from_any(matrix, name, check=False)
    np.testing.assert_array_equal(tensor.to_dense(), matrix.toarray())
