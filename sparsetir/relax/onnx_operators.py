# SPDX-License-Identifier: Apache-2.0
"""ONNX's operators that TVM's importer lacks, such as ``QLinearMatMul``, or converts to others, such as ``Clip``.

Results of the quantized ones are those of ONNX's reference evaluator: sums in int32, the product with the quotient of
the scales in float64, and rounding of halves to the even neighbour after the zero point is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax.frontend.onnx import onnx_frontend

from sparsetir.errors import LoweringError
from sparsetir.relax.epilogues import known
from sparsetir.relax.operators import constant, is_float, ranks, reshape
from sparsetir.utils.caches import ForkLock

SCALE_ERROR = 1e-6  # relative, of the product of a size and a scale in float32

_lock = ForkLock()


def _folded(make: Any, *args: Any) -> Any:
    """Apply a function of numpy arrays to constants, and of expressions to others."""
    by_numpy, by_relax = make
    if all(isinstance(arg, ir.GenericConst) for arg in args):
        return constant(np.asarray(by_numpy(*(arg.value.numpy() for arg in args))))
    return by_relax(*args)


def _wide(x: Any, dtype: str) -> Any:
    return _folded((lambda a: a.astype(dtype), lambda e: relax.op.astype(e, dtype)), x)


def _without_zero(bb: Any, x: Any, zero: Any, shape: Any) -> Any:
    """Return a tensor in int32 without its zero point, whose elements lie along one dimension where it has several."""
    x = bb.normalize(_wide(x, "int32"))
    if zero is None:
        return x
    zero = _shaped(bb, _wide(zero, "int32"), shape)
    return bb.normalize(_folded((np.subtract, relax.op.subtract), x, zero))


def _shaped(bb: Any, parameter: Any, shape: Any) -> Any:
    """Return a parameter of one number as a scalar, and one of several in a shape."""
    parameter = bb.normalize(parameter)
    sizes = [int(size) for size in parameter.ty.shape.values]
    if len(sizes) > 1:
        return parameter
    target = [] if all(size == 1 for size in sizes) else shape
    return bb.normalize(_folded((lambda a: a.reshape(target), lambda e: reshape(e, target)), parameter))


def _scale(bb: Any, left: Any, right: Any, result: Any) -> Any:
    """Return the quotient of scales, computed in their dtype, in float64."""
    both = bb.normalize(_folded((np.multiply, relax.op.multiply), left, right))
    return bb.normalize(_wide(bb.normalize(_folded((np.divide, relax.op.divide), both, result)), "float64"))


def _quantized(bb: Any, sums: Any, scale: Any, zero: Any) -> Any:
    """Return sums in int32 times a scale, in the dtype of a zero point."""
    dtype = str(zero.ty.dtype.dtype)
    limits = np.iinfo(dtype)
    y = bb.emit(relax.op.multiply(bb.emit(relax.op.astype(sums, "float64")), scale))
    y = bb.emit(relax.op.round(bb.emit(relax.op.add(y, _shaped(bb, _wide(zero, "float64"), [-1])))))
    return relax.op.astype(bb.emit(relax.op.clip(y, int(limits.min), int(limits.max))), dtype)


def _values(inputs: Any, count: int) -> list[Any]:
    return [inputs[n] if n < len(inputs) else None for n in range(count)]


class QLinearMatMul(onnx_frontend.OnnxOpConverter):
    """A product of two quantized matrices, quantized again."""

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, _attr: Any, _params: Any) -> Any:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = _values(inputs, 8)
        left, right = _without_zero(bb, a, a_zero, [-1, 1]), _without_zero(bb, b, b_zero, [1, -1])
        sums = bb.emit(relax.op.matmul(left, right, out_dtype="int32"))
        scales = _shaped(bb, a_scale, [-1, 1]), _shaped(bb, b_scale, [-1]), _shaped(bb, y_scale, [-1])
        return _quantized(bb, sums, _scale(bb, *scales), y_zero)


class ConvInteger(onnx_frontend.OnnxOpConverter):
    """A convolution of quantized images in int32."""

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        x, w, x_zero, w_zero = _values(inputs, 4)
        return _convolved(bb, (x, x_zero), (w, w_zero), None, attr, params)


class QLinearConv(onnx_frontend.OnnxOpConverter):
    """A convolution of quantized images, quantized again."""

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = _values(inputs, 9)
        sums = bb.emit(_convolved(bb, (x, x_zero), (w, w_zero), bias, attr, params))
        along = [1, -1, *[1] * (int(w.ty.ndim) - 2)]
        scale = _scale(bb, _shaped(bb, x_scale, [-1]), _shaped(bb, w_scale, along), _shaped(bb, y_scale, [-1]))
        return _quantized(bb, sums, scale, y_zero)


def _convolved(bb: Any, image: Any, kernel: Any, bias: Any, attr: Any, params: Any) -> Any:
    (x, x_zero), (w, w_zero) = image, kernel
    left = _without_zero(bb, x, x_zero, [-1])
    right = _without_zero(bb, w, w_zero, [-1, *[1] * (int(w.ty.ndim) - 1)])
    attr = _with_padding(attr, list(left.ty.shape.values)[2:], [int(size) for size in w.ty.shape.values[2:]])
    return onnx_frontend.Conv._impl_v11(bb, [left, right, bias], attr, params)


def _with_padding(attr: Any, sizes: list[Any], window: list[int]) -> Any:
    """Return attributes with the padding as numbers where sizes are known; the importer would pad in a function."""
    kind = attr.get("auto_pad", b"NOTSET").decode()
    if not kind.startswith("SAME") or not known(sizes):
        return attr
    ones = [1] * len(window)
    steps = zip(map(int, sizes), window, attr.get("strides", ones), attr.get("dilations", ones), strict=True)
    total = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in steps]
    less, more = [t // 2 for t in total], [t - t // 2 for t in total]
    pads = less + more if kind == "SAME_UPPER" else more + less
    return {**{name: value for name, value in attr.items() if name != "auto_pad"}, "pads": pads}


class Clip(onnx_frontend.Clip):
    """Limits that leave NaN as it is."""

    @classmethod
    def _kept(cls, bb: Any, x: Any, limited: Any) -> Any:
        if not is_float(x):
            return limited
        return relax.op.where(bb.normalize(relax.op.isnan(x)), x, bb.normalize(limited))

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        return cls._kept(bb, inputs[0], super()._impl_v1(bb, inputs, attr, params))

    @classmethod
    def _impl_v13(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        return cls._kept(bb, inputs[0], super()._impl_v13(bb, inputs, attr, params))


def _ranked(bb: Any, x: Any, axis: int, extreme: Any) -> Any:
    """Return `ranks` of a tensor; of booleans, those of integers."""
    x = bb.normalize(relax.op.astype(x, "int8")) if str(x.ty.dtype.dtype) == "bool" else x
    return ranks(bb.normalize, x, axis, extreme)


class ArgMax(onnx_frontend.ArgMax):
    """The place of the first or last maximum, of NaN where there is one."""

    extreme = staticmethod(relax.op.max)

    @classmethod
    def _impl_v1(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        rank = _ranked(bb, inputs[0], int(attr.get("axis", 0)), cls.extreme)
        return super()._impl_v12(bb, [rank], attr, params)

    _impl_v11 = _impl_v12 = _impl_v1


class ArgMin(ArgMax):
    """The place of the first or last minimum, of NaN where there is one."""

    extreme = staticmethod(relax.op.min)


def _nan_where(bb: Any, is_nan: Any, result: Any) -> Any:
    """Return a result with NaN where a mask says so."""
    result = bb.normalize(result)
    return relax.op.where(bb.normalize(is_nan), relax.const(math.nan, str(result.ty.dtype.dtype)), result)


def _extreme_of_all(reduction: Any) -> Any:
    """Return a converter of maxima or minima along axes that are NaN where an element is."""

    def converter(version: str) -> Any:
        def convert(_cls: Any, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
            x = inputs[0]
            result = getattr(reduction, version)(bb, inputs, attr, params)
            if not is_float(x) or result is x:
                return result
            is_nan = bb.normalize(relax.op.astype(bb.normalize(relax.op.isnan(x)), "int8"))
            most = getattr(onnx_frontend.ReduceMax, version)(bb, [is_nan, *inputs[1:]], attr, params)
            return _nan_where(bb, relax.op.greater(bb.normalize(most), relax.const(0, "int8")), result)

        return classmethod(convert)

    versions = [name for name in vars(reduction) if name.startswith("_impl_v")]
    return type(reduction.__name__, (reduction,), {version: converter(version) for version in versions})


def _extreme_of_several(operator: Any) -> Any:
    """Return a converter of maxima or minima of several tensors that are NaN where one of them is."""

    def convert(_cls: Any, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        result = operator._impl_v1(bb, inputs, attr, params)
        if isinstance(result, ir.GenericConst) or not is_float(inputs[0]):
            return result
        either = lambda one, other: bb.normalize(relax.op.logical_or(one, other))  # noqa: E731
        return _nan_where(bb, reduce(either, [bb.normalize(relax.op.isnan(x)) for x in inputs]), result)

    return type(operator.__name__, (operator,), {"_impl_v1": classmethod(convert)})


def _along_no_axes(reduction: Any, each: Any) -> Any:
    """Return a converter of a reduction that is a function of each element where it reduces along no axes."""

    def convert(_cls: Any, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        result = reduction._impl_v18(bb, inputs, attr, params)
        return each(inputs[0]) if result is inputs[0] else result

    return type(reduction.__name__, (reduction,), {"_impl_v18": classmethod(convert)})


class OneHot(onnx_frontend.OneHot):
    """One-hot rows in the dtype of their values."""

    @classmethod
    def _impl_v11(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        dtype = str(inputs[2].ty.dtype.dtype)
        return relax.op.astype(bb.normalize(super()._impl_v11(bb, inputs, attr, params)), dtype)


def _refused(operator: str, fault: str) -> LoweringError:
    return LoweringError(f"model: {operator} {fault}, which TVM does not compute. Take that node out of the model.")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _with_every_version(operator: Any, make: Any) -> Any:
    """Return a converter whose versions are `make` of its original ones, which take the same arguments."""
    names = [name for name in dir(operator) if name.startswith("_impl_v")]
    versions = {name: staticmethod(make(getattr(operator, name))) for name in names}
    return type(operator.__name__, (operator,), versions)


def _padded(original: Any) -> Any:
    """Return a converter of pools whose padding is known: that of ``auto_pad`` with steps within the window."""

    def convert(bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        window = attr.get("kernel_shape")
        attr = _with_padding(attr, list(inputs[0].ty.shape)[2:], [int(size) for size in window])
        if _text(attr.get("auto_pad", "NOTSET")) == "VALID":
            attr = {**attr, "auto_pad": b"NOTSET", "pads": [0] * 2 * len(window), "ceil_mode": 0}
        return original(bb, inputs, attr, params)

    return convert


def _unless(operator: Any, fault_of: Callable[[Any, Any, Any], str | None]) -> Any:
    """Return a converter that refuses a node if its inputs, attributes and parameters have a fault."""

    def make(original: Any) -> Any:
        def convert(bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
            fault = fault_of(inputs, attr, params)
            if fault is not None:
                raise _refused(operator.__name__, fault)
            return original(bb, inputs, attr, params)

        return convert

    return _with_every_version(operator, make)


def _fault_of_powers(_inputs: Any, attr: Any, _params: Any) -> str | None:
    """Find pools of powers with windows beyond the end, which TVM does not sum."""
    is_beyond = attr.get("ceil_mode", 0) and _text(attr.get("auto_pad", "NOTSET")) != "VALID"
    return "has ceil_mode=1" if is_beyond else None


def _of_output_shape(original: Any) -> Any:
    """Return a converter of transposed convolutions whose padding follows from the shape of the result."""

    def convert(bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        sizes = list(inputs[0].ty.shape)[2:]
        kind, asked = _text(attr.get("auto_pad", "NOTSET")), attr.get("output_shape")
        if asked is None and not kind.startswith("SAME"):
            return original(bb, inputs, attr, params)
        if not known(sizes):
            raise _refused("ConvTranspose", "has output_shape or auto_pad for an image of open sizes")
        ones = [1] * len(sizes)
        strides, dilations = attr.get("strides", ones), attr.get("dilations", ones)
        window = [int(size) for size in list(inputs[1].ty.shape)[2:]]
        beyond = list(attr.get("output_padding", [0] * len(sizes)))
        targets = asked[-len(sizes) :] if asked else [int(n) * s for n, s in zip(sizes, strides, strict=True)]
        pads = []
        for d, (n, k, target) in enumerate(zip(sizes, window, targets, strict=True)):
            total = strides[d] * (int(n) - 1) + beyond[d] + (k - 1) * dilations[d] + 1 - target
            beyond[d] += max(-total, 0)
            half, total = max(total, 0) // 2, max(total, 0)
            pads.append((half, total - half) if kind == "SAME_UPPER" else (total - half, half))
        if any(more >= step for more, step in zip(beyond, strides, strict=True)):
            raise _refused("ConvTranspose", f"has output_shape {list(targets)}, beyond what its windows reach")
        left = {n: v for n, v in attr.items() if n not in ("auto_pad", "output_shape")}
        flat = [before for before, _ in pads] + [after for _, after in pads]
        return original(bb, inputs, {**left, "pads": flat, "output_padding": beyond}, params)

    return convert


def _fault_of_resize(inputs: Any, attr: Any, params: Any) -> str | None:
    """Return why TVM resizes in another way than ONNX, if it does."""
    for name, usual in (("antialias", 0), ("exclude_outside", 0), ("keep_aspect_ratio_policy", "stretch")):
        if _text(attr.get(name, usual)) != str(usual):
            return f"has {name}={_text(attr[name])}"
    scales = onnx_frontend.get_constant(inputs[2], params) if len(inputs) > 2 and inputs[2] is not None else None
    if not isinstance(scales, ir.GenericConst) or not scales.value.numpy().size:
        return None
    sizes = list(inputs[0].ty.shape)
    if not known(sizes):
        return "scales an image of open sizes"
    scaled = [float(scale) * int(n) for scale, n in zip(scales.value.numpy(), sizes, strict=True)]
    is_whole = all(abs(n - round(n)) <= SCALE_ERROR * max(n, 1) for n in scaled)
    return None if is_whole else "scales an image to a size that is no whole number"


class IsInf(onnx_frontend.OnnxOpConverter):
    """Which elements are infinities of the signs that are asked for."""

    @classmethod
    def _impl_v10(cls, bb: Any, inputs: Any, attr: Any, _params: Any) -> Any:
        (x, *_), comparisons = inputs, []
        for name, limit in (("detect_negative", -math.inf), ("detect_positive", math.inf)):
            if attr.get(name, 1):
                comparisons.append(bb.normalize(relax.op.equal(x, relax.const(limit, str(x.ty.dtype.dtype)))))
        if len(comparisons) == 2:
            return relax.op.logical_or(*comparisons)
        return comparisons[0] if comparisons else relax.op.isinf(bb.normalize(relax.op.zeros_like(x)))


class InferenceDropout(onnx_frontend.OnnxOpConverter):
    """The tensor as it is, and a mask that keeps all of it."""

    @classmethod
    def _impl_v7(cls, bb: Any, inputs: Any, _attr: Any, params: Any) -> Any:
        training = onnx_frontend.get_constant(inputs[2], params) if len(inputs) > 2 and inputs[2] is not None else None
        if training is not None and not (isinstance(training, ir.GenericConst) and not training.value.numpy().any()):
            raise _refused("Dropout", "is in training mode")
        x = inputs[0]
        return relax.Tuple([x, bb.normalize(relax.op.full_like(x, relax.const(True, "bool"), "bool"))])

    _impl_v1 = _impl_v6 = _impl_v10 = _impl_v12 = _impl_v13 = _impl_v22 = _impl_v7


class LayerNormalization(onnx_frontend.LayerNormalization):
    """A normalized tensor, the means and the inverse deviations."""

    @classmethod
    def _impl_v17(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        result = super()._impl_v17(bb, inputs, dict(attr), params)
        if attr.get("tvm_custom", {}).get("num_outputs", 1) == 1:
            return result
        x, rank = inputs[0], int(inputs[0].ty.ndim)
        x = x if str(x.ty.dtype.dtype) == "float64" else bb.normalize(relax.op.astype(x, "float32"))
        axes = list(range(attr.get("axis", -1) % rank, rank))
        mean = bb.normalize(relax.op.mean(x, axes, keepdims=True))
        spread = bb.normalize(relax.op.variance(x, axes, keepdims=True))
        lifted = relax.op.add(spread, relax.const(attr.get("epsilon", 1e-05), str(x.ty.dtype.dtype)))
        return relax.Tuple([result.fields[0], mean, bb.normalize(relax.op.rsqrt(bb.normalize(lifted)))])


class Expand(onnx_frontend.Expand):
    """A tensor that is broadcast together with a shape."""

    @classmethod
    def _impl_v13(cls, bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        x, shape = inputs[0], inputs[1]
        if isinstance(shape, (relax.ShapeExpr, ir.GenericConst)):
            return super()._impl_v13(bb, inputs, attr, params)
        own = list(x.ty.shape)
        missing = int(shape.ty.shape.values[0]) - len(own)
        ones = [1] * abs(missing)
        if missing < 0:
            shape = bb.normalize(relax.op.concat([constant(np.array(ones, "int64")), shape], axis=0))
        extents = relax.ShapeExpr([*(ones if missing > 0 else []), *own])
        here = bb.normalize(relax.op.shape_to_tensor(bb.normalize(extents)))
        is_one = bb.normalize(relax.op.equal(shape, relax.const(1, "int64")))
        return super()._impl_v13(bb, [x, bb.normalize(relax.op.where(is_one, here, shape))], attr, params)


def _of_small_shifts(original: Any) -> Any:
    """Return a converter of shifts whose results are 0 where all bits are shifted out."""

    def convert(bb: Any, inputs: Any, attr: Any, params: Any) -> Any:
        x, shift = inputs[:2]
        dtype = str(x.ty.dtype.dtype)
        number = lambda value: relax.const(value, dtype)  # noqa: E731
        is_out = bb.normalize(relax.op.greater_equal(shift, number(np.iinfo(dtype).bits)))
        within = bb.normalize(relax.op.where(is_out, number(0), shift))
        shifted = bb.normalize(original(bb, [x, within, *inputs[2:]], attr, params))
        return relax.op.where(is_out, number(0), shifted)

    return convert


def _fault_of_alignment(_inputs: Any, attr: Any, _params: Any) -> str | None:
    mode = _text(attr.get("mode", "avg"))
    return None if mode == "avg" else f"has mode={mode}"


def _fault_of_ranking(inputs: Any, _attr: Any, _params: Any) -> str | None:
    return "orders uint64" if str(inputs[0].ty.dtype.dtype) == "uint64" else None


class Celu(onnx_frontend.OnnxOpConverter):
    """``max(0, x) + min(0, alpha * (exp(x / alpha) - 1))``."""

    @classmethod
    def _impl_v12(cls, bb: Any, inputs: Any, attr: Any, _params: Any) -> Any:
        x, alpha = inputs[0], float(attr.get("alpha", 1.0))
        number = lambda value: relax.const(value, str(x.ty.dtype.dtype))  # noqa: E731
        below = bb.normalize(relax.op.minimum(bb.normalize(relax.op.divide(x, number(alpha))), number(0)))
        grown = bb.normalize(relax.op.subtract(bb.normalize(relax.op.exp(below)), number(1)))
        grown = bb.normalize(relax.op.multiply(grown, number(alpha)))
        return relax.op.where(bb.normalize(relax.op.greater(x, number(0))), x, grown)


LACKING = {"QLinearMatMul": QLinearMatMul, "QLinearConv": QLinearConv, "ConvInteger": ConvInteger, "Celu": Celu}
CORRECTED = {
    "Clip": Clip,
    "ArgMax": ArgMax,
    "ArgMin": ArgMin,
    "OneHot": OneHot,
    **{f"Reduce{name}": _extreme_of_all(getattr(onnx_frontend, f"Reduce{name}")) for name in ("Max", "Min")},
    **{name: _extreme_of_several(getattr(onnx_frontend, name)) for name in ("Max", "Min")},
    "ReduceSumSquare": _along_no_axes(onnx_frontend.ReduceSumSquare, lambda x: relax.op.multiply(x, x)),
    "ReduceL1": _along_no_axes(onnx_frontend.ReduceL1, relax.op.abs),
    "ReduceL2": _along_no_axes(onnx_frontend.ReduceL2, relax.op.abs),
    "ReduceLogSum": _along_no_axes(onnx_frontend.ReduceLogSum, relax.op.log),
    "MaxPool": _with_every_version(onnx_frontend.MaxPool, _padded),
    "AveragePool": _with_every_version(onnx_frontend.AveragePool, _padded),
    "LpPool": _unless(_with_every_version(onnx_frontend.LpPool, _padded), _fault_of_powers),
    "ConvTranspose": _with_every_version(onnx_frontend.ConvTranspose, _of_output_shape),
    "Resize": _unless(onnx_frontend.Resize, _fault_of_resize),
    "RoiAlign": _unless(onnx_frontend.RoiAlign, _fault_of_alignment),
    "TopK": _unless(onnx_frontend.TopK, _fault_of_ranking),
    "BitShift": _with_every_version(onnx_frontend.BitShift, _of_small_shifts),
    "IsInf": IsInf,
    "Dropout": InferenceDropout,
    "LayerNormalization": LayerNormalization,
    "Expand": Expand,
}


@contextmanager
def more_converters() -> Iterator[None]:
    """Let TVM's importer know the operators of this module."""
    with _lock:
        original = onnx_frontend._get_convert_map
        onnx_frontend._get_convert_map = lambda: {**LACKING, **original(), **CORRECTED}
        try:
            yield
        finally:
            onnx_frontend._get_convert_map = original


__all__ = ["more_converters"]
