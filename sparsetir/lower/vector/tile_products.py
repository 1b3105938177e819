# SPDX-License-Identifier: Apache-2.0
"""Sums of products of blocks of rows and gathered rows, by tile instructions.

before::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.tile": 4}):
        for ii, ji, k in T.grid(16, 4, feat):
            c[i * 16 + ii, k] = c[i * 16 + ii, k] + a[indptr[i] + j, ii, ji] * b[indices[indptr[i] + j] * 4 + ji, k]

after::

    terms = (indptr[i + 1] - indptr[i]) * 4
    for k_0 in range((feat + 63) // 64):
        tiles 0, 1, 2, 3 = 0
        for q_0 in range((terms + 4095) // 4096):
            steps = the number of tiles of terms 4096 * q_0, ...
            left = the entries of these terms of 16 rows, for each row side by side (once if it is all of them)
            for q_1 in range(steps + 1):
                if q_1 < steps:
                    right[q_1 % 2] = 64 columns of 32 rows of b, two rows interleaved
                if q_1 > 0:
                    tile 6 = left[q_1 - 1]
                    for v in range(4):
                        tile 4 = right[(q_1 - 1) % 2, v]
                        tile v += tile 6 * tile 4
        c[i * 16 : i * 16 + 16, k_0 * 64 : k_0 * 64 + 64] = tiles 0, 1, 2, 3

A term is a column of the blocks that has a place in the sum: its entries lie in `rows` of a tile, and its row of the
dense operand is gathered. A tile holds 32 terms of bfloat16 or 64 of 8 bits, of which two or four lie side by side.
Terms behind the last one, those that a guard leaves out, and columns behind the last one are zero in both operands:
the memory there is not read. Rows that a guard leaves out are computed where blocks store them, and not written.
Masked loads are slower: they are for tiles that lack terms or columns. Tiles are multiplied one step after the rows are
interleaved, because a tile cannot be loaded from stores that are not complete.

Entries are read where they lie if a block's row is a whole number of tiles, and laid out otherwise: in vectors if the
entries of a column lie side by side, and else in runs of those that do.

The matrix unit of a thread is configured where it is used, and emulated where the target says so.

before::

    for chunk in T.parallel(chunks):
        for i in range(begin[chunk], begin[chunk + 1]):
            st_tile_zero_0()
            ...

after::

    for chunk in T.parallel(chunks):
        configuration = T.alloc_buffer((64,), "uint8")
        configuration[0] = 1
        ...
        st_tile_config(address_of(configuration[0]))
        for i in range(begin[chunk], begin[chunk + 1]):
            st_tile_zero_0()
            ...
        st_tile_release()

The registers of tiles belong to a thread: they are configured inside parallel loops, and released before a thread goes
on to other work, so that the operating system saves no more state of it than of others. Emulated tiles are an array of
the thread, which each function takes as its first argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.intrin import tiles
from sparsetir.intrin.emulation import STATE_BYTES, define_tiles, emulate
from sparsetir.intrin.llvm_ir import BYTES, IMPORT, LANES, functions, reading, tile_functions
from sparsetir.ir.rewriting import collect, conjuncts, mentions, moves_by_one, same, seq, substitute
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import EMULATED, TILE, refused
from sparsetir.lower.loops import PARALLEL, join_neighbours, serial, with_, with_body
from sparsetir.lower.vector.dot_products import WORD, ProductNest, as_nest, bind, interleaved, is_zero, mask, parse

WORDS = tiles.ROWS * LANES  # 32-bit words of a tile
STEPS = 128  # tiles of terms whose entries are laid out at once
MAX_ROW_TILES = 2  # that share the gathered rows, where two tiles of columns are enough
LEAST_ROWS, MOST_ROWS = 8, 64
LEFT, RIGHT = (6, 7), (4, 5)  # registers of the operands; sums are in those before
INSTRUCTIONS = {
    ("bfloat16", "bfloat16"): "tdpbf16ps",
    ("int8", "int8"): "tdpbssd",
    ("int8", "uint8"): "tdpbsud",
    ("uint8", "int8"): "tdpbusd",
    ("uint8", "uint8"): "tdpbuud",
}


@dataclass(frozen=True, eq=False)
class TileNest:
    """A nest of loops that adds products to a result.

    Parameters
    ----------
    rows, reduced : list of For
        Of constant extents, but for the first one of `reduced`.
    columns : For
    store : BufferStore
    a, b : TensorLoad
        The entries, and the dense operand.
    row_guards, term_guards : list of Expr
        Conditions under which rows are written, and terms have a place in the sum.
    """

    rows: list[tirx.For]
    reduced: list[tirx.For]
    columns: tirx.For
    store: tirx.BufferStore
    a: ir.TensorLoad
    b: ir.TensorLoad
    row_guards: list[ir.Expr]
    term_guards: list[ir.Expr]
    b_guards: list[ir.Expr]

    @property
    def dtype(self) -> str:
        """The dtype of the entries."""
        return str(self.a.source.ty.dtype)

    @property
    def kind(self) -> str:
        return "bf16" if self.dtype == "bfloat16" else "int8"

    @property
    def group(self) -> int:
        return 4 // BYTES[self.dtype]

    @property
    def instruction(self) -> str:
        return INSTRUCTIONS[self.dtype, str(self.b.source.ty.dtype)]

    @property
    def result(self) -> str:
        return str(self.store.buffer.ty.dtype)

    @property
    def row_count(self) -> int:
        return math.prod(int(lp.extent) for lp in self.rows)

    @property
    def inner_terms(self) -> int:
        """Terms of one step of the outermost reduced loop."""
        return math.prod(int(lp.extent) for lp in self.reduced[1:])


def match(loop: tirx.For) -> TileNest | None:
    """Match a nest whose innermost loop runs along rows of the result and of one factor."""
    product = parse(loop)
    nest = None if product is None else _divided(product)
    return nest if nest is not None and LEAST_ROWS <= nest.row_count <= MOST_ROWS and _fits(nest) else None


def _divided(product: ProductNest) -> TileNest | None:
    """Divide loops and guards into those of rows and those of terms; None where one belongs to both."""
    loops, store = product.loops, product.store
    guards = [part for guard in product.guards for part in conjuncts(guard)]
    b_guards = [] if product.b_guard is None else conjuncts(product.b_guard)
    *others, last = loops
    column, places = last.loop_var, list(store.indices)
    rows = [lp for lp in others if mentions(places, [lp.loop_var])]
    reduced = [lp for lp in others if not mentions(places, [lp.loop_var])]
    ragged = [lp for lp in reduced if not isinstance(lp.extent, tirx.IntImm)]
    row_vars, term_vars = [lp.loop_var for lp in rows], [lp.loop_var for lp in reduced]
    if len(ragged) > 1 or not rows or not reduced or any(not isinstance(lp.extent, tirx.IntImm) for lp in rows):
        return None
    if any(not isinstance(lp.min, tirx.IntImm) or int(lp.min) for lp in loops):
        return None
    variables = [lp.loop_var for lp in loops]
    if mentions([lp.extent for lp in loops], variables):
        return None
    row_guards = [g for g in guards if not mentions(g, [column, *term_vars])]
    term_guards = [g for g in guards if mentions(g, term_vars) and not mentions(g, [column, *row_vars])]
    if len(row_guards) + len(term_guards) < len(guards) or mentions(b_guards, [column, *row_vars]):
        return None
    reduced = [*ragged, *(lp for lp in reduced if lp not in ragged)]
    return TileNest(rows, reduced, last, store, product.a, product.b, row_guards, term_guards, b_guards)


def _fits(nest: TileNest) -> bool:
    """Return whether an instruction has the dtypes, and arrays are subscripted by the loops that they should be."""
    store, column = nest.store, nest.columns.loop_var
    row_vars, term_vars = [lp.loop_var for lp in nest.rows], [lp.loop_var for lp in nest.reduced]
    results = ("bfloat16", "float32") if nest.dtype == "bfloat16" else ("int32",)
    if (nest.dtype, str(nest.b.source.ty.dtype)) not in INSTRUCTIONS or nest.result not in results:
        return False
    for access in (store, nest.b):
        if not access.indices[-1].same_as(column) or mentions(list(access.indices)[:-1], [column]):
            return False
    return not mentions(nest.b, row_vars) and not mentions(list(store.indices), term_vars)


def match_body(block: Any, kinds: frozenset[str]) -> bool:
    """Return whether a stage-II block's loops match, and need one of these kinds of tiles."""
    nest = match(as_nest(block))
    return nest is not None and f"tile_{nest.kind}" in kinds


def _begins_with_zero(stmt: tirx.Stmt, nest: TileNest) -> bool:
    """Return whether a statement sets the nest's elements of the result to zero, and nothing else."""
    extents, body = [], stmt
    while isinstance(body, (tirx.For, tirx.IfThenElse)):
        if isinstance(body, tirx.IfThenElse) and body.else_case is not None:
            return False
        if isinstance(body, tirx.For):
            extents.append(body.extent)
        body = body.body if isinstance(body, tirx.For) else body.then_case
    if not isinstance(body, tirx.BufferStore) or not body.buffer.same_as(nest.store.buffer):
        return False
    loops = [*nest.rows, nest.columns]
    is_whole = len(extents) == len(loops) and all(same(x, lp.extent) for x, lp in zip(extents, loops, strict=True))
    return is_zero(body.value) and is_whole


class _TileEmitter:
    """Emitter of one nest."""

    def __init__(self, nest: TileNest, tiles_of_columns: int, *, adds: bool) -> None:
        self.nest, self.kind, self.group, self.adds = nest, nest.kind, nest.group, adds
        self.inner = nest.reduced[0]
        self.dtype = str(self.inner.loop_var.ty.dtype)
        self.column = nest.columns.loop_var
        self.column_dtype = str(self.column.ty.dtype)
        self.depth = tiles.ROW_BYTES // BYTES[nest.dtype]  # terms of a tile
        self.acc = f"float32x{LANES}" if self.kind == "bf16" else WORD
        row_tiles = -(-nest.row_count // tiles.ROWS)
        self.across = max(self.group, tiles_of_columns // self.group * self.group)
        self.down = 1
        if row_tiles > 1 and self.group == MAX_ROW_TILES:
            self.down, self.across = MAX_ROW_TILES, self.group
        self.terms = cast(self.inner.extent, self.dtype) * self.number(nest.inner_terms)
        self.run = self._run()
        self.left, self.right, self.sums, self.words, self.full = (
            tirx.decl_buffer([count], dtype, f"tile_{name}", scope="local", layout=None)
            for name, count, dtype in (
                ("left", self.down * STEPS * WORDS * self.group, f"int{32 // self.group}"),
                ("right", 2 * self.across * WORDS, "int32"),
                ("sums", self.across * WORDS, self.acc.partition("x")[0]),
                ("words", WORDS, "int32"),
                ("full", STEPS, "int32"),
            )
        )

    def number(self, value: int) -> ir.Expr:
        return const(value, self.dtype)

    def call(self, dtype: str, name: str, *arguments: Any) -> Any:
        return tirx.call_extern(dtype, f"st_{name}_{self.kind}", *arguments)

    def put(self, name: str, *arguments: Any) -> tirx.Stmt:
        return tirx.Evaluate(self.call("void", name, *arguments))

    # ------------------------------------------------------------------ layouts of the entries

    def _has_every_row(self, dimension: int) -> bool:
        """Return whether an index of the entries is the loop over rows, in an array that has all of them."""
        if len(self.nest.rows) != 1 or len(self.nest.a.indices) < -dimension:
            return False
        lp, others = (
            self.nest.rows[0],
            [x for n, x in enumerate(self.nest.a.indices) if n != len(self.nest.a.indices) + dimension],
        )
        extent = self.nest.a.source.ty.shape[dimension]
        has_all = isinstance(extent, tirx.IntImm) and int(extent) >= int(lp.extent)
        is_row = self.nest.a.indices[dimension].same_as(lp.loop_var)
        return has_all and is_row and not mentions(others, [lp.loop_var])

    def _terms_exist(self) -> bool:
        """Return whether entries of terms that a guard leaves out exist: the guard reads arrays beside them."""
        place, extent = self.nest.a.indices[0], self.nest.a.source.ty.shape[0]
        return all(
            any(same(x.indices[0], place) and same(x.source.ty.shape[0], extent) for x in collect(g, ir.TensorLoad))
            for g in self.nest.term_guards
        )

    def _run(self) -> int:
        """Return how many terms of a row lie side by side, a power of two."""
        last = self.nest.reduced[-1]
        if not isinstance(last.extent, tirx.IntImm) or self.nest.term_guards:
            return 1
        along = moves_by_one(self.nest.a.indices[-1], last.loop_var)
        if not along or mentions(list(self.nest.a.indices)[:-1], [last.loop_var]):
            return 1
        return math.gcd(int(last.extent), self.depth)

    @property
    def lies_in_tiles(self) -> bool:
        """True if tiles are read from the array of entries."""
        whole = self.run == self.depth and self.nest.row_count % tiles.ROWS == 0
        has_stride = isinstance(self.nest.a.source.ty.shape[-1], tirx.IntImm)
        return whole and has_stride and self._has_every_row(-2) and not self.nest.term_guards

    @property
    def lies_in_columns(self) -> bool:
        """True if the entries of a column lie side by side."""
        shape, dimension = self.nest.a.source.ty.shape, -1
        while -dimension < len(shape) and isinstance(shape[dimension], tirx.IntImm) and int(shape[dimension]) == 1:
            dimension -= 1
        return self._has_every_row(dimension) and self._terms_exist()

    # ------------------------------------------------------------------ places

    def term(self, q: ir.Expr) -> dict[Var, Any]:
        """Return the variables of the reduced loops for a term."""
        out: dict[Var, Any] = {}
        for lp in reversed(self.nest.reduced[1:]):
            extent = self.number(int(lp.extent))
            out[lp.loop_var] = cast(tirx.floormod(q, extent), str(lp.loop_var.ty.dtype))
            q = tirx.floordiv(q, extent)
        return {**out, self.inner.loop_var: q}

    def row(self, r: ir.Expr) -> dict[Var, Any]:
        """Return the variables of the loops over rows for a row of the block."""
        out: dict[Var, Any] = {}
        for n, lp in reversed(list(enumerate(self.nest.rows))):
            extent = const(int(lp.extent), str(r.ty.dtype))
            out[lp.loop_var] = cast(tirx.floormod(r, extent) if n else r, str(lp.loop_var.ty.dtype))
            r = tirx.floordiv(r, extent)
        return out

    def at(self, node: Any, values: dict[Var, Any]) -> Any:
        return substitute(tirx.address_of(node) if isinstance(node, ir.TensorLoad) else node, values)

    def element(self, buffer: Any, index: ir.Expr) -> ir.Expr:
        return tirx.address_of(tirx.BufferLoad(buffer, [index]))

    def left_at(self, down: int, step: ir.Expr, row: Any = 0, word: Any = 0) -> ir.Expr:
        """Return the address of a tile of entries, or of a place in it, in elements."""
        where = (self.number(down * STEPS) + step) * self.number(WORDS * self.group)
        row, word = (self.number(x) if isinstance(x, int) else x for x in (row, word))
        return self.element(self.left, where + row * self.number(self.depth) + word)

    def right_at(self, step: Any) -> ir.Expr:
        """Return the place of the interleaved rows of a step: those of two successive ones lie apart."""
        return tirx.bitwise_and(step, self.number(1)) * self.number(self.across * WORDS)

    # ------------------------------------------------------------------ statements

    def emit(self) -> tirx.Stmt:
        """Return the sums of all rows, some tiles of them at a time."""
        buffers = (self.left, self.right, self.sums, self.words, self.full)
        # TVM makes arrays as short as the elements that are seen to be used.
        ends = [tirx.BufferStore(x, tirx.const(0, str(x.ty.dtype)), [x.ty.shape[0] - 1]) for x in buffers]
        row_tiles = range(0, -(-self.nest.row_count // tiles.ROWS), self.down)
        body = seq(*(self.panels(first * tiles.ROWS) for first in row_tiles))
        text = functions(self.kind, self.nest.result) + tile_functions(self.kind) + reading(self.kind, self.nest.result)
        allocations = [tirx.AllocBuffer(x) for x in buffers]
        return tirx.AttrStmt(const(0), IMPORT, ir.StringImm(text), seq(*allocations, *ends, body))

    def panels(self, first_row: int) -> tirx.Stmt:
        """Return the sums of a few tiles of rows, panel by panel of columns."""
        k_0, q_0 = Var("k_0", self.column.ty), Var("q_0", self.inner.loop_var.ty)
        width, panel = self.nest.columns.extent, const(self.across * LANES, self.column_dtype)
        out: list[tirx.Stmt] = []
        begin = bind(out, "begin", k_0 * panel)
        left = bind(out, "left", width - begin)
        many = self.number(STEPS * self.depth)
        head = bind(out, "terms", self.terms)
        parts = tirx.floordiv(head + many - self.number(1), many)
        out += [tiles.zero(v) for v in range(self.down * self.across)]
        inside: list[tirx.Stmt] = []
        here = bind(inside, "here", tirx.min(head - q_0 * many, many))
        first = bind(inside, "first", q_0 * many)
        preparation = [self.checked(first, here)] if self.conditions({}) else []
        if not self.lies_in_tiles:
            preparation.append(self.laid_out(first_row, first, here))
        if preparation:
            is_new = tirx.Or(k_0.equal(const(0, self.column_dtype)), parts > self.number(1))
            inside.append(tirx.IfThenElse(is_new, seq(*preparation), None))
        inside.append(self.chosen(first_row, first, here, begin, left))
        out += [serial(q_0, parts, seq(*inside)), self.finish(first_row, begin, left)]
        return serial(k_0, tirx.floordiv(width + panel - const(1, self.column_dtype), panel), seq(*out))

    def chosen(self, first_row: int, first: Var, here: Var, begin: Var, left: Var) -> tirx.Stmt:
        """Return the products of a panel, and those of a panel that has few columns."""
        body = self.products(first_row, first, here, begin, left, self.across)
        if self.across == self.group:
            return body
        few = left <= const(self.group * LANES, self.column_dtype)
        return tirx.IfThenElse(few, self.products(first_row, first, here, begin, left, self.group), body)

    def products(self, first_row: int, first: Var, here: Var, begin: Var, left: Any, across: int) -> tirx.Stmt:
        """Return the products of `here` terms from `first` on, with `across` tiles of columns."""
        step, depth = Var("step", self.inner.loop_var.ty), self.number(self.depth)
        steps = tirx.floordiv(here + depth - self.number(1), depth)
        before = step - self.number(1)
        gather = tirx.IfThenElse(step < steps, self.gathered(first, step, here, begin, left, across), None)
        multiply = tirx.IfThenElse(step > self.number(0), self.multiplied(first_row, first, before, across), None)
        return serial(step, steps + self.number(1), seq(gather, multiply))

    def multiplied(self, first_row: int, first: Var, step: Any, across: int) -> tirx.Stmt:
        """Return the products of one tile of terms."""
        out = [self.load_left(first_row, down, first, step) for down in range(self.down)]
        for v in range(across):
            right = RIGHT[v % len(RIGHT)]
            where = self.element(self.right, self.right_at(step) + self.number(v * WORDS))
            out.append(tiles.load(right, where, const(tiles.ROW_BYTES)))
            for down in range(self.down):
                out.append(tiles.multiply(self.nest.instruction, down * self.across + v, LEFT[down], right))
        return seq(*out)

    def load_left(self, first_row: int, down: int, first: Var, step: Any) -> tirx.Stmt:
        if not self.lies_in_tiles:
            return tiles.load(LEFT[down], self.left_at(down, step), const(tiles.ROW_BYTES))
        values = {**self.row(const(first_row + down * tiles.ROWS)), **self.term(first + step * self.number(self.depth))}
        stride = int(self.nest.a.source.ty.shape[-1]) * BYTES[self.nest.dtype]
        return tiles.load(LEFT[down], self.at(self.nest.a, values), const(stride))

    def has_all(self, step: Any, here: Any) -> Any:
        """Return whether all terms of a tile exist and have rows."""
        if self.conditions({}):
            return tirx.BufferLoad(self.full, [step]).equal(const(1))
        return (step + self.number(1)) * self.number(self.depth) <= here

    def gathered(self, first: Var, step: Any, here: Any, begin: Var, left: Any, across: int) -> tirx.Stmt:
        """Return the statements that interleave the rows of a tile of the `here` terms from `first` on."""
        exist = here - step * self.number(self.depth) if self.nest.inner_terms % self.depth else None
        is_full = tirx.And(left >= const(across * LANES, self.column_dtype), self.has_all(step, here))
        masked = self.interleaved(first, step, exist, begin, left, across)
        if across < self.across:  # Code for few columns is not worth the time that its compilation takes.
            return masked
        return tirx.IfThenElse(is_full, self.interleaved(first, step, None, begin, None, across), masked)

    def checked(self, first: Var, here: Var) -> tirx.Stmt:
        """Return the statements that determine for each tile of terms whether all of them have rows."""
        step, term = Var("step", self.inner.loop_var.ty), Var("term", self.inner.loop_var.ty)
        depth = self.number(self.depth)
        have = tirx.BufferLoad(self.full, [step])
        for condition in self.conditions(self.term(first + step * depth + term)):
            have = tirx.Select(condition, have, const(0))
        inside = (step + self.number(1)) * depth <= here
        count = serial(term, depth, tirx.BufferStore(self.full, have, [step]))
        begin = tirx.BufferStore(self.full, tirx.Cast("int32", inside), [step])
        steps = tirx.floordiv(here + depth - self.number(1), depth)
        return serial(step, steps, seq(begin, tirx.IfThenElse(inside, count, None)))

    def conditions(self, values: dict[Var, Any]) -> list[Any]:
        """Return the conditions under which a term has a row."""
        return [substitute(g, values) for g in (*self.nest.term_guards, *self.nest.b_guards)]

    def interleaved(self, first: Var, step: Any, exist: Any, begin: Var, left: Any, across: int) -> tirx.Stmt:
        """Return the loop over groups of terms, of which `exist` are valid; all have rows if `left` is None."""
        pair = Var("pair", self.inner.loop_var.ty)
        out: list[tirx.Stmt] = []
        rows = []
        for t in range(self.group):
            within = pair * self.number(self.group) + self.number(t)
            q = bind(out, f"q_{t}", self.inside(first + step * self.number(self.depth) + within, exist))
            values = self.term(q)
            conditions = [] if left is None else self.conditions(values)
            rows.append((values, [*conditions, *([] if exist is None else [within < exist])]))
        for part in range(across // self.group):
            per_load = LANES * self.group
            loaded = []
            for t, (values, conditions) in enumerate(rows):
                bits = mask(part * per_load, per_load, left, "int64")
                for condition in conditions:
                    bits = tirx.Select(condition, bits, const(0, "int64"))
                column = begin + const(part * per_load, self.column_dtype)
                where = self.at(self.nest.b, {**values, self.column: column})
                loaded.append(bind(out, f"row_{t}", self.call(WORD, "rows", where, bits), WORD))
            for v, value in enumerate(interleaved(out, self.kind, loaded)):
                index = self.right_at(step) + self.number((part * self.group + v) * WORDS) + pair * self.number(LANES)
                out.append(tirx.BufferStore(self.right, value, [tirx.Ramp(index, self.number(1), LANES)]))
        return serial(pair, self.number(LANES), seq(*out))

    def inside(self, q: ir.Expr, exist: Any) -> ir.Expr:
        """Return a valid term, so that its index arrays are read within their bounds."""
        return q if exist is None else tirx.min(q, self.terms - self.number(1))

    # ------------------------------------------------------------------ entries

    def laid_out(self, first_row: int, first: Var, here: Var) -> tirx.Stmt:
        """Return the statements that lay out the entries of `here` terms from `first` on in tiles."""
        step, depth = Var("step", self.inner.loop_var.ty), self.number(self.depth)
        parts = []
        for down in range(self.down):
            rows = min(max(self.nest.row_count - first_row - down * tiles.ROWS, 0), tiles.ROWS)
            lay_out = self.transposed if self.lies_in_columns else self.copied
            parts.append(lay_out(first_row + down * tiles.ROWS, rows, down, first, step, here))
        return serial(step, tirx.floordiv(here + depth - self.number(1), depth), seq(*parts))

    def transposed(self, row: int, rows: int, down: int, first: Var, step: Var, here: Var) -> tirx.Stmt:
        """Return a tile of entries whose columns are loaded as vectors."""
        gather = tirx.IfThenElse(
            self.has_all(step, here),
            self.columns(row, rows, first, step, None),
            self.columns(row, rows, first, step, here),
        )
        return seq(gather, self.put("transpose", self.element(self.words, const(0)), self.left_at(down, step)))

    def columns(self, row: int, rows: int, first: Var, step: Var, here: Any) -> tirx.Stmt:
        """Return the loop that stores the columns of a tile, those of a group in one vector (None: all exist)."""
        pair = Var("pair", self.inner.loop_var.ty)
        out: list[tirx.Stmt] = []
        word: Any = None
        for t in range(self.group):
            own = step * self.number(self.depth) + pair * self.number(self.group) + self.number(t)
            q = bind(out, f"q_{t}", self.inside(first + own, here))
            values = {**self.term(q), **self.row(const(row))}
            bits: Any = const((1 << rows) - 1)
            conditions = [] if here is None else [own < here, *(substitute(g, values) for g in self.nest.term_guards)]
            for condition in conditions:
                bits = tirx.Select(condition, bits, const(0))
            column = bind(out, "column", self.call(WORD, "column", self.at(self.nest.a, values), bits), WORD)
            shifted = column << tirx.Broadcast(const(t * 32 // self.group), LANES) if t else column
            word = shifted if word is None else tirx.bitwise_or(word, shifted)
        index = tirx.Ramp(pair * self.number(LANES), self.number(1), LANES)
        return serial(pair, self.number(LANES), seq(*out, tirx.BufferStore(self.words, word, [index])))

    def copied(self, row: int, rows: int, down: int, first: Var, step: Var, here: Var) -> tirx.Stmt:
        """Return a tile of entries copied in runs."""
        r, n = Var("r", self.inner.loop_var.ty), Var("n", self.inner.loop_var.ty)
        own = step * self.number(self.depth) + n * self.number(self.run)
        values = {**self.term(first + own), **self.row(r + self.number(row))}
        target = self.left_at(down, step, r, n * self.number(self.run))
        copy = self.put(f"copy{self.run}", target, self.at(self.nest.a, values))
        conditions: list[Any] = [own < here, *([r < self.number(rows)] if rows < tiles.ROWS else [])]
        conditions += [substitute(g, values) for g in self.nest.term_guards]
        if not any(self._has_every_row(d) for d in range(-len(self.nest.a.indices), 0)):
            conditions += [substitute(g, values) for g in self.nest.row_guards]
        clear = self.put(f"clear{self.run}", target)
        body: tirx.Stmt = copy
        for condition in reversed(
            conditions
        ):  # in turn: the reads of a later one may be in bounds only under the first ones
            body = tirx.IfThenElse(condition, body, clear)
        return serial(r, self.number(tiles.ROWS), serial(n, self.number(self.depth // self.run), body))

    # ------------------------------------------------------------------ results

    def finish(self, first_row: int, begin: Var, left: Var) -> tirx.Stmt:
        """Return the stores of the sums, in the order of the columns."""
        out: list[tirx.Stmt] = []
        for down in range(self.down):
            row = first_row + down * tiles.ROWS
            rows = min(self.nest.row_count - row, tiles.ROWS)
            if rows <= 0:
                continue
            for v in range(self.across):
                where = self.element(self.sums, const(v * WORDS))
                out.append(tiles.store(down * self.across + v, where, const(tiles.ROW_BYTES)))
            r = Var("r", self.inner.loop_var.ty)
            values = self.row(r + self.number(row))
            whole = left >= const(self.across * LANES, self.column_dtype)
            body = tirx.IfThenElse(whole, *(self.written(r, values, begin, x) for x in (None, left)))
            for guard in reversed(self.nest.row_guards):
                body = tirx.IfThenElse(substitute(guard, values), body, None)
            out.append(serial(r, self.number(rows), body))
        return seq(*out)

    def written(self, r: Var, values: dict[Var, Any], begin: Var, left: Var) -> tirx.Stmt:
        out: list[tirx.Stmt] = []
        for part in range(self.across // self.group):
            places = [self.number((part * self.group + v) * WORDS) + r * self.number(LANES) for v in range(self.group)]
            sums = [tirx.BufferLoad(self.sums, [tirx.Ramp(place, self.number(1), LANES)]) for place in places]
            for v in range(self.group):
                first = (part * self.group + v) * LANES
                ordered = self.call(self.acc, f"order_{v}", *sums)
                element = tirx.BufferLoad(self.nest.store.buffer, self.nest.store.indices)
                where = self.at(element, {**values, self.column: begin + const(first, self.column_dtype)})
                bits = mask(first, LANES, left, "int32")
                if self.adds:
                    ordered = ordered + tirx.call_extern(self.acc, f"st_get_{self.nest.result}", where, bits)
                out.append(tirx.Evaluate(tirx.call_extern("void", f"st_put_{self.nest.result}", where, ordered, bits)))
        return seq(*out)


def _with_zeros(before: tirx.Stmt, stmt: tirx.Stmt) -> tirx.Stmt | None:
    """Return the tiles of an annotated loop whose results the statement before sets to zero, or None."""
    nest = match(stmt) if isinstance(stmt, tirx.For) and TILE in stmt.annotations else None
    if nest is None or not _begins_with_zero(before, nest):
        return None
    return _TileEmitter(nest, int(stmt.annotations[TILE]), adds=False).emit()


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.UseTiles")
def UseTiles(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite the annotated loops of a function."""
    if not any(TILE in lp.annotations for lp in collect(func.body, tirx.For)):
        return func

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*join_neighbours(node.seq, _with_zeros, mutator.mutate))

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        if TILE not in node.annotations:
            return mutator.default_mutate(node)
        nest = match(node)
        if nest is None:
            return refused(mutator.default_mutate(node), TILE, "it is no sum of products of blocks and rows")
        return _TileEmitter(nest, int(node.annotations[TILE]), adds=True).emit()

    return with_body(func, structural_mutate(func.body, [(tirx.SeqStmt, on_seq), (tirx.For, on_for)]))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ConfigureTiles")
def ConfigureTiles(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Configure tiles, define their functions, and replace units that the target emulates."""
    emulated = func.attrs is not None and EMULATED in func.attrs
    names = tiles.functions(func.body)
    if emulated:
        func = with_body(func, structural_mutate(func.body, [(tirx.AttrStmt, _emulated)]))
    if not names:
        return func
    body = _configured(func.body, emulated=emulated)
    names = tiles.functions(body)
    text = define_tiles(names) if emulated else tiles.define(names)
    return with_body(func, tirx.AttrStmt(const(0), IMPORT, ir.StringImm(text), body))


def _emulated(node: tirx.AttrStmt, mutator: Any) -> tirx.Stmt:
    changed = mutator.default_mutate(node)
    if changed.attr_key != IMPORT:
        return changed
    return tirx.AttrStmt(changed.node, IMPORT, ir.StringImm(emulate(str(changed.value.value))), changed.body)


def _configured(stmt: tirx.Stmt, *, emulated: bool) -> tirx.Stmt:
    """Configure tiles in the largest parts of a statement that use them and have no parallel loop."""
    if not tiles.functions(stmt):
        return stmt
    if isinstance(stmt, tirx.For) and stmt.kind == PARALLEL:
        return with_(stmt, body=_around(stmt.body, emulated=emulated))
    loops = [lp for lp in collect(stmt, tirx.For) if lp.kind == PARALLEL and tiles.functions(lp.body)]
    if not loops:
        return _around(stmt, emulated=emulated)
    if isinstance(stmt, tirx.SeqStmt):
        return seq(*(_configured(part, emulated=emulated) for part in stmt.seq))
    if isinstance(stmt, tirx.For):
        return with_(stmt, body=_configured(stmt.body, emulated=emulated))
    if isinstance(stmt, tirx.IfThenElse):
        branches = (stmt.then_case, stmt.else_case)
        return tirx.IfThenElse(stmt.condition, *(b and _configured(b, emulated=emulated) for b in branches))
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, _configured(stmt.body, emulated=emulated))
    return _around(stmt, emulated=emulated)


def _around(stmt: tirx.Stmt, *, emulated: bool) -> tirx.Stmt:
    """Configure tiles before a statement of one thread, and release them after it."""
    where = tirx.decl_buffer([tiles.CONFIGURATION_BYTES], "uint8", "configuration", scope="local", layout=None)
    values = enumerate(tiles.configuration())
    filled = [tirx.BufferStore(where, const(value, "uint8"), [const(n)]) for n, value in values]
    begin, end = tiles.call("config", _first(where)), tiles.call("release")
    body = seq(begin, stmt, end)
    if not emulated:
        return seq(tirx.AllocBuffer(where), *filled, body)
    state = tirx.decl_buffer([STATE_BYTES], "uint8", "tile_state", scope="local", layout=None)

    def on_call(call: ir.Call, mutator: Any) -> Any:
        changed = mutator.default_mutate(call)
        name = tiles.called(changed)
        if not name:
            return changed
        return tirx.call_extern("void", tiles.PREFIX + name, _first(state), *changed.args[1:])

    body = structural_mutate(body, [(ir.Call, on_call)])
    # TVM makes arrays as short as the elements that are seen to be used.
    last = tirx.BufferStore(state, const(0, "uint8"), [const(STATE_BYTES - 1)])
    return seq(tirx.AllocBuffer(where), tirx.AllocBuffer(state), *filled, last, body)


def _first(buffer: Any) -> ir.Expr:
    return tirx.address_of(tirx.BufferLoad(buffer, [const(0)]))


__all__ = ["ConfigureTiles", "UseTiles"]
