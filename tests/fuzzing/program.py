# SPDX-License-Identifier: Apache-2.0
"""What a fuzzed program is made of, and its text.

The oracle evaluates this description; the compiler sees the text only. An expression is a tuple that begins with what
it is: ``("var", axis)``, ``("const", 3)``, ``("read", buffer, subscripts)``, ``("cast", dtype, e)``,
``("select", condition, a, b)`` or an operator and its operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from drawing import Axis

Expr: TypeAlias = "tuple[Any, ...]"

INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "mod": "%", "or": "or", "and": "and"}
WORDS = {"max": "T.max", "min": "T.min"}


@dataclass(frozen=True)
class Buffer:
    """One buffer; `role` is in, out (written, whether or not it is read) or scratch."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    role: str = "in"
    default: int = 0

    @cached_property
    def trees(self) -> list[Axis]:
        """The deepest axis of each tree, in the order in which the trees appear: one storage dimension each."""
        deepest: dict[Axis, Axis] = {}
        for axis in self.axes:
            known = deepest.setdefault(axis.chain[0], axis)
            deepest[axis.chain[0]] = max(known, axis, key=lambda a: len(a.chain))
        return list(deepest.values())

    @property
    def scratch(self) -> bool:
        return self.role == "scratch"

    @property
    def declaration(self) -> str:
        """The line that declares it."""
        axes = f"({', '.join(a.name for a in self.axes)},)"
        if self.scratch:
            return f"{self.name} = T.alloc_sparse_buffer({axes}, {self.dtype!r})"
        default = f", default_value={self.default}" * (self.default != 0)
        return f"{self.name} = T.match_sparse_buffer({self.name.lower()}, {axes}, {self.dtype!r}{default})"


@dataclass(frozen=True)
class Store:
    """``buffer[subscripts] = value``."""

    buffer: Buffer
    subscripts: tuple[Expr, ...]
    value: Expr


@dataclass
class Iteration:
    """A sparse iteration; `attached` maps an axis to the one below whose coordinate it hangs."""

    name: str
    axes: list[Axis]
    letters: str
    fused: int = 0  # how many of the first axes are one loop
    attached: dict[Axis, Axis] = field(default_factory=dict)
    init: list[Store] = field(default_factory=list)
    body: list[Store | Iteration] = field(default_factory=list)
    search: str = "inline"
    only_stored: bool = False

    def letter(self, kind: str) -> list[Axis]:
        """The spatial ("S") or reduction ("R") axes."""
        return [a for a, letter in zip(self.axes, self.letters, strict=True) if letter == kind]

    @property
    def entries(self) -> list[str]:
        alone = [f"T.attach({a.name}, {self.attached[a].name})" if a in self.attached else a.name for a in self.axes]
        return [f"T.fuse({', '.join(alone[: self.fused])})", *alone[self.fused :]] if self.fused else alone

    def text(self) -> list[str]:
        """Lines of a function's body."""
        names = ", ".join(variable(a) for a in self.axes)
        lines = [f"with T.sp_iter([{', '.join(self.entries)}], {self.letters!r}, {self.name!r}) as [{names}]:"]
        notes = {"search": self.search} if self.search != "inline" else {}
        notes |= {"init": "stored"} if self.only_stored else {}
        inside = [f"T.sp_iter_attr({notes})"] if notes else []
        if self.init:
            inside += ["with T.init():", *(f"    {store_text(s)}" for s in self.init)]
        for step in self.body:
            inside += step.text() if isinstance(step, Iteration) else [store_text(step)]
        return lines + [f"    {line}" for line in inside]

    def stores(self) -> Iterator[Store]:
        """Every store in it, those of initialisations and of nested iterations too."""
        yield from self.init
        for step in self.body:
            if isinstance(step, Iteration):
                yield from step.stores()
            else:
                yield step

    def nested(self) -> Iterator[Iteration]:
        """It and the iterations in it."""
        yield self
        for step in self.body:
            if isinstance(step, Iteration):
                yield from step.nested()


@dataclass
class Program:
    """A drawn program."""

    dtype: str
    size_dtype: str
    axes: list[Axis] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    repeats: int = 1  # steps of a loop around the last iteration

    @property
    def text(self) -> str:
        """The program in the dialect."""
        handles = [b.name.lower() for b in self.buffers if not b.scratch] + [a for x in self.axes for a in x.arrays]
        sizes = dict.fromkeys(s for x in self.axes for s in x.sizes.values())
        params = [f"{h}: T.handle" for h in handles] + [f"{s}: T.{self.size_dtype}" for s in sizes]
        lines = [x.declaration for x in self.axes] + [b.declaration for b in self.buffers]
        for n, iteration in enumerate(self.iterations):
            repeated = self.repeats > 1 and n == len(self.iterations) - 1
            lines += [f"for again in T.serial({self.repeats}):"] * repeated
            lines += [f"    {line}" if repeated else line for line in iteration.text()]
        return "\n    ".join([f"@T.prim_func\ndef program({', '.join(params)}):", *lines])

    @property
    def every_iteration(self) -> list[Iteration]:
        return [it for outer in self.iterations for it in outer.nested()]

    @property
    def stores(self) -> list[Store]:
        return [store for it in self.iterations for store in it.stores()]


def variable(axis: Axis) -> str:
    """The name of the iteration variable of an axis."""
    return axis.name.lower() + "v"


def show(e: Expr) -> str:
    """An expression as text."""
    kind, *rest = e
    if kind == "var":
        return variable(rest[0])
    if kind == "const":
        return str(rest[0])
    if kind == "read":
        return f"{rest[0].name}[{', '.join(map(show, rest[1]))}]"
    if kind == "cast":
        return f"T.Cast({rest[0]!r}, {show(rest[1])})"
    if kind in ("select", "if_then_else"):
        function = "T.Select" if kind == "select" else "T.if_then_else"
        return f"{function}({', '.join(map(show, rest))})"
    if kind in WORDS:
        return f"{WORDS[kind]}({', '.join(map(show, rest))})"
    return f"({show(rest[0])} {INFIX[kind]} {show(rest[1])})"


def store_text(store: Store) -> str:
    """A store as text."""
    return f"{store.buffer.name}[{', '.join(map(show, store.subscripts))}] = {show(store.value)}"


def reads(e: Expr) -> Iterator[Expr]:
    """Every read in an expression, those in subscripts too."""
    if e[0] == "read":
        yield e
        for subscript in e[2]:
            yield from reads(subscript)
        return
    for part in e[1:]:
        if isinstance(part, tuple):
            yield from reads(part)


def cast_dtypes(e: Expr) -> Iterator[str]:
    """The dtypes that an expression is computed in besides those of buffers."""
    if e[0] == "cast":
        yield e[1]
    for part in e[2] if e[0] == "read" else e[1:]:
        if isinstance(part, tuple):
            yield from cast_dtypes(part)


def variables(e: Expr) -> Iterator[Axis]:
    """The axes whose coordinates an expression names."""
    for part in e[1:] if e[0] != "read" else e[2]:
        if isinstance(part, Axis):
            yield part
        elif isinstance(part, tuple):
            yield from variables(part)


__all__ = [
    "Buffer",
    "Expr",
    "Iteration",
    "Program",
    "Store",
    "cast_dtypes",
    "reads",
    "show",
    "store_text",
    "variable",
    "variables",
]
