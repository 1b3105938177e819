# SPDX-License-Identifier: Apache-2.0
"""Dependence analysis: accesses of statements, and variables whose steps must keep their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Call, Op, Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import collect, is_element, same
from sparsetir.ir.rules import Facts
from sparsetir.ir.views import INDEPENDENT, Axis, Entry, SpIter, is_sp_iter
from sparsetir.ir.visitor import structural_walk
from sparsetir.lower.analysis.independence import coordinate_range, differ
from sparsetir.lower.loops import allocated_buffers

# Variables of an iteration whose steps must keep their order.
#
# Two steps do not commute if both store to one element, or if one reads an element that the other stores::
#
#     A[i] = B[i, j]            # the last j counts: order of j
#     A[i] = A[i - 1] + B[i]    # each i reads the result of the one before: order of i
#     A[i] = A[i] + B[i, j]     # updates with one operator commute: no order
#
# Stage II annotates the block with such variables, and `check_order` refuses schedules that change their order.


def ordered(part: Any, iteration: SpIter, facts: Facts, loops: Sequence[Var] = ()) -> set[Var]:
    """Return the variables of an iteration and of the program's `loops` around it that must keep their order in `part`.

    Parameters
    ----------
    part : Stmt
        Body of the iteration, or its initialisation.
    """
    steps = Steps(facts, dict(zip(iteration.vars, iteration.axes, strict=True)))
    accesses = footprint(facts, part, walked=iteration.listed)
    repeating = {e.vars[0] for e in iteration.entries if e.merge and not all(map(differ, e.axes))}
    needed: set[Var] = {*steps.axes, *loops} if accesses.opaque else set()
    for storage in accesses.stored:
        group = accesses.of(storage)
        if not _commutes(group, accesses, steps):
            needed |= set(steps.axes) - (steps.fixed(group) - repeating)
            needed |= {v for v in loops if not _is_subscript(v, group)}
    promised = iteration.entries[0].vars if INDEPENDENT in iteration.block.annotations else ()
    return needed - set(promised)


def _commutes(group: Sequence[Touch], accesses: Footprint, steps: Steps) -> bool:
    """Return whether steps that access the same element of a storage leave the same value in any order."""
    if is_update(group):
        return True
    free = set(steps.axes) | accesses.bound
    return is_constant_store(group, steps.fixed(group), free, accesses.stored, steps.facts)


def _is_subscript(var: Var, group: Sequence[Touch]) -> bool:
    """Return whether a variable alone subscripts the same dimension in all accesses."""
    rows = [t.indices for t in group if t.indices is not None]
    columns = zip(*rows, strict=True) if len(rows) == len(group) else ()
    return all(t.view.same_as(group[0].view) for t in group) and any(all(i.same_as(var) for i in c) for c in columns)


# Accesses of statements, and tests of whether their steps may run in another order.
#
# A *step* is one point of an iteration. Two steps meet in an element if both access it and one stores to it. The tests
# below are conservative: accesses that are not proven disjoint are assumed to meet.


_OPERATORS: dict[type, str] = {
    tirx.Add: "+",
    tirx.Mul: "*",
    tirx.Max: "max",
    tirx.Min: "min",
    tirx.And: "and",
    tirx.Or: "or",
    tirx.BitwiseAnd: "&",
    tirx.BitwiseOr: "|",
    tirx.BitwiseXor: "^",
}
_READS_ONLY = 2  # The strongest effect of a call that may be reordered (CallEffectKind.ReadState).


@dataclass(frozen=True, eq=False)
class Touch:
    """One access of a storage.

    ``indices`` is None if the access may touch any element; ``update`` is the operator if the access belongs to a
    store ``X[s] = X[s] op term``; ``value`` is the stored value.
    """

    storage: Var
    view: Var
    indices: tuple[ir.Expr, ...] | None
    is_store: bool = False
    update: str = ""
    value: ir.Expr | None = None


@dataclass(eq=False)
class Footprint:
    """All accesses of some statements; ``opaque`` is the text of the first statement with unknown effects."""

    touches: list[Touch] = field(default_factory=list)
    opaque: str = ""
    bound: set[Var] = field(default_factory=set)  # Variables that these statements define.

    def __add__(self, footprint: Footprint) -> Footprint:
        return Footprint(
            self.touches + footprint.touches, self.opaque or footprint.opaque, self.bound | footprint.bound
        )

    @property
    def stored(self) -> set[Var]:
        return {t.storage for t in self.touches if t.is_store}

    @property
    def touched(self) -> set[Var]:
        return {t.storage for t in self.touches}

    def of(self, storage: Var) -> list[Touch]:
        return [t for t in self.touches if t.storage.same_as(storage)]


# ---------------------------------------------------------------------------------------------- updates


def update_of(store: tirx.BufferStore) -> tuple[str, list[ir.Expr]] | None:
    """Return the operator and the terms of ``X[s] = X[s] op term op ...``; None for a store of another form."""
    value = store.value
    kind = tirx.Add if isinstance(value, tirx.Sub) else type(value)
    if kind not in _OPERATORS:
        return None
    terms = _terms(value, kind, store)
    return None if terms is None else (_OPERATORS[kind], terms)


def _terms(value: Any, kind: type, store: tirx.BufferStore) -> list[ir.Expr] | None:
    """Return the terms that `value` combines with the stored element; None if `value` does not contain the element."""
    if isinstance(value, ir.TensorLoad):
        return [] if is_element(value, store) else None
    is_difference = kind is tirx.Add and isinstance(value, tirx.Sub)
    if not is_difference and not isinstance(value, kind):
        return None
    left = _terms(value.a, kind, store)
    if left is not None:
        return [*left, value.b]
    right = None if is_difference else _terms(value.b, kind, store)
    return None if right is None else [value.a, *right]


# ---------------------------------------------------------------------------------------------- footprints


class _Collector:
    def __init__(self, facts: Facts, local: set[Var]) -> None:
        self.facts, self.local = facts, local
        self.found = Footprint()

    def on_store(self, node: tirx.BufferStore, visitor: Any) -> None:
        update = update_of(node)
        operator, values = update if update is not None else ("", [node.value])
        self._touch(node.buffer, node.indices, is_store=True, update=operator, value=node.value)
        for part in (*node.indices, *values):
            visitor.visit(part)

    def on_load(self, node: ir.TensorLoad, visitor: Any) -> None:
        self._touch(node.source, node.indices)
        for index in node.indices:
            visitor.visit(index)

    def _touch(self, view: Var, indices: Any, **fields: Any) -> None:
        storage = self.facts.storage(view)
        if storage in self.local:
            return
        self.found.touches.append(Touch(storage, view, tuple(indices), **fields))
        buffer = self.facts.program.buffers.get(view)
        for axis in buffer.axes if buffer is not None else ():
            self.structure(axis)

    def structure(self, axis: Axis) -> None:
        """Record reads of any element of the index arrays of `axis`."""
        arrays = [x for x in (axis.indptr, axis.indices) if x is not None]
        for rule in (axis.rule, axis.extent_rule, axis.offset_rule):
            arrays += [] if rule is None else [x.source for x in collect(rule, ir.TensorLoad)]
        for array in arrays:
            storage = self.facts.storage(array)
            self.found.touches.append(Touch(storage, array, None))

    def walks(self, axes: Iterable[Axis]) -> None:
        """Record reads of the index arrays of `axes` and their ancestors."""
        for axis in dict.fromkeys(a for leaf in axes for a in (*leaf.ancestors, leaf)):
            self.structure(axis)

    def on_realize(self, node: s_tir.SBlockRealize, visitor: Any) -> None:
        if is_sp_iter(node):
            axes, variables = self.facts.program.axes, collect(list(node.iter_values), Var)
            self.walks(axes[v] for v in variables if v in axes)
        else:
            for value in (node.predicate, *node.iter_values):
                visitor.visit(value)
        self.found.bound.update(iv.var for iv in node.block.iter_vars)
        for part in (node.block.init, node.block.body):
            if part is not None:
                visitor.visit(part)

    def on_bind(self, node: tirx.Bind, visitor: Any) -> None:
        self.found.bound.add(node.var)
        visitor.visit(node.value)

    def on_for(self, node: tirx.For, visitor: Any) -> None:
        self.found.bound.add(node.loop_var)
        for part in (node.min, node.extent, node.body):
            visitor.visit(part)

    def on_let(self, node: tirx.Let, visitor: Any) -> None:
        self.found.bound.add(node.var)
        visitor.visit(node.value)
        visitor.visit(node.body)

    def on_assert(self, node: tirx.AssertStmt, visitor: Any) -> None:
        self.found.opaque = self.found.opaque or str(node).strip()
        visitor.default_visit(node)

    def on_call(self, node: Call, visitor: Any) -> None:
        if not _is_pure(node):
            self.found.opaque = self.found.opaque or str(node).strip()
        visitor.default_visit(node)


def _is_pure(call: Call) -> bool:
    if dialect.is_call(call):
        return True
    if isinstance(call.op, Op) and call.op.name == "tirx.address_of":
        return False
    kind = call.op.get_attr("TCallEffectKind") if isinstance(call.op, Op) else None
    return kind is not None and int(kind) <= _READS_ONLY


def footprint(facts: Facts, *nodes: Any, walked: Iterable[Axis] = ()) -> Footprint:
    """Collect the accesses of statements, except to buffers allocated inside, and the reads to iterate `walked`."""
    present = [n for n in nodes if n is not None]
    walk = _Collector(facts, set(allocated_buffers(*present)))
    walk.walks(walked)
    callbacks = [
        (tirx.BufferStore, walk.on_store),
        (ir.TensorLoad, walk.on_load),
        (s_tir.SBlockRealize, walk.on_realize),
        (tirx.Bind, walk.on_bind),
        (tirx.For, walk.on_for),
        (tirx.Let, walk.on_let),
        (tirx.AssertStmt, walk.on_assert),
        (tirx.DeclBuffer, lambda _node, _visitor: None),
        (Call, walk.on_call),
    ]
    for node in present:
        tvm_ffi.structural_visit(node, callbacks)
    return walk.found


# ---------------------------------------------------------------------------------------------- apart or not


@dataclass(frozen=True, eq=False)
class Steps:
    """Variables whose values identify a step of an iteration, and their axes."""

    facts: Facts
    axes: Mapping[Var, Axis]

    def fixed(self, group: Sequence[Touch]) -> set[Var]:
        """Return the variables on which two steps agree whenever they meet in an element that `group` accesses."""
        if any(t.indices is None for t in group) or not self._one_view(group):
            return set()
        rows = [t.indices or () for t in group]
        variables: set[Var] = set()
        for column in zip(*rows, strict=True):
            if all(same(column[0], index) for index in column[1:]):
                variables |= self._told_apart(column[0])
        return {v for v in variables if differ(self.axes[v]) or all(self._is_slot(t, v) for t in group)}

    def _one_view(self, group: Sequence[Touch]) -> bool:
        """Return whether the subscripts of the accesses can be compared with each other."""
        buffers = [self.facts.program.buffers.get(t.view) for t in group]
        if all(t.view.same_as(group[0].view) for t in group):
            return True
        return all(b is not None and buffers[0] is not None and b.axes == buffers[0].axes for b in buffers)

    def _told_apart(self, index: ir.Expr) -> set[Var]:
        """Return the variables whose values the value of `index` determines."""
        if isinstance(index, Var):
            return {index} if index in self.axes else set()
        variables: dict[Var, None] = {}
        structural_walk(index, (Var, lambda v: variables.setdefault(v)))
        if not variables or any(v not in self.axes for v in variables) or collect(index, ir.TensorLoad):
            return set()
        ranges = {v: coordinate_range(self.axes[v]) for v in variables}
        # The level "bijective" only accepts a sum that takes each of its values exactly once.
        result = sym.detect_iter_map([index], ranges, tirx.const(True, "bool"), "bijective", False)
        return set(variables) if len(result.indices) else set()

    def _is_slot(self, touch: Touch, var: Var) -> bool:
        """Return whether `var` and its ancestors' variables subscript their own axes: each slot is then one element."""
        buffer, axis = self.facts.program.buffers.get(touch.view), self.axes[var]
        if buffer is None or axis not in buffer.axes:
            return False
        by_axis = dict(zip(buffer.axes, touch.indices or (), strict=True))
        return all(isinstance(by_axis[a], Var) and self.axes.get(by_axis[a]) is a for a in (*axis.ancestors, axis))


def is_update(group: Sequence[Touch]) -> bool:
    """Return whether all accesses of a storage are updates with one operator, so that their order is free."""
    return bool(group[0].update) and all(t.update == group[0].update for t in group)


def is_constant_store(group: Sequence[Touch], fixed: set[Var], free: set[Var], stored: set[Var], facts: Facts) -> bool:
    """Return whether all steps that store to an element of the storage store the same value, and no step reads it.

    `free` are the variables that differ between steps; `stored` are the storages that the steps store to.
    """
    if any(not t.is_store or t.update or t.value is None for t in group):
        return False
    for touch in group:
        reads = {facts.storage(x.source) for x in collect(touch.value, ir.TensorLoad)}
        used: set[Var] = set()
        structural_walk(touch.value, (Var, used.add))
        if reads & stored or (used & free) - fixed:
            return False
    return all(same(t.value, group[0].value) for t in group)


def order_faults(accesses: Footprint, before: Sequence[Entry], after: Sequence[Entry], steps: Steps) -> Iterator[str]:
    """Yield the reasons why reordering the loops of an iteration from `before` to `after` may change its results."""
    if accesses.opaque:
        yield f"the effects of {accesses.opaque} are not known"
    free = set(steps.axes) | accesses.bound
    for storage in accesses.stored:
        group = accesses.of(storage)
        fixed = steps.fixed(group)
        varying = [[e for e in entries if not set(e.vars) <= fixed] for entries in (before, after)]
        if varying[0] == varying[1] or is_update(group):
            continue
        if is_constant_store(group, fixed, free, accesses.stored, steps.facts):
            continue
        name = next(t.view.name for t in group if t.is_store)
        names = " and ".join(sorted({a.name for e in varying[0] for a in e.axes}))
        yield f"what {name} holds depends on the order of {names}: it is stored or updated in an ordered way"


def meeting_faults(parts: Sequence[Footprint], steps: Steps, common_vars: set[Var]) -> Iterator[str]:
    """Yield the reasons against loop fission or fusion: each part run for all steps, or all parts for each step.

    Steps of different parts may meet only if they agree on the variables `common_vars`.
    """
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    if whole.opaque:
        yield f"the effects of {whole.opaque} are not known"
    for storage in whole.stored:
        if sum(storage in part.touched for part in parts) < 2:
            continue
        group = whole.of(storage)
        missing = common_vars - steps.fixed(group)
        if missing and not is_update(group):
            name = next(t.view.name for t in group if t.is_store)
            names = " and ".join(sorted(steps.axes[v].name for v in missing))
            yield f"they share {name}, and steps with different {names} may meet in one of its elements"


__all__ = ["Footprint", "Steps", "Touch", "footprint", "meeting_faults", "order_faults", "update_of"]
