# SPDX-License-Identifier: Apache-2.0
"""Tree walks that several passes share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.errors import OffsetError, SparseTIRError, StructureError
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_walk

KINDS: dict[type[SparseTIRError], str] = {kind: f"sparsetir.{kind.__name__}" for kind in (OffsetError, StructureError)}
for _kind, _name in KINDS.items():
    tvm_ffi.register_error(_name, _kind)  # a function that asserts raises it, where the process has this package

DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def substitute(node: Any, mapping: dict[Var, Any]) -> Any:
    """Replace uses (not definitions) of variables."""
    on_var = lambda v, kind: mapping.get(v, v) if kind == 0 else v  # noqa: E731
    return tvm_ffi.structural_map(node, with_def_region_kind=(Var, on_var))


def mentions(node: Any, variables: Sequence[Var]) -> bool:
    """Return whether any of `variables` occurs in `node`."""
    sought, hits = set(variables), []
    structural_walk(node, (Var, lambda v: hits.append(v) if v in sought else None))
    return bool(hits)


def collect(node: Any, kind: type) -> list[Any]:
    """Return every node of type `kind` below `node`, outermost first."""
    nodes: list[Any] = []
    structural_walk(node, (kind, nodes.append), order="pre")
    return nodes


def same(a: ir.Expr | None, b: ir.Expr | None) -> bool:
    """Structural equality; None only equals None."""
    if a is None or b is None:
        return a is b
    return bool(tvm_ffi.structural_equal(a, b))


def all_same(a: Sequence[ir.Expr], b: Sequence[ir.Expr]) -> bool:
    """Pairwise structural equality."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def loads_of(node: Any, buffer: Any) -> list[ir.TensorLoad]:
    """Return the loads of a buffer below a node."""
    return [x for x in collect(node, ir.TensorLoad) if x.source.same_as(buffer)]


def without_zeros(index: ir.Expr) -> ir.Expr:
    """Return a subscript without terms that cancel out, by which TVM would divide where it flattens buffers."""
    if isinstance(index, (Var, tirx.IntImm)):
        return index
    plain = sym.Analyzer().simplify(index)
    return index if all(mentions(plain, [v]) for v in collect(index, Var)) else plain


def moves_by_one(index: ir.Expr, var: Var) -> bool:
    """Return whether a subscript moves by one with `var`."""
    gap = sym.Analyzer().simplify(substitute(index, {var: var + const(1, str(var.ty.dtype))}) - index)
    return isinstance(gap, tirx.IntImm) and int(gap) == 1


def is_along(load: ir.TensorLoad, var: Var) -> bool:
    """Return whether a load moves by one element with `var`."""
    *leading, last = load.indices
    return not mentions(leading, [var]) and moves_by_one(last, var)


def inside(index: ir.Expr, extent: ir.Expr) -> ir.Expr:
    """Return a subscript kept inside a dimension of at least one element."""
    dtype = str(index.ty.dtype)
    return tirx.max(tirx.min(index, cast(extent, dtype) - const(1, dtype)), const(0, dtype))


def factors(expr: ir.Expr) -> list[ir.Expr]:
    """Return the factors of a product, in order."""
    return [*factors(expr.a), *factors(expr.b)] if isinstance(expr, tirx.Mul) else [expr]


def summands(expr: ir.Expr) -> list[ir.Expr]:
    """Return the terms of a sum, in order."""
    return [*summands(expr.a), *summands(expr.b)] if isinstance(expr, tirx.Add) else [expr]


#: reduction -> what absorbs all other parts of a term, and the operators that combine these parts
ABSORBING: dict[Any, tuple[float, tuple[Any, ...]]] = {
    tirx.Add: (0, (tirx.Mul,)),
    tirx.Sub: (0, (tirx.Mul,)),
    tirx.Max: (-math.inf, (tirx.Add, tirx.Min)),
    tirx.Min: (math.inf, (tirx.Add, tirx.Max)),
}


def is_number(expr: ir.Expr, value: float) -> bool:
    """Return whether an expression is this constant."""
    return isinstance(expr, (tirx.FloatImm, tirx.IntImm)) and float(expr.value) == value


def product(parts: Sequence[ir.Expr]) -> ir.Expr:
    """Return the product of `parts`, from the left."""
    return math.prod(parts[1:], start=parts[0])


def conjunction(conditions: Sequence[ir.Expr]) -> ir.Expr:
    """Return all of `conditions`."""
    out = conditions[0]
    for condition in conditions[1:]:
        out = tirx.And(out, condition)
    return out


def disjunction(conditions: Sequence[ir.Expr]) -> ir.Expr:
    """One of `conditions`, or several."""
    out = conditions[0]
    for condition in conditions[1:]:
        out = tirx.Or(out, condition)
    return out


def smallest(values: Sequence[ir.Expr]) -> ir.Expr:
    """Return the least of `values`."""
    out = values[0]
    for value in values[1:]:
        out = tirx.min(out, value)
    return out


def conjuncts(condition: ir.Expr) -> list[ir.Expr]:
    """Return the conditions that `condition` is made of; none for a condition that always holds."""
    if isinstance(condition, tirx.And):
        return [*conjuncts(condition.a), *conjuncts(condition.b)]
    return [] if isinstance(condition, tirx.IntImm) and int(condition) else [condition]


def renewed(node: Any) -> Any:
    """Return a copy of `node` with variables and arrays of its own: a function must not define one twice."""
    defined: list[Var] = []
    callbacks = [
        (tirx.For, lambda f: defined.append(f.loop_var)),
        (tirx.AllocBuffer, lambda a: defined.append(a.buffer)),
        (tirx.Bind, lambda b: defined.append(b.var)),
        (tirx.Let, lambda x: defined.append(x.var)),
    ]
    structural_walk(node, callbacks)
    fresh = {v: Var(str(v.name), v.ty) for v in defined}
    return tvm_ffi.structural_map(node, with_def_region_kind=(Var, lambda v, _: fresh.get(v, v)))


def seq(*stmts: tirx.Stmt) -> tirx.Stmt:
    """Join statements to one."""
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(list(stmts))


def sequence(*stmts: tirx.Stmt) -> tirx.Stmt:
    """Join statements to one, without nested sequences."""
    flat = list(flattened(stmts))
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def flattened(stmts: Iterable[tirx.Stmt]) -> Iterable[tirx.Stmt]:
    """Return the statements in order, sequences opened."""
    for stmt in stmts:
        if isinstance(stmt, tirx.SeqStmt):
            yield from flattened(stmt.seq)
        else:
            yield stmt


LONG = "int64"


def long(value: int) -> ir.Expr:
    """Return an integer constant of 64 bits."""
    return tirx.const(value, LONG)


def long_var(name: str) -> Var:
    """Return an integer variable of 64 bits."""
    return Var(name, ir.PrimType(LONG))


def array_param(name: str, dtype: str, *shape: ir.Expr) -> Var:
    """Return a parameter of a function that is written at stage III, for an array of numpy."""
    # Those are aligned to their elements; TVM's default of 64 bytes would allow aligned vector stores.
    return tirx.decl_buffer(shape, dtype, name=name, data_alignment=np.dtype(dtype).itemsize, layout=None)


def cell(name: str, dtype: str) -> Var:
    """Return a thread-local array of one element."""
    return tirx.decl_buffer((1,), dtype, name=name, scope="local", layout=None)


def is_element(expr: ir.Expr, store: tirx.BufferStore) -> bool:
    """Return whether an expression is the element that a store sets."""
    is_same = isinstance(expr, ir.TensorLoad) and expr.source.same_as(store.buffer)
    return is_same and all_same(list(expr.indices), list(store.indices))


def lane_dtype(expr: ir.Expr) -> tuple[str, str]:
    """Split a dtype into that of one lane and its suffix for several lanes, such as ``x4``."""
    name, times, lanes = str(expr.ty.dtype).partition("x")
    return name, times + lanes


def get(buffer: Var) -> ir.Expr:
    """Return the value of a cell."""
    return tirx.BufferLoad(buffer, [const(0)])


def put(buffer: Var, value: ir.Expr) -> tirx.Stmt:
    """Set a cell."""
    return tirx.BufferStore(buffer, value, [const(0)])


def alloc(*cells: Var) -> list[tirx.Stmt]:
    """Declare cells."""
    return [tirx.AllocBuffer(c) for c in cells]


def folded(node: Any) -> list[ir.Expr]:
    """Return the parts of a node that TVM computes otherwise where a factor or a divisor is a constant zero.

    It makes zero of ``NaN * 0``, and stops at a division by zero.
    """
    products = [x for x in collect(node, tirx.Mul) if "float" in str(x.ty.dtype)]
    return [*products, *(x for kind in DIVISIONS for x in collect(node, kind))]


def opaque(value: ir.Expr) -> tuple[list[tirx.Stmt], ir.Expr]:
    """Return a number that is no constant to TVM, though to LLVM, and the statements that make it."""
    cell = tirx.decl_buffer((1,), str(value.ty.dtype), name="absent", scope="local", layout=None)
    return [*alloc(cell), tirx.BufferStore(cell, value, [const(0)])], tirx.BufferLoad(cell, [const(0)])
