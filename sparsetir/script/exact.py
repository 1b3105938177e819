# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of floats in scripts as written: TVM folds products with zero, which lose infinities and NaN.

TVM's operators make ``0`` of ``x * 0.0`` and ``0.0 / x``, and refuse ``x / 0.0``. Scripts of the dialect are evaluated
by `ExactEvaluator`, which builds these nodes as they are; scripts of other dialects keep TVM's evaluation. The pass
`CompareNaN` keeps later simplifications of TVM from folding them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var
from tvm.script.parser.core import doc
from tvm.script.parser.core.evaluator import DEFAULT_OP, ExprEvaluator
from tvm.script.parser.core.parser import Parser, ScriptMacro

from sparsetir.ir.rewriting import substitute

NODES: dict[type, Any] = {doc.Add: tirx.Add, doc.Sub: tirx.Sub, doc.Mult: tirx.Mul, doc.Div: tirx.Div}
PROBE = 3  # a factor that TVM does not fold


class ExactEvaluator(ExprEvaluator):
    """TVM's evaluator of expressions, without its folding of floats."""

    def _eval_bin_op(self, fields: dict[str, Any]) -> Any:
        left, right = self._eval_expr(fields["left"]), self._eval_expr(fields["right"])
        kind = type(fields["op"])
        if kind in NODES and _is_folded(left, right):
            node = build_exactly(DEFAULT_OP[kind], NODES[kind], left, right)
            if node is not None:
                return node
        return super()._eval_bin_op(fields)


def evaluate(parser: Parser, node: Any, extra_vars: dict[str, Any] | None = None) -> Any:
    """As `Parser.eval_expr`, with exact arithmetic of floats."""
    table = parser.var_table.get()
    table.update(extra_vars or {})
    table[ScriptMacro.parser_object_name] = parser
    evaluator = ExactEvaluator(parser, table)
    result = evaluator._visit(node)
    value = result.value if isinstance(result, doc.Constant) else evaluator._eval_expr(result)
    return parser.annotate_current_source_span(value)


def _is_folded(left: Any, right: Any) -> bool:
    """Return whether TVM may fold an operation in a way that is right for finite numbers only."""
    if not any(isinstance(x, ir.Expr) for x in (left, right)):
        return False
    if any(not isinstance(x, (ir.Expr, int, float)) for x in (left, right)):
        return False
    is_same = isinstance(left, ir.Expr) and isinstance(right, ir.Expr) and left.same_as(right)
    return is_same or any(_is_special(x) for x in (left, right))


def _is_special(value: Any) -> bool:
    """Return whether a constant is zero, an infinity or NaN."""
    if isinstance(value, (tirx.FloatImm, tirx.IntImm)):
        value = value.value
    return isinstance(value, (int, float)) and (value == 0 or not math.isfinite(value))


def build_exactly(operator: Callable[[Any, Any], Any], kind: Any, left: Any, right: Any) -> ir.Expr | None:
    """Build an operation on floats without folding; None for other types.

    TVM's own operator converts the types of two operands that it cannot fold, which are then replaced.
    """
    if any(_dtype(x) == "" for x in (left, right)):
        return None
    probes: list[Any] = [Var("probe", x.ty) if isinstance(x, ir.Expr) else type(x)(PROBE) for x in (left, right)]
    node: Any = operator(*probes)
    if not isinstance(node, kind) or "float" not in str(node.ty.dtype):
        return None
    parts = zip((node.a, node.b), probes, (left, right), strict=True)
    a, b = (_replaced(part, probe, value) for part, probe, value in parts)
    return kind(a, _divisor(b) if kind is tirx.Div else b)


def _replaced(part: Any, probe: Any, value: Any) -> ir.Expr:
    """Replace a probe by an operand; a number takes the type that the operator gave the number in its place."""
    return substitute(part, {probe: value}) if isinstance(probe, Var) else tirx.const(value, str(part.ty.dtype))


def _divisor(value: Any) -> ir.Expr:
    """Return a divisor; a constant zero as the cast of another type's, because TVM cannot print a division by zero."""
    if not isinstance(value, tirx.FloatImm) or value.value != 0:
        return value
    dtype = str(value.ty.dtype)
    return tirx.Cast(dtype, tirx.const(value.value, "float32" if dtype == "float64" else "float64"))


def _dtype(value: Any) -> str:
    """Return the dtype of a number, or the name of a Python type; empty for what is no scalar."""
    if not isinstance(value, ir.Expr):
        return type(value).__name__
    return str(getattr(value.ty, "dtype", "")) if isinstance(value.ty, ir.PrimType) else ""


__all__ = ["ExactEvaluator", "build_exactly", "evaluate"]
