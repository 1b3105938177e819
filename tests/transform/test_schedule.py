# SPDX-License-Identifier: Apache-2.0
"""Stage-I schedules: every primitive keeps the meaning of the program, or says why it cannot."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME
from primitives import declaration, is_sound, iterations, keeps_csr, keeps_meaning, refused, same_results, schedule
from sparsetir.errors import ScheduleError, VerifyError

# ---------------------------------------------------------------- programs the corpus does not have


@T.prim_func
def horner(x: T.handle, y: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_fixed(n)
    ONE = T.dense_fixed(1)
    X = T.match_sparse_buffer(x, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SS", "rows") as [i, j]:
        Y[i] = Y[i] * 2 + X[i, j]
    with T.sp_iter([I, J], "SS", "whole") as [i, j]:
        Y[0] = Y[0] * 2 + X[i, j]


# ---------------------------------------------------------------- names


def test_iterations_and_axes_are_known_by_name() -> None:
    sch = schedule("sparse_softmax_nested")
    assert sch.sp_iters == ["rows", "row_max", "row_sum", "divide"]
    assert sch.get_sp_iter("row_sum") == "row_sum"
    assert sch.get_axes("row_sum") == ["J"]
    assert schedule("hyper_gnn").get_axes("hyper_gnn") == ["I", "F", "J", "T.attach(I_T, J)"]
    assert schedule("fused_spmm").get_axes("fused_spmm") == ["T.fuse(I, J)", "K"]
    assert repr(sch) == "Schedule of func (rows, row_max, row_sum, divide) after 0 steps"


def test_unknown_names_are_told() -> None:
    sch = schedule("csrmm")
    refused(sch, "no sparse iteration is called 'spmm'; there are: 'csrmm'", "get_sp_iter", "spmm")
    refused(sch, "sp_iter 'csrmm' has no entry X; it lists I, J, K", "sparse_reorder", "csrmm", ["X", "I", "J"])
    refused(sch, "no entry T.fuse(I, K)", "sparse_reorder", "csrmm", [["I", "K"], "J"])
    fused = schedule("fused_spmm")
    message = "sp_iter 'fused_spmm' has no entry I; it lists T.fuse(I, J), K; name T.fuse(I, J) as a whole"
    refused(fused, message, "sparse_reorder", "fused_spmm", ["I", "K"])
    func = BY_NAME["csrmm"].make("float32", "int32")
    module = tvm.IRModule({n: func.with_attr("global_symbol", n) for n in "ab"})
    with pytest.raises(ScheduleError, match=r"a schedule is of one PrimFunc, got 2 \(a, b\); pass mod\['name'\]"):
        sparsetir.Schedule(module)
    with pytest.raises(VerifyError, match=r"expected a tirx.PrimFunc or an IRModule, got str"):
        sparsetir.Schedule("csrmm")


def test_two_iterations_of_one_name_are_refused() -> None:
    func = BY_NAME["beta_scale"].make("float32", "int32")
    parsed = sparsetir.parse(func.script(extra_config={"script.use_pep695": False}).replace('"scale"', '"add"'))
    refused(sparsetir.Schedule(parsed), "2 sparse iterations are called 'add'", "get_axes", "add")


def test_an_axis_listed_twice_is_named_by_its_text() -> None:
    @T.prim_func
    def func(y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (m, nnz), (indptr, indices))
        Y = T.match_sparse_buffer(y, (I,), "float32")
        with T.sp_iter([I, J, T.attach(J, J)], "SRR", "two_hops") as [i, j, k]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + T.cast(k, "float32")

    sch = sparsetir.Schedule(func)
    sch.sparse_reorder("two_hops", ["I", "J", "T.attach(J, J)"])
    refused(sch, "sp_iter 'two_hops' has no entry K", "pad", "two_hops", "K", 4)


# ---------------------------------------------------------------- reorder


def test_reorder() -> None:
    sch = schedule("csrmm")
    sch.sparse_reorder("csrmm", ["K", "I", "J"])
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([K, I, J], "SSR", "csrmm") as [k, i, j]:
            with T.init():
                C[i, k] = T.float32(0.0)
            C[i, k] = C[i, k] + A[i, j] * B[j, k]""")
    keeps_meaning(sch, "csrmm", ["random", "no_rows"])


def test_a_fused_entry_is_moved_as_a_whole() -> None:
    sch = schedule("fused_spmm")
    sch.sparse_reorder("fused_spmm", ["K", ["I", "J"]])
    assert sch.get_axes("fused_spmm") == ["K", "T.fuse(I, J)"]
    sch.sparse_reorder("fused_spmm", ["T.fuse(I, J)", "K"])
    keeps_meaning(sch, "fused_spmm", ["random"])


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["I", "J"], "the new order leaves out K; list each of I, J, K once"),
        (["I", "J", "K", "K"], "K comes twice in the new order; list each of I, J, K once"),
        (["J", "I", "K"], "J would come before its parent I; list I first"),
    ],
)
def test_an_order_is_a_permutation_with_parents_first(order: list[str], message: str) -> None:
    refused(schedule("csrmm"), message, "sparse_reorder", "csrmm", order)


@pytest.mark.slow
def test_an_attached_axis_stays_behind_its_host() -> None:
    sch = schedule("hyper_gnn")
    order = ["I", "T.attach(I_T, J)", "J", "F"]
    message = "T.attach(I_T, J) would come before the axis it is attached to, J; list J first"
    refused(sch, message, "sparse_reorder", "hyper_gnn", order)
    sch.sparse_reorder("hyper_gnn", ["I", "J", "T.attach(I_T, J)", "F"])
    keeps_meaning(sch, "hyper_gnn", ["random"])


def test_updates_that_depend_on_the_order_are_not_reordered() -> None:
    sch = sparsetir.Schedule(horner)
    message = "cannot reorder sp_iter 'whole': what Y holds depends on the order of I and J"
    refused(sch, message, "sparse_reorder", "whole", ["J", "I"])
    # One row's steps stay in their order.
    sch.sparse_reorder("rows", ["J", "I"])
    is_sound(sch, horner)
    args = {"x": np.arange(12, dtype="float32").reshape(3, 4), "y": np.ones(3, "float32")}
    same_results(sparsetir.interpret(sch.func, args), sparsetir.interpret(horner, args), "rows")


@T.prim_func
def many_writers(x: T.handle, y: T.handle, z: T.handle, p: T.handle, q: T.handle, m: T.int32, n: T.int32):
    I = T.dense_fixed(m)
    J = T.dense_fixed(n)
    X = T.match_sparse_buffer(x, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I, J), "float32")
    P = T.match_buffer(p, (1,), "float32")
    Q = T.match_buffer(q, (m * n,), "float32")
    with T.sp_iter([I, J], "SS", "last") as [i, j]:
        P[0] = X[i, j]
    with T.sp_iter([I, J], "SS", "constant") as [i, j]:
        Y[i] = 3
    with T.sp_iter([I, J], "SS", "extremes") as [i, j]:
        P[0] = T.max(X[i, j], P[0])
    with T.sp_iter([I, J], "SS", "difference") as [i, j]:
        P[0] = P[0] - X[i, j] + Y[i]
    with T.sp_iter([I, J], "SS", "mixed") as [i, j]:
        P[0] = P[0] + X[i, j]
        Y[i] = P[0]
    with T.sp_iter([I, J], "SS", "flat") as [i, j]:
        Q[i * 4 + j % 4] = X[i, j]
    with T.sp_iter([I, J], "SS", "start") as [i, j]:
        with T.init():
            P[0] = T.cast(i, "float32") + T.cast(j, "float32")
        Z[i, j] = X[i, j]
    with T.sp_iter([I, J], "SS", "called") as [i, j]:
        T.evaluate(T.call_extern("int32", "put", i))
    with T.sp_iter([I, J], "SS", "neighbour") as [i, j]:
        Z[i, j] = Z[i, j - 1] + Z[i - 1, j]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last", "what P holds depends on the order of I and J"),
        ("mixed", "what P holds depends on the order of I and J"),
        ("flat", "what Q holds depends on the order of I and J"),
        ("start", "what P holds depends on the order of I and J"),
        ("called", 'the effects of T.call_extern("int32", "put"'),
        ("neighbour", "what Z holds depends on the order of I and J"),
    ],
)
def test_results_that_depend_on_the_order_are_kept(name: str, message: str) -> None:
    refused(sparsetir.Schedule(many_writers), message, "sparse_reorder", name, ["J", "I"])


@pytest.mark.parametrize("name", ["constant", "extremes", "difference"])
def test_equal_values_and_updates_may_come_in_any_order(name: str) -> None:
    sch = sparsetir.Schedule(many_writers)
    sch.sparse_reorder(name, ["J", "I"])
    assert sch.get_axes(name) == ["J", "I"]


def test_an_index_array_that_is_written_keeps_the_order() -> None:
    @T.prim_func
    def func(a: T.handle, x: T.handle, indptr: T.handle, where: T.Buffer(("nnz",), "int32"), m: T.int32, n: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, n, (indptr, where))
        A = T.match_sparse_buffer(a, (I, J), "float32")
        X = T.match_sparse_buffer(x, (I,), "float32")
        D = T.dense_fixed(n)
        with T.sp_iter([I, D], "SS", "moving") as [i, d]:
            where[i] = d
            X[i] = X[i] + A[i, d]

    message = "what where holds depends on the order of D and I"
    refused(sparsetir.Schedule(func), message, "sparse_reorder", "moving", ["D", "I"])


# ---------------------------------------------------------------- fuse


@pytest.mark.slow
def test_fuse() -> None:
    sch = schedule("sddmm")
    assert sch.get_axes("sddmm") == ["I", "J", "K"]
    sch.sparse_fuse("sddmm", ["I", "J"])
    assert 'with T.sp_iter([T.fuse(I, J), K], "SSR", "sddmm") as [i, j, k]:' in iterations(sch)
    keeps_meaning(sch, "sddmm", ["random", "empty_rows", "zero_nnz"])


def test_a_fused_chain_grows() -> None:
    sch = schedule("ttv_4d")
    first = sch.get_axes("ttv")[:3]
    sch.sparse_fuse("ttv", first[:2])
    sch.sparse_fuse("ttv", [first[:2], first[2]])
    assert sch.get_axes("ttv")[0] == f"T.fuse({', '.join(first)})"
    keeps_meaning(sch, "ttv_4d", ["random", "empty_rows"])


@pytest.mark.parametrize(
    ("program", "iteration", "axes", "message"),
    [
        ("csrmm", "csrmm", ["I"], "sparse_fuse takes two entries or more, got 1"),
        (
            "csrmm",
            "csrmm",
            ["I", "K"],
            "I, K are not neighbours in this order; the list is I, J, K: use sparse_reorder",
        ),
        ("csrmm", "csrmm", ["J", "I"], "J, I are not neighbours in this order"),
        ("csrmm", "csrmm", ["J", "K"], "T.fuse takes a parent followed by its child: J is not the parent of K"),
        ("dbsrmm", "dbsrmm", ["IO", "JO"], "T.fuse must start at a root axis, IO lies below O"),
        ("hyper_gnn", "hyper_gnn", ["J", "T.attach(I_T, J)"], "cannot fuse T.attach(I_T, J) in sp_iter 'hyper_gnn'"),
        ("triangular", "triangular", ["I", "J"], "the rows of J are given by a formula"),
    ],
)
def test_only_neighbouring_chains_are_fused(program: str, iteration: str, axes: list[str], message: str) -> None:
    refused(schedule(program), message, "sparse_fuse", iteration, axes)


# ---------------------------------------------------------------- split


@pytest.mark.slow
def test_a_dense_axis_is_split_with_a_guard() -> None:
    sch = schedule("csrmm", idtype="int64")
    assert sch.sparse_split("csrmm", "K", 4) == ["K_o", "K_i"]
    assert declaration(sch, "K_o") == "K_o = T.dense_fixed((feat + 3) // 4)"
    assert declaration(sch, "K_i") == "K_i = T.dense_fixed(4)"
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I, J, K_o, K_i], "SRSS", "csrmm") as [i, j, k_o, k_i]:
            with T.init():
                if k_o * 4 + k_i < feat:
                    C[i, k_o * 4 + k_i] = T.float32(0.0)
            if k_o * 4 + k_i < feat:
                C[i, k_o * 4 + k_i] = C[i, k_o * 4 + k_i] + A[i, j] * B[j, k_o * 4 + k_i]""")
    sch.sparse_reorder("csrmm", ["K_o", "I", "J", "K_i"])
    keeps_meaning(sch, "csrmm", ["random", "empty_rows", "one_by_one", "no_rows"], idtype="int64")


def test_a_factor_that_divides_needs_no_guard() -> None:
    @T.prim_func
    def func(x: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        K = T.dense_fixed(12)
        X = T.match_sparse_buffer(x, (I, K), "float32")
        with T.sp_iter([I, K], "SS", "twice") as [i, k]:
            X[i, k] = X[i, k] * 2

    sch = sparsetir.Schedule(func)
    sch.sparse_split("twice", "K", 4)
    assert iterations(sch).splitlines()[1:] == ["    X[i, k_o * 4 + k_i] = X[i, k_o * 4 + k_i] * T.float32(2.0)"]
    assert declaration(sch, "K_o") == "K_o = T.dense_fixed(3)"
    is_sound(sch, func)


@pytest.mark.slow
def test_a_split_sum_stays_one_store() -> None:
    sch = schedule("sddmm")
    sch.sparse_split("sddmm", "K", 4)
    head, _, _, body = iterations(sch).splitlines()
    assert head == 'with T.sp_iter([I, J, K_o, K_i], "SSRR", "sddmm") as [i, j, k_o, k_i]:'
    product = "X[i, k_o * 4 + k_i] * Y[j, k_o * 4 + k_i]"
    guarded = f"T.if_then_else(k_o * 4 + k_i < feat, {product}, T.float32(0.0))"
    assert body.strip() == f"C[i, j] = C[i, j] + {guarded}"
    keeps_meaning(sch, "sddmm", ["random", "zero_nnz"])


@pytest.mark.slow
def test_a_sparse_axis_is_split_by_slots_over_the_same_arrays() -> None:
    sch = schedule("csrmm")
    assert sch.sparse_split("csrmm", "J", 4) == ["J_o", "J_i", "J_c"]
    groups = "extent=lambda i: (indptr[i + 1] - indptr[i] + 3) // 4, offset=lambda i: indptr[i] // 4 + i"
    slots = (
        "extent=lambda i, j_o: T.min(4, indptr[i + 1] - indptr[i] - j_o * 4), offset=lambda i, j_o: indptr[i] + j_o * 4"
    )
    lines = {
        "J_o": f"J_o = T.dense_variable(I, ((n + 3) // 4, nnz // 4 + m), {groups})",
        "J_i": f"J_i = T.dense_variable(J_o, (4, nnz), {slots})",
        "J_c": 'J_c = T.singleton(J_i, n, indices, "int32")',
        "A_split": 'A_split = T.match_sparse_buffer(a, (I, J_o, J_i, J_c), "float32")',
    }
    assert {name: declaration(sch, name) for name in lines} == lines
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I, J_o, J_i, J_c, K], "SRRRS", "csrmm") as [i, j_o, j_i, j, k]:
            with T.init():
                C[i, k] = T.float32(0.0)
            C[i, k] = C[i, k] + A_split[i, j_o, j_i, j] * B[j, k]""")
    assert "T.sp.find" not in sparsetir.script(sparsetir.lower(sch.func, stage=2))
    for idtype in ("int32", "int64"):
        again = schedule("csrmm", idtype=idtype)
        again.sparse_split("csrmm", "J", 4)
        keeps_meaning(again, "csrmm", ["random", "empty_rows", "zero_nnz", "no_rows"], idtype=idtype)


def test_what_hangs_from_a_split_axis_is_declared_below_it() -> None:
    sch = schedule("csrmm")
    assert sch.sparse_split("csrmm", "I", 4) == ["I_o", "I_i"]
    assert declaration(sch, "J_s") == 'J_s = T.sparse_variable(I_i, (n, nnz), (indptr, indices), "int32")'
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I_o, I_i, J_s, K], "SSRS", "csrmm") as [i_o, i_i, j, k]:
            with T.init():
                C_split[i_o, i_i, k] = T.float32(0.0)
            C_split[i_o, i_i, k] = C_split[i_o, i_i, k] + A_split[i_o, i_i, j] * B[j, k]""")
    keeps_meaning(sch, "csrmm", ["random", "empty_rows", "no_rows"])
    second = sparsetir.script(sparsetir.lower(sch.func, stage=2))
    assert "T.sp.find" not in second
    assert '"sparsetir.parallel": "vi_o"' in second


@pytest.mark.slow
def test_slots_are_split_again() -> None:
    sch = schedule("csrmm", idtype="int64")
    sch.sparse_split("csrmm", "J", 3)
    sch.sparse_split("csrmm", "I", 2)
    sch.sparse_split("csrmm", "J_o_s", 2)
    keeps_meaning(sch, "csrmm", ["random", "empty_rows", "zero_nnz"], idtype="int64")


@pytest.mark.parametrize(
    ("program", "axis", "names"),
    [
        ("segment_reduce", "J", ["J_o", "J_i"]),
        ("triangular", "J", ["J_o", "J_i"]),
        ("ell_spmm", "J", ["J_o", "J_i", "J_c"]),
        ("coo", "I", ["I_o", "I_i", "I_c"]),
        ("dcsr", "I", ["I_o", "I_i", "I_c"]),
        ("csrmm_loose", "J", ["J_o", "J_i", "J_c"]),
        ("hyper_gnn", "J", ["J_o", "J_i", "J_c"]),
        ("hyper_gnn", "T.attach(I_T, J)", ["T.attach(I_T_o, J)", "I_T_i", "I_T_c"]),
        ("bsrmm", "JO", ["JO_o", "JO_i", "JO_c"]),
        ("batched_spmm", "J", ["J_o", "J_i", "J_c"]),
    ],
)
def test_axes_of_every_kind_are_split(program: str, axis: str, names: list[str]) -> None:
    sch = schedule(program)
    name = sch.sp_iters[0]
    if program in ("dcsr", "coo"):
        sch.split_init(name)
    assert sch.sparse_split(name, axis, 3) == names
    keeps_meaning(sch, program, ["random", "empty_rows", "one_by_one", "zero_nnz"])


def test_buffers_that_are_used_elsewhere_too_are_searched() -> None:
    @T.prim_func
    def func(a: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J), "float32")
        C = T.match_sparse_buffer(c, (I, J), "float32")
        with T.sp_iter([I, J], "SS", "steps") as [i, j]:
            C[i, j] = A[i, j] - A[i, j - 1]

    sch = sparsetir.Schedule(func)
    sch.sparse_split("steps", "J", 2)
    assert "C_split[i, j_o, j_i, j] = A[i, j] - A[i, j - 1]" in iterations(sch)
    keeps_csr(sch, func)
    loose = sparsetir.parse(sparsetir.script(func).replace('"int32")\n    A', '"int32", unique=False)\n    A'))
    message = "A is used at other places than the iterated ones, and J repeats coordinates"
    refused(sparsetir.Schedule(loose), message, "sparse_split", "steps", "J", 2)


@pytest.mark.parametrize(
    ("program", "axis", "factor", "message"),
    [
        ("csrmm", "K", 0, "the factor of a split: expected an integer from 1 to 2147483647, got 0"),
        ("csrmm", "K", 2.0, "the factor of a split: expected an integer from 1 to 2147483647, got 2.0"),
        ("csrmm", "K", True, "the factor of a split: expected an integer from 1 to 2147483647, got True"),
        ("fused_spmm", "J", 4, "cannot split in T.fuse(I, J): its axes are one loop; do it before fusing"),
        ("coo", "J", 4, "cannot split J: a singleton axis has one slot below each position"),
        ("dbsrmm", "JO", 4, "a formula of coordinates cannot tell its position below the sparse axis IO"),
        ("dcsr", "I", 4, "initialises elements that are not those of I; use split_init('dcsr') first"),
    ],
)
def test_splits_that_are_not_possible(program: str, axis: str, factor: Any, message: str) -> None:
    sch = schedule(program)
    refused(
        sch,
        f"cannot split {axis}: {message}" if message.startswith("a formula") else message,
        "sparse_split",
        sch.sp_iters[0],
        axis,
        factor,
    )


def test_an_axis_that_is_iterated_again_inside_is_not_split_by_slots() -> None:
    @T.prim_func
    def func(a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J), "float32")
        Y = T.match_sparse_buffer(y, (I,), "float32")
        with T.sp_iter([I, J], "SR", "outer") as [i, j]:
            with T.sp_iter([J], "R", "inner") as [k]:
                Y[i] = Y[i] + A[i, j] * A[i, k]

    sch = sparsetir.Schedule(func)
    refused(sch, "cannot split J: sp_iter 'inner' inside iterates it again", "sparse_split", "outer", "J", 2)
    sch.sparse_split("inner", "J", 2)
    sch.sparse_split("outer", "I", 2)
    keeps_csr(sch, func)


def test_an_attached_axis_two_levels_below_is_named() -> None:
    sch = schedule("attach_compressed")
    refused(sch, "no entry BJ", "pad", "spgemm", "BJ", 2)

    @T.prim_func
    def func(
        y: T.handle, p1: T.handle, i1: T.handle, p2: T.handle, i2: T.handle,
        m: T.int32, n: T.int32, n1: T.int32, n2: T.int32,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, n1), (p1, i1))
        K = T.sparse_variable(J, (n, n2), (p2, i2))
        D = T.dense_fixed(n)
        Y = T.match_sparse_buffer(y, (I,), "float32")
        with T.sp_iter([I, D, T.attach(K, D)], "SRR", "walk") as [i, d, k]:
            with T.init():
                Y[i] = 0
            Y[i] = Y[i] + T.cast(k, "float32")

    sch = sparsetir.Schedule(func)
    message = "T.attach(K, D) looks its parent J up below it"
    refused(sch, f"cannot pad I: {message}", "pad", "walk", "I", 4)
    sch.sparse_split("walk", "D", 2)
    is_sound(sch, func)
