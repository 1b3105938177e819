# SPDX-License-Identifier: Apache-2.0
"""Triangle counting: direct the edges of a graph to bound row lengths, then count marked neighbours of neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
from tvm import ir, tirx
from tvm.script import tirx as T

from sparsetir import interop
from sparsetir.codegen.cache import Compiled, compile_cached
from sparsetir.codegen.target import native_target
from sparsetir.errors import ArgumentError, ArgumentTypeError, StructureError
from sparsetir.formats.canonical import compressed_rows
from sparsetir.formats.tensor import SparseTensor
from sparsetir.lower.iterations.normalize import realign
from sparsetir.utils.threads import get_num_threads

UNSOUND, UNSORTED, NOT_BELOW, NOT_ABOVE = 1, 2, 4, 8  # facts about rows, as bits
SIDES = NOT_BELOW | NOT_ABOVE
BLOCK = 64  # rows that one thread takes together
WORD = 64  # vertices in a word of marks
STRAIGHT = 12  # neighbours of neighbours for each edge up to which directing the edges takes longer than it saves
DIRECTED = 4  # neighbours of neighbours for each edge, once those are directed
SERIAL_WORK = 1 << 15  # neighbours of neighbours below which one thread counts


def triangles(A: Any) -> int:
    """Count the triangles of a graph: sets of three vertices with an edge between each two.

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
        Its index arrays name rows or columns outside of the shape.

    Notes
    -----
    Each edge is stored with the vertex with fewer neighbours, so that no row is long. Then the neighbours of a vertex
    are marked, and the marked ones among the neighbours of its neighbours are counted. Sorted rows that
    hold each edge in both directions, or in one below or above the diagonal, are used as stored; where they are short,
    each edge stays with the vertex that comes last, or first where it is stored in that direction alone.

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir
    >>> ring = sp.diags_array([1.0, 1, 1], offsets=[1, 2, 4], shape=(5, 5))
    >>> sparsetir.triangles(ring)
    4
    """
    graph = _rows(A)
    count = _counted(graph)
    return cast("int", _counted(_both_ways(graph)) if count is None else count)


def _rows(A: Any) -> Any:
    """Convert the matrix to compressed rows."""
    if not (interop.is_sparse(A) or isinstance(A, SparseTensor)) or len(A.shape) != 2:
        raise ArgumentTypeError(f"triangles takes a sparse matrix: {interop.advice_for_matrix(A)}")
    if A.shape[0] != A.shape[1]:
        raise ArgumentError(f"triangles takes the square matrix of a graph, got shape {tuple(A.shape)}")
    if interop.is_torch(A):
        return SparseTensor.from_any(A, "csr").to_scipy("csr", copy=False)
    if sp.issparse(A) and A.format == "csc":  # the rows of the transpose have the same triangles
        interop.check_parts(A, "A")
        return A
    return compressed_rows(A, "A")


def _both_ways(rows: Any) -> Any:
    """Compute the pattern of a matrix and its transpose together, with sorted rows and unique coordinates."""
    pattern = sp.csr_array((np.ones(len(rows.indices), np.bool_), rows.indices, rows.indptr), shape=rows.shape)
    both = pattern + pattern.T.tocsr()
    both.sum_duplicates()
    return both


def _counted(graph: Any) -> int | None:
    """Count the triangles of rows; return None if these must first be sorted or hold each edge in both directions."""
    idtype = np.result_type(graph.indptr, graph.indices)
    n, nnz = graph.shape[0], len(graph.indices)
    if len(graph.indptr) != n + 1:
        raise StructureError(f"{n} rows have {n + 1} row pointers, got {len(graph.indptr)}")
    if not nnz:
        return 0
    stored = (np.ascontiguousarray(a).astype(idtype, copy=False) for a in (graph.indptr, graph.indices))
    rows = [interop.writable_alias(a) for a in stored]
    flags = np.empty(2, np.int64)
    _function("look", idtype.name)(*rows, flags, n, nnz)
    state, work = flags.tolist()
    if state & UNSOUND:
        raise StructureError(f"the index arrays name rows or columns outside of the shape {tuple(graph.shape)}")
    if state & UNSORTED:
        return None
    is_low, heavy = not state & NOT_BELOW, "direct_singles"
    if state & SIDES == SIDES:
        low, is_paired, work = _rewritten("pair_up", rows, n)
        if not is_paired:
            return None
        is_low, heavy, edges = True, "direct_pairs", int(low[0][n])
    else:
        low, edges = rows, nnz
    if work > STRAIGHT * edges:
        rows, _, _ = _rewritten(heavy, rows, n)
        return _triangles(rows, n, DIRECTED * edges, 0, 0)
    # The outermost neighbour of each vertex is skipped: its row holds no other neighbour of the vertex.
    return _triangles(low, n, work, int(is_low), 1)


def _rewritten(function: str, rows: list[np.ndarray], n: int) -> tuple[list[np.ndarray], int, int]:
    """Rewrite rows with each edge in one direction; return them with the two numbers that the function reports."""
    idtype, nnz = rows[1].dtype, len(rows[1])
    begin, place, to = (np.empty(count, idtype) for count in (n + 1, n + 1, nnz))
    report = np.zeros(2, np.int64)
    _function(function, idtype.name)(*rows, begin, place, to, report, n, nnz)
    is_whole, work = report.tolist()
    return [begin, to], is_whole, work


def _triangles(rows: list[np.ndarray], n: int, work: int, first: int, without: int) -> int:
    """Count the triangles of directed edges; each row's loop starts at entry `first` and is shorter by `without`."""
    chunks = get_num_threads() if work > SERIAL_WORK else 1
    marks, counts = np.zeros((chunks, -(-n // WORD)), np.int64), np.empty((chunks, BLOCK), np.int64)
    count = _function("count" if chunks > 1 else "count_alone", rows[1].dtype.name)
    count(*rows, marks, counts, n, len(rows[1]), chunks, first, without)
    return int(counts[0, 0] if chunks == 1 else counts[:, 0].sum())


# ---------------------------------------------------------------------------------------------------- loops


class Loops(Compiled):
    """Machine code of hand-written loops."""

    def __init__(self, func: tirx.PrimFunc, target: Any, schedule: Any = None) -> None:
        module = ir.IRModule({str(func.attrs["global_symbol"]): realign(func)})
        super().__init__(func, target, schedule, {2: module, 3: module})


@cache
def _function(name: str, idtype: str) -> Any:
    """Return one of the compiled functions."""
    return compile_cached(MAKERS[name](idtype), native_target(), None, Loops).function


def _look(idtype: str) -> tirx.PrimFunc:
    """Validate the index arrays, and compute an upper bound of the number of neighbours of all neighbours.

    All neighbouring entries are compared in one loop, also across row ends; the latter are then subtracted.
    """

    @T.prim_func
    def look(a: T.handle, b: T.handle, c: T.handle, n: T.int64, nnz: T.int64):
        T.func_attr({"global_symbol": "look", "tirx.noalias": True})
        indptr = T.match_buffer(a, (n + 1,), idtype)
        indices = T.match_buffer(b, (nnz,), idtype)
        facts = T.match_buffer(c, (2,), "int64")
        wrong = T.alloc_buffer((1,), idtype, scope="local")
        descents = T.alloc_buffer((1,), idtype, scope="local")
        above = T.alloc_buffer((1,), idtype, scope="local")
        below = T.alloc_buffer((1,), idtype, scope="local")
        longest = T.alloc_buffer((1,), idtype, scope="local")
        work = T.alloc_buffer((1,), "int64", scope="local")
        wrong[0] = T.Cast(idtype, indptr[0] != 0 or T.Cast("int64", indptr[n]) > nnz)
        for i in range(n):
            wrong[0] = T.bitwise_or(wrong[0], T.Cast(idtype, indptr[i] > indptr[i + 1]))
        facts[0] = T.int64(UNSOUND)
        facts[1] = T.int64(0)
        if wrong[0] == 0:
            for p in range(T.Cast("int64", indptr[n])):
                rest: T.let[T.bool] = indices[p] > T.Cast(idtype, n - 1)
                wrong[0] = T.bitwise_or(wrong[0], T.bitwise_or(indices[p], T.Cast(idtype, 0) - T.Cast(idtype, rest)))
            if wrong[0] >= 0:
                descents[0] = T.Cast(idtype, 0)
                above[0] = T.Cast(idtype, 0)
                below[0] = T.Cast(idtype, 0)
                longest[0] = T.Cast(idtype, 0)
                for p in range(T.Cast("int64", indptr[n]) - 1):
                    descents[0] = descents[0] + T.Cast(idtype, indices[p] >= indices[p + 1])
                for i in range(n):
                    begin: T.let[T.int64] = T.Cast("int64", indptr[i])
                    end: T.let[T.int64] = T.Cast("int64", indptr[i + 1])
                    has: T.let[T.int32] = T.Cast("int32", end > begin)
                    first: T.let[T.int64] = T.Cast("int64", indices[T.min(begin, nnz - 1)])
                    last: T.let[T.int64] = T.Cast("int64", indices[T.max(end - 1, T.int64(0))])
                    before: T.let[T.int64] = T.Cast("int64", indices[T.max(begin - 1, T.int64(0))])
                    is_met: T.let[T.int32] = T.Cast("int32", begin > 0) * T.Cast("int32", before >= first)
                    below[0] = T.bitwise_or(below[0], T.Cast(idtype, has * T.Cast("int32", last >= i)))
                    above[0] = T.bitwise_or(above[0], T.Cast(idtype, has * T.Cast("int32", first <= i)))
                    descents[0] = descents[0] - T.Cast(idtype, has * is_met)
                    longest[0] = T.max(longest[0], indptr[i + 1] - indptr[i])
                work[0] = T.Cast("int64", longest[0]) * T.Cast("int64", indptr[n])
                if longest[0] > STRAIGHT:
                    work[0] = T.int64(0)
                    for p in range(T.Cast("int64", indptr[n])):
                        j: T.let[T.int64] = T.Cast("int64", indices[p])
                        work[0] = work[0] + T.Cast("int64", indptr[j + 1] - indptr[j])
                facts[0] = (
                    T.Cast("int64", descents[0] != 0) * UNSORTED
                    + T.Cast("int64", below[0]) * NOT_BELOW
                    + T.Cast("int64", above[0]) * NOT_ABOVE
                )
                facts[1] = work[0]

    return look


def _pair_up(idtype: str) -> tirx.PrimFunc:
    """Keep the entries below the diagonal; determine whether each is stored above it, too, and the work they make.

    In row order, the next entry above the diagonal in the row that an entry names must name the entry's row.
    """

    @T.prim_func
    def pair_up(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, n: T.int64, nnz: T.int64):
        T.func_attr({"global_symbol": "pair_up", "tirx.noalias": True})
        first = T.match_buffer(a, (n + 1,), idtype)
        indices = T.match_buffer(b, (nnz,), idtype)
        begin = T.match_buffer(c, (n + 1,), idtype)
        place = T.match_buffer(d, (n + 1,), idtype)
        to = T.match_buffer(e, (nnz,), idtype)
        facts = T.match_buffer(f, (2,), "int64")
        others = T.alloc_buffer((1,), "int32", scope="local")
        filled = T.alloc_buffer((1,), idtype, scope="local")
        passed = T.alloc_buffer((1,), idtype, scope="local")
        work = T.alloc_buffer((1,), "int64", scope="local")
        others[0] = 0
        filled[0] = T.Cast(idtype, 0)
        work[0] = T.int64(0)
        for i in range(n):
            begin[i] = filled[0]
            passed[0] = first[i]
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                j: T.let[T.int64] = T.Cast("int64", indices[first[i] + p])
                if j < i:
                    at: T.let[T.int64] = T.min(T.Cast("int64", place[j]), nnz - 1)
                    is_other: T.let[T.bool] = place[j] >= first[j + 1] or T.Cast("int64", indices[at]) != i
                    others[0] = T.bitwise_or(others[0], T.Cast("int32", is_other))
                    place[j] = place[j] + T.Cast(idtype, place[j] < first[j + 1])
                    work[0] = work[0] + T.Cast("int64", begin[j + 1] - begin[j])
                    to[filled[0]] = T.Cast(idtype, j)
                    filled[0] = filled[0] + T.Cast(idtype, 1)
                passed[0] = passed[0] + T.Cast(idtype, j <= i)
            begin[i + 1] = filled[0]
            place[i] = passed[0]
        for i in range(n):
            others[0] = T.bitwise_or(others[0], T.Cast("int32", place[i] != first[i + 1]))
        facts[0] = T.Cast("int64", others[0] == 0)
        facts[1] = work[0]

    return pair_up


def _direct_pairs(idtype: str) -> tirx.PrimFunc:
    """Store each edge, given in both directions, in the row of the vertex with fewer neighbours."""

    @T.prim_func
    def direct_pairs(
        a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, n: T.int64, nnz: T.int64
    ):
        T.func_attr({"global_symbol": "direct_pairs", "tirx.noalias": True})
        first = T.match_buffer(a, (n + 1,), idtype)
        indices = T.match_buffer(b, (nnz,), idtype)
        begin = T.match_buffer(c, (n + 1,), idtype)
        _place = T.match_buffer(d, (n + 1,), idtype)
        to = T.match_buffer(e, (nnz,), idtype)
        _facts = T.match_buffer(f, (2,), "int64")
        filled = T.alloc_buffer((1,), "int64", scope="local")
        filled[0] = T.int64(0)
        for i in range(n):
            begin[i] = T.Cast(idtype, filled[0])
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                to_row: T.let[T.int64] = T.Cast("int64", indices[first[i] + p])
                to[filled[0]] = T.Cast(idtype, to_row)  # overwritten if the edge is not kept
                length: T.let[T.int64] = T.Cast("int64", first[to_row + 1] - first[to_row])
                more: T.let[T.int64] = length - T.Cast("int64", first[i + 1] - first[i])
                filled[0] = filled[0] + T.Cast("int64", more > 0 or (more == 0 and to_row < i))
        begin[n] = T.Cast(idtype, filled[0])

    return direct_pairs


def _direct_singles(idtype: str) -> tirx.PrimFunc:
    """Store each edge, given once, in the row of the vertex with fewer neighbours."""

    @T.prim_func
    def direct_singles(
        a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, n: T.int64, nnz: T.int64
    ):
        T.func_attr({"global_symbol": "direct_singles", "tirx.noalias": True})
        first = T.match_buffer(a, (n + 1,), idtype)
        indices = T.match_buffer(b, (nnz,), idtype)
        begin = T.match_buffer(c, (n + 1,), idtype)
        count = T.match_buffer(d, (n + 1,), idtype)
        to = T.match_buffer(e, (nnz,), idtype)
        _facts = T.match_buffer(f, (2,), "int64")
        before = T.alloc_buffer((1,), idtype, scope="local")
        held = T.alloc_buffer((1,), idtype, scope="local")
        for i in range(n + 1):
            begin[i] = T.Cast(idtype, 0)
        for i in range(n):
            count[i] = first[i + 1] - first[i]
        for p in range(T.Cast("int64", first[n])):
            count[indices[p]] = count[indices[p]] + T.Cast(idtype, 1)
        for i in range(n):
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                j: T.let[T.int64] = T.Cast("int64", indices[first[i] + p])
                owner: T.let[T.int64] = T.Select(count[j] > count[i], i, j)
                begin[owner] = begin[owner] + T.Cast(idtype, 1)
        before[0] = T.Cast(idtype, 0)
        for i in range(n + 1):  # row ends: entries are filled in from the back
            before[0] = before[0] + begin[i]
            begin[i] = before[0]
        for i in range(n):
            for p in range(T.Cast("int64", first[i + 1] - first[i])):
                to_row: T.let[T.int64] = T.Cast("int64", indices[first[i] + p])
                holder: T.let[T.int64] = T.Select(count[to_row] > count[i], i, to_row)
                held[0] = begin[holder] - T.Cast(idtype, 1)
                to[held[0]] = T.Cast(idtype, i + to_row - holder)
                begin[holder] = held[0]

    return direct_singles


def _count(idtype: str, name: str = "count", each_chunk: Any = T.parallel) -> tirx.PrimFunc:
    """Count the neighbours of neighbours that are neighbours; chunks process blocks of rows in turn."""

    @T.prim_func
    def count(
        a: T.handle,
        b: T.handle,
        c: T.handle,
        d: T.handle,
        n: T.int64,
        nnz: T.int64,
        chunks: T.int64,
        lead: T.int64,
        without: T.int64,
    ):
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        begin = T.match_buffer(a, (n + 1,), idtype)
        to = T.match_buffer(b, (nnz,), idtype)
        marks = T.match_buffer(c, (chunks, T.floordiv(n + WORD - 1, WORD)), "int64")
        found = T.match_buffer(d, (chunks, BLOCK), "int64")
        for chunk in each_chunk(chunks):
            total = T.alloc_buffer((1,), "int64", scope="local")
            total[0] = T.int64(0)
            for block in range(T.floordiv(T.floordiv(n + BLOCK - 1, BLOCK) + chunks - 1 - chunk, chunks)):
                for r in range(T.min(T.int64(BLOCK), n - (block * chunks + chunk) * BLOCK)):
                    row: T.let[T.int64] = (block * chunks + chunk) * BLOCK + r
                    first: T.let[T.int64] = T.Cast("int64", begin[row])
                    length: T.let[T.int64] = T.Cast("int64", begin[row + 1]) - first
                    if length > 1:
                        for p in range(length):
                            j: T.let[T.int64] = T.Cast("int64", to[first + p])
                            bit: T.let[T.int64] = T.shift_left(T.int64(1), T.bitwise_and(j, T.int64(WORD - 1)))
                            marks[chunk, T.shift_right(j, T.int64(6))] = T.bitwise_or(
                                marks[chunk, T.shift_right(j, T.int64(6))], bit
                            )
                        for p in range(length - without):
                            of: T.let[T.int64] = T.Cast("int64", to[first + lead + p])
                            start: T.let[T.int64] = T.Cast("int64", begin[of])
                            for q in range(T.Cast("int64", begin[of + 1]) - start):
                                k: T.let[T.int64] = T.Cast("int64", to[start + q])
                                word: T.let[T.int64] = marks[chunk, T.shift_right(k, T.int64(6))]
                                total[0] = total[0] + T.bitwise_and(
                                    T.shift_right(word, T.bitwise_and(k, T.int64(WORD - 1))), T.int64(1)
                                )
                        for p in range(length):
                            marks[chunk, T.shift_right(T.Cast("int64", to[first + p]), T.int64(6))] = T.int64(0)
            found[chunk, 0] = total[0]

    return count


MAKERS: dict[str, Callable[[str], tirx.PrimFunc]] = {
    "look": _look,
    "pair_up": _pair_up,
    "direct_pairs": _direct_pairs,
    "direct_singles": _direct_singles,
    "count": _count,
    "count_alone": partial(_count, name="count_alone", each_chunk=T.serial),
}


__all__ = ["triangles"]
