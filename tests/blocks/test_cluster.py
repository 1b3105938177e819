# SPDX-License-Identifier: Apache-2.0
"""Products on dask: chunks as they are, several workers, a worker that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir import dask as dask_products
from sparsetir.blocks import cluster
from sparsetir.errors import ArgumentError, ArgumentTypeError

array = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.scheduled  # as in the workers: sums in another order have other last bits


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as workers,
        distributed.Client(workers) as client,
    ):
        yield client


def matrix(rows: int = 1200, columns: int = 60) -> Any:
    rng = np.random.default_rng(0)
    A = sp.random_array((rows, columns), density=0.2, format="csr", dtype="float32", rng=rng)
    A.data = np.ceil(8 * A.data)  # sums in float32 are exact
    return A


def chunked(A: Any, chunks: int, change: Any = lambda part: part) -> Any:
    """Wrap row slices of a matrix as a dask array."""
    rows = array.from_array(np.arange(A.shape[0]), chunks=chunks)
    how = {"new_axis": 1, "chunks": (rows.chunks[0], (A.shape[1],)), "dtype": A.dtype, "meta": A[:0]}
    return rows.map_blocks(lambda index: change(A[index]), **how)


def unsorted(part: Any) -> Any:
    part.indices, part.data = part.indices.copy(), part.data.copy()
    for i in range(part.shape[0]):
        row = slice(part.indptr[i], part.indptr[i + 1])
        part.indices[row], part.data[row] = part.indices[row][::-1], part.data[row][::-1]
    part.has_sorted_indices = False
    return part


def wide(part: Any) -> Any:
    return sp.csr_array((part.data, part.indices.astype("int64"), part.indptr.astype("int64")), shape=part.shape)


CHANGES = {"csr_array": lambda p: p, "csr_matrix": sp.csr_matrix, "int64": wide, "unsorted": unsorted,
           "csc": lambda p: p.tocsc(), "dense": lambda p: p.toarray()}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_chunks_are_taken_as_they_are(kind: str) -> None:
    A, B = matrix(), np.arange(180.0, dtype="float32").reshape(60, 3)
    C = multiply(chunked(A, 500, CHANGES[kind]), B)
    assert C.chunks == ((500, 500, 200), (3,))
    assert (C.compute(scheduler="synchronous") == A @ B).all()


def multiply(dx: Any, B: Any) -> Any:
    return dask_products.matmul(dx, B)


def test_empty_chunks_and_columns_in_chunks() -> None:
    A, B = matrix(), np.ones((60, 2), "float32")
    A = sp.vstack([A[:100], sp.csr_array((300, 60), dtype="float32"), A[400:]], format="csr")
    assert (multiply(chunked(A, 100), B).compute(scheduler="synchronous") == A @ B).all()
    dense = array.from_array(A.toarray(), chunks=(500, 25))
    assert (multiply(dense, B).compute(scheduler="synchronous") == A @ B).all()


def test_what_cannot_be_multiplied_is_named() -> None:
    B = np.ones((60, 2), "float32")
    with pytest.raises(ArgumentTypeError, match="expected a dask array"):
        multiply(matrix(), B)
    with pytest.raises(ArgumentError, match="expected 60 rows"):
        multiply(chunked(matrix(), 500), B[:9])
    on_gpu = type("csr_matrix", (), {"__module__": "cupyx.scipy.sparse"})()
    with pytest.raises(ArgumentTypeError, match=r"memory of the CPU.*\.get\(\)"):
        cluster.as_block(on_gpu, 60, "float32")


def test_lazy_arrays_of_anndata_are_taken(tmp_path: Path) -> None:
    h5py, experimental = pytest.importorskip("h5py"), pytest.importorskip("anndata.experimental")
    A, B = matrix(), np.ones((60, 2), "float32")
    sparsetir.save_blocks(A, tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad") as file:
        dx = experimental.read_elem_lazy(file["X"], chunks=(500, 60))
        assert (multiply(dx, B).compute(scheduler="synchronous") == A @ B).all()


def exact(A: Any, k: int) -> Any:
    D = A.toarray().astype("float64")
    return np.linalg.svd(D - D.mean(axis=0), compute_uv=False)[:k]


def test_principal_components(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask

    A = matrix()
    with dask.config.set(scheduler="synchronous"):
        from_gram = cluster.pca(chunked(A, 50), 4)
        monkeypatch.setattr(cluster, "MAX_GRAM_FEATURES", 0)
        by_passes = cluster.pca(chunked(A, 300), 4)
    np.testing.assert_allclose(from_gram.singular_values_, exact(A, 4), rtol=1e-6)
    np.testing.assert_allclose(by_passes.singular_values_, exact(A, 4), rtol=1e-4)


@pytest.mark.slow
def test_two_workers_equal_one_process_bit_for_bit(client: Any, tmp_path: Path) -> None:
    A, B = matrix(5000), np.random.default_rng(1).random((60, 5), "float32")
    M = sparsetir.open_blocks(sparsetir.save_blocks(A, tmp_path / "A"), memory=300_000)
    C = M.spmm(B, client=client)
    assert C.numblocks[0] > 5
    assert (C.compute() == M.spmm(B)).all()
    import dask

    with dask.config.set(scheduler="synchronous"):
        alone = cluster.pca(M, 3)
    with client.as_current():
        together = cluster.pca(M, 3)
    assert (alone.components_ == together.components_).all()
    assert set(client.run(sparsetir.get_num_threads).values()) == {1}


def test_an_operand_is_used_again(client: Any) -> None:
    """Each product has its own copy on the workers, whenever that of an earlier one is released."""
    A, B = matrix(), np.arange(180.0, dtype="float32").reshape(60, 3)
    for _ in range(12):
        assert (multiply(chunked(A, 500), B).compute() == A @ B).all()


@pytest.mark.slow
def test_workers_have_their_threads_and_stay_within_memory(client: Any, tmp_path: Path) -> None:
    from sparsetir.utils import memory

    rng = np.random.default_rng(0)
    part = sp.random_array((20_000, 100), density=0.1, format="csr", dtype="float32", rng=rng)
    M = sparsetir.open_blocks(sparsetir.save_blocks((part for _ in range(20)), tmp_path / "A"), memory=16 << 20)
    assert 8 * M.nnz > 30_000_000

    def compile_kernels() -> None:
        import dask

        with dask.config.set(scheduler="synchronous"):
            cluster.pca(M, 3)  # as often as below: some kernels are compiled after a few calls

    client.run(compile_kernels)
    with client.as_current():
        try:
            client.run(memory.forget_peak)
        except OSError:
            pytest.skip("the system does not tell the peak of resident memory")
        before = client.run(memory.resident, "VmRSS")
        cluster.pca(M, 3)
        peaks = client.run(memory.resident, "VmHWM")
    assert max(peaks[worker] - before[worker] for worker in peaks) < 16 << 20

    # The only thread of each worker, after a task that computes: those of the sums may all have gone to one of them.
    arguments = {"extent": 100, "dtype": np.float32, "pure": False}
    for worker in peaks:
        client.submit(
            cluster._multiply, part[:200], np.ones((100, 2), np.float32), workers=[worker], **arguments
        ).result()
        assert client.submit(sparsetir.get_num_threads, workers=[worker], pure=False).result() == 1


def test_one_copy_of_the_dense_operand_is_sent_to_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph refers to the operand that was scattered: no task has a copy of its own."""
    scattered = []

    class Client:
        def scatter(self, value: Any, *, broadcast: bool, hash: bool) -> Any:
            scattered.append((value.nbytes, broadcast, hash))
            return "the future of B"

    monkeypatch.setattr(distributed, "get_client", Client)
    B = np.random.default_rng(3).random((60, 50), "float32")
    graph = multiply(chunked(matrix(), 100), B).dask
    assert scattered == [(B.nbytes, True, False)]
    assert B.tobytes() not in pytest.importorskip("cloudpickle").dumps(graph)


def die_once(flag: str, n: int, total: Any, chunk: Any, add: Any) -> Any:
    """Kill the worker in the middle of a sum, the first time."""
    if total.rows > 0:
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return add(n, total, chunk)


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dask

    A = matrix(4000)
    M = sparsetir.open_blocks(sparsetir.save_blocks(A, tmp_path / "A"), memory=300_000)
    with dask.config.set(scheduler="synchronous"):
        expected = cluster.pca(M, 3)
    add, flag = cluster._add_chunk, str(tmp_path / "killed")
    monkeypatch.setattr(cluster, "_add_chunk", lambda n, total, chunk: die_once(flag, n, total, chunk, add))
    with client.as_current():
        actual = cluster.pca(M, 3)
    assert os.path.exists(flag)
    assert (actual.components_ == expected.components_).all()
