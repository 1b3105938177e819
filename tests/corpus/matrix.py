# SPDX-License-Identifier: Apache-2.0
"""Programs over one CSR or ragged matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import Arguments, case
from corpus.data import KINDS, csr_dense, matrix, offsets, row_ids, row_lengths, values

# ---------------------------------------------------------------- inputs and oracles


def spmm_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in CSR times a dense B."""
    s = matrix(rng, kind)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, (s.n, s.feat), dtype)}
    return {**operands, **s.arrays(idtype), **s.sizes("m", "n", "nnz", "feat")}


def spmm_expected(args: Arguments) -> np.ndarray:
    return csr_dense(args) @ args["b"].astype(np.float64)


def spmv_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in CSR times a vector."""
    s = matrix(rng, kind)
    operands = {"a": values(rng, s.nnz, dtype), "x": values(rng, s.n, dtype)}
    return {**operands, **s.arrays(idtype), **s.sizes("m", "n", "nnz")}


def values_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in CSR alone."""
    s = matrix(rng, kind)
    return {"a": values(rng, s.nnz, dtype), **s.arrays(idtype), **s.sizes("m", "n", "nnz")}


def sddmm_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A structure, and the rows of two dense matrices to multiply where it is stored."""
    s = matrix(rng, kind)
    operands = {"x": values(rng, (s.m, s.feat), dtype), "y": values(rng, (s.n, s.feat), dtype)}
    return {**operands, **s.arrays(idtype), **s.sizes("m", "n", "nnz", "feat")}


def sddmm_expected(args: Arguments) -> np.ndarray:
    product = args["x"].astype(np.float64) @ args["y"].astype(np.float64).T
    return product[row_ids(args["indptr"]), args["indices"]]


def segment_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A ragged matrix."""
    s = matrix(rng, kind)
    lengths = row_lengths(rng, kind, s.m)
    indptr = offsets(lengths, idtype)
    nnz = int(indptr[-1])
    return {
        "a": values(rng, nnz, dtype),
        "indptr": indptr,
        "m": s.m,
        "longest": int(lengths.max(initial=0)),
        "nnz": nnz,
    }


def _row_reduce(args: Arguments, reduce: Any, start: float) -> np.ndarray:
    out = np.full(args["m"], start)
    reduce.at(out, row_ids(args["indptr"]), args["a"].astype(np.float64))
    return out


def row_sums(args: Arguments) -> np.ndarray:
    return _row_reduce(args, np.add, 0.0)


def row_maxima(args: Arguments) -> np.ndarray:
    return _row_reduce(args, np.maximum, float(np.finfo(args["a"].dtype).min))


# ---------------------------------------------------------------- SpMM and SpMV


@case(spmm_inputs, spmm_expected, "c", dtypes=("float32", "float64", "int32", "int8"))
def csrmm(dtype: str, idtype: str) -> Any:
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


@case(spmm_inputs, spmm_expected, "c", kinds=(*KINDS, "duplicates", "unsorted"))
def csrmm_loose(dtype: str, idtype: str) -> Any:
    """Rows may repeat a column and list columns in any order."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype, sorted=False, unique=False)
        J_dense = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, K, J], "SSR", "csrmm") as [i, k, j]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _csrmm_dense_iter(search: str) -> Any:
    def make(dtype: str, idtype: str) -> Any:
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
            with T.sp_iter([I, J_dense, K], "SRS", "csrmm") as [i, j, k]:
                T.sp_iter_attr({"search": search})
                with T.init():
                    C[i, k] = 0
                C[i, k] = C[i, k] + A[i, j] * B[j, k]

        return func

    return make


csrmm_dense_iter = case(spmm_inputs, spmm_expected, "c", name="csrmm_dense_iter")(_csrmm_dense_iter("inline"))
csrmm_dense_hoist = case(spmm_inputs, spmm_expected, "c", name="csrmm_dense_hoist")(_csrmm_dense_iter("hoist"))
csrmm_dense_merge = case(spmm_inputs, spmm_expected, "c", name="csrmm_dense_merge")(_csrmm_dense_iter("merge"))


@case(spmm_inputs, spmm_expected, "c", kinds=(*KINDS, "unsorted"))
def csrmm_scan(dtype: str, idtype: str) -> Any:
    """An unsorted axis read by coordinate: the position is found by scanning."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype, sorted=False)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J_dense, K], "SRS", "csrmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


@case(spmm_inputs, spmm_expected, "c", kinds=(*KINDS, "duplicates"))
def fused_spmm(dtype: str, idtype: str) -> Any:
    """One loop over the stored positions, several of which add to one row."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype, unique=False)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([T.fuse(I, J), K], "SRS", "fused_spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _transposed_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, (s.m, s.feat), dtype)}
    return {**operands, **s.arrays(idtype), **s.sizes("m", "n", "nnz", "feat")}


@case(_transposed_inputs, lambda args: csr_dense(args).T @ args["b"].astype(np.float64), "c")
def csrmm_transposed(dtype: str, idtype: str) -> Any:
    """The rows of C are scattered to: every row is initialised before any is added to."""

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
        B = T.match_sparse_buffer(b, (I, K), dtype)
        C = T.match_sparse_buffer(c, (J_dense, K), dtype)
        with T.sp_iter([I, J, K], "RSS", "csrmm_transposed") as [i, j, k]:
            with T.init():
                C[j, k] = 0
            C[j, k] = C[j, k] + A[i, j] * B[i, k]

    return func


@case(spmv_inputs, lambda args: csr_dense(args) @ args["x"].astype(np.float64), "y")
def spmv(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        X = T.match_sparse_buffer(x, (J_dense,), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + A[i, j] * X[j]

    return func


# ---------------------------------------------------------------- SDDMM


@case(sddmm_inputs, sddmm_expected, "c", kinds=(*KINDS, "duplicates", "unsorted"))
def sddmm(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        x: T.handle, y: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype, sorted=False, unique=False)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        X = T.match_sparse_buffer(x, (I, K), dtype)
        Y = T.match_sparse_buffer(y, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
            with T.init():
                C[i, j] = 0
            C[i, j] = C[i, j] + X[i, k] * Y[j, k]

    return func


@case(sddmm_inputs, sddmm_expected, "c")
def fused_sddmm(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        x: T.handle, y: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        X = T.match_sparse_buffer(x, (I, K), dtype)
        Y = T.match_sparse_buffer(y, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, J), dtype)
        with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:
            with T.init():
                C[i, j] = 0
            C[i, j] = C[i, j] + X[i, k] * Y[j, k]

    return func


def _masked_dense_expected(args: Arguments) -> np.ndarray:
    out = np.ones((args["m"], args["n"]))
    np.add.at(out, (row_ids(args["indptr"]), args["indices"]), sddmm_expected(args))
    return out


@case(sddmm_inputs, _masked_dense_expected, "c")
def masked_dense(dtype: str, idtype: str) -> Any:
    """A dense output is initialised everywhere and added to where the structure is stored."""

    @T.prim_func
    def func(
        x: T.handle, y: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        X = T.match_sparse_buffer(x, (I, K), dtype)
        Y = T.match_sparse_buffer(y, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        with T.sp_iter([I, J, K], "SSR", "masked") as [i, j, k]:
            with T.init():
                C[i, j] = 1
            C[i, j] = C[i, j] + X[i, k] * Y[j, k]

    return func


# ---------------------------------------------------------------- reductions


@case(segment_inputs, row_sums, "b")
def segment_reduce(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, m: T.int32, longest: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (longest, nnz), indptr, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I,), dtype)
        with T.sp_iter([I, J], "SR", "segment_reduce") as [i, j]:
            with T.init():
                B[i] = 0
            B[i] = B[i] + A[i, j]

    return func


@case(segment_inputs, row_maxima, "b")
def segment_max(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, m: T.int32, longest: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (longest, nnz), indptr, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I,), dtype)
        with T.sp_iter([I, J], "SR", "segment_max") as [i, j]:
            with T.init():
                B[i] = T.min_value(dtype)
            B[i] = T.max(B[i], A[i, j])

    return func


@case(values_inputs, row_sums, "b", kinds=(*KINDS, "duplicates", "unsorted"))
def csr_reduce(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype, sorted=False, unique=False)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I,), dtype)
        with T.sp_iter([I, J], "SR", "csr_reduce") as [i, j]:
            with T.init():
                B[i] = 0
            B[i] = B[i] + A[i, j]

    return func


@case(values_inputs, row_maxima, "b")
def csr_max(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I,), dtype)
        with T.sp_iter([I, J], "SR", "csr_max") as [i, j]:
            with T.init():
                B[i] = T.min_value(dtype)
            B[i] = T.max(B[i], A[i, j])

    return func


# ---------------------------------------------------------------- element-wise


@case(values_inputs, lambda args: args["a"] * 2.5, "b")
def csr_element_wise(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        with T.sp_iter([I, J], "SS", "csr_element_wise") as [i, j]:
            B[i, j] = A[i, j] * 2.5

    return func


@case(values_inputs, lambda args: (args["a"] * 2.0, csr_dense(args) + 1.0), "b", "c")
def two_stores(dtype: str, idtype: str) -> Any:
    """One body stores to a sparse and to a dense buffer; the dense one is searched for every coordinate."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        with T.sp_iter([I, J_dense], "SS", "two_stores") as [i, j]:
            B[i, j] = A[i, j] * 2
            C[i, j] = A[i, j] + 1

    return func


def _stencil_expected(args: Arguments) -> np.ndarray:
    wide = np.pad(csr_dense(args), ((0, 0), (1, 1)))
    return wide[:, 2:] - wide[:, :-2]


@case(values_inputs, _stencil_expected, "c")
def stencil(dtype: str, idtype: str) -> Any:
    """Neighbours of a coordinate, absent or outside the matrix, read as 0."""

    @T.prim_func
    def func(a: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        with T.sp_iter([I, J_dense], "SS", "stencil") as [i, j]:
            C[i, j] = A[i, j + 1] - A[i, j - 1]

    return func


def _square_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    m = matrix(rng, kind).m
    s = matrix(rng, kind, m, m)
    return {"a": values(rng, s.nnz, dtype), **s.arrays(idtype), **s.sizes("m", "n", "nnz")}


def _symmetrised(args: Arguments) -> np.ndarray:
    dense = csr_dense(args)
    return (dense + dense.T)[row_ids(args["indptr"]), args["indices"]]


@case(_square_inputs, _symmetrised, "b")
def symmetrise(dtype: str, idtype: str) -> Any:
    """A[j, i] beside A[i, j]: one is at hand, the other is searched."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        with T.sp_iter([I, J], "SS", "symmetrise") as [i, j]:
            B[i, j] = A[i, j] + A[j, i]

    return func


# ---------------------------------------------------------------- two structures


def two_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """Two CSR matrices of one shape and different structure."""
    s, t = matrix(rng, kind), matrix(rng, kind)
    arrays = {**s.arrays(idtype), **t.arrays(idtype, "_b")}
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, t.nnz, dtype)}
    return {**operands, **arrays, **s.sizes("m", "n", "nnz"), "nnz_b": t.nnz}


@case(two_inputs, lambda args: csr_dense(args) + csr_dense(args, "b", "_b"), "c")
def union_add(dtype: str, idtype: str) -> Any:
    """Two searches in one store."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle,
        indptr: T.handle, indices: T.handle, indptr_b: T.handle, indices_b: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, nnz_b: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J2 = T.sparse_variable(I, (n, nnz_b), (indptr_b, indices_b), idtype)
        J_dense = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J2), dtype)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        with T.sp_iter([I, J_dense], "SS", "union_add") as [i, j]:
            C[i, j] = A[i, j] + B[i, j]

    return func


def _row_dots(args: Arguments) -> np.ndarray:
    return (csr_dense(args) * csr_dense(args, "b", "_b")).sum(axis=1)


def _row_dot(search: str) -> Any:
    def make(dtype: str, idtype: str) -> Any:
        @T.prim_func
        def func(
            a: T.handle, b: T.handle, y: T.handle,
            indptr: T.handle, indices: T.handle, indptr_b: T.handle, indices_b: T.handle,
            m: T.int32, n: T.int32, nnz: T.int32, nnz_b: T.int32,
        ):  # fmt: skip
            I = T.dense_fixed(m)
            J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
            J2 = T.sparse_variable(I, (n, nnz_b), (indptr_b, indices_b), idtype)
            A = T.match_sparse_buffer(a, (I, J), dtype)
            B = T.match_sparse_buffer(b, (I, J2), dtype)
            Y = T.match_sparse_buffer(y, (I,), dtype)
            with T.sp_iter([I, J], "SR", "row_dot") as [i, j]:
                T.sp_iter_attr({"search": search})
                with T.init():
                    Y[i] = 0
                Y[i] = Y[i] + A[i, j] * B[i, j]

        return func

    return make


row_dot = case(two_inputs, _row_dots, "y", name="row_dot")(_row_dot("inline"))
row_dot_hoist = case(two_inputs, _row_dots, "y", name="row_dot_hoist")(_row_dot("hoist"))
row_dot_merge = case(two_inputs, _row_dots, "y", name="row_dot_merge")(_row_dot("merge"))


def _vectors_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    n = matrix(rng, kind).n
    s, t = matrix(rng, kind, 1, n), matrix(rng, kind, 1, n)
    arrays = {**s.arrays(idtype), **t.arrays(idtype, "_b")}
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, t.nnz, dtype)}
    return {**operands, **arrays, "n": n, "nnz": s.nnz, "nnz_b": t.nnz}


def _dot(args: Arguments) -> np.ndarray:
    return _row_dots({**args, "m": 1})


def _sparse_dot(search: str) -> Any:
    def make(dtype: str, idtype: str) -> Any:
        @T.prim_func
        def func(
            a: T.handle, b: T.handle, y: T.handle,
            indptr: T.handle, indices: T.handle, indptr_b: T.handle, indices_b: T.handle,
            n: T.int32, nnz: T.int32, nnz_b: T.int32,
        ):  # fmt: skip
            ONE = T.dense_fixed(1)
            J = T.sparse_variable(None, (n, nnz), (indptr, indices), idtype)
            J2 = T.sparse_variable(None, (n, nnz_b), (indptr_b, indices_b), idtype)
            A = T.match_sparse_buffer(a, (J,), dtype)
            B = T.match_sparse_buffer(b, (J2,), dtype)
            Y = T.match_sparse_buffer(y, (ONE,), dtype)
            with T.sp_iter([ONE, J], "SR", "dot") as [o, j]:
                T.sp_iter_attr({"search": search})
                with T.init():
                    Y[o] = 0
                Y[o] = Y[o] + A[j] * B[j]

        return func

    return make


sparse_dot = case(_vectors_inputs, _dot, "y", name="sparse_dot")(_sparse_dot("inline"))
sparse_dot_merge = case(_vectors_inputs, _dot, "y", name="sparse_dot_merge")(_sparse_dot("merge"))
