# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices and tensors in files: Matrix Market, scipy's npz, DLMC's smtx, FROSTT's tns.

Matrix Market is the NIST exchange format; ``.smtx`` is the pattern format of the Deep Learning Matrix Collection;
``.tns`` is the coordinate format of the FROSTT tensor collection. Each may be compressed with gzip or xz.
"""

from __future__ import annotations

import gzip
import io
import lzma
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy.io
import scipy.sparse as sp

from sparsetir.errors import FileFormatError, SparseTIRError
from sparsetir.interop import Array, CooTensor, Level, check_level

BAD_CONTENTS = (ValueError, TypeError, LookupError, OverflowError, EOFError, NotImplementedError)
BAD_ARCHIVE = (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


def read(path: str | Path) -> Any:
    """Read a sparse matrix or tensor; the extension says which format the file has.

    Parameters
    ----------
    path : str or Path
        ``.mtx``, ``.npz`` (of ``scipy.sparse.save_npz``, or with arrays coords, values and shape), ``.smtx`` or
        ``.tns``; each also with ``.gz`` or ``.xz`` behind it.

    Returns
    -------
    scipy.sparse.csr_array or CooTensor
        A matrix as CSR with its rows sorted, entries with the same coordinates added up; anything else than two
        dimensions as a list of entries in the order of the file. An npz keeps its dtype, numbers in text are float64
        (integers of Matrix Market int64), and the entries of a ``.smtx``, which has no values, are float32 ones.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    FileFormatError
        When the extension is not known or the contents do not follow the format.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "small.smtx")
    ...     _ = path.write_text("2, 3, 2\\n0 1 2\\n0 2\\n")
    ...     read(path).toarray().tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    unpack = OPENERS[suffixes.pop()] if suffixes and suffixes[-1] in OPENERS else open
    extension = suffixes[-1] if suffixes else ""
    if extension not in READERS:
        known = ", ".join(READERS)
        raise FileFormatError(f"{path} has no known extension: expected {known}, each also with .gz or .xz behind it")
    try:
        with unpack(path, "rb") as stream:
            return READERS[extension](stream)
    except SparseTIRError as error:
        raise FileFormatError(f"{path}: {error}") from error
    except (*BAD_CONTENTS, *BAD_ARCHIVE) as error:
        raise FileFormatError(f"{path} is not a readable {extension} file: {error}") from error


def read_mtx(stream: IO[bytes]) -> Any:
    """A Matrix Market file, coordinate or array, symmetries expanded."""
    return _as_csr(scipy.io.mmread(stream))


def read_npz(stream: IO[bytes]) -> Any:
    """A matrix that scipy saved, or a tensor as arrays coords, values and shape."""
    contents = io.BytesIO(stream.read())
    if not zipfile.is_zipfile(contents):
        raise FileFormatError("expected an npz archive, which is a zip file, found something else")
    contents.seek(0)
    with np.load(contents, allow_pickle=False) as arrays:
        held = set(arrays.files)
        if {"coords", "values", "shape"} <= held:
            return _checked_tensor(CooTensor(arrays["coords"], arrays["values"], tuple(arrays["shape"])))
    if "format" not in held:
        expected = "those of scipy.sparse.save_npz, or coords, values and shape"
        raise FileFormatError(f"expected arrays {expected}; found {', '.join(sorted(held)) or 'none'}")
    contents.seek(0)
    return _as_csr(sp.load_npz(contents))


def read_smtx(stream: IO[bytes]) -> Any:
    """A pattern: a line "rows, columns, nnz", a line of row pointers, a line of column indices."""
    lines = [line.decode("ascii", "replace") for line in stream.read().splitlines()]
    lines += [""] * (3 - len(lines))
    header = _integers(lines[0].replace(",", " "), 1)
    if len(header) != 3 or header.min() < 0:
        raise FileFormatError(f'line 1: expected "rows, columns, nnz", found {lines[0][:60]!r}')
    rows, cols, nnz = (int(n) for n in header)
    indptr, indices = _integers(lines[1], 2), _integers(lines[2], 3)
    if len(indices) != nnz:
        raise FileFormatError(f"line 3: expected {nnz} column indices, found {len(indices)}")
    level = Level("columns", "sparse_variable", sorted=False)
    check_level(level, indptr, indices, parent_count=rows, length=cols, name="the file", need_sorted=False)
    return _as_csr(sp.csr_array((np.ones(nnz, np.float32), indices, indptr), shape=(rows, cols)))


def read_tns(stream: IO[bytes]) -> CooTensor:
    """A tensor: on each line the coordinates of an entry, counted from 1, and its value; # begins a comment."""
    text = stream.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of a file without entries
            table = np.loadtxt(io.BytesIO(text), comments="#", ndmin=2)
    except ValueError as error:
        raise FileFormatError(_bad_line(text) or str(error)) from error
    if table.size == 0:
        raise FileFormatError("the file has no entries, so the tensor's order is not known")
    if table.shape[1] < 2:
        raise FileFormatError(f"line {_line_of(0, text)}: expected coordinates and a value, found a single number")
    coords = table[:, :-1].T
    bad = np.flatnonzero(((coords < 1) | (coords != np.floor(coords)) | (coords >= 1 << 53)).any(axis=0))
    if bad.size:
        found = " ".join(f"{x:g}" for x in coords[:, bad[0]])
        where = f"line {_line_of(bad[0], text)}"
        raise FileFormatError(f"{where}: coordinates must be whole numbers from 1 on, found {found}")
    extents = coords.max(axis=1).astype(np.int64)
    index_type = np.int32 if extents.max() <= np.iinfo(np.int32).max else np.int64
    return CooTensor((coords - 1).astype(index_type), table[:, -1].copy(), tuple(extents))


def _line_of(entry: int, text: bytes) -> int:
    """The line that holds an entry."""
    lines = [n for n, line in enumerate(text.splitlines(), 1) if line.partition(b"#")[0].strip()]
    return lines[entry]


def _bad_line(text: bytes) -> str | None:
    """What is wrong with the first line that is not as many numbers as the first one."""
    expected = None
    for n, line in enumerate(text.decode("ascii", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        expected = expected or len(words)
        if words and len(words) != expected:
            return f"line {n}: expected {expected} numbers like the lines before it, found {len(words)}"
        for word in words:
            if not _is_number(word):
                return f"line {n}: {word!r} is not a number"
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _integers(line: str, number: int) -> Array:
    try:
        return np.array(line.split(), np.int64)
    except (ValueError, OverflowError) as error:
        raise FileFormatError(f"line {number}: expected integers: {error}") from error


def _as_csr(matrix: Any) -> Any:
    """A matrix of any class as a sound, sorted csr_array; other orders as a CooTensor."""
    if sp.issparse(matrix) and matrix.format in ("csr", "csc", "bsr"):
        matrix.check_format(full_check=True)  # conversion trusts the indices
    if matrix.ndim != 2:
        coo = sp.coo_array(matrix)
        return CooTensor(np.stack(coo.coords), coo.data, coo.shape)
    csr = sp.csr_array(matrix)
    csr.sum_duplicates()
    if max(csr.nnz, *csr.shape) <= np.iinfo(np.int32).max:
        csr.indptr, csr.indices = csr.indptr.astype(np.int32, copy=False), csr.indices.astype(np.int32, copy=False)
    return csr


def _checked_tensor(tensor: CooTensor) -> CooTensor:
    extents = np.array(tensor.shape, np.int64)[:, None]
    bad = np.flatnonzero(((tensor.coords < 0) | (tensor.coords >= extents)).any(axis=0))
    if bad.size:
        where = tuple(tensor.coords[:, bad[0]].tolist())
        raise FileFormatError(f"entry {bad[0]} has coordinates {where}, outside the shape {tensor.shape}")
    return tensor


READERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".mtx": read_mtx,
    ".npz": read_npz,
    ".smtx": read_smtx,
    ".tns": read_tns,
}
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
