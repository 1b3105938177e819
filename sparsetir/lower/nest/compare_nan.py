# SPDX-License-Identifier: Apache-2.0
"""Compare floats as IEEE 754 and numpy do: NaN differs from every number, and a comparison with it is not its opposite.

before::

    C[i] = A[i] != B[i]
    D[i] = not A[i] < B[i]

after::

    C[i] = T.Select(A[i] == B[i], False, True)
    D[i] = T.Select(A[i] < B[i], False, True)

TVM takes ``!=`` for less or greater, which NaN is not, rewrites ``not a < b`` to ``b <= a``, and ``a == a`` to true.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.ir import decode
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect, same
from sparsetir.walks import structural_mutate

COMPARISONS = (tirx.EQ, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
FLOATS = ("float", "bfloat")


def _is_of_floats(comparison: Any) -> bool:
    return str(comparison.a.ty.dtype).startswith(FLOATS)


def _opposite(condition: ir.Expr) -> ir.Expr:
    """What holds where `condition` does not, in a form that TVM leaves as it is."""
    return tirx.Select(condition, tirx.const(False, "bool"), tirx.const(True, "bool"))


def _is_nan(value: ir.Expr) -> ir.Expr:
    return tirx.isnan(tirx.Cast("float32", value) if str(value.ty.dtype) == "bfloat16" else value)


def _differs(node: tirx.NE, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    if not _is_of_floats(inner):
        return inner
    return _is_nan(inner.a) if same(inner.a, inner.b) else _opposite(tirx.EQ(inner.a, inner.b))


def _equals(node: tirx.EQ, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    return _opposite(_is_nan(inner.a)) if _is_of_floats(inner) and same(inner.a, inner.b) else inner


def _negated(node: tirx.Not, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    compared = [c for kind in COMPARISONS for c in collect(inner.a, kind)]
    return _opposite(inner.a) if any(_is_of_floats(c) for c in compared) else inner


def with_nan(node: Any) -> Any:
    """A statement or an expression whose comparisons are as numpy's."""
    return structural_mutate(node, [(tirx.NE, _differs), (tirx.EQ, _equals), (tirx.Not, _negated)])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CompareNaN")
def CompareNaN(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Replace the negated comparisons of floats in a stage-I function."""
    if not decode(func).axes:
        return func
    return with_body(func, with_nan(func.body))


__all__ = ["CompareNaN", "with_nan"]
