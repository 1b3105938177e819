# SPDX-License-Identifier: Apache-2.0
"""Our kernels for a case: each kind is a function from a case to kernels by name, and a line in a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.bench.sweep import best_of
from sparsetir.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.tuning import tune_sparse
from sparsetir.utils.buffers import aligned
from sparsetir.workloads.inputs import Case, reason, say

OUTPUTS = {"spmm": "C", "spmv": "y", "sddmm": "O", "mttkrp": "D"}
MANY_TRIALS = 10_000
CALLS = 1000  # announced to an untuned kernel


@dataclass(frozen=True)
class MeasurementPlan:
    """How to measure.

    Parameters
    ----------
    tune : float
        Seconds of tuning before a case; 0 for none.
    database : Path, optional
        Where tuning keeps its trials.
    rounds : int
        Turns of each kernel and peer.
    rest : float
        Seconds of sleep before each turn.
    repeat : int
        How often a case that other work disturbed is measured again.
    sweep : bool
        Whether formats and choices are swept for the best kernel.
    """

    tune: float = 0.0
    database: Path | None = None
    rounds: int = 3
    rest: float = 0.25
    repeat: int = 2
    sweep: bool = False


Kind = Callable[[Case, MeasurementPlan], dict[str, Any]]


def untuned(case: Case, _plan: MeasurementPlan) -> dict[str, Any]:
    """Return what `sparsetir.build` makes of the program for many calls."""
    return {"untuned": build(case.program, expected_calls=CALLS)}


def tuned(case: Case, plan: MeasurementPlan) -> dict[str, Any]:
    """Return what a search on the operands finds, where one is asked for."""
    if not plan.tune:
        return {}
    budget: dict[str, Any] = {"max_trials": MANY_TRIALS, "max_seconds": plan.tune}
    result = tune_sparse(case.program, case.inputs, database=plan.database, progress=False, **budget)
    return {"tuned": result.kernel}


def best(case: Case, plan: MeasurementPlan) -> dict[str, Any]:
    """Return the fastest of a coarse sweep, where one is asked for."""
    fastest = best_of(case) if plan.sweep else None
    if fastest is None:
        return {}
    kernel, option = fastest
    say(f"{case.op}: best of the sweep: {option}")
    return {"best": kernel}


# In the order of the columns.
KINDS: list[Kind] = [untuned, best, tuned]
# Kinds whose time is set in relation to the peers'.
RATED = ("untuned", "tuned", "best", "ours")


def kernels(case: Case, plan: MeasurementPlan, failures: list[str]) -> dict[str, Any]:
    """Every kernel of ours that is measured on a case.

    Parameters
    ----------
    case : Case
    plan : MeasurementPlan
    failures : list of str
        What went wrong in a kind is added to it; the others are still made.

    Returns
    -------
    dict of str to Kernel
        By the name of its column; a name stands for the same way of choosing a schedule in every case. Those in `RATED`
        are compared with the peers.
    """
    kernels_by_kind: dict[str, Any] = {}
    for kind in KINDS:
        try:
            kernels_by_kind |= kind(case, plan)
        except Exception as error:  # one kind must not end a run over many cases
            failures.append(f"{kind.__name__}: {reason(error)}")
    return kernels_by_kind


def our_calls(kernels: Mapping[str, Any], case: Case) -> dict[str, Callable[[], np.ndarray]]:
    """Return calls of several kernels, all in the same way: see `our_call`."""
    returns = not all(_takes_result(kernel, case) for kernel in kernels.values())
    return {name: our_call(kernel, case, returns=returns) for name, kernel in kernels.items()}


def _takes_result(kernel: Any, case: Case) -> bool:
    """Return whether a kernel writes to an array that is passed.

    Kernels that store the values of O in another format have no such array.
    """
    return case.op != "sddmm" or isinstance(getattr(kernel, "best", kernel), Kernel)


def our_call(kernel: Any, case: Case, *, returns: bool = False) -> Callable[[], np.ndarray]:
    """Return a call as a user makes it in a loop: the sparse operand bound, the memory of the result used again.

    It returns the result, for sddmm the values of O. Until the first call the memory holds NaN. For sddmm a kernel over
    another format than CSR returns a new sparse array, as it has no other way to hand out its values; others do so if
    `returns`.
    """
    (name, sparse), *remaining = case.inputs.items()
    bound, dense = kernel.bind(**{name: sparse}), dict(remaining)
    if case.op == "sddmm" and (returns or not _takes_result(kernel, case)):
        return lambda: bound(**dense).data
    out = aligned(np.full(output_shape(case), np.nan, np.float32))
    arguments = {**dense, kernel.signature.outputs[0] if case.op == "sddmm" else OUTPUTS[case.op]: out}

    def call() -> np.ndarray:
        bound(**arguments)
        return out

    return call


def output_shape(case: Case) -> tuple[int, ...]:
    """Of the array that holds the result."""
    if case.op == "sddmm":
        return (case.sparse.nnz,)
    last = next(reversed(case.inputs.values()))
    return (case.sparse.shape[0], *last.shape[1:])


__all__ = ["KINDS", "RATED", "Kind", "MeasurementPlan", "kernels", "our_call", "our_calls"]
