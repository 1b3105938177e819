# SPDX-License-Identifier: Apache-2.0
"""What one axis of a sparse buffer asks of the arrays that hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from sparsetir.errors import ArgumentTypeError, StructureError
from sparsetir.scalars import VALUE_DTYPES

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

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


def check_dtype(found: np.dtype[Any], expected: str, *, name: str, torch: bool = False, option: str = "dtype") -> None:
    """Raise `ArgumentTypeError` unless values of dtype `found` are what a kernel computes in.

    `option` is the argument of the ready programs that decides it.
    """
    held = _dtype_name(found)
    if held == expected:
        return
    cast = f"{name}.to(torch.{expected})" if torch else f"{name}.astype({expected!r})"
    if option == "idtype":
        remedy = f"pass {cast}" + (f" or build the program with idtype={held!r}" if held in ("int32", "int64") else "")
        raise ArgumentTypeError(f"{name} holds {held} but the kernel reads it as {expected}: {remedy}")
    is_other = held in VALUE_DTYPES and expected != "bool"  # masks are bool, whatever the program computes in
    remedy = f"pass {cast} or build the program with dtype={held!r}" if is_other else f"pass {cast}"
    raise ArgumentTypeError(f"{name} holds {held} but the kernel computes in {expected}: {remedy}")


def narrow(array: Array, level: Level, what: str, name: str) -> Array:
    """`array` in the axis' index type, the same object if it has that type already."""
    if array.dtype != level.idtype:
        check_capacity(int(array.max(initial=0)), level, what, name)
    return np.require(array, level.idtype, ["C", "A"])


def check_capacity(top: int, level: Level, what: str, name: str) -> None:
    if top > np.iinfo(level.idtype).max:
        found = f"{what} of axis {level.name} of {name} reaches {top}, which {level.idtype} cannot hold"
        raise StructureError(f'{found}: declare the axis with idtype="int64"')
