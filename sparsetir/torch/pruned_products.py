# SPDX-License-Identifier: Apache-2.0
"""Products with a constant, pruned weight in several ways: dense or sparse, in the weight's dtype or a lower one.

A way is a name such as ``"dense bfloat16"`` or ``"columns float32"``. `Product` holds a weight as one way needs it.
torch.compile and torch.export see one operator, ``sparsetir::pruned_product``, whose key is a hash of the weight.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from torch.nn import functional
from tvm.script import sparsetir as T

import torch
from sparsetir import ops
from sparsetir.build import build
from sparsetir.errors import ArgumentError
from torch import Tensor

CALLS = 1_000_000  # Formats are chosen for as many calls: a weight is converted once.
PRECISION = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 1, torch.int8: 0}
SPARSE = ("rows", "columns")
INT8_MAX = 127


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module."""
    return str(dtype).removeprefix("torch.")


def ways(weight: torch.dtype, lowest: torch.dtype | None) -> list[str]:
    """Return the candidates for a weight, the layer as it is first.

    Parameters
    ----------
    weight : torch.dtype
    lowest : torch.dtype, optional
        The lowest precision that is allowed, by default that of the weight.
    """
    least = PRECISION[weight if lowest is None else lowest]
    base = torch.float32 if PRECISION[weight] == 1 else weight  # Sums of 16-bit weights may be in float32, too.
    dtypes = {weight: None, base: None}
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        if least <= PRECISION[dtype] < PRECISION[weight] and (dtype is not torch.int8 or lowest is torch.int8):
            dtypes[dtype] = None
    names = [dtype_name(d) for d in dtypes]
    dense = [f"dense {name}" for name in names if name == dtype_name(weight) or name in ("bfloat16", "int8")]
    sparse = [f"columns {name}" for name in names] + [f"rows {name}" for name in names if name != "int8"]
    return [*dense, *sparse]


@cache
def _kernel(operator: str, dtype: str) -> Any:
    program = _spmm_int8() if dtype == "int8" else getattr(ops, operator)(dtype)
    return build(program, expected_calls=CALLS)


def _spmm_int8() -> Any:
    """Return the product of int8 matrices with sums in int32."""

    @T.prim_func  # type: ignore[untyped-decorator,unused-ignore]
    def spmm_int8(  # type: ignore[no-untyped-def]
        a: T.handle,
        b: T.handle,
        c: T.handle,
        indptr: T.handle,
        indices: T.handle,
        m: T.int32,
        n: T.int32,
        nnz: T.int32,
        feat: T.int32,
    ):
        I = T.dense_fixed(m, "int32")
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), "int32")
        J_dense = T.dense_fixed(n, "int32")
        K = T.dense_fixed(feat, "int32")
        A = T.match_sparse_buffer(a, (I, J), "int8")
        B = T.match_sparse_buffer(b, (J_dense, K), "int8")
        C = T.match_sparse_buffer(c, (I, K), "int32")
        with T.sp_iter([I, J, K], "SRS", "spmm_int8") as [i, j, k]:
            with T.init():
                C[i, k] = 0
            C[i, k] = C[i, k] + T.Cast("int32", A[i, j]) * T.Cast("int32", B[j, k])

    return spmm_int8


@dataclass(frozen=True)
class Weight:
    """A weight as one way stores it.

    Parameters
    ----------
    shape : tuple of int
        Outputs and inputs.
    way : str
    values : Tensor
        Of two dimensions for dense ways, otherwise the entries row after row.
    crow_indices, col_indices : Tensor or None
        int32, for sparse ways.
    scales : Tensor or None
        A float32 factor for each output, where values are int8.
    input_scale : float
        The factor of quantized inputs.
    """

    shape: tuple[int, int]
    way: str
    values: Tensor
    crow_indices: Tensor | None = None
    col_indices: Tensor | None = None
    scales: Tensor | None = None
    input_scale: float = 1.0

    @classmethod
    def from_dense(cls, weight: Tensor, way: str, input_scale: float = 1.0) -> Weight:
        """Convert a matrix to what a way needs."""
        dtype = getattr(torch, way.split()[1])
        matrix, scales = weight.detach(), None
        if dtype is torch.int8:
            largest = matrix.float().abs().amax(dim=1) if matrix.shape[1] else matrix.new_zeros(len(matrix)).float()
            scales = torch.where(largest > 0, largest / INT8_MAX, torch.ones_like(largest))
            values = (matrix.float() / scales[:, None]).round().to(torch.int8)
        else:
            values = matrix.to(dtype)
        shape = (matrix.shape[0], matrix.shape[1])
        if way.startswith("dense"):
            return cls(shape, way, values.contiguous().clone(), None, None, scales, input_scale)
        places = matrix != 0
        rows, columns = places.nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=shape[0]).cumsum(0)
        crow = torch.cat([torch.zeros(1, dtype=torch.int64), counts]).to(torch.int32)
        return cls(shape, way, values[rows, columns], crow, columns.to(torch.int32), scales, input_scale)

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix that products are computed with."""
        if self.crow_indices is None or self.col_indices is None:
            dense = self.values.to(dtype)
        else:
            dense = torch.zeros(self.shape, dtype=dtype)
            counts = self.crow_indices.long().diff()
            dense[torch.repeat_interleave(torch.arange(self.shape[0]), counts), self.col_indices.long()] = (
                self.values.to(dtype)
            )
        return dense if self.scales is None else dense * self.scales[:, None].to(dtype)

    def key(self) -> str:
        """Return a hash of all of it."""
        digest = hashlib.sha256(repr((self.shape, self.way, self.input_scale)).encode())
        for tensor in (self.values, self.crow_indices, self.col_indices, self.scales):
            if tensor is not None:
                digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class Product:
    """``x @ W.T`` for rows and ``W @ x`` for columns, in the way of a weight; without gradients."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.kind, self.dtype_name = weight.way.split()
        self.dtype = getattr(torch, self.dtype_name)
        self.is_empty = 0 in weight.shape
        self._bound: Any = None
        if self.kind in SPARSE and not self.is_empty:
            self._bound = self._bind()

    def _bind(self) -> Callable[..., Any]:
        weight = self.weight
        crow, col = weight.crow_indices, weight.col_indices
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
            matrix = torch.sparse_csr_tensor(crow, col, weight.values, weight.shape, check_invariants=True)
        return _kernel("spmm" if self.kind == "columns" else "linear", self.dtype_name).bind(A=matrix)

    def rows(self, x: Tensor) -> Tensor:
        """Return the product for rows x [b, in]; [b, out], in the dtype of x."""
        outputs = self.weight.shape[0]
        if self.is_empty or not x.numel():
            return x.new_zeros(len(x), outputs)
        operand = self._operand(x)
        if self.kind == "dense":
            y = self._dense(operand)
        elif self.kind == "columns":
            y = self._bound(B=operand.t().contiguous()).t()
            scales = self._scales()
            return (y if scales is None else y * scales).to(x.dtype).contiguous()
        else:
            y = self._bound(X=operand.contiguous())
        scales = self._scales()
        return (y if scales is None else y * scales).to(x.dtype)

    def columns(self, x: Tensor) -> Tensor:
        """Return the product for columns x [n, in, l]; [n, out, l], in the dtype of x."""
        images, inputs, length = x.shape
        outputs = self.weight.shape[0]
        if self.is_empty or not x.numel():
            return x.new_zeros(images, outputs, length)
        if self.kind != "columns":
            rows = self.rows(x.transpose(1, 2).reshape(images * length, inputs))
            return rows.view(images, length, outputs).transpose(1, 2).contiguous()
        operand = self._operand(x)
        flat = operand[0] if images == 1 else operand.transpose(0, 1).reshape(inputs, images * length)
        y = self._bound(B=flat.contiguous())
        scales = self._scales()
        y = (y if scales is None else y * scales[:, None]).to(x.dtype)
        return y[None] if images == 1 else y.view(outputs, images, length).transpose(0, 1).contiguous()

    def _operand(self, x: Tensor) -> Tensor:
        x = x.detach()
        if self.dtype is not torch.int8:
            return x.to(self.dtype)
        return (x.float() / self.weight.input_scale).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)

    def _dense(self, x: Tensor) -> Tensor:
        if self.dtype is torch.int8:
            return torch._int_mm(x.contiguous(), self.weight.values.t())
        return functional.linear(x, self.weight.values)

    def _scales(self) -> Tensor | None:
        scales = self.weight.scales
        return None if scales is None else scales * self.weight.input_scale


# ------------------------------------------------------------------ operators that torch traces

PRODUCTS: WeakValueDictionary[str, Product] = WeakValueDictionary()


def product_of(weight: Weight) -> tuple[str, Product]:
    """Return the product with a weight and its key; equal weights share one."""
    key = weight.key()
    product = PRODUCTS.get(key)
    if product is None:
        product = PRODUCTS[key] = Product(weight)
    return key, product


def _lookup(key: str) -> Product:
    product = PRODUCTS.get(key)
    if product is None:
        raise ArgumentError(
            f"key: expected the weight of a layer of this process, got {key[:8]}. Load the module as well as the "
            "traced program, and keep it."
        )
    return product


@torch.library.custom_op("sparsetir::pruned_product", mutates_args=())
def pruned_product(x: Tensor, key: str, outputs: int, by_columns: bool) -> Tensor:
    """Compute a product with the weight of a key."""
    product = _lookup(key)
    if by_columns:
        return product.columns(x)
    rows = product.rows(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return rows.view(*x.shape[:-1], outputs)


@pruned_product.register_fake
def _(x: Tensor, key: str, outputs: int, by_columns: bool) -> Tensor:
    shape = (x.shape[0], outputs, x.shape[2]) if by_columns else (*x.shape[:-1], outputs)
    return x.new_empty(shape)


@torch.library.custom_op("sparsetir::pruned_gradient", mutates_args=())
def pruned_gradient(g: Tensor, key: str, inputs: int, by_columns: bool) -> Tensor:
    """Compute the gradient in the input; that of rounding to int8 counts as one."""
    weight = _lookup(key).weight.to_dense(g.dtype)
    return torch.matmul(weight.t(), g) if by_columns else torch.matmul(g, weight)


@pruned_gradient.register_fake
def _(g: Tensor, key: str, inputs: int, by_columns: bool) -> Tensor:
    shape = (g.shape[0], inputs, g.shape[2]) if by_columns else (*g.shape[:-1], inputs)
    return g.new_empty(shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.key, _outputs, ctx.by_columns = inputs
    ctx.inputs = x.shape[1 if ctx.by_columns else -1]


def _gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return torch.ops.sparsetir.pruned_gradient(g, ctx.key, ctx.inputs, ctx.by_columns), None, None, None


pruned_product.register_autograd(_gradient, setup_context=_save)


__all__ = ["PRODUCTS", "Product", "Weight", "dtype_name", "product_of", "ways"]
