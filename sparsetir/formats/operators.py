# SPDX-License-Identifier: Apache-2.0
"""Operators and notebook display of sparse tensors."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.interop import array_of_numbers, is_sparse, is_torch
from sparsetir.utils.arguments import as_flag, shown

# Operators of sparse tensors. Their functions compile programs, and so are in a package above this one, which is
# imported when the first of them is called.


@cache
def functions() -> ModuleType:
    """Import the functions behind the operators."""
    return importlib.import_module("sparsetir.einsum.operators")


@cache
def reductions() -> ModuleType:
    """Import the functions behind the reductions."""
    return importlib.import_module("sparsetir.einsum.numpy_functions")


@cache
def numpy_functions() -> ModuleType:
    """Import the sparse forms of numpy's functions."""
    return importlib.import_module("sparsetir.einsum.numpy_functions")


def _reduced(tensor: Any, axis: Any, keepdims: bool, result: Any) -> Any:
    """Return the result of a reduction, with the reduced dimensions if these are kept."""
    return reductions().keeping(tensor, axis, result) if as_flag(keepdims, "keepdims") else result


def _operator(name: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    function: Callable[[Any, Any], Any] | None = None

    def operator(self: Any, operand: Any) -> Any:
        nonlocal function
        if function is None:
            function = getattr(functions(), name)
        return function(operand, self) if swapped else function(self, operand)

    operator.__name__ = operator.__qualname__ = name
    return operator


def _comparison(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    def comparison(self: Any, operand: Any) -> Any:
        return functions().compare(ufunc, self, operand)

    return comparison


def _of_ufunc(ufunc: np.ufunc, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operator(self: Any, operand: Any) -> Any:
        return ufunc(operand, self) if swapped else ufunc(self, operand)

    return operator


# scipy's own files, and the methods that `sparsetir.scipy.accelerate` puts between them.
METHODS_OF_SCIPY = (str(Path(sp.__file__).parent), str(Path(__file__).parents[1] / "scipy"))
# scipy's operators that leave the operation to the other operand where numpy makes an object of it.
OPERATORS_OF_SCIPY = frozenset(
    f"__{name}__" for name in ("matmul", "rmatmul", "mul", "rmul", "truediv", "eq", "ne", "lt", "le", "gt", "ge")
)


def _is_operator_of_scipy(frame: Any) -> bool:
    """Return whether scipy asks for an array in an operator, which can leave the operation to the other operand."""
    while frame is not None and frame.f_code.co_filename.startswith(METHODS_OF_SCIPY):
        if frame.f_code.co_name in OPERATORS_OF_SCIPY:
            return True
        frame = frame.f_back
    return False


def _conversion(name: str) -> Callable[..., Any]:
    def convert(self: Any, copy: bool = False) -> Any:
        return self.asformat(name, copy)

    convert.__name__ = convert.__qualname__ = f"to{name}"
    convert.__doc__ = f"Return ``to_scipy('{name}', copy=copy)``, by the name that scipy's matrices give it."
    return convert


def _answered(result: Any, name: str, operand: Any) -> Any:
    """Return the result of a method; an operator leaves an operand that it does not know to that one's class."""
    if result is NotImplemented:
        expected = "a number, an array or a sparse matrix"
        raise ArgumentTypeError(f"operand: {name} expected {expected}, got {shown(operand)}.")
    return result


class Operators:
    """Operators, reductions and slices of a sparse tensor.

    ``@`` multiplies matrices and vectors, sparse or dense; ``+ - * / **`` and comparisons work element by element. What
    a result does not store is zero: an operation that would make it something else is refused with the reason.
    """

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply a ufunc of numpy to the entries where zeros stay zeros."""
        return numpy_functions().apply_ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Call the sparse form of a function of numpy, such as `numpy.sum`."""
        return numpy_functions().apply_function(function, arguments, options)

    __matmul__ = _operator("matmul")
    __rmatmul__ = _operator("matmul", swapped=True)
    __add__ = _operator("add")
    __radd__ = _operator("add", swapped=True)
    __sub__ = _operator("subtract")
    __rsub__ = _operator("subtract", swapped=True)
    __mul__ = _operator("multiply")
    __truediv__ = _operator("divide")
    __rtruediv__ = _operator("divide", swapped=True)
    __pow__ = _operator("power")
    __floordiv__ = _of_ufunc(np.floor_divide)
    __rfloordiv__ = _of_ufunc(np.floor_divide, swapped=True)
    __mod__ = _of_ufunc(np.remainder)
    __rmod__ = _of_ufunc(np.remainder, swapped=True)
    __and__ = _of_ufunc(np.bitwise_and)
    __rand__ = _of_ufunc(np.bitwise_and, swapped=True)
    __or__ = _of_ufunc(np.bitwise_or)
    __ror__ = _of_ufunc(np.bitwise_or, swapped=True)
    __xor__ = _of_ufunc(np.bitwise_xor)
    __rxor__ = _of_ufunc(np.bitwise_xor, swapped=True)
    __getitem__ = _operator("sliced")

    __lt__ = _comparison(np.less)
    __le__ = _comparison(np.less_equal)
    __gt__ = _comparison(np.greater)
    __ge__ = _comparison(np.greater_equal)
    __eq__ = _comparison(np.equal)
    __ne__ = _comparison(np.not_equal)
    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows."""
        return (self[n] for n in range(self.shape[0]))  # type: ignore[attr-defined]

    def __rmul__(self, operand: Any) -> Any:
        """Multiply element by element; a matrix of scipy's older classes multiplies matrices by ``*``."""
        if isinstance(operand, sp.spmatrix):
            return functions().matmul(operand, self)
        return functions().multiply(operand, self)

    def __neg__(self) -> Any:
        return functions().mapped(np.negative, self)

    def __invert__(self) -> Any:
        return np.invert(self)

    def __abs__(self) -> Any:
        return functions().mapped(np.abs, self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Refuse the conversion: `to_dense` makes a dense array of all elements, `to_scipy` a matrix of scipy."""
        if _is_operator_of_scipy(sys._getframe(1)):
            # scipy's operators ask numpy for an object before they leave the operation to the other operand.
            scalar = np.empty((), object)
            scalar[()] = self
            return scalar
        fault = "numpy would make this sparse tensor dense: call to_dense() where that is meant"
        raise ArgumentTypeError(f"{fault}, or to_scipy(copy=False) for a library that takes scipy's matrices")

    def __dlpack__(self, **options: Any) -> Any:
        """Refuse the conversion, as `__array__` does; without this method torch would read element after element."""
        fault = "DLPack would make this sparse tensor dense: call to_dense() where that is meant"
        raise ArgumentTypeError(f"{fault}, or to_torch() for a sparse tensor of torch")

    __dlpack_device__ = __dlpack__

    def _repr_html_(self) -> str:
        """Return the description and the drawing for notebooks."""
        return html(self)

    @property
    def T(self) -> Any:
        """The tensor with its dimensions reversed; of a matrix of rows one of columns, over its index arrays."""
        return self.transpose()

    def transpose(self, *axes: int) -> Any:
        """Permute the dimensions of the tensor, by default in reversed order."""
        return functions().transpose(self, axes)

    def astype(self, dtype: Any) -> Any:
        """Convert the values to another dtype, as numpy does."""
        return functions().astype(self, dtype)

    def copy(self) -> Any:
        """Copy the tensor and its values; immutable index arrays are shared."""
        return functions().mapped(np.copy, self)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.shape[0])  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        """Refuse: whether an element is not zero is `any`, whether all are is `all`."""
        raise ArgumentError("a sparse tensor is neither true nor false: call S.any() or S.all()")

    def toarray(self) -> Any:
        """Return all elements as a dense array; the name that scipy gives to `to_dense`."""
        return self.to_dense()  # type: ignore[attr-defined]

    todense = toarray

    def asformat(self, format: str | None, copy: bool = False) -> Any:
        """Return ``to_scipy(format, copy=copy)``, by the name that scipy's matrices give it.

        Functions that call ``tocsr``, ``tocsc`` or ``tocoo`` of their argument, such as those of networkx and pandas,
        take a sparse tensor.
        """
        return self.to_scipy(format, copy=copy)  # type: ignore[attr-defined]

    tobsr = _conversion("bsr")
    tocoo = _conversion("coo")
    tocsc = _conversion("csc")
    tocsr = _conversion("csr")
    todia = _conversion("dia")
    todok = _conversion("dok")
    tolil = _conversion("lil")

    @property
    def size(self) -> int:
        """Number of elements, those that are not stored too."""
        return math.prod(self.shape)  # type: ignore[attr-defined]

    def dot(self, operand: Any) -> Any:
        """Multiply as ``@`` does, or by a number."""
        return _answered(numpy_functions().dot(self, operand), "dot", operand)

    def multiply(self, operand: Any) -> Any:
        """Multiply element by element, as ``*`` does; a sparse row or column is stretched."""
        return _answered(functions().multiply(self, operand), "multiply", operand)

    def power(self, number: Any) -> Any:
        """Compute ``S ** number`` of each element, for a number above zero."""
        return _answered(functions().power(self, number), "power", number)

    def maximum(self, operand: Any) -> Any:
        """Return the larger one of each two elements."""
        return np.maximum(self, operand)

    def minimum(self, operand: Any) -> Any:
        """Return the smaller one of each two elements."""
        return np.minimum(self, operand)

    def conj(self) -> Any:
        """Return the complex conjugate of each element."""
        # numpy's function makes int8 of bool, and its method returns real arrays themselves.
        return functions().mapped(lambda values: values.conj() if values.dtype.kind == "c" else values.copy(), self)

    @property
    def real(self) -> Any:
        """The real part of each element."""
        return functions().mapped(np.real, self)

    @property
    def imag(self) -> Any:
        """The imaginary part of each element."""
        return functions().mapped(np.imag, self)

    def matvec(self, x: Any) -> Any:
        """Compute ``S @ x``. With `rmatvec` it makes a matrix an operator of scipy's iterative solvers.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> from scipy.sparse.linalg import cg
        >>> S = sparsetir.SparseTensor.from_dense(np.array([[4.0, 1.0], [1.0, 3.0]]))
        >>> cg(S, np.array([1.0, 2.0]))[0].round(3).tolist()
        [0.091, 0.636]
        """
        return self @ x

    def rmatvec(self, x: Any) -> Any:
        """Compute ``S.T.conj() @ x`` of a vector."""
        return self.rmatmat(x)

    def rmatmat(self, X: Any) -> Any:
        """Compute ``S.T.conj() @ X`` of a vector or a matrix."""
        X = X if is_sparse(X) or is_torch(X) else array_of_numbers(X, "X")
        if self.dtype.kind != "c":  # type: ignore[attr-defined]
            return (X.T @ self).T
        return np.conj((np.conj(X).T @ self).T)

    def nonzero(self) -> tuple[Any, ...]:
        """Return the coordinates of elements that are not zero, an array for each dimension, in row-major order."""
        return reductions().nonzero(self)

    def diagonal(self) -> Any:
        """Return the elements (0, 0), (1, 1), ... of a matrix, as a dense array."""
        return functions().diagonal(self)

    def trace(self) -> Any:
        """Return the sum of the diagonal of a matrix."""
        return self.diagonal().sum()

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        """Return the tensor with another shape, its elements in row-major order; one extent may be -1.

        With ``order="F"`` elements are taken, and placed, in column-major order.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> sparsetir.SparseTensor.from_dense(np.eye(4)).reshape(2, -1).to_dense().tolist()
        [[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]]
        """
        return numpy_functions().reshape(self, shape, order)

    def sum(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Any:
        """Return the sum over some dimensions, or all, as a dense array or a number.

        Parameters
        ----------
        axis : int or tuple of int, optional
            The dimensions that are reduced; by default all.
        keepdims : bool
            Keep the reduced dimensions, with extent 1.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> S = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0], [3.0, 4.0]]))
        >>> S.sum(axis=1).tolist(), float(S.sum()), float(S.max()), (2 * S @ S.T).to_dense().tolist()
        ([2.0, 7.0], 9.0, 4.0, [[8.0, 16.0], [16.0, 50.0]])
        """
        return _reduced(self, axis, keepdims, reductions().total(self, axis))

    def mean(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Any:
        """Return the mean over some dimensions, or all; of integers in float64."""
        return _reduced(self, axis, keepdims, reductions().mean(self, axis))

    def var(self, axis: int | tuple[int, ...] | None = None, *, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return the variance over some dimensions, or all: squared distances from the mean over their count - `ddof`.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> S = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0], [4.0, 4.0]]))
        >>> S.var(axis=0).tolist(), float(S.std(axis=0, ddof=1)[1]) == 2**0.5
        ([4.0, 1.0], True)
        """
        return _reduced(self, axis, keepdims, reductions().variance(self, axis, ddof))

    def std(self, axis: int | tuple[int, ...] | None = None, *, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return the standard deviation, the square root of `var`."""
        return _reduced(self, axis, keepdims, reductions().deviation(self, axis, ddof))

    def logsumexp(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Any:
        """Return ``log(sum(exp(...)))`` over some dimensions, or all, without overflow; of integers in float64.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> S = sparsetir.SparseTensor.from_dense(np.array([[0, 1000.0], [0.0, 0.0]]))
        >>> S.logsumexp(axis=1).round(4).tolist()
        [1000.0, 0.6931]
        """
        return _reduced(self, axis, keepdims, reductions().logsumexp(self, axis))

    def max(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Any:
        """Return the largest element over some dimensions, or all; zeros that are not stored count."""
        return _reduced(self, axis, keepdims, reductions().extreme(self, axis, "max"))

    def min(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Any:
        """Return the smallest element over some dimensions, or all; zeros that are not stored count."""
        return _reduced(self, axis, keepdims, reductions().extreme(self, axis, "min"))

    def any(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Any:
        """Return whether any element over some dimensions, or of all, is not zero."""
        return _reduced(self, axis, keepdims, reductions().any_true(self, axis))

    def all(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Any:
        """Return whether no element over some dimensions, or of all, is zero; those that are not stored are.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> S = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0], [3.0, 4.0]]))
        >>> S.all(axis=1).tolist(), bool(S.any())
        ([False, True], True)
        """
        return _reduced(self, axis, keepdims, reductions().all_true(self, axis))

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Any:
        """Return the first place of the largest element along a dimension, or among all in row-major order.

        Zeros that are not stored count; NaN is larger than all.

        Examples
        --------
        >>> import numpy as np, sparsetir
        >>> S = sparsetir.SparseTensor.from_dense(np.array([[0, 2.0, 2.0], [-3.0, -4.0, 0]]))
        >>> S.argmax(axis=1).tolist(), int(S.argmin())
        ([1, 2], 4)
        """
        return _reduced(self, axis, keepdims, reductions().place_of_extreme(self, axis, "max"))

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Any:
        """Return the first place of the smallest element, as `argmax` does that of the largest."""
        return _reduced(self, axis, keepdims, reductions().place_of_extreme(self, axis, "min"))


# How a sparse tensor shows itself in a notebook: a table, and a drawing of where its entries lie.


SIDE = 64  # cells of the drawing's longer side


def html(tensor: Any) -> str:
    """Return the tensor as HTML."""
    shape = " x ".join(map(str, tensor.shape)) or "1"
    facts = {
        "shape": shape,
        "dtype": str(tensor.dtype),
        "format": repr(tensor.format),
        "entries": f"{tensor.nnz:,}",
        "bytes": f"{tensor.nbytes:,}",
        "padding": f"{tensor.padding:.0%}",
    }
    lines = "".join(f"<tr><th style='text-align:left'>{k}</th><td>{escape(v)}</td></tr>" for k, v in facts.items())
    return f"<div style='display:flex;gap:1em'><table>{lines}</table>{spy(tensor)}</div>"


def cells(tensor: Any) -> np.ndarray:
    """Count the entries in each cell of a grid over the last two dimensions."""
    rows, columns = (1, *tensor.shape)[-2:]
    coords = tensor.coords
    i = coords[-2] if tensor.ndim > 1 else np.zeros(tensor.nnz, np.int64)
    scale = min(1.0, SIDE / max(rows, columns, 1))
    grid = (max(1, round(rows * scale)), max(1, round(columns * scale)))
    down = i.astype(np.int64) * grid[0] // max(rows, 1)
    right = coords[-1].astype(np.int64) * grid[1] // max(columns, 1)
    return np.bincount(down * grid[1] + right, minlength=grid[0] * grid[1]).reshape(grid)


def spy(tensor: Any) -> str:
    """Return a drawing of where the entries lie, darker where there are more."""
    counts = cells(tensor)
    m, n = counts.shape
    top = np.log1p(counts.max(initial=0)) or 1.0
    marks = []
    for i, j in zip(*np.nonzero(counts), strict=True):
        shade = 0.25 + 0.75 * float(np.log1p(counts[i, j]) / top)
        marks.append(f"<rect x='{j}' y='{i}' width='1' height='1' fill-opacity='{shade:.2f}'/>")
    size = 4 if max(m, n) > 16 else 12
    frame = f"<rect width='{n}' height='{m}' fill='none' stroke='gray' stroke-width='0.2'/>"
    view = f"width='{n * size}' height='{m * size}' viewBox='0 0 {n} {m}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {view}>{frame}{''.join(marks)}</svg>"


__all__ = ["Operators", "html", "spy"]
