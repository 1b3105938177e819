# SPDX-License-Identifier: Apache-2.0
"""Hashes of arrays: of structures, the same however they are stored, and of values, different in any bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from sparsetir.errors import ArgumentTypeError
from sparsetir.formats.format import CHUNK, Array, Entries

DIGITS = 16  # of a structure: part of the records of earlier searches
VALUE_DIGITS = 32


def hash_arrays(head: str, arrays: Iterable[Array]) -> str:
    """Return a hash of a text and of arrays: of dtypes, shapes and the bits of all elements, 32 hexadecimal digits.

    Elements are not converted: values that differ in one bit, such as 0.0 and -0.0, have different hashes. Byte order
    and strides do not enter.

    Raises
    ------
    ArgumentTypeError
        An array holds objects, whose bytes are addresses.

    Examples
    --------
    >>> import numpy as np
    >>> weights = np.array([[0.1, 0.2], [0.3, 0.4]])
    >>> hash_arrays("", [weights]) == hash_arrays("", [np.asfortranarray(weights)])
    True
    >>> hash_arrays("", [weights]) == hash_arrays("", [np.nextafter(weights, 1)])
    False
    """
    state = hashlib.sha256(f"{len(head)} {head}".encode())
    for array in map(np.asarray, arrays):
        if array.dtype.hasobject:
            raise ArgumentTypeError("array: expected numbers, got dtype object. Convert it to a dtype of numbers.")
        native = array.dtype.newbyteorder("<")
        state.update(f"{native.name} {native.str} {array.shape}".encode())
        _update(state, array, native)
    return state.hexdigest()[:VALUE_DIGITS]


def hash_indices(head: str, arrays: Iterable[Array]) -> str:
    """Return a hash of a text and of integer arrays, 16 hexadecimal digits; the width of the integers does not enter.

    Raises
    ------
    ArgumentTypeError
        An array holds other than integers: `hash_arrays` takes it.

    Examples
    --------
    >>> import numpy as np
    >>> hash_indices("", [np.arange(3, dtype="int32")]) == hash_indices("", [np.arange(3, dtype="int64")])
    True
    """
    state = hashlib.sha256(head.encode())
    for array in map(np.asarray, arrays):
        if array.dtype.kind not in "iub":
            raise ArgumentTypeError(f"array: expected integers, got dtype {array.dtype}. Hash values with hash_arrays.")
        state.update(f"{array.shape}".encode())
        _update(state, array, np.dtype("<i8"))
    return state.hexdigest()[:DIGITS]


def _update(state: Any, array: Array, dtype: np.dtype[Any]) -> None:
    """Feed the elements to a hash, row after row, in chunks of a dtype that holds them exactly."""
    flat = np.ascontiguousarray(array).reshape(-1)
    for begin in range(0, flat.size, CHUNK):
        state.update(flat[begin : begin + CHUNK].astype(dtype, copy=False).view("u1").data)


def fingerprint(entries: Entries) -> str:
    """Return a hash of the coordinates of the entries of a tensor, independent of how they are stored.

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
    return hash_indices(f"{entries.shape}", [rows, starts, *inner])


def checksum(array: Array) -> int:
    """Return 64 bits that tell whether an array was changed in place, as fast as memory is read.

    Only for comparisons within a process: `hash_arrays` makes what is stored.

    Examples
    --------
    >>> import numpy as np
    >>> values = np.ones(1000, "float32")
    >>> before = checksum(values)
    >>> values *= -1
    >>> checksum(values) == before
    False
    """
    contiguous = array if array.flags.c_contiguous or array.flags.f_contiguous else np.ascontiguousarray(array)
    return int(xxhash.xxh3_64_intdigest(contiguous.reshape(-1, order="A").view(np.uint8).data))


__all__ = ["checksum", "fingerprint", "hash_arrays", "hash_indices"]
