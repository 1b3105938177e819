# SPDX-License-Identifier: Apache-2.0
"""How the dimensions of an argument meet the axes of a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.interop.levels import Array, Level
from sparsetir.interop.sources import Source


@dataclass(frozen=True)
class Fit:
    """The shape of an argument in the buffer's axes; ``blocks`` if it was cut into blocks for that."""

    shape: tuple[int, ...]
    blocks: tuple[int, ...] = ()

    def coords(self, source: Source) -> tuple[Array, ...]:
        """Coordinates of the entries in the buffer's axes."""
        coords = source.coords()
        if self.blocks:
            (i, j), (rows, cols) = coords, self.blocks
            return i // rows, j // cols, i % rows, j % cols
        missing = len(self.shape) - len(coords)
        return (np.zeros(source.values.size, np.int32),) * missing + coords


def fit_axes(source: Source, levels: Sequence[Level], name: str) -> Fit:
    missing = len(levels) - len(source.shape)
    if missing == 0:
        fit = Fit(source.shape)
    elif _is_blocked(source, levels):
        fit = _fit_blocks(source, levels, name)
    elif missing > 0 and all(level.length == 1 for level in levels[:missing]):
        fit = Fit((1,) * missing + source.shape)
    else:
        axes = ", ".join(level.name for level in levels)
        raise ArgumentError(f"{name} has shape {source.shape} but the buffer has {len(levels)} axes ({axes})")
    for level, extent in zip(levels, fit.shape, strict=True):
        if level.length is not None and level.length != extent:
            raise ArgumentError(f"axis {level.name} has length {level.length} but {name} has {extent} there")
    return fit


def _is_blocked(source: Source, levels: Sequence[Level]) -> bool:
    if len(source.shape) != 2 or len(levels) != 4 or all(level.length == 1 for level in levels[:2]):
        return False
    return all(level.kind == "dense_fixed" for level in levels[2:])


def _fit_blocks(source: Source, levels: Sequence[Level], name: str) -> Fit:
    blocks = tuple(
        b if level.length is None else level.length for level, b in zip(levels[2:], source.block or (0, 0), strict=True)
    )
    if 0 in blocks:
        axes = " and ".join(level.name for level in levels[2:])
        raise ArgumentError(
            f"the block size of {name} is not known: pass {name}.tobsr((rows, columns)) or the lengths of {axes}"
        )
    if any(n % b for n, b in zip(source.shape, blocks, strict=True)):
        padded = " x ".join(str(-(-n // b) * b) for n, b in zip(source.shape, blocks, strict=True))
        shape, block = (" x ".join(map(str, s)) for s in (source.shape, blocks))
        raise ArgumentError(f"{name} is {shape}, which blocks of {block} do not divide: pad it to {padded}")
    return Fit((*(n // b for n, b in zip(source.shape, blocks, strict=True)), *blocks), blocks)


def tree_indices(levels: Sequence[Level]) -> list[tuple[int, ...]]:
    """The levels of each axes tree, root first, in the order of the trees' first appearance."""
    groups: dict[int, dict[int, int]] = {}
    for d in range(len(levels)):
        root, depth = d, 0
        while (parent := levels[root].parent) is not None:
            root, depth = parent, depth + 1
        groups.setdefault(root, {})[d] = depth
    return [tuple(sorted(group, key=group.__getitem__)) for group in groups.values()]
