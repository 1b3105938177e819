# SPDX-License-Identifier: Apache-2.0
"""From stage I to flat loops: the ordered list of passes, and nothing else knows the order."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.errors import VerifyError, own_errors
from sparsetir.lower.checks.check_caches import CheckCaches
from sparsetir.lower.checks.check_form import CheckForm
from sparsetir.lower.checks.check_loops import CheckLoops
from sparsetir.lower.checks.check_order import CheckOrder
from sparsetir.lower.checks.check_schedule import CheckParallel, MarkIndependent
from sparsetir.lower.checks.check_scratch import CheckScratch
from sparsetir.lower.checks.check_writes import CheckWrites
from sparsetir.lower.checks.guard_copies import GuardCopies
from sparsetir.lower.checks.guard_domains import GuardDomains
from sparsetir.lower.host.bound_locals import BoundLocals
from sparsetir.lower.host.compact_scratch import CompactScratch, RefuseRagged
from sparsetir.lower.host.convert_halves import ConvertHalves
from sparsetir.lower.host.decompose_init import DecomposeInit
from sparsetir.lower.host.guard_divisions import GuardDivisions
from sparsetir.lower.host.hoist_scratch import HoistScratch
from sparsetir.lower.host.lower_find import LowerFind
from sparsetir.lower.host.promote_halves import PromoteHalves
from sparsetir.lower.host.promote_to_stack import PromoteToStack
from sparsetir.lower.host.propagate_nan import PropagateNaN
from sparsetir.lower.host.replace_aggregates import ReplaceAggregates
from sparsetir.lower.host.split_guards import SplitGuards
from sparsetir.lower.host.walk_intersections import WalkIntersections
from sparsetir.lower.host.walk_unions import WalkUnions
from sparsetir.lower.host.widen_indices import WidenIndices
from sparsetir.lower.host.widen_scalars import WidenScalars
from sparsetir.lower.host.wrap_integers import WrapIntegers
from sparsetir.lower.nest.align_params import AlignParams
from sparsetir.lower.nest.compare_nan import CompareNaN
from sparsetir.lower.nest.declare_regions import DeclareRegions
from sparsetir.lower.nest.emit_nest import EmitNest
from sparsetir.lower.nest.name_scratch import NameScratch
from sparsetir.lower.nest.replace_bools import ReplaceBools
from sparsetir.lower.rows.balance_nonzeros import BalanceNonzeros
from sparsetir.lower.rows.block_registers import BlockRegisters
from sparsetir.lower.rows.fuse_loops import FuseLoops
from sparsetir.lower.rows.pack_operands import PackOperands
from sparsetir.lower.rows.split_merge_path import SplitMergePath
from sparsetir.lower.vector.factor_invariants import FactorInvariants
from sparsetir.lower.vector.insert_prefetch import InsertPrefetch
from sparsetir.lower.vector.interchange_loops import InterchangeLoops
from sparsetir.lower.vector.peel_remainders import PeelRemainders
from sparsetir.lower.vector.promote_registers import PromoteRegisters
from sparsetir.lower.vector.scalarize_gathers import ScalarizeGathers
from sparsetir.lower.vector.scalarize_loops import ScalarizeLoops
from sparsetir.lower.vector.store_nontemporal import StoreNontemporal
from sparsetir.lower.vector.sum_blocks import SumBlocks
from sparsetir.lower.vector.sum_ragged import SumRagged
from sparsetir.lower.vector.unroll_ragged import UnrollRagged
from sparsetir.lower.vector.unswitch_loops import UnswitchLoops
from sparsetir.lower.vector.vector_math import ReplaceMissing
from sparsetir.lower.vector.vectorize_dots import VectorizeDots
from sparsetir.lower.vector.vectorize_maps import VectorizeMaps
from sparsetir.lower.vector.vectorize_masked import VectorizeMasked
from sparsetir.lower.vector.version_loops import VersionLoops

TO_STAGE_2 = [
    NameScratch,  # scratch called as in the program
    ReplaceBools,  # sums and products of bools -> or and and
    CompareNaN,  # comparisons of floats that NaN does not pass -> choices
    AlignParams,  # natural alignment, noalias
    EmitNest,  # sp_iter -> nested blocks over positions, searches as calls
    DeclareRegions,  # reads and writes of every block
]

SCHEDULED = [CheckForm]  # of a schedule: no variable outside its block

TO_LOOPS = [
    CheckLoops,  # only kinds of loops that code can be generated for
    CheckOrder,  # steps that overwrite each other's results in their order
    GuardDomains,  # no block variable past its domain
    MarkIndependent,  # loops that may run in parallel, as annotations
    DecomposeInit,  # initialisation above the reduction loops
    CheckWrites,  # no result below a loop that may run zero times
    CheckCaches,  # no cache that is read before it is written
    GuardCopies,  # no copy of an element that does not exist
    s_tir.transform.CanonicalizeLoop(),
    s_tir.transform.LowerInitBlock(),
    s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
    s_tir.transform.ConvertBlocksToOpaque(),
    CompactScratch(),  # scratch as large as its use
    s_tir.transform.LowerMatchBuffer(),
    s_tir.transform.LowerOpaqueBlock(),
]

REWRITES = [
    CheckParallel,  # parallel loops write apart
    BoundLocals,  # fixed sizes for arrays inside loops
    RefuseRagged,  # no scratch as long as a row
    PackOperands,  # operand packing: marked column loops -> panels outside the rows
    FuseLoops,  # loop fusion: neighbouring row loops -> parallel chunks of the same rows
    SplitMergePath,  # merge-path split: annotated rows -> parallel chunks of the same number of entries, with carry-out
    BalanceNonzeros,  # load balancing: annotated rows -> parallel chunks of equal work
    VersionLoops,  # loop versioning: rows whose blocks lie inside without bounds checks
    SumBlocks,  # annotated sums over blocks -> a running sum for each element, in vectors
    InterchangeLoops,  # loop interchange: tiles of a row around all the sums that it collects
    PeelRemainders,  # remainder handling: bounds-checked vector tiles -> full tiles, narrower tiles, scalars
    BlockRegisters,  # register blocking: rows that annotated sums share -> registers, part by part
    VectorizeDots,  # annotated sums along rows -> vectors, several at once
    VectorizeMaps,  # annotated functions along rows -> arithmetic in vectors
    FactorInvariants,  # annotated sums -> loop-invariant factors once, and sums of the rest
    SumRagged,  # annotated sums along ragged rows -> vectors, the end under a mask
    UnrollRagged,  # annotated ragged loops -> unrolled groups and a rest
    InsertPrefetch,  # annotated gather loops -> prefetch ahead
    tirx.transform.ConvertSSA(),
    PromoteRegisters,  # register promotion: running values
    StoreNontemporal,  # annotated rows -> non-temporal stores
    VectorizeMasked,  # padded rows side by side -> vectors under a mask
    UnswitchLoops,  # loop unswitching: guarded terms -> guarded loops
    ScalarizeLoops,  # scalarisation: vector loops whose lanes differ -> serial loops
    ScalarizeGathers,  # gathers of vector loops -> loads of words of indices, and of one element after the other
    HoistScratch,  # scratch of unknown size outside the loops
]

TO_FLAT = [
    WidenScalars,  # parameters of bfloat16, which TVM's calls do not pass
    PromoteHalves,  # 16-bit floats computed and accumulated in float32
    PropagateNaN,  # minima and maxima of floats that NaN passes
    ReplaceMissing,  # functions that LLVM lacks for vectors -> others
    WalkUnions,  # loops over the steps of a union of two axes -> loops over what both have left, and each
    WalkIntersections,  # loops over an axis that look it up in another -> loops along both
    LowerFind,  # search calls -> loops
    tirx.transform.FlattenBuffer(),
    tirx.transform.StmtSimplify(),
    WidenIndices,  # index widening: small numbers added to subscripts in 64 bits
    ReplaceAggregates,  # scalar replacement of aggregates: large local arrays of unrolled steps -> small ones
    PromoteToStack,  # stack promotion: small local arrays
    SplitGuards,  # conditions before the loads that rely on them
    GuardDivisions,  # no division by a size of zero
    ConvertHalves,  # conversions from and to bfloat16 in expressions with bound names
    CheckScratch,  # no scratch that TVM cannot place
]

TO_MACHINE = [WrapIntegers]  # arithmetic that TVM's code generator takes otherwise than numpy; scripts do not show it

TO_STAGE_3 = [*TO_LOOPS, *REWRITES, *TO_FLAT]


def as_module(func: Any) -> ir.IRModule:
    """A module around one function (called ``main`` if it has no name), or the module itself."""
    if isinstance(func, ir.IRModule):
        return func
    if not isinstance(func, tirx.PrimFunc):
        raise VerifyError(f"expected a tirx.PrimFunc or an IRModule, found {called(func)}")
    name = func.attrs.get("global_symbol", "main") if func.attrs is not None else "main"
    return ir.IRModule({str(name): func.with_attr("global_symbol", str(name))})


def single(func: Any) -> tirx.PrimFunc:
    """Return the one function of a program or module."""
    if isinstance(func, ir.IRModule):
        found = [f for f in func.functions.values() if isinstance(f, tirx.PrimFunc)]
        if len(found) != 1:
            names = ", ".join(gv.name_hint for gv in func.functions)
            raise VerifyError(f"expected a module with one PrimFunc, found {len(found)} ({names}); build mod['name']")
        func = found[0]
    mod = as_module(func)
    return next(iter(mod.functions.values()))


def called(program: Any) -> str:
    """What something is that is no program, and what to do with it."""
    if not isinstance(program, FunctionType):
        return type(program).__name__
    how = "call it if it makes one, as in sparsetir.ops.spmm(), or decorate it with @T.prim_func if it is one"
    return f"the function {program.__name__}: {how}"


def run(passes: list[Any], mod: ir.IRModule) -> ir.IRModule:
    """Apply `passes` in order."""
    with own_errors():
        return tvm.transform.Sequential(passes)(mod)
