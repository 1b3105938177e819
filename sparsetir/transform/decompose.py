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
from sparsetir.transform.legality import EntryOrder, Linear, is_neutral, multiplies, still_clean
from sparsetir.transform.structure import (
    MASK_DTYPE,
    Made,
    Structure,
    declares,
    replaced_vars,
    with_declarations,
    without_unused,
)

# The iterations that one iteration becomes when a structure is stored in pieces.


class Pieces:
    """The iterations that one iteration becomes."""

    def __init__(self, structure: Structure, it: SpIter) -> None:
        self.structure, self.it = structure, it
        axis_var = dict(zip(it.axes, it.vars, strict=True))
        self.old_vars = [axis_var[a] for a in structure.axes]
        self.kinds = {v: k for v, k in zip(it.vars, it.kinds, strict=True)}
        self.views = {b.view: b for b in structure.group}
        self.order = EntryOrder(structure.facts, it, self.old_vars)
        self.own_init, self.shared_init = self._split_init()

    def statement(self) -> tirx.Stmt:
        """All of them, the common initialisation first."""
        own = self._is_own
        parts = [p for p in (self.it.block.init, self.it.block.body) if p is not None]
        clean = set(self.structure.padded)
        fault = self.order.fault() or (self._zero_fault() if self.structure.is_dense else "")
        if fault:
            raise self._refusal(fault)
        linear = Linear(set(self.views), own, local=set(self.it.block.alloc_buffers))
        if not linear.holds(*self.own_init, self.it.block.body):
            self.structure.keep_repeated()
        neutral = is_neutral(self.it.block.body, set(self.views), clean, own)
        for view in self.views:
            if any(s.buffer.same_as(view) for p in parts for s in collect(p, tirx.BufferStore)):
                self.structure.set_clean(view, neutral and still_clean(parts, view, clean, own))
        initialising = self._initialising() if self._inits_rows() else []
        first = [] if initialising or not self.shared_init else self._init_iterations()
        pieces = [self._piece(made, neutral, made in initialising) for made in self.structure.made]
        return seq(*first, *pieces)

    def _refusal(self, fault: str) -> VerifyError:
        message = f"cannot decompose {self.structure.name}: iteration {self.it.name} {fault}"
        return VerifyError(message, self.it.name)

    def _zero_fault(self) -> str:
        """Why points where a dense buffer holds zero may not be left out; empty if they may."""
        name, body = self.structure.name, self.it.block.body
        if any(s.buffer in self.views for part in (self.it.block.init, body) for s in _stores(part)):
            return f"stores to {name}, of which only entries that are not zero are kept"
        if not is_neutral(body, set(), set(self.views), self._is_own):
            return f"does something where {name} is zero, which is left out; only sums of its multiples may be"
        return ""

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

    def _initialising(self) -> list[Made]:
        """Return the pieces that initialise their results: all if each has rows of its own, or the first for all."""
        made = self.structure.made
        if all(each.rule.partitions_rows and self._rows_first(each) for each in made):
            return made
        return made[:1] if made[0].rule.meets_rows and self._rows_first(made[0]) else []

    def _inits_rows(self) -> bool:
        """Return whether each row can initialise what it reduces to, at the points that are stored.

        That reaches all that ``T.init`` sets if there is a point for every coordinate of the other axes that it names,
        stored or not: only dense ones have it. And nothing is set too late if no other row touches it.
        """
        if not self.shared_init or self.own_init:
            return False
        row, *others = self.old_vars
        if any(self.kinds[v] == "S" for v in others) or self.kinds[row] != "S":
            return False
        each = zip(self.it.axes, self.it.vars, strict=True)
        beside = [(a, v) for a, v in each if v not in self.old_vars and self.kinds[v] == "S"]
        if any(a.kind != "dense_fixed" or not mentions(self.shared_init, [v]) for a, v in beside):
            return False
        return self.order.keeps_apart(self.shared_init, row)

    def _rows_first(self, made: Made) -> bool:
        """Return whether the points of every axis that stays are there without those of an axis that is summed over."""
        letter = dict(zip(made.spliced.axes, self._letters(made), strict=True))
        below = [(a, up) for a in letter if letter[a] == "S" for up in a.ancestors if letter.get(up) == "R"]
        return all(a.repeats_below(up) for a, up in below)

    def _letters(self, made: Made) -> list[str]:
        """S or R for each axis of the piece: what the dimension is that it stands for."""
        dimension = {name: d for d, group in made.rule.axis_map.items() for name in group}
        return [self.kinds[self.old_vars[dimension[a.name]]] for a in made.rule.buffer.axes]

    def _init_iterations(self) -> list[tirx.Stmt]:
        """Iterations over every spatial coordinate that the shared initial stores use.

        A store to a structure that repeats coordinates visits its slots: a search reaches one slot of several.
        """
        repeating = {stmt: self._repeated_axes(stmt) for stmt in self.shared_init}
        once = [stmt for stmt in self.shared_init if not repeating[stmt]]
        first = [self._init_iteration(seq(*once), set())] if once else []
        return first + [self._init_iteration(stmt, axes) for stmt, axes in repeating.items() if axes]

    def _init_iteration(self, init: tirx.Stmt, visited: set[Axis]) -> tirx.Stmt:
        """An iteration of initial stores: the stored slots of the visited axes, all coordinates of the others."""
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
            some = [a for a in buffer.axes if not a.unique]
            needed = {up for a in some for up in (a, *a.ancestors)}
            own = {a for a, i in zip(buffer.axes, store.indices, strict=True) if axis_of.get(i) is a} if some else set()
            if not needed <= own - set(self.structure.axes) or (some and not isinstance(stmt, tirx.BufferStore)):
                names = f"{buffer.name} over axis {some[0].name}"
                raise self._refusal(f"initialises {names}, which repeats coordinates, elsewhere than where it stands")
            repeated |= needed
        return repeated

    # ------------------------------------------------------------------ pieces

    def _is_own(self, buffer: Var, indices: Any) -> bool:
        """Return whether a subscript list names the slot at which the iteration stands."""
        axes = self.views[buffer].axes
        return all(indices[axes.index(a)].same_as(v) for a, v in zip(self.structure.axes, self.old_vars, strict=True))

    def _piece(self, made: Made, neutral: bool, initialises: bool) -> tirx.Stmt:
        new_vars = [Var(str(a.name).lower(), ir.PrimType(a.idtype)) for a in made.spliced.axes]
        olds = made.rule.old_coords(new_vars)
        mapping: dict[Var, ir.Expr] = {v: cast(e, str(v.ty.dtype)) for v, e in zip(self.old_vars, olds, strict=True)}
        others = [(a, v) for a, v in zip(self.it.axes, self.it.vars, strict=True) if a not in self.structure.axes]
        fresh = {v: Var(str(v.name), v.ty) for _, v in others}
        mapping.update(fresh)
        body = renewed(self._rewritten(self.it.block.body, made, new_vars, mapping))
        inside = self._inside(made, mapping)
        body = tirx.IfThenElse(conjunction(inside), body, None) if inside else body
        is_masked = made.rule.fills and not neutral
        if made.rule.fills and neutral and multiplies(self.it.block.body, set(self.views)):
            is_masked = not self.structure.finite
            if not is_masked:
                self.structure.multiply_zeros()
        if is_masked:
            mask = self.structure.mask(made)
            valid = tirx.NE(tirx.BufferLoad(mask.view, list(new_vars)), const(0, MASK_DTYPE))
            body = tirx.IfThenElse(valid, body, None)
        stmts = [*self.own_init, *(self.shared_init if initialises else [])]
        init = self._rewritten(seq(*stmts), made, new_vars, mapping) if stmts else None
        notes = notes_of(self.it)
        if initialises:
            notes[INIT] = STORED
        if made.rule.independent and self._rows_are_apart(made):
            notes[INDEPENDENT] = 1
        if made.rule.sweep is not None:
            notes[SWEEP] = made.rule.sweep
        entries = self._entries(made, new_vars, fresh)
        name, allocated = f"{self.it.name}_{made.rule.name}", list(self.it.block.alloc_buffers)
        return make_iteration(name, entries, body, init=init, notes=notes, allocated=allocated)

    def _inside(self, made: Made, mapping: dict[Var, ir.Expr]) -> list[ir.Expr]:
        """Bounds of the coordinates that subscript an ordinary array, where a piece may leave them."""
        known = {b.view for b in self.structure.program.buffers.values()}
        touched = [i for b, indices, _ in accesses(self.it.block) if b not in known for i in indices]
        found: list[ir.Expr] = []
        for var, axis in zip(self.old_vars, self.structure.axes, strict=True):
            coord = mapping[var]
            stands = [new for new in made.spliced.axes if new.name.lower() == str(getattr(coord, "name", ""))]
            may_leave = not stands or stands[0].may_be_absent
            if may_leave and mentions(touched, [var]):
                dtype = str(coord.ty.dtype)
                found += [coord >= const(0, dtype), coord < cast(axis.length, dtype)]
        return found

    def _rows_are_apart(self, made: Made) -> bool:
        """Return whether every store of the iteration is at its own row or its own slot."""
        row = self.old_vars[0]
        stores = collect(self.it.block.body, tirx.BufferStore)
        return self.kinds[row] == "S" and all(
            any(i.same_as(row) for i in s.indices) or (s.buffer in self.views and self._is_own(s.buffer, s.indices))
            for s in stores
        )

    def _entries(self, made: Made, new_vars: list[Var], fresh: dict[Var, Var]) -> list[Entry]:
        """Return the new axes where the first of the old ones stood, and the other axes as they were."""
        letters = self._letters(made)
        each = zip(made.spliced.axes, new_vars, letters, strict=True)
        pieces = _parents_first([Entry((a,), (v,), k) for a, v, k in each])
        out: list[Entry] = []
        for axis, var in zip(self.it.axes, self.it.vars, strict=True):
            if axis not in self.structure.axes:
                out.append(Entry((axis,), (fresh[var],), self.kinds[var]))
            elif pieces:
                out += pieces
                pieces = []
        return out

    def _rewritten(self, node: Any, made: Made, new_vars: list[Var], mapping: dict[Var, ir.Expr]) -> Any:
        """`node` in terms of one piece."""

        def place(buffer: Var, indices: Any, mutator: Any) -> list[ir.Expr]:
            if not self._is_own(buffer, indices):
                name = self.views[buffer].name
                raise self._refusal(f"reads {name} elsewhere than where it stands, which is a search in every piece")
            axes = self.views[buffer].axes
            first = min(axes.index(a) for a in self.structure.axes)
            rest = [(n, mutator.mutate(i)) for n, (a, i) in enumerate(zip(axes, indices, strict=True))
                    if a not in self.structure.axes]  # fmt: skip
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
        return structural_mutate(node, callbacks)


def _stores(part: tirx.Stmt | None) -> list[tirx.BufferStore]:
    return [] if part is None else collect(part, tirx.BufferStore)


def _parents_first(entries: list[Entry]) -> list[Entry]:
    """The same axes, each behind those it hangs from, otherwise in order."""
    out: list[Entry] = []
    left = list(entries)
    while left:
        waiting = {a for e in left for a in e.axes}
        ready = next(e for e in left if not set(e.axes[0].ancestors) & waiting)
        left.remove(ready)
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
    """The buffers that share one structure, named by the one that was asked for, and the pieces they became.

    ``multiplies_zeros`` tells whether zeros between the entries are multiplied with other operands' numbers,
    ``adds_up`` whether entries with the same coordinates may be added up before the program runs: it takes no such
    entries, or computes the same with their sum.
    """

    name: str
    buffers: tuple[str, ...]
    axes: tuple[Axis, ...]
    pieces: tuple[Piece, ...]
    multiplies_zeros: bool = False
    adds_up: bool = True


class Rewriter:
    """Rewrites one structure of one program."""

    def __init__(self, program: Program, name: str, rules: Sequence[FormatRewriteRule], *, finite: bool = True) -> None:
        self.program = program
        self.structure = Structure(program, name, rules, finite=finite)

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
        lost = [v for v in dropped if mentions(body, [v])]
        if lost:
            fault = f"{lost[0].name} is used outside of an iteration over its axes"
            raise VerifyError(f"cannot decompose {self.structure.name}: {fault}, which is a search in every piece")
        fresh = [s for made in self.structure.made for s in (*made.statements, *made.mask_statements)]
        body = with_declarations(body, fresh)
        return without_unused(self.program.func, body, self._params())

    def _statements(self, stmt: tirx.Stmt, dropped: set[Var], mutator: Any) -> list[tirx.Stmt]:
        """A statement of the old program in the new one; a buffer's declaration becomes those of its pieces."""
        if not declares(stmt, dropped):
            return [mutator.mutate(stmt)]
        bound = stmt.value.args[0] if isinstance(stmt, tirx.Evaluate) else None
        return [] if bound is None else [s for made in self.structure.made for s in made.declarations[bound]]

    def _params(self) -> list[Var]:
        out: list[Var] = list(self.program.func.params)
        for made in self.structure.made:
            out += [b.storage for b in made.buffers.values() if not b.allocated]
            out += list(made.spliced.params.values())
            out += [made.mask.storage] if made.mask is not None else []
        return out

    def record(self, func: tirx.PrimFunc) -> Group:
        """Return what the caller needs to know to fill the new parameters."""
        held = {str(p.name) for p in func.params}
        pieces = []
        for made in self.structure.made:
            params = {name: str(var.name) for name, var in made.spliced.params.items() if str(var.name) in held}
            values = {
                str(self.program.buffers[view].storage.name): str(b.storage.name)
                for view, b in made.buffers.items()
                if str(b.storage.name) in held
            }
            mask = None if made.mask is None else str(made.mask.storage.name)
            buffers = {self.program.buffers[view].name: b.name for view, b in made.buffers.items()}
            pieces.append(Piece(made.rule, params, values, buffers, mask))
        names, axes = tuple(b.name for b in self.structure.group), self.structure.axes
        adds_up = self.structure.adds_up or all(a.unique for a in axes)
        return Group(self.structure.name, names, axes, tuple(pieces), self.structure.multiplies_zeros, adds_up)

    # ------------------------------------------------------------------ one iteration

    def iteration(self, it: SpIter) -> tirx.Stmt:
        """An iteration of the old program as the new program has it."""
        views = {b.view for b in self.structure.group}
        touched = {b for b, _, _ in accesses(it.block)} & views
        walked = [a for a in self.structure.axes if a in it.listed and a.kind != "dense_fixed"]
        if not touched and not walked:
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
        """No other axis of the iteration may hang from one that is replaced."""
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
    finite: bool = True

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name} as {format!r}" for name, format in self.formats.items())
        name = self.original.attrs["global_symbol"]
        return f"# {name} with {chosen or ', '.join(g.name for g in self.groups)}\n{self.func!r}"

    @property
    def multiplies_zeros(self) -> bool:
        """Whether zeros that the formats store are multiplied: an infinity or a NaN reaches results that do not use it.

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
        return _again, (self.original, self.formats, self.finite)

    def with_formats(self, formats: Any) -> dict[str, Any]:
        """Return the formats of the original's buffers when more are given, some for pieces by their buffers' names."""
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
        from sparsetir.formats.partitioned import Nested

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


def _rules(format: Any, name: str) -> list[FormatRewriteRule]:
    """The rules of a format, or those that are given; of a bare list it is not known that each has rows of its own."""
    found = [format] if isinstance(format, FormatRewriteRule) else getattr(format, "rules", format)
    if not isinstance(found, (list, tuple)) or not all(isinstance(r, FormatRewriteRule) for r in found):
        hint = f"formats.make({format!r}, ...)" if isinstance(format, str) else "one of sparsetir.formats"
        raise VerifyError(f"{name} must have a format or a list of rules, found {format!r}; try {hint}", name)
    is_bare = found is format and len(found) > 1
    return [replace(rule, partitions_rows=False) if is_bare else rule for rule in found]


def decompose_format(func: Any, formats: Mapping[str, Any] | Any, *, finite: bool | None = None) -> Decomposition:
    """Rewrite a program so that sparse buffers are stored in other formats.

    Parameters
    ----------
    func : PrimFunc or Decomposition
        At stage I.
    formats : mapping of str to Format, FormatRewriteRule or list of FormatRewriteRule
        For each buffer by name; every buffer over the same axes is stored alike. A single format stands for the
        program's first sparse buffer. The pieces of a decomposed buffer are buffers like any other: decompose them
        again by name (``A_rest``).
    finite : bool, optional
        Whether the dense operands are taken to hold neither infinities nor NaNs: zeros that a format stores between the
        entries, as in blocks, are then multiplied like entries. False leaves them out one by one, which is slow. True
        by default, or as it was for a decomposition that is decomposed again.

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
        finite = func.finite if finite is None else finite
        return decompose_format(func.original, func.with_formats(formats), finite=finite)
    current, groups = func, []
    wanted = dict(formats) if isinstance(formats, Mapping) else {_first_sparse(func): formats}
    for name, format in wanted.items():
        program = decode(current)
        wanted[name] = format = _resolved(format, program.buffer(name).axes)
        rewriter = Rewriter(program, name, _rules(format, name), finite=finite is not False)
        with own_errors():
            current = rewriter.function()
        groups.append(rewriter.record(current))
    return Decomposition(func, current, wanted, tuple(groups), finite is not False)


def _again(func: Any, formats: Mapping[str, Any], finite: bool) -> Decomposition:
    """A decomposition out of what pickle kept: formulas of formats have no names."""
    return decompose_format(func, formats, finite=finite)


def _first_sparse(func: tirx.PrimFunc) -> str:
    found = [b.name for b in decode(func).buffers.values() if not b.is_dense and not b.allocated]
    if not found:
        raise VerifyError("the program has no sparse buffer to decompose")
    return found[0]


__all__ = ["Decomposition", "Group", "Piece", "Pieces", "decompose_format"]
