# SPDX-License-Identifier: Apache-2.0
"""Formats of one piece: compressed rows or columns, a list of coordinates, a tree of compressed modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import tirx

from sparsetir.errors import ArgumentError, StructureError
from sparsetir.formats.base import Estimate, FormatRewriteRule, axis_name, describe
from sparsetir.formats.format import (
    Array,
    Entries,
    Format,
    Packed,
    check_idtype,
    check_positive,
    register,
)
from sparsetir.interop.arrays import (
    begins,
    changes,
    counting,
    index_array,
    put,
    sorting_order,
    spread,
    stable_argsort,
    take,
    transpose,
)
from sparsetir.interop.sources import CompressedSource
from sparsetir.utils.memory import check_memory


@dataclass(frozen=True, repr=False)
class SinglePieceFormat(Format):
    """A format of one piece; a subclass says `rule` and `packed`."""

    idtype: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_idtype(self.idtype)

    @property
    def rules(self) -> Sequence[FormatRewriteRule]:
        return _rules(type(self), tuple(vars(self).items()))  # type: ignore[arg-type]  # a class is hashable

    def pack(self, entries: Entries) -> list[Packed]:
        return [self.packed(entries)]

    def rule(self) -> FormatRewriteRule:
        """Return the rule of the piece."""
        raise NotImplementedError

    def packed(self, entries: Entries) -> Packed:
        """Return the piece of a tensor."""
        raise NotImplementedError

    def description(self, name: str | None = None, **declarations: str) -> tirx.PrimFunc:
        """Return the description of the piece with these declarations, see `describe`; of the format's name."""
        return describe(name or self.name, self.index_type, **declarations)

    def arrays(self, **arrays: Array) -> dict[str, Array]:
        """Convert index arrays to the index type."""
        return {name: index_array(array, self.index_type) for name, array in arrays.items()}


@lru_cache(maxsize=256)
def _rules(kind: type[SinglePieceFormat], parameters: tuple[tuple[str, Any], ...]) -> tuple[FormatRewriteRule]:
    """Return the rules of a layout, which is looked up by class and parameters without entering a Python function."""
    return (kind(**dict(parameters)).rule(),)


@register("csr")
@dataclass(frozen=True, repr=False)
class CSR(SinglePieceFormat):
    """Compressed sparse rows: where each row begins, and the column of each entry.

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0], [3.0, 4.0]]), format="csr")
    >>> {name: array.tolist() for name, array in t.pieces[0].arrays.items()}
    {'indptr': [0, 1, 3], 'indices': [1, 0, 1]}
    """

    name = "csr"

    def rule(self) -> FormatRewriteRule:
        axes = "I = dense_fixed(m)\nJ = sparse_variable(I, (n, nnz), (indptr, indices))"
        text = self.description(arrays="indptr indices", sizes="m n nnz", axes=axes, buffer="I, J")
        return FormatRewriteRule("csr", text, {0: ["I"], 1: ["J"]}, partitions_rows=True)

    def packed(self, entries: Entries) -> Packed:
        (m, n), nnz = entries.shape, self.check_count(entries.nnz)
        arrays = self.arrays(indptr=entries.indptr, indices=entries.last)
        return Packed(arrays, {"m": m, "n": n, "nnz": nnz}, nnz)


@register("csc")
@dataclass(frozen=True, repr=False)
class CSC(SinglePieceFormat):
    """Compressed sparse columns: where each column begins, and the row of each entry.

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0], [3.0, 4.0]]), format="csc")
    >>> t.pieces[0].values.tolist()
    [3.0, 2.0, 4.0]
    """

    name = "csc"

    def rule(self) -> FormatRewriteRule:
        axes = "J = dense_fixed(n)\nI = sparse_variable(J, (m, nnz), (indptr, indices))"
        text = self.description(arrays="indptr indices", sizes="m n nnz", axes=axes, buffer="I, J")
        return FormatRewriteRule("csc", text, {0: ["I"], 1: ["J"]})

    def packed(self, entries: Entries) -> Packed:
        return self.fill(entries, np.zeros(entries.nnz, np.int8))[0][0]

    def fill(self, entries: Entries, values: Array) -> list[tuple[Packed, Array]]:
        self.check_count(entries.nnz)
        check_memory(8 * entries.shape[1], f"pointers to {entries.shape[1]} columns")
        indptr, indices, placed = _by_column(entries, values)

        def order() -> Array:
            return _by_column(entries, counting(entries.nnz))[2]

        return [(self._piece(entries.shape, indptr, indices, entries=order), placed)]

    def borrow(self, source: Any, slots: Callable[[], Array]) -> list[tuple[Packed, Array]] | None:
        if not isinstance(source, CompressedSource) or source.major != 1 or source.block:
            return None
        return [(self._piece(source.shape, source.indptr, source.indices, slots=slots), source.values)]

    def _piece(self, shape: tuple[int, ...], indptr: Array, indices: Array, **where: Any) -> Packed:
        (m, n), nnz = shape, len(indices)
        arrays = self.arrays(indptr=indptr, indices=indices)
        return Packed(arrays, {"m": m, "n": n, "nnz": nnz}, nnz, size=nnz, **where)


def _by_column(entries: Entries, values: Array) -> tuple[Array, Array, Array]:
    """Return the column pointers, the rows of their entries, and the values in this order."""
    m, n = entries.shape
    if m <= 4 * entries.nnz:
        return transpose(entries.indptr, entries.last, values, (m, n))
    rows, columns = entries.coords
    order = stable_argsort(columns, n)
    return begins(np.bincount(columns, minlength=n)), take(rows, order), take(values, order)


@register("dcsr")
@dataclass(frozen=True, repr=False)
class DCSR(SinglePieceFormat):
    """Doubly compressed sparse rows: only the rows that hold something (Buluç and Gilbert, 2008).

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_coo([[7, 7], [0, 2]], np.ones(2), (1000, 3), format="dcsr")
    >>> {name: array.tolist() for name, array in t.pieces[0].arrays.items()}
    {'indptr_i': [0, 1], 'indices_i': [7], 'indptr_j': [0, 2], 'indices_j': [0, 2]}
    """

    name = "dcsr"

    def rule(self) -> FormatRewriteRule:
        text = self.description(
            arrays="indptr_i indices_i indptr_j indices_j",
            sizes="m n rows nnz",
            axes="""I = sparse_variable(None, (m, rows), (indptr_i, indices_i))
                    J = sparse_variable(I, (n, nnz), (indptr_j, indices_j))""",
            buffer="I, J",
        )
        return FormatRewriteRule("dcsr", text, {0: ["I"], 1: ["J"]})

    def packed(self, entries: Entries) -> Packed:
        (m, n), nnz = entries.shape, self.check_count(entries.nnz)
        rows, starts = entries.occupied
        arrays = self.arrays(indptr_i=np.array([0, len(rows)]), indices_i=rows, indptr_j=starts, indices_j=entries.last)
        return Packed(arrays, {"m": m, "n": n, "rows": len(rows), "nnz": nnz}, nnz)


@register("ell")
@dataclass(frozen=True, repr=False)
class ELL(SinglePieceFormat):
    """As many slots in each row; those that a row does not need hold column n and value zero.

    Parameters
    ----------
    width : int, optional
        Slots in a row: a constant in the description. By default what the longest row needs, at least 1.
    idtype : {"int32", "int64"}, optional
        Of the index arrays.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0], [3.0, 4.0]]), format="ell")
    >>> t.pieces[0].arrays["indices"].tolist(), t.padding
    ([1, 2, 0, 1], 0.25)
    """

    width: int | None = None
    name = "ell"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None:
            check_positive(self.name, width=self.width)

    def rule(self) -> FormatRewriteRule:
        width = self.width or "width"
        axes = f"I = dense_fixed(m)\nJ = sparse_fixed(I, (n, {width}), indices)"
        sizes = "m n" if self.width else "m n width"
        text = self.description(arrays="indices", sizes=sizes, axes=axes, buffer="I, J")
        return FormatRewriteRule("ell", text, {0: ["I"], 1: ["J"]}, partitions_rows=True)

    def packed(self, entries: Entries) -> Packed:
        m, n = entries.shape
        width = self._width(entries)
        count = self.check_count(m * width, indices=m * width)
        slots = spread(np.arange(m, dtype=np.int64) * width, entries.indptr, self.index_type)
        indices = np.full(count, n, self.index_type)
        put(indices, slots, entries.last)
        sizes = {"m": m, "n": n} if self.width else {"m": m, "n": n, "width": width}
        return Packed({"indices": indices}, sizes, count, slots=slots)

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.shape[0] * (self.width or max(pattern.rows.max, 1)))

    def _width(self, entries: Entries) -> int:
        lengths = np.diff(entries.indptr)
        longest = int(lengths.max(initial=0))
        if self.width is None:
            return max(longest, 1)
        if longest > self.width:
            fault = f"row {int(lengths.argmax())} holds {longest} entries but {self!r} has {self.width} slots in a row"
            raise StructureError(f"{fault}: raise the width, leave it out, or cut the matrix into several pieces")
        return self.width


@register("ragged")
@dataclass(frozen=True, repr=False)
class Ragged(SinglePieceFormat):
    """Each row a dense prefix, as long as its last entry needs.

    Parameters
    ----------
    idtype : {"int32", "int64"}, optional
        Of the index array.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> t = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0, 0], [3.0, 0, 0]]), format="ragged")
    >>> t.pieces[0].arrays["indptr"].tolist(), t.pieces[0].values.tolist()
    ([0, 2, 3], [0.0, 2.0, 3.0])
    """

    name = "ragged"

    def rule(self) -> FormatRewriteRule:
        axes = "I = dense_fixed(m)\nJ = dense_variable(I, (n, nnz), indptr)"
        text = self.description(arrays="indptr", sizes="m n nnz", axes=axes, buffer="I, J")
        return FormatRewriteRule("ragged", text, {0: ["I"], 1: ["J"]}, fills=True, partitions_rows=True)

    def estimate(self, pattern: Any) -> Estimate:
        return Estimate(pattern.prefix)

    def packed(self, entries: Entries) -> Packed:
        m, n = entries.shape
        rows, starts = entries.occupied
        extents = np.zeros(m, np.int64)
        extents[rows] = entries.last[starts[1:] - 1].astype(np.int64) + 1
        indptr = begins(extents)
        count = self.check_count(int(indptr[-1]))
        slots = np.repeat(indptr[:-1].astype(self.index_type), np.diff(entries.indptr))
        slots += entries.last.astype(self.index_type, copy=False)
        return Packed(self.arrays(indptr=indptr), {"m": m, "n": n, "nnz": count}, count, slots=slots)


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
        text = self.description(
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
            raise ArgumentError(f"order of csf must name each dimension from 0 on once, got {order}")

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
        text = self.description(
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


__all__ = ["COO", "CSC", "CSF", "CSR", "DCSR", "ELL", "Ragged", "SinglePieceFormat"]
