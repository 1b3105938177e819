# SPDX-License-Identifier: Apache-2.0
"""Implementation of the operators of `SparseTensor`: products, sums, indexing and reductions, of complex values too.

Products and sums of complex operands, by their real and imaginary parts: kernels compute with real numbers.

All parts of an operand have its pattern. Patterns of results depend on patterns alone, so that parts of a result fit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import wraps
from numbers import Number
from string import ascii_lowercase as LETTERS
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir.einsum.expression import PRODUCT, einsum, evaluate_by_door, share_door
from sparsetir.einsum.steps import array_dtype, cast, transposed
from sparsetir.errors import ArgumentError, ArgumentTypeError, OutOfRangeError
from sparsetir.formats.canonical import add_duplicates, distinct_rows, has_hypersparse
from sparsetir.formats.tensor import MIN_HYPERSPARSE, SparseTensor
from sparsetir.interop import (
    CooTensor,
    array_of_numbers,
    check_detached,
    check_numbers,
    check_parts,
    compressed_of,
    holds_numbers,
    is_sparse,
    is_torch,
    open_source,
    to_torch,
)
from sparsetir.interop.arrays import changes
from sparsetir.runtime.validation import is_sound
from sparsetir.sparse_output import products
from sparsetir.utils.arguments import as_dtype, common_dtype, dtype_name, is_integer

REAL = {"complex64": "float32", "complex128": "float64"}


class ComplexParts(NamedTuple):
    """The real and the imaginary part of an operand; a real one has no imaginary part."""

    real: Any
    imag: Any


def _kind(value: Any) -> str:
    if is_torch(value):
        return "c" if value.is_complex() else "f"
    dtype = getattr(value, "dtype", None)
    return dtype.kind if isinstance(dtype, np.dtype) else ""


def has_complex(*operands: Any) -> bool:
    """Return whether an operand is complex, and all are of numpy, scipy, torch or a `SparseTensor`."""
    kinds = [_kind(v) for v in operands]
    return "c" in kinds and "" not in kinds


def by_parts(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of an operation of two operands: complex ones, which it refuses, go to `function`."""

    def decorate(operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def wrapper(A: Any, B: Any, *args: Any, **options: Any) -> Any:
            try:
                return operation(A, B, *args, **options)
            except ArgumentTypeError:
                if not has_complex(A, B):
                    raise
            return function(operation, A, B, *args, **options)

        return wrapper

    return decorate


def _parts(value: Any, dtype: str) -> ComplexParts:
    """Return the parts of an operand, as numbers of a real dtype."""
    if isinstance(value, SparseTensor):
        if value.dtype.kind != "c":
            return ComplexParts(value.astype(dtype), None)
        return ComplexParts(
            *(value.with_values(np.array(part, dtype)) for part in (value.values.real, value.values.imag))
        )
    if sp.issparse(value):
        open_source(value, "an operand").check("an operand")  # scipy copies what does not fit, or raises its own errors
        if value.dtype.kind != "c":
            return ComplexParts(add_duplicates(value).tocsr().astype(dtype), None)
        value = value.tocsr()
        arrays = value.indptr, value.indices
        parts = (np.array(part, dtype) for part in (value.data.real, value.data.imag))
        return ComplexParts(*(compressed_of(type(value), *arrays, part, value.shape) for part in parts))
    array = array_of_numbers(value, "an operand")
    if array.dtype.kind != "c":
        return ComplexParts(array.astype(dtype), None)
    return ComplexParts(array.real.astype(dtype), array.imag.astype(dtype))


def _real_dtype(*operands: Any) -> str:
    dtype = common_dtype(v.dtype.name for v in operands)
    if dtype not in REAL:
        raise ArgumentTypeError(f"A, B: expected complex64 or complex128, got {dtype}. Convert them by astype.")
    return REAL[dtype]


def _joined(real: Any, imag: Any, like: Any) -> Any:
    """Return a complex result of its parts; a sparse one of scipy in the format of an operand."""
    if isinstance(real, SparseTensor):
        return real.with_values(_complex(real.values, imag.values))
    if not sp.issparse(real):
        return _complex(real, imag)
    joined = compressed_of(type(real), real.indptr, real.indices, _complex(real.data, imag.data), real.shape)
    return joined.asformat(like.format) if sp.issparse(like) else joined


def _complex(real: Any, imag: Any) -> Any:
    result = np.empty(np.shape(real), np.result_type(np.asarray(real).dtype, np.complex64))
    result.real, result.imag = real, imag
    return result[()]


def _values(part: Any) -> np.ndarray:
    if isinstance(part, SparseTensor):
        return part.values
    return part.data if sp.issparse(part) else np.asarray(part)


def _with_values(part: Any, values: Any) -> Any:
    if isinstance(part, SparseTensor):
        return part.with_values(values)
    if sp.issparse(part):
        return compressed_of(type(part), part.indptr, part.indices, values, part.shape)
    return values


def _of_torch(function: Callable[..., Any], operation: Any, A: Any, B: Any, *args: Any, **options: Any) -> Any:
    """Compute with the memory of torch's operands, and return a tensor of torch where a real result would be one."""
    operands = [as_tensor(v) if is_sparse(v) else dense_operand(v, "an operand") if is_torch(v) else v for v in (A, B)]
    result = function(operation, *operands, *args, **options)
    if not isinstance(result, SparseTensor):
        return like_dense(np.asarray(result), A, B)
    like = A if is_sparse(A) else B
    return like_class(like, result)


def complex_product(operation: Callable[..., Any], A: Any, B: Any, **options: Any) -> Any:
    """Multiply by four real products, or by two where an operand is real."""
    if is_torch(A) or is_torch(B):
        return _of_torch(complex_product, operation, A, B, **options)
    if options.get("top") is not None or options.get("threshold") is not None:
        fault = "top, threshold: expected real values, which have an order, got complex ones"
        raise ArgumentTypeError(f"{fault}. Multiply without them.")
    dtype = _real_dtype(A, B)
    if is_sparse(A) and A.dtype.kind != "c" and type(B) is np.ndarray and B.ndim and not any(options.values()):
        return _real_times_complex(operation, A, B, np.dtype(dtype))
    a, b = _parts(A, dtype), _parts(B, dtype)
    term = lambda x, y: None if x is None or y is None else operation(x, y, **options)  # noqa: E731
    real, minus = term(a.real, b.real), term(a.imag, b.imag)
    imag = [part for part in (term(a.real, b.imag), term(a.imag, b.real)) if part is not None]
    if minus is not None:
        real = _with_values(real, _values(real) - _values(minus))
    whole = imag[0] if len(imag) == 1 else _with_values(imag[0], _values(imag[0]) + _values(imag[1]))
    return _joined(real, whole, A if sp.issparse(A) else B)


def _real_times_complex(operation: Callable[..., Any], A: Any, B: np.ndarray, dtype: np.dtype[Any]) -> Any:
    """Multiply a real matrix by a complex vector or matrix, whose parts are columns beside each other."""
    _check_product(A, B)
    kind, wanted = np.result_type(dtype, np.complex64), np.result_type(A.dtype, dtype)
    dense = np.ascontiguousarray(B, kind)
    columns = dense.reshape(*dense.shape, 1).view(dtype) if dense.ndim == 1 else dense.view(dtype)
    product = operation(A if A.dtype == wanted else cast(A, wanted.name), columns)
    product = np.ascontiguousarray(product, dtype).view(kind)
    return product[..., 0][()] if dense.ndim == 1 else product


def complex_sum(operation: Callable[..., Any], A: Any, B: Any, *args: Any, **options: Any) -> Any:
    """Add or subtract the real and the imaginary parts; a real operand has zeros for the latter."""
    if is_torch(A) or is_torch(B):
        return _of_torch(complex_sum, operation, A, B, *args, **options)
    dtype = _real_dtype(A, B)
    pairs = [_parts(v, dtype) for v in (A, B)]
    zeros = [p.real if p.imag is not None else _with_values(p.real, np.zeros_like(_values(p.real))) for p in pairs]
    imags = [p.imag if p.imag is not None else zero for p, zero in zip(pairs, zeros, strict=True)]
    real = operation(*(p.real for p in pairs), *args, **options)
    return _joined(real, operation(*imags, *args, **options), A if sp.issparse(A) else B)


INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))  # that scipy's loops take
# Columns of a dense operand up to which scipy's loops are faster than kernels and what these convert.
MAX_SCIPY_COLUMNS, MAX_DIAGONAL_COLUMNS = 4, 64


def product_by_scipy(A: Any, B: Any) -> np.ndarray | None:
    """Return the product of few columns and a complex matrix, or one by diagonals, by scipy; None for others.

    scipy makes one pass over the matrix. Kernels would make four over real parts, or convert diagonals in each call.
    """
    is_left = not isinstance(A, np.ndarray)
    value, dense = (A, B) if is_left else (B, A)
    if isinstance(value, SparseTensor):
        value = value.scipy_matrix
    if type(dense) is not np.ndarray or not sp.issparse(value) or value.ndim != 2 or dense.ndim not in (1, 2):
        return None
    inner = value.shape[1] if is_left else value.shape[0]
    columns = MAX_DIAGONAL_COLUMNS if value.format == "dia" else MAX_SCIPY_COLUMNS
    if dense.shape[0 if is_left else -1] != inner or dense.size > columns * inner:
        return None
    if not (value.dtype.isnative and dense.dtype.isnative) or max(value.shape) >= MIN_HYPERSPARSE:
        return None
    matrix = _for_scipy(value, dense.dtype.char, "A" if is_left else "B")
    if matrix is None:
        return None
    return np.ascontiguousarray(matrix @ dense if is_left else dense @ matrix)


def _for_scipy(value: Any, char: str, name: str) -> Any:
    """Return a valid matrix of distinct entries if scipy multiplies it, with numbers of a dtype, as kernels would."""
    if value.format == "dia":
        check_parts(value, name)
        offsets = value.offsets
        is_near = offsets.dtype.kind == "i" and int(np.abs(offsets).max(initial=0)) <= max(value.shape)
        is_alike = value.dtype.kind == np.dtype(char).kind and value.dtype.char in "fdFD"
        return value if is_near and is_alike else None
    if value.dtype.char not in "FD" or char not in "FD":
        return None
    index_arrays = (getattr(value, part, None) for part in ("indices", "indptr"))
    if any(array is not None and array.dtype not in INDEX_DTYPES for array in index_arrays):
        return None
    return distinct_rows(value, name, is_sound)


# ------------------------------------------------------------------------------------------- operators


FEW_ROWS = 1 << 16  # a slice of as many rows is made row by row, one of more rows than entries entry by entry


def is_number(value: Any) -> bool:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.ndim == 0 and holds_numbers(np.asarray(value))
    return isinstance(value, Number)


def _met(value: Any, of: np.dtype[Any]) -> Any:
    """Convert a number for numpy's promotion: fractions to floats, Python's numbers to dtypes like bfloat16.

    numpy promotes Python's numbers with its own dtypes only, not with bfloat16.
    """
    if not isinstance(value, (complex, np.generic, np.ndarray, int)):  # int: bool as well
        value = float(value)
    return of.type(value) if of.kind == "V" and type(value) in (int, float) else value


def as_tensor(value: Any) -> SparseTensor:
    """Return an operand as a tensor."""
    if isinstance(value, SparseTensor):
        return value
    if is_torch(value):
        check_detached(value, "an operand", "this operation")
    return SparseTensor.from_any(value)


def dense_operand(value: Any, name: str) -> np.ndarray:
    """Return a dense operand as an array; one of torch that requires grad is refused."""
    if is_torch(value):
        check_detached(value, name, "this operation")
    return array_of_numbers(value, name)


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


def joint_dtype(*operands: Any) -> Any:
    """Return the dtype of arrays in which the dtypes of operands meet."""
    return array_dtype(common_dtype([dtype_name(value.dtype) for value in operands]))


def like_dense(result: np.ndarray, *operands: Any) -> Any:
    """Return a dense result as a tensor of torch where the dense operand is one."""
    return to_torch(result) if any(is_torch(v) and not is_sparse(v) for v in operands) else result


def of_entries(like: SparseTensor, coords: Any, values: Any, shape: tuple[int, ...]) -> SparseTensor:
    """Return a tensor of entries, with index arrays of the same type as those of `like`."""
    return SparseTensor.from_any(CooTensor(np.stack(coords).astype(like.idtype, copy=False), values, shape))


def is_operand(value: Any) -> bool:
    return is_number(value) or is_sparse(value) or is_torch(value) or isinstance(value, (np.ndarray, list))


# ------------------------------------------------------------------ products


def matmul(left: Any, right: Any, precision: str | None = None) -> Any:
    """Compute ``left @ right``; of two sparse matrices a `SparseTensor`, else dense."""
    if precision is not None:
        return _matmul(left, right, precision)
    try:
        if type(left) is type(right) is SparseTensor:
            if left.format.name == right.format.name == "csr":
                _check_product(left, right)
                return SparseTensor.from_any(products.matmul(left.compressed, right.compressed), check=False)
        elif (product := evaluate_by_door(PRODUCT, (left, right))) is not None:
            return product
        product = product_by_scipy(left, right)
        return _matmul(left, right) if product is None else product
    except ArgumentTypeError:
        if not has_complex(left, right):
            raise
    return complex_product(matmul, left, right)


def _matmul(left: Any, right: Any, precision: str | None = None) -> Any:
    if not (is_operand(left) and is_operand(right)) or is_number(left) or is_number(right):
        return _undefined("@", left, right)
    left, right = (v if is_sparse(v) or is_torch(v) else array_of_numbers(v, "an operand of @") for v in (left, right))
    a, b = len(left.shape), len(right.shape)
    if not a or not b:
        raise ArgumentError("@: expected operands of at least one dimension, got a number. Multiply by it with *.")
    if (is_sparse(left) and a > 2) or (is_sparse(right) and b > 2):
        raise ArgumentError(f"@ multiplies matrices and vectors, got {a} and {b} dimensions: use sparsetir.einsum")
    _check_product(left, right)
    if is_sparse(left) and is_sparse(right) and a == b == 2:
        return SparseTensor.from_any(products.matmul(_compressed(left), _compressed(right)), check=False)
    inner, outer = "xy"[: min(a, 2)], "yz"[: min(b, 2)]
    inner, outer = ("y" if a == 1 else inner), ("y" if b == 1 else outer)
    rows = "..." if a > 2 or b > 2 else ""
    text = f"{rows if a > 2 else ''}{inner},{rows if b > 2 else ''}{outer}"
    text = f"{text}->{rows}{inner[:-1]}{outer[1:]}"
    if precision is not None:
        return einsum(text, left, right, result="dense", precision=precision)
    return _dense_product(text, left, right)


def _check_product(left: Any, right: Any) -> None:
    """Raise unless the inner dimensions of ``left @ right`` have one extent."""
    if left.shape[-1] != right.shape[-2 if len(right.shape) > 1 else 0]:
        raise ArgumentError(f"the shapes {tuple(left.shape)} and {tuple(right.shape)} do not fit @")


def _dense_product(text: str, left: Any, right: Any) -> Any:
    """Multiply a sparse and a dense operand, and keep the kernel for later products."""
    product = einsum(text, left, right, result="dense")
    share_door((text, int, ("sum", "mul", 0, "dense", None)), PRODUCT, (left, right))
    return product


def _undefined(sign: str, left: Any, right: Any) -> Any:
    """Leave an operation to the other operand; raise for linear operators, which take a tensor for an object array."""
    for value in (left, right):
        if not is_operand(value) and hasattr(value, "matvec"):
            fault = f"{sign}: expected an array or a sparse matrix, got {type(value).__name__}."
            raise ArgumentTypeError(f"{fault} Compose operators: wrap the tensor with sparsetir.linear_operator.")
    return NotImplemented


def _compressed(value: Any) -> Any:
    if not isinstance(value, SparseTensor):
        return value
    return value.to_scipy("coo" if has_hypersparse([value]) else "csr", copy=False)


@by_parts(complex_product)
def multiply(left: Any, right: Any) -> Any:
    """Compute ``left * right`` elementwise; an entry is stored where both store one."""
    if not (is_operand(left) and is_operand(right)):
        return _undefined("*", left, right)
    tensor, factor = (left, right) if isinstance(left, SparseTensor) else (right, left)
    if is_number(factor):
        if not isinstance(factor, int) and not np.isfinite(_met(factor, tensor.dtype)):
            raise ArgumentError(f"zeros that are not stored would not stay zero under * {factor}: use to_dense()")
        return _scaled(tensor, operator.mul, factor)
    if is_sparse(factor):
        if tuple(left.shape) != tuple(right.shape):
            return stretched(as_tensor(left), as_tensor(right))
        if tensor.ndim == 2:
            return SparseTensor.from_any(products.multiply(_compressed(left), _compressed(right)), check=False)
        return _common(tensor, as_tensor(factor))
    return over_dense(tensor, factor)


def divide(left: Any, right: Any) -> Any:
    """Compute ``left / right`` for a number or a dense array; entries are stored where `left` stores them."""
    if is_number(right):
        if right == 0 or right != right:
            raise ArgumentError(f"zeros that are not stored would not stay zero under / {right}: use to_dense()")
        return _scaled(left, operator.truediv, right)
    if is_sparse(right):
        raise ArgumentTypeError("division by a sparse tensor divides by the zeros that it does not store")
    if not is_operand(right):
        return NotImplemented
    shape, array = left.shape, dense_operand(right, "the divisor")
    if not _stretches(array.shape, shape):
        raise ArgumentError(f"an array of shape {array.shape} divides no sparse tensor of shape {shape}")
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.true_divide(left.values, np.broadcast_to(array, shape)[left.coords])
    return left.with_values(values)


def power(tensor: SparseTensor, number: Any) -> SparseTensor:
    """Compute ``tensor ** number`` of each element, for a number above zero."""
    if not is_number(number):
        return NotImplemented
    if isinstance(number, complex) or not number > 0:
        raise ArgumentError(f"zeros that are not stored would not stay zero under ** {number}: use to_dense()")
    return _scaled(tensor, operator.pow, number)  # the dtype of bool ** 2 is not that of np.power


def _scaled(tensor: SparseTensor, operation: Callable[[Any, Any], Any], number: Any) -> SparseTensor:
    """Combine each entry with a number, with the dtype and the values that numpy's operator gives."""
    return mapped(lambda values: operation(values, _met(number, tensor.dtype)), tensor)


def over_number(tensor: Any, number: Any) -> Any:
    """Multiply a sparse operand by a number; return its class, in the dtype that numpy gives the product."""
    if not is_torch(tensor):
        check_numbers(tensor, "the sparse operand of multiply")
    tensor_dtype = np.dtype(array_dtype(dtype_name(tensor.dtype)))
    number = _met(number, tensor_dtype)
    try:
        dtype = np.multiply(np.ones(0, tensor_dtype), number).dtype
    except OverflowError:
        raise ArgumentError(f"{number} is no {tensor_dtype.name}: convert one of the two first") from None
    return over_dense(tensor, np.asarray(number).astype(dtype))


def over_dense(tensor: Any, other: Any) -> Any:
    """Multiply a sparse operand by a dense array that broadcasts to its shape; return its class and pattern."""
    array = other if is_torch(other) else array_of_numbers(other, "the other operand")
    shape = tuple(tensor.shape)
    skipped = len(shape) - len(array.shape)
    if skipped < 0:
        raise ArgumentError(f"an array of {len(array.shape)} dimensions times a sparse one of {len(shape)}: use einsum")
    if any(n not in (1, extent) for n, extent in zip(array.shape, shape[skipped:], strict=True)):
        raise ArgumentError(f"an array of shape {tuple(array.shape)} does not stretch to the sparse one's, {shape}")
    letters = LETTERS[: len(shape)]
    last = zip(letters[skipped:], array.shape, shape[skipped:], strict=True)
    matching = [(letter, n) for letter, n, extent in last if n != 1 or extent == 1]
    array = array.reshape([n for _, n in matching])  # dimensions of one element are the same for all of the tensor's
    return einsum(f"{letters},{''.join(letter for letter, _ in matching)}->{letters}", tensor, array, result="sparse")


def _common(left: SparseTensor, right: SparseTensor) -> SparseTensor:
    """Multiply the entries that both tensors store."""
    first, second = entry_keys(left), entry_keys(right)
    _, a, b = np.intersect1d(first, second, assume_unique=True, return_indices=True)
    dtype = joint_dtype(left, right)
    values = np.multiply(left.values[a].astype(dtype), right.values[b].astype(dtype))
    return of_entries(left, [c[a] for c in left.coords], values, left.shape)


def stretched(left: SparseTensor, right: SparseTensor) -> SparseTensor:
    """Multiply tensors of which one is stretched along dimensions of extent 1, as numpy broadcasts."""
    try:
        shape = np.broadcast_shapes(left.shape, right.shape)
    except ValueError:
        check_same_shape(left, right)
    if shape not in (left.shape, right.shape):
        if left.ndim == right.ndim == 2:  # a column times a row
            column, row = (left, right) if left.shape[1] == 1 else (right, left)
            product: SparseTensor = matmul(column, row)
            return product
        raise ArgumentError(
            f"sparse tensors of the shapes {left.shape} and {right.shape}: one must have the shape {shape}"
        )
    whole, factor = (left, right) if left.shape == shape else (right, left)
    skipped = whole.ndim - factor.ndim
    dims = [d for d, n in enumerate(factor.shape) if n != 1]
    extents = tuple(factor.shape[d] for d in dims)
    factor_keys, whole_keys = (
        np.ravel_multi_index([t.coords[d + s].astype(np.int64) for d in dims], extents)
        if dims and t.nnz
        else np.zeros(t.nnz, np.int64)
        for t, s in ((factor, 0), (whole, skipped))
    )
    order = np.argsort(factor_keys)
    at = np.searchsorted(factor_keys, whole_keys, sorter=order)
    stored = np.flatnonzero(np.isin(whole_keys, factor_keys))
    chosen = order[at[stored]]
    dtype = joint_dtype(left, right)
    values = np.multiply(whole.values[stored].astype(dtype), factor.values[chosen].astype(dtype))
    return of_entries(whole, [c[stored] for c in whole.coords], values, shape)


def entry_keys(tensor: SparseTensor) -> np.ndarray:
    """Return one number for the coordinates of each entry."""
    if math.prod(tensor.shape) >= 2**63:
        raise ArgumentError(f"elements of a tensor of shape {tensor.shape} cannot be numbered in 64 bits")
    return (
        np.ravel_multi_index([c.astype(np.int64) for c in tensor.coords], tensor.shape) if tensor.nnz else np.zeros(0)
    )


def check_same_shape(left: Any, right: Any) -> None:
    """Raise for operands of different shapes."""
    if tuple(left.shape) != tuple(right.shape):
        raise ArgumentError(f"sparse tensors of the shapes {tuple(left.shape)} and {tuple(right.shape)} do not fit")


# ------------------------------------------------------------------ sums


@by_parts(complex_sum)
def add(left: Any, right: Any) -> Any:
    """Compute ``left + right``: stored where either is; dense with a dense array."""
    return _sum(left, right, 1)


@by_parts(complex_sum)
def subtract(left: Any, right: Any) -> Any:
    """Compute ``left - right``, stored as by `add`."""
    return _sum(left, right, -1)


def _sum(left: Any, right: Any, sign: int) -> Any:
    if not (is_operand(left) and is_operand(right)):
        return NotImplemented
    for value in (left, right):
        if is_number(value):
            if value != 0:
                raise ArgumentError(f"adding {value} changes every element: pass to_dense() + {value}")
            tensor = right if value is left else left
            return _scaled(-tensor if value is left and sign < 0 else tensor, operator.add, value)
    if not (is_sparse(left) and is_sparse(right)):
        return _dense_sum(left, right, sign)
    check_same_shape(left, right)
    a, b = as_tensor(left), as_tensor(right)
    dtype = sum_dtype(a, b, sign)
    if a.ndim == 2 and dtype.name != "bool":
        return SparseTensor.from_any(products.add(_compressed(left), _compressed(right), beta=sign), check=False)
    second = b.values.astype(dtype)
    values = np.concatenate([a.values.astype(dtype), second if sign > 0 else np.negative(second)])
    coords = [np.concatenate(pair) for pair in zip(a.coords, b.coords, strict=True)]
    return of_entries(a, coords, values, a.shape)


def sum_dtype(a: Any, b: Any, sign: int) -> np.dtype[Any]:
    """Return the dtype of a sum of two arrays or, for `sign` -1, of a difference."""
    dtype = np.dtype(joint_dtype(a, b))
    if dtype.name == "bool" and sign < 0:
        raise ArgumentTypeError("bools have no difference: convert one of them first, as by .astype('int8')")
    return dtype


def _dense_sum(left: Any, right: Any, sign: int) -> Any:
    tensor, other = (left, right) if isinstance(left, SparseTensor) else (right, left)
    array = dense_operand(other, "the other operand")
    shape = tensor.shape
    if not _stretches(array.shape, shape):
        raise ArgumentError(f"an array of shape {array.shape} plus a sparse tensor of {tensor.shape}: they do not fit")
    dtype = sum_dtype(array, tensor, sign)
    out, values = np.broadcast_to(array, shape).astype(dtype), tensor.values.astype(dtype)
    if sign > 0:
        out[tensor.coords] += values
    elif tensor is left:
        sums = values - out[tensor.coords]
        np.subtract(dtype.type(0), out, out=out)
        out[tensor.coords] = sums
    else:
        out[tensor.coords] -= values
    return like_dense(out, other)


# ------------------------------------------------------------------ one tensor


def mapped(function: Any, tensor: SparseTensor) -> SparseTensor:
    """Apply a function with f(0) = 0 to each entry; the format stays.

    Raises
    ------
    ArgumentError
        A number that the dtype of the entries does not hold.
    ArgumentTypeError
        numpy does not define the function for this dtype.
    """
    try:
        return tensor.with_values([np.asarray(function(piece.values)) for piece in tensor.pieces])
    except OverflowError as error:
        raise ArgumentError(f"{tensor.dtype} values: {error}. Convert them with astype first.") from None
    except TypeError as error:
        raise ArgumentTypeError(f"{tensor.dtype} values: {error}. Convert them with astype first.") from None


def astype(tensor: SparseTensor, dtype: Any) -> SparseTensor:
    """Convert the entries to another dtype."""
    return cast(tensor, as_dtype(dtype, "dtype"))


def transpose(tensor: SparseTensor, axes: Any) -> SparseTensor:
    """Return the tensor with its dimensions in another order.

    A matrix of rows becomes one of columns over the same index arrays, and the other way around.
    """
    axes_of = axes[0] if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)) else axes
    order = [int(d) % tensor.ndim for d in axes_of] if axes_of else list(reversed(range(tensor.ndim)))
    if sorted(order) != list(range(tensor.ndim)):
        raise ArgumentError(f"transpose names each of {tensor.ndim} dimensions once, got {tuple(axes_of)}")
    if order == [1, 0] and (matrix := tensor.scipy_matrix) is not None:
        flipped = matrix.T
        flipped.data = flipped.data.copy()
        return SparseTensor.from_any(flipped, flipped.format, idtype=tensor.idtype, check=False)
    moved: SparseTensor = transposed(tensor, order)
    return moved


_COMPARED_BY_SCIPY = {"less": operator.lt, "greater": operator.gt, "not_equal": operator.ne}  # false of two zeros
SIGNS = {"less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=", "equal": "==", "not_equal": "!="}


def compare(ufunc: np.ufunc, tensor: SparseTensor, other: Any) -> Any:
    """Compare each element with a number, another sparse tensor or a dense array.

    The result stores the entries for which the comparison is true; with a dense array it is dense.
    """
    if not is_number(other):
        if not is_operand(other):
            return NotImplemented
        return _compared_sparse(ufunc, tensor, other) if is_sparse(other) else _compared_dense(ufunc, tensor, other)
    _check_zeros(ufunc, ufunc(tensor.dtype.type(0), other), str(other))
    if (matrix := tensor.scipy_matrix) is not None:
        arrays = ufunc(matrix.data, other), matrix.indices.copy(), matrix.indptr.copy()
        compared = type(matrix)(arrays, shape=matrix.shape)
        compared.eliminate_zeros()
        return SparseTensor.from_any(compared, tensor.format.name, idtype=tensor.idtype, check=False)
    positions = np.flatnonzero(ufunc(tensor.values, other))
    return of_entries(tensor, [c[positions] for c in tensor.coords], np.ones(len(positions), np.bool_), tensor.shape)


def _check_zeros(ufunc: np.ufunc, is_true: Any, other: str) -> None:
    if is_true:
        fault = f"S {SIGNS[ufunc.__name__]} {other} is true of every element that is not stored"
        raise ArgumentError(f"{fault}: compare S.to_dense()")


def _compared_sparse(ufunc: np.ufunc, tensor: SparseTensor, other: Any) -> SparseTensor:
    """Compare two sparse tensors where either stores an entry."""
    check_same_shape(tensor, other)
    _check_zeros(ufunc, ufunc(0, 0), "R")
    other = as_tensor(other)
    left, right = tensor.scipy_matrix, other.scipy_matrix
    if left is None or right is None or tensor.dtype != other.dtype or tensor.dtype.char not in "fd":
        return _merged(ufunc, tensor, other)
    compared = _COMPARED_BY_SCIPY[ufunc.__name__](left, right)
    return SparseTensor.from_any(compared, "csr", idtype=tensor.idtype, check=False)


def _merged(ufunc: np.ufunc, left: SparseTensor, right: SparseTensor) -> SparseTensor:
    """Apply a ufunc where either operand stores an entry; results that are zero are not stored."""
    keys = np.concatenate([entry_keys(t).astype(np.int64) for t in (left, right)])
    order = np.argsort(keys, kind="stable")  # which merges two sorted runs in one pass
    ordered = keys[order]
    is_first = changes([ordered])
    places = np.empty(len(keys), np.int64)
    places[order] = np.cumsum(is_first) - 1
    sides = []
    for t, part in ((left, places[: left.nnz]), (right, places[left.nnz :])):
        values = np.zeros(int(is_first.sum()), t.dtype)
        values[part] = t.values
        sides.append(values)
    results = ufunc(*sides)
    positions = np.flatnonzero(results)
    stored = ordered[is_first][positions]
    coords = np.unravel_index(stored, left.shape) if len(stored) else [stored] * left.ndim
    return of_entries(left, list(coords), results[positions], left.shape)


def combine(ufunc: np.ufunc, left: Any, right: Any) -> Any:
    """Apply a ufunc of two arguments to sparse tensors of one shape, or to one and a number or a dense array.

    The result is sparse, without zeros among its entries, or dense where an operand is a dense array.

    Raises
    ------
    ArgumentError
        Elements that no operand stores would not be zero, or the shapes do not fit.
    ArgumentTypeError
        numpy does not define the ufunc for these dtypes.
    """
    if not (is_operand(left) and is_operand(right)):
        return NotImplemented
    dense = [dense_operand(v, "the other operand") for v in (left, right) if not (is_number(v) or is_sparse(v))]
    tensor = as_tensor(left if is_sparse(left) else right)
    if dense:
        _check_stretches(dense[0], tensor)
    try:
        if is_sparse(left) and is_sparse(right):
            check_same_shape(left, right)
            sides = as_tensor(left), as_tensor(right)
            _check_combined(ufunc, *(np.zeros(1, t.dtype) for t in sides))
            return _merged(ufunc, *sides)
        if dense:
            with np.errstate(all="ignore"):  # for zeros that meet the array: only entries may warn
                zeros = [np.zeros((), tensor.dtype) if is_sparse(v) else dense[0] for v in (left, right)]
                result = np.array(np.broadcast_to(ufunc(*zeros), tensor.shape))
            array = np.broadcast_to(dense[0], tensor.shape)[tensor.coords]
            result[tensor.coords] = ufunc(*(tensor.values if is_sparse(v) else array for v in (left, right)))
            return like_dense(result, left, right)
        _check_combined(ufunc, *(np.zeros(1, tensor.dtype) if is_sparse(v) else v for v in (left, right)))
        return mapped(lambda values: ufunc(*(values if is_sparse(v) else v for v in (left, right))), tensor)
    except TypeError as error:
        if isinstance(error, ArgumentTypeError):
            raise
        raise ArgumentTypeError(f"numpy.{ufunc.__name__}: {error}. Convert the values with astype first.") from None


def _check_combined(ufunc: np.ufunc, first: Any, second: Any) -> None:
    """Raise where elements that are not stored would become something else than zero."""
    with np.errstate(all="ignore"):
        of_zero = ufunc(first, second)[0]
    if of_zero != 0 or of_zero != of_zero:
        fault = f"numpy.{ufunc.__name__} makes {of_zero} of elements that are not stored"
        raise ArgumentError(f"{fault}. Call it with S.to_dense().")


def _stretches(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Return whether an array of a shape broadcasts to another one."""
    if len(shape) > len(to):
        return False
    return all(n in (1, extent) for n, extent in zip(shape, to[len(to) - len(shape) :], strict=True))


def _check_stretches(array: np.ndarray, tensor: SparseTensor) -> None:
    if not _stretches(array.shape, tensor.shape):
        fault = f"an array of shape {array.shape} and a sparse tensor of {tensor.shape}"
        raise ArgumentError(f"{fault}: they do not fit")


def _compared_dense(ufunc: np.ufunc, tensor: SparseTensor, other: Any) -> Any:
    """Compare every element with that of a dense array, which broadcasts to the shape of the tensor."""
    array = dense_operand(other, "the other operand")
    _check_stretches(array, tensor)
    result = np.array(np.broadcast_to(ufunc(np.zeros((), tensor.dtype), array), tensor.shape))
    result[tensor.coords] = ufunc(tensor.values, np.broadcast_to(array, tensor.shape)[tensor.coords])
    return like_dense(result, other)


def sliced(tensor: SparseTensor, index: Any) -> Any:
    """Index a tensor: dimensions by an index, which removes them, or a slice; one by a list of indices or of bools."""
    asked = list(index) if isinstance(index, tuple) else [index]
    result = _sliced_in_place(tensor, asked.copy())
    if not isinstance(result, SparseTensor) or not _is_separated(asked):
        return result
    at = 0  # of the list's dimension, which comes first in numpy, too
    for part in asked:
        if part is Ellipsis:
            at += tensor.ndim - sum(other is not None and other is not Ellipsis for other in asked)
        elif part is None or isinstance(part, slice):
            at += 1
        elif not is_integer(part):
            break
    return transpose(result, [[at, *(d for d in range(result.ndim) if d != at)]])


def _is_separated(asked: list[Any]) -> bool:
    """Return whether slices or new dimensions lie between a list and an integer, which numpy takes for lists then."""
    places = [n for n, at in enumerate(asked) if not (at is None or at is Ellipsis or isinstance(at, slice))]
    has_list = any(not is_integer(asked[n]) for n in places)
    return has_list and places[-1] - places[0] >= len(places)


def _sliced_in_place(tensor: SparseTensor, asked: list[Any]) -> Any:
    """Index a tensor, with the dimension of a list where the list is."""
    if any(at is None for at in asked):
        return _with_new_dimensions(tensor, asked)
    if (dots := sum(at is Ellipsis for at in asked)) > 1 or len(asked) - dots > tensor.ndim:
        raise ArgumentError(f"{len(asked)} indices of a tensor of {tensor.ndim} dimensions")
    place = next((n for n, at in enumerate(asked) if at is Ellipsis), len(asked))
    asked[place : place + 1] = [slice(None)] * (tensor.ndim - len(asked) + dots)
    lists = [d for d, at in enumerate(asked) if not (is_integer(at) or isinstance(at, slice))]
    if len(lists) > 1:
        raise ArgumentTypeError("a sparse tensor is sliced by one list at a time: slice the result again")
    if all(is_integer(at) for at in asked):
        return _element(tensor, tuple(asked))
    if tensor.ndim == 2 and not is_integer(asked[0]) and (matrix := tensor.scipy_matrix) is not None:
        return _of_matrix(tensor, matrix, asked[0], asked[1])
    others = [slice(None) if d in lists else at for d, at in enumerate(asked)]
    if not any(at != slice(None) for at in others[1:]) and lists in ([], [0]):
        return _rows(tensor, asked[0])
    if lists == [0]:
        return _within(_rows(tensor, asked[0]), others)
    if others[0] != slice(None):  # of all entries only those in the rows are read
        first: Any = others[0]
        chosen = slice(first, first + 1 or None) if is_integer(first) else first
        tensor, others[0] = _rows(tensor, chosen), 0 if is_integer(first) else slice(None)
    part = tensor if all(at == slice(None) for at in others) else _within(tensor, others)
    if not lists:
        return part
    at = sum(not is_integer(index) for index in asked[: lists[0]])  # where the dimension is among those that are left
    first = [at, *(d for d in range(part.ndim) if d != at)]
    return transpose(_rows(transpose(part, [first]), asked[lists[0]]), [np.argsort(first).tolist()])


def _with_new_dimensions(tensor: SparseTensor, asked: list[Any]) -> SparseTensor:
    """Index a tensor, and put a dimension of extent 1 at each None."""
    sliced = _sliced_in_place(tensor, [at for at in asked if at is not None])
    if not isinstance(sliced, SparseTensor):
        sliced = SparseTensor.from_dense(np.asarray(sliced).reshape(1))
        return sliced.reshape((1,) * sum(at is None for at in asked))
    shape, extents = [], list(sliced.shape)
    kept = [at for at in asked if at is None or at is Ellipsis or not is_integer(at)]
    for at in kept:
        if at is None:
            shape.append(1)
        elif at is Ellipsis:
            after = sum(other is not None for other in kept[kept.index(Ellipsis) + 1 :])
            shape += extents[: len(extents) - after]
            extents = extents[len(extents) - after :]
        else:
            shape.append(extents.pop(0))
    return sliced.reshape((*shape, *extents))


def _of_matrix(tensor: SparseTensor, matrix: Any, rows: Any, columns: Any) -> SparseTensor:
    """Return rows and columns of a matrix by slices and lists, or one of its columns."""
    (m, n), whole, own = tensor.shape, slice(None), matrix
    if is_integer(columns) and not -n <= columns < n:
        raise ArgumentError(f"index {columns} of dimension 1, which has {n}")
    rows = rows if isinstance(rows, slice) else _chosen(rows, m)
    matrix = matrix if isinstance(rows, slice) and rows == whole else matrix[rows]
    if is_integer(columns):
        column = matrix[:, [columns % n]].tocsr()
        places = np.repeat(np.arange(matrix.shape[0]), np.diff(column.indptr))
        return of_entries(tensor, [places], column.data, (matrix.shape[0],))
    columns = columns if isinstance(columns, slice) else _chosen(columns, n)
    matrix = matrix if isinstance(columns, slice) and columns == whole else matrix[:, columns]
    matrix = matrix.copy() if matrix is own else matrix
    matrix.has_sorted_indices = _ascends(columns if matrix.format == "csr" else rows)
    matrix.sort_indices()
    matrix.has_canonical_format = True
    return SparseTensor.from_any(matrix, tensor.format.name, idtype=tensor.idtype, check=False)


def _ascends(chosen: Any) -> bool:
    """Return whether a slice or a list of places leaves an order as it is."""
    if isinstance(chosen, slice):
        return chosen.step is None or chosen.step > 0
    return bool((np.diff(chosen) >= 0).all())


def _within(tensor: SparseTensor, asked: list[Any]) -> SparseTensor:
    """Return the entries at indices and in slices."""
    is_selected, coords, shape = np.ones(tensor.nnz, np.bool_), [], []
    for d, (at, c, n) in enumerate(zip(asked, tensor.coords, tensor.shape, strict=True)):
        if is_integer(at):
            if not -n <= at < n:
                raise ArgumentError(f"index {at} of dimension {d}, which has {n}")
            is_selected &= c == at % n
            continue
        span = range(n)[at]
        place, rest = np.divmod(c.astype(np.int64) - span.start, span.step)
        is_selected &= (rest == 0) & (place >= 0) & (place < len(span))
        coords.append(place)
        shape.append(len(span))
    return of_entries(tensor, [c[is_selected] for c in coords], tensor.values[is_selected], tuple(shape))


def _rows(tensor: SparseTensor, index: Any) -> Any:
    """Return some rows: an index removes the dimension, a slice or a list of indices keeps it."""
    m = tensor.shape[0]
    if is_integer(index):
        return _one_row(tensor, int(index))
    if isinstance(index, slice):
        span = range(m)[index]
        if len(span) > tensor.nnz + FEW_ROWS:
            return _within(tensor, [index, *[slice(None)] * (tensor.ndim - 1)])
        chosen = np.arange(span.start, span.stop, span.step)
    else:
        chosen = _chosen(index, m)
    starts, ends = _bounds(tensor, chosen)
    sizes = ends - starts
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    entries = np.repeat(starts - indptr[:-1], sizes) + np.arange(int(indptr[-1]))
    return _of_rows(tensor, indptr, entries, len(chosen))


def _bounds(tensor: SparseTensor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the entries of rows begin and end, without reading those of other rows."""
    indptr = vars(tensor.entries).get("indptr")
    if indptr is not None:
        return indptr[rows].astype(np.int64), indptr[rows + 1].astype(np.int64)
    first = tensor.coords[0]
    return np.searchsorted(first, rows), np.searchsorted(first, rows, side="right")


def _of_rows(tensor: SparseTensor, indptr: np.ndarray, entries: np.ndarray, count: int) -> SparseTensor:
    """Return the tensor of some entries, whose rows begin at `indptr`."""
    shape = (count, *tensor.shape[1:])
    if tensor.ndim != 2 or tensor.nnz == 0:
        coords = [np.repeat(np.arange(count), np.diff(indptr)), *(c[entries] for c in tensor.coords[1:])]
        return of_entries(tensor, coords, tensor.values[entries], shape)
    offsets, columns = (a.astype(tensor.idtype, copy=False) for a in (indptr, tensor.entries.last[entries]))
    matrix = compressed_of(sp.csr_array, offsets, columns, tensor.values[entries], shape)
    return SparseTensor.from_any(matrix, "csr", idtype=tensor.idtype, check=False)


def _element(tensor: SparseTensor, index: tuple[int, ...]) -> Any:
    """Return one element; zero if it is not stored."""
    if any(not -n <= at < n for at, n in zip(index, tensor.shape, strict=True)):
        raise OutOfRangeError(f"element {index} of a tensor of shape {tensor.shape}")
    first, *others = (at % n for at, n in zip(index, tensor.shape, strict=True))
    (begin,), (end,) = _bounds(tensor, np.array([first]))
    is_selected = np.ones(end - begin, np.bool_)
    for d, at in enumerate(others, 1):
        is_selected &= _coordinate(tensor, d)[begin:end] == at
    return tensor.values[begin:end][is_selected].sum(dtype=tensor.dtype)


def _coordinate(tensor: SparseTensor, dim: int) -> np.ndarray:
    """Return the coordinates of one dimension; the last one's are stored, others may have to be expanded."""
    return np.asarray(tensor.entries.last if dim == tensor.ndim - 1 else tensor.coords[dim])


def diagonal(tensor: SparseTensor) -> np.ndarray:
    """Return the elements of a matrix whose coordinates are equal."""
    if tensor.ndim != 2:
        raise ArgumentError(f"the diagonal is that of a matrix, got {tensor.ndim} dimensions")
    matrix = tensor.scipy_matrix
    if matrix is not None:
        return np.asarray(matrix.diagonal())
    i, j = tensor.coords
    is_diagonal, diagonal = i == j, np.zeros(min(tensor.shape), tensor.dtype)
    diagonal[i[is_diagonal]] = tensor.values[is_diagonal]
    return diagonal


def _chosen(index: Any, m: int) -> np.ndarray:
    places = array_of_numbers(index, "index")
    if places.ndim != 1 or (places.dtype.kind not in "iub" and places.size):
        raise ArgumentTypeError("rows are chosen by an index, a slice, a list of indices or one of bools")
    if places.dtype == bool and len(places) != m:
        raise ArgumentError(f"a list of bools chooses among {m} rows, got {len(places)}")
    if places.dtype == bool:
        return np.flatnonzero(places)
    if places.size and not (places.min() >= -m and places.max() < m):
        raise OutOfRangeError(f"row indices must lie in [-{m}, {m}), got {places.min()} to {places.max()}")
    rows = places.astype(np.int64)
    return np.where(rows < 0, rows + m, rows)


def _one_row(tensor: SparseTensor, index: int) -> Any:
    m = tensor.shape[0]
    if not -m <= index < m:
        raise OutOfRangeError(f"row {index} of a tensor of {m} rows")
    (begin,), (end,) = _bounds(tensor, np.array([index % m]))
    if tensor.ndim == 1:
        return tensor.values[begin:end].sum(dtype=tensor.dtype)
    coords = [_coordinate(tensor, d)[begin:end] for d in range(1, tensor.ndim)]
    return of_entries(tensor, coords, tensor.values[begin:end], tensor.shape[1:])


__all__ = [
    "SparseTensor",
    "add",
    "as_tensor",
    "by_parts",
    "check_same_shape",
    "combine",
    "compare",
    "complex_product",
    "complex_sum",
    "dense_operand",
    "diagonal",
    "divide",
    "entry_keys",
    "has_complex",
    "like_class",
    "like_dense",
    "matmul",
    "multiply",
    "of_entries",
    "over_dense",
    "over_number",
    "power",
    "product_by_scipy",
    "sliced",
    "stretched",
    "subtract",
    "transpose",
]
