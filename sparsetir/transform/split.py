# SPDX-License-Identifier: Apache-2.0
"""Split a loop, an axis by the slots of its fibers, or an iteration into its initialisation and statements."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import ir, tirx
from tvm.ir import Call, Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import collect, mentions, sequence, substitute
from sparsetir.ir.rules import Access, IterationScope, loads, stores
from sparsetir.ir.views import INIT, Axis, Entry, SparseBuffer, SpIter, cast, const, label, substitute_args
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.dependence import Footprint, Steps, footprint, meeting_faults
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    below,
    ceil_div,
    check_count,
    dependents,
    divides,
    fiber_vars,
    guarded,
    guarded_init,
    is_declaration,
    make_iteration,
    new_var,
    notes_of,
    rebuilt,
    refuse_grandparent,
    refuse_repeated,
    single_entry,
    statements,
    visits_stored,
)
from sparsetir.utils.arguments import as_index, shown

# Split one loop of an iteration into two.


def sparse_split(func: tirx.PrimFunc, iteration: str, axis: Ref, factor: int) -> Edit:
    """Split an axis into groups of `factor` and the places in a group; the storage stays as it is.

    A dense_fixed axis K that nothing hangs from becomes two dense axes. Its coordinate is ``k_o * factor + k_i``; a
    guard leaves out what lies beyond its length, unless `factor` divides it.

    Any other axis J is split by slots: J_o counts the groups of a fiber, J_i the slots of a group, both ragged, and
    for a sparse axis J_c is the coordinate stored there. What lies below J and the buffers over it are seen through
    new axes with the same positions and the same arrays, so nothing is searched and nothing is copied.

    args:
        iteration: name of a sparse iteration
        axis: one of its entries; not fused
        factor: slots of a group, a positive number

    rewrite (dense):
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        K_o = T.dense_fixed((feat + 3) // 4)
        K_i = T.dense_fixed(4)
        with T.sp_iter([I, J, K_o, K_i], "SRSS", "spmm") as [i, j, k_o, k_i]:
            if k_o * 4 + k_i < feat:
                C[i, k_o * 4 + k_i] = C[i, k_o * 4 + k_i] + A[i, j] * B[j, k_o * 4 + k_i]

    rewrite (slots):
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            Y[i] = Y[i] + A[i, j] * X[j]
        ->
        J_o = T.dense_variable(I, ..., extent=lambda i: groups of row i, offset=...)
        J_i = T.dense_variable(J_o, ..., extent=lambda i, j_o: slots of the group, offset=...)
        J_c = T.singleton(J_i, n, indices)
        A_split = T.match_sparse_buffer(a, (I, J_o, J_i, J_c))
        with T.sp_iter([I, J_o, J_i, J_c], "SRRR", "spmv") as [i, j_o, j_i, j]:
            Y[i] = Y[i] + A_split[i, j_o, j_i, j] * X[j]

    Returns
    -------
    list of str
        The names of the new entries.

    Raises
    ------
    ScheduleError
        The axis is fused or a singleton, hangs from a sparse axis (a formula cannot tell the position of its fiber), or
        the iteration initialises something over it that has to be set apart with `split_init`.
    """
    factor = check_count(factor, "the factor of a split")
    editor = Editor(func)
    place = editor.place(iteration)
    entry = single_entry(place.iteration, axis, "split")
    split_axis = entry.axes[0]
    if split_axis.kind == "singleton":
        raise ScheduleError(f"cannot split {split_axis.name}: a singleton axis has one slot below each position")
    if split_axis.kind == "dense_fixed" and not dependents(split_axis, [place, *editor.nested(place.iteration)]):
        return _split_dense(editor, place, entry, factor)
    return split_slots(editor, place, entry, factor)


def _split_dense(editor: Editor, place: IterationScope, entry: Entry, factor: int) -> Edit:
    iteration, axis, var = place.iteration, entry.axes[0], entry.vars[0]
    length, dtype = cast(axis.length, axis.idtype), axis.idtype
    outer = editor.dense(f"{axis.name}_o", ceil_div(length, factor), after=axis)
    inner = editor.dense(f"{axis.name}_i", const(factor, dtype), after=axis)
    new = [replace(entry, axes=(a,), vars=(new_var(f"{var.name}_{s}", a),)) for a, s in ((outer, "o"), (inner, "i"))]
    coord = new[0].vars[0] * const(factor, dtype) + new[1].vars[0]
    moved, block = [e.vars[0] for e in new], iteration.block

    body, init = (None if n is None else substitute(n, {var: coord}) for n in (block.body, block.init))
    if not divides(factor, length):
        inside = below(coord, length)
        body, init = guarded(inside, body, moved), guarded_init(inside, init, moved)
    entries = split_entries(iteration.entries, entry, new)
    editor.swap(iteration.node, rebuilt(iteration, entries, body, init, promise=True))
    return editor.finish([label(e) for e in new])


def split_entries(entries: Sequence[Entry], old: Entry, new: Sequence[Entry]) -> list[Entry]:
    """Return the list with `new` in the place of `old`."""
    return [e for entry in entries for e in (new if entry is old else [entry])]


# Split an axis by the slots of its fibers, over the storage as it is.
#
# The slots of a fiber of J become groups J_o of `factor` slots J_i, whose positions are J's own:
#
#     position of (j_o, j_i) = first position of the fiber + j_o * factor + j_i
#
# So whatever was stored at a position of J is found at the same position of J_i, and of the singleton J_c below it
# that holds the coordinate. Axes below J are declared again below the new ones, with their arrays; buffers over J are
# viewed through the new axes.


def position_of(axis: Axis, coords: Sequence[ir.Expr]) -> ir.Expr | None:
    """Return the position of the point `coords` of an axis and its ancestors; None if only a search finds it."""
    if axis.kind == "dense_fixed":
        return coords[-1]
    above = const(0, axis.idtype) if axis.parent is None else position_of(axis.parent, coords[:-1])
    if above is None or axis.kind in ("sparse_fixed", "sparse_variable"):
        return None
    if axis.kind == "singleton":
        return cast(above, axis.idtype)
    return axis.begin(above, coords[:-1]) + coords[-1]


def _arg(k: int, dtype: str) -> Call:
    return dialect.call("arg", [k], dtype)


@dataclass(eq=False)
class Slots:
    """The new axes; ``at`` is None where the coordinate is computed from the other two."""

    editor: Editor
    place: IterationScope
    entry: Entry
    factor: int
    outer: Axis = field(init=False)
    inner: Axis = field(init=False)
    at: Axis | None = field(init=False)
    below: dict[Axis, Axis] = field(init=False)
    views: dict[Var, Var] = field(init=False)

    def __post_init__(self) -> None:
        self.axis, self.var = self.entry.axes[0], self.entry.vars[0]
        self.above = fiber_vars(self.place, self.axis)
        self.places = [self.place, *self.editor.nested(self.place.iteration)]
        self.args = [_arg(k, self.axis.idtype) for k in range(len(self.axis.ancestors))]
        self.outer, self.inner = self._groups()
        hosts = [e for p in self.places for e in p.iteration.entries if e.attached_to is self.axis]
        self.at = self._coordinates() if hosts or not self.axis.is_dense else None
        self.below, self.views = {}, {}

    # ------------------------------------------------------------------ axes

    def _above(self) -> ir.Expr:
        """Return the position of the parent as a formula."""
        axis = self.axis
        if axis.parent is None:
            return const(0, axis.idtype)
        position = position_of(axis.parent, self.args)
        if position is None:
            sparse = next(a for a in (axis.parent, *reversed(axis.ancestors)) if not a.is_dense)
            message = f"a formula of coordinates cannot tell its position below the sparse axis {sparse.name}"
            raise ScheduleError(f"cannot split {axis.name}: {message}")
        return cast(position, axis.idtype)

    def _groups(self) -> tuple[Axis, Axis]:
        """Return the axis of the groups and the axis of the slots in a group."""
        axis, factor, dtype = self.axis, self.factor, self.axis.idtype
        size = const(factor, dtype)
        above = self._above()
        begin, extent = axis.begin(above, self.args), axis.extent(above, self.args)
        if axis.kind in ("dense_fixed", "sparse_fixed") and axis.parent is None:
            outer = self.editor.dense(f"{axis.name}_o", ceil_div(extent, factor), after=axis)
        else:
            outer = self._ragged_groups(above, begin, extent)
        group = _arg(len(self.args), dtype)
        first = group * size
        group_size = size if divides(factor, extent) else tirx.min(size, extent - first)
        operands = [outer.var, size, cast(axis.count, dtype), group_size, begin + first]
        return outer, self.editor.axis(f"{axis.name}_i", "dense_implicit", operands, after=axis)

    def _ragged_groups(self, above: ir.Expr, begin: ir.Expr, extent: ir.Expr) -> Axis:
        axis, factor = self.axis, self.factor
        parent: Any = dialect.call("root", []) if axis.parent is None else axis.parent.var
        longest = axis.length if axis.unique else axis.count
        longest = longest if axis.width is None else axis.width
        # Fibers follow each other, so rounding every start down and adding one group for each fiber leaves room.
        offset = above if axis.parent is None else tirx.floordiv(begin, const(factor, axis.idtype)) + above
        parents = const(1) if axis.parent is None else axis.parent.count
        count = tirx.floordiv(cast(axis.count, axis.idtype), const(factor, axis.idtype)) + cast(parents, axis.idtype)
        operands = [parent, ceil_div(cast(longest, axis.idtype), factor), count, ceil_div(extent, factor), offset]
        return self.editor.axis(f"{axis.name}_o", "dense_implicit", operands, after=axis)

    def _coordinates(self) -> Axis:
        """Declare a singleton axis with the coordinate of each slot."""
        axis = self.axis
        where: Any = axis.indices if axis.indices is not None else self._coordinate_rule()
        operands = [self.inner.var, axis.length, where, int(axis.sorted), int(axis.unique)]
        return self.editor.axis(f"{axis.name}_c", "singleton", operands, after=axis)

    def _slot(self, dtype: str) -> ir.Expr:
        """Return the old slot as a formula of the arguments of a new axis, which all have the axis's type."""
        n = len(self.args)
        return _arg(n, dtype) * const(self.factor, dtype) + _arg(n + 1, dtype)

    def _coordinate_rule(self) -> ir.Expr:
        dtype, n = self.axis.idtype, len(self.args)
        slot, position = self._slot(dtype), _arg(n + 3, dtype)  # which comes behind the two new axes and the one slot
        return slot if self.axis.rule is None else substitute_args(self.axis.rule, [*self.args, slot, position])

    def redeclare(self, axis: Axis) -> Axis:
        """Declare `axis`, a descendant of the split one, below the new axes."""
        if axis is self.axis:
            return self.at or self.inner
        if axis not in self.below:
            parent = self.redeclare(axis.parent)  # type: ignore[arg-type]
            kind, (_, *operand_tail) = axis.kind, list(self.editor.declaration(axis).args)
            operands = [parent.var, *(self._shifted(operand) for operand in operand_tail)]
            self.below[axis] = self.editor.axis(f"{axis.name}_s", kind, operands, after=axis)
        return self.below[axis]

    def _shifted(self, operand: Any) -> Any:
        """Renumber the arguments of a formula of ancestors' coordinates."""
        if tirx.is_buffer_var(operand):
            return operand
        split_arg, extra = len(self.args), 1 if self.at is None else 2

        def renumber(call: Call, mutator: Any) -> ir.Expr:
            if not dialect.is_call(call, "arg"):
                return mutator.default_mutate(call)
            k, dtype = int(call.args[0]), str(call.ty.dtype)
            if k == split_arg and self.at is None:
                return self._slot(dtype)
            return _arg(k + extra if k >= split_arg else k, dtype)

        return structural_mutate(operand, [(Call, renumber)])

    # ------------------------------------------------------------------ buffers

    def is_direct(self, buffer: SparseBuffer, indices: Sequence[ir.Expr]) -> bool:
        """Return whether the access is at the iterated slot."""
        at = dict(zip(buffer.axes, indices, strict=True))
        return all(at[axis].same_as(var) for axis, var in self.above.items())

    def choose_views(self) -> None:
        """View every buffer over the axis that is only accessed at the slots that are iterated."""
        block = self.place.iteration.block
        accesses: dict[Var, list[Access]] = {}
        for access in (*stores(block), *loads(block)):
            accesses.setdefault(access.buffer, []).append(access)
        for view, view_accesses in accesses.items():
            buffer = self.editor.program.buffers.get(view)
            if buffer is None or self.axis not in buffer.axes:
                continue
            if all(self.is_direct(buffer, a.indices) for a in view_accesses):
                axes = [b for a in buffer.axes for b in self._new_axes(a)]
                self.views[view] = self.editor.view(buffer, f"{buffer.name}_split", axes)
            else:
                self._check_search(buffer)

    def _new_axes(self, axis: Axis) -> list[Axis]:
        if axis is self.axis:
            return [a for a in (self.outer, self.inner, self.at) if a is not None]
        return [self.redeclare(axis) if self.axis in axis.ancestors else axis]

    def _check_search(self, buffer: SparseBuffer) -> None:
        repeated = [a for a in buffer.axes if not a.unique]
        if repeated:
            message = f"{buffer.name} is used at other places than the iterated ones, and {repeated[0].name} repeats"
            raise ScheduleError(f"cannot split {self.axis.name}: {message} coordinates")

    # ------------------------------------------------------------------ the iteration

    def entries(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the list with the new axes."""
        out: list[Entry] = []
        for entry in entries:
            out += self._split_entry() if entry is self.entry else [self._moved(entry)]
        return out

    def _split_entry(self) -> list[Entry]:
        name = self.var.name
        self.vars = [new_var(f"{name}_o", self.outer), new_var(f"{name}_i", self.inner)]
        new = [replace(self.entry, axes=(self.outer,), vars=(self.vars[0],))]
        new.append(replace(self.entry, axes=(self.inner,), vars=(self.vars[1],), attached_to=None))
        if self.at is not None:
            new.append(replace(self.entry, axes=(self.at,), attached_to=None))
        return new

    def _moved(self, entry: Entry) -> Entry:
        if entry.attached_to is not None:
            return replace(entry, attached_to=self._host(entry.attached_to))
        if entry.axes[0].parent is self.axis or entry.axes[0].parent in self.below:
            return replace(entry, axes=(self.redeclare(entry.axes[0]),))
        return entry

    def _host(self, axis: Axis) -> Axis:
        return self.at or axis if axis is self.axis else self.below.get(axis, axis)

    def rewrite(self, node: Any) -> Any:
        """Rewrite a body or an initialisation in terms of the new axes, except for the old coordinate."""
        callbacks = [(ir.TensorLoad, self._load), (tirx.BufferStore, self._store), (Call, self._coord)]
        return structural_mutate(node, callbacks)

    def _indices(self, view: Var, indices: Sequence[ir.Expr], mutator: Any) -> list[ir.Expr]:
        buffer = self.editor.program.buffers[view]
        slot_vars = [*self.vars, *([] if self.at is None else [self.var])]
        groups = [
            slot_vars if a is self.axis else [mutator.mutate(i)] for a, i in zip(buffer.axes, indices, strict=True)
        ]
        return [index for group in groups for index in group]

    def _load(self, node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if node.source not in self.views:
            return mutator.default_mutate(node)
        return tirx.BufferLoad(self.views[node.source], self._indices(node.source, list(node.indices), mutator))

    def _store(self, node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        if node.buffer not in self.views:
            return mutator.default_mutate(node)
        indices = self._indices(node.buffer, list(node.indices), mutator)
        return tirx.BufferStore(self.views[node.buffer], mutator.mutate(node.value), indices)

    def _coord(self, call: Call, mutator: Any) -> ir.Expr:
        """Return the axes of the iterations inside."""
        if not dialect.is_call(call, "coord"):
            return mutator.default_mutate(call)
        target, member = call.args
        axes = self.editor.program.axes
        if dialect.is_call(target, "attach"):
            host = self._host(axes[target.args[1]])
            target = dialect.call("attach", [target.args[0], host.var], str(target.ty.dtype))
        elif isinstance(target, Var):
            parent = axes[target].parent
            is_below = parent is self.axis or parent in self.below
            target = self.redeclare(axes[target]).var if is_below else target
        return dialect.call("coord", [target, member], str(call.ty.dtype))


def split_slots(editor: Editor, place: IterationScope, entry: Entry, factor: int) -> Edit:
    """Split `entry` by slots; see `sparse_split`."""
    iteration, axis = place.iteration, entry.axes[0]
    refuse_repeated(axis, editor.nested(iteration), "split")
    slots = Slots(editor, place, entry, factor)
    slots.choose_views()
    entries = slots.entries(iteration.entries)
    body, init = (None if n is None else slots.rewrite(n) for n in (iteration.block.body, iteration.block.init))
    for old in (axis, *slots.below):
        refuse_grandparent(old, slots.places, "split")
    stored = visits_stored(iteration)
    if slots.at is None:
        body, init = _computed(slots, body, guard=False), _computed(slots, init, guard=not stored)
    elif not stored:
        _check_init(slots, init)
    editor.swap(iteration.node, rebuilt(iteration, entries, body, init, promise=True))
    return editor.finish([label(e) for e in entries if e.axes[0] in (slots.outer, slots.inner, slots.at)])


def _computed(slots: Slots, node: Any, *, guard: bool) -> Any:
    """Compute the old coordinate in `node`; an initialisation visits all coordinates, so it needs a guard."""
    if node is None or not mentions(node, [slots.var]):
        return node
    dtype = slots.axis.idtype
    coord = slots.vars[0] * const(slots.factor, dtype) + slots.vars[1]
    inside = substitute(node, {slots.var: coord})
    if not guard or divides(slots.factor, slots.axis.length):
        return inside
    return tirx.IfThenElse(below(coord, slots.axis.length), inside, None)


def _check_init(slots: Slots, init: Any) -> None:
    """Refuse an initialisation that would iterate groups, slots and coordinates for every element."""
    if init is None or slots.entry.kinds != "S":
        return
    new = set(slots.views.values())
    if not all(s.buffer in new for s in stores(init)):
        name, axis = slots.place.iteration.name, slots.axis.name
        message = f"sp_iter {name!r} initialises elements that are not those of {axis}"
        raise ScheduleError(f"cannot split {axis}: {message}; use split_init({name!r}) first")


# --------------------------------------------------------------------------------- split of iterations


# Give the initialisation of an iteration an iteration of its own.


def split_init(func: tirx.PrimFunc, iteration: str) -> Edit:
    """Move ``T.init()`` to an iteration just before, over the spatial axes.

    A sparse axis whose stored positions are all that the initialisation can reach is kept; another one is replaced by
    a dense axis of the same length, because an initialisation happens at every coordinate, stored or not.

    args:
        iteration: name of a sparse iteration with an initialisation

    rewrite:
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
            C[i, k] = 0
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    Returns
    -------
    str
        The name of the new iteration.

    Raises
    ------
    ScheduleError
        There is no initialisation, it covers a single element, it uses scratch memory of the iteration, or it stores
        by search into a structure that repeats coordinates, all of which it must reach.
    """
    editor = Editor(func)
    sp_iter = editor.iteration(iteration)
    init = sp_iter.block.init
    if init is None:
        raise ScheduleError(f"sp_iter {iteration!r} has no initialisation")
    if sp_iter.block.alloc_buffers:
        raise ScheduleError(f"cannot split_init: sp_iter {iteration!r} has scratch memory of its own")
    walk = _InitialisedAxes(editor, sp_iter)
    entries, renamed = walk.stored_entries() if visits_stored(sp_iter) else walk.entries()
    name = editor.fresh(f"{iteration}_init")
    init_iteration = make_iteration(name, entries, substitute(init, renamed))
    block = sp_iter.block
    notes = {k: v for k, v in notes_of(sp_iter).items() if k != INIT}
    remaining = make_iteration(iteration, sp_iter.entries, block.body, notes=notes)
    editor.swap(sp_iter.node, init_iteration, remaining)
    return editor.finish(name)


@dataclass(frozen=True, eq=False)
class _InitialisedAxes:
    """Choice of the axes that the initialisation iterates."""

    editor: Editor
    iteration: SpIter

    def entries(self) -> tuple[list[Entry], dict[Var, Any]]:
        """Return the new iteration's entries, and its variables in place of the old ones."""
        kept_axes: set[Axis] = {a for it in self.editor.place(self.iteration.name).outer for a in it.axes}
        out: list[Entry] = []
        renamed: dict[Var, Any] = {}
        for entry in self.iteration.entries:
            if self._keeps(entry, kept_axes):
                new = [Entry(entry.axes, tuple(new_var(v.name, a) for v, a in _pairs(entry)), entry.kinds)]
                kept_axes.update(entry.axes)
                old = list(entry.vars)
            else:
                pairs = zip(_pairs(entry), entry.kinds, strict=True)
                spatial = [(v, a) for (v, a), k in pairs if k == "S" and mentions(self.iteration.block.init, [v])]
                new = [self._dense_entry(v, a) for v, a in spatial]
                old = [v for v, _ in spatial]
            renamed |= dict(zip(old, (v for e in new for v in e.vars), strict=True))
            out += new
        self._check_spatial(out)
        self._check_duplicates(out)
        return out, renamed

    def stored_entries(self) -> tuple[list[Entry], dict[Var, Any]]:
        """Return the entries and variables if only stored points are initialised: the spatial axes unchanged."""
        out: list[Entry] = []
        for entry in self.iteration.entries:
            if set(entry.kinds) == {"S"}:
                out.append(entry)
                continue
            spatial = [(v, a) for (v, a), k in zip(_pairs(entry), entry.kinds, strict=True) if k == "S"]
            out += [Entry((a,), (v,), "S", entry.attached_to) for v, a in spatial]
        self._check_spatial(out)
        renamed = {v: new_var(str(v.name), a) for e in out for v, a in _pairs(e)}
        return [replace(e, vars=tuple(renamed[v] for v in e.vars)) for e in out], renamed

    def _check_spatial(self, entries: Sequence[Entry]) -> None:
        if not entries:
            message = f"sp_iter {self.iteration.name!r} initialises one element: there is no spatial axis to iterate"
            raise ScheduleError(f"cannot split_init: {message}")

    def _dense_entry(self, var: Var, axis: Axis) -> Entry:
        dense = axis
        if axis.kind != "dense_fixed":
            dense = self.editor.dense(f"{axis.name}_dense", axis.length, after=axis)
        return Entry((dense,), (new_var(var.name, dense),), "S")

    def _keeps(self, entry: Entry, kept_axes: set[Axis]) -> bool:
        """Return whether the stored positions of an entry are all that its initialisation reaches."""
        if set(entry.kinds) != {"S"} or entry.attached_to is not None:
            return False
        if not mentions(self.iteration.block.init, list(entry.vars)):
            return False
        if entry.axes[0].kind == "dense_fixed" and not entry.is_fused:
            return True
        parent = entry.axes[0].parent
        if parent is not None and parent not in kept_axes:
            return False
        init_stores = stores(self.iteration.block.init)
        return all(self._is_own(s.buffer, s.indices, v, a) for s in init_stores for v, a in _pairs(entry))

    def _is_own(self, view: Var, indices: Sequence[ir.Expr], var: Var, axis: Axis) -> bool:
        """Return whether the store subscripts `axis` of its buffer by `var`, and uses `var` nowhere else."""
        buffer = self.editor.program.buffers.get(view)
        if buffer is None or axis not in buffer.axes:
            return False
        dimension = buffer.axes.index(axis)
        return all(i.same_as(var) if n == dimension else not mentions(i, [var]) for n, i in enumerate(indices))

    def _check_duplicates(self, entries: Sequence[Entry]) -> None:
        """Refuse where a store by search reaches one duplicate of several."""
        walked = {a for e in entries for a in e.axes}
        for access in stores(self.iteration.block.init):
            buffer = self.editor.program.buffers.get(access.buffer)
            repeated = [a for a in buffer.axes if not a.unique and a not in walked] if buffer is not None else []
            if repeated:
                message = f"{access.name} is over axis {repeated[0].name}, which repeats coordinates"
                raise ScheduleError(f"cannot split_init: {message}, and a store by search reaches one of them")


def _pairs(entry: Entry) -> list[tuple[Var, Axis]]:
    return list(zip(entry.vars, entry.axes, strict=True))


# Give the statements of a body iterations of their own.


def split_iteration(func: tirx.PrimFunc, iteration: str, *, at: int | None = None) -> Edit:
    """Run the statements of a body one after the other, each over all points of the iteration.

    Statements that need each other's results at other points stay together. A value that was given a name is computed
    again where it is used. Every initialisation goes to the first statement that touches what it sets.

    args:
        iteration: name of a sparse iteration with several statements
        at: number of the statement before which to cut; at every possible place if it is left out

    rewrite:
        with T.sp_iter([I, J], "SS", "both") as [i, j]:
            B[i, j] = A[i, j] * 2
            C[i, j] = B[i, j] + 1
        ->
        with T.sp_iter([I, J], "SS", "both_0") as [i, j]:
            B[i, j] = A[i, j] * 2
        with T.sp_iter([I, J], "SS", "both_1") as [i, j]:
            C[i, j] = B[i, j] + 1

    Returns
    -------
    list of str
        The names of the new iterations.

    Raises
    ------
    ScheduleError
        The body has one statement, or the statements cannot be told apart.
    """
    editor = Editor(func)
    sp_iter = editor.iteration(iteration)
    if sp_iter.block.alloc_buffers or any(map(_is_structure, statements(sp_iter.block.body))):
        raise ScheduleError(f"cannot split sp_iter {iteration!r}: it declares buffers or axes of its own")
    body = _Body(editor, sp_iter)
    parts = body.parts(at)
    inits = _placed(editor, sp_iter, parts)
    editor.names.discard(iteration)
    names = [editor.fresh(f"{iteration}_{n}") for n in range(len(parts))]
    iterations = [_part(sp_iter, *p, first=not n) for n, p in enumerate(zip(names, parts, inits, strict=True))]
    editor.swap(sp_iter.node, *iterations)
    return editor.finish(names)


@dataclass(eq=False)
class _Body:
    """The statements of a body, in order; ``actions`` are those that do not give a name to a value."""

    editor: Editor
    iteration: SpIter
    whole: list[tirx.Stmt] = field(init=False)
    cells: dict[Var, bool] = field(init=False)
    actions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.whole = statements(self.iteration.block.body)
        self.cells = {s.buffer: self._is_set_once(s.buffer) for s in self.whole if isinstance(s, tirx.AllocBuffer)}
        self.actions = [n for n, s in enumerate(self.whole) if self._named(s) is None]
        variables = dict(zip(self.iteration.vars, self.iteration.axes, strict=True))
        self.steps = Steps(self.editor.facts, variables)

    def _is_set_once(self, cell: Var) -> bool:
        """Return whether a local variable gets one value, on every path."""
        sets = [s for s in collect(self.iteration.block.body, tirx.BufferStore) if s.buffer.same_as(cell)]
        return len(sets) == 1 and any(sets[0].same_as(s) for s in self.whole)

    def _named(self, stmt: tirx.Stmt) -> Var | None:
        """Return the name that a statement declares or gives its value; None for an action."""
        if isinstance(stmt, tirx.Bind):
            return stmt.var
        is_named = isinstance(stmt, tirx.AllocBuffer) or (
            isinstance(stmt, tirx.BufferStore) and self.cells.get(stmt.buffer, False)
        )
        return stmt.buffer if is_named else None

    def parts(self, at: int | None) -> list[list[tirx.Stmt]]:
        """Return the statements of each new iteration."""
        name, count = self.iteration.name, len(self.actions)
        if count < 2:
            raise ScheduleError(f"sp_iter {name!r} has one statement; there is nothing to split")
        at = as_index(at)
        if at is not None and (isinstance(at, bool) or not isinstance(at, int) or not 0 < at < count):
            valid_cuts = f"cut before statement 1 to {count - 1}" if count > 2 else "cut before statement 1"
            raise ScheduleError(f"sp_iter {name!r} has {count} statements: {valid_cuts}, not {shown(at)}")
        faults = {cut: self._fault(cut) for cut in (range(1, count) if at is None else [at])}
        cuts = [cut for cut, fault in faults.items() if not fault]
        if not cuts:
            raise ScheduleError(f"cannot split sp_iter {name!r}: {next(iter(faults.values()))}")
        ends = [0, *cuts, count]
        return [self._range(a, b) for a, b in itertools.pairwise(ends)]

    def _fault(self, cut: int) -> str:
        """Return why the statements before and from `cut` on cannot be separated; empty if they can."""
        facts = self.editor.facts
        sides = [self._range(0, cut), self._range(cut, len(self.actions))]
        prints = [footprint(facts, *side) for side in sides]
        for fault in meeting_faults(prints, self.steps, set(self.steps.axes)):
            return fault
        for cell, once in self.cells.items():
            if not once and all(mentions(side, [cell]) for side in sides):
                return f"{cell.name} is set at several places"
        for stmt in self.whole[: self.actions[cut]]:
            again = self._named(stmt) is not None and any(stmt.same_as(s) for s in sides[1])
            if again and {facts.storage(x.source) for x in collect(stmt, ir.TensorLoad)} & prints[0].stored:
                what = self._named(stmt)
                return f"{what.name} is read from what the statements before change, and used behind them"  # type: ignore[union-attr]
        return ""

    def _range(self, start: int, stop: int) -> list[tirx.Stmt]:
        """Return the statements of a range, and the names that they use."""
        numbers = set(self.actions[start:stop])
        for n in reversed(range(len(self.whole))):
            name = self._named(self.whole[n])
            if name is not None and any(mentions(self.whole[k], [name]) for k in numbers if k > n):
                numbers.add(n)
        return [self.whole[n] for n in sorted(numbers)]


def _placed(editor: Editor, iteration: SpIter, parts: Sequence[Sequence[tirx.Stmt]]) -> list[list[tirx.Stmt]]:
    """Assign each initial store to the first part that accesses its target, if no earlier part conflicts."""
    prints = [footprint(editor.facts, *part) for part in parts]
    out: list[list[tirx.Stmt]] = [[] for _ in parts]
    assigned: list[Footprint] = []
    for stmt in statements(iteration.block.init):
        accesses = footprint(editor.facts, stmt)
        first = next((n for n, p in enumerate(prints) if accesses.stored & p.touched), 0)
        must_precede = any(_meet(accesses, p) for p in (*prints[:first], *assigned))
        target = 0 if must_precede or not isinstance(stmt, tirx.BufferStore) else first
        out[target].append(stmt)
        assigned.append(accesses)
    return out


def _meet(a: Footprint, b: Footprint) -> bool:
    return bool(a.stored & b.touched or a.touched & b.stored)


def _part(iteration: SpIter, name: str, body: Sequence[tirx.Stmt], init: Sequence[tirx.Stmt], *, first: bool) -> Any:
    """Build one new iteration; all but the first get fresh variables."""
    entries: list[Entry] = list(iteration.entries)
    renamed: dict[Var, Any] = {}
    if not first:
        entries = [replace(e, vars=tuple(map(new_var, [v.name for v in e.vars], e.axes))) for e in entries]
        renamed = dict(zip(iteration.vars, (v for e in entries for v in e.vars), strict=True))
        locals = [s.var for s in body if isinstance(s, tirx.Bind)]
        locals += [s.buffer for s in body if isinstance(s, tirx.AllocBuffer)]
        renamed |= {v: Var(str(v.name), v.ty) for v in locals}
    renamed_stmts = [_renamed(s, renamed) for s in (*body, *init)]
    inits = renamed_stmts[len(body) :]
    init_stmt = sequence(*inits) if inits else None
    return make_iteration(
        name, entries, sequence(*renamed_stmts[: len(body)]), init=init_stmt, notes=notes_of(iteration)
    )


def _renamed(stmt: tirx.Stmt, renamed: dict[Var, Any]) -> tirx.Stmt:
    inside = substitute(stmt, renamed)
    if isinstance(inside, tirx.Bind) and inside.var in renamed:
        return tirx.Bind(renamed[inside.var], inside.value)
    if isinstance(inside, tirx.AllocBuffer) and inside.buffer in renamed:
        return tirx.AllocBuffer(renamed[inside.buffer], dict(inside.annotations))
    return inside


def _is_structure(stmt: tirx.Stmt) -> bool:
    """Return whether a statement declares an axis or a sparse buffer."""
    return is_declaration(stmt) and not isinstance(stmt, tirx.AllocBuffer)


__all__ = ["Slots", "position_of", "sparse_split", "split_entries", "split_init", "split_slots"]
