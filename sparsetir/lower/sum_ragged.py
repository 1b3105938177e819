# SPDX-License-Identifier: Apache-2.0
"""Sum a row of unknown length in vectors, its end under a mask.

before::

    y[i] = 0
    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 8}):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    if 7 <= nnz - indptr[i] - (indptr[i + 1] - indptr[i]):
        for j_0 in range((indptr[i + 1] - indptr[i]) // 32):
            for g in T.unroll(4):
                for j_1 in T.vectorized(8):
                    acc[g * 8 + j_1] = acc[g * 8 + j_1] + a[...] * x[indices[indptr[i] + j_0 * 32 + g * 8 + j_1]]
        for j_0 in range(((indptr[i + 1] - indptr[i]) % 32 + 7) // 8):
            for j_1 in T.vectorized(8):
                term[j_1] = a[...] * x[indices[indptr[i] + ... + j_0 * 8 + j_1]]
            for j_1 in T.vectorized(8):
                acc[j_1] = acc[j_1] + T.Select(j_0 * 8 + j_1 < (indptr[i + 1] - indptr[i]) % 32, term[j_1], 0)
        y[i] = 0 + ...  # the sum of acc[0:32]
    else:
        ...  # as it was: rows that end just before their arrays do

A loop with a step for each entry ends where the processor does not expect it, which costs a short row more than its
sums; rows of up to eight entries now take the same way. A vector that reaches beyond its row reads entries of the next
one: they exist, and name elements that exist. The note is for sums that may be reordered.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import cast, const
from sparsetir.lower.declare_regions import STRUCTURE
from sparsetir.lower.rewriting import alloc, collect, conjunction, mentions, renewed, same, seq, substitute
from sparsetir.lower.vectorize_dots import Dot, match, product, sum_of

SUM = "sparsetir.sum"
GROUP = 4  # vectors at once: sums that hide each other's latency
SERIAL, UNROLLED, VECTORIZED = tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED


def _room(dot: Dot, structure: set[str]) -> list[ir.Expr] | None:
    """How many elements each array holds from the row's first on; None if a step beyond the row may read anything.

    Such a step is safe where it reads arrays along the row, and others through an index array that is read so.
    """
    var, found = dot.loop.loop_var, []
    for load in collect(dot.term, ir.TensorLoad):
        *others, last = load.indices
        if not mentions(list(load.indices), [var]):
            continue
        if _is_along(load, var):
            begin = substitute(last, {var: const(0, str(var.ty.dtype))})
            room = sym.Analyzer().simplify(cast(load.source.ty.shape[-1], str(begin.ty.dtype)) - begin)
            if not any(same(room, other) for other in found):
                found.append(room)
        elif not _is_gathered(load, var, structure):
            return None
    return found


def _is_along(load: ir.TensorLoad, var: Var) -> bool:
    """Whether a load moves by one element with `var`."""
    *others, last = load.indices
    if mentions(others, [var]) or mentions(collect(last, ir.TensorLoad), [var]):
        return False
    step = substitute(last, {var: var + const(1, str(var.ty.dtype))}) - last
    step = sym.Analyzer().simplify(step)
    return isinstance(step, tirx.IntImm) and int(step) == 1


def _is_gathered(load: ir.TensorLoad, var: Var, structure: set[str]) -> bool:
    """Whether every subscript that moves with `var` is an element of an index array along the row."""
    for index in load.indices:
        while isinstance(index, tirx.Cast):
            index = index.value
        if not mentions(index, [var]):
            continue
        if not isinstance(index, ir.TensorLoad) or str(index.source.name) not in structure or not _is_along(index, var):
            return False
    return True


def _emit(dot: Dot, rooms: list[ir.Expr]) -> tirx.Stmt:
    """The sum in vectors, and as it was where they would read past an array."""
    j, lanes, kind = dot.loop.loop_var, dot.lanes, str(dot.store.buffer.ty.dtype)
    dtype, extent = str(j.ty.dtype), dot.loop.extent
    zero, width, block = const(0, dtype), const(lanes, dtype), const(GROUP * lanes, dtype)
    acc = tirx.decl_buffer([GROUP * lanes], kind, name="acc", scope="local", layout=None)
    held = tirx.decl_buffer([lanes], kind, name="term", scope="local", layout=None)
    row, group, step, lane = (Var(n, j.ty) for n in ("j_0", "g", "j_0", "j_1"))

    def add(at: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(acc, tirx.BufferLoad(acc, [at]) + value, [at])

    def vector(count: int, body: tirx.Stmt) -> tirx.Stmt:
        return renewed(tirx.For(lane, zero, const(count, dtype), VECTORIZED, body))

    clear = vector(GROUP * lanes, tirx.BufferStore(acc, const(0, kind), [lane]))
    inner = vector(lanes, add(group * width + lane, substitute(dot.term, {j: row * block + group * width + lane})))
    full = tirx.For(row, zero, tirx.floordiv(extent, block), SERIAL, tirx.For(group, zero, const(GROUP, dtype), UNROLLED, inner))
    done, left = tirx.floordiv(extent, block) * block, tirx.floormod(extent, block)
    at = step * width + lane
    load = vector(lanes, tirx.BufferStore(held, substitute(dot.term, {j: done + at}), [lane]))
    chosen = tirx.Select(at < left, tirx.BufferLoad(held, [lane]), const(0, kind))
    steps = tirx.floordiv(left + const(lanes - 1, dtype), width)
    ends = tirx.For(step, zero, steps, SERIAL, seq(*alloc(held), load, vector(lanes, add(lane, chosen))))
    total = sum_of(acc, zero, GROUP * lanes)
    if dot.factors:
        total = product(dot.factors) * total
    finish = tirx.BufferStore(dot.store.buffer, dot.start + total, dot.store.indices)
    fits = conjunction([room - cast(extent, str(room.ty.dtype)) >= const(lanes - 1, str(room.ty.dtype)) for room in rooms])
    return tirx.IfThenElse(fits, seq(*alloc(acc), clear, full, ends, finish), renewed(_plain(dot)))


def _plain(dot: Dot) -> tirx.Stmt:
    """The sum as it was."""
    loop = dot.loop
    notes = {k: v for k, v in loop.annotations.items() if k != SUM}
    plain = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, None, notes)
    if not dot.is_whole:
        return plain
    return seq(tirx.BufferStore(dot.store.buffer, dot.start, dot.store.indices), plain)


def _summed(loop: tirx.Stmt, before: tirx.Stmt | None, structure: set[str]) -> tirx.Stmt | None:
    dot = match(loop, before, SUM) if isinstance(loop, tirx.For) else None
    rooms = _room(dot, structure) if dot is not None else None
    return _emit(dot, rooms) if dot is not None and rooms else None


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SumRagged")
def SumRagged(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every annotated ragged sum of a function; a note that fits nothing is dropped."""
    structure = {str(n) for n in func.attrs.get(STRUCTURE, [])} if func.attrs is not None else set()

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        found = _summed(node, None, structure)
        if found is not None:
            return found
        inner = mutator.default_mutate(node)
        notes = {k: v for k, v in inner.annotations.items() if k != SUM}
        return tirx.For(inner.loop_var, inner.min, inner.extent, inner.kind, inner.body, None, notes)

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        out: list[tirx.Stmt] = []
        for stmt in node.seq:
            both = _summed(stmt, out[-1], structure) if out else None
            if both is None:
                out.append(mutator.mutate(stmt))
            else:
                out[-1] = both
        return seq(*out)

    body = tvm_ffi.structural_mutate(func.body, [(tirx.For, on_for), (tirx.SeqStmt, on_seq)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


__all__ = ["SUM", "SumRagged"]
