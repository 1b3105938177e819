# SPDX-License-Identifier: Apache-2.0
"""`template`: a function that schedules stage II, with knobs for a search to turn."""

from __future__ import annotations

import importlib
import inspect
import pickle
import uuid
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any, TypeAlias

from tvm import ir, s_tir, tirx

from sparsetir.errors import ArgumentTypeError, ScheduleError, SparseTIRError
from sparsetir.tuning.knobs import Config, Knobs, Value

Function: TypeAlias = "Callable[[Knobs, s_tir.Schedule], s_tir.Schedule | None]"


class Template:
    """A schedule with knobs, see `template`. Called with a schedule it applies the values it has.

    Parameters
    ----------
    function : callable
        Defines knobs and changes a schedule.
    values : Config
        Of the knobs that are decided; the others have their first candidates, or are searched.
    """

    def __init__(self, function: Function, values: Config | None = None) -> None:
        self.function, self.values = function, values or Config()
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"template {self.name} with {self.values}" if self.values.pairs else f"template {self.name}"

    def with_values(self, /, **values: Any) -> Template:
        """The template with some knobs decided, for `sparsetir.build` or for a search of the others.

        Parameters
        ----------
        **values
            By the names of the knobs; a split has the steps of each loop, the outermost first.
        """
        return Template(self.function, self.values.changed(**values))

    def __call__(self, sch: s_tir.Schedule) -> s_tir.Schedule:
        """Schedule with the values that were decided, and the first candidates of the other knobs.

        Raises
        ------
        ScheduleError
            A value does not fit its knob, no knob has its name, or the function returns something else.
        """
        return self._applied(sch)[1]

    def space(self, mod: ir.IRModule | tirx.PrimFunc) -> dict[str, tuple[Value, ...]]:
        """The candidates of each knob that is left to choose.

        Parameters
        ----------
        mod : IRModule or PrimFunc
            Lowered to stage II.

        Raises
        ------
        SparseTIRError
            The template does not fit the module.
        """
        sch = s_tir.Schedule(mod)
        if isinstance(mod, ir.IRModule):
            sch.work_on(next(gv.name_hint for gv in mod.functions))
        try:
            knobs, _ = self._applied(sch)
        except SparseTIRError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise ScheduleError(f"{type(error).__name__}: {lines[-1]}") from error
        return {name: found for name, found in knobs.space.items() if name not in self.values.keys() and len(found) > 1}

    def _applied(self, sch: s_tir.Schedule) -> tuple[Knobs, s_tir.Schedule]:
        knobs = Knobs(sch, self.values.as_dict())
        try:
            found = self.function(knobs, sch)
        except ScheduleError as error:
            unknown = [name for name in self.values.keys() if name not in knobs.space]
            if not unknown:
                raise
            raise ScheduleError(f"{error}; the value for {unknown[0]!r} is of no knob defined so far") from error
        if found is not None and not isinstance(found, s_tir.Schedule):
            expected = "changes the schedule it is given and returns a schedule or nothing"
            raise ScheduleError(f"{self!r} {expected}; found {type(found).__name__}")
        unknown = [name for name in self.values.keys() if name not in knobs.space]
        if unknown:
            there = ", ".join(knobs.space) or "none"
            raise ScheduleError(f"template {self.name} has the knobs {there}; found a value for {unknown[0]!r}")
        return knobs, sch if found is None else found

    @cached_property
    def text(self) -> str:
        """What tells it from other templates in records.

        Source text, with that of the functions it names and the values of the variables it names. A function without
        source text, as typed at a prompt, is like no other: its records are not found again by another process.
        """
        try:
            texts = _sources(self.function)
        except (OSError, TypeError, ValueError):
            texts = [uuid.uuid4().hex]
        return "\n".join([*texts, str(self.values)])

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, as functions are pickled; what a decorator named is this object, not the function."""
        module = str(getattr(self.function, "__module__", ""))
        name = str(getattr(self.function, "__qualname__", ""))
        try:
            is_found = _named(module, name).function is self.function
        except (ImportError, AttributeError, ValueError):
            is_found = False
        if not is_found:
            found = f"{self!r} is pickled by its name, but is not found as {module}.{name}"
            raise pickle.PicklingError(found)
        return _loaded, (module, name, self.values)


def _named(module: str, name: str) -> Any:
    """What a module has by a name, which may have dots."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _loaded(module: str, name: str, values: Config) -> Template:
    return Template(_named(module, name).function, values)


def _sources(function: Any) -> list[str]:
    """Texts of a function, of the functions it names, and of the constants it names."""
    texts, used = [inspect.getsource(function)], inspect.getclosurevars(function)
    for name, value in sorted({**used.globals, **used.nonlocals}.items()):
        if isinstance(value, (int, float, str, tuple)):
            texts.append(f"{name} = {value!r}")
        elif isinstance(value, FunctionType) and value is not function:
            texts.append(inspect.getsource(value))
    return texts


def template(function: Function) -> Template:
    """Let a search turn the knobs of a schedule that you write.

    Parameters
    ----------
    function : callable
        Of `cfg` and `sch`, a `tvm.s_tir.Schedule` of the program at stage II. It defines knobs with
        ``cfg.define_split`` and ``cfg.define_knob``, asks for their values with ``cfg["name"]``, and changes `sch`. It
        must do the same each time, but for the values, and define every knob whatever the values of the others are.

    Returns
    -------
    Template
        For ``sparsetir.tune_sparse(..., schedule=...)``, which searches the knobs, and, perhaps after `with_values`,
        for ``sparsetir.build(..., schedule=...)``.

    Raises
    ------
    ArgumentTypeError
        It is no function of two arguments.

    Examples
    --------
    >>> import sparsetir
    >>> @sparsetir.template
    ... def lanes(cfg, sch):
    ...     j, k = sch.get_loops(sch.get_sblock("spmm"))
    ...     cfg.define_split("tile", k, policy="power2", max_factor=16)
    ...     outer, inner = cfg["tile"].apply(sch, k)
    ...     sch.reorder(outer, j, inner)
    ...     sch.vectorize(inner)
    >>> lanes.space(sparsetir.lower(sparsetir.ops.spmm(), stage=2))
    {'tile': ((None, 1), (None, 2), (None, 4), (None, 8), (None, 16))}
    >>> kernel = sparsetir.build(sparsetir.ops.spmm(), schedule=lanes.with_values(tile=(None, 8)))
    >>> "T.vectorized(8)" in kernel.script(stage=3)
    True
    """
    if not callable(function) or isinstance(function, Template):
        raise ArgumentTypeError(f"a template is a function of cfg and sch; found {type(function).__name__}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        found = f"{getattr(function, '__name__', function)}{inspect.signature(function)}"
        raise ArgumentTypeError(f"a template is a function of cfg and sch; found {found}") from None
    except ValueError:  # written in C: there is no signature to look at
        pass
    return Template(function)


__all__ = ["Template", "template"]
