# SPDX-License-Identifier: Apache-2.0
"""Leave a function without what nothing uses any more, and put declarations into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.lower.rewriting import collect, seq
from sparsetir.walks import structural_mutate, structural_walk


def replaced_vars(node: Any, mapping: Mapping[Var, Any]) -> Any:
    """`node` with expressions in place of variables."""
    return structural_mutate(node, [(Var, lambda v, _mutator: mapping.get(v, v))])


def declares(stmt: tirx.Stmt, dropped: set[Var]) -> bool:
    """Whether a statement makes one of the buffers."""
    if isinstance(stmt, (tirx.DeclBuffer, tirx.AllocBuffer)):
        return stmt.buffer in dropped
    bound = isinstance(stmt, tirx.Evaluate) and op.is_call(stmt.value, "bind_axes")
    return bound and stmt.value.args[0] in dropped


def with_declarations(body: tirx.Stmt, statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """`statements` at the start of the root block."""
    root = body.block
    old = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    block = s_tir.SBlock(
        [], [], [], root.name_hint, seq(*statements, *old), None, root.alloc_buffers, annotations=root.annotations
    )
    return s_tir.SBlockRealize([], tirx.const(True, "bool"), block)


def without_unused(func: tirx.PrimFunc, body: tirx.Stmt, params: Sequence[Var]) -> tirx.PrimFunc:
    """The function without the axes and parameters that nothing uses any more; ordinary parameters stay."""
    body = _without_unused_axes(body)
    kept = _used(body, params)
    return tirx.PrimFunc([p for p in params if p in kept], body, func.ret_type, func.attrs)


def _without_unused_axes(body: tirx.Stmt) -> tirx.Stmt:
    while dead := _unused_axes(body):
        body = _without_bindings(body, dead)
    return body


def _unused_axes(body: tirx.Stmt) -> list[Var]:
    uses: dict[Var, int] = {}
    structural_walk(body, (Var, lambda v: uses.update({v: uses.get(v, 0) + 1})))
    binds = [b for b in collect(body, tirx.Bind) if op.is_call(b.value, *op.AXIS_NAMES)]
    return [b.var for b in binds if uses.get(b.var, 0) <= 1]


def _without_bindings(body: tirx.Stmt, dead: list[Var]) -> tirx.Stmt:
    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*(mutator.mutate(s) for s in node.seq if not (isinstance(s, tirx.Bind) and s.var in dead)))

    return structural_mutate(body, [(tirx.SeqStmt, on_seq)])


def _used(body: tirx.Stmt, params: Sequence[Var]) -> set[Var]:
    """Parameters that occur in the body or in the shape of one that does."""
    used: set[Var] = set()
    structural_walk(body, (Var, used.add))
    known = [p for p in params if p in used]
    for param in known:
        if tirx.is_buffer_var(param):
            for extent in param.ty.shape:
                structural_walk(extent, (Var, used.add))
    return used


def names_of(func: tirx.PrimFunc) -> set[str]:
    """Every name in the function."""
    found: set[str] = set()
    structural_walk(func, (Var, lambda v: found.add(str(v.name))))
    return found | {str(p.name) for p in func.params}


__all__ = ["declares", "names_of", "replaced_vars", "with_declarations", "without_unused"]
