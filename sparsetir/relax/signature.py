# SPDX-License-Identifier: Apache-2.0
"""What a compiled model takes: names, dtypes and sizes, checked at every call and kept in a saved file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tvm import ir, relax, tirx

from sparsetir.errors import ArgumentError, ArgumentTypeError

Bounds = tuple[int, "int | None"]


@dataclass(frozen=True)
class Argument:
    """A tensor that a model takes.

    Parameters
    ----------
    name : str
    dtype : str
        Empty for what is no tensor, which TVM checks itself.
    shape : tuple of int, str or None
        A name stands for a size that may change; None for one that is computed from others, which TVM checks.
    """

    name: str
    dtype: str = ""
    shape: tuple[int | str | None, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join("..." if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype}[{sizes}]" if self.dtype else self.name


@dataclass(frozen=True)
class Signature:
    """The arguments of a function.

    Parameters
    ----------
    function : str
    arguments : tuple of Argument
    bounds : mapping of str to (int, int or None)
        The least and the largest value of a named size.
    """

    function: str
    arguments: tuple[Argument, ...]
    bounds: Mapping[str, Bounds] = field(default_factory=dict)

    @classmethod
    def of(cls, mod: ir.IRModule, function: str) -> Signature:
        """The signature of a function in a module."""
        func = mod[function]
        lower, upper = (dict((func.attrs or {}).get(f"tir_var_{side}_bound") or {}) for side in ("lower", "upper"))
        bounds = {str(n): (int(lower.get(n, 0)), int(upper[n]) if n in upper else None) for n in {**lower, **upper}}
        return cls(function, tuple(_argument(param) for param in func.params), bounds)

    def check(self, tensors: Sequence[Any]) -> None:
        """Raise unless the tensors have the dtypes and shapes of the arguments, equal where they share a name."""
        sizes: dict[str, tuple[int, str]] = {}
        for argument, tensor in zip(self.arguments, tensors, strict=True):
            if not argument.dtype:
                continue
            if str(tensor.dtype) != argument.dtype:
                raise ArgumentTypeError(f"{argument.name} has dtype {tensor.dtype}; expected {argument.dtype}")
            shape = tuple(tensor.shape)
            if len(shape) != len(argument.shape) or any(
                isinstance(want, int) and want != found for want, found in zip(argument.shape, shape, strict=True)
            ):
                raise ArgumentError(f"{argument.name} has shape {shape}; expected {argument}")
            for at, (name, found) in enumerate(zip(argument.shape, shape, strict=True)):
                if isinstance(name, str):
                    self._check_size(sizes, name, int(found), f"{argument.name}.shape[{at}]")

    def _check_size(self, sizes: dict[str, tuple[int, str]], name: str, found: int, where: str) -> None:
        known, other = sizes.setdefault(name, (found, where))
        if known != found:
            raise ArgumentError(f"{where} is {found} but {other} is {known}: they are one size, {name}")
        least, most = self.bounds.get(name, (0, None))
        if found < least or (most is not None and found > most):
            limit = f"at least {least}" if most is None else f"{least} to {most}"
            raise ArgumentError(f"{where} is {found}; the model was traced for {limit}")

    def positions(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The arguments in order, of which some may come by name."""
        names = [argument.name for argument in self.arguments]
        wrong = next((name for name in named if name not in names[len(args) :]), None)
        if wrong is not None:
            raise ArgumentTypeError(f"{self.function} takes {self}; found another argument {wrong}")
        if len(args) + len(named) != len(names):
            raise ArgumentTypeError(f"{self.function} takes {self}; found {len(args) + len(named)} arguments")
        return [*args, *(named[name] for name in names[len(args) :])]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.arguments))})"

    def to_json(self) -> dict[str, Any]:
        """As data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Signature:
        """From what `to_json` gave, or from text made of it."""
        arguments = tuple(Argument(a["name"], a["dtype"], tuple(a["shape"])) for a in data["arguments"])
        return cls(data["function"], arguments, {name: (low, high) for name, (low, high) in data["bounds"].items()})


def _argument(param: relax.Var) -> Argument:
    name, found = str(param.name), param.ty
    if not isinstance(found, relax.TensorType) or not isinstance(found.shape, relax.ShapeExpr):
        return Argument(name)
    return Argument(name, str(found.dtype.dtype), tuple(_size(size) for size in found.shape.values))


def _size(size: Any) -> int | str | None:
    if isinstance(size, tirx.IntImm):
        return int(size)
    return str(size.name) if isinstance(size, ir.Var) else None


ATTACHED = "sparsetir_signature"  # a function of the module that returns the text


def attached(mod: ir.IRModule, data: Any) -> ir.IRModule:
    """A module with one function more, which returns data as JSON; a saved model describes itself so."""
    builder = relax.BlockBuilder()
    with builder.function(ATTACHED, []):
        builder.emit_func_output(builder.emit(ir.StringImm(json.dumps(data))))
    functions = {var: func for var, func in mod.functions.items() if var.name_hint != ATTACHED}
    functions[ir.GlobalVar(ATTACHED)] = builder.get()[ATTACHED]
    return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


__all__ = ["ATTACHED", "Argument", "Signature", "attached"]
