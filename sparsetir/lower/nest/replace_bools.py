# SPDX-License-Identifier: Apache-2.0
"""Compute with bools as numpy does: sums are or, products are and.

before::

    C[i, k] = C[i, k] + A[i, j] * B[j, k]           # of bool buffers
    D[i] = T.max(D[i], A[i, j])
    E[i] = A[i, j] == B[j, k]
    F[i] = T.Cast("bool", T.float32(-3) / T.float32(2))

after::

    C[i, k] = C[i, k] or A[i, j] and B[j, k]
    D[i] = D[i] or A[i, j]
    E[i] = T.Cast("uint8", A[i, j]) == T.Cast("uint8", B[j, k])
    F[i] = T.float32(-3) / T.float32(2) != T.float32(0)

TVM accepts such arithmetic in a program, but has no machine code for it, nor a bool for a constant such as -1.5.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const, decode
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate

LOGIC = {tirx.Add: tirx.Or, tirx.Max: tirx.Or, tirx.Mul: tirx.And, tirx.Min: tirx.And}
COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def _replaced(expr: Any, mutator: Any) -> Any:
    inner = mutator.default_mutate(expr)
    if str(inner.a.ty.dtype) != "bool":
        return inner
    if isinstance(inner, COMPARISONS):
        return type(inner)(tirx.Cast("uint8", inner.a), tirx.Cast("uint8", inner.b))
    return LOGIC[type(inner)](inner.a, inner.b)


def _truth(cast: tirx.Cast, mutator: Any) -> Any:
    inner = mutator.default_mutate(cast)
    dtype = str(inner.value.ty.dtype)
    if str(inner.ty.dtype) != "bool" or dtype == "bool" or collect(inner.value, Var):
        return inner
    return tirx.NE(inner.value, const(0, dtype))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ReplaceBools")
def ReplaceBools(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Replace the arithmetic of bools in a stage-I function."""
    if not decode(func).axes:
        return func
    return with_body(func, as_logic(func.body))


def as_logic(node: Any) -> Any:
    """A statement or an expression without arithmetic of bools."""
    callbacks = [*((kind, _replaced) for kind in (*LOGIC, *COMPARISONS)), (tirx.Cast, _truth)]
    return structural_mutate(node, callbacks)


__all__ = ["ReplaceBools", "as_logic"]
