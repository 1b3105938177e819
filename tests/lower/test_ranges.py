# SPDX-License-Identifier: Apache-2.0
"""Products with the entries of ranges of columns, such as 2:4: packing, numbers, degenerate matrices, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparsetir import build, ops
from sparsetir.codegen.target import cpu_target, emulating_target
from sparsetir.errors import ArgumentError
from sparsetir.runtime.signature import numpy_dtype


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("width", "density"), [(4, 0.5), (16, 0.2), (64, 0.5), (8, 0.0), (8, 1.0)])
def test_products_of_packed_matrices_are_those_of_numpy(width: int, density: float, dtype: str) -> None:
    rng = np.random.default_rng(width)
    for m, ranges, feat in ((5, 3, 7), (1, 1, 1), (9, 2, 64)):
        n = ranges * width
        matrix = np.where(rng.random((m, n)) < density, rng.integers(-9, 9, (m, n)), 0).astype(dtype)
        dense = rng.integers(-9, 9, (n, feat)).astype(dtype)
        values, places = ops.pack_ranges(matrix, width)
        kernel = build(ops.range_spmm(values.shape[2], width, dtype=dtype))
        result = kernel(A=values, X=places, B=dense.reshape(ranges, width, feat))
        np.testing.assert_array_equal(result, matrix @ dense)


SUMS = [("bfloat16", None), ("float16", None), ("int8", "uint8"), ("int8", "int8"), ("uint8", "int8")]


@pytest.mark.parametrize(("dtype", "operand", "target"), [*((*s, "emulated") for s in SUMS), (*SUMS[0], "native")])
def test_products_of_short_numbers_are_summed_in_wide_ones(dtype: str, operand: str | None, target: str) -> None:
    rng, machine = np.random.default_rng(3), emulating_target() if target == "emulated" else None
    kernels = {}
    for width, m, ranges, feat in ((64, 9, 3, 40), (64, 1, 1, 1)):
        n, halves = ranges * width, operand is None
        low, high = (-9, 10) if halves else (np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
        matrix = np.where(rng.random((m, n)) < 0.5, rng.integers(low, high, (m, n)), 0)
        matrix[0, :width] = 1  # so that both have as many slots
        dense = rng.integers(-9 if "u" not in (operand or "") else 0, 10, (n, feat))
        values, places = ops.pack_ranges(matrix.astype(numpy_dtype(dtype)), width)
        key = values.shape[2], width
        kernels.setdefault(key, build(ops.range_spmm(*key, dtype=dtype, operand=operand), machine))
        given = dense.astype(numpy_dtype(operand or dtype)).reshape(ranges, width, feat)
        result = kernels[key](A=values, X=places, B=given)
        expected = matrix @ dense
        assert result.dtype == numpy_dtype("int32" if operand else dtype)
        if halves:  # Sums of small integers are exact in float32 and rounded once.
            expected = expected.astype("float32").astype(numpy_dtype(dtype)).astype("float32")
        np.testing.assert_array_equal(result.astype(expected.dtype), expected)


@pytest.mark.optimised
@pytest.mark.parametrize(("mcpu", "sum_of_halves"), [("znver4", "vdpbf16ps"), ("sapphirerapids", "vfmadd")])
@pytest.mark.parametrize(("dtype", "operand"), [("bfloat16", None), ("int8", "uint8")])
def test_units_multiply_ranges(dtype: str, operand: str | None, mcpu: str, sum_of_halves: str) -> None:
    instruction = "vpdpbusd" if operand else sum_of_halves
    machine = cpu_target({"kind": "llvm", "mcpu": mcpu}, "kernels")
    assert instruction in build(ops.range_spmm(32, 64, dtype=dtype, operand=operand), machine).source("asm")


def test_slots_are_as_many_as_the_fullest_range_of_a_row_has() -> None:
    matrix = np.zeros((2, 8), "float32")
    matrix[0, [1, 2, 6]], matrix[1, 7] = [1, 2, 3], 4
    values, places = ops.pack_ranges(matrix, 4)
    assert values.tolist() == [[[1, 2], [0, 0]], [[3, 0], [4, 0]]]
    assert places[0, 0].tolist() == [1, 2]
    assert places[1, :, 0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.range_spmm(65), "count: expected an integer from 1 to 64, got 65"),
        (lambda: ops.range_spmm(2, 48), "width: expected a power of two up to 256, got 48"),
        (lambda: ops.range_spmm(2, 512), "width: expected an integer from 1 to 256, got 512"),
        (lambda: ops.range_spmm(2, 4, operand="int8"), "dtype: expected int8 or uint8 with an operand, got 'float32'"),
        (lambda: ops.range_spmm(2, 4, dtype="int8", operand="int4"), "operand: expected int8 or uint8 with an operand"),
        (lambda: ops.pack_ranges(np.ones((3, 10))), "matrix: expected a matrix with a multiple of 64 columns"),
        (lambda: ops.pack_ranges([1, 2]), "matrix: expected a matrix with a multiple of 64 columns, got list"),
    ],
)
def test_other_sizes_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_matrix_without_rows_has_ranges_too() -> None:
    values, places = ops.pack_ranges(np.zeros((0, 8), "float32"), 4)
    assert values.shape == places.shape == (2, 0, 1)
