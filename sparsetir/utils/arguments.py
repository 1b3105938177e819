# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that are flags, numbers, mappings or sequences: one function for each kind.

What they raise names the argument. Arrays are checked in `sparsetir.interop`, dtypes in `sparsetir.utils.dtypes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.utils.dtypes import as_whole, dtype_name

MAX_DIGITS = 60  # of a value in a message
MAX_BITS = 1 << 12  # of an integer in a message: Python refuses to print long ones


def shown(value: Any) -> str:
    """Show a number, a short string or None by its value, anything else by its class: arrays print many lines."""
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        is_long = isinstance(value, int) and value.bit_length() > MAX_BITS
        text = "a longer integer" if is_long else repr(value)
        return text if len(text) <= MAX_DIGITS else f"{text[:MAX_DIGITS]}..."
    return type(value).__name__


def _is_torch(value: Any) -> bool:
    return bool(getattr(type(value), "__module__", "") == "torch")


def as_flag(value: Any, name: str) -> bool:
    """Return True or False, of Python, numpy, or as 0 or 1.

    Raises
    ------
    ArgumentTypeError
        The argument is something else; arrays and strings have no meaning as a flag.

    Examples
    --------
    >>> as_flag(np.True_, "copy"), as_flag(0, "copy")
    (True, False)
    """
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_) or (isinstance(value, (int, np.integer)) and value in (0, 1)):
        return bool(value)
    raise ArgumentTypeError(f"{name}: expected True or False, got {shown(value)}. Pass one of the two.")


def as_count(value: Any, name: str, *, least: int = 1, most: int | None = None, error: type = ArgumentError) -> int:
    """Return an integer of at least `least` and at most `most`.

    Raises
    ------
    error
        The argument is no integer, or outside of the bounds.

    Examples
    --------
    >>> as_count(np.int64(3), "trials")
    3
    """
    number = as_whole(value)
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if is_whole and least <= number and (most is None or number <= most):
        return int(number)
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise error(f"{name}: expected an integer {bounds}, got {shown(value)}. Pass one in that range.")


def as_real(value: Any, name: str, expected: str = "a real number") -> int | float:
    """Return the real number that an argument is, as Python has it.

    Raises
    ------
    ArgumentTypeError
        The argument is no number.
    ArgumentError
        It is an integer beyond the largest float.

    Examples
    --------
    >>> as_real(np.float32(0.5), "alpha"), as_real(np.array(2), "alpha")
    (0.5, 2)
    """
    if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) == 0:
        value = value.item()
    elif _is_torch(value) and getattr(value, "ndim", 1) == 0 and value.device.type != "meta":
        value = value.item()
    if not isinstance(value, Real):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {shown(value)}. Pass a Python or numpy number.")
    try:
        number = float(value)
    except OverflowError:
        largest = f"of at most {np.finfo(np.float64).max:.3g}"
        raise ArgumentError(f"{name}: expected {expected} {largest}, got {shown(value)}. Pass a smaller one.") from None
    return value if isinstance(value, int) else number


def as_real_between(
    value: Any, name: str, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> float:
    """Return a real number that lies in an interval, whose ends count unless they are open.

    Raises
    ------
    ArgumentTypeError
        The argument is no number.
    ArgumentError
        It is NaN or lies outside.

    Examples
    --------
    >>> as_real_between(0.5, "density", 0, 1, open_low=True)
    0.5
    """
    expected = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    number = as_real(value, name, expected)
    is_inside = low <= number <= high and not (open_low and number == low) and not (open_high and number == high)
    if isinstance(value, bool) or not is_inside:
        raise ArgumentError(f"{name}: expected {expected}, got {shown(value)}. Pass one in that range.")
    return float(number)


def as_dtype(value: Any, name: str) -> str:
    """Return the name of a dtype of numbers, of numpy, torch, Python or TVM.

    Raises
    ------
    ArgumentTypeError
        The argument is no such dtype.

    Examples
    --------
    >>> as_dtype("f4", "dtype"), as_dtype(float, "dtype")
    ('float32', 'float64')
    """
    is_dtype = isinstance(value, (str, type, np.dtype)) or type(value).__name__ in ("dtype", "DataType")
    name_of_dtype = dtype_name(value) if is_dtype or hasattr(value, "_dtype_str") else ""
    try:
        is_number = name_of_dtype == "bfloat16" or np.dtype(name_of_dtype or "V").kind in "biufc"
    except (TypeError, ValueError, SyntaxError):  # no dtype
        is_number = False
    if not is_number:
        raise ArgumentTypeError(f"{name}: expected a dtype of numbers, got {shown(value)}. Pass one such as 'float32'.")
    return name_of_dtype


def as_mapping(value: Any, name: str, expected: str) -> dict[str, Any]:
    """Return a copy of a mapping whose keys are strings.

    Raises
    ------
    ArgumentTypeError
        The argument is no mapping, or a key is no string.

    Examples
    --------
    >>> as_mapping({"A": 1}, "formats", "formats by the names of buffers")
    {'A': 1}
    """
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {shown(value)}. Pass a dict.")
    strange = next((key for key in value if not isinstance(key, str)), None)
    if strange is not None or None in value:
        raise ArgumentTypeError(f"{name}: expected {expected}, got the key {shown(strange)}. Pass names as strings.")
    return dict(value)


def as_items(value: Any, name: str, expected: str) -> tuple[Any, ...]:
    """Return the elements of a list, a tuple or another iterable; a string, a mapping or an array has none here.

    Raises
    ------
    ArgumentTypeError
        The argument is something else.

    Examples
    --------
    >>> as_items(["I", "J"], "order", "names of axes")
    ('I', 'J')
    """
    is_other = isinstance(value, (str, bytes, Mapping, np.ndarray)) or _is_torch(value)
    is_plain = isinstance(value, (Sequence, set, frozenset)) or (isinstance(value, Iterable) and hasattr(value, "send"))
    if is_other or not is_plain:
        raise ArgumentTypeError(f"{name}: expected {expected}, got {shown(value)}. Pass a list.")
    return tuple(value)


def as_choice(value: Any, name: str, choices: Sequence[str], error: type = ArgumentError) -> str:
    """Return a string that is one of several.

    Raises
    ------
    error
        The argument is none of them.

    Examples
    --------
    >>> as_choice("sum", "reduce", ("sum", "max"))
    'sum'
    """
    if isinstance(value, str) and value in choices:
        return value
    expected = " or ".join(map(repr, choices)) if len(choices) < 3 else f"one of {', '.join(map(repr, choices))}"
    raise error(f"{name}: expected {expected}, got {shown(value)}. Pass one of them.")


def as_path(value: Any, name: str = "path") -> Path:
    """Return the path of a file.

    Raises
    ------
    ArgumentTypeError
        The argument is no string or path.
    ArgumentError
        No file can have that name.

    Examples
    --------
    >>> as_path("kernel.so").name
    'kernel.so'
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ArgumentTypeError(f"{name}: expected a str or Path, got {shown(value)}. Pass the path of a file.")
    if not path or "\0" in path:
        raise ArgumentError(f"{name}: expected the path of a file, got {path!r}. Pass a name that a file can have.")
    return Path(path)


__all__ = [
    "as_choice",
    "as_count",
    "as_dtype",
    "as_flag",
    "as_items",
    "as_mapping",
    "as_path",
    "as_real",
    "as_real_between",
    "shown",
]
