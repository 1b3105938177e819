# SPDX-License-Identifier: Apache-2.0
"""Sums along two rows by dot-product instructions: sampled products in bfloat16 and 8 bits, and by three products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from fences import Fences
from sparsetir import CooTensor, T, build, decompose_format, formats, ops
from sparsetir.codegen.target import emulating_target, native_target
from sparsetir.errors import ArgumentError
from sparsetir.schedules import Choices, has_unit
from sparsetir.script.printer import parse
from unit_products import BF16, drawn

SHAPES = ((20, 30, 150, 0.2), (9, 7, 64, 0.6), (5, 6, 32, 1.0), (1, 1, 1, 1.0), (4, 3, 16, 0.0), (7, 9, 33, 0.5))
PAIRS = (("bfloat16", "bfloat16"), ("int8", "int8"), ("int8", "uint8"), ("uint8", "int8"))


def sampled(left: str, right: str) -> Any:
    """A sampled product whose operands may have two dtypes."""
    wide = "float32" if left == "bfloat16" else "int32"

    @T.prim_func
    def sddmm(
        s: T.handle, x: T.handle, y: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        S = T.match_sparse_buffer(s, (I, J), wide)
        X = T.match_sparse_buffer(x, (I, K), left)
        Y = T.match_sparse_buffer(y, (J_dense, K), right)
        O = T.match_sparse_buffer(o, (I, J), wide)
        with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
            with T.init():
                O[i, j] = 0
            O[i, j] = O[i, j] + S[i, j] * T.Cast(wide, X[i, k]) * T.Cast(wide, Y[j, k])

    return sddmm


def matrix(rng: np.random.Generator, m: int, n: int, density: float) -> tuple[sp.csr_array, np.ndarray]:
    """A pattern, and the rows of its entries."""
    pattern = sp.random_array((m, n), density=density, format="csr", rng=rng)
    return pattern, np.repeat(np.arange(m), np.diff(pattern.indptr))


@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_sums_are_those_of_numpy(dtypes: tuple[str, str]) -> None:
    """Also between pages that must not be read, for rows that do not fill an instruction."""
    kernel = build(sampled(*dtypes), emulating_target())
    assert f"st_dot_rows_{'bf16' if dtypes[0] == 'bfloat16' else 'int8'}" in kernel.script(stage=3)
    rng, fences = np.random.default_rng(0), Fences()
    for m, n, feat, density in SHAPES:
        pattern, rows = matrix(rng, m, n, density)
        X, Y = drawn(rng, (m, feat), dtypes[0]), drawn(rng, (n, feat), dtypes[1])
        weights = rng.integers(-4, 5, pattern.nnz).astype("float32" if dtypes[0] == "bfloat16" else "int32")
        arrays = {"indptr": pattern.indptr, "indices": pattern.indices, "S": weights}
        result = kernel(**arrays, X=fences.fenced(X), Y=fences.fenced(Y))
        dots = (X[rows].astype(float) * Y[pattern.indices].astype(float)).sum(axis=1)
        np.testing.assert_array_equal(result, weights * dots)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint8"])
def test_results_of_a_wider_dtype(dtype: str) -> None:
    wide = "float32" if dtype == "bfloat16" else "int32"
    rng = np.random.default_rng(1)
    pattern, rows = matrix(rng, 6, 8, 0.5)
    X, Y = drawn(rng, (6, 40), dtype), drawn(rng, (8, 40), dtype)
    kernel = build(ops.sddmm(dtype, result=wide), emulating_target())
    ones = np.ones(pattern.nnz, wide)
    result = kernel(indptr=pattern.indptr, indices=pattern.indices, S=ones, X=X, Y=Y)
    assert result.dtype == wide
    np.testing.assert_array_equal(result, (X[rows].astype(float) * Y[pattern.indices].astype(float)).sum(axis=1))


def test_results_of_bfloat16_are_rounded_once() -> None:
    rng = np.random.default_rng(2)
    pattern, rows = matrix(rng, 6, 8, 0.5)
    X, Y = drawn(rng, (6, 40), "bfloat16"), drawn(rng, (8, 40), "bfloat16")
    weights = drawn(rng, pattern.nnz, "bfloat16")
    kernel = build(ops.sddmm("bfloat16"), emulating_target())
    result = kernel(indptr=pattern.indptr, indices=pattern.indices, S=weights, X=X, Y=Y)
    dots = (X[rows].astype("float32") * Y[pattern.indices].astype("float32")).sum(axis=1)
    np.testing.assert_array_equal(result, (weights.astype("float32") * dots).astype(BF16))


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", "float32"), ("int8", "int32")])
def test_blocks_at_the_edges_read_no_rows_beyond_them(dtype: str, wide: str) -> None:
    program = decompose_format(ops.sddmm(dtype, result=wide), {"S": formats.make("bsr", r=4, c=4)})
    kernel = build(program, emulating_target())
    assert "st_dot_rows" in kernel.script(stage=3)
    rng, fences = np.random.default_rng(4), Fences()
    pattern, rows = matrix(rng, 6, 7, 0.4)
    X, Y = drawn(rng, (6, 37), dtype), drawn(rng, (7, 37), dtype)
    weights = rng.integers(1, 5, pattern.nnz).astype(wide)
    S = CooTensor(np.stack([rows, pattern.indices]), weights, pattern.shape)
    result = kernel(S=S, X=fences.fenced(X), Y=fences.fenced(Y))
    dense = np.zeros(pattern.shape)
    dense[rows, pattern.indices] = weights
    expected = dense * (X.astype(float) @ Y.astype(float).T)
    np.testing.assert_array_equal(result.to_dense(), expected)


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", "float32"), ("int8", "int32")])
def test_sums_along_ragged_rows(dtype: str, wide: str) -> None:
    """Rows of two sparse operands with the same entries, of any length, between pages that must not be read."""

    @T.prim_func
    def dots(
        p: T.handle, g: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        P = T.match_sparse_buffer(p, (I, J), dtype)
        G = T.match_sparse_buffer(g, (I, J), dtype)
        O = T.match_sparse_buffer(o, (I,), wide)
        with T.sp_iter([I, J], "SR", "dots") as [i, j]:
            with T.init():
                O[i] = 0
            O[i] = O[i] + T.Cast(wide, P[i, j]) * T.Cast(wide, G[i, j])

    kernel, rng, fences = build(dots, emulating_target()), np.random.default_rng(5), Fences()
    assert "st_dot_rows" in kernel.script(stage=3)
    for m, n, density in ((20, 200, 0.3), (3, 1, 1.0), (5, 40, 0.0)):
        pattern, rows = matrix(rng, m, n, density)
        P, G = (drawn(rng, pattern.nnz, dtype) for _ in range(2))
        arrays = {"indptr": pattern.indptr, "indices": pattern.indices, "n": n}
        result = kernel(P=fences.fenced(P), G=fences.fenced(G), **arrays)
        terms = P.astype(float) * G.astype(float)
        np.testing.assert_array_equal(result, np.bincount(rows, terms, m) if terms.size else np.zeros(m))


def test_infinities_and_nan_stay_in_their_sums() -> None:
    X, Y = np.ones((2, 37), BF16), np.ones((3, 37), BF16)
    X[1, 36], Y[1, 36], Y[2, 0] = np.inf, 0, np.nan
    kernel = build(ops.sddmm("bfloat16", result="float32"), emulating_target())
    pattern = sp.csr_array(np.ones((2, 3)))
    arrays = {"indptr": pattern.indptr, "indices": pattern.indices, "S": np.ones(6, "float32")}
    result = kernel(**arrays, X=X, Y=Y).reshape(2, 3)
    np.testing.assert_array_equal(result, [[37, 36, np.nan], [np.inf, np.nan, np.nan]])


@pytest.mark.parametrize("target", ["native", "emulated"])
def test_three_products_are_within_the_stated_error(target: str) -> None:
    rng = np.random.default_rng(3)
    pattern, rows = matrix(rng, 20, 30, 0.3)
    X, Y = (rng.standard_normal((n, 45)) * 10.0 ** rng.integers(-3, 4, (n, 1)) for n in (20, 30))
    X, Y, S = X.astype("float32"), Y.astype("float32"), rng.standard_normal(pattern.nnz).astype("float32")
    chosen = native_target() if target == "native" else emulating_target()
    kernel = build(ops.sddmm(precision="bf16x3"), chosen)
    assert ("st_dot_rows_bf16" in kernel.script(stage=3)) == (target == "emulated" or has_unit(chosen))
    terms = S[:, None] * X[rows].astype(float) * Y[pattern.indices].astype(float)
    error = np.abs(kernel(indptr=pattern.indptr, indices=pattern.indices, S=S, X=X, Y=Y) - terms.sum(axis=1))
    assert (error <= 3 * 2.0**-16 * np.abs(terms).sum(axis=1)).all()
    assert error.max() > 0


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("program", "code"), [("bfloat16", "vdpbf16ps"), ("int8", "vpdpbusd"), ("halves", "vdpbf16ps")]
)
def test_the_knob_leaves_vector_arithmetic(program: str, code: str) -> None:
    wide = {"bfloat16": "float32", "int8": "int32"}
    func = ops.sddmm(precision="bf16x3") if program == "halves" else ops.sddmm(program, result=wide[program])
    machine = {**native_target().export(), "mcpu": "znver4"}
    assert code in build(func, machine).source("asm")
    assert code not in build(func, machine, schedule=Choices(units=0)).source("asm")


def test_conversions_that_change_numbers_are_computed_in_vectors() -> None:
    """A factor is read by an instruction only where it is an element, or that in the dtype of the sum."""
    program = sampled("int8", "int8")
    text = program.script().replace('T.Cast("int32", X[i, k])', 'T.Cast("int32", T.Cast("uint8", X[i, k]))')
    assert text.count("uint8") == 1
    kernel = build(parse(text), emulating_target())
    assert "st_dot_rows" not in kernel.script(stage=3)


def test_other_results_are_refused() -> None:
    with pytest.raises(ArgumentError, match="result: expected bfloat16 or float32 for bfloat16, got 'int32'"):
        ops.sddmm("bfloat16", result="int32")
    with pytest.raises(ArgumentError, match="precision: expected None, or 'bf16x3' for float32, got 'bf16x3'"):
        ops.sddmm("float64", precision="bf16x3")
