# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows, which functions go over in parallel, and the parameters of such functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.assemble.accumulators import LONG, long
from sparsetir.assemble.rows import Rows
from sparsetir.ir import cast, const
from sparsetir.lower.nests import parallel
from sparsetir.lower.rewriting import renewed, seq

ROW_WORK = 8  # coordinates that take as long as the beginning and end of a row


@dataclass(frozen=True)
class Split:
    """The chunks of rows: chunk c has the rows from ``ranges[c]`` to ``ranges[c + 1]``, maybe in an `order`."""

    chunks: Var
    ranges: Var
    bound: Var
    order: Sequence[Var] = ()

    @classmethod
    def of(cls, rows: Rows, *, ordered: bool = False) -> Split:
        chunks, count = Var("chunks", ir.PrimType("int32")), size("ordered")
        order = [count, array("order", LONG, count)] if ordered else []
        ranges = array("ranges", LONG, cast(chunks, LONG) + long(1))
        return cls(chunks, ranges, array("bound", LONG, rows.count), order)

    def row(self, place: ir.Expr) -> ir.Expr:
        """The row at a place of the order."""
        return tirx.BufferLoad(self.order[1], [place]) if self.order else place


def array(name: str, dtype: str, *shape: ir.Expr) -> Var:
    """A parameter."""
    return tirx.decl_buffer(list(shape), dtype, name=name, layout=None)


def size(name: str) -> Var:
    """A size of 64 bits."""
    return Var(name, ir.PrimType(LONG))


def alone_or_shared(chunk: Var, chunks: Var, body: tirx.Stmt) -> tirx.Stmt:
    """A loop over chunks, parallel if there are several: one waits for every thread of the pool, also for one step."""
    alone = renewed(seq(tirx.Bind(chunk, const(0, "int32")), body))
    return tirx.IfThenElse(chunks.equal(const(1, "int32")), alone, renewed(parallel(chunk, chunks, body)))


__all__ = ["ROW_WORK", "Split", "alone_or_shared", "array", "size"]
