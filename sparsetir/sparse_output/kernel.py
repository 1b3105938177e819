# SPDX-License-Identifier: Apache-2.0
"""Kernels that compute the pattern of their results: symbolic and numeric phase, buffer reuse, and export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import tvm
from tvm import ir
from tvm.ir import Var

from sparsetir import interop
from sparsetir.codegen.cache import Compiled, write_one
from sparsetir.codegen.export import export
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError, VerifyError
from sparsetir.interop.arrays import begins
from sparsetir.ir.rewriting import collect
from sparsetir.ir.sizes import Size
from sparsetir.ir.views import decode
from sparsetir.runtime.call_plan import CallTiming, measure
from sparsetir.runtime.serialization import Saved
from sparsetir.runtime.signature import Arguments, Signature, argument_list, numpy_dtype, shown_signature
from sparsetir.script.printer import script
from sparsetir.sparse_output import AccumulatorOptions, Accumulators, AssembledCompiled, AssembledProgram
from sparsetir.sparse_output.accumulators import DUMPS, FIRST, FUNCTIONS
from sparsetir.sparse_output.c_functions import AssembledInterface
from sparsetir.sparse_output.fast_paths import CompressedRows, MergedRows, SmallCalls
from sparsetir.sparse_output.functions import compiled_functions
from sparsetir.sparse_output.program import Merge
from sparsetir.sparse_output.result import ResultPattern, RowOrders, as_object, least_of, rows_axis, top_of
from sparsetir.sparse_output.rows import LEAST_PARTS, MOST_PARTS, SHIFT
from sparsetir.sparse_output.selection import LANES, ordered
from sparsetir.sparse_output.workspace import (
    KEPT_BYTES,
    PLACE_BYTES,
    ROW_WORK,
    SERIAL_WORK,
    Call,
    ChunkWorkspace,
    RowBitmaps,
    Stamps,
    chunk_parts,
    closed,
    full,
    gather,
    kept,
    merged_places,
    merged_ranges,
    passed,
    popped,
    shared_out,
    without_gaps,
)
from sparsetir.utils import buffers
from sparsetir.utils.arguments import shown, with_new_names
from sparsetir.utils.buffers import LEAST_ROOM, MOST_ROOM, BufferPool
from sparsetir.utils.caches import cached_property
from sparsetir.utils.memory import memory_size
from sparsetir.utils.threads import get_num_threads

WORD, BYTES = 64, 8  # coordinates in a word of a bitmap, words that are loaded together
OFTEN = 100  # small calls after which a function for them is compiled
MOST_COUNTS = 2  # arrays of one number a row that are kept for the next call
WIDE_BYTES = 1 << 28  # of accumulators with an element for every coordinate
ROOMY_BYTES = max(1 << 28, memory_size() // 2)  # of addresses for a result that is written before its size is known
HELD_BYTES = 1 << 28  # of such addresses that are kept for the next call
SELECTION = ("top", "threshold")  # arguments of a kernel that selects
MUCH = 8  # a saving counts if it is more than one part in so many of the cost
MOST_COORDINATES = 2**63 - 1  # below a row: of several axes they are one number
HYPERSPARSE = 2  # elements per entry of the operands above which hash tables are faster
MOST_WASTE = 1.5  # times as much memory as its entries that a result may hold


class SparseOutputKernel(Saved):
    """Compiled program that computes the pattern of its results, called by buffer names.

    Parameters
    ----------
    compiled : AssembledCompiled
        The program as compiled by `sparsetir.build`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> kernel = sparsetir.build(sparsetir.ops.spgemm())
    >>> A = sp.csr_array(np.array([[0, 2], [3, 0]], "float32"))
    >>> kernel(A=A, B=A).toarray().tolist()
    [[6.0, 0.0], [0.0, 6.0]]
    """

    def __init__(self, compiled: AssembledCompiled) -> None:
        self.compiled = compiled
        self.func = compiled.func
        self.name = compiled.name
        self.assembly: AssembledProgram = compiled.assembly
        self.options: AccumulatorOptions = compiled.schedule or AccumulatorOptions()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._results = [r.storage for r in self.assembly.results]
        self.signature = Signature(decode(self.assembly.func), compiled.searched, internal=self._results)
        self._count = Size(self.assembly.rows[-1].count) if self.assembly.rows else None
        self._lengths = [Size(a.length) for a in self.assembly.axes]
        self._blocks = [[Size(n) for n in r.inner] for r in self.assembly.results]
        self._shape = [Size(a.length) for a in (*self.assembly.rows, *self.assembly.axes)]
        self.rows = CompressedRows(self.signature)
        self.is_stamped = self.options.stamps(has_mask=self.assembly.mask is not None)
        self.looks_up = self.is_stamped and self.options.looks_up
        self.is_ordered = self.options.orders(self.assembly)
        self._orders = self._row_orders()
        self._part_dtypes = self._segment_dtypes()
        self._merged_rows = self._rows_to_merge()
        self._spare: list[ChunkWorkspace] = []
        self._stamps: list[Stamps] = []
        self._rooms: list[list[np.ndarray]] = []
        self._counts: list[np.ndarray] = []
        dtypes = self._key_dtype(), *(np.dtype(numpy_dtype(r.dtype)) for r in self.assembly.results)
        self._little = 0  # calls that a function for small ones could have made
        self._earlier = None if any(r.inner for r in self.assembly.results) else BufferPool(dtypes)

    def _segment_dtypes(self) -> list[np.dtype[Any]] | None:
        """Return the dtypes of the parts that are stored of each product of a long row, or None without segments."""
        if self.options.accumulators.kind != "segments" or self.assembly.merge is not None:
            return None
        update = self.compiled.functions.update
        return None if update is None else [np.dtype(numpy_dtype(str(part.ty.dtype))) for part in update.parts]

    def _rows_to_merge(self) -> MergedRows | None:
        """Return the fast path of merged rows of scipy's matrices, or None if rows are not merged."""
        merge, results = self.assembly.merge, self.assembly.results
        if merge is None or len(results) > 1 or results[0].inner or results[0].dtype == "bfloat16":
            return None
        params = [p for p in self.signature.params if p.name not in self._results]
        dtypes = self._key_dtype(), numpy_dtype(results[0].dtype)
        return MergedRows.of(self.rows, params, merge.members, merge.how, dtypes)

    def _row_orders(self) -> RowOrders | None:
        """Return the row orders if the functions take one, else None."""
        if not self.is_ordered:
            return None
        order, program = self.options.accumulators.order, self.assembly.source
        axis = rows_axis(program, self.assembly.rows[-1]) if self.assembly.rows else None
        if axis is None and order != "nonempty":
            raise LoweringError(f"{self.name} has no compressed rows that an order {order!r} could compare")
        return RowOrders(order, axis)

    @property
    def target(self) -> Any:
        """The TVM target it was compiled for."""
        return self.compiled.target

    @property
    def accumulators(self) -> Accumulators:
        """The accumulators that collect rows."""
        return self.options.accumulators

    def __repr__(self) -> str:
        return f"Kernel {self.name}{shown_signature(self.signature, declared=self.assembly.source)}"

    # ------------------------------------------------------------------ calling

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run the kernel.

        Parameters
        ----------
        **arguments
            Buffers by the names in the script (or raw arrays by parameter names), sizes where they cannot be inferred.

        Returns
        -------
        sparse object, or tuple of them
            The results in the order of the script, in the class of the first sparse argument; their rows are sorted.

        Raises
        ------
        ArgumentTypeError
            A name, class or dtype the kernel does not take.
        ArgumentError
            Shapes that disagree.
        StructureError
            Index arrays that are not what the axes promise.
        """
        arguments = self._renamed(arguments)
        selection = self._chosen(arguments) if self.options.select else ()
        if not unnamed:
            result = self.merged_at_once(arguments) if self._merged_rows else self._often_small(arguments, *selection)
            if result is not None:
                return result
        args = self.prepare(unnamed, arguments)
        return self.returned(args, self.assemble(args, *selection), arguments)

    def merged_at_once(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the result for scipy's matrices in the program's storage; return None for others."""
        rows = self._merged_rows
        return None if rows is None else rows(arguments, self.function)

    @cached_property
    def small_calls(self) -> SmallCalls | None:
        """The fast path of small calls, or None if the program has none."""
        return SmallCalls.of(self.assembly, self.options, self.signature, self.rows)

    def _often_small(self, arguments: Mapping[str, Any], *selected: Any) -> Any:
        """Run `small_at_once` once there were so many small calls that its function is worth compiling."""
        calls = self.small_calls
        name = "" if calls is None else calls.function_for(arguments)
        if calls is None or not name:
            return None
        self._little += 1
        is_ready = self._little > OFTEN or self.has(name)
        return calls(name, arguments, self.function, *selected) if is_ready else None

    def small_at_once(self, name: str, arguments: Mapping[str, Any], *selected: Any) -> Any:
        """Compute the result for small scipy matrices in the program's storage; return None for others."""
        calls = self.small_calls
        return None if calls is None else calls(name, arguments, self.function, *selected)

    def _renamed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a caller with the new name of `threshold`."""
        if not self.options.select or "above" not in arguments or self.signature.knows("above"):
            return arguments
        return with_new_names(arguments, {"above": "threshold"}, self.name)

    def _chosen(self, arguments: dict[str, Any]) -> tuple[int | None, Any]:
        """Pop the selection of each row's entries from the arguments of a call."""
        top, threshold = (arguments.pop(name, None) for name in SELECTION)
        return top_of(top), least_of(threshold, self.assembly.results[0].dtype)

    def selecting(self) -> SparseOutputKernel:
        """Return the kernel that keeps the largest entries of each row, given by ``top=`` and ``threshold=``.

        Returns
        -------
        SparseOutputKernel
            Called as this kernel, with two more arguments, which have the meaning of those of `sparsetir.matmul`.

        Raises
        ------
        LoweringError
            There are several results, blocks of elements, or the rows of operands are merged.

        Examples
        --------
        >>> import numpy as np, scipy.sparse as sp, sparsetir
        >>> largest = sparsetir.build(sparsetir.ops.spgemm()).selecting()
        >>> A = sp.csr_array(np.array([[0, 2], [3, 4]], "float32"))
        >>> largest(A=A, B=A, top=1).toarray().tolist()
        [[0.0, 8.0], [0.0, 22.0]]
        """
        if self.assembly.merge is not None or len(self.assembly.results) > 1:
            reason = "merges rows" if self.assembly.merge is not None else "has several results"
            raise LoweringError(f"{self.name} {reason}: the largest entries are those of one product")
        options = replace(self.options, select=True, limited=True)
        return SparseOutputKernel(compiled_functions(self.func, self.compiled.target, options))

    def prepare(self, unnamed: tuple[Any, ...], arguments: dict[str, Any]) -> Arguments:
        """Return the arguments of a call, fully validated."""
        if unnamed:
            raise self.signature.unnamed(unnamed)
        bound = self.rows.bind(arguments, self._listing)
        if bound is not None:
            return bound
        for result in self.assembly.results:
            passed_name = next((n for n in (result.name, result.storage) if n in arguments), None)
            if passed_name is not None:
                raise ArgumentTypeError(f"the pattern of {passed_name} is computed: leave it out and take the result")
        unknown_name = next((name for name in arguments if not self.signature.knows(name)), None)
        if unknown_name is not None:
            raise self.unknown(unknown_name)
        args = self.signature.gather(arguments)
        self.signature.check(args)
        self.signature.complete(args)
        return args

    @cached_property
    def _listing(self) -> dict[str, str]:
        """Operands of which only the rows named by another operand's column indices are read, with that operand."""
        program, is_ordered = self.assembly.source, self._orders is not None
        if self.assembly.filters or self.assembly.merge is not None or is_ordered or len(program.iterations) != 1:
            return {}
        (iteration,) = program.iterations
        over = dict(zip(iteration.vars, iteration.axes, strict=True))
        columns = {b.axes[1]: b.name for b in program.buffers.values() if b.name in self.rows.matrices}
        listing: dict[str, str] = {}
        for name in self.rows.matrices:
            loads = [x for x in collect(iteration.block, ir.TensorLoad) if str(x.source.name) == name]
            axes = {over.get(x.indices[0]) if isinstance(x.indices[0], Var) else None for x in loads}
            axis = axes.pop() if len(axes) == 1 else None
            listing[name] = name if axis is None else columns.get(axis, name)
        # A matrix that is read through another one's indices must not list rows itself: it is validated first, as a
        # whole.
        chains = {name for name, by in listing.items() if by == name}
        return {name: by for name, by in listing.items() if by != name and by in chains}

    def unknown(self, name: str) -> ArgumentTypeError:
        """Return the error for an argument that a call does not take."""
        if name in SELECTION:
            return ArgumentTypeError(f"{name} is an argument of kernel.selecting(), which keeps the largest entries")
        return self.signature.unknown(name)

    def returned(self, args: Arguments, pattern: ResultPattern, arguments: dict[str, Any]) -> Any:
        """Return the results in the class of the first sparse argument."""
        model = next((v for v in arguments.values() if interop.is_sparse(v)), None)
        count = len(pattern.values)
        out = tuple(
            as_object(pattern, n, model, is_last=n + 1 == count, block=self.block(n, args.sizes)) for n in range(count)
        )
        return out[0] if len(out) == 1 else out

    def bind(self, **arguments: Any) -> BoundSparseOutputKernel:
        """Fix some arguments: ``kernel.bind(B=B)(A=A)`` is ``kernel(A=A, B=B)``."""
        return BoundSparseOutputKernel(self, self._renamed(arguments))

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated computations of pattern and values, arguments ready.

        Parameters
        ----------
        seconds : float
            How long to measure, at least three calls.
        **arguments
            As for a call.
        """
        arguments = self._renamed(arguments)
        selection = self._chosen(arguments) if self.options.select else ()
        args = self.prepare((), arguments)
        return measure(lambda: self.assemble(args, *selection), seconds=seconds)

    # ------------------------------------------------------------------ the pattern and its values

    def assemble(self, args: Arguments, top: int | None = None, threshold: Any = None) -> ResultPattern:
        """Compute pattern and values; a kernel that selects keeps a row's `top` largest entries above `threshold`."""
        if self.is_wide(args):
            return self.tabled.assemble(args, top, threshold)
        call = self.begin(args)
        if not self.is_roomy(call):
            return self.two_phases(call)
        pattern = self.one_phase(call, top, threshold) if call.order is None else self.ordered_rows(call)
        if call.bound is not None:
            self.keep_counts(call.bound)
        return pattern

    def is_wide(self, args: Arguments) -> bool:
        """Return whether an element for every coordinate of a row takes too much memory."""
        if self.options.accumulators.is_table or self.assembly.merge is not None:
            return False
        item = 1 + self.item_bytes(args.sizes, [r.held_dtype for r in self.assembly.results])
        elements = self._width(args.sizes) * get_num_threads()
        if elements * (max(item, PLACE_BYTES) if self.is_stamped else item) > WIDE_BYTES:
            return True
        if not self.is_stamped or elements * (item + PLACE_BYTES) <= KEPT_BYTES:
            return False
        # Accumulators that are not kept between calls are initialised in each, even for rows that are mostly empty.
        values = {str(b.storage.name) for b in self.signature.buffers.values()}
        entries = sum(array.size for name, array in args.arrays.items() if name in values)
        return elements > HYPERSPARSE * entries

    @cached_property
    def tabled(self) -> SparseOutputKernel:
        """Kernel of the same program that accumulates in hash tables."""
        return SparseOutputKernel(compiled_functions(self.func, self.compiled.target, self.options.tabled()))

    def is_roomy(self, call: Call) -> bool:
        """Return whether the rows are written before their lengths are known."""
        if self.assembly.merge is not None or self.options.select or self.is_stamped:
            return True
        if self.options.accumulators.counted:
            return False
        item = self.item_bytes(call.sizes, [r.dtype for r in self.assembly.results]) + self._key_dtype().itemsize
        most = ROOMY_BYTES if call.order is None else KEPT_BYTES  # rows out of order are copied
        return call.bound is None or int(call.bound.sum()) * item <= most

    def begin(self, args: Arguments) -> Call:
        """Compute the work of the rows, and partition them."""
        rows = 1 if self._count is None else int(self._count.at(args.sizes))
        width = self._width(args.sizes)
        common = argument_list(self.signature, args, without=self._results)
        initial = [result.initial.value for result in self.assembly.results]
        if self.assembly.merge is not None:
            pointers = [args.arrays[str(a.indptr.name)] for a in self.assembly.merge.members if a.indptr is not None]
            # Merged rows need no accumulators, however wide they are.
            return Call(common, args.sizes, rows, 1, None, merged_ranges(pointers, rows), initial, pointers)
        cost, bound, lookups = self.counted(args, common, rows)
        order = None if self._orders is None else self._orders.of(args, bound, self._columns(args))
        ranges = shared_out(cost if order is None else cost[order])
        most_products = 0 if self._part_dtypes is None else int(cost.max(initial=ROW_WORK)) - ROW_WORK
        self.keep_counts(cost)
        return Call(
            common, args.sizes, rows, width, bound, ranges, initial, order=order, lookups=lookups, entered=most_products
        )

    def counts(self, rows: int) -> np.ndarray:
        """Return a buffer of one number a row, reused from an earlier call so that the system need not clear pages."""
        buffer = next(popped(self._counts), None)
        return buffer if buffer is not None and len(buffer) == rows else np.empty(rows, np.int64)

    def keep_counts(self, buffer: np.ndarray) -> None:
        """Keep an unreferenced buffer of `counts` for a later call."""
        if buffer.nbytes * MOST_COUNTS <= KEPT_BYTES and len(self._counts) < MOST_COUNTS:
            self._counts.append(buffer)

    def counted(
        self, args: Arguments, common: list[Any], rows: int
    ) -> tuple[np.ndarray, np.ndarray, RowBitmaps | None]:
        """Compute the work of each row, an upper bound of its coordinates, and the lookups of a mask's rows."""
        cost, bound = self.counts(rows), self.counts(rows)
        threads = get_num_threads() if rows > SERIAL_WORK else 1
        if not self.looks_up:
            if rows:
                self.run("bound", *common, threads, cost, bound)
            return cost, bound, None
        if not rows:
            return cost, bound, RowBitmaps.none()
        saved_work = np.empty(threads, np.int64)
        self.run("bound", *common, threads, cost, bound, 1, saved_work)
        saved_total = int(saved_work.sum())
        if saved_total * MUCH <= int(cost.sum()):
            return cost, bound, RowBitmaps.none()
        lookups = self.lookups(args, saved_total)
        if not lookups.is_some:
            self.run("bound", *common, threads, cost, bound, 0, saved_work)
        return cost, bound, lookups

    def lookups(self, args: Arguments, saved_work: int) -> RowBitmaps:
        """Choose the lookups of a mask's rows from the work that they would save."""
        walks = self.compiled.functions.walks
        if not walks or walks[0].axis.indptr is None:
            return RowBitmaps.none()
        axis = walks[0].axis
        indptr, indices = (args.arrays[str(a.name)] for a in (axis.indptr, axis.indices) if a is not None)
        return RowBitmaps.of(indptr, indices, self._width(args.sizes), saved_work)

    def _columns(self, args: Arguments) -> int:
        """Return the number of columns of the rows that an order compares."""
        axis = rows_axis(self.assembly.source, self.assembly.rows[-1])
        return 0 if axis is None else int(Size(axis.length).at(args.sizes))

    def two_phases(self, call: Call) -> ResultPattern:
        """Run the symbolic phase, then write the rows at their final positions."""
        work = self.take(call)
        length = np.zeros(call.rows, np.int64)
        if call.rows:
            self.run(
                "symbolic", *call.split, length, *work.sizes, *work.marks, *work.masks, *work.segments(values=False)
            )
        indptr = begins(length)
        keys, values = self.entries(int(indptr[-1]), call.sizes)
        first = indptr[call.ranges[:-1]] if call.order is None else indptr[:-1]
        self.numeric(call, work, length, first, keys, values)
        self.give_back(work)
        return ResultPattern(self._held_shape(call), indptr, keys, values)

    def ordered_rows(self, call: Call) -> ResultPattern:
        """Write rows at upper bounds of their positions, then compact them."""
        work = self.stamps(call) if self.is_stamped else self.take(call)
        first = begins(cast("np.ndarray", call.bound))
        room = self.room(int(first[-1]), call.sizes)
        ends = first[:-1].copy()
        self.numeric(call, work, ends, first[:-1], room[0], room[1:])
        self.give_back(work)
        indptr = begins(ends - first[:-1])
        keys, values = self.entries(int(indptr[-1]), call.sizes)
        if len(keys):
            arrays = [a for pair in zip(room, [keys, *values], strict=True) for a in pair]
            ranges = shared_out(np.diff(indptr) + ROW_WORK)
            self.run(
                "packed", *call.common, len(ranges) - 1, ranges, first[:-1], indptr, len(room[0]), len(keys), *arrays
            )
        self._rooms.append(room)
        return ResultPattern(self._held_shape(call), indptr, keys, values)

    def merged(self, call: Call) -> ResultPattern:
        """Merge the rows of each chunk from an upper bound of its position on, then close the gaps."""
        kind = cast("Merge", self.assembly.merge).how
        indptr, faults = np.zeros(call.rows + 1, np.int64), np.zeros(call.chunks, np.int64)
        first, total = merged_places(call.pointers, call.ranges, kind)
        keys, values = self.entries(total, call.sizes)
        if call.rows and total:
            name = "alone" if call.chunks == 1 else "numeric"
            self.run(name, *call.split, indptr[1:], total, first, keys, *values, faults)
        if faults.any():  # validated arrays were changed meanwhile, or the checks are off
            raise StructureError(f"the rows that {self.name} merges are not sorted, or changed during the call")
        parts = chunk_parts(indptr, call.ranges, first)
        keys, *values = (closed(array, parts) for array in (keys, *values))
        return ResultPattern(self._held_shape(call), indptr, keys, values)

    def one_phase(self, call: Call, top: int | None = None, threshold: Any = None) -> ResultPattern:
        """Write the rows of each chunk from an upper bound of its position on, then close the gaps."""
        if self.assembly.merge is not None:
            return self.merged(call)
        first, total = self.places(call, top)
        try:
            room = self.room(total, call.sizes)
        except MemoryError:  # the system counts addresses that are never written
            if self.options.select or self.is_stamped:
                raise
            return self.two_phases(call)
        work = self.stamps(call) if self.is_stamped else self.take(call)
        indptr = np.zeros(call.rows + 1, np.int64)
        self.numeric(call, work, indptr[1:], first, room[0], room[1:], *self.selected(call, top, threshold))
        self.give_back(work)
        keys, *values = self.together(room, chunk_parts(indptr, call.ranges, first))
        return ResultPattern(self._held_shape(call), indptr, keys, values)

    def together(self, room: list[np.ndarray], parts: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """Compact the parts of a buffer: in place if they fill most of it or it is large, else in new arrays."""
        count, nbytes = sum(count for _, _, count in parts), sum(a.nbytes for a in room)
        written = nbytes * count // max(len(room[0]), 1)  # untouched pages are not resident
        if nbytes > KEPT_BYTES and written > MOST_ROOM:
            return [closed(array, parts) for array in room]
        if self._earlier is None or nbytes < LEAST_ROOM:
            arrays = [np.empty((count, *a.shape[1:]), a.dtype) for a in room]
        elif count * MOST_WASTE >= len(room[0]) and nbytes <= MOST_ROOM:
            return self._earlier.lend([without_gaps(array, parts) for array in room], count)
        else:
            arrays = self._earlier.lend(self._earlier.take(count), count)
        for source, target in zip(room, arrays, strict=True):
            gather(source, parts, target)
        if nbytes <= HELD_BYTES:
            self._rooms.append(room)
        return arrays

    def room(self, count: int, sizes: dict[str, int]) -> list[np.ndarray]:
        """Return buffers for coordinates and values, reused from an earlier call, whose pages need no clearing."""
        for room in popped(self._rooms):
            blocks = [self.block(n, sizes) for n in range(len(room) - 1)]
            is_like = all(a.shape[1:] == _flat(b) for a, b in zip(room[1:], blocks, strict=True))
            if is_like and count <= len(room[0]) <= 2 * count + SERIAL_WORK:
                return room
        if self._earlier is not None:
            return list(self._earlier.take(count))
        keys, values = self.entries(count, sizes)
        return [keys, *values]

    def places(self, call: Call, top: int | None) -> tuple[np.ndarray, int]:
        """Return upper bounds of the positions where the chunks begin, and the end of the last one."""
        bound = cast("np.ndarray", call.bound)
        parts = [bound[a:b] for a, b in pairwise(call.ranges)]
        if top is None:
            sums = [int(part.sum()) for part in parts]
        else:  # a row is written whole before the largest entries are chosen
            sums = [int(np.minimum(part, top).sum() + part.max(initial=0)) for part in parts]
        if self.is_stamped:
            sums = [count + 1 for count in sums]  # rows under a mask write one ahead
        if self.options.select:
            sums.append(LANES)  # bytes that are read behind the last row
        room = begins(np.array(sums, np.int64))
        return room[: len(parts)], int(room[-1])

    def selected(self, call: Call, top: int | None, least: Any) -> list[Any]:
        """Return the arguments of a selection of the largest entries."""
        if not self.options.select:
            return []
        dtype = numpy_dtype(ordered(self.assembly.results[0].dtype))
        largest = 0 if call.bound is None else int(call.bound.max(initial=0))
        most = largest if top is None else min(top, max(self._width(call.sizes), 1))
        return [most, least, np.empty((call.chunks, most), dtype)]

    def numeric(
        self,
        call: Call,
        work: ChunkWorkspace | Stamps,
        ends: np.ndarray,
        first: np.ndarray,
        keys: np.ndarray,
        values: list[np.ndarray],
        *selected: Any,
    ) -> None:
        """Run the numeric phase: write the rows of each chunk from `first` on, and where each ends."""
        if not call.rows or not len(keys):
            return
        first = np.ascontiguousarray(first)
        name = "looking" if call.lookups is not None and call.lookups.is_some else "numeric"
        self.run(name, *call.split, ends, len(keys), first, keys, *values, *work.params_of(call), *selected)

    def can_refill(self, args: Arguments) -> bool:
        """Return whether a function computes the values of a known pattern alone."""
        has_values = self.assembly.merge is None and not self.is_stamped and not self.options.accumulators.is_table
        return has_values and not self.is_wide(args)

    # ------------------------------------------------------------------ memory

    def block(self, number: int, sizes: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of result `number` for each coordinate: empty if that is one element."""
        return tuple(int(n.at(sizes)) for n in self._blocks[number])

    def item_bytes(self, sizes: dict[str, int], dtypes: list[str]) -> int:
        """Return the bytes of the elements of all results for one coordinate, in these dtypes."""
        blocks = (math.prod(self.block(n, sizes)) for n in range(len(dtypes)))
        return sum(count * numpy_dtype(d).itemsize for count, d in zip(blocks, dtypes, strict=True))

    def entries(self, count: int, sizes: dict[str, int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Allocate arrays for coordinates and values."""
        shapes = ((count, *_flat(self.block(n, sizes))) for n in range(len(self.assembly.results)))
        dtypes = (numpy_dtype(r.dtype) for r in self.assembly.results)
        values = [np.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return np.empty(count, self._key_dtype()), values

    def take(self, call: Call) -> ChunkWorkspace:
        """Return accumulators for the chunks of a call, reused if possible."""
        words = -(-call.width // WORD)
        if self.options.accumulators.is_table:
            largest = 0 if call.bound is None else int(call.bound.max(initial=0))
            shapes = [(call.chunks, 2 << (largest | 1).bit_length())] * 2
        else:
            tops = -(-words // WORD) * WORD
            highs = -(-tops // (WORD * BYTES)) * BYTES
            shapes = [(call.chunks, n) for n in (call.width, words, words * WORD, tops, highs)]
        elements, parts = self.elements(call, shapes[0]), self.products_held(call)
        filters = [(call.chunks, words)] * len(self.assembly.filters)  # tables are no wider for a wider result
        work = kept(self._spare, *(shape for shape, _ in elements), shapes[1], *filters, *(shape for shape, _ in parts))
        if work is not None:
            return work
        arrays = [full(shape, dtype, v) for (shape, dtype), v in zip(elements, call.initial, strict=True)]
        allowed = [np.zeros(shape, np.int64) for shape in filters]
        bits = full(shapes[1], np.dtype(np.int64), 0)
        bytes_, top, high = [*(full(shape, np.dtype(np.uint8), 0) for shape in shapes[2:]), None, None, None][:3]
        return ChunkWorkspace(arrays, bits, bytes_, top, high, allowed, [buffers.empty(*part) for part in parts])

    def products_held(self, call: Call) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return shapes and dtypes of the buffers for the products of long rows; empty without segments."""
        if self._part_dtypes is None:
            return []
        segments = -(-call.width >> SHIFT)
        room = min(call.entered, MOST_PARTS) if call.entered >= segments * LEAST_PARTS else 0
        shapes = [(call.chunks, max(n, 1)) for n in (segments, room)]
        dtypes = [np.dtype(np.int64), self._key_dtype(), *self._part_dtypes]
        return [
            (shape, dtype) for shape, dtype in zip([shapes[0], *[shapes[1]] * (len(dtypes) - 1)], dtypes, strict=True)
        ]

    def stamps(self, call: Call) -> Stamps:
        """Return the buffers for rows in the order of a mask, for the chunks of a call."""
        elements = self.elements(call, (call.chunks, call.width + DUMPS))
        shapes = (*(shape for shape, _ in elements), (call.chunks, call.width))
        return kept(self._stamps, *shapes) or Stamps.of(call, elements)

    def elements(self, call: Call, shape: tuple[int, int]) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shapes and dtypes of the elements of each result in an accumulator."""
        blocks = (_flat(self.block(n, call.sizes)) for n in range(len(self.assembly.results)))
        dtypes = (np.dtype(numpy_dtype(r.held_dtype)) for r in self.assembly.results)
        return [((*shape, *block), dtype) for block, dtype in zip(blocks, dtypes, strict=True)]

    def give_back(self, work: ChunkWorkspace | Stamps) -> None:
        """Keep accumulators for the next call."""
        spare = self._stamps if isinstance(work, Stamps) else self._spare
        if work.nbytes <= KEPT_BYTES and not spare:
            spare.append(work)  # type: ignore[arg-type]

    def _width(self, sizes: dict[str, int]) -> int:
        width = math.prod(int(n.at(sizes)) for n in self._lengths)
        if width > MOST_COORDINATES:
            lengths = " x ".join(str(int(n.at(sizes))) for n in self._lengths)
            raise ArgumentError(f"a row of {self.name} has {lengths} coordinates, more than 64 bits can count")
        return width

    def _key_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.assembly.key_dtype)

    def _held_shape(self, call: Call) -> tuple[int, ...]:
        return tuple(int(n.at(call.sizes)) for n in self._shape)

    def run(self, name: str, *args: Any) -> None:
        """Call one of the compiled functions."""
        self.function(name)(*(passed(a) if isinstance(a, np.ndarray) else a for a in args))

    def function(self, name: str) -> Callable[..., Any]:
        """Return one of the compiled functions."""
        if name not in self._functions:
            self._functions[name] = self.holder(name).named(name)
        return self._functions[name]

    def has(self, name: str) -> bool:
        """Return whether one of the functions is compiled already."""
        return name in self._functions or name in self.compiled.held

    def holder(self, name: str) -> AssembledCompiled:
        """Return the library with one of the functions, compiled now if no call has used it before."""
        if name in self.compiled.held:
            return self.compiled
        together = name in FIRST and self.assembly.merge is None
        return self.with_functions(*(FIRST if together else (name,)))

    def with_functions(self, *names: str, options: AccumulatorOptions | None = None) -> AssembledCompiled:
        """Compile these functions."""
        options = replace(options or self.options, functions=names)
        return compiled_functions(self.func, self.compiled.target, options)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a shared library and a C header that run without Python, as `Kernel.export` does.

        The function allocates row pointers, coordinates and values of the result; the header explains how to free them.
        That of a kernel that selects takes two parameters more: ``top``, 0 for all, and ``least``, the least value that
        is kept.
        An accumulator has an element for each column and thread; that of a kernel built with
        ``schedule=Accumulators(kind="table")`` for each entry of the longest row.
        """
        # The C function computes the rows in stored order, which gives the same result.
        whole = SparseOutputKernel(self.with_functions(*FUNCTIONS, options=self.options.plain()))
        interface = AssembledInterface(whole, whole.assembly, whole.options)
        return export(whole, Path(path), Path(header) if header is not None else None, interface=interface)

    def compiled_parts(self) -> Iterator[Compiled]:
        yield from dict.fromkeys([self.compiled, *map(self.holder, self._functions)])

    def __reduce__(self) -> tuple[Any, ...]:
        write_one(self.compiled)  # for the process that unpickles it
        return _restored, (self.func, str(self.compiled.target), self.compiled.schedule)

    def __deepcopy__(self, _memo: Any) -> SparseOutputKernel:
        return SparseOutputKernel(self.compiled)  # machine code does not change

    # ------------------------------------------------------------------ looking inside

    def script(self, stage: int = 1) -> str:
        """Return the program's text: 1 as written, 2 its functions, 3 their loops as they are compiled."""
        if type(stage) is not int or stage not in (1, 2, 3):
            raise VerifyError(f"stage: expected 1, 2 or 3, got {shown(stage)}")
        return script(self.func) if stage == 1 else str(self.compiled.stage(stage).script())

    def source(self, kind: str = "ll") -> str:
        """Return LLVM IR (``"ll"``) or assembly (``"asm"``) of all functions of `script`."""
        return self.with_functions(*FUNCTIONS).source(kind)


class BoundSparseOutputKernel:
    """A kernel with some arguments fixed.

    Parameters
    ----------
    kernel : SparseOutputKernel
    arguments : dict
        Those that are fixed, by name.
    """

    def __init__(self, kernel: SparseOutputKernel, arguments: dict[str, Any]) -> None:
        names = (*kernel.signature.buffers, *kernel.signature.by_name, *(SELECTION if kernel.options.select else ()))
        unknown = next((name for name in arguments if name not in names), None)
        if unknown is not None:
            raise kernel.unknown(unknown)
        self.kernel, self.arguments = kernel, arguments
        self.order = {name: at for at, name in enumerate(kernel.signature.buffers)}

    def __repr__(self) -> str:
        return f"{self.kernel!r} with {', '.join(self.arguments)} fixed"

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run the kernel on the fixed arguments and these."""
        twice = next((name for name in arguments if name in self.arguments), None)
        if twice is not None:
            raise ArgumentTypeError(f"{twice} is fixed in this kernel: leave it out")
        merged = self.arguments | arguments  # the class of the result is that of the first one, fixed or not
        return self.kernel(*unnamed, **dict(sorted(merged.items(), key=lambda item: self.order.get(item[0], -1))))


def _flat(block: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a block as the functions take it."""
    return (math.prod(block),) if block else ()


def _restored(func: Any, target: str, options: AccumulatorOptions | None) -> SparseOutputKernel:
    """Restore a kernel from its pickled state."""
    return SparseOutputKernel(compiled_functions(func, tvm.target.Target(target), options))


__all__ = ["SparseOutputKernel"]
