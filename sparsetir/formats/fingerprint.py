# SPDX-License-Identifier: Apache-2.0
"""Short names for structures: the same entries have the same one however they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from sparsetir.formats.arrays import CHUNK, Array
from sparsetir.formats.format import Entries

DIGITS = 16


def fingerprint(head: str, arrays: Iterable[Array]) -> str:
    """A hash of a text and of integer arrays, 16 hexadecimal digits; how wide the integers are does not enter.

    Examples
    --------
    >>> import numpy as np
    >>> fingerprint("", [np.arange(3, dtype="int32")]) == fingerprint("", [np.arange(3, dtype="int64")])
    True
    """
    state = hashlib.sha256(head.encode())
    for array in arrays:
        state.update(f"{array.shape}".encode())
        flat = np.ascontiguousarray(array).reshape(-1)
        for begin in range(0, flat.size, CHUNK):
            state.update(flat[begin : begin + CHUNK].astype("<i8", copy=False).data)
    return state.hexdigest()[:DIGITS]


def of_entries(entries: Entries) -> str:
    """The fingerprint of a tensor: of its shape, the rows that hold something, where they begin, and the rest."""
    rows, starts = entries.occupied
    inner = entries.coords[1:] if len(entries.shape) > 2 else (entries.last,)
    return fingerprint(f"{entries.shape}", [rows, starts, *inner])


__all__ = ["fingerprint", "of_entries"]
