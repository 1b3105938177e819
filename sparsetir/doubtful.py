# SPDX-License-Identifier: Apache-2.0
"""Warnings of programs that are legal and hardly meant."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from tvm.ir import Var

from sparsetir.errors import ScriptWarning
from sparsetir.ir import Program, SpIter
from sparsetir.lower.rewriting import mentions
from sparsetir.rules import Access, loads, stores


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
    """Whether both have the same variables as subscripts, in another order."""
    if not all(isinstance(index, Var) for index in (*a.indices, *b.indices)):
        return False
    return a.indices != b.indices and sorted(map(str, a.indices)) == sorted(map(str, b.indices))


def _lost(update: Access, iteration: SpIter) -> Iterator[Var]:
    """The spatial variables that the value of a running sum uses, and its place does not, nor any axis below theirs."""
    value = update.node.value
    if not any(load.buffer.same_as(update.buffer) for load in loads(value)):
        return
    placed = [a for v, a in zip(iteration.vars, iteration.axes, strict=True) if mentions(update.indices, [v])]
    known = {*placed, *(above for axis in placed for above in axis.ancestors)}
    for var, axis, kind in zip(iteration.vars, iteration.axes, iteration.kinds, strict=True):
        if kind == "S" and axis not in known and mentions(value, [var]):
            yield var


def _text(access: Access) -> str:
    return f"{access.name}[{', '.join(map(str, access.indices))}]"


__all__ = ["warn_of_doubtful"]
