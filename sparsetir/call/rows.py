# SPDX-License-Identifier: Apache-2.0
"""Matrices that are stored as a program reads them: bound without asking what else they could be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import interop
from sparsetir.call.arguments import LARGEST_INT32, Arguments, checks_are_on, is_integer, numpy_dtype
from sparsetir.call.signature import Signature
from sparsetir.call.validation import is_sound
from sparsetir.ir import SparseBuffer

ROWS = (sp.csr_array, sp.csr_matrix)


@dataclass(frozen=True)
class Matrix:
    """A buffer over dense rows with sparse columns, and what an argument must be to fill it as it is.

    Parameters
    ----------
    names : tuple of str
        The parameters of values, row pointers and column indices.
    dtypes : tuple of dtype
        Theirs.
    sizes : tuple of str
        Symbols of the rows, the columns and the number of entries.
    level : Level
        The axis of the columns.
    """

    names: tuple[str, str, str]
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]
    sizes: tuple[str, str, str]
    level: interop.Level

    def arrays(self, value: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Values, row pointers and column indices of a matrix that fills the buffer as it is; None of others."""
        if type(value) not in ROWS:
            return None
        arrays = value.data, value.indptr, value.indices
        for array, dtype in zip(arrays, self.dtypes, strict=True):
            if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != 1 or not array.flags.carray:
                return None
        shape, count = value.shape, len(arrays[0])
        if len(shape) != 2 or len(arrays[2]) != count or max(*shape, count) > LARGEST_INT32:
            return None
        return arrays

    def take(self, args: Arguments, value: Any) -> bool:
        """Note the arrays of a matrix, and whether it may fill the buffer as it is: see `is_sound`."""
        arrays = self.arrays(value)
        if arrays is None:
            return False
        (rows, columns), count = value.shape, len(arrays[0])
        for name, size in zip(self.sizes, (rows, columns, count), strict=True):
            if args.sizes.setdefault(name, size) != size:
                return False
        args.arrays.update(zip(self.names, arrays, strict=True))
        return True

    @property
    def need_sorted(self) -> bool:
        """Whether rows must be in order."""
        return self.level.sorted or self.level.unique

    def is_sound(self, value: Any, listed: np.ndarray | None = None) -> bool:
        """Return whether the index arrays of a matrix are what the axis promises, in all rows or in those listed."""
        rows, columns = value.shape
        return is_sound(
            self.level,
            value.indptr,
            value.indices,
            parent_count=rows,
            length=columns,
            need_sorted=self.need_sorted,
            listed=listed,
        )

    def implies(self, value: Any, other: Matrix, same: Any) -> bool:
        """Whether another buffer takes a matrix if this one takes `value`: they have the same arrays."""
        is_one = value.indptr is same.indptr and value.indices is same.indices and value.shape == same.shape
        mine, its = self.level, other.level
        return is_one and mine.sorted >= its.sorted and mine.unique >= its.unique


def matrix(signature: Signature, buffer: SparseBuffer) -> Matrix | None:
    """The buffer, if scipy's compressed rows can fill it as they are."""
    if [axis.kind for axis in buffer.axes] != ["dense_fixed", "sparse_variable"] or buffer.dtype == "bfloat16":
        return None
    rows, columns = buffer.axes
    indptr, indices = (str(n) for n in signature.axes_of_array[columns])
    names = str(buffer.storage.name), indptr, indices
    params = [signature.by_name.get(name) for name in names]
    if columns.parent is not rows or columns.rule is not None or any(p is None or not p.shape for p in params):
        return None
    count = signature.by_name[names[0]].shape
    sizes = [signature.length[rows].name, signature.length[columns].name, count[0].name if count else None]
    if any(size is None for size in sizes) or len(set(sizes)) < 3:
        return None
    dtypes = tuple(numpy_dtype(p.dtype) for p in params if p is not None)
    return Matrix(names, dtypes, tuple(map(str, sizes)), signature.levels[buffer.name][1])  # type: ignore[arg-type]


class CompressedRows:
    """Binds calls whose sparse arguments are scipy's compressed rows, in the types of the program.

    Parameters
    ----------
    signature : Signature
    """

    def __init__(self, signature: Signature) -> None:
        found = {name: matrix(signature, buffer) for name, buffer in signature.buffers.items()}
        self.matrices = {name: held for name, held in found.items() if held is not None}
        self.arrays = [p.name for p in signature.params if p.is_array and p.name not in signature.made]
        self.numbers = {p.name: p for p in signature.params if not p.is_array}

    def arrays_of(self, matrices: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """The arrays of matrices that are stored as the program reads them; None for others.

        Nothing is looked at in their index arrays: compare them with those of a call that was bound.
        """
        found: dict[str, np.ndarray] = {}
        for name, value in matrices.items():
            held = self.matrices.get(name)
            arrays = None if held is None else held.arrays(value)
            if held is None or arrays is None:
                return None
            found.update(zip(held.names, arrays, strict=True))
        return found

    def bind(self, arguments: Mapping[str, Any], listing: Mapping[str, str] | None = None) -> Arguments | None:
        """The arguments of a call; None for one of another kind, or that is wrong.

        Of a matrix in `listing` only the rows are read that the column indices of another one name.
        """
        args = Arguments()
        taken: list[tuple[Matrix, Any]] = []
        for name, value in arguments.items():
            held, number = self.matrices.get(name), self.numbers.get(name)
            if held is not None:
                if not held.take(args, value):
                    return None
                taken.append((held, value))
            elif number is None or not is_number(value, number.dtype):
                return None
            elif args.sizes.setdefault(name, value) != value:
                return None
        is_whole = all(n in args.arrays for n in self.arrays) and all(n in args.sizes for n in self.numbers)
        return args if is_whole and (not checks_are_on() or self.are_sound(taken, listing or {})) else None

    def are_sound(self, taken: list[tuple[Matrix, Any]], listing: Mapping[str, str]) -> bool:
        """Return whether matrices are what their buffers promise."""
        if not listing:
            return are_sound(taken)
        later = [self.matrices[name] for name in listing]
        if not are_sound([pair for pair in taken if not any(pair[0] is m for m in later)]):
            return False
        values = {id(held): value for held, value in taken}
        pairs = [(held, values[id(self.matrices[by])]) for held, by in zip(later, listing.values(), strict=True)]
        return all(held.is_sound(values[id(held)], by.indices) for held, by in pairs)


def are_sound(taken: list[tuple[Matrix, Any]]) -> bool:
    """Return whether matrices are what their buffers promise; arrays that several of them share are validated once."""
    looked: list[tuple[Matrix, Any]] = []
    for held, value in sorted(taken, key=lambda pair: not pair[0].need_sorted):
        if any(other.implies(same, held, value) for other, same in looked):
            continue
        if not held.is_sound(value):
            return False
        looked.append((held, value))
    return True


def is_number(value: Any, dtype: str) -> bool:
    """Whether a number can be passed as it is."""
    if dtype.startswith("int"):
        return is_integer(value) and abs(value) <= np.iinfo(dtype).max
    return dtype.startswith("float") and type(value) in (int, float)


__all__ = ["ROWS", "CompressedRows", "is_number"]
