# SPDX-License-Identifier: Apache-2.0
"""Sums and elementwise products block by block: the same pattern, rows alike, any rows, and rows that are not sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from each import on
from sparsetir.errors import StructureError
from sparsetir.sparse_output import workspace

DOORS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "add": (sparsetir.add, lambda a, b: a + b),
    "subtract": (sparsetir.subtract, lambda a, b: a - b),
    "scaled": (lambda A, B: sparsetir.add(A, B, 2, 3), lambda a, b: 2 * a + 3 * b),
    "multiply": (sparsetir.multiply, lambda a, b: a * b),
    "maximum": (sparsetir.maximum, np.maximum),
}
INTERSECT = ("multiply",)


def values(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.random(count) < 0.5
    if dtype.startswith("int"):
        return rng.integers(-9, 9, count).astype(dtype)
    return rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0, 3.25], count).astype(dtype)


def matrix(rng: np.random.Generator, there: np.ndarray, dtype: str, idtype: str) -> sp.csr_array:
    """Entries where `there` says so, with values of all kinds."""
    rows, columns = np.nonzero(there)
    indptr = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(idtype)
    made = sp.csr_array(there.shape, dtype=dtype)
    made.indptr, made.indices, made.data = indptr, columns.astype(idtype), values(rng, len(rows), dtype)
    return made


def patterns(rng: np.random.Generator, m: int, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs: any, the same, the same but for one row, rows as long as the ones before, and rows without entries."""
    some, other = rng.random((m, n)) < 0.3, rng.random((m, n)) < 0.2
    nearly = some.copy()
    if m:
        nearly[m // 2] = ~nearly[m // 2]
    band = (np.arange(n) - np.arange(m)[:, None]) % 7
    gaps = np.where(rng.random((m, 1)) < 0.6, False, some)
    return [
        (some, other),
        (some, some),
        (some, nearly),
        (band < 2, (band > 0) & (band < 4)),
        (gaps, other),
        (gaps, ~gaps),
    ]


def check(found: Any, A: Any, B: Any, door: str, expected: Callable[[Any, Any], Any]) -> None:
    """Pattern and values by dense arrays."""
    there = [np.zeros(A.shape, bool) for _ in "AB"]
    dense = [np.zeros(A.shape, A.dtype) for _ in "AB"]
    for X, at, array in zip((A, B), there, dense, strict=True):
        rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
        at[rows, X.indices], array[rows, X.indices] = True, X.data
    both = there[0] & there[1] if door in INTERSECT else there[0] | there[1]
    assert found.dtype == A.dtype
    assert found.indices.dtype == found.indptr.dtype == A.indices.dtype
    assert np.array_equal(found.indptr, np.concatenate([[0], np.cumsum(both.sum(axis=1))]))
    assert np.array_equal(found.indices, np.nonzero(both)[1])
    assert len(found.data) == len(found.indices)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found.data, expected(*dense)[both])


@pytest.mark.slow
@pytest.mark.parametrize("threads_work", [0, 20_000], ids=["in chunks", "in one chunk"])
@pytest.mark.parametrize(
    ("dtype", "idtype"), [("float32", "int32"), ("float64", "int64"), ("int32", "int32"), ("bool", "int32")]
)
def test_blocks_of_any_rows(monkeypatch: pytest.MonkeyPatch, dtype: str, idtype: str, threads_work: int) -> None:
    monkeypatch.setattr(workspace, "MERGED_SERIAL_WORK", threads_work)
    rng = np.random.default_rng(0)
    for door, (call, expected) in DOORS.items():
        if dtype == "bool" and door in ("subtract", "scaled"):
            continue
        for shape in ((0, 3), (3, 0), (1, 1), (2, 40), (64, 5), (65, 12), (300, 21)):
            for number, pair in enumerate(patterns(rng, *shape)):
                A, B = (matrix(rng, there, dtype, idtype) for there in pair)
                with on((door, shape, number)):
                    check(call(A, B), A, B, door, expected)


def unsorted(A: sp.csr_array, row: int) -> sp.csr_array:
    """With the entries of a row from the last one to the first."""
    made = A.copy()
    part = slice(*made.indptr[row : row + 2])
    made.indices[part], made.data[part] = made.indices[part][::-1].copy(), made.data[part][::-1].copy()
    return made


def repeated(A: sp.csr_array, row: int) -> sp.csr_array:
    """With two entries of a row at one coordinate."""
    made = A.copy()
    made.indices[made.indptr[row] + 1] = made.indices[made.indptr[row]]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("change", [unsorted, repeated])
def test_rows_out_of_order_are_seen_wherever_they_are(change: Callable[[Any, int], Any]) -> None:
    rng = np.random.default_rng(1)
    A = sp.csr_array((rng.random((200, 30)) < 0.3) * rng.integers(1, 9, (200, 30)))
    A = A.astype("float64")
    for row in (0, 1, 63, 64, 100, 199):
        bad = change(A, row)
        assert not bad.has_canonical_format
        for call, expected in (DOORS["add"], DOORS["multiply"], DOORS["maximum"]):
            for X, Y in ((bad, A), (A, bad), (bad, bad)):
                np.testing.assert_allclose(call(X, Y).toarray(), expected(X.toarray(), Y.toarray()))


@pytest.mark.slow
def test_operands_may_change_between_calls() -> None:
    """What a call found out about an operand is not believed by the next one."""
    rng = np.random.default_rng(2)
    A, B = (sp.csr_array((rng.random((150, 20)) < 0.4) * 1.0).astype("float32") for _ in "AB")
    for step in range(12):
        row = int(rng.integers(150))
        part = slice(*A.indptr[row : row + 2])
        kind = step % 4
        if kind == 0:
            A.data[part] = rng.random(part.stop - part.start)
        elif kind == 1:
            A.indices[part] = rng.permutation(20)[: part.stop - part.start]  # any order
            A.has_sorted_indices = A.has_canonical_format = False
        elif kind == 2:
            A.sort_indices()
        else:
            A = A[rng.permutation(150)]
        for call, expected in (DOORS["add"], DOORS["multiply"]):
            np.testing.assert_allclose(call(A, B).toarray(), expected(A.toarray(), B.toarray()), rtol=1e-6)


def test_results_are_new() -> None:
    A = sp.csr_array(np.eye(100, dtype="float32"))
    first, second = sparsetir.add(A, A), sparsetir.add(A, A)
    for name in ("data", "indices", "indptr"):
        arrays = [getattr(X, name) for X in (A, first, second)]
        assert all(a.flags.owndata for a in arrays[1:])
        assert not any(np.shares_memory(arrays[i], arrays[j]) for i in range(3) for j in range(i))
    first.data[:] = 7
    assert np.array_equal(second.toarray(), 2 * np.eye(100))


@pytest.mark.slow
def test_memory_of_large_results_is_written_again_once_nobody_has_it() -> None:
    rng = np.random.default_rng(4)
    A, B = (sp.random_array((400, 400), density=0.3, format="csr", dtype="float64", rng=rng) for _ in "AB")
    for call, expected in (DOORS["add"], DOORS["multiply"], DOORS["maximum"]):
        wanted = [sp.csr_array(expected(X.toarray(), Y.toarray())) for X, Y in ((A, B), (A, A), (B, A), (B, B))]
        held = [call(X, Y) for X, Y in ((A, B), (A, A), (B, A), (B, B))]
        column = held[0].data[5:9]
        before = column.copy()
        del held[0]
        again = [call(A, B), call(A, A)]
        assert np.array_equal(column, before)
        for found, right in zip([*held, *again], [*wanted[1:], *wanted[:2]], strict=True):
            assert (found != right).nnz == 0
    for step in range(6):  # x = x + y, as in an iteration
        x = A if step == 0 else sparsetir.add(x, B)
        assert abs(x - (A + B * step)).max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("indices", 5, 30),
        ("indices", 5, -1),
        ("indptr", 70, 10**6),
        ("indptr", 70, -5),
        ("indptr", 0, 1),
        ("indptr", 150, 3),
    ],
)
def test_structures_that_are_none_are_refused(name: str, at: int, value: int) -> None:
    A = sp.csr_array((np.random.default_rng(3).random((150, 30)) < 0.5) * 1.0)
    for call, _ in (DOORS["add"], DOORS["multiply"]):
        call(A, A)
        bad = A.copy()
        getattr(bad, name)[at] = value
        for X, Y in ((bad, A), (A, bad)):
            with pytest.raises(StructureError):
                call(X, Y)


def up_and_down(count: int, blocks: int) -> sp.csr_array:
    """Row pointers that rise to all entries in one block of rows, fall back in the next, and end where they should."""
    ends = np.tile(np.repeat((count, 0), 64), blocks)[: 64 * (2 * blocks - 1)]
    made = sp.csr_array((len(ends), count))
    made.indptr = np.concatenate([[0], ends]).astype("int32")
    made.indices, made.data = np.arange(count, dtype="int32"), np.ones(count)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("threads_work", [0, 10**9], ids=["in chunks", "in one chunk"])
def test_rows_behind_unsound_ones_are_not_written_past_the_end(
    monkeypatch: pytest.MonkeyPatch, threads_work: int
) -> None:
    """Each block of rows fits, all of them together take many times the memory that there is for the result."""
    monkeypatch.setattr(workspace, "MERGED_SERIAL_WORK", threads_work)
    bad, rng = up_and_down(200_000, 40), np.random.default_rng(0)
    for call, _ in DOORS.values():
        for X, Y in ((bad, bad), (bad, sp.csr_array(bad.shape)), (sp.csr_array(bad.shape), bad)):
            with pytest.raises(StructureError):
                call(X, Y)
    good = sp.random_array((400, 500), density=0.1, format="csr", rng=rng)
    for _ in range(20):
        bad = good.copy()
        bad.indptr[1:-1] = rng.integers(0, good.nnz, 399)
        for call in (sparsetir.add, sparsetir.multiply):
            with pytest.raises(StructureError):
                call(bad, good)


def test_views_and_read_only_arrays_are_taken() -> None:
    A = sp.csr_array(np.tri(80, dtype="float32"))
    view = A.copy()
    view.data = np.repeat(A.data, 2)[::2]
    fixed = A.copy()
    for array in (fixed.data, fixed.indices, fixed.indptr):
        array.flags.writeable = False
    for X in (view, fixed):
        assert (sparsetir.add(X, A) != A * 2).nnz == 0
        assert (sparsetir.multiply(A, X) != A).nnz == 0


def test_matrices_keep_their_class_and_shapes_must_agree() -> None:
    A = sp.csr_matrix(np.eye(3, dtype="float32"))
    assert type(sparsetir.add(A, sp.csr_array(A))) is sp.csr_matrix
    assert type(sparsetir.add(sp.csr_array(A), A)) is sp.csr_array
    for name, (call, _) in DOORS.items():
        message = "do not fit" if name == "multiply" else "of one shape"  # factors of one row or column are repeated
        with pytest.raises(ValueError, match=message):
            call(A, sp.csr_matrix(np.eye(3, 4, dtype="float32")))
