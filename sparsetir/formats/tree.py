# SPDX-License-Identifier: Apache-2.0
"""Any axes tree as a format: entries are placed by their coordinates, axis by axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import tirx

from sparsetir.errors import ArgumentError, StructureError
from sparsetir.formats.base import FormatRewriteRule, Formula
from sparsetir.formats.format import Array, Entries, Format, Packed, register
from sparsetir.interop.arrays import tree_indices
from sparsetir.interop.levels import Level
from sparsetir.interop.storage import Builder
from sparsetir.ir import sizes as symbolic
from sparsetir.ir.views import Axis, decode


@register("tree")
class Tree(Format):
    """A format that a user declares.

    Parameters
    ----------
    description : PrimFunc
        Declares axes and one sparse buffer over them, as for `FormatRewriteRule`.
    axis_map : mapping of int to sequence of str, optional
        The axes that stand for each dimension; by default the buffer has one axis for each.
    inverse, forward : callable, optional
        The tensor's coordinates from those of the buffer, and the reverse; by default they are the same.
    fills : bool
        Whether slots between the entries are stored.
    sizes : mapping of str to int, optional
        Scalar parameters that cannot be seen from a tensor, for instance the width in an axis' formula.
    name : str, optional
        Of the rule; by default that of the description.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> from sparsetir import formats
    >>> band = sparsetir.parse('''
    ... @T.prim_func
    ... def band(a: T.handle, m: T.int32, n: T.int32, w: T.int32):
    ...     I = T.dense_fixed(m)
    ...     J = T.sparse_fixed(I, (n, 2 * w + 1), lambda i, s: i + s - w)
    ...     A = T.match_sparse_buffer(a, (I, J))
    ... ''')
    >>> t = sparsetir.SparseTensor.from_dense(np.diag([1.0, 2.0]), format=formats.tree(band, sizes={"w": 1}))
    >>> t.pieces[0].values.tolist()
    [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
    """

    name = "tree"

    def __init__(
        self,
        description: tirx.PrimFunc,
        axis_map: Mapping[int, Sequence[str]] | None = None,
        *,
        inverse: Formula | None = None,
        forward: Formula | None = None,
        fills: bool = False,
        sizes: Mapping[str, int] | None = None,
        name: str | None = None,
    ) -> None:
        name = name or str(description.attrs["global_symbol"])
        mapping = dict(axis_map) if axis_map is not None else _own_axes(description)
        rule = FormatRewriteRule(name, description, mapping, inverse=inverse, forward=forward, fills=fills)
        self._rule, self.sizes = rule, dict(sizes or {})

    @property
    def rules(self) -> Sequence[FormatRewriteRule]:
        return (self._rule,)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"name": self._rule.name, **self.sizes}

    @property
    def dimensions(self) -> int:  # type: ignore[override]
        return self._rule.order

    @property
    def index_type(self) -> str:
        wide = any(axis.idtype == "int64" for axis in self._rule.buffer.axes)
        return "int64" if wide else "int32"

    def with_idtype(self, idtype: str) -> Format:
        """Return this format: the description determines the type of each axis."""
        return self

    def pack(self, entries: Entries) -> list[Packed]:
        axes = self._rule.buffer.axes
        coords = self._coords(entries)
        lengths = self._lengths(entries, coords)
        sizes = _solve(dict(self.sizes), [(axis.length, n) for axis, n in zip(axes, lengths, strict=True)])
        levels = [_level(axis, axes, n, sizes) for axis, n in zip(axes, lengths, strict=True)]
        builder = Builder(levels, lengths, "the tensor")
        slots, counts = np.zeros(entries.nnz, np.int64), []
        for chain in tree_indices(levels):
            positions, count = builder.tree(chain, [coords[d] for d in chain], False)
            slots = slots * count + positions
            counts.append(count)
        count = math.prod(counts)
        self._check_slots(slots, count)
        arrays = _named_arrays(axes, builder)
        known_sizes = [*_counted(axes, arrays, builder), *((n, c) for n, c in zip(self._shape(), counts, strict=True))]
        sizes = self._complete(_solve(sizes, known_sizes))
        return [Packed(arrays, sizes, count, slots=slots)]

    def _shape(self) -> list[Any]:
        return list(self._rule.buffer.storage_shape)

    def _coords(self, entries: Entries) -> list[Array]:
        """Return the coordinates of the entries in the buffer's axes."""
        old = [c.astype(np.int64, copy=False) for c in entries.coords]
        new = [np.broadcast_to(np.asarray(c), (entries.nnz,)) for c in self._rule.new_coords(old)]
        old_again = [np.broadcast_to(np.asarray(c), (entries.nnz,)) for c in self._rule.old_coords(new)]
        wrong = [a != b for a, b in zip(old, old_again, strict=True)]
        is_wrong = np.logical_or.reduce(wrong)
        if is_wrong.any():
            where, restored = (tuple(int(c[int(is_wrong.argmax())]) for c in coords) for coords in (old, old_again))
            raise ArgumentError(f"forward= and inverse= disagree: entry {where} comes back as {restored}")
        return new

    def _lengths(self, entries: Entries, coords: list[Array]) -> tuple[int, ...]:
        """Return the dense length of each axis, from the tensor's last coordinates where it is no constant."""
        corner = self._rule.new_coords([np.array([max(n - 1, 0)]) for n in entries.shape])
        lengths = []
        for axis, index, last in zip(self._rule.buffer.axes, coords, corner, strict=True):
            length = symbolic.Size(axis.length).known(self.sizes)
            extent = entries.shape[self._dimension(axis)]
            if length is None and self._rule.inverse is None:
                length = extent
            end = int(np.max(last)) + 1 if extent else 0
            lengths.append(max(end, int(index.max(initial=-1)) + 1) if length is None else length)
        return tuple(lengths)

    def _dimension(self, axis: Axis) -> int:
        return next(d for d, group in self._rule.axis_map.items() if axis.name in group)

    def _check_slots(self, slots: Array, count: int) -> None:
        is_taken = np.zeros(count, np.bool_)
        is_taken[slots] = True
        if np.count_nonzero(is_taken) != len(slots):
            raise StructureError("two entries fall into the same slot: forward= must keep entries apart")

    def _complete(self, sizes: dict[str, int]) -> dict[str, int]:
        scalars = [str(p.name) for p in self._rule.description.params if not tirx.is_buffer_var(p)]
        for name in scalars:
            if name not in sizes:
                raise _unknown_size(name, "the description")
        return {name: int(sizes[name]) for name in scalars}


def _unknown_size(name: str, where: str) -> ArgumentError:
    return ArgumentError(f"a tensor does not show the size {name} of {where}: pass sizes={{{name!r}: ...}}")


def _own_axes(description: tirx.PrimFunc) -> dict[int, list[str]]:
    buffers = list(decode(description).buffers.values())
    return {d: [axis.name] for b in buffers[:1] for d, axis in enumerate(b.axes)}


def _solve(sizes: dict[str, int], equations: Sequence[tuple[Any, int]]) -> dict[str, int]:
    """Return sizes that expressions with known values tell."""
    before = -1
    while before != len(sizes):
        before = len(sizes)
        for expr, value in equations:
            size = symbolic.Size(expr)
            solution = size.solve(value, sizes)
            if solution is not None:
                sizes[solution[0]] = solution[1]
            elif size.known(sizes) not in (None, value):
                raise ArgumentError(f"{size.text} should be {size.known(sizes)} but the tensor needs {value}")
    return sizes


def _level(axis: Axis, axes: Sequence[Axis], length: int, sizes: dict[str, int]) -> Level:
    rules: dict[str, Any] = {}
    for name in ("rule", "extent_rule", "offset_rule"):
        expr = getattr(axis, name)
        if expr is not None:
            missing = [n for n in symbolic.symbols(expr) if n not in sizes]
            if missing:
                raise _unknown_size(missing[0], f"the formula of axis {axis.name}")
            rules[name] = symbolic.formula(expr, sizes)
    width = symbolic.Size(axis.width).known(sizes) if axis.kind == "sparse_fixed" else None
    parent = None if axis.parent is None else list(axes).index(axis.parent)
    rules |= {"sorted": axis.sorted, "unique": axis.unique, "full": axis.full}
    return Level(axis.name, axis.kind, parent, axis.idtype, length, width, **rules)


def _named_arrays(axes: Sequence[Axis], builder: Builder) -> dict[str, Array]:
    arrays = {}
    for d, axis in enumerate(axes):
        for array, where in ((axis.indptr, builder.indptr), (axis.indices, builder.indices)):
            if array is not None:
                arrays[str(array.name)] = where[d]
    return arrays


def _counted(axes: Sequence[Axis], arrays: dict[str, Array], builder: Builder) -> list[tuple[Any, int]]:
    """Return the widths and the numbers of positions of the levels that were built."""
    sizes: list[tuple[Any, int]] = []
    for d, axis in enumerate(axes):
        if axis.kind == "sparse_fixed" and d in builder.widths:
            sizes.append((axis.width, builder.widths[d]))
        if axis.indptr is not None:
            sizes.append((axis.count, int(arrays[str(axis.indptr.name)][-1])))
    return sizes


__all__ = ["Tree"]
