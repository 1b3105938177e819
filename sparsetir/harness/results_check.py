# SPDX-License-Identifier: Apache-2.0
"""Whether a result with a pattern of its own is right: some rows at a time, by scipy in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.harness.products import TOLERANCE, WrongResultError
from sparsetir.harness.reference import differs
from sparsetir.harness.results import OPERATIONS, ResultCase, ones, sorted_csr

PRODUCTS = 1 << 23  # of the rows that are judged at once


@dataclass(frozen=True)
class Expected:
    """Some rows of a result.

    Parameters
    ----------
    pattern : scipy.sparse.csr_array
        Its coordinates, those of entries that cancel too.
    values : numpy.ndarray
        In float64.
    allowed : numpy.ndarray
        How far one of float32 may be from each.
    kept : int
        Entries of a row that are kept, where only some are.
    """

    pattern: Any
    values: np.ndarray
    allowed: np.ndarray
    kept: int

    @classmethod
    def of(cls, case: ResultCase, rows: slice) -> Expected:
        """The rows of a case by scipy."""
        operation = OPERATIONS[case.op]
        exact = [operand.astype(np.float64) for operand in case.operands]
        for n in operation.by_rows:
            exact[n] = exact[n][rows]
        # Ones tell the pattern: scipy leaves out what cancels.
        pattern = sorted_csr(operation.compute(*map(ones, exact)))
        values, magnitudes = (at_pattern(operation.compute(*of), pattern) for of in (exact, map(abs, exact)))
        return cls(pattern, values, TOLERANCE * magnitudes, case.kept)


def at_pattern(matrix: Any, pattern: Any) -> np.ndarray:
    """The values of a matrix at the coordinates of a pattern that holds all of its own; 0 where it has none."""
    matrix = sorted_csr(matrix)
    if matrix.nnz == pattern.nnz:
        return matrix.data
    values = np.zeros(pattern.nnz, matrix.data.dtype)
    values[np.searchsorted(keys(pattern), keys(matrix))] = matrix.data
    return values


def keys(csr: Any) -> np.ndarray:
    """A number for each entry that grows with row and column."""
    rows = np.repeat(np.arange(csr.shape[0], dtype=np.int64), np.diff(csr.indptr))
    return rows * max(1, csr.shape[1]) + csr.indices


def check_result(name: str, found: Any, case: ResultCase) -> None:
    """Compare a result with the reference in float64, some rows at a time.

    Parameters
    ----------
    name : str
        What is said to be wrong.
    found : scipy.sparse.csr_array or a number
    case : ResultCase

    Raises
    ------
    WrongResultError
    """
    parts = (Expected.of(case, rows) for rows in blocks(case))
    problem = wrong_count(found, parts) if case.op == "triangles" else wrong_matrix(found, case, parts)
    if problem:
        raise WrongResultError(f"{name}: our result differs from the reference: {problem}; please report this")


def blocks(case: ResultCase) -> Iterator[slice]:
    """All rows of a result, a limited number of products at a time; at least one block."""
    first, height = case.operands[0], case.operands[0].shape[0]
    others = np.diff(case.operands[1].indptr).astype(np.int64)
    meet = others[first.indices] if case.op not in ("add", "multiply") else np.ones(first.nnz, np.int64)
    before = np.concatenate(([0], np.cumsum(meet)))[first.indptr]
    begin = 0
    while begin < height or begin == 0:
        end = max(begin + 1, int(np.searchsorted(before, before[begin] + PRODUCTS, side="right")) - 1)
        yield slice(begin, min(end, height))
        begin = end


def wrong_count(found: Any, parts: Iterable[Expected]) -> str | None:
    """What is wrong with a number of triangles, in words."""
    expected = int(sum(part.values.sum() for part in parts))
    return None if int(found) == expected else f"found {int(found)} triangles, expected {expected}"


def wrong_matrix(found: Any, case: ResultCase, parts: Iterable[Expected]) -> str | None:
    """What is wrong with a matrix, in words."""
    judge = wrong_largest if case.op == "topn" else wrong_rows
    if found.shape != case.shape:
        return f"found {found.shape[0]} x {found.shape[1]}, expected {case.shape[0]} x {case.shape[1]}"
    row = 0
    for part in parts:
        problem = judge(found[row : row + part.pattern.shape[0]], part)
        if problem:
            return problem
        row += part.pattern.shape[0]
    return None


def wrong_rows(found: Any, expected: Expected) -> str | None:
    """What is wrong with some rows."""
    pattern = expected.pattern
    for part in ("indptr", "indices"):
        have, want = getattr(found, part), getattr(pattern, part)
        if have.shape != want.shape:
            return f"found {found.nnz} entries, expected {pattern.nnz}"
        if not np.array_equal(have, want):
            at = int((have != want).argmax())
            return f"found {part}[{at}] = {have[at]}, expected {want[at]}"
    return first_wrong(found.data, expected.values, expected.allowed)


def first_wrong(found: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> str | None:
    """The first value that is not right, in words."""
    wrong = differs(found, expected, allowed)
    if not wrong.any():
        return None
    at = int(wrong.argmax())
    return f"found {found[at]:.7g}, expected {expected[at]:.7g}"


def wrong_largest(found: Any, expected: Expected) -> str | None:
    """As `wrong_rows`; which ones of equal values are kept is not said."""
    pattern, kept = expected.pattern, expected.kept
    lengths = np.minimum(np.diff(pattern.indptr), kept)
    if not np.array_equal(np.diff(found.indptr), lengths):
        return f"found {found.nnz} entries, expected {lengths.sum()}, at most {kept} in a row"
    have, every = keys(found), keys(pattern)
    if np.any(np.diff(have) <= 0) or not np.isin(have, every).all():
        return "found coordinates that the product does not store, or not in order"
    at = np.searchsorted(every, have)
    # As many as there are, each no smaller than the least of the right ones.
    least = nth_largest(pattern, expected.values, kept)[np.repeat(np.arange(found.shape[0]), lengths)]
    if np.any(found.data < least - expected.allowed[at] - TOLERANCE * np.abs(least)):
        return "found a value among the largest of its row that is not one of them"
    return first_wrong(found.data, expected.values[at], expected.allowed[at])


def nth_largest(pattern: Any, values: np.ndarray, kept: int) -> np.ndarray:
    """Of each row: its largest value but ``kept - 1``, or its least where it has fewer entries; 0 where it has none."""
    lengths = np.diff(pattern.indptr)
    rows = np.repeat(np.arange(pattern.shape[0]), lengths)
    ordered = np.append(values[np.lexsort((-values, rows))], 0.0)
    return np.where(lengths > 0, ordered[pattern.indptr[:-1] + np.minimum(lengths, kept) - 1], 0.0)


__all__ = ["check_result"]
