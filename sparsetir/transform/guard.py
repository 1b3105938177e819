# SPDX-License-Identifier: Apache-2.0
"""Run a body only where a condition holds."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import cast
from sparsetir.lower.nests import Update
from sparsetir.lower.rewriting import mentions


def guarded_init(condition: ir.Expr, init: tirx.Stmt | None, moved: Sequence[Var]) -> tirx.Stmt | None:
    """`init` where `condition` holds, if the condition's variables `moved` matter to it."""
    if init is None or not mentions(init, moved):
        return init
    return tirx.IfThenElse(condition, init, None)


def below(coord: ir.Expr, length: ir.Expr) -> ir.Expr:
    """Whether a coordinate that is not negative lies inside its axis."""
    return coord < cast(length, str(coord.ty.dtype))


def guarded(condition: ir.Expr, body: tirx.Stmt, moved: Sequence[Var]) -> tirx.Stmt:
    """`body` where `condition` holds.

    A sum stays a single store, the form that TVM's primitives take for a reduction, if its element does not depend
    on the variables `moved` that the condition is about.
    """
    update = Update.of(body)
    if update is None or mentions(update.indices, moved):
        return tirx.IfThenElse(condition, body, None)
    term = tirx.if_then_else(condition, update.term, tirx.const(0, str(update.term.ty.dtype)))
    return tirx.BufferStore(update.store.buffer, update.own + term, update.indices)
