# SPDX-License-Identifier: Apache-2.0
"""Fetch gathered rows a few steps before they are needed.

before::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.prefetch": 16}):
        for k in T.vectorized(64):
            acc[k] = acc[k] + a[indptr[i] + j] * b[indices[indptr[i] + j], k]

after::

    for j in range(indptr[i + 1] - indptr[i]):
        ...  # prefetch b[indices[T.min(indptr[i] + j + 16, nnz - 1)], 0], then columns 16, 32, 48
        for k in T.vectorized(64):
            ...
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import cast, const
from sparsetir.lower.marks import PREFETCH, amount, asks, refused
from sparsetir.lower.nests import each_loop, with_, without
from sparsetir.lower.rewriting import all_same, collect, mentions, seq, substitute
from sparsetir.machine import LINE
from sparsetir.walks import structural_mutate

MOST_LINES = 16


def gathers(body: Any, step: Var) -> list[ir.TensorLoad]:
    """Loads whose subscript is itself loaded at a place that moves with `step`."""
    found: list[ir.TensorLoad] = []
    for load in collect(body, ir.TensorLoad):
        inner = [x for i in load.indices for x in collect(i, ir.TensorLoad)]
        if any(mentions(x, [step]) for x in inner) and not any(
            load.source.same_as(f.source) and all_same(load.indices, f.indices) for f in found
        ):
            found.append(load)
    return found


def ahead(load: ir.TensorLoad, loop: tirx.For) -> list[ir.Expr]:
    """The subscripts of `load` as far ahead of `loop` as it asks for: see `steps_ahead`."""
    step = loop.loop_var
    return steps_ahead(load, step, amount(loop, PREFETCH, str(step.ty.dtype)))


def steps_ahead(load: ir.TensorLoad, step: Var, number: ir.Expr) -> list[ir.Expr]:
    """The subscripts of `load` so many steps later, every array on the way read within its bounds."""

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        indices = [mutator.mutate(i) for i in node.indices]
        return tirx.BufferLoad(node.source, [_clamp(i, d) for i, d in zip(indices, node.source.ty.shape, strict=True)])

    further = {step: step + number}
    moved = [substitute(i, further) for i in load.indices]
    # Also those that do not move: the body may load them under a condition that does not hold here.
    return [structural_mutate(i, [(ir.TensorLoad, on_load)]) for i in moved]


def _clamp(index: ir.Expr, extent: ir.Expr) -> ir.Expr:
    dtype = str(index.ty.dtype)
    last = tirx.max(cast(extent, dtype) - const(1, dtype), const(0, dtype))
    return tirx.max(tirx.min(index, last), const(0, dtype))


def fetch(load: ir.TensorLoad, indices: list[ir.Expr]) -> tirx.Stmt:
    """Bring the line of an element into the nearest cache."""
    address = tirx.address_of(tirx.BufferLoad(load.source, indices))
    flags = [const(0), const(3), const(1)]
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *flags))


def per_line(load: ir.TensorLoad) -> int:
    """Elements of an array in a line of the cache."""
    return max(1, 8 * LINE // max(8, int(tvm.runtime.DataType(str(load.source.ty.dtype)).bits)))


def line_starts(load: ir.TensorLoad, width: int) -> range:
    """Where the lines of `width` neighbouring elements begin."""
    return range(0, width, per_line(load))


def prefetch(loop: tirx.For) -> tirx.Stmt:
    """`loop` with a prefetch of each gathered tile at the head of its body."""
    lanes = {f.loop_var: f.extent for f in collect(loop.body, tirx.For)}
    fetches: list[tirx.Stmt] = []
    for load in gathers(loop.body, loop.loop_var) if asks(loop, PREFETCH) else []:
        further = ahead(load, loop)
        used = [v for v in lanes if any(mentions(i, [v]) for i in further)]
        if len(used) > 1 or any(not isinstance(lanes[v], tirx.IntImm) for v in used):
            continue
        width = int(lanes[used[0]]) if used else 1
        for start in line_starts(load, min(width, MOST_LINES * per_line(load))):
            at = {v: const(start, str(v.ty.dtype)) for v in used}
            fetches.append(fetch(load, [substitute(i, at) for i in further]))
    if not fetches:
        return refused(loop, PREFETCH, "it gathers nothing along its steps")
    return with_(loop, body=seq(*fetches, loop.body), notes=without(loop, PREFETCH))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.InsertPrefetch")
def InsertPrefetch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Prefetch in every annotated loop of a function."""

    return each_loop(func, inner=lambda loop: prefetch(loop) if PREFETCH in loop.annotations else None)


__all__ = ["InsertPrefetch", "ahead", "fetch", "gathers", "line_starts", "prefetch", "steps_ahead"]
