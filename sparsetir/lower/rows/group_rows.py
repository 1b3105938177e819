# SPDX-License-Identifier: Apache-2.0
"""Keep the results of a few rows next to each other, and store them along the rows where these are the last dimension.

before::

    for i in T.serial(m, annotations={"sparsetir.chunks": 2}):
        ...  # c[p * 64 + y, i] = ..., for each y of the panel

after::

    for i in T.serial((m + 15) // 16, annotations={"sparsetir.chunks": 2}):
        c_rows = T.alloc_local((16, 64))
        for row in range(T.min(16, m - i * 16)):
            ...  # c_rows[row, y] = ..., for each y of the panel
        for y in range(T.min(64, feat - p * 64)):
            for row in T.vectorized(16):
                c[p * 64 + y, i * 16 + row] = c_rows[row, y]

A store of one element of each line costs as much as one of the whole line.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, sym, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.ir import const
from sparsetir.lower.nests import SERIAL, VECTORIZED, loop, serial, with_
from sparsetir.lower.rewriting import alloc, collect, mentions, seq, substitute
from sparsetir.lower.rows.columns import Columns
from sparsetir.lower.rows.copy_panel import counted
from sparsetir.machine import LINE
from sparsetir.walks import structural_mutate


def staged_results(columns: Columns) -> dict[Var, int]:
    """The results whose last dimension is the row, each element stored once: with the dimension of the columns."""
    return {b: d for b, d in columns.results.items() if _is_staged(columns, b, d)}


def _is_staged(columns: Columns, buffer: Var, dimension: int) -> bool:
    rows, last = columns.rows, len(buffer.ty.shape) - 1
    stores = [s for s in collect(rows.body, tirx.BufferStore) if s.buffer.same_as(buffer)]
    reads = [x for x in collect(rows.body, ir.TensorLoad) if x.source.same_as(buffer)]
    is_plain = isinstance(rows.min, tirx.IntImm) and int(rows.min) == 0
    if not is_plain or reads or len(stores) != 1 or dimension == last or _store_loop(columns, stores[0]) is None:
        return False
    inner = [f.loop_var for f in collect(rows.body, tirx.For)] + [b.var for b in collect(rows.body, tirx.Bind)]
    fixed = [i for d, i in enumerate(stores[0].indices) if d not in (dimension, last)]
    is_row = sym.Analyzer().simplify(stores[0].indices[last]).same_as(rows.loop_var)
    return is_row and not mentions(fixed, [rows.loop_var, *inner]) and not any(collect(i, ir.TensorLoad) for i in fixed)


def _store_loop(columns: Columns, store: tirx.BufferStore) -> tirx.For | None:
    """The column loop that makes a store in every step, for every column; None where something may keep it from it."""
    for column in columns.loops:
        if column.loop in _always(columns.rows.body) and _reaches(column, column.loop.body, store):
            return column.loop
    return None


def _always(body: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements that every row executes."""
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    return parts if parts == [body] else [s for part in parts for s in _always(part)]


def _reaches(column: Any, body: tirx.Stmt, store: tirx.BufferStore) -> bool:
    """Whether a statement of a column loop is its vector loop around a store, checked for the last column at most."""
    for stmt in _always(body):
        inner = stmt
        if isinstance(inner, tirx.For) and inner.loop_var in column.lanes:
            inner = inner.body
        is_check = isinstance(inner, tirx.IfThenElse) and isinstance(inner.condition, tirx.LT)
        if is_check and inner.else_case is None and column.is_column(inner.condition.a):
            inner = inner.then_case
        if inner.same_as(store):
            return True
    return False


def group(rows: tirx.For, columns: Columns, results: dict[Var, int], first: ir.Expr, count: ir.Expr) -> tirx.For:
    """`rows`, already for a panel that begins at column `first` and has `count`, with staged results."""
    index, dtype = rows.loop_var, str(rows.loop_var.ty.dtype)
    least = min(int(DataType(str(b.ty.dtype)).bits) for b in results)
    size = const(LINE * 8 // least, dtype)
    row = counted("row", rows.extent)
    left = rows.extent - index * size
    held = {b: _scratch(b, int(size), columns.panel) for b in results}

    def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        if store.buffer not in held:
            return mutator.default_mutate(store)
        column = sym.Analyzer().simplify(store.indices[results[store.buffer]] - first)
        return tirx.BufferStore(held[store.buffer], mutator.mutate(store.value), [row, column])

    body = structural_mutate(rows.body, [(tirx.BufferStore, on_store)])
    body = substitute(body, {index: index * size + row})
    inner = serial(row, tirx.min(size, left), body)
    targets = {s.buffer: s for s in collect(rows.body, tirx.BufferStore) if s.buffer in held}

    def written(width: ir.Expr, kind: Any) -> tirx.Stmt:
        return seq(
            *(_unload(targets[b], held[b], d, (index * size, width, kind), (first, count)) for b, d in results.items())
        )

    ends = tirx.IfThenElse(size <= left, written(size, VECTORIZED), written(left, SERIAL))
    steps = tirx.floordiv(rows.extent + (size - const(1, dtype)), size)
    return with_(rows, extent=steps, body=seq(*alloc(*held.values()), inner, ends))


def _scratch(buffer: Var, rows: int, columns: int) -> Var:
    shape, dtype = (rows, columns), str(buffer.ty.dtype)
    return tirx.decl_buffer(shape, dtype, name=f"{buffer.name}_rows", scope="local", layout=None)


def _unload(store: tirx.BufferStore, held: Var, dimension: int, rows: Any, columns: Any) -> tirx.Stmt:
    """Store what is held of some rows and columns, along the rows."""
    (start, width, kind), (first, count) = rows, columns
    y = counted("y", count)
    row = counted("row", width)
    indices = list(store.indices)
    indices[dimension], indices[-1] = first + y, start + row
    move = tirx.BufferStore(store.buffer, tirx.BufferLoad(held, [row, y]), indices)
    return serial(y, count, loop(kind, row, width, move))


__all__ = ["group", "staged_results"]
