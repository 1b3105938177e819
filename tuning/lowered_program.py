# SPDX-License-Identifier: Apache-2.0
"""A program as its candidates are compiled: lowered to stage II once, machine code shared in memory and on disk.

A program depends on the matrix only by its types, so that the searches of a process share lowered programs: machine
code for one matrix serves all others.

On disk, `sparsetir warm` stores a library for each format. A search stores a library for each call of the compiler, and
a list of its kernels for each format. These files are part of the cache of compiled kernels and follow its rules: see
`sparsetir.codegen.cache`.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import tvm
from tvm import ir, tirx

from sparsetir.codegen import cache
from sparsetir.codegen.cache import cache_folder, content_key
from sparsetir.codegen.pipeline import lowered, machine_code, scheduled, to_stage_2, to_stage_3
from sparsetir.codegen.target import make_target
from sparsetir.errors import ScheduleError, TuningError
from sparsetir.formats.format import Format
from sparsetir.lower.annotations import with_late_choices
from sparsetir.schedules import Choices
from sparsetir.tuning.knobs import Config, Template
from sparsetir.tuning.space import Values, open_choices, shared
from sparsetir.utils.caches import Cache, cached_property
from sparsetir.utils.packages import source_digest
from sparsetir.utils.threads import get_num_threads

MOST_FORMS = 64  # lowered programs that a process keeps, the last ones used
MOST_FRESH = 256  # calls of the compiler whose machine code is not yet on disk

Function = Callable[..., Any]
Loops: TypeAlias = tuple[ir.IRModule, tuple[str, ...]]  # at stage III, and the choices that are arguments of a call


@dataclass(frozen=True, eq=False)
class CompiledBatch:
    """Machine code that one call of the compiler made.

    Parameters
    ----------
    library : object
    kernels : sequence of (str, LoweredProgram, Choices, tuple of str)
        Name of a function, whose it is, and the choices that its calls give.
    """

    library: Any
    kernels: Sequence[tuple[str, LoweredProgram, Choices, tuple[str, ...]]]


fresh: deque[CompiledBatch] = deque(
    maxlen=MOST_FRESH
)  # machine code that is not on disk, see `sparsetir.tuning.lowered_program.keep`
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=fresh.clear)  # the parent process writes it


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


class LoweredProgram:
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
        self.codes: dict[Choices, Code | None] = {}  # by shared choices; None where they cannot be compiled
        self._open: dict[int | None, Values] = {}
        self.is_filled = False
        self.proved: set[Choices] = set()  # shared choices whose results were verified

    def prove(self, choices: Choices | Config) -> None:
        """Record that the results of a candidate were right."""
        if isinstance(choices, Choices):
            self.proved.add(shared(choices))

    def fill(self, codes: Mapping[Choices, Code], feat: int | None, values: Values) -> None:
        """Adopt machine code and open choices of an earlier search where there are none yet."""
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
        """Return the code that a candidate shares with others; None where it needs its own."""
        key = shared(choices)
        if key not in self.codes:
            compile_together([(self, key)])
        return self.codes[key]

    def shared_loops(self, choices: Choices) -> Loops | None:
        """Return loops that take the late choices, and which; None where the schedule must be cut down to have any."""
        try:
            second, late = with_late_choices(scheduled(self.second, choices, self.target))
            return to_stage_3(second), late
        except Exception:  # `lowered` reports the error, or uses another schedule
            return None


def unchecked(third: ir.IRModule, target: Any) -> Any:
    """Compile a stage-III module without the checks of its arguments."""
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
        return machine_code(third, target)


def compile_together(variants: Iterable[tuple[LoweredProgram, Choices]]) -> None:
    """Give forms the machine code of candidates, made by one call of the compiler for each target.

    What begins and ends a call takes a fifth of the time of a small kernel.

    Raises
    ------
    Exception
        Of TVM or LLVM, where no code can be made of some: none is there then. One by one they tell which it is.
    """
    groups: dict[str, dict[tuple[LoweredProgram, Choices], Loops]] = {}
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


def _compile_group(group: Mapping[tuple[LoweredProgram, Choices], Loops]) -> None:
    """Compile candidates together for forms of one target whose loops are known."""
    (first, _), *_ = group
    entries = [(f"{form.name}_{n}", form, key, *loops) for n, ((form, key), loops) in enumerate(group.items())]
    functions = {name: third[form.name].with_attr("global_symbol", name) for name, form, _, third, _ in entries}
    library = unchecked(ir.IRModule(functions), first.target)
    for name, form, key, _, late in entries:
        form.codes[key] = Code(library[name], late)
    if cache_folder() is not None:
        fresh.append(CompiledBatch(library, [(name, form, key, late) for name, form, key, _, late in entries]))


_forms = Cache["LoweredProgram"](MOST_FORMS)


def form_of(func: tirx.PrimFunc, target: Any, template: Template | None = None) -> LoweredProgram:
    """Return the form of a program; the same one for every search of this process that has no template."""
    if template is not None:
        return LoweredProgram(func, target, template)
    key = content_key(func, make_target(target, func), None)
    form: LoweredProgram | None = _forms.get(key)
    if form is None:
        form = _forms[key] = LoweredProgram(func, target)
    return form


def with_knobs(template: Any, choices: Choices | Config) -> Any:
    """Return a candidate's choices as `sparsetir.build` takes them."""
    if isinstance(choices, Choices):
        return choices
    if template is None:
        raise TuningError(f"values of knobs, {choices}, mean nothing without their template")
    return template.with_values(**choices)


# -------------------------------------------------------------------------------- machine code on disk


FOLDER = "candidates"  # in the cache folder of kernels
MOST_LISTS = 32  # lists of kernels for a format
EXIT_SECONDS = 2.0


@dataclass(frozen=True, eq=False)
class StoredLibrary:
    """Stored library of one format.

    Parameters
    ----------
    path : Path
        The library.
    program : str
        Hash of the program over the format.
    kernels : mapping of Choices to (str, tuple of str)
        Name of the function, and the choices that its calls give.
    values : mapping of str to tuple
        The open choices.
    digest : str
        Hash of the library.
    """

    path: Path
    program: str
    kernels: Mapping[Choices, tuple[str, tuple[str, ...]]]
    values: Values
    digest: str

    @classmethod
    def read(cls, path: Path) -> StoredLibrary | None:
        """Return the contents of a library or of a list of kernels; None where there is none of this version."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ScheduleError):
            facts = json.loads(path.with_suffix(".json").read_text())
            kernels = {Choices(**of): (str(name), tuple(late)) for name, of, late in facts["kernels"]}
            values = {str(name): tuple(map(int, choices_of)) for name, choices_of in facts["values"].items()}
            library = path.with_name(Path(facts.get("library", path.name)).name)
            return cls(library, str(facts["program"]), kernels, values, str(facts["digest"]))
        return None

    @cached_property
    def listed(self) -> tuple[Choices, ...]:
        """Whose machine code it is."""
        return tuple(self.kernels)

    def codes(self) -> dict[Choices, Code]:
        """Return the machine code.

        Raises
        ------
        ValueError, OSError, RuntimeError
            The library is damaged or gone.
        """
        if cache.digest(self.path) != self.digest:
            raise ValueError(f"{self.path} is damaged")
        library = tvm.runtime.load_module(str(self.path))
        return {choices: Code(library[name], late) for choices, (name, late) in self.kernels.items()}


class KernelCache:
    """The libraries of one program with some sizes compiled in.

    Parameters
    ----------
    func : PrimFunc
        At stage I, as a search is given it.
    target : Target, str or dict, optional
    sizes : mapping of str to int
        Those that are compiled in.
    """

    def __init__(self, func: tirx.PrimFunc, target: Any, sizes: Mapping[str, int]) -> None:
        self.func, self.target, self.sizes = func, target, dict(sizes)
        self._compiled_ahead: dict[Format | None, StoredLibrary | None] = {}
        self._left_by_searches: dict[Format | None, list[StoredLibrary]] = {}

    @cached_property
    def folder(self) -> Path | None:
        """Where the libraries are; None where nothing is kept."""
        root = cache.cache_folder()
        return None if root is None else root / FOLDER

    @cached_property
    def _key(self) -> str:
        program = content_key(self.func, make_target(self.target, self.func), None)
        return f"{program} {sorted(self.sizes.items())} {source_digest()}"

    def path(self, format: Format | None) -> Path | None:
        """Return the library of a format."""
        if self.folder is None:
            return None
        name = hashlib.sha256(f"{self._key} {format!r}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.so"

    def compiled_ahead(self, format: Format | None) -> StoredLibrary | None:
        """Return the library that was compiled for a format ahead of time, if any."""
        if format not in self._compiled_ahead:
            path = self.path(format)
            self._compiled_ahead[format] = None if path is None else StoredLibrary.read(path)
        return self._compiled_ahead[format]

    def libraries(self, format: Format | None) -> list[StoredLibrary]:
        """Return all libraries of a format: compiled ahead of time, or left by searches."""
        path, ahead = self.path(format), self.compiled_ahead(format)
        if format not in self._left_by_searches and path is not None:
            self._left_by_searches[format] = [
                entry for name in lists_left(path) if (entry := StoredLibrary.read(name)) is not None
            ]
        return [*([ahead] if ahead is not None else []), *self._left_by_searches.get(format, [])]

    def listed(self, format: Format | None) -> tuple[Choices, ...]:
        """Return the choices of a format that have machine code, one for each code."""
        return tuple(dict.fromkeys(choices for entry in self.libraries(format) for choices in entry.listed))

    def fill(self, form: LoweredProgram, format: Format | None, feat: int | None) -> None:
        """Give a form the machine code that exists, and record where there is room for more."""
        places.setdefault(form, (self.path(format), feat))
        entries = [] if form.is_filled else self.libraries(format)
        program = program_key(form) if entries else ""
        for entry in entries:
            if entry.program == program:
                with contextlib.suppress(Exception):  # a damaged file is compiled again
                    form.fill(entry.codes(), feat, entry.values)

    def put(
        self,
        form: LoweredProgram,
        format: Format | None,
        feat: int | None,
        choices: Sequence[Choices],
        is_right: Callable[[Function], bool],
    ) -> int:
        """Compile a form's candidates as one library and write it; how many there are.

        Parameters
        ----------
        form : LoweredProgram
        format : Format or None
        feat : int, optional
            See `LoweredProgram.open_choices`.
        choices : sequence of Choices
            Shared ones, see `sparsetir.tuning.space.shared`; those that need code of their own are left out.
        is_right : callable
            Whether the results of a candidate's function are right; others are left out.

        Raises
        ------
        OSError
            It cannot be written.
        """
        path = self.path(format)
        loops = {c: form.shared_loops(c) for c in choices}
        lowered = {c: code for c, code in loops.items() if code is not None}
        if path is None or not lowered:
            return 0
        names = {c: f"{form.name}_{n}" for n, c in enumerate(lowered)}
        functions = {
            names[c]: third[form.name].with_attr("global_symbol", names[c]) for c, (third, _) in lowered.items()
        }
        library = unchecked(ir.IRModule(functions), form.target)
        right = [c for c, (_, late) in lowered.items() if is_right(Code(library[names[c]], late).of(c))]
        if not right:
            return 0
        entries = [(names[c], c.as_dict(), lowered[c][1]) for c in right]
        values = {name: list(code) for name, code in form.open_choices(feat).items()}
        cache.write(library, path, {"program": program_key(form), "kernels": entries, "values": values})
        self._compiled_ahead.pop(format, None)
        return len(right)


# ----------------------------------------------------------------------------------------- what searches leave

places: WeakKeyDictionary[LoweredProgram, tuple[Path | None, int | None]] = WeakKeyDictionary()


def lists_left(path: Path) -> list[Path]:
    """Return the lists of kernels of a format that searches left."""
    return sorted(path.parent.glob(f"{path.stem}-*.json"))


def keep(*, seconds: float | None = None) -> None:
    """Write verified machine code of searches to disk, for other processes.

    It happens by itself when a process ends, for `EXIT_SECONDS`. Nothing is written before: it would take time from
    what the caller does next.

    Parameters
    ----------
    seconds : float, optional
        Stop after this long; the newest comes first.
    """
    stop = time.monotonic() + (math.inf if seconds is None else seconds)
    while fresh and time.monotonic() < stop:
        # With a full disk or without a linker, the next search compiles again.
        with contextlib.suppress(Exception):
            _write(fresh.pop())


atexit.register(keep, seconds=EXIT_SECONDS)


def _write(together: CompiledBatch) -> None:
    """Write a library, and the lists of its kernels."""
    kernels: dict[LoweredProgram, list[tuple[str, Choices, tuple[str, ...]]]] = {}
    for name, form, choices, late in together.kernels:
        if choices in form.proved and _has_room(form):
            kernels.setdefault(form, []).append((name, choices, late))
    if not kernels:
        return
    content = sorted(
        (program_key(form), repr(choices)) for form, entries in kernels.items() for _, choices, _ in entries
    )
    stem = hashlib.sha256(repr(content).encode()).hexdigest()[:32]
    path = next(place for form in kernels if (place := places[form][0]) is not None).with_name(f"{stem}.so")
    cache.write(together.library, path, {})
    digest = cache.digest(path)
    for form, entries in kernels.items():
        place, feat = places[form]
        kernel_facts = [(name, choices.as_dict(), late) for name, choices, late in entries]
        values = {name: list(values_of) for name, values_of in form.open_choices(feat).items()}
        facts = {"library": path.name, "digest": digest, "program": program_key(form), "kernels": kernel_facts}
        assert place is not None
        cache.write_facts(place.with_name(f"{place.stem}-{stem}.json"), {**facts, "values": values})


def _has_room(form: LoweredProgram) -> bool:
    """Return whether there is a folder, and not much of this form in it yet."""
    place = places.get(form, (None, None))[0]
    return place is not None and len(lists_left(place)) < MOST_LISTS


def program_key(form: LoweredProgram) -> str:
    """Return a hash of what is compiled."""
    return content_key(form.func, form.target, None)


__all__ = [
    "Code",
    "CompiledBatch",
    "Function",
    "KernelCache",
    "LoweredProgram",
    "StoredLibrary",
    "compile_together",
    "form_of",
    "fresh",
    "keep",
    "unchecked",
    "with_knobs",
]
