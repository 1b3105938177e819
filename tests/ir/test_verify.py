# SPDX-License-Identifier: Apache-2.0
"""Every rule of every stage: a program that breaks it, what is said, and programs that break none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var
from tvm.script import sparsetir as T

from corpus import CASES, Case
from each import share
from sparsetir import ops
from sparsetir.codegen.pipeline import lower
from sparsetir.errors import VerifyError
from sparsetir.ir import dialect, views
from sparsetir.ir.verifier import STAGE_1, STAGE_2, STAGE_3, check, verify
from sparsetir.script.printer import parse

HEAD = """
@T.prim_func(check_well_formed=False)
def func(a: T.handle, b: T.handle, p: T.handle, q: T.Buffer(("nnz",), "int32"), m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q), "int32")
    K = T.dense_fixed(n)
    U = T.sparse_fixed(I, (n, 4), q, sorted=False)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I,), "float32")
"""

# Rule -> (end of a program, construct at fault, message). Raw statements make what the dialect's words refuse.
TEXTS: dict[str, tuple[str, str, str]] = {
    "sizes": (
        "    S: T.let[T.float32] = T.sp.dense_fixed(T.float32(3))",
        "S",
        "the length of axis S must be an integer, got T.float32(3.0) of float32",
    ),
    "index-dtype": (
        "    S: T.let[T.int16] = T.sp.dense_fixed(T.int16(3))",
        "S",
        "axis S must count in int32 or int64, got int16",
    ),
    "value-dtype": (
        '    H = T.alloc_buffer((m,), "uint4")\n    S = T.decl_buffer((m,), "uint4", data=H.data)\n'
        '    T.sp.bind_axes(S, T.Cast("uint4", 0), I)',
        "S",
        "sparse buffer S must hold one of float16, bfloat16",
    ),
    "buffer-axes": (
        '    H = T.alloc_buffer((nnz,), "int8")\n    S = T.decl_buffer((n,), "int8", data=H.data)\n'
        "    T.sp.bind_axes(S, T.int8(0), J)",
        "S",
        "buffer S: a buffer over axis J must also have its parent I, got (J)",
    ),
    "letters": (
        '    with T.sblock("odd"):\n        i = T.axis.spatial(m, T.sp.coord(I, 0))\n        T.reads()\n'
        '        T.writes()\n        T.sblock_attr({"sparse_iter": "R"})\n        B[i] = T.float32(0)',
        "odd",
        "expected one letter S or R for each variable, 'S', got 'R' (sp_iter 'odd')",
    ),
    "axis-once": (
        '    with T.sp_iter([I, J, J], "SRR", "odd") as [i, j, k]:\n        B[i] = A[i, j]',
        "odd",
        "axis J is listed twice; declare another axis for a second loop (sp_iter 'odd')",
    ),
    "parent-first": (
        '    with T.sp_iter([I], "S", "outer") as [i]:\n'
        '        with T.sp_iter([J], "R", "fine") as [j]:\n            B[i] = B[i] + A[i, j]\n'
        '    with T.sp_iter([J], "R", "odd") as [j]:\n        B[j] = T.float32(0)',
        "odd",
        "J is iterated but its parent I is not; list I before it (sp_iter 'odd')",
    ),
    "attached-once": (
        "    R = T.sparse_fixed(None, (m, nnz), q, unique=False)\n    S = T.singleton(R, n, p)\n"
        '    with T.sp_iter([I, T.attach(S, I)], "SR", "odd") as [i, j]:\n        B[i] = T.float32(0)',
        "odd",
        "T.attach(S, I) goes to one place of R, which may store a coordinate several times (unique=False): entries of "
        "S are lost; store R once each, as CSR or DCSR instead of COO (sp_iter 'odd')",
    ),
    "variable-dtype": (
        '    with T.sblock("odd"):\n        i = T.axis.spatial(T.int64(9), T.sp.coord(I, 0))\n        T.reads()\n'
        '        T.writes()\n        T.sblock_attr({"sparse_iter": "S"})\n        B[i] = T.float32(0)',
        "odd",
        "variable i must be int32 like its axis I, got int64",
    ),
    "subscripts": (
        '    with T.sp_iter([I], "S", "odd") as [i]:\n        B[B[i]] = T.float32(0)',
        "B",
        "a subscript of B must be an integer, got B[i] of float32; cast it",
    ),
    "axes-in-place": (
        '    with T.sp_iter([I], "S", "odd") as [i]:\n        B[i] = T.Cast("float32", I + 1)',
        "I",
        "I is an axis, not a number; use a variable of an sp_iter over it",
    ),
    "no-return": (
        "    return A",
        "",
        "a program returns nothing: its results are the buffers that it stores to; leave the return out",
    ),
    "no-break": (
        '    with T.sp_iter([I], "S", "odd") as [i]:\n        B[i] = T.float32(0)\n        break',
        "",
        "an sp_iter has no order that break could end; store under a condition, or use a loop inside of it",
    ),
    "conditions": (
        '    with T.sp_iter([I], "S", "odd") as [i]:\n        if B[i]:\n            B[i] = T.float32(0)',
        "",
        "a condition must be a comparison, got B[i] of float32; compare it",
    ),
    "float-functions": (
        '    with T.sp_iter([I], "S", "odd") as [i]:\n        B[i] = T.Cast("float32", T.exp(i))',
        "",
        "T.exp takes float16, bfloat16, float32, float64, got i of int32; convert it first, as by T.float32(...)",
    ),
    "bool-arithmetic": (
        '    with T.sp_iter([I], "S", "odd") as [i]:\n        B[i] = T.Cast("float32", (B[i] > 0) - (i > 0))',
        "",
        "expected + (or), * (and), T.max, T.min or a comparison of bools, got",
    ),
    "init-spatial": (
        '    with T.sp_iter([I, J], "SR", "odd") as [i, j]:\n        with T.init():\n'
        "            B[i] = A[i, j]\n        B[i] = B[i] + A[i, j]",
        "odd",
        "T.init runs before the reduction, but uses j, a reduction variable; use spatial ones",
    ),
    "first-value": (
        '    S = T.alloc_sparse_buffer((I,), "float32")\n'
        '    with T.sp_iter([I, J], "SR", "odd") as [i, j]:\n        S[i] = S[i] + A[i, j]',
        "odd",
        "scratch buffer S is updated before anything is stored in it; use T.init",
    ),
    "structure": (
        '    with T.sp_iter([I, J], "SS", "odd") as [i, j]:\n        q[i] = j',
        "odd",
        "q holds axis J, which is iterated here, and must not be written",
    ),
    "search": (
        '    with T.sblock("odd"):\n        i = T.axis.spatial(m, T.sp.coord(I, 0))\n        T.reads()\n'
        '        T.writes()\n        T.sblock_attr({"sparse_iter": "S", "search": "fast"})\n        B[i] = A[i, 0]',
        "odd",
        "the search of an sp_iter is one of inline, hoist, merge, got 'fast'",
    ),
    "merge-sorted": (
        '    V = T.match_sparse_buffer(q, (I, U), "int32")\n'
        '    with T.sp_iter([I, J], "SR", "odd") as [i, j]:\n        T.sp_iter_attr({"search": "merge"})\n'
        "        B[i] = B[i] + A[i, j] * T.float32(V[i, j])",
        "odd",
        "search 'merge' needs sorted axes, but U of V is not; use 'inline'",
    ),
    "hoist-stable": (
        '    with T.sp_iter([I, K], "SS", "odd") as [i, k]:\n        T.sp_iter_attr({"search": "hoist"})\n'
        "        B[i] = A[i, k]\n        q[i] = k",
        "odd",
        "search 'hoist' reads q, which the body writes; use 'inline'",
    ),
}


def sole(func: Any, stage: int = 1) -> Any:
    """The first problem of `func`."""
    problems = list(check(func, stage=stage))
    assert problems, "no rule is broken"
    return problems[0]


def expect(func: Any, rule: str, construct: str, message: str, stage: int = 1) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(func, stage=stage)
    assert message in str(caught.value)
    assert f"[{rule}]" in str(caught.value)
    assert caught.value.construct == construct


@pytest.mark.parametrize("rule", TEXTS)
def test_rule_of_stage_1(rule: str) -> None:
    text, construct, message = TEXTS[rule]
    expect(parse(HEAD + text), rule, construct, message)


def test_a_negative_size() -> None:
    func = parse(HEAD + '    with T.sp_iter([I], "S") as [i]:\n        B[i] = T.float32(0)')
    sizes = {str(p.name): p for p in func.params}
    expect(func.specialize({sizes["n"]: -3}), "sizes", "J", "the length of axis J must not be negative, got -3")


def test_every_handle_becomes_an_array() -> None:
    func = parse(HEAD + '    with T.sp_iter([I], "S") as [i]:\n        B[i] = T.float32(0)')
    spare = Var("spare", ir.PointerType(ir.PrimType("float32")))
    more = tirx.PrimFunc([*func.params, spare], func.body, func.ret_type, func.attrs)
    expect(more, "parameters", "spare", "parameter spare is a T.handle that nothing is made of: remove it, or match a")


# ---------------------------------------------------------------- what no text can say

FUSED = HEAD + '    with T.sp_iter([T.fuse(I, J)], "SS", "odd") as [i, j]:\n        A[i, j] = T.float32(0)'


def replaced(func: Any, kind: type, change: Any) -> Any:
    """`func` with every node of `kind` changed."""
    body = tvm_ffi.structural_mutate(func.body, [(kind, lambda node, mutator: change(mutator.default_mutate(node)))])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def test_a_fused_chain_in_the_wrong_order() -> None:
    def swap(call: Call) -> Call:
        return Call(call.op, list(call.args)[::-1], ret_ty=call.ty) if dialect.is_call(call, "fuse") else call

    message = "T.fuse takes a parent followed by its child: J is not the parent of I"
    expect(replaced(parse(FUSED), Call, swap), "fuse-chain", "odd", message)


def test_a_variable_outside_of_its_iteration() -> None:
    func = parse(FUSED)
    found: list[s_tir.SBlockRealize] = []
    tvm_ffi.structural_walk(func, (s_tir.SBlockRealize, lambda r: found.append(r) if r.iter_values else None))
    escaped = tirx.BufferStore(func.params[3], found[0].block.iter_vars[0].var, [tirx.const(0, "int32")])
    odd = tirx.PrimFunc(func.params, tirx.SeqStmt([func.body, escaped]), func.ret_type, func.attrs)
    message = "variable i is used outside of its iteration; move the use inside (sp_iter 'odd')"
    expect(odd, "variable-scope", "odd", message)


def test_an_axis_of_another_function() -> None:
    stranger = tirx.Var("S", "int32")

    def foreign(call: Call) -> Call:
        return dialect.call("coord", [stranger, 0]) if dialect.is_call(call, "coord") else call

    message = "S is used as an axis, but this function does not declare it as one"
    expect(replaced(parse(FUSED), Call, foreign), "axis-known", "S", message)


def test_letters_for_half_of_the_variables() -> None:
    def shorten(block: s_tir.SBlock) -> s_tir.SBlock:
        notes = {**block.annotations, "sparse_iter": "S"} if block.iter_vars else block.annotations
        return s_tir.SBlock(block.iter_vars, [], [], block.name_hint, block.body, block.init, annotations=notes)

    odd = replaced(parse(FUSED), s_tir.SBlock, shorten)
    expect(odd, "letters", "odd", "expected one letter S or R for each variable")


def test_a_function_without_iterations_is_checked_by_tvm() -> None:
    text = (
        "@T.prim_func(check_well_formed=False)\ndef func(a: T.Buffer((9,), 'float32')):\n    for t in range(9):\n"
        "        with T.sblock('b'):\n            v = T.axis.spatial(9, t)\n            a[t] = T.float32(0)"
    )
    with pytest.raises(VerifyError, match=r"Loop iterator var t is defined outside of any block.*\[well-formed\]"):
        verify(parse(text))


# ---------------------------------------------------------------- what is legal


@T.prim_func
def legal(
    a: T.handle, y: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32, k: T.int32
):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), sorted=False)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    S = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([I], "S", "clear") as [i]:
        with T.init():
            S[i] = 1
        S[i] = S[i] + 1
    for t in T.serial(k):
        with T.sp_iter([I, J], "SR", "sum") as [i, j]:
            T.sp_iter_attr({"search": "merge", "colour": "blue"})
            S[i] = S[i] + A[i, j] * T.float32(t)
    with T.sp_iter([I, J], "SR", "accumulate") as [i, j]:
        Y[i] = Y[i] + A[i, j] * S[i]


def test_accumulating_loops_unknown_attributes_and_outer_variables_are_legal() -> None:
    """Also a T.init without a reduction, and 'merge' where nothing is searched."""
    assert list(check(legal)) == []


@pytest.mark.parametrize("case", share(CASES, 3, 2), ids=lambda case: case.name)
def test_the_corpus_is_sound_in_every_stage(case: Case) -> None:
    func = case.make(case.dtypes[0], "int32")
    verify(func)
    two = lower(func, stage=2)
    verify(two, stage=2)
    verify(lower(func, stage=3), stage=3)


# ---------------------------------------------------------------- stages II and III


STAGE_2_TEXT = """
@T.prim_func(check_well_formed=False)
def func(q: T.Buffer((9,), "int32"), y: T.Buffer((9,), "int32"), m: T.int32):
    for t in T.serial(9):
        with T.sblock("b"):
            v = T.axis.spatial(9, t)
            y[v] = {call}
"""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("T.sp.find(q[0], m, v, 1)", "T.sp.find: expected 5 arguments, got 4"),
        ('T.sp.find(m, m, v, 1, "inline")', "T.sp.find: expected the first element of a fiber as first argument"),
        ('T.sp.find(q[0], m, v, 1, "fast")', "T.sp.find: expected one of inline, hoist, merge as last argument, got"),
        ('T.sp.find(q[0], T.float32(1), v, 1, "inline")', "T.sp.find: expected int32 or int64 arguments, got"),
        ("T.sp.find_fiber(q[0], m)", "T.sp.find_fiber: expected 3 arguments, got 2"),
        ('T.sp.arg("int32", 0)', "T.sp.arg stands outside of a T.sp.find_rule"),
    ],
)
def test_search_calls(call: str, message: str) -> None:
    expect(parse(STAGE_2_TEXT.format(call=call)), "search-arguments", "", message, stage=2)


def test_a_sound_search() -> None:
    rule = 'T.sp.find_rule(T.sp.arg("int32", 0) * 2, m, v)'
    for call in ('T.sp.find(q[0], m, v, 1, "merge")', "T.sp.find_fiber(q[0], m, v)", rule):
        verify(parse(STAGE_2_TEXT.format(call=call)), stage=2)


def test_stage_1_is_not_stage_2() -> None:
    expect(legal, "iterations-lowered", "clear", "sp_iter 'clear' has not been lowered", stage=2)


def test_an_axis_is_not_stage_2() -> None:
    func = parse("@T.prim_func\ndef func(m: T.int32):\n    I = T.dense_fixed(m)\n    T.evaluate(0)")
    expect(func, "axes-gone", "", "T.sp.dense_fixed belongs to stage I; run sparsetir.lower(func, stage=2)", stage=2)


def test_stage_2_is_not_stage_3() -> None:
    searching = parse(STAGE_2_TEXT.format(call='T.sp.find(q[0], m, v, 1, "merge")'))
    expect(searching, "dialect-gone", "", "T.sp.find is left in stage III; run sparsetir.lower(func, stage=3)", stage=3)
    blocks = parse(STAGE_2_TEXT.format(call="v"))
    expect(blocks, "blocks-gone", "b", "block 'b' is left in stage III; run sparsetir.lower(func, stage=3)", stage=3)


def test_buffers_of_stage_3_are_flat() -> None:
    func = parse("@T.prim_func\ndef func(a: T.Buffer((3, 3), 'float32')):\n    a[0, 0] = T.float32(0)")
    expect(func, "flat-buffers", "a", "buffer a must be one-dimensional in stage III, got 2 subscripts", stage=3)


# ---------------------------------------------------------------- the entry


def test_every_rule_has_a_test() -> None:
    named = {name for table in (STAGE_1, STAGE_2, STAGE_3) for name, _ in table}
    files = [Path(__file__), Path(__file__).with_name("test_assembly_rules.py")]
    here = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [name for name in named if f'"{name}"' not in here and f"[{name}" not in here] == []


def test_names_are_unique_in_a_table() -> None:
    for table in (STAGE_1, STAGE_2, STAGE_3):
        names = [name for name, _ in table]
        assert len(names) == len(set(names))


def test_a_module_is_checked_function_by_function() -> None:
    bad = parse(HEAD + TEXTS["parent-first"][0]).with_attr("global_symbol", "bad")
    module = ir.IRModule({"good": legal.with_attr("global_symbol", "good"), "bad": bad})
    with pytest.raises(VerifyError, match="J is iterated but its parent I is not"):
        verify(module)
    verify(tvm.IRModule({"good": legal.with_attr("global_symbol", "good")}))


def test_a_problem_names_its_line() -> None:
    problem = sole(parse(HEAD + TEXTS["hoist-stable"][0]))
    assert problem.span.line == len((HEAD + TEXTS["hoist-stable"][0]).splitlines()) - 1
    with pytest.raises(VerifyError, match=r"\n --> <str>:\d+$"):
        verify(parse(HEAD + TEXTS["hoist-stable"][0]))


def test_what_can_be_verified() -> None:
    with pytest.raises(VerifyError, match=r"expected a tirx.PrimFunc or an IRModule, got str"):
        verify("spmm")
    with pytest.raises(VerifyError, match=r"stage: expected 1, 2 or 3, got 4"):
        verify(legal, stage=4)


def test_a_program_is_read_once() -> None:
    """Editing what was read changes nothing for the next reader."""
    func = ops.spmv("float64")
    before = views._decoded.cache_info().misses
    programs = [views.decode(func) for _ in range(3)]
    assert views._decoded.cache_info().misses <= before + 1
    programs[0].axes.clear()
    programs[0].buffers.clear()
    programs[0].iterations.clear()
    assert len(programs[1].axes) == len(views.decode(func).axes) == 3
    assert programs[2].iterations
    assert programs[2].buffers
