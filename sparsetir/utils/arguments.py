# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that are flags, numbers, mappings or sequences: one function for each kind.

What they raise names the argument. Arrays are checked in `sparsetir.interop`, dtypes in `sparsetir.utils.dtypes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.utils.dtypes import as_whole, dtype_name

MAX_DIGITS = 60  # of a value in a message
MAX_ELEMENTS = 8  # of a tuple in a message
MAX_BITS = 1 << 12  # of an integer in a message: Python refuses to print long ones


def shown(value: Any) -> str:
    """Show numbers, strings, None and short tuples of them by value, all else by class: arrays print many lines."""
    if isinstance(value, tuple) and len(value) <= MAX_ELEMENTS:
        elements = [shown(element) for element in value]
        return f"({', '.join(elements)}{',' * (len(elements) == 1)})"
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


__all__ = [
    "as_count",
    "as_dtype",
    "as_flag",
    "as_mapping",
    "as_real",
    "shown",
]
