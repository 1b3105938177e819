# SPDX-License-Identifier: Apache-2.0
"""Minima and maxima of floats that are NaN where an operand is, as numpy's and those of IEEE 754.

before::

    c[i] = T.max(c[i], a[p])

after::

    c[i] = T.Select(a[p] >= T.float32("-inf"), T.max(a[p], c[i]), a[p])
    y[j] = T.max(T.float32(0), x[j])                                      # for T.max(x[j], T.float32(0))

LLVM's code for TVM's ``T.max(x, y)`` compares, and takes y where a comparison with NaN fails: NaN in the first operand
is lost. What a reduction finds would depend on the order of its steps, which loops and formats choose. Of the two, the
second operand is looked at, in a reduction what is new: no step waits for that.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate

EXTREMES = (tirx.Max, tirx.Min)
PLAIN = (Var, ir.TensorLoad)


def _is_of_floats(node: Any) -> bool:
    return str(node.ty.dtype).startswith(("float", "bfloat"))


def _is_number(expr: Any) -> bool:
    return isinstance(expr.value if isinstance(expr, tirx.Broadcast) else expr, tirx.FloatImm)


def propagating(node: Any) -> Any:
    """A minimum or maximum that is NaN where an operand is."""
    first, second = node.a, node.b
    if _is_number(first):
        return node
    if _is_number(second):
        return type(node)(second, first)
    if not isinstance(second, PLAIN):
        name = Var("value", second.ty)
        return tirx.Let(name, second, propagating(type(node)(first, name)))
    kind, _, lanes = str(node.ty.dtype).partition("x")
    least = tirx.const(-math.inf, kind)
    least = tirx.Broadcast(least, int(lanes)) if lanes else least
    return tirx.Select(second >= least, type(node)(second, first), second)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PropagateNaN")
def PropagateNaN(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Keep NaN in every minimum and maximum of floats."""
    if not any(map(_is_of_floats, [node for kind in EXTREMES for node in collect(func.body, kind)])):
        return func

    def change(node: Any, mutator: Any) -> Any:
        inner = mutator.default_mutate(node)
        return propagating(inner) if _is_of_floats(inner) else inner

    return with_body(func, structural_mutate(func.body, [(kind, change) for kind in EXTREMES]))


__all__ = ["PropagateNaN"]
