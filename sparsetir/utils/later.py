# SPDX-License-Identifier: Apache-2.0
"""What lower packages need of higher ones: the package's own `__init__` says where it is, the first use imports it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

_places: dict[str, str] = {}


def provide(name: str, module: str) -> None:
    """Say which module has what lower ones know as `name`."""
    _places[name] = module


@cache
def provided(name: str) -> Any:
    """The module that has it."""
    return importlib.import_module(_places[name])


__all__ = ["provide", "provided"]
