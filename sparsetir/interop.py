# SPDX-License-Identifier: Apache-2.0
"""Sparse objects of other libraries, laid out as the axes of a sparse buffer want them, and back.

`store` takes scipy, torch and coordinate tensors apart, `restore` puts new values into an object of the same class
and structure. Where the argument's layout is the buffer's, its arrays are used as they are; every other layout is
converted through sorted coordinates. `check_level` judges arrays that a user passes by name.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
CHUNK = 1 << 16  # elements compared at a time, so that temporaries stay in cache
HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost


@dataclass(frozen=True, eq=False)
class Level:
    """One axis of a sparse buffer; a buffer is a list of levels in subscript order.

    Parameters
    ----------
    name : str
        The axis, for messages.
    kind : str
        ``dense_fixed``, ``dense_variable``, ``dense_implicit``, ``sparse_fixed``, ``sparse_variable`` or ``singleton``.
    parent : int or None
        Where the parent axis is in the list; None for the root of a tree.
    idtype : str
        ``int32`` or ``int64``.
    length : int or None
        Dense length, None while unknown.
    width : int or None
        Slots per fiber of a ``sparse_fixed`` axis, None while unknown.
    rule, extent_rule, offset_rule : callable or None
        Formulas on numpy arrays that replace index arrays: ``rule(*ancestor_coords, slot)`` is a coordinate,
        ``extent_rule(*ancestor_coords)`` and ``offset_rule(*ancestor_coords)`` describe a ``dense_implicit`` fiber.
    sorted, unique : bool
        Whether the coordinates of a fiber increase, and whether they are distinct.
    """

    name: str
    kind: str
    parent: int | None = None
    idtype: str = "int32"
    length: int | None = None
    width: int | None = None
    rule: Callable[..., Any] | None = None
    extent_rule: Callable[..., Any] | None = None
    offset_rule: Callable[..., Any] | None = None
    sorted: bool = True
    unique: bool = True


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
        """Coordinates of every entry, one array per dimension."""
        raise NotImplementedError

    def check(self, name: str) -> None:
        """Raise `StructureError` unless the index arrays are in order."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Coordinates(Source):
    """Entries listed by their coordinates (COO of any order)."""

    indices: tuple[Array, ...] = ()

    def coords(self) -> tuple[Array, ...]:
        return self.indices

    def check(self, name: str) -> None:
        for dim, (index, extent) in enumerate(zip(self.indices, self.shape, strict=True)):
            bad = _first_outside(index, extent)
            if bad is not None:
                found = f"entry {bad} of {name} has coordinate {index[bad]} in dimension {dim}"
                raise StructureError(f"{found}, expected one of [0, {extent})")


@dataclass(frozen=True, eq=False)
class Compressed(Source):
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

    def check(self, name: str) -> None:
        if len(self.values) != len(self.indices):
            raise StructureError(f"{name} has {len(self.values)} values but {len(self.indices)} indices")
        level = Level("0" if self.major else "1", "sparse_variable", sorted=False, unique=False)
        fibers, length = self.grid[self.major], self.grid[1 - self.major]
        check_level(level, self.indptr, self.indices, parent_count=fibers, length=length, name=name, need_sorted=False)


@dataclass(frozen=True, eq=False)
class Stored:
    """A sparse argument as a buffer stores it.

    ``values`` has one dimension per axes tree, in the order in which the trees first appear among the levels; its
    extent is the number of positions of the tree's last axis. The dictionaries are keyed by level.
    ``slots`` says where in the flat values each entry of ``source`` lies (None: in order), ``repeats`` which of the
    entries were added to an earlier one.
    """

    values: Array
    indptr: dict[int, Array]
    indices: dict[int, Array]
    lengths: dict[int, int]
    widths: dict[int, int]
    source: Source
    slots: Array | None = None
    repeats: Array | None = None

    @property
    def is_borrowed(self) -> bool:
        """Whether the argument had the buffer's layout, so that nothing was reordered."""
        return self.slots is None


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
        object.__setattr__(self, "coords", np.asarray(self.coords))
        object.__setattr__(self, "values", np.asarray(self.values))
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        expected = (len(self.shape), self.values.size)
        if self.coords.shape != expected or self.values.ndim != 1:
            found = f"coords of shape {self.coords.shape} and values of shape {self.values.shape}"
            raise ArgumentError(
                f"a CooTensor of shape {self.shape} needs coords [order, nnz], values [nnz]; found {found}"
            )
        if self.coords.dtype.kind not in "iu":
            raise ArgumentTypeError(f"coords of a CooTensor must be integers, found {self.coords.dtype}")

    @classmethod
    def from_dense(cls, array: Any) -> CooTensor:
        """The entries of `array` that are not zero, in row-major order."""
        array = np.asarray(array)
        coords = np.nonzero(array)
        return cls(np.stack(coords), array[coords], array.shape)

    def to_dense(self) -> Array:
        """The tensor as an ndarray."""
        dense = np.zeros(self.shape, self.values.dtype)
        np.add.at(dense, tuple(self.coords), self.values)
        return dense

    def with_values(self, values: Array) -> CooTensor:
        """The same coordinates with other values."""
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
    """Whether `store` accepts `value`: scipy.sparse, a torch sparse tensor, or coords, values and shape."""
    if sp.issparse(value):
        return True
    if _is_torch(value):
        return str(value.layout).startswith("torch.sparse")
    return isinstance(getattr(value, "coords", None), (np.ndarray, tuple)) and _is_listed(value)


def store(value: Any, levels: Sequence[Level], *, name: str, dtype: str, check: bool = True) -> Stored:
    """Lay a sparse argument out in the storage of a sparse buffer.

    Nothing is copied when the argument has the buffer's layout already: CSR, CSC and BSR (as four axes) of scipy or
    torch with sorted distinct indices, and coordinate lists for a chain of singletons. Otherwise the entries are
    sorted by the axes trees and stored anew; the argument itself is never changed.

    * Index arrays of another width are converted, with a range check.
    * Entries with the same coordinates are added up, or kept apart if an axis of a one-tree buffer is not unique.
    * Entries that hold zero stay entries. Every stored diagonal of a DIA matrix counts in full.
    * Slots that a ``sparse_fixed`` or ``singleton`` axis does not need hold coordinate ``length`` and value zero.
    * A matrix for four axes (rows of blocks, columns of blocks, row in block, column in block) is cut into blocks.
    * Leading axes of length 1 that the argument lacks are added.

    Parameters
    ----------
    value : sparse object
        See `is_sparse`.
    levels : sequence of Level
        The buffer's axes in subscript order.
    name : str
        The argument, for messages.
    dtype : str
        What the values must be.
    check : bool
        False trusts the argument to be sound, sorted and free of duplicates where its layout is the buffer's.

    Returns
    -------
    Stored

    Raises
    ------
    ArgumentTypeError
        When the class or the dtype is not supported.
    ArgumentError
        When the shape does not fit the axes.
    StructureError
        When the index arrays are broken or the entries do not fit the axes.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> csr = sp.csr_array(np.array([[0, 1.0], [2.0, 3.0]]))
    >>> levels = [Level("I", "dense_fixed"), Level("J", "sparse_fixed", 0)]
    >>> stored = store(csr, levels, name="A", dtype="float64")
    >>> stored.values.tolist(), stored.indices[1].tolist(), stored.widths
    ([1.0, 0.0, 2.0, 3.0], [1, 2, 0, 1], {1: 2})
    """
    source = _open(value, name)
    check_dtype(source.values.dtype, dtype, name=name, torch=_is_torch(value))
    if check:
        source.check(name)
    fit = _fit(source, levels, name)
    return _borrow(source, levels, fit, name, check) or _convert(source, levels, fit, name)


def restore(stored: Stored, values: Array, *, copy_structure: bool = True) -> Any:
    """An object of the class and structure of the stored argument, holding new values.

    Parameters
    ----------
    stored : Stored
        What `store` returned.
    values : ndarray
        Laid out like ``stored.values``; any dtype. Used without a copy when the layout was the argument's own.
    copy_structure : bool
        False shares the index arrays with the argument, so that changing one in place breaks the other.

    Returns
    -------
    object
        Has the argument's entries in the argument's order; of entries with the same coordinates that were added up,
        the first holds the value and the others zero.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> csc = sp.csc_array(np.array([[0, 1.0], [2.0, 3.0]]))
    >>> levels = [Level("I", "dense_fixed"), Level("J", "sparse_variable", 0)]
    >>> stored = store(csc, levels, name="A", dtype="float64")
    >>> twice = restore(stored, 2 * stored.values)
    >>> type(twice).__name__, twice.toarray().tolist()
    ('csc_array', [[0.0, 2.0], [4.0, 6.0]])
    """
    if values.size != stored.values.size:
        raise ArgumentError(f"expected {stored.values.size} values, as many as were stored, found {values.size}")
    entries = values.reshape(-1)
    if stored.slots is not None:
        entries = entries[stored.slots]
    if stored.repeats is not None:
        entries[stored.repeats] = 0
    return stored.source.rebuild(entries.reshape(stored.source.values.shape), copy_structure)


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # numpy puts it together anew each time, which takes microseconds


def check_dtype(found: np.dtype[Any], expected: str, *, name: str, torch: bool = False) -> None:
    """Raise `ArgumentTypeError` unless values of dtype `found` are what a kernel computes in."""
    held = _dtype_name(found)
    if held == expected:
        return
    cast = f"{name}.to(torch.{expected})" if torch else f"{name}.astype({expected!r})"
    remedy = f"pass {cast} or build the program with dtype={held!r}" if held in DTYPES else f"pass {cast}"
    raise ArgumentTypeError(f"{name} holds {held} but the kernel computes in {expected}: {remedy}")


# Structure of raw arrays


def check_level(
    level: Level,
    indptr: Array | None,
    indices: Array | None,
    *,
    parent_count: int,
    length: int | None,
    name: str,
    need_sorted: bool,
    count: int | None = None,
) -> None:
    """Raise `StructureError` unless the arrays of one axis are what its kind promises.

    Parameters
    ----------
    level : Level
        The axis.
    indptr, indices : ndarray or None
        Its arrays; None skips what concerns them.
    parent_count : int
        Number of positions of the parent axis (1 for a root).
    length : int or None
        Dense length; None skips the range of the indices.
    name : str
        The argument, for messages.
    need_sorted : bool
        Whether every fiber must be in order, strictly if ``level.unique``.
    count : int or None
        Number of stored values, for an axis without indices.
    """
    where = f"axis {level.name} of {name}"
    if indptr is not None:
        _check_integers(indptr, f"indptr of {where}")
        _check_indptr(indptr, parent_count, count if indices is None else indices.size, where)
    if indices is None:
        return
    indices = indices.reshape(-1)
    _check_integers(indices, f"indices of {where}")
    starts: Array | int | None = indptr
    if level.kind != "sparse_variable":
        starts = _check_count(level, indices.size, parent_count, where)
    elif length is not None:
        _check_range(indices, length, where)
    if need_sorted and starts is not None and level.kind != "singleton":
        _check_sorted(level, indices, starts, length, where)


def _check_integers(array: Array, what: str) -> None:
    if array.dtype.kind not in "iu":
        raise StructureError(f"{what} must be int32 or int64, found {array.dtype}")


def _check_indptr(indptr: Array, parent_count: int, count: int | None, where: str) -> None:
    if indptr.shape != (parent_count + 1,):
        expected = f"{parent_count + 1}, one more than the {parent_count} positions above it"
        raise StructureError(f"indptr of {where} has shape {indptr.shape}, expected length {expected}")
    if indptr[0] != 0:
        raise StructureError(f"indptr of {where} starts at {indptr[0]}, expected 0")
    bad = _first_disorder(indptr, None, strict=False)
    if bad is not None:
        raise StructureError(
            f"indptr of {where} decreases at row {bad - 1}: {indptr[bad - 1]} is followed by {indptr[bad]}"
        )
    if count is not None and indptr[-1] != count:
        raise StructureError(f"indptr of {where} ends at {indptr[-1]} but there are {count} stored entries")


def _check_count(level: Level, size: int, parent_count: int, where: str) -> int:
    """Slots per fiber of an axis whose fibers are all as long, after a look at the number of indices."""
    width = 1 if level.kind == "singleton" else level.width
    if width is None:
        width = size // max(parent_count, 1)
    if size != parent_count * width:
        expected = f"{width} for each of the {parent_count} positions above it"
        raise StructureError(f"indices of {where} have {size} entries, expected {expected}")
    return width


def _check_range(indices: Array, length: int, where: str) -> None:
    bad = _first_outside(indices, length)
    if bad is not None:
        raise StructureError(f"indices of {where} hold {indices[bad]} at position {bad}, expected one of [0, {length})")


def _check_sorted(level: Level, indices: Array, starts: Array | int, length: int | None, where: str) -> None:
    padding_from = None if level.kind == "sparse_variable" else length
    bad = _first_disorder(indices, starts, strict=level.unique, padding_from=padding_from)
    if bad is None:
        return
    row = bad // starts if isinstance(starts, int) else int(np.searchsorted(starts, bad, side="right")) - 1
    if indices[bad] == indices[bad - 1]:
        found = f"hold coordinate {indices[bad]} twice in row {row} (positions {bad - 1} and {bad})"
        raise StructureError(f"indices of {where} {found}: add the entries up or declare the axis with unique=False")
    found = f"are not sorted in row {row}: {indices[bad - 1]} is followed by {indices[bad]} at position {bad}"
    remedy = "sort the row or declare the axis with sorted=False"
    if padding_from is not None:
        remedy += f"; padding at the end of a row must be {length}"
    raise StructureError(f"indices of {where} {found}: {remedy}")


def _first_outside(indices: Array, length: int) -> int | None:
    """Position of the first index not in ``[0, length)``."""
    if indices.size == 0:
        return None
    if indices.dtype.kind == "i":  # read as unsigned, a negative number is a huge one: a single pass finds both
        indices = indices.view(indices.dtype.str.replace("i", "u"))
    if int(indices.max()) < length:
        return None
    return int(np.argmax(indices >= length))


def _first_disorder(
    array: Array, starts: Array | int | None, *, strict: bool, padding_from: int | None = None
) -> int | None:
    """First position whose element is less than the one before it in the same fiber, or equal to it if `strict`.

    `starts` are the positions at which fibers begin, or the size of all fibers, or None for a single fiber.
    Elements outside ``[0, padding_from)`` may repeat.
    """
    compare = np.less_equal if strict else np.less
    for begin in range(1, array.size, CHUNK):
        stop = min(begin + CHUNK, array.size)
        now, before = array[begin:stop], array[begin - 1 : stop - 1]
        bad = compare(now, before)
        if isinstance(starts, int):
            bad[-begin % max(starts, 1) :: max(starts, 1)] = False
        elif starts is not None:
            # the needle has the haystack's dtype, or numpy converts the haystack for every chunk
            low, high = np.searchsorted(starts, np.array([begin, stop], starts.dtype))
            bad[starts[low:high] - begin] = False
        if bad.any() and padding_from is not None:
            bad &= (now != before) | ((now >= 0) & (now < padding_from))
        if bad.any():
            return begin + int(bad.argmax())
    return None


# Dense arguments


def aligned_contiguous(x: Any, dtype: str | None = None, *, name: str = "the argument") -> tuple[Array, bool]:
    """A dense argument as a C-contiguous, aligned numpy array in native byte order.

    Parameters
    ----------
    x : array
        numpy of any strides, a torch tensor in host memory, or anything with DLPack, the buffer protocol or
        ``__array__``. Read-only arrays stay read-only.
    dtype : str, optional
        What `x` must hold.
    name : str
        The argument, for messages.

    Returns
    -------
    array : ndarray
        Shares memory with `x` if that has the layout already.
    copied : bool
        Whether it does not.

    Raises
    ------
    ArgumentTypeError
        When `x` is no array, is sparse, is not in host memory, or holds another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> array, copied = aligned_contiguous(np.ones((2, 3)).T)
    >>> array.flags.c_contiguous, copied
    (True, True)
    """
    array, copied = (x, False) if type(x) is np.ndarray else _as_numpy(x, name)
    if dtype is not None:
        check_dtype(array.dtype, dtype, name=name, torch=_is_torch(x))
    if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
        return array, copied
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True), True


def writable_alias(array: Array) -> Array:
    """The memory of a read-only array as a writable one: DLPack refuses to hand out read-only arrays.

    Only for consumers that do not write.
    """
    return array if array.flags.writeable else np.asarray(_Alias(array)).view(array.dtype)


class _Alias:
    def __init__(self, array: Array) -> None:
        self.owner = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def to_torch(array: Array) -> Any:
    """A torch tensor that shares the array's memory; bfloat16 included."""
    torch = importlib.import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_numpy(x: Any, name: str) -> tuple[Array, bool]:
    """Any array-like object as numpy, and whether that took a copy."""
    if is_sparse(x):
        raise ArgumentTypeError(
            f"{name} is sparse ({type(x).__name__}) but the kernel takes it dense: pass it as an array"
        )
    if isinstance(x, np.ndarray):
        return np.asarray(x), False
    if _is_torch(x):
        return _torch_to_numpy(x, name), False
    if hasattr(x, "__dlpack__"):
        return _dlpack_to_numpy(x, name)
    try:
        return np.asarray(memoryview(x)), False
    except TypeError:
        pass
    if hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return np.asarray(x), True
    raise ArgumentTypeError(f"{name} must be an array, found {type(x).__name__}: pass numpy.asarray of it with a dtype")


def _dlpack_to_numpy(x: Any, name: str) -> tuple[Array, bool]:
    if x.__dlpack_device__()[0] not in HOST_DEVICES:
        raise ArgumentTypeError(f"{name} is not in host memory, where kernels run: copy it to the cpu first")
    try:
        return np.from_dlpack(x), False
    except (RuntimeError, BufferError, TypeError):  # numpy imports no bfloat16
        return x.numpy(), True


# Opening arguments


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _is_listed(value: Any) -> bool:
    """Whether the object says values and shape beside coords, and not by methods."""
    return isinstance(getattr(value, "values", None), np.ndarray) and isinstance(getattr(value, "shape", None), tuple)


def _open(value: Any, name: str) -> Source:
    if sp.issparse(value):
        return _open_scipy(value)
    if not is_sparse(value):
        expected = "a scipy.sparse array, a torch sparse tensor, or an object with coords, values and shape"
        raise ArgumentTypeError(f"{name} must be {expected}; found {type(value).__name__}")
    if _is_torch(value):
        return _open_torch(value, name)
    if len(value.coords) != len(value.shape) or any(len(c) != len(value.values) for c in value.coords):
        raise StructureError(f"{name} needs coords [order, nnz], values [nnz] and one extent per dimension")
    return Coordinates(tuple(value.shape), value.values, _rebuild_listed(value), tuple(value.coords))


def _rebuild_listed(value: Any) -> Callable[[Array, bool], Any]:
    def rebuild(values: Array, copy_structure: bool) -> Any:
        coords = np.array(value.coords) if copy_structure else value.coords
        if isinstance(value, CooTensor):
            return CooTensor(coords, values, value.shape)
        if hasattr(value, "with_values"):
            return value.with_values(values)
        return CooTensor(coords, values, value.shape)

    return rebuild


def _open_scipy(value: Any) -> Source:
    if value.format == "dia":
        return _open_dia(value)
    if value.format == "coo":
        return Coordinates(value.shape, value.data, _rebuild_scipy(value), tuple(value.coords))
    if value.format in ("lil", "dok"):
        coo = value.tocoo()
        return Coordinates(value.shape, coo.data, _rebuild_listing(type(value), coo), tuple(coo.coords))
    value = _without_reserve(value)
    if value.ndim == 1:
        return Coordinates(value.shape, value.data, _rebuild_scipy(value), (value.indices,))
    major = int(value.format == "csc")
    return Compressed(value.shape, value.data, _rebuild_scipy(value), value.indptr, value.indices, major)


def _without_reserve(value: Any) -> Any:
    """scipy lets data and indices be longer than the last indptr says."""
    nnz = int(value.indptr[-1]) if len(value.indptr) else 0
    if not 0 <= nnz < min(len(value.data), len(value.indices)):
        return value
    value = copy.copy(value)
    value.data, value.indices = value.data[:nnz], value.indices[:nnz]
    return value


def _rebuild_scipy(value: Any) -> Callable[[Array, bool], Any]:
    template = copy.copy(value)  # shallow: the user may give the original other arrays later

    def rebuild(values: Array, copy_structure: bool) -> Any:
        result = copy.copy(template)
        result.data = values
        if not copy_structure:
            return result
        for part in ("indptr", "indices", "offsets"):
            if part in vars(template):
                setattr(result, part, getattr(template, part).copy())
        if result.format == "coo":
            result.coords = tuple(c.copy() for c in template.coords)
        return result

    return rebuild


def _rebuild_listing(kind: type, coo: Any) -> Callable[[Array, bool], Any]:
    return lambda values, _: kind(sp.coo_array((values, coo.coords), shape=coo.shape))


def _open_dia(value: Any) -> Source:
    rows, cols = value.shape
    j = np.arange(value.data.shape[1])
    i = j - value.offsets[:, None]
    held = (i >= 0) & (i < rows) & (j < cols)
    rebuild_dia = _rebuild_scipy(value)

    def rebuild(values: Array, copy_structure: bool) -> Any:
        data = np.zeros(held.shape, values.dtype)
        data[held] = values
        return rebuild_dia(data, copy_structure)

    indices = (i[held], np.broadcast_to(j, held.shape)[held])
    return Coordinates(value.shape, value.data[held], rebuild, indices)


def _torch_to_numpy(tensor: Any, name: str) -> Array:
    if tensor.device.type != "cpu":
        raise ArgumentTypeError(f"{name} is on {tensor.device}, kernels run on the cpu: pass {name}.cpu()")
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        torch, ml_dtypes = importlib.import_module("torch"), importlib.import_module("ml_dtypes")
        return np.asarray(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.asarray(tensor.resolve_conj().resolve_neg())


def _open_torch(tensor: Any, name: str) -> Source:
    tensor = tensor.detach()
    layout = str(tensor.layout).removeprefix("torch.sparse_")
    if layout == "coo":
        return _open_torch_coo(tensor, name)
    by_row = layout in ("csr", "bsr")
    parts = (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    values = _torch_to_numpy(tensor.values(), name)
    if tensor.ndim != 2 or values.ndim != (1 if layout in ("csr", "csc") else 3):
        shape = tuple(tensor.shape)
        raise ArgumentTypeError(
            f"{name} is a batched {layout} tensor of shape {shape}: pass one matrix, or a COO tensor"
        )
    indptr, indices = (_torch_to_numpy(p, name) for p in parts)
    return Compressed(
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
    where, values = tensor._indices(), _torch_to_numpy(tensor._values(), name)

    def rebuild(new: Array, copy_structure: bool) -> Any:
        make = importlib.import_module("torch").sparse_coo_tensor
        options = {"is_coalesced": tensor.is_coalesced(), "check_invariants": False}
        return make(where.clone() if copy_structure else where, to_torch(new), tensor.shape, **options)

    return Coordinates(tuple(tensor.shape), values, rebuild, _with_inner(_torch_to_numpy(where, name), values))


def _with_inner(indices: Array, values: Array) -> tuple[Array, ...]:
    """Coordinates of every number in a hybrid tensor, whose entries are dense blocks."""
    if values.ndim == 1:
        return tuple(indices)
    inner = np.indices(values.shape[1:]).reshape(values.ndim - 1, -1)
    return (*np.repeat(indices, inner.shape[1], axis=1), *np.tile(inner, len(values)))


# Fitting an argument to a buffer


@dataclass(frozen=True)
class Fit:
    """The shape of an argument in the buffer's axes; ``blocks`` if it was cut into blocks for that."""

    shape: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    def coords(self, source: Source) -> tuple[Array, ...]:
        """Coordinates of the entries in the buffer's axes."""
        coords = source.coords()
        if self.blocks:
            (i, j), (rows, cols) = coords, self.blocks
            return i // rows, j // cols, i % rows, j % cols
        missing = len(self.shape) - len(coords)
        return (np.zeros(source.values.size, np.int32),) * missing + coords


def _fit(source: Source, levels: Sequence[Level], name: str) -> Fit:
    missing = len(levels) - len(source.shape)
    if missing == 0:
        fit = Fit(source.shape)
    elif _is_blocked(source, levels):
        fit = _fit_blocks(source, levels, name)
    elif missing > 0 and all(level.length in (None, 1) for level in levels[:missing]):
        fit = Fit((1,) * missing + source.shape)
    else:
        axes = ", ".join(level.name for level in levels)
        raise ArgumentError(f"{name} has shape {source.shape} but the buffer has {len(levels)} axes ({axes})")
    for level, extent in zip(levels, fit.shape, strict=True):
        if level.length is not None and level.length != extent:
            raise ArgumentError(f"axis {level.name} has length {level.length} but {name} has {extent} there")
    return fit


def _is_blocked(source: Source, levels: Sequence[Level]) -> bool:
    if len(source.shape) != 2 or len(levels) != 4 or all(level.length == 1 for level in levels[:2]):
        return False
    return all(level.kind == "dense_fixed" for level in levels[2:])


def _fit_blocks(source: Source, levels: Sequence[Level], name: str) -> Fit:
    blocks = tuple(
        b if level.length is None else level.length for level, b in zip(levels[2:], source.block or (0, 0), strict=True)
    )
    if 0 in blocks:
        axes = " and ".join(level.name for level in levels[2:])
        raise ArgumentError(
            f"the block size of {name} is not known: pass {name}.tobsr((rows, columns)) or the lengths of {axes}"
        )
    if any(n % b for n, b in zip(source.shape, blocks, strict=True)):
        padded = " x ".join(str(-(-n // b) * b) for n, b in zip(source.shape, blocks, strict=True))
        shape, block = (" x ".join(map(str, s)) for s in (source.shape, blocks))
        raise ArgumentError(f"{name} is {shape}, which blocks of {block} do not divide: pad it to {padded}")
    return Fit((*(n // b for n, b in zip(source.shape, blocks, strict=True)), *blocks), blocks)


def _trees(levels: Sequence[Level]) -> list[tuple[int, ...]]:
    """The levels of each axes tree, root first, in the order of the trees' first appearance."""
    groups: dict[int, dict[int, int]] = {}
    for d in range(len(levels)):
        root, depth = d, 0
        while (parent := levels[root].parent) is not None:
            root, depth = parent, depth + 1
        groups.setdefault(root, {})[d] = depth
    return [tuple(sorted(group, key=group.__getitem__)) for group in groups.values()]


def _borrow(source: Source, levels: Sequence[Level], fit: Fit, name: str, check: bool) -> Stored | None:
    """The argument's own arrays, if its layout is the buffer's."""
    if isinstance(source, Compressed):
        return _borrow_compressed(source, levels, fit, name, check)
    if isinstance(source, Coordinates):
        return _borrow_coordinates(source, levels, fit, name, check)
    return None


def _borrow_compressed(source: Compressed, levels: Sequence[Level], fit: Fit, name: str, check: bool) -> Stored | None:
    minor = 1 - source.major
    trees = [(source.major, minor), *((d,) for d in range(2, 2 + len(source.block)))]
    kinds = [levels[d].kind for tree in trees for d in tree if d < len(levels)]
    if fit.blocks != source.block or _trees(levels) != trees or kinds[1] != "sparse_variable":
        return None
    if kinds.count("dense_fixed") != len(levels) - 1:
        return None
    if check and not _in_order(levels[minor], source.indices, source.indptr):
        return None
    indptr = _narrow(source.indptr, levels[minor], "indptr", name)
    indices = _narrow(source.indices, levels[minor], "indices", name)
    values = aligned_contiguous(source.values)[0]
    return Stored(values, {minor: indptr}, {minor: indices}, dict(enumerate(fit.shape)), {}, source)


def _borrow_coordinates(
    source: Coordinates, levels: Sequence[Level], fit: Fit, name: str, check: bool
) -> Stored | None:
    chain, *others = _trees(levels)
    kinds = ["sparse_variable"] + ["singleton"] * (len(levels) - 1)
    if others or len(source.indices) != len(levels) or [levels[d].kind for d in chain] != kinds:
        return None
    if any(level.rule is not None for level in levels) or source.block:
        return None
    root = chain[0]
    if check and not _in_order(levels[root], source.indices[root], None):
        return None
    indptr = np.array([0, len(source.values)])
    indices = {d: _narrow(source.indices[d], levels[d], "indices", name) for d in chain}
    values = aligned_contiguous(source.values)[0]
    return Stored(
        values, {root: _narrow(indptr, levels[root], "indptr", name)}, indices, dict(enumerate(fit.shape)), {}, source
    )


def _in_order(level: Level, indices: Array, starts: Array | None) -> bool:
    if not level.sorted and not level.unique:
        return True
    return _first_disorder(indices, starts, strict=level.unique) is None


def _narrow(array: Array, level: Level, what: str, name: str) -> Array:
    """`array` in the axis' index type, the same object if it has that type already."""
    if array.dtype != level.idtype:
        _check_capacity(int(array.max(initial=0)), level, what, name)
    return np.require(array, level.idtype, ["C", "A"])


def _check_capacity(top: int, level: Level, what: str, name: str) -> None:
    if top > np.iinfo(level.idtype).max:
        found = f"{what} of axis {level.name} of {name} reaches {top}, which {level.idtype} cannot hold"
        raise StructureError(f'{found}: declare the axis with idtype="int64"')


# Conversion through sorted coordinates


def _convert(source: Source, levels: Sequence[Level], fit: Fit, name: str) -> Stored:
    """The argument's entries placed in newly built arrays."""
    builder = Builder(levels, fit.shape, name)
    coords, trees = fit.coords(source), _trees(levels)
    keep = len(trees) == 1 and not all(level.unique for level in levels)
    slots, counts = np.zeros(source.values.size, np.int64), []
    for chain in trees:
        positions, count = builder.tree(chain, [coords[d] for d in chain], keep)
        slots = slots * count + positions
        counts.append(count)
    values, repeats = _scatter(slots, source.values.reshape(-1), math.prod(counts))
    lengths = dict(enumerate(fit.shape))
    values = values.reshape(counts)
    return Stored(values, builder.indptr, builder.indices, lengths, builder.widths, source, slots, repeats)


def _scatter(slots: Array, values: Array, size: int) -> tuple[Array, Array | None]:
    """`size` values with `values` added in at `slots`, and which of them met an earlier one."""
    flat, taken = np.zeros(size, values.dtype.newbyteorder("=")), np.zeros(size, np.bool_)
    taken[slots] = True
    if np.count_nonzero(taken) == slots.size:
        flat[slots] = values
        return flat, None
    order = np.argsort(slots, kind="stable")
    first = _changes([slots[order]])
    flat[slots[order[first]]] = np.add.reduceat(values[order], np.flatnonzero(first)).astype(values.dtype)
    return flat, order[~first]


def _changes(arrays: Iterable[Array]) -> Array:
    """Where an element of sorted tuples differs from the one before."""
    arrays = list(arrays)
    first = np.zeros(len(arrays[0]), np.bool_)
    first[:1] = True
    for array in arrays:
        first[1:] |= array[1:] != array[:-1]
    return first


def _sorting_order(coords: Sequence[Array], extents: Sequence[int]) -> Array | None:
    """The stable permutation that sorts the coordinate tuples, None if they are sorted."""
    if _are_sorted(coords):
        return None
    order = np.arange(len(coords[0]))
    for index, extent in zip(reversed(coords), reversed(extents), strict=True):
        key = index[order]
        if _first_disorder(key, None, strict=False) is not None:
            order = order[_stable_argsort(key, extent)]
    return order


def _unsorted(array: Array, order: Array) -> Array:
    """The array that indexing with `order` made into `array`."""
    result = np.empty_like(array)
    result[order] = array
    return result


def _are_sorted(coords: Sequence[Array]) -> bool:
    tied = np.ones(max(len(coords[0]) - 1, 0), np.bool_)
    for index in coords:
        if np.any(tied & (index[1:] < index[:-1])):
            return False
        tied &= index[1:] == index[:-1]
    return True


def _stable_argsort(key: Array, extent: int) -> Array:
    if key.size < 1 << 12 or extent > 4 * key.size:
        return np.argsort(key, kind="stable")
    # one row turned into columns: scipy transposes by counting, several times faster than a comparison sort
    row = sp.csr_array((np.arange(key.size), key, np.array([0, key.size])), shape=(1, extent))
    return np.asarray(row.tocsc().data)


@dataclass
class Builder:
    """Builds the index arrays of a buffer's axes from coordinates, one tree after the other."""

    levels: Sequence[Level]
    shape: tuple[int, ...]
    name: str
    indptr: dict[int, Array] = field(default_factory=dict)
    indices: dict[int, Array] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)

    def tree(self, chain: Sequence[int], coords: Sequence[Array], keep: bool) -> tuple[Array, int]:
        """Position of every entry in the last axis of `chain`, and the number of positions there are.

        Parameters
        ----------
        chain : sequence of int
            Levels of the tree, root first.
        coords : sequence of ndarray
            Coordinates of the entries in these levels.
        keep : bool
            Whether entries with the same coordinates keep their own positions.
        """
        if len(chain) == 1 and self.levels[chain[0]].kind == "dense_fixed":
            return coords[0], self.shape[chain[0]]
        order = _sorting_order(coords, [self.shape[d] for d in chain])
        coords = [(c if order is None else c[order]).astype(np.int64, copy=False) for c in coords]
        first = np.ones(len(coords[0]), np.bool_) if keep else _changes(coords)
        placed, count = self.place(chain, [c[first] for c in coords])
        placed = placed[np.cumsum(first) - 1]
        return placed if order is None else _unsorted(placed, order), count

    def place(self, chain: Sequence[int], coords: list[Array]) -> tuple[Array, int]:
        """`tree` for tuples that are sorted and, unless kept, distinct."""
        position, count = np.zeros(len(coords[0]), np.int64), 1
        back = None
        for depth, d in enumerate(chain):
            if _first_disorder(position, None, strict=False) is not None:  # a formula may place slots in any order
                order = np.argsort(position, kind="stable")
                position, coords = position[order], [c[order] for c in coords]
                back = order if back is None else back[order]
            step: Callable[..., tuple[Array, int]] = getattr(self, self.levels[d].kind)
            position, count = step(d, position, count, coords[: depth + 1])
            _check_capacity(count, self.levels[d], "the number of positions", self.name)
        return position if back is None else _unsorted(position, back), count

    def dense_fixed(self, d: int, _: Array, __: int, coords: list[Array]) -> tuple[Array, int]:
        return coords[-1], self.shape[d]

    def dense_variable(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        extents = np.zeros(count, np.int64)
        np.maximum.at(extents, position, coords[-1] + 1)
        indptr = np.concatenate([[0], np.cumsum(extents)])
        self.indptr[d] = _narrow(indptr, self.levels[d], "indptr", self.name)
        return indptr[position] + coords[-1], int(indptr[-1])

    def dense_implicit(self, d: int, _: Array, __: int, coords: list[Array]) -> tuple[Array, int]:
        level, above = self.levels[d], coords[:-1]
        assert level.extent_rule is not None
        assert level.offset_rule is not None
        self._require(coords[-1] < level.extent_rule(*above), d, coords)
        parent = () if level.parent is None else (np.arange(self.shape[level.parent]),)
        if level.parent is not None and self.levels[level.parent].kind != "dense_fixed":
            found = f"its parent {self.levels[level.parent].name} is {self.levels[level.parent].kind}"
            raise ArgumentError(
                f"{self.name} cannot be converted for axis {level.name}, {found}: pass its arrays by name"
            )
        ends = np.asarray(level.offset_rule(*parent) + level.extent_rule(*parent))
        return level.offset_rule(*above) + coords[-1], int(ends.max(initial=0))

    def sparse_variable(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        parents, held, node = self._nodes(position, coords[-1], self.levels[d].unique)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(parents, minlength=count))])
        self.indptr[d] = _narrow(indptr, self.levels[d], "indptr", self.name)
        self.indices[d] = _narrow(held, self.levels[d], "indices", self.name)
        return node, len(held)

    def sparse_fixed(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        if self.levels[d].rule is not None:
            return self._by_rule(d, position, count, coords)
        parents, held, node = self._nodes(position, coords[-1], self.levels[d].unique)
        sizes = np.bincount(parents, minlength=count)
        width = self._width(d, sizes)
        rank = np.arange(len(held)) - (np.cumsum(sizes) - sizes)[parents]
        self.widths[d] = width
        self._fill(d, count * width, parents * width + rank, held)
        return (parents * width + rank)[node], count * width

    def singleton(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        if self.levels[d].rule is not None:
            return self._by_rule(d, position, count, coords)
        parents, held, _ = self._nodes(position, coords[-1], True)
        bad = _first_disorder(parents, None, strict=True)
        if bad is not None:
            found = f"{held[bad - 1]} and {held[bad]} below the same position {parents[bad]}"
            raise StructureError(
                f"axis {self.levels[d].name} of {self.name} is a singleton but would hold coordinates {found}"
            )
        self._fill(d, count, parents, held)
        return position, count

    def _nodes(self, position: Array, index: Array, unique: bool) -> tuple[Array, Array, Array]:
        """Parent position and coordinate of each stored position, and the stored position of each tuple."""
        first = _changes([position, index]) if unique else np.ones(len(index), np.bool_)
        return position[first], index[first], np.cumsum(first) - 1

    def _fill(self, d: int, count: int, slots: Array, held: Array) -> None:
        """Indices that mark a slot absent, by the first coordinate out of range, unless it holds something."""
        indices = np.full(count, self.shape[d], np.int64)
        indices[slots] = held
        self.indices[d] = _narrow(indices, self.levels[d], "indices", self.name)

    def _width(self, d: int, sizes: Array) -> int:
        level, longest = self.levels[d], int(sizes.max(initial=0))
        if level.width is None:
            return max(longest, 1)
        if longest > level.width:
            found = f"row {int(sizes.argmax())} of {self.name} holds {longest} entries"
            raise StructureError(
                f"{found} but axis {level.name} has {level.width} slots per row: raise its width or leave it open"
            )
        return level.width

    def _by_rule(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        """Slots found by trying each on all entries at once."""
        level, width = self.levels[d], 1
        assert level.rule is not None
        if level.kind == "sparse_fixed":
            if level.width is None:
                axis = f"axis {level.name}, whose indices are a formula"
                raise ArgumentError(f"{self.name} needs the width of {axis}: pass that size by name")
            width = self.widths[d] = level.width
        slot = np.full(len(position), -1)
        for s in reversed(range(width)):
            slot[level.rule(*coords[:-1], s) == coords[-1]] = s
        self._require(slot >= 0, d, coords)
        return position * width + slot, count * width

    def _require(self, inside: Array, d: int, coords: list[Array]) -> None:
        inside = np.broadcast_to(inside, coords[-1].shape)
        if inside.all():
            return
        where = ", ".join(str(int(c[int(inside.argmin())])) for c in coords)
        raise StructureError(
            f"entry ({where}) of {self.name} lies outside the pattern that axis {self.levels[d].name} has by formula"
        )
