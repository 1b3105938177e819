# SPDX-License-Identifier: Apache-2.0
"""Formats out of what they print."""

from __future__ import annotations

import ast
from typing import Any

from sparsetir.errors import ArgumentError, SparseTIRError
from sparsetir.formats.format import REGISTRY, Format, make
from sparsetir.script import trees


def parse(text: str) -> Format:
    """The format that prints as `text`.

    Parameters
    ----------
    text : str
        A call of a format's function with literals and formats as arguments: ``repr`` of a format.

    Raises
    ------
    ArgumentError
        The text is something else, or the arguments are none of the format's.

    Examples
    --------
    >>> parse("blocks(r=4, c=4, rest='dcsr')").r
    4
    """
    try:
        found = _value(trees.parse(text, mode="eval").body)
    except SparseTIRError:
        raise
    except (SyntaxError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError) as error:
        raise _no_format(text) from error
    if not isinstance(found, Format):
        raise _no_format(text)
    return found


def _no_format(text: Any) -> ArgumentError:
    shown = text if not isinstance(text, str) or len(text) < 200 else f"{text[:200]} ..."
    return ArgumentError(f"expected a format as it prints, such as 'bsr(r=4, c=4)'; found {shown!r}")


def _value(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name) or node.func.id not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        raise ArgumentError(f"expected one of the formats {known}; found {ast.unparse(node.func)!r}")
    if node.args:
        raise ArgumentError(f"expected named parameters, as {node.func.id} prints them; found {ast.unparse(node)!r}")
    named = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return make(node.func.id, **named)


__all__ = ["parse"]
