# SPDX-License-Identifier: Apache-2.0
"""What a program says of its parameters and of the arrays behind its axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tvm import ir, tirx

from sparsetir import interop, sizes
from sparsetir.ir import Axis, Program, SparseBuffer


@dataclass(frozen=True, eq=False)
class Param:
    """One parameter of the compiled function."""

    name: str
    dtype: str
    shape: tuple[sizes.Size, ...] | None  # None: a scalar

    @property
    def is_array(self) -> bool:
        return self.shape is not None


def parameter(var: Any) -> Param:
    """What a parameter of a function is."""
    if tirx.is_buffer_var(var):
        return Param(str(var.name), str(var.ty.dtype), tuple(sizes.Size(d) for d in var.ty.shape))
    return Param(str(var.name), str(var.ty.dtype), None)


def levels(buffer: SparseBuffer) -> list[interop.Level]:
    """The axes of a buffer, as far as the program tells them."""
    axes = list(buffer.axes)
    return [
        interop.Level(
            axis.name,
            axis.kind,
            axes.index(axis.parent) if axis.parent is not None else None,
            axis.idtype,
            sorted=axis.sorted,
            unique=axis.unique,
            full=axis.full,
        )
        for axis in axes
    ]


def fixed_levels(levels: list[interop.Level], buffer: SparseBuffer) -> list[interop.Level] | None:
    """The levels themselves when no call has to fill anything in."""
    plain = ("dense_fixed", "sparse_variable")
    lengths = [_constant(a.length) for a in buffer.axes]
    if all(a.kind in plain and a.rule is None for a in buffer.axes) and not any(n is not None for n in lengths):
        return levels
    return None


def _constant(expr: Any) -> int | None:
    return int(expr) if isinstance(expr, tirx.IntImm) else None


def narrow_extents(program: Program) -> dict[str, list[ir.Expr]]:
    """The extents of buffers, scratch among them, whose product 32-bit offsets count.

    Offsets have 32 bits up to the first dimension of 64 bits, whose extent they are multiplied with in 64.
    """
    narrow = {}
    for buffer in program.buffers.values():
        extents = list(takewhile(lambda extent: str(extent.ty.dtype) == "int32", buffer.storage.ty.shape))
        if extents and not all(isinstance(extent, tirx.IntImm) for extent in extents):
            narrow[buffer.name] = extents
    return narrow


def axis_counts(program: Program) -> dict[Axis, Callable[[dict[str, int]], tuple[int, ...]]]:
    """(positions above, positions, length) of every axis, as a function of the sizes."""
    out = {}
    for axis in program.axes.values():
        above = tirx.const(1, "int32") if axis.parent is None else axis.parent.count
        out[axis] = sizes.evaluator([above, axis.count, axis.length])
    return out


def arrays_of_axes(program: Program) -> dict[Axis, tuple[str | None, str | None]]:
    """Names of the indptr and indices parameters of every axis that has any."""
    out = {}
    for axis in program.axes.values():
        names = tuple(str(b.name) if b is not None else None for b in (axis.indptr, axis.indices))
        if any(names):
            out[axis] = (names[0], names[1])
    return out


__all__ = ["Param", "arrays_of_axes", "axis_counts", "fixed_levels", "levels", "narrow_extents", "parameter"]
