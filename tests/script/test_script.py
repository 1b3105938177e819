# SPDX-License-Identifier: Apache-2.0
"""Programs are standard TVM functions: they print, parse, serialise, specialise and live in modules."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal as assert_equal
from tvm.ir import load_json, save_json
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import sparsetir as T
from tvm_ffi import structural_hash

import sparsetir
from corpus import BY_NAME, CASES, Case
from corpus.running import check, draw, run
from each import share

every_program = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
IN_TURN = [(case, ("int32", "int64")[n % 2]) for n, case in enumerate(CASES)]
both_idtypes = pytest.mark.parametrize("idtype", ["int32", "int64"])


@cache
def make(case: Case, idtype: str = "int32") -> tirx.PrimFunc:
    return case.make(case.dtypes[0], idtype)


# ---------------------------------------------------------------- text


@pytest.mark.shared(3)
@pytest.mark.parametrize(("case", "idtype"), IN_TURN, ids=lambda given: getattr(given, "name", given))
def test_text_and_json_keep_the_function(case: Case, idtype: str) -> None:
    """The printed text parses back to an equal function, which prints the same text; JSON and the hash agree."""
    func = make(case, idtype)
    text, stored = sparsetir.script(func), load_json(save_json(func))
    again = sparsetir.parse(text)
    assert_equal(again, func)
    assert sparsetir.script(again) == text
    assert_equal(stored, func)
    assert structural_hash(func) == structural_hash(stored) == structural_hash(again)
    twin = case.make(case.dtypes[0], idtype) if idtype == "int32" else func
    assert structural_hash(func) == structural_hash(twin)


@pytest.mark.parametrize("case", share(CASES, 3), ids=lambda case: case.name)
def test_lowered_functions_parse_back_too(case: Case) -> None:
    for stage in (2, 3):
        lowered = sparsetir.lower(make(case), stage=stage)
        assert_equal(sparsetir.parse(sparsetir.script(lowered)), lowered)


def test_the_text_is_the_dialect_a_user_writes() -> None:
    text = sparsetir.script(make(BY_NAME["csrmm"]))
    for line in (
        "J = T.sparse_variable(I, (n, nnz), (indptr, indices)",
        "= T.match_sparse_buffer(a, (I, J)",
        'with T.sp_iter([I, J, K], "SRS", "csrmm") as [i, j, k]:',
        "with T.init():",
    ):
        assert line in text, f"{line!r} is not in\n{text}"


# ---------------------------------------------------------------- hash


def test_different_programs_differ() -> None:
    same_signature = [BY_NAME[name] for name in ("csrmm", "csrmm_loose", "csrmm_dense_iter", "csrmm_dense_hoist")]
    hashes = {structural_hash(case.make("float32", "int32")) for case in same_signature}
    hashes |= {structural_hash(BY_NAME["csrmm"].make("float32", "int64"))}
    assert len(hashes) == len(same_signature) + 1


# ---------------------------------------------------------------- specialisation


def sizes_of(func: tirx.PrimFunc, args: dict[str, Any]) -> dict[Any, int]:
    return {p: args[str(p.name)] for p in func.params if isinstance(args.get(str(p.name)), int)}


def specialised(case: Case, kind: str) -> tuple[tirx.PrimFunc, dict[str, Any]]:
    func = make(case)
    args = draw(case, kind, case.dtypes[0], "int32")
    sizes = sizes_of(func, args)
    assert sizes
    names = {str(p.name) for p in sizes}
    return func.specialize(sizes), {name: value for name, value in args.items() if name not in names}


@pytest.mark.shared(3)
@every_program
def test_a_specialised_function_has_constant_sizes(case: Case) -> None:
    func, args = specialised(case, "random")
    left = {str(p.name) for p in func.params if not tirx.is_buffer_var(p)}
    assert left <= {"beta"}, f"sizes {left} are still parameters"
    assert_equal(sparsetir.parse(sparsetir.script(func)), func)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["csrmm", "sr_bcrs", "dia", "triangular", "nm_spmm", "sparse_conv", "batched_spmm"])
@pytest.mark.parametrize("kind", ["random", "one_by_one", "zero_nnz"])
def test_a_specialised_kernel_computes_the_same(name: str, kind: str) -> None:
    case = BY_NAME[name]
    func, args = specialised(case, kind)
    found = run(case, sparsetir.build(func), args)
    check(case, func, "float32", found, draw(case, kind, "float32", "int32"))


# ---------------------------------------------------------------- modules


def module() -> tvm.IRModule:
    @I.ir_module
    class Both:
        @T.prim_func
        def spmm(a: T.handle, indptr: T.handle, indices: T.handle, b: T.handle, c: T.handle):
            I_ = T.dense_fixed(3)
            J = T.sparse_variable(I_, (4, 5), (indptr, indices), "int32")
            J_dense = T.dense_fixed(4)
            K = T.dense_fixed(2)
            A = T.match_sparse_buffer(a, (I_, J), "float32")
            B = T.match_sparse_buffer(b, (J_dense, K), "float32")
            C = T.match_sparse_buffer(c, (I_, K), "float32")
            with T.sp_iter([I_, J, K], "SRS", "spmm") as [i, j, k]:
                with T.init():
                    C[i, k] = 0
                C[i, k] = C[i, k] + A[i, j] * B[j, k]

        @R.function
        def main(
            a: R.Tensor((5,), "float32"),
            indptr: R.Tensor((4,), "int32"),
            indices: R.Tensor((5,), "int32"),
            b: R.Tensor((4, 2), "float32"),
        ) -> R.Tensor((3, 2), "float32"):
            cls = Both
            with R.dataflow():
                product = R.call_tir(cls.spmm, (a, indptr, indices, b), out_ty=R.Tensor((3, 2), "float32"))
                result = R.nn.relu(product)
                R.output(result)
            return result

    return Both


def test_a_program_stands_beside_a_relax_function() -> None:
    mod = module()
    relax.analysis.well_formed(mod)
    assert sorted(str(var.name_hint) for var in mod.functions) == ["main", "spmm"]
    assert_equal(load_json(save_json(mod)), mod)


def test_only_the_programs_of_a_module_are_lowered() -> None:
    mod = module()
    lowered = sparsetir.lower(mod, stage=3)
    assert_equal(lowered["main"], mod["main"])
    assert "sparse_iter" not in lowered["spmm"].script()


def test_relax_calls_a_program() -> None:
    lowered = sparsetir.lower(module(), stage=3)
    machine = relax.VirtualMachine(relax.build(lowered, "llvm"), tvm.cpu())
    a = np.arange(1, 6, dtype="float32")
    indptr, indices = np.array([0, 2, 2, 5], "int32"), np.array([0, 3, 0, 1, 2], "int32")
    b = np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2)
    dense = np.zeros((3, 4), "float32")
    dense[[0, 0, 2, 2, 2], indices] = a
    found = machine["main"](*(tvm.runtime.tensor(x) for x in (a, indptr, indices, b))).numpy()
    np.testing.assert_allclose(found, np.maximum(dense @ b, 0), rtol=1e-5)


def test_a_program_written_in_a_module_equals_the_same_one_written_alone() -> None:
    @T.prim_func
    def spmm(a: T.handle, indptr: T.handle, indices: T.handle, b: T.handle, c: T.handle):
        I_ = T.dense_fixed(3)
        J = T.sparse_variable(I_, (4, 5), (indptr, indices), "int32")
        J_dense = T.dense_fixed(4)
        K = T.dense_fixed(2)
        A = T.match_sparse_buffer(a, (I_, J), "float32")
        B = T.match_sparse_buffer(b, (J_dense, K), "float32")
        C = T.match_sparse_buffer(c, (I_, K), "float32")
        with T.sp_iter([I_, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    assert_equal(module()["spmm"], spmm)
