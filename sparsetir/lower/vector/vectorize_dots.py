# SPDX-License-Identifier: Apache-2.0
"""Reduce along contiguous rows in vectors, for several results at once.

before::

    for j in range(indptr[i + 1] - indptr[i]):
        o[indptr[i] + j] = 0
        for k in T.serial(feat, annotations={"sparsetir.dot": 16}):
            o[indptr[i] + j] = o[indptr[i] + j] + s[indptr[i] + j] * x[i, k] * y[indices[indptr[i] + j], k]

after::

    for j_0 in range((indptr[i + 1] - indptr[i]) // 4):
        for k_0 in range(feat // 16):
            for j_1 in T.unroll(4):
                for k_1 in T.vectorized(16):
                    acc[j_1 * 16 + k_1] = acc[j_1 * 16 + k_1] + x[i, k_0 * 16 + k_1] * y[indices[...], k_0 * 16 + k_1]
        for j_1 in T.unroll(4):
            ...  # total = the sum of acc[j_1 * 16 : j_1 * 16 + 16] and of the last feat % 16 products
            o[indptr[i] + j_0 * 4 + j_1] = 0 + s[indptr[i] + j_0 * 4 + j_1] * total
    for j in range((indptr[i + 1] - indptr[i]) % 4):
        ...  # the same for one

A row of ``x`` is loaded once for four results, and four sums hide each other's latency. Factors that a sum does not
move leave it; where that makes a float that is not finite (an infinite factor of an empty sum, a sum that overflows),
the sum is taken again with the factors inside. 16-bit floats are summed in float32, and rounded once. The note is for
sums that may be reordered, and for maxima and minima, which begin with what they are compared to in every lane::

    for j in T.serial(indptr[i + 1] - indptr[i], annotations={"sparsetir.dot": 8}):
        top[i] = T.max(top[i], s[indptr[i] + j])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, tirx
from tvm.ir import Var
from tvm.runtime import DataType

from sparsetir.ir import const
from sparsetir.lower.host.promote_halves import HALVES, widened
from sparsetir.lower.marks import DOT, PREFETCH, asks, refused
from sparsetir.lower.nest.compare_nan import opposite
from sparsetir.lower.nests import COMBINERS, SERIAL, Update, serial, unrolled, vectorized, with_body, without
from sparsetir.lower.rewriting import (
    alloc,
    cell,
    conjunction,
    factors,
    get,
    mentions,
    product,
    put,
    renewed,
    same,
    seq,
    substitute,
)
from sparsetir.lower.vector.insert_prefetch import ahead, fetch, gathers, line_starts
from sparsetir.walks import structural_mutate

GROUP = 4  # results at once
VECTORS = 2  # of each sum: with four sums they hide the latency of the multiply-add units
REGISTER_BITS = 128  # within which lanes are moved at least cost


@dataclass(frozen=True)
class Dot:
    """``target[indices] = start + factor * sum(term)`` over `loop`; `is_whole` if that needs no earlier value.

    `combine` is what takes two values to one; without factors where it is no sum.
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
    def neutral(self) -> ir.Expr:
        """What a running value begins with: it may count several times."""
        return const(0, str(self.store.buffer.ty.dtype)) if self.combine is tirx.Add else self.start


def match(loop: tirx.For, before: tirx.Stmt | None, note: str = DOT) -> Dot | None:
    """The sum that a loop with a `note` computes, begun by the store `before` it if that sets the same element."""
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
    return Dot(loop, store, start, is_whole, fixed, product(moving), int(loop.annotations[note]), update.op)


def _emit(
    dot: Dot, outer: Var | None, base: ir.Expr | None, group: int, fetches: Sequence[tirx.Stmt] = ()
) -> tirx.Stmt:
    """The sums of `group` steps of the loop over `outer` from `base` on; of one sum where there is no such loop.

    `fetches` are run at the head of every block of lanes, in terms of the loops' variables.
    """
    k, dtype = dot.loop.loop_var, str(dot.loop.loop_var.ty.dtype)
    lanes, stored = dot.lanes, str(dot.store.buffer.ty.dtype)
    kind = "float32" if stored in HALVES else stored
    acc = tirx.decl_buffer([group * lanes], kind, name="acc", scope="local", layout=None)
    whole = tirx.decl_buffer([group], kind, name="total", scope="local", layout=None)
    member, block, lane, rest = (Var(n, k.ty) for n in ("g", "k_0", "k_1", "k_rest"))
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
    left = tirx.floormod(dot.loop.extent, width)
    behind = cell("rest", kind)
    tail = serial(rest, left, put(behind, dot.combine(get(behind), term(full * width + rest))))
    joined_rest = dot.combine(get(behind), tirx.BufferLoad(whole, [member]))
    again = Var(f"{k.name}_again", k.ty)

    def unfactored(result: Var) -> tirx.Stmt:
        return serial(again, dot.loop.extent, put(result, get(result) + product([*inside, term(again)])))

    checks, total = scaled(inside, whole, member, group, unfactored) if inside else ([], joined_rest)
    indices = [substitute(i, of_member) for i in dot.store.indices]
    if dot.combine is tirx.Add:
        total = substitute(widened(dot.start), of_member) + total
    finish = tirx.BufferStore(dot.store.buffer, tirx.Cast(stored, total) if stored in HALVES else total, indices)
    ahead = [each(substitute(f, {k: block * width, **of_member})) for f in fetches]
    sums = serial(block, full, seq(*ahead, each(inner)))
    last = tirx.BufferStore(whole, joined_rest, [member]) if inside else finish
    ends = seq(*alloc(behind), put(behind, neutral), tail, last)
    joined = totals(acc, whole, group, lanes, dot.combine)
    stmts = [*alloc(acc, whole), each(clear), sums, joined, each(ends)]
    return seq(*stmts, *checks, each(finish)) if inside else seq(*stmts)


def scaled(
    fixed: Sequence[ir.Expr], total: Var, member: Var, group: int, unfactored: Callable[[Var], tirx.Stmt]
) -> tuple[list[tirx.Stmt], ir.Expr]:
    """Multiply sums by the factors that were taken out of them.

    Returns statements and the product for `member`. Where a product is not a finite float, the statements take the sum
    again with the factors inside of it: the distributive law does not hold for infinite factors and overflowing sums.

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
    """Set `total` to what each of `group` neighbouring vectors of `acc` comes to.

    Taken together, pair by pair: half of a shuffle's lanes are of one vector, half of another. For four vectors of four
    lanes each: ``a0+a2 b0+b2 a1+a3 b1+b3`` and the same of c and d, then ``a b c d``.
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
    """Lanes of two vectors' lower and upper halves of each `piece` lanes, `unit` lanes of each in turn."""
    found: list[list[ir.Expr]] = [[], []]
    for half, lanes in enumerate(found):
        for begin in range(0, width, piece):
            for first in range(begin + half * piece // 2, begin + (half + 1) * piece // 2, unit):
                lanes += [const(n + side) for side in (0, width) for n in range(first, first + unit)]
    return found[0], found[1]


def reduced(acc: Var, begin: ir.Expr, lanes: int, combine: Any = tirx.Add) -> ir.Expr:
    """Lanes of a local array taken to one value, half by half: taken one by one they would leave the registers."""
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
    """A store and the loop after it, if `body` is just that; else nothing and `body`."""
    if isinstance(body, tirx.SeqStmt) and len(body.seq) == 2:
        return body.seq[0], body.seq[1]
    return None, body


def around(outer: tirx.For) -> Dot | None:
    """The annotated sum that a loop consists of, another one in each step; None where it is something else."""
    before, inner = _parts(outer.body)
    if outer.kind != SERIAL or not isinstance(inner, tirx.For):
        return None
    dot = match(inner, before)
    if dot is None or (before is not None and not dot.is_whole):
        return None
    if mentions(inner.extent, [outer.loop_var]) or not mentions(dot.store.indices, [outer.loop_var]):
        return None
    return dot


def vectorize(outer: tirx.For) -> tirx.Stmt | None:
    """A loop around an annotated sum in groups; None where it is something else."""
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
        for load in (gathers(dot.term, var) if asks(outer, PREFETCH) else [])
        for start in line_starts(load, dot.lanes)
    ]
    main = serial(group, groups, _emit(dot, var, group * size, GROUP, fetches), without(outer, PREFETCH))
    single = _emit(dot, var, groups * size + rest, 1, fetches)
    return tirx.SeqStmt([main, serial(rest, tirx.floormod(outer.extent, size), single)])


@tvm.tirx.transform.prim_func_pass(opt_level=0, name="sparsetir.VectorizeDots")
def VectorizeDots(func: tirx.PrimFunc, _mod: ir.IRModule, _ctx: Any) -> tirx.PrimFunc:
    """Rewrite every annotated sum of a function; an annotation that fits nothing is refused."""

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        found = vectorize(node)
        if found is not None:
            return found
        dot = match(node, None)
        if dot is not None:
            return _emit(dot, None, None, 1)
        return refused(mutator.default_mutate(node), DOT, "it is no sum, maximum or minimum along one element")

    def on_seq(node: tirx.SeqStmt, mutator: Any) -> tirx.Stmt:
        return seq(*(mutator.mutate(s) for s in _joined(list(node.seq))))

    body = structural_mutate(func.body, [(tirx.For, on_for), (tirx.SeqStmt, on_seq)])
    return with_body(func, body)


def _joined(stmts: list[tirx.Stmt]) -> list[tirx.Stmt]:
    """The statements of a sequence, a store and the sum that begins with it as one."""
    out: list[tirx.Stmt] = []
    for stmt in stmts:
        dot = match(stmt, out[-1]) if out and isinstance(stmt, tirx.For) else None
        if dot is not None and dot.is_whole:
            out[-1] = _emit(dot, None, None, 1)
        else:
            out.append(stmt)
    return out


__all__ = [
    "GROUP",
    "VECTORS",
    "Dot",
    "VectorizeDots",
    "around",
    "match",
    "reduced",
    "scaled",
    "totals",
    "vectorize",
]
