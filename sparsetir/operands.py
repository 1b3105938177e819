# SPDX-License-Identifier: Apache-2.0
"""Which operands decide what an assembled axis stores.

The variable of an assembled axis runs over the coordinates that the operands of the body store: those of both factors
of a product, those of either term of a sum. `Stored` is one access, `Both` and `Either` combine them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.ir import Axis, Program, SpIter


@dataclass(frozen=True, eq=False)
class Stored:
    """The coordinates that a buffer stores along one of its axes, at the other subscripts of an access."""

    buffer: Var
    indices: tuple[ir.Expr, ...]
    axis: Axis


@dataclass(frozen=True)
class Both:
    """The coordinates that all parts store."""

    parts: tuple[Coordinates, ...]


@dataclass(frozen=True)
class Either:
    """The coordinates that one part stores, or several."""

    parts: tuple[Coordinates, ...]


Coordinates: TypeAlias = "Stored | Both | Either"

_PRODUCTS = (tirx.Mul, tirx.And, tirx.BitwiseAnd)
_QUOTIENTS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.LShift, tirx.RShift)


def results_over(axis: Axis, program: Program) -> list[Var]:
    """The buffers that lie over `axis`."""
    return [view for view, buffer in program.buffers.items() if axis in buffer.axes]


def operand_coordinates(iteration: SpIter, var: Var, axis: Axis, program: Program) -> Coordinates | None:
    """What the variable `var` of an assembled axis runs over; None where no operand stores coordinates of it.

    Only stores of results over `axis` count, and in them accesses that `var` itself subscripts at an axis that is not
    dense. A product takes the coordinates of both factors, a quotient those of what is divided, a choice those of its
    values, anything else those of all its parts. What has no such access has no opinion, and so have results.
    """
    reader = _Reader(var, program, results_over(axis, program))
    return reader.statement(iteration.block.body)


def leaves(coordinates: Coordinates | None) -> Iterator[Stored]:
    """The accesses that coordinates are combined of."""
    if isinstance(coordinates, Stored):
        yield coordinates
    elif coordinates is not None:
        for part in coordinates.parts:
            yield from leaves(part)


class _Reader:
    """Reads the coordinates of one variable off statements and expressions."""

    def __init__(self, var: Var, program: Program, results: Sequence[Var]) -> None:
        self.var, self.program, self.results = var, program, results
        self.named: dict[Var, Coordinates | None] = {}

    def statement(self, node: Any) -> Coordinates | None:
        if isinstance(node, tirx.BufferStore):
            return self.value(node.value) if node.buffer in self.results else None
        if isinstance(node, tirx.Bind):
            self.named[node.var] = self.value(node.value)
            return None
        if isinstance(node, tirx.SeqStmt):
            return _combined(Either, [self.statement(s) for s in node.seq])
        if isinstance(node, tirx.IfThenElse):
            return _combined(Either, [self.statement(s) for s in (node.then_case, node.else_case) if s is not None])
        inner = getattr(node, "body", None)
        return None if inner is None else self.statement(inner)

    def value(self, node: Any) -> Coordinates | None:
        if isinstance(node, ir.TensorLoad):
            return self._load(node)
        if isinstance(node, Var):
            return self.named.get(node)
        if isinstance(node, (tirx.Cast, tirx.Not)):
            return self.value(node.value if isinstance(node, tirx.Cast) else node.a)
        if isinstance(node, tirx.Let):
            self.named[node.var] = self.value(node.value)
            return self.value(node.body)
        if isinstance(node, tirx.Select):
            return _combined(Either, [self.value(node.true_value), self.value(node.false_value)])
        if isinstance(node, Call):
            chosen = node.args[1:] if op.is_if_then_else(node) else node.args
            return _combined(Either, [self.value(a) for a in chosen])
        if not hasattr(node, "a"):
            return None
        parts = [self.value(node.a), self.value(node.b)]
        if isinstance(node, _QUOTIENTS):
            return parts[1] if parts[0] is None else parts[0]
        return _combined(Both if isinstance(node, _PRODUCTS) else Either, parts)

    def _load(self, node: ir.TensorLoad) -> Coordinates | None:
        buffer = self.program.buffers.get(node.source)
        if buffer is None or node.source in self.results:
            return None
        own = zip(buffer.axes, node.indices, strict=True)
        found = [Stored(node.source, tuple(node.indices), a) for a, i in own if self.var.same_as(i) and not a.is_dense]
        return _combined(Both, list(found))


def _combined(kind: type[Both] | type[Either], parts: Sequence[Coordinates | None]) -> Coordinates | None:
    told = [p for p in parts if p is not None]
    return told[0] if len(told) == 1 else kind(tuple(told)) if told else None


__all__ = [
    "Both",
    "Coordinates",
    "Either",
    "Stored",
    "leaves",
    "operand_coordinates",
    "results_over",
]
