# SPDX-License-Identifier: Apache-2.0
"""Show TVM's compaction only the allocation of scratch of unknown size, not what subscripts it.

before::

    row = T.alloc_buffer((m + 1,))
    row[i + 1] = ...

after::

    row_data = T.alloc_buffer((m + 1,))
    row = T.decl_buffer((m + 1,), data=row_data.data)
    row[i + 1] = ...

``CompactBufferAllocation``, which every TVM pipeline runs, bounds subscripts like ``i + 1`` by one more than the
largest int32 and fails on that constant.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.lower.rewriting import seq


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.HideScratch")
def HideScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Put a view before every scratch buffer of symbolic size."""

    def on_alloc(node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        buffer = node.buffer
        if all(isinstance(d, tirx.IntImm) for d in buffer.ty.shape):
            return mutator.default_mutate(node)
        held = Var(f"{buffer.name}_data", buffer.ty)
        return seq(tirx.AllocBuffer(held), tirx.DeclBuffer(buffer, data=tirx.buffer_data(held)))

    body = tvm_ffi.structural_mutate(func.body, [(tirx.AllocBuffer, on_alloc)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)
