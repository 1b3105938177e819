# SPDX-License-Identifier: Apache-2.0
"""Sum blocks along a ragged row in vectors: a running sum for every element of a block, taken together at the end.

before::

    for jo in range(indptr[io + 1] - indptr[io]):
        for ii in range(4):
            for ji in T.serial(4, annotations={"sparsetir.block": 1}):
                y[io * 4 + ii] = y[io * 4 + ii] + a[jo, ii, ji] * T.if_then_else(
                    indices[...] * 4 + ji < n, x[indices[...] * 4 + ji], 0)

after::

    for ii in T.unroll(4):
        for ji in T.vectorized(4):
            acc[ii * 4 + ji] = 0
    for jo in range(indptr[io + 1] - indptr[io]):
        if indices[...] * 4 + 3 < n:
            for ii in T.unroll(4):
                for ji in T.vectorized(4):
                    acc[ii * 4 + ji] = acc[ii * 4 + ji] + a[jo, ii, ji] * x[indices[...] * 4 + ji]
        else:
            ...  # as it was, one by one
    for ii in T.unroll(4):
        y[io * 4 + ii] = y[io * 4 + ii] + ...  # the sum of acc[ii * 4 : ii * 4 + 4]

A block reads one index and loads its columns of x once for all rows. The note is for sums that may be reordered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.ir import const
from sparsetir.lower.host.promote_halves import HALVES
from sparsetir.lower.marks import BLOCK, refused
from sparsetir.lower.nests import SERIAL, UNROLLED, VECTORIZED, Update, each_loop, with_
from sparsetir.lower.rewriting import collect, conjunction, mentions, renewed, same, seq, substitute
from sparsetir.lower.vector.vectorize_dots import reduced
from sparsetir.lower.vector.version_loops import hull
from sparsetir.walks import structural_mutate


@dataclass(frozen=True)
class Block:
    """The sums that a loop takes over blocks: ``store`` adds to an element for each row of a block.

    Parameters
    ----------
    outer : For
    rows, columns : list of For
        The loops over a block that tell its sums apart, and those along which it is summed.
    store : BufferStore
    """

    outer: tirx.For
    rows: list[tirx.For]
    columns: list[tirx.For]
    store: tirx.BufferStore

    @classmethod
    def of(cls, outer: tirx.For) -> Block | None:
        """That of a loop; None where it is something else."""
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
        """Which of the running sums a step adds to."""
        at: ir.Expr = const(0)
        for loop in self.loops:
            at = at * const(int(loop.extent)) + loop.loop_var.astype("int32")
        return at


def _inside(block: Block) -> tuple[list[ir.Expr], ir.Expr] | None:
    """The bounds that hold for a whole block, and what is summed where they do; None if some differ otherwise."""
    lanes = {f.loop_var: int(f.extent) for f in block.loops}
    hulls: list[ir.Expr] = []

    def on_call(node: ir.Call, mutator: Any) -> ir.Expr:
        if not op.is_if_then_else(node):
            return mutator.default_mutate(node)
        found = hull(node.args[0], lanes)
        if found is None:
            return mutator.default_mutate(node)
        if not any(same(found, h) for h in hulls):
            hulls.append(found)
        return mutator.mutate(node.args[1])

    term = structural_mutate(block.store.value.b, [(ir.Call, on_call)])
    left = [c for c in collect(term, ir.Call) if op.is_if_then_else(c)]
    return None if left else (hulls, term)


def _nest(loops: list[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
    """Loops around a statement, the innermost one in a vector."""
    for n, loop in enumerate(reversed(loops)):
        body = with_(loop, kind=UNROLLED if n else VECTORIZED, body=body, notes={})
    return renewed(body)


def _one_by_one(block: Block) -> tirx.Stmt:
    """The sums of a block that sticks out, as they were."""
    body: tirx.Stmt = block.store
    for loop in reversed(block.loops):
        body = with_(loop, body=body, notes={})
    return renewed(body)


def blocked(outer: tirx.For) -> tirx.Stmt | None:
    """The loop with a running sum for every element of a block; None where it is something else."""
    block = Block.of(outer)
    inside = None if block is None else _inside(block)
    if block is None or inside is None:
        return None
    dtype = str(block.store.buffer.ty.dtype)
    width = math.prod(int(f.extent) for f in block.columns)
    size = math.prod(int(f.extent) for f in block.loops)
    acc = tirx.decl_buffer([size], dtype, name="acc", scope="local", layout=None)
    place = [block.place()]
    # One loop of a single step is no vector.
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


def _finish(block: Block, acc: Var, row: int, width: int) -> tirx.Stmt:
    """Add the running sums of one row of the blocks to its result."""
    at, left = {}, row
    for loop in reversed(block.rows):
        left, step = divmod(left, int(loop.extent))
        at[loop.loop_var] = const(step, str(loop.loop_var.ty.dtype))
    indices = [substitute(i, at) for i in block.store.indices]
    has_halves = width > 1 and width & (width - 1) == 0
    total = reduced(acc, const(row * width), width) if has_halves else _in_turn(acc, row * width, width)
    return tirx.BufferStore(block.store.buffer, tirx.BufferLoad(block.store.buffer, indices) + total, indices)


def _in_turn(acc: Var, begin: int, count: int) -> ir.Expr:
    """The sum of `count` elements of a local array."""
    total: ir.Expr = tirx.BufferLoad(acc, [const(begin)])
    for n in range(begin + 1, begin + count):
        total = total + tirx.BufferLoad(acc, [const(n)])
    return total


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SumBlocks")
def SumBlocks(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every annotated sum over blocks of a function; an annotation that fits nothing is refused."""

    why = "the loops around it are no sum over blocks"
    return each_loop(func, outer=blocked, inner=lambda loop: refused(loop, BLOCK, why))


__all__ = ["SumBlocks", "blocked"]
