# SPDX-License-Identifier: Apache-2.0
"""Products of torch's sparse tensors with gradients in the values of each operand, of any order.

A sparse gradient has the pattern of its operand: it is computed at stored entries only, by products under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

import torch
from sparsetir.einsum.products import matmul as plain_matmul
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError
from sparsetir.torch.functions import (
    NAMES,
    KernelFunction,
    Linear,
    SpMM,
    TransposedLinear,
    TransposedSpMM,
    differentiable,
)
from sparsetir.torch.graph import FEATURES, Graph
from sparsetir.torch.structure import Compressed
from sparsetir.utils.caches import shared_cache
from torch import Tensor

MAX_STRUCTURES = 16
COMPRESSED = (torch.sparse_csr, torch.sparse_csc)
SPARSE = (*COMPRESSED, torch.sparse_coo)
_structures = shared_cache("structures of torch's sparse tensors", MAX_STRUCTURES)


@dataclass(frozen=True, eq=False)
class Structure:
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
        return Graph.of_rows(Compressed(self.indptr, self.indices, self.shape[1]), None, None)

    @cached_property
    def keys(self) -> np.ndarray:
        """The number of each entry's place in row-major order."""
        rows = np.repeat(np.arange(self.shape[0], dtype=np.int64), np.diff(self.indptr))
        return rows * self.shape[1] + self.indices

    @cached_property
    def order(self) -> tuple[Structure, Tensor, Tensor]:
        """The transpose, the entry that each of its entries is here, and the inverse."""
        side = self.graph.rows.transposed
        assert side.order is not None  # Compressed.transposed always has one
        back = np.empty_like(side.order)
        back[side.order] = np.arange(side.order.size, dtype=side.order.dtype)
        turned = Structure(side.indptr, side.indices, self.shape[::-1])
        return turned, torch.from_numpy(side.order), torch.from_numpy(back)

    def matrix(self, values: Tensor) -> Any:
        """Return a scipy matrix with these values."""
        return sp.csr_array((values.detach().numpy(), self.indices, self.indptr), shape=self.shape)

    def places_of(self, part: Any) -> np.ndarray | None:
        """Return where entries of a scipy matrix are here; None if it has all of them."""
        if part.indices.size == self.indices.size:
            return None
        return np.searchsorted(self.keys, Structure(part.indptr, part.indices, self.shape).keys)


def structure_of(tensor: Tensor, name: str) -> Structure:
    """Return the structure of a CSR or CSC tensor: the one of an earlier call if the index arrays are equal.

    Raises
    ------
    StructureError
        Rows are unsorted or repeat a coordinate, or indices are out of range.
    """
    is_rows = tensor.layout is torch.sparse_csr
    pointers, indices = (
        (tensor.crow_indices(), tensor.col_indices()) if is_rows else (tensor.ccol_indices(), tensor.row_indices())
    )
    shape = (tensor.shape[0], tensor.shape[1]) if is_rows else (tensor.shape[1], tensor.shape[0])
    key = pointers.data_ptr(), indices.data_ptr(), pointers.dtype, shape, indices.numel()
    arrays = pointers.detach().numpy(), indices.detach().numpy()
    structure = _structures.get(key)
    if structure is not None and all(map(np.array_equal, (structure.indptr, structure.indices), arrays)):
        return structure
    structure = Structure(arrays[0].copy(), arrays[1].copy(), shape)
    _check(structure, name)
    _structures[key] = structure
    return structure


def _check(structure: Structure, name: str) -> None:
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


class Values(KernelFunction):
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
        options = {"dtype": values.dtype, "layout": like.layout, "check_invariants": False}
        return torch.sparse_compressed_tensor(*_indices(like), values.detach(), like.shape, **options)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        like = ctx.like
        if g.layout is torch.strided:
            coordinates = like.to_sparse_coo()._indices()
            return None, g[coordinates[0], coordinates[1]]
        if g.layout is like.layout and all(map(torch.equal, _indices(g), _indices(like))):
            return None, Values.apply(g)
        raise LoweringError("the gradient of a sparse product has another pattern than it: use its .values()")


def _indices(tensor: Tensor) -> tuple[Tensor, Tensor]:
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


class Sampled(KernelFunction):
    """Entries of a product of sparse matrices at the places of a third one: ``(X @ Y)`` where `out` stores one."""

    @staticmethod
    def forward(ctx: Any, structures: tuple[Structure, Structure, Structure], x: Tensor, y: Tensor) -> Tensor:
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


class Product(KernelFunction):
    """The values of a product of sparse matrices; the structure of the result is put into a list."""

    @staticmethod
    def forward(ctx: Any, structures: tuple[Structure, Structure], results: list[Any], x: Tensor, y: Tensor) -> Tensor:
        X, Y = structures
        product = plain_matmul(X.matrix(x), Y.matrix(y))
        out = Structure(product.indptr, product.indices, (X.shape[0], Y.shape[1]))
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


def matmul(A: Tensor, B: Tensor) -> Tensor:
    """Multiply torch tensors of which one or both are sparse, with gradients in the values of each, of any order.

    Parameters
    ----------
    A : Tensor, shape (m, p)
        With the layout CSR, CSC or COO, or dense. float32 or float64; products with a dense operand also float16 and
        bfloat16.
    B : Tensor, shape (p, n)
        Likewise, of the same dtype. A dense one on the right may be a vector.

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
        The shapes do not match.
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
    _check_operands(A, B)
    if A.layout is torch.strided:
        return _dense_times_sparse(A, B)
    if B.layout is torch.strided:
        return _sparse_times_dense(A, B)
    X, x = _rows_of(A, "A")
    Y, y = _rows_of(B, "B")
    results: list[Structure] = []
    values = Product.apply((X, Y), results, x, y)
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
                f"{name}: expected floats in CSR, CSC, COO or dense on the cpu, got {kind}. Convert it."
            )
        is_vector = name == "B" and operand.layout is torch.strided and operand.dim() == 1
        if operand.dim() != 2 and not is_vector:
            shape = list(operand.shape)
            raise ArgumentError(f"{name}: expected a matrix, got the shape {shape}. Reshape it, or loop over batches.")
        if operand.is_leaf and operand.requires_grad and operand.layout is torch.sparse_csc:
            fault = "a tensor in which torch accumulates gradients, got a leaf of layout CSC"
            raise ArgumentTypeError(f"{name}: expected {fault}. Make it by {name}.to_sparse_csr().")
    if A.layout is torch.strided and B.layout is torch.strided:
        raise ArgumentTypeError("A, B: expected a sparse operand, got two dense ones. Use torch.matmul.")
    if A.dtype is not B.dtype:
        raise ArgumentTypeError(f"B: expected the dtype of A, {A.dtype}, got {B.dtype}. Convert one of them.")
    if A.shape[1] != B.shape[0]:
        raise ArgumentError(f"B: expected {A.shape[1]} rows, got the shape {list(B.shape)}. A is {list(A.shape)}.")
    if A.layout in SPARSE and B.layout in SPARSE and A.dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(f"A: expected float32 or float64, got {A.dtype}. Convert both by .float().")


def _compressed(tensor: Tensor, name: str) -> tuple[Structure, Tensor]:
    """Return the structure and the values of a sparse tensor; of CSC those of the transpose."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().to_sparse_csr()
    return structure_of(tensor, name), Values.apply(tensor)


def _rows_of(tensor: Tensor, name: str) -> tuple[Structure, Tensor]:
    """Return the compressed rows of a sparse tensor and their values."""
    structure, values = _compressed(tensor, name)
    if tensor.layout is not torch.sparse_csc:
        return structure, values
    turned, order, _ = structure.order
    return turned, values[order]


def _sparse_times_dense(A: Tensor, B: Tensor) -> Tensor:
    (structure, values), inner = _compressed(A, "A"), FEATURES if B.dim() == 2 else ()
    if A.layout is torch.sparse_csc:
        return TransposedSpMM.apply(structure.graph, inner, None, values, B.contiguous())
    return SpMM.apply(structure.graph, inner, False, "", values, B.contiguous(), None)


def _dense_times_sparse(A: Tensor, B: Tensor) -> Tensor:
    structure, values = _compressed(B, "B")
    function = Linear if B.layout is torch.sparse_csc else TransposedLinear
    return function.apply(structure.graph, values, A.contiguous())


__all__ = ["matmul"]
