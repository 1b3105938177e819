# SPDX-License-Identifier: Apache-2.0
"""The Relax operators: names, type inference, and validation of the arguments of a call.

A matrix is given as its CSR arrays: ``data`` of nnz values, ``indptr`` of m + 1 and ``indices`` of nnz integers. In a
script the length of `indptr` is a size of its own (``R.Tensor(("p",), "int32")``): m is then ``p - 1``, which Relax can
compute, while it cannot solve ``m + 1`` for m. The arrays may be constants, whose format is chosen when the model is
built, or inputs of any size.

Calls print as ``R.sparse.spmm(...)`` and parse back once ``sparsetir.relax`` is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import tvm.relax.script
import tvm.relax.script.parser
from tvm import ir, relax, sym, tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError, OffsetError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import is_sparse
from sparsetir.interop.sources import array_of_numbers
from sparsetir.runtime.signature import numpy_dtype
from sparsetir.utils.arguments import VALUE_DTYPES, as_dtype, as_real, dtype_name, is_integer
from sparsetir.utils.arguments import shown as shown_value

PREFIX = "relax.sparse."
REDUCTIONS = ("sum", "mean", "max", "min")


def _spmm(a: OperatorArguments) -> relax.TensorType:
    m = a.matrix()
    a.check("B", (2, 3), FLOATS)
    a.same_dtype("data", "B")
    *batch, _n, feat = a.shape("B")
    return relax.TensorType([*batch, m, feat], a.dtype("B"))


def _spmm_bf16x3(a: OperatorArguments) -> relax.TensorType:
    a.check("B", (2,), ("float32",))
    return _spmm(a)


def _spmm_int32(a: OperatorArguments) -> relax.TensorType:
    a.check("B", (2, 3), EIGHT_BITS)
    m = a.matrix(dtypes=EIGHT_BITS)
    *batch, _n, feat = a.shape("B")
    return relax.TensorType([*batch, m, feat], "int32")


def _spmv(a: OperatorArguments) -> relax.TensorType:
    m = a.matrix()
    a.check("x", (1,), FLOATS)
    a.same_dtype("data", "x")
    return relax.TensorType([m], a.dtype("x"))


def _linear(a: OperatorArguments) -> relax.TensorType:
    m = a.matrix()
    a.check("x", (1, 2, 3, 4, 5, 6), FLOATS)
    a.same_dtype("data", "x")
    return relax.TensorType([*a.shape("x")[:-1], m], a.dtype("x"))


def _sddmm(a: OperatorArguments) -> relax.TensorType:
    a.matrix()
    for name in ("X", "Y"):
        a.check(name, (2,), FLOATS)
    a.same_dtype("data", "X", "Y")
    a.agree("X", 1, "Y", 1)
    m = a.rows("indices")
    if sym.Analyzer().can_prove(tirx.NE(a.shape("X")[0], m)):
        mismatch = f"got {shown(a.shape('X')[0])} for {shown(m)}"
        raise a.wrong(f"takes X with a row for each row of the matrix, {mismatch}")
    return relax.TensorType(a.shape("data"), a.dtype("data"))


def _softmax(a: OperatorArguments) -> relax.TensorType:
    a.check("data", (1,), FLOATS)
    a.rows()
    return relax.TensorType(a.shape("data"), a.dtype("data"))


def _segments(a: OperatorArguments) -> relax.TensorType:
    a.check("x", (1, 2), FLOATS)
    return relax.TensorType([a.rows(), *a.shape("x")[1:]], a.dtype("x"))


def _gather_matmul_scatter(a: OperatorArguments) -> relax.TensorType:
    a.check("X", (2,), FLOATS)
    a.check("W", (3,), FLOATS)
    a.same_dtype("X", "W")
    m = a.rows("indices", "kinds")
    a.agree("indices", 0, "kinds", 0)
    a.agree("X", 1, "W", 1)
    return relax.TensorType([m, a.shape("W")[2]], a.dtype("X"))


def _transpose(a: OperatorArguments) -> ir.TupleType:
    a.rows("indices")
    nnz, idtype = a.shape("indices"), a.dtype("indptr")
    starts = relax.TensorType([sym.Analyzer().simplify(a.size("n") + 1)], idtype)
    return relax.TupleType([starts, relax.TensorType(nnz, idtype), relax.TensorType(nnz, idtype)])


def _segment_expand(a: OperatorArguments) -> relax.TensorType:
    a.check("x", (1, 2), FLOATS)
    m, (rows, *feat) = a.rows(), a.shape("x")
    if sym.Analyzer().can_prove(tirx.NE(rows, m)):
        raise a.wrong(f"takes x with an element for each row, got {shown(rows)} for {shown(m)} rows")
    return relax.TensorType([a.size("nnz"), *feat], a.dtype("x"))


def _gather_outer(a: OperatorArguments) -> relax.TensorType:
    for name in ("X", "Y"):
        a.check(name, (2,), FLOATS)
    a.same_dtype("X", "Y")
    a.agree("left", 0, "right", 0)
    return relax.TensorType([a.rows("left", "right"), a.shape("X")[1], a.shape("Y")[1]], a.dtype("X"))


def _dropout(a: OperatorArguments) -> relax.TensorType:
    a.check("x", tuple(range(1, 7)), FLOATS)
    a.check("count", (0,), ("int64",))
    return relax.TensorType(a.shape("x"), a.dtype("x"))


def _attention_lse(a: OperatorArguments) -> relax.TensorType:
    _blocks(a, "Q", "K")
    return relax.TensorType(a.shape("Q")[:2], "float64" if a.dtype("Q") == "float64" else "float32")


def _attention_backward(like: str) -> Callable[[OperatorArguments], relax.TensorType]:
    def infer(a: OperatorArguments) -> relax.TensorType:
        _blocks(a, "Q", "K", "V", "G")
        a.agree("V", 2, "G", 2)
        for name in ("lse", "delta"):
            a.check(name, (2,), ("float64",) if a.dtype("Q") == "float64" else ("float32",))
            for at in range(2):
                a.agree("Q", at, name, at)
        return relax.TensorType(a.shape(like), a.dtype(like))

    return infer


def _attention(a: OperatorArguments) -> relax.TensorType:
    heads, length = _blocks(a, "Q", "K", "V")
    return relax.TensorType([heads, length, a.shape("V")[2]], a.dtype("Q"))


def _blocks(a: OperatorArguments, *names: str) -> tuple[Any, Any]:
    """Validate the tensors and the structure of an attention, and return the number of heads and the length."""
    for name in names:
        a.check(name, (3,), FLOATS)
    a.same_dtype(*names)
    a.rows("indices")
    for at in range(3):
        a.agree("Q", at, "K", at)
    for name in names[2:]:
        a.agree("Q", 0, name, 0)
        a.agree("Q", 1, name, 1)
    heads, length, _ = a.shape("Q")
    rows = a.shape("indptr")[0]
    if not isinstance(length, tirx.IntImm) or not isinstance(rows, tirx.IntImm):
        raise a.wrong("takes Q and indptr of known shapes: the block size is their ratio")
    if int(rows) < 2 or int(length) % (int(rows) - 1):
        raise a.wrong(f"takes indptr with a row for each block of Q, got {int(rows) - 1} rows for a length of {length}")
    return heads, length


@dataclass(frozen=True)
class Operator:
    """A Relax operator: its arguments, and the inference of a call's type.

    The tensors are followed by `scalars`, which are known when the model is built, and `sizes`, which need not be.
    """

    name: str
    args: tuple[str, ...]
    infer: Callable[[OperatorArguments], Any]
    scalars: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arguments."""
        return (*self.args, *self.scalars, *self.sizes)

    @property
    def op(self) -> ir.Op:
        """The registered operator."""
        return ir.Op.get(PREFIX + self.name)

    def arguments(self, call: ir.Call) -> OperatorArguments:
        """Return the arguments of a call."""
        return OperatorArguments(self.name, self.names, call.args)


CSR = ("data", "indptr", "indices")
ATTENTION_BACKWARD = ("Q", "K", "V", "G", "lse", "delta", "indptr", "indices")
ATTENTION_OPERANDS = {"query": "Q", "key": "K", "value": "V"}
OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("spmm", (*CSR, "B"), _spmm),
        Operator("spmm_bf16x3", (*CSR, "B"), _spmm_bf16x3),
        Operator("spmm_int32", (*CSR, "B"), _spmm_int32),
        Operator("spmv", (*CSR, "x"), _spmv),
        Operator("linear", ("x", *CSR), _linear),
        Operator("sddmm", (*CSR, "X", "Y"), _sddmm),
        Operator("softmax", ("data", "indptr"), _softmax),
        *(Operator(f"segment_{kind}", ("x", "indptr"), _segments) for kind in REDUCTIONS),
        Operator("gather_matmul_scatter", ("X", "W", "indptr", "indices", "kinds"), _gather_matmul_scatter),
        Operator("attention", ("Q", "K", "V", "indptr", "indices"), _attention, ("scale",)),
        # Operators that appear in gradients.
        Operator("transpose", ("indptr", "indices"), _transpose, sizes=("n",)),
        Operator("segment_expand", ("x", "indptr"), _segment_expand, sizes=("nnz",)),
        Operator("gather_outer", ("X", "Y", "indptr", "left", "right"), _gather_outer),
        Operator("dropout", ("x", "count"), _dropout, ("rate",), ("seed",)),
        Operator("attention_lse", ("Q", "K", "indptr", "indices"), _attention_lse, ("scale",)),
        *(
            Operator(f"attention_backward_{name}", ATTENTION_BACKWARD, _attention_backward(like), ("scale",))
            for name, like in ATTENTION_OPERANDS.items()
        ),
    )
}


def operator_of(node: Any) -> Operator | None:
    """Return the operator that an expression calls; None if it is not an operator of this package."""
    if not isinstance(node, ir.Call) or not isinstance(node.op, ir.Op) or not node.op.name.startswith(PREFIX):
        return None
    return OPERATORS.get(node.op.name[len(PREFIX) :])


def register() -> None:
    """Register the operators with TVM, and with its scripts as ``R.sparse``. A second call has no effect."""
    if hasattr(tvm.relax.script, "sparse"):
        return
    for operator in OPERATORS.values():
        ir._ffi_api.RegisterOp(PREFIX + operator.name, "")
        operator.op.set_num_inputs(len(operator.names))
        for name in operator.names:
            operator.op.add_argument(name, "Tensor" if name in operator.args else "PrimExpr", name)
        ir.register_op_attr(PREFIX + operator.name, "FPurity", True)
        ir.register_op_attr(PREFIX + operator.name, "FInferType", _infer(operator))
    functions = {name: _call_of(operator) for name, operator in OPERATORS.items()}
    for module in (tvm.relax.script, tvm.relax.script.parser):
        module.sparse = SimpleNamespace(**functions)


def _infer(operator: Operator) -> Callable[[ir.Call, Any], Any]:
    return lambda call, _builder: operator.infer(operator.arguments(call))


def _call_of(operator: Operator) -> Callable[..., ir.Call]:
    def make(*args: Any) -> ir.Call:
        arguments = OperatorArguments(operator.name, operator.names, args)
        by_name = dict(zip(operator.names, arguments.values, strict=True))
        exprs = [_as_expr(operator, arguments, n, a) for n, a in by_name.items()]
        if all(isinstance(getattr(expr, "ty", None), (relax.TensorType, ir.PrimType)) for expr in exprs):
            # Validation in the builder is too late: TVM converts an error raised there to a RuntimeError.
            operator.infer(OperatorArguments(operator.name, operator.names, exprs))
        return relax.Call(operator.op, exprs)

    return make


def _as_expr(operator: Operator, arguments: OperatorArguments, name: str, value: Any) -> Any:
    """Convert numbers and arrays to constants; return expressions as they are."""
    if isinstance(value, ir.Expr):
        return value
    if name in operator.args:
        try:
            return constant(value)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise arguments.wrong(f"takes {name} as a tensor, got {type(value).__name__}", ArgumentTypeError) from error
    if name in operator.sizes and is_integer(value):
        if not 0 <= value <= np.iinfo("int64").max:
            raise arguments.wrong(f"takes {name} as a size of at most 64 bits, got {shown_value(value)}")
        return tirx.const(int(value), "int64")
    if name in operator.scalars and (is_integer(value) or isinstance(value, (float, np.floating))):
        return tirx.const(float(as_real(value, name)), "float32")
    raise arguments.wrong(f"takes {name} as a number, got {shown_value(value)}", ArgumentTypeError)


def call(name: str, *args: Any) -> ir.Call:
    """Return a call of an operator; arrays become constants."""
    return _call_of(OPERATORS[name])(*args)


def constant(array: Any) -> ir.GenericConst:
    """Convert an array to a constant of its own dtype; ``relax.const`` would make float64 float32."""
    return (
        relax.const(np.asarray(array, order="C"), str(array.dtype))
        if isinstance(array, np.ndarray)
        else relax.const(array)
    )


def has_zero(sizes: Sequence[Any]) -> bool:
    """Return whether a size is known to be zero."""
    return any(isinstance(size, (int, tirx.IntImm)) and int(size) == 0 for size in sizes)


def is_float(x: Any) -> bool:
    """Return whether the elements of a tensor are floating-point numbers."""
    return str(x.ty.dtype.dtype).startswith(("float", "bfloat"))


def ranks(emit: Callable[[Any], Any], x: Any, axis: int, extreme: Callable[..., Any]) -> Any:
    """Return 2 for NaN, else 1 for the maximum or minimum along an axis and 0 for the rest, in int8.

    TVM's own search for the place of a maximum begins with the smallest number there is, and gives -1 where no element
    is larger; in these it finds the place.
    """
    rank = emit(relax.op.astype(emit(relax.op.equal(x, emit(extreme(x, [axis], True)))), "int8"))
    if not is_float(x):
        return rank
    is_nan = emit(relax.op.astype(emit(relax.op.isnan(x)), "int8"))
    return emit(relax.op.add(rank, emit(relax.op.add(is_nan, is_nan))))


def reshape(value: Any, shape: Any) -> ir.Call:
    """Reshape a tensor; ``relax.op.reshape`` takes a size of zero for "as in the argument", and fails or is wrong."""
    sizes = shape.values if isinstance(shape, relax.ShapeExpr) else () if isinstance(shape, ir.Expr) else shape
    if not has_zero(sizes):
        return relax.op.reshape(value, shape)
    return relax.Call(
        ir.Op.get("relax.reshape"),
        [value, relax.ShapeExpr([tirx.const(n, "int64") if isinstance(n, int) else n for n in sizes])],
    )


def csr_constants(matrix: Any, *, dtype: str | None = None, idtype: str = "int32") -> tuple[Any, Any, Any]:
    """Convert a matrix to the constants ``data, indptr, indices`` of the operators.

    Parameters
    ----------
    matrix : scipy.sparse array or matrix, torch sparse tensor, SparseTensor or ndarray
        The matrix, of two dimensions.
    dtype : str, optional
        Dtype of the values; by default that of the matrix.
    idtype : {"int32", "int64"}
        Dtype of the index arrays.

    Returns
    -------
    tuple of relax constants

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir.relax
    >>> [str(c.ty) for c in sparsetir.relax.csr_constants(sp.eye_array(3, dtype="float32"))]
    ['R.Tensor((3,), dtype="float32")', 'R.Tensor((4,), dtype="int32")', 'R.Tensor((3,), dtype="int32")']
    """
    if is_sparse(matrix):
        matrix = SparseTensor.from_any(matrix, "coo")
        shape, coords, values = matrix.shape, matrix.coords, matrix.values
    else:
        array = array_of_numbers(matrix, "matrix")
        shape, coords = array.shape, np.nonzero(np.atleast_1d(array))
        values = np.atleast_1d(array)[coords]
    if len(shape) != 2:
        raise ArgumentError(f"matrix: expected two dimensions, got shape {tuple(shape)}. Pass a matrix.")
    value_dtype = dtype_name(values.dtype) if dtype is None else as_dtype(dtype, "dtype")
    if value_dtype not in VALUE_DTYPES:
        fault = f"expected one of {', '.join(VALUE_DTYPES)}, got {value_dtype}"
        raise ArgumentTypeError(f"dtype: {fault}. Convert the matrix, or pass one of these.")
    if not isinstance(idtype, str) or idtype not in INTS:
        raise ArgumentError(f"idtype: expected int32 or int64, got {shown_value(idtype)}. Pass one of the two.")
    order = np.lexsort(coords[::-1])
    indptr = np.concatenate([[0], np.cumsum(np.bincount(coords[0], minlength=shape[0]))])
    if max(indptr[-1], shape[1]) > np.iinfo(idtype).max:
        raise OffsetError(f"idtype: expected one that counts {indptr[-1]} entries, got {idtype}. Pass 'int64'.")
    arrays = values[order].astype(numpy_dtype(value_dtype)), indptr.astype(idtype), coords[1][order].astype(idtype)
    data, starts, columns = map(constant, arrays)
    return data, starts, columns


# --------------------------------------------------------------------------------- arguments of a call


FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("int32", "int64")
EIGHT_BITS = ("int8", "uint8")


class OperatorArguments:
    """The arguments of a call, with validation; error messages name the operator and the argument."""

    def __init__(self, name: str, names: tuple[str, ...], values: Any) -> None:
        self.name, self.names, self.values = name, names, list(values)
        if len(self.values) != len(names):
            raise self.wrong(f"takes {', '.join(names)}, got {len(self.values)} arguments")

    def wrong(self, fault: str, kind: type[Exception] = ArgumentError) -> Exception:
        return kind(f"R.sparse.{self.name} {fault}")

    def __getitem__(self, name: str) -> Any:
        return self.values[self.names.index(name)]

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor argument."""
        return str(self._type(name).dtype.dtype)

    def shape(self, name: str) -> list[Any]:
        """Return the sizes of a tensor argument."""
        sizes = self._type(name).shape
        if not isinstance(sizes, relax.ShapeExpr):
            raise self.wrong(f'needs the shape of {name}: annotate it, such as R.Tensor(("nnz",), "float32")')
        return list(sizes.values)

    def number(self, name: str) -> float:
        """Return the value of a scalar argument."""
        value = self[name]
        if isinstance(value, ir.GenericConst):
            return float(value.value.numpy())
        if isinstance(value, (tirx.FloatImm, tirx.IntImm)):
            return float(value.value)
        raise self.wrong(f"takes {name} as a number known when the model is built, got {value}", ArgumentTypeError)

    def check(self, name: str, dims: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise unless an argument is a tensor of one of these ranks and dtypes."""
        argument_type = self._type(name)
        if argument_type.ndim not in dims:
            ranks = " or ".join(map(str, dims))
            raise self.wrong(f"takes {name} with {ranks} dimensions, got {argument_type.ndim}")
        if self.dtype(name) not in dtypes:
            raise self.wrong(f"takes {name} of {' or '.join(dtypes)}, got {self.dtype(name)}", ArgumentTypeError)

    def agree(self, one: str, at: int, other: str, of: int) -> None:
        """Raise if two sizes that must be the same are known to differ."""
        for name, dimension in ((one, at), (other, of)):
            if self._type(name).ndim <= dimension:
                raise self.wrong(f"takes {name} with {dimension + 1} dimensions or more, got {self._type(name).ndim}")
        a, b = self.shape(one)[at], self.shape(other)[of]
        if sym.Analyzer().can_prove(tirx.NE(tirx.const(0, "int64") + a, b)):
            mismatch = f"{one}.shape[{at}] is {shown(a)} but {other}.shape[{of}] is {shown(b)}"
            raise self.wrong(f"takes {one} and {other} of fitting shapes: {mismatch}")

    def same_dtype(self, *names: str) -> None:
        """Raise unless all arguments have one dtype."""
        for name in names[1:]:
            if self.dtype(name) != self.dtype(names[0]):
                dtypes = f"{names[0]} is {self.dtype(names[0])} and {name} is {self.dtype(name)}"
                raise self.wrong(f"takes {' and '.join(names)} of one dtype; {dtypes}", ArgumentTypeError)

    def size(self, name: str) -> Any:
        """Return the value of a size argument: a number, or an expression that is known at run time."""
        value = self[name]
        if isinstance(value, ir.Expr) and isinstance(value.ty, ir.PrimType) and str(value.ty.dtype) == "int64":
            return value
        raise self.wrong(f"takes {name} as a number of int64, got {value}", ArgumentTypeError)

    def columns(self) -> Any:
        """Return the exclusive upper bound of `indices`, the number of columns."""
        if self.name == "transpose":
            return self.size("n")
        if self.name.startswith("attention"):
            return self.shape("indptr")[0] - 1
        name, at = {
            "spmm": ("B", -2), "spmm_bf16x3": ("B", -2), "spmm_int32": ("B", -2), "spmv": ("x", 0),
            "linear": ("x", -1), "sddmm": ("Y", 0), "gather_matmul_scatter": ("X", 0),
        }[self.name]  # fmt: skip
        return self.shape(name)[at]

    def entries(self) -> Any:
        """Return the number of entries of an operator without an index array."""
        return self.size("nnz") if "nnz" in self.names else self.shape(self.names[0])[0]

    def matrix(self, data: str = "data", dtypes: tuple[str, ...] = FLOATS) -> Any:
        """Validate the arrays of a matrix, and return its number of rows."""
        self.check(data, (1,), dtypes)
        self.agree(data, 0, "indices", 0)
        return self.rows("indices")

    def rows(self, *indices: str) -> Any:
        """Validate `indptr` and its index arrays, and return the number of rows."""
        for name in ("indptr", *indices):
            self.check(name, (1,), INTS)
        self.same_dtype("indptr", *indices)
        length = self.shape("indptr")[0]
        if isinstance(length, tirx.IntImm) and int(length) < 1:
            raise self.wrong("takes indptr with one element more than there are rows, got none")
        return sym.Analyzer().simplify(length - 1)

    def _type(self, name: str) -> Any:
        argument_type = self[name].ty
        if not isinstance(argument_type, relax.TensorType):
            raise self.wrong(f"takes {name} as a tensor, got {argument_type}", ArgumentTypeError)
        return argument_type


def shown(size: Any) -> str:
    """Return a size for a message."""
    return str(int(size)) if isinstance(size, tirx.IntImm) else str(size)


__all__ = [
    "FLOATS",
    "INTS",
    "OPERATORS",
    "PREFIX",
    "REDUCTIONS",
    "Operator",
    "OperatorArguments",
    "call",
    "constant",
    "csr_constants",
    "has_zero",
    "is_float",
    "operator_of",
    "ranks",
    "register",
    "reshape",
    "shown",
]
