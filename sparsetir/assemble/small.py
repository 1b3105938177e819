# SPDX-License-Identifier: Apache-2.0
"""What a call of little work does in one function: it looks at the index arrays, then collects the rows one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.assemble.accumulators import LONG, WORD, Bits, long, lowest
from sparsetir.assemble.program import Assembly
from sparsetir.ir import Axis, cast, const, load
from sparsetir.lower.nests import serial
from sparsetir.lower.rewriting import alloc, cell, collect, get, put, seq

FEW = 4  # entries up to which a row is sorted by insertion
NARROW = WORD * WORD  # coordinates whose words one more word tells


@dataclass
class Leveled(Bits):
    """Marks in a bitmap, and in another one, `top`, which of its words have some; that is a cell for narrow rows."""

    def __post_init__(self) -> None:
        self.is_narrow = len(self.top.ty.shape) == 1

    def begin(self) -> list[tirx.Stmt]:
        held = [*alloc(self.top), put(self.top, long(0))] if self.is_narrow else []
        return [*held, *super().begin()]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        wide = cast(key, LONG)
        place = [const(0)] if self.is_narrow else [self.chunk, wide >> long(12)]
        bit = long(1) << ((wide >> long(6)) & long(WORD - 1))
        return [self.mark(wide), tirx.BufferStore(self.top, tirx.BufferLoad(self.top, place) | bit, place)]

    def finish(self) -> list[tirx.Stmt]:
        marks = cell("marks", LONG)
        if self.is_narrow:
            return [*alloc(marks), self.words(self.top, marks, long(0))]
        words, step = cell("words", LONG), Var("s", ir.PrimType(LONG))
        place = [self.chunk, step]
        taken = [put(words, tirx.BufferLoad(self.top, place)), tirx.BufferStore(self.top, long(0), place)]
        each = seq(*taken, self.words(words, marks, step * long(WORD)))
        return [*alloc(words, marks), serial(step, self.top.ty.shape[1], each)]

    def words(self, words: Var, marks: Var, first: ir.Expr) -> tirx.Stmt:
        """Write what some words hold, of which the bits of a cell tell."""
        block = Var("block", ir.PrimType(LONG))
        entries = tirx.While(get(marks) != long(0), seq(*self._entry(block * long(WORD), marks)))
        drop = put(words, get(words) & (get(words) - long(1)))
        one = seq(tirx.Bind(block, first + lowest(get(words))), *self.taken(block, marks), entries, drop)
        return tirx.While(get(words) != long(0), one)

    @classmethod
    def of(cls, wide: Leveled) -> Leveled:
        """The same for narrow rows."""
        return replace(wide, top=cell("top", LONG))


def unread(assembly: Assembly) -> set[str]:
    """Parameters with the values of operands that only filter."""
    read = [x.source for x in collect(assembly.func.body, ir.TensorLoad)]
    held = [b for b in assembly.source.buffers.values() if b.axes[-1] in assembly.filters]
    return {str(b.storage.name) for b in held if not any(x.same_as(b.view) for x in read)}


def operands(assembly: Assembly) -> list[Axis]:
    """The axes of columns of all operands."""
    found = [b.axes[1] for b in assembly.source.buffers.values() if not any(a.is_assembled for a in b.axes)]
    return list(dict.fromkeys(found))


def faults(axes: Sequence[Axis], fault: Var) -> list[tirx.Stmt]:
    """Statements that leave a cell at zero where the arrays of some axes are what the axes promise."""
    stmts: list[tirx.Stmt] = [put(fault, long(0))]
    for axis in axes:
        stmts += _of_pointers(axis, fault)
    for axis in axes:
        stmts.append(tirx.IfThenElse(get(fault).equal(long(0)), seq(*_of_indices(axis, fault)), None))
    return stmts


def _of_pointers(axis: Axis, fault: Var) -> list[tirx.Stmt]:
    assert axis.parent is not None
    assert axis.indptr is not None
    rows, step = cast(axis.parent.length, LONG), Var("step", ir.PrimType(LONG))
    falls = cell("falls", axis.idtype)
    pointer = lambda place: cast(load(axis.indptr, place), LONG)  # noqa: E731
    ends = tirx.Or(pointer(long(0)) != long(0), pointer(rows) != cast(axis.count, LONG))
    fall = cast(load(axis.indptr, step + long(1)) < load(axis.indptr, step), axis.idtype)
    return [
        *alloc(falls),
        put(falls, const(0, axis.idtype)),
        serial(step, rows, put(falls, get(falls) | fall)),
        put(fault, get(fault) | cast(ends, LONG) | cast(get(falls), LONG)),
    ]


def _of_indices(axis: Axis, fault: Var) -> list[tirx.Stmt]:
    assert axis.parent is not None
    assert axis.indptr is not None
    assert axis.indices is not None
    step, outside = Var("step", ir.PrimType(LONG)), cell("outside", axis.idtype)
    key, last = load(axis.indices, step), cast(axis.length, axis.idtype) - const(1, axis.idtype)
    stmts = [
        *alloc(outside),
        put(outside, const(0, axis.idtype)),
        serial(step, cast(axis.count, LONG), put(outside, get(outside) | key | (last - key))),
        put(fault, get(fault) | cast(get(outside) < const(0, axis.idtype), LONG)),
    ]
    if axis.sorted or axis.unique:
        row, entry = (Var(name, ir.PrimType(LONG)) for name in ("r", "e"))
        begin, after = (cast(load(axis.indptr, row + long(n)), LONG) for n in (0, 1))
        pair = [load(axis.indices, begin + entry + long(n)) for n in (0, 1)]
        wrong = cast(pair[0] >= pair[1] if axis.unique else pair[0] > pair[1], LONG)
        inner = serial(entry, after - begin - long(1), put(fault, get(fault) | wrong))
        stmts.append(serial(row, cast(axis.parent.length, LONG), inner))
    return stmts


__all__ = ["FEW", "NARROW", "Leveled", "faults", "operands", "unread"]
