# SPDX-License-Identifier: Apache-2.0
"""Parser of the dialect: tirx's statement visitors under its own dispatch token, source text, and diagnostics."""

from __future__ import annotations
import __future__

import ast
import contextlib
import difflib
import inspect
import linecache
import os
import re
import stat
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType
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
from sparsetir.ir.dialect import AXIS_NAMES
from sparsetir.script import builder as _builder
from sparsetir.script.builder import *  # noqa: F403
from sparsetir.script.builder import FUNCTIONS
from sparsetir.script.exact import evaluate as _evaluate_exactly  # T.evaluate is TVM's
from sparsetir.utils.caches import ForkLock
from sparsetir.utils.memory import uncollected

# Small Python trees of the dialect's texts: make them, and ask what they are.


# CPython 3.11 counts how deep it is in a tree once for all threads, and fails where they make trees at the same time.
ONE_AT_A_TIME = ForkLock()


def parse(text: str, mode: str = "exec") -> Any:
    """As `ast.parse`, in any thread."""
    with ONE_AT_A_TIME:
        return ast.parse(text, mode=mode)


def literal(text: str) -> Any:
    """As `ast.literal_eval` of a text, in any thread."""
    return ast.literal_eval(parse(text, mode="eval"))


def name(identifier: str) -> ast.expr:
    """Return the value of ``identifier``."""
    return ast.Name(identifier, ast.Load())


def member(attribute: str) -> ast.expr:
    """Return ``T.attribute``."""
    return ast.Attribute(name("T"), attribute, ast.Load())


def call(function: str, *args: ast.expr, **keywords: ast.expr) -> ast.Call:
    """Return ``T.function(args, keyword=...)``."""
    return ast.Call(member(function), list(args), [ast.keyword(k, v) for k, v in keywords.items()])


def tuple_of(items: list[ast.expr]) -> ast.expr:
    """Return ``(items)``."""
    return ast.Tuple(items, ast.Load())


def assign(target: str, value: ast.expr) -> ast.stmt:
    """Return ``target = value``."""
    return ast.Assign([ast.Name(target, ast.Store())], value, lineno=0)


def called(node: Any) -> str:
    """Return ``sp.coord`` for a call of ``T.sp.coord``; empty for anything else."""
    parts: list[str] = []
    function: Any = node.func if isinstance(node, ast.Call) else None
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    return ".".join(parts) if isinstance(function, ast.Name) and function.id == "T" else ""


def is_number(node: ast.expr) -> bool:
    """Return whether `node` is a literal number, signed or not."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and not isinstance(inner.value, str)


def plain(node: ast.expr, dtype: str) -> ast.expr:
    """Return an expression without the conversion to `dtype` that the dialect adds by itself."""
    if not isinstance(node, ast.Call):
        return node
    function = called(node)
    if function == "Cast" and ast.unparse(node.args[0]) == repr(dtype):
        return node if is_number(node.args[1]) else node.args[1]  # a number would not be cast but converted
    return node.args[0] if function == dtype and is_number(node.args[0]) else node


def names(*nodes: ast.AST) -> Iterator[ast.Name]:
    """Yield every name below `nodes`, in any order, in a third of the time that `ast.walk` takes."""
    stack: list[Any] = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name):
            yield node
            continue
        for part in vars(node).values():
            if isinstance(part, list):
                stack += [item for item in part if isinstance(item, ast.AST)]
            elif isinstance(part, ast.AST):
                stack.append(part)


def names_in(*nodes: ast.AST) -> Counter[str]:
    """Count the occurrences of each name below `nodes`."""
    return Counter(n.id for n in names(*nodes))


def target_of(statement: ast.stmt) -> str:
    """Return the name that a plain assignment gives a value to; empty for other statements."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


# Where the text of a decorated function is: in a file, in a cell, on the command line, or in what was typed.
#
# Python keeps no text of what stands on its command line, comes from standard input or is typed (before Python 3.13).
# What is found there instead is believed only if it compiles to the same code as the function.


WHAT_TO_DO = (
    "put the program into a file, a notebook or an IPython session, or give its text to sparsetir.parse; "
    "a text for exec is first compiled with the path of its file: exec(compile(text, path, 'exec'))"
)
FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
MOST_TYPED = 2000  # lines that are inspected


class TextSource(Source):
    """A text as TVM's parser wants it, in any thread."""

    def as_ast(self) -> Any:
        """Return the text's tree."""
        with ONE_AT_A_TIME:
            return super().as_ast()


class FunctionSource(TextSource):
    """The text of a function within that of its file, as TVM's parser wants it.

    TVM's own takes the function for the whole file where the module is not among those that are imported, and quotes
    other lines than it names.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        lines = lines_of(function)
        first = function.__code__.co_firstlineno
        block = inspect.getblock(lines[first - 1 :])
        self.source_name = function.__code__.co_filename
        self.start_line = first
        self.start_column = len(block[0]) - len(block[0].lstrip())
        self.source = "".join(line[self.start_column :].rstrip() + "\n" for line in block)
        self.full_source = "".join(lines)


def lines_of(function: Callable[..., Any]) -> list[str]:
    """Return all lines of the file, the cell or the statement that contains `function`.

    Raises
    ------
    ScriptError
        They are nowhere to be found.
    """
    try:
        return inspect.findsource(function)[0]
    except OSError:
        pass
    for text in [*_command_line(), *_standard_input(), *_typed(function.__code__)]:
        if _is_text_of(text, function.__code__):
            return text.splitlines(keepends=True)
    name, file = function.__name__, function.__code__.co_filename
    raise ScriptError(f"the text of {name} is not to be found, as Python keeps none of {file}: {WHAT_TO_DO}")


def _is_text_of(text: str, code: CodeType) -> bool:
    """Return whether the text compiles to `code` at the same line."""
    try:
        whole = compile(text, code.co_filename, "exec", flags=code.co_flags & FUTURES, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return code in _codes(whole)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)


def _command_line() -> Iterator[str]:
    """Yield the program of ``python -c``."""
    for argument in sys.orig_argv[1:]:
        yield textwrap.dedent(argument)
        if argument.startswith("-"):
            yield argument.partition("c")[2]


def _standard_input() -> Iterator[str]:
    """Yield the text of standard input if the shell redirected it from a file."""
    try:
        status = os.fstat(0)
        if stat.S_ISREG(status.st_mode):
            yield os.pread(0, status.st_size, 0).decode()
    except (OSError, AttributeError, UnicodeDecodeError):
        return


def _typed(code: CodeType) -> Iterator[str]:
    """Statements at the prompt, latest first, in which `code` may stand: their first line has number 1."""
    history = _history()
    for start in reversed(range(len(history))):
        decorator = start + code.co_firstlineno - 1
        if decorator < len(history) and history[decorator].lstrip().startswith("@"):
            yield "".join(inspect.getblock(history[start:]))


def _history() -> list[str]:
    readline = sys.modules.get("readline")
    if readline is None:
        return []
    last = readline.get_current_history_length()
    items = [readline.get_history_item(n) or "" for n in range(1, last + 1)[-MOST_TYPED:]]
    return [f"{line}\n" for item in items for line in item.split("\n")]


# TVM's diagnostics of a script in the words of the dialect.


# What TVM says -> what a user can act on.
_HINTS = [
    (
        r"Undefined variable: (\w+)",
        r"\1 is not defined here: an axis or a buffer is declared before it is used, "
        "an iteration variable lives inside its own sp_iter only; several are a list, `as [i, j]` with brackets",
    ),
    (
        r"too many values to unpack \(expected (\d+)\)",
        r"expected one name for each value, got \1 name(s) for more values; "
        "an sp_iter gives one variable per axis: `as [i, j]` for two axes",
    ),
    (
        r"not enough values to unpack \(expected (\d+), got (\d+)\)",
        r"expected one name for each of \2 value(s), got \1 names; "
        "an sp_iter gives one variable per axis: `as [i, j]` for two axes",
    ),
    (
        r".*BufferVar (\w+) is (\d+)-dimensional, cannot be indexed with the (\d+)-dimensional.*",
        r"expected one subscript for each of the \2 dimensions of \1, got \3",
    ),
    (
        r".*\((\d+) vs\. (\d+)\) : Too many indices for a \d+-dimensional buffer",
        r"expected one subscript for each of the \2 dimensions of the buffer, got \1",
    ),
    (
        r"Mismatched type on argument #0 when calling: `\S*BufferStore\(.*",
        "only a buffer can be stored to, got another kind of name; "
        "a T.handle parameter or an axis becomes one by T.match_sparse_buffer",
    ),
    (
        r"Mismatched type on argument #1 when calling: `\S*BufferStore\(.* got `ir.TensorRegion`"
        r"|TensorRegion is not a primitive operand.*",
        "a buffer is read with fewer subscripts than it has dimensions, or with a slice `:`; "
        "give one subscript per axis, an iteration variable or a number",
    ),
    (
        r"Mismatched type on argument #1 when calling: `\S*BufferStore\(.* got `(?:ffi\.)?(\w+)`",
        r"the value stored must be a number or an expression, got \1",
    ),
    (
        r"Mismatched type on argument #2 when calling: `\S*BufferStore\(.*",
        "a subscript must be an integer expression, got a list; "
        "an sp_iter over one axis is written `as [i]`, not `as i`",
    ),
    (
        r"T\.init must be called at the top of a T\.sblock\(\).*",
        "T.init belongs at the top of an sp_iter (or of a T.sblock), got a call outside of one; "
        "a condition stands inside",
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
        r"Mismatched type on argument #1 when calling: `script\.ir_builder\.tirx\.Arg\(.*",
        "a parameter is annotated with T.handle, T.Buffer, or the type of a size or number such as T.int32",
    ),
    (
        r"Cannot use and / or / not operator to Expr, hint: .*",
        "Python's max, min, if, and, or and not would have to know the value now; "
        "write T.max, T.min, T.if_then_else, T.And, T.Or or T.Not",
    ),
    (
        r".*\((?:a|b|condition)_ty\.MatchesCode\(DLDataTypeCode::kDLBool\)\) is false: .*",
        "and, or, not and T.Select take conditions, got a number; compare it first, as by a > 0",
    ),
    (
        r"loop of ufunc does not support argument \d of type \w+ which has no callable (\w+) method",
        r"numpy's functions take numbers, got an expression; write T.\1",
    ),
    (
        r"must be real number, not \w+",
        "Python's functions of numbers take numbers, got an expression; write T.exp, T.sqrt and so on",
    ),
    (
        r"bad operand type for abs\(\): '\w+'",
        "Python's abs takes numbers, got an expression; write T.abs",
    ),
    (
        r"type \w+ doesn't define __round__ method",
        "Python's round takes numbers, got an expression; write T.round",
    ),
    (
        r"(float|int)\(\) argument must be a string.*",
        r"Python's \1 takes numbers, got an expression; convert it by T.float32, T.int32 and so on",
    ),
    (
        r"unsupported operand type\(s\) for \*\* or pow\(\): .*|.*power only applies to float",
        "powers are T.pow(a, b), of float16, float32 or float64; a square is a * a",
    ),
    (
        r".*a\.ty\(\)\.MatchesCode\(DLDataTypeCode::kDLInt, DLDataTypeCode::kDLUInt\)\) is false: (.*)",
        r"//, % and the like take integers, got \1; of floats, T.floor(a / b) rounds a quotient",
    ),
    (
        r"TVM supports multiple types of integer divisions.*",
        "/ divides floats; of integers write a // b, or convert them first: T.float32(a) / T.float32(b)",
    ),
    (
        r".*: Type ir\.(?:PointerType|PrimType) does not support subscript",
        "a handle, a size or a number has no elements: an index array is passed whole, as in (indptr, indices), "
        "and is read in a body once it is declared as T.Buffer",
    ),
    (
        r"(?:.*: )?(\S+) exceeds range of bool",
        r"a bool holds True or False, got the number \1; write T.bool(True), or compare it, as by x != 0",
    ),
    (
        r"where\(\) takes 1 positional argument but \d were given",
        "a choice of two values is T.if_then_else(condition, a, b)",
    ),
    (
        r".*if_then_else only accept the condition.*",
        "a condition must be a comparison, got another value; compare it, as by a > 0",
    ),
    (
        r"Mismatched type on argument #\d when calling: .* but got `ir\.Var`.*",
        "a whole buffer or a handle stands where a number is expected; give one subscript for each axis",
    ),
    (
        r"Check failed: \(.*\) is false: (\S.*)",
        r"\1",
    ),
    (
        r"",
        "a program returns nothing: its results are the buffers that it stores to",
    ),
    (
        r"Expect the for loop to be one of the following: (.*)",
        r"a for loop takes one of \1; a sparse iteration is a `with` statement: `with T.sp_iter(...) as [i, j]:`",
    ),
]

# What other libraries and versions call something -> what it is here.
_OTHER_NAMES = {
    "maximum": "T.max(a, b)",
    "minimum": "T.min(a, b)",
    "power": "T.pow(a, b)",
    "relu": "T.max(a, 0)",
    "clip": "T.min(T.max(a, low), high)",
    "sum": "an iteration with the letter R and `C[i] = C[i] + ...`",
    "where": "T.if_then_else(condition, a, b)",
    "ragged": "T.dense_variable(parent, (length, nnz), indptr)",
    "dynamic": "T.dense_variable(parent, (length, nnz), indptr)",
    "dense": "T.dense_fixed(length)",
    "compressed": "T.sparse_variable(parent, (length, nnz), (indptr, indices))",
    "axis": "T.dense_fixed, T.dense_variable, T.sparse_fixed, T.sparse_variable, T.singleton or T.sparse_assembled",
    "block": "T.sblock",
}
_UNKNOWN = re.compile(r"(?:module 'sparsetir\.script(?:\.parser)?'|type object 'sp') has no attribute '(\w+)'")


def _explain(diagnostic: str, names: Sequence[str]) -> str:
    """Translate the first line of TVM's diagnostic to the words of the dialect; `names` are those of its module."""
    first, newline, remainder = diagnostic.partition("\n")
    message = first.removeprefix("error: ")
    for pattern, sentence in _HINTS:
        if re.fullmatch(pattern, message):
            return f"error: {re.sub(pattern, sentence, message)}{newline}{remainder}"
    unknown = _UNKNOWN.fullmatch(message)
    if unknown is None:
        return diagnostic
    return f"error: T has no name {unknown[1]}{_instead(unknown[1], names)}{newline}{remainder}"


def _instead(name: str, names: Sequence[str]) -> str:
    if name in _OTHER_NAMES:
        return f"; write {_OTHER_NAMES[name]}"
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean T.{close[0]}?" if close else ""


# The parser: tirx's statement visitors under the dialect's own dispatch token.
#
# ``T`` is a superset of ``tvm.script.tirx``. Only two statements need more than tirx does: a function (it is
# always an ``s_tir`` function and starts with no axes) and an error (its text must reach the user).


globals().update(FUNCTIONS)
match_buffer = _builder.EXTRA["match_buffer"]
alloc_buffer = _builder.EXTRA["alloc_buffer"]
float64 = _builder.EXTRA["float64"]
iter = _builder.EXTRA["iter"]  # upstream's names of sp_iter and sp_iter_attr
iter_attr = _builder.EXTRA["iter_attr"]
__all__ = [*_tirx.__all__, *_builder.__all__, "iter", "iter_attr", "prim_func"]
TOKEN = "sparsetir"
STORED = "__stored__"


class LocatedScriptError(ScriptError, DiagnosticError):
    """A `ScriptError` on its way through TVM's parser, which hands on a DiagnosticError as it is."""


def parse_text(text: str, names: dict[str, Any]) -> Any:
    """Parse a text; TVM's diagnostics come back as `ScriptError`."""
    return _parse(TextSource(text), {}, names)


def parse_function(function: Callable[..., Any], names: dict[str, Any]) -> Any:
    """Parse the text of a Python function; TVM's diagnostics come back as `ScriptError`."""
    return _parse(FunctionSource(function), {function.__name__: function.__annotations__}, names)


@uncollected
def _parse(source: TextSource, annotations: dict[str, Any], names: dict[str, Any]) -> Any:
    """As TVM's `parse`, without its check: `_visit_function_def` verifies.

    TVM refuses an sp_iter that uses an outer loop's variable.
    """
    parser = Parser(source, annotations)
    try:
        with IRBuilder() as builder:
            try:
                parser.parse(extra_vars=names)
            except ParserError as error:
                parser.report_error(error.node, error.args[0])
        return builder.get()
    except DiagnosticError as error:
        raise ScriptError(_explain(str(error), __all__)) from None


def frames_above(frame: FrameType | None) -> list[inspect.FrameInfo]:
    """Return a frame and those above it in the form of TVM's parser, which reads the line of the third.

    `inspect.stack` reads a line of each, and looks for the module of each among all, which takes longer than parsing.
    """
    frames: list[inspect.FrameInfo] = []
    while frame is not None:
        code, lines = frame.f_code, None
        if len(frames) == 2:
            linecache.checkcache(code.co_filename)
            line = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals)
            lines = [line] if line else None
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, lines, 0))
        frame = frame.f_back
    return frames


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
            raise ArgumentTypeError(f"T.prim_func decorates a function, got {type(function).__name__}")
        if utils.is_defined_in_class(outer_stack, function):
            return function
        extra = utils.inspect_function_capture(function)
        with ONE_AT_A_TIME:  # it makes trees of annotations
            utils.resolve_closure_vars(function, extra, outer_stack)
        out = parse_function(function, extra)
        out.__name__ = function.__name__
        return out

    if func is not None:
        return wrapper(func)
    wrapper.dispatch_token = TOKEN  # type: ignore[attr-defined]
    return wrapper


prim_func.dispatch_token = TOKEN  # type: ignore[attr-defined]

# ---------------------------------------------------------------------------------------------- places


def _quote(source: Any, span: Any) -> str:
    """Return the first line of `span`, quoted as TVM's diagnostics do."""
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
    """Return whether a statement is ``I: T.let[T.int32] = T.sp.dense_fixed(m)``, the form of TVM's printer."""
    if not isinstance(statement, doc.AnnAssign) or not isinstance(statement.value, doc.Call):
        return False
    called = statement.value.func
    is_axis_name = isinstance(called, doc.Attribute) and called.attr in AXIS_NAMES
    return is_axis_name and isinstance(called.value, doc.Attribute) and called.value.attr == "sp"


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
    """Yield the node and everything below it."""
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


def _check_parameters(self: Any, node: doc.FunctionDef) -> None:
    """Refuse parameters that are annotated with a type of Python: TVM's message names no place."""
    for arg in node.args.args:
        type_name = getattr(arg.annotation, "id", None)
        if type_name in ("int", "float", "bool", "str"):
            meant = {"int": "T.int32 or T.int64", "float": "T.float32"}.get(type_name, "T.handle or T.Buffer")
            message = f"parameter {arg.arg} is annotated with {type_name}; write {arg.arg}: {meant}"
            self.report_error(arg.annotation, message)


def _check_stores(self: Any, node: doc.FunctionDef) -> None:
    """Pass every stored value through `stored`, because TVM ends the process for None."""
    self.var_table.add(STORED, _builder.stored)
    for statement in _below(node):
        targets = statement.targets if isinstance(statement, doc.Assign) else []
        if not any(isinstance(target, doc.Subscript) for target in targets):
            continue
        value = statement.value
        where = (value.lineno, value.col_offset, value.end_lineno, value.end_col_offset)
        statement.value = doc.Call(doc.Name(STORED, doc.Load(), *where), [value], [], *where)


def _parsed_function(name: str) -> Any:
    """Return the function that has just been parsed, alone or into a module."""
    frames = IRBuilder.current().frames
    if not frames:
        return IRBuilder.current().get()
    module = frames[-1]
    return module.functions[module.global_vars[name]]


def _verify(self: Any, node: doc.FunctionDef) -> None:
    """Check the rules that need the whole function, and point at the line of the statement at fault."""
    from sparsetir.ir.verifier import check

    name = node.name
    for problem in check(_parsed_function(name)):
        message = f"error: {problem.message}{_quote(self.diag.source, problem.span)}"
        raise LocatedScriptError(message)


@contextlib.contextmanager
def _exact_floats(parser: Parser) -> Iterator[None]:
    """Evaluate expressions of one function by the dialect's own evaluator: other functions of a module keep TVM's."""
    parser.eval_expr = partial(_evaluate_exactly, parser)
    try:
        yield
    finally:
        del parser.eval_expr


@dispatch.register(token=TOKEN, type_name="FunctionDef")
def _visit_function_def(self: Any, node: doc.FunctionDef) -> None:
    _force_s_tir(node)
    _read_raw_axes(node)
    _quote_casts(node)
    try:
        with self.var_table.with_frame(), _builder.function_scope(), _exact_floats(self):
            _check_parameters(self, node)
            _check_stores(self, node)
            dispatch.get("tirx", "FunctionDef")(self, node)
    except DiagnosticError as error:
        raise LocatedScriptError(_explain(str(error), __all__)) from None
    if find_decorator_annotation(node, "check_well_formed", default=True):
        _verify(self, node)


@dispatch.register(token=TOKEN, type_name="tvm_declare_function")
def _visit_declare_function(self: Any, node: doc.FunctionDef) -> Any:
    _quote_casts(node)
    return dispatch.get("tirx", "tvm_declare_function")(self, node)


for _name in ("enter_token", "exit_token", "tvm_annotation"):
    dispatch.register(TOKEN, _name)(dispatch.get("tirx", _name))
