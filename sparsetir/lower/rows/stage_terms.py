# SPDX-License-Identifier: Apache-2.0
"""Staged terms: those of a block of short rows are computed into a buffer, which is summed row by row in vectors.

before::

    for i in range(m):
        y[i] = 0
        for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 8, "sparsetir.staged": 64}):
            y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    for i_0 in range((m + 63) // 64):
        first, last = i_0 * 64, min(i_0 * 64 + 64, m)  # written out
        if indptr[last] - indptr[first] <= 1024:
            for p in range(indptr[last] - indptr[first]):  # in vectors
                terms[p] = a[indptr[first] + p] * x[indices[indptr[first] + p]]
            for i_1 in range(last - first):
                begin, length = indptr[first + i_1] - indptr[first], ...
                for lane in T.vectorized(8):
                    acc[lane] = T.Select(lane < length, terms[begin + lane], 0)
                for step in range(max(length - 1, 0) // 8):
                    ...  # the same for the next eight terms
                y[first + i_1] = 0 + ...  # the sum of acc[0:8]
        else:
            ...  # as before, for these rows

The exit of a loop over a short row is mispredicted, and the loads behind it wait. The loop over the terms of a block
has no row boundaries, so that the loads of the gathered operand go on, and rows of up to eight terms all execute the
same instructions on a buffer in the nearest cache. This is the CSR-Stream part of Greathouse and Daga, "Efficient
sparse matrix-vector multiplication on GPUs using the CSR storage format" (SC 2014), with a cache in place of the local
memory of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import alloc, collect, mentions, moves_by_one, renewed, same, seq, substitute
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import INDPTR, STAGED, SUM, names_in, refused
from sparsetir.lower.loops import SERIAL, serial, vectorized, with_, with_body, without
from sparsetir.lower.vector.vectorize import DotSum, match, reduced

MEAN_TERMS_PER_ROW = 16  # that the buffer has room for
TERMS_PER_VECTOR = 8


@dataclass(frozen=True)
class _ShortRows:
    """A loop over rows that are summed, entry by entry.

    Parameters
    ----------
    loop : For
    dot : DotSum
        The sum of a row.
    pointers : Var
        The array of row pointers.
    row : Expr
        The subscript of a row's pointer, which the loop's variable moves by one.
    term : Expr
        The term of an entry, by its position.
    position : Var
    """

    loop: tirx.For
    dot: DotSum
    pointers: Var
    row: ir.Expr
    term: ir.Expr
    position: Var

    @classmethod
    def from_loop(cls, loop: tirx.For, pointers: set[str]) -> _ShortRows | None:
        """Match a loop over rows; None where terms depend on more than the positions of their entries."""
        parts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else []
        if len(parts) != 2 or loop.kind != SERIAL or loop.annotations or not isinstance(parts[1], tirx.For):
            return None
        inner = parts[1]
        dot = match(inner, parts[0], SUM) if STAGED in inner.annotations else None
        if dot is None or not dot.is_whole or dot.factors or collect(dot.term, ir.Call):
            return None
        ends = _ends(inner.extent, pointers)
        if ends is None:
            return None
        begin, row = ends
        position = Var("position", begin.ty)
        term = _simplify(substitute(dot.term, {inner.loop_var: position - begin}))
        if not moves_by_one(row, loop.loop_var) or mentions(term, [loop.loop_var, inner.loop_var]):
            return None
        return cls(loop, dot, begin.source, row, term, position)

    def number(self, value: int) -> ir.Expr:
        """Return a constant of the dtype of rows."""
        return const(value, str(self.loop.loop_var.ty.dtype))

    def pointer(self, at: ir.Expr) -> ir.Expr:
        """Return the first position of the row of a step of the loop."""
        return tirx.BufferLoad(self.pointers, [substitute(self.row, {self.loop.loop_var: at})])


def _simplify(expr: ir.Expr) -> ir.Expr:
    """Return an expression in which equal positions cancel out, in subscripts, too."""
    simplify = sym.Analyzer().simplify
    return structural_mutate(expr, [(ir.TensorLoad, lambda x, m: _simplify_subscripts(m.default_mutate(x), simplify))])


def _simplify_subscripts(load: ir.TensorLoad, simplify: Any) -> ir.TensorLoad:
    return tirx.BufferLoad(load.source, [simplify(index) for index in load.indices])


def _ends(extent: ir.Expr, pointers: set[str]) -> tuple[ir.TensorLoad, ir.Expr] | None:
    """Return the first position of a row and its number, if a loop runs from its row pointer to the next one."""
    if not isinstance(extent, tirx.Sub) or not all(isinstance(x, ir.TensorLoad) for x in (extent.a, extent.b)):
        return None
    end, begin = extent.a, extent.b
    if not end.source.same_as(begin.source) or str(begin.source.name) not in pointers or len(begin.indices) != 1:
        return None
    row = begin.indices[0]
    simplify = sym.Analyzer().simplify
    return (begin, row) if same(simplify(end.indices[0] - row), const(1, str(row.ty.dtype))) else None


class _StagedSums:
    """Emitter of the staged sums of a block of rows."""

    def __init__(self, rows: _ShortRows) -> None:
        self.rows, self.dot = rows, rows.dot
        self.lanes, self.kind = rows.dot.lanes, str(rows.dot.store.buffer.ty.dtype)
        self.height = int(rows.dot.loop.annotations[STAGED])
        self.size = self.height * MEAN_TERMS_PER_ROW
        room = self.size + max(self.lanes, TERMS_PER_VECTOR)
        self.terms = tirx.decl_buffer([room], self.kind, name="terms", layout=None)

    def emit(self) -> tirx.Stmt:
        """Return the loop over blocks."""
        loop, number = self.rows.loop, self.rows.number
        block = Var(f"{loop.loop_var.name}_0", loop.loop_var.ty)
        first = block * number(self.height)
        count = tirx.min(loop.extent - first, number(self.height))
        begin, end = self.rows.pointer(first), self.rows.pointer(first + count)
        fits = end - begin <= const(self.size, str(begin.ty.dtype))
        staged = seq(*self.fill(begin, end), self.sums(first, count, begin))
        inner = with_(self.dot.loop, notes=without(self.dot.loop, STAGED))
        row = Var(loop.loop_var.name, loop.loop_var.ty)
        body = substitute(seq(loop.body.seq[0], inner), {loop.loop_var: first + row})
        unstaged = renewed(serial(row, count, body))
        blocks = tirx.floordiv(loop.extent + number(self.height - 1), number(self.height))
        return seq(*alloc(self.terms), serial(block, blocks, tirx.IfThenElse(fits, staged, unstaged)))

    def fill(self, begin: ir.Expr, end: ir.Expr) -> list[tirx.Stmt]:
        """Return the loops that compute the terms of a block: whole vectors, then one by one."""
        dtype = begin.ty
        step, lane, tail = (Var(name, dtype) for name in ("step", "lane", "tail"))
        width = const(TERMS_PER_VECTOR, str(dtype.dtype))
        whole = tirx.truncdiv(end - begin, width)

        def store(at: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.terms, substitute(self.rows.term, {self.rows.position: begin + at}), [at])

        vectors = serial(step, whole, vectorized(lane, TERMS_PER_VECTOR, store(step * width + lane)))
        left = serial(tail, end - begin - whole * width, store(whole * width + tail))
        return [renewed(vectors), renewed(left)]

    def sums(self, first: ir.Expr, count: ir.Expr, begin: ir.Expr) -> tirx.Stmt:
        """Return the loop that sums the rows of a block."""
        loop = self.rows.loop
        row, lane, step = Var(f"{loop.loop_var.name}_1", loop.loop_var.ty), Var("lane", begin.ty), Var("step", begin.ty)
        at, dtype = first + row, str(begin.ty.dtype)
        place, length = (
            self.rows.pointer(at) - begin,
            self.rows.pointer(at + self.rows.number(1)) - self.rows.pointer(at),
        )
        acc, loaded, total = (
            tirx.decl_buffer([n], self.kind, name=name, scope="local", layout=None)
            for name, n in (("acc", self.lanes), ("loaded", self.lanes), ("total", 1))
        )

        def part(done: ir.Expr, start: ir.Expr) -> list[tirx.Stmt]:
            """Add a vector of terms, loaded by a statement of its own: TVM would simplify a load in the choice."""
            value = tirx.BufferLoad(self.terms, [place + done + lane])
            chosen = tirx.Select(done + lane < length, tirx.BufferLoad(loaded, [lane]), const(0, self.kind))
            stores = tirx.BufferStore(loaded, value, [lane]), tirx.BufferStore(acc, start + chosen, [lane])
            return [renewed(vectorized(lane, self.lanes, store)) for store in stores]

        width = const(self.lanes, dtype)
        steps = tirx.truncdiv(length - const(1, dtype), width)  # 0 for empty rows, too
        more = serial(step, steps, seq(*part((step + const(1, dtype)) * width, tirx.BufferLoad(acc, [lane]))))
        of_row = {loop.loop_var: at}
        joined = tirx.BufferStore(total, reduced(acc, const(0, dtype), self.lanes), [const(0, dtype)])
        value = substitute(self.dot.start, of_row) + tirx.BufferLoad(total, [const(0, dtype)])
        indices = [substitute(index, of_row) for index in self.dot.store.indices]
        stored = tirx.BufferStore(self.dot.store.buffer, value, indices)
        begun = part(const(0, dtype), const(0, self.kind))
        return renewed(serial(row, count, seq(*alloc(acc, loaded, total), *begun, more, joined, stored)))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.StageTerms")
def StageTerms(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Stage the terms of every annotated loop over rows; refuse annotations of other loops."""
    pointers = names_in(func, INDPTR)

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        rows = _ShortRows.from_loop(node, pointers)
        if rows is not None:
            return _StagedSums(rows).emit()
        why = "it is no plain sum, begun just before, of terms that depend on their entries only"
        return refused(mutator.default_mutate(node), STAGED, why)

    return with_body(func, structural_mutate(func.body, [(tirx.For, on_for)]))


__all__ = ["MEAN_TERMS_PER_ROW", "StageTerms"]
