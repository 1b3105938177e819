# SPDX-License-Identifier: Apache-2.0
"""Chunks of HDF5 and zarr read past their libraries: equal to what these read, damage named, decoded once."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.blocks import reading, results
from sparsetir.errors import FileFormatError
from sparsetir.io import stores
from sparsetir.io.stores import ChunkedArray, Decoder
from sparsetir.utils.memory import MemoryLimitError

h5py = pytest.importorskip("h5py")
HDF5 = [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}]
ZARR = ["none", "blosc", "zstd", "gzip", "zlib", "lz4"]


def in_hdf5(values: Any, path: Path, **options: Any) -> Any:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, **options)
    return h5py.File(path, "r")["x"]


def in_zarr(values: Any, path: Path, codec: str, version: int, step: int) -> Any:
    zarr, numcodecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")
    two = {"blosc": numcodecs.Blosc, "zstd": numcodecs.Zstd, "gzip": numcodecs.GZip, "zlib": numcodecs.Zlib,
           "lz4": numcodecs.LZ4}  # fmt: skip
    three = {"blosc": zarr.codecs.BloscCodec, "zstd": zarr.codecs.ZstdCodec, "gzip": zarr.codecs.GzipCodec}
    makers = two if version == 2 else three
    if codec != "none" and codec not in makers:
        pytest.skip("not in this version")
    array = zarr.create_array(str(path), shape=values.shape, chunks=(step,), dtype=values.dtype, zarr_format=version,
                              compressors=None if codec == "none" else makers[codec]())  # fmt: skip
    array[:] = values
    return zarr.open_array(str(path), mode="r")


def check_ranges(array: Any, values: Any, rng: Any) -> None:
    assert isinstance(array, ChunkedArray)
    assert (array[:] == values).all()
    kept: dict[str, Any] = {}
    begin = 0
    while begin < len(values):  # consecutive ranges, as those of blocks
        out = np.empty(min(int(rng.integers(1, 400)), len(values) - begin), values.dtype)
        for task in array.tasks(out, begin, kept):
            task()
        assert (out == values[begin : begin + len(out)]).all()
        begin += len(out)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float64"])
@pytest.mark.parametrize("options", HDF5, ids=str)
def test_ranges_of_hdf5(options: Any, dtype: str, tmp_path: Path) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        values = rng.integers(0, 100, int(rng.integers(100, 1500))).astype(dtype)
        dataset = in_hdf5(values, tmp_path / f"{seed}.h5", chunks=(int(rng.integers(20, 100)),), **options)
        check_ranges(stores._raw(dataset, dataset.file.filename), values, rng)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("codec", ZARR)
@pytest.mark.filterwarnings("ignore")
def test_ranges_of_zarr(codec: str, version: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, 1234).astype("int32")
    values[300:600] = 0  # chunks of zeros are not stored
    check_ranges(stores._raw(in_zarr(values, tmp_path / "x", codec, version, 97), ""), values, rng)


def test_inflation_without_the_faster_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_decompress", lambda: zlib.decompress)
    values = np.arange(1000)
    dataset = in_hdf5(values, tmp_path / "a.h5", chunks=(64,), compression="gzip", shuffle=True)
    check_ranges(stores._raw(dataset, dataset.file.filename), values, np.random.default_rng(0))


def test_chunks_that_were_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", (1000,), "int32", chunks=(64,), fillvalue=7)
        dataset[200:300] = np.arange(100)
        expected = dataset[:]
    dataset = h5py.File(tmp_path / "a.h5", "r")["x"]
    check_ranges(stores._raw(dataset, str(tmp_path / "a.h5")), expected, np.random.default_rng(0))


def test_what_is_left_to_the_library(tmp_path: Path) -> None:
    values = np.arange(1000)
    for number, options in enumerate([{"compression": "lzf"}, {"fletcher32": True}, {"scaleoffset": 0}]):
        dataset = in_hdf5(values, tmp_path / f"{number}.h5", chunks=(64,), **options)
        assert stores._raw(dataset, dataset.file.filename) is dataset
    with h5py.File(tmp_path / "open.h5", "w") as file:  # what was written need not be on the disk
        dataset = file.create_dataset("x", data=values, chunks=(64,))
        assert stores._raw(dataset, file.filename) is dataset


def compressed(path: Path, A: Any, step: int = 512) -> Path:
    """Write an .h5ad as anndata does with compression."""
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": A.shape})
        for name in ("indptr", "indices", "data"):
            group.create_dataset(name, data=getattr(A, name), chunks=(min(step, len(getattr(A, name))),),
                                 compression="gzip")  # fmt: skip
    return path


def matrix(rows: int = 3000) -> Any:
    return sp.random_array((rows, 150), density=0.1, format="csr", dtype="float32", rng=np.random.default_rng(0))


def test_each_chunk_is_decoded_once_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    A, decoded = matrix(), []
    inflate = stores._inflate
    monkeypatch.setattr(stores, "_inflate", lambda *a, **k: [decoded.append(len(a[1])), inflate(*a, **k)])
    M = sparsetir.open_blocks(compressed(tmp_path / "a.h5ad", A, 8000), memory=400_000)
    B = np.ones((150, 2), "float32")
    plan = M.plan(B)
    decoded.clear()
    np.testing.assert_allclose(M.spmm(B), A @ B, rtol=1e-4)
    assert plan.blocks > -(-A.nnz // 8000)  # a chunk has parts of several blocks
    assert len(decoded) == 2 * -(-A.nnz // 8000)


def test_damaged_chunks_are_named(tmp_path: Path) -> None:
    path = compressed(tmp_path / "a.h5ad", matrix())
    store = sparsetir.open_blocks(path).store
    _, offset, nbytes = store.data.place(5)
    content = bytearray(path.read_bytes())
    content[offset + nbytes // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"a.h5ad:X: .*block \d+, rows \d+ to"):
        sparsetir.open_blocks(path, memory=300_000) @ np.ones((150, 2), "float32")
    with pytest.raises(FileFormatError, match=r"a.h5ad:X: .*These are in rows 0 to \d+"):
        sparsetir.open_blocks(path).plan(np.ones((150, 2), "float32"))
    with open(path, "r+b") as stream:
        stream.truncate(offset + 10)
    store.read(0, 512)
    with pytest.raises(FileFormatError, match=r"expected \d+ bytes from \d+ on, got 10"):
        store.read(512 * 4, 512 * 6)


def test_chunks_are_part_of_the_limit(tmp_path: Path) -> None:
    path = compressed(tmp_path / "a.h5ad", matrix(), 40_000)
    with pytest.raises(MemoryLimitError, match="row pointers, chunks and results take"):
        sparsetir.open_blocks(path, memory=300_000).spmv(np.ones(150, "float32"))


def test_the_first_error_of_threads_is_raised_and_they_end() -> None:
    def fail() -> None:
        raise OSError("no disk")

    decoder, done = Decoder(2), []
    with pytest.raises(OSError, match="no disk"):
        decoder.run([fail, *[lambda: done.append(1)] * 20])
    decoder.close()
    assert decoder.pool is not None
    assert decoder.pool._shutdown


def test_written_chunks_are_read_past_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anndata")
    monkeypatch.setattr(results, "CHUNK", 4096)
    for form in ("a.h5ad", "a.zarr", "a.bsp.h5"):
        store = sparsetir.open_blocks(sparsetir.save_blocks(matrix(), tmp_path / form)).store
        assert isinstance(store.data, ChunkedArray)
        starts = reading.block_starts(store.indptr, 8, 16, 50_000)
        blocks = reading.read_blocks(store, starts, "float32", range(len(starts) - 1))
        assert (np.concatenate([block.data.copy() for block in blocks]) == matrix().data).all()
