# SPDX-License-Identifier: Apache-2.0
"""Iterate all coordinates of a sparse axis, stored or not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import Entry, SparseBuffer, SpIter, const
from sparsetir.lower.access import Scope
from sparsetir.lower.rewriting import collect, same
from sparsetir.op import is_if_then_else
from sparsetir.rules import Place, loads, stores
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    fiber_vars,
    label,
    rebuilt,
    refuse_grandparent,
    refuse_repeated,
    rehost,
    rehost_nested,
    single_entry,
    visits_stored,
)


def to_dense(func: tirx.PrimFunc, iteration: str, axis: Ref, *, guard: bool = False) -> Edit:
    """Iterate every coordinate of a sparse or ragged axis; where nothing is stored, buffers read their default.

    The body must do nothing where nothing is stored. It does if it only stores over the axis itself, or if the default
    value takes every term away: ``C[i, k] + 0 * B[j, k]``, ``max(C[i], lowest number)``. The second takes numbers as
    finite, as sparse arithmetic does everywhere: a stored-nowhere 0 times infinity counts as 0 here and is NaN after
    the change. With `guard` the body runs at stored coordinates only, whatever it does, which costs a second search.
    An axis that hangs from the changed one is attached to it: where nothing is stored it has no coordinates.

    args:
        iteration: name of a sparse iteration
        axis: one of its entries that is not dense_fixed; not fused
        guard: whether to test that the coordinate is stored

    rewrite:
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        J_all = T.dense_fixed(n)
        with T.sp_iter([I, J_all, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    rewrite (guard):
        J_stored = T.match_sparse_buffer(indices, (I, J), "int32", default_value=-1)
        with T.sp_iter([I, J_all, K], "SRS", "spmm") as [i, j, k]:
            if J_stored[i, j] >= 0:
                C[i, k] = C[i, k] + A[i, j] * B[j, k]

    Returns
    -------
    str
        The name of the new axis.

    Raises
    ------
    ScheduleError
        The axis is dense already or repeats coordinates, the body does something where nothing is stored, or `guard`
        is asked for an axis without an index array.
    """
    editor = Editor(func)
    place = editor.place(iteration)
    found = place.iteration
    entry = single_entry(found, axis, "densify")
    old = entry.axes[0]
    if old.kind == "dense_fixed":
        raise ScheduleError(f"{old.name} is a dense_fixed axis: all its coordinates are iterated already")
    if not old.unique:
        raise ScheduleError(f"cannot densify {old.name}: it repeats coordinates, and each stored one counts")
    nested = editor.nested(found)
    refuse_repeated(old, nested, "densify")
    refuse_grandparent(old, [place, *nested], "densify")
    body, init = _guarded(editor, place, entry) if guard else _checked(editor, place, entry)
    new = editor.dense(f"{old.name}_all", old.length, after=old)
    moved = rehost(found.entries, old, new)
    entries = [replace(e, axes=(new,), attached_to=None) if e is entry else e for e in moved]
    body = rehost_nested(body, old, new, editor.program)
    editor.swap(found.node, rebuilt(found, entries, body, init, promise=False))
    return editor.finish(label(replace(entry, axes=(new,), attached_to=None)))


def _walks_init(iteration: SpIter, entry: Entry) -> bool:
    """Whether the initialisation visits the stored points of the entry, and no others."""
    return iteration.block.init is not None and visits_stored(iteration) and "S" in entry.kinds


def _guarded(editor: Editor, place: Place, entry: Entry) -> tuple[tirx.Stmt, tirx.Stmt | None]:
    """The body and the initialisation under a test whether the coordinate is stored."""
    block, stored = place.iteration.block, _is_stored(editor, place, entry)
    init = tirx.IfThenElse(stored, block.init, None) if _walks_init(place.iteration, entry) else block.init
    return tirx.IfThenElse(stored, block.body, None), init


def _checked(editor: Editor, place: Place, entry: Entry) -> tuple[tirx.Stmt, tirx.Stmt | None]:
    """The body and the initialisation as they are, once they are known to do nothing where nothing is stored."""
    iteration, axis = place.iteration, entry.axes[0]
    hangs = any(e.attached_to is None and e.axes[0].parent is axis for e in iteration.entries)
    absent = _Absent(editor, place, entry)
    body, init = iteration.block.body, iteration.block.init
    fault = "" if hangs else absent.fault(body) or _hazard(editor, place, body)
    if not fault and _walks_init(iteration, entry):
        fault = absent.fault(init) or _hazard(editor, place, init)
    if fault:
        hint = "; pass guard=True to test it" if axis.indices is not None else ""
        raise ScheduleError(f"cannot densify {axis.name} in sp_iter {iteration.name!r}: {fault}{hint}")
    return body, init


def _hazard(editor: Editor, place: Place, node: tirx.Stmt) -> str:
    """What may fail at a coordinate that the program did not visit: a subscript out of range, a division by zero."""
    scope = Scope()
    for inner in (place, *editor.nested(place.iteration)):
        scope.ranges |= {v: ir.Range(const(0, str(a.length.ty.dtype)), a.length) for v, a in inner.variables.items()}
    for loop in collect(node, tirx.For):
        scope.ranges[loop.loop_var] = ir.Range.from_min_extent(loop.min, loop.extent)
    for access in (*stores(node), *loads(node)):
        plain = access.buffer not in editor.program.buffers
        sizes = list(access.buffer.ty.shape)
        if plain and not all(scope.proves_in_range(i, n) for i, n in zip(access.indices, sizes, strict=True)):
            return f"where nothing is stored its body may subscript {access.name} out of its shape"
    for kind in (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod):
        for division in collect(node, kind):
            if "float" not in str(division.ty.dtype) and not _number(division.b):
                return f"where nothing is stored its body may divide by zero in {division}"
    return ""


# ---------------------------------------------------------------------------------------------- where it is stored


def _is_stored(editor: Editor, place: Place, entry: Entry) -> ir.Expr:
    """Whether the coordinate is stored: the index array, seen as a buffer over its own axis, is -1 elsewhere."""
    axis = entry.axes[0]
    if axis.indices is None:
        raise ScheduleError(f"axis {axis.name} has no index array to test")
    chain, dtype = (*axis.ancestors, axis), str(axis.indices.ty.dtype)
    seen, declared = editor.declared(axis.indices, f"{axis.name}_stored", chain, const(-1, dtype))
    editor.declare_after(axis, *declared)
    at = fiber_vars(place, axis)
    return tirx.BufferLoad(seen, [at[a] for a in chain]) >= const(0, dtype)


@dataclass(eq=False)
class _Absent:
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
        condition = _number(self.value(node.condition))
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
            number = _number(inner)
            return tirx.Cast(str(expr.ty.dtype), inner) if number is None else _typed(number, expr)
        if isinstance(expr, tirx.Select):
            return self._choice(expr, expr.condition, expr.true_value, expr.false_value)
        if is_if_then_else(expr):
            return self._choice(expr, *expr.args)
        if type(expr) in _FOLD:
            return _FOLD[type(expr)](expr, self.value(expr.a), self.value(expr.b))
        if isinstance(expr, tirx.Not):
            number = _number(self.value(expr.a))
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
        number = _number(self.value(condition))
        if number is not None:
            return self.value(true if number else false)
        left, right = self.value(true), self.value(false)
        return left if same(left, right) else expr


def _number(expr: ir.Expr) -> float | int | None:
    """The value of a constant."""
    if isinstance(expr, tirx.Cast):
        return _number(expr.value)
    return expr.value if isinstance(expr, (tirx.IntImm, tirx.FloatImm)) else None


def _typed(number: float | int, like: ir.Expr) -> ir.Expr:
    dtype = str(like.ty.dtype)
    return tirx.const(bool(number) if dtype == "bool" else number, dtype)


def _is(expr: ir.Expr, number: int) -> bool:
    return _number(expr) == number


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
    return _typed(0, expr) if _is(a, 0) and _number(b) else expr


def _extreme(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    is_max, dtype = isinstance(expr, tirx.Max), str(expr.ty.dtype)
    end = _number(tirx.min_value(dtype) if is_max else tirx.max_value(dtype))
    for value, other in ((a, b), (b, a)):
        number = _number(value)
        if number is not None and end is not None and (number <= end if is_max else number >= end):
            return other
    return a if same(a, b) else type(expr)(a, b)


def _compare(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    left, right = _number(a), _number(b)
    return expr if left is None or right is None else _typed(_COMPARE[type(expr)](left, right), expr)


def _logic(expr: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    deciding = isinstance(expr, tirx.Or)
    for value, other in ((a, b), (b, a)):
        number = _number(value)
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
