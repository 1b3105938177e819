# SPDX-License-Identifier: Apache-2.0
"""Block formats: BSR, DBSR, SR-BCRS, and making blocks out of CSR."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import Arguments, case
from corpus.data import block_size, csr_dense, fibers, matrix, offsets, poisoned, row_ids, values, widened

# ---------------------------------------------------------------- multiplication


def bsr_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A in BSR times a dense B."""
    s, blk = matrix(rng, kind), block_size(kind)
    operands = {"a": values(rng, (s.nnz, blk, blk), dtype), "b": values(rng, (s.n, blk, s.feat), dtype)}
    return {**operands, **s.arrays(idtype), "mb": s.m, "nb": s.n, "nnzb": s.nnz, "blk": blk, "feat": s.feat}


def bsr_expected(args: Arguments) -> np.ndarray:
    out = np.zeros((args["mb"], args["blk"], args["feat"]))
    products = np.einsum("pij,pjf->pif", widened(args["a"]), widened(args["b"])[args["indices"]])
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
    products = widened(args["a"])[stored][:, :, None] * widened(args["b"])[args["indices"][stored]][:, None, :]
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


# ---------------------------------------------------------------- conversion


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
