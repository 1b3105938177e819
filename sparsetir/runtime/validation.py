# SPDX-License-Identifier: Apache-2.0
"""Validation of operands: index arrays of compressed rows, and infinities and NaN where formats store zeros.

One compiled function reads the index arrays of all rows, another one only listed rows: those that a product with few
rows reads. Neither reads outside of the arrays, whatever they contain. Both return only whether the arrays are valid;
`sparsetir.interop.check_level` names the fault.

A kernel over a format that stores zeros also multiplies the zeros, and infinity times zero is NaN: results that do not
depend on the infinity become NaN as well. Where the user did not choose the format, such a call is repeated over the
matrix as it was passed. In a sum of products, any zero times such a number makes a result NaN, so that the results are
inspected, or the operands where those are smaller. Other programs, such as the maximum of a sum and zero, may drop the
NaN: their operands are inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir import interop
from sparsetir.codegen.cache import CompiledLoops, compile_cached
from sparsetir.codegen.target import native_target
from sparsetir.interop.sources import array_of_numbers
from sparsetir.ir.rewriting import LONG, alloc, array_param, cell, collect, get, long, long_var, put, seq
from sparsetir.ir.views import Program, cast, const
from sparsetir.lower.checks.compiled import NAN_MESSAGE, WIDTHS
from sparsetir.lower.loops import parallel, serial
from sparsetir.utils.threads import get_num_threads

if TYPE_CHECKING:
    from sparsetir.runtime.signature import Signature
    from sparsetir.transform.decompose import Decomposition

CALLS_UNTIL_COMPILED = 4  # validations by numpy for each type of indices
MAX_SERIAL_ENTRIES = 1 << 18
DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
LANES = 8  # numbers in the result of a chunk: one cache line, so that threads share none
LISTED_SHARE = 4  # listed rows are validated alone if they have less than one in so many entries

_calls: dict[tuple[str, np.dtype[Any], str], int] = {}
_functions: dict[tuple[str, np.dtype[Any], str], Any] = {}


def is_sound(
    level: interop.Level,
    indptr: np.ndarray,
    indices: np.ndarray,
    *,
    parent_count: int,
    length: int,
    need_sorted: bool,
    listed: np.ndarray | None = None,
) -> bool:
    """Return whether `interop.check_level` would accept the arrays; only those of the rows `listed`, if given.

    The numbers in `listed` must be rows.
    """
    order = "any" if not need_sorted else "distinct" if level.unique else "ascending"
    if listed is not None and _is_small_share(indptr, indices, listed, parent_count):
        return _are_listed_sound(order, indptr, indices, listed, length)
    size, dtype = indices.size, indices.dtype
    is_served = size >= 2 and indptr.dtype == dtype and dtype in DTYPES
    is_served = is_served and ((indptr.flags.carray and indices.flags.carray) or _are_passable(indptr, indices))
    # A parallel loop wakes all threads, which takes longer than reading a few thousand indices.
    name = "rows" if size < MAX_SERIAL_ENTRIES else "rows_in_chunks"
    function = _functions.get((name, dtype, order)) or _function(name, dtype, order) if is_served else None
    if function is None:
        return interop.is_sound(
            level, indptr, indices, parent_count=parent_count, length=length, need_sorted=need_sorted
        )
    if indptr.shape != (parent_count + 1,) or indptr[0] != 0 or indptr[-1] != size:
        return False
    chunks = 1 if size < MAX_SERIAL_ENTRIES else get_num_threads()
    out = np.empty((chunks, LANES), np.int64)
    if not (indptr.flags.writeable and indices.flags.writeable):
        indptr, indices = interop.writable_alias(indptr), interop.writable_alias(indices)
    function(parent_count, size, chunks, indptr, indices, out)
    return _is_accepted(out, dtype, length)


def _are_passable(indptr: np.ndarray, indices: np.ndarray) -> bool:
    """Return whether compiled functions take the arrays as they are."""
    for flags in (indptr.flags, indices.flags):
        if not (flags.c_contiguous and flags.aligned):
            return False
    return indptr.dtype.isnative and indices.dtype.isnative


def _is_accepted(out: np.ndarray, dtype: np.dtype[Any], length: int) -> bool:
    """Return whether the indices lie in the range, and the row pointers and indices descend nowhere in a row."""
    limit, inside = min(length, 1 << (8 * dtype.itemsize - 1)), 0
    for largest, falls, between, faults in out[:, :4].tolist():
        if faults or not 0 <= largest < limit:
            return False
        inside += falls - between
    return inside == 0


def _is_small_share(indptr: np.ndarray, indices: np.ndarray, listed: np.ndarray, rows: int) -> bool:
    """Return whether listed rows have few of the entries by their row pointers, which may be wrong."""
    size = indices.size
    if not _are_passable(indptr, indices) or indptr.dtype != indices.dtype:
        return False
    if not 0 < listed.size * LISTED_SHARE < size or indptr.shape != (rows + 1,):
        return False
    entries = int(np.subtract(indptr[1:].take(listed), indptr.take(listed), dtype=np.int64).sum())
    return 0 <= entries * LISTED_SHARE < size and bool(indptr[0] == 0 and indptr[-1] == size)


def _are_listed_sound(order: str, indptr: np.ndarray, indices: np.ndarray, listed: np.ndarray, length: int) -> bool:
    function = _function("listed", indices.dtype, order, at_once=True)
    out = np.empty((1, LANES), np.int64)
    listed = np.ascontiguousarray(listed, np.int64)
    arrays = map(interop.writable_alias, (indptr, indices, listed))
    function(len(indptr) - 1, indices.size, len(listed), *arrays, out)
    return _is_accepted(out, indices.dtype, length)


def _function(name: str, dtype: np.dtype[Any], order: str, *, at_once: bool = False) -> Any:
    """Return a compiled function; None while too few calls asked for it."""
    key = name, dtype, order
    function = _functions.get(key)
    if function is not None:
        return function
    count = _calls.get(key, 0)
    if not at_once and count < CALLS_UNTIL_COMPILED:
        _calls[key] = count + 1
        return None
    _functions[key] = _compiled(name, dtype.name, order)
    return _functions[key]


def _compiled(name: str, idtype: str, order: str) -> Any:
    if name == "listed":
        func = _listed_rows(idtype, order)
    else:
        func = _all_rows(idtype, order, parallel if name == "rows_in_chunks" else serial)
    func = func.with_attr({"global_symbol": f"validate_{name}", "tirx.noalias": True})
    return compile_cached(func, native_target(), None, CompiledLoops).function


# ------------------------------------------------------------------ loops


def _at(array: Var, place: ir.Expr) -> ir.Expr:
    return tirx.BufferLoad(array, [place])


def _falls(indices: Var, place: ir.Expr, order: str) -> ir.Expr:
    """Return whether the index at a place must not follow the one before it."""
    now, before = _at(indices, place), _at(indices, place - long(1))
    return now < before if order == "ascending" else now <= before


def _count(counter: Var, condition: ir.Expr) -> tirx.Stmt:
    return put(counter, get(counter) + cast(condition, str(counter.ty.dtype)))


class _ChunkLoops:
    """The arrays, and counters of one chunk: largest index read as unsigned, falls, falls between rows, faults."""

    def __init__(self, idtype: str, order: str) -> None:
        self.idtype, self.order = idtype, order
        self.rows, self.count = long_var("rows"), long_var("count")
        self.indptr, self.indices = (
            array_param("indptr", idtype, self.rows + long(1)),
            array_param("indices", idtype, self.count),
        )
        self.largest, self.falls = cell("largest", f"u{idtype}"), cell("falls", idtype)
        self.between, self.faults = cell("between", idtype), cell("faults", idtype)
        self.cells = [self.largest, self.falls, self.between, self.faults]

    def begin(self) -> list[tirx.Stmt]:
        return [*alloc(*self.cells), *(put(c, const(0, str(c.ty.dtype))) for c in self.cells)]

    def finish(self, out: Var, chunk: ir.Expr) -> list[tirx.Stmt]:
        values = [cast(get(c), LONG) for c in self.cells]
        return [tirx.BufferStore(out, value, [chunk, long(n)]) for n, value in enumerate(values)]

    def read(self, first: ir.Expr, extent: ir.Expr, *, after: int) -> tirx.Stmt:
        """Read indices, and compare each but the first `after` with the one before it."""
        step = long_var("step")
        widest = lambda place: put(self.largest, tirx.max(get(self.largest), self.unsigned(place)))  # noqa: E731
        if self.order == "any":
            return serial(step, extent, widest(first + step))
        place = first + long(after) + step
        loop = serial(step, extent - long(after), seq(widest(place), _count(self.falls, self.fall(place))))
        return seq(widest(first), loop) if after else loop

    def unsigned(self, place: ir.Expr) -> ir.Expr:
        return cast(_at(self.indices, place), f"u{self.idtype}")

    def fall(self, place: ir.Expr) -> ir.Expr:
        return _falls(self.indices, place, self.order)


def _all_rows(idtype: str, order: str, chunked: Callable[..., tirx.Stmt]) -> tirx.PrimFunc:
    """Make the function that validates all rows: every descent of the indices must lie between two rows.

    `chunked` makes the loop over chunks; each chunk stores its own counts.
    """
    loops, chunks, chunk = _ChunkLoops(idtype, order), long_var("chunks"), long_var("chunk")
    out = array_param("out", LONG, chunks, long(LANES))
    share = lambda n, c: tirx.floordiv(n * c, chunks)  # noqa: E731
    lo, hi, first, last = (long_var(name) for name in ("lo", "hi", "first", "last"))
    row, start, also = long_var("row"), long_var("start"), long_var("row_again")
    begin, end = _at(loops.indptr, first + row), _at(loops.indptr, first + row + long(1))
    descents = serial(row, last - first, _count(loops.faults, end < begin))
    at, after = _at(loops.indptr, first + also), _at(loops.indptr, first + also + long(1))
    # Row pointers of other chunks may be wrong, so that the position is clamped to the array.
    place = tirx.max(long(1), tirx.min(cast(at, LONG), loops.count - long(1)))
    starts = tirx.And(at < after, at > const(0, idtype))
    between = seq(tirx.Bind(start, place), _count(loops.between, tirx.And(starts, loops.fall(start))))
    reads = [loops.read(lo, hi - lo, after=0)]
    if order != "any":
        reads += [
            put(loops.largest, tirx.max(get(loops.largest), loops.unsigned(long(0)))),
            serial(also, last - first, between),
        ]
    body = seq(
        *loops.begin(),
        tirx.Bind(lo, share(loops.count, chunk) if order == "any" else tirx.max(share(loops.count, chunk), long(1))),
        tirx.Bind(hi, share(loops.count, chunk + long(1))),
        tirx.Bind(first, share(loops.rows, chunk)),
        tirx.Bind(last, share(loops.rows, chunk + long(1))),
        descents,
        tirx.IfThenElse(get(loops.faults).equal(const(0, idtype)), seq(*reads), None),
        *loops.finish(out, chunk),
    )
    params = [loops.rows, loops.count, chunks, loops.indptr, loops.indices, out]
    return tirx.PrimFunc(params, chunked(chunk, chunks, body))


def _listed_rows(idtype: str, order: str) -> tirx.PrimFunc:
    """Make the function of listed rows."""
    loops, number, step = _ChunkLoops(idtype, order), long_var("number"), long_var("step")
    listed, out = array_param("listed", LONG, number), array_param("out", LONG, long(1), long(LANES))
    row, lo, hi = (long_var(name) for name in ("row", "lo", "hi"))
    is_wrong = tirx.Or(tirx.Or(lo < long(0), hi < lo), hi > loops.count)
    read = tirx.IfThenElse(lo < hi, loops.read(lo, hi - lo, after=1), None)
    one = seq(
        tirx.Bind(row, _at(listed, step)),
        tirx.Bind(lo, cast(_at(loops.indptr, row), LONG)),
        tirx.Bind(hi, cast(_at(loops.indptr, row + long(1)), LONG)),
        tirx.IfThenElse(is_wrong, put(loops.faults, const(1, idtype)), read),
    )
    body = seq(*loops.begin(), serial(step, number, one), *loops.finish(out, long(0)))
    return tirx.PrimFunc([loops.rows, loops.count, number, loops.indptr, loops.indices, listed, out], body)


FLOATS = ("float", "bfloat")
Call = Callable[..., Any]


def has_nan(value: Any) -> bool:
    """Return whether a result, or one of several, holds a NaN.

    Examples
    --------
    >>> has_nan(np.array([1.0, np.inf])), has_nan((np.ones(2), np.array([np.nan])))
    (False, True)
    """
    if isinstance(value, tuple):
        return any(has_nan(part) for part in value)
    array = array_of_numbers(value, "a result")
    if array.dtype.kind in "biu" or not array.size:
        return False
    if array.dtype.itemsize == HALF:
        return _most_beyond_infinity(array) > 0
    # The minimum is NaN if any element is: a single pass without an array of booleans.
    return bool(np.isnan(np.minimum.reduce(array, axis=None)))


def is_finite(value: Any) -> bool:
    """Return whether an operand holds neither infinities nor NaN."""
    array = array_of_numbers(value, "an operand")
    if array.dtype.kind in "biu" or not array.size:
        return True
    if array.dtype.itemsize == HALF:
        return _most_beyond_infinity(array) < 0
    return bool(np.isfinite(np.minimum.reduce(array, axis=None)) and np.isfinite(np.maximum.reduce(array, axis=None)))


HALF, SIGN = 2, 0x8000  # bytes, and the sign bit


def _most_beyond_infinity(array: np.ndarray) -> int:
    """Return how far the bits of halves are beyond those of infinities at most: 0 for these, more for NaN."""
    infinity = int(np.asarray(np.inf, array.dtype).view(np.uint16))
    positive, negative = (int(array.view(dtype).max()) for dtype in (np.int16, np.uint16))
    return max(positive - infinity, negative - (SIGN | infinity))


def sums_products(program: Program) -> bool:
    """Return whether the program only sums products, so that a NaN among the terms is a NaN in the result."""
    if len(program.iterations) != 1:
        return False
    stores = collect(program.func.body, tirx.BufferStore)
    views = {b.view for b in program.buffers.values() if not b.allocated}
    plain = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Cast, tirx.FloatImm, tirx.IntImm, ir.TensorLoad, ir.Var)
    return all(s.buffer in views and _is_float(s.buffer) and _is_made_of(s.value, plain) for s in stores)


def _is_float(node: Any) -> bool:
    return str(node.ty.dtype).startswith(FLOATS)


def _is_made_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether floating-point terms are of these kinds only; a call, a maximum or a choice may drop a NaN."""
    if isinstance(value, ir.TensorLoad) or not isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Cast)):
        return isinstance(value, kinds)
    if isinstance(value, tirx.Cast):
        return _is_float(value) and _is_made_of(value.value, kinds)
    return _is_made_of(value.a, kinds) and _is_made_of(value.b, kinds)


def nbytes(value: Any) -> int:
    """Return the bytes of an array or a torch tensor."""
    return int(value.nbytes) if hasattr(value, "nbytes") else np.asarray(value).nbytes


class NonFiniteGuard:
    """Detection of calls in which stored zeros may have made results NaN.

    Parameters
    ----------
    signature : Signature
        Of the program as it was written.

    Attributes
    ----------
    in_results : bool
        Whether the results are inspected instead of the operands.
    in_kernel : bool
        Whether the compiled function inspects its results itself.
    """

    def __init__(self, signature: Signature) -> None:
        effects, program = signature.effects, signature.program
        # An updated array is overwritten, so that the call cannot be repeated.
        self.in_results = sums_products(program) and not effects.updated
        # Each core writes a part of a vector; reading all of it on one core takes long, compared with the product.
        results = [signature.by_name[name] for name in effects.written]
        self.suits_kernel = self.in_results and all(p.dtype in WIDTHS and len(p.shape or ()) == 1 for p in results)
        self.in_kernel = False
        names = [n for n, b in signature.buffers.items() if b.is_dense and str(b.dtype).startswith(FLOATS)]
        read = [n for n in names if signature.storage_name(n) not in effects.outputs]
        self.operands = {n for name in read for n in (name, signature.storage_name(name))}

    @classmethod
    def over(cls, decomposition: Decomposition, signature: Signature) -> NonFiniteGuard | None:
        """Return a guard for a decomposed program; None where no zeros are multiplied."""
        return cls(signature) if decomposition.multiplies_zeros else None

    def call(self, fast: Call, plain: Call, arguments: Mapping[str, Any], fixed: Mapping[str, Any]) -> Any:
        """Return the results of `fast`, or of `plain` where those may be spoilt; `fixed` are bound operands."""
        if self.in_kernel:
            return _or_plain(fast, plain, arguments)
        if not self.in_results:
            is_safe = all(is_finite(value) for value in self.watched(arguments, fixed))
            return fast(**arguments) if is_safe else plain(**arguments)
        result = fast(**arguments)
        return plain(**arguments) if self.has_spoilt(result, arguments, fixed) else result

    def watched(self, arguments: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[Any]:
        """Return the operands that zeros are multiplied with."""
        return [value for name, value in {**fixed, **arguments}.items() if name in self.operands]

    def is_spoilt(self, result: Any, arguments: Mapping[str, Any]) -> bool:
        """Return whether a call with this result must be repeated: the check of every call."""
        if not self.in_results:
            return not all(is_finite(value) for value in self.watched(arguments, {}))
        return self.has_spoilt(result, arguments, {})

    def has_spoilt(self, result: Any, arguments: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
        """Return whether zeros may have made results of `fast` NaN."""
        operands = self.watched(arguments, fixed)
        is_larger = sum(map(nbytes, result if isinstance(result, tuple) else [result])) > sum(map(nbytes, operands))
        if is_larger and all(is_finite(value) for value in operands):
            return False
        return has_nan(result)


def _or_plain(fast: Call, plain: Call, arguments: Mapping[str, Any]) -> Any:
    """Return the results of a kernel that inspects them itself, or of `plain` where some are NaN."""
    try:
        return fast(**arguments)
    except (ValueError, RuntimeError) as error:
        if not finds_nan(error):
            raise
        return plain(**arguments)


def finds_nan(error: Exception) -> bool:
    """Return whether a kernel raised this error for a NaN among its results."""
    return NAN_MESSAGE in str(error)


class GuardedBound:
    """A bound kernel over another format, and the plain one for arguments that are not finite.

    Parameters
    ----------
    bound : BoundComposedKernel
    plain : callable
        Makes the bound kernel of the program as it was written, when it is first needed.
    watch : NonFiniteGuard
    """

    def __init__(self, bound: Any, plain: Callable[[], Call], watch: NonFiniteGuard) -> None:
        self.bound, self.watch = bound, watch
        self._plain = plain
        self._made: Call | None = None
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def __repr__(self) -> str:
        return repr(self.bound)

    @property
    def kernel(self) -> Any:
        """The kernel over the other format."""
        return self.bound.kernel

    @property
    def fixed(self) -> dict[str, Any]:
        """The arguments that are bound."""
        return self.bound.fixed

    def plain(self, **arguments: Any) -> Any:
        """Run the program as it was written."""
        if self._made is None:
            self._made = self._plain()
        return self._made(**arguments)

    def __call__(self, **arguments: Any) -> Any:
        """Run with the open arguments; see `Kernel.__call__`."""
        return self.watch.call(self.bound, self.plain, arguments, self.bound.fixed)

    @property
    def last(self) -> tuple[Any, Callable[[dict[str, Any]], Any] | None]:
        """The key of a call, and its plan, which has the same care."""
        key, plan = self.bound.last
        if plan is None or not self.watch.in_results:
            return None, None
        if self._last[1] is not plan:
            self._last = key, plan, self._watched(plan)
        return key, self._last[2]

    def _watched(self, plan: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        plain, has_spoilt, fixed = self.plain, self.watch.has_spoilt, self.bound.fixed
        if self.watch.in_kernel:

            def run_or_plain(arguments: dict[str, Any]) -> Any:
                try:
                    return plan(arguments)
                except (ValueError, RuntimeError) as error:
                    if not finds_nan(error):
                        raise
                return plain(**arguments)

            return run_or_plain

        def run(arguments: dict[str, Any]) -> Any:
            result = plan(arguments)
            return plain(**arguments) if has_spoilt(result, arguments, fixed) else result

        return run

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> Any:
        """Time repeated calls of the compiled function; see `BoundKernel.time`."""
        return self.bound.time(seconds=seconds, **arguments)


__all__ = ["GuardedBound", "NonFiniteGuard", "finds_nan", "has_nan", "is_finite", "is_sound", "sums_products"]
