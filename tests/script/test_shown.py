# SPDX-License-Identifier: Apache-2.0
"""What programs, decompositions and kernels show of themselves: the words of the user's script."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx

import sparsetir
from sparsetir import formats, ops
from sparsetir.codegen.pipeline import lower
from sparsetir.errors import ArgumentError, ScheduleError, VerifyError
from sparsetir.schedules import Choices
from tests.decomposing import compiled, parsed

SCORES = """
    @T.prim_func
    def softmax(a: T.handle, c: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices))
        A = T.match_sparse_buffer(a, (I, J))
        C = T.match_sparse_buffer(c, (I, J))
        total = T.alloc_sparse_buffer((I,))
        score = T.alloc_sparse_buffer((I, J))
        with T.sp_iter([I, J], "SS", "exp") as [i, j]:
            score[i, j] = T.exp(A[i, j])
        with T.sp_iter([I, J], "SR", "sum") as [i, j]:
            with T.init():
                total[i] = 0
            total[i] = total[i] + score[i, j]
        with T.sp_iter([I, J], "SS", "divide") as [i, j]:
            C[i, j] = score[i, j] / total[i]
"""


@pytest.fixture(scope="module")
def kernel() -> Any:
    return sparsetir.build(ops.spmm(), {"kind": "llvm", "opt-level": 0}, schedule=Choices(chunks=0, tile=64))


# --- programs ---------------------------------------------------------------------------------------------------


def test_a_program_shows_its_script() -> None:
    func = ops.spmm()
    assert repr(func) == str(func) == sparsetir.script(func)
    assert "T.sp.bind_axes" in func.script()


def test_a_module_with_a_program_shows_its_script() -> None:
    mod = tvm.IRModule({"spmm": ops.spmm()})
    assert 'with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:' in repr(mod)


def test_functions_of_others_are_shown_as_before() -> None:
    lowered = lower(ops.spmm())
    assert repr(lowered) == lowered.script()
    mod = tvm.IRModule({"spmm": lowered})
    assert repr(mod) == mod.script()


def test_a_decoded_program_shows_axes_buffers_and_iterations() -> None:
    program = sparsetir.ir.decode(ops.spmm())
    for line in (
        "J = sparse_variable of n, below I, nnz positions",
        "A(I, J) of float32",
        "spmm over [I, J, K] 'SRS'",
    ):
        assert f"    {line}\n" in repr(program)


def test_a_decomposition_shows_its_formats_and_its_script() -> None:
    parts = sparsetir.decompose_format(ops.spmm(), {"A": formats.bsr(2, 3)})
    assert repr(parts) == f"# spmm with A as bsr(r=2, c=3)\n{sparsetir.script(parts.func)}"


# --- kernels ----------------------------------------------------------------------------------------------------

SHOWN = {
    ("spmm", "csr"): "spmm(A: float64[m, n] csr, B: float64[n, feat]) -> C: float64[m, feat]",
    ("spmm", "csc"): "spmm_csc(A: float64[m, n] csc, B: float64[n, feat]) -> C: float64[m, feat]",
    ("spmm", "bsr"): "spmm_bsr(A: float64[mb, nb, 4, 4] bsr, B: float64[nb, 4, feat]) -> C: float64[mb, 4, feat]",
    ("sddmm", "csr"): "sddmm(S: float64[m, n] csr, X: float64[m, feat], Y: float64[n, feat]) -> O: float64[m, n] csr",
}


@pytest.mark.parametrize(("op", "format"), SHOWN)
def test_a_kernel_shows_dtypes_sizes_and_layouts(op: str, format: str) -> None:
    built = compiled(getattr(ops, op)("float64", format=format))
    assert repr(built) == f"Kernel {SHOWN[op, format]}"


def test_a_kernel_shows_arrays_that_belong_to_no_buffer() -> None:
    built = compiled(
        parsed("""
    @T.prim_func
    def starts(y: T.handle, indptr: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        P = T.match_buffer(indptr, (m + 1,), "int32")
        Y = T.match_sparse_buffer(y, (I,), "int32")
        with T.sp_iter([I], "S") as [i]:
            Y[i] = P[i]
    """)
    )
    assert repr(built) == "Kernel starts(P) -> Y: int32[m]"


def test_a_bound_kernel_shows_what_is_fixed(kernel: Any) -> None:
    bound = kernel.bind(indptr=np.zeros(3, "int32"), indices=np.zeros(0, "int32"))
    assert repr(bound).endswith("-> C: float32[m, feat] with indptr, indices fixed")


# --- stages -----------------------------------------------------------------------------------------------------


def test_scratch_is_called_as_in_the_program() -> None:
    func = parsed(SCORES)
    for stage in (2, 3):
        text = sparsetir.script(lower(func, stage))
        assert "scratch_" not in text
        assert re.search(r"score = T\.(sblock_)?alloc_buffer\(\(nnz,\)", text)
        assert re.search(r"\btotal\[", text)


def test_the_loops_for_given_sizes_have_no_remainders(kernel: Any) -> None:
    text = kernel.script(stage=3, feat=np.int64(128))
    assert "feat" not in text
    assert text.count("c_local[k_1] = ") == 1 < kernel.script(stage=3).count("c_local[k_1] = ")
    assert "for i, k_0 in T.grid(m, 2):" in text
    assert "feat" not in sparsetir.script(lower(ops.spmm(), 3, feat=128))
    assert "K = T.dense_fixed(128)" in kernel.script(feat=128)


@pytest.mark.slow
def test_the_script_of_a_decomposed_kernel_for_given_sizes() -> None:
    built = compiled(sparsetir.decompose_format(ops.spmm(), {"A": formats.bsr(2, 3)}))
    assert "feat" not in built.script(stage=3, outline=True, feat=8)


def test_an_outline_has_loops_and_stores_only(kernel: Any) -> None:
    want = """\
    for i in range(m):
        for k_1_init in T.vectorized(64):
            c_local[...] = ...
        for j in range(indptr_1[i + 1] - indptr_1[i]):
            for k_1 in T.vectorized(64):
                c_local[...] = ...
        for ax0 in T.vectorized(64):
            c_1[...] = ..."""
    assert dedent(kernel.script(stage=3, outline=True, feat=64)) == dedent(want)
    assert "while ...:" in sparsetir.build(ops.spmm(), schedule=Choices(chunks=2)).script(stage=3, outline=True)


def test_sizes_that_a_program_does_not_have(kernel: Any) -> None:
    with pytest.raises(ArgumentError, match=r"no size is called 'fat'; there are: m, n, nnz, feat"):
        kernel.script(stage=3, fat=3)
    with pytest.raises(ArgumentError, match=r"feat: expected a non-negative integer, got -1"):
        lower(ops.spmm(), feat=-1)
    with pytest.raises(VerifyError, match=r"stage: expected 1, 2 or 3, got 4"):
        kernel.script(4)


def test_a_schedule_of_blocks_is_not_repeated_for_sizes() -> None:
    sch = tvm.s_tir.Schedule(tvm.IRModule({"spmm": lower(ops.spmm(), 2)}))
    built = sparsetir.build(ops.spmm(), {"kind": "llvm", "opt-level": 0}, schedule=sch)
    assert isinstance(built.func, tirx.PrimFunc)
    with pytest.raises(ScheduleError, match=r"this kernel has a schedule of its own blocks: show it without sizes"):
        built.script(stage=3, feat=8)
