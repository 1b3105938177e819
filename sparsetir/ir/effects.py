# SPDX-License-Identifier: Apache-2.0
"""Effects of a program: parameters read and written, and operands that determine a computed pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import same
from sparsetir.ir.views import INIT, STORED, Axis, Program, SpIter, is_sp_iter
from sparsetir.ir.visitor import structural_walk

# Which operands decide what an assembled axis stores.
#
# The variable of an assembled axis runs over the coordinates that the operands of the body store: those of both factors
# of a product, those of either term of a sum. `Stored` is one access, `Both` and `Either` combine them.


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
    """Return the buffers that lie over `axis`."""
    return [view for view, buffer in program.buffers.items() if axis in buffer.axes]


def operand_coordinates(iteration: SpIter, var: Var, axis: Axis, program: Program) -> Coordinates | None:
    """Return the coordinates that `var` of an assembled axis iterates; None if no operand stores any.

    Only stores of results over `axis` count, and in them accesses that `var` itself subscripts at an axis that is not
    dense. A product takes the coordinates of both factors, a quotient those of what is divided, a choice those of its
    values, anything else those of all its parts. What has no such access has no opinion, and so have results.
    """
    reader = _Reader(var, program, results_over(axis, program))
    return reader.statement(iteration.block.body)


def leaves(coordinates: Coordinates | None) -> Iterator[Stored]:
    """Yield the accesses that coordinates are combined of."""
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
            chosen = node.args[1:] if dialect.is_if_then_else(node) else node.args
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
        pairs = zip(buffer.axes, node.indices, strict=True)
        coordinates = [
            Stored(node.source, tuple(node.indices), a) for a, i in pairs if self.var.same_as(i) and not a.is_dense
        ]
        return _combined(Both, list(coordinates))


def _combined(kind: type[Both] | type[Either], parts: Sequence[Coordinates | None]) -> Coordinates | None:
    present = [p for p in parts if p is not None]
    return present[0] if len(present) == 1 else kind(tuple(present)) if present else None


# Which parameters a stage-I program reads and writes, and in which order.


@dataclass
class Effects:
    """Names of storage parameters by what happens to them.

    ``outputs`` are written and never read before; ``covered`` are the outputs whose every element is surely
    written; ``updated`` are read before they are written.
    """

    read_first: set[str] = field(default_factory=set)
    written: list[str] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)

    @property
    def outputs(self) -> list[str]:
        return [n for n in self.written if n not in self.read_first]

    @property
    def updated(self) -> list[str]:
        return [n for n in self.written if n in self.read_first]


class _Order:
    """Walks statements in execution order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.effects = Effects()
        self.certain = True
        self.allocated: set[str] = set()

    def _name(self, buffer: Var) -> str:
        view = self.program.buffers.get(buffer)
        return str((view.storage if view is not None else buffer).name)

    def expr(self, node: Any) -> None:
        """Record the reads of an expression."""

        def on_load(load: ir.TensorLoad) -> None:
            name = self._name(load.source)
            if name not in self.effects.written:
                self.effects.read_first.add(name)

        structural_walk(node, (ir.TensorLoad, on_load))

    def stmt(self, node: Any) -> None:
        """Record the reads of a statement, then its writes."""
        if isinstance(node, tirx.SeqStmt):
            for child in node.seq:
                self.stmt(child)
        elif isinstance(node, tirx.BufferStore):
            self._store(node)
        elif isinstance(node, s_tir.SBlockRealize):
            self._block(node)
        elif isinstance(node, tirx.For):
            self.expr(node.extent)
            self._maybe(node.body)
        elif isinstance(node, (tirx.IfThenElse, tirx.While)):
            self.expr(node.condition)
            for body in (node.body,) if isinstance(node, tirx.While) else (node.then_case, node.else_case):
                self._maybe(body)
        elif isinstance(node, tirx.AttrStmt):
            self.stmt(node.body)
        elif isinstance(node, (tirx.Bind, tirx.Evaluate)) and isinstance(node.value, Call):
            self.expr(node.value)

    def _maybe(self, body: Any) -> None:
        """Visit a body that may not run."""
        certain, self.certain = self.certain, False
        if body is not None:
            self.stmt(body)
        self.certain = certain

    def _store(self, node: tirx.BufferStore) -> None:
        self.expr(node.value)
        for index in node.indices:
            self.expr(index)
        name = self._name(node.buffer)
        if name not in self.effects.written:
            self.effects.written.append(name)

    def _block(self, node: s_tir.SBlockRealize) -> None:
        if is_sp_iter(node):
            iteration = next((it for it in self.program.iterations if it.node.same_as(node)), None)
            if iteration is not None and self.certain:
                self._cover(iteration)
        inner = self._maybe if node.block.iter_vars else self.stmt
        if node.block.init is not None:
            inner(node.block.init)
        inner(node.block.body)

    def _cover(self, iteration: SpIter) -> None:
        """Record the buffers that the iteration sets everywhere."""
        for part, is_init in ((iteration.block.init, True), (iteration.block.body, False)):
            store = part if isinstance(part, tirx.BufferStore) else None
            if store is not None and self._covers(iteration, store, is_init):
                self.effects.covered.add(self._name(store.buffer))

    def _covers(self, iteration: SpIter, store: tirx.BufferStore, is_init: bool) -> bool:
        buffer = self.program.buffers.get(store.buffer)
        if buffer is None or len(set(store.indices)) != len(store.indices):
            return False
        axis_of = dict(zip(iteration.vars, iteration.axes, strict=True))
        if any(i not in axis_of for i in store.indices) or any(e.attached_to or e.merge for e in iteration.entries):
            return False
        used = [axis_of[i] for i in store.indices]
        pairs = list(zip(used, buffer.axes, strict=True))
        if is_init and str(iteration.block.annotations.get(INIT, "")) != STORED:
            unused = [a for a, k in zip(iteration.axes, iteration.kinds, strict=True) if k == "S" and a not in used]
            return all(_has_points(a) for a in unused) and all(_initialises(u, stored_axis) for u, stored_axis in pairs)
        return (
            "R" not in iteration.kinds
            and len(iteration.vars) == len(used)
            and all(_walks(u, stored_axis) for u, stored_axis in pairs)
        )


def _has_points(axis: Axis) -> bool:
    """Return whether an axis has a coordinate whatever the sizes: without one, nothing is initialised."""
    return isinstance(axis.length, tirx.IntImm) and int(axis.length) > 0


def _initialises(used: Axis, stored_axis: Axis) -> bool:
    """Return whether the coordinates of `used` reach every position of `stored_axis`; a search finds a repeat once."""
    reached = used is stored_axis or stored_axis.unique
    return reached and not _has_gaps(stored_axis) and same(used.length, stored_axis.length)


def _has_gaps(axis: Axis) -> bool:
    """Return whether stored elements may lack a coordinate: padding, or gaps between rows given by formulas."""
    return axis.may_be_absent or axis.kind == "dense_implicit"


def _walks(used: Axis, stored_axis: Axis) -> bool:
    """Return whether iterating `used` reaches every position of `stored_axis`."""
    if used is stored_axis:
        return not _has_gaps(used)
    dense = used.kind == stored_axis.kind == "dense_fixed"
    return dense and same(used.length, stored_axis.length)


def analyse(program: Program, covered: Collection[str] = ()) -> Effects:
    """Return the reads and writes of a program's parameters; outputs in `covered` are taken as written everywhere."""
    order = _Order(program)
    order.stmt(program.func.body)
    names = {str(p.name) for p in program.func.params}
    effects = order.effects
    effects.written = [str(p.name) for p in program.func.params if str(p.name) in effects.written]
    effects.read_first &= names
    effects.covered &= names
    effects.covered |= set(covered) & set(effects.outputs)
    return effects


__all__ = ["Both", "Coordinates", "Either", "Stored", "leaves", "operand_coordinates", "results_over"]
