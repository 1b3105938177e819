# SPDX-License-Identifier: Apache-2.0
"""scipy's objects around arrays as they are. scipy computes with no floats of 16 bits, but its objects hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.interop.levels import Array
from sparsetir.interop.sources import open_source

HALVES = ("float16", "bfloat16")


def is_half(value: Any) -> bool:
    """Whether a scipy object holds floats of 16 bits, which scipy itself neither converts nor multiplies."""
    return value.dtype.name in HALVES


@cache
def _empty(kind: Any) -> Any:
    return kind((1, 1), dtype=np.int8)


def compressed_of(kind: Any, indptr: Array, indices: Array, values: Array, shape: Sequence[int]) -> Any:
    """A scipy object of rows or columns around its arrays, without scipy's checks."""
    made = kind.__new__(kind)  # a constructor takes longer than the sum of two small matrices
    made.__dict__.update(_empty(kind).__dict__)
    made._shape = tuple(map(int, shape))
    made.indptr, made.indices, made.data = indptr, indices, values
    return made


def sorted_rows(kind: Any, indptr: Array, indices: Array, values: Array, shape: Sequence[int]) -> Any:
    """A scipy object of compressed rows, each of which is sorted and has every coordinate once."""
    made = compressed_of(kind, indptr, indices, values, shape)
    made.has_canonical_format = True
    return made


def coordinates_of(coords: Sequence[Array], values: Array, shape: Sequence[int]) -> sp.coo_array:
    """A scipy list of coordinates around its arrays, without scipy's checks."""
    made = sp.coo_array(tuple(shape), dtype=np.int8)
    made.coords, made.data = tuple(coords), values
    return made


def in_format(value: Any, format: str, block: tuple[int, int] | None = None) -> Any:
    """A scipy object whose entries have coordinates of their own, in another of scipy's formats.

    Lists of lists and dictionaries hold no floats of 16 bits: those come in rows.
    """
    if is_half(value):
        return value if format in ("lil", "dok") else _by_words(value, lambda words: in_format(words, format, block))
    made = value.asformat(format) if block is None else value.tobsr(blocksize=block)
    if block is not None:
        made.sort_indices()  # scipy stores blocks in the order of their first entries
    return made


def transposed(value: Any, order: Sequence[int]) -> Any:
    """A scipy object with its dimensions in another order.

    Raises
    ------
    StructureError
        When scipy moves coordinates to do it, and they are broken.
    """
    if value.format in ("coo", "bsr"):
        open_source(value, "a matrix").check("a matrix")
    if is_half(value):
        return _by_words(value, lambda words: transposed(words, order))
    return value.T if value.ndim == 2 else value.transpose(tuple(order))


def _by_words(value: Any, make: Callable[[Any], Any]) -> Any:
    """What is made of a scipy object without reading its values, which are floats of 16 bits."""
    words = copy.copy(value)
    words.data = value.data.view(np.uint16)
    made = make(words)
    made.data = made.data.view(value.dtype)
    return made


def recast(value: Any, dtype: Any) -> Any:
    """A scipy object with its values in another dtype; lists of lists and dictionaries hold no floats of 16 bits."""
    if np.dtype(dtype).name not in HALVES:
        return value.astype(dtype)
    made = copy.copy(value if value.format not in ("lil", "dok") else value.tocsr())
    made.data = made.data.astype(dtype)
    return made


__all__ = ["compressed_of", "coordinates_of", "in_format", "is_half", "recast", "sorted_rows", "transposed"]
