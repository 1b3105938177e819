# SPDX-License-Identifier: Apache-2.0
"""What one program of the corpus is: its text, its inputs and its oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from corpus.data import KINDS

FLOATS = ("float32", "float64")
Arguments = dict[str, Any]
Make = Callable[[str, str], Any]


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes
    ----------
    name : str
        Unique in the corpus.
    make : callable
        ``(dtype, idtype) -> PrimFunc``; sizes are parameters of the program.
    inputs : callable
        ``(rng, kind, dtype, idtype) ->`` keyword arguments of the kernel: storage arrays by handle name and sizes by
        parameter name. Outputs are absent, except those that are also read.
    expected : callable
        ``(inputs) ->`` the outputs in the order of the script's parameters, in storage shape.
    tolerance : float
        Relative to the magnitude of the operands, for float32; see `tolerance_for`.
    output_names : tuple of str
        The outputs' handle names.
    kinds : tuple of str
        The structures the program is meant for.
    dtypes : tuple of str
        The value types it is meant for.
    """

    name: str
    make: Make
    inputs: Callable[[np.random.Generator, str, str, str], Arguments]
    expected: Callable[[Arguments], tuple[np.ndarray, ...]]
    tolerance: float
    output_names: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS
    dtypes: tuple[str, ...] = FLOATS

    def tolerance_for(self, dtype: str) -> float:
        """`tolerance` scaled to the precision of `dtype`; integers and bools compare exactly."""
        if "float" not in dtype:
            return 0.0
        return self.tolerance * float(ml_dtypes.finfo(dtype).eps) / float(ml_dtypes.finfo("float32").eps)


def case(
    inputs: Callable[[np.random.Generator, str, str, str], Arguments],
    expected: Callable[[Arguments], Any],
    *outputs: str,
    **options: Any,
) -> Callable[[Make], Case]:
    """Make a `Case` of the decorated ``(dtype, idtype) -> PrimFunc``; it takes the function's name."""

    def results(args: Arguments) -> tuple[np.ndarray, ...]:
        found = expected(args)
        return found if isinstance(found, tuple) else (found,)

    def wrap(make: Make) -> Case:
        name = options.pop("name", make.__name__)
        return Case(name, make, inputs, results, options.pop("tolerance", 2e-5), outputs, **options)

    return wrap
