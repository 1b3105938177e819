# SPDX-License-Identifier: Apache-2.0
"""The open choices of the row sketch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sparsetir.errors import ScheduleError


@dataclass(frozen=True)
class Choices:
    """One point of the row sketch's space.

    Parameters
    ----------
    tile : int
        Elements of a row kept in registers; a power of two.
    chunks : int
        Parallel pieces with equal numbers of nonzeros; 0 runs on one core.
    unroll : int
        Nonzeros per step of the innermost ragged loop.
    prefetch : int
        How many nonzeros ahead gathered rows are fetched; 0 leaves it to the hardware.
    """

    tile: int = 64
    chunks: int = 16
    unroll: int = 1
    prefetch: int = 0

    def __post_init__(self) -> None:
        if self.tile < 1 or self.tile & (self.tile - 1):
            raise ScheduleError(f"tile must be a power of two, found {self.tile}")
        if self.chunks < 0 or self.unroll < 1 or self.prefetch < 0:
            raise ScheduleError(f"chunks and prefetch must not be negative and unroll at least 1, found {self}")

    def as_dict(self) -> dict[str, int]:
        """Names and values, for records."""
        return asdict(self)
