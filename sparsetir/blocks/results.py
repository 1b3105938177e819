# SPDX-License-Identifier: Apache-2.0
"""Results that are written block by block: a partial file, the list of finished blocks, the final name at the end."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, WriteError
from sparsetir.stores import Array, Buffers
from sparsetir.utils.arguments import as_path
from sparsetir.utils.files import writing_file
from sparsetir.utils.imports import require

CHECKPOINT_SECONDS = 10.0  # between checkpoints of sums, which are as large as the result
CHECKPOINT_RATIO = 20.0  # seconds of work for each second that a checkpoint takes
ZARR_CHUNK_BYTES = 1 << 20  # of a chunk, which is read and written again where two blocks meet in it
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
            raise WriteError(f"out: {self.path} cannot be written: {error.strerror}.") from error

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
            raise WriteError(f"out: {self.progress} cannot be written: {error.strerror}.") from error
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
            raise WriteError(f"out: {self.path} cannot be written: {error.strerror}.") from error
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
            raise WriteError(f"out: {self.path} cannot be written: {error.strerror}.") from error
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
        raise WriteError(f"out: {path} cannot be written: {error.strerror}.") from error


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


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder: a rename may otherwise be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(*arrays: Array) -> str:
    """Return a hash of dense operands, chunk by chunk: they may be memory maps."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        rows = max(1, (16 << 20) // max(1, array[:1].nbytes)) if array.ndim else 1
        state.update(f"{array.shape}{array.dtype}".encode())
        for begin in range(0, len(array), rows):
            state.update(np.ascontiguousarray(array[begin : begin + rows]).view(np.uint8).data)
    return state.hexdigest()


__all__ = ["Checkpoint", "FileResult", "NpyResult", "beside", "check_path", "digest", "file_result", "write_all"]
