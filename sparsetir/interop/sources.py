# SPDX-License-Identifier: Apache-2.0
"""Sparse arguments of scipy, torch and this package as entries with coordinates."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError
from sparsetir.interop.levels import Array, Level, Validator, check_level, first_outside, is_sound
from sparsetir.utils.arguments import as_index, shown
from sparsetir.utils.buffers import Copies

# torch tensors in host memory as numpy arrays, and back.


HAVE_GRADIENTS = "sparsetir.torch.Graph and sparsetir.torch.matmul have gradients"
TRANSFORMED = (
    "transforms of torch.func (vmap, grad, jvp and others) do not go through the kernels of this package: "
    "differentiate with torch.autograd, and call the operator once for each example"
)


def to_torch(array: Array) -> Any:
    """Return a torch tensor that shares the array's memory; bfloat16 included."""
    torch = sys.modules.get("torch") or importlib.import_module("torch")
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # a class of numbers, an order of bytes, negative strides
        raise ArgumentTypeError(f"torch has no tensors of {array.dtype}: convert the values with astype") from None


def is_torch(value: Any) -> bool:
    """Return whether a value is a tensor of torch, without importing torch."""
    kind: Any = type(value)
    return _is_of_torch(kind)


@cache
def _is_of_torch(kind: Any) -> bool:
    """Return whether a class is torch's tensor, or derived from it."""
    return any((getattr(b, "__module__", ""), b.__name__) == ("torch", "Tensor") for b in kind.__mro__)


def check_detached(tensor: Any, name: str, what: str) -> None:
    """Raise where derivatives that `what` does not have are asked of a tensor, or the tensor has no numbers.

    Raises
    ------
    ArgumentTypeError
        The tensor requires a gradient, has a tangent, or is a stand-in without memory.
    LoweringError
        The tensor is one inside of a transform of torch.func.
    """
    torch = importlib.import_module("torch")
    if tensor.requires_grad and torch.is_grad_enabled():
        fault = f"{name} requires grad, but {what} has no gradients"
        raise ArgumentTypeError(f"{fault}: pass {name}.detach(), or call under torch.no_grad(); {HAVE_GRADIENTS}")
    if _functorch().is_functorch_wrapped_tensor(tensor):
        raise LoweringError(TRANSFORMED)
    if is_dual(tensor):
        fault = f"{name}: expected a tensor without a tangent, got a dual one, but {what} has no derivatives"
        raise ArgumentTypeError(f"{fault}. Pass {name}.detach(); {HAVE_GRADIENTS}")
    if type(tensor).__name__ == "FakeTensor":
        raise ArgumentTypeError(f"{name}: expected a tensor of numbers, got a FakeTensor, which has none. Pass data.")


def is_dual(tensor: Any) -> bool:
    """Return whether a tensor has a tangent of torch's forward mode."""
    forward_ad = _forward_ad()
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


@cache
def _forward_ad() -> Any:
    return importlib.import_module("torch.autograd.forward_ad")


@cache
def _functorch() -> Any:
    return importlib.import_module("torch")._C._functorch


def undifferentiated(tensor: Any) -> Any:
    """Return a tensor over the same memory that is neither differentiated nor transformed; None of others."""
    if _functorch().is_functorch_wrapped_tensor(tensor):
        return None
    if tensor.requires_grad:
        if importlib.import_module("torch").is_grad_enabled():
            return None
        tensor = tensor.detach()
    return None if is_dual(tensor) else tensor


def torch_to_numpy(tensor: Any, name: str) -> Array:
    """Return the memory of a dense tensor of torch on the host as a numpy array."""
    if tensor.device.type != "cpu":
        raise ArgumentTypeError(f"{name} is on {tensor.device}, kernels run on the cpu: pass {name}.cpu()")
    if tensor.is_quantized:
        raise ArgumentTypeError(f"{name} is quantized ({tensor.dtype}): pass {name}.dequantize()")
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        torch, ml_dtypes = importlib.import_module("torch"), importlib.import_module("ml_dtypes")
        return np.asarray(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.asarray(tensor.resolve_conj().resolve_neg())


def holds_numbers(array: Array) -> bool:
    """Return whether the elements of an array are numbers, as numpy or ml_dtypes has them."""
    dtype = array.dtype
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)


def check_numbers(array: Array, name: str) -> None:
    """Raise `ArgumentTypeError` for values that are text, dates, records or objects."""
    if not holds_numbers(array):
        raise ArgumentTypeError(f"{name}: expected values that are numbers, got {array.dtype}. Convert them by astype.")


def array_of_numbers(value: Any, name: str) -> Array:
    """Return an array, a torch tensor, a number or nested lists of numbers as a numpy array.

    Raises
    ------
    ArgumentTypeError
        The argument is something else, sparse, masked, or in the memory of another device.
    """
    expected = f"{name}: expected an array of numbers, got"
    if is_sparse(value) or isinstance(value, np.ma.MaskedArray):
        kind = "masked" if isinstance(value, np.ma.MaskedArray) else "sparse"
        raise ArgumentTypeError(f"{expected} a {kind} {type(value).__name__}. Pass a plain dense array.")
    if is_torch(value):
        return torch_to_numpy(value, name)
    try:
        array = np.asarray(value)
    except Exception as error:  # numpy runs methods of the object
        raise ArgumentTypeError(f"{expected} {shown(value)}, which numpy cannot read: {error}.") from None
    if not holds_numbers(array):
        what = f"an array of {array.dtype}" if array.ndim else shown(value)
        raise ArgumentTypeError(f"{expected} {what}. Convert it with numpy.asarray and a dtype.")
    return array


# Sparse arguments of every class, opened as entries with coordinates.


UNORDERED = Level("0", "sparse_variable", sorted=False, unique=False)


@dataclass(frozen=True, eq=False)
class Source:
    """The entries of a sparse argument in the argument's own order.

    ``rebuild(values, copy_structure)`` makes an object of the argument's class from values shaped like ``values``.
    """

    shape: tuple[int, ...]
    values: Array
    rebuild: Callable[[Array, bool], Any]

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of the dense block at each stored position, () for scalars."""
        return tuple(self.values.shape[1:])

    def coords(self) -> tuple[Array, ...]:
        """Return the coordinates of every entry, one array per dimension."""
        raise NotImplementedError

    def check(self, name: str, is_sound: Validator = is_sound) -> None:
        """Raise `StructureError` unless the index arrays are in order; `is_sound` says of most that they are."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Coordinates(Source):
    """Entries listed by their coordinates (COO of any order)."""

    indices: tuple[Array, ...] = ()

    def coords(self) -> tuple[Array, ...]:
        return self.indices

    def check(self, name: str, is_sound: Validator = is_sound) -> None:
        for dim, (index, extent) in enumerate(zip(self.indices, self.shape, strict=True)):
            if index.dtype.kind not in "iu":
                raise StructureError(f"coordinates of {name}: expected int32 or int64, got {index.dtype}")
            if is_one_fiber(UNORDERED, index, extent, is_sound):
                continue
            entry = first_outside(index, extent)
            if entry is not None:
                fault = f"entry {entry} of {name} has coordinate {index[entry]} in dimension {dim}"
                raise StructureError(f"{fault}, expected one of [0, {extent})")


@dataclass(frozen=True, eq=False)
class CompressedSource(Source):
    """Entries, or blocks of them, fiber after fiber of dimension ``major`` (CSR, CSC, BSR)."""

    indptr: Array = field(default_factory=lambda: np.zeros(1, np.int32))
    indices: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    major: int = 0

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape counted in blocks."""
        return tuple(n // b for n, b in zip(self.shape, self.block or (1, 1), strict=True))

    def coords(self) -> tuple[Array, ...]:
        fibers = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        grid = (fibers, self.indices) if self.major == 0 else (self.indices, fibers)
        if not self.block:
            return grid
        rows, cols = (i.astype(np.int64)[:, None, None] * b for i, b in zip(grid, self.block, strict=True))
        i, j = np.broadcast_arrays(rows + np.arange(self.block[0])[:, None], cols + np.arange(self.block[1]))
        return i.reshape(-1), j.reshape(-1)

    def check(self, name: str, is_sound: Validator = is_sound) -> None:
        if len(self.values) != len(self.indices):
            raise StructureError(f"{name} has {len(self.values)} values but {len(self.indices)} indices")
        level = Level("0" if self.major else "1", "sparse_variable", sorted=False, unique=False)
        fibers, length = self.grid[self.major], self.grid[1 - self.major]
        if self.is_ordered(level, is_sound):
            return
        check_level(level, self.indptr, self.indices, parent_count=fibers, length=length, name=name, need_sorted=False)

    def is_ordered(self, level: Level, is_sound: Validator) -> bool:
        """Return whether the index arrays are valid, and in the order that a level asks for."""
        if any(array.dtype.kind not in "iu" or array.ndim != 1 for array in (self.indptr, self.indices)):
            return False
        fibers, length = self.grid[self.major], self.grid[1 - self.major]
        need_sorted = level.sorted or level.unique
        return is_sound(level, self.indptr, self.indices, parent_count=fibers, length=length, need_sorted=need_sorted)


def is_one_fiber(level: Level, indices: Array, length: int, is_sound: Validator) -> bool:
    """Return whether coordinates without a parent lie in the range, and in the order that a level asks for."""
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        return False
    dtype = indices.dtype if indices.dtype.itemsize >= 4 else np.int64  # narrower ones cannot count all entries
    ends = np.array([0, indices.size], dtype)
    return is_sound(level, ends, indices, parent_count=1, length=length, need_sorted=level.sorted or level.unique)


@dataclass(frozen=True, eq=False)
class CooTensor:
    """A sparse tensor of any order as a list of entries; entries with the same coordinates add up.

    Parameters
    ----------
    coords : ndarray of int, shape (order, nnz)
        Coordinates of the entries, in any order.
    values : ndarray, shape (nnz,)
        Their values.
    shape : tuple of int
        Extent of every dimension.

    Raises
    ------
    ArgumentError
        When the three do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> tensor = CooTensor.from_dense(np.array([[[0.0, 2.0]], [[3.0, 0.0]]]))
    >>> tensor.shape, tensor.coords.tolist(), tensor.values.tolist()
    ((2, 1, 2), [[0, 1], [0, 0], [1, 0]], [2.0, 3.0])
    """

    coords: Array
    values: Array
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "coords", array_of_numbers(self.coords, "coords of a CooTensor"))
        object.__setattr__(self, "values", array_of_numbers(self.values, "values of a CooTensor"))
        object.__setattr__(self, "shape", whole_sizes(self.shape, "the shape of a CooTensor"))
        expected = (len(self.shape), self.values.size)
        if self.coords.shape != expected or self.values.ndim != 1:
            shapes = f"coords of shape {self.coords.shape} and values of shape {self.values.shape}"
            raise ArgumentError(
                f"a CooTensor of shape {self.shape} needs coords [order, nnz], values [nnz], got {shapes}"
            )
        if self.coords.dtype.kind not in "iu":
            raise ArgumentTypeError(f"coords of a CooTensor: expected integers, got {self.coords.dtype}")

    @classmethod
    def from_dense(cls, array: Any) -> CooTensor:
        """Return the entries of `array` that are not zero, in row-major order."""
        array = array_of_numbers(array, "array")
        if array.ndim == 0:
            raise ArgumentError("array: expected at least one dimension, got a number. Pass an array of shape (1,).")
        coords = np.nonzero(array)
        return cls(np.stack(coords), array[coords], array.shape)

    def to_dense(self) -> Array:
        """Convert the tensor to an ndarray."""
        dense = np.zeros(self.shape, self.values.dtype)
        np.add.at(dense, tuple(self.coords), self.values)
        return dense

    def with_values(self, values: Array) -> CooTensor:
        """Return the same coordinates with other values."""
        return replace(self, values=values)

    @property
    def order(self) -> int:
        return len(self.shape)

    @property
    def nnz(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype


def is_sparse(value: Any) -> bool:
    """Return whether `store` accepts `value`: of scipy.sparse, torch, or with coords, values (or data) and shape."""
    if sp.issparse(value):
        return True
    if is_torch(value):
        return str(value.layout).startswith("torch.sparse")
    return isinstance(getattr(value, "coords", None), (np.ndarray, tuple)) and _listed_values(value) is not None


def advice_for_matrix(value: Any) -> str:
    """Return what an error says about an argument that should have been a sparse matrix."""
    kind = type(value).__name__
    if is_sparse(value) or hasattr(value, "as_source"):
        return f"got {kind} of shape {tuple(value.shape)}; operators (A + B) and sparsetir.einsum take any order"
    return f"pass a scipy matrix or a torch tensor with a sparse layout, got {kind}"


def _listed_values(value: Any) -> Array | None:
    """Return the values of an object with coords and shape, if they are an attribute."""
    values = getattr(value, "values", None)
    if not isinstance(values, np.ndarray):
        values = getattr(value, "data", None)
    return values if isinstance(values, np.ndarray) and isinstance(getattr(value, "shape", None), tuple) else None


def holds_own_values(value: Any) -> bool:
    """Return whether the values of the opened object are its own array, so that what is written there is seen."""
    if sp.issparse(value):
        return value.format not in ("dia", "dok", "lil")
    return not hasattr(value, "as_source")


def whole_sizes(shape: Any, name: str) -> tuple[int, ...]:
    """Return a shape of integers as one of Python's; refuse sizes that a cast would change."""
    if not isinstance(shape, (Sequence, Iterator, np.ndarray)) or getattr(shape, "ndim", 1) != 1:
        raise ArgumentTypeError(f"{name}: expected integers, got {type(shape).__name__}; pass a tuple")
    sizes = tuple(as_index(n) for n in shape)
    wrong = [n for n in sizes if type(n) is not int]
    if wrong:
        raise ArgumentTypeError(f"{name}: expected integers, got {wrong[0]!r} in {sizes}")
    return sizes


def open_source(value: Any, name: str) -> Source:
    """Return the entries of a sparse argument of any supported class."""
    if sp.issparse(value):
        return _open_scipy(value, name)
    if hasattr(value, "as_source"):  # a SparseTensor
        return value.as_source()
    if not is_sparse(value):
        expected = "a scipy.sparse array, a torch sparse tensor, or an object with coords, values and shape"
        raise ArgumentTypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    if is_torch(value):
        return _open_torch(value, name)
    values = _listed_values(value)
    assert values is not None  # or it would not be sparse
    if np.any(getattr(value, "fill_value", 0)):
        raise ArgumentError(
            f"{name} is {value.fill_value} where nothing is stored: kernels take tensors that are zero there"
        )
    _check_lists(value.coords, values, len(value.shape), name)
    return Coordinates(tuple(value.shape), values, _rebuild_listed(value), tuple(value.coords))


def _check_lists(coords: Any, values: Array, order: int, name: str) -> None:
    """Raise unless there is a list of coordinates for each dimension, as long as that of the values."""
    shapes = [np.shape(c) for c in coords]
    if len(shapes) != order or any(shape != values.shape[:1] for shape in shapes):
        fault = f"coords of shapes {', '.join(map(str, shapes))} and values of shape {values.shape}"
        raise StructureError(
            f"{name} needs coords [order, nnz], values [nnz] and one extent per dimension, got {fault}"
        )


def _rebuild_listed(value: Any) -> Callable[[Array, bool], Any]:
    def rebuild(values: Array, copy_structure: bool) -> Any:
        coords = np.array(value.coords) if copy_structure else value.coords
        if isinstance(value, CooTensor):
            return CooTensor(coords, values, value.shape)
        if hasattr(value, "with_values"):
            return value.with_values(values)
        return CooTensor(coords, values, value.shape)

    return rebuild


def _open_scipy(value: Any, name: str) -> Source:
    check_parts(value, name)
    if value.format == "dia":
        return _open_dia(value)
    if value.format == "coo":
        return Coordinates(value.shape, value.data, _rebuild_scipy(value), tuple(value.coords))
    if value.format in ("lil", "dok"):
        coo = _listed(value, name)
        return Coordinates(value.shape, coo.data, _rebuild_listing(type(value), coo), tuple(coo.coords))
    value = _without_reserve(value)
    if value.ndim == 1:
        _check_lists((value.indices,), value.data, 1, name)
        return Coordinates(value.shape, value.data, _rebuild_scipy(value), (value.indices,))
    major, indptr, indices = int(value.format == "csc"), _signed(value.indptr), _signed(value.indices)
    return CompressedSource(value.shape, value.data, _rebuild_scipy(value), indptr, indices, major)


def _listed(value: Any, name: str) -> Any:
    """Convert lists of lists or a dictionary to scipy's list of coordinates."""
    try:
        return value.tocoo()
    except (IndexError, TypeError, ValueError) as error:
        raise StructureError(f"the coordinates of {name} do not fit its shape {value.shape}: {error}") from error


def check_sound(value: Any, name: str) -> None:
    """Raise `StructureError` for a scipy or torch object that they would convert past the ends of its arrays."""
    if not sp.issparse(value) or value.format != "dia":
        open_source(value, name).check(name)
    else:
        check_parts(value, name)


def check_parts(value: Any, name: str) -> None:
    """Raise `StructureError` unless the arrays of a scipy object have the kinds and dimensions that its format has."""
    if value.format == "dok":
        return
    if value.format == "lil":
        _check_rows(value, name)
        return
    if value.format == "coo":
        places = {f"coords[{d}]": array for d, array in enumerate(value.coords)}
    else:
        parts = ("offsets",) if value.format == "dia" else ("indptr", "indices")
        places = {part: getattr(value, part) for part in parts}
    for part, array in (*places.items(), ("data", value.data)):
        if not isinstance(array, np.ndarray):
            raise StructureError(f"{part} of {name}: expected an array, got {type(array).__name__}")
    for part, array in places.items():
        if array.ndim != 1:
            raise StructureError(f"{part} of {name} has shape {array.shape}, expected one dimension")
        if array.dtype.kind not in "iu":
            raise StructureError(f"{part} of {name}: expected int32 or int64, got {array.dtype}")
    _check_data(value, name)


def _check_data(value: Any, name: str) -> None:
    """Raise unless the values have the dimensions that the format has: scipy divides by the numbers of a block."""
    shape = value.data.shape
    if value.format == "bsr":
        if len(shape) != 3 or 0 in shape[1:]:
            raise StructureError(f"data of {name} has shape {shape}, expected blocks of a row and a column at least")
        if any(extent % edge for extent, edge in zip(value.shape, shape[1:], strict=True)):
            raise StructureError(f"data of {name} has blocks of shape {shape[1:]}, which do not divide {value.shape}")
    elif value.format == "dia":
        if len(shape) != 2 or shape[0] != len(value.offsets):
            expected = f"a row for each of the {len(value.offsets)} offsets"
            raise StructureError(f"data of {name} has shape {shape}, expected {expected}")
        if len(np.unique(value.offsets)) != len(value.offsets):
            raise StructureError(f"offsets of {name} name a diagonal twice")
    elif value.format == "coo" and len(shape) == 1:
        _check_lists(value.coords, value.data, value.ndim, name)
    elif len(shape) != 1:
        raise StructureError(f"data of {name} has shape {shape}, expected one dimension")


def _check_rows(value: Any, name: str) -> None:
    """Raise unless there are two lists of one length for each row, of columns and of values."""
    rows, shape = value.shape[0], (np.shape(value.rows), np.shape(value.data))
    if shape != ((rows,), (rows,)):
        raise StructureError(f"rows and data of {name} have the shapes {shape[0]} and {shape[1]}, expected ({rows},)")
    columns, values = (np.fromiter(map(len, part), np.intp, rows) for part in (value.rows, value.data))
    if not np.array_equal(columns, values):
        row = int(np.argmax(columns != values))
        raise StructureError(f"row {row} of {name} has {values[row]} values but {columns[row]} columns")


def _signed(array: Any) -> Array:
    """Convert 64-bit unsigned index arrays, which numpy does not count with, to signed ones."""
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def _without_reserve(value: Any) -> Any:
    """Truncate data and indices to the last indptr: scipy allows them to be longer."""
    nnz = int(value.indptr[-1]) if len(value.indptr) else 0
    if not 0 <= nnz < min(len(value.data), len(value.indices)):
        return value
    value = copy.copy(value)
    value.data, value.indices = value.data[:nnz], value.indices[:nnz]
    return value


def _rebuild_scipy(value: Any) -> Callable[[Array, bool], Any]:
    kind: Any = type(value)
    attributes = dict(vars(value))  # the user may give the original other arrays later
    structure = {part: Copies(attributes[part]) for part in ("indptr", "indices", "offsets") if part in attributes}
    coords = [Copies(c) for c in attributes.get("coords", ())]

    def rebuild(values: Array, copy_structure: bool) -> Any:
        result: Any = kind.__new__(kind)
        vars(result).update(attributes)
        result.data = values
        if not copy_structure:
            return result
        for part, copies in structure.items():
            setattr(result, part, copies.take())
        if coords:
            result.coords = tuple(copies.take() for copies in coords)
        return result

    return rebuild


def _rebuild_listing(kind: type, coo: Any) -> Callable[[Array, bool], Any]:
    return lambda values, _: kind(sp.coo_array((values, coo.coords), shape=coo.shape))


def _open_dia(value: Any) -> Source:
    rows, cols = value.shape
    j = np.arange(value.data.shape[1])
    i = j - value.offsets[:, None]
    is_inside = (i >= 0) & (i < rows) & (j < cols)
    rebuild_dia = _rebuild_scipy(value)

    def rebuild(values: Array, copy_structure: bool) -> Any:
        data = np.zeros(is_inside.shape, values.dtype)
        data[is_inside] = values
        return rebuild_dia(data, copy_structure)

    indices = (i[is_inside], np.broadcast_to(j, is_inside.shape)[is_inside])
    return Coordinates(value.shape, value.data[is_inside], rebuild, indices)


def _open_torch(tensor: Any, name: str) -> Source:
    tensor = tensor.detach()
    layout = str(tensor.layout).removeprefix("torch.sparse_")
    if layout == "coo":
        return _open_torch_coo(tensor, name)
    by_row = layout in ("csr", "bsr")
    parts = (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    values = torch_to_numpy(tensor.values(), name)
    if tensor.ndim != 2 or values.ndim != (1 if layout in ("csr", "csc") else 3):
        shape = tuple(tensor.shape)
        raise ArgumentTypeError(
            f"{name} is a batched {layout} tensor of shape {shape}: pass one matrix, or a COO tensor"
        )
    indptr, indices = (torch_to_numpy(p, name) for p in parts)
    return CompressedSource(
        tuple(tensor.shape), values, _rebuild_compressed_torch(tensor, parts), indptr, indices, 1 - by_row
    )


def _rebuild_compressed_torch(tensor: Any, parts: tuple[Any, Any]) -> Callable[[Array, bool], Any]:
    def rebuild(values: Array, copy_structure: bool) -> Any:
        indptr, indices = (p.clone() for p in parts) if copy_structure else parts
        make = importlib.import_module("torch").sparse_compressed_tensor
        options = {"size": tensor.shape, "layout": tensor.layout, "check_invariants": False}
        return make(indptr, indices, to_torch(values), **options)

    return rebuild


def _open_torch_coo(tensor: Any, name: str) -> Source:
    # the underscored accessors are the documented way into a tensor that is not coalesced
    where, values = tensor._indices(), torch_to_numpy(tensor._values(), name)

    def rebuild(new: Array, copy_structure: bool) -> Any:
        make = importlib.import_module("torch").sparse_coo_tensor
        options = {"is_coalesced": tensor.is_coalesced(), "check_invariants": False}
        return make(where.clone() if copy_structure else where, to_torch(new), tensor.shape, **options)

    return Coordinates(tuple(tensor.shape), values, rebuild, _with_inner(torch_to_numpy(where, name), values))


def _with_inner(indices: Array, values: Array) -> tuple[Array, ...]:
    """Return the coordinates of every number in a hybrid tensor, whose entries are dense blocks."""
    if values.ndim == 1:
        return tuple(indices)
    inner = np.indices(values.shape[1:]).reshape(values.ndim - 1, -1)
    return (*np.repeat(indices, inner.shape[1], axis=1), *np.tile(inner, len(values)))
