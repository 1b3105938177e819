# SPDX-License-Identifier: Apache-2.0
"""The parser: tirx's statement visitors under the dialect's own dispatch token.

``T`` is a superset of ``tvm.script.tirx``. Only two statements need more than tirx does: a function (it is
always an ``s_tir`` function and starts with no axes) and an error (its text must reach the user).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

from tvm.error import DiagnosticError
from tvm.script.ir_builder import IRBuilder
from tvm.script.parser._core import utils
from tvm.script.parser.core import dispatch, doc
from tvm.script.parser.core.diagnostics import Source
from tvm.script.parser.core.error import ParserError
from tvm.script.parser.core.parser import Parser
from tvm.tirx.script import parser as _tirx
from tvm.tirx.script.parser import *  # noqa: F403
from tvm.tirx.script.parser.parser import find_decorator_annotation

from sparsetir.errors import ArgumentTypeError, ScriptError
from sparsetir.op import AXIS_NAMES

from .. import builder as _builder
from ..builder import *  # noqa: F403
from ..sources import FunctionSource

match_buffer = _builder.EXTRA["match_buffer"]
alloc_buffer = _builder.EXTRA["alloc_buffer"]
float64 = _builder.EXTRA["float64"]
iter = _builder.EXTRA["iter"]  # upstream's names of sp_iter and sp_iter_attr
iter_attr = _builder.EXTRA["iter_attr"]
__all__ = [*_tirx.__all__, *_builder.__all__, "iter", "iter_attr", "prim_func"]
TOKEN = "sparsetir"


class LocatedScriptError(ScriptError, DiagnosticError):
    """A `ScriptError` on its way through TVM's parser, which hands on a DiagnosticError as it is."""


def parse_text(text: str, names: dict[str, Any]) -> Any:
    """Parse a text; TVM's diagnostics come back as `ScriptError`."""
    return _parse(Source(text), {}, names)


def parse_function(function: Callable[..., Any], names: dict[str, Any]) -> Any:
    """Parse the text of a Python function; TVM's diagnostics come back as `ScriptError`."""
    return _parse(FunctionSource(function), {function.__name__: function.__annotations__}, names)


def _parse(source: Source, annotations: dict[str, Any], names: dict[str, Any]) -> Any:
    """As TVM's `parse`, without its check: `_visit_function_def` verifies.

    TVM refuses an sp_iter that uses an outer loop's variable.
    """
    parser = Parser(source, annotations)
    try:
        with IRBuilder() as made:
            try:
                parser.parse(extra_vars=names)
            except ParserError as error:
                parser.report_error(error.node, error.args[0])
        return made.get()
    except DiagnosticError as error:
        raise ScriptError(explain(str(error))) from None


def frames_above(frame: FrameType | None) -> list[inspect.FrameInfo]:
    """A frame and those above it as TVM's parser wants them: of the third it reads the line.

    `inspect.stack` reads a line of each, which takes longer than parsing where there are many.
    """
    found: list[inspect.FrameInfo] = []
    while frame is not None:
        lines = inspect.getframeinfo(frame, 1).code_context if len(found) == 2 else None
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, lines, 0))
        frame = frame.f_back
    return found


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

    Notes
    -----
    In a class under ``@I.ir_module`` TVM checks the whole module as well, and refuses an sp_iter that uses the
    variable of an ordinary loop around it. Write ``@I.ir_module(check_well_formed=False)`` there: every function of
    the dialect is still verified.
    """
    outer_stack = frames_above(inspect.currentframe())

    def wrapper(function: Callable[..., Any]) -> Any:
        if not isinstance(function, FunctionType):
            raise ArgumentTypeError(f"T.prim_func decorates a function, found {type(function).__name__}")
        if utils.is_defined_in_class(outer_stack, function):
            return function
        extra = utils.inspect_function_capture(function)
        utils.resolve_closure_vars(function, extra, outer_stack)
        out = parse_function(function, extra)
        out.__name__ = function.__name__
        return out

    if func is not None:
        return wrapper(func)
    wrapper.dispatch_token = TOKEN  # type: ignore[attr-defined]
    return wrapper


prim_func.dispatch_token = TOKEN  # type: ignore[attr-defined]

# ---------------------------------------------------------------------------------------------- messages

# What TVM says -> what a user can act on.
_HINTS = [
    (
        r"Undefined variable: (\w+)",
        r"\1 is not defined here: an axis or a buffer is declared before it is used, "
        "an iteration variable lives inside its own sp_iter only",
    ),
    (
        r"too many values to unpack \(expected (\d+)\)",
        r"expected one name for each value, found \1 name(s) for more values; "
        "an sp_iter gives one variable per axis: `as [i, j]` for two axes",
    ),
    (
        r"not enough values to unpack \(expected (\d+), got (\d+)\)",
        r"expected one name for each of \2 value(s), found \1 names; "
        "an sp_iter gives one variable per axis: `as [i, j]` for two axes",
    ),
    (
        r".*BufferVar (\w+) is (\d+)-dimensional, cannot be indexed with the (\d+)-dimensional.*",
        r"expected one subscript for each of the \2 dimensions of \1, found \3",
    ),
    (
        r".*\((\d+) vs\. (\d+)\) : Too many indices for a \d+-dimensional buffer",
        r"expected one subscript for each of the \2 dimensions of the buffer, found \1",
    ),
    (
        r"Mismatched type on argument #0 when calling: `\S*BufferStore\(.*",
        "only a buffer can be stored to, found another kind of name; "
        "a T.handle parameter or an axis becomes one by T.match_sparse_buffer",
    ),
    (
        r"Mismatched type on argument #1 when calling: `\S*BufferStore\(.* got `ir.TensorRegion`"
        r"|TensorRegion is not a primitive operand.*",
        "a buffer is read with fewer subscripts than it has dimensions; give one subscript per axis",
    ),
    (
        r"Mismatched type on argument #1 when calling: `\S*BufferStore\(.* got `(?:ffi\.)?(\w+)`",
        r"the value stored must be a number or an expression, found \1",
    ),
    (
        r"Mismatched type on argument #2 when calling: `\S*BufferStore\(.*",
        "a subscript must be an integer expression, found a list; "
        "an sp_iter over one axis is written `as [i]`, not `as i`",
    ),
    (
        r"T\.init must be called at the top of a T\.sblock\(\).*",
        "T.init belongs at the top of an sp_iter (or of a T.sblock), found it outside of one;"
        " a condition stands inside",
    ),
    (
        r"(?:ValueError: )?Unexpected type for TIR Arg: ffi.String",
        "the annotation of a parameter cannot be evaluated; "
        "if it quotes a size, no Python variable may have the same name",
    ),
    (
        r"T\.match_buffer must be called at the top of a PrimFunc.*",
        "a handle becomes a buffer at the top of the function; "
        "move its declaration before any T.decl_buffer, loop or block, or declare the parameter as T.Buffer",
    ),
    (
        r"Expect the for loop to be one of the following: (.*)",
        r"a for loop takes one of \1; a sparse iteration is a `with` statement: `with T.sp_iter(...) as [i, j]:`",
    ),
]


def explain(diagnostic: str) -> str:
    """TVM's diagnostic with its first line in the words of the dialect."""
    first, newline, rest = diagnostic.partition("\n")
    message = first.removeprefix("error: ")
    for pattern, sentence in _HINTS:
        if re.fullmatch(pattern, message):
            return f"error: {re.sub(pattern, sentence, message)}{newline}{rest}"
    unknown = re.fullmatch(r"module 'sparsetir.script(?:\.parser)?' has no attribute '(\w+)'", message)
    if unknown is None:
        return diagnostic
    close = difflib.get_close_matches(unknown[1], __all__, n=1)
    return f"error: T has no name {unknown[1]}{f'; did you mean T.{close[0]}?' if close else ''}{newline}{rest}"


def _quote(source: Any, span: Any) -> str:
    """The first line of `span`, quoted as TVM's diagnostics do."""
    lines = source.full_source.splitlines()
    if span is None or not 0 < span.line <= len(lines):
        return ""
    line = lines[span.line - 1].rstrip()
    end = span.end_column if span.end_line == span.line else len(line) + 1
    mark = " " * (span.column - 1) + "^" * (end - span.column)
    margin = " " * len(f" {span.line} ")
    where = f"{source.source_name}:{span.line}:{span.column}"
    return f"\n --> {where}\n{margin}|  \n {span.line} |  {line}\n{margin}|  {mark}"


# ---------------------------------------------------------------------------------------------- visitors


def _force_s_tir(node: doc.FunctionDef) -> None:
    """Inject ``s_tir=True`` into the decorator: tirx's visitor reads it from the AST."""
    decorator = node.decorator_list[-1]
    where = (decorator.lineno, decorator.col_offset, decorator.end_lineno, decorator.end_col_offset)
    if not isinstance(decorator, doc.Call):
        decorator = doc.Call(decorator, [], [], *where)
        node.decorator_list[-1] = decorator
    if isinstance(decorator.func, doc.Name):  # imported by its own name
        decorator.func = doc.Attribute(doc.Name("T", doc.Load(), *where), "prim_func", doc.Load(), *where)
    if not any(k.arg == "s_tir" for k in decorator.keywords):
        decorator.keywords.append(doc.keyword("s_tir", doc.Constant(True, None, *where)))


def _is_raw_axis(statement: doc.stmt) -> bool:
    """Whether it is ``I: T.let[T.int32] = T.sp.dense_fixed(m)``, as TVM's own printer shows an axis."""
    if not isinstance(statement, doc.AnnAssign) or not isinstance(statement.value, doc.Call):
        return False
    called = statement.value.func
    named = isinstance(called, doc.Attribute) and called.attr in AXIS_NAMES
    return named and isinstance(called.value, doc.Attribute) and called.value.attr == "sp"


def _read_raw_axes(node: doc.FunctionDef) -> None:
    """Turn raw axes into calls of ``T.sp.axis``: the names of the sugar have other arguments."""
    for n, statement in enumerate(node.body):
        if not _is_raw_axis(statement):
            continue
        where = (statement.lineno, statement.col_offset, statement.end_lineno, statement.end_col_offset)
        call = statement.value
        call.args.insert(0, doc.Constant(call.func.attr, None, *where))
        call.func.attr = "axis"
        node.body[n] = doc.Assign([statement.target], call, *where)


def _below(node: Any) -> Iterator[Any]:
    """The node and everything below it."""
    yield node
    for name in getattr(type(node), "_FIELDS", []):
        value = getattr(node, name)
        for child in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(child, doc.AST):
                yield from _below(child)


def _quote_casts(node: doc.FunctionDef) -> None:
    """Quote ``T.Cast("int64", n)`` in a buffer's shape: TVM would take the inner string for a size."""
    for arg in node.args.args:
        for shape in [n for n in _below(arg.annotation) if isinstance(n, doc.Tuple)]:
            for n, extent in enumerate(shape.elts):
                texts = [c for c in _below(extent) if isinstance(c, doc.Constant) and isinstance(c.value, str)]
                if texts and not isinstance(extent, doc.Constant):
                    where = (extent.lineno, extent.col_offset, extent.end_lineno, extent.end_col_offset)
                    shape.elts[n] = doc.Constant(ast.unparse(doc.from_doc(extent)), None, *where)


def _parsed_function(name: str) -> Any:
    """The function that has just been parsed, alone or into a module."""
    frames = IRBuilder.current().frames
    if not frames:
        return IRBuilder.current().get()
    module = frames[-1]
    return module.functions[module.global_vars[name]]


def _verify(self: Any, node: doc.FunctionDef) -> None:
    """Check the rules that need the whole function, and point at the line of the statement at fault."""
    from sparsetir.verify import check

    name = node.name
    for problem in check(_parsed_function(name)):
        message = f"error: {problem.message}{_quote(self.diag.source, problem.span)}"
        raise LocatedScriptError(message)


@dispatch.register(token=TOKEN, type_name="FunctionDef")
def _visit_function_def(self: Any, node: doc.FunctionDef) -> None:
    _force_s_tir(node)
    _read_raw_axes(node)
    _quote_casts(node)
    try:
        with _builder.function_scope():
            dispatch.get("tirx", "FunctionDef")(self, node)
    except DiagnosticError as error:
        raise LocatedScriptError(explain(str(error))) from None
    if find_decorator_annotation(node, "check_well_formed", default=True):
        _verify(self, node)


@dispatch.register(token=TOKEN, type_name="tvm_declare_function")
def _visit_declare_function(self: Any, node: doc.FunctionDef) -> Any:
    _quote_casts(node)
    return dispatch.get("tirx", "tvm_declare_function")(self, node)


for _name in ("enter_token", "exit_token", "tvm_annotation"):
    dispatch.register(TOKEN, _name)(dispatch.get("tirx", _name))
