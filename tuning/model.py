# SPDX-License-Identifier: Apache-2.0
"""The cost model: gradient-boosted trees from features to the logarithm of the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ROUNDS = 60
# One thread: the result does not depend on the machine, and a fit on some hundred rows takes milliseconds.
SETTINGS = {
    "objective": "reg:squarederror",
    "max_depth": 5,
    "eta": 0.2,
    "min_child_weight": 1,
    "subsample": 1.0,
    "nthread": 1,
    "verbosity": 0,
}
# A failed candidate is taught as this many times slower than the slowest that ran.
FAILED = 2.0


class CostModel:
    """Predicts how fast candidates are.

    Parameters
    ----------
    features : ndarray, shape (trials, features)
    seconds : ndarray, shape (trials,)
        Measured times; infinite for candidates that failed. At least one is finite.
    seed : int
    """

    def __init__(self, features: np.ndarray, seconds: np.ndarray, *, seed: int = 0) -> None:
        import xgboost

        self._xgboost: Any = xgboost
        self._width = features.shape[1]
        finite = seconds[np.isfinite(seconds)]
        known = np.where(np.isfinite(seconds), seconds, FAILED * finite.max())
        labels = -np.log(known / finite.min())
        data = xgboost.DMatrix(features, label=labels, nthread=1)
        self._booster = xgboost.train({**SETTINGS, "seed": seed}, data, num_boost_round=ROUNDS)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Scores, higher for faster; differences are ratios of times on a logarithmic scale."""
        known = of_width(features, self._width)
        scores: np.ndarray = self._booster.predict(self._xgboost.DMatrix(known, nthread=1))
        return scores

    def importance(self, names: Sequence[str]) -> dict[str, float]:
        """Each feature's share of what the trees gain, the most important first; those not used are left out."""
        gains = self._booster.get_score(importance_type="total_gain")
        total = sum(gains.values()) or 1.0
        found = {names[int(key[1:])]: float(value) / total for key, value in gains.items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def of_width(rows: Sequence[np.ndarray] | np.ndarray, width: int) -> np.ndarray:
    """Rows with so many columns: later ones are dropped, missing ones are not numbers.

    Columns are added during a search where a format has knobs that those before it had not.
    """
    found = np.full((len(rows), width), np.nan, np.float32)
    for place, row in zip(found, rows, strict=True):
        place[: len(row)] = row[:width]
    return found
