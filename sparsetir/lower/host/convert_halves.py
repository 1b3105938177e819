# SPDX-License-Identifier: Apache-2.0
"""Conversions from and to bfloat16 as arithmetic on bits, in functions with bound names.

before::

    y[j] = T.Cast("bfloat16", T.Let(x * x, where={x: T.Cast("float32", a[i])}))

after::

    y[j] = T.reinterpret("bfloat16", T.Cast("uint16", T.Let(
        bits + (bits >> 16 & 1) + 0x7FFF >> 16, where={bits: T.reinterpret("uint32", T.Let(
            x * x, where={x: T.reinterpret("float32", T.Cast("uint32", T.reinterpret("uint16", a[i])) << 16)}))})))

TVM writes conversions in the same way, but not those in the meaning of a name, where it would read the bits as an
integer, and it rounds an expression that it names twice, with all names in it.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate

KIND = "bfloat16"
BITS = 16  # of a float32 that a bfloat16 drops


def _kind(expr: ir.Expr) -> tuple[str, str]:
    """The dtype of one lane, and what stands behind it for several."""
    name, times, lanes = str(expr.ty.dtype).partition("x")
    return name, times + lanes


def _unsigned(value: int, lanes: str) -> ir.Expr:
    one = tirx.const(value, "uint32")
    return tirx.Broadcast(one, int(lanes[1:])) if lanes else one


def widened(value: ir.Expr, lanes: str) -> ir.Expr:
    """A bfloat16 number as float32."""
    bits = tirx.Cast(f"uint32{lanes}", tirx.reinterpret(f"uint16{lanes}", value))
    return tirx.reinterpret(f"float32{lanes}", tirx.shift_left(bits, _unsigned(BITS, lanes)))


def rounded(value: ir.Expr, lanes: str) -> ir.Expr:
    """The bfloat16 number nearest to a float32, the even one of two."""
    bits = Var("bits", ir.PrimType(f"uint32{lanes}"))
    is_odd = tirx.bitwise_and(tirx.shift_right(bits, _unsigned(BITS, lanes)), _unsigned(1, lanes))
    total = bits + (is_odd + _unsigned((1 << BITS - 1) - 1, lanes))
    half = tirx.Cast(f"uint16{lanes}", tirx.shift_right(total, _unsigned(BITS, lanes)))
    return tirx.reinterpret(f"{KIND}{lanes}", tirx.Let(bits, tirx.reinterpret(f"uint32{lanes}", value), half))


def converted(value: ir.Expr, wanted: str) -> ir.Expr:
    """Convert an expression to another dtype of one lane.

    Both branches of a choice are converted: LLVM's code for TVM chooses between no bfloat16.
    """
    given, lanes = _kind(value)
    if given == wanted or KIND not in (given, wanted):
        return tirx.Cast(f"{wanted}{lanes}", value)
    if given == KIND and op.is_if_then_else(value):
        condition, first, second = value.args
        return tirx.if_then_else(condition, converted(first, wanted), converted(second, wanted))
    if given == KIND and isinstance(value, tirx.FloatImm):
        return tirx.const(float(value.value), wanted)
    if wanted == KIND:
        return rounded(value if given == "float32" else tirx.Cast(f"float32{lanes}", value), lanes)
    wide = widened(value, lanes)
    return wide if wanted == "float32" else tirx.Cast(f"{wanted}{lanes}", wide)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ConvertHalves")
def ConvertHalves(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Write out the conversions of a function that binds names in expressions."""
    if not collect(func.body, tirx.Let):
        return func

    def on_cast(cast: tirx.Cast, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(cast)
        return converted(inner.value, _kind(inner)[0])

    return with_body(func, structural_mutate(func.body, [(tirx.Cast, on_cast)]))


__all__ = ["ConvertHalves"]
