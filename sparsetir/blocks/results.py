# SPDX-License-Identifier: Apache-2.0
"""Results that are written block by block: a partial file, the list of finished blocks, the final name at the end."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, WriteError
from sparsetir.stores import Array, Buffers
from sparsetir.utils.arguments import as_path
from sparsetir.utils.files import writing_file

CHECKPOINT_SECONDS = 10.0  # between checkpoints of sums, which are as large as the result
CHECKPOINT_RATIO = 20.0  # seconds of work for each second that a checkpoint takes
SYNC_SECONDS = 1.0  # between records of finished blocks, which the disk must have before


class NpyResult:
    """A matrix in a .npy file, whose finished parts survive the process.

    Parameters
    ----------
    path : str or Path
        The final name; ``.partial`` and ``.progress`` are appended to it until the result is complete.
    shape : tuple of int
    dtype : dtype
    job : dict
        What the result depends on: parts of another job are not continued.
    """

    def __init__(self, path: str | Path, shape: tuple[int, ...], dtype: Any, job: dict[str, Any]) -> None:
        self.path = check_path(path)
        self.partial, self.progress = Path(f"{self.path}.partial"), Path(f"{self.path}.progress")
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.job = json.dumps({**job, "shape": shape, "dtype": self.dtype.str}, sort_keys=True)
        self.done: set[str] = self._finished()
        self.waiting: list[str] = []
        self.synced = time.monotonic()
        try:
            if not self.done:
                self._begin()
            self.file = os.open(self.partial, os.O_RDWR)
        except OSError as error:
            if not self.done:
                self.partial.unlink(missing_ok=True)
            raise WriteError(f"out: {self.path} cannot be written: {error.strerror}.") from error
        with open(self.partial, "rb") as stream:
            np.lib.format.read_magic(stream)
            np.lib.format.read_array_header_1_0(stream)
            self.offset = stream.tell()

    def _finished(self) -> set[str]:
        if not (self.partial.is_file() and self.progress.is_file()):
            return set()
        first, *lines = self.progress.read_text(encoding="utf-8").split("\n")
        # A line without its end was cut by the end of the process.
        return set(lines[:-1]) if first == self.job else set()

    def _begin(self) -> None:
        self.progress.unlink(missing_ok=True)
        with open(self.partial, "wb") as stream:
            header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
            np.lib.format.write_array_header_1_0(stream, header)
            size = stream.tell() + math.prod(self.shape) * self.dtype.itemsize
            stream.truncate(size)
            if hasattr(os, "posix_fallocate"):  # a memory map of a full disk ends the process
                os.posix_fallocate(stream.fileno(), 0, size)
        self.progress.write_text(self.job + "\n", encoding="utf-8")

    def rows(self, begin: int, count: int, columns: slice, buffers: Buffers) -> Array:
        """Return memory for rows that are then written."""
        width = columns.stop - columns.start
        return buffers.array("rows", count * width, self.dtype).reshape(count, width)

    def write(self, begin: int, values: Array, columns: slice | None = None) -> None:
        """Write rows from `begin` on, all columns or a panel of them."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self.offset + begin * row_bytes
        if columns is None or values.shape[1:] == self.shape[1:]:
            write_all(self.file, values, offset, self.path)
            return
        shape = (len(values), *self.shape[1:])
        rows = np.memmap(self.partial, self.dtype, "r+", offset, shape)
        rows[:, columns] = values
        rows.flush()

    def record(self, part: str) -> None:
        """Record a part as finished, from time to time on the disk."""
        self.waiting.append(part)
        if time.monotonic() - self.synced >= SYNC_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the record of the finished parts, after the parts themselves."""
        try:
            os.fsync(self.file)
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
            os.fsync(self.file)
            os.replace(self.partial, self.path)
            self.progress.unlink(missing_ok=True)
        finally:
            os.close(self.file)


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
        self.path = None if path is None else Path(f"{path}.sums.npz")
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


def check_path(path: Any) -> Path:
    """Return the path of a result that ends in .npy and whose folder exists."""
    path = as_path(path, "out", "the path of a .npy file")
    if path.suffix != ".npy" or not path.parent.is_dir():
        raise ArgumentError(f"out: expected a .npy file in a folder that exists, got {path}. Choose another name.")
    return path


def digest(*arrays: Array) -> str:
    """Return a hash of dense operands, chunk by chunk: they may be memory maps."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        rows = max(1, (16 << 20) // max(1, array[:1].nbytes)) if array.ndim else 1
        state.update(f"{array.shape}{array.dtype}".encode())
        for begin in range(0, len(array), rows):
            state.update(np.ascontiguousarray(array[begin : begin + rows]).view(np.uint8).data)
    return state.hexdigest()


__all__ = ["Checkpoint", "NpyResult", "check_path", "digest", "write_all"]
