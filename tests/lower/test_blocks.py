# SPDX-License-Identifier: Apache-2.0
"""Sums over blocks along a ragged row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm import tirx

import sparsetir
from sparsetir import formats
from sparsetir.formats import heuristics
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import decode
from sparsetir.lower import TO_STAGE_2, as_module, run
from sparsetir.lower.annotations import BLOCK
from sparsetir.schedules import Choices, schedule

SIZES = [(1, 4), (2, 2), (3, 3), (4, 4), (2, 5), (4, 1), (8, 1), (6, 6), (8, 8), (16, 16), (32, 4)]
SHAPES = [(40, 40), (37, 41), (1, 1), (7, 100), (100, 7), (16, 0)]


def over_blocks(size: tuple[int, int], dtype: str = "float32", idtype: str = "int32", **choices: int) -> Any:
    parts = sparsetir.decompose_format(sparsetir.ops.spmv(dtype, idtype=idtype), {"A": formats.bsr(*size)})
    return sparsetir.build(parts, schedule=Choices(**choices) if choices else None)


def scattered(shape: tuple[int, int], density: float, dtype: str) -> Any:
    rng = np.random.default_rng(sum(shape))
    return sp.csr_array(sp.random_array(shape, density=density, rng=rng, dtype=np.dtype(dtype)))


def vectors(kernel: Any) -> list[int]:
    """The lengths of the vector loops."""
    loops = collect(kernel.kernel.compiled.stage(3).body, tirx.For)
    return [int(f.extent) for f in loops if f.kind == tirx.ForKind.VECTORIZED]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_every_size(size: tuple[int, int], dtype: str) -> None:
    kernel = over_blocks(size, dtype)
    assert BLOCK in kernel.script(2) or math.prod(size) > 16  # more than some processors have registers for
    for shape in SHAPES:
        for density in (0.0, 0.1, 0.7):
            A, x = scattered(shape, density, dtype), np.random.default_rng(0).standard_normal(shape[1]).astype(dtype)
            tolerance = 50 * np.finfo(dtype).eps * max(1, A.nnz)
            np.testing.assert_allclose(kernel(A=A, x=x), A @ x, rtol=0, atol=tolerance, err_msg=f"{shape} {density}")


@pytest.mark.parametrize("choices", [{"chunks": 0}, {"chunks": 7}, {"prefetch": 8, "unroll": 2}])
def test_choices_beside_blocks(choices: dict[str, int]) -> None:
    A = scattered((61, 59), 0.2, "float32")
    x = np.random.default_rng(1).standard_normal(59).astype("float32")
    for idtype in ("int32", "int64"):
        found = over_blocks((4, 4), idtype=idtype, **choices)(A=A, x=x)
        np.testing.assert_allclose(found, A @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_blocks_are_summed_in_vectors() -> None:
    assert 4 in vectors(over_blocks((4, 4)))
    assert 3 in vectors(over_blocks((3, 3)))
    assert 8 in vectors(over_blocks((8, 1)))  # a block of one column: its rows side by side
    assert not vectors(over_blocks((64, 64)))  # more running sums than there are registers


def test_slices_of_rows_keep_their_own_loops() -> None:
    for format in (formats.sell(8, 64), formats.narrow_sell(8, 64)):
        kernel = sparsetir.build(sparsetir.decompose_format(sparsetir.ops.spmv(), {"A": format}))
        assert BLOCK not in kernel.script(2)
        assert 8 in vectors(kernel)


def test_what_is_not_finite_outside_a_matrix_is_not_read() -> None:
    A = sp.csr_array(np.ones((5, 5), np.float32))
    x = np.concatenate([np.ones(5), np.full(3, np.nan)]).astype("float32")[:5]
    np.testing.assert_array_equal(over_blocks((4, 4))(A=A, x=x), np.full(5, 5, np.float32))


@pytest.mark.parametrize(("dtype", "fits"), [("float32", True), ("bfloat16", False)])
def test_sums_of_halves_do_not_become_vectors(dtype: str, fits: bool) -> None:
    parts = sparsetir.decompose_format(sparsetir.ops.spmv(dtype), {"A": formats.bsr(4, 4)})
    second = run(TO_STAGE_2, as_module(parts.func))
    assert (BLOCK in schedule(second).mod.script()) == fits


def test_a_matrix_of_blocks_is_converted_for_many_products_with_a_vector() -> None:
    program, rng = decode(sparsetir.ops.spmv()), np.random.default_rng(2)
    full = sp.csr_array(sp.kron(sp.random_array((90, 90), density=0.1, rng=rng), np.ones((4, 4))), dtype=np.float32)
    found = heuristics.choose_format(program, full, {"x": (360,)})
    assert found is not None
    assert found.format == formats.bsr(4, 4)
    other = heuristics.choose_format(program, scattered((360, 360), 0.05, "float32"), {"x": (360,)})
    assert other is not None
    assert other.format == formats.sell(16, 1024)
    x = rng.standard_normal(360).astype("float32")
    few, many = (sparsetir.build(sparsetir.ops.spmv(), expected_calls=calls).bind(A=full) for calls in (1, 10_000))
    for bound in (few, many):
        np.testing.assert_allclose(bound(x=x), full @ x, rtol=1e-4, atol=1e-4)
    assert few.over_another is None
    assert many.over_another is not None
