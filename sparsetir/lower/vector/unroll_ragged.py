# SPDX-License-Identifier: Apache-2.0
"""Unroll a loop of unknown length: full groups without a check, then the rest.

before::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.unroll": 4}):
        body(j)

after::

    for j_0 in range((indptr[i + 1] - indptr[i]) // 4):
        for j_1 in T.unroll(4):
            body(j_0 * 4 + j_1)
    for j in range((indptr[i + 1] - indptr[i]) % 4):
        body((indptr[i + 1] - indptr[i]) // 4 * 4 + j)
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.rewriting import renewed, substitute

UNROLL = "sparsetir.unroll"


def unroll(loop: tirx.For) -> tirx.Stmt:
    """`loop` in groups of its annotation."""
    factor = int(loop.annotations[UNROLL])
    notes = {k: v for k, v in loop.annotations.items() if k != UNROLL}
    if factor <= 1:
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, None, notes)
    var, dtype = loop.loop_var, str(loop.loop_var.ty.dtype)
    zero, step = const(0, dtype), const(factor, dtype)
    group, lane, rest = (Var(f"{var.name}_{n}", var.ty) for n in range(3))
    groups = tirx.floordiv(loop.extent, step)
    inner = substitute(loop.body, {var: group * step + lane})
    unrolled = tirx.For(lane, zero, step, tirx.ForKind.UNROLLED, inner)
    main = tirx.For(group, zero, groups, tirx.ForKind.SERIAL, unrolled, None, notes)
    tail = renewed(substitute(loop.body, {var: groups * step + rest}))
    return tirx.SeqStmt([main, tirx.For(rest, zero, tirx.floormod(loop.extent, step), tirx.ForKind.SERIAL, tail)])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.UnrollRagged")
def UnrollRagged(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Unroll every annotated loop of a function."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        return unroll(inner) if UNROLL in inner.annotations else inner

    body = tvm_ffi.structural_mutate(func.body, [(tirx.For, on_for)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
