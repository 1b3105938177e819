# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of an operator's call."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, sym, tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("int32", "int64")


class Arguments:
    """The arguments of a call, with validation; error messages name the operator and the argument."""

    def __init__(self, name: str, names: tuple[str, ...], values: Any) -> None:
        self.name, self.names, self.values = name, names, list(values)
        if len(self.values) != len(names):
            raise self.wrong(f"takes {', '.join(names)}; found {len(self.values)} arguments")

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
        raise self.wrong(f"takes {name} as a number known when the model is built; found {value}", ArgumentTypeError)

    def check(self, name: str, dims: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise unless an argument is a tensor of one of these ranks and dtypes."""
        argument_type = self._type(name)
        if argument_type.ndim not in dims:
            ranks = " or ".join(map(str, dims))
            raise self.wrong(f"takes {name} with {ranks} dimensions; found {argument_type.ndim}")
        if self.dtype(name) not in dtypes:
            raise self.wrong(f"takes {name} of {' or '.join(dtypes)}; found {self.dtype(name)}", ArgumentTypeError)

    def agree(self, one: str, at: int, other: str, of: int) -> None:
        """Raise if two sizes that must be the same are known to differ."""
        for name, dimension in ((one, at), (other, of)):
            if self._type(name).ndim <= dimension:
                raise self.wrong(f"takes {name} with {dimension + 1} dimensions or more; found {self._type(name).ndim}")
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
        raise self.wrong(f"takes {name} as a number of int64; found {value}", ArgumentTypeError)

    def columns(self) -> Any:
        """Return the exclusive upper bound of `indices`, the number of columns."""
        if self.name == "transpose":
            return self.size("n")
        if self.name.startswith("attention"):
            return self.shape("indptr")[0] - 1
        name, at = {
            "spmm": ("B", -2), "spmv": ("x", 0), "linear": ("x", -1), "sddmm": ("Y", 0),
            "gather_matmul_scatter": ("X", 0),
        }[self.name]  # fmt: skip
        return self.shape(name)[at]

    def entries(self) -> Any:
        """Return the number of entries of an operator without an index array."""
        return self.size("nnz") if "nnz" in self.names else self.shape(self.names[0])[0]

    def matrix(self, data: str = "data") -> Any:
        """Validate the arrays of a matrix, and return its number of rows."""
        self.check(data, (1,), FLOATS)
        self.agree(data, 0, "indices", 0)
        return self.rows("indices")

    def rows(self, *indices: str) -> Any:
        """Validate `indptr` and its index arrays, and return the number of rows."""
        for name in ("indptr", *indices):
            self.check(name, (1,), INTS)
        self.same_dtype("indptr", *indices)
        length = self.shape("indptr")[0]
        if isinstance(length, tirx.IntImm) and int(length) < 1:
            raise self.wrong("takes indptr with one element more than there are rows; found none")
        return sym.Analyzer().simplify(length - 1)

    def _type(self, name: str) -> Any:
        argument_type = self[name].ty
        if not isinstance(argument_type, relax.TensorType):
            raise self.wrong(f"takes {name} as a tensor; found {argument_type}", ArgumentTypeError)
        return argument_type


def shown(size: Any) -> str:
    return str(int(size)) if isinstance(size, tirx.IntImm) else str(size)


__all__ = ["FLOATS", "INTS", "Arguments", "shown"]
