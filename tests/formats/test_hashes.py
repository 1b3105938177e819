# SPDX-License-Identifier: Apache-2.0
"""Hashes and keys of values: equal for equal arrays however they lie in memory, different for any other bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sparsetir
from sparsetir.errors import ArgumentTypeError
from sparsetir.formats.pattern import hash_arrays, hash_indices
from sparsetir.utils.caches import exact

FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
WEIGHTS = hnp.arrays(st.sampled_from(FLOATS), hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4))
BITS = {2: "u2", 4: "u4", 8: "u8", 16: "u8"}


def hashed(*arrays: np.ndarray) -> str:
    return hash_arrays("", arrays)


@given(WEIGHTS, st.data())
def test_one_bit_makes_another_hash(weights: np.ndarray, data: st.DataObject) -> None:
    other = np.array(weights, order="C")
    bits = other.reshape(-1).view(BITS[other.itemsize])
    at = data.draw(st.integers(0, bits.size - 1))
    bits[at] ^= bits.dtype.type(1 << data.draw(st.integers(0, 8 * bits.itemsize - 1)))
    assert hashed(weights) != hashed(other)


@given(hnp.arrays(st.sampled_from(("float32", "float64")), 4, elements={"min_value": 0, "max_value": 1}))
def test_a_neighbouring_number_makes_another_hash(weights: np.ndarray) -> None:
    assert hashed(weights) != hashed(np.nextafter(weights, weights.dtype.type(2)))


@pytest.mark.parametrize("dtype", [*FLOATS, ml_dtypes.bfloat16])
def test_the_sign_of_zero_enters(dtype: object) -> None:
    zero = np.zeros(3, dtype)
    assert hashed(zero) != hashed(-zero)


def test_dtype_shape_and_order_enter() -> None:
    weights = np.arange(12.0)
    arrays = [weights.astype(dtype) for dtype in (*FLOATS, ml_dtypes.bfloat16, "int32", "int64", "uint64")]
    arrays += [weights.reshape(shape) for shape in ((3, 4), (4, 3), (1, 12), (12, 1))]
    arrays += [weights[::-1], weights.reshape(3, 4).T, weights.view("int64"), weights.view("uint64")]
    arrays += [np.zeros(shape, dtype) for shape in ((0,), (0, 2), (2, 0)) for dtype in ("float32", "float64")]
    assert len({hashed(array) for array in arrays}) == len(arrays)


def test_where_one_array_ends_and_the_next_begins_enters() -> None:
    weights = np.arange(6.0)
    cuts = [[weights], *([weights[:at], weights[at:]] for at in range(7))]
    assert len({hashed(*arrays) for arrays in cuts}) == len(cuts)
    assert hash_arrays("a", [weights]) != hash_arrays("b", [weights])


@given(WEIGHTS)
def test_memory_layout_and_byte_order_do_not_enter(weights: np.ndarray) -> None:
    spaced = np.zeros((*weights.shape, 2), weights.dtype)
    spaced[..., 1] = weights
    equal = [np.asfortranarray(weights).reshape(weights.shape), spaced[..., 1], weights.copy()]
    equal += [weights.astype(weights.dtype.newbyteorder(order)) for order in "<>"]
    assert {hashed(array) for array in equal} == {hashed(weights)}


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="array: expected numbers, got dtype object"):
        hash_arrays("", [np.array([{}, {}])])
    with pytest.raises(ArgumentTypeError, match="array: expected integers, got dtype float32"):
        hash_indices("", [np.ones(2, "float32")])


def test_exact_keys_differ_where_python_says_equal() -> None:
    values = [0, 0.0, -0.0, False, np.float32(0), np.float64(0), 0j, 1, 1.0, True, (0.0,), (-0.0,), ((0,),), ((0.0,),)]
    assert len({exact(value) for value in values}) == len(values)
    assert exact(float("nan")) == exact(float("nan"))


def test_options_of_fused_functions_differ_in_the_sign_of_zero() -> None:
    @sparsetir.fused
    def scaled(x: object, factors: tuple[float, ...] = ()) -> object:
        return x * factors[0]

    x = np.ones(3)
    signs = [np.signbit(scaled(x, factors=(factor,))).any() for factor in (0.0, -0.0)]
    assert signs == [False, True]


def test_graphs_that_share_row_pointers_keep_their_own_columns() -> None:
    torch = pytest.importorskip("torch")
    from sparsetir.torch.structure import GraphRows, known

    indptr = np.array([0, 1, 2], "int32")
    columns = [np.array(c, "int32") for c in ([0, 1], [1, 0])]
    graphs = [GraphRows(indptr, indices, 2) for indices in columns]
    for graph, indices in zip(graphs, columns, strict=True):
        assert known(torch.from_numpy(indptr), torch.from_numpy(indices), 2) is graph
    wider = known(torch.from_numpy(indptr), torch.from_numpy(columns[0]), 5)
    assert wider is not graphs[0]
    assert wider.columns == 5
