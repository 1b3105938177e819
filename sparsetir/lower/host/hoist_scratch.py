# SPDX-License-Identifier: Apache-2.0
"""Allocate scratch of unknown size once, not in every step of the loops around its use.

before::

    for chunk in T.parallel(16):
        for i in range(last[0] - first[0]):
            row = T.alloc_buffer((feat,))
            ...

after::

    for chunk in T.parallel(16):
        row = T.alloc_buffer((feat,))
        for i in range(last[0] - first[0]):
            ...

TVM allocates where a buffer is first used, and cannot compile every scratch of a symbolic size inside a loop. Steps
that run at the same time keep scratch of their own.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.lower.nests import PARALLEL, VECTORIZED, with_, with_body
from sparsetir.lower.rewriting import collect, mentions, seq
from sparsetir.walks import structural_mutate

APART = (PARALLEL, VECTORIZED)


def _may_move(alloc: tirx.AllocBuffer) -> bool:
    return not all(isinstance(d, tirx.IntImm) for d in alloc.buffer.ty.shape)


class _Hoister:
    """Takes allocations out of serial loops on the way up; `waiting` are looking for their place."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[tirx.AllocBuffer] = []

    def on_alloc(self, node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        if self.depth == 0 or not _may_move(node):
            return mutator.default_mutate(node)
        self.waiting.append(node)
        return tirx.Evaluate(0)

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        outer, self.waiting, self.depth = self.waiting, [], self.depth + 1
        inner = mutator.default_mutate(node)
        found, self.waiting, self.depth = self.waiting, outer, self.depth - 1
        bound: list[Var] = [node.loop_var, *(b.var for b in collect(inner.body, tirx.Bind))]
        stays: list[tirx.Stmt] = []
        for alloc in found:
            fixed = node.kind in APART or any(mentions(d, bound) for d in alloc.buffer.ty.shape)
            (stays if fixed else self.waiting).append(alloc)
        return with_(inner, body=seq(*stays, inner.body))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.HoistScratch")
def HoistScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Move the allocations of a function."""
    if not any(_may_move(a) for a in collect(func.body, tirx.AllocBuffer)):
        return func
    walk = _Hoister()
    body = structural_mutate(func.body, [(tirx.AllocBuffer, walk.on_alloc), (tirx.For, walk.on_for)])
    return with_body(func, seq(*walk.waiting, body))
