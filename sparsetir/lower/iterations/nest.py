# SPDX-License-Identifier: Apache-2.0
"""Loop nests of iterations: extents, unions and intersections of axes, loops and blocks around a body, regions.

Read and write regions of stage-II blocks.

before::

    with T.sblock("spmm_0"):
        vi = T.axis.spatial(m, i)
        T.reads()
        T.writes()

after::

    with T.sblock("spmm_0"):
        vi = T.axis.spatial(m, i)
        T.reads(indptr[vi:vi + 2], indices[0:nnz], a[0:nnz], b[0:n, 0:feat])
        T.writes(c[vi, 0:feat])

A region names a single element if its subscript only depends on variables defined outside the block's inner loops,
else the whole dimension. A buffer that the block itself initialises is not among its reads, as in TVM's reductions.
Searched arrays are read whole. The innermost block omits the axes' index arrays, which are never written:
its regions then equal those of the dense micro kernel that ``tensorize`` compares it with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.errors import VerifyError
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import all_same, collect, conjunction, loads_of, mentions, same, substitute
from sparsetir.ir.views import REDUCE, SPATIAL, Axis, Entry, cast, const
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.lower.annotations import INIT_MARK, ORDERED_MARK, SCRATCH, STRUCTURE
from sparsetir.lower.iterations.access import AxisCursor, Conditions, Scope, fiber_of, guarded, in_range, lookup
from sparsetir.lower.loops import Update, allocated_buffers, defined_vars, serial, with_body

# Loops of a union or an intersection of axes, and the cursors of its members.
#
# An intersection iterates its first member and searches the others. A union counts steps: `find_union` computes the
# coordinate of a step and the slots of the members that store it. All of these are expressions of the loop variables,
# so the steps may run in any order.


@dataclass(frozen=True, eq=False)
class Merged:
    """Loops of a merge with their extents, the cursor of its variable, and the conditions for a step to be executed."""

    loops: list[tuple[ir.Expr, Var]]
    cursor: AxisCursor
    absent: Conditions


@dataclass(frozen=True, eq=False)
class _Member:
    """Fiber that takes part in a merge; it has entries only where `given` holds."""

    axis: Axis
    parent_pos: ir.Expr | None
    above: tuple[ir.Expr, ...]
    given: Conditions
    dtype: str

    @property
    def _at(self) -> ir.Expr:
        return const(0, self.axis.idtype) if self.parent_pos is None else self.parent_pos

    @property
    def count(self) -> ir.Expr:
        """Number of entries."""
        extent = guarded(self.given, self.axis.extent(self._at, self.above), const(0, self.axis.idtype))
        return cast(extent, self.dtype)

    def position(self, slot: ir.Expr) -> ir.Expr:
        return self.axis.position(self._at, cast(slot, self.axis.idtype), self.above)

    def coordinate(self, slot: ir.Expr) -> ir.Expr:
        slot = cast(slot, self.axis.idtype)
        return cast(self.axis.coordinate(self.position(slot), slot, self.above), self.dtype)

    def found(self, coord: ir.Expr, strategy: str) -> tuple[ir.Expr, Conditions]:
        """Return the position of a coordinate and the conditions for the fiber to store it."""
        own_coord = cast(coord, self.axis.idtype)
        pos, conditions = lookup(self.axis, self.parent_pos, self.above, own_coord, self.given, (True, True), strategy)
        return pos, [*self.given, *conditions]

    def cursor(self, coord: ir.Expr, pos: ir.Expr, conditions: Conditions, slot: Var) -> AxisCursor:
        own_coord = cast(coord, self.axis.idtype)
        return AxisCursor(self.axis, own_coord, pos, self.parent_pos, self.above, slot, tuple(conditions))


def place_merge(entry: Entry, scope: Scope, strategy: str) -> Merged:
    """Return the loops and cursors of a merge in `scope`; `strategy` is the search strategy for further members."""
    dtype = entry.domains[0].idtype
    members = [_Member(axis, *parent_of(axis, host, scope), dtype) for axis, host in entry.heads]
    name = "v" + str(entry.vars[0].name)
    if entry.merge == "intersect":
        return _intersection(members, name, strategy)
    return _union(members, Var(name, ir.PrimType(dtype)))


# ---------------------------------------------------------------------------------------------- intersections


def _intersection(members: Sequence[_Member], name: str, strategy: str) -> Merged:
    first, slot = members[0], Var(name, ir.PrimType(members[0].axis.idtype))
    coord, pos = first.coordinate(slot), first.position(slot)
    absent = in_range(coord, first.axis.length) if first.axis.may_be_absent else []
    loops = [(cast(first.count, first.axis.idtype), slot)]
    cursors = [first.cursor(coord, pos, [], slot)]
    for n, member in enumerate(members[1:], 1):
        if member.axis.unique:
            ascends = strategy == "merge" and first.axis.sorted and member.axis.sorted
            at, conditions = member.found(coord, "walk" if ascends else strategy)
            absent = absent + conditions
            cursors.append(member.cursor(coord, at, [], slot))
            continue
        # Several entries of the member may have the coordinate, so a loop compares all of them.
        own_slot = Var(f"{name}_{n}", ir.PrimType(member.axis.idtype))
        loops.append((cast(member.count, member.axis.idtype), own_slot))
        absent = [*absent, member.coordinate(own_slot).equal(coord)]
        cursors.append(member.cursor(coord, member.position(own_slot), [], own_slot))
    return Merged(loops, AxisCursor(None, coord, slot=slot, members=tuple(cursors)), absent)


# ---------------------------------------------------------------------------------------------- unions


def _union(members: Sequence[_Member], slot: Var) -> Merged:
    """Merge by a loop with one step for each entry of each member; steps without a coordinate do nothing."""
    dtype = str(slot.ty.dtype)
    argument = dialect.call("arg", [0], dtype)
    fibers = [part for m in members for part in (m.coordinate(argument), m.count, dialect.union_member(m.axis))]
    *slots, coord = (dialect.call("find_union", [k, slot, *fibers], dtype) for k in range(len(members) + 1))
    zero = const(0, dtype)
    cursors = [m.cursor(coord, m.position(s), [s >= zero], slot) for m, s in zip(members, slots, strict=True)]
    absent = [coord >= zero]
    if any(m.axis.may_be_absent for m in members):
        absent.append(coord < cast(members[0].axis.length, dtype))
    steps = members[0].count
    for member in members[1:]:
        steps = steps + member.count
    return Merged([(steps, slot)], AxisCursor(None, coord, slot=slot, members=tuple(cursors)), absent)


# Parts of a nest: loop extents of axes, and the construction of loops and blocks around a body.


@dataclass
class NestLevel:
    """Loops and block variables of one block of a nest."""

    loops: list[tuple[Var, ir.Expr]] = field(default_factory=list)
    iter_vars: list[tirx.IterVar] = field(default_factory=list)
    predicates: Conditions = field(default_factory=list)

    @property
    def block_vars(self) -> list[Var]:
        return [iv.var for iv in self.iter_vars]


def place(entry: Entry, scope: Scope) -> tuple[ir.Expr, Var, list[AxisCursor], Conditions]:
    """Return the loop extent, block variable, cursors and presence conditions of one entry in `scope`."""
    if entry.is_fused:
        return _place_fused(entry)
    axis = entry.axes[0]
    slot = Var("v" + str(entry.vars[0].name), ir.PrimType(axis.idtype))
    parent_pos, above, parent_conditions = parent_of(axis, entry.attached_to, scope)
    at = const(0, axis.idtype) if parent_pos is None else parent_pos
    extent = guarded(parent_conditions, axis.extent(at, above), const(0, axis.idtype))
    pos = axis.position(at, slot, above)
    coord = axis.coordinate(pos, slot, above)
    absent = in_range(coord, axis.length, (scope.is_never_negative(coord, slot), False)) if axis.may_be_absent else []
    return extent, slot, [AxisCursor(axis, coord, pos, parent_pos, tuple(above), slot)], absent


def any_slot(entry: Entry, scope: Scope) -> tuple[AxisCursor, Conditions]:
    """Return the cursor at slot 0 of an axis, and the conditions for its fiber to exist.

    It serves axes below whose coordinates repeat in every slot, and exist even if the fiber has no slots.
    """
    axis = entry.axes[0]
    parent_pos, above, parent_conditions = parent_of(axis, entry.attached_to, scope)
    at, slot = const(0, axis.idtype) if parent_pos is None else parent_pos, const(0, axis.idtype)
    pos = axis.position(at, slot, above)
    cursor = AxisCursor(axis, axis.coordinate(pos, slot, above), pos, parent_pos, tuple(above))
    return cursor, parent_conditions


def parent_of(axis: Axis, host: Axis | None, scope: Scope) -> tuple[ir.Expr | None, tuple[ir.Expr, ...], Conditions]:
    """Return the parent position, ancestors' coordinates and conditions of a fiber of `axis`.

    `host` is the axis to which `axis` is attached, if any.
    """
    if axis.parent is None:
        return None, (), []
    if host is not None and host is not axis.parent:
        return _attached(axis, host, scope)
    cursor = scope.by_axis.get(axis.parent)
    if cursor is None:
        above = axis.parent.name
        message = f"axis {axis.name} is iterated but its parent {above} is not: list {above} before it"
        raise VerifyError(message, axis.name)
    return cursor.pos, cursor.coords, list(cursor.given)


def _attached(axis: Axis, at: Axis, scope: Scope) -> tuple[ir.Expr | None, tuple[ir.Expr, ...], Conditions]:
    """Search the parent of an attached axis for the coordinate of the axis `at`; return in the form of `parent_of`."""
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
    is_in_range = same(at.length, base.length)
    parent_conditions = [] if grand is None else list(grand.given)
    pos, conditions = lookup(
        base, None if grand is None else grand.pos, above, coord, parent_conditions, (is_in_range, is_in_range)
    )
    return pos, (*above, coord), [*parent_conditions, *conditions]


def _place_fused(entry: Entry) -> tuple[ir.Expr, Var, list[AxisCursor], Conditions]:
    """Place one loop over the stored positions of a chain of axes; search the outer positions from the innermost."""
    last = entry.axes[-1]
    flat = Var("v" + str(entry.vars[-1].name), ir.PrimType(last.idtype))
    positions: list[ir.Expr] = [flat]
    for axis in reversed(entry.axes[1:]):
        positions.insert(0, fiber_of(axis, positions[0]))
    cursors: list[AxisCursor] = []
    above: tuple[ir.Expr, ...] = ()
    absent: Conditions = []
    parent_pos: ir.Expr | None = None
    for axis, pos in zip(entry.axes, positions, strict=True):
        at = const(0, axis.idtype) if parent_pos is None else parent_pos
        slot = pos if axis.kind == "dense_fixed" else pos - axis.begin(at, above)
        coord = axis.coordinate(pos, slot, above)
        absent += in_range(coord, axis.length) if axis.may_be_absent else []
        cursors.append(AxisCursor(axis, coord, pos, parent_pos, above, flat))
        above, parent_pos = (*above, coord), pos
    return cast(last.count, last.idtype), flat, cursors, absent


def realize(block: s_tir.SBlock, level: NestLevel) -> s_tir.SBlockRealize:
    """Return a block with the variables of the loops around it as values."""
    return s_tir.SBlockRealize([v for v, _ in level.loops], tirx.const(True, "bool"), block)


def order_note(level: NestLevel, loops: list[Var], needed: set[Var]) -> dict[str, list[str]]:
    """Return the annotation of a block's variables that must keep their order, including the program's `loops`."""
    own_names = [str(v.name) for v in level.block_vars if v in needed]
    names = ["v" + str(v.name) for v in loops if v in needed] + own_names
    return {ORDERED_MARK: names} if names else {}


def where_present(body: tirx.Stmt, present: Conditions, is_reduction: bool) -> tirx.Stmt:
    """Guard `body` by the conditions; a reduction remains a single store, as TVM's primitives require."""
    if not present:
        return body
    if not is_reduction or not isinstance(body, tirx.BufferStore):
        return tirx.IfThenElse(conjunction(present), body, None)
    # An element whose subscripts are the coordinates in question does not exist where these are absent.
    places, tested = collect(list(body.indices), ir.TensorLoad), collect(present, ir.TensorLoad)
    if any(same(place, load) for place in places for load in tested):
        return tirx.IfThenElse(conjunction(present), body, None)
    old, update = tirx.BufferLoad(body.buffer, body.indices), Update.of(body)
    if update is not None:
        term = guarded(present, update.term, tirx.const(0, str(update.term.ty.dtype)))
        return tirx.BufferStore(body.buffer, old + term, body.indices)
    return tirx.BufferStore(body.buffer, guarded(present, body.value, old), body.indices)


def realize_inside(block: s_tir.SBlock, level: NestLevel, loops: list[Var], needed: set[Var]) -> s_tir.SBlockRealize:
    """Realize a block that takes the enclosing program loops' variables as block variables, as TVM requires.

    Variables in `needed` are annotated as those that must keep their order.
    """
    used = [v for v in loops if mentions(block.body, [v]) or any(mentions(iv.dom, [v]) for iv in block.iter_vars)]
    if not used and block.init is not None:
        used = [v for v in loops if mentions(block.init, [v])]
    if not used:
        return realize(block, level)
    inner = {v: Var("v" + str(v.name), v.ty) for v in used}
    replace = lambda node: substitute(node, inner)  # noqa: E731
    domains = [ir.Range(const(0, str(v.ty.dtype)), tirx.max_value(str(v.ty.dtype))) for v in used]
    extra = [tirx.IterVar(d, inner[v], SPATIAL) for v, d in zip(used, domains, strict=True)]
    init = None if block.init is None else replace(block.init)
    iter_vars = [tirx.IterVar(iv.dom, iv.var, iv.iter_type) for iv in block.iter_vars]
    body, notes = replace(block.body), {**block.annotations, **order_note(level, used, needed)}
    fresh = s_tir.SBlock(
        [*extra, *iter_vars], [], [], block.name_hint, body, init, block.alloc_buffers, annotations=notes
    )
    return s_tir.SBlockRealize([*used, *(v for v, _ in level.loops)], tirx.const(True, "bool"), fresh)


def wrap(body: tirx.Stmt, level: NestLevel) -> tirx.Stmt:
    """Wrap `body` in the loops of a level."""
    for var, extent in reversed(level.loops):
        # TVM's parser simplifies extents, so the simplified form makes the printed text parse to an equal function.
        body = serial(var, sym.Analyzer().simplify(extent), body)
    return body


def spatial_pairs(entry: Entry) -> list[tuple[Var, Axis]]:
    """Return the variables of spatial axes of a block, with their axes."""
    return [(v, a) for v, a, k in zip(entry.vars, entry.domains, entry.kinds, strict=True) if k == "S"]


def walk_coordinates(var: Var, axis: Axis) -> tuple[ir.Expr, Var, AxisCursor]:
    """Return the loop extent, block variable and cursor of a loop over all coordinates of an axis, stored or not."""
    slot = Var("v" + str(var.name), ir.PrimType(axis.idtype))
    cursor = (
        AxisCursor(axis, slot, slot, slot=slot) if axis.kind == "dense_fixed" else AxisCursor(None, slot, slot=slot)
    )
    return cast(axis.length, axis.idtype), slot, cursor


def extend_all(levels: list[NestLevel], loops: Sequence[tuple[ir.Expr, Var]], absent: Conditions, kind: int) -> None:
    """Add the loops of one entry; its steps are executed where all conditions in `absent` hold."""
    for extent, slot in loops:
        extend(levels, extent, slot, absent if slot is loops[-1][1] else [], kind)


def extend(levels: list[NestLevel], extent: ir.Expr, slot: Var, absent: Conditions, kind: int) -> None:
    """Add a loop; begin a new block if its extent depends on a variable of the current one."""
    if mentions(extent, levels[-1].block_vars):
        levels.append(NestLevel())
    domain = ir.Range(const(0, str(slot.ty.dtype)), extent)
    levels[-1].loops.append((Var(str(slot.name)[1:], slot.ty), extent))
    levels[-1].iter_vars.append(tirx.IterVar(domain, slot, kind))
    levels[-1].predicates += absent


def old_value(body: tirx.Stmt, levels: list[NestLevel]) -> tirx.Stmt | None:
    """Return ``c[vi] = c[vi]`` as the initialisation of a body that accumulates into existing values, else None.

    With an initialisation, TVM's schedule recognises the block as a reduction.
    """
    store = body.then_case if isinstance(body, tirx.IfThenElse) and body.else_case is None else body
    leaf = [level for level in levels if level.loops][-1:]
    reduced = [iv.var for level in leaf for iv in level.iter_vars if int(iv.iter_type) == REDUCE]
    if not isinstance(store, tirx.BufferStore) or not reduced or mentions(store.indices, reduced):
        return None
    loads = loads_of(store.value, store.buffer)
    if not loads or not all(all_same(list(x.indices), list(store.indices)) for x in loads):
        return None
    keep: tirx.Stmt = tirx.BufferStore(store.buffer, tirx.BufferLoad(store.buffer, store.indices), store.indices)
    if body is store:
        return keep
    return None if mentions(body.condition, reduced) else tirx.IfThenElse(body.condition, keep, None)


# ------------------------------------------------------------------------------ read and write regions


def _initialised(block: s_tir.SBlock) -> list[Var]:
    """Return the buffers that the block, or a block inside it, initialises before it reads them."""
    inner = collect(block.body, s_tir.SBlock)
    parts = [b.init for b in (*inner, block) if b.init is not None]
    parts += [b.body for b in inner if INIT_MARK in b.annotations]
    return [store.buffer for part in parts for store in collect(part, tirx.BufferStore)]


class _Regions:
    """Union of the accesses to each buffer: in each dimension a single element or the whole extent."""

    def __init__(self, inner: list[Var]) -> None:
        self.inner = set(inner)
        self.by_buffer: dict[Var, list[ir.Range]] = {}

    def add(self, buffer: Var, indices: Any, whole: bool = False) -> None:
        """Add one access to the union."""
        shape = buffer.ty.shape
        ranges = [self._range(i, d, whole) for i, d in zip(indices, shape, strict=True)]
        old_ranges = self.by_buffer.get(buffer)
        if old_ranges is not None:
            ranges = [_join(r, k, d) for r, k, d in zip(ranges, old_ranges, shape, strict=True)]
        self.by_buffer[buffer] = ranges

    def _range(self, index: ir.Expr, extent: ir.Expr, whole: bool) -> ir.Range:
        if whole or self._depends(index):
            return _whole(extent)
        return ir.Range.from_min_extent(index, const(1, str(index.ty.dtype)))

    def _depends(self, index: ir.Expr) -> bool:
        return mentions(index, list(self.inner)) or any(map(dialect.is_call, collect(index, Call)))

    def regions(self, without: list[Var]) -> list[tirx.BufferRegion]:
        """Return the union as TVM buffer regions."""
        skip = set(without)
        return [tirx.BufferRegion(b, r) for b, r in self.by_buffer.items() if b not in skip]


def _join(a: ir.Range, b: ir.Range, extent: ir.Expr) -> ir.Range:
    if tvm_ffi.structural_equal(a, b):
        return a
    return _whole(extent)


def _whole(extent: ir.Expr) -> ir.Range:
    """Return the range of a whole dimension, in the form of TVM's parser."""
    return ir.Range(const(0, str(extent.ty.dtype)), sym.Analyzer().simplify(extent))


def with_regions(block: s_tir.SBlock, structure: list[Var]) -> s_tir.SBlock:
    """Compute the reads and writes of `block` from its body; those of an innermost block omit `structure`."""
    bound = defined_vars(block.body)
    reads, writes = _Regions(bound), _Regions(bound)
    searched: list[ir.TensorLoad] = []

    def on_call(node: Call) -> None:
        if dialect.is_call(node, "find", "find_fiber"):
            searched.append(node.args[0])
            reads.add(node.args[0].source, node.args[0].indices, whole=True)

    callbacks = [
        (Call, on_call),
        (tirx.BufferStore, lambda s: writes.add(s.buffer, s.indices)),
        (ir.TensorLoad, lambda x: reads.add(x.source, x.indices)),
    ]
    structural_walk(block.body, callbacks)
    if block.init is not None:
        structural_walk(block.init, callbacks)
    local = [*block.alloc_buffers, *allocated_buffers(block.body)]
    hidden = [] if collect(block.body, s_tir.SBlock) else structure
    return s_tir.SBlock(
        block.iter_vars,
        reads.regions([*local, *_initialised(block), *hidden]),
        writes.regions(local),
        block.name_hint,
        block.body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.DeclareRegions")
def DeclareRegions(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Recompute the regions of every block but the root; annotate the function with the program's scratch buffers.

    The annotation distinguishes these buffers from caches that a schedule adds later.
    """
    is_lowered = func.attrs is not None and STRUCTURE in func.attrs  # AlignParams sets it on stage-I functions.
    names = {str(n) for n in func.attrs[STRUCTURE]} if is_lowered else set()
    written = {s.buffer for s in collect(func.body, tirx.BufferStore)}
    structure = [p for p in func.params if str(p.name) in names and p not in written]

    def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        inner = mutator.default_mutate(node)
        if inner.block.name_hint == "root" and not inner.block.iter_vars:
            return inner
        return s_tir.SBlockRealize(inner.iter_values, inner.predicate, with_regions(inner.block, structure))

    body = structural_mutate(func.body, [(s_tir.SBlockRealize, on_realize)])
    out = with_body(func, body)
    scratch = [str(b.name) for block in collect(body, s_tir.SBlock) for b in block.alloc_buffers]
    return out.with_attr(SCRATCH, scratch) if is_lowered and scratch else out
