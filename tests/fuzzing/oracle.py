# SPDX-License-Identifier: Apache-2.0
"""What a fuzzed program computes, from its description alone: lists of coordinates and plain Python numbers.

Nothing here is shared with the package: no parser, no interpreter, no lowering. Each tree of axes is a table with a
row for each stored position of its deepest axis: coordinates and positions of all levels. What is computed from a NaN
is NaN: nobody compares that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np

from drawing import Axis
from fuzzing.inputs import Inputs
from fuzzing.program import Buffer, Expr, Iteration, Program, Store, cast_dtypes, variables

WHOLE = ("int8", "uint8", "int32", "int64")
FINITE = {"float16": 6e4}


class Unclear(Exception):
    """Inputs that prove nothing: a number that a type does not hold, or what the language leaves open."""


class Table:
    """The stored positions of an axis: coordinates and positions on the way from the root, one row each."""

    def __init__(self, axis: Axis, inputs: Inputs) -> None:
        count, depth = len(inputs.points[axis]), len(axis.chain)
        self.is_present = np.array([p is not None for p in inputs.points[axis]], bool).reshape(count)
        self.coords = np.array([p or (0,) * depth for p in inputs.points[axis]], np.int64).reshape(count, depth)
        self.path = np.zeros((count, depth), np.int64)
        at = np.arange(count)
        for level in reversed(range(depth)):
            self.path[:, level] = at
            at = np.array(inputs.above[axis.chain[level]], np.int64)[at]


class Oracle:
    """Runs a program on its inputs."""

    def __init__(self, program: Program, inputs: Inputs) -> None:
        self.program, self.inputs = program, inputs
        chains = dict.fromkeys(a for axis in program.axes for a in axis.chain)
        self.tables = {axis: Table(axis, inputs) for axis in chains}
        self.memory: dict[str, np.ndarray] = {}
        self.env: dict[Axis, int] = {}  # coordinates
        self.at: dict[Axis, int] = {}  # positions
        self.largest = 0.0

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Final contents of every buffer parameter. `largest` is then the largest number met."""
        self.memory = {name: np.array(value) for name, value in arrays.items()}
        self.largest = 0.0
        for buffer in self.program.buffers:
            if buffer.scratch:
                shape = [len(self.inputs.points[a]) for a in buffer.trees]
                self.memory[buffer.name.lower()] = np.zeros(shape, np.dtype(buffer.dtype))
        for n, iteration in enumerate(self.program.iterations):
            last = n == len(self.program.iterations) - 1
            for _ in range(self.program.repeats if last else 1):
                self.iterate(iteration)
        return {name: self.memory[name] for name in arrays}

    # ------------------------------------------------------------------ iterations

    def iterate(self, it: Iteration) -> None:
        """Initialise, then visit every stored point in order."""
        if it.init:
            self.initialise(it)
        for _ in self.points(it, it.axes):
            for step in it.body:
                if isinstance(step, Iteration):
                    self.iterate(step)
                else:
                    self.store(step)

    def initialise(self, it: Iteration) -> None:
        """Set every coordinate of the spatial axes that the initialisation names, wherever it is stored."""
        named = [{a for e in (store.value, *store.subscripts) for a in variables(e)} for store in it.init]
        spatial = [axis for axis in it.letter("S") if any(axis in some for some in named)]
        if any(self.inputs.lengths[axis] == 0 and axis not in some for axis in spatial for some in named):
            raise Unclear  # once or not at all: the language leaves it open
        for coords in itertools.product(*(range(self.inputs.lengths[a]) for a in spatial)):
            self.env.update(zip(spatial, coords, strict=True))
            for store in it.init:
                self.store(store, everywhere=True)
        for axis in spatial:
            self.env.pop(axis, None)

    def points(self, it: Iteration, axes: list[Axis]) -> Iterator[None]:
        """Set `env` and `at` to every stored point of these axes below the current one."""
        if not axes:
            yield
            return
        axis, table = axes[0], self.tables[axes[0]]
        for position in self.fiber(axis, it.attached.get(axis)):
            if table.is_present[position]:
                self.env[axis], self.at[axis] = int(table.coords[position, -1]), int(position)
                yield from self.points(it, axes[1:])
        self.env.pop(axis, None)
        self.at.pop(axis, None)

    def fiber(self, axis: Axis, attached_to: Axis | None) -> np.ndarray:
        """Positions of an axis below the current position of its parent, or below another one's coordinate."""
        above = np.array(self.inputs.above[axis], np.int64)
        if axis.parent is None:
            return np.arange(len(above))
        if attached_to is None:
            return np.flatnonzero(above == self.at[axis.parent])
        table = self.tables[axis.parent]
        there = table.is_present & (table.coords[:, -1] == self.env[attached_to])
        if axis.parent.parent is not None:
            there &= table.path[:, -2] == self.at[axis.parent.parent]
        found = np.flatnonzero(there)
        return np.flatnonzero(above == found[0]) if len(found) else found

    # ------------------------------------------------------------------ buffers

    def is_proof(self) -> bool:
        """True if each number on the way fits the narrowest type of a buffer, or that terms are computed in."""
        dtypes = {b.dtype for b in self.program.buffers}
        dtypes |= {dtype for store in self.program.stores for dtype in cast_dtypes(store.value)} & {*FINITE, *WHOLE}
        most = [np.iinfo(dtype).max if dtype in WHOLE else FINITE.get(dtype, 1e38) for dtype in dtypes]
        return self.largest <= min(most)

    def present(self, buffer: Buffer) -> np.ndarray:
        """Which elements of a buffer have coordinates."""
        found = np.ones((), bool)
        for leaf in buffer.trees:
            found = np.multiply.outer(found, self.tables[leaf].is_present)
        return found

    def store(self, store: Store, everywhere: bool = False) -> None:
        """Store to the first place with these coordinates, or to all."""
        places = self.places(store.buffer, store.subscripts)
        places = places if everywhere else places[:1]
        if not places:
            return
        value = self.value(store.value)
        dtype = store.buffer.dtype
        value = fitting(value, dtype)
        for place in places:
            self.memory[store.buffer.name.lower()][place] = value

    def places(self, buffer: Buffer, subscripts: tuple[Expr, ...]) -> list[tuple[int, ...]]:
        """Storage elements at these coordinates."""
        given = dict(zip(buffer.axes, subscripts, strict=True))
        hits = [self.found(leaf, given) for leaf in buffer.trees]
        return [tuple(int(n) for n in place) for place in itertools.product(*hits)]

    def found(self, leaf: Axis, given: Mapping[Axis, Expr]) -> np.ndarray:
        """Positions of a tree at the given coordinates.

        A subscript that is the variable of the very axis means the slot being visited, where the slot above is too.
        """
        table = self.tables[leaf]
        mask = table.is_present.copy()
        for level, axis in enumerate(leaf.chain):
            same = table.coords[:, level] == self.value(given[axis])
            if given[axis] == ("var", axis) and axis in self.at:
                own = table.path[:, level] == self.at[axis]
                beside = level == 0 or table.path[:, level - 1] == self.inputs.above[axis][self.at[axis]]
                same = np.where(beside, own, same)
            mask &= same
        return np.flatnonzero(mask)

    # ------------------------------------------------------------------ expressions

    def value(self, e: Expr) -> Any:
        """An expression as a Python number."""
        found = self.evaluated(e)
        self.largest = max(self.largest, abs(found)) if found == found else self.largest
        return found

    def evaluated(self, e: Expr) -> Any:
        kind, *rest = e
        if kind == "var":
            return self.env[rest[0]]
        if kind == "const":
            return rest[0]
        if kind == "read":
            return self.read(*rest)
        if kind == "cast":
            return fitting(self.value(rest[1]), rest[0])
        if kind in ("select", "if_then_else"):
            condition = self.value(rest[0])
            return condition if condition != condition else self.value(rest[1] if condition else rest[2])
        return ARITHMETIC[kind](self.value(rest[0]), self.value(rest[1]))

    def read(self, buffer: Buffer, subscripts: tuple[Expr, ...]) -> Any:
        places = self.places(buffer, subscripts)
        if not places:
            return type(self.plain(np.zeros((), buffer.dtype)))(buffer.default)
        return self.plain(self.memory[buffer.name.lower()][places[0]])

    def plain(self, value: Any) -> Any:
        """A numpy scalar as a Python number; bfloat16 too."""
        return float(value) if value.dtype.kind in "fV" else value.item()


def fitting(value: Any, dtype: str) -> Any:
    """A number in another type."""
    if dtype not in WHOLE:
        return bool(value) if dtype == "bool" else float(value)
    if value != value or not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise Unclear
    return int(value)


ARITHMETIC = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mod": lambda a, b: a % b,
    "max": lambda a, b: a + b if a != a or b != b else max(a, b),
    "min": lambda a, b: a + b if a != a or b != b else min(a, b),
    "lt": lambda a, b: a + b if a != a or b != b else a < b,
    "or": lambda a, b: bool(a) or bool(b),
    "and": lambda a, b: bool(a) and bool(b),
}

__all__ = ["Oracle", "Unclear"]
