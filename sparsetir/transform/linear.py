# SPDX-License-Identifier: Apache-2.0
"""Whether a program computes the same when entries with the same coordinates are added up beforehand.

Converting to a format adds them up, whereas an iteration over an axis with ``unique=False`` visits each of them. Both
agree where everything that is made of the entries' values is linear in them::

    Y[i] = Y[i] + A[i, j] * X[j]            # a x + b x = (a + b) x
    O[i, j] = 2 * A[i, j]                   # and O keeps a value for each entry, to be summed one by one
    seen[i] = 1                             # or does not depend on how often it is done

and they do not where it is not: ``max(Y[i], A[i, j])``, ``A[i, j] * A[i, j]``, ``Y[i] + 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.lower.checks.dependence import update_of
from sparsetir.lower.rewriting import collect

#: operators for which the same term twice is as good as once
_IDEMPOTENT = ("max", "min", "and", "or", "&", "|")


@dataclass(eq=False)
class Linear:
    """What statements do with the values of the buffers `views` at their own entry.

    ``degrees`` has 0 for a local buffer that does not depend on these values and 1 for one that is linear in them.
    """

    views: Set[Var]
    is_own: Callable[[Var, Any], bool]
    stored: set[Var] = field(default_factory=set)
    degrees: dict[Var, int] = field(default_factory=dict)
    local: set[Var] = field(default_factory=set)

    def holds(self, *parts: tirx.Stmt | None) -> bool:
        """Whether the statements, run in this order, are linear in the values."""
        present = [p for p in parts if p is not None]
        self.stored = {s.buffer for p in present for s in collect(p, tirx.BufferStore)} - self.views
        return all(self._statement(p) for p in present)

    # ------------------------------------------------------------------ statements

    def _statement(self, node: tirx.Stmt | None) -> bool:
        if node is None or isinstance(node, (tirx.DeclBuffer, tirx.AllocBuffer)):
            self._declare(node)
            return True
        if isinstance(node, tirx.SeqStmt):
            return all(self._statement(s) for s in node.seq)
        if isinstance(node, tirx.BufferStore):
            return self._store(node)
        if isinstance(node, tirx.Bind):
            return self.degree(node.value) == 0
        if isinstance(node, tirx.For):
            return self.degree(node.min) == self.degree(node.extent) == 0 and self._statement(node.body)
        if isinstance(node, tirx.IfThenElse):
            parts = (node.then_case, node.else_case)
            return self.degree(node.condition) == 0 and all(self._statement(p) for p in parts)
        if isinstance(node, s_tir.SBlockRealize):
            self.local.update(node.block.alloc_buffers)
            return self._statement(node.block.init) and self._statement(node.block.body)
        return False

    def _declare(self, node: tirx.Stmt | None) -> None:
        if isinstance(node, tirx.AllocBuffer):
            self.local.add(node.buffer)

    def _store(self, node: tirx.BufferStore) -> bool:
        if any(self.degree(i) != 0 for i in node.indices):
            return False
        if node.buffer in self.views:
            return _is_zero(node.value) or self.degree(node.value) == 1
        if node.buffer in self.local:
            return self._keep(node)
        update = update_of(node)
        if update is None:
            return self.degree(node.value) == 0
        operator, terms = update
        degrees = {self.degree(t) for t in terms if not _is_zero(t)}
        return degrees <= {1} if operator == "+" else operator in _IDEMPOTENT and degrees <= {0}

    def _keep(self, node: tirx.BufferStore) -> bool:
        """Remember what a local buffer holds; it must always be of one kind."""
        if _is_zero(node.value):
            return True
        update = update_of(node)
        terms = update[1] if update is not None and update[0] == "+" else [node.value]
        found = {self.degree(t) for t in terms if not _is_zero(t)}
        degree = found.pop() if len(found) == 1 else None
        return degree is not None and self.degrees.setdefault(node.buffer, degree) == degree

    # ------------------------------------------------------------------ expressions

    def degree(self, expr: ir.Expr) -> int | None:
        """0 if `expr` does not depend on the values, 1 if it is linear in them, None for anything else."""
        if isinstance(expr, ir.TensorLoad):
            return self._load(expr)
        if not self._depends(expr):
            return 0
        if isinstance(expr, (tirx.Add, tirx.Sub)):
            return self._agreed(expr.a, expr.b)
        if isinstance(expr, tirx.Mul):
            a, b = self.degree(expr.a), self.degree(expr.b)
            return a + b if a is not None and b is not None and a + b <= 1 else None
        if isinstance(expr, tirx.Div) and "float" in str(expr.ty.dtype):
            return self.degree(expr.a) if self.degree(expr.b) == 0 else None
        if isinstance(expr, tirx.Cast):
            return self.degree(expr.value) if _keeps_sums(str(expr.value.ty.dtype), str(expr.ty.dtype)) else None
        if isinstance(expr, tirx.Select):
            return self._chosen(expr.condition, expr.true_value, expr.false_value)
        return self._chosen(*expr.args) if op.is_if_then_else(expr) else None

    def _agreed(self, a: ir.Expr, b: ir.Expr) -> int | None:
        """The degree of a sum or of a choice."""
        found = {self.degree(x) for x in (a, b) if not _is_zero(x)}
        return found.pop() if len(found) == 1 else None

    def _chosen(self, condition: ir.Expr, yes: ir.Expr, no: ir.Expr) -> int | None:
        return self._agreed(yes, no) if self.degree(condition) == 0 else None

    def _load(self, load: ir.TensorLoad) -> int | None:
        if any(self.degree(i) != 0 for i in load.indices):
            return None
        if load.source in self.views:
            return 1 if self.is_own(load.source, load.indices) and str(load.ty.dtype) != "bool" else None
        if load.source in self.local:
            return self.degrees.get(load.source)
        return None if load.source in self.stored else 0

    def _depends(self, expr: ir.Expr) -> bool:
        """Whether anything in `expr` is more than a number that the values do not change."""
        return any(self._load(x) != 0 for x in collect(expr, ir.TensorLoad))


def _is_zero(expr: ir.Expr) -> bool:
    if isinstance(expr, tirx.Cast):
        return _is_zero(expr.value)
    return isinstance(expr, (tirx.IntImm, tirx.FloatImm)) and float(expr.value) == 0


def _keeps_sums(source: str, target: str) -> bool:
    """Whether the cast of a sum is the sum of the casts, but for rounding."""
    if "float" in source:
        return "float" in target
    narrows = tvm_ffi.dtype(target).bits <= tvm_ffi.dtype(source).bits
    return "int" in source and "int" in target and narrows  # integers wrap around


__all__ = ["Linear"]
