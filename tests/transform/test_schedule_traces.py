# SPDX-License-Identifier: Apache-2.0
"""Traces of stage-I schedules, what stands below and around, and every primitive on every program."""

from __future__ import annotations

import json
import random
import re
import textwrap
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import s_tir
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import sparsetir as T

import sparsetir
from corpus import BY_NAME, CASES, Case
from corpus.running import draw
from each import share
from primitives import arguments, attempt, is_equal, is_sound, keeps_meaning, moves, refused, same_results, schedule
from sparsetir import formats
from sparsetir.errors import ScheduleError
from sparsetir.transform import Step, Trace

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
        ("{", "expected a trace as to_json writes it, got:"),
        ("[1]", "expected a trace as to_json writes it, got:"),
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


BROAD = (
    "csrmm", "csrmm_loose", "bsrmm", "dcsr", "csc", "coo", "ell_spmm", "hyper_gnn", "attach_compressed", "rgcn_hetero",
    "sparse_softmax", "named_values", "segment_reduce", "conditional", "plain_buffers", "default_value",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", share(BROAD, 4))
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


@pytest.mark.parametrize("case", share(CASES, 6), ids=lambda c: c.name)
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
