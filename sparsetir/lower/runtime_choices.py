# SPDX-License-Identifier: Apache-2.0
"""Run-time choices: function parameters in place of the constants of annotations.

before::

    def spmm(..., m: T.int32):
        for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
            ...

after::

    def spmm(chunks: T.int32, ..., m: T.int32):
        for i in T.serial(m, annotations={"sparsetir.chunks": chunks}):
            ...

One compiled function then serves every number of chunks and every prefetch distance. The structure of a loop depends on
whether they are zero, not on their value. Loops with split rows keep the constant: they allocate a buffer for each
chunk.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import collect
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import CARRY, CHUNKS, PREFETCH
from sparsetir.lower.loops import with_

LATE = {"chunks": CHUNKS, "prefetch": PREFETCH}  # names of choices -> annotations


def with_late_choices(mod: ir.IRModule) -> tuple[ir.IRModule, tuple[str, ...]]:
    """Replace annotations of a scheduled stage-II module by parameters, the function's first ones.

    Parameters
    ----------
    mod : IRModule
        One function, scheduled by one set of choices: a choice has the same value wherever it is annotated.

    Returns
    -------
    IRModule, tuple of str
        The module and the names of the new parameters' choices, keys of `LATE`; empty if no loop is annotated with one.
    """
    ((where, func),) = mod.functions.items()
    notes = [loop.annotations for loop in collect(func.body, tirx.For)]
    marks = {name: mark for name, mark in LATE.items() if any(mark in text for text in notes)}
    if any(CARRY in text for text in notes):
        marks.pop("chunks", None)
    params = {mark: Var(f"{name}_given", ir.PrimType("int32")) for name, mark in marks.items()}

    def on_for(loop: tirx.For, mutator: Any) -> tirx.Stmt:
        changed = mutator.default_mutate(loop)
        return with_(changed, notes={k: params.get(k, v) for k, v in changed.annotations.items()})

    body = structural_mutate(func.body, [(tirx.For, on_for)])
    late = tirx.PrimFunc([*params.values(), *func.params], body, func.ret_type, func.attrs)
    return ir.IRModule({where: late}), tuple(marks)


__all__ = ["LATE", "with_late_choices"]
