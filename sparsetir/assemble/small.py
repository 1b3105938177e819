# SPDX-License-Identifier: Apache-2.0
"""What a call of little work does in one function: it looks at the index arrays, then collects the rows one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.assemble.accumulators import LONG, WORD, Bits, add, copied, each, long, lowest, stored
from sparsetir.assemble.program import Assembly
from sparsetir.ir import Axis, cast, const, load
from sparsetir.lower.nests import serial
from sparsetir.lower.rewriting import alloc, cell, collect, get, put, seq

AHEAD = range(2), range(2, 6)  # coordinates of a word that are written before it is known whether it has them
MOST_AHEAD = AHEAD[-1].stop
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
            return [*alloc(marks), self.words(self.top, marks, long(0)), self.fetched()]
        words, step = cell("words", LONG), Var("s", ir.PrimType(LONG))
        place = [self.chunk, step]
        taken = [put(words, tirx.BufferLoad(self.top, place)), tirx.BufferStore(self.top, long(0), place)]
        every = serial(step, self.top.ty.shape[1], seq(*taken, self.words(words, marks, step * long(WORD))))
        return [*alloc(words, marks), every, self.fetched()]

    def words(self, words: Var, marks: Var, first: ir.Expr) -> tirx.Stmt:
        """Write the coordinates that some words hold, of which the bits of a cell tell.

        Nobody can foresee how many a word holds: the first ones are written without a look, and maybe written over.
        """
        block, number, at = (Var(name, ir.PrimType(LONG)) for name in ("block", "number", "at"))
        base, left = block * long(WORD), cell("left", LONG)
        few, some = ([s for n in part for s in self.coordinate(at + long(n), base, marks)] for part in AHEAD)
        rest = seq(*self.coordinate(at + get(left), base, marks), add(left, 1))
        one = [
            tirx.Bind(block, first + lowest(get(words))),
            *self.taken(block, marks),
            tirx.Bind(number, tirx.popcount(get(marks))),
            tirx.Bind(at, get(self.out.pos) + get(self.out.count)),
            *few,
            tirx.IfThenElse(number > long(len(AHEAD[0])), seq(*some), None),
            put(left, long(MOST_AHEAD)),
            tirx.While(get(marks) != long(0), rest),
            add(self.out.count, number),
            put(words, get(words) & (get(words) - long(1))),
        ]
        return seq(*alloc(left), tirx.While(get(words) != long(0), seq(*one)))

    def coordinate(self, place: ir.Expr, base: ir.Expr, marks: Var) -> list[tirx.Stmt]:
        """Write the coordinate of the lowest bit, or some number where there is none."""
        keys = self.out.keys
        assert keys is not None
        bit = tirx.call_llvm_pure_intrin(LONG, "llvm.cttz", get(marks), const(False, "bool"))
        key = cast(base + bit, str(keys.ty.dtype))
        return [tirx.BufferStore(keys, key, [place]), put(marks, get(marks) & (get(marks) - long(1)))]

    def fetched(self) -> tirx.Stmt:
        """The value of each coordinate beside it, and none left."""
        assert self.out.keys is not None
        step, key = Var("entry", ir.PrimType(LONG)), Var("key", ir.PrimType(LONG))
        place = [get(self.out.pos) + step]
        stmts: list[tirx.Stmt] = [tirx.Bind(key, cast(tirx.BufferLoad(self.out.keys, place), LONG))]
        parts = zip(self.arrays, self.out.values, self.out.initial, self.out.blocks, strict=True)
        for array, values, initial, block in parts:
            held = [self.chunk, key]
            stmts += [each(block, copied(values, place, array, held)), each(block, stored(array, held, initial))]
        return serial(step, get(self.out.count), seq(*stmts))

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


__all__ = ["FEW", "MOST_AHEAD", "NARROW", "Leveled", "faults", "operands", "unread"]
