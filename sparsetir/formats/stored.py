# SPDX-License-Identifier: Apache-2.0
"""One piece of a tensor as it is stored."""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.formats.arrays import Array
from sparsetir.formats.format import Packed
from sparsetir.formats.memory import readable
from sparsetir.formats.rule import FormatRewriteRule


@dataclass(frozen=True, eq=False)
class Piece:
    """One piece of a tensor.

    Parameters
    ----------
    rule : FormatRewriteRule
        Its axes, as a program sees them.
    packed : Packed
        Its index arrays and sizes, by the names in the rule's description.
    values : ndarray, shape (packed.count,)
        What its buffer holds, padding included.
    """

    rule: FormatRewriteRule
    packed: Packed
    values: Array

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def arrays(self) -> dict[str, Array]:
        return self.packed.arrays

    @property
    def sizes(self) -> dict[str, int]:
        return self.packed.sizes

    @property
    def nnz(self) -> int:
        """Entries held."""
        return self.packed.size

    @property
    def nbytes(self) -> int:
        """Of the values and the index arrays."""
        return self.values.nbytes + sum(a.nbytes for a in self.arrays.values())

    @property
    def padding(self) -> float:
        """Fraction of the stored values that are no entry."""
        return 1 - self.nnz / self.packed.count if self.packed.count else 0.0

    @property
    def layout(self) -> str:
        """Axes and sizes in a line."""
        axes = ", ".join(f"{axis.name}: {axis.kind}" for axis in self.rule.buffer.axes)
        return f"[{axes}] " + ", ".join(f"{name}={n}" for name, n in self.sizes.items())

    def __repr__(self) -> str:
        return f"{self.name} {self.layout}; {amounts(self.nnz, self.padding, self.nbytes)}"


def amounts(nnz: int, padding: float, nbytes: int) -> str:
    """How much is stored, in words."""
    return f"{nnz} entries, {padding:.0%} padding, {readable(nbytes)}"


__all__ = ["Piece", "amounts"]
