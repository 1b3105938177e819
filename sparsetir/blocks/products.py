# SPDX-License-Identifier: Apache-2.0
"""Passes over the blocks of a store: products, what they write, and principal components."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir import ops
from sparsetir.blocks.reading import MAX_BLOCK_BYTES, Bar, Block, Plan, block_starts, iterate, make_plan, read_blocks
from sparsetir.blocks.results import (
    Checkpoint,
    NpyResult,
    WriteBehind,
    check_apart,
    check_new,
    check_path,
    digest,
    file_result,
    write_lines,
)
from sparsetir.errors import ArgumentError, ArgumentTypeError, WriteError
from sparsetir.io.stores import Array, Buffers, Store, is_stored, open_store
from sparsetir.kernel_factory import make_kernel
from sparsetir.ops.dense_output import added_spmm
from sparsetir.runtime.signature import unchecked
from sparsetir.sparse_output.products import matmul
from sparsetir.utils.arguments import is_integer
from sparsetir.utils.buffers import LINE, OutputPool, aligned, empty
from sparsetir.utils.caches import ForkLock
from sparsetir.utils.memory import MemoryLimitError

MAX_GRAM_FEATURES = 8192  # an eigendecomposition of more takes longer than passes over the matrix
MAX_PASSES = 12
OVERSAMPLING = 10
EPSILON = 1e-10  # of a rounded eigenvalue, relative to the largest
LANCZOS_RATIO = 40  # features for each component from which on Lanczos' method is faster
TOLERANCE = 1e-5  # of a residual, relative to the largest eigenvalue


@dataclass(frozen=True)
class PCA:
    """Principal components, with scikit-learn's names and signs.

    Attributes
    ----------
    components_ : ndarray of float64, shape (k, features)
    explained_variance_, explained_variance_ratio_, singular_values_ : ndarray of float64, shape (k,)
    mean_ : ndarray of float64, shape (features,)
    n_samples_ : int
    """

    components_: Array
    explained_variance_: Array
    explained_variance_ratio_: Array
    singular_values_: Array
    mean_: Array
    n_samples_: int

    @property
    def n_components_(self) -> int:
        return len(self.components_)

    def transform(self, M: Any) -> Array:
        """Return the scores, shape (rows, k), of a matrix with ``@``: blocks, scipy or numpy."""
        return np.asarray(M @ np.ascontiguousarray(self.components_.T)) - self.mean_ @ self.components_.T


def check_components(k: Any, shape: tuple[int, int]) -> int:
    """Validate a number of components, and return it as an int."""
    if not is_integer(k):
        raise ArgumentTypeError(f"k: expected an integer, got {type(k).__name__}. Pass the number of components.")
    if not 1 <= k <= min(shape) or shape[0] < 2:
        raise ArgumentError(f"k: expected 1 to {min(shape)} components of {shape}, got {k}. Choose fewer.")
    return int(k)


def from_gram(gram: Array, mean: Array, rows: int, k: int) -> PCA:
    """Return components from the centred Gram matrix."""
    values, vectors = _largest(gram, k)
    return _sorted(values, vectors, float(np.trace(gram)), mean, rows, k)


def _largest(gram: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest eigenvalues in rising order, and their vectors.

    A few of many are computed by Lanczos' method to the precision of float64. Reducing the whole matrix to three
    diagonals takes twice its time, and many times where other processes keep cores from the threads of BLAS.
    """
    # Importing them takes as long as importing numpy.
    import scipy.linalg
    import scipy.sparse.linalg as solvers

    n = len(gram)
    if k * LANCZOS_RATIO <= n and gram.any():
        start = np.random.default_rng(0).standard_normal((2, n))
        try:
            values, vectors = solvers.eigsh(gram, k, which="LA", v0=start[0])
            # A vector of a value that occurs several times may be missed: the largest of what is left shows it.
            left = solvers.LinearOperator(
                gram.shape, lambda x: gram @ x - vectors @ (values * (vectors.T @ x)), dtype=gram.dtype
            )
            missed = solvers.eigsh(left, 1, which="LA", v0=start[1], tol=1e-4, return_eigenvectors=False)[0]
            if missed <= values.min() + EPSILON * values.max():
                order = np.argsort(values)
                return values[order], vectors[:, order]
        except solvers.ArpackError:
            pass  # not converged
    return scipy.linalg.eigh(gram, subset_by_index=[n - k, n - 1])


def by_passes(apply: Callable[[Array], Array], squares: float, mean: Array, rows: int, k: int) -> PCA:
    """Return components from products with the centred Gram matrix, by block Krylov with full reorthogonalisation.

    Source: Musco and Musco, "Randomized block Krylov methods", NeurIPS 2015.

    Warns
    -----
    UserWarning
        The components are less exact than `TOLERANCE` after `MAX_PASSES`, as where variances are nearly equal.
    """
    n = len(mean)
    width = min(n, k + OVERSAMPLING)
    block = np.linalg.qr(np.random.default_rng(0).standard_normal((n, width)))[0]
    basis, images = np.empty((n, 0)), np.empty((n, 0))
    for _ in range(MAX_PASSES):
        basis, images = np.hstack([basis, block]), np.hstack([images, apply(block)])
        values, ritz = np.linalg.eigh(basis.T @ images)
        values, ritz = values[-k:], ritz[:, -k:]
        residual = np.linalg.norm(images @ ritz - (basis @ ritz) * values, axis=0)
        width = min(width, n - basis.shape[1])
        if residual.max() <= TOLERANCE * abs(values[-1]) or not width:
            break
        block = images[:, -width:]
        for _ in range(2):  # once leaves errors of rounding
            block = np.linalg.qr(block - basis @ (basis.T @ block))[0]
    else:
        error = residual.max() / abs(values[-1])
        warnings.warn(
            f"pca: after {MAX_PASSES} passes components are exact to {error:.0e} of the largest variance only. Up to "
            f"{MAX_GRAM_FEATURES} columns they are exact where memory= holds three dense matrices of all columns.",
            stacklevel=4,
        )
    return _sorted(values, basis @ ritz, squares, mean, rows, k)


def _sorted(values: Array, vectors: Array, squares: float, mean: Array, rows: int, k: int) -> PCA:
    values, components = np.maximum(values[::-1], 0), vectors[:, ::-1].T
    largest = components[np.arange(k), np.abs(components).argmax(axis=1)]
    components = components * np.where(largest < 0, -1.0, 1.0)[:, None]
    ratio = values / squares if squares > 0 else np.zeros(k)
    return PCA(np.ascontiguousarray(components), values / (rows - 1), ratio, np.sqrt(values), mean, rows)


READS_OF_ALIGNED = 12  # of each row, from which on a copy whose rows begin with cache lines pays
ROWS_AT_ONCE = 1 << 16  # of a dense operand that is converted or written


class MemoryResult:
    """A result in memory, with the methods of `FileResult`."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, pool: OutputPool | None = None) -> None:
        self.array = (pool or OutputPool()).filler(shape, np.dtype(dtype), 0)([None])
        self.done: set[str] = set()

    def rows(self, begin: int, count: int, columns: slice, buffers: Buffers) -> Array:
        """Return memory for a part of the result: its own, where it is contiguous."""
        part = self.array[begin : begin + count, columns]
        return part if part.flags.c_contiguous else buffers.array("rows", part.size, part.dtype).reshape(part.shape)

    def write(self, begin: int, values: Array, columns: slice | None = None) -> None:
        rows = self.array[begin : begin + len(values)][..., columns or slice(None)]
        if not np.may_share_memory(rows, values):
            rows[...] = values

    def record(self, part: str) -> None:
        """Do nothing: the memory ends with the process."""

    def close(self, is_complete: bool) -> None:
        """Do nothing."""


def plan_product(store: Store, memory: int, operand: Array, is_along: bool, out: Any) -> Plan:
    """Plan a product whose result rows are the lines of the store (along), or their indices (across)."""
    dtype, width = compute_dtype(store.data.dtype, operand.dtype), operand.shape[1]
    lines, extent = store.lines
    resident_bytes = 0 if out is not None else (lines if is_along else extent) * width * dtype.itemsize
    column = extent * (dtype.itemsize if is_along else 8 + 2 * dtype.itemsize)
    name = "along the lines" if is_along else "across the lines"
    make = partial(make_plan, store, memory, name, dtype, width, resident_bytes=resident_bytes, line=dtype.itemsize)
    if not is_along or not is_ready(operand, dtype):
        return make(column=column)
    with suppress(MemoryLimitError):
        plan = make(column=column)
        if plan.passes == 1:
            return plan
    return replace(make(column=0), is_copied=False)


def product(store: Store, memory: int, operand: Array, *, is_along: bool, out: Any, bar: bool,
            finish: Callable[[Array], Array] | None = None, tag: str = "", pool: OutputPool | None = None
            ) -> Any:  # fmt: skip
    """Multiply a store by a dense matrix; return an array, or the path of the result.

    Parameters
    ----------
    finish : callable, optional
        Applied to parts of the result before they are written.
    tag : str
        Of `finish`, for results that are continued.
    pool : OutputPool, optional
        Of memory for results that are not written.
    """
    if out is not None:
        check_apart(check_path(out), operand)
    plan = plan_product(store, memory, operand, is_along, out)
    dtype = compute_dtype(store.data.dtype, operand.dtype)
    shape = (store.lines[not is_along], operand.shape[1])
    result: Any = MemoryResult(shape, dtype, pool) if out is None else None
    if out is not None:
        job = {"store": identity(store), "operand": digest(operand), "along": is_along, "tag": tag}
        result = file_result(out, shape, dtype, {**job, "starts": digest(np.array(plan.starts)), "panel": plan.panel})
    is_complete = False
    try:
        progress = Bar(plan.bytes_read, bar)
        for begin in range(0, shape[1], max(plan.panel, 1)):
            columns = slice(begin, min(begin + plan.panel, shape[1]))
            (_along if is_along else _across)(store, plan, operand, columns, dtype, result, finish, progress)
        is_complete = True
    finally:
        result.close(is_complete)
    return result.array if out is None else Path(out)


def _along(store: Store, plan: Plan, operand: Array, columns: slice, dtype: Any, result: Any, finish: Any, bar: Bar
           ) -> None:  # fmt: skip
    names = {number: f"{columns.start}:{number}" for number in range(plan.blocks)}
    numbers = [number for number, name in names.items() if name not in result.done]
    if not numbers:
        return
    panel = dense_panel(operand, columns, dtype)
    if plan.is_copied and store.nnz >= READS_OF_ALIGNED * len(panel) and panel.shape[1] * panel.itemsize % LINE == 0:
        panel = aligned(panel)
    is_narrow = panel.shape[1] * panel.itemsize <= LINE
    with closing(WriteBehind(result)) as writer:
        for block in iterate(store, plan.starts, dtype, bar, numbers, is_narrow=is_narrow):
            values = multiply(block, panel, writer.rows(block.begin, block.end - block.begin, columns))
            writer.put(block.begin, values if finish is None else finish(values), columns, names[block.number])


def _across(store: Store, plan: Plan, operand: Array, columns: slice, dtype: Any, result: Any, finish: Any, bar: Bar
            ) -> None:  # fmt: skip
    if str(columns.start) in result.done:
        return
    extent = store.lines[1]
    checkpoint = Checkpoint(getattr(result, "path", None), {"job": getattr(result, "job", ""), "panel": columns.start})
    begin, saved = checkpoint.load()
    total = np.zeros((extent, columns.stop - columns.start), np.float64) if saved is None else saved
    is_narrow = total.shape[1] * np.dtype(dtype).itemsize <= LINE
    for block in iterate(store, plan.starts, dtype, bar, range(begin, plan.blocks), is_narrow=is_narrow):
        rows = dense_panel(operand[block.begin : block.end], columns, dtype)
        total += multiply_transposed(block, rows, extent)
        checkpoint.save(block.number + 1, total)
    for begin in range(0, extent, ROWS_AT_ONCE):
        values = total[begin : begin + ROWS_AT_ONCE].astype(dtype)
        result.write(begin, values if finish is None else finish(values), columns)
    result.record(str(columns.start))
    checkpoint.end()


def is_ready(operand: Array, dtype: Any) -> bool:
    """Return whether kernels take an operand as it is: in memory, contiguous and of their dtype."""
    return operand.dtype == dtype and operand.flags.c_contiguous and not isinstance(operand, np.memmap)


def dense_panel(operand: Array, columns: slice, dtype: Any) -> Array:
    """Return columns of an operand as a contiguous array in memory; memory maps are copied row by row."""
    panel = operand[:, columns]
    if is_ready(panel, dtype):
        return panel
    copy = empty(panel.shape, np.dtype(dtype))
    for begin in range(0, len(copy), ROWS_AT_ONCE):
        copy[begin : begin + ROWS_AT_ONCE] = panel[begin : begin + ROWS_AT_ONCE]
    return copy


def identity(store: Store) -> dict[str, Any]:
    """Return what tells a file from its next version: size and time of its parts."""
    path = Path(store.path)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    sizes = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    return {"file": store.label, "format": store.format, "nnz": store.nnz, "files": digest(np.array(sizes, np.int64))}


# ------------------------------------------------------------------------------------------ sampled products


def sampled(store: Store, memory: int, left: Array, right: Array, out: Any, bar: bool) -> Any:
    """Multiply each entry by the product of its rows of `left` (of its line) and `right` (of its index)."""
    dtype = compute_dtype(store.data.dtype, left.dtype, right.dtype)
    resident_bytes = right.size * dtype.itemsize
    resident_bytes += store.nnz * (dtype.itemsize + store.indices.dtype.itemsize) if out is None else 0
    line = left.shape[1] * dtype.itemsize
    plan = make_plan(store, memory, "sampled", dtype, 0, resident_bytes=resident_bytes + line, column=0, line=0)
    everything = slice(None)
    right = dense_panel(right, everything, dtype)
    target = (
        _ResultFolder(store, Path(out), dtype, digest(left, right, np.array(plan.starts))) if out is not None else None
    )
    parts: list[Any] = [MemoryResult((store.nnz,), t) for t in (dtype, store.indices.dtype)]
    if target is not None:
        parts = list(target.parts)
    numbers = [n for n in range(plan.blocks) if not all(str(n) in part.done for part in parts)]
    is_complete = False
    try:
        for block in iterate(store, plan.starts, dtype, Bar(plan.bytes_read, bar), numbers):
            values = np.zeros(len(block.data), dtype)
            if len(values):
                rows = dense_panel(left[block.begin : block.end], everything, dtype)
                run("sddmm", block, dtype, X=rows, Y=right, o=values)
            for part, array in zip(parts, (values, block.indices.astype(store.indices.dtype)), strict=True):
                part.write(int(store.indptr[block.begin]), array)
                part.record(str(block.number))
        is_complete = True
    finally:
        for part in parts:
            part.close(is_complete)
    return target.finish() if target is not None else (parts[0].array, parts[1].array)


class _ResultFolder:
    """A folder of .npy files with the pattern of a store and new values; in the end in the form that its name says."""

    def __init__(self, store: Store, path: Path, dtype: Any, key: str) -> None:
        self.store, self.path, self.partial = store, check_new(path, "out"), Path(f"{path}.partial")
        job = {"store": identity(store), "key": key}
        try:
            self.partial.mkdir(exist_ok=True)
            np.save(self.partial / "indptr.npy", store.indptr)
            np.save(self.partial / "shape.npy", np.array(store.shape))
            np.save(self.partial / "format.npy", np.array(store.format.encode()))
        except OSError as error:
            raise WriteError(f"out: {path} cannot be written: {error.strerror or error}.") from error
        types = {"data": dtype, "indices": store.indices.dtype}
        self.parts = [NpyResult(self.partial / f"{n}.npy", (store.nnz,), t, job) for n, t in types.items()]

    def finish(self) -> Path:
        """Give the folder its name, or copy it to another form block by block."""
        if not is_stored(self.path):
            os.replace(self.partial, self.path)
            return self.path
        store = open_store(self.partial)
        starts = block_starts(store.indptr, store.entry_bytes, 16, MAX_BLOCK_BYTES)
        blocks = read_blocks(store, starts, store.data.dtype, range(len(starts) - 1))
        write_lines((to_scipy(block, store.lines[1]) for block in blocks), self.path, store.format)
        shutil.rmtree(self.partial)
        return self.path


# ----------------------------------------------------------------------------------- kernels of blocks


# Multiply-adds of a product with a densified block in the time of one of a sparse product, whose rows are scattered.
SCATTER_COST = 30
GRAM_PANEL_BYTES = 512  # of a row of a dense panel: 128 columns of float32
DENSIFIED_PANEL_BYTES = 256 << 10  # of a dense panel, which stays in the second cache
# Threads of a process that call kernels take turns: each call uses all of its threads.
LOCK = ForkLock()


@cache
def kernel(name: str, dtype: str, idtype: str) -> Any:
    """Compile a kernel once in a process."""
    makers: dict[str, Callable[[], Any]] = {
        "added": lambda: added_spmm(dtype, idtype),
        "spmm": lambda: ops.spmm(dtype, idtype=idtype),
        "spmv": lambda: ops.spmv(dtype, idtype=idtype),
        "transposed": lambda: ops.spmm(dtype, "csc", idtype=idtype),
        "sddmm": lambda: ops.sddmm(dtype, idtype=idtype),
    }
    return make_kernel(makers[name]())


def run(name: str, block: Block, dtype: Any, **operands: Any) -> Any:
    """Call a kernel on the arrays of a block, whose indices were validated when it was read."""
    function = kernel(name, np.dtype(dtype).name, block.indices.dtype.name)
    operands = {"indptr": block.indptr, "indices": block.indices, **operands}
    operands.setdefault("s" if name == "sddmm" else "a", block.data)
    with LOCK, unchecked():
        return function(**operands)


def multiply(block: Block, B: Array, out: Array | None = None) -> Array:
    """Return ``block @ B`` for a matrix or a vector, as a matrix, in the contiguous array `out` if it is given."""
    if B.ndim == 1 or B.shape[1] == 1:
        result = {} if out is None else {"y": out.reshape(-1)}
        return run("spmv", block, B.dtype, x=B.reshape(-1), **result).reshape(-1, 1)
    return run("spmm", block, B.dtype, B=B, **({} if out is None else {"C": out}))


def multiply_transposed(block: Block, Y: Array, extent: int) -> Array:
    """Return ``block.T @ Y`` of shape (extent, columns of Y)."""
    return run("transposed", block, Y.dtype, B=as_matrix(Y), m=extent)


def add_gram(block: Block, extent: int, total: Array, room: int) -> None:
    """Add ``block.T @ block`` to a float64 matrix.

    Short rows are multiplied as sparse ones, long ones by a densified part of at most `room` bytes.
    """
    lengths = np.diff(block.indptr).astype(np.float64)
    if not lengths.sum():
        return
    if SCATTER_COST * (lengths**2).sum() < lengths.sum() * extent:
        rows = to_scipy(block, extent)
        columns = rows.T.tocsr()
        with LOCK:
            product = matmul(columns, rows)
        for begin in range(0, extent, 1024):
            total[begin : begin + 1024] += product[begin : begin + 1024].toarray()
        return
    _add_dense_gram(block, extent, total, room)


def _add_dense_gram(block: Block, extent: int, total: Array, room: int) -> None:
    """Multiply panels of columns, made dense by some rows at a time, by the columns up to the panel's end."""
    dtype = block.data.dtype
    width = min(extent, GRAM_PANEL_BYTES // dtype.itemsize)
    rows = max(1, min(DENSIFIED_PANEL_BYTES // (width * dtype.itemsize), room // (2 * extent * dtype.itemsize)))
    whole = to_scipy(block, extent)
    panels = -(-extent // width)
    sums = [np.zeros((min((p + 1) * width, extent), min(width, extent - p * width)), dtype) for p in range(panels)]
    for begin in range(0, block.end - block.begin, rows):
        part = whole[begin : begin + rows]
        columns, dense = part.T.tocsr(), part.toarray()
        indptr, indices = columns.indptr.astype(np.int32), columns.indices.astype(np.int32)
        for panel, out in enumerate(sums):
            B = np.ascontiguousarray(dense[:, panel * width : (panel + 1) * width])
            lines, count = len(out), int(indptr[len(out)])
            left = Block(0, 0, lines, indptr[: lines + 1], indices[:count], columns.data[:count])
            run("added", left, dtype, B=B, C=out)
    for panel, out in enumerate(sums):
        begin, end = panel * width, min((panel + 1) * width, extent)
        total[: len(out), begin:end] += out
        total[begin:end, :begin] += out[:begin].T


def to_scipy(block: Block, extent: int) -> Any:
    """Wrap a block as a scipy array without copies."""
    return sp.csr_array((block.data, block.indices, block.indptr), shape=(block.end - block.begin, extent))


def _distinct_entries(block: Block, extent: int) -> sp.csr_array:
    """Return the lines of a block as rows in float64, with entries of the same coordinates added up."""
    indptr = block.indptr - block.indptr[0]
    lines = sp.csr_array((block.data.astype(np.float64), block.indices, indptr), shape=(len(indptr) - 1, extent))
    if not lines.has_canonical_format:
        lines.indices = lines.indices.copy()  # those of the file
        lines.sum_duplicates()
    return lines


def column_moments(block: Block, extent: int) -> tuple[Array, Array]:
    """Return mean and summed squared deviation of each column of a block, in float64."""
    rows, lines = block.end - block.begin, _distinct_entries(block, extent)
    counts = np.bincount(lines.indices, minlength=extent)
    mean = np.bincount(lines.indices, lines.data, extent) / max(rows, 1)
    deviation = lines.data - mean[lines.indices]
    return mean, np.bincount(lines.indices, deviation * deviation, extent) + (rows - counts) * mean * mean


def line_moments(block: Block, extent: int) -> tuple[Array, Array]:
    """Return mean and summed squared deviation of each line of a block, in float64."""
    entries = _distinct_entries(block, extent)
    lengths = np.diff(entries.indptr)
    lines = np.repeat(np.arange(len(lengths)), lengths)
    mean = np.bincount(lines, entries.data, len(lengths)) / max(extent, 1)
    deviation = entries.data - mean[lines]
    return mean, np.bincount(lines, deviation * deviation, len(lengths)) + (extent - lengths) * mean * mean


def merge_moments(left: tuple[int, Array, Array], right: tuple[int, Array, Array]) -> tuple[int, Array, Array]:
    """Combine counts, means and squared deviations of two sets of rows (Chan, Golub and LeVeque, 1979)."""
    (n, mean, square), (m, other_mean, other_square) = left, right
    if not n + m:
        return left
    gap = other_mean - mean
    return n + m, mean + gap * (m / (n + m)), square + other_square + gap * gap * (n * m / (n + m))


def compute_dtype(*dtypes: Any) -> np.dtype[Any]:
    """Return float32 or float64, whichever holds the values of all dtypes."""
    for dtype in dtypes:
        if np.dtype(dtype).kind not in "biuf":
            raise ArgumentTypeError(f"B: expected real numbers, got {dtype}. Convert it with astype.")
    common = np.result_type(*dtypes, np.float16)
    return np.dtype(np.float32 if common.itemsize <= 4 else np.float64)


def as_dense(value: Any, name: str, rows: int, dimensions: tuple[int, ...] = (1, 2)) -> Array:
    """Return a dense operand as an array with so many rows."""
    if sp.issparse(value) or hasattr(value, "as_source"):
        fault = f"{name}: expected a dense array, got a sparse {type(value).__name__}"
        raise ArgumentTypeError(f"{fault}. Make it dense, or read the matrix whole for products of sparse matrices.")
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except Exception as error:  # of the object's own class
        raise ArgumentTypeError(f"{name}: expected a dense array, got {type(value).__name__}. Pass numpy's.") from error
    if np.ma.isMaskedArray(array) or array.dtype.kind not in "biuf":
        what = "a masked array" if np.ma.isMaskedArray(array) else f"{type(value).__name__} of {array.dtype}"
        raise ArgumentTypeError(f"{name}: expected an array of real numbers, got {what}. Convert it with astype.")
    if array.ndim not in dimensions or array.shape[0] != rows:
        expected = f"{rows} rows and {' or '.join(map(str, dimensions))} dimensions"
        raise ArgumentError(f"{name}: expected {expected}, got the shape {array.shape}. Reshape it.")
    return array


def as_matrix(array: Array) -> Array:
    """Return a vector as one column."""
    return array[:, None] if array.ndim == 1 else array


__all__ = [
    "MAX_GRAM_FEATURES",
    "PCA",
    "add_gram",
    "as_dense",
    "as_matrix",
    "by_passes",
    "check_components",
    "column_moments",
    "compute_dtype",
    "dense_panel",
    "from_gram",
    "identity",
    "kernel",
    "line_moments",
    "merge_moments",
    "multiply",
    "multiply_transposed",
    "plan_product",
    "product",
    "run",
    "sampled",
    "to_scipy",
]
