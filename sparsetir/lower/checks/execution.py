# SPDX-License-Identifier: Apache-2.0
"""Checks of a scheduled function: form, loop kinds, order of dependent steps, parallel loops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect, factors, mentions, product, summands
from sparsetir.ir.views import REDUCE, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.accesses import AccessSite, caches, has_steps, loops_of_blocks, sites
from sparsetir.lower.analysis.independence import WIDE, ArrayFacts, Wide, is_one_to_one, shared_array
from sparsetir.lower.annotations import CHUNKS, DISTINCT, INDPTR, ORDERED_MARK, PARALLEL_MARK, from_dialect, names_in
from sparsetir.lower.loops import PARALLEL, SERIAL, UNROLLED, VECTORIZED, each_loop, with_, with_body

# Refuse a schedule that changes the order of steps that store to the same element.
#
# TVM assumes that the steps of a block are independent or accumulate a sum. Here the value of the last step remains::
#
#     for x in range(n):
#         with T.sblock("work"):
#             a[0] = b[x]
#
# before (``split`` of x by 4, which keeps the order) and after a reorder, which is refused::
#
#     for x_0, x_1 in T.grid((n + 3) // 4, 4):        for x_1, x_0 in T.grid(4, (n + 3) // 4):
#         a[0] = b[x_0 * 4 + x_1]                         a[0] = b[x_0 * 4 + x_1]
#
# A block's annotation lists the variables whose order must be kept, outermost first as in the program. The values bound
# to them are decomposed into digits, each made of loops: the digits must follow the order of the loops.


DIVISIONS = (tirx.FloorDiv, tirx.FloorMod)


@dataclass(frozen=True, eq=False)
class Digit:
    """Digit of a number: its loops, its place value, and the number of its values if known.

    A digit of a fused loop, ``fused // 7 % 3``, is ``divided`` by its place value within the fused loop.
    """

    loops: tuple[int, ...]
    scale: ir.Expr
    size: ir.Expr | None
    divided: ir.Expr


class LoopOrder:
    """Loops between a block and the block around it, outermost first."""

    def __init__(self, loops: Sequence[tirx.For]) -> None:
        self.wide, self.analyzer = Wide(), sym.Analyzer()
        self.vars = [self.wide.of(loop.loop_var) for loop in loops]
        self.extents = [self.wide.of(loop.extent) for loop in loops]

    def is_kept(self, values: Sequence[ir.Expr], unbound: Sequence[int]) -> bool:
        """Return whether the values increase lexicographically from step to step, with `unbound` loops outermost."""
        one = const(1, WIDE)
        digits = [Digit((n,), one, self.extents[n], one) for n in unbound]
        for value in values:
            value_digits = self._digits(self.wide.of(value))
            if value_digits is None:
                return False
            digits += value_digits
        return all(self._follows(a, b) for a, b in pairwise(digits))

    def _follows(self, a: Digit, b: Digit) -> bool:
        """Return whether `b` varies faster than `a`."""
        if a.loops == b.loops:
            return b.size is not None and self._holds(a.divided >= b.divided * b.size)
        return max(a.loops) < min(b.loops)

    def _digits(self, expr: ir.Expr) -> list[Digit] | None:
        """Return the digits of a number, most significant first; None if it is not a sum of digits."""
        digits = [self._digit(part) for part in summands(self.analyzer.simplify(expr)) if mentions(part, self.vars)]
        ordered = [d for d in digits if d is not None]
        if len(ordered) < len(digits):
            return None
        ordered.sort(key=lambda d: d.loops)
        fits = all(b.size is not None and self._holds(a.scale >= b.scale * b.size) for a, b in pairwise(ordered))
        return ordered if fits and all(self._holds(d.scale >= const(1, WIDE)) for d in ordered[-1:]) else None

    def _digit(self, term: ir.Expr) -> Digit | None:
        parts = factors(term)
        moving = [p for p in parts if mentions(p, self.vars)]
        scale = product([const(1, WIDE), *(p for p in parts if not mentions(p, self.vars))])
        if len(moving) != 1:
            return None
        one = const(1, WIDE)
        at = next((n for n, v in enumerate(self.vars) if moving[0].same_as(v)), None)
        return Digit((at,), scale, self.extents[at], one) if at is not None else self._of_fused(moving[0], scale)

    def _of_fused(self, expr: ir.Expr, scale: ir.Expr) -> Digit | None:
        """Return the digit of a fused loop: ``fused % n``, ``fused // n``, ``fused // n % m``; None for other forms."""
        if not isinstance(expr, DIVISIONS) or mentions(expr.b, self.vars):
            return None
        size = expr.b if isinstance(expr, tirx.FloorMod) else None
        inner = expr.a if isinstance(expr, tirx.FloorMod) else expr
        divided = const(1, WIDE)
        if isinstance(inner, tirx.FloorDiv):
            inner, divided = inner.a, inner.b
        if mentions(divided, self.vars):
            return None
        digits = self._digits(inner)
        if not digits or not all(self._follows(a, b) for a, b in pairwise(digits)):
            return None
        return Digit(tuple(sorted({n for d in digits for n in d.loops})), scale, size, divided)

    def _holds(self, condition: ir.Expr) -> bool:
        return bool(self.analyzer.can_prove(self.analyzer.simplify(condition)))


def _is_unit(loop: tirx.For) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1


def check_order(realize: s_tir.SBlockRealize, loops: Sequence[tirx.For]) -> None:
    """Raise if the loops may run the steps of a block out of the order that its annotation requires."""
    block = realize.block
    names = [str(name) for name in block.annotations.get(ORDERED_MARK, ())]
    if not names:
        return
    message = f"block {block.name_hint} stores to elements that other steps store to or read, whose order counts"
    bound = {str(iv.var.name): v for iv, v in zip(block.iter_vars, realize.iter_values, strict=True)}
    if not all(name in bound for name in names):
        raise ScheduleError(f"{message}: blockize and transform_block_layout hide it; leave the block as it is")
    loops = [loop for loop in loops if not _is_unit(loop)]
    unbound = [n for n, loop in enumerate(loops) if not mentions(realize.iter_values, [loop.loop_var])]
    if not LoopOrder(loops).is_kept([bound[name] for name in names], unbound):
        listed = ", ".join(name[1:] for name in names)
        raise ScheduleError(f"{message}: the schedule does not keep that of {listed}; split and fuse keep it")


class _BlockChecker:
    """Visitor that checks each block against the loops around it."""

    def __init__(self) -> None:
        self.loops: list[tirx.For] = []

    def on_for(self, node: tirx.For, visitor: Any) -> None:
        self.loops.append(node)
        visitor.default_visit(node)
        self.loops.pop()

    def on_realize(self, node: s_tir.SBlockRealize, visitor: Any) -> None:
        check_order(node, self.loops)
        outer, self.loops = self.loops, []
        visitor.default_visit(node)
        self.loops = outer


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckOrder")
def CheckOrder(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check the order of steps of every block of a scheduled stage-II function."""
    if from_dialect(func):
        walk = _BlockChecker()
        tvm_ffi.structural_visit(func.body, [(tirx.For, walk.on_for), (s_tir.SBlockRealize, walk.on_realize)])
    return func


# Annotate the loops of a schedule whose steps are independent; refuse parallel loops without a proof.
#
# TVM assumes that the steps of a block that only stores are independent.
# `sparsetir.lower.analysis.independence` defines the proof: a block's annotation carries it from the program to the
# loops that are bound to the block's variable; any other loop is analysed once it is flat. A vector loop without a
# proof becomes serial.


def proven(loop: tirx.For, facts: ArrayFacts) -> tirx.For:
    """Annotate a loop whose steps are independent; make a vector loop without a proof serial.

    Raises
    ------
    ScheduleError
        The loop is parallel, and two of its steps may access an element that one of them stores.
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
    facts = ArrayFacts(names_in(func, INDPTR), names_in(func, DISTINCT))

    return each_loop(func, inner=lambda loop: proven(loop, facts))


class _Blocks:
    """Collector of the blocks with a proof, for each loop that such a block's variable is bound to."""

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
        """Return whether all stores below a loop are inside the blocks that carry its proof."""
        blocks, stores_outside = self.of[loop.loop_var], []

        def on_block(block: s_tir.SBlock, mutator: Any) -> s_tir.SBlock:
            return block if any(block.same_as(b) for b in blocks) else mutator.default_mutate(block)

        def on_store(store: tirx.BufferStore, _mutator: Any) -> tirx.BufferStore:
            stores_outside.append(1)
            return store

        structural_mutate(loop.body, [(s_tir.SBlock, on_block), (tirx.BufferStore, on_store)])
        return not stores_outside


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.MarkIndependent")
def MarkIndependent(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Annotate the loops that are bound to a block's independent variable, if all stores below are proven."""
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


# ------------------------------------------------------------------------------------------- structure


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


class _ParallelLoops:
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
            message = f"to {does} loop {name} its number of steps must be a constant, got {extent}"
            raise ScheduleError(f"{message}; split the loop by a constant and {does} the inner part")

    def _check_nesting(self, node: tirx.For) -> None:
        if self.parallel is not None:
            message = f"loop {node.loop_var.name} cannot be parallel inside the parallel loop"
            raise ScheduleError(f"{message} {self.parallel.loop_var.name}; keep one of the two, or fuse them")


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CheckLoops")
def CheckLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Check the kind and nesting of every loop of a scheduled stage-II function."""
    if from_dialect(func):
        structural_mutate(func.body, [(tirx.For, _ParallelLoops().on_for)])
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


def _carries_reduction(loop: tirx.For) -> bool:
    realizes = collect(loop.body, s_tir.SBlockRealize)
    pairs = [p for r in realizes for p in zip(r.block.iter_vars, r.iter_values, strict=True)]
    return any(int(iv.iter_type) == REDUCE and mentions(value, [loop.loop_var]) for iv, value in pairs)


def check_write(site: AccessSite) -> None:
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
