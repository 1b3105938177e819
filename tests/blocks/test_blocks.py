# SPDX-License-Identifier: Apache-2.0
"""Matrices on disk: products equal to those in memory, within a limit, continued after an end, damaged files named."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from quick_code import quickly
from sparsetir.blocks import reading, results
from sparsetir.blocks.products import LANCZOS_RATIO, _largest, by_passes
from sparsetir.errors import ArgumentError, ArgumentTypeError, FileFormatError, WriteError
from sparsetir.io import stores
from sparsetir.io.stores import RawArray
from sparsetir.utils.memory import MemoryLimitError

FORMS = ["folder", "a.h5ad", "a.zarr", "a.bsp.h5"]


def matrix(format: str = "csr", shape: tuple[int, int] = (3000, 150), dtype: str = "float32") -> Any:
    A = sp.random_array(shape, density=0.1, format=format, dtype="float64", rng=np.random.default_rng(0))
    A.data = np.ceil(10 * A.data)
    return A.astype(dtype)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-3)


def small(A: Any, path: Path, memory: int | None = None) -> Any:
    """Open a saved matrix with a limit of about a third of its size, so that it has several blocks."""
    return sparsetir.open_blocks(sparsetir.save_blocks(A, path, rows=700), memory=memory or A.nnz * 3)


@pytest.mark.parametrize("format", ["csr", "csc"])
@pytest.mark.parametrize("form", FORMS)
def test_products_equal_those_in_memory(
    form: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "CHUNK", 4096)
    pytest.importorskip({"h5ad": "anndata", "zarr": "zarr", "h5": "h5py"}.get(form.rpartition(".")[2], "numpy"))
    rng, A = np.random.default_rng(1), matrix(format)
    D = A.toarray().astype("float64")
    M = small(A, tmp_path / form, 700_000)
    B, Y = rng.random((150, 9), "float32"), rng.random((3000, 4), "float32")
    plan = M.plan(B)
    assert (M.shape, M.nnz, M.dtype, M.store.format) == (A.shape, A.nnz, A.dtype, format)
    assert plan.bytes_read == plan.passes * A.nnz * 8
    close(M.spmm(B), D @ B)
    close(M @ B[:, 0], D @ B[:, 0])
    close(M.rmatmul(Y), D.T @ Y)
    np.testing.assert_allclose(M.colsums(), D.sum(axis=0))
    np.testing.assert_allclose(M.colvars(ddof=1), D.var(axis=0, ddof=1))
    close(M.gram(center=True), (D - D.mean(axis=0)).T @ (D - D.mean(axis=0)))
    X2, Y2 = rng.random((3000, 3), "float32"), rng.random((150, 3), "float32")
    close(M.sddmm(X2, Y2).toarray(), D * (X2 @ Y2.T))
    assert (sparsetir.read(tmp_path / form) != A.tocsr()).nnz == 0


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float16", "float64"])
def test_values_of_every_dtype_are_multiplied(dtype: str, tmp_path: Path) -> None:
    A = matrix("csr", (400, 50), "float32")
    A = (A.astype(dtype) if dtype != "float16" else A) if dtype != "bool" else A.astype(bool)
    B = np.random.default_rng(1).random((50, 3))
    close(small(A, tmp_path / "a", 1 << 20) @ B, A.toarray().astype("float64") @ B)


@pytest.mark.parametrize("format", ["csr", "csc"])
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64"])
def test_entries_with_the_same_coordinates_are_added_up(format: str, dtype: str, tmp_path: Path) -> None:
    rng, kind = np.random.default_rng(3), sp.csr_array if format == "csr" else sp.csc_array
    lines, extent = (200, 30) if format == "csr" else (30, 200)
    indices = rng.integers(0, extent, 6 * lines).astype(np.int32)  # in any order, some of a line twice
    values = rng.integers(1, 120, 6 * lines).astype(dtype)
    A = kind((values, indices, np.arange(0, 6 * lines + 1, 6, dtype=np.int32)), shape=(200, 30))
    D = A.astype("float64").toarray()
    M = sparsetir.open_blocks(sparsetir.save_blocks(A, tmp_path / "A", rows=50), memory=1 << 16)
    B = rng.random((30, 4))
    np.testing.assert_allclose(M.colsums(), D.sum(axis=0))
    np.testing.assert_allclose(M.colvars(), D.var(axis=0))
    close(M @ B, D @ B)
    close(M.gram(), D.T @ D)
    close(M.sum(axis=1), D.sum(axis=1))


def test_edges(tmp_path: Path) -> None:
    for number, shape in enumerate([(0, 5), (5, 0), (7, 3), (1, 1)]):
        A = sp.csr_array(shape, dtype="float32")
        M = sparsetir.open_blocks(sparsetir.save_blocks(A, tmp_path / str(number)))
        assert (M @ np.ones((shape[1], 2), "float32")).tolist() == np.zeros((shape[0], 2)).tolist()
        assert M.rmatmul(np.ones((shape[0], 2), "float32")).tolist() == np.zeros((shape[1], 2)).tolist()
        assert M.gram().tolist() == np.zeros((shape[1], shape[1])).tolist()


def test_a_limit_makes_blocks_and_panels(tmp_path: Path) -> None:
    A = matrix("csr", (2000, 2000))
    M = small(A, tmp_path / "a", 600_000)
    B = np.random.default_rng(1).random((2000, 64), "float32")
    assert M.plan(B, out="C.npy").passes == 1  # kernels take it as it is
    close(np.load(M.spmm(B, out=tmp_path / "C.npy")), A @ B)
    B = np.asfortranarray(B)
    plan = M.plan(B, out="C.npy")
    assert plan.blocks > 10
    assert plan.passes > 1
    assert plan.panel * 2000 * 4 < 600_000
    assert "passes" in str(plan)
    close(np.load(M.spmm(B, out=tmp_path / "C.npy")), A @ B)
    with pytest.raises(MemoryLimitError, match=r"Raise memory= or pass out=") as error:
        M.spmm(np.ones((2000, 600), "float32"))
    assert isinstance(error.value, MemoryError)


def test_no_more_entries_are_in_memory_than_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    A = matrix("csr", (4000, 300))
    sizes: list[int] = []
    read, view = RawArray.read_into, stores.map_bytes

    def counted(self: Any, values: Any, begin: int) -> None:
        read(self, values, begin)
        sizes.append(values.nbytes)

    def counted_view(path: str, offset: int, count: int) -> Any:
        sizes.append(count)
        return view(path, offset, count)

    for name, B in {"mapped": np.ones((300, 8), "float32"), "copied": np.ones((300, 32), "float32")}.items():
        M = small(A, tmp_path / name, 500_000)
        plan = M.plan(B, out="C.npy")
        with monkeypatch.context() as patch:
            patch.setattr(RawArray, "read_into", counted)
            patch.setattr(stores, "map_bytes", counted_view)
            M.spmm(B, out=tmp_path / "C.npy")
        assert sum(sizes) >= A.nnz * 8
        assert len(sizes) <= 2 * plan.blocks + 2  # one read of the indices of a block, one of its values
        assert max(a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)) * reading.BUFFERS < 500_000
        sizes.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the maps of a process of Linux")
@pytest.mark.parametrize("form", ["a", "a.bsp.h5"])
def test_pages_of_a_file_are_mapped_for_one_block_at_a_time(form: str, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    A = matrix("csr", (4000, 300))
    M = small(A, tmp_path / form, 500_000)
    store, plan = M.store, M.plan(np.ones(300, "float32"))

    def mapped() -> int:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        return sum(int(end, 16) - int(begin, 16) for begin, end in (line[0].split("-") for line in lines))

    most, before = 0, mapped()  # a file of HDF5 is open
    assert reading.is_in_place(store, plan.starts, store.data.dtype, range(plan.blocks))
    for block in reading.read_blocks(store, plan.starts, "float32", range(plan.blocks), is_narrow=True):
        most = max(most, mapped())
        part = sp.csr_array((block.data, block.indices, block.indptr), shape=(block.end - block.begin, 300))
        assert (part != A[block.begin : block.end]).nnz == 0
    del block, part
    assert plan.blocks > 10
    assert 0 < most < A.nnz
    assert mapped() == before


@pytest.mark.skipif(sys.platform != "linux", reason="a file that ends under a map")
def test_a_file_that_was_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    A = matrix("csr", (4000, 300))
    M = small(A, tmp_path / "a", 500_000)
    blocks = reading.read_blocks(M.store, M.plan(np.ones(300, "float32")).starts, "float32", range(4), is_narrow=True)
    next(blocks)
    os.truncate(tmp_path / "a" / "data.npy", 1000)
    with pytest.raises(FileFormatError, match=r"data.npy: expected 120000 elements, got 218\. .* block 1, rows"):
        next(blocks)


def test_a_file_that_was_removed_is_named(tmp_path: Path) -> None:
    M = small(matrix(), tmp_path / "a", 500_000)
    (tmp_path / "a" / "data.npy").unlink()
    for product in (lambda: M.spmv(np.ones(150, "float32")), lambda: M @ np.ones((150, 32), "float32")):
        with pytest.raises(FileFormatError, match=r"cannot be read: .*data.npy.* block 0, rows"):
            product()


def test_results_that_exist_are_not_written_again(tmp_path: Path) -> None:
    A, rng = matrix(), np.random.default_rng(1)
    M = small(A, tmp_path / "a", 2_000_000)
    x, y = rng.random((4, 150), "float32"), rng.random((4, 3000), "float32")
    calls = [lambda n: M.spmv(x[n]), lambda n: M.rmatmul(y[n]), lambda n: (M @ x[:, :, None][n]).T[0]]
    expected = [lambda n: A @ x[n], lambda n: A.T @ y[n], lambda n: A @ x[n]]
    found = [[call(n) for call in calls] for n in range(4)]  # views, of which each holds its memory
    for n, results_of in enumerate(found):
        for result, right in zip(results_of, expected, strict=True):
            close(result, right(n))


def test_parts_that_lie_in_one_piece_are_found(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    values, rng = np.arange(5000, dtype="int32"), np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        one, two = (file.create_dataset(n, shape=(5000,), chunks=(100,), dtype="int32") for n in "ab")
        for begin in (*range(0, 2500, 100), *range(4900, 2400, -100)):  # in another order than in the vector
            one[begin : begin + 100] = values[begin : begin + 100]
            two[begin : begin + 100] = -values[begin : begin + 100]
    with h5py.File(tmp_path / "a.h5") as file:
        array = stores._raw(file["b"], str(tmp_path / "a.h5"))
        found = 0
        for begin, count in rng.integers(1, 300, (200, 2)) * (16, 1):
            place = array.extent(begin, min(begin + count, 5000))
            if place is not None:
                found += 1
                assert stores.map_bytes(*place).view("int32").tolist() == (-values[begin : begin + count]).tolist()
        assert 0 < found < 200


KILLED = """
    import os, signal, sys, numpy as np, sparsetir
    from sparsetir.blocks import products, results
    results.SYNC_SECONDS, results.ZARR_CHUNK_BYTES = 0, 9000
    multiply, calls = products.multiply, []
    def dying(block, B, out):
        calls.append(block.number)
        if len(calls) > int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return multiply(block, B, out)
    products.multiply = dying
    M = sparsetir.open_blocks("A", memory=500_000)
    M.spmm(np.load("B.npy"), out=sys.argv[2])
    print(len(calls))
"""


SUMMED = """
    import os, signal, sys, numpy as np, sparsetir
    from sparsetir.blocks import products, results
    results.CHECKPOINT_SECONDS = results.CHECKPOINT_RATIO = 0
    name = "add_gram" if sys.argv[2] == "gram" else "multiply_transposed"
    compute, calls = getattr(products, name), []
    def dying(block, *arguments):
        calls.append(block.number)
        if len(calls) > int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(block, *arguments)
    setattr(products, name, dying)
    M = sparsetir.open_blocks("A", memory=1_000_000)
    M.gram(center=True, out="C.npy") if sys.argv[2] == "gram" else M.rmatmul(np.load("B.npy"), out="C.npy")
    print(calls[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["gram", "rmatmul"])
def test_killed_sums_are_continued(operation: str, tmp_path: Path) -> None:
    A = matrix("csr", (9000, 150))
    sparsetir.save_blocks(A, tmp_path / "A")
    B = np.random.default_rng(1).random((9000, 8), "float32")
    np.save(tmp_path / "B.npy", B)

    def run(blocks: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", quickly(SUMMED), str(blocks), operation]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    assert run(2).returncode == -signal.SIGKILL
    assert not (tmp_path / "C.npy").exists()
    last = run(10_000)
    assert last.returncode == 0, last.stderr
    dense = A.toarray().astype("float64")
    expected = dense.T @ B if operation == "rmatmul" else (dense - dense.mean(0)).T @ (dense - dense.mean(0))
    np.testing.assert_allclose(np.load(tmp_path / "C.npy"), expected, rtol=1e-4, atol=1e-4)
    assert int(last.stdout) == 2  # the first block that was not summed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["A", "B.npy", "C.npy"]


@pytest.mark.slow
@pytest.mark.parametrize("out", ["C.npy", "C.zarr", "group.zarr/obsm/C"])
def test_a_killed_run_is_continued(out: str, tmp_path: Path) -> None:
    A = matrix("csr", (6000, 150))
    sparsetir.save_blocks(A, tmp_path / "A")
    B = np.random.default_rng(1).random((150, 8), "float32")
    np.save(tmp_path / "B.npy", B)
    if out != "C.npy":
        zarr = pytest.importorskip("zarr")
        zarr.open_group(str(tmp_path / "group.zarr"), mode="w").create_group("obsm")
        zarr.consolidate_metadata(str(tmp_path / "group.zarr"))
    before = {path.name for path in tmp_path.iterdir()}

    def run(blocks: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-c", quickly(KILLED), str(blocks), out]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    assert run(3).returncode == -signal.SIGKILL
    assert not (tmp_path / out).exists()
    stem = out.replace("/", ".")
    finished = (tmp_path / f"{stem}.progress").read_text().splitlines()[1:]
    assert finished in (["0:0", "0:1"], ["0:0", "0:1", "0:2"])  # the third was being written
    done = run(10**6)
    assert done.returncode == 0, done.stderr
    blocks = sparsetir.open_blocks(tmp_path / "A", memory=500_000).plan(B, out="C.npy").blocks
    assert int(done.stdout) == blocks - len(finished)
    close(np.load(tmp_path / out) if out == "C.npy" else zarr.open_array(str(tmp_path / out))[:], A @ B)
    assert {path.name for path in tmp_path.iterdir()} == before | {Path(out).parts[0]}
    if out.startswith("group"):
        assert "C" in zarr.open_consolidated(str(tmp_path / "group.zarr"))["obsm"]


def test_a_part_that_cannot_be_written_is_raised_and_the_threads_end(tmp_path: Path) -> None:
    M = small(matrix(), tmp_path / "a", 500_000)
    before, writes = threading.active_count(), []

    def failing(self: Any, begin: int, values: Any, columns: Any = None) -> None:
        writes.append(begin)
        if len(writes) == 3:
            raise WriteError("out: the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results.NpyResult, "write", failing)
        with pytest.raises(WriteError, match="disk is full"):
            M.spmm(np.ones((150, 2), "float32"), out=tmp_path / "C.npy")
    assert len(writes) == 3
    assert threading.active_count() == before
    assert (tmp_path / "C.npy.progress").read_text().splitlines()[1:] == ["0:0", "0:1"]
    close(np.load(M.spmm(np.ones((150, 2), "float32"), out=tmp_path / "D.npy")), matrix() @ np.ones((150, 2)))


def test_what_cannot_be_a_result_is_named(tmp_path: Path) -> None:
    M = small(matrix(), tmp_path / "a", 1 << 20)
    (tmp_path / "C.zarr").mkdir()
    for out, message in [("C.h5ad", "damaged by the end of a process"), ("C.zarr", "expected a new name"),
                         ("C", "expected a .npy file"), ("no.zarr/C", "expected a .npy file")]:  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            M.spmm(np.ones((150, 2), "float32"), out=tmp_path / out)


def test_panels_of_columns_are_written_to_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    A = matrix("csr", (2000, 2000))
    M = small(A, tmp_path / "a", 600_000)
    B = np.asfortranarray(np.random.default_rng(1).random((2000, 64), "float32"))
    assert M.plan(B, out="C.zarr").passes > 1
    close(zarr.open_array(str(M.spmm(B, out=tmp_path / "C.zarr")))[:], A @ B)


def test_parts_of_another_job_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SYNC_SECONDS", 0)
    A = matrix()
    M = small(A, tmp_path / "a", 500_000)
    one, two = np.ones((150, 4), "float32"), np.full((150, 4), 2, "float32")
    write = results.NpyResult.write

    def interrupted(self: Any, begin: int, *arguments: Any) -> None:
        if begin:
            raise KeyboardInterrupt
        write(self, begin, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(results.NpyResult, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            M.spmm(one, out=tmp_path / "C.npy")
    assert (tmp_path / "C.npy.partial").exists()
    assert not (tmp_path / "C.npy").exists()
    close(np.load(M.spmm(two, out=tmp_path / "C.npy")), A @ two)


@pytest.mark.parametrize(
    ("part", "damage", "message"),
    [
        ("data", lambda a: a[:-5], r"expected \d+ elements of data, got \d+: it ends in row 299\d"),
        ("indices", lambda a: np.where(np.arange(len(a)) == len(a) // 2, 999, a), r"got 999 in block \d+, rows \d+"),
        ("indices", lambda a: np.where(np.arange(len(a)) == 3, -1, a), r"got -1 in block 0, rows 0 to"),
        ("indices", lambda a: a.astype("float32"), r"vector of integers"),
        ("indptr", lambda a: np.where(np.arange(len(a)) == 70, 0, a), r"fall in row 69"),
        ("indptr", lambda a: a[:-1], r"expected 3001 pointers"),
        ("data", lambda a: a.astype("complex64"), r"got complex64"),
        ("shape", lambda a: a[:1], r"expected two sizes"),
    ],
)
def test_damage_is_named(part: str, damage: Any, message: str, tmp_path: Path) -> None:
    sparsetir.save_blocks(matrix(), tmp_path / "a")
    file = tmp_path / "a" / f"{part}.npy"
    np.save(file, damage(np.load(file)))
    with pytest.raises(FileFormatError, match=message):
        sparsetir.open_blocks(tmp_path / "a", memory=500_000).spmm(np.ones((150, 2)), out=tmp_path / "C.npy")
    assert not (tmp_path / "C.npy").exists()


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    sparsetir.save_blocks(matrix(), tmp_path / "a")
    M = sparsetir.open_blocks(tmp_path / "a", memory=500_000)
    os.truncate(tmp_path / "a" / "data.npy", 50_000)
    with pytest.raises(FileFormatError, match=r"data.npy: expected 45000 elements.* block \d+, rows"):
        M.spmm(np.ones((150, 2)))
    with pytest.raises(FileFormatError, match="complete array"):
        sparsetir.open_blocks(tmp_path / "a")


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ArgumentError, match="expected a new name"):
        sparsetir.save_blocks(matrix(), tmp_path / "a")

    def failing() -> Iterator[Any]:
        yield matrix()
        raise OSError("no more input")

    with pytest.raises(OSError, match="no more input"):
        sparsetir.save_blocks(failing(), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_principal_components_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    A = sp.csr_array(np.where(rng.random((800, 60)) < 0.3, rng.random((800, 4)) @ rng.random((4, 60)), 0))
    M = small(A, tmp_path / "a", 1 << 20)
    D = A.toarray() - A.toarray().mean(axis=0)
    values = np.linalg.svd(D, compute_uv=False)[:5]
    vectors = np.linalg.svd(D)[2][:5]
    exact = M.pca(5)
    monkeypatch.setattr("sparsetir.blocks.matrix.MAX_GRAM_FEATURES", 0)
    passes = M.pca(5)
    for p in (exact, passes):
        np.testing.assert_allclose(p.singular_values_, values, rtol=1e-6)
        np.testing.assert_allclose(np.abs(p.components_ @ vectors.T), np.eye(5), atol=1e-3)
        np.testing.assert_allclose(p.explained_variance_ratio_, values**2 / (D**2).sum(), rtol=1e-6)
        np.testing.assert_allclose(p.transform(M), D @ p.components_.T, atol=1e-8)


@pytest.mark.parametrize("make", [sp.csr_array, sp.csc_array])
@pytest.mark.parametrize("shape", [(50, 7), (1, 1), (0, 3)])
def test_sums_and_means(make: Any, shape: tuple[int, int], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    D = np.where(rng.random(shape) < 0.4, rng.random(shape), 0)
    M = small(make(D), tmp_path / "a", 1 << 20)
    for axis in (None, 0, 1, -1, -2):
        np.testing.assert_allclose(M.sum(axis), D.sum(axis), atol=1e-12)
        if D.size:
            np.testing.assert_allclose(M.mean(axis), D.mean(axis), atol=1e-12)
    with pytest.raises(ArgumentError, match="axis: expected 0, 1 or None, got 2"):
        M.sum(2)
    for axis in (np.array([0, 1]), np.array(0), (0, 1), "rows", 1.5, True):
        for reduce in (M.sum, M.mean):
            with pytest.raises(ArgumentTypeError, match="axis: expected 0, 1 or None, got"):
                reduce(axis)
    np.testing.assert_allclose(M.sum(np.int64(1)), D.sum(1), atol=1e-12)
    for call in (lambda: M @ sp.eye_array(shape[1]), lambda: sp.eye_array(shape[0]) @ M, lambda: M.spmm(make(D).T)):
        with pytest.raises(ArgumentTypeError, match="expected a dense array, got a sparse"):
            call()


def test_components_of_nearly_equal_variances_come_with_a_warning() -> None:
    A = np.random.default_rng(1).standard_normal((400, 300))
    for scale, is_exact in ((1.0, False), (0.7, True)):
        gram = A.T @ A * np.outer(scale ** np.arange(300), scale ** np.arange(300))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = by_passes(lambda Q, gram=gram: gram @ Q, float(np.trace(gram)), np.zeros(300), 400, 4)
        np.testing.assert_allclose(found.singular_values_, np.sqrt(np.linalg.eigvalsh(gram)[:-5:-1]), rtol=1e-6)
        assert [("exact to" in str(w.message)) for w in caught] == [True] * (not is_exact)


@pytest.mark.parametrize("kind", range(4))
def test_largest_eigenvalues_equal_those_of_all(kind: int) -> None:
    """Also those that occur several times, of which Lanczos' method may miss some."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        n, k = 200, int(rng.integers(1, 200 // LANCZOS_RATIO + 1))
        few = np.repeat(rng.random(n // 4), 4)
        values = [rng.integers(0, 4, n) * 1.0, rng.random(n), np.where(np.arange(n) < k, 1.0, 0.0), few][kind]
        basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
        gram = (basis * values) @ basis.T
        actual, vectors = _largest(gram, k)
        np.testing.assert_allclose(actual, np.sort(values)[-k:], atol=1e-9)
        np.testing.assert_allclose(gram @ vectors, vectors * actual, atol=1e-9)


@pytest.mark.parametrize("memory", [200_000, 10_000_000])
def test_a_graph_network_equals_the_one_in_memory(memory: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    A = matrix("csr", (500, 500))
    M = small(A, tmp_path / "a", memory)
    X, W, V = (rng.random(s, "float32") - np.float32(0.5) for s in ((500, 20), (20, 30), (30, 4)))
    expected = A @ (np.maximum(A @ (X @ W), 0) @ V)
    close(np.load(M.gcn([W, V], X, out=tmp_path / "H.npy")) / 100, expected / 100)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "H.npy"}


def test_sampled_products_are_written_to_a_folder(tmp_path: Path) -> None:
    A, rng = matrix(), np.random.default_rng(1)
    X, Y = rng.random((3000, 6), "float32"), rng.random((150, 6), "float32")
    S = sparsetir.open_blocks(small(A, tmp_path / "a", 500_000).sddmm(X, Y, out=tmp_path / "S"))
    ones = sparsetir.open_blocks(tmp_path / "S").spmm(np.eye(150, dtype="float32"))
    close(ones, A.toarray() * (X @ Y.T))
    assert S.nnz == A.nnz


@pytest.mark.parametrize(("form", "format"), [("S.h5ad", "csr"), ("S.bsp.h5", "csc"), ("S.zarr", "csc")])
def test_sampled_products_are_written_in_other_forms(form: str, format: str, tmp_path: Path) -> None:
    pytest.importorskip({"h5ad": "anndata", "zarr": "zarr", "h5": "h5py"}[form.rpartition(".")[2]])
    A, rng = matrix(format), np.random.default_rng(1)
    X, Y = rng.random((3000, 6), "float32"), rng.random((150, 6), "float32")
    small(A, tmp_path / "a", 700_000).sddmm(X, Y, out=tmp_path / form)
    close(sparsetir.read(tmp_path / form).toarray(), A.toarray() * (X @ Y.T))
    assert {path.name for path in tmp_path.iterdir()} == {"a", form}


def test_backed_matrices_of_anndata_are_taken(tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata")
    A = matrix()
    adata = anndata.AnnData(sp.csr_matrix(A), layers={"twice": sp.csc_matrix(2 * A)})
    adata.write_h5ad(tmp_path / "a.h5ad", compression="gzip")
    B = np.ones((150, 2), "float32")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    close(sparsetir.open_blocks(backed.X, memory=500_000) @ B, A @ B)
    close(sparsetir.open_blocks(tmp_path / "a.h5ad", "layers/twice", memory=700_000) @ B, 2 * (A @ B))
    with pytest.raises(FileFormatError, match=r"It has .*layers/twice"):
        sparsetir.open_blocks(tmp_path / "a.h5ad", "layers/thrice")


def test_a_matrix_is_pickled_as_its_path(tmp_path: Path) -> None:
    M = small(matrix(), tmp_path / "a")
    text = pickle.dumps(M)
    assert len(text) < 1000
    assert (pickle.loads(text).shape, pickle.loads(text).memory) == (M.shape, M.memory)
    assert pickle.loads(pickle.dumps(M.T)).shape == M.shape[::-1]


def on_disk(A: Any, path: Path, kind: str) -> Any:
    """A matrix in one of the classes that other libraries have for it."""
    sparsetir.save_blocks(A, path)
    if kind == "blocks":
        return sparsetir.open_blocks(path)
    h5py = pytest.importorskip("h5py")
    group = h5py.File(path)["X"]
    return group if kind == "h5py" else pytest.importorskip("anndata").io.sparse_dataset(group)


@pytest.mark.parametrize("kind", ["blocks", "h5py", "anndata"])
def test_front_doors_take_matrices_on_disk(kind: str, tmp_path: Path) -> None:
    rng, A = np.random.default_rng(1), matrix("csr", (300, 40))
    M = on_disk(A, tmp_path / "a.h5ad", kind)
    B, Y = rng.random((40, 3), "float32"), rng.random((300, 3), "float32")
    close(sparsetir.matmul(M, B), A @ B)
    close(sparsetir.matmul(Y.T, M), Y.T @ A)
    for text, others, expected in [
        ("ij,jk->ik", [B], A @ B),
        ("ij,jk", [B], A @ B),
        ("ij,ik->kj", [Y], Y.T @ A),
        ("ij,j->i", [B[:, 0]], A @ B[:, 0]),
        ("ij->i", [], A.sum(axis=1)),
        ("ij->j", [], A.sum(axis=0)),
    ]:
        close(sparsetir.einsum(text, M, *others), expected)
    close(sparsetir.einsum("ik,ij,jk->ij", Y, M, B).toarray(), A.toarray() * (Y @ B.T))
    assert (sparsetir.read(M if kind != "blocks" else tmp_path / "a.h5ad") != A).nnz == 0
    with pytest.raises(ArgumentError, match="Read the matrix whole"):
        sparsetir.einsum("ij,ij->ij", M, A.toarray())
    with pytest.raises(ArgumentError, match="read the matrix"):
        sparsetir.matmul(M, B, top=2)
    with pytest.raises(ArgumentError, match="one operand in memory"):
        sparsetir.matmul(M, M)


def test_a_matrix_on_disk_has_the_operators_of_one_in_memory(tmp_path: Path) -> None:
    A = matrix("csr", (300, 40))
    M = small(A, tmp_path / "a", 1 << 20)
    Y = np.random.default_rng(1).random((300, 3), "float32")
    close(Y.T @ M, Y.T @ A)
    close(M.T @ Y, A.T @ Y)
    close(M.T.T @ np.ones(40, "float32"), A.sum(axis=1))
    stored = sparsetir.SparseTensor.from_any(on_disk(A, tmp_path / "b.h5ad", "anndata"))
    assert (stored.idtype, (stored.to_scipy() != A).nnz) == ("int32", 0)
    assert sparsetir.read(tmp_path / "b.h5ad/X").shape == A.shape


LIMITED = """
    import json, numpy as np, sparsetir
    from sparsetir.utils.memory import added
    M = sparsetir.open_blocks("A", memory=16 << 20)
    B, Y = np.ones((200, 16), "float32"), np.ones((M.shape[0], 2), "float32")
    calls = {
        "spmm": lambda M: M.spmm(B, out=f"{M.path}-C.npy"),
        "rmatmul": lambda M: M.rmatmul(Y[: M.shape[0]]),
        "gram": lambda M: M.gram(center=True),
        "pca": lambda M: M.pca(5),
    }
    peaks = {}
    for name, call in calls.items():
        call(M)  # compiles, some kernels after a few calls
        peaks[name] = added(lambda: call(M))
    print(json.dumps(peaks))
"""


@pytest.mark.slow
def test_the_memory_limit_is_obeyed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    part = sp.random_array((20_000, 200), density=0.1, format="csr", dtype="float32", rng=rng)
    sparsetir.save_blocks((part for _ in range(12)), tmp_path / "A")
    size = sum(file.stat().st_size for file in (tmp_path / "A").iterdir())
    assert size > 2 * (16 << 20)
    command = [sys.executable, "-c", quickly(LIMITED)]
    environment = {**os.environ, "TVM_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    if None in peaks.values():
        pytest.skip("the system does not tell the peak of resident memory")
    # Allocators round up: what is left of their pages varies by half a megabyte from run to run.
    assert all(peak < 17 << 20 for peak in peaks.values()), peaks


@pytest.mark.slow
def test_nothing_of_it_is_imported_unless_used() -> None:
    optional = ["h5py", "zarr", "anndata", "dask", "pandas"]
    code = f"import sys, sparsetir; sparsetir.open_blocks; print([m for m in {optional} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
