# SPDX-License-Identifier: Apache-2.0
"""Machine code of candidates on disk, a library for each format of a program: `sparsetir warm` fills it.

It lies beside the compiled kernels, under the same rules: see `sparsetir.compile.disk_cache`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tvm
from tvm import ir, tirx

from sparsetir import formats
from sparsetir.compile import disk_cache
from sparsetir.compile.cache import content_key
from sparsetir.compile.target import make_target
from sparsetir.errors import ScheduleError
from sparsetir.formats.format import Format
from sparsetir.schedules import Choices
from sparsetir.tuning.form import Code, FormatVariant, Function, unchecked
from sparsetir.tuning.space import Values

FOLDER = "candidates"  # in that of the kernels


@dataclass(frozen=True, eq=False)
class Held:
    """What there is of one format.

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
        """What a library holds; None where there is none, or none of this version."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ScheduleError):
            facts = json.loads(path.with_suffix(".json").read_text())
            kernels = {Choices(**of): (str(name), tuple(late)) for name, of, late in facts["kernels"]}
            values = {str(name): tuple(map(int, found)) for name, found in facts["values"].items()}
            return cls(path, str(facts["program"]), kernels, values, str(facts["digest"]))
        return None

    @cached_property
    def listed(self) -> tuple[Choices, ...]:
        """Whose machine code it is."""
        return tuple(self.kernels)

    def codes(self) -> dict[Choices, Code]:
        """The machine code.

        Raises
        ------
        ValueError, OSError, RuntimeError
            The library is damaged or gone.
        """
        if disk_cache.digest(self.path) != self.digest:
            raise ValueError(f"{self.path} is damaged")
        library = tvm.runtime.load_module(str(self.path))
        return {choices: Code(library[name], late) for choices, (name, late) in self.kernels.items()}


@cache
def sources() -> str:
    """A hash of what decides the program over a format, and which of its candidates there are."""
    here = Path(formats.__file__).parent.parent
    own = (Path(__file__).parent / name for name in ("form.py", "space.py", "warm.py"))
    paths = [*here.glob("formats/*.py"), *here.glob("transform/*.py"), *own]
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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

    @cached_property
    def folder(self) -> Path | None:
        """Where the libraries are; None where nothing is kept."""
        found = disk_cache.cache_folder()
        return None if found is None else found / FOLDER

    @cached_property
    def _key(self) -> str:
        program = content_key(self.func, make_target(self.target, self.func), None)
        return f"{program} {sorted(self.sizes.items())} {sources()}"

    def path(self, format: Format | None) -> Path | None:
        """The library of a format."""
        if self.folder is None:
            return None
        name = hashlib.sha256(f"{self._key} {format!r}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.so"

    def held(self, format: Format | None) -> Held | None:
        """What there is of a format, if anything."""
        if format not in self._held:
            path = self.path(format)
            self._held[format] = None if path is None else Held.read(path)
        return self._held[format]

    def fill(self, form: FormatVariant, format: Format | None, feat: int | None) -> None:
        """Give a form what there is of it."""
        found = self.held(format)
        if found is None or form.is_filled or program_key(form) != found.program:
            return
        with contextlib.suppress(Exception):  # damaged: it is compiled again
            form.fill(found.codes(), feat, found.values)

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
        made = {c: found for c, found in loops.items() if found is not None}
        if path is None or not made:
            return 0
        names = {c: f"{form.name}_{n}" for n, c in enumerate(made)}
        functions = {names[c]: third[form.name].with_attr("global_symbol", names[c]) for c, (third, _) in made.items()}
        library = unchecked(ir.IRModule(functions), form.target)
        right = [c for c, (_, late) in made.items() if is_right(Code(library[names[c]], late).of(c))]
        if not right:
            return 0
        listed = [(names[c], c.as_dict(), made[c][1]) for c in right]
        values = {name: list(found) for name, found in form.open_choices(feat).items()}
        disk_cache.write(library, path, {"program": program_key(form), "kernels": listed, "values": values})
        self._held.pop(format, None)
        return len(right)


def program_key(form: FormatVariant) -> str:
    """A hash of what is compiled."""
    return content_key(form.func, form.target, None)


__all__ = ["Held", "Shelf"]
