# SPDX-License-Identifier: Apache-2.0
"""16-bit floats: arithmetic in float32, and bfloat16 conversions by integer arithmetic."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.interop.arrays import HALVES
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import alloc, collect, is_element, lane_dtype, seq, substitute
from sparsetir.ir.rules import FLOAT_FUNCTIONS
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.independence import ArrayFacts, is_shared
from sparsetir.lower.annotations import DISTINCT, INDPTR, names_in
from sparsetir.lower.loops import SERIAL, UNROLLED, Update, serial, with_body

# Convert from and to bfloat16 by bit arithmetic, in functions that bind names in expressions or have bfloat16 scratch.
#
# before::
#
#     y[j] = T.Cast("bfloat16", T.Let(x * x, where={x: T.Cast("float32", a[i])}))
#
# after::
#
#     y[j] = T.reinterpret("bfloat16", T.Cast("uint16", T.Let(
#         bits + (bits >> 16 & 1) + 0x7FFF >> 16, where={bits: T.reinterpret("uint32", T.Let(
#             x * x, where={x: T.reinterpret("float32", T.Cast("uint32", T.reinterpret("uint16", a[i])) << 16)}))})))
#
# TVM expands conversions in the same way, except in the value bound to a name, where it would read the bits as an
# integer. It also duplicates the expression that it rounds, with all names bound in it.
#
# Scratch of bfloat16 stores the bits as ``uint16``. TVM would make it float32 in loads and stores, which then do not
# round, but not where its bits are reinterpreted or its address is taken::
#
#     q = T.alloc_buffer((n,), "bfloat16")          q = T.alloc_buffer((n,), "uint16")
#     q[i] = a[i]                                   q[i] = T.reinterpret("uint16", a[i])


KIND = "bfloat16"
BITS = 16  # bits of a float32 that a bfloat16 drops
STORED = "uint16"  # dtype of a bfloat16 in memory


def _unsigned(value: int, lanes: str) -> ir.Expr:
    one = tirx.const(value, "uint32")
    return tirx.Broadcast(one, int(lanes[1:])) if lanes else one


def convert_to_float32(value: ir.Expr, lanes: str) -> ir.Expr:
    """Convert a bfloat16 number to float32."""
    bits = tirx.Cast(f"uint32{lanes}", _reinterpreted(value, STORED))
    return tirx.reinterpret(f"float32{lanes}", tirx.shift_left(bits, _unsigned(BITS, lanes)))


def rounded(value: ir.Expr, lanes: str) -> ir.Expr:
    """Round a float32 to the nearest bfloat16, ties to even."""
    bits = Var("bits", ir.PrimType(f"uint32{lanes}"))
    is_odd = tirx.bitwise_and(tirx.shift_right(bits, _unsigned(BITS, lanes)), _unsigned(1, lanes))
    total = bits + (is_odd + _unsigned((1 << BITS - 1) - 1, lanes))
    half = tirx.Cast(f"uint16{lanes}", tirx.shift_right(total, _unsigned(BITS, lanes)))
    return tirx.reinterpret(f"{KIND}{lanes}", tirx.Let(bits, tirx.reinterpret(f"uint32{lanes}", value), half))


def converted(value: ir.Expr, dtype: str) -> ir.Expr:
    """Convert an expression to another dtype of one lane.

    Both branches of a choice are converted: TVM's LLVM code generator cannot select between bfloat16 values.
    """
    source_dtype, lanes = lane_dtype(value)
    if source_dtype == dtype or KIND not in (source_dtype, dtype):
        return tirx.Cast(f"{dtype}{lanes}", value)
    if source_dtype == KIND and dialect.is_if_then_else(value):
        condition, first, second = value.args
        return tirx.if_then_else(condition, converted(first, dtype), converted(second, dtype))
    if source_dtype == KIND and isinstance(value, tirx.Select):
        return tirx.Select(value.condition, converted(value.true_value, dtype), converted(value.false_value, dtype))
    if source_dtype == KIND and isinstance(value, tirx.FloatImm):
        return tirx.const(float(value.value), dtype)
    if dtype == KIND:
        return rounded(value if source_dtype == "float32" else tirx.Cast(f"float32{lanes}", value), lanes)
    wide = convert_to_float32(value, lanes)
    return wide if dtype == "float32" else tirx.Cast(f"{dtype}{lanes}", wide)


def _scratch(body: tirx.Stmt) -> dict[Var, Var]:
    """Map each bfloat16 array that statements allocate to the array of its bits."""
    arrays = [a.buffer for a in collect(body, tirx.AllocBuffer) if str(a.buffer.ty.dtype) == KIND]
    return {b: _as_bits(b) for b in arrays}


def _as_bits(buffer: Var) -> Var:
    scope = str(buffer.ty.storage_scope)
    return tirx.decl_buffer(buffer.ty.shape, STORED, name=str(buffer.name), scope=scope, layout=None)


def _reinterpreted(value: ir.Expr, dtype: str) -> ir.Expr:
    """Reinterpret the bits of a number as another 16-bit dtype."""
    source_dtype, lanes = lane_dtype(value)
    if dialect.function_of(value) == "reinterpret" and lane_dtype(value.args[0])[0] == dtype:
        return value.args[0]
    return value if source_dtype == dtype else tirx.reinterpret(f"{dtype}{lanes}", value)


class _Bits:
    """Rewriter of statements that replaces bfloat16 scratch by arrays of its bits."""

    def __init__(self, scratch: dict[Var, Var]) -> None:
        self.scratch = scratch

    def load(self, node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        """Load the bits of an element and reinterpret them as bfloat16."""
        inner = mutator.default_mutate(node)
        if node.source not in self.scratch:
            return inner
        return _reinterpreted(tirx.BufferLoad(self.scratch[node.source], inner.indices), KIND)

    def call(self, node: ir.Call, mutator: Any) -> ir.Expr:
        """Rewrite ``address_of`` an element to that of its bits."""
        is_address = dialect.function_of(node) == "address_of" and node.args[0].source in self.scratch
        if not is_address:
            return mutator.default_mutate(node)
        indices = [mutator.mutate(i) for i in node.args[0].indices]
        return tirx.address_of(tirx.BufferLoad(self.scratch[node.args[0].source], indices))

    def store(self, node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        """Store the bits of a value."""
        inner = mutator.default_mutate(node)
        if node.buffer not in self.scratch:
            return inner
        return tirx.BufferStore(self.scratch[node.buffer], stored_bits(inner.value), inner.indices)

    def alloc(self, node: tirx.AllocBuffer, _mutator: Any) -> tirx.Stmt:
        """Allocate the array of bits in place of the bfloat16 one."""
        return tirx.AllocBuffer(self.scratch.get(node.buffer, node.buffer))


def stored_bits(value: ir.Expr) -> ir.Expr:
    """Return the bits of a bfloat16 number; a choice selects between bits, and literals are rounded at compile time."""
    if dialect.is_if_then_else(value):
        condition, first, second = value.args
        return tirx.if_then_else(condition, stored_bits(first), stored_bits(second))
    if isinstance(value, tirx.Select):
        return tirx.Select(value.condition, stored_bits(value.true_value), stored_bits(value.false_value))
    if isinstance(value, tirx.Broadcast):
        return tirx.Broadcast(stored_bits(value.value), value.lanes)
    if isinstance(value, tirx.FloatImm):
        return tirx.const(int(np.asarray(float(value.value), ml_dtypes.bfloat16).view(np.uint16)), STORED)
    return _reinterpreted(value, STORED)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ConvertHalves")
def ConvertHalves(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Expand the bfloat16 conversions of a function that binds names in expressions or has bfloat16 scratch."""
    if not _scratch(func.body) and not collect(func.body, tirx.Let):
        return func

    def on_cast(cast: tirx.Cast, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(cast)
        return converted(inner.value, lane_dtype(inner)[0])

    body = structural_mutate(func.body, [(tirx.Cast, on_cast)])
    scratch = _scratch(body)  # Collected from the new body, since conversions in shapes replace the arrays.
    bits = _Bits(scratch)
    callbacks = [
        (tirx.BufferStore, bits.store),
        (tirx.AllocBuffer, bits.alloc),
        (ir.TensorLoad, bits.load),
        (ir.Call, bits.call),
    ]
    return with_body(func, structural_mutate(body, callbacks) if scratch else body)


# Compute 16-bit floats in float32; round only when a value leaves the registers.
#
# before::
#
#     acc = T.alloc_local((1,), "float16")
#     acc[0] = acc[0] + a[p] * b[q]          # rounded at every step
#     c[i] = acc[0]
#
# after::
#
#     acc = T.alloc_local((1,), "float32")
#     acc[0] = acc[0] + T.Cast("float32", a[p]) * T.Cast("float32", b[q])
#     c[i] = T.Cast("float16", acc[0])
#
# Sums that are accumulated in memory, such as column sums over rows, use a float32 copy of the array, which is rounded
# once at the end. The function's own arrays become float32 without a copy::
#
#     for i in range(n):
#         for j in range(indptr[i + 1] - indptr[i]):
#             c[indices[indptr[i] + j]] = c[indices[indptr[i] + j]] + a[indptr[i] + j]
#
# after::
#
#     wide = T.alloc_buffer((m,), "float32")
#     for j in range(m):
#         wide[j] = T.Cast("float32", c[j])
#     for i in range(n):
#         for j in range(indptr[i + 1] - indptr[i]):
#             wide[indices[indptr[i] + j]] = wide[indices[indptr[i] + j]] + T.Cast("float32", a[indptr[i] + j])
#     for j in range(m):
#         c[j] = T.Cast("float16", wide[j])
#
# Functions such as ``T.exp`` and ``T.erf``, comparisons and choices are computed in float32 as well.


ROUNDED = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)
COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.Min, tirx.Max)


def _is_half(expr: Any) -> bool:
    return str(expr.ty.dtype).partition("x")[0] in HALVES


ROUNDING_FUNCTIONS = ("fabs", "floor", "ceil", "trunc", "round", "nearbyint")  # exact in any dtype


def _like(expr: Any) -> str:
    """Return float32 with the number of lanes of `expr`."""
    return "float32" + "".join(str(expr.ty.dtype).partition("x")[1:])


def _is_function(expr: Any) -> bool:
    """Return whether an expression is a math function; LLVM cannot generate code for some of these in 16 bits."""
    name = dialect.function_of(expr)
    return name in FLOAT_FUNCTIONS or name in ROUNDING_FUNCTIONS


class _Promoter:
    """Rewriter of 16-bit arithmetic to float32; `local` maps 16-bit arrays to their float32 replacements."""

    def __init__(self, local: dict[Var, Var]) -> None:
        self.local = local

    def wide(self, expr: Any) -> Any:
        """Return the float32 expression for a 16-bit one."""
        if not _is_half(expr):
            return self.rewrite(expr)
        if isinstance(expr, ARITHMETIC):
            return type(expr)(self.wide(expr.a), self.wide(expr.b))
        if isinstance(expr, tirx.FloatImm):
            return tirx.const(float(expr.value), "float32")
        if isinstance(expr, ir.TensorLoad) and expr.source in self.local:
            return tirx.BufferLoad(self.local[expr.source], [self.rewrite(i) for i in expr.indices])
        if dialect.is_if_then_else(expr):
            return tirx.if_then_else(self.rewrite(expr.args[0]), self.wide(expr.args[1]), self.wide(expr.args[2]))
        if isinstance(expr, tirx.Select):
            return tirx.Select(self.rewrite(expr.condition), self.wide(expr.true_value), self.wide(expr.false_value))
        if _is_function(expr):
            return ir.Call(expr.op, [self.wide(a) for a in expr.args], ret_ty=ir.PrimType(_like(expr)))
        return tirx.Cast(_like(expr), self.rewrite(expr))

    def rewrite(self, node: Any) -> Any:
        """Widen the 16-bit arithmetic inside `node`; its type is unchanged."""

        def on_arithmetic(expr: Any, mutator: Any) -> Any:
            return tirx.Cast(str(expr.ty.dtype), self.wide(expr)) if _is_half(expr) else mutator.default_mutate(expr)

        def on_comparison(expr: Any, mutator: Any) -> Any:
            if not _is_half(expr.a):
                return mutator.default_mutate(expr)
            return type(expr)(self.wide(expr.a), self.wide(expr.b))

        def on_call(call: ir.Call, mutator: Any) -> Any:
            return on_arithmetic(call, mutator) if _is_function(call) else mutator.default_mutate(call)

        callbacks: list[Any] = [(ir.TensorLoad, self.load), (ir.Call, on_call)]
        callbacks += [(kind, on_arithmetic) for kind in ARITHMETIC]
        callbacks += [(kind, on_comparison) for kind in COMPARISONS]
        return structural_mutate(node, callbacks)

    def load(self, node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        """Load an element from the float32 array and cast it to its original type."""
        if node.source not in self.local:
            return mutator.default_mutate(node)
        return tirx.Cast(str(node.ty.dtype), self.wide(node))

    def call(self, node: ir.Call, mutator: Any) -> ir.Expr:
        """Rewrite ``address_of`` an element to that of its float32 replacement."""
        is_widened = dialect.function_of(node) == "address_of" and node.args[0].source in self.local
        return tirx.address_of(self.wide(node.args[0])) if is_widened else mutator.default_mutate(node)

    def store(self, node: tirx.BufferStore, _mutator: Any) -> tirx.Stmt:
        """Rewrite a store to compute its value in float32."""
        indices = [self.rewrite(i) for i in node.indices]
        if node.buffer in self.local:
            value = self.update(node) if _rounds_wide(node.value) and _is_running(node) else self.wide(node.value)
            return tirx.BufferStore(self.local[node.buffer], value, indices)
        value = self.rewrite(node.value)
        if dialect.is_if_then_else(value) and _is_half(value):  # TVM cannot select between bfloat16 vectors.
            value = tirx.Cast(str(value.ty.dtype), self.wide(node.value))
        return tirx.BufferStore(node.buffer, value, indices)

    def update(self, node: tirx.BufferStore) -> ir.Expr:
        """Return the float32 sum that a store rounds, with the stored element read from the float32 array."""
        wide_element = tirx.BufferLoad(self.local[node.buffer], node.indices)

        def on_cast(cast: tirx.Cast, mutator: Any) -> ir.Expr:
            is_stored_element = str(cast.ty.dtype) == "float32" and is_element(cast.value, node)
            return wide_element if is_stored_element else mutator.default_mutate(cast)

        return self.rewrite(structural_mutate(node.value.value, [(tirx.Cast, on_cast)]))

    def alloc(self, node: tirx.AllocBuffer, _mutator: Any) -> tirx.Stmt:
        """Allocate the float32 array in place of the 16-bit one."""
        return tirx.AllocBuffer(self.local.get(node.buffer, node.buffer))


def widened(expr: ir.Expr, wide_arrays: dict[Var, Var] | None = None) -> ir.Expr:
    """Compute a 16-bit floating-point expression in float32; return others unchanged.

    Elements of arrays that are keys of `wide_arrays` are read from the float32 arrays that these map to.
    """
    return _Promoter(wide_arrays or {}).wide(expr) if _is_half(expr) else expr


class _RoundedSums:
    """The 16-bit arrays in memory whose elements are updated, and therefore rounded, several times.

    An update reads the element that it stores, directly or into a running sum in registers. Several steps of a loop or
    several statements of the function may update the same element.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.facts = ArrayFacts(names_in(func, INDPTR), names_in(func, DISTINCT))
        stores = [s for s in collect(func.body, tirx.BufferStore) if _is_half(s.value)]
        self.begun = {(load.source, s.buffer) for s in stores for load in collect(s.value, ir.TensorLoad)}
        self.running = {s.buffer for s in stores if _is_running(s)}
        self.loops: list[tirx.For] = []
        self.updated: dict[Var, None] = {}
        self.repeated: dict[Var, None] = {}
        self.parts: dict[Var, Var] = {}  # arrays that are added to others element by element

    def visit(self, body: tirx.Stmt) -> None:
        """Collect the arrays that the statements of a function update several times."""
        before: set[Var] = set()
        for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
            self.updated = {}
            structural_mutate(stmt, [(tirx.For, self.on_for), (tirx.BufferStore, self.on_store)])
            self.repeated |= {b: None for b in self.updated if b in before}
            before |= set(self.updated)

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        """Visit a loop; only serial and unrolled ones repeat updates of an element."""
        if node.kind not in (SERIAL, UNROLLED):
            return mutator.default_mutate(node)
        self.loops.append(node)
        out = mutator.default_mutate(node)
        self.loops.pop()
        return out

    def on_store(self, node: tirx.BufferStore, _mutator: Any) -> tirx.Stmt:
        """Record the array of a running sum."""
        target = node.buffer
        is_in_memory = str(target.ty.dtype) in HALVES and str(target.ty.storage_scope) != "local"
        if not is_in_memory or target in self.repeated or not (_is_running(node) or self._writes_sum(node)):
            return node
        self.updated[target] = None
        update = Update.of(node)
        if update is not None and isinstance(update.term, ir.TensorLoad):
            self.parts[update.term.source] = target
        if any(is_shared(target, loop, self.facts) for loop in self.loops):
            self.repeated[target] = None
        return node

    def _writes_sum(self, store: tirx.BufferStore) -> bool:
        """Return whether a store writes a running sum in registers that was initialized from the same array."""
        registers = {load.source for load in collect(store.value, ir.TensorLoad)} & self.running
        return any((store.buffer, x) in self.begun for x in registers)


def _rounds_wide(value: ir.Expr) -> bool:
    """Return whether an expression is float32 arithmetic that is rounded to 16 bits."""
    is_wide = isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == "float32"
    return is_wide and isinstance(value.value, ROUNDED)


def _is_running(store: tirx.BufferStore) -> bool:
    """Return whether a store rounds arithmetic on the element that it sets."""
    value = store.value
    steps = [x for kind in ROUNDED for x in collect(value, kind) if _is_half(x)]
    if _rounds_wide(value):
        steps.append(value.value)
    return any(is_element(load, store) for x in steps for load in collect(x, ir.TensorLoad))


def _addressed(func: tirx.PrimFunc) -> set[Var]:
    """Return the arrays that are read by address, which must keep 16-bit elements."""
    calls = [c for store in collect(func.body, tirx.BufferStore) for c in collect(store.value, ir.Call)]
    return {c.args[0].source for c in calls if dialect.function_of(c) == "address_of"}


def _sums(func: tirx.PrimFunc) -> list[Var]:
    """Return the 16-bit arrays to accumulate in float32, including the function's own arrays of partial sums."""
    sums = _RoundedSums(func)
    sums.visit(func.body)
    addressed = _addressed(func) if sums.repeated else set()
    parts = [part for part, whole in sums.parts.items() if whole in sums.repeated and part not in sums.repeated]
    allocated = {a.buffer for a in collect(func.body, tirx.AllocBuffer)}
    return [b for b in [*sums.repeated, *(p for p in parts if p in allocated)] if b not in addressed]


def _copy(source: Var, target: Var) -> tirx.Stmt:
    """Return loops that copy an array to one of another dtype."""
    shape = list(source.ty.shape)
    at = [Var(f"d{n}", extent.ty) for n, extent in enumerate(shape)]
    value = tirx.Cast(str(target.ty.dtype), tirx.BufferLoad(source, at))
    out: tirx.Stmt = tirx.BufferStore(target, value, at)
    for var, extent in reversed(list(zip(at, shape, strict=True))):
        out = serial(var, extent, out)
    return out


def _wide(buffer: Var, name: str) -> Var:
    scope = str(buffer.ty.storage_scope)
    return tirx.decl_buffer(buffer.ty.shape, "float32", name=name, scope=scope, layout=None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PromoteHalves")
def PromoteHalves(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Widen the 16-bit arithmetic of a function."""
    allocated = [a.buffer for a in collect(func.body, tirx.AllocBuffer) if str(a.buffer.ty.dtype) in HALVES]
    stored = [s.buffer for s in collect(func.body, tirx.BufferStore) if str(s.buffer.ty.dtype) in HALVES]
    if not allocated and not stored:
        return func
    summed = _sums(func)
    local = {b: _wide(b, str(b.name)) for b in allocated if str(b.ty.storage_scope) == "local" or b in summed}
    copied = {b: _wide(b, f"{b.name}_wide") for b in summed if b not in allocated}
    promoter = _Promoter(local | copied)
    callbacks = [
        (tirx.BufferStore, promoter.store),
        (tirx.AllocBuffer, promoter.alloc),
        (ir.TensorLoad, promoter.load),
        (ir.Call, promoter.call),
    ]
    body = structural_mutate(func.body, callbacks)
    begin = [_copy(b, wide) for b, wide in copied.items()]
    end = [_copy(wide, b) for b, wide in copied.items()]
    return with_body(func, seq(*alloc(*copied.values()), *begin, body, *end))


# Scalar parameters of dtype bfloat16 are passed as float32: TVM's calling convention has no bfloat16.
#
# before::
#
#     def scale(a: T.handle, alpha: T.bfloat16): ...
#         a[i] = a[i] * alpha
#
# after::
#
#     def scale(a: T.handle, alpha: T.float32): ...
#         a[i] = a[i] * T.Cast("bfloat16", alpha)


def _is_number(param: Any) -> bool:
    return not tirx.is_buffer_var(param) and str(getattr(param.ty, "dtype", "")) == "bfloat16"


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WidenScalars")
def WidenScalars(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Pass scalar parameters of dtype bfloat16 as float32."""
    wide: dict[Any, Any] = {p: tirx.Var(str(p.name), "float32") for p in func.params if _is_number(p)}
    if not wide:
        return func
    values = {narrow: tirx.Cast("bfloat16", var) for narrow, var in wide.items()}
    body = substitute(func.body, values)
    return tirx.PrimFunc([wide.get(p, p) for p in func.params], body, func.ret_type, func.attrs)


__all__ = ["ConvertHalves", "WidenScalars"]
