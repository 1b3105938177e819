# SPDX-License-Identifier: Apache-2.0
"""Declaration of one open choice of the sketches, a tunable parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Tried = Callable[[int, "int | None"], Sequence[int]]


@dataclass(frozen=True)
class Choice:
    """An integer parameter that a sketch leaves open.

    Parameters
    ----------
    name : str
    meaning : str
        Sentences for the documentation of `Choices`.
    default : int or callable
        The default value, or a function that returns it.
    expected : str
        The values allowed, for error messages.
    allows : callable
        Predicate of allowed values.
    tried : sequence of int or callable, optional
        Values that a search tries, or a function that returns them for a number of threads and the length of an output
        row (None if unknown). By default the choice is not searched.

    Examples
    --------
    >>> Choice("unroll", "Steps at once.", 1, "at least 1", lambda n: n >= 1, (1, 2, 4)).worth_trying(threads=2)
    (1, 2, 4)
    """

    name: str
    meaning: str
    default: int | Callable[[], int]
    expected: str
    allows: Callable[[int], bool]
    tried: Sequence[int] | Tried = ()

    def worth_trying(self, *, threads: int, feat: int | None = None) -> tuple[int, ...]:
        """Return the values that a search tries; empty if the choice is not searched."""
        return tuple(self.tried(threads, feat) if callable(self.tried) else self.tried)


def is_power(value: int) -> bool:
    """Return whether a number is a power of two."""
    return value > 0 and value & (value - 1) == 0


__all__ = ["Choice", "is_power"]
