# SPDX-License-Identifier: Apache-2.0
"""Choices that a call gives rather than the code: parameters in place of the numbers of annotations.

before::

    def spmm(..., m: T.int32):
        for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
            ...

after::

    def spmm(chunks: T.int32, ..., m: T.int32):
        for i in T.serial(m, annotations={"sparsetir.chunks": chunks}):
            ...

One compiled function then serves every number of parts, and every distance of a prefetch. How a loop is written depends
on whether there are any, not on how many. Rows that are split keep the number: they allocate something for each part.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import collect
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import CARRY, CHUNKS, PREFETCH
from sparsetir.lower.loops import with_

LATE = {"chunks": CHUNKS, "prefetch": PREFETCH}  # by the names of choices


def with_late_choices(mod: ir.IRModule) -> tuple[ir.IRModule, tuple[str, ...]]:
    """A scheduled stage-II module of one function whose first parameters are choices, and which they are.

    Parameters
    ----------
    mod : IRModule
        Scheduled by one set of choices: a choice is the same number wherever it is annotated.

    Returns
    -------
    IRModule, tuple of str
        The names are keys of `LATE`; none where the loops ask for nothing of them.
    """
    ((where, func),) = mod.functions.items()
    notes = [loop.annotations for loop in collect(func.body, tirx.For)]
    marks = {name: mark for name, mark in LATE.items() if any(mark in held for held in notes)}
    if any(CARRY in held for held in notes):
        marks.pop("chunks", None)
    params = {mark: Var(f"{name}_given", ir.PrimType("int32")) for name, mark in marks.items()}

    def on_for(loop: tirx.For, mutator: Any) -> tirx.Stmt:
        changed = mutator.default_mutate(loop)
        return with_(changed, notes={k: params.get(k, v) for k, v in changed.annotations.items()})

    body = structural_mutate(func.body, [(tirx.For, on_for)])
    late = tirx.PrimFunc([*params.values(), *func.params], body, func.ret_type, func.attrs)
    return ir.IRModule({where: late}), tuple(marks)


__all__ = ["LATE", "with_late_choices"]
