# SPDX-License-Identifier: Apache-2.0
"""A program as its candidates are compiled: lowered to stage II once, machine code shared by whatever can share it.

Programs say nothing of the matrix but its type, so the searches of a process share their forms: what was compiled for
one matrix serves the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir.compile.cache import content_key
from sparsetir.compile.pipeline import lowered, machine_code, scheduled, to_stage_2, to_stage_3
from sparsetir.compile.target import make_target
from sparsetir.errors import TuningError
from sparsetir.lower.late_choices import with_late_choices
from sparsetir.schedules import Choices
from sparsetir.threads import get_num_threads
from sparsetir.tuning.knobs import Config
from sparsetir.tuning.space import Values, open_choices, shared
from sparsetir.tuning.templates import Template

MOST_FORMS = 64  # that a process keeps, the last ones used

Function = Callable[..., Any]


@dataclass(frozen=True)
class Code:
    """Machine code of all candidates that differ in nothing but choices that a call gives.

    Parameters
    ----------
    function : callable
        Takes these choices, then the parameters of the program.
    late : tuple of str
        Which they are.
    """

    function: Function
    late: tuple[str, ...] = ()

    def of(self, choices: Choices) -> Function:
        """The function of one candidate."""
        return partial(self.function, *(getattr(choices, name) for name in self.late)) if self.late else self.function


class FormatVariant:
    """A program as its candidates are compiled.

    Parameters
    ----------
    func : PrimFunc
        At stage I.
    target : Target, str or dict, optional
    template : Template, optional
        Whose knobs are searched; by default the sketches schedule.
    """

    def __init__(self, func: tirx.PrimFunc, target: Any, template: Template | None = None) -> None:
        self.func, self.target, self.template = func, make_target(target, func), template
        self.name = str(func.attrs["global_symbol"])
        self.names = [str(param.name) for param in func.params]
        self.codes: dict[Choices, Code | None] = {}  # of shared choices; None where there is none for all of them
        self._open: dict[int | None, Values] = {}
        self.is_filled = False

    def fill(self, codes: Mapping[Choices, Code], feat: int | None, values: Values) -> None:
        """Take machine code and open choices that were found before, where there are none yet."""
        self.codes = {**codes, **self.codes}
        self._open.setdefault(feat, values)
        self.is_filled = True

    @cached_property
    def second(self) -> ir.IRModule:
        """The stage-II module, not scheduled."""
        return to_stage_2(self.func)

    def open_choices(self, feat: int | None) -> Values:
        """The values to try for whatever makes a difference."""
        if self.template is not None:
            return self.template.space(self.second)
        if feat not in self._open:
            self._open[feat] = open_choices(self.second, threads=get_num_threads(), feat=feat, target=self.target)
        return self._open[feat]

    def compile(self, choices: Choices | Config) -> Function:
        """Machine code for one candidate; nothing goes to the disk cache.

        The compiled checks of the arguments are left out: they were checked when the workload was made.
        """
        code = self.code(choices) if isinstance(choices, Choices) else None
        if code is not None and isinstance(choices, Choices):
            return code.of(choices)
        schedule = with_knobs(self.template, choices)
        return unchecked(lowered(self.second, schedule, self.target)[3], self.target)[self.name]

    def code(self, choices: Choices) -> Code | None:
        """What a candidate shares with others; None where it needs code of its own."""
        key = shared(choices)
        if key not in self.codes:
            third = self.shared_loops(key)
            self.codes[key] = None if third is None else Code(unchecked(third[0], self.target)[self.name], third[1])
        return self.codes[key]

    def shared_loops(self, choices: Choices) -> tuple[ir.IRModule, tuple[str, ...]] | None:
        """Loops that are given the late choices, and which; None where the schedule has to be cut down to have any."""
        try:
            second, late = with_late_choices(scheduled(self.second, choices, self.target))
            return to_stage_3(second), late
        except Exception:  # `lowered` says why, or finds a schedule that is left
            return None


def unchecked(third: ir.IRModule, target: Any) -> Any:
    """Compile a stage-III module without the checks of its arguments."""
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
        return machine_code(third, target)


_forms: OrderedDict[str, FormatVariant] = OrderedDict()


def form_of(func: tirx.PrimFunc, target: Any, template: Template | None = None) -> FormatVariant:
    """The form of a program; the same one for every search of this process that has no template."""
    if template is not None:
        return FormatVariant(func, target, template)
    key = content_key(func, make_target(target, func), None)
    if key not in _forms:
        _forms[key] = FormatVariant(func, target)
    _forms.move_to_end(key)
    while len(_forms) > MOST_FORMS:
        _forms.popitem(last=False)
    return _forms[key]


def with_knobs(template: Any, choices: Choices | Config) -> Any:
    """A candidate's choices as `sparsetir.build` takes them."""
    if isinstance(choices, Choices):
        return choices
    if template is None:
        raise TuningError(f"values of knobs, {choices}, mean nothing without their template")
    return template.with_values(**choices)


__all__ = ["Code", "FormatVariant", "Function", "form_of", "unchecked", "with_knobs"]
