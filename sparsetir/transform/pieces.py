# SPDX-License-Identifier: Apache-2.0
"""The iterations that one iteration becomes when a structure is stored in pieces."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.errors import VerifyError
from sparsetir.ir import INDEPENDENT, INIT, STORED, SWEEP, Axis, Entry, SpIter, accesses, cast, const
from sparsetir.lower.rewriting import collect, conjunction, mentions, renewed, seq
from sparsetir.transform.editing import make_iteration, notes_of
from sparsetir.transform.entry_order import EntryOrder
from sparsetir.transform.linear import Linear
from sparsetir.transform.neutral import is_neutral, multiplies, still_clean
from sparsetir.transform.structure import MASK_DTYPE, Made, Structure
from sparsetir.transform.tidy import replaced_vars
from sparsetir.walks import structural_mutate


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
        """The pieces that initialise what they reduce to: all if each has rows of its own, or the first for all."""
        made = self.structure.made
        if all(each.rule.partitions_rows and self._rows_first(each) for each in made):
            return made
        return made[:1] if made[0].rule.meets_rows and self._rows_first(made[0]) else []

    def _inits_rows(self) -> bool:
        """Whether each row can initialise what it reduces to, at the points that are stored.

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
        """Whether the points of every axis that stays are there without those of an axis that is summed over."""
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
        """The axes that repeat coordinates where `stmt` stores, and those above; empty if none does."""
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
        """Whether a subscript list names the slot at which the iteration stands."""
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
        """Whether every store of the iteration is at its own row or its own slot."""
        row = self.old_vars[0]
        stores = collect(self.it.block.body, tirx.BufferStore)
        return self.kinds[row] == "S" and all(
            any(i.same_as(row) for i in s.indices) or (s.buffer in self.views and self._is_own(s.buffer, s.indices))
            for s in stores
        )

    def _entries(self, made: Made, new_vars: list[Var], fresh: dict[Var, Var]) -> list[Entry]:
        """The new axes where the first of the old ones stood, and the other axes as they were."""
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


__all__ = ["Pieces"]
