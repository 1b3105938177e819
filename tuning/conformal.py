# SPDX-License-Identifier: Apache-2.0
"""How far a model's gains can be believed: bounds that hold for nine matrices in ten.

The model names its favourite of each case that it was not trained on, and says how many times faster than the untuned
kernel it is. Split-conformal prediction takes the quantile of what it was wrong by as what it will be wrong by next
time: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005. Cases are grouped by what the program
does and by how near the matrix is to a family that the model knows, each group with quantiles of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

import numpy as np

from sparsetir.tuning.evaluate import Ranking

LEVEL = 0.9
LEAST = 40  # cases of a group that has quantiles of its own
# What families are told apart by: numbers of a matrix that do not grow with it.
COMPARED = ("row_cv", "row_gini", "row_empty", "column_gini", "panel_columns", "diagonal_share", "fill_4x4", "uneven_8")


@dataclass(frozen=True)
class Bounds:
    """Bounds for gains that a model expects, as logarithms.

    Parameters
    ----------
    margins : mapping of str to (float, float, float)
        By group, the quantiles of what the model was wrong by: those of an interval's ends, and in between the one of
        a bound from below. The group "" is of all cases.
    centres : sequence of sequence of float
        Of the families that were trained on, by the numbers `COMPARED`.
    near : float
        How far the nearest family is at most, where a matrix counts as near.
    level : float
        How many of a hundred the bounds are to hold for, as a share.
    """

    margins: Mapping[str, Sequence[float]]
    centres: Sequence[Sequence[float]] = ()
    near: float = float("inf")
    level: float = LEVEL

    @classmethod
    def fit(cls, found: Sequence[Ranking], level: float = LEVEL) -> Bounds:
        """Those of how a model ranked cases of families that it was not trained on.

        Parameters
        ----------
        found : sequence of Ranking
        level : float
        """
        families = {r.case.family for r in found}
        centres = {f: _centre([r for r in found if r.case.family == f]) for f in families}
        away = {id(r): _distance(_place(r), [c for f, c in centres.items() if f != r.case.family]) for r in found}
        near = float(np.median(list(away.values()))) if away else float("inf")
        groups: dict[str, list[float]] = {"": []}
        for r in found:
            for name in {"", group(r.chosen, away[id(r)] <= near)}:
                groups.setdefault(name, []).append(r.wrong_by)
        kept = {name: quantiles(held, level) for name, held in groups.items() if not name or len(held) >= LEAST}
        return cls(kept, [list(c) for c in centres.values()], near, level)

    def interval(self, gain: float, row: Mapping[str, float]) -> tuple[float, float, float]:
        """The lower bound of a gain, and the ends of its interval.

        Parameters
        ----------
        gain : float
            The logarithm of how many times faster the model expects a kernel to be.
        row : mapping of str to float
            What the model sees of it.
        """
        is_near = _distance(_numbers(row), self.centres) <= self.near
        low, bound, high = self.margins.get(group(row, is_near), self.margins[""])
        return gain - bound, gain - high, gain - low

    def margin(self, row: Mapping[str, float]) -> float:
        """How many times faster than the untuned kernel one must look to be faster for sure; no less than 1."""
        return float(max(1.0, np.exp(-self.interval(0.0, row)[0])))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def group(row: Mapping[str, float], is_near: bool) -> str:
    """What the program does, and whether its matrix is near to known ones."""
    does = "entries" if row.get("work_is_sparse", 0) > 0 else "rows" if row.get("work_run", 0) > 1 else "numbers"
    return f"{does} {'near' if is_near else 'far'}"


def quantiles(wrong_by: Sequence[float], level: float) -> tuple[float, float, float]:
    """The conformal quantiles of an interval and, in between, of a one-sided bound.

    Examples
    --------
    >>> quantiles(list(range(99)), 0.9)
    (4.0, 89.0, 94.0)
    """
    ordered = np.sort(np.asarray(wrong_by, float))
    if not ordered.size:
        return float("-inf"), float("inf"), float("inf")
    tail = (1 - level) / 2
    upper = [_at(ordered, share) for share in (level, 1 - tail)]
    return -_at(-ordered[::-1], 1 - tail), *upper  # type: ignore[return-value]


def _at(ordered: np.ndarray, share: float) -> float:
    """The least number that a further one is below with that probability."""
    place = ceil(round(share * (ordered.size + 1), 9))
    return float(ordered[place - 1]) if place <= ordered.size else float(ordered[-1])


def _place(r: Ranking) -> np.ndarray:
    return _numbers(r.chosen)


def _numbers(row: Mapping[str, float]) -> np.ndarray:
    found = np.array([row.get(name, np.nan) for name in COMPARED], float)
    return np.where(np.isfinite(found), found, 0.0)


def _centre(found: Sequence[Ranking]) -> np.ndarray:
    return np.asarray(np.mean([_place(r) for r in found], axis=0))


def _distance(place: np.ndarray, centres: Sequence[Any]) -> float:
    """To the nearest centre."""
    return min((float(np.linalg.norm(place - np.asarray(c))) for c in centres), default=float("inf"))


# ------------------------------------------------------------------ how often they hold


@dataclass
class Coverage:
    """How often bounds held, for cases of one kind.

    Parameters
    ----------
    held, inside : list of bool
        Whether the gain was at least the bound, and in the interval.
    taken : list of float
        The gains of the kernels that were used: those whose bound is a gain.
    """

    held: list[bool] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        """For a table."""
        count = len(self.held)
        if not count:
            return ["0", "", "", "", "", ""]
        gain = f"{np.exp(np.mean(self.taken)):.2f}" if self.taken else ""
        slower = f"{np.mean(np.array(self.taken) < np.log(0.98)):.1%}" if self.taken else ""
        shares = [f"{np.mean(self.held):.1%}", f"{np.mean(self.inside):.1%}", f"{len(self.taken) / count:.0%}"]
        return [str(count), *shares, gain, slower]


HEADING = ["cases", "gain above its bound", "inside the interval", "kernel used", "its speedup", "slower than untuned"]


def coverage(found: Sequence[Ranking], by: str, level: float = LEVEL) -> dict[str, Coverage]:
    """How often bounds hold that were made of the other families or operations (`by`), and for all together."""
    table: dict[str, Coverage] = {}
    for name in sorted({str(getattr(r.case, by)) for r in found}):
        others = [r for r in found if str(getattr(r.case, by)) != name]
        bounds = Bounds.fit(others, level)
        for r in (r for r in found if str(getattr(r.case, by)) == name):
            bound, low, high = bounds.interval(np.log(r.gain), r.chosen)
            actual = float(np.log(r.actual))
            for held in (table.setdefault(name, Coverage()), table.setdefault("all", Coverage())):
                held.held.append(actual >= bound)
                held.inside.append(low <= actual <= high)
                held.taken += [actual] if bound > 0 else []
    return table


def cells(found: Mapping[str, Coverage], title: str) -> list[list[str]]:
    """`coverage` as the cells of a table, all together last."""
    ordered = [*(name for name in found if name != "all"), *(["all"] if "all" in found else [])]
    return [[title, *HEADING], *([name, *found[name].cells()] for name in ordered)]


__all__ = ["COMPARED", "LEVEL", "Bounds", "Coverage", "cells", "coverage", "group", "quantiles"]
