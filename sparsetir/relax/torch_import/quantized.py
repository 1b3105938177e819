# SPDX-License-Identifier: Apache-2.0
"""Converters of torch's quantized exports (PT2E): ``torch.ops.quantized_decomposed.*``.

Conversions from 8-bit integers become ``R.dequantize``, which `SparsifyWeights` recognizes before a product;
conversions to integers become the multiplications by reciprocals that torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import ir, relax

from sparsetir.errors import LoweringError
from sparsetir.relax.operators import EIGHT_BITS, constant, reshape


def _arguments(node: Any, importer: Any) -> list[Any]:
    """Return the arguments of a call, with tensors and keywords as the importer knows them."""
    keywords = [node.kwargs[name] for name in ("quant_min", "quant_max", "dtype") if name in node.kwargs]
    return [*importer.retrieve_args(node), *keywords]


def _parameter(value: Any, dtype: str, axis: int | None, rank: int, emit: Callable[[Any], Any]) -> Any:
    """Return a scale or zero point in a dtype, as a scalar or in the shape that broadcasts along an axis."""
    shape = [] if axis is None else [-1 if n == axis % rank else 1 for n in range(rank)]
    if isinstance(value, (int, float)):
        return constant(np.asarray(value, dtype))
    if isinstance(value, ir.GenericConst):
        return constant(value.value.numpy().astype(dtype).reshape(shape))
    return emit(reshape(emit(relax.op.astype(value, dtype)), shape))


def _reciprocal(scale: Any, axis: int | None, rank: int, emit: Callable[[Any], Any]) -> Any:
    """Return one over a scale in float32; of a number, rounded once, as torch does."""
    if isinstance(scale, (int, float)):
        return constant(np.asarray(1.0 / scale, "float32"))
    factor = _parameter(scale, "float32", axis, rank, emit)
    if isinstance(factor, ir.GenericConst):
        return constant(np.float32(1) / factor.value.numpy())
    return emit(relax.op.divide(constant(np.asarray(1, "float32")), factor))


def _quantize(node: Any, importer: Any, *, by_channel: bool = False) -> Any:
    emit, args = importer.block_builder.emit, _arguments(node, importer)
    x, scale, zero, *rest = args
    axis = int(rest.pop(0)) if by_channel else None
    low, high, dtype = rest[0], rest[1], str(node.meta["val"].dtype).removeprefix("torch.")
    if not all(isinstance(limit, int) for limit in (low, high)):
        fault = f"{node.target}: expected limits that are numbers, got tensors"
        raise LoweringError(f"{fault}. Export the model with quantize_per_tensor.default.")
    rank = x.ty.ndim
    x = x if str(x.ty.dtype.dtype) == "float32" else emit(relax.op.astype(x, "float32"))
    y = emit(relax.op.round(emit(relax.op.multiply(x, _reciprocal(scale, axis, rank, emit)))))
    y = emit(relax.op.add(y, _parameter(zero, "float32", axis, rank, emit)))
    return emit(relax.op.astype(emit(relax.op.clip(y, low, high)), dtype))


def _dequantize(node: Any, importer: Any, *, by_channel: bool = False) -> Any:
    emit, args = importer.block_builder.emit, _arguments(node, importer)
    x, scale, zero, *rest = args
    axis = int(rest.pop(0)) if by_channel else None
    zero = 0 if zero is None else zero
    source_dtype, dtype = str(x.ty.dtype.dtype), str(node.meta["val"].dtype).removeprefix("torch.")
    if source_dtype in EIGHT_BITS and dtype == "float32":
        flat = None if axis is None else 0
        factor = _parameter(scale, "float32", flat, 1, emit)
        return emit(relax.op.dequantize(x, factor, _parameter(zero, source_dtype, flat, 1, emit), axis=axis or 0))
    rank = x.ty.ndim
    shifted = emit(
        relax.op.subtract(emit(relax.op.astype(x, "float32")), _parameter(zero, "float32", axis, rank, emit))
    )
    y = emit(relax.op.multiply(shifted, _parameter(scale, "float32", axis, rank, emit)))
    return y if dtype == "float32" else emit(relax.op.astype(y, dtype))


def converters() -> dict[str, Callable[[Any, Any], Any]]:
    """Return the converters, by the names that the importer looks up."""
    table: dict[str, Callable[[Any, Any], Any]] = {}
    for name, convert in (("quantize", _quantize), ("dequantize", _dequantize)):
        table |= {f"{name}_per_tensor.{overload}": convert for overload in ("default", "tensor", "tensor2")}
        table[f"{name}_per_channel.default"] = partial(convert, by_channel=True)
    return table


__all__ = ["converters"]
