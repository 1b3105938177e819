# SPDX-License-Identifier: Apache-2.0
"""Three matrices whose letters form a triangle: the product of two of them where the third one stores entries.

``S[i, j] * A[i, k] * B[k, j]``, summed over k or over all letters, is a product under a mask: rows of B are added up in
the order of a row of S, where a loop over S would search each of its columns in every row of B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir import interop, ops
from sparsetir.assemble import Options
from sparsetir.call.assembled import AssembledKernel
from sparsetir.call.blocked import assembled_kernel
from sparsetir.formats.compressed import compressed_rows
from sparsetir.notation.steps import KernelStep, Step
from sparsetir.scalars import dtype_name

SEARCHED = 6  # products in the time of a search


class Roles(NamedTuple):
    """Which operand is the mask and which the factors, and which of the three are transposed."""

    mask: int
    first: int
    second: int
    transposed: tuple[bool, bool, bool]


def roles(terms: Sequence[str], pattern: int | None) -> Roles | None:
    """The roles of three operands whose letters form a triangle: the mask is that of the pattern, if there is one.

    Examples
    --------
    >>> roles(["ij", "ik", "kj"], 0)
    Roles(mask=0, first=1, second=2, transposed=(False, False, False))
    >>> roles(["ij", "jk", "ki"], None)  # B @ C under the transpose of A
    Roles(mask=0, first=1, second=2, transposed=(True, False, False))
    """
    if len(terms) != 3 or any(len(set(term)) != 2 or len(term) != 2 for term in terms):
        return None
    found: list[Roles] = []
    for mask, first, second in permutations(range(3)):
        for rows, columns in permutations(terms[mask]):
            inner = terms[first].replace(rows, "")
            if len(inner) != 1 or set(terms[second]) != {inner, columns}:
                continue
            wanted = (rows + columns, rows + inner, inner + columns)
            flipped = tuple(terms[n] != w for n, w in zip((mask, first, second), wanted, strict=True))
            found.append(Roles(mask, first, second, flipped))  # type: ignore[arg-type]
    kept = [r for r in found if pattern is None or (r.mask == pattern and not r.transposed[0])]
    return min(kept, key=lambda r: (sum(r.transposed), r), default=None)


def pays(roles: Roles, stored: Sequence[float | None], sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether the products are fewer than what it takes to search the entries of the mask one by one."""
    mask, first, second = (stored[n] or 0.0 for n in roles[:3])
    rows, inner = sizes[roles.first][:: -1 if roles.transposed[1] else 1]
    products = first * second / max(inner, 1)
    return products < SEARCHED * mask * first / max(rows, 1) + mask


class MaskedStep(Step):
    """A product under a mask.

    Parameters
    ----------
    nested : KernelStep
        The same as one loop nest over the mask: for masks whose pattern is kept and is not that of sorted rows.
    roles : Roles
    """

    def __init__(self, nested: KernelStep, roles: Roles) -> None:
        self.members, self.nested, self.roles = nested.members, nested, roles
        self.keeps = bool(nested.nest.output)

    def __call__(self, values: Sequence[Any]) -> Any:
        return self.made(values, [self.laid(place, values) for place in (1, 2)])

    def laid(self, place: int, values: Sequence[Any] | Mapping[int, Any]) -> Any:
        """The mask or a factor in rows."""
        value = values[self.roles[:3][place]]
        return compressed_rows(interop.transposed(value, (1, 0)) if self.roles.transposed[place] else value)

    def made(self, values: Sequence[Any], factors: Sequence[Any]) -> Any:
        """The result, of operands and of the factors laid out."""
        if self.keeps and values[self.roles.mask].format != "csr":
            return self.nested(values)
        held = self.laid(0, values)
        interop.open_source(held, "the mask").check("the mask")
        mask = sp.csr_array((np.ones(len(held.data), np.bool_), held.indices, held.indptr), shape=held.shape)
        if not mask.has_canonical_format:
            if self.keeps:
                return self.nested(values)
            held = held.copy()
            held.has_canonical_format = False
            held.sum_duplicates()
            mask = sp.csr_array((np.ones(len(held.data), np.bool_), held.indices, held.indptr), shape=held.shape)
        wide = any(m.indices.dtype == np.int64 for m in (mask, *factors))
        found = _kernel(dtype_name(held.dtype), "int64" if wide else "int32")(A=factors[0], B=factors[1], M=mask).data
        # Too wide for a table of columns; or infinity and NaN would be multiplied with products that there are none of.
        if len(found) != len(held.data) or not np.isfinite(held.data).all():
            return self.nested(values)
        if not self.keeps:
            return np.dot(held.data, found)
        # In the class of the mask, and with index arrays of its own.
        return type(held)((held.data * found, held.indices.copy(), held.indptr.copy()), shape=held.shape)

    def bind(self, fixed: Mapping[int, Any]) -> Callable[[Sequence[Any]], Any]:
        held = {place: self.laid(place, fixed) for place in (1, 2) if self.roles[:3][place] in fixed}
        return lambda values: self.made(
            values, [held[place] if place in held else self.laid(place, values) for place in (1, 2)]
        )

    def script(self) -> str:
        from sparsetir.script.printer import script

        return script(_program(self.nested.nest.dtype, "int32"))


def _program(dtype: str, idtype: str) -> Any:
    return ops.masked_spgemm(dtype, idtype=idtype)


@cache
def _kernel(dtype: str, idtype: str) -> AssembledKernel:
    return assembled_kernel(_program(dtype, idtype), None, Options(whole=True))


__all__ = ["MaskedStep", "Roles", "pays", "roles"]
