# SPDX-License-Identifier: Apache-2.0
"""What a candidate must compute.

The untuned kernel's result is the reference; for the ready programs of `sparsetir.ops` it is itself compared with
scipy first (`sparsetir.harness.products`). Sums may be added up in any order, so floating-point results may differ by
rounding, relative to the sum of the terms' absolute values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

BLOCK = 1 << 18
ROUNDINGS = 256
LARGEST_TOLERANCE = 0.05


def tolerance(dtype: np.dtype[Any]) -> float:
    """Allowed difference relative to the sum of the terms' absolute values; 0 for integers."""
    if dtype.kind in "iub":
        return 0.0
    epsilon = 2.0**-8 if dtype.kind == "V" or dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
    return min(ROUNDINGS * epsilon, LARGEST_TOLERANCE)


class Reference:
    """Expected arrays and how far a result may be from them.

    Parameters
    ----------
    expected : mapping of str to ndarray
        By parameter name.
    magnitudes : mapping of str to ndarray
        The same sums over absolute values.
    """

    def __init__(self, expected: Mapping[str, np.ndarray], magnitudes: Mapping[str, np.ndarray]) -> None:
        self.expected = {name: array.copy() for name, array in expected.items()}
        self.allowed = {name: allowance(array, magnitudes[name]) for name, array in self.expected.items()}

    def disagreement(self, found: Mapping[str, np.ndarray]) -> str | None:
        """Where a result is wrong, in words; None if it is right."""
        for name, expected in self.expected.items():
            flat, wanted, allowed = (a.reshape(-1) for a in (found[name], expected, self.allowed[name]))
            for start in range(0, flat.size, BLOCK):
                part = slice(start, start + BLOCK)
                wrong = differs(flat[part], wanted[part], allowed[part])
                if wrong.any():
                    at = start + int(wrong.argmax())
                    place = tuple(int(n) for n in np.unravel_index(at, expected.shape))
                    return f"{name}{list(place)} is {flat[at]}, expected {wanted[at]}"
        return None


def allowance(expected: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """The largest difference to be blamed on rounding, element by element."""
    if expected.dtype.kind in "iub":
        return np.zeros_like(expected)
    return np.maximum(np.abs(expected), magnitude) * np.asarray(tolerance(expected.dtype), expected.dtype)


def differs(found: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Which elements are wrong. Where the expected value is not finite anything that is not finite is right."""
    if expected.dtype.kind in "iub":
        return found != expected
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(found - expected) <= allowed
    if near.all():
        return np.zeros_like(near)
    return ~(near | (~np.isfinite(expected) & ~np.isfinite(found)))
