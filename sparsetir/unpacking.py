# SPDX-License-Identifier: Apache-2.0
"""The bytes of a file, compressed or not. What a file claims to hold decides over no more memory than it may need."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from sparsetir.errors import FileFormatError

MOST_TIMES = 200  # that contents may be larger than the file; what repeats itself more is a decompression bomb
FREE_BYTES = 1 << 26  # which a file of any size may expand to
XZ_MEMORY = 1 << 30
ROWS_A_BYTE = 16  # rows without an entry take no place in a file, but in memory
FREE_ROWS = 1 << 24
CHUNK = 1 << 20


def most_bytes(size: int) -> int:
    """How much a compressed file of `size` bytes may expand to."""
    return max(FREE_BYTES, MOST_TIMES * size)


def contents(path: Path, packing: str) -> bytes:
    """What a file holds, after unpacking.

    Raises
    ------
    OSError
        The file cannot be read.
    FileFormatError
        It is not packed like that, is cut, or expands too far.
    """
    with open(path, "rb") as stream:
        data = stream.read()
    if not packing:
        return data
    try:
        return UNPACKERS[packing](data)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise FileFormatError(str(error)) from error


def _gunzip(data: bytes) -> bytes:
    with gzip.open(io.BytesIO(data)) as stream:
        return _limited(stream.read(most_bytes(len(data)) + 1), data)


def _unxz(data: bytes) -> bytes:
    left = data
    parts, room = [], most_bytes(len(data)) + 1
    while left and room > 0:
        stream = lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=XZ_MEMORY)
        while not stream.eof and room > 0:
            found = stream.decompress(left, max_length=min(CHUNK, room))
            if not found and stream.needs_input and not stream.eof:
                raise FileFormatError("the compressed data ends too early")
            parts.append(found)
            left, room = b"", room - len(found)
        left = stream.unused_data.lstrip(b"\0")  # streams follow each other, with padding between them
    if not parts:
        raise FileFormatError("there are no compressed data")
    return _limited(b"".join(parts), data)


def _limited(found: bytes, data: bytes) -> bytes:
    most = most_bytes(len(data))
    if len(found) > most:
        raise FileFormatError(f"its {len(data):,} bytes expand to more than {most:,}: unpack it by hand")
    return found


UNPACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": _gunzip, ".xz": _unxz}


# ---------------------------------------------------------------------------------------------- declared sizes


def check_rows(rows: int, size: int) -> None:
    """Refuse a matrix whose row pointers would take far more memory than a file of `size` bytes."""
    most = max(FREE_ROWS, ROWS_A_BYTE * size)
    if rows > most:
        raise FileFormatError(f"{rows:,} rows are declared, expected at most {most:,} in a file of {size:,} bytes")


def check_archive(archive: zipfile.ZipFile, size: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return the shapes and dtypes of an npz; refuse one whose arrays claim to be larger than it can hold."""
    total = sum(member.file_size for member in archive.infolist())
    if total > most_bytes(size):
        raise FileFormatError(f"its {size:,} bytes expand to {total:,}, expected at most {most_bytes(size):,}")
    heads = {}
    for member in archive.infolist():
        if member.filename.endswith(".npy"):
            with archive.open(member) as stream:
                heads[member.filename.removesuffix(".npy")] = _check_array(stream, member)
    return heads


def _check_array(stream: IO[bytes], member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in readers:
        raise FileFormatError(f"{member.filename} has version {version} of numpy's format, expected (1, 0) or (2, 0)")
    shape, _, dtype = readers[version](stream)
    if dtype.hasobject:
        return shape, dtype  # numpy refuses it
    if dtype.kind not in "biufcSU" or not dtype.itemsize:
        raise FileFormatError(f"{member.filename} holds {dtype}, expected numbers")
    if math.prod(shape) * dtype.itemsize > member.file_size:
        found = f"an array of shape {shape} and {dtype} in {member.file_size:,} bytes"
        raise FileFormatError(f"{member.filename} declares {found}, which cannot be")
    return shape, dtype


__all__ = ["check_archive", "check_rows", "contents"]
