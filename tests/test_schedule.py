# SPDX-License-Identifier: Apache-2.0
"""Stage-I schedules: every primitive keeps the meaning of the program, or says why it cannot."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
import tvm_ffi
from tvm import s_tir
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME, CASES, Case
from corpus.running import draw
from fences import fenced
from sparsetir import formats
from sparsetir.errors import ScheduleError, VerifyError
from sparsetir.ir import decode
from sparsetir.transform import Step, Trace

ROOT = Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------- helpers


def schedule(name: str, dtype: str = "float32", idtype: str = "int32") -> sparsetir.Schedule:
    """A schedule of a program of the corpus."""
    return sparsetir.Schedule(BY_NAME[name].make(dtype, idtype))


def iterations(sch: sparsetir.Schedule) -> str:
    """The text of a program from its first iteration on."""
    lines = sch.script().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("    with T.sp_iter"))
    return textwrap.dedent("\n".join(lines[first:])).rstrip()


def declaration(sch: sparsetir.Schedule, name: str) -> str:
    """The line that declares `name`."""
    return next(line.strip() for line in sch.script().splitlines() if line.strip().startswith(f"{name} = "))


def is_equal(a: Any, b: Any) -> bool:
    return bool(tvm_ffi.structural_equal(a, b, map_free_vars=True))


def arguments(case: Case, kind: str, dtype: str, idtype: str) -> dict[str, Any]:
    """Inputs for the interpreter; outputs hold a number that no program leaves there by accident."""
    args, params = draw(case, kind, dtype, idtype), decode(case.make(dtype, idtype)).params
    held = {name: value for name, value in args.items() if name in params}
    for name, want in zip(case.output_names, case.expected(args), strict=True):
        held.setdefault(name, np.full(want.shape, 7).astype(str(params[name].ty.dtype)))
    return held


def same_results(found: dict[str, np.ndarray], want: dict[str, np.ndarray], note: str) -> None:
    """Whether two runs left the same in every parameter; sums may be rounded in another order."""
    for name, array in want.items():
        got, expected = found[name].astype(np.float64), array.astype(np.float64)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=f"{name}: {note}")


def is_sound(sch: sparsetir.Schedule, base: Any) -> None:
    """Whether a scheduled program verifies, prints, parses, and is made again by its trace."""
    sparsetir.verify(sch.func)
    text = sch.script()
    assert is_equal(sparsetir.parse(text), sch.func), text
    again = Trace.from_json(sch.trace.to_json())
    assert is_equal(again.apply(base), sch.func), str(sch.trace)
    copied = sparsetir.Schedule(base)
    exec(str(sch.trace), {"sch": copied, "sparsetir": sparsetir})
    assert is_equal(copied.func, sch.func), str(sch.trace)


def keeps_meaning(
    sch: sparsetir.Schedule, name: str, kinds: Any, dtype: str = "float32", idtype: str = "int32"
) -> None:
    """Whether a scheduled program of the corpus is sound and computes what it did before."""
    case = BY_NAME[name]
    base = case.make(dtype, idtype)
    is_sound(sch, base)
    for kind in kinds:
        args = arguments(case, kind, dtype, idtype)
        want = sparsetir.interpret(base, args)
        same_results(sparsetir.interpret(sch.func, args), want, f"{kind}\n{sch.trace}\n{sch.script()}")


def refused(
    sch: sparsetir.Schedule, message: str, primitive: str, *given: Any, error: Any = ScheduleError, **options: Any
):
    """Whether a primitive is refused with the message and leaves the schedule as it was."""
    before, steps = sch.func, len(sch.trace)
    with pytest.raises(error, match=re.escape(message)):
        getattr(sch, primitive)(*given, **options)
    assert sch.func is before
    assert len(sch.trace) == steps


def attention() -> Any:
    """The program of examples/graph_attention.py."""
    spec = importlib.util.spec_from_file_location("graph_attention", ROOT / "examples" / "graph_attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attention


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


@T.prim_func
def two_stores(
    a: T.handle, b: T.handle, c: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "both") as [i, j]:
        with T.init():
            Y[i] = 0
        B[i, j] = A[i, j] * 2
        Y[i] = Y[i] + B[i, j]
        C[i, j] = A[i, j] + 1
        C[i, j] = C[i, j] * B[i, j]


@T.prim_func
def two_products(
    a: T.handle, x: T.handle, y: T.handle, z: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    Z = T.match_sparse_buffer(z, (I,), "float32")
    with T.sp_iter([I, J], "SR", "first") as [i, j]:
        with T.init():
            Y[i] = 0
        Y[i] = Y[i] + A[i, j] * X[j]
    with T.sp_iter([I, J], "SR", "second") as [i, j]:
        with T.init():
            Z[i] = 1
        Z[i] = Z[i] + A[i, j]


def csr_arguments(func: Any, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A small matrix with empty rows for every CSR program of this file, and random values for its other arrays."""
    rng = np.random.default_rng(seed)
    matrix = sp.random_array((7, 9), density=0.3, format="csr", dtype=np.float32, rng=rng)
    matrix.data[:] = rng.uniform(-1, 1, matrix.nnz)
    sizes = {"m": 7, "n": 9, "nnz": matrix.nnz, **more}
    known = {"indptr": matrix.indptr, "indices": matrix.indices, **sizes}
    shapes = {"a": matrix.nnz, "b": matrix.nnz, "c": matrix.nnz, "x": 9, "y": 7, "z": 7}
    arrays = {name: rng.uniform(-1, 1, shape).astype("float32") for name, shape in shapes.items()}
    return {name: ({**arrays, **known})[name] for name in decode(func).params}


def keeps_csr(sch: sparsetir.Schedule, base: Any, **more: Any) -> None:
    """The same as `keeps_meaning` for a CSR program of this file."""
    is_sound(sch, base)
    args = csr_arguments(base, **more)
    same_results(sparsetir.interpret(sch.func, args), sparsetir.interpret(base, args), str(sch.trace))


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
    with pytest.raises(ScheduleError, match=r"a schedule is of one PrimFunc, found 2 \(a, b\); pass mod\['name'\]"):
        sparsetir.Schedule(module)
    with pytest.raises(VerifyError, match=r"expected a tirx.PrimFunc or an IRModule, found str"):
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
        ("csrmm", "csrmm", ["I"], "sparse_fuse takes two entries or more, found 1"),
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


def test_a_split_sum_stays_one_store() -> None:
    sch = schedule("sddmm")
    sch.sparse_split("sddmm", "K", 4)
    head, _, _, body = iterations(sch).splitlines()
    assert head == 'with T.sp_iter([I, J, K_o, K_i], "SSRR", "sddmm") as [i, j, k_o, k_i]:'
    product = "X[i, k_o * 4 + k_i] * Y[j, k_o * 4 + k_i]"
    guarded = f"T.if_then_else(k_o * 4 + k_i < feat, {product}, T.float32(0.0))"
    assert body.strip() == f"C[i, j] = C[i, j] + {guarded}"
    keeps_meaning(sch, "sddmm", ["random", "zero_nnz"])


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
        ("csrmm", "K", 0, "the factor of a split must be a positive integer, found 0"),
        ("csrmm", "K", 2.0, "the factor of a split must be a positive integer, found 2.0"),
        ("csrmm", "K", True, "the factor of a split must be a positive integer, found True"),
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
        ("", 1, "the key of a note must be a string, found ''"),
        ("a", object, "a note is a string, a number, or a list or dict of them, found type"),
        ("a", [1, {2: 3}], "the keys of a note must be strings, found 2"),
    ],
)
def test_annotations_that_are_refused(key: str, value: Any, message: str) -> None:
    refused(schedule("csrmm"), message, "annotate", "csrmm", key, value)


def test_searches() -> None:
    sch = schedule("csrmm")
    refused(
        sch, "the search of an iteration is one of inline, hoist, merge, found 'guess'", "set_search", "csrmm", "guess"
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


def test_stores_over_the_axis_itself_reach_what_is_stored() -> None:
    sch = schedule("conditional")
    sch.to_dense("clip", "J")
    keeps_meaning(sch, "conditional", ["random", "empty_rows"])
    named = schedule("named_values")
    named.to_dense("named", "J")
    keeps_meaning(named, "named_values", ["random"])


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


# ---------------------------------------------------------------- padding


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
        ("csrmm", "K", -4, "the multiple to pad to must be a positive integer, found -4"),
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


# ---------------------------------------------------------------- fusion


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
        ("values", "sums", 0, "the depth must be a positive integer, found 0"),
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
    refused(
        sch, "are not neighbours: sp_iter 'columns_init' stands between them", "fuse_iterations", "other", "columns"
    )


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


# ---------------------------------------------------------------- traces


def test_a_trace_is_python_and_json() -> None:
    sch = schedule("csrmm")
    sch.sparse_split("csrmm", "K", 8)
    sch.sparse_reorder("csrmm", ("K_o", "I", "J", "K_i"))
    sch.to_dense("csrmm", "J", guard=True)
    sch.annotate("csrmm", "owner", {"name": 'a "b"', "parts": (1, 2.5, True)})
    assert str(sch.trace) == textwrap.dedent("""\
        sch.sparse_split("csrmm", "K", 8)
        sch.sparse_reorder("csrmm", ["K_o", "I", "J", "K_i"])
        sch.to_dense("csrmm", "J", guard=True)
        sch.annotate("csrmm", "owner", {"name": "a \\"b\\"", "parts": [1, 2.5, True]})""")
    assert len(sch.trace) == 4
    assert [step.primitive for step in sch.trace] == ["sparse_split", "sparse_reorder", "to_dense", "annotate"]
    assert Trace.from_json(sch.trace.to_json()) == sch.trace
    is_sound(sch, BY_NAME["csrmm"].make("float32", "int32"))


def test_a_trace_goes_to_another_program() -> None:
    sch = schedule("csrmm")
    sch.sparse_split("csrmm", "K", 8)
    other = sch.trace.apply(BY_NAME["csrmm"].make("float64", "int64"))
    assert 'A = T.match_sparse_buffer(a, (I, J), "float64")' in sparsetir.script(other)
    module = tvm.IRModule({"main": BY_NAME["csrmm"].make("float32", "int32")})
    assert is_equal(sch.trace.apply(module)["main"].body, sch.func.body)
    with pytest.raises(ScheduleError, match="no sparse iteration is called 'csrmm'"):
        sch.trace.apply(BY_NAME["sddmm"].make("float32", "int32"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a trace as to_json writes it, found:"),
        ("[1]", "expected a trace as to_json writes it, found:"),
        ('[["tile", [], {}]]', "there is no primitive 'tile'; there are sparse_reorder, sparse_fuse"),
    ],
)
def test_texts_that_are_no_trace(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Trace.from_json(text)


def test_formats_that_have_no_json() -> None:
    class Own:
        name, parameters, rules = "own", {}, ()

    with pytest.raises(ScheduleError, match="no registered format is called 'own'"):
        Trace((Step("decompose", [{"A": Own()}]),)).to_json()
    with pytest.raises(ScheduleError, match="made of more than numbers and strings"):
        Trace((Step("decompose", [{"A": [object()]}]),)).to_json()


def test_copies_go_their_own_way() -> None:
    sch = schedule("csrmm")
    sch.sparse_split("csrmm", "K", 8)
    other = sch.copy()
    other.sparse_split("csrmm", "K_i", 2)
    assert len(sch.trace) == 1
    assert sch.get_axes("csrmm") == ["I", "J", "K_o", "K_i"]
    assert other.get_axes("csrmm") == ["I", "J", "K_o", "K_i_o", "K_i_i"]


# ---------------------------------------------------------------- below and around


@pytest.mark.parametrize(
    "steps",
    [
        [("sparse_split", "csrmm", "K", 4), ("sparse_reorder", "csrmm", ["K_o", "I", "J", "K_i"])],
        [("sparse_split", "csrmm", "J", 4)],
        [("sparse_split", "csrmm", "I", 4), ("sparse_split", "csrmm", "J_s", 2)],
        [("split_init", "csrmm"), ("sparse_fuse", "csrmm", ["I", "J"])],
        [("to_dense", "csrmm", "J"), ("set_search", "csrmm", "merge")],
        [("pad", "csrmm", "K", 8)],
    ],
    ids=lambda steps: "-".join(s[0] for s in steps),
)
def test_a_scheduled_program_is_built_and_called_as_before(steps: list[Any]) -> None:
    sch = schedule("csrmm")
    for primitive, *given in steps:
        getattr(sch, primitive)(*given)
    kernel = sparsetir.build(sch)
    rng = np.random.default_rng(1)
    for rows in (0, 1, 30):
        A = sp.random_array((rows, 20), density=0.2, format="csr", dtype=np.float32, rng=rng)
        B = rng.uniform(-1, 1, (20, 11)).astype("float32")
        np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-4, atol=1e-5)


def test_a_sparse_result_keeps_its_class() -> None:
    sch = schedule("csr_element_wise")
    sch.sparse_split("csr_element_wise", "J", 2)
    args = draw(BY_NAME["csr_element_wise"], "random", "float32", "int32")
    matrix = sp.csr_array((args["a"], args["indices"], args["indptr"]), shape=(args["m"], args["n"]))
    found, want = sparsetir.build(sch)(A=matrix), sparsetir.build(schedule("csr_element_wise").func)(A=matrix)
    assert isinstance(found, sp.csr_array)
    np.testing.assert_allclose(found.toarray(), want.toarray())


def test_lower_gives_a_stock_schedule() -> None:
    sch = schedule("csrmm")
    sch.sparse_split("csrmm", "K", 4)
    second = sch.lower()
    assert isinstance(second, s_tir.Schedule)
    loops = second.get_loops(second.get_sblock("csrmm"))
    assert [str(second.get(loop).loop_var.name) for loop in loops] == ["j", "k_o", "k_i"]
    A = sp.random_array((9, 8), density=0.3, format="csr", dtype=np.float32, rng=np.random.default_rng(0))
    B = np.ones((8, 6), "float32")
    np.testing.assert_allclose(sparsetir.build(sch.func, schedule=second)(A=A, B=B), A @ B, rtol=1e-5)


def test_other_functions_of_a_module_stay() -> None:
    @I.ir_module
    class Module:
        @T.prim_func
        def twice(x: T.Buffer((4,), "float32")):
            K = T.dense_fixed(4)
            X = T.match_sparse_buffer(x, (K,), "float32")
            with T.sp_iter([K], "S", "twice") as [k]:
                X[k] = X[k] * 2

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            return x

    sch = sparsetir.Schedule(Module)
    sch.sparse_split("twice", "K", 2)
    assert sorted(gv.name_hint for gv in sch.mod.functions) == ["main", "twice"]
    assert is_equal(sch.mod["twice"].body, sch.func.body)
    assert is_equal(sch.trace.apply(Module), sch.mod)
    x = np.arange(4, dtype="float32")
    sparsetir.build(sch)(X=x)
    assert x.tolist() == [0, 2, 4, 6]


def test_a_decomposed_program_is_scheduled() -> None:
    sch = sparsetir.Schedule(sparsetir.ops.spmm())
    assert sch.decomposition is None
    sch.decompose({"A": formats.bsr(4, 2)})
    assert str(sch.trace).startswith('sch.decompose({"A": sparsetir.formats.make("bsr", ')
    name = sch.sp_iters[-1]
    sch.sparse_split(name, "K", 4)
    refused(sch, "this program was decomposed and changed since", "decompose", {"B": formats.csr()})
    again = Trace.from_json(sch.trace.to_json()).apply(sparsetir.ops.spmm())
    assert is_equal(again, sch.func)
    kernel = sparsetir.build(sch)
    rng = np.random.default_rng(2)
    for shape in ((12, 8), (11, 9)):
        A = sp.random_array(shape, density=0.3, format="csr", dtype=np.float32, rng=rng)
        B = rng.uniform(-1, 1, (shape[1], 7)).astype("float32")
        np.testing.assert_allclose(kernel(A=A, B=B), A @ B, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- every primitive, every program


def moves(sch: sparsetir.Schedule, rng: random.Random) -> Iterator[tuple[Any, ...]]:
    """What might be done next, legal or not."""
    for name in sch.sp_iters:
        entries = sch.get_axes(name)
        if len(entries) > 1:
            yield "sparse_reorder", name, rng.sample(entries, len(entries))
        yield from (("sparse_fuse", name, list(pair)) for pair in itertools.pairwise(entries))
        for entry in entries:
            yield "sparse_split", name, entry, rng.choice([1, 2, 3, 4])
            yield "pad", name, entry, rng.choice([2, 3, 8])
            yield "to_dense", name, entry
            yield "to_dense", name, entry, "guard"
        yield from (("set_search", name, strategy) for strategy in ("hoist", "merge", "inline"))
        yield from ((primitive, name) for primitive in ("split_init", "split_iteration"))
    yield from (("fuse_iterations", *pair) for pair in itertools.permutations(sch.sp_iters, 2))


def attempt(sch: sparsetir.Schedule, move: tuple[Any, ...]) -> bool:
    """Make a move; False if it is refused; any other error is a mistake."""
    primitive, *given = move
    options = {"guard": True} if given[-1] == "guard" else {}
    try:
        getattr(sch, primitive)(*given[: len(given) - len(options)], **options)
    except (ScheduleError, VerifyError):
        return False
    return True


BROAD = (
    "csrmm", "csrmm_loose", "bsrmm", "dcsr", "csc", "coo", "ell_spmm", "hyper_gnn", "attach_compressed", "rgcn_hetero",
    "sparse_softmax", "named_values", "segment_reduce", "conditional", "plain_buffers", "default_value",
)  # fmt: skip


@pytest.mark.parametrize("name", BROAD)
def test_each_primitive_alone(name: str) -> None:
    case, rng = BY_NAME[name], random.Random(name)
    base = case.make("float32", "int64")
    args = arguments(case, "empty_rows", "float32", "int64")
    want = sparsetir.interpret(base, args)
    done = 0
    for move in list(moves(sparsetir.Schedule(base), rng)):
        sch = sparsetir.Schedule(base)
        if attempt(sch, move):
            is_sound(sch, base)
            same_results(sparsetir.interpret(sch.func, args), want, f"{sch.trace}\n{sch.script()}")
            done += 1
    assert done > 2


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_walks(case: Case) -> None:
    """Four legal moves, one after the other."""
    rng, dtype, kinds = random.Random(case.name), case.dtypes[0], ("empty_rows", "zero_nnz", "one_by_one")
    idtype = rng.choice(["int32", "int64"])
    base = case.make(dtype, idtype)
    sch = sparsetir.Schedule(base)
    for _ in range(4):
        options = list(moves(sch, rng))
        rng.shuffle(options)
        assert any(attempt(sch, move) for move in options[:20])
    is_sound(sch, base)
    for kind in [k for k in kinds if k in case.kinds]:
        args = arguments(case, kind, dtype, idtype)
        found, want = sparsetir.interpret(sch.func, args), sparsetir.interpret(base, args)
        same_results(found, want, f"{kind}\n{sch.trace}\n{sch.script()}")


def test_a_trace_survives_json_text() -> None:
    sch = schedule("sparse_softmax")
    rng = random.Random(5)
    for _ in range(6):
        options = list(moves(sch, rng))
        rng.shuffle(options)
        any(attempt(sch, move) for move in options)
    text = sch.trace.to_json()
    assert "\n" not in text
    assert json.loads(text)[0][0] == next(iter(sch.trace)).primitive
    keeps_meaning(sch, "sparse_softmax", ["random"])
