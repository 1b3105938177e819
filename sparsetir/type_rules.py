# SPDX-License-Identifier: Apache-2.0
"""The rules of stage I about what stands where: types of operands, and names that are no values.

Each is a rule like those of `sparsetir.rules`. TVM takes such programs, and fails in the midst of code generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from sparsetir import op
from sparsetir.rules import Facts, Problem

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT_FUNCTIONS = (
    "exp exp2 exp10 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "sigmoid erf hypot atan2 copysign ldexp pow"
).split()
FUNCTIONS = {**dict.fromkeys(FLOAT_FUNCTIONS, FLOATS), "nextafter": FLOATS[2:]}
INSTEAD = {"fmod": "A - T.trunc(A / B) * B"}  # functions without machine code
NOT_OF_BOOLS = {tirx.Sub: "-", tirx.Div: "/"}


def _faults(facts: Facts, kinds: dict[type, Callable[[Any], str]]) -> Iterator[Problem]:
    """What `kinds` say of the nodes of their types, each with the line of its statement."""
    problems: list[Problem] = []
    statement: list[Any] = [None]

    def on_store(node: tirx.BufferStore, visitor: Any) -> None:
        statement[0] = node
        visitor.default_visit(node)

    def on_node(node: Any, visitor: Any) -> None:
        message = kinds[type(node)](node)
        if message:
            where = getattr(node, "span", None) or getattr(statement[0], "span", None)
            problems.append(Problem(message, span=where))
        visitor.default_visit(node)

    callbacks = [(tirx.BufferStore, on_store), *((kind, on_node) for kind in kinds)]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


def functions_take_floats(facts: Facts) -> Iterator[Problem]:
    """Functions of real numbers take floats."""

    def fault(call: Call) -> str:
        name = op.function_of(call)
        if name in INSTEAD:
            return f"T.{name} has no machine code on CPUs; write {INSTEAD[name]}"
        dtypes = FUNCTIONS.get(name)
        if dtypes is None or str(call.ty.dtype) in dtypes:
            return ""
        found = f"found {call.args[0]} of {call.ty.dtype}"
        return f"T.{name} takes {', '.join(dtypes)}, {found}; convert it first, as by T.float32(...)"

    yield from _faults(facts, {Call: fault})


def bools_are_logic(facts: Facts) -> Iterator[Problem]:
    """Bools have sums (or) and products (and), maxima and minima, but no differences and quotients."""

    def fault(expr: Any) -> str:
        if str(expr.ty.dtype) != "bool":
            return ""
        found = f"expected + (or), * (and), T.max, T.min or a comparison of bools, found {expr.a} {{}} {expr.b}"
        return f"{found.format(NOT_OF_BOOLS[type(expr)])}; convert them first, as by T.int32(...)"

    yield from _faults(facts, dict.fromkeys(NOT_OF_BOOLS, fault))


__all__ = ["bools_are_logic", "functions_take_floats"]
