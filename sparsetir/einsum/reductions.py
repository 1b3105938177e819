# SPDX-License-Identifier: Apache-2.0
"""Reductions of `SparseTensor` with numpy's semantics: what is not stored counts as zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from string import ascii_lowercase as LETTERS
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsetir.einsum.expression import einsum
from sparsetir.einsum.operators import astype, entry_keys, is_index, mapped
from sparsetir.einsum.subscripts import LIMITS
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.utils.arguments import dtype_name, is_float, shown

Axis: TypeAlias = "int | tuple[int, ...] | None"


def _kept(tensor: SparseTensor, axis: Axis) -> str:
    """Return the letters that a reduction over `axis` keeps."""
    if axis is None:
        return ""
    given = axis if isinstance(axis, tuple) else (axis,)
    if not all(is_index(d) for d in given):
        raise ArgumentTypeError(f"an axis is a whole number, found {shown(axis)}")
    if any(not -tensor.ndim <= d < tensor.ndim for d in given):
        raise ArgumentError(f"axis {axis} of a tensor of {tensor.ndim} dimensions")
    gone = {int(d) % tensor.ndim for d in given}
    return "".join(c for d, c in enumerate(LETTERS[: tensor.ndim]) if d not in gone)


def total(tensor: SparseTensor, axis: Axis) -> Any:
    """Compute the sum; of bools and short integers in 64 bits, as numpy does."""
    if tensor.dtype.kind == "c":
        return _of_parts(total, tensor, axis)
    if tensor.dtype.kind in "biu" and tensor.dtype.itemsize < 8:
        tensor = astype(tensor, "uint64" if tensor.dtype.kind == "u" else "int64")
    return einsum(f"{LETTERS[: tensor.ndim]}->{_kept(tensor, axis)}", tensor, result="dense")


def _of_parts(reduction: Callable[[SparseTensor, Axis], Any], tensor: SparseTensor, axis: Axis) -> Any:
    """Reduce complex numbers by a linear reduction of their parts; complex arithmetic makes NaN of infinite parts."""
    real, imag = (np.asarray(reduction(mapped(part, tensor), axis)) for part in (np.real, np.imag))
    joined = np.empty(real.shape, tensor.dtype)
    joined.real, joined.imag = real, imag
    return joined[()]


def mean(tensor: SparseTensor, axis: Axis) -> Any:
    if tensor.dtype.kind == "c":
        return _of_parts(mean, tensor, axis)
    kept = _kept(tensor, axis)
    count = math.prod(n for c, n in zip(LETTERS, tensor.shape, strict=False) if c not in kept)
    dtype = tensor.dtype if is_float(tensor.dtype) else np.dtype("float64")
    wide = "float32" if dtype.itemsize == 2 else dtype.name  # as numpy has means of 16 bits
    found = total(tensor if tensor.dtype.name == wide else astype(tensor, wide), axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(found / np.asarray(count, found.dtype)).astype(dtype)[()]


def extreme(tensor: SparseTensor, axis: Axis, which: str) -> Any:
    """Compute the largest or smallest element."""
    kept, name = _kept(tensor, axis), dtype_name(tensor.dtype)
    counted = [n for c, n in zip(LETTERS, tensor.shape, strict=False) if c not in kept]
    if 0 in counted:
        raise ArgumentError(f"there is no {which} of no elements: the shape is {tensor.shape}")
    low, high = LIMITS.get(name, (-math.inf, math.inf))
    text = f"{LETTERS[: tensor.ndim]}->{kept}"
    found = np.asarray(
        einsum(text, tensor, reduce=which, fill=low if which == "max" else high, result="dense"), tensor.dtype
    )
    stored = _stored_counts(tensor, kept)
    join = np.maximum if which == "max" else np.minimum
    nan = _nan_where_stored(tensor, kept, found)
    with np.errstate(invalid="ignore"):  # NaN of bfloat16
        return join(np.where(stored < math.prod(counted), join(found, tensor.dtype.type(0)), found), nan)[()]


def _nan_where_stored(tensor: SparseTensor, kept: str, found: np.ndarray) -> Any:
    """Return NaN where an entry is NaN, as numpy's reductions do; else the value of `found`."""
    if not is_float(tensor.dtype) or not np.isnan(tensor.values).any():
        return found
    bad = astype(mapped(np.isnan, tensor), "float64")
    return np.where(np.asarray(total(bad, _axes(tensor, kept))) > 0, tensor.dtype.type(np.nan), found)


def _axes(tensor: SparseTensor, kept: str) -> Axis:
    return tuple(d for d, c in enumerate(LETTERS[: tensor.ndim]) if c not in kept)


def _stored_counts(tensor: SparseTensor, kept: str) -> Any:
    """Return the number of entries that are reduced to each element of a result."""
    dims = [LETTERS.index(c) for c in kept]
    if not dims:
        return np.asarray(tensor.nnz)
    shape = tuple(tensor.shape[d] for d in dims)
    flat = np.ravel_multi_index([tensor.coords[d] for d in dims], shape) if tensor.nnz else np.zeros(0, np.int64)
    return np.bincount(flat, minlength=math.prod(shape)).reshape(shape)


# ------------------------------------------------------------------ spread


def variance(tensor: SparseTensor, axis: Axis, ddof: float) -> Any:
    """Compute the mean of the squared distances from the mean; of integers in float64.

    The distances of entries are squared, those of the other elements are the mean itself: no digits cancel.
    """
    if not isinstance(ddof, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(f"ddof: expected a number, got {type(ddof).__name__}. Pass 0 or 1.")
    if tensor.dtype.kind == "c":
        return sum(variance(mapped(part, tensor), axis, ddof) for part in (np.real, np.imag))
    dtype = tensor.dtype if is_float(tensor.dtype) else np.dtype("float64")
    wide = astype(tensor, "float32" if dtype.itemsize == 2 else dtype.name)
    kept = _kept(tensor, axis)
    count = _reduced(tensor, kept)
    with np.errstate(all="ignore"):
        center = np.asarray(mean(wide, axis))
        dims = tuple(tensor.coords[LETTERS.index(c)] for c in kept)
        squares = np.square(wide.values - center[dims])
        total_of = np.asarray(total(wide.with_values(squares), axis))
        missing = np.asarray(count - _stored_counts(tensor, kept))
        whole = total_of + np.where(missing > 0, missing * np.square(center), 0).astype(center.dtype)
        return np.asarray(whole / np.asarray(max(count - ddof, 0), center.dtype)).astype(dtype)[()]


def deviation(tensor: SparseTensor, axis: Axis, ddof: float) -> Any:
    """Compute the square root of the variance."""
    return np.sqrt(variance(tensor, axis, ddof))


def logsumexp(tensor: SparseTensor, axis: Axis) -> Any:
    """Compute the logarithm of the sum of exponentials; those of zeros that are not stored are 1."""
    if tensor.dtype.kind == "c":
        raise ArgumentTypeError(f"logsumexp: expected real numbers, got {tensor.dtype}. Pass the real parts.")
    dtype = tensor.dtype if is_float(tensor.dtype) else np.dtype("float64")
    wide = astype(tensor, "float32" if dtype.itemsize == 2 else dtype.name)
    kept = _kept(tensor, axis)
    count = _reduced(tensor, kept)
    if not count:
        return np.full([n for c, n in zip(LETTERS, tensor.shape, strict=False) if c in kept], -np.inf, dtype)[()]
    with np.errstate(all="ignore"):
        top = np.asarray(extreme(wide, axis, "max"))
        shift = np.where(np.isfinite(top), top, 0).astype(top.dtype)
        dims = tuple(tensor.coords[LETTERS.index(c)] for c in kept)
        powers = np.asarray(total(wide.with_values(np.exp(wide.values - shift[dims])), axis))
        missing = np.asarray(count - _stored_counts(tensor, kept))
        absent = np.where(missing > 0, missing * np.exp(-shift), 0).astype(top.dtype)
        return np.asarray(np.log(powers + absent) + shift).astype(dtype)[()]


def _reduced(tensor: SparseTensor, kept: str) -> int:
    """Return how many elements are reduced to each element of a result."""
    return math.prod(n for c, n in zip(LETTERS, tensor.shape, strict=False) if c not in kept)


# ------------------------------------------------------------------ places of extremes


class _Lines(NamedTuple):
    """Entries by the lines that are searched: of each entry its line, its place there, and its value."""

    number: int
    length: int
    line: np.ndarray
    place: np.ndarray
    values: np.ndarray


def _lines(tensor: SparseTensor, axis: int | None) -> tuple[_Lines, tuple[int, ...]]:
    """Return the entries in order of their lines and places, and the shape of the result."""
    values = tensor.values if tensor.dtype.name != "bfloat16" else tensor.values.astype("float32")
    if axis is None:
        keys = entry_keys(tensor).astype(np.int64)
        return _Lines(1, math.prod(tensor.shape), np.zeros(len(keys), np.int64), keys, values), ()
    d = axis % tensor.ndim
    shape = tuple(n for at, n in enumerate(tensor.shape) if at != d)
    dims = [tensor.coords[at].astype(np.int64) for at in range(tensor.ndim) if at != d]
    line = np.ravel_multi_index(dims, shape) if dims and tensor.nnz else np.zeros(tensor.nnz, np.int64)
    place = tensor.coords[d].astype(np.int64)
    if d == tensor.ndim - 1:
        return _Lines(math.prod(shape), tensor.shape[d], line, place, values), shape
    order = np.lexsort((place, line))
    return _Lines(math.prod(shape), tensor.shape[d], line[order], place[order], values[order]), shape


def place_of_extreme(tensor: SparseTensor, axis: int | None, which: str) -> Any:
    """Return the first place of the largest or smallest element; NaN is found before all others, as by numpy."""
    if axis is not None and (not is_index(axis) or not -tensor.ndim <= axis < tensor.ndim):
        raise ArgumentError(f"axis: expected a dimension of {tensor.ndim}, or None, got {shown(axis)}. Pass one.")
    if tensor.dtype.kind == "c":
        raise ArgumentTypeError(f"arg{which}: expected real numbers, got {tensor.dtype}. Pass the real parts.")
    lines, shape = _lines(tensor, axis)
    if not lines.length:
        raise ArgumentError(f"there is no arg{which} of no elements: the shape is {tensor.shape}")
    found = np.zeros(lines.number, np.intp)
    if not lines.line.size:
        return found.reshape(shape)[()]
    starts = np.flatnonzero(np.diff(lines.line, prepend=-1))
    sizes = np.diff(starts, append=lines.line.size)
    reduce = np.maximum if which == "max" else np.minimum
    with np.errstate(invalid="ignore"):
        best = reduce.reduceat(lines.values, starts)
        is_better = best > 0 if which == "max" else best < 0
    of_entry = np.repeat(best, sizes)
    is_best = (lines.values == of_entry) | ((lines.values != lines.values) & (of_entry != of_entry))
    stored = _first(is_best, lines.place, starts, lines.length)
    rank = np.arange(lines.line.size) - np.repeat(starts, sizes)
    absent = np.minimum(
        _first(lines.place != rank, rank, starts, lines.length), np.where(sizes < lines.length, sizes, lines.length)
    )
    place = np.where(is_better | (best != best), stored, np.where(best == 0, np.minimum(stored, absent), absent))
    found[lines.line[starts]] = np.where(absent >= lines.length, stored, place)
    return found.reshape(shape)[()]


def _first(chosen: np.ndarray, places: np.ndarray, starts: np.ndarray, none: int) -> np.ndarray:
    """Return the first chosen place of each line, or `none`."""
    return np.minimum.reduceat(np.where(chosen, places, none), starts)


# ------------------------------------------------------------------ shapes of results


def keeping(tensor: SparseTensor, axis: Axis, result: Any) -> np.ndarray:
    """Return a result with the reduced dimensions, of extent 1."""
    kept = _kept(tensor, axis)
    return np.asarray(result).reshape([n if c in kept else 1 for c, n in zip(LETTERS, tensor.shape, strict=False)])


__all__ = ["deviation", "extreme", "keeping", "logsumexp", "mean", "place_of_extreme", "total", "variance"]
