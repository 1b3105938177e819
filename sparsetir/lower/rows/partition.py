# SPDX-License-Identifier: Apache-2.0
"""Row partition among threads: chunks of rows with equal nonzeros, and merge path with carry-out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir.rewriting import (
    all_same,
    alloc,
    cell,
    collect,
    conjuncts,
    get,
    loads_of,
    mentions,
    put,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import SWEEP, cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.analysis.accesses import uncast
from sparsetir.lower.annotations import CARRY, CHUNKS, INDPTR, PARALLEL_MARK, amount, names_in, refused
from sparsetir.lower.loops import Update, binary_search, defined_vars, each_loop, loop, parallel, serial, with_, without

# Steps of a row loop, restricted to a part of the row's entries.
#
# before::
#
#     y[i] = 1
#     for j in range(indptr[i + 1] - indptr[i]):
#         y[i] = y[i] + a[indptr[i] + j]
#
# `RowParts.part` of entries ``p`` to ``q``::
#
#     y[i] = 1
#     for j in range(q - p):
#         y[i] = y[i] + a[p + j]
#
# `RowParts.carried` of the same part::
#
#     carry[chunk] = 0
#     for j in range(q - p):
#         carry[chunk] = carry[chunk] + a[p + j]


WIDE = "int64"

#: Combiners of sums and extrema with their identity elements.
NEUTRAL = {tirx.Add: 0.0, tirx.Max: float("-inf"), tirx.Min: float("inf")}


class Unsplittable(Exception):
    """Reason why the rows of a loop cannot be split."""


def neutral(combiner: type, dtype: str) -> ir.Expr:
    """Return the identity element of a combiner."""
    value = NEUTRAL[combiner]
    if value == 0 or dtype.startswith(("float", "bfloat")):
        return tirx.const(value, dtype)
    return tirx.min_value(dtype) if combiner is tirx.Max else tirx.max_value(dtype)


def _update(store: tirx.BufferStore) -> type | None:
    """Return the combiner of ``x[i] = x[i] + term``; None for stores of another form."""
    update = Update.of(store, tuple(NEUTRAL), either=True)
    return None if update is None else update.op


@dataclass(frozen=True, eq=False)
class ReducedArray:
    """Array whose rows are reduced: its row subscript at dimension `at`, and its combiner."""

    buffer: Var
    row: ir.Expr
    at: int
    combiner: type

    @property
    def others(self) -> list[ir.Expr]:
        """Extents of the other dimensions."""
        return [extent for n, extent in enumerate(self.buffer.ty.shape) if n != self.at]

    def without_row(self, indices: Any) -> list[ir.Expr]:
        """Remove the row from the subscripts of an element."""
        return [index for n, index in enumerate(indices) if n != self.at]

    def with_row(self, row: ir.Expr, other_indices: list[ir.Expr]) -> list[ir.Expr]:
        """Insert the row into the subscripts of the other dimensions."""
        return [*other_indices[: self.at], row, *other_indices[self.at :]]


class RowParts:
    """Analysis of a row loop whose steps can be restricted to a part of the row.

    Loops over the row's entries reduce into results and local arrays by one sum, maximum or minimum each, or set
    elements at the entries' own positions. Around these loops the arrays are initialised, and copied to the results.
    Any other statement raises `Unsplittable`.
    """

    def __init__(self, loop: tirx.For, pointers: set[str]) -> None:
        self.loop, self.row = loop, loop.loop_var
        self.inside = {a.buffer for a in collect(loop.body, tirx.AllocBuffer)}
        self.ragged, self.pointer = self._ragged(pointers)
        self.within = [s for f in self.ragged for s in collect(f.body, tirx.BufferStore)]
        self.around = [s for s in collect(loop.body, tirx.BufferStore) if not any(s.same_as(w) for w in self.within)]
        if any(not isinstance(e.value, tirx.IntImm) for e in collect(loop.body, tirx.Evaluate)):
            raise Unsplittable("a row calls a function")
        self._check_bound()
        self.reduced = self._reduced()
        self.copied = self._copied()
        self._check_loads()
        self.results = [self._result(b) for b in self.reduced if b not in self.inside]
        self.conditions = {r.buffer: self._condition(r) for r in self.results}

    # ------------------------------------------------------------------ analysis

    def _ragged(self, pointers: set[str]) -> tuple[list[tirx.For], Var]:
        """Return the outermost loops over the entries of the row, and its row pointers."""
        loops: list[tirx.For] = []
        arrays: list[Var] = []

        def on_for(node: tirx.For, mutator: Any) -> Any:
            array = self._pointer(node.extent, pointers)
            if array is None:
                return mutator.default_mutate(node)
            loops.append(node)
            arrays.append(array)
            return node

        structural_mutate(self.loop.body, [(tirx.For, on_for)])
        if not loops or any(not array.same_as(arrays[0]) for array in arrays):
            raise Unsplittable("the entries of a row are not those between two row pointers")
        return loops, arrays[0]

    def _pointer(self, extent: ir.Expr, pointers: set[str]) -> Var | None:
        """Return `indptr` if an extent is ``indptr[row + 1] - indptr[row]``, else None."""
        length = uncast(extent)
        if not isinstance(length, tirx.Sub) or not all(isinstance(x, ir.TensorLoad) for x in (length.a, length.b)):
            return None
        source, row = length.b.source, self.row
        if str(source.name) not in pointers or not length.a.source.same_as(source):
            return None
        following = row + const(1, str(row.ty.dtype))
        return source if all_same([length.b.indices[0], length.a.indices[0]], [row, following]) else None

    def _check_bound(self) -> None:
        rows = cast(self.loop.extent, WIDE)
        if not sym.Analyzer().can_prove(rows < cast(self.pointer.ty.shape[0], WIDE)):
            raise Unsplittable("the loop may have more rows than there are row pointers")

    def _reduced(self) -> dict[Var, type]:
        """Return the arrays that the entries are reduced into, with their combiners."""
        combiners: dict[Var, type] = {}
        private = {a.buffer for f in self.ragged for a in collect(f.body, tirx.AllocBuffer)}
        for store in self.within:
            if store.buffer in private or self._is_at_entry(store):
                continue
            combiner = _update(store)
            if combiner is None or combiners.get(store.buffer, combiner) is not combiner:
                raise Unsplittable(f"{store.buffer.name} is no sum, maximum or minimum of terms")
            combiners[store.buffer] = combiner
        return combiners

    def _is_at_entry(self, store: tirx.BufferStore) -> bool:
        """Return whether a store sets an element at the entry's position, and all accesses of the array are there."""
        at = [n for n, i in enumerate(store.indices) if any(same(i, self._position(f)) for f in self.ragged)]
        if not at or len(self.ragged) > 1 or store.buffer in self.inside:
            return False
        position = store.indices[at[0]]
        touched = [*collect(self.loop.body, ir.TensorLoad), *collect(self.loop.body, tirx.BufferStore)]
        array = lambda x: x.source if isinstance(x, ir.TensorLoad) else x.buffer  # noqa: E731
        return all(same(x.indices[at[0]], position) for x in touched if array(x).same_as(store.buffer))

    def _position(self, ragged: tirx.For) -> ir.Expr:
        """Return ``indptr[row] + j``."""
        start = tirx.BufferLoad(self.pointer, [self.row])
        return start + ragged.loop_var

    def _copied(self) -> list[tirx.BufferStore]:
        """Return the stores of a reduced local array to a result; the result gets the array's combiner."""
        copies = []
        for store in self.around:
            value = store.value
            source = value.source if isinstance(value, ir.TensorLoad) else None
            if source not in self.reduced or source not in self.inside or store.buffer in self.inside:
                continue
            if self.reduced.setdefault(store.buffer, self.reduced[source]) is not self.reduced[source]:
                raise Unsplittable(f"{store.buffer.name} is reduced in two ways")
            copies.append(store)
        return copies

    def _check_loads(self) -> None:
        """Raise unless only updates, copies and initialisations use reduced arrays or store outside the loop."""
        for store in self.around:
            if store.buffer not in self.reduced and store.buffer not in self.inside:
                raise Unsplittable(f"{store.buffer.name} is written once a row")
        for buffer in self.reduced:
            counted = sum(s.buffer.same_as(buffer) for s in self.within)
            counted += sum(s.value.source.same_as(buffer) for s in self.copied)
            counted += sum(isinstance(s.value, ir.TensorLoad) and s.value.source.same_as(buffer) for s in self._taken())
            if len(loads_of(self.loop.body, buffer)) != counted:
                raise Unsplittable(f"{buffer.name} is used before the row ends")

    def _taken(self) -> list[tirx.BufferStore]:
        """Return the initialisations of local arrays by the old value of a result."""
        inits = [s for s in self.around if s.buffer in self.inside and s.buffer in self.reduced]
        return [s for s in inits if isinstance(s.value, ir.TensorLoad) and s.value.source not in self.inside]

    def _result(self, buffer: Var) -> ReducedArray:
        stores = [s for s in (*self.within, *self.around) if s.buffer.same_as(buffer)]
        touched = [list(s.indices) for s in stores] + [list(x.indices) for x in loads_of(self.loop.body, buffer)]
        at = [n for n, index in enumerate(touched[0]) if mentions(index, [self.row])]
        moving = [*defined_vars(self.loop.body), *self.inside]
        if len(at) != 1 or mentions(touched[0][at[0]], moving):
            raise Unsplittable(f"the row of {buffer.name} is not the loop's")
        row = touched[0][at[0]]
        if not all(same(indices[at[0]], row) for indices in touched):
            raise Unsplittable(f"several rows of {buffer.name} are touched in a step")
        return ReducedArray(buffer, row, at[0], self.reduced[buffer])

    def _condition(self, result: ReducedArray) -> ir.Expr | None:
        """Return the condition on which a row has an element of a result; None where each row has one."""
        branches: list[ir.Expr] = []
        paths: list[list[ir.Expr]] = []

        def on_if(node: tirx.IfThenElse, mutator: Any) -> Any:
            for body, condition in ((node.then_case, node.condition), (node.else_case, tirx.Not(node.condition))):
                if body is not None:
                    parts = conjuncts(condition)
                    branches.extend(parts)
                    mutator.mutate(body)
                    del branches[-len(parts) :]
            return node

        def on_store(node: tirx.BufferStore, _mutator: Any) -> Any:
            if node.buffer.same_as(result.buffer):
                paths.append(list(branches))
            return node

        structural_mutate(self.loop.body, [(tirx.IfThenElse, on_if), (tirx.BufferStore, on_store)])
        moving = [*defined_vars(self.loop.body), *self.inside, *self.reduced]
        fixed = [[part for part in parts if not mentions(part, moving)] for parts in paths]
        if any(mentions(part, moving) and self._decides(part, result.row) for parts in paths for part in parts):
            raise Unsplittable(f"elements of {result.buffer.name} depend on a condition that also guards entries")
        if not all(fixed):
            return None
        return functools.reduce(tirx.Or, [functools.reduce(tirx.And, parts) for parts in fixed])

    def _decides(self, condition: ir.Expr, row: ir.Expr) -> bool:
        """Return whether a condition compares the row of a result: a value that it loads, or the loop's row itself."""
        loads = collect(row, ir.TensorLoad)
        if loads:
            return any(same(a, b) for a in loads for b in collect(condition, ir.TensorLoad))
        if row.same_as(self.row):
            return False  # the loop's bounds are those of the result
        without_loads = structural_mutate(condition, (ir.TensorLoad, lambda load, _: const(0, str(load.ty.dtype))))
        return mentions(without_loads, [self.row])

    # ------------------------------------------------------------------ a part of a row

    def part(self, row: ir.Expr, start: ir.Expr, stop: ir.Expr) -> tirx.Stmt:
        """Emit a step for the entries `start` to `stop` of a row."""

        def on_for(node: tirx.For, mutator: Any) -> Any:
            if not any(node.same_as(f) for f in self.ragged):
                return mutator.default_mutate(node)
            entry = Var(str(node.loop_var.name), node.loop_var.ty)
            count = cast(stop - start, str(entry.ty.dtype))
            return loop(node.kind, entry, count, self._moved(node, start, entry), node.annotations)

        return substitute(structural_mutate(self.loop.body, [(tirx.For, on_for)]), {self.row: row})

    def _moved(self, ragged: tirx.For, start: ir.Expr, entry: Var) -> tirx.Stmt:
        """Return the body of a loop over entries, counted from `start`."""
        position = self._position(ragged)
        dtype = str(position.ty.dtype)

        def on_add(node: tirx.Add, mutator: Any) -> ir.Expr:
            return cast(start, dtype) + entry if same(node, position) else mutator.default_mutate(node)

        body = structural_mutate(ragged.body, [(tirx.Add, on_add)])
        begin = tirx.BufferLoad(self.pointer, [self.row])
        return substitute(body, {ragged.loop_var: cast(start - begin, str(entry.ty.dtype)) + entry})

    def carried(self, body: tirx.Stmt, carries: dict[Var, Var], chunk: ir.Expr) -> tirx.Stmt:
        """Redirect the results of `body` to the carry of a chunk, with neutral initial values."""
        results = {r.buffer: r for r in self.results}

        def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
            value = mutator.mutate(store.value)
            if store.buffer in self.reduced and not (_update(store) or self._is_copy(store)):
                value = neutral(self.reduced[store.buffer], str(store.buffer.ty.dtype))
            indices = [mutator.mutate(i) for i in store.indices]
            if store.buffer not in results:
                return tirx.BufferStore(store.buffer, value, indices)
            other_indices = results[store.buffer].without_row(indices)
            return tirx.BufferStore(carries[store.buffer], value, [chunk, *other_indices])

        def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
            if load.source not in results:
                return mutator.default_mutate(load)
            other_indices = results[load.source].without_row([mutator.mutate(i) for i in load.indices])
            return tirx.BufferLoad(carries[load.source], [chunk, *other_indices])

        return structural_mutate(body, [(tirx.BufferStore, on_store), (ir.TensorLoad, on_load)])

    def _is_copy(self, store: tirx.BufferStore) -> bool:
        value = store.value
        return isinstance(value, ir.TensorLoad) and value.source in self.inside and value.source in self.reduced


# Nonzero load balancing: split the rows of an annotated loop into chunks with the same number of nonzeros.
#
# before::
#
#     for i in T.serial(m, annotations={"sparsetir.chunks": 16}):
#         for j in range(indptr[i + 1] - indptr[i]):
#             ...
#
# after::
#
#     for chunk in T.parallel(16):
#         ...  # first[0], last[0]: where indptr[i] + i passes chunk / 16 and (chunk + 1) / 16 of its total
#         for i in range(last[0] - first[0]):
#             for j in range(indptr[first[0] + i + 1] - indptr[first[0] + i]):
#                 ...
#
# The work before row `i` is the row pointer of the innermost ragged loop below it, plus one per row. Rows without a
# ragged loop are split evenly.


def _is_prefix(expr: ir.Expr, row: Var, pointers: set[str]) -> bool:
    """Return whether `expr` is nondecreasing in the row: an affine function of it, or row pointers of one."""
    if isinstance(expr, tirx.Cast):
        return _is_prefix(expr.value, row, pointers)
    if isinstance(expr, tirx.Add) and not (mentions(expr.a, [row]) and mentions(expr.b, [row])):
        return _is_prefix(expr.a if mentions(expr.a, [row]) else expr.b, row, pointers)
    if isinstance(expr, tirx.Mul) and isinstance(expr.b, tirx.IntImm) and int(expr.b) > 0:
        return _is_prefix(expr.a, row, pointers)
    if isinstance(expr, ir.TensorLoad):
        return str(expr.source.name) in pointers and _is_prefix(expr.indices[0], row, pointers)
    return expr.same_as(row)


def work_before(loop: tirx.For, pointers: set[str]) -> ir.Expr | None:
    """Return the number of innermost ragged steps before row ``loop.loop_var``; None if there is no ragged loop.

    Of adjacent ragged loops, the one with the most work is used.
    """
    row, best = loop.loop_var, None
    chosen: tirx.For | None = None
    zeros: dict[Var, ir.Expr] = {}
    analyzer = sym.Analyzer()
    for inner in collect(loop.body, tirx.For):
        extent = uncast(inner.extent)
        if isinstance(extent, tirx.Sub) and isinstance(extent.b, ir.TensorLoad):
            start = analyzer.simplify(substitute(extent.b, zeros))
            is_less = chosen is not None and _fixed_steps(inner) < _fixed_steps(chosen) and not _holds(chosen, inner)
            if _is_prefix(start, row, pointers) and not is_less:
                best, chosen = start, inner
        zeros[inner.loop_var] = const(0, str(inner.loop_var.ty.dtype))
    return best


def _fixed_steps(loop: tirx.For) -> int:
    """Return the product of the constant extents of all loops below `loop`."""
    return math.prod(int(f.extent) for f in collect(loop.body, tirx.For) if isinstance(f.extent, tirx.IntImm))


def _holds(loop: tirx.For, inner: tirx.For) -> bool:
    return any(f.loop_var.same_as(inner.loop_var) for f in collect(loop.body, tirx.For))


def _at(work: ir.Expr, row: Var, index: ir.Expr, rows: ir.Expr) -> ir.Expr:
    """Return `work` before row `index`; the total for rows of a padded loop beyond the row pointers."""
    loads = [x for x in collect(work, ir.TensorLoad) if mentions(x, [row])]
    pointers = next(x for x in loads if not mentions(collect(x.indices, ir.TensorLoad), [row]))
    last = cast(pointers.source.ty.shape[0], str(row.ty.dtype)) - const(1, str(row.ty.dtype))
    place = pointers.indices[0]
    if sym.Analyzer().can_prove(substitute(place, {row: rows}) <= last):
        return substitute(work, {row: index})
    nearest = tirx.min(substitute(place, {row: index}), last)
    on_load = lambda x, m: tirx.BufferLoad(x.source, [nearest]) if x.same_as(pointers) else m.default_mutate(x)  # noqa: E731
    return substitute(structural_mutate(work, [(ir.TensorLoad, on_load)]), {row: index})


def work_before_step(loop: tirx.For, pointers: set[str]) -> Callable[[ir.Expr], ir.Expr]:
    """Return a function of the work before a step of `loop`: one per row, plus its ragged steps times fixed steps.

    Loops along a row of a result do not count as fixed steps.
    """
    row = loop.loop_var
    work, steps_per_entry = work_before(loop, pointers), _steps_each(loop)

    def before(step: ir.Expr) -> ir.Expr:
        ragged = cast(step if work is None else _at(work, row, step, loop.extent), WIDE)
        return cast(step, WIDE) + ragged * steps_per_entry

    return before


def _steps_each(loop: tirx.For) -> ir.Expr:
    """Return the product of the extents below `loop` that are equal in every row, except along a row of a result."""
    along = [f for f in collect(loop.body, tirx.For) if _is_along(f)]
    inner = defined_vars(loop.body)
    product: ir.Expr = const(1, WIDE)
    for f in collect(loop.body, tirx.For):
        if f not in along and not mentions(f.extent, [loop.loop_var, *inner]) and not collect(f.extent, ir.TensorLoad):
            product = product * cast(f.extent, WIDE)
    return product


def _is_along(inner: tirx.For) -> bool:
    """Return whether a loop moves the last of several subscripts of a result."""
    stores = [s for s in collect(inner.body, tirx.BufferStore) if len(s.indices) > 1]
    return any(mentions(s.indices[-1], [inner.loop_var]) for s in stores)


def balance(loop: tirx.For, pointers: set[str]) -> tirx.Stmt:
    """Split the rows of `loop` into parallel chunks of equal work; the annotation gives their number."""
    row, dtype = loop.loop_var, str(loop.loop_var.ty.dtype)
    work = work_before(loop, pointers)
    weight = lambda i: cast(i, WIDE) + (cast(_at(work, row, i, loop.extent), WIDE) if work is not None else 0)  # noqa: E731
    chunk = Var("chunk", ir.PrimType("int32"))
    total = weight(loop.extent)
    first, last, high = cell("first", dtype), cell("last", dtype), cell("high", dtype)

    def bound(place: Var, index: ir.Expr) -> list[tirx.Stmt]:
        target = tirx.floordiv(total * cast(index, WIDE), amount(loop, CHUNKS, WIDE))
        search = binary_search(lambda mid: weight(mid) < target, place, high)
        return [put(place, const(0, dtype)), put(high, loop.extent), search]

    shifted = Var(str(row.name), row.ty)
    body = substitute(loop.body, {row: get(first) + shifted})
    inner = serial(shifted, get(last) - get(first), body, without(loop, CHUNKS, PARALLEL_MARK, SWEEP))
    steps = [*alloc(first, last, high), *bound(first, chunk), *bound(last, chunk + 1), inner]
    return parallel(chunk, amount(loop, CHUNKS), seq(*steps))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.BalanceNonzeros")
def BalanceNonzeros(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Balance every annotated loop of a function that has a proof of independence."""
    pointers = names_in(func, INDPTR)

    def share(loop: tirx.For) -> tirx.Stmt | None:
        if CHUNKS not in loop.annotations:
            return None
        if PARALLEL_MARK not in loop.annotations:
            why = "its steps may write the same element; annotate the outermost independent loop"
            return refused(loop, CHUNKS, why)
        return balance(loop, pointers)

    return each_loop(func, outer=share, inner=lambda loop: with_(loop, notes=without(loop, PARALLEL_MARK)))


# Merge-path split with carry-out: every chunk has equal work, counted in rows and nonzeros, and a row may span chunks.
#
# before::
#
#     for i in T.serial(m, annotations={"sparsetir.chunks": 16, "sparsetir.carry": 1}):
#         y[i] = 0
#         for j in range(indptr[i + 1] - indptr[i]):
#             y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]
#
# after::
#
#     carry = T.alloc_buffer((16,))
#     owner = T.alloc_buffer((16,), "int32")
#     for chunk in T.parallel(16):
#         ...  # from row first[0], entry begin[0] to row last[0], entry stop[0]: a sixteenth of the rows and entries
#         for i in range(last[0] - first[0]):  # rows that end in this chunk
#             start[0] = T.max(indptr[first[0] + i], begin[0])
#             y[first[0] + i] = 0
#             for j in range(indptr[first[0] + i + 1] - start[0]):
#                 y[first[0] + i] = y[first[0] + i] + a[start[0] + j] * x[indices[start[0] + j]]
#         start[0] = T.max(indptr[last[0]], begin[0])
#         owner[chunk] = -1
#         if start[0] < stop[0]:  # the row that ends in a later one
#             owner[chunk] = last[0]
#             carry[chunk] = 0
#             for j in range(stop[0] - start[0]):
#                 carry[chunk] = carry[chunk] + a[start[0] + j] * x[indices[start[0] + j]]
#     for chunk in range(16):
#         if owner[chunk] >= 0:
#             y[owner[chunk]] = y[owner[chunk]] + carry[chunk]
#
# This is the merge path of Merrill and Garland, "Merge-based Parallel Sparse Matrix-Vector Multiplication", SC 2016: a
# step is an entry or the end of a row, and the chunk where a row ends initialises it, or includes its old value.
#
# Loops that `RowParts` does not support are left to `BalanceNonzeros`, which splits between rows only.


def _nest(result: ReducedArray, body: Any) -> tirx.Stmt:
    """Emit ``body(others)`` for every element of a row."""
    lanes = [Var("k", ir.PrimType(str(extent.ty.dtype))) for extent in result.others]
    nest = body(list(lanes))
    for lane, extent in reversed(list(zip(lanes, result.others, strict=True))):
        nest = serial(lane, extent, nest)
    return nest


class Chunks:
    """Parallel loop over chunks of equal work of a row loop, followed by the addition of the carries."""

    def __init__(self, rows: RowParts) -> None:
        self.rows, self.count = rows, int(rows.loop.annotations[CHUNKS])
        self.dtype, self.entries = str(rows.row.ty.dtype), str(rows.pointer.ty.dtype)
        self.first, self.last, self.high = (cell(n, self.dtype) for n in ("first", "last", "high"))
        self.begin, self.stop, self.start = (cell(n, self.entries) for n in ("begin", "stop", "start"))
        self.carries = {r.buffer: self._carry(r) for r in rows.results}
        self.owner = tirx.decl_buffer([self.count], self.dtype, name="owner", layout=None)

    def _carry(self, result: ReducedArray) -> Var:
        """Declare the carry of a result: one row for every chunk."""
        shape = [const(self.count), *result.others]
        return tirx.decl_buffer(shape, str(result.buffer.ty.dtype), name="carry", layout=None)

    def _pointer(self, row: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(self.rows.pointer, [row])

    def whole(self) -> tirx.Stmt:
        """Emit the allocations, the parallel loop over chunks and the addition of the carries."""
        chunk = Var("chunk", ir.PrimType("int32"))
        cells = alloc(self.first, self.last, self.high, self.begin, self.stop, self.start)
        bounds = [*self.bound(self.first, self.begin, chunk), *self.bound(self.last, self.stop, chunk + const(1))]
        steps = seq(*cells, *bounds, self.ends(), *self.tail(chunk))
        every = parallel(chunk, self.count, steps)
        return seq(*alloc(*self.carries.values(), self.owner), every, self.joined()) if self.carries else every

    def bound(self, row: Var, entry: Var, index: ir.Expr) -> list[tirx.Stmt]:
        """Set `row` and `entry` to the start of chunk `index` on the merge path."""
        extent, one = self.rows.loop.extent, const(1, self.dtype)
        total = cast(extent, WIDE) + cast(self._pointer(extent), WIDE)
        done = tirx.floordiv(total * cast(index, WIDE), const(self.count, WIDE))
        ended = lambda mid: cast(mid + one, WIDE) + cast(self._pointer(mid + one), WIDE)  # noqa: E731
        search = binary_search(lambda mid: ended(mid) <= done, row, self.high)
        place = put(entry, cast(done - cast(get(row), WIDE), self.entries))
        return [put(row, const(0, self.dtype)), put(self.high, extent), search, place]

    def _seek(self, row: ir.Expr) -> tirx.Stmt:
        """Set `start` to the first entry of a row that is not in an earlier chunk."""
        return put(self.start, tirx.max(self._pointer(row), get(self.begin)))

    def ends(self) -> tirx.For:
        """Emit the loop over the rows that end in the chunk; the first row starts where the chunk begins."""
        loop, old = self.rows.loop, self.rows.row
        step = Var(str(old.name), old.ty)
        row = get(self.first) + step
        part = self.rows.part(row, get(self.start), self._pointer(row + const(1, self.dtype)))
        notes = without(loop, CHUNKS, CARRY, PARALLEL_MARK, SWEEP)
        count = get(self.last) - get(self.first)
        body = seq(self._seek(row), part)
        return serial(step, count, body, notes)

    def tail(self, chunk: Var) -> list[tirx.Stmt]:
        """Emit the reduction of the entries of the row that ends in a later chunk to the carry."""
        row = get(self.last)
        part = self.rows.carried(self.rows.part(row, get(self.start), get(self.stop)), self.carries, chunk)
        clear = [self._clear(r, chunk) for r in self.rows.results]
        note = [tirx.BufferStore(self.owner, row, [chunk])] if self.carries else []
        forget = [tirx.BufferStore(self.owner, const(-1, self.dtype), [chunk])] if self.carries else []
        goes_on = seq(*note, *clear, renewed(part))
        return [self._seek(row), *forget, tirx.IfThenElse(get(self.start) < get(self.stop), goes_on, None)]

    def _clear(self, result: ReducedArray, chunk: Var) -> tirx.Stmt:
        carry = self.carries[result.buffer]
        value = neutral(result.combiner, str(carry.ty.dtype))
        return _nest(result, lambda others: tirx.BufferStore(carry, value, [chunk, *others]))

    def joined(self) -> tirx.Stmt:
        """Emit the loop that combines every carry with its row."""
        chunk = Var("chunk", ir.PrimType("int32"))
        owner = tirx.BufferLoad(self.owner, [chunk])
        joins = seq(*(self._join(r, chunk, owner) for r in self.rows.results))
        body = tirx.IfThenElse(owner >= const(0, self.dtype), joins, None)
        return serial(chunk, self.count, body)

    def _join(self, result: ReducedArray, chunk: Var, owner: ir.Expr) -> tirx.Stmt:
        row = substitute(result.row, {self.rows.row: owner})

        def combine(others: list[ir.Expr]) -> tirx.Stmt:
            at = result.with_row(row, others)
            carried = tirx.BufferLoad(self.carries[result.buffer], [chunk, *others])
            return tirx.BufferStore(result.buffer, result.combiner(tirx.BufferLoad(result.buffer, at), carried), at)

        joins, condition = _nest(result, combine), self.rows.conditions[result.buffer]
        if condition is None:
            return joins
        return tirx.IfThenElse(substitute(condition, {self.rows.row: owner}), joins, None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.SplitMergePath")
def SplitMergePath(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Split every annotated loop of a function by merge path, where `RowParts` supports it."""
    if not any(CARRY in f.annotations for f in collect(func.body, tirx.For)):
        return func
    pointers = names_in(func, INDPTR)

    def split(loop: tirx.For) -> tirx.Stmt | None:
        if CARRY not in loop.annotations:
            return None
        if CHUNKS not in loop.annotations or PARALLEL_MARK not in loop.annotations:
            return refused(loop, CARRY, "the loop is not split among threads")
        try:
            return Chunks(RowParts(loop, pointers)).whole()
        except Unsplittable as error:
            return refused(loop, CARRY, str(error))

    return each_loop(func, outer=split)


__all__ = [
    "BalanceNonzeros",
    "Chunks",
    "ReducedArray",
    "RowParts",
    "SplitMergePath",
    "Unsplittable",
    "balance",
    "neutral",
    "work_before",
    "work_before_step",
]
