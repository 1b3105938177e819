# SPDX-License-Identifier: Apache-2.0
"""Attention within each sequence of jagged batches, over blocks that begin where sequences begin."""

from __future__ import annotations

from typing import Any

import numpy as np

import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.torch import block_attention
from sparsetir.torch.block_attention import COSTS, BlockPattern
from sparsetir.torch.functions import NAMES, KernelFunction, once
from sparsetir.torch.graph import check_transforms
from sparsetir.utils.arguments import is_real, shown
from sparsetir.utils.caches import remember
from torch import Tensor

Array = np.ndarray
MAX_PATTERNS = 32  # batches whose blocks are kept: layers of a model share those of a batch


def jagged_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """Attention of each sequence of a jagged batch: ``softmax(scale * q k^T) v``, without padding, with gradients.

    Parameters
    ----------
    q, k, v : Tensor
        Nested tensors of layout ``torch.jagged``, all ``[batch, length, features]``, ``[batch, length, heads,
        features]``, or ``[batch, heads, length, features]`` as ``scaled_dot_product_attention`` takes them. k and v
        have the lengths of each other; q has the same in self attention, or others in cross attention.
    scale : float, optional
        Default: ``features ** -0.5``.
    is_causal : bool
        Whether position i of a sequence sees keys up to position i only.

    Returns
    -------
    Tensor
        Jagged, with the lengths and the layout of q. Queries without keys have zeros. Halves are computed in float32.

    Raises
    ------
    ArgumentTypeError
        An operand that is no jagged tensor of floats on the CPU.
    ArgumentError
        Shapes or lengths that do not fit.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> rows, offsets = torch.ones(5, 4), torch.tensor([0, 2, 5])
    >>> x = torch.nested.nested_tensor_from_jagged(rows, offsets)
    >>> [part.shape[0] for part in sparsetir.torch.jagged_attention(x, x, x, is_causal=True).unbind()]
    [2, 3]
    """
    check_transforms()
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_operand(name, tensor)
    is_by_heads = q.dim() == 4 and q._ragged_idx == 2
    parts = []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        by_length = tensor.transpose(1, 2) if is_by_heads and tensor.dim() == 4 else tensor
        if by_length.dim() != q.dim() or by_length._ragged_idx != 1:
            fault = f"{name}: expected the layout of q, {list(q.shape)}, got {list(tensor.shape)}"
            raise ArgumentError(f"{fault}. Transpose it; lengths are dimension 1, or 2 behind heads.")
        parts.append(by_length)
    rows, keys, values = (part.values() for part in parts)
    queries_at, keys_at, values_at = (part.offsets().numpy() for part in parts)
    _check_sizes(rows, keys, values, queries_at, keys_at, values_at)
    if scale is not None and not is_real(scale):
        raise ArgumentError(f"scale: expected a number, got {shown(scale)}.")
    scale = max(rows.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    batch = _batch(tuple(np.diff(queries_at).tolist()), tuple(np.diff(keys_at).tolist()), bool(is_causal))
    operands = (_spread(t, *side) for t, side in ((rows, batch[1]), (keys, batch[2]), (values, batch[2])))
    mixed = BlockAttention.apply(batch[0], scale, *operands)
    places = batch[1][0]
    mixed = mixed if places is None else mixed.index_select(0, places)
    y = torch.nested.nested_tensor_from_jagged(mixed, parts[0].offsets())
    return y.transpose(1, 2) if is_by_heads else y


def _check_operand(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.jagged:
        described = f"a tensor of {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        fault = f"{name}: expected a nested tensor of torch.jagged, got {described}"
        raise ArgumentTypeError(f"{fault}. Make it by torch.nested.nested_tensor_from_jagged(rows, offsets).")
    if tensor.dtype not in NAMES or tensor.device.type != "cpu":
        raise ArgumentTypeError(
            f"{name}: expected floats on the CPU, got {tensor.dtype} on {tensor.device}. Convert it."
        )
    if tensor.lengths() is not None or tensor.dim() not in (3, 4):
        fault = f"{name}: expected 3 or 4 dimensions without holes between sequences, got {list(tensor.shape)}"
        raise ArgumentError(f"{fault}. Call contiguous(), or flatten it.")


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, queries_at: Array, keys_at: Array, values_at: Array) -> None:
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ArgumentTypeError(
            f"expected one dtype, got q of {q.dtype}, k of {k.dtype}, v of {v.dtype}. Convert them."
        )
    if q.shape[1:] != k.shape[1:] or v.shape[1:-1] != q.shape[1:-1]:
        shapes = f"{list(q.shape[1:])}, {list(k.shape[1:])} and {list(v.shape[1:])}"
        raise ArgumentError(f"q, k, v: expected the same heads, and features of q in k, got {shapes} for a position.")
    if keys_at.size != queries_at.size:
        fault = f"k: expected {queries_at.size - 1} sequences as in q, got {keys_at.size - 1}"
        raise ArgumentError(f"{fault}. Give an empty one where a sequence has no keys.")
    if not np.array_equal(keys_at, values_at):
        raise ArgumentError("v: expected the lengths of k, got others. Give both the same offsets.")


# ------------------------------------------------------------------ blocks of a batch


Side = tuple[Tensor | None, int]  # the places of positions among padded ones, None if nothing is padded; their number


@remember("blocks of jagged batches", MAX_PATTERNS)
def _batch(queries: tuple[int, ...], keys: tuple[int, ...], is_causal: bool) -> tuple[BlockPattern, Side, Side]:
    """Return the blocks of sequences of these lengths, each padded to whole blocks, and both sides of the padding."""
    lengths = np.array(queries, np.int64), np.array(keys, np.int64)
    size = min(COSTS, key=lambda size: COSTS[size] * size**2 * _blocks_of(*lengths, size, is_causal)[0].sum())
    per_row, sequence, local = _blocks_of(*lengths, size, is_causal)
    widths = -(-lengths[1] // size)
    first = np.cumsum(widths) - widths  # the first column of blocks of each sequence
    within = np.arange(per_row.sum()) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    of_block = np.repeat(sequence, per_row)
    valid = np.minimum(lengths[1][of_block] - within * size, size)
    is_diagonal = (within == np.repeat(local, per_row)) & is_causal
    kinds, which = np.unique(valid + is_diagonal * (size + 1), return_inverse=True)
    positions = np.arange(size)
    is_key = positions < (kinds % (size + 1))[:, None]
    is_seen = (positions[:, None] <= positions) | (kinds <= size)[:, None, None]  # columns of a block before its rows
    masks = (is_key[:, :, None] & is_seen).astype(np.int8)
    indptr = np.zeros(per_row.size + 1, np.int32)
    np.cumsum(per_row, out=indptr[1:])
    sides = tuple(_places(each, size) for each in lengths)
    pattern = BlockPattern(
        size,
        (sides[0][1], sides[1][1]),
        indptr,
        (first[of_block] + within).astype(np.int32),
        None if masks.all() else masks,
        which.astype(np.int32),
        is_strict=False,
    )
    return pattern, sides[0], sides[1]


def _blocks_of(queries: Array, keys: Array, size: int, is_causal: bool) -> tuple[Array, Array, Array]:
    """Return of each row of blocks how many blocks it has, its sequence, and its place in the sequence."""
    heights, widths = -(-queries // size), -(-keys // size)
    sequence = np.repeat(np.arange(queries.size), heights)
    local = np.arange(sequence.size) - np.repeat(np.cumsum(heights) - heights, heights)
    per_row = widths[sequence]
    return np.minimum(per_row, local + 1) if is_causal else per_row, sequence, local


def _places(lengths: Array, size: int) -> Side:
    padded = -(-lengths // size) * size
    total = int(padded.sum())
    if np.array_equal(padded, lengths):
        return None, total
    shift = np.cumsum(padded) - padded - (np.cumsum(lengths) - lengths)
    return torch.from_numpy(np.arange(lengths.sum()) + np.repeat(shift, lengths)), total


def _spread(rows: Tensor, places: Tensor | None, total: int) -> Tensor:
    """Return rows at their places among padded ones."""
    return rows if places is None else rows.new_zeros(total, *rows.shape[1:]).index_copy(0, places, rows)


class BlockAttention(KernelFunction):
    """Attention over blocks."""

    @staticmethod
    def forward(ctx: Any, pattern: BlockPattern, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.pattern, ctx.scale, ctx.is_empty = pattern, scale, 0 in (*q.shape, *k.shape, *v.shape)
        keep = any(ctx.needs_input_grad) and not ctx.is_empty
        if ctx.is_empty:
            mixed, p = v.new_zeros(*q.shape[:-1], v.shape[-1]), None
        else:
            mixed, p = block_attention.mix(pattern, q, k, v, scale, keep=keep)
        ctx.save_for_backward(q, k, v, p)
        return mixed

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        if ctx.is_empty:
            return None, None, *(torch.zeros_like(t) for t in (q, k, v))
        of_columns = any(ctx.needs_input_grad[3:])
        gradients = block_attention.gradients(ctx.pattern, p, q, k, v, g, ctx.scale, of_columns=of_columns)
        return None, None, *(gradients or ())


__all__ = ["jagged_attention"]
