# SPDX-License-Identifier: Apache-2.0
"""Output buffers: aligned to cache lines, and reused once the caller no longer references them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import tvm_ffi

from sparsetir.errors import ArgumentTypeError
from sparsetir.utils.machine import LINE
from sparsetir.utils.memory import MemoryLimitError, check_memory, readable

# Arrays that begin at a cache line.
#
# numpy's arrays begin at any multiple of 16 bytes. A vector of 64 bytes then lies across two cache lines, and where
# rows of an operand are gathered from the caches, each load of one costs two. Arrays of torch and of Relax begin at a
# line.


def aligned(array: np.ndarray) -> np.ndarray:
    """Return an array itself if it begins at a cache line and is contiguous, else a copy that is.

    Calls do it themselves where it proves to be faster, for short rows that are gathered often.

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
        raise ArgumentTypeError(f"aligned takes a numpy array of numbers, got {description}")
    if array.flags.c_contiguous and (array.ctypes.data % LINE == 0 or not array.size):
        return array
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


CHECKED_BYTES = 1 << 30  # of an array, from which on the memory of the machine is asked


class _Memory(np.ndarray):
    """What an array lies in. Views of the array hold the array, not this: numpy passes by bases of one class only."""


def _large(nbytes: int, shape: tuple[int, ...]) -> _Memory:
    """Return memory for a large array; raise `MemoryLimitError` where there is not so much.

    The system also gives more than there is, and ends the process when that is written.
    """
    check_memory(nbytes, f"an array of shape {shape}")
    try:
        return np.ndarray.__new__(_Memory, nbytes + LINE, np.uint8)
    except (MemoryError, ValueError, OverflowError):
        raise MemoryLimitError(f"an array of shape {shape} takes {readable(nbytes)}, which are not free") from None


# The address of memory that can be written to, without the objects that numpy's own ways make.
_byte: Any = ctypes.c_char.from_buffer
_address = ctypes.addressof


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array with whatever the memory holds; views of it hold it, as they hold one of `numpy.empty`."""
    nbytes = math.prod(shape) * dtype.itemsize  # called so often for small arrays that a function more counts
    memory = np.ndarray.__new__(_Memory, nbytes + LINE, np.uint8) if nbytes < CHECKED_BYTES else _large(nbytes, shape)
    return np.ndarray(shape, dtype, memory, -_address(_byte(memory)) % LINE)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array of zeros; of a large one, the system makes a page when it is first used."""
    memory = np.zeros(math.prod(shape) * dtype.itemsize + LINE, np.uint8).view(_Memory)
    return np.ndarray(shape, dtype, memory, -_address(_byte(memory)) % LINE)


# Reuse of output buffers that the caller no longer references.
#
# The system hands out large arrays page by page, each cleared when it is first written: for a large result of a short
# kernel that takes as long as the kernel. What the compiled function takes for an array is kept with it, which saves a
# microsecond for a small one.
#
# A caller gets a view of the memory that a pool owns. Views of that view hold it, so the memory is free once the weak
# reference to it is dead. Counts of references would not tell: debuggers and threads without a global lock change them.


Layout = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype
LEAST_ROOM, MOST_ROOM = 1 << 17, 1 << 25  # bytes: what the C library keeps itself, and what is too much to keep
MOST_LENT = 2  # loans that a pool keeps track of


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return aligned memory whose views of numpy's own class are held by their views."""
    nbytes = math.prod(shape) * dtype.itemsize
    root = np.ndarray.__new__(_Memory, nbytes + LINE, np.uint8) if nbytes < CHECKED_BYTES else _large(nbytes, shape)
    return np.ndarray.__new__(_Memory, shape, dtype, root, -_address(_byte(root)) % LINE)


class OutputPool:
    """Pool of the memory of results of one kernel: the last one's, for each thread that is in a call.

    Examples
    --------
    >>> fill = OutputPool().filler((4,), np.dtype("float32"), 0)
    >>> first = fill([None])
    >>> where = first.ctypes.data
    >>> fill([None]).ctypes.data == where  # `first` is still in use
    False
    >>> first = fill([None])
    >>> where = first.ctypes.data
    >>> del first
    >>> fill([None]).ctypes.data == where
    True
    """

    def __init__(self) -> None:
        # The view that was lent, what makes another one, what a compiled function takes, shape and dtype.
        self.lent: list[tuple[ref[np.ndarray], Callable[[], np.ndarray], Any, Layout]] = []

    def filler(self, shape: tuple[int, ...], dtype: np.dtype[Any], at: int) -> Callable[[list[Any]], np.ndarray]:
        """Return a function that puts a new array at place `at` of an argument list, and returns it.

        It lies in the memory of the last array, if it fits and neither that array nor a view of it exists.
        """
        pop, append, layout = self.lent.pop, self.lent.append, (shape, dtype)

        def fill(arguments: list[Any]) -> np.ndarray:
            try:
                last, view, passed, last_layout = pop()  # atomic: another thread gets another entry
            except IndexError:
                view, passed = _made(shape, dtype)
            else:
                if last() is not None or (last_layout is not layout and last_layout != layout):
                    view, passed = _made(shape, dtype)
            array = view()  # before the entry is back, so that another thread does not find the memory free
            append((ref(array), view, passed, layout))
            arguments[at] = passed
            return array

        return fill


def _made(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Callable[[], np.ndarray], Any]:
    """Allocate memory; return what makes a view of it, and what a compiled function takes."""
    memory = _memory(shape, dtype)
    return memory.__array__, as_tensor(memory)


def as_tensor(array: np.ndarray) -> Any:
    """Return a TVM tensor over an array; over one of bfloat16, which numpy does not export, through its bits."""
    if array.dtype.kind != "V":
        return tvm_ffi.from_dlpack(array)
    return tvm_ffi.from_dlpack(array.view(np.uint16))._create_view(array.shape, "bfloat16")


class BufferPool:
    """Memory for entries whose number is known when they are written: arrays of some length, of which a part is used.

    Parameters
    ----------
    dtypes : tuple of dtype
        Of the arrays that are used together.

    Examples
    --------
    >>> pool = BufferPool((np.dtype("int32"), np.dtype("float32")))
    >>> keys, values = pool.lend(pool.take(40_000), 40_000)
    >>> part = keys[:3]
    >>> where = part.ctypes.data
    >>> del keys, values
    >>> pool.take(39_000)[0].ctypes.data == where  # `part` is still in use
    False
    >>> del part
    >>> pool.take(39_000)[0].ctypes.data == where
    True
    """

    def __init__(self, dtypes: tuple[np.dtype[Any], ...]) -> None:
        self.dtypes, self.item = dtypes, sum(d.itemsize for d in dtypes)
        self.lent: list[tuple[list[ref[np.ndarray]], tuple[np.ndarray, ...]]] = []

    def take(self, count: int) -> tuple[np.ndarray, ...]:
        """Return arrays of at least so many elements, which belong to the caller alone."""
        if count * self.item < LEAST_ROOM:
            return tuple([np.empty(count, d) for d in self.dtypes])
        for _ in range(len(self.lent)):
            try:
                entry = self.lent.pop(0)  # atomic: another thread gets another entry
            except IndexError:
                break
            views, arrays = entry
            is_free = all(view() is None for view in views)
            if is_free and count <= len(arrays[0]) <= 2 * count:
                return arrays
            if not is_free:
                self.lent.append(entry)
        return tuple([np.empty(count, d) for d in self.dtypes])

    def lend(self, arrays: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        """Return views of the first `count` elements; once no caller has one, `take` returns the arrays again.

        The first ones of several that wait are dropped, and so are arrays that are too small or too large to keep.
        """
        if not LEAST_ROOM <= len(arrays[0]) * self.item <= MOST_ROOM:
            return [array[:count] for array in arrays]
        loans, views = [], []
        for array in arrays:
            # Views of an array whose owner is no array hold that array, and not the owner.
            owner = SimpleNamespace(array=array, __array_interface__=array.view(np.uint8).__array_interface__)
            loan = np.asarray(owner)
            loans.append(ref(loan))
            views.append(loan.view(array.dtype)[:count])
        # Only by atomic steps: another thread may take an entry at any moment, and must not find it here again.
        self.lent.append((loans, tuple(arrays)))
        try:
            while len(self.lent) > MOST_LENT:
                self.lent.pop(0)
        except IndexError:  # another thread took the last one
            pass
        return views


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
        self.lent: list[tuple[ref[np.ndarray], np.ndarray]] = []

    def take(self) -> np.ndarray:
        """Return a copy."""
        try:
            last, memory = self.lent.pop()  # atomic: another thread gets another entry
            is_free = last() is None
        except IndexError:
            is_free = False
        if not is_free:
            memory = np.ndarray.__new__(_Memory, self.original.shape, self.original.dtype)
        np.copyto(memory, self.original)
        copy: np.ndarray = memory.__array__()
        self.lent.append((ref(copy), memory))
        return copy


__all__ = ["BufferPool", "Copies", "OutputPool", "aligned", "as_tensor", "empty", "zeros"]
