# SPDX-License-Identifier: Apache-2.0
"""The best of a coarse sweep: every format that suits the pattern, and a few choices of the sketches for each.

Nothing depends on a matrix but its pattern; a program, format and set of choices is compiled once for all matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sparsetir
from sparsetir.bench.inputs import say
from sparsetir.bench.timing import burst
from sparsetir.build import make_target
from sparsetir.errors import SparseTIRError
from sparsetir.formats.candidates import candidates
from sparsetir.formats.coordinates import COO, CSF
from sparsetir.formats.format import Format
from sparsetir.formats.layouts import CSC, CSR, Ragged
from sparsetir.schedules import Choices, untuned
from sparsetir.tuning.operands import Case

MOST_VALUES = 2.0  # stored for each entry
BURST = 0.03  # seconds of calls
CLEARLY = 0.97  # of the time of the best so far
# For matrices. What they are for: the same loops over all rows at once, or in an order that has no row to share out.
LEFT_OUT = (CSR, CSC, COO, CSF, Ragged)


@dataclass(frozen=True)
class Option:
    """A format (None: the program as it is) and choices (None: those of an untuned kernel)."""

    format: Format | None
    choices: Choices | None

    def __str__(self) -> str:
        named = "csr()" if self.format is None else repr(self.format)
        return f"{named}, untuned" if self.choices is None else f"{named}, {self.choices}"


def options(case: Case) -> Iterator[Option]:
    """What is tried for a case."""
    base = untuned(case.program, make_target(None, case.program))
    yield Option(None, None)
    for changes in (
        {"prefetch": 8},
        {"prefetch": 16, "unroll": 2},
        {"tile": 2 * base.tile},
        {"tile": max(base.tile // 2, 8)},
        {"tile": 2 * base.tile, "prefetch": 8},
        {"unroll": 4},
        {"chunks": 0},
        {"lanes": 4},
        {"lanes": 8},
    ):
        yield Option(None, replace(base, **changes))
    is_matrix = len(case.sparse.shape) == 2
    for format in candidates(sparsetir.pattern(case.sparse), most=MOST_VALUES):
        if not (is_matrix and isinstance(format, LEFT_OUT)):
            yield Option(format, None)


def best_of(case: Case) -> tuple[Any, Option] | None:
    """The fastest kernel and how it came about; None if none can be built."""
    (name, sparse), *rest = case.inputs.items()
    found: tuple[float, Any, Option] | None = None
    for option in options(case):
        try:
            kernel = kernel_of(case, option)
            seconds = fastest(kernel.bind(**{name: sparse}), dict(rest))
        except (SparseTIRError, MemoryError) as error:
            say(f"without {option}: {error}")
            continue
        if found is None or seconds < CLEARLY * found[0]:
            found = seconds, kernel, option
    return None if found is None else found[1:]


def kernel_of(case: Case, option: Option) -> Any:
    """The compiled kernel of an option."""
    program = case.program
    if option.format is not None:
        name = next(iter(case.inputs))
        program = sparsetir.decompose_format(program, {name: option.format})
    return sparsetir.build(program, schedule=option.choices)


def fastest(bound: Any, dense: dict[str, Any]) -> float:
    """Seconds of the fastest call of a burst."""
    return min(burst(lambda: bound(**dense), BURST))


__all__ = ["Option", "best_of", "options"]
