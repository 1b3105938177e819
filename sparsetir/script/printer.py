# SPDX-License-Identifier: Apache-2.0
"""Print programs in the dialect's own words, and parse what was printed.

TVM prints a stage-I function from its standard nodes, operators as ``T.sp.<name>(...)``. Its text is Python, so
`script` parses it with `ast`, puts the dialect's statements in place of the raw ones and prints the tree again.
Expressions and ordinary statements stay TVM's.

before::

    def spmv(a: T.Buffer(("nnz",), "float32", align=4), ...):
        I_1: T.let[T.int32] = T.sp.dense_fixed(m)
        J: T.let[T.int32] = T.sp.sparse_variable(I_1, n, nnz, indptr, indices, 1, 1)
        A = a.view(m, n)
        T.sp.bind_axes(A, T.float32(0.0), I_1, J)
        with T.sblock("spmv"):
            i = T.axis.spatial(m, T.sp.coord(I_1, 0))
            j = T.axis.reduce(n, T.sp.coord(J, 0))
            ...

after::

    def spmv(a: T.handle, ...):
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        A = T.match_sparse_buffer(a, (I, J), "float32")
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            ...
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.errors import VerifyError
from sparsetir.ir import Axis, Program, SparseBuffer, const, decode

WIDTH = 120
HEADER = "# from tvm.script import sparsetir as T"
MODULE_HEADER = f"# from tvm.script import ir as I\n{HEADER}\n# from tvm.script import relax as R"


def script(func: Any) -> str:
    """Print a function or module in the dialect.

    Parameters
    ----------
    func : PrimFunc or IRModule
        A program of any stage.

    Returns
    -------
    str
        A text that `parse` turns into an equal program.

    Examples
    --------
    >>> import sparsetir
    >>> func = sparsetir.ops.spmv()
    >>> import tvm_ffi
    >>> tvm_ffi.structural_equal(sparsetir.parse(sparsetir.script(func)), func, map_free_vars=True)
    True
    """
    if not isinstance(func, (tirx.PrimFunc, tvm.IRModule)):
        raise VerifyError(f"expected a tirx.PrimFunc or an IRModule, found {type(func).__name__}")
    text = func.script(extra_config={"tirx.prefix": "T", "script.use_pep695": False})
    tree = ast.parse(text)
    is_module = isinstance(func, tvm.IRModule)
    known = {g.name_hint: f for g, f in func.functions.items()} if is_module else {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            function = known[node.name] if is_module else func
            if isinstance(function, tirx.PrimFunc):
                _FunctionPrinter(node, function).rewrite()
    _drop_unused_type_variables(tree)
    return f"{MODULE_HEADER if is_module else HEADER}\n\n{_layout(tree)}\n"


def parse(text: str) -> Any:
    """Parse a program text; `T` is the dialect, `I` and `R` are TVM's.

    Parameters
    ----------
    text : str
        What `script` or TVM's own printer printed, or what a user wrote.

    Returns
    -------
    PrimFunc or IRModule

    Raises
    ------
    ScriptError
        The text breaks a rule of the dialect; the message quotes the line.
    """
    from tvm.script.parser.core import entry

    from sparsetir.script import parser

    names = {**entry._default_globals(), "T": parser, "sparsetir": parser}
    return parser.parse_text(text, names, check_well_formed=False)


# ---------------------------------------------------------------------------------------------- small trees


def _name(identifier: str) -> ast.Name:
    return ast.Name(identifier, ast.Load())


def _call(name: str, *args: ast.expr, **keywords: ast.expr) -> ast.Call:
    function = ast.Attribute(_name("T"), name, ast.Load())
    return ast.Call(function, list(args), [ast.keyword(k, v) for k, v in keywords.items()])


def _tuple(items: list[ast.expr]) -> ast.Tuple:
    return ast.Tuple(items, ast.Load())


def _list(items: list[ast.expr]) -> ast.List:
    return ast.List(items, ast.Load())


def _called(node: Any) -> str:
    """``sp.coord`` for a call of ``T.sp.coord``; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    parts: list[str] = []
    function: Any = node.func
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    return ".".join(parts) if isinstance(function, ast.Name) and function.id == "T" else ""


def _same_text(a: ast.AST, b: ast.AST) -> bool:
    return ast.unparse(a) == ast.unparse(b)


def _plain(node: ast.expr, dtype: str) -> ast.expr:
    """A number or expression without the conversion to `dtype` that the dialect adds by itself."""
    called = _called(node)
    if called == "Cast" and _is_text(node.args[0], dtype):  # type: ignore[attr-defined]
        return node.args[1]  # type: ignore[attr-defined]
    if called == dtype and isinstance(node.args[0], ast.Constant):  # type: ignore[attr-defined]
        return node.args[0] if not isinstance(node.args[0].value, str) else node  # type: ignore[attr-defined]
    return node


def _is_text(node: ast.expr, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _identifiers(node: ast.AST) -> Counter[str]:
    """How often each name occurs below `node`, in quoted sizes too."""
    found: Counter[str] = Counter()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            found[child.id] += 1
    return found


def _quoted_names(annotation: ast.expr) -> Counter[str]:
    """The names in an annotation, quoted or not."""
    found = _identifiers(annotation)
    for child in ast.walk(annotation):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value.isidentifier() is False:
            found += _identifiers(ast.parse(child.value, mode="eval"))
    return found


# ---------------------------------------------------------------------------------------------- one function
