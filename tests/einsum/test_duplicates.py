# SPDX-License-Identifier: Apache-2.0
"""Entries with the same coordinates are added up in the dtype of their operand, whatever it is combined with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import pairwise
from sparsetir import lazy
from sparsetir.interop import CooTensor
from sparsetir.utils.arguments import common_dtype

ROWS, COLUMNS = 6, 8
# Of each dtype values whose sums in a wider one are others.
VALUES = {
    "bool": [True],
    "int8": [100, 100, -7],
    "uint8": [200, 100, 3],
    "int32": [2**31 - 1, 2, -5],
    "float16": [40000, 40000, 2049, 1],
    "bfloat16": [256, 1, 3],
    "float32": [3e38, 3e38, 16777216, 1],
    "float64": [9007199254740992, 1, 0.5],
}
CLASSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "csr": lambda v, i, j: rows_of(sp.csr_array, v, i, j, (ROWS, COLUMNS)),
    "csc": lambda v, i, j: rows_of(sp.csc_array, v, j, i, (ROWS, COLUMNS)),
    "coo": lambda v, i, j: list_of(v, i, j),
    "csr_matrix": lambda v, i, j: rows_of(sp.csr_matrix, v, i, j, (ROWS, COLUMNS)),
    "bsr": lambda v, i, j: blocks_of(v, i, j),
    "CooTensor": lambda v, i, j: CooTensor(np.stack([i, j]), v, (ROWS, COLUMNS)),
    "torch": lambda v, i, j: torch_of(v, i, j),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def rows_of(make: Any, values: np.ndarray, outer: np.ndarray, inner: np.ndarray, shape: tuple[int, int]) -> Any:
    """Compressed rows, or columns, that hold duplicates; scipy's own conversion would add them up."""
    order = np.argsort(outer, kind="stable")
    count = shape[0] if make is not sp.csc_array else shape[1]
    indptr = np.searchsorted(outer[order], np.arange(count + 1)).astype("int32")
    made = make(shape, dtype=np.float32)
    made.indptr, made.indices, made.data = indptr, inner[order].astype("int32"), values[order]
    return made


def list_of(values: np.ndarray, i: np.ndarray, j: np.ndarray) -> Any:
    """A list of entries; scipy takes floats of 16 bits only afterwards."""
    made = sp.coo_array((np.zeros(len(values), "float32"), (i, j)), shape=(ROWS, COLUMNS))
    made.data = values
    return made


def blocks_of(values: np.ndarray, i: np.ndarray, j: np.ndarray) -> Any:
    """Blocks of 1 x 2, one for each entry."""
    order = np.argsort(i, kind="stable")
    data = np.zeros((len(values), 1, 2), values.dtype)
    data[np.arange(len(values)), 0, j[order] % 2] = values[order]
    indptr = np.searchsorted(i[order], np.arange(ROWS + 1)).astype("int32")
    made = sp.bsr_array((ROWS, COLUMNS), blocksize=(1, 2), dtype=np.float32)
    made.indptr, made.indices, made.data = indptr, (j[order] // 2).astype("int32"), data
    return made


def torch_of(values: np.ndarray, i: np.ndarray, j: np.ndarray) -> Any:
    import torch

    if values.dtype == ml_dtypes.bfloat16:
        tensor = torch.tensor(values.astype("float32")).bfloat16()
    else:
        tensor = torch.tensor(values)
    return torch.sparse_coo_tensor(np.stack([i, j]), tensor, (ROWS, COLUMNS))


def operand(name: str, dtype: str, seed: int) -> tuple[Any, np.ndarray]:
    """A sparse matrix with duplicates, and its elements: the sums in its own dtype."""
    rng = np.random.default_rng(seed)
    values = rng.choice(np.array(VALUES[dtype]), 40).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    i, j = (rng.integers(0, n, 40).astype("int32") for n in (ROWS, COLUMNS))
    order = np.lexsort((j, i))
    values, i, j = values[order], i[order], j[order]
    elements = np.zeros((ROWS, COLUMNS), values.dtype)
    for value, *at in zip(values, i, j, strict=True):
        elements[tuple(at)] = elements[tuple(at)] | value if dtype == "bool" else elements[tuple(at)] + value
    return CLASSES[name](values, i, j), elements


def elements_of(value: Any) -> np.ndarray:
    """The elements of a result of any class, in float64."""
    if hasattr(value, "layout"):
        value = value.to_dense().double().numpy()
    if not isinstance(value, np.ndarray):
        value = sparsetir.SparseTensor.from_any(value).to_dense()
    return value.astype("float64")


def total(terms: np.ndarray) -> np.ndarray:
    """The sums over the last dimension, in the dtype of the terms."""
    if terms.dtype == bool:
        return terms.any(-1)
    return terms.sum(-1, dtype=terms.dtype)


def check(computed: Any, expected: np.ndarray) -> None:
    rtol = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}.get(expected.dtype.name, 1e-12)
    np.testing.assert_allclose(elements_of(computed), expected.astype("float64"), rtol=rtol, equal_nan=True)


def meeting(dtype: str, other: str) -> Any:
    """The dtype in which operands of two dtypes meet; skip those that meet in none of the test."""
    name = common_dtype([dtype, other])
    if name not in VALUES:
        pytest.skip(f"{dtype} and {other} meet in {name}")
    return ml_dtypes.bfloat16 if name == "bfloat16" else name


OTHERS = ["bool", "int8", "float32", "float64"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "other"), pairwise(list(CLASSES), list(VALUES), OTHERS))
@pytest.mark.sampled(3)
def test_duplicates_are_added_before_a_cast(name: str, dtype: str, other: str) -> None:
    dense = np.random.default_rng(1).integers(0, 2, (ROWS, COLUMNS)).astype(other)
    meet = meeting(dtype, other)
    sparse, elements = operand(name, dtype, 0)
    terms = elements.astype(meet)[:, None] * dense.astype(meet)
    check(sparsetir.einsum("ij,ij->ij", sparse, dense), elements.astype(meet) * dense.astype(meet))
    check(sparsetir.einsum("ij,kj->ik", sparse, dense), total(terms))
    check(sparsetir.einsum("kj,ij->ki", dense, sparse), total(terms).T)
    check(sparsetir.einsum("ij,kj,i->ik", sparse, dense, np.ones(ROWS, other)), total(terms))
    check(sparsetir.einsum_expression("ij,kj->ik", sparse, dense).bind(sparse)(dense), total(terms))
    check(sparsetir.matmul(sparse, np.ascontiguousarray(dense.T)), total(terms))
    check(sparsetir.multiply(sparse, dense), elements.astype(meet) * dense.astype(meet))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "other"), pairwise(list(CLASSES), list(VALUES), OTHERS))
@pytest.mark.sampled(3)
def test_duplicates_of_two_sparse_operands(name: str, dtype: str, other: str) -> None:
    meet = meeting(dtype, other)
    (first, a), (second, b) = operand(name, dtype, 0), operand(name, other, 1)
    is_stored = (elements_of(sparsetir.SparseTensor.from_any(first)) != 0) & (b != 0)
    a, b = a.astype(meet), b.astype(meet)
    product = np.where(is_stored, a * b, 0).astype(meet)
    check(sparsetir.multiply(first, second), product)
    check(sparsetir.add(first, second), a | b if meet == "bool" else a + b)
    check(sparsetir.maximum(first, second), np.maximum(a, b))
    check(sparsetir.einsum("ij,ij->ij", first, second), product)
    if meet not in ("float16", "float32", "float64", ml_dtypes.bfloat16):  # of which sums may overflow on the way
        check(sparsetir.einsum("ij,kj->ik", first, second), total(a[:, None] * b))


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.sampled(3)
def test_duplicates_of_one_operand(name: str, dtype: str) -> None:
    sparse, elements = operand(name, dtype, 0)
    check(sparsetir.einsum("ij->ij", sparse), elements)
    check(sparsetir.einsum("ij->ji", sparse), elements.T)
    tensor = sparsetir.SparseTensor.from_any(sparse)
    check(tensor, elements)
    check(tensor.astype("float64"), elements.astype("float64"))
    if dtype in ("float16", "float32", "float64"):
        wide = np.ones((COLUMNS, 2), "float64")
        check(sparsetir.compute(lazy(sparse) @ wide), elements.astype("float64") @ wide)
        check(sparsetir.compute(lazy(wide.T) @ lazy(sparse).T), wide.T @ elements.astype("float64").T)
