# SPDX-License-Identifier: Apache-2.0
"""Sparse matrix times vector: sums along ragged rows in vectors, and slices of rows side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import tirx
from tvm.script import sparsetir as T
from tvm.script import tirx as tir

import sparsetir
from fences import fenced
from sparsetir.errors import ScheduleError
from sparsetir.formats.padded import SELL
from sparsetir.interop import CooTensor
from sparsetir.ir import effects
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import decode
from sparsetir.lower import as_module
from sparsetir.lower.annotations import STAGED, SUM, refusals
from sparsetir.lower.target.scratch import MOST_BYTES, PromoteToStack
from sparsetir.lower.vector.ragged_sums import SumRagged
from sparsetir.schedules import Choices, defaults
from sparsetir.schedules.registers import OwnSums
from sparsetir.utils.machine import private_cache
from sparsetir.workloads import suite

pytestmark = pytest.mark.optimised

VECTORIZED = tirx.ForKind.VECTORIZED
KERNELS: dict[Any, Any] = {}
RAGGED = effects.Usage([], [], ["indptr"], [])


def kernel(lanes: int, dtype: str = "float32", idtype: str = "int32", chunks: int = 2, staged: int = 0) -> Any:
    """A kernel for CSR, compiled once."""
    key = lanes, dtype, idtype, chunks, staged
    if key not in KERNELS:
        choices = Choices(lanes=lanes, chunks=chunks, staged=staged)
        KERNELS[key] = sparsetir.build(sparsetir.ops.spmv(dtype, idtype=idtype), schedule=choices)
    return KERNELS[key]


def over_sell(C: int, sigma: int, dtype: str = "float32") -> Any:
    """A kernel for SELL, compiled once."""
    key = C, sigma, dtype
    if key not in KERNELS:
        program = sparsetir.decompose_format(sparsetir.ops.spmv(dtype), {"A": SELL(C, sigma)})
        KERNELS[key] = sparsetir.build(program)
    return KERNELS[key]


def check(kernel: Any, matrix: Any) -> None:
    """Against scipy's product in float64."""
    x = np.random.default_rng(3).standard_normal(matrix.shape[1]).astype(matrix.dtype)
    want = matrix.astype("float64") @ x.astype("float64")
    bound = abs(matrix).astype("float64") @ abs(x).astype("float64")
    longest = int(np.diff(matrix.indptr).max(initial=0))
    error = abs(kernel(A=matrix, x=x).astype("float64") - want)
    assert (error <= (longest + 2) * np.finfo(matrix.dtype).eps * bound).all()


def degenerate(dtype: str) -> dict[str, Any]:
    """Matrices without rows, columns or entries, and the smallest that have some."""
    full = np.ones((1, 1), dtype)
    return {
        "no rows": sp.csr_array((0, 5), dtype=dtype),
        "no columns": sp.csr_array((5, 0), dtype=dtype),
        "no entries": sp.csr_array((5, 7), dtype=dtype),
        "one entry": sp.csr_array(full),
        "one row": sp.csr_array(np.ones((1, 37), dtype)),
        "one column": sp.csr_array(np.ones((37, 1), dtype)),
        "empty rows": sp.csr_array(np.diag([0, 1, 0, 2, 0]).astype(dtype)),
    }


def of_lengths(lengths: Any, columns: int = 80) -> Any:
    """Rows of given lengths."""
    rng = np.random.default_rng(1)
    indices = np.concatenate([np.sort(rng.choice(columns, n, replace=False)) for n in lengths])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.standard_normal(len(indices)).astype(np.float32)
    return sp.csr_array((values, indices.astype(np.int32), indptr.astype(np.int32)), shape=(len(lengths), columns))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("lanes", "staged"), [(0, 0), (4, 0), (8, 0), (8, 64), (4, 3)])
@pytest.mark.parametrize("name", suite.families())
def test_every_family(name: str, lanes: int, staged: int) -> None:
    check(kernel(lanes, staged=staged), suite.families()[name]("small"))


@pytest.mark.shared(3)
@pytest.mark.parametrize("name", suite.families())
def test_every_family_in_slices(name: str) -> None:
    check(over_sell(8, 8192), suite.families()[name]("small"))


@pytest.mark.parametrize("format", [None, SELL(8, 16), SELL(4, 8)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(dtype: str, format: Any) -> None:
    matrix = of_lengths(np.random.default_rng(1).integers(0, 40, 60))
    matrix.data = np.random.default_rng(2).integers(1, 4, matrix.nnz).astype(np.float32)
    program = sparsetir.ops.spmv(dtype)
    built = sparsetir.build(program if format is None else sparsetir.decompose_format(program, {"A": format}),
                            schedule=Choices(lanes=4, chunks=2))  # fmt: skip
    halves = CooTensor(matrix.nonzero(), matrix.data.astype(dtype), matrix.shape)
    found = built(A=halves, x=np.ones(80, np.float32).astype(dtype))
    np.testing.assert_allclose(found.astype(np.float32), matrix.sum(axis=1), rtol=1e-2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("lanes", "staged"), [(2, 0), (4, 0), (8, 0), (2, 7), (16, 64)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_dtypes(dtype: str, idtype: str, lanes: int, staged: int) -> None:
    matrix = suite.families()["rmat"]("small").astype(dtype)
    matrix.indptr, matrix.indices = matrix.indptr.astype(idtype), matrix.indices.astype(idtype)
    check(kernel(lanes, dtype, idtype, staged=staged), matrix)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("lanes", "staged"), [(4, 0), (8, 0), (8, 64), (4, 2)])
@pytest.mark.parametrize("name", degenerate("float32"))
def test_degenerate_matrices(name: str, lanes: int, staged: int, dtype: str) -> None:
    check(kernel(lanes, dtype, staged=staged), degenerate(dtype)[name])


@pytest.mark.parametrize("chunks", [0, 2])
@pytest.mark.parametrize("height", [1, 5, 64])
@pytest.mark.parametrize("lanes", [2, 8])
def test_staged_rows_of_all_lengths(lanes: int, height: int, chunks: int) -> None:
    """Blocks that fit into the buffer and blocks that do not, values that are not finite in their own rows only."""
    rng = np.random.default_rng(height)
    for most in (3, 9, 17, 40, 80):
        matrix = of_lengths(rng.integers(0, most, 131))
        check(kernel(lanes, chunks=chunks, staged=height), matrix)
        matrix.data[:: max(matrix.nnz // 7, 1)] = np.nan
        result = kernel(lanes, chunks=chunks, staged=height)(A=matrix, x=fenced(np.ones(80, np.float32)))
        np.testing.assert_array_equal(np.isnan(result), np.isnan(matrix @ np.ones(80, np.float32)))


SUMS = """
@T.prim_func
def sums(
    a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32,
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "{dtype}")
    X = T.match_sparse_buffer(x, (J_dense,), "{other}")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "sums") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + {term}
"""
WIDE = "T.Cast('float32', A[i, j]) * T.Cast('float32', X[j])"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("lanes", "staged"), [(2, 0), (4, 0), (16, 0), (8, 16), (0, 64)])
@pytest.mark.parametrize(
    ("dtype", "other", "term", "value"),
    [
        ("float16", "float16", WIDE, lambda a, x, i, j: a * x),
        ("bfloat16", "bfloat16", WIDE, lambda a, x, i, j: a * x),
        ("int8", "float32", WIDE, lambda a, x, i, j: a * x),
        ("float64", "float32", "T.Cast('float32', A[i, j]) * X[j]", lambda a, x, i, j: a * x),
        ("uint8", "float32", "T.if_then_else(A[i, j] > 1, X[j], 0)", lambda a, x, i, j: np.where(a > 1, x, 0)),
        ("bool", "float32", "T.if_then_else(A[i, j], X[j], 0)", lambda a, x, i, j: np.where(a, x, 0)),
        ("float32", "int32", "A[i, j] * T.Cast('float32', X[j] + i)", lambda a, x, i, j: a * (x + i)),
        ("float32", "float32", "T.max(A[i, j], X[j]) * T.Cast('float32', j)", lambda a, x, i, j: np.maximum(a, x) * j),
    ],
)
def test_sums_of_other_numbers(dtype: str, other: str, term: str, value: Any, lanes: int, staged: int) -> None:
    text = SUMS.format(dtype=dtype, other=other, term=term)
    choices = Choices(lanes=lanes, staged=staged, chunks=2)
    built = sparsetir.build(tvm.script.from_source(text, {"T": T}), schedule=choices)
    rng = np.random.default_rng(1)
    matrix = of_lengths(rng.integers(0, 40, 60))
    made = [rng.integers(0, 4, size).astype(kind) for size, kind in ((matrix.nnz, dtype), (80, other))]
    i, j = matrix.nonzero()
    want = np.bincount(i, value(made[0].astype(float), made[1].astype(float)[j], i, j), minlength=60)
    m, n = matrix.shape
    found = built(A=made[0], X=made[1], indptr=matrix.indptr, indices=matrix.indices, m=m, n=n, nnz=matrix.nnz)
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("term", "is_staged"),
    [
        ("A[i, j] * X[j]", True),
        ("T.max(A[i, j], X[j])", True),
        ("A[i, j] * X[j] * T.Cast('float32', i)", False),
        ("A[i, j] * (X[j] + T.Cast('float32', i))", False),
        ("T.exp(A[i, j] * X[j])", False),
        ("T.if_then_else(A[i, j] > 1, X[j], 0)", False),
    ],
)
def test_only_terms_of_entries_alone_are_staged(term: str, is_staged: bool) -> None:
    text = SUMS.format(dtype="float32", other="float32", term=term)
    with refusals() as refused:
        built = sparsetir.build(tvm.script.from_source(text, {"T": T}), schedule=Choices(staged=16, chunks=0))
        assert ("terms[" in built.script(3)) is is_staged
    assert any(refusal.mark == STAGED for refusal in refused) is not is_staged


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("order", [1, -1])
def test_rows_of_every_length(lanes: int, order: int) -> None:
    check(kernel(lanes), of_lengths(np.arange(70)[::order]))


@pytest.mark.parametrize("last", [0, 1, 3, 4, 7, 8, 17])
def test_nothing_is_read_behind_the_arrays(last: int) -> None:
    matrix = of_lengths([5, 0, 9, last])
    arrays = {"A": fenced(matrix.data), "indptr": fenced(matrix.indptr), "indices": fenced(matrix.indices)}
    x = fenced(np.ones(80, np.float32))
    for lanes in (4, 8):
        found = kernel(lanes, chunks=0)(**arrays, x=x, n=80)
        np.testing.assert_allclose(found, matrix @ x, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_in_its_row() -> None:
    matrix = of_lengths([3, 1, 2, 6, 1, 9])
    matrix.data[3], matrix.data[6] = np.nan, np.inf
    found = kernel(8)(A=matrix, x=np.ones(80, np.float32))
    np.testing.assert_array_equal(np.isfinite(found), [True, False, True, False, True, True])


def test_lanes_leave_vectors() -> None:
    loops = collect(kernel(8).compiled.stage(3).body, tirx.For)
    assert {int(f.extent) for f in loops if f.kind == VECTORIZED} == {8}
    assert not [f for f in collect(kernel(0).compiled.stage(3).body, tirx.For) if f.kind == VECTORIZED]


@pytest.mark.parametrize("lanes", [-4, 1, 3, 128])
def test_lanes_are_powers_of_two(lanes: int) -> None:
    with pytest.raises(ScheduleError, match=f"lanes: expected 0 or a power of two from 2 to 64, got {lanes}"):
        Choices(lanes=lanes)


# --- the passes ---------------------------------------------------------------------------------------------

ROWS = """
@tir.prim_func(s_tir=True)
def main(
    a: tir.Buffer((40,), "float32"), x: tir.Buffer((9,), "float32"), y: tir.Buffer((8,), "float32"),
    indptr: tir.Buffer((9,), "int32"), indices: tir.Buffer((40,), "int32"),
):
    tir.func_attr({{"sparsetir.structure": {structure}}})
    for i in range(8):
        y[i] = tir.float32(0)
        for j in tir.serial(indptr[i + 1] - indptr[i], annotations={{"sparsetir.sum": 4}}):
            {body}
"""
PLAIN = "y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]"


def summed(body: str, structure: str = '["indices", "indptr"]') -> tirx.PrimFunc:
    text = ROWS.format(body=body, structure=structure)
    return SumRagged(as_module(tvm.script.from_source(text, {"tir": tir})))["main"]


def has_vectors(func: tirx.PrimFunc) -> bool:
    loops = collect(func.body, tirx.For)
    assert not [f for f in loops if SUM in f.annotations]
    return any(f.kind == VECTORIZED for f in loops)


def test_sums_that_are_rewritten() -> None:
    assert has_vectors(summed(PLAIN))
    assert has_vectors(summed("y[i] = y[i] + x[i] * a[indptr[i] + j]"))


@pytest.mark.parametrize(
    ("body", "structure", "clamped"),
    [
        (PLAIN, '["indices", "indptr"]', False),
        (PLAIN, '["indptr"]', True),  # nothing is known of what the array holds
        ("y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j] + i]", '["indices"]', True),
        ("y[i] = y[i] + x[indptr[i]] * a[indptr[i] + j]", '["indptr"]', False),
    ],
)
def test_computed_subscripts_stay_inside(body: str, structure: str, clamped: bool) -> None:
    func = summed(body, structure)
    assert has_vectors(func)
    assert ("T.max(T.min(" in func.script()) is clamped


@pytest.mark.parametrize(
    ("body", "structure"),
    [
        ("y[i] = y[i] + a[indptr[i] + j] * x[indices[indices[indptr[i] + j]]]", '["indices"]'),
        ("y[i] = y[i] + a[indptr[i] + j * 2]", '["indices"]'),
        ("y[i] = y[i] + a[indptr[i] + j] * y[indices[indptr[i] + j]]", '["indices"]'),
        ("y[j] = y[j] + a[indptr[i] + j]", '["indices"]'),
        ("y[i] = y[i] * a[indptr[i] + j]", '["indices"]'),
    ],
)
def test_sums_that_stay(body: str, structure: str) -> None:
    assert not has_vectors(summed(body, structure))


LOCALS = """
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer((8,), "float32"), y: tir.Buffer((8,), "float32")):
    for i in range(8):
        held = tir.alloc_buffer(({size},), "float32", scope="local")
        held[0] = x[i]
        y[i] = held[0]
"""


@pytest.mark.parametrize(("size", "scope"), [(1, "global"), (255, "global"), (256, "local")])
def test_small_local_arrays_are_on_the_stack(size: int, scope: str) -> None:
    func = tvm.script.from_source(LOCALS.format(size=size), {"tir": tir})
    found = PromoteToStack(as_module(func))["main"]
    (array,) = (a.buffer for a in collect(found.body, tirx.AllocBuffer))
    assert str(array.ty.storage_scope) == scope
    assert (4 * size < MOST_BYTES) == (scope == "global")


def test_kernels_take_no_memory_from_the_runtime() -> None:
    assert "TVMBackendAllocWorkspace(" not in sparsetir.build(sparsetir.ops.spmm()).source("ll")
    assert "TVMBackendAllocWorkspace(" not in kernel(4).source("ll")


INTEL = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "fast-math-reassoc": True}

# --- what is chosen untuned ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([3] * 99, 0),
        ([3, 1, 4, 2] * 99, 4),
        ([8] * 99, 4),
        ([60] * 99, 4),
        ([30, 10, 20, 50] * 4000, 4),
        ([30, 10, 40, 50] * 4000, 8),
        ([3, 1, 4, 1, 5, 9, 2] * 99999, 4),
        ([0, 0, 0, 0, 0, 0, 9, 0, 0, 0] * 999, 0),
        ([7], 4),
        ([], 0),
    ],
)
def test_lanes_where_rows_differ_in_length(lengths: list[int], wanted: int) -> None:
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    assert defaults.suitable_sums(RAGGED, {"indptr": indptr}).get("lanes", 0) == wanted


@pytest.mark.parametrize(
    ("lengths", "gathers", "wanted"),
    [
        ([8] * 9999, True, 0),
        ([8] * 9999, False, 0),
        ([7, 19, 5, 22] * 999, True, 8),  # with many entries beyond whole vectors
        ([5] * 999, True, 8),
        ([1, 2] * 999, True, 0),
        ([17, 16] * 999, True, 0),
        ([7, 19, 5, 22] * 999, False, 4),
        ([5, 9, 2, 12] * 99, False, 0),  # so few that the processor knows their lengths
        ([32, 8, 40, 48] * 4000, True, 0),
        ([30, 10, 40, 50] * 4000, False, 4),  # without vector gathers, of an operand near by
        ([13, 14, 15, 16] * 9, False, 0),
        ([130, 110, 140, 150] * 999, True, 8),
        ([130, 110, 140, 150] * 9, False, 4),
        ([], True, 0),
    ],
)
def test_lanes_where_llvm_sums_rows_in_vectors_by_itself(lengths: list[int], gathers: bool, wanted: int) -> None:
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    assert defaults.suitable_sums(RAGGED, {"indptr": indptr}, OwnSums(gathers)) == ({"lanes": wanted} if wanted else {})


@pytest.mark.parametrize(
    ("lengths", "lanes"),
    [
        ([1, 0, 3, 1] * 999, 8),
        ([1, 0, 1, 0] * 999, 8),
        ([5, 9, 2, 12] * 999, 16),
        ([8, 9, 2, 8] * 99, 0),  # so few that the processor knows their lengths
        ([8] * 9999, 0),
    ],
)
def test_many_short_rows_of_varying_lengths_are_staged(lengths: list[int], lanes: int) -> None:
    arrays = {"indptr": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)}
    wanted = {"lanes": lanes, "staged": defaults.STAGED_ROWS} if lanes else {}
    assert defaults.suitable_sums(RAGGED, arrays, OwnSums(True)) == wanted


@pytest.mark.parametrize(
    ("lengths", "gathers", "near", "far"),
    [
        ([7, 19, 5, 22] * 999, True, 8, 8),
        ([7, 19, 5, 22] * 999, False, 4, 0),
        ([30] * 999, False, 4, 0),
        ([33] * 999, True, 0, 0),
        ([70] * 999, False, 4, 4),
    ],
)
def test_lanes_of_near_and_far_operands(lengths: list[int], gathers: bool, near: int, far: int) -> None:
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    usage = effects.Usage.of(decode(sparsetir.ops.spmv()))
    for elements, lanes in ((1000, near), (private_cache(), far)):
        arrays = {"indptr": indptr, "indices": np.zeros(indptr[-1], np.int32), "x_data": np.zeros(elements, np.float32)}
        assert defaults.suitable_sums(usage, arrays, OwnSums(gathers)) == ({"lanes": lanes} if lanes else {})


def test_llvm_sums_rows_in_vectors_where_terms_may_come_in_any_order() -> None:
    of = lambda mcpu, *mattr: OwnSums.of(tvm.target.Target({**INTEL, "mcpu": mcpu, "mattr": mattr}))  # noqa: E731
    assert of("sapphirerapids") == of("skylake") == OwnSums(True)
    assert of("znver4") == OwnSums(False)
    assert of("znver4", "+prefer-no-gather") == of("nehalem") == of("haswell") == of("x86-64-v3") == OwnSums(False)
    ordered = {name: value for name, value in INTEL.items() if name != "fast-math-reassoc"}
    assert OwnSums.of(tvm.target.Target({**ordered, "mcpu": "haswell"})) is None


def test_only_sums_along_rows_want_lanes() -> None:
    assert effects.ragged_sums(decode(sparsetir.ops.spmv())) == ["indptr"]
    assert effects.ragged_sums(decode(sparsetir.ops.spmm())) == []
    assert effects.ragged_sums(decode(sparsetir.ops.sddmm())) == []


@pytest.mark.slow
def test_an_untuned_kernel_takes_them() -> None:
    matrix = of_lengths(np.random.default_rng(2).integers(2, 16, 20_000))
    built = sparsetir.build(sparsetir.ops.spmv())
    fit, after = built.fitting(built.prepare({"A": matrix, "x": np.ones(80, np.float32)}), is_bound=True)
    assert fit is not None
    assert after == 0
    check(built, matrix)
    bound, x = built.bind(A=matrix), np.ones(80, np.float32)
    for _ in range(3):
        np.testing.assert_allclose(bound(x=x), matrix @ x, rtol=1e-4, atol=1e-4)
