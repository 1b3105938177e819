# SPDX-License-Identifier: Apache-2.0
"""Arrays between unreadable pages: a step past the end, or far before the start, ends the process at once."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import defaultdict

import numpy as np

_PRIVATE_ANONYMOUS, _READ_WRITE, _NONE = 0x22, 3, 0


def _library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


_LIBC = _library()


class Fences:
    """Copies of arrays that end where a page ends that must not be touched; `release` lets their memory be used again.

    Elsewhere than on Linux, and for empty arrays, copies without a fence.
    """

    def __init__(self) -> None:
        self.free: defaultdict[int, list[int]] = defaultdict(list)
        self.used: list[tuple[int, int]] = []

    def fenced(self, array: np.ndarray) -> np.ndarray:
        """A copy of an array."""
        array = np.ascontiguousarray(array)
        if _LIBC is None or not array.nbytes:
            return array.copy()
        size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        base = self.free[size].pop() if self.free[size] else _fence(size)
        self.used.append((size, base))
        held = (ctypes.c_char * array.nbytes).from_address(base + size - array.nbytes)
        out = np.frombuffer(held, array.dtype, array.size).reshape(array.shape)
        out[...] = array
        return out

    def release(self) -> None:
        """Give up all copies made so far."""
        for size, base in self.used:
            self.free[size].append(base)
        self.used.clear()


def _fence(size: int) -> int:
    """Address of new memory between two unreadable pages."""
    page = mmap.PAGESIZE
    base = _LIBC.mmap(None, size + 2 * page, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    _LIBC.mprotect(base, page, _NONE)
    _LIBC.mprotect(base + page + size, page, _NONE)
    return int(base) + page


def fenced(array: np.ndarray) -> np.ndarray:
    """A copy that ends at an unreadable page; never freed, so keep it small."""
    return Fences().fenced(array)
