# SPDX-License-Identifier: Apache-2.0
"""Compressed sparse matrices on disk whose rows can be read in ranges: folders of .npy, h5ad, zarr, binsparse HDF5."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentTypeError, FileFormatError, MissingFileError, SparseTIRError
from sparsetir.utils.arguments import as_path, package_of
from sparsetir.utils.imports import require

Array = np.ndarray[Any, Any]
ENCODINGS = {"csr_matrix": "csr", "csc_matrix": "csc"}
KINDS = "biuf"


@dataclass(frozen=True)
class RawArray:
    """A contiguous array at an offset of a file, read without a memory map: pages of a map count as resident."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, part: slice) -> Array:
        begin, end, _ = part.indices(self.shape[0])
        values = np.empty(max(end - begin, 0), self.dtype)
        self.read_into(values, begin)
        return values

    def read_into(self, values: Array, begin: int) -> None:
        """Read the elements from `begin` on into a contiguous array of the same dtype."""
        view: memoryview = values.view(np.uint8).data if values.size else memoryview(b"")
        offset = self.offset + begin * self.dtype.itemsize
        file = os.open(self.path, os.O_RDONLY)
        try:
            while view:
                count = os.preadv(file, [view], offset)
                if not count:
                    got = begin + (values.nbytes - len(view)) // self.dtype.itemsize
                    message = f"expected {self.shape[0]} elements, got {got}. Write the file again"
                    raise FileFormatError(f"{self.path}: {message}.")
                view, offset = view[count:], offset + count
        finally:
            os.close(file)

    @property
    def byte_count(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Buffers:
    """Memory of one block, used again for later ones: fresh pages cost more than reading into them."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def array(self, name: str, count: int, dtype: Any) -> Array:
        """Return an uninitialised vector in the memory of that name; earlier ones in it end."""
        dtype = np.dtype(dtype)
        memory = self.arrays.get(name)
        if memory is None or memory.size < count * dtype.itemsize:
            memory = self.arrays[name] = np.empty(count * dtype.itemsize, np.uint8)
        return memory[: count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Store:
    """A CSR or CSC matrix on disk. Row pointers are in memory, indices and values are read in ranges.

    Parameters
    ----------
    path, name : str
        Of the file, and of the matrix in it ("" for the only one).
    format : {"csr", "csc"}
    shape : (int, int)
    indptr : ndarray of int64
    indices, data : RawArray, h5py.Dataset or zarr.Array
    """

    path: str
    name: str
    format: str
    shape: tuple[int, int]
    indptr: Array
    indices: Any
    data: Any

    @property
    def nnz(self) -> int:
        return int(self.indptr[-1])

    @property
    def label(self) -> str:
        """The file, and the matrix in it, for messages."""
        return f"{self.path}:{self.name}" if self.name else self.path

    @property
    def lines(self) -> tuple[int, int]:
        """Compressed lines, rows of CSR or columns of CSC, and the extent of the indices."""
        return self.shape if self.format == "csr" else (self.shape[1], self.shape[0])

    @property
    def entry_bytes(self) -> int:
        return int(self.data.dtype.itemsize + self.indices.dtype.itemsize)

    def read(self, begin: int, end: int, buffers: Buffers | None = None) -> tuple[Array, Array]:
        """Return indices and values of a range of entries, one read each, in `buffers` where they are given."""
        buffers = Buffers() if buffers is None else buffers
        try:
            arrays = ("indices", self.indices), ("data", self.data)
            indices, data = [_read(array, begin, end, name, buffers) for name, array in arrays]
            return indices, data
        except SparseTIRError:
            raise
        except Exception as error:  # h5py, zarr and codecs raise classes of their own
            raise FileFormatError(f"{self.label}: entries {begin} to {end} cannot be read: {error}.") from error


def _read(array: Any, begin: int, end: int, name: str, buffers: Buffers) -> Array:
    into = getattr(array, "read_into", None) or getattr(array, "read_direct", None)
    if into is None or end <= begin or not array.dtype.isnative:  # zarr
        return np.asarray(array[begin:end])
    values = buffers.array(name, end - begin, array.dtype)
    into(values, begin if isinstance(array, RawArray) else np.s_[begin:end])
    return values


def is_open(value: Any) -> bool:
    """Return whether it is an open group of h5py or zarr, or a backed matrix of anndata; imports none of them."""
    root = package_of(value)
    return (root in ("h5py", "zarr") and hasattr(value, "keys")) or (root == "anndata" and hasattr(value, "group"))


def open_store(source: Any, name: str | None = None) -> Store:
    """Open a matrix on disk without reading its values.

    Parameters
    ----------
    source : str, Path, h5py.Group, zarr.Group or backed matrix of anndata
    name : str, optional
        Of the matrix in an h5ad or zarr file: "X", "layers/counts", "obsp/connectivities".
    """
    if not isinstance(source, (str, os.PathLike)):
        group = getattr(source, "group", source)
        if not (hasattr(group, "attrs") and hasattr(group, "keys")):
            expected = "the path of a file or an open group of h5py or zarr"
            raise ArgumentTypeError(f"path: expected {expected}, got {type(source).__name__}. Pass a path.")
        return _of_open_group(group)
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name: expected text, got {type(name).__name__}. Pass 'X' or 'layers/NAME'.")
    path, name = _split(as_path(source, "path"), name)
    if not _exists(path):
        raise MissingFileError(f"path: expected a file or folder, got {path}, which does not exist. Check the name.")
    try:
        return _opener(path)(path, name)
    except SparseTIRError:
        raise
    except Exception as error:  # h5py and zarr raise classes of their own
        raise FileFormatError(f"{path} cannot be read: {error or type(error).__name__}.") from error


def _split(path: Path, name: str | None) -> tuple[Path, str | None]:
    """Take a name apart that says which matrix of a file: ``cells.h5ad/layers/counts``."""
    file = next((parent for parent in path.parents if parent.suffix.lower() in (".h5ad", ".zarr")), None)
    if name is not None or file is None or not _exists(file):
        return path, name
    return file, path.relative_to(file).as_posix()


def _of_open_group(group: Any) -> Store:
    """Open a matrix in a group that h5py, zarr or anndata opened."""
    file = getattr(group, "file", None)
    if file is not None:
        return _anndata(group, str(file.filename), group.name.strip("/"))
    return _anndata(group, str(getattr(group.store, "root", group.store)), group.path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def is_stored(path: Path) -> bool:
    """Return whether the path has a form that `open_store` reads."""
    return (
        path.suffix.lower() in (".h5ad", ".zarr", ".h5", ".hdf5")
        or _exists(path / "indptr.npy")
        or bool(_split(path, None)[1])
    )


def _opener(path: Path) -> Callable[[Path, str | None], Store]:
    if path.suffix.lower() in (".h5ad", ".h5", ".hdf5"):
        return _open_hdf5
    if path.suffix.lower() == ".zarr":
        return _open_zarr
    if path.is_dir():
        return _open_folder
    forms = "a folder of .npy files, .h5ad, .zarr or .bsp.h5"
    raise FileFormatError(f"path: expected {forms}, got {path}. Convert it with sparsetir.save_blocks.")


# ------------------------------------------------------------------------------------------------ the forms


def raw_npy(path: Path) -> RawArray:
    """Read the header of a .npy file."""
    if not path.is_file():
        raise MissingFileError(f"{path}: expected a file, got none. A matrix has indptr, indices, data and shape.npy.")
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        with open(path, "rb") as stream:
            shape, fortran, dtype = readers[np.lib.format.read_magic(stream)](stream)
            array = RawArray(str(path), stream.tell(), shape, dtype)
    except (ValueError, KeyError) as error:
        raise FileFormatError(f"{path}: expected an array of numpy, got {error}. Write the file again.") from error
    size = path.stat().st_size - array.offset
    if dtype.hasobject or (fortran and len(shape) > 1) or size < array.byte_count:
        fault = f"{size} bytes for {shape} elements of {dtype}"
        raise FileFormatError(f"{path}: expected a complete array of numbers in C order, got {fault}. Write it again.")
    return array


def _open_folder(path: Path, name: str | None) -> Store:
    """Open a folder with the arrays of `scipy.sparse.save_npz`, unpacked."""
    folder = path / name if name else path
    arrays = {key: raw_npy(folder / f"{key}.npy") for key in ("indptr", "indices", "data", "shape")}
    format_file = folder / "format.npy"
    format = np.load(format_file).item() if format_file.is_file() else b"csr"
    format = format.decode() if isinstance(format, bytes) else str(format)
    return _checked(str(path), name or "", format, arrays["shape"][:], arrays)


def _open_hdf5(path: Path, name: str | None) -> Store:
    h5py = require("h5py", extra="blocks", purpose=f"reading {path}")
    file = h5py.File(path, "r")
    if "binsparse" in file.attrs and name is None:
        return _binsparse(file, str(path))
    return _anndata(_member(file, name or "X", path), str(path), name or "X")


def _open_zarr(path: Path, name: str | None) -> Store:
    zarr = require("zarr", extra="blocks", purpose=f"reading {path}")
    group = zarr.open_group(str(path), mode="r")
    if name is None and "encoding-type" in group.attrs and "indptr" in group:
        return _anndata(group, str(path), "")
    return _anndata(_member(group, name or "X", path), str(path), name or "X")


def _member(group: Any, name: str, path: Path) -> Any:
    if name not in group:
        names = ", ".join([*group.keys(), *(f"{k}/{n}" for k in ("layers", "obsp") if k in group for n in group[k])])
        raise FileFormatError(f"name: expected a matrix of {path}, got {name!r}. It has {names}.")
    return group[name]


def _anndata(group: Any, path: str, name: str) -> Store:
    """anndata's on-disk CSR and CSC; files before version 0.8 have other names of the attributes."""
    attributes = dict(group.attrs)
    encoding = str(attributes.get("encoding-type") or f"{attributes.get('h5sparse_format', 'array')}_matrix")
    if encoding not in ENCODINGS:
        advice = "Save it as a scipy.sparse.csr_matrix"
        raise FileFormatError(f"{path}:{name}: expected a CSR or CSC matrix, got {encoding}. {advice}.")
    shape = attributes.get("shape", attributes.get("h5sparse_shape"))
    arrays = {key: _raw(group[key], path) for key in ("indptr", "indices", "data")}
    return _checked(path, name, ENCODINGS[encoding], np.asarray(shape), arrays)


def _binsparse(file: Any, path: str) -> Store:
    """Return a matrix in the words of the Binsparse specification."""
    text = file.attrs["binsparse"]
    description = json.loads(text.decode() if isinstance(text, bytes) else text)
    description = description.get("binsparse", description)
    format = str(description.get("format")).lower()
    if format not in ("csr", "csc"):
        raise FileFormatError(f"{path}: expected the format CSR or CSC, got {format.upper()}. Convert it first.")
    names = {"indptr": "pointers_to_1", "indices": "indices_1", "data": "values"}
    arrays = {key: _raw(file[name], path) for key, name in names.items()}
    return _checked(path, "", format, np.asarray(description["shape"]), arrays)


def _raw(dataset: Any, path: str) -> Any:
    """Read a contiguous dataset past HDF5, which keeps Python's lock."""
    identifier: Any = getattr(dataset, "id", None)
    offset = identifier.get_offset() if hasattr(identifier, "get_offset") else None
    if offset is None or not os.path.isfile(path):
        return dataset
    return RawArray(path, int(offset), tuple(dataset.shape), dataset.dtype)


def _checked(path: str, name: str, format: str, shape: Any, arrays: dict[str, Any]) -> Store:
    """Validate what is known without reading entries."""
    label = f"{path}:{name}" if name else path
    sizes = np.asarray(shape).ravel()
    if sizes.shape != (2,) or sizes.dtype.kind not in "iu" or sizes.min() < 0:
        raise FileFormatError(f"{label}: expected two sizes, got the shape {shape}. Write the file again.")
    if format not in ("csr", "csc"):
        raise FileFormatError(f"{label}: expected the format csr or csc, got {format}. Convert it first.")
    for key in ("indptr", "indices"):
        if arrays[key].dtype.kind not in "iu" or len(arrays[key].shape) != 1:
            raise FileFormatError(f"{label}: expected a vector of integers, got {key} of {arrays[key].dtype}.")
    dtype = arrays["data"].dtype
    if dtype.kind not in KINDS:
        raise FileFormatError(f"{label}: expected values of real numbers, got {dtype}. Save the real part.")
    store = Store(path, name, format, (int(sizes[0]), int(sizes[1])), _pointers(arrays["indptr"]), arrays["indices"],
                  arrays["data"])  # fmt: skip
    _check_pointers(store, label)
    return store


def _pointers(indptr: Any) -> Array:
    return np.asarray(indptr[:]).astype(np.int64, copy=False)


def _check_pointers(store: Store, label: str) -> None:
    indptr, kind = store.indptr, "row" if store.format == "csr" else "column"
    if len(indptr) != store.lines[0] + 1 or indptr[0] != 0:
        expected = f"{store.lines[0] + 1} pointers from 0 on"
        raise FileFormatError(f"{label}: expected {expected}, got {len(indptr)} in indptr. Write the file again.")
    falling = np.flatnonzero(indptr[1:] < indptr[:-1])
    if falling.size:
        raise FileFormatError(f"{label}: expected indptr to rise, got a fall in {kind} {falling[0]}. Write it again.")
    for key, array in (("indices", store.indices), ("data", store.data)):
        if array.shape[0] < indptr[-1]:
            line = int(np.searchsorted(indptr, array.shape[0], side="right")) - 1
            fault = f"{array.shape[0]}: it ends in {kind} {line}"
            raise FileFormatError(f"{label}: expected {indptr[-1]} elements of {key}, got {fault}. Write it again.")


def load_store(store: Store) -> Any:
    """Read the whole matrix as a scipy array of its format."""
    indices, data = store.read(0, store.nnz)
    extent = store.lines[1]
    if indices.size and (indices.min() < 0 or indices.max() >= extent):
        raise FileFormatError(f"{store.label}: expected indices below {extent}, got others. Write the file again.")
    kind = sp.csr_array if store.format == "csr" else sp.csc_array
    idtype = np.int32 if max(store.nnz, extent) < 1 << 31 else np.int64
    arrays = data, indices.astype(idtype, copy=False), store.indptr.astype(idtype, copy=False)
    return kind(arrays, shape=store.shape)


__all__ = ["Array", "RawArray", "Store", "is_open", "is_stored", "load_store", "open_store", "raw_npy"]
