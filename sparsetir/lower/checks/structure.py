# SPDX-License-Identifier: Apache-2.0
"""Checks of a scheduled function's structure: form, loop kinds, scratch buffers, writes below empty loops."""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import ir, s_tir, sym, tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect, mentions
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.accesses import Site, caches, has_steps, loops_of_blocks, sites
from sparsetir.lower.annotations import CHUNKS, from_dialect
from sparsetir.lower.loops import PARALLEL, UNROLLED, VECTORIZED

# Refuse a scheduled function that is not well formed, because some TVM primitives produce one without an error.
#
# ``cache_inplace`` of a block that is not alone in its scope uses a block's variable outside the block, and a cache of
# a scratch buffer of the program is allocated twice.


def _reason(func: tirx.PrimFunc) -> str:
    """Return TVM's reason without its paths in the tree; empty for a well-formed function."""
    try:
        s_tir.analysis.verify_well_formed(func)
    except Exception as error:
        match = re.search(r"((undefined|definitions of) variable \w+)", str(error))
        return match.group(1) if match else str(error).splitlines()[0]
    return ""


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckForm")
def CheckForm(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check that a scheduled stage-II function is well formed."""
    if not from_dialect(func):
        return func
    reason = _reason(func)
    if reason:
        message = f"the schedule left a function that is not well formed: {reason}"
        raise ScheduleError(f"{message}; cache_inplace, and caches of scratch the program allocates, are not supported")
    return func


# Refuse loops that code generation does not support, before LLVM fails on them.
#
# * A vectorized or unrolled loop needs a constant number of steps.
# * A parallel loop must not be inside another parallel loop.
# * A loop must not be bound to GPU threads, because kernels run on CPUs.


CONSTANT = {VECTORIZED: "vectorize", UNROLLED: "unroll"}


class _Loops:
    """Visitor of loops that keeps the enclosing parallel loop, if any."""

    def __init__(self) -> None:
        self.parallel: tirx.For | None = None

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.For:
        self._check_extent(node)
        outer = self.parallel
        if node.kind == PARALLEL or CHUNKS in node.annotations:
            self._check_nesting(node)
            self.parallel = node
        mutator.default_mutate(node)
        self.parallel = outer
        return node

    def _check_extent(self, node: tirx.For) -> None:
        name = node.loop_var.name
        if node.kind == tirx.ForKind.THREAD_BINDING:
            message = f"loop {name} is bound to {node.thread_binding.thread_tag}, but kernels run on CPUs"
            raise ScheduleError(f"{message}; use parallel or vectorize")
        extent = sym.Analyzer().simplify(node.extent)
        if node.kind in CONSTANT and not isinstance(extent, tirx.IntImm):
            does = CONSTANT[node.kind]
            message = f"to {does} loop {name} its number of steps must be a constant, found {extent}"
            raise ScheduleError(f"{message}; split the loop by a constant and {does} the inner part")

    def _check_nesting(self, node: tirx.For) -> None:
        if self.parallel is not None:
            message = f"loop {node.loop_var.name} cannot be parallel inside the parallel loop"
            raise ScheduleError(f"{message} {self.parallel.loop_var.name}; keep one of the two, or fuse them")


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckLoops")
def CheckLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check the kind and nesting of every loop of a scheduled stage-II function."""
    if from_dialect(func):
        structural_mutate(func.body, [(tirx.For, _Loops().on_for)])
    return func


# Refuse scratch buffers that TVM cannot compile: its compaction fails on some subscripts of scratch of unknown size.
#
# ``CompactBufferAllocation``, which every TVM pipeline runs, bounds ``i + 1`` by one more than the largest int32.
# It does not fail for scratch allocated outside the loops that the subscript depends on. `HoistScratch` moves scratch
# there, but not out of parallel loops.


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckScratch")
def CheckScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Raise if TVM's compaction fails on a function with scratch of unknown size allocated inside loops."""
    if not from_dialect(func):
        return func
    outermost = func.body.seq if isinstance(func.body, tirx.SeqStmt) else ()
    around = [s.buffer for s in outermost if isinstance(s, tirx.AllocBuffer)]
    scratch = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    scratch = [b for b in scratch if not any(b.same_as(outer_buffer) for outer_buffer in around)]
    unknown = [b.name for b in scratch if not all(isinstance(d, tirx.IntImm) for d in b.ty.shape)]
    if not unknown:
        return func
    try:
        s_tir.transform.CompactBufferAllocation()(ir.IRModule({"main": func}))
    except ValueError:
        message = f"TVM cannot place the scratch {', '.join(unknown)} of unknown size inside a parallel loop"
        raise ScheduleError(f"{message}; cache outside that loop, or tile the cached loop by a constant") from None
    return func


# Refuse a result that is written below a loop that may run zero times: the element of an empty row would stay unset.
#
# TVM assumes that every loop runs at least once. It allows a schedule to place a write-back below a reduction loop, or
# to initialise a dense row in a loop that was fused with the loop over the row's nonzeros::
#
#     for j_k in range((indptr[vi + 1] - indptr[vi]) * feat):
#         with T.sblock("spmm_init"):
#             vk = T.axis.spatial(feat, j_k % feat)
#             c[vi, vk] = 0                              # nothing for an empty row


REDUCE = 2


def _carries_reduction(loop: tirx.For) -> bool:
    realizes = collect(loop.body, s_tir.SBlockRealize)
    pairs = [p for r in realizes for p in zip(r.block.iter_vars, r.iter_values, strict=True)]
    return any(int(iv.iter_type) == REDUCE and mentions(value, [loop.loop_var]) for iv, value in pairs)


def check_write(site: Site) -> None:
    """Raise if a loop around a store may run zero times though there is an element to store."""
    for loop, realize in loops_of_blocks(site):
        used = any(mentions(v, [loop.loop_var]) for v in realize.iter_values)
        # A loop of the program itself may be empty: then there is no element to store.
        if (used or _carries_reduction(loop)) and not has_steps(loop, realize):
            message = f"block {site.block} writes {site.buffer.name} below loop {loop.loop_var.name}"
            raise ScheduleError(
                f"{message}, which runs zero times for an empty row: the element would stay unset; "
                "place the block outside that loop, and fuse spatial loops with spatial loops only"
            )


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckWrites")
def CheckWrites(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check every store of a scheduled stage-II function whose block does not also load from the same buffer."""
    if not from_dialect(func):
        return func
    accesses, added_caches = sites(func), set(caches(func))
    updated = {(s.blocks[-1], s.buffer) for s in accesses if not s.is_store and s.blocks}
    for site in accesses:
        if (
            site.is_store
            and site.blocks
            and site.buffer not in added_caches
            and (site.blocks[-1], site.buffer) not in updated
        ):
            check_write(site)
    return func
