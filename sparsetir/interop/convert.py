# SPDX-License-Identifier: Apache-2.0
"""Entries laid out by the axes trees, through sorted coordinates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, StructureError
from sparsetir.interop.levels import Array, Level, check_capacity, first_disorder, narrow


def scatter(slots: Array, values: Array, size: int) -> tuple[Array, Array | None]:
    """Add `values` to `size` zeros at `slots`; return the array, and which values met an earlier one."""
    flat, is_used = np.zeros(size, values.dtype.newbyteorder("=")), np.zeros(size, np.bool_)
    is_used[slots] = True
    if np.count_nonzero(is_used) == slots.size:
        flat[slots] = values
        return flat, None
    order = np.argsort(slots, kind="stable")
    first = _changes([slots[order]])
    flat[slots[order[first]]] = np.add.reduceat(values[order], np.flatnonzero(first)).astype(values.dtype)
    return flat, order[~first]


def _changes(arrays: Iterable[Array]) -> Array:
    """Return a mask of where an element of sorted tuples differs from the one before."""
    arrays = list(arrays)
    first = np.zeros(len(arrays[0]), np.bool_)
    first[:1] = True
    for array in arrays:
        first[1:] |= array[1:] != array[:-1]
    return first


def _sorting_order(coords: Sequence[Array], extents: Sequence[int]) -> Array | None:
    """Return the stable permutation that sorts the coordinate tuples, None if they are sorted."""
    if _are_sorted(coords):
        return None
    order = np.arange(len(coords[0]))
    for index, extent in zip(reversed(coords), reversed(extents), strict=True):
        key = index[order]
        if first_disorder(key, None, strict=False) is not None:
            order = order[_stable_argsort(key, extent)]
    return order


def _unsorted(array: Array, order: Array) -> Array:
    """Invert the indexing by `order` that produced `array`."""
    result = np.empty_like(array)
    result[order] = array
    return result


def _are_sorted(coords: Sequence[Array]) -> bool:
    tied = np.ones(max(len(coords[0]) - 1, 0), np.bool_)
    for index in coords:
        if np.any(tied & (index[1:] < index[:-1])):
            return False
        tied &= index[1:] == index[:-1]
    return True


def _stable_argsort(key: Array, extent: int) -> Array:
    if key.size < 1 << 12 or extent > 4 * key.size:
        return np.argsort(key, kind="stable")
    # one row turned into columns: scipy transposes by counting, several times faster than a comparison sort
    row = sp.csr_array((np.arange(key.size), key, np.array([0, key.size])), shape=(1, extent))
    return np.asarray(row.tocsc().data)


@dataclass
class Builder:
    """Builds the index arrays of a buffer's axes from coordinates, one tree after the other."""

    levels: Sequence[Level]
    shape: tuple[int, ...]
    name: str
    indptr: dict[int, Array] = field(default_factory=dict)
    indices: dict[int, Array] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)

    def tree(self, chain: Sequence[int], coords: Sequence[Array], keep: bool) -> tuple[Array, int]:
        """Return the position of every entry in the last axis of `chain`, and the number of positions there are.

        Parameters
        ----------
        chain : sequence of int
            Levels of the tree, root first.
        coords : sequence of ndarray
            Coordinates of the entries in these levels.
        keep : bool
            Whether entries with the same coordinates keep their own positions.
        """
        if len(chain) == 1 and self.levels[chain[0]].kind == "dense_fixed":
            return coords[0], self.shape[chain[0]]
        order = _sorting_order(coords, [self.shape[d] for d in chain])
        coords = [(c if order is None else c[order]).astype(np.int64, copy=False) for c in coords]
        first = np.ones(len(coords[0]), np.bool_) if keep else _changes(coords)
        positions, count = self.place(chain, [c[first] for c in coords])
        positions = positions[np.cumsum(first) - 1]
        return positions if order is None else _unsorted(positions, order), count

    def place(self, chain: Sequence[int], coords: list[Array]) -> tuple[Array, int]:
        """Place tuples that are sorted and, unless kept, distinct, like `tree`."""
        position, count = np.zeros(len(coords[0]), np.int64), 1
        back = None
        for depth, d in enumerate(chain):
            if first_disorder(position, None, strict=False) is not None:  # a formula may place slots in any order
                order = np.argsort(position, kind="stable")
                position, coords = position[order], [c[order] for c in coords]
                back = order if back is None else back[order]
            step: Callable[..., tuple[Array, int]] = getattr(self, self.levels[d].kind)
            position, count = step(d, position, count, coords[: depth + 1])
            check_capacity(count, self.levels[d], "the number of positions", self.name)
        return position if back is None else _unsorted(position, back), count

    def dense_fixed(self, d: int, _: Array, __: int, coords: list[Array]) -> tuple[Array, int]:
        return coords[-1], self.shape[d]

    def dense_variable(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        extents = np.zeros(count, np.int64)
        np.maximum.at(extents, position, coords[-1] + 1)
        indptr = np.concatenate([[0], np.cumsum(extents)])
        self.indptr[d] = narrow(indptr, self.levels[d], "indptr", self.name)
        return indptr[position] + coords[-1], int(indptr[-1])

    def dense_implicit(self, d: int, _: Array, __: int, coords: list[Array]) -> tuple[Array, int]:
        level, above = self.levels[d], coords[:-1]
        assert level.extent_rule is not None
        assert level.offset_rule is not None
        self._require(coords[-1] < level.extent_rule(*above), d, coords)
        parent = () if level.parent is None else (np.arange(self.shape[level.parent]),)
        if level.parent is not None and self.levels[level.parent].kind != "dense_fixed":
            parent_kind = f"its parent {self.levels[level.parent].name} is {self.levels[level.parent].kind}"
            raise ArgumentError(
                f"{self.name} cannot be converted for axis {level.name}, {parent_kind}: pass its arrays by name"
            )
        ends = np.asarray(level.offset_rule(*parent) + level.extent_rule(*parent))
        return level.offset_rule(*above) + coords[-1], int(ends.max(initial=0))

    def sparse_variable(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        if self.levels[d].rule is not None:
            axis = f"axis {self.levels[d].name}, whose indices are a formula"
            raise ArgumentError(f"{self.name} cannot be converted for {axis}: pass its arrays by name")
        parents, coordinates, node = self._nodes(position, coords[-1], self.levels[d].unique)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(parents, minlength=count))])
        self.indptr[d] = narrow(indptr, self.levels[d], "indptr", self.name)
        self.indices[d] = narrow(coordinates, self.levels[d], "indices", self.name)
        return node, len(coordinates)

    def sparse_fixed(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        if self.levels[d].rule is not None:
            return self._by_rule(d, position, count, coords)
        parents, coordinates, node = self._nodes(position, coords[-1], self.levels[d].unique)
        sizes = np.bincount(parents, minlength=count)
        width = self._width(d, sizes)
        rank = np.arange(len(coordinates)) - (np.cumsum(sizes) - sizes)[parents]
        self.widths[d] = width
        self._fill(d, count * width, parents * width + rank, coordinates)
        return (parents * width + rank)[node], count * width

    def singleton(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        if self.levels[d].rule is not None:
            return self._by_rule(d, position, count, coords)
        parents, coordinates, _ = self._nodes(position, coords[-1], True)
        bad = first_disorder(parents, None, strict=True)
        if bad is not None:
            clash = f"{coordinates[bad - 1]} and {coordinates[bad]} below the same position {parents[bad]}"
            raise StructureError(
                f"axis {self.levels[d].name} of {self.name} is a singleton but would hold coordinates {clash}"
            )
        self._fill(d, count, parents, coordinates)
        return position, count

    def _nodes(self, position: Array, index: Array, unique: bool) -> tuple[Array, Array, Array]:
        """Return the parent position and coordinate of each stored position, and the stored position of each tuple."""
        first = _changes([position, index]) if unique else np.ones(len(index), np.bool_)
        return position[first], index[first], np.cumsum(first) - 1

    def _fill(self, d: int, count: int, slots: Array, coordinates: Array) -> None:
        """Mark unused slots absent by the first coordinate out of range."""
        indices = np.full(count, self.shape[d], np.int64)
        indices[slots] = coordinates
        self.indices[d] = narrow(indices, self.levels[d], "indices", self.name)

    def _width(self, d: int, sizes: Array) -> int:
        level, longest = self.levels[d], int(sizes.max(initial=0))
        if level.width is None:
            return max(longest, 1)
        if longest > level.width:
            fault = f"row {int(sizes.argmax())} of {self.name} holds {longest} entries"
            raise StructureError(
                f"{fault} but axis {level.name} has {level.width} slots per row: raise its width or leave it open"
            )
        return level.width

    def _by_rule(self, d: int, position: Array, count: int, coords: list[Array]) -> tuple[Array, int]:
        """Find the slots by trying each on all entries at once."""
        level, width = self.levels[d], 1
        assert level.rule is not None
        if level.kind == "sparse_fixed":
            if level.width is None:
                axis = f"axis {level.name}, whose indices are a formula"
                raise ArgumentError(f"{self.name} needs the width of {axis}: pass that size by name")
            width = self.widths[d] = level.width
        slot = np.full(len(position), -1)
        for s in reversed(range(width)):
            slot[level.rule(*coords[:-1], s, position * width + s) == coords[-1]] = s
        self._require(slot >= 0, d, coords)
        return position * width + slot, count * width

    def _require(self, inside: Array, d: int, coords: list[Array]) -> None:
        inside = np.broadcast_to(inside, coords[-1].shape)
        if inside.all():
            return
        where = ", ".join(str(int(c[int(inside.argmin())])) for c in coords)
        raise StructureError(
            f"entry ({where}) of {self.name} lies outside the pattern that axis {self.levels[d].name} has by formula"
        )
