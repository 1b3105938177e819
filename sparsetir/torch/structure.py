# SPDX-License-Identifier: Apache-2.0
"""Structures of graphs: compressed rows and columns, transposes, and results of constant tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import numpy as np

import torch
from sparsetir import interop
from sparsetir.errors import ArgumentError, ArgumentTypeError, OffsetError, StructureError
from sparsetir.ir.halves import PRECISIONS
from sparsetir.ir.sizes import LARGEST_INT32
from sparsetir.runtime.bound import BoundKernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.torch.block_attention import BlockPattern, find_blocks
from sparsetir.torch.programs import Sizes, kernel
from sparsetir.utils.arguments import shown
from sparsetir.utils.caches import Cache, cached_property
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
    prints: list[list[Tensor]] | None
    result: Tensor | None

    def is_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether the entry belongs to these tensors, in whose memory torch has changed nothing."""
        if self.versions != [t._version for t in tensors]:
            return False
        return all(owner() is t for owner, t in zip(self.owners, tensors, strict=True))

    def has(self, prints: list[list[Tensor]]) -> bool:
        """Return whether these are the fingerprints of the tensors when they were noted."""
        if self.prints is None:
            return False
        pairs = (pair for one, other in zip(prints, self.prints, strict=True) for pair in zip(one, other, strict=True))
        return all(torch.equal(current, previous) for current, previous in pairs)


class ConstantCache:
    """Results of tensors that come again, for as long as these live and nothing changes them in place.

    What comes for the first time is only noted: features of new batches are not worth the time and the memory.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def of(self, name: str, tensors: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> Tensor | None:
        """Return the result of a name, which is read-only; None if the tensors were not seen twice as they are now."""
        key = (name, *map(id, tensors))
        entry = self.entries.get(key)
        if entry is None or not entry.is_of(tensors):
            self._put(key, tensors, None)
            return None
        prints = [fingerprint(t) for t in tensors]
        if not entry.has(prints):
            self._put(key, tensors, prints)
            return None
        if entry.result is not None:
            return entry.result
        result = compute()
        self.entries[key] = _Entry(entry.owners, entry.versions, prints, result)
        return result

    def _put(self, key: Hashable, tensors: tuple[Tensor, ...], prints: list[list[Tensor]] | None) -> None:
        me = ref(self)

        def forget(_dead: Any) -> None:
            cache = me()
            if cache is not None:
                cache.entries.pop(key, None)

        self.entries[key] = _Entry([ref(t, forget) for t in tensors], [t._version for t in tensors], prints, None)
        while len(self.entries) > MOST:
            self.entries.popitem(last=False)


# The structure of a graph: rows, columns, and the way between them.


Array = np.ndarray
MAX_BOUND = 64  # programs over a structure
MOST_UNBOUND, LARGE = 8, 1 << 17  # calls of a program before it is bound, and entries from which on it is bound at once
MIN_BLOCKED = 1 << 14  # edges: finding and compiling blocks takes longer than fewer are worth
KEY_BITS = 63  # of an integer by which entries are sorted


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
    unbound_calls: dict[Any, int] = field(default_factory=dict)
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
            compiled, arrays = self._program(name, dtype, inner, *options)
            bound = self.bound[key] = compiled.bind(**arrays)
        return bound

    def _program(self, name: str, dtype: str, inner: Sizes, *options: Any) -> tuple[Kernel, dict[str, Any]]:
        """Return the kernel of a program, and its arguments that are this structure."""
        compiled = kernel(name, dtype, str(self.indptr.dtype), inner, self.order is not None, *options)
        arrays: dict[str, Any] = {"indptr": self.indptr, "indices": self.indices, "n": self.columns}
        if self.order is not None:
            arrays["p_data"] = self.order
        if "place_data" in compiled.signature.by_name:
            arrays["place_data"] = self.places
        return compiled, arrays

    def _call(self, name: str, dtype: str, inner: Sizes, *options: Any) -> Callable[..., Any]:
        """Return a function that calls a program: bound to this structure, unless that is small and was rarely called.

        To bind a structure takes as long as several calls that validate a small one.
        """
        key = (name, dtype, inner, options)
        bound = self.bound.get(key)
        if bound is not None:
            return bound
        calls = self.unbound_calls[key] = self.unbound_calls.get(key, 0) + 1
        if calls > MOST_UNBOUND or self.indices.size > LARGE:
            return self.kernel(name, dtype, inner, *options)
        compiled, arrays = self._program(name, dtype, inner, *options)
        return partial(compiled, **arrays)

    def run(self, name: str, dtype: str, inner: Sizes, *options: Any, **tensors: torch.Tensor | None) -> Any:
        """Call a program with dense tensors, those that are not None; it returns one, or several."""
        weight = tensors.get("W")
        if dtype in PRECISIONS and self.order is not None and weight is not None:
            tensors["W"] = weight.detach()[self.way]  # units multiply values that are in the order of the rows
            return self.ordered.run(name, dtype, inner, *options, **tensors)
        bound = self._call(name, dtype, inner, *options)
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
        """The columns of the graph without edges; None where each has one."""
        check_memory(self.columns, "a mark for each column")
        is_unread = np.ones(self.columns, bool)
        is_unread[self.indices] = False
        unread = is_unread.nonzero()[0]
        return torch.from_numpy(unread) if unread.size else None

    @cached_property
    def places(self) -> Array:
        """The number of each entry."""
        return np.arange(self.indices.size, dtype=self.indices.dtype)

    @cached_property
    def transposed(self) -> GraphRows:
        """The columns; their values are found in the order of these rows."""
        dtype = self.indices.dtype
        columns, order = _sorted(self.indices, self.columns, dtype)
        indptr = _pointers(columns, self.columns, dtype)
        rows = np.repeat(np.arange(self.rows, dtype=dtype), np.diff(self.indptr))[order]
        if self.rows == self.columns and np.array_equal(indptr, self.indptr) and np.array_equal(rows, self.indices):
            return GraphRows(self.indptr, self.indices, self.rows, order)
        return GraphRows(indptr, rows, self.rows, order)

    def check(self) -> None:
        """Raise if the tensors that it was made of have changed."""
        for index, version in self.watched:
            if index._version != version:
                raise StructureError(
                    "the index arrays of the graph, or its values, were changed in place: make a new Graph of them"
                )

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "bound": Cache[BoundKernel](MAX_BOUND), "shares": {}, "watched": ()}
        del state["tensors"], state["kept"], state["unbound_calls"]
        state.pop("places", None)
        state.pop("widened", None)
        state.pop("way", None)
        state.pop("unread", None)
        state.pop("blocks", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, kept=ConstantCache(), unbound_calls={})
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


def _in_order(rows: Array, columns: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Sort entries by row and column, stably: return row pointers, the columns in that order, and the order."""
    (m, n), count = shape, rows.size
    if sum(map(_bits, (m, n, count))) <= KEY_BITS:
        keys = rows.astype(np.int64)
        keys <<= _bits(n)
        keys |= columns
        keys, order = _sorted(keys, m << _bits(n), rows.dtype)
        in_order = (keys & ((1 << _bits(n)) - 1)).astype(rows.dtype)
        keys >>= _bits(n)
    else:
        _, by_column = _sorted(columns, n, rows.dtype)
        keys, by_row = _sorted(rows[by_column], m, rows.dtype)
        order = by_column[by_row]
        in_order = columns[order]
    return _pointers(keys, m, rows.dtype), in_order, order


def _bits(size: int) -> int:
    """Return how many bits a number below `size` has."""
    return max(size - 1, 0).bit_length()


def _sorted(keys: Array, size: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Sort keys below `size`, stably: return them in int64, and their order.

    Key and number of an entry are sorted as one integer where it has the bits for both, by vector instructions.
    """
    bits = _bits(keys.size)
    if _bits(size) + bits > KEY_BITS:
        order = np.argsort(keys, kind="stable")
        return keys[order].astype(np.int64), order.astype(dtype)
    numbered = keys.astype(np.int64)
    numbered <<= bits
    numbered |= np.arange(keys.size)
    numbered.sort()
    order = (numbered & ((1 << bits) - 1)).astype(dtype)
    numbered >>= bits
    return numbered, order


def _pointers(rows: Array, m: int, dtype: np.dtype[Any]) -> Array:
    """Return where the entries of each row begin, of sorted rows."""
    check_memory(2 * (m + 1) * dtype.itemsize, "where each row or column of a graph begins")
    indptr = np.zeros(m + 1, dtype)
    if rows.size:
        first = np.flatnonzero(rows[1:] != rows[:-1]) + 1
        counts = np.diff(first, prepend=0, append=rows.size)
        indptr[rows[np.concatenate(([0], first))] + 1] = counts
        np.cumsum(indptr, dtype=dtype, out=indptr)
    return indptr


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
        dtype = np.dtype(np.int32 if max(m, n, self.rows.size) <= LARGEST_INT32 else np.int64)
        rows, columns = (np.ascontiguousarray(part, dtype=dtype) for part in (self.rows, self.columns))
        if _is_sorted(rows, columns):
            copied = columns.copy() if columns is self.columns or columns.base is not None else columns
            return GraphRows(_pointers(rows, m, dtype), copied, n), None
        indptr, in_order, order = _in_order(rows, columns, (m, n))
        return GraphRows(indptr, in_order, n), order


def _is_sorted(rows: Array, columns: Array) -> bool:
    """Return whether entries are sorted by rows, and by columns within each row."""
    if rows.size < 2:
        return True
    step = np.diff(rows)
    return bool(np.all((step > 0) | ((step == 0) & (columns[1:] >= columns[:-1]))))


# ------------------------------------------------------------------ structures of users


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
        raise ArgumentTypeError(f"a graph is {expected}, got {type(graph).__name__}")
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
        raise ArgumentError(f"a graph is a matrix of two dimensions without blocks, got shape {source.shape}")
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
            f"an edge_index has shape [2, edges] and integers, sources above targets, got {description}"
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
        raise ArgumentError(f"num_nodes is a number, or (sources, targets), got {shown(num_nodes)}")
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
