# SPDX-License-Identifier: Apache-2.0
"""Classes of programs that are known to go wrong, each until its cause is mended: they are drawn and left out."""

from __future__ import annotations

from collections.abc import Callable

from fuzzing.program import Program
from fuzzing.recipe import Recipe

KNOWN: dict[str, Callable[[Program, Recipe], bool]] = {}


def is_known(program: Program, recipe: Recipe) -> str | None:
    """The name of the class a case belongs to, if any."""
    return next((name for name, belongs in KNOWN.items() if belongs(program, recipe)), None)


__all__ = ["KNOWN", "is_known"]
