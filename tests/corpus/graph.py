# SPDX-License-Identifier: Apache-2.0
"""Programs from graph learning, attention and point clouds."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparsetir as T

from corpus.case import Arguments, case
from corpus.data import (
    TENSOR_SIZES,
    block_size,
    coordinates,
    csr_dense,
    fibers,
    matrix,
    pointers,
    row_ids,
    values,
)

# ---------------------------------------------------------------- hypergraphs


def _hyper_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    arrays = {**s.arrays(idtype), **s.transposed().arrays(idtype, "_t")}
    feat = min(s.feat, 16)
    return {"x": values(rng, (s.m, feat), dtype), **arrays, **s.sizes("m", "n", "nnz"), "feat": feat}


def _hyper_expected(args: Arguments) -> np.ndarray:
    incidence = csr_dense({**args, "ones": np.ones(args["nnz"])}, "ones")
    return incidence @ (incidence.T @ args["x"].astype(np.float64))


@case(_hyper_inputs, _hyper_expected, "y")
def hyper_gnn(dtype: str, idtype: str) -> Any:
    """From a node to its hyperedges and on to their nodes: I_T is iterated below the coordinate of J."""

    @T.prim_func
    def func(
        x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, indptr_t: T.handle, indices_t: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        I_T = T.sparse_variable(J_dense, (m, nnz), (indptr_t, indices_t), idtype)
        F = T.dense_fixed(feat)
        X = T.match_sparse_buffer(x, (I, F), dtype)
        Y = T.match_sparse_buffer(y, (I, F), dtype)
        with T.sp_iter([I, F, J, T.attach(I_T, J)], "SSRR", "hyper_gnn") as [i, f, j, i_t]:
            with T.init():
                Y[i, f] = 0
            Y[i, f] = Y[i, f] + X[i_t, f]

    return func


def _spgemm_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """A times B, B with few of its rows stored."""
    s = matrix(rng, kind)
    t = matrix(rng, kind, s.n, 6 if s.n > 1 else 1)
    keep = t.rows % 3 != 1
    found = np.stack([t.rows[keep], t.cols[keep]], axis=1)
    operands = {"a": values(rng, s.nnz, dtype), "b": values(rng, len(found), dtype)}
    return {**operands, **s.arrays(idtype), **fibers(found, (t.m, t.n), idtype), **s.sizes("m", "n", "nnz"), "p": t.n}


def _spgemm_expected(args: Arguments) -> np.ndarray:
    right = np.zeros((args["n"], args["p"]))
    right[args["indices0"][row_ids(args["indptr1"])], args["indices1"]] = args["b"]
    return csr_dense(args) @ right


@case(_spgemm_inputs, _spgemm_expected, "c")
def attach_compressed(dtype: str, idtype: str) -> Any:
    """Gustavson's product: the row of B at A's column is searched, and may not be stored."""

    @T.prim_func
    def func(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        indptr0: T.handle, indices0: T.handle, indptr1: T.handle, indices1: T.handle,
        m: T.int32, n: T.int32, p: T.int32, nnz: T.int32, n0: T.int32, n1: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        BJ = T.sparse_variable(None, (n, n0), (indptr0, indices0), idtype)
        BK = T.sparse_variable(BJ, (p, n1), (indptr1, indices1), idtype)
        K_dense = T.dense_fixed(p)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (BJ, BK), dtype)
        C = T.match_sparse_buffer(c, (I, K_dense), dtype)
        with T.sp_iter([I, J, T.attach(BK, J)], "SRS", "spgemm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return func


# ---------------------------------------------------------------- relations


def hetero_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    """Several relations between n nodes, each listing only the rows it has."""
    n, r = min(max(matrix(rng, kind).m, 1), 12), 1 if kind == "one_by_one" else 3
    shape_kind = "zero_nnz" if kind == "no_rows" else kind
    found = coordinates(rng, shape_kind, (r, n, n))
    levels = fibers(found, (r, n, n), idtype)
    indptr_i = levels["indptr1"][np.searchsorted(levels["indices0"], np.arange(r + 1))]
    arrays = {"indptr_i": indptr_i, "indices_i": levels["indices1"]}
    arrays |= {"indptr_j": levels["indptr2"], "indices_j": levels["indices2"]}
    fi, fo = (1, 1) if kind == "one_by_one" else (3, 4)
    operands = {"w": values(rng, (r, fo, fi), dtype), "x": values(rng, (n, fi), dtype)}
    return {**operands, **arrays, "n": n, "r": r, "fi": fi, "fo": fo, "nnz_i": levels["n1"], "nnz_j": levels["n2"]}


def hetero_expected(args: Arguments) -> np.ndarray:
    fiber = row_ids(args["indptr_j"])
    relation, target = row_ids(args["indptr_i"])[fiber], args["indices_i"][fiber]
    messages = np.einsum("eof,ef->eo", args["w"].astype(np.float64)[relation], args["x"][args["indices_j"]])
    out = np.zeros((args["n"], args["fo"]))
    np.add.at(out, target, messages)
    return out


@case(hetero_inputs, hetero_expected, "y")
def rgcn_hetero(dtype: str, idtype: str) -> Any:
    """A node has rows in several relations: its sum starts once, not once per relation."""

    @T.prim_func
    def func(
        w: T.handle, x: T.handle, y: T.handle,
        indptr_i: T.handle, indices_i: T.handle, indptr_j: T.handle, indices_j: T.handle,
        n: T.int32, r: T.int32, fi: T.int32, fo: T.int32, nnz_i: T.int32, nnz_j: T.int32,
    ):  # fmt: skip
        R = T.dense_fixed(r)
        I = T.sparse_variable(R, (n, nnz_i), (indptr_i, indices_i), idtype)
        J = T.sparse_variable(I, (n, nnz_j), (indptr_j, indices_j), idtype)
        I_dense = T.dense_fixed(n)
        J_dense = T.dense_fixed(n)
        FI = T.dense_fixed(fi)
        FO = T.dense_fixed(fo)
        W = T.match_sparse_buffer(w, (R, FO, FI), dtype)
        X = T.match_sparse_buffer(x, (J_dense, FI), dtype)
        Y = T.match_sparse_buffer(y, (I_dense, FO), dtype)
        with T.sp_iter([R, I, FO, J, FI], "RSSRR", "rgcn_hetero") as [q, i, g, j, f]:
            with T.init():
                Y[i, g] = 0
            Y[i, g] = Y[i, g] + W[q, g, f] * X[j, f]

    return func


@case(hetero_inputs, hetero_expected, "y")
def rgcn_hetero_spatial(dtype: str, idtype: str) -> Any:
    """The published form: the relation is spatial although the output does not mention it."""

    @T.prim_func
    def func(
        w: T.handle, x: T.handle, y: T.handle,
        indptr_i: T.handle, indices_i: T.handle, indptr_j: T.handle, indices_j: T.handle,
        n: T.int32, r: T.int32, fi: T.int32, fo: T.int32, nnz_i: T.int32, nnz_j: T.int32,
    ):  # fmt: skip
        R = T.dense_fixed(r)
        I = T.sparse_variable(R, (n, nnz_i), (indptr_i, indices_i), idtype)
        J = T.sparse_variable(I, (n, nnz_j), (indptr_j, indices_j), idtype)
        I_dense = T.dense_fixed(n)
        J_dense = T.dense_fixed(n)
        FI = T.dense_fixed(fi)
        FO = T.dense_fixed(fo)
        W = T.match_sparse_buffer(w, (R, FO, FI), dtype)
        X = T.match_sparse_buffer(x, (J_dense, FI), dtype)
        Y = T.match_sparse_buffer(y, (I_dense, FO), dtype)
        with T.sp_iter([FO, R, I, J, FI], "SSSRR", "rgcn_hetero") as [g, q, i, j, f]:
            with T.init():
                Y[i, g] = 0
            Y[i, g] = Y[i, g] + W[q, g, f] * X[j, f]

    return func


@case(hetero_inputs, hetero_expected, "y")
def rgcn_hetero_two_steps(dtype: str, idtype: str) -> Any:
    """Clearing and adding as two iterations."""

    @T.prim_func
    def func(
        w: T.handle, x: T.handle, y: T.handle,
        indptr_i: T.handle, indices_i: T.handle, indptr_j: T.handle, indices_j: T.handle,
        n: T.int32, r: T.int32, fi: T.int32, fo: T.int32, nnz_i: T.int32, nnz_j: T.int32,
    ):  # fmt: skip
        R = T.dense_fixed(r)
        I = T.sparse_variable(R, (n, nnz_i), (indptr_i, indices_i), idtype)
        J = T.sparse_variable(I, (n, nnz_j), (indptr_j, indices_j), idtype)
        I_dense = T.dense_fixed(n)
        J_dense = T.dense_fixed(n)
        FI = T.dense_fixed(fi)
        FO = T.dense_fixed(fo)
        W = T.match_sparse_buffer(w, (R, FO, FI), dtype)
        X = T.match_sparse_buffer(x, (J_dense, FI), dtype)
        Y = T.match_sparse_buffer(y, (I_dense, FO), dtype)
        with T.sp_iter([I_dense, FO], "SS", "clear") as [i, g]:
            Y[i, g] = 0
        with T.sp_iter([R, I, J, FI, FO], "RSRRS", "add") as [q, i, j, f, g]:
            Y[i, g] = Y[i, g] + W[q, g, f] * X[j, f]

    return func


def _homo_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    n = min(matrix(rng, kind).m, 20)
    s, r = matrix(rng, kind, n, n), 1 if kind == "one_by_one" else 4
    fi, fo = (1, 1) if kind == "one_by_one" else (3, 4)
    operands = {"etype": rng.integers(0, r, s.nnz).astype("int32"), "w": values(rng, (r, fo, fi), dtype)}
    operands["x"] = values(rng, (n, fi), dtype)
    return {**operands, **s.arrays(idtype), "n": n, "r": r, "fi": fi, "fo": fo, "nnz": s.nnz}


def _homo_expected(args: Arguments) -> np.ndarray:
    messages = np.einsum("eof,ef->eo", args["w"].astype(np.float64)[args["etype"]], args["x"][args["indices"]])
    out = np.zeros((args["n"], args["fo"]))
    np.add.at(out, row_ids(args["indptr"]), messages)
    return out


@case(_homo_inputs, _homo_expected, "y")
def rgcn_homo(dtype: str, idtype: str) -> Any:
    """The weight is chosen by the edge's type: an integer buffer in a subscript."""

    @T.prim_func
    def func(
        etype: T.handle, w: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
        n: T.int32, r: T.int32, fi: T.int32, fo: T.int32, nnz: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(n)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n)
        R = T.dense_fixed(r)
        FI = T.dense_fixed(fi)
        FO = T.dense_fixed(fo)
        E = T.match_sparse_buffer(etype, (I, J), "int32")
        W = T.match_sparse_buffer(w, (R, FO, FI), dtype)
        X = T.match_sparse_buffer(x, (J_dense, FI), dtype)
        Y = T.match_sparse_buffer(y, (I, FO), dtype)
        with T.sp_iter([I, FO, J, FI], "SSRR", "rgcn_homo") as [i, g, j, f]:
            with T.init():
                Y[i, g] = 0
            Y[i, g] = Y[i, g] + W[E[i, j], g, f] * X[j, f]

    return func


# ---------------------------------------------------------------- softmax, attention


def _softmax_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    scores = (values(rng, s.nnz, dtype) * 300).astype(dtype)
    return {"a": scores, **s.arrays(idtype), **s.sizes("m", "n", "nnz")}


def _softmax_expected(args: Arguments) -> np.ndarray:
    rows, scores = row_ids(args["indptr"]), args["a"].astype(np.float64)
    top = np.full(args["m"], -np.inf)
    np.maximum.at(top, rows, scores)
    weights = np.exp(scores - top[rows])
    return weights / np.bincount(rows, weights, minlength=args["m"])[rows]


@case(_softmax_inputs, _softmax_expected, "b", tolerance=1e-4)
def sparse_softmax(dtype: str, idtype: str) -> Any:
    """Scores far beyond the range of exp: right only if shifted by the row's maximum."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        top = T.alloc_sparse_buffer((I,), dtype)
        total = T.alloc_sparse_buffer((I,), dtype)
        with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
            with T.init():
                top[i] = T.min_value(dtype)
            top[i] = T.max(top[i], A[i, j])
        with T.sp_iter([I, J], "SR", "row_sum") as [i, j]:
            with T.init():
                total[i] = 0
            total[i] = total[i] + T.exp(A[i, j] - top[i])
        with T.sp_iter([I, J], "SS", "divide") as [i, j]:
            B[i, j] = T.exp(A[i, j] - top[i]) / total[i]

    return func


@case(_softmax_inputs, _softmax_expected, "b", tolerance=1e-4)
def sparse_softmax_nested(dtype: str, idtype: str) -> Any:
    """Row by row: three iterations over a row inside one over the rows."""

    @T.prim_func
    def func(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (I, J), dtype)
        top = T.alloc_sparse_buffer((I,), dtype)
        total = T.alloc_sparse_buffer((I,), dtype)
        with T.sp_iter([I], "S", "rows") as [i]:
            with T.sp_iter([J], "R", "row_max") as [j]:
                with T.init():
                    top[i] = T.min_value(dtype)
                top[i] = T.max(top[i], A[i, j])
            with T.sp_iter([J], "R", "row_sum") as [j]:
                with T.init():
                    total[i] = 0
                total[i] = total[i] + T.exp(A[i, j] - top[i])
            with T.sp_iter([J], "S", "divide") as [j]:
                B[i, j] = T.exp(A[i, j] - top[i]) / total[i]

    return func


def _attention_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s, blk = matrix(rng, kind), block_size(kind)
    d = min(s.feat, 8)
    operands = {"q": values(rng, (s.m, blk, d), dtype), "k": values(rng, (s.n, blk, d), dtype)}
    operands["v"] = values(rng, (s.n, blk, d), dtype)
    return {**operands, **s.arrays(idtype), "mb": s.m, "nb": s.n, "nnzb": s.nnz, "blk": blk, "d": d}


def _attention_expected(args: Arguments) -> np.ndarray:
    q, k, v = (args[name].astype(np.float64) for name in "qkv")
    out = np.zeros(q.shape)
    for row in range(args["mb"]):
        cols = args["indices"][args["indptr"][row] : args["indptr"][row + 1]]
        if len(cols):
            scores = q[row] @ k[cols].reshape(-1, args["d"]).T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[row] = (weights / weights.sum(axis=1, keepdims=True)) @ v[cols].reshape(-1, args["d"])
    return out


@case(_attention_inputs, _attention_expected, "o", tolerance=1e-4)
def block_attention(dtype: str, idtype: str) -> Any:
    """SDDMM, softmax and SpMM over one block structure, the scores in a scratch buffer."""

    @T.prim_func
    def func(
        q: T.handle, k: T.handle, v: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
        mb: T.int32, nb: T.int32, nnzb: T.int32, blk: T.int32, d: T.int32,
    ):  # fmt: skip
        IO = T.dense_fixed(mb)
        JO = T.sparse_variable(IO, (nb, nnzb), (indptr, indices), idtype)
        JO_dense = T.dense_fixed(nb)
        II = T.dense_fixed(blk)
        JI = T.dense_fixed(blk)
        D = T.dense_fixed(d)
        Q = T.match_sparse_buffer(q, (IO, II, D), dtype)
        K = T.match_sparse_buffer(k, (JO_dense, JI, D), dtype)
        V = T.match_sparse_buffer(v, (JO_dense, JI, D), dtype)
        O = T.match_sparse_buffer(o, (IO, II, D), dtype)
        S = T.alloc_sparse_buffer((IO, JO, II, JI), dtype)
        top = T.alloc_sparse_buffer((IO, II), dtype)
        total = T.alloc_sparse_buffer((IO, II), dtype)
        with T.sp_iter([IO, JO, II, JI, D], "SSSSR", "scores") as [io, jo, ii, ji, e]:
            with T.init():
                S[io, jo, ii, ji] = 0
            S[io, jo, ii, ji] = S[io, jo, ii, ji] + Q[io, ii, e] * K[jo, ji, e]
        with T.sp_iter([IO, II, JO, JI], "SSRR", "row_max") as [io, ii, jo, ji]:
            with T.init():
                top[io, ii] = T.min_value(dtype)
            top[io, ii] = T.max(top[io, ii], S[io, jo, ii, ji])
        with T.sp_iter([IO, JO, II, JI], "SSSS", "exponent") as [io, jo, ii, ji]:
            S[io, jo, ii, ji] = T.exp(S[io, jo, ii, ji] - top[io, ii])
        with T.sp_iter([IO, II, JO, JI], "SSRR", "row_sum") as [io, ii, jo, ji]:
            with T.init():
                total[io, ii] = 0
            total[io, ii] = total[io, ii] + S[io, jo, ii, ji]
        with T.sp_iter([IO, JO, II, D, JI], "SRSSR", "mix") as [io, jo, ii, e, ji]:
            with T.init():
                O[io, ii, e] = 0
            O[io, ii, e] = O[io, ii, e] + S[io, jo, ii, ji] / total[io, ii] * V[jo, ji, e]

    return func


# ---------------------------------------------------------------- point clouds


def kernel_maps(voxels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offset, output voxel, input voxel) of every pair of neighbours in a 3 x 3 x 3 window, sorted."""
    where = {tuple(voxel): n for n, voxel in enumerate(voxels.tolist())}
    steps = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    found = [
        (r, out, where[tuple(voxel + step)])
        for r, step in enumerate(steps)
        for out, voxel in enumerate(voxels)
        if tuple(voxel + step) in where
    ]
    maps = np.array(found, np.int64).reshape(-1, 3)
    return maps[:, 0], maps[:, 1], maps[:, 2]


def _conv_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    voxels = coordinates(rng, kind, TENSOR_SIZES[kind][:3])
    relation, out, source = kernel_maps(voxels)
    count = len(voxels)
    fi, fo = (1, 1) if kind == "one_by_one" else (2, 3)
    operands = {"w": values(rng, (27, fi, fo), dtype), "x": values(rng, (count, fi), dtype)}
    arrays = {"indptr": pointers(relation, 27, idtype), "outs": out.astype(idtype), "ins": source.astype(idtype)}
    return {**operands, **arrays, "n": count, "r": 27, "nnz": len(relation), "fi": fi, "fo": fo}


def _conv_expected(args: Arguments) -> np.ndarray:
    out = np.zeros((args["n"], args["fo"]))
    for r in range(args["r"]):
        pairs = slice(args["indptr"][r], args["indptr"][r + 1])
        np.add.at(out, args["outs"][pairs], args["x"][args["ins"][pairs]].astype(np.float64) @ args["w"][r])
    return out


@case(_conv_inputs, _conv_expected, "y")
def sparse_conv(dtype: str, idtype: str) -> Any:
    """A 3-D convolution over occupied voxels: gather, multiply by the offset's weight, scatter."""

    @T.prim_func
    def func(
        w: T.handle, x: T.handle, y: T.handle, indptr: T.handle, outs: T.handle, ins: T.handle,
        n: T.int32, r: T.int32, nnz: T.int32, fi: T.int32, fo: T.int32,
    ):  # fmt: skip
        R = T.dense_fixed(r)
        I = T.sparse_variable(R, (n, nnz), (indptr, outs), idtype)
        J = T.singleton(I, n, ins, idtype)
        I_dense = T.dense_fixed(n)
        J_dense = T.dense_fixed(n)
        FI = T.dense_fixed(fi)
        FO = T.dense_fixed(fo)
        W = T.match_sparse_buffer(w, (R, FI, FO), dtype)
        X = T.match_sparse_buffer(x, (J_dense, FI), dtype)
        Y = T.match_sparse_buffer(y, (I_dense, FO), dtype)
        with T.sp_iter([R, I, J, FI, FO], "RSRRS", "sparse_conv") as [q, i, j, f, g]:
            with T.init():
                Y[i, g] = 0
            Y[i, g] = Y[i, g] + W[q, f, g] * X[j, f]

    return func


def _bag_inputs(rng: np.random.Generator, kind: str, dtype: str, idtype: str) -> Arguments:
    s = matrix(rng, kind)
    words = rng.integers(0, s.n, s.nnz).astype("int64")
    lengths = {"indptr": s.arrays(idtype)["indptr"], "longest": int(s.counts.max(initial=0))}
    return {"ids": words, "table": values(rng, (s.n, s.feat), dtype), **lengths, **s.sizes("m", "n", "nnz", "feat")}


def _bag_expected(args: Arguments) -> np.ndarray:
    out = np.zeros((args["m"], args["feat"]))
    np.add.at(out, row_ids(args["indptr"]), args["table"].astype(np.float64)[args["ids"]])
    return out


@case(_bag_inputs, _bag_expected, "y")
def embedding_bag(dtype: str, idtype: str) -> Any:
    """Rows of a table summed over ragged bags of int64 ids."""

    @T.prim_func
    def func(
        ids: T.handle, table: T.handle, y: T.handle, indptr: T.handle,
        m: T.int32, longest: T.int32, nnz: T.int32, n: T.int32, feat: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (longest, nnz), indptr, idtype)
        N = T.dense_fixed(n)
        K = T.dense_fixed(feat)
        W = T.match_sparse_buffer(ids, (I, J), "int64")
        B = T.match_sparse_buffer(table, (N, K), dtype)
        Y = T.match_sparse_buffer(y, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "bag") as [i, j, k]:
            with T.init():
                Y[i, k] = 0
            Y[i, k] = Y[i, k] + B[W[i, j], k]

    return func
