# SPDX-License-Identifier: Apache-2.0
"""Validate the index arrays of compressed rows: compiled functions that read each index once.

One function reads all rows, another one only rows that are listed: those that a product with few rows reads. Neither
reads outside of the arrays, whatever they hold. Both only decide: `sparsetir.interop.check_level` finds what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import interop
from sparsetir.codegen.cache import CompiledLoops, compile_cached
from sparsetir.codegen.target import native_target
from sparsetir.ir.rewriting import LONG, alloc, array_param, cell, get, long, long_var, put, seq
from sparsetir.ir.views import cast, const
from sparsetir.lower.loops import parallel, serial
from sparsetir.utils.threads import get_num_threads

CALLS_UNTIL_COMPILED = 4  # validations by numpy, of one type of indices
MAX_SERIAL_ENTRIES = 1 << 18
DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
LANES = 8  # numbers of a chunk's result: one line of the cache
LISTED_SHARE = 4  # of all entries, up to which listed rows are validated alone

_calls: dict[tuple[str, np.dtype[Any], str], int] = {}
_functions: dict[tuple[str, np.dtype[Any], str], Any] = {}


def is_sound(
    level: interop.Level,
    indptr: np.ndarray,
    indices: np.ndarray,
    *,
    parent_count: int,
    length: int,
    need_sorted: bool,
    listed: np.ndarray | None = None,
) -> bool:
    """Return whether `interop.check_level` would accept the arrays; only those of the rows `listed`, if given.

    The numbers in `listed` must be rows.
    """
    order = "any" if not need_sorted else "distinct" if level.unique else "ascending"
    if listed is not None and _is_small_share(indptr, indices, listed, parent_count):
        return _are_listed_sound(order, indptr, indices, listed, length)
    size, dtype = indices.size, indices.dtype
    is_served = size >= 2 and indptr.dtype == dtype and dtype in DTYPES
    is_served = is_served and ((indptr.flags.carray and indices.flags.carray) or _are_passable(indptr, indices))
    # A parallel loop wakes all threads, which takes longer than reading a few thousand indices.
    name = "rows" if size < MAX_SERIAL_ENTRIES else "rows_in_chunks"
    function = _functions.get((name, dtype, order)) or _function(name, dtype, order) if is_served else None
    if function is None:
        return interop.is_sound(
            level, indptr, indices, parent_count=parent_count, length=length, need_sorted=need_sorted
        )
    if indptr.shape != (parent_count + 1,) or indptr[0] != 0 or indptr[-1] != size:
        return False
    chunks = 1 if size < MAX_SERIAL_ENTRIES else get_num_threads()
    out = np.empty((chunks, LANES), np.int64)
    if not (indptr.flags.writeable and indices.flags.writeable):
        indptr, indices = interop.writable_alias(indptr), interop.writable_alias(indices)
    function(parent_count, size, chunks, indptr, indices, out)
    return _is_accepted(out, dtype, length)


def _are_passable(indptr: np.ndarray, indices: np.ndarray) -> bool:
    """Return whether compiled functions take the arrays as they are."""
    for flags in (indptr.flags, indices.flags):
        if not (flags.c_contiguous and flags.aligned):
            return False
    return indptr.dtype.isnative and indices.dtype.isnative


def _is_accepted(out: np.ndarray, dtype: np.dtype[Any], length: int) -> bool:
    """Return whether the indices lie in the range, and the row pointers and indices descend nowhere in a row."""
    limit, inside = min(length, 1 << (8 * dtype.itemsize - 1)), 0
    for largest, falls, between, faults in out[:, :4].tolist():
        if faults or not 0 <= largest < limit:
            return False
        inside += falls - between
    return inside == 0


def _is_small_share(indptr: np.ndarray, indices: np.ndarray, listed: np.ndarray, rows: int) -> bool:
    """Return whether listed rows have few of the entries, as their row pointers say, which need not be right."""
    size = indices.size
    if not _are_passable(indptr, indices) or indptr.dtype != indices.dtype:
        return False
    if not 0 < listed.size * LISTED_SHARE < size or indptr.shape != (rows + 1,):
        return False
    entries = int(np.subtract(indptr[1:].take(listed), indptr.take(listed), dtype=np.int64).sum())
    return 0 <= entries * LISTED_SHARE < size and bool(indptr[0] == 0 and indptr[-1] == size)


def _are_listed_sound(order: str, indptr: np.ndarray, indices: np.ndarray, listed: np.ndarray, length: int) -> bool:
    function = _function("listed", indices.dtype, order, at_once=True)
    out = np.empty((1, LANES), np.int64)
    listed = np.ascontiguousarray(listed, np.int64)
    arrays = map(interop.writable_alias, (indptr, indices, listed))
    function(len(indptr) - 1, indices.size, len(listed), *arrays, out)
    return _is_accepted(out, indices.dtype, length)


def _function(name: str, dtype: np.dtype[Any], order: str, *, at_once: bool = False) -> Any:
    """Return a compiled function; None while too few calls asked for it."""
    key = name, dtype, order
    function = _functions.get(key)
    if function is not None:
        return function
    count = _calls.get(key, 0)
    if not at_once and count < CALLS_UNTIL_COMPILED:
        _calls[key] = count + 1
        return None
    _functions[key] = _compiled(name, dtype.name, order)
    return _functions[key]


def _compiled(name: str, idtype: str, order: str) -> Any:
    if name == "listed":
        func = _listed_rows(idtype, order)
    else:
        func = _all_rows(idtype, order, parallel if name == "rows_in_chunks" else serial)
    func = func.with_attr({"global_symbol": f"validate_{name}", "tirx.noalias": True})
    return compile_cached(func, native_target(), None, CompiledLoops).function


# ------------------------------------------------------------------ loops


def _at(array: Var, place: ir.Expr) -> ir.Expr:
    return tirx.BufferLoad(array, [place])


def _falls(indices: Var, place: ir.Expr, order: str) -> ir.Expr:
    """Return whether the index at a place must not follow the one before it."""
    now, before = _at(indices, place), _at(indices, place - long(1))
    return now < before if order == "ascending" else now <= before


def _count(counter: Var, condition: ir.Expr) -> tirx.Stmt:
    return put(counter, get(counter) + cast(condition, str(counter.ty.dtype)))


class _ChunkLoops:
    """The arrays, and counters of one chunk: largest index read as unsigned, falls, falls between rows, faults."""

    def __init__(self, idtype: str, order: str) -> None:
        self.idtype, self.order = idtype, order
        self.rows, self.count = long_var("rows"), long_var("count")
        self.indptr, self.indices = (
            array_param("indptr", idtype, self.rows + long(1)),
            array_param("indices", idtype, self.count),
        )
        self.largest, self.falls = cell("largest", f"u{idtype}"), cell("falls", idtype)
        self.between, self.faults = cell("between", idtype), cell("faults", idtype)
        self.cells = [self.largest, self.falls, self.between, self.faults]

    def begin(self) -> list[tirx.Stmt]:
        return [*alloc(*self.cells), *(put(c, const(0, str(c.ty.dtype))) for c in self.cells)]

    def finish(self, out: Var, chunk: ir.Expr) -> list[tirx.Stmt]:
        values = [cast(get(c), LONG) for c in self.cells]
        return [tirx.BufferStore(out, value, [chunk, long(n)]) for n, value in enumerate(values)]

    def read(self, first: ir.Expr, extent: ir.Expr, *, after: int) -> tirx.Stmt:
        """Read indices, and compare each but the first `after` with the one before it."""
        step = long_var("step")
        widest = lambda place: put(self.largest, tirx.max(get(self.largest), self.unsigned(place)))  # noqa: E731
        if self.order == "any":
            return serial(step, extent, widest(first + step))
        place = first + long(after) + step
        loop = serial(step, extent - long(after), seq(widest(place), _count(self.falls, self.fall(place))))
        return seq(widest(first), loop) if after else loop

    def unsigned(self, place: ir.Expr) -> ir.Expr:
        return cast(_at(self.indices, place), f"u{self.idtype}")

    def fall(self, place: ir.Expr) -> ir.Expr:
        return _falls(self.indices, place, self.order)


def _all_rows(idtype: str, order: str, chunked: Callable[..., tirx.Stmt]) -> tirx.PrimFunc:
    """Make the function of all rows: falls of the whole array must be those between two rows.

    `chunked` makes the loop over chunks, whose counts are stored apart.
    """
    loops, chunks, chunk = _ChunkLoops(idtype, order), long_var("chunks"), long_var("chunk")
    out = array_param("out", LONG, chunks, long(LANES))
    share = lambda n, c: tirx.floordiv(n * c, chunks)  # noqa: E731
    lo, hi, first, last = (long_var(name) for name in ("lo", "hi", "first", "last"))
    row, start, also = long_var("row"), long_var("start"), long_var("row_again")
    begin, end = _at(loops.indptr, first + row), _at(loops.indptr, first + row + long(1))
    descents = serial(row, last - first, _count(loops.faults, end < begin))
    at, after = _at(loops.indptr, first + also), _at(loops.indptr, first + also + long(1))
    # Row pointers of other chunks may be wrong: the place is kept inside of the array.
    place = tirx.max(long(1), tirx.min(cast(at, LONG), loops.count - long(1)))
    starts = tirx.And(at < after, at > const(0, idtype))
    between = seq(tirx.Bind(start, place), _count(loops.between, tirx.And(starts, loops.fall(start))))
    reads = [loops.read(lo, hi - lo, after=0)]
    if order != "any":
        reads += [
            put(loops.largest, tirx.max(get(loops.largest), loops.unsigned(long(0)))),
            serial(also, last - first, between),
        ]
    body = seq(
        *loops.begin(),
        tirx.Bind(lo, share(loops.count, chunk) if order == "any" else tirx.max(share(loops.count, chunk), long(1))),
        tirx.Bind(hi, share(loops.count, chunk + long(1))),
        tirx.Bind(first, share(loops.rows, chunk)),
        tirx.Bind(last, share(loops.rows, chunk + long(1))),
        descents,
        tirx.IfThenElse(get(loops.faults).equal(const(0, idtype)), seq(*reads), None),
        *loops.finish(out, chunk),
    )
    params = [loops.rows, loops.count, chunks, loops.indptr, loops.indices, out]
    return tirx.PrimFunc(params, chunked(chunk, chunks, body))


def _listed_rows(idtype: str, order: str) -> tirx.PrimFunc:
    """Make the function of listed rows."""
    loops, number, step = _ChunkLoops(idtype, order), long_var("number"), long_var("step")
    listed, out = array_param("listed", LONG, number), array_param("out", LONG, long(1), long(LANES))
    row, lo, hi = (long_var(name) for name in ("row", "lo", "hi"))
    is_wrong = tirx.Or(tirx.Or(lo < long(0), hi < lo), hi > loops.count)
    read = tirx.IfThenElse(lo < hi, loops.read(lo, hi - lo, after=1), None)
    one = seq(
        tirx.Bind(row, _at(listed, step)),
        tirx.Bind(lo, cast(_at(loops.indptr, row), LONG)),
        tirx.Bind(hi, cast(_at(loops.indptr, row + long(1)), LONG)),
        tirx.IfThenElse(is_wrong, put(loops.faults, const(1, idtype)), read),
    )
    body = seq(*loops.begin(), serial(step, number, one), *loops.finish(out, long(0)))
    return tirx.PrimFunc([loops.rows, loops.count, number, loops.indptr, loops.indices, listed, out], body)


__all__ = ["is_sound"]
