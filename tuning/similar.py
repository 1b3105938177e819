# SPDX-License-Identifier: Apache-2.0
"""Warm start of a search: the best candidates of similar matrices, from the records of a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2, sqrt

from sparsetir.tuning.records import Database, Key, Record
from sparsetir.tuning.space import Candidate

# Generated matrices of one family with 20,000 and 100,000 entries are 0.3 to 0.7 apart; of pairs from different
# families, one in twenty-five is nearer than this.
RADIUS = 0.6
PATTERNS, EACH = 2, 2  # how many patterns are asked, and for how many candidates each
FARTHEST = 4.0  # that one number counts
# Grow with the matrix: a kernel that suits a matrix suits a larger one of the same kind.
SIZES = ("nnz", "rows", "columns", "fibers_0", "fibers_1", "row_max", "column_max", "reuse", "diagonals", "profile")
IMAGE = "cell_"  # numbers of the density image, which are small and many
SIZE_WEIGHT = 0.1


@dataclass
class Neighbour:
    """A pattern in a database.

    Parameters
    ----------
    distance : float
    records : list of Record
        Of its candidates that ran.
    """

    distance: float
    records: list[Record] = field(default_factory=list)

    def best(self, count: int) -> list[Candidate]:
        """Return its fastest candidates."""
        ranked = sorted(self.records, key=lambda r: (r.seconds or 0.0, r.candidate.key))
        return list(dict.fromkeys(r.candidate for r in ranked))[:count]


def distance(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return the distance of two patterns by the numbers of `features.of_pattern`; infinite if none are shared.

    Sizes count little.
    """
    common = [name for name in first if name in second and not name.startswith(IMAGE)]
    weights = [SIZE_WEIGHT if name in SIZES else 1.0 for name in common]
    apart = [min(abs(first[name] - second[name]), FARTHEST) for name in common]
    total = sum(weights)
    return sqrt(sum(w * a * a for w, a in zip(weights, apart, strict=True)) / total) if total else float("inf")


def neighbours(
    records: Database, key: Key, facts: Mapping[str, float], fixed: Mapping[str, int], *, radius: float = RADIUS
) -> list[Neighbour]:
    """Return the patterns in a database that are near one's own, the nearest first.

    Records count if they are of the same program, dtype, target and number of threads, and of the same sizes that are
    compiled in; of the very same pattern, those of other sizes count too, by how far they are.

    Parameters
    ----------
    records : Database
    key : Key
        Of the search; its own records do not count.
    facts : mapping of str to float
        Numbers of the pattern.
    fixed : mapping of str to int
        Sizes that are compiled in.
    radius : float
        Patterns farther away are left out.
    """
    by_place: dict[tuple[object, ...], Neighbour] = {}
    for other, record, line in records.of_program(key.program):
        like = (other.dtype, other.target, other.threads) == (key.dtype, key.target, key.threads)
        if not like or record.seconds is None or record.fixed.keys() != fixed.keys() or is_own(other, key):
            continue
        place = (other.pattern, *record.fixed.values())
        if place not in by_place:
            away = _away(other, key, record.fixed, fixed, facts, line.get("features", {}))
            by_place[place] = Neighbour(away)
        by_place[place].records.append(record)
    near = [n for n in by_place.values() if n.distance <= radius]
    return sorted(near, key=lambda n: n.distance)


def is_own(other: Key, key: Key) -> bool:
    """Return whether a record is one that the search reads anyway."""
    return (other.pattern, other.sizes, other.versions) == (key.pattern, key.sizes, key.versions)


def _away(
    other: Key,
    key: Key,
    other_sizes: Mapping[str, int],
    fixed: Mapping[str, int],
    facts: Mapping[str, float],
    features: Mapping[str, float],
) -> float:
    """Return how far a case is: of the same pattern by its sizes, else by its numbers if the sizes are equal."""
    if other.pattern == key.pattern:
        return SIZE_WEIGHT * sum(abs(log2(other_sizes[name] / fixed[name])) for name in fixed)
    return distance(facts, features) if dict(other_sizes) == dict(fixed) else float("inf")


def hints(records: Database, key: Key, facts: Mapping[str, float], fixed: Mapping[str, int]) -> Sequence[Candidate]:
    """Return the candidates that were best for the nearest patterns; none where no pattern is near."""
    neighbour_list = neighbours(records, key, facts, fixed)[:PATTERNS] if facts else []
    return list(dict.fromkeys(c for neighbour in neighbour_list for c in neighbour.best(EACH)))


__all__ = ["RADIUS", "Neighbour", "distance", "hints", "neighbours"]
