# SPDX-License-Identifier: Apache-2.0
"""Products and principal components on the workers of dask: a task is a chunk of a dask array, or a block of a file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir.blocks import products
from sparsetir.blocks.products import MAX_GRAM_FEATURES, PCA, by_passes, check_components, from_gram, plan_product
from sparsetir.blocks.reading import DEFAULT_MEMORY, Block, parse_memory, read_block
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.io.stores import Array, Store, is_open, open_store
from sparsetir.utils.arguments import package_of
from sparsetir.utils.packages import require
from sparsetir.utils.threads import get_num_threads, set_num_threads

# Consecutive chunks that add to one accumulator; fixed, so that sums do not depend on the number of workers.
GROUP = 8
GRAM_ROOM = 64 << 20  # bytes of a densified part of a chunk
_configured = threading.local()


def matmul(dx: Any, B: Any) -> Any:
    """Multiply a dask array of scipy CSR chunks by a dense matrix.

    Parameters
    ----------
    dx : dask.array.Array, BlockMatrix, backed matrix of anndata or group of h5py or zarr, shape (m, n)
        Chunks are scipy sparse arrays or matrices, used as they are, or dense. Of a CSR file, which all workers see, a
        task is a block.
    B : array, shape (n, k)
        In memory. Each worker of the current client gets it once.

    Returns
    -------
    dask.array.Array, shape (m, k)
        With the row chunks of `dx`; nothing is computed yet.

    Raises
    ------
    ArgumentTypeError
        `dx` is no dask array, or a chunk is not in the memory of the CPU.
    ArgumentError
        The shapes do not fit.
    """
    array = require("dask.array", extra="dask", purpose="sparsetir.dask")
    dask = require("dask", extra="dask", purpose="sparsetir.dask")
    dx = _checked(dx)
    shape, dtype = dx.shape, dx.dtype
    B = products.as_dense(B, "B", shape[1], (2,))
    dtype = products.compute_dtype(dtype, B.dtype)
    operand = _share(np.ascontiguousarray(B, dtype))
    multiply = dask.delayed(partial(_multiply, extent=shape[1], dtype=dtype), pure=False)
    rows = [array.from_delayed(multiply(part, operand), (count, B.shape[1]), dtype) for part, count in _parts(dx, B)]
    return array.concatenate(rows) if rows else array.zeros((0, B.shape[1]), dtype=dtype)


def pca(dx: Any, k: int = 50) -> PCA:
    """Return the first `k` principal components of the rows of a dask array.

    Chunks are multiplied where they are. Each group of chunks adds to one accumulator on a worker, and the accumulators
    are added as a tree: what a pass sends does not grow with the number of chunks in a group.

    Parameters
    ----------
    dx : as for `matmul`
    k : int

    Returns
    -------
    PCA
        In the memory of the caller; see `sparsetir.open_blocks`.
    """
    dask = require("dask", extra="dask", purpose="sparsetir.dask")
    dx = _checked(dx)
    n = dx.shape[1]
    parts = [part for part, _ in _parts(dx, np.empty((n, 1), np.float32))]
    is_small = n <= MAX_GRAM_FEATURES
    start = _PartialSums(0, np.zeros(n), np.zeros(n), np.zeros((n, n)) if is_small else None)
    (sums,) = dask.compute(_tree(parts, partial(_add_chunk, n), _merge, start, dask))
    k = check_components(k, (sums.rows, n))
    if is_small:
        gram = sums.gram - np.outer(sums.mean, sums.mean) * sums.rows
        return from_gram(gram, sums.mean, sums.rows, k)

    def apply(Q: Array) -> Array:
        operand = _share(Q)
        add = partial(_add_product, n)
        bound = [(part, operand) for part in parts]
        (total,) = dask.compute(_tree(bound, add, np.add, np.zeros(Q.shape), dask))
        return total - sums.rows * np.outer(sums.mean, sums.mean @ Q)

    return by_passes(apply, float(sums.squares.sum()), sums.mean, sums.rows, k)


# ------------------------------------------------------------------------------------------------ the graph


def is_dask(value: Any) -> bool:
    """Return whether it is a dask array; imports nothing."""
    return package_of(value) == "dask" and hasattr(value, "to_delayed")


class _OnDisk:
    """A matrix on disk, and the bytes that a task may take."""

    def __init__(self, store: Store, memory: int) -> None:
        self.store, self.memory, self.shape, self.dtype = store, memory, store.shape, store.data.dtype


def _checked(dx: Any) -> Any:
    # A BlockMatrix has a store; its module imports this one.
    if isinstance(getattr(dx, "store", None), Store) or is_open(dx):
        on_disk = _OnDisk(open_store(dx), parse_memory(DEFAULT_MEMORY)) if is_open(dx) else _OnDisk(dx.store, dx.memory)
        if on_disk.store.format != "csr":
            raise ArgumentError("dx: expected a CSR file, got CSC. Write it as CSR with sparsetir.save_blocks.")
        return on_disk
    if not (is_dask(dx) and hasattr(dx, "chunks")):
        raise ArgumentTypeError(f"dx: expected a dask array, got {type(dx).__name__}. Use sparsetir.einsum in memory.")
    if dx.ndim != 2:
        raise ArgumentError(f"dx: expected a matrix, got {dx.ndim} dimensions. Reshape it.")
    return dx


def _parts(dx: Any, B: Array) -> list[tuple[Any, Any]]:
    """Return row chunks, as delayed objects or ranges of a file, and their numbers of rows."""
    if isinstance(dx, _OnDisk):
        starts = plan_product(dx.store, dx.memory, B, True, "").starts
        name = dx.store.name or None
        ranges = enumerate(pairwise(starts))
        return [(Range(dx.store.path, name, n, begin, end), end - begin) for n, (begin, end) in ranges]
    whole = dx.rechunk({1: -1}) if dx.numblocks[1] != 1 else dx
    return list(zip(whole.to_delayed()[:, 0], whole.chunks[0], strict=True))


def _share(operand: Array) -> Any:
    """Copy an operand to every worker of the current client once."""
    distributed = require("distributed", extra="dask", purpose="sparsetir.dask")
    try:
        client = distributed.get_client()
    except ValueError:  # no cluster: dask's own threads share the memory
        return operand
    # A key of the content would be that of an earlier operand which the scheduler may release meanwhile.
    return client.scatter(operand, broadcast=True, hash=False)


def _tree(parts: list[Any], add: Callable[..., Any], merge: Callable[..., Any], start: Any, dask: Any) -> Any:
    """Add parts in groups, each one after the other, and the groups in pairs."""
    add, merge = dask.delayed(add, pure=False), dask.delayed(merge, pure=False)
    start = dask.delayed(start)
    groups = [parts[i : i + GROUP] for i in range(0, len(parts), GROUP)] or [[]]
    sums = [reduce(lambda total, part: add(total, part), group, start) for group in groups]
    while len(sums) > 1:
        sums = [
            merge(*pair) if len(pair) == 2 else pair[0] for pair in (sums[i : i + 2] for i in range(0, len(sums), 2))
        ]
    return sums[0]


# ------------------------------------------------------------------------------------------------ on a worker


class _PartialSums:
    """Rows, means, squared deviations and the Gram matrix of some chunks."""

    def __init__(self, rows: int, mean: Array, squares: Array, gram: Array | None) -> None:
        self.rows, self.mean, self.squares, self.gram = rows, mean, squares, gram

    @property
    def moments(self) -> tuple[int, Array, Array]:
        return self.rows, self.mean, self.squares


def _merge(left: _PartialSums, right: _PartialSums) -> _PartialSums:
    gram = left.gram + right.gram if left.gram is not None and right.gram is not None else None
    return _PartialSums(*products.merge_moments(left.moments, right.moments), gram)


def _add_chunk(n: int, total: _PartialSums, chunk: Any) -> _PartialSums:
    _use_threads_of_worker()
    chunk = chunk.read() if isinstance(chunk, Range) else chunk
    block = as_block(chunk, n, np.float64 if chunk.dtype.itemsize > 4 else np.float32)
    rows = block.end - block.begin
    moments = products.merge_moments(total.moments, (rows, *products.column_moments(block, n)))
    gram = total.gram
    if gram is not None:
        gram = gram.copy()  # dask may need the input again
        products.add_gram(block, n, gram, GRAM_ROOM)
    return _PartialSums(*moments, gram)


def _add_product(n: int, total: Array, part: tuple[Any, Array]) -> Array:
    _use_threads_of_worker()
    chunk, Q = part
    block = as_block(chunk, n, np.float64)
    return total + products.multiply_transposed(block, products.multiply(block, Q), n)


def _multiply(chunk: Any, B: Array, *, extent: int, dtype: Any) -> Array:
    _use_threads_of_worker()
    return products.multiply(as_block(chunk, extent, dtype), B)


@lru_cache(maxsize=16)
def _store(path: str, name: str | None) -> Store:
    """Row pointers are read once in a process."""
    return open_store(path, name)


class Range(NamedTuple):
    """Rows of a file, which the task that multiplies them reads: no block waits in the memory of a worker."""

    path: str
    name: str | None
    number: int
    begin: int
    end: int

    def read(self) -> Any:
        store = _store(self.path, self.name)
        block = read_block(store, self.number, self.begin, self.end, store.data.dtype)
        return products.to_scipy(block, store.lines[1])


def as_block(chunk: Any, extent: int, dtype: Any) -> Block:
    """Take the arrays of a chunk as they are where the kernel can, else convert them."""
    chunk = chunk.read() if isinstance(chunk, Range) else chunk
    if package_of(chunk) in ("cupy", "cupyx"):
        raise ArgumentTypeError("dx: expected chunks in the memory of the CPU, got cupy's. Map them with .get() first.")
    if not sp.issparse(chunk) and not isinstance(chunk, np.ndarray):
        raise ArgumentTypeError(f"dx: expected chunks of scipy CSR, got {type(chunk).__name__}. Convert the chunks.")
    csr = chunk if sp.issparse(chunk) and chunk.format == "csr" else sp.csr_array(chunk)
    if csr.shape[1] != extent:
        raise ArgumentError(f"dx: expected chunks of {extent} columns, got {csr.shape[1]}. Rechunk the array.")
    if not csr.has_canonical_format:
        csr = csr.astype(dtype)  # a copy, in which sums do not overflow
        csr.sum_duplicates()
    if csr.nnz and (csr.indices.min() < 0 or csr.indices.max() >= extent):
        raise ArgumentError(f"dx: expected indices below {extent}, got others in a chunk. Build the chunk again.")
    idtype = np.int32 if max(extent, csr.nnz) < 1 << 31 else np.int64
    arrays = csr.indptr.astype(idtype, copy=False), csr.indices.astype(idtype, copy=False)
    return Block(0, 0, csr.shape[0], *arrays, csr.data.astype(dtype, copy=False))


def _use_threads_of_worker() -> None:
    """Run kernels on as many threads as the worker has; TVM does not read the variables that dask sets.

    Each thread that calls TVM has a pool of its own, so each of the worker's is configured once.
    """
    if getattr(_configured, "is_done", False):
        return
    distributed = require("distributed", extra="dask", purpose="sparsetir.dask")
    try:
        threads = distributed.get_worker().state.nthreads
    except ValueError:  # not on a worker
        return
    set_num_threads(max(1, min(threads, get_num_threads())))
    _configured.is_done = True


__all__ = ["as_block", "is_dask", "matmul", "pca"]
