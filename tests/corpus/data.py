# SPDX-License-Identifier: Apache-2.0
"""Index structures and values for the corpus, and the dense arrays they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np

KINDS = ("random", "empty_rows", "zero_nnz", "one_by_one", "wide", "tall", "skewed", "no_rows")
#: for every program too, but one type each is enough: rows in parallel, full vector tiles
LARGE_KIND = "large"
SMALL_KINDS = ("empty_rows", "zero_nnz", "one_by_one", "no_rows")

#: rows, columns and dense width of a matrix of each kind
MATRIX_SIZES = {
    "random": (17, 23, 5),
    "empty_rows": (9, 7, 3),
    "zero_nnz": (5, 4, 3),
    "one_by_one": (1, 1, 1),
    "wide": (3, 40, 33),
    "tall": (40, 3, 16),
    "skewed": (20, 37, 100),
    "no_rows": (0, 4, 3),
    "duplicates": (8, 6, 5),
    "unsorted": (12, 19, 5),
    "large": (1500, 900, 40),
}
#: dimensions of a tensor of each kind, as many as its order
TENSOR_SIZES = {
    "random": (6, 7, 5, 4, 3),
    "empty_rows": (6, 4, 3, 3, 2),
    "zero_nnz": (3, 2, 4, 2, 3),
    "one_by_one": (1, 1, 1, 1, 1),
    "wide": (2, 12, 9, 3, 2),
    "tall": (20, 2, 3, 2, 2),
    "skewed": (8, 9, 7, 3, 3),
    "no_rows": (0, 3, 2, 2, 2),
    "large": (30, 20, 15, 3, 3),
}
_DENSITY = {"wide": 0.2, "skewed": 0.03, "zero_nnz": 0.0, "one_by_one": 1.0, "large": 0.02}
_BLOCKS = {"random": 3, "one_by_one": 1, "wide": 4}


#: corners of real matrices by kind; empty without the folder of real inputs
REAL: dict[str, Any] = {}


def add_real(name: str, matrix: Any) -> str:
    """A kind whose two-dimensional structures are a corner of `matrix`; returns its name."""
    kind = f"real_{name}"
    REAL[kind] = matrix[:600, :500].tocsr()
    MATRIX_SIZES[kind] = (*REAL[kind].shape, 24)
    return kind


def block_size(kind: str) -> int:
    """The edge of a block in the block formats."""
    return _BLOCKS.get(kind, 2)


def values(rng: np.random.Generator, shape: int | Sequence[int], dtype: str) -> np.ndarray:
    """Random values: in [-1, 1) for floats, 0 or 1 for narrow integers and bools, small for the others."""
    if "float" in dtype:
        return rng.uniform(-1, 1, shape).astype(dtype)
    low, high = (0, 2) if np.dtype(dtype).itemsize == 1 else (-4, 5)
    return rng.integers(low, high, shape).astype(dtype)


def coordinates(rng: np.random.Generator, kind: str, dims: Sequence[int]) -> np.ndarray:
    """Stored coordinates, one a line, in lexicographic order; unsorted or repeated where `kind` says so."""
    if kind in REAL and len(dims) == 2:
        found = np.argwhere(REAL[kind][: dims[0], : dims[1]].toarray() != 0)
        return found.reshape(-1, 2)
    mask = rng.random(tuple(dims)) < _DENSITY.get(kind, 0.3)
    if kind == "empty_rows":
        mask[::2] = False
    if kind == "skewed":
        mask[int(rng.integers(dims[0]))] = True
    found = np.argwhere(mask)
    if kind == "duplicates":
        return np.repeat(found, rng.integers(1, 4, len(found)), axis=0)
    if kind == "unsorted":
        found = rng.permutation(found)
        return found[np.argsort(found[:, 0], kind="stable")]
    return found


def pointers(parents: np.ndarray, count: int, idtype: str) -> np.ndarray:
    """The indptr of children whose parents' positions, ascending, are `parents`."""
    return np.searchsorted(parents, np.arange(count + 1)).astype(idtype)


@dataclass(frozen=True)
class Csr:
    """A matrix structure: `rows` and `cols` of its stored positions, rows ascending."""

    m: int
    n: int
    feat: int
    rows: np.ndarray
    cols: np.ndarray

    @property
    def nnz(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> np.ndarray:
        """Stored positions of each row."""
        return np.bincount(self.rows, minlength=self.m)

    def arrays(self, idtype: str, suffix: str = "") -> dict[str, np.ndarray]:
        """indptr and indices, by name."""
        return {
            f"indptr{suffix}": pointers(self.rows, self.m, idtype),
            f"indices{suffix}": self.cols.astype(idtype),
        }

    def sizes(self, *names: str) -> dict[str, int]:
        """The named sizes."""
        return {name: getattr(self, name) for name in names}

    def transposed(self) -> Csr:
        """The same positions, by column."""
        order = np.lexsort((self.rows, self.cols))
        return Csr(self.n, self.m, self.feat, self.cols[order], self.rows[order])


def matrix(rng: np.random.Generator, kind: str, m: int | None = None, n: int | None = None) -> Csr:
    """A matrix structure of `kind`; `m` and `n` replace its usual sizes."""
    rows, cols, feat = MATRIX_SIZES[kind]
    rows, cols = rows if m is None else m, cols if n is None else n
    found = coordinates(rng, kind, (rows, cols))
    return Csr(rows, cols, feat, found[:, 0], found[:, 1])


def padded_rows(structure: Csr, idtype: str) -> np.ndarray:
    """ELL indices, ``m x width``: slots past a row's end hold the out-of-range coordinate n."""
    width = int(structure.counts.max(initial=0))
    out = np.full((structure.m, width), structure.n, idtype)
    starts = np.cumsum(structure.counts) - structure.counts
    out[structure.rows, np.arange(structure.nnz) - starts[structure.rows]] = structure.cols
    return out


def poisoned(data: np.ndarray, absent: np.ndarray) -> np.ndarray:
    """`data` with NaN where `absent`: a program that reads padding cannot go unnoticed."""
    return np.where(absent, np.array(np.nan, data.dtype), data)


def fibers(found: np.ndarray, dims: Sequence[int], idtype: str) -> dict[str, Any]:
    """The CSF of sorted coordinates: indptr0, indices0, n0, indptr1, indices1, n1, ... from a compressed root."""
    out: dict[str, Any] = {}
    parents, above = np.zeros(len(found), np.int64), 1
    for level in range(len(dims)):
        heads = np.ones(len(found), bool)
        heads[1:] = (np.diff(found[:, : level + 1], axis=0) != 0).any(axis=1)
        out[f"indptr{level}"] = pointers(parents[heads], above, idtype)
        out[f"indices{level}"] = found[heads, level].astype(idtype)
        parents, above = np.cumsum(heads) - 1, int(heads.sum())
        out[f"n{level}"] = above
    return out


def tensor(rng: np.random.Generator, kind: str, order: int, idtype: str) -> dict[str, Any]:
    """A random CSF of `order` levels with its dimensions d0, d1, ..."""
    dims = TENSOR_SIZES[kind][:order]
    sizes = {f"d{level}": size for level, size in enumerate(dims)}
    return {**fibers(coordinates(rng, kind, dims), dims, idtype), **sizes}


def row_lengths(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """Lengths of `count` ragged rows."""
    if kind in ("zero_nnz", "one_by_one"):
        return np.full(count, int(kind == "one_by_one"))
    out = rng.integers(0, 4, count)
    if kind == "empty_rows":
        out[::2] = 0
    if kind == "skewed" and count:
        out[int(rng.integers(count))] = 15
    return out


def offsets(lengths: np.ndarray, idtype: str) -> np.ndarray:
    """The indptr of rows of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(idtype)


# ---------------------------------------------------------------- dense views


def widened(array: np.ndarray) -> np.ndarray:
    """`array` in the oracles' precision."""
    return array.astype(np.float64)


def row_ids(indptr: np.ndarray) -> np.ndarray:
    """The parent position of every stored position."""
    return np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))


def csr_dense(args: dict[str, Any], data: str = "a", suffix: str = "", fill: float = 0.0) -> np.ndarray:
    """The matrix ``args[data]`` over indptr and indices, m x n; duplicates add up, absent ones hold `fill`."""
    rows, cols = row_ids(args[f"indptr{suffix}"]), args[f"indices{suffix}"]
    stored = args[data].astype(np.float64)
    out = np.zeros((args["m"], args["n"]))
    np.add.at(out, (rows, cols), stored)
    if fill:
        absent = np.ones(out.shape, bool)
        absent[rows, cols] = False
        out[absent] = fill
    return out


def csf_coordinates(args: dict[str, Any], order: int) -> np.ndarray:
    """The coordinates of every stored position of a CSF, one a line."""
    columns: list[np.ndarray] = []
    for level in range(order):
        parent = row_ids(args[f"indptr{level}"])
        columns = [column[parent] for column in columns] + [args[f"indices{level}"]]
    return np.stack(columns, axis=1).astype(np.int64)


def csf_dense(args: dict[str, Any], order: int, data: str = "a") -> np.ndarray:
    """The dense tensor of a CSF."""
    out = np.zeros([args[f"d{level}"] for level in range(order)])
    out[tuple(csf_coordinates(args, order).T)] = args[data]
    return out
