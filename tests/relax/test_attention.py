# SPDX-License-Identifier: Apache-2.0
"""Scores, softmax and mixing along the edges of a graph in one function: row loops that share scratch."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import ir, tirx
from tvm.script import sparsetir as T
from tvm.script import tirx as tir
from tvm.target import codegen

import sparsetir
from sparsetir.ir.rewriting import collect
from sparsetir.lower import as_module
from sparsetir.lower.vector.vector_math import EXP
from sparsetir.lower.vector.vectorize import VectorizeMaps
from sparsetir.schedules import Choices
from sparsetir.workloads import suite

pytestmark = pytest.mark.optimised

PARALLEL, VECTORIZED = tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED
CASES = {
    "no rows": sp.csr_array((0, 4)),
    "no columns": sp.csr_array((4, 0)),
    "one": sp.csr_array(np.ones((1, 1))),
    "nothing stored": sp.csr_array((5, 3)),
    "rows of every length": sp.csr_array(np.tril(np.ones((40, 41)), -1)),
    "empty rows": sp.csr_array((np.ones(3), ([1, 1, 200], [0, 2, 1])), shape=(300, 3)),
}


def attention(dtype: str = "float32", idtype: str = "int32") -> tirx.PrimFunc:
    """One head, one feature vector an edge's end."""
    size = T.int64 if idtype == "int64" else T.int32
    real = T.float64 if dtype == "float64" else T.float32

    @T.prim_func
    def attention(
        g: T.handle, q: T.handle, k: T.handle, v: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, feat: size, scale: real,
    ):  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_dense = T.dense_fixed(n, idtype)
        F = T.dense_fixed(feat, idtype)
        G = T.match_sparse_buffer(g, (I, J), dtype)
        Q = T.match_sparse_buffer(q, (I, F), dtype)
        K = T.match_sparse_buffer(k, (J_dense, F), dtype)
        V = T.match_sparse_buffer(v, (J_dense, F), dtype)
        O = T.match_sparse_buffer(o, (I, F), dtype)
        score = T.alloc_sparse_buffer((I, J), dtype)
        top = T.alloc_sparse_buffer((I,), dtype)
        total = T.alloc_sparse_buffer((I,), dtype)
        with T.sp_iter([I, J, F], "SSR", "scores") as [i, j, f]:
            with T.init():
                score[i, j] = 0
            score[i, j] = score[i, j] + Q[i, f] * K[j, f]
        with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
            with T.init():
                top[i] = T.min_value(dtype)
            top[i] = T.max(top[i], score[i, j])
        with T.sp_iter([I, J], "SS", "exponent") as [i, j]:
            score[i, j] = G[i, j] * T.exp((score[i, j] - top[i]) * scale)
        with T.sp_iter([I, J], "SR", "row_sum") as [i, j]:
            with T.init():
                total[i] = 0
            total[i] = total[i] + score[i, j]
        with T.sp_iter([I, J, F], "SRS", "mix") as [i, j, f]:
            with T.init():
                O[i, f] = 0
            O[i, f] = O[i, f] + score[i, j] / total[i] * V[j, f]

    return attention


@T.prim_func
def heads_inside(
    g: T.handle, q: T.handle, k: T.handle, v: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, heads: T.int32, feat: T.int32, scale: T.float32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    H = T.dense_fixed(heads)
    F = T.dense_fixed(feat)
    G = T.match_sparse_buffer(g, (I, J), "float32")
    Q = T.match_sparse_buffer(q, (H, I, F), "float32")
    K = T.match_sparse_buffer(k, (H, J_dense, F), "float32")
    V = T.match_sparse_buffer(v, (H, J_dense, F), "float32")
    O = T.match_sparse_buffer(o, (H, I, F), "float32")
    score = T.alloc_sparse_buffer((I, J, H), "float32")
    top = T.alloc_sparse_buffer((I, H), "float32")
    total = T.alloc_sparse_buffer((I, H), "float32")
    with T.sp_iter([I, J, H, F], "SSSR", "scores") as [i, j, h, f]:
        with T.init():
            score[i, j, h] = 0
        score[i, j, h] = score[i, j, h] + Q[h, i, f] * K[h, j, f]
    with T.sp_iter([I, J, H], "SRS", "row_max") as [i, j, h]:
        with T.init():
            top[i, h] = T.min_value("float32")
        top[i, h] = T.max(top[i, h], score[i, j, h])
    with T.sp_iter([I, J, H], "SSS", "exponent") as [i, j, h]:
        score[i, j, h] = G[i, j] * T.exp((score[i, j, h] - top[i, h]) * scale)
    with T.sp_iter([I, J, H], "SRS", "row_sum") as [i, j, h]:
        with T.init():
            total[i, h] = 0
        total[i, h] = total[i, h] + score[i, j, h]
    with T.sp_iter([I, H, J, F], "SSRS", "mix") as [i, h, j, f]:
        with T.init():
            O[h, i, f] = 0
        O[h, i, f] = O[h, i, f] + score[i, j, h] / total[i, h] * V[h, j, f]


@T.prim_func
def heads_outside(
    g: T.handle, q: T.handle, k: T.handle, v: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, heads: T.int32, feat: T.int32, scale: T.float32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    H = T.dense_fixed(heads)
    F = T.dense_fixed(feat)
    G = T.match_sparse_buffer(g, (I, J), "float32")
    Q = T.match_sparse_buffer(q, (H, I, F), "float32")
    K = T.match_sparse_buffer(k, (H, J_dense, F), "float32")
    V = T.match_sparse_buffer(v, (H, J_dense, F), "float32")
    O = T.match_sparse_buffer(o, (H, I, F), "float32")
    score = T.alloc_sparse_buffer((H, I, J), "float32")
    top = T.alloc_sparse_buffer((H, I), "float32")
    total = T.alloc_sparse_buffer((H, I), "float32")
    with T.sp_iter([I, H, J, F], "SSSR", "scores") as [i, h, j, f]:
        with T.init():
            score[h, i, j] = 0
        score[h, i, j] = score[h, i, j] + Q[h, i, f] * K[h, j, f]
    with T.sp_iter([I, H, J], "SSR", "row_max") as [i, h, j]:
        with T.init():
            top[h, i] = T.min_value("float32")
        top[h, i] = T.max(top[h, i], score[h, i, j])
    with T.sp_iter([I, H, J], "SSS", "exponent") as [i, h, j]:
        score[h, i, j] = G[i, j] * T.exp((score[h, i, j] - top[h, i]) * scale)
    with T.sp_iter([I, H, J], "SSR", "row_sum") as [i, h, j]:
        with T.init():
            total[h, i] = 0
        total[h, i] = total[h, i] + score[h, i, j]
    with T.sp_iter([I, H, J, F], "SSRS", "mix") as [i, h, j, f]:
        with T.init():
            O[h, i, f] = 0
        O[h, i, f] = O[h, i, f] + score[h, i, j] / total[h, i] * V[h, j, f]


def blocked(block: int) -> tirx.PrimFunc:
    """Attention over blocks of `block` queries and as many keys."""

    @T.prim_func
    def blocked(
        q: T.handle, k: T.handle, v: T.handle, o: T.handle, indptr: T.handle, indices: T.handle,
        m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32, scale: T.float32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        J_dense = T.dense_fixed(n)
        II = T.dense_fixed(block)
        JJ = T.dense_fixed(block)
        F = T.dense_fixed(feat)
        Q = T.match_sparse_buffer(q, (I, II, F), "float32")
        K = T.match_sparse_buffer(k, (J_dense, JJ, F), "float32")
        V = T.match_sparse_buffer(v, (J_dense, JJ, F), "float32")
        O = T.match_sparse_buffer(o, (I, II, F), "float32")
        score = T.alloc_sparse_buffer((I, J, II, JJ), "float32")
        top = T.alloc_sparse_buffer((I, II), "float32")
        total = T.alloc_sparse_buffer((I, II), "float32")
        with T.sp_iter([I, J, II, JJ, F], "SSSSR", "scores") as [i, j, ii, jj, f]:
            with T.init():
                score[i, j, ii, jj] = 0
            score[i, j, ii, jj] = score[i, j, ii, jj] + Q[i, ii, f] * K[j, jj, f]
        with T.sp_iter([I, J, II, JJ], "SRSR", "row_max") as [i, j, ii, jj]:
            with T.init():
                top[i, ii] = T.min_value("float32")
            top[i, ii] = T.max(top[i, ii], score[i, j, ii, jj])
        with T.sp_iter([I, J, II, JJ], "SSSS", "exponent") as [i, j, ii, jj]:
            score[i, j, ii, jj] = T.exp((score[i, j, ii, jj] - top[i, ii]) * scale)
        with T.sp_iter([I, J, II, JJ], "SRSR", "row_sum") as [i, j, ii, jj]:
            with T.init():
                total[i, ii] = 0
            total[i, ii] = total[i, ii] + score[i, j, ii, jj]
        with T.sp_iter([I, J, II, JJ, F], "SRSRS", "mix") as [i, j, ii, jj, f]:
            with T.init():
                O[i, ii, f] = 0
            O[i, ii, f] = O[i, ii, f] + score[i, j, ii, jj] / total[i, ii] * V[j, jj, f]

    return blocked


def expected(G: Any, Q: np.ndarray, K: np.ndarray, V: np.ndarray, scale: float) -> np.ndarray:
    """The same in float64, all rows at once."""
    Q, K, V = (x.astype("float64") for x in (Q, K, V))
    rows = np.repeat(np.arange(G.shape[0]), np.diff(G.indptr))
    scores = np.einsum("ef,ef->e", Q[rows], K[G.indices]) * scale
    top, total = np.full(G.shape[0], -np.inf), np.zeros(G.shape[0])
    np.maximum.at(top, rows, scores)
    weights = G.data.astype("float64") * np.exp(scores - top[rows])
    np.add.at(total, rows, weights)
    return sp.csr_array((weights / total[rows], G.indices, G.indptr), shape=G.shape) @ V


def weighted(pattern: Any, dtype: str) -> Any:
    """The pattern with a positive weight for every edge."""
    G = sp.csr_array(pattern).astype(dtype)
    G.data = np.random.default_rng(3).uniform(0.5, 2, G.nnz).astype(dtype)
    return G


def drawn(G: Any, feat: int, dtype: str, heads: tuple[int, ...] = ()) -> list[np.ndarray]:
    """Queries, keys and values."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal((*heads, rows, feat)).astype(dtype) for rows in (G.shape[0], G.shape[1], G.shape[1])]


def close(found: np.ndarray, want: np.ndarray, dtype: str, message: str) -> None:
    np.testing.assert_allclose(found, want, rtol=0, atol=500 * np.finfo(dtype).eps, err_msg=message)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "idtype"), [("float32", "int32"), ("float64", "int64")])
def test_every_family_and_degenerate_rows(dtype: str, idtype: str) -> None:
    kernel = sparsetir.build(attention(dtype, idtype))
    patterns = {**CASES, **{name: make(size="small") for name, make in suite.families().items()}}
    for name, pattern in patterns.items():
        G = weighted(pattern, dtype)
        G.indptr, G.indices = G.indptr.astype(idtype), G.indices.astype(idtype)
        for feat in (5, 32):
            Q, K, V = drawn(G, feat, dtype)
            found = kernel(G=G, Q=Q, K=K, V=V, scale=feat**-0.5)
            close(found, expected(G, Q, K, V, feat**-0.5), dtype, f"{name}, {feat}")


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [0, 1, 3, 16])
def test_any_number_of_chunks(chunks: int) -> None:
    kernel = sparsetir.build(attention(), schedule=Choices(chunks=chunks, prefetch=4, unroll=2))
    for name in ("rows of every length", "empty rows", "no rows"):
        G = weighted(CASES[name], "float32")
        Q, K, V = drawn(G, 24, "float32")
        close(kernel(G=G, Q=Q, K=K, V=V, scale=0.2), expected(G, Q, K, V, 0.2), "float32", name)


@pytest.mark.slow
@pytest.mark.parametrize("func", [heads_inside, heads_outside], ids=["inside", "outside"])
def test_several_heads(func: tirx.PrimFunc) -> None:
    kernel = sparsetir.build(func)
    assert len(loops(kernel, PARALLEL)) == 1
    for name in ("rows of every length", "empty rows", "nothing stored"):
        G = weighted(CASES[name], "float32")
        for heads in (1, 4, 11):
            Q, K, V = drawn(G, 20, "float32", (heads,))
            want = np.stack([expected(G, Q[h], K[h], V[h], 0.2) for h in range(heads)])
            close(kernel(G=G, Q=Q, K=K, V=V, scale=0.2), want, "float32", f"{name}, {heads}")


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4, 16])
def test_blocks(block: int) -> None:
    kernel = sparsetir.build(blocked(block))
    assert len(loops(kernel, PARALLEL)) == 1
    mask = sp.csr_array(np.tril(np.ones((7, 8)), 0) * (np.arange(56).reshape(7, 8) % 3 > 0))
    Q, K, V = drawn(sp.csr_array((7 * block, 8 * block)), 33, "float32")
    by_block = [x.reshape(-1, block, 33) for x in (Q, K, V)]
    structure = {"indptr": mask.indptr.astype("int32"), "indices": mask.indices.astype("int32")}
    found = kernel(**dict(zip("QKV", by_block, strict=True)), **structure, scale=0.3)
    dense = sp.csr_array(np.kron(mask.toarray() != 0, np.ones((block, block))))
    close(found.reshape(-1, 33), expected(dense, Q, K, V, 0.3), "float32", str(block))


@pytest.mark.slow
def test_what_is_not_a_number_stays_in_its_rows() -> None:
    G = weighted(CASES["rows of every length"], "float32")
    Q, K, V = drawn(G, 16, "float32")
    K[20] = np.nan
    found = sparsetir.build(attention())(G=G, Q=Q, K=K, V=V, scale=0.25)
    reached = G.astype(bool).toarray()[:, 20]
    np.testing.assert_array_equal(np.isnan(found), np.repeat(reached[:, None], 16, axis=1))


# ---------------------------------------------------------------- the loops


def loops(kernel: Any, kind: Any) -> list[tirx.For]:
    return [f for f in collect(kernel.compiled.stage(3).body, tirx.For) if f.kind == kind]


def test_one_parallel_loop_without_calls() -> None:
    kernel = sparsetir.build(attention())
    assert len(loops(kernel, PARALLEL)) == 1
    calls = collect(kernel.compiled.stage(3).body, ir.Call)
    assert not [c for c in calls if str(getattr(c.op, "name", "")) == EXP]
    assert "expf" not in kernel.source("asm")


def test_maxima_and_sums_of_rows_are_vectors() -> None:
    text = sparsetir.script(sparsetir.build(attention()).compiled.stage(3))
    maxima = [line for line in text.splitlines() if line.strip().startswith("acc[k_1_1] = T.Select(")]
    assert maxima  # one for whole tiles, others for the columns after them
    for largest in maxima:
        assert "T.max(score[" in largest
        assert largest.count("acc[k_1_1]") == 2  # the new element is compared with NaN, not the maximum so far
    assert "acc[k_1_1] + score" in text


# ---------------------------------------------------------------- exponentials

EXPONENTIAL = """
@tir.prim_func(s_tir=True)
def main(x: tir.Buffer(({n},), "{dtype}"), y: tir.Buffer(({n},), "{dtype}")):
    for k in tir.serial({n}, annotations={{"sparsetir.map": {lanes}}}):
        y[k] = tir.exp(x[k])
"""
EXTREMES = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.72283, 88.7229, -87.33655, -103.97, -103.98, 1e-45, 3e38, -3e38]
EXTREMES_64 = [709.782712893384, 709.7827128933841, -708.39, -745.13, -745.14, 5e-324, 1.7e308, -1.7e308]


NO_X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="code for x86 runs on x86")
HAS_FMA = any(codegen.target_has_features(name, tvm.target.Target.from_device(tvm.cpu())) for name in ("fma", "neon"))
PLAIN = {"kind": "llvm", "mcpu": "x86-64-v2"}  # no multiply-add instructions


def exponential(x: np.ndarray, lanes: int, *, reassociates: bool, plain: bool = False) -> np.ndarray:
    dtype = str(x.dtype)
    text = EXPONENTIAL.format(n=len(x), dtype=dtype, lanes=lanes)
    mod = VectorizeMaps(as_module(tvm.script.from_source(text, {"tir": tir})))
    chosen = PLAIN if plain else dict(tvm.target.Target.from_device(tvm.cpu()).export())
    target = {**chosen, "fast-math-reassoc": reassociates}
    arrays = [tvm.runtime.tensor(a) for a in (x, np.empty_like(x))]
    tvm.compile(mod, target=tvm.target.Target(target), tir_pipeline="s_tir")["main"](*arrays)
    return arrays[1].numpy()


def samples(dtype: str) -> np.ndarray:
    """Values all over the range where results are neither zero nor infinite, around its edges, and tiny ones."""
    edge = 105 if dtype == "float32" else 747
    small = np.geomspace(1e-12, 1, 20_000)
    found = np.concatenate([np.linspace(-edge, edge, 400_001), small, -small, EXTREMES])
    with np.errstate(over="ignore"):
        return np.concatenate([found, EXTREMES_64 if dtype == "float64" else []]).astype(dtype)


@pytest.mark.parametrize("reassociates", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=NO_X86)], ids=["native", "plain"])
def test_exponentials_are_close(dtype: str, reassociates: bool, plain: bool) -> None:
    x = samples(dtype)
    found = exponential(x, 8 if dtype == "float32" else 4, reassociates=reassociates, plain=plain)
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp(x.astype(np.longdouble))
        want = exact.astype(dtype)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(found[~finite], want[~finite])
    unit = np.spacing(np.maximum(want[finite], np.finfo(dtype).smallest_subnormal))
    error = np.abs(found[finite].astype(np.longdouble) - exact[finite]) / unit
    assert error.max() < (2 if plain or not HAS_FMA else 1), x[finite][error.argmax()]


@pytest.mark.shared(3)
@pytest.mark.parametrize("n", [*range(1, 18), 31, 32])
def test_a_value_does_not_depend_on_its_place(n: int) -> None:
    x = np.full(n, 0.7, np.float32)
    found = exponential(x, 8, reassociates=True)
    assert set(found.tolist()) == {exponential(x[:1], 8, reassociates=True)[0]}


def test_other_annotated_loops_lose_their_note() -> None:
    text = EXPONENTIAL.format(n=9, dtype="float32", lanes=8).replace("y[k] = ", "if k < 3:\n            y[k] = ")
    (loop,) = collect(VectorizeMaps(as_module(tvm.script.from_source(text, {"tir": tir})))["main"].body, tirx.For)
    assert not loop.annotations
