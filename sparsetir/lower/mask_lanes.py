# SPDX-License-Identifier: Apache-2.0
"""Sum padded rows side by side in vectors: what tests each lane becomes a mask.

before::

    for w in range(slice_ptr[s + 1] - slice_ptr[s]):
        for r in range(8):
            if 0 <= indices[...] and indices[...] < n:
                acc[r] = acc[r] + a[(slice_ptr[s] + w) * 8 + r] * x[indices[(slice_ptr[s] + w) * 8 + r]]

after::

    for w in range(slice_ptr[s + 1] - slice_ptr[s]):
        if 0 < n:
            for r in T.vectorized(8):
                term[r] = a[...] * x[T.max(T.min(indices[...], n - 1), 0)]
            for r in T.vectorized(8):
                acc[r] = acc[r] + T.Select(0 <= indices[...] and indices[...] < n, term[r], 0)

Adding zero changes nothing, and a masked lane may hold anything. Gathered subscripts are kept inside their array; other
arrays are read at the slots that the loops go over, all of which are stored: conditions that say which slots there are
stay tests. The term has a statement of its own: TVM
takes a mask for granted inside of what it selects, and would simplify the subscripts.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import cast, const
from sparsetir.lower.rewriting import all_same, alloc, collect, conjunction, conjuncts, mentions, renewed, same, seq

FEWEST, MOST = 4, 64
KINDS = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


def _is_lane_of(index: ir.Expr, lane: Var) -> bool:
    """Whether a subscript moves by one with `lane`."""
    one = const(1, str(lane.ty.dtype))
    gap = tvm.sym.Analyzer().simplify(_moved(index, lane, one) - index)
    return isinstance(gap, tirx.IntImm) and int(gap) == 1


def _moved(index: ir.Expr, lane: Var, by: ir.Expr) -> ir.Expr:
    on_var = lambda v, _m: lane + by if v.same_as(lane) else v  # noqa: E731
    return tvm_ffi.structural_mutate(index, [(Var, on_var)])


def _is_of_slot(condition: ir.Expr, lane: Var) -> bool:
    """Whether a condition asks what a slot holds; others say which slots there are, and must not be passed over."""
    on_load = lambda x, _m: const(0, str(x.ty.dtype))  # noqa: E731
    return not mentions(tvm_ffi.structural_mutate(condition, [(ir.TensorLoad, on_load)]), [lane])


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
            if mentions(list(load.indices), [self.lane]) and not _is_lane_of(load.indices[-1], self.lane):
                self.is_known = False
            return load
        indices = []
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            if not any(index.same_as(g) for g in gathered):
                indices.append(index)
                continue
            if any(self._gathers(x) for x in collect(index, ir.TensorLoad)):
                self.is_known = False
            dtype = str(index.ty.dtype)
            size = cast(extent, dtype)
            indices.append(tirx.max(tirx.min(index, size - const(1, dtype)), const(0, dtype)))
            if not any(same(size, s) for s in self.sizes):
                self.sizes.append(size)
        return tirx.BufferLoad(load.source, indices)

    def _gathers(self, load: ir.TensorLoad) -> bool:
        """Whether an index is itself found through another one that moves."""
        inner = [x for i in load.indices for x in collect(i, ir.TensorLoad)]
        return any(mentions(x, [self.lane]) for x in inner)


def mask(loop: tirx.For) -> tirx.Stmt | None:
    """A loop over lanes as a vector loop under a mask; None where it is something else."""
    branch = loop.body
    if loop.kind not in KINDS or not isinstance(loop.extent, tirx.IntImm) or not isinstance(branch, tirx.IfThenElse):
        return None
    lanes, lane, store = int(loop.extent), loop.loop_var, branch.then_case
    if not FEWEST <= lanes <= MOST or lanes & (lanes - 1) or branch.else_case is not None:
        return None
    if not isinstance(store, tirx.BufferStore) or str(store.buffer.ty.storage_scope) != "local":
        return None
    value, indices = store.value, list(store.indices)
    if len(indices) != 1 or not _is_lane_of(indices[0], lane) or not isinstance(value, tirx.Add):
        return None
    own = value.a
    if not isinstance(own, ir.TensorLoad) or not own.source.same_as(store.buffer) or not all_same(own.indices, indices):
        return None
    conditions = conjuncts(branch.condition)
    masks = [c for c in conditions if mentions(c, [lane])]
    kept = [c for c in conditions if not mentions(c, [lane])]
    if not all(_is_of_slot(c, lane) for c in masks) or not masks or mentions([value.b, *conditions], [store.buffer]):
        return None
    clamp = _Clamp(lane)
    term = tvm_ffi.structural_mutate(value.b, [(ir.TensorLoad, clamp.on_load)])
    if not clamp.is_known or any(clamp._gathers(x) for c in masks for x in collect(c, ir.TensorLoad)):
        return None
    dtype = str(store.buffer.ty.dtype)
    held = tirx.decl_buffer([lanes], dtype, name="term", scope="local", layout=None)
    chosen = tirx.Select(conjunction(masks), tirx.BufferLoad(held, [lane]), const(0, dtype))
    steps = [tirx.BufferStore(held, term, [lane]), tirx.BufferStore(store.buffer, own + chosen, indices)]
    vectors = [renewed(tirx.For(lane, loop.min, loop.extent, tirx.ForKind.VECTORIZED, step)) for step in steps]
    body = seq(*alloc(held), *vectors)
    kept += [size > const(0, str(size.ty.dtype)) for size in clamp.sizes]
    return tirx.IfThenElse(conjunction(kept), body, None) if kept else body


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.MaskLanes")
def MaskLanes(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Mask every loop over padded lanes of a function."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        masked = mask(node)
        return mutator.default_mutate(node) if masked is None else masked

    body = tvm_ffi.structural_mutate(func.body, [(tirx.For, on_for)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


__all__ = ["MaskLanes", "mask"]
