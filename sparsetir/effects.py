# SPDX-License-Identifier: Apache-2.0
"""Which parameters a stage-I program reads and writes, and in which order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.ir import INIT, STORED, Axis, Program, SpIter, is_sp_iter
from sparsetir.lower.rewriting import same
from sparsetir.walks import structural_walk


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
        """Note what an expression reads."""

        def on_load(load: ir.TensorLoad) -> None:
            name = self._name(load.source)
            if name not in self.effects.written:
                self.effects.read_first.add(name)

        structural_walk(node, (ir.TensorLoad, on_load))

    def stmt(self, node: Any) -> None:
        """Note what a statement reads, then what it writes."""
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
        """A body that may not run."""
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
        """Note the buffers that the iteration sets everywhere."""
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
            others = [a for a, k in zip(iteration.axes, iteration.kinds, strict=True) if k == "S" and a not in used]
            return all(_has_points(a) for a in others) and all(_initialises(u, own) for u, own in pairs)
        return (
            "R" not in iteration.kinds and len(iteration.vars) == len(used) and all(_walks(u, own) for u, own in pairs)
        )


def _has_points(axis: Axis) -> bool:
    """Whether an axis has a coordinate whatever the sizes: without one, nothing is initialised."""
    return isinstance(axis.length, tirx.IntImm) and int(axis.length) > 0


def _initialises(used: Axis, own: Axis) -> bool:
    """Whether the coordinates of `used` reach every position of `own`; equal coordinates are found once."""
    reached = used is own or own.unique
    return reached and not _has_gaps(own) and same(used.length, own.length)


def _has_gaps(axis: Axis) -> bool:
    """Whether there may be stored elements without a coordinate: padding, or between the rows that formulas give."""
    return axis.may_be_absent or axis.kind == "dense_implicit"


def _walks(used: Axis, own: Axis) -> bool:
    """Whether iterating `used` reaches every position of `own`."""
    if used is own:
        return not _has_gaps(used)
    dense = used.kind == own.kind == "dense_fixed"
    return dense and same(used.length, own.length)


def analyse(program: Program, covered: Collection[str] = ()) -> Effects:
    """Reads and writes of a stage-I program's parameters; outputs in `covered` are known to be written everywhere."""
    order = _Order(program)
    order.stmt(program.func.body)
    names = {str(p.name) for p in program.func.params}
    effects = order.effects
    effects.written = [str(p.name) for p in program.func.params if str(p.name) in effects.written]
    effects.read_first &= names
    effects.covered &= names
    effects.covered |= set(covered) & set(effects.outputs)
    return effects
