# SPDX-License-Identifier: Apache-2.0
"""Calls of stage-I functions, and epilogues: elementwise operators that follow an operator are fused into its kernel.

before::

    lv = R.sparse.linear(x, data, indptr, indices)
    lv1 = R.add(lv, bias)
    lv2 = R.nn.gelu(lv1)

after::

    lv2 = R.call_tir(cls.linear, (..., bias), ...)     # the last iteration of linear maps the elements of its result

A step is fused if the value before it has no other use, and if its other operand is a number or a tensor along the
result's own dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from sparsetir.interop.arrays import HALVES
from sparsetir.ir.rewriting import all_same
from sparsetir.relax.operators import OperatorArguments, constant, reshape
from sparsetir.relax.programs import Epilogue, EpilogueOperand, NamedProgram

LONGEST = 4000  # In characters of an expression, which may double with a step that uses its argument twice.
ONE, ZERO = "T.{t}(1)", "T.{t}(0)"
SIGMOID = f"{ONE} / ({ONE} + T.exp({ZERO} - ({{x}})))"
UNARY = {
    "relax.nn.relu": f"T.max({ZERO}, {{x}})",  # NaN propagates with the operands in this order only.
    "relax.negative": f"{ZERO} - ({{x}})",
    "relax.abs": f"T.max({{x}}, {ZERO} - ({{x}}))",
    "relax.square": "({x}) * ({x})",
    "relax.sqrt": "T.sqrt({x})",
    "relax.exp": "T.exp({x})",
    "relax.round": "T.round({x})",  # Halves go to the even neighbour.
    "relax.sigmoid": SIGMOID,
    "relax.nn.silu": f"({{x}}) * ({SIGMOID})",
    "relax.tanh": "T.tanh({x})",
    "relax.nn.gelu": "T.{t}(0.5) * ({x}) * (T.{t}(1) + " + "{erf})",
    "relax.nn.gelu_tanh": "T.{t}(0.5) * ({x}) * (T.{t}(2) - T.{t}(2) / (T.exp(T.{t}(1.5957691216057308) * "
    "(({x}) + T.{t}(0.044715) * ({x}) * ({x}) * ({x}))) + T.{t}(1)))",
}
BINARY = {
    "relax.add": "({a}) + ({b})",
    "relax.subtract": "({a}) - ({b})",
    "relax.multiply": "({a}) * ({b})",
    "relax.divide": "({a}) / ({b})",
    "relax.maximum": "T.max({a}, {b})",
    "relax.minimum": "T.min({a}, {b})",
}
ALSO_OF_INTEGERS = ("relax.nn.relu", "relax.add", "relax.subtract", "relax.multiply", "relax.maximum", "relax.minimum")
CASTS = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32")
# erf(x / sqrt(2)): Abramowitz and Stegun 7.1.26, with an error of at most 1.5e-7; needs arithmetic and exp only.
RECIPROCAL = "(T.{t}(1) / (T.{t}(1) + T.{t}(0.23164189) * T.max({x}, T.{t}(0) - ({x}))))"
ERF_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def erf(x: str, t: str) -> str:
    """Return the text of ``erf(x / sqrt(2))``."""
    r = RECIPROCAL.format(x=x, t=t)
    total = f"T.{t}({ERF_TERMS[0]})"
    for term in ERF_TERMS[1:]:
        total = f"({total} * {r} + T.{t}({term}))"
    sign = f"T.Select(({x}) < T.{t}(0), T.{t}(-1), T.{t}(1))"
    return f"{sign} * (T.{t}(1) - {total} * {r} * T.exp(T.{t}(-0.5) * ({x}) * ({x})))"


@dataclass(frozen=True)
class EpilogueResult:
    """The result that an epilogue is written for: its dimensions, their names in the program, and its dtype.

    ``whole`` are the dimensions of the result in the model. Without names no epilogue may follow. The last ``columns``
    dimensions in the program are the last dimension in the model.
    """

    shape: tuple[Any, ...]
    axes: tuple[str, ...]
    dtype: str
    whole: tuple[Any, ...]
    columns: int = 1

    def seen(self, shape: list[Any]) -> list[Any]:
        """Return the dimensions of an operand as the program has them."""
        if all_same(shape, self.whole):
            return list(self.shape)
        while len(shape) > 1 and _is_one(shape[0]):
            shape = shape[1:]
        if self.columns > 1 and shape:
            is_whole = tvm_ffi.structural_equal(shape[-1], self.whole[-1])
            last = list(self.shape[-self.columns :]) if is_whole else [shape[-1]] * self.columns
            shape = [*shape[:-1], *(last if is_whole or _is_one(shape[-1]) else shape[-1:])]
        return shape


class Writer:
    """Builder of an epilogue, which adds one step after the other to an expression."""

    def __init__(self, result: EpilogueResult) -> None:
        self.result, self.dtype = result, result.dtype
        self.wide = "float32" if result.dtype in HALVES else result.dtype
        self.text = self._widened("{0}", result.dtype)
        self.operands: list[EpilogueOperand] = []

    def take(self, call: ir.Call, before: Any) -> bool:
        """Add a step whose argument `before` is the expression so far; return False, without a change, on failure."""
        name = str(getattr(call.op, "name", ""))
        count = len(self.operands)
        text = self._step(name, call, before)
        if text is None or len(text) > LONGEST:
            del self.operands[count:]
            return False
        self.text = text
        return True

    def epilogue(self) -> Epilogue:
        """Return the epilogue of all steps added."""
        text = self.text if self.dtype == self.wide else f'T.Cast("{self.dtype}", {self.text})'
        return Epilogue(text, self.dtype, tuple(self.operands))

    # ------------------------------------------------------------------ steps

    def _step(self, name: str, call: ir.Call, before: Any) -> str | None:
        shape = call.ty.shape
        if not isinstance(shape, relax.ShapeExpr) or not all_same(shape.values, self.result.whole):
            return None
        if name == "relax.astype":
            return self._cast(str(call.attrs.dtype))
        if name == "relax.clip" and call.args[0].same_as(before):
            return self._clipped(call.args[1:])
        if str(call.ty.dtype.dtype) != self.dtype:
            return None
        if not self.wide.startswith("float") and name not in ALSO_OF_INTEGERS:
            return None
        if name == "relax.nn.gelu" and self.wide == "float64":
            return None  # The approximation of erf is not accurate enough for float64.
        if name in UNARY and call.args[0].same_as(before):
            return UNARY[name].format(x=self.text, t=self.wide, erf=erf(self.text, self.wide) if "gelu" in name else "")
        if name == "relax.nn.leakyrelu":
            scaled = f"T.{self.wide}({call.attrs.alpha}) * ({self.text})"
            return f"T.Select(({self.text}) > T.{self.wide}(0), {self.text}, {scaled})"
        if name not in BINARY:
            return None
        sides = [self.text if arg.same_as(before) else self._operand(arg) for arg in call.args]
        return None if None in sides else BINARY[name].format(a=sides[0], b=sides[1])

    def _cast(self, dtype: str) -> str | None:
        if dtype == self.dtype or dtype not in CASTS:
            return None
        rounded = self.text if self.dtype == self.wide else f'T.Cast("{self.dtype}", {self.text})'
        self.dtype, self.wide = dtype, "float32" if dtype in HALVES else dtype
        return f'T.Cast("{self.wide}", {rounded})'

    def _clipped(self, limits: Sequence[Any]) -> str | None:
        """Return the text between two limits that are numbers."""
        values = [getattr(limit, "value", None) for limit in limits]
        numbers = [n for n in values if isinstance(n, (int, float)) and np.isfinite(n)]
        if len(numbers) != 2:
            return None
        low, high = map(self._number, numbers)
        return f"T.max(T.min({self.text}, {high}), {low})"

    def _number(self, value: float) -> str:
        return f"T.{self.wide}({float(value) if self.wide.startswith('float') else int(value)!r})"

    def _operand(self, arg: Any) -> str | None:
        """Return the text of the other operand of a step, None if it cannot be fused."""
        if isinstance(arg, ir.GenericConst) and arg.ty.ndim == 0:
            return self._number(arg.value.numpy().item()) if np.isfinite(arg.value.numpy()) else None
        type_ = arg.ty
        if not isinstance(type_, relax.TensorType) or not isinstance(type_.shape, relax.ShapeExpr):
            return None
        shape = self.result.seen(list(type_.shape.values))
        axes = along(shape, self.result)
        if axes is None or str(type_.dtype.dtype) != self.dtype:
            return None
        dims = [n for n, axis in enumerate(axes) if axis is not None] or [0][: len(axes)]
        shape, axes = [shape[n] for n in dims], tuple(axes[n] for n in dims)
        if not shape:  # a number, which programs have as an array of one
            shape, axes = [tirx.const(1, "int64")], (None,)
        is_same = all_same(shape, type_.shape.values)
        self.operands.append(EpilogueOperand(arg if is_same else reshape(arg, shape), axes, self.dtype))
        return self._widened(f"{{{len(self.operands)}}}", self.dtype)

    def _widened(self, text: str, dtype: str) -> str:
        return text if dtype == self.wide else f'T.Cast("{self.wide}", {text})'


def _is_one(size: Any) -> bool:
    return isinstance(size, tirx.IntImm) and int(size) == 1


def along(shape: list[Any], result: EpilogueResult) -> tuple[str | None, ...] | None:
    """Return the axes of a result along which a tensor runs, None for extents of one; None if they do not match."""
    skipped = len(result.shape) - len(shape)
    if skipped < 0:
        return None
    axes: list[str | None] = []
    for size, extent, axis in zip(shape, result.shape[skipped:], result.axes[skipped:], strict=True):
        if tvm_ffi.structural_equal(size, extent):
            axes.append(axis)
        elif _is_one(size):
            axes.append(None)
        else:
            return None
    return tuple(axes)


def name_of(call: Any) -> str:
    """Return the name of the operator that an expression calls; an empty text for other expressions."""
    return str(getattr(getattr(call, "op", None), "name", ""))


def is_elementwise(call: Any) -> bool:
    """Return whether a call may be a step of an epilogue."""
    name = name_of(call)
    return name in UNARY or name in BINARY or name in ("relax.astype", "relax.clip", "relax.nn.leakyrelu")


def written(result: EpilogueResult, head: Any, steps: Sequence[tuple[Any, ir.Call]]) -> tuple[Epilogue | None, int]:
    """Return the epilogue of the leading steps that can be fused, and their number.

    Parameters
    ----------
    result : EpilogueResult
    head : relax.Var
        The result before the first step.
    steps : sequence of (relax.Var, Call)
        Each has the variable of the step before as an argument.
    """
    writer, before, count = Writer(result), head, 0
    for var, call in steps:
        if not writer.take(call, before):
            break
        before, count = var, count + 1
    return (writer.epilogue() if count else None), count


# -------------------------------------------------------------------------- calls of stage-I functions


@dataclass
class Lowered:
    """A call of a stage-I function: its arguments by parameter, the shape of its result, and the shape to return."""

    program: NamedProgram
    given: dict[str, Any]
    shape: list[Any]
    wanted: list[Any]
    dtype: str
    func: tirx.PrimFunc | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    several: Sequence[relax.TensorType] = ()  # Types of the results, where there are several.

    def emit(self, builder: relax.BlockBuilder) -> Any:
        """Emit the call, and add its function to the module."""
        func = self.func if self.func is not None else self.program.func
        names = [str(p.name) for p in self.program.func.params if not _is_handle(p) and not tirx.is_buffer_var(p)]
        sizes = dict(zip(names, self.program.sizes, strict=True))
        values = {**sizes, **self.given, **self.fixed}
        tensors, numbers, results = [], [], []
        for param in func.params:
            name = str(param.name)
            if name not in values:
                results.append(param)
            elif tirx.is_buffer_var(param) or _is_handle(param):
                tensors.append(param)
            else:
                numbers.append(param)
        ordered = [*tensors, *numbers, *results]
        if not all(a.same_as(b) for a, b in zip(ordered, func.params, strict=True)):
            func = tirx.PrimFunc(ordered, func.body, func.ret_type, func.attrs)
        name = str(self.program.func.attrs["global_symbol"])
        var = builder.add_func(func.without_attr("global_symbol"), name)
        args = [_tensor(values[str(p.name)]) for p in tensors]
        args += [_number(values[str(p.name)], str(p.ty.dtype)) for p in numbers]
        out = list(self.several) or relax.TensorType(self.shape, self.dtype)
        result = relax.call_tir(var, args, out)
        if len(self.shape) == len(self.wanted) and all(map(same_size, self.shape, self.wanted)):
            return result
        return reshape(builder.emit(result), self.wanted)


@dataclass(frozen=True)
class Head:
    """A call that is lowered to a program: its result, as an epilogue needs it, and a maker of the program."""

    result: EpilogueResult
    make: Callable[[Epilogue | None], Lowered]
    arguments: OperatorArguments | None = None


def same_size(size: Any, other: Any) -> bool:
    """Return whether two sizes are known to be equal; variables are compared by identity, not by name."""
    both = (size, other)
    return int(size) == int(other) if known(both) else tvm_ffi.structural_equal(size, other)


def _is_handle(param: Any) -> bool:
    return str(getattr(param.ty, "dtype", "handle")) == "handle"


def emitted(builder: relax.BlockBuilder, var: Any, value: Any) -> Any:
    """Emit the replacement of a variable: an output of its dataflow block if the variable was one."""
    is_output = builder.current_block_is_dataflow() and not isinstance(var, relax.DataflowVar)
    return builder.emit_output(value) if is_output else builder.emit(value)


def _tensor(value: Any) -> Any:
    return value if isinstance(value, ir.Expr) else constant(value)


def _number(value: Any, dtype: str) -> Any:
    """Convert a number to the dtype of its parameter: sizes that a format adds are int32."""
    if isinstance(value, (int, np.integer)):
        return tirx.const(int(value), dtype)
    return value


def known(sizes: Sequence[Any]) -> bool:
    """Return whether all sizes are numbers."""
    return all(isinstance(size, (int, tirx.IntImm)) for size in sizes)


def product(size: Sequence[Any]) -> Any:
    """Return the number of elements of some dimensions."""
    total: Any = tirx.const(1, "int64")
    for extent in size:
        total = total * extent
    return tvm.sym.Analyzer().simplify(total)


__all__ = [
    "EpilogueResult",
    "Head",
    "Lowered",
    "Writer",
    "along",
    "emitted",
    "erf",
    "is_elementwise",
    "known",
    "name_of",
    "product",
    "same_size",
    "written",
]
