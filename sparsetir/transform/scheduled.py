# SPDX-License-Identifier: Apache-2.0
"""A decomposition whose program was scheduled afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tvm import tirx

from sparsetir.errors import ScheduleError, VerifyError
from sparsetir.transform.decompose import Decomposition
from sparsetir.transform.trace import Step


@dataclass(frozen=True, eq=False)
class Scheduled(Decomposition):
    """A decomposition and the steps that followed it."""

    before: Decomposition = field(kw_only=True)
    steps: tuple[Step, ...] = field(kw_only=True)

    @cached_property
    def exact(self) -> Decomposition | None:
        """The same for tensors whose shape the blocks divide, with the same steps; None where they do not apply."""
        found = self.before.exact
        func = None if found is None else _replayed(found.func, self.steps)
        return None if found is None or func is None else replace(found, func=func)


def _replayed(func: tirx.PrimFunc, steps: Sequence[Step]) -> tirx.PrimFunc | None:
    try:
        for step in steps:
            func = step.run(func).func
    except (ScheduleError, VerifyError):
        return None
    return func


def scheduled(found: Decomposition, func: tirx.PrimFunc, steps: Sequence[Step]) -> Decomposition:
    """`found` with the program `func` that `steps` made of its own."""
    if not steps:
        return found
    return Scheduled(found.original, func, found.formats, found.groups, before=found, steps=tuple(steps))


__all__ = ["Scheduled", "scheduled"]
