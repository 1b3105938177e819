# SPDX-License-Identifier: Apache-2.0
"""Draws programs: axes trees, buffers, iterations and statements of every kind the language has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from drawing import INNER, PACKED, ROOTS, RULES, SINGLE_RULES, Axis
from fuzzing.program import Buffer, Expr, Iteration, Program, Store, reads

DTYPES = ("float32",) * 6 + ("float64",) * 4 + ("int32",) * 3 + ("int64",) * 2
DTYPES += ("float16", "float16", "bfloat16", "bfloat16", "int8", "uint8", "bool")
CONSTANTS = (1, 2, 3, 4, 8, 16)
DEFAULTS = (0, 0, 0, 1, 2)
#: start of a reduction by its operator
NEUTRAL = {"add": (0, 0, 1, -1, 2), "max": (-9, 0, 1), "min": (9, 0, 1), "mul": (1, 1, 2)}


class Maker:
    """Draws one program; a plain one has few searches and mostly matrices."""

    def __init__(self, rng: random.Random, is_plain: bool = False) -> None:
        self.rng, self.is_plain = rng, is_plain
        self.program = Program(rng.choice(DTYPES), rng.choice(["int32", "int32", "int64"]))
        self.idtypes = rng.choice([["int32"], ["int32"], ["int64"], ["int32", "int64"]])
        self.names = (f"{name}{n or ''}" for n in count() for name in "ABCEFGHLMQRSYZ")
        self.roots = (f"{name}{n or ''}" for n in count() for name in "XUVWJIKNOP")
        self.leaves: list[Axis] = []  # of the structures so far
        self.filled: list[Buffer] = []  # results of earlier iterations, set wherever they are stored

    def make(self) -> Program:
        """A program of one to three iterations."""
        for n in range(self.rng.choice([1, 1, 1, 1, 2, 2, 3])):
            self.iteration(f"work{n}")
        if self.rng.random() < 0.04:
            self.program.repeats = self.rng.randint(2, 3)
        used = [a for it in self.program.every_iteration for a in it.axes]
        used += [a for b in self.program.buffers for a in b.axes]
        used += [a.like for a in used if a.like is not None]
        chained = dict.fromkeys(a for axis in used for a in axis.chain)
        self.program.axes = sorted(chained, key=lambda a: a.like is not None)
        return self.program

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    # ------------------------------------------------------------------ axes

    def structure(self, depth: int, *, searched: bool = False) -> Axis:
        """The leaf of a chain of axes: a known one, or a new one."""
        if self.leaves and self.chance(0.5):
            return self.rng.choice(self.leaves)
        self.leaves.append(self.chain(next(self.roots), self.rng.randint(1, depth), searched=searched))
        return self.leaves[-1]

    def chain(self, name: str, depth: int, *, searched: bool) -> Axis:
        """A new chain; repeated coordinates only below, where it is searched, but in a list of coordinates."""
        axis: Axis | None = None
        as_list = depth > 1 and self.chance(0.2)
        as_rows = depth > 1 and self.chance(0.8 if self.is_plain else 0.5)
        for n in range(depth):
            if as_list:
                axis = self.listed(f"{name}{n}", axis)
            elif as_rows and n < 2:
                axis = self.row(f"{name}{n}", axis)
            else:
                axis = self.axis(f"{name}{n}", axis, unique=searched and n < depth - 1)
        assert axis is not None
        return axis

    def row(self, name: str, parent: Axis | None) -> Axis:
        """One of the two axes of CSR, the usual case."""
        if parent is None:
            return Axis(name, "dense_fixed", None, self.rng.choice(self.idtypes))
        is_sorted, is_unique = self.chance(0.7), self.chance(0.8)
        return Axis(name, "sparse_variable", parent, self.rng.choice(self.idtypes), is_sorted, is_unique)

    def listed(self, name: str, parent: Axis | None) -> Axis:
        """An axis of a list of coordinates."""
        if parent is not None:
            return Axis(name, "singleton", parent, self.rng.choice(self.idtypes))
        kind = self.rng.choice(["sparse_fixed", "sparse_variable"])
        return Axis(name, kind, None, self.rng.choice(self.idtypes), self.chance(0.5), False)

    def axis(self, name: str, parent: Axis | None, *, unique: bool) -> Axis:
        """An axis of any kind."""
        kinds = ROOTS if parent is None else (*INNER, *PACKED) if parent.kind == "dense_fixed" else INNER
        kind, idtype = self.rng.choice(kinds), self.rng.choice(self.idtypes)
        if kind == "sparse_rule":
            rule = self.rng.choice([r for r, repeats in RULES.items() if not (repeats and unique)])
            return Axis(name, kind, parent, idtype, not RULES[rule], not RULES[rule], rule)
        if kind == "singleton_rule":
            return Axis(name, kind, parent, idtype, rule=self.rng.choice(SINGLE_RULES))
        is_unique = unique or kind == "singleton" or self.chance(0.75)
        return Axis(name, kind, parent, idtype, self.chance(0.6), is_unique)

    def dense(self, axis: Axis) -> Axis:
        """A dense axis as long as another one: that itself where it is dense."""
        if axis.kind == "dense_fixed":
            return axis
        made = Axis(f"D{axis.name}", "dense_fixed", None, axis.idtype, like=axis)
        return made

    def constant(self) -> Axis:
        """A dense axis of constant length."""
        length = self.rng.choice(CONSTANTS)
        return Axis(f"CC{length}", "dense_fixed", None, self.idtypes[0], constant=length)

    # ------------------------------------------------------------------ buffers

    def buffer(self, axes: Sequence[Axis], role: str = "in", dtype: str | None = None) -> Buffer:
        """A new buffer over some axes, now and then listed in another order or in another type."""
        axes = tuple(axes)
        if self.chance(0.1):
            axes = tuple(self.rng.sample(axes, len(axes)))
        if dtype is None:
            dtype = self.rng.choice(DTYPES) if role == "in" and self.chance(0.08) else self.program.dtype
        default = 0 if role == "scratch" else self.rng.choice(DEFAULTS)
        default = min(default, 1) if dtype == "bool" else default
        made = Buffer(next(self.names), axes, dtype, role, default)
        self.program.buffers.append(made)
        return made

    def source(self, axes: Sequence[Axis]) -> Buffer:
        """A buffer to read over exactly these axes: a known one, maybe a result, or a new one."""
        known = [b for b in self.program.buffers if b.axes == tuple(axes) and (b.role == "in" or b in self.filled)]
        if known and self.chance(0.6):
            return self.rng.choice(known)
        return self.buffer(axes)

    # ------------------------------------------------------------------ iterations

    def iteration(self, name: str) -> None:
        """One more iteration, with the buffers it needs."""
        walk = self.walk(name)
        written: list[Buffer] = []
        for _ in range(self.rng.choice([1, 1, 1, 1, 2, 2, 3])):
            self.statement(walk, written)
        if self.chance(0.08):
            self.nest(walk)
        if self.chance(0.15):
            walk.search = self.rng.choice(["hoist", "merge"] if self.is_sorted(walk) else ["hoist"])
        self.program.iterations.append(walk)
        self.filled += written

    def is_sorted(self, walk: Iteration) -> bool:
        """Whether a co-walk may search all buffers of an iteration."""
        used = [s.buffer for s in walk.stores()]
        used += [r[1] for s in walk.stores() for e in (s.value, *s.subscripts) for r in reads(e)]
        return all(a.sorted and a.kind != "sparse_rule" for b in used for a in b.axes)

    def walk(self, name: str) -> Iteration:
        """Axes in an order, their letters, and what is fused or attached."""
        kind = self.rng.choice(["one", "one", "one", "two", "dense", "attached", "dense_all"])
        kind = "one" if kind in ("attached", "dense_all") and self.is_plain and self.chance(0.8) else kind
        leaf = self.structure(2 if self.is_plain and self.chance(0.8) else 4 if kind == "one" else 3)
        if kind == "attached":
            return self.attached(name)
        chains = [list(leaf.chain)]
        if kind == "two":
            chains.append(list(self.structure(2).chain))
        if kind == "dense":
            chains.append([self.constant() if self.chance(0.5) else self.dense(self.rng.choice(self.axes_of_leaves()))])
        if kind == "dense_all":
            chains = [[self.dense(axis)] for axis in leaf.chain]
        axes = self.interleaved(chains)
        letters = "".join(self.rng.choice("SSR") for _ in axes)
        return Iteration(name, axes, letters, fused=self.fusable(axes))

    def axes_of_leaves(self) -> list[Axis]:
        return [a for leaf in self.leaves for a in leaf.chain]

    def interleaved(self, chains: list[list[Axis]]) -> list[Axis]:
        """Axes of some chains, parents first, each once."""
        axes: list[Axis] = []
        pending = [list(c) for c in chains]
        while any(pending):
            axis = self.rng.choice([c for c in pending if c]).pop(0)
            if axis not in axes:
                axes.append(axis)
        return axes

    def fusable(self, axes: list[Axis]) -> int:
        """How many of the first axes to fuse."""
        most = 1
        while most < len(axes) and axes[most].parent is axes[most - 1] and axes[most].kind not in PACKED:
            most += 1
        return self.rng.randint(2, most) if most > 1 and self.chance(0.2) else 0

    def attached(self, name: str) -> Iteration:
        """Fibers of one tree below the coordinates of another: neighbours of neighbours."""
        outer = self.chain(next(self.roots), self.rng.randint(1, 2), searched=False)
        base = self.axis(f"{(root := next(self.roots))}0", None, unique=True)
        inner = self.axis(f"{root}1", base, unique=False)
        self.leaves += [outer, inner]
        letters = "".join(self.rng.choice("SR") for _ in range(len(outer.chain) + 1))
        return Iteration(name, [*outer.chain, inner], letters, attached={inner: outer})

    def nest(self, walk: Iteration) -> None:
        """Put an iteration into the body: one below an axis of it, or one of its own."""
        seen = [a for leaf in self.leaves for a in leaf.chain if a.parent in walk.axes and a not in walk.axes]
        axis = self.rng.choice(seen) if seen and self.chance(0.7) else self.constant()
        if axis in walk.axes:
            return
        inner = Iteration(f"{walk.name}_inner", [axis], self.rng.choice("SR"))
        kept = walk.letter("S") + inner.letter("S")
        out = self.buffer([self.dense(a) for a in kept] or [self.constant()], "out")
        if len(set(out.axes)) < len(out.axes):
            self.program.buffers.remove(out)
            return
        at = self.subscripts_at(out, {self.dense(a): a for a in kept})
        value = self.value(Iteration("", [*walk.axes, axis], ""), [], out.dtype)
        inner.body.append(Store(out, at, self.combined(self.operator(out.dtype), ("read", out, at), value)))
        walk.body.insert(self.rng.randint(0, len(walk.body)), inner)

    # ------------------------------------------------------------------ statements

    def statement(self, walk: Iteration, written: list[Buffer]) -> None:
        """One more statement of a body."""
        kind = self.rng.choice(["reduce", "reduce", "reduce", "map", "map", "scatter"])
        kind = "reduce" if kind == "scatter" and self.is_plain and self.chance(0.3) else kind
        getattr(self, kind)(walk, written)

    def complete(self, walk: Iteration) -> list[Axis]:
        """Leaves whose chains the iteration goes over."""
        held = [a for a in walk.axes if all(up in walk.axes for up in a.chain)]
        return [a for a in held if not any(a is b.parent for b in held)]

    def reduce(self, walk: Iteration, written: list[Buffer]) -> None:
        """Combine into a result over (some of) the spatial axes."""
        spatial = walk.letter("S")
        kept = [a for a in spatial if self.chance(0.85)]
        places = {self.dense(a): a for a in kept}
        whole = [a for a in self.complete(walk) if all(up in kept for up in a.chain)]
        if whole and self.chance(0.3):
            leaf = self.rng.choice(whole)
            rest = {d: a for d, a in places.items() if a not in leaf.chain}
            places = {**{a: a for a in leaf.chain}, **rest}
        axes = list(places) or [self.constant()]
        role = "scratch" if self.chance(0.1) and len(kept) == len(spatial) else "out"
        out = self.buffer(axes, role)
        at = self.subscripts_at(out, places)
        operator = self.operator(out.dtype)
        start = role == "scratch" or self.chance(0.7)
        if start:
            first = self.start(out.dtype, operator) if self.chance(0.9) else self.outside(spatial, out.dtype)
            walk.init.append(Store(out, at, first))
        value = self.value(walk, [*written], out.dtype)
        walk.body.append(Store(out, at, self.combined(operator, ("read", out, at), value)))
        if (not walk.letter("R") and start) or role == "out":
            written.append(out)

    def map(self, walk: Iteration, written: list[Buffer]) -> None:
        """A value for each stored element of an own structure."""
        leaves = self.complete(walk)
        if not leaves:
            return self.reduce(walk, written)
        leaf = self.rng.choice(leaves)
        others = [a for a in walk.axes if a not in leaf.chain and a.kind == "dense_fixed" and self.chance(0.7)]
        axes = [*leaf.chain, *dict.fromkeys(others)]
        whole = len(axes) == len(walk.axes)
        role = "scratch" if whole and self.chance(0.15) else "out"
        out = self.buffer(axes, role)
        at = tuple(("var", a) for a in out.axes)
        value = self.value(walk, written, out.dtype)
        if role == "out" and self.chance(0.2):
            value = self.combined(self.operator(out.dtype), ("read", out, at), value)
        walk.body.append(Store(out, at, value))
        written.append(out)

    def scatter(self, walk: Iteration, written: list[Buffer]) -> None:
        """Store or add by computed coordinates to any structure; what is not stored there vanishes."""
        leaf = self.structure(3, searched=True)
        axes = [self.dense(a) for a in leaf.chain] if self.chance(0.4) else list(leaf.chain)
        if len(set(axes)) < len(axes):
            axes = list(leaf.chain)
        out = self.buffer(axes, "out")
        start = bool(walk.letter("S")) and self.chance(0.4)
        at = tuple(self.subscript(walk.letter("S") if start else walk.axes) for _ in axes)
        operator = self.operator(out.dtype)
        if start:
            walk.init.append(Store(out, at, self.start(out.dtype, operator)))
        value = self.value(walk, written, out.dtype)
        if start or self.chance(0.7):
            value = self.combined(operator, ("read", out, at), value)
        walk.body.append(Store(out, at, value))

    def subscripts_at(self, buffer: Buffer, places: dict[Axis, Axis]) -> tuple[Expr, ...]:
        """Variables for a buffer whose axes stand for axes of the iteration; 0 elsewhere."""
        return tuple(("var", places[a]) if a in places else ("const", 0) for a in buffer.axes)

    # ------------------------------------------------------------------ values

    def operator(self, dtype: str) -> str:
        if dtype == "bool":
            return self.rng.choice(["or", "and"])
        return self.rng.choice(["add", "add", "add", "add", "max", "min", "mul"])

    def start(self, dtype: str, operator: str) -> Expr:
        """What a reduction begins with."""
        if dtype == "bool":
            return ("cast", "bool", ("const", self.rng.randint(0, 1)))
        value = self.rng.choice(NEUTRAL[operator])
        return ("cast", dtype, ("const", abs(value) if dtype == "uint8" else value))

    def outside(self, spatial: list[Axis], dtype: str) -> Expr:
        """A start that depends on the coordinates: a coordinate, or a value read there."""
        if not spatial:
            return self.start(dtype, "max" if dtype != "bool" else "or")
        axis = self.rng.choice(spatial)
        if self.chance(0.4):
            return self.converted(("var", axis), dtype, axis.idtype)
        return self.read_of(self.source([self.dense(axis)]), (("var", axis),), dtype)

    def combined(self, operator: str, old: Expr, value: Expr) -> Expr:
        return (operator, old, value)

    def value(self, walk: Iteration, written: list[Buffer], dtype: str) -> Expr:
        """An expression of a dtype at a point of the iteration."""
        e = self.term(walk, written, dtype)
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            other = self.term(walk, written, dtype)
            if dtype == "bool":
                e = (self.rng.choice(["or", "and"]), e, other)
            elif self.chance(0.06):
                condition = ("lt", e, other)
                e = (self.rng.choice(["select", "if_then_else"]), condition, e, other)
            else:
                operators = ["add", "mul", "mul", "max", "min"] + ["sub"] * (dtype != "uint8")
                e = (self.rng.choice(operators), e, other)
        return e

    def term(self, walk: Iteration, written: list[Buffer], dtype: str) -> Expr:
        """A read of an own element, of a dense one, of any by search, or a coordinate or number."""
        kind = self.rng.choice(["own"] * 5 + ["dense"] * 3 + ["lookup"] * 2 + ["number"])
        kind = "own" if kind == "lookup" and self.is_plain and self.chance(0.8) else kind
        leaves = self.complete(walk)
        if kind == "own" and leaves:
            leaf = self.rng.choice(leaves)
            here = [b for b in written if set(b.axes) <= set(walk.axes) and b.role != "scratch"]
            if here and self.chance(0.5):
                buffer = self.rng.choice(here)
                return self.read_of(buffer, tuple(("var", a) for a in buffer.axes), dtype)
            cut = leaf.chain[self.rng.randrange(len(leaf.chain))] if self.chance(0.2) else leaf
            buffer = self.source(cut.chain)
            return self.read_of(buffer, tuple(("var", a) for a in buffer.axes), dtype)
        if kind == "lookup":
            return self.lookup(walk, dtype)
        if kind == "number" or not walk.axes:
            axis = self.rng.choice(walk.axes)
            e: Expr = ("var", axis) if self.chance(0.6) else ("const", self.rng.randint(0, 3))
            return self.converted(e, dtype, axis.idtype)
        some = self.rng.sample(walk.axes, min(len(walk.axes), self.rng.choice([1, 1, 2])))
        places = {self.dense(a): a for a in some}
        buffer = self.source(list(places))
        return self.read_of(buffer, self.subscripts_at(buffer, places), dtype)

    def lookup(self, walk: Iteration, dtype: str) -> Expr:
        """A read of any structure at computed coordinates."""
        leaf = self.structure(3, searched=True)
        buffer = self.source(leaf.chain)
        return self.read_of(buffer, tuple(self.subscript(walk.axes) for _ in buffer.axes), dtype)

    def read_of(self, buffer: Buffer, subscripts: tuple[Expr, ...], dtype: str) -> Expr:
        return self.converted(("read", buffer, subscripts), dtype, buffer.dtype)

    def converted(self, e: Expr, dtype: str, found: str) -> Expr:
        """An expression of type `found` in another type."""
        if e[0] != "const" and found == dtype:
            return e
        if dtype == "bool":
            return ("lt", ("cast", "int32", ("const", 0)), ("cast", "int32", e))
        return ("cast", dtype, e)

    def subscript(self, axes: Sequence[Axis]) -> Expr:
        """A coordinate out of variables, maybe out of range."""
        if not axes or self.chance(0.1):
            return ("const", self.rng.randint(0, 2))
        axis = self.rng.choice(axes)
        one: Expr = ("var", axis)
        kind = self.rng.choice(["var"] * 6 + ["next", "previous", "sum", "twice", "mod", "value", "value"])
        if kind in ("next", "previous"):
            return ("add" if kind == "next" else "sub", one, ("const", 1))
        if kind == "sum":
            other = self.rng.choice(axes)
            return ("add", ("cast", "int32", one), ("cast", "int32", ("var", other)))
        if kind == "twice":
            return ("mul", one, ("const", 2))
        if kind == "mod":
            return ("mod", one, ("const", 3))
        if kind == "value":
            return ("read", self.indices(self.dense(axis)), (one,))
        return one

    def indices(self, axis: Axis) -> Buffer:
        """A dense buffer of whole numbers that stand as subscripts."""
        known = [b for b in self.program.buffers if b.axes == (axis,) and b.dtype == "int32" and b.role == "in"]
        return known[0] if known else self.buffer([axis], dtype="int32")


def draw(rng: random.Random, *, is_plain: bool = False) -> Program:
    """A program that has at least one result."""
    while True:
        made = Maker(rng, is_plain).make()
        if any(b.role == "out" for b in made.buffers):
            return made


def reads_of(program: Program) -> list[Expr]:
    """Every read of a program."""
    return [r for s in program.stores for e in (s.value, *s.subscripts) for r in reads(e)]


__all__ = ["draw", "reads_of"]
