# SPDX-License-Identifier: Apache-2.0
"""Sparse arguments as a buffer stores them, and back: entries laid out by the axes trees, through coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from sparsetir.errors import ArgumentError, StructureError
from sparsetir.interop.arrays import Fit, aligned_contiguous, changes, fit_axes, sorting_order, tree_indices
from sparsetir.interop.levels import (
    Array,
    Level,
    Validator,
    check_capacity,
    check_dtype,
    first_disorder,
    is_sound,
    narrow,
)
from sparsetir.interop.sources import (
    UNORDERED,
    CompressedSource,
    Coordinates,
    Source,
    is_one_fiber,
    is_torch,
    open_source,
)
from sparsetir.utils.caches import shared_cache


@dataclass(frozen=True, eq=False)
class StoredArgument:
    """A sparse argument as a buffer stores it.

    ``values`` has one dimension per axes tree, in the order in which the trees first appear among the levels; its
    extent is the number of positions of the tree's last axis. The dictionaries are keyed by level.
    ``slots`` says where in the flat values each entry of ``source`` lies (None: in order), ``repeats`` which of the
    entries were added to an earlier one.
    """

    values: Array
    indptr: dict[int, Array]
    indices: dict[int, Array]
    lengths: dict[int, int]
    widths: dict[int, int]
    source: Source
    slots: Array | None = None
    repeats: Array | None = None

    @property
    def is_borrowed(self) -> bool:
        """Whether the argument had the buffer's layout, so that nothing was reordered."""
        return self.slots is None


def store(
    value: Any,
    levels: Sequence[Level],
    *,
    name: str,
    dtype: str,
    check: bool = True,
    is_sound: Validator = is_sound,
) -> StoredArgument:
    """Lay a sparse argument out in the storage of a sparse buffer.

    Nothing is copied when the argument has the buffer's layout already: CSR, CSC and BSR (as four axes) of scipy or
    torch with sorted distinct indices, and coordinate lists for a chain of singletons. Otherwise the entries are
    sorted by the axes trees and stored again; the argument itself is never changed.

    * Index arrays of another width are converted, with a range check.
    * Entries with the same coordinates are added up, or kept apart if an axis of a one-tree buffer is not unique.
    * Entries that hold zero stay entries. Every stored diagonal of a DIA matrix counts in full.
    * Slots that a ``sparse_fixed`` or ``singleton`` axis does not need hold coordinate ``length`` and value zero.
    * A matrix for four axes (rows of blocks, columns of blocks, row in block, column in block) is cut into blocks.
    * Leading axes of length 1 that the argument lacks are added.

    Parameters
    ----------
    value : sparse object
        See `is_sparse`.
    levels : sequence of Level
        The buffer's axes in subscript order.
    name : str
        The argument, for messages.
    dtype : str
        What the values must be.
    check : bool
        False trusts the argument to be sound, sorted and free of duplicates where its layout is the buffer's.
    is_sound : callable
        Validates index arrays before `check_level` searches them for a fault: another one with the same parameters.

    Raises
    ------
    ArgumentTypeError
        When the class or the dtype is not supported.
    ArgumentError
        When the shape does not fit the axes.
    StructureError
        When the index arrays are broken or the entries do not fit the axes.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> csr = sp.csr_array(np.array([[0, 1.0], [2.0, 3.0]]))
    >>> levels = [Level("I", "dense_fixed"), Level("J", "sparse_fixed", 0)]
    >>> stored = store(csr, levels, name="A", dtype="float64")
    >>> stored.values.tolist(), stored.indices[1].tolist(), stored.widths
    ([1.0, 0.0, 2.0, 3.0], [1, 2, 0, 1], {1: 2})
    """
    source = open_source(value, name)
    check_dtype(source.values.dtype, dtype, name=name, torch=is_torch(value))
    if check:
        source.check(name, is_sound)
    fit = fit_axes(source, levels, name)
    return _borrow(source, levels, fit, name, is_sound if check else None) or _convert(source, levels, fit, name)


def restore(stored: StoredArgument, values: Array, *, copy_structure: bool = True) -> Any:
    """Return an object of the class and structure of the stored argument, holding new values.

    Parameters
    ----------
    stored : StoredArgument
        What `store` returned.
    values : ndarray
        Laid out like ``stored.values``; any dtype. Used without a copy when the layout was the argument's own.
    copy_structure : bool
        False shares the index arrays with the argument, so that changing one in place breaks the other.

    Returns
    -------
    object
        Has the argument's entries in the argument's order; of entries with the same coordinates that were added up,
        the first holds the value and the others zero.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> csc = sp.csc_array(np.array([[0, 1.0], [2.0, 3.0]]))
    >>> levels = [Level("I", "dense_fixed"), Level("J", "sparse_variable", 0)]
    >>> stored = store(csc, levels, name="A", dtype="float64")
    >>> twice = restore(stored, 2 * stored.values)
    >>> type(twice).__name__, twice.toarray().tolist()
    ('csc_array', [[0.0, 2.0], [4.0, 6.0]])
    """
    return stored.source.rebuild(entries(stored, values), copy_structure)


def entries(stored: StoredArgument, values: Array) -> Array:
    """Return values laid out like ``stored.values`` in the order and shape of the argument's own."""
    if values.size != stored.values.size:
        raise ArgumentError(f"expected {stored.values.size} values, as many as were stored, got {values.size}")
    entry_values = values.reshape(-1)
    if stored.slots is not None:
        entry_values = entry_values[stored.slots]
    if stored.repeats is not None:
        entry_values[stored.repeats] = 0
    return entry_values.reshape(stored.source.values.shape)


def with_values(value: Any, values: Array, *, name: str) -> Any:
    """Return an object of the class and structure of `value`, whose layout is the buffer's, holding new values."""
    source = open_source(value, name)
    return source.rebuild(values.reshape(source.values.shape), True)


def _borrow(
    source: Source, levels: Sequence[Level], fit: Fit, name: str, is_sound: Validator | None
) -> StoredArgument | None:
    """Return the argument's own arrays, if its layout is the buffer's."""
    if isinstance(source, CompressedSource):
        return _borrow_compressed(source, levels, fit, name, is_sound)
    if isinstance(source, Coordinates):
        return _borrow_coordinates(source, levels, fit, name, is_sound)
    return None


def has_layout(source: Source, levels: Sequence[Level], name: str) -> bool:
    """Return whether a compressed matrix is stored as the buffer is, if its fibers are in order."""
    return isinstance(source, CompressedSource) and _is_alike(source, levels, fit_axes(source, levels, name))


def _is_alike(source: CompressedSource, levels: Sequence[Level], fit: Fit) -> bool:
    minor = 1 - source.major
    trees = [(source.major, minor), *((d,) for d in range(2, 2 + len(source.block)))]
    kinds = [levels[d].kind for tree in trees for d in tree if d < len(levels)]
    if fit.blocks != source.block or tree_indices(levels) != trees or kinds[1] != "sparse_variable":
        return False
    return kinds.count("dense_fixed") == len(levels) - 1 and levels[minor].rule is None


def _borrow_compressed(
    source: CompressedSource, levels: Sequence[Level], fit: Fit, name: str, is_sound: Validator | None
) -> StoredArgument | None:
    minor = 1 - source.major
    if not _is_alike(source, levels, fit):
        return None
    level = levels[minor]
    if is_sound is not None and (level.sorted or level.unique) and not source.is_ordered(level, is_sound):
        rows, length = source.grid[source.major], source.grid[minor]
        if level.sorted or not are_distinct(source.indptr, source.indices, rows, length, is_sound):
            return None
    indptr = narrow(source.indptr, levels[minor], "indptr", name)
    indices = narrow(source.indices, levels[minor], "indices", name)
    values = aligned_contiguous(source.values, name=name)[0]
    return StoredArgument(values, {minor: indptr}, {minor: indices}, dict(enumerate(fit.shape)), {}, source)


def _borrow_coordinates(
    source: Coordinates, levels: Sequence[Level], fit: Fit, name: str, is_sound: Validator | None
) -> StoredArgument | None:
    chain, *other_trees = tree_indices(levels)
    kinds = ["sparse_variable"] + ["singleton"] * (len(levels) - 1)
    if other_trees or len(source.indices) != len(levels) or [levels[d].kind for d in chain] != kinds:
        return None
    if any(level.rule is not None for level in levels) or source.block:
        return None
    root = chain[0]
    if is_sound is not None and not is_one_fiber(levels[root], source.indices[root], source.shape[root], is_sound):
        return None
    indptr = np.array([0, len(source.values)])
    indices = {d: narrow(source.indices[d], levels[d], "indices", name) for d in chain}
    values = aligned_contiguous(source.values, name=name)[0]
    return StoredArgument(
        values, {root: narrow(indptr, levels[root], "indptr", name)}, indices, dict(enumerate(fit.shape)), {}, source
    )


@dataclass(frozen=True, eq=False)
class _Placement:
    """Where the entries of an argument lie in a buffer, and the index arrays of its levels.

    Parameters
    ----------
    slots : ndarray
        Of each entry.
    counts : list of int
        Slots of each tree of axes.
    indptr, indices, widths : dict
    firsts : ndarray, optional
        Where all slots are filled: the first entry of each slot.
    later : ndarray, optional
        Where entries share slots: those that are not the first of their slot.
    is_identity : bool
        Whether the entries fill all slots in their order.
    """

    slots: Array
    counts: list[int]
    indptr: dict[int, Array]
    indices: dict[int, Array]
    widths: dict[int, int]
    firsts: Array | None = None
    later: Array | None = None
    is_identity: bool = False

    @property
    def nbytes(self) -> int:
        arrays = (self.slots, self.firsts, self.later, *self.indptr.values(), *self.indices.values())
        return sum(array.nbytes for array in arrays if array is not None)

    def copied(self) -> _Placement:
        """Return the same with index arrays of its own."""
        indptr, indices = ({d: a.copy() for d, a in part.items()} for part in (self.indptr, self.indices))
        return replace(self, indptr=indptr, indices=indices, widths=dict(self.widths))

    def placed(self, values: Array) -> Array:
        """Return values in their slots, added up in the order of the entries, and zeros in other slots."""
        dtype, later = values.dtype.newbyteorder("="), self.later
        if self.is_identity:
            flat = values.astype(dtype)
        elif self.firsts is not None:
            flat = values.take(self.firsts).astype(dtype, copy=False)
        else:
            flat = np.zeros(math.prod(self.counts), dtype)
            step = 1 if later is None else -1  # of equal slots, the first entry is written last
            flat[self.slots[::step]] = values[::step]
        if later is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # as kernels add
                np.add.at(flat, self.slots[later], values[later].astype(dtype, copy=False))
        return flat.reshape(self.counts)


_distinct = shared_cache("rows without duplicates", 64)


def are_distinct(indptr: Array, indices: Array, rows: int, length: int, is_sound: Validator | None) -> bool:
    """Return whether rows, in any order, are valid and hold no coordinate twice.

    The answer is kept by the contents of the arrays: finding it takes as long as several products. Without a validator
    it is False where it is not known yet.
    """
    key = _digest((indptr, indices)), indptr.dtype, indices.dtype, indptr.size, rows, length
    answer = _distinct.get(key)
    if answer is None:
        if is_sound is None or indptr.dtype.kind != "i" or indices.dtype.kind != "i" or rows * length >= 2**63:
            return False
        if not is_sound(UNORDERED, indptr, indices, parent_count=rows, length=length, need_sorted=False):
            return False
        keys = np.repeat(np.arange(rows) * length, np.diff(indptr)) + indices
        keys.sort()
        answer = _distinct[key] = not bool((keys[1:] == keys[:-1]).any())
    return bool(answer)


def _digest(arrays: Sequence[Array]) -> bytes:
    whole = xxhash.xxh3_128()
    for array in arrays:
        whole.update(np.ascontiguousarray(array).view(np.uint8).data)
    return whole.digest()


_placements = shared_cache("placements of entries", 4)
_placed_once = shared_cache("keys of entries that were placed once", 64)
MOST_PLACED = 1 << 27  # bytes of a placement that is kept
SLOT_BYTES = 4  # of each entry of a placement, at least


def _convert(source: Source, levels: Sequence[Level], fit: Fit, name: str) -> StoredArgument:
    """Place the argument's entries in newly built arrays.

    Where entries are placed is kept when equal coordinates come a second time. Later calls get copies.
    """
    key = _placement_key(source, levels, fit)
    kept = None if key is None else _placements.get(key)
    placement = _placed(source, levels, fit, name) if kept is None else kept.copied()
    if kept is None and key is not None and placement.nbytes <= MOST_PLACED:
        if key in _placed_once:
            _placements[key] = placement.copied()  # an index array may be the argument's own
        else:
            _placed_once[key] = True
    values, lengths = placement.placed(source.values.reshape(-1)), dict(enumerate(fit.shape))
    arrays = placement.indptr, placement.indices, lengths, placement.widths
    return StoredArgument(values, *arrays, source, placement.slots, placement.later)


def _placement_key(source: Source, levels: Sequence[Level], fit: Fit) -> Any:
    """Return what decides where entries are placed.

    None where formulas do, of sources of other kinds, and of those whose slots alone are more than what is kept.
    """
    if isinstance(source, Coordinates):
        arrays, order = source.indices, None
    elif isinstance(source, CompressedSource):
        arrays, order = (source.indptr, source.indices), source.major
    else:
        return None
    if source.values.size * SLOT_BYTES > MOST_PLACED:
        return None
    if any(level.rule or level.extent_rule or level.offset_rule for level in levels):
        return None
    kinds = tuple((array.dtype, array.size) for array in arrays)
    axes = tuple((v.kind, v.parent, v.idtype, v.length, v.width, v.sorted, v.unique, v.full) for v in levels)
    return _digest(arrays), kinds, order, source.block, source.shape, axes, fit.shape, fit.blocks


def _placed(source: Source, levels: Sequence[Level], fit: Fit, name: str) -> _Placement:
    builder = Builder(levels, fit.shape, name)
    coords, trees = fit.coords(source), tree_indices(levels)
    keep = len(trees) == 1 and not all(level.unique for level in levels)
    slots, counts = np.zeros(source.values.size, np.int64), []
    for chain in trees:
        positions, count = builder.tree(chain, [coords[d] for d in chain], keep)
        slots = slots * count + positions
        counts.append(count)
    size = math.prod(counts)
    if size <= np.iinfo(np.int32).max:
        slots = slots.astype(np.int32)
    placement = _Placement(slots, counts, builder.indptr, builder.indices, builder.widths)
    numbers = np.arange(slots.size, dtype=slots.dtype)
    firsts = np.full(size, -1, slots.dtype)
    firsts[slots[::-1]] = numbers[::-1]
    later = np.flatnonzero(firsts[slots] != numbers)
    is_full = slots.size - later.size == size
    is_identity = is_full and not later.size and bool((firsts == numbers).all())
    later_entries = later if later.size else None
    return replace(placement, firsts=firsts if is_full else None, later=later_entries, is_identity=is_identity)


# ------------------------------------------------------------------------------- entries by axes trees


def _unsorted(array: Array, order: Array) -> Array:
    """Invert the indexing by `order` that produced `array`."""
    result = np.empty_like(array)
    result[order] = array
    return result


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
        order = sorting_order(coords, [self.shape[d] for d in chain])
        coords = [(c if order is None else c[order]).astype(np.int64, copy=False) for c in coords]
        first = np.ones(len(coords[0]), np.bool_) if keep else changes(coords)
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
        first = changes([position, index]) if unique else np.ones(len(index), np.bool_)
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
