# SPDX-License-Identifier: Apache-2.0
"""Gradients of the operators for ``relax.transform.Gradient``, which are calls of the operators themselves.

before::

    y = R.sparse.spmm(data, indptr, indices, x)

after, with the gradient ``y_adjoint`` of the result::

    data_adjoint = R.sparse.sddmm(R.ones((nnz,)), indptr, indices, y_adjoint, x)
    starts, rows, order = R.sparse.transpose(indptr, indices, n)
    x_adjoint = R.sparse.spmm(R.take(data, order), starts, rows, y_adjoint)

A constant structure and its values are transposed once, when the gradient is made: the format of the transposed
matrix is then chosen as for any constant matrix. Index arrays have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx
from tvm.relax.op.base import register_gradient

from sparsetir.errors import LoweringError
from sparsetir.relax import calls
from sparsetir.relax.arguments import Arguments
from sparsetir.relax.lowered import known, product
from sparsetir.relax.operators import (
    ATTENTION_OPERANDS,
    OPERATORS,
    PREFIX,
    REDUCTIONS,
    Operator,
    call,
    constant,
    reshape,
)
from sparsetir.relax.structure import check_constants, is_known, transposed

op = relax.op


@dataclass
class Backward:
    """A call in the backward pass, of which the gradient is computed.

    Parameters
    ----------
    a : Arguments
        Arguments of the call.
    y : Expr
        Result of the call.
    g : Expr
        Gradient of the result.
    builder : BlockBuilder
    """

    a: Arguments
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


def _transpose(_b: Backward) -> Gradients:
    return {}


def _refused(b: Backward) -> Gradients:
    raise LoweringError(
        f"R.sparse.{b.a.name} stands in a gradient and has no gradient itself: a gradient of a gradient is not defined "
        "for attention and for gather_matmul_scatter; keep its result out of what is differentiated"
    )


GRADIENTS: dict[str, Callable[[Backward], Gradients]] = {
    "spmm": _spmm,
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
    "transpose": _transpose,
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


__all__ = ["GRADIENTS", "register"]
