# SPDX-License-Identifier: Apache-2.0
"""Vectorizable arithmetic for math functions that LLVM only calls per scalar, in kernels of TVM's own Relax operators.

before::

    y[i] = T.sigmoid(x[i])

after::

    y[i] = T.float32(1) / (T.float32(1) + exponential(-x[i]))     # arithmetic, which vectors can do
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import collect, same
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.iterations.normalize import with_nan
from sparsetir.lower.loops import with_body
from sparsetir.lower.vector import vector_math
from sparsetir.lower.vector.vector_math import FORMATS, MISSING, expand
from sparsetir.relax.epilogues import ERF_TERMS


def _number(x: ir.Expr, value: float) -> ir.Expr:
    return tirx.const(value, str(x.ty.dtype))


def sigmoid(x: ir.Expr) -> ir.Expr:
    """Return ``1 / (1 + exp(-x))``."""
    return _number(x, 1) / (_number(x, 1) + tirx.exp(_number(x, 0) - x))


def tanh(x: ir.Expr) -> ir.Expr:
    """Return ``1 - 2 / (exp(2 x) + 1)``, or a series for small arguments."""
    return vector_math.tanh(x, _large_tanh)


def _large_tanh(x: ir.Expr) -> ir.Expr:
    return _number(x, 1) - _number(x, 2) / (tirx.exp(_number(x, 2) * x) + _number(x, 1))


def erf(x: ir.Expr) -> ir.Expr:
    """Return erf by Abramowitz and Stegun 7.1.26, as in epilogues."""
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
    "tirx.erf": erf,
    **MISSING,
    "tirx.tanh": tanh,
}


def _is_float(expr: Any) -> bool:
    return str(expr.ty.dtype).startswith("float")


def _ordered(node: tirx.Max, mutator: Any) -> ir.Expr:
    """Reorder the operands of a maximum so that NaN propagates."""
    inner = mutator.default_mutate(node)
    is_swapped = _is_float(inner) and isinstance(inner.b, tirx.FloatImm) and not isinstance(inner.a, tirx.FloatImm)
    return tirx.Max(inner.b, inner.a) if is_swapped else inner


def _of_maximum(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
    """Rewrite an update of a maximum to propagate NaN, and its initial value to minus infinity."""
    inner = mutator.default_mutate(node)
    value, element = inner.value, tirx.BufferLoad(node.buffer, node.indices)
    if isinstance(value, tirx.FloatImm) and value.value == tirx.min_value(str(value.ty.dtype)).value:
        return tirx.BufferStore(node.buffer, tirx.const(-math.inf, str(value.ty.dtype)), node.indices)
    if not isinstance(value, tirx.Max) or not _is_float(value) or not same(value.a, element):
        return inner
    return tirx.BufferStore(node.buffer, tirx.Select(tirx.isnan(element), element, value), node.indices)


def in_arithmetic(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Expand calls of the functions to arithmetic, except erf in float64, for which the formula is not accurate enough.

    Functions of bfloat16 are not expanded: TVM reads it as an integer in expressions with bound names.
    """
    func = with_body(func, with_nan(func.body))
    func = with_body(func, structural_mutate(func.body, [(tirx.Max, _ordered), (tirx.BufferStore, _of_maximum)]))
    if any(str(load.ty.dtype) == "bfloat16" for load in collect(func.body, ir.TensorLoad)):
        return func

    def on_call(call: ir.Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        name, dtype = str(getattr(inner.op, "name", "")), str(getattr(inner.ty, "dtype", ""))
        is_known = name in ("tirx.sinh", "tirx.cosh") or (name in FUNCTIONS and dtype in FORMATS)
        if not is_known or (name == "tirx.erf" and dtype == "float64"):
            return inner
        return FUNCTIONS[name](inner.args[0])

    body = expand(structural_mutate(func.body, [(ir.Call, on_call)]))
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


__all__ = ["FUNCTIONS", "erf", "in_arithmetic", "sigmoid", "tanh"]
