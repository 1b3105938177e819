# SPDX-License-Identifier: Apache-2.0
"""Of a row that was just written, the entries above a value and the largest of them."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.assemble.accumulators import LONG, Output, add, long
from sparsetir.ir import cast
from sparsetir.lower.nests import serial
from sparsetir.lower.rewriting import alloc, cell, get, put, seq

RARE = 8  # times as many entries as are kept: their branches are foreseen


def ordered(dtype: str) -> str:
    """The dtype in which values of a dtype are compared."""
    return {"bool": "uint8", "float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)


class Selection:
    """Keeps at most `top` entries of a row, those with the largest values, of equal ones those that come first.

    Parameters
    ----------
    out : Output
        With one result.
    chunk : Var
    top, least : Var
        How many entries stay, and what their values must be at least; NaN is not.
    heap : Var
        For each chunk `top` values, the least of them first.
    """

    def __init__(self, out: Output, chunk: Var, top: Var, least: Var, heap: Var) -> None:
        self.out, self.chunk, self.top, self.least, self.heap = out, chunk, top, least, heap
        self.kept, self.ties = cell("kept", LONG), cell("ties", LONG)
        self.node, self.child, self.taken = (cell(name, LONG) for name in ("node", "child", "taken"))
        self.step = Var("step", ir.PrimType(LONG))

    def stmts(self) -> list[tirx.Stmt]:
        """Select from the entries of the row, and count what is left."""
        cells = alloc(self.kept, self.ties, self.node, self.child, self.taken)
        high = self.value(get(self.out.pos) + self.step) >= self.least
        some = [put(self.kept, long(0)), serial(self.step, get(self.out.count), add(self.kept, cast(high, LONG)))]
        less = tirx.IfThenElse(get(self.kept) < get(self.out.count), seq(*self.branching(high)), None)
        return [*cells, *some, less, tirx.IfThenElse(get(self.out.count) > self.top, seq(*self.largest()), None)]

    def value(self, at: ir.Expr) -> ir.Expr:
        return cast(tirx.BufferLoad(self.out.values[0], [at]), str(self.heap.ty.dtype))

    def branching(self, condition: ir.Expr, *also: tirx.Stmt) -> list[tirx.Stmt]:
        """Keep the entries for which a condition holds, in order."""
        return self.pass_of(tirx.IfThenElse(condition, seq(*self.moved(), add(self.kept, 1), *also), None))

    def branchless(self, condition: ir.Expr, *also: tirx.Stmt) -> list[tirx.Stmt]:
        """The same where nobody can tell which ones those are: what is not kept is written over."""
        taken = put(self.taken, cast(condition, LONG))
        return self.pass_of(seq(taken, *also, *self.moved(), add(self.kept, get(self.taken))))

    def moved(self) -> list[tirx.Stmt]:
        """Put an entry behind those that are kept."""
        assert self.out.keys is not None
        source, target = [get(self.out.pos) + self.step], [get(self.out.pos) + get(self.kept)]
        return [tirx.BufferStore(a, tirx.BufferLoad(a, source), target) for a in (self.out.keys, self.out.values[0])]

    def pass_of(self, body: tirx.Stmt) -> list[tirx.Stmt]:
        """Go over the entries of the row."""
        return [
            put(self.kept, long(0)),
            serial(self.step, get(self.out.count), body),
            put(self.out.count, get(self.kept)),
        ]

    def largest(self) -> list[tirx.Stmt]:
        """Find the least of the largest values in a heap, and keep what is larger, and of its equals the first."""
        root, here = self.held(long(0)), self.value(get(self.out.pos) + self.step)
        rest = Var("step", ir.PrimType(LONG))
        fill = serial(rest, self.top, self.filled(rest))
        after = tirx.IfThenElse(tirx.And(self.step >= self.top, here > root), self.sunk(here), None)
        found = serial(self.step, get(self.out.count), after)
        # All that is larger than the root is in the heap.
        other = Var("node", ir.PrimType(LONG))
        is_root = cast(self.held(other).equal(root), LONG)
        ties = [put(self.ties, long(0)), serial(other, self.top, add(self.ties, is_root))]
        is_tie = tirx.And(here.equal(root), get(self.ties) > long(0))
        is_kept = tirx.Or(here > root, is_tie)
        last = self.value(get(self.out.pos) + get(self.kept) - long(1))
        rare = self.branching(is_kept, tirx.IfThenElse(last.equal(root), add(self.ties, -1), None))
        fewer = add(self.ties, tirx.Mul(long(-1), tirx.Mul(get(self.taken), cast(here.equal(root), LONG))))
        often = self.branchless(is_kept, fewer)
        are_rare = get(self.out.count) > self.top * long(RARE)
        return [fill, found, *ties, tirx.IfThenElse(are_rare, seq(*rare), seq(*often))]

    def held(self, node: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(self.heap, [self.chunk, node])

    def set(self, node: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(self.heap, value, [self.chunk, node])

    def filled(self, step: Var) -> tirx.Stmt:
        """Let the value of an entry rise to its place in the heap."""
        value = self.value(get(self.out.pos) + step)
        above = tirx.floordiv(get(self.node) - long(1), long(2))
        parent = tirx.max(above, long(0))
        rises = tirx.And(get(self.node) > long(0), self.held(parent) > value)
        lift = seq(self.set(get(self.node), self.held(parent)), put(self.node, parent))
        return seq(put(self.node, step), tirx.While(rises, lift), self.set(get(self.node), value))

    def sunk(self, value: ir.Expr) -> tirx.Stmt:
        """Put a value in the place of the root, and let it sink."""
        child = get(self.child)
        swap = seq(self.set(get(self.node), self.held(child)), put(self.node, child), self.lesser())
        sinks = tirx.And(child > get(self.node), self.held(child) < value)
        return seq(put(self.node, long(0)), self.lesser(), tirx.While(sinks, swap), self.set(get(self.node), value))

    def lesser(self) -> tirx.Stmt:
        """Set the child to the lesser one of the node; not below the node where there is none."""
        left, last = get(self.node) * long(2) + long(1), self.top - long(1)
        first, second = tirx.min(left, last), tirx.min(left + long(1), last)
        lower = tirx.IfThenElse(self.held(second) < self.held(first), put(self.child, second), put(self.child, first))
        return tirx.IfThenElse(left <= last, lower, put(self.child, long(0)))


__all__ = ["Selection", "ordered"]
