# SPDX-License-Identifier: Apache-2.0
"""Arrays: arguments as numpy arrays that fit a buffer's axes, and large ones moved and sorted in linear time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from os import PathLike
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop.levels import HOST_DEVICES, Array, Level, check_dtype, first_disorder
from sparsetir.interop.sources import Source, is_sparse, is_torch, open_source, torch_to_numpy

# How the dimensions of an argument meet the axes of a buffer.


@dataclass(frozen=True)
class Fit:
    """The shape of an argument in the buffer's axes; ``blocks`` if it was cut into blocks for that."""

    shape: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    def coords(self, source: Source) -> tuple[Array, ...]:
        """Return the coordinates of the entries in the buffer's axes."""
        coords = source.coords()
        if self.blocks:
            (i, j), (rows, cols) = coords, self.blocks
            return i // rows, j // cols, i % rows, j % cols
        missing = len(self.shape) - len(coords)
        return (np.zeros(source.values.size, np.int32),) * missing + coords


def fit_axes(source: Source, levels: Sequence[Level], name: str) -> Fit:
    missing = len(levels) - len(source.shape)
    if missing == 0:
        fit = Fit(source.shape)
    elif _is_blocked(source, levels):
        fit = _fit_blocks(source, levels, name)
    elif missing > 0 and all(level.length == 1 for level in levels[:missing]):
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


def tree_indices(levels: Sequence[Level]) -> list[tuple[int, ...]]:
    """Return the levels of each axes tree, root first, in the order of the trees' first appearance."""
    groups: dict[int, dict[int, int]] = {}
    for d in range(len(levels)):
        root, depth = d, 0
        while (parent := levels[root].parent) is not None:
            root, depth = parent, depth + 1
        groups.setdefault(root, {})[d] = depth
    return [tuple(sorted(group, key=group.__getitem__)) for group in groups.values()]


# scipy's objects around arrays as they are. scipy computes with no floats of 16 bits, but its objects hold them.


HALVES = ("float16", "bfloat16")


def is_half(value: Any) -> bool:
    """Return whether a scipy object holds floats of 16 bits, which scipy itself neither converts nor multiplies."""
    return value.dtype.name in HALVES


@cache
def _empty(kind: Any) -> Any:
    return kind((1, 1), dtype=np.int8)


@cache
def _empty_sorted(kind: Any) -> Any:
    empty = kind((1, 1), dtype=np.int8)
    empty.has_canonical_format = True
    return empty


def compressed_of(kind: Any, indptr: Array, indices: Array, values: Array, shape: Sequence[int]) -> Any:
    """Return a scipy object of rows or columns around its arrays, without scipy's checks."""
    container = kind.__new__(kind)  # a constructor takes longer than the sum of two small matrices
    container.__dict__.update(_empty(kind).__dict__)
    container._shape = tuple(map(int, shape))
    container.indptr, container.indices, container.data = indptr, indices, values
    return container


def sorted_rows(kind: Any, indptr: Array, indices: Array, values: Array, shape: Sequence[int]) -> Any:
    """Return a scipy object of compressed rows, each of which is sorted and has every coordinate once."""
    container = kind.__new__(kind)
    container.__dict__.update(_empty_sorted(kind).__dict__)
    container._shape = tuple(map(int, shape))
    container.indptr, container.indices, container.data = indptr, indices, values
    return container


def coordinates_of(coords: Sequence[Array], values: Array, shape: Sequence[int]) -> sp.coo_array:
    """Return a scipy list of coordinates around its arrays, without scipy's checks."""
    container = sp.coo_array(tuple(shape), dtype=np.int8)
    container.coords, container.data = tuple(coords), values
    return container


MOST_PER_ENTRY = 8  # elements of a matrix by diagonals for each entry


def _diagonals(value: Any) -> int:
    """Return on how many diagonals the entries of a matrix lie."""
    listed = value.tocoo(copy=False)
    numbers = listed.col.astype(np.int64) - listed.row + value.shape[0]
    return int(np.count_nonzero(np.bincount(numbers, minlength=1)))


def in_format(value: Any, format: str, block: tuple[int, int] | None = None) -> Any:
    """Convert a scipy object with distinct coordinates to another of scipy's formats.

    Lists of lists and dictionaries hold no floats of 16 bits: those come in rows. So do entries on so many diagonals
    that a matrix by diagonals would be `MOST_PER_ENTRY` times as large.
    """
    if is_half(value):
        return value if format in ("lil", "dok") else _by_words(value, lambda words: in_format(words, format, block))
    if format == "dia" and _diagonals(value) * value.shape[1] > MOST_PER_ENTRY * (value.nnz + value.shape[1]):
        return value.tocsr()
    converted = value.asformat(format) if block is None else value.tobsr(blocksize=block)
    if block is not None:
        converted.sort_indices()  # scipy stores blocks in the order of their first entries
    return converted


def transposed(value: Any, order: Sequence[int]) -> Any:
    """Permute the dimensions of a scipy object.

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
    """Apply `make` to a scipy object of 16-bit floats without reading its values."""
    words = copy.copy(value)
    words.data = value.data.view(np.uint16)
    converted = make(words)
    converted.data = converted.data.view(value.dtype)
    return converted


def recast(value: Any, dtype: Any) -> Any:
    """Convert the values of a scipy object to another dtype; lists of lists and dictionaries hold no 16-bit floats."""
    if np.dtype(dtype).name not in HALVES:
        return value.astype(dtype)
    converted = copy.copy(value if value.format not in ("lil", "dok") else value.tocsr())
    converted.data = converted.data.astype(dtype)
    return converted


# Dense arguments as numpy arrays.


def aligned_contiguous(
    x: Any, dtype: str | None = None, *, name: str = "the argument", option: str = "dtype"
) -> tuple[Array, bool]:
    """Convert a dense argument to a C-contiguous, aligned numpy array in native byte order.

    Parameters
    ----------
    x : array
        numpy of any strides, a torch tensor in host memory, or anything with DLPack, the buffer protocol or
        ``__array__``. Read-only arrays stay read-only.
    dtype : str, optional
        What `x` must hold.
    name : str
        The argument, for messages.
    option : str
        The argument of `sparsetir.ops` that decides `dtype`, for messages.

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
    array, copied = as_numpy(x, name)
    if dtype is not None:
        check_dtype(array.dtype, dtype, name=name, torch=is_torch(x), option=option)
    if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
        return array, copied
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True), True


def writable_alias(array: Array) -> Array:
    """Return a writable view of a read-only array: DLPack refuses to export read-only arrays.

    Only for consumers that do not write.
    """
    return array if array.flags.writeable else np.asarray(_Alias(array)).view(array.dtype)


def passable(array: Any) -> Array | None:
    """Return an array over the same memory that compiled functions take; None where its elements must be copied.

    For arguments that are read: those that are read-only, or mapped from a file, come as plain writable arrays.
    """
    if type(array) is np.memmap:
        array = array.view(np.ndarray)
    if type(array) is not np.ndarray or not (array.flags.c_contiguous and array.flags.aligned):
        return None
    return writable_alias(array)


class _Alias:
    def __init__(self, array: Array) -> None:
        self.owner = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def as_numpy(x: Any, name: str) -> tuple[Array, bool]:
    """Convert an array-like object to numpy; return also whether that may have copied it.

    Raises
    ------
    ArgumentTypeError
        When `x` is no array, has a mask, is sparse, or is not in host memory.
    """
    if type(x) is np.ndarray:
        return x, False
    if is_sparse(x):
        raise ArgumentTypeError(
            f"{name} is sparse ({type(x).__name__}) but the kernel takes it dense: pass it as an array"
        )
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name} has a mask, which kernels do not look at: pass {name}.filled(0), or another value"
        )
    if isinstance(x, np.ndarray):
        return np.asarray(x), False
    if is_torch(x):
        return torch_to_numpy(x, name), False
    if hasattr(x, "__dlpack__"):
        return _dlpack_to_numpy(x, name)
    try:
        return np.asarray(memoryview(x)), False
    except TypeError:
        pass
    return _from_protocol(x, name), True


def _from_protocol(x: Any, name: str) -> Array:
    """Return an array of an object that numpy knows how to ask for one."""
    fault = f"{name}: expected an array, got {type(x).__name__}"
    if isinstance(x, (str, PathLike)):
        raise ArgumentTypeError(f"{fault}: pass sparsetir.read(path) for a file")
    if not hasattr(x, "__array__") and not hasattr(x, "__array_interface__"):
        raise ArgumentTypeError(f"{fault}: pass numpy.asarray of it with a dtype")
    try:
        return np.asarray(x)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{fault}, which numpy cannot read: {error}") from None


def _dlpack_to_numpy(x: Any, name: str) -> tuple[Array, bool]:
    if x.__dlpack_device__()[0] not in HOST_DEVICES:
        raise ArgumentTypeError(f"{name} is not in host memory, where kernels run: copy it to the cpu first")
    try:
        return np.from_dlpack(x), False
    except (RuntimeError, BufferError, TypeError):  # numpy imports no bfloat16
        return x.numpy(), True


# Quantization to uint8.


UINT8_MAX = 255


def clipped_range(values: Array, percentile: float) -> tuple[float, float, float]:
    """Return the range of values without the largest magnitudes beyond a percentile, and the largest one within."""
    limit = float(np.percentile(np.abs(values), percentile))
    return max(float(values.min()), -limit), min(float(values.max()), limit), limit


def uint8_quantization(least: float, most: float) -> tuple[float, int]:
    """Return the scale and the zero point of a range of values."""
    scale = (most - least) / UINT8_MAX or 1.0
    return scale, round(-least / scale)


# Large arrays moved and sorted in linear time and with little additional memory.


CHUNK = 1 << 18  # elements moved at a time: numpy widens a 32-bit index to 64 bits in a copy


def take(values: Array, index: Array) -> Array:
    """Return ``values[index]`` for flat arrays and valid indices."""
    out = np.empty(len(index), values.dtype)
    for begin in range(0, len(index), CHUNK):
        part = slice(begin, begin + CHUNK)
        np.take(values, index[part], out=out[part], mode="wrap")  # the default, which checks, copies out first
    return out


def put(out: Array, index: Array | slice, values: Array) -> None:
    """Set ``out[index] = values`` for flat arrays."""
    if isinstance(index, slice):
        out[index] = values
        return
    for begin in range(0, len(index), CHUNK):
        part = slice(begin, begin + CHUNK)
        out[index[part]] = values[part]


def begins(counts: Array) -> Array:
    """Return the begin of each of several runs, and the end of the last one."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def index_array(array: Array, idtype: str) -> Array:
    """Convert `array` to the index type; return the same object if it has that type."""
    return np.require(array, idtype, ["C", "A"])


def spread(begin: Array, starts: Array, dtype: str | np.dtype[Any]) -> Array:
    """Return the positions of runs' elements: element k of run r is ``begin[r] + k - starts[r]``.

    Parameters
    ----------
    begin : ndarray of int
        The number of the first element of each run.
    starts : ndarray of int
        Where the runs begin in the result, and where the last one ends.
    dtype : str or dtype
        Of the result.
    """
    counts = np.diff(starts)
    out = np.repeat((begin - starts[:-1]).astype(dtype), counts)
    for first in range(0, len(out), CHUNK):
        part = out[first : first + CHUNK]
        part += np.arange(first, first + len(part), dtype=dtype)
    return out


def index_dtype(size: int) -> np.dtype[Any]:
    """Return the narrower dtype that numbers `size` things."""
    return np.dtype(np.int32 if size <= np.iinfo(np.int32).max else np.int64)


def counting(size: int) -> Array:
    """Return 0, 1, 2 ... in 32 bits where they suffice."""
    return np.arange(size, dtype=index_dtype(size))


def changes(arrays: Sequence[Array]) -> Array:
    """Return where an element of sorted tuples differs from the one before."""
    first = np.zeros(len(arrays[0]), np.bool_)
    first[:1] = True
    for array in arrays:
        first[1:] |= array[1:] != array[:-1]
    return first


def are_sorted(coords: Sequence[Array], *, strict: bool = False) -> bool:
    """Return whether coordinate tuples are in lexicographic order, without repetition if `strict`."""
    if len(coords) == 1:
        return first_disorder(coords[0], None, strict=strict) is None
    for begin in range(0, len(coords[0]), CHUNK):
        part = [c[begin : begin + CHUNK + 1] for c in coords]
        tied = np.ones(max(len(part[0]) - 1, 0), np.bool_)
        for index in part:
            if np.any(tied & (index[1:] < index[:-1])):
                return False
            tied &= index[1:] == index[:-1]
        if strict and tied.any():
            return False
    return True


def sorting_order(coords: Sequence[Array], extents: Sequence[int]) -> Array | None:
    """Return the stable permutation that sorts coordinate tuples, None if they are sorted.

    Parameters
    ----------
    coords : sequence of ndarray of int
        The first one weighs most.
    extents : sequence of int
        Each coordinate lies in ``[0, extent)``.
    """
    if are_sorted(coords):
        return None
    order = None
    for index, extent in zip(reversed(coords), reversed(extents), strict=True):
        key = index if order is None else take(index, order)
        if first_disorder(key, None, strict=False) is None:
            continue
        step = stable_argsort(key, extent)
        order = step if order is None else take(order, step)
    return order


def stable_argsort(key: Array, extent: int) -> Array:
    """Return the stable permutation that sorts numbers of ``[0, extent)``."""
    if key.size < 1 << 12 or extent > 4 * key.size:
        return np.argsort(key, kind="stable").astype(index_dtype(key.size))
    # one row turned into columns: scipy transposes by counting
    ends = np.array([0, key.size], index_dtype(key.size))
    row = sp.csr_array((counting(key.size), key.astype(ends.dtype, copy=False), ends), shape=(1, extent))
    return np.asarray(row.tocsc().data)


def transpose(indptr: Array, indices: Array, data: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Return a matrix by its columns instead of by its rows, each column sorted, in linear time.

    Returns
    -------
    indptr, indices, data : ndarray
        Entries of one row and column keep their order.
    """
    bits = data if data.dtype.itemsize > 8 else data.view(f"i{data.dtype.itemsize}")  # scipy moves no 16-bit floats
    columns = sp.csr_array((bits, indices, indptr), shape=shape).tocsc()
    return columns.indptr, columns.indices, columns.data.view(data.dtype)


__all__ = [
    "CHUNK",
    "are_sorted",
    "begins",
    "changes",
    "compressed_of",
    "coordinates_of",
    "counting",
    "in_format",
    "index_array",
    "index_dtype",
    "is_half",
    "put",
    "recast",
    "sorted_rows",
    "sorting_order",
    "spread",
    "stable_argsort",
    "take",
    "transpose",
    "transposed",
]
