# SPDX-License-Identifier: Apache-2.0
"""Kernels of blocks. Sizes are runtime values: one compiled kernel of a dtype serves all blocks of all matrices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import ops
from sparsetir.blocks.reading import Block
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.kernel_factory import make_kernel
from sparsetir.ops.dense_output import added_spmm
from sparsetir.runtime.signature import unchecked
from sparsetir.sparse_output.products import matmul
from sparsetir.stores import Array

# Multiply-adds of a product with a densified block in the time of one of a sparse product, whose rows are scattered.
SCATTER_COST = 30
GRAM_PANEL_BYTES = 512  # of a row of a dense panel: 128 columns of float32
DENSIFIED_PANEL_BYTES = 256 << 10  # of a dense panel, which stays in the second cache
# Threads of a process that call kernels take turns: each call uses all of its threads.
LOCK = threading.RLock()


@cache
def kernel(name: str, dtype: str, idtype: str) -> Any:
    """Compile a kernel once in a process."""
    makers: dict[str, Callable[[], Any]] = {
        "added": lambda: added_spmm(dtype, idtype),
        "spmm": lambda: ops.spmm(dtype, idtype=idtype),
        "spmv": lambda: ops.spmv(dtype, idtype=idtype),
        "transposed": lambda: ops.spmm(dtype, "csc", idtype=idtype),
        "sddmm": lambda: ops.sddmm(dtype, idtype=idtype),
    }
    return make_kernel(makers[name]())


def run(name: str, block: Block, dtype: Any, **operands: Any) -> Any:
    """Call a kernel on the arrays of a block, whose indices were validated when it was read."""
    function = kernel(name, np.dtype(dtype).name, block.indices.dtype.name)
    operands = {"indptr": block.indptr, "indices": block.indices, **operands}
    operands.setdefault("s" if name == "sddmm" else "a", block.data)
    with LOCK, unchecked():
        return function(**operands)


def multiply(block: Block, B: Array, out: Array | None = None) -> Array:
    """Return ``block @ B`` for a matrix or a vector, as a matrix, in the contiguous array `out` if it is given."""
    if B.ndim == 1 or B.shape[1] == 1:
        result = {} if out is None else {"y": out.reshape(-1)}
        return run("spmv", block, B.dtype, x=B.reshape(-1), **result).reshape(-1, 1)
    return run("spmm", block, B.dtype, B=B, **({} if out is None else {"C": out}))


def multiply_transposed(block: Block, Y: Array, extent: int) -> Array:
    """Return ``block.T @ Y`` of shape (extent, columns of Y)."""
    return run("transposed", block, Y.dtype, B=as_matrix(Y), m=extent)


def add_gram(block: Block, extent: int, total: Array, room: int) -> None:
    """Add ``block.T @ block`` to a float64 matrix.

    Short rows are multiplied as sparse ones, long ones by a densified part of at most `room` bytes.
    """
    lengths = np.diff(block.indptr).astype(np.float64)
    if not lengths.sum():
        return
    if SCATTER_COST * (lengths**2).sum() < lengths.sum() * extent:
        rows = to_scipy(block, extent)
        columns = rows.T.tocsr()
        with LOCK:
            product = matmul(columns, rows)
        for begin in range(0, extent, 1024):
            total[begin : begin + 1024] += product[begin : begin + 1024].toarray()
        return
    _add_dense_gram(block, extent, total, room)


def _add_dense_gram(block: Block, extent: int, total: Array, room: int) -> None:
    """Multiply panels of columns, made dense by some rows at a time, by the columns up to the panel's end."""
    dtype = block.data.dtype
    width = min(extent, GRAM_PANEL_BYTES // dtype.itemsize)
    rows = max(1, min(DENSIFIED_PANEL_BYTES // (width * dtype.itemsize), room // (2 * extent * dtype.itemsize)))
    whole = to_scipy(block, extent)
    panels = -(-extent // width)
    sums = [np.zeros((min((p + 1) * width, extent), min(width, extent - p * width)), dtype) for p in range(panels)]
    for begin in range(0, block.end - block.begin, rows):
        part = whole[begin : begin + rows]
        columns, dense = part.T.tocsr(), part.toarray()
        indptr, indices = columns.indptr.astype(np.int32), columns.indices.astype(np.int32)
        for panel, out in enumerate(sums):
            B = np.ascontiguousarray(dense[:, panel * width : (panel + 1) * width])
            lines, count = len(out), int(indptr[len(out)])
            left = Block(0, 0, lines, indptr[: lines + 1], indices[:count], columns.data[:count])
            run("added", left, dtype, B=B, C=out)
    for panel, out in enumerate(sums):
        begin, end = panel * width, min((panel + 1) * width, extent)
        total[: len(out), begin:end] += out
        total[begin:end, :begin] += out[:begin].T


def to_scipy(block: Block, extent: int) -> Any:
    """Wrap a block as a scipy array without copies."""
    return sp.csr_array((block.data, block.indices, block.indptr), shape=(block.end - block.begin, extent))


def column_moments(block: Block, extent: int) -> tuple[Array, Array]:
    """Return mean and summed squared deviation of each column of a block, in float64."""
    rows = block.end - block.begin
    counts = np.bincount(block.indices, minlength=extent)
    mean = np.bincount(block.indices, block.data, extent) / max(rows, 1)
    deviation = block.data - mean[block.indices]
    return mean, np.bincount(block.indices, deviation * deviation, extent) + (rows - counts) * mean * mean


def line_moments(block: Block, extent: int) -> tuple[Array, Array]:
    """Return mean and summed squared deviation of each line of a block, in float64."""
    lengths = np.diff(block.indptr)
    lines = np.repeat(np.arange(len(lengths)), lengths)
    mean = np.bincount(lines, block.data, len(lengths)) / max(extent, 1)
    deviation = block.data - mean[lines]
    return mean, np.bincount(lines, deviation * deviation, len(lengths)) + (extent - lengths) * mean * mean


def merge_moments(left: tuple[int, Array, Array], right: tuple[int, Array, Array]) -> tuple[int, Array, Array]:
    """Combine counts, means and squared deviations of two sets of rows (Chan, Golub and LeVeque, 1979)."""
    (n, mean, square), (m, other_mean, other_square) = left, right
    if not n + m:
        return left
    gap = other_mean - mean
    return n + m, mean + gap * (m / (n + m)), square + other_square + gap * gap * (n * m / (n + m))


def compute_dtype(*dtypes: Any) -> np.dtype[Any]:
    """Return float32 or float64, whichever holds the values of all dtypes."""
    for dtype in dtypes:
        if np.dtype(dtype).kind not in "biuf":
            raise ArgumentTypeError(f"B: expected real numbers, got {dtype}. Convert it with astype.")
    common = np.result_type(*dtypes, np.float16)
    return np.dtype(np.float32 if common.itemsize <= 4 else np.float64)


def as_dense(value: Any, name: str, rows: int, dimensions: tuple[int, ...] = (1, 2)) -> Array:
    """Return a dense operand as an array with so many rows."""
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except Exception as error:  # of the object's own class
        raise ArgumentTypeError(f"{name}: expected a dense array, got {type(value).__name__}. Pass numpy's.") from error
    if np.ma.isMaskedArray(array) or array.dtype.kind not in "biuf":
        what = "a masked array" if np.ma.isMaskedArray(array) else f"{type(value).__name__} of {array.dtype}"
        raise ArgumentTypeError(f"{name}: expected an array of real numbers, got {what}. Convert it with astype.")
    if array.ndim not in dimensions or array.shape[0] != rows:
        expected = f"{rows} rows and {' or '.join(map(str, dimensions))} dimensions"
        raise ArgumentError(f"{name}: expected {expected}, got the shape {array.shape}. Reshape it.")
    return array


def as_matrix(array: Array) -> Array:
    """Return a vector as one column."""
    return array[:, None] if array.ndim == 1 else array


__all__ = [
    "add_gram",
    "as_dense",
    "as_matrix",
    "column_moments",
    "compute_dtype",
    "kernel",
    "line_moments",
    "merge_moments",
    "multiply",
    "multiply_transposed",
    "run",
    "to_scipy",
]
