# SPDX-License-Identifier: Apache-2.0
"""Scratch buffers: bounds, compaction, hoisting, stack promotion, scalar replacement."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.errors import LoweringError
from sparsetir.ir.rewriting import alloc, collect, mentions, renewed, same, seq, substitute
from sparsetir.ir.views import accesses, const
from sparsetir.ir.visitor import structural_mutate, structural_walk
from sparsetir.lower.loops import PARALLEL, UNROLLED, VECTORIZED, with_, with_body

# Bound every array inside a loop by the range of its subscripts.
#
# before::
#
#     acc = T.alloc_local((2147483647,))
#     for k_1 in T.vectorized(32):
#         acc[k_1] = ...
#
# after::
#
#     acc = T.alloc_local((32,))
#
# TVM's buffer compaction cannot bound a tile of a symbolic extent and keeps the largest integer instead.


LARGEST = 1 << 24


def _outer_loops(body: tirx.Stmt) -> dict[Var, list[tirx.For]]:
    """Return the loops around each allocation: their variables are fixed during its lifetime."""
    stack: list[tirx.For] = []
    loops_around: dict[Var, list[tirx.For]] = {}

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        stack.append(node)
        mutator.default_mutate(node)
        stack.pop()
        return node

    def on_alloc(node: tirx.AllocBuffer, _mutator: Any) -> tirx.Stmt:
        if _is_local(node.buffer) or stack:
            loops_around[node.buffer] = list(stack)
        return node

    structural_mutate(body, [(tirx.For, on_for), (tirx.AllocBuffer, on_alloc)])
    return loops_around


def _is_local(buffer: Var) -> bool:
    return str(buffer.ty.storage_scope) == "local"


def _is_fixed(buffer: Var) -> bool:
    return all(isinstance(d, tirx.IntImm) and int(d) <= LARGEST for d in buffer.ty.shape)


class _LocalArray:
    """The start and the extent of the subscripts of one array."""

    def __init__(self, buffer: Var, func: tirx.PrimFunc, outer: list[tirx.For], ranges: dict[Var, ir.Range]) -> None:
        self.analyzer = sym.Analyzer()
        for var, extent in ranges.items():
            self.analyzer.bind(var, extent)
        self.moving = [v for v in ranges if v not in {loop.loop_var for loop in outer}]
        life = outer[-1].body if outer else func.body
        self.changing = [s.buffer for s in collect(life, tirx.BufferStore)]
        zeros = {v: const(0, str(v.ty.dtype)) for v in self.moving}
        subscripts = [indices for accessed, indices, _ in accesses(func) if accessed.same_as(buffer)]
        self.bases = [self.analyzer.simplify(substitute(i, zeros)) for i in subscripts[0]] if subscripts else []
        self.extents = [self._extent([s[n] for s in subscripts], n) for n in range(len(self.bases))]
        pairs = zip(self.bases, self.extents, strict=True)
        self.bases = [const(0, str(base.ty.dtype)) if extent is None else base for base, extent in pairs]

    def shrunk(self, buffer: Var) -> Var:
        """Return the array shrunk to the extents that its subscripts need, where these are known."""
        shape = [d if e is None else const(e) for d, e in zip(buffer.ty.shape, self.extents, strict=True)]
        scope = str(buffer.ty.storage_scope)
        return tirx.decl_buffer(shape, str(buffer.ty.dtype), name=str(buffer.name), scope=scope, layout=None)

    def shifted(self, indices: Any, bases: Any) -> list[ir.Expr]:
        """Return subscripts relative to the start."""
        return [self.analyzer.simplify(i - b) for i, b in zip(indices, bases, strict=True)]

    def _extent(self, indices: list[ir.Expr], n: int) -> int | None:
        """Return the number of elements from the start to the last subscript; None where no constant bounds it."""
        if any(mentions(load, [*self.moving, *self.changing]) for i in indices for load in collect(i, ir.TensorLoad)):
            return None
        bounds = [self.analyzer.const_int_bound(self.analyzer.simplify(i - self.bases[n])) for i in indices]
        most, least = max(int(b.max_value) for b in bounds), min(int(b.min_value) for b in bounds)
        return most + 1 if least >= 0 and most < LARGEST else None


def _bounded(buffer: Var, local: _LocalArray) -> bool:
    """Return whether to replace the array; raise where that is required but its size is unbounded."""
    is_open = not local.extents or None in local.extents
    if is_open and _is_local(buffer) and not _is_fixed(buffer):
        message = f"the local array {buffer.name} has no fixed size: its subscripts are not bounded by constants"
        raise LoweringError(f"{message}; tile the loop by a constant before caching")
    return any(e is not None for e in local.extents)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.BoundLocals")
def BoundLocals(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Shrink arrays inside loops to their use; raise `LoweringError` where a local one has no fixed size."""
    loops_around = _outer_loops(func.body)
    if not loops_around:
        return func
    ranges = {f.loop_var: ir.Range.from_min_extent(f.min, f.extent) for f in collect(func, tirx.For)}
    uses = {old: _LocalArray(old, func, outer, ranges) for old, outer in loops_around.items()}
    local = {old: use for old, use in uses.items() if _bounded(old, use)}
    shrunk = {old: use.shrunk(old) for old, use in local.items()}

    def place(buffer: Var, indices: Any, mutator: Any) -> tuple[Var, list[ir.Expr]]:
        new_indices = [mutator.mutate(i) for i in indices]
        if buffer not in local:
            return buffer, new_indices
        # A start may itself be read from an array that is replaced.
        return shrunk[buffer], local[buffer].shifted(new_indices, [mutator.mutate(b) for b in local[buffer].bases])

    def on_alloc(node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        use = shrunk.get(node.buffer)
        return tirx.AllocBuffer(use) if use is not None else mutator.default_mutate(node)

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        return tirx.BufferLoad(*place(node.source, node.indices, mutator))

    def on_store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        buffer, indices = place(node.buffer, node.indices, mutator)
        return tirx.BufferStore(buffer, mutator.mutate(node.value), indices)

    callbacks = [(tirx.AllocBuffer, on_alloc), (ir.TensorLoad, on_load), (tirx.BufferStore, on_store)]
    body = structural_mutate(func.body, callbacks)
    return with_body(func, body)


# Shrink scratch buffers to the part that is used, where TVM can determine it.
#
# before::
#
#     tile = T.sblock_alloc_buffer((64, 128))    # of which a step uses one row
#     tile[i, k] = ...
#
# after::
#
#     tile = T.sblock_alloc_buffer((1, 128))
#     tile[0, k] = ...
#
# TVM cannot bound a part of a symbolic extent and would allocate 2^31 elements: such functions are skipped.


def _scratch(func: tirx.PrimFunc) -> list[Var]:
    buffers = [b for block in collect(func.body, s_tir.SBlock) for b in block.alloc_buffers]
    return buffers + [a.buffer for a in collect(func.body, tirx.AllocBuffer)]


def has_unknown_scratch(func: tirx.PrimFunc) -> bool:
    """Return whether a scratch buffer has a size that is only known at run time."""
    return any(not isinstance(d, tirx.IntImm) for b in _scratch(func) for d in b.ty.shape)


@tvm.transform.module_pass(opt_level=0, name="sparsetir.CompactScratch")
class CompactScratch:
    """TVM's buffer compaction, limited to functions for which it is safe."""

    def transform_module(self, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        """Compact function by function."""
        out = ir.IRModule(dict(mod.functions.items()))
        for gv, func in mod.functions.items():
            if isinstance(func, tirx.PrimFunc) and not has_unknown_scratch(func):
                compacted = s_tir.transform.CompactBufferAllocation()(ir.IRModule({gv.name_hint: func}))
                out[gv] = compacted[gv.name_hint]
        return out


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.RefuseRagged")
def RefuseRagged(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Raise where scratch would be as long as a sparse row: memory is not allocated for each row."""
    for buffer in _scratch(func):
        if any(collect(d, ir.TensorLoad) for d in buffer.ty.shape):
            message = f"the scratch buffer {buffer.name} would be as long as a sparse row"
            raise LoweringError(f"{message}: split the row's loop by a constant before rfactor or caching")
    return func


# Hoist scratch of unknown size: allocate it once, not in every step of the enclosing loops.
#
# before::
#
#     for chunk in T.parallel(16):
#         for i in range(last[0] - first[0]):
#             row = T.alloc_buffer((feat,))
#             ...
#
# after::
#
#     for chunk in T.parallel(16):
#         row = T.alloc_buffer((feat,))
#         for i in range(last[0] - first[0]):
#             ...
#
# TVM allocates where a buffer is first used, and cannot compile every scratch of a symbolic size inside a loop. Steps
# that run concurrently keep separate scratch.


APART = (PARALLEL, VECTORIZED)


def _may_move(alloc: tirx.AllocBuffer) -> bool:
    return not all(isinstance(d, tirx.IntImm) for d in alloc.buffer.ty.shape)


class _Hoister:
    """Hoisting of allocations out of serial loops; `waiting` holds those not placed yet."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[tirx.AllocBuffer] = []

    def on_alloc(self, node: tirx.AllocBuffer, mutator: Any) -> tirx.Stmt:
        if self.depth == 0 or not _may_move(node):
            return mutator.default_mutate(node)
        self.waiting.append(node)
        return tirx.Evaluate(0)

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        outer, self.waiting, self.depth = self.waiting, [], self.depth + 1
        inner = mutator.default_mutate(node)
        inner_allocations, self.waiting, self.depth = self.waiting, outer, self.depth - 1
        bound: list[Var] = [node.loop_var, *(b.var for b in collect(inner.body, tirx.Bind))]
        unhoisted: list[tirx.Stmt] = []
        for allocation in inner_allocations:
            fixed = node.kind in APART or any(mentions(d, bound) for d in allocation.buffer.ty.shape)
            (unhoisted if fixed else self.waiting).append(allocation)
        return with_(inner, body=seq(*unhoisted, inner.body))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.HoistScratch")
def HoistScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Hoist the allocations of unknown size out of the serial loops of a function."""
    if not any(_may_move(a) for a in collect(func.body, tirx.AllocBuffer)):
        return func
    walk = _Hoister()
    body = structural_mutate(func.body, [(tirx.AllocBuffer, walk.on_alloc), (tirx.For, walk.on_for)])
    return with_body(func, seq(*walk.waiting, body))


# Limit scratch: none of a negative size, none whose size wraps around.
#
# before::
#
#     row = T.alloc_buffer((n * m - 2,))
#
# after::
#
#     row = T.alloc_buffer((T.max(n * m - 2, 0),))    # 2**60 where n * m does not fit
#
# TVM's bound of what a loop uses is negative where the loop is empty, and a product of sizes may wrap around. Memory of
# 2**60 elements does not exist: its allocation raises an error.


MOST_ELEMENTS, MOST_PRODUCT = 1 << 60, 1 << 62
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Max, tirx.Min)


def _as_float(size: ir.Expr) -> ir.Expr:
    """Return sums and products of sizes in floating point, where they do not wrap around."""
    if isinstance(size, ARITHMETIC):
        return type(size)(_as_float(size.a), _as_float(size.b))
    return _as_float(size.value) if isinstance(size, tirx.Cast) else tirx.Cast("float64", size)


def _limited(extent: ir.Expr) -> ir.Expr:
    """Return an extent between 0 and `MOST_ELEMENTS`, the latter also where a product in it may wrap around."""
    if isinstance(extent, tirx.IntImm):
        return extent
    if isinstance(extent, (tirx.Max, tirx.Min)):
        return type(extent)(_limited(extent.a), _limited(extent.b))
    size = extent if str(extent.ty.dtype) == "int64" else tirx.Cast("int64", extent)
    least, most = tirx.Max(size, const(0, "int64")), const(MOST_ELEMENTS, "int64")
    limited = tirx.Min(least, most)
    for product in collect(extent, tirx.Mul):
        exact, bound = _as_float(product), tirx.FloatImm("float64", float(MOST_PRODUCT))
        limited = tirx.Select(tirx.And(-bound < exact, exact < bound), limited, most)
    return limited


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.LimitScratch")
def LimitScratch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Clamp negative sizes to zero, and let allocations of more than `MOST_ELEMENTS` elements fail."""
    limited: dict[Var, Var] = {}
    for node in collect(func.body, tirx.AllocBuffer):
        old = node.buffer
        if _may_move(node):
            shape = [_limited(d) for d in old.ty.shape]
            scope = str(old.ty.storage_scope)
            limited[old] = tirx.decl_buffer(shape, str(old.ty.dtype), name=str(old.name), scope=scope, layout=None)
    if not limited:
        return func
    body = tvm_ffi.structural_map(func.body, with_def_region_kind=(Var, lambda v, _: limited.get(v, v)))
    return with_body(func, body)


# Stack promotion: small local arrays are allocated on the stack, where LLVM turns them into registers.
#
# before::
#
#     acc = T.alloc_local((8,))
#
# after::
#
#     acc = T.alloc_buffer((8,))
#
# TVM allocates memory of scope ``local`` through its runtime, so LLVM must keep it up to date: each result that could
# stay in a register is stored, and the next load waits for the store. Small enough arrays of scope ``global`` are
# allocated on the stack.


MOST_BYTES = 1024  # TVM allocates arrays of this size and larger through its runtime.


def bytes_of(buffer: Var) -> int | None:
    """Return the size of an array in bytes; None if it is unknown."""
    size = int(DataType(str(buffer.ty.dtype)).bits) // 8
    for extent in buffer.ty.shape:
        if not isinstance(extent, tirx.IntImm):
            return None
        size *= int(extent)
    return size


def _on_stack(buffer: Var) -> Var:
    """Return a copy of the array's declaration that TVM allocates on the stack."""
    dtype, shape = str(buffer.ty.dtype), list(buffer.ty.shape)
    return tirx.decl_buffer(shape, dtype, name=str(buffer.name), scope="global", layout=None)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.PromoteToStack")
def PromoteToStack(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Allocate every small local array of a function on the stack."""
    stack_arrays: dict[Var, Var] = {}

    def on_alloc(node: tirx.AllocBuffer) -> None:
        size = bytes_of(node.buffer)
        if str(node.buffer.ty.storage_scope) == "local" and size is not None and size < MOST_BYTES:
            stack_arrays[node.buffer] = _on_stack(node.buffer)

    structural_walk(func.body, (tirx.AllocBuffer, on_alloc))
    if not stack_arrays:
        return func
    body = tvm_ffi.structural_map(func.body, with_def_region_kind=(Var, lambda v, _: stack_arrays.get(v, v)))
    return with_body(func, body)


# Scalar replacement of aggregates: a large local array becomes one small array for each unrolled step.
#
# before::
#
#     acc = T.alloc_local((256,))
#     for f in range(64):
#         for ii in T.unroll(8):
#             for k in T.vectorized(32):
#                 acc[ii * 32 + k] = acc[ii * 32 + k] + ...
#
# after::
#
#     acc_0 = T.alloc_local((32,))
#     acc_1 = T.alloc_local((32,))
#     ...
#     for f in range(64):
#         for k in T.vectorized(32):
#             acc_0[k] = acc_0[k] + ...
#         for k in T.vectorized(32):
#             acc_1[k] = acc_1[k] + ...
#         ...
#
# TVM allocates arrays of a kilobyte and more through its runtime, each time the loop starts: a tile of sixteen 512-bit
# registers is that large. Its parts are allocated on the stack, where LLVM turns them into registers.


def _unrolled(stmt: tirx.Stmt, buffer: Var) -> tirx.Stmt:
    """Unroll the unrolled loops of `stmt` whose bodies use the array."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        inner = mutator.default_mutate(node)
        if inner.kind != UNROLLED or not mentions(inner.body, [buffer]) or not isinstance(inner.extent, tirx.IntImm):
            return inner
        dtype = str(inner.loop_var.ty.dtype)
        steps = [{inner.loop_var: inner.min + const(n, dtype)} for n in range(int(inner.extent))]
        return seq(*(renewed(substitute(inner.body, step)) for step in steps))

    return structural_mutate(stmt, [(tirx.For, on_for)])


class _Parts:
    """The small arrays that replace parts of `width` elements of a large one."""

    def __init__(self, buffer: Var, width: int, lanes: list[tirx.For]) -> None:
        self.buffer, self.width, self.analyzer = buffer, width, sym.Analyzer()
        self.arrays: dict[int, Var] = {}
        self.fits = True
        for lane in lanes:
            self.analyzer.bind(lane.loop_var, ir.Range.from_min_extent(lane.min, lane.extent))

    def at(self, indices: Any) -> tuple[Var, list[ir.Expr]]:
        """Return an element's small array and its subscript there; set `fits` to False if a vector spans several."""
        (index,) = indices
        is_vector = isinstance(index, tirx.Ramp)
        first = index.base if is_vector else index
        last = first + (index.lanes - const(1, "int32")) * index.stride if is_vector else first
        width = const(self.width, str(first.ty.dtype))
        number, last_number = (self.analyzer.simplify(tirx.floordiv(end, width)) for end in (first, last))
        if not isinstance(number, tirx.IntImm) or not same(number, last_number):
            self.fits = False
            return self.buffer, list(indices)
        inside = self.analyzer.simplify(first - number * width)
        return self._array(int(number)), [tirx.Ramp(inside, index.stride, index.lanes) if is_vector else inside]

    def _array(self, number: int) -> Var:
        if number not in self.arrays:
            name, dtype = f"{self.buffer.name}_{number}", str(self.buffer.ty.dtype)
            self.arrays[number] = tirx.decl_buffer([self.width], dtype, name=name, scope="local", layout=None)
        return self.arrays[number]


def split(buffer: Var, uses: list[tirx.Stmt]) -> list[tirx.Stmt] | None:
    """Replace an array by small ones in the statements that use it; None if the part of an element is unknown."""
    body = _unrolled(seq(*uses), buffer)
    lanes = [f for f in collect(body, tirx.For) if f.kind == VECTORIZED and isinstance(f.extent, tirx.IntImm)]
    widths = {int(lane.extent) for lane in lanes if mentions(lane.body, [buffer])}
    if len(widths) != 1:
        return None
    parts = _Parts(buffer, widths.pop(), lanes)

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if not node.source.same_as(buffer):
            return mutator.default_mutate(node)
        array, indices = parts.at(node.indices)
        return tirx.BufferLoad(array, indices)

    def on_store(node: tirx.BufferStore, mutator: Any) -> tirx.Stmt:
        value = mutator.mutate(node.value)
        array, indices = (node.buffer, [mutator.mutate(i) for i in node.indices])
        if node.buffer.same_as(buffer):
            array, indices = parts.at(node.indices)
        return tirx.BufferStore(array, value, indices)

    body = structural_mutate(body, [(ir.TensorLoad, on_load), (tirx.BufferStore, on_store)])
    if not parts.fits or any(_is_large(a) for a in alloc(*parts.arrays.values())):
        return None
    return [*alloc(*parts.arrays.values()), body]


def _is_large(stmt: tirx.Stmt) -> bool:
    """Return whether a statement allocates a local array that is too large for the stack."""
    if not isinstance(stmt, tirx.AllocBuffer) or str(stmt.buffer.ty.storage_scope) != "local":
        return False
    size = bytes_of(stmt.buffer)
    return size is not None and size >= MOST_BYTES and len(stmt.buffer.ty.shape) == 1


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ReplaceAggregates")
def ReplaceAggregates(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Replace every large local array of a function by small ones where possible."""

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        out: list[tirx.Stmt] = [mutator.mutate(s) for s in node.seq]
        for stmt in [s for s in out if _is_large(s)]:
            at = next((n for n, s in enumerate(out) if s.same_as(stmt)), None)
            if at is None:  # It lies behind one that was replaced, and was copied with what follows that one.
                continue
            replaced = split(stmt.buffer, out[at + 1 :])
            out = out if replaced is None else [*out[:at], *replaced]
        return seq(*out)

    body = structural_mutate(func.body, [(tirx.SeqStmt, on_seq)])
    return with_body(func, body)


__all__ = ["MOST_BYTES", "LimitScratch", "PromoteToStack", "ReplaceAggregates", "bytes_of", "split"]
