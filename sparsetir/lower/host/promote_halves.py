# SPDX-License-Identifier: Apache-2.0
"""Compute 16-bit floats in float32; round only when a value leaves the registers.

before::

    acc = T.alloc_local((1,), "float16")
    acc[0] = acc[0] + a[p] * b[q]          # rounded at every step
    c[i] = acc[0]

after::

    acc = T.alloc_local((1,), "float32")
    acc[0] = acc[0] + T.Cast("float32", a[p]) * T.Cast("float32", b[q])
    c[i] = T.Cast("float16", acc[0])

Functions such as ``T.exp`` and ``T.erf``, comparisons and choices are computed in float32 likewise.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect
from sparsetir.type_rules import FLOAT_FUNCTIONS
from sparsetir.walks import structural_mutate

HALVES = ("float16", "bfloat16")
COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Min, tirx.Max)


def _is_half(expr: Any) -> bool:
    return str(expr.ty.dtype).partition("x")[0] in HALVES


def _like(expr: Any) -> str:
    """float32 with as many lanes."""
    return "float32" + "".join(str(expr.ty.dtype).partition("x")[1:])


def _is_function(expr: Any) -> bool:
    """Whether it is a function of 16-bit floats; LLVM has no machine code for some."""
    return op.function_of(expr) in FLOAT_FUNCTIONS


class _Promoter:
    """Rewrites expressions; `local` maps 16-bit local arrays to their float32 replacements."""

    def __init__(self, local: dict[Var, Var]) -> None:
        self.local = local

    def wide(self, expr: Any) -> Any:
        """A float32 expression for a 16-bit one."""
        if not _is_half(expr):
            return self.rewrite(expr)
        if isinstance(expr, ARITHMETIC):
            return type(expr)(self.wide(expr.a), self.wide(expr.b))
        if isinstance(expr, tirx.FloatImm):
            return tirx.const(float(expr.value), "float32")
        if isinstance(expr, ir.TensorLoad) and expr.source in self.local:
            return tirx.BufferLoad(self.local[expr.source], [self.rewrite(i) for i in expr.indices])
        if op.is_if_then_else(expr):
            return tirx.if_then_else(self.rewrite(expr.args[0]), self.wide(expr.args[1]), self.wide(expr.args[2]))
        if isinstance(expr, tirx.Select):
            return tirx.Select(self.rewrite(expr.condition), self.wide(expr.true_value), self.wide(expr.false_value))
        if _is_function(expr):
            return ir.Call(expr.op, [self.wide(a) for a in expr.args], ret_ty=ir.PrimType(_like(expr)))
        return tirx.Cast(_like(expr), self.rewrite(expr))

    def rewrite(self, node: Any) -> Any:
        """`node` with its 16-bit arithmetic wide, and of the same type as before."""

        def on_load(load: ir.TensorLoad, mutator: Any) -> Any:
            if load.source in self.local:
                return tirx.Cast(str(load.ty.dtype), self.wide(load))
            return mutator.default_mutate(load)

        def on_arithmetic(expr: Any, mutator: Any) -> Any:
            return tirx.Cast(str(expr.ty.dtype), self.wide(expr)) if _is_half(expr) else mutator.default_mutate(expr)

        def on_comparison(expr: Any, mutator: Any) -> Any:
            if not _is_half(expr.a):
                return mutator.default_mutate(expr)
            return type(expr)(self.wide(expr.a), self.wide(expr.b))

        def on_call(call: ir.Call, mutator: Any) -> Any:
            return on_arithmetic(call, mutator) if _is_function(call) else mutator.default_mutate(call)

        callbacks: list[Any] = [(ir.TensorLoad, on_load), (ir.Call, on_call)]
        callbacks += [(kind, on_arithmetic) for kind in ARITHMETIC]
        callbacks += [(kind, on_comparison) for kind in COMPARISONS]
        return structural_mutate(node, callbacks)

    def store(self, node: tirx.BufferStore, _mutator: Any) -> tirx.Stmt:
        """A store whose value is computed wide."""
        indices = [self.rewrite(i) for i in node.indices]
        if node.buffer in self.local:
            return tirx.BufferStore(self.local[node.buffer], self.wide(node.value), indices)
        value = self.rewrite(node.value)
        if op.is_if_then_else(value) and _is_half(value):  # TVM chooses between no vectors of bfloat16
            value = tirx.Cast(str(value.ty.dtype), self.wide(node.value))
        return tirx.BufferStore(node.buffer, value, indices)

    def alloc(self, node: tirx.AllocBuffer, _mutator: Any) -> tirx.Stmt:
        """A float32 array instead of a 16-bit one."""
        return tirx.AllocBuffer(self.local.get(node.buffer, node.buffer))


def widened(expr: ir.Expr, held: dict[Var, Var] | None = None) -> ir.Expr:
    """A 16-bit floating-point expression computed in float32; others as they are.

    Elements of the arrays that are keys of `held` are read in those of float32 in their place.
    """
    return _Promoter(held or {}).wide(expr) if _is_half(expr) else expr


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PromoteHalves")
def PromoteHalves(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Widen the 16-bit arithmetic of a function."""
    if not any(str(s.buffer.ty.dtype) in HALVES for s in collect(func.body, tirx.BufferStore)):
        return func
    held = [a.buffer for a in collect(func.body, tirx.AllocBuffer)]
    local = {
        b: tirx.decl_buffer(b.ty.shape, "float32", name=str(b.name), scope="local", layout=None)
        for b in held
        if str(b.ty.dtype) in HALVES and str(b.ty.storage_scope) == "local"
    }
    promoter = _Promoter(local)
    callbacks = [(tirx.BufferStore, promoter.store), (tirx.AllocBuffer, promoter.alloc)]
    body = structural_mutate(func.body, callbacks)
    return with_body(func, body)
