# SPDX-License-Identifier: Apache-2.0
"""Compute functions along contiguous positions in vectors.

before::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.map": 8}):
        s[indptr[i] + j] = T.exp(s[indptr[i] + j] - top[i])

after::

    for j_0 in range((indptr[i + 1] - indptr[i]) // 8):
        for j_1 in T.vectorized(8):
            s[indptr[i] + j_0 * 8 + j_1] = ...  # the exponential as arithmetic
    if (indptr[i + 1] - indptr[i]) % 8 // 4 == 1:
        ...  # four at once, then two, then one

Rows are often shorter than a vector or two: what is left over takes three steps, not seven. All steps compute alike, so
that an element's result does not depend on its place.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.marks import MAP, refused
from sparsetir.lower.nests import SERIAL, each_loop, serial, vectorized
from sparsetir.lower.rewriting import renewed, seq, substitute
from sparsetir.lower.vector.vector_math import expand
from sparsetir.walks import structural_mutate


def vectorize(loop: tirx.For) -> tirx.Stmt:
    """An annotated loop over one store in vectors; the sketch that annotates it has seen that its steps are apart."""
    j, lanes = loop.loop_var, int(loop.annotations[MAP])
    dtype = str(j.ty.dtype)
    number = lambda n: const(n, dtype)  # noqa: E731

    def vector(begin: ir.Expr, width: int) -> tirx.Stmt:
        lane = Var(f"{j.name}_1", j.ty)
        declared, body = _expanded(loop.body, lane, width)
        if width == 1:
            return seq(*declared, renewed(substitute(body, {j: begin, lane: number(0)})))
        inner = renewed(substitute(body, {j: begin + lane}))
        return seq(*declared, vectorized(lane, width, inner))

    block = Var(f"{j.name}_0", j.ty)
    full = tirx.floordiv(loop.extent, number(lanes))
    stmts: list[tirx.Stmt] = [serial(block, full, vector(block * number(lanes), lanes))]
    while lanes > 1:
        begin, lanes = tirx.floordiv(loop.extent, number(lanes)) * number(lanes), lanes // 2
        is_left = tirx.floormod(loop.extent, number(lanes * 2)) >= number(lanes)
        stmts.append(tirx.IfThenElse(is_left, vector(begin, lanes), None))
        # What comes next begins where these end: at the extent's multiple of the smaller width.
    return seq(*stmts)


def _expanded(store: tirx.BufferStore, lane: Var, width: int) -> tuple[list[tirx.Stmt], tirx.Stmt]:
    """What is to be declared, and the store with arithmetic for its functions.

    No bfloat16 stands in an expression with bound names: TVM would read it as an integer there, and rounds to it by an
    expression that names its argument twice. So they are widened before, and rounded after.
    """
    arrays: list[Var] = []
    before: list[tuple[ir.Expr, tirx.Stmt]] = []

    def place(value: ir.Expr) -> ir.Expr:
        array = tirx.decl_buffer((width,), str(value.ty.dtype), name="wide", scope="local", layout=None)
        arrays.append(array)
        before.append((value, tirx.BufferStore(array, value, [lane])))
        return tirx.BufferLoad(array, [lane])

    def on_cast(node: tirx.Cast, mutator: Any) -> ir.Expr:
        if not _is_bfloat16(node.value) or _is_bfloat16(node):
            return mutator.default_mutate(node)
        known = next((n for n, (value, _) in enumerate(before) if tvm_ffi.structural_equal(value, node)), None)
        return place(node) if known is None else tirx.BufferLoad(arrays[known], [lane])

    value = structural_mutate(store.value, [(tirx.Cast, on_cast)])
    if _is_bfloat16(value) and isinstance(value, tirx.Cast):
        value = tirx.Cast("bfloat16", place(expand(value.value)))
    last = tirx.BufferStore(store.buffer, expand(value), store.indices)
    return [tirx.AllocBuffer(array) for array in arrays], seq(*(stmt for _, stmt in before), last)


def _is_bfloat16(value: Any) -> bool:
    return str(value.ty.dtype) == "bfloat16"


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VectorizeMaps")
def VectorizeMaps(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every annotated loop of a function that is still one store; the annotation is refused elsewhere."""

    def change(loop: tirx.For) -> tirx.Stmt:
        is_map = MAP in loop.annotations and loop.kind == SERIAL and isinstance(loop.body, tirx.BufferStore)
        return vectorize(loop) if is_map else refused(loop, MAP, "it does not set one element a step")

    return each_loop(func, inner=change)


__all__ = ["VectorizeMaps", "vectorize"]
