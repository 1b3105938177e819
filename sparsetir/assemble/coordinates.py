# SPDX-License-Identifier: Apache-2.0
"""Which stored coordinates an assembled axis of an iteration runs over: those of the body's operands."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.errors import LoweringError
from sparsetir.ir import Axis, Program, SparseBuffer, SpIter
from sparsetir.lower.rewriting import collect, same

BOTH = (tirx.Mul, tirx.And, tirx.BitwiseAnd)


@dataclass(frozen=True)
class _Set:
    """Coordinates: those of one axis, or of several together."""

    members: tuple[ir.Expr, ...]
    how: str = ""

    @property
    def entry(self) -> ir.Expr:
        """The entry of an iteration's list."""
        if len(self.members) == 1:
            return self.members[0]
        return op.call(self.how, list(self.members), str(self.members[0].ty.dtype))


def driving(iteration: SpIter, var: Var, program: Program, results: list[SparseBuffer]) -> ir.Expr:
    """The entry of the list that takes the place of an assembled axis with variable `var`.

    Raises
    ------
    LoweringError
        No operand has stored coordinates there, or sums and products of operands are nested.
    """
    views = [b.view for b in results]
    found: _Set | None = None
    for store in collect(iteration.block.body, tirx.BufferStore):
        if any(store.buffer.same_as(v) for v in views):
            found = _joined("union", found, _set_of(store.value, iteration, var, program, views))
    if found is None:
        message = f"no operand of iteration {iteration.name} stores coordinates {var.name}"
        raise LoweringError(f"{message}: list the axis that it runs over instead of the assembled one")
    return found.entry


def _set_of(expr: ir.Expr, iteration: SpIter, var: Var, program: Program, views: list[Var]) -> _Set | None:
    """The coordinates at which an expression is stored; None where it does not depend on stored ones."""
    if isinstance(expr, ir.TensorLoad):
        return None if any(expr.source.same_as(v) for v in views) else _of_load(expr, iteration, var, program)
    children = [expr.a, expr.b] if hasattr(expr, "a") and hasattr(expr, "b") else []
    if isinstance(expr, tirx.Cast):
        children = [expr.value]
    if isinstance(expr, ir.Call):
        children = [a for a in expr.args if isinstance(a, ir.Expr)]
    if isinstance(expr, tirx.Select):
        children = [expr.condition, expr.true_value, expr.false_value]
    found: _Set | None = None
    for child in children:
        found = _joined(
            "intersect" if isinstance(expr, BOTH) else "union", found, _set_of(child, iteration, var, program, views)
        )
    return found


def _of_load(load: ir.TensorLoad, iteration: SpIter, var: Var, program: Program) -> _Set | None:
    buffer = program.buffers.get(load.source)
    if buffer is None:
        return None
    for axis, index in zip(buffer.axes, load.indices, strict=True):
        if index.same_as(var) and not axis.is_dense:
            return _Set((_placed(axis, buffer, load, iteration),))
    return None


def _placed(axis: Axis, buffer: SparseBuffer, load: ir.TensorLoad, iteration: SpIter) -> ir.Expr:
    """An axis where it stands in the iteration: below its parent, or below the place that another axis names."""
    if axis.parent is None:
        return axis.var
    index = load.indices[buffer.axes.index(axis.parent)]
    pairs = [(a, v) for e in iteration.entries for a, v in zip(e.axes, e.vars, strict=False)]
    found = next((a for a, v in pairs if isinstance(index, Var) and v.same_as(index)), None)
    if found is None:
        message = f"{buffer.name} is read at {index} of axis {axis.parent.name}"
        raise LoweringError(f"{message}: the rows that an assembled axis runs over are named by a variable")
    # Where an assembled axis stands, the axis above is one of those that take its place.
    is_own = found is axis.parent or found.is_assembled
    return axis.var if is_own else op.call("attach", [axis.var, found.var], axis.idtype)


def _joined(how: str, first: _Set | None, second: _Set | None) -> _Set | None:
    """Two sets together."""
    if first is None or second is None:
        return first or second
    if len(first.members) == 1 == len(second.members) and same(first.members[0], second.members[0]):
        return first
    if any(len(s.members) > 1 and s.how != how for s in (first, second)):
        raise LoweringError("sums of products of stored operands: list T.union or T.intersect of their axes")
    return _Set((*first.members, *second.members), how)


__all__ = ["driving"]
