# SPDX-License-Identifier: Apache-2.0
"""Keep a reduction's running value in a register.

before::

    for k in range(feat):
        o[p] = o[p] + x[i, k] * y[j, k]

after::

    acc[0] = o[p]
    for k in range(feat):
        acc[0] = acc[0] + x[i, k] * y[j, k]
    o[p] = acc[0]
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx

from sparsetir.ir import const
from sparsetir.lower.rewriting import all_same, alloc, cell, get, mentions, put, seq


def _accumulation(loop: tirx.For) -> tirx.BufferStore | None:
    """The store of a loop that updates one element and touches its buffer nowhere else."""
    store = loop.body
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(store, tirx.BufferStore):
        return None
    if str(store.buffer.ty.storage_scope) == "local" or any(mentions(i, [loop.loop_var]) for i in store.indices):
        return None
    own: list[ir.TensorLoad] = []
    foreign: list[ir.TensorLoad] = []

    def on_load(node: ir.TensorLoad) -> None:
        if node.source.same_as(store.buffer):
            (own if all_same(node.indices, store.indices) else foreign).append(node)

    tvm_ffi.structural_walk(store.value, (ir.TensorLoad, on_load))
    return store if own and not foreign and not any(mentions(i, [store.buffer]) for i in store.indices) else None


def keep(loop: tirx.For) -> tirx.Stmt:
    """`loop` with its running value in a local cell, or unchanged."""
    store = _accumulation(loop)
    if store is None:
        return loop
    acc = cell("acc", str(store.buffer.ty.dtype))

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        return get(acc) if node.source.same_as(store.buffer) else mutator.default_mutate(node)

    value = tvm_ffi.structural_mutate(store.value, [(ir.TensorLoad, on_load)])
    inner = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, put(acc, value), None, loop.annotations)
    first = put(acc, tirx.BufferLoad(store.buffer, store.indices))
    last = tirx.BufferStore(store.buffer, get(acc), store.indices)
    # An empty loop must not touch the element: it may lie behind a condition of its own.
    runs = loop.extent > const(0, str(loop.extent.ty.dtype))
    return tirx.IfThenElse(runs, seq(*alloc(acc), first, inner, last), None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.KeepAccumulators")
def KeepAccumulators(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every accumulating loop of a function."""
    body = tvm_ffi.structural_mutate(func.body, [(tirx.For, lambda n, m: keep(m.default_mutate(n)))])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
