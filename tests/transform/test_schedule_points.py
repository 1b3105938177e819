# SPDX-License-Identifier: Apache-2.0
"""Stage-I schedules that change which points are visited: initialisation, annotations, dense axes and padding."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME
from fences import fenced
from primitives import csr_arguments, declaration, is_sound, iterations, keeps_meaning, refused, schedule, two_products
from sparsetir.errors import VerifyError

# ---------------------------------------------------------------- initialisation


def test_an_initialisation_gets_its_own_iteration() -> None:
    sch = schedule("csrmm")
    assert sch.split_init("csrmm") == "csrmm_init"
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I, K], "SS", "csrmm_init") as [i, k]:
            C[i, k] = T.float32(0.0)
        with T.sp_iter([I, J, K], "SRS", "csrmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]""")
    keeps_meaning(sch, "csrmm", ["random", "empty_rows"])


@pytest.mark.slow
def test_all_coordinates_are_initialised_not_only_the_stored_ones() -> None:
    sch = schedule("dcsr")
    sch.split_init("dcsr")
    assert declaration(sch, "I_dense_1") == "I_dense_1 = T.dense_fixed(m)"
    assert 'with T.sp_iter([I_dense_1, K], "SS", "dcsr_init") as [i, k]:' in iterations(sch)
    keeps_meaning(sch, "dcsr", ["random", "empty_rows", "zero_nnz"])
    own = schedule("sddmm")
    own.split_init("sddmm")
    assert 'with T.sp_iter([I, J], "SS", "sddmm_init") as [i, j]:' in iterations(own)
    keeps_meaning(own, "sddmm", ["random"])


def test_initialisations_that_stay() -> None:
    refused(schedule("sparse_softmax"), "sp_iter 'divide' has no initialisation", "split_init", "divide")
    message = "sp_iter 'row_max' initialises one element: there is no spatial axis to iterate"
    refused(schedule("sparse_softmax_nested"), message, "split_init", "row_max")

    @T.prim_func
    def func(y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), unique=False)
        J_dense = T.dense_fixed(n)
        Y = T.match_sparse_buffer(y, (I, J), "float32")
        with T.sp_iter([I, J_dense], "SS", "fill") as [i, j]:
            with T.init():
                Y[i, j] = 1
            Y[i, j] = Y[i, j] + 1

    message = "Y is over axis J, which repeats coordinates, and a store by search reaches one of them"
    refused(sparsetir.Schedule(func), message, "split_init", "fill")


def test_scratch_of_an_iteration_stays_with_it() -> None:
    @T.prim_func
    def func(x: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        X = T.match_sparse_buffer(x, (I,), "float32")
        with T.sp_iter([I], "S", "one") as [i]:
            t = T.sblock_alloc_buffer((1,), "float32")
            with T.init():
                X[i] = 0
            t[0] = X[i]
            X[i] = t[0] + 1
        with T.sp_iter([I], "S", "two") as [i]:
            X[i] = X[i] * 2

    sch = sparsetir.Schedule(func)
    refused(sch, "sp_iter 'one' has scratch memory of its own", "split_init", "one")
    refused(sch, "sp_iter 'one' has scratch memory of its own", "fuse_iterations", "one", "two")
    refused(sch, "it declares buffers or axes of its own", "split_iteration", "one")
    sch.sparse_split("one", "I", 4)
    is_sound(sch, func)


# ---------------------------------------------------------------- annotations


@pytest.mark.slow
def test_annotations() -> None:
    sch = schedule("csrmm")
    sch.annotate("csrmm", "tile", [8, 4])
    sch.annotate("csrmm", "owner", {"name": "me", "rank": 1})
    sch.annotate("csrmm", "tile", 16)
    sch.set_search("csrmm", "merge")
    assert 'T.sp_iter_attr({"owner": {"name": "me", "rank": 1}, "search": "merge", "tile": 16})' in iterations(sch)
    keeps_meaning(sch, "csrmm", ["random"])
    sch.annotate("csrmm", "owner", None)
    sch.set_search("csrmm", "inline")
    assert 'T.sp_iter_attr({"tile": 16})' in iterations(sch)
    assert '"tile": 16' in sparsetir.script(sparsetir.lower(sch.func, stage=2))
    is_sound(sch, BY_NAME["csrmm"].make("float32", "int32"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sparse_iter", "SS", "'sparse_iter' is part of what the program means; it cannot be set"),
        ("init", "stored", "'init' is part of what the program means; it cannot be set"),
        ("search", "merge", "use set_search"),
        ("", 1, "the key of a note must be a string, got ''"),
        ("a", object, "a note is a string, a number, or a list or dict of them, got type"),
        ("a", [1, {2: 3}], "the keys of a note must be strings, got 2"),
    ],
)
def test_annotations_that_are_refused(key: str, value: Any, message: str) -> None:
    refused(schedule("csrmm"), message, "annotate", "csrmm", key, value)


def test_searches() -> None:
    sch = schedule("csrmm")
    refused(
        sch, "the search of an iteration is one of inline, hoist, merge, got 'guess'", "set_search", "csrmm", "guess"
    )
    scan = schedule("csrmm_scan")
    message = "axis J of A is not sorted; search 'inline' or 'hoist'"
    refused(scan, message, "set_search", "csrmm", "merge")

    @T.prim_func
    def twice(a: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), unique=False)
        D = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        with T.sp_iter([I, D], "SS", "twice") as [i, d]:
            A[i, d] = A[i, d] * 2

    refused(sparsetir.Schedule(twice), "axis J of A is not unique", "set_search", "twice", "merge")

    @T.prim_func
    def moving(a: T.handle, y: T.handle, indptr: T.handle, where: T.Buffer(("nnz",), "int32"), m: T.int32, n: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, n, (indptr, where))
        D = T.dense_fixed(n)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        Y = T.match_sparse_buffer(y, (I, D), "float32")
        with T.sp_iter([I, D], "SS", "moving") as [i, d]:
            where[i] = d
            Y[i, d] = A[i, d]

    message = "search 'hoist' reads where, which the body writes; use 'inline'"
    refused(sparsetir.Schedule(moving), message, "set_search", "moving", "hoist", error=VerifyError)


# ---------------------------------------------------------------- dense iteration


@pytest.mark.slow
def test_a_sparse_axis_is_iterated_densely() -> None:
    sch = schedule("csrmm")
    assert sch.to_dense("csrmm", "J") == "J_all"
    assert declaration(sch, "J_all") == "J_all = T.dense_fixed(n)"
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I, J_all, K], "SRS", "csrmm") as [i, j, k]:
            with T.init():
                C[i, k] = T.float32(0.0)
            C[i, k] = C[i, k] + A[i, j] * B[j, k]""")
    keeps_meaning(sch, "csrmm", ["random", "empty_rows", "zero_nnz", "no_rows"])


@pytest.mark.slow
def test_stores_over_the_axis_itself_reach_what_is_stored() -> None:
    sch = schedule("conditional")
    sch.to_dense("clip", "J")
    keeps_meaning(sch, "conditional", ["random", "empty_rows"])
    named = schedule("named_values")
    named.to_dense("named", "J")
    keeps_meaning(named, "named_values", ["random"])


@pytest.mark.slow
def test_an_axis_below_is_attached() -> None:
    sch = schedule("dcsr")
    sch.to_dense("dcsr", "I")
    assert sch.get_axes("dcsr") == ["I_all", "T.attach(J, I_all)", "K"]
    keeps_meaning(sch, "dcsr", ["random", "empty_rows", "zero_nnz"])
    # The rows that are not stored stay without effect when their columns are densified as well.
    sch.to_dense("dcsr", "T.attach(J, I_all)")
    keeps_meaning(sch, "dcsr", ["random", "empty_rows", "zero_nnz"])


@T.prim_func
def absences(
    a: T.handle, b: T.handle, w: T.handle, d: T.handle, y: T.handle, z: T.handle, indptr: T.handle, indices:
    T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    ONES = T.match_sparse_buffer(b, (I, J), "float32", default_value=1)
    W = T.match_buffer(w, (4,), "float32")
    D = T.match_sparse_buffer(d, (J_dense,), "int32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I,), "int32")
    with T.sp_iter([I, J], "SR", "product") as [i, j]:
        Y[i] = Y[i] * ONES[i, j]
    with T.sp_iter([I, J], "SR", "counted") as [i, j]:
        if A[i, j] > 0:
            Y[i] = Y[i] + 1
    with T.sp_iter([I, J], "SR", "chosen") as [i, j]:
        value = T.if_then_else(A[i, j] > 0, A[i, j] * 2, A[i, j])
        Y[i] = Y[i] + value - A[i, j] / 3
    with T.sp_iter([I, J], "SR", "either") as [i, j]:
        Y[i] = Y[i] + T.Select(T.bool(True) and not A[i, j] != 0, A[i, j], T.float32(1))
    with T.sp_iter([I, J], "SR", "sum_of_ones") as [i, j]:
        Y[i] = Y[i] + ONES[i, j]
    with T.sp_iter([I, J], "SR", "quotient") as [i, j]:
        Y[i] = Y[i] + A[i, j] / Y[i]
    with T.sp_iter([I, J], "SR", "outside") as [i, j]:
        Y[i] = Y[i] + A[i, j] * W[j]
    with T.sp_iter([I, J], "SR", "whole_quotient") as [i, j]:
        Z[i] = Z[i] + T.cast(A[i, j], "int32") * (6 // D[j])
    with T.sp_iter([I, J], "SR", "looping") as [i, j]:
        for _ in T.serial(2):
            Y[i] = Y[i] + A[i, j]
    with T.sp_iter([I, J], "SR", "asking") as [i, j]:
        T.evaluate(T.call_extern("int32", "ask", j))


@pytest.mark.parametrize("name", ["product", "counted", "chosen", "either", "looping"])
def test_what_the_default_takes_away_may_be_iterated(name: str) -> None:
    sch = sparsetir.Schedule(absences)
    sch.to_dense(name, "J")
    assert sch.get_axes(name) == ["I", "J_all"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sum_of_ones", "where nothing is stored its body would still change Y; pass guard=True to test it"),
        ("quotient", "where nothing is stored its body would still change Y"),
        ("outside", "where nothing is stored its body may subscript W out of its shape"),
        ("whole_quotient", "where nothing is stored its body may divide by zero in T.int32(6) // D[j]"),
        ("asking", "its body has the statement"),
    ],
)
def test_what_happens_at_absent_coordinates_is_not_added(name: str, message: str) -> None:
    sch = sparsetir.Schedule(absences)
    found = message if "divide" not in message else "where nothing is stored its body may divide by zero in"
    refused(sch, f"cannot densify J in sp_iter {name!r}: {found}", "to_dense", name, "J")
    sch.to_dense(name, "J", guard=True)
    is_sound(sch, absences)


def test_a_guard_makes_any_body_dense() -> None:
    sch = schedule("sparse_softmax")
    sch.to_dense("row_max", "J", guard=True)
    sch.to_dense("row_sum", "J", guard=True)
    assert (
        declaration(sch, "J_stored") == 'J_stored = T.match_sparse_buffer(indices, (I, J), "int32", default_value=-1)'
    )
    assert "if J_stored[i, j] >= 0:\n        top[i] = T.max(top[i], A[i, j])" in iterations(sch)
    keeps_meaning(sch, "sparse_softmax", ["random", "empty_rows"])
    infinite = sparsetir.Schedule(two_products)
    infinite.to_dense("first", "J", guard=True)
    args = {**csr_arguments(two_products), "x": np.full(9, np.inf, "float32")}
    want = sparsetir.interpret(two_products, args)
    np.testing.assert_array_equal(sparsetir.interpret(infinite.func, args)["y"], want["y"])


@pytest.mark.parametrize(
    ("program", "axis", "options", "message"),
    [
        ("csrmm", "K", {}, "K is a dense_fixed axis: all its coordinates are iterated already"),
        ("csrmm_loose", "J", {}, "cannot densify J: it repeats coordinates, and each stored one counts"),
        ("fused_spmm", "J", {}, "cannot densify in T.fuse(I, J): its axes are one loop"),
        ("segment_max", "J", {}, "where nothing is stored its body would still change B"),
        ("segment_max", "J", {"guard": True}, "axis J has no index array to test"),
    ],
)
def test_axes_that_are_not_made_dense(program: str, axis: str, options: dict[str, Any], message: str) -> None:
    sch = schedule(program)
    refused(sch, message, "to_dense", sch.sp_iters[0], axis, **options)


@T.prim_func
def unsorted(
    a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, n: T.int32, m: T.int32, nnz: T.int32
):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, (m, nnz), (indptr, indices), sorted=False)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (I,), "float32")
    Y = T.match_sparse_buffer(y, (I, J), "float32")
    with T.sp_iter([I, J], "SS", "last") as [i, j]:
        X[i] = A[i, j]
    with T.sp_iter([I, J], "SR", "earlier") as [i, j]:
        Y[i, j] = Y[i, j + 1] + A[i, j]
    with T.sp_iter([I, J], "SS", "initial") as [i, j]:
        with T.init():
            X[i] = T.cast(j, "float32")
        Y[i, j] = A[i, j]
    with T.sp_iter([I, J], "SR", "free") as [i, j]:
        with T.init():
            X[i] = 0
        X[i] = X[i] + A[i, j]
    with T.sp_iter([I, J], "SS", "own") as [i, j]:
        Y[i, j] = Y[i, j] * 2


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("last", "stores to one element of X for several entries, of which the last one counts"),
        ("earlier", "reads Y, which it stores to for other entries too: their order would matter"),
        ("initial", "stores to one element of X for several entries, of which the last one counts"),
    ],
)
def test_the_order_of_unsorted_coordinates_is_kept(name: str, found: str, guard: bool) -> None:
    message = f"cannot densify J: its coordinates are not sorted, and sp_iter {name!r} {found}"
    refused(sparsetir.Schedule(unsorted), message, "to_dense", name, "J", guard=guard)


def test_unsorted_coordinates_become_dense_where_their_order_does_not_count() -> None:
    sch = sparsetir.Schedule(unsorted)
    for name in ("free", "own"):
        sch.to_dense(name, "J")
    is_sound(sch, unsorted)


# ---------------------------------------------------------------- padding


@pytest.mark.slow
def test_a_sum_is_padded_inside_one_store() -> None:
    sch = schedule("sddmm")
    assert sch.pad("sddmm", "K", 16) == "K_pad"
    assert declaration(sch, "K_pad") == "K_pad = T.dense_fixed((feat + 15) // 16 * 16)"
    assert "C[i, j] = C[i, j] + T.if_then_else(k < feat, X[i, k] * Y[j, k], T.float32(0.0))" in iterations(sch)
    keeps_meaning(sch, "sddmm", ["random", "one_by_one", "zero_nnz"])
    second = sch.lower()
    block = second.get_sblock("sddmm")
    _, inner = second.split(second.get_loops(block)[-1], [None, 16])
    assert int(second.get(inner).extent) == 16
    assert "T.where" not in str(second.mod)


def test_padded_rows_have_no_row_pointers() -> None:
    """Shared by nonzeros among threads, the rows beyond the last one must not be looked up."""
    sch = schedule("square_sum")
    sch.sparse_split(sch.sp_iters[0], "J", 4)
    sch.pad(sch.sp_iters[0], "I", 4)
    kernel, plain = sparsetir.build(sch), sparsetir.build(BY_NAME["square_sum"].make("float32", "int32"))
    for kind in BY_NAME["square_sum"].kinds:
        args = BY_NAME["square_sum"].inputs(np.random.default_rng(0), kind, "float32", "int32")
        held = {n: fenced(v) if isinstance(v, np.ndarray) else v for n, v in args.items()}
        np.testing.assert_allclose(kernel(**held), plain(**args), rtol=1e-5)


@pytest.mark.slow
def test_spatial_axes_are_padded_with_a_guard() -> None:
    sch = schedule("csrmm")
    sch.pad("csrmm", "K", 4)
    assert iterations(sch) == textwrap.dedent("""\
        with T.sp_iter([I, J, K_pad], "SRS", "csrmm") as [i, j, k]:
            with T.init():
                if k < feat:
                    C[i, k] = T.float32(0.0)
            if k < feat:
                C[i, k] = C[i, k] + A[i, j] * B[j, k]""")
    sch.pad("csrmm", "I", 4)
    assert sch.get_axes("csrmm") == ["I_pad", "T.attach(J, I_pad)", "K_pad"]
    keeps_meaning(sch, "csrmm", ["random", "empty_rows", "no_rows"])
    # A plain buffer must not be subscripted beyond its shape.
    plain = schedule("plain_buffers")
    plain.pad("spmm", "I", 4)
    plain.pad("spmm", "K", 8)
    keeps_meaning(plain, "plain_buffers", ["random", "empty_rows"])
    message = "where nothing is stored its body may subscript C out of its shape"
    refused(plain, message, "to_dense", "spmm", "T.attach(J, I_pad)")


@pytest.mark.parametrize(
    ("program", "axis", "multiple", "message"),
    [
        ("csrmm", "K", -4, "the multiple to pad to: expected an integer from 1 to 2147483647, got -4"),
        ("csrmm", "J", 4, "cannot pad J, which is sparse_variable: only a dense_fixed axis has one length"),
        ("fused_spmm", "I", 4, "cannot pad in T.fuse(I, J): its axes are one loop; do it before fusing"),
    ],
)
def test_axes_that_are_not_padded(program: str, axis: str, multiple: int, message: str) -> None:
    refused(schedule(program), message, "pad", program, axis, multiple)


def test_a_multiple_is_not_padded() -> None:
    sch = schedule("csrmm")
    sch.sparse_split("csrmm", "K", 8)
    refused(sch, "cannot pad K_i: its length 8 is a multiple of 4 already", "pad", "csrmm", "K_i", 4)
