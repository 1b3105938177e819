# SPDX-License-Identifier: Apache-2.0
"""Nests of loops that dot products and tiles replace, and the masks and interleaved rows of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.intrin.vectors import LANES
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import all_same, mentions
from sparsetir.ir.views import cast, const

WORD = f"int32x{LANES}"


@dataclass(frozen=True, eq=False)
class Product:
    """A nest of loops that adds a product to a result: loops outside in, the store, its factors and its guards.

    Only `b`, which counts as zero where `b_guard` does not hold, moves along the innermost loop.
    """

    loops: list[tirx.For]
    store: tirx.BufferStore
    a: ir.TensorLoad
    b: ir.TensorLoad
    guards: list[ir.Expr]
    b_guard: ir.Expr | None


def uncast(expr: Any) -> Any:
    """Return an expression without conversions around it."""
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def is_zero(expr: Any) -> bool:
    """Return whether an expression is the constant zero."""
    value = uncast(expr)
    return isinstance(value, (tirx.IntImm, tirx.FloatImm)) and float(value.value) == 0


def parse(loop: tirx.For) -> Product | None:
    """Return the nest of a loop whose only statement adds a product; None if it is another one."""
    loops, guards, body = [], [], loop
    while isinstance(body, (tirx.For, tirx.IfThenElse)):
        if isinstance(body, tirx.For):
            loops.append(body)
            body = body.body
        elif body.else_case is None:
            guards.append(body.condition)
            body = body.then_case
        else:
            return None
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, tirx.Add) or len(loops) < 2:
        return None
    own, term = body.value.a, uncast(body.value.b)
    is_own = isinstance(own, ir.TensorLoad) and own.source.same_as(body.buffer)
    is_own = is_own and all_same(own.indices, body.indices)
    return _factors(loops, guards, body, term) if is_own and isinstance(term, tirx.Mul) else None


def _factors(loops: list[tirx.For], guards: list[Any], store: tirx.BufferStore, term: tirx.Mul) -> Product | None:
    column = loops[-1].loop_var
    sides = [uncast(term.a), uncast(term.b)]
    if not mentions(sides[1], [column]):
        sides.reverse()
    a, b = sides
    b_guard = None
    if dialect.is_if_then_else(b):
        if not is_zero(b.args[2]):
            return None
        b_guard, b = b.args[0], uncast(b.args[1])
    if not isinstance(a, ir.TensorLoad) or not isinstance(b, ir.TensorLoad) or mentions(a, [column]):
        return None
    return Product(loops, store, a, b, guards, b_guard)


def as_nest(block: Any) -> tirx.Stmt:
    """Return the loops of a stage-II block."""
    nest: tirx.Stmt = block.body
    for iv in reversed(block.iter_vars):
        nest = tirx.For(iv.var, const(0, str(iv.var.ty.dtype)), iv.dom.extent, tirx.ForKind.SERIAL, nest)
    return nest


def mask(first: int, count: int, left: Any, dtype: str) -> Any:
    """Return the bits of the `count` columns from `first` on that exist, of `left` (None: all)."""
    if left is None:
        return const(-1, dtype)
    here = tirx.max(tirx.min(cast(left, dtype) - const(first, dtype), const(count, dtype)), const(0, dtype))
    some = (const(1, dtype) << tirx.min(here, const(count - 1, dtype))) - const(1, dtype)
    return tirx.Select(here >= const(count, dtype), const(-1, dtype), some)


def bind(out: list[tirx.Stmt], name: str, value: Any, dtype: str | None = None) -> Var:
    """Append the definition of a variable, and return it."""
    var = Var(name, ir.PrimType(dtype or str(value.ty.dtype)))
    out.append(tirx.Bind(var, value))
    return var


def interleaved(out: list[tirx.Stmt], kind: str, rows: list[Var]) -> list[Var]:
    """Append what interleaves rows of the dense operand, and return the vectors."""

    def pair(width: int, a: Var, b: Var) -> list[Var]:
        calls = (tirx.call_extern(WORD, f"st_{half}{width}_{kind}", a, b) for half in ("lo", "hi"))
        return [bind(out, "x", call, WORD) for call in calls]

    if kind == "bf16":
        return pair(16, rows[0], rows[1])
    (a, b), (c, d) = pair(8, rows[0], rows[1]), pair(8, rows[2], rows[3])
    return [*pair(16, a, c), *pair(16, b, d)]


__all__ = ["WORD", "Product", "as_nest", "bind", "interleaved", "is_zero", "mask", "parse", "uncast"]
