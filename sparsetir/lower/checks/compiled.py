# SPDX-License-Identifier: Apache-2.0
"""Checks that compiled kernels make: of index arrays as they are read, and of results for NaN."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir.effects import order_free_axes
from sparsetir.ir.rewriting import (
    LONG,
    alloc,
    cell,
    collect,
    conjunction,
    get,
    loads_of,
    long,
    long_var,
    put,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import Axis, Program, cast, const
from sparsetir.lower.annotations import FINITE, INDPTR, STRUCTURE, names_in
from sparsetir.lower.loops import PARALLEL, SERIAL, parallel, serial, vectorized, with_, with_body

# Validate the index arrays of compressed rows in the loops that read them, an entry before its operands are loaded.
#
# An array is then read from memory once. A comparison that always holds costs a loop of sums little: its branch is
# predicted, and the loop waits for its operands anyway.
#
# before::
#
#     for i in range(m):
#         y[i] = 0
#         for j in range(indptr[i + 1] - indptr[i]):
#             y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]
#
# after::
#
#     for i in range(m):
#         assert 0 <= indptr[i] and indptr[i] <= indptr[i + 1] and indptr[i + 1] <= nnz
#         y[i] = 0
#         before[0] = -1
#         for j in range(indptr[i + 1] - indptr[i]):
#             assert before[0] < indices[indptr[i] + j] and indices[indptr[i] + j] < n
#             before[0] = indices[indptr[i] + j]
#             y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]
#
# Every row must be read once, by one loop over its entries, on the caller's thread: TVM may lose the errors of others.


ROW_LANES = 16  # entries of a long row that are compared at a time
ROWS_MESSAGE = "the index arrays of compressed rows are wrong"  # the caller validates the arrays again and says more


class _Rows(NamedTuple):
    """The loops over rows and their entries.

    Parameters
    ----------
    rows, entries : For
    row : Expr
        The row, the variable of the first loop.
    pointers, indices : Var
        Arrays as the loops read them.
    """

    rows: tirx.For
    entries: tirx.For
    row: ir.Expr
    pointers: Var
    indices: Var


def with_checked_rows(program: Program, func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Return a stage-III function that stops at wrong index arrays; None where it does not read each row just once.

    Parameters
    ----------
    program : Program
        What it was lowered from: one axis has row pointers and indices.
    func : PrimFunc
    """
    axes = [a for a in program.axes.values() if a.indptr is not None or a.indices is not None]
    loops = _find(func)
    if loops is None or len(axes) != 1 or axes[0].kind != "sparse_variable":
        return None
    (axis,) = axes
    by_name = {str(v.name): v for p in func.params for v in collect([p, *getattr(p.ty, "shape", [])], Var)}
    used = collect(axis.length, Var)
    if any(str(v.name) not in by_name for v in used):
        return None
    length = substitute(axis.length, {v: by_name[str(v.name)] for v in used})
    row = _replaced(loops.rows.body, loops.entries, _with_checked_entries(loops, length, order_of(program, axis)))
    rows = with_(loops.rows, body=seq(_pointer_check(loops), row))
    return with_body(func, _replaced(func.body, loops.rows, seq(_ends_check(loops), rows)))


def order_of(program: Program, axis: Axis) -> str:
    """Return how the indices of a row must follow each other: ``distinct``, ``ascending`` or ``any``."""
    if (program.func.attrs or {}).get(FINITE, False) and axis in order_free_axes(program, may_repeat=True):
        return "any"
    return "distinct" if axis.unique else "ascending" if axis.sorted else "any"


def _replaced(body: Any, old: tirx.For, new: tirx.Stmt) -> Any:
    """Return statements with others in the place of a loop."""
    if body.same_as(old):
        return new
    if isinstance(body, tirx.SeqStmt):
        return seq(*(_replaced(s, old, new) for s in body.seq))
    return with_(body, body=_replaced(body.body, old, new)) if isinstance(body, tirx.For) else body


# ---------------------------------------------------------------------------------------------- loops found


def _find(func: tirx.PrimFunc) -> _Rows | None:
    """Return the loops of a function over one matrix of compressed rows, if it has one loop over rows."""
    structure, pointer_names = names_in(func, STRUCTURE), names_in(func, INDPTR)
    if len(structure) != 2 or len(pointer_names) != 1 or not pointer_names < structure:
        return None
    pointers, indices = (_array(func, name) for name in (*pointer_names, *(structure - pointer_names)))
    if pointers is None or indices is None:
        return None
    rows = _outer_loop(func.body)
    if rows is None:
        return None
    inner = [s for s in _statements(rows.body) if isinstance(s, tirx.For) and loads_of(s, indices)]
    if len(inner) != 1 or len(loads_of(func.body, indices)) != len(loads_of(inner[0].body, indices)):
        return None
    loops = _Rows(rows, inner[0], rows.loop_var, pointers, indices)
    return loops if _is_whole(loops) else None


def _array(func: tirx.PrimFunc, name: str) -> Var | None:
    """Return a parameter as the body reads it: over a declaration of its own."""
    params = [p for p in func.params if str(p.name) == name]
    views = [d.buffer for d in collect(func.body, tirx.DeclBuffer) if params and _is_view(d, params[0])]
    return views[0] if len(views) == 1 else None


def _is_view(declared: tirx.DeclBuffer, param: Var) -> bool:
    return any(v.same_as(param) for v in collect(declared.data, Var))


def _statements(body: tirx.Stmt) -> list[tirx.Stmt]:
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _outer_loop(body: tirx.Stmt) -> tirx.For | None:
    """Return the loop over rows, if it stands alone and is not parallel."""
    loops = [s for s in _statements(body) if isinstance(s, tirx.For)]
    if len(loops) != 1 or any(not isinstance(s, (tirx.DeclBuffer, tirx.For)) for s in _statements(body)):
        return None
    return loops[0] if loops[0].kind == SERIAL else None


def _is_whole(loops: _Rows) -> bool:
    """Return whether the loops read all entries of all rows, and no others."""
    rows = loops.pointers.ty.shape[0] - const(1, str(loops.pointers.ty.shape[0].ty.dtype))
    begin, end = _pointer(loops, loops.row), _pointer(loops, loops.row + const(1, str(loops.row.ty.dtype)))
    simplify = sym.Analyzer().simplify
    if not same(simplify(rows), simplify(loops.rows.extent)):
        return False
    if loops.entries.kind != SERIAL or not same(simplify(loops.entries.extent), simplify(end - begin)):
        return False
    place = simplify(begin + loops.entries.loop_var)
    return all(same(simplify(x.indices[0]), place) for x in loads_of(loops.entries.body, loops.indices))


# ---------------------------------------------------------------------------------------------- checks


def _assert(conditions: list[ir.Expr]) -> tirx.Stmt:
    return tirx.AssertStmt(conjunction(conditions), ir.StringImm("ValueError"), [ir.StringImm(ROWS_MESSAGE)])


def _pointer(loops: _Rows, row: ir.Expr) -> ir.Expr:
    return tirx.BufferLoad(loops.pointers, [row])


def _with_checked_entries(loops: _Rows, length: ir.Expr, order: str) -> tirx.Stmt:
    """Return the loop over the entries of a row: of a short one entry by entry, of a long one after a look at all."""
    loop = loops.entries
    if order == "any":
        return _one_by_one(loops, length, order)
    is_long = loop.extent > const(ROW_LANES, str(loop.extent.ty.dtype))
    return tirx.IfThenElse(is_long, seq(*_row_check(loops, length, order), loop), _one_by_one(loops, length, order))


def _one_by_one(loops: _Rows, length: ir.Expr, order: str) -> tirx.Stmt:
    """Return a loop that compares each entry with the one before it, then runs the statements for it."""
    loop, dtype = renewed(loops.entries), str(loops.indices.ty.dtype)
    before = tirx.decl_buffer((1,), dtype, name="before", layout=None)
    index = Var("index", ir.PrimType(dtype))
    bind = tirx.Bind(index, tirx.BufferLoad(loops.indices, [_pointer(loops, loops.row) + loop.loop_var]))
    inside = cast(index, LONG) < cast(length, LONG)
    if order == "any":
        return with_(loop, body=seq(bind, _assert([index >= const(0, dtype), inside]), loop.body))
    follows = get(before) < index if order == "distinct" else get(before) <= index
    body = seq(bind, _assert([follows, inside]), put(before, index), loop.body)
    lowest = const(-1 if order == "distinct" else 0, dtype)  # no index is negative if none falls
    return seq(*alloc(before), put(before, lowest), with_(loop, body=body))


def _row_check(loops: _Rows, length: ir.Expr, order: str) -> list[tirx.Stmt]:
    """Return the check of a row of more than `ROW_LANES` entries, so many at a time; the last ones overlap."""
    dtype, extent = str(loops.indices.ty.dtype), loops.entries.extent
    counter = str(extent.ty.dtype)
    one, lanes, step = const(1, counter), const(ROW_LANES, counter), Var("step", extent.ty)
    rises = tirx.decl_buffer((ROW_LANES,), dtype, name="rises", layout=None)
    begin, pairs = _pointer(loops, loops.row), extent - const(1, counter)
    at = lambda place: tirx.BufferLoad(loops.indices, [begin + place])  # noqa: E731

    def each(value: Callable[[Var], ir.Expr]) -> tirx.Stmt:
        lane = Var("lane", extent.ty)
        return vectorized(lane, ROW_LANES, tirx.BufferStore(rises, value(lane), [lane]))

    def compare(first: ir.Expr) -> tirx.Stmt:
        def value(lane: Var) -> ir.Expr:
            before, now = at(first + lane), at(first + lane + one)
            is_right = before < now if order == "distinct" else before <= now
            return tirx.BufferLoad(rises, [lane]) & cast(is_right, dtype)

        return each(value)

    windows = serial(step, tirx.truncdiv(pairs, lanes), compare(step * lanes))
    values = [tirx.BufferLoad(rises, [const(n, counter)]) for n in range(ROW_LANES)]
    while len(values) > 1:
        values = [a & b for a, b in zip(values[::2], values[1::2], strict=True)]
    ends = [at(const(0, counter)) >= const(0, dtype), cast(at(pairs), LONG) < cast(length, LONG)]
    found_all = _assert([*ends, values[0].equal(const(1, dtype))])
    return [*alloc(rises), each(lambda _: const(1, dtype)), windows, compare(pairs - lanes), found_all]


def _pointer_check(loops: _Rows) -> tirx.Stmt:
    """Return the check that a row that begins inside of the indices ends there, not before it begins."""
    begin, end = _pointer(loops, loops.row), _pointer(loops, loops.row + const(1, str(loops.row.ty.dtype)))
    unsigned = f"u{begin.ty.dtype}"
    size = lambda to: cast(to, unsigned) - cast(begin, unsigned)  # noqa: E731  # huge where it is negative
    return _assert([size(end) <= size(cast(loops.indices.ty.shape[0], str(begin.ty.dtype)))])


def _ends_check(loops: _Rows) -> tirx.Stmt:
    """Return the check of the first and the last row pointer."""
    rows = loops.pointers.ty.shape[0] - const(1, str(loops.pointers.ty.shape[0].ty.dtype))
    begin, end = _pointer(loops, const(0, str(rows.ty.dtype))), _pointer(loops, rows)
    count = loops.indices.ty.shape[0]
    conditions = [begin.equal(const(0, str(begin.ty.dtype))), cast(end, LONG).equal(cast(count, LONG))]
    return _assert(conditions)


# Stop after results that hold NaN: a kernel over a format that stores zeros may have multiplied one by infinity.
#
# before::
#
#     for chunk in T.parallel(2):
#         ...  # y
#
# after::
#
#     for chunk in T.parallel(2):
#         ...  # y
#     for chunk in T.parallel(2):
#         most[chunk * 64 : chunk * 64 + 64] = 0
#         for step in range(...):  # a share of y, whose lines are mostly in the caches of the same core
#             bits = T.bitwise_and(T.reinterpret("int32x64", y[...]), ...)
#             most[chunk * 64 : chunk * 64 + 64] = T.max(most[...], bits)
#     for lane in range(128):
#         largest[0] = T.max(largest[0], most[lane])
#     assert largest[0] <= 0x7F800000, "a result is NaN"
#
# The bits of a float without its sign, as an integer, are more than those of infinity for NaN. Reading all of a result
# on one core, from the caches of the others, takes a third of the time of a product whose matrix is cached.


NAN_MESSAGE = "a result is NaN"
NAN_LANES = 64
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
    return with_body(func, seq(func.body, *(_nan_check(array, chunks) for array in arrays)))


def _nan_check(array: Var, chunks: int) -> tirx.Stmt:
    dtype = f"int{WIDTHS[str(array.ty.dtype)]}"
    infinity = int(np.asarray(np.inf, str(array.ty.dtype)).view(dtype))
    mask = int(np.iinfo(dtype).max)
    chunk, step, rest, lane = (long_var(name) for name in ("chunk", "step", "rest", "lane"))
    count = cast(array.ty.shape[0], LONG)
    whole = tirx.floordiv(count, long(NAN_LANES))
    first, last = (tirx.floordiv(whole * c, long(chunks)) for c in (chunk, chunk + long(1)))
    most = tirx.decl_buffer((chunks * NAN_LANES,), dtype, name="most", layout=None)
    largest = cell("largest", dtype)
    own = tirx.Ramp(chunk * long(NAN_LANES), long(1), NAN_LANES)

    def bits(index: ir.Expr, lanes: int) -> ir.Expr:
        loaded = tirx.reinterpret(dtype if lanes == 1 else f"{dtype}x{lanes}", tirx.BufferLoad(array, [index]))
        return tirx.bitwise_and(loaded, const(mask, dtype) if lanes == 1 else tirx.Broadcast(const(mask, dtype), lanes))

    vector = bits(tirx.Ramp((first + step) * long(NAN_LANES), long(1), NAN_LANES), NAN_LANES)
    share = seq(
        tirx.BufferStore(most, tirx.Broadcast(const(0, dtype), NAN_LANES), [own]),
        serial(step, last - first, tirx.BufferStore(most, tirx.max(tirx.BufferLoad(most, [own]), vector), [own])),
    )
    larger = lambda value: put(largest, tirx.max(get(largest), value))  # noqa: E731
    return seq(
        *alloc(most, largest),
        parallel(chunk, long(chunks), share) if chunks > 1 else serial(chunk, long(1), share),
        put(largest, const(0, dtype)),
        serial(lane, long(chunks * NAN_LANES), larger(tirx.BufferLoad(most, [lane]))),
        serial(rest, count - whole * long(NAN_LANES), larger(bits(whole * long(NAN_LANES) + rest, 1))),
        tirx.AssertStmt(
            get(largest) <= const(infinity, dtype), ir.StringImm("ValueError"), [ir.StringImm(NAN_MESSAGE)]
        ),
    )


__all__ = [
    "NAN_MESSAGE",
    "ROWS_MESSAGE",
    "ROW_LANES",
    "WIDTHS",
    "order_of",
    "with_checked_results",
    "with_checked_rows",
]
