# SPDX-License-Identifier: Apache-2.0
"""Programs over tensors of three dimensions and more: CSF and ragged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import Arguments, Case, case
from corpus.data import (
    MATRIX_SIZES,
    csf_coordinates,
    csf_dense,
    csr_dense,
    matrix,
    offsets,
    row_ids,
    row_lengths,
    tensor,
    values,
)

Generate = Callable[[np.random.Generator, str, str, str], Arguments]
FACTORS = ("b", "c", "d", "e")
MIXED = "abcde"


# ---------------------------------------------------------------- MTTKRP


def _mttkrp_inputs(order: int) -> Generate:
    def inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
        args = tensor(rng, kind, order, idtype)
        args["a"] = values(rng, args[f"n{order - 1}"], dtype)
        args["rank"] = MATRIX_SIZES[kind][2]
        for level, name in enumerate(FACTORS[: order - 1], start=1):
            args[name] = values(rng, (args[f"d{level}"], args["rank"]), dtype)
        return args

    return inputs


def _mttkrp_expected(order: int) -> Callable[[Arguments], np.ndarray]:
    subscripts = MIXED[:order] + "," + ",".join(f"{axis}r" for axis in MIXED[1:order]) + "->ar"

    def expected(args: Arguments) -> np.ndarray:
        factors = [args[name].astype(np.float64) for name in FACTORS[: order - 1]]
        return np.einsum(subscripts, csf_dense(args, order), *factors)

    return expected


def _mttkrp(order: int) -> Callable[[Callable[[str, str], Any]], Case]:
    return case(_mttkrp_inputs(order), _mttkrp_expected(order), "y")


@_mttkrp(3)
def mttkrp_3d(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, y: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        indptr2: T.handle, indices2: T.handle,
        d0: T.int32, d1: T.int32, d2: T.int32, n0: T.int32, n1: T.int32, n2: T.int32, rank: T.int32,
    ):  # fmt: skip
        I0 = T.sparse_variable(None, (d0, n0), (indptr0, indices0), idtype)
        I1 = T.sparse_variable(I0, (d1, n1), (indptr1, indices1), idtype)
        I2 = T.sparse_variable(I1, (d2, n2), (indptr2, indices2), idtype)
        D0 = T.dense_fixed(d0)
        D1 = T.dense_fixed(d1)
        D2 = T.dense_fixed(d2)
        R = T.dense_fixed(rank)
        A = T.match_sparse_buffer(a, (I0, I1, I2), dtype)
        B = T.match_sparse_buffer(b, (D1, R), dtype)
        C = T.match_sparse_buffer(c, (D2, R), dtype)
        Y = T.match_sparse_buffer(y, (D0, R), dtype)
        with T.sp_iter([I0, I1, I2, R], "SRRS", "mttkrp") as [i, j, k, r]:
            with T.init():
                Y[i, r] = 0
            Y[i, r] = Y[i, r] + A[i, j, k] * B[j, r] * C[k, r]

    return func


@_mttkrp(4)
def mttkrp_4d(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, d: T.handle, y: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        indptr2: T.handle, indices2: T.handle, indptr3: T.handle, indices3: T.handle,
        d0: T.int32, d1: T.int32, d2: T.int32, d3: T.int32,
        n0: T.int32, n1: T.int32, n2: T.int32, n3: T.int32, rank: T.int32,
    ):  # fmt: skip
        I0 = T.sparse_variable(None, (d0, n0), (indptr0, indices0), idtype)
        I1 = T.sparse_variable(I0, (d1, n1), (indptr1, indices1), idtype)
        I2 = T.sparse_variable(I1, (d2, n2), (indptr2, indices2), idtype)
        I3 = T.sparse_variable(I2, (d3, n3), (indptr3, indices3), idtype)
        D0 = T.dense_fixed(d0)
        D1 = T.dense_fixed(d1)
        D2 = T.dense_fixed(d2)
        D3 = T.dense_fixed(d3)
        R = T.dense_fixed(rank)
        A = T.match_sparse_buffer(a, (I0, I1, I2, I3), dtype)
        B = T.match_sparse_buffer(b, (D1, R), dtype)
        C = T.match_sparse_buffer(c, (D2, R), dtype)
        D = T.match_sparse_buffer(d, (D3, R), dtype)
        Y = T.match_sparse_buffer(y, (D0, R), dtype)
        with T.sp_iter([I0, I1, I2, I3, R], "SRRRS", "mttkrp") as [i, j, k, h, r]:
            with T.init():
                Y[i, r] = 0
            Y[i, r] = Y[i, r] + A[i, j, k, h] * B[j, r] * C[k, r] * D[h, r]

    return func


@_mttkrp(5)
def mttkrp_5d(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, y: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle, indptr2: T.handle,
        indices2: T.handle, indptr3: T.handle, indices3: T.handle, indptr4: T.handle, indices4: T.handle,
        d0: T.int32, d1: T.int32, d2: T.int32, d3: T.int32, d4: T.int32,
        n0: T.int32, n1: T.int32, n2: T.int32, n3: T.int32, n4: T.int32, rank: T.int32,
    ):  # fmt: skip
        I0 = T.sparse_variable(None, (d0, n0), (indptr0, indices0), idtype)
        I1 = T.sparse_variable(I0, (d1, n1), (indptr1, indices1), idtype)
        I2 = T.sparse_variable(I1, (d2, n2), (indptr2, indices2), idtype)
        I3 = T.sparse_variable(I2, (d3, n3), (indptr3, indices3), idtype)
        I4 = T.sparse_variable(I3, (d4, n4), (indptr4, indices4), idtype)
        D0 = T.dense_fixed(d0)
        D1 = T.dense_fixed(d1)
        D2 = T.dense_fixed(d2)
        D3 = T.dense_fixed(d3)
        D4 = T.dense_fixed(d4)
        R = T.dense_fixed(rank)
        A = T.match_sparse_buffer(a, (I0, I1, I2, I3, I4), dtype)
        B = T.match_sparse_buffer(b, (D1, R), dtype)
        C = T.match_sparse_buffer(c, (D2, R), dtype)
        D = T.match_sparse_buffer(d, (D3, R), dtype)
        E = T.match_sparse_buffer(e, (D4, R), dtype)
        Y = T.match_sparse_buffer(y, (D0, R), dtype)
        with T.sp_iter([I0, I1, I2, I3, I4, R], "SRRRRS", "mttkrp") as [i, j, k, h, g, r]:
            with T.init():
                Y[i, r] = 0
            Y[i, r] = Y[i, r] + A[i, j, k, h, g] * B[j, r] * C[k, r] * D[h, r] * E[g, r]

    return func


# ---------------------------------------------------------------- TTV


def _ttv_inputs(order: int) -> Generate:
    def inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
        args = tensor(rng, kind, order, idtype)
        args["a"] = values(rng, args[f"n{order - 1}"], dtype)
        args["x"] = values(rng, args[f"d{order - 1}"], dtype)
        return args

    return inputs


def _ttv_expected(order: int) -> Callable[[Arguments], np.ndarray]:
    def expected(args: Arguments) -> np.ndarray:
        dense = csf_dense(args, order) @ args["x"].astype(np.float64)
        return dense[tuple(csf_coordinates(args, order - 1).T)]

    return expected


def _ttv(order: int) -> Callable[[Callable[[str, str], Any]], Case]:
    return case(_ttv_inputs(order), _ttv_expected(order), "y")


@_ttv(3)
def ttv_3d(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, x: T.handle, y: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        indptr2: T.handle, indices2: T.handle,
        d0: T.int32, d1: T.int32, d2: T.int32, n0: T.int32, n1: T.int32, n2: T.int32,
    ):  # fmt: skip
        I0 = T.sparse_variable(None, (d0, n0), (indptr0, indices0), idtype)
        I1 = T.sparse_variable(I0, (d1, n1), (indptr1, indices1), idtype)
        I2 = T.sparse_variable(I1, (d2, n2), (indptr2, indices2), idtype)
        D2 = T.dense_fixed(d2)
        A = T.match_sparse_buffer(a, (I0, I1, I2), dtype)
        X = T.match_sparse_buffer(x, (D2,), dtype)
        Y = T.match_sparse_buffer(y, (I0, I1), dtype)
        with T.sp_iter([I0, I1, I2], "SSR", "ttv") as [i, j, k]:
            with T.init():
                Y[i, j] = 0
            Y[i, j] = Y[i, j] + A[i, j, k] * X[k]

    return func


@_ttv(4)
def ttv_4d(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, x: T.handle, y: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        indptr2: T.handle, indices2: T.handle, indptr3: T.handle, indices3: T.handle,
        d0: T.int32, d1: T.int32, d2: T.int32, d3: T.int32, n0: T.int32, n1: T.int32, n2: T.int32, n3: T.int32,
    ):  # fmt: skip
        I0 = T.sparse_variable(None, (d0, n0), (indptr0, indices0), idtype)
        I1 = T.sparse_variable(I0, (d1, n1), (indptr1, indices1), idtype)
        I2 = T.sparse_variable(I1, (d2, n2), (indptr2, indices2), idtype)
        I3 = T.sparse_variable(I2, (d3, n3), (indptr3, indices3), idtype)
        D3 = T.dense_fixed(d3)
        A = T.match_sparse_buffer(a, (I0, I1, I2, I3), dtype)
        X = T.match_sparse_buffer(x, (D3,), dtype)
        Y = T.match_sparse_buffer(y, (I0, I1, I2), dtype)
        with T.sp_iter([I0, I1, I2, I3], "SSSR", "ttv") as [i, j, k, h]:
            with T.init():
                Y[i, j, k] = 0
            Y[i, j, k] = Y[i, j, k] + A[i, j, k, h] * X[h]

    return func


@_ttv(5)
def ttv_5d(dtype: str, idtype: str) -> Any:
    """The stored fibers of four levels fused into one loop."""

    @T.prim_func
    def func(
        a: T.handle, x: T.handle, y: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle, indptr2: T.handle,
        indices2: T.handle, indptr3: T.handle, indices3: T.handle, indptr4: T.handle, indices4: T.handle,
        d0: T.int32, d1: T.int32, d2: T.int32, d3: T.int32, d4: T.int32,
        n0: T.int32, n1: T.int32, n2: T.int32, n3: T.int32, n4: T.int32,
    ):  # fmt: skip
        I0 = T.sparse_variable(None, (d0, n0), (indptr0, indices0), idtype)
        I1 = T.sparse_variable(I0, (d1, n1), (indptr1, indices1), idtype)
        I2 = T.sparse_variable(I1, (d2, n2), (indptr2, indices2), idtype)
        I3 = T.sparse_variable(I2, (d3, n3), (indptr3, indices3), idtype)
        I4 = T.sparse_variable(I3, (d4, n4), (indptr4, indices4), idtype)
        D4 = T.dense_fixed(d4)
        A = T.match_sparse_buffer(a, (I0, I1, I2, I3, I4), dtype)
        X = T.match_sparse_buffer(x, (D4,), dtype)
        Y = T.match_sparse_buffer(y, (I0, I1, I2, I3), dtype)
        with T.sp_iter([T.fuse(I0, I1, I2, I3), I4], "SSSSR", "ttv") as [i, j, k, h, g]:
            with T.init():
                Y[i, j, k, h] = 0
            Y[i, j, k, h] = Y[i, j, k, h] + A[i, j, k, h, g] * X[g]

    return func


# ---------------------------------------------------------------- square sums


def _square_sum_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """Three levels below a dense root."""
    args = tensor(rng, kind, 3, idtype)
    found = csf_coordinates(args, 3)
    dense_root = {"indptr_j": np.searchsorted(args["indices0"], np.arange(args["d0"] + 1)).astype(idtype)}
    dense_root["indptr_j"] = args["indptr1"][dense_root["indptr_j"]]
    arrays = {"indices_j": args["indices1"], "indptr_k": args["indptr2"], "indices_k": args["indices2"]}
    sizes = {"m": args["d0"], "n": args["d1"], "p": args["d2"], "nnz_j": args["n1"], "nnz_k": args["n2"]}
    return {"a": values(rng, len(found), dtype), **dense_root, **arrays, **sizes}


def _square_sum_expected(args: Arguments) -> np.ndarray:
    row = row_ids(args["indptr_j"])[row_ids(args["indptr_k"])]
    return np.bincount(row, args["a"].astype(np.float64) ** 2, minlength=args["m"])


@case(_square_sum_inputs, _square_sum_expected, "b")
def square_sum(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, indptr_j: T.handle, indices_j: T.handle, indptr_k: T.handle, indices_k: T.handle,
        m: T.int32, n: T.int32, p: T.int32, nnz_j: T.int32, nnz_k: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz_j), (indptr_j, indices_j), idtype)
        K = T.sparse_variable(J, (p, nnz_k), (indptr_k, indices_k), idtype)
        A = T.match_sparse_buffer(a, (I, J, K), dtype)
        B = T.match_sparse_buffer(b, (I,), dtype)
        with T.sp_iter([I, J, K], "SRR", "square_sum") as [i, j, k]:
            with T.init():
                B[i] = 0
            B[i] = B[i] + A[i, j, k] * A[i, j, k]

    return func


def _two_structures_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = _square_sum_inputs(rng, kind, dtype, idtype)
    other = matrix(rng, kind, args["nnz_j"], args["p"]) if args["nnz_j"] else matrix(rng, "no_rows", 0, args["p"])
    return {**args, **other.arrays(idtype, "_k1"), "a1": values(rng, other.nnz, dtype), "nnz_k1": other.nnz}


def _two_structures_expected(args: Arguments) -> np.ndarray:
    sizes = {"m": args["nnz_j"], "n": args["p"]}
    first = csr_dense({**args, **sizes}, "a", "_k")
    second = csr_dense({**args, **sizes}, "a1", "_k1")
    return np.bincount(row_ids(args["indptr_j"]), (first * second).sum(axis=1), minlength=args["m"])


@case(_two_structures_inputs, _two_structures_expected, "b")
def square_sum_two_structures(dtype: str, idtype: str) -> Any:
    """K0 and K1 lie below one J but differ: A is searched at the coordinates of K1."""

    @T.prim_func
    def func(
        a: T.handle, a1: T.handle, b: T.handle, indptr_j: T.handle, indices_j: T.handle,
        indptr_k: T.handle, indices_k: T.handle, indptr_k1: T.handle, indices_k1: T.handle,
        m: T.int32, n: T.int32, p: T.int32, nnz_j: T.int32, nnz_k: T.int32, nnz_k1: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz_j), (indptr_j, indices_j), idtype)
        K0 = T.sparse_variable(J, (p, nnz_k), (indptr_k, indices_k), idtype)
        K1 = T.sparse_variable(J, (p, nnz_k1), (indptr_k1, indices_k1), idtype)
        A = T.match_sparse_buffer(a, (I, J, K0), dtype)
        A1 = T.match_sparse_buffer(a1, (I, J, K1), dtype)
        B = T.match_sparse_buffer(b, (I,), dtype)
        with T.sp_iter([I, J, K1], "SRR", "square_sum") as [i, j, k]:
            with T.init():
                B[i] = 0
            B[i] = B[i] + A[i, j, k] * A1[i, j, k]

    return func


def _siblings_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    t = matrix(rng, kind, s.m, 6 if s.n > 1 else 1)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, t.nnz, dtype), "w": values(rng, (s.n, t.n), dtype)}
    arrays = {**s.arrays(idtype), **t.arrays(idtype, "_b")}
    return {**operands, **arrays, **s.sizes("m", "n", "nnz"), "p": t.n, "nnz_b": t.nnz}


def _siblings_expected(args: Arguments) -> np.ndarray:
    left, right = csr_dense(args), csr_dense({**args, "n": args["p"]}, "b", "_b")
    return np.einsum("ij,jk,ik->i", left, args["w"].astype(np.float64), right)


@case(_siblings_inputs, _siblings_expected, "y")
def siblings(dtype: str, idtype: str) -> Any:
    """Two ragged children of one axis in one iteration: a bilinear form of each row's two vectors."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, w: T.handle, y: T.handle,
        indptr: T.handle, indices: T.handle, indptr_b: T.handle, indices_b: T.handle,
        m: T.int32, n: T.int32, p: T.int32, nnz: T.int32, nnz_b: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        K = T.sparse_variable(I, (p, nnz_b), (indptr_b, indices_b), idtype)
        J_dense = T.dense_fixed(n)
        K_dense = T.dense_fixed(p)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, K), dtype)
        W = T.match_sparse_buffer(w, (J_dense, K_dense), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J, K], "SRR", "bilinear") as [i, j, k]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + A[i, j] * W[j, k] * B[i, k]

    return func


# ---------------------------------------------------------------- ragged


def _ragged_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """Three ragged levels below a dense one."""
    count = m = matrix(rng, kind).m
    args: Arguments = {"m": m}
    longest = 1
    for name in "jkh":
        lengths = row_lengths(rng, kind if name == "j" or kind != "skewed" else "random", count)
        args[f"indptr_{name}"] = offsets(lengths, idtype)
        args[f"nnz_{name}"] = count = int(lengths.sum())
        longest = max(longest, int(lengths.max(initial=0)))
    return {**args, "longest": longest, "x": values(rng, count, dtype)}


def _ragged_sums(args: Arguments, *levels: str) -> np.ndarray:
    out = args["x"].astype(np.float64)
    for name in levels:
        indptr = args[f"indptr_{name}"]
        out = np.bincount(row_ids(indptr), out, minlength=len(indptr) - 1)
    return out


@case(_ragged_inputs, lambda args: _ragged_sums(args, "h", "k"), "y")
def fused_reduction_4d_2d(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        x: T.handle, y: T.handle, indptr_j: T.handle, indptr_k: T.handle, indptr_h: T.handle,
        m: T.int32, longest: T.int32, nnz_j: T.int32, nnz_k: T.int32, nnz_h: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (longest, nnz_j), indptr_j, idtype)
        K = T.dense_variable(J, (longest, nnz_k), indptr_k, idtype)
        H = T.dense_variable(K, (longest, nnz_h), indptr_h, idtype)
        X = T.match_sparse_buffer(x, (I, J, K, H), dtype)
        Y = T.match_sparse_buffer(y, (I, J), dtype)
        with T.sp_iter([T.fuse(I, J), K, H], "SSRR", "reduction_4d_2d") as [i, j, k, h]:
            with T.init():
                Y[i, j] = 0
            Y[i, j] = Y[i, j] + X[i, j, k, h]

    return func


@case(_ragged_inputs, lambda args: _ragged_sums(args, "h"), "y")
def fused_reduction_4d_3d(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        x: T.handle, y: T.handle, indptr_j: T.handle, indptr_k: T.handle, indptr_h: T.handle,
        m: T.int32, longest: T.int32, nnz_j: T.int32, nnz_k: T.int32, nnz_h: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (longest, nnz_j), indptr_j, idtype)
        K = T.dense_variable(J, (longest, nnz_k), indptr_k, idtype)
        H = T.dense_variable(K, (longest, nnz_h), indptr_h, idtype)
        X = T.match_sparse_buffer(x, (I, J, K, H), dtype)
        Y = T.match_sparse_buffer(y, (I, J, K), dtype)
        with T.sp_iter([T.fuse(I, J, K), H], "SSSR", "reduction_4d_3d") as [i, j, k, h]:
            with T.init():
                Y[i, j, k] = 0
            Y[i, j, k] = Y[i, j, k] + X[i, j, k, h]

    return func


def _batch_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A batch of products of matrices of different sizes, each stored row-major."""
    batch = min(matrix(rng, kind).m, 6)
    rows, inner, cols = (row_lengths(rng, kind, batch) for _ in range(3))
    args: Arguments = {"batch": batch, "longest": int(np.concatenate([rows, inner, cols]).max(initial=0))}
    pairs = {"ij": (rows, inner), "jk": (inner, cols), "ik": (rows, cols)}
    for name, lengths in (("i", rows), ("j", inner), ("k", cols)):
        args[f"indptr_{name}"], args[f"nnz_{name}"] = offsets(lengths, idtype), int(lengths.sum())
    for name, (outer, each) in pairs.items():
        widths = np.repeat(each, outer)
        args[f"indptr_{name}"], args[f"nnz_{name}"] = offsets(widths, idtype), int(widths.sum())
    return {**args, "x": values(rng, args["nnz_ij"], dtype), "y": values(rng, args["nnz_jk"], dtype)}


def _batch_expected(args: Arguments) -> np.ndarray:
    rows, inner, cols = (np.diff(args[f"indptr_{name}"]) for name in "ijk")
    products, p, q = [np.zeros(0)], 0, 0
    for i, j, k in zip(rows, inner, cols, strict=True):
        left, right = args["x"][p : p + i * j], args["y"][q : q + j * k]
        products.append((left.reshape(i, j).astype(np.float64) @ right.reshape(j, k)).reshape(-1))
        p, q = p + i * j, q + j * k
    return np.concatenate(products)


@case(_batch_inputs, _batch_expected, "z")
def ragged_bmm(dtype: str, idtype: str) -> Any:
    """Every matrix of the batch has its own sizes: the inner dimension of a buffer hangs below the outer one."""

    @T.prim_func
    def func(
        x: T.handle, y: T.handle, z: T.handle, indptr_i: T.handle, indptr_j: T.handle, indptr_k: T.handle,
        indptr_ij: T.handle, indptr_jk: T.handle, indptr_ik: T.handle,
        batch: T.int32, longest: T.int32, nnz_i: T.int32, nnz_j: T.int32, nnz_k: T.int32,
        nnz_ij: T.int32, nnz_jk: T.int32, nnz_ik: T.int32,
    ):  # fmt: skip
        B = T.dense_fixed(batch)
        I = T.dense_variable(B, (longest, nnz_i), indptr_i, idtype)
        J = T.dense_variable(B, (longest, nnz_j), indptr_j, idtype)
        K = T.dense_variable(B, (longest, nnz_k), indptr_k, idtype)
        IJ = T.dense_variable(I, (longest, nnz_ij), indptr_ij, idtype)
        JK = T.dense_variable(J, (longest, nnz_jk), indptr_jk, idtype)
        IK = T.dense_variable(I, (longest, nnz_ik), indptr_ik, idtype)
        X = T.match_sparse_buffer(x, (B, I, IJ), dtype)
        Y = T.match_sparse_buffer(y, (B, J, JK), dtype)
        Z = T.match_sparse_buffer(z, (B, I, IK), dtype)
        with T.sp_iter([B, I, J, K], "SSRS", "bmm") as [b, i, j, k]:
            with T.init():
                Z[b, i, k] = 0
            Z[b, i, k] = Z[b, i, k] + X[b, i, j] * Y[b, j, k]

    return func
