# SPDX-License-Identifier: Apache-2.0
"""Results and matrices that are written block by block, under a final name only once they are complete."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError, WriteError
from sparsetir.io.stores import Array, Buffers
from sparsetir.utils.arguments import as_path, is_integer, shown
from sparsetir.utils.files import writing_file
from sparsetir.utils.machine import CORES
from sparsetir.utils.packages import require

CHECKPOINT_SECONDS = 10.0  # between checkpoints of sums, which are as large as the result
CHECKPOINT_RATIO = 20.0  # seconds of work for each second that a checkpoint takes
ZARR_CHUNK_BYTES = 1 << 20  # of a chunk, which is read and written again where two blocks meet in it
DIGEST_BYTES = 4 << 20  # of an operand, hashed at once
SYNC_SECONDS = 1.0  # between records of finished blocks, which the disk must have before


class FileResult:
    """A dense result on disk, whose finished parts survive the process.

    Parameters
    ----------
    path : str or Path
        The final name; the result has it only when it is complete.
    shape : tuple of int
    dtype : dtype
    job : dict
        What the result depends on: parts of another job are not continued.
    """

    def __init__(self, path: str | Path, shape: tuple[int, ...], dtype: Any, job: dict[str, Any]) -> None:
        self.path = check_path(path)
        stem = beside(self.path)
        self.partial, self.progress = Path(f"{stem}.partial"), Path(f"{stem}.progress")
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.job = json.dumps({**job, "shape": shape, "dtype": self.dtype.str}, sort_keys=True)
        self.done: set[str] = self._finished()
        self.waiting: list[str] = []
        self.synced = time.monotonic()
        try:
            if not self.done:
                self.progress.unlink(missing_ok=True)
                self._create()
                self.progress.write_text(self.job + "\n", encoding="utf-8")
            self._open()
        except OSError as error:
            if not self.done:
                self.partial.unlink(missing_ok=True)
            raise WriteError(f"out: {self.path} cannot be written: {error.strerror or error}.") from error

    def _create(self) -> None:
        """Create the partial file, whose contents are undefined."""
        raise NotImplementedError

    def _open(self) -> None:
        """Open the partial file for writing."""
        raise NotImplementedError

    def _sync(self) -> None:
        """Wait until the disk has what was written."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close the partial file."""

    def write(self, begin: int, values: Array, columns: slice | None = None) -> None:
        """Write rows from `begin` on, all columns or a panel of them."""
        raise NotImplementedError

    def _publish(self) -> None:
        """Give the complete result its name."""
        os.replace(self.partial, self.path)

    def _finished(self) -> set[str]:
        if not (self.partial.exists() and self.progress.is_file()):
            return set()
        first, *lines = self.progress.read_text(encoding="utf-8").split("\n")
        # A line without its end was cut by the end of the process.
        return set(lines[:-1]) if first == self.job else set()

    def rows(self, begin: int, count: int, columns: slice, buffers: Buffers) -> Array:
        """Return memory for rows that are then written."""
        width = columns.stop - columns.start
        return buffers.array("rows", count * width, self.dtype).reshape(count, width)

    def record(self, part: str) -> None:
        """Record a part as finished, from time to time on the disk."""
        self.waiting.append(part)
        if time.monotonic() - self.synced >= SYNC_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the record of the finished parts, after the parts themselves."""
        try:
            self._sync()
            with open(self.progress, "a", encoding="utf-8") as stream:
                stream.write("".join(f"{part}\n" for part in self.waiting))
        except OSError as error:
            raise WriteError(f"out: {self.progress} cannot be written: {error.strerror or error}.") from error
        self.waiting, self.synced = [], time.monotonic()

    def close(self, is_complete: bool) -> None:
        """Give a complete result its name; keep an incomplete one for the next run."""
        try:
            if not is_complete:
                self.flush()
                return
            self._sync()
            self._publish()
            sync_folder(self.path.parent)
            self.progress.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"out: {self.path} cannot be written: {error.strerror or error}.") from error
        finally:
            self._release()


class NpyResult(FileResult):
    """A result in a .npy file."""

    def _create(self) -> None:
        with open(self.partial, "wb") as stream:
            header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
            np.lib.format.write_array_header_1_0(stream, header)
            size = stream.tell() + math.prod(self.shape) * self.dtype.itemsize
            stream.truncate(size)
            if hasattr(os, "posix_fallocate"):  # a memory map of a full disk ends the process
                os.posix_fallocate(stream.fileno(), 0, size)

    def _open(self) -> None:
        with open(self.partial, "rb") as stream:
            np.lib.format.read_magic(stream)
            np.lib.format.read_array_header_1_0(stream)
            self.offset = stream.tell()
        self.file = os.open(self.partial, os.O_RDWR)

    def _sync(self) -> None:
        os.fsync(self.file)

    def _release(self) -> None:
        os.close(self.file)

    def write(self, begin: int, values: Array, columns: slice | None = None) -> None:
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self.offset + begin * row_bytes
        if columns is None or values.shape[1:] == self.shape[1:]:
            write_all(self.file, values, offset, self.path)
            return
        shape = (len(values), *self.shape[1:])
        rows = np.memmap(self.partial, self.dtype, "r+", offset, shape)
        rows[:, columns] = values
        rows.flush()


class ZarrResult(FileResult):
    """A result as an array of zarr: a folder of its own, or a member such as obsm/NAME of a folder that is there.

    Chunks are not compressed, as dense products do not shrink much. A store writes each chunk at once.
    """

    def _create(self) -> None:
        zarr = require("zarr", extra="blocks", purpose=f"writing {self.path}")
        shutil.rmtree(self.partial, ignore_errors=True)
        root = zarr_root(self.path)
        version = 2 if root is None else zarr.open_group(str(root), mode="r").metadata.zarr_format
        width = max(1, math.prod(self.shape[1:]))
        rows = max(1, ZARR_CHUNK_BYTES // (width * self.dtype.itemsize))
        chunks = (min(rows, max(1, self.shape[0])), *(max(1, n) for n in self.shape[1:]))
        array = zarr.create_array(str(self.partial), shape=self.shape, dtype=self.dtype, chunks=chunks,
                                  compressors=None, zarr_format=version)  # fmt: skip
        array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})

    def _open(self) -> None:
        zarr = require("zarr", extra="blocks", purpose=f"writing {self.path}")
        self.array = zarr.open_array(str(self.partial), mode="r+")
        self.dirty: set[int] = set()

    def write(self, begin: int, values: Array, columns: slice | None = None) -> None:
        if not len(values):
            return
        part = slice(begin, begin + len(values))
        try:
            self.array[part if columns is None else (part, columns)] = values
        except OSError as error:
            raise WriteError(f"out: {self.path} cannot be written: {error.strerror or error}.") from error
        step = self.array.chunks[0]
        self.dirty.update(range(begin // step, (part.stop - 1) // step + 1))

    def _sync(self) -> None:
        key = self.array.metadata.encode_chunk_key
        for number in self.dirty:
            chunk = self.partial / key((number, *(0 for _ in self.shape[1:])))
            if chunk.is_file():  # chunks of zeros are not stored
                with open(chunk, "rb") as stream:
                    os.fsync(stream.fileno())
        self.dirty = set()

    def _publish(self) -> None:
        super()._publish()
        root = zarr_root(self.path)
        if root is None:
            return
        zarr = require("zarr", extra="blocks", purpose=f"writing {self.path}")
        if zarr.open_group(str(root), mode="r").metadata.consolidated_metadata is not None:
            zarr.consolidate_metadata(str(root))


class WriteBehind:
    """Writes a part of a result on a thread, while the next one is computed; a result in memory needs none."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.pool = ThreadPoolExecutor(1, "sparsetir-writer") if isinstance(result, FileResult) else None
        self.pending: Future[None] | None = None
        self.buffers = deque([Buffers(), Buffers()])  # one is written, one is filled

    def rows(self, begin: int, count: int, columns: slice) -> Array:
        """Return memory for rows that are then put."""
        self.buffers.rotate()
        return self.result.rows(begin, count, columns, self.buffers[0])

    def put(self, begin: int, values: Array, columns: slice, part: str) -> None:
        """Write rows and record the part; raise what the part before raised."""
        if self.pool is None:
            self._write(begin, values, columns, part)
            return
        self.wait()
        self.pending = self.pool.submit(self._write, begin, values, columns, part)

    def _write(self, begin: int, values: Array, columns: slice, part: str) -> None:
        self.result.write(begin, values, columns)
        self.result.record(part)

    def wait(self) -> None:
        """Wait for the last part, and raise what it raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last part, and end the thread."""
        try:
            self.wait()
        finally:
            if self.pool is not None:
                self.pool.shutdown()


def file_result(path: str | Path, shape: tuple[int, ...], dtype: Any, job: dict[str, Any]) -> FileResult:
    """Open a result in a .npy file or in zarr, whichever the path names."""
    kind = NpyResult if Path(path).suffix == ".npy" else ZarrResult
    return kind(path, shape, dtype, job)


class Checkpoint:
    """Sums over the first blocks of a pass, kept beside a result so that a killed run continues from there.

    Parameters
    ----------
    path : Path or None
        Of the result, to which ``.sums.npz`` is appended; None keeps nothing.
    job : dict
        What the sums depend on.
    """

    def __init__(self, path: Path | None, job: dict[str, Any]) -> None:
        self.path = None if path is None else Path(f"{beside(path)}.sums.npz")
        self.job = json.dumps(job, sort_keys=True)
        self.next_save = time.monotonic() + CHECKPOINT_SECONDS

    def load(self) -> tuple[int, Array | None]:
        """Return the number of blocks that are summed, and their sum; zero blocks without a file of this job."""
        if self.path is None or not self.path.is_file():
            return 0, None
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                if stored["job"].item() == self.job:
                    return int(stored["blocks"]), stored["total"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass  # a file that is not ours is written again
        return 0, None

    def save(self, blocks: int, total: Array) -> None:
        """Keep the sum of so many blocks, from time to time."""
        if self.path is None or time.monotonic() < self.next_save:
            return
        start = time.monotonic()
        with writing_file(self.path, "out") as partial:
            np.savez(partial, job=np.array(self.job), blocks=np.array(blocks), total=total)
        now = time.monotonic()
        self.next_save = now + max(CHECKPOINT_SECONDS, CHECKPOINT_RATIO * (now - start))

    def end(self) -> None:
        """Remove the file: the result is complete."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def write_all(file: int, values: Array, offset: int, path: Path) -> None:
    """Write an array at an offset; a disk may take less than asked at once."""
    view = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    try:
        while view:
            count = os.pwrite(file, view, offset)
            view, offset = view[count:], offset + count
    except OSError as error:
        raise WriteError(f"out: {path} cannot be written: {error.strerror or error}.") from error


def zarr_root(path: Path) -> Path | None:
    """Return the folder of zarr that a path is in; None for a path that is such a folder itself, or another one."""
    return next((parent for parent in path.parents if parent.suffix == ".zarr"), None)


def beside(path: Path) -> Path:
    """Return the name that files of an incomplete result begin with: not inside of a zarr folder, which others list."""
    root = zarr_root(path)
    return path if root is None else root.with_name(".".join([root.name, *path.relative_to(root).parts]))


def check_path(path: Any) -> Path:
    """Return the path of a result: ``C.npy``, a new ``C.zarr``, or a new member of a zarr folder that exists."""
    path = as_path(path, "out", "the path of a .npy file or of zarr")
    root = zarr_root(path)
    if any(part.suffix in (".h5ad", ".h5", ".hdf5") for part in (path, *path.parents)):
        advice = "HDF5 that is being written is damaged by the end of a process. Write C.npy and put that in"
        raise ArgumentError(f"out: expected a .npy file or zarr, got {path}: {advice}.")
    is_named = path.suffix in (".npy", ".zarr") or root is not None
    if not is_named or not path.parent.is_dir():
        forms = "a .npy file in a folder that exists, a new .zarr, or a new member of a .zarr"
        raise ArgumentError(f"out: expected {forms}, got {path}. Choose another name.")
    if (path.suffix != ".npy" or root is not None) and path.exists():
        raise ArgumentError(f"out: expected a new name, got {path}, which exists. Remove it or choose another.")
    return path


def check_apart(path: Path, operand: Any) -> None:
    """Raise if a result would replace the file that an operand is read from."""
    while operand is not None:
        file = getattr(operand, "filename", None)
        if file is not None and path.exists() and Path(file).exists() and path.samefile(file):
            fault = f"expected another file than the dense operand's, got {path}"
            raise ArgumentError(f"out: {fault}. Choose another name.")
        operand = getattr(operand, "base", None)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder: a rename may otherwise be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(*arrays: Array) -> str:
    """Return a hash of dense operands, which may be memory maps: of the checksums of their parts."""
    state = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(CORES, "sparsetir-digest") as pool:
        for array in arrays:
            rows = max(1, DIGEST_BYTES // max(1, array[:1].nbytes)) if array.ndim else 1
            parts = pool.map(partial(_checksum, array, rows), range(0, len(array), rows))
            state.update(f"{array.shape}{array.dtype}{list(parts)}".encode())
    return state.hexdigest()


def _checksum(array: Array, rows: int, begin: int) -> int:
    return zlib.crc32(np.ascontiguousarray(array[begin : begin + rows]).view(np.uint8).data)


# -------------------------------------------------------------------------------------------- matrices


CHUNK = 1 << 18  # entries of a chunk in HDF5 and zarr


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
    if not is_integer(rows) or rows < 1:
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
    return _Zarr(path) if name.endswith(".zarr") else _AppendFolder(path)


class _AppendFolder:
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


__all__ = [
    "Checkpoint",
    "FileResult",
    "NpyResult",
    "beside",
    "check_apart",
    "check_new",
    "check_path",
    "digest",
    "file_result",
    "save_blocks",
    "write_all",
    "write_lines",
]
