# SPDX-License-Identifier: Apache-2.0
"""The stage-I program of one contraction, as a person would write it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx

from sparsetir.caches import remember
from sparsetir.notation.nest import Loop, Nest
from sparsetir.notation.semiring import literal
from sparsetir.script.printer import parse

BUFFERS = "ABCDEFGHXYZUVWPQRS"
RESERVED = {"T"}  # what programs call the dialect


@dataclass
class Names:
    """The names of a program; each is given once."""

    taken: set[str] = field(default_factory=lambda: set(RESERVED))

    def new(self, *wanted: str) -> str:
        """The first of some names that is free, or the last with a number."""
        for name in wanted:
            if name not in self.taken:
                break
        else:
            name = next(f"{wanted[-1]}_{n}" for n in range(1, 1000) if f"{wanted[-1]}_{n}" not in self.taken)
        self.taken.add(name)
        return name


@dataclass(frozen=True)
class Program:
    """A program and what its parameters are called.

    Parameters
    ----------
    func : PrimFunc
    buffers : tuple of str
        One for each operand.
    result : str
    values : tuple of str
        The parameters that hold the values of operands.
    arrays : tuple of dict
        Of each sparse operand, the parameters of its index arrays: of a depth, those of indptr and indices, "" where
        there is none.
    sizes : dict of str to str
        The size of each letter.
    """

    func: tirx.PrimFunc
    buffers: tuple[str, ...]
    result: str
    values: tuple[str, ...]
    arrays: tuple[dict[int, tuple[str, str]], ...]
    sizes: dict[str, str]


class _Writer:
    """Writes one program."""

    def __init__(self, nest: Nest, name: str) -> None:
        self.nest, self.name, self.names = nest, name, Names()
        self.handles: list[str] = []
        self.scalars: list[str] = []
        self.lines: list[str] = []
        self.arrays: list[dict[int, tuple[str, str]]] = [{} for _ in nest.operands]
        self.axis: dict[tuple[int, int], str] = {}  # of a level of an operand
        self.dense: dict[str, str] = {}  # the dense axis of a letter
        self._name_letters()
        self._name_buffers()

    # -------------------------------------------------------------- names

    def _name_letters(self) -> None:
        letters = self.nest.letters
        self.vars = {c: self.names.new(c) for c in letters}
        sparse = set(self._sparse_levels().values())
        tops = {c: c.upper() if c.upper() != c else f"{c}_axis" for c in letters}
        self.made = {c: self.names.new(tops[c]) for c in self.nest.made}
        for c in letters:
            self.dense[c] = self.names.new(f"{tops[c]}_dense" if c in sparse else tops[c], f"{tops[c]}_dense")
        for (at, depth), c in self._sparse_levels().items():
            self.axis[at, depth] = self.names.new(tops[c], f"{tops[c]}_{at}")
        self.sizes = {c: self.names.new(f"n_{c}") for c in letters}

    def _sparse_levels(self) -> dict[tuple[int, int], str]:
        found = {}
        for at, operand in enumerate(self.nest.operands):
            if operand.layout is None:
                continue
            for depth, (level, c) in enumerate(zip(operand.layout.levels, operand.path, strict=True)):
                if level.kind != "dense":
                    found[at, depth] = c
        return found

    def _name_buffers(self) -> None:
        free = [name for name in BUFFERS if name not in self.names.taken]
        made = [self.names.new(*free, "A") for _ in (*self.nest.operands, "")]
        self.buffers, self.result = tuple(made[:-1]), made[-1]
        self.values = tuple(self.names.new(n.lower(), f"{n.lower()}_data") for n in made)

    # -------------------------------------------------------------- declarations

    def declare(self) -> None:
        """Axes, then buffers."""
        self.handles += self.values
        used = self._dense_letters()
        for c in self.nest.letters:
            if c in used:
                self.lines.append(f"{self.dense[c]} = T.dense_fixed({self.sizes[c]}{self._idtype})")
        for at in range(len(self.nest.operands)):
            self._levels(at)
        above = self.dense[self.nest.output[0]] if self.nest.made != self.nest.output else "None"
        for c, made in self.made.items():
            self.lines.append(f"{made} = T.sparse_assembled({above}, {self.sizes[c]}{self._idtype})")
            above = made
        if self._has_scalars():
            self.one = self.names.new("One")
            self.lines.append(f"{self.one} = T.dense_fixed(1{self._idtype})")
        self.scalars[:0] = [self.sizes[c] for c in self.nest.letters]
        for at, operand in enumerate(self.nest.operands):
            axes = self._axes(at) if operand.layout is not None else [self.dense[c] for c in operand.letters]
            self._match(self.buffers[at], self.values[at], axes, is_sparse=operand.layout is not None)
        self._match(self.result, self.values[-1], self._result_axes())

    @property
    def _idtype(self) -> str:
        return ', "int64"' if self.nest.idtype == "int64" else ""

    def _has_scalars(self) -> bool:
        return not self.nest.output or any(not o.letters for o in self.nest.operands)

    def _dense_letters(self) -> set[str]:
        """Letters of which some buffer or loop has all coordinates."""
        found = {loop.letter for loop in self.nest.loops if loop.owner is None and not loop.assembled}
        for operand in self.nest.operands:
            if operand.layout is None:
                found |= set(operand.letters)
            elif operand.layout.levels[0].kind == "dense":
                found.add(operand.path[0])
        dense = set(self.nest.output) - set(self.nest.made)
        return found | (dense if self.nest.pattern is None else set())

    def _levels(self, at: int) -> None:
        operand = self.nest.operands[at]
        if operand.layout is None:
            return
        parent = "None"
        for depth, (level, c) in enumerate(zip(operand.layout.levels, operand.path, strict=True)):
            if level.kind == "dense":
                parent = self.dense[c]
                continue
            axis = self.axis[at, depth]
            call = getattr(self, f"_{level.kind}")(at, depth, axis, parent, c)
            flags = "".join(f", {f}=False" for f in ("sorted", "unique") if not getattr(level, f))
            self.lines.append(f"{axis} = T.{call}{'' if level.kind == 'full' else flags})")
            parent = axis

    def _suffix(self, at: int, axis: str) -> str:
        return axis.lower() if len(self._array_levels()) > 1 else ""

    def _array_levels(self) -> list[tuple[int, int]]:
        kinds = ("compressed", "singleton")
        layouts = [o.layout.levels if o.layout is not None else () for o in self.nest.operands]
        return [(at, d) for at, levels in enumerate(layouts) for d, level in enumerate(levels) if level.kind in kinds]

    def _array(self, what: str, at: int, axis: str) -> str:
        suffix = self._suffix(at, axis)
        name = self.names.new(f"{what}_{suffix}" if suffix else what)
        return name

    def _compressed(self, at: int, depth: int, axis: str, parent: str, c: str) -> str:
        indptr, indices = self._array("indptr", at, axis), self._array("indices", at, axis)
        nnz = self._array("nnz", at, axis)
        self.handles += [indptr, indices]
        self.scalars.append(nnz)
        self.arrays[at][depth] = (indptr, indices)
        return f"sparse_variable({parent}, ({self.sizes[c]}, {nnz}), ({indptr}, {indices}){self._idtype}"

    def _singleton(self, at: int, depth: int, axis: str, parent: str, c: str) -> str:
        indices = self._array("indices", at, axis)
        self.handles.append(indices)
        self.arrays[at][depth] = ("", indices)
        return f"singleton({parent}, {self.sizes[c]}, {indices}{self._idtype}"

    def _full(self, at: int, depth: int, axis: str, parent: str, c: str) -> str:
        layout = self.nest.operands[at].layout
        assert layout is not None
        above = [self.vars[c] for c in self.nest.operands[at].path[:depth]]
        if len({*above, "s"}) <= depth:
            above = [f"c{n}" for n in range(depth)]
        size = self.sizes[c]
        return f"sparse_fixed({parent}, ({size}, {size}), lambda {', '.join([*above, 's'])}: s{self._idtype}, full=True"

    def _axes(self, at: int, letters: str | None = None) -> list[str]:
        """The axes of a sparse operand in the order of its dimensions."""
        operand = self.nest.operands[at]
        assert operand.layout is not None
        names = {}
        for depth, level in enumerate(operand.layout.levels):
            c = operand.path[depth]
            names[level.dim] = self.dense[c] if level.kind == "dense" else self.axis[at, depth]
        held = range(len(operand.letters)) if letters is None else [operand.letters.index(c) for c in letters]
        return [names[d] for d in held]

    def _result_axes(self) -> list[str]:
        if self.nest.pattern is not None:
            return self._axes(self.nest.pattern, self.nest.output)
        return [self.made.get(c) or self.dense[c] for c in self.nest.output]

    def _match(self, buffer: str, handle: str, axes: list[str], *, is_sparse: bool = False) -> None:
        held = ", ".join(axes or [self.one]) + ("," if len(axes) < 2 else "")
        fill = self.nest.ring.fill
        default = f", default_value={literal(fill, self.nest.dtype)}" if is_sparse and fill != 0 else ""
        self.lines.append(f'{buffer} = T.match_sparse_buffer({handle}, ({held}), "{self.nest.dtype}"{default})')

    # -------------------------------------------------------------- the iteration

    def iterate(self) -> None:
        """The loops and their body."""
        nest = self.nest
        loops = nest.loops
        target = self._access(self.result, nest.output)
        reads = [self._access(b, o.letters) for b, o in zip(self.buffers, nest.operands, strict=True)]
        if not loops:
            self.lines.append(f'with T.sp_iter([{self.one}], "S", "{self.name}") as [o]:')
            self.lines.append(f"    {target} = {nest.ring.product(reads)}")
            return
        axes = ", ".join(self._loop(loop) for loop in loops)
        kinds = "".join("S" if loop.letter in nest.output else "R" for loop in loops)
        named = ", ".join(self.vars[loop.letter] for loop in loops)
        self.lines.append(f'with T.sp_iter([{axes}], "{kinds}", "{self.name}") as [{named}]:')
        has_pattern = nest.pattern is not None or nest.assembled
        if "R" not in kinds and (has_pattern or all(loop.owner is None for loop in loops)):
            self.lines.append(f"    {target} = {nest.ring.product(reads)}")
            return
        identity = literal(nest.ring.identity(nest.dtype), nest.dtype)
        self.lines.append("    with T.init():")
        self.lines.append(f"        {target} = {identity}")
        self.lines.append(f"    {target} = {nest.ring.body(target, reads)}")

    def _loop(self, loop: Loop) -> str:
        if loop.assembled:
            return self.made[loop.letter]
        if loop.owner is None:
            return self.dense[loop.letter]
        if loop.others:
            return f"T.intersect({', '.join(self._walked(part) for part in (loop, *loop.others))})"
        return self._walked(loop)

    def _walked(self, loop: Loop) -> str:
        """A level of an operand, attached where its parent is not listed."""
        assert loop.owner is not None
        axis = self.axis[loop.owner, loop.depth]
        if not loop.under:
            return axis
        above = next(other for other in self.nest.loops if other.letter == loop.under)
        return f"T.attach({axis}, {self._loop_axis(above)})"

    def _loop_axis(self, loop: Loop) -> str:
        return self.dense[loop.letter] if loop.owner is None else self.axis[loop.owner, loop.depth]

    def _access(self, buffer: str, letters: str) -> str:
        return f"{buffer}[{', '.join(self.vars[c] for c in letters) or '0'}]"

    def text(self) -> str:
        self.declare()
        self.iterate()
        size = f"T.{self.nest.idtype}"
        params = [f"{h}: T.handle" for h in self.handles] + [f"{s}: {size}" for s in self.scalars]
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"@T.prim_func\ndef {self.name}({', '.join(params)}):\n{body}\n"


@remember("programs of einsum", 256)
def program(nest: Nest, name: str = "einsum") -> Program:
    """The program of a contraction.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir.notation.nest import Nest, Operand
    >>> nest = Nest((Operand("ik"), Operand("kj")), "ij")
    >>> print(sparsetir.script(program(nest, "matmul").func).strip())
    # from tvm.script import sparsetir as T
    <BLANKLINE>
    @T.prim_func
    def matmul(a: T.handle, b: T.handle, c: T.handle, n_i: T.int32, n_k: T.int32, n_j: T.int32):
        I = T.dense_fixed(n_i)
        K = T.dense_fixed(n_k)
        J = T.dense_fixed(n_j)
        A = T.match_sparse_buffer(a, (I, K), "float32")
        B = T.match_sparse_buffer(b, (K, J), "float32")
        C = T.match_sparse_buffer(c, (I, J), "float32")
        with T.sp_iter([I, J, K], "SSR", "matmul") as [i, j, k]:
            with T.init():
                C[i, j] = T.float32(0.0)
            C[i, j] = C[i, j] + A[i, k] * B[k, j]
    """
    writer = _Writer(nest, name)
    text = writer.text()
    arrays = tuple(writer.arrays)
    return Program(parse(text), writer.buffers, writer.result, writer.values, arrays, writer.sizes)


__all__ = ["Program", "program"]
