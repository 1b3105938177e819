# SPDX-License-Identifier: Apache-2.0
"""Products and PCA of matrices on disk: speed beside products in memory and beside other libraries, and peak memory.

Run ``python -m sparsetir.bench.blocks``. Each measurement is a process of its own, so that its peak of resident memory
is its own; both sides of a ratio run in turn. Files are written to a temporary folder, or to ``--folder``, which is
kept. The page cache is warm: files are read once before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ENTRIES = 20_000_000
CELLS, GENES, DENSITY = 50_000, 2000, 0.08
FAMILIES = ("stencil_2d", "rmat")
COMPONENTS = 50
REPEAT = 3


def write_matrix(family: str, entries: int, folder: Path) -> Path:
    """Write a generated matrix as a folder of .npy files; return its path."""
    from sparsetir.blocks import save_blocks
    from sparsetir.workloads.suite import families

    path = folder / f"{family}-{entries}"
    if not path.exists():
        save_blocks(families()[family](entries), path)
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


def _pca_of_scikit_learn(path: str, width: int, memory: str) -> Callable[[], Any]:
    import anndata
    from sklearn.decomposition import PCA

    return lambda: PCA(width, svd_solver="arpack").fit(anndata.read_h5ad(path).X).explained_variance_


WAYS = {
    "memory": _product_in_memory,
    "blocks": _product_of_blocks,
    "pca": _pca_of_blocks,
    "scanpy": _pca_of_scanpy,
    "scikit-learn": _pca_of_scikit_learn,
}


def run_one(way: str, path: str, width: int, memory: str) -> dict[str, float]:
    """Measure one way in this process: seconds of its second call, and the peak of resident bytes."""
    from sparsetir.utils.memory import resident

    call = WAYS[way](path, width, memory)
    call()
    start = time.perf_counter()
    call()
    return {"seconds": time.perf_counter() - start, "peak": resident("VmHWM")}


def measure(way: str, path: Path, width: int, memory: str) -> dict[str, float] | None:
    """Run one measurement in another process; None where its library is not installed."""
    command = [sys.executable, "-m", __spec__.name, "--one", way, str(path), str(width), memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if "ModuleNotFoundError" in done.stderr:
            return None
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


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


def lines(folder: Path, entries: int, cells: int, memory: str) -> Iterator[str]:
    """Yield the rows of both tables."""
    yield "| matrix | entries | N | in memory s | blocks s | fraction of in-memory speed | peak MiB in memory, blocks |"
    yield "|---|---|---|---|---|---|---|"
    for family in FAMILIES:
        path = write_matrix(family, entries, folder)
        for width in (1, 32):
            times = compare(("memory", "blocks"), path, width, memory)
            (inside, _, peak), (outside, _, peak_of_blocks) = times["memory"], times["blocks"]
            figures = f"{inside:.3f} | {outside:.3f} | {inside / outside:.2f} | {peak:.0f}, {peak_of_blocks:.0f}"
            yield f"| {family} | {entries} | {width} | {figures} |"
    yield ""
    yield f"| PCA, {COMPONENTS} components, {cells} cells x {GENES} genes | least s | median s | peak MiB |"
    yield "|---|---|---|---|"
    path = write_cells(cells, folder)
    for way, (least, median, peak) in compare(("pca", "scanpy", "scikit-learn"), path, COMPONENTS, memory).items():
        yield f"| {way.replace('pca', 'sparsetir')} | {least:.2f} | {median:.2f} | {peak:.0f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or one measurement."""
    parser = argparse.ArgumentParser("python -m sparsetir.bench.blocks", description=__doc__)
    parser.add_argument("--folder", type=Path, help="for the files, kept; by default a temporary one")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="of the matrices of products")
    parser.add_argument("--cells", type=int, default=CELLS, help="rows of the matrix of the PCA")
    parser.add_argument("--memory", default="2GiB", help="limit of products of blocks")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        way, path, width, memory = options.one
        print(json.dumps(run_one(way, path, int(width), memory)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for line in lines(folder, options.entries, options.cells, options.memory):
            print(line, flush=True)


if __name__ == "__main__":
    main()


__all__ = ["compare", "lines", "measure", "run_one", "write_cells", "write_matrix"]
