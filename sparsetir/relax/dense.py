# SPDX-License-Identifier: Apache-2.0
"""Dense operators: products as programs of the dialect, a schedule for TVM's own kernels, and their vectorized math.

TVM does not schedule loops for CPUs. Products with a matrix on the right become register tiles here, with the columns
of a known weight packed into panels. All other functions are parallelized and vectorized by one rule.

Vectorizable arithmetic for math functions that LLVM only calls per scalar, in kernels of TVM's own Relax operators.

before::

    y[i] = T.sigmoid(x[i])

after::

    y[i] = T.float32(1) / (T.float32(1) + exponential(-x[i]))     # arithmetic, which vectors can do
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, s_tir, te, tirx
from tvm.error import InternalError
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.codegen.target import native_target
from sparsetir.interop.arrays import HALVES
from sparsetir.ir.rewriting import collect, mentions, same
from sparsetir.ir.views import is_sp_iter
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.iterations.normalize import with_nan
from sparsetir.lower.loops import with_body
from sparsetir.lower.vector import vector_math
from sparsetir.lower.vector.vector_math import FORMATS, MISSING, expand
from sparsetir.relax import programs
from sparsetir.relax.epilogues import ERF_TERMS, EpilogueResult, Head, Lowered, known, name_of, product
from sparsetir.relax.operators import EIGHT_BITS, constant, reshape
from sparsetir.relax.structures import BuildOptions
from sparsetir.schedules import Registers, has_unit

MATMUL, TRANSPOSE, DEQUANTIZE = "relax.matmul", "relax.permute_dims", "relax.dequantize"
BROADCAST = "relax.broadcast_to"
LEAST_PANELS = 4  # Minimum of panels for packing a weight: with fewer, threads are idle.
LEAST_WORK = 1 << 15  # Elements: waking a second thread takes as long as this much work.
LANES = 16
COLUMNS = 4  # Vectors of columns that are reduced together: lines of the cache that lie side by side.
REDUCERS = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)
TILE, NARROW_TILE = 16, 8  # Rows and columns of a transposition at once, and of one of numbers of `WIDE_BYTES`.
WIDE_BYTES = 4
HALF = "bfloat16"


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
    return _dequantized(bound, value_of)


def resolved(expr: Any, value_of: Callable[[Any], Any]) -> Any:
    """Return the value of a variable, through other variables."""
    while isinstance(expr, relax.Var):
        value = value_of(expr)
        if value is None:
            return expr
        expr = value
    return expr


def constant_of(expr: Any, value_of: Callable[[Any], Any]) -> np.ndarray | None:
    """Return the value of conversions, differences and changes of shape of constants; None for other expressions."""
    value = resolved(expr, value_of)
    if isinstance(value, ir.GenericConst):
        return np.asarray(value.value.numpy())
    name = name_of(value)
    if name not in ("relax.astype", "relax.subtract", TRANSPOSE, "relax.expand_dims", "relax.reshape"):
        return None
    operands: list[Any] = [constant_of(arg, value_of) for arg in value.args if isinstance(arg.ty, relax.TensorType)]
    if any(operand is None for operand in operands):
        return None
    first = operands[0]
    if name == "relax.astype":
        return first.astype(str(value.attrs.dtype))
    if name == "relax.subtract":
        return np.subtract(*operands)
    if name == TRANSPOSE:
        return first.transpose(None if value.attrs.axes is None else [int(axis) for axis in value.attrs.axes])
    shape = value.ty.shape
    return first.reshape([int(size) for size in shape.values]) if known(shape.values) else None


def _dequantized(call: Any, value_of: Callable[[Any], Any]) -> np.ndarray | None:
    """Return the matrix that a conversion of constant integers to float32 is, which TVM would compute in each call."""
    if not isinstance(call, ir.Call) or getattr(call.op, "name", "") != DEQUANTIZE or call.ty.ndim != 2:
        return None
    parts: list[Any] = [constant_of(arg, value_of) for arg in call.args]
    if any(part is None for part in parts) or str(call.ty.dtype.dtype) != "float32":
        return None
    integers, scale, zero = parts
    scale, zero = (spread(parameter, integers.shape, int(call.attrs.axis)) for parameter in (scale, zero))
    return (integers.astype("int32") - zero.astype("int32")).astype("float32") * scale.astype("float32")


def spread(parameter: np.ndarray, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Broadcast a scale or zero point to the elements that it is for."""
    if parameter.size == 1:
        return np.broadcast_to(parameter.reshape(()), shape)
    return np.broadcast_to(parameter.reshape([-1 if n == axis % len(shape) else 1 for n in range(len(shape))]), shape)


def head_of(call: Any, options: BuildOptions, value_of: Callable[[Any], Any]) -> Head | None:
    """Return a dense matrix product as the head of a fusion; None for other calls and unsupported products."""
    if not isinstance(call, ir.Call) or getattr(call.op, "name", "") != MATMUL:
        return None
    matrix = _right_of(call, value_of)
    left, right = call.args[0].ty, matrix.ty
    shapes = [ty.shape for ty in (left, right, call.ty)]
    if left.ndim < 2 or not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return None
    dtype, target = str(call.ty.dtype.dtype), options.target or native_target()
    of, of_right = (str(ty.dtype.dtype) for ty in (left, right))
    is_half = of == of_right == HALF and dtype == "float32" and has_unit(target)
    is_integers = of in EIGHT_BITS and of_right in EIGHT_BITS and dtype == "int32"
    is_plain = of == of_right == dtype and dtype in ("float32", "float64")
    if not (is_half or is_integers or is_plain):
        return None
    if right.ndim != 2:
        is_batch = right.ndim == 3 and left.ndim == 2 and known(shapes[0].values)
        fits = is_batch or (is_plain and _are_pairs(call))
        return _of_batch(call, of, of_right, target, is_paired=not is_batch) if fits else None
    *batch, n = left.shape.values
    feat, rows = right.shape.values[1], product(batch)
    weight = weight_of(matrix, value_of)
    whole = tuple(call.ty.shape.values)
    if not known([n] if is_integers else [n, feat]):
        return None
    if known([rows]) and int(rows) == 1 and not is_integers:
        return None if weight is None or is_half else _of_vector(call, weight, dtype, whole)
    height, panel = tiling(of, int(feat) if weight is not None else 0, target)
    columns = [int(feat) // panel, panel] if panel else [feat]
    result = EpilogueResult((rows, *columns), ("I", "KO", "KI") if panel else ("I", "K"), dtype, whole, len(columns))

    def make(epilogue: programs.Epilogue | None) -> Lowered:
        sizes = {"m": rows, "n": n, "feat": feat}
        program = programs.matmul(sizes, of, height, epilogue, panel, dtype, of_right)
        x = call.args[0] if len(batch) == 1 else reshape(call.args[0], [rows, n])
        operands = {"a_data": x, "b_data": matrix}
        if panel and weight is not None:
            operands["b_data"] = constant(packed(weight, panel))
        elif weight is not None and not isinstance(matrix, ir.GenericConst):
            operands["b_data"] = constant(weight)
        return Lowered(program, operands, list(result.shape), list(whole), epilogue.dtype if epilogue else dtype)

    return Head(result, make)


def _right_of(call: ir.Call, value_of: Callable[[Any], Any]) -> Any:
    """Return the right operand of a product: the matrix itself where each of a batch is multiplied by a copy of it."""
    left, right = call.args
    copied = resolved(right, value_of)
    if name_of(copied) != BROADCAST or left.ty.ndim != right.ty.ndim:
        return right
    matrix, shapes = copied.args[0], [value.ty.shape for value in (left, right, copied.args[0])]
    if matrix.ty.ndim != 2 or not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return right
    (*lead, _, _), (*other, depth, columns), own = (shape.values for shape in shapes)
    is_same = all(map(same, lead, other)) and all(map(same, own, (depth, columns)))
    return matrix if is_same else right


def _are_pairs(call: ir.Call) -> bool:
    """Return whether a product is one of each matrix of a batch with its own, of known columns."""
    if min(arg.ty.ndim for arg in call.args) < 2:
        return False
    (*lead, _, n), (*other, _, feat) = (arg.ty.shape.values for arg in call.args)
    is_batch = min(len(lead), len(other)) > 0 and len(lead) == len(other)
    return is_batch and all(map(same, lead, other)) and known([n, feat])


def _of_batch(call: ir.Call, of: str, of_right: str, target: Any, *, is_paired: bool) -> Head:
    """Return the head of the products of a matrix for units, or of each matrix of a batch, with each of a batch."""
    (*_, rows, n), (*lead, _, feat) = (arg.ty.shape.values for arg in call.args)
    dtype, batch = str(call.ty.dtype.dtype), product(lead)
    height, _ = tiling(of, 0, target)
    whole, shape = tuple(call.ty.shape.values), (batch, rows, feat)
    result = EpilogueResult(shape, ("L", "I", "K"), dtype, whole)

    def make(epilogue: programs.Epilogue | None) -> Lowered:
        sizes = {"m": rows, "n": n, "feat": feat, "batch": batch}
        program = programs.matmul(sizes, of, height, epilogue, 0, dtype, of_right, is_paired=is_paired)
        a, b = call.args
        if len(lead) > 1:
            a, b = reshape(a, [batch, rows, n]), reshape(b, [batch, n, feat])
        operands = {"a_data": a, "b_data": b}
        return Lowered(program, operands, list(shape), list(whole), epilogue.dtype if epilogue else dtype)

    return Head(result, make)


def _of_vector(call: ir.Call, weight: np.ndarray, dtype: str, whole: tuple[Any, ...]) -> Head:
    """Return the head of a product with one row: dot products with the rows of the transposed weight."""
    n, feat = weight.shape
    result = EpilogueResult((tirx.const(feat, "int64"),), ("I",), dtype, whole)

    def make(epilogue: programs.Epilogue | None) -> Lowered:
        program = programs.gemv({"m": feat, "n": n}, dtype, epilogue)
        operands = {"a_data": constant(np.ascontiguousarray(weight.T)), "x_data": reshape(call.args[0], [n])}
        return Lowered(program, operands, list(result.shape), list(whole), epilogue.dtype if epilogue else dtype)

    return Head(result, make)


def tile_height(target: Any) -> int:
    """Return the rows of a register tile; at two vectors per row, registers are left for the operands."""
    return 8 if Registers.of(target).count >= 32 else 4


def tiling(dtype: str, columns: int, target: Any) -> tuple[int, int]:
    """Return the rows of a register tile and the columns of a panel, 0 where a weight of that size is not packed."""
    kind = {HALF: "bf16", **dict.fromkeys(EIGHT_BITS, "int8")}.get(dtype)
    if kind is not None and has_unit(target, kind):
        height, panel = (32 if f"tile_{kind}" in Registers.of(target).units else 8), 32
    else:
        height = tile_height(target)
        panel = Registers.of(target).lanes(height, bits=32 if kind else int(dtype[-2:]))
    return height, 0 if columns % panel or columns // panel < LEAST_PANELS else panel


def packed(weight: np.ndarray, panel: int) -> np.ndarray:
    """Pack a matrix as panels of columns: (panels, rows, columns of a panel)."""
    return np.ascontiguousarray(weight.reshape(weight.shape[0], -1, panel).transpose(1, 0, 2))


# ------------------------------------------------------------------------- sums of halves

SUMMING = {
    "relax.sum",
    "relax.mean",
    "relax.variance",
    "relax.std",
    "relax.prod",
    "relax.nn.softmax",
    "relax.nn.log_softmax",
    "relax.nn.layer_norm",
    "relax.nn.group_norm",
    "relax.nn.instance_norm",
    "relax.nn.rms_norm",
    "relax.nn.avg_pool2d",
    "relax.nn.adaptive_avg_pool2d",
}


@relax.expr_functor.mutator
class _WideSums(relax.PyExprMutator):
    """Computes sums and products of many numbers of 16 bits in float32, as torch does."""

    def visit_call_(self, call: ir.Call) -> Any:
        call = self.visit_expr_post_order(call)
        name, dtype = str(getattr(call.op, "name", "")), str(getattr(getattr(call.ty, "dtype", None), "dtype", ""))
        if dtype not in HALVES or (name not in SUMMING and name != "relax.cumsum"):
            return call
        emit = self.builder_.emit
        wide = [emit(relax.op.astype(arg, "float32")) for arg in call.args]
        if name == "relax.cumsum":
            axis = None if call.attrs.axis is None else int(call.attrs.axis)
            total = emit(relax.op.cumsum(wide[0], axis, "float32", bool(call.attrs.exclusive)))
        else:
            total = emit(relax.Call(call.op, wide, call.attrs))
        return relax.op.astype(total, dtype)


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.SumInSinglePrecision")
def SumInSinglePrecision(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Add up and multiply numbers of 16 bits in float32."""
    return _mutated(mod, _WideSums(mod))


def _mutated(mod: ir.IRModule, mutator: Any) -> ir.IRModule:
    for var, func in list(mod.functions.items()):
        if isinstance(func, relax.Function):
            mutator.builder_.update_func(var, mutator.visit_expr(func))
    return mutator.builder_.get()


# ------------------------------------------------------------------------- convolutions


LEAST_FEATURES = 8  # That read a window: it is written once.
MOST_WINDOWS = 1 << 29  # Bytes of the windows of all images of a convolution, which are written as rows of a matrix.
MOST_WINDOWS_OF_ONE = 1 << 26  # Of each, where the number of images is open.
LAYOUTS = {
    "relax.nn.conv1d": ("NCW", "OIW"),
    "relax.nn.conv2d": ("NCHW", "OIHW"),
    "relax.nn.conv3d": ("NCDHW", "OIDHW"),
}


@relax.expr_functor.mutator
class _Convolutions(relax.PyExprMutator):
    """Rewrites convolutions of one group as products of windows, one row each, with the weights as a matrix."""

    def visit_call_(self, call: ir.Call) -> Any:
        call = self.visit_expr_post_order(call)
        name = str(getattr(call.op, "name", ""))
        if name not in LAYOUTS or not _is_whole_product(call, LAYOUTS[name]):
            return call
        bb, attrs = self.builder_, call.attrs
        x, weight = call.args
        batch, channels, *sizes = x.ty.shape.values
        features, _, *window = weight.ty.shape.values
        dims = list(range(2, 2 + len(sizes)))
        steps, gaps = ([int(n) for n in part] for part in (attrs.strides, attrs.dilation))
        before, after = np.array([int(n) for n in attrs.padding]).reshape(2, -1).tolist()
        out = list(call.ty.shape.values)[2:]
        x = bb.emit(relax.op.permute_dims(x, [0, *dims, 1]))
        if any(before + after):
            width = [0, 0, *(n for pair in zip(before, after, strict=True) for n in pair), 0, 0]
            x = bb.emit(relax.op.nn.pad(x, width))
        if any(int(n) != 1 for n in [*window, *steps]):
            x = bb.emit_te(partial(_windows, out, window, steps, gaps), x, primfunc_name_hint="windows")
        known_weight = constant_of(weight, self.lookup_binding)
        order = [*dims, 1, 0]
        depth = int(np.prod([int(n) for n in [channels, *window]]))
        if known_weight is not None:
            matrix = constant(np.ascontiguousarray(known_weight.transpose(order).reshape(depth, -1)))
        else:
            matrix = bb.emit(reshape(bb.emit(relax.op.permute_dims(weight, order)), [depth, features]))
        rows = product([batch, *out])
        y = bb.emit(relax.op.matmul(bb.emit(reshape(x, [rows, depth])), matrix))
        y = bb.emit(reshape(y, [batch, *out, features]))
        return relax.op.permute_dims(y, [0, len(dims) + 1, *range(1, len(dims) + 1)])


def _is_whole_product(call: ir.Call, layouts: tuple[str, str]) -> bool:
    """Return whether a convolution of floats has one group, the usual layouts and known sizes of images."""
    types, attrs = [*(arg.ty for arg in call.args), call.ty], call.attrs
    dtypes = {str(ty.dtype.dtype) for ty in types}
    if len(dtypes) != 1 or not dtypes <= {"float32", "float64"} or int(attrs.groups) != 1:
        return False
    if (attrs.data_layout, attrs.kernel_layout) != layouts or attrs.out_layout not in ("", layouts[0]):
        return False
    shapes = [ty.shape for ty in types]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return False
    (batch, *image), weight, (_, *result) = (shape.values for shape in shapes)
    sizes = [*image, *weight, *result]
    if not known(sizes) or 0 in map(int, sizes) or int(weight[0]) < LEAST_FEATURES:
        return False
    windows = math.prod(int(n) for n in [*weight[1:], *result[1:]]) * DataType(dtypes.pop()).itemsize
    return windows * int(batch) <= MOST_WINDOWS if known([batch]) else windows <= MOST_WINDOWS_OF_ONE


def _windows(out: list[Any], window: list[Any], steps: list[int], gaps: list[int], x: Any) -> Any:
    """Return the elements that each window covers: batch, places, places in a window, channels."""
    count = len(out)

    def element(n: Any, *places: Any) -> Any:
        at, within, channel = places[:count], places[count : 2 * count], places[-1]
        inside = [a * step + w * gap for a, step, w, gap in zip(at, steps, within, gaps, strict=True)]
        return x[(n, *inside, channel)]

    return te.compute((x.shape[0], *out, *window, x.shape[-1]), element, name="windows")


@tvm.transform.module_pass(opt_level=0, name="sparsetir.relax.ConvolutionsAsProducts")
def ConvolutionsAsProducts(mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
    """Rewrite dense convolutions of floats as matrix products, which have schedules here."""
    return _mutated(mod, _Convolutions(mod))


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
        if _functions(sch.get(block)) and _is_read_repeatedly(sch, block):
            continue
        if not _reads_anything(sch.get(block)):
            # TVM folds a division by an inlined 0, and ends the process with the error of that.
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
    return in_arithmetic(with_compared_bools(sch.mod["main"])).with_attr("tirx.is_scheduled", True)


def _functions(block: s_tir.SBlock) -> list[ir.Call]:
    """Return the calls of functions, such as exp, in a block."""
    calls = collect(block.body, ir.Call)
    return [call for call in calls if getattr(call.op, "name", "") not in ("tirx.if_then_else", "tirx.likely")]


def _is_read_repeatedly(sch: s_tir.Schedule, block: Any) -> bool:
    """Return whether its consumer reads an element of a block several times, as where it is broadcast."""
    written = [region.source for region in sch.get(block).writes]
    for consumer in map(sch.get, sch.get_consumers(block)):
        loads = [x for x in collect(consumer.body, ir.TensorLoad) if any(map(x.source.same_as, written))]
        names = _varying(consumer)
        if any(not mentions(list(load.indices), [name]) for load in loads for name in names):
            return True
    return False


def _varying(block: s_tir.SBlock) -> list[Var]:
    """Return the variables of a block that take more than one value."""
    extents = [(iv.var, iv.dom.extent) for iv in block.iter_vars]
    return [var for var, extent in extents if not known([extent]) or int(extent) != 1]


def _reads_anything(block: s_tir.SBlock) -> bool:
    """Return whether some value that a block stores is no constant."""
    stores = collect(block.body, tirx.BufferStore)
    return any(collect(store.value, ir.TensorLoad) or collect(store.value, ir.Var) for store in stores)


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
        outer = _reduced_in_lanes(sch, block, lead)
        if work >= LEAST_WORK:
            sch.parallel(outer)
        return
    lanes_of = _varying(sch.get(block))[-1:]
    if not lanes_of:
        return
    if not all(mentions(call, lanes_of) for call in _functions(sch.get(block))):
        # TVM's vectorizer fails on the names that a function is expanded to where lanes do not differ in them.
        if work >= LEAST_WORK:
            sch.parallel(sch.fuse(*loops[:-1]) if len(loops) > 1 else loops[0])
        return
    across = _loop_across(sch.get(block))
    if across is not None and work >= LEAST_WORK and _tile(sch, block, loops, across):
        return
    outer = _in_lanes(sch, block, loops, extents)
    if work >= LEAST_WORK:
        sch.parallel(outer)


def _reduced_in_lanes(sch: s_tir.Schedule, block: Any, lead: int) -> Any:
    """Reduce in the lanes of a vector where elements lie side by side; return the loop over rows, or over columns.

    Where the reduced elements do, each lane reduces some of them, and then the lanes are reduced. Where those of one
    step do, each lane has a column.
    """
    loops = sch.get_loops(block)
    spatial, reduced = loops[:lead], loops[lead:]
    along = _side_by_side(sch.get(block), lead)
    extents = [sch.get(loop).extent for loop in loops]
    if along == "columns" and known(extents[lead - 1 : lead]) and int(extents[lead - 1]) % (COLUMNS * LANES) == 0:
        *others, last = spatial
        outer, column, lanes = sch.split(last, [None, COLUMNS, LANES])
        sch.reorder(*others, outer, *reduced, column, lanes)
        sch.vectorize(lanes)
        return sch.fuse(*others, outer)
    count = int(np.prod([int(n) for n in extents[lead:]])) if known(extents[lead:]) else 0
    if along == "rows" and count >= 2 * LANES and count % LANES == 0:
        _, inner = sch.split(sch.fuse(*reduced), [None, LANES])
        partial_sums = sch.rfactor(inner, lead)
        outer = sch.fuse(*sch.get_loops(block)[:lead])
        sch.compute_at(partial_sums, outer)
        sch.set_scope(partial_sums, 0, "local")
        lanes, step = sch.get_loops(partial_sums)[-2:]
        sch.reorder(step, lanes)
        sch.vectorize(lanes)
        return outer
    return sch.fuse(*spatial)


def _side_by_side(block: s_tir.SBlock, lead: int) -> str:
    """Return whether elements of "rows" or of "columns" are contiguous in all operands of a reduction; else ""."""
    names = [iv.var for iv in block.iter_vars]
    stores = collect(block.body, tirx.BufferStore)
    if len(stores) != 1 or not isinstance(stores[0].value, REDUCERS):
        return ""
    written = stores[0].buffer
    loads = [x for x in collect(stores[0].value, ir.TensorLoad) if not x.source.same_as(written) and x.indices]
    for kind, name in (("rows", names[-1]), ("columns", names[lead - 1])):
        if loads and all(same(load.indices[-1], name) for load in loads):
            return kind
    return ""


def _in_lanes(sch: s_tir.Schedule, block: Any, loops: list[Any], extents: list[Any]) -> Any:
    """Vectorize the elements of a block; return the loop over vectors, or over rows that LLVM copies in vectors."""
    if _is_copy_of_rows(sch, block, extents):
        return sch.fuse(*loops[:-1])  # lanes would lie in two rows
    outer, lanes = sch.split(sch.fuse(*loops), [None, LANES])
    sch.vectorize(lanes)
    return outer


def _is_copy_of_rows(sch: s_tir.Schedule, block: Any, extents: list[Any]) -> bool:
    """Return whether a block copies rows whose length is no multiple of that of a vector."""
    if len(extents) < 2 or not known(extents) or int(extents[-1]) < LANES or int(extents[-1]) % LANES == 0:
        return False
    stores = collect(sch.get(block).body, tirx.BufferStore)
    return all(isinstance(store.value, ir.TensorLoad) for store in stores)


def _loop_across(block: s_tir.SBlock) -> int | None:
    """Return the loop along which a block reads contiguous elements, if it writes along the last one."""
    stores = collect(block.body, tirx.BufferStore)
    names = [iv.var for iv in block.iter_vars]
    if len(stores) != 1 or len(names) < 2 or not same(stores[0].indices[-1], names[-1]):
        return None
    for load in collect(stores[0].value, ir.TensorLoad):
        along = next((n for n, var in enumerate(names[:-1]) if load.indices and same(load.indices[-1], var)), None)
        if along is not None and len(load.indices) > 1:
            return along
    return None


def _tile(sch: s_tir.Schedule, block: Any, loops: list[Any], across: int) -> bool:
    """Tile a transposition, so that lines of the cache that it reads are read whole; False without a change."""
    (store,) = collect(sch.get(block).body, tirx.BufferStore)
    is_copy = isinstance(store.value, ir.TensorLoad)
    is_wide = DataType(str(store.buffer.ty.dtype)).itemsize >= WIDE_BYTES
    size = NARROW_TILE if is_copy and is_wide else TILE
    sides = [sch.get(loops[n]).extent for n in (across, -1)]
    divides = known(sides) and all(int(side) % size == 0 for side in sides)
    if any(known([side]) and int(side) < size for side in sides) or not (divides or is_copy):
        return False
    outer, inner = sch.split(loops[across], [None, size])
    last, lanes = sch.split(loops[-1], [None, size])
    leading = [loop for n, loop in enumerate(loops[:-1]) if n != across]
    sch.reorder(*leading, outer, last, inner, lanes)
    sch.parallel(sch.fuse(*leading, outer, last))
    if divides and (is_wide or not is_copy):
        sch.vectorize(lanes)
    return True


# ------------------------------------------------------------------------- vectorizable math functions


def _number(x: ir.Expr, value: float) -> ir.Expr:
    return tirx.const(value, str(x.ty.dtype))


def sigmoid(x: ir.Expr) -> ir.Expr:
    """Return ``1 / (1 + exp(-x))``."""
    return _number(x, 1) / (_number(x, 1) + tirx.exp(_number(x, 0) - x))


def erf(x: ir.Expr) -> ir.Expr:
    """Return erf by Abramowitz and Stegun 7.1.26, as in epilogues."""
    argument, size, share = (Var(name, x.ty) for name in ("given", "size", "share"))
    total = _number(x, ERF_TERMS[0])
    for term in ERF_TERMS[1:]:
        total = total * share + _number(x, term)
    positive = _number(x, 1) - total * share * tirx.exp(_number(x, 0) - size * size)
    result = tirx.Select(argument < _number(x, 0), _number(x, 0) - positive, positive)
    result = tirx.Let(share, _number(x, 1) / (_number(x, 1) + _number(x, 0.3275911) * size), result)
    return tirx.Let(argument, x, tirx.Let(size, tirx.Max(argument, _number(x, 0) - argument), result))


FUNCTIONS: dict[str, Callable[[ir.Expr], ir.Expr]] = {
    "tirx.sigmoid": sigmoid,
    "tirx.erf": erf,
    **MISSING,
    "tirx.tanh": vector_math.tanh,
}


def _is_float(expr: Any) -> bool:
    return str(expr.ty.dtype).startswith("float")


def _ordered(node: tirx.Max, mutator: Any) -> ir.Expr:
    """Reorder the operands of a maximum so that NaN propagates."""
    inner = mutator.default_mutate(node)
    is_swapped = _is_float(inner) and isinstance(inner.b, tirx.FloatImm) and not isinstance(inner.a, tirx.FloatImm)
    return tirx.Max(inner.b, inner.a) if is_swapped else inner


def _of_maximum(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
    """Rewrite an update of a maximum to propagate NaN."""
    inner = mutator.default_mutate(node)
    value, element = inner.value, tirx.BufferLoad(node.buffer, node.indices)
    if not isinstance(value, tirx.Max) or not _is_float(value) or not same(value.a, element):
        return inner
    return tirx.BufferStore(node.buffer, tirx.Select(tirx.isnan(element), element, value), node.indices)


def _from_infinity(node: s_tir.SBlock, mutator: Any) -> s_tir.SBlock:
    """Begin maxima and minima of floats with an infinity, where TVM begins with the last finite number."""
    inner, start = mutator.default_mutate(node), node.init
    if not isinstance(start, tirx.BufferStore) or not isinstance(start.value, tirx.FloatImm):
        return inner
    dtype, buffer = str(start.value.ty.dtype), start.buffer
    updates = [store.value for store in collect(node.body, tirx.BufferStore) if store.buffer.same_as(buffer)]
    for kind, limit, infinity in (
        (tirx.Max, tirx.min_value(dtype), -math.inf),
        (tirx.Min, tirx.max_value(dtype), math.inf),
    ):
        if start.value.value == limit.value and all(isinstance(value, kind) for value in updates):
            init = tirx.BufferStore(buffer, tirx.const(infinity, dtype), start.indices)
            kept = inner.alloc_buffers, inner.match_buffers, inner.annotations
            return s_tir.SBlock(inner.iter_vars, inner.reads, inner.writes, inner.name_hint, inner.body, init, *kept)
    return inner


def with_compared_bools(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compare loaded bools with zero where they are operands: their vectors have bytes, those of comparisons bits."""

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(load)
        return inner if str(inner.ty.dtype) != "bool" else inner.astype("int8") != tirx.const(0, "int8")

    def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        return store if isinstance(store.value, ir.TensorLoad) else mutator.default_mutate(store)

    return with_body(func, structural_mutate(func.body, [(ir.TensorLoad, on_load), (tirx.BufferStore, on_store)]))


def in_arithmetic(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Expand calls of the functions to arithmetic, except erf in float64, for which the formula is not accurate enough.

    Functions of bfloat16 are not expanded: TVM reads it as an integer in expressions with bound names.
    """
    func = with_body(func, with_nan(func.body))
    exact = [(tirx.Max, _ordered), (tirx.BufferStore, _of_maximum), (s_tir.SBlock, _from_infinity)]
    func = with_body(func, structural_mutate(func.body, exact))
    if any(str(load.ty.dtype) == "bfloat16" for load in collect(func.body, ir.TensorLoad)):
        return func

    def on_call(call: ir.Call, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(call)
        name, dtype = str(getattr(inner.op, "name", "")), str(getattr(inner.ty, "dtype", ""))
        is_known = name in ("tirx.sinh", "tirx.cosh") or (name in FUNCTIONS and dtype in FORMATS)
        if not is_known or (name == "tirx.erf" and dtype == "float64"):
            return inner
        return FUNCTIONS[name](inner.args[0])

    body = expand(structural_mutate(func.body, [(ir.Call, on_call)]))
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


__all__ = [
    "FUNCTIONS",
    "HALF",
    "ScheduleDense",
    "erf",
    "head_of",
    "in_arithmetic",
    "is_ours",
    "packed",
    "scheduled",
    "sigmoid",
    "tile_height",
    "tiling",
    "weight_of",
]
