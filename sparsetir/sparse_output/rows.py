# SPDX-License-Identifier: Apache-2.0
"""Row loops of computed patterns: the row partition into chunks, prefetch, scatter, and long rows in segments.

Long rows in segments of columns: products are sorted into segments first, so that accumulators stay in the cache.

The method is that of MAGNUS (ICS 2025): the products of a row are written contiguously, segment by segment, and each
segment is then accumulated separately. Products of one coordinate stay in order, so the result is the same bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.codegen.pipeline import to_stage_2
from sparsetir.errors import LoweringError
from sparsetir.ir.rewriting import (
    LONG,
    alloc,
    cell,
    collect,
    get,
    is_element,
    long,
    mentions,
    product,
    put,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower import TO_LOOPS, as_module, run
from sparsetir.lower.loops import parallel, serial, with_
from sparsetir.lower.vector.memory_hints import fetch, gathers, steps_ahead
from sparsetir.sparse_output.accumulators import add
from sparsetir.sparse_output.program import AssembledProgram, SparseResult

# Chunks of rows, which functions process in parallel, and the parameters of such functions.


ROW_WORK = 8  # coordinates that take as long as the beginning and end of a row


@dataclass(frozen=True)
class RowPartition:
    """Row partition: chunk c has the rows from ``ranges[c]`` to ``ranges[c + 1]``, of an `order` if there is one."""

    chunks: Var
    ranges: Var
    bound: Var
    order: Sequence[Var] = ()

    @classmethod
    def of(cls, rows: RowLoop, *, ordered: bool = False) -> RowPartition:
        chunks, count = Var("chunks", ir.PrimType("int32")), size("ordered")
        order = [count, array("order", LONG, count)] if ordered else []
        ranges = array("ranges", LONG, cast(chunks, LONG) + long(1))
        return cls(chunks, ranges, array("bound", LONG, rows.count), order)

    def row(self, place: ir.Expr) -> ir.Expr:
        """Return the row at a position of the order."""
        return tirx.BufferLoad(self.order[1], [place]) if self.order else place


def array(name: str, dtype: str, *shape: ir.Expr) -> Var:
    """Return an array parameter."""
    return tirx.decl_buffer(list(shape), dtype, name=name, layout=None)


def size(name: str) -> Var:
    """Return a 64-bit size parameter."""
    return Var(name, ir.PrimType(LONG))


def alone_or_shared(chunk: Var, chunks: Var, body: tirx.Stmt) -> tirx.Stmt:
    """Emit a loop over chunks, parallel if there are several: a parallel loop always waits for all threads."""
    alone = renewed(seq(tirx.Bind(chunk, const(0, "int32")), body))
    return tirx.IfThenElse(chunks.equal(const(1, "int32")), alone, renewed(parallel(chunk, chunks, body)))


# Rows of operands are prefetched some iterations before a loop reads them.
#
# A product that iterates over entries of A reads a row of B for each, at an unpredictable address::
#
#     for k in range(indptr_a[i + 1] - indptr_a[i]):
#         ...  # prefetch indptr_b[indices_a[indptr_a[i] + k + FAR]]
#         ...  # prefetch indices_b and b at indptr_b[indices_a[indptr_a[i] + k + NEAR]]
#         for j in range(...):
#             ...
#
# Entries behind the end of a row are those of the next one, so that short rows are prefetched in time, too.


NEAR, FAR = 12, 24  # prefetch distances in iterations: of a row, and of its row pointer


def fetched(loop: tirx.For, lowered: tirx.For, is_operand: Callable[[Var], bool]) -> tirx.For:
    """Add prefetches of the rows that later iterations gather to `lowered`, the new form of `loop`."""
    stmts = fetches(loop, is_operand)
    return with_(lowered, body=seq(*stmts, lowered.body)) if stmts else lowered


def fetches(loop: tirx.For, is_operand: Callable[[Var], bool], *, rows: bool = True) -> list[tirx.Stmt]:
    """Return prefetches of the rows that later iterations of a loop gather; without `rows` only of the row pointers."""
    inner = [f.loop_var for f in collect(loop.body, tirx.For)]
    loads_ahead = [x for x in gathers(loop.body, loop.loop_var) if is_operand(x.source)] if inner else []
    loads = {x.source: x for x in loads_ahead if not any(collect(i, ir.Call) for i in x.indices)}  # searches are costly
    pointers = {x.source for load in loads.values() for i in load.indices for x in collect(i, ir.TensorLoad)}
    stmts = []
    for source, load in loads.items():
        if source not in pointers and not rows:
            continue
        number = const(FAR if source in pointers else NEAR, str(loop.loop_var.ty.dtype))
        first = {var: const(0, str(var.ty.dtype)) for var in inner}
        stmts.append(fetch(load, [substitute(i, first) for i in steps_ahead(load, loop.loop_var, number)]))
    return stmts


# The row loop of a program with computed patterns, and the statements that scatter into its results.
#
# A program is lowered as if its assembled axes were dense: each statement ``c[row, j] = f(c[row, j], ...)`` below the
# loop over rows names a coordinate. `functions.py` builds the symbolic and numeric functions from these statements.


OFFSET_DTYPE = "int64"


@dataclass(frozen=True)
class ScatterStore:
    """A statement that sets an element of a result.

    Parameters
    ----------
    store : BufferStore
        Into the dense stand-in of the result.
    result : SparseResult
    key : Expr
        The coordinate below the row, in the order of storage: of several axes one number.
    inner : tuple of Expr
        Which element of the block of that coordinate, in 64 bits; nothing where it has one element.
    """

    store: tirx.BufferStore
    result: SparseResult
    key: ir.Expr
    inner: tuple[ir.Expr, ...] = ()


@dataclass(frozen=True)
class Blocked:
    """A loop that only sets elements of the block of one coordinate; the coordinate is entered before the loop.

    Parameters
    ----------
    loop : For
    key : Expr
        The coordinate below the row.
    steps : Expr
        How many elements it sets, none where an axis is empty.
    """

    loop: tirx.For
    key: ir.Expr
    steps: ir.Expr


@dataclass(frozen=True)
class RowLoop:
    """Lowered program: `body` runs for row `var` of `count`."""

    func: tirx.PrimFunc
    var: Var
    count: ir.Expr
    body: tirx.Stmt
    scatters: tuple[ScatterStore, ...]
    blocks: tuple[Blocked, ...] = ()

    def block_of(self, loop: tirx.For) -> Blocked | None:
        """Return the block that a loop iterates over, or None if it is not such a loop."""
        return next((b for b in self.blocks if b.loop.same_as(loop)), None)

    def scatter_of(self, store: tirx.BufferStore) -> ScatterStore | None:
        """Return the scatter of a statement, or None if it is none."""
        return next((s for s in self.scatters if s.store.same_as(store)), None)


def lower_rows(assembly: AssembledProgram) -> RowLoop:
    """Lower a program to its row loop.

    Raises
    ------
    LoweringError
        Its iterations do not iterate over the rows of the result first, or read the result elsewhere.
    """
    if assembly.merge is not None:
        row, count = assembly.merge.row, assembly.rows[0].count
        func = assembly.func.with_attr("tirx.noalias", True)
        return RowLoop(func, Var(str(row.name), row.ty), count, tirx.Evaluate(const(0)), ())
    mod = run(TO_LOOPS, to_stage_2(as_module(assembly.func)))
    func = mod[assembly.name]
    var, count, body = _row_loop(func, assembly)
    stores = [s for s in collect(body, tirx.BufferStore) if assembly.result_of(s.buffer) is not None]
    scatters = tuple(_scatter(s, assembly, var) for s in stores)
    _check_reads(body, scatters, assembly)
    return RowLoop(func, var, count, body, scatters, _blocks(body, scatters))


def _row_loop(func: tirx.PrimFunc, assembly: AssembledProgram) -> tuple[Var, ir.Expr, tirx.Stmt]:
    """Return the loop over rows, with the loops of several iterations fused into one."""
    parts = list(func.body.seq) if isinstance(func.body, tirx.SeqStmt) else [func.body]
    if not assembly.has_rows:
        return Var("row", ir.PrimType("int32")), const(1), func.body
    loops = [p for p in parts if isinstance(p, tirx.For)]
    if len(loops) != len(parts) or not all(same(x.extent, loops[0].extent) for x in loops):
        names = ", ".join(a.name for a in assembly.axes)
        raise LoweringError(f"every iteration that stores over {names} must go over {assembly.rows_name} first")
    var = loops[0].loop_var
    bodies = [substitute(x.body, {x.loop_var: cast(var, str(x.loop_var.ty.dtype))}) for x in loops]
    return var, loops[0].extent, seq(*bodies)


def _scatter(store: tirx.BufferStore, assembly: AssembledProgram, row: Var) -> ScatterStore:
    result = assembly.result_of(store.buffer)
    assert result is not None
    indices = list(store.indices)
    first = len(indices) - len(result.lengths) - len(result.inner)
    above, below = indices[:first], indices[first : first + len(result.lengths)]
    if assembly.has_rows and not (len(above) == 1 and same(above[0], row)):
        message = f"{result.name} is stored at a row other than that of the iteration over {assembly.rows_name}"
        raise LoweringError(f"{message}: list the axes of its rows first, each by its own variable")
    key = cast(below[0], assembly.key_dtype)
    for index, length in zip(below[1:], result.lengths[1:], strict=True):
        key = key * cast(length, assembly.key_dtype) + cast(index, assembly.key_dtype)
    inner: tuple[ir.Expr, ...] = ()
    if result.inner:
        at = const(0, OFFSET_DTYPE)
        for index, length in zip(indices[first + len(result.lengths) :], result.inner, strict=True):
            at = at * cast(length, OFFSET_DTYPE) + cast(index, OFFSET_DTYPE)
        inner = (at,)
    return ScatterStore(store, result, key, inner)


def _blocks(body: tirx.Stmt, scatters: tuple[ScatterStore, ...]) -> tuple[Blocked, ...]:
    """Return the outermost loops over blocks of coordinates."""
    blocks: list[Blocked] = []

    def on_for(loop: tirx.For, mutator: Any) -> tirx.Stmt:
        block = _block(loop, scatters)
        if block is None:
            return mutator.default_mutate(loop)
        blocks.append(block)
        return loop

    if any(s.inner for s in scatters):
        structural_mutate(body, [(tirx.For, on_for)])
    return tuple(blocks)


def _block(loop: tirx.For, scatters: tuple[ScatterStore, ...]) -> Blocked | None:
    """Return a loop as one over the block of a coordinate if all its dense loops set elements of it, else None."""
    extents, stmts, bound = [], [loop], []
    inside: list[ScatterStore] = []
    while stmts:
        stmt = stmts.pop()
        if isinstance(stmt, tirx.Bind):
            bound.append(stmt.var)
        elif isinstance(stmt, tirx.For):
            extents.append(cast(stmt.extent, OFFSET_DTYPE))
            bound.append(stmt.loop_var)
            stmts.append(stmt.body)
        elif isinstance(stmt, tirx.SeqStmt):
            stmts += stmt.seq
        else:
            inside += [s for s in scatters if s.store.same_as(stmt)]
            if not inside or not inside[-1].store.same_as(stmt):
                return None
    key = inside[0].key
    is_dense = not any(collect(e, ir.TensorLoad) or mentions(e, bound) for e in extents)
    if not is_dense or mentions(key, bound) or not all(s.inner and same(s.key, key) for s in inside):
        return None
    return Blocked(loop, key, product(extents))


def _check_reads(body: tirx.Stmt, scatters: tuple[ScatterStore, ...], assembly: AssembledProgram) -> None:
    """Raise if a result is read anywhere but in the statement that sets the same element."""
    loads = [x for x in collect(body, ir.TensorLoad) if assembly.result_of(x.source) is not None]
    count = sum(is_element(x, s.store) for s in scatters for x in collect(s.store.value, ir.TensorLoad))
    if len(loads) != count or any(mentions(x, [s.store.buffer]) for s in scatters for x in s.store.indices):
        names = ", ".join(r.name for r in assembly.results)
        raise LoweringError(f"an element of {names} may be read only by the statement that sets it")


def with_own(scatter: ScatterStore, value: ir.Expr) -> ir.Expr:
    """Return the value that a scatter stores if its element was `value` before."""
    store = scatter.store
    on_load = lambda x, m: value if x.source.same_as(store.buffer) else m.default_mutate(x)  # noqa: E731
    return structural_mutate(store.value, [(ir.TensorLoad, on_load)])


Counted = Callable[["ir.Expr | int", "tirx.For | None"], list[tirx.Stmt]]


def entered_by(
    stmt: tirx.Stmt, rows: RowLoop, count: Counted, ahead: Callable[[tirx.For], list[tirx.Stmt]] = lambda _: []
) -> list[tirx.Stmt]:
    """Emit `count` of the number of a statement's scatters, an upper bound, with the loop that makes them.

    The statements that `ahead` returns for a loop come first in its body.
    """
    constant = _per_step(stmt, rows)
    if constant is not None:
        return count(constant, None) if constant else []
    if isinstance(stmt, tirx.SeqStmt):
        return [s for child in stmt.seq for s in entered_by(child, rows, count, ahead)]
    if isinstance(stmt, tirx.For):
        steps = _per_step(stmt.body, rows)
        if steps is not None:
            return count(cast(stmt.extent, OFFSET_DTYPE) * const(steps, OFFSET_DTYPE), stmt)
        return [serial(stmt.loop_var, stmt.extent, seq(*ahead(stmt), *entered_by(stmt.body, rows, count, ahead)))]
    if isinstance(stmt, tirx.IfThenElse):
        cases = [c for c in (stmt.then_case, stmt.else_case) if c is not None]
        branches = [entered_by(c, rows, count, ahead) for c in cases]
        parts = [seq(*stmts) if stmts else tirx.Evaluate(const(0, OFFSET_DTYPE)) for stmts in branches]
        return [tirx.IfThenElse(stmt.condition, parts[0], parts[1] if len(parts) > 1 else None)]
    raise LoweringError(f"a computed pattern is entered in loops and conditions, got {type(stmt).__name__}")


def _per_step(stmt: tirx.Stmt, rows: RowLoop) -> int | None:
    """Return the number of a statement's scatters if it is constant; None for loops and what contains them."""
    if isinstance(stmt, tirx.BufferStore):
        return int(rows.scatter_of(stmt) is not None)
    if isinstance(stmt, tirx.SeqStmt):
        parts = [_per_step(child, rows) for child in stmt.seq]
        return None if None in parts else sum(p or 0 for p in parts)
    if isinstance(stmt, tirx.IfThenElse):
        cases = [_per_step(c, rows) for c in (stmt.then_case, stmt.else_case) if c is not None]
        return None if None in cases else max(c or 0 for c in cases)
    if isinstance(stmt, tirx.For) and rows.block_of(stmt) is not None:
        return 1
    if not any(rows.scatter_of(s) is not None for s in collect(stmt, tirx.BufferStore)):
        return 0
    return None


# ------------------------------------------------------------------------------- segments of long rows


SHIFT = 16  # a segment has so many columns, as a power of two: 256 KB of float32 elements
MOST_PARTS = 1 << 21  # products of a row that are sorted into segments
LEAST_PARTS = 256  # products per segment of a row above which segments pay
SUMS = (tirx.Add, tirx.Min, tirx.Max)


@dataclass(frozen=True)
class ProductUpdate:
    """A statement ``c = c + x * y`` by its parts, which are stored for each product until its segment is accumulated.

    Parameters
    ----------
    kind : type
        Of the sum.
    parts : tuple of Expr
        The factors, not their product: accumulation may use one fused instruction, which rounds once.
    own_first : bool
        Whether the element is the left operand.
    """

    kind: type
    parts: tuple[ir.Expr, ...]
    own_first: bool

    @classmethod
    def of(cls, scatter: ScatterStore) -> ProductUpdate | None:
        """Return the parts of a scatter of this form, or None for another statement."""
        element = Var("own", ir.PrimType(scatter.result.dtype))
        value = with_own(scatter, element)
        if not isinstance(value, SUMS) or scatter.result.held_dtype != scatter.result.dtype:
            return None
        own_first = value.a.same_as(element)
        addend = value.b if own_first else value.a
        if not (own_first or value.b.same_as(element)) or mentions(addend, [element]):
            return None
        parts = (addend.a, addend.b) if isinstance(addend, tirx.Mul) else (addend,)
        return cls(type(value), parts, own_first)

    def on(self, element: ir.Expr, parts: Sequence[ir.Expr]) -> ir.Expr:
        """Return the sum of an element and the product of these parts."""
        addend = parts[0] if len(parts) == 1 else tirx.Mul(*parts)
        return self.kind(element, addend) if self.own_first else self.kind(addend, element)


def update_of(rows: RowLoop) -> ProductUpdate | None:
    """Return the only update of a program whose rows can be sorted into segments, or None."""
    if len(rows.scatters) != 1 or rows.blocks or rows.scatters[0].inner:
        return None
    return ProductUpdate.of(rows.scatters[0])


@dataclass(frozen=True)
class SegmentParams:
    """Parameters that hold the products of a row, segment by segment.

    Parameters
    ----------
    count, room : Var
        The number of segments, and the products that fit.
    places : Var
        The position of the products of each segment, for each chunk.
    keys : Var
        The coordinates of the products.
    values : sequence of Var
        The stored parts of each product.
    """

    count: Var
    room: Var
    places: Var
    keys: Var
    values: Sequence[Var]

    @property
    def params(self) -> list[Var]:
        return [self.count, self.room, self.places, self.keys, *self.values]

    def fits(self, bound: ir.Expr) -> ir.Expr:
        """Return the condition that a row with at most `bound` products may be sorted into segments."""
        return tirx.And(bound <= self.room, bound >= self.count * long(LEAST_PARTS))

    def place(self, chunk: Var, segment: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(self.places, [chunk, segment])

    def set_place(self, chunk: Var, segment: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(self.places, value, [chunk, segment])

    def counted(self, chunk: Var, key: Var) -> list[tirx.Stmt]:
        """Count one more product in a segment."""
        segment = cast(key, LONG) >> long(SHIFT)
        return [self.set_place(chunk, segment, self.place(chunk, segment) + long(1))]

    def kept(self, chunk: Var, key: Var, parts: Sequence[ir.Expr]) -> list[tirx.Stmt]:
        """Write a product behind the others of its segment."""
        at, segment = Var("at", ir.PrimType(LONG)), cast(key, LONG) >> long(SHIFT)
        pairs = zip((self.keys, *self.values), (key, *parts), strict=False)
        stores = [tirx.BufferStore(array, value, [chunk, at]) for array, value in pairs]
        return [
            tirx.Bind(at, self.place(chunk, segment)),
            *stores,
            self.set_place(chunk, segment, at + long(1)),
        ]

    def collected(
        self,
        chunk: Var,
        bound: ir.Expr,
        count: tirx.Stmt,
        keep: tirx.Stmt,
        one: Callable[[Var, Var, Var], tirx.Stmt],
        whole: tirx.Stmt,
    ) -> tirx.Stmt:
        """Emit the sort of a row's products, then `one` for each segment, given its number, its begin and its end.

        `whole` handles rows that are short or have more products than fit. The check counts products, since `bound`, an
        upper bound of a row's entries, never exceeds the number of columns, while all products of a coordinate are
        stored.
        """
        step, segment = Var("s", ir.PrimType(LONG)), Var("segment", ir.PrimType(LONG))
        total, size, is_cut = (cell(name, LONG) for name in ("total", "held", "is_cut"))
        none = Var("s", ir.PrimType(LONG))
        clear = serial(none, self.count, self.set_place(chunk, none, long(0)))
        begin = [put(size, self.place(chunk, step)), self.set_place(chunk, step, get(total)), add(total, get(size))]
        starts = serial(step, self.count, seq(*begin))
        first, after = Var("first", ir.PrimType(LONG)), Var("after", ir.PrimType(LONG))
        bound_to = [tirx.Bind(first, get(total)), tirx.Bind(after, self.place(chunk, segment))]
        nonempty = tirx.IfThenElse(after > first, one(segment, first, after), None)
        segments = serial(segment, self.count, seq(*bound_to, nonempty, put(total, after)))
        check = seq(clear, count, starts, put(is_cut, cast(get(total) <= self.room, LONG)))
        return seq(
            *alloc(total, size, is_cut),
            put(total, long(0)),
            put(is_cut, cast(self.fits(bound), LONG)),
            tirx.IfThenElse(get(is_cut) != long(0), check, None),
            tirx.IfThenElse(get(is_cut) != long(0), seq(keep, put(total, long(0)), segments), whole),
        )


__all__ = [
    "LEAST_PARTS",
    "MOST_PARTS",
    "ROW_WORK",
    "SHIFT",
    "Blocked",
    "ProductUpdate",
    "RowLoop",
    "RowPartition",
    "ScatterStore",
    "SegmentParams",
    "alone_or_shared",
    "array",
    "entered_by",
    "fetched",
    "fetches",
    "lower_rows",
    "size",
    "update_of",
    "with_own",
]
