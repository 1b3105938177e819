# SPDX-License-Identifier: Apache-2.0
"""What the interpreter keeps of coordinates that meet, and of the coordinates that a program stores.

An encounter says for one coordinate which fibers hold it: the entry of each fiber that takes part. Fibers that do not
hold the coordinate are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import Axis, SparseBuffer
from sparsetir.walks import structural_walk

Fiber: TypeAlias = "tuple[Axis, int]"
Encounter: TypeAlias = "dict[Fiber, Any]"
Meetings: TypeAlias = "dict[int, list[Encounter]]"  # by coordinate
Key: TypeAlias = "tuple[int, ...]"  # the position above a chain of assembled axes, then their coordinates

# ---------------------------------------------------------------------------------------------- coordinates that meet


def both(parts: Sequence[Meetings]) -> Meetings:
    """The coordinates that all parts hold; of repeated entries every combination."""
    shared = set.intersection(*(set(p) for p in parts))
    return {c: _distinct(_joined(way) for way in itertools.product(*(p[c] for p in parts))) for c in shared}


def either(parts: Sequence[Meetings]) -> Meetings:
    """The coordinates that one of the parts holds: the first entries of all together, then each repeated one alone."""
    met: Meetings = {}
    for c in set().union(*parts):
        held = [p[c] for p in parts if c in p]
        met[c] = _distinct([_joined(e[0] for e in held), *(again for e in held for again in e[1:])])
    return met


def _joined(encounters: Iterable[Encounter]) -> Encounter | None:
    """All of them at once; None if one fiber would have two entries."""
    out: Encounter = {}
    for encounter in encounters:
        if any(out.get(fiber, point) is not point for fiber, point in encounter.items()):
            return None
        out |= encounter
    return out


def _distinct(encounters: Iterable[Encounter | None]) -> list[Encounter]:
    """Those that are no part of another."""
    told = [e for e in encounters if e is not None]
    kept: list[Encounter] = []
    for n, e in enumerate(told):
        if not any(_within(e, o) and (len(e) < len(o) or k < n) for k, o in enumerate(told) if k != n):
            kept.append(e)
    return kept


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
        """The assembled tree of a buffer, if it has one."""
        for n, tree in enumerate(buffer.trees):
            if tree[-1].is_assembled:
                given = tuple(a for a in tree if not a.is_assembled)
                return cls(given, tree[len(given) :], n)
        return None


class Place(NamedTuple):
    """Where an element of a result is: its coordinates along the assembled axes, and its place in the other trees."""

    key: Key
    rest: tuple[int, ...]


class Assembly:
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

    def place(self, buffer: SparseBuffer, subscripts: Sequence[ir.Expr]) -> Place | None:
        """Where these coordinates are; None if a result cannot have them."""
        tree, machine = self.trees[buffer.view], self.machine
        at = dict(zip(buffer.axes, subscripts, strict=True))
        others = [axis for other in self._others(buffer) for axis in other]
        coords = [int(machine.eval(at[axis])) for axis in tree.chain]
        if not all(0 <= c < int(machine.eval(a.length)) for c, a in zip(coords, tree.chain, strict=True)):
            return None
        for points in machine.chains([*tree.given, *others], at):
            position = {point.axis: point.position for point in points}
            above = position[tree.given[-1]] if tree.given else 0
            return Place((above, *coords), tuple(position[other[-1]] for other in self._others(buffer)))
        return None

    def add(self, buffer: SparseBuffer, place: Place) -> list[Axis]:
        """Store the coordinates of `place`; returns the axes for which they are new."""
        chain = self.trees[buffer.view].chain
        new = [axis for n, axis in enumerate(chain) if place.key[: n + 2] not in self.keys.setdefault(axis, {})]
        for n, axis in enumerate(chain):
            self.keys[axis][place.key[: n + 2]] = None
        return new

    def element(self, buffer: SparseBuffer, place: Place) -> np.ndarray:
        """What a result holds at stored coordinates: an array over its other trees."""
        return self._held(buffer, place.key)

    def load(self, buffer: SparseBuffer, subscripts: Sequence[ir.Expr]) -> Any:
        """An element of a result, its default where nothing is stored."""
        place = self.place(buffer, subscripts)
        if place is None or place.key not in self.keys.get(self.trees[buffer.view].chain[-1], {}):
            return self._default(buffer)
        return self.element(buffer, place)[place.rest]

    def _held(self, buffer: SparseBuffer, key: Key) -> np.ndarray:
        held = self.elements.setdefault(buffer.view, {})
        if key not in held:
            held[key] = np.full(self._shape(buffer), self._first(buffer))
        return held[key]

    def _first(self, buffer: SparseBuffer) -> Any:
        """What an element is before a statement sets it: one number that ``T.init`` of some iteration names."""
        stores: list[tirx.BufferStore] = []
        for it in self.machine.program.iterations:
            if it.block.init is not None:
                structural_walk(it.block.init, (tirx.BufferStore, stores.append))
        mine = [s.value for s in stores if s.buffer.same_as(buffer.view)]
        numbers = [value for value in mine if isinstance(value, (tirx.IntImm, tirx.FloatImm))]
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
        """The values of a result in the order of its axes."""
        tree = self.trees[buffer.view]
        held = [self._held(buffer, key) for key in self._ordered(tree.chain[-1])]
        empty = self._shape(buffer)
        empty.insert(tree.which, 0)
        return np.stack(held, axis=tree.which) if held else np.zeros(empty, np.dtype(buffer.dtype))

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
        """The stored coordinates row by row, those of a row in their order, or in that of storing."""
        rows = self._rows(axis)
        in_row = (lambda key: key[-1]) if axis.sorted else (lambda _: 0)
        return sorted(self.keys.get(axis, {}), key=lambda key: (rows[key[:-1]], in_row(key)))

    def _rows(self, axis: Axis) -> dict[Key, int]:
        """The number of the row that stored coordinates are in."""
        if axis.parent is not None and axis.parent.is_assembled:
            return {key: n for n, key in enumerate(self._ordered(axis.parent))}
        return {key[:1]: key[0] for key in self.keys.get(axis, {})}

    def _row_count(self, axis: Axis) -> int:
        if axis.parent is None:
            return 1
        is_inner = axis.parent.is_assembled
        return len(self._rows(axis)) if is_inner else int(self.machine.eval(axis.parent.count))


__all__ = ["Assembly", "Encounter", "Fiber", "Meetings", "both", "either"]
