# SPDX-License-Identifier: Apache-2.0
"""Vectorization along contiguous positions, and scalarisation of loops and gathers that do not profit from vectors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, sym, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.interop.arrays import HALVES
from sparsetir.intrin.llvm_ir import IMPORT, gather_function
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import (
    all_same,
    alloc,
    cell,
    collect,
    conjunction,
    conjuncts,
    factors,
    get,
    inside,
    is_along,
    mentions,
    moves_by_one,
    product,
    put,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.ir.views import cast, const
from sparsetir.ir.visitor import structural_mutate
from sparsetir.lower.annotations import ALONG, DOT, GATHERS, MAP, PREFETCH, has_annotation, refused
from sparsetir.lower.iterations.normalize import opposite
from sparsetir.lower.loops import (
    COMBINERS,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Update,
    each_loop,
    join_neighbours,
    presence,
    serial,
    unrolled,
    vectorized,
    with_,
    with_body,
    without,
)
from sparsetir.lower.target.half_floats import widened
from sparsetir.lower.vector import row_products
from sparsetir.lower.vector.memory_hints import ahead, fetch, gathers, line_starts
from sparsetir.lower.vector.vector_math import expand

# Vectorize elementwise functions along contiguous positions.
#
# before::
#
#     for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.map": 8}):
#         s[indptr[i] + j] = T.exp(s[indptr[i] + j] - top[i])
#
# after::
#
#     for j_0 in range((indptr[i + 1] - indptr[i]) // 8):
#         for j_1 in T.vectorized(8):
#             s[indptr[i] + j_0 * 8 + j_1] = ...  # the exponential as arithmetic
#     if (indptr[i + 1] - indptr[i]) % 8 // 4 == 1:
#         ...  # four at once, then two, then one
#
# Rows are often shorter than a vector or two: the remainder takes at most three steps, not seven. All steps use the
# same arithmetic, so an element's result does not depend on its position.


def vectorize_map(loop: tirx.For) -> tirx.Stmt:
    """Vectorize an annotated loop over one store; the sketch that annotates it checks that steps are independent."""
    j, lanes = loop.loop_var, int(loop.annotations[MAP])
    dtype = str(j.ty.dtype)
    body = tirx.BufferStore(loop.body.buffer, expand(loop.body.value), loop.body.indices)
    number = lambda n: const(n, dtype)  # noqa: E731

    def vector(begin: ir.Expr, width: int) -> tirx.Stmt:
        lane = Var(f"{j.name}_1", j.ty)
        if width == 1:
            return renewed(substitute(body, {j: begin}))
        return vectorized(lane, width, renewed(substitute(body, {j: begin + lane})))

    block = Var(f"{j.name}_0", j.ty)
    full = tirx.floordiv(loop.extent, number(lanes))
    stmts: list[tirx.Stmt] = [serial(block, full, vector(block * number(lanes), lanes))]
    while lanes > 1:
        begin, lanes = tirx.floordiv(loop.extent, number(lanes)) * number(lanes), lanes // 2
        is_left = tirx.floormod(loop.extent, number(lanes * 2)) >= number(lanes)
        stmts.append(tirx.IfThenElse(is_left, vector(begin, lanes), None))
        # The next, narrower vector begins at the largest multiple of this width in the extent.
    return seq(*stmts)


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VectorizeMaps")
def VectorizeMaps(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Vectorize every annotated loop of a function that is still one store; refuse other annotations."""

    def change(loop: tirx.For) -> tirx.Stmt:
        is_map = MAP in loop.annotations and loop.kind == SERIAL and isinstance(loop.body, tirx.BufferStore)
        return vectorize_map(loop) if is_map else refused(loop, MAP, "it does not set one element a step")

    return each_loop(func, inner=change)


# Masked (predicated) vectorisation: padded rows are summed in the lanes of a vector, the guard of each lane is a mask.
#
# before::
#
#     for w in range(slice_ptr[s + 1] - slice_ptr[s]):
#         for r in range(8):
#             if 0 <= indices[...] and indices[...] < n:
#                 acc[r] = acc[r] + a[(slice_ptr[s] + w) * 8 + r] * x[indices[(slice_ptr[s] + w) * 8 + r]]
#
# after::
#
#     for w in range(slice_ptr[s + 1] - slice_ptr[s]):
#         if ...:  # 0 <= indices[...] and indices[...] < n in every lane
#             for r in T.vectorized(8):
#                 acc[r] = acc[r] + a[...] * x[indices[(slice_ptr[s] + w) * 8 + r]]
#         elif 0 < n:
#             for r in T.vectorized(8):
#                 term[r] = a[...] * x[T.max(T.min(indices[...], n - 1), 0)]
#             for r in T.vectorized(8):
#                 acc[r] = acc[r] + T.Select(0 <= indices[...] and indices[...] < n, term[r], 0)
#
# A loop that stores one guarded element a lane, such as ``if rows[...] < m: y[rows[...]] = acc[r]``, runs without its
# guards where they hold in every lane.
#
# Adding zero has no effect, and a masked lane may have any value. Gathered subscripts are clamped to their array.
# Other arrays are read at the slots that the loops iterate, all of which are stored: conditions on which slots
# exist remain branches. The term is a separate statement: TVM assumes the mask inside the value that it selects,
# and would simplify the subscripts.


FEWEST, MOST = 4, 64
KINDS = (SERIAL, UNROLLED)
# Operators that accept a scalar and a vector, unlike the nodes' own constructors.
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
}


def _is_of_slot(condition: ir.Expr, lane: Var) -> bool:
    """Return whether a condition tests the contents of a slot; others test which slots exist and cannot be masks."""
    on_load = lambda x, _m: const(0, str(x.ty.dtype))  # noqa: E731
    return not mentions(structural_mutate(condition, [(ir.TensorLoad, on_load)]), [lane])


class _Clamp:
    """Rewriter that clamps the gathered subscripts of a term to their arrays, whose `sizes` must be positive."""

    def __init__(self, lane: Var) -> None:
        self.lane = lane
        self.sizes: list[ir.Expr] = []
        self.is_known = True

    def on_load(self, load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        """Clamp the gathered subscripts of one load of the term."""
        gathered = [i for i in load.indices if mentions(collect(i, ir.TensorLoad), [self.lane])]
        if not gathered:
            if mentions(list(load.indices), [self.lane]) and not moves_by_one(load.indices[-1], self.lane):
                self.is_known = False
            return load
        indices = []
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            if not any(index.same_as(g) for g in gathered):
                indices.append(index)
                continue
            if any(self._gathers(x) for x in collect(index, ir.TensorLoad)):
                self.is_known = False
            size = cast(extent, str(index.ty.dtype))
            indices.append(inside(index, size))
            if not any(same(size, s) for s in self.sizes):
                self.sizes.append(size)
        return tirx.BufferLoad(load.source, indices)

    def _gathers(self, load: ir.TensorLoad) -> bool:
        """Return whether an index is itself loaded through another index that depends on the lane."""
        inner = [x for i in load.indices for x in collect(i, ir.TensorLoad)]
        return any(mentions(x, [self.lane]) for x in inner)


def _guarded(loop: tirx.For) -> tuple[tirx.BufferStore, list[ir.Expr], list[ir.Expr]] | None:
    """Match a loop over lanes with one guarded store: the store, the conditions that depend on the lane, the others.

    Return None for other loops.
    """
    branch = loop.body
    if loop.kind not in KINDS or not isinstance(loop.extent, tirx.IntImm) or not isinstance(branch, tirx.IfThenElse):
        return None
    lanes, store = int(loop.extent), branch.then_case
    if not FEWEST <= lanes <= MOST or lanes & (lanes - 1) or branch.else_case is not None:
        return None
    if not isinstance(store, tirx.BufferStore) or mentions(branch.condition, [store.buffer]):
        return None
    conditions = conjuncts(branch.condition)
    masks = [c for c in conditions if mentions(c, [loop.loop_var])]
    if not masks or not all(_is_of_slot(c, loop.loop_var) for c in masks):
        return None
    return store, masks, [c for c in conditions if not mentions(c, [loop.loop_var])]


def mask(loop: tirx.For) -> tirx.Stmt | None:
    """Rewrite a guarded sum over lanes to a masked vector loop; None for other loops."""
    guard = _guarded(loop)
    if guard is None or str(guard[0].buffer.ty.storage_scope) != "local":
        return None
    store, masks, kept = guard
    lane, lanes, update, indices = loop.loop_var, int(loop.extent), Update.of(store), list(store.indices)
    if update is None or not update.is_alone or len(indices) != 1 or not moves_by_one(indices[0], lane):
        return None
    clamp = _Clamp(lane)
    term = structural_mutate(update.term, [(ir.TensorLoad, clamp.on_load)])
    if not clamp.is_known or any(clamp._gathers(x) for c in masks for x in collect(c, ir.TensorLoad)):
        return None
    dtype = update.dtype
    term_buffer = tirx.decl_buffer([lanes], dtype, name="term", scope="local", layout=None)
    chosen = tirx.Select(conjunction(masks), tirx.BufferLoad(term_buffer, [lane]), const(0, dtype))
    steps = [tirx.BufferStore(term_buffer, term, [lane]), tirx.BufferStore(store.buffer, update.own + chosen, indices)]
    vectors = [renewed(with_(loop, kind=VECTORIZED, body=step, notes={})) for step in steps]
    body = seq(*alloc(term_buffer), *vectors)
    exist = [size > const(0, str(size.ty.dtype)) for size in clamp.sizes]
    if exist:
        body = tirx.IfThenElse(conjunction(exist), body, None)
    # A load that is guarded inside the term may be out of bounds where its guard does not hold.
    is_plain = not any(dialect.is_if_then_else(c) for c in collect(update.term, ir.Call))
    every = in_every_lane(masks, lane, lanes) if is_plain else None
    if every is not None:
        body = tirx.IfThenElse(every, _whole(loop, store), body)
    return tirx.IfThenElse(conjunction(kept), body, None) if kept else body


def _whole(loop: tirx.For, store: tirx.BufferStore) -> tirx.Stmt:
    """Return the vector loop for a step in which the guards hold in all lanes."""
    lane = loop.loop_var

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if not mentions(collect(list(load.indices), ir.TensorLoad), [lane]):
            return mutator.default_mutate(load)
        return tirx.BufferLoad(load.source, _reloaded(load.indices, load.source, lane))

    value = structural_mutate(store.value, [(ir.TensorLoad, on_load)])
    moved = tirx.BufferStore(store.buffer, value, store.indices)
    return renewed(with_(loop, kind=VECTORIZED, body=moved, notes={}))


def _reloaded(indices: Sequence[ir.Expr], array: Var, lane: Var) -> list[ir.Expr]:
    """Return subscripts of an array whose index loads LLVM cannot merge with the vector that was tested.

    It would extract the elements of that vector one by one, which takes twice as long as loading them again. The sign
    bit of a size, always zero but unknown to LLVM, is added to the positions of these loads.
    """
    # The size is not cast: TVM narrows a size that was cast to 64 bits, but not the shift by 63 bits.
    size = next(iter(collect(array.ty.shape[-1], Var)), array.ty.shape[-1])
    sign = tirx.shift_right(size, const(tvm.DataType(str(size.ty.dtype)).bits - 1, str(size.ty.dtype)))

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        if not mentions(list(load.indices), [lane]):
            return mutator.default_mutate(load)
        *others, last = load.indices
        return tirx.BufferLoad(load.source, [*others, last + cast(sign, str(last.ty.dtype))])

    return [structural_mutate(i, [(ir.TensorLoad, on_load)]) for i in indices]


def unguarded(loop: tirx.For) -> tirx.Stmt | None:
    """Version a loop that stores one guarded element a lane: unguarded where all guards hold; None for other loops."""
    guarded = _guarded(loop)
    if guarded is None:
        return None
    store, masks, kept = guarded
    lane, lanes = loop.loop_var, int(loop.extent)
    every = in_every_lane(masks, lane, lanes)
    if every is None:
        return None
    moved = tirx.BufferStore(store.buffer, store.value, _reloaded(store.indices, store.buffer, lane))
    whole = with_(loop, kind=UNROLLED, body=moved, notes={})
    return tirx.IfThenElse(conjunction([*kept, every]), renewed(whole), loop)


def in_every_lane(conditions: list[ir.Expr], lane: Var, lanes: int) -> ir.Expr | None:
    """Return an expression for whether conditions hold in every lane; None if one cannot be vectorized.

    Conditions on different arrays are tested separately: a test that only depends on the row can be hoisted.
    """
    parts: list[list[ir.Expr]] = []
    for condition in conditions:
        tested = collect(condition, ir.TensorLoad)
        like = next((part for part in parts if all_same(collect(part[0], ir.TensorLoad), tested)), None)
        if like is None:
            parts.append([condition])
        else:
            like.append(condition)
    try:
        vectors = [conjunction([_vector(c, lane, lanes) for c in _between(part)]) for part in parts]
    except TypeError:
        return None
    return conjunction([tirx.call_llvm_pure_intrin("bool", "llvm.vector.reduce.and", v) for v in vectors])


def _between(conditions: list[ir.Expr]) -> list[ir.Expr]:
    """Merge ``x >= 0 and x < n`` into one unsigned comparison, as a size is not negative."""
    kinds = [type(c) for c in conditions]
    if kinds != [tirx.GE, tirx.LT] or not same(conditions[0].a, conditions[1].a):
        return conditions
    zero, x, size = conditions[0].b, conditions[1].a, conditions[1].b
    dtype = str(x.ty.dtype)
    if not isinstance(zero, tirx.IntImm) or int(zero) != 0 or not dtype.startswith("int"):
        return conditions
    return [tirx.LT(tirx.Cast(f"u{dtype}", x), tirx.Cast(f"u{dtype}", size))]


def _vector(x: Any, lane: Var, lanes: int) -> ir.Expr:
    """Vectorize an expression over all lanes; raise `TypeError` for operators that are not in `OPERATORS`."""
    if not mentions(x, [lane]):
        return x
    if isinstance(x, Var):
        return tirx.Ramp(const(0, str(lane.ty.dtype)), const(1, str(lane.ty.dtype)), lanes)
    if isinstance(x, ir.TensorLoad) and is_along(x, lane):
        start = substitute(x.indices[-1], {lane: const(0, str(lane.ty.dtype))})
        return tirx.BufferLoad(x.source, [*x.indices[:-1], tirx.Ramp(start, const(1, str(start.ty.dtype)), lanes)])
    if isinstance(x, tirx.Cast):
        return tirx.Cast(f"{x.ty.dtype}x{lanes}", _vector(x.value, lane, lanes))
    if type(x) not in OPERATORS:
        raise TypeError
    return OPERATORS[type(x)](_vector(x.a, lane, lanes), _vector(x.b, lane, lanes))


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VectorizeMasked")
def VectorizeMasked(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Vectorize every guarded loop over padded lanes of a function."""
    return each_loop(func, outer=lambda loop: mask(loop) or unguarded(loop))


# Reduce along contiguous rows in vectors, for several results at once.
#
# before::
#
#     for j in range(indptr[i + 1] - indptr[i]):
#         o[indptr[i] + j] = 0
#         for k in T.serial(feat, annotations={"sparsetir.dot": 16}):
#             o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]
#
# after::
#
#     for j_0 in range((indptr[i + 1] - indptr[i]) // 4):
#         for k_0 in range(feat // 16):
#             for j_1 in T.unroll(4):
#                 for k_1 in T.vectorized(16):
#                     acc[j_1 * 16 + k_1] = acc[j_1 * 16 + k_1] + x[i, k_0 * 16 + k_1] * y[indices[...], k_0 * 16 + k_1]
#         for j_1 in T.unroll(4):
#             ...  # acc[j_1 * 16 : j_1 * 16 + 16] += the last 16 products, of which those already added are masked
#             ...  # total = the sum of acc[j_1 * 16 : j_1 * 16 + 16]
#             o[indptr[i] + j_0 * 4 + j_1] = 0 + s[indptr[i] + j_0 * 4 + j_1] * total
#     for j in range((indptr[i + 1] - indptr[i]) % 4):
#         ...  # the same for one
#
# A row of ``x`` is loaded once for four results, and four independent sums hide the latency of an addition. Invariant
# factors are moved out of a sum; where the product is not finite (an infinite factor of an empty sum, a sum that
# overflows), the sum is computed again with the factors inside. 16-bit floats are summed in float32, and rounded once.
# The annotation is for sums that may be reordered, and for maxima and minima, whose lanes all begin with the element's
# old value::
#
#     for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.dot": 8}):
#         top[i] = T.max(top[i], s[indptr[i] + j])


GROUP = 4  # results at once
VECTORS = 2  # vectors of each sum: with four sums they hide the latency of the multiply-add units
REGISTER_BITS = 128  # width within which shuffles are cheapest


@dataclass(frozen=True)
class DotSum:
    """``target[indices] = start + factor * sum(term)`` over `loop`; `is_whole` if it does not need the old value.

    `combine` is the reduction operator; only sums have factors.
    """

    loop: tirx.For
    store: tirx.BufferStore
    start: ir.Expr
    is_whole: bool
    factors: list[ir.Expr]
    term: ir.Expr
    lanes: int
    combine: type = tirx.Add

    @property
    def rows(self) -> row_products.RowProducts | None:
        """The products of rows that instructions add; None where the loop has no annotation for them."""
        if not has_annotation(self.loop, ALONG) or self.combine is not tirx.Add:
            return None
        return row_products.match(self.term, self.loop.loop_var, str(self.store.buffer.ty.dtype))

    @property
    def step(self) -> int:
        """Elements of a row that are added at once."""
        return self.lanes if self.rows is None else self.rows.terms

    @property
    def neutral(self) -> ir.Expr:
        """The initial value of an accumulator; it may be combined into the result several times."""
        return const(0, str(self.store.buffer.ty.dtype)) if self.combine is tirx.Add else self.start


def match(loop: tirx.For, before: tirx.Stmt | None, note: str = DOT) -> DotSum | None:
    """Match a reduction loop annotated with `note`; a store `before` it to the same element is its initial value."""
    update, own = Update.of(loop.body, COMBINERS), [loop.loop_var]
    if note not in loop.annotations or loop.kind != SERIAL or update is None or not update.is_alone:
        return None
    store = update.store
    if mentions(store.indices, own):
        return None
    terms = factors(update.term) if update.op is tirx.Add else [update.term]
    moving = [f for f in terms if mentions(f, own)]
    fixed = [f for f in terms if not mentions(f, own)]
    if not moving:
        return None
    start: ir.Expr = tirx.BufferLoad(store.buffer, store.indices)
    is_whole = False
    if isinstance(before, tirx.BufferStore) and same(tirx.BufferLoad(before.buffer, before.indices), start):
        start, is_whole = before.value, True
    return DotSum(loop, store, start, is_whole, fixed, product(moving), int(loop.annotations[note]), update.op)


def _emit(
    dot: DotSum, outer: Var | None, base: ir.Expr | None, group: int, fetches: Sequence[tirx.Stmt] = ()
) -> tirx.Stmt:
    """Emit the sums of `group` steps of the loop over `outer` from `base` on; one sum if `outer` is None.

    `fetches` are placed at the head of every block of lanes, in terms of the loops' variables.
    """
    k, dtype = dot.loop.loop_var, str(dot.loop.loop_var.ty.dtype)
    lanes, stored = dot.lanes, str(dot.store.buffer.ty.dtype)
    kind = "float32" if stored in HALVES else stored
    acc = tirx.decl_buffer([group * lanes], kind, name="acc", scope="local", layout=None)
    whole = tirx.decl_buffer([group], kind, name="total", scope="local", layout=None)
    member, block, lane = (Var(n, k.ty) for n in ("g", "k_0", "k_1"))
    of_member = {} if outer is None or base is None else {outer: base + member.astype(str(outer.ty.dtype))}
    element = lambda at: [member * const(lanes, dtype) + at]  # noqa: E731
    inside = [substitute(widened(f), of_member) for f in dot.factors]
    width = const(lanes, dtype)

    def each(body: tirx.Stmt) -> tirx.Stmt:
        fresh = Var("g", member.ty)
        return unrolled(fresh, group, renewed(substitute(body, {member: fresh})))

    def add(at: list[ir.Expr], term: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(acc, dot.combine(tirx.BufferLoad(acc, at), term), at)

    def term(at: ir.Expr) -> ir.Expr:
        return substitute(widened(dot.term), {k: at, **of_member})

    neutral = substitute(widened(dot.neutral), of_member)
    clear = vectorized(lane, lanes, tirx.BufferStore(acc, neutral, element(lane)))
    inner = vectorized(lane, lanes, add(element(lane), term(block * width + lane)))
    full = tirx.floordiv(dot.loop.extent, width)

    def first(count: int) -> tirx.Stmt:
        return vectorized(lane, count, add(element(lane), term(const(0, dtype) + lane)))

    def final(count: int, counted: ir.Expr) -> tirx.Stmt:
        """Add the last `counted` of the last `count` terms; TVM would simplify a term inside the choice by its mask."""
        terms = tirx.decl_buffer([count], kind, name="term", scope="local", layout=None)
        conditions, value = presence(term(dot.loop.extent - const(count, dtype) + lane), dot.combine, [lane])
        load = tirx.BufferStore(terms, value, [lane])
        chosen = tirx.Select(lane >= const(count, dtype) - counted, tirx.BufferLoad(terms, [lane]), neutral)
        vectors = (vectorized(lane, count, body) for body in (load, add(element(lane), chosen)))
        added = seq(*alloc(terms), *map(renewed, vectors))
        return tirx.IfThenElse(conjunction(conditions), added, None) if conditions else added

    single = each(add(element(const(0, dtype)), term(const(0, dtype))))
    tail = _remainder(dot.loop.extent, lanes, lambda *part: each(final(*part)), lambda n: each(first(n)), single)
    again = Var(f"{k.name}_again", k.ty)

    def unfactored(result: Var) -> tirx.Stmt:
        return serial(again, dot.loop.extent, put(result, get(result) + product([*inside, term(again)])))

    checks, total = (
        scaled(inside, whole, member, group, unfactored) if inside else ([], tirx.BufferLoad(whole, [member]))
    )
    indices = [substitute(i, of_member) for i in dot.store.indices]
    if dot.combine is tirx.Add:
        total = substitute(widened(dot.start), of_member) + total
    finish = tirx.BufferStore(dot.store.buffer, tirx.Cast(stored, total) if stored in HALVES else total, indices)
    ahead = [each(substitute(f, {k: block * width, **of_member})) for f in fetches]
    sums, rows = seq(serial(block, full, seq(*ahead, each(inner))), tail), dot.rows
    if rows is not None:
        places = [{v: substitute(x, {member: const(g, dtype)}) for v, x in of_member.items()} for g in range(group)]
        sums = rows.sums(acc, places, list(of_member), dot.loop.extent, fetches)
    joined = totals(acc, whole, group, lanes, dot.combine)
    return seq(*alloc(acc, whole), each(clear), sums, joined, *checks, each(finish))


def _remainder(
    extent: ir.Expr,
    lanes: int,
    final: Callable[[int, ir.Expr], tirx.Stmt],
    first: Callable[[int], tirx.Stmt],
    single: tirx.Stmt,
) -> tirx.Stmt:
    """Emit the terms after the last full block: a vector that ends at the last term, without those already added.

    Rows shorter than a block add their first terms in the widest vector that fits, and the others likewise.
    """
    number = lambda n: const(n, str(extent.ty.dtype))  # noqa: E731
    stmt, width = single, 2
    while width < lanes:
        both = seq(first(width), final(width, extent - number(width)))
        stmt = tirx.IfThenElse(extent >= number(width), both, stmt)
        width *= 2
    left, half = tirx.floormod(extent, number(lanes)), max(lanes // 2, 1)
    wide = tirx.IfThenElse(left <= number(half), final(half, left), final(lanes, left))
    stmt = tirx.IfThenElse(extent >= number(lanes), wide, stmt)
    return tirx.IfThenElse(left > number(0), stmt, None)


def scaled(
    fixed: Sequence[ir.Expr], total: Var, member: Var, group: int, unfactored: Callable[[Var], tirx.Stmt]
) -> tuple[list[tirx.Stmt], ir.Expr]:
    """Multiply sums by the factors that were moved out of them.

    Return statements and the product for `member`. Where a product is not a finite float, the statements compute the
    sum again with the factors inside: the distributive law does not hold for infinite factors and overflowing sums.

    args: the factors in terms of `member`, `group` sums, and the loop that adds all unfactored terms to a cell.
    """
    kind = str(total.ty.dtype)
    value: ir.Expr = tirx.BufferLoad(total, [member])
    if not fixed:
        return [], value
    value = product([*fixed, value])
    if not kind.startswith("float"):
        return [], value
    exact = tirx.decl_buffer([group], kind, name="exact", scope="local", layout=None)
    largest = tirx.max_value(kind)
    is_finite = lambda x: tirx.abs(x) <= largest  # noqa: E731
    every = conjunction([is_finite(substitute(value, {member: const(g, str(member.ty.dtype))})) for g in range(group)])
    one, result = Var("g", member.ty), cell("sum", kind)
    sums = substitute(unfactored(result), {member: one})
    again = seq(*alloc(result), put(result, const(0, kind)), sums, tirx.BufferStore(exact, get(result), [one]))
    repair = tirx.IfThenElse(opposite(every), serial(one, const(group, str(one.ty.dtype)), renewed(again)), None)
    return [*alloc(exact), repair], tirx.Select(is_finite(value), value, tirx.BufferLoad(exact, [member]))


def totals(acc: Var, total: Var, group: int, lanes: int, combine: Any = tirx.Add) -> tirx.Stmt:
    """Reduce each of `group` neighbouring vectors of `acc` to an element of `total`.

    The vectors are reduced pairwise: half of a shuffle's lanes are of one vector, half of another. For four vectors of
    four lanes each: ``a0+a2 b0+b2 a1+a3 b1+b3`` and the same of c and d, then ``a b c d``.
    """
    kind = str(acc.ty.dtype)
    if group == 1 or lanes < VECTORS * group:
        alone = [reduced(acc, const(g * lanes), lanes, combine) for g in range(group)]
        return seq(*(tirx.BufferStore(total, value, [const(g)]) for g, value in enumerate(alone)))
    names: list[tuple[Var, ir.Expr]] = []

    def named(value: ir.Expr, width: int) -> Var:
        names.append((Var("lanes", ir.PrimType(f"{kind}x{width}")), value))
        return names[-1][0]

    def halved(whole: Var, width: int) -> Var:
        halves = (range(width // 2), range(width // 2, width))
        return named(combine(*(tirx.Shuffle([whole], [const(n) for n in half]) for half in halves)), width // 2)

    loads = (tirx.BufferLoad(acc, [tirx.Ramp(const(g * lanes), const(1), lanes)]) for g in range(group))
    vectors = [halved(named(load, lanes), lanes) for load in loads]
    width, unit, least = lanes // VECTORS, 1, REGISTER_BITS // int(DataType(kind).bits)
    while len(vectors) > 1:
        low, high = interleaved(width, unit, max(least, 2 * unit))
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [named(combine(tirx.Shuffle(p, low), tirx.Shuffle(p, high)), width) for p in map(list, pairs)]
        unit *= 2
    while width > group:
        vectors, width = [halved(vectors[0], width)], width // 2
    value: ir.Expr = vectors[0]
    for name, meaning in reversed(names):
        value = tirx.Let(name, meaning, value)
    return tirx.BufferStore(total, value, [tirx.Ramp(const(0), const(1), group)])


def interleaved(width: int, unit: int, piece: int) -> tuple[list[ir.Expr], list[ir.Expr]]:
    """Return shuffle lanes for the lower and upper halves of each `piece` lanes of two vectors, in turns of `unit`."""
    halves: list[list[ir.Expr]] = [[], []]
    for half, lanes in enumerate(halves):
        for begin in range(0, width, piece):
            for first in range(begin + half * piece // 2, begin + (half + 1) * piece // 2, unit):
                lanes += [const(n + side) for side in (0, width) for n in range(first, first + unit)]
    return halves[0], halves[1]


def reduced(acc: Var, begin: ir.Expr, lanes: int, combine: Any = tirx.Add) -> ir.Expr:
    """Reduce lanes of a local array to one value by halving; one by one they would be moved out of the registers."""
    dtype, kind = str(begin.ty.dtype), str(acc.ty.dtype)
    value: ir.Expr = tirx.BufferLoad(acc, [tirx.Ramp(begin, const(1, dtype), lanes)])
    names = []
    while lanes > 1:
        whole = Var("lanes", ir.PrimType(f"{kind}x{lanes}"))
        names.append((whole, value))
        lanes //= 2
        halves = (range(lanes), range(lanes, 2 * lanes))
        value = combine(*(tirx.Shuffle([whole], [const(n) for n in half]) for half in halves))
    for name, meaning in reversed(names):
        value = tirx.Let(name, meaning, value)
    return value


def _parts(body: tirx.Stmt) -> tuple[tirx.Stmt | None, tirx.Stmt]:
    """Split `body` into a store and the loop after it; into None and `body` if it is not a pair."""
    if isinstance(body, tirx.SeqStmt) and len(body.seq) == 2:
        return body.seq[0], body.seq[1]
    return None, body


def around(outer: tirx.For) -> DotSum | None:
    """Match a loop whose body is an annotated sum, a different element in each step; None for other loops."""
    before, inner = _parts(outer.body)
    if outer.kind != SERIAL or not isinstance(inner, tirx.For):
        return None
    dot = match(inner, before)
    if dot is None or (before is not None and not dot.is_whole):
        return None
    if mentions(inner.extent, [outer.loop_var]) or not mentions(dot.store.indices, [outer.loop_var]):
        return None
    return dot


def vectorize_dot(outer: tirx.For) -> tirx.Stmt | None:
    """Vectorize a loop around an annotated sum, several results at once; None for other loops."""
    dot = around(outer)
    if dot is None:
        return None
    var, dtype = outer.loop_var, str(outer.loop_var.ty.dtype)
    group, rest = Var(f"{var.name}_0", var.ty), Var(str(var.name), var.ty)
    size = const(GROUP, dtype)
    groups = tirx.floordiv(outer.extent, size)
    k = dot.loop.loop_var
    fetches = [
        substitute(fetch(load, ahead(load, outer)), {k: k + const(start, str(k.ty.dtype))})
        for load in (gathers(dot.term, var) if has_annotation(outer, PREFETCH) else [])
        for start in line_starts(load, dot.step)
    ]
    main = serial(group, groups, _emit(dot, var, group * size, GROUP, fetches), without(outer, PREFETCH))
    single = _emit(dot, var, groups * size + rest, 1, fetches)
    return tirx.SeqStmt([main, serial(rest, tirx.floormod(outer.extent, size), single)])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VectorizeDots")
def VectorizeDots(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Vectorize every annotated reduction of a function; refuse annotations of other loops."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        product = vectorize_dot(node)
        if product is not None:
            return product
        dot = match(node, None)
        if dot is not None:
            return _emit(dot, None, None, 1)
        return refused(mutator.default_mutate(node), DOT, "it is no sum, maximum or minimum along one element")

    def join(before: tirx.Stmt, stmt: tirx.Stmt) -> tirx.Stmt | None:
        """Vectorize a reduction that the store before it initialises."""
        dot = match(stmt, before) if isinstance(stmt, tirx.For) else None
        return _emit(dot, None, None, 1) if dot is not None and dot.is_whole else None

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*(mutator.mutate(s) for s in join_neighbours(node.seq, join)))

    body = structural_mutate(func.body, [(tirx.For, on_for), (tirx.SeqStmt, on_seq)])
    return with_body(func, body)


# --------------------------------------------------------------------------------------- scalarisation


# Gathers: by one instruction, or indices are loaded a word at a time and the gathered elements one by one.
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
# or, in functions with the attribute ``"sparsetir.gathers"``::
#
#     got[0:8] = T.call_extern("float32x8", "st_gather_float32x8_int32", T.address_of(x[0]), indices[p : p + 8])
#     ...
#
# The first form is one load for each lane, of which a core executes two or three per cycle. LLVM would load the indices
# as a vector too, and extract them one by one. Half a load for each index (a quarter for 16 bits) and a shift cost less
# than an extraction. The first index of a word is in its lowest bits.
#
# Instructions that gather vectors take a third of that time on an Emerald Rapids (`sparsetir calibrate` prints both).
# They take no less on AMD's processors, for which `sparsetir.codegen.target.native_target` disables them. Elements are
# those of the last dimension, of 32 or 64 bits.


WORD = 64  # bits of the general-purpose registers in which subscripts are computed
GATHERED = {"float32": "float", "float64": "double", "int32": "i32", "int64": "i64", "uint32": "i32", "uint64": "i64"}
LEAST_GATHERED = 4  # lanes of the shortest vectors that are gathered by an instruction


def index_of(load: ir.TensorLoad, lane: Var) -> ir.TensorLoad | None:
    """Return the element of an index array, read along the lanes, by which a load is gathered; None if no gather."""
    inner = [x for i in load.indices for x in collect(i, ir.TensorLoad) if mentions(x, [lane])]
    if not inner or not all(same(x, inner[0]) for x in inner):
        return None
    return inner[0] if is_along(inner[0], lane) else None


def gather(loop: tirx.For, instructions: dict[str, str] | None = None) -> tirx.Stmt | None:
    """Move the gathers of a vector loop in front of it; None if it has none.

    Parameters
    ----------
    loop : For
    instructions : dict of str to str, optional
        LLVM IR of the functions by which vectors are gathered, and of what these call: what the loop needs is added.
        Without it elements are loaded one by one.
    """
    store = loop.body
    if loop.kind != VECTORIZED or not isinstance(loop.extent, tirx.IntImm) or not isinstance(store, tirx.BufferStore):
        return None
    if any(dialect.is_if_then_else(call) for call in collect(store.value, ir.Call)):
        return None  # A guarded load may be out of bounds where the guard does not hold.
    lane, lanes = loop.loop_var, int(loop.extent)
    named = [x.var for x in collect(store.value, tirx.Let)]  # values that are not available in front of the loop
    parts: list[tirx.Stmt] = []
    buffers: list[Var] = []

    def on_load(load: ir.TensorLoad, mutator: Any) -> ir.Expr:
        index = index_of(load, lane)
        each = per_word(index, lanes) if index is not None else 0
        if index is None or not each or mentions(load, named):
            return mutator.default_mutate(load)
        got = tirx.decl_buffer([lanes], str(load.ty.dtype), name="got", scope="local", layout=None)
        buffers.append(got)
        at_once = None if instructions is None else taken_at_once(load, index, got, loop, instructions)
        parts.append(at_once or taken(load, index, got, loop, each))
        return tirx.BufferLoad(got, [lane])

    value = structural_mutate(store.value, [(ir.TensorLoad, on_load)])
    if not parts:
        return None
    rest = with_(loop, body=tirx.BufferStore(store.buffer, value, store.indices), notes={})
    return seq(*alloc(*buffers), *parts, renewed(rest))


def taken_at_once(
    load: ir.TensorLoad, index: ir.TensorLoad, got: Var, loop: tirx.For, instructions: dict[str, str]
) -> tirx.Stmt | None:
    """Emit the store that fills `got` by one instruction, and add its function; None where there is none for it."""
    lane, lanes = loop.loop_var, int(loop.extent)
    *others, last = load.indices
    dtype, strides = str(load.ty.dtype), list(load.source.ty.strides or ())
    is_contiguous = not strides or same(strides[-1], const(1, str(strides[-1].ty.dtype)))
    position = cast(index, str(last.ty.dtype))
    begin = sym.Analyzer().simplify(last - position)
    if dtype not in GATHERED or lanes < LEAST_GATHERED or not is_contiguous or mentions([*others, begin], [lane]):
        return None
    idtype = "int64" if str(index.ty.dtype) in ("int64", "uint32", "uint64") else "int32"
    name = f"st_gather_{dtype}x{lanes}_{idtype}"
    instructions[name], callee = gather_function(name, GATHERED[dtype], lanes, int(DataType(idtype).bits))
    instructions[callee] = callee
    *outer, along = index.indices
    first = substitute(along, {lane: const(0, str(lane.ty.dtype))})
    read = tirx.BufferLoad(index.source, [*outer, tirx.Ramp(first, const(1, str(first.ty.dtype)), lanes)])
    places = read if str(index.ty.dtype) == idtype else tirx.Cast(f"{idtype}x{lanes}", read)
    base = tirx.address_of(tirx.BufferLoad(load.source, [*others, begin]))
    value = tirx.call_extern(f"{dtype}x{lanes}", name, base, places)
    return tirx.BufferStore(got, value, [tirx.Ramp(const(0), const(1), lanes)])


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


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.LowerGathers")
def LowerGathers(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every gather of a function's vector loops."""
    instructions: dict[str, str] | None = {} if func.attrs is not None and GATHERS in func.attrs else None
    func = each_loop(func, outer=lambda loop: gather(loop, instructions))
    if not instructions:
        return func
    text = "\n".join(instructions.values())
    return with_body(func, tirx.AttrStmt(const(0), IMPORT, ir.StringImm(text), func.body))


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


__all__ = [
    "GROUP",
    "VECTORS",
    "DotSum",
    "VectorizeDots",
    "VectorizeMaps",
    "VectorizeMasked",
    "around",
    "mask",
    "match",
    "reduced",
    "scaled",
    "totals",
    "vectorize_dot",
    "vectorize_map",
]
