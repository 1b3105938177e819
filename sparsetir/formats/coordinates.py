# SPDX-License-Identifier: Apache-2.0
"""Formats of one piece for tensors of any order: a list of coordinates, and a tree of compressed modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError
from sparsetir.formats.base import FormatRewriteRule, axis_name, describe
from sparsetir.formats.compressed import SinglePieceFormat
from sparsetir.formats.format import (
    Array,
    Entries,
    Format,
    Packed,
    changes,
    check_positive,
    index_array,
    register,
    sorting_order,
    take,
)


@register("coo")
@dataclass(frozen=True, repr=False)
class COO(SinglePieceFormat):
    """A list of entries, sorted: one index array for each dimension.

    Parameters
    ----------
    ndim : int
        Dimensions of the tensors, for the rules; a tensor that is packed brings its own.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0], [3.0, 4.0]]), format="coo")
    >>> {name: array.tolist() for name, array in t.pieces[0].arrays.items()}
    {'indices_i': [0, 1, 1], 'indices_j': [1, 0, 1]}
    """

    ndim: int = 2
    name = "coo"
    dimensions = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, ndim=self.ndim)

    def resolve(self, ndim: int, idtype: str) -> Format:
        return replace(self, ndim=ndim, idtype=self.idtype or idtype)

    def rule(self) -> FormatRewriteRule:
        axes = [axis_name(d) for d in range(self.ndim)]
        low = [axis.lower() for axis in axes]
        inner = "".join(
            f"\n{axes[d]} = singleton({axes[d - 1]}, n_{low[d]}, indices_{low[d]})" for d in range(1, self.ndim)
        )
        text = describe(
            "coo",
            self.index_type,
            arrays=" ".join(f"indices_{a}" for a in low),
            sizes=" ".join(f"n_{a}" for a in low) + " nnz",
            axes=f"I = sparse_fixed(None, (n_i, nnz), indices_i, unique={self.ndim == 1})" + inner,
            buffer=", ".join(axes),
        )
        return FormatRewriteRule("coo", text, {d: [axis] for d, axis in enumerate(axes)})

    def packed(self, entries: Entries) -> Packed:
        nnz = self.check_count(entries.nnz)
        low = [axis_name(d).lower() for d in range(self.ndim)]
        arrays = {f"indices_{a}": index_array(c, self.index_type) for a, c in zip(low, entries.coords, strict=True)}
        sizes = {f"n_{a}": n for a, n in zip(low, entries.shape, strict=True)}
        return Packed(arrays, {**sizes, "nnz": nnz}, nnz)


@register("csf")
@dataclass(frozen=True, repr=False)
class CSF(SinglePieceFormat):
    """Compressed sparse fibers: a tree of coordinates, one level for each dimension (Smith and Karypis, 2015).

    Parameters
    ----------
    order : sequence of int, optional
        The dimensions from the root of the tree to its leaves; by default in order.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> cube = np.zeros((2, 3, 4))
    >>> cube[1, 0, [1, 3]] = 5.0
    >>> t = sparsetir.SparseTensor.from_dense(cube, format="csf", order=(2, 0, 1))
    >>> t.pieces[0].arrays["indices_k"].tolist(), t.pieces[0].arrays["indices_i"].tolist()
    ([1, 3], [1, 1])
    """

    order: Sequence[int] | None = None
    name = "csf"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order is None:
            return
        if not isinstance(self.order, Sequence) or not all(isinstance(d, (int, np.integer)) for d in self.order):
            fault = f"order: expected numbers of dimensions, got {self.order!r}."
            raise ArgumentError(f"{fault} Pass a tuple such as (1, 0).")
        order = tuple(int(d) for d in self.order)
        object.__setattr__(self, "order", order)
        if sorted(order) != list(range(len(order))) or not order:
            raise ArgumentError(f"order of csf must name each dimension from 0 on once, found {order}")

    @property
    def dimensions(self) -> int | None:  # type: ignore[override]
        return None if self.order is None else len(self.order)

    def resolve(self, ndim: int, idtype: str) -> Format:
        chosen: Any = super().resolve(ndim, idtype)
        return replace(chosen, order=tuple(range(ndim))) if self.order is None else chosen

    def rule(self) -> FormatRewriteRule:
        order = self._order()
        parents = [None, *(axis_name(d) for d in order)]
        low = [axis_name(d).lower() for d in order]
        axes = "\n".join(
            f"{a.upper()} = sparse_variable({parent}, (n_{a}, {count}), (indptr_{a}, indices_{a}))"
            for a, parent, count in zip(low, parents, self._counts(), strict=False)
        )
        text = describe(
            "csf",
            self.index_type,
            arrays=" ".join(f"indptr_{a} indices_{a}" for a in low),
            sizes=" ".join(f"n_{axis_name(d).lower()}" for d in sorted(order)) + " " + " ".join(self._counts()),
            axes=axes,
            buffer=", ".join(axis_name(d) for d in sorted(order)),
        )
        return FormatRewriteRule("csf", text, {d: [axis_name(d)] for d in sorted(order)})

    def packed(self, entries: Entries) -> Packed:
        self.check_count(entries.nnz)
        order = self._order()
        coords = [entries.coords[d] for d in order]
        by = sorting_order(coords, [entries.shape[d] for d in order])
        coords = [c if by is None else take(c, by) for c in coords]
        arrays, counts = self._levels(coords)
        sizes = {f"n_{axis_name(d).lower()}": n for d, n in enumerate(entries.shape)}
        sizes |= dict(zip(self._counts(), counts, strict=True))
        return Packed(arrays, sizes, entries.nnz, entries=by)

    def _levels(self, coords: list[Array]) -> tuple[dict[str, Array], list[int]]:
        """Return the index arrays of sorted coordinates, and the number of positions of each level."""
        arrays, counts = {}, []
        new = np.zeros(len(coords[0]), np.bool_)
        above: Array = np.zeros(1, np.int64)  # where the fibers of the level above begin in the list of entries
        for depth, d in enumerate(self._order()):
            new |= changes([coords[depth]])
            starts, level_coords = above, coords[depth]
            if depth < len(coords) - 1:
                heads = np.flatnonzero(new)
                starts, level_coords, above = np.searchsorted(heads, above), level_coords[heads], heads
            a = axis_name(d).lower()
            arrays[f"indptr_{a}"] = index_array(np.append(starts, len(level_coords)), self.index_type)
            arrays[f"indices_{a}"] = index_array(level_coords, self.index_type)
            counts.append(len(level_coords))
        return arrays, counts

    def _order(self) -> tuple[int, ...]:
        if self.order is None:
            raise ArgumentError("csf does not know its dimensions yet: pass order=(0, 1, 2), or pack a tensor")
        return tuple(self.order)

    def _counts(self) -> list[str]:
        """Return the names of the numbers of positions, root first."""
        return [f"nnz_{axis_name(d).lower()}" for d in self._order()]


__all__ = ["COO", "CSF"]
