# SPDX-License-Identifier: Apache-2.0
"""The dialect's operators, registered with TVM from Python.

Stage I is made of standard TIR nodes; these calls carry what TIR has no node for.

==================  ==========================================================  =====================
operator            arguments                                                   stands for
==================  ==========================================================  =====================
dense_fixed         length                                                      an axis
dense_variable      parent, length, nnz, indptr                                 an axis
dense_implicit      parent, length, nnz, extent, offset                         an axis
sparse_fixed        parent, length, width, indices | expr, sorted, unique[, 1]  an axis
sparse_variable     parent, length, nnz, indptr, indices | expr, sorted,        an axis
                    unique[, 1]
singleton           parent, length, indices | expr, sorted, unique[, 1]         an axis
sparse_assembled    parent, length, nnz, sorted                                 an axis that a program computes
attach              axis, new_parent                                            an entry of an sp_iter
fuse                axis, axis, ...                                             an entry of an sp_iter
union               axis | attach(...), ...                                     an entry of an sp_iter
intersect           axis | attach(...), ...                                     an entry of an sp_iter
root                -                                                           ``parent=None``
arg                 k                                                           k-th lambda argument
coord               axis | fuse(...) | union(...) | ..., member                 value of an iteration variable
bind_axes           view, default_value, axis, ...                              a sparse buffer's axes
find                indices[lo], count, coordinate, sorted, strategy            slot of a coordinate, or -1
find_rule           expr of arg(0), count, coordinate                           slot of a coordinate, or -1
find_fiber          indptr[0], count, position                                  parent position of a position
find_union          member, step, then for each member expr of arg(0), count,   slot of the step's coordinate, or -1;
                    kind                                                        behind the members the coordinate, or -1
==================  ==========================================================  =====================

The strategy of a ``find`` is one of an iteration's searches, or "walk": the coordinates ascend along the loop that they
come from, so that both sides may be walked. The ``find`` family lives until stage II; everything else only in stage I.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.ir import Call, Op
from tvm.ir import _ffi_api as _ir_ffi

FIND = ("find", "find_rule", "find_fiber", "find_union")
AXIS_NAMES = (
    "dense_fixed",
    "dense_variable",
    "dense_implicit",
    "sparse_fixed",
    "sparse_variable",
    "singleton",
    "sparse_assembled",
)
MERGES = ("union", "intersect")
BEFORE_FULL = {
    "sparse_fixed": 6,
    "sparse_variable": 7,
    "singleton": 5,
}  # arguments before the promise that every slot is full
NAMES = (*AXIS_NAMES, "attach", "fuse", *MERGES, "root", "arg", "coord", "bind_axes", *FIND)


def _register(name: str) -> Op:
    full = f"sparsetir.{name}"
    if full not in Op.list_op_names():
        _ir_ffi.RegisterOp(full, "")
        kind = tirx.CallEffectKind.ReadState if name in FIND else tirx.CallEffectKind.Pure
        ir.register_op_attr(full, "TScriptPrinterName", f"sp.{name}")
        ir.register_op_attr(full, "TCallEffectKind", int(getattr(kind, "value", kind)))
    return Op.get(full)


OPS = {name: _register(name) for name in NAMES}


def call(name: str, args: list[Any], dtype: str = "int32") -> Call:
    """Call operator `name`; Python numbers become int32 constants."""
    exprs = [a if isinstance(a, ir.Expr) else tirx.const(int(a), "int32") for a in args]
    return Call(OPS[name], exprs, ret_ty=ir.PrimType(dtype))


def union_member(axis: Any) -> int:
    """Encode the properties of a union's member: 1 for sorted, 2 for unique, 4 for coordinates out of range."""
    return int(axis.sorted) + 2 * int(axis.unique) + 4 * int(axis.may_be_absent)


def is_call(expr: Any, *names: str) -> bool:
    """Return whether `expr` calls one of the dialect's operators `names` (any of them if none is given)."""
    if not isinstance(expr, Call) or not isinstance(expr.op, Op):
        return False
    full = expr.op.name
    return full.startswith("sparsetir.") and (not names or full[len("sparsetir.") :] in names)


def name_of(expr: Call) -> str:
    """Return the operator's name without the ``sparsetir.`` prefix."""
    return str(expr.op.name)[len("sparsetir.") :]


def is_if_then_else(expr: Any) -> bool:
    """Return whether `expr` is ``T.if_then_else``, which evaluates one of its values."""
    return isinstance(expr, Call) and isinstance(expr.op, Op) and expr.op.name == "prim.if_then_else"


def function_of(expr: Any) -> str:
    """Return the name of TVM's function that `expr` calls, without its prefix; empty for anything else."""
    if not isinstance(expr, Call) or not isinstance(expr.op, Op):
        return ""
    prefix, _, name = expr.op.name.partition(".")
    return name if prefix in ("tirx", "prim") else ""
