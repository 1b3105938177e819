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
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx
from tvm.ir import Var

from sparsetir.intrin.llvm_ir import LANES, row_functions
from sparsetir.ir.rewriting import factors, is_along, mentions, same, seq, substitute
from sparsetir.ir.views import const
from sparsetir.lower.loops import serial
from sparsetir.lower.vector.dot_products import IMPORT, PAIRS, SIGN_BITS, WORD, bind, mask

Place = dict[Var, Any]
Load = tuple[ir.TensorLoad, bool]  # A row, and whether its bytes are made unsigned.


@dataclass(frozen=True, eq=False)
class RowProducts:
    """Products of elements of two rows, which one sum adds: a single one, or several of the same dtypes.

    Parameters
    ----------
    pairs : tuple of (TensorLoad, TensorLoad)
    along : Var
        The loop's variable, along which all rows are contiguous.
    """

    pairs: tuple[tuple[ir.TensorLoad, ir.TensorLoad], ...]
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
        """Whether both operands are signed: instructions take an unsigned one, which is 128 more."""
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
        """Return what each member's sums are too large by; members that share the signed row share it."""
        if not self._is_shifted:
            return []
        make = lambda: tirx.decl_buffer([LANES], "int32", "shift", scope="local", layout=None)  # noqa: E731
        is_shared = not any(mentions(self._sides(pair, moving)[1][0], moving) for pair in self.pairs)
        return [make()] * len(members) if is_shared else [make() for _ in members]

    def _sides(self, pair: tuple[ir.TensorLoad, ir.TensorLoad], moving: Sequence[Var]) -> tuple[Load, Load]:
        """Return the operands in the order of the instruction: of bytes, the unsigned one first."""
        first, second = pair
        swaps = mentions(second, moving) and not mentions(first, moving) if self._is_shifted else False
        if swaps or _dtypes(pair) == ("int8", "uint8"):
            first, second = second, first
        return (first, self._is_shifted), (second, False)

    def _step(
        self, acc: Var, shifts: Sequence[Var], members: Sequence[Place], moving: Sequence[Var], at: Any, left: Any
    ) -> tirx.Stmt:
        """Return the products of the elements from `at` on, of which `left` exist (None: all)."""
        out: list[tirx.Stmt] = []
        shared: list[tuple[ir.TensorLoad, Var]] = []  # Rows of one element of the loop around are loaded once.
        for n, member in enumerate(members):
            own: list[tuple[ir.TensorLoad, Var]] = []
            for pair in self.pairs:
                values = []
                for load, is_unsigned in self._sides(pair, moving):
                    loads = own if mentions(load, moving) else shared
                    values.append(self._loaded(out, loads, load, member, at, left, is_unsigned=is_unsigned))
                out.append(tirx.BufferStore(acc, self._dot(_vector(acc, n), *values), [_lanes(n)]))
                if shifts and (n == 0 or shifts[n] is not shifts[0]):
                    shift = self._dot(_vector(shifts[n], 0), tirx.Broadcast(const(SIGN_BITS), LANES), values[1])
                    out.append(tirx.BufferStore(shifts[n], shift, [_lanes(0)]))
        return seq(*out)

    def _loaded(
        self, out: list[tirx.Stmt], loads: list[Any], load: Any, member: Place, at: Any, left: Any, *, is_unsigned: bool
    ) -> Var:
        """Append the load of a vector of a row unless it is among `loads`, and return its variable."""
        value = next((var for before, var in loads if same(before, load)), None)
        if value is None:
            where = substitute(tirx.address_of(load), {**member, self.along: at})
            if left is None:
                vector = tirx.call_extern(WORD, f"st_whole_{self.kind}", where)
            else:
                vector = tirx.call_extern(WORD, f"st_rows_{self.kind}", where, mask(0, self.terms, left, "int64"))
            vector = tirx.bitwise_xor(vector, tirx.Broadcast(const(SIGN_BITS), LANES)) if is_unsigned else vector
            value = bind(out, str(load.source.name), vector, WORD)
            loads.append((load, value))
        return value

    def _dot(self, acc: Any, first: Any, second: Any) -> Any:
        dtype = "float32" if self.kind == "bf16" else "int32"
        return tirx.call_extern(f"{dtype}x{LANES}", f"st_dot_rows_{self.kind}", acc, first, second)


def match(term: ir.Expr, along: Var, result: str) -> RowProducts | None:
    """Return the products of rows that a term adds; None if it is another one.

    args: the term of a sum without factors that do not move, the loop's variable, the dtype of the result.
    """
    pairs = []
    for summand in _summands(term):
        parts = [_element(factor, result) for factor in factors(summand)]
        if len(parts) != 2 or not all(isinstance(x, ir.TensorLoad) and is_along(x, along) for x in parts):
            return None
        pairs.append((parts[0], parts[1]))
    dtypes = {_dtypes(pair) for pair in pairs}
    if len(dtypes) != 1 or result not in PAIRS.get(dtypes.pop(), ()):
        return None
    return RowProducts(tuple(pairs), along)


def _summands(term: ir.Expr) -> list[ir.Expr]:
    return [*_summands(term.a), *_summands(term.b)] if isinstance(term, tirx.Add) else [term]


def _element(factor: ir.Expr, result: str) -> ir.Expr:
    """Return a factor without its conversion to the dtype of the result; others would change the number."""
    is_widened = isinstance(factor, tirx.Cast) and str(factor.ty.dtype) == result
    return factor.value if is_widened else factor


def _dtypes(pair: tuple[ir.TensorLoad, ir.TensorLoad]) -> tuple[str, str]:
    return str(pair[0].source.ty.dtype), str(pair[1].source.ty.dtype)


def _lanes(n: int) -> Any:
    return tirx.Ramp(const(n * LANES), const(1), LANES)


def _vector(buffer: Var, n: int) -> Any:
    return tirx.BufferLoad(buffer, [_lanes(n)])


__all__ = ["RowProducts", "match"]
