# SPDX-License-Identifier: Apache-2.0
"""Kernels from programs: dispatch on the kind of program, and conversion to a format that pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from tvm import ir, s_tir, tirx

from sparsetir.codegen.cache import Compiled, CompiledWithResultCheck, compile_cached
from sparsetir.codegen.pipeline import check_schedule
from sparsetir.codegen.target import make_target
from sparsetir.errors import ArgumentTypeError, SparseTIRError, VerifyError
from sparsetir.formats.heuristics import Conversion, choose_format
from sparsetir.interop import is_sparse
from sparsetir.ir.rules import stores
from sparsetir.ir.verifier import verify, warn_of_doubtful, warn_of_other_meanings
from sparsetir.ir.views import decode
from sparsetir.lower import describe_argument, single
from sparsetir.lower.annotations import FINITE
from sparsetir.runtime.bound import BoundKernel
from sparsetir.runtime.kernel import Convert, Kernel
from sparsetir.runtime.validation import GuardedBound, NonFiniteGuard
from sparsetir.sparse_output import AccumulatorOptions, Accumulators, is_assembled
from sparsetir.sparse_output.blocks import assembled_kernel
from sparsetir.sparse_output.kernel import SparseOutputKernel
from sparsetir.transform.decompose import decompose_format
from sparsetir.utils.arguments import as_count, as_flag
from sparsetir.utils.memory import uncollected
from sparsetir.utils.threads import get_num_threads

if TYPE_CHECKING:
    from sparsetir.runtime.composed import BoundComposedKernel

# From what users call a program to a kernel.


@uncollected
def make_kernel(
    func: Any,
    target: Any = None,
    *,
    schedule: Any = None,
    expected_calls: int | None = None,
    assume_finite: bool = False,
    convert: Convert | None = None,
) -> Any:
    """Compile a program; see `sparsetir.build`.

    Parameters
    ----------
    convert : callable, optional
        See `Kernel`.
    """
    get_num_threads()
    assume_finite = as_flag(assume_finite, "assume_finite")
    expected_calls = None if expected_calls is None else as_count(expected_calls, "expected_calls")
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
    program = program.with_attr(FINITE, True) if assume_finite else program
    return _kernel(
        program, target, schedule, expected_calls=expected_calls, assume_finite=assume_finite, convert=convert
    )


def _transformed(func: Any) -> Any:
    """Return the decomposition or the program that a stage-I schedule or a decomposition stands for."""
    from sparsetir.transform import Schedule
    from sparsetir.transform.decompose import Decomposition

    program = (func.decomposition or func.func) if isinstance(func, Schedule) else func
    if isinstance(program, (tirx.PrimFunc, Decomposition)):
        return program
    expected = "build takes a program: a PrimFunc, an IRModule, a schedule or a decomposition"
    how = ", which is called as it is" if isinstance(getattr(func, "func", None), tirx.PrimFunc) else ""
    raise ArgumentTypeError(f"{expected}, got {describe_argument(func)}{how}")


def _check_stores(program: tirx.PrimFunc) -> None:
    """Raise where a program declares axes and buffers, and stores nothing."""
    if decode(program).axes and not stores(program.body):
        name = program.attrs["global_symbol"]
        how = "store results in a T.sp_iter; what only describes a format goes into a FormatRewriteRule"
        raise VerifyError(f"program {name} stores nothing: {how}")


def _composed(decomposition: Any, target: Any, schedule: Any, make: type[Compiled] = Compiled) -> Any:
    from sparsetir.runtime.composed import ComposedKernel

    verify(decomposition.func)
    # Not `build`: what is unusual about loops over pieces is not the user's doing.
    compile_one = lambda func, covered: _kernel(single(func), target, schedule, make, covered=covered)  # noqa: E731
    return ComposedKernel(decomposition, compile_one)


def _assembled(program: tirx.PrimFunc, target: Any, schedule: Any) -> SparseOutputKernel:
    if schedule is None:
        return assembled_kernel(program, target)
    if not isinstance(schedule, Accumulators):
        name, kind = program.attrs["global_symbol"], type(schedule).__name__
        expected = "its schedule is a sparsetir.Accumulators"
        raise ArgumentTypeError(f"{name} computes the pattern of its results: {expected}, got {kind}")
    return assembled_kernel(program, target, AccumulatorOptions(accumulators=schedule))


def _kernel(
    program: tirx.PrimFunc, target: Any, schedule: Any, make: type[Compiled] = Compiled, **facts: Any
) -> Kernel:
    """Return the kernel of a program that was checked."""
    check_schedule(schedule)
    return Kernel(program, compile_cached(program, make_target(target, program), schedule, make), **facts)


# Kernels over other formats than their own, where `sparsetir.formats.heuristics` or the cost model finds some that pay.


Judge: TypeAlias = Callable[..., "Sequence[Conversion]"]


def bound_over_others(
    kernel: Kernel,
    fixed: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    calls: float,
    seconds: float | None = None,
    plain: Callable[..., Any] | None = None,
    judge: Judge | None = None,
) -> list[BoundComposedKernel | BoundKernel | GuardedBound]:
    """Return bound kernels over formats that may suit the fixed matrix, or with other schedules, the likeliest first.

    There are none where its own format is best as it is, or where it is not the only sparse argument.

    A call takes `seconds` over the matrix as it is. `plain` makes calls whose arguments are not finite, where a
    format needs that. `judge` has the last word on what the rules say: see `sparsetir.tuning.predict.chosen`.
    """
    matrices = {name: value for name, value in {**fixed, **arguments}.items() if is_sparse(value)}
    if len(matrices) != 1 or set(matrices) - set(fixed):
        return []
    ((name, _),) = matrices.items()
    conversions = _conversions_for(kernel, name, {**fixed, **arguments}, calls=calls, seconds=seconds, judge=judge)
    bound_kernels = (_bound_over(kernel, fixed, name, conversion, plain) for conversion in conversions)
    return [bound for bound in bound_kernels if bound is not None]


def _bound_over(
    kernel: Kernel, fixed: Mapping[str, Any], name: str, conversion: Conversion, plain: Callable[..., Any] | None
) -> BoundComposedKernel | BoundKernel | GuardedBound | None:
    """Return a bound kernel over a format; None where the program cannot be written over it."""
    if conversion.format is None:
        return BoundKernel(Kernel(kernel.func, kernel.compiled, preferred=conversion.choices), dict(fixed))
    try:
        parts = decompose_format(kernel.func, {name: conversion.format})
        watch = None if kernel.assume_finite else NonFiniteGuard.over(parts, kernel.signature)
        if watch is not None:
            watch.in_kernel = watch.suits_kernel
        is_checked = watch is not None and watch.in_kernel
        other: Any = _composed(parts, kernel.target, None, CompiledWithResultCheck if is_checked else Compiled)
        other.kernel.preferred = conversion.choices
        bound = other.bind(**fixed) if other.has_plain_results else None
    except SparseTIRError:
        return None
    # Without zeros between the entries none is multiplied.
    if watch is not None and not is_checked and other.convert(name, fixed[name]).padding == 0:
        watch = None
    if bound is None or watch is None:
        return bound
    if plain is not None:
        return GuardedBound(bound, lambda: plain, watch)
    return GuardedBound(bound, lambda: BoundKernel(Kernel(kernel.func, kernel.compiled), dict(fixed)), watch)


def conversion_for(
    kernel: Kernel, name: str, arguments: Mapping[str, Any], *, calls: float, judge: Judge | None = None
) -> Conversion | None:
    """Return the format to which a matrix is converted for calls to come, and its schedule; None: the program's own.

    Parameters
    ----------
    kernel : Kernel
    name : str
        Of the only sparse argument.
    arguments : mapping of str to object
        Of the first call.
    calls : float
        That are to come.
    judge : callable, optional
        See `bound_over_others`.
    """
    conversions = _conversions_for(kernel, name, arguments, calls=calls, seconds=None, judge=judge)
    return conversions[0] if conversions else None


def _conversions_for(
    kernel: Kernel,
    name: str,
    arguments: Mapping[str, Any],
    *,
    calls: float,
    seconds: float | None,
    judge: Judge | None,
) -> list[Conversion]:
    """Return what may pay for a matrix within so many calls, the likeliest first; see `conversion_for`."""
    matrix = arguments[name]
    if name not in kernel.signature.buffers:
        return []
    shapes = {other: np.shape(value) for other, value in arguments.items() if other != name}
    ruled = None
    if len(matrix.shape) == 2:
        ruled = choose_format(kernel.signature.program, matrix, shapes, calls=calls, seconds=seconds)
    conversions: Sequence[Conversion] = [] if ruled is None or not _pays(ruled, calls) else [ruled]
    if judge is not None:
        ruled = conversions[0] if conversions else None
        conversions = judge(kernel, matrix, arguments, ruled, calls=calls, seconds=seconds)
    return [conversion for conversion in conversions if _pays(conversion, calls)]


def _pays(conversion: Conversion, calls: float) -> bool:
    return conversion.calls <= calls


__all__ = ["Judge", "bound_over_others", "conversion_for", "make_kernel"]
