# SPDX-License-Identifier: Apache-2.0
"""Contractions that compute the pattern of their result: loops over what all sparse operands of a letter store.

The loops over stored coordinates traverse the trees of the operands together, each stored in the order of the loops.
The first letter of the result has all coordinates, so that rows are partitioned among threads; if a vector has that
letter, the whole pattern is one row instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsetir.einsum.emit import Nest, Operand
from sparsetir.einsum.operands import Layout, Level, rows
from sparsetir.einsum.subscripts import Semiring


def walked(members: Sequence[Operand], output: str, ring: Semiring, dtype: str, idtype: str) -> Nest:
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
    nest = Nest(turned, output, None, ring, dtype, idtype, assembled=True, walk=walk, is_rootless=is_rootless)
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
        levels = (Level(dims[0], "dense" if is_full else "compressed"), *(Level(d, "compressed") for d in dims[1:]))
        operands.append(replace(operand, layout=Layout(levels, operand.layout.idtype, held=True)))
    return tuple(operands)


def _path(operand: Operand, walk: str) -> str:
    return "".join(sorted(operand.letters, key=walk.index))


def _matrix(nest: Nest, at: int) -> Operand:
    """Return a matrix with all rows in a layout of any class, unsorted if no other operand meets its entries."""
    operand = nest.operands[at]
    layout = operand.layout
    if layout is None or len(layout.levels) != 2 or layout.levels[0].kind != "dense" or operand.given:
        return operand
    meets = any(loop.letter == operand.path[1] and loop.others for loop in nest.loops)
    is_met = meets or all(c in nest.output for c in nest.letters) or not nest.ring.adds_entries
    level = replace(layout.levels[1], sorted=is_met, unique=is_met)
    return replace(operand, layout=replace(layout, levels=(layout.levels[0], level), held=False))


__all__ = ["walked"]
