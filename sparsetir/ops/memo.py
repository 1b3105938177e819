# SPDX-License-Identifier: Apache-2.0
"""Ready programs are made once for each choice of dtypes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec

from tvm import tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.ir.rules import INDEX_DTYPES
from sparsetir.utils.arguments import VALUE_DTYPES, as_index, dtype_name, shown

P = ParamSpec("P")


def memoize_program(make: Callable[P, tirx.PrimFunc]) -> Callable[P, tirx.PrimFunc]:
    """Make each program once, however its dtypes are spelled: parsing takes as long as many calls of a kernel.

    Raises
    ------
    ArgumentError
        `make` would be given another dtype than those of the dialect.
    """
    signature, cached_make = inspect.signature(make), functools.lru_cache(maxsize=128, typed=True)(make)

    @functools.wraps(make)
    def program(*args: P.args, **kwargs: P.kwargs) -> tirx.PrimFunc:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for argument, value in bound.arguments.items():
            bound.arguments[argument] = _spelled(make.__name__, argument, value, signature.parameters[argument].default)
            if not isinstance(bound.arguments[argument], Hashable):
                fault = f"{argument}: expected {signature.parameters[argument].annotation}, got {type(value).__name__}."
                raise ArgumentTypeError(f"{fault} See help(sparsetir.ops.{make.__name__}).")
        return cached_make(*bound.args, **bound.kwargs)

    return program


def _spelled(name: str, argument: str, value: Any, default: Any) -> Any:
    """Normalize an argument of a ready program for the comparison of `memoize_program`."""
    dtypes = {"dtype": VALUE_DTYPES, "idtype": INDEX_DTYPES}.get(argument)
    if dtypes is None:
        return tuple(map(as_index, value)) if isinstance(value, tuple) else as_index(value)
    spelled = default if value is None else dtype_name(value)
    if spelled in dtypes:
        return spelled
    expected = f"{argument} is one of {', '.join(dtypes)}"
    if isinstance(value, str):
        raise ArgumentError(f"{expected}, found {shown(value)}")
    how = f"sparsetir.ops.{name} makes a program: build it, and call the kernel with arrays by name"
    raise ArgumentError(f"{expected}, found {spelled}; {how}")


__all__ = ["memoize_program"]
