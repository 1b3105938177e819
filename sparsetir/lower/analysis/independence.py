# SPDX-License-Identifier: Apache-2.0
"""Independence proofs: no step of a loop accesses an element that another step writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import all_same, collect, conjuncts, mentions, same, substitute, without_zeros
from sparsetir.ir.views import INDEPENDENT, Axis, Entry, Program, SpIter, accesses, cast, const, substitute_args
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.accesses import uncast
from sparsetir.lower.loops import allocated_buffers, defined_vars

# Independence of the steps of a flat loop by its subscripts (the second part of this module states the whole proof).
#
# Two steps are apart in an array if for every access of one and every access of the other some dimension differs. One
# of three kinds of subscripts ensures this for all accesses::
#
#   c[p // n, p % n, ...]        equal subscripts in all accesses, constant within a step, different between steps
#   c[p * 4 + lane]              a block of 4 elements for each step, or of any size that is the same for all steps
#   a[indptr[row] + j]           positions between the row pointers of a row that only this step has, by these kinds


@dataclass(frozen=True)
class ArrayFacts:
    """Names of arrays with known properties: row pointers never decrease, `distinct` arrays have no repeated values.

    Arrays in `fibers`, as name:size, have no repeated values within each group of that many entries.
    """

    pointers: set[str]
    distinct: set[str]
    fibers: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class ScopedAccess:
    """One access: its subscripts (None if the whole array is read), and the loops and guards around it in the step."""

    buffer: Var
    indices: list[ir.Expr] | None
    loops: tuple[tirx.For, ...]
    guards: tuple[ir.Expr, ...]


class _AccessCollector:
    """Collector of the accesses of a step and the arrays that it writes."""

    def __init__(self) -> None:
        self.found: list[ScopedAccess] = []
        self.written: dict[Var, None] = {}
        self.inside: set[Var] = set()
        self.moving: list[Var] = []
        self.loops: list[tirx.For] = []
        self.guards: list[ir.Expr] = []

    def visit(self, node: Any) -> None:
        callbacks = [
            (tirx.For, self._for),
            (tirx.IfThenElse, self._if),
            (tirx.BufferStore, self._store),
            (tirx.AllocBuffer, self._alloc),
            (tirx.Bind, self._bind),
            (ir.TensorLoad, self._load),
            (Call, self._call),
        ]
        structural_mutate(node, callbacks)

    def _note(self, buffer: Var, indices: Sequence[ir.Expr] | None) -> None:
        subscripts = None if indices is None else list(indices)
        self.found.append(ScopedAccess(buffer, subscripts, tuple(self.loops), tuple(self.guards)))

    def _for(self, node: tirx.For, _mutator: Any) -> tirx.For:
        self.visit(node.extent)
        self.moving.append(node.loop_var)
        self.loops.append(node)
        self.visit(node.body)
        self.loops.pop()
        return node

    def _under(self, condition: ir.Expr, node: Any) -> None:
        depth = len(self.guards)
        self.guards += conjuncts(condition)
        self.visit(node)
        del self.guards[depth:]

    def _if(self, node: tirx.IfThenElse, _mutator: Any) -> tirx.IfThenElse:
        self.visit(node.condition)
        self._under(node.condition, node.then_case)
        if node.else_case is not None:
            self.visit(node.else_case)
        return node

    def _call(self, node: Call, mutator: Any) -> Call:
        if dialect.is_if_then_else(node):
            self.visit(node.args[0])
            self._under(node.args[0], node.args[1])
            self.visit(node.args[2])
            return node
        if dialect.is_call(node, *dialect.FIND):
            for load in collect(node, ir.TensorLoad):
                self._note(load.source, None)
        return mutator.default_mutate(node)

    def _store(self, node: tirx.BufferStore, mutator: Any) -> tirx.BufferStore:
        self.written[node.buffer] = None
        self._note(node.buffer, node.indices)
        return mutator.default_mutate(node)

    def _load(self, node: ir.TensorLoad, mutator: Any) -> ir.TensorLoad:
        self._note(node.source, node.indices)
        return mutator.default_mutate(node)

    def _alloc(self, node: tirx.AllocBuffer, _mutator: Any) -> tirx.AllocBuffer:
        self.inside.add(node.buffer)
        return node

    def _bind(self, node: tirx.Bind, mutator: Any) -> tirx.Bind:
        self.moving.append(node.var)
        return mutator.default_mutate(node)


ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)
WIDE = "int64"


class Wide:
    """Converter of integer expressions to 64 bits without casts; a variable replaces every non-arithmetic part."""

    def __init__(self) -> None:
        self.known: list[tuple[ir.Expr, Var]] = []

    def of(self, expr: ir.Expr) -> ir.Expr:
        """Convert `expr` to 64 bits."""
        expr = uncast(expr)
        if isinstance(expr, tirx.IntImm):
            return const(int(expr), WIDE)
        if isinstance(expr, ARITHMETIC):
            return type(expr)(self.of(expr.a), self.of(expr.b))
        for node, var in self.known:
            if same(node, expr):
                return var
        self.known.append((expr, Var("atom", ir.PrimType(WIDE))))
        return self.known[-1][1]

    def condition(self, expr: ir.Expr) -> ir.Expr:
        """Convert a comparison to 64 bits."""
        is_known = isinstance(expr, (tirx.LT, tirx.LE))
        return type(expr)(self.of(expr.a), self.of(expr.b)) if is_known else expr

    def range(self, low: ir.Expr, extent: ir.Expr) -> ir.Range:
        """Return the range of a loop in 64 bits."""
        return ir.Range.from_min_extent(self.of(low), self.of(sym.Analyzer().simplify(extent)))


def is_one_to_one(indices: Sequence[ir.Expr], ranges: dict[Var, ir.Range]) -> bool:
    """Return whether different values of the variables of `ranges` give different subscripts."""
    if all(any(i.same_as(v) for i in indices) for v in ranges):
        return True
    wide = Wide()
    values = {wide.of(v): wide.range(r.min, r.extent) for v, r in ranges.items()}
    plain = [without_zeros(wide.of(i)) for i in indices]
    iter_map = sym.detect_iter_map(plain, values, tirx.const(True, "bool"), "bijective", False)
    return len(iter_map.indices) > 0


def are_different(indices: Sequence[ir.Expr], ranges: dict[Var, ir.Range], facts: ArrayFacts) -> bool:
    """Return whether different values of the variables of `ranges` subscript different elements.

    An array read in a subscript may have repeated values, unless `facts` lists it as distinct (in each fiber).
    """
    plain = [_entry(uncast(i), ranges, facts) for i in indices]
    exact = [i for i in plain if not any(mentions(x, list(ranges)) for x in collect(i, ir.TensorLoad))]
    return bool(exact) and is_one_to_one(exact, ranges)


def _entry(index: ir.Expr, ranges: dict[Var, ir.Range], facts: ArrayFacts) -> ir.Expr:
    """Replace a load from an index array by its subscript if the steps load no value twice."""
    if not isinstance(index, ir.TensorLoad) or len(index.indices) != 1:
        return index
    name, place = str(index.source.name), uncast(index.indices[0])
    sizes = [int(size) for array, _, size in (f.rpartition(":") for f in facts.fibers) if array == name]
    is_listed = name in facts.distinct or any(_is_in_one(place, size, ranges) for size in sizes)
    return place if is_listed else index


def _is_in_one(place: ir.Expr, size: int, ranges: dict[Var, ir.Range]) -> bool:
    """Return whether `place` is in a single group of `size` entries for all values of the variables of `ranges`."""
    wide, analyzer = Wide(), sym.Analyzer()
    for var, values in ranges.items():
        analyzer.bind(wide.of(var), wide.range(values.min, values.extent))
    group = analyzer.simplify(tirx.floordiv(wide.of(place), const(size, WIDE)))
    return not mentions(group, [wide.of(var) for var in ranges])


class _Steps:
    """Steps of one loop, with their accesses."""

    def __init__(self, loop: tirx.For, facts: ArrayFacts) -> None:
        self.loop, self.step, self.facts = loop, loop.loop_var, facts
        self.range = {self.step: ir.Range.from_min_extent(loop.min, loop.extent)}
        self.walk = _AccessCollector()
        self.walk.visit(loop.body)

    def shared(self) -> Var | None:
        """Return an array with an element that two steps may access and one of them writes; None if there is none."""
        return next((buffer for buffer in self.walk.written if self.shares(buffer)), None)

    def shares(self, buffer: Var) -> bool:
        """Return whether two steps may access the same element of a written array."""
        sites = [s for s in self.walk.found if s.buffer.same_as(buffer)]
        return buffer not in self.walk.inside and not self._are_apart(sites)

    def _are_apart(self, sites: list[ScopedAccess]) -> bool:
        places = [s.indices for s in sites if s.indices is not None]
        if len(places) < len(sites):
            return False
        columns = [list(column) for column in zip(*places, strict=True)]
        invariant = [c[0] for c in columns if all(same(i, c[0]) for i in c) and self._is_fixed(c[0])]
        if invariant and self._are_different(invariant):
            return True
        return any(self._is_block(sites, c) or self._is_fiber(sites, c) for c in columns)

    # ------------------------------------------------------------------ kinds of subscripts

    def _is_fixed(self, index: ir.Expr) -> bool:
        """Return whether a subscript depends on the step and is constant within it."""
        return mentions(index, [self.step]) and self._is_still(index)

    def _is_still(self, index: ir.Expr) -> bool:
        """Return whether an expression is constant within a step."""
        changing = [*self.walk.moving, *self.walk.written]
        return not mentions(index, changing)

    def _are_different(self, indices: list[ir.Expr]) -> bool:
        """Return whether subscripts that are constant within a step differ between steps."""
        return are_different(indices, self.range, self.facts)

    def _is_block(self, sites: list[ScopedAccess], column: list[ir.Expr]) -> bool:
        """Return whether the steps access consecutive disjoint blocks of equal size."""
        first = uncast(column[0])
        next_step = {self.step: self.step + const(1, str(self.step.ty.dtype))}
        size = sym.Analyzer().simplify(substitute(first, next_step) - first)
        if mentions(size, [self.step]) or not self._is_still(size) or collect(size, ir.TensorLoad):
            return False
        still = {v: const(0, str(v.ty.dtype)) for v in self.walk.moving}
        start = substitute(first, still)
        if not self._is_still(start) or any(mentions(x, [self.step]) for x in collect(start, ir.TensorLoad)):
            return False
        return all(self._lies_within(s, uncast(i) - start, size) for s, i in zip(sites, column, strict=True))

    def _is_fiber(self, sites: list[ScopedAccess], column: list[ir.Expr]) -> bool:
        """Return whether each step accesses the positions of a row, or of several rows, of no other step."""
        fibers = [self._fiber(s, i) for s, i in zip(sites, column, strict=True)]
        if any(f is None for f in fibers):
            return False
        arrays, rows = [f[0] for f in fibers if f], [f[1] for f in fibers if f]
        if not all(a.same_as(arrays[0]) for a in arrays):
            return False
        if all(same(r, rows[0]) for r in rows) and self._is_fixed(rows[0]):
            return self._are_different([rows[0]])
        return self._is_block(sites, rows) or self._is_fiber(sites, rows)

    def _fiber(self, site: ScopedAccess, index: ir.Expr) -> tuple[Var, ir.Expr] | None:
        """Return the row pointers and the row that contain a position; None if these are unknown."""
        index = uncast(index)
        for begin in collect(index, ir.TensorLoad):
            if str(begin.source.name) not in self.facts.pointers or len(begin.indices) != 1:
                continue
            row = begin.indices[0]
            end = tirx.BufferLoad(begin.source, [row + const(1, str(row.ty.dtype))])
            if self._lies_within(site, index - begin, end - begin):
                return begin.source, uncast(row)
        return None

    def _lies_within(self, site: ScopedAccess, offset: ir.Expr, size: ir.Expr) -> bool:
        """Return whether ``0 <= offset < size`` at an access."""
        wide, analyzer = Wide(), sym.Analyzer()
        for loop in site.loops:
            analyzer.bind(wide.of(loop.loop_var), wide.range(loop.min, loop.extent))
        offset = analyzer.simplify(wide.of(offset))
        if not analyzer.can_prove(offset >= const(0, WIDE)):
            return False
        size = wide.of(size)
        conditions = [wide.condition(g) for g in site.guards if not mentions(g, list(self.walk.written))]
        return any(_says(analyzer, g, offset, size) for g in conditions) or bool(analyzer.can_prove(offset < size))


def _says(analyzer: Any, guard: ir.Expr, offset: ir.Expr, size: ir.Expr) -> bool:
    """Return whether a guard is equivalent to ``offset < size``."""
    return isinstance(guard, tirx.LT) and bool(analyzer.can_prove_equal(guard.a - guard.b, offset - size))


def shared_array(loop: tirx.For, facts: ArrayFacts) -> Var | None:
    """Return an array with an element that two steps of a flat loop may access and one writes, or None."""
    return _Steps(loop, facts).shared()


def is_shared(buffer: Var, loop: tirx.For, facts: ArrayFacts) -> bool:
    """Return whether two steps of a flat loop may access the same element of an array that the loop writes."""
    return _Steps(loop, facts).shares(buffer)


# Proof that the steps of a loop are independent: no step accesses an element that another step writes.
#
# Every transformation that runs steps concurrently or in another order requires this proof: `is_parallel` for an
# iteration and `init_is_parallel` for its initialisation while the program still has coordinates, and `shared_array`
# for any other loop once it is flat. A loop with a proof carries `PARALLEL_MARK`; other loops run in order, and a
# schedule that makes them parallel is refused.
#
# The proof covers all accesses to the arrays that a step writes and that outlive the step: loads and stores in the
# initialisation, the body, the iterations inside, and the extents of loops. For each such array one of these must hold:
#
# * Dimensions separate the steps: each of the loop's variables alone subscripts one dimension in all accesses.
# * All accesses have the same subscripts, and these differ for different values of the iteration's variables, which
#   include the loop's.
#
# Further, the coordinates of the steps differ, no call may have side effects, and no step writes an index array,
# because searches and the extents of loops read index arrays as a whole.


PURE = 1  # Effect of an operator that only computes.
ARRAY_NAMES = ("tirx.address_of", "tirx.tvm_access_ptr", "tirx.call_pure_extern", "tirx.call_pure_packed")


@dataclass(frozen=True, eq=False)
class ArrayAccess:
    """One load or store of an array through a view."""

    array: Var
    view: Var
    indices: list[ir.Expr]
    is_store: bool


def is_parallel(iteration: SpIter, program: Program) -> bool:
    """Return whether the steps of an iteration's outermost loop are independent, by proof or promise."""
    first = iteration.entries[0]
    if set(first.kinds) != {"S"} or not _differ(first):
        return False
    if INDEPENDENT in iteration.block.annotations:
        return True
    parts = [iteration.block.body, *([] if iteration.block.init is None else [iteration.block.init])]
    return _are_apart(parts, list(first.vars), iteration, program)


def init_is_parallel(iteration: SpIter, variables: Sequence[Var], program: Program, by_position: bool) -> bool:
    """Return whether an initialisation may set elements for different values of `variables` in parallel.

    If it iterates `by_position`, the variables take the coordinates that their axes store, else all coordinates once.
    """
    entries = [e for e in iteration.entries if any(v in e.vars for v in variables)]
    if not entries or (by_position and not all(_differ(e) for e in entries)):
        return False
    return _are_apart([iteration.block.init], list(variables), iteration, program)


def injective(indices: Sequence[ir.Expr], variables: Sequence[Var], iteration: SpIter) -> bool:
    """Return whether different values of `variables` subscript different elements."""
    if all(any(i.same_as(v) for i in indices) for v in variables):
        return True
    axis_of = dict(zip(iteration.vars, iteration.axes, strict=True))
    used = [v for v in iteration.vars if mentions(indices, [v])]
    if any(v not in used for v in variables) or any(collect(i, ir.TensorLoad) for i in indices):
        return False
    return is_one_to_one(indices, {v: coordinate_range(axis_of[v]) for v in used})


def coordinate_range(axis: Axis) -> ir.Range:
    """Return the range of the coordinates of an axis."""
    return ir.Range(const(0, axis.idtype), cast(axis.length, axis.idtype))


# ---------------------------------------------------------------------------------------------- an iteration


def _differ(entry: Entry) -> bool:
    """Return whether the coordinates of an entry's steps differ and its steps need no order.

    The coordinates of a union differ, but its steps run in sequence.
    """
    return entry.merge != "union" and all(map(differ, entry.axes))


def differ(axis: Axis) -> bool:
    """Return whether the coordinates of an axis differ in each fiber: promised for an array, proven for a formula."""
    return bool(axis.unique and (axis.rule is None or axis.kind == "singleton" or _advances(axis)))


def _advances(axis: Axis) -> bool:
    """Return whether the coordinate formula of an axis moves by a constant nonzero amount from slot to slot."""
    slot = Var("slot", ir.PrimType(axis.idtype))
    above = [Var(f"above_{n}", ir.PrimType(axis.idtype)) for n in range(len(axis.ancestors))]
    begin = Var("begin", ir.PrimType(axis.idtype))
    at = lambda s: substitute_args(axis.rule, [*above, s, begin + s])  # noqa: E731
    gap = sym.Analyzer().simplify(at(slot + const(1, axis.idtype)) - at(slot))
    return isinstance(gap, tirx.IntImm) and int(gap) != 0


def _are_apart(parts: list[Any], variables: list[Var], iteration: SpIter, program: Program) -> bool:
    if any(_may_act(part) for part in parts):
        return False
    touched = list(_accesses(parts, iteration, program))
    stored = {t.array for t in touched if t.is_store}
    if stored & _structure(parts, iteration, touched, program):
        return False
    moving = defined_vars(*parts)
    groups = [[t for t in touched if t.array.same_as(array)] for array in stored]
    return all(_tells_apart(group, variables, iteration, moving) for group in groups)


def _tells_apart(group: list[ArrayAccess], variables: list[Var], iteration: SpIter, moving: list[Var]) -> bool:
    """Return whether different steps access different elements of the array of `group`."""
    if not all(t.view.same_as(group[0].view) for t in group):
        return False
    indices = [t.indices for t in group]
    own_subscripts = [_whole(indices[0], v) for v in variables]
    if None not in own_subscripts and all([_whole(i, v) for v in variables] == own_subscripts for i in indices):
        return True
    same = all(all_same(i, indices[0]) for i in indices) and not mentions(indices[0], moving)
    return same and injective(indices[0], variables, iteration)


def _whole(indices: list[ir.Expr], var: Var) -> int | None:
    """Return the dimension that `var` alone subscripts, or None."""
    return next((n for n, i in enumerate(indices) if i.same_as(var)), None)


def _accesses(parts: list[Any], iteration: SpIter, program: Program) -> Iterable[ArrayAccess]:
    """Yield the accesses to arrays allocated outside the step."""
    local = _allocated_inside(iteration.block)
    for view, indices, is_store in (access for part in parts for access in accesses(part)):
        buffer = program.buffers.get(view)
        array = view if buffer is None else buffer.storage
        if view not in local and array not in local:
            yield ArrayAccess(array, view, indices, is_store)


def _structure(parts: list[Any], iteration: SpIter, touched: list[ArrayAccess], program: Program) -> set[Var]:
    """Return the index arrays of the axes that the steps iterate or search."""
    within = [it for it in program.iterations if any(_holds(part, it) for part in parts)]
    used = {a for it in (iteration, *within) for a in it.axes}
    used |= {a for t in touched if t.view in program.buffers for a in program.buffers[t.view].axes}
    used |= {up for a in used for up in a.ancestors}
    arrays = {array for a in used for array in (a.indptr, a.indices) if array is not None}
    rules = [r for a in used for r in (a.rule, a.extent_rule, a.offset_rule) if r is not None]
    return arrays | {x.source for r in rules for x in collect(r, ir.TensorLoad)}


def _holds(part: Any, iteration: SpIter) -> bool:
    return any(b.same_as(iteration.block) for b in collect(part, s_tir.SBlock))


def _may_act(node: Any) -> bool:
    """Return whether a call may have side effects or access an array by its address."""
    operators = [call.op for call in collect(node, Call)]
    return any(not isinstance(op, ir.Op) or str(op.name) in ARRAY_NAMES or _effect(op) > PURE for op in operators)


def _effect(operator: ir.Op) -> int:
    """Return the effect kind of an operator; one without an effect kind is pure."""
    kind = operator.get_attr("TCallEffectKind")
    return PURE if kind is None else int(kind)


def _allocated_inside(block: s_tir.SBlock) -> set[Var]:
    buffers = {*block.alloc_buffers, *allocated_buffers(block.body)}
    views = {d.buffer: d.data.args[0] for d in collect(block.body, tirx.DeclBuffer) if d.data.args}
    return buffers | {view for view, storage in views.items() if storage in buffers}


__all__ = ["ArrayFacts", "are_different", "is_one_to_one", "is_shared", "shared_array"]
