# SPDX-License-Identifier: Apache-2.0
"""Whether slots between the entries of a tensor, which hold zero, change what an iteration computes."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.lower.nests import Update
from sparsetir.lower.rewriting import collect

IsOwn = Callable[[Var, Any], bool]


def is_zero(expr: ir.Expr, clean: Set[Var], own: IsOwn) -> bool:
    """Whether `expr` is zero where every own element of the buffers `clean` is zero.

    A product with a zero counts as zero: as in every library of block formats, infinity times padding is not kept out.
    """
    zero = lambda e: is_zero(e, clean, own)  # noqa: E731
    if isinstance(expr, (tirx.FloatImm, tirx.IntImm)):
        return float(expr.value) == 0
    if isinstance(expr, ir.TensorLoad):
        return expr.source in clean and own(expr.source, expr.indices)
    if isinstance(expr, tirx.Mul):
        return zero(expr.a) or zero(expr.b)
    if isinstance(expr, (tirx.Add, tirx.Sub, tirx.Max, tirx.Min)):
        return zero(expr.a) and zero(expr.b)
    if isinstance(expr, tirx.Div):  # by a number: what is between the entries may divide zero by zero
        return zero(expr.a) and isinstance(expr.b, (tirx.FloatImm, tirx.IntImm)) and float(expr.b.value) != 0
    if isinstance(expr, tirx.Cast):
        return zero(expr.value)
    if isinstance(expr, tirx.Select):
        return zero(expr.true_value) and zero(expr.false_value)
    if op.is_if_then_else(expr):
        return zero(expr.args[1]) and zero(expr.args[2])
    return False


def adds_nothing(store: tirx.BufferStore, clean: Set[Var], own: IsOwn) -> bool:
    """Whether a store only adds a term that is zero: ``X[i] = X[i] + 0``."""
    update = Update.of(store, (tirx.Add, tirx.Sub), either=True)
    return update is not None and is_zero(update.term, clean, own)


def is_neutral(body: tirx.Stmt, rewritten: Set[Var], clean: Set[Var], own: IsOwn) -> bool:
    """Whether running `body` on a slot that is no entry changes no other buffer.

    Parameters
    ----------
    body : Stmt
    rewritten : set of Var
        Buffers over the padded axes: what lands in their padding is nobody's.
    clean : set of Var
        Those whose padding is known to be zero.
    own : callable
        Whether a subscript list means the iteration's own slot.
    """
    stores = collect(body, tirx.BufferStore)
    return all(s.buffer in rewritten or adds_nothing(s, clean, own) for s in stores)


def multiplies(body: tirx.Stmt, rewritten: Set[Var]) -> bool:
    """Whether padding, which is zero, meets floating-point numbers of other buffers: infinity times zero is no zero."""
    terms = [s.value for s in collect(body, tirx.BufferStore) if s.buffer not in rewritten]
    targets = {s.buffer for s in collect(body, tirx.BufferStore)}
    loads = [load for term in terms for load in collect(term, ir.TensorLoad)]
    others = [load for load in loads if load.source not in rewritten and load.source not in targets]
    return any(str(load.ty.dtype).startswith(("float", "bfloat")) for load in others)


def still_clean(parts: list[tirx.Stmt], buffer: Var, clean: Set[Var], own: IsOwn) -> bool:
    """Whether the padding of `buffer` is zero after `parts` ran on it."""
    stores = [s for part in parts for s in collect(part, tirx.BufferStore) if s.buffer.same_as(buffer)]
    starts_clean = buffer in clean or any(is_zero(s.value, set(), own) for s in stores)
    known = set(clean) | {buffer} if starts_clean else set(clean)
    return starts_clean and all(is_zero(s.value, known, own) for s in stores)


__all__ = ["is_neutral", "is_zero", "multiplies", "still_clean"]
