# SPDX-License-Identifier: Apache-2.0
"""Integer divisions that processors stop at: by zero, and of the least number by -1.

A size of zero becomes one: the loops around run zero times then, but LLVM may divide before it enters them. A divisor
out of an array is whatever the user's data are: the result is numpy's, which is zero, and the number that wraps around.

before::

    for i_s in T.parallel(m * width):
        c[i_s // width, i_s % width] = a[...] // b[...]

after::

    for i_s in T.parallel(m * width):
        c[i_s // T.max(width, 1), i_s % T.max(width, 1)] = T.if_then_else(b[...] in (0, -1), ..., a[...] // b[...])
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx

from sparsetir.ir import const
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import DIVISIONS, collect
from sparsetir.walks import structural_mutate


def _divisor(size: ir.Expr, params: set[Any]) -> ir.Expr:
    """`size`, or one where a size of the program is zero; numbers that a program computes are its own affair."""
    dtype = str(size.ty.dtype)
    if isinstance(size, tirx.IntImm) or not dtype.startswith("int"):
        return size
    if not all(v in params for v in collect(size, ir.Var)) or sym.Analyzer().can_prove(size >= const(1, dtype)):
        return size
    return tirx.max(size, const(1, dtype))


def _is_data(divisor: ir.Expr) -> bool:
    """Whether a divisor is an integer out of an array."""
    return str(divisor.ty.dtype).startswith(("int", "uint")) and bool(collect(divisor, ir.TensorLoad))


def _by_data(node: Any) -> ir.Expr:
    """A division by whatever an array holds."""
    a, b, dtype = node.a, node.b, str(node.b.ty.dtype)
    zero, is_zero = const(0, dtype), b.equal(const(0, dtype))
    if dtype.startswith("uint"):
        return tirx.if_then_else(is_zero, zero, type(node)(a, tirx.max(b, const(1, dtype))))
    is_minus = b.equal(const(-1, dtype))
    stops = tirx.Or(is_zero, is_minus)
    plain = type(node)(a, tirx.Select(stops, const(1, dtype), b))
    if isinstance(node, (tirx.FloorMod, tirx.Mod)):
        return tirx.if_then_else(stops, zero, plain)
    unsigned = f"u{dtype}"
    negated = tirx.Cast(dtype, tirx.Cast(unsigned, tirx.bitwise_not(a)) + const(1, unsigned))  # wraps around
    return tirx.if_then_else(is_zero, zero, tirx.if_then_else(is_minus, negated, plain))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardDivisions")
def GuardDivisions(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Guard the integer divisions of a function by its sizes and by data."""
    params = {p for p in func.params if not tirx.is_buffer_var(p)}
    params |= {v for p in func.params if tirx.is_buffer_var(p) for d in p.ty.shape for v in collect(d, ir.Var)}

    def on_division(node: Any, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(node)
        if _is_data(inner.b):
            return _by_data(inner)
        divisor = _divisor(inner.b, params)
        return inner if divisor is inner.b or divisor.same_as(inner.b) else type(inner)(inner.a, divisor)

    body = structural_mutate(func.body, [(kind, on_division) for kind in DIVISIONS])
    return with_body(func, body)


__all__ = ["GuardDivisions"]
