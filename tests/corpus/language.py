# SPDX-License-Identifier: Apache-2.0
"""Programs that exercise one feature of the language each."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import FLOATS, Arguments, case
from corpus.data import csr_dense, matrix, offsets, row_ids, row_lengths, values
from corpus.matrix import spmm_expected, spmm_inputs, values_inputs


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
