# SPDX-License-Identifier: Apache-2.0
"""Scalar replacement of aggregates: a large local array becomes one small array for each unrolled step.

before::

    acc = T.alloc_local((256,))
    for f in range(64):
        for ii in T.unroll(8):
            for k in T.vectorized(32):
                acc[ii * 32 + k] = acc[ii * 32 + k] + ...

after::

    acc_0 = T.alloc_local((32,))
    acc_1 = T.alloc_local((32,))
    ...
    for f in range(64):
        for k in T.vectorized(32):
            acc_0[k] = acc_0[k] + ...
        for k in T.vectorized(32):
            acc_1[k] = acc_1[k] + ...
        ...

TVM takes arrays of a kilobyte and more from its runtime, at every start of the loop: a tile of sixteen registers of 512
bits is one. Its parts lie on the stack, where LLVM turns them into registers.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.host.promote_to_stack import MOST_BYTES, bytes_of
from sparsetir.lower.nests import UNROLLED, VECTORIZED, with_body
from sparsetir.lower.rewriting import alloc, collect, mentions, renewed, same, seq, substitute
from sparsetir.walks import structural_mutate


def _unrolled(stmt: tirx.Stmt, buffer: Var) -> tirx.Stmt:
    """`stmt` with the steps of unrolled loops around the array written out."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        if inner.kind != UNROLLED or not mentions(inner.body, [buffer]) or not isinstance(inner.extent, tirx.IntImm):
            return inner
        dtype = str(inner.loop_var.ty.dtype)
        steps = [{inner.loop_var: inner.min + const(n, dtype)} for n in range(int(inner.extent))]
        return seq(*(renewed(substitute(inner.body, step)) for step in steps))

    return structural_mutate(stmt, [(tirx.For, on_for)])


class _Parts:
    """The arrays that stand for parts of `width` elements of one."""

    def __init__(self, buffer: Var, width: int, lanes: list[tirx.For]) -> None:
        self.buffer, self.width, self.analyzer = buffer, width, sym.Analyzer()
        self.arrays: dict[int, Var] = {}
        self.fits = True
        for lane in lanes:
            self.analyzer.bind(lane.loop_var, ir.Range.from_min_extent(lane.min, lane.extent))

    def at(self, indices: Any) -> tuple[Var, list[ir.Expr]]:
        """An element's array, and its subscript there; `fits` is false afterwards if it is in several."""
        (index,) = indices
        is_vector = isinstance(index, tirx.Ramp)
        first = index.base if is_vector else index
        last = first + (index.lanes - const(1, "int32")) * index.stride if is_vector else first
        width = const(self.width, str(first.ty.dtype))
        number, other = (self.analyzer.simplify(tirx.floordiv(end, width)) for end in (first, last))
        if not isinstance(number, tirx.IntImm) or not same(number, other):
            self.fits = False
            return self.buffer, list(indices)
        inside = self.analyzer.simplify(first - number * width)
        return self._array(int(number)), [tirx.Ramp(inside, index.stride, index.lanes) if is_vector else inside]

    def _array(self, number: int) -> Var:
        if number not in self.arrays:
            name, dtype = f"{self.buffer.name}_{number}", str(self.buffer.ty.dtype)
            self.arrays[number] = tirx.decl_buffer([self.width], dtype, name=name, scope="local", layout=None)
        return self.arrays[number]


def split(buffer: Var, uses: list[tirx.Stmt]) -> list[tirx.Stmt] | None:
    """The statements that use an array, with its parts before them; None if an element's part is not known."""
    body = _unrolled(seq(*uses), buffer)
    lanes = [f for f in collect(body, tirx.For) if f.kind == VECTORIZED and isinstance(f.extent, tirx.IntImm)]
    widths = {int(lane.extent) for lane in lanes if mentions(lane.body, [buffer])}
    if len(widths) != 1:
        return None
    parts = _Parts(buffer, widths.pop(), lanes)

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if not node.source.same_as(buffer):
            return mutator.default_mutate(node)
        array, indices = parts.at(node.indices)
        return tirx.BufferLoad(array, indices)

    def on_store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        value = mutator.mutate(node.value)
        array, indices = (node.buffer, [mutator.mutate(i) for i in node.indices])
        if node.buffer.same_as(buffer):
            array, indices = parts.at(node.indices)
        return tirx.BufferStore(array, value, indices)

    body = structural_mutate(body, [(ir.TensorLoad, on_load), (tirx.BufferStore, on_store)])
    if not parts.fits or any(_is_large(a) for a in alloc(*parts.arrays.values())):
        return None
    return [*alloc(*parts.arrays.values()), body]


def _is_large(stmt: tirx.Stmt) -> bool:
    """Whether a statement allocates a local array that would not go on the stack."""
    if not isinstance(stmt, tirx.AllocBuffer) or str(stmt.buffer.ty.storage_scope) != "local":
        return False
    size = bytes_of(stmt.buffer)
    return size is not None and size >= MOST_BYTES and len(stmt.buffer.ty.shape) == 1


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ReplaceAggregates")
def ReplaceAggregates(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Take apart every such array of a function for which it is possible."""

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        out: list[tirx.Stmt] = [mutator.mutate(s) for s in node.seq]
        for stmt in [s for s in out if _is_large(s)]:
            at = next(n for n, s in enumerate(out) if s.same_as(stmt))
            found = split(stmt.buffer, out[at + 1 :])
            out = out if found is None else [*out[:at], *found]
        return seq(*out)

    body = structural_mutate(func.body, [(tirx.SeqStmt, on_seq)])
    return with_body(func, body)


__all__ = ["ReplaceAggregates", "split"]
