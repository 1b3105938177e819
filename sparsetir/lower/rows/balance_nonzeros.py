# SPDX-License-Identifier: Apache-2.0
"""Nonzero load balancing: the rows of an annotated loop in chunks with the same number of nonzeros.

before::

    for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
        for j in range(indptr[i + 1] - indptr[i]):
            ...

after::

    for chunk in T.parallel(16):
        ...  # first[0], last[0]: where indptr[i] + i passes chunk / 16 and (chunk + 1) / 16 of its total
        for i in range(last[0] - first[0]):
            for j in range(indptr[first[0] + i + 1] - indptr[first[0] + i]):
                ...

The work before row `i` is read off the row pointers of the innermost ragged loop below it; one is added per
row. Rows without a ragged loop are shared evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import SWEEP, cast, const
from sparsetir.lower.marks import CHUNKS, INDPTR, PARALLEL_MARK, amount, names_in, refused
from sparsetir.lower.nests import binary_search, each_loop, parallel, serial, with_, without
from sparsetir.lower.rewriting import alloc, cell, collect, get, mentions, put, seq, substitute
from sparsetir.walks import structural_mutate


def _is_prefix(expr: ir.Expr, row: Var, pointers: set[str]) -> bool:
    """Whether `expr` never falls: the row, times a number or behind one, or row pointers of it."""
    if isinstance(expr, tirx.Cast):
        return _is_prefix(expr.value, row, pointers)
    if isinstance(expr, tirx.Add) and not (mentions(expr.a, [row]) and mentions(expr.b, [row])):
        return _is_prefix(expr.a if mentions(expr.a, [row]) else expr.b, row, pointers)
    if isinstance(expr, tirx.Mul) and isinstance(expr.b, tirx.IntImm) and int(expr.b) > 0:
        return _is_prefix(expr.a, row, pointers)
    if isinstance(expr, ir.TensorLoad):
        return str(expr.source.name) in pointers and _is_prefix(expr.indices[0], row, pointers)
    return expr.same_as(row)


def work_before(loop: tirx.For, pointers: set[str]) -> ir.Expr | None:
    """Number of innermost ragged steps before row ``loop.loop_var``; None if nothing below is ragged.

    Of neighbouring ragged loops, the one with the most work counts.
    """
    row, best = loop.loop_var, None
    chosen: tirx.For | None = None
    zeros: dict[Var, ir.Expr] = {}
    analyzer = sym.Analyzer()

    def on_for(inner: tirx.For) -> None:
        nonlocal best, chosen
        extent = inner.extent
        while isinstance(extent, tirx.Cast):
            extent = extent.value
        if isinstance(extent, tirx.Sub) and isinstance(extent.b, ir.TensorLoad):
            start = analyzer.simplify(substitute(extent.b, zeros))
            is_less = chosen is not None and _fixed_steps(inner) < _fixed_steps(chosen) and not _holds(chosen, inner)
            if _is_prefix(start, row, pointers) and not is_less:
                best, chosen = start, inner
        zeros[inner.loop_var] = const(0, str(inner.loop_var.ty.dtype))

    _walk_outside_in(loop.body, on_for)
    return best


def _fixed_steps(loop: tirx.For) -> int:
    """Steps of the loops below `loop` whose number is known, nested or not."""
    return math.prod(int(f.extent) for f in collect(loop.body, tirx.For) if isinstance(f.extent, tirx.IntImm))


def _holds(loop: tirx.For, inner: tirx.For) -> bool:
    return any(f.loop_var.same_as(inner.loop_var) for f in collect(loop.body, tirx.For))


def _walk_outside_in(node: Any, on_for: Any) -> None:
    def visit(loop: tirx.For, mutator: Any) -> Any:
        on_for(loop)
        mutator.default_mutate(loop)
        return loop

    structural_mutate(node, [(tirx.For, visit)])


def _at(work: ir.Expr, row: Var, index: ir.Expr, rows: ir.Expr) -> ir.Expr:
    """`work` before row `index`; all of it before rows that a padded loop has beyond the row pointers."""
    loads = [x for x in collect(work, ir.TensorLoad) if mentions(x, [row])]
    pointers = next(x for x in loads if not mentions(collect(x.indices, ir.TensorLoad), [row]))
    last = cast(pointers.source.ty.shape[0], str(row.ty.dtype)) - const(1, str(row.ty.dtype))
    place = pointers.indices[0]
    if sym.Analyzer().can_prove(substitute(place, {row: rows}) <= last):
        return substitute(work, {row: index})
    nearest = tirx.min(substitute(place, {row: index}), last)
    on_load = lambda x, m: tirx.BufferLoad(x.source, [nearest]) if x.same_as(pointers) else m.default_mutate(x)  # noqa: E731
    return substitute(structural_mutate(work, [(ir.TensorLoad, on_load)]), {row: index})


def work_before_step(loop: tirx.For, pointers: set[str]) -> Callable[[ir.Expr], ir.Expr]:
    """The work before a step of `loop`, in inner steps: one a row, and those of the loops that do not move along it."""
    row, wide = loop.loop_var, "int64"
    work, each = work_before(loop, pointers), _steps_each(loop)

    def before(step: ir.Expr) -> ir.Expr:
        ragged = cast(step, wide) if work is None else cast(_at(work, row, step, loop.extent), wide)
        return cast(step, wide) + ragged * each

    return before


def _steps_each(loop: tirx.For) -> ir.Expr:
    """Steps of the loops below `loop` whose number is the same in every row, but for those along a row of a result."""
    along = [f for f in collect(loop.body, tirx.For) if _is_along(f, loop)]
    inner = [f.loop_var for f in collect(loop.body, tirx.For)] + [b.var for b in collect(loop.body, tirx.Bind)]
    each: ir.Expr = const(1, "int64")
    for f in collect(loop.body, tirx.For):
        if f not in along and not mentions(f.extent, [loop.loop_var, *inner]) and not collect(f.extent, ir.TensorLoad):
            each = each * cast(f.extent, "int64")
    return each


def _is_along(inner: tirx.For, loop: tirx.For) -> bool:
    """Whether a loop moves the last of several subscripts of a result."""
    stores = [s for s in collect(inner.body, tirx.BufferStore) if len(s.indices) > 1]
    return any(mentions(s.indices[-1], [inner.loop_var]) for s in stores)


def balance(loop: tirx.For, pointers: set[str]) -> tirx.Stmt:
    """Split the rows of `loop` into as many parallel pieces of equal work as it asks for."""
    row, wide = loop.loop_var, "int64"
    dtype = str(row.ty.dtype)
    work = work_before(loop, pointers)
    weight = lambda i: cast(i, wide) + (cast(_at(work, row, i, loop.extent), wide) if work is not None else 0)  # noqa: E731
    chunk = Var("chunk", ir.PrimType("int32"))
    total = weight(loop.extent)
    first, last, high = cell("first", dtype), cell("last", dtype), cell("high", dtype)

    def bound(place: Var, index: ir.Expr) -> list[tirx.Stmt]:
        target = tirx.floordiv(total * cast(index, wide), amount(loop, CHUNKS, wide))
        search = binary_search(lambda mid: weight(mid) < target, place, high)
        return [put(place, const(0, dtype)), put(high, loop.extent), search]

    shifted = Var(str(row.name), row.ty)
    body = substitute(loop.body, {row: get(first) + shifted})
    inner = serial(shifted, get(last) - get(first), body, without(loop, CHUNKS, PARALLEL_MARK, SWEEP))
    steps = [*alloc(first, last, high), *bound(first, chunk), *bound(last, chunk + 1), inner]
    return parallel(chunk, amount(loop, CHUNKS), seq(*steps))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.BalanceNonzeros")
def BalanceNonzeros(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Balance every annotated loop of a function."""
    pointers = names_in(func, INDPTR)

    def share(loop: tirx.For) -> tirx.Stmt | None:
        if CHUNKS not in loop.annotations:
            return None
        if PARALLEL_MARK not in loop.annotations:
            why = "its steps may write the same element; annotate the outermost independent loop"
            return refused(loop, CHUNKS, why)
        return balance(loop, pointers)

    return each_loop(func, outer=share, inner=lambda loop: with_(loop, notes=without(loop, PARALLEL_MARK)))


__all__ = ["BalanceNonzeros", "balance", "work_before", "work_before_step"]
