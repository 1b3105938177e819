# SPDX-License-Identifier: Apache-2.0
"""Infinities and NaN reach no results but those that use them, unless the user chose the format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsetir
from sparsetir import formats, kernel_factory
from sparsetir.formats import heuristics
from sparsetir.formats.format import Format
from sparsetir.ir.views import decode
from sparsetir.runtime import adaptive, validation
from sparsetir.tuning.space import Candidate
from sparsetir.tuning.tuned_kernel import TunedKernel, Variant

MANY = 10**9
FILLING = [formats.bsr(2, 2), formats.dia(), formats.sr_bcrs(4, 4), formats.hdia(4), formats.ragged()]
OTHERS = [formats.ell(), formats.sell(4, 8), formats.hyb(2, widths=(1, 4)), formats.coo()]

RELU = """
@T.prim_func
def spmm_relu(a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
              m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_dense, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, k]:
        with T.init():
            C[i, k] = T.float32(0)
        C[i, k] = C[i, k] + A[i, j] * B[j, k]
    with T.sp_iter([I, K], "SS", "relu") as [i, k]:
        C[i, k] = T.max(C[i, k], T.float32(0))
"""


def blocks(rng: np.random.Generator, size: int = 4, rows: int = 120) -> Any:
    """Blocks at random places of which some elements are no entries."""
    mask = sp.random_array((rows // size, rows // size), density=0.1, rng=rng)
    A = sp.kron(mask, np.ones((size, size)), format="csr").astype(np.float32)
    A.data[rng.random(A.nnz) < 0.1] = 0
    A.eliminate_zeros()
    return sp.csr_array(A)


def spoilt(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    B = rng.standard_normal(shape).astype(np.float32)
    for value in (np.inf, -np.inf, np.nan):
        B[tuple(rng.integers(0, n) for n in shape)] = value
    return B


@pytest.mark.parametrize("format", [*FILLING, *OTHERS], ids=repr)
def test_formats_tell_whether_they_multiply_zeros(format: Format) -> None:
    program, rng = sparsetir.ops.spmm(), np.random.default_rng(0)
    parts = sparsetir.decompose_format(program, {"A": format})
    assert parts.multiplies_zeros is (format in FILLING)
    A = sp.random_array((24, 24), density=0.15, format="csr", dtype="float32", rng=rng)
    B = spoilt(rng, (24, 8))
    careful = sparsetir.decompose_format(program, {"A": format}, assume_finite=False)
    assert not careful.multiplies_zeros
    np.testing.assert_allclose(sparsetir.build(careful)(A=A, B=B), A @ B, rtol=1e-4, atol=1e-5)


def test_zeros_that_meet_no_numbers_are_harmless() -> None:
    rows = sparsetir.parse(RELU.replace(" * B[j, k]", "").replace("spmm_relu", "sums"))
    assert not sparsetir.decompose_format(rows, {"A": formats.bsr(4, 4)}).multiplies_zeros
    sddmm = sparsetir.decompose_format(sparsetir.ops.sddmm(), {"S": formats.bsr(4, 4)})
    assert not sddmm.multiplies_zeros  # what lands between the entries is nobody's
    assert not sparsetir.decompose_format(sparsetir.ops.spmm("int32"), {"A": formats.bsr(4, 4)}).multiplies_zeros


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["spmm", "spmv", "relu"]), st.booleans(), st.booleans())
def test_a_kernel_for_many_calls_keeps_them_apart(seed: int, op: str, is_spoilt: bool, is_tall: bool) -> None:
    rng = np.random.default_rng(seed)
    A = blocks(rng)[:, : 40 if is_tall else 120]
    name, shape = ("x", A.shape[1:]) if op == "spmv" else ("B", (A.shape[1], 8))
    program = sparsetir.parse(RELU) if op == "relu" else getattr(sparsetir.ops, op)()
    fast, plain = sparsetir.build(program, expected_calls=MANY).bind(A=A), sparsetir.build(program).bind(A=A)
    for _ in range(3):  # the first call, the plan, and what goes past it
        B = spoilt(rng, shape) if is_spoilt else rng.standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(fast(**{name: B}), plain(**{name: B}), rtol=1e-3, atol=1e-4)
    out = np.zeros((120, 8) if op != "spmv" else 120, np.float32)
    given = {name: B, "y" if op == "spmv" else "C": out}
    assert fast(**given) is out
    np.testing.assert_allclose(out, plain(**{name: B}), rtol=1e-3, atol=1e-4)
    assert fast.over_another is not None


def test_full_blocks_need_no_watch() -> None:
    A = sp.kron(sp.random_array((30, 30), density=0.1, rng=np.random.default_rng(0)), np.ones((4, 4)), format="csr")
    A, B = sp.csr_array(A.astype(np.float32)), spoilt(np.random.default_rng(1), (120, 16))
    bound = sparsetir.build(sparsetir.ops.spmm(), expected_calls=MANY).bind(A=A)
    np.testing.assert_allclose(bound(B=B), A @ B, rtol=1e-4)
    assert bound.over_another is not None
    assert not isinstance(bound.over_another, validation.GuardedBound)


def test_a_promise_saves_the_look() -> None:
    A, B = blocks(np.random.default_rng(0)), np.ones((120, 16), np.float32)
    for promised in (False, True):
        bound = sparsetir.build(sparsetir.ops.spmm(), expected_calls=MANY, assume_finite=promised).bind(A=A)
        np.testing.assert_allclose(bound(B=B), A @ B, rtol=1e-4)
        assert isinstance(bound.over_another, validation.GuardedBound) is not promised


def test_the_smaller_ones_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of a tall matrix, and its results where those are not finite."""
    monkeypatch.setattr(adaptive, "SHORT_CALL", 10.0)  # seconds: the other format is kept without a trial
    looked: list[int] = []
    has_nan = validation.has_nan
    monkeypatch.setattr(validation, "has_nan", lambda found: looked.append(found.size) or has_nan(found))
    A = blocks(np.random.default_rng(0))
    found = [heuristics.Conversion(formats.bsr(4, 4), 0.0)]
    monkeypatch.setattr("sparsetir.kernel_factory._conversions_for", lambda *_, **__: found)
    for matrix, count in ((A[:, :40], 0), (A, 5), (A[:40], 5)):
        bound = sparsetir.build(sparsetir.ops.spmm(), expected_calls=MANY).bind(A=matrix)
        B = np.ones((matrix.shape[1], 16), "float32")
        for _ in range(6):  # one of them over the rows
            np.testing.assert_allclose(bound(B=B), matrix @ B, rtol=1e-4)
        assert isinstance(bound.over_another, validation.GuardedBound)
        assert len(looked) == count
        B[1, 2] = np.inf
        np.testing.assert_allclose(bound(B=B), matrix @ B, rtol=1e-4)
        looked.clear()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [16, 64, 1000, 20_001])
def test_kernels_look_at_vectors_themselves(rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "SHORT_CALL", 10.0)  # seconds: the other format is kept without a trial
    monkeypatch.setattr(validation, "has_nan", None)
    diagonals = [np.ones(rows - abs(d)) for d in (-2, 0, 1)]
    A = sp.csr_array(sp.diags_array(diagonals, offsets=(-2, 0, 1), dtype=dtype))
    A.data[::7] = 0
    A.eliminate_zeros()
    program = sparsetir.ops.spmv(dtype)
    conversion = heuristics.Conversion(formats.hdia(4), calls=1)
    bound = kernel_factory._bound_over(sparsetir.build(program), {"A": A}, "A", conversion, None)
    assert isinstance(bound, validation.GuardedBound)
    x = np.ones(rows, dtype)
    np.testing.assert_array_equal(bound(x=x), A @ x)
    assert bound._made is None
    for place in (0, rows // 2, rows - 1):
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            y, x[place] = np.empty_like(x), value
            expected = sparsetir.build(program)(A=A, x=x)
            np.testing.assert_array_equal(bound(x=x), expected)
            assert bound(x=x, y=y) is y
            np.testing.assert_array_equal(y, expected)
        x[place] = 1
        np.testing.assert_array_equal(bound(x=x), A @ x)
    assert bound._made is not None


def test_a_tuned_kernel_keeps_vectors_apart() -> None:
    A, plain = blocks(np.random.default_rng(0)), sparsetir.build(sparsetir.ops.spmv())
    variant = Variant(plain.func, None, Candidate(format=formats.bsr(4, 4)), "A", {})
    tuned = TunedKernel(plain, [variant])
    x = np.ones(120, np.float32)
    x[::3] = np.inf
    expected = plain(A=A, x=x)
    np.testing.assert_array_equal(tuned(A=A, x=x), expected)
    bound = tuned.bind(A=A)
    for _ in range(3):
        np.testing.assert_array_equal(bound(x=x), expected)


def test_calls_with_nan_are_timed_as_they_are_made() -> None:
    A = blocks(np.random.default_rng(0))
    bound = sparsetir.build(sparsetir.ops.spmv(), expected_calls=MANY).bind(A=A)
    x = np.full(120, np.inf, np.float32)
    assert bound.time(x=x, seconds=0.001).median > 0
    assert bound.over_another is not None


def test_what_shows_in_results() -> None:
    assert validation.sums_products(decode(sparsetir.ops.spmm()))
    assert validation.sums_products(decode(sparsetir.ops.spmv("float64")))
    assert not validation.sums_products(decode(sparsetir.parse(RELU)))
    assert not validation.sums_products(
        decode(sparsetir.parse(RELU.replace("A[i, j] *", "A[i, j] * T.exp(B[j, k]) *")))
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_looking_for_nan(dtype: str) -> None:
    array = np.full((3, 5), np.inf, dtype)
    array[0] = np.finfo(dtype).max
    assert not validation.has_nan(array)
    assert not validation.is_finite(array)
    assert validation.is_finite(array[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "special", [(), (np.inf,), (-np.inf,), (np.nan,), (-np.nan,), (np.nan, np.inf), (-0.0, np.inf)]
)
def test_infinities_and_nan_are_found_in_every_dtype(dtype: str, special: tuple[float, ...]) -> None:
    for other in (1.0, -1.0, 0.0, -6e4):
        array = np.full((5, 9), other, np.float64)
        array.flat[3 : 3 + len(special)] = special
        expected = bool(np.isnan(array).any()), bool(np.isfinite(array).all())
        array = array.astype(dtype)
        for found in (array, array.T, np.repeat(array, 2, axis=1)[:, ::2]):
            assert (validation.has_nan(found), validation.is_finite(found)) == expected
    assert not validation.has_nan(np.zeros((0, 3), dtype))
    array[2, 4] = np.nan
    assert validation.has_nan(array)
    assert validation.has_nan((np.zeros(0, dtype), array.T))
    assert validation.is_finite(np.zeros((0, 3), dtype))
    assert validation.is_finite(np.ones(3, "int32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("columns", [40, 120])
def test_tensors_of_every_dtype_are_looked_at(dtype: str, columns: int) -> None:
    """Operands are looked at where the matrix is tall, results where it is not."""
    torch = pytest.importorskip("torch")
    A = blocks(np.random.default_rng(0))[:, :columns]
    values = torch.from_numpy(A.data).to(getattr(torch, dtype))
    matrix = torch.sparse_csr_tensor(torch.from_numpy(A.indptr), torch.from_numpy(A.indices), values, A.shape)
    program = sparsetir.ops.spmm(dtype)
    fast = sparsetir.build(program, expected_calls=MANY).bind(A=matrix)
    plain = sparsetir.build(program).bind(A=matrix)
    for number in (1.0, np.inf):
        B = torch.ones((columns, 8), dtype=values.dtype, requires_grad=True)
        with torch.no_grad():
            B[1, 2] = number
            assert validation.is_finite(B) is (number == 1.0)
            for _ in range(3):
                torch.testing.assert_close(fast(B=B), plain(B=B), rtol=0.05, atol=0.05, equal_nan=True)
    assert fast.over_another is not None


@pytest.mark.parametrize("term", ["X[i] + T.float32(0)", "T.float32(0) + X[i]", "X[i] - T.float32(-0.0)"])
def test_adding_zero_to_a_negative_one_gives_a_positive_one(term: str) -> None:
    program = sparsetir.parse(f"""
@T.prim_func
def plus(x: T.handle, y: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I], "S", "plus") as [i]:
        Y[i] = {term}
""")
    result = sparsetir.build(program)(X=np.array([-0.0, 0, -1], "float32"))
    assert (result.tolist(), np.signbit(result).tolist()) == ([0, 0, -1], [False, False, True])


LITERALS = """
@T.prim_func
def literals(a: T.handle, b: T.handle, c: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I,), "{dtype}")
    B = T.match_sparse_buffer(b, (I,), "{dtype}")
    C = T.match_sparse_buffer(c, (I,), "{dtype}")
    with T.sp_iter([I], "S", "choose") as [i]:
        A[i] = T.Select(T.{function}(B[i], T.Cast("{dtype}", {literal})) < C[i], B[i], C[i])
"""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "literal", ["2", "T.float64(-1e300)", "T.int64(-3)", "T.float32(0.5)", "16777217", "T.float64(0.1)"]
)
def test_casts_of_literals_stand_in_comparisons(dtype: str, literal: str) -> None:
    b, c = np.array([-4.0, 0.25, 5.0, np.nan, np.inf], dtype), np.array([1.0, -8.0, 6.0, 1.0, 0.0], dtype)
    number = np.array(eval(literal.replace("T.", "np."))).astype(dtype)
    for function, numpy_function in (("min", np.fmin), ("max", np.fmax)):
        kernel = sparsetir.build(sparsetir.parse(LITERALS.format(dtype=dtype, literal=literal, function=function)))
        found, want = kernel(b=b, c=c, n=5), np.where(numpy_function(b, number) < c, b, c)
        assert np.array_equal(found[~np.isnan(b)], want[~np.isnan(b)])
