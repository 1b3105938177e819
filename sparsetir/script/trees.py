# SPDX-License-Identifier: Apache-2.0
"""Small Python trees of the dialect's texts: make them, and ask what they are."""

from __future__ import annotations

import ast
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

# CPython 3.11 counts how deep it is in a tree once for all threads, and fails where they make trees at the same time.
ONE_AT_A_TIME = threading.RLock()


def parse(text: str, mode: str = "exec") -> Any:
    """As `ast.parse`, in any thread."""
    with ONE_AT_A_TIME:
        return ast.parse(text, mode=mode)


def literal(text: str) -> Any:
    """As `ast.literal_eval` of a text, in any thread."""
    return ast.literal_eval(parse(text, mode="eval"))


def name(identifier: str) -> ast.expr:
    """``identifier`` as a value."""
    return ast.Name(identifier, ast.Load())


def member(attribute: str) -> ast.expr:
    """``T.attribute``"""
    return ast.Attribute(name("T"), attribute, ast.Load())


def call(function: str, *args: ast.expr, **keywords: ast.expr) -> ast.Call:
    """``T.function(args, keyword=...)``"""
    return ast.Call(member(function), list(args), [ast.keyword(k, v) for k, v in keywords.items()])


def tuple_of(items: list[ast.expr]) -> ast.expr:
    """``(items)``"""
    return ast.Tuple(items, ast.Load())


def assign(target: str, value: ast.expr) -> ast.stmt:
    """``target = value``"""
    return ast.Assign([ast.Name(target, ast.Store())], value, lineno=0)


def called(node: Any) -> str:
    """``sp.coord`` for a call of ``T.sp.coord``; empty for anything else."""
    parts: list[str] = []
    function: Any = node.func if isinstance(node, ast.Call) else None
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    return ".".join(parts) if isinstance(function, ast.Name) and function.id == "T" else ""


def is_number(node: ast.expr) -> bool:
    """Whether it is a literal number, with a sign or without."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and not isinstance(inner.value, str)


def plain(node: ast.expr, dtype: str) -> ast.expr:
    """An expression without the conversion to `dtype` that the dialect adds by itself."""
    if not isinstance(node, ast.Call):
        return node
    function = called(node)
    if function == "Cast" and ast.unparse(node.args[0]) == repr(dtype):
        return node if is_number(node.args[1]) else node.args[1]  # a number would not be cast but converted
    return node.args[0] if function == dtype and is_number(node.args[0]) else node


def names(*nodes: ast.AST) -> Iterator[ast.Name]:
    """Every name below `nodes`, in any order, in a third of the time that `ast.walk` takes."""
    left: list[Any] = list(nodes)
    while left:
        node = left.pop()
        if isinstance(node, ast.Name):
            yield node
            continue
        for part in vars(node).values():
            if isinstance(part, list):
                left += [item for item in part if isinstance(item, ast.AST)]
            elif isinstance(part, ast.AST):
                left.append(part)


def names_in(*nodes: ast.AST) -> Counter[str]:
    """How often each name occurs below `nodes`."""
    return Counter(n.id for n in names(*nodes))


def target_of(statement: ast.stmt) -> str:
    """The name that a plain assignment gives a value to; empty for other statements."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""
