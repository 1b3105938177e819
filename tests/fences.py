# SPDX-License-Identifier: Apache-2.0
"""Arrays between unreadable pages: a step past the end, or far before the start, ends the process at once."""

from __future__ import annotations

import ctypes
import mmap
import sys

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


def fenced(array: np.ndarray) -> np.ndarray:
    """A copy that ends where a page ends that must not be touched; never freed, so keep it small.

    Elsewhere than on Linux, and for empty arrays, the array itself.
    """
    array = np.ascontiguousarray(array)
    if _LIBC is None or not array.nbytes:
        return array
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    base = _LIBC.mmap(None, size + 2 * page, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    _LIBC.mprotect(base, page, _NONE)
    _LIBC.mprotect(base + page + size, page, _NONE)
    held = (ctypes.c_char * array.nbytes).from_address(base + page + size - array.nbytes)
    out = np.frombuffer(held, array.dtype, array.size).reshape(array.shape)
    out[...] = array
    return out
