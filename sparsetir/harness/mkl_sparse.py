# SPDX-License-Identifier: Apache-2.0
"""Results of Intel MKL whose pattern it computes: products and sums of CSR matrices.

Reference: oneMKL Developer Reference (C), ``mkl_sparse_sp2m``, ``mkl_sparse_?_add``, ``mkl_sparse_order`` and
``mkl_sparse_?_export_csr``; 32-bit indices (LP64). MKL owns the memory of a result until its handle is destroyed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import POINTER, byref, c_double, c_float, c_int, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.harness.mkl import NON_TRANSPOSE, Description, Matrix, check, library

FULL_PRODUCT = 90  # SPARSE_STAGE_FULL_MULT: count and compute in one call
REALS = {"s": c_float, "d": c_double}


@lru_cache(maxsize=1)
def routines() -> ctypes.CDLL:
    """The library; the routines of this file have their argument types."""
    mkl = library()
    two = [c_int, Description, c_void_p]
    mkl.mkl_sparse_sp2m.argtypes = [*two, *two, c_int, POINTER(c_void_p)]
    mkl.mkl_sparse_order.argtypes = [c_void_p]
    for letter, real in REALS.items():
        getattr(mkl, f"mkl_sparse_{letter}_add").argtypes = [c_int, c_void_p, real, c_void_p, POINTER(c_void_p)]
        exported = [POINTER(c_int)] * 3 + [POINTER(c_void_p)] * 4
        getattr(mkl, f"mkl_sparse_{letter}_export_csr").argtypes = [c_void_p, *exported]
    return mkl


class Result:
    """A matrix that MKL made. Its memory is freed with the object.

    Parameters
    ----------
    handle : c_void_p
    like : Matrix or Result
        Of the same dtype.
    """

    def __init__(self, handle: c_void_p, like: Matrix | Result) -> None:
        self.handle = handle
        self.descr: Description = like.descr
        self.dtype: np.dtype[Any] = like.dtype
        self.routine: Callable[[str], Callable[..., int]] = like.routine
        weakref.finalize(self, routines().mkl_sparse_destroy, handle)

    def ordered(self) -> Result:
        """The same, the columns of each row sorted in place."""
        check(routines().mkl_sparse_order(self.handle), "mkl_sparse_order")
        return self

    def to_csr(self) -> sp.csr_array:
        """A copy as scipy has it."""
        base, shape = c_int(), (c_int(), c_int())
        starts, ends, columns, values = (c_void_p() for _ in range(4))
        where = (byref(part) for part in (starts, ends, columns, values))
        status = self.routine("export_csr")(self.handle, byref(base), *map(byref, shape), *where)
        check(status, "mkl_sparse_export_csr")
        m, n = (part.value for part in shape)
        indptr = np.concatenate(([0], copied(ends, m, np.dtype(np.int32)))).astype(np.int32)
        nnz = int(indptr[-1])
        arrays = copied(values, nnz, self.dtype), copied(columns, nnz, np.dtype(np.int32)), indptr
        return sp.csr_array(arrays, shape=(m, n))


def copied(pointer: c_void_p, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """A copy of an array of MKL's; where it has no elements it may have no address."""
    if not count:
        return np.empty(0, dtype)
    held = (ctypes.c_char * (count * dtype.itemsize)).from_address(int(pointer.value or 0))
    return np.frombuffer(memoryview(held), dtype).copy()


def product(A: Matrix | Result, B: Matrix | Result) -> Result:
    """``A @ B``, the columns of a row in any order."""
    handle = c_void_p()
    left, right = ((NON_TRANSPOSE, part.descr, part.handle) for part in (A, B))
    check(routines().mkl_sparse_sp2m(*left, *right, FULL_PRODUCT, byref(handle)), "mkl_sparse_sp2m")
    return Result(handle, A)


def total(A: Matrix, B: Matrix) -> Result:
    """``A + B``."""
    routines()
    handle = c_void_p()
    status = A.routine("add")(NON_TRANSPOSE, A.handle, 1.0, B.handle, byref(handle))
    check(status, "mkl_sparse_add")
    return Result(handle, A)


__all__ = ["Result", "product", "total"]
