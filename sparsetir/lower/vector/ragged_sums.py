# SPDX-License-Identifier: Apache-2.0
"""Vectorized sums over ragged rows: of entries with a masked remainder, of staged terms, and of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.interop.arrays import HALVES
from sparsetir.ir import dialect
from sparsetir.ir.dialect import is_if_then_else
from sparsetir.ir.rewriting import (
    alloc,
    collect,
    conjunction,
    get,
    inside,
    is_along,
    mentions,
    moves_by_one,
    product,
    put,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.accesses import uncast
from sparsetir.lower.annotations import BLOCK, INDPTR, STAGED, STRUCTURE, SUM, names_in, refused
from sparsetir.lower.loops import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Update,
    each_loop,
    join_neighbours,
    serial,
    vectorized,
    with_,
    with_body,
    without,
)
from sparsetir.lower.vector.loop_transforms import hull
from sparsetir.lower.vector.vectorize import DotSum, match, reduced, scaled

# Sum a ragged row in vectors, with a masked remainder.
#
# before::
#
#     y[i] = 0
#     for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 8}):
#         y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]
#
# after::
#
#     length = indptr[i + 1] - indptr[i]  # written out
#     if length <= 8:
#         ...  # as below, with 0 for `done` and `length` for `left`
#     else:
#         done, left = length // 8 * 8, length % 8
#         for j_0 in range(length // 8):
#             for j_1 in T.vectorized(8):
#                 acc[j_1] = acc[j_1] + a[indptr[i] + j_0 * 8 + j_1] * x[indices[indptr[i] + j_0 * 8 + j_1]]
#         if left > 0:
#             held[0:8], held_1[0:8] = ...  # so many elements of a and of indices from indptr[i] + done on, and zeros
#             for j_1 in T.vectorized(8):
#                 term[j_1] = held[j_1] * x[held_1[j_1]]
#             for j_1 in T.vectorized(8):
#                 acc[j_1] = acc[j_1] + T.Select(j_1 < left, term[j_1], 0)
#     y[i] = 0 + ...  # the sum of acc[0:8]
#
# The exit of a loop with a step for each entry is mispredicted, which costs a short row more than its
# sums; here, all rows of up to eight entries execute the same instructions. Masked lanes load nothing along the row and
# gather the first element of an array; a computed subscript is clamped to its array. The annotation is for sums that
# may be reordered.


@dataclass(frozen=True)
class _Reads:
    """The loads of a term whose subscripts vary along the row.

    Parameters
    ----------
    along : list of BufferLoad
        Elements of the row.
    gathered : list of BufferLoad
        Elements whose subscripts are elements of an index array along the row.
    computed : list of BufferLoad
        Elements whose subscripts are computed from elements along the row.
    conditional : list of BufferLoad
        Those of the last two that are only read under a condition, such as that a search succeeded.
    """

    along: list[ir.TensorLoad] = field(default_factory=list)
    gathered: list[ir.TensorLoad] = field(default_factory=list)
    computed: list[ir.TensorLoad] = field(default_factory=list)
    conditional: list[ir.TensorLoad] = field(default_factory=list)


def _reads(dot: DotSum, structure: set[str]) -> _Reads | None:
    """Classify the loads of a sum; None if one of them cannot be masked."""
    var, reads = dot.loop.loop_var, _Reads()
    for load in collect(dot.term, ir.TensorLoad):
        if not mentions(list(load.indices), [var]):
            continue
        if is_along(load, var):
            if str(load.ty.dtype) == "bool":
                return None
            reads.along.append(load)
        elif not _is_computed(load, var):
            return None
        else:
            (reads.gathered if _is_gathered(load, var, structure) else reads.computed).append(load)
    choices = [call for call in collect(dot.term, ir.Call) if is_if_then_else(call)]
    chosen = [load for call in choices for load in collect(list(call.args[1:]), ir.TensorLoad)]
    always = structural_mutate(dot.term, [(ir.Call, _condition)])
    for load in (*reads.gathered, *reads.computed):
        is_always = any(same(load, other) for other in collect(always, ir.TensorLoad))
        if not is_always and any(same(load, other) for other in chosen):
            reads.conditional.append(load)
    return reads


def _condition(call: ir.Call, mutator: Any) -> ir.Expr:
    """Replace a choice by its condition, as a number of its dtype."""
    if not is_if_then_else(call):
        return mutator.default_mutate(call)
    return tirx.Cast(str(call.ty.dtype), mutator.mutate(call.args[0]))


def _is_gathered(load: ir.TensorLoad, var: Var, structure: set[str]) -> bool:
    """Return whether every subscript that depends on `var` is an element of an index array along the row."""
    moving = [uncast(index) for index in load.indices if mentions(index, [var])]
    return all(isinstance(i, ir.TensorLoad) and str(i.source.name) in structure and is_along(i, var) for i in moving)


def _is_computed(load: ir.TensorLoad, var: Var) -> bool:
    """Return whether every subscript that depends on `var` does so only through elements along the row."""
    inner = [x for x in collect(list(load.indices), ir.TensorLoad) if mentions(x, [var])]
    on_load = lambda x, _m: const(0, str(x.ty.dtype))  # noqa: E731
    fixed = [structural_mutate(index, [(ir.TensorLoad, on_load)]) for index in load.indices]
    return all(is_along(x, var) for x in inner) and not mentions(fixed, [var])


def _clamp(term: ir.Expr, reads: _Reads, var: Var) -> ir.Expr:
    """Clamp the computed subscripts of `term` to their arrays, which are not empty where a row is not.

    Those that are read under a condition may be empty: it may hold in a masked lane only.
    """

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        is_clamped = any(same(load, other) for other in reads.computed)
        value = load if is_clamped else mutator.default_mutate(load)
        if is_clamped:
            pairs = zip(load.indices, load.source.ty.shape, strict=True)
            indices = [inside(i, extent) if mentions(i, [var]) else i for i, extent in pairs]
            value = tirx.BufferLoad(load.source, indices)
        if not any(same(load, other) for other in reads.conditional):
            return value
        exists = conjunction([n > const(0, str(n.ty.dtype)) for n in _moving_sizes(load, var)])
        return tirx.if_then_else(exists, value, const(0, str(load.ty.dtype)))

    return structural_mutate(term, [(ir.TensorLoad, on_load)])


class _Sum:
    """Emitter of a sum in vectors of `lanes` elements."""

    def __init__(self, dot: DotSum, reads: _Reads) -> None:
        self.dot, self.reads = dot, reads
        self.j, self.lanes, self.kind = dot.loop.loop_var, dot.lanes, str(dot.store.buffer.ty.dtype)
        self.acc = self.array("acc", self.kind)
        self.lane = Var("j_1", self.j.ty)

    def array(self, name: str, dtype: str, size: int | None = None) -> Var:
        """Declare a local array of one element for each lane, or of `size` elements."""
        return tirx.decl_buffer([size or self.lanes], dtype, name=name, scope="local", layout=None)

    def number(self, value: int) -> ir.Expr:
        """Return a constant of the loop variable's dtype."""
        return const(value, str(self.j.ty.dtype))

    def vector(self, body: tirx.Stmt) -> tirx.Stmt:
        """Return `body` for every lane as a vector loop."""
        return renewed(vectorized(self.lane, self.lanes, body))

    def add(self, value: ir.Expr) -> tirx.Stmt:
        """Return a store that adds to a lane's accumulator."""
        return tirx.BufferStore(self.acc, tirx.BufferLoad(self.acc, [self.lane]) + value, [self.lane])

    def clear(self) -> tirx.Stmt:
        """Set all accumulators to zero."""
        return self.vector(tirx.BufferStore(self.acc, const(0, self.kind), [self.lane]))

    def steps(self) -> tirx.Stmt:
        """Emit the steps: one for a short row; for a longer one, full steps and a masked remainder."""
        extent, lanes = self.dot.loop.extent, self.number(self.lanes)
        step = Var("j_0", self.j.ty)
        term = substitute(self.dot.term, {self.j: step * lanes + self.lane})
        full = serial(step, tirx.floordiv(extent, lanes), self.vector(self.add(term)))
        left = tirx.floormod(extent, lanes)
        end = tirx.IfThenElse(left > self.number(0), renewed(self.part(extent - left, left)), None)
        return tirx.IfThenElse(extent <= lanes, self.guarded(self.part(self.number(0), extent)), seq(full, end))

    def part(self, done: ir.Expr, left: ir.Expr) -> tirx.Stmt:
        """Emit a masked step; the term is a separate statement, as TVM would simplify its subscripts by the mask."""
        loads: list[tuple[ir.TensorLoad, Var]] = []
        for load in self.reads.along:
            if not any(same(load, other) for other, _ in loads):
                loads.append((load, self.array("held", str(load.ty.dtype))))
        kept = [tirx.BufferStore(array, self.masked(load, done, left), [self.every()]) for load, array in loads]
        term = self.array("term", self.kind)
        value = _clamp(self.dot.term, self.reads, self.j)
        value = _replaced(value, [(load, tirx.BufferLoad(array, [self.lane])) for load, array in loads])
        value = substitute(value, {self.j: done + self.lane})
        chosen = tirx.Select(self.lane < left, tirx.BufferLoad(term, [self.lane]), const(0, self.kind))
        added = self.vector(tirx.BufferStore(term, value, [self.lane])), self.vector(self.add(chosen))
        return seq(*alloc(term, *(array for _, array in loads)), *kept, *added)

    def guarded(self, step: tirx.Stmt) -> tirx.Stmt:
        """Guard a step by the gathered arrays not being empty, which holds where the row is not empty."""
        sizes: list[ir.Expr] = []
        for load in (*self.reads.gathered, *self.reads.computed):
            if any(same(load, other) for other in self.reads.conditional):
                continue
            sizes += [n for n in _moving_sizes(load, self.j) if not any(same(n, other) for other in sizes)]
        extent = self.dot.loop.extent
        if any(map(is_if_then_else, collect(extent, ir.Call))):  # The row and its row pointer may not exist.
            sizes.append(extent)
        exist = [size > const(0, str(size.ty.dtype)) for size in sizes]
        return tirx.IfThenElse(conjunction(exist), step, None) if exist else step

    def every(self) -> ir.Expr:
        """Return the subscripts of all lanes."""
        return tirx.Ramp(self.number(0), self.number(1), self.lanes)

    def masked(self, load: ir.TensorLoad, done: ir.Expr, left: ir.Expr) -> ir.Expr:
        """Return a masked load of the elements from step `done` on, zero past the end of the row."""
        lanes, kind = self.lanes, str(load.ty.dtype)
        dtype = "uint16" if kind == "bfloat16" else kind  # TVM stores bfloat16 as uint16, but does not rewrite calls.
        first = tirx.address_of(substitute(load, {self.j: done}))
        all_of = tirx.Broadcast(const(True, "bool"), lanes)
        read = tirx.call_llvm_pure_intrin(f"{dtype}x{lanes}", "llvm.vp.load", first, all_of, cast(left, "uint32"))
        is_inside = self.every() < tirx.Broadcast(left, lanes)
        chosen = tirx.Select(is_inside, read, tirx.Broadcast(const(0, dtype), lanes))
        return chosen if dtype == kind else tirx.reinterpret(f"{kind}x{lanes}", chosen)

    def finish(self) -> tirx.Stmt:
        """Emit the store of the result, the sum of the accumulators."""
        whole, member = self.array("total", self.kind, 1), Var("g", self.j.ty)
        joined = tirx.BufferStore(whole, reduced(self.acc, self.number(0), self.lanes), [self.number(0)])
        again = Var(f"{self.j.name}_again", self.j.ty)

        def unfactored(result: Var) -> tirx.Stmt:
            term = product([*self.dot.factors, substitute(self.dot.term, {self.j: again})])
            return serial(again, self.dot.loop.extent, put(result, get(result) + term))

        checks, total = scaled(self.dot.factors, whole, member, 1, unfactored)
        total = substitute(total, {member: self.number(0)})
        stored = tirx.BufferStore(self.dot.store.buffer, self.dot.start + total, self.dot.store.indices)
        return seq(*alloc(whole), joined, *checks, stored)


def _replaced(value: ir.Expr, pairs: list[tuple[ir.TensorLoad, ir.Expr]]) -> ir.Expr:
    """Replace some loads of a value by other expressions."""

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        replacement = next((other for own, other in pairs if same(load, own)), None)
        return mutator.default_mutate(load) if replacement is None else replacement

    return structural_mutate(value, [(ir.TensorLoad, on_load)])


def _moving_sizes(load: ir.TensorLoad, var: Var) -> list[ir.Expr]:
    """Return the extents of the dimensions whose subscripts depend on `var`."""
    return [n for i, n in zip(load.indices, load.source.ty.shape, strict=True) if mentions(i, [var])]


def _emit(dot: DotSum, reads: _Reads) -> tirx.Stmt:
    """Emit a sum in vectors."""
    total = _Sum(dot, reads)
    stmt = seq(*alloc(total.acc), total.clear(), total.steps(), total.finish())
    # An empty loop must not access the element, which may not exist then.
    runs = dot.loop.extent > const(0, str(dot.loop.extent.ty.dtype))
    return stmt if dot.is_whole else tirx.IfThenElse(runs, stmt, None)


def _summed(loop: tirx.Stmt, before: tirx.Stmt | None, structure: set[str]) -> tirx.Stmt | None:
    """Vectorize the sum of a loop, merged with a store `before` it if given; None if it is not such a sum."""
    dot = match(loop, before, SUM) if isinstance(loop, tirx.For) else None
    if dot is None or (before is not None and not dot.is_whole):
        return None
    reads = _reads(dot, structure)
    return _emit(dot, reads) if reads is not None and reads.along else None


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SumRagged")
def SumRagged(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Vectorize every annotated ragged sum of a function; refuse annotations of other loops."""
    structure = names_in(func, STRUCTURE)

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        total = _summed(node, None, structure)
        if total is not None:
            return total
        return refused(mutator.default_mutate(node), SUM, "it is no sum of elements along a row")

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        join = lambda before, stmt: _summed(stmt, before, structure)  # noqa: E731
        return seq(*join_neighbours(node.seq, join, mutator.mutate))

    body = structural_mutate(func.body, [(tirx.For, on_for), (tirx.SeqStmt, on_seq)])
    return with_body(func, body)


# Sum blocks along a ragged row in vectors: an accumulator for every element of a block, reduced at the end.
#
# before::
#
#     for jo in range(indptr[io + 1] - indptr[io]):
#         for ii in range(4):
#             for ji in T.serial(4, annotations={"sparsetir.block": 1}):
#                 y[io * 4 + ii] = y[io * 4 + ii] + a[jo, ii, ji] * T.if_then_else(
#                     indices[...] * 4 + ji < n, x[indices[...] * 4 + ji], 0)
#
# after::
#
#     for ii in T.unroll(4):
#         for ji in T.vectorized(4):
#             acc[ii * 4 + ji] = 0
#     for jo in range(indptr[io + 1] - indptr[io]):
#         if indices[...] * 4 + 3 < n:
#             for ii in T.unroll(4):
#                 for ji in T.vectorized(4):
#                     acc[ii * 4 + ji] = acc[ii * 4 + ji] + a[jo, ii, ji] * x[indices[...] * 4 + ji]
#         else:
#             ...  # as it was, one by one
#     for ii in T.unroll(4):
#         y[io * 4 + ii] = y[io * 4 + ii] + ...  # the sum of acc[ii * 4 : ii * 4 + 4]
#
# A block reads one index and loads its elements of x once for all rows. The annotation is for sums that may be
# reordered.


@dataclass(frozen=True)
class BlockSum:
    """The sums over blocks that a loop computes: ``store`` adds to one element for each row of a block.

    Parameters
    ----------
    outer : For
    rows, columns : list of For
        The loops over a block that subscript its results, and those that are reduced.
    store : BufferStore
    """

    outer: tirx.For
    rows: list[tirx.For]
    columns: list[tirx.For]
    store: tirx.BufferStore

    @classmethod
    def of(cls, outer: tirx.For) -> BlockSum | None:
        """Match the annotated sums over blocks of a loop; None for other loops."""
        loops: list[tirx.For] = []
        body = outer.body
        while isinstance(body, tirx.For) and isinstance(body.extent, tirx.IntImm) and body.kind == SERIAL:
            loops.append(body)
            body = body.body
        if outer.kind != SERIAL or not any(BLOCK in f.annotations for f in loops):
            return None
        update = Update.of(body)
        if update is None or not update.is_alone or mentions(update.indices, [outer.loop_var]):
            return None
        rows = [f for f in loops if mentions(body.indices, [f.loop_var])]
        columns = [f for f in loops if f not in rows]
        if update.dtype in HALVES or any(int(f.min) for f in loops):
            return None
        return cls(outer, rows, columns, body) if loops == [*rows, *columns] else None

    @property
    def loops(self) -> list[tirx.For]:
        return [*self.rows, *self.columns]

    def place(self) -> ir.Expr:
        """Return the position of the accumulator that a step adds to."""
        at: ir.Expr = const(0)
        for loop in self.loops:
            at = at * const(int(loop.extent)) + loop.loop_var.astype("int32")
        return at


def _inside(block: BlockSum) -> tuple[list[ir.Expr], ir.Expr] | None:
    """Return the bounds of whole blocks and the term that is summed where they hold; None if other choices are left."""
    lanes = {f.loop_var: int(f.extent) for f in block.loops}
    hulls: list[ir.Expr] = []

    def on_call(node: ir.Call, mutator: Any) -> ir.Expr:
        if not dialect.is_if_then_else(node):
            return mutator.default_mutate(node)
        bounds = hull(node.args[0], lanes)
        if bounds is None:
            return mutator.default_mutate(node)
        if not any(same(bounds, h) for h in hulls):
            hulls.append(bounds)
        return mutator.mutate(node.args[1])

    term = structural_mutate(block.store.value.b, [(ir.Call, on_call)])
    left = [c for c in collect(term, ir.Call) if dialect.is_if_then_else(c)]
    return None if left else (hulls, term)


def _nest(loops: list[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
    """Nest a statement in unrolled loops, the innermost one vectorized."""
    for n, loop in enumerate(reversed(loops)):
        body = with_(loop, kind=UNROLLED if n else VECTORIZED, body=body, notes={})
    return renewed(body)


def _one_by_one(block: BlockSum) -> tirx.Stmt:
    """Return the original loops over a block, for one that is partly out of bounds."""
    body: tirx.Stmt = block.store
    for loop in reversed(block.loops):
        body = with_(loop, body=body, notes={})
    return renewed(body)


def blocked(outer: tirx.For) -> tirx.Stmt | None:
    """Rewrite a loop to one accumulator for every element of a block; None if it is not a sum over blocks."""
    block = BlockSum.of(outer)
    inside = None if block is None else _inside(block)
    if block is None or inside is None:
        return None
    dtype = str(block.store.buffer.ty.dtype)
    width = math.prod(int(f.extent) for f in block.columns)
    size = math.prod(int(f.extent) for f in block.loops)
    acc = tirx.decl_buffer([size], dtype, name="acc", scope="local", layout=None)
    place = [block.place()]
    # Loops of a single step are dropped: they would not be vectors.
    loops = [f for f in block.loops if int(f.extent) > 1] or block.loops
    alone = {f.loop_var: const(0, str(f.loop_var.ty.dtype)) for f in block.loops if f not in loops}

    def in_vectors(value: ir.Expr) -> tirx.Stmt:
        return _nest(loops, substitute(tirx.BufferStore(acc, value, place), alone))

    hulls, term = inside
    step = in_vectors(tirx.BufferLoad(acc, place) + term)
    if hulls:
        step = tirx.IfThenElse(conjunction(hulls), step, _one_by_one(block))
    clear = in_vectors(const(0, dtype))
    sums = with_(outer, body=step)
    finish = [_finish(block, acc, row, width) for row in range(size // width)]
    return seq(tirx.AllocBuffer(acc), clear, sums, *finish)


def _finish(block: BlockSum, acc: Var, row: int, width: int) -> tirx.Stmt:
    """Add the accumulators of one row of the blocks to its result."""
    at, left = {}, row
    for loop in reversed(block.rows):
        left, step = divmod(left, int(loop.extent))
        at[loop.loop_var] = const(step, str(loop.loop_var.ty.dtype))
    indices = [substitute(i, at) for i in block.store.indices]
    has_halves = width > 1 and width & (width - 1) == 0
    total = reduced(acc, const(row * width), width) if has_halves else _in_turn(acc, row * width, width)
    return tirx.BufferStore(block.store.buffer, tirx.BufferLoad(block.store.buffer, indices) + total, indices)


def _in_turn(acc: Var, begin: int, count: int) -> ir.Expr:
    """Return the sum of `count` elements of a local array, in order."""
    total: ir.Expr = tirx.BufferLoad(acc, [const(begin)])
    for n in range(begin + 1, begin + count):
        total = total + tirx.BufferLoad(acc, [const(n)])
    return total


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SumBlocks")
def SumBlocks(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Vectorize every annotated sum over blocks of a function; refuse annotations of other loops."""
    why = "the loops around it are no sum over blocks"
    return each_loop(func, outer=blocked, inner=lambda loop: refused(loop, BLOCK, why))


# Staged terms: those of a block of short rows are computed into a buffer, which is summed row by row in vectors.
#
# before::
#
#     for i in range(m):
#         y[i] = 0
#         for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 8, "sparsetir.staged": 64}):
#             y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]
#
# after::
#
#     for i_0 in range((m + 63) // 64):
#         first, last = i_0 * 64, min(i_0 * 64 + 64, m)  # written out
#         if indptr[last] - indptr[first] <= 1024:
#             for p in range(indptr[last] - indptr[first]):  # in vectors
#                 terms[p] = a[indptr[first] + p] * x[indices[indptr[first] + p]]
#             for i_1 in range(last - first):
#                 begin, length = indptr[first + i_1] - indptr[first], ...
#                 for lane in T.vectorized(8):
#                     acc[lane] = T.Select(lane < length, terms[begin + lane], 0)
#                 for step in range(max(length - 1, 0) // 8):
#                     ...  # the same for the next eight terms
#                 y[first + i_1] = 0 + ...  # the sum of acc[0:8]
#         else:
#             ...  # as before, for these rows
#
# The exit of a loop over a short row is mispredicted, and the loads behind it wait. The loop over the terms of a block
# has no row boundaries, so that the loads of the gathered operand go on, and rows of up to eight terms all execute the
# same instructions on a buffer in the nearest cache. This is the CSR-Stream part of Greathouse and Daga, "Efficient
# sparse matrix-vector multiplication on GPUs using the CSR storage format" (SC 2014), with a cache in place of the
# local memory of a GPU.


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


__all__ = ["MEAN_TERMS_PER_ROW", "StageTerms", "SumBlocks", "SumRagged", "blocked"]
