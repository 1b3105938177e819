# SPDX-License-Identifier: Apache-2.0
"""Products with constant 8-bit weights: recognition in quantized models, and their rewrite to sparse int8 products.

before::

    lv = R.dequantize(x, 0.02, 3)                            # uint8 to float32
    lv1 = R.matmul(lv, R.dequantize(weight, scales, 0))      # the weight of int8 is constant, most of it zero
    lv2 = R.add(lv1, bias)
    lv3 = R.quantize(lv2, 0.5, 120)

after::

    lv = R.sparse.spmm_int32(data, indptr, indices, R.permute_dims(x))
    lv1 = R.astype(R.subtract(lv, 3 * row_sums), "float32")  # from here on elementwise: the epilogue of the product
    ...
    lv6 = R.permute_dims(R.astype(R.clip(lv5, 0, 255), "uint8"))

Sums are exact, and zero points are folded into constants. Integer products (ONNX's ``MatMulInteger``) are the same
without scales. Units multiply rows of a dense operand that are interleaved, so that inputs are transposed; elementwise
operators that follow move in front of the transposition of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm
from tvm import ir, relax, sym, tirx

from sparsetir.interop.arrays import clipped_range, uint8_quantization
from sparsetir.ir.rewriting import substitute
from sparsetir.relax import dense
from sparsetir.relax.epilogues import is_elementwise, known, name_of, product
from sparsetir.relax.model import build
from sparsetir.relax.operators import EIGHT_BITS, constant, reshape
from sparsetir.relax.operators import call as sparse_call
from sparsetir.schedules import has_unit
from sparsetir.utils.caches import cached_property
from sparsetir.workloads.timing import Timer, timer_of

INT8, UINT8 = EIGHT_BITS
INT8_MAX = 127
QUANTIZE = "relax.quantize"
SHIFT = 128  # From int8 to uint8: units multiply unsigned by signed numbers.
WAY, DENSE_WAY = "sparse int8", "dense int8"
RTOL = 1e-4  # Of the norm of a result in float32, where sums are rounded.
ValueOf = Callable[[Any], Any]
Emit = Callable[[Any], Any]


@dataclass(frozen=True)
class QuantizedWeight:
    """A constant operand of a product: integers, and the factor of each of them, None for integer products."""

    integers: np.ndarray
    scales: np.ndarray | None

    def moved(self, change: Callable[[np.ndarray], np.ndarray]) -> QuantizedWeight:
        """Return the weight after a change of its shape."""
        return QuantizedWeight(change(self.integers), None if self.scales is None else change(self.scales))


def weight_of(expr: Any, value_of: ValueOf) -> QuantizedWeight | None:
    """Return the constant weight that an operand is, as int32 without its zero points; None if it is not known."""
    value = dense.resolved(expr, value_of)
    if name_of(value) == dense.TRANSPOSE:
        inner = weight_of(value.args[0], value_of)
        axes = None if value.attrs.axes is None else [int(axis) for axis in value.attrs.axes]
        return None if inner is None else inner.moved(lambda array: array.transpose(axes))
    if name_of(value) != dense.DEQUANTIZE:
        integers = dense.constant_of(expr, value_of)
        return None if integers is None or integers.dtype != np.int32 else QuantizedWeight(integers, None)
    parts: list[Any] = [dense.constant_of(arg, value_of) for arg in value.args]
    if any(part is None for part in parts) or parts[0].dtype not in (np.int8, np.uint8):
        return None
    integers, scales, zero = parts
    spread = partial(dense.spread, shape=integers.shape, axis=int(value.attrs.axis))
    return QuantizedWeight(integers.astype("int32") - spread(zero).astype("int32"), spread(scales.astype("float32")))


# ------------------------------------------------------------------ recognition


@dataclass(frozen=True)
class QuantizedInput:
    """The other operand of a product: a tensor of 8-bit integers with a zero point and, in float products, a scale."""

    x: Any
    zero: Any
    scale: Any = None
    shape: tuple[Any, ...] | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The expressions by the names of fields."""
        every = {"x": self.x, "zero": self.zero, "scale": self.scale}
        return {name: part for name, part in every.items() if part is not None}

    def tensor(self, x: Any) -> Any:
        """Return the tensor of integers in the shape that the product takes."""
        return x if self.shape is None else reshape(x, list(self.shape))


def _input_of(expr: Any, value_of: ValueOf) -> QuantizedInput | None:
    value = dense.resolved(expr, value_of)
    name = name_of(value)
    if name == "relax.reshape":
        inner, shape = _input_of(value.args[0], value_of), value.ty.shape
        if inner is None or not isinstance(shape, relax.ShapeExpr):
            return None
        return QuantizedInput(inner.x, inner.zero, inner.scale, tuple(shape.values))
    if name == dense.DEQUANTIZE:
        x, (scale, zero) = value.args[0], (_folded(arg, value_of) for arg in value.args[1:])
        is_single = all(_is_single(parameter) for parameter in (scale, zero))
        return QuantizedInput(x, zero, scale) if is_single and _is_eight_bit(x) else None
    if name == "relax.subtract":
        wide, zero = dense.resolved(value.args[0], value_of), _folded(value.args[1], value_of)
    else:
        wide, zero = value, constant(np.zeros((), "int32"))
    if name_of(wide) != "relax.astype" or str(wide.attrs.dtype) != "int32":
        return None
    return QuantizedInput(wide.args[0], zero) if _is_single(zero) and _is_eight_bit(wide.args[0]) else None


def _folded(expr: Any, value_of: ValueOf) -> Any:
    """Return a parameter of a quantization, as a constant where its value is known."""
    value = dense.constant_of(expr, value_of)
    return expr if value is None else constant(value)


def _is_single(expr: Any) -> bool:
    shape = getattr(expr.ty, "shape", None)
    return isinstance(shape, relax.ShapeExpr) and known(shape.values) and math.prod(map(int, shape.values)) == 1


def _is_eight_bit(x: Any) -> bool:
    is_tensor = isinstance(x.ty, relax.TensorType) and isinstance(x.ty.shape, relax.ShapeExpr)
    return is_tensor and str(x.ty.dtype.dtype) in EIGHT_BITS


@dataclass(frozen=True)
class ProductLayout:
    """The arrangement of an operand as columns, and of columns as the result.

    Parameters
    ----------
    columns : callable
        From the tensor of integers, the zero point and a function that emits to the dense operand.
    whole : callable
        From the product and a function that emits to the result.
    axis : int
        The dimension of the result that counts outputs, from the end.
    rows : int
        Columns, for which the product is timed.
    transposes : bool
        Whether both are transpositions, which cancel between two layers.
    is_flat : bool
        Whether the dense operand is one matrix, and not one for each image.
    """

    columns: Callable[[Any, int, Emit], Any]
    whole: Callable[[Any, Emit], Any]
    axis: int
    rows: int
    transposes: bool = False
    is_flat: bool = True


@dataclass(frozen=True)
class IntegerProduct:
    """A product with a constant 8-bit weight.

    Parameters
    ----------
    call : Call
    input : QuantizedInput
    weight : ndarray
        Of int8 or uint8: outputs and inputs, without zero points.
    scales : ndarray or None
        float32 for each output; None for a product in int32.
    layout : ProductLayout
    stored : ndarray
        The weight in the shape of the model, in int32.
    """

    call: Any
    input: QuantizedInput
    weight: np.ndarray
    scales: np.ndarray | None
    layout: ProductLayout
    stored: np.ndarray = field(repr=False)

    @property
    def operator(self) -> str:
        return "spmm_int32"

    @property
    def rows(self) -> int:
        return self.layout.rows

    @property
    def density(self) -> float:
        return np.count_nonzero(self.weight) / max(self.weight.size, 1)

    @cached_property
    def matrix(self) -> sp.csr_array:
        """The weight with index arrays of int32."""
        matrix = sp.csr_array(self.weight)
        matrix.indptr, matrix.indices = matrix.indptr.astype("int32"), matrix.indices.astype("int32")
        return matrix

    @cached_property
    def row_sums(self) -> np.ndarray:
        """The sum of each row of the weight, as a column."""
        return self.weight.sum(axis=1, dtype="int32")[:, None]

    def takes_dense(self, target: Any) -> bool:
        """Return whether a target has units for the dense product of integers."""
        return has_unit(target, INT8)

    def parts(self, way: str) -> tuple[np.ndarray, ...]:
        """Return the weight as a way stores it: the matrix itself, or values, row pointers and columns."""
        if way == DENSE_WAY:
            return (self.weight,)
        return self.matrix.data, self.matrix.indptr, self.matrix.indices

    def columns(self, x: Any, emit: Emit, inner: Any = None) -> tuple[Any, int]:
        """Return the dense operand in uint8, and the shift that was added; `inner` is the operand if it is known."""
        shift, operand = 0, inner
        if operand is None:
            zero = dense.constant_of(self.input.zero, lambda _: None)
            padding = 0 if zero is None else int(zero.item())
            tensor = x if self.input.shape is None else emit(self.input.tensor(x))
            operand = emit(self.layout.columns(tensor, padding, emit))
        if str(operand.ty.dtype.dtype) == INT8:
            wide = emit(relax.op.add(emit(relax.op.astype(operand, "int32")), relax.const(SHIFT, "int32")))
            operand, shift = emit(relax.op.astype(wide, UINT8)), SHIFT
        return operand, shift

    def multiply(self, parts: tuple[Any, ...], operand: Any, shift: int, emit: Emit) -> Any:
        """Return the product of a weight, as constants for its `parts`, and the dense operand.

        It is in int32 or with its scales.
        """
        if len(parts) == 1:
            sums = emit(relax.op.matmul(parts[0], operand, out_dtype="int32"))
        else:
            sums = emit(sparse_call("spmm_int32", *parts, operand))
        zero = dense.constant_of(self.input.zero, lambda _: None)
        if zero is not None:
            offset = (int(zero.item()) + shift) * self.row_sums
            sums = emit(relax.op.subtract(sums, constant(offset))) if offset.any() else sums
        else:
            start = emit(reshape(self.input.zero, []))
            wide = emit(relax.op.add(emit(relax.op.astype(start, "int32")), relax.const(shift, "int32")))
            sums = emit(relax.op.subtract(sums, emit(relax.op.multiply(constant(self.row_sums), wide))))
        if self.scales is None:
            return sums
        scale = dense.constant_of(self.input.scale, lambda _: None)
        column = self.scales[:, None]
        if scale is not None:
            factors: Any = constant(np.float32(scale.item()) * column)
        else:
            factors = emit(relax.op.multiply(constant(column), emit(reshape(self.input.scale, []))))
        return emit(relax.op.multiply(emit(relax.op.astype(sums, "float32")), factors))


def match_integer_product(call: Any, value_of: ValueOf, rows: int) -> IntegerProduct | None:
    """Return the product with a constant 8-bit weight that a call is; None for other calls.

    Parameters
    ----------
    call : Expr
    value_of : callable
        Returns the value that a variable is bound to.
    rows : int
        Assumed where the number of rows is not known.
    """
    name = name_of(call)
    if name not in (dense.MATMUL, "relax.nn.conv2d") or str(call.ty.dtype.dtype) not in ("int32", "float32"):
        return None
    for at in (1, 0) if name == dense.MATMUL else (1,):
        weight = weight_of(call.args[at], value_of)
        operand = None if weight is None else _input_of(call.args[1 - at], value_of)
        if weight is None or operand is None or (weight.scales is None) != (operand.scale is None):
            continue
        if name == "relax.nn.conv2d":
            return _convolution(call, weight, operand, rows)
        return _right(call, weight, operand, rows) if at == 1 else _left(call, weight, operand, rows)
    return None


def _right(call: ir.Call, weight: QuantizedWeight, operand: QuantizedInput, rows: int) -> IntegerProduct | None:
    """Match ``x @ W``."""
    shape = list(call.args[0].ty.shape.values)
    if weight.integers.ndim != 2 or len(shape) < 2:
        return None
    layout = _by_rows(shape, weight.integers.shape[1], rows)
    return _checked(call, weight.moved(np.transpose), operand, layout, weight.integers)


def _by_rows(shape: list[Any], outputs: int, rows: int) -> ProductLayout:
    """Return the layout of an input whose last dimension is multiplied."""
    *batch, n = shape
    count, is_flat = product(batch), len(batch) == 1

    def columns(x: Any, _padding: int, emit: Emit) -> Any:
        return relax.op.permute_dims(x if is_flat else emit(reshape(x, [count, n])))

    def whole(result: Any, emit: Emit) -> Any:
        by_rows = relax.op.permute_dims(result)
        return by_rows if is_flat else reshape(emit(by_rows), [*batch, outputs])

    return ProductLayout(columns, whole, -1, int(count) if known([count]) else rows, is_flat)


def _left(call: ir.Call, weight: QuantizedWeight, operand: QuantizedInput, rows: int) -> IntegerProduct | None:
    """Match ``W @ x``."""
    shape = call.args[1].ty.shape.values
    if weight.integers.ndim != 2 or len(shape) not in (2, 3):
        return None
    count = int(shape[-1]) if known(shape[-1:]) else rows
    layout = ProductLayout(lambda x, *_: x, lambda y, _: y, -2, count, is_flat=len(shape) == 2)
    return _checked(call, weight, operand, layout, weight.integers)


def _convolution(call: ir.Call, weight: QuantizedWeight, operand: QuantizedInput, rows: int) -> IntegerProduct | None:
    """Match a convolution with channels first: the product of the weight with the patches of an image."""
    attrs, shape = call.attrs, call.args[0].ty.shape.values
    is_plain = (str(attrs.data_layout), str(attrs.kernel_layout)) == ("NCHW", "OIHW")
    zero = dense.constant_of(operand.zero, lambda _: None)
    padding = [int(p) for p in attrs.padding]
    if not is_plain or weight.integers.ndim != 4 or not known(shape[1:]) or (zero is None and any(padding)):
        return None
    images, channels, groups = shape[0], int(shape[1]), int(attrs.groups)
    height, width = (int(size) for size in call.ty.shape.values[2:])
    patches = Patches(
        (channels, int(shape[2]), int(shape[3])),
        weight.integers.shape[2:],
        tuple(int(s) for s in attrs.strides),
        tuple(int(d) for d in attrs.dilation),
        tuple(padding),
        (height, width),
    )
    is_single = known([images]) and int(images) == 1

    def columns(x: Any, padding_value: int, emit: Emit) -> Any:
        sizes = [patches.size, height * width]
        return reshape(patches.of(x, padding_value, emit), sizes if is_single else [images, *sizes])

    whole = lambda y, _: reshape(y, list(call.ty.shape.values))  # noqa: E731
    layout = ProductLayout(columns, whole, -3, height * width, is_flat=is_single)
    integers = _flat_kernel(weight.integers, groups)
    scales = None
    if weight.scales is not None:
        # Zeros off the diagonal of groups have the scale of their output.
        own = weight.scales.reshape(len(integers), -1)
        if own.size and np.any(own != own[:, :1]):
            return None
        scales = np.broadcast_to(own[:, :1], integers.shape)
    return _checked(call, QuantizedWeight(integers, scales), operand, layout, weight.integers)


def _flat_kernel(kernel: np.ndarray, groups: int) -> np.ndarray:
    """Return the kernel of a convolution as a matrix of outputs and patches; groups are blocks of its diagonal."""
    outputs, inner, *window = kernel.shape
    height, area = outputs // groups, math.prod(window)
    matrix = np.zeros((outputs, area, inner * groups), kernel.dtype)
    flat = kernel.reshape(outputs, inner, area).transpose(0, 2, 1)
    for group in range(groups):
        own = slice(group * height, (group + 1) * height)
        matrix[own, :, group * inner : (group + 1) * inner] = flat[own]
    return matrix.reshape(outputs, -1)


@dataclass(frozen=True)
class Patches:
    """The patches of images that a convolution multiplies: those of one place of the window after another."""

    image: tuple[int, int, int]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    result: tuple[int, int]

    @property
    def size(self) -> int:
        return self.image[0] * math.prod(self.window)

    def of(self, x: Any, padding_value: int, emit: Emit) -> Any:
        """Return a tensor (images, window and channels, height, width), padded with the zero point."""
        top, left, bottom, right = self.padding
        if any(self.padding):
            widths = [0, 0, 0, 0, top, bottom, left, right]
            x = emit(relax.op.nn.pad(x, widths, pad_value=float(padding_value)))
        if self.window == (1,) * len(self.window) and self.strides == (1, 1):
            return x
        pieces = []
        for place in np.ndindex(*self.window):
            first = [p * d for p, d in zip(place, self.dilation, strict=True)]
            last = [f + s * (r - 1) + 1 for f, s, r in zip(first, self.strides, self.result, strict=True)]
            pieces.append(emit(relax.op.strided_slice(x, [2, 3], first, last, list(self.strides))))
        return pieces[0] if len(pieces) == 1 else emit(relax.op.concat(pieces, axis=1))


def _checked(
    call: ir.Call, weight: QuantizedWeight, operand: QuantizedInput, layout: ProductLayout, stored: np.ndarray
) -> IntegerProduct | None:
    """Return the product of a matrix; None unless it fits 8 bits, and scales differ by output only."""
    integers, scales = weight.integers, weight.scales
    low, high = (int(integers.min()), int(integers.max())) if integers.size else (0, 0)
    dtype = next((d for d in EIGHT_BITS if np.iinfo(d).min <= low and high <= np.iinfo(d).max), None)
    if dtype is None or (scales is not None and scales.size and np.any(scales != scales[:, :1])):
        return None
    factors = None if scales is None else np.ascontiguousarray(scales[:, 0] if scales.size else np.ones(len(scales)))
    return IntegerProduct(
        call, operand, np.ascontiguousarray(integers.astype(dtype)), factors, layout, np.ascontiguousarray(stored)
    )


# ------------------------------------------------------------------ quantization of products in float32


@dataclass
class Calibration:
    """The range of an input in examples, and a sample of its rows."""

    least: float = 0.0
    most: float = 0.0
    sample: np.ndarray | None = None

    def note(self, rows: np.ndarray, percentile: float) -> None:
        """Extend the range by that of rows, without the largest magnitudes beyond a percentile."""
        self.sample = rows if self.sample is None else self.sample
        if rows.size:
            least, most, _ = clipped_range(rows, percentile)
            self.least, self.most = min(self.least, least), max(self.most, most)

    @property
    def quantization(self) -> tuple[float, int]:
        """The scale and the zero point of uint8."""
        return uint8_quantization(self.least, self.most)


@dataclass(frozen=True)
class QuantizedRewrite:
    """The rewrite of a product in float32 to one of integers.

    Parameters
    ----------
    operator : {"linear", "spmm", "spmv"}
    weight : ndarray
        Outputs and inputs; its integers are symmetric, with a scale for each output.
    scale, zero : float, int
        Quantization of the input, in uint8.
    way : str
        Whether the product of integers is sparse or dense.
    """

    operator: str
    weight: np.ndarray
    scale: float
    zero: int
    way: str = WAY

    def product(self, x: Any) -> IntegerProduct:
        """Return the product for an input in float32."""
        largest = np.abs(self.weight).max(axis=1, initial=0)
        scales = np.where(largest > 0, largest / np.float32(INT8_MAX), np.float32(1)).astype("float32")
        integers = np.rint(self.weight / scales[:, None]).astype(INT8)
        operand = QuantizedInput(x, constant(np.asarray(self.zero, UINT8)), constant(np.asarray(self.scale, "float32")))
        layout = self._layout(list(x.ty.shape.values))
        return IntegerProduct(None, operand, integers, scales, layout, integers)

    def _layout(self, shape: list[Any]) -> ProductLayout:
        if self.operator != "spmm":
            return _by_rows(shape, len(self.weight), 1)
        if len(shape) < 4:
            return ProductLayout(lambda x, *_: x, lambda y, _: y, -2, 1, is_flat=len(shape) == 2)
        images, channels, height, width = shape
        flat, whole = [images, channels, height * width], [images, len(self.weight), height, width]
        return ProductLayout(lambda x, *_: reshape(x, flat), lambda y, _: reshape(y, whole), -3, 1, is_flat=False)

    def quantize(self, x: Any) -> Any:
        """Return the input as integers."""
        operand = self.product(x).input
        return relax.op.quantize(x, operand.scale, operand.zero, axis=0, out_dtype=UINT8)

    def __call__(self, x: Any) -> Any:
        emit, match = relax.BlockBuilder.current().emit, self.product(x)
        parts = tuple(map(constant, match.parts(self.way)))
        result = match.multiply(parts, *match.columns(emit(self.quantize(x)), emit), emit)
        return match.layout.whole(result, emit)


# ------------------------------------------------------------------ operators that follow


@dataclass(frozen=True)
class Pending:
    """A result whose transposition or change of shape may come after elementwise operators that follow."""

    inner: Any
    layout: ProductLayout


def moved(call: Any, before: Any, pending: Pending, emit: Emit) -> Any:
    """Return an elementwise call on a result as one on the product inside of it; None if it is none.

    Parameters
    ----------
    call : Call
        With arguments of the new function.
    before : Var
        The result.
    pending : Pending
    emit : callable
    """
    rank, axis = call.ty.ndim, pending.layout.axis
    if name_of(call) == QUANTIZE and call.args[0].same_as(before):
        is_own = int(call.attrs.axis) % rank == rank + axis
        scale, zero = (_column(arg, is_own, 1, -1) for arg in call.args[1:])
        return None if scale is None or zero is None else _quantized(pending.inner, scale, zero, call, emit)
    if not is_elementwise(call) or sum(arg.same_as(before) for arg in call.args) != 1:
        return None
    args = []
    for arg in call.args:
        if arg.same_as(before):
            args.append(pending.inner)
        elif not isinstance(arg.ty, relax.TensorType):
            args.append(arg)
        else:
            column = _column(arg, True, rank, axis)
            if column is None:
                return None
            args.append(constant(column))
    return emit(relax.Call(call.op, args, call.attrs))


def _column(arg: Any, is_own: bool, rank: int, axis: int) -> np.ndarray | None:
    """Return a constant operand that differs by output only as a column, or as a number."""
    if not isinstance(arg, ir.GenericConst):
        return None
    array = np.asarray(arg.value.numpy())
    if array.size == 1 and array.ndim <= rank:
        return array.reshape(())
    whole = [1] * (rank - array.ndim) + list(array.shape)
    if not is_own or array.ndim > rank or math.prod(whole) != whole[axis]:
        return None
    return array.reshape(-1, 1)


def _quantized(x: Any, scale: np.ndarray, zero: np.ndarray, call: ir.Call, emit: Emit) -> Any:
    """Emit a quantization as elementwise operators."""
    dtype = str(call.ty.dtype.dtype)
    if dtype not in EIGHT_BITS or str(x.ty.dtype.dtype) != "float32":
        return None
    y = emit(relax.op.round(emit(relax.op.divide(x, constant(scale.astype("float32"))))))
    y = emit(relax.op.add(y, constant(zero.astype("float32")))) if zero.any() else y
    limits = np.iinfo(dtype)
    return emit(relax.op.astype(emit(relax.op.clip(y, int(limits.min), int(limits.max))), dtype))


# ------------------------------------------------------------------ timing


def timers(match: IntegerProduct, target: Any, densest: float = 1.0) -> tuple[dict[str, Timer], dict[str, str]]:
    """Return timers of a product in float32 as it is and by integers, and reasons against those whose results differ.

    Products in int32 have no candidate in float32.
    """
    shape = [int(size) if known([size]) else match.rows for size in match.input.x.ty.shape.values]
    dtype = str(match.input.x.ty.dtype.dtype)
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    x = tvm.runtime.tensor(rng.integers(limits.min, limits.max + 1, shape).astype(dtype))
    fixed = _of_known_sizes(match, shape)

    def integers(way: str, x: Any, emit: Emit) -> Any:
        parts = tuple(map(constant, match.parts(way)))
        return emit(fixed.layout.whole(fixed.multiply(parts, *fixed.columns(x, emit), emit), emit))

    candidates = {} if match.scales is None else {"dense": partial(_as_it_is, fixed)}
    if match.density <= densest:
        candidates[WAY] = partial(integers, WAY)
    if match.takes_dense(target):
        candidates[DENSE_WAY] = partial(integers, DENSE_WAY)

    timed: dict[str, Timer] = {}
    refused: dict[str, str] = {}
    expected: np.ndarray | None = None
    for name, write in candidates.items():
        run = partial(relax.VirtualMachine(build(_module(write, shape, dtype), target=target), tvm.cpu())["main"], x)
        result = run().numpy()
        expected = result if expected is None else expected
        error = float(np.linalg.norm(result - expected)) / (float(np.linalg.norm(expected)) or 1.0)
        if error <= RTOL:
            timed[name] = timer_of(run)
        else:
            refused[name] = f"relative error {error:.1e}"
    return timed, refused


def _as_it_is(match: IntegerProduct, x: Any, emit: Emit) -> Any:
    """Emit a product in float32, with numbers in place of parameters that are known at run time."""
    operand = match.input
    tensor = x if operand.shape is None else emit(operand.tensor(x))
    left = emit(relax.op.dequantize(tensor, operand.scale, operand.zero, axis=0))
    return emit(with_constant(match, left))


def with_constant(match: IntegerProduct, operand: Any) -> Any:
    """Return a product in float32 with a constant in place of the weight and its scales."""
    weight = constant(match.stored.astype("float32") * _along_outputs(match))
    args = [weight, operand] if match.layout.axis == -2 else [operand, weight]
    return relax.Call(match.call.op, args, match.call.attrs)


def _along_outputs(match: IntegerProduct) -> np.ndarray:
    """Return the scales in a shape that broadcasts to the weight in the shape of the model."""
    return np.asarray(match.scales).reshape({-1: (1, -1), -2: (-1, 1), -3: (-1, 1, 1, 1)}[match.layout.axis])


def _of_known_sizes(match: IntegerProduct, shape: list[int]) -> IntegerProduct:
    """Return the product for an input of known sizes, and for parameters that are constants."""
    x = relax.Var("x", relax.TensorType(shape, str(match.input.x.ty.dtype.dtype)))
    sizes = {size: n for size, n in zip(match.input.x.ty.shape.values, shape, strict=True) if isinstance(size, ir.Var)}
    values = {size: tirx.const(n, "int64") for size, n in sizes.items()}
    bound = lambda size: sym.Analyzer().simplify(substitute(size, values)) if values else size  # noqa: E731
    operand = match.input
    whole = None if operand.shape is None else tuple(bound(size) for size in operand.shape)
    zero, scale = (
        part if part is None or isinstance(part, ir.GenericConst) else constant(np.ones((), str(part.ty.dtype.dtype)))
        for part in (operand.zero, operand.scale)
    )
    types = [relax.TensorType([bound(s) for s in arg.ty.shape.values], arg.ty.dtype) for arg in match.call.args]
    args = [relax.Var(f"operand{n}", type_) for n, type_ in enumerate(types)]
    call = relax.BlockBuilder().normalize(relax.Call(match.call.op, args, match.call.attrs))
    make = _convolution if name_of(call) != dense.MATMUL else _left if match.layout.axis == -2 else _right
    scales = None if match.scales is None else np.broadcast_to(_along_outputs(match), match.stored.shape)
    fixed = make(call, QuantizedWeight(match.stored, scales), QuantizedInput(x, zero, scale, whole), match.rows)
    assert fixed is not None  # Sizes do not decide.
    return fixed


def _module(write: Callable[[Any, Emit], Any], shape: list[int], dtype: str) -> ir.IRModule:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(write(x, builder.emit))
        builder.emit_func_output(out)
    return builder.get()


__all__ = [
    "DENSE_WAY",
    "WAY",
    "Calibration",
    "IntegerProduct",
    "Pending",
    "QuantizedRewrite",
    "match_integer_product",
    "moved",
    "timers",
    "with_constant",
]
