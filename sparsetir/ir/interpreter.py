# SPDX-License-Identifier: Apache-2.0
"""Reference interpreter of stage I in numpy, the oracle for every compiled kernel."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
from tvm import ir, s_tir, tirx
from tvm.ir import Call, Op, Var

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, VerifyError
from sparsetir.ir import dialect
from sparsetir.ir.effects import Both, Coordinates, StoredCoordinates, operand_coordinates
from sparsetir.ir.rewriting import ABSORBING, all_same
from sparsetir.ir.views import INIT, REDUCE, STORED, Axis, Entry, Program, SparseBuffer, SpIter, decode, is_sp_iter
from sparsetir.ir.visitor import structural_walk
from sparsetir.utils.arguments import as_mapping

# What the interpreter keeps of coordinates that meet, and of the coordinates that a program stores.
#
# An encounter says for one coordinate which fibers hold it: the entry of each fiber that takes part. Fibers that do not
# hold the coordinate are left out.


Fiber: TypeAlias = "tuple[Axis, int]"
Encounter: TypeAlias = "dict[Fiber, Any]"
Meetings: TypeAlias = "dict[int, list[Encounter]]"  # by coordinate
Key: TypeAlias = "tuple[int, ...]"  # the position above a chain of assembled axes, then their coordinates

# ---------------------------------------------------------------------------------------------- coordinates that meet


def both(parts: Sequence[Meetings]) -> Meetings:
    """Return the coordinates that all parts hold; of repeated entries every combination."""
    shared = set.intersection(*(set(p) for p in parts))
    return {c: _distinct(_joined(way) for way in itertools.product(*(p[c] for p in parts))) for c in shared}


def either(parts: Sequence[Meetings]) -> Meetings:
    """Return the coordinates of any of the parts: the first entries of all together, then each repeated one alone."""
    meetings: Meetings = {}
    for c in set().union(*parts):
        parts_with_c = [p[c] for p in parts if c in p]
        meetings[c] = _distinct(
            [_joined(e[0] for e in parts_with_c), *(again for e in parts_with_c for again in e[1:])]
        )
    return meetings


def _joined(encounters: Iterable[Encounter]) -> Encounter | None:
    """Return all of them at once; None if one fiber would have two entries."""
    out: Encounter = {}
    for encounter in encounters:
        if any(out.get(fiber, point) is not point for fiber, point in encounter.items()):
            return None
        out |= encounter
    return out


def _distinct(encounters: Iterable[Encounter | None]) -> list[Encounter]:
    """Return those that are no part of another."""
    present = [e for e in encounters if e is not None]
    maximal: list[Encounter] = []
    for n, e in enumerate(present):
        if not any(_within(e, o) and (len(e) < len(o) or k < n) for k, o in enumerate(present) if k != n):
            maximal.append(e)
    return maximal


def _within(a: Encounter, b: Encounter) -> bool:
    return all(b.get(fiber) is point for fiber, point in a.items())


# ---------------------------------------------------------------------------------------------- coordinates stored


@dataclass(frozen=True, eq=False)
class AssembledTree:
    """The axes of a result's assembled tree: those that are given, those computed below them, and which tree it is."""

    given: tuple[Axis, ...]
    chain: tuple[Axis, ...]
    which: int

    @classmethod
    def of(cls, buffer: SparseBuffer) -> AssembledTree | None:
        """Return the assembled tree of a buffer, if it has one."""
        for n, tree in enumerate(buffer.trees):
            if tree[-1].is_assembled:
                input_axes = tuple(a for a in tree if not a.is_assembled)
                return cls(input_axes, tree[len(input_axes) :], n)
        return None


class ElementPlace(NamedTuple):
    """Where an element of a result is: its coordinates along the assembled axes, and its place in the other trees."""

    key: Key
    rest: tuple[int, ...]


class AssembledResult:
    """The results over assembled axes: their coordinates in the order of storing, and the values.

    `machine` is the interpreter, which evaluates subscripts and finds positions along other axes.
    """

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        buffers = machine.program.buffers
        self.trees = {view: tree for view, b in buffers.items() if (tree := AssembledTree.of(b)) is not None}
        self.storages: dict[Var, SparseBuffer] = {buffers[view].storage: buffers[view] for view in self.trees}
        self.keys: dict[Axis, dict[Key, None]] = {}
        self.elements: dict[Var, dict[Key, np.ndarray]] = {}

    # ------------------------------------------------------------------ elements

    def place(self, buffer: SparseBuffer, subscripts: Sequence[ir.Expr]) -> ElementPlace | None:
        """Return the place of these coordinates; None if a result cannot have them."""
        tree, machine = self.trees[buffer.view], self.machine
        at = dict(zip(buffer.axes, subscripts, strict=True))
        other_axes = [axis for other_tree in self._others(buffer) for axis in other_tree]
        coords = [int(machine.eval(at[axis])) for axis in tree.chain]
        if not all(0 <= c < int(machine.eval(a.length)) for c, a in zip(coords, tree.chain, strict=True)):
            return None
        for points in machine.chains([*tree.given, *other_axes], at):
            position = {point.axis: point.position for point in points}
            above = position[tree.given[-1]] if tree.given else 0
            return ElementPlace(
                (above, *coords), tuple(position[other_tree[-1]] for other_tree in self._others(buffer))
            )
        return None

    def add(self, buffer: SparseBuffer, place: ElementPlace) -> list[Axis]:
        """Store the coordinates of `place`; returns the axes for which they are new."""
        chain = self.trees[buffer.view].chain
        new = [axis for n, axis in enumerate(chain) if place.key[: n + 2] not in self.keys.setdefault(axis, {})]
        for n, axis in enumerate(chain):
            self.keys[axis][place.key[: n + 2]] = None
        return new

    def element(self, buffer: SparseBuffer, place: ElementPlace) -> np.ndarray:
        """Return the element of a result at stored coordinates: an array over its other trees."""
        return self._held(buffer, place.key)

    def load(self, buffer: SparseBuffer, subscripts: Sequence[ir.Expr]) -> Any:
        """Return an element of a result, its default where nothing is stored."""
        place = self.place(buffer, subscripts)
        if place is None or place.key not in self.keys.get(self.trees[buffer.view].chain[-1], {}):
            return self._default(buffer)
        return self.element(buffer, place)[place.rest]

    def _held(self, buffer: SparseBuffer, key: Key) -> np.ndarray:
        by_key = self.elements.setdefault(buffer.view, {})
        if key not in by_key:
            by_key[key] = np.full(self._shape(buffer), self._first(buffer))
        return by_key[key]

    def _first(self, buffer: SparseBuffer) -> Any:
        """Return the initial value of an element: the number that the ``T.init`` of an iteration stores."""
        stores: list[tirx.BufferStore] = []
        for it in self.machine.program.iterations:
            if it.block.init is not None:
                structural_walk(it.block.init, (tirx.BufferStore, stores.append))
        initial_values = [s.value for s in stores if s.buffer.same_as(buffer.view)]
        numbers = [value for value in initial_values if isinstance(value, (tirx.IntImm, tirx.FloatImm))]
        if not numbers:
            return self._default(buffer)
        return np.asarray(numbers[0].value).astype(np.dtype(buffer.dtype))[()]

    def _default(self, buffer: SparseBuffer) -> Any:
        return np.asarray(self.machine.eval(buffer.default)).astype(np.dtype(buffer.dtype))[()]

    def _others(self, buffer: SparseBuffer) -> list[tuple[Axis, ...]]:
        return [tree for n, tree in enumerate(buffer.trees) if n != self.trees[buffer.view].which]

    def _shape(self, buffer: SparseBuffer) -> list[int]:
        return [int(self.machine.eval(tree[-1].count)) for tree in self._others(buffer)]

    # ------------------------------------------------------------------ arrays

    def values(self, buffer: SparseBuffer) -> np.ndarray:
        """Return the values of a result in the order of its axes."""
        tree = self.trees[buffer.view]
        elements = [self._held(buffer, key) for key in self._ordered(tree.chain[-1])]
        empty = self._shape(buffer)
        empty.insert(tree.which, 0)
        return np.stack(elements, axis=tree.which) if elements else np.zeros(empty, np.dtype(buffer.dtype))

    def structure(self) -> dict[str, np.ndarray]:
        """``indptr`` and ``indices`` of every assembled axis, by its name."""
        out: dict[str, np.ndarray] = {}
        for axis in (a for a in self.machine.program.axes.values() if a.is_assembled):
            keys, rows = self._ordered(axis), self._rows(axis)
            indptr = np.zeros(self._row_count(axis) + 1, axis.idtype)
            np.add.at(indptr, np.array([rows[key[:-1]] for key in keys], np.int64) + 1, 1)
            out[f"{axis.name}_indptr"] = np.cumsum(indptr, dtype=axis.idtype)
            out[f"{axis.name}_indices"] = np.array([key[-1] for key in keys], axis.idtype)
        return out

    def _ordered(self, axis: Axis) -> list[Key]:
        """Return the stored coordinates row by row, those of a row in their order, or in that of storing."""
        rows = self._rows(axis)
        in_row = (lambda key: key[-1]) if axis.sorted else (lambda _: 0)
        return sorted(self.keys.get(axis, {}), key=lambda key: (rows[key[:-1]], in_row(key)))

    def _rows(self, axis: Axis) -> dict[Key, int]:
        """Return the number of the row that stored coordinates are in."""
        if axis.parent is not None and axis.parent.is_assembled:
            return {key: n for n, key in enumerate(self._ordered(axis.parent))}
        return {key[:1]: key[0] for key in self.keys.get(axis, {})}

    def _row_count(self, axis: Axis) -> int:
        if axis.parent is None:
            return 1
        is_inner = axis.parent.is_assembled
        return len(self._rows(axis)) if is_inner else int(self.machine.eval(axis.parent.count))


# What a stage-I program means, in plain numpy: the oracle every compiled kernel is judged by.
#
# Slow and literal on purpose: one Python step per stored slot, no schedule, no search but a linear scan,
# nothing shared with the lowering. Arithmetic is numpy's in the dtype of each node, so a float16 sum is rounded at
# every step where a kernel may keep it in float32.


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.Div: lambda a, b: (a - np.fmod(a, b)) // b if isinstance(a, np.integer) else a / b,
    tirx.Mod: np.fmod,
    tirx.FloorDiv: operator.floordiv,
    tirx.FloorMod: operator.mod,
    tirx.Min: lambda a, b: a if a < b or a != a else b,
    tirx.Max: lambda a, b: a if a > b or a != a else b,
    tirx.EQ: operator.eq,
    tirx.NE: operator.ne,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
    tirx.BitwiseAnd: operator.and_,
    tirx.BitwiseOr: operator.or_,
    tirx.BitwiseXor: operator.xor,
    tirx.LShift: operator.lshift,
    tirx.RShift: operator.rshift,
}

_SAME_IN_NUMPY = (
    "exp exp2 log log2 log10 log1p sqrt fabs floor ceil trunc "
    "sin cos tan sinh cosh tanh hypot copysign fmod isnan isinf isfinite"
)

# Computed in float64, then rounded once to the dtype of the call.
_MATH: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_IN_NUMPY.split()},
    **{name: getattr(np, name.replace("a", "arc", 1)) for name in "asin acos atan asinh acosh atanh atan2".split()},
    "erf": math.erf,
    "exp10": lambda x: 10.0**x,
    "ldexp": lambda x, n: x * 2.0**n,
    "nearbyint": np.rint,
    "pow": np.power,
    "round": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def _as(value: Any, dtype: Any) -> Any:
    """`value` as a numpy scalar, converted the way C does."""
    return np.asarray(value).astype(np.dtype(str(dtype)))[()]


def _unknown(node: Any, what: str = "") -> LoweringError:
    kind, text = what or type(node).__name__, str(node).splitlines()[0]
    return LoweringError(f"the interpreter runs the nodes of a stage-I program, got {kind} in: {text}")


@dataclass(frozen=True, eq=False)
class _Point:
    """One stored slot of `axis`; `coords` runs from the root of its tree down to it."""

    axis: Axis
    above: int
    position: int
    coords: tuple[int, ...]


# The coordinates above a fiber, and its entries.
_Fibers: TypeAlias = "dict[Fiber, tuple[tuple[int, ...], list[_Point]]]"

_ABSENT = -1  # the position of a coordinate that a fiber does not hold


@dataclass(frozen=True, eq=False)
class _Item:
    """A variable of an iteration, its axis, and the axis below whose coordinate that is attached, if any.

    Of a union or an intersection `entry` has the axes; else it is None.
    """

    axis: Axis
    var: Var
    kind: str
    attached_to: Axis | None = None
    entry: Entry | None = None


class _Machine:
    """Memory, values of variables and the points of the iterations now running."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory: dict[Var, np.ndarray] = {}
        self.values: dict[Var, Any] = {}
        self.points: dict[Var, Encounter] = {}
        self.current: dict[Axis, _Point] = {}
        self.assembly = AssembledResult(self)
        self.starts: list[tuple[SpIter, Any]] = []  # what sets new elements of results, of the iterations now running
        self.rule_args: Sequence[int] = ()
        self.initialising = False
        self.added: dict[tirx.BufferStore, list[ir.TensorLoad]] = {}  # factors that an update reads

    # --- storage: which slots there are, and where a coordinate is ---

    def fiber(self, axis: Axis, parent: _Point | None) -> tuple[int, int]:
        """Return first position and number of slots of the fiber of `axis` below `parent`."""
        above = 0 if parent is None else parent.position
        if axis.indptr is not None:
            indptr = self.memory[axis.indptr]
            return int(indptr[above]), int(indptr[above + 1]) - int(indptr[above])
        if axis.extent_rule is not None:
            coords = () if parent is None else parent.coords
            begin, extent = self.rule(axis.offset_rule, coords), self.rule(axis.extent_rule, coords)
            if axis.has_tables:
                ends = extent, int(self.eval(axis.length)), int(self.eval(axis.count)) - begin
                extent = max(0, min(ends)) if begin >= 0 else 0
            return begin, extent
        if axis.kind == "singleton":
            return above, 1
        if axis.kind == "sparse_fixed":
            width = int(self.eval(axis.width))
            return above * width, width
        return 0, int(self.eval(axis.length))

    def rule(self, rule: ir.Expr | None, args: Sequence[int]) -> int:
        """Return the value of a formula of an axis at `args`."""
        outer, self.rule_args = self.rule_args, args
        value = int(self.eval(rule))
        self.rule_args = outer
        return value

    def coordinate(self, axis: Axis, coords: tuple[int, ...], position: int, slot: int) -> int:
        if axis.rule is not None:
            return self.rule(axis.rule, (*coords, slot, position))
        return slot if axis.indices is None else int(self.memory[axis.indices][position])

    def slots(self, axis: Axis, parent: _Point | None, first: int, slots: Iterable[int]) -> Iterator[_Point]:
        """Yield the points at `slots` of the fiber that starts at `first`, without padding."""
        above, coords = (0, ()) if parent is None else (parent.position, parent.coords)
        length = int(self.eval(axis.length))
        for slot in slots:
            coordinate = self.coordinate(axis, coords, first + slot, slot)
            if 0 <= coordinate < length:
                yield _Point(axis, above, first + slot, (*coords, coordinate))

    def stored(self, axis: Axis, parent: _Point | None) -> Iterator[_Point]:
        """Yield every stored slot below `parent`, in order."""
        first, count = self.fiber(axis, parent)
        return self.slots(axis, parent, first, range(count))

    def no_slot(self, axis: Axis, parent: _Point | None) -> _Point:
        """Return a point of the fiber below `parent` that may not exist: nothing may depend on which it is."""
        above, coords = (0, ()) if parent is None else (parent.position, parent.coords)
        return _Point(axis, above, self.fiber(axis, parent)[0], (*coords, 0))

    def find(self, axis: Axis, parent: _Point | None, coordinate: int) -> Iterator[_Point]:
        """Yield every slot below `parent` that holds `coordinate`: none if it is absent, several if duplicated."""
        if axis.is_dense:
            first, count = self.fiber(axis, parent)
            return self.slots(axis, parent, first, [coordinate] if coordinate in range(count) else [])
        return (point for point in self.stored(axis, parent) if point.coords[-1] == coordinate)

    def candidates(self, axis: Axis, parent: _Point | None, subscript: ir.Expr) -> Iterator[_Point]:
        """Yield the slots `subscript` may mean: its own slot if it iterates this very fiber, else by search."""
        current_points = self.points.get(subscript, {}) if isinstance(subscript, Var) else {}
        fiber = axis, 0 if parent is None else parent.position
        if fiber in current_points:
            return iter([p for p in (current_points[fiber],) if p.position != _ABSENT])
        return self.find(axis, parent, int(self.eval(subscript)))

    def chains(
        self, axes: Sequence[Axis], subscripts: Mapping[Axis, ir.Expr], points: tuple[_Point, ...] = ()
    ) -> Iterator[tuple[_Point, ...]]:
        """Yield every way to follow `subscripts` down `axes`, each axis listed right after its parent."""
        if not axes:
            yield points
            return
        parent = None if axes[0].parent is None else points[-1]
        for point in self.candidates(axes[0], parent, subscripts[axes[0]]):
            yield from self.chains(axes[1:], subscripts, (*points, point))

    def places(self, buffer: SparseBuffer, subscripts: Sequence[ir.Expr]) -> Iterator[tuple[int, ...]]:
        """Yield the storage elements at these coordinates, first match first; none if they are absent."""
        axes = [axis for tree in buffer.trees for axis in tree]
        for points in self.chains(axes, dict(zip(buffer.axes, subscripts, strict=True))):
            position = {point.axis: point.position for point in points}
            yield tuple(position[tree[-1]] for tree in buffer.trees)

    def plain(self, buffer: Var, subscripts: Sequence[ir.Expr]) -> tuple[int, ...]:
        place = tuple(int(self.eval(s)) for s in subscripts)
        shape = self.memory[buffer].shape
        if len(place) != len(shape) or not all(0 <= i < n for i, n in zip(place, shape, strict=True)):
            raise ArgumentError(f"buffer {buffer.name} has shape {shape}, the program subscripts it at {place}")
        return place

    # --- statements ---

    def run(self, node: Any) -> None:
        """Execute a statement."""
        handler = _STATEMENTS.get(type(node))
        if handler is None:
            raise _unknown(node)
        handler(self, node)

    def seq(self, node: tirx.SeqStmt) -> None:
        for child in node.seq:
            self.run(child)

    def bind(self, node: tirx.Bind) -> None:
        if node.var not in self.program.axes:
            self.values[node.var] = self.eval(node.value)

    def evaluate(self, node: tirx.Evaluate) -> None:
        if not dialect.is_call(node.value, "bind_axes"):
            self.eval(node.value)

    def allocate(self, buffer: Var) -> None:
        shape = [int(self.eval(n)) for n in buffer.ty.shape]
        self.memory[buffer] = np.zeros(shape, np.dtype(str(buffer.ty.dtype)))

    def alias(self, node: tirx.DeclBuffer) -> None:
        if node.buffer in self.program.buffers:
            return
        if not isinstance(node.data, Call) or not tirx.is_buffer_var(node.data.args[0]):
            raise _unknown(node)
        shape = [int(self.eval(n)) for n in node.buffer.ty.shape]
        self.memory[node.buffer] = self.memory[node.data.args[0]].reshape(shape)

    def store(self, node: tirx.BufferStore) -> None:
        buffer = self.program.buffers.get(node.buffer)
        if node.buffer not in self.assembly.trees and self.adds_nothing(node):
            return
        if buffer is None:
            place = self.plain(node.buffer, node.indices)
            self.memory[node.buffer][place] = self.eval(node.value)
            return
        if node.buffer in self.assembly.trees:
            self.assemble(node, buffer)
            return
        places = self.places(buffer, list(node.indices))
        # An initial value belongs to the coordinate, so every stored duplicate of it is initialised.
        for place in list(places if self.initialising else itertools.islice(places, 1)):
            self.memory[buffer.storage][place] = self.eval(node.value)

    def adds_nothing(self, node: tirx.BufferStore) -> bool:
        """Return whether a store adds a product to its own element and a factor of that is absent and zero.

        Or finds a maximum of its element and a sum with a part that is absent and -inf, and so on: see `ABSORBING`.
        """
        if node not in self.added:
            self.added[node] = _added_loads(node)
        return any(self.is_absent(part, ABSORBING[type(node.value)][0]) for part in self.added[node])

    def is_absent(self, node: ir.TensorLoad, absorbing: float) -> bool:
        """Return whether the element of an operand is not stored and reads as what absorbs others."""
        buffer = self.program.buffers.get(node.source)
        if buffer is None or node.source in self.assembly.trees or self.eval(buffer.default) != absorbing:
            return False
        return next(iter(self.places(buffer, list(node.indices))), None) is None

    def assemble(self, node: tirx.BufferStore, buffer: SparseBuffer) -> None:
        """Store an element of a result; what ``T.init`` sets comes first where its coordinate is new."""
        place = self.assembly.place(buffer, list(node.indices))
        if place is None:
            return
        for axis in self.assembly.add(buffer, place):
            self.start(axis)
        if not self.adds_nothing(node):
            self.assembly.element(buffer, place)[place.rest] = self.eval(node.value)

    def start(self, axis: Axis) -> None:
        """Run what sets the elements of results over `axis` at the coordinate where the iterations stand."""
        for it, store in ((it, s) for it, stores in self.starts for s in stores):
            buffer = self.program.buffers[store.buffer]
            tree = self.assembly.trees[store.buffer]
            if tree.chain[-1] is not axis:
                continue
            fixed = [i for a, i in zip(buffer.axes, store.indices, strict=True) if a in (*tree.given, *tree.chain)]
            items = [item for e in it.entries for item in _items(e) if item.kind == "S"]
            free = [item for item in items if item.var not in fixed and _occurs(item.var, store)]
            points, values = dict(self.points), dict(self.values)
            for item in free:
                self.points.pop(item.var, None)
            self.initialise(it.block, store, free)
            self.points, self.values = points, values

    def loop(self, node: tirx.For) -> None:
        low, extent = int(self.eval(node.min)), int(self.eval(node.extent))
        step = 1 if node.step is None else int(self.eval(node.step))
        for i in range(low, low + extent, step):
            self.values[node.loop_var] = _as(i, node.loop_var.ty.dtype)
            self.run(node.body)

    def repeat(self, node: tirx.While) -> None:
        while self.eval(node.condition):
            self.run(node.body)

    def branch(self, node: tirx.IfThenElse) -> None:
        if self.eval(node.condition):
            self.run(node.then_case)
        elif node.else_case is not None:
            self.run(node.else_case)

    def check(self, node: tirx.AssertStmt) -> None:
        if not self.eval(node.condition):
            raise ArgumentError(f"the program asserts {node.condition}, which is false")

    def realize(self, node: s_tir.SBlockRealize) -> None:
        if not self.eval(node.predicate):
            return
        if is_sp_iter(node):
            self.iterate(next(it for it in self.program.iterations if it.node.same_as(node)))
            return
        block = node.block
        for var, value in zip(block.iter_vars, node.iter_values, strict=True):
            self.values[var.var] = self.eval(value)
        reduced = [v for v in block.iter_vars if v.iter_type == REDUCE]
        first = all(self.values[v.var] == self.eval(v.dom.min) for v in reduced)
        self.execute(block, block.init if first else None, block.body)

    def execute(self, block: s_tir.SBlock, *statements: Any) -> None:
        """Run `statements` of a block with its own fresh local buffers."""
        if block.match_buffers:
            raise _unknown(block.match_buffers[0])
        for buffer in block.alloc_buffers:
            self.allocate(buffer)
        for statement in statements:
            if statement is not None:
                self.run(statement)

    # --- sparse iterations ---

    def iterate(self, it: SpIter) -> None:
        """Initialise once every spatial point that is named there, then run the body at every stored point."""
        items = [item for e in it.entries for item in _items(e)]
        init, start = _split_init(it.block.init, self.assembly.trees)
        if init is not None:
            spatial = [item for item in items if item.kind == "S"]
            if str(it.block.annotations.get(INIT, "")) == STORED:
                alone = {e.axes[0] for e in it.entries if not e.is_fused and not e.merge}
                self.initialise_stored(it, init, items, [item.axis for item in spatial], alone)
            else:
                self.initialise(it.block, init, [item for item in spatial if _occurs(item.var, init)])
        self.starts.append((it, start))
        self.walk(it, items, it.block.body)
        self.starts.pop()

    def initialise(self, block: s_tir.SBlock, init: Any, spatial: Sequence[_Item]) -> None:
        self.initialising = True
        for coords in itertools.product(*(range(int(self.eval(item.axis.length))) for item in spatial)):
            for item, coordinate in zip(spatial, coords, strict=True):
                self.values[item.var] = _as(coordinate, item.var.ty.dtype)
            self.execute(block, init)
        self.initialising = False

    def initialise_stored(
        self, it: SpIter, init: Any, items: Sequence[_Item], spatial: Sequence[Axis], alone: Set[Axis]
    ) -> None:
        """Initialise the stored points; what repeats below all slots of a summed axis is there without any slot."""
        below = {up: [axis for axis in spatial if up in axis.ancestors] for axis in spatial for up in axis.ancestors}
        summed = [up for up in below if up in alone and up not in spatial]
        any_slot = {up for up in summed if all(axis.repeats_below(up) for axis in below[up])}
        self.walk(it, [item for item in items if item.axis in {*spatial, *below}], init, any_slot)

    def walk(self, it: SpIter, items: Sequence[_Item], what: Any, any_slot: Collection[Axis] = frozenset()) -> None:
        """Run a statement of the block at the stored points of the remaining axes, outermost first.

        Of an axis in `any_slot` one slot stands for all, whether or not there is one.
        """
        if not items:
            self.execute(it.block, what)
            return
        item, enclosing = items[0], dict(self.current)
        for coordinate, encounter in self.encounters(it, item, any_slot):
            self.points[item.var] = encounter
            self.current |= {axis: point for (axis, _), point in encounter.items()}
            self.values[item.var] = _as(coordinate, item.var.ty.dtype)
            self.walk(it, items[1:], what, any_slot)
        self.points.pop(item.var, None)
        self.current = enclosing

    def encounters(self, it: SpIter, item: _Item, any_slot: Collection[Axis]) -> Iterator[tuple[int, Encounter]]:
        """Yield the coordinates of an item in order, and what holds each."""
        axis = item.axis
        if item.entry is not None or axis.is_assembled:
            yield from self.meetings(it, item)
            return
        for parent in self.parents(axis, item.attached_to):
            for point in [self.no_slot(axis, parent)] if axis in any_slot else self.stored(axis, parent):
                yield point.coords[-1], {(axis, point.above): point}

    def meetings(self, it: SpIter, item: _Item) -> Iterator[tuple[int, Encounter]]:
        """Yield the coordinates that several axes hold, in ascending order; which fibers do not hold one is told."""
        fibers: _Fibers = {}
        if item.entry is None:
            coordinates = operand_coordinates(it, item.var, item.axis, self.program)
            if coordinates is None:
                raise VerifyError(f"no operand stores coordinates of axis {item.axis.name}", item.axis.name)
            by_coordinate = self.operands(coordinates, item.var, fibers)
        else:
            hosted = zip(item.entry.axes, item.entry.hosts, strict=True)
            parts = [self.member(axis, self.parents(axis, host), fibers) for axis, host in hosted]
            by_coordinate = either(parts) if item.entry.merge == "union" else both(parts)
        for coordinate in sorted(by_coordinate):
            missing = {f: _Point(f[0], f[1], _ABSENT, (*above, coordinate)) for f, (above, _) in fibers.items()}
            if item.entry is None:
                above = None if item.axis.parent is None else self.current.get(item.axis.parent)
                coords = (coordinate,) if above is None else (*above.coords, coordinate)
                missing[item.axis, _ABSENT] = _Point(item.axis, _ABSENT, _ABSENT, coords)
            elif item.entry.merge == "union":
                absent_axes = [a for a in item.entry.axes if a not in [f[0] for f in fibers]]
                missing |= {(a, _ABSENT): _Point(a, _ABSENT, _ABSENT, (coordinate,)) for a in absent_axes}
            for encounter in by_coordinate[coordinate]:
                yield coordinate, missing | encounter

    def member(self, axis: Axis, parents: Sequence[_Point | None], fibers: _Fibers) -> Meetings:
        """Return the entries of an axis below `parents`, by coordinate; their fibers are added to `fibers`."""
        by_coordinate: Meetings = {}
        for parent in parents:
            fiber = axis, 0 if parent is None else parent.position
            if fiber not in fibers:
                fibers[fiber] = () if parent is None else parent.coords, list(self.stored(axis, parent))
            for point in fibers[fiber][1]:
                by_coordinate.setdefault(point.coords[-1], []).append({fiber: point})
        return by_coordinate

    def operands(self, coordinates: Coordinates, var: Var, fibers: _Fibers) -> Meetings:
        """Return the coordinates that the accesses of an expression hold together."""
        if not isinstance(coordinates, StoredCoordinates):
            combine = both if isinstance(coordinates, Both) else either
            return combine([self.operands(part, var, fibers) for part in coordinates.parts])
        buffer = self.program.buffers[coordinates.buffer]
        subscripts = dict(zip(buffer.axes, coordinates.indices, strict=True))
        tree = next(t for t in buffer.trees if coordinates.axis in t)
        above = [a for a in tree if a in coordinates.axis.ancestors]
        parents = [None] if not above else [chain[-1] for chain in self.chains(above, subscripts)]
        by_coordinate = self.member(coordinates.axis, parents, fibers)
        leading = {
            c: [w for w in ways if self.leads_on(w, var, buffer, subscripts)] for c, ways in by_coordinate.items()
        }
        return {c: ways for c, ways in leading.items() if ways}

    def leads_on(self, way: Encounter, var: Var, buffer: SparseBuffer, subscripts: Mapping[Axis, ir.Expr]) -> bool:
        """Return whether a buffer has an entry at this coordinate of `var` and those of the enclosing variables."""
        self.points[var] = way
        self.values[var] = _as(next(iter(way.values())).coords[-1], var.ty.dtype)
        bound_axes = {a for a, s in subscripts.items() if all(v in self.points for v in self.iterated(s))}
        heads = [list(itertools.takewhile(bound_axes.__contains__, tree)) for tree in buffer.trees]
        is_stored = all(any(True for _ in self.chains(head, subscripts)) for head in heads)
        self.points.pop(var)
        return is_stored

    def iterated(self, expr: ir.Expr) -> list[Var]:
        """Return the iteration variables in an expression."""
        variables: dict[Var, None] = {}
        structural_walk(expr, (Var, lambda v: variables.setdefault(v)))
        return [v for it in self.program.iterations for v in it.vars if v in variables]

    def parents(self, axis: Axis, attached_to: Axis | None) -> Sequence[_Point | None]:
        """Return the point whose fiber of `axis` is iterated; none if an attached coordinate is absent."""
        if axis.parent is None:
            return [None]
        if attached_to is None or attached_to is axis.parent:
            return [p for p in (self.here(axis.parent, axis),) if p.position != _ABSENT]
        above = None if axis.parent.parent is None else self.here(axis.parent.parent, axis)
        if above is not None and above.position == _ABSENT:
            return []
        coordinate = self.here(attached_to, axis).coords[-1]
        return list(itertools.islice(self.find(axis.parent, above, coordinate), 1))

    def here(self, axis: Axis, wanted_by: Axis) -> _Point:
        if axis not in self.current:
            message = f"axis {wanted_by.name} needs {axis.name} iterated before it; list {axis.name} first"
            raise VerifyError(message, wanted_by.name)
        return self.current[axis]

    # --- expressions ---

    def eval(self, node: Any) -> Any:
        """Return the value of an expression, a numpy scalar of its dtype."""
        if (binary := _BINARY.get(type(node))) is not None:
            return binary(self.eval(node.a), self.eval(node.b))
        handler = _EXPRESSIONS.get(type(node))
        if handler is None:
            raise _unknown(node)
        return handler(self, node)

    def variable(self, node: Var) -> Any:
        if node not in self.values:
            raise ArgumentError(f"nothing gives a value to {node.name}; pass {node.name}=... or a buffer it sizes")
        return self.values[node]

    def load(self, node: ir.TensorLoad) -> Any:
        buffer = self.program.buffers.get(node.source)
        if buffer is None:
            return self.memory[node.source][self.plain(node.source, node.indices)]
        if node.source in self.assembly.trees:
            return self.assembly.load(buffer, list(node.indices))
        for place in self.places(buffer, list(node.indices)):
            return self.memory[buffer.storage][place]
        return _as(self.eval(buffer.default), buffer.dtype)

    def let(self, node: tirx.Let) -> Any:
        self.values[node.var] = self.eval(node.value)
        return self.eval(node.body)

    def select(self, condition: Any, true: Any, false: Any) -> Any:
        return self.eval(true if self.eval(condition) else false)

    def call(self, node: Call) -> Any:
        name = str(node.op.name).split(".")[-1] if isinstance(node.op, Op) else ""
        if dialect.is_call(node, "arg"):
            return _as(self.rule_args[int(node.args[0])], node.ty.dtype)
        if name == "if_then_else":
            return self.select(*node.args)
        if name == "likely":
            return self.eval(node.args[0])
        if name not in _MATH:
            raise _unknown(node, f"Call {name}")
        return _as(_MATH[name](*(np.float64(self.eval(a)) for a in node.args)), node.ty.dtype)


def _items(entry: Entry) -> list[_Item]:
    """Return the variables of an entry."""
    if entry.merge:
        return [_Item(entry.domains[0], entry.vars[0], entry.kinds, entry=entry)]
    triples = zip(entry.axes, entry.vars, entry.kinds, strict=True)
    return [_Item(axis, var, kind, entry.attached_to) for axis, var, kind in triples]


def _split_init(init: Any, results: Collection[Var]) -> tuple[Any, list[tirx.BufferStore]]:
    """Split an initialisation into the statements ahead of an iteration, and those for new elements of results."""
    stmts = list(init.seq) if isinstance(init, tirx.SeqStmt) else [] if init is None else [init]
    late = [s for s in stmts if isinstance(s, tirx.BufferStore) and s.buffer in results]
    early = [s for s in stmts if s not in late]
    return (tirx.SeqStmt(early) if len(early) > 1 else early[0] if early else None), late


def _added_loads(node: Any) -> list[ir.TensorLoad]:
    """Return the factors that a store reads, if it adds a product to its own element; alike of other reductions."""
    own = node.value.a if type(node.value) in ABSORBING else None
    if not isinstance(own, ir.TensorLoad) or not own.source.same_as(node.buffer):
        return []
    is_own = all_same(list(own.indices), list(node.indices))
    parts = _parts(node.value.b, ABSORBING[type(node.value)][1]) if is_own else ()
    return [part for part in parts if isinstance(part, ir.TensorLoad)]


def _parts(term: Any, combinations: tuple[Any, ...]) -> Iterator[ir.Expr]:
    """Yield what operators of some types combine in a term."""
    if isinstance(term, combinations):
        yield from _parts(term.a, combinations)
        yield from _parts(term.b, combinations)
    else:
        yield term


def _occurs(var: Var, node: Any) -> bool:
    variables: set[Var] = set()
    structural_walk(node, (Var, variables.add))
    return var in variables


_STATEMENTS: dict[type, Callable[[_Machine, Any], None]] = {
    tirx.SeqStmt: _Machine.seq,
    tirx.Bind: _Machine.bind,
    tirx.Evaluate: _Machine.evaluate,
    tirx.AllocBuffer: lambda m, s: m.allocate(s.buffer),
    tirx.DeclBuffer: _Machine.alias,
    tirx.BufferStore: _Machine.store,
    tirx.For: _Machine.loop,
    tirx.While: _Machine.repeat,
    tirx.IfThenElse: _Machine.branch,
    tirx.AttrStmt: lambda m, s: m.run(s.body),
    tirx.AssertStmt: _Machine.check,
    s_tir.SBlockRealize: _Machine.realize,
}

_EXPRESSIONS: dict[type, Callable[[_Machine, Any], Any]] = {
    tirx.IntImm: lambda m, e: _as(int(e.value), e.ty.dtype),
    tirx.FloatImm: lambda m, e: _as(float(e.value), e.ty.dtype),
    ir.StringImm: lambda m, e: str(e.value),
    Var: _Machine.variable,
    ir.TensorLoad: _Machine.load,
    tirx.And: lambda m, e: np.bool_(m.eval(e.a) and m.eval(e.b)),
    tirx.Or: lambda m, e: np.bool_(m.eval(e.a) or m.eval(e.b)),
    tirx.Not: lambda m, e: np.logical_not(m.eval(e.a)),
    tirx.BitwiseNot: lambda m, e: ~m.eval(e.a),
    tirx.Select: lambda m, e: m.select(e.condition, e.true_value, e.false_value),
    tirx.Cast: lambda m, e: _as(m.eval(e.value), e.ty.dtype),
    tirx.Let: _Machine.let,
    Call: _Machine.call,
}


def _unknowns(machine: _Machine, expr: ir.Expr) -> list[Var]:
    """Return the variables of `expr` that have no value yet."""
    variables: dict[Var, None] = {}
    structural_walk(expr, [(Var, lambda v: variables.setdefault(v))])
    return [v for v in variables if v not in machine.values]


def _solve(machine: _Machine, dim: ir.Expr, size: int) -> bool:
    """Give the one unknown variable of `dim`, linear in it, the value that makes ``dim == size``."""
    unknown = _unknowns(machine, dim)
    if len(unknown) != 1:
        return False
    trials = []
    for trial in (0, 1):
        machine.values[unknown[0]] = _as(trial, unknown[0].ty.dtype)
        trials.append(int(machine.eval(dim)))
    del machine.values[unknown[0]]
    slope = trials[1] - trials[0]
    if slope == 0 or (size - trials[0]) % slope:
        return False
    machine.values[unknown[0]] = _as((size - trials[0]) // slope, unknown[0].ty.dtype)
    return True


def _infer_sizes(machine: _Machine, buffers: Sequence[Var], args: Mapping[str, Any]) -> None:
    """Values of the scalar parameters and symbolic sizes, from `args` and the shapes of its arrays."""
    sizes = {v for b in buffers for dim in b.ty.shape for v in _unknowns(machine, dim)}
    scalars = sizes | {p for p in machine.program.func.params if not tirx.is_buffer_var(p)}
    names = {str(v.name) for v in [*scalars, *buffers]}
    if wrong := sorted(set(args) - names):
        raise ArgumentTypeError(f"no parameter is called {wrong[0]!r}; there are: {', '.join(sorted(names))}")
    machine.values.update({v: _as(args[v.name], v.ty.dtype) for v in scalars if v.name in args})
    shapes = [(b.ty.shape, np.shape(args[b.name])) for b in buffers if b.name in args]
    pairs = [p for dims, shape in shapes if len(dims) == len(shape) for p in zip(dims, shape, strict=True)]
    while any([_solve(machine, dim, size) for dim, size in pairs]):
        pass


def _fill(machine: _Machine, buffer: Var, args: Mapping[str, Any]) -> None:
    """Store a copy of the caller's array, or zeros, in memory."""
    if buffer in machine.assembly.storages:
        if buffer.name in args:
            raise ArgumentError(f"{buffer.name} is a result whose size the program computes; leave it out")
        return
    machine.allocate(buffer)
    if buffer.name not in args:
        return
    array, memory = np.asarray(args[buffer.name]), machine.memory[buffer]
    if array.size != memory.size:
        raise ArgumentError(f"{buffer.name} must have shape {memory.shape}, got {array.shape}")
    memory[...] = array.reshape(memory.shape)


def interpret(func: tirx.PrimFunc, args: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Run a stage-I function on numpy arrays, literally as the language defines it.

    Parameters
    ----------
    func : tirx.PrimFunc
        A stage-I function.
    args : Mapping[str, Any]
        Arrays in storage order and numbers, by parameter name. A missing buffer is zeros; a missing size is
        inferred from the shapes of the arrays.

    Returns
    -------
    dict[str, np.ndarray]
        Final contents of every buffer parameter, then ``J_indptr`` and ``J_indices`` of every assembled axis ``J``. The
        caller's arrays are not changed.

    Raises
    ------
    LoweringError
        The program holds a node that has no meaning in stage I.
    ArgumentError, ArgumentTypeError
        An argument has the wrong size or name, a size cannot be inferred, or a plain buffer is subscripted
        out of its shape.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir.ir.interpreter import interpret
    >>> args = dict(indptr=[0, 1, 1], indices=[2], a=[3], b=[[1], [2], [4]])
    >>> interpret(sparsetir.ops.spmm(), args)["c"].tolist()
    [[12.0], [0.0]]
    """
    values = as_mapping(args, "args", "arrays and numbers by the names of parameters")
    machine = _Machine(decode(func))
    buffers = [p for p in func.params if tirx.is_buffer_var(p)]
    with np.errstate(all="ignore"):
        _infer_sizes(machine, buffers, values)
        for buffer in buffers:
            _fill(machine, buffer, values)
        machine.run(func.body)
        storages = machine.assembly.storages
        machine.memory |= {storage: machine.assembly.values(buffer) for storage, buffer in storages.items()}
        return {str(b.name): machine.memory[b] for b in buffers} | machine.assembly.structure()


__all__ = ["AssembledResult", "Encounter", "Fiber", "Meetings", "both", "either"]
