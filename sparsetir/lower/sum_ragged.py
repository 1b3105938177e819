# SPDX-License-Identifier: Apache-2.0
"""Sum a row of unknown length in vectors, its end under a mask.

before::

    y[i] = 0
    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.sum": 8}):
        y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    if indptr[i + 1] - indptr[i] + 7 <= nnz - indptr[i]:
        for j_0 in range((indptr[i + 1] - indptr[i]) // 16):
            for g in T.unroll(2):
                for j_1 in T.vectorized(8):
                    acc[g * 8 + j_1] = acc[g * 8 + j_1] + a[...] * x[indices[indptr[i] + j_0 * 16 + g * 8 + j_1]]
        for j_0 in range(((indptr[i + 1] - indptr[i]) % 16 + 7) // 8):
            for j_1 in T.vectorized(8):
                term[j_1] = a[...] * x[indices[indptr[i] + ... + j_0 * 8 + j_1]]
            for j_1 in T.vectorized(8):
                acc[j_1] = acc[j_1] + T.Select(j_0 * 8 + j_1 < (indptr[i + 1] - indptr[i]) % 16, term[j_1], 0)
        y[i] = 0 + ...  # the sum of acc[0:16]
    else:
        ...  # as it was: rows that end just before their arrays do

A loop with a step for each entry ends where the processor does not expect it, which costs a short row more than its
sums; rows of up to eight entries now take the same way. A vector that reaches beyond its row reads entries of the next
one: they exist, and name elements that exist. A subscript that is computed from them is kept inside its array. The
note is for sums that may be reordered.
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
from sparsetir.lower.vectorize_dots import Dot, match, product, reduced

SUM = "sparsetir.sum"
GROUP = 2  # vectors at once: sums that hide each other's latency; more would cost short rows a longer end
SERIAL, UNROLLED, VECTORIZED = tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED


def _room(dot: Dot, structure: set[str]) -> tuple[list[ir.Expr], list[ir.TensorLoad]] | None:
    """How many elements each array holds from the row's first on, and the loads that a step beyond it must clamp.

    None if such a step may read anything. It is safe where it reads arrays along the row, and others through an index
    array that is read so: an element of another row is a coordinate too, but not a formula of this row's elements and
    of another's.
    """
    var = dot.loop.loop_var
    found: list[ir.Expr] = []
    clamped: list[ir.TensorLoad] = []
    for load in collect(dot.term, ir.TensorLoad):
        last = load.indices[-1]
        if not mentions(list(load.indices), [var]):
            continue
        if _is_along(load, var):
            begin = substitute(last, {var: const(0, str(var.ty.dtype))})
            room = sym.Analyzer().simplify(cast(load.source.ty.shape[-1], str(begin.ty.dtype)) - begin)
            if not any(same(room, other) for other in found):
                found.append(room)
        elif _is_computed(load, var):
            clamped += [] if _is_gathered(load, var, structure) else [load]
        else:
            return None
    return found, clamped


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


def _is_computed(load: ir.TensorLoad, var: Var) -> bool:
    """Whether every subscript that moves with `var` does so through elements along the row alone."""
    inner = [x for x in collect(list(load.indices), ir.TensorLoad) if mentions(x, [var])]
    on_load = lambda x, _m: const(0, str(x.ty.dtype))  # noqa: E731
    fixed = [tvm_ffi.structural_mutate(index, [(ir.TensorLoad, on_load)]) for index in load.indices]
    return all(_is_along(x, var) for x in inner) and not mentions(fixed, [var])


def _clamp(term: ir.Expr, loads: list[ir.TensorLoad], var: Var) -> ir.Expr:
    """`term` with the subscripts of some loads kept inside their arrays, which hold something where a row does."""

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if not any(same(load, other) for other in loads):
            return mutator.default_mutate(load)
        pairs = zip(load.indices, load.source.ty.shape, strict=True)
        indices = [_inside(i, extent) if mentions(i, [var]) else i for i, extent in pairs]
        return tirx.BufferLoad(load.source, indices)

    return tvm_ffi.structural_mutate(term, [(ir.TensorLoad, on_load)])


def _inside(index: ir.Expr, extent: ir.Expr) -> ir.Expr:
    dtype = str(index.ty.dtype)
    return tirx.max(tirx.min(index, cast(extent, dtype) - const(1, dtype)), const(0, dtype))


class _Sum:
    """A sum in vectors: `GROUP` accumulators of `lanes` elements."""

    def __init__(self, dot: Dot, clamped: list[ir.TensorLoad]) -> None:
        self.dot = dot
        self.beyond = _clamp(dot.term, clamped, dot.loop.loop_var)
        self.j, self.lanes, self.kind = dot.loop.loop_var, dot.lanes, str(dot.store.buffer.ty.dtype)
        self.acc = tirx.decl_buffer([GROUP * self.lanes], self.kind, name="acc", scope="local", layout=None)
        self.lane = Var("j_1", self.j.ty)

    def number(self, value: int) -> ir.Expr:
        """A constant of the loop variable's dtype."""
        return const(value, str(self.j.ty.dtype))

    def vector(self, body: tirx.Stmt, lanes: int | None = None) -> tirx.Stmt:
        """`body` for every lane."""
        extent = self.number(self.lanes if lanes is None else lanes)
        return renewed(tirx.For(self.lane, self.number(0), extent, VECTORIZED, body))

    def term(self, at: ir.Expr) -> ir.Expr:
        """What step `at` adds."""
        return substitute(self.dot.term, {self.j: at})

    def add(self, at: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        """Add to an accumulator."""
        return tirx.BufferStore(self.acc, tirx.BufferLoad(self.acc, [at]) + value, [at])

    def clear(self) -> tirx.Stmt:
        """All accumulators zero."""
        return self.vector(tirx.BufferStore(self.acc, const(0, self.kind), [self.lane]), GROUP * self.lanes)

    def groups(self) -> tirx.Stmt:
        """The steps that fill all accumulators."""
        group, member, size = Var("j_0", self.j.ty), Var("g", self.j.ty), self.number(GROUP * self.lanes)
        at = member * self.number(self.lanes) + self.lane
        inner = self.vector(self.add(at, self.term(group * size + at)))
        each = tirx.For(member, self.number(0), self.number(GROUP), UNROLLED, inner)
        return tirx.For(group, self.number(0), tirx.floordiv(self.dot.loop.extent, size), SERIAL, each)

    def end(self) -> tirx.Stmt:
        """The steps behind the groups, under a mask; the term is kept apart, or TVM simplified its subscripts by it."""
        step, size, width = Var("j_0", self.j.ty), self.number(GROUP * self.lanes), self.number(self.lanes)
        done = tirx.floordiv(self.dot.loop.extent, size) * size
        left = tirx.floormod(self.dot.loop.extent, size)
        held = tirx.decl_buffer([self.lanes], self.kind, name="term", scope="local", layout=None)
        at = step * width + self.lane
        term = substitute(self.beyond, {self.j: done + at})
        load = self.vector(tirx.BufferStore(held, term, [self.lane]))
        chosen = tirx.Select(at < left, tirx.BufferLoad(held, [self.lane]), const(0, self.kind))
        body = seq(*alloc(held), load, self.vector(self.add(self.lane, chosen)))
        steps = tirx.floordiv(left + self.number(self.lanes - 1), width)
        return tirx.For(step, self.number(0), steps, SERIAL, body)

    def finish(self) -> tirx.Stmt:
        """The result out of the accumulators."""
        total = reduced(self.acc, self.number(0), GROUP * self.lanes)
        if self.dot.factors:
            total = product(self.dot.factors) * total
        return tirx.BufferStore(self.dot.store.buffer, self.dot.start + total, self.dot.store.indices)


def _emit(dot: Dot, rooms: list[ir.Expr], clamped: list[ir.TensorLoad]) -> tirx.Stmt:
    """The sum in vectors, and as it was where they would read past an array."""
    made, extent = _Sum(dot, clamped), dot.loop.extent
    both = seq(*alloc(made.acc), made.clear(), made.groups(), made.end(), made.finish())
    needed = cast(extent, "int64") + const(dot.lanes - 1, "int64")  # 32 bits may hold no more than the last position
    fits = conjunction([needed <= cast(room, "int64") for room in rooms])
    stmt = tirx.IfThenElse(fits, both, renewed(_plain(dot)))
    # An empty loop must not touch the element: it may lie behind a condition of its own.
    runs = extent > const(0, str(extent.ty.dtype))
    return stmt if dot.is_whole else tirx.IfThenElse(runs, stmt, None)


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
    found = _room(dot, structure) if dot is not None else None
    return _emit(dot, *found) if dot is not None and found is not None and found[0] else None


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
