# SPDX-License-Identifier: Apache-2.0
"""Emission of the stage-I program of one contraction: loop structure, program text, and loops over stored coordinates.

Contractions that compute the pattern of their result: loops over what all sparse operands of a letter store.

The loops over stored coordinates traverse the trees of the operands together, each stored in the order of the loops.
The first letter of the result has all coordinates, so that rows are partitioned among threads; if a vector has that
letter, the whole pattern is one row instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from sparsetir.einsum.operands import Layout, StorageLevel, rows
from sparsetir.einsum.subscripts import USUAL, Semiring, literal
from sparsetir.ir.halves import by_three_products
from sparsetir.script.printer import parse
from sparsetir.script.writer import Names, ProgramWriter
from sparsetir.utils.caches import cached_property, remember

# The loops of one contraction: sparse operands drive where possible, others are searched.


@dataclass(frozen=True)
class Operand:
    """Operand of a contraction.

    Parameters
    ----------
    letters : str
    layout : Layout, optional
        None for a dense operand.
    given : str
        The letters of the argument if one occurs twice: the operand is a diagonal of it.
    """

    letters: str
    layout: Layout | None = None
    given: str = ""

    @property
    def path(self) -> str:
        """The letters in storage order."""
        if self.layout is None:
            return self.letters
        return "".join(self.letters[d] for d in self.layout.order)


@dataclass(frozen=True)
class Loop:
    """One loop.

    Parameters
    ----------
    letter : str
    owner : int, optional
        The operand whose stored coordinates it iterates over; None: all coordinates.
    depth : int
        The level of that operand.
    under : str
        The letter whose loop the level is attached below, if that is not its own parent's.
    assembled : bool
        Whether it iterates over the coordinates that the program computes.
    others : tuple of Loop
        Levels of other operands that must store the coordinate as well.
    """

    letter: str
    owner: int | None = None
    depth: int = 0
    under: str = ""
    assembled: bool = False
    others: tuple[Loop, ...] = ()

    @property
    def owners(self) -> list[int | None]:
        """The operands whose coordinates the loop iterates over."""
        return [self.owner, *(other.owner for other in self.others)]


@dataclass(frozen=True)
class ContractionNest:
    """One contraction.

    Parameters
    ----------
    operands : tuple of Operand
    output : str
        The letters of the result; in the order of the operand `pattern` if the result has its pattern.
    pattern : int, optional
        The operand whose pattern, or that of whose first levels, the result has; None: a dense result.
    ring : Semiring
    dtype, idtype : str
    assembled : bool
        Whether the program computes the pattern of the result: rows of the first letter, coordinates of the others.
    walk : str
        The letters in loop order, if the loops traverse the trees of all sparse operands together.
    is_rootless : bool
        Whether the coordinates of the first letter are computed, too.
    in_parts : bool
        Whether float32 products are computed by three products of bfloat16 numbers.
    """

    operands: tuple[Operand, ...]
    output: str
    pattern: int | None = None
    ring: Semiring = USUAL
    dtype: str = "float32"
    idtype: str = "int32"
    assembled: bool = False
    walk: str = ""
    is_rootless: bool = False
    in_parts: bool = False

    @property
    def made(self) -> str:
        """The letters whose coordinates the program computes."""
        return "" if not self.assembled else self.output if self.is_rootless else self.output[1:]

    @property
    def letters(self) -> str:
        return "".join(dict.fromkeys("".join(o.letters for o in self.operands)))

    @property
    def drives(self) -> bool:
        """True if loops may iterate over stored coordinates only."""
        return self.ring.skips(self.dtype, len(self.operands))

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops from the outermost to the innermost."""
        by_letter: dict[str, Loop] = {}
        if self.walk:
            for letter in self.walk:
                by_letter[letter] = self._met(letter, by_letter)
            return tuple(by_letter.values())
        if self.drives or self.pattern is not None:
            for at in self._drivers():
                for loop in self._driven(at, by_letter):
                    by_letter[loop.letter] = loop
        remaining = [letter for letter in self.letters if letter not in by_letter and letter not in self.made]
        for letter in sorted(remaining, key=lambda c: c not in self.output):
            by_letter[letter] = Loop(letter)
        return (*by_letter.values(), *(Loop(letter, assembled=True) for letter in self.made))

    @cached_property
    def in_vectors(self) -> ContractionNest:
        """The contraction with vectors over the letters of dense operands where it adds to stored coordinates.

        A dense result that is added to at coordinates of sparse operands has the letters of dense operands alone last,
        and so have these operands: then each stored entry adds one contiguous vector to another. Otherwise an element
        of each of many rows is added to, from another row each. Where the result has no such letters, those that are
        summed come last in the operands.
        """
        places = {loop.letter for loop in self.loops if loop.owner is not None}
        sparse = {letter for operand in self.operands if operand.layout is not None for letter in operand.letters}
        alone = "".join(letter for letter in self.output if letter not in sparse)
        alone = alone or "".join(letter for letter in self.letters if letter not in sparse)
        if self.pattern is not None or self.assembled or not alone or not places & set(self.output):
            return self
        operands = tuple(
            replace(operand, letters=_last(operand.letters, alone)) if operand.layout is None else operand
            for operand in self.operands
        )
        return replace(self, operands=operands, output=_last(self.output, alone))

    def _met(self, letter: str, by_letter: dict[str, Loop]) -> Loop:
        """Return the loop over the coordinates that all sparse operands with a letter store."""
        levels = []
        for at, operand in enumerate(self.operands):
            if operand.layout is None or letter not in operand.path:
                continue
            depth = operand.path.index(letter)
            if operand.layout.levels[depth].kind != "dense":
                under = operand.path[0] if self._is_attached(operand, depth, by_letter) else ""
                levels.append(Loop(letter, at, depth, under))
        return replace(levels[0], others=tuple(levels[1:])) if levels else Loop(letter)

    def _drivers(self) -> list[int]:
        """Return the sparse operands: that of the pattern first, then those whose first loop is one of the result."""
        sparse = [n for n, o in enumerate(self.operands) if o.layout is not None]
        if not self.drives:
            return [self.pattern] if self.pattern is not None else []
        return sorted(sparse, key=lambda n: (n != self.pattern, self.operands[n].path[0] not in self.output))

    def _driven(self, at: int, by_letter: dict[str, Loop]) -> Iterator[Loop]:
        """Yield loops over the levels of one operand, up to the first whose coordinate is already bound."""
        operand = self.operands[at]
        assert operand.layout is not None
        visited: set[str] = set()
        for depth, (letter, level) in enumerate(zip(operand.path, operand.layout.levels, strict=True)):
            is_root = depth == 0 and level.kind == "dense"
            if letter in visited or (letter in by_letter and not is_root) or letter in self.made:
                return
            visited.add(letter)
            if letter not in by_letter:
                under = operand.path[0] if self._is_attached(operand, depth, by_letter) else ""
                yield Loop(letter, None if is_root else at, depth, under)

    def _is_attached(self, operand: Operand, depth: int, by_letter: dict[str, Loop]) -> bool:
        """Return whether a level's parent is a dense root whose coordinate another operand gives."""
        assert operand.layout is not None
        if depth != 1 or operand.layout.levels[0].kind != "dense":
            return False
        root = by_letter.get(operand.path[0])
        return root is not None and root.owner is not None

    def is_direct(self, at: int) -> bool:
        """Return whether each stored element of an operand is accessed by its position, without a search."""
        operand, owned = self.operands[at], {loop.letter for loop in self.loops if at in loop.owners}
        if operand.layout is None:
            return True
        if len(set(operand.path)) < len(operand.path):
            return False  # an element of a diagonal is searched in its row
        root = operand.path[0] if operand.layout.levels[0].kind == "dense" else ""
        return all(letter in owned or letter == root for letter in operand.path)


def _last(letters: str, moved: str) -> str:
    """Return the letters in their order, but those that are moved at the end."""
    return "".join(c for c in letters if c not in moved) + "".join(c for c in moved if c in letters)


# Text of the stage-I program of one contraction, in the form of hand-written programs.


BUFFERS = "ABCDEFGHXYZUVWPQRS"


@dataclass(frozen=True)
class EmittedProgram:
    """A program and the names of its parameters.

    Parameters
    ----------
    func : PrimFunc
    buffers : tuple of str
        One for each operand.
    result : str
    values : tuple of str
        The parameters that hold the values of operands.
    arrays : tuple of dict
        For each sparse operand, the parameters of its index arrays: from depth to the names of indptr and indices, ""
        for an array that does not exist.
    sizes : dict of str to str
        The size of each letter.
    """

    func: tirx.PrimFunc
    buffers: tuple[str, ...]
    result: str
    values: tuple[str, ...]
    arrays: tuple[dict[int, tuple[str, str]], ...]
    sizes: dict[str, str]


class _ContractionWriter(ProgramWriter):
    """Writer of one program."""

    def __init__(self, nest: ContractionNest, name: str) -> None:
        super().__init__(name)
        self.nest, self.names = nest, Names()
        self.arrays: list[dict[int, tuple[str, str]]] = [{} for _ in nest.operands]
        self.axis: dict[tuple[int, int], str] = {}  # of a level of an operand
        self.dense_axis: dict[str, str] = {}  # of a letter
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
            self.dense_axis[c] = self.names.new(f"{tops[c]}_dense" if c in sparse else tops[c], f"{tops[c]}_dense")
        for (at, depth), c in self._sparse_levels().items():
            self.axis[at, depth] = self.names.new(tops[c], f"{tops[c]}_{at}")
        self.extents = {c: self.names.new(f"n_{c}") for c in letters}

    def _sparse_levels(self) -> dict[tuple[int, int], str]:
        letters = {}
        for at, operand in enumerate(self.nest.operands):
            if operand.layout is None:
                continue
            for depth, (level, c) in enumerate(zip(operand.layout.levels, operand.path, strict=True)):
                if level.kind != "dense":
                    letters[at, depth] = c
        return letters

    def _name_buffers(self) -> None:
        free = [name for name in BUFFERS if name not in self.names.taken]
        names = [self.names.new(*free, "A") for _ in (*self.nest.operands, "")]
        self.buffers, self.result = tuple(names[:-1]), names[-1]
        self.values = tuple(self.names.new(n.lower(), f"{n.lower()}_data") for n in names)

    # -------------------------------------------------------------- declarations

    def declare(self) -> None:
        """Declare axes, then buffers."""
        self.inputs += self.values
        self.scalars(self.nest.idtype, *(self.extents[c] for c in self.nest.letters))
        used = self._dense_letters()
        for c in self.nest.letters:
            if c in used:
                self.dense(self.dense_axis[c], self.extents[c], self.nest.idtype)
        for at in range(len(self.nest.operands)):
            self._levels(at)
        above = self.dense_axis[self.nest.output[0]] if self.nest.made != self.nest.output else "None"
        for c, axis in self.made.items():
            self.lines.append(f'{axis} = T.sparse_assembled({above}, {self.extents[c]}, "{self.nest.idtype}")')
            above = axis
        if not self.nest.output or any(not o.letters for o in self.nest.operands):
            self.one = self.names.new("One")
            self.dense(self.one, 1, self.nest.idtype)
        for at, operand in enumerate(self.nest.operands):
            axes = self._axes(at) if operand.layout is not None else [self.dense_axis[c] for c in operand.letters]
            self._match(self.buffers[at], self.values[at], axes, is_sparse=operand.layout is not None)
        self._match(self.result, self.values[-1], self._result_axes())

    def _dense_letters(self) -> set[str]:
        """Return the letters for which a buffer or loop has all coordinates."""
        letters = {loop.letter for loop in self.nest.loops if loop.owner is None and not loop.assembled}
        for operand in self.nest.operands:
            if operand.layout is None:
                letters |= set(operand.letters)
            elif operand.layout.levels[0].kind == "dense":
                letters.add(operand.path[0])
        dense = set(self.nest.output) - set(self.nest.made)
        return letters | (dense if self.nest.pattern is None else set())

    def _levels(self, at: int) -> None:
        operand = self.nest.operands[at]
        if operand.layout is None:
            return
        parent = "None"
        for depth, (level, c) in enumerate(zip(operand.layout.levels, operand.path, strict=True)):
            if level.kind == "dense":
                parent = self.dense_axis[c]
                continue
            axis = self.axis[at, depth]
            self._level(at, depth, axis, parent, c)
            parent = axis

    def _array(self, role: str, axis: str) -> str:
        """Return the name of an array of an axis: its role, and the axis if several axes have arrays."""
        levels = [level for o in self.nest.operands if o.layout is not None for level in o.layout.levels]
        is_alone = sum(level.kind in ("compressed", "singleton") for level in levels) < 2
        return self.names.new(role if is_alone else f"{role}_{axis.lower()}")

    def _level(self, at: int, depth: int, axis: str, parent: str, c: str) -> None:
        """Declare the axis of a level that does not hold one position for each coordinate of its dimension."""
        operand, idtype, size = self.nest.operands[at], self.nest.idtype, self.extents[c]
        assert operand.layout is not None
        level = operand.layout.levels[depth]
        if level.kind == "full":
            above = [self.vars[c] for c in operand.path[:depth]]
            is_distinct = len({*above, "s"}) > depth
            return self.full(axis, parent, size, above if is_distinct else [f"c{n}" for n in range(depth)], idtype)
        arrays = [self._array(role, axis) for role in ("indptr", "indices")[level.kind == "singleton" :]]
        self.inputs += arrays
        self.arrays[at][depth] = (arrays[0] if len(arrays) > 1 else "", arrays[-1])
        flags = {"sorted": level.sorted, "unique": level.unique}
        if level.kind == "singleton":
            return self.singleton(axis, parent, size, arrays[0], idtype, **flags)
        nnz = self._array("nnz", axis)
        self.scalars(idtype, nnz)
        return self.compressed(axis, parent, (size, nnz), arrays, idtype, **flags)

    def _axes(self, at: int, letters: str | None = None) -> list[str]:
        """Return the axes of a sparse operand in the order of its dimensions."""
        operand = self.nest.operands[at]
        assert operand.layout is not None
        names = {}
        for depth, level in enumerate(operand.layout.levels):
            c = operand.path[depth]
            names[level.dim] = self.dense_axis[c] if level.kind == "dense" else self.axis[at, depth]
        dims = range(len(operand.letters)) if letters is None else [operand.letters.index(c) for c in letters]
        return [names[d] for d in dims]

    def _result_axes(self) -> list[str]:
        if self.nest.pattern is not None:
            return self._axes(self.nest.pattern, self.nest.output)
        return [self.made.get(c) or self.dense_axis[c] for c in self.nest.output]

    def _match(self, buffer: str, handle: str, axes: list[str], *, is_sparse: bool = False) -> None:
        fill = self.nest.ring.fill
        default = literal(fill, self.nest.dtype) if is_sparse and fill not in (0, None) else ""
        self.match(buffer, handle, axes or [self.one], self.nest.dtype, default)

    # -------------------------------------------------------------- the iteration

    def contract(self) -> None:
        """Write the loops and their body."""
        nest = self.nest
        loops = nest.loops
        target = self._access(self.result, nest.output)
        reads = [self._access(b, o.letters) for b, o in zip(self.buffers, nest.operands, strict=True)]
        product = f"{target} = {nest.ring.product(reads)}"
        if not loops:
            return self.iterate([self.one], "S", self.name, [product], variables="o")
        axes = [self._loop(loop) for loop in loops]
        kinds = "".join("S" if loop.letter in nest.output else "R" for loop in loops)
        variables = [self.vars[loop.letter] for loop in loops]
        # Sums skip steps in which a searched operand stores nothing; a plain product would multiply by its fill.
        is_direct = all(nest.is_direct(at) for at in range(len(nest.operands))) or not nest.drives
        has_pattern = (nest.pattern is not None and is_direct) or nest.assembled
        is_dense = is_direct and all(loop.owner is None for loop in loops)
        if "R" not in kinds and (has_pattern or is_dense):
            return self.iterate(axes, kinds, self.name, [product], variables=variables)
        init = f"{target} = {literal(nest.ring.identity(nest.dtype), nest.dtype)}"
        update = f"{target} = {nest.ring.body(target, reads)}"
        return self.iterate(axes, kinds, self.name, [update], init=init, variables=variables)

    def _loop(self, loop: Loop) -> str:
        if loop.assembled:
            return self.made[loop.letter]
        if loop.owner is None:
            return self.dense_axis[loop.letter]
        if loop.others:
            return f"T.intersect({', '.join(self._walked(part) for part in (loop, *loop.others))})"
        return self._walked(loop)

    def _walked(self, loop: Loop) -> str:
        """Return the axis of an operand's level, attached if its parent is not listed."""
        assert loop.owner is not None
        axis = self.axis[loop.owner, loop.depth]
        if not loop.under:
            return axis
        above = next(loop_above for loop_above in self.nest.loops if loop_above.letter == loop.under)
        return f"T.attach({axis}, {self._loop_axis(above)})"

    def _loop_axis(self, loop: Loop) -> str:
        return self.dense_axis[loop.letter] if loop.owner is None else self.axis[loop.owner, loop.depth]

    def _access(self, buffer: str, letters: str) -> str:
        return f"{buffer}[{', '.join(self.vars[c] for c in letters) or '0'}]"


@remember("programs of einsum", 256)
def program(nest: ContractionNest, name: str = "einsum") -> EmittedProgram:
    """Return the program of a contraction.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir.einsum.emit import ContractionNest, Operand
    >>> nest = ContractionNest((Operand("ik"), Operand("kj")), "ij")
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
    writer = _ContractionWriter(nest, name)
    writer.declare()
    writer.contract()
    func = parse(writer.text())
    func = by_three_products(func) if nest.in_parts else func
    return EmittedProgram(func, writer.buffers, writer.result, writer.values, tuple(writer.arrays), writer.extents)


# -------------------------------------------------------------------------- loops of computed patterns


def walked(members: Sequence[Operand], output: str, ring: Semiring, dtype: str, idtype: str) -> ContractionNest:
    """Return the contraction of sparse and dense operands into a sparse result.

    Parameters
    ----------
    members : sequence of Operand
        Repeated letters of a sparse operand denote its diagonal.
    output : str
        The letters of the result.
    ring : Semiring
        Elements that are not stored must change no result.
    dtype, idtype : str

    Examples
    --------
    >>> from sparsetir.einsum.operands import rows
    >>> from sparsetir.einsum.subscripts import USUAL
    >>> tensors = [Operand("ijk", Layout(rows(3))), Operand("ljk", Layout(rows(3)))]
    >>> nest = walked(tensors, "il", USUAL, "float32", "int32")
    >>> nest.walk, [operand.path for operand in nest.operands]
    ('ijkl', ['ijk', 'jkl'])
    """
    whole = _once(members)
    is_rootless = len(output) == 1 or any(o.layout is not None and o.letters == output[0] for o in whole)
    walk = _walk(whole, output)
    turned = _turned(whole, walk, set() if is_rootless else {output[0]})
    nest = ContractionNest(
        turned, output, None, ring, dtype, idtype, assembled=True, walk=walk, is_rootless=is_rootless
    )
    return replace(nest, operands=tuple(_matrix(nest, at) for at in range(len(turned))))


def _once(members: Sequence[Operand]) -> list[Operand]:
    """Return the operands with each letter once; `given` keeps the original letters."""
    unique = []
    for operand in members:
        once = "".join(dict.fromkeys(operand.letters))
        is_twice = operand.layout is not None and once != operand.letters
        layout = Layout(rows(len(once)), operand.layout.idtype) if is_twice and operand.layout else operand.layout
        unique.append(Operand(once, layout, operand.letters) if is_twice else operand)
    return unique


def _walk(members: Sequence[Operand], output: str) -> str:
    """Return the letters in the order of the loops.

    The next letter is the one that most operands store below known ones, since these meet there; ties are broken by the
    storage order of the operands.
    """
    sparse = [o.path for o in members if o.layout is not None]
    letters = dict.fromkeys("".join([output[0], *(o.letters for o in members)]))
    done = output[0]

    def rank(letter: str) -> tuple[bool, int, tuple[int, int]]:
        holders = [(at, path.index(letter)) for at, path in enumerate(sparse) if letter in path]
        below = [(at, depth) for at, depth in holders if set(sparse[at]) & set(done)]
        return not holders, -len(below), min(below or holders, default=(0, 0))

    while len(done) < len(letters):
        remaining = [c for c in letters if c not in done]
        following = min(remaining, key=rank)
        if rank(following)[0]:  # remaining letters have all coordinates: those of the result come first
            return done + "".join(sorted(remaining, key=lambda c: c not in output))
        done += following
    return done


def _turned(members: Sequence[Operand], walk: str, full: set[str]) -> tuple[Operand, ...]:
    """Return the operands in loop order, with all coordinates in the first level if others give the letter."""
    available = full | {c for o in members if o.layout is not None for c in _path(o, walk)[1:]}
    operands = []
    for operand in members:
        if operand.layout is None:
            operands.append(operand)
            continue
        path = _path(operand, walk)
        dims = [operand.letters.index(c) for c in path]
        is_full = len(path) > 1 and path[0] in available
        available.add(path[0])
        levels = (
            StorageLevel(dims[0], "dense" if is_full else "compressed"),
            *(StorageLevel(d, "compressed") for d in dims[1:]),
        )
        operands.append(replace(operand, layout=Layout(levels, operand.layout.idtype, held=True)))
    return tuple(operands)


def _path(operand: Operand, walk: str) -> str:
    return "".join(sorted(operand.letters, key=walk.index))


def _matrix(nest: ContractionNest, at: int) -> Operand:
    """Return a matrix with all rows in a layout of any class, unsorted if no other operand meets its entries."""
    operand = nest.operands[at]
    layout = operand.layout
    if layout is None or len(layout.levels) != 2 or layout.levels[0].kind != "dense" or operand.given:
        return operand
    meets = any(loop.letter == operand.path[1] and loop.others for loop in nest.loops)
    is_met = meets or all(c in nest.output for c in nest.letters) or not nest.ring.adds_entries
    level = replace(layout.levels[1], sorted=is_met, unique=is_met)
    return replace(operand, layout=replace(layout, levels=(layout.levels[0], level), held=False))


__all__ = ["ContractionNest", "EmittedProgram", "Loop", "Operand", "program", "walked"]
