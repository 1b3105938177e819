# SPDX-License-Identifier: Apache-2.0
"""Arrays that begin at a cache line.

numpy's arrays begin at any multiple of 16 bytes. A vector of 64 bytes then lies across two cache lines, and where rows
of an operand are gathered from the caches, each load of one costs two. Arrays of torch and of Relax begin at a line.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentTypeError
from sparsetir.machine import LINE


def aligned(array: np.ndarray) -> np.ndarray:
    """An array itself if it begins at a cache line and is contiguous, else a copy that is.

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
        found = type(array).__name__ + (
            " of objects" if isinstance(array, np.ndarray) and array.dtype.hasobject else ""
        )
        raise ArgumentTypeError(f"aligned takes a numpy array of numbers, found {found}")
    if array.flags.c_contiguous and (array.ctypes.data % LINE == 0 or not array.size):
        return array
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


class _Memory(np.ndarray):
    """What an array lies in. Views of the array hold the array, not this: numpy passes by bases of one class only."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array with whatever the memory holds; views of it hold it, as they hold one of `numpy.empty`."""
    return _placed(np.ndarray.__new__(_Memory, _room(shape, dtype), np.uint8), shape, dtype)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array of zeros; of a large one, the system makes a page when it is first used."""
    return _placed(np.zeros(_room(shape, dtype), np.uint8).view(_Memory), shape, dtype)


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize + LINE


def _placed(memory: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The part of some memory that begins a cache line."""
    start = -memory.ctypes.data % LINE
    return memory[start : start + len(memory) - LINE].view(dtype).reshape(shape).view(np.ndarray)


__all__ = ["aligned", "empty", "zeros"]
