# SPDX-License-Identifier: Apache-2.0
"""A machine's rates are measured once, and taken where the model was trained with measured ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsetir.tuning import model as pretrained
from sparsetir.tuning import work
from sparsetir.tuning.work import USUAL, CoreRates, measured_rates

FAST = CoreRates(peak=4e11, private=8e11, last=2.4e11, memory=1e11)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Of whom rates were measured; nothing is kept from before or for later."""
    found: list[Any] = []

    def measure_rates(target: Any = None) -> CoreRates:
        found.append(target)
        return FAST

    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(work, "measure_rates", measure_rates)
    measured_rates.cache_clear()
    yield found
    measured_rates.cache_clear()


@pytest.mark.usefixtures("quick_ceilings")
@pytest.mark.slow
def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "SECONDS", 0.002)
    monkeypatch.setattr(work, "ROUNDS", 1)
    assert all(0 < rate < np.inf for rate in work.measure_rates().as_dict().values())


def test_rates_are_kept_for_other_processes(asked: list[Any], tmp_path: Path) -> None:
    assert measured_rates() == FAST
    measured_rates.cache_clear()  # as in another process
    assert measured_rates() == FAST
    assert asked == [None]
    (path,) = (tmp_path / "cache").rglob("rates-*.json")
    path.write_text("{")
    measured_rates.cache_clear()
    assert measured_rates() == FAST
    assert len(asked) == 2


def test_rates_are_those_that_the_model_knows(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = pretrained.pretrained()
    assert model is not None
    for is_placed, rates in ((False, USUAL), (True, FAST)):
        of = replace(model, about={**model.about, pretrained.PLACED: is_placed})
        monkeypatch.setattr(pretrained, "pretrained", lambda of=of: of)
        assert pretrained.rates_known() == rates
    assert asked == [None]
    monkeypatch.setattr(pretrained, "pretrained", lambda: None)
    assert pretrained.rates_known() == USUAL
