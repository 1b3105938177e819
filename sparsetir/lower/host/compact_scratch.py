# SPDX-License-Identifier: Apache-2.0
"""Shrink scratch buffers to the part that is used, where TVM can tell it.

before::

    tile = T.sblock_alloc_buffer((64, 128))    # of which a step uses one row
    tile[i, k] = ...

after::

    tile = T.sblock_alloc_buffer((1, 128))
    tile[0, k] = ...

TVM cannot bound a part of a symbolic extent and would ask for 2^31 elements: such functions are left alone.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import LoweringError
from sparsetir.lower.rewriting import collect


def _scratch(func: tirx.PrimFunc) -> list[Var]:
    held = [b for block in collect(func.body, s_tir.SBlock) for b in block.alloc_buffers]
    return held + [a.buffer for a in collect(func.body, tirx.AllocBuffer)]


def has_unknown_scratch(func: tirx.PrimFunc) -> bool:
    """Whether a scratch buffer has a size that only a call tells."""
    return any(not isinstance(d, tirx.IntImm) for b in _scratch(func) for d in b.ty.shape)


@tvm.transform.module_pass(opt_level=0, name="sparsetir.CompactScratch")
class CompactScratch:
    """TVM's compaction for the functions it is safe for."""

    def transform_module(self, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        """Compact function by function."""
        out = ir.IRModule(dict(mod.functions.items()))
        for gv, func in mod.functions.items():
            if isinstance(func, tirx.PrimFunc) and not has_unknown_scratch(func):
                alone = s_tir.transform.CompactBufferAllocation()(ir.IRModule({gv.name_hint: func}))
                out[gv] = alone[gv.name_hint]
        return out


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.RefuseRagged")
def RefuseRagged(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Raise where scratch would be as long as a sparse row: memory is not allocated row by row."""
    for buffer in _scratch(func):
        if any(collect(d, ir.TensorLoad) for d in buffer.ty.shape):
            message = f"the scratch buffer {buffer.name} would be as long as a sparse row"
            raise LoweringError(f"{message}: split the row's loop by a constant before rfactor or caching")
    return func
