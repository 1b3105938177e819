# SPDX-License-Identifier: Apache-2.0
"""Refuse a result that is written below a loop that may run zero times: the element of an empty row would stay unset.

TVM takes every loop to run at least once. It lets a schedule place a write-back below a reduction loop, or initialise a
dense row in a loop that was fused with the row's nonzeros::

    for j_k in range((indptr[vi + 1] - indptr[vi]) * feat):
        with T.sblock("spmm_init"):
            vk = T.axis.spatial(feat, j_k % feat)
            c[vi, vk] = 0                              # nothing for an empty row
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.errors import ScheduleError
from sparsetir.lower.checks.sites import Site, caches, loops_of_blocks, sites
from sparsetir.lower.checks.steps import has_steps
from sparsetir.lower.marks import from_dialect
from sparsetir.lower.rewriting import collect, mentions

REDUCE = 2


def _carries_reduction(loop: tirx.For) -> bool:
    realizes = collect(loop.body, s_tir.SBlockRealize)
    pairs = [p for r in realizes for p in zip(r.block.iter_vars, r.iter_values, strict=True)]
    return any(int(iv.iter_type) == REDUCE and mentions(value, [loop.loop_var]) for iv, value in pairs)


def check_write(site: Site) -> None:
    """Raise if a loop around a store may run zero times though there is an element to store."""
    for loop, realize in loops_of_blocks(site):
        used = any(mentions(v, [loop.loop_var]) for v in realize.iter_values)
        # A loop of the program itself may be empty: then nothing is to be stored.
        if (used or _carries_reduction(loop)) and not has_steps(loop, realize):
            message = f"block {site.block} writes {site.buffer.name} below loop {loop.loop_var.name}"
            raise ScheduleError(
                f"{message}, which runs zero times for an empty row: the element would stay unset; "
                "place the block outside that loop, and fuse spatial loops with spatial loops only"
            )


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckWrites")
def CheckWrites(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check every store of a scheduled stage-II function that is not an update of what is there."""
    if not from_dialect(func):
        return func
    found, made = sites(func), set(caches(func))
    updated = {(s.blocks[-1], s.buffer) for s in found if not s.is_store and s.blocks}
    for site in found:
        if site.is_store and site.blocks and site.buffer not in made and (site.blocks[-1], site.buffer) not in updated:
            check_write(site)
    return func
