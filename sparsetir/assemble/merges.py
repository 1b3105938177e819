# SPDX-License-Identifier: Apache-2.0
"""Rows that are merged: cursors go over sorted axes together, and every coordinate is written as it is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.assemble.accumulators import LONG, Output, add, long
from sparsetir.assemble.program import Assembly, Merge
from sparsetir.ir import Axis, cast, const
from sparsetir.lower.nest.compare_nan import with_nan
from sparsetir.lower.nest.replace_bools import as_logic
from sparsetir.lower.nests import serial
from sparsetir.lower.rewriting import alloc, cell, folded, get, opaque, product, put, seq
from sparsetir.walks import structural_mutate


@dataclass(frozen=True)
class Cursor:
    """A place in the row of one axis."""

    axis: Axis
    at: Var
    end: Var

    @classmethod
    def of(cls, axis: Axis) -> Cursor:
        return cls(axis, cell(f"at_{axis.name}", LONG), cell(f"end_{axis.name}", LONG))

    def start(self, row: ir.Expr) -> list[tirx.Stmt]:
        """Stand at the first entry of a row."""
        begin = cast(self.axis.begin(cast(row, self.axis.idtype), []), LONG)
        extent = cast(self.axis.extent(cast(row, self.axis.idtype), []), LONG)
        return [put(self.at, begin), put(self.end, begin + extent)]

    @property
    def is_inside(self) -> ir.Expr:
        return get(self.at) < get(self.end)

    @property
    def coordinate(self) -> ir.Expr:
        return cast(self.axis.coordinate(get(self.at), get(self.at), []), LONG)


def row_of(assembly: Assembly, merge: Merge, out: Output, row: ir.Expr) -> list[tirx.Stmt]:
    """Write one row."""
    cursors = [Cursor.of(a) for a in merge.members]
    emit = _Emitter(assembly, merge, out, row, cursors)
    stmts = [*alloc(*(c for x in cursors for c in (x.at, x.end))), put(out.count, long(0))]
    stmts += [s for c in cursors for s in c.start(row)]
    if merge.how == "intersect":
        return [*stmts, emit.intersection()]
    while len(cursors) > 1:
        stmts.append(emit.union(cursors))
        if len(cursors) > 2:
            return [*stmts, emit.rest()]
        break
    return [*stmts, *(emit.tail(c) for c in cursors)]


class _Emitter:
    """Writes entries of a row where the cursors stand."""

    def __init__(self, assembly: Assembly, merge: Merge, out: Output, row: ir.Expr, cursors: Sequence[Cursor]) -> None:
        self.assembly, self.merge, self.out, self.row, self.cursors = assembly, merge, out, row, cursors

    def union(self, cursors: Sequence[Cursor]) -> tirx.Stmt:
        """Entries while all cursors stand inside their rows: the least coordinate, of each axis that stores it."""
        names = [Var(f"j_{c.axis.name}", ir.PrimType(LONG)) for c in cursors]
        least = Var("j", ir.PrimType(LONG))
        value: ir.Expr = names[0]
        for name in names[1:]:
            value = tirx.min(value, name)
        has = [name.equal(least) for name in names]
        stmts = [tirx.Bind(n, c.coordinate) for n, c in zip(names, cursors, strict=True)]
        stmts += [tirx.Bind(least, value), *self.entry(least, dict(zip(cursors, has, strict=True)))]
        stmts += [add(self.out.count, 1)]
        stmts += [put(c.at, get(c.at) + cast(h, LONG)) for c, h in zip(cursors, has, strict=True)]
        return tirx.While(_all([c.is_inside for c in cursors]), seq(*stmts))

    def rest(self) -> tirx.Stmt:
        """Entries while any cursor stands inside its row."""
        past = const(2**62, LONG)
        names = [Var(f"j_{c.axis.name}", ir.PrimType(LONG)) for c in self.cursors]
        least = Var("j", ir.PrimType(LONG))
        value: ir.Expr = names[0]
        for name in names[1:]:
            value = tirx.min(value, name)
        has = [name.equal(least) for name in names]
        held = [tirx.if_then_else(c.is_inside, c.coordinate, past) for c in self.cursors]
        stmts = [tirx.Bind(n, v) for n, v in zip(names, held, strict=True)]
        entry = self.entry(least, dict(zip(self.cursors, has, strict=True)), guarded=True)
        stmts += [tirx.Bind(least, value), *entry, add(self.out.count, 1)]
        stmts += [put(c.at, get(c.at) + cast(h, LONG)) for c, h in zip(self.cursors, has, strict=True)]
        some = self.cursors[0].is_inside
        for cursor in self.cursors[1:]:
            some = tirx.Or(some, cursor.is_inside)
        return tirx.While(some, seq(*stmts))

    def tail(self, cursor: Cursor) -> tirx.Stmt:
        """The entries of one axis after those of all others."""
        step = Var("step", ir.PrimType(LONG))
        key = Var("j", ir.PrimType(LONG))
        here = get(cursor.at) + step
        coordinate = cast(cursor.axis.coordinate(here, here, []), LONG)
        body = [tirx.Bind(key, coordinate), *self.entry(key, {cursor: const(True, "bool")}, step=step)]
        count = get(cursor.end) - get(cursor.at)
        loop = serial(step, count, seq(*body))
        return seq(loop, add(self.out.count, tirx.max(count, long(0))))

    def intersection(self) -> tirx.Stmt:
        """Entries where all cursors stand at one coordinate; one is written ahead, which the next one replaces."""
        names = [Var(f"j_{c.axis.name}", ir.PrimType(LONG)) for c in self.cursors]
        most = Var("j", ir.PrimType(LONG))
        value: ir.Expr = names[0]
        for name in names[1:]:
            value = tirx.max(value, name)
        stmts = [tirx.Bind(n, c.coordinate) for n, c in zip(names, self.cursors, strict=True)]
        stmts += [tirx.Bind(most, value)]
        is_there = product([cast(n.equal(most), LONG) for n in names])
        everywhere = dict.fromkeys(self.cursors, const(True, "bool"))
        stmts += [*self.entry(most, everywhere), add(self.out.count, is_there)]
        if len(names) == 2:
            moves = [names[0] <= names[1], names[1] <= names[0]]
        else:
            moves = [tirx.Or(n < most, is_there > long(0)) for n in names]
        stmts += [put(c.at, get(c.at) + cast(m, LONG)) for c, m in zip(self.cursors, moves, strict=True)]
        return tirx.While(_all([c.is_inside for c in self.cursors]), seq(*stmts))

    def entry(
        self, key: Var, has: dict[Cursor, ir.Expr], *, guarded: bool = False, step: ir.Expr | None = None
    ) -> list[tirx.Stmt]:
        """Write the entry of a coordinate, at which the axes of some cursors store elements."""
        place = [get(self.out.pos) + get(self.out.count) + (long(0) if step is None else step)]
        assert self.out.keys is not None
        stmts: list[tirx.Stmt] = [
            tirx.BufferStore(self.out.keys, cast(key, str(self.out.keys.ty.dtype)), place),
        ]
        for store in self.merge.stores:
            number = next(n for n, r in enumerate(self.assembly.results) if r.name == str(store.buffer.name))
            self.pairs: list[tirx.Stmt] = []
            value = self.value(store.value, key, has, guarded=guarded, step=step)
            stmts += [*self.pairs, tirx.BufferStore(self.out.values[number], value, place)]
        return stmts

    def either(self, there: ir.Expr, element: ir.Expr, other: ir.Expr) -> ir.Expr:
        """One of two values without a branch: LLVM makes one of a choice between floats, not of a subscript."""
        dtype = str(element.ty.dtype)
        if isinstance(there, tirx.IntImm) or not dtype.startswith("float"):
            return tirx.Select(there, element, other)
        pair = tirx.decl_buffer((2,), dtype, name="pair", scope="local", layout=None)
        self.pairs += [*alloc(pair), *(tirx.BufferStore(pair, x, [const(n)]) for n, x in enumerate((other, element)))]
        return tirx.BufferLoad(pair, [cast(there, "int32")])

    def opaque(self, value: ir.Expr) -> ir.Expr:
        """A number that TVM takes for no constant."""
        before, held = opaque(value)
        self.pairs += before
        return held

    def value(
        self, value: ir.Expr, key: Var, has: dict[Cursor, ir.Expr], *, guarded: bool, step: ir.Expr | None
    ) -> ir.Expr:
        """What is stored, in terms of positions."""
        buffers = self.assembly.source.buffers
        of_axis = {c.axis: c for c in self.cursors}
        hides = bool(folded(value))

        def on_load(load: ir.TensorLoad, mutator: object) -> ir.Expr:
            buffer = buffers[load.source]
            if buffer.is_dense:
                indices = [self.row if i.same_as(self.merge.row) else key for i in load.indices]
                pairs = zip(indices, buffer.axes, strict=True)
                return tirx.BufferLoad(buffer.storage, [cast(i, a.idtype) for i, a in pairs])
            cursor = of_axis[buffer.axes[1]]
            there = has.get(cursor)
            if there is None:
                return self.opaque(buffer.default) if hides else buffer.default
            at = get(cursor.at) + (long(0) if step is None else step)
            element = tirx.BufferLoad(buffer.storage, [at])
            choose = tirx.if_then_else if guarded else self.either
            return choose(there, element, buffer.default)

        def on_var(var: Var, _kind: int) -> ir.Expr:
            if var.same_as(self.merge.row):
                return cast(self.row, str(var.ty.dtype))
            return cast(key, str(var.ty.dtype)) if var.same_as(self.merge.var) else var

        found = structural_mutate(with_nan(value), [(ir.TensorLoad, on_load)])
        return as_logic(tvm_ffi.structural_map(found, with_def_region_kind=(Var, on_var)))


def _all(conditions: Sequence[ir.Expr]) -> ir.Expr:
    out = conditions[0]
    for condition in conditions[1:]:
        out = tirx.And(out, condition)
    return out


__all__ = ["row_of"]
