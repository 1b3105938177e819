# SPDX-License-Identifier: Apache-2.0
"""Loops as passes build them: new ones from 0 on, and copies of others with changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import const

SERIAL, PARALLEL = tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL
UNROLLED, VECTORIZED = tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED

Change = Callable[[tirx.For], "tirx.Stmt | None"]


def loop(
    kind: tirx.ForKind, var: Var, extent: ir.Expr | int, body: tirx.Stmt, notes: Mapping[str, Any] | None = None
) -> tirx.For:
    """A loop over `extent` steps from 0 on, with annotations `notes`."""
    dtype = str(var.ty.dtype)
    steps = const(extent, dtype) if isinstance(extent, int) else extent
    return tirx.For(var, const(0, dtype), steps, kind, body, None, notes)


serial = partial(loop, SERIAL)
parallel = partial(loop, PARALLEL)
unrolled = partial(loop, UNROLLED)
vectorized = partial(loop, VECTORIZED)


def with_(
    loop: tirx.For,
    *,
    var: Var | None = None,
    extent: ir.Expr | None = None,
    kind: tirx.ForKind | None = None,
    body: tirx.Stmt | None = None,
    notes: Mapping[str, Any] | None = None,
) -> tirx.For:
    """A copy of a loop with another variable, extent, kind, body or other annotations."""
    return tirx.For(
        loop.loop_var if var is None else var,
        loop.min,
        loop.extent if extent is None else extent,
        loop.kind if kind is None else kind,
        loop.body if body is None else body,
        loop.thread_binding,
        loop.annotations if notes is None else notes,
    )


def without(loop: tirx.For, *names: str) -> dict[str, Any]:
    """The annotations of a loop but for some."""
    return {name: value for name, value in loop.annotations.items() if name not in names}


def with_body(func: tirx.PrimFunc, body: tirx.Stmt) -> tirx.PrimFunc:
    """A function that does something else."""
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def each_loop(func: tirx.PrimFunc, *, outer: Change | None = None, inner: Change | None = None) -> tirx.PrimFunc:
    """A function with changed loops.

    Parameters
    ----------
    func : PrimFunc
    outer : callable, optional
        Asked for a loop before the loops inside it; what it returns is not gone through again. None goes on inside.
    inner : callable, optional
        Asked for a loop after those inside it; None keeps the loop.
    """

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        found = None if outer is None else outer(node)
        if found is not None:
            return found
        changed = mutator.default_mutate(node)
        found = None if inner is None else inner(changed)
        return changed if found is None else found

    return with_body(func, tvm_ffi.structural_mutate(func.body, [(tirx.For, on_for)]))
