# SPDX-License-Identifier: Apache-2.0
"""Programs about axes: shared, rootless, singleton, named values."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import Arguments, case
from corpus.data import matrix, poisoned, values
from corpus.matrix import sddmm_expected, sddmm_inputs, values_inputs


def _heads_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = sddmm_inputs(rng, kind, dtype, idtype)
    heads, feat = 3, min(args["feat"], 8)
    operands = {name: values(rng, (heads, len(args[name]), feat), dtype) for name in "xy"}
    return {**args, **operands, "heads": heads, "feat": feat}


def _heads_expected(args: Arguments) -> np.ndarray:
    return np.stack([sddmm_expected({**args, "x": x, "y": y}) for x, y in zip(args["x"], args["y"], strict=True)])


@case(_heads_inputs, _heads_expected, "c")
def multi_head_sddmm(dtype: str, idtype: str) -> Any:
    """A dense axis in front of the structure all heads share."""

    @T.prim_func
    def func(
        x: T.handle, y: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32, heads: T.int32,
    ):  # fmt: skip
        H = T.dense_fixed(heads)
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        X = T.match_sparse_buffer(x, (H, I, K), dtype)
        Y = T.match_sparse_buffer(y, (H, J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (H, I, J), dtype)
        with T.sp_iter([I, J, H, K], "SSSR", "heads") as [i, j, h, k]:
            with T.init():
                C[h, i, j] = 0
            C[h, i, j] = C[h, i, j] + X[h, i, k] * Y[h, j, k]

    return func


def _gemm_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    operands = {"a": values(rng, (s.m, s.n), dtype), "b": values(rng, (s.n, s.feat), dtype)}
    return {**operands, **s.sizes("m", "n", "feat")}


@case(_gemm_inputs, lambda args: args["a"].astype(np.float64) @ args["b"].astype(np.float64), "c", tolerance=1e-4)
def gemm(dtype: str, idtype: str) -> Any:
    """Dense axes only."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, c: T.handle, m: T.int32, n: T.int32, feat: T.int32):
        I = T.dense_fixed(m, idtype)
        J = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "gemm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _diagonal_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    absent = np.arange(s.m) >= s.n
    operands = {"a": poisoned(values(rng, s.m, dtype), absent), "b": values(rng, (s.n, s.feat), dtype)}
    return {**operands, **s.sizes("m", "n", "feat")}


def _diagonal_expected(args: Arguments) -> np.ndarray:
    kept = min(args["m"], args["n"])
    out = np.zeros((args["m"], args["feat"]))
    out[:kept] = args["a"][:kept, None].astype(np.float64) * args["b"][:kept]
    return out


@case(_diagonal_inputs, _diagonal_expected, "c")
def diagonal(dtype: str, idtype: str) -> Any:
    """A singleton whose coordinate is a formula."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, c: T.handle, m: T.int32, n: T.int32, feat: T.int32):
        I = T.dense_fixed(m, idtype)
        J = T.singleton(I, n, lambda i, s: i, idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "diagonal") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _rootless_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    n = matrix(rng, kind).n
    filled = 0 if kind == "zero_nnz" else max(1, n // 2)
    arrays = {"indptr": np.array([0, filled], idtype), "where": rng.integers(0, n + 1, 1).astype(idtype)}
    operands = {"a": values(rng, filled, dtype), "b": values(rng, 1, dtype)}
    return {**operands, **arrays, "n": n, "nnz": filled}


def _rootless_expected(args: Arguments) -> np.ndarray:
    out = np.zeros(args["n"] + 1)
    out[: args["nnz"]] = args["a"]
    out[args["where"]] += args["b"]
    return out[: args["n"]]


@case(_rootless_inputs, _rootless_expected, "y")
def rootless(dtype: str, idtype: str) -> Any:
    """A ragged vector and a vector of one element, neither below another axis."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, y: T.handle, indptr: T.handle, where: T.handle, n: T.int32, nnz: T.int32):
        J = T.dense_variable(None, (n, nnz), indptr, idtype)
        W = T.singleton(None, n, where, idtype)
        J_dense = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (J,), dtype)
        B = T.match_sparse_buffer(b, (W,), dtype)
        Y = T.match_sparse_buffer(y, (J_dense,), dtype)
        with T.sp_iter([J_dense], "S", "rootless") as [j]:
            Y[j] = A[j] + B[j]

    return func


@case(values_inputs, lambda args: (np.exp(args["a"]) ** 2, 1 + 2 * args["a"]), "b", "c")
def named_values(dtype: str, idtype: str) -> Any:
    """A value of the body given a name."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([I, J], "SS", "named") as [i, j]:
            value = A[i, j]
            power = T.exp(value)
            B[i, j] = power * power
            C[i, j] = 1 + 2 * value

    return func
