# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that are flags, numbers, dtypes, mappings or sequences: one function for each kind.

What they raise names the argument. Arrays are checked in `sparsetir.interop`. `renamed_parameters`
keeps the old names of parameters.
"""

from __future__ import annotations

import argparse
import errno
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError

IMPOSSIBLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)  # of a name that no file can have
MAX_DIGITS = 60  # of a value in a message
MAX_ELEMENTS = 8  # of a tuple in a message
MAX_BITS = 1 << 12  # of an integer in a message: Python refuses to print long ones

T = TypeVar("T", bound=Callable[..., Any])


def shown(value: Any) -> str:
    """Show numbers, strings, None and short tuples of them by value, all else by class: arrays print many lines."""
    if isinstance(value, tuple) and len(value) <= MAX_ELEMENTS:
        elements = [shown(element) for element in value]
        return f"({', '.join(elements)}{',' * (len(elements) == 1)})"
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        is_long = isinstance(value, int) and value.bit_length() > MAX_BITS
        text = "a longer integer" if is_long else repr(value)
        return text if len(text) <= MAX_DIGITS else f"{text[:MAX_DIGITS]}..."
    if isinstance(value, np.dtype) or (_is_torch(value) and type(value).__name__ == "dtype"):
        return str(value)
    return type(value).__name__


def _is_torch(value: Any) -> bool:
    return bool(getattr(type(value), "__module__", "") == "torch")


def package_of(value: Any) -> str:
    """Return the package of an object's class; "" for classes that belong to no module."""
    return str(getattr(type(value), "__module__", "")).partition(".")[0]


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
    number = as_index(value)
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if is_whole and least <= number and (most is None or number <= most):
        return int(number)
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise error(f"{name}: expected an integer {bounds}, got {shown(value)}. Pass one in that range.")


def as_sequence(value: Any, name: str, expected: str) -> list[Any]:
    """Return the elements of a list, tuple, set or other iterable that is neither text, mapping nor array.

    Raises
    ------
    ArgumentTypeError
        The argument is something else.

    Examples
    --------
    >>> as_sequence(("a", "b"), "names", "names")
    ['a', 'b']
    """
    is_other = isinstance(value, (str, bytes, Mapping, type)) or hasattr(value, "shape")
    if is_other or not isinstance(value, Iterable) or package_of(value) in ("torch", "tvm"):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {shown(value)}. Pass a list.")
    return list(value)


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


def as_positive(value: Any, name: str, expected: str = "a positive number") -> float:
    """Return a finite number that is larger than zero.

    Raises
    ------
    ArgumentTypeError
        The argument is no number.
    ArgumentError
        It is zero, negative, NaN, infinite or an integer beyond the largest float.

    Examples
    --------
    >>> as_positive(np.int64(3), "amortize_over")
    3.0
    """
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {value}. Pass a number such as 100.")
    number = float(as_real(value, name, expected))
    if not 0 < number < math.inf:
        raise ArgumentError(f"{name}: expected {expected}, got {shown(value)}. Pass a number such as 100.")
    return number


LONGEST = 1e9  # seconds, some thirty years; timers of the system overflow at nine times as many


def as_seconds(value: Any, name: str, *, positive: bool = False) -> float:
    """Return a finite number of seconds, of at least zero or more than zero: nothing waits or measures for ever.

    Raises
    ------
    ArgumentTypeError
        The argument is no number.
    ArgumentError
        It is negative, NaN, infinite or more than `LONGEST`, or zero if `positive`.

    Examples
    --------
    >>> as_seconds(np.float32(0.5), "seconds"), as_seconds(0, "rest")
    (0.5, 0.0)
    """
    expected = "a positive, finite number of seconds" if positive else "a finite number of seconds, not negative"
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {value}. Pass a number such as 0.5.")
    number = float(as_real(value, name, expected))
    if not 0 <= number < math.inf or (positive and number == 0):
        raise ArgumentError(f"{name}: expected {expected}, got {shown(value)}. Pass a number such as 0.5.")
    if number > LONGEST:
        raise ArgumentError(
            f"{name}: expected a finite number of seconds up to {LONGEST:g}, got {shown(value)}. Pass a shorter time."
        )
    return number


def parse_seconds(text: str) -> float:
    """Return the seconds that an option of a command states.

    Raises
    ------
    argparse.ArgumentTypeError
        The text is no finite number, or a negative one.

    Examples
    --------
    >>> parse_seconds("0.5")
    0.5
    """
    try:
        return as_seconds(float(text), "seconds")
    except ValueError:
        fault = f"expected a finite number of seconds, not negative, got {shown(text)}"
        raise argparse.ArgumentTypeError(fault) from None


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


def as_path(value: Any, name: str, expected: str = "the path of a file") -> Path:
    """Return a path, which need not lead to anything.

    Raises
    ------
    ArgumentTypeError
        The argument is no text and no path.
    ArgumentError
        No file can have that name.

    Examples
    --------
    >>> as_path("pattern.mtx", "path").name
    'pattern.mtx'
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ArgumentTypeError(f"{name}: expected {expected}, got {shown(value)}. Pass a str or a Path.")
    path = Path(value)
    try:
        path.lstat()
    except ValueError as error:  # a null character, or half of a surrogate pair
        fault = f"got {shown(str(path))} ({error}). Choose another name."
        raise ArgumentError(f"{name}: expected {expected}, {fault}") from None
    except OSError as error:
        if error.errno in IMPOSSIBLE:
            fault = f"got {shown(str(path))} ({error.strerror or error}). Choose another name."
            raise ArgumentError(f"{name}: expected {expected}, {fault}") from None
    return path


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


# ------------------------------------------------------------------ old names


def renamed_parameters(**new_names: str) -> Callable[[T], T]:
    """Accept the old names of keyword parameters, with a DeprecationWarning.

    Parameters
    ----------
    **new_names
        The new name of each parameter by its old name. Of a class, the parameters of its constructor; its attributes
        of these names can be read by their old names, too.

    Examples
    --------
    >>> import warnings
    >>> @renamed_parameters(calls="expected_calls")
    ... def convert(*, expected_calls=0):
    ...     return expected_calls
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     convert(calls=3), [str(warning.message) for warning in caught]
    (3, ['convert(calls=) is now convert(expected_calls=)'])
    """

    def decorate(target: T) -> T:
        if isinstance(target, type):
            _keep_old_attributes(target, new_names)
            return cast("T", target)

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs and not new_names.keys().isdisjoint(kwargs):
                kwargs = with_new_names(kwargs, new_names, target.__qualname__.removesuffix(".__init__"))
            return target(*args, **kwargs)

        return cast("T", call)

    return decorate


def _keep_old_attributes(target: Any, new_names: Mapping[str, str]) -> None:
    def old_attribute(old: str, new: str) -> property:
        def read(instance: Any) -> Any:
            text = f"{target.__name__}.{old} is now {target.__name__}.{new}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(instance, new)

        return property(read, doc=f"Deprecated: `{new}`.")

    target.__init__ = renamed_parameters(**new_names)(target.__init__)
    for old, new in new_names.items():
        setattr(target, old, old_attribute(old, new))


def with_new_names(arguments: Mapping[str, Any], new_names: Mapping[str, str], function: str) -> dict[str, Any]:
    """Return the arguments under their new names, with a DeprecationWarning for each old name at the caller's caller.

    Raises
    ------
    ArgumentTypeError
        An argument is given by both names.
    """
    renamed = dict(arguments)
    for old, new in new_names.items():
        if old not in arguments:
            continue
        if new in arguments:
            raise ArgumentTypeError(f"{new}: expected one value, got another one as {old}. Leave {old} out.")
        text = f"{function}({old}=) is now {function}({new}=)"
        warnings.warn(text, DeprecationWarning, stacklevel=4)
        renamed[new] = renamed.pop(old)
    return renamed


def take_old_argument(arguments: Mapping[str, Any], old: str, new: str, value: Any, function: str) -> Any:
    """Return the value of a parameter, also by its old name among the other keyword arguments of a function.

    For functions whose calls are so short that the frame of `renamed_parameters` counts.

    Raises
    ------
    TypeError
        There is another keyword argument.
    ArgumentTypeError
        The argument is given by both names.
    """
    unknown = next((name for name in arguments if name != old), None)
    if unknown is not None:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
    by_new_name = {} if value is None else {new: value}
    return with_new_names({**by_new_name, **arguments}, {old: new}, function)[new]


def take_old_options(options: Any, **new_names: str) -> None:
    """Move the values of old command line options to the new ones; FutureWarning is what users of commands see."""
    for old, new in new_names.items():
        if hasattr(options, old):
            warnings.warn(f"--{old} is now --{new.replace('_', '-')}", FutureWarning, stacklevel=2)
            setattr(options, new, getattr(options, old))


# ---------------------------------------------------------------------------- dtypes and whole numbers


VALUE_DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
)


def as_index(value: Any) -> Any:
    """numpy's integers and others as int; what is none, and bools, as they are.

    Examples
    --------
    >>> as_index(np.int64(3)), as_index(2.5), as_index(True)
    (3, 2.5, True)
    """
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer of Python or numpy, and no bool.

    Examples
    --------
    >>> is_integer(2), is_integer(np.int8(2)), is_integer(True), is_integer(2.0)
    (True, True, False, False)
    """
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Return whether a value is one real number: others are compared with no limits.

    Examples
    --------
    >>> is_real(2), is_real(np.float32(0.5)), is_real("2"), is_real(np.ones(2))
    (True, True, False, False)
    """
    return isinstance(value, Real)


def as_int64(value: int) -> int:
    """Return the number of 64 bits with a sign whose bits are those of an integer: TVM's calls pass no others.

    Examples
    --------
    >>> as_int64(2**64 - 1), as_int64(5)
    (-1, 5)
    """
    return value - (1 << 64) if value >= 1 << 63 else value


def dtype_name(value: Any) -> str:
    """Return the name of a dtype of numpy, torch, ml_dtypes, Python or TVM; of anything else, what it is.

    Examples
    --------
    >>> [dtype_name(d) for d in ("double", "f4", np.int64, np.dtype("bool"), float, "bfloat16", "nothing")]
    ['float64', 'float32', 'int64', 'bool', 'float64', 'bfloat16', 'nothing']
    """
    name = getattr(value, "_dtype_str", value)  # of T.float32
    name = str(name).removeprefix("torch.") if package_of(name) in ("torch", "tvm") else name
    if not isinstance(name, (str, type, np.dtype)):
        return type(name).__name__
    if name == "bfloat16":
        return "bfloat16"
    try:
        return np.dtype(name).name
    except (TypeError, ValueError, SyntaxError):  # no dtype
        return str(name)


def common_dtype(names: Iterable[str]) -> str:
    """Return the dtype in which values of these dtypes meet, by numpy's rules.

    Values that bfloat16 cannot represent meet it in float32.

    Examples
    --------
    >>> common_dtype(["float32", "int32"]), common_dtype(["bfloat16", "bool"]), common_dtype(["float16", "bfloat16"])
    ('float64', 'bfloat16', 'float32')
    """
    distinct = sorted(set(names))
    if len(distinct) == 1:
        return distinct[0]
    if "bfloat16" in distinct:
        import ml_dtypes  # noqa: F401  makes numpy know it
    try:
        return str(np.result_type(*distinct).name)
    except TypeError:
        wide = ["float32" if name == "bfloat16" else name for name in distinct]
    try:
        return str(np.result_type(*wide).name)
    except TypeError:
        fault = f"expected operands of numbers, got dtypes {', '.join(distinct)}. Convert one with astype."
        raise ArgumentTypeError(fault) from None


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    bits = "".join(c for c in dtype if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


def is_float(dtype: Any) -> bool:
    """Return whether a numpy dtype is one of real numbers; bfloat16 is none of numpy's own kinds.

    Examples
    --------
    >>> is_float(np.dtype("float32")), is_float(np.dtype("int8"))
    (True, False)
    """
    return bool(dtype.kind == "f" or dtype.name == "bfloat16")


__all__ = [
    "VALUE_DTYPES",
    "as_count",
    "as_dtype",
    "as_flag",
    "as_index",
    "as_int64",
    "as_mapping",
    "as_path",
    "as_real",
    "as_seconds",
    "as_sequence",
    "common_dtype",
    "dtype_name",
    "is_float",
    "is_integer",
    "package_of",
    "parse_seconds",
    "renamed_parameters",
    "shown",
    "take_old_argument",
    "take_old_options",
    "with_new_names",
]
