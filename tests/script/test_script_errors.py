# SPDX-License-Identifier: Apache-2.0
"""What a user is told about a wrong program: the sentence and the line.

Each case is the end of a program; the error must quote the line marked with ``#!``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tvm.error import DiagnosticError
from tvm.script import ir as I
from tvm.script import sparsetir as T

from sparsetir.errors import ScriptError, SparseTIRError
from sparsetir.ir.verifier import verify
from sparsetir.script.printer import parse

HEAD = """
@T.prim_func
def func(a: T.handle, b: T.handle, p: T.handle, q: T.handle, m: T.int32, n: T.int32, nnz: T.int32, x: T.float32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q), "int32")
    K = T.dense_fixed(n)
"""
BUFFERS = """
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I,), "float32")
"""


def rejected(text: str, message: str, marked: str) -> None:
    """Parsing fails with `message` (not a pattern) and quotes the marked line."""
    with pytest.raises(ScriptError) as caught:
        parse(text)
    shown = str(caught.value)
    assert message in shown
    assert shown.startswith("error: ")
    number = next(n for n, line in enumerate(text.splitlines(), 1) if marked in line)
    assert f":{number}:" in shown, f"line {number} is not named in\n{shown}"
    assert text.splitlines()[number - 1].strip() in shown


AXES = {
    "parent that is no axis": (
        "    S = T.sparse_variable(m, (n, nnz), (p, q))  #!",
        "the parent must be an axis declared earlier in this function, got 'm'",
    ),
    "parent declared later": (
        "    S = T.dense_variable(L, (n, nnz), p)  #!\n    L = T.dense_fixed(m)",
        "L is not defined here: an axis or a buffer is declared before it is used",
    ),
    "unknown index type": (
        '    S = T.dense_fixed(m, "int34")  #!',
        "an axis counts in int32 or int64, got idtype='int34'",
    ),
    "negative size": (
        "    S = T.dense_fixed(-3)  #!",
        "a size must not be negative, got -3",
    ),
    "float size": (
        "    S = T.dense_fixed(x)  #!",
        "a size must be an integer, got x of float32",
    ),
    "size that is a string": (
        '    S = T.dense_fixed("m")  #!',
        "a size must be an integer or an integer expression, got 'm'",
    ),
    "three sizes": (
        "    S = T.sparse_variable(I, (m, n, nnz), (p, q))  #!",
        "expected length or (length, nnz), got a tuple of 3",
    ),
    "three widths": (
        "    S = T.sparse_fixed(I, (m, n, nnz), q)  #!",
        "expected length or (length, nnz_cols), got a tuple of 3",
    ),
    "one array of two": (
        "    S = T.sparse_variable(I, (n, nnz), p)  #!",
        "a sparse_variable axis needs (indptr, indices), got",
    ),
    "indptr that is a size": (
        "    S = T.sparse_variable(I, (n, nnz), (m, q))  #!",
        "indptr must be a T.handle or T.Buffer parameter, got m, which is of type int32",
    ),
    "indices that are an axis": (
        "    S = T.singleton(I, n, K)  #!",
        "indices must be a T.handle or T.Buffer parameter, got K, which is an axis",
    ),
    "ragged without pointers": (
        "    S = T.dense_variable(I, (n, nnz))  #!",
        "a ragged axis needs indptr, or both extent= and offset=",
    ),
    "rule with too few arguments": (
        "    S = T.sparse_fixed(I, (n, 4), lambda i: i)  #!",
        "indices must take 2 arguments (the ancestors' coordinates, then the slot), it takes 1",
    ),
    "rule without a width": (
        "    S = T.sparse_fixed(I, n, lambda i, s: i + s)  #!",
        "give (length, nnz_cols): a callable does not tell the number of slots",
    ),
    "extent with too many arguments": (
        "    S = T.dense_variable(I, (n, 9), extent=lambda i, s: i, offset=lambda i: i)  #!",
        "extent must take 1 arguments (the ancestors' coordinates), it takes 2",
    ),
    "misspelt name": (
        "    S = T.dense_fixd(m)  #!",
        "T has no name dense_fixd; did you mean T.dense_fixed?",
    ),
    "unknown argument": (
        "    S = T.sparse_fixed(I, (n, 4), q, sort=False)  #!",
        "sparse_fixed() got an unexpected keyword argument 'sort'",
    ),
}

BUFFER = {
    "axis without its parent": (
        '    C = T.match_sparse_buffer(a, (K, J), "float32")  #!',
        "a buffer over axis J must also have its parent I, got (K, J)",
    ),
    "axis twice": (
        '    C = T.match_sparse_buffer(a, (I, I), "float32")  #!',
        "axis I appears twice in one buffer",
    ),
    "fork": (
        '    S = T.dense_variable(I, (n, nnz), p)\n    C = T.match_sparse_buffer(a, (I, J, S), "float32")  #!',
        "axes J and S are both below I; the axes of one tree must form a chain",
    ),
    "size among axes": (
        '    C = T.match_sparse_buffer(a, (I, m), "float32")  #!',
        "every item of a buffer's axes must be an axis declared earlier in this function, got 'm'",
    ),
    "no axes": (
        '    C = T.alloc_sparse_buffer((), "float32")  #!',
        "a sparse buffer needs at least one axis",
    ),
    "unknown value type": (
        '    C = T.match_sparse_buffer(a, (I,), "float33")  #!',
        "a sparse buffer holds one of float16, bfloat16, float32",
    ),
    "handle matched twice": (
        '    C = T.match_sparse_buffer(a, (I,), "float32")\n    D = T.match_sparse_buffer(a, (I,), "float32")  #!',
        "the handle a is already matched to another buffer; declare it as T.Buffer to view it twice",
    ),
    "index array as values": (
        '    C = T.match_sparse_buffer(q, (I, J), "int32")  #!',
        "the handle q is already matched to another buffer",
    ),
    "size as values": (
        '    C = T.match_sparse_buffer(m, (I,), "int32")  #!',
        "match_sparse_buffer takes a T.handle or T.Buffer parameter, got m, which is of type int32",
    ),
    "buffer of another type": (
        '    S = T.alloc_buffer((m,), "float64")\n    C = T.match_sparse_buffer(S, (I,), "float32")  #!',
        "buffer S holds float64, match_sparse_buffer says float32",
    ),
    "handle after a frame": (
        '    S = T.alloc_buffer((9,), "float32")\n    V = T.decl_buffer((3, 3), "float32", data=S.data)\n'
        '    C = T.match_sparse_buffer(a, (I,), "float32")  #!',
        "a handle becomes a buffer at the top of the function; move its declaration before any T.decl_buffer",
    ),
    "storage of auxiliary arrays": (
        '    C = T.match_sparse_buffer(a, (I,), "float32", extra_storage=1)  #!',
        "extra_storage belongs to auxiliary arrays",
    ),
}

ITERATION = {
    "too few names": (
        '    with T.sp_iter([I, J, K], "SRS") as [i, j]:  #!\n        B[i] = 0',
        "expected one name for each value, got 2 name(s) for more values; an sp_iter gives one variable per axis",
    ),
    "too many names": (
        '    with T.sp_iter([I], "S") as [i, j]:  #!\n        B[i] = 0',
        "expected one name for each of 1 value(s), got 2 names; an sp_iter gives one variable per axis",
    ),
    "a name, not a list": (
        '    with T.sp_iter([I, J], "SS") as i:\n        A[i, i] = 0  #!',
        "an sp_iter over one axis is written `as [i]`, not `as i`",
    ),
    "too few letters": (
        '    with T.sp_iter([I, J, K], "SR") as [i, j, k]:  #!\n        B[i] = 0',
        "sp_iter iterates 3 axes but 'SR' has 2 letters; give one per axis",
    ),
    "unknown letter": (
        '    with T.sp_iter([I, J], "SX") as [i, j]:  #!\n        B[i] = 0',
        "each letter of an sp_iter is S (spatial) or R (reduction), got 'X' in 'SX'",
    ),
    "letters that are no string": (
        "    with T.sp_iter([I], [1]) as [i]:  #!\n        B[i] = 0",
        "the kinds of an sp_iter are a string of S and R, got list",
    ),
    "no axes": (
        '    with T.sp_iter([], "") as [i]:  #!\n        B[i] = 0',
        "sp_iter takes a list of one axis or more",
    ),
    "item that is no axis": (
        '    with T.sp_iter([I, n], "SS") as [i, j]:  #!\n        B[i] = 0',
        "every item of an sp_iter list must be an axis declared earlier in this function, got 'n'",
    ),
    "for instead of with": (
        '    for i in T.sp_iter([I], "S"):  #!\n        B[i] = 0',
        "a sparse iteration is a `with` statement",
    ),
    "parent listed later": (
        '    with T.sp_iter([J, I], "RS") as [j, i]:  #!\n        B[i] = A[i, j]',
        "J is listed before its parent I; list I first",
    ),
    "parent not listed": (
        '    with T.sp_iter([K, J], "SR") as [k, j]:  #!\n        A[k, j] = 0',
        "J is iterated but its parent I is not; list I before it",
    ),
    "axis listed twice": (
        '    with T.sp_iter([I, J, J], "SRR") as [i, j, k]:  #!\n        B[i] = A[i, j]',
        "axis J is listed twice; declare another axis for a second loop",
    ),
    "attached to an axis not listed": (
        '    with T.sp_iter([I, T.attach(J, K)], "SR") as [i, j]:  #!\n        B[i] = 0',
        "T.attach(J, K) is iterated but the axis it is attached to, K is not; list K before it",
    ),
    "attached to an axis listed later": (
        '    with T.sp_iter([T.attach(J, K), K], "SR") as [i, j]:  #!\n        B[i] = 0',
        "T.attach(J, K) is listed before the axis it is attached to, K; list K first",
    ),
    "attach a root": (
        '    with T.sp_iter([I, T.attach(K, I)], "SR") as [i, j]:  #!\n        B[i] = 0',
        "axis K has no parent, there is nothing to re-attach",
    ),
    "attach below repeated coordinates": (
        "    R = T.sparse_fixed(None, (m, nnz), q, unique=False)\n    S = T.singleton(R, n, p)\n"
        '    with T.sp_iter([I, T.attach(S, I)], "SR") as [i, j]:  #!\n        B[i] = 0',
        "T.attach(S, I) goes to one place of R, which may store a coordinate several times (unique=False): "
        "entries of S are lost; store R once each, as CSR or DCSR instead of COO",
    ),
    "fuse strangers": (
        '    with T.sp_iter([T.fuse(I, K)], "SS") as [i, j]:  #!\n        B[i] = 0',
        "T.fuse takes a parent followed by its child: I is not the parent of K",
    ),
    "fuse below a root": (
        "    S = T.dense_variable(J, (n, nnz), p)\n"
        '    with T.sp_iter([I, T.fuse(J, S)], "SSS") as [i, j, k]:  #!\n        B[i] = 0',
        "T.fuse must start at a root axis, J lies below I",
    ),
    "fuse one": (
        '    with T.sp_iter([T.fuse(I)], "S") as [i]:  #!\n        B[i] = 0',
        "T.fuse takes two axes or more, got 1",
    ),
    "unknown search": (
        '    with T.sp_iter([I], "S") as [i]:\n        T.sp_iter_attr({"search": "fast"})  #!\n        B[i] = 0',
        "the search of an sp_iter is one of inline, hoist, merge, got 'fast'",
    ),
    "attributes outside": (
        '    T.sp_iter_attr({"search": "hoist"})  #!',
        "T.sp_iter_attr belongs at the top of an sp_iter, got a call outside of one",
    ),
    "init outside": (
        "    with T.init():  #!\n        B[0] = 0",
        "T.init belongs at the top of an sp_iter (or of a T.sblock), got a call outside of one",
    ),
}

STATEMENT = {
    "undefined buffer": (
        '    with T.sp_iter([I], "S") as [i]:\n        C[i] = 0  #!',
        "C is not defined here: an axis or a buffer is declared before it is used",
    ),
    "variable after its iteration": (
        '    with T.sp_iter([I], "S") as [i]:\n        B[i] = 0\n    B[i] = 1  #!',
        "i is not defined here: an axis or a buffer is declared before it is used, "
        "an iteration variable lives inside its own sp_iter only; several are a list, `as [i, j]` with brackets",
    ),
    "too few subscripts in a store": (
        '    with T.sp_iter([I, J], "SR") as [i, j]:\n        A[i] = 0  #!',
        "expected one subscript for each of the 2 dimensions of A, got 1",
    ),
    "too many subscripts in a load": (
        '    with T.sp_iter([I, J], "SR") as [i, j]:\n        A[i, j] = B[i, j]  #!',
        "expected one subscript for each of the 1 dimensions of the buffer, got 2",
    ),
    "too few subscripts in a load": (
        '    with T.sp_iter([I, J], "SR") as [i, j]:\n        B[i] = A[i]  #!',
        "a buffer is read with fewer subscripts than it has dimensions, or with a slice `:`; "
        "give one subscript per axis, an iteration variable or a number",
    ),
    "too few subscripts in an expression": (
        '    with T.sp_iter([I, J], "SR") as [i, j]:\n        B[i] = A[i] * B[i]  #!',
        "a buffer is read with fewer subscripts than it has dimensions, or with a slice `:`; "
        "give one subscript per axis, an iteration variable or a number",
    ),
    "float subscript": (
        '    with T.sp_iter([I], "S") as [i]:\n        B[B[i]] = 0  #!',
        "a subscript of B must be an integer, got B[i] of float32; cast it [subscripts]",
    ),
    "store to an axis": (
        '    with T.sp_iter([I], "S") as [i]:\n        K[i] = 0  #!',
        "only a buffer can be stored to, got another kind of name",
    ),
    "store to a handle": (
        '    with T.sp_iter([I], "S") as [i]:\n        a[i] = 0  #!',
        "a T.handle parameter or an axis becomes one by T.match_sparse_buffer",
    ),
    "store a string": (
        '    with T.sp_iter([I], "S") as [i]:\n        B[i] = "zero"  #!',
        "the value stored must be a number or an expression, got SmallStr",
    ),
    "reduction variable in init": (
        '    with T.sp_iter([I, J], "SR") as [i, j]:\n        with T.init():\n            A[i, j] = 0  #!\n'
        "        A[i, j] = A[i, j] + 1",
        "T.init runs before the reduction, but uses j, a reduction variable; use spatial ones",
    ),
    "scratch without a first value": (
        '    S = T.alloc_sparse_buffer((I,), "float32")\n'
        '    with T.sp_iter([I, J], "SR") as [i, j]:\n        S[i] = S[i] + A[i, j]  #!',
        "scratch buffer S is updated before anything is stored in it; use T.init (sp_iter 'sp_iter_0')",
    ),
}

BOTH = {**BUFFER, **{f"axis: {name}": case for name, case in AXES.items()}}


@pytest.mark.parametrize("name", BOTH)
def test_declarations(name: str) -> None:
    text, message = BOTH[name]
    rejected(HEAD + text, message, "#!")


@pytest.mark.parametrize("name", ITERATION)
def test_iterations(name: str) -> None:
    text, message = ITERATION[name]
    rejected(HEAD + BUFFERS + text, message, "#!")


@pytest.mark.parametrize("name", STATEMENT)
def test_statements(name: str) -> None:
    text, message = STATEMENT[name]
    rejected(HEAD + BUFFERS + text, message, "#!")


# ---------------------------------------------------------------- parameters


def test_a_parameter_needs_an_annotation() -> None:
    text = "@T.prim_func  #!\ndef func(a):\n    T.evaluate(0)"
    rejected(text, "Type annotation required for function parameters", "#!")


def test_index_arrays_hold_integers_in_one_dimension() -> None:
    head = "@T.prim_func\ndef func(p: T.Buffer((5,), 'float32'), q: T.Buffer((5, 5), 'int32')):\n"
    head += "    I = T.dense_fixed(4)\n"
    wrong_type, wrong_rank = "    J = T.dense_variable(I, 9, p)  #!", "    J = T.singleton(I, 9, q)  #!"
    rejected(head + wrong_type, "indptr must be an int32 or int64 array, got p of float32", "#!")
    rejected(head + wrong_rank, "indices must be one-dimensional, got q with 2 dimensions", "#!")


# ---------------------------------------------------------------- where the program stands


def here(error: pytest.ExceptionInfo[ScriptError], fragment: str) -> None:
    """The error names this file and the first line that holds `fragment`."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(source, 1) if fragment in line)
    assert f"{Path(__file__).name}:{number}:" in str(error.value)
    assert source[number - 1].rstrip() in str(error.value)


def test_a_decorated_function_is_located() -> None:
    with pytest.raises(ScriptError, match="J is listed before its parent I") as error:

        @T.prim_func
        def func(a: T.handle, p: T.handle, m: T.int32, nnz: T.int32):
            I = T.dense_fixed(m)
            J = T.dense_variable(I, (m, nnz), p)
            A = T.match_sparse_buffer(a, (I, J), "float32")
            with T.sp_iter([J, I], "SS", "decorated") as [j, i]:
                A[i, j] = T.float32(0)

    here(error, '"decorated") as')


def test_a_function_of_a_module_is_located() -> None:
    with pytest.raises(ScriptError, match="a subscript of A must be an integer") as error:

        @I.ir_module
        class Module:
            @T.prim_func
            def sound(a: T.handle, m: T.int32):
                I = T.dense_fixed(m)
                A = T.match_sparse_buffer(a, (I,), "float32")
                with T.sp_iter([I], "S") as [i]:
                    A[i] = T.float32(0)

            @T.prim_func
            def unsound(a: T.handle, m: T.int32):
                I = T.dense_fixed(m)
                A = T.match_sparse_buffer(a, (I,), "float32")
                with T.sp_iter([I], "S") as [i]:
                    A[A[i]] = T.float32(12345)

    here(error, "T.float32(12345)")


def test_an_error_in_a_module_is_a_script_error() -> None:
    with pytest.raises(ScriptError, match="a size must not be negative, got -7"):

        @I.ir_module
        class Module:
            @T.prim_func
            def unsound(a: T.handle):
                I = T.dense_fixed(-7)


def test_a_module_may_use_loop_variables_in_iterations() -> None:
    @I.ir_module(check_well_formed=False)
    class Module:
        @T.prim_func
        def sound(a: T.handle, m: T.int32):
            I = T.dense_fixed(m)
            A = T.match_sparse_buffer(a, (I,), "float32")
            for t in T.serial(3):
                with T.sp_iter([I], "S") as [i]:
                    A[i] = T.float32(t)

    verify(Module)


def test_well_formedness_can_be_left_unchecked() -> None:
    @T.prim_func(check_well_formed=False)
    def func(a: T.handle, p: T.handle, m: T.int32, nnz: T.int32):
        I = T.dense_fixed(m)
        J = T.dense_variable(I, (m, nnz), p)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        with T.sp_iter([J, I], "SS") as [j, i]:
            A[i, j] = T.float32(0)

    with pytest.raises(SparseTIRError, match="J is listed before its parent I"):
        verify(func)


def test_a_script_error_is_a_syntax_error_and_no_diagnostic_of_tvm() -> None:
    with pytest.raises(SyntaxError) as caught:
        parse(HEAD + "    S = T.dense_fixed(-3)")
    assert not isinstance(caught.value, DiagnosticError), "TVM hides the text of those"


BAD_SCRIPT = """
from tvm.script import {dialect}
from tvm.script import sparsetir as T
{decorator}
    @T.prim_func
    def func(a: T.handle, m: T.int32):
        S = T.dense_fixed(-3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("decorator", ["if True:", "@I.ir_module\nclass Module:"])
def test_an_uncaught_error_shows_its_text(decorator: str, tmp_path: Path) -> None:
    """TVM's excepthook hides a DiagnosticError; a ScriptError must come through."""
    path = tmp_path / "bad.py"
    path.write_text(BAD_SCRIPT.format(dialect="ir as I", decorator=decorator), encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a size must not be negative, got -3" in done.stderr
    number = next(n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if "-3" in line)
    assert f"bad.py:{number}:" in done.stderr
    assert "S = T.dense_fixed(-3)" in done.stderr
