# SPDX-License-Identifier: Apache-2.0
"""16-bit floats: loaded as they are, summed in float32, rounded once."""

from __future__ import annotations

import functools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from tvm import tirx
from tvm.target import codegen

import sparsetir
from sparsetir import formats, ops
from sparsetir.interop import CooTensor
from sparsetir.ir.rewriting import collect
from sparsetir.schedules import Choices
from sparsetir.workloads import suite

pytestmark = pytest.mark.optimised

HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
VECTORIZED = tirx.ForKind.VECTORIZED
LENGTHS = (1, 3, 4, 7, 8, 15, 16, 17, 33, 64, 100)


@functools.cache
def kernel(op: str, dtype: str, idtype: str = "int32", **choices: int) -> Any:
    schedule = Choices(**choices) if choices else None
    return sparsetir.build(getattr(ops, op)(dtype, idtype=idtype), schedule=schedule)


def dense(shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(HALVES[dtype])


def rounded(matrix: sp.csr_array, dtype: str) -> tuple[CooTensor, sp.csr_array]:
    """A matrix with 16-bit values, and the same values in float64."""
    held = matrix.data.astype(HALVES[dtype])
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    wide = sp.csr_array((held.astype(np.float64), matrix.indices, matrix.indptr), shape=matrix.shape)
    return CooTensor(np.stack([rows, matrix.indices]), held, matrix.shape), wide


def limits(dtype: str) -> dict[str, float]:
    """Half a unit in the last place, and what float32 sums add to that."""
    return {"rtol": float(ml_dtypes.finfo(HALVES[dtype]).eps) * 0.52}


def check_spmm(built: Any, matrix: sp.csr_array, feat: int, dtype: str) -> None:
    A, wide = rounded(matrix, dtype)
    B = dense((matrix.shape[1], feat), dtype, 1)
    found = np.asarray(built(A=A, B=B)).astype(np.float64)
    want = wide @ B.astype(np.float64)
    size = abs(wide) @ np.abs(B.astype(np.float64))
    np.testing.assert_array_less(np.abs(found - want), limits(dtype)["rtol"] * np.abs(want) + 1e-5 * size + 1e-7)


def check_sddmm(built: Any, matrix: sp.csr_array, feat: int, dtype: str) -> None:
    S, wide = rounded(matrix, dtype)
    X, Y = dense((matrix.shape[0], feat), dtype, 2), dense((matrix.shape[1], feat), dtype, 3)
    found = np.asarray(built(S=S, X=X, Y=Y).values).astype(np.float64)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    x, y = X[rows].astype(np.float64), Y[matrix.indices].astype(np.float64)
    want, size = wide.data * (x * y).sum(1), np.abs(wide.data) * np.abs(x * y).sum(1)
    np.testing.assert_array_less(np.abs(found - want), limits(dtype)["rtol"] * np.abs(want) + 1e-5 * size + 1e-7)


CHECKS = {"spmm": check_spmm, "sddmm": check_sddmm}


@pytest.mark.shared(7)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", CHECKS)
@pytest.mark.parametrize("family", suite.families())
def test_every_family(family: str, op: str, dtype: str) -> None:
    CHECKS[op](kernel(op, dtype), suite.families()[family](size="small"), 32, dtype)


def small() -> sp.csr_array:
    matrix = sp.random_array((11, 20), density=0.4, format="csr", rng=np.random.default_rng(0))
    matrix.sort_indices()
    return sp.csr_array(matrix)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", CHECKS)
def test_rows_of_every_length(op: str, dtype: str, idtype: str) -> None:
    for feat in LENGTHS:
        CHECKS[op](kernel(op, dtype, idtype), small(), feat, dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", CHECKS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (6, 4)])
def test_nothing_stored(op: str, dtype: str, shape: tuple[int, int]) -> None:
    CHECKS[op](kernel(op, dtype), sp.csr_array(shape), 9, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_dots_fetch_ahead(dtype: str) -> None:
    for feat in LENGTHS:
        check_sddmm(kernel("sddmm", dtype, prefetch=4), small(), feat, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", CHECKS)
def test_sums_are_vectors_of_single_precision(op: str, dtype: str) -> None:
    func = kernel(op, dtype, units=0).compiled.stage(3)
    held = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    assert {str(b.ty.dtype) for b in held if str(b.ty.dtype).startswith(("float", "bf"))} == {"float32"}
    loops = [f for f in collect(func.body, tirx.For) if f.kind == VECTORIZED]
    adds = [s for f in loops for s in collect(f.body, tirx.BufferStore) if isinstance(s.value, tirx.Add)]
    assert adds
    assert all(isinstance(f.extent, tirx.IntImm) for f in loops)
    assert {str(s.buffer.ty.dtype) for s in adds} == {"float32"}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_sum_of_many_ones_does_not_stop(dtype: str) -> None:
    """In 16 bits it would at 2048, and at 256."""
    ones = sp.csr_array(np.ones((2, 4096)))
    A, _ = rounded(ones, dtype)
    assert (np.asarray(kernel("spmm", dtype)(A=A, B=np.ones((4096, 9), HALVES[dtype]))).astype(int) == 4096).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite(dtype: str) -> None:
    kind, eps = HALVES[dtype], float(ml_dtypes.finfo(HALVES[dtype]).eps)
    most = float(ml_dtypes.finfo(kind).max)
    first = np.array([1, 1 + eps, 1, 1 + eps, -1, np.nan, np.inf, -np.inf, most, most, 0.5], np.float64)
    second = np.array([eps / 2, eps / 2, eps, 0, -eps / 2, 1, 1, 1, most, 0, np.nan], np.float64)
    B = np.tile(np.stack([first, second]), (1, 7)).astype(kind)
    with np.errstate(all="ignore"):
        want = (B[0].astype(np.float32) + B[1].astype(np.float32)).astype(kind)
    A, _ = rounded(sp.csr_array(np.ones((1, 2))), dtype)
    with np.errstate(all="ignore"):
        found = np.asarray(kernel("spmm", dtype)(A=A, B=B))[0]
    np.testing.assert_array_equal(found.astype(np.float64), want.astype(np.float64))


WIDENING = {"float16": r"vcvtph2ps\s+\S*\(.*\), %[yz]mm", "bfloat16": r"vpmovzxwd\s+\S*\(.*\), %[yz]mm"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mcpu", ["znver3", "sapphirerapids", "znver5"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", CHECKS)
def test_loads_are_widened_in_vectors(op: str, dtype: str, mcpu: str) -> None:
    built = sparsetir.build(getattr(ops, op)(dtype), target={"kind": "llvm", "mcpu": mcpu})
    text = built.source("asm")
    # Where there are dot products of bfloat16, sums take the values as they are stored, or widen pairs of them.
    assert re.search(WIDENING[dtype], text) or (dtype == "bfloat16" and re.search(r"vdpbf16ps|vpslld\s+\$16", text))
    assert not re.search(r"call\w*\s+__(trunc|extend)\w+2", text)


@pytest.mark.parametrize("result", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", HALVES)
def test_exponentials_of_halves(dtype: str, result: str) -> None:
    """In TVM's own lowering a bfloat16 inside bound names would be read as an integer."""
    power = 'T.exp(T.Cast("float32", A[i, k])) + T.Cast("float32", A[i, k])'
    program = sparsetir.parse(f"""
@T.prim_func
def powers(a: T.handle, b: T.handle, n: T.int32, feat: T.int32):
    I = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, K), "{dtype}")
    B = T.match_sparse_buffer(b, (I, K), "{result}")
    with T.sp_iter([I, K], "SS", "powers") as [i, k]:
        B[i, k] = {power if result == "float32" else f'T.Cast("{result}", {power})'}
""")
    A = dense((3, 45), dtype, 2)
    wide = A.astype(np.float64)
    found = np.asarray(sparsetir.build(program)(A=A)).astype(np.float64)
    want = np.exp(wide) + wide
    slack = limits(result)["rtol"] if result in HALVES else 0.0
    np.testing.assert_allclose(found, want, rtol=slack + 1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "format"),
    [
        ("sddmm", formats.bsr(2, 3)),
        ("sddmm", formats.dbsr(2, 2)),
        ("sddmm", formats.blocks(2, 2)),
        ("spmm", formats.buckets((1, 2, 4))),
        ("spmv", formats.hyb(2, (1, 2))),
    ],
    ids=str,
)
def test_bfloat16_over_formats(op: str, format: Any) -> None:
    """Whole numbers of few bits: exact in any order."""
    rng, dtype = np.random.default_rng(3), HALVES["bfloat16"]
    pattern = np.where(rng.random((9, 11)) < 0.4, rng.integers(1, 4, (9, 11)), 0)
    A = CooTensor(np.stack(pattern.nonzero()), pattern[pattern.nonzero()].astype(dtype), pattern.shape)
    X, Y = (rng.integers(-2, 3, (n, 6)).astype(dtype) for n in pattern.shape)
    wide, tall = Y.astype("float64"), X.astype("float64")
    parts = sparsetir.decompose_format(getattr(ops, op)("bfloat16"), {"S" if op == "sddmm" else "A": format})
    built = sparsetir.build(parts)
    if op == "sddmm":
        expected = (pattern * (tall @ wide.T))[pattern.nonzero()]
        np.testing.assert_array_equal(built(S=A, X=X, Y=Y).values.astype("float64"), expected)
    elif op == "spmm":
        np.testing.assert_array_equal(built(A=A, B=Y).astype("float64"), pattern @ wide)
    else:
        found = built(A=A, x=np.ascontiguousarray(Y[:, 0]))
        np.testing.assert_array_equal(found.astype("float64"), pattern @ wide[:, 0])


def sums(shape: tuple[int, int], dtype: str) -> tuple[CooTensor, np.ndarray]:
    """A matrix whose sums have many terms of one sign, and the same numbers in float64."""
    rng = np.random.default_rng(4)
    pattern = np.where(rng.random(shape) < 0.7, rng.random(shape), 0)
    pattern[0] = pattern[:, 1] = 0
    held = pattern[pattern.nonzero()].astype(HALVES[dtype])
    wide = np.zeros(shape)
    wide[pattern.nonzero()] = held.astype(np.float64)
    return CooTensor(np.stack(pattern.nonzero()), held, shape), wide


def check_once_rounded(found: Any, want: np.ndarray, dtype: str) -> None:
    """Of terms that are not negative."""
    slack = limits(dtype)["rtol"] + 1e-5
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), want, rtol=slack, atol=1e-7)


SCATTERED = ("csr", "csc", "coo", formats.bsr(2, 3))
EXPRESSIONS = {"ij->j": "", "ij->": "", "ij,ki->kj": "ki", "ij,jk->ik": "jk"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_expressions_round_their_sums_once(dtype: str) -> None:
    for shape in [(4, 300), (300, 4), (1, 2)]:
        A, wide = sums(shape, dtype)
        sizes = {"i": shape[0], "j": shape[1], "k": 3}
        for format in SCATTERED:
            S = sparsetir.SparseTensor.from_any(A, format)
            for text, letters in EXPRESSIONS.items():
                other = [np.full([sizes[c] for c in letters], 0.7).astype(HALVES[dtype])] if letters else []
                want = np.einsum(text, wide, *(x.astype(np.float64) for x in other))
                check_once_rounded(sparsetir.einsum(text, S, *other), want, dtype)


SCATTER = """
@T.prim_func
def scatter(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), sorted=True)
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "{dtype}")
    B = T.match_sparse_buffer(b, (J_dense,), "{dtype}")
    with T.sp_iter([I, J], "RS", "scatter") as [i, j]:
        B[j] = B[j] + A[i, j]
"""


def check_scatter(built: Any, dtype: str) -> None:
    for shape in [(300, 4), (1, 2), (0, 3), (3, 0)]:
        wide = np.full(shape, 0.3).astype(HALVES[dtype]).astype(np.float64)
        matrix, B = sp.csr_array(wide), np.full(shape[1], 5, HALVES[dtype])
        values, indptr, indices = matrix.data.astype(HALVES[dtype]), matrix.indptr, matrix.indices
        built(a=values, b=B, indptr=indptr.astype(np.int32), indices=indices.astype(np.int32), m=shape[0], n=shape[1])
        check_once_rounded(B, 5 + wide.sum(0), dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", HALVES)
def test_sums_begin_with_what_is_there(dtype: str, threads: int) -> None:
    before = sparsetir.get_num_threads()
    try:
        sparsetir.set_num_threads(threads)
        check_scatter(sparsetir.build(sparsetir.parse(SCATTER.format(dtype=dtype))), dtype)
    finally:
        sparsetir.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_that_are_cut_are_rounded_once(dtype: str) -> None:
    A, wide = sums((2, 4000), dtype)
    B = np.full((4000, 9), 0.7).astype(HALVES[dtype])
    found = kernel("spmm", dtype, chunks=6, carry=1)(A=A, B=B)
    check_once_rounded(found, wide @ B.astype(np.float64), dtype)


# ---------------------------------------------------------------- every slot, for every processor

PROCESSORS = ("x86-64-v3", "x86-64-v4", "znver4", "sapphirerapids", "")
OVER_SCRATCH = """
@T.prim_func
def program(a: T.handle, y: T.handle, q: T.handle, n: T.int32):
    X = T.dense_fixed(n)
    D = T.dense_fixed(1)
    A = T.match_sparse_buffer(a, (X,), "{dtype}")
    Q = T.alloc_sparse_buffer((X,), "{dtype}")
    R = T.match_sparse_buffer(q, (X,), "{dtype}")
    Y = T.match_sparse_buffer(y, (D,), "{dtype}")
    with T.sp_iter([X], "S", "fill") as [i]:
        Q[i] = {filled}
    with T.sp_iter([X], "S", "read") as [i]:
        R[i] = {read}
    with T.sp_iter([X], "R", "reduce") as [i]:
        with T.init():
            Y[0] = T.Cast("{dtype}", -9)
        Y[0] = {reduced}
"""
FILLED = {
    "copy": ("A[i]", lambda a: a),
    "sum": ("A[i] + A[i]", lambda a: a + a),
    "literal": ("T.Cast('{dtype}', 0.75)", lambda a: np.full_like(a, 0.75)),
    "choice": ("T.if_then_else(i % 2 == 0, A[i], T.Cast('{dtype}', -2))", lambda a: np.where(_even(a), a, -2)),
    "select": ("T.Select(A[i] > T.Cast('{dtype}', 0), A[i], -A[i])", lambda a: np.abs(a)),
    "exponential": ("T.exp(A[i])", lambda a: np.exp(a)),
    "rounded": ("T.Cast('{dtype}', T.Cast('float32', A[i]) * T.float32(1.001))", lambda a: a * np.float32(1.001)),
}
READ = {
    "copy": ("Q[i]", lambda q: q),
    "negative": ("-Q[i]", lambda q: -q),
    "bounded": ("T.min(Q[i], T.Cast('{dtype}', 1))", lambda q: np.minimum(q, 1)),
    "exponential": ("T.exp(Q[i])", lambda q: np.exp(q)),
    "absent": ("T.if_then_else(i % 2 == 0, Q[i], T.Cast('{dtype}', 3))", lambda q: np.where(_even(q), q, 3)),
}
REDUCED = {
    "sum": ("Y[0] + Q[i]", lambda q: q.sum() - 9),
    "max": ("T.max(Y[0], Q[i])", lambda q: max(q.max(), -9)),
    "min": ("T.min(Y[0], Q[i])", lambda q: min(q.min(), -9)),
}


def _even(a: np.ndarray) -> np.ndarray:
    return np.arange(len(a)) % 2 == 0


def _runs_here(processor: str) -> bool:
    """Return whether this machine has the instructions of a processor that tests compile for."""
    wanted = {"": (), "x86-64-v3": ("avx2", "fma"), "x86-64-v4": ("avx512f", "avx512bw", "avx512vl")}.get(processor)
    native = sparsetir.codegen.target.native_target()
    return wanted is not None and all(codegen.target_has_features(feature, native) for feature in wanted)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("reduced", REDUCED)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("filled", FILLED)
@pytest.mark.parametrize("dtype", HALVES)
def test_scratch_of_halves(dtype: str, filled: str, read: str, reduced: str, processor: str) -> None:
    """Scratch rounds as memory does, whatever is stored in it and read from it."""
    steps = {"filled": FILLED[filled], "read": READ[read], "reduced": REDUCED[reduced]}
    texts = {name: text.format(dtype=dtype) for name, (text, _) in steps.items()}
    target = {"kind": "llvm", "mcpu": processor} if processor else None
    kernel = sparsetir.build(sparsetir.parse(OVER_SCRATCH.format(dtype=dtype, **texts)), target)
    if not _runs_here(processor):
        return
    A = dense((1, 45), dtype, 5)[0]
    result, total = np.zeros_like(A), np.zeros(1, A.dtype)
    kernel(A=A, R=result, Y=total)
    q = FILLED[filled][1](A.astype(np.float32)).astype(HALVES[dtype]).astype(np.float32)
    np.testing.assert_allclose(
        result.astype(np.float32), READ[read][1](q), rtol=2 * limits(dtype)["rtol"] if "exp" in filled + read else 1e-7
    )
    np.testing.assert_allclose(total.astype(np.float32), REDUCED[reduced][1](q), rtol=2 * limits(dtype)["rtol"])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("op", ["spmm", "spmv", "sddmm", "linear", "mttkrp", "triangles"])
@pytest.mark.parametrize("dtype", HALVES)
def test_ready_programs_of_halves_compile_for_every_processor(dtype: str, op: str, processor: str) -> None:
    target = {"kind": "llvm", "mcpu": processor} if processor else None
    assert sparsetir.build(getattr(ops, op)(dtype), target).source("ll")


CHOICES = """
@T.prim_func
def choices(a: T.handle, b: T.handle, c: T.handle, d: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    J = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I,), "{result}")
    B = T.match_sparse_buffer(b, (I,), "bfloat16")
    C = T.match_sparse_buffer(c, (I,), "bfloat16")
    D = T.match_sparse_buffer(d, (I,), "float16")
    with T.sp_iter([I], "S", "first") as [i]:
        A[i] = T.Cast("{result}", {value})
    with T.sp_iter([I, J], "SR", "second") as [i, j]:
        D[i] = T.Cast("float16", T.max(B[i], C[j]))
"""
VALUES = {
    "T.Select(B[i] < C[i], B[i] + C[i], B[i])": lambda b, c: np.where(b < c, b + c, b),
    "T.Select(B[i] < C[i], T.Select(B[i] < T.bfloat16(1), C[i], B[i]), B[i])": lambda b, c: np.where(
        (b < c) & (b < 1), c, b
    ),
    "T.abs(B[i])": lambda b, c: np.abs(b),
    "T.floor(B[i]) + T.ceil(C[i])": lambda b, c: np.floor(b) + np.ceil(c),
}


@pytest.mark.parametrize("result", ["float16", "float32", "int32"])
def test_choices_and_exact_functions_beside_bound_names(result: str) -> None:
    b = np.array([-2.5, 0.5, 3.0, -1.0], ml_dtypes.bfloat16)
    c = np.array([1.5, -0.25, 4.0, 2.0], ml_dtypes.bfloat16)
    for value, expected in VALUES.items():
        kernel = sparsetir.build(sparsetir.parse(CHOICES.format(result=result, value=value)))
        a, d = kernel(b=b, c=c, n=4)
        want = expected(b.astype(np.float64), c.astype(np.float64))
        assert np.array_equal(a, want.astype(result)), value
        assert np.array_equal(d, np.maximum(b, c[-1]).astype("float16"))
