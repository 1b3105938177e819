# SPDX-License-Identifier: Apache-2.0
"""Formats with as many slots in every fiber: ELL, hyb, padded CSR, N:M."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.blocks import bsr_expected
from corpus.case import Arguments, case
from corpus.data import block_size, matrix, offsets, padded_rows, poisoned, row_ids, row_lengths, values, widened


def ell_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in ELL, its padding holding NaN, times a dense B."""
    s = matrix(rng, kind)
    indices = padded_rows(s, idtype)
    data = poisoned(values(rng, indices.shape, dtype), indices == s.n)
    operands = {"a": data.reshape(-1), "b": values(rng, (s.n, s.feat), dtype), "indices": indices.reshape(-1)}
    return {**operands, **s.sizes("m", "n", "feat"), "width": indices.shape[1]}


def ell_dense(args: Arguments) -> np.ndarray:
    stored = args["indices"] < args["n"]
    rows = np.repeat(np.arange(args["m"]), args["width"])
    out = np.zeros((args["m"], args["n"]))
    np.add.at(out, (rows[stored], args["indices"][stored]), args["a"][stored])
    return out


def ell_expected(args: Arguments) -> np.ndarray:
    return ell_dense(args) @ widened(args["b"])


@case(ell_inputs, ell_expected, "c")
def ell_spmm(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, width: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_fixed(I, (n, width), indices, idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "ell_spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


@case(ell_inputs, ell_expected, "c")
def ell_fused(dtype: str, idtype: str) -> Any:
    """One loop over all slots, padding among them."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, width: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_fixed(I, (n, width), indices, idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([K, T.fuse(I, J)], "SSR", "ell_spmm") as [k, i, j]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


def _ell_alone(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = ell_inputs(rng, kind, dtype, idtype)
    return {name: args[name] for name in ("a", "indices", "m", "n", "width")}


@case(_ell_alone, ell_dense, "c")
def ell_to_dense(dtype: str, idtype: str) -> Any:
    """ELL read by coordinate; its padding never matches."""

    @T.prim_func
    def func(a: T.handle, c: T.handle, indices: T.handle, m: T.int32, n: T.int32, width: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_fixed(I, (n, width), indices, idtype)
        J_dense = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        C = T.match_sparse_buffer(c, (I, J_dense), dtype)
        with T.sp_iter([I, J_dense], "SS", "ell_to_dense") as [i, j]:
            C[i, j] = A[i, j]

    return func


@case(_ell_alone, lambda args: args["a"] * 3, "a")
def ell_scale_in_place(dtype: str, idtype: str) -> Any:
    """A sparse buffer updated in place; padding keeps its bits."""

    @T.prim_func
    def func(a: T.handle, indices: T.handle, m: T.int32, n: T.int32, width: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_fixed(I, (n, width), indices, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        with T.sp_iter([I, J], "SS", "scale") as [i, j]:
            A[i, j] = A[i, j] * 3

    return func


def _ellmm_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s, blk = matrix(rng, kind), block_size(kind)
    indices = padded_rows(s, idtype).reshape(-1)
    data = poisoned(values(rng, (len(indices), blk, blk), dtype), (indices == s.n)[:, None, None])
    operands = {"a": data, "b": values(rng, (s.n, blk, s.feat), dtype), "indices": indices}
    return {**operands, "mb": s.m, "nb": s.n, "width": int(s.counts.max(initial=0)), "blk": blk, "feat": s.feat}


def _ellmm_expected(args: Arguments) -> np.ndarray:
    stored = args["indices"] < args["nb"]
    rows = np.repeat(np.arange(args["mb"]), args["width"])[stored]
    indptr = np.searchsorted(rows, np.arange(args["mb"] + 1))
    return bsr_expected({**args, "a": args["a"][stored], "indices": args["indices"][stored], "indptr": indptr})


@case(_ellmm_inputs, _ellmm_expected, "c")
def ellmm(dtype: str, idtype: str) -> Any:
    """Blocked ELL."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indices: T.handle,
        mb: T.int32, nb: T.int32, width: T.int32, blk: T.int32, feat: T.int32,
    ):  # fmt: skip
        IO = T.dense_fixed(mb)
        JO = T.sparse_fixed(IO, (nb, width), indices, idtype)
        JO_dense = T.dense_fixed(nb)
        II = T.dense_fixed(blk)
        JI = T.dense_fixed(blk)
        F = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (JO_dense, JI, F), dtype)
        C = T.match_sparse_buffer(c, (IO, II, F), dtype)
        with T.sp_iter([IO, JO, II, JI, F], "SRSRS", "ellmm") as [io, jo, ii, ji, f]:
            with T.init():
                C[io, ii, f] = 0
            C[io, ii, f] = C[io, ii, f] + A[io, jo, ii, ji] * B[jo, ji, f]

    return func


def _bucket_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """One bucket of the hyb format: rows cut into pieces of at most `bucket` columns."""
    s, bucket = matrix(rng, kind), 4
    slot = np.arange(s.nnz) - (np.cumsum(s.counts) - s.counts)[s.rows]
    pieces, piece = np.unique(np.stack([s.rows, slot // bucket], 1).reshape(-1, 2), axis=0, return_inverse=True)
    indices = np.full((len(pieces), bucket), s.n, idtype)
    indices[piece.reshape(-1), slot % bucket] = s.cols
    data = poisoned(values(rng, indices.shape, dtype), indices == s.n)
    arrays = {"rows": pieces[:, 0].astype(idtype), "indices": indices.reshape(-1), "a": data.reshape(-1)}
    sizes = {**s.sizes("m", "n", "feat"), "num_rows": len(pieces), "bucket": bucket}
    indptr = np.array([0, len(pieces)], idtype)
    return {**arrays, "indptr": indptr, "b": values(rng, (s.n, s.feat), dtype), **sizes}


def _bucket_expected(args: Arguments) -> np.ndarray:
    pieces = ell_expected({**args, "m": args["num_rows"], "width": args["bucket"]})
    out = np.zeros((args["m"], args["feat"]))
    np.add.at(out, args["rows"], pieces)
    return out


@case(_bucket_inputs, _bucket_expected, "c")
def hyb_bucket(dtype: str, idtype: str) -> Any:
    """A row may occur several times: its pieces add up."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, rows: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, num_rows: T.int32, bucket: T.int32, feat: T.int32,
    ):  # fmt: skip
        O = T.dense_fixed(1)
        I = T.sparse_variable(O, (m, num_rows), (indptr, rows), idtype, unique=False)
        J = T.sparse_fixed(I, (n, bucket), indices, idtype)
        I_dense = T.dense_fixed(m)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (O, I, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I_dense, K), dtype)
        with T.sp_iter([O, I, J, K], "RSRS", "bucket") as [o, i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[o, i, j] * B[j, k]

    return func


def _padded_csr_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s, pad = matrix(rng, kind), 4
    chunks = -(-s.counts // pad)
    indptr = offsets(chunks, idtype)
    indices = np.full(int(indptr[-1]) * pad, s.n, idtype)
    starts = np.cumsum(s.counts) - s.counts
    indices[indptr[s.rows] * pad + np.arange(s.nnz) - starts[s.rows]] = s.cols
    data = poisoned(values(rng, len(indices), dtype), indices == s.n)
    sizes = {"longest": int(chunks.max(initial=0)), "chunks": int(indptr[-1]), "pad": pad}
    operands = {"a": data, "b": values(rng, (s.n, s.feat), dtype), "indptr": indptr, "indices": indices}
    return {**operands, **sizes, **s.sizes("m", "n", "feat")}


def _padded_csr_expected(args: Arguments) -> np.ndarray:
    rows = np.repeat(row_ids(args["indptr"]), args["pad"])
    stored = args["indices"] < args["n"]
    dense = np.zeros((args["m"], args["n"]))
    np.add.at(dense, (rows[stored], args["indices"][stored]), args["a"][stored])
    return dense @ widened(args["b"])


@case(_padded_csr_inputs, _padded_csr_expected, "c")
def padded_csr(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        longest: T.int32, chunks: T.int32, pad: T.int32, m: T.int32, n: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        JO = T.dense_variable(I, (longest, chunks), indptr, idtype)
        JI = T.sparse_fixed(JO, (n, pad), indices, idtype)
        J_dense = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, JO, JI), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, JO, JI, K], "SRRS", "padded_csr") as [i, jo, ji, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, jo, ji] * B[ji, k]

    return func


def _nm_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    groups = -(-s.n // 4)
    picks = np.sort(np.argsort(rng.random((s.m * groups, 4)), axis=1)[:, :2], axis=1)
    operands = {"a": values(rng, picks.size, dtype), "b": values(rng, (groups * 4, s.feat), dtype)}
    return {**operands, "indices": picks.reshape(-1).astype(idtype), "groups": groups, **s.sizes("m", "feat")}


def _nm_expected(args: Arguments) -> np.ndarray:
    m, groups = args["m"], args["groups"]
    row, group = np.divmod(np.arange(m * groups * 2) // 2, groups)
    dense = np.zeros((m, groups * 4))
    dense[row, group * 4 + args["indices"]] = args["a"]
    return dense @ widened(args["b"])


@case(_nm_inputs, _nm_expected, "c")
def nm_spmm(dtype: str, idtype: str) -> Any:
    """2:4 sparsity: two of every four columns, the group's number needing no array."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, c: T.handle, indices: T.handle, m: T.int32, groups: T.int32, feat: T.int32):
        I = T.dense_fixed(m, idtype)
        G = T.dense_variable(
            I, (groups, m * groups), extent=lambda i: groups, offset=lambda i: i * groups, idtype=idtype
        )
        J = T.sparse_fixed(G, (4, 2), indices, idtype)
        J_dense = T.dense_fixed(groups * 4)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (I, G, J), dtype)
        B = T.match_sparse_buffer(b, (J_dense, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, G, J, K], "SRRS", "nm_spmm") as [i, g, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, g, j] * B[g * 4 + j, k]

    return func


def _ell_csf_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A ragged level below a padded one."""
    s = matrix(rng, kind)
    slots = padded_rows(s, idtype)
    p = 6
    children = row_lengths(rng, "random", slots.size)
    indptr = offsets(children, idtype)
    picks = [np.sort(rng.permutation(p)[:count]) for count in children]
    indices = np.concatenate([np.zeros(0, np.int64), *picks]).astype(idtype)
    absent = np.repeat(slots.reshape(-1) == s.n, children)
    operands = {"a": poisoned(values(rng, len(indices), dtype), absent), "x": values(rng, (s.n, p), dtype)}
    arrays = {"slots": slots.reshape(-1), "indptr": indptr, "indices": indices}
    return {**operands, **arrays, **s.sizes("m", "n"), "width": slots.shape[1], "p": p, "nnz": len(indices)}


def _ell_csf_expected(args: Arguments) -> np.ndarray:
    slot = row_ids(args["indptr"])
    j = args["slots"][slot]
    stored = j < args["n"]
    out = np.zeros(args["m"])
    terms = widened(args["a"])[stored] * args["x"][j[stored], args["indices"][stored]]
    np.add.at(out, slot[stored] // max(args["width"], 1), terms)
    return out


@case(_ell_csf_inputs, _ell_csf_expected, "y")
def csr_below_ell(dtype: str, idtype: str) -> Any:
    """A variable axis below a sparse_fixed one: its indptr counts the padded slots too."""

    @T.prim_func
    def func(
        a: T.handle, x: T.handle, y: T.handle, slots: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, width: T.int32, p: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_fixed(I, (n, width), slots, idtype)
        P = T.sparse_variable(J, (p, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        P_dense = T.dense_fixed(p)
        A = T.match_sparse_buffer(a, (I, J, P), dtype)
        X = T.match_sparse_buffer(x, (J_dense, P_dense), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J, P], "SRR", "csr_below_ell") as [i, j, q]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + A[i, j, q] * X[j, q]

    return func
