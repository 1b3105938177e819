# SPDX-License-Identifier: Apache-2.0
"""Annotations and function attributes: modules that write and read each, its refusal, and values at run time.

Run-time choices: function parameters in place of the constants of annotations.

before::

    def spmm(..., m: T.int32):
        for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
            ...

after::

    def spmm(chunks: T.int32, ..., m: T.int32):
        for i in T.serial(m, annotations={"sparsetir.chunks": chunks}):
            ...

One compiled function then serves every number of chunks and every prefetch distance. The structure of a loop depends on
whether they are zero, not on their value. Loops with split rows keep the constant: they allocate a buffer for each
chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.errors import ScheduleError
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import INDEPENDENT, INIT, SEARCH, SPARSE_ITER, SWEEP, cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.loops import with_, without

CHUNKS = "sparsetir.chunks"
CARRY = "sparsetir.carry"
PANEL = "sparsetir.panel"
STREAM = "sparsetir.stream"
UNROLL = "sparsetir.unroll"
VECTOR = "sparsetir.vector"
PREFETCH = "sparsetir.prefetch"
UNIT = "sparsetir.unit"
WIDEN = "sparsetir.unit_widens"
TILE = "sparsetir.tile"
DOT = "sparsetir.dot"
ALONG = "sparsetir.unit_along"
HELD = "sparsetir.held"
SUM = "sparsetir.sum"
STAGED = "sparsetir.staged"
MAP = "sparsetir.map"
BLOCK = "sparsetir.block"
FACTOR = "sparsetir.factor"
PARALLEL_MARK = "sparsetir.parallel"
ORDERED_MARK = "sparsetir.ordered"
INIT_MARK = "sparse_init"
INDPTR = "sparsetir.indptr"
STRUCTURE = "sparsetir.structure"
ASCENDING = "sparsetir.ascending"
DISTINCT = "sparsetir.distinct"
FIBERS = "sparsetir.fibers"
SCRATCH = "sparsetir.scratch"
FREE_SUMS = "sparsetir.free_sums"
FINITE = "sparsetir.finite"
CHOICES = "sparsetir.choices"
DROPPED = "sparsetir.dropped"
EMULATED = "sparsetir.emulated"
PADDED = "sparsetir.padded_rows"


@dataclass(frozen=True)
class Mark:
    """An annotation of loops or blocks, or an attribute of functions.

    Parameters
    ----------
    name : str
    on : str
        ``"loop"``, ``"block"``, ``"block and loop"`` or ``"function"``.
    meaning : str
    writers, readers : str
        Names of modules, with spaces between.
    elsewhere : str
        The effect where it does not apply.
    is_error : bool
        Whether `refused` raises there.
    """

    name: str
    on: str
    meaning: str
    writers: str
    readers: str
    elsewhere: str
    is_error: bool = False


@dataclass(frozen=True)
class Refusal:
    """An annotation that a pass did not honour: its name, the loop that carried it, and the reason."""

    mark: str
    loop: str
    why: str


TABLE = (
    Mark(
        CHUNKS,
        "loop",
        "run the rows in this many parallel parts of equal work",
        "fast_paths row rows",
        "execution annotations partition fuse_loops panels fast_paths row rows",
        "an error where steps may write the same element",
        is_error=True,
    ),
    Mark(
        CARRY,
        "loop",
        "let these parts begin and end inside a row",
        "row",
        "fuse_loops annotations partition",
        "refused where a part of a row cannot be added to the rest: rows stay whole",
    ),
    Mark(
        SWEEP,
        "block and loop",
        "go over the rows together with neighbours of the same sweep only",
        "fast_paths row rows decompose packing",
        "partition fuse_loops fast_paths row rows",
        "without neighbours it says nothing",
    ),
    Mark(
        PANEL,
        "loop",
        "run the columns in panels of this width outside the rows, operands packed",
        "panel",
        "block_registers panels",
        "refused where the rows do not fall apart into columns",
    ),
    Mark(
        STREAM,
        "loop",
        "write the results of the loop past the caches",
        "fast_paths row rows",
        "memory_hints",
        "refused where no whole vectors are copied to an array that nothing reads",
    ),
    Mark(
        UNROLL,
        "loop",
        "unroll by this factor, with a rest",
        "fast_paths row rows",
        "loop_transforms",
        "applies to every loop",
    ),
    Mark(
        VECTOR,
        "loop",
        "the elements of a vector register, for the columns after the last full tile",
        "row",
        "loop_transforms",
        "without it vectors have eight elements",
    ),
    Mark(
        PREFETCH,
        "loop",
        "fetch what is gathered this many steps ahead",
        "dot fast_paths row rows",
        "block_registers memory_hints annotations vectorize",
        "refused where nothing is gathered along the steps",
    ),
    Mark(
        UNIT,
        "loop",
        "add products of entries and rows by dot-product instructions, in tiles of at most this many columns",
        "dot_product",
        "dot_products",
        "refused where the sum does not begin with zero, or rows of blocks have no whole number of groups",
    ),
    Mark(
        WIDEN,
        "loop",
        "add those products of bfloat16 numbers by multiply-adds of float32",
        "dot_product",
        "dot_products",
        "no effect without sparsetir.unit, or on 8 bits",
    ),
    Mark(
        TILE,
        "loop",
        "add products of blocks and rows by tile instructions, with this many tiles of columns side by side",
        "tile",
        "tile_products",
        "refused where the body is no sum of products of blocks of 8 to 64 rows and gathered rows",
    ),
    Mark(
        DOT,
        "loop",
        "reduce along the loop in vectors of this many lanes",
        "dot",
        "vectorize",
        "refused where the body is no sum, maximum or minimum along one element",
    ),
    Mark(
        ALONG,
        "loop",
        "reduce along the loop by dot-product instructions",
        "dot_product",
        "vectorize",
        "without it, or where the body is no sum of products of two contiguous rows, vectors",
    ),
    Mark(
        HELD,
        "loop",
        "hold this many elements of the row that neighbouring sums share in registers",
        "dot",
        "block_registers",
        "refused where the sums share no row: each loads it again",
    ),
    Mark(
        SUM,
        "loop",
        "sum along a ragged row in vectors of this many lanes, the end under a mask",
        "ragged_sum",
        "ragged_sums",
        "refused where the body is no sum of elements along the row",
    ),
    Mark(
        STAGED,
        "loop",
        "compute the terms of this many neighbouring rows into a buffer before the rows are summed",
        "ragged_sum",
        "stage_terms",
        "refused where terms depend on more than the entries of the row",
    ),
    Mark(
        MAP,
        "loop",
        "compute along the loop in vectors of this many lanes",
        "elementwise",
        "vectorize",
        "refused where a step is not one store",
    ),
    Mark(
        BLOCK,
        "loop",
        "sum over the blocks around the loop with a running sum for each of their elements",
        "block blocks",
        "ragged_sums",
        "refused where the loops around it are no sum over blocks",
    ),
    Mark(
        FACTOR,
        "loop",
        "multiply the sum over the loop, not its terms, by the factors that do not move",
        "nested_sum",
        "registers",
        "refused where no factor is fixed",
    ),
    Mark(
        PARALLEL_MARK,
        "block and loop",
        "the steps are proven independent; on a block, of the variable it names",
        "execution emit",
        "execution partition fuse_loops panels panel fast_paths row rows",
        "a proof that nothing asks for is taken away",
    ),
    Mark(
        ORDERED_MARK,
        "block",
        "the names of the variables whose steps must keep their order",
        "emit iterations nest",
        "execution",
        "an error where a schedule does not keep it",
    ),
    Mark(
        INIT_MARK,
        "block",
        "the block initialises, and stays beside the sums",
        "emit",
        "nest",
        "applies to every block that carries it",
    ),
    Mark(
        SPARSE_ITER,
        "block",
        "the block is a sparse iteration; which of its axes are reduced",
        "builder editing",
        "views emit rules printer primitives editing",
        "a block without it belongs to stage II",
    ),
    Mark(
        SEARCH,
        "block",
        "how coordinates are searched",
        "primitives",
        "views emit primitives",
        "an error for a strategy that does not fit (rules of stage I)",
    ),
    Mark(
        INIT,
        "block",
        "which points are initialised",
        "decompose packing",
        "effects interpreter initialization emit primitives editing split_iteration warnings",
        "without an initialisation it says nothing",
    ),
    Mark(
        INDEPENDENT,
        "block",
        "a promise that steps of the outermost loop write different elements",
        "primitives decompose packing",
        "independence initialization emit dependence editing primitives",
        "taken as given",
    ),
    Mark(
        INDPTR,
        "function",
        "names of the row pointers; every function of the dialect has it",
        "normalize",
        "execution partition fuse_loops half_floats registers",
        "functions without it pass through",
    ),
    Mark(
        STRUCTURE,
        "function",
        "names of all index arrays",
        "normalize",
        "nest ragged_sums arithmetic",
        "without it no array is one",
    ),
    Mark(
        ASCENDING,
        "function",
        "names of the lists that never fall",
        "normalize",
        "fuse_loops",
        "without it no list is one",
    ),
    Mark(
        DISTINCT,
        "function",
        "names of the lists that hold nothing twice",
        "normalize",
        "execution half_floats registers",
        "without it no list is one",
    ),
    Mark(
        FIBERS,
        "function",
        "lists of groups that hold nothing twice, as name:size of a group",
        "normalize",
        "registers",
        "without it no list has such groups",
    ),
    Mark(
        SCRATCH,
        "function",
        "names of the program's own arrays",
        "nest",
        "accesses",
        "without it there are none",
    ),
    Mark(
        FREE_SUMS,
        "function",
        "the order of all sums is open, not of reductions only",
        "programs",
        "target",
        "without it reductions alone are",
    ),
    Mark(
        FINITE,
        "function",
        "the caller promises that no operand, sum or product is infinite or NaN, so that factors may leave sums",
        "kernel_factory",
        "schedules",
        "without it sums keep the factors that could make other results",
    ),
    Mark(
        CHOICES,
        "function",
        "the choices of the sketches where a build is given none",
        "constants",
        "schedules",
        "without it the defaults are taken",
    ),
    Mark(
        DROPPED,
        "function",
        "the steps of the schedule that could not be lowered, for the reader of a script",
        "fallback",
        "",
        "without it all were",
    ),
    Mark(
        EMULATED,
        "function",
        "compute matrix instructions by other ones",
        "pipeline",
        "tile_state",
        "without it they are emitted",
    ),
    Mark(
        PADDED,
        "function",
        "the rows of these arrays are as long in memory, in elements, as name:length says",
        "cache",
        "normalize loop_transforms",
        "without it rows follow one another without gaps",
    ),
)
ERRORS = frozenset(mark.name for mark in TABLE if mark.is_error)

_log = logging.getLogger("sparsetir")
_refusals: ContextVar[list[Refusal] | None] = ContextVar("refusals", default=None)


@contextmanager
def refusals() -> Iterator[list[Refusal]]:
    """Collect the annotations that passes refuse while the block runs."""
    found: list[Refusal] = []
    token = _refusals.set(found)
    try:
        yield found
    finally:
        _refusals.reset(token)


def amount(loop: tirx.For, mark: str, dtype: str = "int32") -> ir.Expr:
    """Return the value of an annotation: a constant, or the parameter that `with_late_choices` put in its place."""
    value = loop.annotations[mark]
    return cast(value, dtype) if isinstance(value, Var) else const(int(value), dtype)


def has_annotation(loop: tirx.For, mark: str) -> bool:
    """Return whether a loop has an annotation that is not zero."""
    value = loop.annotations.get(mark, 0)
    return isinstance(value, Var) or int(value) > 0


def refused(loop: tirx.For, mark: str, why: str) -> tirx.For:
    """Remove an annotation that does not apply from a loop; return the loop unchanged if it has none.

    The refusal is logged (``logging.getLogger("sparsetir")``) and listed by `refusals`.

    Raises
    ------
    ScheduleError
        `TABLE` defines the refusal as an error.
    """
    if mark not in loop.annotations:
        return loop
    name = str(loop.loop_var.name)
    if mark in ERRORS:
        raise ScheduleError(f"loop {name} carries {mark} but {why}")
    _log.info("loop %s: no %s: %s", name, mark, why)
    listed = _refusals.get()
    if listed is not None:
        listed.append(Refusal(mark, name, why))
    return with_(loop, notes=without(loop, mark))


def from_dialect(func: tirx.PrimFunc) -> bool:
    """Return whether a lowered function was a program of the dialect; others pass through."""
    return func.attrs is not None and INDPTR in func.attrs


def names_in(func: tirx.PrimFunc, mark: str) -> set[str]:
    """Return the names that an attribute of a function lists; empty if it is missing."""
    return set() if func.attrs is None else {str(name) for name in func.attrs.get(mark, [])}


def padded_rows(func: tirx.PrimFunc) -> dict[str, int]:
    """Return the arrays of a function with gaps between their rows, and the elements from one row to the next."""
    return {name: int(length) for name, length in (entry.split(":") for entry in names_in(func, PADDED))}


# ------------------------------------------------------------------------------------ run-time choices


LATE = {"chunks": CHUNKS, "prefetch": PREFETCH}  # names of choices -> annotations


def with_late_choices(mod: ir.IRModule) -> tuple[ir.IRModule, tuple[str, ...]]:
    """Replace annotations of a scheduled stage-II module by parameters, the function's first ones.

    Parameters
    ----------
    mod : IRModule
        One function, scheduled by one set of choices: a choice has the same value wherever it is annotated.

    Returns
    -------
    IRModule, tuple of str
        The module and the names of the new parameters' choices, keys of `LATE`; empty if no loop is annotated with one.
    """
    ((where, func),) = mod.functions.items()
    notes = [loop.annotations for loop in collect(func.body, tirx.For)]
    marks = {name: mark for name, mark in LATE.items() if any(mark in text for text in notes)}
    if any(CARRY in text for text in notes):
        marks.pop("chunks", None)
    params = {mark: Var(f"{name}_given", ir.PrimType("int32")) for name, mark in marks.items()}

    def on_for(loop: tirx.For, mutator: Any) -> tirx.Stmt:
        changed = mutator.default_mutate(loop)
        return with_(changed, notes={k: params.get(k, v) for k, v in changed.annotations.items()})

    body = structural_mutate(func.body, [(tirx.For, on_for)])
    late = tirx.PrimFunc([*params.values(), *func.params], body, func.ret_type, func.attrs)
    return ir.IRModule({where: late}), tuple(marks)


__all__ = ["LATE", "with_late_choices"]
