# SPDX-License-Identifier: Apache-2.0
"""Divide by one where a size is zero: the loops around run zero times then, but LLVM may divide before it enters them.

before::

    for i_s in T.parallel(m * width):
        c[i_s // width, i_s % width] = ...

after::

    for i_s in T.parallel(m * width):
        c[i_s // T.max(width, 1), i_s % T.max(width, 1)] = ...
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx

from sparsetir.ir import const
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate

DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def _divisor(size: ir.Expr, params: set[Any]) -> ir.Expr:
    """`size`, or one where a size of the program is zero; numbers that a program computes are its own affair."""
    dtype = str(size.ty.dtype)
    if isinstance(size, tirx.IntImm) or not dtype.startswith("int") or collect(size, ir.TensorLoad):
        return size
    if not all(v in params for v in collect(size, ir.Var)) or sym.Analyzer().can_prove(size >= const(1, dtype)):
        return size
    return tirx.max(size, const(1, dtype))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardDivisions")
def GuardDivisions(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Guard the integer divisions of a function by its sizes."""
    params = {p for p in func.params if not tirx.is_buffer_var(p)}
    params |= {v for p in func.params if tirx.is_buffer_var(p) for d in p.ty.shape for v in collect(d, ir.Var)}

    def on_division(node: Any, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(node)
        divisor = _divisor(inner.b, params)
        return inner if divisor is inner.b or divisor.same_as(inner.b) else type(inner)(inner.a, divisor)

    body = structural_mutate(func.body, [(kind, on_division) for kind in DIVISIONS])
    return with_body(func, body)
