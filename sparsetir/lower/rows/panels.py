# SPDX-License-Identifier: Apache-2.0
"""Panels of columns: copies of operands' panels to contiguous rows, and staging of the results of several rows.

Operand packing: copy a panel of columns of an operand to contiguous rows before the rows are gathered.

before::

    for i in T.serial(m, annotations={"sparsetir.chunks": 2, "sparsetir.parallel": True}):
        for k_0 in T.serial((feat + 63) // 64, annotations={"sparsetir.panel": 128}):
            for j in range(indptr[i + 1] - indptr[i]):
                for k_1 in T.vectorized(64):
                    if k_0 * 64 + k_1 < feat:
                        acc[k_1] = acc[k_1] + a[indptr[i] + j] * b[indices[indptr[i] + j], k_0 * 64 + k_1]
            ...  # c[i, k_0 * 64:k_0 * 64 + 64] = acc[0:64]

after::

    b_panel = T.alloc_buffer((n, T.min(128, feat)))
    for p in range((feat + 127) // 128):
        for x in T.serial(n, annotations={"sparsetir.chunks": 2, "sparsetir.parallel": True}):
            ...  # b_panel[x, 0:128] = b[x, p * 128:p * 128 + 128], to the last column
        for i in T.serial(m, annotations={"sparsetir.chunks": 2, "sparsetir.parallel": True}):
            for k_0 in range((T.min(128, feat - p * 128) + 63) // 64):
                for j in range(indptr[i + 1] - indptr[i]):
                    for k_1 in T.vectorized(64):
                        if k_0 * 64 + k_1 < T.min(128, feat - p * 128):
                            acc[k_1] = acc[k_1] + a[...] * b_panel[indices[indptr[i] + j], k_0 * 64 + k_1]
                ...  # c[i, p * 128 + k_0 * 64:p * 128 + k_0 * 64 + 64] = acc[0:64]

Where there are as many panels as chunks, or a multiple of it, each chunk has panels of its own and computes all rows of
them: no core reads what another one has just copied, which would come from that core's cache::

    b_panel = T.alloc_buffer((2, n, T.min(128, feat)))
    for chunk in T.parallel(2):
        for p in range((chunk + 1) * panels // 2 - chunk * panels // 2):  # panels is (feat + 127) // 128
            ...  # b_panel[chunk, x, 0:128] = ..., and all rows, as above, with panel chunk * panels // 2 + p

Two kinds of operands are packed: those that a column loop reads along their last dimension and gathers by another,
and those whose columns are not the last dimension, ``b[k, indices[...]]``, which the copy transposes. `group`
transposes results. Where no panel is made, the annotation is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.ir.rewriting import alloc, collect, conjunction, loads_of, mentions, renewed, same, seq, substitute
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import CARRY, CHUNKS, PANEL, PARALLEL_MARK, refused
from sparsetir.lower.loops import SERIAL, VECTORIZED, defined_vars, each_loop, loop, parallel, serial, with_, without
from sparsetir.lower.rows.block_registers import ColumnLoop, ColumnLoops
from sparsetir.utils.machine import LINE

# Copy a range of columns of an array, in any dimension, to a scratch buffer with columns as its last dimension.
#
# The copy of columns ``first`` to ``first + count`` of ``b[k, x]`` is::
#
#     for x_1 in range((n + 15) // 16):
#         for y_0 in range(count // 8):
#             for x in range(T.min(16, n - x_1 * 16)):
#                 for y in T.vectorized(8):
#                     b_panel[x_1 * 16 + x, y_0 * 8 + y] = b[first + y_0 * 8 + y, x_1 * 16 + x]
#         ...  # the last count % 8 columns likewise, one by one
#
# so that each cache line is read once. If the columns are already the last dimension, there is no loop over ``x``.


LANES = 8  # Columns of a vector copy.
TRANSPOSE_LINE = 16  # Elements of a transposed row that are copied together.


def counted(name: str, extent: ir.Expr) -> Var:
    """Create a loop variable with the type of an extent."""
    return Var(name, ir.PrimType(str(extent.ty.dtype)))


@dataclass(frozen=True, eq=False)
class Copy:
    """Copy of `count` columns of an array from `first` on; the columns are its dimension `dimension`.

    `place` are leading subscripts of the target.
    """

    source: Var
    target: Var
    dimension: int
    first: ir.Expr
    count: ir.Expr
    place: tuple[ir.Expr, ...] = ()

    def loops(self, notes: Mapping[str, Any]) -> tirx.Stmt:
        """Emit the loops of the copy; `notes` are the annotations of the outermost loop."""
        shape = list(self.source.ty.shape)
        other_dims = [d for d in range(len(shape)) if d != self.dimension]
        is_transposed = self.dimension < other_dims[-1]
        steps = [shape[d] for d in other_dims]
        if is_transposed:
            dtype = str(steps[-1].ty.dtype)
            steps[-1] = tirx.floordiv(steps[-1] + const(TRANSPOSE_LINE - 1, dtype), const(TRANSPOSE_LINE, dtype))
        loop_vars = [counted(f"x_{n}", extent) for n, extent in enumerate(steps)]
        indices: list[ir.Expr] = list(loop_vars)
        body = (
            self._lines(indices, shape[other_dims[-1]]) if is_transposed else self._columns(lambda make: make(indices))
        )
        for n in reversed(range(len(steps))):
            body = serial(loop_vars[n], steps[n], body, {} if n else notes)
        return body

    def _lines(self, place: list[ir.Expr], extent: ir.Expr) -> tirx.Stmt:
        """Emit the copy of the columns of `TRANSPOSE_LINE` rows."""
        line = const(TRANSPOSE_LINE, str(extent.ty.dtype))
        start = place[-1] * line

        def around(make: Any) -> tirx.Stmt:
            x = counted("x", extent)
            return serial(x, tirx.min(line, extent - start), make([*place[:-1], start + x]))

        return self._columns(around)

    def _columns(self, around: Any) -> tirx.Stmt:
        """Emit the copy of `LANES` columns at a time, then of the remainder; `around` makes the loop over rows."""
        lanes = const(LANES, str(self.count.ty.dtype))

        def block(base: ir.Expr, width: ir.Expr, kind: Any) -> tirx.Stmt:
            def make(at: list[ir.Expr]) -> tirx.Stmt:
                y = counted("y", self.count)
                return loop(kind, y, width, self._move(at, base + y))

            return around(make)

        y_0 = counted("y_0", self.count)
        full = serial(y_0, tirx.floordiv(self.count, lanes), block(y_0 * lanes, lanes, VECTORIZED))
        remainder = tirx.floormod(self.count, lanes)
        return seq(full, block(self.count - remainder, remainder, SERIAL))

    def _move(self, place: list[ir.Expr], column: ir.Expr) -> tirx.Stmt:
        """Emit the copy of one element."""
        source = list(place)
        source.insert(self.dimension, self.first + column)
        return tirx.BufferStore(self.target, tirx.BufferLoad(self.source, source), [*self.place, *place, column])


# Stage the results of a group of rows in a local buffer and store them along the rows, if rows are the last dimension.
#
# before::
#
#     for i in T.serial(m, annotations={"sparsetir.chunks": 2}):
#         ...  # c[p * 64 + y, i] = ..., for each y of the panel
#
# after::
#
#     for i in T.serial((m + 15) // 16, annotations={"sparsetir.chunks": 2}):
#         c_rows = T.alloc_local((16, 64))
#         for row in range(T.min(16, m - i * 16)):
#             ...  # c_rows[row, y] = ..., for each y of the panel
#         for y in range(T.min(64, feat - p * 64)):
#             for row in T.vectorized(16):
#                 c[p * 64 + y, i * 16 + row] = c_rows[row, y]
#
# A store of one element of a cache line costs as much as a store of the whole line.


def staged_results(columns: ColumnLoops) -> dict[Var, int]:
    """Return the column dimension of each result whose last dimension is the row and whose elements are stored once."""
    return {b: d for b, d in columns.results.items() if _is_staged(columns, b, d)}


def _is_staged(columns: ColumnLoops, buffer: Var, dimension: int) -> bool:
    rows, last = columns.rows, len(buffer.ty.shape) - 1
    stores = [s for s in collect(rows.body, tirx.BufferStore) if s.buffer.same_as(buffer)]
    reads = loads_of(rows.body, buffer)
    is_plain = isinstance(rows.min, tirx.IntImm) and int(rows.min) == 0
    if not is_plain or reads or len(stores) != 1 or dimension == last or _store_loop(columns, stores[0]) is None:
        return False
    inner = defined_vars(rows.body)
    fixed = [i for d, i in enumerate(stores[0].indices) if d not in (dimension, last)]
    is_row = sym.Analyzer().simplify(stores[0].indices[last]).same_as(rows.loop_var)
    return is_row and not mentions(fixed, [rows.loop_var, *inner]) and not any(collect(i, ir.TensorLoad) for i in fixed)


def _store_loop(columns: ColumnLoops, store: tirx.BufferStore) -> tirx.For | None:
    """Return the column loop that executes a store unconditionally for every column of every row, or None."""
    for column in columns.loops:
        if column.loop in _always(columns.rows.body) and _reaches(column, column.loop.body, store):
            return column.loop
    return None


def _always(body: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements that every row executes."""
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    return parts if parts == [body] else [s for part in parts for s in _always(part)]


def _reaches(column: Any, body: tirx.Stmt, store: tirx.BufferStore) -> bool:
    """Return whether a column loop always reaches a store, guarded by nothing but the bound of the columns."""
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


def group(rows: tirx.For, columns: ColumnLoops, results: dict[Var, int], first: ir.Expr, count: ir.Expr) -> tirx.For:
    """Stage the results of the row loop `rows` of the panel of `count` columns from `first` on."""
    index, dtype = rows.loop_var, str(rows.loop_var.ty.dtype)
    least = min(int(DataType(str(b.ty.dtype)).bits) for b in results)
    size = const(LINE * 8 // least, dtype)
    row = counted("row", rows.extent)
    remaining = rows.extent - index * size
    buffers = {b: _scratch(b, int(size), columns.panel) for b in results}

    def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        if store.buffer not in buffers:
            return mutator.default_mutate(store)
        column = sym.Analyzer().simplify(store.indices[results[store.buffer]] - first)
        return tirx.BufferStore(buffers[store.buffer], mutator.mutate(store.value), [row, column])

    body = structural_mutate(rows.body, [(tirx.BufferStore, on_store)])
    body = substitute(body, {index: index * size + row})
    inner = serial(row, tirx.min(size, remaining), body)
    targets = {s.buffer: s for s in collect(rows.body, tirx.BufferStore) if s.buffer in buffers}

    def written(width: ir.Expr, kind: Any) -> tirx.Stmt:
        return seq(
            *(
                _unload(targets[b], buffers[b], d, (index * size, width, kind), (first, count))
                for b, d in results.items()
            )
        )

    ends = tirx.IfThenElse(size <= remaining, written(size, VECTORIZED), written(remaining, SERIAL))
    steps = tirx.floordiv(rows.extent + (size - const(1, dtype)), size)
    return with_(rows, extent=steps, body=seq(*alloc(*buffers.values()), inner, ends))


def _scratch(buffer: Var, rows: int, columns: int) -> Var:
    shape, dtype = (rows, columns), str(buffer.ty.dtype)
    return tirx.decl_buffer(shape, dtype, name=f"{buffer.name}_rows", scope="local", layout=None)


def _unload(store: tirx.BufferStore, buffer: Var, dimension: int, rows: Any, columns: Any) -> tirx.Stmt:
    """Store the staged results of some rows and columns along the rows."""
    (start, width, kind), (first, count) = rows, columns
    y = counted("y", count)
    row = counted("row", width)
    indices = list(store.indices)
    indices[dimension], indices[-1] = first + y, start + row
    move = tirx.BufferStore(store.buffer, tirx.BufferLoad(buffer, [row, y]), indices)
    return serial(y, count, loop(kind, row, width, move))


# --------------------------------------------------------------------------------- packing of operands


def _is_start(x: ir.Expr, column: ColumnLoop) -> bool:
    """Return whether an expression is the first column of a step."""
    is_product = isinstance(x, tirx.Mul) and isinstance(x.b, tirx.IntImm)
    return is_product and x.a.same_as(column.loop.loop_var) and int(x.b) == column.tile


def packed_operands(columns: ColumnLoops) -> dict[Var, int]:
    """Return the operands to pack, with the dimension of their columns."""
    dimensions: dict[Var, int] = {}
    inside = {a.buffer for a in collect(columns.rows.body, tirx.AllocBuffer)}
    for column, buffer, indices, is_store in columns.accesses():
        dimension = column.dimension(indices)
        if is_store or dimension is None or buffer in inside or buffer in columns.results or len(indices) < 2:
            continue
        other_indices = [i for d, i in enumerate(indices) if d != dimension]
        if dimension < len(indices) - 1 or any(collect(i, ir.TensorLoad) for i in other_indices):
            dimensions.setdefault(buffer, dimension)
    return dimensions


class Panel:
    """The panel `number` of columns, and the scratch buffers of its packed operands."""

    def __init__(self, columns: ColumnLoops, chunks: int = 0) -> None:
        """Take the chunks that have panels of their own; 0 if rows are shared out instead."""
        self.columns, self.chunks = columns, chunks
        self.dtype = str(columns.width.ty.dtype)
        self.chunk = Var("chunk", ir.PrimType(self.dtype))
        self.place = (self.chunk,) if chunks else ()
        self.number = Var("panel", ir.PrimType(self.dtype))
        self.size = const(columns.panel, self.dtype)
        self.first = self.number * self.size
        self.count = tirx.min(self.size, columns.width - self.first)
        self.operands = packed_operands(columns)
        self.scratch = {b: self._scratch(b, d) for b, d in self.operands.items()}
        self.results = staged_results(columns)

    def _scratch(self, buffer: Var, dimension: int) -> Var:
        """Declare the scratch buffer of an operand: its other dimensions and a panel of columns."""
        other_extents = [s for d, s in enumerate(buffer.ty.shape) if d != dimension]
        own = [const(self.chunks, self.dtype)] if self.chunks else []
        shape = [*own, *other_extents, tirx.min(self.size, self.columns.width)]
        return tirx.decl_buffer(shape, str(buffer.ty.dtype), name=f"{buffer.name}_panel", layout=None)

    def loop(self) -> tirx.Stmt:
        """Emit the loop over panels around the copies and the row loop."""
        shared = {k: v for k, v in self.columns.rows.annotations.items() if k in (CHUNKS, PARALLEL_MARK)}
        notes = {} if self.chunks else shared
        copies = [
            Copy(b, self.scratch[b], d, self.first, self.count, self.place).loops(notes)
            for b, d in self.operands.items()
        ]
        rows = self._rows()
        if self.results:
            rows = group(rows, self.columns, self.results, self.first, self.count)
        if self.chunks:
            rows = with_(rows, notes=without(rows, CHUNKS, PARALLEL_MARK, CARRY))
        around = self._around(seq(*copies, rows))
        return seq(*alloc(*self.scratch.values()), around)

    def _around(self, body: tirx.Stmt) -> tirx.For:
        """Emit the loop over all panels, or over the chunks and the panels of each."""
        if not self.chunks:
            return serial(self.number, self.panels, body)
        chunks, step = const(self.chunks, self.dtype), Var("panel", self.number.ty)
        begin, end = (tirx.floordiv(at * self.panels, chunks) for at in (self.chunk, self.chunk + const(1, self.dtype)))
        panels = serial(step, end - begin, substitute(body, {self.number: begin + step}))
        return parallel(self.chunk, chunks, panels)

    @property
    def panels(self) -> ir.Expr:
        """The number of panels."""
        return tirx.floordiv(self.columns.width + (self.size - const(1, self.dtype)), self.size)

    # ------------------------------------------------------------------ the rows

    def _rows(self) -> tirx.For:
        """Restrict the row loop to the columns of the panel."""
        columns = {c.loop: c for c in self.columns.loops}

        def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
            column = columns.get(node)
            return mutator.default_mutate(node) if column is None else self._column_loop(column)

        return structural_mutate(self.columns.rows, [(tirx.For, on_for)])

    def _column_loop(self, column: ColumnLoop) -> tirx.For:
        """Restrict a column loop to the columns of the panel."""
        node, step = column.loop, column.loop.loop_var
        tile = const(column.tile, self.dtype)

        def on_load(x: ir.TensorLoad, mutator: Any) -> ir.Expr:
            indices = list(x.indices)
            dimension = self.operands.get(x.source)
            if dimension is None or column.dimension(indices) != dimension:
                return tirx.BufferLoad(x.source, [mutator.mutate(i) for i in indices])
            other_indices = [mutator.mutate(i) for d, i in enumerate(indices) if d != dimension]
            return tirx.BufferLoad(self.scratch[x.source], [*self.place, *other_indices, indices[dimension]])

        def on_check(x: tirx.LT, mutator: Any) -> ir.Expr:
            is_limit = column.is_column(x.a) and same(x.b, column.width)
            return tirx.LT(x.a, self.count) if is_limit else mutator.default_mutate(x)

        def on_mul(x: tirx.Mul, mutator: Any) -> ir.Expr:
            return x + self.first if _is_start(x, column) else mutator.default_mutate(x)

        callbacks = [(ir.TensorLoad, on_load), (tirx.LT, on_check), (tirx.Mul, on_mul)]
        body = structural_mutate(node.body, callbacks)
        if not column.lanes:
            body = substitute(node.body, {step: step + self.first})
        steps = tirx.floordiv(self.count + (tile - const(1, self.dtype)), tile)
        return with_(node, extent=steps, body=body, notes=without(node, PANEL))


def _may_pack(loop: tirx.For) -> tirx.Stmt | None:
    """Emit the loop over panels around a row loop; return None if there is nothing to pack."""
    columns = ColumnLoops.of(loop) if PARALLEL_MARK in loop.annotations else None
    if columns is None:
        return None
    panel, chunks = Panel(columns), int(loop.annotations.get(CHUNKS, 0))
    if not panel.operands:
        return panel.loop() if panel.results else None
    if chunks < 2:
        return panel.loop()
    number = lambda value: const(value, panel.dtype)  # noqa: E731
    is_even = tirx.EQ(tirx.floormod(panel.panels, number(chunks)), number(0))
    # The copies of all chunks together are no larger than the operands.
    fits = number(chunks * columns.panel) <= columns.width
    return tirx.IfThenElse(conjunction([is_even, fits]), renewed(Panel(columns, chunks).loop()), panel.loop())


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PackOperands")
def PackOperands(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Pack panels for every annotated loop of a function that allows it."""
    if not any(PANEL in f.annotations for f in collect(func.body, tirx.For)):
        return func

    why = "the columns of the rows around it depend on each other"
    return each_loop(func, outer=_may_pack, inner=lambda loop: refused(loop, PANEL, why))


__all__ = ["LANES", "TRANSPOSE_LINE", "Copy", "PackOperands", "counted", "group", "staged_results"]
