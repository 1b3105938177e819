# SPDX-License-Identifier: Apache-2.0
"""Lowering of sparse iterations to nested blocks over positions.

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
their fiber, because TVM's schedule splits, blockizes and tensorizes this form correctly.
"""

from __future__ import annotations

from itertools import chain, count
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import LoweringError
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import conjunction, mentions, seq, without_zeros
from sparsetir.ir.rules import Facts
from sparsetir.ir.views import (
    INDEPENDENT,
    INIT,
    SEARCH,
    SPARSE_ITER,
    Entry,
    Program,
    SparseBuffer,
    SpIter,
    cast,
    const,
    decode,
    decode_entries,
    is_sp_iter,
    label,
)
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.dependence import ordered
from sparsetir.lower.analysis.independence import init_is_parallel, is_parallel
from sparsetir.lower.annotations import INIT_MARK, PARALLEL_MARK
from sparsetir.lower.iterations.access import AxisCursor, Conditions, Resolver, Scope, assuming, guarded
from sparsetir.lower.iterations.nest import (
    REDUCE,
    SPATIAL,
    NestLevel,
    any_slot,
    extend,
    extend_all,
    old_value,
    order_note,
    place,
    place_merge,
    realize,
    realize_inside,
    spatial_pairs,
    walk_coordinates,
    where_present,
    wrap,
)
from sparsetir.lower.loops import serial, with_body
from sparsetir.lower.target.initialization import InitPlan, may_miss
from sparsetir.lower.target.search import Hoister

OWN_NOTES = (SPARSE_ITER, SEARCH, INIT, INDEPENDENT)


class NestEmitter:
    """Emitter of the loop nests of one function; `scope` follows the loops on the way down."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.program = facts, facts.program
        self.scope = Scope()
        self.search = "inline"
        self.initialising = False
        self.depth = 0
        self.outer_loops: list[Var] = []
        self.scratch: list[Var] = []
        self.names: set[str] = set()

    # ------------------------------------------------------------------ expressions and stores

    def rewrite(self, node: Any) -> Any:
        """Resolve the sparse subscripts and emit the iterations of `node` in the current scope."""
        callbacks = [
            (ir.TensorLoad, self._load),
            (tirx.BufferStore, self._store),
            (tirx.For, self._for),
            (s_tir.SBlockRealize, self._realize),
            (tirx.SeqStmt, self._seq),
            (Var, self._var),
        ]
        return structural_mutate(node, callbacks)

    def initial(self, iteration: SpIter) -> tirx.Stmt:
        """Rewrite the initialisation of an iteration."""
        self.initialising = True
        out = self.rewrite(iteration.block.init)
        self.initialising = False
        return out

    def _resolve(
        self, buffer: SparseBuffer, indices: Any, mutator: Any, resolver: Resolver
    ) -> tuple[list[ir.Expr], Conditions]:
        coords = [without_zeros(mutator.mutate(i)) for i in indices]
        return resolver.resolve(buffer, list(indices), coords)

    def _load(self, node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        buffer = self.program.buffers.get(node.source)
        if buffer is None:
            return tirx.BufferLoad(node.source, [without_zeros(mutator.mutate(i)) for i in node.indices])
        resolver = Resolver(self.scope, self.search)
        indices, conditions = self._resolve(buffer, node.indices, mutator, resolver)
        return guarded(conditions, tirx.BufferLoad(buffer.storage, indices), buffer.default)

    def _store(self, node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        value = mutator.mutate(node.value)
        buffer = self.program.buffers.get(node.buffer)
        if buffer is None:
            return tirx.BufferStore(node.buffer, value, [without_zeros(mutator.mutate(i)) for i in node.indices])
        # An initial value belongs to the coordinate, so every entry with the coordinate is set.
        resolver = Resolver(self.scope, self.search, every=self.initialising)
        indices, conditions = self._resolve(buffer, node.indices, mutator, resolver)
        stmt: tirx.Stmt = tirx.BufferStore(buffer.storage, assuming(conditions, value), indices)
        if conditions:
            stmt = tirx.IfThenElse(conjunction(conditions), stmt, None)
        for slot, extent in reversed(resolver.slots):
            stmt = serial(slot, extent, stmt)
        return stmt

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
        statements = [mutator.mutate(s) for s in node.seq if not self._is_declaration(s)]
        return seq(*statements) if statements else tirx.Evaluate(const(0))

    def _is_declaration(self, stmt: tirx.Stmt) -> bool:
        if isinstance(stmt, tirx.Bind):
            return stmt.var in self.program.axes
        if isinstance(stmt, tirx.DeclBuffer):
            return stmt.buffer in self.program.buffers
        return isinstance(stmt, tirx.Evaluate) and dialect.is_call(stmt.value, "bind_axes")

    def _realize(self, node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
        if not is_sp_iter(node):
            return mutator.default_mutate(node)
        matches = [it for it in self.program.iterations if it.node.same_as(node)]
        iteration = matches[0] if matches else _redecode(node, self.program)
        outer, search = self.scope, self.search
        self.scope, self.search = outer.child(), iteration.search
        self.depth += 1
        try:
            return self.emit(iteration)
        finally:
            self.scope, self.search = outer, search
            self.depth -= 1

    def _free_name(self, stem: str) -> str:
        """Return an unused block name, since schedules find blocks by name."""
        name = next(n for n in chain([stem], (f"{stem}_{k}" for k in count(1))) if n not in self.names)
        self.names.add(name)
        return name

    # ------------------------------------------------------------------ one iteration

    def emit(self, iteration: SpIter) -> tirx.Stmt:
        """Emit the nest of one iteration, with its initialisation inside or before it as `InitPlan` decides."""
        for entry in (e for e in iteration.entries if e.axes[-1].is_assembled):
            message = f"sp_iter {iteration.name!r} lists {label(entry)}, which the loops of stored axes do not walk"
            raise LoweringError(f"{message}; sparsetir.build makes functions of the program that compute the pattern")
        needed = ordered(iteration.block.body, iteration, self.facts, self.outer_loops)
        split = InitPlan(iteration, self.program)
        levels: list[NestLevel] = [NestLevel()]
        init_at: int | None = None
        init: tirx.Stmt | None = None
        for n, entry in enumerate(iteration.entries):
            loops, cursors, absent = self._placed(entry, iteration, needed)
            if n == split.prefix:
                init = self.emit_init(iteration, split)
                levels += [NestLevel()] if levels[-1].loops else []
                init_at = len(levels) - 1
            spatial = "R" not in entry.kinds and (all(a.unique for a in entry.axes) or split.is_own(entry))
            extend_all(levels, loops, absent, SPATIAL if spatial else REDUCE)
            for var, axis, cursor in zip(entry.vars, entry.domains, cursors, strict=True):
                self.scope.add(var, cursor, axis.length)
        if split.prefix == len(iteration.entries):
            init = self.emit_init(iteration, split)
            levels.append(NestLevel())
            init_at = len(levels) - 1
        body = self.rewrite(iteration.block.body)
        inner_init = self.initial(iteration) if split.inside else None
        if not split.inside and not _may_miss_points(iteration):
            inner_init = old_value(body, levels)
        merges = any(e.merge for e in iteration.entries)
        if self.search == "hoist" and self.depth == 1 and not self.outer_loops and not merges:
            hoister = Hoister(iteration, self.scope)
            body = hoister.replace(body)
            self.scratch += hoister.buffers
            nest = self._assemble(iteration, levels, body, inner_init, init, init_at, needed)
            return tirx.SeqStmt([*hoister.nests, nest]) if hoister.nests else nest
        return self._assemble(iteration, levels, body, inner_init, init, init_at, needed)

    def _placed(
        self, entry: Entry, iteration: SpIter, needed: set[Var]
    ) -> tuple[list[tuple[ir.Expr, Var]], list[AxisCursor], Conditions]:
        """Return an entry's loops with extents, its variables' cursors, and the conditions for a step to be executed.

        If a variable of the entry is in `needed`, add the variables of its loops to `needed`.
        """
        if entry.merge:
            # The steps of the outermost loop may run in any order, so its searches cannot advance from step to step.
            is_outermost = self.depth == 1 and entry is iteration.entries[0]
            merged = place_merge(entry, self.scope, "inline" if is_outermost else iteration.walk)
            loops, cursors, absent = merged.loops, [merged.cursor], merged.absent
        else:
            extent, slot, cursors, absent = place(entry, self.scope)
            loops = [(extent, slot)]
        needed |= {slot for _, slot in loops} if needed & set(entry.vars) else set()
        return loops, cursors, absent

    def _assemble(
        self,
        iteration: SpIter,
        levels: list[NestLevel],
        body: tirx.Stmt,
        inner_init: tirx.Stmt | None,
        init: tirx.Stmt | None,
        init_at: int | None,
        needed: set[Var],
    ) -> tirx.Stmt:
        parallel = self.depth == 1 and is_parallel(iteration, self.program)
        notes = {k: v for k, v in iteration.block.annotations.items() if k not in OWN_NOTES}
        last = max(n for n, level in enumerate(levels) if level.loops)
        for n in reversed(range(len(levels))):
            level, leaf = levels[n], n == last
            if level.loops:
                name = self._free_name(iteration.name if leaf else f"{iteration.name}_{n}")
                allocated = list(iteration.block.alloc_buffers) if leaf else []
                if leaf:
                    body, scratch = _own_scratch(body)
                    allocated += scratch
                body = where_present(body, level.predicates, leaf and inner_init is not None)
                outermost = n == min(m for m, x in enumerate(levels) if x.loops)
                mark = {PARALLEL_MARK: str(level.block_vars[0].name)} if outermost and parallel else {}
                block = s_tir.SBlock(
                    level.iter_vars,
                    [],
                    [],
                    name,
                    body,
                    inner_init if leaf else None,
                    allocated,
                    annotations={**notes, **mark, **order_note(level, [], needed)},
                )
                inner = realize_inside(block, level, self.outer_loops, needed) if outermost else realize(block, level)
                body = wrap(inner, level)
            if init is not None and n == init_at:
                body = tirx.SeqStmt([init, body])
        return body

    def emit_init(self, iteration: SpIter, split: InitPlan) -> tirx.Stmt:
        """Emit a separate nest that initialises all spatial points of the axes it names that are not yet bound."""
        outer = self.scope
        self.scope = outer.child()
        levels = [NestLevel()]
        first: list[Var] = []  # Variables of the outermost loop.
        by_position = False
        needed = ordered(iteration.block.init, iteration, self.facts, self.outer_loops)
        for entry in iteration.entries[split.prefix :]:
            below = split.below(entry)
            if not below and not split.names(entry):
                continue
            if below and not entry.is_fused and all(a.repeats_below(entry.axes[0]) for a in below):
                cursor, parent_conditions = any_slot(entry, self.scope)
                self.scope.add(entry.vars[0], cursor, entry.axes[0].length)
                levels[-1].predicates += parent_conditions
                continue
            if below or (split.by_position(entry) and self._parent_placed(entry)):
                loops, cursors, absent = self._placed(entry, iteration, needed)
                extend_all(levels, loops, absent, SPATIAL)
                for var, axis, cursor in zip(entry.vars, entry.domains, cursors, strict=True):
                    self.scope.add(var, cursor, axis.length)
                by_position = by_position or not first
                first = first or list(entry.vars)
                continue
            for var, axis in spatial_pairs(entry):
                if not split.mentions(var):
                    continue
                extent, slot, cursor = walk_coordinates(var, axis)
                needed |= {slot} if var in needed else set()
                first = first or [var]
                extend(levels, extent, slot, [], SPATIAL)
                self.scope.add(var, cursor, axis.length)
        body = self.initial(iteration)
        for n in reversed(range(len(levels))):
            name = self._free_name(f"{iteration.name}_init" + (f"_{n}" if n < len(levels) - 1 else ""))
            level = levels[n]
            body = where_present(body, level.predicates, False)
            outermost = n == 0 and split.prefix == 0
            parallel = outermost and self.depth == 1 and init_is_parallel(iteration, first, self.program, by_position)
            mark = {PARALLEL_MARK: str(level.block_vars[0].name)} if parallel else {}
            notes = {INIT_MARK: True, **mark, **order_note(level, [], needed)}
            block = s_tir.SBlock(level.iter_vars, [], [], name, body, None, annotations=notes)
            inner = realize_inside(block, level, self.outer_loops, needed) if outermost else realize(block, level)
            body = wrap(inner, level)
        self.scope = outer
        return body

    def _parent_placed(self, entry: Entry) -> bool:
        """Return whether the entry's parent axis has a position in this scope, rather than a bare coordinate."""
        parent = entry.axes[0].parent
        if parent is None or entry.attached_to is not None:
            return parent is None
        return parent in self.scope.by_axis


def _own_scratch(body: tirx.Stmt, least: int = 0) -> tuple[tirx.Stmt, list[Var]]:
    """Move the arrays that a body allocates to its block: TVM's caching is sound only for arrays of a block.

    Arrays of one element (named values) stay in the body, and so do arrays that fewer than `least` statements use:
    TVM would allocate these in each step of the loop around their use, but one step may read what another stored.
    """
    if not isinstance(body, tirx.SeqStmt):
        return body, []
    allocations = [s for s in body.seq if isinstance(s, tirx.AllocBuffer) and _is_array(s.buffer)]
    users = [sum(mentions(t, [s.buffer]) for t in body.seq if not t.same_as(s)) for s in allocations]
    moved = [s for s, count in zip(allocations, users, strict=True) if count >= least]
    return seq(*(s for s in body.seq if s not in moved)), [s.buffer for s in moved]


def _is_array(buffer: Var) -> bool:
    return any(not isinstance(n, tirx.IntImm) or int(n) != 1 for n in buffer.ty.shape)


def _may_miss_points(iteration: SpIter) -> bool:
    """Return whether a spatial point may be absent: then neither the element nor its old value exists."""
    return any(may_miss(e) for e in iteration.entries if "R" not in e.kinds)


def _redecode(node: s_tir.SBlockRealize, program: Program) -> SpIter:
    entries = decode_entries(node.block, list(node.iter_values), program.axes)
    return SpIter(str(node.block.name_hint), entries, node.block, node)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.EmitNest")
def EmitNest(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Lower one function from stage I to stage II."""
    program = decode(func)
    if not program.axes and not program.iterations:
        return func
    emitter = NestEmitter(Facts(func, program))
    body = emitter.rewrite(func.body)
    inner, scratch = _own_scratch(body.block.body, 2)
    if emitter.scratch or scratch:
        root = body.block
        allocated = [*root.alloc_buffers, *scratch, *emitter.scratch]
        block = s_tir.SBlock([], [], [], root.name_hint, inner, None, allocated, annotations=root.annotations)
        body = s_tir.SBlockRealize([], tirx.const(True, "bool"), block)
    return with_body(func, body)
