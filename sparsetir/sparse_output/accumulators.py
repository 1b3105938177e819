# SPDX-License-Identifier: Apache-2.0
"""Accumulators: collect the elements of a result row until its pattern is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.errors import ArgumentError, checks_keywords
from sparsetir.ir.rewriting import LONG, alloc, cell, get, long, put, seq
from sparsetir.ir.views import cast, const
from sparsetir.lower.loops import serial, unrolled
from sparsetir.utils.arguments import shown

if TYPE_CHECKING:
    from sparsetir.sparse_output.program import AssembledProgram


# Options of the accumulation of rows with a computed pattern.


SMALL = 24  # entries up to which a row is sorted by insertion
RANKED = 96  # entries up to which a row is sorted by ranks
MOST_INSERTED, MOST_RANKED = 256, 111  # limit of the stack arrays of a build
FUNCTIONS = ("bound", "symbolic", "numeric", "looking", "values", "packed")  # one chunk of merged rows has "alone"
FIRST = ("bound", "numeric")
KINDS = ("both", "bits", "bytes", "table", "segments")
ORDERS = ("stored", "nonempty", "clustered", "banded")


@checks_keywords
@dataclass(frozen=True)
class Accumulators:
    """Choice of accumulators for a result whose pattern is computed, for ``sparsetir.build(schedule=...)``.

    Results are the same with all of them. `sparsetir.tune_sparse` searches them.

    Parameters
    ----------
    insertion : int
        Entries, repeated ones included, up to which a row is sorted by insertion; from 0 to 256.
    kind : {"both", "bits", "bytes", "table", "segments"}
        What collects longer rows: an array as wide as the result whose entries are marked by bits, by bytes, or by
        either of them as the row is sparse or dense; a hash table and a sort; or, where a row is long, such arrays for
        one segment of the columns after the other, whose products are sorted out first. With "both" all rows under a
        mask that is no complement are collected in the order of the mask's.
    counted : bool
        Whether rows are counted before they are written, also where there is memory for the most that they may have.
    order : {"stored", "nonempty", "clustered", "banded"}
        In which order rows are computed: as they are stored; without those that enter nothing, as compressed rows are;
        such that rows with columns in common follow each other; or such that the band around the diagonal is narrow,
        which needs as many columns as rows. The result is in the order of its rows with all of them.
    block : tuple of int, optional
        Of a product, ``(r, q, s)``: A is stored in blocks of shape (r, q), B of (q, s). Operands whose blocks are not
        full are multiplied as they are.

    ranked : int
        Entries, repeated ones included, up to which a row is listed beside an array as wide as the result, and each of
        its entries put where the number of smaller ones says; from 0 to 111. Such rows are not sorted by insertion.
        Hash tables do without.

    Raises
    ------
    ArgumentError
        A value is none of these.

    Examples
    --------
    >>> import sparsetir
    >>> from sparsetir import Accumulators
    >>> kernel = sparsetir.build(sparsetir.ops.spgemm(), schedule=Accumulators(insertion=8, kind="bits"))
    """

    insertion: int = SMALL
    kind: str = "both"
    counted: bool = False
    order: str = "stored"
    block: tuple[int, int, int] | None = None
    ranked: int = RANKED

    def __post_init__(self) -> None:
        for name, number, most in (("insertion", self.insertion, MOST_INSERTED), ("ranked", self.ranked, MOST_RANKED)):
            whole = isinstance(number, int) and not isinstance(number, bool)
            if not whole or not 0 <= number <= most:
                raise ArgumentError(f"{name} is a number of entries from 0 to {most}, got {shown(number)}")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ArgumentError(f"expected one of the kinds {', '.join(KINDS)}, got {shown(self.kind)}")
        if not isinstance(self.counted, bool):
            raise ArgumentError(f"counted is True or False, got {shown(self.counted)}")
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise ArgumentError(f"expected one of the orders {', '.join(ORDERS)}, got {shown(self.order)}")
        if self.block is not None and not _is_block(self.block):
            raise ArgumentError(f"block is three positive sizes (r, q, s) or None, got {shown(self.block)}")

    @property
    def is_ordered(self) -> bool:
        """Whether rows are computed in another order than they are stored."""
        return self.order != "stored"

    @property
    def is_table(self) -> bool:
        """Whether long rows are collected in hash tables."""
        return self.kind == "table"

    def as_dict(self) -> dict[str, Any]:
        """Return names and values, for records."""
        return asdict(self)


def _is_block(block: Any) -> bool:
    whole = isinstance(block, tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in block)
    return whole and len(block) == 3 and min(block) > 0


@dataclass(frozen=True)
class AccumulatorOptions:
    """Options of the functions of a program.

    Parameters
    ----------
    complement : bool
        Coordinates are entered where the filters store none.
    select : bool
        Of each row only the largest values are kept.
    limited : bool
        With `select`, calls seldom keep all values however small they are: small ones are left out as rows are read.
    whole : bool
        Under a mask, where `stamps`: every entry of it is stored, also where nothing is entered.
    accumulators : Accumulators
    looks_up : bool
        Under a mask, where `stamps`: its rows may be looked up in long rows of operands, see `merges.py`.
    functions : tuple of str
        Which of them are compiled together. Others follow when a call wants them: they take as long again.
    """

    complement: bool = False
    select: bool = False
    limited: bool = False
    whole: bool = False
    accumulators: Accumulators = field(default_factory=Accumulators)
    looks_up: bool = True
    functions: tuple[str, ...] = FIRST

    def stamps(self, *, has_mask: bool) -> bool:
        """Return whether rows under a mask are collected in its order."""
        return has_mask and not self.complement and self.accumulators.kind == "both"

    def orders(self, assembly: AssembledProgram) -> bool:
        """Return whether the functions take a row order; merged, mask-ordered and selected rows take none."""
        follows = assembly.merge is not None or self.stamps(has_mask=assembly.mask is not None)
        return self.accumulators.is_ordered and not self.select and not follows

    def plain(self) -> AccumulatorOptions:
        """Return these options with rows in stored order, without segments and lookups."""
        kind = "both" if self.accumulators.kind == "segments" else self.accumulators.kind
        return replace(self, looks_up=False, accumulators=replace(self.accumulators, order="stored", kind=kind))

    def unblocked(self) -> AccumulatorOptions:
        """Return these options without blocks."""
        return replace(self, accumulators=replace(self.accumulators, block=None))

    def tabled(self) -> AccumulatorOptions:
        """Return these options with hash tables."""
        return replace(self, accumulators=replace(self.accumulators, kind="table"))


# Accumulators hold the elements of one row of a result until its pattern is known.
#
# Each has the same four parts: the code before a row, the entry of a coordinate, the storage of its value, and the
# code that writes the row sorted by coordinates and resets the accumulator.


WORD = 64  # coordinates in a block
BYTES = 8  # that are loaded together
SPREAD = 0x9E3779B1  # an odd number that spreads neighbouring coordinates over a table
DUMPS = 256  # elements that absorb entries outside of a mask; many, so that neighbours rarely depend on each other
GATHER = 0x0102040810204080  # takes the lowest bits of eight bytes to the highest byte
LANES = 16  # coordinates that are compared at a time


@dataclass(frozen=True)
class Output:
    """Arrays to which rows are written, entry by entry from `pos` on.

    Parameters
    ----------
    pos, count : cell
        The first entry of the row, and the number of its entries.
    keys : Var, optional
        Their coordinates. None where entries are only counted.
    values : sequence of Var
        One array for each result, none where entries are only counted.
    initial : sequence of Expr
        The value of an element before the first statement sets it.
    blocks : sequence of tuple of Expr
        Of each result how many elements a coordinate has; nothing where that is one.
    least : Var, optional
        Entries with smaller values, and NaN, may be omitted, where that saves work.
    """

    pos: Var
    count: Var
    keys: Var | None
    values: Sequence[Var]
    initial: Sequence[ir.Expr]
    blocks: Sequence[tuple[ir.Expr, ...]] = ()
    least: Var | None = None

    def counted(self, place: ir.Expr) -> ir.Expr:
        """Return the number of entries just written at a position: one, or zero if the next entry overwrites it."""
        if self.least is None:
            return long(1)
        value = cast(tirx.BufferLoad(self.values[0], [place]), str(self.least.ty.dtype))
        return cast(value >= self.least, LONG)

    @property
    def counts_only(self) -> bool:
        """Whether only the length of each row is computed."""
        return self.keys is None


class Accumulator(Protocol):
    """Interface of a row accumulator."""

    def begin(self) -> list[tirx.Stmt]:
        """Emit the code before a row."""

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        """Enter a coordinate, a variable or a constant."""

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        """Return the array with the value of a coordinate just entered, and the subscripts of it, or of its block."""

    def finish(self) -> list[tirx.Stmt]:
        """Write the row to the output and count its entries."""


def loop(name: str, extent: ir.Expr, body: list[tirx.Stmt]) -> tuple[Var, tirx.Stmt]:
    """Return a serial loop with a 64-bit variable."""
    var = Var(name, ir.PrimType(LONG))
    return var, serial(var, extent, seq(*body))


def each(block: tuple[ir.Expr, ...], stmt: Callable[[list[ir.Expr]], tirx.Stmt]) -> tirx.Stmt:
    """Emit a statement for each element of a block, given its subscript; without a block, one with no subscript."""
    if not block:
        return stmt([])
    var = Var("inner", ir.PrimType(LONG))
    return serial(var, block[0], stmt([var]))


def stored(target: Var, at: list[ir.Expr], value: ir.Expr) -> Callable[[list[ir.Expr]], tirx.Stmt]:
    """Return a store of one value in each element of a block."""
    return lambda e: tirx.BufferStore(target, cast(value, str(target.ty.dtype)), [*at, *e])


def copied(target: Var, to: list[ir.Expr], source: Var, at: list[ir.Expr]) -> Callable[[list[ir.Expr]], tirx.Stmt]:
    """Return a copy of each element of a block."""
    return lambda e: stored(target, to, tirx.BufferLoad(source, [*at, *e]))(e)


def taken_out(arrays: Sequence[Var], at: list[ir.Expr], out: Output, place: ir.Expr) -> list[tirx.Stmt]:
    """Copy the elements of a coordinate to an entry of the output, and reset them to their initial values."""
    stmts: list[tirx.Stmt] = []
    for array, values, initial, block in zip(arrays, out.values, out.initial, out.blocks, strict=True):
        stmts += [each(block, copied(values, [place], array, at)), each(block, stored(array, at, initial))]
    return stmts


def add(target: Var, amount: ir.Expr | int) -> tirx.Stmt:
    """Add an amount to a cell."""
    dtype = str(target.ty.dtype)
    return put(target, get(target) + (const(amount, dtype) if isinstance(amount, int) else cast(amount, dtype)))


def lowest(word: ir.Expr) -> ir.Expr:
    """Return the position of the lowest set bit of a word."""
    return tirx.call_llvm_pure_intrin(LONG, "llvm.cttz", word, const(True, "bool"))


@dataclass
class Insertion:
    """Sorted insertion into the row itself, for rows of a few entries.

    Without an output the coordinates are stored in an array on the stack.
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
        at, count, keys = self.at, self.out.count, self.held
        before = tirx.BufferLoad(keys, [tirx.max(self.base + get(at) - long(1), long(0))])
        search = tirx.While(tirx.And(get(at) > long(0), before > key), put(at, get(at) - long(1)))
        is_new = tirx.Or(get(at).equal(long(0)), before != key)
        step = Var("step", ir.PrimType(LONG))
        to = self.base + get(count) - step
        rows = [(keys, ()), *zip(self.out.values, self.out.blocks, strict=False)]
        shift = seq(*(each(block, copied(a, [to], a, [to - long(1)])) for a, block in rows))
        place = [self.base + get(at)]
        parts = zip(self.out.values, self.out.initial, self.out.blocks, strict=False)
        firsts = [each(block, stored(a, place, v)) for a, v, block in parts]
        moved = serial(step, get(count) - get(at), shift)
        insert = seq(moved, tirx.BufferStore(keys, key, place), *firsts, add(count, 1))
        return [put(at, get(count)), search, tirx.IfThenElse(is_new, insert, put(at, get(at) - long(1)))]

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.out.values[result], [self.base + get(self.at)]

    def finish(self) -> list[tirx.Stmt]:
        return []


@dataclass
class Ranked:
    """Dense array with an element for each coordinate, and a list of the entered ones, sorted by their ranks.

    For rows of up to `most` entries, however wide they are: the rank of a coordinate is the number of smaller ones,
    compared `LANES` at a time. Only the number of coordinates affects a branch. Between rows every element has its
    initial value and no mark is set.
    """

    out: Output
    chunk: Var
    arrays: Sequence[Var]
    marks: Var
    most: int
    dtype: str

    def __post_init__(self) -> None:
        room = -(-(self.most + 1) // LANES) * LANES
        self.listed, self.ranks = (
            tirx.decl_buffer([room], self.dtype, name=name, scope="local", layout=None) for name in ("listed", "ranks")
        )

    def begin(self) -> list[tirx.Stmt]:
        local = [self.listed] if self.out.counts_only else [self.listed, self.ranks]
        return [*alloc(*local), put(self.out.count, long(0))]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        mark, is_new = [self.chunk, cast(key, LONG)], Var("is_new", ir.PrimType(LONG))
        return [
            tirx.BufferStore(self.listed, cast(key, self.dtype), [get(self.out.count)]),
            tirx.Bind(is_new, long(1) - cast(tirx.BufferLoad(self.marks, mark), LONG)),
            tirx.BufferStore(self.marks, const(1, "uint8"), mark),
            add(self.out.count, is_new),
        ]

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.arrays[result], [self.chunk, cast(key, LONG)]

    def finish(self) -> list[tirx.Stmt]:
        step, key = Var("entry", ir.PrimType(LONG)), Var("key", ir.PrimType(LONG))
        place_of_key = [self.chunk, key]
        stmts = [tirx.Bind(key, cast(tirx.BufferLoad(self.listed, [step]), LONG))]
        clear = tirx.BufferStore(self.marks, const(0, "uint8"), place_of_key)
        if self.out.counts_only:
            return [serial(step, get(self.out.count), seq(*stmts, clear))]
        assert self.out.keys is not None
        place = Var("place", ir.PrimType(LONG))
        stmts += [tirx.Bind(place, get(self.out.pos) + cast(tirx.BufferLoad(self.ranks, [step]), LONG))]
        stmts += [tirx.BufferStore(self.out.keys, cast(key, str(self.out.keys.ty.dtype)), [place])]
        stmts += taken_out(self.arrays, place_of_key, self.out, place)
        return [self.ranked(), serial(step, get(self.out.count), seq(*stmts, clear))]

    def ranked(self) -> tirx.Stmt:
        """Compute the rank of each coordinate: the number of smaller ones."""
        part, compared = Var("part", ir.PrimType(LONG)), Var("other", ir.PrimType(LONG))
        lanes = tirx.Ramp(part * long(LANES), long(1), LANES)
        own_keys, ranks = (
            tirx.decl_buffer([LANES], self.dtype, name=name, scope="local", layout=None) for name in ("mine", "smaller")
        )
        all_lanes = tirx.Ramp(long(0), long(1), LANES)
        loaded = lambda array: tirx.BufferLoad(array, [all_lanes])  # noqa: E731
        less = tirx.Broadcast(tirx.BufferLoad(self.listed, [compared]), LANES) < loaded(own_keys)
        increment = loaded(ranks) + tirx.Broadcast(const(1, self.dtype), LANES)
        count = tirx.BufferStore(ranks, tirx.Select(less, increment, loaded(ranks)), [all_lanes])
        rank = [
            *alloc(own_keys, ranks),
            tirx.BufferStore(own_keys, tirx.BufferLoad(self.listed, [lanes]), [all_lanes]),
            tirx.BufferStore(ranks, tirx.Broadcast(const(0, self.dtype), LANES), [all_lanes]),
            serial(compared, get(self.out.count), count),
            tirx.BufferStore(self.ranks, loaded(ranks), [lanes]),
        ]
        parts = tirx.floordiv(get(self.out.count) + long(LANES - 1), long(LANES))
        return serial(part, parts, seq(*rank))


@dataclass
class Marked:
    """Dense array with an element for each coordinate, and marks for the entered ones.

    There is a byte for each block of 64 coordinates in `top`. Between rows every element has its initial value and no
    mark is set. Iterating over blocks gives the row in order. In a segment of the coordinates, `base` is the first and
    `blocks_count` the number of blocks.
    """

    out: Output
    chunk: Var
    arrays: Sequence[Var]
    marks: Var
    top: Var
    base: ir.Expr | None = None
    blocks_count: ir.Expr | None = None

    def begin(self) -> list[tirx.Stmt]:
        return [put(self.out.count, long(0))]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        wide = cast(key, LONG)
        return [self.mark(wide), tirx.BufferStore(self.top, const(1, "uint8"), [self.chunk, wide >> long(6)])]

    def mark(self, key: ir.Expr) -> tirx.Stmt:
        """Mark a coordinate."""
        raise NotImplementedError

    def taken(self, block: Var, marks: Var) -> list[tirx.Stmt]:
        """Move the marks of a block to the bits of a cell, and clear them."""
        raise NotImplementedError

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.arrays[result], [self.chunk, cast(key, LONG)]

    def finish(self) -> list[tirx.Stmt]:
        blocks, bits, eight = cell("blocks", LONG), cell("marks", LONG), Var("s", ir.PrimType(LONG))
        number = self.top.ty.shape[1] if self.blocks_count is None else self.blocks_count
        count = tirx.floordiv(number, long(BYTES))
        return [*alloc(blocks, bits), serial(eight, count, self.blocks(eight, blocks, bits))]

    def blocks(self, eight: Var, blocks: Var, marks: Var) -> tirx.Stmt:
        """Write the entries of eight blocks."""
        block = Var("block", ir.PrimType(LONG))
        if self.out.counts_only:
            entries: tirx.Stmt = add(self.out.count, tirx.popcount(get(marks)))
        else:
            entries = tirx.While(get(marks) != long(0), seq(*self._entry(block * long(WORD), marks)))
        inner = [tirx.Bind(block, eight * long(BYTES) + (lowest(get(blocks)) >> long(3)))]
        inner += [*self.taken(block, marks), entries, put(blocks, get(blocks) & (get(blocks) - long(1)))]
        visit = seq(self.clear(self.top, eight * long(BYTES), BYTES), tirx.While(get(blocks) != long(0), seq(*inner)))
        take = put(blocks, self.eight(self.top, eight * long(BYTES)))
        return seq(take, tirx.IfThenElse(get(blocks) != long(0), visit, None))

    def eight(self, array: Var, first: ir.Expr) -> ir.Expr:
        """Return eight bytes as a word."""
        return tirx.reinterpret(LONG, tirx.BufferLoad(array, [self.chunk, tirx.Ramp(first, long(1), BYTES)]))

    def clear(self, array: Var, first: ir.Expr, count: int) -> tirx.Stmt:
        """Clear bytes from `first` on."""
        place = [self.chunk, tirx.Ramp(first, long(1), count)]
        return tirx.BufferStore(array, tirx.Broadcast(const(0, "uint8"), count), place)

    def _entry(self, first: ir.Expr, marks: Var) -> list[tirx.Stmt]:
        """Write the entry of the lowest bit."""
        key, place = Var("key", ir.PrimType(LONG)), Var("place", ir.PrimType(LONG))
        assert self.out.keys is not None
        stmts: list[tirx.Stmt] = [tirx.Bind(key, first + lowest(get(marks)))]
        stmts += [tirx.Bind(place, get(self.out.pos) + get(self.out.count))]
        coordinate = key if self.base is None else self.base + key
        stmts += [tirx.BufferStore(self.out.keys, cast(coordinate, str(self.out.keys.ty.dtype)), [place])]
        stmts += taken_out(self.arrays, [self.chunk, key], self.out, place)
        return [*stmts, add(self.out.count, self.out.counted(place)), put(marks, get(marks) & (get(marks) - long(1)))]


class Bits(Marked):
    """Marks in a bitmap, for rows with few entries in a block."""

    def mark(self, key: ir.Expr) -> tirx.Stmt:
        place = [self.chunk, key >> long(6)]
        word = tirx.BufferLoad(self.marks, place)
        return tirx.BufferStore(self.marks, word | (long(1) << (key & long(63))), place)

    def taken(self, block: Var, marks: Var) -> list[tirx.Stmt]:
        place = [self.chunk, block]
        return [put(marks, tirx.BufferLoad(self.marks, place)), tirx.BufferStore(self.marks, long(0), place)]


@dataclass
class Tiered(Bits):
    """Marks in a bitmap, with a byte for each 64 blocks in `high`, for rows with few entries in a wide result.

    Iterating over all blocks of such a row would take longer than accumulating it.
    """

    high: Var = field(kw_only=True)

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        place = [self.chunk, cast(key, LONG) >> long(12)]
        return [*super().enter(key), tirx.BufferStore(self.high, const(1, "uint8"), place)]

    def finish(self) -> list[tirx.Stmt]:
        groups, blocks, marks = (cell(name, LONG) for name in ("groups", "blocks", "marks"))
        step, part, eight, group = (Var(name, ir.PrimType(LONG)) for name in ("g", "e", "s", "group"))
        first = tirx.Bind(group, step * long(BYTES) + (lowest(get(groups)) >> long(3)))
        one = seq(tirx.Bind(eight, group * long(WORD // BYTES) + part), self.blocks(eight, blocks, marks))
        drop = put(groups, get(groups) & (get(groups) - long(1)))
        inner = seq(first, serial(part, long(WORD // BYTES), one), drop)
        nonzero = seq(self.clear(self.high, step * long(BYTES), BYTES), tirx.While(get(groups) != long(0), inner))
        take = put(groups, self.eight(self.high, step * long(BYTES)))
        visit = seq(take, tirx.IfThenElse(get(groups) != long(0), nonzero, None))
        count = tirx.floordiv(self.high.ty.shape[1], long(BYTES))
        return [*alloc(groups, blocks, marks), serial(step, count, visit)]


class Bytes(Marked):
    """Marks in bytes, for rows with many entries in a block, where updates of one word would depend on each other."""

    def mark(self, key: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(self.marks, const(1, "uint8"), [self.chunk, key])

    def taken(self, block: Var, marks: Var) -> list[tirx.Stmt]:
        part = Var("e", ir.PrimType(LONG))
        eight = self.eight(self.marks, block * long(WORD) + part * long(BYTES))
        bits = ((eight * long(GATHER)) >> long(WORD - BYTES)) & long(255)
        packed = unrolled(part, WORD // BYTES, put(marks, get(marks) | (bits << (part * long(BYTES)))))
        return [put(marks, long(0)), packed, self.clear(self.marks, block * long(WORD), WORD)]


@dataclass
class Table:
    """Hash table with open addressing, for rows that are too wide for an array.

    A slot holds a coordinate plus one, or zero; between rows all are zero. Coordinates are written in order of entry,
    and sorted in the end.
    """

    out: Output
    chunk: Var
    arrays: Sequence[Var]
    slots: Var
    most: ir.Expr
    at: Var = field(default_factory=lambda: cell("at", LONG))
    mask: Var = field(default_factory=lambda: cell("mask", LONG))

    def begin(self) -> list[tirx.Stmt]:
        return [*alloc(self.at, self.mask), put(self.mask, slots_of(self.most) - long(1)), put(self.out.count, long(0))]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        wide, place = cast(key, LONG), [self.chunk, get(self.at)]
        stmts: list[tirx.Stmt] = [tirx.BufferStore(self.slots, wide + long(1), place)]
        parts = zip(self.arrays, self.out.initial, self.out.blocks, strict=False)
        stmts += [each(block, stored(a, place, v)) for a, v, block in parts]
        if self.out.keys is not None:
            entry = [get(self.out.pos) + get(self.out.count)]
            stmts.append(tirx.BufferStore(self.out.keys, cast(wide, str(self.out.keys.ty.dtype)), entry))
        new = tirx.IfThenElse(self.slot.equal(long(0)), seq(*stmts, add(self.out.count, 1)), None)
        return [*self.found(wide), new]

    @property
    def slot(self) -> ir.Expr:
        return tirx.BufferLoad(self.slots, [self.chunk, get(self.at)])

    def found(self, key: ir.Expr) -> list[tirx.Stmt]:
        """Probe for the slot of a coordinate, or a free one."""
        spread = (key * long(SPREAD)) >> long(WORD // 2)
        is_other = tirx.And(self.slot != long(0), self.slot != key + long(1))
        following = put(self.at, (get(self.at) + long(1)) & get(self.mask))
        return [put(self.at, (spread ^ key) & get(self.mask)), tirx.While(is_other, following)]

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.arrays[result], [self.chunk, get(self.at)]

    def finish(self) -> list[tirx.Stmt]:
        step = Var("slot", ir.PrimType(LONG))
        none = tirx.BufferStore(self.slots, long(0), [self.chunk, step])
        clear = serial(step, get(self.mask) + long(1), none)
        return [clear] if self.out.counts_only else [*self.sorted(), self.fetched(), clear]

    def sorted(self) -> list[tirx.Stmt]:
        """Sort the coordinates of the row (Shell sort)."""
        keys = self.out.keys
        assert keys is not None
        gap, to, inserted = cell("gap", LONG), cell("to", LONG), cell("held", str(keys.ty.dtype))
        step = Var("step", ir.PrimType(LONG))
        base = get(self.out.pos)
        before = tirx.BufferLoad(keys, [base + tirx.max(get(to) - get(gap), long(0))])
        shift = seq(tirx.BufferStore(keys, before, [base + get(to)]), put(to, get(to) - get(gap)))
        insert = [put(to, get(gap) + step), put(inserted, tirx.BufferLoad(keys, [base + get(gap) + step]))]
        insert += [tirx.While(tirx.And(get(to) >= get(gap), before > get(inserted)), shift)]
        insert += [tirx.BufferStore(keys, get(inserted), [base + get(to)])]
        smaller = put(gap, tirx.max(tirx.floordiv(get(gap) * long(5), long(11)), long(1)))
        rounds = seq(smaller, serial(step, get(self.out.count) - get(gap), seq(*insert)))
        return [*alloc(gap, to, inserted), put(gap, get(self.out.count)), tirx.While(get(gap) > long(1), rounds)]

    def fetched(self) -> tirx.Stmt:
        """Write the value of each coordinate."""
        assert self.out.keys is not None
        step = Var("entry", ir.PrimType(LONG))
        place = [get(self.out.pos) + step]
        stmts = self.found(cast(tirx.BufferLoad(self.out.keys, place), LONG))
        for array, values, block in zip(self.arrays, self.out.values, self.out.blocks, strict=True):
            stmts.append(each(block, copied(values, place, array, [self.chunk, get(self.at)])))
        return serial(step, get(self.out.count), seq(*stmts))


@dataclass
class Stamped:
    """The elements of a row under a mask, stored contiguously in the order of the mask's row.

    Parameters
    ----------
    out : Output
    chunk : Var
    arrays : sequence of Var
        For each chunk the elements of a row, behind `DUMPS` others.
    seen : Var
        Which of them were entered, as bytes. Between rows none is, and each has its initial value.
    places : Var
        Maps each coordinate to the position of its element, for each chunk. Between rows it is one of the first `DUMPS`
        elements, which are never read: coordinates outside the mask are added up there, without an unpredictable
        branch.
    count : Expr
        Entries of the mask's row.
    coordinate : callable
        Returns the coordinate of one of them.
    whole : bool
        Whether elements that were not entered are written, too.
    """

    out: Output
    chunk: Var
    arrays: Sequence[Var]
    seen: Var
    places: Var
    count: ir.Expr
    coordinate: Callable[[Var], ir.Expr]
    whole: bool = False
    slot: Var = field(init=False)

    def begin(self) -> list[tirx.Stmt]:
        step = Var("step", ir.PrimType(LONG))
        key, slot = Var("key", ir.PrimType(LONG)), Var("slot", ir.PrimType(LONG))
        stamp = tirx.BufferStore(self.places, cast(slot, "int32"), [self.chunk, key])
        bound = [tirx.Bind(key, self.coordinate(step)), tirx.Bind(slot, step + long(DUMPS))]
        return [put(self.out.count, long(0)), serial(step, self.count, seq(*bound, stamp))]

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        slot = Var("slot", ir.PrimType(LONG))
        place = cast(tirx.BufferLoad(self.places, [self.chunk, cast(key, LONG)]), LONG)
        return [tirx.Bind(slot, place), *self.enter_at(slot)]

    def enter_at(self, slot: Var) -> list[tirx.Stmt]:
        """Enter a coordinate whose element's position is known."""
        self.slot = slot
        return [tirx.BufferStore(self.seen, const(1, "uint8"), [self.chunk, slot])]

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.arrays[result], [self.chunk, self.slot]

    def finish(self) -> list[tirx.Stmt]:
        step = Var("step", ir.PrimType(LONG))
        key, slot = Var("key", ir.PrimType(LONG)), Var("slot", ir.PrimType(LONG))
        bound = [tirx.Bind(key, self.coordinate(step)), tirx.Bind(slot, step + long(DUMPS))]
        none = tirx.BufferStore(self.places, cast(key & long(DUMPS - 1), "int32"), [self.chunk, key])
        return [serial(step, self.count, seq(*bound, none, *self.written(key, slot), *self.cleared(slot)))]

    def written(self, key: Var, slot: Var) -> list[tirx.Stmt]:
        """Write the entry of a coordinate if it was entered.

        A single element is always written, without an unpredictable branch: if it was not entered, the next one
        overwrites it. A block of elements is written conditionally.
        """
        place = [get(self.out.pos) + get(self.out.count)]
        assert self.out.keys is not None
        stmts: list[tirx.Stmt] = [tirx.BufferStore(self.out.keys, cast(key, str(self.out.keys.ty.dtype)), place)]
        for array, values, block in zip(self.arrays, self.out.values, self.out.blocks, strict=True):
            stmts.append(each(block, copied(values, place, array, [self.chunk, slot])))
        is_entered = tirx.BufferLoad(self.seen, [self.chunk, slot])
        if self.whole:
            return [*stmts, add(self.out.count, 1)]
        if any(self.out.blocks):
            return [tirx.IfThenElse(is_entered != const(0, "uint8"), seq(*stmts, add(self.out.count, 1)), None)]
        return [*stmts, add(self.out.count, cast(is_entered, LONG))]

    def cleared(self, slot: Var) -> list[tirx.Stmt]:
        """Reset an element to its initial value."""
        parts = zip(self.arrays, self.out.initial, self.out.blocks, strict=True)
        firsts = [each(block, stored(a, [self.chunk, slot], v)) for a, v, block in parts]
        return [tirx.BufferStore(self.seen, const(0, "uint8"), [self.chunk, slot]), *firsts]


def slots_of(count: ir.Expr) -> ir.Expr:
    """Return a power of two that is more than twice as large as a number."""
    zeros = tirx.call_llvm_pure_intrin(LONG, "llvm.ctlz", count | long(1), const(False, "bool"))
    return long(1) << (long(WORD + 1) - zeros)


__all__ = ["KINDS", "ORDERS", "AccumulatorOptions", "Accumulators"]
