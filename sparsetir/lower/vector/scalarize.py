# SPDX-License-Identifier: Apache-2.0
"""Scalarisation of loops and gathers that do not profit from vectors."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import alloc, collect, is_along, mentions, renewed, same, seq, substitute
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.loops import SERIAL, VECTORIZED, each_loop, unrolled, with_, with_body

# Scalarised gathers: indices are loaded a word at a time, the gathered elements one by one.
#
# before::
#
#     for j in T.vectorized(8):
#         acc[j] = acc[j] + a[p + j] * x[indices[p + j]]
#
# after::
#
#     for w in T.unroll(4):
#         got[w * 2] = x[T.Cast("int32", word)]  # word is T.reinterpret("int64", indices[p + w * 2 : p + w * 2 + 2])
#         got[w * 2 + 1] = x[T.Cast("int32", word >> 32)]
#     for j in T.vectorized(8):
#         acc[j] = acc[j] + a[p + j] * got[j]
#
# A gather is one load for each lane, of which a core executes two or three per cycle. LLVM would load the indices as a
# vector too, and extract them one by one. Half a load for each index (a quarter for 16 bits) and a shift cost less
# than an extraction. The first index of a word is in its lowest bits. Instructions that gather whole vectors are no
# faster (`sparsetir.codegen.target.native_target` disables them where they are slower).


WORD = 64  # bits of the general-purpose registers in which subscripts are computed


def index_of(load: ir.TensorLoad, lane: Var) -> ir.TensorLoad | None:
    """Return the element of an index array, read along the lanes, by which a load is gathered; None if no gather."""
    inner = [x for i in load.indices for x in collect(i, ir.TensorLoad) if mentions(x, [lane])]
    if not inner or not all(same(x, inner[0]) for x in inner):
        return None
    return inner[0] if is_along(inner[0], lane) else None


def gather(loop: tirx.For) -> tirx.Stmt | None:
    """Move the gathers of a vector loop in front of it; None if it has none."""
    store = loop.body
    if loop.kind != VECTORIZED or not isinstance(loop.extent, tirx.IntImm) or not isinstance(store, tirx.BufferStore):
        return None
    if any(dialect.is_if_then_else(call) for call in collect(store.value, ir.Call)):
        return None  # A guarded load may be out of bounds where the guard does not hold.
    lane, lanes = loop.loop_var, int(loop.extent)
    named = [x.var for x in collect(store.value, tirx.Let)]  # values that are not available in front of the loop
    parts: list[tirx.Stmt] = []
    held: list[Var] = []

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        index = index_of(load, lane)
        each = per_word(index, lanes) if index is not None else 0
        if index is None or not each or mentions(load, named):
            return mutator.default_mutate(load)
        got = tirx.decl_buffer([lanes], str(load.ty.dtype), name="got", scope="local", layout=None)
        held.append(got)
        parts.append(taken(load, index, got, loop, each))
        return tirx.BufferLoad(got, [lane])

    value = structural_mutate(store.value, [(ir.TensorLoad, on_load)])
    if not parts:
        return None
    rest = with_(loop, body=tirx.BufferStore(store.buffer, value, store.indices), notes={})
    return seq(*alloc(*held), *parts, renewed(rest))


def per_word(index: ir.TensorLoad, lanes: int) -> int:
    """Return the number of indices in a word; 0 if the lanes do not fill whole words or are not integers."""
    name = str(index.ty.dtype)
    each = min(WORD // tvm.DataType(name).bits, lanes)
    return each if lanes % each == 0 and name.startswith(("int", "uint")) else 0


def taken(load: ir.TensorLoad, index: ir.TensorLoad, got: Var, loop: tirx.For, each: int) -> tirx.Stmt:
    """Emit the loop that fills `got` with the gathered elements, word by word."""
    lane, dtype = loop.loop_var, str(loop.loop_var.ty.dtype)
    word = Var("w", lane.ty)
    first = word * const(each, dtype)
    parts = split_word(index, lane, first, each)
    stores = []
    for n, part in enumerate(parts):
        at = first + const(n, dtype)
        element = substitute(with_index(load, index, part), {lane: at})
        stores.append(tirx.BufferStore(got, element, [at]))
    return renewed(unrolled(word, int(loop.extent) // each, seq(*stores)))


def with_index(load: ir.TensorLoad, index: ir.TensorLoad, value: ir.Expr) -> ir.Expr:
    """Replace the index of a gathered load by a value."""
    on_load = lambda x, m: value if same(x, index) else m.default_mutate(x)  # noqa: E731
    return tirx.BufferLoad(load.source, [structural_mutate(i, [(ir.TensorLoad, on_load)]) for i in load.indices])


def split_word(index: ir.TensorLoad, lane: Var, first: ir.Expr, each: int) -> list[ir.Expr]:
    """Extract the indices of `each` lanes from `first` on out of one load."""
    *others, last = index.indices
    start, dtype = substitute(last, {lane: first}), tvm.DataType(str(index.ty.dtype))
    if each == 1:
        return [tirx.BufferLoad(index.source, [*others, start])]
    vector = tirx.BufferLoad(index.source, [*others, tirx.Ramp(start, const(1, str(start.ty.dtype)), each)])
    wide = f"int{each * dtype.bits}"
    word = tirx.reinterpret(wide, vector)
    shifted = [tirx.shift_right(word, const(n * dtype.bits, wide)) if n else word for n in range(each)]
    return [cast(part, str(dtype)) for part in shifted]


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ScalarizeGathers")
def ScalarizeGathers(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every gather of a function's vector loops."""
    return each_loop(func, outer=gather)


# Scalarisation: a vector loop whose lanes differ in control flow or local arrays becomes a serial loop.
#
# before::
#
#     for i in T.vectorized(8):
#         acc = T.alloc_local((1,))
#         for j in range(indptr[i + 1] - indptr[i]):
#             ...
#
# after::
#
#     for i in range(8):
#         ...
#
# TVM shares one array between all lanes, and merges two nested vector loops into one: the results would be wrong. It
# also cannot store one bfloat16 number in all lanes; LLVM vectorizes such a loop itself.


def _differ(lanes: tirx.For) -> bool:
    """Return whether lanes need separate arrays, searches or trip counts."""
    inner = collect(lanes.body, tirx.For)
    if collect(lanes.body, tirx.AllocBuffer) or collect(lanes.body, tirx.While):
        return True
    if any(_is_one_bfloat16(s.value, lanes.loop_var) for s in collect(lanes.body, tirx.BufferStore)):
        return True
    return any(loop.kind != SERIAL or mentions(loop.extent, [lanes.loop_var]) for loop in inner)


def _is_one_bfloat16(value: ir.Expr, lane: Var) -> bool:
    """Return whether all lanes store the same bfloat16 number."""
    return str(value.ty.dtype) == "bfloat16" and not mentions(value, [lane])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.ScalarizeLoops")
def ScalarizeLoops(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Turn vector loops whose lanes differ into serial loops."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.For:
        inner = mutator.default_mutate(node)
        if node.kind != VECTORIZED or not _differ(node):
            return inner
        return with_(inner, kind=SERIAL)

    body = structural_mutate(func.body, [(tirx.For, on_for)])
    return with_body(func, body)
