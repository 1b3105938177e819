# SPDX-License-Identifier: Apache-2.0
"""Products of torch's sparse tensors and grouped products of dense ones, with gradients in each operand.

A sparse gradient has the pattern of its operand: it is computed at stored entries only, by products under a mask.

Grouped products of torch tensors with gradients: `grouped_mm`, with the signature of ``torch._grouped_mm``.

Each product is computed by a register-blocked kernel of ours, by a loop of ``torch.mm``, by one padded ``torch.bmm``,
or by torch's own function where it takes such operands: they are timed once for a class of shapes, and the fastest is
used from then on.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from torch.autograd import forward_ad

import torch
from sparsetir.einsum.products import check_offsets
from sparsetir.einsum.products import matmul as plain_matmul
from sparsetir.einsum.products import run as run_kernel
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError
from sparsetir.ir.halves import check_precision
from sparsetir.torch.functions import (
    NAMES,
    KernelFunction,
    LinearFunction,
    SpMM,
    TransposedSpMM,
    differentiable,
)
from sparsetir.torch.graph import FEATURES, Graph, check_transforms
from sparsetir.torch.structure import GraphRows
from sparsetir.utils.arguments import shown
from sparsetir.utils.caches import cached_property, shared_cache
from torch import Tensor

MAX_STRUCTURES = 16
BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)
BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
SPARSE = (torch.sparse_csr, torch.sparse_csc, *BLOCKS, torch.sparse_coo)
_structures = shared_cache("structures of torch's sparse tensors", MAX_STRUCTURES)


@dataclass(frozen=True, eq=False)
class IndexStructure:
    """The index arrays of a compressed tensor, copied; those of CSC are the rows of the transpose.

    Parameters
    ----------
    indptr, indices : ndarray
    shape : (int, int)
        Of the compressed rows.
    """

    indptr: np.ndarray
    indices: np.ndarray
    shape: tuple[int, int]

    @cached_property
    def graph(self) -> Graph:
        """The graph of the rows, which has the kernels."""
        return Graph.of_rows(GraphRows(self.indptr, self.indices, self.shape[1]), None, None)

    @cached_property
    def keys(self) -> np.ndarray:
        """The number of each entry's place in row-major order."""
        rows = np.repeat(np.arange(self.shape[0], dtype=np.int64), np.diff(self.indptr))
        return rows * self.shape[1] + self.indices

    @cached_property
    def order(self) -> tuple[IndexStructure, Tensor, Tensor]:
        """The transpose, the entry that each of its entries is here, and the inverse."""
        side = self.graph.rows.transposed
        assert side.order is not None  # Compressed.transposed always has one
        back = np.empty_like(side.order)
        back[side.order] = np.arange(side.order.size, dtype=side.order.dtype)
        turned = IndexStructure(side.indptr, side.indices, self.shape[::-1])
        return turned, torch.from_numpy(side.order), torch.from_numpy(back)

    def matrix(self, values: Tensor) -> Any:
        """Return a scipy matrix with these values."""
        return sp.csr_array((values.detach().numpy(), self.indices, self.indptr), shape=self.shape)

    def places_of(self, part: Any) -> np.ndarray | None:
        """Return where entries of a scipy matrix are here; None if it has all of them."""
        if part.indices.size == self.indices.size:
            return None
        return np.searchsorted(self.keys, IndexStructure(part.indptr, part.indices, self.shape).keys)


@dataclass(frozen=True, eq=False)
class BlockStructure:
    """The blocks of a BSR or BSC tensor, and the entries of all blocks; of BSC those of the transpose.

    Parameters
    ----------
    blocks : IndexStructure
    size : (int, int)
        Rows and columns of a block.
    """

    blocks: IndexStructure
    size: tuple[int, int]

    @cached_property
    def entries(self) -> tuple[IndexStructure, Tensor]:
        """The structure of the entries, and where the values of each are among those of the blocks."""
        (rows, columns), blocks = self.size, self.blocks
        shape = blocks.shape[0] * rows, blocks.shape[1] * columns
        above = np.repeat(np.arange(blocks.shape[0]), np.diff(blocks.indptr))  # the row of blocks of each block
        row_of = (above[:, None] * rows + np.arange(rows))[:, :, None].repeat(columns, 2).ravel()
        column_of = (blocks.indices[:, None] * columns + np.arange(columns))[:, None].repeat(rows, 1).ravel()
        order = np.argsort(row_of, kind="stable")
        indptr = np.zeros(shape[0] + 1, blocks.indptr.dtype)
        np.cumsum(np.bincount(row_of, minlength=shape[0]), out=indptr[1:])
        indices = column_of[order].astype(blocks.indices.dtype, copy=False)
        return IndexStructure(indptr, indices, shape), torch.from_numpy(order)


def structure_of(tensor: Tensor, name: str) -> IndexStructure | BlockStructure:
    """Return the structure of a compressed tensor: the one of an earlier call if the index arrays are equal.

    Raises
    ------
    StructureError
        Rows are unsorted or repeat a coordinate, or indices are out of range.
    """
    pointers, indices = _indices(tensor)
    shape, size = tuple(tensor.shape), tuple(tensor.values().shape[1:])
    if tensor.layout in BY_COLUMNS:
        shape, size = shape[::-1], size[::-1]
    key = pointers.data_ptr(), indices.data_ptr(), pointers.dtype, shape, size, indices.numel()
    arrays = pointers.detach().numpy(), indices.detach().numpy()
    structure = _structures.get(key)
    if structure is not None:
        compared = structure.blocks if size else structure
        if all(map(np.array_equal, (compared.indptr, compared.indices), arrays)):
            return structure
    outer = (shape[0] // size[0], shape[1] // size[1]) if size else shape
    structure = IndexStructure(arrays[0].copy(), arrays[1].copy(), outer)
    _check(structure, name)
    if size:
        structure = BlockStructure(structure, size)
    _structures[key] = structure
    return structure


def _check(structure: IndexStructure, name: str) -> None:
    indptr, indices, (rows, columns) = structure.indptr, structure.indices, structure.shape
    fault = ""
    if indptr.size != rows + 1 or indptr[0] != 0 or indptr[-1] != indices.size or (np.diff(indptr) < 0).any():
        fault = f"row pointers that rise from 0 to {indices.size}"
    elif indices.size and (indices.min() < 0 or indices.max() >= columns):
        fault = f"indices in [0, {columns})"
    elif (np.diff(structure.keys) <= 0).any():
        fault = "sorted and distinct indices in each row"
    if fault:
        raise StructureError(f"{name}: expected {fault}, got others. Make it by {name}.to_sparse_coo().coalesce().")


# ------------------------------------------------------------------ values of tensors


class ValuesFunction(KernelFunction):
    """The values of a compressed tensor; the gradient is a tensor with its structure."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        ctx.like = matrix.detach()
        return matrix.detach().values().clone()

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return Assembled.apply(ctx.like, g)


class Assembled(KernelFunction):
    """A tensor with the structure of another one and new values."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, values: Tensor) -> Tensor:
        ctx.like, ctx.dtype = like, values.dtype
        ctx.set_materialize_grads(False)  # zeros that torch makes for a missing gradient have no entries
        options = {"dtype": values.dtype, "layout": like.layout, "check_invariants": False}
        return torch.sparse_compressed_tensor(*_indices(like), values.detach(), like.shape, **options)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor | None) -> Any:
        like = ctx.like
        if g is None:
            return None, None
        if g.layout is torch.strided and like.layout in BLOCKS:
            return None, _blocks_at(g, like)
        if g.layout is torch.strided:
            coordinates = like.to_sparse_coo()._indices()
            return None, g[coordinates[0], coordinates[1]]
        if g.layout is like.layout and all(map(torch.equal, _indices(g), _indices(like))):
            return None, ValuesFunction.apply(g)
        raise LoweringError("the gradient of a sparse product has another pattern than it: use its .values()")


def _blocks_at(dense: Tensor, like: Tensor) -> Tensor:
    """Return the blocks of a dense matrix where a BSR or BSC tensor stores one."""
    rows, columns = like.values().shape[1:]
    pointers, indices = _indices(like)
    outer = torch.repeat_interleave(torch.arange(pointers.numel() - 1), pointers.diff())
    places = (indices, outer) if like.layout in BY_COLUMNS else (outer, indices)
    tiles = dense.reshape(dense.shape[0] // rows, rows, dense.shape[1] // columns, columns).transpose(1, 2)
    return tiles[places]


def _indices(tensor: Tensor) -> tuple[Tensor, Tensor]:
    if tensor.layout not in BY_COLUMNS:
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


class Sampled(KernelFunction):
    """Entries of a product of sparse matrices at the places of a third one: ``(X @ Y)`` where `out` stores one."""

    @staticmethod
    def forward(
        ctx: Any, structures: tuple[IndexStructure, IndexStructure, IndexStructure], x: Tensor, y: Tensor
    ) -> Tensor:
        ctx.structures = structures
        ctx.save_for_backward(x, y)
        X, Y, out = structures
        mask = sp.csr_array((np.ones(out.indices.size, bool), out.indices, out.indptr), shape=out.shape)
        product = plain_matmul(X.matrix(x), Y.matrix(y), mask=mask)
        places, values = out.places_of(product), torch.from_numpy(product.data)
        if places is None:
            return values
        return values.new_zeros(out.indices.size).index_copy_(0, torch.from_numpy(places), values)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, *_gradients(ctx, g)


class ProductFunction(KernelFunction):
    """The values of a product of sparse matrices; the structure of the result is put into a list."""

    @staticmethod
    def forward(
        ctx: Any, structures: tuple[IndexStructure, IndexStructure], results: list[Any], x: Tensor, y: Tensor
    ) -> Tensor:
        X, Y = structures
        product = plain_matmul(X.matrix(x), Y.matrix(y))
        out = IndexStructure(product.indptr, product.indices, (X.shape[0], Y.shape[1]))
        results.append(out)
        ctx.structures = X, Y, out
        ctx.save_for_backward(x, y)
        return torch.from_numpy(product.data)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *_gradients(ctx, g)


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a product in the values of its factors: ``G @ Y.T`` and ``X.T @ G`` at their places."""
    (X, Y, out), (x, y) = ctx.structures, ctx.saved_tensors
    *_, needs_x, needs_y = ctx.needs_input_grad
    g, g_x, g_y = g.contiguous(), None, None
    if needs_x:
        turned, order, _ = Y.order
        g_x = Sampled.apply((out, turned, X), g, y[order])
    if needs_y:
        turned, order, _ = X.order
        g_y = Sampled.apply((turned, out, Y), x[order], g)
    return g_x, g_y


# ------------------------------------------------------------------ the public function


def matmul(A: Tensor, B: Tensor, *, precision: str | None = None) -> Tensor:
    """Multiply torch tensors of which one or both are sparse, with gradients in the values of each, of any order.

    Parameters
    ----------
    A : Tensor, shape (m, p)
        With the layout CSR, CSC, BSR, BSC or COO, or dense. float32 or float64; products with a dense operand also
        float16 and bfloat16.
    B : Tensor, shape (p, n)
        Likewise, of the same dtype. A dense one on the right may be a vector.
    precision : {"bf16x3"}, optional
        Of a product of float32 with a dense matrix: it and its gradients are computed by three products of bfloat16
        numbers, as `sparsetir.ops.spmm` does.

    Returns
    -------
    Tensor, shape (m, n)
        CSR if both are sparse, else dense. The gradient of a sparse operand has its layout and pattern; that of a COO
        tensor is that of the coalesced one.

    Raises
    ------
    ArgumentTypeError
        No operand is sparse, or the dtypes or devices are others.
    ArgumentError
        The shapes do not match; a precision for another product.
    StructureError
        Rows of an operand are unsorted or repeat a coordinate.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> A = torch.tensor([[0.0, 2.0], [3.0, 4.0]]).to_sparse_csr().requires_grad_()
    >>> sparsetir.torch.matmul(A, torch.ones(2, 1)).sum().backward()
    >>> A.grad.values().tolist()
    [1.0, 1.0, 1.0]
    """
    check_transforms()
    _check_operands(A, B)
    if precision is not None:
        _check_precision(A, B, precision)
    if A.layout is torch.strided:
        return _dense_times_sparse(A, B, precision)
    if B.layout is torch.strided:
        return _sparse_times_dense(A, B, precision)
    X, x = _rows_of(A, "A")
    Y, y = _rows_of(B, "B")
    results: list[IndexStructure] = []
    values = ProductFunction.apply((X, Y), results, x, y)
    out = results[0]
    arrays = (torch.from_numpy(out.indptr), torch.from_numpy(out.indices))
    like = torch.sparse_csr_tensor(*arrays, values.detach(), out.shape, check_invariants=False)
    return Assembled.apply(like, values)


def _check_operands(A: Any, B: Any) -> None:
    for name, operand in (("A", A), ("B", B)):
        if not isinstance(operand, Tensor):
            kind = type(operand).__name__
            raise ArgumentTypeError(f"{name}: expected a torch tensor, got {kind}. Use sparsetir.matmul for others.")
        if operand.layout not in (*SPARSE, torch.strided) or not operand.is_cpu or operand.dtype not in NAMES:
            kind = f"{operand.layout} of {operand.dtype} on {operand.device}"
            raise ArgumentTypeError(
                f"{name}: expected floats in CSR, CSC, BSR, BSC, COO or dense on the cpu, got {kind}. Convert it."
            )
        is_vector = name == "B" and operand.layout is torch.strided and operand.dim() == 1
        if operand.dim() != 2 and not is_vector:
            shape = list(operand.shape)
            raise ArgumentError(f"{name}: expected a matrix, got the shape {shape}. Reshape it, or loop over batches.")
        if operand.is_leaf and operand.requires_grad and operand.layout in (*BY_COLUMNS, torch.sparse_bsr):
            layout = str(operand.layout).removeprefix("torch.sparse_").upper()
            fault = f"a tensor in which torch accumulates gradients, got a leaf of layout {layout}"
            raise ArgumentTypeError(f"{name}: expected {fault}. Make it by {name}.to_sparse_csr().")
    if A.layout is torch.strided and B.layout is torch.strided:
        raise ArgumentTypeError("A, B: expected a sparse operand, got two dense ones. Use torch.matmul.")
    if A.dtype is not B.dtype:
        raise ArgumentTypeError(f"B: expected the dtype of A, {A.dtype}, got {B.dtype}. Convert one of them.")
    if A.shape[1] != B.shape[0]:
        raise ArgumentError(f"B: expected {A.shape[1]} rows, got the shape {list(B.shape)}. A is {list(A.shape)}.")
    if A.layout in SPARSE and B.layout in SPARSE and A.dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(f"A: expected float32 or float64, got {A.dtype}. Convert both by .float().")


def _compressed(tensor: Tensor, name: str) -> tuple[IndexStructure, Tensor]:
    """Return the structure and the values of a sparse tensor; by columns those of the transpose."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().to_sparse_csr()
    structure, values = structure_of(tensor, name), ValuesFunction.apply(tensor)
    if not isinstance(structure, BlockStructure):
        return structure, values
    entries, order = structure.entries
    values = values.transpose(1, 2) if tensor.layout in BY_COLUMNS else values
    return entries, values.reshape(-1)[order]


def _rows_of(tensor: Tensor, name: str) -> tuple[IndexStructure, Tensor]:
    """Return the compressed rows of a sparse tensor and their values."""
    structure, values = _compressed(tensor, name)
    if tensor.layout not in BY_COLUMNS:
        return structure, values
    turned, order, _ = structure.order
    return turned, values[order]


def _check_precision(A: Tensor, B: Tensor, precision: Any) -> None:
    in_parts = check_precision(precision, NAMES[A.dtype])
    if in_parts and (B.dim() == 1 or torch.strided not in (A.layout, B.layout)):
        fault = "precision: expected None but for a sparse and a dense matrix"
        raise ArgumentError(f"{fault}, got {shown(precision)}. Leave it out.")


def _sparse_times_dense(A: Tensor, B: Tensor, precision: str | None) -> Tensor:
    (structure, values), inner = _compressed(A, "A"), FEATURES if B.dim() == 2 else ()
    graph = structure.graph.in_precision(precision)
    if A.layout in BY_COLUMNS:
        return TransposedSpMM.apply(graph, inner, None, values, B.contiguous())
    return SpMM.apply(graph, inner, False, "", values, B.contiguous(), None)


def _dense_times_sparse(A: Tensor, B: Tensor, precision: str | None) -> Tensor:
    structure, values = _compressed(B, "B")
    graph, is_transposed = structure.graph.in_precision(precision), B.layout not in BY_COLUMNS
    return LinearFunction.apply(graph, is_transposed, values, A.contiguous())


# ------------------------------------------------------------------------------------ grouped products


MAX_CLASSES = 1024
MAX_PADDING = 2  # padded rows over rows, up to which a padded product is a candidate
REPEATS = 3
ALIGNED = 16  # bytes, which torch requires of operands
OFFSETS = (torch.int32, torch.int64)

Way: TypeAlias = "Callable[[Tensor, Tensor, GroupEnds], Tensor]"
_fastest = shared_cache("ways of grouped products", MAX_CLASSES)


class GroupEnds:
    """Where groups of rows begin and end.

    Parameters
    ----------
    ends : list of int
        Where each group ends, ascending.
    way : callable, optional
        How the next product is computed, where that is known.
    offs : Tensor, optional
        The ends, for the next product alone: the caller may change them later.
    """

    def __init__(self, ends: list[int], way: Way | None = None, offs: Tensor | None = None) -> None:
        self.ends = ends
        self.way = way
        self.rows = ends[-1] if ends else 0  # where the last group ends
        self._offsets = None if offs is None or offs.dtype is not torch.int32 else offs

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each group."""
        return itertools.pairwise([0, *self.ends])

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each group begins, and the number of rows."""
        return np.array([0, *self.ends], np.int64)

    @property
    def offsets(self) -> Tensor:
        """The ends as a tensor of torch, of the dtype that its own grouped product takes."""
        if self._offsets is None:
            self._offsets = torch.from_numpy(np.array(self.ends, np.int32))
        return self._offsets

    @cached_property
    def longest(self) -> int:
        """Rows of the largest group."""
        ends = self.ends
        return max(ends[0], *map(operator.sub, ends[1:], ends)) if len(ends) > 1 else self.rows

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """Compute the next product in the way that is known for it."""
        way, self.way = self.way, None
        assert way is not None
        try:
            return way(x, w, self)
        finally:
            self._offsets = None


# --------------------------------------------------------------------------------------------------------- products


def _rows_by_kernel(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    y = x.new_empty(x.shape[0], w.shape[2])
    _call("rows", x, w, y, groups)
    return y


def _weights_by_kernel(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    y = x.new_empty(len(groups), x.shape[1], w.shape[1])
    _call("weights", x, w, y, groups)
    return y


def _call(result: str, x: Tensor, w: Tensor, y: Tensor, groups: GroupEnds) -> None:
    is_array = x.dtype != torch.bfloat16  # which numpy does not have
    operands = (t.detach().resolve_neg().contiguous() for t in (x, w, y))
    left, right, out = (t.numpy() if is_array else t for t in operands)
    run_kernel(NAMES[x.dtype], result, left, right, out, groups.starts)


def _rows_by_loop(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    y = x.new_empty(x.shape[0], w.shape[2])
    for g, (low, high) in enumerate(groups.bounds):
        if high > low:
            torch.mm(x[low:high], w[g], out=y[low:high])
    return y


def _weights_by_loop(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    y = x.new_empty(len(groups), x.shape[1], w.shape[1])
    for g, (low, high) in enumerate(groups.bounds):
        torch.mm(x[low:high].t(), w[low:high], out=y[g])
    return y


def _places(groups: GroupEnds) -> tuple[Tensor | None, int]:
    """Return where rows are among padded groups, and the length of these; no places where none is padded."""
    starts, longest = groups.starts, groups.longest
    lengths = np.diff(starts)
    if (lengths == longest).all():
        return None, longest
    shift = np.arange(lengths.size) * longest - starts[:-1]
    return torch.from_numpy(np.arange(starts[-1]) + np.repeat(shift, lengths)), longest


def _padded(x: Tensor, places: Tensor | None, longest: int) -> Tensor:
    if places is None:
        return x.reshape(-1, longest, x.shape[1])
    count = -(-(int(places[-1]) + 1) // longest)
    return x.new_zeros(count * longest, x.shape[1]).index_copy_(0, places, x).view(count, longest, -1)


def _rows_by_padding(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    places, longest = _places(groups)
    padded = _padded(x, places, longest)
    y = torch.bmm(padded, w[: padded.shape[0]]).flatten(0, 1)
    return y if places is None else y[places]


def _weights_by_padding(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    places, longest = _places(groups)
    left, right = (_padded(t, places, longest) for t in (x, w))
    y = torch.bmm(left.transpose(1, 2), right)
    missing = len(groups) - y.shape[0]
    return torch.cat([y, y.new_zeros(missing, *y.shape[1:])]) if missing else y


_grouped_mm_of_torch = getattr(torch.nn.functional, "grouped_mm", None)  # which not every version has


def _rows_by_torch(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    if torch.compiler.is_dynamo_compiling():  # torch traces its own function for bfloat16 alone
        return _rows_by_loop(x, w, groups)
    if _grouped_mm_of_torch is None:
        raise NotImplementedError
    return _grouped_mm_of_torch(x, w, offs=groups.offsets)


def _weights_by_torch(x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        return _weights_by_loop(x, w, groups)
    if _grouped_mm_of_torch is None:
        raise NotImplementedError
    return _grouped_mm_of_torch(x.t(), w, offs=groups.offsets)


WAYS: dict[str, dict[str, Way]] = {
    "rows": {"kernel": _rows_by_kernel, "loop": _rows_by_loop, "padded": _rows_by_padding},
    "weights": {"kernel": _weights_by_kernel, "loop": _weights_by_loop, "padded": _weights_by_padding},
}
OF_TORCH: dict[str, Way] = {"rows": _rows_by_torch, "weights": _weights_by_torch}


def _class_of(result: str, x: Tensor, w: Tensor, groups: GroupEnds, is_even: bool) -> tuple[Any, ...]:
    """Return the class of shapes within which the fastest way is the same: powers of two of rows and groups."""
    count = len(groups.ends)
    scale = (groups.rows // count).bit_length(), count.bit_length(), (x.data_ptr() | w.data_ptr()) % ALIGNED == 0
    return result, x.dtype, x.shape[1], w.shape[-1], *scale, is_even, x.stride(), w.stride(), torch.get_num_threads()


def _product(result: str, x: Tensor, w: Tensor, groups: GroupEnds) -> Tensor:
    """Compute one grouped product over all rows in the fastest known way; time the ways for a new class of shapes."""
    count = len(groups.ends)
    if not (count and x.numel() and w.numel()):
        shape = (x.shape[0], w.shape[2]) if result == "rows" else (count, x.shape[1], w.shape[1])
        return x.new_zeros(shape)
    is_even = groups.longest * count <= MAX_PADDING * groups.rows
    key = _class_of(result, x, w, groups, is_even)
    way = _fastest.get(key)
    if way is None:
        candidates = {name: way for name, way in WAYS[result].items() if is_even or name != "padded"}
        if _takes(OF_TORCH[result], x, w, groups):
            candidates["torch"] = OF_TORCH[result]
        way = _fastest[key] = _compare(candidates, x, w, groups)
    return way(x, w, groups)


def _takes(way: Way, x: Tensor, w: Tensor, groups: GroupEnds) -> bool:
    """Return whether torch's own grouped product takes such tensors."""
    try:
        way(x, w, groups)
    except (NotImplementedError, OverflowError, RuntimeError, ValueError):
        return False
    return True


def _compare(ways: dict[str, Way], x: Tensor, w: Tensor, groups: GroupEnds) -> Way:
    """Return the way with the least time of a few interleaved runs, after one that compiles."""
    for way in ways.values():
        way(x, w, groups)
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(REPEATS):
        for name, way in ways.items():
            start = time.perf_counter()
            way(x, w, groups)
            least[name] = min(least[name], time.perf_counter() - start)
    return ways[min(least, key=lambda name: least[name])]


# -------------------------------------------------------------------------------------------------------- gradients


class GroupedRows(KernelFunction):
    """``y[r] = x[r] @ w[g]`` for the rows of each group; zeros for rows behind the last group."""

    @staticmethod
    def forward(ctx: Any, groups: GroupEnds, x: Tensor, w: Tensor) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w if ctx.needs_input_grad[1] else None)
        if groups.way is not None:
            return groups.product(x, w)
        rows = groups.rows
        y = _product("rows", x if rows == x.shape[0] else x[:rows], w, groups)
        return y if rows == x.shape[0] else torch.cat([y, y.new_zeros(x.shape[0] - rows, y.shape[1])])

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g_x = GroupedRows.apply(ctx.groups, g, w.transpose(1, 2)) if ctx.needs_input_grad[1] else None
        return None, g_x, GroupedWeights.apply(ctx.groups, x, g) if ctx.needs_input_grad[2] else None


class GroupedWeights(KernelFunction):
    """``y[g] = x[rows of g].T @ w[rows of g]``."""

    @staticmethod
    def forward(ctx: Any, groups: GroupEnds, x: Tensor, w: Tensor) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w if ctx.needs_input_grad[1] else None)
        rows = groups.rows
        if rows != x.shape[0]:
            x, w = x[:rows], w[:rows]
        return _product("weights", x, w, groups)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g_x = GroupedRows.apply(ctx.groups, w, g.transpose(1, 2)) if ctx.needs_input_grad[1] else None
        return None, g_x, GroupedRows.apply(ctx.groups, x, g) if ctx.needs_input_grad[2] else None


def grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply matrices in groups of ragged sizes, with gradients of any order, as ``torch._grouped_mm`` does.

    Parameters
    ----------
    self : Tensor
        Two or three dimensions; float32, float64, float16 or bfloat16. Or a nested tensor of layout ``torch.jagged``,
        ``[groups, rows, depth]``, whose parts are the groups.
    mat2 : Tensor
        Two or three dimensions, of the same dtype.
    offs : Tensor of int32 or int64, shape (groups,)
        Where each group ends: of rows of `self` for 2d x 3d, of the summed dimension for 2d x 2d, of columns of `mat2`
        for 3d x 2d. None for 3d x 3d and nested tensors. Groups may be empty. What is behind the last end is zero in a
        result.
    bias : Tensor, optional
        Added to the result.
    out_dtype : torch.dtype, optional
        Of the result.

    Returns
    -------
    Tensor
        ``(rows, n)`` for 2d x 3d, ``(groups, m, n)`` for 2d x 2d, ``(m, columns)`` for 3d x 2d, ``(groups, m, n)`` for
        3d x 3d, a nested tensor ``[groups, rows, n]`` for a nested one.

    Raises
    ------
    ArgumentError
        Shapes do not fit; ends descend, are negative or beyond the ragged dimension.
    ArgumentTypeError
        Another dtype or device.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> w = torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]])
    >>> sparsetir.torch.grouped_mm(torch.ones(3, 2), w, offs=torch.tensor([1, 3])).tolist()
    [[2.0], [4.0], [4.0]]
    """
    if bias is None and out_dtype is None and type(self) is type(mat2) is type(offs) is Tensor:
        y = _repeated(self, mat2, offs)
        if y is not None:
            return y
    if isinstance(self, Tensor) and self.layout is torch.jagged:
        return _of_jagged(self, mat2, offs, bias, out_dtype)
    _check_grouped(self, mat2)
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point):
        raise ArgumentTypeError(f"out_dtype: expected a dtype of floats, got {shown(out_dtype)}. Leave it out.")
    dims = self.dim(), mat2.dim()
    if dims == (3, 3):
        if offs is not None:
            raise ArgumentError("offs: expected None for 3d x 3d, got a tensor. Leave it out.")
        y = torch.bmm(self, mat2)
    else:
        y = _ragged(self, mat2, dims, _groups(offs, self.shape[-2 if dims == (2, 3) else -1], mat2, dims))
    if bias is not None:
        y = y + _fitting_bias(bias, y)
    return y if out_dtype is None else y.to(out_dtype)


def _repeated(x: Tensor, w: Tensor, offs: Tensor) -> Tensor | None:
    """Multiply rows in groups where operands like these were validated and timed before; None where they were not.

    The checks and the bookkeeping of a first call take several times as long as a small product.
    """
    if x.layout is not torch.strided or w.layout is not torch.strided or x.dim() != 2 or w.dim() != 3:
        return None
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_dynamo_compiling():
        return None
    if forward_ad._current_level >= 0 or offs.dim() != 1 or offs.dtype not in OFFSETS or not (x.is_cpu and w.is_cpu):
        return None
    ends, shape = offs.tolist(), x.shape
    if len(ends) != w.shape[0] or not ends or ends[-1] != shape[0] or ends[0] < 0:
        return None
    if ends != sorted(ends):
        return None
    is_even = max(ends[0], *map(operator.sub, ends[1:], ends), 0) * len(ends) <= MAX_PADDING * shape[0]
    is_aligned = (x.data_ptr() | w.data_ptr()) % ALIGNED == 0
    key = x.dtype, w.dtype, shape, w.shape, x.stride(), w.stride(), is_even, is_aligned, torch.get_num_threads()
    way = _fastest.get(key)
    if way is None:
        if shape[1] == w.shape[1] and x.dtype is w.dtype and x.numel() and w.numel():
            way = _fastest.get(_class_of("rows", x, w, GroupEnds(ends), is_even))
        if way is None:
            return None
        _fastest[key] = way
    groups = GroupEnds(ends, way, offs)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return GroupedRows.apply(groups, x, w)
    return way(x, w, groups)


def _of_jagged(x: Tensor, mat2: Any, offs: Any, bias: Any, out_dtype: Any) -> Tensor:
    """Multiply the parts of a nested tensor with a matrix for each, as groups of its rows."""
    if x.dim() != 3 or x._ragged_idx != 1 or x.lengths() is not None:
        fault = f"self: expected a nested tensor [groups, rows, depth] without holes, got {list(x.shape)}"
        raise ArgumentError(f"{fault}. Transpose it, or call contiguous().")
    if offs is not None:
        raise ArgumentError("offs: expected None for a nested tensor, got a tensor. Its parts are the groups.")
    if isinstance(mat2, Tensor) and mat2.dim() != 3:
        fault = f"mat2: expected a matrix for each part of the nested tensor, got shape {list(mat2.shape)}"
        raise ArgumentError(f"{fault}. Use torch.matmul for one matrix.")
    groups = x.offsets().numel() - 1
    if isinstance(mat2, Tensor) and mat2.shape[0] != groups:
        fault = f"mat2: expected {groups} matrices, one for each part of the nested tensor, got {mat2.shape[0]}"
        raise ArgumentError(f"{fault}. Repeat one with expand.")
    y = grouped_mm(x.values(), mat2, x.offsets()[1:], bias, out_dtype)
    return torch.nested.nested_tensor_from_jagged(y, x.offsets())


def _fitting_bias(bias: Any, y: Tensor) -> Tensor:
    """Return the bias, which is broadcast to the result and of its dtype."""
    fault = f"bias: expected a tensor of {y.dtype} that is broadcast to {list(y.shape)}"
    if (
        not isinstance(bias, Tensor)
        or bias.dtype is not y.dtype
        or bias.device != y.device
        or bias.layout is not y.layout
    ):
        raise ArgumentTypeError(f"{fault}, got {getattr(bias, 'dtype', type(bias).__name__)}. Convert it.")
    if bias.dim() > y.dim() or any(b not in (1, n) for b, n in zip(bias.shape[::-1], y.shape[::-1], strict=False)):
        raise ArgumentError(f"{fault}, got shape {list(bias.shape)}. Reshape it.")
    return bias


def _ragged(left: Tensor, right: Tensor, dims: tuple[int, int], groups: GroupEnds) -> Tensor:
    if dims == (2, 2):
        return GroupedWeights.apply(groups, left.t(), right)
    matrices = right if dims == (2, 3) else left
    if matrices.shape[0] != len(groups):
        fault = f"offs: expected {matrices.shape[0]} ends, one for each matrix, got {len(groups)}"
        raise ArgumentError(f"{fault}. Repeat an end for an empty group.")
    if dims == (2, 3):
        return GroupedRows.apply(groups, left, right)
    return GroupedRows.apply(groups, right.t(), left.transpose(1, 2)).t()


def _check_grouped(left: Tensor, right: Tensor) -> None:
    check_transforms()
    for name, tensor in (("self", left), ("mat2", right)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in NAMES or tensor.device.type != "cpu":
            described = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentTypeError(f"{name}: expected a tensor of floats on the CPU, got {described}. Convert it.")
        if tensor.layout != torch.strided or tensor.dim() not in (2, 3):
            fault = f"{name}: expected 2 or 3 dense dimensions, got {tensor.layout} of shape {tuple(tensor.shape)}"
            raise ArgumentError(f"{fault}. Reshape it.")
    if left.dtype != right.dtype:
        raise ArgumentTypeError(f"mat2: expected {left.dtype} as self has, got {right.dtype}. Convert one.")
    if left.shape[-1] != right.shape[-2] or (left.dim() == right.dim() == 3 and left.shape[0] != right.shape[0]):
        fault = f"mat2: expected {left.shape[-1]} rows in each matrix for self of shape {tuple(left.shape)}"
        raise ArgumentError(f"{fault}, got shape {tuple(right.shape)}. Transpose one.")


def _groups(offs: Any, length: int, right: Tensor, dims: tuple[int, int]) -> GroupEnds:
    """Return the validated groups."""
    length = right.shape[1] if dims == (3, 2) else length
    if not isinstance(offs, Tensor) or offs.dtype not in OFFSETS or offs.dim() != 1:
        described = f"{offs.dtype} of shape {tuple(offs.shape)}" if isinstance(offs, Tensor) else type(offs).__name__
        fault = f"offs: expected one dimension of int32 or int64, the end of each group, got {described}"
        raise ArgumentTypeError(f"{fault}. Give torch.cumsum of the sizes of the groups.")
    ends = offs.tolist()
    if (ends and not 0 <= ends[0] <= ends[-1] <= length) or any(map(operator.gt, ends, ends[1:])):
        check_offsets(np.array(ends), length, name="offs", first=None)  # raises
    return GroupEnds(ends)


__all__ = ["grouped_mm", "matmul"]
