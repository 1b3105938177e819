# SPDX-License-Identifier: Apache-2.0
"""Give scratch memory the name that the program gives its view: the view does not outlive stage I.

before::

    scratch_5 = T.alloc_buffer((nnz,))
    score = T.decl_buffer((m, n), data=scratch_5.data)

after::

    score = T.alloc_buffer((nnz,))
    score_1 = T.decl_buffer((m, n), data=score.data)
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import decode
from sparsetir.lower.nests import with_body
from sparsetir.walks import structural_mutate


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.NameScratch")
def NameScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rename the scratch memory of a stage-I function."""
    fresh: dict[Var, Var] = {}
    for buffer in decode(func).buffers.values():
        if buffer.allocated:
            fresh[buffer.storage] = _named(buffer.storage, buffer.name)
    if not fresh:
        return func
    body = structural_mutate(func.body, [(Var, lambda var, _mutator: fresh.get(var, var))])
    return with_body(func, body)


def _named(storage: Var, name: str) -> Var:
    return Var(name, storage.ty)


__all__ = ["NameScratch"]
