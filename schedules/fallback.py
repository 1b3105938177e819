# SPDX-License-Identifier: Apache-2.0
"""What is left of the sketches where all of them together make loops that cannot be lowered.

A legal program always has legal loops: those it has without a schedule. From there the steps are taken one by one, each
kept if the function still lowers: a loop over rows that is shared out, then block by block the first sketch in the
order of `SKETCHES` that does. What was dropped, and why, is logged (``logging.getLogger("sparsetir")``) and noted at
the function; with ``SPARSETIR_STRICT=1`` the first error is raised instead, as in the project's own tests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from tvm import ir, s_tir

from sparsetir.lower.annotations import DROPPED

STRICT = "SPARSETIR_STRICT"

Lower = Callable[[ir.IRModule], Any]
Step = Callable[[s_tir.Schedule], s_tir.Schedule]

_log = logging.getLogger("sparsetir")


def is_strict() -> bool:
    """Whether nothing is dropped."""
    return os.environ.get(STRICT, "") not in ("", "0")


def piecewise(mod: ir.IRModule, steps: list[tuple[str, list[Step]]], lowers: Lower) -> ir.IRModule:
    """Take each step in the first of its ways that leaves a module which lowers.

    Parameters
    ----------
    mod : IRModule
        Lowered to stage II; the schedule begins with it.
    steps : list of (str, list of callables)
        What each step is called, and the ways to take it, best first; one is given a schedule and returns one.
    lowers : callable
        Lowers a module, or raises.

    Returns
    -------
    IRModule
        Its functions name what was dropped in their attributes.

    Raises
    ------
    Exception
        What `lowers` raises of the module without a schedule.
    """
    lowers(mod)
    sch, dropped = s_tir.Schedule(mod), []
    for name, ways in steps:
        found, reasons = _first_that_lowers(sch, ways, lowers)
        sch = found or sch
        if reasons:
            dropped.append(name)
            _log.info("%s %s: %s", "another sketch for" if found else "no sketch for", name, reasons[0])
    return _noted(sch.mod, dropped)


def _first_that_lowers(sch: s_tir.Schedule, ways: list[Step], lowers: Lower) -> tuple[s_tir.Schedule | None, list[str]]:
    """The schedule after the first way that works, if any, and why those before it do not."""
    reasons = []
    for way in ways:
        try:
            trial = way(sch.copy())
            lowers(trial.mod)
        except Exception as error:  # whatever a pass or TVM has against it
            reasons.append(f"{type(error).__name__}: {str(error).strip()[:200]}")
        else:
            return trial, reasons
    return None, reasons


def _noted(mod: ir.IRModule, dropped: list[str]) -> ir.IRModule:
    return ir.IRModule({gv: f.with_attr(DROPPED, dropped) for gv, f in mod.functions.items()}) if dropped else mod


__all__ = ["is_strict", "piecewise"]
