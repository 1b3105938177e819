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
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.marks import UNROLL
from sparsetir.lower.nests import each_loop, serial, unrolled, with_, without
from sparsetir.lower.rewriting import renewed, substitute


def unroll(loop: tirx.For) -> tirx.Stmt:
    """`loop` in groups of its annotation."""
    factor = int(loop.annotations[UNROLL])
    notes = without(loop, UNROLL)
    if factor <= 1:
        return with_(loop, notes=notes)
    var, dtype = loop.loop_var, str(loop.loop_var.ty.dtype)
    step = const(factor, dtype)
    group, lane, rest = (Var(f"{var.name}_{n}", var.ty) for n in range(3))
    groups = tirx.floordiv(loop.extent, step)
    inner = unrolled(lane, factor, substitute(loop.body, {var: group * step + lane}))
    tail = renewed(substitute(loop.body, {var: groups * step + rest}))
    return tirx.SeqStmt([serial(group, groups, inner, notes), serial(rest, tirx.floormod(loop.extent, step), tail)])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.UnrollRagged")
def UnrollRagged(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Unroll every annotated loop of a function."""

    return each_loop(func, inner=lambda loop: unroll(loop) if UNROLL in loop.annotations else None)
