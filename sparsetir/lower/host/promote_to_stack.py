# SPDX-License-Identifier: Apache-2.0
"""Stack promotion: small arrays of a thread lie on the stack, where LLVM turns them into registers.

before::

    acc = T.alloc_local((8,))

after::

    acc = T.alloc_buffer((8,))

TVM takes memory of scope ``local`` from its runtime, which LLVM must keep up to date: a store for every result that
should never leave a register, and a load that waits for it. Memory of scope ``global`` that is small enough lies on the
stack.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.lower.nests import with_body
from sparsetir.walks import structural_walk

MOST_BYTES = 1024  # TVM takes larger arrays from its runtime


def bytes_of(buffer: Var) -> int | None:
    """The size of an array; None if it is not known."""
    size = int(DataType(str(buffer.ty.dtype)).bits) // 8
    for extent in buffer.ty.shape:
        if not isinstance(extent, tirx.IntImm):
            return None
        size *= int(extent)
    return size


def _on_stack(buffer: Var) -> Var:
    """The same array in memory that is taken from the stack."""
    dtype, shape = str(buffer.ty.dtype), list(buffer.ty.shape)
    return tirx.decl_buffer(shape, dtype, name=str(buffer.name), scope="global", layout=None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PromoteToStack")
def PromoteToStack(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Move every small local array of a function."""
    moved: dict[Var, Var] = {}

    def on_alloc(node: tirx.AllocBuffer) -> None:
        size = bytes_of(node.buffer)
        if str(node.buffer.ty.storage_scope) == "local" and size is not None and size < MOST_BYTES:
            moved[node.buffer] = _on_stack(node.buffer)

    structural_walk(func.body, (tirx.AllocBuffer, on_alloc))
    if not moved:
        return func
    body = tvm_ffi.structural_map(func.body, with_def_region_kind=(Var, lambda v, _: moved.get(v, v)))
    return with_body(func, body)


__all__ = ["MOST_BYTES", "PromoteToStack", "bytes_of"]
