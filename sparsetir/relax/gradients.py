# SPDX-License-Identifier: Apache-2.0
"""Gradients of the sparse operators, and of dense ones for which TVM has none, for ``relax.transform.Gradient``.

before::

    y = R.sparse.spmm(data, indptr, indices, x)

after, with the gradient ``y_adjoint`` of the result::

    data_adjoint = R.sparse.sddmm(R.ones((nnz,)), indptr, indices, y_adjoint, x)
    starts, rows, order = R.sparse.transpose(indptr, indices, n)
    x_adjoint = R.sparse.spmm(R.take(data, order), starts, rows, y_adjoint)

A constant structure and its values are transposed once, when the gradient is made: the format of the transposed
matrix is then chosen as for any constant matrix. Index arrays have no gradients.

Some gradients of TVM are replaced, too. The gradient of ReLU here depends on the result only, so that the
argument is not stored and ReLU is fused into the kernel before it; at zero it is zero, as in torch. TVM's gradient of
``take`` writes to wrong positions where the axis is negative, and its gradient of ``concat`` fails for one part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, relax, tirx
from tvm.relax.op.base import register_gradient

from sparsetir.errors import LoweringError
from sparsetir.relax import calls
from sparsetir.relax.epilogues import known, product
from sparsetir.relax.operators import (
    ATTENTION_OPERANDS,
    OPERATORS,
    PREFIX,
    REDUCTIONS,
    Operator,
    OperatorArguments,
    call,
    constant,
    reshape,
)
from sparsetir.relax.structures import check_constants, is_known, transposed

op = relax.op


@dataclass
class Backward:
    """A call in the backward pass, of which the gradient is computed.

    Parameters
    ----------
    a : OperatorArguments
        Arguments of the call.
    y : Expr
        Result of the call.
    g : Expr
        Gradient of the result.
    builder : BlockBuilder
    """

    a: OperatorArguments
    y: Any
    g: Any
    builder: relax.BlockBuilder

    def __getitem__(self, name: str) -> Any:
        return self.a[name]

    def emit(self, value: Any) -> Any:
        """Bind an expression to a variable, and return it."""
        return self.builder.emit(value)

    @property
    def csr(self) -> tuple[Any, Any]:
        """Structure of the matrix."""
        return self["indptr"], self["indices"]

    def ones(self) -> Any:
        """Return a one for each entry of the matrix."""
        return op.ones(relax.ShapeExpr(self.a.shape("indices")), self.a.dtype("data"))

    def taken(self, values: Any, order: Any) -> Any:
        """Permute values of entries."""
        if is_known(values, order):
            return constant(values.value.numpy()[order.value.numpy()])
        # TVM warns of every other mode of `take` in each build.
        return self.emit(op.take(values, order, axis=0, mode="clip"))

    def transposed(self, indices: str = "indices", count: Any = None) -> tuple[Any, Any, Any]:
        """Return the structure by columns: column pointers, the rows of entries, and the permutation of the entries."""
        indptr, columns = self["indptr"], self[indices]
        count = self.a.columns() if count is None else count
        if is_known(indptr, columns) and known([count]):
            check_constants(self.a.name, indptr, {indices: (columns, int(count))}, None)
            structure = transposed(indptr.value.numpy(), columns.value.numpy(), int(count))
            return tuple(map(constant, structure))
        size = tirx.const(0, "int64") + count
        structure = self.emit(call("transpose", indptr, columns, size))
        return tuple(self.emit(relax.TupleGetItem(structure, n)) for n in range(3))

    def matrix_transposed(self, values: Any) -> tuple[Any, Any, Any]:
        """Return ``data, indptr, indices`` of the transposed matrix with these values."""
        starts, rows, order = self.transposed()
        return self.taken(values, order), starts, rows


Gradients = dict[str, Any]


def _flat(value: Any, last: Any) -> Any:
    """Reshape a tensor to rows of its last dimension."""
    *batch, _ = value.ty.shape.values
    return value if len(batch) == 1 else reshape(value, [product(batch), last])


def _spmm(b: Backward) -> Gradients:
    *batch, n, feat = b.a.shape("B")
    g, dense = b.g, b["B"]
    if batch:  # The rows of all products are concatenated along the features.
        side = lambda x, rows: reshape(op.permute_dims(x, [1, 0, 2]), [rows, product([*batch, feat])])  # noqa: E731
        g, dense = b.emit(side(g, b.g.ty.shape[1])), b.emit(side(dense, n))
    return {
        "data": calls.sddmm(b.ones(), *b.csr, g, dense),
        "B": calls.spmm(*b.matrix_transposed(b["data"]), b.g),
    }


def _spmv(b: Backward) -> Gradients:
    column = lambda x: b.emit(op.expand_dims(x, 1))  # noqa: E731
    return {
        "data": calls.sddmm(b.ones(), *b.csr, column(b.g), column(b["x"])),
        "x": calls.spmv(*b.matrix_transposed(b["data"]), b.g),
    }


def _linear(b: Backward) -> Gradients:
    m, n = b.a.rows(), b.a.shape("x")[-1]
    if b.a.values[0].ty.ndim == 1:
        rows, columns = (b.emit(op.expand_dims(x, 1)) for x in (b.g, b["x"]))
    else:
        rows, columns = (b.emit(op.permute_dims(_flat(x, last))) for x, last in ((b.g, m), (b["x"], n)))
    return {
        "data": calls.sddmm(b.ones(), *b.csr, rows, columns),
        "x": calls.linear(b.g, *b.matrix_transposed(b["data"])),
    }


def _sddmm(b: Backward) -> Gradients:
    weights = b.emit(op.multiply(b.g, b["data"]))
    return {
        "data": calls.sddmm(b.g, *b.csr, b["X"], b["Y"]),
        "X": calls.spmm(weights, *b.csr, b["Y"]),
        "Y": calls.spmm(*b.matrix_transposed(weights), b["X"]),
    }


def _softmax(b: Backward) -> Gradients:
    weighted = b.emit(op.multiply(b.y, b.g))
    total = b.emit(calls.segment_reduce(weighted, b["indptr"]))
    return {"data": op.subtract(weighted, op.multiply(b.y, _expanded(b, total, "data")))}


def _expanded(b: Backward, values: Any, like: str = "x") -> Any:
    """Repeat values of rows for each entry of the row."""
    return b.emit(calls.segment_expand(values, b["indptr"], b.a.shape(like)[0]))


def _segment_sum(b: Backward) -> Gradients:
    return {"x": _expanded(b, b.g)}


def _segment_mean(b: Backward) -> Gradients:
    one = relax.ShapeExpr(b.a.shape("x")[:1])
    counts = b.emit(calls.segment_reduce(b.emit(op.ones(one, "float32")), b["indptr"]))
    counts = b.emit(op.astype(op.maximum(counts, relax.const(1.0, "float32")), b.a.dtype("x")))
    counts = counts if b.g.ty.ndim == 1 else b.emit(op.expand_dims(counts, 1))
    return {"x": _expanded(b, b.emit(op.divide(b.g, counts)))}


def _segment_extreme(b: Backward) -> Gradients:
    """Share the gradient evenly among the entries equal to the extreme; NaN equals none, which makes NaN gradients."""
    dtype = b.a.dtype("x")
    is_taken = b.emit(op.astype(op.equal(b["x"], _expanded(b, b.y)), dtype))
    count = b.emit(calls.segment_reduce(is_taken, b["indptr"]))
    return {"x": op.multiply(is_taken, _expanded(b, b.emit(op.divide(b.g, count))))}


def _gather_matmul_scatter(b: Backward) -> Gradients:
    starts, rows, order = b.transposed()
    kinds = b.taken(b["kinds"], order)
    weights = b.emit(op.permute_dims(b["W"], [0, 2, 1]))
    kind_starts, kind_rows, kind_order = b.transposed("kinds", b.a.shape("W")[0])
    columns = b.taken(b["indices"], kind_order)
    return {
        "X": calls.gather_matmul_scatter(b.g, weights, starts, rows, kinds),
        "W": calls.gather_outer(b["X"], b.g, kind_starts, columns, kind_rows),
    }


def _attention(b: Backward) -> Gradients:
    scale, structure = b.a.number("scale"), b.csr
    wide = "float64" if b.a.dtype("Q") == "float64" else "float32"
    lse = b.emit(call("attention_lse", b["Q"], b["K"], *structure, scale))
    delta = b.emit(op.sum(op.multiply(op.astype(b.g, wide), op.astype(b.y, wide)), axis=-1))
    operands = (b["Q"], b["K"], b["V"], b.g, lse, delta)
    starts, rows, _ = b.transposed()
    gradients = {
        operand: call(
            f"attention_backward_{operand}", *operands, *(structure if operand == "query" else (starts, rows)), scale
        )
        for operand in ATTENTION_OPERANDS
    }
    return {ATTENTION_OPERANDS[operand]: gradient for operand, gradient in gradients.items()}


def _segment_expand(b: Backward) -> Gradients:
    return {"x": calls.segment_reduce(b.g, b["indptr"])}


def _dropout(b: Backward) -> Gradients:
    return {"x": call("dropout", b.g, b["count"], b.a.number("rate"), b["seed"])}


def _of_integers(_b: Backward) -> Gradients:
    return {}


def _refused(b: Backward) -> Gradients:
    raise LoweringError(
        f"R.sparse.{b.a.name} stands in a gradient and has no gradient itself: a gradient of a gradient is not defined "
        "for attention and for gather_matmul_scatter; keep its result out of what is differentiated"
    )


GRADIENTS: dict[str, Callable[[Backward], Gradients]] = {
    "spmm": _spmm,
    "spmm_bf16x3": _spmm,  # in float32
    "spmm_int32": _of_integers,
    "spmv": _spmv,
    "linear": _linear,
    "sddmm": _sddmm,
    "softmax": _softmax,
    **{f"segment_{kind}": _segment_extreme for kind in REDUCTIONS},
    "segment_sum": _segment_sum,
    "segment_mean": _segment_mean,
    "gather_matmul_scatter": _gather_matmul_scatter,
    "attention": _attention,
    "segment_expand": _segment_expand,
    "transpose": _of_integers,
    "dropout": _dropout,
    "gather_outer": _refused,
    "attention_lse": _refused,
    **{f"attention_backward_{operand}": _refused for operand in ATTENTION_OPERANDS},
}


def register() -> None:
    """Register the gradients of the operators with TVM."""
    for name, operator in OPERATORS.items():
        register_gradient(PREFIX + name, _primal(operator, GRADIENTS[name]))


def _primal(operator: Operator, make: Callable[[Backward], Gradients]) -> Callable[..., list[Any]]:
    def gradient(y: Any, forward: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
        arguments = operator.arguments(forward)
        gradients = make(Backward(arguments, y, g, builder))
        return [
            gradients[n] if n in gradients else op.grad.no_grad(v)
            for n, v in zip(operator.names, forward.args, strict=True)
        ]

    return gradient


# ------------------------------------------------------------------------ gradients of dense operators


Gradient = Callable[[Any, ir.Call, Any, relax.BlockBuilder], list[Any]]
ABOVE_TVM = 11  # TVM registers its own gradients with level 10.

SQRT_HALF, ROOT_2_OVER_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)
CUBE = 0.044715  # Coefficient of the tanh approximation of GELU.
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _dtype(x: Any) -> str:
    return str(x.ty.dtype.dtype)


def _number(value: float, like: Any) -> Any:
    return relax.const(value, _dtype(like))


def _shape(x: Any, name: str) -> list[Any]:
    shape = x.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        raise LoweringError(f"the gradient of R.{name} needs the shape of its argument; annotate it")
    return list(shape.values)


# ------------------------------------------------------------------ element by element


def _gelu(x: Any, _y: Any, _attrs: Any) -> Any:
    """Return the derivative ``Phi(x) + x * phi(x)``, where Phi and phi are those of the normal distribution."""
    below = _number(0.5, x) * (_number(1.0, x) + op.erf(x * _number(SQRT_HALF, x)))
    return below + x * op.exp(_number(-0.5, x) * x * x) * _number(1 / math.sqrt(2 * math.pi), x)


def _gelu_tanh(x: Any, _y: Any, _attrs: Any) -> Any:
    half, one = _number(0.5, x), _number(1.0, x)
    t = op.tanh(_number(ROOT_2_OVER_PI, x) * (x + _number(CUBE, x) * x * x * x))
    slope = _number(ROOT_2_OVER_PI, x) * (one + _number(3 * CUBE, x) * x * x)
    return half * (one + t) + half * x * (one - t * t) * slope


def _leaky_relu(x: Any, _y: Any, attrs: Any) -> Any:
    return op.where(op.greater(x, _number(0.0, x)), _number(1.0, x), _number(float(attrs.alpha), x))


def _selu(x: Any, _y: Any, _attrs: Any) -> Any:
    below = _number(SELU_ALPHA * SELU_SCALE, x) * op.exp(op.minimum(x, _number(0.0, x)))
    return op.where(op.greater(x, _number(0.0, x)), _number(SELU_SCALE, x), below)


def _softplus(x: Any, _y: Any, attrs: Any) -> Any:
    scaled = x * _number(float(attrs.beta), x)
    return op.where(op.greater(scaled, _number(float(attrs.threshold), x)), _number(1.0, x), op.sigmoid(scaled))


def _clip(x: Any, y: Any, _attrs: Any) -> Any:
    return op.astype(op.equal(x, y), _dtype(x))


# Derivatives of elementwise operators, as functions of the argument x, the result y and the attributes.
SLOPES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "nn.gelu": _gelu,
    "nn.gelu_tanh": _gelu_tanh,
    "nn.leakyrelu": _leaky_relu,
    "nn.selu": _selu,
    "nn.softplus": _softplus,
    "clip": _clip,
    "erf": lambda x, _y, _attrs: op.exp(op.negative(x * x)) * _number(2 / math.sqrt(math.pi), x),
    "rsqrt": lambda x, y, _attrs: _number(-0.5, x) * y * y * y,
    "square": lambda x, _y, _attrs: _number(2.0, x) * x,
    "sinh": lambda x, _y, _attrs: op.cosh(x),
    "cosh": lambda x, _y, _attrs: op.sinh(x),
    "tan": lambda x, y, _attrs: _number(1.0, x) + y * y,
    "atan": lambda x, _y, _attrs: _number(1.0, x) / (_number(1.0, x) + x * x),
}


def _elementwise(slope: Callable[[Any, Any, Any], Any]) -> Gradient:
    def gradient(y: Any, call: ir.Call, g: Any, _builder: Any) -> list[Any]:
        gradients = [g * slope(call.args[0], y, call.attrs)]
        return gradients + [op.grad.no_grad(arg) for arg in call.args[1:]]

    return gradient


def _relu(y: Any, _call: ir.Call, g: Any, _builder: Any) -> list[Any]:
    zero = _number(0.0, y)
    return [op.where(op.greater(y, zero), g, zero)]


# ------------------------------------------------------------------ shapes and reductions


def _reshaped(_y: Any, call: ir.Call, g: Any, _builder: Any) -> list[Any]:
    return [reshape(g, call.args[0].ty.shape)]


def _stack(_y: Any, call: ir.Call, g: Any, _builder: Any) -> list[Any]:
    parts, axis = call.args[0].fields, int(call.attrs.axis or 0)
    parts_of_g = op.split(g, len(parts), axis=axis)
    if len(parts) == 1:
        return [relax.Tuple([op.squeeze(g, axis)])]
    return [relax.Tuple([op.squeeze(relax.TupleGetItem(parts_of_g, n), axis) for n in range(len(parts))])]


def _concat(_y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Split the gradient into the parts, of which some may be empty."""
    parts = list(call.args[0].fields)
    axis = int(call.attrs.axis or 0) % parts[0].ty.ndim
    if len(parts) == 1:
        return [relax.Tuple([g])]
    ends = np.cumsum([int(_shape(part, "concat")[axis]) for part in parts]).tolist()
    full = [n for n, first in enumerate([0, *ends[:-1]]) if ends[n] > first]
    if len(full) < 2:
        return [relax.Tuple([g if n in full else op.zeros_like(part) for n, part in enumerate(parts)])]
    pieces = builder.emit(op.split(g, [ends[n] for n in full[:-1]], axis=axis))
    cut = {n: relax.TupleGetItem(pieces, k) for k, n in enumerate(full)}
    return [relax.Tuple([cut[n] if n in cut else op.zeros_like(part) for n, part in enumerate(parts)])]


def _tile(_y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Sum the gradients of the copies."""
    x = call.args[0]
    shape, repeats = _shape(x, "tile"), [int(n) for n in call.attrs.repeats]
    rank = max(len(shape), len(repeats))
    whole = [*[1] * (rank - len(shape)), *shape]
    repeats = [*[1] * (rank - len(repeats)), *repeats]
    copies = reshape(g, [size for pair in zip(repeats, whole, strict=True) for size in pair])
    return [reshape(builder.emit(op.sum(builder.emit(copies), list(range(0, 2 * rank, 2)))), shape)]


def _extreme(y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Share the gradient evenly among equal maxima, or minima, as ``torch.amax`` does."""
    x, rank = call.args[0], call.args[0].ty.ndim
    axes = list(range(rank)) if call.attrs.axis is None else [int(a) % rank for a in call.attrs.axis]
    if not call.attrs.keepdims:
        y, g = (builder.emit(_with_ones(part, x, axes)) for part in (y, g))
    is_taken = builder.emit(op.astype(op.equal(x, y), _dtype(x)))
    return [is_taken * (g / op.sum(is_taken, axes, keepdims=True))]


def _with_ones(reduced: Any, x: Any, axes: Sequence[int]) -> Any:
    """Reshape a result so that the reduced dimensions of x have extent one."""
    shape = [1 if n in axes else size for n, size in enumerate(_shape(x, "max"))]
    return reshape(reduced, shape)


# ------------------------------------------------------------------ selections


def _take(_y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Sum gradients by index: a reduction of segments, if rows are selected by a constant index."""
    x, indices = call.args[:2]
    shape, places = _shape(x, "take"), _shape(indices, "take")
    axis = int(call.attrs.axis or 0) % len(shape)
    no_gradient, count = op.grad.no_grad(indices), math.prod(places)
    if isinstance(indices, ir.GenericConst) and axis == 0 and len(shape) > 1 and count > 1:
        at = indices.value.numpy().reshape(-1) % int(shape[0])
        order, counts = np.argsort(at, kind="stable"), np.bincount(at, minlength=int(shape[0]))
        indptr = relax.const(np.append(0, np.cumsum(counts)).astype("int64"))
        rows = builder.emit(reshape(g, [count, math.prod(shape[1:])]))
        if (order[1:] < order[:-1]).any():
            rows = builder.emit(op.take(rows, relax.const(order.astype("int64")), 0, mode="clip"))
        return [reshape(builder.emit(calls.segment_reduce(rows, indptr, "sum")), shape), no_gradient]
    g = builder.emit(reshape(g, [*shape[:axis], count, *shape[axis + 1 :]]))
    return [op.grad.take_backward(g, x, builder.emit(reshape(indices, [count])), axis), no_gradient]


def _strided_slice(_y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Return the gradient at the selected positions, and zeros elsewhere."""
    x, *parts = call.args
    try:
        bounds = [[int(n) for n in part] for part in parts]
    except TypeError:
        raise LoweringError("the gradient of R.strided_slice needs bounds that are numbers") from None
    axes, begins, ends, *steps = bounds
    shape = _shape(x, "strided_slice")
    for n, axis in enumerate(axes):
        size = shape[axis % len(shape)]
        places = np.arange(int(size))[slice(begins[n], ends[n], steps[0][n] if steps else 1)]
        g = _spread(g, axis % len(shape), places, int(size), builder)
    return [g, *(op.grad.no_grad(part) for part in parts)]


def _spread(g: Any, axis: int, places: Any, size: int, builder: relax.BlockBuilder) -> Any:
    """Put the slices of a tensor at given positions along an axis of a larger one, and zeros elsewhere."""
    shape = list(g.ty.shape.values)
    zeros = lambda count: op.zeros([*shape[:axis], count, *shape[axis + 1 :]], _dtype(g))  # noqa: E731
    if len(places) == 0:
        return builder.emit(zeros(size))
    first, last = int(places[0]), int(places[-1])
    if len(places) != last - first + 1:
        back = np.full(size, len(places))
        back[places] = np.arange(len(places))
        whole = builder.emit(op.concat([g, zeros(1)], axis))
        return builder.emit(op.take(whole, relax.const(back.astype("int64")), axis, mode="clip"))
    around = [zeros(first) if first else None, g, zeros(size - 1 - last) if last < size - 1 else None]
    nonempty = [part for part in around if part is not None]
    return builder.emit(op.concat(nonempty, axis)) if len(nonempty) > 1 else g


def _flip(_y: Any, call: ir.Call, g: Any, _builder: Any) -> list[Any]:
    return [op.flip(g, call.attrs.axis)]


def _topk(y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Scatter the gradients of the values to their positions; indices have no gradient."""
    x, attrs, kind = call.args[0], call.attrs, str(call.attrs.ret_type)
    if kind == "indices":
        return [op.zeros_like(x)]
    if kind == "values":
        selection = op.topk(x, int(attrs.k), int(attrs.axis), "indices", bool(attrs.largest), "int64")
        indices, values = builder.emit(selection), g
    else:
        indices, values = (builder.emit(relax.TupleGetItem(part, n)) for n, part in ((1, y), (0, g)))
    return [op.scatter_elements(op.zeros_like(x), indices, values, int(attrs.axis) % x.ty.ndim, "add")]


def _scatter_elements(_y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Return the gradients of the base and the updates; overwritten elements of the base have none."""
    x, indices, updates = call.args
    reduction, axis = str(call.attrs.reduction), int(call.attrs.axis) % x.ty.ndim
    if reduction not in ("add", "update"):
        raise LoweringError(
            f"R.scatter_elements with reduction={reduction} has no gradient: add, or use a sparse reduction"
        )
    base_gradient = g
    if reduction == "update":
        base_gradient = op.scatter_elements(g, indices, builder.emit(op.zeros_like(updates)), axis, "update")
    return [base_gradient, op.grad.no_grad(indices), op.gather_elements(g, indices, axis)]


def _gather_elements(_y: Any, call: ir.Call, g: Any, _builder: Any) -> list[Any]:
    x, indices = call.args
    into = op.scatter_elements(op.zeros_like(x), indices, g, int(call.attrs.axis) % x.ty.ndim, "add")
    return [into, op.grad.no_grad(indices)]


# ------------------------------------------------------------------ norms and dropout


def _norm_gradients(
    x: Any, g: Any, call: ir.Call, shape: list[Any], axes: list[int], kept: Sequence[int], builder: Any, center: bool
) -> list[Any]:
    """Return the gradients of ``weight * (x - mean) / deviation + bias``, or of the form without mean and bias.

    Means are those over `axes`, weights lie along the axes `kept`.
    """
    weight, attrs = call.args[1], call.attrs
    used = [bool(attrs.scale), bool(attrs.center)] if center else [True]
    remaining = [n for n in range(len(shape)) if n not in kept]
    centred = builder.emit(x - op.mean(x, axes, keepdims=True)) if center else x
    power = op.mean(centred * centred, axes, keepdims=True) + _number(float(attrs.epsilon), x)
    scale = builder.emit(_number(1.0, x) / op.sqrt(power))
    unit = builder.emit(centred * scale)
    along = reshape(weight, [1 if n in remaining else size for n, size in enumerate(shape)])
    weighted = builder.emit(g * along) if used[0] else g
    tilt = unit * op.mean(weighted * unit, axes, keepdims=True)
    level = weighted - op.mean(weighted, axes, keepdims=True) if center else weighted
    summed = lambda value: reshape(op.sum(value, remaining) if remaining else value, weight.ty.shape)  # noqa: E731
    sums = [summed(g * unit), summed(g)][: len(used)]
    gradients = [new if is_used else op.zeros_like(weight) for new, is_used in zip(sums, used, strict=True)]
    return [scale * (level - tilt), *gradients]


def _norm(name: str, center: bool) -> Gradient:
    """Return the gradient of a normalization over some axes."""

    def gradient(_y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
        shape = _shape(call.args[0], name)
        axes = [int(a) % len(shape) for a in call.attrs.axes]
        return _norm_gradients(call.args[0], g, call, shape, axes, axes, builder, center)

    return gradient


def _group_norm(_y: Any, call: ir.Call, g: Any, builder: relax.BlockBuilder) -> list[Any]:
    """Return the gradients of a normalization over the channels of each group and other axes."""
    x, attrs = call.args[0], call.attrs
    shape, groups = _shape(x, "nn.group_norm"), int(attrs.num_groups)
    at = int(attrs.channel_axis) % len(shape)
    split = [*shape[:at], groups, shape[at] // groups, *shape[at + 1 :]]
    axes = [at + 1, *(n + (n > at) for n in (int(a) % len(shape) for a in attrs.axes))]
    x, g = (builder.emit(reshape(value, split)) for value in (x, g))
    of_x, *gradients = _norm_gradients(x, g, call, split, axes, (at, at + 1), builder, True)
    return [reshape(of_x, shape), *gradients]


def _dropout_of_dense(y: Any, _call: ir.Call, g: Any, _builder: Any) -> list[Any]:
    """Multiply the gradient by the mask, which is the second result of the operator."""
    return [relax.TupleGetItem(g, 0) * relax.TupleGetItem(y, 1)]


DENSE_GRADIENTS: dict[str, Gradient] = {
    **{name: _elementwise(slope) for name, slope in SLOPES.items()},
    "nn.relu": _relu,
    "squeeze": _reshaped,
    "flatten": _reshaped,
    "nn.batch_flatten": _reshaped,
    "stack": _stack,
    "concat": _concat,
    "tile": _tile,
    "take": _take,
    "strided_slice": _strided_slice,
    "flip": _flip,
    "topk": _topk,
    "scatter_elements": _scatter_elements,
    "gather_elements": _gather_elements,
    "max": _extreme,
    "min": _extreme,
    "nn.layer_norm": _norm("nn.layer_norm", True),
    "nn.group_norm": _group_norm,
    "nn.rms_norm": _norm("nn.rms_norm", False),
    "nn.dropout": _dropout_of_dense,
    "grad.no_grad": lambda _y, call, _g, _builder: [op.grad.no_grad(call.args[0])],
}


def register_dense() -> None:
    """Register the gradients with TVM."""
    for name, gradient in DENSE_GRADIENTS.items():
        register_gradient(f"relax.{name}", gradient, ABOVE_TVM)


__all__ = ["DENSE_GRADIENTS", "GRADIENTS", "register", "register_dense"]
