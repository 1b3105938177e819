# SPDX-License-Identifier: Apache-2.0
"""Stop after results that hold NaN: a kernel over a format that stores zeros may have multiplied one by infinity.

before::

    for chunk in T.parallel(2):
        ...  # y

after::

    for chunk in T.parallel(2):
        ...  # y
    for chunk in T.parallel(2):
        most[chunk * 64 : chunk * 64 + 64] = 0
        for step in range(...):  # a share of y, whose lines are mostly in the caches of the same core
            most[chunk * 64 : chunk * 64 + 64] = T.max(most[...], T.bitwise_and(T.reinterpret("int32x64", y[...]), ...))
    for lane in range(128):
        largest[0] = T.max(largest[0], most[lane])
    assert largest[0] <= 0x7F800000, "a result is NaN"

The bits of a float without its sign, as an integer, are more than those of infinity for NaN. Reading all of a result on
one core, from the caches of the others, takes a third of the time of a product whose matrix is cached.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import LONG, alloc, cell, collect, get, long, long_var, put, seq
from sparsetir.ir.views import cast, const
from sparsetir.lower.loops import PARALLEL, parallel, serial, with_body

MESSAGE = "a result is NaN"
LANES = 64
WIDTHS = {"float32": 32, "float64": 64}


def with_checked_results(func: tirx.PrimFunc, results: Collection[str]) -> tirx.PrimFunc | None:
    """Return a stage-III function that stops after results with NaN; None where it cannot tell.

    Parameters
    ----------
    func : PrimFunc
    results : collection of str
        Names of array parameters of one dimension.
    """
    arrays = [p for p in func.params if tirx.is_buffer_var(p) and str(p.name) in results]
    if len(arrays) != len(results) or any(len(p.ty.shape) != 1 or str(p.ty.dtype) not in WIDTHS for p in arrays):
        return None
    shares = [f.extent for f in collect(func.body, tirx.For) if f.kind == PARALLEL]
    chunks = next((int(extent) for extent in shares if isinstance(extent, tirx.IntImm)), 1)
    return with_body(func, seq(func.body, *(_check(array, chunks) for array in arrays)))


def _check(array: Var, chunks: int) -> tirx.Stmt:
    dtype = f"int{WIDTHS[str(array.ty.dtype)]}"
    infinity = int(np.asarray(np.inf, str(array.ty.dtype)).view(dtype))
    mask = int(np.iinfo(dtype).max)
    chunk, step, rest, lane = (long_var(name) for name in ("chunk", "step", "rest", "lane"))
    count = cast(array.ty.shape[0], LONG)
    whole = tirx.floordiv(count, long(LANES))
    first, last = (tirx.floordiv(whole * c, long(chunks)) for c in (chunk, chunk + long(1)))
    most = tirx.decl_buffer((chunks * LANES,), dtype, name="most", layout=None)
    largest = cell("largest", dtype)
    own = tirx.Ramp(chunk * long(LANES), long(1), LANES)

    def bits(index: ir.Expr, lanes: int) -> ir.Expr:
        loaded = tirx.reinterpret(dtype if lanes == 1 else f"{dtype}x{lanes}", tirx.BufferLoad(array, [index]))
        return tirx.bitwise_and(loaded, const(mask, dtype) if lanes == 1 else tirx.Broadcast(const(mask, dtype), lanes))

    vector = bits(tirx.Ramp((first + step) * long(LANES), long(1), LANES), LANES)
    share = seq(
        tirx.BufferStore(most, tirx.Broadcast(const(0, dtype), LANES), [own]),
        serial(step, last - first, tirx.BufferStore(most, tirx.max(tirx.BufferLoad(most, [own]), vector), [own])),
    )
    larger = lambda value: put(largest, tirx.max(get(largest), value))  # noqa: E731
    return seq(
        *alloc(most, largest),
        parallel(chunk, long(chunks), share) if chunks > 1 else serial(chunk, long(1), share),
        put(largest, const(0, dtype)),
        serial(lane, long(chunks * LANES), larger(tirx.BufferLoad(most, [lane]))),
        serial(rest, count - whole * long(LANES), larger(bits(whole * long(LANES) + rest, 1))),
        tirx.AssertStmt(get(largest) <= const(infinity, dtype), ir.StringImm("ValueError"), [ir.StringImm(MESSAGE)]),
    )


__all__ = ["MESSAGE", "WIDTHS", "with_checked_results"]
