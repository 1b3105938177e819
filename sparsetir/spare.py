# SPDX-License-Identifier: Apache-2.0
"""The memory of a result that nobody has any more, for the next result.

The system hands out large arrays page by page, each cleared when it is first written: for a large result of a short
kernel that takes as long as the kernel. What the compiled function takes for an array is kept with it, which saves a
microsecond for a small one.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any

import numpy as np
import tvm_ffi

from sparsetir import alignment

Held = tuple[np.ndarray, Any]


def references(held: Held) -> int:
    """How many references there are to the array of a pair, as this function counts them."""
    return getrefcount(held[0])


def _made(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Held:
    array = alignment.empty(shape, dtype)
    return array, tvm_ffi.from_dlpack(array)


ALONE = references(_made((1,), np.dtype("float32")))


class Spare:
    """Holds the last result.

    Examples
    --------
    >>> spare = Spare()
    >>> first, _ = spare.take((4,), np.dtype("float32"))
    >>> where = first.ctypes.data
    >>> spare.take(first.shape, first.dtype)[0].ctypes.data == where  # `first` is still in use
    False
    >>> first, _ = spare.take(first.shape, first.dtype)
    >>> where = first.ctypes.data
    >>> del first
    >>> spare.take((4,), np.dtype("float32"))[0].ctypes.data == where
    True
    """

    def __init__(self) -> None:
        self.held: list[Held] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Held:
        """An array and the same for a compiled function.

        The last array, if it is like that and nobody else has it or a view of it, or a new one.
        """
        try:
            found = self.held.pop()  # at once: another thread finds nothing
        except IndexError:
            found = _made(shape, dtype)
        else:
            # As `references` counts them; a call of it would take longer than all of this.
            if getrefcount(found[0]) != ALONE or found[0].shape != shape or found[0].dtype is not dtype:
                found = _made(shape, dtype)
        self.held.append(found)  # as many as threads were here at once
        return found


class Copies:
    """Copies of one array, of which the last is written again once nobody has it any more.

    Examples
    --------
    >>> copies = Copies(np.arange(3))
    >>> first = copies.take()
    >>> first[0] = 7
    >>> second = copies.take()
    >>> second is first, second.tolist()
    (False, [0, 1, 2])
    """

    def __init__(self, original: np.ndarray) -> None:
        self.original = original
        self.held: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        """A copy."""
        try:
            found = self.held.pop()  # at once: another thread finds nothing
        except IndexError:
            found = self.original.copy()
        else:
            if getrefcount(found) != COPY_ALONE or not self._is_like(found):
                found = self.original.copy()
            else:
                np.copyto(found, self.original)
        self.held.append(found)
        return found

    def _is_like(self, found: np.ndarray) -> bool:
        """Whether nobody gave the copy another shape or type, or keeps it from being written."""
        shape, dtype = self.original.shape, self.original.dtype
        return found.shape == shape and found.dtype == dtype and found.flags.writeable


def _popped(held: list[np.ndarray]) -> int:
    """References to an array that nobody else has, as `Copies.take` counts them."""
    found = held.pop()
    return getrefcount(found)


COPY_ALONE = _popped([np.empty(1)])

__all__ = ["Copies", "Spare"]
