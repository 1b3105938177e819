# SPDX-License-Identifier: Apache-2.0
"""How a fuzzed program is compiled: schedules, choices and formats, drawn at random and made again from JSON."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import s_tir

import sparsetir
from decomposing import FORMATS
from fuzzing.program import Buffer, Program
from primitives import attempt, moves
from scheduling import drawn_from
from sparsetir.errors import SparseTIRError
from sparsetir.formats.encoding import parse_format as parse_format
from sparsetir.transform import Trace

MODES = ("plain", "choices", "stage1", "stage2", "formats")
SPACE = {
    "tile": (2, 4, 8, 64),
    "chunks": (0, 1, 3, 16),
    "unroll": (1, 1, 2, 4),
    "prefetch": (0, 0, 1, 8),
    "stream": (0, 0, 0, 1),
    "carry": (0, 1),
    "panel": (0, 0, 0, 2, 32),
    "lanes": (0, 2, 4, 8),
}
NESTED = ("'csr'", "'coo'", "'ell'", "'dcsr'", "ell(width=1)", "bsr(r=2, c=2)")
#: formats of tensors of any order
TREES = ("coo()", "csf()")


@dataclass(frozen=True)
class Recipe:
    """A program's text and what is done to it; of what is None nothing is done."""

    text: str
    is_optimised: bool = False
    trace: str | None = None
    formats: dict[str, str] | None = None
    choices: dict[str, int] | None = None
    stage2: int | None = None
    steps: int = 7  # most of stage II

    def build(self) -> Any:
        """The kernel."""
        subject = sparsetir.parse(self.text)
        if self.trace is not None:
            subject = Trace.from_json(self.trace).apply(subject)
        if self.formats is not None:
            subject = sparsetir.decompose_format(subject, {n: parse_format(f) for n, f in self.formats.items()})
        target = None if self.is_optimised else {"kind": "llvm", "opt-level": 0}
        return sparsetir.build(subject, target, schedule=self.schedule(subject))

    def schedule(self, subject: Any) -> Any:
        """What `sparsetir.build` takes."""
        if self.stage2 is not None:
            return drawn_schedule(subject, self.stage2, self.steps)
        return None if self.choices is None else sparsetir.Choices(**self.choices)


def drawn_schedule(subject: Any, seed: int, most: int) -> Any:
    """A stage-II schedule of a few legal steps."""
    sch = s_tir.Schedule(sparsetir.lower(subject, stage=2))
    sch.work_on(next(iter(sch.mod.functions)).name_hint)
    return drawn_from(sch, random.Random(seed), most=most)


def drawn_choices(rng: random.Random) -> dict[str, int]:
    return {name: rng.choice(values) for name, values in SPACE.items()}


def drawn_trace(text: str, rng: random.Random) -> str:
    """A few primitives of stage I, as far as they are legal."""
    sch = sparsetir.Schedule(sparsetir.parse(text))
    for _ in range(rng.randint(1, 5)):
        options = list(moves(sch, rng))
        rng.shuffle(options)
        next((move for move in options[:6] if attempt(sch, move)), None)
    return sch.trace.to_json()


def drawn_format(order: int, rng: random.Random) -> str:
    """A format of a tensor, as text."""
    if order != 2:
        return rng.choice(TREES)
    name = rng.choice(list(FORMATS))
    options = {n: repr(v) for n, v in FORMATS[name].items()}
    for size in {"r", "c", "C", "t", "width"} & options.keys():
        options[size] = str(rng.randint(1, 4))
    if name in ("ell_rest", "blocks", "dia_rest", "hdia", "dense_rows", "dense_columns") and rng.random() < 0.3:
        options["rest"] = rng.choice(NESTED)
    return f"{name}({', '.join(f'{n}={v}' for n, v in options.items())})"


def drawn_formats(program: Program, rng: random.Random) -> dict[str, str]:
    """Formats for one or two of the sparse structures, by a buffer's name."""
    found = {structure(b): b for b in program.buffers if structure(b) and not b.scratch}
    some = rng.sample(list(found.values()), min(len(found), rng.choice([1, 1, 1, 2])))
    return {b.name: drawn_format(len(b.axes), rng) for b in some}


def structure(buffer: Buffer) -> Any:
    """The leaf of a sparse buffer over one tree; None of others."""
    if len(buffer.trees) != 1 or all(a.kind == "dense_fixed" for a in buffer.axes):
        return None
    return buffer.trees[0]


def drawn_recipe(program: Program, mode: str, rng: random.Random) -> Recipe:
    """How to compile a program in a mode. A refusal of the package ends the drawing of one step, not of the recipe."""
    text = program.text
    options: dict[str, Any] = {"is_optimised": rng.random() < 0.25}
    if mode == "stage1":
        options["trace"] = drawn_trace(text, rng)
    if mode == "formats":
        options["formats"] = drawn_formats(program, rng)
    if mode == "stage2":
        options["stage2"] = rng.randrange(1 << 30)
    elif mode == "choices" or (mode != "plain" and rng.random() < 0.25):
        options["choices"] = drawn_choices(rng)
    return Recipe(text, **options)


def is_refused(work: Callable[[], Any]) -> tuple[Any, str]:
    """What `work` gives, or why the package refuses it."""
    try:
        return work(), ""
    except SparseTIRError as error:
        return None, f"{type(error).__name__}: {error}"


__all__ = ["MODES", "Recipe", "drawn_recipe", "drawn_schedule", "is_refused", "structure"]
