# SPDX-License-Identifier: Apache-2.0
"""Print programs in the dialect's syntax, and parse printed programs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tvm
from tvm import ir, tirx
from tvm.script.parser import ir as script_ir
from tvm.tirx.layout import Axis

from sparsetir.errors import ArgumentTypeError, ScriptError, VerifyError
from sparsetir.ir.views import decode
from sparsetir.script import parser
from sparsetir.script import parser as trees
from sparsetir.script.sugar import Body, Signature

# Print programs in the dialect's own words, and parse what was printed.
#
# TVM prints a stage-I function from its standard nodes. Its text is Python: `script` reads it with `ast`, lets
# `sugar` put the dialect's statements in place of the raw ones, and prints the tree again. Expressions and
# ordinary statements stay TVM's.


WIDTH = 120
STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'")
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
    >>> import sparsetir, tvm_ffi
    >>> func = sparsetir.ops.spmv()
    >>> tvm_ffi.structural_equal(sparsetir.parse(sparsetir.script(func)), func, map_free_vars=True)
    True
    """
    if not isinstance(func, (tirx.PrimFunc, tvm.IRModule)):
        raise VerifyError(f"expected a tirx.PrimFunc or an IRModule, found {type(func).__name__}")
    tree = trees.parse(func.script(extra_config={"tirx.prefix": "T", "script.use_pep695": False}))
    is_module = isinstance(func, tvm.IRModule)
    functions = {g.name_hint: f for g, f in func.functions.items()} if is_module else {}
    for node in _functions(tree):
        function = functions[node.name] if is_module else func
        if isinstance(function, tirx.PrimFunc):
            sweeten(node, function)
    _drop_unused_type_variables(tree)
    body = _layout(tree)
    typing = "# from typing import TypeVar\n" if "TypeVar(" in body else ""
    return f"{typing}{MODULE_HEADER if is_module else HEADER}\n\n{body}\n"


def parse(text: str) -> Any:
    """Parse a program text; in it `T` is the dialect, `I` and `R` are TVM's. Its imports are not run.

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
    if not isinstance(text, str):
        raise ArgumentTypeError(f"parse takes the text of a program, found {type(text).__name__}")
    try:
        tree = trees.parse(text)
    except SyntaxError as error:
        raise ScriptError(f"error: {error.msg}\n --> <str>:{error.lineno}:{error.offset}\n{error.text or ''}") from None
    if not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body):
        raise ScriptError("a text to parse is one function under @T.prim_func, or one class under @I.ir_module")
    names = {"T": parser, "I": script_ir, "tvm": tvm, "Axis": Axis, "TypeVar": TypeVar}
    if re.search(r"\bR\.", text):
        from tvm.script.parser import relax as script_relax  # takes longer to import than most programs to parse

        names["R"] = script_relax
    imports = re.compile(r"^(?:import|from) .*$", re.MULTILINE)
    return parser.parse_text(imports.sub("", text), names)


def sweeten(node: ast.FunctionDef, func: tirx.PrimFunc) -> None:
    """Rewrite the raw tree of `func` in place."""
    body = Body(node, func)
    node.body = body.block(node.body)
    _plain_decorator(node)
    Signature(node, func, body).write()
    _restore_names(node, body)


def _plain_decorator(node: ast.FunctionDef) -> None:
    """``@T.prim_func`` makes ``s_tir`` functions; only the others have to say it."""
    decorator: Any = node.decorator_list[-1]
    keywords = list(decorator.keywords) if isinstance(decorator, ast.Call) else []
    keywords_left = [k for k in keywords if k.arg != "s_tir"]
    if len(keywords_left) == len(keywords):
        keywords_left.append(ast.keyword("s_tir", ast.Constant(False)))
    node.decorator_list[-1] = (
        ast.Call(trees.member("prim_func"), [], keywords_left) if keywords_left else trees.member("prim_func")
    )


def _restore_names(node: ast.FunctionDef, body: Body) -> None:
    """Restore the names of axes that TVM reserves for its own modules, such as I and R."""
    used = set(trees.names_in(node)) | {a.arg for a in node.args.args}
    renamed = {name: axis.name for name, axis in body.axes.items() if name != axis.name and axis.name not in used}
    for child in trees.names(node) if renamed else ():
        child.id = renamed.get(child.id, child.id)


def _functions(tree: Any) -> list[ast.FunctionDef]:
    """Return the functions of a text, and those of its module's class, in order."""
    inside = [_functions(node) if isinstance(node, ast.ClassDef) else [node] for node in tree.body]
    return [node for nodes in inside for node in nodes if isinstance(node, ast.FunctionDef)]


def _drop_unused_type_variables(tree: ast.Module) -> None:
    """Remove ``nnz = TypeVar("nnz")`` where the program no longer names the size."""
    names = trees.names_in(tree)

    def is_unused(node: ast.stmt) -> bool:
        is_declaration = isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar(")
        return is_declaration and names[ast.unparse(node.targets[0])] == 1  # type: ignore[attr-defined]

    tree.body = [node for node in tree.body if not is_unused(node)]


# ---------------------------------------------------------------------------------------------- layout


def _layout(tree: ast.Module) -> str:
    """Return the tree as text: double quotes, signatures folded to the line width."""
    lines = _double_quotes(ast.unparse(tree)).strip().splitlines()
    signatures = iter(_functions(tree))
    out: list[str] = []
    for line in lines:
        if re.match(r"\s*def \w+\(", line) and len(line) > WIDTH:
            out += _folded(line, next(signatures))
            continue
        if re.match(r"\s*def \w+\(", line):
            next(signatures)
        out.append(line)
    return "\n".join(out)


def _folded(line: str, node: ast.FunctionDef) -> Iterator[str]:
    """Yield a signature over several lines, filled to the width."""
    indent = " " * (len(line) - len(line.lstrip()))
    returns = "" if node.returns is None else f" -> {_double_quotes(ast.unparse(node.returns))}"
    yield f"{indent}def {node.name}("
    row = ""
    for arg in node.args.args:
        item = f"{_double_quotes(ast.unparse(arg))},"
        if row and len(indent) + 4 + len(row) + 1 + len(item) > WIDTH:
            yield f"{indent}    {row}"
            row = ""
        row = f"{row} {item}" if row else item
    yield f"{indent}    {row}"
    yield f"{indent}){returns}:"


def _double_quotes(text: str) -> str:
    """Strings as TVM and most formatters write them; `ast.unparse` leaves no comments, and no string over two lines."""
    return STRING.sub(lambda match: json.dumps(trees.literal(match[0])) if match[0][0] == "'" else match[0], text)


# How programs show themselves: as their script.


def is_program(value: Any) -> bool:
    """Return whether `value` is a function of stage I, or a module that contains one."""
    if isinstance(value, ir.IRModule):
        return any(is_program(func) for func in value.functions.values())
    return isinstance(value, tirx.PrimFunc) and bool(decode(value).axes)


def show_programs_as_scripts() -> None:
    """Let functions and modules of the dialect, and no others, be shown as their script.

    TVM's own representation spells out the nodes behind axes and iterations; ``func.script()`` still prints it.
    """
    for kind in (tirx.PrimFunc, ir.IRModule):
        kind.__repr__ = _as_script(kind.__repr__)


def _as_script(plain: Callable[[Any], str]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        try:
            return script(self) if is_program(self) else plain(self)
        except Exception:  # half-made nodes are shown, too
            return plain(self)

    return __repr__


__all__ = ["show_programs_as_scripts"]
