# SPDX-License-Identifier: Apache-2.0
"""Compile candidates and time them on the arguments of one call, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from sparsetir.build import Compiled, make_target, scheduled
from sparsetir.kernel import Kernel, _passed
from sparsetir.lower import TO_STAGE_2, TO_STAGE_3, as_module, run
from sparsetir.schedules import Choices
from sparsetir.tuning.reference import Reference

BURST_SECONDS = 0.015
# Two calls of a candidate this many times slower than the best are enough.
HOPELESS = 3.0
ROUNDS, FEWEST_ROUNDS, DUEL_SECONDS = 5, 2, 2.0

Function = Callable[..., Any]
Call = Callable[[], Any]


class Workload:
    """The arguments of one call, ready to be passed to any compiled form of a program.

    Arrays that the program writes are copies: the caller's are not touched.
    """

    def __init__(self, kernel: Kernel, inputs: dict[str, Any]) -> None:
        self.signature = kernel.signature
        self.args = kernel._prepare(inputs)
        self._take({name: self.args.arrays[name].copy() for name in self.signature.effects.written})

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        """Use other arrays for some of the parameters."""
        self.args = replace(self.args, arrays={**self.args.arrays, **arrays})
        self.before = {name: self.args.arrays[name].copy() for name in self.signature.effects.updated}
        self.ready = {param.name: _passed(self.args, param) for param in self.signature.params}

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
        """One call of a function whose parameters have these names."""
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
        """What one call on a clean slate writes; the next run writes over it."""
        self.reset()
        call()
        return self.written

    def absolute(self) -> Workload:
        """The same with the absolute values of all floating-point arrays."""
        other = copy(self)
        written = self.signature.effects.written
        other._take({n: a.copy() for n, a in self.arrays.items() if n in written})
        other._take({n: np.abs(a) for n, a in other.arrays.items() if a.dtype.kind in "fcV"})
        return other


class Form:
    """A program as its candidates are compiled: lowered to stage II once.

    Parameters
    ----------
    func : PrimFunc
        At stage I.
    target : Target, str or dict, optional
    """

    def __init__(self, func: tirx.PrimFunc, target: Any) -> None:
        self.func, self.target = func, make_target(target, func)
        self.second = run(TO_STAGE_2, as_module(func))
        self.names = [str(param.name) for param in func.params]

    def compile(self, choices: Choices) -> Function:
        """Machine code for one candidate; nothing goes to the disk cache.

        The compiled checks of the arguments are left out: they were checked when the workload was made.
        """
        compiled = Compiled(self.func, self.target, choices)
        changed = scheduled(self.second, choices)
        compiled.stages = {2: changed, 3: run(TO_STAGE_3, changed)}
        with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
            compiled.compile()
        return compiled.function


@dataclass(frozen=True)
class Measurement:
    """Seconds of a candidate, or the reason why there are none."""

    seconds: float | None = None
    median: float | None = None
    spread: float | None = None
    error: str | None = None


def burst(call: Call, seconds: float, *, hopeless: float = float("inf")) -> list[float]:
    """Times of consecutive calls for about `seconds`, at least two; no more if both took `hopeless` seconds."""
    samples: list[float] = []
    clock = time.perf_counter
    end = clock() + seconds
    while len(samples) < 2 or clock() < end:
        start = clock()
        call()
        samples.append(clock() - start)
        if len(samples) == 2 and min(samples) >= hopeless:
            break
    return samples


def summary(samples: list[float]) -> Measurement:
    """The fastest call, the median, and how far the quartiles are apart."""
    ordered = sorted(samples)
    middle, count = median(ordered), len(ordered)
    return Measurement(ordered[0], middle, (ordered[3 * count // 4] - ordered[count // 4]) / middle)


def duel(cases: Mapping[Any, Call], *, seconds: float = 0.02) -> dict[Any, float]:
    """Time near ties: all in turn, several rounds (fewer of slow calls), so that a busy machine favours none.

    Returns
    -------
    dict of float
        For each case its fastest call.
    """
    fastest: dict[Any, float] = dict.fromkeys(cases, float("inf"))
    end = time.perf_counter() + DUEL_SECONDS
    for turn in range(ROUNDS):
        if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for name, call in cases.items():
            fastest[name] = min(fastest[name], *burst(call, seconds))
    return fastest


def reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:300]


class Measurer:
    """Measures candidates of one form of a program on one workload.

    Parameters
    ----------
    form : Form
    workload : Workload
    reference : Reference
        What a candidate must compute.
    """

    def __init__(self, form: Form, workload: Workload, reference: Reference) -> None:
        self.form, self.workload, self.reference = form, workload, reference
        self.best = float("inf")

    def __call__(self, batch: list[Choices]) -> Iterator[tuple[Choices, Measurement]]:
        """Compile, check and time candidates one after another: LLVM allows no two compilations at a time."""
        for choices in batch:
            call = self.call(choices)
            yield choices, call if isinstance(call, Measurement) else self.measured(call)

    def call(self, choices: Choices) -> Call | Measurement:
        """A call of a candidate, or why there is none."""
        # Whatever a candidate does wrong costs that candidate, not the search.
        try:
            return self.workload.call(self.form.compile(choices), self.form.names)
        except Exception as error:
            return Measurement(error=reason(error))

    def measured(self, call: Call) -> Measurement:
        """Check what a candidate computes, then time it."""
        try:
            wrong = self.reference.disagreement(self.workload.fresh(call))
            if wrong is not None:
                return Measurement(error=f"wrong result: {wrong}")
            samples = burst(call, BURST_SECONDS, hopeless=HOPELESS * self.best)
        except Exception as error:
            return Measurement(error=reason(error))
        self.best = min(self.best, *samples)
        return summary(samples)
