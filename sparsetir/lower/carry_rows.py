# SPDX-License-Identifier: Apache-2.0
"""Share the nonzeros of an annotated loop evenly, splitting rows that reach into several chunks.

before::

    for i in T.serial(m, annotations={"sparsetir.chunks": 16, "sparsetir.carry": 1}):
        y[i] = 0
        for j in range(indptr[i + 1] - indptr[i]):
            y[i] = y[i] + a[indptr[i] + j] * x[indices[indptr[i] + j]]

after::

    carry = T.alloc_buffer((16,))
    owner = T.alloc_buffer((16,), "int32")
    for chunk in T.parallel(16):
        ...  # from row first[0], entry from_[0] to row last[0], entry to[0]: a sixteenth of the rows and entries
        for i in range(last[0] - first[0]):  # rows that end in this chunk
            start[0] = T.max(indptr[first[0] + i], from_[0])
            y[first[0] + i] = 0
            for j in range(indptr[first[0] + i + 1] - start[0]):
                y[first[0] + i] = y[first[0] + i] + a[start[0] + j] * x[indices[start[0] + j]]
        start[0] = T.max(indptr[last[0]], from_[0])
        owner[chunk] = -1
        if start[0] < to[0]:  # the row that ends in a later one
            owner[chunk] = last[0]
            carry[chunk] = 0
            for j in range(to[0] - start[0]):
                carry[chunk] = carry[chunk] + a[start[0] + j] * x[indices[start[0] + j]]
    for chunk in range(16):
        if owner[chunk] >= 0:
            y[owner[chunk]] = y[owner[chunk]] + carry[chunk]

This is the merge path of Merrill and Garland, "Merge-based Parallel Sparse Matrix-Vector Multiplication", SC 2016: a
step is an entry or the end of a row, and a row is initialised, or its old value counted, in the chunk where it ends.

`Rows` says which loops it takes; those it does not take are left to `BalanceLoops`, whole rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import SWEEP, cast, const
from sparsetir.lower.balance_loops import CARRY, CHUNKS, INDPTR, PARALLEL_MARK
from sparsetir.lower.lower_find import binary_search
from sparsetir.lower.rewriting import (
    all_same,
    alloc,
    cell,
    collect,
    get,
    mentions,
    put,
    renewed,
    same,
    seq,
    substitute,
)

WIDE = "int64"

#: combiners of sums and extrema, and what each leaves as it is
NEUTRAL = {tirx.Add: 0.0, tirx.Max: float("-inf"), tirx.Min: float("inf")}


class Unfit(Exception):
    """Why the rows of a loop cannot be split."""


def neutral(combiner: type, dtype: str) -> ir.Expr:
    """The value that a combiner leaves every other as it is with."""
    value = NEUTRAL[combiner]
    if value == 0 or dtype.startswith(("float", "bfloat")):
        return tirx.const(value, dtype)
    return tirx.min_value(dtype) if combiner is tirx.Max else tirx.max_value(dtype)


def _update(store: tirx.BufferStore) -> type | None:
    """The combiner of ``x[i] = x[i] + term``; None where a store does something else."""
    value = store.value
    if type(value) not in NEUTRAL:
        return None
    own = [_is_own(side, store) for side in (value.a, value.b)]
    return type(value) if any(own) else None


def _is_own(expr: ir.Expr, store: tirx.BufferStore) -> bool:
    """Whether `expr` is the element that is stored."""
    is_load = isinstance(expr, ir.TensorLoad) and expr.source.same_as(store.buffer)
    return is_load and all_same(list(expr.indices), list(store.indices))


def _loads(node: Any, buffer: Var) -> list[ir.TensorLoad]:
    return [x for x in collect(node, ir.TensorLoad) if x.source.same_as(buffer)]


def _uncast(expr: ir.Expr) -> ir.Expr:
    return _uncast(expr.value) if isinstance(expr, tirx.Cast) else expr


@dataclass(frozen=True, eq=False)
class Result:
    """An array whose rows are reduced: which subscript is the row, and by what."""

    buffer: Var
    row: ir.Expr
    at: int
    combiner: type

    @property
    def others(self) -> list[ir.Expr]:
        """Extents of the other dimensions."""
        return [extent for n, extent in enumerate(self.buffer.ty.shape) if n != self.at]

    def without_row(self, indices: Any) -> list[ir.Expr]:
        """Subscripts of the other dimensions."""
        return [index for n, index in enumerate(indices) if n != self.at]

    def with_row(self, row: ir.Expr, others: list[ir.Expr]) -> list[ir.Expr]:
        """Subscripts of an element."""
        return [*others[: self.at], row, *others[self.at :]]


class Rows:
    """What happens in a step of a row loop, as far as it can be done for a part of the row.

    Loops over the row's entries reduce into results and local arrays by one sum, maximum or minimum each, or set
    elements at the entries' own positions; around them these are initialised, and copied to the results. Anything
    else raises `Unfit`.
    """

    def __init__(self, loop: tirx.For, pointers: set[str]) -> None:
        self.loop, self.row = loop, loop.loop_var
        self.inside = {a.buffer for a in collect(loop.body, tirx.AllocBuffer)}
        self.ragged, self.pointer = self._ragged(pointers)
        self.within = [s for f in self.ragged for s in collect(f.body, tirx.BufferStore)]
        self.around = [s for s in collect(loop.body, tirx.BufferStore) if not any(s.same_as(w) for w in self.within)]
        if any(not isinstance(e.value, tirx.IntImm) for e in collect(loop.body, tirx.Evaluate)):
            raise Unfit("a row calls something")
        self._check_bound()
        self.reduced = self._reduced()
        self.copied = self._copied()
        self._check_loads()
        self.results = [self._result(b) for b in self.reduced if b not in self.inside]

    # ------------------------------------------------------------------ what there is

    def _ragged(self, pointers: set[str]) -> tuple[list[tirx.For], Var]:
        """The outermost loops over the entries of the row, and its row pointers."""
        found: list[tirx.For] = []

        def on_for(node: tirx.For, mutator: Any) -> Any:
            if self._pointer(node.extent, pointers) is None:
                return mutator.default_mutate(node)
            found.append(node)
            return node

        tvm_ffi.structural_mutate(self.loop.body, [(tirx.For, on_for)])
        arrays = [self._pointer(f.extent, pointers) for f in found]
        if not found or any(not array.same_as(arrays[0]) for array in arrays):
            raise Unfit("the entries of a row are not those between two row pointers")
        return found, arrays[0]

    def _pointer(self, extent: ir.Expr, pointers: set[str]) -> Var | None:
        """`indptr` where an extent is ``indptr[row + 1] - indptr[row]``."""
        length = _uncast(extent)
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
            raise Unfit("the loop may have more rows than there are row pointers")

    def _reduced(self) -> dict[Var, type]:
        """Arrays that the entries are reduced into, and the combiner of each."""
        found: dict[Var, type] = {}
        private = {a.buffer for f in self.ragged for a in collect(f.body, tirx.AllocBuffer)}
        for store in self.within:
            if store.buffer in private or self._is_at_entry(store):
                continue
            combiner = _update(store)
            if combiner is None or found.get(store.buffer, combiner) is not combiner:
                raise Unfit(f"{store.buffer.name} is no sum, maximum or minimum of terms")
            found[store.buffer] = combiner
        return found

    def _is_at_entry(self, store: tirx.BufferStore) -> bool:
        """Whether a store sets an element that belongs to the entry, and nobody touches it elsewhere."""
        at = [n for n, i in enumerate(store.indices) if any(same(i, self._position(f)) for f in self.ragged)]
        if not at or len(self.ragged) > 1 or store.buffer in self.inside:
            return False
        position = store.indices[at[0]]
        touched = [*collect(self.loop.body, ir.TensorLoad), *collect(self.loop.body, tirx.BufferStore)]
        array = lambda x: x.source if isinstance(x, ir.TensorLoad) else x.buffer  # noqa: E731
        return all(same(x.indices[at[0]], position) for x in touched if array(x).same_as(store.buffer))

    def _position(self, ragged: tirx.For) -> ir.Expr:
        """``indptr[row] + j``."""
        start = tirx.BufferLoad(self.pointer, [self.row])
        return start + ragged.loop_var

    def _copied(self) -> list[tirx.BufferStore]:
        """Stores of a reduced local array to a result, which gets its combiner from there."""
        copies = []
        for store in self.around:
            value = store.value
            source = value.source if isinstance(value, ir.TensorLoad) else None
            if source not in self.reduced or source not in self.inside or store.buffer in self.inside:
                continue
            if self.reduced.setdefault(store.buffer, self.reduced[source]) is not self.reduced[source]:
                raise Unfit(f"{store.buffer.name} is reduced in two ways")
            copies.append(store)
        return copies

    def _check_loads(self) -> None:
        """Nothing but updates, copies and initialisations may depend on what is reduced, or leave the loop."""
        for store in self.around:
            if store.buffer not in self.reduced and store.buffer not in self.inside:
                raise Unfit(f"{store.buffer.name} is written once a row")
        for buffer in self.reduced:
            known = sum(s.buffer.same_as(buffer) for s in self.within)
            known += sum(s.value.source.same_as(buffer) for s in self.copied)
            known += sum(isinstance(s.value, ir.TensorLoad) and s.value.source.same_as(buffer) for s in self._taken())
            if len(_loads(self.loop.body, buffer)) != known:
                raise Unfit(f"{buffer.name} is used before the row ends")

    def _taken(self) -> list[tirx.BufferStore]:
        """Initialisations of local arrays by the old value of a result."""
        inits = [s for s in self.around if s.buffer in self.inside and s.buffer in self.reduced]
        return [s for s in inits if isinstance(s.value, ir.TensorLoad) and s.value.source not in self.inside]

    def _result(self, buffer: Var) -> Result:
        stores = [s for s in (*self.within, *self.around) if s.buffer.same_as(buffer)]
        touched = [list(s.indices) for s in stores] + [list(x.indices) for x in _loads(self.loop.body, buffer)]
        at = [n for n, index in enumerate(touched[0]) if mentions(index, [self.row])]
        moving = [f.loop_var for f in collect(self.loop.body, tirx.For)]
        moving += [b.var for b in collect(self.loop.body, tirx.Bind)] + list(self.inside)
        if len(at) != 1 or mentions(touched[0][at[0]], moving):
            raise Unfit(f"the row of {buffer.name} is not the loop's")
        row = touched[0][at[0]]
        if not all(same(indices[at[0]], row) for indices in touched):
            raise Unfit(f"several rows of {buffer.name} are touched in a step")
        return Result(buffer, row, at[0], self.reduced[buffer])

    # ------------------------------------------------------------------ a part of a row

    def part(self, row: ir.Expr, start: ir.Expr, stop: ir.Expr) -> tirx.Stmt:
        """A step for the entries `start` to `stop` of a row."""

        def on_for(node: tirx.For, mutator: Any) -> Any:
            if not any(node.same_as(f) for f in self.ragged):
                return mutator.default_mutate(node)
            dtype = str(node.loop_var.ty.dtype)
            entry = Var(str(node.loop_var.name), node.loop_var.ty)
            body = self._moved(node, start, entry)
            return tirx.For(entry, const(0, dtype), cast(stop - start, dtype), node.kind, body, None, node.annotations)

        return substitute(tvm_ffi.structural_mutate(self.loop.body, [(tirx.For, on_for)]), {self.row: row})

    def _moved(self, ragged: tirx.For, start: ir.Expr, entry: Var) -> tirx.Stmt:
        """The body of a loop over entries, counted from `start`."""
        position = self._position(ragged)
        dtype = str(position.ty.dtype)

        def on_add(node: tirx.Add, mutator: Any) -> ir.Expr:
            return cast(start, dtype) + entry if same(node, position) else mutator.default_mutate(node)

        body = tvm_ffi.structural_mutate(ragged.body, [(tirx.Add, on_add)])
        begin = tirx.BufferLoad(self.pointer, [self.row])
        return substitute(body, {ragged.loop_var: cast(start - begin, str(entry.ty.dtype)) + entry})

    def carried(self, body: tirx.Stmt, carries: dict[Var, Var], chunk: ir.Expr) -> tirx.Stmt:
        """`body` with its results in the carry of a chunk, and nothing there before."""
        results = {r.buffer: r for r in self.results}

        def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
            value = mutator.mutate(store.value)
            if store.buffer in self.reduced and not (_update(store) or self._is_copy(store)):
                value = neutral(self.reduced[store.buffer], str(store.buffer.ty.dtype))
            indices = [mutator.mutate(i) for i in store.indices]
            if store.buffer not in results:
                return tirx.BufferStore(store.buffer, value, indices)
            others = results[store.buffer].without_row(indices)
            return tirx.BufferStore(carries[store.buffer], value, [chunk, *others])

        def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
            if load.source not in results:
                return mutator.default_mutate(load)
            others = results[load.source].without_row([mutator.mutate(i) for i in load.indices])
            return tirx.BufferLoad(carries[load.source], [chunk, *others])

        return tvm_ffi.structural_mutate(body, [(tirx.BufferStore, on_store), (ir.TensorLoad, on_load)])

    def _is_copy(self, store: tirx.BufferStore) -> bool:
        value = store.value
        return isinstance(value, ir.TensorLoad) and value.source in self.inside and value.source in self.reduced


def _nest(result: Result, body: Any) -> tirx.Stmt:
    """``body(others)`` for every element of a row."""
    lanes = [Var("k", ir.PrimType(str(extent.ty.dtype))) for extent in result.others]
    nest = body(list(lanes))
    for lane, extent in reversed(list(zip(lanes, result.others, strict=True))):
        nest = tirx.For(lane, const(0, str(lane.ty.dtype)), extent, tirx.ForKind.SERIAL, nest)
    return nest


def carry(rows: Rows) -> tirx.Stmt:
    """Split the entries of a row loop into parallel pieces of equal work, whatever rows they are in."""
    loop, chunks = rows.loop, int(rows.loop.annotations[CHUNKS])
    dtype, chunk = str(rows.row.ty.dtype), Var("chunk", ir.PrimType("int32"))
    entries = str(rows.pointer.ty.dtype)
    first, last, high = (cell(n, dtype) for n in ("first", "last", "high"))
    begin, end, start = (cell(n, entries) for n in ("from_", "to", "start"))
    pointer = lambda row: tirx.BufferLoad(rows.pointer, [row])  # noqa: E731
    total = cast(loop.extent, WIDE) + cast(pointer(loop.extent), WIDE)

    def bound(row: Var, entry: Var, index: ir.Expr) -> list[tirx.Stmt]:
        """The row and entry before which `index` of `chunks` parts of the work lie."""
        done = tirx.floordiv(total * cast(index, WIDE), const(chunks, WIDE))
        following = lambda mid: mid + const(1, dtype)  # noqa: E731
        ended = lambda mid: cast(following(mid), WIDE) + cast(pointer(following(mid)), WIDE)  # noqa: E731
        search = binary_search(lambda mid: ended(mid) <= done, row, high)
        place = put(entry, cast(done - cast(get(row), WIDE), entries))
        return [put(row, const(0, dtype)), put(high, loop.extent), search, place]

    carries = {
        r.buffer: tirx.decl_buffer([const(chunks), *r.others], str(r.buffer.ty.dtype), name="carry", layout=None)
        for r in rows.results
    }
    owner = tirx.decl_buffer([chunks], dtype, name="owner", layout=None)
    owned = lambda index: tirx.BufferLoad(owner, [index])  # noqa: E731

    step = Var(str(rows.row.name), rows.row.ty)
    whole = get(first) + step
    kept = {k: v for k, v in loop.annotations.items() if k not in (CHUNKS, CARRY, PARALLEL_MARK, SWEEP)}
    body = seq(
        put(start, tirx.max(pointer(whole), get(begin))),
        rows.part(whole, get(start), pointer(whole + const(1, dtype))),
    )
    ends = tirx.For(step, const(0, dtype), get(last) - get(first), tirx.ForKind.SERIAL, body, None, kept)

    clear = [
        _nest(r, lambda k, r=r: _set(carries[r.buffer], neutral(r.combiner, str(r.buffer.ty.dtype)), [chunk, *k]))
        for r in rows.results
    ]
    rest = rows.carried(rows.part(get(last), get(start), get(end)), carries, chunk)
    goes_on = seq(_set(owner, get(last), [chunk]), *clear, renewed(rest))
    tail = [
        put(start, tirx.max(pointer(get(last)), get(begin))),
        _set(owner, const(-1, dtype), [chunk]),
        tirx.IfThenElse(get(start) < get(end), goes_on, None),
    ]
    searches = [*bound(first, begin, chunk), *bound(last, end, chunk + const(1))]
    steps = seq(*alloc(first, last, high, begin, end, start), *searches, ends, *tail)
    parallel = tirx.For(chunk, const(0), const(chunks), tirx.ForKind.PARALLEL, steps)

    index = Var("chunk", ir.PrimType("int32"))

    def add(result: Result) -> tirx.Stmt:
        row = substitute(result.row, {rows.row: owned(index)})

        def combine(others: list[ir.Expr]) -> tirx.Stmt:
            at = result.with_row(row, others)
            carried = tirx.BufferLoad(carries[result.buffer], [index, *others])
            return _set(result.buffer, result.combiner(tirx.BufferLoad(result.buffer, at), carried), at)

        return _nest(result, combine)

    if not rows.results:
        return parallel if False else seq(*alloc(owner), parallel)
    fix = tirx.IfThenElse(owned(index) >= const(0, dtype), seq(*(add(r) for r in rows.results)), None)
    joined = tirx.For(index, const(0), const(chunks), tirx.ForKind.SERIAL, fix)
    return seq(*alloc(*carries.values(), owner), parallel, joined)


def _set(buffer: Var, value: ir.Expr, indices: list[ir.Expr]) -> tirx.Stmt:
    return tirx.BufferStore(buffer, value, indices)


def refusal(loop: tirx.For, pointers: set[str]) -> str | None:
    """Why the rows of a loop are kept whole; None where they can be split."""
    try:
        Rows(loop, pointers)
    except Unfit as found:
        return str(found)
    return None


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.CarryRows")
def CarryRows(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Split the rows of every annotated loop of a function that allows it."""
    if not any(CARRY in f.annotations for f in collect(func.body, tirx.For)):
        return func
    pointers = {str(n) for n in func.attrs.get(INDPTR, [])} if func.attrs is not None else set()

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        if CARRY not in node.annotations:
            return mutator.default_mutate(node)
        if CHUNKS in node.annotations and PARALLEL_MARK in node.annotations and refusal(node, pointers) is None:
            return carry(Rows(node, pointers))
        notes = {k: v for k, v in node.annotations.items() if k != CARRY}
        return tirx.For(node.loop_var, node.min, node.extent, node.kind, node.body, None, notes)

    body = tvm_ffi.structural_mutate(func.body, [(tirx.For, on_for)])
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


__all__ = ["CarryRows", "Rows", "Unfit", "carry", "neutral", "refusal"]
