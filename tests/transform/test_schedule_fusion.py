# SPDX-License-Identifier: Apache-2.0
"""Stage-I schedules that put iterations together or take them apart."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparsetir as T

import sparsetir
from primitives import (
    attention,
    csr_arguments,
    is_sound,
    iterations,
    keeps_csr,
    keeps_meaning,
    refused,
    same_results,
    schedule,
    two_products,
    two_stores,
)

# ---------------------------------------------------------------- fusion


@pytest.mark.slow
def test_attention_is_computed_row_by_row() -> None:
    base = attention()
    sch = sparsetir.Schedule(base)
    assert sch.fuse_iterations("scores", "row_max", name="rows") == "rows"
    for name in ("exponent", "row_sum", "mix"):
        assert sch.fuse_iterations("rows", name) == "rows"
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I], "S", "rows") as [i]:
            with T.sp_iter([J, F], "SR", "scores") as [j, f]:
                with T.init():
                    score[i, j] = T.float32(0.0)
                score[i, j] = score[i, j] + Q[i, f] * K[j, f]
            with T.sp_iter([J], "R", "row_max") as [j]:
                with T.init():
                    top[i] = T.float32(-3.4028234663852886e+38)
                top[i] = T.max(top[i], score[i, j])
            with T.sp_iter([J], "S", "exponent") as [j]:
                score[i, j] = G[i, j] * T.exp((score[i, j] - top[i]) * scale)
            with T.sp_iter([J], "R", "row_sum") as [j]:
                with T.init():
                    total[i] = T.float32(0.0)
                total[i] = total[i] + score[i, j]
            with T.sp_iter([J, F], "RS", "mix") as [j, f]:
                with T.init():
                    O[i, f] = T.float32(0.0)
                O[i, f] = O[i, f] + score[i, j] / total[i] * V[j, f]""")
    is_sound(sch, base)
    rng = np.random.default_rng(0)
    graph = sp.random_array((12, 12), density=0.2, format="csr", dtype=np.float32, rng=rng)
    dense = {name: rng.uniform(-1, 1, (12, 5)).astype("float32") for name in "qkv"}
    args = {**dense, "g": graph.data, "o": np.full((12, 5), 7, "float32"), "indptr": graph.indptr, "scale": 0.4}
    args |= {"indices": graph.indices, "n": 12, "nnz": graph.nnz, "feat": 5}
    want = sparsetir.interpret(base, args)
    same_results(sparsetir.interpret(sch.func, args), want, "attention")
    kernel = sparsetir.build(sch, schedule=lambda second: second)
    operands = {name.upper(): value for name, value in dense.items()}
    np.testing.assert_allclose(kernel(G=graph, **operands, scale=0.4), want["o"], rtol=1e-4, atol=1e-5)


def test_whole_lists_share_one_body() -> None:
    sch = sparsetir.Schedule(two_products)
    assert sch.fuse_iterations("first", "second") == "first"
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I, J], "SR", "first") as [i, j]:
            with T.init():
                Y[i] = T.float32(0.0)
                Z[i] = T.float32(1.0)
            Y[i] = Y[i] + A[i, j] * X[j]
            Z[i] = Z[i] + A[i, j]""")
    keeps_csr(sch, two_products)
    shallow = sparsetir.Schedule(two_products)
    assert shallow.fuse_iterations("first", "second", depth=1) == "first_second"
    assert shallow.get_axes("first_second") == ["I"]
    keeps_csr(shallow, two_products)


def test_softmax_shares_its_rows() -> None:
    sch = schedule("sparse_softmax")
    assert sch.fuse_iterations("row_max", "row_sum") == "row_max_row_sum"
    sch.fuse_iterations("row_max_row_sum", "divide")
    keeps_meaning(sch, "sparse_softmax", ["random", "empty_rows", "no_rows"])


def test_dense_axes_of_one_length_are_alike_and_declarations_move_up() -> None:
    @T.prim_func
    def func(x: T.handle, y: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        X = T.match_sparse_buffer(x, (I,), "float32")
        with T.sp_iter([I], "S", "first") as [i]:
            X[i] = X[i] + 1
        I2 = T.dense_fixed(m)
        Y = T.match_sparse_buffer(y, (I2,), "float32")
        with T.sp_iter([I2], "S", "second") as [i]:
            Y[i] = X[i] * 2

    sch = sparsetir.Schedule(func)
    sch.fuse_iterations("first", "second")
    assert iterations(sch).splitlines()[1:] == ["    X[i] = X[i] + T.float32(1.0)", "    Y[i] = X[i] * T.float32(2.0)"]
    args = {"x": np.arange(5, dtype="float32"), "y": np.zeros(5, "float32")}
    same_results(sparsetir.interpret(sch.func, args), sparsetir.interpret(func, args), "fused")
    is_sound(sch, func)


@T.prim_func
def sequel(
    a: T.handle, b: T.handle, x: T.handle, y: T.handle, z: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J), "float32")
    X = T.match_sparse_buffer(x, (I,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I,), "float32")
    with T.sp_iter([I], "S", "plain") as [i]:
        X[i] = X[i] + 1
    with T.sp_iter([I], "S", "shifted") as [i]:
        Y[i] = X[i - 1]
    with T.sp_iter([I, J], "SS", "values") as [i, j]:
        B[i, j] = A[i, j] + Y[i]
    with T.sp_iter([I, J], "SR", "sums") as [i, j]:
        with T.init():
            Z[i] = Y[i]
        Z[i] = Z[i] + B[i, j]
    with T.sp_iter([I, J], "SR", "restart") as [i, j]:
        with T.init():
            Z[i] = 0
        Z[i] = Z[i] + B[i, j]
    with T.sp_iter([I, J], "SR", "noted") as [i, j]:
        T.sp_iter_attr({"tile": 4})
        Y[i] = Y[i] + B[i, j]
    with T.sp_iter([I, J], "SR", "plainer") as [i, j]:
        X[i] = X[i] + B[i, j]


@pytest.mark.parametrize(
    ("first", "second", "depth", "message"),
    [
        ("plain", "shifted", None, "they share X, and steps with different I may meet in one of its elements"),
        ("shifted", "plain", None, "are not in this order; name the one that runs first first"),
        ("plain", "values", None, "are not neighbours: sp_iter 'shifted' stands between them"),
        ("values", "sums", 2, "differ in the first 2 entries or its letters: [I, J] 'SS' and [I, J] 'SR'"),
        ("values", "sums", 0, "the depth: expected an integer from 1 to 2147483647, got 0"),
        ("sums", "restart", 2, "they share Z, and steps with different J may meet"),
        ("noted", "plainer", 2, "their annotations differ, {'tile': 4} and {}"),
    ],
)
def test_iterations_that_are_not_fused(first: str, second: str, depth: int | None, message: str) -> None:
    refused(sparsetir.Schedule(sequel), message, "fuse_iterations", first, second, depth=depth)


def test_the_deepest_legal_depth_is_taken() -> None:
    sch = sparsetir.Schedule(sequel)
    assert sch.fuse_iterations("sums", "restart") == "sums_restart"
    assert sch.get_axes("sums_restart") == ["I"]
    sch.fuse_iterations("values", "sums_restart")
    args = csr_arguments(sequel, x=np.ones(7, "float32"))
    same_results(sparsetir.interpret(sch.func, args), sparsetir.interpret(sequel, args), str(sch.trace))
    is_sound(sch, sequel)


def test_an_initialisation_that_would_repeat_is_not_fused() -> None:
    @T.prim_func
    def func(
        a: T.handle, y: T.handle, z: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz:
        T.int32,
    ):  # fmt: skip
        I = T.sparse_variable(None, (m, nnz), (indptr, indices))
        D = T.dense_fixed(m)
        K = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I,), "float32")
        Y = T.match_sparse_buffer(y, (D,), "float32")
        Z = T.match_sparse_buffer(z, (K,), "float32")
        with T.sp_iter([I], "S", "scale") as [i]:
            A[i] = A[i] * 2
        with T.sp_iter([I, K], "SR", "rows") as [i, k]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + A[i] * T.cast(k, "float32")
        with T.sp_iter([I], "R", "other") as [i]:
            A[i] = A[i] * 2
        with T.sp_iter([I, K], "RS", "columns") as [i, k]:
            with T.init():
                Z[k] = 0
            Z[k] = Z[k] + A[i]

    sch = sparsetir.Schedule(func)
    message = "cannot fuse over I: sp_iter 'rows' initialises coordinates that I does not store; use split_init('rows')"
    refused(sch, message, "fuse_iterations", "scale", "rows")
    message = "cannot fuse over I: I is a reduction in sp_iter 'columns', whose initialisation must not repeat"
    refused(sch, message, "fuse_iterations", "other", "columns")
    sch.split_init("columns")
    sch.fuse_iterations("other", "columns")
    args = {"indptr": [0, 2], "indices": [1, 2], "a": [2, 3], "m": 4, "n": 2, "nnz": 2, "z": [7, 7]}
    same_results(sparsetir.interpret(sch.func, args), sparsetir.interpret(func, args), str(sch.trace))
    is_sound(sch, func)


def test_an_initialisation_between_does_not_keep_a_gather_and_a_scatter_apart() -> None:
    """Relational products: what a relation sends is used at once, row by row."""

    @T.prim_func
    def func(
        a: T.handle, w: T.handle, x: T.handle, y: T.handle, wx: T.handle, pi: T.handle, ii: T.handle, pj: T.handle,
        ij: T.handle, r: T.int32, m: T.int32, n: T.int32, f: T.int32, ni: T.int32, nj: T.int32,
    ):  # fmt: skip
        R = T.dense_fixed(r)
        I = T.sparse_variable(R, (m, ni), (pi, ii))
        J = T.sparse_variable(I, (n, nj), (pj, ij))
        ID = T.dense_fixed(m)
        JD = T.dense_fixed(n)
        F = T.dense_fixed(f)
        A = T.match_sparse_buffer(a, (R, I, J), "float32")
        W = T.match_sparse_buffer(w, (R, F), "float32")
        X = T.match_sparse_buffer(x, (JD,), "float32")
        Y = T.match_sparse_buffer(y, (ID,), "float32")
        WX = T.match_sparse_buffer(wx, (R, I, J), "float32")
        with T.sp_iter([R, I, J, F], "SSSR", "gather") as [q, i, j, k]:
            with T.init():
                WX[q, i, j] = 0
            WX[q, i, j] = WX[q, i, j] + X[j] * W[q, k]
        with T.sp_iter([R, I, J], "SSR", "scatter") as [q, i, j]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + A[q, i, j] * WX[q, i, j]

    sch = sparsetir.Schedule(func)
    sch.split_init("scatter")
    sch.fuse_iterations("gather", "scatter", depth=2)
    args = {
        "pi": [0, 2, 3],
        "ii": [0, 2, 1],
        "pj": [0, 1, 3, 4],
        "ij": [2, 0, 1, 3],
        "a": [1, 2, 3, 4],
        "x": [1, 2, 3, 4],
    }
    args |= {"w": [[1, 2], [3, 4]], "r": 2, "m": 3, "n": 4, "f": 2, "y": [9, 9, 9]}
    same_results(sparsetir.interpret(sch.func, args), sparsetir.interpret(func, args), str(sch.trace))
    is_sound(sch, func)


def test_a_moved_initialisation_must_not_be_seen() -> None:
    @T.prim_func
    def func(
        a: T.handle, y: T.handle, z: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz:
        T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J), "float32")
        Y = T.match_sparse_buffer(y, (I,), "float32")
        Z = T.match_sparse_buffer(z, (I,), "float32")
        with T.sp_iter([I], "S", "read") as [i]:
            Z[i] = Y[i]
        with T.sp_iter([I], "S", "start") as [i]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + 1

    message = "the initialisation of 'start' would run before the first one uses y"
    refused(sparsetir.Schedule(func), message, "fuse_iterations", "read", "start")


def test_other_statements_keep_iterations_apart() -> None:
    @T.prim_func
    def func(x: T.Buffer((4,), "float32")):
        K = T.dense_fixed(4)
        X = T.match_sparse_buffer(x, (K,), "float32")
        with T.sp_iter([K], "S", "twice") as [k]:
            X[k] = X[k] * 2
        for p in T.serial(4):
            with T.sblock("more"):
                q = T.axis.spatial(4, p)
                x[q] = x[q] + 1
        with T.sp_iter([K], "S", "thrice") as [k]:
            X[k] = X[k] * 3

    message = "are not neighbours: another statement stands between them"
    refused(sparsetir.Schedule(func), message, "fuse_iterations", "twice", "thrice")


def test_iterations_in_different_blocks_are_not_neighbours() -> None:
    message = "sp_iter 'row_max' and sp_iter 'rows' do not stand in the same block, one after the other"
    refused(schedule("sparse_softmax_nested"), message, "fuse_iterations", "row_max", "rows")


def test_iterations_inside_a_loop_are_fused() -> None:
    sch = schedule("power_iteration")
    message = "they share X, and steps with different I may meet in one of its elements"
    refused(sch, message, "fuse_iterations", "multiply", "halve")
    sch.sparse_split("multiply", "J", 2)
    sch.pad("halve", "I", 4)
    keeps_meaning(sch, "power_iteration", ["random", "empty_rows"])


# ---------------------------------------------------------------- fission


def test_statements_get_iterations_of_their_own() -> None:
    sch = sparsetir.Schedule(two_stores)
    assert sch.split_iteration("both") == ["both_0", "both_1", "both_2", "both_3"]
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I, J], "SR", "both_0") as [i, j]:
            B[i, j] = A[i, j] * T.float32(2.0)
        with T.sp_iter([I, J], "SR", "both_1") as [i, j]:
            with T.init():
                Y[i] = T.float32(0.0)
            Y[i] = Y[i] + B[i, j]
        with T.sp_iter([I, J], "SR", "both_2") as [i, j]:
            C[i, j] = A[i, j] + T.float32(1.0)
        with T.sp_iter([I, J], "SR", "both_3") as [i, j]:
            C[i, j] = C[i, j] * B[i, j]""")
    keeps_csr(sch, two_stores)
    half = sparsetir.Schedule(two_stores)
    assert half.split_iteration("both", at=2) == ["both_0", "both_1"]
    keeps_csr(half, two_stores)
    # And together again.
    for name in ("both_1", "both_2", "both_3"):
        sch.fuse_iterations("both_0", name)
    keeps_csr(sch, two_stores)


def test_fused_iterations_are_told_apart_again() -> None:
    base = schedule("sparse_softmax_nested")
    parts = base.split_iteration("rows")
    assert len(parts) == 3
    keeps_meaning(base, "sparse_softmax_nested", ["random", "empty_rows"])


def test_named_values_are_computed_where_they_are_used() -> None:
    sch = schedule("named_values")
    assert sch.split_iteration("named") == ["named_0", "named_1"]
    text = iterations(sch)
    assert text.count("= A[i, j]") == 2
    assert text.count("T.exp(value)") == 1
    keeps_meaning(sch, "named_values", ["random", "empty_rows"])


@T.prim_func
def entangled(
    a: T.handle, b: T.handle, c: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SS", "running") as [i, j]:
        Y[i] = T.max(Y[i], A[i, j])
        B[i, j] = A[i, j] - Y[i]
    with T.sp_iter([I, J], "SS", "kept") as [i, j]:
        old = A[i, j]
        A[i, j] = 0
        B[i, j] = old
    with T.sp_iter([I, J], "SS", "cell") as [i, j]:
        best = T.float32(0)
        if A[i, j] > 0:
            best = A[i, j]
        B[i, j] = best
    with T.sp_iter([I, J], "SS", "partly") as [i, j]:
        Y[i] = T.max(Y[i], A[i, j])
        B[i, j] = A[i, j] - Y[i]
        C[i, j] = B[i, j]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("running", {}, "they share Y, and steps with different J may meet in one of its elements"),
        ("kept", {}, "old is read from what the statements before change, and used behind them"),
        ("cell", {}, "best is set at several places"),
        ("running", {"at": 2}, "sp_iter 'running' has 2 statements: cut before statement 1, not 2"),
        ("partly", {"at": "x"}, "sp_iter 'partly' has 3 statements: cut before statement 1 to 2, not 'x'"),
        ("partly", {"at": 1}, "they share Y, and steps with different J may meet"),
    ],
)
def test_statements_that_stay_together(name: str, options: dict[str, Any], message: str) -> None:
    refused(sparsetir.Schedule(entangled), message, "split_iteration", name, **options)


def test_as_many_parts_as_the_dependences_allow() -> None:
    sch = sparsetir.Schedule(entangled)
    assert sch.split_iteration("partly") == ["partly_0", "partly_1"]
    assert "B[i, j] = A[i, j] - Y[i]\nwith" in iterations(sch).replace("\n    ", "\n")
    keeps_csr(sch, entangled)


def test_one_statement_is_not_split() -> None:
    refused(
        schedule("csrmm"), "sp_iter 'csrmm' has one statement; there is nothing to split", "split_iteration", "csrmm"
    )


# ---------------------------------------------------------------- notes of a decomposition


@T.prim_func
def bucket(
    a: T.handle, y: T.handle, rows: T.handle, cols: T.handle, m: T.int32, n: T.int32, count: T.int32, width: T.int32,
):  # fmt: skip
    O = T.dense_fixed(1)
    I = T.sparse_fixed(O, (m, count), rows)
    J = T.sparse_fixed(I, (n, width), cols)
    D = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (O, I, J), "float32")
    Y = T.match_sparse_buffer(y, (D,), "float32")
    with T.sp_iter([O, I, J], "SSR", "bucket") as [o, i, j]:
        T.sp_iter_attr({"init": "stored", "independent": 1})
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[o, i, j]


def bucket_arguments() -> dict[str, Any]:
    rows, cols = np.array([1, 3, 6], "int32"), np.array([0, 2, 1, 4, 0, 4], "int32")
    a, y = np.arange(1, 7, dtype="float32"), np.full(8, 7, "float32")
    return {"a": a, "y": y, "rows": rows, "cols": cols, "m": 8, "n": 5, "count": 3, "width": 2}


def test_only_stored_rows_are_initialised_after_every_step() -> None:
    base, args = bucket, bucket_arguments()
    want = sparsetir.interpret(base, args)
    assert want["y"].tolist() == [7, 3, 7, 7, 7, 7, 11, 7]

    def same(sch: sparsetir.Schedule) -> None:
        is_sound(sch, base)
        same_results(sparsetir.interpret(sch.func, args), want, f"{sch.trace}\n{sch.script()}")

    for axis, factor in (("O", 2), ("I", 2)):
        sch = sparsetir.Schedule(base)
        sch.sparse_split("bucket", axis, factor)
        same(sch)
    sch = sparsetir.Schedule(base)
    sch.split_init("bucket")
    assert 'with T.sp_iter([O, I], "SS", "bucket_init") as [o, i]:' in iterations(sch)
    assert '"init"' not in sch.script()
    same(sch)
    sch = sparsetir.Schedule(base)
    sch.to_dense("bucket", "J")
    same(sch)
    sch = sparsetir.Schedule(base)
    refused(sch, "where nothing is stored its body would still change Y", "to_dense", "bucket", "I")
    sch.to_dense("bucket", "I", guard=True)
    same(sch)
    assert '"independent"' not in sch.script()


def test_a_promise_holds_for_its_own_outermost_loop() -> None:
    sch = sparsetir.Schedule(bucket)
    sch.pad("bucket", "O", 4)
    assert '"independent": 1' in sch.script()
    sch.sparse_split("bucket", "O_pad", 2)
    assert '"independent": 1' in sch.script()
    sch = sparsetir.Schedule(bucket)
    sch.sparse_fuse("bucket", ["O", "I"])
    assert '"independent"' not in sch.script()
