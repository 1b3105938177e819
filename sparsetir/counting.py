# SPDX-License-Identifier: Apache-2.0
"""Triangles of a graph."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as T

from sparsetir import interop
from sparsetir.compile.cache import compile_cached
from sparsetir.compile.compiled import Compiled
from sparsetir.compile.target import native_target
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.threads import get_num_threads

UNSOUND, UNSORTED, ONE_WAY, NOT_BELOW, NOT_ABOVE = 1, 2, 4, 8, 16  # what may be said of rows
SIDES = NOT_BELOW | NOT_ABOVE
BLOCK = 64  # rows that one thread takes together
ROW_WORK = 1 << 13  # edges below which one thread counts


def triangles(A: Any) -> int:
    """The number of triangles in a graph: of sets of three vertices with an edge between each two.

    Parameters
    ----------
    A : sparse matrix, shape (n, n)
        Of scipy, torch, or a `SparseTensor`: each stored entry off the diagonal is an edge, whatever its value and
        direction. Entries may repeat, and an edge may be stored in one direction or in both.

    Returns
    -------
    int

    Raises
    ------
    ArgumentTypeError
        `A` is no sparse matrix.
    ArgumentError
        `A` is not square.
    StructureError
        Its index arrays name rows or columns that there are none of.

    Notes
    -----
    Each edge goes to the vertex with fewer neighbours, so that no row is long. Then the neighbours of a vertex are
    marked, and those of its neighbours counted that have a mark. Rows that are sorted and hold each edge in both
    directions, or in one below or above the diagonal, are taken as they are stored.

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir
    >>> ring = sp.diags_array([1.0, 1, 1], offsets=[1, 2, 4], shape=(5, 5))
    >>> sparsetir.triangles(ring)
    4
    """
    graph = _rows(A)
    found = _counted(graph)
    return cast("int", _counted(_both_ways(graph)) if found is None else found)


def _rows(A: Any) -> Any:
    """The matrix in compressed rows."""
    if not (interop.is_sparse(A) or isinstance(A, SparseTensor)) or len(A.shape) != 2:
        how = "pass a scipy matrix or a torch tensor with a sparse layout"
        raise ArgumentTypeError(f"triangles takes a sparse matrix: {how}; found {type(A).__name__}")
    if A.shape[0] != A.shape[1]:
        raise ArgumentError(f"triangles takes the square matrix of a graph, found shape {tuple(A.shape)}")
    if sp.issparse(A):
        # The rows of the transpose have the same triangles.
        return A if A.format in ("csr", "csc") else A.tocsr()
    return SparseTensor.from_any(A).to_scipy("csr")


def _both_ways(rows: Any) -> Any:
    """The pattern of a matrix and its transpose together, each coordinate once and the rows sorted."""
    pattern = sp.csr_array((np.ones(len(rows.indices), np.bool_), rows.indices, rows.indptr), shape=rows.shape)
    both = pattern + pattern.T.tocsr()
    both.sum_duplicates()
    return both


def _counted(graph: Any) -> int | None:
    """The triangles of rows; None where these must be sorted or hold each edge in both directions first."""
    indptr, indices = np.ascontiguousarray(graph.indptr), np.ascontiguousarray(graph.indices)
    indptr = indptr.astype(indices.dtype, copy=False)
    n, nnz = graph.shape[0], len(indices)
    if not nnz:
        return 0
    look, direct_pairs, direct_singles, count = _functions(str(indices.dtype))
    first, place, begin = (np.empty(n + 1, dtype) for dtype in (indices.dtype, indices.dtype, np.int64))
    to, state = np.empty(nnz + 1, indices.dtype), np.empty(1, np.int32)
    held = [tvm_ffi.from_dlpack(interop.writable_alias(a)) for a in (indptr, indices, first, to, begin, place, state)]
    look(held[0], held[1], held[2], held[3], held[6], n, nnz)
    if state[0] & UNSOUND:
        raise StructureError(f"the index arrays name rows or columns outside of the shape {tuple(graph.shape)}")
    if state[0] & UNSORTED:
        return None
    direct_pairs(*held[2:], n, nnz)
    if state[0] & ONE_WAY:
        if state[0] & SIDES == SIDES:
            return None
        moved = tvm_ffi.from_dlpack(np.empty(nnz + 1, indices.dtype))
        direct_singles(*held[2:6], moved, n, nnz)
        held[3] = moved
        begin[1:], begin[0] = begin[:-1].copy(), 0  # each row ends where the next one begins
    chunks = get_num_threads() if nnz > ROW_WORK else 1
    mark, found = np.empty((chunks, n), indices.dtype), np.empty((chunks, BLOCK), np.int64)
    count(held[4], held[3], *map(tvm_ffi.from_dlpack, (mark, found)), n, nnz, chunks)
    return int(found[:, 0].sum())


# ---------------------------------------------------------------------------------------------------- loops


class Loops(Compiled):
    """The machine code of loops that are written out."""

    def __init__(self, func: tirx.PrimFunc, target: Any, schedule: Any = None) -> None:
        made = ir.IRModule({str(func.attrs["global_symbol"]): func})
        super().__init__(func, target, schedule, {2: made, 3: made})


@cache
def _functions(idtype: str) -> list[Any]:
    made = (make(idtype) for make in (_look, _direct_pairs, _direct_singles, _count))
    return [compile_cached(func, native_target(), None, Loops).function for func in made]


def _look(idtype: str) -> tirx.PrimFunc:
    """Copy the index arrays, which somebody may change meanwhile, and say what is wrong with them in `state`."""

    @T.prim_func
    def look(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, n: T.int64, nnz: T.int64):
        T.func_attr({"global_symbol": "look", "tirx.noalias": True})
        indptr = T.match_buffer(a, (n + 1,), idtype)
        indices = T.match_buffer(b, (nnz,), idtype)
        first = T.match_buffer(c, (n + 1,), idtype)
        to = T.match_buffer(d, (nnz + 1,), idtype)
        state = T.match_buffer(e, (1,), "int32")
        seen = T.alloc_buffer((1,), "int32", scope="local")
        for i in range(n + 1):
            first[i] = indptr[i]
        seen[0] = T.Cast("int32", first[0] != 0 or T.Cast("int64", first[n]) > nnz) * UNSOUND
        for i in range(n):
            seen[0] = T.bitwise_or(seen[0], T.Cast("int32", first[i] > first[i + 1]) * UNSOUND)
        if seen[0] == 0:
            for i in range(n):
                for p in range(T.Cast("int64", first[i + 1] - first[i])):
                    to[first[i] + p] = indices[first[i] + p]
                    j: T.let[T.int64] = T.Cast("int64", to[first[i] + p])
                    before: T.let[T.int64] = T.Cast("int64", to[first[i] + T.max(p - 1, T.int64(0))])
                    seen[0] = T.bitwise_or(seen[0], T.Cast("int32", j < 0 or j >= n) * UNSOUND)
                    seen[0] = T.bitwise_or(seen[0], T.Cast("int32", p > 0 and before >= j) * UNSORTED)
                    seen[0] = T.bitwise_or(seen[0], T.Cast("int32", j >= i) * NOT_BELOW)
                    seen[0] = T.bitwise_or(seen[0], T.Cast("int32", j <= i) * NOT_ABOVE)
        state[0] = seen[0]

    return look


def _direct_pairs(idtype: str) -> tirx.PrimFunc:
    """Keep each edge that is stored in both directions in one; `state` says if one is not.

    Row after row, the next entry of the row that an entry names must name it.
    """

    @T.prim_func
    def direct_pairs(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, n: T.int64, nnz: T.int64):
        T.func_attr({"global_symbol": "direct_pairs", "tirx.noalias": True})
        first = T.match_buffer(a, (n + 1,), idtype)
        to = T.match_buffer(b, (nnz + 1,), idtype)
        begin = T.match_buffer(c, (n + 1,), "int64")
        place = T.match_buffer(d, (n + 1,), idtype)
        state = T.match_buffer(e, (1,), "int32")
        filled = T.alloc_buffer((1,), "int64", scope="local")
        for i in range(n + 1):
            place[i] = first[i]
        for i in range(n):
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                j: T.let[T.int64] = T.Cast("int64", to[first[i] + p])
                at: T.let[T.int64] = T.Cast("int64", place[j])  # of a row that has ended: an entry of the next one
                is_other: T.let[T.bool] = place[j] >= first[j + 1] or T.Cast("int64", to[at]) != i
                state[0] = T.bitwise_or(state[0], T.Cast("int32", is_other) * ONE_WAY)
                place[j] = place[j] + T.Cast(idtype, place[j] < first[j + 1])
        if T.bitwise_and(state[0], ONE_WAY) == 0:
            filled[0] = T.int64(0)
            for i in range(n):
                begin[i] = filled[0]
                for p in range(T.Cast("int64", first[i + 1] - first[i])):
                    to_row: T.let[T.int64] = T.Cast("int64", to[first[i] + p])
                    to[filled[0]] = T.Cast(idtype, to_row)
                    length: T.let[T.int64] = T.Cast("int64", first[to_row + 1] - first[to_row])
                    more: T.let[T.int64] = length - T.Cast("int64", first[i + 1] - first[i])
                    filled[0] = filled[0] + T.Cast("int64", more > 0 or (more == 0 and to_row < i))
            begin[n] = filled[0]

    return direct_pairs


def _direct_singles(idtype: str) -> tirx.PrimFunc:
    """Put each edge, which is stored once, into the row of the vertex with fewer neighbours.

    In the end `begin` says where each row ends.
    """

    @T.prim_func
    def direct_singles(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, n: T.int64, nnz: T.int64):
        T.func_attr({"global_symbol": "direct_singles", "tirx.noalias": True})
        first = T.match_buffer(a, (n + 1,), idtype)
        to = T.match_buffer(b, (nnz + 1,), idtype)
        begin = T.match_buffer(c, (n + 1,), "int64")
        count = T.match_buffer(d, (n + 1,), idtype)
        moved = T.match_buffer(e, (nnz + 1,), idtype)
        for i in range(n + 1):
            count[i] = T.Cast(idtype, 0)
            begin[i] = T.int64(0)
        for i in range(n):
            count[i] = count[i] + first[i + 1] - first[i]
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                count[to[first[i] + p]] = count[to[first[i] + p]] + T.Cast(idtype, 1)
        for i in range(n):
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                j: T.let[T.int64] = T.Cast("int64", to[first[i] + p])
                owner: T.let[T.int64] = T.Select(count[j] > count[i], i, j)
                begin[owner + 1] = begin[owner + 1] + T.int64(1)
        for i in range(n):
            begin[i + 1] = begin[i + 1] + begin[i]
        for i in range(n):
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                to_row: T.let[T.int64] = T.Cast("int64", to[first[i] + p])
                holder: T.let[T.int64] = T.Select(count[to_row] > count[i], i, to_row)
                moved[begin[holder]] = T.Cast(idtype, i + to_row - holder)
                begin[holder] = begin[holder] + T.int64(1)

    return direct_singles


def _count(idtype: str) -> tirx.PrimFunc:
    """Count the neighbours of neighbours that are neighbours, blocks of rows in turn for each chunk."""

    @T.prim_func
    def count(a: T.handle, b: T.handle, c: T.handle, d: T.handle, n: T.int64, nnz: T.int64, chunks: T.int64):
        T.func_attr({"global_symbol": "count", "tirx.noalias": True})
        begin = T.match_buffer(a, (n + 1,), "int64")
        to = T.match_buffer(b, (nnz + 1,), idtype)
        mark = T.match_buffer(c, (chunks, n), idtype)
        found = T.match_buffer(d, (chunks, BLOCK), "int64")
        for chunk in T.parallel(chunks):
            total = T.alloc_buffer((1,), "int64", scope="local")
            total[0] = T.int64(0)
            for i in range(n):
                mark[chunk, i] = T.Cast(idtype, -1)
            for block in range(T.floordiv(T.floordiv(n + BLOCK - 1, BLOCK) + chunks - 1 - chunk, chunks)):
                for r in range(T.min(T.int64(BLOCK), n - (block * chunks + chunk) * BLOCK)):
                    row: T.let[T.int64] = (block * chunks + chunk) * BLOCK + r
                    for p in range(begin[row + 1] - begin[row]):
                        mark[chunk, to[begin[row] + p]] = T.Cast(idtype, row)
                    for p in range(begin[row + 1] - begin[row]):
                        start: T.let[T.int64] = begin[to[begin[row] + p]]
                        for q in range(begin[to[begin[row] + p] + 1] - start):
                            total[0] = total[0] + T.Cast("int64", mark[chunk, to[start + q]] == T.Cast(idtype, row))
            found[chunk, 0] = total[0]

    return count


__all__ = ["triangles"]
