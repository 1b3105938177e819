# SPDX-License-Identifier: Apache-2.0
"""Usage of a program's arrays and samples of their elements: inputs of the heuristics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, tirx

from sparsetir.ir import sizes
from sparsetir.ir.rewriting import all_same, collect, factors, mentions
from sparsetir.ir.views import Axis, Program, SparseBuffer, SpIter, accesses

WINDOWS = 16  # of an array that are sampled
ROWS = 1024  # of a window

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Gather:
    """A dense array whose rows are found through an index array, both by the names of parameters."""

    indices: str
    operand: str
    dimension: int


@dataclass(frozen=True)
class Usage:
    """How a program uses its parameters, by their names.

    Parameters
    ----------
    gathers : sequence of Gather
    pointers : sequence of str
        Where the rows of a loop over dense rows begin.
    sums : sequence of str
        Where the rows begin that an iteration sums into one number each.
    rows : sequence of (str, int)
        Dense arrays that are summed, and along which dimension.
    widths : sequence of (str, str, int)
        Sizes that no sparse axis depends on, such as the columns of a dense operand, each with a dense array and its
        dimension of this size.
    """

    gathers: Sequence[Gather]
    pointers: Sequence[str]
    sums: Sequence[str]
    rows: Sequence[tuple[str, int]]
    widths: Sequence[tuple[str, str, int]] = ()

    @classmethod
    def of(cls, program: Program) -> Usage:
        """Return the usage of a program's parameters."""
        return cls(gathers(program), row_pointers(program), ragged_sums(program), dense_sums(program), widths(program))


# ------------------------------------------------------------------ programs


def gathers(program: Program) -> list[Gather]:
    """Return every gather of a program's iterations."""
    unique: dict[Gather, None] = {}
    for iteration in program.iterations:
        pairs = zip(iteration.vars, iteration.axes, strict=True)
        listed = {v: str(a.indices.name) for v, a in pairs if a.indices is not None}
        for storage, subscripts in dense_accesses(program, iteration):
            for d, subscript in enumerate(subscripts):
                if subscript in listed:
                    unique[Gather(listed[subscript], storage, d)] = None
    return list(unique)


def dense_accesses(program: Program, iteration: SpIter) -> Iterator[tuple[str, list[Any]]]:
    """Yield the dense parameters that an iteration reads or writes, with the subscripts."""
    for view, subscripts, _ in accesses(iteration.block):
        buffer = program.buffers.get(view)
        if isinstance(buffer, SparseBuffer) and buffer.is_dense and not buffer.allocated:
            yield str(buffer.storage.name), subscripts


def known(gathers: Sequence[Gather], arrays: Arrays) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield the index array, the operand and the number of its rows, for gathers of something."""
    for gather in gathers:
        indices, operand = arrays.get(gather.indices), arrays.get(gather.operand)
        if indices is not None and operand is not None and operand.size and indices.size:
            yield indices, operand, operand.shape[gather.dimension]


def row_pointers(program: Program) -> list[str]:
    """Return parameters that say where the rows of a loop over dense rows begin."""
    names: dict[str, None] = {}
    for iteration in program.iterations:
        for axis in iteration.axes:
            if axis.indptr is not None and axis.parent is not None and axis.parent.kind == "dense_fixed":
                names[str(axis.indptr.name)] = None
    return list(names)


def ragged_sums(program: Program) -> list[str]:
    """Return the parameters with the row lengths of every iteration that ends in a sum along a ragged row."""
    names: dict[str, None] = {}
    for iteration in program.iterations:
        last = iteration.axes[-1] if iteration.axes else None
        if last is not None and last.indptr is not None and iteration.kinds[-1] == "R":
            names[str(last.indptr.name)] = None
    return list(names)


def order_free_axes(program: Program) -> set[Axis]:
    """Return the axes whose entries may come in any order, and repeatedly: all are factors of terms of sums.

    ``y[i] = y[i] + A[i, j] * x[j]`` gives the same for entries that were sorted and added up before. Such an axis
    belongs to one buffer, which is only read, at the variable of the axis and once in each term, and the sums are
    dense. Programs of several iterations, and those that compute a pattern, have no such axes.
    """
    if len(program.iterations) != 1 or any(axis.is_assembled for axis in program.axes.values()):
        return set()
    return {axis for axis in program.axes.values() if _is_order_free(axis, program)}


def _is_order_free(axis: Axis, program: Program) -> bool:
    buffers = [b for b in program.buffers.values() if axis in b.axes]
    if buffers and "float" not in buffers[0].dtype:
        return False  # two True are one, and integers may be widened only after they were added up
    if axis.kind != "sparse_variable" or axis.parent is None or axis.parent.kind != "dense_fixed":
        return False
    if len(buffers) != 1 or buffers[0].allocated or any(child.parent is axis for child in program.axes.values()):
        return False
    loads = [x for x in collect(program.func.body, ir.TensorLoad) if x.source.same_as(buffers[0].view)]
    return len(loads) == 1 and _sums_entries(program, axis, buffers[0])


def _sums_entries(program: Program, axis: Axis, buffer: SparseBuffer) -> bool:
    """Return whether the iteration does nothing but add up products with one entry of the buffer each."""
    (iteration,) = program.iterations
    store: Any = iteration.block.body
    if axis not in iteration.axes or not isinstance(store, tirx.BufferStore):
        return False
    position, value = iteration.axes.index(axis), store.value
    var, result = iteration.vars[position], program.buffers.get(store.buffer)
    if iteration.kinds[position] != "R" or result is None or not result.is_dense or not isinstance(value, tirx.Add):
        return False
    if mentions(list(store.indices), [var]) or collect(value.b, ir.Call) or not _is_element(value.a, store):
        return False
    entries = [x for x in factors(value.b) if isinstance(x, ir.TensorLoad) and x.source.same_as(buffer.view)]
    return len(entries) == 1 and entries[0].indices[buffer.axes.index(axis)].same_as(var)


def _is_element(expr: ir.Expr, store: tirx.BufferStore) -> bool:
    is_same = isinstance(expr, ir.TensorLoad) and expr.source.same_as(store.buffer)
    return is_same and all_same(list(expr.indices), list(store.indices))


def dense_sums(program: Program) -> list[tuple[str, int]]:
    """Return the dense operands of every iteration that ends in a sum along a dense axis, and their dimension of it."""
    operands: dict[tuple[str, int], None] = {}
    for iteration in program.iterations:
        last = iteration.axes[-1] if iteration.axes else None
        if last is None or last.indptr is not None or last.indices is not None or iteration.kinds[-1] != "R":
            continue
        for storage, subscripts in dense_accesses(program, iteration):
            for d, subscript in enumerate(subscripts):
                if iteration.vars[-1].same_as(subscript):
                    operands[storage, d] = None
    return list(operands)


def free_sizes(program: Program) -> list[str]:
    """Return size symbols that no sparse or ragged axis depends on, such as the number of features."""
    bound: set[str] = set()
    free: list[str] = []
    roots = {a.root for a in program.axes.values() if a.parent is not None or not a.is_dense}
    for axis in program.axes.values():
        names = [n for e in (axis.length, axis.count, axis.width) if e is not None for n in sizes.symbols(e)]
        if axis.root in roots:
            bound.update(names)
        free += names
    scalars = [str(p.name) for p in program.func.params if not tirx.is_buffer_var(p)]
    return [name for name in scalars if name in free and name not in bound]


def widths(program: Program) -> list[tuple[str, str, int]]:
    """Return the free sizes, each with a dense parameter and the dimension of it that has this size."""
    found = []
    for name in free_sizes(program):
        for buffer in program.buffers.values():
            places = [d for d, extent in enumerate(buffer.storage_shape) if sizes.Size(extent).name == name]
            if buffer.is_dense and not buffer.allocated and places:
                found.append((name, str(buffer.storage.name), places[0]))
                break
    return found


# ------------------------------------------------------------------ arrays


def mean_length(pointers: Sequence[str], arrays: Arrays) -> float:
    """Return entries of a row on average, the least of several arrays; 0 if there is none."""
    lengths = [indptr[-1] / max(len(indptr) - 1, 1) for name in pointers if (indptr := arrays.get(name)) is not None]
    return float(min(lengths, default=0.0))


def share_of_new(indices: np.ndarray, window: int) -> float:
    """Return the mean share of different numbers in a few windows of an index array.

    Parameters
    ----------
    indices : ndarray
    window : int
        Entries.

    Examples
    --------
    >>> share_of_new(np.array([5, 5, 6, 6]), 4)
    0.5
    """
    flat = indices.reshape(-1)
    length = max(1, min(window, len(flat)))
    count = min(WINDOWS, max(1, len(flat) // length))
    starts = np.linspace(0, len(flat) - length, count).astype(np.int64)
    return float(np.mean([len(np.unique(flat[s : s + length])) / length for s in starts]))


def has_longer_row(indptr: np.ndarray, length: int) -> bool:
    """Return whether a row has more than `length` entries: it contains one of the entries `length`, 2 `length`, ...

    Parameters
    ----------
    indptr : ndarray
    length : int

    Examples
    --------
    >>> indptr = np.array([0, 2, 7, 8])
    >>> has_longer_row(indptr, 4), has_longer_row(indptr, 5)
    (True, False)
    """
    step = max(length, 1)
    rows = np.searchsorted(indptr, np.arange(0, int(indptr[-1]), step), side="right") - 1
    return bool(np.any(indptr[rows + 1] - indptr[rows] > length))


def some_lengths(indptr: np.ndarray) -> np.ndarray:
    """Return the lengths of the rows in a few windows, a window a line.

    Examples
    --------
    >>> some_lengths(np.array([0, 2, 4, 7, 10])).tolist()
    [[2, 2, 3, 3]]
    """
    length = min(ROWS + 1, len(indptr))
    starts = np.linspace(0, len(indptr) - length, WINDOWS if length < len(indptr) else 1).astype(np.int64)
    return np.stack([np.diff(indptr[s : s + length]) for s in starts])


def share_of_changes(lengths: np.ndarray) -> float:
    """Return the share of rows that are not as long as the row before, of neighbouring rows along the last dimension.

    Examples
    --------
    >>> share_of_changes(np.array([[2, 2, 3, 3]]))
    0.3333333333333333
    """
    changes = np.diff(lengths) != 0
    return float(np.mean(changes)) if changes.size else 0.0


__all__ = [
    "Arrays",
    "Gather",
    "Usage",
    "dense_sums",
    "free_sizes",
    "gathers",
    "has_longer_row",
    "known",
    "mean_length",
    "ragged_sums",
    "row_pointers",
    "share_of_changes",
    "share_of_new",
    "some_lengths",
    "widths",
]
