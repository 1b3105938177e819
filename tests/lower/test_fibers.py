# SPDX-License-Identifier: Apache-2.0
"""Nested sums: fixed factors multiplied once for each fiber, a tile at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import sparsetir as T
from tvm.script import tirx as tir

import sparsetir
from sparsetir import formats, ops
from sparsetir.interop import CooTensor
from sparsetir.ir.rewriting import collect
from sparsetir.lower import TO_STAGE_2, as_module, run
from sparsetir.lower.annotations import FACTOR, FINITE
from sparsetir.lower.vector.loop_transforms import InterchangeLoops
from sparsetir.lower.vector.registers import FactorInvariants
from sparsetir.schedules import schedule
from sparsetir.workloads import suite

ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@functools.cache
def kernel(order: tuple[int, ...] | None, dtype: str = "float32", idtype: str = "int32") -> Any:
    program = ops.mttkrp(dtype, idtype=idtype)
    if order is None:
        return sparsetir.build(program, assume_finite=True)
    format = formats.coo(3) if order == () else formats.csf(order)
    return sparsetir.build(sparsetir.decompose_format(program, {"T_": format}))


def random_tensor(shape: tuple[int, int, int], nnz: int, seed: int = 0) -> CooTensor:
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(0, max(int(np.prod(shape)), 1), nnz)) if np.prod(shape) else np.zeros(0, np.int64)
    coords = np.stack(np.unravel_index(keys, shape)) if keys.size else np.zeros((3, 0), np.int64)
    return CooTensor(coords.astype(np.int32), rng.standard_normal(keys.size), shape)


def factor_matrices(tensor: CooTensor, rank: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    first, second = (rng.standard_normal((extent, rank)).astype(dtype) for extent in tensor.shape[1:])
    return first, second


def expected(tensor: CooTensor, B: np.ndarray, C: np.ndarray) -> np.ndarray:
    i, j, k = np.asarray(tensor.coords)
    out = np.zeros((tensor.shape[0], B.shape[1]))
    np.add.at(out, i, np.asarray(tensor.values, np.float64)[:, None] * B[j].astype(np.float64) * C[k])
    return out


def check(built: Any, tensor: CooTensor, rank: int, dtype: str = "float32") -> None:
    tensor = tensor.with_values(tensor.values.astype(dtype))
    B, C = factor_matrices(tensor, rank, dtype)
    want = expected(tensor, B, C)
    found = built(T_=tensor, B=B, C=C)
    scale = 1 + np.abs(want).max(initial=0)
    np.testing.assert_allclose(found, want, rtol=0, atol=64 * scale * np.finfo(dtype).eps)


@pytest.mark.parametrize("order", [None, (), *ORDERS])
@pytest.mark.parametrize("name", suite.tensors())
def test_every_order_gives_the_same_sums(name: str, order: tuple[int, ...] | None) -> None:
    check(kernel(order), suite.tensors()[name](size="small"), 32)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", [None, (0, 2, 1), (1, 0, 2)])
def test_ranks_of_every_length(order: tuple[int, ...] | None, dtype: str) -> None:
    tensor = random_tensor((7, 5, 6), 60)
    for rank in (0, *range(1, 20), 31, 32, 33, 64, 100):
        check(kernel(order, dtype), tensor, rank, dtype)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (9, 8, 7)])
@pytest.mark.parametrize("nnz", [0, 1, 12])
def test_degenerate_tensors(shape: tuple[int, int, int], nnz: int, idtype: str) -> None:
    for order in (None, (0, 2, 1)):
        check(kernel(order, "float32", idtype), random_tensor(shape, nnz), 9)


def test_a_row_and_its_fibers_are_summed_in_registers() -> None:
    func = kernel(None).compiled.stage(3)
    loops = [f for f in collect(func.body, tirx.For) if str(f.loop_var.name) == "j"]
    assert loops
    for loop in loops:
        stores = collect(loop.body, tirx.BufferStore)
        assert {str(s.buffer.name) for s in stores} == {"acc", "fiber"}


def test_factors_stay_in_sums_of_values_that_need_not_be_finite() -> None:
    second = run(TO_STAGE_2, as_module(ops.mttkrp()))
    assert FACTOR not in schedule(second).mod.script()
    second = run(TO_STAGE_2, as_module(ops.mttkrp().with_attr(FINITE, True)))
    assert FACTOR in schedule(second).mod.script()


def test_what_is_not_finite_stays_with_its_fibers() -> None:
    """An empty fiber must not bring in its factor."""
    tensor = random_tensor((4, 3, 5), 20)
    B, C = factor_matrices(tensor, 8, "float32")
    tensor = CooTensor(tensor.coords[:, tensor.coords[1] != 2], tensor.values[tensor.coords[1] != 2], tensor.shape)
    B[2] = np.inf
    found = kernel(None)(T_=tensor.with_values(tensor.values.astype("float32")), B=B, C=C)
    assert np.isfinite(found).all()


@T.prim_func
def ttv(
    t: T.handle,
    x_data: T.handle,
    y_data: T.handle,
    indptr_j: T.handle,
    indices_j: T.handle,
    indptr_k: T.handle,
    indices_k: T.handle,
    n_i: T.int32,
    n_j: T.int32,
    n_k: T.int32,
    fibers: T.int32,
    nnz: T.int32,
):
    I = T.dense_fixed(n_i)
    J = T.sparse_variable(I, (n_j, fibers), (indptr_j, indices_j))
    K = T.sparse_variable(J, (n_k, nnz), (indptr_k, indices_k))
    K_dense = T.dense_fixed(n_k)
    A = T.match_sparse_buffer(t, (I, J, K), "float32")
    x = T.match_sparse_buffer(x_data, (K_dense,), "float32")
    y = T.match_sparse_buffer(y_data, (I, J), "float32")
    with T.sp_iter([I, J, K], "SSR", "ttv") as [i, j, k]:
        with T.init():
            y[i, j] = 0
        y[i, j] = y[i, j] + A[i, j, k] * x[k]


@pytest.mark.parametrize("name", suite.tensors())
def test_tensor_times_vector(name: str) -> None:
    tensor = suite.tensors()[name](size="small")
    x = np.random.default_rng(3).standard_normal(tensor.shape[2]).astype("float32")
    i, j, k = np.asarray(tensor.coords)
    _, fiber = np.unique(i.astype(np.int64) * tensor.shape[1] + j, return_inverse=True)
    want = np.bincount(fiber, tensor.values.astype(np.float64) * x[k])
    np.testing.assert_allclose(sparsetir.build(ttv)(A=tensor, x=x), want, rtol=0, atol=1e-4)


@T.prim_func
def contract(
    t: T.handle,
    u_data: T.handle,
    v_data: T.handle,
    y_data: T.handle,
    indptr_j: T.handle,
    indices_j: T.handle,
    indptr_k: T.handle,
    indices_k: T.handle,
    n_i: T.int32,
    n_j: T.int32,
    n_k: T.int32,
    fibers: T.int32,
    nnz: T.int32,
):
    I = T.dense_fixed(n_i)
    J = T.sparse_variable(I, (n_j, fibers), (indptr_j, indices_j))
    K = T.sparse_variable(J, (n_k, nnz), (indptr_k, indices_k))
    J_dense = T.dense_fixed(n_j)
    K_dense = T.dense_fixed(n_k)
    A = T.match_sparse_buffer(t, (I, J, K), "float32")
    u = T.match_sparse_buffer(u_data, (J_dense,), "float32")
    v = T.match_sparse_buffer(v_data, (K_dense,), "float32")
    y = T.match_sparse_buffer(y_data, (I,), "float32")
    with T.sp_iter([I, J, K], "SRR", "contract") as [i, j, k]:
        with T.init():
            y[i] = 0
        y[i] = y[i] + A[i, j, k] * u[j] * v[k]


@pytest.mark.parametrize("name", suite.tensors())
def test_tensor_times_two_vectors(name: str) -> None:
    tensor = suite.tensors()[name](size="small")
    rng = np.random.default_rng(3)
    u, v = (rng.standard_normal(extent).astype("float32") for extent in tensor.shape[1:])
    built = sparsetir.build(contract)
    want = expected(tensor, u[:, None], v[:, None])[:, 0]
    np.testing.assert_allclose(built(A=tensor, u=u, v=v), want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert "fiber" in built.script(stage=3)


LOOPS = """
@tir.prim_func(s_tir=True)
def main(p: tir.Buffer((9,), "int32"), t: tir.Buffer((99,), "float32"), b: tir.Buffer((8, 16), "float32"),
         c: tir.Buffer((99, 16), "float32"), d: tir.Buffer((8, 16), "float32")):
    for j in range(8):
        for k in tir.serial(p[j + 1] - p[j], annotations={{"sparsetir.factor": 1}}):
            for r in tir.vectorized(16):
                {body}
"""


def factored(body: str) -> tirx.PrimFunc:
    text = LOOPS.format(body=body)
    return FactorInvariants(as_module(tvm.script.from_source(text, {"tir": tir})))["main"]


@pytest.mark.parametrize(
    "body",
    [
        "d[0, r] = d[0, r] + t[k] * b[j, r] * c[k, r]",
        "d[j, r] = d[j, r] + b[j, r] * (t[k] * c[k, r])",
        "d[j, r] = d[j, r] + b[j, r] * t[k]",
    ],
)
def test_fixed_factors_leave_the_sum(body: str) -> None:
    func = factored(body)
    held = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    assert [str(b.name) for b in held] == ["fiber"]
    sums = next(f for f in collect(func.body, tirx.For) if str(f.loop_var.name) == "k")
    assert "b[" not in str(sums)
    assert FACTOR not in func.script()
    rng = np.random.default_rng(0)
    p = np.array([0, 3, 3, 5, 9, 10, 20, 21, 30], np.int32)
    t, b, c, d = (rng.standard_normal(s).astype("float32") for s in (99, (8, 16), (99, 16), (8, 16)))
    want = d.astype(np.float64)
    for j in range(8):
        for k in range(p[j + 1] - p[j]):
            want[0 if "d[0" in body else j] += t[k] * b[j].astype(np.float64) * (c[k] if "c[" in body else 1)
    arrays = [tvm.runtime.tensor(a) for a in (p, t, b, c, d)]
    tvm.compile(as_module(func), target="llvm", tir_pipeline="s_tir")["main"](*arrays)
    np.testing.assert_allclose(arrays[-1].numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        "d[j, r] = d[j, r] + t[k] * c[k, r]",
        "d[j, r] = d[j, r] * (b[j, r] * t[k])",
        "d[k % 8, r] = d[k % 8, r] + t[k] * b[j, r]",
        "d[j, r] = d[j, r] + t[k] * d[j, 15 - r]",
        "d[j, r] = d[j, r] + (t[k] + b[j, r])",
    ],
)
def test_other_sums_stay(body: str) -> None:
    func = factored(body)
    assert not collect(func.body, tirx.AllocBuffer)
    assert FACTOR not in func.script()


TILES = """
@tir.prim_func(s_tir=True)
def main(p: tir.Buffer((9,), "int32"), b: tir.Buffer((99, 20), "float32"), d: tir.Buffer((8, 20), "float32")):
    for i in range(8):
        for r in range(20):
            d[i, r] = tir.float32({start})
        for j in range(p[i + 1] - p[i]):
            for r_0 in range(3):
                for r_1 in tir.vectorized(8):
                    if r_0 * 8 + r_1 < 20:
                        {body}
"""


def lifted(body: str, start: str = "0") -> tirx.PrimFunc:
    text = TILES.format(body=body, start=start)
    return InterchangeLoops(as_module(tvm.script.from_source(text, {"tir": tir})))["main"]


def nest(func: tirx.PrimFunc) -> list[str]:
    return [str(f.loop_var.name) for f in collect(func.body, tirx.For)]


def test_tiles_are_lifted_and_begun_one_at_a_time() -> None:
    func = lifted("d[i, r_0 * 8 + r_1] = d[i, r_0 * 8 + r_1] + b[j, r_0 * 8 + r_1]", "2")
    assert nest(func) == ["i", "r_0", "r_1", "j", "r_1"]
    rng = np.random.default_rng(0)
    p = np.array([0, 3, 3, 5, 9, 10, 20, 21, 30], np.int32)
    b = rng.standard_normal((99, 20)).astype("float32")
    d = tvm.runtime.tensor(np.full((8, 20), np.nan, "float32"))
    target = "llvm"
    tvm.compile(as_module(func), target=target, tir_pipeline="s_tir")["main"](*map(tvm.runtime.tensor, (p, b)), d)
    want = np.stack([2 + b[: p[i + 1] - p[i]].sum(0) for i in range(8)])
    np.testing.assert_allclose(d.numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        "d[j % 8, r_0 * 8 + r_1] = d[j % 8, r_0 * 8 + r_1] + b[j, r_0 * 8 + r_1]",
        "d[i, r_1] = d[i, r_1] + b[j, r_0 * 8 + r_1]",
        "d[i, r_0 * 8 + r_1] = d[i, 0] + b[j, r_0 * 8 + r_1]",
        "d[i, r_0 * 8 + r_1] = b[j, r_0 * 8 + r_1]",
    ],
)
def test_other_tiles_stay(body: str) -> None:
    assert nest(lifted(body)) == ["i", "r", "j", "r_0", "r_1"]
