# SPDX-License-Identifier: Apache-2.0
"""Refuse what the stock schedule accepts but what would give wrong results.

* A parallel loop whose steps may write the same element: TVM takes a block that only stores for independent.
* A result that is written below a reduction loop that may have no step: TVM takes every loop to run at least once,
  and the element of an empty row would stay unset.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import const
from sparsetir.lower.balance_loops import INDPTR, PARALLEL_MARK
from sparsetir.lower.rewriting import collect, mentions

REDUCE = 2
PARALLEL = tirx.ForKind.PARALLEL


def _tells_apart(index: ir.Expr, var: Var, pointers: set[str]) -> bool:
    """Whether `var` moves a subscript: not only through an array that may hold a value twice."""
    hit: list[int] = []

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        return mutator.default_mutate(load) if str(load.source.name) in pointers else const(0, str(load.ty.dtype))

    plain = tvm_ffi.structural_mutate(index, [(ir.TensorLoad, on_load)])
    tvm_ffi.structural_walk(plain, (Var, lambda v: hit.append(1) if v.same_as(var) else None))
    return bool(hit)


def check_parallel(loop: tirx.For, pointers: set[str]) -> None:
    """Raise unless every store below a parallel loop is moved by its variable."""
    if loop.kind != PARALLEL or PARALLEL_MARK in loop.annotations:
        return
    inside = {a.buffer for a in collect(loop.body, tirx.AllocBuffer)}
    for store in collect(loop.body, tirx.BufferStore):
        if store.buffer in inside:
            continue
        if not any(_tells_apart(i, loop.loop_var, pointers) for i in store.indices):
            message = f"loop {loop.loop_var.name} cannot be parallel: two of its steps may store to the same element of"
            raise ScheduleError(f"{message} {store.buffer.name}")


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckParallel")
def CheckParallel(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check every parallel loop of a function of flat loops."""
    names = func.attrs.get(INDPTR) if func.attrs is not None else None
    if names is not None:
        for loop in collect(func.body, tirx.For):
            check_parallel(loop, {str(n) for n in names})
    return func


def _may_be_empty(loop: tirx.For) -> bool:
    """Whether a loop carries a reduction and is not known to have a step."""
    if sym.Analyzer().can_prove(loop.extent >= const(1, str(loop.extent.ty.dtype))):
        return False
    pairs = [
        (iv, value)
        for realize in collect(loop.body, s_tir.SBlockRealize)
        for iv, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
    ]
    return any(int(iv.iter_type) == REDUCE and mentions(value, [loop.loop_var]) for iv, value in pairs)


class _Writes:
    """Walks a stage-II function with the loops around each block."""

    def __init__(self, params: list[Var]) -> None:
        self.params = set(params)
        self.loops: list[tirx.For] = []

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.For:
        self.loops.append(node)
        mutator.default_mutate(node)
        self.loops.pop()
        return node

    def on_realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        outer, self.loops = self.loops, []
        inner = collect(node.block.body, s_tir.SBlock)
        if not inner:
            self._check(node, outer)
        mutator.default_mutate(node)
        self.loops = outer
        return node

    def _check(self, node: s_tir.SBlockRealize, loops: list[tirx.For]) -> None:
        read = {x.source for x in collect(node.block.body, ir.TensorLoad)}
        for store in collect(node.block.body, tirx.BufferStore):
            if store.buffer not in self.params or store.buffer in read:
                continue
            for loop in loops:
                used = any(mentions(v, [loop.loop_var]) for v in node.iter_values)
                if not used and _may_be_empty(loop):
                    message = f"block {node.block.name_hint} writes {store.buffer.name} below loop {loop.loop_var.name}"
                    raise ScheduleError(
                        f"{message}, which has no step for an empty row: the element would stay unset; "
                        "place the block outside that loop"
                    )


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckWrites")
def CheckWrites(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check every innermost block of a scheduled stage-II function."""
    if func.attrs is None or INDPTR not in func.attrs:
        return func
    walk = _Writes(list(func.params))
    callbacks = [(tirx.For, walk.on_for), (s_tir.SBlockRealize, walk.on_realize)]
    tvm_ffi.structural_mutate(func.body, callbacks)
    return func


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.MarkIndependent")
def MarkIndependent(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Move a block's note of independent steps to the loops that are bound to the variable it names."""
    marked: dict[Var, None] = {}

    def on_block(node: s_tir.SBlockRealize) -> None:
        name = node.block.annotations.get(PARALLEL_MARK)
        for iv, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            if name is not None and str(iv.var.name) == str(name):
                tvm_ffi.structural_walk(value, (Var, lambda v: marked.update({v: None})))

    tvm_ffi.structural_walk(func.body, (s_tir.SBlockRealize, on_block))
    if not marked:
        return func

    def on_for(node: tirx.For, mutator: Any) -> tirx.For:
        inner = mutator.default_mutate(node)
        if inner.loop_var not in marked:
            return inner
        notes = {**inner.annotations, PARALLEL_MARK: True}
        return tirx.For(inner.loop_var, inner.min, inner.extent, inner.kind, inner.body, inner.thread_binding, notes)

    body = tvm_ffi.structural_mutate(func.body, [(tirx.For, on_for)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
