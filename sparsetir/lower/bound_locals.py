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

LARGEST = 1 << 24


def _loops(node: Any) -> dict[Var, ir.Range]:
    found: dict[Var, ir.Range] = {}
    on_for = lambda f: found.update({f.loop_var: ir.Range.from_min_extent(f.min, f.extent)})  # noqa: E731
    tvm_ffi.structural_walk(node, (tirx.For, on_for))
    return found


def _oversized(buffer: Var) -> bool:
    if str(buffer.ty.storage_scope) != "local":
        return False
    return any(not isinstance(d, tirx.IntImm) or int(d) > LARGEST for d in buffer.ty.shape)


def _needed(buffer: Var, func: tirx.PrimFunc, ranges: dict[Var, ir.Range]) -> list[int]:
    """Extent of each dimension that covers every subscript."""
    analyzer = sym.Analyzer()
    for var, extent in ranges.items():
        analyzer.bind(var, extent)
    extents = [1] * len(buffer.ty.shape)
    for accessed, indices, _ in accesses(func):
        if not accessed.same_as(buffer):
            continue
        for n, index in enumerate(indices):
            bound = int(analyzer.const_int_bound(index).max_value)
            if bound >= LARGEST:
                message = f"the local array {buffer.name} has no fixed size: its subscript {index} is not bounded by constants"
                raise LoweringError(f"{message}; tile the loop by a constant before caching")
            extents[n] = max(extents[n], bound + 1)
    return extents


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.BoundLocals")
def BoundLocals(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Shrink oversized local arrays; raise `LoweringError` where no bound is known."""
    found: list[Var] = []
    tvm_ffi.structural_walk(func, (tirx.AllocBuffer, lambda a: found.append(a.buffer) if _oversized(a.buffer) else None))
    if not found:
        return func
    ranges = _loops(func)
    fresh: dict[Var, Var] = {}
    for old in found:
        shape = [const(e) for e in _needed(old, func, ranges)]
        fresh[old] = tirx.decl_buffer(shape, str(old.ty.dtype), name=str(old.name), scope="local", layout=None)

    def on_alloc(node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        return tirx.AllocBuffer(fresh[node.buffer]) if node.buffer in fresh else mutator.default_mutate(node)

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        indices = [mutator.mutate(i) for i in node.indices]
        return tirx.BufferLoad(fresh.get(node.source, node.source), indices)

    def on_store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        indices = [mutator.mutate(i) for i in node.indices]
        return tirx.BufferStore(fresh.get(node.buffer, node.buffer), mutator.mutate(node.value), indices)

    callbacks = [(tirx.AllocBuffer, on_alloc), (ir.TensorLoad, on_load), (tirx.BufferStore, on_store)]
    body = tvm_ffi.structural_mutate(func.body, callbacks)
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
