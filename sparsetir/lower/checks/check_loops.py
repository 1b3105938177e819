# SPDX-License-Identifier: Apache-2.0
"""Refuse kinds of loops that no code can be generated for, before LLVM meets them.

* A vectorized or unrolled loop needs a constant number of steps.
* A parallel loop must not stand inside another one.
* A loop bound to the threads of a GPU has none here.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, sym, tirx

from sparsetir.errors import ScheduleError
from sparsetir.lower.marks import CHUNKS, from_dialect
from sparsetir.lower.nests import PARALLEL, UNROLLED, VECTORIZED
from sparsetir.walks import structural_mutate

CONSTANT = {VECTORIZED: "vectorize", UNROLLED: "unroll"}


class _Loops:
    """Walks a function with the parallel loop around, if any."""

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
    """Check every loop of a scheduled stage-II function."""
    if from_dialect(func):
        structural_mutate(func.body, [(tirx.For, _Loops().on_for)])
    return func
