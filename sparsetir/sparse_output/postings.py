# SPDX-License-Identifier: Apache-2.0
"""Retrieval over an inverted index: the best documents of each query, from the postings of its terms alone.

Documents are visited in blocks whose scores stay in the first-level cache. A block is skipped if the largest values of
its postings cannot lift a document above the worst one that is kept (Ding and Suel, SIGIR 2011). Threads share queries,
or the ranges of documents of few queries. Blocks come in ascending order, so that ties keep the first documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import interop
from sparsetir.codegen.cache import CompiledLoops, compile_cached
from sparsetir.codegen.target import native_target
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.ir.rewriting import LONG, alloc, array_param, cell, get, long, long_var, put, seq
from sparsetir.ir.views import cast, const
from sparsetir.lower.loops import loop, parallel, serial
from sparsetir.sparse_output.fast_paths import ROWS
from sparsetir.sparse_output.result import top_of
from sparsetir.sparse_output.workspace import tensor
from sparsetir.utils.arguments import dtype_name
from sparsetir.utils.caches import cached_property, remember
from sparsetir.utils.threads import get_num_threads

BLOCK = 1 << 13  # documents whose scores stay in the first-level cache
CHUNK, LANES = 256, 16  # documents that are compared with the worst score at a time, and those of a vector
MIN_SCANNED = BLOCK // 8  # postings of a block from which on all its documents are visited, in vectors
POSTINGS_A_BLOCK = 8  # mean number from which on a term has a maximum for each block
MIN_RANGE_POSTINGS = 1 << 15  # of one query, for a thread that takes a range of its documents
MARGIN = 1 + 1e-5  # of bounds, whose sums may be rounded otherwise than those of scores
DTYPES = ("float32", "float64")

INT = ir.PrimType("int32")


class Postings:
    """The postings of documents, validated once, for many calls of `search` and `top`.

    Parameters
    ----------
    D : sparse matrix, shape (terms, documents)
        Weights of terms in documents, finite; float32 or float64, others are converted to the one that holds them.
        For a matrix of documents by terms pass its transpose.

    Attributes
    ----------
    shape : (int, int)
    dtype : dtype

    Raises
    ------
    ArgumentTypeError
        `D` is not sparse, or holds complex numbers.
    ArgumentError
        `D` is no matrix, or holds infinities or NaN.
    StructureError
        The index arrays are broken.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> documents = sp.csr_array(np.array([[0, 2.0, 1.0], [3.0, 0, 1.0], [0, 2.5, 0]], "float32"))
    >>> index = sparsetir.Postings(documents.T)
    >>> ids, scores = index.search(sp.csr_array(np.array([[0, 1.0, 1.0]], "float32")), 2)
    >>> ids.tolist(), scores.tolist()
    ([[0, 2]], [[3.0, 2.5]])
    """

    def __init__(self, D: Any) -> None:
        matrix = _rows(D, "D")
        self.shape, self.dtype = matrix.shape, matrix.data.dtype
        self._indptr = np.array(matrix.indptr, np.int64, order="C")
        self._documents = np.append(matrix.indices.astype(np.int32), np.int32(np.iinfo(np.int32).max))
        self._values = np.array(matrix.data, order="C")
        self._measure_blocks()

    def __repr__(self) -> str:
        terms, documents = self.shape
        return f"Postings({terms} terms, {documents} documents, {self._values.size} postings of {self.dtype})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tensors"}

    @cached_property
    def _tensors(self) -> list[Any]:
        """The arrays as compiled functions take them."""
        arrays = self._indptr, self._documents, self._values, self._slots, self._starts, self._maxima, self._tops
        return [tensor(array) for array in arrays]

    def _measure_blocks(self) -> None:
        """Compute the starts and the largest values of blocks of long terms, and the largest values of all terms.

        What is not stored is zero, so no maximum is below it.
        """
        terms, documents = self.shape
        blocks, counts = max(-(-documents // BLOCK), 1), np.diff(self._indptr)
        self._tops = np.zeros(terms, self.dtype)
        stored = np.flatnonzero(counts)
        if stored.size:
            self._tops[stored] = np.maximum(np.maximum.reduceat(self._values, self._indptr[stored]), 0)
        listed = np.flatnonzero(counts > POSTINGS_A_BLOCK * blocks)
        self._slots = np.full(terms, -1, np.int32)
        self._slots[listed] = np.arange(listed.size)
        self._starts = np.zeros((max(listed.size, 1), blocks + 1), np.int32)
        self._maxima = np.zeros((max(listed.size, 1), blocks), self.dtype)
        edges = np.arange(blocks + 1) * BLOCK
        for slot, term in enumerate(listed):
            part = slice(self._indptr[term], self._indptr[term + 1])
            starts = self._starts[slot] = np.searchsorted(self._documents[part], edges)
            full = np.flatnonzero(np.diff(starts))
            self._maxima[slot, full] = np.maximum(np.maximum.reduceat(self._values[part], starts[full]), 0)

    def search(self, Q: Any, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """Return the best documents of each query and their scores, the best first.

        Parameters
        ----------
        Q : sparse matrix, shape (queries, terms)
            Weights of terms in queries, finite.
        k : int
            Documents of each query.

        Returns
        -------
        (ndarray, ndarray), shape (queries, k)
            Documents that a term of the query is in, and the sums of products of weights, exactly as a product has them
            up to rounding. Of equal scores the first document comes first; places without a document hold -1 and 0.

        Raises
        ------
        ArgumentTypeError, ArgumentError, StructureError
            As for `Postings`; or `Q` has another number of terms.
        """
        number = top_of(k)
        if number is None:
            raise ArgumentError("k: expected a number of documents, got None. Pass one such as 10.")
        queries = _rows(Q, "Q", self.dtype) if not _is_plain(Q, self.dtype) else Q
        if queries.shape[1] != self.shape[0]:
            raise ArgumentError(f"Q: expected {self.shape[0]} columns, the terms of the index, got {queries.shape[1]}.")
        count, k = queries.shape[0], min(number, self.shape[1])
        if not count or not k or not queries.data.size or not self._values.size:
            return np.full((count, k), -1, np.int64), np.zeros((count, k), self.dtype)
        threads, ranges = self._shares(queries)
        ids, scores = self._run(queries, k, threads, ranges)
        return _merged(ids, scores, k) if ranges > 1 else _sorted(ids[:, 0], scores[:, 0])

    def top(self, Q: Any, k: int = 10) -> Any:
        """Return ``sparsetir.matmul(Q, D, top=k)`` as a CSR array of scipy; see `search` for the arguments."""
        ids, scores = self.search(Q, k)
        order = np.argsort(np.where(ids < 0, self.shape[1], ids), axis=1)
        ids, scores = (np.take_along_axis(a, order, axis=1) for a in (ids, scores))
        is_stored = ids >= 0
        indptr = np.concatenate([[0], np.cumsum(is_stored.sum(axis=1))]).astype(np.int32)
        return sp.csr_array((scores[is_stored], ids[is_stored].astype(np.int32), indptr), (len(ids), self.shape[1]))

    def _shares(self, queries: Any) -> tuple[int, int]:
        """Return the number of threads, and into how many ranges of documents each query is divided."""
        count, threads = queries.shape[0], get_num_threads()
        if count >= threads or threads == 1:
            return min(threads, count), 1
        terms = queries.indices
        work = int((self._indptr[terms + 1] - self._indptr[terms]).sum())
        blocks = -(-self.shape[1] // BLOCK)
        ranges = min(-(-threads // count), blocks, work // (count * MIN_RANGE_POSTINGS))
        return (min(threads, count * ranges), ranges) if ranges > 1 else (min(threads, count), 1)

    def _run(self, queries: Any, k: int, threads: int, ranges: int) -> tuple[np.ndarray, np.ndarray]:
        count, (terms, documents) = queries.shape[0], self.shape
        longest = max(int(np.diff(queries.indptr).max()), 1)
        ids = np.empty((count, ranges, k), np.int64)
        scores = np.empty((count, ranges, k), self.dtype)
        own = np.full((threads, BLOCK), -np.inf, self.dtype)
        lows, highs = np.empty((2, threads, longest), np.int64)
        listed, blocks = self._maxima.shape
        sizes = (terms, documents, self._values.size, listed, blocks, count, queries.data.size)
        # Copies are compact, which TVM asks of the strides of arrays with one element as well.
        query = [
            np.array(array, dtype, order="C")
            for array, dtype in ((queries.indptr, LONG), (queries.indices, "int32"), (queries.data, self.dtype))
        ]
        can_skip = not queries.data.size or queries.data.min() >= 0
        numbers = (*sizes, k, threads, ranges, longest, int(can_skip))
        _function(self.dtype.name)(*numbers, *self._tensors, *query, own, lows, highs, ids, scores)
        return ids, scores


def _is_plain(Q: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether queries can be read as they are: compressed rows of the dtype, finite, with terms in range."""
    if type(Q) not in ROWS or Q.data.dtype != dtype or Q.indices.dtype.kind != "i" or len(Q.shape) != 2:
        return False
    indptr, indices, data = Q.indptr, Q.indices, Q.data
    if len(indptr) != Q.shape[0] + 1 or indptr[0] != 0 or indptr[-1] != len(indices) or len(data) != len(indices):
        return False
    if not len(data):
        return not indptr.any()
    is_rising = bool((indptr[1:] >= indptr[:-1]).all())
    return is_rising and indices.min() >= 0 and indices.max() < Q.shape[1] and bool(np.isfinite(data).all())


def _rows(matrix: Any, name: str, dtype: np.dtype[Any] | None = None) -> Any:
    """Return a sparse matrix as CSR with sorted rows and finite numbers of float32 or float64."""
    if not interop.is_sparse(matrix):
        kind = type(matrix).__name__
        raise ArgumentTypeError(f"{name}: expected a sparse matrix, got {kind}. Make one by scipy.sparse.csr_array.")
    if len(matrix.shape) != 2:
        raise ArgumentError(f"{name}: expected a matrix, got {len(matrix.shape)} dimensions. Reshape it.")
    own_dtype = dtype_name(matrix.dtype)
    if own_dtype.startswith(("complex", "clong")):
        raise ArgumentTypeError(f"{name}: expected real numbers, got {own_dtype}. Pass the real parts.")
    rows = SparseTensor.from_any(matrix).to_scipy("csr", copy=False)
    if dtype is None:
        dtype = np.dtype(
            "float32" if own_dtype in ("float16", "bfloat16", "float32", "bool", "int8", "uint8") else "float64"
        )
    values = np.ascontiguousarray(rows.data, dtype)
    if not np.isfinite(values).all():
        raise ArgumentError(f"{name}: expected finite values, got infinities or NaN. Scores are ranked.")
    return interop.compressed_of(sp.csr_array, rows.indptr, rows.indices, values, rows.shape)


def _sorted(ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents of each query by descending scores, then ascending numbers; empty places come last."""
    order = np.lexsort((np.where(ids < 0, np.iinfo(np.int64).max, ids), -np.where(ids < 0, -np.inf, scores)), axis=-1)
    ids, scores = (np.take_along_axis(a, order, axis=1) for a in (ids, scores))
    return ids, np.where(ids < 0, scores.dtype.type(0), scores)


def _merged(ids: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids, scores = _sorted(*(a.reshape(len(a), -1) for a in (ids, scores)))
    return ids[:, :k], scores[:, :k]


# ------------------------------------------------------------------ the kernel


@remember("retrieval", 4)
def _function(dtype: str) -> Any:
    func = _SearchLoops(dtype).function().with_attr({"global_symbol": "search_postings", "tirx.noalias": True})
    return compile_cached(func, native_target(), None, CompiledLoops).function


def _at(array: Var, *place: ir.Expr) -> ir.Expr:
    return tirx.BufferLoad(array, list(place))


def _set(array: Var, value: ir.Expr, *place: ir.Expr) -> tirx.Stmt:
    return tirx.BufferStore(array, value, list(place))


class _SearchLoops:
    """Loops over tasks, each a query and a range of documents; blocks; terms; and postings."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        names = "terms documents postings listed blocks queries query_entries k threads ranges longest prunes".split()
        self.sizes = {name: long_var(name) for name in names}
        n, one = self.sizes, long(1)
        self.indptr, self.docs = (
            array_param("indptr", LONG, n["terms"] + one),
            array_param("documents_of", "int32", n["postings"] + one),
        )
        self.values = array_param("values", dtype, n["postings"])
        self.slots, self.tops = array_param("slots", "int32", n["terms"]), array_param("tops", dtype, n["terms"])
        self.starts = array_param("starts", "int32", n["listed"], n["blocks"] + one)
        self.maxima = array_param("maxima", dtype, n["listed"], n["blocks"])
        self.q_indptr = array_param("q_indptr", LONG, n["queries"] + one)
        self.q_terms, self.q_values = (
            array_param("q_terms", "int32", n["query_entries"]),
            array_param("q_values", dtype, n["query_entries"]),
        )
        self.own = array_param("own", dtype, n["threads"], long(BLOCK))
        self.lows, self.highs = (array_param(name, LONG, n["threads"], n["longest"]) for name in ("lows", "highs"))
        self.ids = array_param("ids", LONG, n["queries"], n["ranges"], n["k"])
        self.scores = array_param("scores", dtype, n["queries"], n["ranges"], n["k"])
        self.thread, self.query, self.range = (long_var(name) for name in ("thread", "query", "range"))
        self.kept, self.worst, self.hole = cell("kept", LONG), cell("worst", dtype), cell("hole", LONG)
        self.bound, self.lo, self.here = cell("bound", dtype), cell("lo", LONG), cell("here", LONG)
        self.minus = tirx.const(-np.inf, dtype)

    def function(self) -> tirx.PrimFunc:
        n, task, turn = self.sizes, long_var("task"), long_var("turn")
        tasks = n["queries"] * n["ranges"]
        one_task = seq(
            tirx.Bind(task, turn * n["threads"] + self.thread),
            tirx.IfThenElse(
                task < tasks,
                seq(
                    tirx.Bind(self.query, tirx.floordiv(task, n["ranges"])),
                    tirx.Bind(self.range, tirx.floormod(task, n["ranges"])),
                    *self.search(),
                ),
                None,
            ),
        )
        turns = tirx.floordiv(tasks + n["threads"] - long(1), n["threads"])
        cells = (self.kept, self.worst, self.hole, self.bound, self.lo, self.here)
        body = parallel(self.thread, n["threads"], seq(*alloc(*cells), serial(turn, turns, one_task)))
        arrays = [self.indptr, self.docs, self.values, self.slots, self.starts, self.maxima, self.tops]
        query = [self.q_indptr, self.q_terms, self.q_values]
        return tirx.PrimFunc(
            [*n.values(), *arrays, *query, self.own, self.lows, self.highs, self.ids, self.scores], body
        )

    def search(self) -> list[tirx.Stmt]:
        """Search one range of documents for one query."""
        n, begin, width, step, block = self.sizes, *map(long_var, ("begin", "width", "step", "block"))
        first, last = long_var("first_block"), long_var("last_block")
        term, place, fresh = long_var("term"), long_var("cursor_of"), long_var("fresh")
        start = seq(
            tirx.Bind(term, cast(_at(self.q_terms, begin + place), LONG)),
            _set(self.highs, _at(self.indptr, term), self.thread, place),
        )
        share = lambda c: tirx.floordiv(n["blocks"] * c, n["ranges"])  # noqa: E731
        clear = seq(
            _set(self.ids, long(-1), self.query, self.range, fresh),
            _set(self.scores, self.minus, self.query, self.range, fresh),
        )
        is_open = tirx.Or(get(self.kept) < n["k"], get(self.bound) > get(self.worst))
        one = seq(
            tirx.Bind(block, first + step),
            *self.bound_of(begin, width, block),
            tirx.IfThenElse(is_open, self.block(begin, width, block), None),
        )
        return [
            tirx.Bind(begin, _at(self.q_indptr, self.query)),
            tirx.Bind(width, _at(self.q_indptr, self.query + long(1)) - begin),
            put(self.kept, long(0)),
            put(self.worst, self.minus),
            serial(fresh, n["k"], clear),
            serial(place, width, start),
            tirx.Bind(first, share(self.range)),
            tirx.Bind(last, share(self.range + long(1))),
            serial(step, last - first, one),
        ]

    def bound_of(self, begin: Var, width: Var, block: Var) -> list[tirx.Stmt]:
        """Add up the largest contributions of the terms to documents of a block."""
        at, term, slot = long_var("bound_term"), long_var("term_of_bound"), Var("slot", INT)
        top = tirx.if_then_else(
            slot >= const(0, "int32"),
            _at(self.maxima, tirx.max(cast(slot, LONG), long(0)), block),
            _at(self.tops, term),
        )
        one = seq(
            tirx.Bind(term, cast(_at(self.q_terms, begin + at), LONG)),
            tirx.Bind(slot, _at(self.slots, term)),
            put(self.bound, get(self.bound) + _at(self.q_values, begin + at) * top),
        )
        margin = put(self.bound, get(self.bound) * tirx.const(MARGIN, self.dtype))
        largest = put(self.bound, tirx.const(np.inf, self.dtype))
        may_prune = tirx.And(self.sizes["prunes"] > long(0), get(self.kept) >= self.sizes["k"])
        zero = put(self.bound, tirx.const(0.0, self.dtype))
        return [tirx.IfThenElse(may_prune, seq(zero, serial(at, width, one), margin), largest)]

    def block(self, begin: Var, width: Var, block: Var) -> tirx.Stmt:
        """Add the postings of a block up, then visit them again, or all documents, for those that are kept."""
        is_full = get(self.here) >= long(MIN_SCANNED)
        visit = tirx.IfThenElse(is_full, self.scan(block), self.visit_postings(width, block))
        return seq(put(self.here, long(0)), self.add_postings(begin, width, block), visit)

    def add_postings(self, begin: Var, width: Var, block: Var) -> tirx.Stmt:
        at, term, end, step, slot = *map(long_var, ("at", "term_at", "end", "posting")), Var("slot_at", INT)
        first, low, count = map(long_var, ("first", "low", "count"))
        weight = Var("weight", ir.PrimType(self.dtype))
        begin_doc, end_doc = block * long(BLOCK), (block + long(1)) * long(BLOCK)
        start = lambda number: first + cast(_at(self.starts, cast(slot, LONG), number), LONG)  # noqa: E731
        # The array of documents ends with one that is behind all blocks, so that each posting may be read.
        until = lambda limit: tirx.While(  # noqa: E731
            tirx.And(get(self.lo) < end, self.doc(get(self.lo)) < limit), put(self.lo, get(self.lo) + long(1))
        )
        walked = seq(
            put(self.lo, _at(self.highs, self.thread, at)),
            until(begin_doc),
            _set(self.lows, get(self.lo), self.thread, at),
            until(end_doc),
            _set(self.highs, get(self.lo), self.thread, at),
        )
        looked_up = seq(
            _set(self.lows, start(block), self.thread, at), _set(self.highs, start(block + long(1)), self.thread, at)
        )
        local = self.doc(low + step) - begin_doc
        score = _at(self.own, self.thread, local)
        before = tirx.Select(score.equal(self.minus), tirx.const(0.0, self.dtype), score)
        body = _set(self.own, before + weight * _at(self.values, low + step), self.thread, local)
        return serial(
            at,
            width,
            seq(
                tirx.Bind(term, cast(_at(self.q_terms, begin + at), LONG)),
                tirx.Bind(weight, _at(self.q_values, begin + at)),
                tirx.Bind(slot, _at(self.slots, term)),
                tirx.Bind(first, _at(self.indptr, term)),
                tirx.Bind(end, _at(self.indptr, term + long(1))),
                tirx.IfThenElse(slot >= const(0, "int32"), looked_up, walked),
                tirx.Bind(low, _at(self.lows, self.thread, at)),
                tirx.Bind(count, _at(self.highs, self.thread, at) - low),
                put(self.here, get(self.here) + count),
                serial(step, count, body),
            ),
        )

    def scan(self, block: Var) -> tirx.Stmt:
        """Visit all documents of a block: chunks in which none reaches the worst score are cleared in vectors."""
        chunk, turn, lane, fill, each, total = map(
            long_var, ("chunk", "vector", "lane", "filled", "document", "lane_of_total")
        )
        hits = tirx.decl_buffer((LANES,), "int32", name="hits", scope="local", layout=None)
        own = lambda place: _at(self.own, self.thread, place)  # noqa: E731
        base = chunk * long(CHUNK)
        vectors = lambda var, body: loop(tirx.ForKind.VECTORIZED, var, long(LANES), body)  # noqa: E731
        reaches = cast(own(base + turn * long(LANES) + lane) >= get(self.worst), "int32")
        clear, cleared = long_var("clear_lane"), long_var("cleared_vector")
        zero = vectors(clear, _set(hits, const(0, "int32"), clear))
        count = serial(turn, long(CHUNK // LANES), vectors(lane, _set(hits, _at(hits, lane) + reaches, lane)))
        reset = vectors(fill, _set(self.own, self.minus, self.thread, base + cleared * long(LANES) + fill))
        number = cell("reaching", "int32")
        return seq(
            *alloc(hits),
            *alloc(number),
            serial(
                chunk,
                long(BLOCK // CHUNK),
                seq(
                    zero,
                    count,
                    put(number, const(0, "int32")),
                    serial(total, long(LANES), put(number, get(number) + _at(hits, total))),
                    tirx.IfThenElse(
                        get(number) > const(0, "int32"),
                        serial(each, long(CHUNK), self.offer(base + each, block * long(BLOCK) + base + each)),
                        serial(cleared, long(CHUNK // LANES), reset),
                    ),
                ),
            ),
        )

    def visit_postings(self, width: Var, block: Var) -> tirx.Stmt:
        at, low, step = map(long_var, ("at_again", "low_again", "posting_again"))
        doc = self.doc(low + step)
        return serial(
            at,
            width,
            seq(
                tirx.Bind(low, _at(self.lows, self.thread, at)),
                serial(step, _at(self.highs, self.thread, at) - low, self.offer(doc - block * long(BLOCK), doc)),
            ),
        )

    def doc(self, place: ir.Expr) -> ir.Expr:
        """Return the document of a posting."""
        return cast(_at(self.docs, place), LONG)

    def offer(self, local: ir.Expr, doc: ir.Expr) -> tirx.Stmt:
        """Keep a document if it is better than the worst one, and clear its score."""
        score, n = Var("score", ir.PrimType(self.dtype)), self.sizes
        is_better = tirx.Or(score > get(self.worst), doc < _at(self.ids, self.query, self.range, n["k"] - long(1)))
        is_kept = tirx.And(score > self.minus, tirx.Or(get(self.kept) < n["k"], is_better))
        return seq(
            tirx.Bind(score, _at(self.own, self.thread, local)),
            tirx.IfThenElse(score >= get(self.worst), tirx.IfThenElse(is_kept, self.insert(score, doc), None), None),
            _set(self.own, self.minus, self.thread, local),
        )

    def insert(self, score: Var, doc: ir.Expr) -> tirx.Stmt:
        """Shift worse documents down, and write one into the hole."""
        n, number = self.sizes, long_var("number")
        at = lambda array, place: _at(array, self.query, self.range, place)  # noqa: E731
        before = get(self.hole) - long(1)
        is_worse = tirx.Or(
            at(self.scores, before) < score,
            tirx.And(at(self.scores, before).equal(score), at(self.ids, before) > number),
        )
        shift = seq(
            _set(self.scores, at(self.scores, before), self.query, self.range, get(self.hole)),
            _set(self.ids, at(self.ids, before), self.query, self.range, get(self.hole)),
            put(self.hole, before),
        )
        has_more = cell("has_more", "bool")
        look = put(has_more, tirx.const(False, "bool"))
        check = tirx.IfThenElse(
            get(self.hole) > long(0), tirx.IfThenElse(is_worse, put(has_more, tirx.const(True, "bool")), None), None
        )
        return seq(
            tirx.Bind(number, doc),
            put(self.hole, tirx.min(get(self.kept), n["k"] - long(1))),
            *alloc(has_more),
            look,
            check,
            tirx.While(get(has_more), seq(shift, look, check)),
            _set(self.scores, score, self.query, self.range, get(self.hole)),
            _set(self.ids, number, self.query, self.range, get(self.hole)),
            put(self.kept, tirx.min(get(self.kept) + long(1), n["k"])),
            tirx.IfThenElse(get(self.kept) >= n["k"], put(self.worst, at(self.scores, n["k"] - long(1))), None),
        )


__all__ = ["Postings"]
