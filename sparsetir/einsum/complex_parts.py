# SPDX-License-Identifier: Apache-2.0
"""Products and sums of complex operands, by their real and imaginary parts: kernels compute with real numbers.

All parts of an operand have its pattern. Patterns of results depend on patterns alone, so that parts of a result fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import ArgumentTypeError
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop import compressed_of

REAL = {"complex64": "float32", "complex128": "float64"}


class Parts(NamedTuple):
    """The real and the imaginary part of an operand; a real one has no imaginary part."""

    real: Any
    imag: Any


def _kind(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return dtype.kind if isinstance(dtype, np.dtype) else ""


def has_complex(*operands: Any) -> bool:
    """Return whether an operand of numpy, scipy or a `SparseTensor` is complex, and none is of another library."""
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


def _parts(value: Any, dtype: str) -> Parts:
    """Return the parts of an operand, as numbers of a real dtype."""
    if isinstance(value, SparseTensor):
        if value.dtype.kind != "c":
            return Parts(value.astype(dtype), None)
        return Parts(*(value.with_values(np.array(part, dtype)) for part in (value.values.real, value.values.imag)))
    if sp.issparse(value):
        value = value.tocsr()
        if value.dtype.kind != "c":
            return Parts(value.astype(dtype), None)
        arrays = value.indptr, value.indices
        parts = (np.array(part, dtype) for part in (value.data.real, value.data.imag))
        return Parts(*(compressed_of(type(value), *arrays, part, value.shape) for part in parts))
    array = np.asarray(value)
    if array.dtype.kind != "c":
        return Parts(array.astype(dtype), None)
    return Parts(array.real.astype(dtype), array.imag.astype(dtype))


def _real_dtype(*operands: Any) -> str:
    dtype = np.result_type(*(v.dtype for v in operands)).name
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


def product(operation: Callable[..., Any], A: Any, B: Any, **options: Any) -> Any:
    """Multiply by four real products, or by two where an operand is real."""
    if options.get("top") is not None or options.get("threshold") is not None:
        fault = "top, threshold: expected real values, which have an order, got complex ones"
        raise ArgumentTypeError(f"{fault}. Multiply without them.")
    dtype = _real_dtype(A, B)
    a, b = _parts(A, dtype), _parts(B, dtype)
    term = lambda x, y: None if x is None or y is None else operation(x, y, **options)  # noqa: E731
    real, minus = term(a.real, b.real), term(a.imag, b.imag)
    imag = [part for part in (term(a.real, b.imag), term(a.imag, b.real)) if part is not None]
    if minus is not None:
        real = _with_values(real, _values(real) - _values(minus))
    whole = imag[0] if len(imag) == 1 else _with_values(imag[0], _values(imag[0]) + _values(imag[1]))
    return _joined(real, whole, A if sp.issparse(A) else B)


def linear(operation: Callable[..., Any], A: Any, B: Any, *args: Any, **options: Any) -> Any:
    """Add or subtract the real and the imaginary parts; a real operand has zeros for the latter."""
    dtype = _real_dtype(A, B)
    pairs = [_parts(v, dtype) for v in (A, B)]
    zeros = [p.real if p.imag is not None else _with_values(p.real, np.zeros_like(_values(p.real))) for p in pairs]
    imags = [p.imag if p.imag is not None else zero for p, zero in zip(pairs, zeros, strict=True)]
    real = operation(*(p.real for p in pairs), *args, **options)
    return _joined(real, operation(*imags, *args, **options), A if sp.issparse(A) else B)


__all__ = ["by_parts", "has_complex", "linear", "product"]
