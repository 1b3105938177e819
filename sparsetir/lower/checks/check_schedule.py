# SPDX-License-Identifier: Apache-2.0
"""Find the loops of a schedule whose steps are independent; refuse parallel ones where that is not proven.

TVM takes a block that only stores for independent. `sparsetir.lower.checks.independence` says what the proof is: a
block brings it along from the program, and hands it to the loops that are bound to its variable; for all others the
flat loops are looked at. A vector loop without a proof is run in order.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.lower.checks.apart import Facts, is_one_to_one, shared_array
from sparsetir.lower.marks import CHUNKS, DISTINCT, INDPTR, PARALLEL_MARK, from_dialect, names_in
from sparsetir.lower.nests import PARALLEL, SERIAL, VECTORIZED, each_loop, with_, with_body
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate


def proven(loop: tirx.For, facts: Facts) -> tirx.For:
    """A loop as it may run: marked where its steps are independent, a vector loop in order where they may not be.

    Raises
    ------
    ScheduleError
        It is parallel, and two of its steps may use one element that one of them stores to.
    """
    wants_proof = loop.kind in (PARALLEL, VECTORIZED) or CHUNKS in loop.annotations
    if not wants_proof or PARALLEL_MARK in loop.annotations:
        return loop
    shared = shared_array(loop, facts)
    if loop.kind == PARALLEL and shared is not None:
        message = f"loop {loop.loop_var.name} cannot be parallel: two of its steps may store to the same element of"
        raise ScheduleError(f"{message} {shared.name}, or one may read what another stores")
    if loop.kind == VECTORIZED:
        return loop if shared is None else with_(loop, kind=SERIAL)
    return loop if shared is not None else with_(loop, notes={**loop.annotations, PARALLEL_MARK: True})


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckParallel")
def CheckParallel(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check every parallel and vector loop of a function of flat loops."""
    if not from_dialect(func):
        return func
    facts = Facts(names_in(func, INDPTR), names_in(func, DISTINCT))

    return each_loop(func, inner=lambda loop: proven(loop, facts))


class _Blocks:
    """Finds the blocks that bring a proof along, for each loop that one is bound to."""

    def __init__(self) -> None:
        self.ranges: dict[Var, ir.Range] = {}
        self.of: dict[Var, list[s_tir.SBlock]] = {}

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.For:
        self.ranges[node.loop_var] = ir.Range.from_min_extent(node.min, node.extent)
        return mutator.default_mutate(node)

    def on_realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        name = node.block.annotations.get(PARALLEL_MARK)
        for iv, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            if name is not None and str(iv.var.name) == str(name):
                self._add(node.block, value)
        return mutator.default_mutate(node)

    def _add(self, block: s_tir.SBlock, value: ir.Expr) -> None:
        ranges = {v: self.ranges[v] for v in collect(value, Var) if v in self.ranges}
        if ranges and is_one_to_one([value], ranges):
            for var in ranges:
                self.of.setdefault(var, []).append(block)

    def are_all(self, loop: tirx.For) -> bool:
        """Whether nothing below a loop is stored outside of the blocks that bring its proof along."""
        own, hit = self.of[loop.loop_var], []

        def on_block(block: s_tir.SBlock, mutator: Any) -> s_tir.SBlock:
            return block if any(block.same_as(b) for b in own) else mutator.default_mutate(block)

        def on_store(store: tirx.BufferStore, _mutator: Any) -> tirx.BufferStore:
            hit.append(1)
            return store

        structural_mutate(loop.body, [(s_tir.SBlock, on_block), (tirx.BufferStore, on_store)])
        return not hit


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.MarkIndependent")
def MarkIndependent(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Move a block's note of independent steps to the loops that are bound to the variable it names."""
    blocks = _Blocks()
    structural_mutate(func.body, [(tirx.For, blocks.on_for), (s_tir.SBlockRealize, blocks.on_realize)])
    if not blocks.of:
        return func

    def on_for(node: tirx.For, mutator: Any) -> tirx.For:
        inner = mutator.default_mutate(node)
        if node.loop_var not in blocks.of or not blocks.are_all(node):
            return inner
        return with_(inner, notes={**inner.annotations, PARALLEL_MARK: True})

    body = structural_mutate(func.body, [(tirx.For, on_for)])
    return with_body(func, body)
