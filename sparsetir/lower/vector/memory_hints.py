# SPDX-License-Identifier: Apache-2.0
"""Memory hints: prefetch of gathered rows, non-temporal stores."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.intrin.llvm_ir import IMPORT
from sparsetir.ir.rewriting import all_same, collect, mentions, seq, substitute
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import PREFETCH, STREAM, amount, has_annotation, refused
from sparsetir.lower.loops import VECTORIZED, each_loop, with_, with_body, without
from sparsetir.utils.machine import LINE

# Prefetch gathered rows a few steps ahead.
#
# before::
#
#     for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.prefetch": 16}):
#         for k in T.vectorized(64):
#             acc[k] = acc[k] + a[indptr[i] + j] * b[indices[indptr[i] + j], k]
#
# after::
#
#     for j in range(indptr[i + 1] - indptr[i]):
#         ...  # prefetch b[indices[T.min(indptr[i] + j + 16, nnz - 1)], 0], then columns 16, 32, 48
#         for k in T.vectorized(64):
#             ...


MOST_LINES = 16


def gathers(body: Any, step: Var) -> list[ir.TensorLoad]:
    """Return the loads whose subscript is itself loaded at a position that depends on `step`."""
    loads: list[ir.TensorLoad] = []
    for load in collect(body, ir.TensorLoad):
        inner = [x for i in load.indices for x in collect(i, ir.TensorLoad)]
        if any(mentions(x, [step]) for x in inner) and not any(
            load.source.same_as(f.source) and all_same(load.indices, f.indices) for f in loads
        ):
            loads.append(load)
    return loads


def ahead(load: ir.TensorLoad, loop: tirx.For) -> list[ir.Expr]:
    """Return the subscripts of `load` at the prefetch distance that `loop` is annotated with."""
    step = loop.loop_var
    return steps_ahead(load, step, amount(loop, PREFETCH, str(step.ty.dtype)))


def steps_ahead(load: ir.TensorLoad, step: Var, number: ir.Expr) -> list[ir.Expr]:
    """Return the subscripts of `load` a number of steps later, with all index loads clamped to their arrays."""

    def on_load(node: ir.TensorLoad, mutator: Any) -> ir.Expr:
        indices = [mutator.mutate(i) for i in node.indices]
        return tirx.BufferLoad(node.source, [_clamp(i, d) for i, d in zip(indices, node.source.ty.shape, strict=True)])

    further = {step: step + number}
    moved = [substitute(i, further) for i in load.indices]
    # Subscripts that do not move are clamped too: the body may load them under a condition that does not hold here.
    return [structural_mutate(i, [(ir.TensorLoad, on_load)]) for i in moved]


def _clamp(index: ir.Expr, extent: ir.Expr) -> ir.Expr:
    dtype = str(index.ty.dtype)
    last = tirx.max(cast(extent, dtype) - const(1, dtype), const(0, dtype))
    return tirx.max(tirx.min(index, last), const(0, dtype))


def fetch(load: ir.TensorLoad, indices: list[ir.Expr]) -> tirx.Stmt:
    """Emit a prefetch of an element's cache line into the nearest cache."""
    address = tirx.address_of(tirx.BufferLoad(load.source, indices))
    flags = [const(0), const(3), const(1)]
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *flags))


def per_line(load: ir.TensorLoad) -> int:
    """Return the number of elements of an array in a cache line."""
    return max(1, 8 * LINE // max(8, int(tvm.runtime.DataType(str(load.source.ty.dtype)).bits)))


def line_starts(load: ir.TensorLoad, width: int) -> range:
    """Return the offsets at which the cache lines of `width` neighbouring elements begin."""
    return range(0, width, per_line(load))


def prefetch(loop: tirx.For) -> tirx.Stmt:
    """Insert a prefetch of each gathered tile at the head of the body of `loop`."""
    lanes = {f.loop_var: f.extent for f in collect(loop.body, tirx.For)}
    fetches: list[tirx.Stmt] = []
    for load in gathers(loop.body, loop.loop_var) if has_annotation(loop, PREFETCH) else []:
        further = ahead(load, loop)
        used = [v for v in lanes if any(mentions(i, [v]) for i in further)]
        if len(used) > 1 or any(not isinstance(lanes[v], tirx.IntImm) for v in used):
            continue
        width = int(lanes[used[0]]) if used else 1
        for start in line_starts(load, min(width, MOST_LINES * per_line(load))):
            at = {v: const(start, str(v.ty.dtype)) for v in used}
            fetches.append(fetch(load, [substitute(i, at) for i in further]))
    if not fetches:
        return refused(loop, PREFETCH, "it gathers nothing along its steps")
    return with_(loop, body=seq(*fetches, loop.body), notes=without(loop, PREFETCH))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.InsertPrefetch")
def InsertPrefetch(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Prefetch in every annotated loop of a function."""
    return each_loop(func, inner=lambda loop: prefetch(loop) if PREFETCH in loop.annotations else None)


# Non-temporal stores: finished tiles are written past the caches.
#
# before::
#
#     for i in T.serial(m, annotations={"sparsetir.stream": 1}):
#         ...  # c_local: a tile of row i
#         for k in T.vectorized(64):
#             c[i * feat + k_0 * 64 + k] = c_local[k]
#
# after::
#
#     for i in range(m):
#         ...
#         T.call_extern("void", "sparsetir_stream_float32x64", T.address_of(c[i * feat + k_0 * 64]), c_local[0:64])
#     T.call_extern("void", "sparsetir_fence")
#
# An ordinary store reads the line from memory before it changes it. Only arrays that the function does not read are
# streamed: results that another loop adds to would have to be loaded again. TVM has no such store: the two functions
# are added to the program as LLVM IR and are inlined. They test the alignment of the address, as non-temporal vectors
# must not cross a line; the fence makes the stores visible to other threads.
#
# Each line is completed before the next one. The processor has few write-combining buffers, which the threads of a
# core share, and a line that is evicted incomplete costs a read of the line after all. LLVM itself, given
# a wide vector, writes the first half of each line and then every second half, which may take longer than ordinary
# stores do.


FENCE = "sparsetir_fence"
LLVM_NAMES = {"float32": "float", "float64": "double"}
LEAST_BYTES = 32
WIDTHS = (64, 32, 16)  # bytes of a store, the widest first: a line or a vector

FENCE_IR = f"""
define void @{FENCE}() {{
  fence seq_cst
  ret void
}}
!0 = !{{i32 1}}
"""
STORE_IR = """
define void @{name}(ptr %to, <{lanes} x {kind}> %tile) {{
  %address = ptrtoint ptr %to to i64
  br label %try_{first}
{tried}
try_0:
  store <{lanes} x {kind}> %tile, ptr %to, align {size}
  ret void
}}
"""
TRY_IR = """
try_{width}:
  %in_{width} = and i64 %address, {last}
  %is_{width} = icmp eq i64 %in_{width}, 0
  br i1 %is_{width}, label %by_{width}, label %try_{other}
by_{width}:
{stores}
  ret void
"""
PIECE_IR = """\
  %piece_{width}_{at} = shufflevector <{lanes} x {kind}> %tile, <{lanes} x {kind}> poison, <{count} x i32> <{taken}>
  %to_{width}_{at} = getelementptr i8, ptr %to, i64 {at}
  store <{count} x {kind}> %piece_{width}_{at}, ptr %to_{width}_{at}, align {width}, !nontemporal !0"""


class _Streamer:
    """Rewriter of the stores of one loop; `tiles` are the vector types used, `read` the arrays not to stream."""

    def __init__(self, read: set[Var]) -> None:
        self.read = read
        self.tiles: set[tuple[str, int]] = set()

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        """Replace a copy of whole vectors from registers by one call."""
        if not self._is_copy(node):
            return mutator.default_mutate(node)
        lanes, store = int(node.extent), node.body
        dtype, lane = str(store.buffer.ty.dtype), node.loop_var
        self.tiles.add((dtype, lanes))
        zero = {lane: const(0, str(lane.ty.dtype))}
        to = tirx.address_of(tirx.BufferLoad(store.buffer, [substitute(i, zero) for i in store.indices]))
        *leading, start = (substitute(i, zero) for i in store.value.indices)
        tile = tirx.BufferLoad(store.value.source, [*leading, tirx.Ramp(start, const(1, str(start.ty.dtype)), lanes)])
        return tirx.Evaluate(tirx.call_extern("void", function_name(dtype, lanes), to, tile))

    def _is_copy(self, node: tirx.For) -> bool:
        store = node.body
        if node.kind != VECTORIZED or not isinstance(store, tirx.BufferStore) or store.buffer in self.read:
            return False
        value, lane = store.value, node.loop_var
        if not isinstance(value, ir.TensorLoad) or str(value.source.ty.storage_scope) != "local":
            return False
        dtype = str(store.buffer.ty.dtype)
        is_whole = isinstance(node.extent, tirx.IntImm) and int(node.extent) * _size(dtype) % LEAST_BYTES == 0
        others = [*store.indices[:-1], *value.indices[:-1]]
        moves = _moves_by_one(store.indices[-1], lane) and _moves_by_one(value.indices[-1], lane)
        return dtype in LLVM_NAMES and is_whole and moves and not mentions(others, [lane])


def _moves_by_one(index: ir.Expr, lane: Any) -> bool:
    """Return whether a subscript is the lane plus a term that does not depend on it."""
    if index.same_as(lane):
        return True
    if not isinstance(index, tirx.Add):
        return False
    a, b = index.a, index.b
    return (_moves_by_one(a, lane) and not mentions(b, [lane])) or (_moves_by_one(b, lane) and not mentions(a, [lane]))


def _size(dtype: str) -> int:
    return int(DataType(dtype).bits) // 8


def function_name(dtype: str, lanes: int) -> str:
    """Return the name of the function that streams a tile."""
    return f"sparsetir_stream_{dtype}x{lanes}"


def definitions(tiles: set[tuple[str, int]]) -> str:
    """Return the definitions of the functions as LLVM IR."""
    return "".join([*(_definition(dtype, lanes) for dtype, lanes in sorted(tiles)), FENCE_IR])


def _definition(dtype: str, lanes: int) -> str:
    """Return the LLVM IR of the function that streams one tile."""
    widths = [width for width in WIDTHS if lanes * _size(dtype) % width == 0]
    tile = {"lanes": lanes, "kind": LLVM_NAMES[dtype], "size": _size(dtype)}
    tried = []
    for width, other in zip(widths, [*widths[1:], 0], strict=True):
        stores = "\n".join(_piece(tile, width, at) for at in range(0, lanes * _size(dtype), width))
        tried.append(TRY_IR.format(width=width, last=width - 1, other=other, stores=stores))
    return STORE_IR.format(name=function_name(dtype, lanes), first=widths[0], tried="".join(tried), **tile)


def _piece(tile: dict[str, Any], width: int, at: int) -> str:
    """Return the LLVM IR of a store of `width` bytes of a tile."""
    count, start = width // tile["size"], at // tile["size"]
    taken = ", ".join(f"i32 {i}" for i in range(start, start + count))
    return PIECE_IR.format(**tile, width=width, at=at, count=count, taken=taken)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.StoreNontemporal")
def StoreNontemporal(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Stream the arrays that annotated loops of a function write and no loop reads."""
    tiles: set[tuple[str, int]] = set()
    read = {load.source for load in collect(func.body, ir.TensorLoad)}

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        if STREAM not in node.annotations:
            return mutator.default_mutate(node)
        streamer = _Streamer(read)
        body = structural_mutate(node.body, [(tirx.For, streamer.on_for)])
        if not streamer.tiles:
            return refused(node, STREAM, "it copies no whole vectors to an array that nothing reads")
        tiles.update(streamer.tiles)
        loop = with_(node, body=body, notes=without(node, STREAM))
        return seq(loop, tirx.Evaluate(tirx.call_extern("void", FENCE)))

    body = structural_mutate(func.body, [(tirx.For, on_for)])
    if tiles:
        body = tirx.AttrStmt(const(0), IMPORT, ir.StringImm(definitions(tiles)), body)
    return with_body(func, body)


__all__ = [
    "InsertPrefetch",
    "StoreNontemporal",
    "ahead",
    "definitions",
    "fetch",
    "function_name",
    "gathers",
    "line_starts",
    "prefetch",
    "steps_ahead",
]
