# SPDX-License-Identifier: Apache-2.0
"""Refuse a parallel loop whose steps may write the same element: TVM takes a block that only stores for independent."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import const
from sparsetir.lower.balance_loops import INDPTR, PARALLEL_MARK
from sparsetir.lower.rewriting import collect

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
