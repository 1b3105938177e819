# SPDX-License-Identifier: Apache-2.0
"""Shapes of sparse tensors: `vstack`, `hstack`, reshaping, and `tensordot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_lowercase as LETTERS
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.einsum.expression import einsum
from sparsetir.einsum.operators import entry_keys, is_index, of_entries
from sparsetir.einsum.steps import array_dtype, cast
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import array_of_numbers, is_sparse, is_torch
from sparsetir.utils.arguments import common_dtype, dtype_name, shown


def vstack(operands: Sequence[Any]) -> Any:
    """Stack sparse tensors along the first dimension.

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
    return _joined("vstack", operands, 0)


def hstack(operands: Sequence[Any]) -> Any:
    """Stack sparse tensors along the second dimension; operands and result are as for `vstack`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> sparsetir.hstack([A, A]).toarray().tolist()
    [[0.0, 2.0, 0.0, 2.0], [3.0, 0.0, 3.0, 0.0]]
    """
    return _joined("hstack", operands, 1)


def _joined(function: str, operands: Sequence[Any], axis: int) -> Any:
    if not isinstance(operands, (list, tuple)):
        kind = type(operands).__name__
        raise ArgumentTypeError(f"operands: expected a list of sparse tensors, got {kind}. Pass [A, B].")
    if not operands:
        raise ArgumentError(f"operands: expected at least one sparse tensor, got an empty list. {function} needs one.")
    for at, value in enumerate(operands):
        if not is_sparse(value):
            kind = type(value).__name__
            raise ArgumentTypeError(f"operand {at}: expected a sparse tensor, got {kind}. Convert it first.")
    tensors = [_tensor(v) for v in operands]
    shape = _joined_shape(function, [t.shape for t in tensors], axis)
    dtype = array_dtype(common_dtype([dtype_name(t.dtype) for t in tensors]))
    starts = np.cumsum([0, *(t.shape[axis] for t in tensors)])
    coords = [
        np.concatenate(
            [c.astype(np.int64) + (start if d == axis else 0) for c, start in zip(parts, starts, strict=False)]
        )
        for d, parts in enumerate(zip(*(t.coords for t in tensors), strict=True))
    ]
    values = np.concatenate([t.values.astype(dtype) for t in tensors])
    is_wide = max(*shape, len(values)) > np.iinfo(np.int32).max or any(t.idtype == "int64" for t in tensors)
    result = SparseTensor.from_coo(coords, values, shape, idtype="int64" if is_wide else "int32")
    return like_class(operands[0], result)


def _tensor(value: Any) -> SparseTensor:
    return value if isinstance(value, SparseTensor) else SparseTensor.from_any(value)


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


def like_class(like: Any, tensor: SparseTensor) -> Any:
    """Return a tensor as an object of the class of an operand: of scipy's in CSR, or in lists where it is no matrix."""
    if isinstance(like, SparseTensor):
        return tensor
    if is_torch(like):
        return tensor.to_torch()
    if not sp.issparse(like):
        return tensor.to_coo()
    result = tensor.to_scipy(copy=False)
    return result if isinstance(like, sp.sparray) else sp.csr_matrix(result)


def reshape(tensor: SparseTensor, shape: tuple[Any, ...]) -> SparseTensor:
    """Return the tensor with another shape, its elements in row-major order."""
    extents = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    if not extents or not all(is_index(n) and n >= -1 for n in extents) or extents.count(-1) > 1:
        fault = f"shape: expected extents, of which one may be -1, got {tuple(extents)}"
        raise ArgumentError(f"{fault}. Pass whole numbers.")
    size, stated = math.prod(tensor.shape), math.prod(int(n) for n in extents if n != -1)
    if -1 in extents and stated and size % stated == 0:
        extents[extents.index(-1)] = size // stated
    if -1 in extents or math.prod(int(n) for n in extents) != size:
        raise ArgumentError(f"shape: expected {size} elements, got {tuple(extents)}. The tensor is {tensor.shape}.")
    whole = tuple(int(n) for n in extents)
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
    first, second = (tuple(v.shape) for v in operands)
    left, right = _paired(axes, first, second)
    names = iter(LETTERS)
    of_a, of_b = [next(names) for _ in first], [next(names) for _ in second]
    for i, j in zip(left, right, strict=True):
        of_b[j] = of_a[i]
    kept = [c for d, c in enumerate(of_a) if d not in left] + [c for d, c in enumerate(of_b) if d not in right]
    both = all(map(is_sparse, operands)) and bool(kept)
    if both:
        return _sparse_tensordot(_tensor(operands[0]), _tensor(operands[1]), left, right)
    return einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept)}", *operands, result="dense")


def _sparse_tensordot(a: SparseTensor, b: SparseTensor, left: list[int], right: list[int]) -> SparseTensor:
    """Multiply the tensors as matrices, the paired dimensions as the inner one."""
    outer_a = [d for d in range(a.ndim) if d not in left]
    outer_b = [d for d in range(b.ndim) if d not in right]
    inner = math.prod(a.shape[d] for d in left)
    shape_a, shape_b = [a.shape[d] for d in outer_a], [b.shape[d] for d in outer_b]
    dtype = array_dtype(common_dtype([dtype_name(a.dtype), dtype_name(b.dtype)]))
    first = reshape(_permuted(cast(a, dtype), outer_a + left), (math.prod(shape_a), inner))
    second = reshape(_permuted(cast(b, dtype), right + outer_b), (inner, math.prod(shape_b)))
    product: SparseTensor = first @ second
    return reshape(product, tuple(shape_a + shape_b))


def _permuted(tensor: SparseTensor, order: list[int]) -> SparseTensor:
    return tensor if order == sorted(order) else tensor.transpose(*order)


def _names_dimensions(part: Any) -> bool:
    return is_index(part) or isinstance(part, (tuple, list))


def _paired(axes: Any, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the dimensions of each operand that are summed over."""
    if is_index(axes):
        if not 0 <= axes <= min(len(first), len(second)):
            raise ArgumentError(f"axes: expected at most {min(len(first), len(second))}, got {axes}. Pass fewer.")
        left, right = list(range(len(first) - axes, len(first))), list(range(axes))
    else:
        if not isinstance(axes, (tuple, list)) or len(axes) != 2 or not all(map(_names_dimensions, axes)):
            raise ArgumentTypeError(f"axes: expected a number or a pair, got {shown(axes)}. Pass ([1], [0]).")
        left, right = ([part] if is_index(part) else list(part) for part in axes)
    for dims, shape in ((left, first), (right, second)):
        if not all(is_index(d) and -len(shape) <= d < len(shape) for d in dims):
            raise ArgumentError(f"axes: expected dimensions of the shape {shape}, got {dims}. Count from 0.")
    left, right = [int(d) % len(first) for d in left], [int(d) % len(second) for d in right]
    is_paired = len(left) == len(right) and len(set(left)) == len(left) and len(set(right)) == len(right)
    if not is_paired or any(first[i] != second[j] for i, j in zip(left, right, strict=True)):
        fault = f"axes: expected pairs of equal extents, got {left} of {first} and {right} of {second}"
        raise ArgumentError(f"{fault}. Name each dimension once.")
    return left, right


__all__ = ["hstack", "like_class", "reshape", "tensordot", "vstack"]
