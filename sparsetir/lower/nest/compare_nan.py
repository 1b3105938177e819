# SPDX-License-Identifier: Apache-2.0
"""Keep TVM from simplifying floats as if infinities and NaN did not exist.

NaN differs from every number, a comparison with it is not its opposite, and a difference of equal floats may be NaN.

before::

    C[i] = A[i] != B[i]
    D[i] = not A[i] < B[i]
    E[i] = A[i] - A[i]
    F[i] = T.float32(0) / A[i]

after::

    C[i] = T.Select(A[i] == B[i], False, True)
    D[i] = T.Select(A[i] < B[i], False, True)
    E[i] = A[i] + A[i] * T.float32(-1)
    F[i] = T.reinterpret("float32", 0) / A[i]

TVM takes ``!=`` for less or greater, which NaN is not, rewrites ``not a < b`` to ``b <= a``, ``a == a`` to true,
``a - a`` to 0, ``(a + b) - b`` to ``a`` and ``0 * a`` to 0. A difference whose sides have no element in common is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import ir, tirx

from sparsetir.ir import const, decode
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect, same
from sparsetir.walks import structural_mutate

COMPARISONS = (tirx.EQ, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
FLOATS = ("float", "bfloat")


def _is_of_floats(comparison: Any) -> bool:
    return str(comparison.a.ty.dtype).startswith(FLOATS)


def opposite(condition: ir.Expr) -> ir.Expr:
    """What holds where `condition` does not, in a form that TVM leaves as it is."""
    return tirx.Select(condition, tirx.const(False, "bool"), tirx.const(True, "bool"))


def _is_nan(value: ir.Expr) -> ir.Expr:
    return tirx.isnan(tirx.Cast("float32", value) if str(value.ty.dtype) == "bfloat16" else value)


def _differs(node: tirx.NE, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    if not _is_of_floats(inner):
        return inner
    return _is_nan(inner.a) if same(inner.a, inner.b) else opposite(tirx.EQ(inner.a, inner.b))


def _equals(node: tirx.EQ, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    return opposite(_is_nan(inner.a)) if _is_of_floats(inner) and same(inner.a, inner.b) else inner


def _negated(node: tirx.Not, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    compared = [c for kind in COMPARISONS for c in collect(inner.a, kind)]
    return opposite(inner.a) if any(_is_of_floats(c) for c in compared) else inner


def _is_float(value: ir.Expr) -> bool:
    return str(getattr(value.ty, "dtype", "")).startswith(FLOATS)


def _subtracted(node: tirx.Sub, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    if not _is_float(inner):
        return inner
    kinds = (ir.TensorLoad, ir.Var)
    left, right = ([x for k in kinds for x in collect(side, k) if _is_float(x)] for side in (inner.a, inner.b))
    cancels = any(same(a, b) for a in left for b in right)
    return tirx.Add(inner.a, tirx.Mul(inner.b, const(-1, str(inner.ty.dtype)))) if cancels else inner


def _is_zero(value: ir.Expr) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value == 0


def _hidden_zero(zero: tirx.FloatImm) -> ir.Expr:
    """A zero of a sign that TVM does not recognise as one; LLVM does."""
    bits = const(int(np.float32(zero.value).view("int32")), "int32")
    value, dtype = tirx.reinterpret("float32", bits), str(zero.ty.dtype)
    return value if dtype == "float32" else tirx.Cast(dtype, value)


def _multiplied(node: Any, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    if _is_float(inner) and (_is_zero(inner.a) or _is_zero(inner.b)):
        return type(node)(*(_hidden_zero(x) if _is_zero(x) else x for x in (inner.a, inner.b)))
    return inner


def with_nan(node: Any) -> Any:
    """A statement or an expression that computes with floats as numpy does."""
    compared = [(tirx.NE, _differs), (tirx.EQ, _equals), (tirx.Not, _negated)]
    computed = [(tirx.Sub, _subtracted), (tirx.Mul, _multiplied), (tirx.Div, _multiplied)]
    return structural_mutate(node, [*compared, *computed])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CompareNaN")
def CompareNaN(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Replace the negated comparisons of floats in a stage-I function."""
    if not decode(func).axes:
        return func
    return with_body(func, with_nan(func.body))


__all__ = ["CompareNaN", "opposite", "with_nan"]
