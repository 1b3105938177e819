# SPDX-License-Identifier: Apache-2.0
"""Matrices and tensors in files: Matrix Market, npz, smtx, tns, compressed or not."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy
import scipy.sparse as sp

from sparsetir.errors import FileFormatError, MissingFileError, SparseTIRError
from sparsetir.interop import Array, CooTensor, Level, check_level
from sparsetir.io.stores import Store, is_open, is_stored, load_store, open_store
from sparsetir.utils.arguments import as_path

# The bytes of a file, compressed or not. What a file claims to hold decides over no more memory than it may need.


MOST_TIMES = 200  # that contents may be larger than the file; what repeats itself more is a decompression bomb
FREE_BYTES = 1 << 26  # which a file of any size may expand to
XZ_MEMORY = 1 << 30
ROWS_A_BYTE = 16  # rows without an entry take no place in a file, but in memory
FREE_ROWS = 1 << 24
CHUNK = 1 << 20


def most_bytes(size: int) -> int:
    """Return the largest size that a compressed file of `size` bytes may expand to."""
    return max(FREE_BYTES, MOST_TIMES * size)


def contents(path: Path, packing: str) -> bytes:
    """Return the contents of a file, after unpacking.

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
            chunk = stream.decompress(left, max_length=min(CHUNK, room))
            if not chunk and stream.needs_input and not stream.eof:
                raise FileFormatError("the compressed data ends too early")
            parts.append(chunk)
            left, room = b"", room - len(chunk)
        left = stream.unused_data.lstrip(b"\0")  # streams follow each other, with padding between them
    if not parts:
        raise FileFormatError("there are no compressed data")
    return _limited(b"".join(parts), data)


def _limited(expanded: bytes, data: bytes) -> bytes:
    most = most_bytes(len(data))
    if len(expanded) > most:
        raise FileFormatError(f"its {len(data):,} bytes expand to more than {most:,}: unpack it by hand")
    return expanded


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
        declared = f"an array of shape {shape} and {dtype} in {member.file_size:,} bytes"
        raise FileFormatError(f"{member.filename} declares {declared}, which cannot be")
    return shape, dtype


# Sparse matrices and tensors in files: Matrix Market, scipy's npz, DLMC's smtx, FROSTT's tns.
#
# Matrix Market is the NIST exchange format; ``.smtx`` is the pattern format of the Deep Learning Matrix Collection;
# ``.tns`` is the coordinate format of the FROSTT tensor collection. Each may be compressed with gzip or xz.


# Numbers as Python reads them, without underscores; Fortran writes the exponents of doubles behind a D.
COUNT = rb"\+?+\d++"
INTEGER = rb"[-+]?+\d++"
REAL = rb"[-+]?+(?:(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eEdD][-+]?+\d++)?+|(?i:inf(?:inity)?+|nan))"
FIELDS = {
    "real": [REAL],
    "double": [REAL],
    "integer": [INTEGER],
    "unsigned-integer": [COUNT],
    "complex": [REAL, REAL],
    "pattern": [],
}
FORTRAN = bytes.maketrans(b"dD", b"eE")
TEXT_SHOWN = 60  # characters of a wrong line


def _whole(store: Store) -> Any:
    """Read a compressed matrix as CSR with sorted rows."""
    matrix = sp.csr_array(load_store(store))
    matrix.sum_duplicates()
    return matrix


def read(path: Any) -> Any:
    r"""Read a sparse matrix or tensor; the extension says which format the file has.

    Parameters
    ----------
    path : str, Path, h5py.Group, zarr.Group or backed matrix of anndata
        ``.mtx``, ``.npz`` (of ``scipy.sparse.save_npz``, or with arrays coords, values and shape), ``.smtx`` or
        ``.tns``; each also with ``.gz`` or ``.xz`` behind it. X of an ``.h5ad`` or ``.zarr``, a ``.bsp.h5`` of
        Binsparse and folders of ``.npy`` are read whole; `sparsetir.open_blocks` reads them in blocks.

    Returns
    -------
    scipy.sparse.csr_array or CooTensor
        A matrix as CSR with its rows sorted, entries with the same coordinates added up; anything else than two
        dimensions as a list of entries in the order of the file. An npz keeps its dtype, numbers in text are float64
        (integers of Matrix Market int64), and the entries of a ``.smtx``, which has no values, are float32 ones.

    Raises
    ------
    MissingFileError
        When there is no such file; a FileNotFoundError.
    FileFormatError
        When the extension is not known, the contents do not follow the format, or claim to be far larger than the file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "small.smtx")
    ...     _ = path.write_text("2, 3, 2\n0 1 2\n0 2\n")
    ...     read(path).toarray().tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    if is_open(path):
        return _whole(open_store(path))
    path = as_path(path, "path")
    if is_stored(path):
        return _whole(open_store(path))
    if not _is_file(path):
        raise MissingFileError(f"there is no file {path}")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in UNPACKERS else ""
    extension = suffixes[-1] if suffixes else ""
    if extension not in READERS:
        extensions = ", ".join(READERS)
        raise FileFormatError(
            f"{path} has no known extension: expected {extensions}, each also with .gz or .xz behind it"
        )
    try:
        data = contents(path, packing)
    except FileFormatError as error:
        raise FileFormatError(f"{path} is not a readable {extension} file: {error}") from error
    try:
        return READERS[extension](data)
    except SparseTIRError as error:
        raise FileFormatError(f"{path}: {error}") from error
    except Exception as error:  # numpy and scipy raise what they come upon, whatever it is
        raise FileFormatError(f"{path} is not a readable {extension} file: {error or type(error).__name__}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def read_mtx(data: bytes) -> Any:
    """Read a Matrix Market file, coordinate or array, symmetries expanded."""
    if b"\0" in data:  # scipy's parser crashes
        raise FileFormatError("expected text, got a zero byte")
    data += b"\n"  # it reads on where the last line is cut inside a number
    rows, cols, entries, layout, field, _ = scipy.io.mminfo(io.BytesIO(data))
    check_rows(rows, len(data))
    # An entry takes two bytes at least; of a symmetric array half of the elements are there.
    if entries > len(data) or (layout == "array" and rows * cols > 2 * len(data) + 4):
        declared = f"{rows} x {cols} with {entries} entries"
        raise FileFormatError(f"{declared} are declared in {len(data)} bytes, which cannot be")
    if rows * cols == 0 and layout == "array":  # scipy's parser divides by the sizes
        return sp.csr_array((rows, cols), dtype={"integer": np.int64, "complex": np.complex128}.get(field, np.float64))
    return _as_csr(scipy.io.mmread(io.BytesIO(_strict_mtx(data, layout, field))), len(data))


def _strict_mtx(data: bytes, layout: str, field: str) -> bytes:
    """Return a file each of whose lines scipy's parser reads to its end; it ignores what follows a number.

    Raises
    ------
    FileFormatError
        A line is none of the numbers that the banner declares.
    """
    start = _after_sizes(data)
    places = {"coordinate": [COUNT, COUNT], "array": []}[layout]
    expected = ["row", "column"][: len(places)] + {"pattern": [], "complex": ["real part", "imaginary part"]}.get(
        field, [f"{field} value"]
    )
    _check_lines(data, start, [*places, *FIELDS[field]], ", ".join(expected))
    if data.find(b"d", start) < 0 and data.find(b"D", start) < 0 and data.find(b"+", start) < 0:
        return data
    return data[:start] + re.sub(rb"(?m)(^|[ \t])\+", rb"\1", data[start:].translate(FORTRAN))


def _after_sizes(data: bytes) -> int:
    """Where the entries of a Matrix Market file begin, behind the banner, the comments and the sizes."""
    start = _line_end(data, 0)
    banner = data[:start].split()
    if len(banner) != 5 or banner[1].lower() != b"matrix":
        raise FileFormatError(f"line 1: expected a banner of 5 words, of a matrix, got {_shown(data[:start])}")
    while start < len(data):
        end = _line_end(data, start)
        line = data[start:end].strip()
        start = end
        if line and not line.startswith(b"%"):
            break
    return start


def _line_end(data: bytes, start: int) -> int:
    return data.find(b"\n", start) + 1 or len(data)


def _check_lines(data: bytes, start: int, numbers: list[bytes], expected: str, tail: bytes = b"") -> None:
    """Refuse a line from `start` on that is neither empty nor the `numbers` and `tail`."""
    line = rb"[ \t]++".join(numbers)
    lines = re.compile(rb"(?:[ \t]*+(?:" + line + rb"[ \t]*+)?+" + tail + rb"\r?+\n)*+")
    match = lines.match(data, start)
    end = match.end() if match else start
    if end < len(data):
        number, text = data.count(b"\n", 0, end) + 1, data[end : _line_end(data, end)]
        raise FileFormatError(f"line {number}: expected {expected}, got {_shown(text)}")


def _shown(line: bytes) -> str:
    """Return the text of a line, shortened."""
    text = line.decode("ascii", "replace").strip()
    return repr(text if len(text) <= TEXT_SHOWN else f"{text[:TEXT_SHOWN]}...")


def read_npz(data: bytes) -> Any:
    """Read a matrix that scipy saved, or a tensor as arrays coords, values and shape."""
    stream = io.BytesIO(data)
    if not zipfile.is_zipfile(stream):
        raise FileFormatError("expected an npz archive, which is a zip file, got something else")
    with zipfile.ZipFile(stream) as archive:
        heads = check_archive(archive, len(data))
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as arrays:
        names = set(arrays.files)
        for name in heads.keys() & INTEGER_ARRAYS:
            _check_integers(name, *heads[name], arrays)
        if {"coords", "values", "shape"} <= names:
            shape = tuple(arrays["shape"].tolist())
            return _checked_tensor(CooTensor(arrays["coords"], arrays["values"], shape))
    if "format" not in names:
        expected = "those of scipy.sparse.save_npz, or coords, values and shape"
        raise FileFormatError(f"expected arrays {expected}, got {', '.join(sorted(names)) or 'none'}")
    stream.seek(0)
    return _as_csr(sp.load_npz(stream), len(data))


def _check_integers(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], arrays: Any) -> None:
    """Refuse sizes and indices that a cast would change."""
    if dtype.hasobject:
        return  # numpy refuses it
    if dtype.kind not in "iu" and 0 not in shape:
        raise FileFormatError(f"{name}: expected integers, got {dtype}: {arrays[name].ravel()[:4].tolist()}")
    if name == "shape" and len(shape) != 1:
        raise FileFormatError(f"shape: expected one size for each dimension, got an array of shape {shape}")
    if dtype == np.uint64 and 0 not in shape and int(arrays[name].max()) > np.iinfo(np.int64).max:
        raise FileFormatError(f"{name}: expected integers below 2**63, got {arrays[name].max()}")


def read_smtx(data: bytes) -> Any:
    """Read a pattern: a line "rows, columns, nnz", a line of row pointers, a line of column indices."""
    lines = [line.decode("ascii", "replace") for line in data.splitlines()]
    lines += [""] * (3 - len(lines))
    for number, line in enumerate(lines[3:], 4):
        if line.strip():
            raise FileFormatError(f"line {number}: expected three lines, got {_shown(line.encode())}")
    header = _integers(re.sub(r"\s*,\s*|\s+", " ", lines[0].strip()), 1)
    if len(header) != 3 or header.min() < 0:
        raise FileFormatError(f'line 1: expected "rows, columns, nnz", got {lines[0][:60]!r}')
    rows, cols, nnz = (int(n) for n in header)
    indptr, indices = _integers(lines[1], 2), _integers(lines[2], 3)
    if len(indices) != nnz:
        raise FileFormatError(f"line 3: expected {nnz} column indices, got {len(indices)}")
    level = Level("columns", "sparse_variable", sorted=False)
    check_level(level, indptr, indices, parent_count=rows, length=cols, name="the file", need_sorted=False)
    return _as_csr(sp.csr_array((np.ones(nnz, np.float32), indices, indptr), shape=(rows, cols)), len(data))


def read_tns(text: bytes) -> CooTensor:
    """Read a tensor: each line has an entry's coordinates, counted from 1, and its value; # begins a comment."""
    text = _unified(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of a file without entries
            table = np.loadtxt(io.BytesIO(text.translate(FORTRAN)), comments="#", ndmin=2)
    except ValueError as error:
        raise FileFormatError(_bad_line(text) or str(error)) from error
    if table.size == 0:
        raise FileFormatError("the file has no entries, so the tensor's order is not known")
    if table.shape[1] < 2:
        raise FileFormatError(f"line {_line_of(0, text)}: expected coordinates and a value, got a single number")
    coords = table[:, :-1].T
    bad = np.flatnonzero(((coords < 1) | (coords != np.floor(coords)) | (coords >= 1 << 53)).any(axis=0))
    if bad.size:
        coordinates = " ".join(f"{x:g}" for x in coords[:, bad[0]])
        where = f"line {_line_of(bad[0], text)}"
        raise FileFormatError(f"{where}: coordinates must be whole numbers from 1 on, got {coordinates}")
    _check_lines(text, 0, [*[COUNT] * len(coords), REAL], f"{len(coords)} integers and a value", rb"(?:#[^\n]*+)?+")
    extents = coords.max(axis=1).astype(np.int64)
    index_type = np.int32 if extents.max() <= np.iinfo(np.int32).max else np.int64
    return CooTensor((coords - 1).astype(index_type), table[:, -1].copy(), tuple(extents))


def _unified(text: bytes) -> bytes:
    """Return a text whose lines, the last one too, end with a line feed."""
    if b"\r" in text:
        text = b"\n".join(text.splitlines())
    return text if text.endswith(b"\n") else text + b"\n"


def _line_of(entry: int, text: bytes) -> int:
    """Return the line that holds an entry."""
    lines = [n for n, line in enumerate(text.splitlines(), 1) if line.partition(b"#")[0].strip()]
    return lines[entry]


def _bad_line(text: bytes) -> str | None:
    """Describe the first line that has not as many numbers as the first one."""
    expected = None
    for n, line in enumerate(text.decode("ascii", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        expected = expected or len(words)
        if words and len(words) != expected:
            return f"line {n}: expected {expected} numbers like the lines before it, got {len(words)}"
        for word in words:
            if not _is_number(word):
                return f"line {n}: {word!r} is not a number"
    return None


def _is_number(word: str) -> bool:
    try:
        float(word.lower().replace("d", "e").replace("_", "?"))
    except ValueError:
        return False
    return True


def _integers(line: str, number: int) -> Array:
    if not re.fullmatch(r"\s*+(?:[-+]?+\d++(?:\s++|$))*+", line):
        word = next(w for w in line.split() if not re.fullmatch(r"[-+]?\d+", w))
        raise FileFormatError(f"line {number}: expected integers, got {_shown(word.encode())}")
    try:
        return np.array(line.split(), np.int64)
    except (ValueError, OverflowError) as error:
        raise FileFormatError(f"line {number}: expected integers: {error}") from error


def _as_csr(matrix: Any, size: int) -> Any:
    """Return a matrix of any class out of `size` bytes as a valid, sorted csr_array; other orders as a CooTensor."""
    check_rows(matrix.shape[0], size)
    if sp.issparse(matrix) and matrix.format in ("csr", "csc", "bsr"):
        matrix.check_format(full_check=True)  # conversion trusts the indices
        _check_pointers(matrix.indptr, len(matrix.indices))
    if matrix.ndim != 2:
        coo = sp.coo_array(matrix)
        return _checked_tensor(CooTensor(np.stack(coo.coords), coo.data, coo.shape))
    csr = sp.csr_array(matrix)
    _check_values(csr.data)
    csr.sum_duplicates()
    if max(csr.nnz, *csr.shape) <= np.iinfo(np.int32).max:
        csr.indptr, csr.indices = csr.indptr.astype(np.int32, copy=False), csr.indices.astype(np.int32, copy=False)
    return csr


def _check_pointers(indptr: Array, count: int) -> None:
    """Check the row pointers, which scipy leaves out where there are no entries."""
    if indptr[0] != 0 or indptr[-1] > count or (np.diff(indptr) < 0).any():
        raise FileFormatError(f"expected row pointers that rise from 0 to {count}, got {indptr[:8].tolist()}")


def _check_values(values: Array) -> None:
    if values.dtype.kind not in "biufc":
        raise FileFormatError(f"expected values that are numbers, got {values.dtype}")


def _checked_tensor(tensor: CooTensor) -> CooTensor:
    _check_values(tensor.values)
    if min(tensor.shape, default=0) < 0:
        raise FileFormatError(f"expected a shape of sizes that are not negative, got {tensor.shape}")
    extents = np.array(tensor.shape, np.int64)[:, None]
    bad = np.flatnonzero(((tensor.coords < 0) | (tensor.coords >= extents)).any(axis=0))
    if bad.size:
        where = tuple(tensor.coords[:, bad[0]].tolist())
        raise FileFormatError(f"entry {bad[0]} has coordinates {where}, outside the shape {tensor.shape}")
    return tensor


# of an npz: its sizes, offsets and indices
INTEGER_ARRAYS = {"shape", "indptr", "indices", "row", "col", "offsets"}

READERS: dict[str, Callable[[bytes], Any]] = {
    ".mtx": read_mtx,
    ".npz": read_npz,
    ".smtx": read_smtx,
    ".tns": read_tns,
}


__all__ = ["check_archive", "check_rows", "contents"]
