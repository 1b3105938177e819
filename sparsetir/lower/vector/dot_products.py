# SPDX-License-Identifier: Apache-2.0
"""Sums of products by dot-product instructions, and the nests and masks that they share with tile instructions.

before::

    for k in range(feat):
        c[i, k] = 0
    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.unit": 8}):
        for k in range(feat):
            c[i, k] = c[i, k] + a[indptr[i] + j] * b[indices[indptr[i] + j], k]

after::

    for k_0 in range((feat + 127) // 128):
        acc_0, acc_1, ... = 0
        for p in range((indptr[i + 1] - indptr[i] + 1) // 2):
            x, y = 32 columns of the rows of entries 2p and 2p + 1
            acc_0 = dot(acc_0, a[indptr[i] + 2 * p : 2 * p + 2], interleave_low(x, y))
            acc_1 = dot(acc_1, a[indptr[i] + 2 * p : 2 * p + 2], interleave_high(x, y))
            ...
        c[i, k_0 * 128 : ...] = acc_0, acc_1, ...

An instruction multiplies two bfloat16 or four 8-bit terms of a sum at once, which must lie side by side: entries of a
row do, and so do the columns of a block's row. The rows of the dense operand are interleaved in registers. Columns
behind the last one, and terms behind the last entry, are masked: the memory there is not read, and counts as zero.

With ``"sparsetir.unit_widens": 1`` as well, products of bfloat16 are added one term at a time as those of float32::

    for p in range(indptr[i + 1] - indptr[i]):
        x = 32 columns of the row of entry p
        acc_0 = fma(acc_0, a[indptr[i] + p], x << 16)
        acc_1 = fma(acc_1, a[indptr[i] + p], x & 0xFFFF0000)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.intrin.llvm_ir import IMPORT, LANES, functions, reading, widening_functions
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import collect, is_element, mentions, moves_by_one, seq, substitute
from sparsetir.ir.views import REDUCE, cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis import accesses
from sparsetir.lower.annotations import UNIT, WIDEN, refused
from sparsetir.lower.loops import join_neighbours, serial, with_, with_body

WORD = f"int32x{LANES}"


@dataclass(frozen=True, eq=False)
class ProductNest:
    """A nest of loops that adds a product to a result: loops outside in, the store, its factors and its guards.

    Only `b`, which counts as zero where `b_guard` does not hold, moves along the innermost loop. `others` are the nests
    of further products that the same store adds.
    """

    loops: list[tirx.For]
    store: tirx.BufferStore
    a: ir.TensorLoad
    b: ir.TensorLoad
    guards: list[ir.Expr]
    b_guard: ir.Expr | None
    others: tuple[Any, ...] = ()


def uncast(expr: Any) -> Any:
    """Return an expression without the conversions around it that keep every number."""
    while isinstance(expr, tirx.Cast) and np.can_cast(str(expr.value.ty.dtype), str(expr.ty.dtype)):
        expr = expr.value
    return expr


def is_one(expr: Any) -> bool:
    """Return whether an expression is the constant one."""
    return isinstance(expr, tirx.IntImm) and int(expr) == 1


def is_zero(expr: Any) -> bool:
    """Return whether an expression is the constant zero."""
    value = accesses.uncast(expr)
    return isinstance(value, (tirx.IntImm, tirx.FloatImm)) and float(value.value) == 0


def parse(loop: tirx.For, *, takes_sums: bool = False) -> ProductNest | None:
    """Return the nest of a loop whose only statement adds a product; None if it is another one.

    `takes_sums`: also a sum of products, as that of halves.
    """
    loops, guards, body = [], [], loop
    while isinstance(body, (tirx.For, tirx.IfThenElse)):
        if isinstance(body, tirx.For):
            loops.append(body)
            body = body.body
        elif body.else_case is None:
            guards.append(body.condition)
            body = body.then_case
        else:
            return None
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, tirx.Add) or len(loops) < 2:
        return None
    terms = [uncast(body.value.b)]
    while takes_sums and isinstance(terms[0], tirx.Add):
        terms = [uncast(terms[0].a), uncast(terms[0].b), *terms[1:]]
    if any("int" in str(term.ty.dtype) and str(term.ty.dtype) != str(body.value.ty.dtype) for term in terms):
        return None  # A product of narrower integers may wrap around.
    if not is_element(body.value.a, body) or not all(isinstance(term, tirx.Mul) for term in terms):
        return None
    first, *others = (_factors(loops, guards, body, term) for term in terms)
    if first is None or any(other is None for other in others):
        return None
    return replace(first, others=tuple(others))


def _factors(loops: list[tirx.For], guards: list[Any], store: tirx.BufferStore, term: tirx.Mul) -> ProductNest | None:
    column = loops[-1].loop_var
    sides = [uncast(term.a), uncast(term.b)]
    if not mentions(sides[1], [column]):
        sides.reverse()
    a, b = sides
    b_guard = None
    if dialect.is_if_then_else(b):
        if not is_zero(b.args[2]):
            return None
        b_guard, b = b.args[0], uncast(b.args[1])
    if not isinstance(a, ir.TensorLoad) or not isinstance(b, ir.TensorLoad) or mentions(a, [column]):
        return None
    return ProductNest(loops, store, a, b, guards, b_guard)


def order_of(block: Any) -> tuple[list[int], list[int]]:
    """Return which of a stage-II block's loops stay outside, and the order of the others for units.

    Loops that are reduced come first. A spatial loop of a constant extent right before them moves inside: the rows that
    share what is read of the dense operand.
    """
    ivs = list(block.iter_vars)
    first = next((n for n, iv in enumerate(ivs) if int(iv.iter_type) == REDUCE), len(ivs))
    rows = [n for n in range(max(first - 1, 0), first) if isinstance(ivs[n].dom.extent, tirx.IntImm)]
    rest = range(first, len(ivs))
    reduced = [n for n in rest if int(ivs[n].iter_type) == REDUCE] if rows else list(rest)
    spatial = [n for n in rest if n not in reduced]
    return [n for n in range(first) if n not in rows], [*reduced, *rows, *spatial]


def as_nest(block: Any) -> tirx.Stmt:
    """Return the loops of a stage-II block that units may take, in the order of `order_of`."""
    nest: tirx.Stmt = block.body
    for iv in reversed([block.iter_vars[n] for n in order_of(block)[1]]):
        nest = tirx.For(iv.var, const(0, str(iv.var.ty.dtype)), iv.dom.extent, tirx.ForKind.SERIAL, nest)
    return nest


def mask(first: int, count: int, left: Any, dtype: str) -> Any:
    """Return the bits of the `count` columns from `first` on that exist, of `left` (None: all)."""
    if left is None:
        return const(-1, dtype)
    here = tirx.max(tirx.min(cast(left, dtype) - const(first, dtype), const(count, dtype)), const(0, dtype))
    some = (const(1, dtype) << tirx.min(here, const(count - 1, dtype))) - const(1, dtype)
    return tirx.Select(here >= const(count, dtype), const(-1, dtype), some)


def bind(out: list[tirx.Stmt], name: str, value: Any, dtype: str | None = None) -> Var:
    """Append the definition of a variable, and return it."""
    var = Var(name, ir.PrimType(dtype or str(value.ty.dtype)))
    out.append(tirx.Bind(var, value))
    return var


def interleaved(out: list[tirx.Stmt], kind: str, rows: list[Var]) -> list[Var]:
    """Append statements that interleave rows of the dense operand, and return the vectors."""

    def pair(width: int, a: Var, b: Var) -> list[Var]:
        calls = (tirx.call_extern(WORD, f"st_{half}{width}_{kind}", a, b) for half in ("lo", "hi"))
        return [bind(out, "x", call, WORD) for call in calls]

    if kind == "bf16":
        return pair(16, rows[0], rows[1])
    (a, b), (c, d) = pair(8, rows[0], rows[1]), pair(8, rows[2], rows[3])
    return [*pair(16, a, c), *pair(16, b, d)]


# ---------------------------------------------------------------------------------------- dot products


SIGN_BITS = -0x7F7F7F80  # 0x80808080: turns signed into unsigned bytes, which are 128 more
# Registers for sums, of 32: with more, LLVM spills those of bfloat16, whose words it keeps in registers as well.
MAX_SUM_REGISTERS = {"bf16": 16, "int8": 24}
MAX_UNROLLED = 4  # Groups of rows of a block that are written out.


class DotNest(ProductNest):
    """A nest of loops whose innermost one runs along rows of the result and of one factor."""

    @property
    def columns(self) -> tirx.For:
        """The loop along the rows of the result."""
        return self.loops[-1]

    @property
    def rows(self) -> list[tirx.For]:
        return [lp for lp in self.loops[:-1] if mentions(list(self.store.indices), [lp.loop_var])]

    @property
    def reduced(self) -> list[tirx.For]:
        return [lp for lp in self.loops[:-1] if not mentions(list(self.store.indices), [lp.loop_var])]

    @property
    def kind(self) -> str:
        return "bf16" if str(self.a.source.ty.dtype) == "bfloat16" else "int8"

    @property
    def group(self) -> int:
        return 2 if self.kind == "bf16" else 4

    @property
    def result(self) -> str:
        """The dtype in which sums are stored: float32 in local arrays, as `PromoteHalves` makes those of 16 bits."""
        buffer = self.store.buffer
        dtype = str(buffer.ty.dtype)
        return "float32" if dtype == "bfloat16" and str(buffer.ty.storage_scope) == "local" else dtype


def match(loop: tirx.For) -> DotNest | None:
    """Match a nest whose innermost loop runs along rows of the result and of one factor."""
    product = parse(loop, takes_sums=True)
    if product is None:
        return None
    first, *others = (_bounded(DotNest(**{**vars(p), "others": ()})) for p in (product, *product.others))
    dtypes = {(str(nest.a.source.ty.dtype), str(nest.b.source.ty.dtype)) for nest in (first, *others)}
    if len(dtypes) > 1 or not all(_fits(nest, nest.columns.loop_var) for nest in (first, *others)):
        return None
    return replace(first, others=tuple(others))


def _bounded(nest: DotNest) -> DotNest:
    """Return a nest whose loop over columns ends where a guard of them does, as those of tiles do."""
    columns, guards = nest.columns, list(nest.guards)
    column, dtype = columns.loop_var, str(columns.loop_var.ty.dtype)
    extent = columns.extent
    for guard in nest.guards:
        is_bound = isinstance(guard, tirx.LT) and moves_by_one(guard.a, column) and not mentions(guard.b, [column])
        if is_bound and isinstance(columns.min, tirx.IntImm) and int(columns.min) == 0:
            left = cast(guard.b - substitute(guard.a, {column: const(0, dtype)}), dtype)
            extent = tirx.max(tirx.min(extent, left), const(0, dtype))
            guards = [x for x in guards if x is not guard]
    loops = [*nest.loops[:-1], with_(columns, extent=extent)]
    return replace(nest, loops=loops, guards=guards)


def _is_along(access: Any, column: Var) -> bool:
    """Return whether columns of an array lie side by side; dimensions of one element may follow them."""
    indices = list(access.indices)
    buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
    sizes = list(buffer.ty.shape)
    while len(indices) > 1 and isinstance(sizes[-1], tirx.IntImm) and int(sizes[-1]) == 1:
        indices.pop(), sizes.pop()
    return moves_by_one(indices[-1], column) and not mentions(indices[:-1], [column])


PAIRS = {
    ("bfloat16", "bfloat16"): ("bfloat16", "float32"),
    ("int8", "uint8"): ("int32",),
    ("uint8", "int8"): ("int32",),
    ("int8", "int8"): ("int32",),
}


def _fits(nest: DotNest, column: Var) -> bool:
    dtypes = str(nest.a.source.ty.dtype), str(nest.b.source.ty.dtype)
    if nest.result not in PAIRS.get(dtypes, ()):
        return False
    if not all(_is_along(x, column) for x in (nest.store, nest.b)):
        return False
    rows, reduced = nest.rows, nest.reduced
    if not reduced or any(not isinstance(lp.extent, tirx.IntImm) for lp in rows):
        return False
    inner = reduced[-1]
    is_whole = not isinstance(inner.extent, tirx.IntImm) or int(inner.extent) % nest.group == 0
    steps, along = [lp.loop_var for lp in reduced], inner.loop_var
    if not is_whole or not moves_by_one(nest.a.indices[-1], along) or mentions(list(nest.a.indices)[:-1], [along]):
        return False
    if any(mentions(guard, [column, *steps]) for guard in nest.guards):
        return False
    variables = [lp.loop_var for lp in nest.loops]
    others = [lp for lp in nest.loops if lp is not inner]
    if any(mentions(lp.extent, variables) for lp in others) or mentions(inner.extent, [lp.loop_var for lp in rows]):
        return False
    return not mentions(nest.b, [lp.loop_var for lp in rows])


def match_body(block: Any, kinds: frozenset[str]) -> bool:
    """Return whether a stage-II block's loops match, and need one of these kinds of dot products."""
    nest = match(as_nest(block))
    if nest is None or nest.kind not in kinds:
        return False
    return block.init is not None or nest.result != "bfloat16"  # which would be rounded before each sum


def is_initial(stmt: tirx.Stmt, nest: DotNest) -> bool:
    """Return whether a statement only sets elements of the result to zero."""
    stores = collect(stmt, tirx.BufferStore)
    return len(stores) == 1 and is_zero(stores[0].value) and stores[0].buffer.same_as(nest.store.buffer)


class _DotEmitter:
    """Emitter of the tiles of one nest."""

    def __init__(self, nest: DotNest, *, adds: bool) -> None:
        self.adds = adds
        self.nest, self.kind, self.group = nest, nest.kind, nest.group
        self.terms, self.order = self.group, "order"  # terms of one instruction, and the permutation that orders sums
        self.inner = nest.reduced[-1]
        self.is_ragged = not isinstance(self.inner.extent, tirx.IntImm)
        self.acc = f"float32x{LANES}" if self.kind == "bf16" else WORD
        self.shifted = str(nest.a.source.ty.dtype) == str(nest.b.source.ty.dtype) == "int8"
        self.column = nest.columns.loop_var
        self.dtype = str(self.column.ty.dtype)

    def call(self, dtype: str, name: str, *arguments: Any) -> Any:
        return tirx.call_extern(dtype, f"st_{name}_{self.kind}", *arguments)

    def emit(self, widest: int) -> tirx.Stmt:
        """Return all rows in groups, each over all columns in tiles."""
        places: list[dict[Var, Any]] = [{}]
        for lp in self.nest.rows:
            places = [
                {**p, lp.loop_var: const(n, str(lp.loop_var.ty.dtype))} for p in places for n in range(int(lp.extent))
            ]
        most = self.vectors(len(places), widest)
        together = max(1, MAX_SUM_REGISTERS[self.kind] // most)
        groups = [places[n : n + together] for n in range(0, len(places), together)]
        if len(groups) > MAX_UNROLLED and len(self.nest.rows) == 1 and len(places) % together == 0:
            body = self.looped(together, most)
        else:
            body = seq(*(self.columns(rows, most) for rows in groups))
        text = functions(self.kind, self.nest.result) + self.more_functions()
        text += reading(self.kind, self.nest.result) if self.adds else ""
        return tirx.AttrStmt(const(0), IMPORT, ir.StringImm(text), body)

    def more_functions(self) -> str:
        return ""

    def looped(self, together: int, most: int) -> tirx.Stmt:
        """Return a loop over groups of rows: to write out those of large blocks takes LLVM seconds."""
        (rows,) = self.nest.rows
        dtype = str(rows.loop_var.ty.dtype)
        group = Var(f"{rows.loop_var.name}_0", rows.loop_var.ty)
        places = [{rows.loop_var: group * const(together, dtype) + const(n, dtype)} for n in range(together)]
        return serial(group, const(int(rows.extent) // together, dtype), self.columns(places, most))

    def vectors(self, rows: int, widest: int) -> int:
        """Return the registers of a row of a full tile: a multiple of the parts that interleaved rows have."""
        vectors = max(widest // LANES, self.group)
        limit = MAX_SUM_REGISTERS[self.kind]
        while vectors > self.group and min(rows, limit // self.group) * vectors > limit:
            vectors //= 2
        return vectors

    def columns(self, rows: list[dict[Var, Any]], most: int) -> tirx.Stmt:
        """Return full tiles of columns, and a narrower one for the columns that are left."""
        width, tile = self.nest.columns.extent, const(most * LANES, self.dtype)
        k_0 = Var("k_0", self.column.ty)
        full = serial(k_0, tirx.floordiv(width, tile), self.tile(rows, most, k_0 * tile, None))
        left, begin = tirx.floormod(width, tile), tirx.floordiv(width, tile) * tile
        rest: tirx.Stmt = self.tile(rows, most, begin, left)
        narrow = most // 2
        while narrow >= self.group:
            fits = left <= const(narrow * LANES, self.dtype)
            rest = self.chosen(fits, self.tile(rows, narrow, begin, left), rest)
            narrow //= 2
        few = left <= const(LANES, self.dtype)
        rest = self.chosen(few, self.tile(rows, 1, begin, left), rest)
        return seq(full, tirx.IfThenElse(left > const(0, self.dtype), rest, None))

    def chosen(self, condition: Any, first: tirx.Stmt, second: tirx.Stmt) -> tirx.Stmt:
        return tirx.IfThenElse(condition, first, second)

    def tile(self, rows: list[dict[Var, Any]], vectors: int, begin: Any, left: Any) -> tirx.Stmt:
        """Return a tile of columns from `begin` on, of which `left` exist (None: all)."""
        sums = [[self.register(f"acc_{r}_{v}") for v in range(vectors)] for r in range(len(rows))]
        shifts = [self.register(f"shift_{r}") for r in range(len(rows))] if self.shifted else []
        buffers = [*(x for row in sums for x in row), *shifts]
        zero = tirx.Broadcast(tirx.const(0, self.acc.partition("x")[0]), LANES)
        begin_stmts = [*(tirx.AllocBuffer(x) for x in buffers), *(put(x, zero) for x in buffers)]
        steps = self.steps(rows, sums, shifts, begin, left)
        end = [self.finish(row, sums[r], shifts[r] if shifts else None, begin, left) for r, row in enumerate(rows)]
        return seq(*begin_stmts, steps, *end)

    def register(self, name: str) -> tirx.Buffer:
        """Return a buffer for one vector of sums."""
        return tirx.decl_buffer([LANES], self.acc.partition("x")[0], name, scope="local", layout=None)

    def steps(self, rows: Any, sums: Any, shifts: Any, begin: Any, left: Any) -> tirx.Stmt:
        step = Var("step", self.inner.loop_var.ty)
        dtype, group = str(step.ty.dtype), self.terms
        extent = self.inner.extent
        at = step * const(group, dtype)
        whole = serial(
            step, tirx.floordiv(extent, const(group, dtype)), self.step(rows, sums, shifts, begin, left, at, None)
        )
        body: tirx.Stmt = whole
        if self.is_ragged and group > 1:
            last = tirx.floordiv(extent, const(group, dtype)) * const(group, dtype)
            rest = self.step(rows, sums, shifts, begin, left, last, extent - last)
            body = seq(whole, tirx.IfThenElse(last < extent, rest, None))
        for lp in reversed(self.nest.reduced[:-1]):
            body = tirx.For(lp.loop_var, lp.min, lp.extent, lp.kind, body)
        return body

    def step(self, rows: Any, sums: Any, shifts: Any, begin: Any, left: Any, at: Any, terms: Any) -> tirx.Stmt:
        """Return the products of one group of terms from `at` on; `terms` of them exist (None: all)."""
        nests = (self.nest, *self.nest.others)
        return seq(*(self.product(nest, rows, sums, shifts, begin, left, at, terms) for nest in nests))

    def product(
        self, nest: DotNest, rows: Any, sums: Any, shifts: Any, begin: Any, left: Any, at: Any, terms: Any
    ) -> tirx.Stmt:
        """Return the products of the factors of one nest."""
        out: list[tirx.Stmt] = []
        words = [bind(out, f"word_{r}", self.word(nest, row, at, terms), "int32") for r, row in enumerate(rows)]
        columns = [self.place(at, t, terms, str(self.inner.loop_var.ty.dtype)) for t in range(self.terms)]
        if len(sums[0]) == 1:
            value = bind(out, "x", self.few(nest, columns, begin, left), WORD)
            out += [self.dot(sums[r][0], words[r], value) for r in range(len(rows))]
        for part in range(len(sums[0]) // self.group):
            loaded = [
                bind(out, f"row_{t}", self.row(nest, part, place, exists, begin, left), WORD)
                for t, (place, exists) in enumerate(columns)
            ]
            for v, value in enumerate(self.spread(out, loaded)):
                for r in range(len(rows)):
                    out.append(self.dot(sums[r][part * self.group + v], words[r], value))
        for shift, word in zip(shifts, words, strict=False):
            out.append(self.dot(shift, word, tirx.Broadcast(const(SIGN_BITS), LANES)))
        return seq(*out)

    def spread(self, out: list[tirx.Stmt], loaded: list[Var]) -> list[Var]:
        """Append statements that form the operands of instructions from the loaded rows, and return these operands."""
        return interleaved(out, self.kind, loaded)

    def word(self, nest: DotNest, row: dict[Var, Any], at: Any, terms: Any) -> Any:
        """Return the entries of one group of terms, side by side in 32 bits."""
        load = substitute(tirx.address_of(nest.a), {**row, self.inner.loop_var: at})
        if terms is None:
            return self.call("int32", "full", load)
        return self.call("int32", "word", load, (const(1) << cast(terms, "int32")) - const(1))

    def row(self, nest: DotNest, part: int, place: Any, exists: Any, begin: Any, left: Any) -> Any:
        """Return a vector of the dense operand's row at `place`, zero where the term or the column does not exist."""
        per_load = LANES * self.group
        moved = {self.inner.loop_var: place, self.column: begin + const(part * per_load, self.dtype)}
        where = substitute(tirx.address_of(nest.b), moved)
        if left is None:  # Masked loads are slower than to choose the address.
            holds = self.existing(nest, const(1), moved, exists)
            values = self.call(WORD, "whole", where) if is_one(holds) else self.call(WORD, "either", where, holds)
        else:
            bits = self.existing(nest, mask(part * per_load, per_load, left, "int64"), moved, exists)
            values = self.call(WORD, "rows", where, bits)
        return self.unsigned(values)

    def existing(self, nest: DotNest, bits: Any, moved: dict[Var, Any], exists: Any) -> Any:
        """Return the bits of columns, none where the term does not exist."""
        conditions = [exists] if exists is not None else []
        if nest.b_guard is not None:
            conditions.append(substitute(nest.b_guard, moved))
        for condition in conditions:
            bits = tirx.Select(condition, bits, const(0, str(bits.ty.dtype)))
        return bits

    def unsigned(self, values: Any) -> Any:
        return tirx.bitwise_xor(values, tirx.Broadcast(const(SIGN_BITS), LANES)) if self.shifted else values

    def few(self, nest: DotNest, columns: list[tuple[Any, Any]], begin: Any, left: Any) -> Any:
        """Return one register with up to 16 columns of the rows of a group, interleaved."""
        addresses, masks = [], []
        for place, exists in columns:
            moved = {self.inner.loop_var: place, self.column: begin}
            addresses.append(substitute(tirx.address_of(nest.b), moved))
            masks.append(self.existing(nest, mask(0, LANES, left, "int32"), moved, exists))
        return self.unsigned(self.call(WORD, "few", *addresses, *masks))

    def place(self, at: Any, t: int, terms: Any, dtype: str) -> tuple[Any, Any]:
        """Return the position of a term, and the condition that it exists (None: always)."""
        position = at + const(t, dtype)
        if terms is None or t == 0:
            return position, None
        return tirx.min(position, at + terms - const(1, dtype)), const(t, dtype) < terms

    def dot(self, acc: Any, word: Any, value: Any) -> tirx.Stmt:
        order = "sb" if str(self.nest.a.source.ty.dtype) == "uint8" else "bs"
        return put(acc, self.call(self.acc, f"dot_{order}", get(acc), word, value))

    def finish(self, row: Any, sums: Any, shift: Any, begin: Any, left: Any) -> tirx.Stmt:
        """Return the stores of a row's sums, in the order of the columns."""
        out: list[tirx.Stmt] = []
        totals = [get(x) if shift is None else get(x) - get(shift) for x in sums]
        for part in range(-(-len(sums) // self.group)):
            values = totals[part * self.group : (part + 1) * self.group]
            for v in range(len(values)):
                first = (part * self.group + v) * LANES
                ordered = values[v] if len(sums) == 1 else self.call(self.acc, f"{self.order}_{v}", *values)
                at = substitute(
                    tirx.BufferLoad(self.nest.store.buffer, self.nest.store.indices),
                    {**row, self.column: begin + const(first, self.dtype)},
                )
                bits = mask(first, LANES, left, "int32")
                if self.adds:
                    before = tirx.call_extern(self.acc, f"st_get_{self.nest.result}", tirx.address_of(at), bits)
                    ordered = ordered + before
                out.append(
                    tirx.Evaluate(
                        tirx.call_extern("void", f"st_put_{self.nest.result}", tirx.address_of(at), ordered, bits)
                    )
                )
        body = seq(*out)
        for guard in self.nest.guards:
            body = tirx.IfThenElse(substitute(guard, row), body, None)
        return body


class _WideningEmitter(_DotEmitter):
    """Emitter of multiply-adds of float32: even and odd columns of a row of bfloat16 are widened in registers."""

    def __init__(self, nest: DotNest, *, adds: bool) -> None:
        super().__init__(nest, adds=adds)
        self.terms, self.order = 1, "alternate"

    def more_functions(self) -> str:
        return widening_functions()

    def spread(self, out: list[tirx.Stmt], loaded: list[Var]) -> list[Var]:
        return [bind(out, "x", self.call(WORD, half, loaded[0]), WORD) for half in ("even", "odd")]

    def word(self, nest: DotNest, row: dict[Var, Any], at: Any, terms: Any) -> Any:
        return self.call("int32", "wide", substitute(tirx.address_of(nest.a), {**row, self.inner.loop_var: at}))

    def tile(self, rows: list[dict[Var, Any]], vectors: int, begin: Any, left: Any) -> tirx.Stmt:
        if vectors > 1:
            return super().tile(rows, vectors, begin, left)
        # The latency of a sum in one register counts, and a dot product adds two terms.
        return _DotEmitter(self.nest, adds=self.adds).tile(rows, vectors, begin, left)

    def dot(self, acc: Any, word: Any, value: Any) -> tirx.Stmt:
        return put(acc, self.call(self.acc, "fma", get(acc), word, value))


def get(buffer: Any) -> Any:
    """Return the whole local register."""
    return tirx.BufferLoad(buffer, [tirx.Ramp(const(0), const(1), LANES)])


def put(buffer: Any, value: Any) -> tirx.Stmt:
    """Set the whole local register."""
    return tirx.BufferStore(buffer, value, [tirx.Ramp(const(0), const(1), LANES)])


def _emitter(loop: tirx.For, nest: DotNest, *, adds: bool) -> _DotEmitter:
    is_widening = WIDEN in loop.annotations and nest.kind == "bf16"
    return (_WideningEmitter if is_widening else _DotEmitter)(nest, adds=adds)


def _with_initialization(before: tirx.Stmt, stmt: tirx.Stmt) -> tirx.Stmt | None:
    """Return the instructions of an annotated loop whose results the statement before initialises, or None."""
    nest = match(stmt) if isinstance(stmt, tirx.For) and UNIT in stmt.annotations else None
    if nest is None or not is_initial(before, nest):
        return None
    return _emitter(stmt, nest, adds=False).emit(int(stmt.annotations[UNIT]))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.UseDotProducts")
def UseDotProducts(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite the annotated loops of a function."""
    if not any(UNIT in lp.annotations for lp in collect(func.body, tirx.For)):
        return func

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*join_neighbours(node.seq, _with_initialization, mutator.mutate))

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        nest = match(node) if UNIT in node.annotations else None
        if nest is not None and nest.result != "bfloat16":
            return _emitter(node, nest, adds=True).emit(int(node.annotations[UNIT]))
        changed = mutator.default_mutate(node)
        return refused(changed, UNIT, "it is no sum of products of entries and rows, or rounded again and again")

    return with_body(func, structural_mutate(func.body, [(tirx.SeqStmt, on_seq), (tirx.For, on_for)]))


__all__ = [
    "WORD",
    "ProductNest",
    "UseDotProducts",
    "as_nest",
    "bind",
    "interleaved",
    "is_zero",
    "mask",
    "order_of",
    "parse",
    "uncast",
]
