# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes: evaluate shapes, solve them for symbols, specialize programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import ArgumentError, LoweringError
from sparsetir.ir import dialect
from sparsetir.ir.views import Program, cast
from sparsetir.ir.visitor import structural_walk
from sparsetir.utils.arguments import as_index, shown

# Symbolic sizes as Python: evaluate shapes and solve them for their symbols.


_BINARY = {
    tirx.Add: "({} + {})",
    tirx.Sub: "({} - {})",
    tirx.Mul: "({} * {})",
    tirx.FloorDiv: "({} // {})",
    tirx.FloorMod: "({} % {})",
    tirx.Min: "low({}, {})",
    tirx.Max: "high({}, {})",
    tirx.LT: "({} < {})",
    tirx.LE: "({} <= {})",
    tirx.GT: "({} > {})",
    tirx.GE: "({} >= {})",
    tirx.EQ: "({} == {})",
    tirx.NE: "({} != {})",
    tirx.And: "both({}, {})",
    tirx.Or: "either({}, {})",
}


def code(expr: ir.Expr, args: str = "a") -> str:
    """Python text of an integer expression; symbol ``m`` reads ``s["m"]``, lambda argument k reads ``a[k]``."""
    if isinstance(expr, tirx.IntImm):
        return str(int(expr))
    if dialect.is_call(expr, "arg"):
        return f"{args}[{int(expr.args[0])}]"
    if isinstance(expr, Var):
        return f"s[{str(expr.name)!r}]"
    if isinstance(expr, tirx.Cast):
        return code(expr.value, args)
    if isinstance(expr, tirx.Select) or dialect.is_if_then_else(expr):
        parts = [expr.condition, expr.true_value, expr.false_value] if isinstance(expr, tirx.Select) else expr.args
        return "where({}, {}, {})".format(*(code(p, args) for p in parts))
    if isinstance(expr, ir.TensorLoad):
        fault = f"a formula reads {expr.source.name}, which has no value before the call"
        raise LoweringError(f"{fault}: pass the arrays of its axis by name")
    pattern = _BINARY.get(type(expr))
    if pattern is None:
        raise LoweringError(f"a size may use + - * // % min max and comparisons, got {expr} ({type(expr).__name__})")
    return pattern.format(code(expr.a, args), code(expr.b, args))


def _scope() -> dict[str, Any]:
    import numpy as np

    scalar = {"low": min, "high": max, "both": np.logical_and, "either": np.logical_or, "where": np.where}
    return dict(scalar)


def evaluator(exprs: Sequence[ir.Expr]) -> Callable[[dict[str, int]], tuple[int, ...]]:
    """Return a function from sizes by name to the values of `exprs`."""
    text = ", ".join(code(e) for e in exprs)
    return compiled(f"({text}{',' if exprs else ''})")


@lru_cache(maxsize=1024)
def compiled(text: str) -> Callable[[dict[str, int]], Any]:
    """Return a function of sizes by name that was written as `code` does."""
    function: Callable[[dict[str, int]], Any] = eval(f"lambda s: {text}", _scope())
    return function


def formula(expr: ir.Expr, sizes: dict[str, int]) -> Callable[..., Any]:
    """Return a numpy function of an axis rule's arguments, at given sizes."""
    import numpy as np

    scope = {**_scope(), "low": np.minimum, "high": np.maximum, "s": sizes}
    return eval(f"lambda *a: {code(expr)}", scope)


class Size:
    """A size expression, compiled once: a number, a symbol, or a formula of symbols."""

    __slots__ = ("at", "code", "expr", "name", "symbols", "text", "value")

    def __init__(self, expr: ir.Expr) -> None:
        self.expr = expr
        self.text = str(expr)
        self.value = int(expr) if isinstance(expr, tirx.IntImm) else None
        self.symbols = symbols(expr)
        inner = expr.value if isinstance(expr, tirx.Cast) else expr
        self.name = str(inner.name) if isinstance(inner, Var) else None
        self.code = code(expr)
        self.at: Callable[[dict[str, int]], int] = compiled(self.code)

    def known(self, sizes: dict[str, int]) -> int | None:
        """Its value, or None while a symbol is missing."""
        if self.value is not None:
            return self.value
        return self.at(sizes) if all(n in sizes for n in self.symbols) else None

    def solve(self, value: int, sizes: dict[str, int]) -> tuple[str, int] | None:
        """Return the one unknown symbol and what it must be for the size to be `value`; None if there is no such."""
        unknown = [n for n in self.symbols if n not in sizes]
        if len(unknown) != 1:
            return None
        zero, one = self.at({**sizes, unknown[0]: 0}), self.at({**sizes, unknown[0]: 1})
        step = one - zero
        if step == 0 or (value - zero) % step:
            return None
        guess = (value - zero) // step
        return (unknown[0], guess) if self.at({**sizes, unknown[0]: guess}) == value else None


def symbols(expr: ir.Expr) -> list[str]:
    """Return the names of the symbols of an expression."""
    names: list[str] = []
    structural_walk(expr, (Var, lambda v: names.append(str(v.name))))
    return list(dict.fromkeys(names))


# Programs for given sizes.


def with_sizes(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc:
    """Return a program with some of its sizes fixed; they are no parameters any more.

    Raises
    ------
    ArgumentError
        There is no such size, or it is not a non-negative integer.

    Examples
    --------
    >>> import sparsetir
    >>> [str(p.name) for p in with_sizes(sparsetir.ops.spmm(), {"feat": 64}).params][-3:]
    ['m', 'n', 'nnz']
    """
    parameters = {str(p.name): p for p in func.params if not tirx.is_buffer_var(p)}
    values = {name: as_index(value) for name, value in sizes.items()}
    for name, value in values.items():
        if name not in parameters:
            raise ArgumentError(f"no size is called {name!r}; there are: {', '.join(parameters)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(f"{name}: expected a non-negative integer, got {shown(value)}")
        most = LARGEST_INT32 if str(parameters[name].ty.dtype) == "int32" else (1 << 63) - 1
        if value > most:
            raise ArgumentError(f"{name}: expected at most {most}, got {shown(value)}")
    return func.specialize({parameters[name]: value for name, value in values.items()}) if values else func


def with_constants(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc:
    """Return a program with some of its sizes fixed, which remain parameters and are ignored.

    Examples
    --------
    >>> import sparsetir
    >>> [str(p.name) for p in with_constants(sparsetir.ops.spmm(), {"feat": 8}).params][-3:]
    ['n', 'nnz', 'feat']
    """
    fixed = with_sizes(func, sizes)
    kept = iter(fixed.params)
    params = [Var(str(p.name), p.ty) if str(p.name) in sizes else next(kept) for p in func.params]
    return tirx.PrimFunc(params, fixed.body, fixed.ret_type, attrs=fixed.attrs)


# Offsets of 32 bits.


LARGEST_INT32 = 2**31 - 1


def narrow_extents(program: Program, *, with_constants: bool = False) -> dict[str, list[ir.Expr]]:
    """Return the extents of buffers, scratch among them, whose product 32-bit offsets count.

    Offsets have 32 bits up to the first dimension of 64 bits, whose extent they are multiplied with in 64. Buffers
    whose extents are all constant are left out, unless `with_constants`.
    """
    narrow = {}
    for buffer in program.buffers.values():
        if any(axis.is_assembled for axis in buffer.axes):
            continue  # its elements are counted while it is computed
        extents = list(takewhile(lambda extent: str(extent.ty.dtype) == "int32", buffer.storage.ty.shape))
        if extents and (with_constants or not all(isinstance(extent, tirx.IntImm) for extent in extents)):
            narrow[buffer.name] = extents
    return narrow


def fits_int32(extents: Sequence[ir.Expr]) -> ir.Expr:
    """Return the condition that a product of extents fits into 32 bits, evaluated in 64."""
    count, is_empty, fits = tirx.const(1, "int64"), tirx.const(False), tirx.const(True)
    for extent in extents:
        size = cast(extent.value if isinstance(extent, tirx.Cast) else extent, "int64")
        count = count * size
        is_empty = tirx.Or(is_empty, size <= tirx.const(0, "int64"))
        # A partial product that does not fit decides: later ones may wrap around.
        fits = tirx.And(fits, count <= tirx.const(LARGEST_INT32, "int64"))
    return sym.Analyzer().simplify(tirx.Or(is_empty, fits))


__all__ = ["LARGEST_INT32", "fits_int32", "narrow_extents", "with_constants", "with_sizes"]
