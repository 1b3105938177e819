# SPDX-License-Identifier: Apache-2.0
"""Index widening: a small number is added to a subscript in 64 bits, and only the small number changes along a row.

before::

    for j in range(indptr[i + 1] - indptr[i]):
        acc[0] = acc[0] + a[indptr[i] + j] * x[first[i] + T.Cast("int32", offsets[indptr[i] + j])]

after::

    for j in range(indptr[i + 1] - indptr[i]):
        acc[0] = acc[0] + a[indptr[i] + j] * x[T.Cast("int64", first[i]) + T.Cast("int64", offsets[indptr[i] + j])]

LLVM takes the address of ``x[first[i]]`` out of the loop, but not out of a sum of 32 bits that it has to widen.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.ir import cast
from sparsetir.lower.nests import with_body
from sparsetir.walks import structural_mutate

WIDE = "int64"


def _is_small(expr: ir.Expr) -> bool:
    """Whether an expression is a loaded number of fewer bits, made wider."""
    return isinstance(expr, tirx.Cast) and isinstance(expr.value, ir.TensorLoad) and expr.value.ty.dtype.bits < 32


def _widened(index: ir.Expr) -> ir.Expr:
    if (
        not isinstance(index, tirx.Add)
        or str(index.ty.dtype) != "int32"
        or not (_is_small(index.a) or _is_small(index.b))
    ):
        return index
    return tirx.Add(*(cast(part.value if _is_small(part) else part, WIDE) for part in (index.a, index.b)))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WidenIndices")
def WidenIndices(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Widen the sums that subscript loads of a function."""

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(load)
        return tirx.BufferLoad(inner.source, [_widened(index) for index in inner.indices])

    body = structural_mutate(func.body, [(ir.TensorLoad, on_load)])
    return with_body(func, body)


__all__ = ["WidenIndices"]
