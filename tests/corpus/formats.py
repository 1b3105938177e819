# SPDX-License-Identifier: Apache-2.0
"""Programs over the other matrix formats, and conversions between formats."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import case
from corpus.data import (
    KINDS,
    block_size,
    csr_dense,
    fibers,
    matrix,
    offsets,
    padded_rows,
    poisoned,
    row_ids,
    row_lengths,
    values,
)

Arguments = dict[str, Any]


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


# ---------------------------------------------------------------- blocks


def bsr_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in BSR times a dense B."""
    s, blk = matrix(rng, kind), block_size(kind)
    operands = {"a": values(rng, (s.nnz, blk, blk), dtype), "b": values(rng, (s.n, blk, s.feat), dtype)}
    return {**operands, **s.arrays(idtype), "mb": s.m, "nb": s.n, "nnzb": s.nnz, "blk": blk, "feat": s.feat}


def bsr_expected(args: Arguments) -> np.ndarray:
    out = np.zeros((args["mb"], args["blk"], args["feat"]))
    products = np.einsum("pij,pjf->pif", _wide(args["a"]), _wide(args["b"])[args["indices"]])
    np.add.at(out, row_ids(args["indptr"]), products)
    return out


@case(bsr_inputs, bsr_expected, "c")
def bsrmm(dtype: str, idtype: str) -> Any:
    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        mb: T.int32, nb: T.int32, nnzb: T.int32, blk: T.int32, feat: T.int32,
    ):  # fmt: skip
        IO = T.dense_fixed(mb)
        JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices), idtype)
        JO_dense = T.dense_fixed(nb)
        II = T.dense_fixed(blk)
        JI = T.dense_fixed(blk)
        F = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (JO_dense, JI, F), dtype)
        C = T.match_sparse_buffer(c, (IO, II, F), dtype)
        with T.sp_iter([IO, II, JI, F, JO], "SSRSR", "bsrmm") as [io, ii, ji, f, jo]:
            with T.init():
                C[io, ii, f] = 0
            C[io, ii, f] = C[io, ii, f] + A[io, jo, ii, ji] * B[jo, ji, f]

    return func


def _dbsr_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    args = bsr_inputs(rng, kind, dtype, idtype)
    del args["nnzb"]
    found = np.stack([row_ids(args.pop("indptr")), args.pop("indices")], axis=1).astype(np.int64)
    return {**args, **fibers(found, (args["mb"], args["nb"]), idtype)}


def _dbsr_expected(args: Arguments) -> np.ndarray:
    rows = args["indices0"][row_ids(args["indptr1"])]
    indptr = np.searchsorted(rows, np.arange(args["mb"] + 1))
    return bsr_expected({**args, "indptr": indptr, "indices": args["indices1"]})


@case(_dbsr_inputs, _dbsr_expected, "c")
def dbsrmm(dtype: str, idtype: str) -> Any:
    """Doubly compressed blocks: block rows without a block are not stored, yet initialised."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        mb: T.int32, nb: T.int32, n0: T.int32, n1: T.int32, blk: T.int32, feat: T.int32,
    ):  # fmt: skip
        O = T.dense_fixed(1)
        IO = T.sparse_variable(O, (mb, n0), (indptr0, indices0), idtype)
        JO = T.sparse_variable(IO, (nb, n1), (indptr1, indices1), idtype)
        IO_dense = T.dense_fixed(mb)
        JO_dense = T.dense_fixed(nb)
        II = T.dense_fixed(blk)
        JI = T.dense_fixed(blk)
        F = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (O, IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (JO_dense, JI, F), dtype)
        C = T.match_sparse_buffer(c, (IO_dense, II, F), dtype)
        with T.sp_iter([O, IO, JO, II, JI, F], "RSRSRS", "dbsrmm") as [o, io, jo, ii, ji, f]:
            with T.init():
                C[io, ii, f] = 0
            C[io, ii, f] = C[io, ii, f] + A[o, io, jo, ii, ji] * B[jo, ji, f]

    return func


def _sr_bcrs_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """Strips of `t` rows; the columns a strip uses, in groups of `g`."""
    s, t, g = matrix(rng, kind), block_size(kind), 3
    strips = -(-s.m // t)
    keys = np.unique(np.stack([s.rows // t, s.cols], axis=1).reshape(-1, 2), axis=0)
    counts = np.bincount(keys[:, 0], minlength=strips)
    groups = -(-counts // g)
    indptr = offsets(groups, idtype)
    indices = np.full(int(indptr[-1]) * g, s.n, idtype)
    starts = np.cumsum(counts) - counts
    indices[indptr[keys[:, 0]] * g + np.arange(len(keys)) - starts[keys[:, 0]]] = keys[:, 1]
    data = poisoned(values(rng, (len(indices), t), dtype), (indices == s.n)[:, None])
    sizes = {"strips": strips, "longest": int(groups.max(initial=0)), "groups": int(indptr[-1]), "t": t, "g": g}
    operands = {"a": data, "b": values(rng, (s.n, s.feat), dtype), "indptr": indptr, "indices": indices}
    return {**operands, **sizes, **s.sizes("m", "n", "feat")}


def _sr_bcrs_expected(args: Arguments) -> np.ndarray:
    strip = np.repeat(row_ids(args["indptr"]), args["g"])
    stored = args["indices"] < args["n"]
    out = np.zeros((args["strips"], args["t"], args["feat"]))
    products = _wide(args["a"])[stored][:, :, None] * _wide(args["b"])[args["indices"][stored]][:, None, :]
    np.add.at(out, strip[stored], products)
    return out.reshape(-1, args["feat"])[: args["m"]]


@case(_sr_bcrs_inputs, _sr_bcrs_expected, "c")
def sr_bcrs(dtype: str, idtype: str) -> Any:
    """Column-vector blocks; the last strip reaches past the last row, where nothing is stored."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        strips: T.int32, longest: T.int32, groups: T.int32, t: T.int32, g: T.int32,
        m: T.int32, n: T.int32, feat: T.int32,
    ):  # fmt: skip
        IO = T.dense_fixed(strips)
        JO = T.dense_variable(IO, (longest, groups), indptr, idtype)
        JI = T.sparse_fixed(JO, (n, g), indices, idtype)
        II = T.dense_fixed(t)
        I = T.dense_fixed(m)
        J = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (IO, JO, II, JI), dtype)
        B = T.match_sparse_buffer(b, (J, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([IO, II, JO, JI, K], "SSRRS", "sr_bcrs") as [io, ii, jo, ji, k]:
            with T.init():
                C[io * t + ii, k] = 0
            C[io * t + ii, k] = C[io * t + ii, k] + A[io, jo, ii, ji] * B[ji, k]

    return func


# ---------------------------------------------------------------- ELL and its kin


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
    return ell_dense(args) @ _wide(args["b"])


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
    return dense @ _wide(args["b"])


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
    return dense @ _wide(args["b"])


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
    terms = _wide(args["a"])[stored] * args["x"][j[stored], args["indices"][stored]]
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


# ---------------------------------------------------------------- DCSR, CSC, COO, DIA


def dcsr_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in DCSR times a dense B."""
    s = matrix(rng, kind)
    found = np.stack([s.rows, s.cols], axis=1)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, (s.n, s.feat), dtype)}
    return {**operands, **fibers(found, (s.m, s.n), idtype), **s.sizes("m", "n", "feat")}


def dcsr_expected(args: Arguments) -> np.ndarray:
    dense = np.zeros((args["m"], args["n"]))
    dense[args["indices0"][row_ids(args["indptr1"])], args["indices1"]] = args["a"]
    return dense @ _wide(args["b"])


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


@case(_csc_inputs, lambda args: _csc_dense(args) @ _wide(args["b"]), "c")
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
    np.add.at(out, args["rows"], _wide(args["a"])[:, None] * _wide(args["b"])[args["cols"]])
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


@case(_dia_inputs, lambda args: _dia_dense(args) @ _wide(args["b"]), "c")
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


@case(_triangular_inputs, lambda args: _triangular_dense(args) @ _wide(args["x"]), "y")
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
    return (dense + np.tril(dense, -1).T) @ _wide(args["x"])


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


# ---------------------------------------------------------------- conversions


def _csr2bsr_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s, blk = matrix(rng, kind), block_size(kind)
    blocks = np.unique(np.stack([s.rows, s.cols], axis=1) // blk, axis=0).reshape(-1, 2)
    mb, nb = -(-s.m // blk), -(-s.n // blk)
    block_ptr = np.searchsorted(blocks[:, 0], np.arange(mb + 1)).astype(idtype)
    arrays = {**s.arrays(idtype), "indptr_b": block_ptr, "indices_b": blocks[:, 1].astype(idtype)}
    sizes = {**s.sizes("m", "n", "nnz"), "mb": mb, "nb": nb, "nnzb": len(blocks), "blk": blk}
    return {"a": values(rng, s.nnz, dtype), **arrays, **sizes}


def _csr2bsr_expected(args: Arguments) -> np.ndarray:
    blk = args["blk"]
    dense = np.zeros((args["mb"] * blk, args["nb"] * blk))
    dense[: args["m"], : args["n"]] = csr_dense(args)
    tiles = dense.reshape(args["mb"], blk, args["nb"], blk).transpose(0, 2, 1, 3)
    return tiles[row_ids(args["indptr_b"]), args["indices_b"]]


def _csr2bsr(search: str) -> Any:
    def make(dtype: str, idtype: str) -> Any:
        @T.prim_func
        def func(
            a: T.handle, b: T.handle,
            indptr: T.handle, indices: T.handle, indptr_b: T.handle, indices_b: T.handle,
            m: T.int32, n: T.int32, nnz: T.int32, mb: T.int32, nb: T.int32, nnzb: T.int32, blk: T.int32,
        ):  # fmt: skip
            I = T.dense_fixed(m)
            J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
            IO = T.dense_fixed(mb)
            JO = T.sparse_variable(IO, (nb, nnzb), (indptr_b, indices_b), idtype)
            II = T.dense_fixed(blk)
            JI = T.dense_fixed(blk)
            A = T.match_sparse_buffer(a, (I, J), dtype)
            B = T.match_sparse_buffer(b, (IO, JO, II, JI), dtype)
            with T.sp_iter([IO, JO, II, JI], "SSSS", "csr2bsr") as [io, jo, ii, ji]:
                T.sp_iter_attr({"search": search})
                B[io, jo, ii, ji] = A[io * blk + ii, jo * blk + ji]

        return func

    return make


csr2bsr = case(_csr2bsr_inputs, _csr2bsr_expected, "b", name="csr2bsr")(_csr2bsr("inline"))
csr2bsr_hoist = case(_csr2bsr_inputs, _csr2bsr_expected, "b", name="csr2bsr_hoist")(_csr2bsr("hoist"))


@case(_csr2bsr_inputs, _csr2bsr_expected, "b")
def csr2bsr_scatter(dtype: str, idtype: str) -> Any:
    """The other direction: every stored element finds its block."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle,
        indptr: T.handle, indices: T.handle, indptr_b: T.handle, indices_b: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, mb: T.int32, nb: T.int32, nnzb: T.int32, blk: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        IO = T.dense_fixed(mb)
        JO = T.sparse_variable(IO, (nb, nnzb), (indptr_b, indices_b), idtype)
        II = T.dense_fixed(blk)
        JI = T.dense_fixed(blk)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (IO, JO, II, JI), dtype)
        with T.sp_iter([IO, JO, II, JI], "SSSS", "clear") as [io, jo, ii, ji]:
            B[io, jo, ii, ji] = 0
        with T.sp_iter([I, J], "SS", "csr2bsr") as [i, j]:
            B[i // blk, j // blk, i % blk, j % blk] = A[i, j]

    return func
