# SPDX-License-Identifier: Apache-2.0
"""Triangles of graphs, against the trace of a cube of the adjacency matrix."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.ir.interpreter import interpret


def graph(seed: int, n: int, density: float) -> sp.coo_array:
    """Entries in any order and direction, some twice, some on the diagonal, some that hold a zero."""
    rng = np.random.default_rng(seed)
    count = int(density * n * n)
    ends = rng.integers(0, max(n, 1), (2, count)) if n else np.zeros((2, 0), int)
    return sp.coo_array((rng.integers(0, 3, ends.shape[1]).astype("float32"), tuple(ends)), shape=(n, n))


def expected(A: sp.coo_array) -> int:
    pattern = np.zeros(A.shape, int)
    pattern[A.row, A.col] = 1
    pattern = np.triu(pattern | pattern.T, 1)
    pattern = pattern + pattern.T
    return int(np.trace(pattern @ pattern @ pattern)) // 6


@pytest.mark.parametrize("seed", range(8))
def test_triangles_are_counted_once(seed):
    n = (0, 1, 2, 3, 10, 40, 40, 90)[seed]
    A = graph(seed, n, 0.02 * (seed + 1))
    for matrix in (A, A.tocsr(), A.tocsc(), sp.coo_matrix(A)):
        assert sparsetir.triangles(matrix) == expected(A)


def test_symmetric_rows_as_they_come():
    """Sorted, unsorted, with an entry twice, and with a row that begins with the column the one before ends with."""
    A = graph(3, 25, 0.3).tocsr()
    A = sp.csr_array(A + A.T)
    order = np.lexsort((np.random.default_rng(4).random(A.nnz), np.repeat(np.arange(25), np.diff(A.indptr))))
    unsorted = sp.csr_array((A.data, A.indices[order], A.indptr), shape=A.shape)
    twice = sp.csr_array((np.ones(2 * A.nnz), np.repeat(A.indices, 2), 2 * A.indptr), shape=A.shape)
    path = sp.csr_array(sp.diags_array([1.0, 1, 1], offsets=[-1, 0, 1], shape=(9, 9)))
    for matrix in (A, unsorted, twice, path):
        assert sparsetir.triangles(matrix) == expected(matrix.tocoo())


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_edges_stored_once(idtype):
    """On one side of the diagonal, on both, and with entries on it; one row is long."""
    A = graph(5, 200, 0.05).tocsr()
    A = sp.csr_array(A + A.T).tolil()
    A[7, :], A[:, 7] = 1, 1
    A = A.tocsr()
    wanted = expected(A.tocoo())
    mixed = sp.csr_array(sp.tril(A[:, ::-1])[:, ::-1])
    for matrix, count in (
        *((part, wanted) for part in (A, sp.tril(A), sp.triu(A), sp.tril(A, -1), sp.triu(A, 1), sp.tril(A).T)),
        (mixed, expected(mixed.tocoo())),
    ):
        rows = sp.csr_array(matrix)
        rows.indptr, rows.indices = rows.indptr.astype(idtype), rows.indices.astype(idtype)
        assert sparsetir.triangles(rows) == count


def mesh(side: int) -> sp.csr_array:
    """Squares with a diagonal each, which makes two triangles, and a vertex between each two squares without edges."""
    at = np.arange(side * side).reshape(side, side) * 2
    pairs = [(at[:, 1:], at[:, :-1]), (at[1:], at[:-1]), (at[1:, 1:], at[:-1, :-1])]
    ends = np.concatenate([[a.ravel(), b.ravel()] for a, b in pairs], axis=1)
    return sp.csr_array((np.ones(ends.shape[1]), tuple(ends)), shape=(2 * side * side, 2 * side * side))


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_many_short_rows(idtype, shuffled):
    """On either side of the diagonal, and on both; by one thread and by several."""
    for side in (2, 9, 140):
        L = mesh(side)
        if shuffled:
            order = np.random.default_rng(0).permutation(L.shape[0])
            L = sp.csr_array(sp.tril((L + L.T)[order][:, order]))
        for matrix in (L, L.T, L + L.T):
            rows = sp.csr_array(matrix)
            rows.sort_indices()
            rows.indptr, rows.indices = rows.indptr.astype(idtype), rows.indices.astype(idtype)
            assert sparsetir.triangles(rows) == 2 * (side - 1) ** 2


def test_rows_of_edges_stored_once_that_are_directed_anew():
    """A hub that all others have a row entry of, on either side; with a triangle for each two neighbours on the rim."""
    n = 3000
    rim = sp.diags_array(np.ones(n - 1), offsets=1, shape=(n, n)).tolil()
    for hub in (0, n - 1):
        A = rim.copy()
        A[hub, :] = 1
        A = sp.csr_array(A + A.T)
        for matrix in (sp.tril(A, -1), sp.triu(A, 1), A):
            assert sparsetir.triangles(sp.csr_array(matrix)) == n - 2


def test_arrays_may_begin_anywhere():
    """numpy's need not begin where a vector does."""
    L = mesh(40)
    for first in range(4):
        rows = L.copy()
        for part in ("indptr", "indices"):
            array = getattr(rows, part)
            moved = np.empty(len(array) + first, array.dtype)[first:]
            moved[...] = array
            setattr(rows, part, moved)
        for matrix in (rows, sp.csr_array(rows.T), sp.csr_array(rows + rows.T)):
            assert sparsetir.triangles(matrix) == 2 * 39**2


def test_room_behind_the_entries():
    L = mesh(5)
    L.indices, L.data = np.append(L.indices, np.int32([99, -1])), np.append(L.data, [1.0, 1])
    assert sparsetir.triangles(L) == 32
    assert sparsetir.triangles(sp.csr_array((np.ones(2), [7, -1], np.zeros(9, int)), shape=(8, 8), copy=False)) == 0


@pytest.mark.parametrize("fault", ["index", "negative", "pointer", "end", "far"])
def test_unsound_rows(fault):
    A = sp.csr_array(np.ones((5, 5)))
    if fault in ("index", "negative"):
        A.indices[7] = 5 if fault == "index" else -1
    elif fault == "far":  # not to be cut to the width of the indices
        A.indptr = A.indptr.astype("int64") + (np.arange(6) == 3) * 2**32
    else:
        A.indptr[2 if fault == "pointer" else 5] = 90
    with pytest.raises(StructureError, match="rows or columns outside of the shape"):
        sparsetir.triangles(A)


@pytest.mark.parametrize("nnz", [0, 4])
def test_row_pointers_that_are_not_there(nnz):
    A = sp.csr_array(np.eye(4) if nnz else (4, 4))
    A.indptr = A.indptr[:-1]
    with pytest.raises(StructureError, match="4 rows have 5 row pointers, got 4"):
        sparsetir.triangles(A)


def test_hubs_and_complete_graphs():
    n = 60
    full = sp.csr_array(np.ones((n, n)))
    assert sparsetir.triangles(full) == n * (n - 1) * (n - 2) // 6
    star = sp.csr_array((np.ones(n - 1), (np.zeros(n - 1, int), np.arange(1, n))), shape=(n, n))
    assert sparsetir.triangles(star) == 0


def test_other_classes():
    torch = pytest.importorskip("torch")
    A = graph(5, 30, 0.2)
    dense = np.zeros(A.shape, "float32")
    dense[A.row, A.col] = 1
    assert sparsetir.triangles(torch.from_numpy(dense).to_sparse_csr()) == expected(A)
    assert sparsetir.triangles(sparsetir.SparseTensor.from_any(sp.csr_array(dense))) == expected(A)


def test_what_is_no_graph_is_refused():
    with pytest.raises(ArgumentError, match=r"triangles takes the square matrix of a graph, got shape \(2, 3\)"):
        sparsetir.triangles(sp.csr_array((2, 3)))
    with pytest.raises(ArgumentTypeError, match="triangles takes a sparse matrix"):
        sparsetir.triangles(np.ones((2, 2)))


def test_the_program_counts_by_rows():
    L = sp.csr_array(np.tril(np.ones((4, 4)), -1))
    args = dict(indptr=L.indptr, indices=L.indices, l=L.data, n=4)
    right = [0, 0, 1, 3]
    assert interpret(sparsetir.ops.triangles("float64"), args)["c"].tolist() == right
    assert sparsetir.build(sparsetir.ops.triangles("float64"))(L=L).tolist() == right
    wide = L.astype("int64")
    wide.indptr, wide.indices = wide.indptr.astype("int64"), wide.indices.astype("int64")
    assert sparsetir.build(sparsetir.ops.triangles("int64", idtype="int64"))(L=wide).tolist() == right
