# SPDX-License-Identifier: Apache-2.0
"""Programs that exercise one feature of the language each."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import FLOATS, case
from corpus.data import csr_dense, matrix, offsets, poisoned, row_ids, row_lengths, values
from corpus.formats import bsr_expected
from corpus.matrix import (
    sddmm_expected,
    sddmm_inputs,
    spmm_expected,
    spmm_inputs,
    values_inputs,
)

Arguments = dict[str, Any]


def _without(args: Arguments, *names: str) -> Arguments:
    return {name: value for name, value in args.items() if name not in names}


# ---------------------------------------------------------------- outputs also read


def _accumulate_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = spmm_inputs(rng, kind, dtype, idtype)
    return {**args, "c": values(rng, (args["m"], args["feat"]), dtype)}


@case(_accumulate_inputs, lambda args: args["c"] + spmm_expected(args), "c")
def accumulate(dtype: str, idtype: str) -> Any:
    """No init: what C holds is kept."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "accumulate") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _beta_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    return {**_accumulate_inputs(rng, kind, dtype, idtype), "beta": 0.5}


@case(_beta_inputs, lambda args: 0.5 * args["c"] + spmm_expected(args), "c")
def beta_scale(dtype: str, idtype: str) -> Any:
    """C = A B + beta C, beta a float parameter."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32, beta: T.float32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, K], "SS", "scale") as [i, k]:
            C[i, k] = C[i, k] * T.cast(beta, dtype)
        with T.sp_iter([I, J, K], "SRS", "add") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _power_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind, *(matrix(rng, kind).m,) * 2)
    operands = {"a": values(rng, s.nnz, dtype), "x": values(rng, s.m, dtype)}
    return {**operands, **s.arrays(idtype), **s.sizes("m", "nnz"), "steps": 3}


def _power_expected(args: Arguments) -> np.ndarray:
    dense = csr_dense({**args, "n": args["m"]})
    return 0.125 * np.linalg.matrix_power(dense, 3) @ args["x"].astype(np.float64)


@case(_power_inputs, _power_expected, "x", tolerance=1e-4)
def power_iteration(dtype: str, idtype: str) -> Any:
    """Two iterations in an ordinary loop, each using what the other wrote."""

    @T.prim_func
    def func(a: T.handle, x: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, nnz: T.int32, steps: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (m, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        X = T.match_sparse_buffer(x, (I,), dtype)
        Y = T.alloc_sparse_buffer((I,), dtype)
        for _ in T.serial(steps):
            with T.sp_iter([I, J], "SR", "multiply") as [i, j]:
                with T.init():
                    Y[i] = 0
                Y[i] = Y[i] + A[i, j] * X[j]
            with T.sp_iter([I], "S", "halve") as [i]:
                X[i] = Y[i] * 0.5

    return func


def _batched_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = spmm_inputs(rng, kind, dtype, idtype)
    return {**args, "batch": 2, "b": values(rng, (2, args["n"], args["feat"]), dtype)}


@case(_batched_inputs, lambda args: csr_dense(args) @ args["b"].astype(np.float64), "c")
def batched_spmm(dtype: str, idtype: str) -> Any:
    """An iteration in a loop whose variable it uses."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32, batch: T.int32,
    ):  # fmt: skip
        N = T.dense_fixed(batch)
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (N, J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (N, I, K), dtype)
        for t in T.serial(batch):
            with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
                with T.init():
                    C[t, i, k] = 0
                C[t, i, k] = C[t, i, k] + A[i, j] * B[t, j, k]

    return func


# ---------------------------------------------------------------- scratch, plain buffers


def _squares_expected(args: Arguments) -> np.ndarray:
    return np.bincount(row_ids(args["indptr"]), args["a"].astype(np.float64) ** 2, minlength=args["m"])


@case(values_inputs, _squares_expected, "y")
def scratch(dtype: str, idtype: str) -> Any:
    """Two iterations share an allocated sparse buffer."""

    @T.prim_func
    def func(a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        S = T.alloc_sparse_buffer((I, J), dtype)
        with T.sp_iter([I, J], "SS", "square") as [i, j]:
            S[i, j] = A[i, j] * A[i, j]
        with T.sp_iter([I, J], "SR", "sum") as [i, j]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + S[i, j]

    return func


def _plain_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = spmm_inputs(rng, kind, dtype, idtype)
    return {**_without(args, "b"), "B": args["b"]}


@case(_plain_inputs, lambda args: np.maximum(csr_dense(args) @ args["B"].astype(np.float64), 0), "C")
def plain_buffers(dtype: str, idtype: str) -> Any:
    """Ordinary buffers and an ordinary loop nest beside the sparse ones."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        B = T.match_buffer(b, (n, feat), dtype)
        C = T.match_buffer(c, (m, feat), dtype)
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = T.cast(0, dtype)
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        for p, q in T.grid(m, feat):
            with T.sblock("relu"):
                i, k = T.axis.remap("SS", [p, q])
                C[i, k] = T.max(C[i, k], T.cast(0, dtype))

    return func


def _clipped(args: Arguments) -> tuple[np.ndarray, np.ndarray]:
    kept = np.where(args["a"] > 0, args["a"], 0)
    return kept, np.bincount(row_ids(args["indptr"]), args["a"] > 0, minlength=args["m"])


@case(values_inputs, _clipped, "b", "y")
def conditional(dtype: str, idtype: str) -> Any:
    """Choices inside an iteration, as a statement and as an expression."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        Y = T.match_sparse_buffer(y, (I,), "int32")
        with T.sp_iter([I, J], "SS", "clip") as [i, j]:
            if A[i, j] > 0:
                B[i, j] = A[i, j]
            else:
                B[i, j] = 0
        with T.sp_iter([I, J], "SR", "count") as [i, j]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + T.if_then_else(A[i, j] > 0, 1, 0)

    return func


# ---------------------------------------------------------------- values and defaults


@case(values_inputs, lambda args: 2 * csr_dense(args, fill=2.5), "c")
def default_value(dtype: str, idtype: str) -> Any:
    """Absent coordinates read as the buffer's default."""

    @T.prim_func
    def func(a: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), dtype, default_value=2.5)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        with T.sp_iter([I, J_dense], "SS", "fill") as [i, j]:
            C[i, j] = A[i, j] * 2

    return func


def _ragged_default_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    m = matrix(rng, kind).m
    lengths = row_lengths(rng, kind, m)
    indptr = offsets(lengths, idtype)
    data = values(rng, int(indptr[-1]), dtype)
    return {"a": data, "indptr": indptr, "m": m, "longest": int(lengths.max(initial=0)) + 2, "nnz": len(data)}


def _ragged_default_expected(args: Arguments) -> np.ndarray:
    out = np.full((args["m"], args["longest"]), -1.0)
    rows = row_ids(args["indptr"])
    out[rows, np.arange(args["nnz"]) - args["indptr"][rows]] = args["a"]
    return out


@case(_ragged_default_inputs, _ragged_default_expected, "c", dtypes=("float32", "float64", "int32"))
def pad_ragged(dtype: str, idtype: str) -> Any:
    """A ragged row ends where its length says, not where the next row ends."""

    @T.prim_func
    def func(a: T.handle, c: T.handle, indptr: T.handle, m: T.int32, longest: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (longest, nnz), indptr, idtype)
        J_dense = T.dense_fixed(longest)
        A = T.match_sparse_buffer(a, (I, J), dtype, default_value=-1)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        with T.sp_iter([I, J_dense], "SS", "pad") as [i, j]:
            C[i, j] = A[i, j]

    return func


def _mask_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    operands = {"mask": values(rng, s.nnz, "bool"), "x": values(rng, (s.m, s.n), dtype)}
    return {**operands, **s.arrays(idtype), **s.sizes("m", "n", "nnz")}


def _mask_expected(args: Arguments) -> tuple[np.ndarray, np.ndarray]:
    mask = csr_dense(args, "mask") != 0
    return np.where(mask, args["x"], 0), mask.any(axis=1)


@case(_mask_inputs, _mask_expected, "c", "any_set", dtypes=(*FLOATS, "int32"))
def bool_mask(dtype: str, idtype: str) -> Any:
    """Bool values: a mask read by coordinate, and a reduction with ``or``."""

    @T.prim_func
    def func(
        mask: T.handle, x: T.handle, c: T.handle, any_set: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        M = T.match_sparse_buffer(mask, (I, J), "bool")
        X = T.match_sparse_buffer(x, (I, J_dense), dtype)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        Any = T.match_sparse_buffer(any_set, (I,), "bool")
        with T.sp_iter([I, J_dense], "SS", "choose") as [i, j]:
            C[i, j] = T.Select(M[i, j], X[i, j], T.cast(0, dtype))
        with T.sp_iter([I, J], "SR", "any") as [i, j]:
            with T.init():
                Any[i] = False
            Any[i] = Any[i] or M[i, j]

    return func


def _quantised_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = spmm_inputs(rng, kind, dtype, idtype)
    return {**args, "a": rng.integers(-128, 128, args["nnz"]).astype("int8")}


@case(_quantised_inputs, spmm_expected, "c", tolerance=5e-3)
def quantised(dtype: str, idtype: str) -> Any:
    """int8 weights, converted in the body."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), "int8")
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "quantised") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + T.Cast(dtype, A[i, j]) * B[j, k]

    return func


@case(spmm_inputs, spmm_expected, "c", dtypes=("float16", "bfloat16"), tolerance=1e-6)
def csrmm_half(dtype: str, idtype: str) -> Any:
    """Half precision sums in single precision: the result is rounded once."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "csrmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


# ---------------------------------------------------------------- axes


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


# ---------------------------------------------------------------- spellings


def _implicit_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    return _without(spmm_inputs(rng, kind, dtype, idtype), "nnz")


@case(_implicit_inputs, spmm_expected, "c")
def implicit_sizes(dtype: str, idtype: str) -> Any:
    """The number of stored positions comes from the caller's arrays."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, n, (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "csrmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


@case(_implicit_inputs, spmm_expected, "c")
def buffer_params(dtype: str, idtype: str) -> Any:
    """Index arrays given as buffers: the axis takes its count and index type from them."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, m: T.int32, n: T.int32, feat: T.int32,
        indptr: T.Buffer((m + 1,), idtype), indices: T.Buffer(("nnz",), idtype),
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, n, (indptr, indices))
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "csrmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


@case(spmm_inputs, lambda args: 2 * spmm_expected(args), "c")
def rfc_names(dtype: str, idtype: str) -> Any:
    """The namespaced names, and the ordinary buffer calls given axes."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.sp.dense_fixed(m)
        J = T.sp.compressed_varied(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.sp.dense_fixed(n)
        K = T.sp.dense_fixed(feat)
        A = T.sp.match_buffer(a, (I, J), dtype)
        B = T.match_buffer(b, (J_dense, K), dtype)
        C = T.sp.match_buffer(c, [I, K], dtype=dtype)
        S = T.sp.alloc_buffer((I, J), dtype)
        D = T.alloc_buffer((I, K), dtype)
        with T.sp.iteration([I, J], "SS", "double") as [i, j]:
            S[i, j] = A[i, j] * 2
        with T.sp.iteration([I, J, K], "SRS", "csrmm") as [i, j, k]:
            T.sp.iteration_attr({"search": "inline"})
            with T.init():
                D[i, k] = 0
            D[i, k] = D[i, k] + S[i, j] * B[j, k]
        with T.sp.iteration([I, K], "SS", "copy") as [i, k]:
            C[i, k] = D[i, k]

    return func


def _levels_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A ragged axis and a fixed one with a compressed one below it, of mixed index types."""
    s = matrix(rng, kind)
    width, n1 = min(2, s.n), 5
    picks = np.sort(np.argsort(rng.random((s.m, s.n)), axis=1)[:, :width], axis=1)
    below = matrix(rng, kind if kind != "wide" else "random", s.m * width, n1)
    lengths = row_lengths(rng, kind, s.m)
    arrays = {"indices_1": picks.reshape(-1).astype("int32"), "indptr_2": offsets(lengths, "int32")}
    arrays |= below.arrays("int64", "_3")
    operands = {"a": values(rng, below.nnz, dtype), "b": values(rng, int(lengths.sum()), dtype)}
    operands["x"] = values(rng, (s.n, n1), dtype)
    return {**operands, **arrays, "m": s.m, "n": s.n, "c": width, "n1": n1, "nnz": below.nnz}


def _levels_expected(args: Arguments) -> np.ndarray:
    slot = row_ids(args["indptr_3"])
    terms = args["a"].astype(np.float64) * args["x"][args["indices_1"][slot], args["indices_3"]]
    left = np.bincount(slot // args["c"], terms, minlength=args["m"])
    return left + np.bincount(row_ids(args["indptr_2"]), args["b"].astype(np.float64), minlength=args["m"])


@case(_levels_inputs, _levels_expected, "y")
def rfc_axes(dtype: str, idtype: str) -> Any:
    """The RFC's chain of axes, int32 above int64, with the counts it leaves out."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, x: T.handle, y: T.handle,
        indices_1: T.handle, indptr_2: T.handle, indptr_3: T.handle, indices_3: T.handle,
        m: T.int32, n: T.int32, c: T.int32, n1: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J1 = T.sparse_fixed(I, (n, c), indices_1, idtype="int32")
        J2 = T.dense_variable(I, n, indptr_2, idtype="int32")
        J3 = T.sparse_variable(J1, (n1, nnz), (indptr_3, indices_3), idtype="int64")
        J1_dense = T.dense_fixed(n)
        J3_dense = T.dense_fixed(n1)
        A = T.match_sparse_buffer(a, (I, J1, J3), dtype)
        B = T.match_sparse_buffer(b, (I, J2), dtype)
        X = T.match_sparse_buffer(x, (J1_dense, J3_dense), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J1, J3], "SRR", "levels") as [i, j, k]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + A[i, j, k] * X[j, k]
        with T.sp_iter([I, J2], "SR", "ragged") as [i, j]:
            Y[i] = Y[i] + B[i, j]

    return func


def _rfc_sddmm_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = sddmm_inputs(rng, kind, dtype, "int32")
    renamed = {"a": args.pop("x"), "b": args.pop("y"), "feat_size": args.pop("feat")}
    return {**args, **renamed, "x": values(rng, args["nnz"], dtype)}


def _rfc_sddmm_expected(args: Arguments) -> np.ndarray:
    return sddmm_expected({**args, "x": args["a"], "y": args["b"]}) * args["x"]


@case(_rfc_sddmm_inputs, _rfc_sddmm_expected, "y", dtypes=("float32",))
def rfc_sddmm(dtype: str, idtype: str) -> Any:
    """The RFC's first program, as printed there."""

    @T.prim_func
    def func(
        a: T.handle,
        b: T.handle,
        x: T.handle,
        y: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: T.int32,
        n: T.int32,
        feat_size: T.int32,
        nnz: T.int32,
    ) -> None:
        T.func_attr({"global_symbol": "main", "tir.noalias": True, "sparse_tir_level": 2})
        # sparse axes
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        J_detach = T.dense_fixed(n)
        K = T.dense_fixed(feat_size)
        # sparse buffers
        A = T.match_sparse_buffer(a, (I, K), "float32")
        B = T.match_sparse_buffer(b, (J_detach, K), "float32")
        X = T.match_sparse_buffer(x, (I, J), "float32")
        Y = T.match_sparse_buffer(y, (I, J), "float32")
        # sparse iterations
        with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
            with T.init():
                Y[i, j] = 0.0
            Y[i, j] = Y[i, j] + A[i, k] * B[j, k] * X[i, j]

    return func


def _rfc_rewrite_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = spmm_inputs(rng, kind, dtype, "int32")
    args["feat_size"] = args.pop("feat")
    keys = np.unique(np.stack([row_ids(args["indptr"]), args["indices"]], axis=1) // 4, axis=0).reshape(-1, 2)
    m, n = -(-args["m"] // 4), -(-args["n"] // 4)
    arrays = {"indptr_4": np.searchsorted(keys[:, 0], np.arange(m + 1)), "indices_4": keys[:, 1]}
    return {**args, **{k: v.astype("int32") for k, v in arrays.items()}, "m_4": m, "n_4": n, "nnz_4": len(keys)}


def _rfc_rewrite_expected(args: Arguments) -> tuple[np.ndarray, np.ndarray]:
    dense = np.zeros((args["m_4"] * 4, args["n_4"] * 4))
    dense[: args["m"], : args["n"]] = csr_dense(args)
    tiles = dense.reshape(args["m_4"], 4, args["n_4"], 4).transpose(0, 2, 1, 3)
    blocks = tiles[row_ids(args["indptr_4"]), args["indices_4"]]
    right = np.zeros((args["n_4"] * 4, args["feat_size"]))
    right[: args["n"]] = args["b"]
    sizes = {"mb": args["m_4"], "blk": 4, "feat": args["feat_size"]}
    arrays = {"indptr": args["indptr_4"], "indices": args["indices_4"]}
    product = bsr_expected({**sizes, **arrays, "a": blocks, "b": right.reshape(args["n_4"], 4, -1)})
    return product.reshape(-1, args["feat_size"])[: args["m"]], blocks


@case(_rfc_rewrite_inputs, _rfc_rewrite_expected, "c", "a_4", dtypes=("float32",))
def rfc_bsr_rewrite(dtype: str, idtype: str) -> Any:
    """The RFC's rewritten program, its 4 x 4 part: convert, then multiply blocks."""

    @T.prim_func
    def func(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: T.int32,
        n: T.int32,
        feat_size: T.int32,
        nnz: T.int32,
        a_4: T.handle,
        indptr_4: T.handle,
        indices_4: T.handle,
        m_4: T.int32,
        n_4: T.int32,
        nnz_4: T.int32,
    ) -> None:
        T.func_attr({"global_symbol": "main", "tir.noalias": True, "sparse_tir_level": 2, "composable": 1})
        I = T.dense_fixed(m, "int32")
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        J_detach = T.dense_fixed(n, "int32")
        K = T.dense_fixed(feat_size, "int32")
        IO_4 = T.dense_fixed(m_4, "int32")
        JO_4 = T.sparse_variable(IO_4, (n_4, nnz_4), (indptr_4, indices_4), "int32")
        II_4 = T.dense_fixed(4, "int32")
        JI_4 = T.dense_fixed(4, "int32")
        A = T.match_sparse_buffer(a, [I, J], dtype="float32")
        B = T.match_sparse_buffer(b, [J_detach, K], dtype="float32")
        C = T.match_sparse_buffer(c, [I, K], dtype="float32")
        A_4 = T.match_sparse_buffer(a_4, [IO_4, JO_4, II_4, JI_4], dtype="float32")
        with T.sp_iter([IO_4, JO_4, II_4, JI_4], "SSSS", "rewrite_A_4") as [io_4, jo_4, ii_4, ji_4]:
            T.sp_iter_attr({"preprocess": True})
            A_4[io_4, jo_4, ii_4, ji_4] = A[io_4 * 4 + ii_4, jo_4 * 4 + ji_4]
        with T.sp_iter([IO_4, II_4, JO_4, JI_4, K], "SSRRS", "csrmm_4") as [io_4, ii_4, jo_4, ji_4, k]:
            with T.init():
                C[io_4 * 4 + ii_4, k] = T.float32(0)
            C[io_4 * 4 + ii_4, k] = C[io_4 * 4 + ii_4, k] + A_4[io_4, jo_4, ii_4, ji_4] * B[jo_4 * 4 + ji_4, k]

    return func
