# SPDX-License-Identifier: Apache-2.0
"""Functions that LLVM only has as calls for one number at a time, in what TVM itself makes of Relax operators.

before::

    y[i] = T.sigmoid(x[i])

after::

    y[i] = T.float32(1) / (T.float32(1) + exponential(-x[i]))     # arithmetic, which vectors can do
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.lower.rewriting import collect
from sparsetir.lower.vector.vector_math import FORMATS, MISSING, expand
from sparsetir.relax.epilogues import ERF_TERMS
from sparsetir.walks import structural_mutate


def _number(x: ir.Expr, value: float) -> ir.Expr:
    return tirx.const(value, str(x.ty.dtype))


def sigmoid(x: ir.Expr) -> ir.Expr:
    """``1 / (1 + exp(-x))``"""
    return _number(x, 1) / (_number(x, 1) + tirx.exp(_number(x, 0) - x))


def tanh(x: ir.Expr) -> ir.Expr:
    """``1 - 2 / (exp(2 x) + 1)``"""
    return _number(x, 1) - _number(x, 2) / (tirx.exp(_number(x, 2) * x) + _number(x, 1))


def erf(x: ir.Expr) -> ir.Expr:
    """Abramowitz and Stegun 7.1.26, as in epilogues."""
    given, size, share = (Var(name, x.ty) for name in ("given", "size", "share"))
    total = _number(x, ERF_TERMS[0])
    for term in ERF_TERMS[1:]:
        total = total * share + _number(x, term)
    positive = _number(x, 1) - total * share * tirx.exp(_number(x, 0) - size * size)
    result = tirx.Select(given < _number(x, 0), _number(x, 0) - positive, positive)
    result = tirx.Let(share, _number(x, 1) / (_number(x, 1) + _number(x, 0.3275911) * size), result)
    return tirx.Let(given, x, tirx.Let(size, tirx.Max(given, _number(x, 0) - given), result))


FUNCTIONS: dict[str, Callable[[ir.Expr], ir.Expr]] = {
    "tirx.sigmoid": sigmoid,
    "tirx.tanh": tanh,
    "tirx.erf": erf,
    **MISSING,
}


def in_arithmetic(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function without calls of those functions; erf stays one in float64, for which the formula is too coarse.

    Functions of bfloat16 are left alone: TVM reads it as an integer in expressions with bound names.
    """
    if any(str(load.ty.dtype) == "bfloat16" for load in collect(func.body, ir.TensorLoad)):
        return func

    def on_call(call: ir.Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        name, dtype = str(getattr(inner.op, "name", "")), str(getattr(inner.ty, "dtype", ""))
        is_known = name in MISSING or (name in FUNCTIONS and dtype in FORMATS)
        if not is_known or (name == "tirx.erf" and dtype == "float64"):
            return inner
        return FUNCTIONS[name](inner.args[0])

    body = expand(structural_mutate(func.body, [(ir.Call, on_call)]))
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


__all__ = ["FUNCTIONS", "erf", "in_arithmetic", "sigmoid", "tanh"]
