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
    if len(matrix.shape) != 2 or name not in kernel.signature.buffers:
        return None
    shapes = {n: np.shape(v) for n, v in {**fixed, **arguments}.items() if n != name}
    calls = kernel.calls or 0
    found = suited(kernel.signature.program, matrix, shapes, calls=calls)
    if judge is not None:
        found = judge(kernel, matrix, {**fixed, **arguments}, found if _pays(found, calls) else None, calls=calls)
    if found is None or not _pays(found, calls):
        return None
    try:
        parts = decompose_format(kernel.func, {name: found.format})
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


def _pays(found: Conversion | None, calls: float) -> bool:
    return found is not None and found.calls <= calls


__all__ = ["bound_over_another"]
