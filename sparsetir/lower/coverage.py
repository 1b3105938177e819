# SPDX-License-Identifier: Apache-2.0
"""Whether loops reach every element: they have a step where there is one, and no gap between the elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.rewriting import mentions, same, substitute

LONGEST = 1 << 30


class Atoms:
    """Stands a variable for every load or cast, so that the arithmetic around them can be compared."""

    def __init__(self) -> None:
        self.known: list[tuple[ir.Expr, Var]] = []

    def replace(self, expr: ir.Expr) -> ir.Expr:
        """`expr` with its atoms as variables."""
        callbacks = [(ir.TensorLoad, self._on_atom), (tirx.Cast, self._on_atom)]
        return tvm_ffi.structural_mutate(expr, callbacks)

    def of(self, expr: ir.Expr) -> list[Var]:
        """The variables that stand for `expr`, of whatever width."""
        plain = _uncast(expr)
        own = [plain] if isinstance(plain, Var) else []
        return own + [var for node, var in self.known if same(_uncast(node), plain)]

    def _on_atom(self, node: ir.Expr, _mutator: Any) -> Var:
        for expr, var in self.known:
            if same(expr, node):
                return var
        self.known.append((node, Var("atom", ir.PrimType(str(node.ty.dtype)))))
        return self.known[-1][1]


def _at_least_one(analyzer: sym.Analyzer, var: Var) -> None:
    dtype = str(var.ty.dtype)
    analyzer.bind(var, ir.Range.from_min_extent(const(1, dtype), const(LONGEST, dtype)))


def _pairs(realize: s_tir.SBlockRealize) -> list[tuple[tirx.IterVar, ir.Expr]]:
    return list(zip(realize.block.iter_vars, realize.iter_values, strict=True))


def _is_unbounded(iter_var: tirx.IterVar) -> bool:
    """Whether a block variable only hands in the variable of a loop of the program, whose length is not known here."""
    return isinstance(iter_var.dom.extent, tirx.IntImm) and int(iter_var.dom.extent) > LONGEST


def has_steps(loop: tirx.For, realize: s_tir.SBlockRealize) -> bool:
    """Whether a loop around a block has a step wherever each of the block's variables has a value."""
    moved = [(iv, v) for iv, v in _pairs(realize) if mentions(v, [loop.loop_var])]
    if any(v.same_as(loop.loop_var) or _is_unbounded(iv) for iv, v in moved):
        return True
    atoms, analyzer = Atoms(), sym.Analyzer()
    extent = atoms.replace(loop.extent)
    for iv in realize.block.iter_vars:
        domain = atoms.replace(_uncast(iv.dom.extent))
        for var in atoms.of(iv.dom.extent):
            _at_least_one(analyzer, var)
        if isinstance(domain, tirx.Sub) and isinstance(domain.a, Var):
            length = Var("length", domain.a.ty)
            _at_least_one(analyzer, length)
            extent = substitute(extent, {domain.a: domain.b + length})
    return bool(analyzer.can_prove(analyzer.simplify(extent) >= const(1, str(extent.ty.dtype))))


def covers(indices: Sequence[ir.Expr], moving: Mapping[Var, ir.Range]) -> bool:
    """Whether subscripts reach every element between their ends, each dimension by variables of its own."""
    used: list[Var] = []
    for index in indices:
        own = [v for v in moving if mentions(index, [v])]
        if any(v in used for v in own) or not _is_dense(index, moving):
            return False
        used += own
    return True


def _is_dense(index: ir.Expr, moving: Mapping[Var, ir.Range]) -> bool:
    """Whether a subscript takes every value of a range: ``v``, ``base + v``, or ``indptr[row] + v`` along the rows."""
    if isinstance(index, tirx.Cast):
        return _is_dense(index.value, moving)
    if not mentions(index, list(moving)):
        return True
    if isinstance(index, Var):
        return True
    if not isinstance(index, tirx.Add):
        return False
    for lane, base in ((index.b, index.a), (index.a, index.b)):
        if isinstance(lane, Var) and lane in moving and not mentions(base, [lane]):
            return _continues(base, moving[lane].extent, moving)
    return False


def _continues(base: ir.Expr, extent: ir.Expr, moving: Mapping[Var, ir.Range]) -> bool:
    """Whether each step of `base` goes on where the `extent` elements of the step before end."""
    if not mentions(base, list(moving)):
        return True
    if isinstance(base, tirx.Cast):
        return _continues(base.value, extent, moving)
    if isinstance(base, ir.TensorLoad) and len(base.indices) == 1:
        row = base.indices[0]
        length = tirx.BufferLoad(base.source, [row + const(1, str(row.ty.dtype))]) - base
    elif isinstance(base, tirx.Mul):
        row, length = base.a, base.b
    elif isinstance(base, Var):
        row, length = base, const(1, str(base.ty.dtype))
    else:
        return False
    atoms, analyzer = Atoms(), sym.Analyzer()
    gap = analyzer.simplify(atoms.replace(length)) - analyzer.simplify(atoms.replace(_uncast(extent)))
    return bool(analyzer.can_prove_equal(gap, const(0, str(gap.ty.dtype)))) and _is_dense(row, moving)


def _uncast(expr: ir.Expr) -> ir.Expr:
    return _uncast(expr.value) if isinstance(expr, tirx.Cast) else expr
