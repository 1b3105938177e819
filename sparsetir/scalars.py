# SPDX-License-Identifier: Apache-2.0
"""What users write for a dtype and for a whole number, in the one spelling that everything else takes."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np


def as_whole(value: Any) -> Any:
    """numpy's integers and others as int; what is none, and bools, as they are.

    Examples
    --------
    >>> as_whole(np.int64(3)), as_whole(2.5), as_whole(True)
    (3, 2.5, True)
    """
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def dtype_name(value: Any) -> str:
    """The name of a dtype of numpy, torch, ml_dtypes, Python or TVM; of anything else, what it is.

    Examples
    --------
    >>> [dtype_name(d) for d in ("double", "f4", np.int64, np.dtype("bool"), float, "bfloat16", "nothing")]
    ['float64', 'float32', 'int64', 'bool', 'float64', 'bfloat16', 'nothing']
    """
    held = getattr(value, "_dtype_str", value)  # of T.float32
    held = str(held).removeprefix("torch.") if type(held).__module__.partition(".")[0] in ("torch", "tvm") else held
    if not isinstance(held, (str, type, np.dtype)):
        return type(held).__name__
    if held == "bfloat16":
        return "bfloat16"
    try:
        return np.dtype(held).name
    except TypeError:  # no dtype
        return str(held)


__all__ = ["as_whole", "dtype_name"]
