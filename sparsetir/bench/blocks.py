# SPDX-License-Identifier: Apache-2.0
"""Products and PCA of matrices on disk: speed beside products in memory and beside other libraries, and peak memory.

Run ``sparsetir bench blocks``. Each measurement is a process of its own, so that its peak of resident memory is its
own; both sides of a ratio run in turn. Files are written to a temporary folder, or to ``--folder``, which is kept. The
page cache is warm: files are read once before; with ``--cold``, products read them from the disk. ``--tables`` chooses
among products of families of matrices, of forms of files, the PCA, and dask arrays on a cluster of two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

ENTRIES = 20_000_000
CELLS, GENES, DENSITY = 50_000, 2000, 0.08
FAMILIES = ("stencil_2d", "rmat")
COMPONENTS = 50
TABLES = ["products", "forms", "pca", "dask"]
REPEAT = 3
CALLS = 4  # measured in a process; the least counts
PAIRS = 7  # of a product in memory and one of blocks, which alternate in a process
WIDTHS = (1, 32)
FORMS = {"folder of .npy": "", "h5ad": ".h5ad", "h5ad, gzip": "-gzip.h5ad", "zarr": ".zarr", "Binsparse": ".bsp.h5"}
DASK_WIDTH, DASK_ROWS, DASK_WORKERS = 64, 20_000, 2
CHUNK_ROWS = 5000  # of the passes of other libraries


def write_matrix(family: str, entries: int, folder: Path, end: str = "") -> Path:
    """Write a generated matrix of counts in the form of an end of `FORMS`; return its path."""
    import anndata
    import numpy as np

    from sparsetir.blocks import save_blocks
    from sparsetir.io import read
    from sparsetir.workloads.suite import families

    path = folder / f"{family}-{entries}{end}"
    if path.exists():
        return path
    if end:
        A = read(write_matrix(family, entries, folder))
    else:
        A = families()[family](entries)
        A.data[:] = np.random.default_rng(0).integers(1, 9, A.nnz)  # as compressible as counts of cells
    if end.endswith("gzip.h5ad"):
        anndata.AnnData(A).write_h5ad(path, compression="gzip")
    else:
        save_blocks(A, path)
    return path


def write_cells(cells: int, folder: Path) -> Path:
    """Write log-normalised counts of synthetic cells as .h5ad; return the path."""
    import anndata
    import numpy as np
    import scipy.sparse as sp

    path = folder / f"cells-{cells}.h5ad"
    if not path.exists():
        rng = np.random.default_rng(0)
        kinds, genes = rng.gamma(1.0, 1.0, (12, GENES)), rng.gamma(0.5, 1.0, GENES)
        blocks = []
        for begin in range(0, cells, 5000):
            rates = kinds[rng.integers(12, size=min(5000, cells - begin))] * genes
            counts = rng.poisson(rates * (DENSITY / rates.mean()))
            blocks.append(sp.csr_matrix(np.log1p(counts), dtype=np.float32))
        anndata.AnnData(sp.vstack(blocks, format="csr")).write_h5ad(path)
    return path


# ------------------------------------------------------------------------------------- one measurement, in a process


def _product_in_memory(path: str, width: int, memory: str) -> Callable[[], Any]:
    import numpy as np

    from sparsetir.einsum.products import matmul
    from sparsetir.io import read

    A = read(path)
    B = np.ones((A.shape[1], width), np.float32)
    return lambda: matmul(A, B)


def _product_of_blocks(path: str, width: int, memory: str) -> Callable[[], Any]:
    import numpy as np

    from sparsetir.blocks import open_blocks

    M = open_blocks(path, memory=memory)
    M.memory += M.shape[0] * width * 4  # of the result, which is in memory
    B = np.ones((M.shape[1], width), np.float32)
    return lambda: M.spmm(B)


def _pca_of_blocks(path: str, width: int, memory: str) -> Callable[[], Any]:
    from sparsetir.blocks import open_blocks

    return lambda: open_blocks(path, memory=memory).pca(width).explained_variance_


def _pca_of_scanpy(path: str, width: int, memory: str) -> Callable[[], Any]:
    import anndata
    import scanpy

    def run() -> Any:
        cells = anndata.read_h5ad(path)
        scanpy.pp.pca(cells, n_comps=width, chunked=True, chunk_size=5000)
        return cells.uns["pca"]["variance"]

    return run


def _pca_of_scanpy_and_dask(path: str, width: int, memory: str) -> Callable[[], Any]:
    import anndata
    import h5py
    import scanpy
    from anndata.experimental import read_elem_lazy

    def run() -> Any:
        with h5py.File(path) as file:
            X = file["X"]
            cells = anndata.AnnData(read_elem_lazy(X, chunks=(CHUNK_ROWS, X.attrs["shape"][1])))
            scanpy.pp.pca(cells, n_comps=width, svd_solver="covariance_eigh")
            return cells.uns["pca"]["variance"]

    return run


def _pca_of_scikit_learn(path: str, width: int, memory: str) -> Callable[[], Any]:
    import anndata
    from sklearn.decomposition import PCA

    return lambda: PCA(width, svd_solver="arpack").fit(anndata.read_h5ad(path).X).explained_variance_


def _incremental_pca(path: str, width: int, memory: str) -> Callable[[], Any]:
    import anndata
    from sklearn.decomposition import IncrementalPCA

    def run() -> Any:
        X = anndata.read_h5ad(path, backed="r").X
        model = IncrementalPCA(width)
        for begin in range(0, X.shape[0] - width, CHUNK_ROWS):
            model.partial_fit(X[begin : begin + CHUNK_ROWS].toarray())
        return model.explained_variance_

    return run


def _truncated_svd(path: str, width: int, memory: str) -> Callable[[], Any]:
    import anndata
    from sklearn.decomposition import TruncatedSVD

    return lambda: TruncatedSVD(width, random_state=0).fit(anndata.read_h5ad(path).X).explained_variance_


def _product_of_dask(path: str, width: int, memory: str, *, is_ours: bool) -> Callable[[], Any]:
    """Multiply a dask array whose chunks are in the memory of the workers."""
    import dask.array
    import numpy as np
    from dask.distributed import Client, wait

    import sparsetir.dask
    from sparsetir.io import read

    A = read(path)
    client = Client(n_workers=DASK_WORKERS, threads_per_worker=1, dashboard_address=None)
    chunks = [client.scatter(A[i : i + DASK_ROWS]) for i in range(0, A.shape[0], DASK_ROWS)]
    rows = [min(DASK_ROWS, A.shape[0] - i) for i in range(0, A.shape[0], DASK_ROWS)]
    parts = [
        dask.array.from_delayed(chunk, (count, A.shape[1]), A.dtype, meta=A[:0])
        for chunk, count in zip(chunks, rows, strict=True)
    ]
    dx = dask.array.concatenate(parts)
    B = np.ones((A.shape[1], width), np.float32)
    if is_ours:
        return lambda: wait(sparsetir.dask.matmul(dx, B).persist())
    numbers = count()  # of calls: dask does not compute a task of the same name again

    def run() -> Any:
        chunks = dx.chunks[0], (width,)
        product = dx.map_blocks(lambda x: x @ B, chunks=chunks, dtype=B.dtype, token=f"product-{next(numbers)}")
        return wait(product.persist())

    return run


WAYS: dict[str, Callable[[str, int, str], Callable[[], Any]]] = {
    "memory": _product_in_memory,
    "blocks": _product_of_blocks,
    "pca": _pca_of_blocks,
    "scanpy": _pca_of_scanpy,
    "scanpy with dask": _pca_of_scanpy_and_dask,
    "scikit-learn": _pca_of_scikit_learn,
    "IncrementalPCA": _incremental_pca,
    "TruncatedSVD, not centred": _truncated_svd,
    "sparsetir.dask.matmul": partial(_product_of_dask, is_ours=True),
    "map_blocks with scipy": partial(_product_of_dask, is_ours=False),
}
PCA_WAYS = list(WAYS)[2:8]
DASK_WAYS = list(WAYS)[8:]


def run_one(way: str, path: str, width: int, memory: str) -> dict[str, float]:
    """Measure one way in this process: least seconds of some calls after the first, and the peak of resident bytes."""
    from sparsetir.utils.memory import resident

    call = WAYS[way](path, width, memory)
    call()
    times = []
    for _ in range(CALLS if way in DASK_WAYS else 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return {"seconds": min(times), "peak": resident("VmHWM")}


def forget(path: str) -> None:
    """Let the system drop a file or a folder from its memory, so that it is read from the disk again."""
    whole = Path(path)
    for file in whole.rglob("*") if whole.is_dir() else [whole]:
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_pair(path: str, width: int, memory: str, *, is_cold: bool = False) -> dict[str, float]:
    """Measure a product in memory and one of blocks, which alternate: least seconds of each."""
    calls = {way: WAYS[way](path, width, memory) for way in ("memory", "blocks")}
    times: dict[str, list[float]] = {way: [] for way in calls}
    for call in calls.values():
        call()
    for _ in range(PAIRS):
        for way, call in calls.items():
            if is_cold:
                forget(path)
            start = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - start)
    return {way: min(seconds) for way, seconds in times.items()}


def measure(way: str, path: Path, width: int, memory: str) -> dict[str, float] | None:
    """Run one measurement in another process; None where its library is not installed."""
    command = [sys.executable, "-m", __spec__.name, "--one", way, str(path), str(width), memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if "ModuleNotFoundError" in done.stderr:
            return None
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compare(ways: Sequence[str], path: Path, width: int, memory: str) -> dict[str, tuple[float, float, float]]:
    """Return least, median seconds and largest peak in MiB of each way; the ways run in turn."""
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(REPEAT):
        for way in ways:
            if (result := measure(way, path, width, memory)) is not None:
                results[way].append(result)
    return {
        way: (
            min(r["seconds"] for r in runs),
            statistics.median(r["seconds"] for r in runs),
            max(r["peak"] for r in runs) / 2**20,
        )
        for way, runs in results.items()
        if runs
    }


def products(named: Iterable[tuple[str, Path]], memory: str, pair: str) -> Iterator[str]:
    """Yield a table of products of files, beside the same product in memory; "pair" or "cold pair"."""
    yield "| matrix | N | in memory s | blocks s | fraction of in-memory speed | peak MiB in memory, blocks |"
    yield "|---|---|---|---|---|---|"
    for name, path in named:
        for width in WIDTHS:
            times = measure(pair, path, width, memory)
            peaks = [measure(way, path, width, memory) for way in ("memory", "blocks")]
            if times is None or None in peaks:
                continue
            fast, taken = times["memory"], times["blocks"]
            figures = f"{fast:.3f} | {taken:.3f} | {fast / taken:.2f} | "
            figures += ", ".join(f"{result['peak'] / 2**20:.0f}" for result in peaks if result)
            yield f"| {name} | {width} | {figures} |"


def others(title: str, ways: Sequence[str], path: Path, width: int, memory: str) -> Iterator[str]:
    """Yield a table of ways to compute the same."""
    yield f"| {title} | least s | median s | peak MiB |"
    yield "|---|---|---|---|"
    for way, (least, median, peak) in compare(ways, path, width, memory).items():
        yield f"| {'sparsetir' if way == 'pca' else way} | {least:.2f} | {median:.2f} | {peak:.0f} |"


def tables(folder: Path, entries: int, cells: int, memory: str, *, is_cold: bool) -> dict[str, Iterator[str]]:
    """Return the rows of each table, measured when they are asked for."""
    families = ((family, write_matrix(family, entries, folder)) for family in FAMILIES)
    forms = ((name, write_matrix("rmat", entries, folder, end)) for name, end in FORMS.items() if end)
    pair = "cold pair" if is_cold else "pair"
    title = f"PCA, {COMPONENTS} components, {cells} cells x {GENES} genes"
    dask_title = f"dask array, {DASK_WIDTH} columns, {DASK_WORKERS} workers"

    def late(title: str, ways: Sequence[str], path: Callable[[], Path], width: int) -> Iterator[str]:
        yield from others(title, ways, path(), width, memory)

    return {
        "products": products(families, memory, pair),
        "forms": products(forms, memory, pair),
        "pca": late(title, PCA_WAYS, partial(write_cells, cells, folder), COMPONENTS),
        "dask": late(dask_title, DASK_WAYS, partial(write_matrix, "rmat", entries, folder), DASK_WIDTH),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or one measurement."""
    parser = argparse.ArgumentParser("sparsetir bench blocks", description=__doc__)
    parser.add_argument("--folder", type=Path, help="for the files, kept; by default a temporary one")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="of the matrices of products")
    parser.add_argument("--cells", type=int, default=CELLS, help="rows of the matrix of the PCA")
    parser.add_argument("--memory", default="2GiB", help="limit of products of blocks, besides the result")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="to measure")
    parser.add_argument("--cold", action="store_true", help="read files of products from the disk in each call")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        way, path, width, memory = options.one
        settings = path, int(width), memory
        is_pair = way.endswith("pair")
        print(json.dumps(run_pair(*settings, is_cold=way != "pair") if is_pair else run_one(way, *settings)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in tables(folder, options.entries, options.cells, options.memory, is_cold=options.cold).items():
            if name in options.tables:
                for line in rows:
                    print(line, flush=True)
                print()


if __name__ == "__main__":
    main()


__all__ = ["compare", "measure", "run_one", "tables", "write_cells", "write_matrix"]
