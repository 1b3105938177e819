# SPDX-License-Identifier: Apache-2.0
"""Give every thread-local array the size its subscripts need.

before::

    acc = T.alloc_local((2147483647,))
    for k_1 in T.vectorized(32):
        acc[k_1] = ...

after::

    acc = T.alloc_local((32,))

TVM's buffer compaction cannot bound a tile of a symbolic extent and keeps the largest integer instead.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import LoweringError
from sparsetir.ir import accesses, const
from sparsetir.lower.rewriting import collect, substitute

LARGEST = 1 << 24


def _loops(node: Any) -> dict[Var, ir.Range]:
    """The loops below `node`."""
    return {f.loop_var: ir.Range.from_min_extent(f.min, f.extent) for f in collect(node, tirx.For)}


def _outer_loops(body: tirx.Stmt) -> dict[Var, list[Var]]:
    """The loop variables around each oversized allocation: they are fixed while it lives."""
    stack: list[Var] = []
    found: dict[Var, list[Var]] = {}

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        stack.append(node.loop_var)
        mutator.default_mutate(node)
        stack.pop()
        return node

    def on_alloc(node: tirx.AllocBuffer, _mutator: Any) -> tirx.Stmt:
        if _oversized(node.buffer):
            found[node.buffer] = list(stack)
        return node

    tvm_ffi.structural_mutate(body, [(tirx.For, on_for), (tirx.AllocBuffer, on_alloc)])
    return found


def _oversized(buffer: Var) -> bool:
    if str(buffer.ty.storage_scope) != "local":
        return False
    return any(not isinstance(d, tirx.IntImm) or int(d) > LARGEST for d in buffer.ty.shape)


class _Local:
    """One oversized array: where its subscripts start, and how far they go from there."""

    def __init__(self, buffer: Var, func: tirx.PrimFunc, outer: list[Var], ranges: dict[Var, ir.Range]) -> None:
        self.analyzer = sym.Analyzer()
        for var, extent in ranges.items():
            self.analyzer.bind(var, extent)
        self.inner = {v: const(0, str(v.ty.dtype)) for v in ranges if v not in set(outer)}
        subscripts = [indices for accessed, indices, _ in accesses(func) if accessed.same_as(buffer)]
        self.bases = [self._base(i) for i in subscripts[0]]
        shape = [self._extent(buffer, [s[n] for s in subscripts], n) for n in range(len(self.bases))]
        self.fresh = tirx.decl_buffer(shape, str(buffer.ty.dtype), name=str(buffer.name), scope="local", layout=None)

    def _base(self, index: ir.Expr) -> ir.Expr:
        return self.analyzer.simplify(substitute(index, self.inner))

    def shifted(self, indices: Any) -> list[ir.Expr]:
        """Subscripts relative to the start."""
        return [self.analyzer.simplify(i - b) for i, b in zip(indices, self.bases, strict=True)]

    def _extent(self, buffer: Var, indices: list[ir.Expr], n: int) -> ir.Expr:
        bounds = [self.analyzer.const_int_bound(self.analyzer.simplify(i - self.bases[n])) for i in indices]
        most, least = max(int(b.max_value) for b in bounds), min(int(b.min_value) for b in bounds)
        if least < 0 or most >= LARGEST:
            message = f"the local array {buffer.name} has no fixed size: its subscript {indices[0]} is not bounded"
            raise LoweringError(f"{message} by constants; tile the loop by a constant before caching")
        return const(most + 1)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.BoundLocals")
def BoundLocals(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Shrink oversized local arrays; raise `LoweringError` where no bound is known."""
    found = _outer_loops(func.body)
    if not found:
        return func
    ranges = _loops(func)
    local = {old: _Local(old, func, outer, ranges) for old, outer in found.items()}

    def place(buffer: Var, indices: list[ir.Expr]) -> tuple[Var, list[ir.Expr]]:
        return (local[buffer].fresh, local[buffer].shifted(indices)) if buffer in local else (buffer, indices)

    def on_alloc(node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        known = local.get(node.buffer)
        return tirx.AllocBuffer(known.fresh) if known is not None else mutator.default_mutate(node)

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        return tirx.BufferLoad(*place(node.source, [mutator.mutate(i) for i in node.indices]))

    def on_store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        buffer, indices = place(node.buffer, [mutator.mutate(i) for i in node.indices])
        return tirx.BufferStore(buffer, mutator.mutate(node.value), indices)

    callbacks = [(tirx.AllocBuffer, on_alloc), (ir.TensorLoad, on_load), (tirx.BufferStore, on_store)]
    body = tvm_ffi.structural_mutate(func.body, callbacks)
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
