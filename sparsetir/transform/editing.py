# SPDX-License-Identifier: Apache-2.0
"""Find iterations and axes by name, create nodes, and replace them in a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import flattened, mentions, sequence
from sparsetir.ir.rules import IterationScope, facts_of
from sparsetir.ir.sizes import LARGEST_INT32
from sparsetir.ir.views import (
    INDEPENDENT,
    INIT,
    SPARSE_ITER,
    STORED,
    Axis,
    Entry,
    SparseBuffer,
    SpIter,
    cast,
    const,
    declare_buffer,
    decode_axis,
    fresh_name,
    is_sp_iter,
    label,
    make_iteration,
    names_in,
)
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.lower.loops import Update
from sparsetir.utils.arguments import as_count, shown

# What the primitives share: find an iteration and its axes by name, make new nodes, put them in place.


MERGED = {"union": "a union", "intersect": "an intersection"}
Ref = Any  # an axis by name, a fused entry by the names of its members


class Edit(NamedTuple):
    """A changed function, and what the primitive tells its caller."""

    func: tirx.PrimFunc
    result: Any = None


# ---------------------------------------------------------------------------------------------- by name


def find_entries(iteration: SpIter, refs: Sequence[Ref]) -> list[Entry]:
    """Return the entries that a list of references names."""
    return [find_entry(iteration, ref) for ref in _listed(refs)]


def _listed(refs: Any) -> list[Any]:
    if not isinstance(refs, (Sequence, ir.Array)):
        raise ScheduleError(f"axes: expected names of axes, got {type(refs).__name__}. Pass a list of strings.")
    return list(refs)


def find_entry(iteration: SpIter, ref: Ref) -> Entry:
    """Return the entry that `ref` names: its text in the list, the name of its axis, or the names of its fused axes."""
    names = [ref] if isinstance(ref, str) else _listed(ref)
    if not names or not all(isinstance(name, str) for name in names):
        raise ScheduleError(f"axis: expected the name of an axis or of fused axes, got {shown(ref)}. Pass strings.")
    exact = [e for e in iteration.entries if [label(e)] == names]
    matches = exact or [e for e in iteration.entries if [a.name for a in e.axes] == names]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(label(e) for e in iteration.entries)
    requested = ref if isinstance(ref, str) else f"T.fuse({', '.join(names)})"
    if matches:
        raise ScheduleError(f"{requested} is ambiguous in sp_iter {iteration.name!r}, which lists {listed}")
    member = [e for e in iteration.entries if e.is_fused and names[0] in [a.name for a in e.axes]]
    hint = f"; name {label(member[0])} as a whole" if member else ""
    raise ScheduleError(f"sp_iter {iteration.name!r} has no entry {requested}; it lists {listed}{hint}")


def single_entry(iteration: SpIter, ref: Ref, purpose: str) -> Entry:
    """Return the entry of one axis that `ref` names, iterated below its own parent."""
    owner = [e for e in iteration.entries if e.is_fused and ref in [a.name for a in e.axes]]
    entry = owner[0] if owner else find_entry(iteration, ref)
    if entry.is_fused:
        raise ScheduleError(f"cannot {purpose} in {label(entry)}: its axes are one loop; do it before fusing")
    return entry


def check_count(value: Any, what: str) -> int:
    """Return an integer that a loop's extent can be."""
    return as_count(value, what, most=LARGEST_INT32, error=ScheduleError)


# ---------------------------------------------------------------------------------------------- nodes


def is_constant(expr: ir.Expr | None) -> bool:
    return isinstance(expr, tirx.IntImm)


def ceil_div(value: ir.Expr, factor: int) -> ir.Expr:
    """Return `value` divided by `factor`, rounded up."""
    dtype = str(value.ty.dtype)
    if is_constant(value):
        return const(-(-int(value) // factor), dtype)
    return tirx.floordiv(value + const(factor - 1, dtype), const(factor, dtype))


def divides(factor: int, extent: ir.Expr) -> bool:
    """Return whether `extent` is known to be a multiple of `factor`."""
    return factor == 1 or (is_constant(extent) and int(extent) % factor == 0)


def new_var(name: str, axis: Axis) -> Var:
    """Create a variable that iterates `axis`."""
    return Var(name, ir.PrimType(axis.idtype))


def statements(node: tirx.Stmt | None) -> list[tirx.Stmt]:
    """Return the statements of a body; none if there is none."""
    return [] if node is None else list(flattened([node]))


def notes_of(iteration: SpIter) -> dict[str, Any]:
    """Return the annotations a user gave."""
    return {str(k): v for k, v in iteration.block.annotations.items() if k != SPARSE_ITER}


def visits_stored(iteration: SpIter) -> bool:
    """Return whether the initialisation only iterates stored points."""
    return str(iteration.block.annotations.get(INIT, "")) == STORED


def without_promise(notes: dict[str, Any]) -> dict[str, Any]:
    """Remove the promise of independent outermost steps from annotations."""
    return {k: v for k, v in notes.items() if k != INDEPENDENT}


def rebuilt(
    iteration: SpIter, entries: Sequence[Entry], body: Any = None, init: Any = None, *, promise: bool | None = None
) -> s_tir.SBlockRealize:
    """Rebuild `iteration` with other entries, and with another body and initialisation if given.

    The promise of independent steps stays if the outermost loop does, or as `promise` says.
    """
    block = iteration.block
    body, init = block.body if body is None else body, block.init if init is None else init
    holds = entries[0] is iteration.entries[0] if promise is None else promise
    notes = notes_of(iteration) if holds else without_promise(notes_of(iteration))
    buffers = list(block.alloc_buffers)
    return make_iteration(iteration.name, entries, body, init=init, notes=notes, allocated=buffers)


# ---------------------------------------------------------------------------------------------- editing


class Editor:
    """Changes of one function: declarations to add and statements to replace, all put in place by `finish`."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.facts = facts_of(func)
        self.program = self.facts.program
        self.names = names_in(func)
        self._after: dict[Var, list[tirx.Stmt]] = {}
        self._before: dict[Var, list[tirx.Stmt]] = {}
        self._swaps: list[tuple[tirx.Stmt, list[tirx.Stmt]]] = []

    # ------------------------------------------------------------------ what there is

    def place(self, name: str, *, merged: bool = False) -> IterationScope:
        """Return the iteration called `name` with its enclosing iterations.

        Unless `merged`, raise if it or an iteration inside it merges axes or computes an axis.
        """
        if not isinstance(name, str):
            fault = f"iteration: expected the name of an sp_iter, got {type(name).__name__}."
            raise ScheduleError(f"{fault} Pass a string.")
        matches = [p for p in self.facts.places if p.iteration.name == name]
        if len(matches) == 1:
            inside = [] if merged else [matches[0], *self.nested(matches[0].iteration)]
            for entry in (e for p in inside for e in p.iteration.entries if e.merge or e.axes[-1].is_assembled):
                reason = "computes an axis" if not entry.merge else f"walks {MERGED[entry.merge]} of axes"
                message = f"sp_iter {name!r} {reason}, {label(entry)}: this primitive changes loops of stored axes"
                raise ScheduleError(f"{message}; annotate and set_search change such an iteration")
            return matches[0]
        listed_names = ", ".join(repr(p.iteration.name) for p in self.facts.places) or "none"
        if matches:
            raise ScheduleError(f"{len(matches)} sparse iterations are called {name!r}; give them different names")
        raise ScheduleError(f"no sparse iteration is called {name!r}; there are: {listed_names}")

    def iteration(self, name: str, *, merged: bool = False) -> SpIter:
        """Return the iteration called `name`; `merged` as for `place`."""
        return self.place(name, merged=merged).iteration

    def nested(self, iteration: SpIter) -> list[IterationScope]:
        """Return the iterations inside `iteration`."""
        return [p for p in self.facts.places if iteration in p.outer]

    def declaration(self, axis: Axis) -> Call:
        """Return the call that declares `axis`."""
        calls: list[Call] = []
        on_bind = lambda b: calls.append(b.value) if b.var.same_as(axis.var) else None  # noqa: E731
        structural_walk(self.func.body, (tirx.Bind, on_bind))
        return calls[0]

    # ------------------------------------------------------------------ what is added

    def fresh(self, base: str) -> str:
        """Return an unused name."""
        return fresh_name(base, self.names)

    def axis(self, name: str, kind: str, operands: list[Any], *, after: Axis) -> Axis:
        """Declare a new axis right after another one, with the index dtype of `after`."""
        var = Var(self.fresh(name), ir.PrimType(after.idtype))
        value = dialect.call(kind, operands, after.idtype)
        axis = decode_axis(var, value, self.program.axes)
        self.program.axes[var] = axis
        self._after.setdefault(after.var, []).append(tirx.Bind(var, value))
        return axis

    def dense(self, name: str, length: ir.Expr, *, after: Axis) -> Axis:
        """Declare a new dense_fixed axis."""
        return self.axis(name, "dense_fixed", [length], after=after)

    def declared(self, storage: Var, name: str, axes: Sequence[Axis], default: ir.Expr) -> tuple[Var, list[tirx.Stmt]]:
        """Return a new sparse buffer over a storage, and the statements that declare it."""
        dtype = str(storage.ty.dtype)
        shape, align = [a.length for a in axes], max(1, tvm_ffi.dtype(dtype).bits // 8)
        view = tirx.decl_buffer(shape, dtype, name=self.fresh(name), layout=None, data_alignment=align)
        self.program.buffers[view] = SparseBuffer(view, storage, tuple(axes), default)
        return view, declare_buffer(view, storage, default, axes)

    def view(self, buffer: SparseBuffer, name: str, axes: Sequence[Axis]) -> Var:
        """Return another view of the storage of `buffer`, over other axes with the same positions.

        It is declared before `buffer`'s view, because callers name the last view declared over an array.
        """
        view, stmts = self.declared(buffer.storage, name, axes, buffer.default)
        self._before.setdefault(buffer.view, []).extend(stmts)
        return view

    def declare_after(self, axis: Axis, *stmts: tirx.Stmt) -> None:
        """Insert statements after the declaration of `axis` and earlier insertions."""
        self._after.setdefault(axis.var, []).extend(stmts)

    def swap(self, node: tirx.Stmt, *stmts: tirx.Stmt) -> None:
        """Replace `node` by `stmts`, which may be empty."""
        self._swaps.append((node, list(stmts)))

    # ------------------------------------------------------------------ the edit

    def finish(self, result: Any = None) -> Edit:
        """Return the function with every change in place."""
        callbacks = [(tirx.SeqStmt, self._seq), (s_tir.SBlockRealize, self._realize)]
        body = structural_mutate(self.func.body, callbacks)
        return Edit(tirx.PrimFunc(self.func.params, body, self.func.ret_type, self.func.attrs), result)

    def _swapped(self, node: tirx.Stmt) -> list[tirx.Stmt] | None:
        return next((new for old, new in self._swaps if old.same_as(node)), None)

    def _realize(self, node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
        new = self._swapped(node)
        return mutator.default_mutate(node) if new is None else sequence(*new)

    def _seq(self, node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        out: list[tirx.Stmt] = []
        for stmt in node.seq:
            new = self._swapped(stmt)
            if isinstance(stmt, tirx.DeclBuffer):
                out += self._before.get(stmt.buffer, [])
            out += flattened([mutator.mutate(stmt)] if new is None else new)
            if isinstance(stmt, tirx.Bind):
                out += self._after.get(stmt.var, [])
        return sequence(*out)


# ---------------------------------------------------------------------------------------------- axes of an iteration


def dependents(axis: Axis, places: Sequence[IterationScope]) -> list[Entry]:
    """Return the entries below `axis` or attached to it, in any of the iterations."""
    entries = [e for p in places for e in p.iteration.entries]
    return [e for e in entries if e.attached_to is axis or (e.attached_to is None and e.axes[0].parent is axis)]


def refuse_repeated(axis: Axis, nested: Sequence[IterationScope], purpose: str) -> None:
    """Refuse to replace an axis that an inner iteration iterates again, or needs two levels above an attached axis."""
    for place in nested:
        if axis in place.iteration.axes:
            inner = place.iteration.name
            raise ScheduleError(f"cannot {purpose} {axis.name}: sp_iter {inner!r} inside iterates it again")


def refuse_grandparent(axis: Axis, places: Sequence[IterationScope], purpose: str) -> None:
    """Refuse where an attached axis is found through `axis`, two levels above it."""
    for entry in (e for p in places for e in p.iteration.entries if e.attached_to is not None):
        parent = entry.axes[0].parent
        if parent is not None and parent.parent is axis:
            message = f"cannot {purpose} {axis.name}: {label(entry)} looks its parent {parent.name} up below it"
            raise ScheduleError(message)


def rehost(entries: Sequence[Entry], old: Axis, new: Axis) -> list[Entry]:
    """Return the entries, with what hung from `old` attached to the coordinate of `new`."""
    return [replace(e, attached_to=new) if e in _hanging(entries, old) else e for e in entries]


def _hanging(entries: Sequence[Entry], old: Axis) -> list[Entry]:
    return [e for e in entries if e.attached_to is old or (e.attached_to is None and e.axes[0].parent is old)]


def rehost_nested(body: Any, old: Axis, new: Axis, program: Any) -> Any:
    """Replace `old` by `new` as host and parent in the iterations nested in `body`."""

    def on_coord(call: Call, mutator: Any) -> ir.Expr:
        if not dialect.is_call(call, "coord"):
            return mutator.default_mutate(call)
        target, member = call.args
        if dialect.is_call(target, "attach"):
            if target.args[1].same_as(old.var):
                target = dialect.call("attach", [target.args[0], new.var], str(target.ty.dtype))
        elif isinstance(target, Var) and program.axes[target].parent is old:
            target = dialect.call("attach", [target, new.var], str(target.ty.dtype))
        return dialect.call("coord", [target, member], str(call.ty.dtype))

    return structural_mutate(body, [(Call, on_coord)])


def fiber_vars(place: IterationScope, axis: Axis) -> dict[Axis, Var]:
    """Return the variables of the coordinates of an iterated axis and its ancestors, whichever axes they iterate."""
    entries = [e for it in (*place.outer, place.iteration) for e in it.entries]
    entry = next(e for e in reversed(entries) if axis in e.axes)
    chain = (*axis.ancestors, axis)
    variables = {a: v for a, v in zip(entry.axes, entry.vars, strict=True) if a in chain}
    if entry.is_fused or axis.parent is None:
        return variables
    if entry.attached_to is None:
        return fiber_vars(place, axis.parent) | variables
    host = fiber_vars(place, entry.attached_to)[entry.attached_to]
    above = {} if axis.parent.parent is None else fiber_vars(place, axis.parent.parent)
    return {**above, axis.parent: host, **variables}


def is_declaration(stmt: tirx.Stmt) -> bool:
    """Return whether a statement only declares: an axis, a buffer, a buffer's axes."""
    if isinstance(stmt, tirx.Bind):
        return dialect.is_call(stmt.value, *dialect.AXIS_NAMES)
    if isinstance(stmt, tirx.Evaluate):
        return dialect.is_call(stmt.value, "bind_axes")
    return isinstance(stmt, (tirx.DeclBuffer, tirx.AllocBuffer))


# Run a body only where a condition holds.


def guarded_init(condition: ir.Expr, init: tirx.Stmt | None, condition_vars: Sequence[Var]) -> tirx.Stmt | None:
    """Guard `init` by `condition` if it mentions the variables `condition_vars` of the condition."""
    if init is None or not mentions(init, condition_vars):
        return init
    return tirx.IfThenElse(condition, init, None)


def below(coord: ir.Expr, length: ir.Expr) -> ir.Expr:
    """Return the condition that a non-negative coordinate lies inside its axis."""
    return coord < cast(length, str(coord.ty.dtype))


def guarded(condition: ir.Expr, body: tirx.Stmt, condition_vars: Sequence[Var]) -> tirx.Stmt:
    """Guard `body` by `condition`.

    A sum stays a single store, the form that TVM's primitives take for a reduction, if its element does not depend
    on the variables `condition_vars` that the condition is about.
    """
    update = Update.of(body)
    if update is None or mentions(update.indices, condition_vars):
        return tirx.IfThenElse(condition, body, None)
    term = tirx.if_then_else(condition, update.term, tirx.const(0, str(update.term.ty.dtype)))
    return tirx.BufferStore(update.store.buffer, update.own + term, update.indices)


__all__ = ["Edit", "Editor", "find_entries", "find_entry", "is_sp_iter", "label", "make_iteration", "rebuilt"]
