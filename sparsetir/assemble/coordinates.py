# SPDX-License-Identifier: Apache-2.0
"""The entry of an iteration's list that takes the place of an assembled axis: the axes of the body's operands."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir
from tvm.ir import Var

from sparsetir import op
from sparsetir.errors import LoweringError
from sparsetir.ir import Axis, Program, SpIter
from sparsetir.lower.rewriting import same
from sparsetir.operands import Both, Coordinates, Stored, operand_coordinates


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


def driving(iteration: SpIter, var: Var, axis: Axis, program: Program) -> ir.Expr:
    """The entry of the list that takes the place of an assembled axis with variable `var`.

    Raises
    ------
    LoweringError
        No operand has stored coordinates there, or sums and products of operands are nested.
    """
    found = operand_coordinates(iteration, var, axis, program)
    if found is None:
        message = f"no operand of iteration {iteration.name} stores coordinates {var.name}"
        raise LoweringError(f"{message}: list the axis that it runs over instead of the assembled one")
    made = _set_of(found, iteration, program)
    if made is None:
        message = f"{var.name} of iteration {iteration.name} would run over unions and intersections at once"
        raise LoweringError(f"{message}: list one axis, T.union or T.intersect in place of {axis.name}")
    return made.entry


def _set_of(found: Coordinates, iteration: SpIter, program: Program) -> _Set | None:
    """What is run over; None where unions and intersections are nested."""
    if isinstance(found, Stored):
        return _Set((_placed(found, iteration, program),))
    how = "intersect" if isinstance(found, Both) else "union"
    first, *others = (_set_of(part, iteration, program) for part in found.parts)
    for other in others:
        first = None if first is None or other is None else _joined(how, first, other)
    return first


def _placed(stored: Stored, iteration: SpIter, program: Program) -> ir.Expr:
    """An axis where it stands in the iteration: below its parent, or below the place that another axis names.

    An assembled axis gives way to the axes of its operands, of which the parent is one.
    """
    axis, buffer = stored.axis, program.buffers[stored.buffer]
    if axis.parent is None:
        return axis.var
    index = stored.indices[buffer.axes.index(axis.parent)]
    pairs = [(a, v) for e in iteration.entries for a, v in zip(e.axes, e.vars, strict=False)]
    found = next((a for a, v in pairs if isinstance(index, Var) and v.same_as(index)), None)
    if found is None:
        message = f"{buffer.name} is read at {index} of axis {axis.parent.name}"
        raise LoweringError(f"{message}: the rows that an assembled axis runs over are named by a variable")
    is_own = found is axis.parent or found.is_assembled
    return axis.var if is_own else op.call("attach", [axis.var, found.var], axis.idtype)


def _joined(how: str, first: _Set, second: _Set) -> _Set | None:
    """Two sets together; None where one is joined otherwise."""
    if len(first.members) == 1 == len(second.members) and same(first.members[0], second.members[0]):
        return first
    if any(len(s.members) > 1 and s.how != how for s in (first, second)):
        return None
    return _Set((*first.members, *second.members), how)


__all__ = ["driving"]
