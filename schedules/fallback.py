# SPDX-License-Identifier: Apache-2.0
"""Fallback schedules: the subset of the sketches that lowers, where all of them together do not.

A legal program always has legal loops: those without a schedule. From there the steps are applied one by one, each
kept if the function still lowers: first the parallel row loops, then for each block the first sketch in the
order of `SKETCHES` that lowers. Dropped steps and the reasons are logged (``logging.getLogger("sparsetir")``), and the
steps are listed in an attribute of the function. With ``SPARSETIR_STRICT=1`` the first error is raised instead, as in
the project's own tests.
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


__all__ = ["is_strict", "piecewise"]
