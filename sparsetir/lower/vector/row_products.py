# SPDX-License-Identifier: Apache-2.0
"""Sums of products along two contiguous rows by dot-product instructions.

before::

    for k in T.serial(feat, annotations={"sparsetir.dot": 16, "sparsetir.unit_along": 1}):
        o[p] = o[p] + x[i, k] * y[indices[p], k]

after::

    acc[0:16] = 0
    for k_0 in range(feat // 32):
        acc[0:16] = dot(acc[0:16], x[i, k_0 * 32 : k_0 * 32 + 32], y[indices[p], k_0 * 32 : k_0 * 32 + 32])
    if feat % 32 > 0:
        ...  # the elements that are left, under a mask
    o[p] = 0 + the sum of acc[0:16]

Both operands store the two bfloat16 or four 8-bit terms that an instruction multiplies side by side: no row is
interleaved. `sparsetir.lower.vector.vectorize` computes several sums at once, which share the row of ``x``, and adds
the 16 parts of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.intrin.llvm_ir import IMPORT, LANES, row_functions
from sparsetir.ir import dialect
from sparsetir.ir.rewriting import factors, is_along, mentions, same, seq, substitute, summands
from sparsetir.ir.views import const
from sparsetir.lower.loops import serial
from sparsetir.lower.vector.dot_products import PAIRS, SIGN_BITS, WORD, bind, is_zero, mask

Place = dict[Var, Any]


@dataclass(frozen=True, eq=False)
class RowFactor:
    """Elements of a row, zero where the guard does not hold; `is_unsigned`: signed bytes to which 128 is added."""

    load: ir.TensorLoad
    guard: ir.Expr | None = None
    is_unsigned: bool = False

    @property
    def dtype(self) -> str:
        return str(self.load.source.ty.dtype)

    def mentions(self, variables: Sequence[Var]) -> bool:
        """Return whether the row is another one for other values of any of these variables."""
        return mentions(self.load, variables) or mentions(self.guard, variables)

    def equals(self, row: RowFactor) -> bool:
        """Return whether both are the same elements."""
        guards = [x for x in (self.guard, row.guard) if x is not None]
        is_guarded_alike = len(guards) == 0 or (len(guards) == 2 and same(*guards))
        return same(self.load, row.load) and is_guarded_alike and self.is_unsigned == row.is_unsigned


Pair = tuple[RowFactor, RowFactor]


@dataclass(frozen=True, eq=False)
class RowProducts:
    """Products of elements of two rows, which one sum adds: a single one, or several of the same dtypes.

    Parameters
    ----------
    pairs : tuple of (RowFactor, RowFactor)
    along : Var
        The loop's variable, along which all rows are contiguous.
    """

    pairs: tuple[Pair, ...]
    along: Var

    @property
    def kind(self) -> str:
        return "bf16" if self._dtypes[0] == "bfloat16" else "int8"

    @property
    def terms(self) -> int:
        """Elements of a row that one instruction takes."""
        return LANES * (2 if self.kind == "bf16" else 4)

    @property
    def _dtypes(self) -> tuple[str, str]:
        return _dtypes(self.pairs[0])

    @property
    def _is_shifted(self) -> bool:
        """True if both operands are signed: instructions take an unsigned one, which is 128 more."""
        return self._dtypes == ("int8", "int8")

    def sums(
        self,
        acc: Var,
        members: Sequence[Place],
        moving: Sequence[Var],
        extent: ir.Expr,
        fetches: Sequence[tirx.Stmt] = (),
    ) -> tirx.Stmt:
        """Return the statements that add all products to a vector of `acc` for each member.

        args: the sums, the values of `moving` variables for each member, the number of elements of a row, and what is
        fetched for each member before the elements from `along` on are multiplied.
        """
        shifts = self._shifts(members, moving)
        step = Var(f"{self.along.name}_0", self.along.ty)
        number = lambda n: const(n, str(extent.ty.dtype))  # noqa: E731
        whole, left = tirx.floordiv(extent, number(self.terms)), tirx.floormod(extent, number(self.terms))
        at = step * number(self.terms)
        ahead = [substitute(fetch, {**member, self.along: at}) for fetch in fetches for member in members]
        every = serial(step, whole, seq(*ahead, self._step(acc, shifts, members, moving, at, None)))
        last = self._step(acc, shifts, members, moving, whole * number(self.terms), left)
        zero = tirx.Broadcast(const(0), LANES)
        begin = [
            s for x in dict.fromkeys(shifts) for s in (tirx.AllocBuffer(x), tirx.BufferStore(x, zero, [_lanes(0)]))
        ]
        end = [
            tirx.BufferStore(acc, _vector(acc, n) - _vector(shift, 0), [_lanes(n)]) for n, shift in enumerate(shifts)
        ]
        body = seq(*begin, every, tirx.IfThenElse(left > number(0), last, None), *end)
        return tirx.AttrStmt(const(0), IMPORT, ir.StringImm(row_functions(self.kind)), body)

    def _shifts(self, members: Sequence[Place], moving: Sequence[Var]) -> list[Var]:
        """Return the excess of each member's sums; members with the same signed row share it."""
        if not self._is_shifted:
            return []
        make = lambda: tirx.decl_buffer([LANES], "int32", "shift", scope="local", layout=None)  # noqa: E731
        is_shared = not any(self._sides(pair, moving)[1].mentions(moving) for pair in self.pairs)
        return [make()] * len(members) if is_shared else [make() for _ in members]

    def _sides(self, pair: Pair, moving: Sequence[Var]) -> Pair:
        """Return the operands in the order of the instruction: of bytes, the unsigned one first."""
        first, second = pair
        swaps = self._is_shifted and second.mentions(moving) and not first.mentions(moving)
        if swaps or _dtypes(pair) == ("int8", "uint8"):
            first, second = second, first
        return replace(first, is_unsigned=self._is_shifted), second

    def _step(
        self, acc: Var, shifts: Sequence[Var], members: Sequence[Place], moving: Sequence[Var], at: Any, left: Any
    ) -> tirx.Stmt:
        """Return the products of the elements from `at` on, of which `left` exist (None: all)."""
        out: list[tirx.Stmt] = []
        shared: list[tuple[RowFactor, Var]] = []  # Rows of one element of the loop around are loaded once.
        for n, member in enumerate(members):
            own: list[tuple[RowFactor, Var]] = []
            for pair in self.pairs:
                values = []
                for row in self._sides(pair, moving):
                    rows = own if row.mentions(moving) else shared
                    values.append(self._loaded(out, rows, row, {**member, self.along: at}, left))
                out.append(tirx.BufferStore(acc, self._dot(_vector(acc, n), *values), [_lanes(n)]))
                if shifts and (n == 0 or shifts[n] is not shifts[0]):
                    shift = self._dot(_vector(shifts[n], 0), tirx.Broadcast(const(SIGN_BITS), LANES), values[1])
                    out.append(tirx.BufferStore(shifts[n], shift, [_lanes(0)]))
        return seq(*out)

    def _loaded(
        self, out: list[tirx.Stmt], loaded: list[tuple[RowFactor, Var]], row: RowFactor, place: Place, left: Any
    ) -> Var:
        """Append the load of a vector of a row unless it is among those `loaded`, and return its variable."""
        value = next((var for before, var in loaded if before.equals(row)), None)
        if value is not None:
            return value
        where = substitute(tirx.address_of(row.load), place)
        if left is None and row.guard is None:
            vector = tirx.call_extern(WORD, f"st_whole_{self.kind}", where)
        else:
            bits = mask(0, self.terms, left, "int64")
            if row.guard is not None:
                bits = tirx.Select(substitute(row.guard, place), bits, const(0, "int64"))
            vector = tirx.call_extern(WORD, f"st_rows_{self.kind}", where, bits)
        if row.is_unsigned:
            vector = tirx.bitwise_xor(vector, tirx.Broadcast(const(SIGN_BITS), LANES))
        loaded.append((row, bind(out, str(row.load.source.name), vector, WORD)))
        return loaded[-1][1]

    def _dot(self, acc: Any, first: Any, second: Any) -> Any:
        dtype = "float32" if self.kind == "bf16" else "int32"
        return tirx.call_extern(f"{dtype}x{LANES}", f"st_dot_rows_{self.kind}", acc, first, second)


def match(term: ir.Expr, along: Var, result: str) -> RowProducts | None:
    """Return the products of rows that a term adds; None if it is another one.

    args: the term of a sum without factors that do not move, the loop's variable, the dtype of the result.
    """
    pairs: list[Pair] = []
    for summand in summands(term):
        rows = [row for factor in factors(summand) if (row := _row(factor, along, result)) is not None]
        if len(rows) != 2 or len(factors(summand)) != 2:
            return None
        pairs.append((rows[0], rows[1]))
    dtypes = {_dtypes(pair) for pair in pairs}
    if len(dtypes) != 1 or result not in PAIRS.get(dtypes.pop(), ()):
        return None
    return RowProducts(tuple(pairs), along)


def _row(factor: ir.Expr, along: Var, result: str) -> RowFactor | None:
    """Return the row that a factor is an element of, which may be converted to the dtype of the result, or guarded."""
    is_widened = isinstance(factor, tirx.Cast) and str(factor.ty.dtype) == result
    element, guard = factor.value if is_widened else factor, None
    if dialect.is_if_then_else(element):
        guard, element, other = element.args
        is_widened = not is_widened and isinstance(element, tirx.Cast) and str(element.ty.dtype) == result
        element = element.value if is_widened else element
        if not is_zero(other) or mentions(guard, [along]):
            return None
    if not isinstance(element, ir.TensorLoad) or not is_along(element, along):
        return None
    return RowFactor(element, guard)


def _dtypes(pair: Pair) -> tuple[str, str]:
    return pair[0].dtype, pair[1].dtype


def _lanes(n: int) -> Any:
    return tirx.Ramp(const(n * LANES), const(1), LANES)


def _vector(buffer: Var, n: int) -> Any:
    return tirx.BufferLoad(buffer, [_lanes(n)])


__all__ = ["RowFactor", "RowProducts", "match"]
