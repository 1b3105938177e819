# SPDX-License-Identifier: Apache-2.0
"""The Relax operators: their names, their arguments, and what type a call has.

A matrix is its CSR arrays: ``data`` of nnz values, ``indptr`` of m + 1 and ``indices`` of nnz integers. In a script the
length of `indptr` is a size of its own (``R.Tensor(("p",), "int32")``): m is then ``p - 1``, which Relax can compute,
while it cannot take apart ``m + 1``. The arrays may be constants, whose format is then chosen when the model is built,
or come at run time with any sizes.

Calls print as ``R.sparse.spmm(...)`` and parse back once ``sparsetir.relax`` is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm.relax.script
import tvm.relax.script.parser
from tvm import ir, relax, sym, tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop import is_sparse
from sparsetir.interop.sources import open_source

PREFIX = "relax.sparse."
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("int32", "int64")
REDUCTIONS = ("sum", "mean", "max", "min")


class Arguments:
    """The arguments of a call, checked one by one; a message names the operator and the argument."""

    def __init__(self, name: str, names: tuple[str, ...], values: Any) -> None:
        self.name, self.names, self.values = name, names, list(values)
        if len(self.values) != len(names):
            raise self.wrong(f"takes {', '.join(names)}; found {len(self.values)} arguments")

    def wrong(self, fault: str, kind: type[Exception] = ArgumentError) -> Exception:
        return kind(f"R.sparse.{self.name} {fault}")

    def __getitem__(self, name: str) -> Any:
        return self.values[self.names.index(name)]

    def dtype(self, name: str) -> str:
        """The dtype of a tensor argument."""
        return str(self._type(name).dtype.dtype)

    def shape(self, name: str) -> list[Any]:
        """The sizes of a tensor argument."""
        found = self._type(name).shape
        if not isinstance(found, relax.ShapeExpr):
            raise self.wrong(f'needs the shape of {name}: annotate it, such as R.Tensor(("nnz",), "float32")')
        return list(found.values)

    def number(self, name: str) -> float:
        """The value of a scalar argument."""
        found = self[name]
        if isinstance(found, ir.GenericConst):
            return float(found.value.numpy())
        if isinstance(found, (tirx.FloatImm, tirx.IntImm)):
            return float(found.value)
        raise self.wrong(f"takes {name} as a number known when the model is built; found {found}", ArgumentTypeError)

    def check(self, name: str, dims: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise unless an argument is a tensor of one of these ranks and dtypes."""
        found = self._type(name)
        if found.ndim not in dims:
            wanted = " or ".join(map(str, dims))
            raise self.wrong(f"takes {name} with {wanted} dimensions; found {found.ndim}")
        if self.dtype(name) not in dtypes:
            raise self.wrong(f"takes {name} of {' or '.join(dtypes)}; found {self.dtype(name)}", ArgumentTypeError)

    def agree(self, one: str, at: int, other: str, of: int) -> None:
        """Raise if two sizes that must be the same are known to differ."""
        a, b = self.shape(one)[at], self.shape(other)[of]
        if sym.Analyzer().can_prove(tirx.NE(tirx.const(0, "int64") + a, b)):
            found = f"{one}.shape[{at}] is {_shown(a)} but {other}.shape[{of}] is {_shown(b)}"
            raise self.wrong(f"takes {one} and {other} of fitting shapes: {found}")

    def same_dtype(self, *names: str) -> None:
        """Raise unless all have one dtype."""
        for name in names[1:]:
            if self.dtype(name) != self.dtype(names[0]):
                found = f"{names[0]} is {self.dtype(names[0])} and {name} is {self.dtype(name)}"
                raise self.wrong(f"takes {' and '.join(names)} of one dtype; {found}", ArgumentTypeError)

    def columns(self) -> Any:
        """The number of columns that `indices` are below."""
        name, at = {
            "spmm": ("B", -2), "spmv": ("x", 0), "linear": ("x", -1), "sddmm": ("Y", 0),
            "gather_matmul_scatter": ("X", 0), "attention": ("indptr", 0),
        }[self.name]  # fmt: skip
        size = self.shape(name)[at]
        return size - 1 if name == "indptr" else size

    def matrix(self, data: str = "data") -> Any:
        """Check the arrays of a matrix; its number of rows."""
        self.check(data, (1,), FLOATS)
        self.agree(data, 0, "indices", 0)
        return self.rows("indices")

    def rows(self, *indices: str) -> Any:
        """Check `indptr` and its index arrays; the number of rows."""
        for name in ("indptr", *indices):
            self.check(name, (1,), INTS)
        self.same_dtype("indptr", *indices)
        length = self.shape("indptr")[0]
        if isinstance(length, tirx.IntImm) and int(length) < 1:
            raise self.wrong("takes indptr with one element more than there are rows; found none")
        return sym.Analyzer().simplify(length - 1)

    def _type(self, name: str) -> Any:
        found = self[name].ty
        if not isinstance(found, relax.TensorType):
            raise self.wrong(f"takes {name} as a tensor; found {found}", ArgumentTypeError)
        return found


def _shown(size: Any) -> str:
    return str(int(size)) if isinstance(size, tirx.IntImm) else str(size)


def _spmm(a: Arguments) -> relax.TensorType:
    m = a.matrix()
    a.check("B", (2, 3), FLOATS)
    a.same_dtype("data", "B")
    *batch, _n, feat = a.shape("B")
    return relax.TensorType([*batch, m, feat], a.dtype("B"))


def _spmv(a: Arguments) -> relax.TensorType:
    m = a.matrix()
    a.check("x", (1,), FLOATS)
    a.same_dtype("data", "x")
    return relax.TensorType([m], a.dtype("x"))


def _linear(a: Arguments) -> relax.TensorType:
    m = a.matrix()
    a.check("x", (1, 2, 3, 4, 5, 6), FLOATS)
    a.same_dtype("data", "x")
    return relax.TensorType([*a.shape("x")[:-1], m], a.dtype("x"))


def _sddmm(a: Arguments) -> relax.TensorType:
    a.matrix()
    for name in ("X", "Y"):
        a.check(name, (2,), FLOATS)
    a.same_dtype("data", "X", "Y")
    a.agree("X", 1, "Y", 1)
    m = a.rows("indices")
    if sym.Analyzer().can_prove(tirx.NE(a.shape("X")[0], m)):
        found = f"found {_shown(a.shape('X')[0])} for {_shown(m)}"
        raise a.wrong(f"takes X with a row for each row of the matrix; {found}")
    return relax.TensorType(a.shape("data"), a.dtype("data"))


def _softmax(a: Arguments) -> relax.TensorType:
    a.check("data", (1,), FLOATS)
    a.rows()
    return relax.TensorType(a.shape("data"), a.dtype("data"))


def _segments(a: Arguments) -> relax.TensorType:
    a.check("x", (1, 2), FLOATS)
    return relax.TensorType([a.rows(), *a.shape("x")[1:]], a.dtype("x"))


def _gather_matmul_scatter(a: Arguments) -> relax.TensorType:
    a.check("X", (2,), FLOATS)
    a.check("W", (3,), FLOATS)
    a.same_dtype("X", "W")
    m = a.rows("indices", "kinds")
    a.agree("indices", 0, "kinds", 0)
    a.agree("X", 1, "W", 1)
    return relax.TensorType([m, a.shape("W")[2]], a.dtype("X"))


def _attention(a: Arguments) -> relax.TensorType:
    for name in ("Q", "K", "V"):
        a.check(name, (3,), FLOATS)
    a.same_dtype("Q", "K", "V")
    a.rows("indices")
    for at in (0, 2):
        a.agree("Q", at, "K", at)
    for at in (0, 1):
        a.agree("K", at, "V", at)
    heads, length, _ = a.shape("Q")
    rows = a.shape("indptr")[0]
    if not isinstance(length, tirx.IntImm) or not isinstance(rows, tirx.IntImm):
        raise a.wrong("takes Q and indptr of known shapes: the block size is their ratio")
    if int(rows) < 2 or int(length) % (int(rows) - 1):
        raise a.wrong(
            f"takes indptr with a row for each block of Q; found {int(rows) - 1} rows for a length of {length}"
        )
    return relax.TensorType([heads, length, a.shape("V")[2]], a.dtype("Q"))


@dataclass(frozen=True)
class Operator:
    """A Relax operator: its arguments, and the type of a call; `scalars` are numbers that come after the tensors."""

    name: str
    args: tuple[str, ...]
    infer: Callable[[Arguments], relax.TensorType]
    scalars: tuple[str, ...] = ()

    @property
    def op(self) -> ir.Op:
        """The registered operator."""
        return ir.Op.get(PREFIX + self.name)

    def arguments(self, call: ir.Call) -> Arguments:
        """The arguments of a call."""
        return Arguments(self.name, (*self.args, *self.scalars), call.args)


CSR = ("data", "indptr", "indices")
OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("spmm", (*CSR, "B"), _spmm),
        Operator("spmv", (*CSR, "x"), _spmv),
        Operator("linear", ("x", *CSR), _linear),
        Operator("sddmm", (*CSR, "X", "Y"), _sddmm),
        Operator("softmax", ("data", "indptr"), _softmax),
        *(Operator(f"segment_{kind}", ("x", "indptr"), _segments) for kind in REDUCTIONS),
        Operator("gather_matmul_scatter", ("X", "W", "indptr", "indices", "kinds"), _gather_matmul_scatter),
        Operator("attention", ("Q", "K", "V", "indptr", "indices"), _attention, ("scale",)),
    )
}


def operator_of(node: Any) -> Operator | None:
    """The operator that an expression calls, if it is one of ours."""
    if not isinstance(node, ir.Call) or not isinstance(node.op, ir.Op) or not node.op.name.startswith(PREFIX):
        return None
    return OPERATORS.get(node.op.name[len(PREFIX) :])


def register() -> None:
    """Make the operators known to TVM, and to its scripts as ``R.sparse``. Calling it again changes nothing."""
    if hasattr(tvm.relax.script, "sparse"):
        return
    for operator in OPERATORS.values():
        ir._ffi_api.RegisterOp(PREFIX + operator.name, "")
        names = (*operator.args, *operator.scalars)
        operator.op.set_num_inputs(len(names))
        for name in names:
            operator.op.add_argument(name, "Tensor" if name in operator.args else "PrimExpr", name)
        ir.register_op_attr(PREFIX + operator.name, "FPurity", True)
        ir.register_op_attr(PREFIX + operator.name, "FInferType", _infer(operator))
    functions = {name: _call_of(operator) for name, operator in OPERATORS.items()}
    for module in (tvm.relax.script, tvm.relax.script.parser):
        module.sparse = SimpleNamespace(**functions)


def _infer(operator: Operator) -> Callable[[ir.Call, Any], relax.TensorType]:
    return lambda call, _builder: operator.infer(operator.arguments(call))


def _call_of(operator: Operator) -> Callable[..., ir.Call]:
    def make(*args: Any) -> ir.Call:
        checked = Arguments(operator.name, (*operator.args, *operator.scalars), args)
        return relax.Call(operator.op, [_expr(a) for a in checked.values])

    return make


def call(name: str, *args: Any) -> ir.Call:
    """A call of an operator; arrays become constants."""
    return _call_of(OPERATORS[name])(*args)


def _expr(value: Any) -> Any:
    if isinstance(value, ir.Expr):
        return value
    if isinstance(value, (int, float)):
        return tirx.const(float(value), "float32")
    return constant(value)


def constant(array: Any) -> ir.GenericConst:
    """An array as a constant of its own dtype: ``relax.const`` makes float32 of float64."""
    return (
        relax.const(np.ascontiguousarray(array), str(array.dtype))
        if isinstance(array, np.ndarray)
        else relax.const(array)
    )


def csr_constants(matrix: Any, *, dtype: str | None = None, idtype: str = "int32") -> tuple[Any, Any, Any]:
    """A matrix as the constants ``data, indptr, indices`` of the operators.

    Parameters
    ----------
    matrix : scipy.sparse array or matrix, torch sparse tensor, SparseTensor or ndarray
        Of two dimensions.
    dtype : str, optional
        Of the values; by default that of the matrix.
    idtype : {"int32", "int64"}
        Of the index arrays.

    Returns
    -------
    tuple of relax constants

    Examples
    --------
    >>> import scipy.sparse as sp, sparsetir.relax
    >>> [str(c.ty) for c in sparsetir.relax.csr_constants(sp.eye_array(3, dtype="float32"))]
    ['R.Tensor((3,), dtype="float32")', 'R.Tensor((4,), dtype="int32")', 'R.Tensor((3,), dtype="int32")']
    """
    if is_sparse(matrix) and not sp.issparse(matrix):
        source = open_source(matrix, "matrix")
        matrix = sp.coo_array((source.values.reshape(-1), tuple(source.coords())), shape=matrix.shape)
    found = sp.csr_array(matrix)
    found.sum_duplicates()
    values = found.data if dtype is None else found.data.astype(dtype)
    return constant(values), constant(found.indptr.astype(idtype)), constant(found.indices.astype(idtype))


__all__ = [
    "OPERATORS",
    "PREFIX",
    "REDUCTIONS",
    "Arguments",
    "Operator",
    "call",
    "constant",
    "csr_constants",
    "operator_of",
    "register",
]
