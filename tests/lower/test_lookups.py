# SPDX-License-Identifier: Apache-2.0
"""Rows of a mask that are looked up in long rows of an operand: bit by bit what going over those gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from fences import fenced
from sparsetir import Accumulators, ops
from sparsetir.errors import StructureError
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.sparse_output.merges import LONG_ROW
from sparsetir.utils.threads import get_num_threads, set_num_threads

SHAPE = (90, 70, 400)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = get_num_threads()
    set_num_threads(request.param)
    yield
    set_num_threads(before)


def skewed(rng: np.random.Generator, rows: int, columns: int, dtype: str) -> sp.csr_array:
    """A matrix with a few rows that are nearly full, many of some entries, and empty ones."""
    lengths = np.minimum((2 + rng.pareto(0.6, rows) * 3).astype(int), columns)
    lengths[rng.random(rows) < 0.2] = 0
    lengths[rng.integers(rows)] = columns
    lengths[rng.integers(rows)] = max(columns - 3, 0)
    indices = [np.sort(rng.choice(columns, n, replace=False)) for n in lengths]
    held = np.concatenate([np.empty(0, int), *indices]).astype(np.int32)
    values = rng.integers(-9, 9, len(held)) if dtype[0] in "iu" else rng.standard_normal(len(held))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return sp.csr_array((values.astype(dtype), held, indptr), shape=(rows, columns))


def shuffled(rng: np.random.Generator, S: sp.csr_array, *, share: float = 1) -> sp.csr_array:
    """The same matrix with some rows in another order."""
    order = np.arange(S.nnz)
    for begin, end in zip(S.indptr[:-1], S.indptr[1:], strict=True):
        if rng.random() < share:
            rng.shuffle(order[begin:end])
    return sp.csr_array((S.data[order], S.indices[order], S.indptr), shape=S.shape)


def repeated(rng: np.random.Generator, S: sp.csr_array) -> sp.csr_array:
    """A matrix whose entries are there twice, one behind the other."""
    values = np.repeat(S.data, 2)
    values[::2] += S.data.dtype.type(3)
    return sp.csr_array((values, np.repeat(S.indices, 2), 2 * S.indptr), shape=S.shape)


def looked_up(kernel: SparseOutputKernel, given: dict[str, Any]) -> int:
    """Bitmaps that a call makes."""
    lookups = kernel.begin(kernel.prepare((), given)).lookups
    assert lookups is not None
    return lookups.count


def bits_of(made: Any) -> list[bytes]:
    return [a.tobytes() for a in (made.indptr, made.indices, made.data)]


def operands(rng: np.random.Generator, dtype: str) -> dict[str, sp.csr_array]:
    m, p, n = SHAPE
    mask = sp.random_array((m, n), density=0.012, format="csr", rng=rng)
    mask.sort_indices()
    return {"A": skewed(rng, m, p, dtype), "B": skewed(rng, p, n, dtype), "M": mask.astype(bool)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64", "uint8"])
def test_a_lookup_gives_what_a_walk_gives(dtype: str) -> None:
    """Rows of B in any order and with repeated entries are gone over; one kernel takes all in turn."""
    rng = np.random.default_rng(3)
    kernel = sparsetir.build(ops.masked_spgemm(dtype))
    walking = sparsetir.build(ops.masked_spgemm(dtype), schedule=Accumulators(kind="bits"))
    for _ in range(3):
        given = operands(rng, dtype)
        B = given["B"]
        assert looked_up(kernel, given) > 0
        for other in (B, shuffled(rng, B), B, shuffled(rng, B, share=0.5), repeated(rng, B), B):
            for changes in ({}, {"A": shuffled(rng, given["A"])}, {"M": shuffled(rng, given["M"])}):
                call = given | {"B": other} | changes
                assert bits_of(kernel(**call)) == bits_of(walking(**call))


@pytest.mark.slow
@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_scipy_gives_the_same(idtype: str) -> None:
    rng = np.random.default_rng(4)
    given = operands(rng, "int32")
    for S in given.values():
        S.indptr, S.indices = S.indptr.astype(idtype), S.indices.astype(idtype)
    kernel = sparsetir.build(ops.masked_spgemm("int32", idtype=idtype))
    assert looked_up(kernel, given) > 0
    for complement in (False, True):
        found = sparsetir.matmul(given["A"], given["B"], mask=given["M"], complement=complement)
        kept = given["M"].toarray() != complement
        assert np.array_equal(found.toarray(), (given["A"] @ given["B"]).toarray() * kept)
    assert bits_of(kernel(**given)) == bits_of(sparsetir.matmul(given["A"], given["B"], mask=given["M"]))


@pytest.mark.slow
def test_what_is_no_number_stays_where_it_is() -> None:
    """A product is stored where entries meet, whatever they hold; what the mask lacks stays outside."""
    rng = np.random.default_rng(5)
    given = operands(rng, "float32")
    given["B"].data[rng.random(given["B"].nnz) < 0.3] = np.nan
    given["B"].data[rng.random(given["B"].nnz) < 0.1] = np.inf
    given["A"].data[rng.random(given["A"].nnz) < 0.3] = 0
    kernel = sparsetir.build(ops.masked_spgemm())
    walking = sparsetir.build(ops.masked_spgemm(), schedule=Accumulators(kind="bytes"))
    assert looked_up(kernel, given) > 0
    found, right = kernel(**given), walking(**given)
    assert np.isnan(found.data).any()
    assert bits_of(found)[:2] == bits_of(right)[:2]
    assert np.array_equal(found.data, right.data, equal_nan=True)


def test_lookups_end_where_the_row_ends() -> None:
    """Rows as short as one that is looked up in may be, coordinates at the ends of words, and masks of no entries."""
    n = 3 * LONG_ROW
    kernel = sparsetir.build(ops.masked_spgemm())
    for length in (LONG_ROW - 1, LONG_ROW, LONG_ROW + 1):
        for first in (0, 1, LONG_ROW - 1, n - length):
            held = np.arange(first, first + length)
            B = sp.csr_array((held + 1.0, (np.zeros(length, int), held)), shape=(1, n)).astype("float32")
            A = sp.csr_array(np.ones((n, 1), "float32"))
            M = sp.eye_array(n, format="csr", dtype=bool)
            M = sp.csr_array(sp.vstack([M[: n - 1], sp.csr_array((1, n), dtype=bool)]))
            found = kernel(A=A, B=B, M=M)
            assert (looked_up(kernel, {"A": A, "B": B, "M": M}) == 1) == (length >= LONG_ROW)
            expected = np.diag(B.toarray()[0] * (np.arange(n) < n - 1))
            assert np.array_equal(found.toarray(), expected)
            assert found.nnz == np.count_nonzero(expected)


@pytest.mark.slow
def test_other_sums_are_looked_up() -> None:
    """The least sum in place of the sum of products, an element beginning with another number."""
    text = sparsetir.build(ops.masked_spgemm()).script(1)
    text = text.replace("C[i, j] + A[i, k] * B[k, j]", "T.min(C[i, j], A[i, k] + B[k, j] * T.Cast('float32', j))")
    program = sparsetir.parse(text.replace("C[i, j] = T.float32(0.0)", "C[i, j] = T.float32(7.0)"))
    kernel = sparsetir.build(program)
    walking = sparsetir.build(program, schedule=Accumulators(kind="bits"))
    given = operands(np.random.default_rng(6), "float32")
    assert looked_up(kernel, given) > 0
    found = kernel(**given)
    assert bits_of(found) == bits_of(walking(**given))
    assert found.data.max() == 7
    assert found.data.min() < 0


def test_short_rows_are_not_looked_up() -> None:
    S = sp.random_array((300, 300), density=0.02, format="csr", dtype="float32", rng=np.random.default_rng(0))
    assert looked_up(sparsetir.build(ops.masked_spgemm()), {"A": S, "B": S, "M": S.astype(bool)}) == 0


def test_operands_that_share_arrays_are_checked_each() -> None:
    """A mask must be sorted, operands need not be: arrays that are in order for one of them may not be for another."""
    kernel = sparsetir.build(ops.masked_spgemm())
    S = sp.csr_array(np.ones((4, 4), "float32"))
    mask = S.astype(bool)
    mask.indptr, mask.indices = S.indptr, S.indices
    right = S @ S
    assert np.array_equal(kernel(A=S, B=S, M=mask).toarray(), right.toarray())
    S.indices[:2] = S.indices[1::-1]
    assert np.array_equal(kernel(A=S, B=S, M=mask).toarray(), right.toarray())
    S.indices[1] = 7
    with pytest.raises(StructureError, match="expected one of"):
        kernel(A=S, B=S, M=mask)


def test_a_lookup_reads_nothing_at_absent_coordinates() -> None:
    """The coordinate of an entry lies behind the array that says where the element is: nothing is looked up."""
    func = sparsetir.parse("""
@T.prim_func
def moved(a: T.handle, b: T.handle, c: T.handle, ix: T.handle, iy: T.handle, n: T.int64, k: T.int64, z: T.int64):
    X = T.singleton(None, n, ix, "int64", sorted=False)
    Y = T.singleton(X, k, iy, "int64", sorted=False)
    N = T.dense_fixed(n, "int64")
    R = T.dense_fixed(z, "int64")
    A = T.match_sparse_buffer(a, (X, Y), "float32")
    B = T.match_sparse_buffer(b, (N,), "int64")
    C = T.match_sparse_buffer(c, (R,), "float32")
    with T.sp_iter([X, R], "SR", "moved") as [x, r]:
        A[x, B[x]] = A[x, B[x]] + C[r]
""")
    kernel = sparsetir.build(func)
    for place, size in [(1, 1), (0, 1), (3, 3), (2, 3)]:
        a, b = fenced(np.full(1, 2, np.float32)), fenced(np.full(size, 1, np.int64))
        kernel(A=a, B=b, C=np.ones(4, np.float32), ix=np.array([place]), iy=np.array([1]), n=size, k=2, z=4)
        assert a[0] == (6 if place < size else 2)


@pytest.mark.parametrize("options", [{}, {"schedule": None}])
def test_a_lookup_reads_nothing_at_slots_without_coordinate(options: dict[str, None]) -> None:
    """The coordinates of the last slots, by their formula, lie behind the array that says where the element is."""
    func = sparsetir.parse("""
@T.prim_func
def moved(f: T.handle, g: T.handle, n: T.int32, w: T.int32, k: T.int32):
    U = T.sparse_fixed(None, (n, w), lambda s: 2 * s, "int32", sorted=True, unique=True)
    K = T.dense_fixed(k, "int32")
    N = T.dense_fixed(n, "int32")
    F = T.match_sparse_buffer(f, (U,), "float32")
    G = T.match_sparse_buffer(g, (N,), "int32")
    with T.sp_iter([U, K], "RS", "moved") as [u, j]:
        F[G[u]] = F[G[u]] + T.float32(1)
""")
    kernel = sparsetir.build(func, **options)
    for n in range(1, 5):
        f = fenced(np.zeros(4, np.float32))
        kernel(F=f, G=fenced(np.zeros(n, np.int32)), n=n, w=4, k=3)
        np.testing.assert_array_equal(f, [3 * ((n + 1) // 2), 0, 0, 0])
