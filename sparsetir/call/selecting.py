# SPDX-License-Identifier: Apache-2.0
"""How many entries of a row are kept, and of which values: what users say as the compiled functions take it."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.call.arguments import numpy_dtype
from sparsetir.errors import ArgumentError
from sparsetir.scalars import as_whole, real_number

LARGEST_INT64 = 2**63 - 1


def top_of(top: Any) -> int | None:
    """How many entries of a row are kept; None keeps all."""
    number = as_whole(top)
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ArgumentError(f"top is how many entries of a row are kept, at least 1; found {top!r}")
    return None if number is None else min(number, LARGEST_INT64)


def least_of(above: Any, dtype: str) -> Any:
    """The least value above a number, or the least of all; NaN is above none."""
    kind = numpy_dtype(dtype)
    above = above if above is None else real_number(above, "above", "a product")
    if kind.kind in "fV":
        least = -np.inf if above is None else float(np.nextafter(kind.type(above), kind.type(np.inf)))
        return least if above != np.inf else np.nan
    low, high = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    if above is None or above < low:
        return low
    if not above < high:
        raise ArgumentError(f"above is less than the largest {dtype}, {high}; found {above!r}")
    least = int(np.floor(above)) + 1
    return least if least <= LARGEST_INT64 else least - 2**64  # the functions take the bits of an int64


__all__ = ["least_of", "top_of"]
