# SPDX-License-Identifier: Apache-2.0
"""Sums by dot-product instructions: numbers over CSR and blocks, degenerate matrices, infinities and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from fences import Fences
from sparsetir import CooTensor, T, build, decompose_format, formats, ops
from sparsetir.codegen.target import emulating_target, native_target
from sparsetir.errors import ArgumentError
from sparsetir.ir.halves import by_three_products
from sparsetir.schedules import Choices, Registers
from sparsetir.schedules.registers import WIDENING
from sparsetir.script.printer import parse
from unit_products import BF16, drawn, program

PAIRS = (
    ("bfloat16", "bfloat16", "float32"),
    ("int8", "uint8", "int32"),
    ("uint8", "int8", "int32"),
    ("int8", "int8", "int32"),
)
SHAPES = ((40, 50, 130, 0.1), (33, 27, 65, 0.3), (1, 1, 1, 1.0), (8, 9, 16, 0.0), (13, 11, 7, 0.5), (9, 8, 17, 0.4))


def units() -> Any:
    """The target of this machine, with emulated units if it lacks any or widens bfloat16 numbers instead."""
    native, registers = native_target(), Registers.of(native_target())
    return native if {"bf16", "int8"} <= registers.units and WIDENING not in registers.units else emulating_target()


@pytest.mark.parametrize(
    ("dtypes", "how", "function"), [*((pair, 1, "st_dot") for pair in PAIRS), (PAIRS[0], 2, "st_fma")], ids=str
)
@pytest.mark.parametrize("rows", [0, 9, 48], ids=["csr", "blocks", "blocks in a loop"])
def test_sums_are_those_of_numpy(dtypes: tuple[str, str, str], how: int, function: str, rows: int) -> None:
    func = program(*dtypes)
    if rows:
        func = decompose_format(func, {"A": formats.make("bsr", r=rows, c=4)})
    kernel = build(func, units(), schedule=Choices(tiles=0, units=how))
    assert function in kernel.script(stage=3)
    rng = np.random.default_rng(0)
    for m, n, feat, density in SHAPES:
        places = sp.random_array((m, n), density=density, format="coo", rng=rng)
        values, B = drawn(rng, places.nnz, dtypes[0]), drawn(rng, (n, feat), dtypes[1])
        A = sp.csr_array((values.astype(np.float64), (places.row, places.col)), shape=(m, n))
        result = kernel(A=CooTensor(np.stack([places.row, places.col]), values, (m, n)), B=B)
        np.testing.assert_array_equal(np.asarray(result, np.float64), A @ B.astype(np.float64))


@pytest.mark.parametrize("how", [1, 2])
def test_a_lonely_last_entry_keeps_infinities_and_nan_where_they_are(how: int) -> None:
    coords = np.array([[0, 0, 0, 1], [0, 1, 2, 2]])
    A = CooTensor(coords, np.ones(4, BF16), (2, 3))
    B = np.zeros((3, 40), BF16)
    B[2, 0], B[2, 1], B[0, 2], B[1, 3] = np.inf, np.nan, -np.inf, np.nan
    out = np.asarray(build(ops.spmm("bfloat16"), units(), schedule=Choices(units=how))(A=A, B=B), np.float32)
    expected = np.zeros((2, 40), np.float32)
    expected[:, 0], expected[:, 1], expected[0, 2], expected[0, 3] = np.inf, np.nan, -np.inf, np.nan
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    "term",
    ['T.Cast("int32", T.Cast("uint8", A[i, j])) * T.Cast("int32", B[j, k])', 'T.Cast("int32", A[i, j] * B[j, k])'],
)
def test_conversions_that_change_numbers_are_computed(term: str) -> None:
    """Instructions read elements: they skip no conversion that changes a number, and none of a product that wraps."""
    plain = 'T.Cast("int32", A[i, j]) * T.Cast("int32", B[j, k])'
    text = program("int8", "int8", "int32").script()
    kernel = build(parse(text.replace(plain, term)), emulating_target())
    A, B = sp.csr_array(np.array([[-3, 100]], "int8")), np.full((2, 20), 3, "int8")
    expected = 253 * 3 + 300 if "uint8" in term else -9 + 300 - 256
    np.testing.assert_array_equal(kernel(A=A, B=B), np.full((1, 20), expected))


@pytest.mark.optimised
def test_the_knob_leaves_vector_arithmetic() -> None:
    machine = {**native_target().export(), "mcpu": "znver4"}
    assert "vdpbf16ps" in build(ops.spmm("bfloat16"), machine).source("asm")
    assert "vdpbf16ps" not in build(ops.spmm("bfloat16"), machine, schedule=Choices(units=0)).source("asm")


@pytest.mark.optimised
def test_processors_with_slow_dot_products_widen_bfloat16() -> None:
    machine = {**native_target().export(), "mcpu": "sapphirerapids"}
    for func in (ops.spmm("bfloat16"), ops.linear("bfloat16")):
        code = build(func, machine).source("asm")
        assert code.count("vfmadd") > code.count("vdpbf16ps")


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_up_to_sixteen_columns_take_one_instruction_for_a_group_of_terms(kind: str) -> None:
    """The rows of a group are interleaved in one register: no half of it is computed in vain."""
    func = ops.spmm("bfloat16") if kind == "bf16" else ops.quantized_spmm("int8", "uint8")
    lines = build(func, emulating_target()).script(stage=3).splitlines()
    loads = [n for n, line in enumerate(lines) if f"st_few_{kind}" in line]
    assert loads
    assert all([f"st_dot_bs_{kind}" in line for line in lines[n + 1 : n + 3]] == [True, False] for n in loads)


KNOBS = {
    "tile": (16, 64, 128, 256), "chunks": (0, 1, 3, 6), "unroll": (1, 2), "prefetch": (0, 8), "stream": (0, 1),
    "carry": (0, 1), "panel": (0, 32),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16", "bfloat16"), *PAIRS[:2]])
def test_with_other_choices(types: Any, seed: int) -> None:
    """Rows that are cut, shared, streamed or taken in panels have the same sums."""
    a_type, b_type, c_type = types
    rng = np.random.default_rng([seed, len(c_type)])
    m, n, feat = rng.integers(1, (9, 2000, 150))
    choices = Choices(units=1 + seed % 2, **{name: int(rng.choice(values)) for name, values in KNOBS.items()})
    A = sp.random_array((m, n), density=rng.choice([0.01, 0.3, 1.0]), format="csr", rng=rng).astype(np.float32)
    A.data = drawn(rng, A.nnz, a_type).astype(np.float32)
    B = drawn(rng, (n, feat), b_type)
    kernel = build(ops.spmm("bfloat16") if c_type == "bfloat16" else program(*types), units(), schedule=choices)
    values = A.data.astype(B.dtype if a_type == b_type else a_type)
    coo = A.tocoo()
    result = np.asarray(kernel(A=CooTensor(np.stack([coo.row, coo.col]), values, A.shape), B=B))
    expected = A.astype(np.float64) @ B.astype(np.float64)
    if c_type == "bfloat16":
        np.testing.assert_array_equal(result, expected.astype(np.float32).astype(BF16))
    else:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("scratch", ["bfloat16", "float32"])
@pytest.mark.parametrize("feat", [9, 64, 100])
def test_sums_in_scratch_are_read_again(scratch: str, feat: int) -> None:

    @T.prim_func
    def twice(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), "bfloat16")
        B = T.match_sparse_buffer(b, (J_dense, K), "bfloat16")
        C = T.match_sparse_buffer(c, (I, K), "bfloat16")
        Q = T.alloc_sparse_buffer((I, K), scratch)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                Q[i, k] = 0
            Q[i, k] = Q[i, k] + T.Cast(scratch, A[i, j]) * T.Cast(scratch, B[j, k])
        with T.sp_iter([I, K], "SS", "twice") as [i, k]:
            C[i, k] = T.Cast("bfloat16", Q[i, k]) * T.Cast("bfloat16", 2.0)

    rng = np.random.default_rng(feat)
    A = sp.random_array((30, 50), density=0.2, format="coo", rng=rng)
    values, B = drawn(rng, A.nnz, "bfloat16"), drawn(rng, (50, feat), "bfloat16")
    dense = np.zeros(A.shape)
    dense[A.coords] = values.astype(float)
    expected = ((dense @ B.astype(float)).astype(np.float32).astype(BF16) * BF16.type(2)).astype(BF16)
    result = build(twice, units())(A=CooTensor(np.stack(A.coords), values, A.shape), B=B)
    np.testing.assert_array_equal(np.asarray(result), expected)


@pytest.mark.parametrize("feat", [5, 64])
def test_three_products_of_halves_are_within_the_stated_error(feat: int) -> None:
    rng = np.random.default_rng(feat)
    A = sp.random_array((40, 60), density=0.3, format="csr", rng=rng, dtype=np.float32)
    A.data[:] = rng.standard_normal(A.nnz) * 10.0 ** rng.integers(-3, 4, A.nnz)
    B = (rng.standard_normal((60, feat)) * 10.0 ** rng.integers(-3, 4, (60, 1))).astype(np.float32)
    kernel = build(ops.spmm(precision="bf16x3"), units())
    expected, magnitudes = A.astype(float) @ B.astype(float), abs(A).astype(float) @ abs(B).astype(float)
    error = np.abs(kernel(A=A, B=B) - expected)
    assert (error <= 3 * 2.0**-16 * magnitudes).all()
    assert error.sum() < 2.0**-18 * magnitudes.sum()  # errors of many terms cancel out
    rounded = A.data.astype(BF16).astype(float)
    of_high_halves = sp.csr_array((rounded, A.indices, A.indptr), A.shape) @ B.astype(BF16).astype(float)
    assert np.abs(of_high_halves - expected).max() > 20 * error.max()
    loops = kernel.script(stage=3)
    assert "st_get_float32" in loops  # the second and third sums add to the first
    assert all(name in loops for name in ("A_high", "A_low", "B_high", "B_low"))


STORED = {
    "csr": sp.csr_array, "csc": sp.csc_array, "coo": sp.coo_array, "dcsr": sp.csr_array, "ell": sp.csr_array,
    "bsr": lambda A: A.tobsr((4, 4)),
}  # fmt: skip


def _within_the_stated_error(result: Any, A: Any, B: np.ndarray) -> bool:
    expected, magnitudes = A.astype(float) @ B.astype(float), abs(A).astype(float) @ abs(B).astype(float)
    return bool((np.abs(np.reshape(result, expected.shape) - expected) <= 3 * 2.0**-16 * magnitudes).all())


@pytest.mark.slow
@pytest.mark.parametrize("format", STORED)
def test_every_format_has_three_products(format: str) -> None:
    rng = np.random.default_rng(1)
    kernel = build(ops.spmm(format=format, precision="bf16x3"), units())
    for m, n, feat, density in ((40, 60, 33, 0.2), (4, 8, 1, 0.0), (8, 4, 5, 1.0)):
        A = sp.random_array((m, n), density=density, format="csr", rng=rng, dtype=np.float32)
        B = rng.standard_normal((n, feat)).astype(np.float32)
        dense = B.reshape(n // 4, 4, feat) if format == "bsr" else B
        assert _within_the_stated_error(kernel(A=STORED[format](A), B=dense), A, B)


@pytest.mark.slow
@pytest.mark.parametrize("format", [("sr_bcrs", {"t": 16, "g": 32}), ("bsr", {"r": 16, "c": 32})])
def test_row_vectors_and_blocks_use_units_for_three_products(format: tuple[str, dict[str, int]]) -> None:
    """Padding of the halves is zero, as that of the entries is: no entry is guarded."""
    name, options = format
    program = decompose_format(ops.spmm(precision="bf16x3"), {"A": formats.make(name, **options)})
    kernel = build(program, emulating_target())
    rng = np.random.default_rng(2)
    A = sp.random_array((30, 50), density=0.2, format="csr", rng=rng, dtype=np.float32)
    B = rng.standard_normal((50, 33)).astype(np.float32)
    assert _within_the_stated_error(kernel(A=A, B=B), A, B)
    loops = kernel.script(stage=3)
    assert "tdpbf16ps" in loops
    assert "valid" not in loops


@pytest.mark.slow
def test_three_products_of_a_linear_layer() -> None:
    rng = np.random.default_rng(3)
    A = sp.random_array((30, 50), density=0.2, format="csr", rng=rng, dtype=np.float32)
    X = rng.standard_normal((7, 50)).astype(np.float32)
    kernel = build(ops.linear(precision="bf16x3"), units())
    assert _within_the_stated_error(kernel(A=A, X=X).T, A, X.T)
    assert "st_few_bf16" in kernel.script(stage=3)


def layer(a_type: str, x_type: str, y_type: str) -> Any:
    """A linear layer in these dtypes, whose operand has columns of the product as rows."""

    @T.prim_func
    def linear(
        a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, batch: T.int32,
    ):  # fmt: skip
        O = T.dense_fixed(m)
        I = T.sparse_variable(O, (n, nnz), (indptr, indices))
        I_dense = T.dense_fixed(n)
        B = T.dense_fixed(batch)
        A = T.match_sparse_buffer(a, (O, I), a_type)
        X = T.match_sparse_buffer(x, (B, I_dense), x_type)
        Y = T.match_sparse_buffer(y, (B, O), y_type)
        with T.sp_iter([O, I, B], "SRS", "linear") as [o, i, b]:
            with T.init():
                Y[b, o] = 0
            Y[b, o] = Y[b, o] + T.Cast(y_type, A[o, i]) * T.Cast(y_type, X[b, i])

    return linear


@pytest.mark.parametrize("dtypes", [*PAIRS[:3], ("bfloat16", "bfloat16", "bfloat16")], ids="-".join)
def test_linear_layers_pack_rows_for_dot_products(dtypes: tuple[str, str, str]) -> None:
    kernel = build(ops.linear("bfloat16") if dtypes[2] == "bfloat16" else layer(*dtypes), emulating_target())
    assert "st_dot" in kernel.script(stage=3)
    rng = np.random.default_rng(5)
    for m, n, batch, density in (
        (40, 50, 150, 0.1),
        (70, 27, 65, 0.3),
        (1, 1, 1, 1.0),
        (8, 9, 16, 0.0),
        (33, 8, 7, 0.5),
    ):
        pattern = sp.random_array((m, n), density=density, format="csr", rng=rng)
        values, X = drawn(rng, pattern.nnz, dtypes[0]), drawn(rng, (batch, n), dtypes[1])
        A = sp.csr_array((values.astype(float), pattern.indices, pattern.indptr), pattern.shape)
        result = kernel(A=values, X=Fences().fenced(X), indptr=A.indptr, indices=A.indices)
        expected = (A @ X.T.astype(float)).T
        expected = expected.astype(np.float32).astype(BF16) if dtypes[2] == "bfloat16" else expected
        np.testing.assert_array_equal(np.asarray(result, float), np.asarray(expected, float))


@pytest.mark.optimised
def test_linear_layers_have_the_instruction() -> None:
    machine = {**native_target().export(), "mcpu": "znver4"}
    assert "vdpbf16ps" in build(ops.linear("bfloat16"), machine).source("asm")
    assert "vdpbf16ps" not in build(ops.linear("bfloat16"), machine, schedule=Choices(units=0)).source("asm")


def test_only_sums_of_products_of_float32_have_halves() -> None:
    with pytest.raises(ArgumentError, match=r"precision: expected None, or 'bf16x3' .* got 'bf16x3' for float64"):
        ops.spmm("float64", precision="bf16x3")
    with pytest.raises(ArgumentError, match=r"got 'high' for float32"):
        ops.spmm(precision="high")
    with pytest.raises(ArgumentError, match=r"without sums of products of two float32 elements"):
        by_three_products(ops.triangles())


INTEGERS = ("int8", "uint8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "operand", "format"),
    [*((a, b, None) for a in INTEGERS for b in INTEGERS), ("int8", "uint8", ("bsr", {"r": 2, "c": 4}))],
)
def test_quantized_products_fold_scales_zero_points_and_bias(entries: str, operand: str, format: Any) -> None:
    program = ops.quantized_spmm(entries, operand, zero_point=True, bias=True)
    if format is not None:
        program = decompose_format(program, {"A": formats.make(format[0], **format[1])})
    kernel = build(program, emulating_target())
    rng = np.random.default_rng(4)
    for m, n, feat, density in ((33, 50, 21, 0.3), (1, 1, 1, 1.0), (5, 9, 64, 0.0)):
        places = sp.random_array((m, n), density=density, format="csr", rng=rng)
        A = sp.csr_array((drawn(rng, places.nnz, entries), places.indices, places.indptr), places.shape)
        B, zero = drawn(rng, (n, feat), operand), drawn(rng, 1, operand).astype("int32")
        scale, bias = rng.random(m, dtype=np.float32), rng.standard_normal(m).astype(np.float32)
        sums = A.astype(np.int64) @ (B.astype(np.int64) - int(zero[0]))
        expected = sums.astype(np.float32) * scale[:, None] + bias[:, None]
        result = kernel(A=A, B=B, scale=scale, zero_point=zero, bias=bias)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_quantized_products_without_options() -> None:
    A, B = sp.csr_array(np.array([[2, 0], [-1, 3]], "int8")), np.array([[5], [-7]], "int8")
    kernel = build(ops.quantized_spmm(idtype="int64"), units())
    assert kernel(A=A, B=B, scale=np.array([0.5, 2], "float32")).tolist() == [[5.0], [-52.0]]
    with pytest.raises(ArgumentError, match="operand: expected int8 or uint8, got 'float32'"):
        ops.quantized_spmm("int8", "float32")


@pytest.mark.optimised
def test_quantized_products_use_dot_products() -> None:
    machine = {**native_target().export(), "mcpu": "znver4"}
    assert "vpdpbusd" in build(ops.quantized_spmm("int8", "uint8", zero_point=True), machine).source("asm")


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [PAIRS[0], PAIRS[2]], ids="-".join)
def test_sums_are_added_to_what_is_there(dtypes: tuple[str, str, str]) -> None:
    parts = decompose_format(program(*dtypes), {"A": formats.make("hyb", c=2, widths=(2, 4))})
    kernel = build(parts, units())
    rng = np.random.default_rng(3)
    places = sp.random_array((30, 40), density=0.2, format="coo", rng=rng)
    values, B = drawn(rng, places.nnz, dtypes[0]), drawn(rng, (40, 33), dtypes[1])
    A = sp.csr_array((values.astype(np.float64), places.coords), shape=places.shape)
    result = kernel(A=CooTensor(np.stack(places.coords), values, places.shape), B=Fences().fenced(B))
    np.testing.assert_array_equal(np.asarray(result, np.float64), A @ B.astype(np.float64))
