# SPDX-License-Identifier: Apache-2.0
"""What statements do at a coordinate that is not stored, where buffers read their default.

Values are folded as far as that decides it: ``C + 0 * B`` is ``C``. Numbers are taken as finite, so that nothing
times zero is zero; a quotient of zero is not, since its divisor may be zero where nothing is stored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.ir import Entry, SparseBuffer
from sparsetir.lower.rewriting import collect, same
from sparsetir.op import is_if_then_else
from sparsetir.rules import Place
from sparsetir.transform.editing import Editor, fiber_vars


@dataclass(eq=False)
class Absent:
    """What statements do at a coordinate that is not stored."""

    editor: Editor
    place: Place
    entry: Entry
    values: dict[Var, ir.Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = fiber_vars(self.place, self.entry.axes[0])
        self.local: set[Var] = set(self.place.iteration.block.alloc_buffers)
        self.depth = 0  # of loops, branches and blocks around the current statement

    def is_absent(self, view: Var, indices: Sequence[ir.Expr]) -> bool:
        """Whether the access is to a coordinate that is not stored."""
        axis, buffer = self.entry.axes[0], self.editor.program.buffers.get(view)
        if buffer is None or axis not in buffer.axes:
            return False
        by_axis = dict(zip(buffer.axes, indices, strict=True))
        return all(by_axis[a].same_as(var) for a, var in self.at.items())

    # ------------------------------------------------------------------ statements

    def fault(self, node: tirx.Stmt) -> str:
        """What a statement does there; empty if nothing."""
        if isinstance(node, tirx.BufferStore):
            return self._store(node)
        if isinstance(node, tirx.Bind):
            self.values[node.var] = self.value(node.value)
            return ""
        if isinstance(node, tirx.AllocBuffer):
            self.local.add(node.buffer)
            return ""
        if isinstance(node, tirx.DeclBuffer):
            return ""
        if isinstance(node, tirx.SeqStmt):
            return self._first(node.seq)
        self.depth += 1
        found = self._compound(node)
        self.depth -= 1
        return found

    def _compound(self, node: tirx.Stmt) -> str:
        if isinstance(node, tirx.IfThenElse):
            return self._branch(node)
        if isinstance(node, s_tir.SBlockRealize):
            return self._block(node)
        if isinstance(node, (tirx.For, tirx.While)):
            return self.fault(node.body)
        return f"its body has the statement {str(node).strip()}"

    def _first(self, nodes: Iterable[tirx.Stmt | None]) -> str:
        """The first fault of several statements."""
        return next((f for f in (self.fault(n) for n in nodes if n is not None) if f), "")

    def _store(self, node: tirx.BufferStore) -> str:
        if self.is_absent(node.buffer, list(node.indices)):
            return ""
        value = self.value(node.value)
        if node.buffer in self.local:
            self._keep(node.buffer, value)
            return ""
        if same(value, tirx.BufferLoad(node.buffer, list(node.indices))):
            return ""
        return f"where nothing is stored its body would still change {node.buffer.name}"

    def _keep(self, cell: Var, value: ir.Expr) -> None:
        """Remember the value of a local variable that is set once."""
        sets = [s for s in collect(self.place.iteration.block.body, tirx.BufferStore) if s.buffer.same_as(cell)]
        if self.depth == 0 and len(sets) == 1 and len(cell.ty.shape) == 1 and _is(cell.ty.shape[0], 1):
            self.values[cell] = value

    def _branch(self, node: tirx.IfThenElse) -> str:
        condition = number_of(self.value(node.condition))
        parts = [node.then_case, node.else_case]
        taken = parts if condition is None else parts[:1] if condition else parts[1:]
        return self._first(taken)

    def _block(self, node: s_tir.SBlockRealize) -> str:
        if node.block.init is not None:
            return f"block {node.block.name_hint!r} inside initialises something"
        self.local.update(node.block.alloc_buffers)
        return self.fault(node.block.body)

    # ------------------------------------------------------------------ expressions

    def value(self, expr: ir.Expr) -> ir.Expr:
        """An expression with the default of what is absent, simplified as far as that decides it."""
        if isinstance(expr, ir.TensorLoad):
            return self._load(expr)
        if isinstance(expr, Var):
            return self.values.get(expr, expr)
        if isinstance(expr, tirx.Cast):
            inner = self.value(expr.value)
            number = number_of(inner)
            return tirx.Cast(str(expr.ty.dtype), inner) if number is None else _typed(number, expr)
        if isinstance(expr, tirx.Select):
            return self._choice(expr, expr.condition, expr.true_value, expr.false_value)
        if is_if_then_else(expr):
            return self._choice(expr, *expr.args)
        if type(expr) in _FOLD:
            return _FOLD[type(expr)](expr, self.value(expr.a), self.value(expr.b))
        if isinstance(expr, tirx.Not):
            number = number_of(self.value(expr.a))
            return expr if number is None else _typed(not number, expr)
        return expr

    def _load(self, load: ir.TensorLoad) -> ir.Expr:
        if load.source in self.values:
            return self.values[load.source]
        buffer: SparseBuffer | None = self.editor.program.buffers.get(load.source)
        if buffer is None or not self.is_absent(load.source, list(load.indices)):
            return load
        return buffer.default

    def _choice(self, expr: ir.Expr, condition: ir.Expr, true: ir.Expr, false: ir.Expr) -> ir.Expr:
        number = number_of(self.value(condition))
        if number is not None:
            return self.value(true if number else false)
        left, right = self.value(true), self.value(false)
        return left if same(left, right) else expr


def number_of(expr: ir.Expr) -> float | int | None:
    """The value of a constant."""
    if isinstance(expr, tirx.Cast):
        return number_of(expr.value)
    return expr.value if isinstance(expr, (tirx.IntImm, tirx.FloatImm)) else None


def _typed(number: float | int, like: ir.Expr) -> ir.Expr:
    dtype = str(like.ty.dtype)
    return tirx.const(bool(number) if dtype == "bool" else number, dtype)


def _is(expr: ir.Expr, number: int) -> bool:
    return number_of(expr) == number


def _add(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    return a if _is(b, 0) else b if _is(a, 0) else tirx.Add(a, b)


def _sub(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    return a if _is(b, 0) else tirx.Sub(a, b)


def _mul(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    if _is(a, 0) or _is(b, 0):
        return _typed(0, expr)
    return a if _is(b, 1) else b if _is(a, 1) else tirx.Mul(a, b)


def _div(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    # Not 0 / x: x may be 0 where nothing is stored.
    return _typed(0, expr) if _is(a, 0) and number_of(b) else expr


def _extreme(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    is_max, dtype = isinstance(expr, tirx.Max), str(expr.ty.dtype)
    end = number_of(tirx.min_value(dtype) if is_max else tirx.max_value(dtype))
    for value, other in ((a, b), (b, a)):
        number = number_of(value)
        if number is not None and end is not None and (number <= end if is_max else number >= end):
            return other
    return a if same(a, b) else type(expr)(a, b)


def _compare(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    left, right = number_of(a), number_of(b)
    return expr if left is None or right is None else _typed(_COMPARE[type(expr)](left, right), expr)


def _logic(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    deciding = isinstance(expr, tirx.Or)
    for value, other in ((a, b), (b, a)):
        number = number_of(value)
        if number is not None:
            return _typed(deciding, expr) if bool(number) is deciding else other
    return expr


_COMPARE: dict[type, Any] = {
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
}
_FOLD: dict[type, Callable[[Any, Any, Any], ir.Expr]] = {
    tirx.Add: _add,
    tirx.Sub: _sub,
    tirx.Mul: _mul,
    tirx.Div: _div,
    tirx.FloorDiv: _div,
    tirx.Max: _extreme,
    tirx.Min: _extreme,
    tirx.And: _logic,
    tirx.Or: _logic,
    **dict.fromkeys(_COMPARE, _compare),
}


__all__ = ["Absent", "number_of"]
