# SPDX-License-Identifier: Apache-2.0
"""Operands of an expression: their kinds, storage layouts, and conversion to a kernel's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.base import FormatRewriteRule
from sparsetir.formats.compressed import CSF
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import CooTensor, array_of_numbers, as_numpy, check_detached, check_parts, is_sparse, is_torch
from sparsetir.ir.sizes import LARGEST_INT32
from sparsetir.utils.arguments import VALUE_DTYPES, dtype_name

Key: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class StorageLevel:
    """One dimension of a sparse operand in its storage.

    Parameters
    ----------
    dim : int
        Which dimension.
    kind : {"dense", "compressed", "singleton", "full"}
        ``full`` is a dense level below a compressed one.
    sorted, unique : bool
        Of the coordinates below one position.
    """

    dim: int
    kind: str
    sorted: bool = True
    unique: bool = True


@dataclass(frozen=True)
class Layout:
    """Storage of a sparse operand: its levels from the root, and the type of its index arrays.

    Parameters
    ----------
    levels : tuple of StorageLevel
    idtype : {"int32", "int64"}
    held : bool
        Whether the operand is a `SparseTensor` whose arrays are passed as they are.
    fills : bool
        Whether zeros between the entries are stored.
    transposed : bool
        Whether the transposed operand is passed.
    """

    levels: tuple[StorageLevel, ...]
    idtype: str = "int32"
    held: bool = False
    fills: bool = False
    transposed: bool = False

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(level.dim for level in self.levels)

    def __str__(self) -> str:
        return ", ".join(f"{level.dim}: {level.kind}" for level in self.levels)


@dataclass(frozen=True)
class Kind:
    """The properties of one operand on which the program of an expression depends.

    Parameters
    ----------
    order : int
        Number of dimensions.
    dtype : str
    ones : tuple of bool
        Which dimensions have extent 1, and so may broadcast.
    layout : Layout, optional
        None for a dense operand.
    family : {"numpy", "scipy", "torch", "coo", "tensor"}
        The class of the argument.
    """

    order: int
    dtype: str
    ones: tuple[bool, ...]
    layout: Layout | None
    family: str


@dataclass(frozen=True)
class Shape:
    """A dense operand of which only the shape is known yet."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def ndim(self) -> int:
        return len(self.shape)


# ------------------------------------------------------------------ inspection of a call's operands


def look(value: Any) -> Key:
    """Return a cheap key of the properties of one operand that decide the program."""
    kind, ones = type(value), tuple([n == 1 for n in value.shape])
    if kind is np.ndarray:
        return (kind, value.dtype, ones)
    if isinstance(value, (sp.sparray, sp.spmatrix)):
        return (kind, value.dtype, ones, _index_dtype(value))
    if isinstance(value, SparseTensor):
        return (kind, value.dtype, ones, value.format, value.idtype, has_full_root(value))
    if is_torch(value):
        return (kind, value.dtype, value.layout, ones, _index_dtype(value) if is_sparse(value) else None)
    return (kind, dtype_name(value.dtype), ones, _index_dtype(value))


def admitted(value: Any, at: int) -> Any:
    """Convert numbers and lists to arrays; return operands of known classes as they are.

    Raises
    ------
    ArgumentTypeError
        When it is not a numeric operand.
    """
    if type(value) is np.ndarray or is_sparse(value) or is_torch(value) or isinstance(value, Shape):
        return value
    if isinstance(value, (bool, int, float, list, np.generic)):
        value = np.asarray(value) if isinstance(value, list) and not value else array_of_numbers(value, f"operand {at}")
        return value.astype("float64") if value.size == 0 and value.dtype == object else value
    if isinstance(value, (str, bytes, dict, set)) or value is None:
        expected = "a numpy or torch array, a sparse matrix or tensor, or a number"
        raise ArgumentTypeError(f"operand {at} of an expression is {expected}, got {type(value).__name__}")
    if isinstance(value, np.matrix):
        return np.asarray(value)
    return as_numpy(value, f"operand {at}")[0]


def passed(value: Any, at: int) -> Any:
    """Convert an operand of a call like `admitted`; refuse tensors that require gradients.

    Raises
    ------
    ArgumentTypeError
        When it is not a numeric operand, or torch expects gradients of the result.
    """
    if type(value) is np.ndarray:
        return value
    if is_torch(value):
        check_detached(value, f"operands[{at}]", "einsum")
    return admitted(value, at)


def kind_of(value: Any, at: int) -> Kind:
    """Return the properties of one operand on which the program depends.

    Raises
    ------
    ArgumentTypeError
        When its dtype is none of the dialect.
    """
    dtype = dtype_name(value.dtype)
    if dtype not in VALUE_DTYPES:
        supported = ", ".join(VALUE_DTYPES)
        raise ArgumentTypeError(
            f"operand {at} holds {dtype}, expressions are computed in {supported}: pass .astype(...)"
        )
    shape = tuple(value.shape)
    ones = tuple(n == 1 for n in shape)
    if sp.issparse(value):
        check_parts(value, f"operand {at}")
    if not is_sparse(value):
        return Kind(len(shape), dtype, ones, None, "torch" if is_torch(value) else "numpy")
    if not shape:
        raise ArgumentError(f"operand {at} is sparse and has no dimensions: pass its value as a number")
    return Kind(len(shape), dtype, ones, layout_of(value), family(value))


def family(value: Any) -> str:
    """Return the class of a sparse operand, among the known ones."""
    if sp.issparse(value):
        return "scipy"
    if isinstance(value, SparseTensor):
        return "tensor"
    return "torch" if is_torch(value) else "coo"


# ------------------------------------------------------------------ layouts


def fits_layout(value: Any, layout: Layout) -> bool:
    """Return whether the arrays of a tensor fit a layout; a root with all coordinates can be computed from any."""
    if not isinstance(value, SparseTensor) or not layout.held or value.idtype != layout.idtype:
        return False
    levels = own_levels(tuple(value.format.rules))
    if levels is None or levels[1:] != layout.levels[1:] or levels[0].dim != layout.levels[0].dim:
        return False
    has_fitting_root = levels[0] == layout.levels[0] or (layout.levels[0].kind == "dense" and _is_listed(levels))
    return has_fitting_root and value.format.rules[0].fills == layout.fills


def _is_listed(levels: Sequence[StorageLevel]) -> bool:
    """Return whether the root lists coordinates of compressed fibers in ascending order without duplicates."""
    if len(levels) < 2 or not levels[0].kind == levels[1].kind == "compressed":
        return False
    return levels[0].sorted and levels[0].unique


def layout_of(value: Any) -> Layout:
    """Return the layout that a program reads: as stored, or by rows if the storage is no tree of levels."""
    if isinstance(value, SparseTensor):
        levels = own_levels(tuple(value.format.rules))
        if levels is None:
            return Layout(rows(value.ndim), value.idtype)
        root = StorageLevel(levels[0].dim, "dense") if has_full_root(value) else levels[0]
        return Layout((root, *levels[1:]), value.idtype, held=True, fills=value.format.rules[0].fills)
    idtype = _index_dtype(value)
    if len(value.shape) == 2 and _is_by_columns(value):
        return Layout((StorageLevel(1, "dense"), StorageLevel(0, "compressed")), idtype)
    return Layout(rows(len(value.shape)), idtype)


def rows(order: int) -> tuple[StorageLevel, ...]:
    """Return compressed levels below a dense root; a vector has no root."""
    if order == 1:
        return (StorageLevel(0, "compressed"),)
    return (StorageLevel(0, "dense"), *(StorageLevel(d, "compressed") for d in range(1, order)))


def _is_by_columns(value: Any) -> bool:
    if sp.issparse(value):
        return bool(value.format == "csc")
    return is_torch(value) and str(value.layout) == "torch.sparse_csc"


def _index_dtype(value: Any) -> str:
    """Return the type that index arrays of the argument's own size need."""
    if max(value.shape, default=0) > LARGEST_INT32:
        return "int64"
    if sp.issparse(value):
        indices = getattr(value, "indices", None)
        indices = value.coords[0] if indices is None and value.format == "coo" else indices
        return "int64" if isinstance(indices, np.ndarray) and indices.dtype == np.int64 else "int32"
    if is_torch(value):
        return "int64" if _torch_width(value) else "int32"
    coords = getattr(value, "coords", None)
    return "int64" if isinstance(coords, np.ndarray) and coords.dtype == np.int64 else "int32"


def _torch_width(value: Any) -> bool:
    layout = str(value.layout)
    if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
        return "int64" in str(value.crow_indices().dtype)
    return layout not in ("torch.sparse_csc", "torch.sparse_bsc") or "int64" in str(value.ccol_indices().dtype)


KINDS = {"dense_fixed": "dense", "sparse_variable": "compressed", "singleton": "singleton"}


@lru_cache(maxsize=256)
def own_levels(rules: tuple[FormatRewriteRule, ...]) -> tuple[StorageLevel, ...] | None:
    """Return the levels of a format whose only piece has one axis for each dimension, with its coordinates."""
    if len(rules) != 1 or rules[0].inverse is not None:
        return None
    rule, axes = rules[0], rules[0].buffer.axes
    dims = {group[0]: d for d, group in rule.axis_map.items()}
    levels: list[StorageLevel] = []
    for at, axis in enumerate(sorted(axes, key=lambda axis: len(axis.ancestors))):
        kind = _level_kind(axis)
        if kind is None or (axis.parent is None) != (kind == "dense" or at == 0):
            return None
        levels.append(StorageLevel(dims[axis.name], kind, axis.sorted, axis.unique))
    chain = [axis for axis in axes if axis.kind != "dense_fixed"]
    if any(sum(other.parent == axis for other in axes) > 1 for axis in axes) or not chain:
        return None
    is_one_chain = sum(axis.parent is None for axis in axes) == 1
    return tuple(levels) if is_one_chain and all(level.kind != "dense" for level in levels[1:]) else None


def _level_kind(axis: Any) -> str | None:
    if axis.kind == "sparse_fixed" and axis.rule is not None and axis.full:
        return "full"
    return KINDS.get(axis.kind) if axis.rule is None else None


def has_full_root(value: SparseTensor) -> bool:
    """Return whether the first level lists such a share of all coordinates that loops over all of them are faster."""
    levels = own_levels(tuple(value.format.rules))
    if levels is None or not _is_listed(levels):
        return False
    return bool(value.shape[levels[0].dim] <= 8 * len(root_axis(value)) + 64)


def root_axis(value: SparseTensor) -> Any:
    """Return the coordinates that the first level of a tensor lists."""
    (piece,) = value.pieces
    root_indices = next(axis.indices for axis in piece.rule.buffer.axes if axis.parent is None)
    assert root_indices is not None
    return piece.arrays[str(root_indices.name)]


def full_root(coordinates: Any, starts: Any, count: int) -> Any:
    """Return the offsets of the fibers of all coordinates, given those of the listed ones."""
    return starts[np.searchsorted(coordinates, np.arange(count + 1))]


def tree_of(value: Any, layout: Layout, order: tuple[int, ...] = ()) -> SparseTensor:
    """Convert a sparse operand to a tensor whose arrays can be passed: in a layout, or in some order of dimensions."""
    if not order:
        is_held = isinstance(value, SparseTensor) and (layout_of(value) == layout or fits_layout(value, layout))
        return value if is_held else SparseTensor.from_any(value, "csf")
    csf = CSF(order=order)
    if isinstance(value, SparseTensor):
        is_held = value.format == csf.resolve(value.ndim, value.idtype)
        return value if is_held else value.convert(csf)
    return SparseTensor.from_any(value, csf)


def diagonal(value: Any, letters: str, result_letters: str) -> CooTensor:
    """Return the entries of a sparse operand whose coordinates are equal for equal letters of `given`."""
    coo = SparseTensor.from_any(value).to_coo()
    first = [letters.index(c) for c in letters]
    equal = [coo.coords[d] == coo.coords[f] for d, f in enumerate(first) if f != d]
    is_diagonal, dims = np.logical_and.reduce(equal), [letters.index(c) for c in result_letters]
    return CooTensor(coo.coords[dims][:, is_diagonal], coo.values[is_diagonal], tuple(coo.shape[d] for d in dims))


__all__ = [
    "CooTensor",
    "Key",
    "Kind",
    "Layout",
    "Shape",
    "StorageLevel",
    "admitted",
    "diagonal",
    "family",
    "fits_layout",
    "full_root",
    "has_full_root",
    "kind_of",
    "layout_of",
    "look",
    "own_levels",
    "passed",
    "root_axis",
    "rows",
    "tree_of",
]
