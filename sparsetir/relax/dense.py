# SPDX-License-Identifier: Apache-2.0
"""Dense operators: matrix products as programs of the dialect, and a schedule for all other kernels of TVM.

TVM does not schedule loops for CPUs. Products with a matrix on the right become register tiles here, with the columns
of a known weight packed into panels. All other functions are parallelized and vectorized by one rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, s_tir, tirx
from tvm.error import InternalError

from sparsetir.codegen.target import native_target
from sparsetir.ir.rewriting import collect
from sparsetir.ir.views import is_sp_iter
from sparsetir.relax import programs
from sparsetir.relax.constants import Options
from sparsetir.relax.epilogues import Result
from sparsetir.relax.lowered import Head, Lowered, known, product
from sparsetir.relax.operators import constant, reshape
from sparsetir.relax.vector_math import in_arithmetic
from sparsetir.schedules import Registers

MATMUL, TRANSPOSE = "relax.matmul", "relax.permute_dims"
LEAST_PANELS = 4  # Minimum of panels for packing a weight: with fewer, threads are idle.
LEAST_WORK = 1 << 15  # Elements: waking a second thread takes as long as this much work.
LANES = 16


def weight_of(value: Any, value_of: Callable[[Any], Any]) -> np.ndarray | None:
    """Return the matrix that an operand is, including transposed constants; None if it is not known."""
    bound = value_of(value) if isinstance(value, relax.Var) else value
    if isinstance(bound, ir.GenericConst):
        matrix = bound.value.numpy()
        return matrix if matrix.ndim == 2 else None
    if isinstance(bound, ir.Call) and getattr(bound.op, "name", "") == TRANSPOSE and bound.args[0].ty.ndim == 2:
        axes = bound.attrs.axes
        inner = weight_of(bound.args[0], value_of)
        is_swapped = axes is None or [int(axis) % 2 for axis in axes] == [1, 0]
        return inner if inner is None or not is_swapped else inner.T
    return None


def head_of(call: Any, options: Options, value_of: Callable[[Any], Any]) -> Head | None:
    """Return a dense matrix product as the head of a fusion; None for other calls and unsupported products."""
    if not isinstance(call, ir.Call) or getattr(call.op, "name", "") != MATMUL:
        return None
    left, right = (arg.ty for arg in call.args)
    shapes = [ty.shape for ty in (left, right, call.ty)]
    if right.ndim != 2 or left.ndim < 2 or not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return None
    dtype = str(call.ty.dtype.dtype)
    if any(str(ty.dtype.dtype) != dtype for ty in (left, right)) or dtype not in ("float32", "float64"):
        return None
    *batch, n = left.shape.values
    feat, rows = right.shape.values[1], product(batch)
    weight = weight_of(call.args[1], value_of)
    whole = tuple(call.ty.shape.values)
    if not known([n, feat]):
        return None
    if known([rows]) and int(rows) == 1:
        return None if weight is None else Head(*_of_vector(call, weight, dtype, whole))
    height, panel = tiling(dtype, int(feat) if weight is not None else 0, options.target or native_target())
    columns = [int(feat) // panel, panel] if panel else [feat]
    result = Result((rows, *columns), ("I", "KO", "KI") if panel else ("I", "K"), dtype, whole, len(columns))

    def make(epilogue: programs.Epilogue | None) -> Lowered:
        program = programs.matmul({"m": rows, "n": n, "feat": feat}, dtype, height, epilogue, panel)
        x = call.args[0] if len(batch) == 1 else reshape(call.args[0], [rows, n])
        operands = {"a_data": x, "b_data": call.args[1]}
        if panel and weight is not None:
            operands["b_data"] = constant(packed(weight, panel))
        elif weight is not None and not isinstance(call.args[1], ir.GenericConst):
            operands["b_data"] = constant(weight)
        return Lowered(program, operands, list(result.shape), list(whole), epilogue.dtype if epilogue else dtype)

    return Head(result, make)


def _of_vector(call: ir.Call, weight: np.ndarray, dtype: str, whole: tuple[Any, ...]) -> tuple[Result, Any]:
    """Return the head of a product with one row: dot products with the rows of the transposed weight."""
    n, feat = weight.shape
    result = Result((tirx.const(feat, "int64"),), ("I",), dtype, whole)

    def make(epilogue: programs.Epilogue | None) -> Lowered:
        program = programs.gemv({"m": feat, "n": n}, dtype, epilogue)
        operands = {"a_data": constant(np.ascontiguousarray(weight.T)), "x_data": reshape(call.args[0], [n])}
        return Lowered(program, operands, list(result.shape), list(whole), epilogue.dtype if epilogue else dtype)

    return result, make


def tile_height(target: Any) -> int:
    """Return the rows of a register tile; at two vectors per row, registers are left for the operands."""
    return 8 if Registers.of(target).count >= 32 else 4


def tiling(dtype: str, columns: int, target: Any) -> tuple[int, int]:
    """Return the rows of a register tile and the columns of a panel, 0 where a weight of that size is not packed."""
    height = tile_height(target)
    panel = Registers.of(target).lanes(height, bits=int(dtype[-2:]))
    return height, 0 if columns % panel or columns // panel < LEAST_PANELS else panel


def packed(weight: np.ndarray, panel: int) -> np.ndarray:
    """Pack a matrix as panels of columns: (panels, rows, columns of a panel)."""
    return np.ascontiguousarray(weight.reshape(weight.shape[0], -1, panel).transpose(1, 0, 2))


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.ScheduleDense")
def ScheduleDense(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Parallelize and vectorize the loops of every function that is no program of the dialect, where possible."""
    for var, func in list(mod.functions.items()):
        if isinstance(func, tirx.PrimFunc) and not is_ours(func) and "tirx.is_scheduled" not in (func.attrs or {}):
            mod.update_func(var, scheduled(func))
    return mod


def is_ours(func: tirx.PrimFunc) -> bool:
    """Return whether a function is a program of the dialect, which has schedule rules of its own."""
    return any(is_sp_iter(node) for node in collect(func.body, s_tir.SBlockRealize))


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Inline elementwise blocks where possible, and parallelize and vectorize the others."""
    sch = s_tir.Schedule(func)
    for block in _blocks(sch):
        if len(sch.get_consumers(block)) > 1 and collect(sch.get(block).body, ir.Call):
            # A block with calls, such as exp, and several consumers would be computed repeatedly if inlined.
            continue
        try:
            sch.compute_inline(block)
        except (s_tir.ScheduleError, InternalError):
            continue
    for block in _blocks(sch):
        trial = sch.copy()
        try:
            _run_wide(trial, trial.get_sblock(sch.get(block).name_hint))
        except (s_tir.ScheduleError, InternalError):
            continue
        sch = trial
    return in_arithmetic(sch.mod["main"]).with_attr("tirx.is_scheduled", True)


def _blocks(sch: s_tir.Schedule) -> list[Any]:
    body = sch.mod["main"].body
    if not isinstance(body, s_tir.SBlockRealize) or body.block.name_hint != "root":
        return []  # TVM wrote the loops by hand, such as those of scatter_elements.
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _run_wide(sch: s_tir.Schedule, block: Any) -> None:
    """Fuse the leading spatial loops of a block and run them in parallel; vectorize the innermost loop."""
    loops = sch.get_loops(block)
    kinds = [int(iv.iter_type) for iv in sch.get(block).iter_vars]
    if not loops or len(loops) != len(kinds):
        return
    lead = next((n for n, kind in enumerate(kinds) if kind != 0), len(kinds))
    extents = [sch.get(loop).extent for loop in loops]
    if lead == 0:
        return
    work = int(np.prod([int(e) for e in extents])) if known(extents) else LEAST_WORK
    if lead < len(loops):  # A reduction: only the rows run in parallel.
        outer = sch.fuse(*loops[:lead])
        if work >= LEAST_WORK:
            sch.parallel(outer)
        return
    if work == 1:
        return  # TVM's vectorizer binds a name twice where no subscript depends on the lanes.
    whole = sch.fuse(*loops)
    outer, lanes = sch.split(whole, [None, LANES])
    if work >= LEAST_WORK:
        sch.parallel(outer)
    sch.vectorize(lanes)


__all__ = ["ScheduleDense", "head_of", "is_ours", "packed", "scheduled", "tile_height", "tiling", "weight_of"]
