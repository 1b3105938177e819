# SPDX-License-Identifier: Apache-2.0
"""Move initialisations out of reduction blocks, above their outermost reduction loop.

before::

    for j, k in T.grid(indptr[vi + 1] - indptr[vi], feat):
        with T.sblock("spmm"):
            vj, vk = T.axis.remap("RS", [j, k])
            with T.init():
                c[vi, vk] = 0
            c[vi, vk] = c[vi, vk] + ...

after::

    for k in range(feat):
        with T.sblock("spmm_init"):
            vk = T.axis.spatial(feat, k)
            c[vi, vk] = 0
    for j, k in T.grid(indptr[vi + 1] - indptr[vi], feat):
        with T.sblock("spmm_update"):
            ...

TVM's own lowering runs the initialisation in the first reduction step, which an empty row does not have; its
``decompose_reduction`` does not know what to do with a guard that mixes loops of both kinds, as ``rfactor`` makes.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.lower.nest.declare_regions import with_regions
from sparsetir.lower.nests import with_, with_body
from sparsetir.lower.rewriting import all_same, conjunction, conjuncts, mentions, seq, substitute
from sparsetir.walks import structural_mutate

REDUCE = 2

Pairs = list[tuple[tirx.IterVar, ir.Expr]]


def _pairs(realize: s_tir.SBlockRealize) -> Pairs:
    return list(zip(realize.block.iter_vars, realize.iter_values, strict=True))


def _refuse_mixed(realize: s_tir.SBlockRealize, reduced: Pairs, spatial: Pairs, loops: list[tirx.For]) -> None:
    """A loop fused from a reduction and a spatial one does not run for an empty row: its output would stay unset."""
    for var in (loop.loop_var for loop in loops):
        if any(mentions(v, [var]) for _, v in reduced) and any(mentions(v, [var]) for _, v in spatial):
            where = f"loop {var.name} of block {realize.block.name_hint}"
            message = f"{where} was fused from a reduction and a spatial loop"
            raise ScheduleError(f"{message}: an empty row would not be initialised; fuse loops of one kind")


def _guards(realize: s_tir.SBlockRealize, spatial: Pairs, inner: list[tirx.For], kept: list[tirx.For]) -> list[ir.Expr]:
    """The parts of a block's guard that hold its spatial variables within their domains."""
    gone = [loop.loop_var for loop in inner if loop not in kept]
    parts = conjuncts(realize.predicate)
    guards = [part for part in parts if not mentions(part, gone)]
    mixed = [part for part in parts if mentions(part, gone)]
    analyzer = sym.Analyzer()
    for loop in kept:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
    for iv, value in spatial:
        own = [loop.loop_var for loop in kept if mentions(value, [loop.loop_var])]
        inside = value < iv.dom.min + iv.dom.extent
        if any(mentions(part, own) for part in mixed) and not analyzer.can_prove(inside):
            guards.append(inside)
    return guards


def _initial_block(realize: s_tir.SBlockRealize, spatial: Pairs, guards: list[ir.Expr]) -> s_tir.SBlockRealize:
    """A block of the initialisation alone, over the spatial variables."""
    block = realize.block
    fresh = {iv.var: Var(str(iv.var.name), iv.var.ty) for iv, _ in spatial}
    iter_vars = [tirx.IterVar(substitute(iv.dom, fresh), fresh[iv.var], iv.iter_type) for iv, _ in spatial]
    body, name = substitute(block.init, fresh), f"{block.name_hint}_init"
    alone = with_regions(s_tir.SBlock(iter_vars, [], [], name, body, None, annotations=block.annotations), [])
    condition = conjunction(guards) if guards else tirx.const(True, "bool")
    return s_tir.SBlockRealize([v for _, v in spatial], condition, alone)


def initial_nest(realize: s_tir.SBlockRealize, inner: list[tirx.For]) -> tirx.Stmt:
    """The initialisation of a block below loops of its own: those of `inner` that move its spatial variables."""
    spatial = [(iv, v) for iv, v in _pairs(realize) if int(iv.iter_type) != REDUCE]
    kept = [loop for loop in inner if any(mentions(v, [loop.loop_var]) for _, v in spatial)]
    nest: tirx.Stmt = _initial_block(realize, spatial, _guards(realize, spatial, inner, kept))
    for loop in reversed(kept):
        var = Var(f"{loop.loop_var.name}_init", loop.loop_var.ty)
        nest = with_(loop, var=var, body=substitute(nest, {loop.loop_var: var}), notes={})
    return nest


def keeps_old(init: tirx.Stmt) -> bool:
    """Whether an initialisation only says that the old value counts: ``c[vi] = c[vi]``."""
    while isinstance(init, tirx.IfThenElse):
        init = init.then_case
    if not isinstance(init, tirx.BufferStore) or not isinstance(init.value, ir.TensorLoad):
        return False
    return init.value.source.same_as(init.buffer) and all_same(list(init.value.indices), list(init.indices))


def without_init(realize: s_tir.SBlockRealize, name: str | None = None) -> s_tir.SBlockRealize:
    """The block that is left: it reads what it updates."""
    old = realize.block
    written = {region.source for region in old.writes}
    reads = [*old.writes, *(region for region in old.reads if region.source not in written)]
    name, notes = name or f"{old.name_hint}_update", old.annotations
    update = s_tir.SBlock(
        old.iter_vars, reads, old.writes, name, old.body, None, old.alloc_buffers, old.match_buffers, notes
    )
    return s_tir.SBlockRealize(realize.iter_values, realize.predicate, update)


class _Decomposer:
    """Walks a function with the loops around each block; `nests` are waiting for the loop they go before."""

    def __init__(self) -> None:
        self.loops: list[tirx.For] = []
        self.nests: dict[Var, list[tirx.Stmt]] = {}

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        self.loops.append(node)
        out = mutator.default_mutate(node)
        self.loops.pop()
        return seq(*self.nests.pop(node.loop_var, []), out)

    def on_realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        outer, self.loops = self.loops, []
        out = mutator.default_mutate(node)
        self.loops = outer
        if out.block.init is None:
            return out
        if keeps_old(out.block.init):
            return without_init(out, out.block.name_hint)
        reduced = [(iv, v) for iv, v in _pairs(out) if int(iv.iter_type) == REDUCE]
        spatial = [(iv, v) for iv, v in _pairs(out) if int(iv.iter_type) != REDUCE]
        _refuse_mixed(out, reduced, spatial, outer)
        at = [n for n, loop in enumerate(outer) if any(mentions(v, [loop.loop_var]) for _, v in reduced)]
        if not at:
            return out
        self.nests.setdefault(outer[at[0]].loop_var, []).append(initial_nest(out, outer[at[0] :]))
        return without_init(out)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.DecomposeInit")
def DecomposeInit(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Decompose every reduction of a function."""
    walk = _Decomposer()
    callbacks = [(tirx.For, walk.on_for), (s_tir.SBlockRealize, walk.on_realize)]
    body = structural_mutate(func.body, callbacks)
    return with_body(func, body)
