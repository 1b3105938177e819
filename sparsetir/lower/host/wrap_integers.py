# SPDX-License-Identifier: Apache-2.0
"""Integers that wrap around, as numpy's do: TVM tells LLVM that those of 32 and 64 bits never overflow.

before::

    c[i] = T.Cast("int64", a[i] * b[i])           # LLVM may multiply in 64 bits

after::

    c[i] = T.Cast("int64", T.Cast("int32", T.Cast("int64", a[i]) * T.Cast("int64", b[i])))

LLVM makes one product of 32 bits of it again, of which nothing is assumed. Numbers of 64 bits are computed in 128.
Arithmetic of places stays as it is: only what values of arrays go into is written so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.lower.marks import STRUCTURE
from sparsetir.lower.nests import with_body
from sparsetir.lower.rewriting import collect
from sparsetir.walks import structural_mutate

WIDER = {"int32": "int64", "int64": "int128"}
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul)
BINDINGS = (tirx.Bind, tirx.Let)


def _kind(node: Any) -> tuple[str, str]:
    """The dtype of one lane, and what stands behind it for several."""
    name, times, lanes = str(node.ty.dtype).partition("x")
    return name, times + lanes


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.WrapIntegers")
def WrapIntegers(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Let the integers that a function stores wrap around."""
    arrays = _arrays(func)
    if not arrays:
        return func
    values = _Values(func, arrays)
    if not values.held:
        return func

    def wide(expr: Any, mutator: Any) -> Any:
        inner = mutator.default_mutate(expr)
        name, lanes = _kind(inner)
        if name not in WIDER or not values.reach(expr):
            return inner
        as_wide = f"{WIDER[name]}{lanes}"
        return tirx.Cast(name + lanes, type(inner)(tirx.Cast(as_wide, inner.a), tirx.Cast(as_wide, inner.b)))

    def plain(load: Any, _mutator: Any) -> Any:
        return load  # its subscripts are places

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


def _arrays(func: tirx.PrimFunc) -> set[Any]:
    """The parameters that are arrays of such integers, and no index arrays."""
    structure = {str(name) for name in (func.attrs or {}).get(STRUCTURE, [])}
    arrays = [p for p in func.params if tirx.is_buffer_var(p) and str(p.name) not in structure]
    return {p for p in arrays if str(p.ty.dtype) in WIDER}


class _Values:
    """Arrays, local ones too, and names that hold values rather than places."""

    def __init__(self, func: tirx.PrimFunc, arrays: set[Any]) -> None:
        self.held: set[Any] = set(arrays)
        for view in collect(func.body, tirx.DeclBuffer):
            if any(var in arrays for var in collect(view.data, Var)):
                self.held.add(view.buffer)
        self.bindings = [node for kind in BINDINGS for node in collect(func.body, kind)]
        self.held -= set(self._places(func))
        self._spread(func)

    def _places(self, func: tirx.PrimFunc) -> Iterator[Any]:
        """What subscripts and the extents of loops are made of."""
        stores, loads = collect(func.body, tirx.BufferStore), collect(func.body, ir.TensorLoad)
        roots = [index for node in (*stores, *loads) for index in node.indices]
        roots += [loop.extent for loop in collect(func.body, tirx.For)]
        named = {node.var: node.value for node in self.bindings}
        seen: set[Any] = set()
        while roots:
            root = roots.pop()
            yield from (load.source for load in collect(root, ir.TensorLoad))
            for var in collect(root, Var):
                if var in named and var not in seen:
                    seen.add(var)
                    roots.append(named[var])

    def _spread(self, func: tirx.PrimFunc) -> None:
        """Add local arrays and names that values go into."""
        local = {node.buffer for node in collect(func.body, tirx.AllocBuffer)}
        flows = [(s.buffer, s.value) for s in collect(func.body, tirx.BufferStore) if s.buffer in local]
        flows += [(node.var, node.value) for node in self.bindings]
        flows = [(into, value) for into, value in flows if _kind(into)[0] in WIDER]
        count = -1
        while count != len(self.held):
            count = len(self.held)
            self.held |= {into for into, value in flows if self.reach(value)}

    def reach(self, expr: Any) -> bool:
        """Whether values go into an expression, other than as subscripts."""
        found = [False]

        def on_load(load: Any, _mutator: Any) -> Any:
            found[0] = found[0] or load.source in self.held
            return load

        def on_var(var: Any, _mutator: Any) -> Any:
            found[0] = found[0] or var in self.held
            return var

        structural_mutate(expr, [(ir.TensorLoad, on_load), (Var, on_var)])
        return found[0]


__all__ = ["WrapIntegers"]
