# SPDX-License-Identifier: Apache-2.0
"""Matrices with far more rows and columns than entries against numpy over the few that hold entries."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
import torch
from sparsetir import CooTensor, SparseTensor
from sparsetir.errors import ArgumentError, SparseTIRError

ROWS, COLS = 2**41, 2**34
I = np.array([0, 5, 2**31, 2**40, ROWS - 1])  # rows that may hold entries
J = np.array([0, 7, 2**33, COLS - 1])
K = np.arange(3)

CLASSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scipy": lambda coords, values, shape: sp.coo_array((values, tuple(coords)), shape=shape),
    "coo": lambda coords, values, shape: CooTensor(np.stack(coords), values, shape),
    "torch": lambda coords, values, shape: torch.sparse_coo_tensor(np.stack(coords), torch.from_numpy(values), shape),
    "tensor": lambda coords, values, shape: SparseTensor.from_coo(np.stack(coords), values, shape),
    "tensor in coo": lambda coords, values, shape: SparseTensor.from_coo(np.stack(coords), values, shape, "coo"),
}
classes = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)


def dense(seed: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < 0.5, rng.integers(-4, 5, shape), 0).astype("float64")


def wide(make: Any, array: np.ndarray, *dims: tuple[np.ndarray, int]) -> Any:
    """A sparse object with the elements of a small array at chosen coordinates."""
    at = np.nonzero(array)
    coords = [numbers[c] for (numbers, _), c in zip(dims, at, strict=True)]
    return make(coords, array[at], tuple(n for _, n in dims))


def check(found: Any, array: np.ndarray, *dims: tuple[np.ndarray, int]) -> None:
    """Compare the entries of a result with an array over the chosen coordinates."""
    assert tuple(found.shape) == tuple(n for _, n in dims)
    if isinstance(found, torch.Tensor):
        found = found.coalesce() if found.layout == torch.sparse_coo else found.to_sparse_coo()
        coords, values = found.indices().numpy(), found.values().numpy()
    elif sp.issparse(found):
        coords, values = found.tocoo().coords, found.data
    else:
        coords, values = found.coords, found.values
    near = [np.searchsorted(numbers, c) for (numbers, _), c in zip(dims, coords, strict=True)]
    for (numbers, _), c, n in zip(dims, coords, near, strict=True):
        np.testing.assert_array_equal(numbers[n], c)
    result = np.zeros(array.shape)
    np.add.at(result, tuple(near), values)
    np.testing.assert_array_equal(result, array)


ROW, COL, SHORT = (I, ROWS), (J, COLS), (K, 3)
OF_TORCH = (
    (np.minimum(I, 2**29 - np.arange(5)[::-1]), 2**29 + 1),
    (np.minimum(J, 2**29 - np.arange(4)[::-1]), 2**29 + 1),
)


@pytest.mark.slow
@classes
def test_products_and_sums(make: Any) -> None:
    ROW, COL = OF_TORCH if make is CLASSES["torch"] else ((I, ROWS), (J, COLS))  # torch counts all elements
    a, b, c = dense(0, 5, 4), dense(1, 4, 3), dense(2, 5, 4)
    A, B, C = wide(make, a, ROW, COL), wide(make, b, COL, SHORT), wide(make, c, ROW, COL)
    check(sparsetir.matmul(A, B), a @ b, ROW, SHORT)
    check(sparsetir.matmul(A, B, mask=wide(make, np.ones((5, 2)), ROW, (K[:2], 3))), (a @ b) * [1, 1, 0], ROW, SHORT)
    check(sparsetir.einsum("ij,jk->ik", A, B), a @ b, ROW, SHORT)
    check(sparsetir.einsum("ij,ij->ij", A, C), a * c, ROW, COL)
    check(sparsetir.add(A, C), a + c, ROW, COL)
    check(sparsetir.add(A, C, beta=2), a + 2 * c, ROW, COL)
    check(sparsetir.subtract(A, C), a - c, ROW, COL)
    check(sparsetir.multiply(A, C), a * c, ROW, COL)
    check(sparsetir.maximum(A, C), np.maximum(a, c), ROW, COL)
    assert float(sparsetir.einsum("ij->", A)) == a.sum()
    assert float(sparsetir.einsum("ij,ij->", A, C)) == (a * c).sum()


@pytest.mark.parametrize("format", [None, "coo", "dcsr"])
def test_tensors(format: str | None) -> None:
    a, b = dense(3, 5, 4), dense(4, 5, 4)
    make = lambda coords, values, shape: SparseTensor.from_coo(np.stack(coords), values, shape, format)  # noqa: E731
    S, R = wide(make, a, ROW, COL), wide(make, b, ROW, COL)
    check(S, a, ROW, COL)
    check(S.T, a.T, COL, ROW)
    check(S + R, a + b, ROW, COL)
    check(S - R, a - b, ROW, COL)
    check(S * R, a * b, ROW, COL)
    check(S @ R.T, a @ b.T, ROW, ROW)
    check(2 * -S, -2 * a, ROW, COL)
    check(S[:10], a[:2], (I[:2], 10), COL)
    check(S[::-1], a[::-1], (np.sort(ROWS - 1 - I), ROWS), COL)
    check(S[[5, 0]], a[[1, 0]], (K[:2], 2), COL)
    check(S[:, :10], a[:, :2], ROW, (J[:2], 10))
    check(S[int(I[3])], a[3], COL)
    check(pickle.loads(pickle.dumps(S)), a, ROW, COL)
    check(S.to_scipy(), a, ROW, COL)
    assert S[-1, -1] == a[-1, -1]
    assert S[1, 1] == 0
    assert S.sum() == a.sum()
    assert S.max() == max(a.max(), 0)


@classes
def test_dense_results_are_refused_or_short(make: Any) -> None:
    b = dense(5, 4, 3)
    B = wide(make, b, COL, SHORT)
    np.testing.assert_array_equal(np.asarray(sparsetir.einsum("jk->k", B)), b.sum(0))
    with pytest.raises(ArgumentError, match=r"result: a dense array of shape \(17179869184,\) does not fit"):
        sparsetir.einsum("jk->j", B)
    with pytest.raises(ArgumentError, match=r"far more rows than entries: call sparsetir\.einsum"):
        sparsetir.einsum_expression("jk,kl->jl", B, (3, 2))
    with pytest.raises(ArgumentError, match="would take every element"):
        sparsetir.einsum("jk,jk->jk", B, B, combine="add", fill=1)


def test_what_needs_pointers_names_the_shape() -> None:
    A = wide(CLASSES["scipy"], dense(6, 5, 4), ROW, COL)
    for call in (lambda: sparsetir.rap(A, A.T, A), lambda: sparsetir.matmul_plan(A, A.T)):
        with pytest.raises(SparseTIRError, match=r"2199023255552 rows of shape \(2199023255552, 17179869184\)"):
            call()


def test_a_dense_operand_gives_the_rows_that_are_read() -> None:
    n = 2**27
    A = sp.coo_array(([2.0, 3.0], ([0, 1], [5, n - 1])), shape=(3, n))
    x = np.zeros(n, "float32")
    x[[5, n - 1]] = 1, 10
    np.testing.assert_array_equal(sparsetir.einsum("ij,j->i", A, x), [2, 30, 0])
