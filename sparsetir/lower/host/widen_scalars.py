# SPDX-License-Identifier: Apache-2.0
"""Numbers of bfloat16 that are parameters come as float32: TVM's calls pass no bfloat16.

before::

    def scale(a: T.handle, alpha: T.bfloat16): ...
        a[i] = a[i] * alpha

after::

    def scale(a: T.handle, alpha: T.float32): ...
        a[i] = a[i] * T.Cast("bfloat16", alpha)
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.lower.rewriting import substitute


def _is_number(param: Any) -> bool:
    return not tirx.is_buffer_var(param) and str(getattr(param.ty, "dtype", "")) == "bfloat16"


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WidenScalars")
def WidenScalars(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Take numbers of bfloat16 as float32."""
    wide: dict[Any, Any] = {p: tirx.Var(str(p.name), "float32") for p in func.params if _is_number(p)}
    if not wide:
        return func
    values = {narrow: tirx.Cast("bfloat16", var) for narrow, var in wide.items()}
    body = substitute(func.body, values)
    return tirx.PrimFunc([wide.get(p, p) for p in func.params], body, func.ret_type, func.attrs)


__all__ = ["WidenScalars"]
