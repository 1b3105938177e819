# SPDX-License-Identifier: Apache-2.0
"""TVM's functions of expressions, such as ``T.exp``, with a check: many end the process where an argument is None."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm.tirx.script import parser as _tirx

from sparsetir.errors import VerifyError

MODULES = ("tvm.tirx.op", "tvm.ir.prim.op")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(value for key, value in kwargs.items() if key != "span")]
        if any(value is None for value in given):
            message = f"T.{name} takes numbers and expressions, found None"
            raise VerifyError(f"{message}; a function that is called here must return an expression")
        return function(*args, **kwargs)

    return checked


def _functions() -> dict[str, Callable[..., Any]]:
    named = {name: getattr(_tirx, name) for name in _tirx.__all__}
    of_values = [n for n, f in named.items() if getattr(f, "__module__", "") in MODULES]
    return {name: _checked(name, named[name]) for name in (*of_values, "cast", "min", "max")}


FUNCTIONS = _functions()
__all__ = ["FUNCTIONS"]
