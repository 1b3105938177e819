# SPDX-License-Identifier: Apache-2.0
"""Conversions from and to bfloat16 as arithmetic on bits, in functions with bound names or scratch of bfloat16.

before::

    y[j] = T.Cast("bfloat16", T.Let(x * x, where={x: T.Cast("float32", a[i])}))

after::

    y[j] = T.reinterpret("bfloat16", T.Cast("uint16", T.Let(
        bits + (bits >> 16 & 1) + 0x7FFF >> 16, where={bits: T.reinterpret("uint32", T.Let(
            x * x, where={x: T.reinterpret("float32", T.Cast("uint32", T.reinterpret("uint16", a[i])) << 16)}))})))

TVM writes conversions in the same way, but not those in the meaning of a name, where it would read the bits as an
integer, and it rounds an expression that it names twice, with all names in it.

Scratch of bfloat16 holds the bits as ``uint16``: TVM would make it float32 in loads and stores, which are then not
rounded, but neither where its bits nor where its address are asked for::

    q = T.alloc_buffer((n,), "bfloat16")          q = T.alloc_buffer((n,), "uint16")
    q[i] = a[i]                                   q[i] = T.reinterpret("uint16", a[i])
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate

KIND = "bfloat16"
BITS = 16  # of a float32 that a bfloat16 drops
STORED = "uint16"  # a bfloat16 in memory


def _kind(expr: ir.Expr) -> tuple[str, str]:
    """The dtype of one lane, and what stands behind it for several."""
    name, times, lanes = str(expr.ty.dtype).partition("x")
    return name, times + lanes


def _unsigned(value: int, lanes: str) -> ir.Expr:
    one = tirx.const(value, "uint32")
    return tirx.Broadcast(one, int(lanes[1:])) if lanes else one


def widened(value: ir.Expr, lanes: str) -> ir.Expr:
    """A bfloat16 number as float32."""
    bits = tirx.Cast(f"uint32{lanes}", tirx.reinterpret(f"uint16{lanes}", value))
    return tirx.reinterpret(f"float32{lanes}", tirx.shift_left(bits, _unsigned(BITS, lanes)))


def rounded(value: ir.Expr, lanes: str) -> ir.Expr:
    """The bfloat16 number nearest to a float32, the even one of two."""
    bits = Var("bits", ir.PrimType(f"uint32{lanes}"))
    is_odd = tirx.bitwise_and(tirx.shift_right(bits, _unsigned(BITS, lanes)), _unsigned(1, lanes))
    total = bits + (is_odd + _unsigned((1 << BITS - 1) - 1, lanes))
    half = tirx.Cast(f"uint16{lanes}", tirx.shift_right(total, _unsigned(BITS, lanes)))
    return tirx.reinterpret(f"{KIND}{lanes}", tirx.Let(bits, tirx.reinterpret(f"uint32{lanes}", value), half))


def converted(value: ir.Expr, wanted: str) -> ir.Expr:
    """Convert an expression to another dtype of one lane.

    Both branches of a choice are converted: LLVM's code for TVM chooses between no bfloat16.
    """
    given, lanes = _kind(value)
    if given == wanted or KIND not in (given, wanted):
        return tirx.Cast(f"{wanted}{lanes}", value)
    if given == KIND and op.is_if_then_else(value):
        condition, first, second = value.args
        return tirx.if_then_else(condition, converted(first, wanted), converted(second, wanted))
    if given == KIND and isinstance(value, tirx.FloatImm):
        return tirx.const(float(value.value), wanted)
    if wanted == KIND:
        return rounded(value if given == "float32" else tirx.Cast(f"float32{lanes}", value), lanes)
    wide = widened(value, lanes)
    return wide if wanted == "float32" else tirx.Cast(f"{wanted}{lanes}", wide)


def _scratch(body: tirx.Stmt) -> dict[Var, Var]:
    """The arrays of bfloat16 that statements allocate, and what holds their bits."""
    own = [a.buffer for a in collect(body, tirx.AllocBuffer) if str(a.buffer.ty.dtype) == KIND]
    return {b: _as_bits(b) for b in own}


def _as_bits(buffer: Var) -> Var:
    scope = str(buffer.ty.storage_scope)
    return tirx.decl_buffer(buffer.ty.shape, STORED, name=str(buffer.name), scope=scope, layout=None)


def _reinterpreted(value: ir.Expr, wanted: str) -> ir.Expr:
    """The bits of a number as another dtype of 16 bits."""
    given, lanes = _kind(value)
    if op.function_of(value) == "reinterpret" and _kind(value.args[0])[0] == wanted:
        return value.args[0]
    return value if given == wanted else tirx.reinterpret(f"{wanted}{lanes}", value)


class _Bits:
    """Rewrites statements whose scratch of bfloat16 becomes that of its bits."""

    def __init__(self, scratch: dict[Var, Var]) -> None:
        self.scratch = scratch

    def load(self, node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        """An element, of the type it had."""
        inner = mutator.default_mutate(node)
        if node.source not in self.scratch:
            return inner
        return _reinterpreted(tirx.BufferLoad(self.scratch[node.source], inner.indices), KIND)

    def call(self, node: ir.Call, mutator: Any) -> ir.Expr:
        """The address of an element."""
        is_address = op.function_of(node) == "address_of" and node.args[0].source in self.scratch
        if not is_address:
            return mutator.default_mutate(node)
        indices = [mutator.mutate(i) for i in node.args[0].indices]
        return tirx.address_of(tirx.BufferLoad(self.scratch[node.args[0].source], indices))

    def store(self, node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        """A store of bits."""
        inner = mutator.default_mutate(node)
        if node.buffer not in self.scratch:
            return inner
        return tirx.BufferStore(self.scratch[node.buffer], stored_bits(inner.value), inner.indices)

    def alloc(self, node: tirx.AllocBuffer, _mutator: Any) -> tirx.Stmt:
        """Memory for bits."""
        return tirx.AllocBuffer(self.scratch.get(node.buffer, node.buffer))


def stored_bits(value: ir.Expr) -> ir.Expr:
    """The bits of a bfloat16 number; a choice is one of bits, and literals are rounded here."""
    if op.is_if_then_else(value):
        condition, first, second = value.args
        return tirx.if_then_else(condition, stored_bits(first), stored_bits(second))
    if isinstance(value, tirx.Select):
        return tirx.Select(value.condition, stored_bits(value.true_value), stored_bits(value.false_value))
    if isinstance(value, tirx.Broadcast):
        return tirx.Broadcast(stored_bits(value.value), value.lanes)
    if isinstance(value, tirx.FloatImm):
        return tirx.const(_literal_bits(float(value.value)), STORED)
    return _reinterpreted(value, STORED)


def _literal_bits(number: float) -> int:
    return int(np.asarray(number, ml_dtypes.bfloat16).view(np.uint16))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ConvertHalves")
def ConvertHalves(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Write out the conversions of a function that binds names in expressions, or has scratch of bfloat16."""
    if not _scratch(func.body) and not collect(func.body, tirx.Let):
        return func

    def on_cast(cast: tirx.Cast, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(cast)
        return converted(inner.value, _kind(inner)[0])

    body = structural_mutate(func.body, [(tirx.Cast, on_cast)])
    scratch = _scratch(body)  # of that body: conversions in shapes make other arrays of them
    bits = _Bits(scratch)
    callbacks = [
        (tirx.BufferStore, bits.store),
        (tirx.AllocBuffer, bits.alloc),
        (ir.TensorLoad, bits.load),
        (ir.Call, bits.call),
    ]
    return with_body(func, structural_mutate(body, callbacks) if scratch else body)


__all__ = ["ConvertHalves"]
