# SPDX-License-Identifier: Apache-2.0
"""Buffer accesses of a stage-II function in execution order, and coverage of caches by their first store."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import collect, conjuncts, mentions, moves_by_one, same, substitute
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import SCRATCH, names_in
from sparsetir.utils.caches import cached_property

# Proofs about data-dependent extents: whether a loop runs at least once, whether two lengths are equal.


LONGEST = 1 << 30


class Atoms:
    """Map from loads and casts to variables, so that the arithmetic around them can be compared."""

    def __init__(self) -> None:
        self.known: list[tuple[ir.Expr, Var]] = []

    def replace(self, expr: ir.Expr) -> ir.Expr:
        """Replace the loads and casts in `expr` by variables."""
        callbacks = [(ir.TensorLoad, self._on_atom), (tirx.Cast, self._on_atom)]
        return structural_mutate(expr, callbacks)

    def of(self, expr: ir.Expr) -> list[Var]:
        """Return the variables that represent `expr`, of any integer width."""
        plain = uncast(expr)
        variables = [plain] if isinstance(plain, Var) else []
        return variables + [var for node, var in self.known if same(uncast(node), plain)]

    def _on_atom(self, node: ir.Expr, _mutator: Any) -> Var:
        for expr, var in self.known:
            if same(expr, node):
                return var
        self.known.append((node, Var("atom", ir.PrimType(str(node.ty.dtype)))))
        return self.known[-1][1]


def _at_least_one(analyzer: sym.Analyzer, var: Var) -> None:
    dtype = str(var.ty.dtype)
    analyzer.bind(var, ir.Range.from_min_extent(const(1, dtype), const(LONGEST, dtype)))


def bindings(realize: s_tir.SBlockRealize) -> list[tuple[tirx.IterVar, ir.Expr]]:
    """Return the variables of a block with their values."""
    return list(zip(realize.block.iter_vars, realize.iter_values, strict=True))


def _is_unbounded(iter_var: tirx.IterVar) -> bool:
    """Return whether a block variable only forwards the variable of a program loop, whose length is unknown here."""
    return isinstance(iter_var.dom.extent, tirx.IntImm) and int(iter_var.dom.extent) > LONGEST


def has_steps(loop: tirx.For, realize: s_tir.SBlockRealize) -> bool:
    """Return whether a loop around a block runs at least once if the domains of the block's variables are nonempty."""
    moved = [(iv, v) for iv, v in bindings(realize) if mentions(v, [loop.loop_var])]
    if any(v.same_as(loop.loop_var) or _is_unbounded(iv) for iv, v in moved):
        return True
    atoms, analyzer = Atoms(), sym.Analyzer()
    extent = atoms.replace(loop.extent)
    for iv in realize.block.iter_vars:
        domain = atoms.replace(uncast(iv.dom.extent))
        for factor in _factors(iv.dom.extent):  # sizes are not negative, so none is zero where the product is not
            for var in atoms.of(factor):
                _at_least_one(analyzer, var)
        if isinstance(domain, tirx.Sub) and isinstance(domain.a, Var):
            length = Var("length", domain.a.ty)
            _at_least_one(analyzer, length)
            extent = substitute(extent, {domain.a: domain.b + length})
    return bool(analyzer.can_prove(analyzer.simplify(extent) >= const(1, str(extent.ty.dtype))))


def _factors(expr: ir.Expr) -> list[ir.Expr]:
    """Return the factors of a product without its constants, or the expression itself."""
    plain = uncast(expr)
    if not isinstance(plain, tirx.Mul):
        return [expr]
    return [factor for part in (plain.a, plain.b) if not isinstance(part, tirx.IntImm) for factor in _factors(part)]


def uncast(expr: ir.Expr) -> ir.Expr:
    """Strip the casts around `expr`."""
    return uncast(expr.value) if isinstance(expr, tirx.Cast) else expr


def equal(a: ir.Expr, b: ir.Expr) -> bool:
    """Return whether two expressions are proven equal, irrespective of integer width."""
    atoms, analyzer = Atoms(), sym.Analyzer()
    gap = analyzer.simplify(atoms.replace(uncast(a))) - analyzer.simplify(atoms.replace(uncast(b)))
    return bool(analyzer.can_prove_equal(gap, const(0, str(gap.ty.dtype))))


def row_length(start: ir.Expr) -> ir.Expr | None:
    """Return the length of a row that starts at ``indptr[row]`` or ``row * width``; None for other starts."""
    start = uncast(start)
    if isinstance(start, tirx.Mul):
        return start.b
    if not isinstance(start, ir.TensorLoad) or len(start.indices) != 1:
        return None
    row = start.indices[0]
    return tirx.BufferLoad(start.source, [row + const(1, str(row.ty.dtype))]) - start


# All buffer accesses of a stage-II function in execution order, with the loops, blocks and conditions around each.


Node: TypeAlias = "tirx.For | s_tir.SBlockRealize | tirx.IfThenElse"


@dataclass(frozen=True)
class Guard:
    """Condition of an access, in the variables of the first ``depth`` blocks of the access's ``path``."""

    condition: ir.Expr
    depth: int
    is_bound: bool
    """True if it only keeps variables within their domains: the ``T.where`` of a block, or a loop that runs."""


@dataclass(frozen=True, eq=False)
class AccessSite:
    """One load or store.

    ``path`` has the loops, blocks and conditional statements around it, outermost first.
    """

    buffer: Var
    indices: list[ir.Expr]
    value: Any
    path: tuple[Node, ...]
    guards: tuple[Guard, ...]

    @property
    def is_store(self) -> bool:
        return self.value is not None

    @property
    def place(self) -> tuple[int, ...]:
        """Key shared by the accesses at one place under the same conditions."""
        return (*map(hash, self.path), *map(hash, (g.condition for g in self.guards)))

    @property
    def loops(self) -> list[tirx.For]:
        return [n for n in self.path if isinstance(n, tirx.For)]

    @property
    def blocks(self) -> list[s_tir.SBlockRealize]:
        return [n for n in self.path if isinstance(n, s_tir.SBlockRealize)]

    @property
    def block(self) -> str:
        """Name of the innermost block."""
        return str(self.blocks[-1].block.name_hint)

    def is_beside(self, site: AccessSite) -> bool:
        """Return whether `site` has the same innermost block."""
        return bool(self.blocks[-1].same_as(site.blocks[-1]))

    def within(self, buffer: Var) -> list[s_tir.SBlockRealize]:
        """Return the blocks around the access that are inside the block that allocates `buffer`."""
        blocks = self.blocks
        at = [n for n, realize in enumerate(blocks) if buffer in list(realize.block.alloc_buffers)]
        return blocks[at[0] + 1 :] if at else blocks

    def outwards(self, expr: ir.Expr, depth: int, to: int) -> ir.Expr:
        """Rewrite `expr`, of the block at `depth`, in the variables visible inside the outermost `to` blocks."""
        for realize in reversed(self.blocks[to:depth]):
            pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
            expr = substitute(expr, {iv.var: value for iv, value in pairs})
        return expr


def loops_of_blocks(site: AccessSite) -> Iterator[tuple[tirx.For, s_tir.SBlockRealize]]:
    """Yield each loop around an access with the next block inside the loop."""
    loops: list[tirx.For] = []
    for node in site.path:
        if isinstance(node, tirx.For):
            loops.append(node)
        elif isinstance(node, s_tir.SBlockRealize):
            yield from ((loop, node) for loop in loops)
            loops = []


def places(accesses: Sequence[AccessSite]) -> list[AccessSite]:
    """Return one access for each distinct place and set of conditions."""
    return list({site.place: site for site in reversed(accesses)}.values())[::-1]


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of leading nodes that two paths share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if not x.same_as(y)), min(len(a), len(b)))


class _SiteCollector:
    def __init__(self) -> None:
        self.found: list[AccessSite] = []
        self.path: list[Node] = []
        self.guards: list[Guard] = []
        self.views: dict[Var, Any] = {}
        self.known: dict[int, list[ir.Expr]] = {}

    def walk(self, node: Any) -> None:
        """Visit `node` in the order of execution."""
        callbacks = [
            (tirx.For, self._for),
            (s_tir.SBlockRealize, self._realize),
            (tirx.IfThenElse, self._if),
            (Call, self._call),
            (tirx.BufferStore, self._store),
            (ir.TensorLoad, self._load),
        ]
        structural_mutate(node, callbacks)

    def _under(self, node: Node | None, conditions: Sequence[ir.Expr], *inner: Any, is_bound: bool = False) -> None:
        """Visit the parts `inner` below a node, if any, and under conditions."""
        path, guards = list(self.path), list(self.guards)
        depth = sum(isinstance(n, s_tir.SBlockRealize) for n in path)
        self.path += [] if node is None else [node]
        self.guards += [Guard(self._one(c), depth, is_bound) for c in conditions]
        for part in inner:
            if part is not None:
                self.walk(part)
        self.path, self.guards = path, guards

    def _one(self, condition: ir.Expr) -> ir.Expr:
        """Return the first condition equal to this one: nested conditionals repeat conditions hundreds of times."""
        equal = self.known.setdefault(tvm_ffi.structural_hash(condition), [])
        first_equal = next((c for c in equal if same(c, condition)), None)
        if first_equal is None:
            equal.append(condition)
        return condition if first_equal is None else first_equal

    def _for(self, node: tirx.For, mutator: Any) -> tirx.For:
        mutator.mutate(node.extent)
        # A loop of an attached axis has no steps where the coordinate of the other axis is not stored.
        conditions = conjuncts(node.extent.args[0]) if dialect.is_if_then_else(node.extent) else []
        self._under(node, conditions, node.body, is_bound=True)
        return node

    def _realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        for expr in (node.predicate, *node.iter_values):
            mutator.mutate(expr)
        self.views.update({view.buffer: view.source for view in node.block.match_buffers})
        self._under(node, conjuncts(node.predicate), node.block.init, node.block.body, is_bound=True)
        return node

    def _if(self, node: tirx.IfThenElse, mutator: Any) -> tirx.IfThenElse:
        mutator.mutate(node.condition)
        self._under(node, conjuncts(node.condition), node.then_case)
        self._under(node, [tirx.Not(node.condition)], node.else_case)
        return node

    def _call(self, node: Call, mutator: Any) -> Call:
        if not dialect.is_if_then_else(node):
            return mutator.default_mutate(node)
        condition, yes, no = node.args
        mutator.mutate(condition)
        self._under(None, conjuncts(condition), yes)
        self._under(None, [tirx.Not(condition)], no)
        return node

    def _add(self, buffer: Var, indices: Sequence[ir.Expr], value: ir.Expr | None) -> None:
        """Record an access; translate an access of a view to its underlying buffer."""
        region = self.views.get(buffer)
        if region is not None:
            starts = [r.min for r in region.region]
            inner = [const(0)] * (len(starts) - len(indices)) + list(indices)
            buffer, indices = region.source, [s + i for s, i in zip(starts, inner, strict=True)]
        self.found.append(AccessSite(buffer, list(indices), value, tuple(self.path), tuple(self.guards)))

    def _load(self, node: ir.TensorLoad, mutator: Any) -> ir.TensorLoad:
        mutator.default_mutate(node)
        self._add(node.source, node.indices, None)
        return node

    def _store(self, node: tirx.BufferStore, mutator: Any) -> tirx.BufferStore:
        for expr in (*node.indices, node.value):
            mutator.mutate(expr)
        self._add(node.buffer, node.indices, node.value)
        return node


def caches(func: tirx.PrimFunc) -> list[Var]:
    """Return the buffers that a schedule added to a stage-II function, except those passed to external kernels."""
    program_scratch = names_in(func, SCRATCH)
    buffers = [
        b
        for block in collect(func.body, s_tir.SBlock)
        for b in block.alloc_buffers
        if str(b.name) not in program_scratch
    ]
    external = {arg for call in collect(func.body, Call) for arg in call.args if isinstance(arg, Var)}
    return [b for b in buffers if b not in external]


@functools.lru_cache(maxsize=1)  # Consecutive checks request the accesses of the same function.
def sites(func: tirx.PrimFunc) -> list[AccessSite]:
    """Collect the loads and stores of a function in execution order."""
    walk = _SiteCollector()
    walk.walk(func.body)
    return walk.found


# Coverage of a cache: whether its first store sets all elements that a later load reads.
#
# TVM's regions are exact for affine subscripts. For data-dependent ones it assumes that the whole buffer is written::
#
#     c_global[indptr[vi] + vj] = ...        # the positions of one row, or of all rows if vi is every row


@dataclass(frozen=True, eq=False)
class Cover:
    """Elements of the cache `buffer` that `first` stores, compared with those that `reader` loads."""

    buffer: Var
    first: AccessSite
    reader: AccessSite

    @property
    def is_whole(self) -> bool:
        """True if `first` sets every element that `reader` loads, with separate variables for each dimension."""
        if len(self.reader.blocks) == self._depth:
            return self._has_element()
        used: list[Var] = []
        for index, read in zip(self.first.indices, self.reader.indices, strict=True):
            index = self._without_units(uncast(index))
            variables = [v for v in self._moving if mentions(index, [v])]
            if any(v in used for v in variables) or not self._covers(index, read):
                return False
            used += variables
        return True

    def _has_element(self) -> bool:
        """Return whether the element read for a loop extent, next to the store's block, is set.

        TVM computes the regions that blocks read; loads in the extents of loops around blocks are in no region.
        """
        lanes = {n.loop_var: n for n in self.first.path[self._shared :] if isinstance(n, tirx.For)}
        analyzer = sym.Analyzer()
        for index, read in zip(self.first.indices, self.reader.indices, strict=True):
            place = self.first.outwards(index, len(self.first.blocks), self._depth)
            moved = [loop for var, loop in lanes.items() if mentions(place, [var])]
            if len(moved) > 1:
                return False
            gap = read - place
            steps = [const(0, str(gap.ty.dtype))] * 2
            if moved:
                gap = substitute(gap, {moved[0].loop_var: const(0, str(moved[0].loop_var.ty.dtype))})
                steps = [steps[0], moved[0].extent - const(1, str(moved[0].extent.ty.dtype))]
            gap = analyzer.simplify(gap)
            if not analyzer.can_prove(gap >= steps[0]) or not analyzer.can_prove(gap <= steps[1]):
                return False
            if moved and not moves_by_one(place, moved[0].loop_var):
                return False
        return True

    @cached_property
    def _shared(self) -> int:
        return common(self.first.path, self.reader.path)

    @cached_property
    def _depth(self) -> int:
        """Number of blocks around both accesses."""
        return sum(isinstance(n, s_tir.SBlockRealize) for n in self.first.path[: self._shared])

    @cached_property
    def _inner(self) -> list[tuple[tirx.IterVar, ir.Expr]]:
        """Variables and values of the store's blocks, except the blocks around the allocation or the reader."""
        below = len(self.first.blocks) - len(self.first.within(self.buffer))
        blocks = self.first.blocks[max(below, self._depth) :]
        return [p for r in blocks for p in zip(r.block.iter_vars, r.iter_values, strict=True)]

    @cached_property
    def _moving(self) -> dict[Var, ir.Range]:
        return {iv.var: iv.dom for iv, _ in self._inner}

    @cached_property
    def _complete(self) -> list[Var]:
        """Variables that take all their values before the reader runs."""
        shared_loop_vars = [n.loop_var for n in self.first.path[: self._shared] if isinstance(n, tirx.For)]
        return [iv.var for iv, value in self._inner if not mentions(value, shared_loop_vars)]

    def _without_units(self, index: ir.Expr) -> ir.Expr:
        """Substitute the variables of extent 1 in a subscript."""
        units = {v: r.min for v, r in self._moving.items() if isinstance(r.extent, tirx.IntImm) and int(r.extent) == 1}
        return sym.Analyzer().simplify(substitute(index, units)) if mentions(index, list(units)) else index

    def _covers(self, index: ir.Expr, read: ir.Expr) -> bool:
        moving = list(self._moving)
        if not mentions(index, moving) or isinstance(index, Var):
            return True
        parts = _lane_and_base(index, moving)
        if parts is None:
            return False
        lane, base = parts
        if self._goes_on(base, self._moving[lane].extent):
            return not collect(base, ir.TensorLoad) or lane in self._complete
        return not mentions(base, moving) and self._is_same_fiber(base, read)

    def _goes_on(self, base: ir.Expr, extent: ir.Expr) -> bool:
        """Return whether consecutive steps of `base` cover consecutive ranges of `extent` elements, first to last."""
        base, length = uncast(base), row_length(base)
        if length is None:
            return not collect(base, ir.TensorLoad) and not mentions(base, list(self._moving))
        return equal(length, extent) and self._is_every_row(base)

    def _is_every_row(self, base: ir.Expr) -> bool:
        """Return whether the row in `base` takes all its values; for row pointers these are all rows of the array."""
        if isinstance(base, tirx.Mul):
            return isinstance(base.a, Var)
        row, rows = uncast(base.indices[0]), base.source.ty.shape[0]
        if isinstance(row, Var):
            return row in self._complete and equal(self._moving[row].extent + const(1, str(rows.ty.dtype)), rows)
        parts = _lane_and_base(row, self._complete)
        return parts is not None and self._goes_on(parts[1], self._moving[parts[0]].extent)

    def _is_same_fiber(self, base: ir.Expr, read: ir.Expr) -> bool:
        """Return whether the reader's elements belong to the fiber that starts at `base`."""
        start = self.first.outwards(base, len(self.first.blocks), self._depth)
        place = self.reader.outwards(read, len(self.reader.blocks), self._depth)
        return not collect(sym.Analyzer().simplify(uncast(place) - start), ir.TensorLoad)


def _lane_and_base(index: ir.Expr, moving: list[Var]) -> tuple[Var, ir.Expr] | None:
    """Split a subscript into the moving variable and the base that it is added to; None for other forms."""
    if not isinstance(index, tirx.Add):
        return None
    for lane, base in ((uncast(index.b), index.a), (uncast(index.a), index.b)):
        if isinstance(lane, Var) and lane in moving and not mentions(base, [lane]):
            return lane, base
    return None
