# SPDX-License-Identifier: Apache-2.0
"""Programs of the dialect under drawn schedules, choices and formats, compared with an evaluation of their own."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

from fences import Everything, Fences
from fuzzing.calls import Call, Caller
from fuzzing.case import Case, Finding, Front, Skip, unclear
from fuzzing.generate import draw
from fuzzing.inputs import LENGTHS, Inputs
from fuzzing.program import Expr, Iteration, Program, Store
from fuzzing.recipe import MODES, Recipe, drawn_recipe
from fuzzing.reduction import smaller_programs
from fuzzing.values import PRELUDE, literal
from sparsetir.errors import SparseTIRError

HALVES = ("float16", "bfloat16")
ATTEMPTS = 3  # inputs of each length


@lru_cache(maxsize=4)
def built(recipe: str) -> Any:
    """The kernel of a recipe, or why there is none."""
    try:
        return Recipe(**json.loads(recipe)).build()
    except Exception as error:
        return error


@lru_cache(maxsize=1)
def fences() -> tuple[Fences, Everything]:
    return Fences(), Everything()


@dataclass(frozen=True, eq=False)
class ProgramCase(Case):
    """A program, how it is compiled, and the seed and largest length of its inputs.

    Parameters
    ----------
    is_poisoned : bool
        Whether results hold NaN before the call.
    error : Exception, optional
        What drawing the schedule raised instead.
    """

    program: Program
    recipe: Recipe
    seed: int
    most: int
    is_poisoned: bool = False
    error: str = ""

    def kernel(self) -> Any:
        """The compiled program; raises what compiling raised."""
        made = built(json.dumps(dataclasses.asdict(self.recipe)))
        if isinstance(made, Exception):
            raise made
        return made

    def call(self, kernel: Any) -> Call:
        """The call with its expected results."""
        inputs = Inputs(self.program, self.seed, self.most)
        ordinary = {b.name.lower(): inputs.args[b.name.lower()] for b in self.program.buffers if not b.scratch}
        arrays = inputs.poisoned() if self.is_poisoned else ordinary
        call = Caller(self.program, kernel, inputs).call(arrays, "")
        if call is None:
            raise Skip
        return call

    def run(self) -> Finding | None:
        if self.error:
            return Finding("unclear", f"in a schedule: {self.error.splitlines()[-1][:60]}", self.error)
        try:
            kernel = self.kernel()
        except SparseTIRError:
            raise
        except Exception as error:
            return unclear(error, "in build: ")
        call = self.call(kernel)
        single, everything = fences()
        try:
            with everything.within():
                objections = call.objections(kernel, single)
        except SparseTIRError:
            raise
        except Exception as error:
            return unclear(error, "in a call: ")
        return Finding("wrong", mode_of(self.recipe), "\n".join(objections)) if objections else None

    def smaller(self) -> Iterator[Case]:
        for change in smaller_recipes(self.recipe):
            yield replace(self, recipe=replace(self.recipe, **change))
        for program in smaller_programs(self.program):
            yield replace(self, program=program, recipe=replace(self.recipe, text=program.text))
        for most in (n for n in range(5) if n < self.most):
            yield replace(self, most=most)
        if self.is_poisoned:
            yield replace(self, is_poisoned=False)

    def script(self) -> str:
        try:
            return "\n".join([self.short_script(), *call_lines(self.call(self.kernel())), ""])
        except Exception:  # it is the build that fails
            return self.short_script()

    def short_script(self) -> str:
        return "\n".join([PRELUDE, f'text = """\n{self.recipe.text}\n"""', *build_lines(self.recipe), ""])


def mode_of(recipe: Recipe) -> str:
    """Return the changes made to a program, for the label of a finding."""
    modes = {"stage1": recipe.trace, "formats": recipe.formats, "choices": recipe.choices, "stage2": recipe.stage2}
    return "+".join(name for name, value in modes.items() if value is not None) or "plain"


def smaller_recipes(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Recipes with a step less, as changed fields."""
    for name in ("stage2", "trace", "formats", "choices"):
        if getattr(recipe, name) is not None:
            yield {name: None}
    if recipe.stage2 is not None:
        yield from ({"steps": n} for n in range(1, recipe.steps))
    if recipe.is_optimised:
        yield {"is_optimised": False}
    for name in ("formats", "choices"):
        chosen = getattr(recipe, name) or {}
        if len(chosen) > 1:
            yield from ({name: {k: v for k, v in chosen.items() if k != left_out}} for left_out in chosen)
    trace = json.loads(recipe.trace) if recipe.trace else None
    steps = trace if isinstance(trace, list) else (trace or {}).get("steps", [])
    for n in range(len(steps)):
        kept = steps[:n] + steps[n + 1 :]
        yield {"trace": json.dumps(kept if isinstance(trace, list) else {**trace, "steps": kept})}


def build_lines(recipe: Recipe) -> list[str]:
    """Statements that build the kernel."""
    lines = ["subject = sparsetir.parse(text)"]
    if recipe.trace is not None:
        lines += [
            "from sparsetir.transform import Trace",
            f"subject = Trace.from_json({recipe.trace!r}).apply(subject)",
        ]
    if recipe.formats is not None:
        chosen = ", ".join(f"{n!r}: sparsetir.format({f!r})" for n, f in recipe.formats.items())
        lines += [f"subject = sparsetir.decompose_format(subject, {{{chosen}}})"]
    target = "None" if recipe.is_optimised else "{'kind': 'llvm', 'opt-level': 0}"
    chosen = "None" if recipe.choices is None else f"sparsetir.Choices(**{recipe.choices})"
    if recipe.stage2 is not None:
        lines += [
            "import random, sys",
            "sys.path.insert(0, 'tests')  # of the project: the schedule is drawn by its tests",
            "from fuzzing.recipe import drawn_schedule",
            f"schedule = drawn_schedule(subject, {recipe.stage2}, {recipe.steps})",
        ]
        chosen = "schedule"
    return [*lines, f"kernel = sparsetir.build(subject, {target}, schedule={chosen})"]


def call_lines(call: Call) -> list[str]:
    """Statements that call it and compare; NaN stands for elements that may be anything."""
    lines = ["arguments = {}"]
    for name, value in call.arguments.items():
        text = repr(value)
        if hasattr(value, "dtype") and value.shape:
            text = f"{literal(value)}.reshape({value.shape})"
        elif isinstance(value, tuple):
            coords, values, shape = value
            text = f"sparsetir.CooTensor({literal(coords)}.reshape({coords.shape}), {literal(values)}, {shape})"
            if name in call.expected and str(values.dtype) not in HALVES:
                places = f"tuple({literal(coords)}.reshape({coords.shape}))"
                text = f"sp.coo_array(({literal(values)}, {places}), shape={shape})"
        lines += [f"arguments[{name!r}] = {text}"]
    lines += [
        "out = kernel(**arguments)",
        "out = dict(zip(kernel.signature.outputs, out if isinstance(out, tuple) else (out,)))",
        "is_right = True",
    ]
    for name, expected in call.expected.items():
        lines += [
            f"got = arguments.get({name!r}, out.get({name.lower()!r}))",
            "got = getattr(got, 'values', getattr(got, 'data', got)) if not isinstance(got, np.ndarray) else got",
            f"got, want = np.asarray(got).astype(float), {literal(expected)}.reshape({expected.shape})",
            f"print({name!r}, 'expected', want.tolist())",
            f"print({name!r}, 'got     ', got.tolist())",
            f"near = np.abs(got.reshape(want.shape) - want) <= {call.tolerance[name]}",
            "is_right &= bool((near | np.isnan(want)).all())",
        ]
    return [*lines, "raise SystemExit(not is_right)"]


class Programs(Front):
    """Programs in all modes."""

    name, groups = "programs", 2

    def program(self, rng: Random, mode: str) -> Program:
        return draw(rng, is_plain=mode == "formats")

    def draw(self, rng: Random) -> Iterator[Case]:
        mode = rng.choice(MODES)
        program = self.program(rng, mode)
        recipe, error = Recipe(program.text), ""
        try:
            recipe = drawn_recipe(program, mode, rng)
        except SparseTIRError:
            raise
        except Exception as raised:
            error = "".join(traceback.format_exception(raised))[-3000:].rstrip()
        for _ in range(ATTEMPTS):
            for most in LENGTHS:
                seed = rng.randrange(1 << 40)
                for is_poisoned in (False, True):
                    yield ProgramCase(program, recipe, seed, most, is_poisoned, error)
                    if error or isinstance(built(json.dumps(dataclasses.asdict(recipe))), Exception):
                        return


class Halves(Programs):
    """Programs with 16-bit floats in every place: operands, results, scratch, starts and casts."""

    name, groups = "halves", 2

    def program(self, rng: Random, mode: str) -> Program:
        while True:
            program = halved(draw(rng, is_plain=mode == "formats"), rng)
            if program is not None:
                return program


def halved(program: Program, rng: Random) -> Program | None:
    """The program with 16-bit floats in place of its dtype; None where it has none that could be replaced."""
    old, new = program.dtype, rng.choice(HALVES)
    if old in ("bool", "uint8"):
        return None
    roles = rng.choice([("in", "out", "scratch"), ("scratch",), ("out",), ("in",)])
    if not any(b.dtype == old and b.role in roles for b in program.buffers):
        return None
    buffers = {b: replace(b, dtype=new) if b.dtype == old and b.role in roles else b for b in program.buffers}
    changed = Program(program.dtype, program.size_dtype, program.axes, list(buffers.values()), [], program.repeats)
    changed.iterations = [with_buffers(it, buffers) for it in program.iterations]
    return changed


def with_buffers(it: Iteration, buffers: dict[Any, Any]) -> Iteration:
    """The iteration over other buffers, values cast where the dtypes differ."""

    def store(s: Store) -> Store:
        target = buffers[s.buffer]
        value = with_reads(s.value, buffers)
        value = value if target.dtype == s.buffer.dtype else ("cast", target.dtype, value)
        return Store(target, tuple(with_reads(e, buffers) for e in s.subscripts), value)

    body = [with_buffers(s, buffers) if isinstance(s, Iteration) else store(s) for s in it.body]
    return replace(it, init=[store(s) for s in it.init], body=body)


def with_reads(e: Expr, buffers: dict[Any, Any]) -> Expr:
    """The expression over other buffers."""
    if e[0] == "read":
        read = ("read", buffers[e[1]], tuple(with_reads(s, buffers) for s in e[2]))
        return read if buffers[e[1]].dtype == e[1].dtype else ("cast", e[1].dtype, read)
    return tuple(with_reads(part, buffers) if isinstance(part, tuple) else part for part in e)


__all__ = ["Halves", "ProgramCase", "Programs"]
