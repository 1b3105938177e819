# SPDX-License-Identifier: Apache-2.0
"""Functions that LLVM only has as calls for one number at a time, as arithmetic that vectors can do.

before::

    y[j] = T.exp(x[j])

after::

    n = rint(min(max(x[j], -104), 89) * log2(e))
    r = x[j] - n * log(2)                                        # in two steps: n * hi is exact
    y[j] = polynomial(r) * 2 ** (n // 2) * 2 ** (n - n // 2)     # two factors: the result may be subnormal

The exponential is within one unit in the last place of the true value in float32 and float64 on targets that multiply
and add at once (two elsewhere), subnormal results included; it is infinite from where the true value would round to
that, zero likewise, and keeps what is not a number. Every step is a multiply-add intrinsic or stands alone: a target's
leave to reassociate changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.walks import structural_mutate

EXP = "tirx.exp"


@dataclass(frozen=True)
class Format:
    """A floating-point format, and what the exponential needs to know of it.

    ``least`` is where results are zero and ``most`` where they are infinite, both a little beyond the edge;
    ``high`` and ``low`` sum to log(2), the first with zeros for a factor's bits; the polynomial begins with its highest
    power.
    """

    integer: str
    mantissa: int
    bias: int
    least: float
    most: float
    high: float
    low: float
    polynomial: tuple[float, ...]


# float32: the coefficients of Cephes' expf. float64: the series, whose 14th term is below the rounding of the sum.
FORMATS = {
    "float32": Format(
        "int32", 23, 127, -104.0, 89.0, 0.693359375, -2.12194440054690583e-4,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1, 1),
    ),
    "float64": Format(
        "int64", 52, 1023, -746.0, 710.0, 6.93145751953125e-1, 1.42860682030941723212e-6,
        tuple(1 / math.factorial(k) for k in range(13, -1, -1)),
    ),
}  # fmt: skip


def exp(x: ir.Expr) -> ir.Expr:
    """The exponential of a float32 or float64 number."""
    dtype = str(x.ty.dtype)
    form = FORMATS[dtype]
    value = lambda v: tirx.const(v, dtype)  # noqa: E731
    call = lambda name, *args: tirx.call_llvm_pure_intrin(dtype, f"llvm.{name}", *args)  # noqa: E731
    given, bounded, whole, rest = (Var(name, x.ty) for name in ("x", "bounded", "whole", "rest"))
    power = Var("power", ir.PrimType("int32"))

    def two_to(exponent: ir.Expr) -> ir.Expr:
        bits = tirx.Cast(form.integer, exponent) if form.integer != "int32" else exponent
        shifted = tirx.shift_left(bits + const(form.bias, form.integer), const(form.mantissa, form.integer))
        return tirx.reinterpret(dtype, shifted)

    total: ir.Expr = value(form.polynomial[0])
    for coefficient in form.polynomial[1:]:
        total = call("fmuladd", total, rest, value(coefficient))
    half = tirx.shift_right(power, const(1))
    # Not a product: the two powers of two must not be multiplied first.
    scaled = call("fmuladd", total, two_to(half), value(0.0)) * two_to(power - half)
    result = tirx.Select(given >= value(-math.inf), scaled, given)
    reduced = call("fmuladd", whole, value(-form.low), call("fmuladd", whole, value(-form.high), bounded))
    steps = [
        (power, tirx.Cast("int32", whole)),
        (rest, reduced),
        (whole, call("rint", bounded * value(math.log2(math.e)))),
        (bounded, tirx.Select(given > value(form.least), tirx.Min(given, value(form.most)), value(form.least))),
        (given, x),
    ]
    for name, meaning in steps:
        result = tirx.Let(name, meaning, result)
    return result


def is_exp(node: Any) -> bool:
    """Whether a node is an exponential that `exp` can stand for."""
    is_named = isinstance(node, ir.Call) and str(getattr(node.op, "name", "")) == EXP
    return is_named and str(node.ty.dtype) in FORMATS


def expand(node: Any) -> Any:
    """`node` with arithmetic for every function that has some."""

    def on_call(call: ir.Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        return exp(inner.args[0]) if is_exp(inner) else inner

    return structural_mutate(node, [(ir.Call, on_call)])


__all__ = ["FORMATS", "exp", "expand", "is_exp"]
