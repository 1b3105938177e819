# SPDX-License-Identifier: Apache-2.0
"""Vector registers of a target, which bound the register tile of a loop, and what LLVM makes vectors of by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tvm.target import codegen

from sparsetir.intrin.emulation import is_emulated

# Kinds of matrix units and the features that they need.
UNITS = {
    "bf16": ("avx512bf16", "avx512bw", "avx512vl"),
    "int8": ("avx512vnni", "avx512bw", "avx512vl"),
    "tile_bf16": ("amx-tile", "amx-bf16", "avx512bw", "avx512vl"),
    "tile_int8": ("amx-tile", "amx-int8", "avx512bw", "avx512vl"),
}
# Intel's processors take four times as long for vdpbf16ps as for a multiply-add of float32, which is half its products.
WIDENING, WIDENING_FEATURES = "widening_bf16", ("amx-bf16", "avx512bf16", "avx512bw", "avx512vl")
REASSOCIATE = "fast-math-reassoc"  # the attribute of targets for programs whose sums may be taken in another order
NO_GATHER = "prefer-no-gather"  # the feature of those whose vector gathers are slow
FAST_GATHER = "fast-gather"  # without it, or AVX-512, LLVM splits vector gathers into loads


@dataclass(frozen=True)
class Registers:
    """Number and width of a target's vector registers.

    Parameters
    ----------
    count : int
    bits : int
    units : frozenset of str
        Kinds of dot products over 16 sums at once, ``"bf16"`` and ``"int8"``, and of tiles, ``"tile_bf16"`` and
        ``"tile_int8"``; ``"widening_bf16"`` where multiply-adds of float32 are faster than the dot products.

    Examples
    --------
    >>> Registers(16, 256).lanes(4, bits=32)
    16
    >>> Registers(32, 512).lanes(4, bits=32)
    64
    """

    count: int = 16
    bits: int = 256
    units: frozenset[str] = frozenset()

    @classmethod
    def of(cls, target: Any) -> Registers:
        """Return the vector registers of an LLVM target."""
        return _registers(target)

    def most_rows(self, vectors: int) -> int:
        """Return the number of rows of `vectors` registers each that fit beside the operand's row and one factor."""
        return (self.count - 1) // vectors - 1

    def lanes(self, rows: int, *, bits: int) -> int:
        """Return the elements of each of `rows` rows that fit beside as many of the operand and one factor.

        The number of registers of a row is a power of two.
        """
        registers_a_row = 1
        while (rows + 1) * 2 * registers_a_row + 1 <= self.count:
            registers_a_row *= 2
        return registers_a_row * self.bits // max(bits, 32)


@dataclass(frozen=True)
class OwnSums:
    """Vectors in which LLVM sums the terms of a loop by itself.

    Parameters
    ----------
    gathers : bool
        Whether terms are gathered by vector instructions.
    """

    gathers: bool

    @classmethod
    def of(cls, target: Any) -> OwnSums | None:
        """Return those of an LLVM target; None where it must take the terms in order."""
        return _own_sums(target)


@cache
def _own_sums(target: Any) -> OwnSums | None:
    if not target.attrs.get(REASSOCIATE, False):
        return None
    return OwnSums(gathers_vectors(target))


def gathers_vectors(target: Any) -> bool:
    """Return whether LLVM generates instructions that gather vectors for a target."""
    is_avoided = any(str(feature) == f"+{NO_GATHER}" for feature in target.attrs.get("mattr", None) or ())
    is_avoided |= str(target.attrs.get("mcpu", "")).startswith("znver")  # as native targets of AMD say
    return not is_avoided and any(codegen.target_has_features(feature, target) for feature in ("avx512f", FAST_GATHER))


@cache
def _registers(target: Any) -> Registers:
    has = lambda feature: codegen.target_has_features(feature, target)  # noqa: E731
    emulated = is_emulated(target)
    units = frozenset(kind for kind, features in UNITS.items() if emulated or all(map(has, features)))
    if not emulated and all(map(has, WIDENING_FEATURES)):
        units |= {WIDENING}
    for feature, registers in (
        ("avx512f", Registers(32, 512, units)),
        ("avx", Registers(16, 256, units)),
        ("neon", Registers(32, 128, units)),
    ):
        if has(feature):
            return registers
    return Registers(16, 128, units)


def has_unit(target: Any, kind: str = "bf16") -> bool:
    """Return whether a target multiplies bfloat16 numbers, or integers of 8 bits ("int8"), by dot products or tiles."""
    return bool({kind, f"tile_{kind}"} & Registers.of(target).units)


__all__ = ["OwnSums", "Registers", "gathers_vectors", "has_unit"]
