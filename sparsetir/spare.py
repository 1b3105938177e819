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
LEAST_ROOM, MOST_ROOM = 1 << 17, 1 << 25  # bytes: what the C library keeps itself, and what is too much to keep


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
        array, passed = found  # so that another thread does not find the array alone
        self.held.append(found)  # as many as threads were here at once
        return array, passed


class Rooms:
    """Memory for entries whose number is known when they are written: arrays of some length, of which a part is used.

    Whoever holds a part holds the array, so one that nobody else has can be written again.

    Parameters
    ----------
    dtypes : tuple of dtype
        Of the arrays of a room.

    Examples
    --------
    >>> rooms = Rooms((np.dtype("int32"), np.dtype("float32")))
    >>> keys, values = rooms.take(40_000)
    >>> rooms.keep((keys, values))
    >>> part = keys[:3]
    >>> where = part.ctypes.data
    >>> del keys, values
    >>> rooms.take(39_000)[0].ctypes.data == where  # `part` is still in use
    False
    """

    def __init__(self, dtypes: tuple[np.dtype[Any], ...]) -> None:
        self.dtypes, self.item = dtypes, sum(d.itemsize for d in dtypes)
        self.held: list[tuple[np.ndarray, ...]] = []

    def take(self, count: int) -> tuple[np.ndarray, ...]:
        """Arrays of at least so many elements."""
        if count * self.item < LEAST_ROOM:
            return tuple([np.empty(count, d) for d in self.dtypes])
        for _ in range(len(self.held)):
            try:
                room = self.held.pop(0)  # at once: another thread finds another one
            except IndexError:
                break
            is_free = all(getrefcount(room[n]) == ROOM_ALONE for n in range(len(room)))
            if is_free and count <= len(room[0]) <= 2 * count:
                return room
            if not is_free:
                self.held.append(room)
        return tuple([np.empty(count, d) for d in self.dtypes])

    def keep(self, room: tuple[np.ndarray, ...]) -> None:
        """Wait until nobody has the arrays any more; the first of several are forgotten."""
        if LEAST_ROOM <= len(room[0]) * self.item <= MOST_ROOM:
            self.held = [*self.held[-1:], room]


def _in_room(room: tuple[np.ndarray, ...]) -> int:
    """References to an array of a room, as `Rooms.take` counts them."""
    return next(getrefcount(room[n]) for n in range(len(room)))


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
ROOM_ALONE = _in_room((np.empty(1),))

__all__ = ["Copies", "Rooms", "Spare"]
