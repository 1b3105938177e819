# SPDX-License-Identifier: Apache-2.0
"""Refuse a scheduled function that is not well formed: some stock primitives leave one behind without a word.

``cache_inplace`` of a block that is not alone in its scope uses a block's variable outside the block, and a cache of
scratch that the program allocates itself is allocated twice.
"""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.errors import ScheduleError
from sparsetir.lower.marks import from_dialect


def _reason(func: tirx.PrimFunc) -> str:
    """TVM's reason without its places in the tree; empty for a sound function."""
    try:
        s_tir.analysis.verify_well_formed(func)
    except Exception as error:
        found = re.search(r"((undefined|definitions of) variable \w+)", str(error))
        return found.group(1) if found else str(error).splitlines()[0]
    return ""


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckForm")
def CheckForm(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check a scheduled stage-II function."""
    if not from_dialect(func):
        return func
    reason = _reason(func)
    if reason:
        message = f"the schedule left a function that is not well formed: {reason}"
        raise ScheduleError(f"{message}; cache_inplace, and caches of scratch the program allocates, are not supported")
    return func
