# SPDX-License-Identifier: Apache-2.0
"""Transposed copies of matrices in another dtype, and quantized ones: inputs and results of pruned layers.

before::

    for i, j in T.grid(rows, cols):
        y[j, i] = T.Cast("bfloat16", x[i, j])

after::

    for i_0, j_0, i_1 in T.grid(rows // 32, cols // 16, 2):
        line_0, ..., line_15 = x[i_0 * 32 + i_1 * 16, j_0 * 16 : j_0 * 16 + 16], ...
        four rounds that interleave the first half of the lines with the second half
        y[j_0 * 16, i_0 * 32 + i_1 * 16 : i_0 * 32 + i_1 * 16 + 16], ... = T.Cast("bfloat16x16", line_0), ...

Large matrices are shared out by columns. Halves are 16-bit integers in the loops, so that all targets compile them.
Rows and columns behind the last tile are copied one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

import torch
from sparsetir.codegen.cache import CompiledLoops, compile_cached
from sparsetir.codegen.target import native_target
from sparsetir.interop.arrays import UINT8_MAX
from sparsetir.ir.rewriting import array_param, long, long_var, seq
from sparsetir.ir.views import cast, const
from sparsetir.lower.loops import parallel, serial
from sparsetir.utils.threads import get_num_threads
from torch import Tensor

SIZE = 16  # rows and columns of a tile
LINES = 2  # tiles below each other that are copied in turn: as many rows as a line of the cache has halves
LEAST_ELEMENTS = 1 << 10  # for fewer, a call takes as long as torch's copy
LEAST_SHARE = 1 << 16  # elements for each thread
BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16}


def transposed(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x.t().to(dtype).contiguous()`` of a matrix.

    Parameters
    ----------
    x : Tensor
        Of two dimensions.
    dtype : torch.dtype, optional
        By default that of x.
    """
    dtype = x.dtype if dtype is None else dtype
    y = _transposed(x, dtype, None) if x.dtype is dtype or {x.dtype, dtype} <= {torch.float32, torch.bfloat16} else None
    return x.t().to(dtype).contiguous() if y is None else y


def quantized(x: Tensor, scale: float, zero: int, *, transposes: bool = False) -> Tensor:
    """Return ``round(x / scale) + zero``, clamped to a byte; of x transposed if asked for.

    Parameters
    ----------
    x : Tensor
    scale : float
        Of one step, in float32.
    zero : int
        The number that stands for zero.
    transposes : bool
        x has two dimensions, then.
    """
    if x.dtype is torch.float32:
        y = _transposed(x, torch.uint8, (scale, zero)) if transposes else _in_bytes(x, scale, zero)
        if y is not None:
            return y
    numbers = (x.float() / scale).round_().add_(zero).clamp_(0, UINT8_MAX).to(torch.uint8)
    return numbers.t().contiguous() if transposes else numbers


def _transposed(x: Tensor, dtype: torch.dtype, scale: tuple[float, int] | None) -> Tensor | None:
    """Return a transposed copy by a compiled function; None where torch's own does."""
    rows, cols = x.shape
    if not x.is_contiguous() or x.dtype.itemsize > torch.float32.itemsize or rows * cols < LEAST_ELEMENTS:
        return None
    y = torch.empty((cols, rows), dtype=dtype)
    chunks = min(get_num_threads(), rows * cols // LEAST_SHARE, cols // SIZE)
    function = _function(x.dtype, dtype, chunks > 1)
    step, zero = scale or (1.0, 0)
    function(rows, cols, max(chunks, 1), step, float(zero), _bits(x.detach()), _bits(y))
    return y


def _in_bytes(x: Tensor, scale: float, zero: int) -> Tensor | None:
    """Return quantized numbers in their places by a compiled function; None where torch's own do."""
    if not x.is_contiguous() or x.numel() < LEAST_ELEMENTS:
        return None
    y = torch.empty(x.shape, dtype=torch.uint8)
    chunks = min(get_num_threads(), x.numel() // LEAST_SHARE)
    _quantizer(chunks > 1)(x.numel(), max(chunks, 1), scale, float(zero), _bits(x.detach()), _bits(y))
    return y


def _bits(x: Tensor) -> Tensor:
    return x.view(-1).view(BITS.get(x.dtype, x.dtype))


@cache
def _function(source: torch.dtype, wanted: torch.dtype, in_chunks: bool) -> Any:
    func = _program(source, wanted, parallel if in_chunks else serial)
    name = "_".join(str(dtype).removeprefix("torch.") for dtype in (source, wanted))
    func = func.with_attr({"global_symbol": f"transposed_{name}_{int(in_chunks)}", "tirx.noalias": True})
    return compile_cached(func, native_target(), None, CompiledLoops).function


@cache
def _quantizer(in_chunks: bool) -> Any:
    func = _in_place_program(parallel if in_chunks else serial)
    func = func.with_attr({"global_symbol": f"quantized_{int(in_chunks)}", "tirx.noalias": True})
    return compile_cached(func, native_target(), None, CompiledLoops).function


def _in_place_program(chunked: Callable[..., tirx.Stmt]) -> tirx.PrimFunc:
    count, chunks, chunk, at, rest = (long_var(name) for name in ("count", "chunks", "chunk", "at", "rest"))
    step, zero = (Var(name, ir.PrimType("float32")) for name in ("step", "zero"))
    x, y = array_param("x", "float32", count), array_param("y", "uint8", count)
    convert, whole = _conversion(torch.float32, torch.uint8, step, zero), tirx.floordiv(count, long(SIZE))
    first, last = (tirx.floordiv(whole * c, chunks) for c in (chunk, chunk + long(1)))

    def at_place(place: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(y, convert(tirx.BufferLoad(x, [place])), [place])

    vectors = serial(at, last - first, at_place(_run((first + at) * long(SIZE))))
    behind = serial(rest, count - whole * long(SIZE), at_place(whole * long(SIZE) + rest))
    return tirx.PrimFunc([count, chunks, step, zero, x, y], seq(chunked(chunk, chunks, vectors), behind))


def _program(source: torch.dtype, wanted: torch.dtype, chunked: Callable[..., tirx.Stmt]) -> tirx.PrimFunc:
    dtypes = [str(BITS.get(dtype, dtype)).removeprefix("torch.") for dtype in (source, wanted)]
    rows, cols, chunks, chunk = (long_var(name) for name in ("rows", "cols", "chunks", "chunk"))
    step, zero = (Var(name, ir.PrimType("float32")) for name in ("step", "zero"))
    x, y = (array_param(name, dtype, rows * cols) for name, dtype in zip("xy", dtypes, strict=True))
    convert = _conversion(source, wanted, step, zero)

    def tile(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
        out: list[tirx.Stmt] = []
        lines = [_bound(out, tirx.BufferLoad(x, [_run((i + long(n)) * cols + j)])) for n in range(SIZE)]
        for _ in range(SIZE.bit_length() - 1):
            pairs = list(zip(lines[: SIZE // 2], lines[SIZE // 2 :], strict=True))
            lines = [_bound(out, tirx.Shuffle(list(pair), half)) for pair in pairs for half in HALVES]
        places = [_run((j + long(n)) * rows + i) for n in range(SIZE)]
        return seq(*out, *(tirx.BufferStore(y, convert(v), [p]) for v, p in zip(lines, places, strict=True)))

    def one(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(y, convert(tirx.BufferLoad(x, [i * cols + j])), [j * rows + i])

    def along(name: str, first: ir.Expr, end: ir.Expr, body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        var = long_var(name)
        return serial(var, end - first, body(first + var))

    tiles, size = tirx.floordiv(cols, long(SIZE)), long(SIZE)
    whole_rows, whole_cols = tirx.floordiv(rows, size) * size, tiles * size
    first, last = (tirx.floordiv(tiles * c, chunks) for c in (chunk, chunk + long(1)))
    lines = tirx.floordiv(whole_rows, size)
    end = lambda i: tirx.min(i * long(LINES) + long(LINES), lines)  # noqa: E731
    both = lambda i, j: along("i", i * long(LINES), end(i), lambda n: tile(n * size, j * size))  # noqa: E731
    groups = tirx.floordiv(lines + long(LINES - 1), long(LINES))
    in_tiles = along("group", long(0), groups, lambda i: along("j", first, last, lambda j: both(i, j)))
    below = along("i", whole_rows, rows, lambda i: along("j", long(0), cols, lambda j: one(i, j)))
    beside = along("i", long(0), whole_rows, lambda i: along("j", whole_cols, cols, lambda j: one(i, j)))
    return tirx.PrimFunc([rows, cols, chunks, step, zero, x, y], seq(chunked(chunk, chunks, in_tiles), below, beside))


HALVES = [
    [const(n) for k in range(first, first + SIZE // 2) for n in (k, SIZE + k)] for first in (0, SIZE // 2)
]  # what interleaves the first or the second halves of two vectors


def _run(place: ir.Expr) -> ir.Expr:
    return tirx.Ramp(place, long(1), SIZE)


def _bound(out: list[tirx.Stmt], value: ir.Expr) -> Var:
    var = Var("line", value.ty)
    out.append(tirx.Bind(var, value))
    return var


def _conversion(source: torch.dtype, wanted: torch.dtype, step: Var, zero: Var) -> Callable[[ir.Expr], ir.Expr]:
    """Return the function that converts a number, or a vector of numbers."""

    def like(x: ir.Expr, dtype: str) -> str:
        _, *lanes = str(x.ty.dtype).split("x")
        return "x".join([dtype, *lanes])

    def number(x: ir.Expr, value: Any, dtype: str) -> ir.Expr:
        value = tirx.const(value, dtype) if isinstance(value, (int, float)) else value
        return tirx.Broadcast(value, SIZE) if "x" in str(x.ty.dtype) else value

    def rounded(x: ir.Expr) -> ir.Expr:
        bits, of = tirx.reinterpret(like(x, "uint32"), x), lambda value: number(x, value, "uint32")
        even = (bits >> of(16)) & of(1)
        half = (bits + even + of(0x7FFF)) >> of(16)
        is_nan = (bits & of(0x7FFFFFFF)) > of(0x7F800000)
        return cast(tirx.Select(is_nan, (bits >> of(16)) | of(0x40), half), like(x, "uint16"))

    def widened(x: ir.Expr) -> ir.Expr:
        bits = cast(x, like(x, "uint32")) << number(x, 16, "uint32")
        return tirx.reinterpret(like(x, "float32"), bits)

    def byte(x: ir.Expr) -> ir.Expr:
        scaled = tirx.nearbyint(x / number(x, step, "float32")) + number(x, zero, "float32")
        clipped = tirx.min(tirx.max(scaled, number(x, 0.0, "float32")), number(x, float(UINT8_MAX), "float32"))
        return cast(cast(clipped, like(x, "int32")), like(x, "uint8"))

    if source is wanted:
        return lambda x: x
    return {torch.bfloat16: rounded, torch.float32: widened, torch.uint8: byte}[wanted]


__all__ = ["quantized", "transposed"]
