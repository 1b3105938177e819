# SPDX-License-Identifier: Apache-2.0
"""What was found out about the last patterns, for calls that come with them again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

MOST_KEPT = 4
Found = TypeVar("Found")


@dataclass(frozen=True)
class Known(Generic[Found]):
    """What is known of a pattern: its arrays, copied as they may change, and what was found."""

    about: Hashable
    arrays: tuple[np.ndarray, ...]
    found: Found

    def is_of(self, about: Hashable, arrays: tuple[np.ndarray, ...]) -> bool:
        """Whether it is of a pattern."""
        return self.about == about and all(map(np.array_equal, self.arrays, arrays))


class OfPatterns(Generic[Found]):
    """Keeps what was found for the last patterns.

    Arrays are compared element by element, which is faster than a checksum of them: nearly all that differ do so early.
    """

    def __init__(self) -> None:
        self.known: list[Known[Found]] = []

    def get(self, about: Hashable, arrays: tuple[np.ndarray, ...], find: Callable[[], Found]) -> Found:
        """What is known of a pattern, found now where it is new."""
        known = next((k for k in self.known if k.is_of(about, arrays)), None)
        if known is None:
            known = Known(about, tuple(a.copy() for a in arrays), find())
            self.known = [known, *self.known[: MOST_KEPT - 1]]  # one step: another thread sees either list
        return known.found


__all__ = ["OfPatterns"]
