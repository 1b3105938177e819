# SPDX-License-Identifier: Apache-2.0
"""Random sizes, index arrays and values for a fuzzed program."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np

from drawing import Axis, Data
from fuzzing.program import Buffer, Program

#: largest length of an axis in each set of inputs of one program: ordinary, none, one, wide enough for vectors
LENGTHS = (6, 0, 1, 3, 20, 4, 2, 9, 5, 12, 3, 30)
#: an axis may be as long as this if a program has so many
MOST = {1: 40, 2: 20, 3: 9, 4: 6, 5: 5, 6: 4}
FLOATS = ("float16", "bfloat16", "float32", "float64")


def unset(dtype: str) -> Any:
    """What no result may be computed from."""
    return np.nan if dtype in FLOATS else 1 if dtype == "bool" else 77


class Inputs(Data):
    """Sizes, index arrays and values; `most` is the largest length of an axis."""

    def __init__(self, program: Program, seed: int, most: int) -> None:
        self.lengths: dict[Axis, int] = {}
        self.factors = max(1, sum(len(it.axes) for it in program.every_iteration))
        super().__init__(program, seed, most)

    def _limit(self, program: Program, most: int) -> int:
        return min(most, MOST.get(len(program.axes), 3))

    def _length(self, axis: Axis) -> int:
        self.lengths[axis] = super()._length(axis)
        return self.lengths[axis]

    def _fiber(self, axis: Axis, point: tuple[int, ...] | None, length: int, width: int) -> list[int]:
        if axis.kind == "singleton":
            return [int(self.rng.integers(0, length + 1))]
        return super()._fiber(axis, point, length, width)

    def _padded(self, axis: Axis, length: int, width: int) -> list[int]:
        """`width` slots; those without a coordinate hold the length."""
        stored = self._stored(axis, length, width)
        slots = stored + [length] * (width - len(stored))
        return slots if axis.sorted else [slots[n] for n in self.rng.permutation(width)]

    def _values(self, buffer: Buffer) -> np.ndarray:
        """Small whole numbers; what may not be read is NaN, or 77."""
        shape = [len(self.points[last]) for last in buffer.trees]
        low, high = (0, 2) if buffer.dtype == "bool" else (0, 3) if buffer.dtype == "uint8" else (-2, 4)
        values = self.rng.integers(low, high, shape).astype(np.dtype(buffer.dtype))
        for n, last in enumerate(buffer.trees):
            absent = [m for m, point in enumerate(self.points[last]) if point is None]
            values[(slice(None),) * n + (absent,)] = unset(buffer.dtype)
        return values

    def results(self) -> list[str]:
        """Parameters the program writes."""
        return [b.name.lower() for b in self.program.buffers if b.role == "out"]

    def poisoned(self) -> dict[str, np.ndarray]:
        """The arrays of buffers, those that are written full of what no result may be computed from."""
        held = {b.name.lower(): b for b in self.program.buffers if not b.scratch}
        arrays = {name: self.args[name] for name in held}
        return {n: np.full_like(a, unset(held[n].dtype)) if held[n].role == "out" else a for n, a in arrays.items()}


__all__ = ["LENGTHS", "Inputs", "unset"]
