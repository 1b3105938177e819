# SPDX-License-Identifier: Apache-2.0
"""Layers with constant, pruned weights for inference, and their products in several ways: dense, sparse, lower dtypes.

Products with a constant, pruned weight in several ways: dense or sparse, in the weight's dtype or a lower one.

A way is a name such as ``"dense bfloat16"`` or ``"columns float32"``. `LayerProduct` holds a weight as one way needs
it. torch.compile and torch.export see one operator, ``sparsetir::pruned_product``, whose key is a hash of the weight.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from torch.nn import functional

import torch
from sparsetir import ops
from sparsetir.build import build
from sparsetir.codegen.target import native_target
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.schedules import has_unit
from sparsetir.torch.functions import in_autocast
from sparsetir.torch.graph import check_layer_operand
from sparsetir.torch.linear import SparseLinear
from sparsetir.torch.transposition import quantized, transposed
from torch import Tensor, nn

CONVOLUTION_OPTIONS = (
    *("in_channels", "out_channels", "kernel_size", "stride"),
    *("padding", "dilation", "groups", "padding_mode"),
)
TENSORS = ("values", "crow_indices", "col_indices", "scales")


class ConstantWeight:
    """The weight of a layer, which functions of torch refuse with a reason.

    ``torch.nn.TransformerEncoderLayer`` asks whether weights are plain before it computes with them without the layer.
    """

    def __init__(self, layer: PrunedWeight) -> None:
        self._layer, self.shape = layer, torch.Size(layer.matrix_shape)

    def toarray(self) -> np.ndarray:
        """Return the matrix that products are computed with, in float32 or float64."""
        dtype = torch.float64 if self._layer.dtype is torch.float64 else torch.float32
        return np.asarray(self._layer._stored().to_dense(dtype).numpy())

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise ArgumentTypeError(
            f"weight: expected a tensor for torch's {name}, got the constant weight of a pruned layer. Call the layer, "
            "or pass torch.from_numpy(layer.weight.toarray())."
        )


class PrunedWeight(nn.Module):
    """Base of layers whose weight is constant, computed in the way that was fastest when the model was sparsified.

    Attributes
    ----------
    values, crow_indices, col_indices, scales : Tensor or None
        The weight as `way` stores it; buffers.
    way : str
        Such as ``"columns float32"``.
    dtype : torch.dtype
        Of inputs and outputs.

    Notes
    -----
    Weights are no parameters: gradients flow to inputs only. ``state_dict`` and pickles have the weight and the way.
    """

    by_columns = False
    bias: Tensor | None

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        for name in TENSORS:
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._take(weight)

    def _take(self, weight: Weight) -> None:
        self._key, self._product = product_of(weight)
        self.way, self.matrix_shape = weight.way, weight.shape
        self.input_scale, self.input_zero = weight.input_scale, weight.input_zero

    def _stored(self) -> Weight:
        tensors = {name: getattr(self, name) for name in TENSORS}
        return Weight(self.matrix_shape, self.way, **tensors, input_scale=self.input_scale, input_zero=self.input_zero)

    @property
    def density(self) -> float:
        """The share of weights that are not zero."""
        return int(torch.count_nonzero(self.values)) / max(math.prod(self.matrix_shape), 1)

    @property
    def weight(self) -> ConstantWeight:
        """The weight, which functions of torch refuse; ``layer.weight.toarray()`` is a copy in numpy."""
        return ConstantWeight(self)

    def product(self, x: Tensor) -> Tensor:
        """Return the product of the weight and x, in the dtype of autocast inside of it."""
        if torch.jit.is_tracing():
            raise LoweringError("torch.jit.trace would keep results of kernels as constants: use torch.export instead")
        bias, dtype = self.bias, self.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = dtype if dtype is torch.float64 else torch.get_autocast_dtype("cpu")
            x, bias = in_autocast(x, bias)
        if x.dtype is not dtype:
            raise ArgumentTypeError(f"x: expected {dtype}, got {x.dtype}. Convert it with x.to({dtype}).")
        if bias is None:
            return self._multiply(x)
        return self._multiply(x) + (bias[:, None] if self.by_columns else bias)

    def _multiply(self, x: Tensor) -> Tensor:
        outputs = self.matrix_shape[0]
        is_plain = not torch.compiler.is_compiling() and type(x) in (Tensor, nn.Parameter)
        if not is_plain or (torch.is_grad_enabled() and x.requires_grad):
            return torch.ops.sparsetir.pruned_product(x, self._key, outputs, self.by_columns)
        if self.by_columns:
            return self._product.columns(x)
        rows = self._product.rows(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        return rows.view(*x.shape[:-1], outputs)

    def train(self, mode: bool = True) -> Any:
        """Set the mode; warn that weights are constant."""
        if mode and not self.training:
            text = f"{type(self).__name__}.train: the weights are constant, and no parameters. "
            advice = "To train sparse weights, call sparsetir.torch.sparsify_(model, keep='nonzeros') without decide."
            warnings.warn(text + advice, stacklevel=2)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the layer's inputs and outputs; the weight keeps the dtype of its way."""
        bias = self.bias
        probe = fn(torch.zeros(1, dtype=self.dtype))
        if probe.device.type != "cpu":
            raise ArgumentError(f"device: expected cpu, got {probe.device}. Kernels run on the CPU.")
        self.dtype = probe.dtype
        if bias is not None:
            self.bias = fn(bias)
        return self

    # ------------------------------------------------------------------ saving

    def get_extra_state(self) -> Mapping[str, Any]:
        """Return the state that is no tensor."""
        shape, dtype = self.matrix_shape, dtype_name(self.dtype)
        inputs = {"input_scale": self.input_scale, "input_zero": self.input_zero}
        return {"way": self.way, "shape": list(shape), **inputs, "dtype": dtype}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the state that is no tensor; see `_load_from_state_dict`."""

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        extra = state_dict.get(f"{prefix}_extra_state")
        if extra is not None and tuple(extra["shape"]) != self.matrix_shape:
            errors.append(f"{prefix}: expected a weight of {self.matrix_shape}, got {tuple(extra['shape'])}.")
            return
        if extra is not None:
            for name in TENSORS:
                tensor = state_dict.get(prefix + name)
                self._buffers[name] = None if tensor is None else torch.empty_like(tensor)
            self.way, self.input_scale = extra["way"], extra["input_scale"]
            self.input_zero = extra.get("input_zero", MIDDLE)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self._take(self._stored())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_product"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"input_zero": MIDDLE, **state})
        self._take(self._stored())

    def extra_repr(self) -> str:
        outputs, inputs = self.matrix_shape
        return f"{inputs}, {outputs}, density={self.density:.3g}, way={self.way!r}, bias={self.bias is not None}"


class PrunedLinear(PrunedWeight):
    """A linear layer for inference, made by ``sparsify_(model, decide="measure")``."""

    def for_export(self) -> nn.Module:
        """Return a layer that `sparsetir.relax.from_torch` takes: a SparseLinear, or a dense layer for a dense way."""
        return SparseLinear.from_dense(self._plain()) if self._product.kind in SPARSE else self._plain()

    def _plain(self) -> nn.Linear:
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, dtype=self.dtype)
        return _with_values(layer, self._stored().to_dense(self.dtype), self.bias)

    @property
    def in_features(self) -> int:
        return self.matrix_shape[1]

    @property
    def out_features(self) -> int:
        return self.matrix_shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer of x [..., in]; [..., out]."""
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features:
            description = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"x: expected a tensor of shape [..., {self.in_features}], got {description}.")
        check_layer_operand(x)
        return self.product(x)


class PrunedConv(PrunedWeight):
    """A convolution in one or two dimensions for inference: a product of the weight with the patches of an image."""

    by_columns = True

    def __init__(self, weight: Weight, layer: Any) -> None:
        super().__init__(weight, layer.bias, layer.weight.dtype)
        flat = layer.weight.dim() == 3
        pair = lambda sizes: (1, *sizes) if flat else tuple(sizes)  # noqa: E731
        self.spatial, self.channels = layer.weight.dim() - 2, layer.in_channels
        self.kernel_size, self.stride, self.dilation = (
            pair(layer.kernel_size),
            pair(layer.stride),
            pair(layer.dilation),
        )
        self.edges, self.padding_mode = padding_of(layer), layer.padding_mode
        self.options = {name: getattr(layer, name) for name in CONVOLUTION_OPTIONS}

    def for_export(self) -> nn.Module:
        """Return a dense convolution, which `sparsetir.relax.from_torch` takes."""
        kind: Any = nn.Conv1d if self.spatial == 1 else nn.Conv2d
        layer = kind(**self.options, bias=self.bias is not None, dtype=self.dtype)
        matrix, groups = self._stored().to_dense(self.dtype), self.options["groups"]
        height, width = (size // groups for size in self.matrix_shape)
        blocks = [matrix[n * height : (n + 1) * height, n * width : (n + 1) * width] for n in range(groups)]
        return _with_values(layer, torch.cat(blocks).view(layer.weight.shape), self.bias)

    @property
    def is_pointwise(self) -> bool:
        """True where the patches are the image itself."""
        return self.kernel_size == self.stride == (1, 1) and not any(self.edges)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer of images x [n, channels, ...], or of one without n."""
        if x.dim() not in (self.spatial + 1, self.spatial + 2) or x.shape[-1 - self.spatial] != self.channels:
            sizes = ", ".join([str(self.channels), *["*"] * self.spatial])
            raise ArgumentError(f"x: expected a tensor of shape [n, {sizes}] or [{sizes}], got {list(x.shape)}.")
        check_layer_operand(x)
        images = x if x.dim() == self.spatial + 2 else x[None]
        images = images[:, :, None] if self.spatial == 1 else images
        y = self._convolution(images)
        y = y[:, :, 0] if self.spatial == 1 else y
        return y if x.dim() == self.spatial + 2 else y[0]

    def _convolution(self, x: Tensor) -> Tensor:
        if self.is_pointwise:
            return self.product(x.flatten(2)).view(len(x), self.matrix_shape[0], *x.shape[2:])
        x, padding = padded(x, self.edges, self.padding_mode)
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        sizes = [
            (n + 2 * p - r - 1) // s + 1 for n, p, r, s in zip(x.shape[2:], padding, reach, self.stride, strict=True)
        ]
        if not x.numel():
            return self.product(x.new_zeros(len(x), self.matrix_shape[1], 0)).new_zeros(
                len(x), self.matrix_shape[0], *sizes
            )
        patches = functional.unfold(x, self.kernel_size, self.dilation, padding, self.stride)
        return self.product(patches).view(len(x), self.matrix_shape[0], *sizes)


def _with_values(layer: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """Set the constants of a layer in evaluation mode."""
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer.eval()


def padding_of(layer: Any) -> tuple[int, ...]:
    """Return the padding of a convolution at each side, as ``torch.nn.functional.pad`` takes it, in two dimensions."""
    edges = tuple(layer._reversed_padding_repeated_twice)
    return (*edges, 0, 0) if len(edges) == 2 else edges


def padded(x: Tensor, edges: tuple[int, ...], mode: str) -> tuple[Tensor, tuple[int, int]]:
    """Pad images unless ``unfold`` can do it; return them, and the padding that is left to it."""
    left, right, top, bottom = edges
    if mode == "zeros" and (left, top) == (right, bottom):
        return x, (top, left)
    return functional.pad(x, edges, mode="constant" if mode == "zeros" else mode), (0, 0)


def matrix_of(weight: Tensor, groups: int) -> Tensor:
    """Return the weight of a convolution as a matrix of outputs and patches; groups are blocks of its diagonal."""
    flat = weight.detach().flatten(1)
    return flat if groups == 1 else torch.block_diag(*flat.chunk(groups))


class PrunedAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` for inference, whose projections are layers of their own.

    Attributes
    ----------
    in_proj : Module
        The projection of queries, keys and values, one below the other.
    out_proj : Module
    """

    _qkv_same_embed_dim = False  # TransformerEncoderLayer must not hand the weights to torch's fused kernel.
    in_proj_weight = in_proj_bias = None

    def __init__(self, layer: nn.MultiheadAttention, in_proj: nn.Module, out_proj: nn.Module) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = layer.embed_dim, layer.num_heads, layer.head_dim
        self.batch_first, self.dropout = layer.batch_first, layer.dropout
        self.in_proj, self.out_proj = in_proj, out_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what ``torch.nn.MultiheadAttention`` returns."""
        if is_causal and attn_mask is None:
            raise ArgumentError("attn_mask: expected a mask with is_causal=True, got None. Pass the causal mask.")
        is_batched, same = query.dim() == 3, (query is key, key is value)
        operands = [x if is_batched else x[None] for x in (query, key, value)]
        if is_batched and not self.batch_first:
            operands = [x.transpose(0, 1) for x in operands]
        q, k, v = (self._heads(x) for x in self._projected(operands, same))
        mask = self._mask(key_padding_mask if is_batched or key_padding_mask is None else key_padding_mask[None],
                          attn_mask, q, k)  # fmt: skip
        y, shares = self._attended(q, k, v, mask, need_weights)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        shares = shares.mean(dim=1) if shares is not None and average_attn_weights else shares
        if not is_batched:
            return y[0], None if shares is None else shares[0]
        return (y if self.batch_first else y.transpose(0, 1)), shares

    def _projected(self, operands: list[Tensor], same: tuple[bool, bool]) -> tuple[Tensor, ...]:
        """Project queries, keys and values; equal operands once."""
        query, key, value = operands
        q, k, v = self.in_proj(query).chunk(3, dim=-1)
        if not same[0]:
            k, v = self.in_proj(key).chunk(3, dim=-1)[1:]
        return q, k, v if same[1] else self.in_proj(value).chunk(3, dim=-1)[2]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(self, padding: Tensor | None, attention: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the sum of both masks as floats, [n, 1 or heads, targets, sources]."""
        masks = [_as_floats(mask, q.dtype) for mask in (padding, attention) if mask is not None]
        if padding is not None:
            masks[0] = masks[0][:, None, None, :]
        if attention is not None and attention.dim() == 3:
            masks[-1] = masks[-1].view(len(q), self.num_heads, q.shape[2], k.shape[2])
        return sum(masks[1:], masks[0]) if masks else None

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        rate = self.dropout if self.training else 0.0
        if not need_weights:
            return functional.scaled_dot_product_attention(q, k, v, mask, rate), None
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        shares = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        shares = functional.dropout(shares, rate) if rate else shares
        return shares @ v, shares


def _as_floats(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


# ------------------------------------------------------------------------ products with pruned weights


CALLS = 1_000_000  # Formats are chosen for as many calls: a weight is converted once.
IN_PARTS = "bf16x3"
PRECISION: dict[Any, float] = {
    **{torch.float64: 3, torch.float32: 2, IN_PARTS: 1.5},
    **{torch.float16: 1, torch.bfloat16: 1, torch.int8: 0},
}
SPARSE = ("rows", "columns", "ranges")
RANGE = 64  # Columns of a range, and rows of inputs that are multiplied at once.
MOST_PADDING = 1.1  # Slots of ranges for an entry.
INT8_MAX = 127
MIDDLE = 128  # The zero point of inputs of both signs.


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(way: str) -> torch.dtype:
    """Return the dtype of the weights of a way."""
    name = way.split()[1]
    return torch.float32 if name == IN_PARTS else getattr(torch, name)


def ways(weight: torch.dtype, lowest: torch.dtype | str | None) -> list[str]:
    """Return the candidates for a weight, the layer as it is first.

    Parameters
    ----------
    weight : torch.dtype
    lowest : torch.dtype or "bf16x3", optional
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
    if weight is torch.float32 and least <= PRECISION[IN_PARTS] and has_unit(native_target()):
        sparse += [f"columns {IN_PARTS}", f"rows {IN_PARTS}"]
    return [*dense, *sparse]


def suits_ranges(weight: Tensor) -> bool:
    """Return whether the nonzeros of a weight are as many in each range of columns of each row, as those of 2:4."""
    if weight.dtype is not torch.float32 or not weight.numel() or weight.shape[1] % RANGE:
        return False
    counts = (weight != 0).view(len(weight), -1, RANGE).sum(dim=2)
    return int(counts.max()) * counts.numel() <= MOST_PADDING * int(counts.sum())


@cache
def _range_kernel(count: int) -> Any:
    return build(ops.range_spmm(count, RANGE), expected_calls=CALLS)


@cache
def _kernel(operator: str, dtype: str) -> Any:
    if dtype == "int8":
        program = ops.quantized_spmm("int8", "uint8", zero_point=True)
    elif dtype == IN_PARTS:
        program = getattr(ops, operator)(precision=IN_PARTS)
    else:
        program = getattr(ops, operator)(dtype)
    return build(program, expected_calls=CALLS)


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
    input_zero : int
        The number from 0 to 255 that stands for an input of zero.
    """

    shape: tuple[int, int]
    way: str
    values: Tensor
    crow_indices: Tensor | None = None
    col_indices: Tensor | None = None
    scales: Tensor | None = None
    input_scale: float = 1.0
    input_zero: int = MIDDLE

    @classmethod
    def from_dense(cls, weight: Tensor, way: str, input_scale: float = 1.0, input_zero: int = MIDDLE) -> Weight:
        """Convert a matrix to the storage of a way."""
        dtype, inputs = stored_dtype(way), (input_scale, input_zero)
        matrix, scales = weight.detach(), None
        if dtype is torch.int8:
            largest = matrix.float().abs().amax(dim=1) if matrix.shape[1] else matrix.new_zeros(len(matrix)).float()
            scales = torch.where(largest > 0, largest / INT8_MAX, torch.ones_like(largest))
            values = (matrix.float() / scales[:, None]).round().to(torch.int8)
        else:
            values = matrix.to(dtype)
        shape = (matrix.shape[0], matrix.shape[1])
        if way.startswith("dense"):
            return cls(shape, way, values.contiguous().clone(), None, None, scales, *inputs)
        places = matrix != 0
        rows, columns = places.nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=shape[0]).cumsum(0)
        crow = torch.cat([torch.zeros(1, dtype=torch.int64), counts]).to(torch.int32)
        return cls(shape, way, values[rows, columns], crow, columns.to(torch.int32), scales, *inputs)

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
        digest = hashlib.sha256(repr((self.shape, self.way, self.input_scale, self.input_zero)).encode())
        for tensor in (self.values, self.crow_indices, self.col_indices, self.scales):
            if tensor is not None:
                digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class LayerProduct:
    """``x @ W.T`` for rows and ``W @ x`` for columns, in the way of a weight; without gradients."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.kind, self.dtype_name = weight.way.split()
        self.dtype = stored_dtype(weight.way)
        self.is_quantized = self.dtype is torch.int8
        self.is_empty = 0 in weight.shape
        self._bound: Any = None
        if self.is_quantized and self.kind == "dense":
            row_sums = weight.values.sum(dim=1, dtype=torch.int32)
            self._shifts = row_sums * (weight.input_zero - MIDDLE)
        if self.kind in SPARSE and not self.is_empty:
            self._bound = self._bind()

    def _bind(self) -> Callable[..., Any]:
        weight = self.weight
        crow, col = weight.crow_indices, weight.col_indices
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
            matrix = torch.sparse_csr_tensor(crow, col, weight.values, weight.shape, check_invariants=True)
        if self.kind == "ranges":
            values, places = ops.pack_ranges(weight.to_dense(self.dtype).numpy(), RANGE)
            kernel = _range_kernel(values.shape[2])
            return kernel.bind(A=torch.from_numpy(values), X=torch.from_numpy(places))
        options: dict[str, Any] = {}
        if weight.scales is not None:
            zero_point = torch.tensor([weight.input_zero], dtype=torch.int32)
            options = {"scale": weight.scales * weight.input_scale, "zero_point": zero_point}
        return _kernel("spmm" if self.kind == "columns" else "linear", self.dtype_name).bind(A=matrix, **options)

    def rows(self, x: Tensor) -> Tensor:
        """Return the product for rows x [b, in]; [b, out], in the dtype of x."""
        outputs = self.weight.shape[0]
        if self.is_empty or not x.numel():
            return x.new_zeros(len(x), outputs)
        operand = self._operand(x, transposes=self.kind == "columns")
        if self.kind == "dense":
            y = self._dense(operand)
        elif self.kind == "ranges":
            y = x.new_empty(len(x), outputs)
            for part, result in zip(operand.split(RANGE), y.split(RANGE), strict=True):
                result.copy_(self._bound(B=part.t().contiguous().view(-1, RANGE, len(part))).t())
        elif self.kind == "columns":
            y = transposed(self._bound(B=operand), x.dtype)
        else:
            y = self._bound(X=operand.contiguous())
        return y.to(x.dtype)

    def columns(self, x: Tensor) -> Tensor:
        """Return the product for columns x [n, in, l]; [n, out, l], in the dtype of x."""
        images, inputs, length = x.shape
        outputs = self.weight.shape[0]
        if self.is_empty or not x.numel():
            return x.new_zeros(images, outputs, length)
        if self.kind not in ("columns", "ranges"):
            rows = self.rows(x.transpose(1, 2).reshape(images * length, inputs))
            return rows.view(images, length, outputs).transpose(1, 2).contiguous()
        operand = self._operand(x)
        flat = operand[0] if images == 1 else operand.transpose(0, 1).reshape(inputs, images * length)
        if self.kind == "ranges":
            y = x.new_empty(outputs, flat.shape[1])
            for part, result in zip(flat.split(RANGE, dim=1), y.split(RANGE, dim=1), strict=True):
                result.copy_(self._bound(B=part.contiguous().view(-1, RANGE, part.shape[1])))
        else:
            y = self._bound(B=flat.contiguous()).to(x.dtype)
        return y[None] if images == 1 else y.view(outputs, images, length).transpose(0, 1).contiguous()

    def _operand(self, x: Tensor, *, transposes: bool = False) -> Tensor:
        x = x.detach()
        if self.is_quantized:
            return quantized(x, self.weight.input_scale, self.weight.input_zero, transposes=transposes)
        return transposed(x, self.dtype) if transposes else x.to(self.dtype)

    def _dense(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.scales is None:
            return functional.linear(x, weight.values)
        signed = (x.to(torch.int16) - MIDDLE).to(torch.int8)  # torch multiplies signed integers only.
        return (torch._int_mm(signed, weight.values.t()) - self._shifts) * (weight.scales * weight.input_scale)


# ------------------------------------------------------------------ operators that torch traces

PRODUCTS: WeakValueDictionary[str, LayerProduct] = WeakValueDictionary()


def product_of(weight: Weight) -> tuple[str, LayerProduct]:
    """Return the product with a weight and its key; equal weights share one."""
    key = weight.key()
    product = PRODUCTS.get(key)
    if product is None:
        product = PRODUCTS[key] = LayerProduct(weight)
    return key, product


def _lookup(key: str) -> LayerProduct:
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


__all__ = [
    "CONVOLUTION_OPTIONS",
    "IN_PARTS",
    "MIDDLE",
    "PRODUCTS",
    "LayerProduct",
    "PrunedAttention",
    "PrunedConv",
    "PrunedLinear",
    "PrunedWeight",
    "Weight",
    "dtype_name",
    "matrix_of",
    "product_of",
    "suits_ranges",
    "ways",
]
