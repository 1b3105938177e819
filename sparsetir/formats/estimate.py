# SPDX-License-Identifier: Apache-2.0
"""How a format would store a tensor, from the numbers of its pattern: nothing is converted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """What a format would store for a tensor.

    Parameters
    ----------
    values : float
        Padding included.
    most : float, optional
        The same at most, where the pattern leaves it open.
    pieces : int
        Each with loops of its own.
    per_index : int
        Values that share a column number; 0 where none is stored.

    Examples
    --------
    >>> Estimate(5).at_most, Estimate(5, most=8).at_most
    (5, 8)
    """

    values: float
    most: float | None = None
    pieces: int = 1
    per_index: int = 1

    @property
    def at_most(self) -> float:
        """Values that are stored at most."""
        return self.values if self.most is None else self.most


__all__ = ["Estimate"]
