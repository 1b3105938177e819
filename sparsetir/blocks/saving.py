# SPDX-License-Identifier: Apache-2.0
"""Writing matrices block by block, as folders of .npy, h5ad, zarr and Binsparse HDF5."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.stores import Array
from sparsetir.utils.arguments import as_path, shown
from sparsetir.utils.files import writing_file
from sparsetir.utils.imports import require

CHUNK = 1 << 20  # entries of a chunk in HDF5 and zarr


def save_blocks(A: Any, path: str | os.PathLike[str], *, rows: int = 50_000) -> Path:
    """Write a sparse matrix, or an iterator of its row blocks, in a form that `open_blocks` reads.

    Parameters
    ----------
    A : scipy sparse matrix or array, or iterable of them
        The blocks have the same number of columns and are appended below each other; they are never all in memory.
        A CSC matrix alone is written as CSC.
    path : str or Path
        ``.h5ad``, ``.zarr`` or ``.bsp.h5``, otherwise a new folder of ``.npy`` files. It has its name only when
        complete.
    rows : int
        Rows that are converted and written at once.

    Returns
    -------
    Path

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `A` is not sparse, its blocks do not fit together, or there is something at `path`.
    WriteError
        The file cannot be written.

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir
    >>> path = sparsetir.save_blocks((sp.eye_array(2, format="csr") for _ in range(3)), "stacked")
    >>> sparsetir.open_blocks(path).shape
    (6, 2)
    """
    path = as_path(path, "path")
    if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or rows < 1:
        raise ArgumentError(f"rows: expected a positive integer, got {shown(rows)}. Leave it out.")
    path = check_new(path, "path")
    is_columns = sp.issparse(A) and A.format == "csc"
    return write_lines(_blocks(A.T if is_columns else A, int(rows)), path, "csc" if is_columns else "csr")


def check_new(path: str | os.PathLike[str], name: str) -> Path:
    """Return the path of a matrix that is not there yet, in a folder that is."""
    path = as_path(path, name)
    if not str(path).strip() or os.path.lexists(path) or not path.parent.is_dir():
        fault = f"expected a new name in a folder that exists, got {path}"
        raise ArgumentError(f"{name}: {fault}. Remove it or choose another.")
    return path


def write_lines(blocks: Iterator[Any], path: Path, format: str) -> Path:
    """Write CSR blocks below each other: the rows of CSR, or the columns of CSC."""
    with writing_file(path, "path") as partial:
        _write(blocks, partial, format, path.name.lower())
    return path


def _blocks(A: Any, rows: int) -> Iterator[Any]:
    """Yield CSR blocks of at most so many rows, which fit together."""
    if not sp.issparse(A) and (isinstance(A, (str, bytes, dict, np.ndarray)) or not isinstance(A, Iterable)):
        raise ArgumentTypeError(
            f"A: expected a sparse matrix or an iterator of them, got {type(A).__name__}. Use scipy."
        )
    first: Any = None
    for part in [A] if sp.issparse(A) else A:
        if not sp.issparse(part) or part.ndim != 2 or part.dtype.kind not in "biuf" or part.dtype.itemsize > 8:
            fault = f"{type(part).__name__} of {getattr(part, 'dtype', 'no dtype')}"
            raise ArgumentTypeError(f"A: expected sparse matrices of real numbers, got {fault}. Convert it first.")
        first = part if first is None else first
        if part.shape[1] != first.shape[1] or part.dtype != first.dtype:
            fault = f"{part.shape[1]} of {part.dtype}"
            raise ArgumentError(f"A: expected {first.shape[1]} columns of {first.dtype}, got {fault}. Convert blocks.")
        yield from _slices(part, rows)
    if first is None:
        raise ArgumentError("A: expected at least one block, got none. Pass a matrix of no rows.")


def _slices(part: Any, rows: int) -> Iterator[Any]:
    try:
        csr = sp.csr_array(part)
        csr.check_format(full_check=True)
        for begin in range(0, max(csr.shape[0], 1), rows):
            yield csr[begin : begin + rows]
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"A: expected a valid sparse matrix, got a damaged one: {error}. Build it again."
        ) from error


def _write(blocks: Iterator[Any], path: Path, format: str, name: str) -> None:
    target = _target(path, name)
    lengths, columns = [np.zeros(1, np.int64)], 0
    try:
        for block in blocks:
            target.append("indices", block.indices)
            target.append("data", block.data)
            lengths.append(np.diff(block.indptr))
            columns = block.shape[1]
        indptr = np.cumsum(np.concatenate(lengths), dtype=np.int64)
        shape = (len(indptr) - 1, columns)
        # scipy and scikit-learn refuse pointers that are wider than the indices.
        target.append("indptr", indptr.astype(np.int32) if indptr[-1] < 1 << 31 else indptr)
        target.close(format, shape if format == "csr" else shape[::-1])
    finally:
        target.release()


def _target(path: Path, name: str) -> Any:
    if name.endswith((".h5", ".hdf5")):
        return _Hdf5(path, is_binsparse=True)
    if name.endswith(".h5ad"):
        return _Hdf5(path, is_binsparse=False)
    return _Zarr(path) if name.endswith(".zarr") else _Folder(path)


class _Folder:
    """Appends to .npy files, whose headers have space for the final length."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.files: dict[str, Any] = {}
        self.counts: dict[str, tuple[int, Any]] = {}

    def append(self, name: str, values: Array) -> None:
        if name not in self.files:
            self.files[name] = open(self.path / f"{name}.npy", "w+b")
            self.counts[name] = (0, values.dtype)
            self._header(name)
        count, dtype = self.counts[name]
        self.files[name].write(np.ascontiguousarray(values, dtype).view(np.uint8).data)
        self.counts[name] = (count + len(values), dtype)

    def _header(self, name: str) -> None:
        count, dtype = self.counts[name]
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(self.files[name], header)

    def close(self, format: str, shape: tuple[int, int]) -> None:
        for name, file in self.files.items():
            file.seek(0)
            self._header(name)
        np.save(self.path / "shape.npy", np.array(shape))
        np.save(self.path / "format.npy", np.array(format.encode()))

    def release(self) -> None:
        for file in self.files.values():
            file.close()


class _Group:
    """Appends to resizable arrays of a group in anndata's layout."""

    file: Any
    group: Any

    def create(self, name: str, values: Array) -> Any:
        return self.group.create_dataset(name, shape=(0,), maxshape=(None,), dtype=values.dtype, chunks=(CHUNK,))

    def append(self, name: str, values: Array) -> None:
        dataset = self.group[name] if name in self.group else self.create(name, values)
        count = dataset.shape[0]
        dataset.resize((count + len(values),))
        if len(values):
            dataset[count:] = values

    def close(self, format: str, shape: tuple[int, int]) -> None:
        self.group.attrs.update({"encoding-type": f"{format}_matrix", "encoding-version": "0.1.0"})
        self.group.attrs["shape"] = list(shape)
        write_elem = require("anndata.io", extra="blocks", purpose="writing h5ad and zarr").write_elem
        pandas = require("pandas", extra="blocks", purpose="writing h5ad and zarr")
        for name, size in (("obs", shape[0]), ("var", shape[1])):
            write_elem(self.file, name, pandas.DataFrame(index=pandas.RangeIndex(size).astype(str)))
        self.file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})

    def release(self) -> None:
        """Do nothing."""


class _Hdf5(_Group):
    def __init__(self, path: Path, *, is_binsparse: bool) -> None:
        h5py = require("h5py", extra="blocks", purpose=f"writing {path.name}")
        self.file = h5py.File(path, "w")
        self.is_binsparse = is_binsparse
        self.group = self.file if is_binsparse else self.file.create_group("X")

    def append(self, name: str, values: Array) -> None:
        words = {"indptr": "pointers_to_1", "indices": "indices_1", "data": "values"}
        super().append(words[name] if self.is_binsparse else name, values)

    def close(self, format: str, shape: tuple[int, int]) -> None:
        if not self.is_binsparse:
            super().close(format, shape)
            return
        names = ("pointers_to_1", "indices_1", "values")
        words: dict[str, Any] = {"version": "0.1", "format": format.upper(), "shape": [int(size) for size in shape]}
        words["number_of_stored_values"] = self.file["values"].shape[0]
        words["data_types"] = {name: self.file[name].dtype.name for name in names}
        self.file.attrs["binsparse"] = json.dumps({"binsparse": words})

    def release(self) -> None:
        self.file.close()


class _Zarr(_Group):
    def __init__(self, path: Path) -> None:
        zarr = require("zarr", extra="blocks", purpose=f"writing {path.name}")
        self.file = zarr.open_group(str(path), mode="w", zarr_format=2)
        self.group = self.file.create_group("X")

    def create(self, name: str, values: Array) -> Any:
        return self.group.create_array(name, shape=(0,), dtype=values.dtype, chunks=(CHUNK,))


__all__ = ["check_new", "save_blocks", "write_lines"]
