# SPDX-License-Identifier: Apache-2.0
"""The names of the dialect with their types: for editors and type checkers, never run."""

import builtins
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, overload

from tvm import tirx

class Expr:
    """A number of a program, known when it runs."""

    def __add__(self, other: Number) -> Expr: ...
    def __radd__(self, other: Number) -> Expr: ...
    def __sub__(self, other: Number) -> Expr: ...
    def __rsub__(self, other: Number) -> Expr: ...
    def __mul__(self, other: Number) -> Expr: ...
    def __rmul__(self, other: Number) -> Expr: ...
    def __truediv__(self, other: Number) -> Expr: ...
    def __rtruediv__(self, other: Number) -> Expr: ...
    def __floordiv__(self, other: Number) -> Expr: ...
    def __rfloordiv__(self, other: Number) -> Expr: ...
    def __mod__(self, other: Number) -> Expr: ...
    def __rmod__(self, other: Number) -> Expr: ...
    def __and__(self, other: Number) -> Expr: ...
    def __or__(self, other: Number) -> Expr: ...
    def __xor__(self, other: Number) -> Expr: ...
    def __lshift__(self, other: Number) -> Expr: ...
    def __rshift__(self, other: Number) -> Expr: ...
    def __invert__(self) -> Expr: ...
    def __neg__(self) -> Expr: ...
    def __lt__(self, other: Number) -> Expr: ...
    def __le__(self, other: Number) -> Expr: ...
    def __gt__(self, other: Number) -> Expr: ...
    def __ge__(self, other: Number) -> Expr: ...
    def __eq__(self, other: Number) -> Expr: ...  # type: ignore[override]
    def __ne__(self, other: Number) -> Expr: ...  # type: ignore[override]
    def astype(self, dtype: str) -> Expr: ...
    @property
    def dtype(self) -> Any: ...

Number: TypeAlias = Expr | builtins.int | float
"""A number of a program, or one of Python."""

class Axis(Expr):
    """A dimension, and how its coordinates are stored."""

class Buffer:
    """Values over axes; in a body subscripts are coordinates."""

    def __init__(self, shape: Any = ..., dtype: str = ..., *args: Any, **kwargs: Any) -> None: ...
    def __getitem__(self, index: Any) -> Expr: ...
    def __setitem__(self, index: Any, value: Number) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

class handle(Expr):
    """A parameter that stands for an array."""

    def __init__(self, *args: Any) -> None: ...

Array: TypeAlias = handle | Buffer
"""An index array: a parameter, or a buffer."""
Formula: TypeAlias = Callable[..., Any]
"""Coordinates of the ancestors, and what else its place asks for, to a number."""

class int8(Expr):
    """A signed integer of 8 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class int16(Expr):
    """A signed integer of 16 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class int32(Expr):
    """A signed integer of 32 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class int64(Expr):
    """A signed integer of 64 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class uint8(Expr):
    """A unsigned integer of 8 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class uint16(Expr):
    """A unsigned integer of 16 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class uint32(Expr):
    """A unsigned integer of 32 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class uint64(Expr):
    """A unsigned integer of 64 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class float16(Expr):
    """A float of 16 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class bfloat16(Expr):
    """A float of 16 bits with the exponent of 32: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class float32(Expr):
    """A float of 32 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class float64(Expr):
    """A float of 64 bits: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class boolean(Expr):
    """A truth value: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

class bool(Expr):
    """A truth value: the type of a parameter, or a number of that type."""

    def __init__(self, value: Any = ..., *args: Any) -> None: ...

@overload
def prim_func(func: Callable[..., Any], /) -> tirx.PrimFunc:
    """A function that is read as a program: its text is parsed, and it never runs as Python."""

@overload
def prim_func(
    *, private: builtins.bool = ..., check_well_formed: builtins.bool = ..., **options: Any
) -> Callable[[Callable[..., Any]], tirx.PrimFunc]: ...
def dense_fixed(length: Number, idtype: str = "int32") -> Axis:
    """An axis of `length` consecutive coordinates."""

def dense_variable(
    parent: Axis | None,
    shape: Number | tuple[Number, Number],
    indptr: Array | None = None,
    idtype: str = "int32",
    *,
    extent: Formula | None = None,
    offset: Formula | None = None,
) -> Axis:
    """A ragged axis: each parent position has its own number of consecutive coordinates.

    `shape` is ``length`` or ``(length, nnz)``. Instead of `indptr`, `extent` and `offset` may give the number
    of slots and the first position of a fiber as functions of the ancestors' coordinates.
    """

def sparse_fixed(
    parent: Axis | None,
    shape: Number | tuple[Number, Number],
    indices: Array | Formula,
    idtype: str = "int32",
    sorted: builtins.bool = True,
    *,
    unique: builtins.bool = True,
    full: builtins.bool = False,
) -> Axis:
    """An axis with the same number of stored coordinates below every parent position (ELL).

    `shape` is ``length`` or ``(length, nnz_cols)``. `indices` is an array, or a callable of the ancestors' coordinates,
    the slot and, if it takes one more, the position; a coordinate outside ``[0, length)`` marks an absent slot. `full`
    promises that all are present.
    """

def sparse_variable(
    parent: Axis | None,
    shape: Number | tuple[Number, Number],
    arrays: tuple[Array, Array | Formula],
    idtype: str = "int32",
    sorted: builtins.bool = True,
    *,
    unique: builtins.bool = True,
    full: builtins.bool = False,
) -> Axis:
    """A compressed axis: each parent position has its own stored coordinates (CSR).

    `shape` is ``length`` or ``(length, nnz)``, `arrays` is ``(indptr, indices)``. `indices` may be a callable of the
    ancestors' coordinates, the slot and, if it takes one more, the position. `full` promises that no slot is absent.
    """

def singleton(
    parent: Axis | None,
    length: Number,
    indices: Array | Formula,
    idtype: str = "int32",
    sorted: builtins.bool = True,
    *,
    unique: builtins.bool = True,
    full: builtins.bool = False,
) -> Axis:
    """An axis with exactly one coordinate per parent position: the inner levels of COO."""

def sparse_assembled(parent: Axis | None, length: Number, idtype: str = "int32", sorted: builtins.bool = True) -> Axis:
    """An axis whose coordinates the program computes: its indptr and indices are results."""

def attach(axis: Axis, parent: Axis) -> Axis:
    """In an sp_iter list: iterate `axis` below the coordinate of `parent` instead of below its own parent."""

def fuse(*axes: Axis) -> Axis:
    """In an sp_iter list: iterate the stored positions of a chain of axes as one loop."""

def union(*members: Axis) -> Axis:
    """In an sp_iter list: the coordinates that one of the axes stores."""

def intersect(*members: Axis) -> Axis:
    """In an sp_iter list: the coordinates that all of the axes store."""

def match_sparse_buffer(
    handle: Array,
    axes: Sequence[Axis] | Axis,
    dtype: str = "float32",
    default_value: Number | None = None,
    *,
    extra_storage: None = None,
) -> Buffer:
    """The values of an argument over axes; a coordinate that is not stored reads as `default_value`, or 0."""

def alloc_sparse_buffer(
    axes: Sequence[Axis] | Axis, dtype: str = "float32", scope: str = "global", default_value: Number | None = None
) -> Buffer:
    """Values over axes that live as long as the call."""

def sp_iter(axes: Sequence[Axis], kinds: str, name: str = "") -> AbstractContextManager[list[Expr]]:
    """Iterate over the stored coordinates of axes: one letter for each, S for spatial, R for reduction.

    ``with T.sp_iter([I, J], "SR", "spmv") as [i, j]:`` names the coordinates.
    """

def sp_iter_attr(attrs: dict[str, Any]) -> None:
    """Annotate an iteration, as in ``{"search": "hoist"}``."""

def init() -> AbstractContextManager[None]:
    """What a reduction sets each element of its result to first."""

def match_buffer(handle: Array, shape: Any, dtype: str = "float32", **options: Any) -> Buffer:
    """An argument as a dense buffer, or over a tuple of axes."""

def alloc_buffer(shape: Any, dtype: str = "float32", **options: Any) -> Buffer:
    """A dense buffer that lives as long as the call, or one over a tuple of axes."""

def func_attr(attrs: dict[str, Any]) -> None:
    """Annotate the function."""

def grid(*extents: Number) -> Iterable[Any]:
    """Nested loops."""

def serial(start: Number, stop: Number | None = None, **options: Any) -> Iterable[Expr]:
    """A loop."""

def parallel(start: Number, stop: Number | None = None, **options: Any) -> Iterable[Expr]:
    """A loop over the threads."""

def vectorized(start: Number, stop: Number | None = None, **options: Any) -> Iterable[Expr]:
    """A loop in the lanes of a vector."""

def unroll(start: Number, stop: Number | None = None, **options: Any) -> Iterable[Expr]:
    """A loop written out."""

def sblock(name: str = "", **options: Any) -> AbstractContextManager[Any]:
    """A block of a dense program."""

def cast(value: Number, dtype: str) -> Expr:
    """A number as another type."""

def if_then_else(condition: Any, true: Number, false: Number) -> Expr:
    """One of two numbers; the other is not evaluated."""

def Select(condition: Any, true: Number, false: Number) -> Expr:
    """One of two numbers; both are evaluated."""

def max(a: Number, b: Number) -> Expr:
    """The larger number."""

def min(a: Number, b: Number) -> Expr:
    """The smaller number."""

def max_value(dtype: str) -> Expr:
    """The largest finite number of a type."""

def min_value(dtype: str) -> Expr:
    """The smallest finite number of a type."""

def infinity(dtype: str) -> Expr:
    """Infinity."""

def pow(a: Number, b: Number) -> Expr:
    """The power."""

def floordiv(a: Number, b: Number) -> Expr:
    """The quotient, rounded down."""

def floormod(a: Number, b: Number) -> Expr:
    """The remainder of `floordiv`."""

def ceildiv(a: Number, b: Number) -> Expr:
    """The quotient, rounded up."""

def abs(x: Number) -> Expr:
    """The absolute value."""

def fabs(x: Number) -> Expr:
    """The absolute value of a float."""

def exp(x: Number) -> Expr:
    """e to the power of x."""

def exp2(x: Number) -> Expr:
    """2 to the power of x."""

def log(x: Number) -> Expr:
    """The natural logarithm."""

def log2(x: Number) -> Expr:
    """The logarithm to base 2."""

def sqrt(x: Number) -> Expr:
    """The square root."""

def rsqrt(x: Number) -> Expr:
    """1 over the square root."""

def sin(x: Number) -> Expr:
    """The sine."""

def cos(x: Number) -> Expr:
    """The cosine."""

def tan(x: Number) -> Expr:
    """The tangent."""

def tanh(x: Number) -> Expr:
    """The hyperbolic tangent."""

def sigmoid(x: Number) -> Expr:
    """1 over 1 + e to the power of -x."""

def erf(x: Number) -> Expr:
    """The error function."""

def floor(x: Number) -> Expr:
    """Rounded down."""

def ceil(x: Number) -> Expr:
    """Rounded up."""

def round(x: Number) -> Expr:
    """Rounded to the nearest integer."""

def trunc(x: Number) -> Expr:
    """Rounded towards zero."""

def isnan(x: Number) -> Expr:
    """Whether x is NaN."""

def isinf(x: Number) -> Expr:
    """Whether x is infinite."""

def isfinite(x: Number) -> Expr:
    """Whether x is neither."""

def __getattr__(name: str) -> Any:
    """What else `tvm.script.tirx` has."""
