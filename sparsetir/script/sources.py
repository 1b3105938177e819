# SPDX-License-Identifier: Apache-2.0
"""Where the text of a decorated function is: in a file, in a cell, on the command line, or in what was typed.

Python keeps no text of what stands on its command line, comes from standard input or is typed (before Python 3.13).
What is found there instead is believed only if it compiles to the same code as the function.
"""

from __future__ import annotations
import __future__

import inspect
import os
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from tvm.script.parser.core.diagnostics import Source

from sparsetir.errors import ScriptError
from sparsetir.script.trees import ONE_AT_A_TIME

WHAT_TO_DO = (
    "put the program into a file, a notebook or an IPython session, or give its text to sparsetir.parse; "
    "a text for exec is first compiled with the path of its file: exec(compile(text, path, 'exec'))"
)
FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
MOST_TYPED = 2000  # lines that are looked at


class TextSource(Source):
    """A text as TVM's parser wants it, in any thread."""

    def as_ast(self) -> Any:
        """The text's tree."""
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
    """All lines of the file, the cell or the statement that `function` stands in.

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
    """Whether the text compiles to `code` at the same line."""
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
    """The program of ``python -c``."""
    for argument in sys.orig_argv[1:]:
        yield textwrap.dedent(argument)
        if argument.startswith("-"):
            yield argument.partition("c")[2]


def _standard_input() -> Iterator[str]:
    """What a file holds that the shell made standard input."""
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
    items = [readline.get_history_item(n) or "" for n in range(max(1, last - MOST_TYPED), last + 1)]
    return [f"{line}\n" for item in items for line in item.split("\n")]
