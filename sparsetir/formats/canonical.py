# SPDX-License-Identifier: Apache-2.0
"""Canonical operands: compressed rows, entries with the same coordinates added up, hypersparse dimensions renumbered.

A matrix of 2**41 rows with three entries has three rows that matter. Dimensions that are far longer than the operands
have entries are renumbered, the expression is computed over the short dimensions, and its result is numbered back.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError
from sparsetir.formats.origin import open_origin
from sparsetir.formats.tensor import MIN_HYPERSPARSE, SparseTensor, is_hypersparse
from sparsetir.interop import (
    CooTensor,
    Level,
    Validator,
    check_parts,
    check_sound,
    coordinates_of,
    in_format,
    is_half,
    is_sound,
    is_sparse,
    is_torch,
    open_source,
    recast,
    sorted_rows,
    store,
    to_torch,
)
from sparsetir.interop.sources import CompressedSource
from sparsetir.ir.sizes import LARGEST_INT32
from sparsetir.utils.memory import check_memory

MATRICES = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "coo": sp.coo_matrix, "bsr": sp.bsr_matrix}


def compressed_rows(value: Any, name: str = "a matrix") -> Any:
    """Convert a sparse matrix to compressed rows: of torch if it is a torch tensor, else of scipy.

    Raises
    ------
    StructureError
        When the index arrays of another format are broken: scipy and torch would write past their memory.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> compressed_rows(sp.coo_array(([1.0, 2.0], ([1, 0], [0, 2])), shape=(2, 3))).indices.tolist()
    [2, 0]
    """
    if sp.issparse(value) and value.format == "csr":
        check_parts(value, name)
        return value
    rows = int(value.shape[0])
    check_memory(8 * rows, f"{name}: pointers to the {rows} rows of shape {tuple(value.shape)}")
    if is_torch(value):
        return _torch_rows(value, name)
    if not sp.issparse(value) or is_half(value):
        return SparseTensor.from_any(value, "csr").to_scipy("csr", copy=False)
    check_sound(value, name)
    if not value.dtype.isnative:  # of which scipy converts some formats only
        value = recast(value, value.dtype.newbyteorder("="))
    return value.tocsr()


def distinct_rows(value: Any, name: str, is_sound: Validator = is_sound) -> Any:
    """Return a matrix of scipy with ordered coordinates that do not repeat: itself if it is one, else in rows.

    Parameters
    ----------
    value : sparse matrix
        Of scipy.
    name : str
        The argument, for messages.
    is_sound : callable
        Validates index arrays, as in `sparsetir.interop.store`.

    Raises
    ------
    StructureError
        When the index arrays are broken.

    Examples
    --------
    >>> import scipy.sparse as sp
    >>> A = sp.coo_array(([1.0, 2.0, 3.0], ([1, 0, 1], [0, 2, 0])), shape=(2, 3))
    >>> distinct_rows(A, "A").toarray().tolist()
    [[0.0, 0.0, 2.0], [4.0, 0.0, 0.0]]
    """
    source = open_source(value, name)
    if isinstance(source, CompressedSource):
        source.check(name, is_sound)
        if source.is_ordered(Level(name, "sparse_variable"), is_sound):
            return value
    is_wide = max(source.values.size, *value.shape) > LARGEST_INT32
    is_wide = is_wide or (isinstance(source, CompressedSource) and source.indices.dtype.itemsize > 4)
    idtype = "int64" if is_wide else "int32"
    levels = [Level("rows", "dense_fixed"), Level("columns", "sparse_variable", 0, idtype)]
    stored = store(value, levels, name=name, dtype=source.values.dtype.name, is_sound=is_sound)
    kind = sp.csr_matrix if isinstance(value, sp.spmatrix) else sp.csr_array
    return sorted_rows(kind, stored.indptr[1], stored.indices[1], stored.values, value.shape)


def _torch_rows(value: Any, name: str) -> Any:
    """Convert a torch tensor to rows; torch itself converts neither blocks nor lists with dense entries."""
    layout = str(value.layout).removeprefix("torch.sparse_")
    if layout == "csr":
        return value
    if layout == "csc" or (layout == "coo" and value.dense_dim() == 0):
        open_source(value, name).check(name)
        return value.to_sparse_csr()
    return SparseTensor.from_any(value, "csr").to_torch()


def add_duplicates(value: Any) -> Any:
    """Add entries with the same coordinates up, in the operand's own dtype; the class stays.

    A cast must come after this sum: in another dtype, bools are counted and integers overflow elsewhere.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> A = sp.csr_array((np.array([100, 100], "int8"), np.array([0, 0]), np.array([0, 2])), shape=(1, 1))
    >>> add_duplicates(A).data.tolist()
    [-56]
    """
    if isinstance(value, SparseTensor):
        return value
    origin = open_origin(value, check=True)
    if origin.is_ordered or origin.entries.nnz == origin.source.values.size:
        return value
    return _of_class(SparseTensor.from_any(value), value)


def _of_class(tensor: SparseTensor, value: Any) -> Any:
    """Convert a tensor to the class and, as far as it is one of a matrix, the format of another operand."""
    if is_torch(value):
        layout = str(value.layout).removeprefix("torch.sparse_")
        return tensor.convert(layout if layout in ("csr", "csc") else "coo").to_torch()
    if not sp.issparse(value):
        return tensor.to_coo()
    if value.format == "bsr":
        converted = in_format(tensor.to_scipy("csr"), "bsr", value.blocksize)
    else:
        converted = tensor.to_scipy(value.format if value.format in ("csr", "csc") else "coo")
    return converted if isinstance(value, sp.sparray) else MATRICES[converted.format](converted)


MAX_DENSE_ELEMENTS = 1 << 30  # of a dense result that is numbered back


def has_hypersparse(values: Sequence[Any]) -> bool:
    """Return whether an operand is a list of coordinates in a shape whose pointers would outweigh them."""
    return any(_is_list(v) for v in values if len(v.shape) and max(v.shape) >= MIN_HYPERSPARSE)


def _is_list(value: Any) -> bool:
    if isinstance(value, SparseTensor):
        return value.format.name != "csr" and is_hypersparse(value.shape, value.nnz)
    if not is_sparse(value) or (sp.issparse(value) and value.format in ("csr", "bsr")):
        return False
    if is_torch(value) and "coo" not in str(value.layout):
        return False
    return is_hypersparse(value.shape, open_source(value, "the operand").values.size)


@dataclass(frozen=True)
class Renumbered:
    """Operands over short dimensions.

    Parameters
    ----------
    values : list
        The operands, of their classes.
    numbers : dict of str to ndarray
        By letter: the coordinate that each short one stands for, ascending.
    extents : dict of str to int
        By letter: the length of each dimension.
    """

    values: list[Any]
    numbers: dict[str, np.ndarray]
    extents: dict[str, int]

    def restore(self, result: Any, letters: str) -> Any:
        """Map a result over some letters back to the original coordinates."""
        if not any(c in self.numbers for c in letters):
            return result
        shape = tuple(self.extents[c] for c in letters)
        if not is_sparse(result):
            return self._dense(result, letters, shape)
        coords = [
            self.numbers[c][at] if c in self.numbers else at for c, at in zip(letters, _coords(result), strict=True)
        ]
        return _like(result, coords, shape)

    def _dense(self, result: Any, letters: str, shape: tuple[int, ...]) -> Any:
        if math.prod(shape) > MAX_DENSE_ELEMENTS:
            raise ArgumentError(
                f"result: a dense array of shape {shape} does not fit into memory. Pass result='sparse'."
            )
        places = [self.numbers.get(c, np.arange(n)) for c, n in zip(letters, shape, strict=True)]
        if is_torch(result):
            dense = result.new_zeros(shape)
            dense[tuple(result.new_tensor(p).long() for p in np.ix_(*places))] = result
            return dense
        dense = np.zeros(shape, result.dtype)
        dense[np.ix_(*places)] = result
        return dense


def renumber(terms: Sequence[str], values: Sequence[Any]) -> Renumbered:
    """Compress the long dimensions of operands to the coordinates that occur; dense ones lose the others.

    What it is good for: sums of products, and other results that depend on stored entries alone.
    """
    coords = [_coords(value, f"operand {at}") if is_sparse(value) else None for at, value in enumerate(values)]
    extents: dict[str, int] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, n in zip(term, value.shape, strict=True):
            extents[letter] = max(int(n), extents.get(letter, 0))  # 1 is broadcast
    numbers: dict[str, np.ndarray] = {}
    for letter, extent in extents.items():
        sizes = {int(v.shape[t.index(letter)]) for t, v in zip(terms, values, strict=True) if letter in t}
        if extent >= MIN_HYPERSPARSE and len(sizes) == 1:
            stored = [
                at
                for term, listed in zip(terms, coords, strict=True)
                if listed is not None
                for c, at in zip(term, listed, strict=True)
                if c == letter
            ]
            numbers[letter] = np.unique(np.concatenate(stored).astype(np.int64)) if stored else np.arange(extent)
    short = [_short(*triple, numbers) for triple in zip(terms, values, coords, strict=True)]
    return Renumbered(short, numbers, extents)


def _short(term: str, value: Any, coords: Any, numbers: dict[str, np.ndarray]) -> Any:
    if not any(c in numbers for c in term):
        return value
    if coords is None:
        for dim, letter in enumerate(term):
            if letter in numbers:
                coordinates = numbers[letter]
                index = value.new_tensor(coordinates).long() if is_torch(value) else coordinates
                value = value.index_select(dim, index) if is_torch(value) else np.take(value, coordinates, axis=dim)
        return value
    shape = tuple(len(numbers[c]) if c in numbers else int(n) for c, n in zip(term, value.shape, strict=True))
    near = [np.searchsorted(numbers[c], at) if c in numbers else at for c, at in zip(term, coords, strict=True)]
    return _like(value, near, shape)


def _coords(value: Any, name: str = "the result") -> list[np.ndarray]:
    """Return the coordinates of a sparse object in its order."""
    if isinstance(value, SparseTensor):  # whose rows may be too many for pointers
        return list(value.coords)
    source = open_source(value, name)
    source.check(name)
    return list(source.coords())


def _like(value: Any, coords: Sequence[np.ndarray], shape: tuple[int, ...]) -> Any:
    """Return a sparse object's entries at other coordinates, in its class; as a list if row pointers are too many."""
    values = value.values if isinstance(value, SparseTensor) else open_source(value, "the operand").values
    if is_torch(value):
        torch = importlib.import_module("torch")
        index = np.stack([c.astype(np.int64) for c in coords])
        return torch.sparse_coo_tensor(to_torch(index), to_torch(values), shape, check_invariants=False)
    if isinstance(value, SparseTensor):
        return SparseTensor.from_coo(np.stack(coords), values, shape)
    if not sp.issparse(value):
        return CooTensor(np.stack(coords), values, shape)
    listed = coordinates_of(coords, values, shape)
    outer = shape[1 if value.format == "csc" else 0]
    return listed if outer >= MIN_HYPERSPARSE or value.format == "coo" else in_format(listed, value.format)


__all__ = ["Renumbered", "add_duplicates", "compressed_rows", "distinct_rows", "has_hypersparse", "renumber"]
