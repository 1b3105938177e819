# SPDX-License-Identifier: Apache-2.0
"""Orders in which the rows of a computed pattern are found: which rows, and which of them follow each other."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import reverse_cuthill_mckee

from sparsetir.call.arguments import Arguments
from sparsetir.call.kept_patterns import OfPatterns
from sparsetir.ir import Axis, Program

HASHES = 3  # rows are alike where the least columns, as so many hash functions order them, are the same
SPREAD = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)


def rows_axis(program: Program, row: Axis) -> Axis | None:
    """The first compressed axis below the rows."""
    below = (a for a in program.axes.values() if a.parent is row and a.kind == "sparse_variable" and a.rule is None)
    return next((a for a in below if a.indptr is not None and a.indices is not None), None)


class RowOrders:
    """Orders of the rows of a program's calls; those of the last patterns are kept.

    Parameters
    ----------
    order : str
        One of `ORDERS`, but for the first.
    axis : Axis or None
        Whose patterns tell which rows are alike.
    """

    def __init__(self, order: str, axis: Axis | None) -> None:
        self.order = order
        arrays = () if axis is None else (axis.indptr, axis.indices)
        self.names = [str(a.name) for a in arrays if a is not None]
        self.kept: OfPatterns[np.ndarray] = OfPatterns()

    def of(self, args: Arguments, bound: np.ndarray, columns: int) -> np.ndarray:
        """The rows that enter something, in order."""
        if self.order == "nonempty" or not self.names:
            return np.flatnonzero(bound)
        indptr, indices = (args.arrays[name] for name in self.names)
        order = self.found(indptr, indices, columns)
        return order if bound.all() else order[bound[order] > 0]

    def found(self, indptr: np.ndarray, indices: np.ndarray, columns: int) -> np.ndarray:
        """All rows in order."""
        find = banded if self.order == "banded" and len(indptr) == columns + 1 else clustered
        return self.kept.get((columns,), (indptr, indices), lambda: find(indptr, indices, columns))


def clustered(indptr: np.ndarray, indices: np.ndarray, columns: int) -> np.ndarray:
    """An order that brings rows with columns in common together: they are sorted by the least hashes of their columns.

    Two rows share the least hash with the probability that a column of either is one of both (Broder 1997).
    """
    filled = np.diff(indptr) > 0
    some = np.flatnonzero(filled)
    if not len(some):
        return np.arange(len(filled))
    keys = [np.minimum.reduceat(_hashed(indices, n), indptr[some]) for n in range(HASHES)]
    return np.concatenate([some[np.lexsort(keys[::-1])], np.flatnonzero(~filled)])


def banded(indptr: np.ndarray, indices: np.ndarray, columns: int) -> np.ndarray:
    """The order that makes the band around the diagonal narrow (reverse Cuthill-McKee)."""
    if not len(indices):  # scipy does not take matrices of no rows
        return np.arange(len(indptr) - 1)
    pattern = sp.csr_array((np.ones(len(indices), np.bool_), indices, indptr), shape=(len(indptr) - 1, columns))
    return reverse_cuthill_mckee(sp.csr_matrix(pattern), symmetric_mode=False).astype(np.int64)


def _hashed(indices: np.ndarray, number: int) -> np.ndarray:
    """Columns in another order."""
    mixed = indices.astype(np.uint32) * np.uint32(SPREAD[number])
    return mixed ^ (mixed >> np.uint32(15))


__all__ = ["RowOrders", "rows_axis"]
