# SPDX-License-Identifier: Apache-2.0
"""Pass pipeline from stage I to flat loops: the ordered lists of passes, the only place that defines their order."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.errors import VerifyError, own_errors
from sparsetir.lower.checks.cached_copies import CheckCaches, GuardCopies, GuardDomains
from sparsetir.lower.checks.execution import (
    CheckForm,
    CheckLoops,
    CheckOrder,
    CheckParallel,
    CheckScratch,
    CheckWrites,
    MarkIndependent,
)
from sparsetir.lower.iterations.emit import EmitNest
from sparsetir.lower.iterations.nest import DeclareRegions
from sparsetir.lower.iterations.normalize import (
    AlignParams,
    CompareNaN,
    FoldCasts,
    NameScratch,
    PadRows,
    ReduceAlignment,
    ReplaceBools,
)
from sparsetir.lower.rows.block_registers import BlockRegisters
from sparsetir.lower.rows.fuse_loops import FuseLoops
from sparsetir.lower.rows.panels import PackOperands
from sparsetir.lower.rows.partition import BalanceNonzeros, SplitMergePath
from sparsetir.lower.target.arithmetic import GuardDivisions, PropagateNaN, SplitGuards, WidenIndices, WrapIntegers
from sparsetir.lower.target.half_floats import ConvertHalves, PromoteHalves, WidenScalars
from sparsetir.lower.target.initialization import DecomposeInit
from sparsetir.lower.target.merge_loops import WalkIntersections, WalkUnions
from sparsetir.lower.target.scratch import (
    BoundLocals,
    CompactScratch,
    HoistScratch,
    PromoteToStack,
    RefuseRagged,
    ReplaceAggregates,
)
from sparsetir.lower.target.search import LowerFind
from sparsetir.lower.vector.dot_products import UseDotProducts
from sparsetir.lower.vector.loop_transforms import (
    InterchangeLoops,
    PeelRemainders,
    UnrollRagged,
    UnswitchLoops,
    VersionLoops,
)
from sparsetir.lower.vector.memory_hints import InsertPrefetch, StoreNontemporal
from sparsetir.lower.vector.ragged_sums import StageTerms, SumBlocks, SumRagged
from sparsetir.lower.vector.registers import FactorInvariants, PromoteRegisters
from sparsetir.lower.vector.tile_products import ConfigureTiles, UseTiles
from sparsetir.lower.vector.vector_math import ReplaceMissing
from sparsetir.lower.vector.vectorize import (
    LowerGathers,
    ScalarizeLoops,
    VectorizeDots,
    VectorizeMaps,
    VectorizeMasked,
)

TO_STAGE_2 = [
    NameScratch,  # names of scratch as in the program
    ReplaceBools,  # sums and products of bools -> or and and
    FoldCasts,  # casts of literals -> literals of that dtype
    CompareNaN,  # comparisons of floats that are false for NaN -> choices
    AlignParams,  # alignment of 64 bytes, noalias
    EmitNest,  # sp_iter -> nested blocks over positions, searches as calls
    DeclareRegions,  # reads and writes of every block
]

SCHEDULED = [CheckForm]  # checks of a scheduled module: no variable outside its block

TO_LOOPS = [
    CheckLoops,  # only kinds of loops that code can be generated for
    CheckOrder,  # steps that overwrite each other's results keep their order
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
    PadRows,  # rows of annotated parameters: as long as they are in memory
    ReduceAlignment,  # natural alignment: callers pass arrays of any
    s_tir.transform.LowerOpaqueBlock(),
]

REWRITES = [
    CheckParallel,  # steps of parallel loops write different elements
    BoundLocals,  # fixed sizes for arrays inside loops
    RefuseRagged,  # no scratch as long as a row
    PackOperands,  # operand packing: annotated column loops -> panels outside the rows
    FuseLoops,  # loop fusion: neighbouring row loops -> parallel chunks of the same rows
    SplitMergePath,  # merge-path split: annotated rows -> parallel chunks of the same number of entries, with carry-out
    BalanceNonzeros,  # load balancing: annotated rows -> parallel chunks of equal work
    UseTiles,  # annotated sums of products -> tile instructions over blocks and interleaved rows
    UseDotProducts,  # annotated sums of products -> dot-product instructions over interleaved rows
    VersionLoops,  # loop versioning: rows whose blocks are in bounds -> no bounds checks
    SumBlocks,  # annotated sums over blocks -> an accumulator for each element, in vectors
    InterchangeLoops,  # loop interchange: tiles of a row around all the sums of the row
    PeelRemainders,  # remainder handling: bounds-checked vector tiles -> full tiles, one pass over the columns left
    BlockRegisters,  # register blocking: rows that annotated sums share -> registers, part by part
    VectorizeDots,  # annotated sums along rows -> vectors, several at once
    VectorizeMaps,  # annotated functions along rows -> arithmetic in vectors
    FactorInvariants,  # annotated sums -> loop-invariant factors once, and sums of the rest
    StageTerms,  # annotated rows -> blocks whose terms are computed first, then summed row by row
    SumRagged,  # annotated sums along ragged rows -> vectors, with a masked remainder
    UnrollRagged,  # annotated ragged loops -> unrolled groups and a remainder loop
    InsertPrefetch,  # annotated gather loops -> prefetch of later steps
    tirx.transform.ConvertSSA(),
    PromoteRegisters,  # register promotion: accumulators
    StoreNontemporal,  # annotated rows -> non-temporal stores
    VectorizeMasked,  # padded rows in the lanes of vectors, under a mask
    UnswitchLoops,  # loop unswitching: guarded terms -> guarded loops
    ScalarizeLoops,  # scalarisation: vector loops whose lanes differ -> serial loops
    LowerGathers,  # gathers of vector loops -> instructions, or loads of words of indices and scalar loads of elements
    HoistScratch,  # scratch of unknown size outside the loops
    ConfigureTiles,  # tiles configured by each thread that uses them; matrix units that the target emulates
]

TO_FLAT = [
    WidenScalars,  # parameters of bfloat16 -> float32: TVM's calls do not pass bfloat16
    PromoteHalves,  # 16-bit floats computed and accumulated in float32
    PropagateNaN,  # minima and maxima of floats propagate NaN
    ReplaceMissing,  # functions that LLVM cannot vectorize -> others
    WalkUnions,  # loops over the steps of a union of two axes -> merge loops
    WalkIntersections,  # loops over an axis that search another -> merge loops
    LowerFind,  # search calls -> loops
    tirx.transform.FlattenBuffer(),
    tirx.transform.StmtSimplify(),
    WidenIndices,  # index widening: small numbers added to subscripts in 64 bits
    ReplaceAggregates,  # scalar replacement of aggregates: large local arrays of unrolled steps -> small ones
    PromoteToStack,  # stack promotion: small local arrays
    SplitGuards,  # bounds tested before the loads they guard
    GuardDivisions,  # no division by a size of zero
    ConvertHalves,  # conversions from and to bfloat16 in expressions with bound names
    CheckScratch,  # no scratch that TVM cannot allocate
]

TO_MACHINE = [WrapIntegers]  # arithmetic where TVM's code generator differs from numpy; scripts do not show it

TO_STAGE_3 = [*TO_LOOPS, *REWRITES, *TO_FLAT]


def as_module(func: Any) -> ir.IRModule:
    """Wrap one function in a module (named ``main`` if it has no name); return a module unchanged."""
    if isinstance(func, ir.IRModule):
        return func
    if not isinstance(func, tirx.PrimFunc):
        raise VerifyError(f"expected a tirx.PrimFunc or an IRModule, got {describe_argument(func)}")
    name = func.attrs.get("global_symbol", "main") if func.attrs is not None else "main"
    return ir.IRModule({str(name): func.with_attr("global_symbol", str(name))})


def single(func: Any) -> tirx.PrimFunc:
    """Return the one function of a program or module."""
    if isinstance(func, ir.IRModule):
        functions = [f for f in func.functions.values() if isinstance(f, tirx.PrimFunc)]
        if len(functions) != 1:
            names = ", ".join(gv.name_hint for gv in func.functions)
            raise VerifyError(f"expected a module with one PrimFunc, got {len(functions)} ({names}); build mod['name']")
        func = functions[0]
    mod = as_module(func)
    return next(iter(mod.functions.values()))


def describe_argument(program: Any) -> str:
    """Return a description of an object that is not a program, with advice for functions that make one."""
    if not isinstance(program, FunctionType):
        return type(program).__name__
    how = "call it if it makes one, as in sparsetir.ops.spmm(), or decorate it with @T.prim_func if it is one"
    return f"the function {program.__name__}: {how}"


def run(passes: list[Any], mod: ir.IRModule) -> ir.IRModule:
    """Apply `passes` in order."""
    with own_errors():
        return tvm.transform.Sequential(passes)(mod)
