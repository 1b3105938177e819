# SPDX-License-Identifier: Apache-2.0
"""What users write for a dtype and for a whole number, in the one spelling that everything else takes."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np

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


def as_whole(value: Any) -> Any:
    """numpy's integers and others as int; what is none, and bools, as they are.

    Examples
    --------
    >>> as_whole(np.int64(3)), as_whole(2.5), as_whole(True)
    (3, 2.5, True)
    """
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


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
    name = str(name).removeprefix("torch.") if type(name).__module__.partition(".")[0] in ("torch", "tvm") else name
    if not isinstance(name, (str, type, np.dtype)):
        return type(name).__name__
    if name == "bfloat16":
        return "bfloat16"
    try:
        return np.dtype(name).name
    except (TypeError, ValueError, SyntaxError):  # no dtype
        return str(name)


def common_dtype(names: Iterable[str]) -> str:
    """Return the dtype in which values of these dtypes meet, by numpy's rules; bfloat16 meets what it cannot hold as
    float32.

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
        return str(np.result_type(*("float32" if name == "bfloat16" else name for name in distinct)).name)


def is_float(dtype: Any) -> bool:
    """Return whether a numpy dtype is one of real numbers; bfloat16 is none of numpy's own kinds.

    Examples
    --------
    >>> is_float(np.dtype("float32")), is_float(np.dtype("int8"))
    (True, False)
    """
    return bool(dtype.kind == "f" or dtype.name == "bfloat16")


__all__ = ["VALUE_DTYPES", "as_int64", "as_whole", "common_dtype", "dtype_name", "is_float"]
