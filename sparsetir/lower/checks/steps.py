# SPDX-License-Identifier: Apache-2.0
"""Facts on extents that depend on data: whether a loop runs at least once, whether two lengths are the same."""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import const
from sparsetir.lower.rewriting import mentions, same, substitute
from sparsetir.walks import structural_mutate

LONGEST = 1 << 30


class Atoms:
    """Stands a variable for every load or cast, so that the arithmetic around them can be compared."""

    def __init__(self) -> None:
        self.known: list[tuple[ir.Expr, Var]] = []

    def replace(self, expr: ir.Expr) -> ir.Expr:
        """`expr` with its atoms as variables."""
        callbacks = [(ir.TensorLoad, self._on_atom), (tirx.Cast, self._on_atom)]
        return structural_mutate(expr, callbacks)

    def of(self, expr: ir.Expr) -> list[Var]:
        """The variables that stand for `expr`, of whatever width."""
        plain = uncast(expr)
        own = [plain] if isinstance(plain, Var) else []
        return own + [var for node, var in self.known if same(uncast(node), plain)]

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
    """Whether a block variable only passes on the variable of a loop of the program, whose length is not known here."""
    return isinstance(iter_var.dom.extent, tirx.IntImm) and int(iter_var.dom.extent) > LONGEST


def has_steps(loop: tirx.For, realize: s_tir.SBlockRealize) -> bool:
    """Whether a loop around a block runs at least once wherever each of the block's variables has a value."""
    moved = [(iv, v) for iv, v in _pairs(realize) if mentions(v, [loop.loop_var])]
    if any(v.same_as(loop.loop_var) or _is_unbounded(iv) for iv, v in moved):
        return True
    atoms, analyzer = Atoms(), sym.Analyzer()
    extent = atoms.replace(loop.extent)
    for iv in realize.block.iter_vars:
        domain = atoms.replace(uncast(iv.dom.extent))
        for var in atoms.of(iv.dom.extent):
            _at_least_one(analyzer, var)
        if isinstance(domain, tirx.Sub) and isinstance(domain.a, Var):
            length = Var("length", domain.a.ty)
            _at_least_one(analyzer, length)
            extent = substitute(extent, {domain.a: domain.b + length})
    return bool(analyzer.can_prove(analyzer.simplify(extent) >= const(1, str(extent.ty.dtype))))


def uncast(expr: ir.Expr) -> ir.Expr:
    """What is converted, without the conversions."""
    return uncast(expr.value) if isinstance(expr, tirx.Cast) else expr


def equal(a: ir.Expr, b: ir.Expr) -> bool:
    """Whether two numbers are the same, whatever their width."""
    atoms, analyzer = Atoms(), sym.Analyzer()
    gap = analyzer.simplify(atoms.replace(uncast(a))) - analyzer.simplify(atoms.replace(uncast(b)))
    return bool(analyzer.can_prove_equal(gap, const(0, str(gap.ty.dtype))))


def row_length(start: ir.Expr) -> ir.Expr | None:
    """How many positions a row has that starts at ``indptr[row]`` or ``row * width``; None for other starts."""
    start = uncast(start)
    if isinstance(start, tirx.Mul):
        return start.b
    if not isinstance(start, ir.TensorLoad) or len(start.indices) != 1:
        return None
    row = start.indices[0]
    return tirx.BufferLoad(start.source, [row + const(1, str(row.ty.dtype))]) - start
