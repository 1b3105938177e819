# SPDX-License-Identifier: Apache-2.0
"""Matrix units of this machine, by which tensors may be multiplied."""

from __future__ import annotations

from functools import cache

from sparsetir.codegen.target import native_target
from sparsetir.schedules import Registers


@cache
def has_bfloat16_unit() -> bool:
    """Return whether this machine multiplies bfloat16 numbers."""
    return "bf16" in Registers.of(native_target()).units


__all__ = ["has_bfloat16_unit"]
