# SPDX-License-Identifier: Apache-2.0
"""Turn every search into a loop, as far out as it may stand.

before::

    for i, j in T.grid(m, n):
        for k in range(feat):
            c[i, k] = c[i, k] + T.if_then_else(T.sp.find(indices[indptr[i]], ...) >= 0, ...) * b[j, k]

after::

    for i, j in T.grid(m, n):
        slot[0] = -1
        lo[0] = 0
        hi[0] = indptr[i + 1] - indptr[i]
        while lo[0] < hi[0]:
            ...
        for k in range(feat):
            c[i, k] = c[i, k] + T.if_then_else(slot[0] >= 0, ...) * b[j, k]

A search leaves a loop when its arguments do not depend on the loop and the loop does not write what the search
reads. It keeps the conditions it stood under. ``merge`` and ``find_fiber`` start where the last search of the
thread ended and check that the start is right, so they are exact in any order of the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.errors import LoweringError
from sparsetir.ir import const, substitute_args
from sparsetir.lower.host.find_union import Walk, emit_walk
from sparsetir.lower.nests import PARALLEL, SERIAL, VECTORIZED, binary_search, with_
from sparsetir.lower.rewriting import (
    all_same,
    alloc,
    cell,
    collect,
    conjunction,
    get,
    mentions,
    put,
    same,
    seq,
)
from sparsetir.walks import structural_mutate, structural_walk


@dataclass
class Search:
    """One search: its call, the conditions on its path, and the cell that holds its result."""

    call: Call
    conditions: list[ir.Expr]
    cell: Var

    @property
    def result(self) -> ir.Expr:
        return tirx.BufferLoad(self.cell, [const(0)])


@dataclass
class Frame:
    """The place just before statement `node`, and what must run there: in `placed` nothing needs what follows it."""

    node: tirx.Stmt
    extent: ir.Expr | None = None
    placed: list[Search | Walk] = field(default_factory=list)
    starts: list[tirx.Stmt] = field(default_factory=list)
    fingers: list[Var] = field(default_factory=list)

    @property
    def searches(self) -> list[Search]:
        return [x for x in self.placed if isinstance(x, Search)]

    @property
    def walks(self) -> list[Walk]:
        return [x for x in self.placed if isinstance(x, Walk)]

    @cached_property
    def defined(self) -> list[Var]:
        """The variables and arrays that the statement brings into being."""
        own = [b.var for b in collect(self.node, tirx.Bind)] + [a.buffer for a in collect(self.node, tirx.AllocBuffer)]
        return [*own, self.node.loop_var] if isinstance(self.node, tirx.For) else own

    @cached_property
    def written(self) -> set[Var]:
        """The arrays that the statement stores to."""
        return {store.buffer for store in collect(self.node, tirx.BufferStore)}


def emit_search(search: Search, finger: Var | None) -> list[tirx.Stmt]:
    """The statements that leave the result of `search` in its cell."""
    call, dtype = search.call, str(search.cell.ty.dtype)
    kind = op.name_of(call)
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


def _hit(search: Search, value: Callable[[ir.Expr], ir.Expr], slot: ir.Expr) -> tirx.Stmt:
    """Accept `slot` if it lies in the fiber and holds the coordinate."""
    _, count, coord = search.call.args[:3]
    equal = tirx.IfThenElse(value(slot).equal(coord), put(search.cell, slot), None)
    return tirx.IfThenElse(slot < count, equal, None)


def _bisect(search: Search, value: Callable[[ir.Expr], ir.Expr]) -> list[tirx.Stmt]:
    dtype = str(search.cell.ty.dtype)
    lo, hi = cell("lo", dtype), cell("hi", dtype)
    _, count, coord = search.call.args[:3]
    narrow = binary_search(lambda mid: value(mid) < coord, lo, hi)
    return [*alloc(lo, hi), put(lo, const(0, dtype)), put(hi, count), narrow, _hit(search, value, get(lo))]


def _scan(search: Search, value: Callable[[ir.Expr], ir.Expr]) -> list[tirx.Stmt]:
    dtype = str(search.cell.ty.dtype)
    at = cell("at", dtype)
    _, count, coord = search.call.args[:3]
    test = tirx.IfThenElse(value(get(at)).equal(coord), put(search.cell, get(at)), None)
    step = seq(test, put(at, get(at) + const(1, dtype)))
    going = tirx.And(get(at) < count, get(search.cell) < const(0, dtype))
    return [*alloc(at), put(at, const(0, dtype)), tirx.While(going, step)]


def _walk(search: Search, value: Callable[[ir.Expr], ir.Expr], finger: Var) -> list[tirx.Stmt]:
    """Linear co-walk from the last place, from the fiber's start when that lies too far right."""
    dtype = str(search.cell.ty.dtype)
    zero, one = const(0, dtype), const(1, dtype)
    _, count, coord = search.call.args[:3]
    at = get(finger)
    clamp = put(finger, tirx.min(at, count))
    passed = tirx.IfThenElse(value(at - one) >= coord, put(finger, zero), None)
    back = tirx.IfThenElse(at > zero, passed, None)
    more = cell("more", dtype)
    ahead = tirx.IfThenElse(value(at) < coord, put(finger, at + one), put(more, zero))
    step = tirx.IfThenElse(at < count, ahead, put(more, zero))
    loop = tirx.While(get(more) > zero, step)
    return [clamp, back, *alloc(more), put(more, one), loop, _hit(search, value, at)]


def _fiber(search: Search, finger: Var | None) -> list[tirx.Stmt]:
    """Largest row whose first position is not beyond the position searched."""
    dtype = str(search.cell.ty.dtype)
    one = const(1, dtype)
    first, count, pos = search.call.args[:3]
    start = lambda r: tirx.BufferLoad(first.source, [first.indices[0] + r])  # noqa: E731
    lo, hi = cell("lo", dtype), cell("hi", dtype)
    narrow = binary_search(lambda mid: start(mid + one) <= pos, lo, hi)
    fresh = [*alloc(lo, hi), put(lo, const(0, dtype)), put(hi, count), narrow]
    if finger is None:
        return [*fresh, put(search.cell, get(lo))]
    at = get(finger)
    is_beside = tirx.Or(pos < start(at), start(at + one) <= pos)
    again = tirx.IfThenElse(is_beside, seq(*fresh, put(finger, get(lo))), None)
    return [again, put(search.cell, at)]


class FindLowerer:
    """Walks statements outside in; `frames` are the statements it stands in, outermost first."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.level_of: dict[Var, int] = {}

    def function(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        """Lower the searches of a whole function."""
        return tirx.PrimFunc(func.params, self.stmt(func.body), func.ret_type, func.attrs)

    # ------------------------------------------------------------------ expressions

    def expr(self, node: Any, conditions: list[ir.Expr] | None = None) -> Any:
        """`node` with its searches replaced by cells."""
        given = conditions or []

        def on_call(call: Call, mutator: Any) -> Any:
            if op.is_call(call, *op.FIND):
                args = [self.expr(a, given) for a in call.args]
                return self.place(Call(call.op, args, ret_ty=call.ty), given)
            if op.is_if_then_else(call):
                test = self.expr(call.args[0], given)
                yes = self.expr(call.args[1], [*given, test])
                no = self.expr(call.args[2], [*given, tirx.Not(test)])
                return tirx.if_then_else(test, yes, no)
            return mutator.default_mutate(call)

        return structural_mutate(node, [(Call, on_call)])

    def place(self, call: Call, conditions: list[ir.Expr]) -> ir.Expr:
        """Put a search before the outermost statement that allows it; returns its result."""
        _refuse_scanned(call, conditions)
        level, held = self._outermost(call, conditions)
        if op.is_call(call, "find_union"):
            return self._walk(call, level, held).result(int(call.args[0]))
        for frame in self._in_force(level, call):
            for known in frame.searches:
                if same(known.call, call) and _weaker(known.conditions, held):
                    return known.result
        search = Search(call, held, cell(f"slot_{len(self.level_of)}", str(call.ty.dtype)))
        self.level_of[search.cell] = level
        self.frames[level].placed.append(search)
        return search.result

    def _outermost(self, call: Call, conditions: list[ir.Expr]) -> tuple[int, list[ir.Expr]]:
        """The outermost frame before which a search may stand, and the conditions that it then stands under."""
        inputs = [call, *conditions]
        loaded = [b for x in inputs for b in _loaded(x)]
        floor = self._level(loaded)
        level = len(self.frames) - 1
        held = list(conditions)
        while level > floor and _may_leave(self.frames[level - 1], inputs, loaded):
            level -= 1
            extent = self.frames[level].extent
            if extent is not None:
                runs = extent > const(0, str(extent.ty.dtype))
                held.append(runs)
                inputs, loaded = [*inputs, runs], [*loaded, *_loaded(runs)]
                floor = max(floor, self._level(_loaded(runs)))
        return level, held

    def _walk(self, call: Call, level: int, held: list[ir.Expr]) -> Walk:
        """The cursors of a union; they start where its fibers are known, outside of the loop over its steps."""
        for frame in self._in_force(level, call):
            for walk in frame.walks:
                if all_same(walk.call.args[1:], call.args[1:]) and _weaker(walk.conditions, held):
                    return walk
        walk = Walk(call, held, len(self.level_of))
        self.level_of |= dict.fromkeys(walk.cells, level)
        self.frames[level].placed.append(walk)
        fibers = Call(call.op, [call.args[0], const(0, str(call.ty.dtype)), *call.args[2:]], ret_ty=call.ty)
        outside, _ = self._outermost(fibers, [])
        self.frames[outside].starts += [*alloc(*walk.cells), *walk.start()]
        return walk

    def _in_force(self, level: int, call: Call) -> Iterator[Frame]:
        """The frames, from `level` outwards, before which the same search would have found the same."""
        loaded = _loaded(call)
        for n in range(level, -1, -1):
            frame = self.frames[n]
            if n < level and (_is_loop(frame.node, PARALLEL) or not frame.written.isdisjoint(loaded)):
                return
            yield frame

    def _level(self, loaded: list[Var]) -> int:
        """The innermost frame that holds the result of a search among these buffers."""
        return max((self.level_of.get(b, 0) for b in loaded), default=0)

    # ------------------------------------------------------------------ statements

    def stmt(self, node: tirx.Stmt) -> tirx.Stmt:
        """Rewrite one statement, with its searches right before it."""
        frame = Frame(node)
        self.frames.append(frame)
        out = self._inner(node)
        emitted = [s for placed in frame.placed for s in self._emitted(placed)]
        self.frames.pop()
        cells = [s for f in frame.fingers for s in (*alloc(f), put(f, const(0, str(f.ty.dtype))))]
        return seq(*cells, *frame.starts, *emitted, out)

    def _emitted(self, placed: Search | Walk) -> list[tirx.Stmt]:
        return [emit_walk(placed)] if isinstance(placed, Walk) else emit_search(placed, self._finger(placed))

    def _finger(self, search: Search) -> Var | None:
        """A cell that outlives the loops of one thread, where the strategy wants one."""
        call = search.call
        if not (
            op.is_call(call, "find_fiber") or (op.is_call(call, "find") and call.args[4].value in ("merge", "walk"))
        ):
            return None
        inside = [n + 1 for n, f in enumerate(self.frames[:-1]) if _is_loop(f.node, PARALLEL)]
        finger = cell(f"finger_{search.cell.name}", str(search.cell.ty.dtype))
        self.frames[inside[-1] if inside else 0].fingers.append(finger)
        return finger

    def _inner(self, node: tirx.Stmt) -> tirx.Stmt:
        if isinstance(node, tirx.SeqStmt):
            return seq(*(self.stmt(s) for s in node.seq))
        if isinstance(node, tirx.For):
            return self._loop(node)
        if isinstance(node, tirx.IfThenElse):
            test = self.expr(node.condition)
            no = None if node.else_case is None else self.stmt(node.else_case)
            return tirx.IfThenElse(test, self.stmt(node.then_case), no)
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
        kind = SERIAL if node.kind == VECTORIZED and _has_while(body) else node.kind
        return with_(node, extent=extent, kind=kind, body=body)


def _may_leave(frame: Frame, inputs: list[Any], loaded: list[Var]) -> bool:
    """Whether a search with these inputs may run before the statement of a frame instead of inside it."""
    if _is_loop(frame.node, PARALLEL) or not isinstance(frame.node, (tirx.For, tirx.SeqStmt)):
        return False
    return frame.written.isdisjoint(loaded) and not any(mentions(x, frame.defined) for x in inputs)


def _refuse_scanned(call: Call, conditions: list[ir.Expr]) -> None:
    """A search must not depend on the slot that a scan around it tries."""
    own = list(call.args[1:] if op.is_call(call, "find_rule") else call.args)
    own = [call.args[1], *call.args[3::3]] if op.is_call(call, "find_union") else own
    if any(op.is_call(c, "arg") for x in [*own, *conditions] for c in collect(x, Call)):
        raise LoweringError("a search for every slot of another search is not supported: iterate the axis, or sort it")


def _weaker(some: list[ir.Expr], more: list[ir.Expr]) -> bool:
    """Whether `some` hold wherever `more` do."""
    return all(any(same(a, b) for b in more) for a in some)


def _is_loop(node: tirx.Stmt, kind: tirx.ForKind) -> bool:
    return isinstance(node, tirx.For) and node.kind == kind


def _loaded(node: Any) -> list[Var]:
    found: list[Var] = []
    structural_walk(node, (ir.TensorLoad, lambda x: found.append(x.source)))
    return found


def _has_while(body: tirx.Stmt) -> bool:
    hit: list[int] = []
    structural_walk(body, (tirx.While, lambda _: hit.append(1)))
    return bool(hit)


def _searches(node: Any) -> bool:
    hit: list[int] = []
    structural_walk(node, (Call, lambda c: hit.append(1) if op.is_call(c, *op.FIND) else None))
    return bool(hit)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.LowerFind")
def LowerFind(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """The pass around `FindLowerer`."""
    return FindLowerer().function(func) if _searches(func.body) else func
