# SPDX-License-Identifier: Apache-2.0
"""What a step of a row loop does, as far as it can be done for some of the row's entries alone.

before::

    y[i] = 1
    for j in range(indptr[i + 1] - indptr[i]):
        y[i] = y[i] + a[indptr[i] + j]

`RowParts.part` of entries ``p`` to ``q``::

    y[i] = 1
    for j in range(q - p):
        y[i] = y[i] + a[p + j]

The same, `RowParts.carried`::

    carry[chunk] = 0
    for j in range(q - p):
        carry[chunk] = carry[chunk] + a[p + j]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import cast, const
from sparsetir.lower.checks.steps import uncast
from sparsetir.lower.nests import Update, loop
from sparsetir.lower.rewriting import all_same, collect, mentions, same, substitute
from sparsetir.walks import structural_mutate

WIDE = "int64"

#: combiners of sums and extrema, and what each leaves as it is
NEUTRAL = {tirx.Add: 0.0, tirx.Max: float("-inf"), tirx.Min: float("inf")}


class Unfit(Exception):
    """Why the rows of a loop cannot be split."""


def neutral(combiner: type, dtype: str) -> ir.Expr:
    """The identity element of a combiner."""
    value = NEUTRAL[combiner]
    if value == 0 or dtype.startswith(("float", "bfloat")):
        return tirx.const(value, dtype)
    return tirx.min_value(dtype) if combiner is tirx.Max else tirx.max_value(dtype)


def _update(store: tirx.BufferStore) -> type | None:
    """The combiner of ``x[i] = x[i] + term``; None where a store does something else."""
    update = Update.of(store, tuple(NEUTRAL), either=True)
    return None if update is None else update.op


def _loads(node: Any, buffer: Var) -> list[ir.TensorLoad]:
    return [x for x in collect(node, ir.TensorLoad) if x.source.same_as(buffer)]


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


class RowParts:
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
        arrays: list[Var] = []

        def on_for(node: tirx.For, mutator: Any) -> Any:
            array = self._pointer(node.extent, pointers)
            if array is None:
                return mutator.default_mutate(node)
            found.append(node)
            arrays.append(array)
            return node

        structural_mutate(self.loop.body, [(tirx.For, on_for)])
        if not found or any(not array.same_as(arrays[0]) for array in arrays):
            raise Unfit("the entries of a row are not those between two row pointers")
        return found, arrays[0]

    def _pointer(self, extent: ir.Expr, pointers: set[str]) -> Var | None:
        """`indptr` where an extent is ``indptr[row + 1] - indptr[row]``."""
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
            entry = Var(str(node.loop_var.name), node.loop_var.ty)
            count = cast(stop - start, str(entry.ty.dtype))
            return loop(node.kind, entry, count, self._moved(node, start, entry), node.annotations)

        return substitute(structural_mutate(self.loop.body, [(tirx.For, on_for)]), {self.row: row})

    def _moved(self, ragged: tirx.For, start: ir.Expr, entry: Var) -> tirx.Stmt:
        """The body of a loop over entries, counted from `start`."""
        position = self._position(ragged)
        dtype = str(position.ty.dtype)

        def on_add(node: tirx.Add, mutator: Any) -> ir.Expr:
            return cast(start, dtype) + entry if same(node, position) else mutator.default_mutate(node)

        body = structural_mutate(ragged.body, [(tirx.Add, on_add)])
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

        return structural_mutate(body, [(tirx.BufferStore, on_store), (ir.TensorLoad, on_load)])

    def _is_copy(self, store: tirx.BufferStore) -> bool:
        value = store.value
        return isinstance(value, ir.TensorLoad) and value.source in self.inside and value.source in self.reduced


__all__ = ["Result", "RowParts", "Unfit", "neutral"]
