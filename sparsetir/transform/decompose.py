# SPDX-License-Identifier: Apache-2.0
"""Format decomposition: rewrite a program over the pieces of other formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Var

from sparsetir.errors import VerifyError, own_errors
from sparsetir.formats.base import FormatRewriteRule
from sparsetir.ir.rewriting import collect, conjunction, mentions, renewed, seq
from sparsetir.ir.views import (
    INDEPENDENT,
    INIT,
    STORED,
    SWEEP,
    Axis,
    Entry,
    Program,
    SpIter,
    accesses,
    cast,
    const,
    decode,
    is_sp_iter,
    label,
)
from sparsetir.ir.visitor import structural_mutate
from sparsetir.transform.editing import make_iteration, notes_of
from sparsetir.transform.legality import EntryOrder, LinearUse, is_neutral, multiplies, zero_after
from sparsetir.transform.structure import (
    MASK_DTYPE,
    BufferStructure,
    NewPiece,
    declares,
    replaced_vars,
    with_declarations,
    without_unused,
)
from sparsetir.utils.arguments import as_flag, as_mapping, renamed_parameters, shown

# The iterations that one iteration becomes when a structure is stored in pieces.


class Pieces:
    """The iterations that one iteration becomes."""

    def __init__(self, structure: BufferStructure, it: SpIter) -> None:
        self.structure, self.it = structure, it
        axis_var = dict(zip(it.axes, it.vars, strict=True))
        self.old_vars = [axis_var[a] for a in structure.axes]
        self.kinds = {v: k for v, k in zip(it.vars, it.kinds, strict=True)}
        self.views = {b.view: b for b in structure.group}
        self.order = EntryOrder(structure.facts, it, self.old_vars)
        self.own_init, self.shared_init = self._split_init()

    def statement(self) -> tirx.Stmt:
        """Return the sequence of all iterations, the shared initialisation first."""
        is_own = self._is_own
        parts = [p for p in (self.it.block.init, self.it.block.body) if p is not None]
        clean = set(self.structure.padded)
        fault = self.order.fault() or (self._zero_fault() if self.structure.is_dense else "")
        if fault:
            raise self._refusal(fault)
        linear = LinearUse(set(self.views), is_own, local=set(self.it.block.alloc_buffers))
        if not linear.holds(*self.own_init, self.it.block.body):
            self.structure.keep_repeated()
        neutral = is_neutral(self.it.block.body, set(self.views), clean, is_own)
        zero = zero_after(parts, set(self.views), clean, is_own)
        for view in self.views:
            if any(s.buffer.same_as(view) for p in parts for s in collect(p, tirx.BufferStore)):
                self.structure.set_clean(view, neutral and view in zero)
        initialising = self._initialising() if self._inits_rows() else []
        first = [] if initialising or not self.shared_init else self._init_iterations()
        pieces = [self._piece(piece, neutral, piece in initialising) for piece in self.structure.made]
        return seq(*first, *pieces)

    def _refusal(self, fault: str) -> VerifyError:
        message = f"cannot decompose {self.structure.name}: iteration {self.it.name} {fault}"
        return VerifyError(message, self.it.name)

    def _zero_fault(self) -> str:
        """Return why points where a dense buffer holds zero may not be omitted; empty if they may."""
        name, body = self.structure.name, self.it.block.body
        if any(s.buffer in self.views for part in (self.it.block.init, body) for s in _stores(part)):
            return f"stores to {name}, of which only entries that are not zero are kept"
        if not is_neutral(body, set(), set(self.views), self._is_own):
            return f"does something where {name} is zero, which is left out; only sums of its multiples may be"
        return ""

    # ------------------------------------------------------------------ initialisation

    def _split_init(self) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        """Return the initial stores to the rewritten buffers, and all others."""
        init = self.it.block.init
        stmts = [] if init is None else list(init.seq) if isinstance(init, tirx.SeqStmt) else [init]
        own_stores = [s for s in stmts if isinstance(s, tirx.BufferStore) and s.buffer in self.views]
        shared_inits = [s for s in stmts if s not in own_stores]
        if any(s.buffer in self.views for part in shared_inits for s in collect(part, tirx.BufferStore)):
            raise self._refusal("has an initialisation that is not a list of stores")
        return own_stores, shared_inits

    def _initialising(self) -> list[NewPiece]:
        """Return the pieces that initialise their results: all if each has rows of its own, or the first for all."""
        pieces = self.structure.made
        if all(piece.rule.partitions_rows and self._rows_first(piece) for piece in pieces):
            return pieces
        return pieces[:1] if pieces[0].rule.meets_rows and self._rows_first(pieces[0]) else []

    def _inits_rows(self) -> bool:
        """Return whether each row can initialise the elements that it reduces to, at its stored points.

        That reaches all that ``T.init`` sets if there is a point for every coordinate of the other axes that it names,
        stored or not: only dense ones have it. And nothing is set too late if no other row touches it.
        """
        if not self.shared_init or self.own_init:
            return False
        row, *other_vars = self.old_vars
        if any(self.kinds[v] == "S" for v in other_vars) or self.kinds[row] != "S":
            return False
        pairs = zip(self.it.axes, self.it.vars, strict=True)
        spatial = [(a, v) for a, v in pairs if v not in self.old_vars and self.kinds[v] == "S"]
        if any(a.kind != "dense_fixed" or not mentions(self.shared_init, [v]) for a, v in spatial):
            return False
        return self.order.keeps_apart(self.shared_init, row)

    def _rows_first(self, piece: NewPiece) -> bool:
        """Return whether the points of every spatial axis exist independently of those of a reduced axis."""
        letter = dict(zip(piece.spliced.axes, self._letters(piece), strict=True))
        below = [
            (a, ancestor) for a in letter if letter[a] == "S" for ancestor in a.ancestors if letter.get(ancestor) == "R"
        ]
        return all(a.repeats_below(ancestor) for a, ancestor in below)

    def _letters(self, piece: NewPiece) -> list[str]:
        """Return S or R for each axis of the piece: the kind of the dimension that it represents."""
        dimension = {name: d for d, group in piece.rule.axis_map.items() for name in group}
        return [self.kinds[self.old_vars[dimension[a.name]]] for a in piece.rule.buffer.axes]

    def _init_iterations(self) -> list[tirx.Stmt]:
        """Return iterations over every spatial coordinate that the shared initial stores use.

        A store to a structure that repeats coordinates visits its slots: a search reaches one slot of several.
        """
        repeating = {stmt: self._repeated_axes(stmt) for stmt in self.shared_init}
        once = [stmt for stmt in self.shared_init if not repeating[stmt]]
        first = [self._init_iteration(seq(*once), set())] if once else []
        return first + [self._init_iteration(stmt, axes) for stmt, axes in repeating.items() if axes]

    def _init_iteration(self, init: tirx.Stmt, visited: set[Axis]) -> tirx.Stmt:
        """Return an iteration of initial stores: over stored slots of visited axes, all coordinates of the others."""
        used = [(a, v) for a, v in zip(self.it.axes, self.it.vars, strict=True) if mentions(init, [v])]
        used = [(a, v) for a, v in used if self.kinds[v] == "S"]
        if not used:
            return init
        fresh = {v: Var(str(v.name), v.ty) for _, v in used}
        entries = [Entry((a if a in visited else self.structure.dense(a),), (fresh[v],), "S") for a, v in used]
        return make_iteration(f"{self.it.name}_init", _parents_first(entries), replaced_vars(init, fresh))

    def _repeated_axes(self, stmt: tirx.Stmt) -> set[Axis]:
        """Return the axes that repeat coordinates where `stmt` stores, and those above; empty if none does."""
        axis_of = dict(zip(self.it.vars, self.it.axes, strict=True))
        repeated: set[Axis] = set()
        for store in _stores(stmt):
            buffer = self.structure.program.buffers.get(store.buffer)
            if buffer is None:
                continue
            repeating = [a for a in buffer.axes if not a.unique]
            needed = {ancestor for a in repeating for ancestor in (a, *a.ancestors)}
            subscripted = (
                {a for a, i in zip(buffer.axes, store.indices, strict=True) if axis_of.get(i) is a}
                if repeating
                else set()
            )
            if not needed <= subscripted - set(self.structure.axes) or (
                repeating and not isinstance(stmt, tirx.BufferStore)
            ):
                names = f"{buffer.name} over axis {repeating[0].name}"
                raise self._refusal(
                    f"initialises {names}, which repeats coordinates, at other coordinates than its own"
                )
            repeated |= needed
        return repeated

    # ------------------------------------------------------------------ pieces

    def _is_own(self, buffer: Var, indices: Any) -> bool:
        """Return whether a subscript list names the slot at which the iteration stands."""
        axes = self.views[buffer].axes
        return all(indices[axes.index(a)].same_as(v) for a, v in zip(self.structure.axes, self.old_vars, strict=True))

    def _piece(self, piece: NewPiece, neutral: bool, initialises: bool) -> tirx.Stmt:
        new_vars = [Var(str(a.name).lower(), ir.PrimType(a.idtype)) for a in piece.spliced.axes]
        olds = piece.rule.old_coords(new_vars)
        mapping: dict[Var, ir.Expr] = {v: cast(e, str(v.ty.dtype)) for v, e in zip(self.old_vars, olds, strict=True)}
        other_pairs = [(a, v) for a, v in zip(self.it.axes, self.it.vars, strict=True) if a not in self.structure.axes]
        fresh = {v: Var(str(v.name), v.ty) for _, v in other_pairs}
        mapping.update(fresh)
        body = renewed(self._rewritten(self.it.block.body, piece, new_vars, mapping))
        inside = self._inside(piece, mapping)
        body = tirx.IfThenElse(conjunction(inside), body, None) if inside else body
        is_masked = piece.rule.fills and not neutral
        if piece.rule.fills and neutral and multiplies(self.it.block.body, set(self.views)):
            is_masked = not self.structure.assume_finite
            if not is_masked:
                self.structure.multiply_zeros()
        if is_masked:
            mask = self.structure.mask(piece)
            valid = tirx.NE(tirx.BufferLoad(mask.view, list(new_vars)), const(0, MASK_DTYPE))
            body = tirx.IfThenElse(valid, body, None)
        stmts = [*self.own_init, *(self.shared_init if initialises else [])]
        init = self._rewritten(seq(*stmts), piece, new_vars, mapping) if stmts else None
        notes = notes_of(self.it)
        if initialises:
            notes[INIT] = STORED
        if piece.rule.independent and self._rows_are_apart(piece):
            notes[INDEPENDENT] = 1
        if piece.rule.sweep is not None:
            notes[SWEEP] = piece.rule.sweep
        entries = self._entries(piece, new_vars, fresh)
        name, allocated = f"{self.it.name}_{piece.rule.name}", list(self.it.block.alloc_buffers)
        return make_iteration(name, entries, body, init=init, notes=notes, allocated=allocated)

    def _inside(self, piece: NewPiece, mapping: dict[Var, ir.Expr]) -> list[ir.Expr]:
        """Return the bounds of coordinates that subscript an ordinary array, where a piece may exceed them."""
        views = {b.view for b in self.structure.program.buffers.values()}
        subscripts = [i for b, indices, _ in accesses(self.it.block) if b not in views for i in indices]
        bounds: list[ir.Expr] = []
        for var, axis in zip(self.old_vars, self.structure.axes, strict=True):
            coord = mapping[var]
            same_axes = [new for new in piece.spliced.axes if new.name.lower() == str(getattr(coord, "name", ""))]
            may_leave = not same_axes or same_axes[0].may_be_absent
            if may_leave and mentions(subscripts, [var]):
                dtype = str(coord.ty.dtype)
                bounds += [coord >= const(0, dtype), coord < cast(axis.length, dtype)]
        return bounds

    def _rows_are_apart(self, piece: NewPiece) -> bool:
        """Return whether every store of the iteration is at its own row or its own slot."""
        row = self.old_vars[0]
        stores = collect(self.it.block.body, tirx.BufferStore)
        return self.kinds[row] == "S" and all(
            any(i.same_as(row) for i in s.indices) or (s.buffer in self.views and self._is_own(s.buffer, s.indices))
            for s in stores
        )

    def _entries(self, piece: NewPiece, new_vars: list[Var], fresh: dict[Var, Var]) -> list[Entry]:
        """Return the new axes at the place of the first old one, and the other axes unchanged."""
        letters = self._letters(piece)
        triples = zip(piece.spliced.axes, new_vars, letters, strict=True)
        pieces = _parents_first([Entry((a,), (v,), k) for a, v, k in triples])
        out: list[Entry] = []
        for axis, var in zip(self.it.axes, self.it.vars, strict=True):
            if axis not in self.structure.axes:
                out.append(Entry((axis,), (fresh[var],), self.kinds[var]))
            elif pieces:
                out += pieces
                pieces = []
        return out

    def _rewritten(self, node: Any, piece: NewPiece, new_vars: list[Var], mapping: dict[Var, ir.Expr]) -> Any:
        """Rewrite `node` in terms of one piece."""

        def place(buffer: Var, indices: Any, mutator: Any) -> list[ir.Expr]:
            if not self._is_own(buffer, indices):
                name = self.views[buffer].name
                raise self._refusal(f"reads {name} at other coordinates than its own, which is a search in every piece")
            axes = self.views[buffer].axes
            first = min(axes.index(a) for a in self.structure.axes)
            others = [(n, mutator.mutate(i)) for n, (a, i) in enumerate(zip(axes, indices, strict=True))
                    if a not in self.structure.axes]  # fmt: skip
            return [*(i for n, i in others if n < first), *new_vars, *(i for n, i in others if n > first)]

        def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
            if load.source not in self.views:
                return mutator.default_mutate(load)
            return tirx.BufferLoad(piece.buffers[load.source].view, place(load.source, load.indices, mutator))

        def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
            if store.buffer not in self.views:
                return mutator.default_mutate(store)
            value = mutator.mutate(store.value)
            return tirx.BufferStore(
                piece.buffers[store.buffer].view, value, place(store.buffer, store.indices, mutator)
            )

        on_var = lambda v, _mutator: mapping.get(v, v)  # noqa: E731
        callbacks = [(ir.TensorLoad, on_load), (tirx.BufferStore, on_store), (Var, on_var)]
        return structural_mutate(node, callbacks)


def _stores(part: tirx.Stmt | None) -> list[tirx.BufferStore]:
    return [] if part is None else collect(part, tirx.BufferStore)


def _parents_first(entries: list[Entry]) -> list[Entry]:
    """Return the entries in order, each after the entries of its ancestors."""
    out: list[Entry] = []
    remaining = list(entries)
    while remaining:
        remaining_axes = {a for e in remaining for a in e.axes}
        ready = next(e for e in remaining if not set(e.axes[0].ancestors) & remaining_axes)
        remaining.remove(ready)
        out.append(ready)
    return out


# Rewrite a program over other formats of its sparse buffers: one iteration becomes one for each piece.
#
# before::
#
#     with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
#         with T.init():
#             C[i, k] = 0
#         C[i, k] = C[i, k] + A[i, j] * B[j, k]
#
# after, with A stored as 4 x 4 blocks and a rest::
#
#     with T.sp_iter([I, K], "SS", "spmm_init") as [i, k]:
#         C[i, k] = 0
#     with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm_blocks") as [io, jo, ii, ji, k]:
#         C[io * 4 + ii, k] = C[io * 4 + ii, k] + A_blocks[io, jo, ii, ji] * B[jo * 4 + ji, k]
#     with T.sp_iter([I_rest, J_rest, K], "SRS", "spmm_rest") as [i, j, k]:
#         C[i, k] = C[i, k] + A_rest[i, j] * B[j, k]
#
# Every buffer over the same axes is stored in the same pieces. What is initialised once in the program is initialised
# once here. Slots that a format adds between the entries are left out where they would change the result.


@dataclass(frozen=True, eq=False)
class DecomposedPiece:
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
    """The buffers that share one structure, named by the one that was asked for, and the pieces they became.

    ``multiplies_zeros`` tells whether zeros between the entries are multiplied with other operands' numbers,
    ``adds_up`` whether entries with the same coordinates may be added up before the program runs: it takes no such
    entries, or computes the same with their sum.
    """

    name: str
    buffers: tuple[str, ...]
    axes: tuple[Axis, ...]
    pieces: tuple[DecomposedPiece, ...]
    multiplies_zeros: bool = False
    adds_up: bool = True


class StructureRewriter:
    """Rewriter of one structure of a program."""

    def __init__(
        self, program: Program, name: str, rules: Sequence[FormatRewriteRule], *, assume_finite: bool = True
    ) -> None:
        self.program = program
        self.structure = BufferStructure(program, name, rules, assume_finite=assume_finite)

    # ------------------------------------------------------------------ the function

    def function(self) -> tirx.PrimFunc:
        """Return the new function."""
        dropped = {b.view for b in self.structure.group} | {b.storage for b in self.structure.group}

        def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
            return seq(*(new for s in node.seq for new in self._statements(s, dropped, mutator)))

        def on_realize(node: s_tir.SBlockRealize, mutator: Any) -> tirx.Stmt:
            if not is_sp_iter(node):
                return mutator.default_mutate(node)
            iteration = next((it for it in self.program.iterations if it.node.same_as(node)), None)
            return self.iteration(iteration) if iteration is not None else node

        body = structural_mutate(self.program.func.body, [(tirx.SeqStmt, on_seq), (s_tir.SBlockRealize, on_realize)])
        remaining = [v for v in dropped if mentions(body, [v])]
        if remaining:
            fault = f"{remaining[0].name} is used outside of an iteration over its axes"
            raise VerifyError(f"cannot decompose {self.structure.name}: {fault}, which is a search in every piece")
        fresh = [s for piece in self.structure.made for s in (*piece.statements, *piece.mask_statements)]
        body = with_declarations(body, fresh)
        return without_unused(self.program.func, body, self._params())

    def _statements(self, stmt: tirx.Stmt, dropped: set[Var], mutator: Any) -> list[tirx.Stmt]:
        """Rewrite a statement; the declaration of a buffer becomes those of its pieces."""
        if not declares(stmt, dropped):
            return [mutator.mutate(stmt)]
        bound = stmt.value.args[0] if isinstance(stmt, tirx.Evaluate) else None
        return [] if bound is None else [s for piece in self.structure.made for s in piece.declarations[bound]]

    def _params(self) -> list[Var]:
        out: list[Var] = list(self.program.func.params)
        for piece in self.structure.made:
            out += [b.storage for b in piece.buffers.values() if not b.allocated]
            out += list(piece.spliced.params.values())
            out += [piece.mask.storage] if piece.mask is not None else []
        return out

    def record(self, func: tirx.PrimFunc) -> Group:
        """Return the parameters and buffers of the pieces, which the caller needs to fill the new parameters."""
        param_names = {str(p.name) for p in func.params}
        pieces = []
        for piece in self.structure.made:
            params = {name: str(var.name) for name, var in piece.spliced.params.items() if str(var.name) in param_names}
            values = {
                str(self.program.buffers[view].storage.name): str(b.storage.name)
                for view, b in piece.buffers.items()
                if str(b.storage.name) in param_names
            }
            mask = None if piece.mask is None else str(piece.mask.storage.name)
            buffers = {self.program.buffers[view].name: b.name for view, b in piece.buffers.items()}
            pieces.append(DecomposedPiece(piece.rule, params, values, buffers, mask))
        names, axes = tuple(b.name for b in self.structure.group), self.structure.axes
        adds_up = self.structure.adds_up or all(a.unique for a in axes)
        return Group(self.structure.name, names, axes, tuple(pieces), self.structure.multiplies_zeros, adds_up)

    # ------------------------------------------------------------------ one iteration

    def iteration(self, it: SpIter) -> tirx.Stmt:
        """Rewrite one iteration for the pieces."""
        views = {b.view for b in self.structure.group}
        accessed = {b for b, _, _ in accesses(it.block)} & views
        walked = [a for a in self.structure.axes if a in it.listed and a.kind != "dense_fixed"]
        if not accessed and not walked:
            return it.node
        for entry in (e for e in it.entries if e.merge or e.axes[-1].is_assembled):
            fault = f"walks {label(entry)}, whose members have no order over several pieces"
            how = "store this buffer as it is"
            raise VerifyError(f"cannot decompose {self.structure.name}: iteration {it.name} {fault}; {how}", it.name)
        missing = [a.name for a in self.structure.axes if a not in it.axes]
        if missing or any(e.attached_to for e in it.entries if set(e.axes) & set(self.structure.axes)):
            fault = f"does not iterate axis {missing[0]}" if missing else "attaches an axis of it to another"
            reason = "its elements would have to be looked up in every piece"
            raise VerifyError(f"cannot decompose {self.structure.name}: iteration {it.name} {fault}, {reason}", it.name)
        self._check_others(it)
        return Pieces(self.structure, it).statement()

    def _check_others(self, it: SpIter) -> None:
        """Raise if an axis of the iteration descends from a replaced one or is attached to one."""
        attached = [e for e in it.entries if e.attached_to in self.structure.axes]
        if attached:
            fault = f"attaches {attached[0].axes[0].name} to an axis of it"
            raise VerifyError(f"cannot decompose {self.structure.name}: iteration {it.name} {fault}", it.name)
        for axis in it.axes:
            below = [a for a in axis.ancestors if a in self.structure.axes]
            if axis not in self.structure.axes and below:
                fault = f"iterates {axis.name} below {below[-1].name}"
                raise VerifyError(
                    f"cannot decompose {self.structure.name}: iteration {it.name} {fault}, which the new axes replace",
                    it.name,
                )


@renamed_parameters(finite="assume_finite")
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
    assume_finite: bool = True

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name} as {format!r}" for name, format in self.formats.items())
        name = self.original.attrs["global_symbol"]
        return f"# {name} with {chosen or ', '.join(g.name for g in self.groups)}\n{self.func!r}"

    @property
    def multiplies_zeros(self) -> bool:
        """Whether padding zeros are multiplied: an infinity or a NaN then reaches results that do not use it.

        Examples
        --------
        >>> import sparsetir
        >>> from sparsetir import formats
        >>> spmm = sparsetir.ops.spmm()
        >>> [sparsetir.decompose_format(spmm, {"A": f}).multiplies_zeros for f in (formats.bsr(4, 4), formats.ell())]
        [True, False]
        """
        return any(group.multiplies_zeros for group in self.groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.original, self.formats, self.assume_finite)

    def with_formats(self, formats: Any) -> dict[str, Any]:
        """Add `formats` to those of the original's buffers; a key may be the buffer name of a piece."""
        if not isinstance(formats, Mapping):
            raise VerifyError("say which buffer of the decomposed program to decompose: {'A_rest': format}")
        pieces = {n: (g.name, p.rule.name) for g in self.groups for p in g.pieces for n in p.buffers.values()}
        merged = dict(self.formats)
        for name, format in formats.items():
            if name in pieces:
                buffer, piece = pieces[name]
                merged[buffer] = self._nested(buffer, piece, format)
            elif name in merged:
                raise VerifyError(f"{name} is decomposed already; its pieces are {', '.join(pieces)}", name)
            else:
                merged[name] = format
        return merged

    def _nested(self, buffer: str, piece: str, format: Any) -> Any:
        from sparsetir.formats.partitioned import Nested

        base = self.formats[buffer]
        if isinstance(base, Nested) and piece not in base.inner:
            return Nested(base.base, {**base.inner, piece: format})
        return Nested(base, {piece: format})


def _resolved(format: Any, axes: Sequence[Axis]) -> Any:
    """Resolve the number of dimensions and the index width of a format."""
    if not hasattr(format, "resolve"):
        return format
    wide = any(axis.idtype == "int64" for axis in axes)
    return format.resolve(len(axes), format.idtype or ("int64" if wide else "int32"))


def _rules(format: Any, name: str) -> list[FormatRewriteRule]:
    """Return the rules of a format or a list; a bare list does not promise that each rule has its own rows."""
    rules = [format] if isinstance(format, FormatRewriteRule) else getattr(format, "rules", format)
    if not isinstance(rules, (list, tuple)) or not all(isinstance(r, FormatRewriteRule) for r in rules):
        hint = f"formats.make({format!r}, ...)" if isinstance(format, str) else "one of sparsetir.formats"
        raise VerifyError(f"{name} must have a format or a list of rules, got {shown(format)}; try {hint}", name)
    is_bare = rules is format and len(rules) > 1
    return [replace(rule, partitions_rows=False) if is_bare else rule for rule in rules]


@renamed_parameters(finite="assume_finite")
def decompose_format(
    func: Any, formats: Mapping[str, Any] | Any, *, assume_finite: bool | None = None
) -> Decomposition:
    """Rewrite a program so that sparse buffers are stored in other formats.

    Parameters
    ----------
    func : PrimFunc or Decomposition
        At stage I.
    formats : mapping of str to Format, FormatRewriteRule or list of FormatRewriteRule
        For each buffer by name; every buffer over the same axes is stored alike. A single format stands for the
        program's first sparse buffer. The pieces of a decomposed buffer are buffers like any other: decompose them
        again by name (``A_rest``).
    assume_finite : bool, optional
        Whether the dense operands are taken to hold neither infinities nor NaNs: zeros that a format stores between the
        entries, as in blocks, are then multiplied like entries. False leaves them out one by one, which is slow. True
        by default, or as it was for a decomposition that is decomposed again.

    Returns
    -------
    Decomposition
        ``sparsetir.build`` compiles it to a kernel with the signature of the original.

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
        assume_finite = func.assume_finite if assume_finite is None else assume_finite
        return decompose_format(func.original, func.with_formats(formats), assume_finite=assume_finite)
    current, groups = func, []
    assume_finite = None if assume_finite is None else as_flag(assume_finite, "assume_finite")
    expected = "formats by the names of buffers"
    is_mapping = isinstance(formats, Mapping)
    resolved = as_mapping(formats, "formats", expected) if is_mapping else {_first_sparse(func): formats}
    for name, format in resolved.items():
        program = decode(current)
        resolved[name] = format = _resolved(format, program.buffer(name).axes)
        rewriter = StructureRewriter(program, name, _rules(format, name), assume_finite=assume_finite is not False)
        with own_errors():
            current = rewriter.function()
        groups.append(rewriter.record(current))
    return Decomposition(func, current, resolved, tuple(groups), assume_finite is not False)


def _again(func: Any, formats: Mapping[str, Any], assume_finite: bool) -> Decomposition:
    """Rebuild a decomposition from its pickled state: the formulas of formats have no names."""
    return decompose_format(func, formats, assume_finite=assume_finite)


def _first_sparse(func: tirx.PrimFunc) -> str:
    names = [b.name for b in decode(func).buffers.values() if not b.is_dense and not b.allocated]
    if not names:
        raise VerifyError("the program has no sparse buffer to decompose")
    return names[0]


__all__ = ["DecomposedPiece", "Decomposition", "Group", "Pieces", "decompose_format"]
