# SPDX-License-Identifier: Apache-2.0
"""Panels of columns: packed operands, and operands and results whose columns are not the last dimension."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi
from tvm import ir, tirx
from tvm.script import sparsetir as T

import sparsetir
from each import share
from scheduling import csr_of_row_lengths
from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect
from sparsetir.lower import TO_STAGE_2, TO_STAGE_3, as_module, run
from sparsetir.lower.annotations import PANEL
from sparsetir.lower.rows.panels import PackOperands
from sparsetir.schedules import Choices, schedule
from sparsetir.tuning.space import fixed
from sparsetir.workloads import suite

WIDTHS = (1, 3, 8, 31, 64, 65, 130, 200, 257)
TYPES = [("float32", "int32"), ("float64", "int64"), ("float32", "int64")]
ORDERS = ["B", "C", "BC"]  # which of the two has its columns first


@functools.cache
def transposed(order: str, dtype: str = "float32", idtype: str = "int32") -> tirx.PrimFunc:
    """SpMM with B, C or both stored column by column."""
    size = T.int64 if idtype == "int64" else T.int32

    @T.prim_func
    def b_by_columns(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, feat: size,
    ):  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (K, J_dense), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[k, j]

    @T.prim_func
    def c_by_columns(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, feat: size,
    ):  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (K, I), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[k, i] = 0
            C[k, i] = C[k, i] + A[i, j] * B[j, k]

    @T.prim_func
    def both_by_columns(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, feat: size,
    ):  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (K, J_dense), dtype)
        C = T.match_sparse_buffer(c, (K, I), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[k, i] = 0
            C[k, i] = C[k, i] + A[i, j] * B[k, j]

    return {"B": b_by_columns, "C": c_by_columns, "BC": both_by_columns}[order]


@functools.cache
def kernel(order: str, dtype: str = "float32", idtype: str = "int32", choices: Choices | None = None) -> Any:
    """A kernel for row-major (no order) or column-major SpMM."""
    func = transposed(order, dtype, idtype) if order else sparsetir.ops.spmm(dtype, idtype=idtype)
    return sparsetir.build(func, schedule=choices)


def is_right(order: str, A: Any, feat: int, dtype: str = "float32", *options: Any) -> None:
    """Compare with the product in double precision; the output is handed in full of NaN."""
    B = np.random.default_rng(feat).standard_normal((A.shape[1], feat)).astype(dtype)
    C = np.full((A.shape[0], feat), np.nan, dtype)
    held = {
        "B": np.ascontiguousarray(B.T) if "B" in order else B,
        "C": np.ascontiguousarray(C.T if "C" in order else C),
    }
    kernel(order, dtype, *options)(A=A.astype(dtype), **held)
    exact = A.astype("float64") @ B.astype("float64")
    scale = abs(A).astype("float64") @ abs(B).astype("float64")
    found = held["C"].T if "C" in order else held["C"]
    limit = 64 * np.finfo(dtype).eps
    assert np.all(abs(found - exact) <= limit * scale), (order, A.shape, feat, options)


def inputs() -> dict[str, Any]:
    """Structures with rows of many lengths, with none, and without rows or columns."""
    rng = np.random.default_rng(0)
    shapes = {
        "tall": (83, 20),
        "wide": (17, 90),
        "line": (48, 64),
        "one": (1, 1),
        "no_rows": (0, 7),
        "no_columns": (7, 0),
    }
    found = {n: sp.random_array(s, density=0.3, format="csr", dtype="float32", rng=rng) for n, s in shapes.items()}
    return found | {
        "empty": sp.csr_array((20, 30), dtype="float32"),
        "skewed": csr_of_row_lengths([0, 40, 0, 1] * 9, 50),
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "idtype"), TYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_columns_first(order: str, dtype: str, idtype: str) -> None:
    for A in inputs().values():
        for feat in WIDTHS:
            is_right(order, A, feat, dtype, idtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices", [Choices(panel=32, tile=16, chunks=3), Choices(panel=64, chunks=0, prefetch=4, unroll=2)]
)
@pytest.mark.parametrize("order", ["", *ORDERS])
def test_chosen_panels(order: str, choices: Choices) -> None:
    for A in inputs().values():
        for feat in WIDTHS:
            is_right(order, A, feat, "float32", "int32", choices)


@pytest.mark.slow
@pytest.mark.parametrize("family", share(suite.families(), 4))
def test_every_family(family: str) -> None:
    A = suite.families()[family](size="small")
    for order in ORDERS:
        is_right(order, A, 100)
    is_right("", A, 100, "float32", "int32", Choices(panel=64))


# ---------------------------------------------------------------- other programs


def marked(func: tirx.PrimFunc, choices: Choices) -> tirx.PrimFunc:
    """The loops of a program before panels are made."""
    second = schedule(run(TO_STAGE_2, as_module(func)), choices).mod
    before = TO_STAGE_3[: TO_STAGE_3.index(PackOperands)]
    return next(iter(run(before, second).functions.values()))


def packed(func: tirx.PrimFunc, choices: Choices) -> list[str]:
    """The scratch of a program's panels."""
    panels = PackOperands(as_module(marked(func, choices)))
    found = next(iter(panels.functions.values()))
    return [str(a.buffer.name) for a in collect(found.body, tirx.AllocBuffer) if "_panel" in str(a.buffer.name)]


@pytest.mark.parametrize("format", ["coo", "bsr", "dcsr", "ell"])
def test_formats(format: str) -> None:
    func = sparsetir.ops.spmm(format=format)
    rng, A = np.random.default_rng(1), sp.random_array((24, 40), density=0.3, format="csr", dtype="float32", rng=2)
    B = rng.standard_normal((40, 70)).astype("float32")
    given = {"A": sp.bsr_array(A, blocksize=(4, 4)), "B": B.reshape(10, 4, 70)} if format == "bsr" else {"A": A, "B": B}
    found = sparsetir.build(func, schedule=Choices(panel=32, tile=16))(**given)
    np.testing.assert_allclose(found.reshape(24, 70), A @ B, rtol=1e-4, atol=1e-4)


def test_every_gathered_operand_is_packed() -> None:
    assert packed(sparsetir.ops.mttkrp(), Choices(panel=64, chunks=0)) == ["b_panel", "c_panel"]
    assert packed(sparsetir.ops.mttkrp(), Choices(panel=64, chunks=2)) == ["b_panel", "c_panel"] * 2
    assert packed(sparsetir.ops.spmm(format="bsr"), Choices(panel=64, chunks=0)) == ["b_panel"]
    rng = np.random.default_rng(3)
    coords, shape = np.unique(rng.integers(0, 9, (60, 3)), axis=0), (9, 9, 9)
    values = rng.standard_normal(len(coords)).astype("float32")
    cube = sparsetir.CooTensor(coords.T, values, shape)
    B, C = (rng.standard_normal((9, 50)).astype("float32") for _ in range(2))
    expected = np.zeros((9, 50))
    np.add.at(expected, coords[:, 0], values[:, None] * B[coords[:, 1]] * C[coords[:, 2]])
    found = sparsetir.build(sparsetir.ops.mttkrp(), schedule=Choices(panel=16, tile=16))(T_=cube, B=B, C=C)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("feat", [16, 64, 96, 192, 256])
def test_a_known_number_of_columns(feat: int) -> None:
    A = inputs()["tall"]
    B = np.random.default_rng(4).standard_normal((20, feat)).astype("float32")
    for order in ("", "BC"):
        func = transposed(order) if order else sparsetir.ops.spmm()
        program = fixed(sparsetir.ir.decode(func), {"feat": feat})
        built = sparsetir.build(program, schedule=Choices(panel=128))
        found = built(A=A, B=np.ascontiguousarray(B.T) if order else B)
        np.testing.assert_allclose(found.T if order else found, A @ B, rtol=1e-4, atol=1e-4)


@T.prim_func
def normalised(
    a: T.handle, b: T.handle, c: T.handle, s: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_dense, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    S = T.match_sparse_buffer(s, (I,), "float32")
    with T.sp_iter([I], "S", "rows") as [i]:
        with T.sp_iter([J, K], "RS", "spmm") as [j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        with T.sp_iter([K], "R", "sums") as [k]:
            with T.init():
                S[i] = 0
            S[i] = S[i] + C[i, k]


def test_columns_that_meet_stay_together() -> None:
    assert packed(normalised, Choices(panel=32, tile=32)) == []
    A, B = inputs()["wide"], np.random.default_rng(5).standard_normal((90, 100)).astype("float32")
    C, S = sparsetir.build(normalised, schedule=Choices(panel=32, tile=32))(A=A, B=B)
    np.testing.assert_allclose(C, A @ B, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(S, (A @ B).sum(1), rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- loops


@pytest.mark.slow
def test_scratch_is_allocated_once() -> None:
    for order in ("", "B", "BC"):
        body = kernel(order, "float32", "int32", Choices(panel=64)).compiled.stage(3).body
        inside = [a.buffer for f in collect(body, tirx.For) for a in collect(f, tirx.AllocBuffer)]
        scratch = [a.buffer for a in collect(body, tirx.AllocBuffer) if a.buffer.name.startswith("b_panel")]
        assert scratch
        assert not set(scratch) & set(inside)


@pytest.mark.parametrize("carry", [0, 1])
@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("order", ["", "B", "C", "BC"])
def test_chunks_with_panels_of_their_own(order: str, chunks: int, carry: int) -> None:
    """As many panels as chunks, fewer, more, and a last one that is not whole."""
    rng = np.random.default_rng(chunks)
    choices = Choices(panel=32, tile=32, chunks=chunks, carry=carry)
    for A in (
        sp.random_array((50, 40), density=0.2, format="csr", dtype="float32", rng=rng),
        sp.csr_array((0, 40), dtype="float32"),
        sp.csr_array((9, 0), dtype="float32"),
    ):
        for feat in (0, 1, 32 * chunks - 32, 32 * chunks - 31, 32 * chunks, 32 * chunks + 5, 64 * chunks):
            is_right(order, A, feat, "float32", "int32", choices)


def test_threads_that_pack_panels_of_their_own_share_none() -> None:
    body = kernel("", "float32", "int32", Choices(panel=32, tile=32, chunks=2)).compiled.stage(3).body
    loops = [f for f in collect(body, tirx.For) if f.kind == tirx.ForKind.PARALLEL]
    written = [{str(s.buffer.name).rstrip("_0123456789") for s in collect(f.body, tirx.BufferStore)} for f in loops]
    (outer,) = [f for f, names in zip(loops, written, strict=True) if {"b_panel", "c"} <= names]
    assert not [f for f in collect(outer.body, tirx.For) if f.kind == tirx.ForKind.PARALLEL]


def test_groups_of_rows_are_shared_out_by_nonzeros() -> None:
    body = kernel("BC").compiled.stage(3).body
    searches = [w for w in collect(body, tirx.While) if collect(w, ir.TensorLoad)]
    read = {str(x.source.name) for w in searches for x in collect(w, ir.TensorLoad)}
    assert any(name.startswith("indptr") for name in read)


def test_loops_without_a_mark_stay() -> None:
    func = marked(sparsetir.ops.spmm(), Choices())
    assert tvm_ffi.structural_equal(PackOperands(as_module(func))["spmm"], func)


def test_no_mark_is_left() -> None:
    for func in (sparsetir.ops.spmm(), normalised, transposed("C")):
        before = marked(func, Choices(panel=32, tile=32))
        after = next(iter(PackOperands(as_module(before)).functions.values()))
        marks = [sum(PANEL in f.annotations for f in collect(x.body, tirx.For)) for x in (before, after)]
        assert marks == [1, 0]


@pytest.mark.parametrize("panel", [-1, 3, 48])
def test_panels_are_powers_of_two(panel: int) -> None:
    with pytest.raises(ScheduleError, match="panel: expected 0 or a power of two"):
        Choices(panel=panel)


def test_panels_to_try_are_narrower_than_rows() -> None:
    assert Choices.space(threads=2, feat=100)["panel"] == (0, 32, 64)
    assert Choices.space(threads=2, feat=16)["panel"] == (0,)


@T.prim_func
def first_columns(
    a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
):  # fmt: skip
    """The product with a dense matrix whose columns from the sixth on are ones."""
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_dense, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = T.float32(0)
        C[i, k] = C[i, k] + A[i, j] * T.if_then_else(k < 5, B[j, k], T.float32(1))


@pytest.mark.parametrize("choices", [{"panel": 32, "tile": 32}, {"panel": 16, "tile": 16, "prefetch": 8}])
def test_conditions_on_columns_stay(choices: dict[str, int]) -> None:
    """A comparison of the column with something else than the number of columns is not that of a panel's end."""
    A = sp.random_array((30, 40), density=0.3, format="csr", dtype="float32", rng=np.random.default_rng(0))
    B = np.random.default_rng(1).random((40, 70), dtype="float32")
    found = sparsetir.build(first_columns, schedule=Choices(**choices))(A=A, B=B)
    np.testing.assert_allclose(found, A @ np.where(np.arange(70) < 5, B, 1), rtol=1e-5)
