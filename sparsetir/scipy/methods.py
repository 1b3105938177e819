# SPDX-License-Identifier: Apache-2.0
"""Replaced methods of scipy's classes: classify the operands, and offer to `TimedSelection` what a kernel takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.scipy.libraries import Library
from sparsetir.scipy.selection import TimedSelection

CLASSES = (sp.csr_array, sp.csr_matrix, sp.csc_array, sp.csc_matrix)
MATRICES = (sp.csr_matrix, sp.csc_matrix)
DTYPES = {np.dtype("float32"): "float32", np.dtype("float64"): "float64"}
INDEX_DTYPES = {np.dtype("int32"): "int32", np.dtype("int64"): "int64"}
VECTOR_FACTOR = 4  # a product with a vector is offered from so many times `min_entries` on
MAX_NARROW = 2**31 - 1  # largest offset where sizes have 32 bits
MIN_CONVERTED_COLUMNS = 16  # columns of a dense operand from which a matrix by columns is converted to rows

Method = Callable[[Any, Any], Any]
Size = tuple[int, ...]

_originals: dict[type, dict[str, Method | None]] = {}


def install(selection: TimedSelection) -> None:
    """Replace the methods, those of an earlier `install` too."""
    remove()
    for matrix_class in CLASSES:
        names = {"__matmul__": _matmul, "__rmatmul__": _rmatmul, "__add__": _add, "__sub__": _subtract}
        names["multiply"] = _multiply
        if matrix_class in MATRICES:
            names.update({"__mul__": _matmul, "__rmul__": _rmatmul})
        _originals[matrix_class] = {name: vars(matrix_class).get(name) for name in names}
        for kind, (name, run) in enumerate(names.items()):
            kind += len(names) * CLASSES.index(matrix_class)
            method = _replacement(run, getattr(matrix_class, name), selection, kind)
            # The function is pickled by this name, under which a process without the replacement has scipy's.
            method.__module__, method.__qualname__ = matrix_class.__module__, f"{matrix_class.__qualname__}.{name}"
            setattr(matrix_class, name, method)


def remove() -> None:
    """Put scipy's methods back."""
    for matrix_class, methods in _originals.items():
        for name, method in methods.items():
            if method is None:  # inherited
                delattr(matrix_class, name)
            else:
                setattr(matrix_class, name, method)
    _originals.clear()


def _replacement(run: Callable[..., Any], original: Method, selection: TimedSelection, kind: int) -> Method:
    """Return a method that offers large operands to `run`, and leaves the others to scipy at little cost."""
    least, least_of_vectors = selection.min_entries, VECTOR_FACTOR * selection.min_entries
    untimed, first = selection.untimed, selection.first_untimed
    ndarray = np.ndarray

    @wraps(original)
    def method(self: Any, other: Any) -> Any:
        values = self.data
        count = values.size
        if count < least:
            return original(self, other)
        values_b = other if type(other) is ndarray else getattr(other, "data", None)
        if type(values_b) is not ndarray or (values_b is other and count < least_of_vectors and other.ndim == 1):
            return original(self, other)
        # Whatever the time depends on, within a factor of two.
        bits = (count.bit_length(), self.indptr.size.bit_length(), values_b.size.bit_length())
        size = (*bits, values_b.ndim, values.dtype.num, kind)
        left = untimed.setdefault(size, first)
        if not left:
            return run(selection, original, self, other, size)
        untimed[size] = left - 1
        return original(self, other)

    return method


# ---------------------------------------------------------------------------------------------- classification


def _dtypes(matrix: Any) -> tuple[str, str] | None:
    """Return the dtypes of values and indices where there are kernels for them."""
    indices = matrix.indices
    dtype, idtype = DTYPES.get(matrix.data.dtype), INDEX_DTYPES.get(indices.dtype)
    is_plain = matrix.indptr.dtype == indices.dtype and len(matrix.shape) == 2
    is_dense = matrix.data.flags.c_contiguous and indices.flags.c_contiguous and matrix.indptr.flags.c_contiguous
    return (dtype, idtype) if dtype and idtype and is_plain and is_dense else None


def _is_canonical(matrix: Any) -> bool:
    """Return whether the entries of each row (of csc: column) are in order, and none is repeated.

    scipy's property of that name keeps its first answer, which is wrong once the index arrays were changed in place.
    """
    indices, indptr = matrix.indices, matrix.indptr
    count = int(indptr[-1])
    if indices.size != count or matrix.data.size != count:
        return False
    rises = indices[1:] > indices[:-1]
    starts = indptr[1:-1]
    rises[starts[(starts > 0) & (starts < count)] - 1] = True
    return bool(rises.all())


def _is_finite(matrix: Any) -> bool:
    return bool(np.isfinite(matrix.data).all())


def _fits(idtype: str, *products: int) -> bool:
    return idtype == "int64" or max(products) <= MAX_NARROW


def _matmul(selection: TimedSelection, original: Method, matrix: Any, other: Any, size: Size) -> Any:
    if type(other) is np.ndarray:
        by_rows = matrix.format == "csr"
        result = _dense_product(selection, lambda: original(matrix, other), matrix, other, by_rows, size)
        return original(matrix, other) if result is None else result
    if type(other) in CLASSES:
        return _sparse_product(selection, original, matrix, other, size)
    return original(matrix, other)


def _rmatmul(selection: TimedSelection, original: Method, matrix: Any, other: Any, size: Size) -> Any:
    """Compute ``other @ matrix``, the transposed product of the transposed operands."""
    if type(other) is not np.ndarray or not 0 < other.ndim <= 2:
        return original(matrix, other)
    by_rows = matrix.format == "csc"
    result = _dense_product(selection, lambda: original(matrix, other).T, matrix, other.T, by_rows, size)
    return original(matrix, other) if result is None else result.T


def _dense_product(
    selection: TimedSelection, by_scipy: Callable[[], Any], matrix: Any, other: np.ndarray, is_by_rows: bool, size: Size
) -> np.ndarray | None:
    """Multiply by a dense array; None where there is no kernel for the operands.

    `is_by_rows` tells how the arrays of `matrix` are read: as rows of the left operand, or as its columns.
    """
    dtypes = _dtypes(matrix)
    if dtypes is None or other.dtype != matrix.data.dtype or not 0 < other.ndim <= 2 or not other.flags.aligned:
        return None
    major, minor = len(matrix.indptr) - 1, matrix.shape[matrix.format == "csr"]
    rows, columns = (major, minor) if is_by_rows else (minor, major)
    width = 1 if other.ndim == 1 else other.shape[1]
    if other.shape[0] != columns or width == 0 or not _fits(dtypes[1], max(rows, columns) * width):
        return None
    if not is_by_rows and width < MIN_CONVERTED_COLUMNS:
        return None
    operation = "spmv" if width == 1 else "spmm"

    def by_kernel(kernel: Library) -> np.ndarray | None:
        arrays = matrix if is_by_rows else _as_rows(matrix, rows, columns)
        dense = np.ascontiguousarray(other)
        result = np.empty((rows, *other.shape[1:]), dense.dtype)
        sizes = {"m": rows, "n": columns, "nnz": arrays.data.size, "feat": width}
        outer = {"x_data": dense.ctypes.data, "y_data": result.ctypes.data} if width == 1 else {}
        done = kernel(
            a=arrays.data.ctypes.data,
            indptr=arrays.indptr.ctypes.data,
            indices=arrays.indices.ctypes.data,
            b=dense.ctypes.data,
            c=result.ctypes.data,
            **sizes,
            **outer,
        )
        return result if done else None

    return selection.run((operation, *dtypes), size, by_scipy, by_kernel)


def _as_rows(matrix: Any, rows: int, columns: int) -> Any:
    """Return the arrays of `matrix`, read as columns, sorted into rows."""
    by_columns = sp.csc_array((matrix.data, matrix.indices, matrix.indptr), shape=(rows, columns), copy=False)
    return by_columns.tocsr()


# ---------------------------------------------------------------------------------------------- sparse results


class _LibraryMemory:
    """An array that a library allocated, freed with its last view."""

    def __init__(self, library: Library, address: int, count: int, dtype: str) -> None:
        self.library, self.address = library, address
        self.__array_interface__ = {
            "shape": (count,),
            "typestr": np.dtype(dtype).str,
            "data": (address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self.library.free is not None:
            self.library.free(self.address)


def _sparse_product(selection: TimedSelection, original: Method, left: Any, right: Any, size: Size) -> Any:
    dtypes = _dtypes(left)
    if dtypes is None or len(right.shape) != 2 or left.shape[1] != right.shape[0]:
        return original(left, right)
    shape = (left.shape[0], right.shape[1])

    def by_kernel(kernel: Library) -> Any:
        converted = right if type(right) is type(left) else left.__class__(right)
        if _dtypes(converted) != dtypes:
            return None
        # The transposed product of the transposed operands has the arrays of a result by columns.
        first, second = (left, converted) if left.format == "csr" else (converted, left)
        minor = shape[1] if left.format == "csr" else shape[0]
        sizes = {"m": len(first.indptr) - 1, "p": len(second.indptr) - 1, "n": minor}
        result = _assemble(kernel, left, shape, first, second, sizes)
        is_empty = result is not None and not result.indices.size
        return left.__class__(shape, dtype=left.dtype) if is_empty else result  # with indices of 32 bits

    return selection.run(("spgemm", *dtypes), size, lambda: original(left, right), by_kernel)


def _elementwise(operation: str, **scalars: float) -> Callable[[TimedSelection, Method, Any, Any, Size], Any]:
    """Return the method of an elementwise operation of two sparse operands of one shape."""

    def run(selection: TimedSelection, original: Method, left: Any, right: Any, size: Size) -> Any:
        dtypes = _dtypes(left) if type(right) in CLASSES and left.shape == right.shape else None
        if dtypes is None:
            return original(left, right)

        def by_kernel(kernel: Library) -> Any:
            converted = right if right.format == left.format else left.__class__(right)
            if _dtypes(converted) != dtypes or not (_is_canonical(left) and _is_canonical(converted)):
                return None
            # The product of NaN or an infinity and an entry that is not stored is NaN in scipy.
            if operation == "multiply" and not (_is_finite(left) and _is_finite(converted)):
                return None
            minor = left.shape[left.format == "csr"]
            sizes = {"m": len(left.indptr) - 1, "n": minor, **scalars}
            return _assemble(kernel, left, left.shape, left, converted, sizes)

        return selection.run((operation, *dtypes), size, lambda: original(left, right), by_kernel)

    return run


_add = _elementwise("add")
_subtract = _elementwise("subtract", alpha=1.0, beta=-1.0)
_multiply = _elementwise("multiply")


def _assemble(
    kernel: Library, like: Any, shape: tuple[int, int], first: Any, second: Any, sizes: dict[str, Any]
) -> Any | None:
    """Call a kernel that allocates its result; return the result as the class of `like`, without stored zeros."""
    pointers = {name: ctypes.c_void_p() for name in ("J_indptr", "J_indices", "c")}
    done = kernel(
        a=first.data.ctypes.data,
        b=second.data.ctypes.data,
        indptr_a=first.indptr.ctypes.data,
        indices_a=first.indices.ctypes.data,
        indptr_b=second.indptr.ctypes.data,
        indices_b=second.indices.ctypes.data,
        nnz_a=first.data.size,
        nnz_b=second.data.size,
        **sizes,
        **{name: ctypes.addressof(pointer) for name, pointer in pointers.items()},
    )
    if not done:
        return None
    idtype = first.indices.dtype
    addresses = {name: pointer.value or 0 for name, pointer in pointers.items()}
    indptr = np.asarray(_LibraryMemory(kernel, addresses["J_indptr"], sizes["m"] + 1, "int64"))
    count = int(indptr[-1])
    data = np.asarray(_LibraryMemory(kernel, addresses["c"], count, first.data.dtype.str))
    indices = np.asarray(_LibraryMemory(kernel, addresses["J_indices"], count, idtype.str))
    result = like.__class__((data, indices, indptr.astype(idtype) if count <= MAX_NARROW else indptr), shape=shape)
    result.has_sorted_indices = result.has_canonical_format = True
    if np.count_nonzero(data) != count:
        result.eliminate_zeros()
    return result


__all__ = ["install", "remove"]
