# SPDX-License-Identifier: Apache-2.0
"""Index arrays that change between calls: each call finds what is wrong in them, and reads only what it uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from fences import Fences
from sparsetir import interop, ops
from sparsetir.errors import StructureError
from sparsetir.runtime import validation

RNG = np.random.default_rng(0)
EXTREMES = {"int32": (-(2**31), -1, 2**31 - 1), "int64": (-(2**63), -1, 2**32, 2**63 - 1)}
CHECKS = [  # sorted, unique, need_sorted
    (False, False, False),
    (True, False, True),
    (True, True, True),
]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the functions in the first call, and share the work of small arrays out."""
    monkeypatch.setattr(validation, "CALLS_UNTIL_COMPILED", 0)
    monkeypatch.setattr(validation, "MAX_SERIAL_ENTRIES", 16)


def matrix(rows: int, columns: int, density: float, idtype: str = "int32") -> sp.csr_array:
    A = sp.random_array((rows, columns), density=density, format="csr", dtype="float32", rng=RNG)
    A.sort_indices()
    A.indptr, A.indices = A.indptr.astype(idtype), A.indices.astype(idtype)
    return A


def spoiled(A: sp.csr_array) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row pointers and indices, each with one number that may be wrong."""
    extremes = (*EXTREMES[A.indices.dtype.name], *A.shape, A.nnz, A.nnz + 1, 0)
    pairs = [(A.indptr.copy(), A.indices.copy())]
    for number, name in itertools.product(extremes, ("indptr", "indices")):
        for at in {0, 1, len(getattr(A, name)) // 2, len(getattr(A, name)) - 1} if len(getattr(A, name)) else ():
            arrays = {"indptr": A.indptr.copy(), "indices": A.indices.copy()}
            if at < len(arrays[name]):
                arrays[name][at] = np.array(number).astype(A.indices.dtype)
                pairs.append((arrays["indptr"], arrays["indices"]))
    return pairs


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize(("sorted", "unique", "need_sorted"), CHECKS)
def test_compiled_validation_decides_as_that_by_numpy(
    sorted: bool, unique: bool, need_sorted: bool, idtype: str
) -> None:
    """Also where arrays end at unreadable pages: whatever they hold, nothing is read outside of them."""
    level = interop.Level("J", "sparse_variable", None, idtype, sorted=sorted, unique=unique)
    fences, accepted, total = Fences(), 0, 0
    for A in (matrix(1, 1, 1.0, idtype), matrix(9, 5, 0.4, idtype), matrix(3, 90, 0.5, idtype), matrix(40, 7, 0.05)):
        for indptr, indices in spoiled(A):
            arrays = fences.fenced(indptr), fences.fenced(indices)
            sizes = {"parent_count": A.shape[0], "length": A.shape[1], "need_sorted": need_sorted}
            expected = interop.is_sound(level, indptr, indices, **sizes)
            assert validation.is_sound(level, *arrays, **sizes) == expected
            rows = np.arange(A.shape[0])
            if expected:
                assert validation._are_listed_sound(order_of(unique, need_sorted), *arrays, rows, A.shape[1])
            elif indptr[-1] == indices.size and indptr[0] == 0:
                assert not validation._are_listed_sound(order_of(unique, need_sorted), *arrays, rows, A.shape[1])
            accepted, total = accepted + expected, total + 1
        fences.release()
    assert 4 <= accepted < total


def order_of(unique: bool, need_sorted: bool) -> str:
    return "any" if not need_sorted else "distinct" if unique else "ascending"


CALLS: dict[str, tuple[Any, Callable[[sp.csr_array], dict[str, Any]]]] = {
    "spmv": (ops.spmv, lambda A: {"A": A, "x": np.ones(A.shape[1], "float32")}),
    "spmm": (ops.spmm, lambda A: {"A": A, "B": np.ones((A.shape[1], 3), "float32")}),
    "arrays": (
        ops.spmv,
        lambda A: {
            **{"a": A.data, "indptr": A.indptr, "indices": A.indices},
            **{"x": np.ones(A.shape[1], "float32"), "m": A.shape[0]},
        },
    ),
    "sddmm": (
        ops.sddmm,
        lambda A: {"S": A, "X": np.ones((A.shape[0], 4), "float32"), "Y": np.ones((A.shape[1], 4), "float32")},
    ),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("name", CALLS)
def test_an_index_that_becomes_wrong_is_found_in_the_next_call(name: str, idtype: str) -> None:
    program, arguments = CALLS[name]
    kernel = sparsetir.build(program(idtype=idtype))
    A = matrix(30, 20, 0.3, idtype)
    named = arguments(A)
    right = kernel(**named)
    for _ in range(3):
        kernel(**named)
    for at, number in itertools.product((0, A.nnz // 2, A.nnz - 1), (-1, 20, *EXTREMES[idtype])):
        before, A.indices[at] = A.indices[at], number
        with pytest.raises(StructureError, match=f"hold {number} at position {at}, expected one of|not sorted|twice"):
            kernel(**named)
        A.indices[at] = before
        again = kernel(**named)
        assert (again != right).nnz == 0 if sp.issparse(again) else np.array_equal(again, right)
    for at, number in itertools.product((0, 15, 30), (-1, A.nnz + 1, *EXTREMES[idtype])):
        before, A.indptr[at] = A.indptr[at], number
        with pytest.raises(StructureError, match="indptr of axis"):
            kernel(**named)
        A.indptr[at] = before


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("top", [None, 3])
def test_a_product_with_few_rows_validates_only_rows_that_it_reads(
    top: int | None, idtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsetir.sparse_output.fast_paths.MOST_STORED", 0)  # as for larger matrices
    D = matrix(200, 50, 0.2, idtype)
    q = sp.csr_array((np.ones(3, "float32"), np.array([7, 90, 199], idtype), np.array([0, 3], idtype)), (1, 200))
    right = sparsetir.matmul(q, D, top=top).toarray()
    for row in (7, 90, 199):
        at = D.indptr[row + 1] - 1
        for number in (-1, 50, *EXTREMES[idtype]):
            before, D.indices[at] = D.indices[at], number
            with pytest.raises(StructureError, match=f"hold {number} at position {at}, expected one of"):
                sparsetir.matmul(q, D, top=top)
            D.indices[at] = before
        for number in (-1, D.nnz + 1, *EXTREMES[idtype]):
            before, D.indptr[row] = D.indptr[row], number
            with pytest.raises(StructureError, match="indptr of axis"):
                sparsetir.matmul(q, D, top=top)
            D.indptr[row] = before
    unread = np.ones(D.nnz, bool)
    for row in (7, 90, 199):
        unread[D.indptr[row] : D.indptr[row + 1]] = False
    D.indices[unread] = -1
    np.testing.assert_array_equal(sparsetir.matmul(q, D, top=top).toarray(), right)
    q.indices[1] = 200
    with pytest.raises(StructureError, match="hold 200 at position 1"):
        sparsetir.matmul(q, D, top=top)
