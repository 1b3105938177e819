# SPDX-License-Identifier: Apache-2.0
"""Output buffers: aligned to cache lines, and reused once the caller no longer references them."""

from __future__ import annotations

import math
from sys import getrefcount
from typing import Any

import numpy as np
import tvm_ffi

from sparsetir.errors import ArgumentTypeError
from sparsetir.utils.machine import LINE

# Arrays that begin at a cache line.
#
# numpy's arrays begin at any multiple of 16 bytes. A vector of 64 bytes then lies across two cache lines, and where
# rows of an operand are gathered from the caches, each load of one costs two. Arrays of torch and of Relax begin at a
# line.


def aligned(array: np.ndarray) -> np.ndarray:
    """Return an array itself if it begins at a cache line and is contiguous, else a copy that is.

    Not done in a call: lines that one core has just written reach the others late, which may cost what is gained.

    Parameters
    ----------
    array : ndarray

    Returns
    -------
    ndarray
        Of the same shape and dtype.

    Raises
    ------
    ArgumentTypeError
        `array` is no numpy array, or one with a mask or of Python objects.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> B = sparsetir.aligned(np.ones(1000, np.float32)[1:])
    >>> B.ctypes.data % 64, B.shape
    (0, (999,))
    """
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray) or array.dtype.hasobject:
        description = type(array).__name__ + (
            " of objects" if isinstance(array, np.ndarray) and array.dtype.hasobject else ""
        )
        raise ArgumentTypeError(f"aligned takes a numpy array of numbers, found {description}")
    if array.flags.c_contiguous and (array.ctypes.data % LINE == 0 or not array.size):
        return array
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


class _Memory(np.ndarray):
    """What an array lies in. Views of the array hold the array, not this: numpy passes by bases of one class only."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array with whatever the memory holds; views of it hold it, as they hold one of `numpy.empty`."""
    memory = np.ndarray.__new__(_Memory, math.prod(shape) * dtype.itemsize + LINE, np.uint8)
    # `ctypes.data` has the same address, and takes longer.
    return np.ndarray(shape, dtype, memory, -memory.__array_interface__["data"][0] % LINE)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array of zeros; of a large one, the system makes a page when it is first used."""
    memory = np.zeros(math.prod(shape) * dtype.itemsize + LINE, np.uint8).view(_Memory)
    return np.ndarray(shape, dtype, memory, -memory.__array_interface__["data"][0] % LINE)


# Reuse of output buffers that the caller no longer references.
#
# The system hands out large arrays page by page, each cleared when it is first written: for a large result of a short
# kernel that takes as long as the kernel. What the compiled function takes for an array is kept with it, which saves a
# microsecond for a small one.


Held = tuple[np.ndarray, Any]
LEAST_ROOM, MOST_ROOM = 1 << 17, 1 << 25  # bytes: what the C library keeps itself, and what is too much to keep


def references(held: Held) -> int:
    """Return how many references there are to the array of a pair, as this function counts them."""
    return getrefcount(held[0])


def _made(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Held:
    array = empty(shape, dtype)
    return array, tvm_ffi.from_dlpack(array)


ALONE = references(_made((1,), np.dtype("float32")))


class OutputPool:
    """Holds the last result.

    Examples
    --------
    >>> spare = OutputPool()
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
        """Return an array and the same for a compiled function.

        The last array, if it fits and neither it nor a view of it is referenced elsewhere, or a new one.
        """
        try:
            entry = self.held.pop()  # at once: another thread finds nothing
        except IndexError:
            entry = _made(shape, dtype)
        else:
            # As `references` counts them; a call of it would take longer than all of this.
            if getrefcount(entry[0]) != ALONE or entry[0].shape != shape or entry[0].dtype is not dtype:
                entry = _made(shape, dtype)
        array, passed = entry  # so that another thread does not find the array alone
        self.held.append(entry)  # as many as threads were here at once
        return array, passed


class BufferPool:
    """Memory for entries whose number is known when they are written: arrays of some length, of which a part is used.

    A reference to a part keeps the array, so an array without other references can be written again.

    Parameters
    ----------
    dtypes : tuple of dtype
        Of the arrays of a room.

    Examples
    --------
    >>> rooms = BufferPool((np.dtype("int32"), np.dtype("float32")))
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
        """Wait until the arrays are no longer referenced; the first of several are dropped."""
        if LEAST_ROOM <= len(room[0]) * self.item <= MOST_ROOM:
            self.held = [*self.held[-1:], room]


def _in_room(room: tuple[np.ndarray, ...]) -> int:
    """Return the number of references to an array of a room, as `BufferPool.take` counts them."""
    return next(getrefcount(room[n]) for n in range(len(room)))


class Copies:
    """Copies of one array, of which the last is written again once it is no longer referenced.

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
        """Return a copy."""
        try:
            copy = self.held.pop()  # at once: another thread finds nothing
        except IndexError:
            copy = self.original.copy()
        else:
            if getrefcount(copy) != COPY_ALONE or not self._is_like(copy):
                copy = self.original.copy()
            else:
                np.copyto(copy, self.original)
        self.held.append(copy)
        return copy

    def _is_like(self, found: np.ndarray) -> bool:
        """Return whether no caller gave the copy another shape or type, or keeps it from being written."""
        shape, dtype = self.original.shape, self.original.dtype
        return found.shape == shape and found.dtype == dtype and found.flags.writeable


def _popped(held: list[np.ndarray]) -> int:
    """Return the number of references to an array without other owners, as `Copies.take` counts them."""
    array = held.pop()
    return getrefcount(array)


COPY_ALONE = _popped([np.empty(1)])
ROOM_ALONE = _in_room((np.empty(1),))


__all__ = ["BufferPool", "Copies", "OutputPool", "aligned", "empty", "zeros"]
