# SPDX-License-Identifier: Apache-2.0
"""How programs show themselves: as their script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, tirx

from sparsetir.ir import decode
from sparsetir.script.printer import script


def is_program(value: Any) -> bool:
    """Whether it is a function of stage I, or a module that holds one."""
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
