# SPDX-License-Identifier: Apache-2.0
"""Programs at an edge: subscripts that cancel out, loops without a step, index arrays before an unreadable page."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import IRModule, s_tir
from tvm.ir import assert_structural_equal
from tvm.script import tirx as tir

import sparsetir
from fences import fenced
from sparsetir.errors import ArgumentTypeError, ScheduleError, SparseTIRError
from sparsetir.lower.target.arithmetic import SplitGuards

UPDATE = """
@T.prim_func
def update(a: T.handle, c: T.handle, n: T.int32, m: T.int32, w: T.int32):
    X = T.dense_fixed(n)
    V0 = T.dense_fixed(m)
    V1 = T.sparse_fixed(V0, (m, w), lambda i, s: RULE)
    A = T.match_sparse_buffer(a, (X,))
    C = T.match_sparse_buffer(c, (V0, V1))
    with T.sp_iter([X], "S", "update") as [x]:
        C[x, WHERE] = C[x, WHERE] + A[x]
"""


@pytest.mark.parametrize(("rule", "where"), [("i - s", "x"), ("i + s", "x + (x - x)"), ("s", "x - x")])
def test_terms_that_cancel_out(rule: str, where: str) -> None:
    func = sparsetir.parse(UPDATE.replace("RULE", rule).replace("WHERE", where))
    a, c = np.array([2, 3, 4], "float32"), np.arange(6, dtype="float32")
    arguments = {"a": a, "n": 3, "m": 3, "w": 2}
    expected = sparsetir.interpret(func, {**arguments, "c": c.copy()})["c"]
    sparsetir.build(func)(a=a, c=c, m=3, w=2)
    assert np.array_equal(c, expected)


# ---------------------------------------------------------------- loops without a step

ELL = """
@T.prim_func
def program(a: T.handle, c: T.handle, i: T.handle, m: T.int32, n: T.int32, w: T.int32):
    X = T.dense_fixed(m)
    S = T.sparse_fixed(X, (n, w), i, 'int64', sorted=False)
    A = T.match_sparse_buffer(a, (X, S))
    C = T.match_sparse_buffer(c, (X, S))
    with T.sp_iter([X, S], 'SS', 'work') as [x, s]:
        C[x, s] = A[x, s] * 2
"""


def test_a_fused_loop_over_rows_without_slots() -> None:
    def fused(sch: s_tir.Schedule) -> None:
        sch.parallel(sch.fuse(*sch.get_loops(sch.get_sblock("work"))))

    kernel = sparsetir.build(sparsetir.parse(ELL), schedule=fused)
    assert "// T.max(" in kernel.script(stage=3) or "% T.max(" in kernel.script(stage=3)
    for m, w in ((0, 0), (3, 0), (0, 2), (3, 2)):
        a, indices = np.ones(m * w, "float32"), np.zeros(m * w, "int64")
        c = np.zeros_like(a)
        kernel(a=a, c=c, i=indices, m=m, n=4, w=w)
        assert np.array_equal(c, 2 * a)


# ---------------------------------------------------------------- arrays that end at an unreadable page

PADDED_ROWS = """
@T.prim_func
def add(a: T.handle, c: T.handle, y: T.handle, p: T.handle, i: T.handle, nx: T.int32, zx: T.int32, m: T.int32,
        n: T.int32, d: T.int32):
    X = T.dense_variable(None, (nx, zx), p)
    U = T.dense_fixed(m)
    V = T.singleton(U, n, i)
    D = T.dense_fixed(d)
    A = T.match_sparse_buffer(a, (X,), "DTYPE")
    C = T.match_sparse_buffer(c, (U, V), "DTYPE")
    Y = T.match_sparse_buffer(y, (D,), "DTYPE")
    with T.sp_iter([X, U, V], "RSR", "add") as [x, u, v]:
        Y[u] = Y[u] + A[x] * C[u, v]
"""
LOOKUP = """
@T.prim_func
def look(a: T.handle, c: T.handle, p0: T.handle, i0: T.handle, pv: T.handle, iv: T.handle, n: T.int32, z: T.int32,
         nv: T.int32, zv: T.int32):
    X = T.sparse_variable(None, (n, z), (p0, i0))
    V = T.sparse_variable(None, (nv, zv), (pv, iv))
    A = T.match_sparse_buffer(a, (X,))
    C = T.match_sparse_buffer(c, (V,))
    with T.sp_iter([X], "S", "work") as [x]:
        T.sp_iter_attr({"search": "SEARCH"})
        C[x + 1] = C[x + 1] + A[x]
"""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_lane_reads_past_an_index_array(dtype: str) -> None:
    """In a vector loop a condition that reads an array is not evaluated where the one before it fails."""
    func = sparsetir.parse(PADDED_ROWS.replace("DTYPE", dtype))
    kernel = sparsetir.build(func)
    rng = np.random.default_rng(0)
    for m in (1, 2, 5, 129):
        for n in (0, m, m + 3):
            args = {"a": np.ones(2, dtype), "c": rng.integers(1, 4, m).astype(dtype), "p": np.array([0, 2], "int32")}
            args |= {"i": rng.integers(0, n + 1, m).astype("int32"), "y": np.zeros(n, dtype)}
            expected = sparsetir.interpret(func, {**args, "n": n, "nx": 2, "zx": 2, "m": m, "d": n})["y"]
            held = {name: fenced(array) for name, array in args.items()}
            kernel(**held, n=n, nx=2)
            assert np.array_equal(held["y"], expected)


@pytest.mark.parametrize("search", ["inline", "hoist", "merge"])
@pytest.mark.parametrize("dense", [False, True])
def test_searches_ahead_read_stored_coordinates_only(search: str, dense: bool) -> None:
    sch = sparsetir.Schedule(sparsetir.parse(LOOKUP.replace("SEARCH", search)))
    inner = sch.sparse_split("work", sch.sparse_split("work", "X", 8)[1], 4)
    if dense:
        sch.to_dense("work", inner[1])
    kernel = sparsetir.build(sch)
    for count in (1, 3, 9):
        indices = np.arange(count, dtype="int32")
        args = {"p0": np.array([0, count], "int32"), "i0": fenced(indices), "pv": np.array([0, count], "int32")}
        c = np.zeros(count, "float32")
        kernel(**args, iv=fenced(indices + 1), a=fenced(np.ones(count, "float32")), c=c, n=count + 1, nv=count + 2)
        assert np.array_equal(c, np.ones(count))


def test_conditions_that_read_come_after_those_they_rely_on() -> None:
    @tir.prim_func
    def before(x: tir.Buffer((8,), "int32"), y: tir.Buffer((8,), "int32"), n: tir.int32):
        for i in range(8):
            if i < n and 0 <= x[i] and x[i] < n and x[x[i]] == 2:
                y[i] = tir.if_then_else(n < 4 and x[n] < 2, x[n], 3)

    @tir.prim_func
    def after(x: tir.Buffer((8,), "int32"), y: tir.Buffer((8,), "int32"), n: tir.int32):
        for i in range(8):
            if i < n:
                if 0 <= x[i] and x[i] < n:
                    if x[x[i]] == 2:
                        y[i] = tir.if_then_else(n < 4, tir.if_then_else(tir.Not(x[n] < 2), 3, x[n]), 3)

    made = SplitGuards(IRModule({"main": before}))["main"]
    assert_structural_equal(made.body, after.body, map_free_vars=True)


def test_a_bound_comes_before_the_loads_that_it_guards() -> None:
    @tir.prim_func
    def before(x: tir.Buffer((8,), "int32"), p: tir.Buffer((9,), "int32"), y: tir.Buffer((8,), "int32")):
        for i, j in tir.grid(8, 4):
            if 0 <= x[p[i] + j] and x[p[i] + j] < 8 and j < p[i + 1] - p[i]:
                y[x[p[i] + j]] = 1

    @tir.prim_func
    def after(x: tir.Buffer((8,), "int32"), p: tir.Buffer((9,), "int32"), y: tir.Buffer((8,), "int32")):
        for i, j in tir.grid(8, 4):
            if j < p[i + 1] - p[i]:
                if 0 <= x[p[i] + j] and x[p[i] + j] < 8:
                    y[x[p[i] + j]] = 1

    made = SplitGuards(IRModule({"main": before}))["main"]
    assert_structural_equal(made.body, after.body, map_free_vars=True)


SCALED = """
@T.prim_func
def scaled(a: T.handle, e: T.handle, px: T.handle, ix: T.handle, n: T.int32, z: T.int32):
    X = T.sparse_variable(None, (n, z), (px, ix))
    D = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (X,))
    E = T.match_sparse_buffer(e, (D,))
    with T.sp_iter([X], "S", "scale") as [x]:
        A[x] = A[x] * E[x]
"""


def test_a_copy_of_a_gathered_element_in_a_split_loop_stays_inside() -> None:
    sch = s_tir.Schedule(sparsetir.lower(sparsetir.parse(SCALED), stage=2))
    block = sch.get_sblock("scale")
    copy = sch.cache_read(block, [str(r.source.name) for r in sch.get(block).reads].index("e"), "local")
    (loop,) = sch.get_loops(block)
    sch.compute_at(copy, loop)
    sch.split(loop, [None, 4])
    kernel = sparsetir.build(sch, {"kind": "llvm", "opt-level": 0})
    for count in (1, 3, 4, 9):
        a, e = np.ones(count, "float32"), np.arange(count, dtype="float32")
        kernel(a=a, e=e, px=np.array([0, count], "int32"), ix=fenced(np.arange(count, dtype="int32")), n=count)
        assert a.tolist() == list(range(count))


# ---------------------------------------------------------------- a cache of what a loop's extent reads

COUNTED = """
@T.prim_func
def counted(a: T.handle, y: T.handle, px: T.handle, ix: T.handle, pz: T.handle, iz: T.handle, nx: T.int32,
            zx: T.int32, nz: T.int32, zz: T.int32, m: T.int32):
    U = T.dense_fixed(m)
    X = T.sparse_variable(None, (nx, zx), (px, ix))
    Z = T.sparse_variable(X, (nz, zz), (pz, iz))
    D = T.dense_fixed(1)
    A = T.match_sparse_buffer(a, (X, Z))
    Y = T.match_sparse_buffer(y, (D,))
    with T.sp_iter([U, X, Z], "RRR", "sum") as [u, x, z]:
        with T.init():
            Y[0] = 0
        Y[0] = Y[0] + A[x, z]
"""


def test_a_cache_has_what_the_extent_of_a_loop_reads() -> None:
    args = {"a": np.arange(1, 7, dtype="float32"), "px": np.array([0, 3], "int32"), "ix": np.arange(3, dtype="int32")}
    args |= {"pz": np.array([0, 2, 4, 6], "int32"), "iz": np.array([0, 1] * 3, "int32")}
    func = sparsetir.parse(COUNTED)

    def cached(sch: s_tir.Schedule, at_loop: bool) -> None:
        block = sch.get_sblock("sum_0")
        copy = sch.cache_read(block, [str(r.source.name) for r in sch.get(block).reads].index("px"), "global")
        if at_loop:
            sch.compute_at(copy, sch.get_loops(block)[0])

    whole = sparsetir.build(func, schedule=lambda sch: cached(sch, False))
    assert whole(**args, nx=3, nz=2, m=2)[0] == 42
    with pytest.raises(ScheduleError, match="stores only some elements of the cache px_global"):
        sparsetir.build(func, schedule=lambda sch: cached(sch, True))


def test_a_block_of_tiles_that_were_fused_again_is_refused() -> None:
    """TVM forgets that the last tile is not whole."""

    def schedule(sch: s_tir.Schedule) -> None:
        loop = sch.fuse(*sch.split(sch.get_loops(sch.get_sblock("copy"))[0], [None, 4]))
        sch.blockize(loop)

    text = """
@T.prim_func
def program(x: T.handle, y: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I,))
    Y = T.match_sparse_buffer(y, (I,))
    with T.sp_iter([I], "R", "copy") as [i]:
        Y[i] = X[i]
"""
    with pytest.raises(ScheduleError, match=r"block copy goes to .*, past the end of [xy] \(n\): blockize before"):
        sparsetir.build(sparsetir.parse(text), schedule=schedule)


# ---------------------------------------------------------------- what a program leaves out


def test_the_width_is_told_by_the_indices() -> None:
    text = """
@T.prim_func
def sums(a: T.handle, y: T.handle, indices: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_fixed(I, n, indices)
    A = T.match_sparse_buffer(a, (I, J))
    Y = T.match_sparse_buffer(y, (I,))
    with T.sp_iter([I, J], "SR", "sum") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j]
"""
    func = sparsetir.parse(text)
    assert_structural_equal(sparsetir.parse(sparsetir.script(func)), func)
    kernel = sparsetir.build(func)
    for m, w in ((2, 2), (2, 0), (0, 0)):
        indices = np.tile(np.arange(w, dtype="int32"), m)
        assert kernel(a=np.ones(m * w, "float32"), indices=indices, m=m, n=3).tolist() == [w] * m


def test_a_handle_that_nothing_is_made_of() -> None:
    text = """
@T.prim_func
def copy(a: T.handle, b: T.handle, spare: T.handle, m: T.int32):
    I = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (I,))
    B = T.match_sparse_buffer(b, (I,))
    with T.sp_iter([I], "S", "copy") as [i]:
        B[i] = A[i]
"""
    with pytest.raises(SparseTIRError, match=r"parameter spare is a T\.handle that nothing is made of: remove it"):
        sparsetir.build(sparsetir.parse(text))


def test_a_result_whose_number_of_elements_only_the_row_pointers_tell() -> None:
    text = """
@T.prim_func
def spread(x: T.handle, y: T.handle, indptr: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_variable(I, n, indptr)
    X = T.match_sparse_buffer(x, (I,))
    Y = T.match_sparse_buffer(y, (I, J))
    with T.sp_iter([I, J], "SS", "spread") as [i, j]:
        Y[i, j] = X[i]
"""
    kernel = sparsetir.build(sparsetir.parse(text))
    args = {"x": np.arange(3, dtype="float32"), "indptr": np.array([0, 2, 2, 5], "int32"), "n": 4}
    with pytest.raises(ArgumentTypeError, match=r"size indptr_nnz of the result Y cannot be inferred .*: pass Y=numpy"):
        kernel(**args)
    assert kernel(**args, y=np.empty(5, "float32")).tolist() == [0, 0, 2, 2, 2]


def test_two_axes_below_one_in_a_buffer() -> None:
    text = """
@T.prim_func
def product(x: T.handle, pi: T.handle, pj: T.handle, b: T.int32, ni: T.int32, nj: T.int32):
    B = T.dense_fixed(b)
    I = T.dense_variable(B, (9, ni), pi)
    J = T.dense_variable(B, (9, nj), pj)
    X = T.match_sparse_buffer(x, (B, I, J))
"""
    with pytest.raises(SparseTIRError, match="declare J below I, with row pointers for each position of I"):
        sparsetir.parse(text)
