# SPDX-License-Identifier: Apache-2.0
"""From what users call a program to a kernel."""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from sparsetir.assemble import Accumulators, Options, is_assembled
from sparsetir.call.assembled import AssembledKernel
from sparsetir.call.blocked import assembled_kernel
from sparsetir.call.kernel import Convert, Kernel
from sparsetir.compile.cache import compile_cached
from sparsetir.compile.target import make_target
from sparsetir.doubtful import warn_of_doubtful
from sparsetir.errors import ArgumentError, ArgumentTypeError, VerifyError
from sparsetir.ir import decode
from sparsetir.lower import called, single
from sparsetir.lower.marks import FINITE
from sparsetir.pauses import uncollected
from sparsetir.rules import stores
from sparsetir.scalars import as_whole
from sparsetir.threads import get_num_threads
from sparsetir.upstream import warn_of_other_meanings
from sparsetir.verify import verify


@uncollected
def make_kernel(
    func: Any,
    target: Any = None,
    *,
    schedule: Any = None,
    calls: int | None = None,
    finite: bool = False,
    convert: Convert | None = None,
) -> Any:
    """Compile a program; see `sparsetir.build`.

    Parameters
    ----------
    convert : callable, optional
        See `Kernel`.
    """
    get_num_threads()
    calls = as_whole(calls)
    if calls is not None and (isinstance(calls, bool) or not isinstance(calls, int) or calls < 1):
        raise ArgumentError(f"calls must be a positive number of calls, found {calls!r}")
    if not isinstance(func, (tirx.PrimFunc, ir.IRModule, s_tir.Schedule)):
        func = _transformed(func)
    if not isinstance(func, (tirx.PrimFunc, ir.IRModule, s_tir.Schedule)):
        return _composed(func, target, schedule)
    if isinstance(func, s_tir.Schedule):
        func, schedule = func.mod, func
    program = single(func)
    verify(program)
    if is_assembled(decode(program)):
        return _assembled(program, target, schedule)
    warn_of_other_meanings(decode(program), stacklevel=4)
    warn_of_doubtful(decode(program), stacklevel=4)
    _check_stores(program)
    program = program.with_attr(FINITE, True) if finite else program
    return _kernel(program, target, schedule, calls=calls, finite=finite, convert=convert)


def _transformed(func: Any) -> Any:
    """The decomposition or the program that a stage-I schedule or a decomposition stands for."""
    from sparsetir.transform import Schedule
    from sparsetir.transform.decompose import Decomposition

    found = (func.decomposition or func.func) if isinstance(func, Schedule) else func
    if isinstance(found, (tirx.PrimFunc, Decomposition)):
        return found
    expected = "build takes a program: a PrimFunc, an IRModule, a schedule or a decomposition"
    how = ", which is called as it is" if isinstance(getattr(func, "func", None), tirx.PrimFunc) else ""
    raise ArgumentTypeError(f"{expected}; found {called(func)}{how}")


def _check_stores(program: tirx.PrimFunc) -> None:
    """Raise where a program declares axes and buffers, and stores nothing."""
    if decode(program).axes and not stores(program.body):
        name = program.attrs["global_symbol"]
        how = "store results in a T.sp_iter; what only describes a format goes into a FormatRewriteRule"
        raise VerifyError(f"program {name} stores nothing: {how}")


def _composed(decomposition: Any, target: Any, schedule: Any) -> Any:
    from sparsetir.call.composed import ComposedKernel

    verify(decomposition.func)
    # Not `build`: what is unusual about loops over pieces is not the user's doing.
    return ComposedKernel(decomposition, lambda func, covered: _kernel(single(func), target, schedule, covered=covered))


def _assembled(program: tirx.PrimFunc, target: Any, schedule: Any) -> AssembledKernel:
    if schedule is None:
        return assembled_kernel(program, target)
    if not isinstance(schedule, Accumulators):
        name, found = program.attrs["global_symbol"], type(schedule).__name__
        expected = "its schedule is a sparsetir.Accumulators"
        raise ArgumentTypeError(f"{name} computes the pattern of its results: {expected}; found {found}")
    return assembled_kernel(program, target, Options(accumulators=schedule))


def _kernel(program: tirx.PrimFunc, target: Any, schedule: Any, **facts: Any) -> Kernel:
    """The kernel of a program that was checked."""
    return Kernel(program, compile_cached(program, make_target(target, program), schedule), **facts)


__all__ = ["make_kernel"]
