# SPDX-License-Identifier: Apache-2.0
"""The values of a result whose pattern is known, for operands that have new values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sparsetir.call.arguments import Arguments
from sparsetir.call.passing import argument_list, as_passed
from sparsetir.call.pattern_results import Pattern
from sparsetir.call.workspace import KEPT_BYTES, Work, passed, popped, tensor

if TYPE_CHECKING:
    from sparsetir.call.assembled import AssembledKernel

FEW_BYTES = 1 << 14  # that are compared as bytes, which numpy takes longer to begin with


class Refill:
    """Computes values for one pattern, of which every call has the index arrays.

    Parameters
    ----------
    kernel : AssembledKernel
    args : Arguments
        Of a call with the pattern.
    """

    def __init__(self, kernel: AssembledKernel, args: Arguments) -> None:
        self.kernel = kernel
        values = {str(b.storage.name) for b in kernel.signature.buffers.values()}
        self.structure = {name: array.copy() for name, array in args.arrays.items() if name not in values}
        held = Arguments(sizes=args.sizes, arrays={**args.arrays, **self.structure})
        self.pattern: Pattern = kernel.assemble(args)
        self.has_values = kernel.can_refill(args)
        if not self.has_values:
            return
        call, results = kernel.begin(held), {r.storage for r in kernel.assembly.results}
        params = [p for p in kernel.signature.params if p.name not in results]
        self.places = {p.name: (at, p.dtype) for at, p in enumerate(params) if p.name in values}
        # Each call brings values of its own: those of the first operands are not kept alive.
        listed = zip(params, argument_list(kernel.signature, held, without=results), strict=True)
        self.common = [None if p.name in self.places else tensor(a) for p, a in listed]
        self.split = [tensor(a) for a in call.split[len(call.common) :]]
        self.entries = [len(self.pattern.keys), *map(tensor, (self.pattern.indptr, self.pattern.keys))]
        self.call = replace(call, common=[])
        self._spare: list[Work] = []

    def other(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        """The first index array that is another one than those of the pattern; None if there is none."""
        return next((name for name, held in self.structure.items() if not is_same(held, arrays[name])), None)

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Values for those of the operands, in arrays by the names of parameters."""
        kernel, call = self.kernel, self.call
        values = kernel.entries(len(self.pattern.keys), call.sizes)[1]
        if not call.rows or not self.entries[0]:
            return values
        ready = list(self.common)
        for name, (at, dtype) in self.places.items():
            ready[at] = as_passed(arrays[name], dtype)
        work = next(popped(self._spare), None) or kernel.take(call)
        function = kernel.function("values")
        function(*ready, *self.split, *self.entries, *map(passed, values), *work.values_params)
        if work.nbytes <= KEPT_BYTES and not self._spare:
            self._spare.append(work)
        return values


def is_same(held: np.ndarray, array: np.ndarray) -> bool:
    """Whether an array has the dtype and the elements of another one."""
    if held.shape != array.shape or held.dtype != array.dtype:
        return False
    return held.tobytes() == array.tobytes() if held.nbytes <= FEW_BYTES else np.array_equal(held, array)


__all__ = ["Refill", "is_same"]
