# SPDX-License-Identifier: Apache-2.0
"""What can be chosen for a program: the sketches' choices, as far as they make a difference to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir import sizes
from sparsetir.build import scheduled
from sparsetir.errors import SparseTIRError
from sparsetir.ir import Program, const
from sparsetir.schedules import Choices

Values = Mapping[str, tuple[int, ...]]

# Measured before anything is searched, each a change of what `start` gives.
PORTFOLIO: tuple[dict[str, int], ...] = (
    {},
    {"chunks": 16},
    {"prefetch": 8},
    {"tile": 128},
    {"tile": 32},
    {"prefetch": 16, "chunks": 16, "unroll": 2},
    {"tile": 128, "unroll": 4},
    {"panel": 64},
    {"lanes": 4},
    {"lanes": 8},
    {"chunks": 0},
)


def changes_code(second: ir.IRModule, name: str, values: tuple[int, ...], target: Any = None) -> bool:
    """Whether choice `name` makes a difference to the stage-II module scheduled for a target."""
    default = Choices()
    other = next((value for value in values if value != getattr(default, name)), None)
    if other is None:
        return False
    try:
        changed = scheduled(second, replace(default, **{name: other}), target)
    except SparseTIRError:
        return True
    return not tvm_ffi.structural_equal(scheduled(second, default, target), changed)


def open_choices(
    second: ir.IRModule, *, threads: int, feat: int | None = None, target: Any = None
) -> dict[str, tuple[int, ...]]:
    """The values to try for each choice that makes a difference to a stage-II module.

    Parameters
    ----------
    second : IRModule
        Lowered to stage II, not scheduled.
    threads : int
        Of the parallel loops.
    feat : int, optional
        Length of a dense output row.
    target : Target, optional
        As `make_target` gives it for the program; without it no sum is reordered.
    """
    values = Choices.space(threads=threads, feat=feat)
    return {name: found for name, found in values.items() if changes_code(second, name, found, target)}


def start(values: Values) -> Choices:
    """The default choices, or where the space has not that value the largest one below it."""
    default = Choices().as_dict()
    nearest = {n: max((v for v in found if v <= default[n]), default=found[0]) for n, found in values.items()}
    return Choices(**nearest)


def points(values: Values) -> list[Choices]:
    """Every combination, in a fixed order."""
    return [Choices(**dict(zip(values, row, strict=True))) for row in product(*values.values())]


def portfolio(values: Values) -> list[Choices]:
    """The entries of `PORTFOLIO` that lie in the space, without repetition."""
    base = start(values)
    inside = [{n: v for n, v in entry.items() if v in values.get(n, ())} for entry in PORTFOLIO]
    return list(dict.fromkeys(replace(base, **entry) for entry in inside))


def free_sizes(program: Program) -> list[str]:
    """Size symbols that no sparse or ragged axis depends on, such as the number of features."""
    bound: set[str] = set()
    free: list[str] = []
    roots = {a.root for a in program.axes.values() if a.parent is not None or not a.is_dense}
    for axis in program.axes.values():
        names = [n for e in (axis.length, axis.count, axis.width) if e is not None for n in sizes.symbols(e)]
        if axis.root in roots:
            bound.update(names)
        free += names
    scalars = [str(p.name) for p in program.func.params if not tirx.is_buffer_var(p)]
    return [name for name in scalars if name in free and name not in bound]


def fixed(program: Program, values: Mapping[str, int]) -> tirx.PrimFunc:
    """The program with some sizes filled in.

    rewrite: ``def spmm(b: T.Buffer(("n", "feat")), feat: T.int32)`` becomes ``def spmm(b: T.Buffer(("n", 128)))``.
    """
    params = {p: const(values[str(p.name)], str(p.ty.dtype)) for p in program.func.params if str(p.name) in values}
    return program.func.specialize(params) if params else program.func
