# SPDX-License-Identifier: Apache-2.0
"""Arrays between unreadable pages: a step past the end, or far before the start, ends the process at once.

`Fences` copies single arrays. In a process that began with `environment`, `Everything` has every array of numpy in such
memory, sparsetir's own among them, and what compiled functions allocate.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

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


# ---------------------------------------------------------------------------------------------- of a whole process

LIBRARY = "SPARSETIR_FENCES"  # the variable that names it
SET_HANDLER = 304  # of numpy's C API, which never moves: PyDataMem_SetHandler


def fence_compiler() -> str | None:
    """What compiles the library; None on other systems than Linux, or without a C compiler."""
    return None if _LIBC is None else shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@cache
def environment() -> dict[str, str] | None:
    """Variables of a process that may fence everything; None where that cannot be, or the compiler fails."""
    compiler = fence_compiler()
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="fences"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, library = Path(__file__).with_suffix(".c"), folder / "fences.so"
    done = subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=False)
    if done.returncode:
        return None
    return {LIBRARY: str(library), "LD_PRELOAD": str(library)}  # loaded first, as it stands in for functions of TVM


class Everything:
    """Has all arrays of numpy between unreadable pages `within` a context, where that can be: see `environment`.

    An array stays there until it is freed, also outside.
    """

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ[LIBRARY]) if LIBRARY in os.environ else None
        if self.library is None:
            return
        core: Any = getattr(np, "_core", None) or np.core
        api, table = ctypes.pythonapi, core._multiarray_umath._ARRAY_API
        api.PyCapsule_GetPointer.restype, api.PyCapsule_New.restype = ctypes.c_void_p, ctypes.py_object
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        functions = ctypes.cast(api.PyCapsule_GetPointer(table, None), ctypes.POINTER(ctypes.c_void_p))
        self.set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[SET_HANDLER])
        handler = ctypes.addressof(ctypes.c_char.in_dll(self.library, "fences_handler"))
        self.handler = api.PyCapsule_New(handler, b"mem_handler", None)
        self.library.fences_made.restype = ctypes.c_int64

    def place(self, *, begins: bool, fill: int) -> None:
        """Whether memory begins after an unreadable page or ends at one, and the byte of which it is full."""
        if self.library is not None:
            self.library.fences_place(int(begins), fill)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Where arrays are fenced."""
        if self.library is None:
            yield
            return
        usual, alignment = self.set_handler(self.handler), sys.modules.get("sparsetir.utils.buffers")
        try:
            # An array that begins at a cache line has room behind its end otherwise.
            usual_memory = {"empty": np.empty, "zeros": np.zeros}
            with contextlib.nullcontext() if alignment is None else mock.patch.multiple(alignment, **usual_memory):
                yield
        finally:
            self.set_handler(usual)

    @property
    def made(self) -> list[int]:
        """How many blocks there have been, for arrays and for compiled functions."""
        return [0, 0] if self.library is None else [self.library.fences_made(which) for which in (0, 1)]
