# SPDX-License-Identifier: Apache-2.0
"""One program spelled in every way the language allows, and the programs of the RFC."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.blocks import bsr_expected
from corpus.case import Arguments, case
from corpus.data import csr_dense, matrix, offsets, row_ids, row_lengths, values
from corpus.matrix import sddmm_expected, sddmm_inputs, spmm_expected, spmm_inputs


def _without(args: Arguments, *names: str) -> Arguments:
    return {name: value for name, value in args.items() if name not in names}


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
