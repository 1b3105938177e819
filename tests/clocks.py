# SPDX-License-Identifier: Apache-2.0
"""Times that comparisons find, in place of those of a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from sparsetir.tuning import measure

Clock = Callable[[Mapping[Any, Any]], Mapping[Any, float]]


def keep_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let every comparison of several cases find the seconds that a function of the cases says."""

    def turns(cases: Mapping[Any, Any], **_how: Any) -> np.ndarray:
        found = clock(cases)
        return np.array([[found[name]] for name in cases])

    monkeypatch.setattr(measure, "turns", turns)
