# SPDX-License-Identifier: Apache-2.0
"""Structures of graphs: compressed rows and columns, transposes, and results of constant tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import numpy as np
import scipy.sparse as sp

import torch
from sparsetir import interop
from sparsetir.errors import ArgumentError, ArgumentTypeError, OffsetError, StructureError
from sparsetir.ir.halves import PRECISIONS
from sparsetir.runtime.bound import BoundKernel
from sparsetir.torch.block_attention import BlockPattern, find_blocks
from sparsetir.torch.programs import Sizes, kernel
from sparsetir.utils.arguments import shown
from sparsetir.utils.caches import Cache
from sparsetir.utils.memory import check_memory
from torch import Tensor

# Results of constant tensors, which are computed once.


MOST = 4  # sets of tensors that are known
WIDTH = 64  # elements that are summed for a fingerprint
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> list[Tensor]:
    """Return checksums that also detect changes that numpy makes in the memory of a tensor.

    Sums of the bits of elements, one in `WIDTH` of them, see any one change, and weighted sums of as many neighbours
    that elements were exchanged.
    """
    flat = tensor.detach().resolve_neg().contiguous().flatten()
    count = flat.numel() // WIDTH * WIDTH
    rows, bits = flat[:count].view(-1, WIDTH), flat.view(BITS[flat.element_size()])
    whole = bits[:count].view(-1, WIDTH)
    wide = rows if rows.dtype is torch.float64 else rows.float()
    weighted = torch.mv(wide, _weights(wide.dtype))
    sums = whole.sum(0, dtype=bits.dtype)
    return [sums, weighted.view(BITS[weighted.element_size()]), bits[count:].clone()]


@cache
def _weights(dtype: torch.dtype) -> Tensor:
    return torch.rand(WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(0))


class _Entry(NamedTuple):
    owners: list[Any]
    versions: list[int]
    prints: list[list[Tensor]]
    result: Tensor | None

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether the entry belongs to these tensors with their present contents."""
        if self.versions != [t._version for t in tensors]:
            return False
        if not all(owner() is t for owner, t in zip(self.owners, tensors, strict=True)):
            return False
        pairs = (
            pair
            for t, previous in zip(tensors, self.prints, strict=True)
            for pair in zip(fingerprint(t), previous, strict=True)
        )
        return all(torch.equal(current, previous) for current, previous in pairs)


class ConstantCache:
    """Results of tensors that come again, for as long as these live and nothing changes them in place.

    What comes for the first time is only noted: features of new batches are not worth the memory.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[Hashable, _Entry] = OrderedDict()

    def of(self, name: str, tensors: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> Tensor | None:
        """Return the result of a name, which is read-only; None if the tensors were not seen with these contents."""
        key = (name, *map(id, tensors))
        entry = self.found.get(key)
        if entry is None or not entry.is_of(tensors):
            self._put(key, tensors)
            return None
        if entry.result is not None:
            return entry.result
        result = compute()
        self.found[key] = _Entry(entry.owners, entry.versions, entry.prints, result)
        return result

    def _put(self, key: Hashable, tensors: tuple[Tensor, ...]) -> None:
        me = ref(self)

        def forget(_dead: Any) -> None:
            cache = me()
            if cache is not None:
                cache.found.pop(key, None)

        prints = [fingerprint(t) for t in tensors]
        self.found[key] = _Entry([ref(t, forget) for t in tensors], [t._version for t in tensors], prints, None)
        while len(self.found) > MOST:
            self.found.popitem(last=False)


# The structure of a graph: rows, columns, and the way between them.


Array = np.ndarray
MAX_BOUND = 64  # programs over a structure
MIN_BLOCKED = 1 << 14  # edges: finding and compiling blocks takes longer than fewer are worth
WIDE = 2**31 - 1  # sizes up to that have indices of 32 bits


@dataclass(eq=False)
class GraphRows:
    """The rows of a graph one after the other, or its columns.

    Parameters
    ----------
    indptr, indices : ndarray
    columns : int
        How many there are.
    order : ndarray, optional
        Of each entry, the place of its value in the order of the rows; None where that is its own.
    watched : tuple of (Tensor, int)
        What it was made of, and torch's count of changes in place then.
    tensors : tuple of Tensor
        `indptr` and `indices`, as programs that torch traces hold them.
    """

    indptr: Array
    indices: Array
    columns: int
    order: Array | None = None
    watched: tuple[tuple[torch.Tensor, int], ...] = ()
    bound: Cache[BoundKernel] = field(default_factory=lambda: Cache[BoundKernel](MAX_BOUND))
    shares: dict[Any, torch.Tensor] = field(default_factory=dict)
    kept: ConstantCache = field(default_factory=ConstantCache)
    tensors: tuple[torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = torch.from_numpy(self.indptr), torch.from_numpy(self.indices)
        if self.order is None:
            _made[_place(*self.tensors, self.columns)] = self

    @property
    def rows(self) -> int:
        return self.indptr.size - 1

    def kernel(self, name: str, dtype: str, inner: Sizes, *options: Any) -> BoundKernel:
        """Return the kernel of a program over this structure, compiled and bound on first use."""
        key = (name, dtype, inner, options)
        bound = self.bound.get(key)
        if bound is None:
            compiled = kernel(name, dtype, str(self.indptr.dtype), inner, self.order is not None, *options)
            order = {} if self.order is None else {"p_data": self.order}
            if "place_data" in compiled.signature.by_name:
                order["place_data"] = self.places
            bound = self.bound[key] = compiled.bind(indptr=self.indptr, indices=self.indices, n=self.columns, **order)
        return bound

    def run(self, name: str, dtype: str, inner: Sizes, *options: Any, **tensors: torch.Tensor | None) -> Any:
        """Call a program with dense tensors, those that are not None; it returns one, or several."""
        weight = tensors.get("W")
        if dtype in PRECISIONS and self.order is not None and weight is not None:
            tensors["W"] = weight.detach()[self.way]  # units multiply values that are in the order of the rows
            return self.ordered.run(name, dtype, inner, *options, **tensors)
        bound = self.bound.get((name, dtype, inner, options)) or self.kernel(name, dtype, inner, *options)
        operands: dict[str, Any] = {}
        for key, tensor in tensors.items():
            if tensor is not None:
                tensor = tensor.detach() if tensor.requires_grad else tensor
                operands[key] = tensor.resolve_neg() if tensor.is_neg() else tensor
        try:
            if dtype == "bfloat16":  # which numpy does not have
                return bound(**operands)
            arrays = bound(**{key: tensor.numpy() for key, tensor in operands.items()})
        except OffsetError:
            if self.indptr.dtype == np.int64:
                raise
            return self.widened.run(name, dtype, inner, *options, **tensors)
        return tuple(map(torch.from_numpy, arrays)) if type(arrays) is tuple else torch.from_numpy(arrays)

    def share(self, dtype: torch.dtype) -> torch.Tensor:
        """Return one over the number of entries of each row, for means; 1 for rows without entries."""
        shares = self.shares.get(dtype)
        if shares is None:
            counts = np.maximum(np.diff(self.indptr), 1)
            shares = self.shares[dtype] = (1 / torch.from_numpy(counts).double()).to(dtype)
        return shares

    @cached_property
    def widened(self) -> GraphRows:
        """The same rows with indices of 64 bits, for tensors of more elements than 32 count."""
        order = None if self.order is None else self.order.astype(np.int64)
        return GraphRows(self.indptr.astype(np.int64), self.indices.astype(np.int64), self.columns, order)

    @cached_property
    def ordered(self) -> GraphRows:
        """The same rows for values in their own order."""
        return self if self.order is None else GraphRows(self.indptr, self.indices, self.columns)

    @cached_property
    def way(self) -> torch.Tensor:
        """`order` as an index of torch."""
        return torch.from_numpy(self.order).long()

    @cached_property
    def blocks(self) -> BlockPattern | None:
        """The blocks of edges in which attention is expected to be faster; None where single edges are."""
        return None if self.indices.size < MIN_BLOCKED else find_blocks(self.indptr, self.indices, self.columns)

    @cached_property
    def unread(self) -> torch.Tensor | None:
        """A column of bools, true for columns of the graph without edges; None where each has one."""
        check_memory(self.columns, "a mark for each column")
        is_read = np.zeros((self.columns, 1), bool)
        is_read[self.indices] = True
        return None if is_read.all() else torch.from_numpy(~is_read)

    @cached_property
    def places(self) -> Array:
        """The number of each entry."""
        return np.arange(self.indices.size, dtype=self.indices.dtype)

    @cached_property
    def transposed(self) -> GraphRows:
        """The columns, by counting; their values are found in the order of these rows."""
        indptr, order = _counted(self.indices, self.columns)
        rows = np.repeat(np.arange(self.rows, dtype=self.indices.dtype), np.diff(self.indptr))[order]
        if self.rows == self.columns and np.array_equal(indptr, self.indptr) and np.array_equal(rows, self.indices):
            return GraphRows(self.indptr, self.indices, self.rows, order)
        return GraphRows(indptr, rows, self.rows, order)

    def check(self) -> None:
        """Raise where what it was made of has changed."""
        for index, version in self.watched:
            if index._version != version:
                raise StructureError(
                    "the index arrays of the graph, or its values, were changed in place: make a new Graph of them"
                )

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "bound": Cache[BoundKernel](MAX_BOUND), "shares": {}, "watched": ()}
        del state["tensors"], state["kept"]
        state.pop("places", None)
        state.pop("widened", None)
        state.pop("way", None)
        state.pop("unread", None)
        state.pop("blocks", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, kept=ConstantCache())
        self.__post_init__()


Place = tuple[int, int, int, int, int]
_made: WeakValueDictionary[Place, GraphRows] = WeakValueDictionary()  # rows of graphs, by where their arrays lie


def _place(indptr: torch.Tensor, indices: torch.Tensor, columns: int) -> Place:
    """Return the memory of a structure, which it keeps alive: graphs may share row pointers and have other columns."""
    return indptr.data_ptr(), indptr.numel(), indices.data_ptr(), indices.numel(), columns


def known(indptr: torch.Tensor, indices: torch.Tensor, columns: int) -> GraphRows:
    """Return the rows that have these tensors, or new ones."""
    rows = _made.get(_place(indptr, indices, columns))
    return GraphRows(indptr.numpy(), indices.numpy(), columns) if rows is None else rows


def _counted(keys: Array, length: int) -> tuple[Array, Array]:
    """Sort entries by key, stably: return where the entries of each key begin, and their order."""
    dtype, count = keys.dtype, keys.size
    check_memory(length * dtype.itemsize, "where each row or column of a graph begins")
    positions = np.arange(count, dtype=dtype)
    by_key = sp.csr_array((positions, keys, np.arange(count + 1, dtype=dtype)), shape=(count, length)).tocsc()
    return by_key.indptr.astype(dtype, copy=False), by_key.indices.astype(dtype, copy=False)


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges in the order in which a user has them.

    Parameters
    ----------
    shape : (int, int)
    rows, columns : ndarray
    values : Tensor or None
        Of a matrix.
    """

    shape: tuple[int, int]
    rows: Array
    columns: Array
    values: torch.Tensor | None = None

    def compressed(self) -> tuple[GraphRows, Array | None]:
        """Return the rows, and the edge of each entry; None if the edges are in that order already."""
        m, n = self.shape
        check_memory(max(m, n) * np.dtype(np.int64).itemsize, "the row pointers of a graph and of its transpose")
        dtype = np.dtype(np.int32 if max(m, n, self.rows.size) <= WIDE else np.int64)
        rows, columns = (np.ascontiguousarray(part, dtype=dtype) for part in (self.rows, self.columns))
        if _is_sorted(rows, columns):
            indptr = np.zeros(m + 1, dtype)
            np.cumsum(np.bincount(rows, minlength=m), out=indptr[1:])
            copied = columns.copy() if columns is self.columns or columns.base is not None else columns
            return GraphRows(indptr, copied, n), None
        _, by_column = _counted(columns, n)
        indptr, by_row = _counted(rows[by_column], m)
        order = by_column[by_row]
        return GraphRows(indptr, columns[order], n), order


def _is_sorted(rows: Array, columns: Array) -> bool:
    """Return whether entries are sorted by rows, and by columns within each row."""
    if rows.size < 2:
        return True
    step = np.diff(rows)
    return bool(np.all((step > 0) | ((step == 0) & (columns[1:] >= columns[:-1]))))


# ------------------------------------------------------------------ what users have


def read(graph: Any, num_nodes: Any = None) -> Edges:
    """Read the edges of a matrix or of an edge index.

    Raises
    ------
    ArgumentTypeError
        It is neither.
    ArgumentError, StructureError
        Sizes that do not fit, indices out of range.
    """
    if interop.is_sparse(graph):
        return _of_matrix(graph, num_nodes)
    if not isinstance(graph, (torch.Tensor, np.ndarray)):
        expected = "a sparse matrix of scipy or torch, a dense one, or an edge_index of shape [2, edges]"
        raise ArgumentTypeError(f"a graph is {expected}; found {type(graph).__name__}")
    if num_nodes is None and isinstance(graph, torch.Tensor) and hasattr(graph, "sparse_size"):
        num_nodes = _sizes_of(graph)
    if isinstance(graph, np.ndarray):
        graph = interop.to_torch(np.ascontiguousarray(graph))
    if graph.is_quantized:
        raise ArgumentTypeError(f"graph: expected numbers, got a tensor of {graph.dtype}. Pass graph.dequantize().")
    array = graph.resolve_conj().resolve_neg()
    if array.device.type != "cpu":
        raise ArgumentTypeError(f"the graph is on {array.device}, kernels run on the cpu: pass it .cpu()")
    if array.requires_grad:
        raise ArgumentTypeError(_NEEDS_NO_GRAD)
    if array.dim() == 2 and (array.is_floating_point() or array.dtype == torch.bool):
        return _of_dense(array, num_nodes)
    return _of_index(array.numpy(), num_nodes)


_NEEDS_NO_GRAD = (
    "the matrix requires grad, but a graph is structure: pass it .detach(), and its values as weight= to spmm"
)


def _of_matrix(matrix: Any, num_nodes: Any) -> Edges:
    if getattr(matrix, "requires_grad", False):
        raise ArgumentTypeError(_NEEDS_NO_GRAD)
    source = interop.open_source(matrix, "graph")
    source.check("graph")
    if len(source.shape) != 2 or source.block:
        raise ArgumentError(f"a graph is a matrix of two dimensions without blocks, found shape {source.shape}")
    m, n = source.shape
    if num_nodes is not None and _sizes(num_nodes) != (n, m):
        raise ArgumentError(f"num_nodes is {num_nodes}, but the matrix has {m} rows and {n} columns: leave it out")
    rows, columns = source.coords()
    values = interop.to_torch(np.array(source.values))
    return Edges((m, n), rows, columns, values if values.is_floating_point() else None)


def _of_dense(matrix: torch.Tensor, num_nodes: Any) -> Edges:
    m, n = matrix.shape
    if num_nodes is not None and _sizes(num_nodes) != (n, m):
        raise ArgumentError(f"num_nodes is {num_nodes}, but the matrix has {m} rows and {n} columns: leave it out")
    rows, columns = (part.numpy() for part in matrix.nonzero(as_tuple=True))
    values = matrix[matrix != 0].clone() if matrix.is_floating_point() else None
    return Edges((m, n), rows, columns, values)


def _of_index(index: Array, num_nodes: Any) -> Edges:
    if index.ndim != 2 or index.shape[0] != 2 or index.dtype.kind not in "iu":
        description = f"an array of shape {list(index.shape)} and dtype {index.dtype}"
        raise ArgumentError(
            f"an edge_index has shape [2, edges] and integers, sources above targets; found {description}"
        )
    sources, targets = index
    least = int(index.min()) if index.size else 0
    if least < 0:
        raise StructureError(f"edge_index holds {least}, expected numbers of nodes, 0 or more")
    tops = tuple(int(part.max()) + 1 if part.size else 0 for part in (sources, targets))
    n, m = _sizes(num_nodes) if num_nodes is not None else (max(tops), max(tops))
    for name, top, size in (("source", tops[0], n), ("target", tops[1], m)):
        if top > size:
            raise StructureError(f"edge_index has {name} {top - 1}, expected one of [0, {size}), the number of nodes")
    return Edges((m, n), targets, sources)


def _sizes(num_nodes: Any) -> tuple[int, int]:
    """Return the numbers of sources and of targets."""
    pair = tuple(num_nodes) if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    if len(pair) != 2 or not all(isinstance(n, (int, np.integer)) and 0 <= n < 1 << 63 for n in pair):
        raise ArgumentError(f"num_nodes is a number, or (sources, targets); found {shown(num_nodes)}")
    return int(pair[0]), int(pair[1])


def _sizes_of(edge_index: Any) -> tuple[int, int] | None:
    """Return what an `EdgeIndex` of torch_geometric knows of the numbers of sources and targets."""
    sizes = edge_index.sparse_size()
    return None if None in sizes else tuple(sizes)


def versions(graph: Any) -> tuple[tuple[torch.Tensor, int], ...]:
    """Return the index tensors of a graph, and torch's count of their changes in place."""
    return tuple((t, t._version) for t in _tensors(graph) if not t.is_inference())


def _tensors(graph: Any) -> list[torch.Tensor]:
    """Return the index tensors of a graph in torch."""
    if not isinstance(graph, torch.Tensor):
        return []
    parts = {
        torch.sparse_csr: lambda: [graph.crow_indices(), graph.col_indices()],
        torch.sparse_csc: lambda: [graph.ccol_indices(), graph.row_indices()],
        torch.sparse_coo: lambda: [graph._indices()],
    }
    return parts.get(graph.layout, lambda: [graph])()


__all__ = ["ConstantCache", "Edges", "GraphRows", "read", "versions"]
