# SPDX-License-Identifier: Apache-2.0
"""Normalization passes before lowering: alignment of parameters, NaN semantics, names of scratch, bool arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by name then
import numpy as np
import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import collect, same
from sparsetir.ir.views import Axis, cast, const, decode, substitute_args
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import ASCENDING, DISTINCT, FIBERS, INDPTR, STRUCTURE, from_dialect, padded_rows
from sparsetir.lower.loops import with_body
from sparsetir.utils.arguments import itemsize

# Declare that the caller's arrays do not overlap, and an alignment of 64 bytes at stage II.
#
# before::
#
#     def spmm(x: T.Buffer((n,), "float32", align=4)): ...
#
# after::
#
#     def spmm(x: T.Buffer((n,), "float32")):
#         T.func_attr({"tirx.noalias": True})
#
# ``sch.tensorize`` compares the alignment of a buffer with that of the intrinsic's operand: 64 bytes by default.
# Below stage II only the natural alignment is required (`ReduceAlignment`): TVM does not check the alignment of numpy
# arrays, and an aligned vector load from such an array would crash.


NOALIAS = "tirx.noalias"
STAGE_2_ALIGNMENT = 64  # bytes, TVM's default, which its printer omits


def _realigned(buffer: Var, alignment: int, columns: int | None = None) -> Var:
    ty = buffer.ty
    shape = ty.shape if columns is None else [*list(ty.shape)[:-1], tirx.IntImm("int32", columns)]
    return tirx.decl_buffer(
        shape, str(ty.dtype), name=str(buffer.name), strides=ty.strides, data_alignment=alignment, layout=None
    )


def _has_one_fiber(axis: Axis) -> bool:
    """Return whether an axis has a single fiber: a root axis, or one below a single position."""
    above = None if axis.parent is None else axis.parent.count
    return above is None or (isinstance(above, tirx.IntImm) and int(above) == 1)


def _fibers(axis: Axis) -> str:
    """Return name:width for the index array of an axis whose fibers have fixed width and no repeats, else ''."""
    if not axis.unique or not isinstance(axis.width, tirx.IntImm) or axis.kind != "sparse_fixed":
        return ""
    if axis.rule is None:
        return "" if axis.indices is None else f"{axis.indices.name}:{int(axis.width)}"
    slot, begin, *above = (Var(f"at_{n}", ir.PrimType(axis.idtype)) for n in range(2 + len(axis.ancestors)))
    load = substitute_args(axis.rule, [*above, slot, begin + slot])
    if not isinstance(load, ir.TensorLoad) or len(load.indices) != 1:
        return ""
    start = sym.Analyzer().simplify(tirx.floormod(load.indices[0] - slot, axis.width))
    return f"{load.source.name}:{int(axis.width)}" if isinstance(start, tirx.IntImm) and int(start) == 0 else ""


def realign(func: tirx.PrimFunc, alignment: int | None = None) -> tirx.PrimFunc:
    """Declare an alignment of all buffer parameters in bytes; by default that of their elements."""
    fresh: dict[Var, Var] = {}
    for param in func.params:
        if not tirx.is_buffer_var(param):
            continue
        requested = alignment or itemsize(str(param.ty.dtype))
        if int(param.ty.data_alignment) != requested:
            fresh[param] = _realigned(param, requested)
    return _with_params(func, fresh)


def _with_params(func: tirx.PrimFunc, fresh: Mapping[Var, Var]) -> tirx.PrimFunc:
    """Return a function with other buffers for some of its parameters."""
    if not fresh:
        return func

    def on_var(var: Var, _mutator: Any) -> Var:
        return fresh.get(var, var)

    body = structural_mutate(func.body, [(Var, on_var)])
    params = [fresh.get(p, p) for p in func.params]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.AlignParams")
def AlignParams(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Realign the parameters of a stage-I function; annotate it with its row pointers and other index arrays."""
    program = decode(func)
    if not program.axes:
        return func
    pointers = [str(a.indptr.name) for a in program.axes.values() if a.indptr is not None]
    indices = [str(a.indices.name) for a in program.axes.values() if a.indices is not None]
    lists = [a for a in program.axes.values() if a.parent is None and a.kind == "sparse_variable" and a.sorted]
    ascending = [str(a.indices.name) for a in lists if a.indices is not None]
    alone = [a for a in program.axes.values() if a.unique and _has_one_fiber(a)]
    distinct = sorted({str(a.indices.name) for a in alone if a.indices is not None})
    if distinct:
        func = func.with_attr(DISTINCT, distinct)
    fibers = sorted({f for f in map(_fibers, program.axes.values()) if f})
    if fibers:
        func = func.with_attr(FIBERS, fibers)
    out = realign(func, STAGE_2_ALIGNMENT).with_attr(NOALIAS, True).with_attr(INDPTR, pointers)
    return out.with_attr(STRUCTURE, sorted({*pointers, *indices})).with_attr(ASCENDING, ascending)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ReduceAlignment")
def ReduceAlignment(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Reduce the alignment of a scheduled function's parameters to that of their elements."""
    return realign(func) if from_dialect(func) else func


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PadRows")
def PadRows(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Declare the rows of annotated parameters as long as the annotation says: rows that begin at a cache line.

    before::

        def spmm(..., b: T.Buffer((n, 30), "float32"), ...):
            T.func_attr({"sparsetir.padded_rows": ["b:32"]})

    after::

        def spmm(..., b: T.Buffer((n, 32), "float32"), ...): ...
    """
    padded = padded_rows(func)
    fresh = {
        param: _realigned(param, int(param.ty.data_alignment), padded[str(param.name)])
        for param in func.params
        if tirx.is_buffer_var(param) and str(param.name) in padded
    }
    return _with_params(func, fresh)


# Prevent TVM simplifications of floats that are wrong for infinities and NaN.
#
# NaN is unequal to every number, the negation of a comparison with it is not the opposite comparison, and a difference
# of equal floats may be NaN.
#
# before::
#
#     C[i] = A[i] != B[i]
#     D[i] = not A[i] < B[i]
#     E[i] = A[i] - A[i]
#     F[i] = T.float32(0) / A[i]
#
# after::
#
#     C[i] = T.Select(A[i] == B[i], False, True)
#     D[i] = T.Select(A[i] < B[i], False, True)
#     E[i] = A[i] + A[i] * T.float32(-1)
#     F[i] = T.reinterpret("float32", 0) / A[i]
#
# TVM treats ``!=`` as "less or greater", which is false for NaN, and rewrites ``not a < b`` to ``b <= a``, ``a == a``
# to true, ``a - a`` to 0, ``(a + b) - b`` to ``a`` and ``0 * a`` to 0. A difference whose sides share no element cannot
# cancel and is kept.


COMPARISONS = (tirx.EQ, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
FLOATS = ("float", "bfloat")


def _is_of_floats(comparison: Any) -> bool:
    return str(comparison.a.ty.dtype).startswith(FLOATS)


def opposite(condition: ir.Expr) -> ir.Expr:
    """Return the negation of `condition` in a form that TVM does not simplify."""
    return tirx.Select(condition, tirx.const(False, "bool"), tirx.const(True, "bool"))


def _is_nan(value: ir.Expr) -> ir.Expr:
    return tirx.isnan(tirx.Cast("float32", value) if str(value.ty.dtype) == "bfloat16" else value)


def _differs(node: tirx.NE, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    if not _is_of_floats(inner):
        return inner
    return _is_nan(inner.a) if same(inner.a, inner.b) else opposite(tirx.EQ(inner.a, inner.b))


def _equals(node: tirx.EQ, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    return opposite(_is_nan(inner.a)) if _is_of_floats(inner) and same(inner.a, inner.b) else inner


def _negated(node: tirx.Not, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    compared = [c for kind in COMPARISONS for c in collect(inner.a, kind)]
    return opposite(inner.a) if any(_is_of_floats(c) for c in compared) else inner


def _is_float(value: ir.Expr) -> bool:
    return str(getattr(value.ty, "dtype", "")).startswith(FLOATS)


def _subtracted(node: tirx.Sub, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    if not _is_float(inner):
        return inner
    if _is_signed_zero(inner.b, -1):
        return tirx.Sub(inner.a, _hidden_zero(inner.b))
    kinds = (ir.TensorLoad, ir.Var)
    left, right = ([x for k in kinds for x in collect(side, k) if _is_float(x)] for side in (inner.a, inner.b))
    cancels = any(same(a, b) for a in left for b in right)
    return tirx.Add(inner.a, tirx.Mul(inner.b, const(-1, str(inner.ty.dtype)))) if cancels else inner


def _is_zero(value: ir.Expr) -> bool:
    return isinstance(_uncast(value), tirx.FloatImm) and _uncast(value).value == 0


def _uncast(value: Any) -> Any:
    """Strip the cast of a constant: scripts contain zero divisors in this form."""
    return value.value if isinstance(value, tirx.Cast) else value


def _hidden_zero(zero: ir.Expr) -> ir.Expr:
    """Return a zero of the same sign in a form that TVM does not fold; LLVM does."""
    # The bits of the negative zero: TVM takes a reinterpreted integer of zero for a pointer.
    negative: Any = tirx.reinterpret("float32", const(-(2**31)))
    is_negative = math.copysign(1, _uncast(zero).value) < 0
    return cast(negative if is_negative else tirx.Mul(negative, tirx.const(-1, "float32")), str(zero.ty.dtype))


def _multiplied(node: Any, mutator: Any) -> ir.Expr:
    inner = mutator.default_mutate(node)
    if _is_float(inner) and (_is_zero(inner.a) or _is_zero(inner.b)):
        return type(node)(*(_hidden_zero(x) if _is_zero(x) else x for x in (inner.a, inner.b)))
    return inner


def _added(node: tirx.Add, mutator: Any) -> ir.Expr:
    """Keep the addition of a zero, which makes a positive zero of a negative one."""
    inner = mutator.default_mutate(node)
    if not _is_float(inner) or not any(_is_signed_zero(x, 1) for x in (inner.a, inner.b)):
        return inner
    return tirx.Add(*(_hidden_zero(x) if _is_signed_zero(x, 1) else x for x in (inner.a, inner.b)))


def _is_signed_zero(value: ir.Expr, sign: int) -> bool:
    return _is_zero(value) and math.copysign(1, _uncast(value).value) == sign


def with_nan(node: Any) -> Any:
    """Rewrite a statement or an expression so that TVM keeps numpy's float semantics."""
    compared = [(tirx.NE, _differs), (tirx.EQ, _equals), (tirx.Not, _negated)]
    computed = [(tirx.Add, _added), (tirx.Sub, _subtracted), (tirx.Mul, _multiplied), (tirx.Div, _multiplied)]
    return structural_mutate(node, [*compared, *computed])


def keeping_nan(node: Any) -> Any:
    """Rewrite maxima and minima of floats and literals as choices, which are NaN where the float is, as numpy has it.

    Which operand those of TVM choose depends on the order that its simplifier leaves them in.
    """

    def limited(limit: Any, mutator: Any) -> Any:
        inner = mutator.default_mutate(limit)
        literals = [x for x in (inner.a, inner.b) if isinstance(_uncast(x), tirx.FloatImm)]
        if not _is_float(inner) or len(literals) != 1:
            return inner
        literal, value = literals[0], inner.b if inner.a.same_as(literals[0]) else inner.a
        is_beyond = value < literal if isinstance(inner, tirx.Max) else literal < value
        return tirx.Select(is_beyond, literal, value)

    return structural_mutate(node, [(tirx.Max, limited), (tirx.Min, limited)])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CompareNaN")
def CompareNaN(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Apply `with_nan` to the body of a stage-I function."""
    if not decode(func).axes:
        return func
    return with_body(func, with_nan(func.body))


# Name scratch buffers after their views in the program, because the views do not outlive stage I.
#
# before::
#
#     scratch_5 = T.alloc_buffer((nnz,))
#     score = T.decl_buffer((m, n), data=scratch_5.data)
#
# after::
#
#     score = T.alloc_buffer((nnz,))
#     score_1 = T.decl_buffer((m, n), data=score.data)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.NameScratch")
def NameScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rename the scratch buffers of a stage-I function."""
    fresh: dict[Var, Var] = {}
    for buffer in decode(func).buffers.values():
        if buffer.allocated:
            fresh[buffer.storage] = Var(buffer.name, buffer.storage.ty)
    if not fresh:
        return func
    body = structural_mutate(func.body, [(Var, lambda var, _mutator: fresh.get(var, var))])
    return with_body(func, body)


# Replace bool arithmetic by logic with numpy's semantics: sums are or, products are and.
#
# before::
#
#     C[i, k] = C[i, k] + A[i, j] * B[j, k]           # of bool buffers
#     D[i] = T.max(D[i], A[i, j])
#     E[i] = A[i, j] == B[j, k]
#     F[i] = T.Cast("bool", T.float32(-3) / T.float32(2))
#
# after::
#
#     C[i, k] = C[i, k] or A[i, j] and B[j, k]
#     D[i] = D[i] or A[i, j]
#     E[i] = T.Cast("uint8", A[i, j]) == T.Cast("uint8", B[j, k])
#     F[i] = T.float32(-3) / T.float32(2) != T.float32(0)
#
# TVM accepts such arithmetic in a program, but cannot generate code for it, nor convert a constant like -1.5 to bool.


LOGIC = {tirx.Add: tirx.Or, tirx.Max: tirx.Or, tirx.Mul: tirx.And, tirx.Min: tirx.And}
BOOL_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def _replaced(expr: Any, mutator: Any) -> Any:
    inner = mutator.default_mutate(expr)
    if str(inner.a.ty.dtype) != "bool":
        return inner
    if isinstance(inner, BOOL_COMPARISONS):
        return type(inner)(tirx.Cast("uint8", inner.a), tirx.Cast("uint8", inner.b))
    return LOGIC[type(inner)](inner.a, inner.b)


def _truth(cast: tirx.Cast, mutator: Any) -> Any:
    inner = mutator.default_mutate(cast)
    dtype = str(inner.value.ty.dtype)
    if str(inner.ty.dtype) != "bool" or dtype == "bool" or collect(inner.value, Var):
        return inner
    return tirx.NE(inner.value, const(0, dtype))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ReplaceBools")
def ReplaceBools(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Apply `as_logic` to the body of a stage-I function."""
    if not decode(func).axes:
        return func
    return with_body(func, as_logic(func.body))


def as_logic(node: Any) -> Any:
    """Replace the bool arithmetic of a statement or an expression by logic."""
    callbacks = [*((kind, _replaced) for kind in (*LOGIC, *BOOL_COMPARISONS)), (tirx.Cast, _truth)]
    return structural_mutate(node, callbacks)


# Write literals in the dtype that they are cast to, rounded once.
#
# before::
#
#     A[i] = T.Select(T.min(B[i], T.Cast("float32", 2)) < C[i], B[i], C[i])
#
# after::
#
#     A[i] = T.Select(T.min(B[i], T.float32(2)) < C[i], B[i], C[i])
#
# TVM's analyzer takes the two ways to write the number 2.0 for different values of one variable, and ends.


def _literal(cast: tirx.Cast, mutator: Any) -> Any:
    inner = mutator.default_mutate(cast)
    dtype = str(inner.ty.dtype)
    if not dtype.startswith(("float", "bfloat")) or not isinstance(inner.value, (tirx.IntImm, tirx.FloatImm)):
        return inner
    with np.errstate(over="ignore"):
        return tirx.FloatImm(dtype, float(np.asarray(inner.value.value).astype(dtype)))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.FoldCasts")
def FoldCasts(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Write the casts of literals in a stage-I function as literals."""
    if not decode(func).axes:
        return func
    return with_body(func, structural_mutate(func.body, [(tirx.Cast, _literal)]))


__all__ = ["CompareNaN", "FoldCasts", "NameScratch", "ReplaceBools", "as_logic", "keeping_nan", "opposite", "with_nan"]
