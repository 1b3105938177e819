# SPDX-License-Identifier: Apache-2.0
"""Loop unswitching: a condition is tested once, outside the loops that it does not depend on.

before::

    for ii in T.unroll(2):
        for k in T.vectorized(16):
            acc[ii * 16 + k] = acc[ii * 16 + k] + T.if_then_else(indices[p] < n, a[...] * b[indices[p], k], 0)

after::

    if indices[p] < n:
        for ii in T.unroll(2):
            for k in T.vectorized(16):
                acc[ii * 16 + k] = acc[ii * 16 + k] + a[...] * b[indices[p], k]

Adding zero changes nothing; without the choice, product and sum are one instruction. A condition that reads an array
leaves only loops that run at least once.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir import op
from sparsetir.lower.nests import SERIAL, UNROLLED, VECTORIZED, Update, with_, with_body
from sparsetir.lower.rewriting import collect, conjunction, conjuncts, mentions
from sparsetir.walks import structural_mutate

KEPT = (SERIAL, UNROLLED, VECTORIZED)


def _is_zero(expr: ir.Expr) -> bool:
    return isinstance(expr, (tirx.FloatImm, tirx.IntImm)) and float(expr.value) == 0


def _choice(term: ir.Expr) -> tuple[ir.Expr, ir.Expr] | None:
    """(condition, value) of a term that is zero where the condition does not hold; None for other terms."""
    if op.is_if_then_else(term) and _is_zero(term.args[2]):
        return term.args[0], term.args[1]
    if isinstance(term, tirx.Mul):
        for one, other, first in ((term.a, term.b, True), (term.b, term.a, False)):
            found = _choice(one)
            if found is not None:
                return found[0], found[1] * other if first else other * found[1]
    return None


def _guarded(store: tirx.BufferStore) -> tirx.Stmt:
    """``x = x + if_then_else(c, t, 0)`` as ``if c: x = x + t``."""
    update = Update.of(store, (tirx.Add, tirx.Sub))
    found = None if update is None else _choice(update.term)
    if update is None or found is None or mentions(found[0], [store.buffer]):
        return store
    condition, term = found
    alone = tirx.BufferStore(store.buffer, update.op(update.own, term), store.indices)
    return tirx.IfThenElse(condition, alone, None)


def _lifted(loop: tirx.For) -> tirx.Stmt:
    """`loop` with what its body is guarded by around it, as far as its steps do not decide that."""
    body = loop.body
    if loop.kind not in KEPT or not isinstance(body, tirx.IfThenElse) or body.else_case is not None:
        return loop
    fixed = [loop.loop_var, *(s.buffer for s in collect(body.then_case, tirx.BufferStore))]
    runs = isinstance(loop.extent, tirx.IntImm) and int(loop.extent) > 0
    out: list[ir.Expr] = []
    kept: list[ir.Expr] = []
    for condition in conjuncts(body.condition):
        may_leave = not mentions(condition, fixed) and (runs or not collect(condition, ir.TensorLoad))
        # A condition may rely on those before it.
        (out if may_leave and not kept else kept).append(condition)
    if not out:
        return loop
    inner = tirx.IfThenElse(conjunction(kept), body.then_case, None) if kept else body.then_case
    rest = _lifted(with_(loop, body=inner))
    return tirx.IfThenElse(conjunction(out), rest, None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.UnswitchLoops")
def UnswitchLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Guard updates instead of terms, and loops instead of updates."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        return _lifted(inner) if isinstance(inner, tirx.For) else inner

    callbacks = [(tirx.BufferStore, lambda s, _m: _guarded(s)), (tirx.For, on_for)]
    body = structural_mutate(func.body, callbacks)
    return with_body(func, body)
