# SPDX-License-Identifier: Apache-2.0
"""The stage-I schedule: primitives that change a program but not its meaning, and their trace as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tvm import ir, s_tir, tirx

from sparsetir.codegen.pipeline import to_stage_2
from sparsetir.errors import ScheduleError, SparseTIRError
from sparsetir.ir.verifier import verify
from sparsetir.ir.views import label
from sparsetir.lower import as_module
from sparsetir.script.printer import script
from sparsetir.transform.editing import Edit, Editor
from sparsetir.transform.primitives import (
    annotate,
    fuse_iterations,
    pad,
    set_search,
    sparse_fuse,
    sparse_reorder,
    to_dense,
)
from sparsetir.transform.split import sparse_split, split_init, split_iteration


def decompose(func: Any, formats: Mapping[str, Any]) -> Edit:
    """Store sparse buffers in other formats; see `sparsetir.transform.decompose.decompose_format`.

    args:
        func: the program, or a decomposition of one, whose pieces are buffers like any other
        formats: the format of each buffer by name

    rewrite:
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            C[i, k] = C[i, k] + A[i, j] * B[j, k]
        ->
        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm_blocks") as [io, jo, ii, ji, k]:
            C[io * 4 + ii, k] = C[io * 4 + ii, k] + A_blocks[io, jo, ii, ji] * B[jo * 4 + ji, k]
    """
    from sparsetir.transform.decompose import decompose_format

    decomposition = decompose_format(func, formats)
    return Edit(decomposition.func, decomposition)


PRIMITIVES: dict[str, Callable[..., Edit]] = {
    primitive.__name__: primitive
    for primitive in (
        sparse_reorder,
        sparse_fuse,
        sparse_split,
        split_init,
        annotate,
        set_search,
        to_dense,
        pad,
        fuse_iterations,
        split_iteration,
        decompose,
    )
}


@dataclass(frozen=True)
class Step:
    """One primitive with its arguments.

    Attributes
    ----------
    primitive : str
        A key of `PRIMITIVES`.
    arguments : list
        What follows the function, in order: strings, numbers, and lists and dicts of them, or formats.
    options : dict of str to Any
        Arguments given by name.
    """

    primitive: str
    arguments: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, func: Any) -> Edit:
        """Apply the step and verify the new function."""
        edit = PRIMITIVES[self.primitive](func, *self.arguments, **self.options)
        verify(edit.func)
        return edit

    def __str__(self) -> str:
        texts = [_shown(a) for a in self.arguments] + [f"{k}={_shown(v)}" for k, v in self.options.items()]
        return f"sch.{self.primitive}({', '.join(texts)})"


@dataclass(frozen=True)
class Trace:
    """The steps of a schedule, in order.

    ``str(trace)`` is Python that makes the same changes to a schedule called ``sch``.

    Examples
    --------
    >>> import sparsetir
    >>> sch = sparsetir.Schedule(sparsetir.ops.spmm())
    >>> sch.sparse_reorder("spmm", ["K", "I", "J"])
    >>> print(sch.trace)
    sch.sparse_reorder("spmm", ["K", "I", "J"])
    >>> again = type(sch.trace).from_json(sch.trace.to_json())
    >>> sparsetir.script(again.apply(sparsetir.ops.spmm())) == sch.script()
    True
    """

    steps: tuple[Step, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps)

    def apply(self, func: Any) -> Any:
        """Replay the steps.

        Parameters
        ----------
        func : PrimFunc or IRModule with one PrimFunc
            A stage-I program whose iterations and axes have the names of the one that was scheduled.

        Returns
        -------
        PrimFunc or IRModule
            What was given, changed.

        Raises
        ------
        ScheduleError
            A step is not legal for this function.
        """
        sch = Scheduled(func)
        for step in self.steps:
            try:
                sch.take(step)
            except SparseTIRError:
                raise
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                shown = str(step)[:200]
                raise ScheduleError(f"the arguments of the step {shown} are none of its primitive: {error}") from error
        return sch.mod if isinstance(func, ir.IRModule) else sch.func

    # ------------------------------------------------------------------ JSON

    def to_json(self) -> str:
        """Return the steps as JSON text, on one line.

        Raises
        ------
        ScheduleError
            A step holds a format that cannot be made again by name.
        """
        return json.dumps([[s.primitive, _encoded(s.arguments), _encoded(s.options)] for s in self.steps])

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Return the trace that `to_json` wrote.

        Raises
        ------
        ScheduleError
            The text is none that `to_json` writes, or names a primitive that does not exist.
        """
        try:
            steps = [Step(str(name), list(arguments), dict(options)) for name, arguments, options in json.loads(text)]
        except (TypeError, ValueError, RecursionError) as error:
            raise ScheduleError(f"expected a trace as to_json writes it, got: {error}") from None
        for step in steps:
            if step.primitive not in PRIMITIVES:
                names = ", ".join(PRIMITIVES)
                raise ScheduleError(f"there is no primitive {step.primitive!r}; there are {names}")
        try:
            return cls(tuple(Step(s.primitive, _decoded(s.arguments), _decoded(s.options)) for s in steps))
        except SparseTIRError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ScheduleError(f"expected formats as to_json writes them, got: {error}") from error


# ---------------------------------------------------------------------------------------------- programs

Own = TypeVar("Own", bound="Scheduled")


class Scheduled:
    """A program and the steps that led to it.

    Parameters
    ----------
    func : PrimFunc or IRModule with one PrimFunc
        The program before the first step; it is not changed.
    """

    def __init__(self, func: tirx.PrimFunc | ir.IRModule) -> None:
        self._mod = as_module(func)
        functions = [gv for gv, f in self._mod.functions.items() if isinstance(f, tirx.PrimFunc)]
        if len(functions) != 1:
            names = ", ".join(gv.name_hint for gv in functions)
            raise ScheduleError(f"a schedule is of one PrimFunc, got {len(functions)} ({names}); pass mod['name']")
        self._name = functions[0]
        self.func: tirx.PrimFunc = func if isinstance(func, tirx.PrimFunc) else self._mod[functions[0]]
        self.trace = Trace()
        self._decomposed: tuple[Any, int] | None = None  # a Decomposition, and how many steps led to it

    @property
    def mod(self) -> ir.IRModule:
        """A module with the program, and the other functions of the module that was given."""
        name = str(self._name.name_hint)
        functions = dict(self._mod.functions.items())
        functions[self._name] = self.func.with_attr("global_symbol", name)
        return ir.IRModule(functions, attrs=self._mod.attrs)

    def copy(self: Own) -> Own:
        """Copy the schedule; later steps of either do not affect the other."""
        copy = type(self)(self._mod)
        copy.func, copy.trace, copy._decomposed = self.func, self.trace, self._decomposed
        return copy

    @property
    def decomposition(self) -> Any:
        """The decomposition this program comes from, with the steps since; None if there was none.

        It tells how the parameters come from those of the program before: ``sparsetir.build(sch)`` makes a kernel that
        is called like that one.
        """
        if self._decomposed is None:
            return None
        return replace(self._decomposed[0], func=self.func)

    def take(self, step: Step) -> Any:
        """Apply one step, add it to the trace and return the result of its primitive."""
        is_decomposing = step.primitive == "decompose"
        edit = step.run(self._to_decompose() if is_decomposing else self.func)
        self.func = edit.func
        self.trace = Trace((*self.trace.steps, step))
        if is_decomposing:
            self._decomposed = (edit.result, len(self.trace))
        return edit.result

    def _to_decompose(self) -> Any:
        """Return the program, or the decomposition it is: its pieces can be decomposed again."""
        if self._decomposed is None:
            return self.func
        decomposition, count = self._decomposed
        if count != len(self.trace):
            raise ScheduleError(
                "this program was decomposed and changed since; decompose its pieces before other steps"
            )
        return decomposition


# ---------------------------------------------------------------------------------------------- values


def plain(value: Any) -> Any:
    """Convert an argument to its stored form: tuples to lists, mappings to dicts."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _is_format(value: Any) -> bool:
    return hasattr(value, "parameters") and hasattr(value, "rules")


def _shown(value: Any) -> str:
    """Format a value as Python."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(k)}: {_shown(v)}' for k, v in value.items())}}}"
    if _is_format(value):
        parameters = "".join(f", {k}={_shown(plain(v))}" for k, v in value.parameters.items())
        return f'sparsetir.formats.make("{value.name}"{parameters})'
    return repr(value)


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_encoded(v) for v in value]
    if isinstance(value, dict):
        return {k: _encoded(v) for k, v in value.items()}
    if not _is_format(value):
        return _jsonable(value, value)
    from sparsetir.formats import REGISTRY

    if value.name not in REGISTRY:
        raise ScheduleError(
            f"format {value!r} cannot be written as JSON: no registered format is called {value.name!r}"
        )
    return {"format": value.name, "parameters": _jsonable(plain(value.parameters), value)}


def _jsonable(value: Any, whole: Any) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        raise ScheduleError(
            f"{whole!r} cannot be written as JSON: it is made of more than numbers and strings"
        ) from None
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(v) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"format", "parameters"}:
        from sparsetir.formats import make

        return make(value["format"], **value["parameters"])
    return {k: _decoded(v) for k, v in value.items()}


# -------------------------------------------------------------------------------------------- schedule


class Schedule(Scheduled):
    """Changes of a stage-I program, one primitive at a time.

    An iteration is known by its name, an entry of its list by the name of its axis: ``"I"``. A fused entry is a
    list of names, ``["I", "J"]``, or its text, ``"T.fuse(I, J)"``. The names stay valid while the program changes.
    A primitive that is not legal raises `ScheduleError` with the reason and leaves the schedule as it was. After each
    step the program is verified.

    Parameters
    ----------
    func : PrimFunc or IRModule with one PrimFunc
        The program; it is not changed.

    Attributes
    ----------
    func : PrimFunc
        The program as it is now.
    trace : Trace
        The steps so far.

    Examples
    --------
    >>> import sparsetir
    >>> sch = sparsetir.Schedule(sparsetir.ops.spmm())
    >>> sch.sparse_split("spmm", "K", 8)
    ['K_o', 'K_i']
    >>> sch.sparse_reorder("spmm", ["K_o", "I", "J", "K_i"])
    >>> sch.get_axes("spmm")
    ['K_o', 'I', 'J', 'K_i']
    >>> kernel = sparsetir.build(sch)
    """

    # ------------------------------------------------------------------ the program

    def script(self) -> str:
        """Return the program as text."""
        return script(self.func)

    def lower(self) -> s_tir.Schedule:
        """Lower the program to a stock TVM schedule at stage II: loops over positions."""
        mod = to_stage_2(self.mod[self._name])
        sch = s_tir.Schedule(mod)
        sch.work_on(next(iter(mod.functions)).name_hint)
        return sch

    def __repr__(self) -> str:
        names = ", ".join(p.iteration.name for p in Editor(self.func).facts.places)
        return f"Schedule of {self._name.name_hint} ({names}) after {len(self.trace)} steps"

    # ------------------------------------------------------------------ steps

    def _do(self, primitive: str, *arguments: Any, **options: Any) -> Any:
        set_options = {k: plain(v) for k, v in options.items() if v is not None and v is not False}
        return self.take(Step(primitive, plain(arguments), set_options))

    # ------------------------------------------------------------------ names

    def get_sp_iter(self, name: str) -> str:
        """Return the name of an iteration after checking that it exists.

        Raises
        ------
        ScheduleError
            No iteration, or more than one, has the name.
        """
        return Editor(self.func).iteration(name, merged=True).name

    @property
    def sp_iters(self) -> list[str]:
        """The names of all iterations in the order of the text."""
        return [p.iteration.name for p in Editor(self.func).facts.places]

    def get_axes(self, iteration: str) -> list[str]:
        """Return the entries of an iteration's list as they stand in the text."""
        return [label(e) for e in Editor(self.func).iteration(iteration, merged=True).entries]

    # ------------------------------------------------------------------ primitives

    def sparse_reorder(self, iteration: str, order: Sequence[Any]) -> None:
        """Reorder the axes of an iteration; see `sparsetir.transform.primitives.sparse_reorder`."""
        self._do("sparse_reorder", iteration, order)

    def sparse_fuse(self, iteration: str, axes: Sequence[Any]) -> None:
        """Make one loop of a chain of axes; see `sparsetir.transform.primitives.sparse_fuse`."""
        self._do("sparse_fuse", iteration, axes)

    def sparse_split(self, iteration: str, axis: Any, factor: int) -> list[str]:
        """Split an axis into groups and places in a group; see `sparsetir.transform.split.sparse_split`."""
        return self._do("sparse_split", iteration, axis, factor)

    def split_init(self, iteration: str) -> str:
        """Make an iteration of ``T.init()``; see `sparsetir.transform.split.split_init`."""
        return self._do("split_init", iteration)

    def annotate(self, iteration: str, key: str, value: Any) -> None:
        """Set an annotation of an iteration; see `sparsetir.transform.primitives.annotate`."""
        self.take(Step("annotate", [iteration, key, plain(value)]))

    def set_search(self, iteration: str, strategy: str) -> None:
        """Choose how coordinates are looked up; see `sparsetir.transform.primitives.set_search`."""
        self._do("set_search", iteration, strategy)

    def to_dense(self, iteration: str, axis: Any, *, guard: bool = False) -> str:
        """Iterate all coordinates of a sparse axis; see `sparsetir.transform.primitives.to_dense`."""
        return self._do("to_dense", iteration, axis, guard=guard)

    def pad(self, iteration: str, axis: Any, multiple: int) -> str:
        """Round the extent of a dense loop up; see `sparsetir.transform.primitives.pad`."""
        return self._do("pad", iteration, axis, multiple)

    def fuse_iterations(self, first: str, second: str, *, depth: int | None = None, name: str | None = None) -> str:
        """Run two neighbours together; see `sparsetir.transform.primitives.fuse_iterations`."""
        return self._do("fuse_iterations", first, second, depth=depth, name=name)

    def split_iteration(self, iteration: str, *, at: int | None = None) -> list[str]:
        """Run the statements of a body apart; see `sparsetir.transform.split.split_iteration`."""
        return self._do("split_iteration", iteration, at=at)

    def decompose(self, formats: Mapping[str, Any]) -> Any:
        """Store sparse buffers in other formats, by buffer name; see `sparsetir.decompose_format`."""
        return self._do("decompose", formats)


__all__ = ["PRIMITIVES", "Schedule", "Scheduled", "Step", "Trace"]
