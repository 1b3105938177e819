# SPDX-License-Identifier: Apache-2.0
"""Sparse arguments as a buffer stores them, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.interop.arrays import Fit, aligned_contiguous, fit_axes, tree_indices
from sparsetir.interop.convert import Builder, scatter
from sparsetir.interop.levels import Array, Level, Validator, check_dtype, is_sound, narrow
from sparsetir.interop.sources import Compressed, Coordinates, Source, is_one_fiber, is_torch, open_source


@dataclass(frozen=True, eq=False)
class Stored:
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
) -> Stored:
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

    Returns
    -------
    Stored

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


def restore(stored: Stored, values: Array, *, copy_structure: bool = True) -> Any:
    """Return an object of the class and structure of the stored argument, holding new values.

    Parameters
    ----------
    stored : Stored
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


def entries(stored: Stored, values: Array) -> Array:
    """Return values laid out like ``stored.values`` in the order and shape of the argument's own."""
    if values.size != stored.values.size:
        raise ArgumentError(f"expected {stored.values.size} values, as many as were stored, found {values.size}")
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


def _borrow(source: Source, levels: Sequence[Level], fit: Fit, name: str, is_sound: Validator | None) -> Stored | None:
    """Return the argument's own arrays, if its layout is the buffer's."""
    if isinstance(source, Compressed):
        return _borrow_compressed(source, levels, fit, name, is_sound)
    if isinstance(source, Coordinates):
        return _borrow_coordinates(source, levels, fit, name, is_sound)
    return None


def has_layout(source: Source, levels: Sequence[Level], name: str) -> bool:
    """Return whether a compressed matrix is stored as the buffer is, if its fibers are in order."""
    return isinstance(source, Compressed) and _is_alike(source, levels, fit_axes(source, levels, name))


def _is_alike(source: Compressed, levels: Sequence[Level], fit: Fit) -> bool:
    minor = 1 - source.major
    trees = [(source.major, minor), *((d,) for d in range(2, 2 + len(source.block)))]
    kinds = [levels[d].kind for tree in trees for d in tree if d < len(levels)]
    if fit.blocks != source.block or tree_indices(levels) != trees or kinds[1] != "sparse_variable":
        return False
    return kinds.count("dense_fixed") == len(levels) - 1 and levels[minor].rule is None


def _borrow_compressed(
    source: Compressed, levels: Sequence[Level], fit: Fit, name: str, is_sound: Validator | None
) -> Stored | None:
    minor = 1 - source.major
    if not _is_alike(source, levels, fit):
        return None
    level = levels[minor]
    if is_sound is not None and (level.sorted or level.unique) and not source.is_ordered(level, is_sound):
        return None
    indptr = narrow(source.indptr, levels[minor], "indptr", name)
    indices = narrow(source.indices, levels[minor], "indices", name)
    values = aligned_contiguous(source.values, name=name)[0]
    return Stored(values, {minor: indptr}, {minor: indices}, dict(enumerate(fit.shape)), {}, source)


def _borrow_coordinates(
    source: Coordinates, levels: Sequence[Level], fit: Fit, name: str, is_sound: Validator | None
) -> Stored | None:
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
    return Stored(
        values, {root: narrow(indptr, levels[root], "indptr", name)}, indices, dict(enumerate(fit.shape)), {}, source
    )


def _convert(source: Source, levels: Sequence[Level], fit: Fit, name: str) -> Stored:
    """Place the argument's entries in newly built arrays."""
    builder = Builder(levels, fit.shape, name)
    coords, trees = fit.coords(source), tree_indices(levels)
    keep = len(trees) == 1 and not all(level.unique for level in levels)
    slots, counts = np.zeros(source.values.size, np.int64), []
    for chain in trees:
        positions, count = builder.tree(chain, [coords[d] for d in chain], keep)
        slots = slots * count + positions
        counts.append(count)
    values, repeats = scatter(slots, source.values.reshape(-1), math.prod(counts))
    lengths = dict(enumerate(fit.shape))
    values = values.reshape(counts)
    return Stored(values, builder.indptr, builder.indices, lengths, builder.widths, source, slots, repeats)
