# SPDX-License-Identifier: Apache-2.0
"""Sketches: schedule rules for stage-II functions, tried in order; the loops without a schedule are always legal.

Where all sketches together do not lower, a subset of them does. A legal program always has legal loops: those without a
schedule. From there the steps are applied one by one, each kept if the function still lowers: first the parallel row
loops, then for each block the first sketch in the order of `SKETCHES` that lowers. Dropped steps and the reasons are
logged (``logging.getLogger("sparsetir")``), and the steps are listed in an attribute of the function. With
``SPARSETIR_STRICT=1`` the first error is raised instead, as in the project's own tests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.error import InternalError

from sparsetir.ir.visitor import structural_walk
from sparsetir.lower.annotations import CHOICES, DROPPED, FINITE, from_dialect
from sparsetir.schedules.block import tile_block
from sparsetir.schedules.choices import Choices
from sparsetir.schedules.defaults import usual
from sparsetir.schedules.dot import tile_dot
from sparsetir.schedules.elementwise import tile_map
from sparsetir.schedules.matrix_unit import use_dot_product, use_packed_product, use_row_products, use_tiles
from sparsetir.schedules.nested_sum import fixed_sum, take_factors
from sparsetir.schedules.panel import tile_panels
from sparsetir.schedules.ragged_sum import tile_sum
from sparsetir.schedules.registers import Registers, has_unit
from sparsetir.schedules.row import independent_blocks, share_block, share_rows, split_rows, tile_row

STRICT = "SPARSETIR_STRICT"

Lower = Callable[[ir.IRModule], Any]
Step = Callable[[s_tir.Schedule], s_tir.Schedule]

_log = logging.getLogger("sparsetir")


def is_strict() -> bool:
    """Return whether errors are raised rather than steps dropped."""
    return os.environ.get(STRICT, "") not in ("", "0")


def piecewise(mod: ir.IRModule, steps: list[tuple[str, list[Step]]], lowers: Lower) -> ir.IRModule:
    """Apply the first alternative of each step after which the module lowers.

    Parameters
    ----------
    mod : IRModule
        Lowered to stage II; the schedule begins with it.
    steps : list of (str, list of callables)
        The name and the alternatives of each step, best first; an alternative maps a schedule to a schedule.
    lowers : callable
        Lowers a module, or raises.

    Returns
    -------
    IRModule
        The scheduled module; its functions list the dropped steps in an attribute.

    Raises
    ------
    Exception
        The error of `lowers` for the module without a schedule.
    """
    lowers(mod)
    sch, dropped = s_tir.Schedule(mod), []
    for name, alternatives in steps:
        scheduled, reasons = _first_that_lowers(sch, alternatives, lowers)
        sch = scheduled or sch
        if reasons:
            dropped.append(name)
            _log.info("%s %s: %s", "another sketch for" if scheduled else "no sketch for", name, reasons[0])
    return _record_dropped(sch.mod, dropped)


def _first_that_lowers(sch: s_tir.Schedule, ways: list[Step], lowers: Lower) -> tuple[s_tir.Schedule | None, list[str]]:
    """Return the schedule after the first alternative that lowers, if any, and the errors of those before it."""
    reasons = []
    for way in ways:
        try:
            trial = way(sch.copy())
            lowers(trial.mod)
        except Exception as error:  # Any error of a pass or of TVM rejects the alternative.
            reasons.append(f"{type(error).__name__}: {str(error).strip()[:200]}")
        else:
            return trial, reasons
    return None, reasons


def _record_dropped(mod: ir.IRModule, dropped: list[str]) -> ir.IRModule:
    return ir.IRModule({gv: f.with_attr(DROPPED, dropped) for gv, f in mod.functions.items()}) if dropped else mod


SKETCHES = [
    use_tiles,  # sums of products of blocks of rows in bfloat16 and 8 bits, where the target has tiles
    use_dot_product,  # sums of products in bfloat16 and 8 bits, where the target has the instructions
    use_row_products,  # sums along rows in bfloat16 and 8 bits, where the target has the instructions
    use_packed_product,  # the same where columns are packed first, as those of `tile_panels`
    tile_panels,  # columns that are not the last dimension of some array, or panels that were chosen
    tile_row,  # register tiles of a result's rows
    tile_block,  # sums over blocks in vectors
    tile_dot,  # sums, maxima and minima along rows in vectors
    tile_sum,  # sums along ragged rows in vectors
    tile_map,  # elementwise functions along rows in vectors
]


def leaves(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the innermost blocks of a function, in program order."""
    names: list[str] = []

    def on_block(block: s_tir.SBlock) -> None:
        inner: list[Any] = []
        structural_walk(block.body, (s_tir.SBlock, inner.append))
        if not inner and block.iter_vars:
            names.append(str(block.name_hint))

    structural_walk(func.body, (s_tir.SBlock, on_block))
    return names


def _try(
    sch: s_tir.Schedule,
    func_name: str,
    name: str,
    choices: Choices,
    registers: Registers,
    *,
    first: int = 0,
) -> s_tir.Schedule:
    """Apply the first sketch that fits, from the one at `first` on, to one block.

    Return the schedule unchanged if no sketch fits or a primitive fails.
    """
    trial = sch.copy()
    trial.work_on(func_name)
    block = trial.get_sblock(name)
    try:
        fixed = fixed_sum(trial, block) if FINITE in sch.mod[func_name].attrs else None
        fits = any(sketch(trial, block, choices, registers) for sketch in SKETCHES[first:])
        fits = take_factors(trial, fixed) or fits
    except (s_tir.ScheduleError, InternalError):
        return sch
    return trial if fits else sch


def _share(sch: s_tir.Schedule, func_name: str, name: str, choices: Choices) -> s_tir.Schedule:
    share_block(sch, func_name, name, choices)
    return sch


def _read_choices(func: tirx.PrimFunc) -> Choices | None:
    """Return the choices that a function's attributes define; None if they define none."""
    attribute = func.attrs.get(CHOICES)
    return None if attribute is None else Choices(**{str(name): int(value) for name, value in attribute.items()})


def schedule(
    mod: ir.IRModule,
    choices: Choices | None = None,
    *,
    registers: Registers | None = None,
) -> s_tir.Schedule:
    """Apply the first rule that fits to every innermost block of a stage-II module.

    Parameters
    ----------
    mod : IRModule
        Lowered to stage II; functions that are not of the dialect are skipped.
    choices : Choices, optional
        By default those in the function's attributes, or `defaults.usual`.
    registers : Registers, optional
        Of the target; by default 16 of 256 bits.

    Returns
    -------
    tvm.s_tir.Schedule
        Its module lowers with ``sparsetir.lower``'s stage-III passes; its trace replays.
    """
    sch = s_tir.Schedule(mod)
    for _, ways in _steps(mod, choices, registers or Registers()):
        sch = ways[0](sch)
    return sch


def _steps(mod: ir.IRModule, choices: Choices | None, registers: Registers) -> list[tuple[str, Any]]:
    """Return the steps of `schedule`: the name of each step and its alternatives, best first."""
    steps: list[tuple[str, Any]] = []
    for gv, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc) or not from_dialect(func):
            continue
        block_choices, where = choices or _read_choices(func) or usual(func, registers), gv.name_hint
        for name in independent_blocks(func):
            share = partial(_share, func_name=where, name=name, choices=block_choices)
            steps.append((f"rows of {name}", [share]))
        for name in leaves(func):
            attempt = partial(_try, func_name=where, name=name, choices=block_choices, registers=registers)
            steps.append((name, [partial(attempt, first=n) for n in range(len(SKETCHES))]))
    return steps


def legal_schedule(
    mod: ir.IRModule,
    choices: Choices | None,
    lowers: Callable[[ir.IRModule], Any],
    *,
    registers: Registers,
) -> ir.IRModule:
    """Apply the steps of `schedule` that keep the module lowerable, one by one (`sparsetir.schedules`)."""
    return piecewise(mod, _steps(mod, choices, registers), lowers)


__all__ = [
    "DROPPED",
    "SKETCHES",
    "Choices",
    "Registers",
    "has_unit",
    "is_strict",
    "leaves",
    "legal_schedule",
    "piecewise",
    "schedule",
    "share_rows",
    "split_rows",
    "tile_block",
    "tile_dot",
    "tile_map",
    "tile_panels",
    "tile_row",
    "tile_sum",
    "use_dot_product",
    "use_packed_product",
    "use_row_products",
    "use_tiles",
]
