# SPDX-License-Identifier: Apache-2.0
"""From candidates of one workload to the rows of numbers that a cost model sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from sparsetir.formats.format import Format
from sparsetir.formats.pattern import Pattern, pattern
from sparsetir.schedules import Choices
from sparsetir.tuning import features
from sparsetir.tuning.analytic import Structure, terms
from sparsetir.tuning.candidate import Candidate
from sparsetir.tuning.estimate import Estimates
from sparsetir.tuning.features import Operands, Stored

# 0 where sizes are left open, as in the untuned kernel.
SPECIALISED = "specialised"


@dataclass(frozen=True, eq=False)
class Encoding:
    """What stays the same for all candidates of a workload.

    Parameters
    ----------
    facts : mapping of str to float
        Numbers of the pattern.
    described : Pattern or None
    own : Stored
        How the sparse argument is stored as it came.
    operands : Operands
    knobs : callable, optional
        The values of a template's knobs for a format, where one is searched. Columns are added then as candidates have
        knobs that those before had not.
    """

    facts: Mapping[str, float]
    described: Pattern | None
    own: Stored
    operands: Operands
    knobs: Callable[[Format | None], Mapping[str, tuple[Any, ...]] | None] | None = None
    _columns: list[str] = field(default_factory=list, init=False, repr=False)
    _work: dict[Stored, dict[str, float]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def estimates(self) -> Estimates:
        return Estimates(self.described, self.own, self.operands.itemsize)

    @cached_property
    def structure(self) -> Structure:
        return Structure.of(self.described)

    @cached_property
    def _facts(self) -> np.ndarray:
        """In the order of `fact_names`; what is not known, as the row lengths of a tensor, is not a number."""
        return np.array([self.facts.get(name, np.nan) for name in fact_names()], np.float32)

    def of(self, candidate: Candidate, *, specialised: bool = True) -> dict[str, float]:
        """The numbers that depend on the candidate, by name."""
        stored = self.estimates(candidate.format)
        nnz = self.structure.nnz
        values = self.knobs(candidate.format) if self.knobs is not None else None
        found = features.of_candidate(candidate, stored, self.operands, nnz, values)
        found |= terms(candidate, stored, self.operands, self.structure)
        found |= {SPECIALISED: float(specialised), **features.of_other_choices(candidate.choices)}
        if stored not in self._work:
            self._work[stored] = features.of_work(stored, self.operands, nnz)
        return found | self._work[stored]

    def named(self, candidate: Candidate, *, specialised: bool = True) -> dict[str, float]:
        """All numbers by name, rounded to what is worth writing down."""
        found = {**self.facts, **self.of(candidate, specialised=specialised)}
        return {name: float(f"{value:.5g}") for name, value in found.items()}

    def rows(self, candidates: Sequence[Candidate], *, specialised: bool = True) -> np.ndarray:
        """All numbers, a row for each candidate; not a number where one lacks a knob of another."""
        if self.knobs is not None:
            return self._rows_of_knobs(candidates, specialised)
        own = np.array([list(self.of(c, specialised=specialised).values()) for c in candidates], np.float32)
        return np.concatenate([np.broadcast_to(self._facts, (len(own), len(self._facts))), own], axis=1)

    def _rows_of_knobs(self, candidates: Sequence[Candidate], specialised: bool) -> np.ndarray:
        """The same by name, as candidates of different formats may have different knobs."""
        found = [{**self.facts, **self.of(candidate, specialised=specialised)} for candidate in candidates]
        for numbers in found:
            self._columns.extend(name for name in numbers if name not in self._columns)
        return np.array([[numbers.get(name, np.nan) for name in self._columns] for numbers in found], np.float32)

    @property
    def names(self) -> list[str]:
        """Of the columns of `rows`, those that are there so far."""
        return [*fact_names(), *self.of(Candidate())] if self.knobs is None else list(self._columns)


@cache
def fact_names() -> tuple[str, ...]:
    """The names of the numbers of a matrix, in order."""
    small = sp.csr_array(np.eye(2, dtype=np.float32))
    return tuple(features.of_pattern(pattern(small)) | features.density(small.indptr, small.indices, 2))


@cache
def matrix_names() -> tuple[str, ...]:
    """The names of what a model sees, in order."""
    return tuple(Encoding({}, None, Stored(2, 28), Operands(1, 8, 8, 4, 1)).names)


@cache
def pattern_names() -> frozenset[str]:
    """Those of `matrix_names` that say something about the matrix and nothing about the candidate."""
    small = Encoding({}, None, Stored(1, 1), Operands(1, 1, 1, 1, 1))
    return frozenset(matrix_names()) - frozenset(small.of(Candidate()))


@cache
def choice_names() -> frozenset[str]:
    """Those of `matrix_names` that say what was chosen for how many columns, whatever the matrix."""
    kinds = {f"is_{kind or 'own'}" for kind in features.KINDS}
    return frozenset(matrix_names()) & {*kinds, *Choices().as_dict(), "feat", "width", "threads", SPECIALISED}


__all__ = ["SPECIALISED", "Encoding", "choice_names", "fact_names", "matrix_names", "pattern_names"]
