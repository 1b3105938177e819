# SPDX-License-Identifier: Apache-2.0
"""`BlockMatrix`: a sparse matrix on disk with the products that need one pass over it, or a few."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.blocks import products
from sparsetir.blocks.products import (
    MAX_GRAM_FEATURES,
    PCA,
    by_passes,
    check_components,
    dense_panel,
    from_gram,
    identity,
    plan_product,
    product,
    sampled,
)
from sparsetir.blocks.reading import BUFFERS, DEFAULT_MEMORY, Bar, Plan, iterate, make_plan, parse_memory, with_estimate
from sparsetir.blocks.results import Checkpoint, beside, check_path, file_result
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop import is_sparse
from sparsetir.io.stores import Array, Store, open_store
from sparsetir.utils.arguments import as_count, as_flag, as_path, is_integer, shown
from sparsetir.utils.buffers import OutputPool


def open_blocks(path: Any, name: str | None = None, *, memory: str | int = DEFAULT_MEMORY) -> BlockMatrix:
    """Open a sparse matrix on disk that may be larger than memory.

    Only the row pointers are read; values and indices are read block by block by the products.

    Parameters
    ----------
    path : str, Path, h5py.Group, zarr.Group or backed matrix of anndata
        An ``.h5ad`` file, a ``.zarr`` folder, a ``.bsp.h5`` file of Binsparse, or a folder with indptr, indices, data
        and shape ``.npy`` (a file of `scipy.sparse.save_npz`, unpacked). CSR or CSC.
    name : str, optional
        Of the matrix in an h5ad or zarr file: "X" (the default), "layers/NAME" or "obsp/NAME".
    memory : str or int
        Limit in bytes, such as "2GiB", of everything that a product allocates: buffers, panels of the dense operand,
        results.

    Returns
    -------
    BlockMatrix

    Raises
    ------
    MissingFileError
        There is no such file.
    FileFormatError
        The file is damaged, or has no CSR or CSC matrix of that name.
    ArgumentError, ArgumentTypeError
        `memory` is no positive size.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2.0], [3, 0]]))
    >>> M = sparsetir.open_blocks(sparsetir.save_blocks(A, "small"), memory="1MiB")
    >>> M.shape, M.nnz, (M @ np.ones((2, 1))).tolist()
    ((2, 2), 2, [[2.0], [3.0]])
    """
    limit = parse_memory(memory)
    return BlockMatrix(open_store(path, name), limit)


class BlockMatrix:
    """A sparse matrix on disk; see `open_blocks`.

    Each product reads the file once, or once for each panel of a dense operand that does not fit. ``progress=True``
    prints a line on stderr. With ``out=`` the result is written by blocks: an interrupted product, called again
    with the same arguments, continues from its last finished block, and the file has its name only when complete.
    """

    def __init__(self, store: Store, memory: int) -> None:
        self.store, self.memory = store, memory
        self._pool = OutputPool()  # of products; other operations need the memory for themselves

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"<BlockMatrix {rows} x {columns} {self.dtype} {self.store.format}, {self.nnz} entries, {self.path}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.store.path, self.store.name or None, self.store.format, self.memory)

    @property
    def path(self) -> str:
        return self.store.label

    @property
    def shape(self) -> tuple[int, int]:
        return self.store.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.store.data.dtype)

    @property
    def nnz(self) -> int:
        return self.store.nnz

    @property
    def ndim(self) -> int:
        return 2

    @property
    def is_csr(self) -> bool:
        return self.store.format == "csr"

    def plan(self, B: Any, *, out: Any = None) -> Plan:
        """Return passes, blocks, bytes and estimated seconds of ``spmm(B, out=out)``, without running it."""
        B = products.as_dense(B, "B", self.shape[1])
        plan = plan_product(self.store, self.memory, products.as_matrix(B), self.is_csr, out)
        return with_estimate(plan, self.store)

    def spmm(self, B: Any, out: Any = None, *, progress: bool = False, client: Any = None) -> Any:
        """Multiply by a dense matrix.

        Parameters
        ----------
        B : array, shape (columns, k)
            In memory or a memory map. The result is float32 if that holds the values of both, else float64.
        out : str or Path, optional
            For the result, which may then be larger than the memory limit: a ``.npy`` file, a new ``.zarr``, or a new
            member of a zarr folder such as ``cells.zarr/obsm/X_pca``.
        progress : bool
        client : dask.distributed.Client, optional
            Multiply on its workers, each block once; see `sparsetir.dask`.

        Returns
        -------
        ndarray of shape (rows, k), the path of `out`, or with `client` a dask array

        Raises
        ------
        MemoryLimitError
            One column of B and its result do not fit.
        FileFormatError
            A block is damaged; the message names the block and its rows.
        """
        B = products.as_dense(B, "B", self.shape[1], (2,))
        if client is not None:
            if not hasattr(client, "as_current"):
                raise ArgumentTypeError(f"client: expected a client of dask, got {shown(client)}. Pass one.")
            from sparsetir.blocks.cluster import matmul

            with client.as_current():
                return matmul(self, B)
        return product(self.store, self.memory, B, is_along=self.is_csr, out=out, bar=progress, pool=self._pool)

    def spmv(self, x: Any, *, progress: bool = False) -> Array:
        """Multiply by a vector of shape (columns,)."""
        x = products.as_dense(x, "x", self.shape[1], (1,))
        y = product(self.store, self.memory, x[:, None], is_along=self.is_csr, out=None, bar=progress, pool=self._pool)
        return y[:, 0]

    def rmatmul(self, Y: Any, out: Any = None, *, progress: bool = False) -> Any:
        """Return ``M.T @ Y`` of shape (columns, k), in one pass over the blocks of M."""
        Y = products.as_dense(Y, "Y", self.shape[0])
        matrix = products.as_matrix(Y)
        Z = product(self.store, self.memory, matrix, is_along=not self.is_csr, out=out, bar=progress, pool=self._pool)
        return Z[:, 0] if Y.ndim == 1 and out is None else Z

    @property
    def T(self) -> BlockMatrix:
        """The transposed matrix: the same file, its rows read as columns."""
        format = "csc" if self.is_csr else "csr"
        return BlockMatrix(replace(self.store, format=format, shape=self.shape[::-1]), self.memory)

    def __matmul__(self, B: Any) -> Any:
        B = products.as_dense(B, "B", self.shape[1])
        return self.spmv(B) if B.ndim == 1 else self.spmm(B)

    __array_ufunc__ = None  # numpy leaves ``Y @ M`` to `__rmatmul__`

    def __rmatmul__(self, Y: Any) -> Any:
        return (self.T @ (Y if is_sparse(Y) else np.asarray(Y)).T).T

    # -------------------------------------------------------------------------------------------- statistics

    def _moments(self, progress: bool) -> tuple[Array, Array]:
        """Return mean and summed squared deviation of each column."""
        self._pool = OutputPool()
        extent = self.store.lines[1]
        resident_bytes = 8 * self.shape[1] * 6
        # Weights in float64, deviations and their squares: 24 bytes an entry besides the buffers.
        plan = make_plan(
            self.store, self.memory // 2, "moments", np.float64, 0, resident_bytes=resident_bytes // 2, column=0, line=8
        )
        blocks = iterate(self.store, plan.starts, self.dtype, Bar(plan.bytes_read, progress))
        mean, squares = np.zeros(self.shape[1]), np.zeros(self.shape[1])
        if not self.is_csr:
            for block in blocks:
                part = slice(block.begin, block.end)
                mean[part], squares[part] = products.line_moments(block, extent)
            return mean, squares
        total = (0, mean, squares)
        for block in blocks:
            total = products.merge_moments(total, (block.end - block.begin, *products.column_moments(block, extent)))
        return total[1], total[2]

    def colsums(self, *, progress: bool = False) -> Array:
        """Return the sum of each column in float64, shape (columns,)."""
        return self._moments(progress)[0] * self.shape[0]

    def sum(self, axis: int | None = None, *, progress: bool = False) -> Any:
        """Return the sums of columns (axis 0) or of rows (axis 1), or of all entries, in float64, in one pass.

        Examples
        --------
        >>> import scipy.sparse as sp, sparsetir, tempfile
        >>> path = tempfile.mkdtemp() + "/matrix"
        >>> M = sparsetir.open_blocks(sparsetir.save_blocks(sp.csr_array([[0.0, 2.0], [3.0, 4.0]]), path))
        >>> M.sum(axis=1).tolist(), M.mean(axis=0).tolist()
        ([2.0, 7.0], [1.5, 3.0])
        """
        if axis is None:
            return float(self.colsums(progress=progress).sum())
        if not is_integer(axis) or axis not in (0, 1, -1, -2):
            error = ArgumentError if is_integer(axis) else ArgumentTypeError
            raise error(f"axis: expected 0, 1 or None, got {shown(axis)}. Columns are summed by 0, rows by 1.")
        if axis in (0, -2):
            return self.colsums(progress=progress)
        return self.spmv(np.ones(self.shape[1]), progress=progress)

    def mean(self, axis: int | None = None, *, progress: bool = False) -> Any:
        """Return the means of columns (axis 0) or of rows (axis 1), or of all elements, zeros included, in float64."""
        total = self.sum(axis, progress=progress)
        rows, columns = self.shape
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.divide(total, rows * columns if axis is None else rows if axis in (0, -2) else columns)

    def colvars(self, *, ddof: int = 0, progress: bool = False) -> Array:
        """Return the variance of each column in float64, zeros included, shape (columns,).

        Parameters
        ----------
        ddof : int
            Subtracted from the number of rows in the divisor, as numpy's.
        """
        ddof = as_count(ddof, "ddof", least=0)
        squares = self._moments(progress)[1]
        with np.errstate(invalid="ignore", divide="ignore"):
            return squares / max(self.shape[0] - ddof, 0)

    def gram(self, *, center: bool = False, out: Any = None, progress: bool = False) -> Any:
        """Return ``M.T @ M`` in float64, shape (columns, columns).

        Parameters
        ----------
        center : bool
            Subtract the mean of each column first, without making M dense.
        out : str or Path, optional
            As for `spmm`; the path is returned. Of CSR, a killed run continues from the sum that was last kept beside
            it.
        """
        n, center = self.shape[1], as_flag(center, "center")
        self._pool = OutputPool()
        path = None if out is None else check_path(out)
        job = {"store": identity(self.store), "operation": "gram", "memory": self.memory}
        checkpoint = Checkpoint(path, job)
        total = self._gram_by_rows(progress, checkpoint) if self.is_csr else self._gram_by_columns(progress)
        if center:
            mean = self.colsums()
            for begin in range(0, n, 1024):
                total[begin : begin + 1024] -= np.outer(mean[begin : begin + 1024] / max(self.shape[0], 1), mean)
        if path is None:
            return total
        result = file_result(path, total.shape, total.dtype, {**job, "center": bool(center)})
        result.write(0, total)
        result.close(is_complete=True)
        checkpoint.end()
        return path

    def _gram_by_rows(self, progress: bool, checkpoint: Checkpoint) -> Array:
        n, dtype = self.shape[1], products.compute_dtype(self.dtype)
        # The sum in float64, the product of a block in the dtype of the kernel, and its sparse form at worst.
        resident_bytes = n * n * (8 + dtype.itemsize)
        plan = make_plan(self.store, self.memory, "gram", dtype, 0, resident_bytes=resident_bytes, column=0, line=8)
        room = max(1, (self.memory - resident_bytes) // (BUFFERS + 2))
        begin, saved = checkpoint.load()
        total = np.zeros((n, n)) if saved is None else saved
        bar = Bar(plan.bytes_read, progress)
        for block in iterate(self.store, plan.starts, dtype, bar, range(begin, plan.blocks)):
            products.add_gram(block, n, total, room)
            checkpoint.save(block.number + 1, total)
        return total

    def _gram_by_columns(self, progress: bool) -> Array:
        """Multiply panels of columns, made dense, by all columns: one pass for each panel."""
        (m, n), dtype = self.shape, products.compute_dtype(self.dtype)
        plan = make_plan(
            self.store, self.memory, "gram", dtype, n, resident_bytes=8 * n * n, column=m * dtype.itemsize, line=8
        )
        total = np.zeros((n, n))
        bar = Bar(2 * plan.bytes_read, progress)
        for begin in range(0, n, max(plan.panel, 1)):
            end = min(begin + plan.panel, n)
            starts = sorted({begin, end, *(s for s in plan.starts if begin < s < end)})
            panel = np.zeros((m, end - begin), dtype)
            for block in iterate(self.store, starts, dtype, bar):
                columns = np.repeat(np.arange(block.begin, block.end) - begin, np.diff(block.indptr))
                np.add.at(panel, (block.indices, columns), block.data)
            for block in iterate(self.store, plan.starts, dtype, bar):
                total[block.begin : block.end, begin:end] = products.multiply(block, panel)
        return total

    def pca(self, k: int = 50, *, progress: bool = False) -> PCA:
        """Return the first `k` principal components.

        Up to 8,192 columns from the Gram matrix, exactly, in two passes, if `memory` holds three dense matrices of all
        columns (96 MB for 2,000); else by a block Krylov method, which warns where its passes leave an error.

        Parameters
        ----------
        k : int

        Returns
        -------
        PCA
            ``components_``, ``explained_variance_`` and the other attributes of scikit-learn, and ``transform``.
        """
        k = check_components(k, self.shape)
        mean, squares = self._moments(progress)
        n = self.shape[1]
        if n <= MAX_GRAM_FEATURES and 24 * n * n <= self.memory:
            gram = self.gram(progress=progress)
            gram -= np.outer(mean, mean) * self.shape[0]
            return from_gram(gram, mean, self.shape[0], k)
        return by_passes(partial(self._apply_gram, mean), float(squares.sum()), mean, self.shape[0], k)

    def _apply_gram(self, mean: Array, Q: Array) -> Array:
        """Return the centred Gram matrix times Q, in one pass of a CSR matrix."""
        correction = self.shape[0] * np.outer(mean, mean @ Q)
        if not self.is_csr:
            return self.rmatmul(self.spmm(Q)) - correction
        self._pool = OutputPool()
        extent, width = self.shape[1], Q.shape[1]
        resident_bytes = 3 * extent * width * 8
        plan = make_plan(
            self.store, self.memory, "pca", np.float64, 0, resident_bytes=resident_bytes, column=0, line=8 * width
        )
        total = np.zeros(Q.shape)
        for block in iterate(self.store, plan.starts, np.float64, Bar(0, False)):
            total += products.multiply_transposed(block, products.multiply(block, Q), extent)
        return total - correction

    # -------------------------------------------------------------------------------------------- graphs

    def sddmm(self, X: Any, Y: Any, out: Any = None, *, progress: bool = False) -> Any:
        """Multiply each entry (i, j) by the inner product of ``X[i]`` and ``Y[j]``.

        Parameters
        ----------
        X : array, shape (rows, k)
        Y : array, shape (columns, k)
        out : str or Path, optional
            A new name in one of the forms of `save_blocks`, which `open_blocks` opens.

        Returns
        -------
        scipy.sparse.csr_array or csc_array, or the path of `out`
        """
        X = products.as_dense(X, "X", self.shape[0], (2,))
        Y = products.as_dense(Y, "Y", self.shape[1], (2,))
        if X.shape[1] != Y.shape[1]:
            raise ArgumentError(f"Y: expected {X.shape[1]} columns as of X, got {Y.shape[1]}. Pass matrices alike.")
        out = as_path(out, "out", "the name of a folder") if out is not None else None
        self._pool = OutputPool()
        left, right = (X, Y) if self.is_csr else (Y, X)
        result = sampled(self.store, self.memory, left, right, out, progress)
        if out is not None:
            return result
        kind = sp.csr_array if self.is_csr else sp.csc_array
        return kind((*result, self.store.indptr), shape=self.shape)

    def gcn(self, weights: Sequence[Any], X: Any, out: Any = None, *, progress: bool = False) -> Any:
        """Run a graph convolutional network layer by layer: ``relu(M @ (H @ W))``, the last layer without relu.

        Features of a layer that do not fit are computed by panels of columns; those between layers are then on disk.

        Parameters
        ----------
        weights : sequence of arrays, shapes (features, features of the next layer)
        X : array, shape (columns, features)
            M is square.
        out : str or Path, optional
            As for `spmm`.
        """
        H = products.as_dense(X, "X", self.shape[1], (2,))
        if self.shape[0] != self.shape[1]:
            raise ArgumentError(f"M: expected a square matrix, got the shape {self.shape}. Pass an adjacency matrix.")
        if not isinstance(weights, (list, tuple)) or not weights:
            raise ArgumentTypeError(f"weights: expected a list of matrices, got {type(weights).__name__}. Pass [W].")
        layers = [products.as_dense(W, "weights", -1 if W is None else len(np.atleast_1d(W)), (2,)) for W in weights]
        folder = beside(check_path(out)).parent if out is not None else None
        with tempfile.TemporaryDirectory(prefix=".gcn-", dir=folder) as scratch:
            for number, W in enumerate(layers):
                is_last = number == len(layers) - 1
                H = self._convolve(H, W, scratch, number, out if is_last else None, is_last, progress)
        return H

    def _convolve(self, H: Array, W: Array, scratch: str, number: int, out: Any, is_last: bool, bar: bool) -> Any:
        if H.shape[1] != W.shape[0]:
            raise ArgumentError(f"weights: expected {H.shape[1]} rows, got the shape {W.shape}. Pass layers that fit.")
        dtype = products.compute_dtype(self.dtype, H.dtype, W.dtype)
        # Products with the weights are on disk where they and the result would take a third of the memory.
        is_large = 3 * self.shape[0] * W.shape[1] * dtype.itemsize > self.memory // 2
        P: Array = _by_rows(H, W.astype(dtype), Path(scratch, f"{number}.npy") if is_large else None)
        target = out if is_last or not is_large else Path(scratch, f"{number}-out.npy")
        finish = None if is_last else _relu
        result = product(self.store, self.memory, P, is_along=self.is_csr, out=target, bar=bar, finish=finish,
                         tag="" if is_last else "relu")  # fmt: skip
        return result if target is None or is_last else np.load(result, mmap_mode="r")


def _relu(values: Array) -> Array:
    return np.maximum(values, 0, out=values)


def _by_rows(H: Array, W: Array, path: Path | None) -> Array:
    shape = (H.shape[0], W.shape[1])
    P = np.empty(shape, W.dtype) if path is None else np.lib.format.open_memmap(path, "w+", W.dtype, shape)
    step = max(1, (8 << 20) // max(1, H.shape[1] * 8))
    for begin in range(0, len(H), step):
        P[begin : begin + step] = dense_panel(H[begin : begin + step], slice(None), W.dtype) @ W
    return P


def _reopen(path: str, name: str | None, format: str, memory: int) -> BlockMatrix:
    """Open the file again in another process."""
    M = open_blocks(path, name, memory=memory)
    return M if M.store.format == format else M.T


__all__ = ["BlockMatrix", "open_blocks"]
