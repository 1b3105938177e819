# SPDX-License-Identifier: Apache-2.0
"""Rewrite a program over other formats of its sparse buffers: one iteration becomes one for each piece.

before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

after, with A stored as 4 x 4 blocks and a rest::

    with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
        C[i, k] = 0
    with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm_blocks") as [io, jo, ii, ji, k]:
        C[io * 4 + ii, k] = C[io * 4 + ii, k] + A_blocks[io, jo, ii, ji] * B[jo * 4 + ji, k]
    with T.sp_iter([I_rest, J_rest, K], "SRS", "spmm_rest") as [i, j, k]:
        C[i, k] = C[i, k] + A_rest[i, j] * B[j, k]

Every buffer over the same axes is stored in the same pieces. What is initialised once in the program is initialised
once here. Slots that a format adds between the entries are left out where they would change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir import op
from sparsetir.errors import VerifyError, own_errors
from sparsetir.ir import (
    INDEPENDENT,
    INIT,
    SPARSE_ITER,
    STORED,
    Axis,
    Program,
    SparseBuffer,
    SpIter,
    accesses,
    cast,
    const,
    decode,
    is_sp_iter,
)
from sparsetir.lower.rewriting import collect, mentions, seq
from sparsetir.transform.neutral import is_neutral, still_clean
from sparsetir.transform.rule import FormatRewriteRule
from sparsetir.transform.splice import Spliced, make_buffer, splice

SPATIAL, REDUCE = 0, 2
MASK_DTYPE = "int8"


@dataclass(frozen=True, eq=False)
class Piece:
    """One piece of a decomposed buffer's format within the new program.

    ``params`` maps the description's parameters to the new function's, ``values`` the arrays of the program's buffers
    over the old axes to their arrays here, and ``buffers`` the buffers themselves. ``mask`` is the parameter that tells
    entries from padding, None where that is not needed.
    """

    rule: FormatRewriteRule
    params: dict[str, str]
    values: dict[str, str]
    buffers: dict[str, str]
    mask: str | None


@dataclass(frozen=True, eq=False)
class Group:
    """The buffers that share one structure, named by the one that was asked for, and the pieces they became."""

    name: str
    buffers: tuple[str, ...]
    axes: tuple[Axis, ...]
    pieces: tuple[Piece, ...]


@dataclass
class _Made:
    """A piece while the program is rewritten."""

    spliced: Spliced
    buffers: dict[Var, SparseBuffer]
    mask: SparseBuffer | None = None
    statements: list[tirx.Stmt] = field(default_factory=list)
    mask_statements: list[tirx.Stmt] = field(default_factory=list)

    @property
    def rule(self) -> FormatRewriteRule:
        return self.spliced.rule


class Rewriter:
    """Rewrites one structure of one program."""

    def __init__(self, program: Program, name: str, rules: Sequence[FormatRewriteRule], *, exact: bool) -> None:
        self.program, self.name, self.exact = program, name, exact
        self.axes = program.buffer(name).axes
        self.rules = list(rules)
        self.names = _names(program.func)
        self.group = self._group()
        self.padded = {b.view for b in self.group if not _is_written_first(program, b)}
        self._check()
        self.made = [self._make(rule) for rule in self.rules]

    # ------------------------------------------------------------------ what is rewritten

    def _group(self) -> list[SparseBuffer]:
        """The buffers over all of the structure's axes."""
        wanted, found = set(self.axes), []
        for buffer in self.program.buffers.values():
            held = wanted & set(buffer.axes)
            if held == wanted:
                found.append(buffer)
            elif sparse := [a.name for a in held if a.kind != "dense_fixed"]:
                message = f"{buffer.name} has axis {sparse[0]} of {self.name} but not all its axes"
                raise VerifyError(f"{message}: decompose a buffer over all of them", buffer.name)
        return found

    def _check(self) -> None:
        if all(a.kind == "dense_fixed" for a in self.axes):
            raise VerifyError(f"{self.name} is dense: only sparse buffers are decomposed", self.name)
        if not self.rules:
            raise VerifyError(f"the format of {self.name} has no rules", self.name)
        for rule in self.rules:
            if rule.order != len(self.axes):
                found = f"rule {rule.name!r} is for {rule.order} dimensions"
                raise VerifyError(f"{found}, {self.name} has {len(self.axes)}", self.name)
        repeated = {r.name for r in self.rules if sum(r.name == o.name for o in self.rules) > 1}
        if repeated:
            raise VerifyError(f"two rules for {self.name} are called {min(repeated)!r}", self.name)

    def _rename(self, suffix: str, name: str) -> str:
        """A free name for something of a piece."""
        wanted = f"{name}_{suffix}"
        for candidate in (wanted, f"{wanted}_{self.name}", *(f"{wanted}_{n}" for n in range(len(self.names) + 1))):
            if candidate not in self.names:
                self.names.add(candidate)
                return candidate
        return wanted

    def _make(self, rule: FormatRewriteRule) -> _Made:
        rename = lambda name: self._rename(rule.name, name)  # noqa: E731
        spliced = splice(rule, self.axes, rename)
        made = _Made(spliced, {}, statements=list(spliced.statements))
        for buffer in self.group:
            made.buffers[buffer.view], declaration = make_buffer(buffer, self._axes_of(buffer, spliced), rename)
            made.statements += declaration
        return made

    def _axes_of(self, buffer: SparseBuffer, spliced: Spliced) -> tuple[Axis, ...]:
        """The buffer's axes with the structure's replaced, all at the place of the first."""
        first = min(buffer.axes.index(a) for a in self.axes)
        before = [a for a in buffer.axes[:first] if a not in self.axes]
        after = [a for a in buffer.axes[first:] if a not in self.axes]
        return (*before, *spliced.axes, *after)

    def _mask(self, made: _Made) -> SparseBuffer:
        """The buffer that is 1 at the entries of a piece."""
        if made.mask is None:
            rename = lambda name: self._rename(made.rule.name, name)  # noqa: E731
            like = tirx.decl_buffer([const(1)], MASK_DTYPE, name="valid", layout=None, data_alignment=1)
            zero = const(0, MASK_DTYPE)
            made.mask, made.mask_statements = make_buffer(
                SparseBuffer(like, like, (), zero), tuple(made.spliced.axes), rename
            )
        return made.mask

    # ------------------------------------------------------------------ the function

    def function(self) -> tirx.PrimFunc:
        """The new function."""
        dropped = {b.view for b in self.group} | {b.storage for b in self.group}

        def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
            kept = [mutator.mutate(s) for s in node.seq if not _declares(s, dropped)]
            return seq(*kept)

        def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
            if not is_sp_iter(node):
                return mutator.default_mutate(node)
            iteration = next((it for it in self.program.iterations if it.node.same_as(node)), None)
            return self.iteration(iteration) if iteration is not None else node

        body = tvm_ffi.structural_mutate(
            self.program.func.body, [(tirx.SeqStmt, on_seq), (s_tir.SBlockRealize, on_realize)]
        )
        fresh = [s for made in self.made for s in (*made.statements, *made.mask_statements)]
        body = _insert(body, fresh)
        func = _without_unused(self.program.func, body, self._params())
        return _with_sizes(func, self._exact_lengths()) if self.exact else func

    def _exact_lengths(self) -> dict[Var, ir.Expr]:
        """Lengths of the old axes where no block sticks out, in terms of the pieces' sizes."""
        found: dict[Var, ir.Expr] = {}
        for made in self.made:
            last = [cast(a.length, a.idtype) - const(1, a.idtype) for a in made.spliced.axes]
            for axis, coord in zip(self.axes, made.rule.old_coords(last), strict=True):
                whole = sym.Analyzer().simplify(coord + 1)
                if isinstance(axis.length, Var) and made.rule.fills and not mentions(whole, [axis.length]):
                    found.setdefault(axis.length, cast(whole, str(axis.length.ty.dtype)))
        return found

    def _params(self) -> list[Var]:
        out: list[Var] = list(self.program.func.params)
        for made in self.made:
            out += [b.storage for b in made.buffers.values() if not b.allocated]
            out += list(made.spliced.params.values())
            out += [made.mask.storage] if made.mask is not None else []
        return out

    def record(self, func: tirx.PrimFunc) -> Group:
        """What the caller needs to know to fill the new parameters."""
        held = {str(p.name) for p in func.params}
        pieces = []
        for made in self.made:
            params = {name: str(var.name) for name, var in made.spliced.params.items() if str(var.name) in held}
            values = {
                str(self.program.buffers[view].storage.name): str(b.storage.name)
                for view, b in made.buffers.items()
                if str(b.storage.name) in held
            }
            mask = None if made.mask is None else str(made.mask.storage.name)
            buffers = {self.program.buffers[view].name: b.name for view, b in made.buffers.items()}
            pieces.append(Piece(made.rule, params, values, buffers, mask))
        return Group(self.name, tuple(b.name for b in self.group), self.axes, tuple(pieces))

    # ------------------------------------------------------------------ one iteration

    def iteration(self, it: SpIter) -> tirx.Stmt:
        """An iteration of the old program as the new program has it."""
        views = {b.view for b in self.group}
        touched = {b for b, _, _ in accesses(it.block)} & views
        walked = [a for a in self.axes if a in it.axes and a.kind != "dense_fixed"]
        if not touched and not walked:
            return it.node
        missing = [a.name for a in self.axes if a not in it.axes]
        if missing or any(e.attached_to for e in it.entries if set(e.axes) & set(self.axes)):
            fault = f"does not iterate axis {missing[0]}" if missing else "attaches an axis of it to another"
            reason = "its elements would have to be looked up in every piece"
            raise VerifyError(f"cannot decompose {self.name}: iteration {it.name} {fault}, {reason}", it.name)
        self._check_others(it)
        return _Pieces(self, it).statement()

    def _check_others(self, it: SpIter) -> None:
        """No other axis of the iteration may hang from one that is replaced."""
        for axis in it.axes:
            below = [a for a in axis.ancestors if a in self.axes]
            if axis not in self.axes and below:
                fault = f"iterates {axis.name} below {below[-1].name}"
                raise VerifyError(
                    f"cannot decompose {self.name}: iteration {it.name} {fault}, which the new axes replace", it.name
                )


class _Pieces:
    """The iterations that one iteration becomes."""

    def __init__(self, rewriter: Rewriter, it: SpIter) -> None:
        self.rewriter, self.it = rewriter, it
        axis_var = dict(zip(it.axes, it.vars, strict=True))
        self.old_vars = [axis_var[a] for a in rewriter.axes]
        self.kinds = {v: k for v, k in zip(it.vars, it.kinds, strict=True)}
        self.views = {b.view: b for b in rewriter.group}
        self.own_init, self.shared_init = self._split_init()

    def statement(self) -> tirx.Stmt:
        """All of them, the common initialisation first."""
        own = self._is_own
        parts = [p for p in (self.it.block.init, self.it.block.body) if p is not None]
        clean = set(self.rewriter.padded)
        neutral = is_neutral(self.it.block.body, set(self.views), clean, own)
        for view in self.views:
            if any(s.buffer.same_as(view) for p in parts for s in collect(p, tirx.BufferStore)):
                keep = neutral and still_clean(parts, view, clean, own)
                (self.rewriter.padded.add if keep else self.rewriter.padded.discard)(view)
        in_pieces = self._may_init_in_pieces()
        first = [] if in_pieces or not self.shared_init else [self._init_iteration()]
        pieces = [self._piece(made, neutral, in_pieces) for made in self.rewriter.made]
        return seq(*first, *pieces)

    def _refusal(self, fault: str) -> VerifyError:
        message = f"cannot decompose {self.rewriter.name}: iteration {self.it.name} {fault}"
        return VerifyError(message, self.it.name)

    # ------------------------------------------------------------------ initialisation

    def _split_init(self) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        """Initial stores to the rewritten buffers, and all others."""
        init = self.it.block.init
        stmts = [] if init is None else list(init.seq) if isinstance(init, tirx.SeqStmt) else [init]
        own = [s for s in stmts if isinstance(s, tirx.BufferStore) and s.buffer in self.views]
        shared = [s for s in stmts if s not in own]
        if any(s.buffer in self.views for part in shared for s in collect(part, tirx.BufferStore)):
            raise self._refusal("has an initialisation that is not a list of stores")
        return own, shared

    def _may_init_in_pieces(self) -> bool:
        """Whether each piece may initialise what it reduces to: it alone has the rows, and only rows count."""
        if not self.shared_init or self.own_init:
            return False
        others = self.old_vars[1:]
        row = self.old_vars[0]
        if any(self.kinds[v] == "S" for v in others) or self.kinds[row] != "S":
            return False
        stores = [s for part in self.shared_init for s in collect(part, tirx.BufferStore)]
        by_row = all(any(i.same_as(row) for i in s.indices) for s in stores)
        return by_row and all(made.rule.partitions_rows for made in self.rewriter.made)

    def _init_iteration(self) -> tirx.Stmt:
        """An iteration over every spatial coordinate that the shared initial stores use."""
        init = seq(*self.shared_init)
        entries: list[tuple[Axis, Var, str]] = []
        for axis, var in zip(self.it.axes, self.it.vars, strict=True):
            if self.kinds[var] == "S" and mentions(init, [var]):
                entries.append((self._dense(axis), Var(str(var.name), var.ty), "S"))
        mapping = dict(zip((v for v in self.it.vars if self.kinds[v] == "S" and mentions(init, [v])),
                           (v for _, v, _ in entries), strict=True))  # fmt: skip
        if not entries:
            return init
        return _make_iteration(f"{self.it.name}_init", entries, _replace(init, mapping), None, {})

    def _dense(self, axis: Axis) -> Axis:
        """`axis`, or a new dense one of its length."""
        if axis.kind == "dense_fixed":
            return axis
        rewriter = self.rewriter
        name = rewriter._rename("dense", axis.name)
        var = Var(name, axis.var.ty)
        value = op.call("dense_fixed", [cast(axis.length, axis.idtype)], axis.idtype)
        rewriter.made[0].statements.append(tirx.Bind(var, value))
        return Axis(var, "dense_fixed", length=axis.length, count=axis.length)

    # ------------------------------------------------------------------ pieces

    def _is_own(self, buffer: Var, indices: Any) -> bool:
        """Whether a subscript list names the slot at which the iteration stands."""
        axes = self.views[buffer].axes
        return all(indices[axes.index(a)].same_as(v) for a, v in zip(self.rewriter.axes, self.old_vars, strict=True))

    def _piece(self, made: _Made, neutral: bool, in_pieces: bool) -> tirx.Stmt:
        new_vars = [Var(str(a.name).lower(), ir.PrimType(a.idtype)) for a in made.spliced.axes]
        olds = made.rule.old_coords(new_vars)
        mapping: dict[Var, ir.Expr] = {v: cast(e, str(v.ty.dtype)) for v, e in zip(self.old_vars, olds, strict=True)}
        others = [(a, v) for a, v in zip(self.it.axes, self.it.vars, strict=True) if a not in self.rewriter.axes]
        fresh = {v: Var(str(v.name), v.ty) for _, v in others}
        mapping.update(fresh)
        body = self._rewritten(self.it.block.body, made, new_vars, mapping)
        if made.rule.fills and not neutral:
            mask = self.rewriter._mask(made)
            valid = tirx.NE(tirx.BufferLoad(mask.view, list(new_vars)), const(0, MASK_DTYPE))
            body = tirx.IfThenElse(valid, body, None)
        stmts = [*self.own_init, *(self.shared_init if in_pieces else [])]
        init = self._rewritten(seq(*stmts), made, new_vars, mapping) if stmts else None
        notes = {k: v for k, v in self.it.block.annotations.items() if k != SPARSE_ITER}
        if in_pieces:
            notes[INIT] = STORED
        if made.rule.independent and self._rows_are_apart(made):
            notes[INDEPENDENT] = 1
        entries = self._entries(made, new_vars, fresh)
        return _make_iteration(f"{self.it.name}_{made.rule.name}", entries, body, init, notes, self.it.block)

    def _rows_are_apart(self, made: _Made) -> bool:
        """Whether every store of the iteration is at its own row or its own slot."""
        row = self.old_vars[0]
        stores = collect(self.it.block.body, tirx.BufferStore)
        return self.kinds[row] == "S" and all(
            any(i.same_as(row) for i in s.indices) or (s.buffer in self.views and self._is_own(s.buffer, s.indices))
            for s in stores
        )

    def _entries(self, made: _Made, new_vars: list[Var], fresh: dict[Var, Var]) -> list[tuple[Axis, Var, str]]:
        """The new axes where the first of the old ones stood, and the other axes as they were."""
        dimension = {name: d for d, group in made.rule.axis_map.items() for name in group}
        letters = [self.kinds[self.old_vars[dimension[a.name]]] for a in made.rule.buffer.axes]
        pieces = _parents_first(list(zip(made.spliced.axes, new_vars, letters, strict=True)))
        out: list[tuple[Axis, Var, str]] = []
        for axis, var in zip(self.it.axes, self.it.vars, strict=True):
            if axis not in self.rewriter.axes:
                out.append((axis, fresh[var], self.kinds[var]))
            elif pieces:
                out += pieces
                pieces = []
        return out

    def _rewritten(self, node: Any, made: _Made, new_vars: list[Var], mapping: dict[Var, ir.Expr]) -> Any:
        """`node` in terms of one piece."""

        def place(buffer: Var, indices: Any, mutator: Any) -> list[ir.Expr]:
            if not self._is_own(buffer, indices):
                name = self.views[buffer].name
                raise self._refusal(f"reads {name} elsewhere than where it stands, which is a search in every piece")
            axes = self.views[buffer].axes
            first = min(axes.index(a) for a in self.rewriter.axes)
            rest = [(n, mutator.mutate(i)) for n, (a, i) in enumerate(zip(axes, indices, strict=True))
                    if a not in self.rewriter.axes]  # fmt: skip
            return [*(i for n, i in rest if n < first), *new_vars, *(i for n, i in rest if n > first)]

        def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
            if load.source not in self.views:
                return mutator.default_mutate(load)
            return tirx.BufferLoad(made.buffers[load.source].view, place(load.source, load.indices, mutator))

        def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
            if store.buffer not in self.views:
                return mutator.default_mutate(store)
            value = mutator.mutate(store.value)
            return tirx.BufferStore(made.buffers[store.buffer].view, value, place(store.buffer, store.indices, mutator))

        on_var = lambda v, _mutator: mapping.get(v, v)  # noqa: E731
        callbacks = [(ir.TensorLoad, on_load), (tirx.BufferStore, on_store), (Var, on_var)]
        return tvm_ffi.structural_mutate(node, callbacks)


def _parents_first(items: list[tuple[Axis, Var, str]]) -> list[tuple[Axis, Var, str]]:
    """The same axes, each behind those it hangs from, otherwise in order."""
    out: list[tuple[Axis, Var, str]] = []
    left = list(items)
    while left:
        waiting = {axis for axis, _, _ in left}
        ready = next(item for item in left if not set(item[0].ancestors) & waiting)
        left.remove(ready)
        out.append(ready)
    return out


# ---------------------------------------------------------------------------------------------- nodes


def _replace(node: Any, mapping: Mapping[Var, Any]) -> Any:
    return tvm_ffi.structural_mutate(node, [(Var, lambda v, _mutator: mapping.get(v, v))])


def _make_iteration(
    name: str,
    entries: Sequence[tuple[Axis, Var, str]],
    body: tirx.Stmt,
    init: tirx.Stmt | None,
    notes: Mapping[str, Any],
    like: s_tir.SBlock | None = None,
) -> tirx.Stmt:
    """A sparse iteration over single axes."""
    iter_vars = [
        tirx.IterVar(ir.Range(const(0, a.idtype), cast(a.length, a.idtype)), v, SPATIAL if k == "S" else REDUCE)
        for a, v, k in entries
    ]
    values = [op.call("coord", [a.var, 0], a.idtype) for a, _, _ in entries]
    allocated = [] if like is None else list(like.alloc_buffers)
    annotations = {**notes, SPARSE_ITER: "".join(k for _, _, k in entries)}
    block = s_tir.SBlock(iter_vars, [], [], name, body, init, allocated, annotations=annotations)
    return s_tir.SBlockRealize(values, tirx.const(True, "bool"), block)


def _declares(stmt: tirx.Stmt, dropped: set[Var]) -> bool:
    """Whether a statement makes one of the buffers."""
    if isinstance(stmt, (tirx.DeclBuffer, tirx.AllocBuffer)):
        return stmt.buffer in dropped
    bound = isinstance(stmt, tirx.Evaluate) and op.is_call(stmt.value, "bind_axes")
    return bound and stmt.value.args[0] in dropped


def _insert(body: tirx.Stmt, statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """`statements` at the start of the root block."""
    root = body.block
    old = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    block = s_tir.SBlock(
        [], [], [], root.name_hint, seq(*statements, *old), None, root.alloc_buffers, annotations=root.annotations
    )
    return s_tir.SBlockRealize([], tirx.const(True, "bool"), block)


def _without_unused(func: tirx.PrimFunc, body: tirx.Stmt, params: Sequence[Var]) -> tirx.PrimFunc:
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
    tvm_ffi.structural_walk(body, (Var, lambda v: uses.update({v: uses.get(v, 0) + 1})))
    binds = [b for b in collect(body, tirx.Bind) if op.is_call(b.value, *op.AXIS_NAMES)]
    return [b.var for b in binds if uses.get(b.var, 0) <= 1]


def _without_bindings(body: tirx.Stmt, dead: list[Var]) -> tirx.Stmt:
    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*(mutator.mutate(s) for s in node.seq if not (isinstance(s, tirx.Bind) and s.var in dead)))

    return tvm_ffi.structural_mutate(body, [(tirx.SeqStmt, on_seq)])


def _with_sizes(func: tirx.PrimFunc, sizes: dict[Var, ir.Expr]) -> tirx.PrimFunc:
    """The function with size parameters replaced by formulas of others."""
    if not sizes:
        return func
    params = [p for p in func.params if p not in sizes]
    replaced: dict[Var, Any] = dict(sizes)
    for param in [p for p in params if tirx.is_buffer_var(p) and any(mentions(e, list(sizes)) for e in p.ty.shape)]:
        shape = [_replace(e, sizes) for e in param.ty.shape]
        options = {"layout": None, "data_alignment": int(param.ty.data_alignment)}
        replaced[param] = tirx.decl_buffer(shape, str(param.ty.dtype), str(param.name), **options)
    views = {}
    for decl in collect(func.body, tirx.DeclBuffer):
        shape = [_replace(e, sizes) for e in decl.buffer.ty.shape]
        options = {"layout": None, "data_alignment": int(decl.buffer.ty.data_alignment)}
        views[decl.buffer] = tirx.decl_buffer(shape, str(decl.buffer.ty.dtype), str(decl.buffer.name), **options)
    body = tvm_ffi.structural_map(
        func.body, with_def_region_kind=(Var, lambda v, _: views.get(v, replaced.get(v, v)))
    )
    return tirx.PrimFunc([replaced.get(p, p) for p in params], body, func.ret_type, func.attrs)


def _used(body: tirx.Stmt, params: Sequence[Var]) -> set[Var]:
    """Parameters that occur in the body or in the shape of one that does."""
    used: set[Var] = set()
    tvm_ffi.structural_walk(body, (Var, used.add))
    known = [p for p in params if p in used]
    for param in known:
        if tirx.is_buffer_var(param):
            for extent in param.ty.shape:
                tvm_ffi.structural_walk(extent, (Var, used.add))
    return used


def _names(func: tirx.PrimFunc) -> set[str]:
    """Every name in the function."""
    found: set[str] = set()
    tvm_ffi.structural_walk(func, (Var, lambda v: found.add(str(v.name))))
    return found | {str(p.name) for p in func.params}


def _is_written_first(program: Program, buffer: SparseBuffer) -> bool:
    from sparsetir.effects import analyse

    effects = analyse(program)
    return buffer.allocated or str(buffer.storage.name) in effects.outputs


# ---------------------------------------------------------------------------------------------- entry


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A program over other formats, and how its parameters come from those of the original.

    ``func`` is an ordinary stage-I function. ``formats`` are what was asked for, ``groups`` what became of it;
    ``steps`` has one item for each structure that was rewritten, in order.
    """

    original: tirx.PrimFunc
    func: tirx.PrimFunc
    formats: dict[str, Any]
    groups: tuple[Group, ...]

    @cached_property
    def exact(self) -> Decomposition | None:
        """The same for tensors whose shape the blocks divide, without guards; None where nothing sticks out."""
        if not any(piece.rule.fills and piece.rule.inverse is not None for g in self.groups for piece in g.pieces):
            return None
        found = decompose_format(self.original, self.formats, exact=True)
        return None if tvm_ffi.structural_equal(found.func, self.func) else found

    def with_formats(self, formats: Any) -> dict[str, Any]:
        """The formats of the original's buffers when more are given, some for pieces by their buffers' names."""
        if not isinstance(formats, Mapping):
            raise VerifyError("say which buffer of the decomposed program to decompose: {'A_rest': format}")
        pieces = {n: (g.name, p.rule.name) for g in self.groups for p in g.pieces for n in p.buffers.values()}
        found = dict(self.formats)
        for name, format in formats.items():
            if name in pieces:
                buffer, piece = pieces[name]
                found[buffer] = self._nested(buffer, piece, format)
            elif name in found:
                raise VerifyError(f"{name} is decomposed already; its pieces are {', '.join(pieces)}", name)
            else:
                found[name] = format
        return found

    def _nested(self, buffer: str, piece: str, format: Any) -> Any:
        from sparsetir.formats.nested import Nested

        base = self.formats[buffer]
        if isinstance(base, Nested) and piece not in base.inner:
            return Nested(base.base, {**base.inner, piece: format})
        return Nested(base, {piece: format})


def _resolved(format: Any, axes: Sequence[Axis]) -> Any:
    """A format that knows how many dimensions it stores and how wide its indices are."""
    if not hasattr(format, "resolve"):
        return format
    wide = any(axis.idtype == "int64" for axis in axes)
    return format.resolve(len(axes), format.idtype or ("int64" if wide else "int32"))


def _rules(format: Any) -> list[FormatRewriteRule]:
    if isinstance(format, FormatRewriteRule):
        return [format]
    return list(format.rules) if hasattr(format, "rules") else list(format)


def decompose_format(func: Any, formats: Mapping[str, Any] | Any, *, exact: bool = False) -> Decomposition:
    """Rewrite a program so that sparse buffers are stored in other formats.

    Parameters
    ----------
    func : PrimFunc or Decomposition
        At stage I.
    formats : mapping of str to Format, FormatRewriteRule or list of FormatRewriteRule
        For each buffer by name; every buffer over the same axes is stored alike. A single format stands for the
        program's first sparse buffer. The pieces of a decomposed buffer are buffers like any other: decompose them
        again by name (``A_rest``).
    exact : bool
        Write the program for tensors whose shape the format's blocks divide: it needs no guards at the edges.

    Returns
    -------
    Decomposition
        ``sparsetir.build`` makes a kernel of it that is called like the original.

    Raises
    ------
    VerifyError
        When an iteration uses the buffer in a way that has no counterpart in pieces; the message says which.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir import formats
    >>> parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(4, 4)})
    >>> [str(p.name) for p in parts.func.params][:3]
    ['b', 'c', 'm']

    Notes
    -----
    Composable formats are those of SparseTIR (Ye et al., ASPLOS 2023).
    """
    if isinstance(func, Decomposition):
        return decompose_format(func.original, func.with_formats(formats), exact=exact)
    current, groups = func, []
    wanted = dict(formats) if isinstance(formats, Mapping) else {_first_sparse(func): formats}
    for name, format in wanted.items():
        program = decode(current)
        wanted[name] = format = _resolved(format, program.buffer(name).axes)
        rewriter = Rewriter(program, name, _rules(format), exact=exact)
        with own_errors():
            current = rewriter.function()
        groups.append(rewriter.record(current))
    return Decomposition(func, current, wanted, tuple(groups))


def _first_sparse(func: tirx.PrimFunc) -> str:
    found = [b.name for b in decode(func).buffers.values() if not b.is_dense and not b.allocated]
    if not found:
        raise VerifyError("the program has no sparse buffer to decompose")
    return found[0]


__all__ = ["Decomposition", "Group", "Piece", "decompose_format"]
