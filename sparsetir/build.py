# SPDX-License-Identifier: Apache-2.0
"""The public way to compile a program: by its schedule, by rules for many calls, or by the records of searches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.kernel_factory import bound_over_others, make_kernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.utils.arguments import as_flag, renamed_parameters
from sparsetir.utils.threads import get_num_threads

if TYPE_CHECKING:
    from sparsetir.transform import Schedule
    from sparsetir.transform.decompose import Decomposition


Buildable: TypeAlias = "tirx.PrimFunc | ir.IRModule | s_tir.Schedule | Schedule | Decomposition"


@renamed_parameters(calls="expected_calls", finite="assume_finite")
def build(
    func: Buildable,
    target: tvm.target.Target | str | Mapping[str, Any] | None = None,
    *,
    schedule: Any = None,
    expected_calls: int | None = None,
    database: str | Path | None = None,
    assume_finite: bool = False,
    deterministic: bool = False,
) -> Kernel:
    """Compile a program.

    Parameters
    ----------
    func : PrimFunc, IRModule with one PrimFunc, or Schedule
        The program at stage I; at stage II its buffers are called by parameter name.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.
    schedule : Choices, template, tvm.s_tir.Schedule, callable or Accumulators, optional
        How to order the loops: the row sketch's choices, a template with values, a stock schedule of the stage-II
        module, or a function that is given one and changes it. By default the sketches decide. Of a program that
        computes the pattern of its results: how its rows are collected.
    expected_calls : int, optional
        About how often a bound kernel will be called. Given that, a bound matrix is converted to another format at the
        first call where this pays within that many; its values are copied then. Rules propose the format; where the
        calls are long enough to ask, the shipped cost model may name another one of which it expects more. The next
        calls are timed in both formats, and the faster one is kept. Without it, a matrix of 16,384
        entries or more is converted on a background thread once eight calls have taken 0.2 seconds, for as many calls
        as there were; values that are changed later are seen. ``SPARSETIR_CONVERT=0`` turns that off.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`. The kernel takes for each call what the last search for such arguments ended
        with: of the same pattern and sizes, else of the same pattern over the format that was best for other sizes,
        else the untuned kernel. `schedule` may be the template whose knobs were searched. A kernel that computes
        patterns is that of the program's last search.
    assume_finite : bool
        A promise that arguments hold neither infinities nor NaN. Without it, results over formats that `expected_calls`
        or `database` chose and that store zeros between the entries are checked for NaN and infinities.
    deterministic : bool
        Never convert a bound matrix, so that equal calls give the same bits: another format may add in another order.

    Returns
    -------
    Kernel
        A `ComposedKernel` of a decomposition, a `TunedKernel` with a database; all are called alike.

    Raises
    ------
    VerifyError
        The program breaks a rule of its stage.
    ArgumentError
        The target is not a CPU.
    ArgumentTypeError
        `schedule` is something else.
    """
    if as_flag(deterministic, "deterministic") and (expected_calls is not None or database is not None):
        raise ArgumentError("deterministic=True keeps the format: leave expected_calls= and database= out")
    if database is None:
        convert = None if deterministic else partial(bound_over_others, judge=_judged)
        return make_kernel(
            func, target, schedule=schedule, expected_calls=expected_calls, assume_finite=assume_finite, convert=convert
        )
    from sparsetir.tuning.accumulators import computes_patterns, recorded_accumulators
    from sparsetir.tuning.tuned_kernel import recorded

    get_num_threads()
    if expected_calls is not None:
        raise ArgumentError("expected_calls= goes by rules and database= by measurements: give one of them")
    if not isinstance(func, (tirx.PrimFunc, ir.IRModule)):
        kind = type(func).__name__
        raise ArgumentTypeError(f"a database has records of programs as they were tuned, PrimFuncs, got {kind}")
    if computes_patterns(func):
        if schedule is not None:
            raise ArgumentError("the database decides how rows are collected: leave schedule out")
        chosen: Any = recorded_accumulators(func, target, database)
        return chosen
    tuned: Any = recorded(func, target, schedule, database, assume_finite=assume_finite)  # called like any other kernel
    return tuned


def _judged(*arguments: Any, **how: Any) -> Any:
    """Return the formats that a kernel with many calls should be tried in, by the rules and the cost model."""
    from sparsetir.tuning.predict import chosen  # with a binding, not with a build

    return chosen(*arguments, **how)


__all__ = ["build"]
