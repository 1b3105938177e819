# SPDX-License-Identifier: Apache-2.0
"""numpy's functions and ufuncs on sparse tensors: those that keep zeros, and those that have a sparse method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsetir.einsum import operators, shapes
from sparsetir.einsum.expression import einsum
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor

BINARY: dict[np.ufunc, Callable[[Any, Any], Any]] = {
    np.add: operators.add,
    np.subtract: operators.subtract,
    np.multiply: operators.multiply,
    np.true_divide: operators.divide,
    np.power: operators.power,
    np.matmul: operators.matmul,
}
# The comparison with the operands swapped.
COMPARISONS = {
    np.less: np.greater,
    np.less_equal: np.greater_equal,
    np.greater: np.less,
    np.greater_equal: np.less_equal,
    np.equal: np.equal,
    np.not_equal: np.not_equal,
}
DEFAULTS = (None, np._NoValue)


def apply_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Apply a ufunc to sparse tensors; the result is sparse where the elements that are not stored stay zero.

    Raises
    ------
    ArgumentTypeError
        The ufunc has no sparse form, or an option such as ``out=`` is given.
    ArgumentError
        It would make elements that are not stored something else than zero.
    """
    if not options and method == "__call__" and ufunc in BINARY:  # the warm way of ``array @ S``
        result = BINARY[ufunc](*inputs)
        if result is not NotImplemented:
            return result
    name = f"numpy.{ufunc.__name__}"
    if method != "__call__":
        raise ArgumentTypeError(f"{name}.{method} of a sparse tensor is not defined. Call S.sum, S.max or to_dense().")
    given = [key for key, value in options.items() if value is not None]
    if given:
        raise ArgumentTypeError(
            f"{name}: expected no options for a sparse tensor, got {', '.join(given)}=. Leave it out."
        )
    if ufunc in BINARY:
        return _checked(BINARY[ufunc](*inputs), name, inputs)
    if ufunc in COMPARISONS:
        left, right = inputs
        is_first = isinstance(left, SparseTensor)
        compared = operators.compare(ufunc, left, right) if is_first else None
        return _checked(compared if is_first else operators.compare(COMPARISONS[ufunc], right, left), name, inputs)
    if ufunc.nin == ufunc.nout == 1:
        return _mapped(ufunc, name, inputs[0])
    raise ArgumentTypeError(f"{name} has no form for sparse tensors. Call it with S.to_dense() or S.to_scipy().")


def _checked(result: Any, name: str, inputs: tuple[Any, ...]) -> Any:
    if result is NotImplemented:
        classes = ", ".join(type(value).__name__ for value in inputs)
        raise ArgumentTypeError(f"{name}: expected arrays, sparse tensors or numbers, got {classes}. Convert them.")
    return result


def _mapped(ufunc: np.ufunc, name: str, tensor: SparseTensor) -> SparseTensor:
    """Apply a ufunc of one argument to the entries."""
    with np.errstate(all="ignore"):
        try:
            of_zero = ufunc(np.zeros(1, tensor.dtype))[0]
        except TypeError as error:
            raise ArgumentTypeError(
                f"{name} of {tensor.dtype} values: {error}. Convert them with astype first."
            ) from None
    if of_zero != 0 or of_zero != of_zero:
        fault = f"{name}(0) is {of_zero}, so that elements which are not stored would not be zero"
        raise ArgumentError(f"{fault}. Call it with S.to_dense(), or with S.values for the entries alone.")
    return operators.mapped(ufunc, tensor)


# ------------------------------------------------------------------------------------------------ functions


def _reduction(name: str) -> Callable[..., Any]:
    def reduce(tensor: Any, axis: Any = None, **options: Any) -> Any:
        allowed = {"keepdims": False} | ({"ddof": 0} if name in ("var", "std") else {})
        given = {key: value for key, value in options.items() if not any(value is d for d in DEFAULTS)}
        unknown = sorted(given.keys() - allowed.keys())
        if unknown:
            fault = f"numpy.{name}: expected axis, {', '.join(allowed)} of a sparse tensor, got {unknown[0]}="
            raise ArgumentTypeError(f"{fault}. Leave it out.")
        return getattr(tensor, name)(axis, **given)

    return reduce


def _dot(a: Any, b: Any, out: Any = None) -> Any:
    """``numpy.dot`` of matrices and vectors, and of a number."""
    if out is not None:
        raise ArgumentTypeError("numpy.dot: expected no out= for a sparse tensor, got one. Leave it out.")
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return operators.multiply(a, b)
    if np.ndim(a) > 2 or np.ndim(b) > 2:
        raise ArgumentError("numpy.dot: expected matrices and vectors, got more dimensions. Call sparsetir.tensordot.")
    return operators.matmul(a, b)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(np, name): _reduction(name) for name in ("sum", "mean", "max", "min", "var", "std", "argmax", "argmin")},
    np.amax: _reduction("max"),
    np.amin: _reduction("min"),
    np.dot: _dot,
    np.transpose: lambda tensor, axes=None: tensor.transpose() if axes is None else tensor.transpose(*axes),
    np.diagonal: lambda tensor: tensor.diagonal(),
    np.trace: lambda tensor: tensor.trace(),
    np.reshape: lambda tensor, shape: tensor.reshape(shape),
    np.tensordot: lambda a, b, axes=2: shapes.tensordot(a, b, axes),
    np.vstack: lambda operands: shapes.vstack(operands),
    np.hstack: lambda operands: shapes.hstack(operands),
    np.einsum: lambda text, *operands: einsum(text, *operands),
    np.shape: lambda tensor: tensor.shape,
    np.ndim: lambda tensor: tensor.ndim,
    np.size: lambda tensor: int(np.prod(tensor.shape)),
    np.copy: lambda tensor: tensor.copy(),
    np.count_nonzero: lambda tensor: int(np.count_nonzero(tensor.values)),
}


def apply_function(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call the sparse form of a function of numpy.

    Raises
    ------
    ArgumentTypeError
        It has none, or not with these options.
    """
    name = f"{function.__module__}.{function.__name__}"
    if function not in FUNCTIONS:
        advice = "Call it with S.to_dense() where that is meant, or with S.to_scipy(copy=False)"
        raise ArgumentTypeError(f"{name} has no form for sparse tensors. {advice}.")
    try:
        return FUNCTIONS[function](*arguments, **options)
    except TypeError as error:
        if isinstance(error, ArgumentTypeError):
            raise
        raise ArgumentTypeError(f"{name}: its form for sparse tensors takes other arguments: {error}.") from None


__all__ = ["apply_function", "apply_ufunc"]
