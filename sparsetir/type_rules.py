# SPDX-License-Identifier: Apache-2.0
"""The rules of stage I about what stands where: types of operands, and names that are no values.

Each is a rule like those of `sparsetir.rules`. TVM takes such programs, and fails in the midst of code generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.rules import Facts, Problem
from sparsetir.walks import structural_walk

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT_FUNCTIONS = (
    "exp exp2 exp10 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "sigmoid erf hypot atan2 copysign ldexp pow"
).split()
WIDE_INTEGERS = ("int32", "uint32", "int64", "uint64")
FUNCTIONS = {  # and what their first operand is
    **dict.fromkeys(FLOAT_FUNCTIONS, FLOATS),
    "nextafter": FLOATS[2:],
    "popcount": ("int8", "uint8", "int16", "uint16", *WIDE_INTEGERS),
    "clz": WIDE_INTEGERS,
    "likely": ("bool",),
}
INSTEAD = {"fmod": "A - T.trunc(A / B) * B"}  # functions without machine code
LEAVING = {
    "break_loop": "an sp_iter has no order that break could end; store under a condition, or use a loop inside of it",
    "continue_loop": "an sp_iter has no continue; put what follows under a condition",
}
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
        if dtypes is None or str(call.args[0].ty.dtype) in dtypes:
            return ""
        found = f"found {call.args[0]} of {call.args[0].ty.dtype}"
        usual = "float32" if "float32" in dtypes else dtypes[-1]
        return f"T.{name} takes {', '.join(dtypes)}, {found}; convert it first, as by T.{usual}(...)"

    yield from _faults(facts, {Call: fault})


def bools_are_logic(facts: Facts) -> Iterator[Problem]:
    """Bools have sums (or) and products (and), maxima and minima, but no differences and quotients."""

    def fault(expr: Any) -> str:
        if str(expr.ty.dtype) != "bool":
            return ""
        found = f"expected + (or), * (and), T.max, T.min or a comparison of bools, found {expr.a} {{}} {expr.b}"
        return f"{found.format(NOT_OF_BOOLS[type(expr)])}; convert them first, as by T.int32(...)"

    yield from _faults(facts, dict.fromkeys(NOT_OF_BOOLS, fault))


def conditions_are_bools(facts: Facts) -> Iterator[Problem]:
    """What decides is a comparison."""

    def fault(condition: Any) -> str:
        dtype = str(condition.ty.dtype)
        return "" if dtype == "bool" else f"a condition must be a comparison, found {condition} of {dtype}; compare it"

    of_statement = lambda node: fault(node.condition)  # noqa: E731
    yield from _faults(facts, {tirx.IfThenElse: of_statement, tirx.While: of_statement})


def nothing_is_returned(facts: Facts) -> Iterator[Problem]:
    """Results are buffers."""
    message = "a program returns nothing: its results are the buffers that it stores to; leave the return out"
    found: list[Problem] = []
    on_return = lambda node: found.append(Problem(message, span=getattr(node, "span", None)))  # noqa: E731
    structural_walk(facts.func.body, [(tirx.Return, on_return)])
    yield from found


def axes_are_not_numbers(facts: Facts) -> Iterator[Problem]:
    """An axis stands where an axis is expected, and nowhere in arithmetic."""
    axes = facts.program.axes
    problems: list[Problem] = []
    statement: list[Any] = [None]

    def problem(message: str, name: str = "") -> None:
        problems.append(Problem(message, name, getattr(statement[0], "span", None)))

    def on_store(node: tirx.BufferStore, visitor: Any) -> None:
        statement[0] = node
        visitor.default_visit(node)

    def on_call(call: Call, visitor: Any) -> None:
        if op.is_call(call, "attach", "fuse", *op.MERGES):
            name = op.name_of(call)
            problem(f"T.{name} belongs into the list of an sp_iter: T.sp_iter([.., T.{name}(..)], ..)")
        elif not op.is_call(call, "coord", "bind_axes", *op.AXIS_NAMES):  # those take axes
            visitor.default_visit(call)

    def on_var(var: Var, _visitor: Any) -> None:
        if var in axes:
            problem(f"{var.name} is an axis, not a number; use a variable of an sp_iter over it", str(var.name))

    def on_bind(node: tirx.Bind, visitor: Any) -> None:
        if node.var not in axes:
            visitor.default_visit(node)

    callbacks = [(tirx.BufferStore, on_store), (tirx.Bind, on_bind), (Call, on_call), (Var, on_var)]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


def iterations_are_not_left(facts: Facts) -> Iterator[Problem]:
    """An iteration has no order, so that nothing leaves it; loops inside it may be left."""
    nodes = {place.iteration.node for place in facts.places}
    inside: list[bool] = []  # of what stands around, innermost last: whether it is an iteration
    problems: list[Problem] = []

    def enter(node: Any, visitor: Any) -> None:
        inside.append(node in nodes)
        visitor.default_visit(node)
        inside.pop()

    def on_realize(node: s_tir.SBlockRealize, visitor: Any) -> None:
        if node in nodes:
            enter(node, visitor)
        else:
            visitor.default_visit(node)

    def on_evaluate(node: tirx.Evaluate, _visitor: Any) -> None:
        instead = LEAVING.get(op.function_of(node.value))
        if instead is not None and inside and inside[-1]:
            problems.append(Problem(instead, span=node.span))

    callbacks = [
        (s_tir.SBlockRealize, on_realize),
        (tirx.For, enter),
        (tirx.While, enter),
        (tirx.Evaluate, on_evaluate),
    ]
    tvm_ffi.structural_visit(facts.func.body, callbacks)
    yield from problems


__all__ = [
    "axes_are_not_numbers",
    "bools_are_logic",
    "conditions_are_bools",
    "functions_take_floats",
    "iterations_are_not_left",
    "nothing_is_returned",
]
