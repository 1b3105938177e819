# SPDX-License-Identifier: Apache-2.0
"""What a newcomer's first mistakes are told: in the script, in `parse` and in `build`; none ends in TVM's own words."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sparsetir
from each import examples
from sparsetir import formats, ops
from sparsetir.errors import ArgumentError, ArgumentTypeError, ScheduleError, ScriptError, ScriptWarning, VerifyError
from sparsetir.formats.encoding import parse_format
from sparsetir.ir.verifier import warn_of_doubtful
from sparsetir.ir.views import decode
from sparsetir.schedules import Choices
from tests.decomposing import compiled

HEAD = """
@T.prim_func
def func(a: T.handle, b: T.handle, p: T.handle, q: T.handle, m: T.int32, n: T.int32, nnz: T.int32, x: T.float32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q), "int32")
    K = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I,), "float32")
"""
ITERATION = """\
    with T.sp_iter([I, J], "SR", "sums") as [i, j]:
        B[i] = {}
"""


def refused(text: str, message: str, line: int) -> None:
    """The script is refused with `message`, and its line is quoted."""
    with pytest.raises(ScriptError) as caught:
        sparsetir.parse(text)
    assert message in str(caught.value)
    assert f"<str>:{line}:" in str(caught.value)
    assert text.splitlines()[line - 1].strip() in str(caught.value)


PYTHON = "Python's max, min, if, and, or and not would have to know the value now; write T.max, T.min, T.if_then_else"
POWERS = "powers are T.pow(a, b), of float16, float32 or float64; a square is a * a"
NOTHING = "takes numbers and expressions, got None; a function that is called here must return an expression"
VALUES = {
    "T.ceildiv(None, 2)": f"T.ceildiv {NOTHING}",
    "T.if_then_else(i > 0, None, A[i, j])": f"T.if_then_else {NOTHING}",
    "T.abs(T.cast(None, 'float32'))": f"T.cast {NOTHING}",
    "T.max(A[i, j], None)": f"T.max {NOTHING}",
    "None": "the value stored is None; a function that is called here must return an expression",
    "A": "the value stored is the whole buffer A; give one subscript for each axis",
    "I": "I is an axis, not a number; store a variable of an sp_iter over it",
    "I + 1": "I is an axis, not a number; use a variable of an sp_iter over it [axes-in-place]",
    "B[I]": "I is an axis, not a number; use a variable of an sp_iter over it [axes-in-place]",
    "T.attach(J, I)": "T.attach belongs into the list of an sp_iter: T.sp_iter([.., T.attach(..)], ..)",
    "max(B[i], A[i, j])": PYTHON,
    "min(B[i], A[i, j])": PYTHON,
    "abs(A[i, j])": "Python's abs takes numbers, got an expression; write T.abs",
    "round(x)": "Python's round takes numbers, got an expression; write T.round",
    "float(x)": "Python's float takes numbers, got an expression; convert it by T.float32, T.int32 and so on",
    "A[i, j] ** 2": POWERS,
    "T.pow(i, j)": POWERS,
    "A[i, j] // x": "//, % and the like take integers, got A[i, j]; of floats, T.floor(a / b) rounds a quotient",
    "i / j": "/ divides floats; of integers write a // b, or convert them first",
    "x and A[i, j]": "and, or, not and T.Select take conditions, got a number; compare it first, as by a > 0",
    "T.if_then_else(x, 0.0, x)": "a condition must be a comparison, got another value; compare it, as by a > 0",
    "T.maximum(x, x)": "T has no name maximum; write T.max(a, b)",
    "T.where(x > 0, x, x)": "a choice of two values is T.if_then_else(condition, a, b)",
    "T.sum(x)": "T has no name sum; write an iteration with the letter R and `C[i] = C[i] + ...`",
    "p[0]": "a handle, a size or a number has no elements: an index array is passed whole, as in (indptr, indices)",
}


@pytest.mark.parametrize("value", VALUES)
def test_values(value: str) -> None:
    refused(HEAD + ITERATION.format(value), VALUES[value], 10)


DECLARATIONS = {
    "return A": "a program returns nothing: its results are the buffers that it stores to",
    "S = T.attach(J, K)": "T.attach belongs into the list of an sp_iter",
    "S = T.sparse_variable(I, n, (p, q[I]))": "an index array is passed whole, as in (indptr, indices)",
    "S = T.ragged(I, n, p)": "T has no name ragged; write T.dense_variable(parent, (length, nnz), indptr)",
    "S = T.sp.dynamic(I, n, p)": "T has no name dynamic; write T.dense_variable(parent, (length, nnz), indptr)",
    "S = T.alloc_buffer([3, I])": "got the size 3 beside axis I: declare an axis T.dense_fixed(3)",
    "S = T.match_buffer(b, [I, m])": "a buffer lies over axes or has sizes, got the size m beside axis I",
}


@pytest.mark.parametrize("statement", DECLARATIONS)
def test_declarations(statement: str) -> None:
    rest = "" if statement.startswith("return") else ITERATION.format("x")
    refused(f"{HEAD}    {statement}\n{rest}", DECLARATIONS[statement], 9)


@pytest.mark.parametrize(
    ("function", "message"), [(np.exp, "numpy's functions take"), (math.exp, "Python's functions")]
)
def test_functions_of_numpy_and_python_in_a_body(function: Any, message: str) -> None:
    from tvm.script import sparsetir as T

    with pytest.raises(ScriptError, match=message):

        @T.prim_func
        def func(a: T.handle, m: T.int32):
            I = T.dense_fixed(m)
            A = T.match_sparse_buffer(a, (I,))
            with T.sp_iter([I], "S") as [i]:
                A[i] = function(A[i])


def test_a_helper_that_returns_nothing() -> None:
    from tvm.script import sparsetir as T

    def helper(x: Any) -> None:
        x + 1

    with pytest.raises(ScriptError, match=r"the value stored is None; a function that is called here must return"):

        @T.prim_func
        def func(a: T.handle, m: T.int32):
            I = T.dense_fixed(m)
            A = T.match_sparse_buffer(a, (I,))
            with T.sp_iter([I], "S") as [i]:
                A[i] = helper(A[i])


@pytest.mark.parametrize(("found", "meant"), [("int", "T.int32 or T.int64"), ("str", "T.handle or T.Buffer")])
def test_parameters_with_types_of_python(found: str, meant: str) -> None:
    refused(HEAD.replace("m: T.int32", f"m: {found}"), f"parameter m is annotated with {found}; write m: {meant}", 3)


def test_conditions_of_statements() -> None:
    text = ITERATION.format("x").replace("        B", "        if A[i, j]:\n            B")
    refused(HEAD + text, "a condition must be a comparison, got A[i, j] of float32; compare it", 10)


def test_iterations_are_not_left_but_loops_inside_are() -> None:
    text = ITERATION.format("x").replace("        B", "        if x > 0:\n            continue\n        B")
    refused(HEAD + text, "an sp_iter has no continue; put what follows under a condition", 11)
    loop = ITERATION.format("x").replace(
        "        B", "        for r in range(4):\n            if r > i:\n                break\n            B"
    )
    sparsetir.parse(HEAD + loop)


def test_initial_values_of_a_scattered_sum() -> None:
    text = ITERATION.format("x").replace("        B[i]", "        with T.init():\n            B[j] = 0\n        B[i]")
    refused(HEAD + text, "if the sum scatters, set its result to the first value in an sp_iter of its own before", 11)


def test_iter_is_another_name_of_sp_iter() -> None:
    text = HEAD + ITERATION.format("B[i] + A[i, j]")
    renamed = sparsetir.parse(text.replace("T.sp_iter", "T.iter"))
    tvm.ir.assert_structural_equal(renamed, sparsetir.parse(text), map_free_vars=True)


# --- any expression ---------------------------------------------------------------------------------------------

LEAVES = "F[i]|H[i]|N[i]|B[i]|i|m|I|F|2|0.5|-1|True|x|T.int64(3)|T.float16(1)|F[N[i]]".split("|")
UNARY = """T.exp({}) T.abs({}) -({}) T.Not({}) T.sqrt({}) T.Cast("int8",{}) T.float32({}) T.bool({}) T.floor({})
T.clz({}) T.popcount({}) T.isnan({}) abs({}) ~({}) T.erf({}) T.round({}) T.bfloat16({})
T.likely({}) T.uint8({})""".split()
BINARY = """({}+{}) ({}-{}) ({}*{}) ({}/{}) ({}//{}) ({}%{}) ({}<{}) ({}=={}) T.And({},{}) T.max({},{}) T.pow({},{})
({}&{}) ({}<<{}) T.if_then_else({}>0,1,{}) T.Select({},1,{}) T.truncmod({},{}) T.atan2({},{}) T.ceildiv({},{})
T.fmod({},{}) max({},{})""".split()
EXPRESSIONS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(str.format, st.sampled_from(UNARY), inner),
        st.builds(str.format, st.sampled_from(BINARY), inner, inner),
    ),
    max_leaves=4,
)
DTYPES = st.sampled_from(["float32", "float16", "bfloat16", "int8", "int32", "bool"])
ANY = """
@T.prim_func
def func(f: T.handle, h: T.handle, n: T.handle, b: T.handle, c: T.handle, m: T.int32, x: T.float32):
    I = T.dense_fixed(m)
    F = T.match_sparse_buffer(f, (I,), "float32")
    H = T.match_sparse_buffer(h, (I,), "bfloat16")
    N = T.match_sparse_buffer(n, (I,), "int8")
    B = T.match_sparse_buffer(b, (I,), "bool")
    C = T.match_sparse_buffer(c, (I,), "{dtype}")
    with T.sp_iter([I], "S") as [i]:
        C[i] = {value}
"""


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(value=EXPRESSIONS, dtype=DTYPES)
@example(value="T.popcount(0.5)", dtype="int8")
@example(value="T.likely(x)", dtype="float32")
@example(value="(F[i]<F)", dtype="bool")
@example(value="T.Select(H[i],1,x)", dtype="int32")
@example(value="(B[i]-B[i])", dtype="bool")
@example(value="T.erf(H[i])", dtype="float16")
@example(value="T.truncmod(x,H[i])", dtype="bfloat16")
def test_any_expression_is_built_or_refused_in_words_of_the_dialect(value: str, dtype: str) -> None:
    try:
        compiled(sparsetir.parse(ANY.format(dtype=dtype, value=value)))
    except sparsetir.SparseTIRError as error:
        said = str(error).partition("\n")[0]
        assert not any(word in said for word in ("Check failed", "DLDataType", "Mismatched type", "ir."))


# --- doubtful programs ------------------------------------------------------------------------------------------

PRODUCT = """
@T.prim_func
def product(a: T.handle, b: T.handle, c: T.handle, p: T.handle, q: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q), "int32")
    Jd = T.dense_fixed(n)
    K = T.dense_fixed(m)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (Jd, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "{kinds}", "product") as [i, j, k]:
        with T.init():
            C[{first}] = 0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]
"""
LOST = (
    "j is spatial (S), but C[i, k], which the body adds to, does not depend on it: write R for what is summed over, "
    "or give the result a subscript j (sp_iter 'product')"
)
PERMUTED = "T.init() sets C[k, i], and the body stores to C[i, k]: give both the same subscripts (sp_iter 'product')"


@pytest.mark.parametrize(("kinds", "first", "message"), [("SSS", "i, k", LOST), ("SRS", "k, i", PERMUTED)])
def test_doubtful_initialisations(kinds: str, first: str, message: str) -> None:
    with pytest.warns(ScriptWarning) as caught:
        compiled(sparsetir.parse(PRODUCT.format(kinds=kinds, first=first)))
    assert [str(warning.message) for warning in caught] == [message]


def test_ready_programs_are_not_doubtful() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for format in ops.FORMATS:
            warn_of_doubtful(decode(ops.spmm(format=format)))
        for make in (ops.spmv, ops.linear, ops.sddmm, ops.mttkrp):
            warn_of_doubtful(decode(make()))


# --- parse and build --------------------------------------------------------------------------------------------

ONE = "a text to parse is one function under @T.prim_func, or one class under @I.ir_module"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ScriptError, ONE),
        ("x = 1", ScriptError, ONE),
        ("def f(:", ScriptError, "<str>:1:7\ndef f(:"),
        (3, ArgumentTypeError, "parse takes the text of a program, got int"),
        (None, ArgumentTypeError, "parse takes the text of a program, got NoneType"),
    ],
)
def test_texts_that_are_no_programs(text: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        sparsetir.parse(text)
    assert message in str(caught.value)


NO_PROGRAMS: dict[str, tuple[Callable[[], Any], str]] = {
    "maker": (lambda: ops.spmm, "got the function spmm: call it if it makes one, as in sparsetir.ops.spmm()"),
    "number": (lambda: 3, "got int"),
    "kernel": (lambda: compiled(ops.spmv()), "got Kernel, which is called as it is"),
    "autotuned": (
        lambda: sparsetir.autotune(configs=[Choices()], key=["m"])(ops.spmv()),
        "got Autotuned, which is called as it is",
    ),
}


@pytest.mark.parametrize("what", NO_PROGRAMS)
def test_build_of_what_is_no_program(what: str) -> None:
    make, message = NO_PROGRAMS[what]
    with pytest.raises(ArgumentTypeError) as caught:
        sparsetir.build(make())
    expected = "build takes a program: a PrimFunc, an IRModule, a schedule or a decomposition, "
    assert str(caught.value).startswith(expected + message)


def test_a_program_that_stores_nothing() -> None:
    with pytest.raises(VerifyError, match=r"program func stores nothing: store results in a T.sp_iter; what only"):
        sparsetir.build(sparsetir.parse(HEAD))


def test_targets() -> None:
    with pytest.raises(ArgumentError, match=r"target: expected an LLVM target such as .*, got 'foo': Target"):
        sparsetir.build(ops.spmv(), "foo")
    with pytest.raises(ArgumentError, match=r"target: expected an LLVM target .*, got 3"):
        sparsetir.build(ops.spmv(), 3)  # type: ignore[arg-type]
    other = "riscv64-linux-gnu"
    with pytest.raises(ArgumentError, match=r"the target is for riscv64, this machine is \w+, and a kernel runs where"):
        sparsetir.build(ops.spmv(), {"kind": "llvm", "mtriple": other})


@pytest.mark.parametrize("text", ["sell(C=4, sigma=8)", "hdia(C=4)", "row_groups(r=2)"])
def test_nothing_is_doubtful_about_the_pieces_of_a_format(text: str) -> None:
    parts = sparsetir.decompose_format(ops.spmv(), {"A": parse_format(text)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsetir.build(parts)


CONSTRUCTORS = {
    "Choices": (sparsetir.Choices, ["tile", "chunks", "prefetch"]),
    "Accumulators": (sparsetir.Accumulators, ["kind", "order", "insertion"]),
    **{name: (maker, None) for name, maker in formats.REGISTRY.items()},
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_keyword_that_a_constructor_does_not_have(name: str) -> None:
    make, some = CONSTRUCTORS[name]
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        pytest.skip("it takes any name")
    with pytest.raises(ArgumentTypeError, match=f"^nonsense: expected .* got a name that {name} does not have"):
        make(nonsense=3)
    for known in some or parameters:
        wrong = known[:1] + known[2:] if len(known) > 2 else known * 2
        if wrong not in parameters:
            with pytest.raises(ArgumentTypeError, match=rf"^{wrong}: .* Did you mean .*{known}"):
                make(**{wrong: 3})


def test_other_wrong_arguments_of_a_constructor() -> None:
    with pytest.raises(ScheduleError, match="tile: expected an integer"):
        sparsetir.Choices(tile="many")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional"):
        sparsetir.Accumulators(*range(9))  # type: ignore[call-arg, arg-type]
    assert next(iter(inspect.signature(sparsetir.Choices).parameters)) == "tile"
    assert sparsetir.Choices(tile=8).changed(tile=16) == sparsetir.Choices(tile=16)
