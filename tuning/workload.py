# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call, ready for any compiled form of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.signature import argument_list
from sparsetir.utils.buffers import aligned

Function = Callable[..., Any]
Call = Callable[[], Any]


class Workload:
    """The arguments of one call, ready to be passed to any compiled form of a program.

    Arrays that the program writes are copies: the caller's are not touched.

    Parameters
    ----------
    kernel : Kernel
    inputs : dict of str to object
        By name, as for a call.
    like : Workload, optional
        Of the same arguments stored otherwise: its results are written to, and what they held before is its to say.
    """

    def __init__(self, kernel: Kernel, inputs: dict[str, Any], *, like: Workload | None = None) -> None:
        self.signature = kernel.signature
        self.before: dict[str, np.ndarray] = {}
        results = like.written if like is not None else None
        self.args = kernel.prepare({**inputs, **self._new(kernel, results)})
        # Where an operand begins decides more than most choices, and is not the same in two processes.
        arrays, dense = self.args.arrays, {str(b.storage.name) for b in self.signature.buffers.values() if b.is_dense}
        read = (dense & set(arrays)) - set(self.signature.effects.written)
        self.args = replace(self.args, arrays={**arrays, **{name: aligned(arrays[name]) for name in read}})
        if results is None:
            self._take({name: aligned(self.args.arrays[name].copy()) for name in self.signature.effects.written})
        else:
            self._take({name: results[name] for name in self.signature.effects.written})
        if like is not None:  # runs have changed the arrays meanwhile
            self.before = {name: like.before[name] for name in self.before}

    @staticmethod
    def _new(kernel: Kernel, results: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        """Return those of the given results that the kernel would make."""
        made = {kernel.signature.shown(n): n for n in kernel.signature.outputs}
        return {shown: results[n] for shown, n in made.items()} if results is not None else {}

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        """Use other arrays for some of the parameters."""
        self.args = replace(self.args, arrays={**self.args.arrays, **arrays})
        self.before = {name: self.args.arrays[name].copy() for name in self.signature.effects.updated}
        values = argument_list(self.signature, self.args)
        self.ready = {param.name: value for param, value in zip(self.signature.params, values, strict=True)}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What is passed for each array parameter."""
        return self.args.arrays

    @property
    def written(self) -> dict[str, np.ndarray]:
        """The arrays that a run writes."""
        return {name: self.arrays[name] for name in self.signature.effects.written}

    @property
    def feat(self) -> int | None:
        """Length of a row of the first output, if it is a dense one of two dimensions or more."""
        for name, array in self.written.items():
            holder = self.signature.holder.get(name)
            is_dense = holder is None or holder.axes[-1].is_dense
            return int(array.shape[-1]) if array.ndim > 1 and is_dense else None
        return None

    def call(self, function: Function, names: list[str]) -> Call:
        """Return one call of a function whose parameters have these names."""
        return partial(function, *(self.ready[name] for name in names))

    def reset(self) -> None:
        """Undo runs: what is updated is as before, what is surely written is poisoned, other outputs are zero."""
        for name, array in self.written.items():
            if name in self.before:
                array[...] = self.before[name]
            elif name in self.signature.effects.covered:
                array.fill(np.nan if array.dtype.kind in "fcV" else 113)
            else:
                array.fill(0)

    def fresh(self, call: Call) -> dict[str, np.ndarray]:
        """Return what one call on a clean slate writes; the next run writes over it."""
        self.reset()
        call()
        return self.written

    def absolute(self) -> Workload:
        """Return the workload with the absolute values of all floating-point arrays."""
        other = copy(self)
        written = self.signature.effects.written
        other._take({n: a.copy() for n, a in self.arrays.items() if n in written})
        other._take({n: np.abs(a) for n, a in other.arrays.items() if a.dtype.kind in "fcV"})
        return other


__all__ = ["Call", "Function", "Workload"]
