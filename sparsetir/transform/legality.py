# SPDX-License-Identifier: Apache-2.0
"""Legality of transformations: order of entries, absent coordinates, neutral values, linearity."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.ir import dialect
from sparsetir.ir.dialect import is_if_then_else
from sparsetir.ir.rewriting import collect, same
from sparsetir.ir.rules import Facts, IterationScope
from sparsetir.ir.views import Entry, SparseBuffer, SpIter
from sparsetir.lower.analysis.dependence import Footprint, Steps, footprint, is_constant_store, is_update, update_of
from sparsetir.lower.loops import Update
from sparsetir.transform.editing import Editor, fiber_vars

# Whether the entries of a structure may be visited in another order, as those of its pieces or of a dense axis are.
#
# A decomposed program runs the body of an iteration once for each entry and each point of the other axes, as the
# original does. What changes is the order: pieces come one after the other, and each has an order of its own. Points
# with the same entry keep theirs. So the results are the same if two points with different entries never need each
# other: they touch no common element that one of them stores to, or only update it with one operator whose order is
# free (``X[s] = X[s] + term``), or all store the same value there. Sums are assumed to be associative, as everywhere.


class EntryOrder:
    """What the points of an iteration over a structure share; `entry` holds the variables that tell entries apart."""

    def __init__(self, facts: Facts, it: SpIter, entry: Sequence[Var]) -> None:
        # No two entries have the same coordinates: those that do are added up when they are converted.
        axes = {v: replace(a, unique=True) if v in entry else a for v, a in zip(it.vars, it.axes, strict=True)}
        self.facts, self.it, self.entry = facts, it, set(entry)
        self.steps = Steps(facts, axes)
        self.body = self._without_own_scratch(footprint(facts, it.block.body))
        self.init = self._without_own_scratch(footprint(facts, it.block.init))

    def _without_own_scratch(self, accesses: Footprint) -> Footprint:
        scratch = set(self.it.block.alloc_buffers)
        return replace(accesses, touches=[t for t in accesses.touches if t.storage not in scratch])

    def fault(self) -> str:
        """Return why the body may not visit the entries in another order; empty if it may."""
        return self._fault(self.body)

    def init_fault(self) -> str:
        """Return why the initialisation may not visit the entries in another order; empty if it may."""
        return self._fault(self.init)

    def _fault(self, part: Footprint) -> str:
        if part.opaque:
            return f"has effects that are not known, {part.opaque}"
        for storage in part.stored:
            group = part.of(storage)
            if is_update(group) or self.entry <= self.steps.fixed(group) or self._stores_the_same(part, group):
                continue
            name = next(str(t.view.name) for t in group if t.is_store)
            if any(not t.is_store for t in group):
                return f"reads {name}, which it stores to for other entries too: their order would matter"
            return f"stores to one element of {name} for several entries, of which the last one counts"
        return ""

    def _stores_the_same(self, part: Footprint, group: Sequence) -> bool:
        free = set(self.steps.axes) | part.bound
        return is_constant_store(group, self.steps.fixed(group), free, part.stored, self.facts)

    def keeps_apart(self, init: Iterable[tirx.Stmt], row: Var) -> bool:
        """Return whether only points of the same row touch what `init` sets, so that each row may set its own."""
        whole = footprint(self.facts, *init) + self.body
        stored = footprint(self.facts, *init).stored
        return all(row in self.steps.fixed(whole.of(storage)) for storage in stored)


# What statements do at a coordinate that is not stored, where buffers read their default.
#
# Values are folded as far as that decides it: ``C + 0 * B`` is ``C``. Numbers are taken as finite, so that nothing
# times zero is zero; a quotient of zero is not, since its divisor may be zero where nothing is stored.


@dataclass(eq=False)
class Absent:
    """What statements do at a coordinate that is not stored."""

    editor: Editor
    place: IterationScope
    entry: Entry
    values: dict[Var, ir.Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = fiber_vars(self.place, self.entry.axes[0])
        self.local: set[Var] = set(self.place.iteration.block.alloc_buffers)
        self.depth = 0  # of loops, branches and blocks around the current statement

    def is_absent(self, view: Var, indices: Sequence[ir.Expr]) -> bool:
        """Return whether the access is to a coordinate that is not stored."""
        axis, buffer = self.entry.axes[0], self.editor.program.buffers.get(view)
        if buffer is None or axis not in buffer.axes:
            return False
        by_axis = dict(zip(buffer.axes, indices, strict=True))
        return all(by_axis[a].same_as(var) for a, var in self.at.items())

    # ------------------------------------------------------------------ statements

    def fault(self, node: tirx.Stmt) -> str:
        """Return the effect of a statement at an absent coordinate; empty if it has none."""
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
        fault = self._compound(node)
        self.depth -= 1
        return fault

    def _compound(self, node: tirx.Stmt) -> str:
        if isinstance(node, tirx.IfThenElse):
            return self._branch(node)
        if isinstance(node, s_tir.SBlockRealize):
            return self._block(node)
        if isinstance(node, (tirx.For, tirx.While)):
            return self.fault(node.body)
        return f"its body has the statement {str(node).strip()}"

    def _first(self, nodes: Iterable[tirx.Stmt | None]) -> str:
        """Return the first fault of several statements."""
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
        """Record the value of a local variable that is set once."""
        sets = [s for s in collect(self.place.iteration.block.body, tirx.BufferStore) if s.buffer.same_as(cell)]
        if self.depth == 0 and len(sets) == 1 and len(cell.ty.shape) == 1 and _is(cell.ty.shape[0], 1):
            self.values[cell] = value

    def _branch(self, node: tirx.IfThenElse) -> str:
        condition = number_of(self.value(node.condition))
        parts = [node.then_case, node.else_case]
        branches = parts if condition is None else parts[:1] if condition else parts[1:]
        return self._first(branches)

    def _block(self, node: s_tir.SBlockRealize) -> str:
        if node.block.init is not None:
            return f"block {node.block.name_hint!r} inside initialises something"
        self.local.update(node.block.alloc_buffers)
        return self.fault(node.block.body)

    # ------------------------------------------------------------------ expressions

    def value(self, expr: ir.Expr) -> ir.Expr:
        """Evaluate an expression with the default values of absent elements, as far as they determine it."""
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
    """Return the value of a constant."""
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
    for value, alternative in ((a, b), (b, a)):
        number = number_of(value)
        if number is not None and end is not None and (number <= end if is_max else number >= end):
            return alternative
    return a if same(a, b) else type(expr)(a, b)


def _compare(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    left, right = number_of(a), number_of(b)
    return expr if left is None or right is None else _typed(_COMPARE[type(expr)](left, right), expr)


def _logic(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    deciding = isinstance(expr, tirx.Or)
    for value, alternative in ((a, b), (b, a)):
        number = number_of(value)
        if number is not None:
            return _typed(deciding, expr) if bool(number) is deciding else alternative
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


# Whether slots between the entries of a tensor, which hold zero, change what an iteration computes.


IsOwn = Callable[[Var, Any], bool]


def is_zero(expr: ir.Expr, clean: Set[Var], is_own: IsOwn) -> bool:
    """Return whether `expr` is zero where every own element of the buffers `clean` is zero.

    A product with a zero counts as zero: as in every library of block formats, infinity times padding is not kept out.
    """
    zero = lambda e: is_zero(e, clean, is_own)  # noqa: E731
    if isinstance(expr, (tirx.FloatImm, tirx.IntImm)):
        return float(expr.value) == 0
    if isinstance(expr, ir.TensorLoad):
        return expr.source in clean and is_own(expr.source, expr.indices)
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
    if dialect.is_if_then_else(expr):
        return zero(expr.args[1]) and zero(expr.args[2])
    return False


def adds_nothing(store: tirx.BufferStore, clean: Set[Var], is_own: IsOwn) -> bool:
    """Return whether a store only adds a term that is zero: ``X[i] = X[i] + 0``."""
    update = Update.of(store, (tirx.Add, tirx.Sub), either=True)
    return update is not None and is_zero(update.term, clean, is_own)


def is_neutral(body: tirx.Stmt, rewritten: Set[Var], clean: Set[Var], is_own: IsOwn) -> bool:
    """Return whether running `body` on a slot that is no entry changes no other buffer.

    Parameters
    ----------
    body : Stmt
    rewritten : set of Var
        Buffers over the padded axes: stores to their padding are allowed.
    clean : set of Var
        Those whose padding is known to be zero.
    is_own : callable
        Return whether a subscript list denotes the iteration's own slot.
    """
    stores = collect(body, tirx.BufferStore)
    return all(s.buffer in rewritten or adds_nothing(s, clean, is_own) for s in stores)


def multiplies(body: tirx.Stmt, rewritten: Set[Var]) -> bool:
    """Return whether zero padding meets floats of other buffers: infinity times zero is not zero."""
    terms = [s.value for s in collect(body, tirx.BufferStore) if s.buffer not in rewritten]
    targets = {s.buffer for s in collect(body, tirx.BufferStore)}
    loads = [load for term in terms for load in collect(term, ir.TensorLoad)]
    outside_loads = [load for load in loads if load.source not in rewritten and load.source not in targets]
    return any(str(load.ty.dtype).startswith(("float", "bfloat")) for load in outside_loads)


def zero_after(parts: list[tirx.Stmt], rewritten: Set[Var], clean: Set[Var], is_own: IsOwn) -> set[Var]:
    """Return the buffers whose padding is zero after `parts` ran on every slot, one after another.

    A buffer without values becomes clean by a store that every slot executes, whose value is zero there.
    """
    zero, dirty = set(clean), set[Var]()
    for stmt in (inner for part in parts for inner in (part.seq if isinstance(part, tirx.SeqStmt) else [part])):
        stores = [s for s in collect(stmt, tirx.BufferStore) if s.buffer in rewritten]
        for _ in stores:  # A loop may read what a later store of it has made dirty.
            dirty |= {s.buffer for s in stores if not is_zero(s.value, zero - dirty, is_own)}
        if isinstance(stmt, tirx.BufferStore) and stmt.buffer in rewritten and is_own(stmt.buffer, stmt.indices):
            zero.add(stmt.buffer)
    return zero - dirty


# Whether a program computes the same when entries with the same coordinates are added up beforehand.
#
# Converting to a format adds them up, whereas an iteration over an axis with ``unique=False`` visits each of them. Both
# agree where everything that is made of the entries' values is linear in them::
#
#     Y[i] = Y[i] + A[i, j] * X[j]            # a x + b x = (a + b) x
#     O[i, j] = 2 * A[i, j]                   # and O keeps a value for each entry, to be summed one by one
#     seen[i] = 1                             # or does not depend on how often it is done
#
# and they do not where it is not: ``max(Y[i], A[i, j])``, ``A[i, j] * A[i, j]``, ``Y[i] + 1``.


#: operators for which the same term twice is as good as once
_IDEMPOTENT = ("max", "min", "and", "or", "&", "|")


@dataclass(eq=False)
class LinearUse:
    """What statements do with the values of the buffers `views` at their own entry.

    ``degrees`` has 0 for a local buffer that does not depend on these values and 1 for one that is linear in them.
    """

    views: Set[Var]
    is_own: Callable[[Var, Any], bool]
    stored: set[Var] = field(default_factory=set)
    degrees: dict[Var, int] = field(default_factory=dict)
    local: set[Var] = field(default_factory=set)

    def holds(self, *parts: tirx.Stmt | None) -> bool:
        """Return whether the statements, run in this order, are linear in the values."""
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
        """Record the degree of a local buffer; all its stores must have the same."""
        if _is_zero(node.value):
            return True
        update = update_of(node)
        terms = update[1] if update is not None and update[0] == "+" else [node.value]
        degrees = {self.degree(t) for t in terms if not _is_zero(t)}
        degree = degrees.pop() if len(degrees) == 1 else None
        return degree is not None and self.degrees.setdefault(node.buffer, degree) == degree

    # ------------------------------------------------------------------ expressions

    def degree(self, expr: ir.Expr) -> int | None:
        """Return 0 if `expr` does not depend on the values, 1 if it is linear in them, None otherwise."""
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
        return self._chosen(*expr.args) if dialect.is_if_then_else(expr) else None

    def _agreed(self, a: ir.Expr, b: ir.Expr) -> int | None:
        """Return the degree of a sum or of a choice."""
        degrees = {self.degree(x) for x in (a, b) if not _is_zero(x)}
        return degrees.pop() if len(degrees) == 1 else None

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
        """Return whether anything in `expr` is more than a number that the values do not change."""
        return any(self._load(x) != 0 for x in collect(expr, ir.TensorLoad))


def _is_zero(expr: ir.Expr) -> bool:
    if isinstance(expr, tirx.Cast):
        return _is_zero(expr.value)
    return isinstance(expr, (tirx.IntImm, tirx.FloatImm)) and float(expr.value) == 0


def _keeps_sums(source: str, target: str) -> bool:
    """Return whether the cast of a sum is the sum of the casts, but for rounding."""
    if "float" in source:
        return "float" in target
    narrows = tvm_ffi.dtype(target).bits <= tvm_ffi.dtype(source).bits
    return "int" in source and "int" in target and narrows  # integers wrap around


__all__ = ["Absent", "EntryOrder", "LinearUse", "is_neutral", "is_zero", "multiplies", "number_of", "zero_after"]
