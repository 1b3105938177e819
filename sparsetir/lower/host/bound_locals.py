# SPDX-License-Identifier: Apache-2.0
"""Give every array inside a loop the size its subscripts need.

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
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import LoweringError
from sparsetir.ir import accesses, const
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect, mentions, substitute
from sparsetir.walks import structural_mutate

LARGEST = 1 << 24


def _loops(node: Any) -> dict[Var, ir.Range]:
    """The loops below `node`."""
    return {f.loop_var: ir.Range.from_min_extent(f.min, f.extent) for f in collect(node, tirx.For)}


def _outer_loops(body: tirx.Stmt) -> dict[Var, list[tirx.For]]:
    """The loops around each allocation: their variables are fixed while it lives."""
    stack: list[tirx.For] = []
    found: dict[Var, list[tirx.For]] = {}

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        stack.append(node)
        mutator.default_mutate(node)
        stack.pop()
        return node

    def on_alloc(node: tirx.AllocBuffer, _mutator: Any) -> tirx.Stmt:
        if _is_local(node.buffer) or stack:
            found[node.buffer] = list(stack)
        return node

    structural_mutate(body, [(tirx.For, on_for), (tirx.AllocBuffer, on_alloc)])
    return found


def _is_local(buffer: Var) -> bool:
    return str(buffer.ty.storage_scope) == "local"


def _is_fixed(buffer: Var) -> bool:
    return all(isinstance(d, tirx.IntImm) and int(d) <= LARGEST for d in buffer.ty.shape)


class _Local:
    """One array: where its subscripts start, and how far they go from there."""

    def __init__(self, buffer: Var, func: tirx.PrimFunc, outer: list[tirx.For], ranges: dict[Var, ir.Range]) -> None:
        self.analyzer = sym.Analyzer()
        for var, extent in ranges.items():
            self.analyzer.bind(var, extent)
        self.moving = [v for v in ranges if v not in {loop.loop_var for loop in outer}]
        life = outer[-1].body if outer else func.body
        self.changing = [s.buffer for s in collect(life, tirx.BufferStore)]
        zeros = {v: const(0, str(v.ty.dtype)) for v in self.moving}
        subscripts = [indices for accessed, indices, _ in accesses(func) if accessed.same_as(buffer)]
        self.bases = [self.analyzer.simplify(substitute(i, zeros)) for i in subscripts[0]] if subscripts else []
        self.extents = [self._extent([s[n] for s in subscripts], n) for n in range(len(self.bases))]
        pairs = zip(self.bases, self.extents, strict=True)
        self.bases = [const(0, str(base.ty.dtype)) if extent is None else base for base, extent in pairs]

    def shrunk(self, buffer: Var) -> Var:
        """The array with just the extent its subscripts need, where that is known."""
        shape = [d if e is None else const(e) for d, e in zip(buffer.ty.shape, self.extents, strict=True)]
        scope = str(buffer.ty.storage_scope)
        return tirx.decl_buffer(shape, str(buffer.ty.dtype), name=str(buffer.name), scope=scope, layout=None)

    def shifted(self, indices: Any, bases: Any) -> list[ir.Expr]:
        """Subscripts relative to the start."""
        return [self.analyzer.simplify(i - b) for i, b in zip(indices, bases, strict=True)]

    def _extent(self, indices: list[ir.Expr], n: int) -> int | None:
        """Elements from the start to the last subscript; None where constants do not bound it."""
        if any(mentions(load, [*self.moving, *self.changing]) for i in indices for load in collect(i, ir.TensorLoad)):
            return None
        bounds = [self.analyzer.const_int_bound(self.analyzer.simplify(i - self.bases[n])) for i in indices]
        most, least = max(int(b.max_value) for b in bounds), min(int(b.min_value) for b in bounds)
        return most + 1 if least >= 0 and most < LARGEST else None


def _bounded(buffer: Var, local: _Local) -> bool:
    """Whether to replace the array; raises where it must be and cannot."""
    is_open = not local.extents or None in local.extents
    if is_open and _is_local(buffer) and not _is_fixed(buffer):
        message = f"the local array {buffer.name} has no fixed size: its subscripts are not bounded by constants"
        raise LoweringError(f"{message}; tile the loop by a constant before caching")
    return any(e is not None for e in local.extents)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.BoundLocals")
def BoundLocals(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Shrink arrays inside loops to their use; raise `LoweringError` where a local one has no fixed size."""
    found = _outer_loops(func.body)
    if not found:
        return func
    ranges = _loops(func)
    every = {old: _Local(old, func, outer, ranges) for old, outer in found.items()}
    local = {old: known for old, known in every.items() if _bounded(old, known)}
    fresh = {old: known.shrunk(old) for old, known in local.items()}

    def place(buffer: Var, indices: Any, mutator: Any) -> tuple[Var, list[ir.Expr]]:
        moved = [mutator.mutate(i) for i in indices]
        if buffer not in local:
            return buffer, moved
        # A start may itself be read from an array that is replaced.
        return fresh[buffer], local[buffer].shifted(moved, [mutator.mutate(b) for b in local[buffer].bases])

    def on_alloc(node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        known = fresh.get(node.buffer)
        return tirx.AllocBuffer(known) if known is not None else mutator.default_mutate(node)

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        return tirx.BufferLoad(*place(node.source, node.indices, mutator))

    def on_store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        buffer, indices = place(node.buffer, node.indices, mutator)
        return tirx.BufferStore(buffer, mutator.mutate(node.value), indices)

    callbacks = [(tirx.AllocBuffer, on_alloc), (ir.TensorLoad, on_load), (tirx.BufferStore, on_store)]
    body = structural_mutate(func.body, callbacks)
    return with_body(func, body)
