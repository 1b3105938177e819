# SPDX-License-Identifier: Apache-2.0
"""Masked (predicated) vectorisation: padded rows are summed side by side, the test of each lane is a mask.

before::

    for w in range(slice_ptr[s + 1] - slice_ptr[s]):
        for r in range(8):
            if 0 <= indices[...] and indices[...] < n:
                acc[r] = acc[r] + a[(slice_ptr[s] + w) * 8 + r] * x[indices[(slice_ptr[s] + w) * 8 + r]]

after::

    for w in range(slice_ptr[s + 1] - slice_ptr[s]):
        if ...:  # 0 <= indices[...] and indices[...] < n in every lane
            for r in T.vectorized(8):
                acc[r] = acc[r] + a[...] * x[indices[(slice_ptr[s] + w) * 8 + r]]
        elif 0 < n:
            for r in T.vectorized(8):
                term[r] = a[...] * x[T.max(T.min(indices[...], n - 1), 0)]
            for r in T.vectorized(8):
                acc[r] = acc[r] + T.Select(0 <= indices[...] and indices[...] < n, term[r], 0)

A loop that stores one guarded element a lane, such as ``if rows[...] < m: y[rows[...]] = acc[r]``, goes without its
guards where they hold in every lane.

Adding zero changes nothing, and a masked lane may hold anything. Gathered subscripts are kept inside their array; other
arrays are read at the slots that the loops go over, all of which are stored: conditions that say which slots there are
stay tests. The term has a statement of its own: TVM takes a mask for granted inside of what it selects, and would
simplify the subscripts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.ir import cast, const
from sparsetir.lower.nests import SERIAL, UNROLLED, VECTORIZED, Update, each_loop, with_
from sparsetir.lower.rewriting import (
    all_same,
    alloc,
    collect,
    conjunction,
    conjuncts,
    inside,
    is_along,
    mentions,
    moves_by_one,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.walks import structural_mutate

FEWEST, MOST = 4, 64
KINDS = (SERIAL, UNROLLED)
# What takes a number and a vector, unlike the nodes' own constructors.
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
}


def _is_of_slot(condition: ir.Expr, lane: Var) -> bool:
    """Whether a condition asks what a slot holds; others say which slots there are, and must not be passed over."""
    on_load = lambda x, _m: const(0, str(x.ty.dtype))  # noqa: E731
    return not mentions(structural_mutate(condition, [(ir.TensorLoad, on_load)]), [lane])


class _Clamp:
    """Keeps the gathered subscripts of a term inside their arrays; `sizes` must be positive for that."""

    def __init__(self, lane: Var) -> None:
        self.lane = lane
        self.sizes: list[ir.Expr] = []
        self.is_known = True

    def on_load(self, load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        """One load of the term."""
        gathered = [i for i in load.indices if mentions(collect(i, ir.TensorLoad), [self.lane])]
        if not gathered:
            if mentions(list(load.indices), [self.lane]) and not moves_by_one(load.indices[-1], self.lane):
                self.is_known = False
            return load
        indices = []
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            if not any(index.same_as(g) for g in gathered):
                indices.append(index)
                continue
            if any(self._gathers(x) for x in collect(index, ir.TensorLoad)):
                self.is_known = False
            size = cast(extent, str(index.ty.dtype))
            indices.append(inside(index, size))
            if not any(same(size, s) for s in self.sizes):
                self.sizes.append(size)
        return tirx.BufferLoad(load.source, indices)

    def _gathers(self, load: ir.TensorLoad) -> bool:
        """Whether an index is itself found through another one that moves."""
        inner = [x for i in load.indices for x in collect(i, ir.TensorLoad)]
        return any(mentions(x, [self.lane]) for x in inner)


def _guarded(loop: tirx.For) -> tuple[tirx.BufferStore, list[ir.Expr], list[ir.Expr]] | None:
    """The one store of a loop over lanes, the conditions on it that ask what a slot holds, and those for all lanes.

    None where it is something else.
    """
    branch = loop.body
    if loop.kind not in KINDS or not isinstance(loop.extent, tirx.IntImm) or not isinstance(branch, tirx.IfThenElse):
        return None
    lanes, store = int(loop.extent), branch.then_case
    if not FEWEST <= lanes <= MOST or lanes & (lanes - 1) or branch.else_case is not None:
        return None
    if not isinstance(store, tirx.BufferStore) or mentions(branch.condition, [store.buffer]):
        return None
    conditions = conjuncts(branch.condition)
    masks = [c for c in conditions if mentions(c, [loop.loop_var])]
    if not masks or not all(_is_of_slot(c, loop.loop_var) for c in masks):
        return None
    return store, masks, [c for c in conditions if not mentions(c, [loop.loop_var])]


def mask(loop: tirx.For) -> tirx.Stmt | None:
    """A loop over lanes as a vector loop under a mask; None where it is something else."""
    found = _guarded(loop)
    if found is None or str(found[0].buffer.ty.storage_scope) != "local":
        return None
    store, masks, kept = found
    lane, lanes, update, indices = loop.loop_var, int(loop.extent), Update.of(store), list(store.indices)
    if update is None or not update.is_alone or len(indices) != 1 or not moves_by_one(indices[0], lane):
        return None
    clamp = _Clamp(lane)
    term = structural_mutate(update.term, [(ir.TensorLoad, clamp.on_load)])
    if not clamp.is_known or any(clamp._gathers(x) for c in masks for x in collect(c, ir.TensorLoad)):
        return None
    dtype = update.dtype
    held = tirx.decl_buffer([lanes], dtype, name="term", scope="local", layout=None)
    chosen = tirx.Select(conjunction(masks), tirx.BufferLoad(held, [lane]), const(0, dtype))
    steps = [tirx.BufferStore(held, term, [lane]), tirx.BufferStore(store.buffer, update.own + chosen, indices)]
    vectors = [renewed(with_(loop, kind=VECTORIZED, body=step, notes={})) for step in steps]
    body = seq(*alloc(held), *vectors)
    exist = [size > const(0, str(size.ty.dtype)) for size in clamp.sizes]
    if exist:
        body = tirx.IfThenElse(conjunction(exist), body, None)
    # What stands below a condition of its own may lie outside of its array where that does not hold.
    is_plain = not any(op.is_if_then_else(c) for c in collect(update.term, ir.Call))
    every = in_every_lane(masks, lane, lanes) if is_plain else None
    if every is not None:
        body = tirx.IfThenElse(every, _whole(loop, store), body)
    return tirx.IfThenElse(conjunction(kept), body, None) if kept else body


def _whole(loop: tirx.For, store: tirx.BufferStore) -> tirx.Stmt:
    """A step whose lanes all hold something."""
    lane = loop.loop_var

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if not mentions(collect(list(load.indices), ir.TensorLoad), [lane]):
            return mutator.default_mutate(load)
        return tirx.BufferLoad(load.source, _reloaded(load.indices, load.source, lane))

    value = structural_mutate(store.value, [(ir.TensorLoad, on_load)])
    moved = tirx.BufferStore(store.buffer, value, store.indices)
    return renewed(with_(loop, kind=VECTORIZED, body=moved, notes={}))


def _reloaded(indices: Sequence[ir.Expr], array: Var, lane: Var) -> list[ir.Expr]:
    """Subscripts of an array whose own loads LLVM does not know from the vector that was tested.

    It would take the elements out of that one by one, which takes twice as long as to load them. What is added to
    their places is the sign bit of a size, zero, which LLVM does not know.
    """
    # Of the size itself: TVM narrows a size that was cast to 64 bits, and leaves the 63 places by which it is shifted.
    size = next(iter(collect(array.ty.shape[-1], Var)), array.ty.shape[-1])
    sign = tirx.shift_right(size, const(tvm.DataType(str(size.ty.dtype)).bits - 1, str(size.ty.dtype)))

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if not mentions(list(load.indices), [lane]):
            return mutator.default_mutate(load)
        *others, last = load.indices
        return tirx.BufferLoad(load.source, [*others, last + cast(sign, str(last.ty.dtype))])

    return [structural_mutate(i, [(ir.TensorLoad, on_load)]) for i in indices]


def unguarded(loop: tirx.For) -> tirx.Stmt | None:
    """A loop that stores one guarded element a lane, without the guards where all hold; None for something else."""
    found = _guarded(loop)
    if found is None:
        return None
    store, masks, kept = found
    lane, lanes = loop.loop_var, int(loop.extent)
    every = in_every_lane(masks, lane, lanes)
    if every is None:
        return None
    moved = tirx.BufferStore(store.buffer, store.value, _reloaded(store.indices, store.buffer, lane))
    whole = with_(loop, kind=UNROLLED, body=moved, notes={})
    return tirx.IfThenElse(conjunction([*kept, every]), renewed(whole), loop)


def in_every_lane(conditions: list[ir.Expr], lane: Var, lanes: int) -> ir.Expr | None:
    """Whether conditions, which differ between lanes, hold in every lane, as one number; None for unusual ones.

    What different arrays hold is tested apart: what a row alone decides need not be asked again for each of its slots.
    """
    parts: list[list[ir.Expr]] = []
    for condition in conditions:
        tested = collect(condition, ir.TensorLoad)
        like = next((part for part in parts if all_same(collect(part[0], ir.TensorLoad), tested)), None)
        if like is None:
            parts.append([condition])
        else:
            like.append(condition)
    try:
        vectors = [conjunction([_vector(c, lane, lanes) for c in _between(part)]) for part in parts]
    except TypeError:
        return None
    return conjunction([tirx.call_llvm_pure_intrin("bool", "llvm.vector.reduce.and", v) for v in vectors])


def _between(conditions: list[ir.Expr]) -> list[ir.Expr]:
    """``x >= 0 and x < n`` as one comparison of numbers without sign: a size is not negative."""
    kinds = [type(c) for c in conditions]
    if kinds != [tirx.GE, tirx.LT] or not same(conditions[0].a, conditions[1].a):
        return conditions
    zero, x, size = conditions[0].b, conditions[1].a, conditions[1].b
    dtype = str(x.ty.dtype)
    if not isinstance(zero, tirx.IntImm) or int(zero) != 0 or not dtype.startswith("int"):
        return conditions
    return [tirx.LT(tirx.Cast(f"u{dtype}", x), tirx.Cast(f"u{dtype}", size))]


def _vector(x: Any, lane: Var, lanes: int) -> ir.Expr:
    """An expression for all lanes at once; a `TypeError` where that takes more than `OPERATORS`."""
    if not mentions(x, [lane]):
        return x
    if isinstance(x, Var):
        return tirx.Ramp(const(0, str(lane.ty.dtype)), const(1, str(lane.ty.dtype)), lanes)
    if isinstance(x, ir.TensorLoad) and is_along(x, lane):
        start = substitute(x.indices[-1], {lane: const(0, str(lane.ty.dtype))})
        return tirx.BufferLoad(x.source, [*x.indices[:-1], tirx.Ramp(start, const(1, str(start.ty.dtype)), lanes)])
    if isinstance(x, tirx.Cast):
        return tirx.Cast(f"{x.ty.dtype}x{lanes}", _vector(x.value, lane, lanes))
    if type(x) not in OPERATORS:
        raise TypeError
    return OPERATORS[type(x)](_vector(x.a, lane, lanes), _vector(x.b, lane, lanes))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VectorizeMasked")
def VectorizeMasked(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Mask every loop over padded lanes of a function."""

    return each_loop(func, outer=lambda loop: mask(loop) or unguarded(loop))


__all__ = ["VectorizeMasked", "mask"]
