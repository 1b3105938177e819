# SPDX-License-Identifier: Apache-2.0
"""Classes of programs that are known to go wrong, each until its cause is mended: they are drawn and left out."""

from __future__ import annotations

from collections.abc import Callable

from drawing import Axis
from fuzzing.program import Iteration, Program, Store, reads
from fuzzing.recipe import Recipe, structure


def decomposed(program: Program, recipe: Recipe) -> set[Axis]:
    """The axes that are stored in other formats."""
    leaves = {structure(b) for b in program.buffers if b.name in (recipe.formats or {})}
    return {axis for leaf in leaves for axis in leaf.chain}


def touched(program: Program, recipe: Recipe) -> list[Iteration]:
    """The iterations over axes that are stored in other formats."""
    changed = decomposed(program, recipe)
    return [it for it in program.every_iteration if changed & set(it.axes)]


def repeats(program: Program, recipe: Recipe) -> bool:
    return any(not axis.unique for axis in decomposed(program, recipe))


def starts(program: Program, recipe: Recipe) -> bool:
    return any(it.init and any(a.kind != "dense_fixed" for a in it.letter("S")) for it in touched(program, recipe))


def nests(program: Program, recipe: Recipe) -> bool:
    return any(len(list(it.nested())) > 1 for it in touched(program, recipe))


def replaces(program: Program, recipe: Recipe) -> bool:
    return any(not is_map(it, s) for it in touched(program, recipe) for s in it.body if isinstance(s, Store))


def is_map(it: Iteration, store: Store) -> bool:
    """Whether a store combines with what was there, or no two points store to the same place."""
    combines = any(r[1:] == (store.buffer, store.subscripts) for r in reads(store.value))
    return combines or {("var", a) for a in it.axes} <= set(store.subscripts)


def initialises_repeated(program: Program, recipe: Recipe) -> bool:
    return any(not a.unique for it in program.every_iteration for s in it.init for a in s.buffer.axes)


KNOWN: dict[str, Callable[[Program, Recipe], bool]] = {
    "coordinates that repeat, initialised": initialises_repeated,
    "nested iterations": lambda program, _: any(len(list(it.nested())) > 1 for it in program.iterations),
    "a format: coordinates that repeat": repeats,
    "a format: an initialisation over sparse axes": starts,
    "a format: a body with an iteration": nests,
    "a format: a store that replaces what other points stored": replaces,
}


def is_known(program: Program, recipe: Recipe) -> str | None:
    """The name of the class a case belongs to, if any."""
    return next((name for name, belongs in KNOWN.items() if belongs(program, recipe)), None)


__all__ = ["KNOWN", "is_known"]
