# SPDX-License-Identifier: Apache-2.0
"""Arrays that are computed later: the nodes of a chain of operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop import array_of_numbers, is_sparse, is_torch
from sparsetir.utils.arguments import as_real, dtype_name, is_integer, shown

Axis: TypeAlias = int | tuple[int, ...] | None

FLOATS = ("float16", "float32", "float64")
# Functions of one element; those that leave zero zero also of what a sparse array stores.
ELEMENTWISE = ("relu", "tanh", "abs", "negative", "sqrt", "sigmoid", "exp", "gelu", "silu", "log")
KEEP_ZERO = ("relu", "tanh", "abs", "negative", "sqrt")
UFUNCS = {"absolute": "abs", "fabs": "abs"}  # numpy's names of functions that are called otherwise here
OPERATIONS = ("add", "subtract", "multiply", "divide", "power")
NO_ELEMENTS = "has no elements to select or compare yet: do that with the array before, or with what compute returns"


class Lazy:
    """An array that is not computed yet; `sparsetir.lazy` makes it, `sparsetir.compute` computes it.

    It has the operators ``@ + - * /``, ``.T``, and the methods `relu`, `softmax`, `tanh`, `sigmoid`, `gelu`, `silu`,
    `exp`, `log`, `sqrt`, `abs`, `sum`, `mean`, `max` and `min`. Functions of numpy with these names take it.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    is_sparse : bool
    """

    def __init__(
        self,
        op: str,
        args: tuple[Lazy, ...],
        shape: Sequence[int],
        dtype: str,
        *,
        pattern: Lazy | None = None,
        value: Any = None,
        option: Any = None,
    ) -> None:
        self.op, self.args, self.shape, self.dtype = op, args, tuple(int(n) for n in shape), dtype
        self.pattern = self if op == "sparse" else pattern  # the leaf whose structure it has
        self.value, self.option = value, option

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_sparse(self) -> bool:
        return self.pattern is not None

    @property
    def is_turned(self) -> bool:
        """Whether it is the transposed array of a sparse one, which stands in products only."""
        return self.op == "transpose" and self.args[0].is_sparse

    @property
    def is_factor(self) -> bool:
        """True of sparse arrays, transposed or not, and of their products, which are computed with a dense array."""
        return self.is_sparse or self.is_turned or self.op == "chain"

    def plain(self) -> Lazy:
        """Itself, where more than a product may be made of it."""
        if self.op == "chain":
            raise ArgumentError("a product of lazy sparse arrays has a pattern to compute: call sparsetir.matmul first")
        if self.is_turned:
            raise ArgumentError("a transposed lazy sparse array stands in products only: transpose the matrix before")
        return self

    def __repr__(self) -> str:
        kind = "sparse " if self.is_sparse else ""
        return f"Lazy {self.op}: {kind}{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise ArgumentTypeError("this array is not computed yet: pass it to sparsetir.compute")

    def __bool__(self) -> bool:
        raise ArgumentTypeError("this array is not computed yet, so that no condition can depend on it")

    def __getitem__(self, _index: Any) -> Any:
        raise ArgumentTypeError(f"a lazy array {NO_ELEMENTS}")

    def __lt__(self, _other: Any) -> Any:
        raise ArgumentTypeError(f"a lazy array {NO_ELEMENTS}")

    __le__ = __gt__ = __ge__ = __lt__

    # ------------------------------------------------------------------ operators

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        name = UFUNCS.get(ufunc.__name__, ufunc.__name__)
        if method == "__call__" and not options:
            if name in ELEMENTWISE:
                return self.apply(name)
            if name == "matmul":
                return matmul(lazy(inputs[0]), lazy(inputs[1]))
            if name in OPERATIONS:
                return elementwise(name, lazy(inputs[0], self.dtype), inputs[1])
            if name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
                raise ArgumentTypeError(f"a lazy array {NO_ELEMENTS}")
        supported = ", ".join((*ELEMENTWISE, *OPERATIONS))
        raise ArgumentTypeError(f"numpy.{ufunc.__name__}: lazy arrays have {supported}. Compute the array first.")

    def __matmul__(self, other: Any) -> Lazy:
        return matmul(self, lazy(other))

    def __rmatmul__(self, other: Any) -> Lazy:
        return matmul(lazy(other), self)

    def __add__(self, other: Any) -> Lazy:
        return elementwise("add", self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Lazy:
        return elementwise("subtract", self, other)

    def __rsub__(self, other: Any) -> Lazy:
        return elementwise("subtract", lazy(other, self.dtype), self)

    def __mul__(self, other: Any) -> Lazy:
        return elementwise("multiply", self, other)

    def __rmul__(self, other: Any) -> Lazy:
        return elementwise("multiply", self, other)

    def __truediv__(self, other: Any) -> Lazy:
        return elementwise("divide", self, other)

    def __rtruediv__(self, other: Any) -> Lazy:
        return elementwise("divide", lazy(other, self.dtype), self)

    def __pow__(self, other: Any) -> Lazy:
        return elementwise("power", self, other)

    def __rpow__(self, other: Any) -> Lazy:
        return elementwise("power", lazy(other, self.dtype), self)

    def __neg__(self) -> Lazy:
        return self.apply("negative")

    def __abs__(self) -> Lazy:
        return self.apply("abs")

    @property
    def T(self) -> Lazy:
        """The transposed array."""
        if self.ndim != 2:
            raise ArgumentError(f".T is of a matrix, got {self.ndim} dimensions")
        if self.op == "transpose":
            return self.args[0]
        if self.op == "chain":
            return matmul(self.args[1].T, self.args[0].T)
        return Lazy("transpose", (self,), self.shape[::-1], self.dtype)

    # ------------------------------------------------------------------ functions

    def apply(self, name: str) -> Lazy:
        """Apply a function to each element, by its name."""
        self.plain()
        if self.is_sparse and name not in KEEP_ZERO:
            raise ArgumentError(f"{name} of a sparse array is not zero where nothing is stored; there are {KEEP_ZERO}")
        return Lazy(name, (self,), self.shape, self.dtype, pattern=self.pattern)

    def softmax(self) -> Lazy:
        """Return the softmax of every row; of a sparse matrix over what the row stores."""
        self.plain()
        if not self.ndim:
            raise ArgumentError("softmax is of the rows of an array, got no dimension")
        return Lazy("softmax", (self,), self.shape, self.dtype, pattern=self.pattern)

    def reduced(self, name: str, axis: Axis) -> Lazy:
        """Reduce along an axis, or several, by the name of the reduction."""
        self.plain()
        if self.is_sparse:
            raise ArgumentError(f"{name} of a lazy sparse array: multiply it with ones, or compute it first")
        dims = _dims(axis, self.ndim)
        if isinstance(axis, tuple):
            result = self
            for d in dims:
                result = result.reduced(name, d)
            return result
        remaining = () if axis is None else [n for d, n in enumerate(self.shape) if d != axis % self.ndim]
        if 0 in (self.shape if axis is None else [self.shape[axis]]):
            if name == "max":
                raise ArgumentError(f"max of an empty tensor is undefined: the shape is {self.shape}")
            if name == "mean":
                return self.reduced("sum", axis) * math.nan
        return Lazy(name, (self,), remaining, self.dtype, option=axis)

    def sum(self, axis: Axis = None) -> Lazy:
        """Return the sum over a dimension, several, or all."""
        return self.reduced("sum", axis)

    def mean(self, axis: Axis = None) -> Lazy:
        """Return the mean over a dimension, several, or all."""
        return self.reduced("mean", axis)

    def max(self, axis: Axis = None) -> Lazy:
        """Return the largest element over a dimension, several, or all."""
        return self.reduced("max", axis)

    def min(self, axis: Axis = None) -> Lazy:
        """Return the least element over a dimension, several, or all."""
        return -(-self.plain()).max(axis)


def _dims(axis: Axis, ndim: int) -> list[int]:
    """Return the dimensions to reduce, the last one first; raise unless there are such."""
    axes = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
    if not all(is_integer(d) for d in axes):
        raise ArgumentTypeError(f"axis: expected an integer, a tuple of them or None, got {shown(axis)}")
    for d in axes:
        if not -ndim <= d < ndim:
            raise ArgumentError(f"axis {d} of an array of {ndim} dimensions")
    dims = sorted({d % ndim for d in axes}, reverse=True)
    if len(dims) < len(axes):
        raise ArgumentError(f"axis: expected distinct dimensions, got {axis}")
    return dims


def _method(name: str) -> Any:
    def method(self: Lazy) -> Lazy:
        return self.apply(name)

    method.__name__, method.__doc__ = name, f"`{name}` of each element."
    return method


for _name in ELEMENTWISE:
    setattr(Lazy, _name, _method(_name))


def lazy(value: Any, dtype: str | None = None) -> Lazy:
    """Wrap an array whose operations are recorded, and computed together by `sparsetir.compute`.

    Parameters
    ----------
    value : array, sparse matrix or number
        Of numpy, torch, scipy or this package, of float16, float32 or float64; numbers take the others' dtype.
    dtype : str, optional
        Of a number.

    Returns
    -------
    Lazy

    Raises
    ------
    ArgumentTypeError
        `value` is of another class or dtype.
    ArgumentError
        It is sparse, but no matrix.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sparsetir.lazy(sp.csr_array(np.array([[0, 2.0], [-3.0, 0]])))
    >>> H = sparsetir.relu((A @ np.eye(2)) @ np.ones((2, 1)) + 1.0)
    >>> H
    Lazy relu: float64[2, 1]
    >>> sparsetir.compute(H).tolist()
    [[3.0], [0.0]]
    """
    if isinstance(value, Lazy):
        return value
    if isinstance(value, (bool, int, float, np.number)) and dtype is not None:
        return Lazy("number", (), (), dtype, value=float(as_real(value, "value")))
    if is_sparse(value):
        if len(value.shape) != 2:
            raise ArgumentError(f"a lazy sparse array is a matrix, got {len(value.shape)} dimensions")
        return Lazy("sparse", (), value.shape, _checked(value), value=value)
    array = value if is_torch(value) else array_of_numbers(value, "value")
    return Lazy("dense", (), array.shape, _checked(array), value=array)


def _checked(value: Any) -> str:
    name = dtype_name(value.dtype)
    if name not in FLOATS:
        raise ArgumentTypeError(f"lazy arrays are of {', '.join(FLOATS)}, got {name}: pass .astype('float32')")
    return name


def relu(value: Any) -> Lazy:
    """Return the larger of each element and zero, lazily; see `sparsetir.lazy`."""
    return lazy(value).apply("relu")


def softmax(value: Any) -> Lazy:
    """Return the softmax of every row, lazily; of a sparse matrix over what the row stores; see `sparsetir.lazy`."""
    return lazy(value).softmax()


# ------------------------------------------------------------------ two operands


def _common(a: Lazy, b: Lazy) -> str:
    return str(np.result_type(a.dtype, b.dtype))


def matmul(a: Lazy, b: Lazy) -> Lazy:
    """Return the product ``a @ b``."""
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ArgumentError(f"the shapes {a.shape} and {b.shape} do not fit @")
    if a.is_factor and b.is_factor:
        return Lazy("chain", (a, b), (a.shape[0], b.shape[1]), _common(a, b))
    for sparse, other in ((a, b), (b, a)):
        if sparse.is_factor and other.ndim > 2:
            raise ArgumentError(f"a sparse matrix multiplies matrices and vectors, got {other.ndim} dimensions")
    if a.op == "chain":  # from the dense array on, so that no pattern has to be computed
        return matmul(a.args[0], matmul(a.args[1], b))
    if b.op == "chain":
        return matmul(matmul(a, b.args[0]), b.args[1])
    if a.ndim > 2 or b.ndim > 2:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    else:
        batch = ()
    shape = (*batch, *(a.shape[-2:-1] if a.ndim > 1 else ()), *(b.shape[-1:] if b.ndim > 1 else ()))
    return Lazy("matmul", (a, b), shape, _common(a, b))


def elementwise(op: str, a: Lazy, other: Any) -> Lazy:
    """Return the elementwise operation on two arrays."""
    b = lazy(other, a.plain().dtype).plain()
    try:
        shape = np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ArgumentError(f"the shapes {a.shape} and {b.shape} do not fit {op}") from None
    if op == "divide" and b.op == "number" and b.value == 0:  # TVM divides by no constant zero
        op, b = "multiply", Lazy("number", (), (), b.dtype, value=math.copysign(math.inf, b.value))
    if not (a.is_sparse or b.is_sparse):
        return Lazy(op, (a, b), shape, _common(a, b))
    return _of_sparse(op, a, b, shape)


def _with_leaf(node: Lazy, old: Lazy, new: Lazy) -> Lazy:
    """Return a graph with one leaf in the place of another of the same matrix."""
    if node is old:
        return new
    args = tuple(_with_leaf(arg, old, new) for arg in node.args)
    pattern = new if node.pattern is old else node.pattern
    return Lazy(node.op, args, node.shape, node.dtype, pattern=pattern, value=node.value, option=node.option)


def _of_sparse(op: str, a: Lazy, b: Lazy, shape: tuple[int, ...]) -> Lazy:
    if a.is_sparse and b.is_sparse:
        if a.pattern is not b.pattern and a.pattern is not None and b.pattern is not None:
            if a.pattern.value is b.pattern.value:
                b = _with_leaf(b, b.pattern, a.pattern)
        if a.pattern is not b.pattern:
            raise ArgumentError(f"{op} of lazy sparse arrays takes two with the structure of one: compute them first")
        if op == "divide":
            raise ArgumentError("division by a sparse array divides by the zeros that it does not store")
        if op == "power":
            raise ArgumentError("power of lazy sparse arrays: where nothing is stored 0 ** 0 is 1; pass a number")
        return Lazy(op, (a, b), shape, _common(a, b), pattern=a.pattern)
    if op == "power" and not (a.is_sparse and b.op == "number" and b.value > 0):
        raise ArgumentError("power of a lazy sparse array takes a number above zero: others make no zeros of zeros")
    if op not in ("multiply", "divide", "power") or (b.is_sparse and op == "divide"):
        raise ArgumentError(f"{op} of a sparse and a dense array has a dense result: compute it with to_dense()")
    sparse, dense = (a, b) if a.is_sparse else (b, a)
    if shape != sparse.shape:
        raise ArgumentError(
            f"the shapes {a.shape} and {b.shape} do not fit {op}: the result is as large as the sparse one"
        )
    return Lazy(op, (sparse, dense), shape, _common(a, b), pattern=sparse.pattern)


__all__ = ["Lazy", "lazy", "relu", "softmax"]
