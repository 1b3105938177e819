# SPDX-License-Identifier: Apache-2.0
"""Accumulators: where the elements of one row of a result are collected until its pattern is known.

Each has the same four parts: what stands before a row, how a coordinate is entered, where its value is held, and how
the row is written out in order of its coordinates, which leaves the accumulator as it was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import cast, const
from sparsetir.lower.nests import serial
from sparsetir.lower.rewriting import alloc, cell, get, put, seq

WORD = 64  # coordinates in one word of a bitmap
LONG = "int64"


def long(value: int) -> ir.Expr:
    """A constant of 64 bits."""
    return const(value, LONG)


@dataclass(frozen=True)
class Output:
    """Where rows are written, entry by entry from `pos` on.

    Parameters
    ----------
    pos, count : cell
        The first entry of the row, and the number of its entries.
    keys : Var, optional
        Their coordinates. None where entries are only counted.
    values : sequence of Var
        One array for each result, none where entries are only counted.
    initial : sequence of Expr
        What an element is before the first statement sets it.
    """

    pos: Var
    count: Var
    keys: Var | None
    values: Sequence[Var]
    initial: Sequence[ir.Expr]

    @property
    def counts_only(self) -> bool:
        """Whether the pattern alone is wanted, and of that the length of each row."""
        return self.keys is None


class Accumulator(Protocol):
    """What collects a row."""

    def begin(self) -> list[tirx.Stmt]:
        """What stands before a row."""

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        """Enter a coordinate, a variable or a constant."""

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        """The array that holds the value of a coordinate just entered, and the subscripts in it."""

    def finish(self) -> list[tirx.Stmt]:
        """Write the row out and count it."""


def loop(name: str, extent: ir.Expr, body: list[tirx.Stmt]) -> tuple[Var, tirx.Stmt]:
    """A serial loop of 64-bit steps."""
    var = Var(name, ir.PrimType(LONG))
    return var, serial(var, extent, seq(*body))


def add(target: Var, amount: ir.Expr | int) -> tirx.Stmt:
    """Add to a cell."""
    dtype = str(target.ty.dtype)
    return put(target, get(target) + (const(amount, dtype) if isinstance(amount, int) else cast(amount, dtype)))


def zeros_below(word: ir.Expr) -> ir.Expr:
    """The place of the lowest bit of a word."""
    return tirx.call_llvm_pure_intrin(LONG, "llvm.cttz", word, const(True, "bool"))


def ones(word: ir.Expr) -> ir.Expr:
    """The number of bits of a word."""
    return tirx.popcount(word)


@dataclass
class Insertion:
    """Sorted insertion into the row itself: for rows of a few entries.

    Without an output the coordinates stand in an array on the stack.
    """

    out: Output
    most: int
    dtype: str
    at: Var = field(default_factory=lambda: cell("at", LONG))

    def __post_init__(self) -> None:
        self.held = self.out.keys
        self.base: ir.Expr = get(self.out.pos)
        if self.held is None:
            self.held = tirx.decl_buffer([self.most], self.dtype, name="held", scope="local", layout=None)
            self.base = long(0)

    def begin(self) -> list[tirx.Stmt]:
        local = [self.held] if self.out.counts_only else []
        return [*alloc(*local, self.at), put(self.out.count, long(0))]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        at, count, held = self.at, self.out.count, self.held
        before = tirx.BufferLoad(held, [tirx.max(self.base + get(at) - long(1), long(0))])
        back = tirx.While(tirx.And(get(at) > long(0), before > key), put(at, get(at) - long(1)))
        is_new = tirx.Or(get(at).equal(long(0)), before != key)
        step = Var("step", ir.PrimType(LONG))
        to = self.base + get(count) - step
        rows = [held, *self.out.values]
        shift = seq(*(tirx.BufferStore(a, tirx.BufferLoad(a, [to - long(1)]), [to]) for a in rows))
        place = [self.base + get(at)]
        firsts = [tirx.BufferStore(a, v, place) for a, v in zip(self.out.values, self.out.initial, strict=True)]
        moved = serial(step, get(count) - get(at), shift)
        insert = seq(moved, tirx.BufferStore(held, key, place), *firsts, add(count, 1))
        return [put(at, get(count)), back, tirx.IfThenElse(is_new, insert, put(at, get(at) - long(1)))]

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.out.values[result], [self.base + get(self.at)]

    def finish(self) -> list[tirx.Stmt]:
        return []


@dataclass
class Dense:
    """An array with an element for each coordinate, and a bitmap of two levels of those that are there.

    Between rows every element has its initial value and no bit is set. Going over the bits gives the row in order.
    """

    out: Output
    chunk: Var
    arrays: Sequence[Var]
    bits: Var
    top: Var

    def begin(self) -> list[tirx.Stmt]:
        return [put(self.out.count, long(0))]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        wide = cast(key, LONG)
        word, within = wide >> long(6), wide & long(63)
        return [self._set(self.bits, word, within), self._set(self.top, word >> long(6), word & long(63))]

    def _set(self, array: Var, word: ir.Expr, within: ir.Expr) -> tirx.Stmt:
        place = [self.chunk, word]
        return tirx.BufferStore(array, tirx.BufferLoad(array, place) | (long(1) << within), place)

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.arrays[result], [self.chunk, cast(key, LONG)]

    def finish(self) -> list[tirx.Stmt]:
        words, bits = cell("words", LONG), cell("left", LONG)
        above, word = Var("s", ir.PrimType(LONG)), Var("word", ir.PrimType(LONG))
        at = [self.chunk, word]
        clear = tirx.BufferStore(self.bits, long(0), at)
        if self.out.counts_only:
            inner = [tirx.Bind(word, above * long(WORD) + zeros_below(get(words)))]
            inner += [add(self.out.count, ones(tirx.BufferLoad(self.bits, at))), clear]
        else:
            inner = [tirx.Bind(word, above * long(WORD) + zeros_below(get(words)))]
            inner += [put(bits, tirx.BufferLoad(self.bits, at)), clear]
            inner += [tirx.While(get(bits) != long(0), seq(*self._entry(word, bits)))]
        inner += [put(words, get(words) & (get(words) - long(1)))]
        top = [self.chunk, above]
        body = [put(words, tirx.BufferLoad(self.top, top)), tirx.BufferStore(self.top, long(0), top)]
        body += [tirx.While(get(words) != long(0), seq(*inner))]
        return [*alloc(words, bits), serial(above, self.top.ty.shape[1], seq(*body))]

    def _entry(self, word: Var, bits: Var) -> list[tirx.Stmt]:
        """Write the entry of the lowest bit."""
        key, place = Var("key", ir.PrimType(LONG)), Var("place", ir.PrimType(LONG))
        assert self.out.keys is not None
        stmts: list[tirx.Stmt] = [tirx.Bind(key, word * long(WORD) + zeros_below(get(bits)))]
        stmts += [tirx.Bind(place, get(self.out.pos) + get(self.out.count))]
        stmts += [tirx.BufferStore(self.out.keys, cast(key, str(self.out.keys.ty.dtype)), [place])]
        for array, values, initial in zip(self.arrays, self.out.values, self.out.initial, strict=True):
            held = tirx.BufferLoad(array, [self.chunk, key])
            stmts += [tirx.BufferStore(values, cast(held, str(values.ty.dtype)), [place])]
            stmts += [tirx.BufferStore(array, cast(initial, str(array.ty.dtype)), [self.chunk, key])]
        return [*stmts, add(self.out.count, 1), put(bits, get(bits) & (get(bits) - long(1)))]
