# SPDX-License-Identifier: Apache-2.0
"""Other compositions of axes: DCSR, CSC, COO, bands, packed triangles."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import Arguments, case
from corpus.data import KINDS, csr_dense, fibers, matrix, poisoned, row_ids, values, widened


def dcsr_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in DCSR times a dense B."""
    s = matrix(rng, kind)
    found = np.stack([s.rows, s.cols], axis=1)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, (s.n, s.feat), dtype)}
    return {**operands, **fibers(found, (s.m, s.n), idtype), **s.sizes("m", "n", "feat")}


def dcsr_expected(args: Arguments) -> np.ndarray:
    dense = np.zeros((args["m"], args["n"]))
    dense[args["indices0"][row_ids(args["indptr1"])], args["indices1"]] = args["a"]
    return dense @ widened(args["b"])


@case(dcsr_inputs, dcsr_expected, "c")
def dcsr(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        m: T.int32, n: T.int32, n0: T.int32, n1: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.sparse_variable(None, (m, n0), (indptr0, indices0), idtype)
        J = T.sparse_variable(I, (n, n1), (indptr1, indices1), idtype)
        I_dense = T.dense_fixed(m)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "dcsr") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


@case(dcsr_inputs, dcsr_expected, "c")
def dcsr_dense_iter(dtype: str, idtype: str) -> Any:
    """Two searches in a chain: the row first, then the column in that row."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        m: T.int32, n: T.int32, n0: T.int32, n1: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.sparse_variable(None, (m, n0), (indptr0, indices0), idtype)
        J = T.sparse_variable(I, (n, n1), (indptr1, indices1), idtype)
        I_dense = T.dense_fixed(m)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([I_dense, J_dense, K], "SRS", "dcsr") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _csc_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, (s.n, s.feat), dtype)}
    return {**operands, **s.transposed().arrays(idtype), **s.sizes("m", "n", "nnz", "feat")}


def _csc_dense(args: Arguments) -> np.ndarray:
    return csr_dense({**args, "m": args["n"], "n": args["m"]}).T


@case(_csc_inputs, lambda args: _csc_dense(args) @ widened(args["b"]), "c")
def csc(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        J = T.dense_fixed(n)
        I = T.sparse_variable(J, (m, nnz), (indptr, indices), idtype)
        I_dense = T.dense_fixed(m)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([J, I, K], "RSS", "csc") as [j, i, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def coo_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in COO times a dense B."""
    s = matrix(rng, kind)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, (s.n, s.feat), dtype)}
    arrays = {"rows": s.rows.astype(idtype), "cols": s.cols.astype(idtype)}
    return {**operands, **arrays, **s.sizes("m", "n", "nnz", "feat")}


def coo_expected(args: Arguments) -> np.ndarray:
    out = np.zeros((args["m"], args["feat"]))
    np.add.at(out, args["rows"], widened(args["a"])[:, None] * widened(args["b"])[args["cols"]])
    return out


@case(coo_inputs, coo_expected, "c", kinds=(*KINDS, "duplicates", "unsorted"))
def coo(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, rows: T.handle, cols: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.sparse_fixed(None, (m, nnz), rows, idtype, unique=False)
        J = T.singleton(I, n, cols, idtype)
        I_dense = T.dense_fixed(m)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "coo") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _shuffled_coo_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = coo_inputs(rng, kind, dtype, idtype)
    order = rng.permutation(args["nnz"])
    return {**args, **{name: args[name][order] for name in ("a", "rows", "cols")}}


@case(_shuffled_coo_inputs, coo_expected, "c", kinds=(*KINDS, "duplicates", "unsorted"))
def coo_unsorted(dtype: str, idtype: str) -> Any:
    """Positions in any order; the fused chain is one loop."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, rows: T.handle, cols: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.sparse_fixed(None, (m, nnz), rows, idtype, sorted=False, unique=False)
        J = T.singleton(I, n, cols, idtype, sorted=False)
        I_dense = T.dense_fixed(m)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([T.fuse(I, J), K], "SRS", "coo") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _dia_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    w = {"zero_nnz": 0, "wide": 4}.get(kind, 2)
    column = np.arange(s.m)[:, None] + np.arange(-w, w + 1)
    data = poisoned(values(rng, column.shape, dtype), (column < 0) | (column >= s.n))
    return {"a": data.reshape(-1), "b": values(rng, (s.n, s.feat), dtype), "w": w, **s.sizes("m", "n", "feat")}


def _dia_dense(args: Arguments) -> np.ndarray:
    w, n = args["w"], args["n"]
    out = np.zeros((args["m"], n))
    for i in range(args["m"]):
        for j in range(max(0, i - w), min(n, i + w + 1)):
            out[i, j] = args["a"][i * (2 * w + 1) + j - i + w]
    return out


@case(_dia_inputs, lambda args: _dia_dense(args) @ widened(args["b"]), "c")
def dia(dtype: str, idtype: str) -> Any:
    """A band: coordinates are a formula, those outside the matrix are absent."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, c: T.handle, m: T.int32, n: T.int32, w: T.int32, feat: T.int32):
        I = T.dense_fixed(m, idtype)
        J = T.sparse_fixed(I, (n, 2 * w + 1), lambda i, s: i + s - w, idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "dia") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _dia_alone(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = _dia_inputs(rng, kind, dtype, idtype)
    return {name: args[name] for name in ("a", "m", "n", "w")}


@case(_dia_alone, lambda args: _dia_dense(args).sum(axis=0), "y")
def dia_column_sums(dtype: str, idtype: str) -> Any:
    """A band read by coordinate."""

    @T.prim_func
    def func(a: T.handle, y: T.handle, m: T.int32, n: T.int32, w: T.int32):
        I = T.dense_fixed(m, idtype)
        J = T.sparse_fixed(I, (n, 2 * w + 1), lambda i, s: i + s - w, idtype)
        J_dense = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        Y = T.match_sparse_buffer(y, (J_dense,), dtype)
        with T.sp_iter([J_dense, I], "SR", "column_sums") as [j, i]:
            with T.init():
                Y[j] = 0
            Y[j] = Y[j] + A[i, j]

    return func


def _triangular_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    m = matrix(rng, kind).m
    return {"a": values(rng, m * (m + 1) // 2, dtype), "x": values(rng, m, dtype), "m": m}


def _triangular_dense(args: Arguments) -> np.ndarray:
    out = np.zeros((args["m"], args["m"]))
    out[np.tril_indices(args["m"])] = args["a"]
    return out


@case(_triangular_inputs, lambda args: _triangular_dense(args) @ widened(args["x"]), "y")
def triangular(dtype: str, idtype: str) -> Any:
    """A packed lower triangle needs no index array."""

    @T.prim_func
    def func(a: T.handle, x: T.handle, y: T.handle, m: T.int32):
        I = T.dense_fixed(m, idtype)
        J = T.dense_variable(
            I, (m, m * (m + 1) // 2), extent=lambda i: i + 1, offset=lambda i: i * (i + 1) // 2, idtype=idtype
        )
        J_dense = T.dense_fixed(m)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        X = T.match_sparse_buffer(x, (J_dense,), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J], "SR", "triangular") as [i, j]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + A[i, j] * X[j]

    return func


def _mirrored(args: Arguments) -> np.ndarray:
    dense = _triangular_dense(args)
    return (dense + np.tril(dense, -1).T) @ widened(args["x"])


@case(_triangular_inputs, _mirrored, "y")
def symmetric_packed(dtype: str, idtype: str) -> Any:
    """The upper triangle is absent: adding A[j, i] below the diagonal mirrors it."""

    @T.prim_func
    def func(a: T.handle, x: T.handle, y: T.handle, m: T.int32):
        I = T.dense_fixed(m, idtype)
        J = T.dense_variable(I, m, extent=lambda i: i + 1, offset=lambda i: i * (i + 1) // 2, idtype=idtype)
        J_dense = T.dense_fixed(m, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        X = T.match_sparse_buffer(x, (J_dense,), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J_dense], "SR", "symmetric") as [i, j]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + (A[i, j] + T.if_then_else(i < j, A[j, i], T.cast(0, dtype))) * X[j]

    return func
