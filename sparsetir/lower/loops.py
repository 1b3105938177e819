# SPDX-License-Identifier: Apache-2.0
"""Loop constructors for passes, and the recognition of updates such as ``x = x + term``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import ir, s_tir, sym, tirx
from tvm.ir import Var

from sparsetir.ir import dialect
from sparsetir.ir.rewriting import ABSORBING, collect, get, is_element, is_number, mentions, put, substitute
from sparsetir.ir.views import const
from sparsetir.ir.visitor import structural_mutate, structural_walk

SERIAL, PARALLEL = tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL
UNROLLED, VECTORIZED = tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED

COMBINERS = (tirx.Add, tirx.Max, tirx.Min)
Change = Callable[[tirx.For], "tirx.Stmt | None"]


def loop(
    kind: tirx.ForKind, var: Var, extent: ir.Expr | int, body: tirx.Stmt, notes: Mapping[str, Any] | None = None
) -> tirx.For:
    """Build a loop over `extent` steps from 0 on, with annotations `notes`."""
    dtype = str(var.ty.dtype)
    steps = const(extent, dtype) if isinstance(extent, int) else extent
    return tirx.For(var, const(0, dtype), steps, kind, body, None, notes)


serial = partial(loop, SERIAL)
parallel = partial(loop, PARALLEL)
unrolled = partial(loop, UNROLLED)
vectorized = partial(loop, VECTORIZED)


def binary_search(goes_right: Callable[[ir.Expr], ir.Expr], lo: Var, hi: Var) -> tirx.Stmt:
    """Narrow ``[lo, hi]`` to the first index that does not go right; the answer is in `lo`."""
    dtype = str(lo.ty.dtype)
    mid = tirx.floordiv(get(lo) + get(hi), const(2, dtype))
    step = tirx.IfThenElse(goes_right(mid), put(lo, mid + const(1, dtype)), put(hi, mid))
    return tirx.While(get(lo) < get(hi), step)


def with_(
    loop: tirx.For,
    *,
    var: Var | None = None,
    extent: ir.Expr | None = None,
    kind: tirx.ForKind | None = None,
    body: tirx.Stmt | None = None,
    notes: Mapping[str, Any] | None = None,
) -> tirx.For:
    """Copy a loop with another variable, extent, kind, body or other annotations."""
    return tirx.For(
        loop.loop_var if var is None else var,
        loop.min,
        loop.extent if extent is None else extent,
        loop.kind if kind is None else kind,
        loop.body if body is None else body,
        loop.thread_binding,
        loop.annotations if notes is None else notes,
    )


def without(loop: tirx.For, *names: str) -> dict[str, Any]:
    """Return the annotations of a loop without those in `names`."""
    return {name: value for name, value in loop.annotations.items() if name not in names}


def with_body(func: tirx.PrimFunc, body: tirx.Stmt) -> tirx.PrimFunc:
    """Return a copy of a function with another body."""
    return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)


def defined_vars(*parts: Any) -> list[Var]:
    """Return the variables that loops, blocks and bindings inside of some nodes define."""
    variables: list[Var] = []
    callbacks = [
        (tirx.For, lambda f: variables.append(f.loop_var)),
        (s_tir.SBlock, lambda b: variables.extend(iv.var for iv in b.iter_vars)),
        (tirx.Bind, lambda b: variables.append(b.var)),
        (tirx.Let, lambda x: variables.append(x.var)),
    ]
    for part in parts:
        structural_walk(part, callbacks)
    return variables


def allocated_buffers(*parts: Any) -> list[Var]:
    """Return the buffers that blocks and statements inside of some nodes allocate."""
    buffers: list[Var] = []
    callbacks = [
        (s_tir.SBlock, lambda b: buffers.extend(b.alloc_buffers)),
        (tirx.AllocBuffer, lambda a: buffers.append(a.buffer)),
    ]
    for part in parts:
        structural_walk(part, callbacks)
    return buffers


def join_neighbours(
    stmts: Iterable[tirx.Stmt],
    join: Callable[[tirx.Stmt, tirx.Stmt], tirx.Stmt | None],
    visit: Callable[[tirx.Stmt], tirx.Stmt] | None = None,
) -> list[tirx.Stmt]:
    """Return statements in which `join` has replaced pairs of neighbours by one statement.

    Parameters
    ----------
    stmts : iterable of Stmt
    join : callable
        Called with a statement, as it is in the result, and the next one. None keeps both.
    visit : callable, optional
        Rewrites the statements that are not joined to the one before.
    """
    out: list[tirx.Stmt] = []
    for stmt in stmts:
        both = join(out[-1], stmt) if out else None
        if both is not None:
            out[-1] = both
        else:
            out.append(stmt if visit is None else visit(stmt))
    return out


def each_loop(func: tirx.PrimFunc, *, outer: Change | None = None, inner: Change | None = None) -> tirx.PrimFunc:
    """Rewrite the loops of a function.

    Parameters
    ----------
    func : PrimFunc
    outer : callable, optional
        Called with a loop before the loops inside it; its result is not visited again. None visits the loops inside.
    inner : callable, optional
        Called with a loop after those inside it; None keeps the loop.
    """

    def on_for(node: tirx.For, mutator: Any) -> tirx.Stmt:
        replacement = None if outer is None else outer(node)
        if replacement is not None:
            return replacement
        changed = mutator.default_mutate(node)
        replacement = None if inner is None else inner(changed)
        return changed if replacement is None else replacement

    return with_body(func, structural_mutate(func.body, [(tirx.For, on_for)]))


def _choice(term: Any, reduction: type) -> tuple[ir.Expr, ir.Expr] | None:
    """Return (condition, value) of a term that is left out where the condition does not hold; None for other terms."""
    absorbing, combinations = ABSORBING[reduction]
    if dialect.is_if_then_else(term) and is_number(term.args[2], absorbing):
        return term.args[0], term.args[1]
    if isinstance(term, combinations):
        for at, part in enumerate((term.a, term.b)):
            choice = _choice(part, reduction)
            if choice is not None:
                parts = (choice[1], term.b) if at == 0 else (term.a, choice[1])
                combination: Any = type(term)
                return choice[0], combination(*parts)
    return None


def presence(term: ir.Expr, reduction: type, fixed: Sequence[Var]) -> tuple[list[ir.Expr], ir.Expr]:
    """Return the conditions where a term of a reduction is not left out, and the term where they hold.

    In order: a condition may be evaluated only where those before it hold. One that mentions a variable of `fixed`
    stays in the term, and those after it.
    """
    conditions: list[ir.Expr] = []
    choice = _choice(term, reduction)
    while choice is not None and not mentions(choice[0], list(fixed)):
        conditions.append(choice[0])
        term = choice[1]
        choice = _choice(term, reduction)
    return conditions, term


@dataclass(frozen=True)
class Update:
    """``x[...] = x[...] (op) term``: a store that combines its own element with a term.

    Parameters
    ----------
    store : BufferStore
    own : BufferLoad
        The element's old value.
    term : Expr
    """

    store: tirx.BufferStore
    own: ir.TensorLoad
    term: ir.Expr

    @classmethod
    def of(cls, stmt: Any, ops: tuple[type, ...] = (tirx.Add,), *, either: bool = False) -> Update | None:
        """Match a statement that updates an element by one of `ops`; None for other statements.

        The element is the first operand; with `either` it may be the second one of a commutative operator.
        """
        if not isinstance(stmt, tirx.BufferStore) or not isinstance(stmt.value, ops):
            return None
        value: Any = stmt.value
        first, second = value.a, value.b
        if is_element(first, stmt):
            return cls(stmt, first, second)
        commutes = either and not isinstance(stmt.value, tirx.Sub)
        return cls(stmt, second, first) if commutes and is_element(second, stmt) else None

    @property
    def op(self) -> type:
        """The operator that combines the element and the term."""
        return type(self.store.value)

    @property
    def dtype(self) -> str:
        """The dtype of the element."""
        return str(self.store.buffer.ty.dtype)

    @property
    def indices(self) -> list[ir.Expr]:
        """The subscripts of the element."""
        return list(self.store.indices)

    @property
    def is_alone(self) -> bool:
        """Whether the statement reads no other element of the array."""
        return sum(load.source.same_as(self.store.buffer) for load in collect(self.store, ir.TensorLoad)) == 1


def most(extent: ir.Expr) -> int | None:
    """Return a constant that an extent does not exceed; None if unknown."""
    bound = extent.b if isinstance(extent, tirx.FloorMod) else extent
    return int(bound) if isinstance(bound, tirx.IntImm) else None


def place_of(lanes: Sequence[tirx.For]) -> ir.Expr:
    """Return the linear position of a step among all steps of nested loops with bounded extents."""
    flat: ir.Expr = const(0, str(lanes[0].loop_var.ty.dtype) if lanes else "int32")
    for lane in lanes:
        flat = flat * const(most(lane.extent) or 1, str(flat.ty.dtype)) + lane.loop_var
    return sym.Analyzer().simplify(flat)


def each_lane(lanes: Sequence[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
    """Nest `body` in copies of loops with fresh variables."""
    fresh = {lane.loop_var: Var(str(lane.loop_var.name), lane.loop_var.ty) for lane in lanes}
    body = substitute(body, fresh)
    for lane in reversed(lanes):
        body = with_(lane, var=fresh[lane.loop_var], body=body, notes={})
    return body
