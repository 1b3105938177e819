# SPDX-License-Identifier: Apache-2.0
"""Grouped products of torch tensors with gradients: `grouped_mm`, with the signature of ``torch._grouped_mm``.

Each product is computed by a register-blocked kernel of ours, by a loop of ``torch.mm``, or by one padded
``torch.bmm``: the three are timed once for a class of shapes, and the fastest is used from then on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import torch
from sparsetir.einsum.grouped import check_offsets
from sparsetir.einsum.grouped import run as run_kernel
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.torch.functions import NAMES, KernelFunction, differentiable
from sparsetir.utils.arguments import shown
from sparsetir.utils.caches import shared_cache
from torch import Tensor

MAX_CLASSES = 256
MAX_PADDING = 2  # padded rows over rows, up to which a padded product is a candidate
MIN_TIMED_FLOPS = 1 << 18  # below, one run of the kernel takes less than a comparison is worth
REPEATS = 3

_fastest = shared_cache("ways of grouped products", MAX_CLASSES)


# --------------------------------------------------------------------------------------------------------- products


def _rows_by_kernel(x: Tensor, w: Tensor, starts: np.ndarray) -> Tensor:
    y = x.new_empty(x.shape[0], w.shape[2])
    _call("rows", x, w, y, starts)
    return y


def _weights_by_kernel(x: Tensor, w: Tensor, starts: np.ndarray) -> Tensor:
    y = x.new_empty(starts.size - 1, x.shape[1], w.shape[1])
    _call("weights", x, w, y, starts)
    return y


def _call(result: str, x: Tensor, w: Tensor, y: Tensor, starts: np.ndarray) -> None:
    is_array = x.dtype != torch.bfloat16  # which numpy does not have
    operands = (t.detach().resolve_neg().contiguous() for t in (x, w, y))
    left, right, out = (t.numpy() if is_array else t for t in operands)
    run_kernel(NAMES[x.dtype], result, left, right, out, starts)


def _rows_by_loop(x: Tensor, w: Tensor, starts: np.ndarray) -> Tensor:
    y = x.new_empty(x.shape[0], w.shape[2])
    for g, (low, high) in enumerate(_bounds(starts)):
        if high > low:
            torch.mm(x[low:high], w[g], out=y[low:high])
    return y


def _weights_by_loop(x: Tensor, w: Tensor, starts: np.ndarray) -> Tensor:
    y = x.new_empty(starts.size - 1, x.shape[1], w.shape[1])
    for g, (low, high) in enumerate(_bounds(starts)):
        torch.mm(x[low:high].t(), w[low:high], out=y[g])
    return y


def _bounds(starts: np.ndarray) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))


def _places(starts: np.ndarray) -> tuple[Tensor | None, int]:
    """Return where rows are among padded groups, and the length of these; no places where none is padded."""
    lengths = np.diff(starts)
    longest = int(lengths.max())
    if (lengths == longest).all():
        return None, longest
    shift = np.arange(lengths.size) * longest - starts[:-1]
    return torch.from_numpy(np.arange(starts[-1]) + np.repeat(shift, lengths)), longest


def _padded(x: Tensor, places: Tensor | None, longest: int) -> Tensor:
    if places is None:
        return x.reshape(-1, longest, x.shape[1])
    groups = -(-(int(places[-1]) + 1) // longest)
    return x.new_zeros(groups * longest, x.shape[1]).index_copy_(0, places, x).view(groups, longest, -1)


def _rows_by_padding(x: Tensor, w: Tensor, starts: np.ndarray) -> Tensor:
    places, longest = _places(starts)
    padded = _padded(x, places, longest)
    y = torch.bmm(padded, w[: padded.shape[0]]).flatten(0, 1)
    return y if places is None else y[places]


def _weights_by_padding(x: Tensor, w: Tensor, starts: np.ndarray) -> Tensor:
    places, longest = _places(starts)
    left, right = (_padded(t, places, longest) for t in (x, w))
    y = torch.bmm(left.transpose(1, 2), right)
    missing = starts.size - 1 - y.shape[0]
    return torch.cat([y, y.new_zeros(missing, *y.shape[1:])]) if missing else y


Way = Callable[[Tensor, Tensor, np.ndarray], Tensor]
WAYS: dict[str, dict[str, Way]] = {
    "rows": {"kernel": _rows_by_kernel, "loop": _rows_by_loop, "padded": _rows_by_padding},
    "weights": {"kernel": _weights_by_kernel, "loop": _weights_by_loop, "padded": _weights_by_padding},
}


def _class_of(result: str, x: Tensor, w: Tensor, starts: np.ndarray, is_even: bool) -> tuple[Any, ...]:
    """Return the class of shapes within which the fastest way is the same: powers of two of rows and groups."""
    rows, groups = int(starts[-1]), starts.size - 1
    is_plain = x.is_contiguous(), w.is_contiguous()
    scale = (rows // groups).bit_length(), groups.bit_length()
    return result, x.dtype, x.shape[1], w.shape[-1], *scale, is_even, is_plain, torch.get_num_threads()


def _product(result: str, x: Tensor, w: Tensor, starts: np.ndarray) -> Tensor:
    """Compute one grouped product over all rows in the fastest known way; time the ways for a new class of shapes."""
    rows, groups = int(starts[-1]), starts.size - 1
    ways = WAYS[result]
    if 0 in (*x.shape, *w.shape, groups):
        shape = (x.shape[0], w.shape[2]) if result == "rows" else (groups, x.shape[1], w.shape[1])
        return x.new_zeros(shape)
    if 2 * rows * x.shape[1] * w.shape[-1] < MIN_TIMED_FLOPS:
        return ways["kernel"](x, w, starts)
    is_even = bool(np.diff(starts).max() * groups <= MAX_PADDING * rows)
    key = _class_of(result, x, w, starts, is_even)
    name = _fastest.get(key)
    if name is None:
        candidates = {name: way for name, way in ways.items() if is_even or name != "padded"}
        name = _fastest[key] = _compare(candidates, x, w, starts)
    return ways[name](x, w, starts)


def _compare(ways: dict[str, Way], x: Tensor, w: Tensor, starts: np.ndarray) -> str:
    """Return the name of the way with the least time of a few interleaved runs, after one that compiles."""
    for way in ways.values():
        way(x, w, starts)
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(REPEATS):
        for name, way in ways.items():
            start = time.perf_counter()
            way(x, w, starts)
            least[name] = min(least[name], time.perf_counter() - start)
    return min(least, key=lambda name: least[name])


# -------------------------------------------------------------------------------------------------------- gradients


class GroupedRows(KernelFunction):
    """``y[r] = x[r] @ w[g]`` for the rows of each group; zeros for rows behind the last group."""

    @staticmethod
    def forward(ctx: Any, starts: np.ndarray, x: Tensor, w: Tensor) -> Tensor:
        ctx.starts = starts
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w if ctx.needs_input_grad[1] else None)
        rows = int(starts[-1])
        y = _product("rows", x[:rows], w, starts)
        return y if rows == x.shape[0] else torch.cat([y, y.new_zeros(x.shape[0] - rows, y.shape[1])])

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g_x = GroupedRows.apply(ctx.starts, g, w.transpose(1, 2)) if ctx.needs_input_grad[1] else None
        return None, g_x, GroupedWeights.apply(ctx.starts, x, g) if ctx.needs_input_grad[2] else None


class GroupedWeights(KernelFunction):
    """``y[g] = x[rows of g].T @ w[rows of g]``."""

    @staticmethod
    def forward(ctx: Any, starts: np.ndarray, x: Tensor, w: Tensor) -> Tensor:
        ctx.starts = starts
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w if ctx.needs_input_grad[1] else None)
        rows = int(starts[-1])
        return _product("weights", x[:rows], w[:rows], starts)

    @staticmethod
    @differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g_x = GroupedRows.apply(ctx.starts, w, g.transpose(1, 2)) if ctx.needs_input_grad[1] else None
        return None, g_x, GroupedRows.apply(ctx.starts, x, g) if ctx.needs_input_grad[2] else None


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
        Two or three dimensions; float32, float64, float16 or bfloat16.
    mat2 : Tensor
        Two or three dimensions, of the same dtype.
    offs : Tensor of int32 or int64, shape (groups,)
        Where each group ends: of rows of `self` for 2d x 3d, of the summed dimension for 2d x 2d, of columns of `mat2`
        for 3d x 2d. None for 3d x 3d. Groups may be empty. What is behind the last end is zero in a result.
    bias : Tensor, optional
        Added to the result.
    out_dtype : torch.dtype, optional
        Of the result.

    Returns
    -------
    Tensor
        ``(rows, n)`` for 2d x 3d, ``(groups, m, n)`` for 2d x 2d, ``(m, columns)`` for 3d x 2d, ``(groups, m, n)`` for
        3d x 3d.

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
    _check_operands(self, mat2)
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point):
        raise ArgumentTypeError(f"out_dtype: expected a dtype of floats, got {shown(out_dtype)}. Leave it out.")
    dims = self.dim(), mat2.dim()
    if dims == (3, 3):
        if offs is not None:
            raise ArgumentError("offs: expected None for 3d x 3d, got a tensor. Leave it out.")
        y = torch.bmm(self, mat2)
    else:
        y = _ragged(self, mat2, dims, _starts(offs, self.shape[-2 if dims == (2, 3) else -1], mat2, dims))
    if bias is not None:
        y = y + _fitting_bias(bias, y)
    return y if out_dtype is None else y.to(out_dtype)


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


def _ragged(left: Tensor, right: Tensor, dims: tuple[int, int], starts: np.ndarray) -> Tensor:
    groups = starts.size - 1
    if dims == (2, 2):
        return GroupedWeights.apply(starts, left.t(), right)
    matrices = right if dims == (2, 3) else left
    if matrices.shape[0] != groups:
        fault = f"offs: expected {matrices.shape[0]} ends, one for each matrix, got {groups}"
        raise ArgumentError(f"{fault}. Repeat an end for an empty group.")
    if dims == (2, 3):
        return GroupedRows.apply(starts, left, right)
    return GroupedRows.apply(starts, right.t(), left.transpose(1, 2)).t()


def _check_operands(left: Tensor, right: Tensor) -> None:
    for name, tensor in (("self", left), ("mat2", right)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in NAMES or tensor.device.type != "cpu":
            found = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentTypeError(f"{name}: expected a tensor of floats on the CPU, got {found}. Convert it.")
        if tensor.layout != torch.strided or tensor.dim() not in (2, 3):
            fault = f"{name}: expected 2 or 3 dense dimensions, got {tensor.layout} of shape {tuple(tensor.shape)}"
            raise ArgumentError(f"{fault}. Reshape it.")
    if left.dtype != right.dtype:
        raise ArgumentTypeError(f"mat2: expected {left.dtype} as self has, got {right.dtype}. Convert one.")
    if left.shape[-1] != right.shape[-2] or (left.dim() == right.dim() == 3 and left.shape[0] != right.shape[0]):
        fault = f"mat2: expected {left.shape[-1]} rows in each matrix for self of shape {tuple(left.shape)}"
        raise ArgumentError(f"{fault}, got shape {tuple(right.shape)}. Transpose one.")


def _starts(offs: Any, length: int, right: Tensor, dims: tuple[int, int]) -> np.ndarray:
    """Return the validated begins of groups, and the last end."""
    length = right.shape[1] if dims == (3, 2) else length
    if not isinstance(offs, Tensor) or offs.dtype not in (torch.int32, torch.int64) or offs.dim() != 1:
        found = f"{offs.dtype} of shape {tuple(offs.shape)}" if isinstance(offs, Tensor) else type(offs).__name__
        fault = f"offs: expected one dimension of int32 or int64, the end of each group, got {found}"
        raise ArgumentTypeError(f"{fault}. Give torch.cumsum of the sizes of the groups.")
    starts = np.zeros(offs.shape[0] + 1, np.int64)
    starts[1:] = offs.detach().numpy()
    check_offsets(starts[1:], length, name="offs", first=None)
    return starts


__all__ = ["grouped_mm"]
