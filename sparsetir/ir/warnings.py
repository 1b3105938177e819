# SPDX-License-Identifier: Apache-2.0
"""Warn about legal programs that are probably mistakes, or that mean something else upstream."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.errors import ScriptWarning, UpstreamWarning
from sparsetir.ir.rewriting import collect, mentions
from sparsetir.ir.rules import Access, loads, stores
from sparsetir.ir.views import INIT, STORED, Axis, Program, SparseBuffer, SpIter

# Warnings of programs that are legal but probably mistakes.


def warn_of_doubtful(program: Program, *, stacklevel: int = 3) -> None:
    """Warn of each initialisation that does not fit what the iteration stores."""
    for iteration in program.iterations:
        for message in _doubts(iteration):
            warnings.warn(f"{message} (sp_iter {iteration.name!r})", ScriptWarning, stacklevel=stacklevel)


def _doubts(iteration: SpIter) -> Iterator[str]:
    block = iteration.block
    for first in stores(block.init) if block.init is not None else []:
        updates = [s for s in stores(block.body) if s.buffer.same_as(first.buffer)]
        if updates and all(_is_permuted(first, update) for update in updates):
            pair = f"T.init() sets {_text(first)}, and the body stores to {_text(updates[0])}"
            yield f"{pair}: give both the same subscripts"
        for update in updates:
            for var in _lost(update, iteration):
                sums = f"{var.name} is spatial (S), but {_text(update)}, which the body adds to, does not depend on it"
                yield f"{sums}: write R for what is summed over, or give the result a subscript {var.name}"


def _is_permuted(a: Access, b: Access) -> bool:
    """Return whether both have the same variables as subscripts, in another order."""
    if not all(isinstance(index, Var) for index in (*a.indices, *b.indices)):
        return False
    return a.indices != b.indices and sorted(map(str, a.indices)) == sorted(map(str, b.indices))


def _lost(update: Access, iteration: SpIter) -> Iterator[Var]:
    """Yield spatial variables of a running sum's value that neither its subscripts nor any axis below theirs use."""
    value = update.node.value
    if not any(load.buffer.same_as(update.buffer) for load in loads(value)):
        return
    target_axes = [a for v, a in zip(iteration.vars, iteration.axes, strict=True) if mentions(update.indices, [v])]
    covered_axes = {*target_axes, *(ancestor for axis in target_axes for ancestor in axis.ancestors)}
    for var, axis, kind in zip(iteration.vars, iteration.axes, iteration.kinds, strict=True):
        if kind == "S" and axis not in covered_axes and mentions(value, [var]):
            yield var


def _text(access: Access) -> str:
    return f"{access.name}[{', '.join(map(str, access.indices))}]"


# Warnings of programs that would mean something else in upstream SparseTIR; see docs/upstream.md.


def warn_of_other_meanings(program: Program, *, stacklevel: int = 3) -> None:
    """Warn of each place where upstream would compute something else without an error."""
    for message in (*_layouts(program), *_initialisations(program)):
        warnings.warn(f"{message}; see docs/upstream.md", UpstreamWarning, stacklevel=stacklevel)


# ---------------------------------------------------------------------------------------------- layouts


def _layouts(program: Program) -> Iterator[str]:
    """Yield buffers whose axes of one tree are not listed side by side, where upstream makes a dimension of each."""
    for buffer in program.buffers.values():
        split = [a for a in buffer.axes if a.kind in ("sparse_fixed", "singleton") and _is_apart(a, buffer)]
        if split and not buffer.allocated:
            listed = ", ".join(a.name for a in buffer.axes)
            trees = ", ".join(" ".join(a.name for a in tree) for tree in buffer.trees)
            side_by_side = ", ".join(a.name for tree in buffer.trees for a in tree)
            yield (
                f"the values of {buffer.name} over ({listed}) have one dimension for each tree of axes, ({trees}), "
                f"whereas upstream SparseTIR lays them out in the order of the list: transpose arrays that come from "
                f"there, and list ({side_by_side}) to say that you did"
            )


def _is_apart(axis: Axis, buffer: SparseBuffer) -> bool:
    """Return whether an axis of another tree is listed between an axis and its parent."""
    if axis.parent is None:
        return False
    between = buffer.axes[buffer.axes.index(axis.parent) + 1 : buffer.axes.index(axis)]
    return any(a.root is not axis.root for a in between)


# ---------------------------------------------------------------------------------------------- initialisations


def _initialisations(program: Program) -> Iterator[str]:
    """Initialisations that reach coordinates which are not stored, and wipe what an iteration before has put there."""
    for n, it in enumerate(program.iterations):
        for buffer, axis in _reaching_beyond(it, program):
            earlier = _unread_before(buffer, program.iterations[:n])
            if earlier is not None:
                yield (
                    f"T.init() of sp_iter {it.name!r} sets all of {buffer.name} again, also what sp_iter "
                    f"{earlier.name!r} stored: it reaches every coordinate of {axis.name}, stored or not, whereas "
                    f'upstream SparseTIR initialises stored ones: T.sp_iter_attr({{"init": "stored"}}) '
                    f"says that, or initialise {buffer.name} once, before both"
                )


def _reaching_beyond(it: SpIter, program: Program) -> Iterator[tuple[Var, Axis]]:
    """Buffers that an iteration initialises beyond its stored points, with the axis whose other points are meant."""
    if it.block.init is None or str(it.block.annotations.get(INIT, "")) == STORED:
        return
    axis_of = dict(zip(it.vars, it.axes, strict=True))
    for store in collect(it.block.init, tirx.BufferStore):
        buffer = program.buffers.get(store.buffer)
        for n, index in enumerate(store.indices):
            axis = axis_of.get(index) if isinstance(index, Var) else None
            is_own = axis is not None and buffer is not None and buffer.axes[n] is axis
            if axis is not None and not is_own and axis.indices is not None:
                yield store.buffer, axis


def _unread_before(buffer: Var, before: list[SpIter]) -> SpIter | None:
    """Return the last iteration that stores to a buffer, if nothing reads the result before the next one does."""
    for it in reversed(before):
        stores = collect(it.block.body, tirx.BufferStore)
        own_stores = [s for s in stores if s.buffer.same_as(buffer)]
        other_values = [s.value for s in stores if not s.buffer.same_as(buffer)]
        if any(load.source.same_as(buffer) for load in collect(other_values, ir.TensorLoad)):
            return None
        if own_stores:
            return it
    return None


__all__ = ["warn_of_doubtful", "warn_of_other_meanings"]
