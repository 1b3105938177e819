# SPDX-License-Identifier: Apache-2.0
"""Selection in a row that was just computed: the entries above a value, and the largest of them."""

from __future__ import annotations

import math

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import LONG, alloc, cell, get, long, put, seq
from sparsetir.ir.views import cast, const
from sparsetir.lower.loops import serial
from sparsetir.sparse_output.accumulators import Output, add

LANES = 16  # values that are compared at a time
VECTORS = (16, 64)  # largest values that are kept in a vector, few and many
RARE = 8  # times as many entries as are kept: their branches are predictable


def ordered(dtype: str) -> str:
    """Return the dtype in which values of a dtype are compared."""
    return {"bool": "uint8", "float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)


class TopSelection:
    """Selection of at most `top` entries of a row: those with the largest values, of equal ones the first.

    For a small `top` the largest values so far are kept sorted in a vector: the position of a value is found without a
    branch, and sixteen values at a time are compared with the least of them. For a larger one they are kept in a heap.

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
        """Emit the selection from the entries of the row, and count the entries that are left."""
        cells = alloc(self.kept, self.ties, self.node, self.child, self.taken)
        if self.out.values[0].ty.dtype != self.heap.ty.dtype:
            return [*cells, *self.in_heap()]
        select = seq(*self.in_heap())
        for lanes in reversed(VECTORS):
            best = Best(str(self.heap.ty.dtype), self.top, lanes)
            select = tirx.IfThenElse(self.top <= long(lanes), seq(*self.in_vector(best)), select)
        return [*cells, tirx.IfThenElse(get(self.out.count) > self.top, select, seq(*self.high_enough()))]

    def in_vector(self, best: Best) -> list[tirx.Stmt]:
        """Keep each value that is among the largest when it is reached, then those that still are at the end."""
        at, bits = self.node, cell("bits", "int32")
        value = Var("value", ir.PrimType(best.dtype))
        is_high = value >= self.least
        first = seq(
            tirx.Bind(value, self.value(get(self.out.pos) + get(at))),
            *self.moved(get(at)),
            best.enter(tirx.Select(is_high, value, best.low)),
            add(self.kept, cast(is_high, LONG)),
            add(at, 1),
        )
        lanes = tirx.Ramp(const(0, "int32"), const(1, "int32"), LANES)
        valid = tirx.Broadcast(cast(tirx.min(get(self.out.count) - get(at), long(LANES)), "int32"), LANES)
        values = tirx.BufferLoad(self.out.values[0], [tirx.Ramp(get(self.out.pos) + get(at), long(1), LANES)])
        larger = tirx.And(values > tirx.Broadcast(best.least, LANES), lanes < valid)
        entry, candidate = Var("entry", ir.PrimType(LONG)), Var("value", ir.PrimType(best.dtype))
        lowest = tirx.call_llvm_pure_intrin("int32", "llvm.cttz", get(bits), const(True, "bool"))
        visit = seq(
            tirx.Bind(entry, get(at) + cast(lowest, LONG)),
            tirx.Bind(candidate, self.value(get(self.out.pos) + entry)),
            *self.moved(entry),
            add(self.kept, cast(candidate > best.least, LONG)),
            best.enter(candidate),
            put(bits, get(bits) & (get(bits) - const(1, "int32"))),
        )
        compare = put(bits, cast(mask(larger), "int32"))
        sixteen = seq(compare, tirx.While(get(bits) != const(0, "int32"), visit), add(at, LANES))
        return [
            *alloc(best.held, bits),
            *best.begin(),
            *(put(c, long(0)) for c in (self.kept, at)),
            tirx.While(tirx.And(get(self.kept) < self.top, get(at) < get(self.out.count)), first),
            tirx.While(get(at) < get(self.out.count), sixteen),
            put(self.out.count, get(self.kept)),
            tirx.IfThenElse(get(self.kept) > self.top, seq(*self.still(best.least, best.larger())), None),
        ]

    def still(self, least: ir.Expr, larger: ir.Expr) -> list[tirx.Stmt]:
        """Keep the values above the least of the largest values, and the first of its equals."""
        here = self.value(get(self.out.pos) + self.step)
        is_tie = tirx.And(here.equal(least), get(self.ties) > long(0))
        fewer = add(self.ties, tirx.Mul(long(-1), tirx.Mul(get(self.taken), cast(here.equal(least), LONG))))
        return [put(self.ties, self.top - larger), *self.branchless(tirx.Or(here > least, is_tie), fewer)]

    def in_heap(self) -> list[tirx.Stmt]:
        """Keep the values that are large enough, then the largest of those."""
        return [*self.high_enough(), tirx.IfThenElse(get(self.out.count) > self.top, seq(*self.largest()), None)]

    def high_enough(self) -> list[tirx.Stmt]:
        """Keep the values that are not below the least value."""
        high = self.value(get(self.out.pos) + self.step) >= self.least
        count_high = [put(self.kept, long(0)), serial(self.step, get(self.out.count), add(self.kept, cast(high, LONG)))]
        compact = tirx.IfThenElse(get(self.kept) < get(self.out.count), seq(*self.branching(high)), None)
        return [*count_high, compact]

    def value(self, at: ir.Expr) -> ir.Expr:
        return cast(tirx.BufferLoad(self.out.values[0], [at]), str(self.heap.ty.dtype))

    def branching(self, condition: ir.Expr, *also: tirx.Stmt) -> list[tirx.Stmt]:
        """Keep the entries for which a condition holds, in order."""
        return self.pass_of(tirx.IfThenElse(condition, seq(*self.moved(self.step), add(self.kept, 1), *also), None))

    def branchless(self, condition: ir.Expr, *also: tirx.Stmt) -> list[tirx.Stmt]:
        """Keep the entries for which an unpredictable condition holds: entries that are not kept are overwritten."""
        decide = put(self.taken, cast(condition, LONG))
        return self.pass_of(seq(decide, *also, *self.moved(self.step), add(self.kept, get(self.taken))))

    def moved(self, entry: ir.Expr) -> list[tirx.Stmt]:
        """Move an entry behind those that are kept."""
        assert self.out.keys is not None
        source, target = [get(self.out.pos) + entry], [get(self.out.pos) + get(self.kept)]
        return [tirx.BufferStore(a, tirx.BufferLoad(a, source), target) for a in (self.out.keys, self.out.values[0])]

    def pass_of(self, body: tirx.Stmt) -> list[tirx.Stmt]:
        """Iterate over the entries of the row."""
        return [
            put(self.kept, long(0)),
            serial(self.step, get(self.out.count), body),
            put(self.out.count, get(self.kept)),
        ]

    def largest(self) -> list[tirx.Stmt]:
        """Find the least of the largest values in a heap; keep the values above it, and the first of its equals."""
        root, value = self.held(long(0)), self.value(get(self.out.pos) + self.step)
        heap_step = Var("step", ir.PrimType(LONG))
        fill = serial(heap_step, self.top, self.filled(heap_step))
        replace = tirx.IfThenElse(tirx.And(self.step >= self.top, value > root), self.sunk(value), None)
        scan = serial(self.step, get(self.out.count), replace)
        # All values above the root are in the heap.
        heap_node = Var("node", ir.PrimType(LONG))
        is_root = cast(self.held(heap_node).equal(root), LONG)
        ties = [put(self.ties, long(0)), serial(heap_node, self.top, add(self.ties, is_root))]
        is_tie = tirx.And(value.equal(root), get(self.ties) > long(0))
        is_kept = tirx.Or(value > root, is_tie)
        last = self.value(get(self.out.pos) + get(self.kept) - long(1))
        rare = self.branching(is_kept, tirx.IfThenElse(last.equal(root), add(self.ties, -1), None))
        fewer = add(self.ties, tirx.Mul(long(-1), tirx.Mul(get(self.taken), cast(value.equal(root), LONG))))
        often = self.branchless(is_kept, fewer)
        are_rare = get(self.out.count) > self.top * long(RARE)
        return [fill, scan, *ties, tirx.IfThenElse(are_rare, seq(*rare), seq(*often))]

    def held(self, node: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(self.heap, [self.chunk, node])

    def set(self, node: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(self.heap, value, [self.chunk, node])

    def filled(self, step: Var) -> tirx.Stmt:
        """Move the value of an entry up to its position in the heap."""
        value = self.value(get(self.out.pos) + step)
        above = tirx.floordiv(get(self.node) - long(1), long(2))
        parent = tirx.max(above, long(0))
        rises = tirx.And(get(self.node) > long(0), self.held(parent) > value)
        lift = seq(self.set(get(self.node), self.held(parent)), put(self.node, parent))
        return seq(put(self.node, step), tirx.While(rises, lift), self.set(get(self.node), value))

    def sunk(self, value: ir.Expr) -> tirx.Stmt:
        """Replace the root with a value, and move it down."""
        child = get(self.child)
        swap = seq(self.set(get(self.node), self.held(child)), put(self.node, child), self.lesser())
        sinks = tirx.And(child > get(self.node), self.held(child) < value)
        return seq(put(self.node, long(0)), self.lesser(), tirx.While(sinks, swap), self.set(get(self.node), value))

    def lesser(self) -> tirx.Stmt:
        """Set the child to the lesser one of the node; not below the node where there is none."""
        left_child, last = get(self.node) * long(2) + long(1), self.top - long(1)
        left_at, right_at = tirx.min(left_child, last), tirx.min(left_child + long(1), last)
        lower = tirx.IfThenElse(
            self.held(right_at) < self.held(left_at), put(self.child, right_at), put(self.child, left_at)
        )
        return tirx.IfThenElse(left_child <= last, lower, put(self.child, long(0)))


class Best:
    """The largest values so far, in descending order in a vector.

    The last lane has the least of them. If there are fewer values than lanes, the first lanes have the greatest value
    of the dtype.

    Parameters
    ----------
    dtype : str
    top : Var
        How many values.
    lanes : int
        Of the vector.
    """

    def __init__(self, dtype: str, top: Var, lanes: int) -> None:
        self.dtype, self.top, self.lanes = dtype, top, lanes
        self.held = tirx.decl_buffer([lanes], dtype, name="best", scope="local", layout=None)
        is_float = dtype.startswith("float")
        self.low, self.high = (
            tirx.const(sign * math.inf, dtype) if is_float else bound(dtype)
            for sign, bound in ((-1, tirx.min_value), (1, tirx.max_value))
        )
        self.place = tirx.Ramp(long(0), long(1), self.lanes)

    def all(self, value: ir.Expr) -> ir.Expr:
        """Return a value in each lane."""
        return tirx.Broadcast(value, self.lanes)

    @property
    def vector(self) -> ir.Expr:
        return tirx.BufferLoad(self.held, [self.place])

    @property
    def least(self) -> ir.Expr:
        return tirx.BufferLoad(self.held, [long(self.lanes - 1)])

    @property
    def is_value(self) -> ir.Expr:
        """The mask of the lanes that have values."""
        lanes = tirx.Ramp(const(0, "int32"), const(1, "int32"), self.lanes)
        return lanes >= self.all(cast(long(self.lanes) - self.top, "int32"))

    def begin(self) -> list[tirx.Stmt]:
        """Emit the initial state, with no values."""
        none = tirx.Select(self.is_value, self.all(self.low), self.all(self.high))
        return [tirx.BufferStore(self.held, none, [self.place])]

    def enter(self, value: ir.Expr) -> tirx.Stmt:
        """Insert a value at its sorted position; a value that is not above the least one changes nothing."""
        moved = tirx.Shuffle([self.vector, self.all(self.high)], [self.lanes, *range(self.lanes - 1)])
        # No value is NaN, so the NaN handling of `tirx.min` and `tirx.max` is not needed.
        lesser = tirx.Select(moved < self.all(value), moved, self.all(value))
        larger = tirx.Select(lesser > self.vector, lesser, self.vector)
        return tirx.BufferStore(self.held, larger, [self.place])

    def larger(self) -> ir.Expr:
        """Return the number of values above the least."""
        return tirx.popcount(cast(mask(tirx.And(self.is_value, self.vector > self.all(self.least))), LONG))


def mask(condition: ir.Expr) -> ir.Expr:
    """Return the lanes of a condition as bits of a number; `tirx.reinterpret` would count them as bytes."""
    lanes = str(condition.ty.dtype).rpartition("x")[2]
    return ir.Call(ir.Op.get("tirx.reinterpret"), [condition], ret_ty=ir.PrimType(f"uint{lanes}"))


__all__ = ["LANES", "TopSelection", "ordered"]
