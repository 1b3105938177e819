# SPDX-License-Identifier: Apache-2.0
"""Let every use of a scratch buffer name the buffer that is allocated.

before::

    T.reads(o_global_1[vj])      # another variable than the allocated one: its shape was computed anew
    o_global = T.alloc_buffer((indptr[i + 1] - indptr[i],))

after::

    T.reads(o_global[vj])
    o_global = T.alloc_buffer((indptr[i + 1] - indptr[i],))

TVM's buffer compaction leaves such pairs where an allocation's extent is loaded from memory.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.lower.rewriting import collect


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.RebindBuffers")
def RebindBuffers(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Replace buffers that nothing declares by the allocated buffer of the same name."""
    allocated = [b for block in collect(func.body, s_tir.SBlock) for b in block.alloc_buffers]
    allocated += [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    known = {*allocated, *func.params, *(d.buffer for d in collect(func.body, tirx.DeclBuffer))}
    by_name = {str(b.name): b for b in allocated}
    used = {x.source for x in collect(func.body, ir.TensorLoad)} | {s.buffer for s in collect(func.body, tirx.BufferStore)}
    stray: dict[Var, Var] = {b: by_name[str(b.name)] for b in used if b not in known and str(b.name) in by_name}
    if not stray:
        return func
    body = tvm_ffi.structural_mutate(func.body, [(Var, lambda v, _m: stray.get(v, v))])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
