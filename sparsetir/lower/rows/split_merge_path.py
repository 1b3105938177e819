# SPDX-License-Identifier: Apache-2.0
"""Merge-path split with carry-out: every chunk has the same number of nonzeros, rows may reach into several chunks.

before::

    for i in T.serial(m, annotations={"sparsetir.chunks": 16, "sparsetir.carry": 1}):
        y[i] = 0
        for j in range(indptr[i + 1] - indptr[i]):
            y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    carry = T.alloc_buffer((16,))
    owner = T.alloc_buffer((16,), "int32")
    for chunk in T.parallel(16):
        ...  # from row first[0], entry begin[0] to row last[0], entry stop[0]: a sixteenth of the rows and entries
        for i in range(last[0] - first[0]):  # rows that end in this chunk
            start[0] = T.max(indptr[first[0] + i], begin[0])
            y[first[0] + i] = 0
            for j in range(indptr[first[0] + i + 1] - start[0]):
                y[first[0] + i] = y[first[0] + i] + a[start[0] + j] * x[indices[start[0] + j]]
        start[0] = T.max(indptr[last[0]], begin[0])
        owner[chunk] = -1
        if start[0] < stop[0]:  # the row that ends in a later one
            owner[chunk] = last[0]
            carry[chunk] = 0
            for j in range(stop[0] - start[0]):
                carry[chunk] = carry[chunk] + a[start[0] + j] * x[indices[start[0] + j]]
    for chunk in range(16):
        if owner[chunk] >= 0:
            y[owner[chunk]] = y[owner[chunk]] + carry[chunk]

This is the merge path of Merrill and Garland, "Merge-based Parallel Sparse Matrix-Vector Multiplication", SC 2016: a
step is an entry or the end of a row, and a row is initialised, or its old value counted, in the chunk where it ends.

`RowParts` says which loops it takes; those it does not take are left to `BalanceNonzeros`, whole rows at a time.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import SWEEP, cast, const
from sparsetir.lower.marks import CARRY, CHUNKS, INDPTR, PARALLEL_MARK, names_in, refused
from sparsetir.lower.nests import binary_search, each_loop, parallel, serial, without
from sparsetir.lower.rewriting import alloc, cell, collect, get, put, renewed, seq, substitute
from sparsetir.lower.rows.row_parts import Result, RowParts, Unfit, neutral

WIDE = "int64"


def _nest(result: Result, body: Any) -> tirx.Stmt:
    """``body(others)`` for every element of a row."""
    lanes = [Var("k", ir.PrimType(str(extent.ty.dtype))) for extent in result.others]
    nest = body(list(lanes))
    for lane, extent in reversed(list(zip(lanes, result.others, strict=True))):
        nest = serial(lane, extent, nest)
    return nest


class Chunks:
    """The parallel loop over equal pieces of a row loop's work, and what is added up behind it."""

    def __init__(self, rows: RowParts) -> None:
        self.rows, self.count = rows, int(rows.loop.annotations[CHUNKS])
        self.dtype, self.entries = str(rows.row.ty.dtype), str(rows.pointer.ty.dtype)
        self.first, self.last, self.high = (cell(n, self.dtype) for n in ("first", "last", "high"))
        self.begin, self.stop, self.start = (cell(n, self.entries) for n in ("begin", "stop", "start"))
        self.carries = {r.buffer: self._carry(r) for r in rows.results}
        self.owner = tirx.decl_buffer([self.count], self.dtype, name="owner", layout=None)

    def _carry(self, result: Result) -> Var:
        """A row of a result for every chunk."""
        shape = [const(self.count), *result.others]
        return tirx.decl_buffer(shape, str(result.buffer.ty.dtype), name="carry", layout=None)

    def _pointer(self, row: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(self.rows.pointer, [row])

    def whole(self) -> tirx.Stmt:
        """All of it."""
        chunk = Var("chunk", ir.PrimType("int32"))
        cells = alloc(self.first, self.last, self.high, self.begin, self.stop, self.start)
        bounds = [*self.bound(self.first, self.begin, chunk), *self.bound(self.last, self.stop, chunk + const(1))]
        steps = seq(*cells, *bounds, self.ends(), *self.tail(chunk))
        every = parallel(chunk, self.count, steps)
        return seq(*alloc(*self.carries.values(), self.owner), every, self.joined()) if self.carries else every

    def bound(self, row: Var, entry: Var, index: ir.Expr) -> list[tirx.Stmt]:
        """Set the row and entry before which `index` of the parts of the work lie."""
        extent, one = self.rows.loop.extent, const(1, self.dtype)
        total = cast(extent, WIDE) + cast(self._pointer(extent), WIDE)
        done = tirx.floordiv(total * cast(index, WIDE), const(self.count, WIDE))
        ended = lambda mid: cast(mid + one, WIDE) + cast(self._pointer(mid + one), WIDE)  # noqa: E731
        search = binary_search(lambda mid: ended(mid) <= done, row, self.high)
        place = put(entry, cast(done - cast(get(row), WIDE), self.entries))
        return [put(row, const(0, self.dtype)), put(self.high, extent), search, place]

    def _seek(self, row: ir.Expr) -> tirx.Stmt:
        """Set `start` to the first entry of a row that no earlier chunk has."""
        return put(self.start, tirx.max(self._pointer(row), get(self.begin)))

    def ends(self) -> tirx.For:
        """The rows that end in the chunk, the first of them from where the chunk begins."""
        loop, old = self.rows.loop, self.rows.row
        step = Var(str(old.name), old.ty)
        row = get(self.first) + step
        part = self.rows.part(row, get(self.start), self._pointer(row + const(1, self.dtype)))
        kept = without(loop, CHUNKS, CARRY, PARALLEL_MARK, SWEEP)
        count = get(self.last) - get(self.first)
        body = seq(self._seek(row), part)
        return serial(step, count, body, kept)

    def tail(self, chunk: Var) -> list[tirx.Stmt]:
        """The entries of the row that ends in a later chunk."""
        row = get(self.last)
        part = self.rows.carried(self.rows.part(row, get(self.start), get(self.stop)), self.carries, chunk)
        clear = [self._clear(r, chunk) for r in self.rows.results]
        note = [tirx.BufferStore(self.owner, row, [chunk])] if self.carries else []
        forget = [tirx.BufferStore(self.owner, const(-1, self.dtype), [chunk])] if self.carries else []
        goes_on = seq(*note, *clear, renewed(part))
        return [self._seek(row), *forget, tirx.IfThenElse(get(self.start) < get(self.stop), goes_on, None)]

    def _clear(self, result: Result, chunk: Var) -> tirx.Stmt:
        carry = self.carries[result.buffer]
        value = neutral(result.combiner, str(carry.ty.dtype))
        return _nest(result, lambda others: tirx.BufferStore(carry, value, [chunk, *others]))

    def joined(self) -> tirx.Stmt:
        """The loop that takes every carry into its row."""
        chunk = Var("chunk", ir.PrimType("int32"))
        owner = tirx.BufferLoad(self.owner, [chunk])
        joins = seq(*(self._join(r, chunk, owner) for r in self.rows.results))
        body = tirx.IfThenElse(owner >= const(0, self.dtype), joins, None)
        return serial(chunk, self.count, body)

    def _join(self, result: Result, chunk: Var, owner: ir.Expr) -> tirx.Stmt:
        row = substitute(result.row, {self.rows.row: owner})

        def combine(others: list[ir.Expr]) -> tirx.Stmt:
            at = result.with_row(row, others)
            carried = tirx.BufferLoad(self.carries[result.buffer], [chunk, *others])
            return tirx.BufferStore(result.buffer, result.combiner(tirx.BufferLoad(result.buffer, at), carried), at)

        return _nest(result, combine)


def refusal(loop: tirx.For, pointers: set[str]) -> str | None:
    """Why the rows of a loop are kept whole; None where they can be split."""
    if CHUNKS not in loop.annotations or PARALLEL_MARK not in loop.annotations:
        return "the loop is not shared out"
    try:
        RowParts(loop, pointers)
    except Unfit as found:
        return str(found)
    return None


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SplitMergePath")
def SplitMergePath(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Split the rows of every annotated loop of a function that allows it."""
    if not any(CARRY in f.annotations for f in collect(func.body, tirx.For)):
        return func
    pointers = names_in(func, INDPTR)

    def split(loop: tirx.For) -> tirx.Stmt | None:
        if CARRY not in loop.annotations:
            return None
        why = refusal(loop, pointers)
        return Chunks(RowParts(loop, pointers)).whole() if why is None else refused(loop, CARRY, why)

    return each_loop(func, outer=split)


__all__ = ["Chunks", "SplitMergePath", "refusal"]
