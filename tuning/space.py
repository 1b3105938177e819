# SPDX-License-Identifier: Apache-2.0
"""Search space: formats of the sparse argument, choices of the schedule rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from sparsetir.codegen.pipeline import scheduled
from sparsetir.errors import SparseTIRError
from sparsetir.formats.format import Format
from sparsetir.ir.views import Program, const
from sparsetir.lower.annotations import LATE
from sparsetir.schedules import Choices, defaults
from sparsetir.tuning.knobs import Config

# Candidates, the points of the joint space: the storage of the sparse argument, and the sketches' open choices.


@dataclass(frozen=True)
class Candidate:
    """A format and choices.

    Parameters
    ----------
    choices : Choices or Config
        Of the sketches, or of a template's knobs.
    format : Format, optional
        Of the sparse argument; by default as the program declares it.

    Examples
    --------
    >>> from sparsetir import formats
    >>> print(Candidate(Choices(tile=32, chunks=2), formats.bsr(4, 4)))
    bsr(r=4, c=4) tile=32 chunks=2
    """

    choices: Choices | Config = field(default_factory=Choices)
    format: Format | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The order of candidates whose times are equal."""
        values = self.choices.as_dict().values()
        return (str(self.format or ""), *(map(repr, values) if isinstance(self.choices, Config) else values))

    def __str__(self) -> str:
        if isinstance(self.choices, Config):
            return f"{self.format!r} {self.choices}" if self.format else f"as it is {self.choices}"
        differing = {
            n: v for n, v in self.choices.as_dict().items() if v != getattr(BASE, n) or n in ("tile", "chunks")
        }
        return " ".join([repr(self.format) if self.format else "as it is", *(f"{n}={v}" for n, v in differing.items())])


BASE = Choices(chunks=0)


# Search space of a program: the formats of its sparse argument, and the sketches' choices for each format.


Values = Mapping[str, tuple[Any, ...]]

GIVEN = {name: 1 for name in LATE}  # what the schedule of a kernel sees of a choice that its calls give
OTHER_FORMAT = 0.15  # chance that a mutation changes the format
MOST_DRAWS = 64


class Space:
    """Formats, and for each the values of the choices that make a difference.

    Parameters
    ----------
    formats : sequence of Format or None
        Those that may be tried, the most promising first; None is the program as it is.
    values : callable
        The open choices of a format; None if no kernel can be made for it. Called once for each, when it is needed.
    base : Choices or Config, optional
        What is chosen where nothing is open; by default the sketches' choices.
    ready : callable, optional
        The choices of a format whose machine code is there already, one for each code; by default none.
    usual : callable, optional
        What an untuned kernel over a format does, where that is known: its candidates begin with it. By
        default `base`.
    """

    def __init__(
        self,
        formats: Sequence[Format | None],
        values: Callable[[Format | None], Values | None],
        base: Choices | Config | None = None,
        ready: Callable[[Format | None], Sequence[Choices]] = lambda _format: (),
        usual: Callable[[Format | None], Choices | None] = lambda _format: None,
    ) -> None:
        self.formats, self._values, self._ready, self._usual = list(formats), values, ready, usual
        self.base = Choices() if base is None else base
        self._known: dict[Format | None, Values | None] = {}
        self._codes: dict[Format | None, set[tuple[Any, ...]]] = {}  # that are ready

    def values(self, format: Format | None) -> Values | None:
        """Return the values of each choice that makes a difference; None for a format that is unavailable."""
        if format not in self._known:
            self._known[format] = self._values(format)
        return self._known[format]

    def usual(self, format: Format | None) -> Candidate | None:
        """Return the candidate of an untuned kernel over a format; None for an unavailable format."""
        values = self.values(format) if format in self.formats else None
        return None if values is None else Candidate(self._start(format, values), format)

    def _start(self, format: Format | None, values: Values) -> Choices | Config:
        """Return the first choices for a format."""
        return start(values, self._usual(format) or self.base)

    def first(self) -> Iterator[Candidate]:
        """Yield the portfolio: choices for the program as it is and then every format once, in turn."""
        unconverted = self.portfolio(None)
        had = ((f, values) for f in self.formats if f is not None and (values := self.values(f)) is not None)
        starts = (Candidate(self._start(f, values), f) for f, values in had)
        yield from islice(unconverted, 2)
        remaining = iter(unconverted[2:])
        while True:
            batch = [*islice(starts, 2), *islice(remaining, 1)]
            if not batch:
                return
            yield from batch

    def introduced(self) -> Iterator[Candidate]:
        """Return `first`, as if all formats left open what the program as it is does: see `outline`."""
        yield from self.portfolio(None)
        yield from (Candidate(self._start(f, values), f) for f, values in self._supposed() if f is not None)

    def portfolio(self, format: Format | None) -> list[Candidate]:
        """Return the entries of `suit.PORTFOLIO` that lie in a format's space, without repetition."""
        values = self.values(format)
        return [] if values is None else self._portfolio(values, format)

    def _portfolio(self, values: Values, format: Format | None) -> list[Candidate]:
        base = self._start(format, values)
        entries = defaults.PORTFOLIO if isinstance(base, Choices) else ({},)  # the names of knobs mean nothing
        inside = [{n: v for n, v in entry.items() if v in values.get(n, ())} for entry in entries]
        return [Candidate(choices, format) for choices in dict.fromkeys(base.changed(**entry) for entry in inside)]

    def outline(self, rng: np.random.Generator, count: int) -> Iterator[Candidate]:
        """Return the portfolio with every format and some draws, with the open choices of the program as it is.

        No format is converted for it; `settle` makes the candidates those of the space.
        """
        supposed = self._supposed()
        for format, values in supposed:
            yield from self._portfolio(values, format)
        formats = [(format, values, self._start(format, values)) for format, values in supposed]
        for _ in range(count if formats else 0):
            format, values, begin = formats[int(rng.integers(len(formats)))]
            yield Candidate(begin.changed(**drawn(values, rng)), format)

    def ready(self, rng: np.random.Generator, count: int) -> list[Candidate]:
        """Return draws of candidates that need no compiling, each format equally often; call choices are drawn too."""
        compiled = [(format, values, codes) for format, values in self._supposed() if (codes := self._ready(format))]
        candidates = []
        for _ in range(count if compiled else 0):
            format, values, codes = compiled[int(rng.integers(len(compiled)))]
            code = codes[int(rng.integers(len(codes)))]
            open_values = {name: tuple(v for v in values.get(name, ()) if v) for name in GIVEN if getattr(code, name)}
            open_values = {name: options for name, options in open_values.items() if options}
            candidates.append(Candidate(code.changed(**drawn(open_values, rng)), format))
        return candidates

    def is_ready(self, candidate: Candidate) -> bool:
        """Return whether a candidate needs no compiling."""
        if candidate.format not in self._codes:
            self._codes[candidate.format] = {_code(choices) for choices in self._ready(candidate.format)}
        codes = self._codes[candidate.format]
        return bool(codes) and _code(candidate.choices) in codes

    def _supposed(self) -> list[tuple[Format | None, Values]]:
        """Return the formats with their open choices; unconverted ones with those of the program as it is."""
        default_values = self.values(None)
        return [(f, values) for f in self.formats if (values := self._known.get(f, default_values)) is not None]

    def settle(self, candidate: Candidate) -> Candidate | None:
        """Return a candidate with the choices that its format leaves open; None if the format is unavailable."""
        is_settled = candidate.format in self.formats and self.values(candidate.format) is not None
        return self.moved(candidate, candidate.format) if is_settled else None

    def __iter__(self) -> Iterator[Candidate]:
        for format in self.formats:
            values = self.values(format)
            if values is not None:
                yield from (Candidate(choices, format) for choices in points(values, self._start(format, values)))

    def __contains__(self, candidate: Candidate) -> bool:
        values = self.values(candidate.format) if candidate.format in self.formats else None
        if values is None:
            return False
        base, values_of = self._start(candidate.format, values).as_dict(), candidate.choices.as_dict()
        return base.keys() == values_of.keys() and all(v in values.get(n, (base[n],)) for n, v in values_of.items())

    def sample(self, rng: np.random.Generator, formats: Sequence[Format | None] = ()) -> Candidate:
        """Return any candidate; of some of the formats if they are given."""
        among = list(formats or self.formats)
        format = among.pop(int(rng.integers(len(among))))
        while (values := self.values(format)) is None and among:
            format = among.pop(int(rng.integers(len(among))))
        values = values or {}
        return Candidate(self._start(format, values).changed(**drawn(values, rng)), format)

    def mutate(
        self, candidate: Candidate, rng: np.random.Generator, formats: Sequence[Format | None] | None = None
    ) -> Candidate:
        """Return a candidate with one choice drawn again, or another format, one of `formats` where they are given."""
        values, among = self.values(candidate.format) or {}, self.formats if formats is None else formats
        if not values or (len(among) > 1 and rng.random() < OTHER_FORMAT):
            return self.moved(candidate, among[int(rng.integers(len(among)))])
        name = list(values)[int(rng.integers(len(values)))]
        value = values[name][int(rng.integers(len(values[name])))]
        return replace(candidate, choices=candidate.choices.changed(**{name: value}))

    def moved(self, candidate: Candidate, format: Format | None) -> Candidate:
        """Return a candidate with another format, its choices as far as they are open there."""
        values = self.values(format)
        if values is None:
            return candidate
        shared = {n: v for n, v in candidate.choices.as_dict().items() if v in values.get(n, ())}
        return Candidate(self._start(format, values).changed(**shared), format)

    def crossover(self, first: Candidate, second: Candidate, rng: np.random.Generator) -> Candidate:
        """Return the format of one, each choice of either."""
        second_choices = self.moved(second, first.format).choices.as_dict()
        inherited = {n: v for n, v in second_choices.items() if rng.random() < 0.5}
        return replace(first, choices=first.choices.changed(**inherited))

    def steps(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates that differ in one choice by one step."""
        neighbours, current = [], candidate.choices.as_dict()
        for name, values in (self.values(candidate.format) or {}).items():
            at = values.index(current[name]) if current[name] in values else 0
            for near in (at + 1, at - 1):
                if 0 <= near < len(values):
                    neighbours.append(replace(candidate, choices=candidate.choices.changed(**{name: values[near]})))
        return neighbours

    def fresh(self, rng: np.random.Generator, excluded: Any) -> Candidate | None:
        """Return a sample that is not among those taken; None where few are left."""
        samples = (self.sample(rng) for _ in range(MOST_DRAWS))
        return next((c for c in samples if c not in excluded), next((c for c in self if c not in excluded), None))


def shared(choices: Choices) -> Choices:
    """Return the choices that all candidates have whose code may be the same.

    Examples
    --------
    >>> shared(Choices(tile=8, chunks=16)) == shared(Choices(tile=8, chunks=2))
    True
    """
    if choices.carry:  # its arrays have an element for each part
        return choices
    return choices.changed(**{name: least for name, least in GIVEN.items() if getattr(choices, name) > least})


def _code(choices: Choices | Config) -> tuple[Any, ...]:
    """Return the values of `shared` choices."""
    return tuple(min(v, GIVEN[n]) if n in GIVEN else v for n, v in choices.as_dict().items())


def changes_code(
    second: ir.IRModule, usual: ir.IRModule, name: str, values: tuple[int, ...], target: Any = None
) -> bool:
    """Return whether choice `name` changes a stage-II module; `usual` is the module with the default."""
    default = Choices()
    alternative = next((value for value in values if value != getattr(default, name)), None)
    if alternative is None:
        return False
    try:
        changed = scheduled(second, default.changed(**{name: alternative}), target)
    except SparseTIRError:
        return True
    return not tvm_ffi.structural_equal(usual, changed)


def open_choices(
    second: ir.IRModule, *, threads: int, feat: int | None = None, target: Any = None
) -> dict[str, tuple[int, ...]]:
    """Return the values to try for each choice that makes a difference to a stage-II module.

    Parameters
    ----------
    second : IRModule
        Lowered to stage II, not scheduled.
    threads : int
        Of the parallel loops.
    feat : int, optional
        Length of a dense output row.
    target : Target, optional
        As `make_target` gives it for the program; by default this machine.
    """
    values = Choices.space(threads=threads, feat=feat)
    usual = scheduled(second, Choices(), target)
    return {name: options for name, options in values.items() if changes_code(second, usual, name, options, target)}


def start(values: Values, base: Choices | Config | None = None) -> Choices | Config:
    """Return the default choices, or the largest value below where the space lacks it; of knobs the first."""
    base = Choices() if base is None else base
    if isinstance(base, Config):
        return base.changed(**{n: options[0] for n, options in values.items()})
    default = base.as_dict()
    nearest = {n: max((v for v in options if v <= default[n]), default=options[0]) for n, options in values.items()}
    return base.changed(**nearest)


def drawn(values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Return each open choice drawn at random."""
    return {name: options[int(rng.integers(len(options)))] for name, options in values.items()}


def points(values: Values, base: Choices | Config | None = None) -> Iterator[Choices | Config]:
    """Yield every combination, in a fixed order."""
    base = Choices() if base is None else base
    for row in product(*values.values()):
        yield base.changed(**dict(zip(values, row, strict=True)))


def fixed(program: Program, values: Mapping[str, int]) -> tirx.PrimFunc:
    """Return the program with some sizes filled in.

    rewrite: ``def spmm(b: T.Buffer(("n", "feat")), feat: T.int32)`` becomes ``def spmm(b: T.Buffer(("n", 128)))``.
    """
    params = {p: const(values[str(p.name)], str(p.ty.dtype)) for p in program.func.params if str(p.name) in values}
    return program.func.specialize(params) if params else program.func


__all__ = ["Candidate"]
