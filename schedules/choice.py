# SPDX-License-Identifier: Apache-2.0
"""One open choice, as the family of loops declares it that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Tried = Callable[[int, "int | None"], Sequence[int]]


@dataclass(frozen=True)
class Choice:
    """A whole number that a sketch leaves open.

    Parameters
    ----------
    name : str
    meaning : str
        Sentences for the documentation of `Choices`.
    default : int or callable
        Its value where nothing is said, or what gives it.
    expected : str
        What a value must be, for messages.
    allows : callable
        Whether a value is that.
    tried : sequence of int or callable, optional
        Values worth trying, or what gives them for a number of threads and, where it is known, the length of an output
        row. By default it is not searched.

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
        """The values that a search tries; none if it is not searched."""
        return tuple(self.tried(threads, feat) if callable(self.tried) else self.tried)


def is_power(value: int) -> bool:
    """Whether a number is a power of two."""
    return value > 0 and value & (value - 1) == 0


__all__ = ["Choice", "is_power"]
