# SPDX-License-Identifier: Apache-2.0
"""Intel MKL through ctypes: inspector-executor products, sparse results."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from ctypes import POINTER, byref, c_double, c_float, c_int, c_void_p
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.utils.packages import MissingPackageError

# Intel MKL's inspector-executor sparse BLAS, called through ctypes on the ``mkl`` wheel.
#
# Reference: oneMKL Developer Reference (C), "Inspector-executor Sparse BLAS Routines"; 32-bit indices (LP64).


BASE_ZERO = 0
NON_TRANSPOSE = 10
GENERAL = 20
ROW_MAJOR = 101
AGGRESSIVE = 81
EXPECTED_CALLS = 1000
INT32_MAX = 2**31 - 1

STATUS = {
    1: "the handle is empty",
    2: "memory could not be allocated",
    3: "an argument has an invalid value",
    4: "execution failed",
    5: "internal error",
    6: "the operation is not supported",
}


class MklError(SparseTIRError, RuntimeError):
    """MKL returned a status other than success."""


class Description(ctypes.Structure):
    """``struct matrix_descr``, passed by value."""

    _fields_ = (("type", c_int), ("mode", c_int), ("diag", c_int))


def check(status: int, routine: str) -> None:
    """Raise if an MKL routine did not return ``SPARSE_STATUS_SUCCESS``."""
    if status:
        raise MklError(f"{routine} failed with status {status}: {STATUS.get(status, 'unknown status')}")


def core_count() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def library_path() -> Path | None:
    """Where the ``mkl`` wheel put ``libmkl_rt``; None if it is not installed."""
    try:
        files = metadata.files("mkl") or []
    except metadata.PackageNotFoundError:
        return None
    names = ("libmkl_rt.so", "libmkl_rt.dylib")
    paths = [Path(str(f.locate())).resolve() for f in files if f.name.startswith(names)]
    return next((path for path in paths if path.exists()), None)


def load_openmp() -> None:
    """Load the one OpenMP runtime that MKL shares with torch.

    MKL ends the process when it cannot find its threading layer, so a missing runtime is found here first.
    """
    if find_spec("torch") is not None:
        import torch  # noqa: F401  (its libgomp must be the first in the process)
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the loaded ``libmkl_rt`` with GNU threading, on all cores this process may use.

    Raises
    ------
    MissingPackageError
        If the wheel or the GNU OpenMP runtime is not there.
    """
    path = library_path()
    if path is None:
        raise MissingPackageError("the mkl package is not installed; try: pip install 'sparsetir[bench]'")
    os.environ.setdefault("MKL_THREADING_LAYER", "GNU")
    os.environ.setdefault("MKL_INTERFACE_LAYER", "LP64")
    try:
        if os.environ["MKL_THREADING_LAYER"] == "GNU":
            load_openmp()
        mkl = ctypes.CDLL(str(path))
    except OSError as error:
        raise MissingPackageError(f"the mkl package is installed but does not load: {error}") from error
    declare(mkl)
    mkl.MKL_Set_Num_Threads(core_count())
    return mkl


def declare(mkl: ctypes.CDLL) -> None:
    """Give the routines their argument types."""
    mkl.MKL_Set_Num_Threads.argtypes = [c_int]
    mkl.mkl_sparse_destroy.argtypes = [c_void_p]
    mkl.mkl_sparse_optimize.argtypes = [c_void_p]
    mkl.mkl_sparse_set_memory_hint.argtypes = [c_void_p, c_int]
    mkl.mkl_sparse_set_mm_hint.argtypes = [c_void_p, c_int, Description, c_int, c_int, c_int]
    mkl.mkl_sparse_set_mv_hint.argtypes = [c_void_p, c_int, Description, c_int]
    create = [POINTER(c_void_p), c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p]
    for letter, real in (("s", c_float), ("d", c_double)):
        mm = [c_int, real, c_void_p, Description, c_int, c_void_p, c_int, c_int, real, c_void_p, c_int]
        getattr(mkl, f"mkl_sparse_{letter}_create_csr").argtypes = create
        getattr(mkl, f"mkl_sparse_{letter}_mm").argtypes = mm
        mv = [c_int, real, c_void_p, Description, c_void_p, real, c_void_p]
        getattr(mkl, f"mkl_sparse_{letter}_mv").argtypes = mv


def set_threads(count: int) -> None:
    """Let MKL use `count` threads."""
    library().MKL_Set_Num_Threads(count)


class MKLMatrix:
    """A CSR matrix inside MKL. The arrays are shared, not copied, where they are int32 and contiguous.

    Parameters
    ----------
    csr : scipy.sparse.csr_array, shape (m, n)
        float32 or float64, fewer than 2**31 nonzeros.
    """

    def __init__(self, csr: Any) -> None:
        letters = {"float32": "s", "float64": "d"}
        if csr.dtype.name not in letters:
            raise ArgumentTypeError(f"MKL multiplies float32 or float64, got {csr.dtype}; try csr.astype('float32')")
        if max(csr.nnz, *csr.shape) > INT32_MAX:
            raise ArgumentError(f"MKL takes fewer than 2**31 nonzeros, rows and columns, got {csr!r}")
        if min(csr.shape) == 0:
            raise ArgumentError(f"MKL takes no matrix without rows or columns, got {csr!r}; leave this peer out")
        self.letter = letters[csr.dtype.name]
        self.shape = csr.shape
        self.dtype = csr.dtype
        self.mkl = library()
        self.descr = Description(GENERAL, 0, 0)
        self.handle = c_void_p()
        # Kept: MKL reads these arrays in every call.
        self.indptr = np.ascontiguousarray(csr.indptr, dtype=np.int32)
        self.indices = np.ascontiguousarray(csr.indices, dtype=np.int32)
        self.values = np.ascontiguousarray(csr.data)
        self._create()
        weakref.finalize(self, self.mkl.mkl_sparse_destroy, self.handle)

    def _create(self) -> None:
        start = self.indptr.ctypes.data
        end = start + self.indptr.itemsize
        where = (start, end, self.indices.ctypes.data, self.values.ctypes.data)
        status = self.routine("create_csr")(byref(self.handle), BASE_ZERO, *self.shape, *where)
        check(status, "mkl_sparse_create_csr")

    def routine(self, name: str) -> Callable[..., int]:
        """Return the typed routine for this matrix's dtype."""
        function: Callable[..., int] = getattr(self.mkl, f"mkl_sparse_{self.letter}_{name}")
        return function

    def optimize(self) -> None:
        """Let MKL inspect the pattern for the hints given."""
        check(self.mkl.mkl_sparse_set_memory_hint(self.handle, AGGRESSIVE), "mkl_sparse_set_memory_hint")
        check(self.mkl.mkl_sparse_optimize(self.handle), "mkl_sparse_optimize")

    def mm(self, dense: np.ndarray) -> Callable[[], np.ndarray]:
        """Return a call that computes ``self @ dense`` for row-major `dense`, into one array that is reused."""
        columns = dense.shape[1]
        out = np.zeros((self.shape[0], columns), self.dtype)
        hint = (NON_TRANSPOSE, self.descr, ROW_MAJOR, columns, EXPECTED_CALLS)
        check(self.mkl.mkl_sparse_set_mm_hint(self.handle, *hint), "mkl_sparse_set_mm_hint")
        self.optimize()
        ends = (dense.ctypes.data, columns, columns, 0.0, out.ctypes.data, columns)
        args = (NON_TRANSPOSE, 1.0, self.handle, self.descr, ROW_MAJOR, *ends)
        return partial(self.run, "mm", self.routine("mm"), args, dense, out)

    def mv(self, dense: np.ndarray) -> Callable[[], np.ndarray]:
        """Return a call that computes ``self @ dense`` for a vector, into one array that is reused."""
        out = np.zeros(self.shape[0], self.dtype)
        hint = (NON_TRANSPOSE, self.descr, EXPECTED_CALLS)
        check(self.mkl.mkl_sparse_set_mv_hint(self.handle, *hint), "mkl_sparse_set_mv_hint")
        self.optimize()
        args = (NON_TRANSPOSE, 1.0, self.handle, self.descr, dense.ctypes.data, 0.0, out.ctypes.data)
        return partial(self.run, "mv", self.routine("mv"), args, dense, out)

    # `self` and `operand` are bound although unread: MKL holds bare addresses into them.
    def run(
        self, name: str, routine: Callable[..., int], args: tuple[Any, ...], operand: np.ndarray, out: np.ndarray
    ) -> np.ndarray:
        """Call `routine` and return the array it wrote."""
        check(routine(*args), f"mkl_sparse_{name}")
        return out


# Results of Intel MKL whose pattern it computes: products and sums of CSR matrices.
#
# Reference: oneMKL Developer Reference (C), ``mkl_sparse_sp2m``, ``mkl_sparse_?_add``, ``mkl_sparse_order`` and
# ``mkl_sparse_?_export_csr``; 32-bit indices (LP64). MKL owns the memory of a result until its handle is destroyed.


FULL_PRODUCT = 90  # SPARSE_STAGE_FULL_MULT: count and compute in one call
REALS = {"s": c_float, "d": c_double}


@lru_cache(maxsize=1)
def routines() -> ctypes.CDLL:
    """Return the library; the routines of this file have their argument types."""
    mkl = library()
    two = [c_int, Description, c_void_p]
    mkl.mkl_sparse_sp2m.argtypes = [*two, *two, c_int, POINTER(c_void_p)]
    mkl.mkl_sparse_order.argtypes = [c_void_p]
    for letter, real in REALS.items():
        getattr(mkl, f"mkl_sparse_{letter}_add").argtypes = [c_int, c_void_p, real, c_void_p, POINTER(c_void_p)]
        exported = [POINTER(c_int)] * 3 + [POINTER(c_void_p)] * 4
        getattr(mkl, f"mkl_sparse_{letter}_export_csr").argtypes = [c_void_p, *exported]
    return mkl


class MKLResult:
    """A matrix that MKL made. Its memory is freed with the object.

    Parameters
    ----------
    handle : c_void_p
    like : MKLMatrix or MKLResult
        Of the same dtype.
    """

    def __init__(self, handle: c_void_p, like: MKLMatrix | MKLResult) -> None:
        self.handle = handle
        self.descr: Description = like.descr
        self.dtype: np.dtype[Any] = like.dtype
        self.routine: Callable[[str], Callable[..., int]] = like.routine
        weakref.finalize(self, routines().mkl_sparse_destroy, handle)

    def ordered(self) -> MKLResult:
        """Return the matrix, the columns of each row sorted in place."""
        check(routines().mkl_sparse_order(self.handle), "mkl_sparse_order")
        return self

    def to_csr(self) -> sp.csr_array:
        """Return a copy as scipy has it."""
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
    """Return a copy of an array of MKL's; where it has no elements it may have no address."""
    if not count:
        return np.empty(0, dtype)
    chars = (ctypes.c_char * (count * dtype.itemsize)).from_address(int(pointer.value or 0))
    return np.frombuffer(memoryview(chars), dtype).copy()


def product(A: MKLMatrix | MKLResult, B: MKLMatrix | MKLResult) -> MKLResult:
    """Return ``A @ B``, the columns of a row in any order."""
    handle = c_void_p()
    left, right = ((NON_TRANSPOSE, part.descr, part.handle) for part in (A, B))
    check(routines().mkl_sparse_sp2m(*left, *right, FULL_PRODUCT, byref(handle)), "mkl_sparse_sp2m")
    return MKLResult(handle, A)


def total(A: MKLMatrix, B: MKLMatrix) -> MKLResult:
    """Return ``A + B``."""
    routines()
    handle = c_void_p()
    status = A.routine("add")(NON_TRANSPOSE, A.handle, 1.0, B.handle, byref(handle))
    check(status, "mkl_sparse_add")
    return MKLResult(handle, A)


__all__ = ["MKLResult", "product", "total"]
