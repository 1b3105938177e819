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
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.marks import MAP, refused
from sparsetir.lower.nests import SERIAL, each_loop, serial, vectorized
from sparsetir.lower.rewriting import renewed, seq, substitute
from sparsetir.lower.vector.vector_math import expand


def vectorize(loop: tirx.For) -> tirx.Stmt:
    """An annotated loop over one store in vectors; the sketch that annotates it has seen that its steps are apart."""
    j, lanes = loop.loop_var, int(loop.annotations[MAP])
    dtype = str(j.ty.dtype)
    body = tirx.BufferStore(loop.body.buffer, expand(loop.body.value), loop.body.indices)
    number = lambda n: const(n, dtype)  # noqa: E731

    def vector(begin: ir.Expr, width: int) -> tirx.Stmt:
        lane = Var(f"{j.name}_1", j.ty)
        if width == 1:
            return renewed(substitute(body, {j: begin}))
        return vectorized(lane, width, renewed(substitute(body, {j: begin + lane})))

    block = Var(f"{j.name}_0", j.ty)
    full = tirx.floordiv(loop.extent, number(lanes))
    stmts: list[tirx.Stmt] = [serial(block, full, vector(block * number(lanes), lanes))]
    while lanes > 1:
        begin, lanes = tirx.floordiv(loop.extent, number(lanes)) * number(lanes), lanes // 2
        is_left = tirx.floormod(loop.extent, number(lanes * 2)) >= number(lanes)
        stmts.append(tirx.IfThenElse(is_left, vector(begin, lanes), None))
        # What comes next begins where these end: at the extent's multiple of the smaller width.
    return seq(*stmts)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VectorizeMaps")
def VectorizeMaps(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every annotated loop of a function that is still one store; the annotation is refused elsewhere."""

    def change(loop: tirx.For) -> tirx.Stmt:
        is_map = MAP in loop.annotations and loop.kind == SERIAL and isinstance(loop.body, tirx.BufferStore)
        return vectorize(loop) if is_map else refused(loop, MAP, "it does not set one element a step")

    return each_loop(func, inner=change)


__all__ = ["VectorizeMaps", "vectorize"]
