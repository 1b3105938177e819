# SPDX-License-Identifier: Apache-2.0
"""Machine code of candidates on disk: `sparsetir warm` makes a library for each format, searches leave what they made.

What a search left is a library for each call of the compiler, and a list of its kernels for each format. It all lies
beside the compiled kernels, under the same rules: see `sparsetir.codegen.cache`.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import tvm
from tvm import ir, tirx

from sparsetir.codegen import cache
from sparsetir.codegen.cache import content_key
from sparsetir.codegen.target import make_target
from sparsetir.errors import ScheduleError
from sparsetir.formats.format import Format
from sparsetir.schedules import Choices
from sparsetir.tuning.lowered_program import Code, FormatVariant, Function, Together, fresh, unchecked
from sparsetir.tuning.space import Values
from sparsetir.utils.version import source_digest

FOLDER = "candidates"  # in that of the kernels
MOST_LISTS = 32  # of a format, that searches leave
EXIT_SECONDS = 2.0


@dataclass(frozen=True, eq=False)
class Held:
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
    def read(cls, path: Path) -> Held | None:
        """Return what a library holds, or a list of kernels says; None where there is none, or none of this version."""
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


class Shelf:
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
        self._held: dict[Format | None, Held | None] = {}
        self._left: dict[Format | None, list[Held]] = {}

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

    def held(self, format: Format | None) -> Held | None:
        """Return what was made of a format ahead, if anything."""
        if format not in self._held:
            path = self.path(format)
            self._held[format] = None if path is None else Held.read(path)
        return self._held[format]

    def everything(self, format: Format | None) -> list[Held]:
        """Return what there is of a format: made ahead, or left by searches."""
        path, ahead = self.path(format), self.held(format)
        if format not in self._left and path is not None:
            self._left[format] = [shelf_entry for name in left(path) if (shelf_entry := Held.read(name)) is not None]
        return [*([ahead] if ahead is not None else []), *self._left.get(format, [])]

    def listed(self, format: Format | None) -> tuple[Choices, ...]:
        """Return whose machine code there is of a format, one for each code."""
        return tuple(dict.fromkeys(choices for entry in self.everything(format) for choices in entry.listed))

    def fill(self, form: FormatVariant, format: Format | None, feat: int | None) -> None:
        """Give a form what there is of it, and note where there is room for what will be made."""
        places.setdefault(form, (self.path(format), feat))
        entries = [] if form.is_filled else self.everything(format)
        program = program_key(form) if entries else ""
        for entry in entries:
            if entry.program == program:
                with contextlib.suppress(Exception):  # damaged: it is compiled again
                    form.fill(entry.codes(), feat, entry.values)

    def put(
        self,
        form: FormatVariant,
        format: Format | None,
        feat: int | None,
        choices: Sequence[Choices],
        is_right: Callable[[Function], bool],
    ) -> int:
        """Compile a form's candidates as one library and write it; how many there are.

        Parameters
        ----------
        form : FormatVariant
        format : Format or None
        feat : int, optional
            See `FormatVariant.open_choices`.
        choices : sequence of Choices
            Shared ones, see `sparsetir.tuning.space.shared`; those that need code of their own are left out.
        is_right : callable
            Whether the function of a candidate computes what it should; others are left out.

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
        self._held.pop(format, None)
        return len(right)


# ----------------------------------------------------------------------------------------- what searches leave

places: WeakKeyDictionary[FormatVariant, tuple[Path | None, int | None]] = WeakKeyDictionary()


def left(path: Path) -> list[Path]:
    """Return the lists of kernels of a format that searches left."""
    return sorted(path.parent.glob(f"{path.stem}-*.json"))


def keep(*, seconds: float | None = None) -> None:
    """Put the machine code that searches made and proved on disk, for those of other processes.

    It happens by itself when a process ends, for `EXIT_SECONDS`. Nothing is written before: it would take time from
    what the caller does next.

    Parameters
    ----------
    seconds : float, optional
        Stop after this long; the newest comes first.
    """
    stop = time.monotonic() + (math.inf if seconds is None else seconds)
    while fresh and time.monotonic() < stop:
        # A full disk or a missing linker costs the next search some compilations.
        with contextlib.suppress(Exception):
            _write(fresh.pop())


atexit.register(keep, seconds=EXIT_SECONDS)


def _write(together: Together) -> None:
    """Write a library, and the lists of its kernels."""
    kernels: dict[FormatVariant, list[tuple[str, Choices, tuple[str, ...]]]] = {}
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


def _has_room(form: FormatVariant) -> bool:
    """Return whether there is a folder, and not much of this form in it yet."""
    place = places.get(form, (None, None))[0]
    return place is not None and len(left(place)) < MOST_LISTS


def program_key(form: FormatVariant) -> str:
    """Return a hash of what is compiled."""
    return content_key(form.func, form.target, None)


__all__ = ["Held", "Shelf", "keep"]
