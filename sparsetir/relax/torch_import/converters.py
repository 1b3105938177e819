# SPDX-License-Identifier: Apache-2.0
"""Converters of torch's operators that TVM's importer lacks, or converts to something else than torch computes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax, tirx

from sparsetir.errors import LoweringError
from sparsetir.interop.arrays import HALVES
from sparsetir.relax import calls
from sparsetir.relax.epilogues import same_size
from sparsetir.relax.operators import is_float, ranks, reshape
from sparsetir.relax.torch_import import graphs, quantized
from sparsetir.relax.torch_import.operators import NAMESPACE, NO_GRADIENT, TORCH_OPERATORS
from sparsetir.relax.training.layers import standardised

Converter = Callable[[Any, Any], Any]
EMBEDDING_BAG: list[Any] = [False, 0, False, None, False, -1]  # defaults of the arguments from the fourth on
WIDER = {"bfloat16": "float32", "bool": "int8"}  # than dtypes of which TVM has no maximum
INFINITY_BITS = {32: 0x7F800000, 64: 0x7FF0000000000000}
SCATTERED = {"sum": "add", "mean": "mean", "amax": "max", "amin": "min", "prod": "mul"}


def converters() -> dict[str, Converter]:
    """Return the converters of operators, by the names that the importer looks up."""
    own_operators = {f"{name}.default": _own(name) for name in TORCH_OPERATORS}
    products = dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _product)
    scatters = dict.fromkeys(("scatter_add.default", "scatter_reduce.two"), _scatter)
    edges = {**graphs.converters(), **quantized.converters()}
    norms = {
        "_native_batch_norm_legit_functional.default": _batch_norm,
        "_native_batch_norm_legit.no_stats": _batch_norm_alone,
    }
    remaining = {"addmm.default": _addmm, "native_dropout.default": _dropout, "_embedding_bag.default": _embedding_bag}
    remaining |= {"_embedding_bag_forward_only.default": _embedding_bag}
    remaining |= dict.fromkeys(("convolution.default", *(f"conv{n}d.default" for n in (1, 2, 3))), _convolution)
    remaining |= {
        "_trilinear.default": _trilinear,
        "_cdist_forward.default": _cdist,
        f"{NO_GRADIENT}.default": _without_gradient,
    }
    families = {**_of_places(), **_of_numbers(), **_of_orders()}
    return {**own_operators, **products, **scatters, **edges, **norms, **families, **remaining}


# ------------------------------------------------------------------ places: negative ones count from the end


def _of_places() -> dict[str, Converter]:
    return {
        "select.int": _select,
        "index.Tensor": _index,
        "index_put.default": _index_put,
        "embedding.default": _embedding,
        "unfold.default": _unfold,
        "searchsorted.Tensor": _searchsorted,
        "bucketize.Tensor": lambda node, importer: _searchsorted(node, importer, is_sorted_first=False),
    }


def _size(x: Any, dim: int) -> Any:
    """Return the length of a dimension: a number, or an expression of those that may change."""
    size = x.ty.shape.values[dim]
    return int(size) if isinstance(size, tirx.IntImm) else size


def _select(node: Any, importer: Any) -> Any:
    x, dim, place = importer.retrieve_args(node)
    emit, dim = importer.block_builder.emit, dim % x.ty.ndim
    begin = place if place >= 0 else _size(x, dim) + place
    return emit(relax.op.squeeze(emit(relax.op.strided_slice(x, [dim], [begin], [begin + 1])), [dim]))


def _from_start(importer: Any, index: Any, size: Any) -> Any:
    """Return an index without negative numbers, which count from the end."""
    if isinstance(index, ir.GenericConst):
        places = index.value.numpy()
        if isinstance(size, int):
            return relax.const(np.where(places < 0, places + size, places))
        if (places >= 0).all():
            return index
    emit, dtype = importer.block_builder.emit, _dtype(index)
    length = relax.const(size, dtype) if isinstance(size, int) else _as_tensor(emit, size, dtype)
    is_negative = emit(relax.op.less(index, relax.const(0, dtype)))
    return emit(relax.op.where(is_negative, emit(relax.op.add(index, length)), index))


def _as_tensor(emit: Callable[[Any], Any], size: Any, dtype: str) -> Any:
    """Return a size that may change as a tensor without dimensions."""
    shape = emit(relax.op.shape_to_tensor(relax.ShapeExpr([size])))
    return emit(relax.op.astype(emit(relax.op.squeeze(shape, [0])), dtype))


def _taken(emit: Callable[[Any], Any], x: Any, index: Any, axis: int) -> Any:
    """Take slices; a place that is out of range, where torch raises, gives NaN of floats, else the last slice."""
    return emit(relax.op.take(x, index, axis, "nan" if is_float(x) else "clip"))


def _embedding(node: Any, importer: Any) -> Any:
    weight, index = importer.retrieve_args(node)[:2]
    return _taken(importer.block_builder.emit, weight, index, 0)


def _without_gradient(node: Any, importer: Any) -> Any:
    return importer.block_builder.emit(relax.op.grad.no_grad(importer.retrieve_args(node)[0]))


def _is_number(index: Any) -> bool:
    return _dtype(index).startswith(("int", "uint"))


def _index(node: Any, importer: Any) -> Any:
    """Convert subscripts by tensors of places, which are broadcast against each other; None is all of a dimension."""
    x, places = importer.retrieve_args(node)
    dims = [n for n, index in enumerate(places) if index is not None]
    if not all(_is_number(places[n]) for n in dims):
        return importer.create_convert_map()["index.Tensor"](node)
    emit = importer.block_builder.emit
    places_by_dim = {n: _from_start(importer, places[n], _size(x, n)) for n in dims}
    if len(dims) == 1:
        return _taken(emit, x, places_by_dim[dims[0]], dims[0])
    others = [n for n in range(x.ty.ndim) if n not in dims]
    flat, shape = _flat_places(importer, x, places_by_dim)
    ahead = emit(relax.op.permute_dims(x, [*dims, *others])) if dims != list(range(len(dims))) else x
    rows = emit(reshape(ahead, [math.prod(_size(x, n) for n in dims), *(_size(x, n) for n in others)]))
    result = _taken(emit, rows, flat, 0)
    first, count = dims[0], len(shape)
    if dims != list(range(first, first + len(dims))) or not first:
        return result
    # Subscripts side by side leave their dimensions where they were.
    order = [*range(count, count + first), *range(count), *range(count + first, result.ty.ndim)]
    return emit(relax.op.permute_dims(result, order))


def _flat_places(importer: Any, x: Any, places: dict[int, Any]) -> tuple[Any, list[Any]]:
    """Return one place among all of the dimensions' combinations for places in each of them, and the shape."""
    emit, flat = importer.block_builder.emit, None
    for dim, index in places.items():
        index = emit(relax.op.astype(index, "int64"))
        length = _size(x, dim)
        scale = relax.const(length, "int64") if isinstance(length, int) else _as_tensor(emit, length, "int64")
        flat = index if flat is None else emit(relax.op.add(emit(relax.op.multiply(flat, scale)), index))
    assert flat is not None
    return flat, list(flat.ty.shape.values)


def _unfold(node: Any, importer: Any) -> Any:
    """Convert overlapping windows along a dimension, whose elements become the last dimension."""
    x, dim, size, step = importer.retrieve_args(node)
    emit, dim = importer.block_builder.emit, dim % x.ty.ndim
    length = _size(x, dim)
    if not isinstance(length, int):
        raise LoweringError("unfold: expected a dimension of known length, got one that may change")
    count = (length - size) // step + 1
    places = (np.arange(count)[:, None] * step + np.arange(size)).astype("int64")
    windows = emit(relax.op.take(x, relax.const(places), dim, "clip"))
    return emit(relax.op.permute_dims(windows, [n for n in range(windows.ty.ndim) if n != dim + 1] + [dim + 1]))


def _searchsorted(node: Any, importer: Any, *, is_sorted_first: bool = True) -> Any:
    """Convert a search: the number of boundaries that are less than a value, or not more."""
    first, second = importer.retrieve_args(node)[:2]
    boundaries, values = (first, second) if is_sorted_first else (second, first)
    options = {"right": False, "out_int32": False, "side": None, "sorter": None, **node.kwargs}
    if boundaries.ty.ndim != 1 or options["sorter"] is not None:
        raise LoweringError(f"{node.target}: expected sorted boundaries of one dimension. Sort them before.")
    emit, kind = importer.block_builder.emit, "int32" if options["out_int32"] else "int64"
    shape = list(values.ty.shape.values)
    values = emit(reshape(values, [*shape, 1]))
    below = relax.op.less_equal if options["right"] or options["side"] == "right" else relax.op.less
    return emit(relax.op.sum(emit(relax.op.astype(emit(below(boundaries, values)), kind)), -1))


def _embedding_bag(node: Any, importer: Any) -> Any:
    """Convert sums and means of bags of rows; the first of four results, the others are for gradients."""
    arguments: list[Any] = list(importer.retrieve_args(node))
    weight, index, offsets, _, mode, _, weights, has_last, padding = arguments + EMBEDDING_BAG[len(arguments) - 3 :]
    if mode == 2 or padding not in (-1, None):
        raise LoweringError("embedding_bag is compiled for sums and means without padding_idx")
    emit, dtype = importer.block_builder.emit, _dtype(weight)
    bags = _size(offsets, 0) - (1 if has_last else 0)
    offsets, index = (emit(relax.op.astype(tensor, "int64")) for tensor in (offsets, index))
    count, width = _size(index, 0), _size(weight, 1)
    if has_last:
        offsets = emit(relax.op.strided_slice(offsets, [0], [0], [bags]))
    place = emit(reshape(emit(relax.op.arange(0, count, 1, "int64")), [count, 1]))
    begun = emit(relax.op.sum(emit(relax.op.astype(emit(relax.op.less_equal(offsets, place)), "int64")), -1))
    bag = emit(reshape(emit(relax.op.subtract(begun, relax.const(1, "int64"))), [count, 1]))
    rows = _taken(emit, weight, _from_start(importer, index, _size(weight, 0)), 0)
    if weights is not None:
        rows = emit(relax.op.multiply(rows, emit(reshape(weights, [count, 1]))))

    def summed(values: Any, columns: Any) -> Any:
        zeros = emit(relax.op.zeros(relax.ShapeExpr([bags, columns]), dtype))
        to = emit(relax.op.broadcast_to(bag, [count, columns]))
        return emit(relax.op.scatter_elements(zeros, to, values, axis=0, reduction="add"))

    total = summed(rows, width)
    if mode == 1:
        entries = summed(emit(relax.op.ones(relax.ShapeExpr([count, 1]), dtype)), 1)
        total = emit(relax.op.divide(total, emit(relax.op.maximum(entries, relax.const(1, dtype)))))
    return relax.Tuple([total, bag, bag, bag])


# ------------------------------------------------------------------ numbers: dtypes, NaN, and factors


def _of_numbers() -> dict[str, Converter]:
    sums = {"add.Tensor": relax.op.add, "sub.Tensor": relax.op.subtract}
    extremes = {f"{prefix}{name}.default": getattr(relax.op, name) for prefix in ("a", "") for name in ("max", "min")}
    ends = {"max.dim": relax.op.max, "min.dim": relax.op.min}
    shifts = {"left": relax.op.left_shift, "right": relax.op.right_shift}
    shifted = {
        f"{name}.{kind}": _shift(shifts[side])
        for kind in ("Scalar", "Tensor", "Tensor_Scalar")
        for side, names in (
            ("left", ("__lshift__", "bitwise_left_shift")),
            ("right", ("__rshift__", "bitwise_right_shift")),
        )
        for name in names
    }
    limits = ("clamp.default", "clamp_min.default", "clamp_max.default", "relu6.default", "hardtanh.default")
    places = {"argmax.default": relax.op.max, "argmin.default": relax.op.min}
    larger = {"maximum.default": relax.op.maximum, "minimum.default": relax.op.minimum}
    return {
        **{name: _sum_of(combine) for name, combine in sums.items()},
        **{name: _extreme(reduce) for name, reduce in extremes.items()},
        **{name: _extreme_and_place(reduce) for name, reduce in ends.items()},
        **{name: _place(reduce) for name, reduce in places.items()},
        **{name: _larger(choose) for name, choose in larger.items()},
        **{name: _compared(name) for kind in ("Scalar", "Tensor") for name in (f"{c}.{kind}" for c in COMPARISONS)},
        **{name: _kept_nan(name) for name in limits},
        **{f"div.{kind}": _quotient(f"div.{kind}") for kind in ("Tensor", "Scalar")},
        **{f"mul.{kind}": _promoted(f"mul.{kind}", relax.op.multiply) for kind in ("Tensor", "Scalar")},
        "add.Scalar": _sum_of(relax.op.add),
        "sub.Scalar": _sum_of(relax.op.subtract),
        "cumsum.default": _cumulative,
        **{f"any.{kind}": _any for kind in ("default", "dim", "dims")},
        "max_pool2d_with_indices.default": _max_pool,
        "exp2.default": _exp2,
        **shifted,
        "floor_divide.default": _floor_divided,
        **{f"remainder.{kind}": _remainder for kind in ("Tensor", "Scalar", "Scalar_Tensor")},
        "pow.Tensor_Scalar": _power,
        "reciprocal.default": _reciprocal,
        "clamp.Tensor": _limited,
        "where.self": _where,
        "div.Tensor_mode": _divided,
        "elu.default": _elu,
        "prod.dim_int": _product_along,
    }


def _dtype(x: Any) -> str:
    return str(x.ty.dtype.dtype)


def _cast(emit: Callable[[Any], Any], value: Any, dtype: str) -> Any:
    """Return a tensor or number as a tensor of a dtype."""
    if not isinstance(value, relax.Expr):
        return relax.const(value, dtype)
    return value if _dtype(value) == dtype else emit(relax.op.astype(value, dtype))


def _result_dtype(node: Any) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def _operands(node: Any, importer: Any) -> list[Any]:
    """Return the two operands of an elementwise operator as tensors of the result's dtype."""
    emit, dtype = importer.block_builder.emit, _result_dtype(node)
    return [_cast(emit, value, dtype) for value in importer.retrieve_args(node)[:2]]


def _promoted(name: str, combine: Callable[[Any, Any], Any]) -> Converter:
    """Return a converter whose operands get the dtype of the result, where they differ from it."""

    def convert(node: Any, importer: Any) -> Any:
        dtype = _result_dtype(node)
        if dtype == "bool":
            return importer.block_builder.emit(relax.op.logical_and(*_operands(node, importer)))
        if all(not isinstance(v, relax.Expr) or _dtype(v) == dtype for v in importer.retrieve_args(node)[:2]):
            return importer.create_convert_map()[name](node)
        return importer.block_builder.emit(combine(*_operands(node, importer)))

    return convert


def _cumulative(node: Any, importer: Any) -> Any:
    x, dim = importer.retrieve_args(node)[:2]
    return importer.block_builder.emit(relax.op.cumsum(x, dim % max(x.ty.ndim, 1), _result_dtype(node)))


def _any(node: Any, importer: Any) -> Any:
    """Convert whether any element is not zero, of all or along dimensions; of bytes torch makes a byte."""
    emit, (x, dims, keepdim) = importer.block_builder.emit, [*importer.retrieve_args(node), None, False][:3]
    axes, keepdim = _axes(x, node.kwargs.get("dim", dims)), bool(node.kwargs.get("keepdim", keepdim))
    is_set = x if _dtype(x) == "bool" else emit(relax.op.not_equal(x, relax.const(0, _dtype(x))))
    most = emit(relax.op.max(emit(relax.op.astype(is_set, "int8")), axes, keepdim))
    is_any = emit(relax.op.greater(most, relax.const(0, "int8")))  # of nothing, the maximum is negative
    return is_any if _result_dtype(node) == "bool" else emit(relax.op.astype(is_any, _result_dtype(node)))


def _exp2(node: Any, importer: Any) -> Any:
    (x,) = importer.retrieve_args(node)
    return importer.block_builder.emit(relax.op.power(relax.const(2, _dtype(x)), x))


def _max_pool(node: Any, importer: Any) -> Any:
    """Convert the values of a pooling; their places, which TVM does not compute, are refused."""
    if any(user.args[1] == 1 and user.users for user in node.users if len(user.args) > 1):
        raise LoweringError("max_pool2d: expected that only its values are used, got return_indices=True")
    return importer.create_convert_map()["max_pool2d_with_indices.default"](node)


def _sum_of(combine: Callable[[Any, Any], Any]) -> Converter:
    """Return a converter of ``x + alpha * y`` or its difference."""

    def convert(node: Any, importer: Any) -> Any:
        left, right = importer.retrieve_args(node)[:2]
        is_plain = isinstance(left, relax.Expr) and isinstance(right, relax.Expr)
        is_plain = is_plain and len(node.args) == 2 and node.kwargs.get("alpha", 1) == 1 and _dtype(left) != "bool"
        if not is_plain or not (_dtype(left) == _dtype(right) == _result_dtype(node)):
            left, right = _operands(node, importer)
            alpha = node.kwargs.get("alpha", importer.retrieve_args(node)[2] if len(node.args) > 2 else 1)
            right = _scaled(importer, right, alpha)
            if _dtype(left) == "bool":
                return importer.block_builder.emit(relax.op.logical_or(left, right))
        return importer.block_builder.emit(combine(left, right))

    return convert


def _quotient(name: str) -> Converter:
    """Return a converter of a quotient, which is a float, also of integers."""

    def convert(node: Any, importer: Any) -> Any:
        if any(isinstance(v, relax.Expr) and not is_float(v) for v in importer.retrieve_args(node)[:2]):
            return importer.block_builder.emit(relax.op.divide(*_operands(node, importer)))
        return importer.create_convert_map()[name](node)

    return convert


def _floor_divided(node: Any, importer: Any) -> Any:
    """Convert a quotient that is rounded down: of floats that of the exact remainder, where that is a number."""
    emit, (left, right) = importer.block_builder.emit, _operands(node, importer)
    if not is_float(left):
        return emit(relax.op.floor_divide(left, right))
    const = lambda value: relax.const(value, _dtype(left))  # noqa: E731
    rest, is_moved = _exact_remainder(emit, left, right)
    steps = emit(relax.op.divide(emit(relax.op.subtract(left, rest)), right))
    steps = emit(relax.op.where(is_moved, emit(relax.op.subtract(steps, const(1))), steps))
    whole = emit(relax.op.floor(steps))
    is_short = emit(relax.op.greater(emit(relax.op.subtract(steps, whole)), const(0.5)))
    whole = emit(relax.op.where(is_short, emit(relax.op.add(whole, const(1))), whole))
    is_zero = emit(relax.op.equal(right, const(0)))
    return emit(relax.op.where(is_zero, emit(relax.op.divide(left, right)), whole))


def _exact_remainder(emit: Callable[[Any], Any], left: Any, right: Any) -> tuple[Any, Any]:
    """Return the remainder with the sign of the dividend, and where one with the sign of the divisor is another."""
    is_half, dtype = _dtype(left) in HALVES, _dtype(left)
    wide = [emit(relax.op.astype(x, "float32")) if is_half else x for x in (left, right)]
    rest, zero = emit(relax.op.mod(*wide)), relax.const(0, _dtype(wide[0]))
    signs = [emit(relax.op.less(x, zero)) for x in (rest, wide[1])]
    is_moved = emit(relax.op.logical_and(emit(relax.op.not_equal(rest, zero)), emit(relax.op.logical_xor(*signs))))
    return emit(relax.op.astype(rest, dtype)) if is_half else rest, is_moved


def _remainder(node: Any, importer: Any) -> Any:
    """Convert a remainder with the sign of the divisor; of floats TVM's is rounded more than once."""
    emit, (left, right) = importer.block_builder.emit, _operands(node, importer)
    if not is_float(left):
        return emit(relax.op.floor_mod(left, right))
    rest, is_moved = _exact_remainder(emit, left, right)
    return emit(relax.op.where(is_moved, emit(relax.op.add(rest, right)), rest))


def _reciprocal(node: Any, importer: Any) -> Any:
    emit, (x,), dtype = importer.block_builder.emit, importer.retrieve_args(node), _result_dtype(node)
    return emit(relax.op.divide(relax.const(1, dtype), _cast(emit, x, dtype)))


def _power(node: Any, importer: Any) -> Any:
    """Convert a power; that by a half is a root to torch, which tells it from others for infinity and zero."""
    emit, (x, exponent), dtype = importer.block_builder.emit, importer.retrieve_args(node), _result_dtype(node)
    roots = {0.5: relax.op.sqrt, -0.5: relax.op.rsqrt}
    is_known = _dtype(x) == dtype
    x = _cast(emit, x, dtype)
    if exponent in roots and is_float(x) and dtype != "float16":  # of which torch computes the power
        return emit(roots[exponent](x))
    if is_known:
        return importer.create_convert_map()["pow.Tensor_Scalar"](node)
    if is_float(x):
        return emit(relax.op.power(x, relax.const(exponent, dtype)))
    wide = emit(relax.op.power(_cast(emit, x, "float64"), relax.const(float(exponent), "float64")))
    return _cast(emit, wide, dtype)


def _limited(node: Any, importer: Any) -> Any:
    """Convert a clamp between numbers or tensors, which is NaN where one of these is, in the result's dtype."""
    emit, dtype = importer.block_builder.emit, _result_dtype(node)
    x, *limits = importer.retrieve_args(node)
    names = ("max",) if "clamp_max" in str(node.target) else ("min", "max")
    bounds = {name: importer.env.get(limit, limit) for name, limit in node.kwargs.items()}
    bounds |= dict(zip(names, limits, strict=False))
    x = _cast(emit, x, dtype)
    for name, choose in (("min", relax.op.maximum), ("max", relax.op.minimum)):
        if bounds.get(name) is not None:
            x = _chosen(emit, choose, x, _cast(emit, bounds[name], dtype))
    return x


def _where(node: Any, importer: Any) -> Any:
    """Convert a choice, whose operands may have several dtypes."""
    condition, *operands = importer.retrieve_args(node)
    emit, dtype = importer.block_builder.emit, _result_dtype(node)
    return emit(relax.op.where(condition, *(_cast(emit, x, dtype) for x in operands)))


def _divided(node: Any, importer: Any) -> Any:
    """Convert a quotient that is rounded down or towards zero."""
    emit, (left, right) = importer.block_builder.emit, _operands(node, importer)
    if node.kwargs.get("rounding_mode") == "floor":
        return _floor_divided(node, importer)
    if node.kwargs.get("rounding_mode") is None or is_float(left):
        quotient = emit(relax.op.divide(left, right))
        return quotient if node.kwargs.get("rounding_mode") is None else emit(relax.op.trunc(quotient))
    rest = emit(relax.op.mod(left, right))  # with the sign of the dividend
    return emit(relax.op.floor_divide(emit(relax.op.subtract(left, rest)), right))


def _kept_nan(name: str) -> Converter:
    """Return a converter of limits that leave NaN as it is."""

    def convert(node: Any, importer: Any) -> Any:
        emit, x = importer.block_builder.emit, importer.retrieve_args(node)[0]
        if name.startswith("clamp") and _dtype(x) != _result_dtype(node):
            return _limited(node, importer)
        limited = importer.create_convert_map()[name](node)
        if not is_float(x) or not is_float(limited):
            return limited
        return emit(relax.op.where(_is_nan(emit, x), x, limited))

    return convert


def _is_nan(emit: Callable[[Any], Any], x: Any) -> Any:
    """Return where a tensor is NaN; TVM has no such function of bfloat16."""
    return emit(relax.op.isnan(emit(relax.op.astype(x, "float32")) if _dtype(x) == "bfloat16" else x))


def _larger(choose: Callable[[Any, Any], Any]) -> Converter:
    """Return a converter of the larger or smaller of two elements, NaN where one of them is."""

    def convert(node: Any, importer: Any) -> Any:
        return _chosen(importer.block_builder.emit, choose, *_operands(node, importer))

    return convert


def _chosen(emit: Callable[[Any], Any], choose: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if _dtype(left) == "bool":
        return emit((relax.op.logical_or if choose is relax.op.maximum else relax.op.logical_and)(left, right))
    chosen = emit(choose(left, right))
    if not is_float(left):
        return chosen
    chosen = emit(relax.op.where(_is_nan(emit, right), right, chosen))
    return emit(relax.op.where(_is_nan(emit, left), left, chosen))


def _elu(node: Any, importer: Any) -> Any:
    """Convert ``scale * x`` where x is positive, else ``scale * alpha * (exp(input_scale * x) - 1)``."""
    x, *factors = importer.retrieve_args(node)
    settings = {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0, **node.kwargs}
    settings |= dict(zip(("alpha", "scale", "input_scale"), factors, strict=False))
    emit = importer.block_builder.emit
    zero = relax.const(0, _dtype(x))
    below = emit(relax.op.minimum(_scaled(importer, x, settings["input_scale"]), zero))
    one = relax.const(1, _dtype(x))
    grown = _scaled(importer, emit(relax.op.subtract(emit(relax.op.exp(below)), one)), settings["alpha"])
    result = emit(relax.op.where(emit(relax.op.greater(x, zero)), x, grown))
    result = _scaled(importer, result, settings["scale"])
    return emit(relax.op.where(_is_nan(emit, x), x, result))


def _axes(x: Any, dims: Any) -> list[int]:
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    return sorted({dim % max(x.ty.ndim, 1) for dim in dims}) or list(range(x.ty.ndim))


def _extreme(reduce: Callable[..., Any]) -> Converter:
    """Return a converter of maxima or minima along dimensions, which are NaN where an element is."""

    def convert(node: Any, importer: Any) -> Any:
        x, dims, keepdim = [*importer.retrieve_args(node), (), False][:3]
        return _with_nan(
            importer, x, reduce, _axes(x, node.kwargs.get("dim", dims)), node.kwargs.get("keepdim", keepdim)
        )

    return convert


def _with_nan(importer: Any, x: Any, reduce: Callable[..., Any], axes: list[int], keepdim: bool) -> Any:
    emit = importer.block_builder.emit
    if _dtype(x) in WIDER:
        result = _with_nan(importer, emit(relax.op.astype(x, WIDER[_dtype(x)])), reduce, axes, keepdim)
        return emit(relax.op.astype(result, _dtype(x)))
    result = emit(reduce(x, axes, bool(keepdim)))
    if not is_float(x):
        return result
    is_nan = emit(relax.op.astype(emit(relax.op.isnan(x)), "int8"))
    has_nan = emit(relax.op.astype(emit(relax.op.max(is_nan, axes, bool(keepdim))), "bool"))
    return emit(relax.op.where(has_nan, relax.const(math.nan, _dtype(x)), result))


def _first_place(importer: Any, x: Any, reduce: Callable[..., Any], dim: int, keepdim: bool) -> Any:
    """Return the first place of a maximum or minimum along a dimension, of NaN where there is one."""
    emit = importer.block_builder.emit
    x = emit(relax.op.astype(x, WIDER[_dtype(x)])) if _dtype(x) in WIDER else x
    return emit(relax.op.argmax(ranks(emit, x, dim, reduce), dim, keepdim))


def _place(reduce: Callable[..., Any]) -> Converter:
    """Return a converter of the place of a maximum or minimum, of all elements or along a dimension."""

    def convert(node: Any, importer: Any) -> Any:
        x, dim, keepdim = [*importer.retrieve_args(node), None, False][:3]
        dim, keepdim = node.kwargs.get("dim", dim), bool(node.kwargs.get("keepdim", keepdim))
        emit, rank = importer.block_builder.emit, x.ty.ndim
        if dim is not None or rank == 1:
            return _first_place(importer, x, reduce, (dim or 0) % max(rank, 1), keepdim)
        place = _first_place(importer, emit(relax.op.reshape(x, [-1])), reduce, 0, False)
        return emit(relax.op.reshape(place, [1] * rank)) if keepdim else place

    return convert


def _extreme_and_place(reduce: Callable[..., Any]) -> Converter:
    """Return a converter of a maximum or minimum along a dimension, and of its place."""

    def convert(node: Any, importer: Any) -> Any:
        x, dim, keepdim = [*importer.retrieve_args(node), False][:3]
        dim, keepdim = dim % max(x.ty.ndim, 1), bool(node.kwargs.get("keepdim", keepdim))
        value = _with_nan(importer, x, reduce, [dim], keepdim)
        return relax.Tuple([value, _first_place(importer, x, reduce, dim, keepdim)])

    return convert


# ------------------------------------------------------------------ orders: NaN is the largest number


def _of_orders() -> dict[str, Converter]:
    return {
        **{f"sort.{kind}": _sort for kind in ("default", "stable")},
        **{f"argsort.{kind}": lambda node, importer: _sort(node, importer).fields[1] for kind in ("default", "stable")},
        "topk.default": _topk,
        "kthvalue.default": _kth_value,
        "median.dim": _median_along,
        "median.default": _median,
    }


def _sort_keys(importer: Any, x: Any) -> Any:
    """Return integers in the order of the elements, as torch has it: zeros are equal, and NaN is the largest.

    Comparisons with NaN are false, so that sorting by them leaves no order at all.
    """
    emit = importer.block_builder.emit
    x = emit(relax.op.grad.no_grad(x))
    if not is_float(x):
        return x if _dtype(x) in ("int32", "int64") else emit(relax.op.astype(x, "int64"))
    wide = emit(relax.op.astype(x, "float32")) if _dtype(x) in HALVES else x
    bits = 64 if _dtype(wide) == "float64" else 32
    const = lambda value: relax.const(value, f"int{bits}")  # noqa: E731
    most = const((1 << (bits - 1)) - 1)
    raw = emit(relax.op.memory.view(wide, None, f"int{bits}"))
    magnitude = emit(relax.op.bitwise_and(raw, most))
    flipped = emit(relax.op.bitwise_and(emit(relax.op.right_shift(raw, const(bits - 1))), most))
    key = emit(relax.op.bitwise_xor(raw, flipped))
    key = emit(relax.op.where(emit(relax.op.equal(magnitude, const(0))), const(0), key))
    is_nan = emit(relax.op.greater(magnitude, const(INFINITY_BITS[bits])))
    return emit(relax.op.where(is_nan, most, key))


def _option(node: Any, importer: Any, place: int, name: str, default: Any) -> Any:
    """Return an argument that is given by its place or its name."""
    arguments = importer.retrieve_args(node)
    return arguments[place] if len(arguments) > place else node.kwargs.get(name, default)


def _sort(node: Any, importer: Any) -> Any:
    """Convert a sort, or that of places."""
    x = importer.retrieve_args(node)[0]
    dim, descending = _option(node, importer, 1, "dim", -1), _option(node, importer, 2, "descending", False)
    return relax.Tuple(_sorted(importer, x, dim, bool(descending)))


def _sorted(importer: Any, x: Any, dim: int, descending: bool = False) -> tuple[Any, Any]:
    emit = importer.block_builder.emit
    if x.ty.ndim == 0:
        return x, emit(relax.op.zeros((), "int64"))
    places = emit(relax.op.argsort(_sort_keys(importer, x), dim, descending, dtype="int64"))
    return emit(relax.op.gather_elements(x, places, axis=dim % x.ty.ndim)), places


def _topk(node: Any, importer: Any) -> Any:
    """Convert the largest or smallest elements along a dimension, always in order."""
    emit, (x, count) = importer.block_builder.emit, importer.retrieve_args(node)[:2]
    dim, largest = _option(node, importer, 2, "dim", -1), _option(node, importer, 3, "largest", True)
    if x.ty.ndim == 0 or count == 0:  # which means all to TVM
        shape = [count if n == dim % x.ty.ndim else _size(x, n) for n in range(x.ty.ndim)]
        values = x if count else emit(relax.op.zeros(shape, _dtype(x)))
        return relax.Tuple([values, emit(relax.op.zeros(shape, "int64"))])
    keys = _sort_keys(importer, x)
    places = emit(relax.op.topk(keys, count, dim, "indices", bool(largest), "int64"))
    return relax.Tuple([emit(relax.op.gather_elements(x, places, axis=dim % x.ty.ndim)), places])


def _kth_value(node: Any, importer: Any) -> Any:
    x, count = importer.retrieve_args(node)[:2]
    dim, keepdim = _option(node, importer, 2, "dim", -1), bool(_option(node, importer, 3, "keepdim", False))
    return relax.Tuple(_ranked(importer, x, count - 1, dim, keepdim))


def _median_along(node: Any, importer: Any) -> Any:
    """Convert the lower median along a dimension: NaN, and the place of the first, where there is one."""
    x, dim = importer.retrieve_args(node)[:2]
    keepdim = bool(_option(node, importer, 2, "keepdim", False))
    return relax.Tuple(_median_of(importer, x, dim, keepdim))


def _median(node: Any, importer: Any) -> Any:
    (x,) = importer.retrieve_args(node)
    return _median_of(importer, importer.block_builder.emit(relax.op.reshape(x, [-1])), 0, False)[0]


def _median_of(importer: Any, x: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    emit, count = importer.block_builder.emit, _size(x, dim % max(x.ty.ndim, 1)) if x.ty.ndim else 1
    if not isinstance(count, int):
        raise LoweringError("median: expected a dimension of a fixed length, got one that may change")
    value, place = _ranked(importer, x, (count - 1) // 2, dim, keepdim)
    if not is_float(x) or x.ty.ndim == 0:
        return value, place
    dim %= x.ty.ndim
    is_nan = emit(relax.op.astype(_is_nan(emit, x), "int8"))
    has_nan = emit(relax.op.astype(emit(relax.op.max(is_nan, [dim], keepdim)), "bool"))
    value = emit(relax.op.where(has_nan, relax.const(math.nan, _dtype(x)), value))
    return value, emit(relax.op.where(has_nan, emit(relax.op.argmax(is_nan, dim, keepdim)), place))


def _ranked(importer: Any, x: Any, rank: int, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Return the element of a rank, from the smallest on, along a dimension, and its place."""
    emit, parts = importer.block_builder.emit, _sorted(importer, x, dim)
    if x.ty.ndim == 0:
        return parts
    dim %= x.ty.ndim
    value, place = (emit(relax.op.strided_slice(part, [dim], [rank], [rank + 1])) for part in parts)
    return (value, place) if keepdim else (emit(relax.op.squeeze(value, [dim])), emit(relax.op.squeeze(place, [dim])))


def _product_along(node: Any, importer: Any) -> Any:
    x, dim, keepdim = [*importer.retrieve_args(node), False][:3]
    emit, dtype = importer.block_builder.emit, _result_dtype(node)
    x = _cast(emit, x, dtype)
    return emit(relax.op.prod(x, [dim % max(x.ty.ndim, 1)], bool(keepdim)))


COMPARISONS = {
    "eq": relax.op.equal,
    "ne": relax.op.not_equal,
    "lt": relax.op.less,
    "le": relax.op.less_equal,
    "gt": relax.op.greater,
    "ge": relax.op.greater_equal,
}


def _compared(name: str) -> Converter:
    """Return a converter of comparisons in the common dtype of the operands; of booleans, LLVM has none."""
    compare = COMPARISONS[name.partition(".")[0]]

    def convert(node: Any, importer: Any) -> Any:
        torch, emit = importlib.import_module("torch"), importer.block_builder.emit
        examples = [getattr(value, "meta", {}).get("val", value) for value in node.args[:2]]
        dtype = str(torch.result_type(*examples)).removeprefix("torch.").replace("bool", "int8")

        return emit(compare(*(_cast(emit, value, dtype) for value in importer.retrieve_args(node)[:2])))

    return convert


def _shift(shift: Callable[[Any, Any], Any]) -> Converter:
    return lambda node, importer: importer.block_builder.emit(shift(*_operands(node, importer)))


def _trilinear(node: Any, importer: Any) -> Any:
    """Convert the product of three tensors with summed dimensions, of which torch makes bilinear layers."""
    *factors, first, second, third, summed = importer.retrieve_args(node)[:7]
    emit, product = importer.block_builder.emit, None
    for factor, expanded in zip(factors, (first, second, third), strict=True):
        for dim in sorted(expanded):
            factor = emit(relax.op.expand_dims(factor, dim))
        product = factor if product is None else emit(relax.op.multiply(product, factor))
    return emit(relax.op.sum(product, list(summed)))


def _cdist(node: Any, importer: Any) -> Any:
    """Convert distances between the rows of two matrices, also of batches."""
    left, right, power = importer.retrieve_args(node)[:3]
    emit = importer.block_builder.emit
    left, right = emit(relax.op.expand_dims(left, -2)), emit(relax.op.expand_dims(right, -3))
    apart = emit(relax.op.abs(emit(relax.op.subtract(left, right))))
    if power == 2:
        return emit(relax.op.sqrt(emit(relax.op.sum(emit(relax.op.multiply(apart, apart)), -1))))
    if power == 1:
        return emit(relax.op.sum(apart, -1))
    if power == math.inf:
        return emit(relax.op.max(apart, -1))
    if power == 0:
        other = emit(relax.op.not_equal(left, right))
        return emit(relax.op.sum(emit(relax.op.astype(other, _dtype(apart))), -1))
    total = emit(relax.op.sum(emit(relax.op.power(apart, relax.const(power, _dtype(apart)))), -1))
    return emit(relax.op.power(total, relax.const(1 / power, _dtype(apart))))


# ------------------------------------------------------------------ normalization, products and scatters


def _batch_norm(node: Any, importer: Any) -> Any:
    """Convert batch normalization with running averages: five results, the last two the updated averages."""
    x, gamma, beta, mean, variance, is_training, momentum, epsilon = importer.retrieve_args(node)
    gamma, beta = (_filled(x, n) if parameter is None else parameter for n, parameter in ((1, gamma), (0, beta)))
    options = {"epsilon": float(epsilon), "momentum": float(momentum), "training": bool(is_training)}
    emit = importer.block_builder.emit
    results = emit(relax.op.nn.batch_norm(x, gamma, beta, mean, variance, 1, **options))
    y, mean, variance = (emit(relax.TupleGetItem(results, n)) for n in range(3))
    return relax.Tuple([y, mean, variance, mean, variance])


def _batch_norm_alone(node: Any, importer: Any) -> Any:
    """Convert batch normalization without running averages: three results, of which the first is used."""
    x, gamma, beta, _is_training, _momentum, epsilon = importer.retrieve_args(node)
    emit, channels = importer.block_builder.emit, int(x.ty.shape.values[1])
    axes = [n for n in range(x.ty.ndim) if n != 1]
    y, mean, variance = standardised(emit, x, axes, float(epsilon))
    for combine, parameter in ((relax.op.multiply, gamma), (relax.op.add, beta)):
        if parameter is not None:
            y = emit(combine(y, emit(reshape(parameter, [1, channels, *[1] * (x.ty.ndim - 2)]))))
    return relax.Tuple([y, mean, variance])


def _filled(x: Any, value: float) -> Any:
    """Return a constant with the same value for each channel."""
    return relax.const(np.full(int(x.ty.shape.values[1]), value, str(x.ty.dtype.dtype)))


def _dropout(node: Any, importer: Any) -> Any:
    """Convert dropout: two results, of which the second is the mask."""
    x, rate, is_training = importer.retrieve_args(node)
    emit = importer.block_builder.emit
    return emit(relax.op.nn.dropout(x, float(rate)) if is_training else relax.Tuple([x, relax.op.ones_like(x)]))


def _own(name: str) -> Converter:
    def convert(node: Any, importer: Any) -> Any:
        if node.target.namespace != NAMESPACE:  # An operator of torch's own namespace may have the same name.
            return importer.create_convert_map()[f"{name}.default"](node)
        args = importer.retrieve_args(node)
        keywords = {key: importer.env.get(value, value) for key, value in node.kwargs.items()}
        return importer.block_builder.emit(getattr(calls, name)(*args, **keywords))

    return convert


def _matmul(importer: Any, left: Any, right: Any) -> Any:
    """Multiply in the dtype of the factors, where the importer assumes float32; halves are summed in float32."""
    emit, dtype = importer.block_builder.emit, _dtype(left)
    if dtype not in HALVES:
        return emit(relax.op.matmul(left, right))
    return emit(relax.op.astype(emit(relax.op.matmul(left, right, "float32")), dtype))


def _product(node: Any, importer: Any) -> Any:
    return _matmul(importer, *importer.retrieve_args(node))


def _addmm(node: Any, importer: Any) -> Any:
    """Convert ``beta * x + alpha * left @ right``."""
    x, left, right = importer.retrieve_args(node)
    total = _scaled(importer, _matmul(importer, left, right), node.kwargs.get("alpha", 1))
    beta = node.kwargs.get("beta", 1)
    return total if beta == 0 else importer.block_builder.emit(relax.op.add(total, _scaled(importer, x, beta)))


CONVOLUTIONS = {
    1: (relax.op.nn.conv1d, relax.op.nn.conv1d_transpose, "NCW", "OIW"),
    2: (relax.op.nn.conv2d, relax.op.nn.conv2d_transpose, "NCHW", "OIHW"),
    3: (relax.op.nn.conv3d, relax.op.nn.conv3d_transpose, "NCDHW", "OIDHW"),
}


def _convolution(node: Any, importer: Any) -> Any:
    """Convert a convolution in the dtype of its image, where TVM returns float32; halves are summed in float32."""
    name, emit = node.target.__name__, importer.block_builder.emit
    x, weight, *rest = importer.retrieve_args(node)
    dtype, dims = _dtype(x), x.ty.ndim - 2
    if dtype == "float32" or dims not in CONVOLUTIONS:
        return importer.create_convert_map()[name](node)
    usual: list[Any] = [None, 1, 0, 1, False, 0, 1] if name == "convolution.default" else [None, 1, 0, 1, 1]
    arguments = list(rest) + usual[len(rest) :]
    bias, steps, padding, gaps, *options = arguments
    is_transposed, beyond, groups = options if len(options) == 3 else (False, 0, options[0])
    wide = "float32" if dtype in HALVES else dtype
    plain, transposed, layout, kernel_layout = CONVOLUTIONS[dims]
    how: dict[str, Any] = {"strides": steps, "padding": padding, "dilation": gaps, "groups": groups}
    how |= {"data_layout": layout, "kernel_layout": kernel_layout, "out_dtype": wide}
    if is_transposed:
        how |= {"output_padding": beyond, "kernel_layout": f"IO{kernel_layout[2:]}"}
    y = emit((transposed if is_transposed else plain)(_cast(emit, x, wide), _cast(emit, weight, wide), **how))
    if bias is not None:
        y = emit(relax.op.add(y, emit(relax.op.reshape(_cast(emit, bias, wide), [1, -1, *([1] * dims)]))))
    return _cast(emit, y, dtype)


def _scatter(node: Any, importer: Any) -> Any:
    """Convert a scatter whose index is known only at run time."""
    base, dim, index, src, *options = importer.retrieve_args(node)
    if _is_empty(index):
        return base
    emit, reduce = importer.block_builder.emit, SCATTERED[options[0] if options else "sum"]
    src = _leading(emit, src, index.ty.shape.values)

    def scattered(into: Any, values: Any, reduction: str) -> Any:
        return emit(relax.op.scatter_elements(into, index, values, axis=dim, reduction=reduction))

    if reduce == "add" or (reduce != "mean" and node.kwargs.get("include_self", True)):
        return scattered(base, src, reduce)
    if node.kwargs.get("include_self", True):
        raise LoweringError("scatter_reduce with reduce='mean' is compiled with include_self=False only")
    dtype = _dtype(base)
    one, zero = (relax.const(n, dtype) for n in (1, 0))
    filled = lambda like, value: emit(relax.op.broadcast_to(relax.const(value, dtype), like.ty.shape))  # noqa: E731
    count = scattered(filled(base, 0), filled(src, 1), "add")
    is_empty = emit(relax.op.equal(count, zero))
    if reduce == "mean":
        reduced = emit(relax.op.divide(scattered(filled(base, 0), src, "add"), emit(relax.op.maximum(count, one))))
    else:
        least = {"max": -math.inf, "min": math.inf}.get(reduce, 1)
        reduced = scattered(filled(base, least), src, reduce)
    return emit(relax.op.where(is_empty, base, reduced))


def _leading(emit: Callable[[Any], Any], src: Any, sizes: Sequence[Any]) -> Any:
    """Slice the leading elements of each dimension, which are all that torch scatters by an index of these sizes."""
    axes = [n for n, size in enumerate(src.ty.shape.values) if not same_size(size, sizes[n])]
    ends = [sizes[n] for n in axes]
    return emit(relax.op.strided_slice(src, axes, [0] * len(axes), ends)) if axes else src


def _is_empty(index: Any) -> bool:
    """Return whether an index has no elements."""
    return any(isinstance(n, tirx.IntImm) and n.value == 0 for n in index.ty.shape.values)


def _put_where(node: Any, importer: Any) -> Any:
    """Convert an index_put by a mask: put one number, or add it, where the mask is true."""
    base, (mask,), number = importer.retrieve_args(node)[:3]
    emit, shape = importer.block_builder.emit, base.ty.shape
    mask = emit(reshape(mask, [*mask.ty.shape.values, *[1] * (base.ty.ndim - mask.ty.ndim)]))
    mask, number = emit(relax.op.broadcast_to(mask, shape)), emit(reshape(number, [1] * base.ty.ndim))
    number = emit(relax.op.broadcast_to(number, shape))
    if len(node.args) > 3 and node.args[3]:
        number = emit(relax.op.add(base, number))
    return emit(relax.op.where(mask, number, base))


def _index_put(node: Any, importer: Any) -> Any:
    """Convert an index_put by a mask, or by an index for some dimensions."""
    places = node.args[1]
    is_mask = len(places) == 1 and str(places[0].meta["val"].dtype) == "torch.bool"
    if is_mask and node.args[2].meta["val"].dim() == 0:
        return _put_where(node, importer)
    if is_mask:
        fault = "values of their own are put where a mask is true, whose number is not known when the model is compiled"
        raise LoweringError(f"{fault}: write torch.where(mask, values for all places, x)")
    base, index, values = importer.retrieve_args(node)[:3]
    if not all(_is_number(place) for place in index if place is not None):
        return importer.create_convert_map()["index_put.default"](node)
    return _put(importer, base, index, values, "add" if len(node.args) > 3 and node.args[3] else "update")


def _put(importer: Any, base: Any, places: Sequence[Any], values: Any, reduction: str) -> Any:
    """Put values at places, or add them: rows of a matrix that has a row for all combinations of places."""
    dims = [n for n, index in enumerate(places) if index is not None]
    if any(_is_empty(places[n]) for n in dims):
        return base
    emit, rank = importer.block_builder.emit, base.ty.ndim
    others = [n for n in range(rank) if n not in dims]
    places_by_dim = {n: _from_start(importer, places[n], _size(base, n)) for n in dims}
    flat, shape = _flat_places(importer, base, places_by_dim)
    inner = [_size(base, n) for n in others]
    first, order = dims[0], [*dims, *others]
    is_together = dims == list(range(first, first + len(dims)))
    # Values have the shape of what the same subscript would read: with the dimensions of places at the first, or ahead.
    wanted = [*inner[:first], *shape, *inner[first:]] if is_together else [*shape, *inner]
    values = emit(relax.op.broadcast_to(values, wanted))
    if is_together and first:
        count = len(shape)
        axes = [*range(first, first + count), *range(first), *range(first + count, len(wanted))]
        values = emit(relax.op.permute_dims(values, axes))
    rows, total = math.prod(_size(base, n) for n in dims), math.prod(shape)
    ahead = base if order == list(range(rank)) else emit(relax.op.permute_dims(base, order))
    matrix = emit(reshape(ahead, [rows, *inner]))
    to = emit(reshape(flat, [total, *[1] * len(inner)]))
    to = emit(relax.op.broadcast_to(to, [total, *inner]))
    values = emit(reshape(values, [total, *inner]))
    result = emit(relax.op.scatter_elements(matrix, to, values, 0, reduction))
    result = emit(reshape(result, [_size(base, n) for n in order]))
    return result if order == list(range(rank)) else emit(relax.op.permute_dims(result, list(np.argsort(order))))


def _scaled(importer: Any, value: Any, factor: Any) -> Any:
    if factor == 1:
        return value
    return importer.block_builder.emit(relax.op.multiply(value, relax.const(factor, _dtype(value))))


__all__ = ["converters"]
