# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for programs of the dialect, and random data for them.

A drawn program is a text plus what its axes and buffers are, so that one compiled kernel meets many data sets.
Values are small whole numbers: sums are exact in any order. Elements at absent coordinates are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

ROOTS = ("dense_fixed", "dense_variable", "sparse_fixed", "sparse_rule", "sparse_variable", "singleton")
INNER = ("dense_variable", "sparse_fixed", "sparse_rule", "sparse_variable", "singleton", "singleton_rule")
PACKED = ("triangle", "brick")
#: coordinate of slot `s` below the coordinate `p`: the formula, and whether it may repeat a coordinate
RULES = {"s": False, "s + p - 1": False, "p - s": False, "2 * s": False, "(p + s) % 3": True}
SINGLE_RULES = ("p", "p + 1", "2 - p", "1")
DEFAULTS = (0.0, 1.5, -2.0)


@dataclass(frozen=True)
class Axis:
    """One axis of a drawn program; `rule` is a formula of `p`, the coordinate above, and the slot `s`.

    A dense axis may have the length of another one, or a constant one.
    """

    name: str
    kind: str
    parent: Axis | None
    idtype: str
    sorted: bool = True
    unique: bool = True
    rule: str = ""
    like: Axis | None = None
    constant: int | None = None

    @cached_property
    def chain(self) -> tuple[Axis, ...]:
        """The axes from the root down to this one."""
        return (self,) if self.parent is None else (*self.parent.chain, self)

    @property
    def has_indices(self) -> bool:
        return self.kind in ("sparse_fixed", "sparse_variable", "singleton")

    @property
    def has_indptr(self) -> bool:
        return self.kind in ("dense_variable", "sparse_variable")

    @property
    def arrays(self) -> list[str]:
        """Names of its index arrays."""
        name = self.name.lower()
        return [f"p{name}"] * self.has_indptr + [f"i{name}"] * self.has_indices

    @property
    def sizes(self) -> dict[str, str]:
        """Names of its sizes: length `n`, width of a fiber `w`, number of positions `z`, as far as it has them."""
        if self.like is not None:
            return {"n": self.like.sizes["n"]}
        if self.constant is not None:
            return {}
        which = {"sparse_fixed": "nw", "sparse_rule": "nw", "dense_fixed": "n", "singleton": "n", "singleton_rule": "n"}
        return {size: size + self.name.lower() for size in which.get(self.kind, "nz")}

    def _lambda(self, formula: str) -> str:
        above = [f"c{n}" for n in range(len(self.chain) - 1)]
        formula = formula.replace("p", above[-1] if above else "1")
        return f"lambda {', '.join([*above, 's'])}: {formula}"

    @property
    def declaration(self) -> str:
        """The line that declares it."""
        n, w, z = (self.sizes.get(size, str(self.constant)) for size in "nwz")
        above = "None" if self.parent is None else self.parent.name
        flags = f"{self.idtype!r}, sorted={self.sorted}, unique={self.unique}"
        p, i = f"p{self.name.lower()}", f"i{self.name.lower()}"
        made = {
            "dense_fixed": f"T.dense_fixed({n}, {self.idtype!r})",
            "dense_variable": f"T.dense_variable({above}, ({n}, {z}), {p}, {self.idtype!r})",
            "sparse_fixed": f"T.sparse_fixed({above}, ({n}, {w}), {i}, {flags})",
            "sparse_rule": f"T.sparse_fixed({above}, ({n}, {w}), {self._lambda(self.rule)}, {flags})",
            "sparse_variable": f"T.sparse_variable({above}, ({n}, {z}), ({p}, {i}), {flags})",
            "singleton": f"T.singleton({above}, {n}, {i}, {flags})",
            "singleton_rule": f"T.singleton({above}, {n}, {self._lambda(self.rule)}, {flags})",
            "triangle": f"T.dense_variable({above}, ({n}, {z}), extent=lambda i: i + 1, "
            f"offset=lambda i: i * (i + 1) // 2, idtype={self.idtype!r})",
            "brick": f"T.dense_variable({above}, ({n}, {z}), extent=lambda i: {n}, "
            f"offset=lambda i: i * {n}, idtype={self.idtype!r})",
        }
        return f"{self.name} = {made[self.kind]}"


@dataclass(frozen=True)
class Buffer:
    """One buffer: its axes, whole chains, and whether the program reads, writes or allocates it."""

    name: str
    axes: tuple[Axis, ...]
    default: float = 0.0
    written: bool = False
    scratch: bool = False

    @property
    def trees(self) -> list[Axis]:
        """The last axis of each chain, in order: one storage dimension each."""
        last = {axis.chain[0]: axis for axis in self.axes}
        return list(last.values())


@dataclass
class Program:
    """A drawn program."""

    dtype: str
    size_dtype: str
    axes: list[Axis]
    buffers: list[Buffer]
    statements: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The program in the dialect."""
        handles = [b.name.lower() for b in self.buffers if not b.scratch] + [a for x in self.axes for a in x.arrays]
        sizes = [s for x in self.axes for s in x.sizes.values()]
        params = [f"{h}: T.handle" for h in handles] + [f"{s}: T.{self.size_dtype}" for s in sizes]
        lines = [x.declaration for x in self.axes] + [self._matched(b) for b in self.buffers] + self.statements
        return "\n    ".join([f"@T.prim_func\ndef program({', '.join(params)}):", *lines])

    def _matched(self, buffer: Buffer) -> str:
        axes = f"({', '.join(a.name for a in buffer.axes)},)"
        if buffer.scratch:
            return f"{buffer.name} = T.alloc_sparse_buffer({axes}, {self.dtype!r})"
        options = f"{self.dtype!r}, default_value={buffer.default}"
        return f"{buffer.name} = T.match_sparse_buffer({buffer.name.lower()}, {axes}, {options})"

    @property
    def results(self) -> list[str]:
        """Parameters the program writes."""
        return [b.name.lower() for b in self.buffers if b.written and not b.scratch]

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """How hypothesis shows it."""
        printer.text(f"the program\n{self.text}\n")


# ---------------------------------------------------------------- axes


@st.composite
def axis_below(draw: Any, name: str, parent: Axis | None, *, searched: bool, unique: bool, types: Any) -> Axis:
    """An axis; `searched` ones may repeat coordinates only where `unique` is false."""
    kinds = ROOTS if parent is None else INNER
    if parent is not None and parent.kind == "dense_fixed":
        kinds = (*INNER, *PACKED)
    kind, idtype = draw(st.sampled_from(kinds)), draw(types)
    if kind == "sparse_rule":
        rules = [rule for rule, repeats in RULES.items() if not (repeats and searched and unique)]
        rule = draw(st.sampled_from(rules))
        return Axis(name, kind, parent, idtype, not RULES[rule], not RULES[rule], rule)
    if kind == "singleton_rule":
        return Axis(name, kind, parent, idtype, rule=draw(st.sampled_from(SINGLE_RULES)))
    is_unique = unique or kind == "singleton" or draw(st.booleans())
    return Axis(name, kind, parent, idtype, draw(st.booleans()), is_unique)


@st.composite
def chains(draw: Any, name: str, depth: int, *, searched: bool = False, types: Any = None) -> Axis:
    """The last axis of a chain of up to `depth` axes.

    A search below an axis with repeated coordinates is only possible where singletons follow (COO).
    """
    types = st.sampled_from(["int32", "int64"]) if types is None else types
    count = draw(st.integers(1, depth))
    coo = searched and count > 1 and draw(st.integers(0, 3)) == 0
    axis: Axis | None = None
    for n in range(count):
        if coo:
            kind = draw(st.sampled_from(["sparse_fixed", "sparse_variable"])) if n == 0 else "singleton"
            axis = Axis(f"{name}{n}", kind, axis, draw(types), n > 0 or draw(st.booleans()), n > 0)
            continue
        last = n == count - 1
        axis = draw(axis_below(f"{name}{n}", axis, searched=searched, unique=searched and not last, types=types))
    assert axis is not None
    return axis


# ---------------------------------------------------------------- iterations


@dataclass(frozen=True)
class Walk:
    """The head of a sparse iteration: entries, letters and variables of the axes walked."""

    axes: tuple[Axis, ...]
    entries: tuple[str, ...]
    letters: str

    @property
    def variables(self) -> list[str]:
        return [a.name.lower() + "v" for a in self.axes]

    def var(self, axis: Axis) -> str:
        """The iteration variable of an axis."""
        return axis.name.lower() + "v"

    def spatial(self) -> list[Axis]:
        return [a for a, letter in zip(self.axes, self.letters, strict=True) if letter == "S"]

    def text(self, body: Sequence[str], init: Sequence[str] = (), search: str = "inline") -> list[str]:
        """The iteration as lines of a function's body."""
        head = (
            f"with T.sp_iter([{', '.join(self.entries)}], {self.letters!r}, 'work') as [{', '.join(self.variables)}]:"
        )
        lines = [head, f"    T.sp_iter_attr({{'search': {search!r}}})"]
        lines += ["    with T.init():", *(f"        {line}" for line in init)] if init else []
        return lines + [f"    {line}" for line in body]


@st.composite
def walks(draw: Any, leaves: Sequence[Axis], letters: str = "SR") -> Walk:
    """An order of the axes of some chains, parents first; a root chain may be fused."""
    pending = [list(leaf.chain) for leaf in leaves]
    axes: list[Axis] = []
    entries: list[str] = []
    while any(pending):
        chain = draw(st.sampled_from([c for c in pending if c]))
        fused = chain[0].parent is None and len(chain) > 1 and draw(st.integers(0, 4)) == 0
        fused = fused and all(a.kind not in PACKED for a in chain)
        taken = draw(st.integers(2, len(chain))) if fused else 1
        group = [chain.pop(0) for _ in range(taken)]
        axes += group
        names = ", ".join(a.name for a in group)
        entries.append(f"T.fuse({names})" if fused else names)
    drawn = "".join(draw(st.sampled_from(letters)) for _ in axes)
    return Walk(tuple(axes), tuple(entries), drawn)


@st.composite
def subscripts(draw: Any, buffer_axes: Sequence[Axis], walk: Walk, allowed: Sequence[Axis]) -> str:
    """Coordinates for a buffer of any structure out of the variables of `allowed`; they may be out of range."""
    out = []
    for _ in buffer_axes:
        held = [walk.var(a) for a in allowed]
        choices = [st.integers(0, 2).map(str)]
        if held:
            one = st.sampled_from(held)
            choices += [one, one, one, one.map(lambda v: f"{v} + 1"), one.map(lambda v: f"{v} - 1")]
            choices.append(st.tuples(one, one).map(lambda two: f"T.int32({two[0]}) + T.int32({two[1]})"))
        out.append(draw(st.one_of(choices)))
    return ", ".join(out)


def dense_like(axis: Axis) -> Axis:
    """A dense axis as long as another axis."""
    return Axis(f"D{axis.name}", "dense_fixed", None, axis.idtype)


def is_searched_sorted(buffers: Sequence[Buffer]) -> bool:
    """Whether a co-walk may search all axes of these buffers."""
    return all(axis.sorted for b in buffers for axis in b.axes if axis.has_indices or axis.kind == "sparse_rule")


@st.composite
def searches(draw: Any, *buffers: Buffer) -> str:
    """A search strategy that is legal for the buffers looked up."""
    legal = ["inline", "hoist", *(["merge"] if is_searched_sorted(buffers) else [])]
    return draw(st.sampled_from(legal))


def unique_axes(*groups: Sequence[Axis]) -> list[Axis]:
    """Axes with their ancestors, each once, parents first."""
    return list(dict.fromkeys(a for group in groups for axis in group for a in axis.chain))


# ---------------------------------------------------------------- programs

VALUES = ("float32", "float64")
SIZES = ("int32", "int64")


def _types(draw: Any) -> dict[str, str]:
    return {"dtype": draw(st.sampled_from(VALUES)), "size_dtype": draw(st.sampled_from(SIZES))}


@st.composite
def reductions(draw: Any) -> Program:
    """Reduce one or two trees into a dense buffer, initialised at every spatial point."""
    leaves = [draw(chains("X", 4))]
    if draw(st.booleans()):
        leaves.append(draw(chains("U", 2)))
    walk = draw(walks(leaves))
    kept = [a for a in walk.spatial() if draw(st.integers(0, 3))]
    dense = [dense_like(a) for a in kept] or [Axis("D", "dense_fixed", None, "int32")]
    at = ", ".join(walk.var(a) for a in kept) or "0"
    buffers = [Buffer(name, leaf.chain) for name, leaf in zip("AB", leaves, strict=False)]
    out = Buffer("Y", tuple(dense), written=True)
    terms = [f"{b.name}[{', '.join(walk.var(a) for a in b.axes)}]" for b in buffers]
    value = " * ".join(terms)
    body = draw(st.sampled_from([f"Y[{at}] = Y[{at}] + {value}", f"Y[{at}] = T.max(Y[{at}], {value})"]))
    statements = walk.text([body], [f"Y[{at}] = {draw(st.integers(-2, 2))}"])
    return Program(**_types(draw), axes=unique_axes(walk.axes, dense), buffers=[*buffers, out], statements=statements)


@st.composite
def maps(draw: Any) -> Program:
    """A value and a coordinate for every stored element, into a buffer of the same structure."""
    leaf = draw(chains("X", 4))
    walk = draw(walks([leaf], "S"))
    at = ", ".join(walk.var(a) for a in leaf.chain)
    types = _types(draw)
    coordinate = f"T.cast({walk.var(draw(st.sampled_from(leaf.chain)))}, {types['dtype']!r})"
    body = [f"B[{at}] = A[{at}] * 2 + {coordinate}"]
    buffers = [Buffer("A", leaf.chain), Buffer("B", leaf.chain, written=True)]
    if draw(st.booleans()):
        body.append(f"C[{at}] = B[{at}] + A[{at}]")
        buffers.append(Buffer("C", leaf.chain, written=True))
    return Program(**types, axes=unique_axes(walk.axes), buffers=buffers, statements=walk.text(body))


@st.composite
def lookups(draw: Any) -> Program:
    """Read a buffer of another structure, or of another place of the same one, by coordinates."""
    walked = draw(chains("X", 3, searched=True))
    leaf = walked if draw(st.integers(0, 3)) == 0 else draw(chains("V", 3, searched=True))
    walk = draw(walks([walked], "S"))
    own = ", ".join(walk.var(a) for a in walked.chain)
    looked_up = Buffer("B", leaf.chain, draw(st.sampled_from(DEFAULTS)))
    buffers = [Buffer("A", walked.chain), looked_up, Buffer("C", walked.chain, written=True)]
    first, second = (draw(subscripts(leaf.chain, walk, walk.axes)) for _ in range(2))
    value = f"A[{own}] + B[{first}]"
    if draw(st.booleans()):
        value += f" * 3 + B[{second}]"
    statements = walk.text([f"C[{own}] = {value}"], search=draw(searches(looked_up)))
    return Program(**_types(draw), axes=unique_axes(walk.axes, leaf.chain), buffers=buffers, statements=statements)


@st.composite
def dense_lookups(draw: Any) -> Program:
    """Walk coordinates, not positions: every read of the sparse buffer is a search; then reduce."""
    leaf = draw(chains("V", 3, searched=True))
    dense = [dense_like(a) for a in leaf.chain]
    walk = draw(walks(dense))
    looked_up = Buffer("B", leaf.chain, draw(st.sampled_from(DEFAULTS)))
    at = ", ".join(walk.var(a) for a in walk.spatial()) or "0"
    kept = tuple(walk.spatial()) or (Axis("D", "dense_fixed", None, "int32"),)
    where = ", ".join(walk.var(d) for d in dense)
    buffers = [looked_up, Buffer("Y", kept, written=True)]
    statements = walk.text([f"Y[{at}] = Y[{at}] + B[{where}]"], [f"Y[{at}] = 1"], draw(searches(looked_up)))
    return Program(
        **_types(draw), axes=unique_axes(leaf.chain, walk.axes, kept), buffers=buffers, statements=statements
    )


@st.composite
def scatters(draw: Any) -> Program:
    """Store or add to a buffer of another structure by coordinates; stores to absent ones vanish."""
    walked, leaf = draw(chains("X", 3)), draw(chains("V", 3, searched=True))
    walk = draw(walks([walked]))
    own = ", ".join(walk.var(a) for a in walked.chain)
    target = Buffer("C", leaf.chain, draw(st.sampled_from(DEFAULTS)), written=True)
    has_init = draw(st.booleans())
    at = draw(subscripts(leaf.chain, walk, walk.spatial() if has_init else walk.axes))
    adds = has_init or draw(st.booleans())
    body = f"C[{at}] = C[{at}] + A[{own}]" if adds else f"C[{at}] = A[{own}]"
    statements = walk.text([body], [f"C[{at}] = 2"] if has_init else [], draw(searches(target)))
    buffers = [Buffer("A", walked.chain), target]
    return Program(**_types(draw), axes=unique_axes(walk.axes, leaf.chain), buffers=buffers, statements=statements)


@st.composite
def two_steps(draw: Any) -> Program:
    """Fill scratch of the same structure, then reduce it."""
    leaf = draw(chains("X", 3))
    first, second = draw(walks([leaf], "S")), draw(walks([leaf]))
    at = ", ".join(first.var(a) for a in leaf.chain)
    kept = second.spatial()
    dense = [dense_like(a) for a in kept] or [Axis("D", "dense_fixed", None, "int32")]
    out = ", ".join(second.var(a) for a in kept) or "0"
    types = _types(draw)
    buffers = [
        Buffer("A", leaf.chain),
        Buffer("S", leaf.chain, scratch=True, written=True),
        Buffer("Y", tuple(dense), written=True),
    ]
    statements = first.text([f"S[{at}] = A[{at}] * A[{at}]"])
    statements += second.text([f"Y[{out}] = Y[{out}] + S[{at}]"], [f"Y[{out}] = 0"])
    return Program(**types, axes=unique_axes(leaf.chain, dense), buffers=buffers, statements=statements)


@st.composite
def attached(draw: Any) -> Program:
    """Sparse times sparse: rows of B below the columns of A."""
    types = st.just("int32")
    outer = draw(chains("X", 2, types=types))
    base = Axis("V0", draw(st.sampled_from(["dense_fixed", "sparse_variable", "sparse_fixed"])), None, "int32")
    kind = draw(st.sampled_from(["sparse_variable", "dense_variable", "sparse_fixed"]))
    repeats = kind != "dense_variable" and draw(st.booleans())
    inner = Axis("V1", kind, base, "int32", draw(st.booleans()), not repeats)
    letters = "".join(draw(st.sampled_from("SR")) for _ in outer.chain) + draw(st.sampled_from("SR"))
    entries = (*(a.name for a in outer.chain), f"T.attach(V1, {outer.name})")
    walk = Walk((*outer.chain, inner), entries, letters)
    kept = walk.spatial()
    dense = [dense_like(a) for a in kept] or [Axis("D", "dense_fixed", None, "int32")]
    at = ", ".join(walk.var(a) for a in kept) or "0"
    buffers = [Buffer("A", outer.chain), Buffer("B", inner.chain), Buffer("Y", tuple(dense), written=True)]
    own = ", ".join(walk.var(a) for a in outer.chain)
    value = f"A[{own}] * B[{walk.var(outer)}, {walk.var(inner)}]"
    if draw(st.booleans()):
        leaf = draw(chains("U", 1, searched=True, types=types))
        buffers.append(Buffer("E", leaf.chain, draw(st.sampled_from(DEFAULTS))))
        value += f" * E[{walk.var(draw(st.sampled_from(walk.axes)))}]"
    body = f"Y[{at}] = Y[{at}] + {value}"
    statements = walk.text([body], [f"Y[{at}] = 0"], draw(searches(*buffers[1:])))
    axes = unique_axes(*(b.axes for b in buffers))
    return Program(**_types(draw), axes=axes, buffers=buffers, statements=statements)


SHAPES = {
    "reduce": reductions(),
    "map": maps(),
    "lookup": lookups(),
    "dense_lookup": dense_lookups(),
    "scatter": scatters(),
    "two_steps": two_steps(),
    "attach": attached(),
}


# ---------------------------------------------------------------- data


class Data:
    """Sizes, index arrays and values for a program; lengths go up to `most`."""

    def __init__(self, program: Program, seed: int, most: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.program = program
        self.most = self._limit(program, most)
        self.args: dict[str, Any] = {}
        #: coordinates of every stored position from the root down; None at padding
        self.points: dict[Axis, list[tuple[int, ...] | None]] = {}
        #: position above each stored position
        self.above: dict[Axis, list[int]] = {}
        for axis in program.axes:
            self._axis(axis)
        for buffer in program.buffers:
            if not buffer.scratch:
                self.args[buffer.name.lower()] = self._values(buffer)

    def _limit(self, program: Program, most: int) -> int:
        """Few points where there are many axes."""
        return min(most, {1: 6, 2: 6, 3: 4}.get(len(program.axes), 3))

    def _length(self, axis: Axis) -> int:
        if axis.constant is not None:
            return axis.constant
        if axis.like is not None:
            return int(self.args[axis.sizes["n"]])
        like = axis.name.removeprefix("D").lower()
        if axis.name == "D":
            return 1
        if axis.name.startswith("D"):
            return int(self.args[f"n{like}"])
        if axis.kind == "triangle":
            return int(self.args[f"n{axis.chain[-2].name.lower()}"])
        return int(self.rng.integers(0, self.most + 1))

    def _axis(self, axis: Axis) -> None:
        length = self._length(axis)
        above: list[tuple[int, ...] | None] = [()] if axis.parent is None else self.points[axis.parent]
        width = int(self.rng.integers(0, length + 2)) if axis.kind in ("sparse_fixed", "sparse_rule") else 0
        fibers = [self._fiber(axis, point, length, width) for point in above]
        points: list[tuple[int, ...] | None] = []
        for point, fiber in zip(above, fibers, strict=True):
            points += [None if point is None or not 0 <= c < length else (*point, c) for c in fiber]
        self.points[axis] = points
        self.above[axis] = [n for n, fiber in enumerate(fibers) for _ in fiber]
        known = {"n": length, "w": width, "z": len(points)}
        self.args |= {name: known[size] for size, name in axis.sizes.items()}
        name = axis.name.lower()
        if axis.has_indptr:
            self.args[f"p{name}"] = np.cumsum([0, *map(len, fibers)]).astype(axis.idtype)
        if axis.has_indices:
            self.args[f"i{name}"] = np.array([c for fiber in fibers for c in fiber], axis.idtype)

    def _fiber(self, axis: Axis, point: tuple[int, ...] | None, length: int, width: int) -> list[int]:
        """Coordinates of one fiber, padding among them."""
        p = point[-1] if point else 1
        if axis.kind in ("dense_fixed", "brick"):
            return list(range(length))
        if axis.kind == "triangle":
            return list(range(p + 1))
        if axis.kind == "dense_variable":
            return list(range(int(self.rng.integers(0, length + 1))))
        if axis.kind == "singleton":
            return [int(self.rng.integers(0, length + 1))]
        if axis.kind == "singleton_rule":
            return [int(eval(axis.rule, {}, {"p": p, "s": 0}))]
        if axis.kind == "sparse_rule":
            return [int(eval(axis.rule, {}, {"p": p, "s": s})) for s in range(width)]
        if axis.kind == "sparse_fixed":
            return self._padded(axis, length, width)
        return self._stored(axis, length, length)

    def _stored(self, axis: Axis, length: int, most: int) -> list[int]:
        """Up to `most` coordinates."""
        count = int(self.rng.integers(0, most + 1)) if length else 0
        if axis.unique:
            found = self.rng.permutation(length)[:count]
        else:
            found = self.rng.integers(0, max(length, 1), count)
        return [int(c) for c in (np.sort(found) if axis.sorted else found)]

    def _padded(self, axis: Axis, length: int, width: int) -> list[int]:
        """`width` slots; padding goes where it keeps a sorted fiber sorted."""
        stored = self._stored(axis, length, width)
        slots = stored + [length] * (width - len(stored))
        return slots if axis.sorted else [slots[n] for n in self.rng.permutation(width)]

    def _values(self, buffer: Buffer) -> np.ndarray:
        """Small whole numbers; NaN at padding."""
        shape = [len(self.points[last]) for last in buffer.trees]
        values = self.rng.integers(-3, 4, shape).astype(self.program.dtype)
        for n, last in enumerate(buffer.trees):
            absent = [m for m, point in enumerate(self.points[last]) if point is None]
            values[(slice(None),) * n + (absent,)] = np.nan
        return values
