# SPDX-License-Identifier: Apache-2.0
"""Turn every sparse iteration into nested blocks over positions.

before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

after::

    for i in range(m):
        with T.sblock("spmm_0"):
            vi = T.axis.spatial(m, i)
            for j, k in T.grid(indptr[vi + 1] - indptr[vi], feat):
                with T.sblock("spmm"):
                    vj = T.axis.reduce(indptr[vi + 1] - indptr[vi], j)
                    vk = T.axis.spatial(feat, k)
                    with T.init():
                        c[vi, vk] = 0
                    c[vi, vk] = c[vi, vk] + a[indptr[vi] + vj] * b[indices[indptr[vi] + vj], vk]

A new block begins where an extent depends on a variable of the current one. Block variables are relative to
their fiber, which is the form the stock schedule splits, blockizes and tensorizes correctly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.errors import VerifyError
from sparsetir.ir import Axis, Entry, Program, SparseBuffer, SpIter, accesses, cast, const, decode, is_sp_iter
from sparsetir.lower.access import (
    Conditions,
    Cursor,
    Resolver,
    Scope,
    fiber_of,
    guarded,
    in_range,
    lookup,
)
from sparsetir.lower.balance_loops import PARALLEL_MARK
from sparsetir.lower.declare_regions import INIT_MARK
from sparsetir.lower.rewriting import all_same, collect, conjunction, mentions, same, substitute

SPATIAL, REDUCE = 0, 2


@dataclass
class Level:
    """The loops and block variables of one block of a nest."""

    loops: list[tuple[Var, ir.Expr]] = field(default_factory=list)
    iter_vars: list[tirx.IterVar] = field(default_factory=list)
    predicates: Conditions = field(default_factory=list)

    @property
    def block_vars(self) -> list[Var]:
        return [iv.var for iv in self.iter_vars]


def place(entry: Entry, scope: Scope) -> tuple[ir.Expr, Var, list[Cursor], Conditions]:
    """Loop extent, block variable, cursors and presence conditions of one entry in `scope`."""
    if entry.is_fused:
        return _place_fused(entry)
    axis = entry.axes[0]
    slot = Var("v" + str(entry.vars[0].name), ir.PrimType(axis.idtype))
    parent_pos, above, given = _parent_of(entry, scope)
    at = const(0, axis.idtype) if parent_pos is None else parent_pos
    extent = guarded(given, axis.extent(at, above), const(0, axis.idtype))
    pos = axis.position(at, slot, above)
    coord = axis.coordinate(pos, slot, above)
    absent = in_range(coord, axis.length) if axis.may_be_absent else []
    return extent, slot, [Cursor(axis, coord, pos, parent_pos, tuple(above))], absent


def _parent_of(entry: Entry, scope: Scope) -> tuple[ir.Expr | None, tuple[ir.Expr, ...], Conditions]:
    """Where the entry's fiber hangs: parent position, ancestors' coordinates, conditions."""
    axis = entry.axes[0]
    if axis.parent is None:
        return None, (), []
    if entry.attached_to is not None:
        return _attached(axis, entry.attached_to, scope)
    cursor = scope.by_axis.get(axis.parent)
    if cursor is None:
        message = f"axis {axis.name} is iterated but its parent {axis.parent.name} is not: list {axis.parent.name} before it"
        raise VerifyError(message, axis.name)
    return cursor.pos, cursor.coords, []


def _attached(axis: Axis, at: Axis, scope: Scope) -> tuple[ir.Expr | None, tuple[ir.Expr, ...], Conditions]:
    """The position, in the attached axis's own parent, of the coordinate of the axis it is attached to."""
    base, host = axis.parent, scope.by_axis.get(at)
    if base is None or host is None:
        message = f"T.attach({axis.name}, {at.name}): {at.name} must be iterated before {axis.name}"
        raise VerifyError(message, axis.name)
    grand = None if base.parent is None else scope.by_axis.get(base.parent)
    if base.parent is not None and grand is None:
        message = f"T.attach({axis.name}, {at.name}): {base.parent.name}, above {base.name}, must be iterated too"
        raise VerifyError(message, axis.name)
    above = () if grand is None else grand.coords
    coord = cast(host.coord, base.idtype)
    known = same(at.length, base.length)
    pos, conditions = lookup(base, None if grand is None else grand.pos, above, coord, [], known)
    return pos, (*above, coord), conditions


def _place_fused(entry: Entry) -> tuple[ir.Expr, Var, list[Cursor], Conditions]:
    """One loop over the stored positions of a chain; the outer members' places are searched upwards."""
    last = entry.axes[-1]
    flat = Var("v" + str(entry.vars[-1].name), ir.PrimType(last.idtype))
    positions: list[ir.Expr] = [flat]
    for axis in reversed(entry.axes[1:]):
        positions.insert(0, fiber_of(axis, positions[0]))
    cursors: list[Cursor] = []
    above: tuple[ir.Expr, ...] = ()
    absent: Conditions = []
    parent_pos: ir.Expr | None = None
    for axis, pos in zip(entry.axes, positions, strict=True):
        at = const(0, axis.idtype) if parent_pos is None else parent_pos
        slot = pos if axis.kind == "dense_fixed" else pos - axis.begin(at, above)
        coord = axis.coordinate(pos, slot, above)
        absent += in_range(coord, axis.length) if axis.may_be_absent else []
        cursors.append(Cursor(axis, coord, pos, parent_pos, above))
        above, parent_pos = (*above, coord), pos
    return cast(last.count, last.idtype), flat, cursors, absent


def _realize(block: s_tir.SBlock, level: Level) -> s_tir.SBlockRealize:
    return s_tir.SBlockRealize([v for v, _ in level.loops], tirx.const(True, "bool"), block)


def _where_present(body: tirx.Stmt, present: Conditions, is_reduction: bool) -> tirx.Stmt:
    """`body` at stored coordinates only; a reduction keeps the single store that TVM's primitives look for."""
    if not present:
        return body
    if not is_reduction or not isinstance(body, tirx.BufferStore):
        return tirx.IfThenElse(conjunction(present), body, None)
    old = tirx.BufferLoad(body.buffer, body.indices)
    value = body.value
    if isinstance(value, tirx.Add) and same(value.a, old):
        term = guarded(present, value.b, tirx.const(0, str(value.b.ty.dtype)))
        return tirx.BufferStore(body.buffer, old + term, body.indices)
    return tirx.BufferStore(body.buffer, guarded(present, value, old), body.indices)


def _bind_outer(block: s_tir.SBlock, level: Level, loops: list[Var]) -> s_tir.SBlockRealize:
    """A realize that passes the enclosing ordinary loops' variables into the block, as TVM asks."""
    used = [v for v in loops if mentions(block.body, [v]) or any(mentions(iv.dom, [v]) for iv in block.iter_vars)]
    if not used and block.init is not None:
        used = [v for v in loops if mentions(block.init, [v])]
    if not used:
        return _realize(block, level)
    inner = {v: Var("v" + str(v.name), v.ty) for v in used}
    replace = lambda node: substitute(node, inner)  # noqa: E731
    domains = [ir.Range(const(0, str(v.ty.dtype)), tirx.max_value(str(v.ty.dtype))) for v in used]
    extra = [tirx.IterVar(d, inner[v], SPATIAL) for v, d in zip(used, domains, strict=True)]
    init = None if block.init is None else replace(block.init)
    own = [tirx.IterVar(iv.dom, iv.var, iv.iter_type) for iv in block.iter_vars]
    fresh = s_tir.SBlock(
        [*extra, *own], [], [], block.name_hint, replace(block.body), init, block.alloc_buffers, annotations=block.annotations
    )
    return s_tir.SBlockRealize([*used, *(v for v, _ in level.loops)], tirx.const(True, "bool"), fresh)


def _wrap(body: tirx.Stmt, level: Level, marks: dict[str, Any]) -> tirx.Stmt:
    """The loops of a level around `body`; the outermost one carries `marks`."""
    for n, (var, extent) in reversed(list(enumerate(level.loops))):
        notes = marks if n == 0 else {}
        # As TVM's parser writes it, so that the printed text reads back equal.
        extent = sym.Analyzer().simplify(extent)
        body = tirx.For(var, const(0, str(var.ty.dtype)), extent, tirx.ForKind.SERIAL, body, None, notes)
    return body


def is_parallel(iteration: SpIter, program: Program) -> bool:
    """Whether the outermost loop's steps touch different elements.

    They do when every store and every load of a stored buffer subscripts one dimension by each of the
    loop's variables: then two steps never meet in an element.
    """
    first = iteration.entries[0]
    if set(first.kinds) != {"S"} or not all(a.unique for a in first.axes):
        return False
    touched = list(accesses(iteration.block.body))
    if iteration.block.init is not None:
        touched += list(accesses(iteration.block.init))
    local = _allocated_inside(iteration.block)
    stored = {b for b, _, is_store in touched if is_store and b not in local}
    where: dict[Var, tuple[int, ...]] = {}
    for buffer, indices, _ in touched:
        if buffer not in stored:
            continue
        own = tuple(_whole(indices, v) for v in first.vars)
        if None in own or where.setdefault(buffer, own) != own:
            return False
    return True


def _whole(indices: list[ir.Expr], var: Var) -> int | None:
    """Dimension that `var` alone subscripts."""
    return next((n for n, i in enumerate(indices) if i.same_as(var)), None)


def _allocated_inside(block: s_tir.SBlock) -> set[Var]:
    found: set[Var] = set(block.alloc_buffers)
    views: dict[Var, Var] = {}

    def on_decl(node: tirx.DeclBuffer) -> None:
        if node.data.args:
            views[node.buffer] = node.data.args[0]

    callbacks = [
        (s_tir.SBlock, lambda b: found.update(b.alloc_buffers)),
        (tirx.AllocBuffer, lambda a: found.add(a.buffer)),
        (tirx.DeclBuffer, on_decl),
    ]
    tvm_ffi.structural_walk(block.body, callbacks)
    return found | {v for v, s in views.items() if s in found}


class NestEmitter:
    """Rewrites one function; `scope` follows the loops on the way down."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scope = Scope()
        self.search = "inline"
        self.depth = 0
        self.outer_loops: list[Var] = []

    # ------------------------------------------------------------------ expressions and stores

    def rewrite(self, node: Any) -> Any:
        """`node` with sparse subscripts resolved and iterations emitted, in the current scope."""
        callbacks = [
            (ir.TensorLoad, self._load),
            (tirx.BufferStore, self._store),
            (tirx.For, self._for),
            (s_tir.SBlockRealize, self._realize),
            (tirx.SeqStmt, self._seq),
            (Var, self._var),
        ]
        return tvm_ffi.structural_mutate(node, callbacks)

    def _resolve(self, buffer: SparseBuffer, indices: Any, mutator: Any) -> tuple[list[ir.Expr], Conditions]:
        coords = [mutator.mutate(i) for i in indices]
        return Resolver(self.scope, self.search).resolve(buffer, list(indices), coords)

    def _load(self, node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        buffer = self.program.buffers.get(node.source)
        if buffer is None:
            return tirx.BufferLoad(node.source, [mutator.mutate(i) for i in node.indices])
        indices, conditions = self._resolve(buffer, node.indices, mutator)
        return guarded(conditions, tirx.BufferLoad(buffer.storage, indices), buffer.default)

    def _store(self, node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        value = mutator.mutate(node.value)
        buffer = self.program.buffers.get(node.buffer)
        if buffer is None:
            return tirx.BufferStore(node.buffer, value, [mutator.mutate(i) for i in node.indices])
        indices, conditions = self._resolve(buffer, node.indices, mutator)
        store = tirx.BufferStore(buffer.storage, value, indices)
        return tirx.IfThenElse(conjunction(conditions), store, None) if conditions else store

    def _var(self, node: Var, _mutator: Any) -> ir.Expr:
        cursor = self.scope.by_var.get(node)
        return node if cursor is None else cast(cursor.coord, str(node.ty.dtype))

    # ------------------------------------------------------------------ statements

    def _for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        self.scope.ranges[node.loop_var] = ir.Range.from_min_extent(node.min, node.extent)
        self.outer_loops.append(node.loop_var)
        out = mutator.default_mutate(node)
        self.outer_loops.pop()
        return out

    def _seq(self, node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        kept = [mutator.mutate(s) for s in node.seq if not self._is_declaration(s)]
        return kept[0] if len(kept) == 1 else tirx.SeqStmt(kept) if kept else tirx.Evaluate(const(0))

    def _is_declaration(self, stmt: tirx.Stmt) -> bool:
        if isinstance(stmt, tirx.Bind):
            return stmt.var in self.program.axes
        if isinstance(stmt, tirx.DeclBuffer):
            return stmt.buffer in self.program.buffers
        return isinstance(stmt, tirx.Evaluate) and op.is_call(stmt.value, "bind_axes")

    def _realize(self, node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
        if not is_sp_iter(node):
            return mutator.default_mutate(node)
        found = [it for it in self.program.iterations if it.node.same_as(node)]
        iteration = found[0] if found else _redecode(node, self.program)
        outer, search = self.scope, self.search
        self.scope, self.search = outer.child(), iteration.search
        self.depth += 1
        try:
            return self.emit(iteration)
        finally:
            self.scope, self.search = outer, search
            self.depth -= 1

    # ------------------------------------------------------------------ one iteration

    def emit(self, iteration: SpIter) -> tirx.Stmt:
        """The nest of one iteration, its initialisation inside, beside or above as the program needs."""
        split = InitPlan(iteration, self.program)
        levels: list[Level] = [Level()]
        init_at: int | None = None
        init: tirx.Stmt | None = None
        for n, entry in enumerate(iteration.entries):
            extent, slot, cursors, absent = place(entry, self.scope)
            if n == split.prefix:
                init = self.emit_init(iteration, split)
                levels += [Level()] if levels[-1].loops else []
                init_at = len(levels) - 1
            spatial = "R" not in entry.kinds and (all(a.unique for a in entry.axes) or split.is_own(entry))
            self._extend(levels, extent, slot, absent, SPATIAL if spatial else REDUCE)
            for var, axis, cursor in zip(entry.vars, entry.axes, cursors, strict=True):
                self.scope.add(var, cursor, axis.length)
        if split.prefix == len(iteration.entries):
            init = self.emit_init(iteration, split)
            levels.append(Level())
            init_at = len(levels) - 1
        body = self.rewrite(iteration.block.body)
        inner_init = self.rewrite(iteration.block.init) if split.inside else None
        return self._assemble(iteration, levels, body, inner_init, init, init_at)

    def _extend(self, levels: list[Level], extent: ir.Expr, slot: Var, absent: Conditions, kind: int) -> None:
        current = levels[-1]
        if mentions(extent, current.block_vars):
            current = Level()
            levels.append(current)
        loop = Var(str(slot.name)[1:], slot.ty)
        domain = ir.Range(const(0, str(slot.ty.dtype)), extent)
        current.loops.append((loop, extent))
        current.iter_vars.append(tirx.IterVar(domain, slot, kind))
        current.predicates += absent

    def _assemble(
        self,
        iteration: SpIter,
        levels: list[Level],
        body: tirx.Stmt,
        inner_init: tirx.Stmt | None,
        init: tirx.Stmt | None,
        init_at: int | None,
    ) -> tirx.Stmt:
        parallel = self.depth == 1 and is_parallel(iteration, self.program)
        notes = {k: v for k, v in iteration.block.annotations.items() if k not in ("sparse_iter", "search")}
        last = max(n for n, level in enumerate(levels) if level.loops)
        for n in reversed(range(len(levels))):
            level, leaf = levels[n], n == last
            if level.loops:
                name = iteration.name if leaf else f"{iteration.name}_{n}"
                allocated = list(iteration.block.alloc_buffers) if leaf else []
                body = _where_present(body, level.predicates, leaf and inner_init is not None)
                block = s_tir.SBlock(
                    level.iter_vars,
                    [],
                    [],
                    name,
                    body,
                    inner_init if leaf else None,
                    allocated,
                    annotations=notes,
                )
                outermost = n == min(m for m, x in enumerate(levels) if x.loops)
                realize = _bind_outer(block, level, self.outer_loops) if outermost else _realize(block, level)
                marks = {PARALLEL_MARK: True} if outermost and parallel else {}
                body = _wrap(realize, level, marks)
            if init is not None and n == init_at:
                body = tirx.SeqStmt([init, body])
        return body

    def emit_init(self, iteration: SpIter, split: InitPlan) -> tirx.Stmt:
        """A nest of its own that initialises every spatial point not bound yet."""
        outer = self.scope
        self.scope = outer.child()
        level, levels = Level(), []
        for entry in iteration.entries[split.prefix :]:
            if "S" not in entry.kinds:
                continue
            by_position = split.by_position(entry) and self._parent_placed(entry)
            pieces = [place(entry, self.scope)] if by_position else [_dense(v, a) for v, a in _spatial(entry)]
            pairs = [list(zip(entry.vars, entry.axes, strict=True))] if by_position else [[p] for p in _spatial(entry)]
            for (extent, slot, cursors, absent), bound in zip(pieces, pairs, strict=True):
                if mentions(extent, level.block_vars):
                    levels.append(level)
                    level = Level()
                loop = Var(str(slot.name)[1:], slot.ty)
                level.loops.append((loop, extent))
                domain = ir.Range(const(0, str(slot.ty.dtype)), extent)
                level.iter_vars.append(tirx.IterVar(domain, slot, SPATIAL))
                level.predicates += absent
                for (var, axis), cursor in zip(bound, cursors, strict=True):
                    self.scope.add(var, cursor, axis.length)
        levels.append(level)
        body = self.rewrite(iteration.block.init)
        for n in reversed(range(len(levels))):
            name = f"{iteration.name}_init" + (f"_{n}" if n < len(levels) - 1 else "")
            body = _where_present(body, levels[n].predicates, False)
            block = s_tir.SBlock(levels[n].iter_vars, [], [], name, body, None, annotations={INIT_MARK: True})
            outermost = n == 0 and split.prefix == 0
            realize = _bind_outer(block, levels[n], self.outer_loops) if outermost else _realize(block, levels[n])
            body = _wrap(realize, levels[n], {PARALLEL_MARK: True} if outermost and self.depth == 1 else {})
        self.scope = outer
        return body

    def _parent_placed(self, entry: Entry) -> bool:
        """Whether the axis above the entry stands on a position here (not on a bare coordinate)."""
        parent = entry.axes[0].parent
        if parent is None or entry.attached_to is not None:
            return parent is None
        return parent in self.scope.by_axis


def _spatial(entry: Entry) -> list[tuple[Var, Axis]]:
    return [(v, a) for v, a, k in zip(entry.vars, entry.axes, entry.kinds, strict=True) if k == "S"]


def _dense(var: Var, axis: Axis) -> tuple[ir.Expr, Var, list[Cursor], Conditions]:
    """Walk all coordinates of an axis, stored or not."""
    slot = Var("v" + str(var.name), ir.PrimType(axis.idtype))
    cursor = Cursor(axis, slot, slot, None) if axis.kind == "dense_fixed" else Cursor(None, slot)
    return cast(axis.length, axis.idtype), slot, [cursor], []


class InitPlan:
    """Where the initialisation of an iteration goes.

    ``inside``: in the innermost block, as TVM's reductions have it. Otherwise in a nest of its own placed
    below the first ``prefix`` entries; ``prefix`` is None when there is nothing to place.
    """

    def __init__(self, iteration: SpIter, program: Program) -> None:
        self.iteration, self.program = iteration, program
        self.inside = False
        self.prefix: int | None = None
        init = iteration.block.init
        self.stores = [] if init is None else collect(init, tirx.BufferStore)
        if init is None:
            return
        self.inside = self._can_stay_inside()
        self.prefix = None if self.inside else self._split()

    # ------------------------------------------------------------------ one entry

    def is_own(self, entry: Entry) -> bool:
        """Whether every store subscripts the entry's axes, in its own buffer, by the entry's variables."""
        stores = self.stores + collect(self.iteration.block.body, tirx.BufferStore)
        return all(self._own(s, v, a) for s in stores for v, a in zip(entry.vars, entry.axes, strict=True))

    def by_position(self, entry: Entry) -> bool:
        """Whether walking the entry's stored positions reaches every element its initial stores can reach."""
        if "R" in entry.kinds or entry.attached_to is not None:
            return False
        if not entry.is_fused and entry.axes[0].kind == "dense_fixed":
            return True
        return all(self._own(store, v, a) for store in self.stores for v, a in _spatial(entry))

    def _own(self, store: tirx.BufferStore, var: Var, axis: Axis) -> bool:
        """Whether the store subscripts `axis` of its buffer by `var`, and uses `var` nowhere else."""
        buffer = self.program.buffers.get(store.buffer)
        if buffer is None or axis not in buffer.axes:
            return False
        own = buffer.axes.index(axis)
        return all(i.same_as(var) if n == own else not mentions(i, [var]) for n, i in enumerate(store.indices))

    def _once(self, entry: Entry) -> bool:
        """Whether different steps of the entry initialise different elements."""
        return all(self._injective(store, list(entry.vars)) for store in self.stores)

    def _injective(self, store: tirx.BufferStore, variables: list[Var]) -> bool:
        whole = [v for v in variables if any(i.same_as(v) for i in store.indices)]
        if len(whole) == len(variables):
            return True
        lengths = dict(zip(self.iteration.vars, self.iteration.axes, strict=True))
        used = [v for v in self.iteration.vars if mentions(store.indices, [v])]
        if any(v not in used for v in variables):
            return False
        ranges = {v: ir.Range(const(0, lengths[v].idtype), cast(lengths[v].length, lengths[v].idtype)) for v in used}
        true = tirx.const(True, "bool")
        found = sym.detect_iter_map(list(store.indices), ranges, true, "bijective", False)
        return len(found.indices) > 0

    # ------------------------------------------------------------------ the whole list

    def _split(self) -> int:
        for n, entry in enumerate(self.iteration.entries):
            if not self.by_position(entry) or any(a.may_be_absent for a in entry.axes) or not self._once(entry):
                return n
        return len(self.iteration.entries)

    def _can_stay_inside(self) -> bool:
        body, init, entries = self.iteration.block.body, self.iteration.block.init, self.iteration.entries
        if not (isinstance(body, tirx.BufferStore) and isinstance(init, tirx.BufferStore)):
            return False
        if not (body.buffer.same_as(init.buffer) and all_same(body.indices, init.indices)):
            return False
        reductions = [e for e in entries if "R" in e.kinds]
        spatial = [e for e in entries if "R" not in e.kinds]
        if not reductions or any(set(e.kinds) != {"R"} for e in reductions):
            return False
        if not all(self.by_position(e) and self._once(e) for e in spatial):
            return False
        if any(a.may_be_absent for e in spatial for a in e.axes):
            return False
        return self._stores_surely(body) and self._reduces_in_leaf()

    def _stores_surely(self, store: tirx.BufferStore) -> bool:
        """Whether the store's element exists at every iterated point."""
        buffer = self.program.buffers.get(store.buffer)
        if buffer is None:
            return True
        scope, direct = Scope(), {}
        for entry in self.iteration.entries:
            for var, axis in zip(entry.vars, entry.axes, strict=True):
                scope.ranges[var] = ir.Range(const(0, axis.idtype), cast(axis.length, axis.idtype))
                direct[var] = axis if entry.attached_to is None else None
        for axis, index in zip(buffer.axes, store.indices, strict=True):
            if isinstance(index, Var) and direct.get(index) is axis:
                continue
            if axis.kind != "dense_fixed" or not scope.proves_in_range(index, axis.length):
                return False
        return True

    def _reduces_in_leaf(self) -> bool:
        """Whether every reduction, and nothing that hangs from one, is in the innermost block."""
        group: list[Entry] = []
        for entry in self.iteration.entries:
            held = {a for e in group for a in e.axes}
            hosts = [] if entry.attached_to is None else [entry.attached_to, *entry.attached_to.ancestors]
            above = [*entry.axes[0].ancestors, *hosts]
            ragged = entry.axes[0].is_ragged or entry.attached_to is not None
            if ragged and any(a in held for a in above):
                if any("R" in e.kinds for e in group):
                    return False
                group = []
            reduced = {a for e in group if "R" in e.kinds for a in e.axes}
            if "S" in entry.kinds and any(a in reduced for a in above):
                return False
            group.append(entry)
        return True


def _redecode(node: s_tir.SBlockRealize, program: Program) -> SpIter:
    from sparsetir.ir import decode_entries

    entries = decode_entries(node.block, list(node.iter_values), program.axes)
    return SpIter(str(node.block.name_hint), entries, node.block, node)


def emit_nest(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Stage I to stage II for one function."""
    program = decode(func)
    if not program.axes and not program.iterations:
        return func
    body = NestEmitter(program).rewrite(func.body)
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.EmitNest")
def EmitNest(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """The pass around `emit_nest`."""
    return emit_nest(func)
