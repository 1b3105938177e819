# SPDX-License-Identifier: Apache-2.0
"""Vectorizable math functions: arithmetic for functions that LLVM only provides as scalar library calls.

before::

    y[j] = T.exp(x[j])

after::

    n = rint(min(max(x[j], -104), 89) * log2(e))
    r = x[j] - n * log(2)                                        # in two steps: n * hi is exact
    y[j] = polynomial(r) * 2 ** (n // 2) * 2 ** (n - n // 2)     # two factors: the result may be subnormal

The exponential is within one unit in the last place of the true value in float32 and float64 on targets that multiply
and add at once (two elsewhere), subnormal results included. It is infinite or zero exactly where the true value rounds
to infinity or zero, and propagates NaN. Every step is a multiply-add intrinsic or a single operation, so the result
does not change where a target may reassociate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.loops import with_body

EXP = "tirx.exp"
LOG2_10 = (3.321928094887362, 1.661617516973592e-16)  # their sum is the binary logarithm of ten
SERIES = 19  # last power of the series of sinh; the next term is below the rounding of float64 for numbers up to 1


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format and the constants of the exponential in it.

    Results are zero at ``least`` and infinite at ``most``, both slightly beyond the bound;
    ``high`` and ``low`` sum to log(2), where ``high`` has trailing zero bits so that its product with an integer is
    exact; the polynomial begins with its highest power.
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
    "float32": FloatFormat(
        "int32", 23, 127, -104.0, 89.0, 0.693359375, -2.12194440054690583e-4,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1, 1),
    ),
    "float64": FloatFormat(
        "int64", 52, 1023, -746.0, 710.0, 6.93145751953125e-1, 1.42860682030941723212e-6,
        tuple(1 / math.factorial(k) for k in range(13, -1, -1)),
    ),
}  # fmt: skip


def exp(x: ir.Expr) -> ir.Expr:
    """Return arithmetic for the exponential of a float32 or float64 number."""
    dtype = str(x.ty.dtype)
    form = FORMATS[dtype]
    value = lambda v: tirx.const(v, dtype)  # noqa: E731
    call = lambda name, *args: tirx.call_llvm_pure_intrin(dtype, f"llvm.{name}", *args)  # noqa: E731
    argument, bounded, whole, rest = (Var(name, x.ty) for name in ("x", "bounded", "whole", "rest"))
    power = Var("power", ir.PrimType("int32"))

    def two_to(exponent: ir.Expr) -> ir.Expr:
        bits = tirx.Cast(form.integer, exponent) if form.integer != "int32" else exponent
        shifted = tirx.shift_left(bits + const(form.bias, form.integer), const(form.mantissa, form.integer))
        return tirx.reinterpret(dtype, shifted)

    total: ir.Expr = value(form.polynomial[0])
    for coefficient in form.polynomial[1:]:
        total = call("fmuladd", total, rest, value(coefficient))
    half = tirx.shift_right(power, const(1))
    # A multiply-add, not a product, so that reassociation cannot multiply the two powers of two first.
    scaled = call("fmuladd", total, two_to(half), value(0.0)) * two_to(power - half)
    result = tirx.Select(argument >= value(-math.inf), scaled, argument)
    reduced = call("fmuladd", whole, value(-form.low), call("fmuladd", whole, value(-form.high), bounded))
    steps = [
        (power, tirx.Cast("int32", whole)),
        (rest, reduced),
        (whole, call("rint", bounded * value(math.log2(math.e)))),
        (bounded, tirx.Select(argument > value(form.least), tirx.Min(argument, value(form.most)), value(form.least))),
        (argument, x),
    ]
    for name, meaning in steps:
        result = tirx.Let(name, meaning, result)
    return result


def _tanh_series(terms: int) -> list[float]:
    """Return the coefficients of odd powers, which follow from ``tanh' = 1 - tanh**2``."""
    series = [1.0]
    for n in range(1, terms):
        series.append(-sum(series[i] * series[n - 1 - i] for i in range(n)) / (2 * n + 1))
    return series


TANH_SERIES = _tanh_series(13)


def cosh(x: ir.Expr) -> ir.Expr:
    """Compute cosh from exponentials of half the number, which do not overflow before the result does."""
    return _halves(x, lambda up, down, _: up + down)


def sinh(x: ir.Expr) -> ir.Expr:
    """Compute sinh from exponentials like `cosh`, and for small numbers, where digits would cancel, by the series."""

    def difference(up: ir.Expr, down: ir.Expr, argument: Var) -> ir.Expr:
        value = lambda v: tirx.const(v, str(argument.ty.dtype))  # noqa: E731
        square, total = argument * argument, value(1 / math.factorial(SERIES))
        for power in range(SERIES - 2, 0, -2):
            total = total * square + value(1 / math.factorial(power))
        return tirx.Select(square < value(1.0), total * argument, up - down)

    return _halves(x, difference)


def tanh(x: ir.Expr) -> ir.Expr:
    """Compute tanh from an exponential, and for small numbers, where that loses digits, by its series."""

    def near_zero(argument: Var, square: ir.Expr) -> ir.Expr:
        return _series(argument, square, lambda power: TANH_SERIES[power // 2], {"float32": 9, "float64": 25})

    def far(argument: ir.Expr) -> ir.Expr:
        return value(1.0) - value(2.0) / (tirx.exp(value(2.0) * argument) + value(1.0))

    value = lambda v: tirx.const(v, str(x.ty.dtype))  # noqa: E731
    return _near_zero(x, near_zero, far)


def atanh(x: ir.Expr) -> ir.Expr:
    """Compute atanh by TVM's function, and for small numbers by the series."""
    last = {"float32": 13, "float64": 27}
    return _near_zero(x, lambda argument, square: _series(argument, square, lambda power: 1 / power, last), tirx.atanh)


def _near_zero(x: ir.Expr, near: Callable[[Var, ir.Expr], ir.Expr], far: Callable[[ir.Expr], ir.Expr]) -> ir.Expr:
    """Select `near`, which also takes the square, for magnitudes below a quarter, and `far` for others."""
    if str(x.ty.dtype) not in FORMATS:
        return far(x)
    argument, square = Var("x", x.ty), Var("square", x.ty)
    is_near = square < tirx.const(1 / 16, str(x.ty.dtype))
    return tirx.Let(
        argument, x, tirx.Let(square, argument * argument, tirx.Select(is_near, near(argument, square), far(argument)))
    )


def _series(argument: ir.Expr, square: ir.Expr, coefficient: Callable[[int], float], last: dict[str, int]) -> ir.Expr:
    """Return a sum of odd powers up to the one that `last` gives for the dtype."""
    dtype = str(argument.ty.dtype)
    total: ir.Expr = tirx.const(coefficient(last[dtype]), dtype)
    for power in range(last[dtype] - 2, 0, -2):
        total = total * square + tirx.const(coefficient(power), dtype)
    return total * argument


def exp10(x: ir.Expr) -> ir.Expr:
    """Compute 10**x as a power of two, corrected by the rounding error of its exponent."""
    dtype = str(x.ty.dtype)
    if dtype not in FORMATS:
        return tirx.exp10(x)
    value = lambda v: tirx.const(v, dtype)  # noqa: E731
    high = float(np.dtype(dtype).type(LOG2_10[0]))
    low = LOG2_10[0] - high + LOG2_10[1]
    argument, power = Var("x", x.ty), Var("power", x.ty)
    rest = tirx.call_llvm_pure_intrin(dtype, "llvm.fma", argument, value(high), -power) + argument * value(low)
    factor = tirx.Select(argument * argument < value(1e6), value(1.0) + rest * value(math.log(2)), value(1.0))
    return tirx.Let(argument, x, tirx.Let(power, argument * value(high), tirx.exp2(power) * factor))


def _halves(x: ir.Expr, of: Callable[[ir.Expr, ir.Expr, Var], ir.Expr]) -> ir.Expr:
    """Apply a function to half of exp(x), half of exp(-x), and x."""
    argument, root = Var("x", x.ty), Var("root", x.ty)
    dtype = str(x.ty.dtype)
    half, zero = tirx.const(0.5, dtype), tirx.const(0.0, dtype)
    # A multiply-add, as in `exp`: reassociation must not square the root first, which may overflow.
    up = tirx.call_llvm_pure_intrin(dtype, "llvm.fmuladd", half * root, root, zero)
    result = of(up, half / root / root, argument)
    return tirx.Let(argument, x, tirx.Let(root, tirx.exp(half * argument), result))


# Functions without vector code in LLVM; TVM's versions of the last three lose digits.
MISSING: dict[str, Callable[[ir.Expr], ir.Expr]] = {
    "tirx.sinh": sinh, "tirx.cosh": cosh, "tirx.tanh": tanh, "tirx.atanh": atanh, "tirx.exp10": exp10,
}  # fmt: skip


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ReplaceMissing")
def ReplaceMissing(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Replace functions that LLVM cannot vectorize by expressions of others."""
    if not any(str(getattr(call.op, "name", "")) in MISSING for call in collect(func.body, ir.Call)):
        return func

    def on_call(call: ir.Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        make = MISSING.get(str(getattr(inner.op, "name", "")))
        return inner if make is None else make(inner.args[0])

    return with_body(func, structural_mutate(func.body, [(ir.Call, on_call)]))


def is_exp(node: Any) -> bool:
    """Return whether a node is an exponential that `exp` can replace."""
    is_named = isinstance(node, ir.Call) and str(getattr(node.op, "name", "")) == EXP
    return is_named and str(node.ty.dtype) in FORMATS


def expand(node: Any) -> Any:
    """Replace every exponential in `node` by arithmetic."""

    def on_call(call: ir.Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        return exp(inner.args[0]) if is_exp(inner) else inner

    return structural_mutate(node, [(ir.Call, on_call)])


__all__ = ["FORMATS", "MISSING", "ReplaceMissing", "exp", "expand", "is_exp", "tanh"]
