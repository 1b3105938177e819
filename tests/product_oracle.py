# SPDX-License-Identifier: Apache-2.0
"""Matrices of any pattern and storage, and their products and sums by loops over dictionaries, obviously right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

from each import on

Entries = dict[tuple[int, int], Any]
DTYPES = ("float32", "float64", "int32", "int64", "bool")
SIZES = (0, 1, 2, 3, 5, 8, 13)
SPECIAL = (0.0, -0.0, np.nan, np.inf, -np.inf)
SMALLEST = {"float32": 2.0**-24, "float64": 2.0**-53}


# --- drawing ----------------------------------------------------------------------------------------------


def values(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """Zeros among them, and in floats now and then what is not finite."""
    if dtype == "bool":
        return rng.random(count) < 0.7
    if dtype.startswith("int"):
        return rng.integers(-5, 6, count).astype(dtype)
    found = rng.standard_normal(count).astype(dtype)
    if rng.random() < 0.3:
        at = rng.random(count) < 0.2
        found[at] = rng.choice(np.array(SPECIAL, dtype), at.sum())
    return found


def drawn(rng: np.random.Generator, m: int, n: int, dtype: str) -> sp.csr_array:
    """Any pattern: rows and columns without entries, full rows, unsorted, entries with the same coordinates."""
    cells = m * n
    kind = rng.integers(5)
    nnz = 0 if not cells or kind == 0 else int(cells * rng.choice([0.05, 0.2, 0.6, 1.0])) + 1
    rows, columns = (rng.integers(0, max(1, extent), nnz) for extent in (m, n))
    if kind == 1 and nnz:  # one full row, and others
        rows, columns = np.append(rows, np.full(n, rng.integers(m))), np.append(columns, np.arange(n))
    if kind != 2:  # each coordinate once
        keys = rng.permutation(np.unique(rows * max(1, n) + columns))
        rows, columns = keys // max(1, n), keys % max(1, n)
    order = np.argsort(rows, kind="stable")
    indptr = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=m)[:m])))
    idtype = rng.choice(["int32", "int64"])
    arrays = values(rng, order.size, dtype), columns[order].astype(idtype), indptr.astype(idtype)
    found = sp.csr_array(arrays, shape=(m, n))
    found.indices, found.indptr = arrays[1], arrays[2]  # scipy may have narrowed them
    if kind == 4:
        found.sort_indices()
    return found


def pairs(seed: int, count: int) -> Iterator[tuple[np.random.Generator, int]]:
    """Generators of random numbers with their seeds."""
    for n in range(count):
        yield np.random.default_rng([seed, n]), n


# --- the oracle -------------------------------------------------------------------------------------------


Stored = list[tuple[tuple[int, int], Any]]


def stored(A: Any) -> Stored:
    """What a matrix stores, in its order."""
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    return list(zip(zip(rows.tolist(), A.indices.tolist(), strict=True), wide(A.data), strict=True))


def entries(A: Any) -> Entries:
    """The same by coordinates: values with the same ones added up, bools by or."""
    found: Entries = {}
    for at, value in stored(A):
        found[at] = plus(found[at], value) if at in found else value
    return found


def wide(array: np.ndarray) -> list[Any]:
    """Values in the widest dtype of their kind."""
    return list(array.astype({"f": np.float64, "i": np.int64, "b": np.bool_}[array.dtype.kind]))


def plus(a: Any, b: Any) -> Any:
    return a | b if isinstance(a, np.bool_) else a + b


def times(a: Any, b: Any) -> Any:
    return a & b if isinstance(a, np.bool_) else a * b


def product(A: Stored, B: Stored) -> Entries:
    """Each entry of A with each one that it meets; sums of repeated ones may differ where they are not finite."""
    rows: dict[int, Stored] = defaultdict(list)
    for (k, j), b in B:
        rows[k].append(((k, j), b))
    found: Entries = {}
    for (i, k), a in A:
        for (_, j), b in rows[k]:
            found[i, j] = plus(found[i, j], times(a, b)) if (i, j) in found else times(a, b)
    return found


def product_of(*factors: Any) -> tuple[Entries, Entries]:
    """A product of matrices from left to right, and the same of the absolute values."""
    exact, scale = stored(factors[0]), sizes_of(stored(factors[0]))
    for factor in map(stored, factors[1:]):
        exact, scale = (list(product(*of).items()) for of in ((exact, factor), (scale, sizes_of(factor))))
    return dict(exact), dict(scale)


def sizes_of(A: Stored) -> Stored:
    return [(at, abs(value)) for at, value in A]


def union(A: Entries, B: Entries, of: Callable[[Any, Any], Any], zero: Any) -> Entries:
    return {at: of(A.get(at, zero), B.get(at, zero)) for at in A.keys() | B.keys()}


def both(A: Entries, B: Entries) -> Entries:
    return {at: times(A[at], B[at]) for at in A.keys() & B.keys()}


def magnitudes(A: Entries) -> Entries:
    return {at: abs(value) for at, value in A.items()}


def check_sorted(C: sp.csr_array) -> None:
    """Compressed rows as they should be."""
    assert C.indptr[0] == 0
    assert C.indptr[-1] == len(C.indices) == len(C.data)
    assert np.all(np.diff(C.indptr) >= 0)
    for row in range(C.shape[0]):
        part = C.indices[C.indptr[row] : C.indptr[row + 1]]
        assert np.all(np.diff(part) > 0), f"row {row} has the columns {part.tolist()}"
    assert not len(C.indices) or (C.indices.min() >= 0 and C.indices.max() < C.shape[1])


def check(C: sp.csr_array, expected: Entries, scale: Entries, shape: tuple[int, int], dtype: str) -> None:
    """Same coordinates, and values that rounding explains."""
    assert C.shape == shape
    assert C.dtype == np.dtype(dtype)
    check_sorted(C)
    found = entries(C)
    assert found.keys() == expected.keys()
    for at, value in expected.items():
        with on(at):
            check_value(found[at], value, scale[at], dtype)


def check_value(found: Any, expected: Any, scale: Any, dtype: str) -> None:
    if dtype not in SMALLEST:
        narrow = np.asarray(expected).astype(dtype)  # ints wrap around
        assert found == narrow, f"found {found}, expected {narrow}"
    elif not np.isfinite(expected):
        assert np.array_equal(found, expected, equal_nan=True), f"found {found}, expected {expected}"
    else:
        assert abs(found - expected) <= 64 * SMALLEST[dtype] * scale, f"found {found}, expected {expected}"
