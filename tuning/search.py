# SPDX-License-Identifier: Apache-2.0
"""Which candidates to measure next.

A batch depends on nothing but the seed and the trials before it, so a search that was stopped goes on exactly as
it would have, and a recorded one can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sparsetir.schedules import Choices
from sparsetir.tuning.model import CostModel

BATCH = 4
WARMUP = 16
EPSILON = 0.15


class Search:
    """Portfolio first, then random candidates, then those the cost model ranks highest.

    Parameters
    ----------
    points : sequence of Choices
        The whole space.
    first : sequence of Choices
        Measured before anything else, in this order.
    features : callable
        Rows of numbers for a list of candidates.
    seed : int
    warmup : int
        Trials before the model has a say.
    epsilon : float
        Share of candidates that are drawn at random afterwards.
    """

    def __init__(
        self,
        points: Sequence[Choices],
        *,
        first: Sequence[Choices],
        features: Callable[[list[Choices]], np.ndarray],
        seed: int = 0,
        warmup: int = WARMUP,
        epsilon: float = EPSILON,
    ) -> None:
        self.points, self.first = list(points), list(first)
        known = list(dict.fromkeys([*points, *first]))
        self.features = dict(zip(known, features(known), strict=True))
        self.seed, self.warmup, self.epsilon = seed, warmup, epsilon
        self.told: dict[Choices, float] = {}

    def tell(self, choices: Choices, seconds: float | None) -> None:
        """Note a trial; `seconds` is None if it failed. A second time for the same candidate is ignored.

        Candidates outside the space are ignored too.
        """
        if choices not in self.features:
            return
        self.told.setdefault(choices, float("inf") if seconds is None else seconds)

    def ask(self) -> list[Choices]:
        """The next candidates; none when the space is exhausted."""
        trials = list(self.told.items())
        begun = len(trials) - len(trials) % BATCH
        batch = [c for c in self._batch(dict(trials[:begun])) if c not in self.told]
        # Records of another search may have used this batch up.
        return batch or self._batch(self.told)

    def _batch(self, known: dict[Choices, float]) -> list[Choices]:
        picked = [c for c in self.first if c not in known][:BATCH]
        open_points = [c for c in self.points if c not in known and c not in picked]
        rng = np.random.default_rng([self.seed, len(known)])
        ranked = self._ranked(open_points, known)
        while open_points and len(picked) < BATCH:
            by_model = ranked is not None and rng.random() >= self.epsilon
            choice = ranked.pop(0) if by_model and ranked else open_points[int(rng.integers(len(open_points)))]
            open_points.remove(choice)
            picked.append(choice)
            ranked = [c for c in ranked if c != choice] if ranked is not None else None
        return picked

    def _ranked(self, candidates: list[Choices], known: dict[Choices, float]) -> list[Choices] | None:
        """`candidates`, the most promising first; None while too little is known."""
        seconds = np.array(list(known.values()))
        if len(known) < self.warmup or not np.isfinite(seconds).any() or not candidates:
            return None
        model = CostModel(self._rows(known), seconds, seed=self.seed)
        order = np.argsort(-model.predict(self._rows(candidates)), kind="stable")
        return [candidates[n] for n in order]

    def _rows(self, candidates: Iterable[Choices]) -> np.ndarray:
        return np.array([self.features[c] for c in candidates])
