# SPDX-License-Identifier: Apache-2.0
"""Rows of operands are fetched some steps before a loop comes to them.

A product that goes over entries of A reads a row of B for each, somewhere in memory::

    for k in range(indptr_a[i + 1] - indptr_a[i]):
        ...  # prefetch indptr_b[indices_a[indptr_a[i] + k + FAR]]
        ...  # prefetch indices_b and b at indptr_b[indices_a[indptr_a[i] + k + NEAR]]
        for j in range(...):
            ...

Entries behind the end of a row are those of the next one, so that short rows are fetched in time, too.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.nests import with_
from sparsetir.lower.rewriting import collect, seq, substitute
from sparsetir.lower.vector.insert_prefetch import fetch, gathers, steps_ahead

NEAR, FAR = 12, 24  # steps between a fetch and its use: of a row, and of where it begins


def fetched(loop: tirx.For, made: tirx.For, is_operand: Callable[[Var], bool]) -> tirx.For:
    """A loop made of `loop`, with the rows that steps gather from operands fetched before."""
    stmts = fetches(loop, is_operand)
    return with_(made, body=seq(*stmts, made.body)) if stmts else made


def fetches(loop: tirx.For, is_operand: Callable[[Var], bool], *, rows: bool = True) -> list[tirx.Stmt]:
    """Statements that fetch what later steps of a loop gather; without `rows` where those begin alone."""
    inner = [f.loop_var for f in collect(loop.body, tirx.For)]
    found = [x for x in gathers(loop.body, loop.loop_var) if is_operand(x.source)] if inner else []
    loads = {x.source: x for x in found if not any(collect(i, ir.Call) for i in x.indices)}  # searches take long
    ways = {x.source for load in loads.values() for i in load.indices for x in collect(i, ir.TensorLoad)}
    stmts = []
    for source, load in loads.items():
        if source not in ways and not rows:
            continue
        number = const(FAR if source in ways else NEAR, str(loop.loop_var.ty.dtype))
        first = {var: const(0, str(var.ty.dtype)) for var in inner}
        stmts.append(fetch(load, [substitute(i, first) for i in steps_ahead(load, loop.loop_var, number)]))
    return stmts


__all__ = ["fetched", "fetches"]
