# SPDX-License-Identifier: Apache-2.0
"""Compressed sparse matrices on disk whose rows can be read in ranges: folders of .npy, h5ad, zarr, binsparse HDF5."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentTypeError, FileFormatError, MissingFileError, SparseTIRError
from sparsetir.utils.arguments import as_path, package_of
from sparsetir.utils.buffers import empty
from sparsetir.utils.packages import require

Array = np.ndarray[Any, Any]
ENCODINGS = {"csr_matrix": "csr", "csc_matrix": "csc"}
KINDS = "biuf"


@dataclass(frozen=True)
class RawArray:
    """A contiguous array at an offset of a file."""

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
        nbytes = read_bytes(self.path, self.offset + begin * self.dtype.itemsize, values)
        if nbytes < values.nbytes:
            got = max(0, os.path.getsize(self.path) - self.offset) // self.dtype.itemsize
            message = f"expected {self.shape[0]} elements, got {got}. Write the file again"
            raise FileFormatError(f"{self.path}: {message}.")

    def extent(self, begin: int, end: int) -> Place:
        """Return where elements are."""
        size = self.dtype.itemsize
        return self.path, self.offset + begin * size, (end - begin) * size

    @property
    def byte_count(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def read_bytes(path: str, offset: int, values: Array) -> int:
    """Read into a contiguous array from an offset of a file on; return the number of bytes, fewer where it ends."""
    view: memoryview = values.view(np.uint8).data if values.size else memoryview(b"")
    file = os.open(path, os.O_RDONLY)
    try:
        while view:
            count = os.preadv(file, [view], offset)
            if not count:
                break
            view, offset = view[count:], offset + count
    finally:
        os.close(file)
    return values.nbytes - len(view)


def map_bytes(path: str, offset: int, count: int) -> Array | None:
    """Return bytes of a file as a read-only view of its pages in the memory of the system; None where it has them not.

    Pages are mapped when they are first read, and the map ends with the last array that refers to it.
    """
    if not count:
        return np.empty(0, np.uint8)
    skip = offset % mmap.ALLOCATIONGRANULARITY
    try:
        with open(path, "rb", buffering=0) as file:
            # A map behind the end of a file can be made, and reading it ends the process.
            if os.fstat(file.fileno()).st_size < offset + count:
                return None
            pages = mmap.mmap(file.fileno(), skip + count, access=mmap.ACCESS_READ, offset=offset - skip)
    except OSError:  # removed, or on a file system without maps
        return None
    return np.frombuffer(pages, np.uint8, count, skip)


def is_cached(path: str, offset: int) -> bool:
    """Return whether a byte of a file is in the memory of the system; False where that does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        with open(path, "rb", buffering=0) as file:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # that it would wait, that the file system cannot tell, or that there is no file
        return False


Place = tuple[str, int, int]  # file, offset and bytes
Decode = Callable[[Array, Array], None]  # of the bytes of a chunk, into memory of its decoded size


@dataclass(frozen=True)
class ChunkedArray:
    """A vector in chunks of equal length, read and decompressed past h5py and zarr.

    HDF5 decompresses one chunk at a time and keeps Python's lock meanwhile; zarr takes longer for a request than for
    a chunk. Here chunks are decompressed on several threads, beside kernels.

    Parameters
    ----------
    path : str
        For messages.
    shape : tuple of int
    dtype : dtype
    step : int
        Elements of a chunk; the last one is stored in full.
    place : callable
        From the number of a chunk to where it is; None if it is not stored and consists of `fill`.
    decode : callable or None
        None for chunks that are stored as they are.
    fill : scalar
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    step: int
    place: Callable[[int], Place | None]
    decode: Decode | None
    fill: Any

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk that is decoded whole; 0 where any part can be read."""
        return self.step * self.dtype.itemsize if self.decode is not None else 0

    def __getitem__(self, part: slice) -> Array:
        begin, end, _ = part.indices(self.shape[0])
        values = np.empty(max(end - begin, 0), self.dtype)
        for task in self.tasks(values, begin, {}):
            task()
        return values

    def tasks(self, values: Array, begin: int, kept: dict[str, tuple[int, Array]]) -> list[Callable[[], None]]:
        """Return independent steps that fill a contiguous array with the elements from `begin` on.

        Parameters
        ----------
        kept : dict
            The last chunk of which only a part was asked for, by the name of the array; the next range begins in it.
        """
        end = begin + len(values)
        tasks: list[Callable[[], None]] = []
        parts: list[tuple[int, int, Array]] = []
        if self.decode is None:
            return [partial(self._read_runs, values, begin)]
        for number in range(begin // self.step, -(-end // self.step)):
            first = number * self.step
            low, high = max(begin, first), min(end, first + self.step)
            out = values[low - begin : high - begin]
            if high - low < self.step:
                parts.append((number, low - first, out))
            else:
                tasks.append(partial(self._decode, number, out))
        if parts:
            tasks.insert(0, partial(self._fill_parts, parts, kept))
        return tasks

    def extent(self, begin: int, end: int) -> Place | None:
        """Return where elements are; None where they are compressed, or do not lie one behind the other in one file."""
        if self.decode is not None:
            return None
        size, first, last = self.dtype.itemsize, begin // self.step, max(begin, end - 1) // self.step
        places = [self.place(number) for number in range(first, last + 1)]
        if places[0] is None:
            return None
        path, offset, chunk = places[0]
        if any(place != (path, offset + n * chunk, chunk) for n, place in enumerate(places)):
            return None
        return path, offset + (begin - first * self.step) * size, (end - begin) * size

    def _fill_parts(self, parts: list[tuple[int, int, Array]], kept: dict[str, tuple[int, Array]]) -> None:
        for number, skip, out in parts:
            # Taken out meanwhile: a chunk that cannot be decoded is not kept.
            kept_number, chunk = kept.pop("chunk") if kept else (-1, np.empty(self.step, self.dtype))
            if kept_number != number:
                self._decode(number, chunk)
            out[:] = chunk[skip : skip + len(out)]
            kept["chunk"] = number, chunk

    def _decode(self, number: int, out: Array) -> None:
        """Fill memory of the size of a chunk."""
        place = self.place(number)
        if place is None:
            out[:] = self.fill
            return
        raw = np.empty(place[2], np.uint8)
        self._read(place[0], place[1], raw)
        assert self.decode is not None
        self.decode(raw, out.view(np.uint8))

    def _read_runs(self, values: Array, begin: int) -> None:
        """Fill an array from chunks as they are; those that follow each other in a file are read at once."""
        size, low = self.dtype.itemsize, begin
        while low < begin + len(values):
            number, skip = divmod(low, self.step)
            place, count = self.place(number), self.step - skip
            while place is not None and low + count < begin + len(values):
                number += 1
                if self.place(number) != (place[0], place[1] + (skip + count) * size, place[2]):
                    break
                count += self.step
            out = values[low - begin : low - begin + count]
            if place is None:
                out[:] = self.fill
            else:
                self._read(place[0], place[1] + skip * size, out)
            low += len(out)

    def _read(self, path: str, offset: int, out: Array) -> None:
        count = read_bytes(path, offset, out)
        if count < out.nbytes:
            fault = f"{out.nbytes} bytes from {offset} on, got {count}"
            raise FileFormatError(f"{path}: expected {fault}. Write it again.")


class Decoder:
    """Threads that decompress chunks, and the chunks that two ranges share, of one pass over a store."""

    def __init__(self, threads: int = 1) -> None:
        self.kept: dict[str, dict[str, tuple[int, Array]]] = {"indices": {}, "data": {}}
        self.pool = ThreadPoolExecutor(threads, "sparsetir-decoder") if threads > 1 else None

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run independent tasks, and raise the first error of them."""
        if self.pool is None or len(tasks) < 2:
            for task in tasks:
                task()
            return
        for future in [self.pool.submit(task) for task in tasks]:
            future.result()

    def close(self) -> None:
        """End the threads."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


class Buffers:
    """Memory of one block, used again for later ones: fresh pages cost more than reading into them."""

    def __init__(self, decoder: Decoder | None = None) -> None:
        self.arrays: dict[str, Array] = {}
        self.decoder = Decoder() if decoder is None else decoder

    def array(self, name: str, count: int, dtype: Any) -> Array:
        """Return an uninitialised vector in the memory of that name; earlier ones in it end."""
        dtype = np.dtype(dtype)
        memory = self.arrays.get(name)
        if memory is None or memory.size < count * dtype.itemsize:
            memory = self.arrays[name] = empty((count * dtype.itemsize,), np.dtype(np.uint8))
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
    indices, data : RawArray, ChunkedArray, h5py.Dataset or zarr.Array
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

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an entry's two chunks, which are decoded whole; 0 where any part can be read."""
        return sum(int(getattr(array, "chunk_bytes", 0)) for array in (self.indices, self.data))

    def extents(self, begin: int, end: int) -> list[Place]:
        """Return where indices and values of a range of entries are; an empty list where they must be copied."""
        places = []
        for array in (self.indices, self.data):
            place = array.extent(begin, end) if hasattr(array, "extent") else None
            if place is None or not array.dtype.isnative or place[1] % array.dtype.itemsize:
                return []
            places.append(place)
        return places

    def view(self, begin: int, end: int) -> tuple[Array, Array]:
        """Return indices and values of a range that has `extents`, without copying them."""
        indices, data = [map_bytes(*place) for place in self.extents(begin, end)]
        if indices is None or data is None:
            return self.read(begin, end)  # which says why not
        return indices.view(self.indices.dtype), data.view(self.data.dtype)

    def read(self, begin: int, end: int, buffers: Buffers | None = None) -> tuple[Array, Array]:
        """Return indices and values of a range of entries, one read each, in `buffers` where they are given."""
        buffers = Buffers() if buffers is None else buffers
        try:
            tasks: list[Callable[[], None]] = []
            arrays = ("indices", self.indices), ("data", self.data)
            indices, data = [_read(array, begin, end, name, buffers, tasks) for name, array in arrays]
            buffers.decoder.run(tasks)
            return indices, data
        except SparseTIRError:
            raise
        except Exception as error:  # h5py, zarr and codecs raise classes of their own
            raise FileFormatError(f"{self.label}: entries {begin} to {end} cannot be read: {error}.") from error


def _read(array: Any, begin: int, end: int, name: str, buffers: Buffers, tasks: list[Callable[[], None]]) -> Array:
    """Return a range of a vector, which is read when the tasks that are added have run."""
    is_native = end > begin and array.dtype.isnative
    if not is_native or not (hasattr(array, "read_into") or hasattr(array, "read_direct") or hasattr(array, "tasks")):
        return np.asarray(array[begin:end])
    values = buffers.array(name, end - begin, array.dtype)
    if isinstance(array, ChunkedArray):
        tasks.extend(array.tasks(values, begin, buffers.decoder.kept[name]))
    elif isinstance(array, RawArray):
        array.read_into(values, begin)
    else:
        array.read_direct(values, np.s_[begin:end])
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


def _raw(array: Any, path: str) -> Any:
    """Wrap an array so that it is read past h5py and zarr where that is possible, else return it as it is."""
    if package_of(array) == "zarr":
        return _raw_zarr(array) or array
    file = getattr(array, "file", None)
    # What is written to an open file need not be on the disk yet.
    if file is None or not os.path.isfile(path) or file.mode != "r" or file.userblock_size:
        return array
    offset = array.id.get_offset()
    if offset is not None:
        return RawArray(path, int(offset), tuple(array.shape), array.dtype)
    return _raw_hdf5(array, path) or array


DEFLATE, SHUFFLE = 1, 2  # filters of HDF5


def _raw_hdf5(dataset: Any, path: str) -> ChunkedArray | None:
    """Return a chunked dataset whose filters are known here."""
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    is_plain = dataset.chunks is not None and dataset.ndim == 1 and hasattr(dataset.id, "chunk_iter")
    if not is_plain or filters not in ([], [DEFLATE], [SHUFFLE, DEFLATE]):
        return None
    step, places, masks = int(dataset.chunks[0]), {}, set()

    def note(chunk: Any) -> None:
        places[chunk.chunk_offset[0] // step] = path, int(chunk.byte_offset), int(chunk.size)
        masks.add(chunk.filter_mask)

    dataset.id.chunk_iter(note)
    if masks - {0}:  # chunks without some filter
        return None
    width = dataset.dtype.itemsize if SHUFFLE in filters else 1
    decode = partial(_inflate, wbits=zlib.MAX_WBITS, width=width) if filters else None
    return ChunkedArray(path, tuple(dataset.shape), dataset.dtype, step, places.get, decode, dataset.fillvalue)


def _raw_zarr(array: Any) -> ChunkedArray | None:
    """Return an array of a folder of zarr whose codecs are known here."""
    root, metadata = getattr(array.store, "root", None), array.metadata
    codecs = metadata.to_dict().get("codecs")
    if codecs is None:
        compressor = metadata.compressor
        names = [] if compressor is None else [str(getattr(compressor, "codec_id", "?"))]
        is_plain = not metadata.filters
    else:
        names = [str(codec["name"]) for codec in codecs[1:]]
        is_plain = codecs[0]["name"] == "bytes" and metadata.chunk_grid.to_dict()["name"] == "regular"
    decode = _codec(names[0]) if names else None
    is_local = root is not None and os.path.isdir(str(root))
    if not is_local or not is_plain or array.ndim != 1 or len(names) > 1 or (names and decode is None):
        return None
    folder = Path(str(root), array.path)

    def place(number: int) -> Place | None:
        chunk = folder / metadata.encode_chunk_key((number,))
        try:
            return str(chunk), 0, chunk.stat().st_size
        except FileNotFoundError:
            return None

    fill = 0 if array.fill_value is None else array.fill_value
    return ChunkedArray(str(folder), tuple(array.shape), array.dtype, int(array.chunks[0]), place, decode, fill)


def _codec(name: str) -> Decode | None:
    """Return the decoder of a codec of zarr."""
    if name in ("gzip", "zlib"):
        return partial(_inflate, wbits=zlib.MAX_WBITS + (16 if name == "gzip" else 0), width=1)
    if name not in ("blosc", "zstd", "lz4"):
        return None
    numcodecs = require("numcodecs", extra="blocks", purpose="reading zarr")
    return partial(_decode, numcodecs.get_codec({"id": name}))


def _decode(codec: Any, raw: Array, out: Array) -> None:
    codec.decode(raw, out)


def _inflate(raw: Array, out: Array, wbits: int, width: int) -> None:
    """Decompress into `out`; first bytes of elements of `width` bytes come first, then second ones."""
    values = np.frombuffer(_decompress()(raw, wbits, out.nbytes), np.uint8)
    if values.size != out.size:
        raise ValueError(f"expected {out.size} bytes of a chunk, got {values.size}")
    out.reshape(-1, width)[:] = values.reshape(width, -1).T


@cache
def _decompress() -> Callable[..., bytes]:
    """Return zlib's function, or the one of the package isal, which takes half of the time."""
    try:
        from isal.isal_zlib import decompress
    except ImportError:
        return zlib.decompress
    return decompress


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


__all__ = [
    "Array",
    "Buffers",
    "ChunkedArray",
    "Decoder",
    "RawArray",
    "Store",
    "is_open",
    "is_stored",
    "load_store",
    "open_store",
    "raw_npy",
]
