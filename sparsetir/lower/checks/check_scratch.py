# SPDX-License-Identifier: Apache-2.0
"""Refuse scratch that TVM cannot compile: its compaction fails on some subscripts of scratch of unknown size.

``CompactBufferAllocation``, which every TVM pipeline runs, bounds ``i + 1`` by one more than the largest int32. Outside
the loops that move the subscript this does not happen; `HoistScratch` takes it there, but not out of parallel loops.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.errors import ScheduleError
from sparsetir.lower.marks import from_dialect
from sparsetir.lower.rewriting import collect


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckScratch")
def CheckScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Try TVM's compaction on a function with scratch of unknown size that is not allocated around everything."""
    if not from_dialect(func):
        return func
    outermost = func.body.seq if isinstance(func.body, tirx.SeqStmt) else ()
    around = [s.buffer for s in outermost if isinstance(s, tirx.AllocBuffer)]
    scratch = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    scratch = [b for b in scratch if not any(b.same_as(other) for other in around)]
    unknown = [b.name for b in scratch if not all(isinstance(d, tirx.IntImm) for d in b.ty.shape)]
    if not unknown:
        return func
    try:
        s_tir.transform.CompactBufferAllocation()(ir.IRModule({"main": func}))
    except ValueError:
        message = f"TVM cannot place the scratch {', '.join(unknown)} of unknown size inside a parallel loop"
        raise ScheduleError(f"{message}; cache outside that loop, or tile the cached loop by a constant") from None
    return func
