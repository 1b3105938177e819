# SPDX-License-Identifier: Apache-2.0
"""numpy's functions on sparse tensors: reductions, shapes, and ufuncs that keep zeros.

Reductions of `SparseTensor` with numpy's semantics: what is not stored counts as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from string import ascii_lowercase as LETTERS
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sp

from sparsetir.einsum import operators
from sparsetir.einsum.expression import einsum, entry_counts
from sparsetir.einsum.operators import (
    as_tensor,
    astype,
    by_parts,
    complex_product,
    entry_keys,
    like_class,
    mapped,
    of_entries,
)
from sparsetir.einsum.steps import cast
from sparsetir.einsum.subscripts import LIMITS
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import array_of_numbers, is_sparse, is_torch
from sparsetir.utils.arguments import dtype_name, is_float, is_integer, shown

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
    names = [key for key, value in options.items() if value is not None]
    if names:
        raise ArgumentTypeError(
            f"{name}: expected no options for a sparse tensor, got {', '.join(names)}=. Leave it out."
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
    if ufunc.nin == 2 and ufunc.nout == 1:
        return _checked(operators.combine(ufunc, *inputs), name, inputs)
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
        changed = {key: value for key, value in options.items() if not any(value is d for d in DEFAULTS)}
        unknown = sorted(changed.keys() - allowed.keys())
        if unknown:
            fault = f"numpy.{name}: expected axis, {', '.join(allowed)} of a sparse tensor, got {unknown[0]}="
            raise ArgumentTypeError(f"{fault}. Leave it out.")
        return getattr(tensor, name)(axis, **changed)

    return reduce


def dot(a: Any, b: Any, out: Any = None) -> Any:
    """``numpy.dot`` of matrices and vectors, and of a number."""
    if out is not None:
        raise ArgumentTypeError("numpy.dot: expected no out= for a sparse tensor, got one. Leave it out.")
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return operators.multiply(a, b)
    if np.ndim(a) > 2 or np.ndim(b) > 2:
        raise ArgumentError("numpy.dot: expected matrices and vectors, got more dimensions. Call sparsetir.tensordot.")
    return operators.matmul(a, b)


def _rounded(tensor: Any, decimals: int = 0) -> Any:
    if not is_integer(decimals):
        raise ArgumentTypeError(f"decimals: expected a whole number, got {shown(decimals)}. Pass 2.")
    return mapped(lambda values: np.round(values, decimals), tensor)


def _clipped(tensor: Any, a_min: Any = None, a_max: Any = None, **ends: Any) -> Any:
    """``numpy.clip`` to an interval around zero."""
    low, high = ends.pop("min", a_min), ends.pop("max", a_max)
    if ends:
        raise ArgumentTypeError(f"numpy.clip: expected two ends for a sparse tensor, got {', '.join(ends)}=.")
    for name, end in (("min", low), ("max", high)):
        if end is not None and not operators.is_number(end):
            raise ArgumentTypeError(f"{name}: expected a number, got {shown(end)}. Pass one such as 1.0.")
    if (low is not None and not low <= 0) or (high is not None and not high >= 0):
        fault = f"numpy.clip: expected an interval around 0, got {low} to {high}"
        raise ArgumentError(f"{fault}. Others change elements that are not stored: call it with S.to_dense().")
    return mapped(lambda values: np.clip(values, low, high), tensor)


def _axis_of(axis: Any, dims: int) -> int:
    if not is_integer(axis):
        raise ArgumentTypeError(f"axis: expected an integer, got {shown(axis)}. Pass 0 or 1.")
    if not -dims <= axis < dims:
        raise ArgumentError(f"axis: expected one of {dims} dimensions, got {axis}. The first one is 0.")
    return int(axis) % dims


def _axes_of(axes: Any, dims: int) -> list[int]:
    distinct = [_axis_of(axis, dims) for axis in (axes if isinstance(axes, (tuple, list)) else (axes,))]
    if len(set(distinct)) < len(distinct):
        raise ArgumentError(f"axis: expected distinct dimensions, got {axes}. Name each once.")
    return distinct


def _moved(tensor: Any, source: Any, destination: Any) -> Any:
    """``numpy.moveaxis``."""
    taken, places = _axes_of(source, tensor.ndim), _axes_of(destination, tensor.ndim)
    if len(taken) != len(places):
        raise ArgumentError(f"destination: expected {len(taken)} axes, as in source, got {len(places)}.")
    order = [d for d in range(tensor.ndim) if d not in taken]
    for place, axis in sorted(zip(places, taken, strict=True)):
        order.insert(place, axis)
    return tensor.transpose(*order)


def _swapped(tensor: Any, axis1: Any, axis2: Any) -> Any:
    """``numpy.swapaxes``."""
    order = list(range(tensor.ndim))
    first, second = _axis_of(axis1, tensor.ndim), _axis_of(axis2, tensor.ndim)
    order[first], order[second] = second, first
    return tensor.transpose(*order)


def _squeezed(tensor: Any, axis: Any = None) -> Any:
    """``numpy.squeeze``."""
    gone = [d for d, n in enumerate(tensor.shape) if n == 1] if axis is None else _axes_of(axis, tensor.ndim)
    if any(tensor.shape[d] != 1 for d in gone):
        raise ArgumentError(f"axis: expected dimensions of extent 1, got {axis} of the shape {tensor.shape}.")
    return tensor[tuple(0 if d in gone else slice(None) for d in range(tensor.ndim))]


def _expanded(tensor: Any, axis: Any) -> Any:
    """``numpy.expand_dims``."""
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    new, rest = _axes_of(axes, tensor.ndim + len(axes)), iter(tensor.shape)
    return tensor.reshape([1 if d in new else next(rest) for d in range(tensor.ndim + len(axes))])


def _taken(tensor: Any, indices: Any, axis: Any = None) -> Any:
    """``numpy.take``."""
    if axis is None:
        return tensor.reshape(-1)[indices]
    return tensor[(slice(None),) * _axis_of(axis, tensor.ndim) + (indices,)]


def _stacked(operands: Any, axis: Any = 0) -> Any:
    """``numpy.stack``."""
    _check_operands("stack", operands)
    tensors = [as_tensor(value) for value in operands]
    if len({tensor.shape for tensor in tensors}) > 1:
        shapes = ", ".join(str(tensor.shape) for tensor in tensors)
        raise ArgumentError(f"operands: expected tensors of one shape, got {shapes}. numpy.stack joins equal shapes.")
    return _concatenated([_expanded(t, axis) for t in tensors], _axis_of(axis, tensors[0].ndim + 1))


def _triangle(tensor: Any, k: Any, *, is_lower: bool) -> Any:
    """``numpy.tril`` or ``numpy.triu``."""
    if tensor.ndim < 2 or not is_integer(k):
        raise ArgumentError(f"k: expected a whole number for a matrix, got {shown(k)} for {tensor.ndim} dimensions.")
    *_, rows, columns = tensor.coords
    beyond = columns.astype(np.int64) - rows
    inside = np.flatnonzero(beyond <= k if is_lower else beyond >= k)
    return of_entries(tensor, [c[inside] for c in tensor.coords], tensor.values[inside], tensor.shape)


def _kronecker(a: Any, b: Any) -> Any:
    """``numpy.kron`` of two sparse matrices."""
    if not (is_sparse(a) and is_sparse(b)) or len(a.shape) != 2 or len(b.shape) != 2:
        raise ArgumentTypeError("numpy.kron: expected two sparse matrices, got others. Convert a dense one.")
    matrices = [as_tensor(value).scipy_matrix for value in (a, b)]
    if not any(matrix is None for matrix in matrices):
        return SparseTensor.from_any(sp.kron(*matrices, format="csr"))
    product = einsum("ij,kl->ikjl", as_tensor(a), as_tensor(b), result="sparse")
    return product.reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])


def _outer(a: Any, b: Any) -> Any:
    """``numpy.outer`` of two vectors, or of all elements of others."""
    return einsum("i,j->ij", *(value if len(value.shape) == 1 else value.reshape(-1) for value in map(_array, (a, b))))


def _array(value: Any) -> Any:
    return value if is_sparse(value) or is_torch(value) else array_of_numbers(value, "an operand of numpy.outer")


REDUCTIONS = ("sum", "mean", "max", "min", "var", "std", "argmax", "argmin", "any", "all")
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(np, name): _reduction(name) for name in REDUCTIONS},
    np.amax: _reduction("max"),
    np.amin: _reduction("min"),
    np.dot: dot,
    np.transpose: lambda tensor, axes=None: tensor.transpose() if axes is None else tensor.transpose(*axes),
    np.diagonal: lambda tensor: tensor.diagonal(),
    np.trace: lambda tensor: tensor.trace(),
    np.reshape: lambda tensor, shape, order="C": tensor.reshape(shape, order=order),
    np.tensordot: lambda a, b, axes=2: tensordot(a, b, axes),
    np.vstack: lambda operands: vstack(operands),
    np.hstack: lambda operands: hstack(operands),
    np.concatenate: lambda operands, axis=0: _concatenated(operands, axis),
    np.real: lambda tensor: tensor.real,
    np.imag: lambda tensor: tensor.imag,
    np.einsum: lambda text, *operands: einsum(text, *operands),
    np.shape: lambda tensor: tensor.shape,
    np.ndim: lambda tensor: tensor.ndim,
    np.size: lambda tensor: int(np.prod(tensor.shape)),
    np.copy: lambda tensor: tensor.copy(),
    np.count_nonzero: lambda tensor: int(np.count_nonzero(tensor.values)),
    np.nonzero: lambda tensor: nonzero(tensor),
    np.argwhere: lambda tensor: np.stack(nonzero(tensor), axis=1),
    np.moveaxis: _moved,
    np.swapaxes: _swapped,
    np.squeeze: _squeezed,
    np.expand_dims: _expanded,
    np.take: _taken,
    np.stack: _stacked,
    np.tril: lambda tensor, k=0: _triangle(tensor, k, is_lower=True),
    np.triu: lambda tensor, k=0: _triangle(tensor, k, is_lower=False),
    np.kron: _kronecker,
    np.outer: _outer,
    np.round: _rounded,
    np.around: _rounded,
    np.clip: _clipped,
    np.linalg.norm: lambda tensor, ord=None, axis=None, keepdims=False: norm(tensor, ord, axis, keepdims),
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
        reason = str(error).replace(f"{FUNCTIONS[function].__name__}()", name)
        raise ArgumentTypeError(f"{name}: its form for sparse tensors takes other arguments: {reason}.") from None


# ------------------------------------------------------------------------------------------ reductions


Axis: TypeAlias = "int | tuple[int, ...] | None"


def _kept(tensor: SparseTensor, axis: Axis) -> str:
    """Return the letters that a reduction over `axis` keeps."""
    if axis is None:
        return ""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if not all(is_integer(d) for d in axes):
        raise ArgumentTypeError(f"an axis is a whole number, got {shown(axis)}")
    if any(not -tensor.ndim <= d < tensor.ndim for d in axes):
        raise ArgumentError(f"axis {axis} of a tensor of {tensor.ndim} dimensions")
    gone = {int(d) % tensor.ndim for d in axes}
    return "".join(c for d, c in enumerate(LETTERS[: tensor.ndim]) if d not in gone)


def total(tensor: SparseTensor, axis: Axis) -> Any:
    """Compute the sum; of bools and short integers in 64 bits, as numpy does."""
    if tensor.dtype.kind == "c":
        return _of_parts(total, tensor, axis)
    if tensor.dtype.kind in "biu" and tensor.dtype.itemsize < 8:
        tensor = astype(tensor, "uint64" if tensor.dtype.kind == "u" else "int64")
    if not _kept(tensor, axis) and tensor.dtype.itemsize >= 4:
        return tensor.values.sum()
    return einsum(f"{LETTERS[: tensor.ndim]}->{_kept(tensor, axis)}", tensor, result="dense")


def _of_parts(reduction: Callable[[SparseTensor, Axis], Any], tensor: SparseTensor, axis: Axis) -> Any:
    """Reduce complex numbers by a linear reduction of their parts; complex arithmetic makes NaN of infinite parts."""
    real, imag = (np.asarray(reduction(mapped(part, tensor), axis)) for part in (np.real, np.imag))
    joined = np.empty(real.shape, tensor.dtype)
    joined.real, joined.imag = real, imag
    return joined[()]


def mean(tensor: SparseTensor, axis: Axis) -> Any:
    """Return the mean along an axis, or of all elements; absent ones count as zero."""
    if tensor.dtype.kind == "c":
        return _of_parts(mean, tensor, axis)
    kept = _kept(tensor, axis)
    count = math.prod(n for c, n in zip(LETTERS, tensor.shape, strict=False) if c not in kept)
    dtype, wide = _in_floats(tensor)
    summed = total(wide, axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(summed / np.asarray(count, summed.dtype)).astype(dtype)[()]


def _in_floats(tensor: SparseTensor) -> tuple[np.dtype[Any], SparseTensor]:
    """Return the dtype of a mean, and the tensor in the dtype that it is computed in: 16 bits in float32."""
    dtype = tensor.dtype if is_float(tensor.dtype) else np.dtype("float64")
    wide = "float32" if dtype.itemsize == 2 else dtype.name
    return dtype, tensor if tensor.dtype.name == wide else astype(tensor, wide)


def extreme(tensor: SparseTensor, axis: Axis, which: str) -> Any:
    """Compute the largest or smallest element."""
    if tensor.dtype.kind == "c":
        raise ArgumentTypeError(f"{which}: expected real numbers, got {tensor.dtype}. Pass the real parts.")
    kept, name = _kept(tensor, axis), dtype_name(tensor.dtype)
    counted = [n for c, n in zip(LETTERS, tensor.shape, strict=False) if c not in kept]
    if 0 in counted:
        raise ArgumentError(f"{which} of an empty tensor is undefined: the shape is {tensor.shape}")
    join = np.maximum if which == "max" else np.minimum
    if not kept and tensor.dtype.kind in "iuf" and tensor.nnz:
        largest = join.reduce(tensor.values)
        return largest if tensor.nnz == math.prod(tensor.shape) else join(largest, tensor.dtype.type(0))
    if tensor.format.name == "csr" and kept == LETTERS[0] and tensor.shape[0] and tensor.dtype.kind in "iuf":
        matrix = tensor.scipy_matrix
        if matrix is not None:
            by_rows = matrix.max(axis=1) if which == "max" else matrix.min(axis=1)
            return by_rows.toarray().reshape(-1)
    low, high = LIMITS.get(name, (-math.inf, math.inf))
    text = f"{LETTERS[: tensor.ndim]}->{kept}"
    extremes = np.asarray(
        einsum(text, tensor, reduce=which, fill=low if which == "max" else high, result="dense"), tensor.dtype
    )
    stored = _stored_counts(tensor, kept)
    nan = _nan_where_stored(tensor, kept, extremes)
    with np.errstate(invalid="ignore"):  # NaN of bfloat16
        return join(np.where(stored < math.prod(counted), join(extremes, tensor.dtype.type(0)), extremes), nan)[()]


def _nan_where_stored(tensor: SparseTensor, kept: str, values: np.ndarray) -> Any:
    """Return NaN where an entry is NaN, as numpy's reductions do; else the value of `values`."""
    if not is_float(tensor.dtype) or not np.isnan(tensor.values).any():
        return values
    bad = astype(mapped(np.isnan, tensor), "float64")
    gone = tuple(d for d, c in enumerate(LETTERS[: tensor.ndim]) if c not in kept)
    return np.where(np.asarray(total(bad, gone)) > 0, tensor.dtype.type(np.nan), values)


def _stored_counts(tensor: SparseTensor, kept: str) -> np.ndarray:
    """Return the number of entries that are reduced to each element of a result."""
    return entry_counts(tensor, [LETTERS.index(c) for c in kept])


# ------------------------------------------------------------------ spread


def variance(tensor: SparseTensor, axis: Axis, ddof: float) -> Any:
    """Compute the mean of the squared distances from the mean; of integers in float64.

    The distances of entries are squared, those of the other elements are the mean itself: no digits cancel.
    """
    if not isinstance(ddof, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(f"ddof: expected a number, got {type(ddof).__name__}. Pass 0 or 1.")
    if tensor.dtype.kind == "c":
        return sum(variance(mapped(part, tensor), axis, ddof) for part in (np.real, np.imag))
    dtype, wide = _in_floats(tensor)
    kept = _kept(tensor, axis)
    count = _reduced(tensor, kept)
    with np.errstate(all="ignore"):
        center = np.asarray(mean(wide, axis))
        dims = tuple(tensor.coords[LETTERS.index(c)] for c in kept)
        squares = np.square(wide.values - center[dims])
        total_of = np.asarray(total(wide.with_values(squares), axis))
        missing = np.asarray(count - _stored_counts(tensor, kept))
        whole = total_of + np.where(missing > 0, missing * np.square(center), 0).astype(center.dtype)
        return np.asarray(whole / np.asarray(max(count - ddof, 0), center.dtype)).astype(dtype)[()]


def deviation(tensor: SparseTensor, axis: Axis, ddof: float) -> Any:
    """Compute the square root of the variance."""
    return np.sqrt(variance(tensor, axis, ddof))


def logsumexp(tensor: SparseTensor, axis: Axis) -> Any:
    """Compute the logarithm of the sum of exponentials; those of zeros that are not stored are 1."""
    if tensor.dtype.kind == "c":
        raise ArgumentTypeError(f"logsumexp: expected real numbers, got {tensor.dtype}. Pass the real parts.")
    dtype, wide = _in_floats(tensor)
    kept = _kept(tensor, axis)
    count = _reduced(tensor, kept)
    if not count:
        return np.full([n for c, n in zip(LETTERS, tensor.shape, strict=False) if c in kept], -np.inf, dtype)[()]
    with np.errstate(all="ignore"):
        top = np.asarray(extreme(wide, axis, "max"))
        shift = np.where(np.isfinite(top), top, 0).astype(top.dtype)
        dims = tuple(tensor.coords[LETTERS.index(c)] for c in kept)
        powers = np.asarray(total(wide.with_values(np.exp(wide.values - shift[dims])), axis))
        missing = np.asarray(count - _stored_counts(tensor, kept))
        absent = np.where(missing > 0, missing * np.exp(-shift), 0).astype(top.dtype)
        return np.asarray(np.log(powers + absent) + shift).astype(dtype)[()]


def _reduced(tensor: SparseTensor, kept: str) -> int | float:
    """Return how many elements are reduced to each element of a result; a float where int64 cannot hold it."""
    count = math.prod(n for c, n in zip(LETTERS, tensor.shape, strict=False) if c not in kept)
    return count if count < 2**63 else float(count)


# ------------------------------------------------------------------ truth, places and norms


def any_true(tensor: SparseTensor, axis: Axis) -> Any:
    """Return whether an element is not zero; NaN is not."""
    kept = _kept(tensor, axis)
    return np.asarray(_stored_counts(_without_zeros(tensor), kept) > 0)[()]


def all_true(tensor: SparseTensor, axis: Axis) -> Any:
    """Return whether no element is zero."""
    kept = _kept(tensor, axis)
    return np.asarray(_stored_counts(_without_zeros(tensor), kept) == _reduced(tensor, kept))[()]


def nonzero(tensor: SparseTensor) -> tuple[np.ndarray, ...]:
    """Return the coordinates of elements that are not zero, in row-major order."""
    if tensor.format.name == "csr" and (matrix := tensor.scipy_matrix) is not None:
        is_nonzero = np.asarray(tensor.values, bool)
        rows = np.repeat(np.arange(tensor.shape[0]), np.diff(matrix.indptr))
        return rows[is_nonzero], matrix.indices[is_nonzero].astype(np.int64)
    keys = np.sort(entry_keys(_without_zeros(tensor)).astype(np.int64))
    return tuple(np.unravel_index(keys, tensor.shape)) if len(keys) else (keys,) * tensor.ndim


def _without_zeros(tensor: SparseTensor) -> SparseTensor:
    nonzeros = np.flatnonzero(tensor.values)
    if len(nonzeros) == tensor.nnz:
        return tensor
    return of_entries(tensor, [c[nonzeros] for c in tensor.coords], tensor.values[nonzeros], tensor.shape)


def norm(tensor: SparseTensor, ord: Any, axis: Axis, keepdims: bool) -> Any:
    """Compute a norm of vectors along a dimension, or of a vector or a matrix, as `numpy.linalg.norm` does.

    Raises
    ------
    ArgumentError
        There is no such norm, or it needs singular values, which `scipy.sparse.linalg.svds` computes.
    """
    if ord is not None and ord != "fro" and not operators.is_number(ord):
        raise ArgumentError(f"ord: expected a number, 'fro' or None, got {shown(ord)}. For others call S.to_dense().")
    if axis is None and ord is None and tensor.dtype.kind in "iufc":
        result = np.linalg.norm(tensor.values)
        return keeping(tensor, axis, result) if keepdims else result
    sizes = mapped(np.abs, tensor if tensor.dtype.kind in "fcV" else astype(tensor, "float64"))
    axes = tuple(range(tensor.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if len(axes) == 1 or (axis is None and ord is None):
        result = _vector_norm(sizes, ord, axes)
    elif len(axes) == 2:
        result = _matrix_norm(sizes, ord, axes)
    else:
        raise ArgumentError(f"axis: expected one or two dimensions for ord={ord!r}, got {axes}. Pass axis=1.")
    return keeping(tensor, axis, result) if keepdims else result


def _vector_norm(sizes: SparseTensor, ord: Any, axis: Axis) -> Any:
    if ord == "fro":
        raise ArgumentError("ord: expected a number for vectors, got 'fro', a norm of matrices. Leave it out.")
    if ord in (math.inf, -math.inf):
        return extreme(sizes, axis, "max" if ord > 0 else "min")
    if ord == 0:
        return _stored_counts(_without_zeros(sizes), _kept(sizes, axis)).astype(sizes.dtype)[()]
    power = 2 if ord is None else ord
    if power < 0:
        raise ArgumentError(f"ord: expected a number from 0 on, got {ord}: elements that are not stored make it 0.")
    summed = total(sizes if power == 1 else mapped(lambda values: values**power, sizes), axis)
    return summed if power == 1 else np.sqrt(summed) if power == 2 else summed ** (1 / power)


def _matrix_norm(sizes: SparseTensor, ord: Any, axes: tuple[int, ...]) -> Any:
    if ord in (None, "fro"):
        return _vector_norm(sizes, None, axes)
    if ord not in (1, -1, math.inf, -math.inf) or sizes.ndim != 2:
        fault = f"ord: expected 1, inf, 'fro' or None, got {ord!r}"
        raise ArgumentError(f"{fault}. Call scipy.sparse.linalg.svds for singular values.")
    sums = np.asarray(total(sizes, axes[0] if abs(ord) == 1 else axes[1]))
    return (sums.max if ord > 0 else sums.min)()


# ------------------------------------------------------------------ places of extremes


class _Lines(NamedTuple):
    """Entries by the lines that are searched: of each entry its line, its place there, and its value."""

    number: int
    length: int
    line: np.ndarray
    place: np.ndarray
    values: np.ndarray


def _lines(tensor: SparseTensor, axis: int | None) -> tuple[_Lines, tuple[int, ...]]:
    """Return the entries in order of their lines and places, and the shape of the result."""
    values = tensor.values if tensor.dtype.name != "bfloat16" else tensor.values.astype("float32")
    if axis is None:
        keys = entry_keys(tensor).astype(np.int64)
        return _Lines(1, math.prod(tensor.shape), np.zeros(len(keys), np.int64), keys, values), ()
    d = axis % tensor.ndim
    shape = tuple(n for at, n in enumerate(tensor.shape) if at != d)
    dims = [tensor.coords[at].astype(np.int64) for at in range(tensor.ndim) if at != d]
    line = np.ravel_multi_index(dims, shape) if dims and tensor.nnz else np.zeros(tensor.nnz, np.int64)
    place = tensor.coords[d].astype(np.int64)
    if d == tensor.ndim - 1:
        return _Lines(math.prod(shape), tensor.shape[d], line, place, values), shape
    order = np.lexsort((place, line))
    return _Lines(math.prod(shape), tensor.shape[d], line[order], place[order], values[order]), shape


def place_of_extreme(tensor: SparseTensor, axis: int | None, which: str) -> Any:
    """Return the first place of the largest or smallest element; NaN is found before all others, as by numpy."""
    if axis is not None and (not is_integer(axis) or not -tensor.ndim <= axis < tensor.ndim):
        raise ArgumentError(f"axis: expected a dimension of {tensor.ndim}, or None, got {shown(axis)}. Pass one.")
    if tensor.dtype.kind == "c":
        raise ArgumentTypeError(f"arg{which}: expected real numbers, got {tensor.dtype}. Pass the real parts.")
    lines, shape = _lines(tensor, axis)
    if not lines.length:
        raise ArgumentError(f"arg{which} of an empty tensor is undefined: the shape is {tensor.shape}")
    places = np.zeros(lines.number, np.intp)
    if not lines.line.size:
        return places.reshape(shape)[()]
    starts = np.flatnonzero(np.diff(lines.line, prepend=-1))
    sizes = np.diff(starts, append=lines.line.size)
    reduce = np.maximum if which == "max" else np.minimum
    with np.errstate(invalid="ignore"):
        best = reduce.reduceat(lines.values, starts)
        is_better = best > 0 if which == "max" else best < 0
    of_entry = np.repeat(best, sizes)
    is_best = (lines.values == of_entry) | ((lines.values != lines.values) & (of_entry != of_entry))
    stored = _first(is_best, lines.place, starts, lines.length)
    rank = np.arange(lines.line.size) - np.repeat(starts, sizes)
    absent = np.minimum(
        _first(lines.place != rank, rank, starts, lines.length), np.where(sizes < lines.length, sizes, lines.length)
    )
    place = np.where(is_better | (best != best), stored, np.where(best == 0, np.minimum(stored, absent), absent))
    places[lines.line[starts]] = np.where(absent >= lines.length, stored, place)
    return places.reshape(shape)[()]


def _first(chosen: np.ndarray, places: np.ndarray, starts: np.ndarray, none: int) -> np.ndarray:
    """Return the first chosen place of each line, or `none`."""
    return np.minimum.reduceat(np.where(chosen, places, none), starts)


# ------------------------------------------------------------------ shapes of results


def keeping(tensor: SparseTensor, axis: Axis, result: Any) -> np.ndarray:
    """Return a result with the reduced dimensions, of extent 1."""
    kept = _kept(tensor, axis)
    return np.asarray(result).reshape([n if c in kept else 1 for c, n in zip(LETTERS, tensor.shape, strict=False)])


# ---------------------------------------------------------------------------------------------- shapes


def vstack(operands: Sequence[Any]) -> Any:
    """Stack sparse tensors along the first dimension; vectors are the rows of a matrix.

    Parameters
    ----------
    operands : sequence of sparse tensors
        Of scipy, of torch, `SparseTensor` or `CooTensor`, with the same extents in the other dimensions.

    Returns
    -------
    sparse tensor
        Of the class of the first operand and the common dtype; CSR if that is a matrix of scipy.

    Raises
    ------
    ArgumentTypeError
        An operand is not sparse.
    ArgumentError
        There is none, or the shapes do not fit.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> sparsetir.vstack([A, A[:1]]).toarray().tolist()
    [[0.0, 2.0], [3.0, 0.0], [0.0, 2.0]]
    """
    _check_operands("vstack", operands)
    rows = [like_class(v, as_tensor(v).reshape(1, *v.shape)) if len(v.shape) == 1 else v for v in operands]
    return _joined("vstack", rows, 0)


def hstack(operands: Sequence[Any]) -> Any:
    """Stack sparse tensors along the second dimension, vectors along their only one.

    Operands and result are as for `vstack`, except that of vectors the result is a vector.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> sparsetir.hstack([A, A]).toarray().tolist()
    [[0.0, 2.0, 0.0, 2.0], [3.0, 0.0, 3.0, 0.0]]
    """
    _check_operands("hstack", operands)
    return _joined("hstack", operands, min(len(operands[0].shape), 2) - 1)


def _concatenated(operands: Sequence[Any], axis: Any) -> Any:
    """``numpy.concatenate`` along one dimension."""
    dims = np.ndim(operands[0]) if isinstance(operands, (list, tuple)) and operands else 1
    return _joined("concatenate", operands, _axis_of(axis, dims))


def _joined(function: str, operands: Sequence[Any], axis: int) -> Any:
    _check_operands(function, operands)
    tensors = [as_tensor(v) for v in operands]
    shape = _joined_shape(function, [t.shape for t in tensors], axis)
    dtype = operators.joint_dtype(*tensors)
    is_wide = max(*shape, sum(t.nnz for t in tensors)) > np.iinfo(np.int32).max
    idtype = "int64" if is_wide or any(t.idtype == "int64" for t in tensors) else "int32"
    matrices = [t.scipy_matrix if t.format.name == "csr" else None for t in tensors]
    if len(shape) == 2 and not any(matrix is None for matrix in matrices):
        stacked = (sp.vstack, sp.hstack)[axis](matrices, format="csr", dtype=dtype)
        return like_class(operands[0], SparseTensor.from_any(stacked, "csr", idtype=idtype, check=False))
    starts = np.cumsum([0, *(t.shape[axis] for t in tensors)])
    coords = [
        np.concatenate(
            [c.astype(np.int64) + (start if d == axis else 0) for c, start in zip(parts, starts, strict=False)]
        )
        for d, parts in enumerate(zip(*(t.coords for t in tensors), strict=True))
    ]
    values = np.concatenate([t.values.astype(dtype) for t in tensors])
    result = SparseTensor.from_coo(coords, values, shape, idtype=idtype)
    return like_class(operands[0], result)


def _check_operands(function: str, operands: Any) -> None:
    if not isinstance(operands, (list, tuple)):
        kind = type(operands).__name__
        raise ArgumentTypeError(f"operands: expected a list of sparse tensors, got {kind}. Pass [A, B].")
    if not operands:
        raise ArgumentError(f"operands: expected at least one sparse tensor, got an empty list. {function} needs one.")
    for at, value in enumerate(operands):
        if not is_sparse(value):
            kind = type(value).__name__
            raise ArgumentTypeError(f"operand {at}: expected a sparse tensor, got {kind}. Convert it first.")


def _joined_shape(function: str, shapes: list[tuple[int, ...]], axis: int) -> tuple[int, ...]:
    first = shapes[0]
    if len(first) <= axis:
        raise ArgumentError(f"operand 0: expected at least {axis + 1} dimensions, got the shape {first}. Reshape it.")
    rest = [s[:axis] + s[axis + 1 :] for s in shapes]
    for at, other in enumerate(shapes):
        if len(other) != len(first) or rest[at] != rest[0]:
            fault = f"operand {at}: expected the extents of operand 0, {first}, besides dimension {axis}"
            raise ArgumentError(f"{fault}, got the shape {other}. {function} joins tensors that fit.")
    return (*first[:axis], sum(s[axis] for s in shapes), *first[axis + 1 :])


def reshape(tensor: SparseTensor, shape: tuple[Any, ...], order: Any = "C") -> SparseTensor:
    """Return the tensor with another shape, its elements in row-major order, or with ``order="F"`` in column-major."""
    if not isinstance(order, str) or order not in ("C", "F"):
        raise ArgumentError(f'order: expected "C" or "F", got {shown(order)}. Leave it out for row-major order.')
    extents = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    if not extents or not all(is_integer(n) and n >= -1 for n in extents) or extents.count(-1) > 1:
        fault = f"shape: expected extents, of which one may be -1, got {tuple(extents)}"
        raise ArgumentError(f"{fault}. Pass whole numbers.")
    size, stated = math.prod(tensor.shape), math.prod(int(n) for n in extents if n != -1)
    if -1 in extents and stated and size % stated == 0:
        extents[extents.index(-1)] = size // stated
    if -1 in extents or math.prod(int(n) for n in extents) != size:
        raise ArgumentError(f"shape: expected {size} elements, got {tuple(extents)}. The tensor is {tensor.shape}.")
    whole = tuple(int(n) for n in extents)
    if order == "F":
        return reshape(tensor.transpose(), (whole[::-1],)).transpose()
    keys = entry_keys(tensor).astype(np.int64)
    coords = np.unravel_index(keys, whole) if len(keys) else [keys] * len(whole)
    if max(whole) > np.iinfo(np.int32).max or tensor.idtype == "int64":
        return SparseTensor.from_coo(list(coords), tensor.values, whole, idtype="int64")
    return of_entries(tensor, coords, tensor.values, whole)


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Sum products over pairs of dimensions, as `numpy.tensordot` does, of sparse tensors or a sparse and a dense one.

    Parameters
    ----------
    a, b : array or sparse tensor
        At least one is sparse.
    axes : int or pair of sequences of int
        The last dimensions of `a` and as many first ones of `b`, or the dimensions of each.

    Returns
    -------
    array, sparse tensor or number
        A `SparseTensor` if both are sparse and a dimension is left, else dense.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        No operand is sparse, or the dimensions do not fit.

    Examples
    --------
    >>> import numpy as np, sparsetir
    >>> S = sparsetir.SparseTensor.from_dense(np.arange(8.0).reshape(2, 2, 2))
    >>> sparsetir.tensordot(S, np.ones((2, 2)), axes=2).tolist()
    [6.0, 22.0]
    """
    operands = [v if is_sparse(v) or is_torch(v) else array_of_numbers(v, name) for name, v in (("a", a), ("b", b))]
    if not any(map(is_sparse, operands)):
        raise ArgumentTypeError("a, b: expected a sparse tensor, got two dense arrays. Use numpy.tensordot.")
    return _tensordot(*operands, axes=axes)


@by_parts(complex_product)
def _tensordot(a: Any, b: Any, *, axes: Any) -> Any:
    """Sum products over pairs of dimensions; of complex operands by their parts."""
    operands = a, b
    first, second = (tuple(v.shape) for v in operands)
    left, right = _paired(axes, first, second)
    names = iter(LETTERS)
    of_a, of_b = [next(names) for _ in first], [next(names) for _ in second]
    for i, j in zip(left, right, strict=True):
        of_b[j] = of_a[i]
    kept = [c for d, c in enumerate(of_a) if d not in left] + [c for d, c in enumerate(of_b) if d not in right]
    both = all(map(is_sparse, operands)) and bool(kept)
    if both:
        return _sparse_tensordot(as_tensor(operands[0]), as_tensor(operands[1]), left, right)
    return einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept)}", *operands, result="dense")


def _sparse_tensordot(a: SparseTensor, b: SparseTensor, left: list[int], right: list[int]) -> SparseTensor:
    """Multiply the tensors as matrices, the paired dimensions as the inner one."""
    outer_a = [d for d in range(a.ndim) if d not in left]
    outer_b = [d for d in range(b.ndim) if d not in right]
    inner = math.prod(a.shape[d] for d in left)
    shape_a, shape_b = [a.shape[d] for d in outer_a], [b.shape[d] for d in outer_b]
    dtype = operators.joint_dtype(a, b)
    first = reshape(_permuted(cast(a, dtype), outer_a + left), (math.prod(shape_a), inner))
    second = reshape(_permuted(cast(b, dtype), right + outer_b), (inner, math.prod(shape_b)))
    product: SparseTensor = first @ second
    return reshape(product, tuple(shape_a + shape_b))


def _permuted(tensor: SparseTensor, order: list[int]) -> SparseTensor:
    return tensor if order == sorted(order) else tensor.transpose(*order)


def _names_dimensions(part: Any) -> bool:
    return is_integer(part) or isinstance(part, (tuple, list))


def _paired(axes: Any, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the dimensions of each operand that are summed over."""
    if is_integer(axes):
        if not 0 <= axes <= min(len(first), len(second)):
            raise ArgumentError(f"axes: expected at most {min(len(first), len(second))}, got {axes}. Pass fewer.")
        left, right = list(range(len(first) - axes, len(first))), list(range(axes))
    else:
        if not isinstance(axes, (tuple, list)) or len(axes) != 2 or not all(map(_names_dimensions, axes)):
            raise ArgumentTypeError(f"axes: expected a number or a pair, got {shown(axes)}. Pass ([1], [0]).")
        left, right = ([part] if is_integer(part) else list(part) for part in axes)
    for dims, shape in ((left, first), (right, second)):
        if not all(is_integer(d) and -len(shape) <= d < len(shape) for d in dims):
            raise ArgumentError(f"axes: expected dimensions of the shape {shape}, got {dims}. Count from 0.")
    left, right = [int(d) % len(first) for d in left], [int(d) % len(second) for d in right]
    is_paired = len(left) == len(right) and len(set(left)) == len(left) and len(set(right)) == len(right)
    if not is_paired or any(first[i] != second[j] for i, j in zip(left, right, strict=True)):
        fault = f"axes: expected pairs of equal extents, got {left} of {first} and {right} of {second}"
        raise ArgumentError(f"{fault}. Name each dimension once.")
    return left, right


__all__ = [
    "all_true",
    "any_true",
    "apply_function",
    "apply_ufunc",
    "deviation",
    "dot",
    "extreme",
    "hstack",
    "keeping",
    "logsumexp",
    "mean",
    "nonzero",
    "norm",
    "place_of_extreme",
    "reshape",
    "tensordot",
    "total",
    "variance",
    "vstack",
]
