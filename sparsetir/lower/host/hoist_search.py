# SPDX-License-Identifier: Apache-2.0
"""Compute the searches of an iteration once, into a buffer, before its loops.

before::

    for i, j in T.grid(m, n):
        for k in range(feat):
            with T.sblock("spmm"):
                c[vi, vk] = c[vi, vk] + a[indptr[vi] + T.sp.find(indices[indptr[vi]], ..., vj, "hoist")] * b[vj, vk]

after::

    for i, j in T.grid(m, n):
        with T.sblock("spmm_find_0"):
            found_0[vi, vj] = T.sp.find(indices[indptr[vi]], ..., vj, "inline")
    for i, j in T.grid(m, n):
        for k in range(feat):
            with T.sblock("spmm"):
                c[vi, vk] = c[vi, vk] + a[indptr[vi] + found_0[vi, vj]] * b[vj, vk]

The buffer has one dimension per axes tree the search depends on. A search stays where it is when the iteration
writes what it reads, when it depends on an attached axis, whose positions are visited more than once, or when it stands
in a loop or an iteration inside.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir import Call, Var

from sparsetir import op
from sparsetir.ir import Entry, SpIter
from sparsetir.lower.nest.access import Scope
from sparsetir.lower.nest.nest import SPATIAL, Level, extend, place, realize, where_present, wrap
from sparsetir.lower.rewriting import collect, mentions, same, substitute
from sparsetir.walks import structural_mutate


class Hoister:
    """Collects the searches of one iteration; `scope` is the one its body was written in."""

    def __init__(self, iteration: SpIter, scope: Scope) -> None:
        self.iteration, self.scope = iteration, scope
        self.found: list[tuple[Call, ir.Expr]] = []
        self.buffers: list[Var] = []
        self.nests: list[tirx.Stmt] = []
        self.conditional = 0

    def replace(self, body: tirx.Stmt) -> tirx.Stmt:
        """`body` with its searches read from buffers, where they may be."""
        stored = [s.buffer for s in collect(body, tirx.BufferStore)]
        named = [b.var for b in collect(body, tirx.Bind)]

        def on_call(call: Call, mutator: Any) -> Any:
            if op.is_if_then_else(call):
                test = mutator.mutate(call.args[0])
                return tirx.if_then_else(test, *(self._below_condition(mutator, x) for x in call.args[1:]))
            inner = mutator.default_mutate(call)
            if not op.is_call(inner, "find", "find_rule") or self._reads(inner, stored) or mentions(inner, named):
                return inner
            return self._hoisted(inner)

        def on_if(node: tirx.IfThenElse, mutator: Any) -> tirx.Stmt:
            test = mutator.mutate(node.condition)
            branches = (node.then_case, node.else_case)
            yes, no = (None if x is None else self._below_condition(mutator, x) for x in branches)
            return tirx.IfThenElse(test, yes, no)

        def on_loop(node: tirx.For, mutator: Any) -> tirx.Stmt:
            self.conditional += 1
            out = mutator.default_mutate(node)
            self.conditional -= 1
            return out

        callbacks = [
            (Call, on_call),
            (tirx.IfThenElse, on_if),
            (tirx.For, on_loop),
            (s_tir.SBlockRealize, lambda node, _m: node),
        ]
        return structural_mutate(body, callbacks)

    def _below_condition(self, mutator: Any, node: Any) -> Any:
        """Rewrite what does not always run: a search that is only done there stays, its operands may not exist."""
        self.conditional += 1
        out = mutator.mutate(node)
        self.conditional -= 1
        return out

    def _reads(self, call: Call, stored: list[Var]) -> bool:
        return any(load.source.same_as(b) for load in collect(call, ir.TensorLoad) for b in stored)

    def _hoisted(self, call: Call) -> ir.Expr:
        for known, result in self.found:
            if same(known, call):
                return result
        entries = None if self.conditional else self._needed(call)
        if entries is None:
            return call
        result = self._emit(call, entries)
        self.found.append((call, result))
        return result

    def _needed(self, call: Call) -> list[Entry] | None:
        """The entries the search depends on, and those above them; None if it cannot be hoisted."""
        wanted: set[int] = set()
        for n, entry in reversed(list(enumerate(self.iteration.entries))):
            below = any(a.parent in entry.axes for m in wanted for a in self.iteration.entries[m].axes)
            if below or mentions(call, _slots(self.scope, entry)) or self._is_at_attached(call, entry):
                wanted.add(n)
        wanted |= self._placed_with(wanted)
        entries = [self.iteration.entries[n] for n in sorted(wanted)]
        inside = {a for e in entries for a in e.axes}
        others = [entry for n, entry in enumerate(self.iteration.entries) if n not in wanted]
        if any(e.attached_to is not None for e in entries) or any(self._is_untraceable(e) for e in others):
            return None
        return entries if all(p in inside for a in inside for p in a.ancestors) else None

    def _is_at_attached(self, call: Call, entry: Entry) -> bool:
        """Whether a search is for the coordinate of an attached axis, which need not have one."""
        if entry.attached_to is None:
            return False
        loads = collect(self.scope.by_var[entry.vars[0]].coord, ir.TensorLoad)
        return any(same(x, y) for x in loads for y in collect(call, ir.TensorLoad))

    def _is_untraceable(self, entry: Entry) -> bool:
        """Whether a coordinate by rule shows in no search that uses it: what is read there may be there only."""
        slots = _slots(self.scope, entry)
        placed = zip(entry.vars, entry.axes, strict=True)
        return any(a.rule is not None and not mentions(self.scope.by_var[v].coord, slots) for v, a in placed)

    def _placed_with(self, wanted: set[int]) -> set[int]:
        """Singletons next to or below these entries: they have no loop, but an operand may need their coordinate."""
        found: set[int] = set()
        for n, entry in enumerate(self.iteration.entries):
            held = {None, *(a for m in wanted | found for a in self.iteration.entries[m].axes)}
            if entry.axes[0].kind == "singleton" and entry.attached_to is None and entry.axes[0].parent in held:
                found.add(n)
        return found

    def _emit(self, call: Call, entries: list[Entry]) -> ir.Expr:
        """Add the nest that fills a new buffer; returns the element that replaces the search."""
        scope, levels = Scope(), [Level()]
        renamed: dict[Var, ir.Expr] = {}
        for entry in entries:
            extent, slot, cursors, absent = place(entry, scope)
            extend(levels, extent, slot, absent, SPATIAL)
            for var, axis, cursor in zip(entry.vars, entry.axes, cursors, strict=True):
                scope.add(var, cursor, axis.length)
            renamed.update(zip(_slots(self.scope, entry), _slots(scope, entry), strict=True))
        last = _last_axes(entries)
        dtype = str(call.ty.dtype)
        number = len(self.buffers)
        buffer = tirx.decl_buffer([a.count for a in last], dtype, name=f"found_{number}", layout=None)
        inline = [ir.StringImm("inline") if isinstance(a, ir.StringImm) else substitute(a, renamed) for a in call.args]
        value = Call(call.op, inline, ret_ty=call.ty)
        body: tirx.Stmt = tirx.BufferStore(buffer, value, [scope.by_axis[a].pos for a in last])
        for n in reversed(range(len(levels))):
            name = f"{self.iteration.name}_find_{number}" + (f"_{n}" if n < len(levels) - 1 else "")
            body = where_present(body, levels[n].predicates, False)
            block = s_tir.SBlock(levels[n].iter_vars, [], [], name, body)
            body = wrap(realize(block, levels[n]), levels[n])
        self.buffers.append(buffer)
        self.nests.append(body)
        return tirx.BufferLoad(buffer, [self.scope.by_axis[a].pos for a in last])


def _slots(scope: Scope, entry: Entry) -> list[Var]:
    """The block variable of the entry's loop."""
    slot = scope.by_var[entry.vars[-1]].slot
    return [] if slot is None else [slot]


def _last_axes(entries: list[Entry]) -> list[Any]:
    """The deepest axis of each tree."""
    deepest: dict[Any, Any] = {}
    for entry in entries:
        deepest[entry.axes[-1].root] = entry.axes[-1]
    return list(deepest.values())
