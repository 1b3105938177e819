# SPDX-License-Identifier: Apache-2.0
"""Columns after the last full tile: one pass over the entries of a row for all of them, inside the arrays."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import ir, sym, tirx

import sparsetir
from fences import fenced
from sparsetir import formats, ops
from sparsetir.codegen.pipeline import lowered, to_stage_2
from sparsetir.ir.rewriting import collect, substitute
from sparsetir.ir.sizes import with_sizes
from sparsetir.ir.views import const
from sparsetir.lower import single
from sparsetir.lower.loops import VECTORIZED
from sparsetir.lower.vector.loop_transforms import may_overlap
from sparsetir.schedules import Choices

WIDTHS = (*range(1, 36), 47, 48, 49, 63, 64, 65, 100, 127, 128)
TARGETS = ("x86-64", "x86-64-v3", "x86-64-v4", "znver4", "sapphirerapids")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "bool")


@cache
def flat(format: str = "csr", feat: int | None = None, mcpu: str = "znver4", **choices: int) -> tirx.PrimFunc:
    """The loops of a product, for a number of columns that is known or for any number."""
    func = ops.spmm(format=format) if feat is None else with_sizes(ops.spmm(format=format), {"feat": feat})
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})
    chosen = Choices(**{"chunks": 0, "tile": 128, **choices})
    return single(lowered(to_stage_2(func), chosen, target)[3])


def passes(func: tirx.PrimFunc, feat: int) -> int:
    """Count the loops over the entries of one row that run for a number of columns."""
    sizes = {p: const(feat, str(p.ty.dtype)) for p in func.params if str(getattr(p, "name", "")) == "feat"}
    analyzer = sym.Analyzer()

    def count(stmt: Any) -> int:
        if isinstance(stmt, tirx.SeqStmt):
            return sum(count(child) for child in stmt.seq)
        if isinstance(stmt, tirx.IfThenElse):
            condition = analyzer.simplify(substitute(stmt.condition, sizes))
            if isinstance(condition, tirx.IntImm):
                taken = stmt.then_case if int(condition) else stmt.else_case
                return 0 if taken is None else count(taken)
            return max(count(stmt.then_case), 0 if stmt.else_case is None else count(stmt.else_case))
        if isinstance(stmt, tirx.For):
            if collect(stmt.extent, ir.TensorLoad):
                return 1
            extent = analyzer.simplify(substitute(stmt.extent, sizes))
            steps = int(extent) if isinstance(extent, tirx.IntImm) else 1
            body = (
                substitute(stmt.body, {stmt.loop_var: const(0, str(stmt.loop_var.ty.dtype))})
                if steps == 1
                else stmt.body
            )
            return count(body) * steps
        return count(stmt.body) if hasattr(stmt, "body") else 0

    return count(func.body)


@pytest.mark.parametrize("mcpu", TARGETS)
@pytest.mark.parametrize("choices", [{}, {"prefetch": 8}, {"unroll": 2}], ids=["plain", "prefetch", "unroll"])
def test_one_pass_computes_all_columns(mcpu: str, choices: dict[str, int]) -> None:
    func = flat(mcpu=mcpu, **choices)
    passed = 2 if "unroll" in choices else 1  # Unrolled groups of entries, and the entries after them.
    assert {feat: passes(func, feat) for feat in WIDTHS} == dict.fromkeys(WIDTHS, passed)


@pytest.mark.parametrize("feat", [1, 2, 3, 7, 17, 30, 33, 48, 50, 100])
def test_one_pass_computes_a_known_number_of_columns(feat: int) -> None:
    assert passes(flat(feat=feat), feat) == 1


def test_columns_after_full_tiles_take_one_more_pass() -> None:
    func = flat(tile=32)
    assert {feat: passes(func, feat) for feat in (31, 32, 33, 63, 64, 65, 95)} == {
        31: 1, 32: 1, 33: 2, 63: 2, 64: 2, 65: 3, 95: 3,
    }  # fmt: skip


def test_a_panel_takes_one_pass() -> None:
    func = flat(panel=32, tile=32)
    assert {passes(func, feat) for feat in (1, 17, 30, 31, 32)} == {1}


def test_no_more_vectors_than_the_next_multiple() -> None:
    """The vectors of an entry are as many as those of the columns rounded up."""
    for feat in (17, 30, 33, 50, 90):
        entries = [f for f in collect(flat(feat=feat).body, tirx.For) if collect(f.extent, ir.TensorLoad)]
        lanes = sum(int(f.extent) for f in collect(entries[0].body, tirx.For) if f.kind == VECTORIZED)
        assert len(entries) == 1
        assert lanes == -(-feat // 16) * 16


# ---------------------------------------------------------------- results


@cache
def matrix(dtype: str = "float64") -> sp.csr_array:
    rng = np.random.default_rng(0)
    found = sp.random_array((13, 11), density=0.3, format="lil", rng=rng)
    found[4], found[12] = 0, rng.uniform(0.1, 1, (1, 11))
    found[3, 10] = 0.5  # The last row of B, which ends at the fence.
    found = sp.csr_array(found)
    found.data = np.ceil(4 * found.data)
    return found


@cache
def product(dtype: str, **choices: int) -> Any:
    return sparsetir.build(ops.spmm(dtype), schedule=Choices(chunks=0, **choices) if choices else None)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64", "int8", "uint8"])
def test_results_of_every_dtype_and_width(dtype: str) -> None:
    A, rng = matrix(), np.random.default_rng(1)
    operand = sp.csr_array((A.data.astype(dtype), A.indices, A.indptr), shape=A.shape)
    for feat in WIDTHS:
        B = rng.integers(0, 4, (11, feat)).astype(dtype)
        C = fenced(np.full((13, feat), 7, dtype))
        product(dtype)(A=operand, B=fenced(B), C=C)
        np.testing.assert_array_equal(C, (A.toarray() @ B.astype("float64")).astype(dtype), err_msg=f"feat {feat}")


@pytest.mark.parametrize(
    "choices",
    [{"tile": 8}, {"tile": 16, "unroll": 4}, {"tile": 32, "panel": 32}, {"tile": 128, "stream": 1, "prefetch": 8}],
    ids=str,
)
def test_results_under_choices(choices: dict[str, int]) -> None:
    A, rng = matrix().astype("float32"), np.random.default_rng(1)
    for feat in WIDTHS:
        B = rng.integers(0, 4, (11, feat)).astype("float32")
        C = fenced(np.full((13, feat), np.nan, "float32"))
        product("float32", **choices)(A=A, B=fenced(B), C=C)
        np.testing.assert_array_equal(C, A @ B, err_msg=f"feat {feat}")


@pytest.mark.parametrize("mcpu", ["x86-64", "x86-64-v3"])
def test_results_of_targets_without_masks(mcpu: str) -> None:
    A, rng = matrix().astype("float32"), np.random.default_rng(1)
    kernel = sparsetir.build(ops.spmm(), target={"kind": "llvm", "mcpu": mcpu})
    for feat in WIDTHS:
        B = rng.integers(0, 4, (11, feat)).astype("float32")
        C = fenced(np.full((13, feat), np.nan, "float32"))
        kernel(A=A, B=fenced(B), C=C)
        np.testing.assert_array_equal(C, A @ B, err_msg=f"feat {feat}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mcpu", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_target_compiles(mcpu: str, dtype: str) -> None:
    assert sparsetir.build(ops.spmm(dtype), target={"kind": "llvm", "mcpu": mcpu}) is not None


@pytest.mark.parametrize("name", ["csc", "ell", "bsr", "sell", "hyb", "dcsr"])
def test_results_over_formats(name: str) -> None:
    """Pieces of a format add to results of others: shared columns must be added once."""
    rule = {
        "csc": formats.csc, "ell": formats.ell, "bsr": lambda: formats.bsr(2, 3), "sell": lambda: formats.sell(4, 8),
        "hyb": lambda: formats.hyb(2, (2,)), "dcsr": formats.dcsr,
    }[name]()  # fmt: skip
    A, rng = matrix().astype("float32"), np.random.default_rng(1)
    kernel = sparsetir.build(sparsetir.decompose_format(ops.spmm(), {"A": rule}))
    for feat in WIDTHS:
        B = rng.integers(0, 4, (11, feat)).astype("float32")
        C = fenced(np.full((13, feat), np.nan, "float32"))
        kernel(A=A, B=fenced(B), C=C)
        np.testing.assert_array_equal(C, A @ B, err_msg=f"feat {feat}")


# ---------------------------------------------------------------- whether columns may be computed twice


def test_results_loaded_after_a_store_may_not_overlap() -> None:
    x = tirx.decl_buffer((64,), "float32", name="x", layout=None)
    outer, k = tirx.Var("outer", "int32"), tirx.Var("k", "int32")
    column = outer * 16 + k
    load = tirx.BufferLoad(x, [column])
    twice = tirx.For(k, 0, 16, VECTORIZED, tirx.BufferStore(x, load + load, [column]))
    once = tirx.For(k, 0, 16, VECTORIZED, tirx.BufferStore(x, tirx.FloatImm("float32", 1), [column]))
    assert may_overlap(once, outer)
    assert not may_overlap(twice, outer)


def test_an_outer_array_by_lanes_may_not_overlap() -> None:
    """Its elements would be those of the place in the remainder, which is not the column in an overlapping vector."""
    x = tirx.decl_buffer((64,), "float32", name="x", layout=None)
    scratch = tirx.decl_buffer((16,), "float32", name="scratch", layout=None)
    outer, k = tirx.Var("outer", "int32"), tirx.Var("k", "int32")
    column = outer * 16 + k
    stored = tirx.For(k, 0, 16, VECTORIZED, tirx.BufferStore(scratch, tirx.BufferLoad(x, [column]), [k]))
    read = tirx.For(k, 0, 16, VECTORIZED, tirx.BufferStore(x, tirx.BufferLoad(scratch, [k]), [column]))
    assert not may_overlap(stored, outer)
    assert not may_overlap(read, outer)
