# SPDX-License-Identifier: Apache-2.0
"""Calls of stage-I functions: the values of the parameters, and the shape of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from sparsetir.relax.epilogues import Result
from sparsetir.relax.operators import Arguments, constant, reshape
from sparsetir.relax.programs import Epilogue, Program


@dataclass
class Lowered:
    """A call of a stage-I function: its arguments by parameter, the shape of its result, and the shape to return."""

    program: Program
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
        sizes = dict(zip(_size_names(self.program.func), self.program.sizes, strict=True))
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

    result: Result
    make: Callable[[Epilogue | None], Lowered]
    arguments: Arguments | None = None


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


def _size_names(func: tirx.PrimFunc) -> list[str]:
    return [str(p.name) for p in func.params if not _is_handle(p) and not tirx.is_buffer_var(p)]


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


__all__ = ["Head", "Lowered", "emitted", "known", "product", "same_size"]
