# SPDX-License-Identifier: Apache-2.0
"""The loops of one contraction: sparse operands drive where they may, others are looked up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from sparsetir.notation.operands import Layout
from sparsetir.notation.semiring import USUAL, Semiring


@dataclass(frozen=True)
class Operand:
    """One operand of a contraction.

    Parameters
    ----------
    letters : str
    layout : Layout, optional
        None for a dense one.
    given : str
        The letters of what is passed, where one occurs twice: the operand is a diagonal of that.
    """

    letters: str
    layout: Layout | None = None
    given: str = ""

    @property
    def path(self) -> str:
        """The letters in the order in which they are stored."""
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
        The operand over whose stored coordinates it runs; None: over all coordinates.
    depth : int
        The level of that operand.
    under : str
        The letter below whose coordinate the level is attached, where that is not its own parent's.
    assembled : bool
        Whether it runs over the coordinates that the program computes.
    others : tuple of Loop
        Levels of other operands, which must store the coordinate as well.
    """

    letter: str
    owner: int | None = None
    depth: int = 0
    under: str = ""
    assembled: bool = False
    others: tuple[Loop, ...] = ()

    @property
    def owners(self) -> list[int | None]:
        """The operands over whose coordinates it runs."""
        return [self.owner, *(other.owner for other in self.others)]


@dataclass(frozen=True)
class Nest:
    """One contraction.

    Parameters
    ----------
    operands : tuple of Operand
    output : str
        The letters of the result; in the order of the operand `pattern` where the result has its pattern.
    pattern : int, optional
        The operand whose pattern, or that of whose first levels, the result has; None: a dense result.
    ring : Semiring
    dtype, idtype : str
    assembled : bool
        Whether the program computes the pattern of the result: rows of the first letter, coordinates of the others.
    walk : str
        The letters in the order of the loops, where these go down the trees of all sparse operands together.
    is_rootless : bool
        Whether the coordinates of the first letter are computed, too.
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

    @property
    def made(self) -> str:
        """The letters whose coordinates the program computes."""
        return "" if not self.assembled else self.output if self.is_rootless else self.output[1:]

    @property
    def letters(self) -> str:
        return "".join(dict.fromkeys("".join(o.letters for o in self.operands)))

    @property
    def drives(self) -> bool:
        """Whether loops may run over stored coordinates only."""
        return self.ring.skips(self.dtype, len(self.operands))

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops from the outermost to the innermost."""
        found: dict[str, Loop] = {}
        if self.walk:
            for letter in self.walk:
                found[letter] = self._met(letter, found)
            return tuple(found.values())
        if self.drives or self.pattern is not None:
            for at in self._drivers():
                for loop in self._driven(at, found):
                    found[loop.letter] = loop
        rest = [letter for letter in self.letters if letter not in found and letter not in self.made]
        for letter in sorted(rest, key=lambda c: c not in self.output):
            found[letter] = Loop(letter)
        return (*found.values(), *(Loop(letter, assembled=True) for letter in self.made))

    def _met(self, letter: str, found: dict[str, Loop]) -> Loop:
        """The loop over the coordinates that all sparse operands with a letter store."""
        levels = []
        for at, operand in enumerate(self.operands):
            if operand.layout is None or letter not in operand.path:
                continue
            depth = operand.path.index(letter)
            if operand.layout.levels[depth].kind != "dense":
                under = operand.path[0] if self._is_attached(operand, depth, found) else ""
                levels.append(Loop(letter, at, depth, under))
        return replace(levels[0], others=tuple(levels[1:])) if levels else Loop(letter)

    def _drivers(self) -> list[int]:
        """The sparse operands: that of the pattern first, then those whose first loop is one of the result."""
        sparse = [n for n, o in enumerate(self.operands) if o.layout is not None]
        if not self.drives:
            return [self.pattern] if self.pattern is not None else []
        return sorted(sparse, key=lambda n: (n != self.pattern, self.operands[n].path[0] not in self.output))

    def _driven(self, at: int, found: dict[str, Loop]) -> Iterator[Loop]:
        """Loops over the levels of one operand, up to the first whose coordinate is known already."""
        operand = self.operands[at]
        assert operand.layout is not None
        held: set[str] = set()
        for depth, (letter, level) in enumerate(zip(operand.path, operand.layout.levels, strict=True)):
            is_root = depth == 0 and level.kind == "dense"
            if letter in held or (letter in found and not is_root) or letter in self.made:
                return
            held.add(letter)
            if letter not in found:
                under = operand.path[0] if self._is_attached(operand, depth, found) else ""
                yield Loop(letter, None if is_root else at, depth, under)

    def _is_attached(self, operand: Operand, depth: int, found: dict[str, Loop]) -> bool:
        """Whether a level's parent is a dense root whose coordinate another operand gives."""
        assert operand.layout is not None
        if depth != 1 or operand.layout.levels[0].kind != "dense":
            return False
        root = found.get(operand.path[0])
        return root is not None and root.owner is not None

    def is_direct(self, at: int) -> bool:
        """Whether each stored element of an operand is met by its position."""
        operand, owned = self.operands[at], {loop.letter for loop in self.loops if at in loop.owners}
        if operand.layout is None:
            return True
        root = operand.path[0] if operand.layout.levels[0].kind == "dense" else ""
        return all(letter in owned or letter == root for letter in operand.path)


__all__ = ["Loop", "Nest", "Operand"]
