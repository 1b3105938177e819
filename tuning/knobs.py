# SPDX-License-Identifier: Apache-2.0
"""Knobs of user schedules, and `template`."""

from __future__ import annotations

import importlib
import inspect
import math
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral, Real
from types import FunctionType
from typing import Any, TypeAlias

from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import LoopRV

from sparsetir.errors import ArgumentError, ArgumentTypeError, ScheduleError, SparseTIRError
from sparsetir.sparse_output import Accumulators
from sparsetir.utils.arguments import shown as shown_value
from sparsetir.utils.caches import cached_property

# Knobs of a user-written schedule: the candidates of each, and the chosen values.


Value: TypeAlias = "int | float | str | tuple[Any, ...] | None"

SHOWN = 6  # candidates in a message


@dataclass(frozen=True)
class Config:
    """Values of knobs: what a search chooses of a template, as `Choices` are of the sketches.

    Parameters
    ----------
    pairs : tuple of (str, value)
        Sorted by name; `of` makes them.

    Examples
    --------
    >>> config = Config.of({"unroll": 2, "tile": [4, 32]})
    >>> print(config)
    tile=(4, 32) unroll=2
    >>> config["tile"], dict(**config.changed(unroll=4))
    ((4, 32), {'tile': (4, 32), 'unroll': 4})
    """

    pairs: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Return the values of a mapping; lists, which JSON makes of tuples, become tuples."""
        return cls(tuple((name, plain(values[name])) for name in sorted(values)))

    def as_dict(self) -> dict[str, Any]:
        """Return names and values, for records."""
        return dict(self.pairs)

    def changed(self, /, **values: Any) -> Config:
        """Return a copy with other values for some knobs, or values for more."""
        return Config.of({**self.as_dict(), **values})

    def keys(self) -> list[str]:
        """Return the names, so that ``**config`` passes the values."""
        return [name for name, _ in self.pairs]

    def __getitem__(self, name: str) -> Value:
        return self.as_dict()[name]

    def __str__(self) -> str:
        return " ".join(f"{name}={value!r}" for name, value in self.pairs)


class AccumulatorKnobs:
    """The knobs of `Accumulators`: turns values into a schedule, as a template does."""

    def __repr__(self) -> str:
        return "accumulators of computed patterns"

    def with_values(self, **values: Any) -> Accumulators:
        """Return the schedule with these values."""
        return Accumulators(**values)


class LoopSplit(tuple[Any, ...]):
    """Steps of each loop that one loop is split into, the outermost first; None is as many as it takes.

    Examples
    --------
    >>> LoopSplit((4, 32))[-1]
    32
    """

    __slots__ = ()

    def apply(self, sch: s_tir.Schedule, loop: Any) -> list[Any]:
        """Split a loop.

        args: the schedule, a loop with as many steps as the factors make.
        rewrite: ``for k in range(128)`` becomes ``for k_0, k_1 in T.grid(4, 32)``.
        """
        check_factors(str(sch.get(loop).loop_var.name), self, extent_of(sch, loop))
        return list(sch.split(loop, list(self)))


class Knobs:
    """The first argument of a template: defines its knobs, and gives a value for each.

    Every knob is to be defined whatever the values of the others are: a search has seen them all at the first run.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The second argument.
    given : mapping of str to value
        What was chosen. A knob without a value has its first candidate.
    """

    def __init__(self, sch: s_tir.Schedule, values: Mapping[str, Value]) -> None:
        self.sch, self.given = sch, values
        self.space: dict[str, tuple[Value, ...]] = {}
        self.chosen: dict[str, Any] = {}

    def define_knob(self, name: str, candidates: Iterable[Any]) -> Any:
        """Define a knob: a choice among values.

        Parameters
        ----------
        name : str
        candidates : iterable
            Numbers, texts, None, or tuples of those; the first is taken where nothing is chosen.

        Returns
        -------
        value
            The same as ``cfg[name]``.

        Raises
        ------
        ScheduleError
            The value that was chosen is none of these, or a knob of this name has other candidates.
        """
        options = _listed(name, candidates)
        value = self.given.get(name, options[0])
        if value not in options:
            raise ScheduleError(f"knob {name!r} is one of {shown(options)}, got {shown_value(value)}")
        return self._define(name, options, value)

    def define_split(
        self,
        name: str,
        loop: Any,
        *,
        num_outputs: int = 2,
        policy: str = "factors",
        max_factor: int | None = None,
        candidates: Iterable[Sequence[int | None]] | None = None,
    ) -> LoopSplit:
        """Define a knob: a choice among the ways to split a loop.

        Parameters
        ----------
        name : str
        loop : LoopRV or int
            The loop, or its number of steps.
        num_outputs : int
            How many loops are made of it.
        policy : {"factors", "power2"}
            Every way to write the number of steps as a product, or inner loops of powers of two below an outermost
            one with as many steps as it takes, the last of them guarded where they do not divide.
        max_factor : int, optional
            The most steps of any loop but the outermost. Needed for powers of two where the number of steps is known
            only when the kernel is called.
        candidates : iterable of tuple, optional
            Used instead: the steps of each loop, one of them None for as many as it takes.

        Returns
        -------
        LoopSplit
            The same as ``cfg[name]``; its ``apply(sch, loop)`` gives the loops. By default the outermost loop has all
            the steps.

        Raises
        ------
        ScheduleError
            The number of steps is not known and the policy needs it, a candidate or what was chosen does not make as
            many steps, or a knob of this name has other candidates.
        """
        if num_outputs < 2:
            raise ArgumentError(f"split {name!r} makes at least 2 loops, got num_outputs={num_outputs!r}")
        extent = extent_of(self.sch, loop)
        if candidates is not None:
            options = _listed(name, candidates)
        elif isinstance(extent, str) and policy == "factors" and name in self.given:
            options = (self.given[name],)
        else:
            options = tuple(_splits(name, extent, num_outputs, policy, max_factor))
        value: Any = self.given.get(name, options[0])
        for factors in (*(options if candidates is not None else ()), value):
            _check_length(name, factors, num_outputs)
            check_factors(name, factors, extent)
        return self._define(name, options, LoopSplit(value))

    def __getitem__(self, name: str) -> Any:
        if name not in self.chosen:
            there = f"there are {', '.join(self.chosen)}" if self.chosen else "there is none yet"
            raise ScheduleError(f"no knob {name!r} is defined; {there}")
        return self.chosen[name]

    def _define(self, name: str, options: tuple[Value, ...], value: Any) -> Any:
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(f"a knob's name is an identifier such as tile_k, got {shown_value(name)}")
        before = self.space.get(name, options)
        if before != options:
            raise ScheduleError(f"knob {name!r} is defined twice, as one of {shown(before)} and of {shown(options)}")
        self.space[name], self.chosen[name] = options, value
        return value


# ------------------------------------------------------------------------------------------ values


def plain(value: Any) -> Value:
    """Return a value as records keep it."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, Integral):  # numpy's, and those below
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        return tuple(plain(part) for part in value)
    expected = "a number, a text, None or a tuple of those, which records can keep"
    raise ArgumentTypeError(f"a knob's value is {expected}, got {type(value).__name__}")


def shown(values: Sequence[Value]) -> str:
    """Return some of the values, for a message."""
    return ", ".join([*map(repr, values[:SHOWN]), *(["..."] if len(values) > SHOWN else [])])


def _listed(name: str, candidates: Any) -> tuple[Value, ...]:
    """Return candidates without repetition, at least one."""
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise ArgumentTypeError(f"knob {name!r} needs a list of values, got {shown_value(candidates)}")
    values = tuple(dict.fromkeys(plain(value) for value in candidates))
    if not values:
        raise ArgumentError(f"knob {name!r} needs at least one value")
    return values


# ------------------------------------------------------------------------------------------ splits


def extent_of(sch: s_tir.Schedule, loop: Any) -> int | str:
    """Return a loop's number of steps; the expression as text where it is known only when the kernel is called."""
    if isinstance(loop, Integral):
        return int(loop)
    if not isinstance(loop, LoopRV):
        expected = "a loop as sch.get_loops gives it, or a number of steps"
        raise ArgumentTypeError(f"what is split is {expected}, got {type(loop).__name__}")
    extent = sch.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else str(extent)


def _check_length(name: str, factors: Any, parts: int) -> None:
    """Raise unless these are the steps of that many loops, at most one of them left open."""
    fits = isinstance(factors, tuple) and len(factors) == parts and factors.count(None) <= 1
    if not fits or not all(part is None or (isinstance(part, int) and part >= 1) for part in factors):
        expected = f"positive numbers of steps of {parts} loops, one of them None for as many as it takes"
        raise ScheduleError(f"split {name!r} is {expected}, got {shown_value(factors)}")


def check_factors(name: str, factors: Any, extent: int | str) -> None:
    """Raise unless the factors make the steps of a loop."""
    if None in factors:
        return
    product = math.prod(factors)
    if isinstance(extent, str):
        unknown = f"the loop has {extent} steps, which is known only when the kernel is called"
        raise ScheduleError(f"split {name!r} is {tuple(factors)}, but {unknown}: one of them must be None")
    if product != extent:
        raise ScheduleError(f"split {name!r} is {tuple(factors)}, which makes {product} steps; the loop has {extent}")


def _splits(name: str, extent: int | str, parts: int, policy: str, most: int | None) -> Iterator[tuple[Value, ...]]:
    """Return the candidates of a policy."""
    if policy not in ("factors", "power2"):
        raise ArgumentError(f"expected one of the policies factors, power2, got {shown_value(policy)}")
    if most is not None and most < 1:
        raise ArgumentError(f"max_factor: expected a positive number, got {shown_value(most)}")
    if isinstance(extent, str) and (policy == "factors" or most is None):
        unknown = f"the loop of split {name!r} has {extent} steps, which is known only when the kernel is called"
        alternatives = "policy='power2' with max_factor, candidates such as [(None, 32)]"
        raise ScheduleError(f"{unknown}; try {alternatives}, or a program with that size filled in")
    if extent == 0:
        raise ScheduleError(f"split {name!r} is of a loop with no steps")
    if isinstance(extent, int) and policy == "factors":
        return factorisations(extent, parts, most)
    return powers(None if isinstance(extent, str) else extent, parts, most)


def factorisations(extent: int, parts: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield every factorisation of a number, all but the first factor at most `most`; the last grows slowest."""
    if parts == 1:
        yield (extent,)
        return
    for inner in divisors(extent):
        if most is None or inner <= most:
            yield from ((*outer, inner) for outer in factorisations(extent // inner, parts - 1, most))


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def powers(extent: int | None, parts: int, most: int | None) -> Iterator[tuple[int | None, ...]]:
    """Yield powers of two for all but the first factor; their product is at most the extent where that is known."""
    limit = min(n for n in (extent, most) if n is not None)
    sizes = [2**n for n in range(limit.bit_length())]
    for inner in product(sizes, repeat=parts - 1):
        if extent is None or math.prod(inner) <= extent:
            yield (None, *inner)


# `template`: a function that schedules stage II, with knobs for a search to turn.


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
        """Return the template with some knobs decided, for `sparsetir.build` or for a search of the others.

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
        """Return the candidates of each knob that is left to choose.

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
        return {
            name: options
            for name, options in knobs.space.items()
            if name not in self.values.keys() and len(options) > 1
        }

    def _applied(self, sch: s_tir.Schedule) -> tuple[Knobs, s_tir.Schedule]:
        knobs = Knobs(sch, self.values.as_dict())
        try:
            schedule = self.function(knobs, sch)
        except ScheduleError as error:
            unknown = [name for name in self.values.keys() if name not in knobs.space]
            if not unknown:
                raise
            raise ScheduleError(f"{error}; the value for {unknown[0]!r} is of no knob defined so far") from error
        if schedule is not None and not isinstance(schedule, s_tir.Schedule):
            expected = "changes the schedule it is given and returns a schedule or nothing"
            raise ScheduleError(f"{self!r} {expected}, got {type(schedule).__name__}")
        unknown = [name for name in self.values.keys() if name not in knobs.space]
        if unknown:
            there = ", ".join(knobs.space) or "none"
            raise ScheduleError(f"template {self.name} has the knobs {there}, got a value for {unknown[0]!r}")
        return knobs, sch if schedule is None else schedule

    @cached_property
    def text(self) -> str:
        """The identity of the template in records.

        Source text, with that of the functions it names and the values of the variables it names. A function without
        source text, as typed at a prompt, is like no other: its records are not found again by another process.
        """
        try:
            texts = _sources(self.function)
        except (OSError, TypeError, ValueError):
            texts = [uuid.uuid4().hex]
        return "\n".join([*texts, str(self.values)])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as functions are pickled; what a decorator named is this object, not the function."""
        module = str(getattr(self.function, "__module__", ""))
        name = str(getattr(self.function, "__qualname__", ""))
        try:
            is_found = _named(module, name).function is self.function
        except (ImportError, AttributeError, ValueError):
            is_found = False
        if not is_found:
            fault = f"{self!r} is pickled by its name, but is not found as {module}.{name}"
            raise pickle.PicklingError(fault)
        return _loaded, (module, name, self.values)


def _named(module: str, name: str) -> Any:
    """Return an attribute of a module by its name, which may have dots."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _loaded(module: str, name: str, values: Config) -> Template:
    return Template(_named(module, name).function, values)


def _sources(function: Any) -> list[str]:
    """Return texts of a function, of the functions it names, and of the constants it names."""
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
        raise ArgumentTypeError(f"a template is a function of cfg and sch, got {type(function).__name__}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        description = f"{getattr(function, '__name__', function)}{inspect.signature(function)}"
        raise ArgumentTypeError(f"a template is a function of cfg and sch, got {description}") from None
    except ValueError:  # written in C: there is no signature to look at
        pass
    return Template(function)


__all__ = ["Config", "Knobs", "LoopSplit", "Template", "Value", "template"]
