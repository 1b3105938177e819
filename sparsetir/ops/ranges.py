# SPDX-License-Identifier: Apache-2.0
"""Products with matrices of even density, such as 2:4: ranges of columns whose rows of the dense operand stay in L1."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import sparsetir as T

from sparsetir.errors import ArgumentError
from sparsetir.ops.memo import memoize_program
from sparsetir.utils.arguments import as_count

MAX_WIDTH = 256  # Places in a range have 8 bits.


@memoize_program
def range_spmm(count: int = 32, width: int = 64, *, dtype: str = "float32") -> tirx.PrimFunc:
    """Sparse times dense matrix, range by range of columns: ``C[i, k] = sum_rs A[r, i, s] * B[r, X[r, i, s], k]``.

    Parameters
    ----------
    count : int
        Entries of each row in each range: 32 for 2:4 and a width of 64.
    width : int
        Columns of a range, a power of two up to 256. As many rows of B, of up to 64 columns, fit the first-level cache.
    dtype : dtype
        Of A, B and C.

    Returns
    -------
    PrimFunc
        Buffers A and X ``(ranges, m, count)``, X of uint8, as `pack_ranges` makes them, B ``(ranges, width, feat)`` and
        C ``(m, feat)``.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> matrix = np.array([[0, 1, 2, 0], [3, 0, 0, 4]], "float32")
    >>> values, places = sparsetir.ops.pack_ranges(matrix, 4)
    >>> kernel = sparsetir.build(sparsetir.ops.range_spmm(2, 4))
    >>> kernel(A=values, X=places, B=np.eye(4, dtype="float32").reshape(1, 4, 4)).tolist()
    [[0.0, 1.0, 2.0, 0.0], [3.0, 0.0, 0.0, 4.0]]
    """
    _check_width(width)
    as_count(count, "count", most=width)

    @T.prim_func
    def range_spmm(
        a: T.handle, x: T.handle, b: T.handle, c: T.handle, m: T.int32, ranges: T.int32, feat: T.int32
    ):  # fmt: skip
        JO = T.dense_fixed(ranges)
        JI = T.dense_fixed(width)
        I = T.dense_fixed(m)
        S = T.dense_fixed(count)
        K = T.dense_fixed(feat)
        A = T.match_sparse_buffer(a, (JO, I, S), dtype)
        X = T.match_sparse_buffer(x, (JO, I, S), "uint8")
        B = T.match_sparse_buffer(b, (JO, JI, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, K], "SS", "zero") as [i, k]:
            C[i, k] = 0
        for jo in T.serial(ranges):
            with T.sp_iter([I, S, K], "SRS", "range_spmm") as [i, s, k]:
                C[i, k] = C[i, k] + A[jo, i, s] * B[jo, T.floormod(T.Cast("int32", X[jo, i, s]), width), k]

    return range_spmm


def _check_width(width: Any) -> None:
    as_count(width, "width", least=1, most=MAX_WIDTH)
    if width & (width - 1):
        raise ArgumentError(f"width: expected a power of two up to {MAX_WIDTH}, got {width}. Pass 64.")


def pack_ranges(matrix: np.ndarray, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of a dense matrix that are not zero by ranges of columns, and their places, for `range_spmm`.

    Parameters
    ----------
    matrix : ndarray, shape (m, n)
        n is a multiple of the width.
    width : int
        Columns of a range.

    Returns
    -------
    tuple of ndarray
        Values and places of uint8, both ``(ranges, m, count)``. The count is that of the fullest range of a row; slots
        that are left hold zero.
    """
    _check_width(width)
    if getattr(matrix, "ndim", 0) != 2 or matrix.shape[1] % width:
        shape = getattr(matrix, "shape", type(matrix).__name__)
        raise ArgumentError(f"matrix: expected a matrix with a multiple of {width} columns, got {shape}. Pad it.")
    ranges = np.ascontiguousarray(matrix).reshape(len(matrix), -1, width).transpose(1, 0, 2)
    is_entry = ranges != 0
    count = max(int(is_entry.sum(axis=2).max(initial=0)), 1)
    places = np.argsort(~is_entry, axis=2, kind="stable")[:, :, :count]
    return np.ascontiguousarray(np.take_along_axis(ranges, places, 2)), places.astype("uint8")


__all__ = ["pack_ranges", "range_spmm"]
