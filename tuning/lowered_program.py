# SPDX-License-Identifier: Apache-2.0
"""A program as its candidates are compiled: lowered to stage II once, machine code shared by whatever can share it.

Programs say nothing of the matrix but its type, so the searches of a process share their forms: what was compiled for
one matrix serves the next.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import tvm
from tvm import ir, tirx

from sparsetir.codegen.cache import cache_folder, content_key
from sparsetir.codegen.pipeline import lowered, machine_code, scheduled, to_stage_2, to_stage_3
from sparsetir.codegen.target import make_target
from sparsetir.errors import TuningError
from sparsetir.lower.annotations import with_late_choices
from sparsetir.schedules import Choices
from sparsetir.tuning.knobs import Config, Template
from sparsetir.tuning.space import Values, open_choices, shared
from sparsetir.utils.threads import get_num_threads

MOST_FORMS = 64  # that a process keeps, the last ones used
MOST_FRESH = 256  # calls of the compiler whose machine code waits for the disk

Function = Callable[..., Any]
Loops: TypeAlias = tuple[ir.IRModule, tuple[str, ...]]  # at stage III, and the choices that a call gives them


@dataclass(frozen=True, eq=False)
class Together:
    """Machine code that one call of the compiler made.

    Parameters
    ----------
    library : object
    kernels : sequence of (str, FormatVariant, Choices, tuple of str)
        Name of a function, whose it is, and the choices that its calls give.
    """

    library: Any
    kernels: Sequence[tuple[str, FormatVariant, Choices, tuple[str, ...]]]


fresh: deque[Together] = deque(maxlen=MOST_FRESH)  # that is not on disk, see `sparsetir.tuning.kernel_cache.keep`
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=fresh.clear)  # the parent writes it


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
        """Return the function of one candidate."""
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
        self.proved: set[Choices] = set()  # shared choices whose machine code computed what it should

    def prove(self, choices: Choices | Config) -> None:
        """Note that a candidate computed what it should."""
        if isinstance(choices, Choices):
            self.proved.add(shared(choices))

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
        """Return the values to try for whatever makes a difference."""
        if self.template is not None:
            return self.template.space(self.second)
        if feat not in self._open:
            self._open[feat] = open_choices(self.second, threads=get_num_threads(), feat=feat, target=self.target)
        return self._open[feat]

    def compile(self, choices: Choices | Config) -> Function:
        """Return machine code for one candidate; nothing goes to the disk cache.

        The compiled checks of the arguments are left out: they were checked when the workload was made.
        """
        code = self.code(choices) if isinstance(choices, Choices) else None
        if code is not None and isinstance(choices, Choices):
            return code.of(choices)
        schedule = with_knobs(self.template, choices)
        return unchecked(lowered(self.second, schedule, self.target)[3], self.target)[self.name]

    def code(self, choices: Choices) -> Code | None:
        """Return what a candidate shares with others; None where it needs code of its own."""
        key = shared(choices)
        if key not in self.codes:
            compile_together([(self, key)])
        return self.codes[key]

    def shared_loops(self, choices: Choices) -> Loops | None:
        """Return loops that take the late choices, and which; None where the schedule must be cut down to have any."""
        try:
            second, late = with_late_choices(scheduled(self.second, choices, self.target))
            return to_stage_3(second), late
        except Exception:  # `lowered` says why, or finds a schedule that is left
            return None


def unchecked(third: ir.IRModule, target: Any) -> Any:
    """Compile a stage-III module without the checks of its arguments."""
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
        return machine_code(third, target)


def compile_together(variants: Iterable[tuple[FormatVariant, Choices]]) -> None:
    """Give forms the machine code of candidates, made by one call of the compiler for each target.

    What begins and ends a call takes a fifth of the time of a small kernel.

    Raises
    ------
    Exception
        Of TVM or LLVM, where no code can be made of some: none is there then. One by one they tell which it is.
    """
    groups: dict[str, dict[tuple[FormatVariant, Choices], Loops]] = {}
    for form, choices in variants:
        key = shared(choices)
        if key in form.codes or (form, key) in groups.get(str(form.target), {}):
            continue
        loops = form.shared_loops(key)
        if loops is None:
            form.codes[key] = None
        else:
            groups.setdefault(str(form.target), {})[form, key] = loops
    for group in groups.values():
        _compile_group(group)


def _compile_group(group: Mapping[tuple[FormatVariant, Choices], Loops]) -> None:
    """Compile candidates together for forms of one target whose loops are known."""
    (first, _), *_ = group
    entries = [(f"{form.name}_{n}", form, key, *loops) for n, ((form, key), loops) in enumerate(group.items())]
    functions = {name: third[form.name].with_attr("global_symbol", name) for name, form, _, third, _ in entries}
    library = unchecked(ir.IRModule(functions), first.target)
    for name, form, key, _, late in entries:
        form.codes[key] = Code(library[name], late)
    if cache_folder() is not None:
        fresh.append(Together(library, [(name, form, key, late) for name, form, key, _, late in entries]))


_forms: OrderedDict[str, FormatVariant] = OrderedDict()


def form_of(func: tirx.PrimFunc, target: Any, template: Template | None = None) -> FormatVariant:
    """Return the form of a program; the same one for every search of this process that has no template."""
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
    """Return a candidate's choices as `sparsetir.build` takes them."""
    if isinstance(choices, Choices):
        return choices
    if template is None:
        raise TuningError(f"values of knobs, {choices}, mean nothing without their template")
    return template.with_values(**choices)


__all__ = [
    "Code",
    "FormatVariant",
    "Function",
    "Together",
    "compile_together",
    "form_of",
    "fresh",
    "unchecked",
    "with_knobs",
]
