# SPDX-License-Identifier: Apache-2.0
"""Scalarisation: a vector loop whose lanes do different things becomes a serial loop.

before::

    for i in T.vectorized(8):
        acc = T.alloc_local((1,))
        for j in range(indptr[i + 1] - indptr[i]):
            ...

after::

    for i in range(8):
        ...

TVM gives all lanes one array, and makes one vector loop of two nested ones: the numbers would be wrong. It has no
instruction that stores one bfloat16 number in all lanes either; LLVM finds the vectors of such a loop by itself.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.lower.nests import SERIAL, VECTORIZED, with_, with_body
from sparsetir.lower.rewriting import collect, mentions
from sparsetir.walks import structural_mutate


def _differ(lanes: tirx.For) -> bool:
    """Whether lanes need arrays, searches or numbers of steps of their own."""
    inner = collect(lanes.body, tirx.For)
    if collect(lanes.body, tirx.AllocBuffer) or collect(lanes.body, tirx.While):
        return True
    if any(_is_one_bfloat16(s.value, lanes.loop_var) for s in collect(lanes.body, tirx.BufferStore)):
        return True
    return any(loop.kind != SERIAL or mentions(loop.extent, [lanes.loop_var]) for loop in inner)


def _is_one_bfloat16(value: ir.Expr, lane: Var) -> bool:
    """Whether all lanes store the same bfloat16 number."""
    return str(value.ty.dtype) == "bfloat16" and not mentions(value, [lane])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ScalarizeLoops")
def ScalarizeLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Make serial loops of the vector loops of a function that are none."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.For:
        inner = mutator.default_mutate(node)
        if node.kind != VECTORIZED or not _differ(node):
            return inner
        return with_(inner, kind=SERIAL)

    body = structural_mutate(func.body, [(tirx.For, on_for)])
    return with_body(func, body)
