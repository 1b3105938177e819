# SPDX-License-Identifier: Apache-2.0
"""The vector registers of a target, which bound how much of a result a loop can hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tvm.target import codegen


@dataclass(frozen=True)
class Registers:
    """Number and width of a target's vector registers.

    Parameters
    ----------
    count : int
    bits : int

    Examples
    --------
    >>> Registers(16, 256).lanes(4, bits=32)
    16
    >>> Registers(32, 512).lanes(4, bits=32)
    64
    """

    count: int = 16
    bits: int = 256

    @classmethod
    def of(cls, target: Any) -> Registers:
        """Those of an LLVM target."""
        return _registers(target)

    def most_rows(self, vectors: int) -> int:
        """Rows of `vectors` registers each that fit together with the operand's and a factor."""
        return (self.count - 1) // vectors - 1

    def lanes(self, rows: int, *, bits: int) -> int:
        """Elements of each of `rows` rows that fit beside as many of the operand and one factor; a power of two."""
        held = 1
        while (rows + 1) * 2 * held + 1 <= self.count:
            held *= 2
        return held * self.bits // max(bits, 32)


@cache
def _registers(target: Any) -> Registers:
    for feature, found in (("avx512f", Registers(32, 512)), ("avx", Registers(16, 256)), ("neon", Registers(32, 128))):
        if codegen.target_has_features(feature, target):
            return found
    return Registers(16, 128)


__all__ = ["Registers"]
