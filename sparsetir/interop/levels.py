# SPDX-License-Identifier: Apache-2.0
"""Levels of a sparse buffer: required arrays, and validation of index arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from sparsetir.errors import ArgumentTypeError, StructureError
from sparsetir.utils.arguments import VALUE_DTYPES

# What one axis of a sparse buffer asks of the arrays that hold it.


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Validator: TypeAlias = Callable[..., bool]  # with the parameters of `is_sound`

HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost


@dataclass(frozen=True, eq=False)
class Level:
    """One axis of a sparse buffer; a buffer is a list of levels in subscript order.

    Parameters
    ----------
    name : str
        The axis, for messages.
    kind : str
        ``dense_fixed``, ``dense_variable``, ``dense_implicit``, ``sparse_fixed``, ``sparse_variable`` or ``singleton``.
    parent : int or None
        Where the parent axis is in the list; None for the root of a tree.
    idtype : str
        ``int32`` or ``int64``.
    length : int or None
        Dense length, None while unknown.
    width : int or None
        Slots per fiber of a ``sparse_fixed`` axis, None while unknown.
    rule, extent_rule, offset_rule : callable or None
        Formulas on numpy arrays that replace index arrays: ``rule(*ancestor_coords, slot, position)`` is a coordinate,
        ``extent_rule(*ancestor_coords)`` and ``offset_rule(*ancestor_coords)`` describe a ``dense_implicit`` fiber.
    sorted, unique : bool
        Whether the coordinates of a fiber increase, and whether they are distinct.
    full : bool
        Whether every slot of an axis holds a coordinate.
    """

    name: str
    kind: str
    parent: int | None = None
    idtype: str = "int32"
    length: int | None = None
    width: int | None = None
    rule: Callable[..., Any] | None = None
    extent_rule: Callable[..., Any] | None = None
    offset_rule: Callable[..., Any] | None = None
    sorted: bool = True
    unique: bool = True
    full: bool = False


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # numpy builds it again each time, which takes microseconds


def check_dtype(dtype: np.dtype[Any], expected: str, *, name: str, torch: bool = False, option: str = "dtype") -> None:
    """Raise `ArgumentTypeError` unless values of dtype `dtype` are what a kernel computes in.

    `option` is the argument of the ready programs that decides it.
    """
    dtype_name = _dtype_name(dtype)
    if dtype_name == expected:
        return
    cast = f"{name}.to(torch.{expected})" if torch else f"{name}.astype({expected!r})"
    if option == "idtype":
        remedy = f"pass {cast}" + (
            f" or build the program with idtype={dtype_name!r}" if dtype_name in ("int32", "int64") else ""
        )
        raise ArgumentTypeError(f"{name} holds {dtype_name} but the kernel reads it as {expected}: {remedy}")
    is_other = dtype_name in VALUE_DTYPES and expected != "bool"  # masks are bool, whatever the program computes in
    remedy = f"pass {cast} or build the program with dtype={dtype_name!r}" if is_other else f"pass {cast}"
    raise ArgumentTypeError(f"{name} holds {dtype_name} but the kernel computes in {expected}: {remedy}")


def narrow(array: Array, level: Level, what: str, name: str) -> Array:
    """Convert `array` to the axis' index type; return the same object if it has that type."""
    if array.dtype != level.idtype:
        check_capacity(int(array.max(initial=0)), level, what, name)
    return np.require(array, level.idtype, ["C", "A"])


def check_capacity(top: int, level: Level, what: str, name: str) -> None:
    """Raise if the index dtype of an axis cannot represent its largest value."""
    if top > np.iinfo(level.idtype).max:
        fault = f"{what} of axis {level.name} of {name} reaches {top}, which {level.idtype} cannot hold"
        raise StructureError(f'{fault}: declare the axis with idtype="int64"')


# Checks of index arrays.


CHUNK = 1 << 16  # elements compared at a time, so that temporaries stay in cache


def check_level(
    level: Level,
    indptr: Array | None,
    indices: Array | None,
    *,
    parent_count: int,
    length: int | None,
    name: str,
    need_sorted: bool,
    count: int | None = None,
) -> None:
    """Raise `StructureError` unless the arrays of one axis are what its kind promises.

    Parameters
    ----------
    level : Level
        The axis.
    indptr, indices : ndarray or None
        Its arrays; None skips what concerns them.
    parent_count : int
        Number of positions of the parent axis (1 for a root).
    length : int or None
        Dense length; None skips the range of the indices.
    name : str
        The argument, for messages.
    need_sorted : bool
        Whether every fiber must be in order, strictly if ``level.unique``.
    count : int or None
        Number of stored values, for an axis without indices.
    """
    where = f"axis {level.name} of {name}"
    if indptr is not None:
        _check_integers(indptr, f"indptr of {where}")
        _check_indptr(indptr, parent_count, count if indices is None else indices.size, where)
    if indices is None:
        return
    indices = indices.reshape(-1)
    _check_integers(indices, f"indices of {where}")
    starts: Array | int | None = indptr
    if level.kind != "sparse_variable":
        starts = _check_count(level, indices.size, parent_count, where)
    if length is not None:
        _check_range(indices, length, where, may_be_absent=level.kind != "sparse_variable" and not level.full)
    if need_sorted and starts is not None and level.kind != "singleton":
        _check_sorted(level, indices, starts, length, where)


def check_distinct(indices: Array, length: int, where: str) -> None:
    """Raise `StructureError` if a list without a parent has a coordinate twice; `length` marks slots without one.

    What a program does for different coordinates may be done at the same time.
    """
    flat = indices.reshape(-1)
    if first_disorder(flat, None, strict=True, padding_from=length) is None:
        return
    ordered = np.sort(flat[flat < length])
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1])
    if repeats.size:
        remedy = "leave one of them out, or declare the axis with unique=False"
        raise StructureError(f"indices of {where} hold coordinate {ordered[repeats[0]]} twice: {remedy}")


def is_sound(level: Level, indptr: Array, indices: Array, *, parent_count: int, length: int, need_sorted: bool) -> bool:
    """Return whether `check_level` would take the arrays of a ``sparse_variable`` axis, in less time for small ones."""
    size = indices.size
    if indptr.shape != (parent_count + 1,) or indptr[0] != 0 or indptr[-1] != size:
        return False
    if max(size, indptr.size) > CHUNK:
        is_ordered = first_disorder(indptr, None, strict=False) is None and first_outside(indices, length) is None
        return is_ordered and not (need_sorted and first_disorder(indices, indptr, strict=level.unique) is not None)
    if np.count_nonzero(indptr[1:] < indptr[:-1]):
        return False
    if not size:
        return True
    if np.count_nonzero(indices >= length) or np.count_nonzero(indices < 0):
        return False
    if not need_sorted:
        return True
    bad = np.empty(size + 1, np.bool_)  # the last one and the first one of each fiber are set below
    (np.less_equal if level.unique else np.less)(indices[1:], indices[:-1], out=bad[1:size])
    bad[indptr] = False
    return not np.count_nonzero(bad)


def _check_integers(array: Array, what: str) -> None:
    if array.dtype.kind not in "iu":
        raise StructureError(f"{what}: expected int32 or int64, got {array.dtype}")


def _check_indptr(indptr: Array, parent_count: int, count: int | None, where: str) -> None:
    if indptr.shape != (parent_count + 1,):
        expected = f"{parent_count + 1}, one more than the {parent_count} positions above it"
        raise StructureError(f"indptr of {where} has shape {indptr.shape}, expected length {expected}")
    if indptr[0] != 0:
        raise StructureError(f"indptr of {where} starts at {indptr[0]}, expected 0")
    bad = first_disorder(indptr, None, strict=False)
    if bad is not None:
        raise StructureError(
            f"indptr of {where} decreases at row {bad - 1}: {indptr[bad - 1]} is followed by {indptr[bad]}"
        )
    if count is not None and indptr[-1] != count:
        raise StructureError(f"indptr of {where} ends at {indptr[-1]} but there are {count} stored entries")


def _check_count(level: Level, size: int, parent_count: int, where: str) -> int:
    """Return the slots per fiber of an axis with fibers of equal length; raise for a wrong number of indices."""
    width = 1 if level.kind == "singleton" else level.width
    if width is None:
        width = size // max(parent_count, 1)
    if size != parent_count * width:
        expected = f"{width} for each of the {parent_count} positions above it"
        raise StructureError(f"indices of {where} have {size} entries, expected {expected}")
    return width


def _check_range(indices: Array, length: int, where: str, *, may_be_absent: bool) -> None:
    position = first_outside(indices, length + may_be_absent)
    if position is not None:
        absent = f", or {length} where there is no entry" if may_be_absent else ""
        fault = f"indices of {where} hold {indices[position]} at position {position}"
        raise StructureError(f"{fault}, expected one of [0, {length}){absent}")


def _check_sorted(level: Level, indices: Array, starts: Array | int, length: int | None, where: str) -> None:
    padding_from = None if level.kind == "sparse_variable" else length
    at = first_disorder(indices, starts, strict=level.unique, padding_from=padding_from)
    if at is None:
        return
    row = at // starts if isinstance(starts, int) else int(np.searchsorted(starts, at, side="right")) - 1
    if indices[at] == indices[at - 1]:
        fault = f"hold coordinate {indices[at]} twice in row {row} (positions {at - 1} and {at})"
        raise StructureError(f"indices of {where} {fault}: add the entries up or declare the axis with unique=False")
    fault = f"are not sorted in row {row}: {indices[at - 1]} is followed by {indices[at]} at position {at}"
    remedy = "sort the row or declare the axis with sorted=False"
    if padding_from is not None:
        remedy += f"; padding at the end of a row must be {length}"
    raise StructureError(f"indices of {where} {fault}: {remedy}")


def first_outside(indices: Array, length: int) -> int | None:
    """Return the position of the first index not in ``[0, length)``."""
    if indices.size == 0:
        return None
    if indices.dtype.kind == "i":
        if length > np.iinfo(indices.dtype).max:  # of which all that are not negative are less
            return int(np.argmax(indices < 0)) if int(indices.min()) < 0 else None
        # Read as unsigned, a negative number is a huge one: a single pass finds both.
        indices = indices.view(indices.dtype.str.replace("i", "u"))
    if int(indices.max()) < length:
        return None
    return int(np.argmax(indices >= length))


def are_ascending(indices: Array, indptr: Array) -> bool:
    """Return whether the coordinates of each row are strictly ascending."""
    return first_disorder(indices, indptr, strict=True) is None


def first_disorder(
    array: Array, starts: Array | int | None, *, strict: bool, padding_from: int | None = None
) -> int | None:
    """Return first position whose element is less than the one before it in the same fiber, or equal to it if `strict`.

    `starts` are the positions at which fibers begin, or the size of all fibers, or None for a single fiber.
    Elements outside ``[0, padding_from)`` may repeat.
    """
    compare = np.less_equal if strict else np.less
    for begin in range(1, array.size, CHUNK):
        stop = min(begin + CHUNK, array.size)
        now, before = array[begin:stop], array[begin - 1 : stop - 1]
        bad = compare(now, before)
        if isinstance(starts, int):
            bad[-begin % max(starts, 1) :: max(starts, 1)] = False
        elif starts is not None:
            # the needle has the haystack's dtype, or numpy converts the haystack for every chunk
            low, high = np.searchsorted(starts, np.array([begin, stop], starts.dtype))
            bad[starts[low:high] - begin] = False
        if bad.any() and padding_from is not None:
            bad &= (now != before) | ((now >= 0) & (now < padding_from))
        if bad.any():
            return begin + int(bad.argmax())
    return None
