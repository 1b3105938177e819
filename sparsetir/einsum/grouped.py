# SPDX-License-Identifier: Apache-2.0
"""Register-blocked kernels of grouped products, and their front for numpy arrays.

A tile of ROWS x VECTORS registers is summed over the whole depth before it is stored. The last tile of a group is moved
back to end with the group, so that tiles have one size; rows that two tiles have in common are computed twice. Threads
share the rows evenly, however long the groups are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.build import build
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop import array_of_numbers, check_detached, is_torch, to_torch
from sparsetir.runtime.kernel import Kernel
from sparsetir.script.printer import parse
from sparsetir.utils.arguments import dtype_name
from sparsetir.utils.caches import remember
from sparsetir.utils.threads import get_num_threads

DTYPES = ("float32", "float64", "float16", "bfloat16")
ROW_TILES = (6, 3, 1)  # with four vectors, 24 accumulators, 4 registers of W and a broadcast: 29 of 32 registers
VECTORS = 4
VECTOR_BYTES = 64

HEADER = """
@T.prim_func(s_tir=True)
def {name}(x: T.handle, w: T.handle, y: T.handle, offsets: T.handle,
           groups: T.int64, rows: T.int64, depth: T.int64, feat: T.int64, chunks: T.int64):
    T.func_attr({{"tirx.noalias": True}})
    X = T.match_buffer(x, (rows, depth), "{dtype}", align={align})
    W = T.match_buffer(w, {w_shape}, "{dtype}", align={align})
    Y = T.match_buffer(y, {y_shape}, "{dtype}", align={align})
    offsets_ = T.match_buffer(offsets, (groups + 1,), "int64", align=8)
    for t in T.parallel(chunks):
        c = T.alloc_buffer(({most},), "{sums}", scope="local")
        for g in range(groups):
            low: T.let[T.int64] = {low}
            high: T.let[T.int64] = {high}
"""
BOUNDS = {
    "rows": ("T.max(offsets_[g], rows * t // chunks)", "T.min(offsets_[g + 1], rows * (t + 1) // chunks)"),
    "weights": ("depth * t // chunks", "depth * (t + 1) // chunks"),
}
ELEMENTS = {  # of the left operand, the right one and the result
    "rows": ("X[{row}, d]", "W[g, d, {column}]", "Y[{row}, {column}]"),
    "weights": ("X[offsets_[g] + d, {row}]", "W[offsets_[g] + d, {column}]", "Y[g, {row}, {column}]"),
}
DEPTHS = {"rows": "depth", "weights": "offsets_[g + 1] - offsets_[g]"}


def _tile(result: str, dtype: str, rows: int, vectors: int, lanes: int) -> list[str]:
    """Return the lines of one tile of registers at `row` and `column`."""
    sums = "float32" if dtype in ("float16", "bfloat16") else dtype
    row, column = f"row + u // {vectors}", f"column + u % {vectors} * {lanes} + l"
    left, right, out = (element.format(row=row, column=column) for element in ELEMENTS[result])
    total = f"c[u * {lanes} + l]"
    left, right = (e if sums == dtype else f'T.Cast("{sums}", {e})' for e in (left, right))
    each = [f"for u in T.unroll({rows * vectors}):", f"    for l in T.vectorized({lanes}):"]
    stored = total if sums == dtype else f'T.Cast("{dtype}", {total})'
    return [
        *each,
        f"        {total} = T.{sums}(0)",
        f"for d in range({DEPTHS[result]}):",
        *(f"    {line}" for line in each),
        f"            {total} = {total} + {left} * {right}",
        *each,
        f"        {out} = {stored}",
    ]


def _panels(result: str, dtype: str, rows: int, lanes: int) -> list[str]:
    """Return the lines that iterate over panels of columns and, within each, tiles of that many rows."""
    lines = []
    for at, (vectors, width) in enumerate(((VECTORS, lanes), (1, lanes), (1, 1))):
        columns, rows = vectors * width, rows if width > 1 else 1
        fits = f"feat >= {columns}" if at == 0 else f"feat < {VECTORS * lanes} and feat >= {lanes}"
        fits = f"feat < {lanes}" if width == 1 else fits
        lines += [
            f"if {fits}:",
            f"    for p in range((feat + {columns - 1}) // {columns}):",
            f"        column: T.let[T.int64] = T.min(p * {columns}, feat - {columns})",
            f"        for r in range((high - low + {rows - 1}) // {rows}):",
            f"            row: T.let[T.int64] = T.min(low + r * {rows}, high - {rows})",
            *(f"            {line}" for line in _tile(result, dtype, rows, vectors, width)),
        ]
    return lines


@remember("kernels of grouped products", 16)
def kernel(dtype: str, result: str) -> Kernel:
    """Return the compiled register-blocked kernel of a grouped product.

    Parameters
    ----------
    dtype : str
    result : {"rows", "weights"}
        ``Y[r] = X[r] @ W[g]`` for rows r of group g, or ``Y[g] = X[g].T @ W[g]``, X and W being rows in groups.
    """
    is_half = dtype in ("float16", "bfloat16")
    item = {"float64": 8, "float32": 4}.get(dtype, 2)
    lanes = VECTOR_BYTES // max(item, 4)
    low, high = BOUNDS[result]
    shapes = {"rows": ("(groups, depth, feat)", "(rows, feat)"), "weights": ("(rows, feat)", "(groups, depth, feat)")}
    w_shape, y_shape = shapes[result]
    text = HEADER.format(
        name=f"grouped_{result}",
        dtype=dtype,
        align=item,
        w_shape=w_shape,
        y_shape=y_shape,
        most=ROW_TILES[0] * VECTORS * lanes,
        sums="float32" if is_half else dtype,
        low=low,
        high=high,
    )
    above = None
    for rows in ROW_TILES:
        text += " " * 12 + f"if high - low >= {rows}" + (f" and high - low < {above}" if above else "") + ":\n"
        text += "".join(f"{' ' * 16}{line}\n" for line in _panels(result, dtype, rows, lanes))
        above = rows
    return build(parse(text))


def run(dtype: str, result: str, x: Any, w: Any, y: Any, offsets: Any) -> None:
    """Compute a grouped product into `y`; the offsets are validated by the caller."""
    groups = len(offsets) - 1
    (rows, depth), feat = x.shape, w.shape[-1]
    if 0 in y.shape:
        return
    chunks = get_num_threads()
    sizes = {"groups": groups, "rows": rows, "depth": depth, "feat": feat, "chunks": chunks}
    kernel(dtype, result)(X=x, W=w, Y=y, offsets_=offsets, **sizes)


def check_offsets(offsets: np.ndarray, rows: int, *, name: str = "offsets", first: int | None = 0) -> None:
    """Validate offsets of groups.

    Raises
    ------
    ArgumentError
        They descend, are negative, or end beyond the rows; where `first` is given, they begin elsewhere.
    """
    if offsets.size and (offsets[0] < 0 or (np.diff(offsets) < 0).any()):
        raise ArgumentError(
            f"{name}: expected ascending positions from 0, got {_shown(offsets)}. Sort the rows by group."
        )
    if first is not None and (not offsets.size or offsets[0] != first):
        raise ArgumentError(f"{name}: expected {first} as the first position, got {_shown(offsets)}. Prepend it.")
    if offsets.size and offsets[-1] > rows:
        fault = f"{name}: expected positions up to {rows}, the number of rows, got {int(offsets[-1])} as the last one"
        raise ArgumentError(f"{fault}. Give the ends of groups within the rows.")


def _shown(offsets: np.ndarray) -> str:
    few = ", ".join(map(str, offsets[:8].tolist()))
    return f"[{few}{', ...' if offsets.size > 8 else ''}]"


def grouped_matmul(x: Any, offsets: Any, W: Any) -> Any:
    """Multiply rows in ragged groups with a matrix for each group: ``y[r] = x[r] @ W[g]`` for the rows r of group g.

    Parameters
    ----------
    x : ndarray of shape (rows, depth)
        Rows sorted by group; float32, float64 or float16.
    offsets : array of int of shape (groups + 1,)
        Where each group begins, and the number of rows. Groups may be empty.
    W : ndarray of shape (groups, depth, feat)
        Of the dtype of `x`.

    Returns
    -------
    ndarray of shape (rows, feat)
        A tensor of torch if `x` is one.

    Raises
    ------
    ArgumentError
        Shapes do not fit, or offsets descend, do not begin with 0 or do not end with the number of rows.
    ArgumentTypeError
        Another dtype, or a tensor that requires grad: `sparsetir.torch.grouped_mm` has gradients.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> W = np.array([[[1.0], [1.0]], [[2.0], [2.0]]])
    >>> sparsetir.grouped_matmul(np.ones((3, 2)), [0, 1, 3], W).tolist()
    [[2.0], [4.0], [4.0]]
    """
    for name, value in (("x", x), ("W", W)):
        if is_torch(value):
            check_detached(value, name, "this function")
    is_tensor = is_torch(x)
    x, W, starts = (array_of_numbers(a, name) for a, name in ((x, "x"), (W, "W"), (offsets, "offsets")))
    dtype = dtype_name(x.dtype)
    if dtype not in DTYPES or x.dtype != W.dtype:
        fault = f"x, W: expected arrays of one dtype of {', '.join(DTYPES)}, got {x.dtype} and {W.dtype}"
        raise ArgumentTypeError(f"{fault}. Convert one with astype.")
    if starts.dtype.kind not in "iu" or starts.ndim != 1:
        fault = f"offsets: expected one dimension of integers, got {starts.dtype} of shape {starts.shape}"
        raise ArgumentTypeError(f"{fault}. Give groups + 1 positions.")
    if x.ndim != 2 or W.ndim != 3 or W.shape[:2] != (starts.size - 1, x.shape[-1]):
        fault = f"x, W: expected (rows, depth) and ({starts.size - 1}, depth, feat), got {x.shape} and {W.shape}"
        raise ArgumentError(f"{fault}. Give one matrix for each group.")
    starts = starts.astype(np.int64)
    check_offsets(starts, x.shape[0])
    if starts[-1] != x.shape[0]:
        fault = f"offsets: expected {x.shape[0]}, the number of rows, as the last position, got {int(starts[-1])}"
        raise ArgumentError(f"{fault}. Append it.")
    y = np.empty((x.shape[0], W.shape[2]), x.dtype)
    run(dtype, "rows", np.ascontiguousarray(x), np.ascontiguousarray(W), y, starts)
    return to_torch(y) if is_tensor else y


__all__ = ["check_offsets", "grouped_matmul", "kernel", "run"]
