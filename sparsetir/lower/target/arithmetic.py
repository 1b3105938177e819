# SPDX-License-Identifier: Apache-2.0
"""Scalar arithmetic with numpy's semantics: divisions, NaN, wrap-around, wide indices, guarded loads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import Call, Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import DIVISIONS, collect, conjunction, conjuncts, lane_dtype, mentions, renewed, same
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import STRUCTURE
from sparsetir.lower.loops import with_body

# Guard integer divisions that trap: by zero, and of the smallest integer by -1.
#
# A size of zero is replaced by one as a divisor: the enclosing loops run zero times then, but LLVM may hoist the
# division out of them. Every other divisor that is not proved to be positive may have any value, be it computed from
# arrays, coordinates or scalar parameters: as in numpy, division by zero gives zero, and the quotient of the smallest
# integer and -1 wraps around.
#
# before::
#
#     for i_s in T.parallel(m * width):
#         c[i_s // width, i_s % width] = a[...] // b[...]
#
# after::
#
#     for i_s in T.parallel(m * width):
#         c[i_s // T.max(width, 1), i_s % T.max(width, 1)] = T.if_then_else(b[...] in (0, -1), ..., a[...] // b[...])


class _Divisors:
    """The values that divisors of a function may have.

    Parameters
    ----------
    func : PrimFunc
        Its sizes, the variables in the shapes of its parameters, are not negative.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        shapes = [extent for p in func.params if tirx.is_buffer_var(p) for extent in p.ty.shape]
        self.sizes = {v for extent in shapes for v in collect(extent, Var)}
        self.analyzer = sym.Analyzer()
        for size in self.sizes:
            dtype = str(size.ty.dtype)
            self.analyzer.bind(size, ir.Range(const(0, dtype), tirx.max_value(dtype)))
        loops = collect(func.body, tirx.For)
        counts = Counter(loop.loop_var for loop in loops)
        for loop in loops:
            if counts[loop.loop_var] == 1:  # the analyzer refuses a second range of a variable
                self.analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    def is_at_least(self, divisor: ir.Expr, bound: int) -> bool:
        """Return whether a divisor is never less than a number."""
        return bool(self.analyzer.can_prove(divisor >= const(bound, str(divisor.ty.dtype))))

    def is_size(self, divisor: ir.Expr) -> bool:
        """Return whether a divisor is made of sizes alone and is not negative."""
        return all(v in self.sizes for v in collect(divisor, Var)) and self.is_at_least(divisor, 0)


def _guarded(node: Any) -> ir.Expr:
    """Rewrite a division by an integer of any value so that it cannot trap."""
    a, b, dtype = node.a, node.b, str(node.b.ty.dtype)
    zero, is_zero = const(0, dtype), b.equal(const(0, dtype))
    if dtype.startswith("uint"):
        return tirx.if_then_else(is_zero, zero, type(node)(a, tirx.max(b, const(1, dtype))))
    is_minus = b.equal(const(-1, dtype))
    stops = tirx.Or(is_zero, is_minus)
    plain = type(node)(a, tirx.Select(stops, const(1, dtype), b))
    if isinstance(node, (tirx.FloorMod, tirx.Mod)):
        return tirx.if_then_else(stops, zero, plain)
    unsigned = f"u{dtype}"
    negated = tirx.Cast(dtype, tirx.Cast(unsigned, tirx.bitwise_not(a)) + const(1, unsigned))  # wraps around
    return tirx.if_then_else(is_zero, zero, tirx.if_then_else(is_minus, negated, plain))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.GuardDivisions")
def GuardDivisions(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Guard the integer divisions of a function whose divisors are not proved to be positive."""
    divisors = _Divisors(func)

    def on_division(node: Any, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(node)
        divisor, dtype = inner.b, str(inner.b.ty.dtype)
        if isinstance(divisor, tirx.IntImm) or not dtype.startswith(("int", "uint")):
            return inner
        if not collect(divisor, ir.TensorLoad):
            if divisors.is_at_least(divisor, 1):
                return inner
            if divisors.is_size(divisor):
                return type(inner)(inner.a, tirx.max(divisor, const(1, dtype)))
        return _guarded(inner)

    body = structural_mutate(func.body, [(kind, on_division) for kind in DIVISIONS])
    return with_body(func, body)


# Propagate NaN through minima and maxima of floats, as numpy and IEEE 754 do.
#
# before::
#
#     c[i] = T.max(c[i], a[p])
#
# after::
#
#     c[i] = T.Select(a[p] >= T.float32("-inf"), T.max(a[p], c[i]), a[p])
#     y[j] = T.max(T.float32(0), x[j])                                      # for T.max(x[j], T.float32(0))
#
# LLVM's code for TVM's ``T.max(x, y)`` compares, and takes y where a comparison with NaN fails: NaN in the first
# operand is lost. The result of a reduction would then depend on the order of its steps, which loops and formats
# choose. The test for NaN is on the second operand, in a reduction the new element, so it is not on the dependence
# chain.


EXTREMES = (tirx.Max, tirx.Min)
PLAIN = (Var, ir.TensorLoad)


def _is_of_floats(node: Any) -> bool:
    return str(node.ty.dtype).startswith(("float", "bfloat"))


def _is_number(expr: Any) -> bool:
    return isinstance(expr.value if isinstance(expr, tirx.Broadcast) else expr, tirx.FloatImm)


def propagating(node: Any) -> Any:
    """Rewrite a minimum or maximum so that it is NaN where an operand is NaN."""
    first, second = node.a, node.b
    if _is_number(first):
        return node
    if _is_number(second):
        return type(node)(second, first)
    if not isinstance(second, PLAIN):
        name = Var("value", second.ty)
        return tirx.Let(name, second, propagating(type(node)(first, name)))
    kind, _, lanes = str(node.ty.dtype).partition("x")
    least = tirx.const(-math.inf, kind)
    least = tirx.Broadcast(least, int(lanes)) if lanes else least
    return tirx.Select(second >= least, type(node)(second, first), second)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PropagateNaN")
def PropagateNaN(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Propagate NaN through every minimum and maximum of floats."""
    if not any(map(_is_of_floats, [node for kind in EXTREMES for node in collect(func.body, kind)])):
        return func

    def change(node: Any, mutator: Any) -> Any:
        inner = mutator.default_mutate(node)
        return propagating(inner) if _is_of_floats(inner) else inner

    return with_body(func, structural_mutate(func.body, [(kind, change) for kind in EXTREMES]))


# Wrap-around of integer overflow, as in numpy: TVM declares 32- and 64-bit arithmetic as non-overflowing to LLVM.
#
# before::
#
#     c[i] = T.Cast("int64", a[i] * b[i])           # LLVM may multiply in 64 bits
#
# after::
#
#     c[i] = T.Cast("int64", T.Cast("int32", T.Cast("int64", a[i]) * T.Cast("int64", b[i])))
#
# LLVM narrows this to one 32-bit product again, without the no-overflow flag. 64-bit integers are computed in 128 bits.
# Unsigned integers are computed as the signed ones of the same bits: their products fit into twice the bits then.
# Index arithmetic is unchanged: only expressions that depend on values of arrays are rewritten.


WIDER = {"int32": "int64", "int64": "int128", "uint32": "int64", "uint64": "int128"}
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul)
BINDINGS = (tirx.Bind, tirx.Let)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WrapIntegers")
def WrapIntegers(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Make the arithmetic of integers that a function stores wrap around."""
    arrays = _arrays(func)
    if not arrays:
        return func
    values = _Values(func, arrays)
    if not values.held:
        return func

    def wide(expr: Any, mutator: Any) -> Any:
        inner = mutator.default_mutate(expr)
        name, lanes = lane_dtype(inner)
        if name not in WIDER or not values.reach(expr):
            return inner
        as_wide, signed = f"{WIDER[name]}{lanes}", name.removeprefix("u")
        a, b = (tirx.Cast(as_wide, _as_signed(part, signed, lanes)) for part in (inner.a, inner.b))
        wrapped = tirx.Cast(signed + lanes, type(inner)(a, b))
        return wrapped if signed == name else tirx.Cast(name + lanes, wrapped)

    def plain(load: Any, _mutator: Any) -> Any:
        return load  # Subscripts are index arithmetic, which is not rewritten.

    expressions = [*((kind, wide) for kind in ARITHMETIC), (ir.TensorLoad, plain)]

    def store(node: tirx.BufferStore, _mutator: Any) -> tirx.Stmt:
        return tirx.BufferStore(node.buffer, structural_mutate(node.value, expressions), node.indices)

    def bind(node: tirx.Bind, _mutator: Any) -> tirx.Stmt:
        return tirx.Bind(node.var, structural_mutate(node.value, expressions)) if node.var in values.held else node

    def branch(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        return tirx.IfThenElse(structural_mutate(node.condition, expressions), inner.then_case, inner.else_case)

    changes = [(tirx.BufferStore, store), (tirx.Bind, bind), (tirx.IfThenElse, branch)]
    return with_body(func, structural_mutate(func.body, changes))


def _as_signed(expr: ir.Expr, signed: str, lanes: str) -> ir.Expr:
    """Return an integer, or a vector of them, as the signed one of the same bits."""
    if isinstance(expr, tirx.Broadcast):
        return tirx.Broadcast(_as_signed(expr.value, signed, ""), expr.lanes)
    if isinstance(expr, tirx.IntImm):
        return const((int(expr) + 2**31) % 2**32 - 2**31 if signed == "int32" else int(expr), signed)
    return expr if lane_dtype(expr)[0] == signed else tirx.reinterpret(signed + lanes, expr)


def _arrays(func: tirx.PrimFunc) -> set[Any]:
    """Return the parameters that are arrays of 32- or 64-bit integers but not index arrays."""
    structure = {str(name) for name in (func.attrs or {}).get(STRUCTURE, [])}
    arrays = [p for p in func.params if tirx.is_buffer_var(p) and str(p.name) not in structure]
    return {p for p in arrays if str(p.ty.dtype) in WIDER}


class _Values:
    """The arrays (also local ones) and variables that hold values rather than positions."""

    def __init__(self, func: tirx.PrimFunc, arrays: set[Any]) -> None:
        self.held: set[Any] = set(arrays)
        for view in collect(func.body, tirx.DeclBuffer):
            if any(var in arrays for var in collect(view.data, Var)):
                self.held.add(view.buffer)
        self.bindings = [node for kind in BINDINGS for node in collect(func.body, kind)]
        self.held -= set(self._places(func))
        self._spread(func)

    def _places(self, func: tirx.PrimFunc) -> Iterator[Any]:
        """Yield the arrays loaded in subscripts and loop extents, also through bound variables."""
        stores, loads = collect(func.body, tirx.BufferStore), collect(func.body, ir.TensorLoad)
        roots = [index for node in (*stores, *loads) for index in node.indices]
        roots += [loop.extent for loop in collect(func.body, tirx.For)]
        bound_values = {node.var: node.value for node in self.bindings}
        visited: set[Any] = set()
        while roots:
            root = roots.pop()
            yield from (load.source for load in collect(root, ir.TensorLoad))
            for var in collect(root, Var):
                if var in bound_values and var not in visited:
                    visited.add(var)
                    roots.append(bound_values[var])

    def _spread(self, func: tirx.PrimFunc) -> None:
        """Add the local arrays and variables that depend on values, up to a fixed point."""
        local = {node.buffer for node in collect(func.body, tirx.AllocBuffer)}
        flows = [(s.buffer, s.value) for s in collect(func.body, tirx.BufferStore) if s.buffer in local]
        flows += [(node.var, node.value) for node in self.bindings]
        flows = [(into, value) for into, value in flows if lane_dtype(into)[0] in WIDER]
        count = -1
        while count != len(self.held):
            count = len(self.held)
            self.held |= {into for into, value in flows if self.reach(value)}

    def reach(self, expr: Any) -> bool:
        """Return whether an expression depends on values, other than in subscripts."""
        is_reached = [False]

        def on_load(load: Any, _mutator: Any) -> Any:
            is_reached[0] = is_reached[0] or load.source in self.held
            return load

        def on_var(var: Any, _mutator: Any) -> Any:
            is_reached[0] = is_reached[0] or var in self.held
            return var

        structural_mutate(expr, [(ir.TensorLoad, on_load), (Var, on_var)])
        return is_reached[0]


# Index widening: compute the sum of a base and an offset of fewer than 32 bits in 64 bits; only the offset varies along
# a row.
#
# before::
#
#     for j in range(indptr[i + 1] - indptr[i]):
#         acc[0] = acc[0] + a[indptr[i] + j] * x[first[i] + T.Cast("int32", offsets[indptr[i] + j])]
#
# after::
#
#     for j in range(indptr[i + 1] - indptr[i]):
#         acc[0] = acc[0] + a[indptr[i] + j] * x[T.Cast("int64", first[i]) + T.Cast("int64", offsets[indptr[i] + j])]
#
# LLVM hoists the address of ``x[first[i]]`` out of the loop, but not out of a 32-bit sum that it has to widen.


WIDE = "int64"


def _is_small(expr: ir.Expr) -> bool:
    """Return whether an expression is a cast of a loaded integer of fewer than 32 bits."""
    return isinstance(expr, tirx.Cast) and isinstance(expr.value, ir.TensorLoad) and expr.value.ty.dtype.bits < 32


def _widened(index: ir.Expr) -> ir.Expr:
    if (
        not isinstance(index, tirx.Add)
        or str(index.ty.dtype) != "int32"
        or not (_is_small(index.a) or _is_small(index.b))
    ):
        return index
    return tirx.Add(*(cast(part.value if _is_small(part) else part, WIDE) for part in (index.a, index.b)))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WidenIndices")
def WidenIndices(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Widen the 32-bit sums with small offsets in the subscripts of loads."""

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        inner = mutator.default_mutate(load)
        return tirx.BufferLoad(inner.source, [_widened(index) for index in inner.indices])

    body = structural_mutate(func.body, [(ir.TensorLoad, on_load)])
    return with_body(func, body)


# Nest guards so that a bound is tested before the loads it guards: LLVM code for ``and`` evaluates both operands.
#
# before::
#
#     if u < n and 0 <= indices[u] and indices[u] < m:
#         ...
#
# after::
#
#     if u < n:
#         if 0 <= indices[u] and indices[u] < m:
#             ...
#
# Where `u` is a lane of a vector loop, a whole vector would be read past the end of the array. TVM's schedules append
# the bound of a split loop to the existing conditions, so a bound is moved ahead of the loads it guards. No later pass
# merges the conditions again. Nested choices between values are inverted for the same reason: TVM merges
# ``T.if_then_else(a, T.if_then_else(b, x, 0), 0)`` into one test of ``a and b``.


def _loads(condition: ir.Expr) -> list[ir.TensorLoad]:
    """Return the loads that may be out of bounds: all but those of a constant element."""
    loads = collect(condition, ir.TensorLoad)
    return [x for x in loads if not all(isinstance(i, tirx.IntImm) for i in x.indices)]


def levels(condition: ir.Expr) -> list[ir.Expr]:
    """Group a condition into tests to nest: each may be evaluated once those before it hold."""
    groups: list[list[ir.Expr]] = []
    tested_loads: list[ir.TensorLoad] = []
    for part in _bounds_first(conjuncts(condition)):
        new_loads = [x for x in _loads(part) if not any(same(x, y) for y in tested_loads)]
        if new_loads or not groups:
            groups.append([])
        groups[-1].append(part)
        tested_loads += new_loads
    return [conjunction(group) for group in groups]


def _bounds_first(parts: list[ir.Expr]) -> list[ir.Expr]:
    """Reorder conditions: the bounds of a variable come before loads whose subscripts depend on it."""
    ordered: list[ir.Expr] = []
    for part in parts:
        first = next((k for k, earlier in enumerate(ordered) if _relies_on(earlier, part)), len(ordered))
        if any(_relies_on(part, earlier) for earlier in ordered[first:]):
            first = len(ordered)
        ordered.insert(first, part)
    return ordered


def _relies_on(part: ir.Expr, comparison: ir.Expr) -> bool:
    """Return whether `part` loads at a position that depends on a variable that `comparison` compares."""
    loaded = [v for load in _loads(part) for i in load.indices for v in collect(i, ir.Var)]
    bare = tvm_ffi.structural_map(comparison, (ir.TensorLoad, lambda load: tirx.const(0, str(load.ty.dtype))))
    return bool(loaded) and mentions(bare, loaded)


def _on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
    inner = mutator.default_mutate(node)
    parts = levels(inner.condition)
    if len(parts) < 2:
        return inner
    body, otherwise = inner.then_case, inner.else_case
    for condition in reversed(parts):
        body = tirx.IfThenElse(condition, body, otherwise)
        otherwise = None if otherwise is None else renewed(otherwise)
    return body


def _on_call(node: Call, mutator: Any) -> Call:
    inner = mutator.default_mutate(node)
    if not dialect.is_if_then_else(inner):
        return inner
    condition, value, otherwise = inner.args
    for part in reversed(levels(condition) or [condition]):
        value = tirx.if_then_else(part, _apart(value, otherwise), otherwise)
    return value


def _apart(value: ir.Expr, otherwise: ir.Expr) -> ir.Expr:
    """Invert an inner choice: TVM merges two choices with the same alternative and tests both conditions at once."""
    if not dialect.is_if_then_else(value) or not same(value.args[2], otherwise) or not _loads(value.args[0]):
        return value
    return tirx.if_then_else(tirx.Not(value.args[0]), otherwise, value.args[1])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SplitGuards")
def SplitGuards(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Nest the conditions of a function so that bounds are tested before the loads they guard."""
    body = structural_mutate(func.body, [(tirx.IfThenElse, _on_if), (Call, _on_call)])
    return with_body(func, body)


__all__ = ["GuardDivisions", "PropagateNaN", "WidenIndices", "WrapIntegers"]
