# SPDX-License-Identifier: Apache-2.0
"""The parser: tirx's statement visitors under the dialect's own dispatch token.

``T`` is a superset of ``tvm.script.tirx``. Only two statements need more than tirx does: a function (it is
always an ``s_tir`` function and starts with no axes) and an error (its text must reach the user).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tvm.error import DiagnosticError
from tvm.script.parser._core import parse, utils
from tvm.script.parser.core import dispatch, doc
from tvm.tirx.script import parser as _tirx
from tvm.tirx.script.parser import *  # noqa: F403

from sparsetir.errors import ScriptError

from .. import builder as _builder
from ..builder import *  # noqa: F403

match_buffer = _builder.EXTRA["match_buffer"]
alloc_buffer = _builder.EXTRA["alloc_buffer"]
__all__ = [*_tirx.__all__, *_builder.__all__, "prim_func"]
TOKEN = "sparsetir"


def parse_text(program: Any, extra_vars: dict[str, Any], *, check_well_formed: bool = True) -> Any:
    """Parse a function object or a text; TVM's diagnostics come back as `ScriptError`."""
    try:
        return parse(program, extra_vars, check_well_formed=check_well_formed)
    except DiagnosticError as error:
        raise ScriptError(str(error)) from None


def prim_func(
    func: Callable[..., Any] | None = None,
    private: bool = False,
    check_well_formed: bool = True,
    s_tir: bool = True,
    persistent: bool = False,
) -> Any:
    """Decorate a Python function: its text becomes a stage-I ``tirx.PrimFunc``.

    Raises
    ------
    ScriptError
        The text breaks a rule of the dialect; the message quotes the line.
    """
    outer_stack = inspect.stack()

    def wrapper(function: Callable[..., Any]) -> Any:
        if utils.is_defined_in_class(outer_stack, function):
            return function
        extra = utils.inspect_function_capture(function)
        utils.resolve_closure_vars(function, extra, outer_stack)
        out = parse_text(function, extra, check_well_formed=False)
        if check_well_formed:
            _verify(out, function)
        out.__name__ = function.__name__
        return out

    if func is not None:
        return wrapper(func)
    wrapper.dispatch_token = TOKEN  # type: ignore[attr-defined]
    return wrapper


prim_func.dispatch_token = TOKEN  # type: ignore[attr-defined]


def _verify(func: Any, source: Callable[..., Any]) -> None:
    """Check the rules that need the whole function, and point at the line of the construct at fault."""
    from sparsetir.errors import VerifyError
    from sparsetir.verify import verify

    try:
        verify(func)
    except VerifyError as error:
        raise ScriptError(f"error: {error}{_locate(source, error.construct)}") from None


def _locate(source: Callable[..., Any], construct: str) -> str:
    lines, start = inspect.getsourcelines(source)
    quoted = [n for n, line in enumerate(lines) if f'"{construct}"' in line]
    named = [n for n, line in enumerate(lines) if line.strip().startswith((f"{construct} =", f"{construct}["))]
    hits = quoted or named
    if not construct or not hits:
        return ""
    number = start + hits[0]
    return f"\n --> {inspect.getsourcefile(source)}:{number}\n {number} |  {lines[hits[0]].rstrip()}"


def _force_s_tir(node: doc.FunctionDef) -> None:
    """Inject ``s_tir=True`` into the decorator: tirx's visitor reads it from the AST."""
    decorator = node.decorator_list[-1]
    where = (decorator.lineno, decorator.col_offset, decorator.end_lineno, decorator.end_col_offset)
    if not isinstance(decorator, doc.Call):
        decorator = doc.Call(decorator, [], [], *where)
        node.decorator_list[-1] = decorator
    if not any(k.arg == "s_tir" for k in decorator.keywords):
        decorator.keywords.append(doc.keyword("s_tir", doc.Constant(True, None, *where)))


@dispatch.register(token=TOKEN, type_name="FunctionDef")
def _visit_function_def(self: Any, node: doc.FunctionDef) -> None:
    _force_s_tir(node)
    with _builder.function_scope():
        dispatch.get("tirx", "FunctionDef")(self, node)


for _name in ("tvm_declare_function", "enter_token", "exit_token", "tvm_annotation"):
    dispatch.register(TOKEN, _name)(dispatch.get("tirx", _name))
