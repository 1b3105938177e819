# SPDX-License-Identifier: Apache-2.0
"""Copy a format's description into a program: axes, arrays and sizes of its own, under new names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.ir import Axis, SparseBuffer, cast, decode_axis
from sparsetir.lower.rewriting import substitute
from sparsetir.walks import structural_walk

Rename = Callable[[str], str]


@dataclass
class Spliced:
    """The copy of one description.

    ``params`` maps the description's parameter names to the new parameters; the array of values is not among them.
    """

    rule: FormatRewriteRule
    params: dict[str, Var] = field(default_factory=dict)
    statements: list[tirx.Stmt] = field(default_factory=list)
    axes: list[Axis] = field(default_factory=list)


def copy_size(param: Var, rename: Rename) -> Var:
    """A scalar parameter under a new name."""
    return Var(rename(str(param.name)), param.ty)


def copy_array(param: Var, rename: Rename, mapping: dict[Var, ir.Expr]) -> Var:
    """An array parameter under a new name, its shape in terms of `mapping`."""
    ty = param.ty
    shape = [substitute(extent, mapping) for extent in ty.shape]
    alignment = int(ty.data_alignment)
    return tirx.decl_buffer(shape, str(ty.dtype), rename(str(param.name)), layout=None, data_alignment=alignment)


def shared_lengths(rule: FormatRewriteRule, old: Sequence[Axis]) -> dict[Var, ir.Expr]:
    """Sizes of the description that are lengths of the old axes: those of axes with the same coordinates."""
    probes = [Var(axis.name, axis.var.ty) for axis in rule.buffer.axes]
    found: dict[Var, ir.Expr] = {}
    for coord, before in zip(rule.old_coords(probes), old, strict=True):
        for probe, axis in zip(probes, rule.buffer.axes, strict=True):
            if probe.same_as(coord) and isinstance(axis.length, Var):
                found[axis.length] = cast(before.length, str(axis.length.ty.dtype))
    return found


def splice(rule: FormatRewriteRule, old: Sequence[Axis], rename: Rename) -> Spliced:
    """Fresh axes, arrays and sizes for one piece.

    Parameters
    ----------
    rule : FormatRewriteRule
    old : sequence of Axis
        The axes that the piece stands for; a size that is the length of one of them is not a parameter again.
    rename : callable
        A name nothing else in the program has, from the description's name.
    """
    out = Spliced(rule)
    values = rule.buffer.storage
    mapping: dict[Var, ir.Expr] = dict(shared_lengths(rule, old))
    shared = set(mapping)
    params = list(rule.description.params)
    for param in [p for p in params if not tirx.is_buffer_var(p) and p not in shared]:
        mapping[param] = copy_size(param, rename)
    for param in [p for p in params if tirx.is_buffer_var(p) and not p.same_as(values)]:
        mapping[param] = copy_array(param, rename, mapping)
    out.params = {str(p.name): mapping[p] for p in params if p in mapping and p not in shared}
    axes: dict[Var, Axis] = {}
    for var, axis in rule.program.axes.items():
        value = substitute(_binding(rule, var), mapping)
        mapping[var] = Var(rename(axis.name), var.ty)
        axes[mapping[var]] = decode_axis(mapping[var], value, axes)
        out.statements.append(tirx.Bind(mapping[var], value))
    out.axes = [axes[mapping[axis.var]] for axis in rule.buffer.axes]
    return out


def _binding(rule: FormatRewriteRule, var: Var) -> ir.Expr:
    found: list[ir.Expr] = []
    on_bind = lambda b: found.append(b.value) if b.var.same_as(var) else None  # noqa: E731
    structural_walk(rule.description, (tirx.Bind, on_bind))
    return found[0]


def declare_buffer(view: Var, storage: Var, default: ir.Expr, axes: tuple[Axis, ...]) -> list[tirx.Stmt]:
    """The statements that give `storage` its axes."""
    bound = op.call("bind_axes", [view, default, *(a.var for a in axes)])
    return [tirx.DeclBuffer(view, data=tirx.buffer_data(storage)), tirx.Evaluate(bound)]


def make_buffer(old: SparseBuffer, axes: tuple[Axis, ...], rename: Rename) -> tuple[SparseBuffer, list[tirx.Stmt]]:
    """A buffer like `old` over other axes, and its declaration."""
    size = old.view.ty.data_alignment
    shape = SparseBuffer(old.view, old.view, axes, old.default).storage_shape
    options = {"layout": None, "data_alignment": int(size)}
    storage = tirx.decl_buffer(shape, old.dtype, rename(str(old.storage.name)), **options)
    lengths = [axis.length for axis in axes]
    view = tirx.decl_buffer(lengths, old.dtype, rename(old.name), **options)
    alloc = [tirx.AllocBuffer(storage)] if old.allocated else []
    fresh = SparseBuffer(view, storage, axes, old.default, old.allocated)
    return fresh, [*alloc, *declare_buffer(view, storage, old.default, axes)]


__all__ = ["Spliced", "declare_buffer", "make_buffer", "splice"]
