# SPDX-License-Identifier: Apache-2.0
"""Annotations of loops and blocks, attributes of functions, and the refusal of annotations that do not apply.

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
GATHERS = "sparsetir.gathers"
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
    elsewhere : str
        The effect where it does not apply.
    is_error : bool
        Whether `refused` raises there.
    """

    name: str
    on: str
    meaning: str
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
        "an error where steps may write the same element",
        is_error=True,
    ),
    Mark(
        CARRY,
        "loop",
        "let these parts begin and end inside a row",
        "refused where parts of a row cannot be combined: rows stay whole",
    ),
    Mark(
        SWEEP,
        "block and loop",
        "fuse with neighbouring loops of the same sweep only",
        "no effect without neighbours",
    ),
    Mark(
        PANEL,
        "loop",
        "run the columns in panels of this width outside the rows, operands packed",
        "refused where the columns of a row depend on each other",
    ),
    Mark(
        STREAM,
        "loop",
        "write the results of the loop past the caches",
        "refused where no whole vectors are copied to an array that nothing reads",
    ),
    Mark(
        UNROLL,
        "loop",
        "unroll by this factor, with a remainder loop",
        "applies to every loop",
    ),
    Mark(
        VECTOR,
        "loop",
        "the elements of a vector register, for the columns after the last full tile",
        "without it vectors have eight elements",
    ),
    Mark(
        PREFETCH,
        "loop",
        "prefetch gathered rows this many steps ahead",
        "refused where nothing is gathered along the steps",
    ),
    Mark(
        UNIT,
        "loop",
        "add products of entries and rows by dot-product instructions, in tiles of at most this many columns",
        "refused where the sum does not begin with zero, or rows of blocks have no whole number of groups",
    ),
    Mark(
        WIDEN,
        "loop",
        "add those products of bfloat16 numbers by multiply-adds of float32",
        "no effect without sparsetir.unit, or on 8 bits",
    ),
    Mark(
        TILE,
        "loop",
        "add products of blocks and rows by tile instructions, with this many tiles of columns side by side",
        "refused where the body is no sum of products of blocks of 8 to 64 rows and gathered rows",
    ),
    Mark(
        DOT,
        "loop",
        "reduce along the loop in vectors of this many lanes",
        "refused where the body is no sum, maximum or minimum along one element",
    ),
    Mark(
        ALONG,
        "loop",
        "reduce along the loop by dot-product instructions",
        "without it, or where the body is no sum of products of two contiguous rows, vectors",
    ),
    Mark(
        HELD,
        "loop",
        "keep this many elements of the row that neighbouring sums share in registers",
        "refused where the sums share no row: each loads it again",
    ),
    Mark(
        SUM,
        "loop",
        "sum along a ragged row in vectors of this many lanes, the end under a mask",
        "refused where the body is no sum of elements along the row",
    ),
    Mark(
        STAGED,
        "loop",
        "compute the terms of this many neighbouring rows into a buffer before the rows are summed",
        "refused where terms depend on more than the entries of the row",
    ),
    Mark(
        MAP,
        "loop",
        "compute along the loop in vectors of this many lanes",
        "refused where a step is not one store",
    ),
    Mark(
        BLOCK,
        "loop",
        "sum over the blocks around the loop with a running sum for each of their elements",
        "refused where the loops around it are no sum over blocks",
    ),
    Mark(
        FACTOR,
        "loop",
        "multiply the sum over the loop, not its terms, by the factors that do not move",
        "refused where no factor is fixed",
    ),
    Mark(
        PARALLEL_MARK,
        "block and loop",
        "the steps are proven independent; on a block, of the variable it names",
        "removed where no pass uses the proof",
    ),
    Mark(
        ORDERED_MARK,
        "block",
        "the names of the variables whose steps must keep their order",
        "an error where a schedule does not keep it",
    ),
    Mark(
        INIT_MARK,
        "block",
        "the block initialises, and stays beside the sums",
        "applies to every block that carries it",
    ),
    Mark(
        SPARSE_ITER,
        "block",
        "the block is a sparse iteration; which of its axes are reduced",
        "a block without it belongs to stage II",
    ),
    Mark(
        SEARCH,
        "block",
        "how coordinates are searched",
        "an error for a strategy that does not fit (rules of stage I)",
    ),
    Mark(
        INIT,
        "block",
        "which points are initialised",
        "no effect without an initialisation",
    ),
    Mark(
        INDEPENDENT,
        "block",
        "a promise that steps of the outermost loop write different elements",
        "taken as given",
    ),
    Mark(
        INDPTR,
        "function",
        "names of the row pointers; every function of the dialect has it",
        "functions without it pass through",
    ),
    Mark(
        STRUCTURE,
        "function",
        "names of all index arrays",
        "without it no array is one",
    ),
    Mark(
        ASCENDING,
        "function",
        "names of the index arrays whose entries never decrease",
        "without it no array is known to be",
    ),
    Mark(
        DISTINCT,
        "function",
        "names of the index arrays without repeated entries",
        "without it no array is known to be",
    ),
    Mark(
        FIBERS,
        "function",
        "index arrays without repeated entries in each group, as name:size of a group",
        "without it no array is known to have such groups",
    ),
    Mark(
        SCRATCH,
        "function",
        "names of the program's own arrays",
        "without it there are none",
    ),
    Mark(
        FREE_SUMS,
        "function",
        "all sums may be reordered, not only reductions",
        "without it only reductions may be",
    ),
    Mark(
        FINITE,
        "function",
        "the caller promises that no operand, sum or product is infinite or NaN, so factors may be moved out of sums",
        "without it factors stay in sums where results could differ",
    ),
    Mark(
        CHOICES,
        "function",
        "the choices of the sketches where a build is given none",
        "without it the defaults are taken",
    ),
    Mark(
        DROPPED,
        "function",
        "the steps of the schedule that could not be lowered, for the reader of a script",
        "without it all steps were lowered",
    ),
    Mark(
        EMULATED,
        "function",
        "emulate matrix instructions by other instructions",
        "without it they are emitted",
    ),
    Mark(
        GATHERS,
        "function",
        "gather elements by vector instructions",
        "without it they are loaded one by one",
    ),
    Mark(
        PADDED,
        "function",
        "arrays whose rows have gaps between them, as name:length of a row in memory, in elements",
        "without it rows are contiguous",
    ),
)
ERRORS = frozenset(mark.name for mark in TABLE if mark.is_error)

_log = logging.getLogger("sparsetir")
_refusals: ContextVar[list[Refusal] | None] = ContextVar("refusals", default=None)


@contextmanager
def refusals() -> Iterator[list[Refusal]]:
    """Collect the annotations that passes refuse while the block runs."""
    collected: list[Refusal] = []
    token = _refusals.set(collected)
    try:
        yield collected
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
    """Return whether a function was lowered from a program of the dialect; passes leave others unchanged."""
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
