# SPDX-License-Identifier: Apache-2.0
"""Nodes of stage-I programs: iterations and scratch buffers as the parser makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.ir import dialect
from sparsetir.ir.views import SPARSE_ITER, Axis, Entry, SparseBuffer, const
from sparsetir.ir.visitor import structural_walk

SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def _target(entry: Entry) -> ir.Expr:
    hosts = entry.hosts or (entry.attached_to,) * len(entry.axes)
    axes = [_below(axis, host) for axis, host in zip(entry.axes, hosts, strict=True)]
    if entry.is_fused:
        return dialect.call("fuse", axes, entry.axes[-1].idtype)
    return dialect.call(entry.merge, axes, entry.domains[0].idtype) if entry.merge else axes[0]


def _below(axis: Axis, host: Axis | None) -> ir.Expr:
    return axis.var if host is None else dialect.call("attach", [axis.var, host.var], axis.idtype)


def make_iteration(
    name: str,
    entries: Sequence[Entry],
    body: tirx.Stmt,
    *,
    init: tirx.Stmt | None = None,
    notes: dict[str, Any] | None = None,
    allocated: Sequence[Var] = (),
) -> s_tir.SBlockRealize:
    """Return the node of a sparse iteration, as the parser makes it."""
    kinds = "".join(e.kinds for e in entries)
    iter_vars, values = [], []
    for entry in entries:
        target = _target(entry)
        for n, (axis, var, kind) in enumerate(zip(entry.domains, entry.vars, entry.kinds, strict=True)):
            domain = ir.Range(const(0, str(axis.length.ty.dtype)), axis.length)
            iter_vars.append(tirx.IterVar(domain, var, REDUCE if kind == "R" else SPATIAL))
            values.append(dialect.call("coord", [target, n], axis.idtype))
    annotations = {SPARSE_ITER: kinds, **(notes or {})}
    block = s_tir.SBlock(iter_vars, [], [], name, body, init, list(allocated), annotations=annotations)
    return s_tir.SBlockRealize(values, tirx.const(True, "bool"), block)


def make_scratch(name: str, axes: Sequence[Axis], dtype: str, size: int) -> tuple[Var, list[tirx.Stmt]]:
    """Return a scratch buffer over axes, and the statements that allocate and declare it.

    Parameters
    ----------
    name : str
    axes : sequence of Axis
    dtype : str
    size : int
        Bytes of an element.
    """
    axes, options = tuple(axes), {"layout": None, "data_alignment": size}
    view = tirx.decl_buffer([axis.length for axis in axes], dtype, name, **options)
    default = tirx.const(0, dtype)
    shape = SparseBuffer(view, view, axes, default).storage_shape
    storage = tirx.decl_buffer(shape, dtype, f"{name}_data", **options)
    bound = dialect.call("bind_axes", [view, default, *(a.var for a in axes)])
    declared = [tirx.DeclBuffer(view, data=tirx.buffer_data(storage)), tirx.Evaluate(bound)]
    return view, [tirx.AllocBuffer(storage), *declared]


def names_in(func: tirx.PrimFunc) -> set[str]:
    """Return the names of all variables and blocks of a function."""
    names: set[str] = set()
    on_block = lambda b: names.add(str(b.name_hint))  # noqa: E731
    structural_walk(func, [(Var, lambda v: names.add(str(v.name))), (s_tir.SBlock, on_block)])
    return names


def fresh_name(base: str, names: set[str]) -> str:
    """Return a name that is not among others, and add it to them."""
    name, k = base, 0
    while name in names:
        k += 1
        name = f"{base}_{k}"
    names.add(name)
    return name


__all__ = ["REDUCE", "SPATIAL", "fresh_name", "make_iteration", "make_scratch", "names_in"]
