# SPDX-License-Identifier: Apache-2.0
"""Products and sums of scipy's matrices in any form: every format, rows out of order, entries that repeat."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import pairwise
from sparsetir.errors import StructureError

FORMS = ["csr", "csc", "coo", "dia", "bsr", "csr reversed", "csc reversed", "csr twice", "csc twice", "coo twice"]
DTYPES = ["float32", "float64", "complex64", "int32", "int8", "bool"]
OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "add": (sparsetir.add, np.add),
    "subtract": (sparsetir.subtract, np.subtract),
    "multiply": (sparsetir.multiply, np.multiply),
    "maximum": (sparsetir.maximum, np.maximum),
}


def drawn(form: str, dtype: str, shape: tuple[int, int], rng: np.random.Generator, *, is_matrix: bool) -> Any:
    m, n = shape
    count = int(rng.integers(0, 2 * (m + n))) if m and n else 0
    i, j = rng.integers(0, max(m, 1), count), rng.integers(0, max(n, 1), count)
    values = rng.integers(1, 4, count).astype(dtype)
    if dtype.startswith("complex"):
        values += 1j * rng.integers(-3, 4, count)
    value, (format, _, change) = sp.coo_array((values, (i, j)), shape=shape), form.partition(" ")
    if change != "twice" or format != "coo":
        value = entries_in_rows(value, format, change)
    return getattr(sp, f"{value.format}_matrix")(value) if is_matrix else value


def entries_in_rows(listed: sp.coo_array, format: str, change: str) -> Any:
    kind, (major, minor) = sp.csr_array, (listed.row, listed.col)
    if format == "csc":
        kind, (major, minor) = sp.csc_array, (minor, major)
    order = np.argsort(major, kind="stable")
    indptr = np.searchsorted(major[order], np.arange(listed.shape[format == "csc"] + 1))
    value = kind((listed.data[order], minor[order], indptr), shape=listed.shape)
    if change == "twice":
        return value
    value.sum_duplicates()
    if change == "reversed":
        order = np.concatenate([np.arange(a, b)[::-1] for a, b in itertools.pairwise(value.indptr)] or [[]])
        order = order.astype(int)
        return kind((value.data[order], value.indices[order], value.indptr), shape=value.shape)
    fits = listed.shape[0] % 2 == listed.shape[1] % 2 == 0 < min(listed.shape)
    return value.tobsr((2, 2)) if format == "bsr" and fits else value.asformat(format)


@pytest.mark.parametrize(("form", "dtype", "other"), pairwise(FORMS, DTYPES, DTYPES))
@pytest.mark.sampled(4)
def test_products_with_dense_operands(form: str, dtype: str, other: str) -> None:
    rng = np.random.default_rng([FORMS.index(form), DTYPES.index(dtype), DTYPES.index(other)])
    for shape in ((12, 20), (7, 3), (1, 1), (4, 0), (0, 5)):
        A = drawn(form, dtype, shape, rng, is_matrix=bool(rng.integers(2)))
        dense = A.toarray()
        for columns in ((), (1,), (5,), (11,)):
            X = rng.integers(0, 3, (shape[1], *columns)).astype(other)
            Y = rng.integers(0, 3, (*columns, shape[0])).astype(other)
            for _ in range(3):  # the first call, what is kept from the second on, and a later one
                for computed, expected in ((sparsetir.matmul(A, X), dense @ X), (sparsetir.matmul(Y, A), Y @ dense)):
                    assert type(computed) is np.ndarray
                    assert computed.dtype == expected.dtype
                    np.testing.assert_array_equal(computed, expected)


@pytest.mark.parametrize(("form", "second", "dtype", "other"), pairwise(FORMS, FORMS, DTYPES, DTYPES))
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sampled(8)
def test_sums_and_elementwise_products(name: str, form: str, second: str, dtype: str, other: str) -> None:
    if (name == "subtract" and "bool" in (dtype, other)) or (name == "maximum" and "complex64" in (dtype, other)):
        pytest.skip("numpy subtracts no bools, and complex numbers have no order")
    rng = np.random.default_rng([FORMS.index(form), FORMS.index(second), DTYPES.index(dtype)])
    compute, expect = OPERATIONS[name]
    for shape in ((12, 20), (7, 3), (1, 1), (4, 0), (0, 5)):
        A = drawn(form, dtype, shape, rng, is_matrix=bool(rng.integers(2)))
        B = drawn(second, other, shape, rng, is_matrix=False)
        expected = expect(A.toarray(), B.toarray())
        for _ in range(3):
            computed = compute(A, B)
            assert isinstance(computed, sp.spmatrix) == isinstance(A, sp.spmatrix)
            assert computed.dtype == expected.dtype
            assert computed.format in (A.format, "csr" if A.format == "dia" else A.format)
            np.testing.assert_array_equal(computed.toarray(), expected)
            if computed.format in ("csr", "csc"):
                arrays = computed.data, computed.indices, computed.indptr
                assert type(computed)(arrays, shape=shape).has_canonical_format


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("form", ["csr", "csc", "coo", "csr reversed", "csc reversed"])
def test_coordinates_out_of_range_after_calls_are_errors(form: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    A = drawn(form, dtype, (9, 9), rng, is_matrix=False)
    x = np.ones(9, dtype)
    for _ in range(3):
        sparsetir.matmul(A, x)
        sparsetir.add(A, A)
    (A.row if form == "coo" else A.indices)[0] = 9
    for compute in (lambda: sparsetir.matmul(A, x), lambda: sparsetir.matmul(x, A), lambda: sparsetir.add(A, A)):
        with pytest.raises(StructureError, match=r"hold 9 at position 0|has coordinate 9 in dimension 0"):
            compute()
