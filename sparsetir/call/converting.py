# SPDX-License-Identifier: Apache-2.0
"""A kernel over another format than its own, where `sparsetir.formats.suit` finds one that pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from sparsetir.call.bound import BoundKernel
from sparsetir.call.bound_composed import BoundComposedKernel
from sparsetir.call.finite import Watch, WatchedBound
from sparsetir.call.kernel import Kernel
from sparsetir.call.make import make_kernel
from sparsetir.errors import SparseTIRError
from sparsetir.formats.format import Format
from sparsetir.formats.suit import Conversion, suited
from sparsetir.interop import is_sparse
from sparsetir.transform.decompose import decompose_format

Judge: TypeAlias = Callable[..., "Conversion | None"]


def bound_over_another(
    kernel: Kernel, fixed: Mapping[str, Any], arguments: Mapping[str, Any], *, judge: Judge | None = None
) -> BoundComposedKernel | WatchedBound | None:
    """A bound kernel over the format that suits the fixed matrix; None where its own is best, or it is not alone.

    `judge` has the last word on what the rules say: see `sparsetir.tuning.announced.chosen`.
    """
    matrices = {name: value for name, value in {**fixed, **arguments}.items() if is_sparse(value)}
    if len(matrices) != 1 or set(matrices) - set(fixed):
        return None
    ((name, matrix),) = matrices.items()
    format = format_for(kernel, name, {**fixed, **arguments}, calls=kernel.calls or 0, judge=judge)
    if format is None:
        return None
    try:
        parts = decompose_format(kernel.func, {name: format})
        other: Any = make_kernel(parts, kernel.target)
        bound = other.bind(**fixed) if other.has_plain_results else None
    except SparseTIRError:  # the program cannot be written over it
        return None
    # Without zeros between the entries none is multiplied.
    is_safe = kernel.finite or other.convert(name, matrix).padding == 0
    watch = None if is_safe else Watch.over(parts, kernel.signature)
    if bound is None or watch is None:
        return bound
    return WatchedBound(bound, lambda: BoundKernel(Kernel(kernel.func, kernel.compiled), dict(fixed)), watch)


def format_for(
    kernel: Kernel, name: str, arguments: Mapping[str, Any], *, calls: float, judge: Judge | None = None
) -> Format | None:
    """The format to which a matrix is converted for calls to come; None is the program's own.

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
        See `bound_over_another`.
    """
    matrix = arguments[name]
    if len(matrix.shape) != 2 or name not in kernel.signature.buffers:
        return None
    shapes = {other: np.shape(value) for other, value in arguments.items() if other != name}
    found = suited(kernel.signature.program, matrix, shapes, calls=calls)
    if judge is not None:
        found = judge(kernel, matrix, arguments, found if _pays(found, calls) else None, calls=calls)
    return found.format if found is not None and _pays(found, calls) else None


def _pays(found: Conversion | None, calls: float) -> bool:
    return found is not None and found.calls <= calls


__all__ = ["Judge", "bound_over_another", "format_for"]
