# SPDX-License-Identifier: Apache-2.0
"""Symbolic and numeric phase: the compiled functions that determine and fill a computed pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.codegen.cache import Compiled, compile_cached
from sparsetir.codegen.pipeline import machine_code
from sparsetir.errors import LoweringError, VerifyError, own_errors
from sparsetir.ir.rewriting import alloc, cell, conjunction, get, product, put, renewed, seq, substitute
from sparsetir.ir.views import cast
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower import TO_FLAT, run
from sparsetir.lower.iterations.normalize import realign
from sparsetir.lower.loops import parallel, serial
from sparsetir.lower.target.half_floats import PromoteHalves, widened
from sparsetir.lower.vector.loop_transforms import UnswitchLoops
from sparsetir.sparse_output import merges
from sparsetir.sparse_output.accumulators import (
    DUMPS,
    FIRST,
    FUNCTIONS,
    LONG,
    WORD,
    Accumulator,
    AccumulatorOptions,
    Bits,
    Bytes,
    Insertion,
    Output,
    Ranked,
    Stamped,
    Table,
    Tiered,
    add,
    copied,
    each,
    long,
    stored,
)
from sparsetir.sparse_output.merges import LONG_ROW, LOOK_WORK, BitmapParams, RowWalk
from sparsetir.sparse_output.program import AssembledProgram, assemble
from sparsetir.sparse_output.rows import (
    ROW_WORK,
    SHIFT,
    RowLoop,
    RowPartition,
    ScatterStore,
    SegmentParams,
    alone_or_shared,
    array,
    entered_by,
    fetched,
    fetches,
    lower_rows,
    size,
    update_of,
    with_own,
)
from sparsetir.sparse_output.selection import TopSelection, ordered
from sparsetir.sparse_output.small import at_once
from sparsetir.utils.caches import cached_property

# The functions behind a program with computed patterns.
#
# bound     the work of each row, which the row partition balances, and an upper bound of its coordinates
# symbolic  the number of coordinates of each row
# numeric   the coordinates and values of each row, from a given position on, and where each row ends
# looking   the same, where rows of a mask are searched in long rows of an operand
# values    the values alone, where the pattern is known
# packed    compact rows that were written with unused slots between them
# small     all phases of a call of little work, with the validation of the index arrays; see `small.py`
# shared    the same on several threads
#
# All but `bound` and `small` iterate over chunks of rows in parallel; each chunk has its own accumulator.


DENSE = 4  # entries in each block from which on they are marked in bytes
SPARSE = 32  # blocks per entry above which marking the entries is faster than iterating over blocks


class Functions:
    """Builder of the functions of one program."""

    def __init__(self, assembly: AssembledProgram, rows: RowLoop, options: AccumulatorOptions) -> None:
        self.assembly, self.rows, self.options = assembly, rows, options
        blocked = next((r for r in assembly.results if r.inner), None)
        if options.select and blocked is not None:
            raise LoweringError(f"{blocked.name} has blocks of elements, of which none is the largest")
        self.update = update_of(rows) if options.accumulators.kind == "segments" else None
        self.walks = merges.walks_of(rows, assembly) if self.looks_up else []
        self.common = [p for p in rows.func.params if not tirx.is_buffer_var(p) or assembly.result_of(p) is None]

    def module(self, names: Sequence[str]) -> ir.IRModule:
        """Return a module of those of `names` that the program has, each prefixed with the program's name."""
        makers: dict[str, Callable[[], tirx.PrimFunc]] = {"numeric": self.numeric}
        if self.walks:
            makers["looking"] = partial(self.numeric, looks_up=True)
        if self.assembly.merge is not None:
            makers = {"numeric": self.merged, "alone": partial(self.merged, is_alone=True)}
        else:
            makers["bound"] = self.bound
            if not self.options.select and not self.is_stamped:
                makers["symbolic"] = self.symbolic
                if not self.options.accumulators.is_table:
                    makers["values"] = self.values
            if self.options.orders(self.assembly):
                makers["packed"] = self.packed
            makers |= {n: partial(at_once, self, is_shared=n == "shared") for n in ("small", "shared")}
        attrs = dict(self.rows.func.attrs)
        functions = {name: realign(make()) for name, make in makers.items() if name in names}
        named_functions = {f"{self.assembly.name}_{name}": self.of_params(func) for name, func in functions.items()}
        return ir.IRModule({n: f.with_attrs({**attrs, "global_symbol": n}) for n, f in named_functions.items()})

    def of_params(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        """Rewrite a function of the source program's arrays in terms of those of the lowered program."""
        lowered = {str(p.name): p for p in self.common}
        written = {p: lowered.get(str(p.name), p) for p in self.assembly.source.func.params}
        body = tvm_ffi.structural_map(func.body, with_def_region_kind=(Var, lambda v, _kind: written.get(v, v)))
        return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)

    @property
    def is_stamped(self) -> bool:
        """Whether rows are collected in the order of a mask."""
        return self.options.stamps(has_mask=self.assembly.mask is not None)

    @property
    def looks_up(self) -> bool:
        """Whether rows of a mask may be looked up in rows of an operand."""
        return self.options.looks_up and self.is_stamped

    def is_operand(self, array: Var) -> bool:
        """Return whether an array is not a stand-in of a result."""
        return self.assembly.result_of(array) is None

    def fetched(self, loop: tirx.For) -> list[tirx.Stmt]:
        """Return prefetches of the row pointers that later iterations of a loop read."""
        return fetches(loop, self.is_operand, rows=False)

    def walk_of(self, loop: tirx.For) -> RowWalk | None:
        """Return the walk of a loop over an operand's row, or None if the loop is not one."""
        return next((w for w in self.walks if w.loop.same_as(loop)), None)

    @property
    def width(self) -> ir.Expr:
        """The number of coordinates below a row."""
        return product([cast(a.length, LONG) for a in self.assembly.axes])

    # ------------------------------------------------------------------ the four

    def bound(self) -> tirx.PrimFunc:
        """Compute the number of products of each row, repeats included, and an upper bound of its entries."""
        chunks = Var("chunks", ir.PrimType("int32"))
        work, bound = (array(name, LONG, self.rows.count) for name in ("work", "bound"))
        looks_up, saved_work = size("looks_up"), [array("saved", LONG, chunks)] if self.looks_up else []
        total, saved_total, row = cell("total", LONG), cell("spared", LONG), size("row")
        cells = [total, saved_total] if saved_work else [total]
        chunk, step = Var("chunk", ir.PrimType("int32")), size("step")

        def count(amount: ir.Expr | int, loop: tirx.For | None) -> list[tirx.Stmt]:
            if not saved_work or loop is None or self.walk_of(loop) is None:
                return [add(total, amount)]
            gain = tirx.max(amount - self.mask_row(row)[1] * long(LOOK_WORK), long(0))
            is_long = tirx.And(looks_up != long(0), amount >= long(LONG_ROW))
            return [add(total, amount), tirx.IfThenElse(is_long, add(saved_total, gain), None)]

        counts = [*(put(c, long(0)) for c in cells), *entered_by(self.rows.body, self.rows, count, self.fetched)]
        most = tirx.min(get(total), self.width)
        for axis in () if self.options.complement else self.assembly.filters:
            stored = cast(axis.extent(cast(row, axis.idtype), []), LONG)
            most = stored if self.options.whole and self.is_stamped else tirx.min(most, stored)
        cost = get(total) - get(saved_total) if saved_work else get(total)
        stores = [tirx.BufferStore(work, cost + long(ROW_WORK), [row]), tirx.BufferStore(bound, most, [row])]
        stores += [tirx.BufferStore(a, tirx.BufferLoad(a, [chunk]) + get(saved_total), [chunk]) for a in saved_work]
        body = seq(*alloc(*cells), *counts, *stores)
        number, share = cast(self.rows.count, LONG), cast(chunks, LONG)
        first = number * cast(chunk, LONG) // share
        after = number * (cast(chunk, LONG) + long(1)) // share
        rows = serial(step, after - first, seq(tirx.Bind(row, first + step), self.at_row(row, body)))
        start = [tirx.BufferStore(a, long(0), [chunk]) for a in saved_work]
        lookup_params = [looks_up, *saved_work] if saved_work else []
        params = [*self.common, chunks, work, bound, *lookup_params]
        return tirx.PrimFunc(params, alone_or_shared(chunk, chunks, seq(*start, rows)))

    def symbolic(self) -> tirx.PrimFunc:
        """Compute the number of coordinates of each row."""
        split, length = self.split(), array("length", LONG, self.rows.count)
        work = self.workspace(split, values=False)
        out = Output(cell("pos", LONG), cell("count", LONG), None, [], [])
        done = lambda row: [tirx.BufferStore(length, get(out.count), [row])]  # noqa: E731
        body = self.chunks(split, lambda chunk: self.ways(out, work, chunk, split, done), [out.pos, out.count])
        return tirx.PrimFunc([*self.common, *self.split_params(split), length, *work.params], body)

    def numeric(self, *, looks_up: bool = False) -> tirx.PrimFunc:
        """Compute the rows of each chunk, contiguous from ``first[chunk]`` on; `looks_up` adds lookups under a mask."""
        split, ends = self.split(), array("ends", LONG, self.rows.count)
        capacity, first = size("capacity"), array("first", LONG, self.rows.count if split.order else split.chunks)
        work = self.stamps(split, looks_up=looks_up) if self.is_stamped else self.workspace(split, values=True)
        keys = array("keys", self.assembly.key_dtype, capacity)
        results = self.assembly.results
        values = [array(f"{r.name}_values", r.dtype, capacity, *r.block) for r in results]
        firsts, blocks = [r.initial for r in results], [r.block for r in results]
        top, least = size("most"), Var("least", ir.PrimType(ordered(self.assembly.results[0].dtype)))
        limit = least if self.options.select and self.options.limited else None
        out = Output(cell("pos", LONG), cell("count", LONG), keys, values, firsts, blocks, limit)
        heap = array("heap", str(least.ty.dtype), split.chunks, top)
        extra = [top, least, heap] if self.options.select else []

        def way(chunk: Var) -> Callable[[Var], list[tirx.Stmt]]:
            select = TopSelection(out, chunk, top, least, heap).stmts() if self.options.select else []
            end = add(out.pos, get(out.count))
            done = lambda row: [*select, end, tirx.BufferStore(ends, get(out.pos), [row])]  # noqa: E731
            return self.ways(out, work, chunk, split, done)

        begin = lambda place: [put(out.pos, tirx.BufferLoad(first, [place]))]  # noqa: E731
        at = {"before": begin} if split.order else {"start": begin}
        body = self.chunks(split, way, [out.pos, out.count], **at)
        if isinstance(work, StampParams) and work.lookups is not None:
            body = seq(work.lookups.made(self.walks[0].axis), body)
        params = [*self.common, *self.split_params(split), ends, capacity, first, keys, *values, *work.params, *extra]
        return tirx.PrimFunc(params, body)

    def merged(self, *, is_alone: bool = False) -> tirx.PrimFunc:
        """Merge the rows of each chunk in blocks, stored contiguously; `faults` counts blocks with invalid arrays.

        A single chunk has its own function: a parallel loop waits for every thread of the pool, even for one step.
        """
        assembly, merge = self.assembly, self.assembly.merge
        assert merge is not None
        split, ends = self.split(), array("ends", LONG, self.rows.count)
        capacity, first = size("capacity"), array("first", LONG, split.chunks)
        keys = array("keys", assembly.key_dtype, capacity)
        values = [array(f"{r.name}_values", r.dtype, capacity, *r.block) for r in assembly.results]
        faults = array("faults", LONG, split.chunks)
        out = Output(cell("pos", LONG), cell("count", LONG), keys, values, [], [])
        chunk, block, begin, after = Var("chunk", ir.PrimType("int32")), *(size(n) for n in ("block", "begin", "after"))
        begins, ends_at = (tirx.BufferLoad(split.ranges, [chunk + n]) for n in (0, 1))
        limit = tirx.if_then_else(chunk + 1 < split.chunks, tirx.BufferLoad(first, [chunk + 1]), capacity)
        fault = lambda: tirx.BufferStore(faults, tirx.BufferLoad(faults, [chunk]) + long(1), [chunk])  # noqa: E731
        inner = seq(
            tirx.Bind(begin, begins + block * long(merges.ROWS)),
            tirx.Bind(after, tirx.min(begin + long(merges.ROWS), ends_at)),
            merges.block_of(assembly, merge, out, (begin, after), ends, limit, fault),
        )
        count = tirx.floordiv(ends_at - begins + long(merges.ROWS - 1), long(merges.ROWS))
        start = [
            *alloc(out.pos),
            put(out.pos, tirx.BufferLoad(first, [chunk])),
            tirx.BufferStore(faults, long(0), [chunk]),
        ]
        chunks = serial if is_alone else parallel
        body = chunks(chunk, split.chunks, seq(*start, serial(block, count, inner)))
        params = [*self.common, *self.split_params(split), ends, capacity, first, keys, *values, faults]
        return tirx.PrimFunc(params, body)

    def values(self) -> tirx.PrimFunc:
        """Compute the values of rows whose coordinates are known."""
        split, capacity = self.split(), size("capacity")
        work = self.workspace(split, values=True)
        indptr = array("places", LONG, cast(self.rows.count, LONG) + long(1))
        keys = array("keys", self.assembly.key_dtype, capacity)
        values = [array(f"{r.name}_values", r.dtype, capacity, *r.block) for r in self.assembly.results]

        def way(chunk: Var) -> Callable[[Var], list[tirx.Stmt]]:
            def at(row: Var) -> list[tirx.Stmt]:
                entry, key = size("entry"), size("key")
                begin = tirx.BufferLoad(indptr, [row])
                element = [chunk, key]
                place = [begin + entry]
                stmts: list[tirx.Stmt] = [tirx.Bind(key, cast(tirx.BufferLoad(keys, place), LONG))]
                for result, source, target in zip(self.assembly.results, work.arrays, values, strict=True):
                    stmts += [each(result.block, copied(target, place, source, element))]
                    stmts += [each(result.block, stored(source, element, result.initial))]
                gather = serial(entry, tirx.BufferLoad(indptr, [row + long(1)]) - begin, seq(*stmts))
                return [
                    *self.filtered(self.scattered(_Known(work.arrays, chunk), work, chunk), work, chunk, row),
                    gather,
                ]

            return at

        body = self.chunks(split, way, [])
        params = [*self.common, *self.split_params(split), capacity, indptr, keys, *values, *work.known_params]
        return tirx.PrimFunc(params, body)

    def packed(self) -> tirx.PrimFunc:
        """Copy rows that begin at ``first[row]`` into contiguous storage."""
        split, capacity, count = RowPartition.of(self.rows), size("capacity"), size("packed_count")
        first = array("first", LONG, self.rows.count)
        indptr = array("places", LONG, cast(self.rows.count, LONG) + long(1))
        keys = [array(name, self.assembly.key_dtype, n) for name, n in (("keys", capacity), ("packed_keys", count))]
        pairs = [(keys[0], keys[1], ())]
        for r in self.assembly.results:
            storage = [(f"{r.name}_values", capacity), (f"{r.name}_packed", count)]
            source, target = (array(name, r.dtype, n, *r.block) for name, n in storage)
            pairs.append((source, target, r.block))

        def at(row: Var) -> list[tirx.Stmt]:
            begin, after = (tirx.BufferLoad(indptr, [row + long(n)]) for n in (0, 1))
            copies = []
            for source, target, block in pairs:
                entry = size("entry")
                place = [tirx.BufferLoad(first, [row]) + entry]
                copies.append(serial(entry, after - begin, each(block, copied(target, [begin + entry], source, place))))
            return copies

        body = self.chunks(split, lambda _chunk: at, [])
        arrays = [a for source, target, _ in pairs for a in (source, target)]
        params = [*self.common, split.chunks, split.ranges, first, indptr, capacity, count, *arrays]
        return tirx.PrimFunc(params, body)

    # ------------------------------------------------------------------ shared parts

    def split(self) -> RowPartition:
        """Return the parameters of the row partition."""
        return RowPartition.of(self.rows, ordered=self.options.orders(self.assembly))

    def split_params(self, split: RowPartition) -> list[Var]:
        """Return the parameters of the row partition; a merge needs no bounds besides its row pointers."""
        bound = [] if self.assembly.merge is not None else [split.bound]
        return [split.chunks, split.ranges, *split.order, *bound]

    def workspace(self, split: RowPartition, *, values: bool) -> Workspace:
        """Return the accumulators of all chunks."""
        width, words, tops = size("width"), size("words"), size("tops")
        accumulators = self.arrays(split, width)
        bits, top = array("bits", LONG, split.chunks, words), array("top", "uint8", split.chunks, tops)
        highs = size("highs")
        high = array("high", "uint8", split.chunks, highs)
        marks = array("bytes", "uint8", split.chunks, words * long(WORD))
        mask_words = size("mask_words")
        allowed = [array(f"{a.name}_allowed", LONG, split.chunks, mask_words) for a in self.assembly.filters]
        accumulators = accumulators if values else []
        return Workspace(
            width,
            words,
            tops,
            accumulators,
            bits,
            marks,
            top,
            values,
            mask_words,
            allowed,
            highs,
            high,
            self.parts(split, values=values),
            is_table=self.options.accumulators.is_table,
        )

    def parts(self, split: RowPartition, *, values: bool) -> SegmentParams | None:
        """Return the buffers for the products of long rows if those are sorted into segments, else None."""
        if self.update is None:
            return None
        count, room = size("segments"), size("parts")
        places = array("segment_places", LONG, split.chunks, count)
        keys = array("part_keys", self.assembly.key_dtype, split.chunks, room)
        factors = enumerate(self.update.parts if values else ())
        value_arrays = [array(f"part_{n}", str(part.ty.dtype), split.chunks, room) for n, part in factors]
        return SegmentParams(count, room, places, keys, value_arrays)

    def arrays(self, split: RowPartition, width: Var) -> list[Var]:
        """Return the accumulators' elements of each result, for each chunk."""
        return [array(f"{r.name}_work", r.held_dtype, split.chunks, width, *r.block) for r in self.assembly.results]

    def stamps(self, split: RowPartition, *, looks_up: bool = False) -> StampParams:
        """Return the buffers of all chunks for rows in the order of a mask."""
        width, columns = size("width"), size("columns")
        accumulators = self.arrays(split, width)
        seen, places = array("seen", "uint8", split.chunks, width), array("places", "int32", split.chunks, columns)
        return StampParams(width, columns, accumulators, seen, places, BitmapParams.new() if looks_up else None)

    def ways(
        self,
        out: Output,
        work: Workspace | StampParams,
        chunk: Var,
        split: RowPartition,
        done: Callable[[Var], list[tirx.Stmt]],
    ) -> Callable[[Var], list[tirx.Stmt]]:
        """Choose how a row is accumulated: short rows by ranks or by insertion, others in an array or a table."""
        accumulators = self.options.accumulators
        ranked = 0 if accumulators.is_table else accumulators.ranked
        small = accumulators.insertion if accumulators.insertion > ranked else 0
        most = -1 if any(r.held_dtype != r.dtype for r in self.assembly.results) else small

        def at(row: Var) -> list[tirx.Stmt]:
            if isinstance(work, StampParams):
                return [self.under_mask(out, work, chunk, row), *done(row)]
            products = tirx.BufferLoad(split.bound, [row])
            emit_row = self.larger(out, work, chunk, row, products)
            if small:
                short = self.collected(Insertion(out, small, self.assembly.key_dtype), row, work, chunk)
                emit_row = tirx.IfThenElse(products <= long(most), short, emit_row)
            if ranked:
                by_ranks = Ranked(out, chunk, work.arrays, work.bytes, ranked, self.assembly.key_dtype)
                emit_row = tirx.IfThenElse(
                    products <= long(ranked), self.collected(by_ranks, row, work, chunk), emit_row
                )
            return [emit_row, *done(row)]

        return at

    def larger(self, out: Output, work: Workspace, chunk: Var, row: Var, products: ir.Expr) -> tirx.Stmt:
        """Emit a long row, accumulated in an array or a table."""
        kind = self.options.accumulators.kind
        if kind == "table":
            return self.collected(Table(out, chunk, work.arrays, work.bits, products), row, work, chunk)
        bits = Bits(out, chunk, work.arrays, work.bits, work.top)
        marked = Bytes(out, chunk, work.arrays, work.bytes, work.top)
        sparse, dense = (self.collected(accumulator, row, work, chunk) for accumulator in (bits, marked))
        default = {"bits": sparse, "bytes": dense}.get(kind)
        if default is None:
            default = tirx.IfThenElse(products < work.words * long(DENSE), sparse, dense)
        tiered = Tiered(out, chunk, work.arrays, work.bits, work.top, high=work.high)
        is_sparse = products * long(SPARSE) < work.tops
        whole = tirx.IfThenElse(is_sparse, self.collected(tiered, row, work, chunk), default)
        if work.parts is None:
            return whole
        return self.in_segments(out, work, chunk, row, products, whole)

    def in_segments(
        self, out: Output, work: Workspace, chunk: Var, row: Var, bound: ir.Expr, whole: tirx.Stmt
    ) -> tirx.Stmt:
        """Emit a long row segment by segment of its columns, or `whole` where segments do not pay."""
        update, parts = self.update, work.parts
        assert update is not None
        assert parts is not None
        factors = update.parts if work.has_values else ()
        count, keep = (
            seq(*self.filtered(self.each_entered(stmts, work, chunk), work, chunk, row))
            for stmts in (
                lambda key: parts.counted(chunk, key),
                lambda key: parts.kept(chunk, key, factors),
            )
        )

        def one(segment: Var, first: Var, after: Var) -> tirx.Stmt:
            base, blocks = segment << long(SHIFT), tirx.min(long(1 << (SHIFT - 6)), work.tops)
            loops = []
            for kind, marks in ((Bits, work.bits), (Bytes, work.bytes)):
                marked = kind(out, chunk, work.arrays, marks, work.top, base, blocks)
                entry, key = size("entry"), size("key")
                place = [chunk, first + entry]
                stmts = [tirx.Bind(key, cast(tirx.BufferLoad(parts.keys, place), LONG) & long((1 << SHIFT) - 1))]
                stmts += marked.enter(key)
                if work.has_values:
                    target, at = marked.element(0, key)
                    values = [tirx.BufferLoad(v, place) for v in parts.values]
                    stmts.append(tirx.BufferStore(target, update.on(tirx.BufferLoad(target, at), values), at))
                loops.append(seq(serial(entry, after - first, seq(*stmts)), *marked.finish()))
            return tirx.IfThenElse(after - first < blocks * long(DENSE), *loops)

        return seq(put(out.count, long(0)), parts.collected(chunk, bound, count, keep, one, whole))

    def each_entered(self, stmts: Callable[[Var], list[tirx.Stmt]], work: Workspace, chunk: Var) -> tirx.Stmt:
        """Emit the body of a row with `stmts` in place of every scatter."""

        def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
            scatter = self.rows.scatter_of(store)
            if scatter is None:
                return mutator.default_mutate(store)
            key = self.key()
            return self.entered(key, scatter.key, stmts(key), work, chunk)

        return structural_mutate(self.rows.body, [(tirx.BufferStore, on_store)])

    def collected(self, accumulator: Accumulator, row: Var, work: Workspace, chunk: Var) -> tirx.Stmt:
        """Emit a row that is collected in an accumulator and then written out."""
        body = self.scattered(accumulator, work, chunk)
        return seq(*accumulator.begin(), *self.filtered(body, work, chunk, row), *accumulator.finish())

    def under_mask(self, out: Output, work: StampParams, chunk: Var, row: Var) -> tirx.Stmt:
        """Emit a row that is collected in the order of the mask's row and then written out."""
        coordinate, count = self.mask_row(row)
        stamped = Stamped(out, chunk, work.arrays, work.seen, work.places, count, coordinate, self.options.whole)
        unchanged = lambda _loop, stmt: stmt  # noqa: E731
        rewrite = unchanged if work.lookups is None else partial(self.looked_up, stamped, work.lookups)
        body = self.at_row(row, self.scattered(stamped, work, chunk, rewrite))
        return seq(*stamped.begin(), body, *stamped.finish())

    def mask_row(self, row: Var) -> tuple[Callable[[Var], ir.Expr], ir.Expr]:
        """Return a function of the coordinates of a mask's row, and their number."""
        mask = self.assembly.mask
        assert mask is not None
        above = cast(row, mask.idtype)
        begin, count = cast(mask.begin(above, []), LONG), cast(mask.extent(above, []), LONG)
        return lambda step: cast(mask.coordinate(begin + step, step, []), LONG), count

    def looked_up(self, stamped: Stamped, row_lookups: BitmapParams, loop: tirx.For, default: tirx.Stmt) -> tirx.Stmt:
        """Emit a loop, or a search for the mask's coordinates in the operand's row where that takes less work."""
        walk = self.walk_of(loop)
        if walk is None:
            return default

        def at(entry: Var, slot: ir.Expr) -> tirx.Stmt:
            place = size("slot")
            stmts = [tirx.Bind(place, slot), *stamped.enter_at(place)]
            for scatter in walk.scatters:
                number = self.assembly.results.index(scatter.result)
                stmts.append(_update(scatter, *stamped.element(number, walk.key)))
            return substitute(seq(*stmts), {loop.loop_var: entry})

        def found(entry: Var, step: Var, is_found: ir.Expr) -> tirx.Stmt:
            return at(entry, tirx.if_then_else(is_found, step + long(DUMPS), step & long(DUMPS - 1)))

        count, coordinate = stamped.count, stamped.coordinate
        bisection = walk.searched(count, coordinate, lambda entry, step: at(entry, step + long(DUMPS)))
        is_long = tirx.And(row_lookups.searches != long(0), walk.extent >= tirx.max(count, long(1)) * long(LONG_ROW))
        pays = tirx.And(is_long, walk.search_work(count) < walk.extent)
        return row_lookups.over(walk, count, coordinate, found, tirx.IfThenElse(pays, bisection, default))

    def filtered(self, body: tirx.Stmt, work: Workspace, chunk: Var, row: Var) -> list[tirx.Stmt]:
        """Emit the body of a row between two loops over the entries of each filter, which set and clear its bits."""
        set_: list[tirx.Stmt] = []
        clear: list[tirx.Stmt] = []
        for axis, bits in zip(self.assembly.filters, work.allowed, strict=True):
            for stmts, is_set in ((set_, True), (clear, False)):
                step, key = Var("step", ir.PrimType(LONG)), Var("key", ir.PrimType(LONG))
                place = cast(axis.begin(cast(row, axis.idtype), []), LONG) + step
                coordinate = cast(axis.coordinate(place, step, []), LONG)
                at = [chunk, key >> long(6)]
                value = tirx.BufferLoad(bits, at) | (long(1) << (key & long(63))) if is_set else long(0)
                count = cast(axis.extent(cast(row, axis.idtype), []), LONG)
                stmts.append(serial(step, count, seq(tirx.Bind(key, coordinate), tirx.BufferStore(bits, value, at))))
        return [*set_, self.at_row(row, body), *clear]

    def passes(self, key: ir.Expr, work: Workspace | StampParams, chunk: Var) -> ir.Expr | None:
        """Return the condition that all filters store a coordinate, or that none does with `complement`."""
        wide, condition = cast(key, LONG), None
        for bits in work.allowed:
            bit = (tirx.BufferLoad(bits, [chunk, wide >> long(6)]) >> (wide & long(63))) & long(1)
            is_there = bit.equal(long(0 if self.options.complement else 1))
            condition = is_there if condition is None else tirx.And(condition, is_there)
        return condition

    def scattered(
        self,
        accumulator: Accumulator,
        work: Workspace | StampParams,
        chunk: Var,
        rewrite: Callable[[tirx.For, tirx.Stmt], tirx.Stmt] = lambda _, code: code,
    ) -> tirx.Stmt:
        """Emit the body of a row with every scatter into `accumulator`; without values, only coordinates are entered.

        `rewrite` may replace the code of a loop.
        """
        blocks: list[Var] = []  # the coordinate of the block that the enclosing loop iterates over

        def on_for(loop: tirx.For, mutator: Any) -> tirx.Stmt:
            block = self.rows.block_of(loop)
            if block is None:
                lowered = mutator.default_mutate(loop)
                return rewrite(loop, fetched(loop, lowered, self.is_operand) if work.fetches else lowered)
            key = self.key()
            blocks.append(key)
            stmts = [*accumulator.enter(key), *([mutator.default_mutate(loop)] if work.has_values else [])]
            blocks.pop()
            return self.entered(key, block.key, stmts, work, chunk, block.steps > long(0))

        def on_store(store: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
            scatter = self.rows.scatter_of(store)
            if scatter is None:
                return mutator.default_mutate(store)
            number = self.assembly.results.index(scatter.result)
            if blocks:
                return _update(scatter, *accumulator.element(number, blocks[-1]))
            key = self.key()
            stmts = accumulator.enter(key)
            if work.has_values:
                stmts.append(_update(scatter, *accumulator.element(number, key)))
            return self.entered(key, scatter.key, stmts, work, chunk)

        return structural_mutate(self.rows.body, [(tirx.For, on_for), (tirx.BufferStore, on_store)])

    def key(self) -> Var:
        """Return a variable for the coordinate that is entered."""
        return Var("key", ir.PrimType(self.assembly.key_dtype))

    def entered(
        self,
        key: Var,
        value: ir.Expr,
        stmts: list[tirx.Stmt],
        work: Workspace | StampParams,
        chunk: Var,
        *extra: ir.Expr,
    ) -> tirx.Stmt:
        """Emit statements for a coordinate that passes the filters."""
        passes = self.passes(key, work, chunk)
        conditions = [*extra, *([] if passes is None else [passes])]
        body = tirx.IfThenElse(conjunction(conditions), seq(*stmts), None) if conditions else seq(*stmts)
        return seq(tirx.Bind(key, value), body)

    def at_row(self, row: Var, stmt: tirx.Stmt) -> tirx.Stmt:
        """Substitute a 64-bit row for the row loop's variable."""
        return substitute(stmt, {self.rows.var: cast(row, str(self.rows.var.ty.dtype))})

    def chunks(
        self,
        split: RowPartition,
        row_emitter: Callable[[Var], Callable[[Var], list[tirx.Stmt]]],
        cells: Sequence[Var],
        start: Callable[[Var], list[tirx.Stmt]] = lambda _: [],
        before: Callable[[Var], list[tirx.Stmt]] = lambda _: [],
    ) -> tirx.Stmt:
        """Emit the parallel loop over chunks around the loop over the rows of one."""
        chunk, step, row = Var("chunk", ir.PrimType("int32")), size("step"), size("row")
        first, after = (tirx.BufferLoad(split.ranges, [chunk + n]) for n in (0, 1))
        inner = seq(tirx.Bind(row, split.row(first + step)), *before(row), *row_emitter(chunk)(row))
        rows = serial(step, after - first, inner)
        return renewed(parallel(chunk, split.chunks, seq(*alloc(*cells), *start(chunk), rows)))


@dataclass(frozen=True)
class Workspace:
    """Parameters that hold the accumulators."""

    width: Var
    words: Var
    tops: Var
    arrays: Sequence[Var]
    bits: Var
    bytes: Var
    top: Var
    has_values: bool
    mask_words: Var
    allowed: Sequence[Var]
    highs: Var
    high: Var
    parts: SegmentParams | None
    is_table: bool
    fetches: bool = True

    @property
    def params(self) -> list[Var]:
        """The parameters in the order of the functions' signatures."""
        sizes = [self.width] if self.has_values else []
        bitmaps = [self.bits] if self.is_table else [self.bits, self.bytes, self.top, self.high]
        parts = [] if self.parts is None else self.parts.params
        return [*sizes, self.words, self.tops, self.highs, *self.arrays, *bitmaps, *self.masks, *parts]

    @property
    def known_params(self) -> list[Var]:
        """The parameters that are used where the pattern is known."""
        return [self.width, *self.arrays, *self.masks]

    @property
    def masks(self) -> list[Var]:
        """The parameters that hold the filters of a row."""
        return [self.mask_words, *self.allowed] if self.allowed else []


@dataclass(frozen=True)
class StampParams:
    """Parameters that hold rows in the order of a mask, as `Stamped` uses them."""

    width: Var
    columns: Var
    arrays: Sequence[Var]
    seen: Var
    places: Var
    lookups: BitmapParams | None = None
    has_values: bool = True
    allowed: Sequence[Var] = ()
    fetches: bool = True

    @property
    def params(self) -> list[Var]:
        """The parameters in the order of the functions' signatures."""
        lookup_params = [] if self.lookups is None else self.lookups.params
        return [self.width, self.columns, *self.arrays, self.seen, self.places, *lookup_params]


@dataclass
class _Known:
    """An array whose pattern is known."""

    arrays: Sequence[Var]
    chunk: Var

    def begin(self) -> list[tirx.Stmt]:
        return []

    def enter(self, key: ir.Expr) -> list[tirx.Stmt]:
        return []

    def element(self, result: int, key: ir.Expr) -> tuple[Var, list[ir.Expr]]:
        return self.arrays[result], [self.chunk, cast(key, LONG)]

    def finish(self) -> list[tirx.Stmt]:
        return []


def _update(scatter: ScatterStore, accumulator: Var, place: list[ir.Expr]) -> tirx.Stmt:
    """Emit a scatter into an element of an accumulator; 16-bit floats are accumulated in 32 bits."""
    place, dtype = [*place, *scatter.inner], scatter.result.dtype
    if str(accumulator.ty.dtype) == dtype:
        return tirx.BufferStore(accumulator, with_own(scatter, tirx.BufferLoad(accumulator, place)), place)
    narrow = tirx.decl_buffer(accumulator.ty.shape, dtype, name=str(accumulator.name), layout=None)
    value = with_own(scatter, tirx.BufferLoad(narrow, place))
    return tirx.BufferStore(accumulator, widened(value, {narrow: accumulator}), place)


# Machine code of a program with computed patterns: several functions in one library.


LATE = [
    tirx.transform.ConvertSSA(),
    UnswitchLoops,  # terms with an absent factor -> no terms
    PromoteHalves,
    *TO_FLAT,
]


class AssembledCompiled(Compiled):
    """Machine code of several functions in one library; `sparsetir.sparse_output.functions` describes them."""

    @cached_property
    def assembly(self) -> AssembledProgram:
        """The program with dense stand-ins of its results."""
        with own_errors():
            return assemble(self.func)

    @cached_property
    def functions(self) -> Functions:
        """The builder of the functions."""
        with own_errors():
            return Functions(self.assembly, lower_rows(self.assembly), self.schedule or AccumulatorOptions())

    @cached_property
    def held(self) -> tuple[str, ...]:
        """The names of the functions that are compiled with the program."""
        names = (self.schedule or AccumulatorOptions()).functions
        return ("alone",) if names == FIRST and self.assembly.merge is not None else names

    @cached_property
    def stages(self) -> dict[int, ir.IRModule]:
        """The modules of all functions by stage, including functions that are compiled on demand."""
        module = self._module(FUNCTIONS)
        return {2: module, 3: run(LATE, module)}

    def stage(self, stage: int) -> Any:
        """Return the module of all functions at a stage."""
        return self.stages[stage]

    def compile(self) -> None:
        """Lower and compile the functions of `held`."""
        module = self._module(self.held)
        self.library = machine_code(run(LATE, module), self.target)

    def _module(self, names: tuple[str, ...]) -> ir.IRModule:
        with own_errors():
            return self.functions.module(names)

    def load(self, path: Path, facts: dict[str, Any]) -> None:
        """Load the machine code from a library on disk."""
        self.read_library(path, facts)

    def named(self, name: str) -> Callable[..., Any]:
        """Return one of the compiled functions."""
        if self.library is None:
            raise VerifyError("this program is not compiled yet")
        function: Callable[..., Any] = self.library[f"{self.name}_{name}"]
        return function

    def of(self, func: tirx.PrimFunc) -> Compiled:
        """Return another program with this target and schedule, not compiled yet."""
        return AssembledCompiled(func, self.target, self.schedule)


def compiled_functions(func: tirx.PrimFunc, target: Any, options: AccumulatorOptions | None) -> AssembledCompiled:
    """Compile the functions of a program, or return those compiled before in this process or on disk."""
    compiled = compile_cached(func, target, options, AssembledCompiled)
    assert isinstance(compiled, AssembledCompiled)
    return compiled


__all__ = ["AssembledCompiled", "Functions"]
