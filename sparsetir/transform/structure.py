# SPDX-License-Identifier: Apache-2.0
"""Structures under decomposition: shared buffers, declarations of pieces, clean-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import VerifyError
from sparsetir.formats.base import FormatRewriteRule
from sparsetir.ir import dialect
from sparsetir.ir.effects import analyse
from sparsetir.ir.rewriting import collect, seq, substitute
from sparsetir.ir.rules import Facts
from sparsetir.ir.views import Axis, Program, SparseBuffer, cast, const, declare_buffer, decode_axis
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.utils.caches import cached_property

# Leave a function without what nothing uses any more, and put declarations into it.


def replaced_vars(node: Any, mapping: Mapping[Var, Any]) -> Any:
    """Replace variables of `node` by expressions."""
    return structural_mutate(node, [(Var, lambda v, _mutator: mapping.get(v, v))])


def declares(stmt: tirx.Stmt, dropped: set[Var]) -> bool:
    """Return whether a statement makes one of the buffers."""
    if isinstance(stmt, (tirx.DeclBuffer, tirx.AllocBuffer)):
        return stmt.buffer in dropped
    bound = isinstance(stmt, tirx.Evaluate) and dialect.is_call(stmt.value, "bind_axes")
    return bound and stmt.value.args[0] in dropped


def with_declarations(body: tirx.Stmt, statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Insert `statements` at the start of the root block."""
    root = body.block
    old = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    block = s_tir.SBlock(
        [], [], [], root.name_hint, seq(*statements, *old), None, root.alloc_buffers, annotations=root.annotations
    )
    return s_tir.SBlockRealize([], tirx.const(True, "bool"), block)


def without_unused(func: tirx.PrimFunc, body: tirx.Stmt, params: Sequence[Var]) -> tirx.PrimFunc:
    """Return the function without the axes and parameters that nothing uses any more; ordinary parameters stay."""
    body = _without_unused_axes(body)
    used = _used(body, params)
    return tirx.PrimFunc([p for p in params if p in used], body, func.ret_type, func.attrs)


def _without_unused_axes(body: tirx.Stmt) -> tirx.Stmt:
    while dead := _unused_axes(body):
        body = _without_bindings(body, dead)
    return body


def _unused_axes(body: tirx.Stmt) -> list[Var]:
    uses: dict[Var, int] = {}
    structural_walk(body, (Var, lambda v: uses.update({v: uses.get(v, 0) + 1})))
    binds = [b for b in collect(body, tirx.Bind) if dialect.is_call(b.value, *dialect.AXIS_NAMES)]
    return [b.var for b in binds if uses.get(b.var, 0) <= 1]


def _without_bindings(body: tirx.Stmt, dead: list[Var]) -> tirx.Stmt:
    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*(mutator.mutate(s) for s in node.seq if not (isinstance(s, tirx.Bind) and s.var in dead)))

    return structural_mutate(body, [(tirx.SeqStmt, on_seq)])


def _used(body: tirx.Stmt, params: Sequence[Var]) -> set[Var]:
    """Return the parameters that occur in the body or in the shape of one that does."""
    used: set[Var] = set()
    structural_walk(body, (Var, used.add))
    used_params = [p for p in params if p in used]
    for param in used_params:
        if tirx.is_buffer_var(param):
            for extent in param.ty.shape:
                structural_walk(extent, (Var, used.add))
    return used


def names_of(func: tirx.PrimFunc) -> set[str]:
    """Return every name in the function."""
    names: set[str] = set()
    structural_walk(func, (Var, lambda v: names.add(str(v.name))))
    return names | {str(p.name) for p in func.params}


# Copy a format's description into a program: axes, arrays and sizes of its own, under new names.


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
    """Copy a scalar parameter under a new name."""
    return Var(rename(str(param.name)), param.ty)


def copy_array(param: Var, rename: Rename, mapping: dict[Var, ir.Expr]) -> Var:
    """Copy an array parameter under a new name, with its shape in terms of `mapping`."""
    ty = param.ty
    shape = [substitute(extent, mapping) for extent in ty.shape]
    alignment = int(ty.data_alignment)
    return tirx.decl_buffer(shape, str(ty.dtype), rename(str(param.name)), layout=None, data_alignment=alignment)


def shared_lengths(rule: FormatRewriteRule, old: Sequence[Axis]) -> dict[Var, ir.Expr]:
    """Return the sizes of the description that are lengths of old axes with the same coordinates."""
    probes = [Var(axis.name, axis.var.ty) for axis in rule.buffer.axes]
    lengths: dict[Var, ir.Expr] = {}
    for coord, before in zip(rule.old_coords(probes), old, strict=True):
        for probe, axis in zip(probes, rule.buffer.axes, strict=True):
            if probe.same_as(coord) and isinstance(axis.length, Var):
                lengths[axis.length] = cast(before.length, str(axis.length.ty.dtype))
    return lengths


def splice(rule: FormatRewriteRule, old: Sequence[Axis], rename: Rename) -> Spliced:
    """Create the axes, arrays and sizes of one piece.

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
    values: list[ir.Expr] = []
    on_bind = lambda b: values.append(b.value) if b.var.same_as(var) else None  # noqa: E731
    structural_walk(rule.description, (tirx.Bind, on_bind))
    return values[0]


def make_buffer(old: SparseBuffer, axes: tuple[Axis, ...], rename: Rename) -> tuple[SparseBuffer, list[tirx.Stmt]]:
    """Create a buffer like `old` over other axes, and its declaration."""
    size = old.view.ty.data_alignment
    shape = SparseBuffer(old.view, old.view, axes, old.default).storage_shape
    options = {"layout": None, "data_alignment": int(size)}
    storage = tirx.decl_buffer(shape, old.dtype, rename(str(old.storage.name)), **options)
    lengths = [axis.length for axis in axes]
    view = tirx.decl_buffer(lengths, old.dtype, rename(old.name), **options)
    alloc = [tirx.AllocBuffer(storage)] if old.allocated else []
    fresh = SparseBuffer(view, storage, axes, old.default, old.allocated)
    return fresh, [*alloc, *declare_buffer(view, storage, old.default, axes)]


# What is decomposed: the buffers that share one structure, and the declarations of their pieces.


MASK_DTYPE = "int8"


@dataclass
class NewPiece:
    """Piece of a format during the rewriting of a program."""

    spliced: Spliced
    buffers: dict[Var, SparseBuffer]
    mask: SparseBuffer | None = None
    statements: list[tirx.Stmt] = field(default_factory=list)
    declarations: dict[Var, list[tirx.Stmt]] = field(default_factory=dict)
    mask_statements: list[tirx.Stmt] = field(default_factory=list)

    @property
    def rule(self) -> FormatRewriteRule:
        return self.spliced.rule


class BufferStructure:
    """The buffers over one list of axes, and the pieces they become.

    ``padded`` are those whose slots between the entries are known to hold zero so far. With ``assume_finite``, zeros
    there are multiplied as if they were entries; ``multiplies_zeros`` tells whether any are. ``adds_up`` says whether
    all iterations seen so far compute the same of entries that were added up.
    """

    def __init__(
        self, program: Program, name: str, rules: Sequence[FormatRewriteRule], *, assume_finite: bool = True
    ) -> None:
        self.program, self.name, self.assume_finite = program, name, assume_finite
        self.multiplies_zeros = False
        self.axes = program.buffer(name).axes
        self.rules = list(rules)
        self.names = names_of(program.func)
        self.group = self._group()
        self.padded = {b.view for b in self.group} - _made_here(program) - _stored_in_loops(program)
        self.adds_up = True
        self._check()
        self.made = [self._make(rule) for rule in self.rules]

    @cached_property
    def facts(self) -> Facts:
        """The program as the tests of dependence ask for it."""
        return Facts(self.program.func, self.program)

    @property
    def is_dense(self) -> bool:
        """Whether the program iterates every coordinate: its entries are then the nonzero elements."""
        return all(a.kind == "dense_fixed" for a in self.axes)

    # ------------------------------------------------------------------ what iterations say of it

    def keep_repeated(self) -> None:
        """Record that an iteration needs entries with the same coordinates separately."""
        self.adds_up = False

    def multiply_zeros(self) -> None:
        """Record that an iteration multiplies zeros between the entries."""
        self.multiplies_zeros = True

    def set_clean(self, view: Var, is_clean: bool) -> None:
        """Record whether slots between the entries hold zero after an iteration that stores to a buffer."""
        (self.padded.add if is_clean else self.padded.discard)(view)

    # ------------------------------------------------------------------ what is rewritten

    def _group(self) -> list[SparseBuffer]:
        """Return the buffers over all of the structure's axes; one over dense axes alone is stored sparse by itself."""
        if self.is_dense:
            return [self.program.buffer(self.name)]
        axes, buffers = set(self.axes), []
        for buffer in self.program.buffers.values():
            shared_axes = axes & set(buffer.axes)
            if shared_axes == axes:
                buffers.append(buffer)
            elif sparse := [a.name for a in buffer.axes if a in shared_axes and a.kind != "dense_fixed"]:
                message = f"{buffer.name} has axis {sparse[0]} of {self.name} but not all its axes"
                raise VerifyError(f"{message}: decompose a buffer over all of them", buffer.name)
        return buffers

    def _check(self) -> None:
        if not self.rules:
            raise VerifyError(f"the format of {self.name} has no rules", self.name)
        for rule in self.rules:
            if rule.order != len(self.axes):
                mismatch = f"rule {rule.name!r} is for {rule.order} dimensions"
                raise VerifyError(f"{mismatch}, {self.name} has {len(self.axes)}", self.name)
        repeated = {r.name for r in self.rules if sum(r.name == o.name for o in self.rules) > 1}
        if repeated:
            raise VerifyError(f"two rules for {self.name} are called {min(repeated)!r}", self.name)

    def rename(self, suffix: str, name: str) -> str:
        """Return an unused name for an object of a piece."""
        stem = f"{name}_{suffix}"
        for candidate in (stem, f"{stem}_{self.name}", *(f"{stem}_{n}" for n in range(len(self.names) + 1))):
            if candidate not in self.names:
                self.names.add(candidate)
                return candidate
        return stem

    def _make(self, rule: FormatRewriteRule) -> NewPiece:
        rename = lambda name: self.rename(rule.name, name)  # noqa: E731
        spliced = splice(rule, self.axes, rename)
        piece = NewPiece(spliced, {}, statements=list(spliced.statements))
        for buffer in self.group:
            axes = self._axes_of(buffer, spliced)
            piece.buffers[buffer.view], piece.declarations[buffer.view] = make_buffer(buffer, axes, rename)
        return piece

    def _axes_of(self, buffer: SparseBuffer, spliced: Spliced) -> tuple[Axis, ...]:
        """Return the buffer's axes with the structure's replaced, all at the place of the first."""
        first = min(buffer.axes.index(a) for a in self.axes)
        before = [a for a in buffer.axes[:first] if a not in self.axes]
        after = [a for a in buffer.axes[first:] if a not in self.axes]
        return (*before, *spliced.axes, *after)

    def mask(self, piece: NewPiece) -> SparseBuffer:
        """Return the buffer that is 1 at the entries of a piece."""
        if piece.mask is None:
            rename = lambda name: self.rename(piece.rule.name, name)  # noqa: E731
            like = tirx.decl_buffer([const(1)], MASK_DTYPE, name="valid", layout=None, data_alignment=1)
            zero = const(0, MASK_DTYPE)
            piece.mask, piece.mask_statements = make_buffer(
                SparseBuffer(like, like, (), zero), tuple(piece.spliced.axes), rename
            )
        return piece.mask

    def dense(self, axis: Axis) -> Axis:
        """Return `axis`, or a new dense axis of its length."""
        if axis.kind == "dense_fixed":
            return axis
        name = self.rename("dense", axis.name)
        var = Var(name, axis.var.ty)
        value = dialect.call("dense_fixed", [cast(axis.length, axis.idtype)], axis.idtype)
        self.made[0].statements.append(tirx.Bind(var, value))
        return Axis(var, "dense_fixed", length=axis.length, count=axis.length)


def _stored_in_loops(program: Program) -> set[Var]:
    """Return the buffers that a loop around an iteration stores to: earlier rounds may have set their values."""
    loops = collect(program.func.body, tirx.For)
    return {store.buffer for loop in loops for store in collect(loop, tirx.BufferStore)}


def _made_here(program: Program) -> set[Var]:
    """Return the buffers that have no values before the program runs."""
    outputs = analyse(program).outputs
    return {b.view for b in program.buffers.values() if b.allocated or str(b.storage.name) in outputs}


__all__ = [
    "MASK_DTYPE",
    "BufferStructure",
    "NewPiece",
    "Spliced",
    "declares",
    "make_buffer",
    "names_of",
    "replaced_vars",
    "splice",
    "with_declarations",
    "without_unused",
]
