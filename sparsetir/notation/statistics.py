# SPDX-License-Identifier: Apache-2.0
"""How many products two sparse operands have where they share a letter, and how many entries these fall on.

Entries are seldom spread evenly: hubs have more products, blocks and bands fewer entries. Products are counted, entries
are those of some rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from sparsetir.formats.compressed import compressed_rows
from sparsetir.interop import is_half, transposed

LARGE = 1_000_000  # products of evenly spread entries from which on they are counted
SAMPLED = 32  # rows
MOST = 50_000  # their products
STEPS = 2  # in which a number doubles: an expression is made once for all operands that are as alike

Join = tuple[int, int]


class Statistics(NamedTuple):
    """Of two operands: the products of their entries, and how many of these each entry of the result takes."""

    products: float
    collisions: float


def stored_about(bits: int) -> float:
    """A number of entries of so many bits."""
    return 0.75 * 2.0**bits if bits > 0 else 0.0


def joins(terms: Sequence[str], values: Sequence[Any]) -> dict[Join, tuple[int, int]]:
    """Of pairs of sparse operands that share one letter: their products and collisions, rounded logarithms.

    Parameters
    ----------
    terms : sequence of str
        The letters of each operand.
    values : sequence of array or sparse object
        All of them scipy's matrices: of others nothing is counted, they are taken to be spread evenly.

    Examples
    --------
    >>> A = sp.csr_array(np.ones((100, 100)))
    >>> statistics(joins(["ij", "jk"], [A, A]))[0, 1]
    Statistics(products=1048576.0, collisions=90.50966799187809)
    """
    if not all(_is_counted(*pair) for pair in zip(terms, values, strict=True)):
        return {}
    pairs = [pair for pair in combinations(range(len(values)), 2) if len(_shared(terms, pair)) == 1]
    if all(_even(terms, values, pair) < LARGE for pair in pairs):
        return {}
    return {pair: _counted(*_factors(terms, values, pair)) for pair in pairs}


def statistics(rounded: Mapping[Join, tuple[int, int]]) -> dict[Join, Statistics]:
    """What `joins` rounded."""
    return {pair: Statistics(*(2.0 ** (n / STEPS) for n in numbers)) for pair, numbers in rounded.items()}


def _is_counted(term: str, value: Any) -> bool:
    return sp.issparse(value) and value.ndim == 2 and len(set(term)) == 2 and not is_half(value)


def _shared(terms: Sequence[str], pair: Join) -> str:
    return "".join(set(terms[pair[0]]) & set(terms[pair[1]]))


def _even(terms: Sequence[str], values: Sequence[Any], pair: Join) -> float:
    """Products of operands whose entries are spread evenly."""
    first, second = (values[n] for n in pair)
    return float(first.nnz) * second.nnz / max(first.shape[terms[pair[0]].index(_shared(terms, pair))], 1)


def _factors(terms: Sequence[str], values: Sequence[Any], pair: Join) -> tuple[Any, Any]:
    """The operands in rows, such that their product sums over the letter that they share."""
    (a, b), letter = pair, _shared(terms, pair)
    first = values[a] if terms[a].index(letter) else transposed(values[a], (1, 0))
    second = transposed(values[b], (1, 0)) if terms[b].index(letter) else values[b]
    return compressed_rows(first), compressed_rows(second)


def _counted(first: Any, second: Any) -> tuple[int, int]:
    """Of ``first @ second``."""
    count = np.diff(second.indptr)
    products = float(count[first.indices].sum(dtype=np.float64))
    if not products:
        return 0, 0
    rows = np.unique(np.linspace(0, first.shape[0] - 1, SAMPLED).astype(np.int64))
    part = _ones(first[rows])
    own = np.cumsum(part @ count)
    part = part[: max(1, int(np.searchsorted(own, MOST)))]
    met = float((part @ count).sum())
    collisions = met / (part @ _ones(second)).nnz if met else 1.0
    return round(STEPS * np.log2(products)), round(STEPS * np.log2(collisions))


def _ones(rows: Any) -> Any:
    """The pattern: nothing cancels."""
    return sp.csr_array((np.ones(len(rows.indices), np.float32), rows.indices, rows.indptr), shape=rows.shape)


__all__ = ["Statistics", "joins", "statistics", "stored_about"]
