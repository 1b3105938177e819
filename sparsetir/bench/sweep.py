# SPDX-License-Identifier: Apache-2.0
"""The best of a coarse sweep: every format that suits the pattern, and a few choices of the sketches for each.

Nothing depends on a matrix but its pattern; a program, format and set of choices is compiled once for all matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx

from sparsetir.build import build
from sparsetir.compile.pipeline import scheduled, to_stage_2
from sparsetir.compile.target import make_target
from sparsetir.errors import SparseTIRError
from sparsetir.formats.format import Format
from sparsetir.formats.pattern import pattern
from sparsetir.formats.suit import dense_rows, promising
from sparsetir.harness.inputs import say
from sparsetir.harness.operands import Case, dense_shapes
from sparsetir.harness.timing import burst, interleave
from sparsetir.schedules import Choices, Registers, suit
from sparsetir.transform.decompose import decompose_format

BURST = 0.03  # seconds of calls
REFINED = 2  # formats that are tried with several choices
FINALISTS = 4  # options that are measured again, in turn
REST = 0.02  # seconds between turns


@dataclass(frozen=True)
class Option:
    """A format (None: the program as it is) and choices (None: those of an untuned kernel)."""

    format: Format | None
    choices: Choices | None

    def __str__(self) -> str:
        named = "csr()" if self.format is None else repr(self.format)
        return f"{named}, untuned" if self.choices is None else f"{named}, {self.choices}"


def options(case: Case) -> Iterator[Option]:
    """What is tried for a case at first: the program as it is with several choices, and other formats untuned."""
    base = suit.usual(case.program, Registers.of(make_target(None, case.program)))
    yield Option(None, None)
    yield from different(case.program, [Option(None, choices) for choices in suit.sweep(base)])
    for format in promising(pattern(case.sparse), feat=dense_rows(dense_shapes(case.inputs))):
        yield Option(format, None)


def refined(case: Case, format: Format) -> Iterator[Option]:
    """A format that did well with several choices."""
    parts = decompose_format(case.program, {next(iter(case.inputs)): format})
    base = suit.usual(parts.func, Registers.of(make_target(None, parts.func)))
    yield from different(parts.func, [Option(format, choices) for choices in suit.sweep(base, over_format=True)])


def different(func: tirx.PrimFunc, tried: Sequence[Option]) -> Iterator[Option]:
    """Those whose loops differ from the untuned ones and from each other's."""
    second, target = to_stage_2(func), make_target(None, func)
    seen = [scheduled(second, None, target)]
    for option in tried:
        loops = scheduled(second, option.choices, target)
        if not any(tvm_ffi.structural_equal(loops, other) for other in seen):
            seen.append(loops)
            yield option


def best_of(case: Case) -> tuple[Any, Option] | None:
    """The fastest kernel and how it came about; None if none can be built."""
    times = measured(case, options(case))
    for format in [o.format for o in ranked(times) if o.format is not None][:REFINED]:
        times |= measured(case, refined(case, format))
    if not times:
        return None
    untuned = [option for option in times if option == Option(None, None)]
    close = list(dict.fromkeys([*ranked(times)[:FINALISTS], *untuned]))
    kernels = {str(option): kernel_of(case, option) for option in close}
    final = interleave({name: call_of(case, kernel) for name, kernel in kernels.items()}, rest=REST)
    best = min(close, key=lambda option: final[str(option)].median)
    return kernels[str(best)], best


def ranked(times: dict[Option, float]) -> list[Option]:
    """The options, the fastest first."""
    return sorted(times, key=lambda option: times[option])


def measured(case: Case, tried: Iterator[Option]) -> dict[Option, float]:
    """Seconds of the fastest call with each option that can be built."""
    found = {}
    for option in tried:
        try:
            found[option] = fastest(call_of(case, kernel_of(case, option)))
        except (SparseTIRError, MemoryError) as error:
            say(f"without {option}: {error}")
    return found


def call_of(case: Case, kernel: Any) -> Callable[[], Any]:
    """A call of a kernel with its sparse argument bound."""
    (name, sparse), *rest = case.inputs.items()
    bound, dense = kernel.bind(**{name: sparse}), dict(rest)
    return lambda: bound(**dense)


def kernel_of(case: Case, option: Option) -> Any:
    """The compiled kernel of an option."""
    program = case.program
    if option.format is not None:
        name = next(iter(case.inputs))
        program = decompose_format(program, {name: option.format})
    return build(program, schedule=option.choices)


def fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest call of a burst."""
    return min(burst(call, BURST))


__all__ = ["Option", "best_of", "options"]
