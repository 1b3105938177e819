# SPDX-License-Identifier: Apache-2.0
"""Non-temporal stores: finished tiles are written past the caches.

before::

    for i in T.serial(m, annotations={"sparsetir.stream": 1}):
        ...  # c_local: a tile of row i
        for k in T.vectorized(64):
            c[i * feat + k_0 * 64 + k] = c_local[k]

after::

    for i in range(m):
        ...
        T.call_extern("void", "sparsetir_stream_float32x64", T.address_of(c[i * feat + k_0 * 64]), c_local[0:64])
    T.call_extern("void", "sparsetir_fence")

An ordinary store reads the line from memory before it changes it. Only arrays that the function does not read are
streamed: what another loop adds to would have to come back.
TVM has no such store: the two functions come as LLVM IR with the program and are inlined. They look at the address, as
vectors that bypass the caches must not lie across a line; the fence makes them visible to other threads.

One line is finished before the next is begun. The processor has few buffers for lines that are not whole yet, which the
threads of a core share, and what leaves them unfinished costs a read of the line after all. LLVM itself, given a wide
vector, writes the first half of each line and then every second half, which may take longer than ordinary stores do.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.ir import const
from sparsetir.lower.marks import STREAM, refused
from sparsetir.lower.nests import VECTORIZED, with_, with_body, without
from sparsetir.lower.rewriting import collect, mentions, seq, substitute
from sparsetir.walks import structural_mutate

IMPORT = "pragma_import_llvm"
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
    """Rewrites the stores of one loop; `tiles` are the vectors that were needed, `read` what is not to be streamed."""

    def __init__(self, read: set[Var]) -> None:
        self.read = read
        self.tiles: set[tuple[str, int]] = set()

    def on_for(self, node: tirx.For, mutator: Any) -> tirx.Stmt:
        """A copy of whole vectors from registers as one call."""
        if not self._is_copy(node):
            return mutator.default_mutate(node)
        lanes, store = int(node.extent), node.body
        dtype, lane = str(store.buffer.ty.dtype), node.loop_var
        self.tiles.add((dtype, lanes))
        zero = {lane: const(0, str(lane.ty.dtype))}
        to = tirx.address_of(tirx.BufferLoad(store.buffer, [substitute(i, zero) for i in store.indices]))
        *held, start = (substitute(i, zero) for i in store.value.indices)
        tile = tirx.BufferLoad(store.value.source, [*held, tirx.Ramp(start, const(1, str(start.ty.dtype)), lanes)])
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
    """Whether a subscript is the lane plus something that does not depend on it."""
    if index.same_as(lane):
        return True
    if not isinstance(index, tirx.Add):
        return False
    a, b = index.a, index.b
    return (_moves_by_one(a, lane) and not mentions(b, [lane])) or (_moves_by_one(b, lane) and not mentions(a, [lane]))


def _size(dtype: str) -> int:
    return int(DataType(dtype).bits) // 8


def function_name(dtype: str, lanes: int) -> str:
    """Of the function that streams a tile."""
    return f"sparsetir_stream_{dtype}x{lanes}"


def definitions(tiles: set[tuple[str, int]]) -> str:
    """The functions as LLVM IR."""
    return "".join([*(_definition(dtype, lanes) for dtype, lanes in sorted(tiles)), FENCE_IR])


def _definition(dtype: str, lanes: int) -> str:
    """The function of one tile."""
    widths = [width for width in WIDTHS if lanes * _size(dtype) % width == 0]
    tile = {"lanes": lanes, "kind": LLVM_NAMES[dtype], "size": _size(dtype)}
    tried = []
    for width, other in zip(widths, [*widths[1:], 0], strict=True):
        stores = "\n".join(_piece(tile, width, at) for at in range(0, lanes * _size(dtype), width))
        tried.append(TRY_IR.format(width=width, last=width - 1, other=other, stores=stores))
    return STORE_IR.format(name=function_name(dtype, lanes), first=widths[0], tried="".join(tried), **tile)


def _piece(tile: dict[str, Any], width: int, at: int) -> str:
    """The store of `width` bytes of a tile."""
    count, start = width // tile["size"], at // tile["size"]
    taken = ", ".join(f"i32 {i}" for i in range(start, start + count))
    return PIECE_IR.format(**tile, width=width, at=at, count=count, taken=taken)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.StoreNontemporal")
def StoreNontemporal(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Stream what the annotated loops of a function write and none reads."""
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


__all__ = ["StoreNontemporal", "definitions", "function_name"]
