# SPDX-License-Identifier: Apache-2.0
"""Unions and intersections of axes, and axes that a program computes: declaration, meaning, loops."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm.script import sparsetir as T

import sparsetir
from sparsetir import formats
from sparsetir.errors import LoweringError, ScheduleError, VerifyError


@T.prim_func
def spgemm(
    a: T.handle, b: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32, p: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    K = T.sparse_variable(I, n, (ap, ai))
    L = T.dense_fixed(n)
    JB = T.sparse_variable(L, p, (bp, bi))
    J = T.sparse_assembled(I, p)
    A = T.match_sparse_buffer(a, (I, K), "float32")
    B = T.match_sparse_buffer(b, (L, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, K, J], "SRS", "spgemm") as [i, k, j]:
        with T.init():
            C[i, j] = 0
        C[i, j] = C[i, j] + A[i, k] * B[k, j]


@T.prim_func
def add(
    a: T.handle, b: T.handle, c: T.handle, ap: T.handle, ai: T.handle, bp: T.handle, bi: T.handle,
    m: T.int32, n: T.int32,
):  # fmt: skip
    I = T.dense_fixed(m)
    JA = T.sparse_variable(I, n, (ap, ai))
    JB = T.sparse_variable(I, n, (bp, bi), idtype="int64")
    J = T.sparse_assembled(I, n, "int64", sorted=False)
    A = T.match_sparse_buffer(a, (I, JA), "float32")
    B = T.match_sparse_buffer(b, (I, JB), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I, T.union(JA, JB)], "SS", "add") as [i, j]:
        C[i, j] = A[i, j] + B[i, j]


@T.prim_func
def common(c: T.handle, ap: T.handle, ai: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    J = T.sparse_variable(I, n, (ap, ai))
    K = T.sparse_variable(I, n, (ap, ai))
    C = T.match_sparse_buffer(c, (I,), "int64")
    with T.sp_iter([I, J, T.intersect(K, T.attach(K, J))], "SRR", "common") as [i, j, k]:
        with T.init():
            C[i] = T.int64(0)
        C[i] = C[i] + T.int64(1)


@T.prim_func
def levels(
    a: T.handle, c: T.handle, d: T.handle, ip: T.handle, ii: T.handle, jp: T.handle, ji: T.handle,
    m: T.int32, n: T.int32,
):  # fmt: skip
    IA = T.sparse_variable(None, m, (ip, ii))
    JA = T.sparse_variable(IA, n, (jp, ji))
    I = T.sparse_assembled(None, m)
    J = T.sparse_assembled(I, n)
    A = T.match_sparse_buffer(a, (IA, JA), "float32")
    C = T.match_sparse_buffer(c, (I, J), "float32")
    D = T.match_sparse_buffer(d, (I, J), "float64")
    with T.sp_iter([I, J], "SS", "levels") as [i, j]:
        C[i, j] = A[i, j] * T.float32(2)
        D[i, j] = T.cast(A[i, j], "float64")


DECLARED = {"spgemm": spgemm, "add": add, "common": common, "levels": levels}


# ---------------------------------------------------------------------------------------------- declaration


@pytest.mark.parametrize("name", DECLARED)
def test_text_and_json_give_the_program_back(name):
    func = DECLARED[name]
    for text in (sparsetir.script(func), func.script(extra_config={"tirx.prefix": "T"})):
        assert tvm_ffi.structural_equal(sparsetir.parse(text), func, map_free_vars=True)
    assert tvm_ffi.structural_equal(tvm.ir.load_json(tvm.ir.save_json(func)), func, map_free_vars=True)


def test_text_is_in_the_words_of_the_dialect():
    text = sparsetir.script(add)
    assert 'J = T.sparse_assembled(I, n, "int64", sorted=False)' in text
    assert 'with T.sp_iter([I, T.union(JA, JB)], "SS", "add") as [i, j]:' in text
    assert "[I, J, T.intersect(K, T.attach(K, J))]" in sparsetir.script(common)
    assert "T.sp." not in text + sparsetir.script(spgemm) + sparsetir.script(levels)


def test_decoded_entries_say_what_they_merge():
    program = sparsetir.ir.decode(add)
    entry = program.iteration("add").entries[1]
    assert (entry.merge, [a.name for a in entry.axes], entry.kinds) == ("union", ["JA", "JB"], "S")
    assert [str(v.ty.dtype) for v in entry.vars] == ["int64"]
    assert not entry.is_fused
    axis = {a.name: a for a in program.axes.values()}["J"]
    assert (axis.is_assembled, axis.indptr, axis.indices, axis.sorted) == (True, None, None, False)
    hosts = sparsetir.ir.decode(common).iteration("common").entries[2].hosts
    assert [h and h.name for h in hosts] == [None, "J"]
    assert repr(program.iteration("add")) == "add over [I, T.union(JA, JB)] 'SS'"


def test_schedules_refuse_what_they_would_misread():
    with pytest.raises(ScheduleError, match=r"walks a union of axes, T.union\(JA, JB\): this primitive changes"):
        sparsetir.Schedule(add).sparse_reorder("add", ["T.union(JA, JB)", "I"])
    with pytest.raises(ScheduleError, match="'spgemm' computes an axis, J"):
        sparsetir.Schedule(spgemm).sparse_split("spgemm", "I", 4)
    sch = sparsetir.Schedule(common)
    sch.set_search("common", "merge")
    assert sch.get_axes("common") == ["I", "J", "T.intersect(K, T.attach(K, J))"]
    assert "T.intersect(K, T.attach(K, J))" in sch.script()


def test_formats_refuse_what_they_would_misread():
    with pytest.raises(VerifyError, match=r"cannot decompose A: iteration add walks T.union\(JA, JB\)"):
        sparsetir.decompose_format(add, {"A": formats.ell(2)})


@pytest.mark.parametrize("func", [spgemm, levels])
def test_ordinary_loops_refuse_an_axis_that_is_computed(func):
    with pytest.raises(LoweringError, match="which the loops of stored axes do not walk"):
        sparsetir.lower(func, stage=2)
