# SPDX-License-Identifier: Apache-2.0
"""Let every use of a scratch buffer name the buffer that is allocated.

before::

    scratch = T.alloc_buffer((feat,))
    scratch_1[k] = ...           # another variable: compaction computed its shape anew

after::

    scratch = T.alloc_buffer((feat,))
    scratch[k] = ...

TVM's buffer compaction leaves such pairs where it cannot bound an extent. Scratch as long as a sparse row is
refused: it would be allocated row by row.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import LoweringError
from sparsetir.lower.rewriting import collect


def _refuse_ragged(allocated: list[Var]) -> None:
    """Memory is not allocated row by row."""
    for buffer in allocated:
        if any(collect(d, ir.TensorLoad) for d in buffer.ty.shape):
            message = f"the scratch buffer {buffer.name} would be as long as a sparse row"
            raise LoweringError(f"{message}: split the row's loop by a constant before rfactor or caching")


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.RebindBuffers")
def RebindBuffers(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Replace buffers that nothing declares by the allocated buffer of the same name."""
    allocated = [b for block in collect(func.body, s_tir.SBlock) for b in block.alloc_buffers]
    allocated += [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    known = {*allocated, *func.params, *(d.buffer for d in collect(func.body, tirx.DeclBuffer))}
    by_name = {str(b.name): b for b in allocated}
    _refuse_ragged(allocated)
    used = {x.source for x in collect(func.body, ir.TensorLoad)}
    used |= {s.buffer for s in collect(func.body, tirx.BufferStore)}
    stray: dict[Var, Var] = {b: by_name[str(b.name)] for b in used if b not in known and str(b.name) in by_name}
    if not stray:
        return func
    body = tvm_ffi.structural_mutate(func.body, [(Var, lambda v, _m: stray.get(v, v))])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
