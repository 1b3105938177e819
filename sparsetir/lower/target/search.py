# SPDX-License-Identifier: Apache-2.0
"""Coordinate searches: their lowering to loops, hoisted as far out as they are invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir.errors import LoweringError
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import (
    all_same,
    alloc,
    cell,
    collect,
    conjunction,
    conjuncts,
    get,
    mentions,
    put,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import Entry, SpIter, const, substitute_args
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.iterations.access import Scope
from sparsetir.lower.iterations.nest import SPATIAL, NestLevel, extend, place, realize, where_present, wrap
from sparsetir.lower.loops import PARALLEL, SERIAL, VECTORIZED, binary_search, with_, with_body
from sparsetir.lower.target.merge_loops import UnionMerge, emit_walk
from sparsetir.utils.caches import cached_property

# Lower every search to a loop, hoisted out of all loops in which it is invariant.
#
# before::
#
#     for i, j in T.grid(m, n):
#         for k in range(feat):
#             c[i, k] = c[i, k] + T.if_then_else(T.sp.find(indices[indptr[i]], ...) >= 0, ...) * b[j, k]
#
# after::
#
#     for i, j in T.grid(m, n):
#         slot[0] = -1
#         lo[0] = 0
#         hi[0] = indptr[i + 1] - indptr[i]
#         while lo[0] < hi[0]:
#             ...
#         for k in range(feat):
#             c[i, k] = c[i, k] + T.if_then_else(slot[0] >= 0, ...) * b[j, k]
#
# A search is hoisted out of a loop when its arguments do not depend on the loop and the loop does not write what the
# search reads. It keeps the conditions that guarded it. ``merge`` and ``find_fiber`` start where the last search of
# the thread ended and validate that start, so they are exact in any order of the loops.


@dataclass
class CoordinateSearch:
    """One search: its call, the conditions on its path, and the cell that holds its result."""

    call: Call
    conditions: list[ir.Expr]
    cell: Var

    @property
    def result(self) -> ir.Expr:
        return tirx.BufferLoad(self.cell, [const(0)])


@dataclass
class Frame:
    """The point before statement `node` and the searches emitted there; `placed` is in order of dependence.

    Where the statement is a condition, `holds` is what holds in the branch that is being lowered.
    """

    node: tirx.Stmt
    extent: ir.Expr | None = None
    placed: list[CoordinateSearch | UnionMerge] = field(default_factory=list)
    starts: list[tirx.Stmt] = field(default_factory=list)
    fingers: list[Var] = field(default_factory=list)
    holds: list[ir.Expr] = field(default_factory=list)

    @property
    def searches(self) -> list[CoordinateSearch]:
        return [x for x in self.placed if isinstance(x, CoordinateSearch)]

    @property
    def walks(self) -> list[UnionMerge]:
        return [x for x in self.placed if isinstance(x, UnionMerge)]

    @cached_property
    def defined(self) -> list[Var]:
        """The variables and arrays that the statement defines."""
        variables = [b.var for b in collect(self.node, tirx.Bind)] + [
            a.buffer for a in collect(self.node, tirx.AllocBuffer)
        ]
        return [*variables, self.node.loop_var] if isinstance(self.node, tirx.For) else variables

    @cached_property
    def written(self) -> set[Var]:
        """The arrays that the statement stores to."""
        return {store.buffer for store in collect(self.node, tirx.BufferStore)}


def emit_search(search: CoordinateSearch, finger: Var | None) -> list[tirx.Stmt]:
    """Emit the statements that leave the result of `search` in its cell."""
    call, dtype = search.call, str(search.cell.ty.dtype)
    kind = dialect.name_of(call)
    if kind == "find_fiber":
        steps = _fiber(search, finger)
    elif kind == "find_rule":
        rule = call.args[0]
        steps = _scan(search, lambda s: substitute_args(rule, [s]))
    else:
        first = call.args[0]
        value = lambda s: tirx.BufferLoad(first.source, [first.indices[0] + s])  # noqa: E731
        if not int(call.args[3]):
            steps = _scan(search, value)
        else:
            steps = _bisect(search, value) if finger is None else _walk(search, value, finger)
    body = seq(*steps)
    start = [*alloc(search.cell), put(search.cell, const(-1, dtype))]
    return [*start, tirx.IfThenElse(conjunction(search.conditions), body, None) if search.conditions else body]


def _hit(search: CoordinateSearch, value: Callable[[ir.Expr], ir.Expr], slot: ir.Expr) -> tirx.Stmt:
    """Accept `slot` if it is in the fiber and has the coordinate."""
    _, count, coord = search.call.args[:3]
    equal = tirx.IfThenElse(value(slot).equal(coord), put(search.cell, slot), None)
    return tirx.IfThenElse(slot < count, equal, None)


def _bisect(search: CoordinateSearch, value: Callable[[ir.Expr], ir.Expr]) -> list[tirx.Stmt]:
    dtype = str(search.cell.ty.dtype)
    lo, hi = cell("lo", dtype), cell("hi", dtype)
    _, count, coord = search.call.args[:3]
    narrow = binary_search(lambda mid: value(mid) < coord, lo, hi)
    return [*alloc(lo, hi), put(lo, const(0, dtype)), put(hi, count), narrow, _hit(search, value, get(lo))]


def _scan(search: CoordinateSearch, value: Callable[[ir.Expr], ir.Expr]) -> list[tirx.Stmt]:
    dtype = str(search.cell.ty.dtype)
    at = cell("at", dtype)
    _, count, coord = search.call.args[:3]
    test = tirx.IfThenElse(value(get(at)).equal(coord), put(search.cell, get(at)), None)
    step = seq(test, put(at, get(at) + const(1, dtype)))
    going = tirx.And(get(at) < count, get(search.cell) < const(0, dtype))
    return [*alloc(at), put(at, const(0, dtype)), tirx.While(going, step)]


def _walk(search: CoordinateSearch, value: Callable[[ir.Expr], ir.Expr], finger: Var) -> list[tirx.Stmt]:
    """Scan linearly from the last position, or from the fiber's start if the last position is past the coordinate."""
    dtype = str(search.cell.ty.dtype)
    zero, one = const(0, dtype), const(1, dtype)
    _, count, coord = search.call.args[:3]
    at = get(finger)
    clamp = put(finger, tirx.min(at, count))
    passed = tirx.IfThenElse(value(at - one) >= coord, put(finger, zero), None)
    back = tirx.IfThenElse(at > zero, passed, None)
    continues = cell("more", dtype)
    ahead = tirx.IfThenElse(value(at) < coord, put(finger, at + one), put(continues, zero))
    step = tirx.IfThenElse(at < count, ahead, put(continues, zero))
    loop = tirx.While(get(continues) > zero, step)
    return [clamp, back, *alloc(continues), put(continues, one), loop, _hit(search, value, at)]


def _fiber(search: CoordinateSearch, finger: Var | None) -> list[tirx.Stmt]:
    """Search for the largest row whose first position is not beyond the position searched."""
    dtype = str(search.cell.ty.dtype)
    one = const(1, dtype)
    first, count, pos = search.call.args[:3]
    start = lambda r: tirx.BufferLoad(first.source, [first.indices[0] + r])  # noqa: E731
    lo, hi = cell("lo", dtype), cell("hi", dtype)
    narrow = binary_search(lambda mid: start(mid + one) <= pos, lo, hi)
    full_search = [*alloc(lo, hi), put(lo, const(0, dtype)), put(hi, count), narrow]
    if finger is None:
        return [*full_search, put(search.cell, get(lo))]
    at = get(finger)
    is_beside = tirx.Or(pos < start(at), start(at + one) <= pos)
    search_again = tirx.IfThenElse(is_beside, seq(*full_search, put(finger, get(lo))), None)
    return [search_again, put(search.cell, at)]


class FindLowerer:
    """Lowering of searches, outer statements first; `frames` are the enclosing statements, outermost first."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.level_of: dict[Var, int] = {}

    # ------------------------------------------------------------------ expressions

    def expr(self, node: Any, conditions: list[ir.Expr] | None = None) -> Any:
        """Replace the searches of `node` by the cells of their results."""
        outer_conditions = conditions or []

        def on_call(call: Call, mutator: Any) -> Any:
            if dialect.is_call(call, *dialect.FIND):
                args = [self.expr(a, outer_conditions) for a in call.args]
                return self.place(Call(call.op, args, ret_ty=call.ty), outer_conditions)
            if dialect.is_if_then_else(call):
                test = self.expr(call.args[0], outer_conditions)
                yes = self.expr(call.args[1], [*outer_conditions, test])
                no = self.expr(call.args[2], [*outer_conditions, tirx.Not(test)])
                return tirx.if_then_else(test, yes, no)
            return mutator.default_mutate(call)

        def on_and(node: tirx.And, _mutator: Any) -> Any:
            first = self.expr(node.a, outer_conditions)
            return tirx.And(first, self.expr(node.b, [*outer_conditions, *_bounds(conjuncts(first), node.b)]))

        return structural_mutate(node, [(Call, on_call), (tirx.And, on_and)])

    def place(self, call: Call, conditions: list[ir.Expr]) -> ir.Expr:
        """Place a search before the outermost statement that allows it and return its result."""
        _refuse_scanned(call, conditions)
        level, guards = self._outermost(call, conditions)
        if dialect.is_call(call, "find_union"):
            return self._walk(call, level, guards).result(int(call.args[0]))
        holds = [*guards, *(condition for frame in self.frames for condition in frame.holds)]
        for frame in self._in_force(level, call):
            for earlier in frame.searches:
                if same(earlier.call, call) and _weaker(earlier.conditions, holds):
                    return earlier.result
        search = CoordinateSearch(call, guards, cell(f"slot_{len(self.level_of)}", str(call.ty.dtype)))
        self.level_of[search.cell] = level
        self.frames[level].placed.append(search)
        return search.result

    def _outermost(self, call: Call, conditions: list[ir.Expr]) -> tuple[int, list[ir.Expr]]:
        """Return the outermost frame before which a search may be placed, and the conditions that then guard it."""
        inputs = [call, *conditions]
        loaded = [b for x in inputs for b in _loaded(x)]
        floor = self._level(loaded)
        level = len(self.frames) - 1
        guards = list(conditions)
        while level > floor and _may_leave(self.frames[level - 1], inputs, loaded):
            level -= 1
            extent = self.frames[level].extent
            if extent is not None:
                has_steps = extent > const(0, str(extent.ty.dtype))
                guards.append(has_steps)
                inputs, loaded = [*inputs, has_steps], [*loaded, *_loaded(has_steps)]
                floor = max(floor, self._level(_loaded(has_steps)))
        return level, guards

    def _walk(self, call: Call, level: int, guards: list[ir.Expr]) -> UnionMerge:
        """Return the merge of a union; its cursors start where its fibers are known, outside of the step loop."""
        for frame in self._in_force(level, call):
            for walk in frame.walks:
                if all_same(walk.call.args[1:], call.args[1:]) and _weaker(walk.conditions, guards):
                    return walk
        walk = UnionMerge(call, guards, len(self.level_of))
        self.level_of |= dict.fromkeys(walk.cells, level)
        self.frames[level].placed.append(walk)
        fibers = Call(call.op, [call.args[0], const(0, str(call.ty.dtype)), *call.args[2:]], ret_ty=call.ty)
        outside, _ = self._outermost(fibers, [])
        self.frames[outside].starts += [*alloc(*walk.cells), *walk.start()]
        return walk

    def _in_force(self, level: int, call: Call) -> Iterator[Frame]:
        """Yield the frames, from `level` outwards, before which the same search has the same result."""
        loaded = _loaded(call)
        for n in range(level, -1, -1):
            frame = self.frames[n]
            if n < level and (_is_parallel(frame.node) or not frame.written.isdisjoint(loaded)):
                return
            yield frame

    def _level(self, loaded: list[Var]) -> int:
        """Return the innermost frame with the result of a search among these buffers."""
        return max((self.level_of.get(b, 0) for b in loaded), default=0)

    # ------------------------------------------------------------------ statements

    def stmt(self, node: tirx.Stmt) -> tirx.Stmt:
        """Rewrite one statement, with its searches directly before it."""
        frame = Frame(node)
        self.frames.append(frame)
        out = self._inner(node)
        emitted: list[tirx.Stmt] = []
        for x in frame.placed:
            emitted += [emit_walk(x)] if isinstance(x, UnionMerge) else emit_search(x, self._finger(x))
        self.frames.pop()
        cells = [s for f in frame.fingers for s in (*alloc(f), put(f, const(0, str(f.ty.dtype))))]
        return seq(*cells, *frame.starts, *emitted, out)

    def _finger(self, search: CoordinateSearch) -> Var | None:
        """Return a cell that persists across the loops of one thread, if the search strategy uses one."""
        call = search.call
        if not (
            dialect.is_call(call, "find_fiber")
            or (dialect.is_call(call, "find") and call.args[4].value in ("merge", "walk"))
        ):
            return None
        inside = [n + 1 for n, f in enumerate(self.frames[:-1]) if _is_parallel(f.node)]
        finger = cell(f"finger_{search.cell.name}", str(search.cell.ty.dtype))
        self.frames[inside[-1] if inside else 0].fingers.append(finger)
        return finger

    def _inner(self, node: tirx.Stmt) -> tirx.Stmt:
        if isinstance(node, tirx.SeqStmt):
            return seq(*(self.stmt(s) for s in node.seq))
        if isinstance(node, tirx.For):
            return self._loop(node)
        if isinstance(node, tirx.IfThenElse):
            frame, test = self.frames[-1], self.expr(node.condition)
            frame.holds = conjuncts(tirx.Not(test))
            no = None if node.else_case is None else self.stmt(node.else_case)
            frame.holds = conjuncts(test)
            yes = self.stmt(node.then_case)
            frame.holds = []
            return tirx.IfThenElse(test, yes, no)
        if isinstance(node, tirx.While):
            if _searches(node.condition):
                raise LoweringError("a search in the condition of a while loop is not supported: store it first")
            return tirx.While(node.condition, self.stmt(node.body))
        if isinstance(node, tirx.AttrStmt):
            return tirx.AttrStmt(node.node, node.attr_key, node.value, self.stmt(node.body))
        return self.expr(node)

    def _loop(self, node: tirx.For) -> tirx.Stmt:
        extent = self.frames[-1].extent = self.expr(node.extent)
        body = self.stmt(node.body)
        # A search that depends on a vector lane cannot run in lockstep with the other lanes.
        kind = SERIAL if node.kind == VECTORIZED and collect(body, tirx.While) else node.kind
        return with_(node, extent=extent, kind=kind, body=body)


def _may_leave(frame: Frame, inputs: list[Any], loaded: list[Var]) -> bool:
    """Return whether a search with these inputs may run before the statement of a frame instead of inside it."""
    if _is_parallel(frame.node) or not isinstance(frame.node, (tirx.For, tirx.SeqStmt)):
        return False
    return frame.written.isdisjoint(loaded) and not any(mentions(x, frame.defined) for x in inputs)


def _refuse_scanned(call: Call, conditions: list[ir.Expr]) -> None:
    """Raise for a search that depends on the slot that an enclosing scan tests."""
    inputs = list(call.args[1:] if dialect.is_call(call, "find_rule") else call.args)
    inputs = [call.args[1], *call.args[3::3]] if dialect.is_call(call, "find_union") else inputs
    if any(dialect.is_call(c, "arg") for x in [*inputs, *conditions] for c in collect(x, Call)):
        raise LoweringError("a search for every slot of another search is not supported: iterate the axis, or sort it")


def _bounds(conditions: list[ir.Expr], node: ir.Expr) -> list[ir.Expr]:
    """Return those conditions that bound what searches in `node` read arrays at: a coordinate, or one loaded by it."""
    searches = [call for call in collect(node, Call) if dialect.is_call(call, *dialect.FIND)]
    subscripts = [index for call in searches for load in collect(call, ir.TensorLoad) for index in load.indices]
    places = [place for index in subscripts for kind in (ir.TensorLoad, Var) for place in collect(index, kind)]
    tests = [c for c in conditions if not any(dialect.is_call(call, "arg") for call in collect(c, Call))]
    tested = [(c, [*collect(c, ir.TensorLoad), *collect(c, Var)]) for c in tests]
    return [c for c, parts in tested if any(same(part, place) for part in parts for place in places)]


def _weaker(some: list[ir.Expr], more: list[ir.Expr]) -> bool:
    """Return whether `some` hold wherever `more` do, by the parts of conjunctions."""
    parts = [part for condition in more for part in conjuncts(condition)]
    return all(any(same(part, b) for b in parts) for condition in some for part in conjuncts(condition))


def _is_parallel(node: tirx.Stmt) -> bool:
    return isinstance(node, tirx.For) and node.kind == PARALLEL


def _loaded(node: Any) -> list[Var]:
    return [load.source for load in collect(node, ir.TensorLoad)]


def _searches(node: Any) -> bool:
    return any(dialect.is_call(c, *dialect.FIND) for c in collect(node, Call))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.LowerFind")
def LowerFind(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Lower the searches of a function by `FindLowerer`."""
    return with_body(func, FindLowerer().stmt(func.body)) if _searches(func.body) else func


# Precompute the searches of an iteration into a buffer, before its loops.
#
# before::
#
#     for i, j in T.grid(m, n):
#         for k in range(feat):
#             with T.sblock("spmm"):
#                 c[vi, vk] = c[vi, vk] + a[indptr[vi] + T.sp.find(indices[indptr[vi]], ..., vj, "hoist")] * b[vj, vk]
#
# after::
#
#     for i, j in T.grid(m, n):
#         with T.sblock("spmm_find_0"):
#             found_0[vi, vj] = T.sp.find(indices[indptr[vi]], ..., vj, "inline")
#     for i, j in T.grid(m, n):
#         for k in range(feat):
#             with T.sblock("spmm"):
#                 c[vi, vk] = c[vi, vk] + a[indptr[vi] + found_0[vi, vj]] * b[vj, vk]
#
# The buffer has one dimension for each axes tree the search depends on. A search is not moved when the iteration
# writes what it reads, when it depends on an attached axis, whose positions are visited more than once, or when it
# is in a loop or an iteration inside the body.


class Hoister:
    """Hoisting of the searches of one iteration; `scope` is that of its body."""

    def __init__(self, iteration: SpIter, scope: Scope) -> None:
        self.iteration, self.scope = iteration, scope
        self.found: list[tuple[Call, ir.Expr]] = []
        self.buffers: list[Var] = []
        self.nests: list[tirx.Stmt] = []
        self.conditional = 0

    def replace(self, body: tirx.Stmt) -> tirx.Stmt:
        """Replace searches of `body` by loads from buffers, where they may be precomputed."""
        stored = [s.buffer for s in collect(body, tirx.BufferStore)]
        bound_vars = [b.var for b in collect(body, tirx.Bind)]

        def on_call(call: Call, mutator: Any) -> Any:
            if dialect.is_if_then_else(call):
                test = mutator.mutate(call.args[0])
                return tirx.if_then_else(test, *(self._below_condition(mutator, x) for x in call.args[1:]))
            inner = mutator.default_mutate(call)
            if (
                not dialect.is_call(inner, "find", "find_rule")
                or self._reads(inner, stored)
                or mentions(inner, bound_vars)
            ):
                return inner
            return self._hoisted(inner)

        def on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
            test = mutator.mutate(node.condition)
            branches = (node.then_case, node.else_case)
            yes, no = (None if x is None else self._below_condition(mutator, x) for x in branches)
            return tirx.IfThenElse(test, yes, no)

        def on_loop(node: tirx.For, mutator: Any) -> tirx.Stmt:
            self.conditional += 1
            out = mutator.default_mutate(node)
            self.conditional -= 1
            return out

        callbacks = [
            (Call, on_call),
            (tirx.IfThenElse, on_if),
            (tirx.For, on_loop),
            (s_tir.SBlockRealize, lambda node, _m: node),
        ]
        return structural_mutate(body, callbacks)

    def _below_condition(self, mutator: Any, node: Any) -> Any:
        """Rewrite a conditional part; a search that only occurs there is not moved: its operands may not exist."""
        self.conditional += 1
        out = mutator.mutate(node)
        self.conditional -= 1
        return out

    def _reads(self, call: Call, stored: list[Var]) -> bool:
        return any(load.source.same_as(b) for load in collect(call, ir.TensorLoad) for b in stored)

    def _hoisted(self, call: Call) -> ir.Expr:
        for earlier_call, result in self.found:
            if same(earlier_call, call):
                return result
        entries = None if self.conditional else self._needed(call)
        if entries is None:
            return call
        result = self._emit(call, entries)
        self.found.append((call, result))
        return result

    def _needed(self, call: Call) -> list[Entry] | None:
        """Return the entries the search depends on, and those above them; None if it cannot be hoisted."""
        needed: set[int] = set()
        for n, entry in reversed(list(enumerate(self.iteration.entries))):
            below = any(a.parent in entry.axes for m in needed for a in self.iteration.entries[m].axes)
            if below or mentions(call, _slots(self.scope, entry)) or self._is_at_attached(call, entry):
                needed.add(n)
        needed |= self._placed_with(needed)
        entries = [self.iteration.entries[n] for n in sorted(needed)]
        inside = {a for e in entries for a in e.axes}
        unneeded = [entry for n, entry in enumerate(self.iteration.entries) if n not in needed]
        if any(e.attached_to is not None for e in entries) or any(self._is_untraceable(e) for e in unneeded):
            return None
        return entries if all(p in inside for a in inside for p in a.ancestors) else None

    def _is_at_attached(self, call: Call, entry: Entry) -> bool:
        """Return whether a search is for the coordinate of an attached axis, which need not have one."""
        if entry.attached_to is None:
            return False
        loads = collect(self.scope.by_var[entry.vars[0]].coord, ir.TensorLoad)
        return any(same(x, y) for x in loads for y in collect(call, ir.TensorLoad))

    def _is_untraceable(self, entry: Entry) -> bool:
        """Return whether a coordinate by rule does not use the entry's slot: a dependence on it cannot be traced."""
        slots = _slots(self.scope, entry)
        placed = zip(entry.vars, entry.axes, strict=True)
        return any(a.rule is not None and not mentions(self.scope.by_var[v].coord, slots) for v, a in placed)

    def _placed_with(self, entries: set[int]) -> set[int]:
        """Return the singletons next to or below these entries: they have no loop, but operands may use them."""
        singletons: set[int] = set()
        for n, entry in enumerate(self.iteration.entries):
            parents = {None, *(a for m in entries | singletons for a in self.iteration.entries[m].axes)}
            if entry.axes[0].kind == "singleton" and entry.attached_to is None and entry.axes[0].parent in parents:
                singletons.add(n)
        return singletons

    def _emit(self, call: Call, entries: list[Entry]) -> ir.Expr:
        """Add the nest that fills a new buffer and return the element that replaces the search."""
        scope, levels = Scope(), [NestLevel()]
        renamed: dict[Var, ir.Expr] = {}
        for entry in entries:
            extent, slot, cursors, absent = place(entry, scope)
            extend(levels, extent, slot, absent, SPATIAL)
            for var, axis, cursor in zip(entry.vars, entry.axes, cursors, strict=True):
                scope.add(var, cursor, axis.length)
            renamed.update(zip(_slots(self.scope, entry), _slots(scope, entry), strict=True))
        last = _last_axes(entries)
        dtype = str(call.ty.dtype)
        number = len(self.buffers)
        buffer = tirx.decl_buffer([a.count for a in last], dtype, name=f"found_{number}", layout=None)
        inline = [ir.StringImm("inline") if isinstance(a, ir.StringImm) else substitute(a, renamed) for a in call.args]
        value = Call(call.op, inline, ret_ty=call.ty)
        body: tirx.Stmt = tirx.BufferStore(buffer, value, [scope.by_axis[a].pos for a in last])
        for n in reversed(range(len(levels))):
            name = f"{self.iteration.name}_find_{number}" + (f"_{n}" if n < len(levels) - 1 else "")
            body = where_present(body, levels[n].predicates, False)
            block = s_tir.SBlock(levels[n].iter_vars, [], [], name, body)
            body = wrap(realize(block, levels[n]), levels[n])
        self.buffers.append(buffer)
        self.nests.append(body)
        return tirx.BufferLoad(buffer, [self.scope.by_axis[a].pos for a in last])


def _slots(scope: Scope, entry: Entry) -> list[Var]:
    """Return the block variable of the entry's loop."""
    slot = scope.by_var[entry.vars[-1]].slot
    return [] if slot is None else [slot]


def _last_axes(entries: list[Entry]) -> list[Any]:
    """Return the deepest axis of each tree."""
    deepest: dict[Any, Any] = {}
    for entry in entries:
        deepest[entry.axes[-1].root] = entry.axes[-1]
    return list(deepest.values())
