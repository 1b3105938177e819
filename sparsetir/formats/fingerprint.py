# SPDX-License-Identifier: Apache-2.0
"""Short names for structures: the same entries have the same one however they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from sparsetir.formats.arrays import CHUNK, Array
from sparsetir.formats.format import Entries

DIGITS = 16


def hash_arrays(head: str, arrays: Iterable[Array]) -> str:
    """A hash of a text and of integer arrays, 16 hexadecimal digits; how wide the integers are does not enter.

    Examples
    --------
    >>> import numpy as np
    >>> hash_arrays("", [np.arange(3, dtype="int32")]) == hash_arrays("", [np.arange(3, dtype="int64")])
    True
    """
    state = hashlib.sha256(head.encode())
    for array in arrays:
        state.update(f"{array.shape}".encode())
        flat = np.ascontiguousarray(array).reshape(-1)
        for begin in range(0, flat.size, CHUNK):
            state.update(flat[begin : begin + CHUNK].astype("<i8", copy=False).data)
    return state.hexdigest()[:DIGITS]


def fingerprint(entries: Entries) -> str:
    """A hash of where the entries of a tensor lie, the same however they are stored.

    Of the shape, the rows (first coordinates) that hold something, where they begin, and the other coordinates.

    Examples
    --------
    >>> import numpy as np
    >>> listed = Entries((2, 3), [np.array([0, 1]), np.array([2, 0])])
    >>> fingerprint(listed) == fingerprint(Entries.of_rows((2, 3), np.array([0, 1, 2]), np.array([2, 0])))
    True
    """
    rows, starts = entries.occupied
    inner = (entries.last,) if len(entries.shape) == 2 else entries.coords[1:]
    return hash_arrays(f"{entries.shape}", [rows, starts, *inner])


__all__ = ["fingerprint", "hash_arrays"]
