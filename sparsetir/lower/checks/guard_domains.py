# SPDX-License-Identifier: Apache-2.0
"""Hold every block variable within its domain.

before::

    for k_0, k_1, j_1 in T.grid((feat + 6) // 7, 7, 4):
        with T.sblock("spmm"):
            vk = T.axis.spatial(feat, k_0 * 7 + k_1)

after::

    for k_0, k_1, j_1 in T.grid((feat + 6) // 7, 7, 4):
        with T.sblock("spmm"):
            vk = T.axis.spatial(feat, k_0 * 7 + k_1)
            T.where(k_0 * 7 + k_1 < feat)

``rfactor`` keeps the guard of an uneven split at the partial sums and forgets it where they are added up. ``blockize``
of a fused uneven split takes the padded number of steps for the domain itself: that is refused.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir import cast
from sparsetir.lower.checks.sites import sites
from sparsetir.lower.checks.steps import Atoms
from sparsetir.lower.marks import from_dialect
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect, conjunction, conjuncts, mentions
from sparsetir.walks import structural_mutate

# A fused loop has as many steps as its parts together; the primitive that makes a subscript load guards it too.
BEYOND = (tirx.FloorDiv, tirx.FloorMod, ir.TensorLoad)


def missing(realize: s_tir.SBlockRealize, loops: list[tirx.For]) -> list[ir.Expr]:
    """The bounds of a block's variables that neither its loops nor its guard imply."""
    pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    split = [(iv, v) for iv, v in pairs if collect(v, tirx.Add) and not any(collect(v, kind) for kind in BEYOND)]
    if not split:
        return []
    atoms, analyzer = Atoms(), sym.Analyzer()
    for loop in loops:
        extent = atoms.replace(loop.extent)
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, extent))
    known = [atoms.replace(c) for c in conjuncts(realize.predicate)]
    bounds = [value < iv.dom.min + iv.dom.extent for iv, value in split]
    return [bound for bound in bounds if not _implied(analyzer, atoms.replace(bound), known)]


def _implied(analyzer: sym.Analyzer, bound: ir.Expr, known: list[ir.Expr]) -> bool:
    """Whether the ranges of the loops, or one of the known conditions, hold a comparison."""
    if any(isinstance(c, tirx.LT) and analyzer.can_prove_equal(c.a - c.b, bound.a - bound.b) for c in known):
        return True
    with analyzer.constraint_scope(conjunction([*known, tirx.const(True, "bool")])):
        return bool(analyzer.can_prove(bound))


def _is_padded(extent: ir.Expr) -> bool:
    """Whether an extent is rounded up to whole tiles: ``(n + 3) // 4 * 4``."""
    return any(isinstance(x.a, tirx.FloorDiv) and isinstance(x.b, tirx.IntImm) for x in collect(extent, tirx.Mul))


def check_domains(func: tirx.PrimFunc) -> None:
    """Raise where a block variable with a padded domain goes past the end of an array that it subscripts."""
    for site in sites(func):
        domains = {iv.var: iv.dom.extent for r in site.blocks for iv in r.block.iter_vars}
        for index, length in zip(site.indices, site.buffer.ty.shape, strict=True):
            extent = domains.get(index) if isinstance(index, Var) else None
            if extent is None or not _is_padded(extent) or any(mentions(g.condition, [index]) for g in site.guards):
                continue
            if not sym.Analyzer().can_prove(cast(extent, "int64") <= cast(length, "int64")):
                message = f"block {site.block} goes to {extent}, past the end of {site.buffer.name} ({length})"
                raise ScheduleError(f"{message}: blockize before an uneven split is fused, or split evenly")


class _Walk:
    """Visits the blocks with the loops around each."""

    def __init__(self) -> None:
        self.loops: list[tirx.For] = []

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.For:
        self.loops.append(node)
        out = mutator.default_mutate(node)
        self.loops.pop()
        return out

    def on_realize(self, node: s_tir.SBlockRealize, mutator: Any) -> s_tir.SBlockRealize:
        outer, self.loops = self.loops, []
        out = mutator.default_mutate(node)
        self.loops = outer
        guards = missing(node, outer)
        if not guards:
            return out
        return s_tir.SBlockRealize(out.iter_values, conjunction([*conjuncts(out.predicate), *guards]), out.block)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardDomains")
def GuardDomains(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Guard the blocks of a scheduled stage-II function."""
    if not from_dialect(func):
        return func
    check_domains(func)
    walk = _Walk()
    callbacks = [(tirx.For, walk.on_for), (s_tir.SBlockRealize, walk.on_realize)]
    return with_body(func, structural_mutate(func.body, callbacks))
