# SPDX-License-Identifier: Apache-2.0
"""Operand packing: copy a panel of columns of an operand to contiguous rows before the rows are gathered.

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

Two kinds of operands are packed: those that a column loop reads along their last dimension and gathers by another,
and those whose columns are not the last dimension, ``b[k, indices[...]]``, which the copy transposes. `group_rows`
transposes results. Where no panel is made, the annotation is removed.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import alloc, collect, same, seq, substitute
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import CHUNKS, PANEL, PARALLEL_MARK, refused
from sparsetir.lower.loops import each_loop, serial, with_, without
from sparsetir.lower.rows.block_registers import ColumnLoop, Columns
from sparsetir.lower.rows.group_rows import Copy, group, staged_results


def _is_start(x: ir.Expr, column: ColumnLoop) -> bool:
    """Return whether an expression is the first column of a step."""
    is_product = isinstance(x, tirx.Mul) and isinstance(x.b, tirx.IntImm)
    return is_product and x.a.same_as(column.loop.loop_var) and int(x.b) == column.tile


def packed_operands(columns: Columns) -> dict[Var, int]:
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

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.dtype = str(columns.width.ty.dtype)
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
        shape = [*other_extents, tirx.min(self.size, self.columns.width)]
        return tirx.decl_buffer(shape, str(buffer.ty.dtype), name=f"{buffer.name}_panel", layout=None)

    def loop(self) -> tirx.Stmt:
        """Emit the loop over panels around the copies and the row loop."""
        notes = {k: v for k, v in self.columns.rows.annotations.items() if k in (CHUNKS, PARALLEL_MARK)}
        copies = [Copy(b, self.scratch[b], d, self.first, self.count).loops(notes) for b, d in self.operands.items()]
        rows = self._rows()
        if self.results:
            rows = group(rows, self.columns, self.results, self.first, self.count)
        panels = tirx.floordiv(self.columns.width + (self.size - const(1, self.dtype)), self.size)
        body = seq(*copies, rows)
        around = serial(self.number, panels, body)
        return seq(*alloc(*self.scratch.values()), around)

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
            return tirx.BufferLoad(self.scratch[x.source], [*other_indices, indices[dimension]])

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
    columns = Columns.of(loop) if PARALLEL_MARK in loop.annotations else None
    if columns is None:
        return None
    panel = Panel(columns)
    return panel.loop() if panel.operands or panel.results else None


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PackOperands")
def PackOperands(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Pack panels for every annotated loop of a function that allows it."""
    if not any(PANEL in f.annotations for f in collect(func.body, tirx.For)):
        return func

    why = "the rows around it do not fall apart into columns"
    return each_loop(func, outer=_may_pack, inner=lambda loop: refused(loop, PANEL, why))


__all__ = ["PackOperands"]
